"""The kernel of exercise 11.6: a persistent GEMM with a fault built in, and what the emulator finds in it.

Each fault has one finding under all schedules of an instance; tests/course/test_broken_gemm.py explores them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator

ROWS, COLUMNS, DEPTH = 128, 32, 16  # of a tile of C, and of a slice of A
WORDS = {
    "DeadlockError": "deadlock",
    "RaceError": "race",
    "OverArrivalError": "over-arrival",
    "PhaseError": "phase",
    "MissingFenceError": "fence",
}


@triton.jit
def broken_gemm(a_desc, b_desc, c_desc, tiles, steps, STAGES: tl.constexpr, FAULT: tl.constexpr):
    """Compute C = A B by one program, with the fault of that name built in (see the exercise), or none."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    accs = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    acc_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            for tile in range(tiles):
                which, use = tile % 2, (tile // 2) & 1
                tlx.barrier_wait(acc_fulls[which], use)
                if FAULT == "early release":
                    tlx.barrier_arrive(acc_empties[which], 1)
                values = tlx.local_load(accs[which])
                if FAULT != "early release":
                    tlx.barrier_arrive(acc_empties[which], 1)
                if FAULT == "double release":
                    tlx.barrier_arrive(acc_empties[which], 1)
                if FAULT != "no store wait":
                    tlx.async_descriptor_store_wait(0)
                tlx.local_store(staging[0], values)
                if FAULT != "no fence":
                    tlx.fence("async_shared")
                tlx.async_descriptor_store(c_desc, staging[0], [tile * BM, 0])
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            for tile in range(tiles):
                which, use = tile % 2, (tile // 2) & 1
                tlx.barrier_wait(acc_empties[which], use ^ 1)
                for k in range(steps):
                    turn = tile * steps + k
                    slot, phase = turn % STAGES, (turn // STAGES) & 1
                    free = empties[slot]
                    tlx.barrier_wait(fulls[slot], phase)
                    if FAULT == "kept slices":
                        tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, force_async=True)
                    else:
                        tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])
                tlx.tcgen05_commit(acc_fulls[which])
        with tlx.async_task(num_warps=1, registers=24):  # load
            for tile in range(tiles):
                for k in range(steps):
                    turn = tile * steps + k
                    slot, phase = turn % STAGES, (turn // STAGES) & 1
                    tlx.barrier_wait(empties[slot], phase ^ 1)
                    if FAULT == "two announcements":
                        tlx.barrier_expect_bytes(fulls[slot], 2 * BM * BK)
                        tlx.barrier_expect_bytes(fulls[slot], 2 * BK * BN)
                    else:
                        tlx.barrier_expect_bytes(fulls[slot], 2 * (BM + BN) * BK)
                    tlx.async_descriptor_load(a_desc, a[slot], [tile * BM, k * BK], fulls[slot])
                    tlx.async_descriptor_load(b_desc, b[slot], [k * BK, 0], fulls[slot])


def launch_broken(fault: str, tiles: int, steps: int, stages: int) -> list[torch.Tensor]:
    """Launch the GEMM with a fault ("" for none) on random numbers; returns [C]."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS * tiles, DEPTH * steps, generator=g).to(torch.bfloat16)
    b = torch.randn(DEPTH * steps, COLUMNS, generator=g).to(torch.bfloat16)
    c = torch.empty(ROWS * tiles, COLUMNS)
    boxes = [
        TensorDescriptor.from_tensor(t, box)
        for t, box in ((a, [ROWS, DEPTH]), (b, [DEPTH, COLUMNS]), (c, [ROWS, COLUMNS]))
    ]
    broken_gemm[(1,)](*boxes, tiles, steps, STAGES=stages, FAULT=fault)
    return [c]


@functools.cache
def finding(fault: str, tiles: int, steps: int, stages: int) -> str:
    """Return what the emulator finds, in a word of WORDS, or "nothing"."""
    try:
        with emulator.options(policy="eager", fences="strict"):
            launch_broken(fault, tiles, steps, stages)
    except emulator.EmulatorError as error:
        return WORDS[type(error).__name__]
    return "nothing"
