"""Rings of buffers between a role that fills them and roles that empty them.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import aggregate


@aggregate
class Ring:
    """Buffers that are filled and emptied in turn; several equal rings may share an allocation.

    Attributes:
        buffers, fulls, empties: memory, and two barriers per buffer: its data is there; all have read it.
        stages: number of buffers of this ring.
        bytes: size of a buffer, which a copy engine counts.
        first: index of this ring's first buffer.
    """

    buffers: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    stages: tl.constexpr
    bytes: tl.constexpr
    first: tl.constexpr

    @triton.jit
    def slot(self, count):
        """Return (slot, phase) of the count-th use: a reader waits for that phase of fulls, a writer for the other."""
        slot, phase = ring_slot(count, self.stages)
        return self.first + slot, phase

    @triton.jit
    def nth(self, number: tl.constexpr):
        """Return the ring that lies ``number`` rings behind this one."""
        first: tl.constexpr = self.first + number * self.stages
        return Ring(self.buffers, self.fulls, self.empties, self.stages, self.bytes, first)

    @triton.jit
    def load(self, count, desc, box):
        """Fill the count-th slot with one box by TMA, once its readers have left."""
        slot, phase = self.slot(count)
        tlx.barrier_wait(self.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(self.fulls[slot], self.bytes)
        tlx.async_descriptor_load(desc, self.buffers[slot], box, self.fulls[slot])


@triton.jit
def ring_slot(count, STAGES: tl.constexpr):
    """Return (slot, phase) of the count-th use of a ring of STAGES buffers."""
    return count % STAGES, (count // STAGES) & 1


@triton.jit
def pair_slot(count):
    """Return ring_slot(count, 2), written with masks: from divisions compilers make several counters to carry along.

    Where a loop has registers to spare the divisions are as fast, and in one forward variant (D = 256) they spill less.
    """
    return count & 1, (count >> 1) & 1


@triton.jit
def alloc_ring(
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    READERS: tl.constexpr,
    RINGS: tl.constexpr = 1,
    BY_THREAD: tl.constexpr = False,
):
    """Allocate a ring of boxes [ROWS, COLUMNS] that READERS empty, or RINGS of them side by side.

    BY_THREAD: readers are warp groups whose threads arrive one by one, which saves them two synchronizations per
    arrival.
    """
    BUFFERS: tl.constexpr = RINGS * STAGES
    buffers = tlx.local_alloc((ROWS, COLUMNS), DTYPE, BUFFERS)
    fulls = tlx.alloc_barriers(BUFFERS, arrive_count=1)
    if BY_THREAD:
        empties = tlx.alloc_warp_barrier(BUFFERS, num_warps=4, num_arrivals=READERS)
    else:
        empties = tlx.alloc_barriers(BUFFERS, arrive_count=READERS)
    return Ring(buffers, fulls, empties, STAGES, ROWS * COLUMNS * tlx.size_of(DTYPE), 0)
