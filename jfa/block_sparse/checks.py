"""Check the block lists that a user passes: shapes always; contents where that needs no wait, or on request."""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.block_sparse.grid import Grid, block_pairs, grid_of, query_capacity, query_grid
from jfa.block_sparse.lists import BlockLists
from jfa.masks import Band, Block


def check_lists(
    lists: BlockLists,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    num_heads: int,
    num_kv_heads: int,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    band: Band | None = None,
    broadcast_q: bool = False,
    contents: bool = True,
) -> None:
    """Raise an error that names what is wrong with lists for a call.

    Types, shapes and counts are compared without waiting; ``contents`` also reads the lists, which waits for the device: starts
    that fall or leave ``columns``, blocks outside the sequence, out of order, or twice, and FULL pairs that need a mask. ``band``
    may stand for ``causal`` and ``window_size``.

    Raises:
        TypeError, ValueError: naming ``block_lists`` and, for contents, the head, sequence and query block.
    """
    if not isinstance(lists, BlockLists):
        raise TypeError(f"block_lists must be a jfa.block_sparse.BlockLists, got {type(lists).__name__}")
    for name, dtype in (("starts", torch.int32), ("columns", torch.int32), ("kinds", torch.int8)):
        x = getattr(lists, name)
        if not isinstance(x, Tensor) or x.dtype != dtype or x.ndim != 1:
            found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"block_lists.{name} must be a 1-D {dtype} tensor, got {found}")
        if not x.is_contiguous():
            raise ValueError(f"block_lists.{name} must be contiguous, got stride {x.stride(0)}")
        if x.device != key_offset.device:
            raise ValueError(f"block_lists.{name} is on {x.device}, the offsets are on {key_offset.device}")
    for name in ("block", "other_block"):
        rows = getattr(lists, name)
        if isinstance(rows, bool) or not isinstance(rows, int | torch.SymInt) or rows < 1:
            raise ValueError(f"block_lists.{name} must be a positive number of rows, got {rows!r}")
    if lists.columns.shape != lists.kinds.shape:
        raise ValueError(f"block_lists has {lists.columns.numel()} columns and {lists.kinds.numel()} kinds")
    if lists.heads not in {1, num_kv_heads, num_heads}:
        raise ValueError(f"block_lists.heads must be 1, {num_kv_heads} or {num_heads}, got {lists.heads}")
    batches = key_offset.numel() - 1
    rows = query_capacity(total_q, batches, lists.block, broadcast_q)
    if lists.rows != rows or lists.starts.numel() != lists.heads * lists.rows + 1:
        raise ValueError(
            f"block_lists must have rows = {rows} for {total_q} query rows in {batches} sequences and blocks of "
            f"{lists.block}, and heads * rows + 1 starts; got rows = {lists.rows} and {lists.starts.numel()} starts"
        )
    if contents:
        grid_q = query_grid(query_offset, key_offset, total_q, lists.block, broadcast_q)
        grid_k = grid_of(key_offset, total_kv, lists.other_block)
        _check_contents(lists, grid_q, grid_k, Band.make(causal, window_size) if band is None else band)


def _check_contents(lists: BlockLists, grid_q: Grid, grid_k: Grid, band: Band) -> None:
    starts = lists.starts.long()
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()) or int(starts[-1]) > lists.columns.numel():
        raise ValueError(
            f"block_lists.starts must begin at 0, never fall, and end within columns ({lists.columns.numel()} entries)"
        )
    end = int(starts[-1])
    entries = torch.arange(end, device=starts.device)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True)
    row, column = owner % lists.rows, lists.columns[:end].long()
    blocks = grid_k.blocks[grid_q.seq[row]] if end else column
    blocks = torch.where(grid_q.exist[row] > 0, blocks, 0) if end else blocks

    def refuse(bad: Tensor, what: str) -> None:
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            head, r = int(owner[at]) // lists.rows, int(row[at])
            place = f"head {head}, sequence {int(grid_q.seq[r])}, query block {int(grid_q.index[r])}"
            raise ValueError(f"block_lists: {what.format(column=int(column[at]), blocks=int(blocks[at]))} ({place})")

    refuse((column < 0) | (column >= blocks), "key block {column} is outside the sequence, which has {blocks}")
    if end > 1:
        step = torch.where(owner[1:] == owner[:-1], column.diff(), 1)
        step = torch.cat([step.new_ones(1), step])
        refuse(step == 0, "key block {column} is listed twice")
        refuse(step < 0, "key block {column} follows a later one; a list must rise")
    kind = lists.kinds[:end]
    refuse((kind != Block.PARTIAL) & (kind != Block.FULL), "key block {column} is neither PARTIAL nor FULL")
    width = int(blocks.max()) if end else 0
    _, full = block_pairs(band, grid_q, grid_k, width)
    refuse(
        (kind == Block.FULL) & ~full[row, column] if end else kind.bool(),
        "key block {column} is marked FULL, but needs a mask",
    )
