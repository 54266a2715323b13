"""Every synchronisation of the MXFP8 forward broken in turn: the emulator finds each, or it is argued here why it need not."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.kernels.blackwell import launch, mxfp8_launch  # noqa: E402
from jfa.kernels.blackwell.config import mxfp8_backward_config, mxfp8_config  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import make  # noqa: E402
from tests.kernels.sweeping import clean_mutants  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CASES = {  # several tiles per CTA, so that every ring wraps; tiles of both kinds
    "halves": dict(len_q=[300, 280], len_kv=[300, 140]),
    "split": dict(len_q=[100, 60], len_kv=[600, 300], band=Band.make(causal=True)),
}
FILES = ("mxfp8_forward.py", "scales.py", "ring.py", "forward.py", "epilogue.py")

# (how, text of the line) of what no launch finds: why.
LATER = "put off by one operation, which does not touch what it guards"
ARGUED = {
    (
        "drop",
        "tlx.barrier_wait(accs.fulls[0], phase)",
    ): "that of half 1, waited for next, is committed later by the same pipe",
    ("late", "tlx.barrier_wait(accs.fulls[0], phase)"): LATER,
    ("late", "tlx.barrier_wait(accs.fulls[1], phase)"): LATER,
    ("late", "tlx.barrier_wait(o.empties[slot], phase_o ^ 1)"): LATER,
    ("late", "tlx.barrier_wait(k.ring.fulls[slot], phase)"): LATER,  # the copy of Q's scales
}


def launches():
    """A launch per case, static, with short rings."""
    for case in CASES.values():
        problem, q, k, v, _ = make(**case)
        config = replace(mxfp8_config(problem, clc=False), kv_slots=4)
        lists = launch.query_list(problem, config.tile_rows)
        yield lambda a=(problem, q, k, v, lists, config): [mxfp8_launch.forward(*a)[0].nan_to_num()]


def test_every_broken_synchronisation_is_found(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    mutants, clean = clean_mutants(launches(), where=FILES)
    assert len(mutants) > 60
    assert clean == set(ARGUED)


BACKWARD_CASES = {  # several tiles per CTA, heads that share keys
    "full": dict(len_q=[150, 140], len_kv=[150, 40], head_dim=128),
    "causal": dict(len_q=[260], len_kv=[260], heads=2, kv_heads=1, band=Band.make(causal=True)),
}
BACKWARD_FILES = ("mxfp8_backward.py", "scales.py", "ring.py", "backward_1cta.py")
IMPLIED = "S is made of that Q; but only who waits on a copy's own barrier is promised to see what it wrote"
BACKWARD_ARGUED = {
    ("drop", "tlx.barrier_wait(rows.ring.fulls[slot], q_phase)"): IMPLIED,
    ("late", "tlx.barrier_wait(rows.ring.fulls[slot], q_phase)"): IMPLIED,
    # The operation in between loads lse or delta, copies the other operand's scales, or is another wait.
    ("late", "tlx.barrier_wait(scores.dp_fulls[0], phase)"): LATER,
    ("late", "tlx.barrier_wait(q.ring.fulls[slot], phase)"): LATER,
    ("late", "tlx.barrier_wait(do.ring.fulls[slot], phase)"): LATER,
    ("late", "tlx.barrier_wait(grads.dq_empties[0], phase ^ 1)"): LATER,
    ("late", "tlx.barrier_wait(grads.dq_empties[0], phase)"): LATER,  # the copy of dS's codes
}


def backward_launches():
    """A launch of the backward per case, static."""
    for case in BACKWARD_CASES.values():
        problem, q, k, v, dout = make(**case)
        config = mxfp8_backward_config(problem, clc=False)
        out, lse = mxfp8_launch.forward(problem, q, k, v)
        lists = launch.query_list(problem, 256) + launch.key_list(problem)
        a = (problem, dout, None, q, k, v, out, lse, lists)
        yield lambda a=a, config=config: [x.nan_to_num() for x in mxfp8_launch.backward(*a, config=config)]


def test_every_broken_synchronisation_of_the_backward_is_found(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    mutants, clean = clean_mutants(backward_launches(), where=BACKWARD_FILES)
    assert len(mutants) > 60
    assert clean == set(BACKWARD_ARGUED)
