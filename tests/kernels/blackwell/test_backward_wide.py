"""The Blackwell backward of queries and keys with 129 to 192 columns on the emulator against fp64; every synchronisation broken."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.block_sparse import lists_from_mask  # noqa: E402
from jfa.emulator import explore  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import BLOCK  # noqa: E402
from jfa.kernels.common.padded_rows import padded_rows, row_constants  # noqa: E402
from jfa.kernels.common.ragged import empty_tma_ready  # noqa: E402
from jfa.masks import Band  # noqa: E402
from jfa.reference import attention  # noqa: E402
from tests.kernels.blackwell.cases import SCHEDULE_NAMES, SCHEDULES, assert_close, make, reference  # noqa: E402
from tests.kernels.sweeping import clean_mutants, explored  # noqa: E402

CAUSAL = Band.make(causal=True)
MLA = dict(head_dim=192, head_dim_v=128)
PROBLEMS = {
    # zero-length queries and keys, one key, tails on both sides of every block
    "jagged": dict(len_q=[300, 5, 128, 0, 9], len_kv=[200, 150, 1, 30, 0], heads=2, kv_heads=1, **MLA),
    "causal": dict(len_q=[300, 130, 40], len_kv=[300, 200, 10], band=CAUSAL, **MLA),
    "top-left": dict(len_q=[150, 270], len_kv=[60, 300], band=Band.make(causal="top_left"), **MLA),
    "window": dict(len_q=[400, 30], len_kv=[200, 300], band=Band.make(window_size=60), **MLA),
    "causal-window": dict(
        len_q=[200, 130], len_kv=[300, 100], band=Band.make(True, (70, 20)), heads=4, kv_heads=2, **MLA
    ),
    "one long": dict(len_q=[3, 700, 8], len_kv=[900, 40, 7], head_dim=160, head_dim_v=128, dtype=torch.float16),
    "d136-dv64": dict(len_q=[70, 30], len_kv=[40, 140], head_dim=136, head_dim_v=64, heads=3, kv_heads=1),
    "d129-dv24": dict(len_q=[70], len_kv=[90], head_dim=129, head_dim_v=24),
    "negative-scale": dict(len_q=[140], len_kv=[200], sm_scale=-0.05, band=CAUSAL, **MLA),
    "zero-scale": dict(len_q=[40], len_kv=[130], sm_scale=0.0, **MLA),
}


def run(case: dict, schedule: dict):
    problem, q, k, v, dout = make(**case)
    out, lse, *want = reference(problem, q, k, v, dout)
    with emulator.options(**schedule):
        got = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float())
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert g.dtype == problem.dtype and g.is_contiguous()
        assert_close(name, g, w, problem.dtype)
    return got


@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_fp64(name):
    run(PROBLEMS[name], {"policy": "random", "seed": 7})


@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_NAMES)
@pytest.mark.parametrize("name", ["causal", "d136-dv64"])
def test_any_order_of_events_gives_the_same_bits(name, schedule):
    first = run(PROBLEMS[name], {"policy": "eager"})
    again = run(PROBLEMS[name], schedule)
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("seed", range(3))
def test_random_jagged_lengths(seed):
    rng = torch.Generator().manual_seed(seed)
    len_q, len_kv = (torch.randint(0, 260, (5,), generator=rng).tolist() for _ in range(2))
    window = torch.randint(0, 200, (2,), generator=rng).tolist()
    band = (Band(), CAUSAL, Band.make(window_size=tuple(window)))[seed]
    run(
        dict(len_q=len_q, len_kv=len_kv, band=band, heads=2, kv_heads=2 - seed % 2, seed=seed, **MLA),
        SCHEDULES[2 + seed],
    )


def test_gradient_of_the_log_sum_exp():
    problem, q, k, v, dout = make([70, 20], [90, 0], **MLA)
    inputs = [x.double().nan_to_num().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, problem.query_offset, problem.key_offset, sm_scale=problem.sm_scale, return_lse=True)
    dlse = torch.linspace(-1, 1, lse.numel()).reshape(lse.shape)
    finite = torch.isfinite(lse)
    loss = (out * dout.double()).sum() + (lse[finite] * dlse.double()[finite]).sum()
    want = torch.autograd.grad(loss, inputs)
    got = launch.backward(problem, dout, dlse, q, k, v, out.detach().to(q.dtype), lse.detach().float())
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert_close(name, g, w, problem.dtype)


@pytest.mark.parametrize("largest", [1e6, 1e10, 1e30])
def test_huge_scores_give_finite_gradients(largest):
    """The largest score of a row leads by far, so P is 1 there and dQ, dK are next to nothing: dV is what can be compared."""
    problem, q, k, v, dout = make([60, 140], [200, 40], seed=3, **MLA)
    grow = (largest / (q[:200].float().norm(dim=2).max() * k[:240].float().norm(dim=2).max())) ** 0.5
    q, k = (q * grow).to(q.dtype), (k * grow).to(k.dtype)
    out, lse, *want = reference(problem, q, k, v, dout)
    dq, dk, dv = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float())
    assert torch.isfinite(dq).all() and torch.isfinite(dk).all()
    assert_close("dv", dv, want[2], problem.dtype)


def test_nothing_to_do_ends():
    run(dict(len_q=[0, 3], len_kv=[5, 0], **MLA), {"policy": "eager"})
    run(dict(len_q=[4, 300], len_kv=[300, 4], band=Band.make(window_size=2), **MLA), {"policy": "lazy"})


def test_a_plan_carries_the_list_of_dq():
    problem, q, k, v, dout = make([140, 20], [150, 30], **MLA)
    plan = launch.plan(problem)
    assert len(plan) == 6
    out, lse = launch.forward(problem, q, k, v, plan)
    *_, dq, dk, dv = reference(problem, q, k, v, dout)
    for name, g, w in zip(
        ("dq", "dk", "dv"), launch.backward(problem, dout, None, q, k, v, out, lse, plan), (dq, dk, dv)
    ):
        assert_close(name, g, w, problem.dtype)


def test_explain_names_the_kernels():
    problem, *_ = make([140], [150], **MLA)
    for deterministic in (False, True):
        how = launch.forms(dataclasses.replace(problem, deterministic=deterministic))["backward"]
        assert "a kernel for dK and dV, one for dQ" in how and "192 (> 128)" in how


def test_shared_queries_and_block_lists_are_the_portable_kernels():
    problem, q, k, v, dout = make(40, [200, 0, 129], **MLA)
    assert (
        "portable kernels: head dim 192 (> 128) with queries that all sequences share"
        in launch.forms(problem)["backward"]
    )
    out, lse, *want = reference(problem, q, k, v, dout)
    got = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float(), launch.plan(problem))
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        assert_close(name, g, w, problem.dtype)
    problem, q, k, *_ = make([140], [150], **MLA)
    mask = [torch.ones(1, 2, 2).bool()]
    lists = lists_from_mask(mask, problem.query_offset, problem.key_offset, total_q=len(q), total_kv=len(k))
    assert "with block lists" in launch.forms(dataclasses.replace(problem, block_lists=lists))["backward"]


# One CTA takes several tiles, so that every ring wraps.
CASES = {
    "dkdv": [
        dict(len_q=[300], len_kv=[300], band=CAUSAL, **MLA),
        dict(len_q=[200], len_kv=[200], heads=2, kv_heads=1, **MLA),
    ],
    "dq": [dict(len_q=[300], len_kv=[400], band=CAUSAL, **MLA)],
}
# (how, the broken line): why nothing needs to find it.
ROWS_HERE = "tlx.barrier_wait(ring.fulls[slot], phase)"
DKV_READ = "tlx.barrier_wait(memory.dkv_empties[0], (walk.done & 1) ^ 1)"
ARGUED = {
    "dkdv": {
        (
            "drop",
            DKV_READ,
        ): "a group's last piece waits for the slot of the third, which both groups fill behind dV; and dK's "
        "first product stands behind P of both; kept, for it does not hang on the number of slots",
        ("late", DKV_READ): "as above",
        ("drop", ROWS_HERE): "S comes after Q, whose barrier lse and delta share; kept, for a copy engine's writes are "
        "promised to those who wait on the copy's own barrier",
        ("late", ROWS_HERE): "as above",
        (
            "late",
            "tlx.barrier_wait(scores.s_fulls[at], (count >> 1) & 1)",
        ): "put off by one operation, the load of the rows' lse, which another barrier guards",
    },
    "dq": {},
}


def launcher(kernel: str, case: dict):
    """A function that launches one of the kernels, nothing else, and returns all it writes."""
    problem, q, k, v, dout = make(**case)
    out, lse = reference(problem, q, k, v)
    lse2, delta = row_constants(problem, padded_rows(problem, BLOCK), out.to(q.dtype), dout, lse.float(), None)
    lists = launch.query_list(problem, BLOCK) if kernel == "dq" else launch.key_list(problem)

    def run():
        dq, dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (q, k, v))
        with emulator.options(max_ctas=1):
            if kernel == "dq":
                launch.launch_wide_dq(problem, dout, q, k, v, dq, lse2, delta, *lists)
            else:
                launch.launch_wide(problem, dout, q, k, v, dk, dv, lse2, delta, *lists)
        return [dq, dk, dv]

    return run


def mutants(kernel: str, every: int = 1):
    """See clean_mutants: of one of the kernels, over all of its cases."""
    return clean_mutants([launcher(kernel, case) for case in CASES[kernel]], every)


@pytest.fixture()
def one_sm(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)


@pytest.mark.parametrize("kernel", CASES)
def test_a_sample_of_broken_synchronisations_is_found(kernel, one_sm):
    judged, clean = mutants(kernel, every=7)
    assert len(judged) > 5
    assert clean <= ARGUED[kernel].keys()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CASES)
def test_every_broken_synchronisation_is_found_or_argued(kernel, one_sm):
    judged, clean = mutants(kernel)
    assert len(judged) > {"dkdv": 45, "dq": 35}[kernel]
    assert clean == ARGUED[kernel].keys(), (
        "either nothing finds a mutant, or one that was argued away is found after all"
    )


@pytest.mark.slow
def test_what_is_argued_is_proved_for_an_instance(one_sm):
    """No schedule of this launch goes wrong with an argued mutant: the argument holds here, whatever the clock does."""
    found = explored(launcher("dkdv", CASES["dkdv"][0]), ARGUED["dkdv"])
    assert found.keys() == ARGUED["dkdv"].keys()
    assert {key: str(one) for key, one in found.items() if not one.proved} == {}


@pytest.mark.parametrize("kernel, len_q, len_kv", [("dkdv", 130, 200), ("dq", 200, 130)])
def test_every_schedule_is_right(kernel, len_q, len_kv, one_sm):
    """Two tiles of three blocks each, so that every barrier wraps."""
    found = explore.explore(launcher(kernel, dict(len_q=[len_q], len_kv=[len_kv], **MLA)))
    assert found.proved, str(found)
