"""Tolerances come from the arithmetic: what fp32 explains is right, 1 % is not, whatever the size of the scores."""

import math

import pytest
import torch

from jfa.course import compare, kinds, precision
from jfa.course.spec import Case, Exercise, Output


def _attention(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return torch.softmax(scores, 1) @ v, torch.logsumexp(scores, 1)


def _base_two(q, k, v):
    """Right as well: exponentials to the base 2, with the factor in the scale, in fp32."""
    scores = q @ k.T * (math.log2(math.e) / math.sqrt(q.shape[1]))
    m = scores.amax(1, keepdim=True)
    p = torch.exp2(scores - m)
    return p @ v / p.sum(1, keepdim=True), (m[:, 0] + torch.log2(p.sum(1))) * math.log(2)


def _exercise(**more):
    return Exercise(
        id="1.1", title="t", name="f", cases=lambda seed: [], reference=_attention, tol=1e-5,
        outputs=(Output("out", ("row", "dim")), Output("lse", ("row",))), **more,
    )  # fmt: skip


def _case(kind, dim=32):
    g = kinds.generator(11)
    q, k = kinds.query_and_key(kind, 5, 40, dim, 16, g)
    return Case(kind, (q, k, torch.randn(40, dim, generator=g) + 0.5))


def _fault(exercise, case, value):
    return compare.fault_of(exercise, case, {"value": value, "facts": []}, precision.reference_for(exercise, case))


@pytest.mark.parametrize("kind", kinds.SCORES)
@pytest.mark.parametrize("answer", [_attention, _base_two])
def test_fp32_answers_pass_on_every_kind_of_scores(kind, answer):
    case = _case(kind)
    assert _fault(_exercise(), case, answer(*case.args)) is None


@pytest.mark.parametrize("kind", [k for k in kinds.SCORES if k != "near -30000"])
@pytest.mark.parametrize("off", [(1.01, 1.0), (0.99, 1.0), (1.0, 1.01)])
def test_one_percent_fails(kind, off):
    case = _case(kind)
    out, lse = _attention(*case.args)
    assert _fault(_exercise(), case, (out * off[0], lse * off[1]))[0] == "values"


def test_the_exercises_own_arithmetic_is_the_measure():
    case = _case("rising")

    def rounded(q, k, v):
        scores = q @ k.T / math.sqrt(q.shape[1])
        p = torch.exp(scores - scores.amax(1, keepdim=True))
        return kinds.to_bf16(p) @ v / p.sum(1, keepdim=True), torch.logsumexp(scores, 1)

    close = rounded(*case.args)
    assert _fault(_exercise(), case, close) is not None
    assert _fault(_exercise(arithmetic=rounded, slack=3.0), case, close) is None
    assert _fault(_exercise(arithmetic=rounded, slack=3.0), case, (close[0] * 1.01, close[1])) is not None


def test_integers_and_references_that_cannot_run_in_fp32_are_left_alone():
    def reference(x):
        if x.dtype != torch.float64:
            raise TypeError("fp64 only")
        return x.round().long()

    exercise = Exercise(id="1.1", title="t", name="f", cases=lambda seed: [], reference=reference)
    case = Case("x", (torch.tensor([1.2, 3.4]),))
    assert _fault(exercise, case, torch.tensor([1, 3])) is None
    assert _fault(exercise, case, torch.tensor([1, 4]))[0] == "values"


def test_inputs_in_bf16_do_not_excuse_sums_in_bf16():
    g = kinds.generator(5)
    a, b = (torch.randn(16, 40, generator=g).to(torch.bfloat16) for _ in range(2))
    product = Exercise(id="1.1", title="t", name="f", cases=lambda seed: [], reference=lambda a, b: a @ b.T, tol=1e-5)
    case = Case("x", (a, b))
    assert _fault(product, case, a.float() @ b.float().T) is None
    assert _fault(product, case, (a @ b.T).float())[0] == "values"
