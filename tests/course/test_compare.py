"""Sentences about wrong results: they name the place, the size, and never the right numbers."""

import numpy as np
import pytest
import torch

from jfa.course import compare
from jfa.course.kinds import unwritten
from jfa.course.spec import Case, Exercise, Output

PACKED = Output("out", ("token", "head", "dim"))
CASE = Case("three sequences", offsets=(0, 2, 2, 5))


def _fault(got, want, outputs=(PACKED,), case=CASE, printed="", tol=1e-5):
    exercise = Exercise(
        id="1.1", title="t", name="f", cases=lambda seed: [case], reference=lambda: want, outputs=outputs, tol=tol
    )
    return compare.fault_of(exercise, case, {"value": got, "facts": [], "printed": printed}, want)


def _right():
    return torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_places_are_sequence_row_and_head():
    want = _right()
    got = want.clone()
    got[3, 1, 0] += 0.5
    check, sentence = _fault(got, want)
    assert check == "values"
    assert "sequence 2, row 1, head 1, dim 0" in sentence and "off by 0.5" in sentence


def test_how_far_a_fault_reaches_is_told():
    want = _right()
    got = want.clone()
    got[2:, 1] = 0
    assert "(wrong: sequence 2; head 1)" in _fault(got, want)[1]
    assert "(wrong: every sequence; every head)" in _fault(want + 1, want)[1]


@pytest.mark.parametrize("label, words", [("query", "queries 0, 2"), ("key", "keys 0, 2"), ("tile", "tiles 0, 2")])
def test_several_places_are_in_the_plural(label, words):
    assert compare._these(label, [0, 2], 4) == words


def test_expected_numbers_are_not_given_away():
    want = torch.full((5, 2, 3), 0.123456789, dtype=torch.float64)
    sentence = _fault(torch.zeros(5, 2, 3), want)[1]
    assert "0.123456" not in sentence


FORMS = [lambda t: t.float(), lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t + 1e-7]


@pytest.mark.parametrize("form", FORMS)
def test_another_form_of_the_right_result_is_right(form):
    want = _right()
    assert _fault(form(want), want) is None


def test_infinities_must_be_where_they_belong():
    want = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    lse = (Output("lse", ("row",)),)
    assert _fault(torch.tensor([1.0, float("-inf")]), want, lse) is None
    assert "row 1" in _fault(torch.tensor([1.0, -1e30]), want, lse)[1]
    assert "row 0" in _fault(torch.tensor([float("-inf"), float("-inf")]), want, lse)[1]
    assert _fault(torch.tensor([1.0, float("nan")]), want, lse)[0] == "returns"


@pytest.mark.parametrize("got", [torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)])
def test_integers_are_exact_in_any_width(got):
    want = torch.tensor([3, 4])
    assert _fault(got, want, (Output("n", ("row",)),)) is None
    assert _fault(got + 1, want, (Output("n", ("row",)),))[0] == "values"


def test_a_demanded_dtype_is_demanded():
    sentence = _fault(torch.tensor([3, 4]), torch.tensor([3, 4]), (Output("offsets", ("row",), dtype="int32"),))[1]
    assert sentence == "offsets is int64; int32 is asked for."


def test_several_outputs_are_named():
    outputs = (Output("m", ("row",)), Output("l", ("row",)))
    want = (torch.tensor([1.0]), torch.tensor([2.0]))
    assert _fault(list(want), want, outputs) is None
    assert _fault(want[0], want, outputs)[1] == "It returned a tensor [1] of float32; asked for: m, l."
    assert _fault(want[:1], want, outputs)[1] == "It returned 1 value; asked for: m, l."
    assert _fault((want[0], want[1] + 1), want, outputs)[1].startswith("l is wrong at row 0")
    assert _fault((want[0], 2.0), want, outputs)[1] == "l is a float; a torch tensor is asked for."


def test_lists_of_tensors():
    want = [torch.ones(2, 3), torch.zeros(0, 3)]
    out = (Output("parts", ("row", "dim")),)
    assert _fault(tuple(want), want, out) is None
    assert _fault(want[:1], want, out)[1] == "It returned 1 value; asked for: a list of 2."
    assert _fault([want[0], torch.zeros(1, 3)], want, out)[1] == "parts[1] has shape [1, 3] instead of [0, 3]."
    assert _fault([want[0] + 1, want[1]], want, out)[1].startswith("parts[0] is wrong at row 0, dim 0")


def test_numbers_arrays_dicts_and_texts():
    plain = (Output("waste"),)
    assert _fault(0.526, 0.526, plain) is None and _fault(torch.tensor(0.526), 0.526, plain, tol=1e-3) is None
    assert _fault(np.float64(0.526), 0.526, plain) is None
    assert _fault(0.5, 0.526, plain)[1] == "waste is 0.5, which is not right, off by 0.026."
    assert _fault("half", 0.526, plain)[1] == "waste is a string; a number is asked for."
    assert _fault(np.arange(3), np.arange(3), plain) is None
    assert _fault({"a": 1}, {"a": 1}, plain) is None
    assert "keys" in _fault({"b": 1}, {"a": 1}, plain)[1]
    assert _fault("x", "y", plain)[0] == "values"


def test_nested_tensors_are_compared_by_sequence():
    want = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    out = (Output("nested", ("sequence", "row", "dim")),)
    assert _fault(want, want, out) is None
    wrong = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    assert "sequence 1" in _fault(wrong, want, out)[1]
    assert "nested tensor is asked for" in _fault(torch.ones(3, 3), want, out)[1]


def test_printing_is_not_returning():
    assert "It printed '0.5'" in _fault(None, _right(), printed="0.5\n")[1]


def test_tolerance_scales_with_the_reference_but_not_below_one():
    big = torch.tensor([1000.0, 0.0], dtype=torch.float64)
    row = (Output("out", ("row",)),)
    assert _fault(big + 0.005, big, row) is None
    assert _fault(big / 1000 + 0.005, big / 1000, row) is not None


def test_several_wrong_numbers_are_off_by_up_to():
    want = _right()
    got = want.clone()
    got[3:, 1, 0] += torch.tensor([0.5, 0.25])
    assert "off by up to 0.5" in _fault(got, want)[1]


def test_places_have_their_labels():
    want = _right()
    got = want.clone()
    got[3] += 1
    case = Case("kinds", offsets=(0, 2, 2, 5), labels=("rising", "ties", "near -150"))
    assert "sequence 2 (near -150), row 1, head 0" in _fault(got, want, case=case)[1]
    rows = (Output("lse", ("row",)),)
    assert "row 1 (ties)" in _fault(torch.tensor([0.0, 1.0]), torch.zeros(2), rows, Case("x", labels=("a", "ties")))[1]


def test_never_stored_is_said_only_where_it_is_so():
    want, row = torch.ones(4), (Output("out", ("row",)),)
    got = unwritten(4)
    assert _fault(got, want, row)[1].endswith("Nothing was ever stored there.")
    got[:2] = torch.tensor([1.0, float("nan")])
    assert _fault(got, want, row)[1].endswith("To some of these places nothing was ever stored.")
    for nan in (torch.tensor([1.0, 1.0, float("nan"), 1.0]), torch.tensor([1.0, 1.0, float("inf"), 1.0]) * 0 + 1):
        assert "at row 2. " in (sentence := _fault(nan, want, row)[1]) and "ever stored" not in sentence
    assert torch.equal(unwritten(2, 3).isnan(), torch.ones(2, 3, dtype=torch.bool))


def _example(case, value, reference, **more):
    exercise = Exercise(id="1.1", title="t", name="f", cases=lambda seed: [case], reference=reference, **more)
    return compare.example(exercise, case, value, reference(*case.args))


def test_a_small_case_is_shown_in_full():
    case = Case("x", (torch.tensor([3, 2]), 0.5))
    text = _example(case, (torch.tensor([0, 3]), 1.0), lambda lengths, share: (torch.tensor([0, 3, 5]), 2 * share))
    assert text == "Input: lengths = [3, 2], share = 0.5. Yours: ([0, 3], 1). Right: ([0, 3, 5], 1)."


def test_a_large_case_and_a_puzzles_answer_are_not_shown():
    assert _example(Case("x", (torch.zeros(20),)), 1.0, lambda x: 2.0) == ""
    assert _example(Case("x", (2,)), torch.zeros(20), lambda n: torch.ones(20)) == ""
    assert _example(Case("x"), 3, lambda: 4, kind="value") == ""
