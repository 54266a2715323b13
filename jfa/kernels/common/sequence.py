"""Where a sequence lies in the packed tensors, and which part of the other side a tile sees.

Grouped heads (GQA, MQA) are *packed*: the G query heads that share one key/value head become G times as many query rows,
packed row r being position r // G of head r % G. So every kernel works on key/value heads only, reads K and V once for the
whole group, and sums a group's gradients without knowing that it does.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Integers that change from step to step with the data: Triton would compile anew for each that turns divisible by 16.
RUNTIME = (
    "num_batches num_sequences rows_q rows_kv rows_out tile_rows other_rows width_limit capacity slots least_chunk workers tiles "
    "padded_rows count piece lo_start lo_end hi_start hi_end"
).split()


@triton.jit
def rows_of(offsets, b, rows):
    """(first row, number of rows) of sequence b, inside the tensor's ``rows`` whatever the offsets say."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + b), 0), rows)
    end = tl.minimum(tl.maximum(tl.load(offsets + b + 1), begin), rows)
    return begin, end - begin


@triton.jit
def slack_of(offsets, num_batches, rows):
    """(first row, number of rows) past the last sequence: the rows that belong to none."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + num_batches), 0), rows)
    return begin, rows - begin


@triton.jit
def band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end):
    """(lo, hi) of a sequence: query i sees the keys i + lo <= j <= i + hi. See jfa.masks.Band."""
    d = len_kv - len_q
    return tl.maximum(lo_start, lo_end + d), tl.minimum(hi_start, hi_end + d)


@triton.jit
def seen_range(first, last, lo, hi, length, BLOCK: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Which columns the rows first..last see, cut for a peeled loop: (start, edge_blocks, bulk_start, bulk_blocks, end).

    Row i sees columns i + lo .. i + hi inside 0 .. length - 1. Blocks of BLOCK columns are counted from ``start``:
    ``edge_blocks`` that some row sees in part, then ``bulk_blocks`` that every row sees whole, then edges again until ``end``.
    """
    start = 0
    full_from = 0
    if HAS_LO:
        start = tl.minimum(tl.maximum(first + lo, 0), length)
        full_from = tl.minimum(tl.maximum(last + lo, 0), length)
    end = length
    full_to = length
    if HAS_HI:
        end = tl.maximum(tl.minimum(last + hi + 1, length), start)
        full_to = tl.maximum(tl.minimum(first + hi + 1, length), start)
    edge_blocks = tl.cdiv(tl.minimum(full_from, end) - start, BLOCK)
    bulk_start = start + edge_blocks * BLOCK
    bulk_blocks = tl.maximum(full_to - bulk_start, 0) // BLOCK
    return start, edge_blocks, bulk_start, bulk_blocks, end


@triton.jit
def edge_block(i, start, edge_blocks, bulk_start, bulk_blocks, BLOCK: tl.constexpr):
    """First column of the i-th masked block: those before the bulk, then those after it."""
    after = bulk_start + (bulk_blocks + i - edge_blocks) * BLOCK
    return tl.where(i < edge_blocks, start + i * BLOCK, after)


@triton.jit
def count_edges(edge_blocks, bulk_start, bulk_blocks, end, BLOCK: tl.constexpr):
    """How many masked blocks there are on both sides of the bulk."""
    return edge_blocks + tl.cdiv(tl.maximum(end - bulk_start - bulk_blocks * BLOCK, 0), BLOCK)


@triton.jit
def load_rows(base, rows, cols, stride_row, stride_col, limit, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, MASKED: tl.constexpr):
    """A tile [rows, BLOCK_COLS], zero in rows past ``limit`` (MASKED) and in the columns that pad COLS to a power of two."""
    pointers = base + rows[:, None] * stride_row + cols[None, :] * stride_col
    if MASKED:
        keep = (rows < limit)[:, None]
        if COLS != BLOCK_COLS:
            keep = keep & (cols < COLS)[None, :]
        return tl.load(pointers, mask=keep, other=0.0)
    if COLS != BLOCK_COLS:
        return tl.load(pointers, mask=(cols < COLS)[None, :], other=0.0)
    return tl.load(pointers)
