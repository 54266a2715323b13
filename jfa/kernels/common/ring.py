"""Rings of buffers between a role that fills them and roles that empty them.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import aggregate


@aggregate
class Ring:
    """Buffers that are filled and emptied in turn: the n-th use has buffer n modulo ``stages``.

    Attributes:
        buffers: as many as ``stages``, or a multiple: several rings side by side, of which ring r starts at r * stages.
        fulls: barriers that say that a buffer's data is there.
        empties: barriers that say that everybody has read it.
        stages: number of buffers.
        bytes: of one buffer, as a copy engine counts them.
    """

    buffers: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    stages: tl.constexpr
    bytes: tl.constexpr

    @triton.jit
    def slot(self, count):
        """Return (slot, phase) of the count-th use: a reader waits for that phase of fulls, a writer for the other."""
        return ring_slot(count, self.stages)

    @triton.jit
    def load(self, slot, phase, desc, box):
        """Fill a slot with one box by TMA, once its readers have left."""
        tlx.barrier_wait(self.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(self.fulls[slot], self.bytes)
        tlx.async_descriptor_load(desc, self.buffers[slot], box, self.fulls[slot])


@triton.jit
def ring_slot(count, STAGES: tl.constexpr):
    """Return (slot, phase) of the count-th use of a ring of STAGES buffers."""
    return count % STAGES, (count // STAGES) & 1


@triton.jit
def alloc_ring(
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr, READERS: tl.constexpr
):
    """Allocate a ring of boxes [ROWS, COLUMNS] that one role fills and READERS arrivals empty."""
    buffers = tlx.local_alloc((ROWS, COLUMNS), DTYPE, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=READERS)
    return Ring(buffers, fulls, empties, STAGES, ROWS * COLUMNS * tlx.size_of(DTYPE))
