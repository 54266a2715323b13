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
def ring(count, BUFFERS: tl.constexpr):
    """(buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1
