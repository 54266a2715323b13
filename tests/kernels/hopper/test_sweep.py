"""Every synchronisation of the Hopper kernels broken in turn: the emulator finds each, or ARGUED says why not.

One program takes several tiles, so that every ring wraps. A mutant counts as found if one of its kernel's cases finds
it under one of the sweep's orders of events.
"""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa  # noqa: E402
from jfa.kernels.hopper import launch as hopper  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402
from tests.kernels.sweeping import clean_mutants, explored  # noqa: E402

SHORT = [40, 30, 50, 20, 10, 60]
CASES = {
    "forward": [
        dict(len_q=[300, 40], len_kv=[500, 200]),
        dict(len_q=[300, 40], len_kv=[500, 200], causal=True),
        dict(len_q=40, len_kv=[500, 200, 130]),
        dict(len_q=SHORT, len_kv=SHORT),
        dict(len_q=[140, 40], len_kv=[140, 70], dim=256),
        dict(len_q=[140, 40], len_kv=[140, 70], dim=192),
    ],
    "backward": [
        dict(len_q=[300], len_kv=[300]),
        dict(len_q=[300], len_kv=[300], dim=64, causal=True),
        dict(len_q=SHORT, len_kv=SHORT, dim=64),
        dict(len_q=[150, 40], len_kv=[150, 70], dim=96),
    ],
    "backward_dq": [
        dict(len_q=[300], len_kv=[300], dim=64, deterministic=True),
        dict(len_q=SHORT, len_kv=SHORT, dim=64, deterministic=True),
        dict(len_q=[200], len_kv=[300], dim=256),
        dict(len_q=SHORT, len_kv=SHORT, dim=160),
    ],
    "backward_wide": [
        dict(len_q=[300, 0], len_kv=[100, 70], dim=160),
        dict(len_q=[200], len_kv=[200], dim=256, causal=True),
        dict(len_q=SHORT, len_kv=SHORT, dim=160),
    ],
    "backward_resident": [
        dict(len_q=100, len_kv=[200, 130, 140]),
        dict(len_q=40, len_kv=[200, 130, 140], dim=64),
        dict(len_q=100, len_kv=SHORT),
    ],
}
LATE = "put off by one operation, which does not touch what it guards"
OWN_WAIT = (
    "the consumers waited for the same keys before they made the dS that this group waits for; kept, for a copy "
    "engine's writes are promised to those who wait on the copy's own barrier"
)
LEFT_WAITED = "the wait for the left piece was for all that is in flight"
TWO_TILES_BACK = (
    "before it draws again the producer has loaded a tile into the one buffer of the tile before, which all readers gave "
    "back behind the announcement whose slot this is"
)
# (how, the broken line): why nothing needs to find it.
ARGUED = {
    "forward": {
        ("drop", "tlx.named_barrier_wait(TURN + part, 256)"): "the consumers' turns are for speed alone",
        ("drop", "right = tlx.async_dot_wait(0, acc.right)"): LEFT_WAITED,
    },
    "backward": {
        ("drop", "tlx.barrier_wait(k.fulls[slot], phase)"): OWN_WAIT,
        ("late", "tlx.barrier_wait(k.fulls[slot], phase)"): OWN_WAIT,
        ("late", "tlx.barrier_wait(v.fulls[slot], phase)"): LATE,
        ("drop", "dp = tlx.async_dot_wait(0, dp)"): "the next line waits for all that is in flight, too",
        ("drop", "left = tlx.async_dot_wait(0, dv.left)"): "the line before has waited for all that is in flight",
        ("drop", "right = tlx.async_dot_wait(0, dv.right)"): LEFT_WAITED,
        ("drop", "right = tlx.async_dot_wait(0, dk.right)"): LEFT_WAITED,
        ("drop", "right = tlx.async_dot_wait(LATER, dk.right)"): LEFT_WAITED,
    },
    "backward_wide": {
        ("drop", "tlx.barrier_wait(self.numbers.empties[slot], phase ^ 1)"): TWO_TILES_BACK,
        ("late", "tlx.barrier_wait(self.numbers.empties[slot], phase ^ 1)"): TWO_TILES_BACK,
    },
    "backward_dq": {("drop", "right = tlx.async_dot_wait(0, dq.right)"): LEFT_WAITED},
    "backward_resident": {
        ("late", "tlx.barrier_wait(operands.q.fulls[0], 0)"): LATE,
        ("late", "tlx.barrier_wait(operands.k.fulls[k], k_phase)"): LATE,
        ("late", "tlx.barrier_wait(operands.v.fulls[v], v_phase)"): LATE,
        ("late", "tlx.barrier_wait(ds_ring.empties[group], use & 1)"): LATE,
        ("drop", "tlx.barrier_wait(k.fulls[slot], phase)"): OWN_WAIT,
        ("late", "tlx.barrier_wait(k.fulls[slot], phase)"): OWN_WAIT,
    },
}


def launcher(kernel: str, len_q, len_kv, dim: int = 128, **options):
    """A function that calls the op, and for a backward kernel its backward, and returns all that it writes."""
    shared = isinstance(len_q, int)
    rng = torch.Generator().manual_seed(0)
    rows_q = len_q if shared else sum(len_q)
    inputs = [torch.randn(rows, 1, dim, generator=rng).bfloat16() for rows in (rows_q, sum(len_kv), sum(len_kv))]
    dout = torch.randn(rows_q * (len(len_kv) if shared else 1), 1, dim, generator=rng).bfloat16()
    offsets = (None if shared else offsets_from_lengths(len_q), offsets_from_lengths(len_kv))

    def launch():
        tensors = [x.clone().requires_grad_(kernel != "forward") for x in inputs]
        out = jfa.jagged_flash_attention(*tensors, *offsets, broadcast_q=shared, backend="hopper", **options)
        return [out] if kernel == "forward" else list(torch.autograd.grad(out, tensors, dout))

    return launch


def files_of(kernel: str) -> tuple[str, ...]:
    """Where a kernel's synchronisations stand."""
    return f"hopper/{kernel}.py", "hopper/queue.py", "hopper/columns.py", "common/ring.py"


def mutants(kernel: str, every: int = 1):
    """See clean_mutants: of one of the kernels and of the queue, over all of its cases."""
    return clean_mutants([launcher(kernel, **case) for case in CASES[kernel]], every, files_of(kernel))


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    monkeypatch.setattr(hopper, "EMULATED_SMS", 1)


@pytest.mark.parametrize("kernel", CASES)
def test_a_sample_of_broken_synchronisations_is_found(kernel):
    judged, clean = mutants(kernel, every=7)
    assert len(judged) > 2
    assert clean <= ARGUED[kernel].keys()


LEAST = {"forward": 20, "backward": 40, "backward_dq": 20, "backward_wide": 45, "backward_resident": 40}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CASES)
def test_every_broken_synchronisation_is_found_or_argued(kernel):
    judged, clean = mutants(kernel)
    assert len(judged) > LEAST[kernel]
    assert clean == ARGUED[kernel].keys(), (
        "either nothing finds a mutant, or one that was argued away is found after all"
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1, 3])
def test_the_consumers_turns_are_for_speed_alone(case, monkeypatch):
    """Without them two programs have several classes of schedules, and none goes wrong."""
    monkeypatch.setattr(hopper, "EMULATED_SMS", 2)
    turns = {mutant: why for mutant, why in ARGUED["forward"].items() if "TURN" in mutant[1]}
    found = explored(launcher("forward", **CASES["forward"][case]), turns, "hopper/forward.py", max_ctas=1)
    assert turns and found.keys() == turns.keys()
    assert all(one.proved and one.classes > 1 for one in found.values()), [str(one) for one in found.values()]


# Instances of which every class of schedules is run; in the larger ones every ring wraps.
INSTANCES = [
    ("backward", dict(len_q=[40], len_kv=[40], dim=64)),
    ("backward", dict(len_q=[150], len_kv=[150], dim=64)),
    ("backward", dict(len_q=[130], len_kv=[40], dim=96)),
    ("backward_dq", dict(len_q=[100], len_kv=[100], dim=64, deterministic=True)),
    ("backward_resident", dict(len_q=40, len_kv=[130], dim=64)),
    pytest.param("backward", CASES["backward"][1], marks=pytest.mark.slow),
    pytest.param("backward_dq", CASES["backward_dq"][0], marks=pytest.mark.slow),
    pytest.param("backward_resident", CASES["backward_resident"][1], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kernel, case", INSTANCES)
def test_what_is_argued_of_a_backward_kernel_is_proved_for_an_instance(kernel, case):
    """No schedule of this launch goes wrong with an argued mutant."""
    found = explored(launcher(kernel, **case), ARGUED[kernel], files_of(kernel))
    two_pieces = case.get("dim") == 96  # else there are no columns to the right to wait for
    assert found.keys() == {key for key in ARGUED[kernel] if two_pieces or "right" not in key[1]}
    assert {key: str(one) for key, one in found.items() if not one.proved} == {}
