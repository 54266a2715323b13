"""Number the blocks of all sequences of one side, and find the pairs of blocks that a band leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jfa.masks import Band


@dataclass(frozen=True)
class Grid:
    """Blocks of all sequences of one side, one row each; every tensor int64 and on the offsets' device.

    Attributes:
        first: [B+1] row of each sequence's block 0.
        seq: [rows] the sequence of each row, also of those that hold no block.
        index: [rows] which block of its sequence.
        begin: [rows] the block's first row in the packed tensor.
        exist: [rows] how many of its ``block`` rows exist: 0 where there is no block.
        length: [B] the sequences' lengths.
        block: rows per block.
    """

    first: Tensor
    seq: Tensor
    index: Tensor
    begin: Tensor
    exist: Tensor
    length: Tensor
    block: int

    @property
    def rows(self) -> int:
        """Capacity: rows, used or not."""
        return self.seq.numel()

    @property
    def blocks(self) -> Tensor:
        """[B] blocks per sequence."""
        return (self.length + self.block - 1) // self.block


def grid_of(offsets: Tensor, total: int, block: int, *, shared_by: int = 0) -> Grid:
    """Return the grid of packed rows.

    Args:
        offsets: [B+1] integers.
        total: rows of the packed tensor.
        block: rows per block.
        shared_by: with a query that so many sequences share (``broadcast_q``): each of them has its own ``total`` rows; offsets are
            then not read for this side, only their device and count.

    Wrong offsets give wrong blocks, but ``begin .. begin + exist`` always lies inside the tensor.
    """
    device = offsets.device
    if shared_by:
        length = torch.full((shared_by,), total, device=device, dtype=torch.int64)
        start = torch.zeros_like(length)
        capacity = shared_by * -(-total // block)
        first = torch.arange(shared_by + 1, device=device) * -(-total // block)
    else:
        bounds = offsets.long().clamp(0, total).cummax(0).values  # what falls would need more rows than the capacity
        start = bounds[:-1]
        length = bounds[1:] - start
        capacity = capacity_of(total, length.numel(), block)
        first = bounds // block + torch.arange(bounds.numel(), device=device)
    row = torch.arange(capacity, device=device)
    if capacity == 0:
        return Grid(first, row, row, row, row, length, block)
    seq = torch.searchsorted(first[1:].contiguous(), row, right=True).clamp(max=length.numel() - 1)
    index = row - first[seq]
    exist = torch.where(row < first[-1], (length[seq] - index * block).clamp(0, block), 0)
    begin = torch.where(exist > 0, start[seq] + index * block, 0)
    return Grid(first, seq, index, begin, exist, length, block)


def query_grid(query_offset: Tensor | None, key_offset: Tensor, total_q: int, block: int, broadcast_q: bool) -> Grid:
    """Return the grid of the queries' blocks; with ``broadcast_q`` every sequence has blocks of its own of the one query."""
    if broadcast_q:
        return grid_of(key_offset, total_q, block, shared_by=key_offset.numel() - 1)
    return grid_of(query_offset, total_q, block)


def capacity_of(total: int, batches: int, block: int) -> int:
    """Return the rows of a grid, known from shapes alone."""
    return total // block + batches if batches else 0


def query_capacity(total_q: int, batches: int, block: int, broadcast_q: bool) -> int:
    """Return the rows of a :func:`query_grid`, known from shapes alone."""
    return batches * -(-total_q // block) if broadcast_q else capacity_of(total_q, batches, block)


def of_rows(per_sequence: Tensor, grid: Grid) -> Tensor:
    return per_sequence[grid.seq] if grid.rows else grid.seq


def block_pairs(band: Band, grid_q: Grid, grid_k: Grid, width: int) -> tuple[Tensor, Tensor]:
    """Return two [rows, width] masks: the blocks of which a pair counts, and the blocks of which all pairs do."""
    len_q, len_kv = grid_q.length, grid_k.length
    lo, hi = (of_rows(x, grid_q)[:, None] for x in band.bounds(len_q, len_kv))
    length = of_rows(len_kv, grid_q)[:, None]
    q_begin = (grid_q.index * grid_q.block)[:, None]
    q_last = q_begin + grid_q.exist[:, None] - 1
    k_begin = torch.arange(width, device=len_kv.device) * grid_k.block
    k_last = torch.minimum(k_begin + grid_k.block, length) - 1
    nearest, farthest = k_begin - q_last, k_last - q_begin
    touched = (grid_q.exist[:, None] > 0) & (k_begin < length) & (nearest <= hi) & (farthest >= lo) & (lo <= hi)
    whole = (grid_q.exist[:, None] == grid_q.block) & (k_begin + grid_k.block <= length)
    return touched, touched & whole & (nearest >= lo) & (farthest <= hi)
