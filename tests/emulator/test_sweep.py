"""Fault sweeps: every synchronisation of a kernel broken in turn. A sample runs always, the four public kernels behind
`slow`."""

import os

import pytest

import jfa.emulator as emulator
from jfa.emulator import sweep

from . import tutorials

pytest.importorskip("triton.language.extra.tlx")
from .reports import kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# The mutants of the public kernels that nothing finds, each with the reason why it is no fault. (line, kind of site): reason.
SUPERFLUOUS = {
    "gemm_ws": {
        (
            995,
            "barrier_wait",
        ): "with one MMA group last_a_buf is the buffer whose empty barrier was waited for a few lines above",
        (807, "async_descriptor_store_wait"): "two slices, two staging buffers: none is used "
        "twice in a tile, and the wait for all follows",
    },
    "fa_ws": {
        (194, "barrier_wait"): "correction reads alpha before it arrives on acc_fulls, "
        "the MMA task waits for that before the next Q K, "
        "and softmax waits for that product: alpha is free by then",
    },
    "fa_ws_pipelined": {
        (506, "barrier_wait"): "the first K of a kernel of one tile: a fresh barrier, the wait passes at once",
        (522, "barrier_wait"): "the first V, likewise",
        (151, "barrier_wait"): "alpha, as in fa_ws line 194",
    },
    "fa_clc": {
        (749, "barrier_wait"): "q_empties is committed after the tile's last Q K and "
        "P V before it, in order: it implies the three oldest "
        "slots of the ring are free, and it was waited for above",
        (759, "barrier_wait"): "q_empties of both groups are committed together "
        "(lines 688, 689): the first wait implies the second",
        (767, "barrier_wait"): "as line 749, one slot on",
        (186, "barrier_wait"): "alpha, as in fa_ws line 194",
        (428, "barrier_wait"): "the correction task asks for the next tile, for which "
        "it waits until the epilogue has answered the last "
        "response, which it does after its store: o is free by then",
    },
}
LAUNCHES = {
    "gemm_ws": tutorials._gemm("blackwell_gemm_ws", 384, 128, 320, tutorials.GEMM_WS),
    "fa_ws": tutorials._attention("blackwell_fa_ws", 512, 128, False, tutorials.FA, takes_causal=False),
    "fa_ws_pipelined": tutorials.CASES["fa_ws_pipelined"],
    "fa_clc": tutorials._attention("blackwell_fa_clc", 512, 128, False, tutorials.FA_PP, h=2),
}
SKETCHED = (
    "drop",
    "flip",
    "nobar",
)  # the ways to break a site that the first sketch of this emulator knew: 215 of 230 found


def _sweep(name, **options):
    launch, _, _ = LAUNCHES[name]()
    with tutorials.no_gpu(sms=1), emulator.options(max_ctas=1):
        return sweep.sweep(launch, **options)


def _unexplained(name, result):
    return [str(m) for m in result.clean if (m.site.line, m.site.kind) not in SUPERFLUOUS[name]]


def test_every_fault_in_our_pipeline_is_found():
    """tests/emulator/reports/kernels.py has no superfluous synchronisation."""
    result = sweep.sweep(lambda: [kernels.double()[0]])
    assert len(result.mutants) >= 19
    assert [str(m) for m in result.clean] == []
    assert {m.found for m in result.mutants} >= {"DeadlockError", "RaceError", "MissingFenceError", "ExpectBytesError"}


def test_a_fence_that_comes_too_early_is_found():
    """In our pipeline each fence covers a store of its own task; one that comes before the store covers nothing."""
    result = sweep.sweep(lambda: [kernels.double()[0]], select=lambda m: m.how == "early")
    assert result.mutants and [m.found for m in result.mutants] == ["MissingFenceError"] * len(result.mutants)


def test_the_table_lists_what_was_not_found():
    site = sweep.Site("barrier_wait", __file__, 1, 3)
    result = sweep.Result([sweep.Mutant(site, "drop", "RaceError"), sweep.Mutant(site, "flip")])
    table = result.table()
    assert "2 mutants, 1 found" in table and "not found:" in table and "CLEAN" in table
    assert "test_sweep.py:1 " in table.splitlines()[-1], "a kernel's sites lie in several files"


@pytest.mark.skipif(not os.path.isdir(tutorials.TUTORIALS), reason="needs fbtriton's tutorials")
def test_a_sample_of_a_public_kernel():
    result = _sweep("gemm_ws", select=lambda m: m.how in ("drop", "nobar"))
    assert _unexplained("gemm_ws", result) == []
    assert len(result.found) >= 13


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir(tutorials.TUTORIALS), reason="needs fbtriton's tutorials")
def test_public_kernels_whole():
    """At least as many of the sketch's mutants as the sketch found; every clean one is argued above."""
    found = total = 0
    for name in LAUNCHES:
        result = _sweep(name)
        print(f"{name}: {result.table()}")
        assert _unexplained(name, result) == []
        old = [m for m in result.mutants if m.how in SKETCHED and m.site.kind != "fence"]
        found, total = found + sum(bool(m.found) for m in old), total + len(old)
    print(f"of the kinds of the first sketch: {found} of {total} found")
    assert found >= 215 and total - found <= 11


def test_of_several_kernels_one_is_broken():
    """Both launches run the same lines; only what the kernel of that name executes is a site."""
    both = lambda: [kernels.double()[0]]
    whole = sweep.sites(both)
    assert sweep.sites(both, "pipeline") == whole and sweep.sites(both, "gemm") == []
    assert sweep.sweep(both, kernel="gemm").mutants == []
    unbroken = sweep.judge(sweep.Mutant(whole[0], "drop"), both, [t.clone() for t in both()], kernel="gemm")
    assert not unbroken.found, "in a kernel of another name nothing is broken"


def test_what_there_was_no_time_for_is_counted():
    result = sweep.sweep(lambda: [kernels.double()[0]], seconds=0)
    assert result.mutants == [] and len(result.untried) >= 19
    assert f"not tried, for lack of time: {len(result.untried)}" in result.table()
