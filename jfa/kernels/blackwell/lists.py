"""How a role reads a tile's record (see :mod:`jfa.kernels.common.tile_list`).

A role reads one row a tile, all of it at once, in place of walking from a tile to its sequence to its offsets; and the kernel
carries one pointer where it would carry six, which matters to a softmax group whose registers are full of scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jfa.kernels.common.tile_list import FIELDS


@triton.jit
def read_record(records_ptr, tile):
    """The record of a tile: (row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, pad_begin).

    ``row`` is the tile's first row inside its sequence (of queries in a forward list, of keys in a backward one).
    """
    at = records_ptr + tile * FIELDS
    return (
        tl.load(at + 2), tl.load(at), tl.load(at + 1), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 3), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8),
    )  # fmt: skip


@triton.jit
def read_shape(records_ptr, tile, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """What decides how long a tile is: (row, q_len, k_len, lo, hi); an open side of the band is not read, and 0."""
    at = records_ptr + tile * FIELDS
    lo = 0
    hi = 0
    if HAS_LO:
        lo = tl.load(at + 6)
    if HAS_HI:
        hi = tl.load(at + 7)
    return tl.load(at + 2), tl.load(at + 1), tl.load(at + 5), lo, hi


@triton.jit
def read_out_begin(records_ptr, tile):
    """The first output row of a tile's sequence."""
    return tl.load(records_ptr + tile * FIELDS + 3)
