"""Figures: each draws, says its numbers in words, labels its axes, and leaves pyplot alone."""

import numpy as np
import pytest

from jfa import plots
from jfa.layout import uniform_lengths
from jfa.masks import Band, block_kinds

PICTURES = {
    "lines": (
        lambda: plots.lines(
            [1, 2, 4], {"a": [1, 2, 3.5], "b": [4, 5, 6]}, title="t", xlabel="x", ylabel="y", log_x=True
        ),
        "3.5",
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
    "worker_loads": (lambda: plots.worker_loads({"a": [[0, 2], [1]]}, [1.0, 2.0, 3.0]), "1.333"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_an_image_its_numbers_and_axis_labels(name):
    make, number = PICTURES[name]
    picture = make()
    assert number in picture.text and repr(picture) == picture.text
    assert picture.png().startswith(b"\x89PNG")
    page = picture._repr_html_()
    assert "<img" in page and "alt=" in page and number in page
    assert all(axes.get_title(loc="left") for axes in picture.figure.axes)
    assert any(axes.get_xlabel() for axes in picture.figure.axes) and any(
        axes.get_ylabel() for axes in picture.figure.axes
    )


def test_no_figure_is_left_in_pyplot():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    plots.padded_and_packed([1, 2])
    assert plt.get_fignums() == before


def test_series_are_told_apart_without_colour():
    picture = plots.lines([1, 2], {n: [1, 2] for n in "abcdefg"}, title="t", xlabel="x", ylabel="y")
    assert len({line.get_marker() for line in picture.figure.axes[0].lines}) == 7
    assert len(set(plots.CYCLE)) == len(set(plots.MARKERS)) == len(set(plots.HATCHES)) == 7


def test_table_aligns_numbers_right():
    text = plots.table(["name", "n"], [["a", 5], ["bcd", 1234], ["e", np.float64(0.123456)]])
    assert text.splitlines()[2:] == ["a          5", "bcd     1234", "e     0.1235"]
