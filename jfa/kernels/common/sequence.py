"""Rows and band of one sequence, from the offsets; :mod:`jfa.kernels.common.sequences` has all of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(offsets, b, rows):
    """Return (first row, number of rows) of sequence b, inside the tensor's ``rows`` whatever the offsets say, as int32."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + b), 0), rows)
    end = tl.minimum(tl.maximum(tl.load(offsets + b + 1), begin), rows)
    return tl.cast(begin, tl.int32), tl.cast(end - begin, tl.int32)


@triton.jit
def band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end):
    """Return (lo, hi) of a sequence: query i sees the keys i + lo <= j <= i + hi. See jfa.masks.Band."""
    d = len_kv - len_q
    return tl.maximum(lo_start, lo_end + d), tl.minimum(hi_start, hi_end + d)
