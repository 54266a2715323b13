"""The epilogue of the Blackwell forwards: O is rescaled while it is summed, divided, merged, and stored to memory.

The correction role rescales an accumulator whose maximum grew. At the tile's end it divides by the row sums: one half
at a time or, where both halves took the same queries, both merged into one. It writes O to SMEM, from where the store
role copies it to global memory.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M
from jfa.kernels.common.packed import mul_pairs


@triton.jit
def finish_tile(memory, lse_ptr, rows_out, tile, steps, walk, outs, scale, cfg: tl.constexpr):
    """Write a tile's O and LSE. Returns the halves of O done so far."""
    lse_ptr += walk.head().to(tl.int64) * rows_out + tile.out.begin
    if steps.split_keys:
        finish_split_keys(memory, tile, lse_ptr, walk.done & 1, outs, scale, cfg)
        outs += 1
    if not cfg.split_keys:
        if steps.split_keys == 0:
            for half in tl.static_range(2):
                finish_half(memory, half, steps.half_tile(tile, half), lse_ptr, walk.done & 1, outs + half, scale, cfg)
            outs += 2
    return outs


@triton.jit
def free_accumulators(accs):
    """Signal that P V may write to both accumulators."""
    for half in tl.static_range(2):
        tlx.barrier_arrive(accs.readys[half])


@triton.jit
def rescale_steps(memory, count, alphas_done, cfg: tl.constexpr):
    """Multiply O by alpha before each P V but a tile's first, if any row of the half needs it."""
    scores, accs = memory.scores, memory.accs
    for step in range(1, count):
        phase = (alphas_done + step - 1) & 1
        for half in tl.static_range(2):
            tlx.barrier_wait(scores.alpha_fulls[half], phase)
            rescale(accs.tiles[half], tlx.local_load(scores.alphas[half]), cfg)
            tlx.barrier_arrive(accs.readys[half])


@triton.jit
def rescale(acc, alpha, cfg: tl.constexpr):
    """Multiply an accumulator by alpha [M, 1], slice by slice, if any row needs it."""
    WIDTH: tl.constexpr = cfg.o_columns
    if rescale_needed(alpha):
        for i in tl.static_range(cfg.head_dim // WIDTH):
            part = tlx.subslice(acc, i * WIDTH, WIDTH)
            tlx.local_store(part, mul_pairs(tlx.local_load(part), alpha))


@triton.jit
def rescale_needed(alpha):
    """Return whether any row's factor is below 1: one answer for all warps, so that they branch together."""
    return tl.min(tl.reshape(alpha, [alpha.shape[0]]), 0) < 1.0


@triton.jit
def take_sums(rows, half: tl.constexpr, phase):
    """Return (row sum, row maximum), both [M], of a half that has seen all its keys."""
    tlx.barrier_wait(rows.fulls[half], phase)
    row_sum = tlx.local_load(rows.sums[half])
    row_max = tlx.local_load(rows.maxima[half])
    tlx.barrier_arrive(rows.empties[half])
    return row_sum, row_max


@triton.jit
def finish_half(memory, half: tl.constexpr, tile, lse_ptr, phase, outs, scale, cfg: tl.constexpr):
    """Write one half's O and LSE; its accumulator is free as soon as it has been read, while the store is still under way."""
    PARTS: tl.constexpr = cfg.o_parts
    WIDTH: tl.constexpr = cfg.o_columns
    SLICES: tl.constexpr = cfg.head_dim // PARTS // WIDTH  # of a part
    accs, o = memory.accs, memory.o
    row_sum, row_max = take_sums(memory.rows, half, phase)
    inverse = safe_inverse(row_sum)[:, None]
    if half == 0:  # there is time until the product is done; for half 1 there is none, its accumulator waits to be read
        store_lse(lse_ptr, tile, row_max, row_sum, scale)
    tlx.barrier_wait(accs.fulls[half], phase)
    for part in tl.static_range(PARTS):
        slot, phase_o = o_slot(o, outs, part, PARTS)
        tlx.barrier_wait(o.empties[slot], phase_o ^ 1)
        for i in tl.static_range(SLICES):
            columns = tlx.subslice(accs.tiles[half], (part * SLICES + i) * WIDTH, WIDTH)
            out = tlx.local_load(columns) * inverse
            if part == PARTS - 1 and i == SLICES - 1:
                tlx.barrier_arrive(accs.readys[half])
            staged = tlx.local_slice(o.buffers[slot], [0, i * WIDTH], [BLOCK_M, WIDTH])
            tlx.local_store(staged, out.to(o.buffers.dtype))
        tlx.fence("async_shared")
        tlx.barrier_arrive(o.fulls[slot])
    if half == 1:
        store_lse(lse_ptr, tile, row_max, row_sum, scale)


@triton.jit
def finish_split_keys(memory, tile, lse_ptr, phase, outs, scale, cfg: tl.constexpr):
    """Merge the halves of a tile that split its keys: each O weighted by its share of the common sum.

    Two accumulators are in registers at once, so the slices are half as wide.
    """
    PARTS: tl.constexpr = cfg.o_parts
    WIDTH: tl.constexpr = cfg.o_columns // 2
    SLICES: tl.constexpr = cfg.head_dim // PARTS // WIDTH
    accs, o = memory.accs, memory.o
    sum_0, max_0 = take_sums(memory.rows, 0, phase)
    sum_1, max_1 = take_sums(memory.rows, 1, phase)
    row_max = tl.maximum(max_0, max_1)
    weight_0 = tl.math.exp2(max_0 - row_max)
    weight_1 = tl.math.exp2(max_1 - row_max)
    row_sum = sum_0 * weight_0 + sum_1 * weight_1
    store_lse(lse_ptr, tile, row_max, row_sum, scale)
    inverse = safe_inverse(row_sum)
    weight_0 = (weight_0 * inverse)[:, None]
    weight_1 = (weight_1 * inverse)[:, None]
    tlx.barrier_wait(accs.fulls[0], phase)
    tlx.barrier_wait(accs.fulls[1], phase)
    for part in tl.static_range(PARTS):
        slot, phase_o = o_slot(o, outs, part, PARTS)
        tlx.barrier_wait(o.empties[slot], phase_o ^ 1)
        for i in tl.static_range(SLICES):
            out = tlx.local_load(tlx.subslice(accs.tiles[0], (part * SLICES + i) * WIDTH, WIDTH)) * weight_0
            out += tlx.local_load(tlx.subslice(accs.tiles[1], (part * SLICES + i) * WIDTH, WIDTH)) * weight_1
            if part == PARTS - 1 and i == SLICES - 1:
                for half in tl.static_range(2):
                    tlx.barrier_arrive(accs.readys[half])
            tlx.local_store(tlx.local_slice(o.buffers[slot], [0, i * WIDTH], [BLOCK_M, WIDTH]), out.to(o.buffers.dtype))
        tlx.fence("async_shared")
        tlx.barrier_arrive(o.fulls[slot])


@triton.jit
def o_slot(o, outs, part: tl.constexpr, PARTS: tl.constexpr):
    """Return (slot, phase) of a part of the outs-th half of O. A half fills each slot equally often, so the slot is a constant."""
    SLOTS: tl.constexpr = o.stages
    ROUNDS: tl.constexpr = PARTS // SLOTS  # per half
    tl.static_assert(PARTS % SLOTS == 0, "the parts of O go through the same slots in every half")
    slot: tl.constexpr = part % SLOTS
    return slot, (outs * ROUNDS + part // SLOTS) & 1


@triton.jit
def safe_inverse(row_sum):
    """Return 1 / row_sum; 0 for a row without keys, whose output is 0."""
    return tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


@triton.jit
def store_lse(lse_ptr, tile, row_max, row_sum, scale):
    """Write the natural log-sum-exp of 128 rows."""
    rows = tile.row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + rows, scale.lse(row_max, row_sum), mask=rows < tile.out.length)


# --------------------------------------------------------------------------------------------------------------- store


@triton.jit
def store_tile(o_desc, o, tile, head, outs, cfg: tl.constexpr):
    """Copy O from SMEM to memory, part by part; boxes end with the sequence. Returns the halves stored so far."""
    PARTS: tl.constexpr = cfg.o_parts
    halves = 1
    if not cfg.split_keys:
        halves = tl.where(tile.out.length - tile.row > BLOCK_M, 2, 1)
    for half in range(0, halves):
        for part in tl.static_range(PARTS):
            slot, phase = o_slot(o, outs, part, PARTS)
            tlx.barrier_wait(o.fulls[slot], phase)
            column = part * cfg.head_dim // PARTS
            box = tile.out.box(tile.row + half * BLOCK_M, head, column)
            tlx.async_descriptor_store(o_desc, o.buffers[slot], box)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(o.empties[slot])
        outs += 1
    return outs
