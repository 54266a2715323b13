"""One small pipeline, and the ways to break it whose reports are kept as golden texts."""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def pipeline(src, dst, ROWS: tl.constexpr, FAULT: tl.constexpr):
    """Doubles a [4 * ROWS, 32] matrix: load by TMA into a ring of two tiles, compute, store by TMA."""
    tiles = tlx.local_alloc((ROWS, 32), tl.float32, 2)
    results = tlx.local_alloc((ROWS, 32), tl.float32, 1)
    full_bars = tlx.alloc_barriers(2)
    empty_bars = tlx.alloc_barriers(2)
    result_full = tlx.alloc_barriers(1)
    result_empty = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # compute
            for step in range(4):
                slot, phase = step % 2, step // 2 % 2
                if FAULT == "flipped phase":
                    tlx.barrier_wait(full_bars[slot], phase ^ 1)
                elif FAULT != "dropped wait":
                    tlx.barrier_wait(full_bars[slot], phase)
                value = tlx.local_load(tiles[slot])
                if FAULT != "dropped arrive":
                    tlx.barrier_arrive(empty_bars[slot])
                tlx.barrier_wait(result_empty[0], step % 2 ^ 1)
                tlx.local_store(results[0], value * 2)
                if FAULT != "missing fence":
                    tlx.fence("async_shared")
                tlx.barrier_arrive(result_full[0])
        with tlx.async_task(num_warps=1, registers=24):  # load
            for step in range(4):
                slot, phase = step % 2, step // 2 % 2
                tlx.barrier_wait(empty_bars[slot], phase ^ 1)
                if FAULT == "wrong expect-bytes":
                    tlx.barrier_expect_bytes(full_bars[slot], ROWS * 32 * 2)
                else:
                    tlx.barrier_expect_bytes(full_bars[slot], ROWS * 32 * 4)
                tlx.async_descriptor_load(src, tiles[slot], [step * ROWS, 0], full_bars[slot])
        with tlx.async_task(num_warps=1, registers=24):  # store
            for step in range(4):
                tlx.barrier_wait(result_full[0], step % 2)
                tlx.async_descriptor_store(dst, results[0], [step * ROWS, 0])
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(result_empty[0])


@triton.jit
def too_much_tensor_memory(out):
    """Two accumulators of 256 columns and one of 128."""
    scores = tlx.local_alloc((128, 256), tl.float32, 2, tlx.storage_kind.tmem)
    output = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(scores[0], tl.zeros((128, 256), tl.float32))
    tlx.local_store(output[0], tl.zeros((128, 128), tl.float32))


def double(fault="", rows=8):
    """Launch the pipeline; returns its output and what it should be."""
    source = torch.arange(4 * rows * 32, dtype=torch.float32).reshape(4 * rows, 32)
    target = torch.zeros_like(source)
    box = [rows, 32]
    pipeline[(1,)](TensorDescriptor.from_tensor(source, box), TensorDescriptor.from_tensor(target, box), rows, fault)
    return target, source * 2


FAULTS = ("dropped arrive", "dropped wait", "flipped phase", "wrong expect-bytes", "missing fence")
