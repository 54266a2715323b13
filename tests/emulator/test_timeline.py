"""The timeline of a small stream through a ring of buffers: table, picture, trace, and the shares they show."""

import json

import pytest
import torch
from matplotlib.colors import to_rgba

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx")
import triton.language as tl  # noqa: E402
import triton.language.extra.tlx as tlx  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import jfa.emulator as emulator  # noqa: E402
from jfa.emulator import cli, timeline  # noqa: E402
from jfa.emulator.rates import B200  # noqa: E402
from jfa.emulator.timeline import Timeline  # noqa: E402
from tests.emulator import perfetto  # noqa: E402


@triton.jit
def stream(x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    tiles = tlx.local_alloc((ROWS, COLS), tl.float32, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
            total = tl.zeros((ROWS,), tl.float32)
            for k in range(chunks):
                tlx.barrier_wait(fulls[k % STAGES], (k // STAGES) & 1)
                total += tl.sum(tl.exp(tlx.local_load(tiles[k % STAGES])), axis=1)
                tlx.barrier_arrive(empties[k % STAGES], 1)
            tl.store(out_ptr + tl.arange(0, ROWS), total)
        with tlx.async_task(num_warps=1):  # producer
            for k in range(chunks):
                tlx.barrier_wait(empties[k % STAGES], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[k % STAGES], ROWS * COLS * 4)
                tlx.async_descriptor_load(x_desc, tiles[k % STAGES], [0, k * COLS], fulls[k % STAGES])


def launch(stages=2, chunks=6, rows=64, cols=64):
    x, out = torch.randn(rows, chunks * cols), torch.empty(rows)
    stream[(1,)](TensorDescriptor.from_tensor(x, [rows, cols]), out, chunks, ROWS=rows, COLS=cols, STAGES=stages)


def test_more_buffers_shorten_the_modelled_time_and_the_waits():
    one, three = (cli.record(lambda n=n: launch(stages=n), B200) for n in (1, 3))
    assert three.cycles < one.cycles
    assert sum(three.waits().values()) < sum(one.waits().values())


def test_the_exponentials_occupy_the_unit_for_the_cycles_that_the_rates_say():
    drawn = cli.record(launch, B200)
    busy = sum(end - begin for begin, end in drawn.occupied[(0, 0, 0), "mufu"])
    assert busy == pytest.approx(6 * 64 * 64 / B200["mufu"])
    assert drawn.busy("mufu") == pytest.approx(busy / drawn.cycles)


@triton.jit
def pair_product(a_desc, b_desc, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A pair's product, and 2 KiB that each CTA sends to its peer."""
    rank = tlx.cluster_cta_rank()
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N // 2), tl.bfloat16, 1)
    words = tlx.local_alloc((512,), tl.int32, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    bars = tlx.alloc_barriers(3)
    tlx.barrier_expect_bytes(bars[0], 4 * (M + N // 2) * K, pred=rank == 0)
    tlx.async_descriptor_load(a_desc, a[0], [rank * M, 0], bars[0], two_ctas=True)
    tlx.async_descriptor_load(b_desc, b[0], [0, rank * N // 2], bars[0], two_ctas=True)
    tlx.barrier_wait(bars[0], 0, pred=rank == 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[bars[1]], two_ctas=True)
    tlx.barrier_expect_bytes(bars[2], 2048)
    tlx.async_remote_shmem_store(words[0], tl.arange(0, 512), rank ^ 1, bars[2])
    tlx.barrier_wait(bars[1], 0)
    tlx.barrier_wait(bars[2], 0)
    at = (rank * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tlx.local_load(acc[0]))


def test_a_pairs_product_and_what_it_sends_occupy_both_sms():
    m, n, k = 128, 64, 32

    def launch_pair():
        boxes = [
            TensorDescriptor.from_tensor(torch.ones(2 * m, k).bfloat16(), [m, k]),
            TensorDescriptor.from_tensor(torch.ones(k, n).bfloat16(), [k, n // 2]),
        ]
        out = torch.zeros(2 * m, n)
        pair_product[(2,)](*boxes, out, M=m, N=n, K=k, ctas_per_cga=(2, 1, 1))
        assert (out == k).all()

    drawn = cli.record(launch_pair, B200)
    facts = dict(m=2 * m, n=n, k=k, itemsize_a=2, a_space="smem", two_cta=True)
    needs = B200.demand("mma", **facts).needs
    loads = 2 * (m + n // 2) * k / B200["smem"]
    sent = 2 * 2048 / B200["smem"]  # read or taken out of registers here, written there: of each CTA, one of both
    for cta in ((0, 0, 0), (1, 0, 0)):
        spans = {unit: sum(e - b for b, e in drawn.occupied[cta, unit]) for unit in ("tensor", "smem")}
        assert spans["tensor"] == pytest.approx(needs["tensor"])
        assert spans["smem"] == pytest.approx(needs["smem"] + loads + sent)
        assert [t.name for t in drawn.tracks(cta) if t.name == "MMA"] == ["MMA"]


def test_a_span_leaves_out_what_lies_outside():
    drawn = cli.record(launch, B200)
    first = drawn.occupied[(0, 0, 0), "mufu"][0]
    assert drawn.busy("mufu", first) == pytest.approx(1.0)
    assert drawn.busy("mufu", (0.0, first[0])) == 0.0


def test_the_table_names_roles_barriers_and_that_it_is_modelled():
    table = cli.record(launch, B200).table()
    assert table.startswith("modelled on B200")
    for word in ("consumer", "producer", "TMA", "fulls[0]", "unit: mufu"):
        assert word in table


def lane_titles(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_picture_has_a_lane_for_each_role_engine_and_unit():
    drawn = cli.record(launch, B200)
    figure = drawn.plot()
    share = [f"{drawn.busy(unit):.0%}" for unit in ("tma", "mufu")]
    assert lane_titles(figure) == ["producer", "consumer", f"TMA  {share[0]}", f"exp2 units  {share[1]}"]
    axes = figure.axes[0]
    assert "modelled" in axes.get_xlabel()
    kinds = [text.get_text() for text in axes.get_legend().get_texts()]
    assert kinds == ["compute", "wait", "occupied", "under way", "idle or queueing"]


def test_a_lane_says_how_busy_its_unit_is_in_the_cycles_that_are_shown():
    drawn = cli.record(launch, B200)
    first = drawn.occupied[(0, 0, 0), "mufu"][0]
    assert lane_titles(drawn.plot(span=first))[-1] == "exp2 units  100%"
    assert lane_titles(drawn.plot(span=(0.0, first[0])))[-1] == "exp2 units  0%"


def test_a_share_is_of_the_run_and_not_of_a_longer_axis():
    drawn = cli.record(launch, B200)
    assert lane_titles(drawn.plot(span=(0.0, 3 * drawn.end))) == lane_titles(drawn.plot())


def test_every_wait_of_the_stream_has_the_arrival_that_ended_it():
    drawn = cli.record(lambda: launch(stages=2), B200)
    waits = [e for e in drawn.events if e.kind == "wait"]
    pairs = drawn.signals()
    assert [waiting for _, waiting in pairs] == sorted(waits, key=lambda e: e.end)
    for source, waiting in pairs:
        expected = "TMA" if waiting.args["barrier"].startswith("fulls") else "consumer"
        assert source.track == expected and waiting.args["barrier"] in source.args["signals"]
        assert source.end == pytest.approx(waiting.end)


def test_arrows_stay_inside_their_cta_where_several_work_in_step():
    """Barriers of all CTAs have the same names, and equal CTAs complete their phases in the same cycle."""
    box = TensorDescriptor.from_tensor(torch.randn(64, 5 * 64), [64, 64])
    drawn = cli.record(lambda: stream[(3,)](box, torch.empty(64), 5, ROWS=64, COLS=64, STAGES=2), B200, max_ctas=3)
    waits = [e for e in drawn.events if e.kind == "wait"]
    pairs = drawn.signals()
    assert len(drawn.ctas()) == 3 and len(pairs) == len(waits)
    assert all(source.cta == waiting.cta for source, waiting in pairs)
    for cta in drawn.ctas():
        ended = [w for w in waits if w.cta == cta]
        arrows = [t for t in drawn.plot(cta, (drawn.start, drawn.end + 1)).axes[0].texts if t.get_text() == ""]
        assert len(arrows) == len(ended) > 5


def test_arrows_stay_inside_their_cluster_and_lead_from_one_cta_of_it_to_the_other():
    m, n, k = 128, 64, 32
    boxes = [
        TensorDescriptor.from_tensor(torch.ones(2 * m, k).bfloat16(), [m, k]),
        TensorDescriptor.from_tensor(torch.ones(k, n).bfloat16(), [k, n // 2]),
    ]
    out = torch.zeros(2 * m, n)
    launch_pairs = lambda: pair_product[(4,)](*boxes, out, M=m, N=n, K=k, ctas_per_cga=(2, 1, 1))
    drawn = cli.record(launch_pairs, B200, max_ctas=4)
    pairs = drawn.signals()
    assert {waiting.cta[0] for _, waiting in pairs} == {0, 1, 2, 3}
    assert all(source.cta[0] // 2 == waiting.cta[0] // 2 for source, waiting in pairs)
    assert any(source.cta != waiting.cta for source, waiting in pairs)
    for cta in drawn.ctas():
        axes = drawn.plot(cta, (drawn.start, drawn.end + 1)).axes[0]
        colors = [t.arrow_patch.get_edgecolor() for t in axes.texts if t.get_text() == ""]
        here, ended = to_rgba("black"), [(s.cta, w.cta) for s, w in pairs if w.cta == cta]
        elsewhere = sum(source != waiting for source, waiting in ended)
        assert (colors.count(here), len(colors)) == (len(ended) - elsewhere, len(ended))
        named = [t.get_text() for t in axes.get_legend().get_texts()]
        assert ("ended by another CTA" in named) == (elsewhere > 0)


def test_barriers_say_who_arrives_and_who_waits():
    drawn = cli.record(lambda: launch(stages=3), B200)
    assert drawn.barriers() == {"fulls": (("TMA",), ("consumer",)), "empties": (("consumer",), ("producer",))}
    assert drawn.barriers((0, 0, 0)) == drawn.barriers() and drawn.barriers((9, 0, 0)) == {}


def test_an_arrow_is_drawn_for_every_wait_that_ends_inside_the_span():
    drawn = cli.record(launch, B200)
    span = (drawn.start, drawn.start + 0.6 * drawn.cycles)
    ended = [waiting for _, waiting in drawn.signals() if span[0] < waiting.end < span[1]]
    arrows = [t for t in drawn.plot(span=span).axes[0].texts if t.get_text() == ""]
    assert len(arrows) == len(ended) > 3


def test_copies_carry_the_name_of_their_buffer_and_its_turn():
    drawn = cli.record(lambda: launch(stages=2, chunks=4), B200)
    names = [words for lane in drawn.lanes((0, 0, 0)) if lane.track == "TMA" for words, _, _ in lane.names]
    assert names == ["tiles[0] #0", "tiles[1] #0", "tiles[0] #1", "tiles[1] #1"]


def one_copy_of(name, begins, occupied, under_way):
    """A timeline of a TMA that writes tiles called ``name`` at the cycles ``begins``."""
    facts = {"kind": "async", "bytes": 64, "signals": ("full[0]",)}
    events = [((0,), "TMA", name, begin, begin + occupied + under_way, facts) for begin in begins]
    return Timeline(events, "B200", {((0,), "tma"): [(begin, begin + occupied) for begin in begins]})


def written(line, span=None):
    """(words, color, height in the lane) of each name in the picture, from left to right."""
    texts = sorted((t for t in line.plot(span=span).axes[0].texts if t.get_text()), key=lambda t: t.get_position()[0])
    return [(t.get_text(), t.get_color(), t.get_position()[1]) for t in texts]


def test_a_name_stands_in_its_full_bar_if_it_fits_and_else_over_the_thin_one():
    wide = one_copy_of("keys[0]", (0, 2000), 900, 100)
    assert written(wide) == [("keys[0] #0", "white", 0), ("keys[0] #1", "white", 0)]
    thin = one_copy_of("keys[0]", (0, 2000), 40, 900)
    assert [(words, color) for words, color, _ in written(thin)] == [("keys[0] #0", "black"), ("keys[0] #1", "black")]
    assert all(height < 0.1 for *_, height in written(thin)), "above the thin bar"
    narrow = one_copy_of("keys[0]", (0, 2000), 40, 160)
    assert [words for words, *_ in written(narrow)] == ["keys[0]", "keys[0]"]
    assert written(one_copy_of("keys[0]", (0, 2000), 40, 40)) == []


def test_a_name_too_long_for_its_box_is_short_and_explained_below_the_axis():
    line = one_copy_of("keys[3]", (0, 2000), 40, 100)
    assert [words for words, *_ in written(line)] == ["k3", "k3"]
    below = line.plot().axes[0].get_xlabel()
    assert below == "modelled cycles on B200\nin the boxes: k = keys"
    whole = one_copy_of("keys[3]", (0, 2000), 900, 100)
    assert "\n" not in whole.plot().axes[0].get_xlabel(), "nothing was shortened"
    letter = one_copy_of("k[3]", (0, 2000), 60, 10)
    assert [words for words, *_ in written(letter)] == ["k3", "k3"]
    assert "\n" not in letter.plot().axes[0].get_xlabel(), "k3 needs no word beside k[3]"


def test_short_names_of_two_buffers_differ():
    assert timeline._initials(
        ["accs[0] #0", "alphas[1] #0", "s[0] #1", "sums[0] #0", "dq_tiles[1] #4", "dk[0] #0"]
    ) == {
        "accs": "ac",
        "alphas": "al",
        "s": "s",
        "sums": "su",
        "dq_tiles": "dq",
        "dk": "dk",
    }


def test_names_over_thin_bars_do_not_cover_each_other_or_a_full_bar():
    line = one_copy_of("parts[0]", (0, 60, 120, 2000), 50, 1500)
    figure = line.plot()
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text()]
    assert len(boxes) == 2, "of three copies that are under way together one has a name"
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])
    bar = figure.axes[0].transData.transform((2000, 0))[0]
    assert all(box.x1 < bar or box.x0 > bar for box in boxes)


@pytest.mark.parametrize(
    "name, target, short",
    [
        ("tiles[1]", "tiles[1]", "tiles[1]"),
        ("kv.buffers[2]", "kv[2]", "buffers[2]"),
        ("scores.s[0] = q.buffers[0] @ kv.buffers[1].T", "s[0]", "s[0] = buffers[0] @ buffers[1].T"),
        ("memory.accs.tiles[1] += p[1][:, 0:64] @ v[0]", "accs[1]", "tiles[1] += p[1][:, 0:64] @ v[0]"),
        ("commit kv.empties[0]", "empties[0]", "commit empties[0]"),
    ],
)
def test_the_owners_of_a_buffer_are_left_out_of_its_short_names(name, target, short):
    event = Timeline([((0,), "MMA", name, 0.0, 1.0, {})]).events[0]
    assert (event.target, event.short) == (target, short)


@pytest.mark.parametrize("what", ["stream", "blackwell_fa_ws"])
def test_the_chrome_trace_is_one_that_perfetto_reads(tmp_path, what):
    from jfa.emulator.tutorials import RECIPES

    run = launch if what == "stream" else RECIPES[what]
    drawn = cli.record(run, B200, max_ctas=1)
    trace = json.loads(drawn.chrome_trace(tmp_path / "trace.json").read_text())
    assert trace["otherData"] == {"chip": "B200", "times": "modelled"}
    assert not perfetto.faults(trace)
    events = trace["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) == len(drawn.signals()) > 5
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert {"tma occupied", "mufu occupied"} <= counters
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"TMA"} | ({"producer", "consumer"} if what == "stream" else {"MMA"}) <= names
    assert any(".py:" in e["args"].get("src", "") for e in events if e["ph"] == "X")


@pytest.mark.parametrize(
    "edit, fault",
    [
        (lambda xs: xs[1].update(ts=xs[0]["ts"] + xs[0]["dur"] / 2), "overlap"),
        (lambda xs: xs[0].update(dur=0), "no length"),
        (lambda xs: xs[0].update(tid=99), "no name"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_found_out(tmp_path, edit, fault):
    trace = json.loads(cli.record(launch, B200).chrome_trace(tmp_path / "trace.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    edit(sorted((e for e in slices if e["tid"] == slices[0]["tid"]), key=lambda e: e["ts"]))
    assert any(fault in found for found in perfetto.faults(trace))


def test_a_counter_is_1_for_as_long_as_its_unit_is_occupied(tmp_path):
    drawn = cli.record(launch, B200)
    events = json.loads(drawn.chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    edges = [(e["ts"], e["args"]["occupied"]) for e in events if e["name"] == "mufu occupied"]
    assert [value for _, value in edges] == [1, 0] * (len(edges) // 2)
    assert all(a < b for (a, _), (b, _) in zip(edges, edges[1:]))
    busy = sum(end - begin for (begin, _), (end, _) in zip(edges[::2], edges[1::2]))
    assert busy == pytest.approx(drawn.busy("mufu") * drawn.cycles)


def test_a_question_to_the_launch_hardware_is_under_way_until_its_answer_is_there():
    """It occupies no unit; its lane says what the arrow to the first role that waits comes from."""
    facts = {"kind": "async", "bytes": 16, "signals": ("full[0]",)}
    asked = ((0,), "CLC", "try_cancel", 10.0, 700.0, facts)
    waited = ((0,), "load", "wait full[0]", 0.0, 700.0, {"kind": "wait", "barrier": "full[0]"})
    lanes = {lane.track: lane for lane in Timeline([waited, asked], "B200").lanes((0,))}
    assert lanes["CLC"].bars == {"under way": [(10.0, 700.0)]} and lanes["CLC"].title == "CLC"
    assert [name.words for name in lanes["CLC"].names] == ["try_cancel #0"]


def test_a_role_that_does_next_to_nothing_has_no_lane():
    before = ((0,), "main", "load", 0.0, 0.5, {"kind": "compute"})
    works = ((0,), "consumer", "alu", 0.5, 2000.0, {"kind": "compute"})
    line = Timeline([before, works], "B200")
    assert lane_titles(line.plot()) == ["consumer"] and [t.name for t in line.tracks()] == ["main", "consumer"]


def test_a_run_without_a_trace_is_refused():
    launch()
    with pytest.raises(ValueError, match="trace=True"):
        Timeline.of(emulator.last())


def test_a_part_of_a_run_is_cut_there():
    drawn = cli.record(launch, B200)
    middle = drawn.start + drawn.cycles / 2
    part = drawn.between(drawn.start, middle)
    assert (part.start, part.end) == (drawn.start, middle) and part.cycles == pytest.approx(drawn.cycles / 2)
    assert all(part.start <= e.start <= e.end <= part.end for e in part.events)
    for (cta, name), spans in part.occupied.items():
        whole = sum(min(b, middle) - a for a, b in drawn.occupied[cta, name] if a < middle)
        assert sum(b - a for a, b in spans) == pytest.approx(whole)
    assert part.busy("mufu") == pytest.approx(drawn.busy("mufu", (drawn.start, middle))) and part.busy("mufu") > 0
    with pytest.raises(ValueError, match="no event lies between"):
        drawn.between(drawn.end + 1, drawn.end + 2)


def test_two_runs_stand_side_by_side():
    one, three = (cli.record(lambda n=n: launch(stages=n), B200) for n in (1, 3))
    table = one.beside(three, ("one.py:launch", "three.py:launch"))
    assert f"one.py:launch {one.cycles:,.0f} cycles" in table and f"B / A: {three.cycles / one.cycles:.3f}" in table
    (unit,) = [line for line in table.splitlines() if line.startswith("unit: mufu")]
    assert unit.split()[2:] == [f"{run.busy('mufu'):.1%}" for run in (one, three)]
    assert "-" not in one.beside(one).split("waits B")[1].split("waits that")[0], "the same roles on both sides"


@triton.jit
def double(x_ptr, y_ptr):
    at = tl.arange(0, 64)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


def test_of_several_kernels_one_can_be_named():
    def both():
        launch()
        double[(1,)](torch.ones(64), torch.empty(64))

    alone = cli.record(launch, B200)
    assert cli.record(both, B200, "stream").cycles == alone.cycles
    assert cli.record(both, B200).cycles == cli.record(both, B200, "double").cycles < alone.cycles
    with pytest.raises(LookupError, match="no kernel named gemm was launched, but stream, double"):
        cli.record(both, B200, "gemm")


def test_an_engines_arithmetic_costs_no_task_time_and_wakes_nobody():
    """A public backward whose products convert their operands: its roles were once resumed while they still waited."""
    from jfa.emulator import rates
    from tests.emulator import tutorials

    tutorials.run("fa backward 1-CTA", policy="timed", rates=rates.B200)
    assert emulator.last().clean


def test_cold_boxes_come_from_hbm_once():
    """The stream reads every box once: cold, its bytes pass HBM's share of one SM; warm, HBM is not asked."""
    warm, cold = (cli.record(launch, B200, cold=flag) for flag in (False, True))
    assert warm.busy("hbm") == 0.0
    fetched = sum(end - begin for begin, end in cold.occupied[(0, 0, 0), "hbm"])
    assert fetched == pytest.approx(6 * 64 * 64 * 4 / B200["hbm"])
    assert cold.cycles > warm.cycles
