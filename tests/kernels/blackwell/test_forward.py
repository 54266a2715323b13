"""The Blackwell forward on the emulator against fp64: jagged shapes, masks, both schedulers, every order of events."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import forward_config  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import SCHEDULE_NAMES, SCHEDULES, assert_close, make, reference  # noqa: E402

CAUSAL = Band.make(causal=True)
PROBLEMS = {
    # zero-length queries and keys, one key, tails on both sides, a tile of which only one half has queries
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 150, 1, 30, 0], heads=2, kv_heads=1),
    "causal": dict(len_q=[300, 130, 40], len_kv=[300, 200, 10], band=CAUSAL),
    "top-left": dict(len_q=[150, 270], len_kv=[60, 300], band=Band.make(causal="top_left")),
    "window": dict(len_q=[400, 130], len_kv=[200, 300], band=Band.make(window_size=60)),
    "causal-window": dict(len_q=[300, 130], len_kv=[500, 100], band=Band.make(True, (70, 20))),
    "short-queries": dict(len_q=[32, 128, 0, 7], len_kv=[300, 129, 5, 384]),
    "pma": dict(len_q=32, len_kv=[200, 0, 300, 128], heads=2),
    "pma-long": dict(len_q=200, len_kv=[150, 300]),
    "d128": dict(len_q=[200, 60], len_kv=[260, 130], head_dim=128, heads=2, kv_heads=2),
    "d80-dv128": dict(len_q=[150], len_kv=[200], head_dim=80, head_dim_v=128, dtype=torch.float16),
    "d24": dict(len_q=[70, 30], len_kv=[40, 140], head_dim=24, heads=3, kv_heads=1),
    "d192": dict(len_q=[300, 5, 0, 140], len_kv=[400, 150, 60, 0], head_dim=192, head_dim_v=128, heads=2, kv_heads=1),
    "d136-window": dict(len_q=[150, 40], len_kv=[150, 300], head_dim=136, head_dim_v=64, band=Band.make(True, (70, 0))),
    "d192-pma": dict(len_q=40, len_kv=[200, 0, 129], head_dim=192, head_dim_v=96),
    "d192-short": dict(
        len_q=[128, 0, 70], len_kv=[300, 9, 520], head_dim=192, head_dim_v=128, sm_scale=-0.05, band=CAUSAL
    ),
    "d160-long": dict(len_q=[9, 130], len_kv=[40, 1500], head_dim=160, head_dim_v=128, dtype=torch.float16),
    "negative-scale": dict(len_q=[140], len_kv=[200], sm_scale=-0.4, band=CAUSAL),
    "zero-scale": dict(len_q=[40], len_kv=[130], sm_scale=0.0),
}


def run(case: dict, schedule: dict, **choices):
    problem, q, k, v, _ = make(**case)
    config = dataclasses.replace(forward_config(problem), **choices)
    with emulator.options(**schedule):
        out, lse = launch.forward(problem, q, k, v, config=config)
    want_out, want_lse = reference(problem, q, k, v)
    assert_close("out", out, want_out, problem.dtype)
    assert_close("lse", lse, want_lse, problem.dtype)
    return out, lse


@pytest.mark.parametrize("clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_fp64(name, clc):
    run(PROBLEMS[name], {"policy": "random", "seed": 7}, clc=clc)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("name", ["jagged", "causal-window", "pma", "d192", "d192-short"])
def test_any_order_of_events_gives_the_same_bits(name, schedule):
    first = run(PROBLEMS[name], {"policy": "eager"})
    again = run(PROBLEMS[name], schedule, clc=schedule["policy"] != "random")
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(
    "choices", [dict(p_slices=1, fma_eighths=0), dict(p_slices=4, fma_eighths=3), dict(kv_slots=2)], ids=str
)
def test_tuning_does_not_change_the_result(choices):
    run(PROBLEMS["causal"], {"policy": "lazy"}, **choices)


HUGE = {
    "halves": dict(len_q=[200, 40], len_kv=[300, 140]),
    "split keys, negative scale": dict(len_q=[70], len_kv=[300], sm_scale=-0.3),
    "causal, d128": dict(len_q=[300], len_kv=[260], head_dim=128, band=CAUSAL, dtype=torch.bfloat16),
    "d192": dict(len_q=[60, 140], len_kv=[260, 40], head_dim=192, head_dim_v=128),
    "d192, split keys": dict(len_q=[60, 100], len_kv=[260, 40], head_dim=192, head_dim_v=128),
}


def make_huge(case: dict, largest: float):
    """(problem, q, k, v) whose scores, before the scale, are up to ``largest``."""
    problem, q, k, v, _ = make(**case, seed=3)
    rows, keys = int(problem.query_offset[-1]), int(problem.key_offset[-1])
    grow = (
        largest / (q[:rows].double().flatten(1).norm(dim=1).max() * k[:keys].double().flatten(1).norm(dim=1).max())
    ) ** 0.5
    return problem, (q * grow).to(q.dtype), (k * grow).to(k.dtype), v


def assert_huge_right(problem, q, k, v, out, lse):
    want, want_lse = reference(problem, q, k, v)
    assert_close("out", out, want, problem.dtype)
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=2**-20, atol=2**-10)


@pytest.mark.parametrize("largest", [1e6, 3e9, 1e12, 1e36])
@pytest.mark.parametrize("name", HUGE)
def test_huge_scores_stay_right(name, largest):
    """From 2**31 on the maximum's rounding alone exceeds fp32's exponents: such rows take a scale that rounds nothing."""
    inputs = make_huge(HUGE[name], largest)
    assert_huge_right(*inputs, *launch.forward(*inputs))


@pytest.mark.parametrize("largest", [1e6, 3e9, 1e12, 1e36])
@pytest.mark.parametrize("name", ["halves", "causal, d128"])
def test_the_plain_kernel_keeps_huge_scores_right(name, largest):
    inputs = make_huge(HUGE[name], largest)
    with emulator.options(contract=True):  # without it nothing is lost, whatever the scale
        assert_huge_right(*inputs, *launch.plain_forward(*inputs))


def test_split_keys_do_not_rely_on_the_stated_maximum():
    run(PROBLEMS["jagged"], {"policy": "lazy"}, split_keys=True, kv_slots=4)


def test_nothing_to_do_ends():
    for case in (dict(len_q=[0, 3], len_kv=[5, 0]), dict(len_q=[4], len_kv=[9], band=Band.make(window_size=(0, 0)))):
        run(case, {"policy": "eager"}, clc=True)
    problem, q, k, v, _ = make([3], [4])
    empty = dataclasses.replace(
        problem, num_batches=0, query_offset=problem.query_offset[:1], key_offset=problem.key_offset[:1]
    )
    out, lse = launch.forward(empty, q, k, v)
    assert not out.any() and torch.isinf(lse).all()


def test_a_slot_outside_the_output_is_not_written():
    case = dict(len_q=3, len_kv=[40, 5, 9], output_offset=torch.tensor([6, -1, 0, 9], dtype=torch.int32))
    problem, q, k, v, _ = make(**case)
    out, lse = launch.forward(problem, q, k, v)
    inside = dataclasses.replace(problem, output_offset=torch.tensor([6, 3, 0, 9], dtype=torch.int32))
    want, want_lse = reference(inside, q, k, v)
    want[3:6], want_lse[:, 3:6] = 0, -torch.inf
    assert_close("out", out, want, problem.dtype)
    assert_close("lse", lse, want_lse, problem.dtype)


def test_offsets_that_lie_stay_inside_the_tensors():
    problem, q, k, v, _ = make([140, 20], [150, 30])
    lies = torch.tensor([-7, 400, 90], dtype=torch.int32)
    launch.forward(dataclasses.replace(problem, query_offset=lies, key_offset=lies), q, k, v)


@pytest.mark.parametrize("name", ["jagged", "causal-window", "pma", "d128"])
def test_the_plain_kernel_agrees(name):
    problem, q, k, v, _ = make(**PROBLEMS[name])
    with emulator.options(policy="lazy"):
        out, lse = launch.plain_forward(problem, q, k, v)
    want_out, want_lse = reference(problem, q, k, v)
    assert_close("out", out, want_out, problem.dtype)
    assert_close("lse", lse, want_lse, problem.dtype)
