"""Find the blocks of the other side that a tile of packed rows, or of keys, visits."""

from __future__ import annotations

import triton
import triton.language as tl

from jfa.kernels.common.band import key_blocks, query_blocks
from jfa.kernels.common.nouns import Blocks


@triton.jit
def seen_keys(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the Blocks of BLOCK_N keys that the packed rows tile.row .. + BLOCK_M - 1 see; none where the sequence has no keys."""
    row = tile.row // GROUP
    rows = (tile.row + BLOCK_M - 1) // GROUP - row + 1
    b = tile.band
    first, bulk_begin, bulk_end, end = key_blocks(
        row, rows, tile.q.length, tile.kv.length, b.lo, b.hi, BLOCK_N, b.has_lo, b.has_hi
    )
    return Blocks(first, bulk_begin, bulk_end, tl.minimum(end, tl.cdiv(tile.kv.length, BLOCK_N)))


@triton.jit
def seen_queries(tile, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Return the Blocks of BLOCK_M packed query rows that see the keys tile.row .. + BLOCK_N - 1; surplus keys need no mask."""
    b = tile.band
    first, bulk_begin, bulk_end, end = query_blocks(
        tile.row, BLOCK_N, tile.q.length, tile.kv.length, b.lo, b.hi, BLOCK_M, b.has_lo, b.has_hi, GROUP, False
    )
    return Blocks(first, bulk_begin, bulk_end, end)
