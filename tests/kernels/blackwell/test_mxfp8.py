"""MXFP8 on the emulator against the quantised reference: jagged shapes, masks, schedules, NaN next door."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.kernels.blackwell import mxfp8_launch  # noqa: E402
from jfa.kernels.blackwell.config import mxfp8_backward_config, mxfp8_config  # noqa: E402
from jfa.kernels.blackwell.mxfp8_softmax import HUGE_MXFP8  # noqa: E402
from jfa.kernels.common.softmax import LOG2_E  # noqa: E402
from jfa.masks import Band  # noqa: E402
from jfa.mxfp8 import quantize_jagged  # noqa: E402
from jfa.reference import attention, mxfp8_attention, mxfp8_attention_backward  # noqa: E402
from tests.kernels.blackwell.cases import SCHEDULE_NAMES, SCHEDULES, make  # noqa: E402

CAUSAL = Band.make(causal=True)
PROBLEMS = {
    # zero-length queries and keys, one key, tails on both sides, a tile of which only one half has queries
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 150, 1, 30, 0], heads=2, kv_heads=1, head_dim=128),
    "causal": dict(len_q=[300, 130, 40], len_kv=[300, 200, 10], heads=4, kv_heads=2, band=CAUSAL),
    "window": dict(len_q=[400, 130], len_kv=[200, 300], band=Band.make(window_size=60), head_dim=128),
    "causal-window": dict(len_q=[300, 130], len_kv=[500, 100], band=Band.make(True, (70, 20))),
    "short-queries": dict(len_q=[32, 128, 0, 7], len_kv=[300, 129, 5, 384], head_dim=128),
    "pma": dict(len_q=32, len_kv=[200, 0, 300, 128], heads=2),
    "pma-long": dict(len_q=200, len_kv=[150, 300], heads=2, kv_heads=1, head_dim=128),
    "d80-dv128": dict(len_q=[150], len_kv=[200], head_dim=80, head_dim_v=128),
    "d24": dict(len_q=[70, 30], len_kv=[40, 140], head_dim=24, heads=3, kv_heads=1),
    "negative-scale": dict(len_q=[140], len_kv=[200], sm_scale=-0.4, band=CAUSAL),
    "zero-scale": dict(len_q=[40], len_kv=[130], sm_scale=0.0),
    "peaked": dict(len_q=[140], len_kv=[400], sm_scale=0.35),  # scores of several tens of bits
}


def arguments(problem):
    """What the references take besides q, k, v."""
    q_offset = None if problem.broadcast_q else problem.query_offset
    settings = dict(sm_scale=problem.sm_scale, band=problem.band, broadcast_q=problem.broadcast_q)
    return (q_offset, problem.key_offset), settings | dict(output_offset=problem.output_offset, return_lse=True)


def relative(got, want):
    """The relative error in the Frobenius norm."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def assert_right(problem, q, k, v, out, lse, limit=2e-3):
    """``limit`` includes the rounding of O to bf16, which alone makes 1.7e-3."""
    where, settings = arguments(problem)
    want, want_lse = mxfp8_attention(q, k, v, *where, **settings, dtype=torch.float64)
    assert relative(out, want) <= limit
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite].double(), rtol=1e-6, atol=1e-4)
    assert out[~finite.T].abs().sum() == 0


def run(case: dict, schedule: dict, **choices):
    problem, q, k, v, _ = make(**case)
    config = dataclasses.replace(mxfp8_config(problem), **choices)
    with emulator.options(**schedule):
        out, lse = mxfp8_launch.forward(problem, q, k, v, config=config)
    assert_right(problem, q, k, v, out, lse)
    return out, lse


@pytest.mark.parametrize("clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_the_quantised_reference(name, clc):
    run(PROBLEMS[name], {"policy": "random", "seed": 7}, clc=clc)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("name", ["jagged", "causal-window", "pma"])
def test_any_order_of_events_gives_the_same_bits(name, schedule):
    first = run(PROBLEMS[name], {"policy": "eager"})
    again = run(PROBLEMS[name], schedule, clc=schedule["policy"] != "random")
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(
    "choices", [dict(fma_parts=0, margin=0), dict(fma_parts=8, margin=2), dict(kv_slots=4)], ids=str
)
def test_tuning_does_not_change_the_result(choices):
    run(PROBLEMS["causal"], {"policy": "lazy"}, **choices)


def test_it_differs_from_full_precision_by_what_eight_bits_cost():
    problem, q, k, v, _ = make([256], [512], head_dim=128)
    out, _ = mxfp8_launch.forward(problem, q, k, v)
    where, settings = arguments(problem)
    rows = slice(0, 256)
    want = attention(*(x.double().nan_to_num() for x in (q, k, v)), *where, **settings)[0]
    assert 0.02 < relative(out[rows], want[rows]) < 0.06


POISONED = {
    "middle": dict(len_q=[140, 70, 300], len_kv=[150, 90, 260], heads=2, kv_heads=1, head_dim=128),
    "split keys, odd blocks": dict(len_q=[20, 30, 40], len_kv=[130, 384, 300]),
    "causal": dict(len_q=[150, 33, 70], len_kv=[150, 33, 257], band=CAUSAL),
}


@pytest.mark.parametrize("name", POISONED)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_neighbour_of_nan_changes_no_bit(name, bad):
    """Its scale codes are 0xFF: not one may be read for another sequence, not even for rows that are masked."""
    problem, q, k, v, _ = make(**POISONED[name])
    out, lse = mxfp8_launch.forward(problem, q, k, v)
    q_of, k_of = problem.query_offset.tolist(), problem.key_offset.tolist()
    for x, of in ((q, q_of), (k, k_of), (v, k_of)):
        x[of[bad] : of[bad + 1]] = float("nan")
    poisoned, poisoned_lse = mxfp8_launch.forward(problem, q, k, v)
    others = [row for s in range(3) if s != bad for row in range(q_of[s], q_of[s + 1])]
    assert torch.equal(poisoned[others], out[others])
    assert torch.equal(poisoned_lse[:, others], lse[:, others])
    assert poisoned[q_of[bad] : q_of[bad + 1]].isnan().all()


def test_one_nan_takes_its_group_only():
    """A NaN in V loses its column for the rows that see it: 32 keys of the group are NaN, the other columns are right."""
    problem, q, k, v, _ = make([60], [200], head_dim=128)
    want, _ = mxfp8_launch.forward(problem, q, k, v)
    v[70, 0, 5] = float("nan")
    out, _ = mxfp8_launch.forward(problem, q, k, v)
    assert out[:60, 0, 5].isnan().all()
    others = [d for d in range(128) if d != 5]
    assert torch.equal(out[:60, 0, others], want[:60, 0, others])


@pytest.mark.parametrize("largest", [1e6, 3e9, 1e36])
def test_huge_scores_stay_right(largest):
    """One key or a few decide such rows: P's rounding, half a step of e4m3 at most, is all that may be wrong."""
    problem, q, k, v, _ = make([200, 40], [300, 140], seed=3)
    grow = (largest / (q[:240].double().norm(dim=2).max() * k[:440].double().norm(dim=2).max())).item() ** 0.5
    q, k = (q * grow).to(q.dtype), (k * grow).to(k.dtype)
    out, lse = mxfp8_launch.forward(problem, q, k, v)
    where, settings = arguments(problem)
    q, k = (quantize_jagged(x, o, "head_dim").dequantize() for x, o in ((q, where[0]), (k, where[1])))
    v = quantize_jagged(v, where[1], "tokens").dequantize()
    want, want_lse = attention(q.double(), k.double(), v.double(), *where, **settings)
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=2**-20, atol=2**-10)
    wrong = (out[:240].double() - want[:240]).norm(dim=2) / want[:240].norm(dim=2)
    assert wrong.max() <= 2**-4 + 2**-7


@pytest.mark.parametrize("margin", [0, 4, 8, 16])
@pytest.mark.parametrize("below", [-40, -6, 0, 6, 12, 24, 60, 1e6])
def test_the_lse_of_a_maximum_near_the_limit_is_right(below, margin):
    """A row's base exceeds its maximum by a few bits, so it may lie beyond the limit where the maximum does not."""
    raw = 3.0 * 2**19  # q k of the largest; the factor is two thirds of its power of two, so the wrong one is seen
    sm_scale = (HUGE_MXFP8.value - below) / raw / LOG2_E
    problem, q, k, v, _ = make([1], [3], sm_scale=sm_scale)
    q[:1], k[:3] = 0, 0
    q[0, 0, 0] = 2.0**10
    k[:3, 0, 0] = torch.tensor([1.0, 3.0, -2.0]) * 2**9
    config = dataclasses.replace(mxfp8_config(problem), margin=margin)
    out, lse = mxfp8_launch.forward(problem, q, k, v, config=config)
    torch.testing.assert_close(lse[0, 0].item(), raw * sm_scale, rtol=2**-21, atol=0)


def test_nothing_to_do_ends():
    for case in (dict(len_q=[0, 3], len_kv=[5, 0]), dict(len_q=[4], len_kv=[9], band=Band.make(window_size=(0, 0)))):
        run(case, {"policy": "eager"}, clc=True)
    problem, q, k, v, _ = make([3], [4])
    nothing = problem.query_offset[:1]
    empty = dataclasses.replace(problem, num_batches=0, query_offset=nothing, key_offset=nothing)
    out, lse = mxfp8_launch.forward(empty, q, k, v)
    assert not out.any() and torch.isinf(lse).all()


BACKWARD = {
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 150, 1, 30, 0], heads=2, kv_heads=1, head_dim=128),
    "causal": dict(len_q=[200, 130, 40], len_kv=[200, 140, 10], heads=4, kv_heads=2, band=CAUSAL),
    "window": dict(len_q=[300, 130], len_kv=[200, 300], band=Band.make(window_size=60), head_dim=128),
    "pma": dict(len_q=32, len_kv=[200, 0, 130], heads=2),
    "pma-long": dict(len_q=150, len_kv=[150, 40], head_dim=128),
    "d80": dict(len_q=[150], len_kv=[170], head_dim=80, head_dim_v=48),
    "negative-scale": dict(len_q=[140], len_kv=[150], sm_scale=-0.4),
    "slots": dict(len_q=3, len_kv=[40, 5, 9], output_offset=torch.tensor([6, 3, 0, 9], dtype=torch.int32)),
}


def gradients(case: dict, schedule: dict, poisoned: int | None = None, **choices):
    """Return (problem, kernel's gradients, reference's), with the sequence ``poisoned`` all NaN."""
    problem, q, k, v, dout = make(**case)
    where, settings = arguments(problem)
    out, lse = mxfp8_attention(q, k, v, *where, **settings, dtype=torch.float64)
    out, lse = out.to(q.dtype), lse.float()
    if poisoned is not None:
        for x, of in ((q, where[0]), (k, where[1]), (v, where[1]), (dout, where[0])):
            x[of[poisoned] : of[poisoned + 1]] = float("nan")
    config = dataclasses.replace(mxfp8_backward_config(problem), **choices)
    with emulator.options(**schedule):
        got = mxfp8_launch.backward(problem, dout, None, q, k, v, out, lse, config=config)
    settings.pop("return_lse")
    return problem, got, mxfp8_attention_backward(dout, None, q, k, v, out, lse, *where, **settings)


@pytest.mark.parametrize("clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_match_the_quantised_reference(name, clc):
    problem, got, want = gradients(BACKWARD[name], {"policy": "random", "seed": 5}, clc=clc)
    rows_q = problem.rows_q if problem.broadcast_q else int(problem.query_offset[-1])
    for x, a, b, rows in zip(("dq", "dk", "dv"), got, want, (rows_q, *[int(problem.key_offset[-1])] * 2)):
        assert relative(a[:rows], b[:rows]) <= 2e-3, x
        assert not a[rows:].any(), x


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
def test_gradients_do_not_depend_on_the_order_of_events(schedule):
    """dK and dV are equal bit by bit; dQ is added up in the order in which tiles end."""
    case = dict(len_q=[150, 140], len_kv=[150, 40], heads=2, kv_heads=1, band=CAUSAL)
    _, first, _ = gradients(case, {"policy": "eager"})
    _, again, _ = gradients(case, schedule)
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
    assert relative(again[0], first[0]) < 2e-3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_gradients_of_others_do_not_see_a_neighbour_of_nan(bad):
    case = dict(len_q=[140, 33, 150], len_kv=[150, 90, 130], heads=2, kv_heads=1)
    problem, clean, _ = gradients(case, {"policy": "eager"}, clc=False)
    _, got, _ = gradients(case, {"policy": "eager"}, bad, clc=False)
    for a, b, offsets in zip(got, clean, (problem.query_offset, problem.key_offset, problem.key_offset)):
        of = offsets.tolist()
        for s in range(3):
            rows = slice(of[s], of[s + 1])
            assert a[rows].isnan().all() if s == bad else torch.equal(a[rows], b[rows])


@pytest.mark.parametrize("choices", [dict(q_slots=1), dict(held_slices=2, dq_stages=2)], ids=str)
def test_tuning_does_not_change_the_gradients(choices):
    case = dict(len_q=[270], len_kv=[150], head_dim=64)
    _, got, want = gradients(case, {"policy": "lazy"}, **choices)
    assert all(relative(a[:n], b[:n]) <= 2e-3 for a, b, n in zip(got, want, (270, 150, 150)))


def test_the_deterministic_backward_multiplies_in_bf16_what_the_forward_rounded():
    """Gradients of full-precision attention at the operands as the forward rounds them, within a few roundings of bf16."""
    problem, q, k, v, dout = make([140, 5], [150, 40], heads=2, kv_heads=1, band=CAUSAL, deterministic=True)
    out, lse = mxfp8_launch.forward(problem, q, k, v)
    got = mxfp8_launch.backward(problem, dout, None, q, k, v, out, lse)
    rounded = [x.dequantize().double().requires_grad_() for x in mxfp8_launch.encode_inputs(problem, q, k, v)]
    where, settings = arguments(problem)
    exact, _ = attention(*rounded, *where, **settings)
    want = torch.autograd.grad(exact, rounded, dout.double())
    for name, a, b in zip(("dq", "dk", "dv"), got, want):
        # delta is made of the forward's output, in which P is rounded: that is where most of dq's and dk's error is from
        assert relative(a, b) < (0.01 if name == "dv" else 0.05), name
