"""Every synchronisation of the MXFP8 forward broken in turn: the emulator finds each, or it is argued here why it need not."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.kernels.blackwell import launch, mxfp8_launch  # noqa: E402
from jfa.kernels.blackwell.config import mxfp8_config  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell.cases import make  # noqa: E402
from tests.kernels.sweeping import clean_mutants  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CASES = {  # several tiles a CTA, so that every ring wraps; tiles of both kinds
    "halves": dict(len_q=[300, 280], len_kv=[300, 140]),
    "split": dict(len_q=[100, 60], len_kv=[600, 300], band=Band.make(causal=True)),
}
FILES = ("mxfp8_forward.py", "scales.py", "ring.py", "forward.py")

# (how, text of the line) of what no launch finds: why.
LATER = "put off by one operation, which does not touch what it guards"
ARGUED = {
    (
        "drop",
        "tlx.barrier_wait(accs.fulls[0], phase)",
    ): "that of half 1, waited for next, is committed later by the same pipe",
    ("late", "tlx.barrier_wait(accs.fulls[0], phase)"): LATER,
    ("late", "tlx.barrier_wait(accs.fulls[1], phase)"): LATER,
    ("late", "tlx.barrier_wait(o.empties[part], (outs & 1) ^ 1)"): LATER,
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
