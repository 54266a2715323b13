"""Lists of the blocks that each block attends to: made from masks, transposed for the backward, and converted to a
mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jfa.block_sparse.grid import Grid, block_pairs, capacity_of, grid_of, query_grid
from jfa.masks import Band, Block


@dataclass(frozen=True)
class BlockLists:
    """The blocks of the other side that each block of this side is paired with, in rising order, per head.

    Attributes:
        starts: [heads * rows + 1] int32; the list of head ``h``, grid row ``r`` begins at entry ``starts[h * rows + r]``.
        columns: [capacity] int32, the other side's block, counted inside the sequence; entries past the last start mean nothing.
        kinds: [capacity] int8, :class:`jfa.masks.Block`: FULL pairs need no mask, PARTIAL ones do.
        heads: 1 (all heads share the lists), H_kv or H; query head ``h`` reads lists of head ``h * heads // H``.
        rows: the grid's capacity on this side.
        block, other_block: rows per block of this side and of the other.
    """

    starts: Tensor
    columns: Tensor
    kinds: Tensor
    heads: int
    rows: int
    block: int
    other_block: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(starts, columns, kinds)."""
        return self.starts, self.columns, self.kinds

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows per block of this side and of the other."""
        return self.block, self.other_block

    @property
    def counts(self) -> Tensor:
        """[heads, rows] int32: entries per list, what a tile costs."""
        return (self.starts[1:] - self.starts[:-1]).view(self.heads, self.rows)

    def other_side(self, starts: Tensor, columns: Tensor, kinds: Tensor) -> BlockLists:
        """Return the transposed lists that consist of these tensors: same heads, block sizes swapped."""
        rows = (starts.numel() - 1) // self.heads
        return BlockLists(starts, columns, kinds, self.heads, rows, self.other_block, self.block)


def compressed(chosen: Tensor, full: Tensor, capacity: int, block: int, other_block: int) -> BlockLists:
    """Return the lists of a mask [heads, rows, width], in room for ``capacity`` entries."""
    heads, rows, width = chosen.shape
    starts = torch.zeros(heads * rows + 1, dtype=torch.int64, device=chosen.device)
    starts[1:] = torch.cumsum(chosen.sum(2).flatten(), 0)
    place = starts[:-1].view(heads, rows, 1) + torch.cumsum(chosen, 2) - 1
    place = torch.where(chosen, place, capacity).flatten()  # what is not chosen goes to a slot that is cut off
    column = torch.arange(width, device=chosen.device, dtype=torch.int32).expand(heads, rows, width)
    kind = torch.where(full, int(Block.FULL), int(Block.PARTIAL)).to(torch.int8).expand(heads, rows, width)
    columns = torch.zeros(capacity + 1, dtype=torch.int32, device=chosen.device).scatter_(0, place, column.flatten())
    kinds = torch.zeros(capacity + 1, dtype=torch.int8, device=chosen.device).scatter_(0, place, kind.flatten())
    return BlockLists(starts.to(torch.int32), columns[:-1], kinds[:-1], heads, rows, block, other_block)


def lists_from_mask(
    masks: Sequence[Tensor],
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    broadcast_q: bool = False,
    block_q: int = 128,
    block_kv: int = 128,
) -> BlockLists:
    """Return the lists of block masks of your own, such as tiles of a document mask. Waits for the device.

    Args:
        masks: per sequence a bool tensor [query blocks, key blocks], or [heads, query blocks, key blocks] with heads 1, H_kv or H.
        query_offset, key_offset, causal, window_size, broadcast_q: as in :func:`select_blocks`.
        total_q, total_kv: rows of the query and of the key tensor.

    Blocks that the mask of ``causal`` and ``window_size`` empties are left out.

    Raises:
        ValueError: naming the sequence whose mask has another shape.
    """
    band = Band.make(causal, window_size)
    batches = key_offset.numel() - 1
    grid_q = query_grid(query_offset, key_offset, total_q, block_q, broadcast_q)
    grid_k = grid_of(key_offset, total_kv, block_kv)
    if len(masks) != batches:
        raise ValueError(f"masks must hold one mask per sequence: {batches}, got {len(masks)}")
    masks = [m[None] if m.ndim == 2 else m for m in masks]
    heads = masks[0].shape[0] if masks else 1
    width = max((m.shape[2] for m in masks), default=0)
    chosen = torch.zeros(heads, grid_q.rows, width, dtype=torch.bool, device=key_offset.device)
    for b, mask in enumerate(masks):
        shape = (heads, int(grid_q.blocks[b]), int(grid_k.blocks[b]))
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"masks[{b}] must be {list(shape)} [heads, query blocks, key blocks], got {list(mask.shape)}"
            )
        row = int(grid_q.first[b])
        chosen[:, row : row + shape[1], : shape[2]] = mask.bool()
    touched, full = block_pairs(band, grid_q, grid_k, width)
    chosen &= touched
    return compressed(chosen, full, int(chosen.sum()), block_q, block_kv)


def transpose(
    lists: BlockLists,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    broadcast_q: bool = False,
) -> BlockLists:
    """Return the lists of the other side: per block of keys the blocks of queries that chose it, in rising order.

    A kind stays as it was: a pair of blocks is FULL if both are whole and no mask cuts them, from either side. Counted and
    sorted on the device; nothing waits. Arguments as in :func:`lists_from_mask`.
    """
    batches = key_offset.numel() - 1
    device = lists.starts.device
    blocks, rows = (lists.block, lists.other_block), capacity_of(total_kv, batches, lists.other_block)
    if device.type == "cuda" and rows and lists.columns.numel():
        from jfa import block_select

        given = lists.tensors, lists.heads, lists.rows, query_offset, key_offset, total_q, total_kv, broadcast_q
        with torch.cuda.device(device):
            made = block_select.transposed(*given, blocks, rows)
        return lists.other_side(*made)
    grid_q = query_grid(query_offset, key_offset, total_q, lists.block, broadcast_q)
    grid_k = grid_of(key_offset, total_kv, lists.other_block)
    entries = torch.arange(lists.columns.numel(), device=device)
    count = lists.heads * grid_k.rows
    if entries.numel() == 0 or count == 0:
        starts = torch.zeros(count + 1, dtype=torch.int32, device=device)
        return replace(lists, starts=starts, rows=grid_k.rows, block=lists.other_block, other_block=lists.block)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True).clamp(
        max=lists.starts.numel() - 2
    )
    head, row = owner // lists.rows, owner % lists.rows
    seq = grid_q.seq[row]
    target = head * grid_k.rows + grid_k.first[seq] + lists.columns
    target = torch.where(entries < lists.starts[-1], target.clamp(0, count - 1), count)
    order = torch.sort(target, stable=True).indices  # stable: queries of one list stay in rising order
    per_list = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add_(0, target, torch.ones_like(target))
    starts = torch.zeros(count + 1, dtype=torch.int64, device=device)
    starts[1:] = torch.cumsum(per_list[:-1], 0)
    return lists.other_side(starts.to(torch.int32), grid_q.index[row][order].to(torch.int32), lists.kinds[order])


def dense_mask(lists: BlockLists, grid: Grid, width: int) -> Tensor:
    """Return [heads, B, blocks, width] bool: which key blocks each query block of each sequence chose.

    Args:
        grid: the grid of the lists' own side. blocks: the most blocks of one sequence. Waits for the device to learn it.
        width: blocks of the other side, at least as many as any sequence has; entries outside are dropped.
    """
    batches = grid.length.numel()
    most = int(grid.blocks.max()) if batches else 0
    found = torch.zeros(lists.heads, batches, most, width + 1, dtype=torch.bool, device=lists.starts.device)
    end = int(lists.starts[-1])
    entries = torch.arange(end, device=found.device)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True)
    head, row = owner // lists.rows, owner % lists.rows
    column = lists.columns[:end].long()
    column = torch.where((column >= 0) & (column < width), column, width)
    found[head, grid.seq[row], grid.index[row], column] = True
    return found[..., :width]
