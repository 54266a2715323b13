"""What a wrong result looks like, in words: a factor, a summand, other places, fewer bits."""

import numpy as np
import pytest
import torch

from jfa.course import compare
from jfa.course.spec import Case, Output
from jfa.course.symptom import multiple, symptom

RIGHT = np.random.default_rng(3).standard_normal((9, 5))
TOL = 1e-5


def _said(numbers, right=RIGHT, tol=TOL):
    numbers = np.asarray(numbers)
    return symptom(numbers, right, compare.mismatch(numbers, right, tol), tol)


@pytest.mark.parametrize("factor, words", [(1.01, "1.01 times"), (0.25, "0.25 times"), (0.5, "one half"), (-1, "sign")])
def test_a_factor_is_named(factor, words):
    assert words in _said(factor * RIGHT)


@pytest.mark.parametrize("factor, words", [(np.log2(np.e), "log2(e)"), (np.log(2), "ln 2")])
def test_factors_of_another_base_are_named(factor, words):
    assert words in _said(factor * RIGHT)


def test_a_factor_in_the_wrong_part_only():
    got = RIGHT.copy()
    got[4:] *= 3
    assert "3 times" in _said(got)


@pytest.mark.parametrize("summand, words", [(1, "1 too large"), (-0.5, "0.5 too small")])
def test_a_summand_is_named(summand, words):
    assert words in _said(RIGHT + summand)


def test_a_summand_of_integers_is_named():
    assert "7 too large" in _said(np.arange(20) + 7, np.arange(20))


def test_zeros_are_named():
    got = RIGHT.copy()
    got[:, 2] = 0
    assert "All of these are 0" in _said(got)


@pytest.mark.parametrize("move", [lambda x: x[::-1], lambda x: np.roll(x, 2, axis=1), lambda x: x.T.reshape(x.shape)])
def test_right_numbers_at_other_places(move):
    assert "wrong places" in _said(move(RIGHT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits(dtype):
    got = torch.tensor(RIGHT).to(dtype).to(torch.float64).numpy()
    assert "fewer bits" in _said(got)


def test_other_errors_get_no_story():
    other = np.random.default_rng(4).standard_normal(RIGHT.shape)
    assert _said(other) == ""
    few = RIGHT.copy()
    few[0, 0] *= 2
    assert _said(few) == ""
    assert _said(np.abs(RIGHT) > 1, RIGHT > 1) == ""
    infinite = RIGHT * 2
    infinite[0, 0] = np.inf
    assert _said(infinite) == ""
    assert _said(np.full(8, 4.0), np.full(8, 2.0)) == ""  # a factor of 2 or a summand of 2


@pytest.mark.parametrize("hidden, words", [(True, "on purpose"), (False, "No input is NaN")])
def test_where_a_nan_comes_from(hidden, words):
    given = torch.ones(3)
    if hidden:
        given[1] = torch.nan
    got = torch.tensor([1.0, float("nan"), 2.0])
    sentence = compare.nan_fault("out", got, torch.ones(3), Output("out", ("row",)), Case("c", (given,)))
    assert "row 1" in sentence and words in sentence


@pytest.mark.parametrize("got, want, words", [(6, 3, "2 times"), (0.75, 3.0, "0.25 times"), (-5, 5, "wrong sign")])
def test_one_number_that_is_a_plain_multiple(got, want, words):
    assert words in multiple(np.asarray(got), np.asarray(want))
    assert words in compare.value_fault("n", got, want, Output("n"), Case("c"), 1e-5)


@pytest.mark.parametrize("got, want", [(7, 3), (0, 3), (3, 0), (True, False), (float("inf"), 2.0), (3.0001, 1.5)])
def test_one_number_that_is_no_plain_multiple(got, want):
    assert multiple(np.asarray(got), np.asarray(want)) == ""
