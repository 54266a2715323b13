"""Lists of tiles made by one small kernel: longest first, without a sort, and without the host reading anything back.

A list is ``records`` [capacity, 9] int32, a record a tile, and ``counts`` [2] int32 = (tiles with work, all tiles). The capacity
follows from shapes alone, so that a list can be built inside a CUDA-graph capture. A record says all that a kernel must know about
its tile, so that no role of it reads offsets. Offsets are clamped, so that no lie in them leads outside a tensor.

Sorting without a sort: a tile's slot is the number of tiles before it. With work measured in rows of the other side, those of one
sequence that have more than some amount lie side by side: the work of its t-th tile is the least of four numbers,

    all rows there are,   the band's width,   one that grows by a tile's rows with t,   one that falls by as much

so they are counted by a subtraction. Ties go by sequence, then by row: a list is always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants
from jfa.kernels.common.sequence import band_of, rows_of

FIELDS = tl.constexpr(9)  # numbers of a record: q_begin, len_q, row, out_begin, kv_begin, len_kv, lo, hi, pad_begin
FAR = tl.constexpr(1 << 29)  # an open side of a band, where bounds are added and must not overflow
_TILES = 16  # tiles of a sequence that a program places at once
_OTHERS = 256  # sequences that it counts at once


def tile_list(problem: Problem, block: int, keys: bool, pad: int) -> tuple[Tensor, Tensor]:
    """(records, counts) of a problem's tiles of ``block`` queries or, with ``keys``, of ``block`` keys.

    ``pad``: rows to whose multiples the backward pads each sequence's queries (see jfa.kernels.common.padded_rows). Sequences
    without rows have no tile; neither do shared queries whose slot is not inside the output.
    """
    batches = problem.num_batches
    if problem.broadcast_q and not keys:
        capacity = batches * -(-problem.rows_q // block)
    else:
        capacity = -(-(problem.rows_kv if keys else problem.rows_q) // block) + batches
    records = torch.empty(capacity if batches else 0, FIELDS.value, dtype=torch.int32, device=problem.device)
    counts = torch.empty(2, dtype=torch.int32, device=problem.device)
    if not records.numel():
        return records, counts.zero_()
    slots = problem.output_offset if problem.output_offset is not None else problem.key_offset
    list_kernel[(batches, min(64, -(-capacity // (_TILES * batches))))](
        problem.query_offset, problem.key_offset, slots, records, counts,
        batches, problem.rows_q, problem.rows_kv, problem.rows_out, capacity,
        *band_constants(problem.band),
        BLOCK=block, KEYS=keys, BROADCAST_Q=problem.broadcast_q, SLOTS=problem.output_offset is not None, PAD=pad,
        TILES=_TILES, OTHERS=_OTHERS,
    )  # fmt: skip
    return records, counts


@triton.jit(do_not_specialize=[
    "batches", "rows_q", "rows_kv", "rows_out", "capacity", "lo_start", "lo_end", "hi_start", "hi_end"
])  # fmt: skip
def list_kernel(
    query_offset, key_offset, output_offset, records, counts, batches, rows_q, rows_kv, rows_out, capacity,
    lo_start, lo_end, hi_start, hi_end,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr, PAD: tl.constexpr,
    TILES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Program (s, p) of (batches, parts) places every parts-th group of TILES tiles of sequence s."""
    s = tl.program_id(0)
    q_begin, len_q, out_begin, kv_begin, len_kv = sequence(
        query_offset, key_offset, output_offset, s, rows_q, rows_kv, rows_out, BROADCAST_Q, SLOTS
    )
    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    rows, other, low, high = sides(len_q, len_kv, lo, hi, KEYS)
    for base in range(tl.program_id(1) * TILES, tl.cdiv(rows, BLOCK), tl.num_programs(1) * TILES):
        tile = base + tl.arange(0, TILES)
        work = tl.minimum(tl.minimum(other, BLOCK + high - low), tl.minimum(other - low - tile * BLOCK, (tile + 1) * BLOCK + high))
        work = tl.maximum(work, 0)
        slot = ties_before(tile, work, rows, other, low, high, BLOCK)
        for start in range(0, batches, OTHERS):
            others = start + tl.arange(0, OTHERS)[None, :]
            o_rows, o_other, o_low, o_high = sides_of(
                query_offset, key_offset, output_offset, others, batches, rows_q, rows_kv, rows_out,
                lo_start, lo_end, hi_start, hi_end, KEYS, BROADCAST_Q, SLOTS,
            )  # fmt: skip
            first, end = tiles_above(work[:, None] - (others < s), o_rows, o_other, o_low, o_high, BLOCK)
            slot += tl.sum(end - first, 1)
        inside = (tile < tl.cdiv(rows, BLOCK)) & (slot < capacity)
        if BROADCAST_Q:
            pad_begin = s * (tl.cdiv(rows_q, PAD) * PAD)
        else:
            pad_begin = (q_begin + s * PAD) // PAD * PAD
        store_record(records + slot * FIELDS, inside, q_begin, len_q, tile * BLOCK, out_begin, kv_begin, len_kv, lo, hi, pad_begin)
    if (s == 0) & (tl.program_id(1) == 0):
        busy = 0
        total = 0
        for start in range(0, batches, OTHERS):
            o_rows, o_other, o_low, o_high = sides_of(
                query_offset, key_offset, output_offset, start + tl.arange(0, OTHERS), batches, rows_q, rows_kv, rows_out,
                lo_start, lo_end, hi_start, hi_end, KEYS, BROADCAST_Q, SLOTS,
            )  # fmt: skip
            first, end = tiles_above(o_rows * 0, o_rows, o_other, o_low, o_high, BLOCK)
            busy += tl.sum(end - first, 0)
            total += tl.sum(tl.cdiv(o_rows, BLOCK), 0)
        tl.store(counts, tl.minimum(busy, capacity))
        tl.store(counts + 1, tl.minimum(total, capacity))


@triton.jit
def sequence(
    query_offset, key_offset, output_offset, s, rows_q, rows_kv, rows_out, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr
):
    """(q_begin, len_q, out_begin, kv_begin, len_kv) of the sequences ``s``, inside the tensors whatever the offsets say."""
    kv_begin, len_kv = rows_of(key_offset, s, rows_kv)
    if BROADCAST_Q:
        q_begin = s * 0
        len_q = q_begin + rows_q
        out_begin = s * rows_q
        if SLOTS:
            out_begin = tl.load(output_offset + s)
            len_q = tl.where((out_begin >= 0) & (out_begin <= rows_out - rows_q), len_q, 0)
            out_begin = tl.where(len_q > 0, out_begin, 0)
    else:
        q_begin, len_q = rows_of(query_offset, s, rows_q)
        out_begin = q_begin
    return q_begin, len_q, out_begin, kv_begin, len_kv


@triton.jit
def sides(len_q, len_kv, lo, hi, KEYS: tl.constexpr):
    """(rows, other, low, high): rows to cut into tiles; row i of them sees the rows i + low .. i + high of the ``other`` side's."""
    if KEYS:
        return len_kv, len_q, -tl.minimum(hi, FAR), -tl.maximum(lo, -FAR)
    else:
        return len_q, len_kv, tl.maximum(lo, -FAR), tl.minimum(hi, FAR)


@triton.jit
def sides_of(
    query_offset, key_offset, output_offset, s, batches, rows_q, rows_kv, rows_out, lo_start, lo_end, hi_start, hi_end,
    KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """:func:`sides` of the sequences ``s``; no rows past the last one."""
    _, len_q, _, _, len_kv = sequence(
        query_offset, key_offset, output_offset, tl.minimum(s, batches - 1), rows_q, rows_kv, rows_out, BROADCAST_Q, SLOTS
    )
    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    rows, other, low, high = sides(len_q, len_kv, lo, hi, KEYS)
    return tl.where(s < batches, rows, 0), other, low, high


@triton.jit
def tiles_above(work, rows, other, low, high, BLOCK: tl.constexpr):
    """(first, end) of the tiles of a sequence that have more than ``work`` to do; all of them have more than -1."""
    tiles = tl.cdiv(rows, BLOCK)
    first = tl.maximum((work - high) // BLOCK, 0)
    end = tl.minimum(tl.cdiv(other - low - work, BLOCK), tiles)
    some = (other > work) & (BLOCK + high - low > work) & (first < end)
    first = tl.where(some & (work >= 0), first, 0)
    end = tl.where(work < 0, tiles, tl.where(some, end, 0))
    return first, end


@triton.jit
def ties_before(tile, work, rows, other, low, high, BLOCK: tl.constexpr):
    """How many tiles of the sequence before ``tile`` have exactly the same ``work``."""
    first, end = tiles_above(work, rows, other, low, high, BLOCK)
    least_first, least_end = tiles_above(work - 1, rows, other, low, high, BLOCK)
    at_least = tl.maximum(tl.minimum(least_end, tile) - least_first, 0)
    return at_least - tl.maximum(tl.minimum(end, tile) - first, 0)


@triton.jit
def store_record(at, mask, q_begin, len_q, row, out_begin, kv_begin, len_kv, lo, hi, pad_begin):
    """Writes the records of several tiles of one sequence: only ``at``, ``mask`` and ``row`` differ between them."""
    tl.store(at, q_begin, mask=mask)
    tl.store(at + 1, len_q, mask=mask)
    tl.store(at + 2, row, mask=mask)
    tl.store(at + 3, out_begin, mask=mask)
    tl.store(at + 4, kv_begin, mask=mask)
    tl.store(at + 5, len_kv, mask=mask)
    tl.store(at + 6, lo, mask=mask)
    tl.store(at + 7, hi, mask=mask)
    tl.store(at + 8, pad_begin, mask=mask)
