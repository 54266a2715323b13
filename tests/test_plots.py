"""Figures: each draws, says its numbers in words, labels its axes, and leaves pyplot alone."""

import html

import numpy as np
import pytest

from jfa import plots
from jfa.emulator import sweep
from jfa.emulator.errors import DeadlockError, LivelockError, RaceError, Touch, Wait
from jfa.emulator.timeline import Timeline
from jfa.layout import uniform_lengths
from jfa.masks import Band, block_kinds


def small_timeline() -> Timeline:
    """Two CTAs of one role each."""
    work = dict(kind="compute")
    return Timeline([(0, "load", "copy", 0.0, 4.0, work), (1, "load", "copy", 2.0, 7.0, work)], "a chip")


DEADLOCK = DeadlockError("stuck")
DEADLOCK.waits = (
    Wait(
        "load",
        "empties[0]",
        "mbarrier empties[0], parity 0: phase 0 (parity 0) in progress: 0 of 1 arrivals",
        (),
        (),
        ("mma",),
    ),
    Wait(
        "mma", "fulls[0]", "mbarrier fulls[0], parity 1: phase 1 (parity 1) in progress: 0 of 1 arrivals", (), ("load",)
    ),
    Wait("epilogue", "acc_fulls[0]", "mbarrier acc_fulls[0], parity 0", (), ("mma", "old")),
)
DEADLOCK.ended = ("old",)
RACE = RaceError("two accesses")
RACE.accesses = (
    Touch("epilogue", False, "acc[0]", (), "epilogue", {"epilogue": 2, "mma": 5, "tensor core of mma": 3, "store": 0}),
    Touch(
        "mma issued by mma",
        True,
        "acc[0]",
        (),
        "tensor core of mma",
        {"epilogue": 1, "mma": 9, "tensor core of mma": 7, "store": 0},
    ),
)
SWEPT = sweep.Result(
    [
        sweep.Mutant(sweep.Site("barrier_wait", "kernel.py", line), how, found)
        for line, how, found in [
            (9, "drop", "RaceError"),
            (9, "flip", "DeadlockError"),
            (4, "drop", ""),
            (7, "half", "NewError"),
        ]
    ]
)
HOLDS = [
    plots.Hold(0, 32, 0, 4, "mma", "S"),
    plots.Hold(0, 32, 4, 9, "reduce", "dQ"),
    plots.Hold(32, 32, 2, 8, "mma", "dV"),
]
NO_AXES = {"blocks", "number_grids", "wait_graph"}  # diagrams: their axes mean nothing
NO_YLABEL = {"panels", "rulers", "segments", "strips", "timelines"}  # each line of these has a name
PICTURES = {
    "lines": (
        lambda: plots.lines(
            [1, 2, 4], {"a": [1, 2, 3.5], "b": [4, 5, 6]}, title="t", xlabel="x", ylabel="y", log_x=True
        ),
        "3.5",
    ),
    "bands": (
        lambda: plots.bands(
            [1, 2], {"a": [[1, 2, 4.5], [3, 3, 3]]}, title="t", xlabel="x", ylabel="y", level=(2.0, "two")
        ),
        "4",
    ),
    "bars": (lambda: plots.bars(["u", "v"], {"a": [1, 2], "b": [0.25, 4]}, title="t", xlabel="x", ylabel="y"), "0.25"),
    "histograms": (
        lambda: plots.histograms({"u": uniform_lengths(50, 1, 9, seed=0)}, title="t", xlabel="length"),
        "median",
    ),
    "padded_and_packed": (lambda: plots.padded_and_packed([7, 3, 19, 5, 11]), "52.6 %"),
    "score_grids": (lambda: plots.score_grids({"causal": Band.make(True).dense(4, 4)}, title="t"), "37.5"),
    "block_map": (
        lambda: plots.block_map(block_kinds(Band.make(True), 8, 8, 4, 4), title="t", block_m=4, block_n=4),
        "1 full, 2 partial, 1",
    ),
    "online_walk": (lambda: plots.online_walk([1.0, 2.0, 0.0, 5.0], 2), "0.04979"),  # exp(2 - 5)
    "panels": (lambda: plots.panels(["one", "two"], {"cycles": ([10.4, 20.6], "{:.0f}")}, title="t"), "21"),
    "segments": (
        lambda: plots.segments(
            {"row": [plots.Segment(0, 3, "mine"), plots.Segment(3, 5, "", None)]}, title="t", xlabel="x"
        ),
        "3   8  nobody's",
    ),
    "blocks": (
        lambda: plots.blocks(
            {"A": ((0, 0, 1, 1), "two\nlines", 0), "B": ((2, 0, 1, 3), "", 1)}, [("A", "B")], title="t"
        ),
        "A: two lines\nB\nA <-> B",
    ),
    "number_grids": (
        lambda: plots.number_grids(
            {"a": [[0], [50]], "a + 1": [[1], [51]]}, title="t", signs="+", masked={"a": [[0], [1]]}
        ),
        "a + 1: [[1], [51]]",
    ),
    "owners": (
        lambda: plots.owners({"by column": (np.array([[0, 1], [0, 1], [0, 1]]), "dQ", "dK")}, title="t"),
        "written by 2 programs, 2 programs, 2 programs\nby column: dK of each key tile written by program 0, program 1",
    ),
    "band_planes": (
        lambda: plots.band_planes({"causal": (4, 3, -(1 << 30), -1), "w": (3, 3, -1, 1)}, title="t"),
        "causal        4     3  open  -1      6                      1",
    ),
    "rulers": (
        lambda: plots.rulers({"a": [4.0, 0.5, 1.0], "b": [2.0, 3.0]}, title="t", xlabel="x", xlim=(0.25, 8)),
        "a      3       0.5        4\nb      2         2        3",
    ),
    "strips": (
        lambda: plots.strips({"a": [1.0, 2.0, 1.0], "b": [3.0, 3.0]}, title="t", xlabel="x", log_x=True),
        "b       2               1         3        3",
    ),
    "timelines": (lambda: plots.timelines({"u": small_timeline(), "v": (small_timeline(), 1)}), "7 cycles"),
    "wait_graph": (lambda: plots.wait_graph(DEADLOCK), "cycle: load -> mma -> load"),
    "race_clocks": (lambda: plots.race_clocks(RACE), "later knows 1 of the 2 steps of epilogue"),
    "sweep_map": (lambda: plots.sweep_map(SWEPT), "4 broken kernels, 3 found"),
    "gantt": (
        lambda: plots.gantt(
            {"a": [[("7", 0, 4), ("x", 4, 5)], [("9", 1, 3)]], "b": [[("7", 0, 8)], []]},
            title="t",
            xlabel="x",
            bound=(5, "b"),
        ),
        "a         1  9         2  60%",
    ),
    "tmem_map": (lambda: plots.tmem_map(HOLDS, title="t", columns=64), "0..31    4     9   reduce  dQ"),
    "worker_loads": (lambda: plots.worker_loads({"a": [[0, 2], [1]]}, [1.0, 2.0, 3.0]), "1.333"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_an_image_its_numbers_and_axis_labels(name):
    make, number = PICTURES[name]
    picture = make()
    assert number in picture.text and repr(picture) == picture.text
    assert picture.png().startswith(b"\x89PNG")
    page = picture._repr_html_()
    assert "<img" in page and "alt=" in page and html.escape(number) in page
    axes = picture.figure.axes
    assert picture.figure.get_suptitle() or all(a.get_title(loc="left") for a in axes)
    assert any(a.get_xlabel() for a in axes) or name in NO_AXES
    assert any(a.get_ylabel() for a in axes) or name in NO_AXES | NO_YLABEL


def test_words_that_do_not_fit_into_a_stretch_stand_above_it():
    picture = plots.segments(
        {"row": [plots.Segment(0, 95, "a"), plots.Segment(95, 5, "program 3")]}, title="t", xlabel="x"
    )
    assert [text.get_va() for text in picture.figure.axes[0].texts] == ["center", "bottom"]


def test_an_arrow_joins_the_edges_that_face_each_other():
    picture = plots.blocks({"A": ((0, 0, 1, 1), "", 0), "B": ((0.5, 2, 2, 1), "", 1)}, [("B", "A")], title="t")
    (arrow,) = [t for t in picture.figure.axes[0].texts if hasattr(t, "xyann")]
    assert {arrow.xy, arrow.xyann} == {(0.75, 1), (0.75, 2)}
    with pytest.raises(ValueError, match="side by side"):
        plots.blocks({"A": ((0, 0, 1, 1), "", 0), "B": ((2, 2, 1, 1), "", 1)}, [("A", "B")], title="t")


def test_no_figure_is_left_in_pyplot():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    plots.padded_and_packed([1, 2])
    assert plt.get_fignums() == before


def test_series_are_told_apart_without_color():
    picture = plots.lines([1, 2], {n: [1, 2] for n in "abcdefg"}, title="t", xlabel="x", ylabel="y")
    assert len({line.get_marker() for line in picture.figure.axes[0].lines}) == 7
    assert len(set(plots.CYCLE)) == len(set(plots.MARKERS)) == len(set(plots.HATCHES)) == 7


def test_table_aligns_numbers_right():
    text = plots.table(["name", "n"], [["a", 5], ["bcd", 1234], ["e", np.float64(0.123456)]])
    assert text.splitlines()[2:] == ["a          5", "bcd     1234", "e     0.1235"]


@pytest.mark.parametrize("name", ["block_map", "bars", "panels", "histograms"])
def test_a_long_title_is_wrapped_not_cut_off(name, monkeypatch):
    long = "a title that is far too long for the width that this small figure has " * 3
    make = {
        "block_map": lambda: plots.block_map(
            block_kinds(Band.make(True), 8, 8, 4, 4), title=long, block_m=4, block_n=4
        ),
        "bars": lambda: plots.bars(["u"], {"a": [1]}, title=long, xlabel="x", ylabel="y"),
        "panels": lambda: plots.panels(["u"], {"a": ([1], "{}")}, title=long),
        "histograms": lambda: plots.histograms({"u": [1, 2, 3]}, title=long, xlabel="x"),
    }
    figure = make[name]().figure
    figure.canvas.draw()
    title = figure._suptitle or figure.axes[0]._left_title
    assert title.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize("first, second", [((0, 0, 1, 1), (2, 0, 1, 1)), ((0, 3, 1, 1), (0, 0, 1, 1))])
def test_a_directed_arrow_ends_at_the_second_box(first, second):
    picture = plots.blocks({"A": (first, "", 0), "B": (second, "", 1)}, [("A", "B")], title="t", directed=True)
    assert picture.text.endswith("A -> B")
    (arrow,) = [t for t in picture.figure.axes[0].texts if getattr(t, "arrow_patch", None)]
    x, y, w, h = second
    assert x <= arrow.xy[0] <= x + w and y <= arrow.xy[1] <= y + h


def test_the_wait_graph_says_whom_each_task_waits_for():
    said = plots.wait_graph(DEADLOCK).text.splitlines()
    assert said[1] == "load waits for empties[0], where nobody has arrived yet; mma should"
    assert said[2] == "mma waits for fulls[0], where load arrived before"
    assert said[3] == "epilogue waits for acc_fulls[0], where mma and old (has ended) arrived before"


@pytest.mark.parametrize(
    "edges, cycle",
    [
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b", "c"]),
        ({"a": ["a"]}, ["a"]),
        ({"a": ["b", "c"], "b": [], "c": ["a"]}, ["a", "c"]),
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["gone"]}, []),
    ],
)
def test_a_cycle_is_found_and_drawn_bold(edges, cycle):
    error = DeadlockError("stuck")
    error.waits = tuple(Wait(task, f"bar of {task}", "", (), tuple(names)) for task, names in edges.items())
    picture = plots.wait_graph(error)
    last = picture.text.splitlines()[-1]
    assert last == "cycle: " + " -> ".join([*cycle, *cycle[:1]]) if cycle else last.startswith("no cycle")
    arrows = [
        text.arrow_patch for text in picture.figure.axes[0].texts if getattr(text, "arrow_patch", None) is not None
    ]
    bold = [arrow for arrow in arrows if arrow.get_linewidth() > 2]
    assert len(bold) == 2 * len(cycle) and len(arrows) == len(edges) + sum(map(len, edges.values()))


def test_the_clocks_leave_out_lines_that_neither_access_knows_of():
    picture = plots.race_clocks(RACE)
    assert [t.get_text() for t in picture.figure.axes[0].get_yticklabels()] == ["epilogue", "mma", "tensor core of mma"]
    assert "store" not in picture.text


def test_a_sweep_is_drawn_in_the_order_of_lines_and_says_what_was_not_found():
    picture = plots.sweep_map(SWEPT)
    axes = picture.figure.axes[0]
    assert [t.get_text().rpartition("line ")[2] for t in axes.get_yticklabels()] == ["4)", "7)", "9)"]
    letters = {(t.get_position()[0] - 0.5, t.get_position()[1] - 0.5): t.get_text() for t in axes.texts}
    assert letters == {(0, 2): "R", (1, 2): "D", (0, 0): "-", (2, 1): "?"}
    legend = [t.get_text() for t in picture.figure.legends[0].get_texts()]
    assert legend == ["R: race", "D: deadlock", "-: not found", "?: NewError", "empty: does not apply"]


@pytest.mark.parametrize("draw", [plots.wait_graph, plots.race_clocks])
def test_pictures_of_other_errors_are_refused(draw):
    with pytest.raises(ValueError, match="LivelockError is no"):
        draw(LivelockError("no end"))


def test_a_log_uniform_sample_is_flat_in_bins_of_equal_ratio():
    sample = np.geomspace(16, 4096, 8 * 50)  # 50 values per octave
    figure = plots.histograms({"u": sample}, title="t", xlabel="x", bins=8, log_x=True).figure
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert [round(bar.get_height()) for bar in axes.patches] == [50] * 8


def test_ticks_that_stand_too_near_go_a_line_lower():
    rows = {"rows": [plots.Segment(0, 56, "all")]}
    axes = plots.segments(rows, title="t", xlabel="x", ticks=[0, 5, 38, 39, 56]).figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "5", "38", "\n39", "56"]


def test_columns_are_drawn_in_their_owners_color_over_their_time():
    axes = plots.tmem_map(HOLDS, title="t", columns=64).figure.axes[0]
    boxes = [(c.get_paths()[0].get_extents(), c.get_facecolor()[0].tolist()) for c in axes.collections if c.get_paths()]
    assert [b.bounds for b, _ in boxes] == [(0, 0, 4, 32), (2, 32, 6, 32), (4, 0, 5, 32)]  # by time: S, dV, dQ
    colors = [color for _, color in boxes]
    assert colors[0] == colors[1] != colors[2]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "32", "64"]


def test_a_hold_of_one_column_is_a_thick_line_with_its_words_above():
    holds = [plots.Hold(0, 64, 0, 9, "mma", "P"), plots.Hold(64, 1, 2, 3, "correction", "alpha")]
    axes = plots.tmem_map(holds, title="t", columns=128).figure.axes[0]
    assert [(list(line.get_xdata()), line.get_linewidth()) for line in axes.lines] == [([2, 3], 4)]
    (words,) = [t for t in axes.texts if t.get_text() == "alpha"]
    assert words.xy == (2.5, 64) and words.get_va() != "top"
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "64", "128"], (
        "no tick of its own, which would cover one"
    )


def test_a_part_of_a_tmem_map_shows_what_overlaps_it():
    picture = plots.tmem_map(HOLDS, title="t", columns=64, span=(5, 8))
    assert "S" not in picture.text.split() and "dQ" in picture.text and picture.figure.axes[0].get_xlim() == (5, 8)


@pytest.mark.parametrize(
    "hold, words",
    [
        (plots.Hold(31, 1, 3, 5, "x"), "share a column"),
        (plots.Hold(16, 48, 8.5, 12, "x"), "share a column"),
        (plots.Hold(40, 32, 9, 10, "x"), "does not lie"),
        (plots.Hold(-1, 4, 9, 10, "x"), "does not lie"),
        (plots.Hold(0, 4, 12, 10, "x"), "ends before"),
    ],
)
def test_a_column_with_two_owners_or_outside_the_map_is_refused(hold, words):
    with pytest.raises(ValueError, match=words):
        plots.tmem_map([*HOLDS, hold], title="t", columns=64)


@pytest.mark.parametrize(
    "hold", [plots.Hold(0, 32, 9, 10, "x"), plots.Hold(32, 32, 0, 2, "x"), plots.Hold(32, 8, 8, 9, "x")]
)
def test_columns_may_change_hands_at_once(hold):
    assert "x" in plots.tmem_map([*HOLDS, hold], title="t", columns=64).text


def many_panels():
    names = [f"sequence {i}, length {n}" for i, n in enumerate((7, 3, 19, 5, 11))]
    grids = {name: np.tri(19) > 0 for name in names}
    lengths = {name: np.arange(1, 300) for name in names}
    rates = {name: ([300.0, 1514.0], "{:.0f}") for name in names}
    return {
        "score_grids": plots.score_grids(grids, title="t"),
        "histograms": plots.histograms(lengths, title="t", xlabel="length"),
        "panels": plots.panels(["one role", "the package's kernel"], rates, title="t"),
        "bars": plots.bars([f"version {i}" for i in range(12)], {"a": range(12)}, title="t", xlabel="x", ylabel="y"),
    }


def test_no_figure_is_wider_than_a_notebook_shows_it():
    widths = {name: picture.figure.get_figwidth() for name, picture in many_panels().items()}
    assert all(width <= plots.WIDEST for width in widths.values()), widths


def test_a_long_title_does_not_run_into_the_legend():
    """The title stands above the axes, the legend beside them: they may not meet where the title is the wider one."""
    title = "what a polynomial of degree three costs, and what bf16 costs beside it, in percent"
    picture = plots.lines([0, 1, 2], {"one": [1, 2, 3], "two": [3, 2, 1]}, title=title, xlabel="x", ylabel="y")
    picture.figure.draw_without_rendering()
    (axes,), (legend,) = picture.figure.axes, picture.figure.legends
    words = next(t for t in axes.get_children() if getattr(t, "get_text", str)() == title)
    assert not words.get_window_extent().overlaps(legend.get_window_extent())
