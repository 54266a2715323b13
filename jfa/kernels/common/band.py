"""The band mask inside a kernel: which key blocks a query tile needs, and which pairs of a block count.

A tile's pairs satisfy ``i + lo <= j <= i + hi`` and ``j < len_kv``; :class:`jfa.masks.Band` says where lo and hi come from. Most
blocks of a tile lie wholly inside the band, so loops are peeled: masked blocks at both edges, an unmasked bulk between them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_blocks(row0, rows, len_q, len_kv, lo, hi, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Return the key blocks of the queries [row0, row0 + rows): (first, bulk_begin, bulk_end, end), numbered in units of BLOCK_N.

    Blocks [bulk_begin, bulk_end) need no mask. A tile without keys gets first = 0, end = 1: one block, wholly masked, so that
    every role of a kernel takes the same path.
    """
    last_row = min(row0 + rows, len_q) - 1
    j_end = len_kv
    bulk_stop = len_kv
    if HAS_HI:
        j_end = max(0, min(j_end, last_row + hi + 1))
        bulk_stop = max(0, min(bulk_stop, row0 + hi + 1))
    j_begin = 0
    bulk_start = 0
    if HAS_LO:
        j_begin = max(0, row0 + lo)
        bulk_start = max(0, last_row + lo)
    first = j_begin // BLOCK_N
    end = tl.cdiv(j_end, BLOCK_N)
    if j_begin >= j_end:
        first = 0
        end = 1
    bulk_begin = min(end, max(first, tl.cdiv(bulk_start, BLOCK_N)))
    bulk_end = max(bulk_begin, min(end, bulk_stop // BLOCK_N))
    return first, bulk_begin, bulk_end, end


@triton.jit
def query_blocks(
    key0,
    keys,
    len_q,
    len_kv,
    lo,
    hi,
    BLOCK_M: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    GROUP: tl.constexpr = 1,
    MASK_SURPLUS: tl.constexpr = True,
):
    """Return the query blocks that see the keys [key0, key0 + keys): (first, bulk_begin, bulk_end, end), counted in BLOCK_M.

    The mirror of :func:`key_blocks` for the backward, whose outer loop walks key tiles. Here a tile without queries gets
    first = end. A key tile that hangs over the sequence's end has no bulk: its surplus keys must be masked everywhere, unless
    MASK_SURPLUS is False. A query has GROUP rows: blocks are of BLOCK_M rows, queries and keys are positions.
    """
    last_key = min(key0 + keys, len_kv) - 1
    i_begin = 0
    bulk_start = 0
    if HAS_HI:
        i_begin = max(0, key0 - hi)
        bulk_start = max(0, last_key - hi)
    i_end = len_q
    bulk_stop = len_q
    if HAS_LO:
        i_end = max(0, min(i_end, last_key - lo + 1))
        bulk_stop = max(0, min(bulk_stop, key0 - lo + 1))
    if GROUP > 1:
        i_begin = min(i_begin, len_q) * GROUP  # a product of bounds beyond any row would overflow
        bulk_start = min(bulk_start, len_q) * GROUP
        i_end = i_end * GROUP
    first = i_begin // BLOCK_M
    end = max(first, tl.cdiv(i_end, BLOCK_M))
    bulk_begin = min(end, max(first, tl.cdiv(bulk_start, BLOCK_M)))
    rows = bulk_stop * GROUP
    bulk_end = tl.cdiv(rows, BLOCK_M) if bulk_stop == len_q else rows // BLOCK_M
    bulk_end = max(bulk_begin, min(end, bulk_end))
    if MASK_SURPLUS:
        if key0 + keys > len_kv:
            bulk_end = bulk_begin
    return first, bulk_begin, bulk_end, end


@triton.jit
def in_band(i, j, len_kv, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Return which pairs count: ``i`` and ``j`` are query and key positions that broadcast against each other."""
    valid = j < len_kv
    if HAS_LO:
        valid = valid & (j >= i + lo)
    if HAS_HI:
        valid = valid & (j <= i + hi)
    return valid
