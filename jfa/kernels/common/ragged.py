"""TMA descriptors that stop at the end of any sequence of a packed tensor, made once on the host.

A packed tensor [total, H, D] holds sequences one after another, so a tile that reaches past a sequence's end reaches
into the next one. A *ragged* descriptor bounds every box by the sequence instead: rows past its end load as zeros and
are neither stored nor added. It does so with one 5-D map for all sequences. The row coordinate reaches ``BILLION``
exactly at the sequence's end, where the map's shape ends; a second dimension of the same stride brings the address back
to the sequence, and a first one, whose stride is 2**34 minus a row, subtracts the billion again modulo 2**64 (the idea
is that of ``triton.tools.ragged_tma``).

Boxes are [1, 1, 1, rows, D] on the view [H, total, D], so the head dimension is a dimension of its own and a box that is wider than
D loads zeros there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BILLION = tl.constexpr(1 << 30)
LARGEST = 0x7FFF0000  # of a dimension that never bounds anything


def ragged_descriptor(packed: torch.Tensor, rows: int, columns: int, heads: int = 1) -> TensorDescriptor:
    """Return a descriptor of ``packed`` [total, H, D] with boxes of ``rows`` x ``columns`` of ``heads`` adjacent heads.

    ``packed`` must satisfy :func:`tma_ready`.
    """
    total, count, dim = packed.shape
    row, head, _ = packed.stride()
    if total > BILLION.value:
        raise ValueError(f"a ragged descriptor counts up to 2**30 rows, got {total}")
    # Made without the checks of TensorDescriptor's own constructor, which take 15 us: tma_ready has made them.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = packed
    descriptor.shape = [LARGEST, LARGEST, count, BILLION.value, dim]
    descriptor.strides = [2**34 - row, row, head, row, 1]
    descriptor.block_shape = [1, 1, heads, rows, columns]
    descriptor.padding = "zero"
    descriptor.round_f32_to_tf32 = False
    return descriptor


def rows_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of a contiguous [..., D] as rows side by side, in boxes of ``rows`` x ``columns``, which divides D.

    No box is bounded: all must lie inside. So it says nothing of how many rows there are, and serves calls of any size.
    """
    dim = x.shape[-1]
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape, descriptor.strides, descriptor.block_shape = [LARGEST, dim], [dim, 1], [rows, columns]
    descriptor.padding, descriptor.round_f32_to_tf32 = "zero", False
    return descriptor


def tma_ready(packed: torch.Tensor) -> bool:
    """Return whether TMA can address ``packed`` [total, H, D]: base and strides in whole 16 bytes, last stride 1, not empty."""
    row, head, column = packed.stride()
    size = packed.itemsize
    aligned = row * size % 16 == 0 and head * size % 16 == 0 and packed.data_ptr() % 16 == 0
    return column == 1 and aligned and packed.numel() > 0


def make_tma_ready(packed: torch.Tensor) -> torch.Tensor:
    """Return ``packed`` itself if TMA can address it, else a copy whose rows are padded to 16 bytes. It must not be empty."""
    if tma_ready(packed):
        return packed
    return empty_tma_ready(packed, packed.shape[2]).copy_(packed)


def empty_tma_ready(like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return an uninitialized [rows, H, dim] for ``like`` [rows, H, *] that TMA can address: a view of rows padded to 16 bytes."""
    rows, heads = like.shape[:2]
    step = 16 // like.element_size()
    return like.new_empty(rows, heads, -(-dim // step) * step)[:, :, :dim]


@triton.jit
def ragged_box(begin, length, row, head, column=0):
    """Return the box that starts at ``row`` of the sequence [begin, begin + length) in ``head``, at ``column``."""
    return [BILLION, begin + length, head, BILLION - length + row, column]


@triton.jit
def load_box(descriptor, begin, length, row, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the box at ``row`` of the sequence [begin, begin + length) as [ROWS, COLUMNS], zeros past its end (plain Triton)."""
    box = descriptor.load([BILLION, begin + length, head, BILLION - length + row, 0])
    return tl.reshape(box, (ROWS, COLUMNS))


@triton.jit
def store_box(
    descriptor, begin, length, row, head, block, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write ``block`` [ROWS, COLUMNS], HEADS heads of ROWS / HEADS rows, at ``row`` of the sequence, nothing past its end."""
    box = tl.reshape(block.to(descriptor.dtype), (1, 1, HEADS, ROWS // HEADS, COLUMNS))
    descriptor.store([BILLION, begin + length, head, BILLION - length + row, 0], box)
