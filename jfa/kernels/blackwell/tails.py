"""Rows of up to 192 columns in the Blackwell backward: a box of 128 columns and a *tail* of 64.

A product over columns is two products into one sum, a sum with columns is two sums side by side. Results are stored in pieces of 64
columns, so that the operands of the next tile can be loaded meanwhile.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring


@aggregate
class Boxes:
    """TMA descriptors of a tensor's first columns and of its tail."""

    main: tl.core.base_value
    tail: tl.core.base_value


@aggregate
class TailRing:
    """A ring of rows with a tail: each slot is filled by two boxes on one barrier, and emptied as one."""

    main: Ring
    tails: tlx.buffered_tensor

    @triton.jit
    def load(self, count, boxes, rows, row, head):
        """Fill the count-th slot with rows of the Span ``rows`` from ``row`` on, once its readers have left."""
        MAIN: tl.constexpr = self.main.buffers.shape[1]
        slot, _ = self.main.slot(count)
        self.main.load(count, boxes.main, rows.box(row, head))
        tlx.async_descriptor_load(boxes.tail, self.tails[slot], rows.box(row, head, MAIN), self.main.fulls[slot])


@aggregate
class TailSums:
    """Sums in TMEM with as many columns as a row: [1] x [128, 128] and [1] x [128, 64], fp32."""

    main: tlx.buffered_tensor
    tail: tlx.buffered_tensor


@triton.jit
def alloc_tail_ring(
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    READERS: tl.constexpr,
    MORE_BYTES: tl.constexpr,
    cfg: tl.constexpr,
):
    """Allocate a TailRing that READERS empty; MORE_BYTES: what else is copied on a slot's barrier."""
    main = alloc_ring(ROWS, cfg.head_dim, DTYPE, STAGES, READERS)
    BYTES: tl.constexpr = main.bytes + ROWS * cfg.tail_dim * tlx.size_of(DTYPE) + MORE_BYTES
    main = Ring(main.buffers, main.fulls, main.empties, main.stages, BYTES, 0)
    return TailRing(main, tlx.local_alloc((ROWS, cfg.tail_dim), DTYPE, STAGES))


@triton.jit
def alloc_tail_sums(ROWS: tl.constexpr, cfg: tl.constexpr):
    """Allocate TailSums."""
    main = tlx.local_alloc((ROWS, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    return TailSums(main, tlx.local_alloc((ROWS, cfg.tail_dim), tl.float32, 1, tlx.storage_kind.tmem))


@triton.jit
def score(a, a_slot, b, b_slot, to, barrier):
    """Issue ``to`` = a b^T of two rings' slots; ``barrier`` is told when it is there."""
    b_main, b_tail = tlx.local_trans(b.main.buffers[b_slot]), tlx.local_trans(b.tails[b_slot])
    tlx.async_dot(a.main.buffers[a_slot], b_main, to, use_acc=False, force_async=True)
    tlx.async_dot(a.tails[a_slot], b_tail, to, use_acc=True, mBarriers=[barrier])


@triton.jit
def add_half(left, column: tl.constexpr, b, slot, half: tl.constexpr, sums, use_acc):
    """Issue sums += left b with half of the rows of a ring's slot; ``left`` is in TMEM, from ``column`` of that buffer on."""
    ROWS: tl.constexpr = b.main.buffers.shape[0] // 2
    MAIN: tl.constexpr = b.main.buffers.shape[1]
    TAIL: tl.constexpr = b.tails.shape[1]
    main = tlx.local_slice(b.main.buffers[slot], [half * ROWS, 0], [ROWS, MAIN])
    tail = tlx.local_slice(b.tails[slot], [half * ROWS, 0], [ROWS, TAIL])
    part = tlx.subslice(left, column, ROWS)
    tlx.async_dot(part, main, sums.main[0], use_acc=use_acc, force_async=True)
    tlx.async_dot(part, tail, sums.tail[0], use_acc=use_acc, force_async=True)


@triton.jit
def alloc_pieces(ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Allocate the ring through which a result is stored in pieces of some columns; both compute groups fill a piece."""
    buffers = tlx.local_alloc((ROWS, COLUMNS), DTYPE, 2)
    return Ring(buffers, tlx.alloc_barriers(2, arrive_count=2), tlx.alloc_barriers(2), 2, 0, 0)


@triton.jit
def write_piece(sums, first: tl.constexpr, half: tl.constexpr, scale, pieces, count):
    """Copy half of a piece, which begins at column ``first`` of sums in TMEM, times ``scale``, to the count-th slot."""
    ROWS: tl.constexpr = pieces.buffers.shape[0]
    HALF: tl.constexpr = pieces.buffers.shape[1] // 2
    slot, phase = pieces.slot(count)
    part = tlx.local_load(tlx.subslice(sums, first + half * HALF, HALF)) * scale
    tlx.barrier_wait(pieces.empties[slot], phase ^ 1)
    tlx.local_store(
        tlx.local_slice(pieces.buffers[slot], [0, half * HALF], [ROWS, HALF]), part.to(pieces.buffers.dtype)
    )
    tlx.fence("async_shared")
    tlx.barrier_arrive(pieces.fulls[slot])


@triton.jit
def store_piece(desc, pieces, count, box):
    """Copy the count-th piece to memory; the box ends with the sequence."""
    slot, phase = pieces.slot(count)
    tlx.barrier_wait(pieces.fulls[slot], phase)
    tlx.async_descriptor_store(desc, pieces.buffers[slot], box)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(pieces.empties[slot])
