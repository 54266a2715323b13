"""From a unit of work to a tile: what a persistent kernel does before each tile.

A tile list (:class:`jfa.schedule.Tiles`) is for one head; unit u is tile ``u // HEADS``, head ``u % HEADS``: the heads of a tile,
which cost the same and share keys under GQA, stand side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def zigzag_unit(round_, worker, workers):
    """The unit that ``worker`` takes in ``round_`` of a longest-first list: every second round is dealt backwards.

    It grows with the round, so a worker is done at the first unit past the list. See :func:`jfa.schedule.zigzag_slot`.
    """
    backwards = round_ & 1
    return round_ * workers + worker + backwards * (workers - 1 - 2 * worker)


@triton.jit
def sequence_span(offset_ptr, seq, rows):
    """(begin, length) of sequence ``seq`` in a packed tensor of ``rows`` rows; offsets that lie are clamped into it."""
    begin = min(max(tl.load(offset_ptr + seq), 0), rows)
    end = min(max(tl.load(offset_ptr + seq + 1), begin), rows)
    return begin, end - begin


@triton.jit
def band_bounds(len_q, len_kv, lo_start, lo_end, hi_start, hi_end):
    """(lo, hi) of one pair of sequences: query i sees i + lo <= j <= i + hi. See :class:`jfa.masks.Band`."""
    shift = len_kv - len_q
    return max(lo_start, lo_end + shift), min(hi_start, hi_end + shift)
