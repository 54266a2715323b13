"""Sums of rows, the third version: right under every schedule of three tiles."""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = COLUMNS = tl.constexpr(64)


@triton.jit
def row_sums(x_desc, out_ptr, tiles, BUFFERS: tl.constexpr):
    """Add up 64 rows of x: each program a band of rows, ``tiles`` tiles of 64 columns."""
    ring = tlx.local_alloc((ROWS, COLUMNS), tl.bfloat16, BUFFERS)
    fulls = tlx.alloc_barriers(BUFFERS)
    empties = tlx.alloc_barriers(BUFFERS)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # adder
            total = tl.zeros((ROWS,), tl.float32)
            for i in range(tiles):
                slot, phase = i % BUFFERS, (i // BUFFERS) & 1
                tlx.barrier_wait(fulls[slot], phase)
                tile = tlx.local_load(ring[slot])
                tlx.barrier_arrive(empties[slot], 1)
                total += tl.sum(tile.to(tl.float32), 1)
            tl.store(out_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS), total)
        with tlx.async_task(num_warps=1, registers=24):  # loader
            for i in range(tiles):
                slot, phase = i % BUFFERS, (i // BUFFERS) & 1
                tlx.barrier_wait(empties[slot], phase ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLUMNS * 2)
                place = [tl.program_id(0) * ROWS, i * COLUMNS]
                tlx.async_descriptor_load(x_desc, ring[slot], place, fulls[slot])


def launch(tiles: int = 3, buffers: int = 2):
    """Sum 64 rows of ``tiles`` tiles, small enough for a CPU, and return the sums."""
    x = torch.randn(64, 64 * tiles, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(64)
    box = TensorDescriptor.from_tensor(x, [64, 64])
    row_sums[(1,)](box, out, tiles, buffers)
    return [out]


def one_buffer():
    """Return the same with a ring of one: no tile is fetched while another is added."""
    return launch(buffers=1)
