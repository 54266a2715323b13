"""Mistakes that public kernels on pairs of CTAs made, or that are near at hand, put into a copy of ours: each is found.

The sweep (test_sweep_backward.py) drops and delays what is there; here something else is written in its place.
"""

import importlib.util
import inspect
import sys

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import jfa.emulator as emulator  # noqa: E402
from jfa.emulator import errors  # noqa: E402
from jfa.kernels.blackwell import backward_2cta, launch, pair  # noqa: E402
from jfa.kernels.blackwell.config import backward_config  # noqa: E402
from tests.kernels.blackwell.cases import assert_close, make, reference  # noqa: E402

ODD = dict(len_q=[200], len_kv=[300], head_dim=128)  # three tiles of 128 keys: the last pair's second CTA has none
LEAVES = (
    "import RowPointers\n",
    "import Blocks, RowPointers\n",
    "    return tile.query_blocks(TILE_N, BLOCK_M).at_least_one()\n",
    "    blocks = tile.query_blocks(TILE_N, BLOCK_M).at_least_one()\n"
    "    alone = (tlx.cluster_cta_rank() == 1) & (tile.row + BLOCK_N >= tile.kv.length)\n"
    "    one = blocks.first + tl.where(alone, 1, blocks.count())\n"
    "    return Blocks(blocks.first, blocks.bulk_begin, tl.minimum(blocks.bulk_end, one), one)\n",
)
# name: (in which module, the right text, the wrong one, and so on)
FAULTS = {
    "an odd number of tiles: a CTA without keys takes fewer steps": ("kernel", *LEAVES),
    "P goes over S before the other group has read it": (
        "kernel",
        "tlx.barrier_wait(scores.s_reads[0], phase)",
        "pass",
    ),
    "dQ goes over S before S has been read": ("kernel", "tlx.barrier_wait(scores.s_empties[0], count & 1)", "pass"),
    "both CTAs expect the bytes of both": ("pair", "CTAS * BYTES, pred=leads())", "CTAS * BYTES)"),
    "the leader expects its own bytes only": ("pair", "CTAS * BYTES, pred", "BYTES, pred"),
    "halves count on each CTA's own barrier": ("pair", "ring.fulls[slot], two_ctas=True)", "ring.fulls[slot])"),
    "each CTA arrives at its own barrier": (
        "pair",
        "tlx.barrier_arrive(bar, 1, remote_cta_rank=0)",
        "tlx.barrier_arrive(bar, 1)",
    ),
    "the other CTA issues, too": ("pair", "return tlx.cluster_cta_rank() == 0", "return tlx.cluster_cta_rank() >= 0"),
    "a commit reaches the leader only": (
        "kernel",
        "tlx.tcgen05_commit(ring.empties[slot], two_ctas=True)",
        "tlx.tcgen05_commit(ring.empties[slot])",
    ),
    "the half to be kept is sent": ("kernel", "rank == half", "rank != half"),
    "the other's dS lands at the own keys' place": (
        "kernel",
        "tlx.async_remote_shmem_copy(scores.ds_parts[rank],",
        "tlx.async_remote_shmem_copy(scores.ds_parts[1 - rank],",
    ),
    "dS is sent over one that dQ still reads": ("kernel", "grads.dq_fulls[0], phase ^ 1)", "grads.dq_fulls[0], phase)"),
    "the relay does not wait": ("kernel", "        take_ds(memory.scores, count)\n", "        pass\n"),
    "both CTAs add dQ to the same rows": (
        "kernel",
        "(0 if cfg.broadcast_q else tile.pad_begin) + rank * HALF_M",
        "(0 if cfg.broadcast_q else tile.pad_begin)",
    ),
    "both CTAs store dK of the first keys": (
        "kernel",
        "tile.kv.box(tile.row + rank * BLOCK_N,",
        "tile.kv.box(tile.row,",
    ),
    "dS goes where dK has not left": ("kernel", "tlx.barrier_wait(grads.out_pairs[0], (walk.done & 1) ^ 1)", "pass"),
    "a tile's first S goes over the last one's dQ": (
        "kernel",
        "tlx.barrier_wait(grads.dq_empties[0], (count & 1) ^ 1)",
        "pass",
    ),
}


def load(name: str, text: str, folder):
    """Return the module of a changed source, which the emulator reads from a file."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def broken_kernel(fault: str, folder):
    """Return the kernel with a fault in it or in the pair's helpers."""
    where, *texts = FAULTS[fault]
    source = {"kernel": inspect.getsource(backward_2cta), "pair": inspect.getsource(pair)}
    for right, wrong in zip(texts[::2], texts[1::2]):
        assert right in source[where], f"the kernel no longer has {right!r}"
        source[where] = source[where].replace(right, wrong)
    if where == "pair":
        load("broken_pair", source["pair"], folder)
        source["kernel"] = source["kernel"].replace("jfa.kernels.blackwell.pair import", "broken_pair import")
    return load("broken_backward_2cta", source["kernel"], folder).pair_backward_kernel


def wrong_gradients(schedule: dict) -> list[str]:
    """Run the backward; return which gradients are not those of fp64."""
    problem, q, k, v, dout = make(**ODD)
    out, lse, *want = reference(problem, q, k, v, dout)
    config = backward_config(problem, clc=False, form="pair")
    with emulator.options(**schedule):
        got = launch.backward(problem, dout, None, q, k, v, out.to(q.dtype), lse.float(), config=config)
    wrong = []
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        try:
            assert_close(name, g, w, torch.bfloat16)
        except AssertionError:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch, "EMULATED_SMS", 1)
    monkeypatch.delitem(sys.modules, "broken_pair", raising=False)
    monkeypatch.setattr(launch, "pair_backward_kernel", broken_kernel(fault, tmp_path))
    for schedule in ({"policy": "eager"}, {"policy": "lazy"}, {"policy": "random", "seed": 1}):
        try:
            if wrong_gradients(schedule):
                return
        except errors.EmulatorError:
            return
    pytest.fail("no schedule shows it")


def test_the_copy_without_a_fault_is_right(tmp_path, monkeypatch):
    monkeypatch.setitem(FAULTS, "none", ("kernel", "rank == half", "rank == half"))
    monkeypatch.setattr(launch, "pair_backward_kernel", broken_kernel("none", tmp_path))
    assert wrong_gradients({"policy": "lazy"}) == []
