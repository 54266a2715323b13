"""Tiles of packed rows in global memory: how the portable kernels read and write them, by TMA or by pointers.

Grouped heads (GQA, MQA) are *packed*: the G query heads that share one key/value head become G times as many query
rows, packed row r being position r // G of head r % G. So every kernel works on key/value heads only, reads K and V
once for the whole group, and sums a group's gradients as it sums over rows. A TMA box of several heads holds one head's
rows after another's: the same packed rows in another order (``boxed``).

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import Span, aggregate
from jfa.kernels.common.ragged import load_box, store_box

# Numbers that change with the data: Triton would compile again for each that turns divisible by 16.
RUNTIME = "batches rows_q rows_kv rows_out padded_rows lo_start lo_end hi_start hi_end workers tiles piece".split()


@triton.constexpr_function
def padded(dim):
    """Return the columns of a tile of rows of ``dim`` elements: a power of two, and at least 16 for tl.dot."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.jit
def packed_rows(r0, BLOCK: tl.constexpr, GROUP: tl.constexpr, BOXED: tl.constexpr):
    """Return (first, place, head) of the packed rows r0 .. r0 + BLOCK - 1: positions are first + place, heads those of a group.

    Where BLOCK is a multiple of GROUP, so is r0, and ``place`` does not depend on it.
    """
    i = tl.arange(0, BLOCK)
    if BOXED:
        PLACES: tl.constexpr = BLOCK // GROUP
        return r0 // GROUP, i % PLACES, i // PLACES
    elif BLOCK % GROUP == 0:
        return r0 // GROUP, i // GROUP, i % GROUP
    else:
        return r0 * 0, tl.cast((r0 + i) // GROUP, tl.int64), (r0 + i) % GROUP


@triton.jit
def positions(r0, BLOCK: tl.constexpr, GROUP: tl.constexpr, BOXED: tl.constexpr):
    """Return the positions of the packed rows r0 .. r0 + BLOCK - 1."""
    first, place, _ = packed_rows(r0, BLOCK, GROUP, BOXED)
    return first + place


@aggregate
class Operand:
    """A tensor [rows, H, dim], or [rows, H] with ``dim`` 0.

    Attributes:
        ptr: its first element; None: there is no such tensor.
        desc: a ragged TMA descriptor of it (jfa.kernels.common.ragged), or None where pointers are used.
        strides: of rows and of heads, in elements; columns lie side by side.
        group: heads per key/value head: of the query side G, of the key side 1.
        boxed: the order of packed rows.
    """

    ptr: tl.core.base_value
    desc: tl.core.base_value
    strides: tl.tuple
    dim: tl.constexpr
    group: tl.constexpr
    boxed: tl.constexpr

    @triton.jit
    def of(self, span, kv_head):
        """Return the Rows of a sequence that belong to a key/value head."""
        head = kv_head * self.group
        start = tl.cast(span.begin, tl.int64) * self.strides[0] + tl.cast(head, tl.int64) * self.strides[1]
        return Rows(self, self.ptr + start, span, head)


@aggregate
class Rows:
    """The packed rows of one sequence and key/value head: ``ptr`` is the first of them, ``head`` the group's first."""

    tensor: Operand
    ptr: tl.tensor
    span: Span
    head: tl.tensor

    @triton.jit
    def load(self, r0, BLOCK: tl.constexpr, MASKED):
        """Return the rows r0 .. r0 + BLOCK - 1 as [BLOCK, padded(dim)], zeros past the sequence's end, which MASKED looks for."""
        x = self.tensor
        COLUMNS: tl.constexpr = padded(x.dim)
        if x.desc is not None:
            return load_box(x.desc, self.span.begin, self.span.length, r0 // x.group, self.head, BLOCK, COLUMNS)
        first, place, head = packed_rows(r0, BLOCK, x.group, x.boxed)
        columns = tl.arange(0, COLUMNS)[None, :]
        start = self.ptr + tl.cast(first, tl.int64) * x.strides[0]
        pointers = start + (place * x.strides[0] + head * x.strides[1])[:, None] + columns
        if MASKED:
            keep = (place < self.span.length - first)[:, None]
            if x.dim != COLUMNS:
                keep = keep & (columns < x.dim)
            return tl.load(pointers, mask=keep, other=0.0)
        if x.dim != COLUMNS:
            return tl.load(pointers, mask=columns < x.dim, other=0.0)
        return tl.load(pointers)

    @triton.jit
    def store(self, r0, tile, BLOCK: tl.constexpr):
        """Write ``tile`` [BLOCK, padded(dim)] to the rows from r0 on, nothing past the sequence's end."""
        x = self.tensor
        COLUMNS: tl.constexpr = padded(x.dim)
        if x.desc is not None:
            begin, length = self.span.begin, self.span.length
            store_box(x.desc, begin, length, r0 // x.group, self.head, tile, x.group, BLOCK, COLUMNS)
        else:
            first, place, head = packed_rows(r0, BLOCK, x.group, x.boxed)
            columns = tl.arange(0, COLUMNS)[None, :]
            start = self.ptr + tl.cast(first, tl.int64) * x.strides[0]
            pointers = start + (place * x.strides[0] + head * x.strides[1])[:, None] + columns
            keep = (place < self.span.length - first)[:, None] & (columns < x.dim)
            tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=keep)

    @triton.jit
    def load_numbers(self, r0, BLOCK: tl.constexpr, other):
        """Return one number per row from a tensor [rows, H], ``other`` past the sequence's end."""
        x = self.tensor
        first, place, head = packed_rows(r0, BLOCK, x.group, x.boxed)
        at = tl.cast(first, tl.int64) * x.strides[0] + place * x.strides[0] + head * x.strides[1]
        return tl.load(self.ptr + at, mask=place < self.span.length - first, other=other)

    @triton.jit
    def store_numbers(self, r0, numbers, BLOCK: tl.constexpr):
        """Write one number per row to a tensor [rows, H], nothing past the sequence's end."""
        x = self.tensor
        first, place, head = packed_rows(r0, BLOCK, x.group, x.boxed)
        at = tl.cast(first, tl.int64) * x.strides[0] + place * x.strides[0] + head * x.strides[1]
        tl.store(self.ptr + at, numbers, mask=place < self.span.length - first)


@triton.jit
def per_row(ptr, rows, GROUP: tl.constexpr, BOXED: tl.constexpr = False):
    """Return a tensor [H, rows] of one number per row and head (LSE, delta) as an Operand."""
    return Operand(ptr, None, (1, tl.cast(rows, tl.int64)), 0, GROUP, BOXED)


@triton.jit
def contiguous(ptr, desc, kv_heads, D: tl.constexpr, GROUP: tl.constexpr, BOXED: tl.constexpr = False):
    """Return a contiguous tensor [rows, kv_heads * GROUP, D] as an Operand."""
    return Operand(ptr, desc, (kv_heads * (GROUP * D), D), D, GROUP, BOXED)
