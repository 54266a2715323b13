"""Tiles whose columns lie in two pieces, left and right, for head dims between the powers of two and beyond 128.

A tile of 96 columns is 64 + 32, one of 192 is 128 + 64: a product over columns is two products into one sum, a sum with
columns is two sums. So no product covers columns that a tensor does not have. A tile of 64 or 128 columns needs no
right piece: its ``width`` is 0, its buffer and descriptor are the left ones, and its sum is an unused number.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import ring_slot


@aggregate
class Boxes:
    """Ragged descriptors of both pieces of a packed tensor's columns, and the column where the right piece begins."""

    left: tl.core.tensor_descriptor_base
    right: tl.core.tensor_descriptor_base
    split: tl.constexpr


@aggregate
class Pieces:
    """Results of a product in registers for both pieces: [rows, left], [rows, right]."""

    left: tl.tensor
    right: tl.tensor

    @triton.jit
    def times(self, scale):
        """Return both pieces multiplied by ``scale``."""
        return Pieces(self.left * scale, self.right * scale)


@aggregate
class Tiles:
    """A ring of tiles of rows, each filled by a TMA load for each piece of its columns, on one barrier.

    Attributes:
        left, right: buffers of both pieces.
        width: columns of the right piece; 0: there is none, and ``right`` is ``left``.
        fulls, empties: per tile: its data is there; all have read it.
        stages: number of tiles of this ring.
        bytes: size of a tile, which the copy engine counts.
        first: index of this ring's first buffer; equal rings may lie side by side.
    """

    left: tlx.buffered_tensor
    right: tlx.buffered_tensor
    width: tl.constexpr
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
        return Tiles(self.left, self.right, self.width, self.fulls, self.empties, self.stages, self.bytes, first)

    @triton.jit
    def await_full(self, count):
        """Wait for the count-th tile and return its slot."""
        slot, phase = self.slot(count)
        tlx.barrier_wait(self.fulls[slot], phase)
        return slot

    @triton.jit
    def release(self, count):
        """Give the count-th tile back to the producer."""
        slot, phase = self.slot(count)
        tlx.barrier_arrive(self.empties[slot], 1)

    @triton.jit
    def load(self, count, boxes, rows, row, head):
        """Fill the count-th slot with the rows from ``row`` on of the Span ``rows``, once its readers have left."""
        slot, phase = self.slot(count)
        tlx.barrier_wait(self.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(self.fulls[slot], self.bytes)
        load_pieces(self, slot, boxes, rows, row, head)


@triton.jit
def both_boxes(left, right, SPLIT: tl.constexpr, WIDTH: tl.constexpr):
    """Return Boxes of two descriptors, of which the right one is None where its piece has no columns (WIDTH 0)."""
    if WIDTH > 0:
        return Boxes(left, right, SPLIT)
    else:
        return Boxes(left, left, SPLIT)


@triton.jit
def alloc_pieces(
    ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DTYPE: tl.constexpr, NUMBER: tl.constexpr
):
    """Allocate the buffers of both pieces of NUMBER tiles. Returns (left, right), which are one if RIGHT is 0."""
    left = tlx.local_alloc((ROWS, LEFT), DTYPE, NUMBER)
    if RIGHT > 0:
        return left, tlx.local_alloc((ROWS, RIGHT), DTYPE, NUMBER)
    else:
        return left, left


@triton.jit
def alloc_tiles(
    ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    READERS: tl.constexpr,
    RINGS: tl.constexpr = 1,
    MORE_BYTES: tl.constexpr = 0,
    BY_THREAD: tl.constexpr = False,
):
    """Allocate a ring of tiles [ROWS, LEFT + RIGHT] that READERS empty, or RINGS of them side by side.

    MORE_BYTES: what else is copied on a tile's barrier. BY_THREAD: as for jfa.kernels.common.ring.alloc_ring.
    """
    BUFFERS: tl.constexpr = RINGS * STAGES
    left, right = alloc_pieces(ROWS, LEFT, RIGHT, DTYPE, BUFFERS)
    fulls = tlx.alloc_barriers(BUFFERS, arrive_count=1)
    if BY_THREAD:
        empties = tlx.alloc_warp_barrier(BUFFERS, num_warps=4, num_arrivals=READERS)
    else:
        empties = tlx.alloc_barriers(BUFFERS, arrive_count=READERS)
    BYTES: tl.constexpr = ROWS * (LEFT + RIGHT) * tlx.size_of(DTYPE) + MORE_BYTES
    return Tiles(left, right, RIGHT, fulls, empties, STAGES, BYTES, 0)


@triton.jit
def stage_tiles(tiles, left, right, WIDTH: tl.constexpr):
    """Return those buffers as tiles to store from; their barriers, of ``tiles``, are not used."""
    return Tiles(left, right, WIDTH, tiles.fulls, tiles.empties, tiles.stages, 0, 0)


@triton.jit
def load_pieces(tiles, slot, boxes, rows, row, head):
    """Issue the loads of a tile whose barrier expects them."""
    tlx.async_descriptor_load(boxes.left, tiles.left[slot], rows.box(row, head), tiles.fulls[slot])
    if tiles.width > 0:
        tlx.async_descriptor_load(boxes.right, tiles.right[slot], rows.box(row, head, boxes.split), tiles.fulls[slot])


@triton.jit
def zero_pieces(ROWS: tl.constexpr, tiles):
    """Return sums of 0 for ROWS rows, as wide as ``tiles``."""
    LEFT: tl.constexpr = tiles.left.shape[1]
    right = tl.to_tensor(0)
    if tiles.width > 0:
        right = tl.zeros([ROWS, tiles.width], tl.float32)
    return Pieces(tl.zeros([ROWS, LEFT], tl.float32), right)


@triton.jit
def multiply_transposed(a, a_slot, b, b_slot):
    """Issue a b^T of two tiles, a product per piece into one sum; not waited for."""
    product = tlx.async_dot(a.left[a_slot], tlx.local_trans(b.left[b_slot]))
    if a.width > 0:
        product = tlx.async_dot(a.right[a_slot], tlx.local_trans(b.right[b_slot]), product)
    return product


@triton.jit
def multiply_rows(a, a_slot, row, b, b_slot, ROWS: tl.constexpr):
    """Issue a b^T of ROWS rows of a tile, from ``row`` on, and another tile; not waited for."""
    LEFT: tl.constexpr = a.left.shape[1]
    product = tlx.async_dot(tlx.local_slice(a.left[a_slot], [row, 0], [ROWS, LEFT]), tlx.local_trans(b.left[b_slot]))
    if a.width > 0:
        rows = tlx.local_slice(a.right[a_slot], [row, 0], [ROWS, a.width])
        product = tlx.async_dot(rows, tlx.local_trans(b.right[b_slot]), product)
    return product


@triton.jit
def add_product_of_rows(a, a_slot, row, b, b_slot, so_far, ROWS: tl.constexpr):
    """Issue so_far + a b^T, as :func:`multiply_rows`."""
    LEFT: tl.constexpr = a.left.shape[1]
    rows = tlx.local_slice(a.left[a_slot], [row, 0], [ROWS, LEFT])
    product = tlx.async_dot(rows, tlx.local_trans(b.left[b_slot]), so_far)
    if a.width > 0:
        rows_right = tlx.local_slice(a.right[a_slot], [row, 0], [ROWS, a.width])
        product = tlx.async_dot(rows_right, tlx.local_trans(b.right[b_slot]), product)
    return product


@triton.jit
def add_product(p, b, b_slot, sums):
    """Issue sums += p b with ``p`` in registers, a product per piece; not waited for.

    The caller waits for both pieces itself: fbtriton 3.7.4 crashes where tlx.async_dot_wait is given a function's argument.
    """
    left = tlx.async_dot(p, b.left[b_slot], sums.left)
    right = sums.right
    if b.width > 0:
        right = tlx.async_dot(p, b.right[b_slot], sums.right)
    return Pieces(left, right)


@triton.jit
def store_pieces(boxes, tiles, slot, sums, rows, row, head):
    """Store rows of a result through a tile's buffers, clipped at the end of the Span ``rows``."""
    left = tiles.left[slot]
    tlx.local_store(left, sums.left.to(left.dtype))
    if tiles.width > 0:
        right = tiles.right[slot]
        tlx.local_store(right, sums.right.to(right.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(boxes.left, left, rows.box(row, head))
    if tiles.width > 0:
        tlx.async_descriptor_store(boxes.right, right, rows.box(row, head, boxes.split))
