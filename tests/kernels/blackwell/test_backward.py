"""The Blackwell backward on the emulator against fp64."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import backward_config  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import SCHEDULE_NAMES, SCHEDULES, assert_close, make, reference  # noqa: E402

CAUSAL = Band.make(causal=True)
PROBLEMS = {
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 150, 1, 30, 0], heads=2, kv_heads=1),
    "causal": dict(len_q=[300, 130, 40], len_kv=[300, 200, 10], band=CAUSAL),
    "window": dict(len_q=[400, 30], len_kv=[200, 300], band=Band.make(window_size=60)),
    "causal-window": dict(len_q=[300, 130], len_kv=[500, 100], band=Band.make(True, (70, 20)), heads=2, kv_heads=1),
    "pma": dict(len_q=32, len_kv=[200, 0, 300, 128], heads=2),
    "pma-long": dict(len_q=200, len_kv=[150, 130]),
    "d128": dict(len_q=[200, 60], len_kv=[260, 130], head_dim=128),
    "d80-dv128": dict(len_q=[150], len_kv=[200], head_dim=80, head_dim_v=128, dtype=torch.float16),
    "d24": dict(len_q=[70, 30], len_kv=[40, 140], head_dim=24, heads=3, kv_heads=1),
    "negative-scale": dict(len_q=[140], len_kv=[200], sm_scale=-0.1, band=CAUSAL),
    "zero-scale": dict(len_q=[40], len_kv=[130], sm_scale=0.0),
}


def run(case: dict, schedule: dict, with_dlse: bool = False, **choices):
    problem, q, k, v, dout = make(**case)
    out, lse, *want = reference(problem, q, k, v, dout)
    dlse = None
    if with_dlse:
        dlse = torch.linspace(-1, 1, lse.numel()).reshape(lse.shape)
        want = gradients_of_both(problem, q, k, v, dout, dlse)
    config = dataclasses.replace(backward_config(problem), **choices)
    with emulator.options(**schedule):
        got = launch.backward(problem, dout, dlse, q, k, v, out.to(q.dtype), lse.float(), config=config)
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert g.dtype == problem.dtype
        assert_close(name, g, w, problem.dtype)
    return got


def gradients_of_both(problem, q, k, v, dout, dlse):
    """fp64 gradients of sum(out * dout) + sum(lse * dlse)."""
    from jfa.reference import attention

    inputs = [x.double().nan_to_num().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, problem.query_offset, problem.key_offset, sm_scale=problem.sm_scale, return_lse=True)
    finite = torch.isfinite(lse)
    return torch.autograd.grad((out * dout.double()).sum() + (lse[finite] * dlse.double()[finite]).sum(), inputs)


@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_fp64(name):
    run(PROBLEMS[name], {"policy": "random", "seed": 7}, clc=name in ("causal", "pma", "d128"))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("name", ["causal-window", "d128"])
def test_any_order_of_events_is_right(name, schedule):
    run(PROBLEMS[name], schedule)


CHOICES = [
    dict(held_slices=0, dq_stages=1),
    dict(held_slices=2, dq_stages=2),
    dict(q_slots=3, do_slots=1),
    dict(zigzag=False),
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_tuning_does_not_change_the_result(choices):
    run(PROBLEMS["causal-window"], {"policy": "lazy"}, **choices)


@pytest.mark.parametrize("name", ["jagged", "causal-window", "pma", "d128"])
def test_deterministic_dq_is_right_and_the_same_in_any_order_of_events(name):
    case = PROBLEMS[name] | dict(deterministic=True)
    first = run(case, {"policy": "lazy"})
    again = run(case, {"policy": "random", "seed": 11})
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_shared_queries_resident_and_contended(head_dim):
    case = dict(len_q=100, len_kv=[200, 0, 130, 7], heads=2, head_dim=head_dim, band=CAUSAL)
    first = run(case, {"policy": "lazy"})
    again = run(case, {"policy": "random", "seed": 5})
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "partials are summed in a fixed order"
    run(case, {"policy": "random", "seed": 6}, form="single", clc=True)
    run(case | dict(deterministic=True), {"policy": "lazy"}, form="single")


@pytest.mark.parametrize(
    "heads, kv_heads, rows, head_dim", [(4, 2, 50, 64), (4, 1, 32, 128), (16, 1, 8, 64), (6, 2, 20, 64)]
)
@pytest.mark.parametrize("band", [Band(), CAUSAL], ids=["full", "causal"])
def test_short_shared_queries_of_grouped_heads(heads, kv_heads, rows, head_dim, band):
    """The heads of a group share a tile where they fit and are a power of two; three of them go the contended way."""
    case = dict(len_q=rows, len_kv=[200, 0, 130, 7], heads=heads, kv_heads=kv_heads, head_dim=head_dim, band=band)
    assert (backward_config(make(**case)[0]).form == "resident") == (heads // kv_heads != 3)
    run(case, {"policy": "random", "seed": 5})


def test_gradient_of_the_log_sum_exp():
    run(dict(len_q=[70, 20], len_kv=[90, 0]), {"policy": "eager"}, with_dlse=True)


def test_strided_grad_out():
    problem, q, k, v, _ = make([70], [90], heads=2)
    dout = torch.ones((), dtype=q.dtype).expand(problem.rows_out, 2, 64)
    out, lse, *want = reference(problem, q, k, v, dout)
    got = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float())
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert_close(name, g, w, problem.dtype)


def test_nothing_to_do_ends():
    for case in (
        dict(len_q=[0, 3], len_kv=[5, 0]),
        dict(len_q=[4, 300], len_kv=[300, 4], band=Band.make(window_size=2)),
    ):
        run(case, {"policy": "eager"}, clc=True)


def test_a_plan_carries_both_lists():
    problem, q, k, v, dout = make([140, 20], [150, 30])
    plan = launch.plan(problem)
    out, lse = launch.forward(problem, q, k, v, plan)
    want_out, want_lse, *want = reference(problem, q, k, v, dout)
    assert_close("out", out, want_out, problem.dtype)
    for name, g, w in zip(("dq", "dk", "dv"), launch.backward(problem, dout, None, q, k, v, out, lse, plan), want):
        assert_close(name, g, w, problem.dtype)


def test_in_modelled_time_too():
    """Bulk copies of row constants land between the steps of whatever role runs then: that must not disturb it."""
    from jfa.emulator.rates import B200

    run(PROBLEMS["causal"], {"policy": "timed", "rates": B200})
