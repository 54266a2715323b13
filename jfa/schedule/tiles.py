"""Lists of tiles without empty ones, built from offsets on any device.

No function here reads a tensor on the host, and all use plain torch operations with shapes known beforehand. So they
can be captured in a CUDA graph, and a replay after an in-place change of the offsets builds the new list. So a list has
a *capacity* from shapes alone, ceil(total / block) + B tiles, and a count in a tensor; slots past the count hold -1.

A list is for one head. A kernel's unit of work u is tile u // H, head u % H; with ``counts`` read from the device a static
persistent worker takes the units of :func:`jfa.schedule.assign.zigzag_slot`, a stealing one takes them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jfa.masks import Band, key_ranges, query_ranges


@dataclass(frozen=True)
class Tiles:
    """Tiles of ``block`` rows; every tensor int32 and on one device, -1 (cost: 0) past the count.

    ``counts`` holds (tiles that have work, all tiles). In longest-first order the tiles with work come first; the tiles
    in the slots between the two counts only have zeros to write.
    """

    seq: Tensor  # [capacity] which sequence
    row: Tensor  # [capacity] the tile's first row, counted inside its sequence
    cost: Tensor  # [capacity] blocks of the other side that it visits
    counts: Tensor  # [2]
    block: int

    @property
    def capacity(self) -> int:
        """Slots, valid or not: a grid of this size is always enough."""
        return self.seq.numel()


def max_tiles(total: int, block: int, batches: int) -> int:
    """Return the most tiles that ``batches`` sequences of ``total`` rows together can have: known without reading offsets."""
    return -(-total // block) + batches if batches else 0


def query_tiles(
    query_offset: Tensor | None,
    key_offset: Tensor,
    block_m: int,
    block_n: int,
    *,
    total_q: int,
    band: Band | None = None,
    broadcast_q: bool = False,
    longest_first: bool = True,
) -> Tiles:
    """Return the forward's tiles: blocks of queries, each costing the key blocks that its mask lets it see.

    Args:
        query_offset: [B+1]; not read with ``broadcast_q``, where every sequence has the same ``total_q`` queries.
        key_offset: [B+1].
        block_m, block_n: rows of a query tile, keys of a block.
        total_q: rows of the query tensor.
        longest_first: sort by falling cost (stable); else sequences in their order.
    """
    len_q, len_kv = _lengths(query_offset, key_offset, total_q, broadcast_q)
    capacity = -(-total_q // block_m) * len_kv.numel() if broadcast_q else max_tiles(total_q, block_m, len_kv.numel())
    seq, row, valid = _cut(len_q, block_m, capacity)
    lq, lk = _pick(len_q, seq), _pick(len_kv, seq)
    first, _, _, end = key_ranges(band or Band(), row, torch.minimum(row + block_m, lq), lq, lk, block_n)
    return _finish(seq, row, end - first, valid, block_m, longest_first)


def key_tiles(
    query_offset: Tensor | None,
    key_offset: Tensor,
    block_n: int,
    block_m: int,
    *,
    total_q: int,
    total_kv: int,
    band: Band | None = None,
    broadcast_q: bool = False,
    longest_first: bool = True,
) -> Tiles:
    """Return the backward's tiles: blocks of keys (each makes its dK and dV), each costing the query blocks that see it."""
    len_q, len_kv = _lengths(query_offset, key_offset, total_q, broadcast_q)
    seq, row, valid = _cut(len_kv, block_n, max_tiles(total_kv, block_n, len_kv.numel()))
    lq, lk = _pick(len_q, seq), _pick(len_kv, seq)
    first, _, _, end = query_ranges(band or Band(), row, torch.minimum(row + block_n, lk), lq, lk, block_m)
    return _finish(seq, row, end - first, valid, block_n, longest_first)


def zigzag_list(tiles: Tiles, workers: int) -> Tiles:
    """Lay the same tiles out so that worker w's are slots w, w + workers, w + 2 workers, ...: every second round reversed.

    ``tiles`` must be in longest-first order. The capacity is rounded up to whole rounds; -1 may now stand before a valid
    slot, so a worker skips a -1 rather than ending there.
    """
    slots = torch.arange(-(-tiles.capacity // workers) * workers, device=tiles.seq.device)
    round_, worker = slots // workers, slots % workers
    source = round_ * workers + torch.where(round_ % 2 == 0, worker, workers - 1 - worker)
    inside = source < tiles.capacity
    safe = torch.where(inside, source, 0)

    def deal(x: Tensor, hole: int) -> Tensor:
        return torch.where(inside, x[safe], hole).to(torch.int32) if tiles.capacity else slots.to(torch.int32)

    return Tiles(deal(tiles.seq, -1), deal(tiles.row, -1), deal(tiles.cost, 0), tiles.counts, tiles.block)


def _lengths(query_offset: Tensor | None, key_offset: Tensor, total_q: int, broadcast_q: bool) -> tuple[Tensor, Tensor]:
    """Return ([B], [B]) int64; wrong offsets may give wrong lengths, never negative ones."""
    len_kv = (key_offset[1:] - key_offset[:-1]).long().clamp(min=0)
    if broadcast_q:
        return torch.full_like(len_kv, total_q), len_kv
    return (query_offset[1:] - query_offset[:-1]).long().clamp(min=0), len_kv


def _cut(lengths: Tensor, block: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return slot t -> (its sequence, its first row there, whether there is such a tile), for sequences of ``lengths`` [B]."""
    slot = torch.arange(capacity, device=lengths.device)
    if capacity == 0:
        return slot, slot, slot.bool()
    per_seq = (lengths + block - 1) // block
    ends = torch.cumsum(per_seq, 0)  # sequence b owns slots ends[b-1] .. ends[b]-1; an empty one owns none
    seq = torch.searchsorted(ends, slot, right=True).clamp(max=lengths.numel() - 1)
    row = (slot - (ends - per_seq)[seq]) * block
    return seq, row, slot < ends[-1]


def _pick(lengths: Tensor, seq: Tensor) -> Tensor:
    return lengths[seq] if seq.numel() else seq


def _finish(seq: Tensor, row: Tensor, cost: Tensor, valid: Tensor, block: int, longest_first: bool) -> Tiles:
    """Blank the slots that hold no tile, sort, count."""
    cost = torch.where(valid, cost, -1)
    if longest_first and cost.numel():
        cost, order = torch.sort(cost, descending=True, stable=True)
        seq, row, valid = seq[order], row[order], valid[order]
    counts = torch.stack([(cost > 0).sum(), valid.sum()]).to(torch.int32)
    blank = [torch.where(valid, x, -1).to(torch.int32) for x in (seq, row)]
    return Tiles(*blank, cost.clamp(min=0).to(torch.int32), counts, block)
