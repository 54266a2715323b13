"""Every synchronisation of the backward kernels broken in turn: the emulator finds each, or it is argued here why it need not.

One CTA takes several tiles, so that every ring wraps. A mutant counts as found if one of its kernel's cases finds it under one of
the sweep's orders of events.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.emulator import explore  # noqa: E402
from jfa.kernels.blackwell import launch  # noqa: E402
from jfa.kernels.blackwell.config import BLOCK, backward_config  # noqa: E402
from jfa.kernels.common.padded_rows import padded_rows, row_constants  # noqa: E402
from jfa.kernels.common.ragged import empty_tma_ready  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import make, reference  # noqa: E402
from tests.kernels.sweeping import clean_mutants, explored  # noqa: E402

CAUSAL = Band.make(causal=True)
CASES = {
    "general": [
        (dict(len_q=[300], len_kv=[300], head_dim=128), {}),
        (dict(len_q=[300], len_kv=[300], band=CAUSAL), {}),
        (dict(len_q=[200], len_kv=[200], heads=2, kv_heads=1), {}),
        (dict(len_q=[300], len_kv=[300]), dict(clc=True)),
    ],
    "pair": [
        (dict(len_q=[300], len_kv=[300], head_dim=128), {}),
        (dict(len_q=[200], len_kv=[300], heads=2, kv_heads=1, head_dim=128, band=CAUSAL), dict(clc=True)),
    ],
    "resident": [
        (dict(len_q=100, len_kv=[200, 130, 140], head_dim=128), {}),
        (dict(len_q=100, len_kv=[200, 130, 140]), {}),
        (dict(len_q=50, len_kv=[200, 130, 140], heads=2, kv_heads=1), {}),
    ],
    "dq": [(dict(len_q=[300], len_kv=[300], band=CAUSAL, deterministic=True), {})],
}
# (how, the broken line): why nothing needs to find it.
S_READ = "put off by one operation, the load of the rows' lse, which another barrier guards"
RELAY_FENCE = 'tlx.fence("async_shared")  # another thread, perhaps of another CTA, issues what reads it'
ARGUED = {
    "general": {
        (
            "drop",
            "tlx.barrier_wait(rows.ring.fulls[slot], q_phase)",
        ): "S comes after Q, whose barrier lse and delta share; "
        "kept, for a copy engine's writes are promised to those who wait on the copy's own barrier",
        ("late", "tlx.barrier_wait(rows.ring.fulls[slot], q_phase)"): "as above",
        ("late", "tlx.barrier_wait(scores.s_fulls[0], phase)"): S_READ,
        ("late", "tlx.barrier_wait(scores.dp_fulls[0], phase)"): S_READ.replace("lse", "delta"),
    },
    "pair": {
        (
            "drop",
            RELAY_FENCE,
        ): "the other CTA's dS comes by a copy, whose readers need no fence, and its own has been fenced; kept, for "
        "what waits is not what issues the product",
        ("early", RELAY_FENCE): "as above",
        ("late", "tlx.barrier_wait(lses.fulls[slot], lse_phase)"): "put off by one operation, the wait for S",
        (
            "late",
            "tlx.barrier_wait(memory.k_columns.fulls[0], walk.done & 1)",
        ): "put off by one operation, another wait",
        ("late", "tlx.barrier_wait(scores.dp_fulls[0], phase)"): S_READ.replace("lse", "delta"),
    },
    "resident": {
        ("late", "tlx.barrier_wait(scores.s_fulls[0], phase)"): S_READ,
        ("late", "tlx.barrier_wait(scores.dp_fulls[0], phase)"): S_READ.replace("lse", "delta"),
    },
    "dq": {
        (
            "late",
            "tlx.barrier_wait(memory.dq_empties[0], (walk.done & 1) ^ 1)",
        ): "put off past S, which does not touch dQ's place",
    },
}


def launcher(kernel: str, case: dict, choices: dict):
    """A function that launches one of the kernels, nothing else, and returns all it writes."""
    problem, q, k, v, dout = make(**case)
    out, lse = reference(problem, q, k, v)
    rows = padded_rows(problem, BLOCK)
    lse2, delta = row_constants(problem, rows, out.to(q.dtype), dout, lse.float(), None)
    form = "pair" if kernel == "pair" else None
    config = dataclasses.replace(backward_config(problem, clc=False, form=form), **choices)
    lists = launch.query_list(problem, BLOCK) if kernel == "dq" else launch.key_list(problem, config.tile_rows)

    def run():
        dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
        sums = torch.zeros(problem.num_heads, rows.count, config.head_dim)
        with emulator.options(max_ctas=1):  # a single SM: its one CTA takes every tile that can be stolen
            if kernel == "resident":
                sums = launch.launch_resident(problem, dout, q, k, v, dk, dv, lse2, delta, *lists, config)
            elif kernel == "dq":
                launch.launch_dq(problem, dout, q, k, v, sums, lse2, delta, *lists)
            elif kernel == "pair":
                launch.launch_pair(problem, dout, q, k, v, dk, dv, sums, lse2, delta, *lists, config)
            else:
                launch.launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, *lists, config)
        return [sums, dk, dv]

    return run


def mutants(kernel: str, every: int = 1):
    """See clean_mutants: of one of the kernels, over all of its cases."""
    return clean_mutants([launcher(kernel, case, choices) for case, choices in CASES[kernel]], every)


@pytest.fixture(autouse=True)
def one_sm(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)


@pytest.mark.parametrize("kernel", CASES)
def test_a_sample_of_broken_synchronisations_is_found(kernel):
    judged, clean = mutants(kernel, every=7)
    assert len(judged) > 5
    assert clean <= ARGUED[kernel].keys()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CASES)
def test_every_broken_synchronisation_is_found_or_argued(kernel):
    judged, clean = mutants(kernel)
    assert len(judged) > {"general": 90, "pair": 120, "resident": 65, "dq": 40}[kernel]
    assert clean == ARGUED[kernel].keys(), (
        "either nothing finds a mutant, or one that was argued away is found after all"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel, case", [("general", 1), ("pair", 0), ("resident", 1), ("dq", 0)])
def test_what_is_argued_is_proved_for_an_instance(kernel, case):
    """No schedule of this launch goes wrong with an argued mutant: the argument holds here, whatever the clock does."""
    found = explored(launcher(kernel, *CASES[kernel][case]), ARGUED[kernel])
    assert found.keys() == ARGUED[kernel].keys()
    assert {key: str(one) for key, one in found.items() if not one.proved} == {}


def test_every_schedule_of_a_pair_is_right():
    """One tile, one block of queries: all schedules are equal but for steps that commute."""
    found = explore.explore(launcher("pair", dict(len_q=[100], len_kv=[130], head_dim=128), {}))
    assert found.proved, str(found)


@pytest.mark.slow
def test_every_schedule_of_a_pair_over_several_tiles_is_right():
    """Two tiles of three blocks each, so that every ring and every barrier wraps."""
    found = explore.explore(launcher("pair", *CASES["pair"][0]))
    assert found.proved, str(found)
