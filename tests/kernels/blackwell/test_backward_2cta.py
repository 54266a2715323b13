"""The backward on pairs of CTAs on the emulator against fp64, and which problems get it."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import PAIR_KEYS, backward_config, backward_form  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import SCHEDULE_NAMES, SCHEDULES, assert_close, make, reference  # noqa: E402

CAUSAL = Band.make(causal=True)
# Key lengths of 128 and less leave the second CTA of a pair without keys; 129 to 256 are an odd and an even number of its tiles.
PROBLEMS = {
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 130, 1, 30, 0]),
    "grouped": dict(len_q=[140, 60], len_kv=[300, 40], heads=4, kv_heads=2),
    "one-long": dict(len_q=[260], len_kv=[900]),
    "odd": dict(len_q=[100, 100, 100], len_kv=[128, 129, 384]),
    "even": dict(len_q=[130], len_kv=[512]),
    "causal": dict(len_q=[300, 130, 40], len_kv=[300, 200, 10], band=CAUSAL),
    "window": dict(len_q=[400, 30], len_kv=[200, 300], band=Band.make(window_size=60)),
    "causal-window": dict(len_q=[300, 130], len_kv=[500, 100], band=Band.make(True, (70, 20)), heads=2, kv_heads=1),
    "pma": dict(len_q=32, len_kv=[200, 0, 300, 128], heads=2),
    "pma-long": dict(len_q=200, len_kv=[150, 530]),
    "pma-long-causal": dict(len_q=200, len_kv=[150, 300], band=CAUSAL),
    "d80-fp16": dict(len_q=[150], len_kv=[400], head_dim=80, dtype=torch.float16),
    "d96-dv128": dict(len_q=[150], len_kv=[290], head_dim=96, head_dim_v=128),
    "d24": dict(len_q=[150], len_kv=[290], head_dim=24),
    "negative-scale": dict(len_q=[140], len_kv=[300], sm_scale=-0.1, band=CAUSAL),
    "zero-scale": dict(len_q=[40], len_kv=[130], sm_scale=0.0),
}


def run(case: dict, schedule: dict, **choices):
    problem, q, k, v, dout = make(**{"head_dim": 128, **case})
    out, lse, *want = reference(problem, q, k, v, dout)
    config = dataclasses.replace(backward_config(problem, form="pair"), **choices)
    with emulator.options(**schedule):
        got = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float(), config=config)
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert g.dtype == problem.dtype
        assert_close(name, g, w, problem.dtype)
    return got


@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_fp64(name):
    """NaN rows follow the last sequence, and short sequences follow long ones, in every problem."""
    run(PROBLEMS[name], {"policy": "random", "seed": 7}, clc=name in ("jagged", "causal", "pma", "one-long"))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("clc", [False, True], ids=["static", "clc"])
def test_any_order_of_events_is_right(schedule, clc):
    run(dict(len_q=[300, 60], len_kv=[300, 130], band=CAUSAL), schedule, clc=clc)


CHOICES = [
    dict(dq_stages=1),
    dict(dq_columns=32, dq_stages=1),
    dict(dq_columns=8, dq_stages=4),
    dict(zigzag=False, clc=False),
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_tuning_does_not_change_the_result(choices):
    run(PROBLEMS["causal-window"], {"policy": "lazy"}, **choices)


def test_nan_neighbours_do_not_leak():
    """Both CTAs' boxes reach into poisoned rows behind a short sequence."""
    case = dict(len_q=[40, 100], len_kv=[130, 70], head_dim=128)
    problem, q, k, v, dout = make(**case)
    out, lse, *want = reference(problem, q, k, v, dout)
    for x, begin in ((q, 40), (dout, 40), (k, 130), (v, 130)):
        x[begin:] = float("nan")
    lse[:, 40:] = float("nan")
    got = launch.backward(
        problem, dout, None, q, k, v, out.to(q.dtype), lse.float(), config=backward_config(problem, form="pair")
    )
    for g, w, rows in zip(got, want, (40, 130, 130)):
        assert_close("first sequence", g[:rows], w[:rows], problem.dtype)


def test_nothing_to_do_ends():
    for case in (
        dict(len_q=[0, 3], len_kv=[5, 0]),
        dict(len_q=[4, 300], len_kv=[300, 4], band=Band.make(window_size=2)),
    ):
        run(case, {"policy": "eager"}, clc=True)


def test_one_pair_walks_every_unit(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)  # an odd number of SMs: one pair at least
    run(dict(len_q=[70, 20, 90], len_kv=[300, 10, 530], heads=2), {"policy": "random", "seed": 2}, clc=False)


def test_in_modelled_time_too():
    from jfa.emulator.rates import B200

    run(PROBLEMS["causal"], {"policy": "timed", "rates": B200})


# -------------------------------------------------------------------------------------------------------------- policy


def form_of(**case) -> tuple[str, str]:
    return backward_form(make(**{"head_dim": 128, **case})[0])


def test_form_by_shape():
    long, short = [2 * PAIR_KEYS], [PAIR_KEYS // 4] * 3
    assert form_of(len_q=[4], len_kv=long)[0] == "pair"
    assert form_of(len_q=[4], len_kv=long, head_dim=96)[0] == "pair"
    assert form_of(len_q=[4], len_kv=long, heads=4, kv_heads=1)[0] == "pair"
    assert form_of(len_q=200, len_kv=long)[0] == "pair"
    for case, word in (
        (dict(len_q=[4] * 3, len_kv=short), "keys per sequence"),
        (dict(len_q=[4], len_kv=long, head_dim=64), "head dim 64"),
        (dict(len_q=[4], len_kv=long, deterministic=True), "deterministic"),
    ):
        form, why = form_of(**case)
        assert form == "single" and word in why
    form, why = form_of(len_q=32, len_kv=long, heads=4, kv_heads=1)
    assert form == "resident" and "32 queries x 4 heads" in why


def test_explain_prints_the_form_and_its_reason():
    import jfa

    problem, q, k, v, _ = make([40], [2 * PAIR_KEYS], head_dim=128)
    told = str(jfa.explain(q, k, v, problem.query_offset, problem.key_offset, backend="blackwell"))
    assert f"two CTAs per tile of 256 keys: {backward_form(problem)[1]}" in told


def test_a_pair_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="form='pair' cannot be forced: deterministic"):
        backward_config(make([4], [4], deterministic=True)[0], form="pair")
    with pytest.raises(ValueError, match="form 'twin'"):
        backward_config(make([4], [4])[0], form="twin")


def test_a_call_and_its_plan_take_the_pair(monkeypatch):
    pairs = []
    monkeypatch.setattr(launch, "launch_pair", lambda *a, f=launch.launch_pair: pairs.append(f(*a)))
    problem, q, k, v, dout = make([40], [PAIR_KEYS + 10], head_dim=128)
    plan = launch.plan(problem)
    out, lse = launch.forward(problem, q, k, v, plan)
    *_, dq, dk, dv = reference(problem, q, k, v, dout)
    for name, g, w in zip("qkv", launch.backward(problem, dout, None, q, k, v, out, lse, plan), (dq, dk, dv)):
        assert_close(name, g, w, problem.dtype)
    assert len(pairs) == 1
