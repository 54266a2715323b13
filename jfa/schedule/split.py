"""Cutting mega-tiles along their keys.

No order of whole tiles ends before the largest of them does. Where the tile of a very long sequence alone takes longer
than the mean load of a worker, only splitting its keys helps: the parts run concurrently, each stores a partial output
and its LSE, and one pass merges them (:func:`jfa.reference.merge_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jfa.schedule.assign import Costs, balance, longest_first
from jfa.schedule.tiles import Tiles


@dataclass(frozen=True)
class SplitDecision:
    """Largest part in blocks (None: leave all tiles whole) and the modelled makespans behind the decision."""

    max_blocks: int | None
    whole: float
    split: float


def split_decision(
    costs: Costs, workers: int, *, copies: int = 1, merge_blocks: float = 1.0, least_gain: float = 0.05
) -> SplitDecision:
    """Return whether cutting the largest tiles shortens the makespan, and to what size (host side; for a plan).

    Args:
        costs: [n] key blocks of each tile. copies: heads, each of which has all these tiles.
        merge_blocks: what a part costs besides its keys (store a partial, merge it), in key blocks.
        least_gain: share of the makespan that must be won; below it tiles stay whole.
    """
    costs = np.repeat(np.asarray(costs, dtype=np.int64), copies)
    whole = balance(longest_first(costs, workers), costs).makespan
    best = SplitDecision(None, whole, whole)
    if not costs.size:
        return best
    even = max(1, -(-int(costs.sum()) // workers))
    for size in sorted({max(1, -(-even // d)) for d in (1, 2, 3, 4)}):
        if size >= costs.max():
            continue
        parts = _part_costs(costs, size, merge_blocks)
        span = balance(longest_first(parts, workers), parts).makespan
        if span < min(best.split, whole * (1 - least_gain)):
            best = SplitDecision(size, whole, span)
    return best


def _part_costs(costs: np.ndarray, size: int, merge_blocks: float) -> np.ndarray:
    """Return costs of all parts once tiles above ``size`` blocks are cut into equal parts of at most that."""
    num = np.maximum(-(-costs // size), 1)
    each = costs / num + np.where(num > 1, merge_blocks, 0.0)
    return np.repeat(each, num)


@dataclass(frozen=True)
class SplitTiles:
    """A tile list whose large tiles are cut along the keys; int32, -1 past the count.

    Part p of tile ``tile`` visits the key blocks ``begin`` .. ``end`` counted from the first block that the whole tile
    visits. ``parts`` is 1 for a tile left whole, whose kernel writes the output itself. The parts of one tile are
    consecutive, from slot ``slot - part`` on.
    """

    tile: Tensor  # [capacity] slot in the list that was split
    part: Tensor
    parts: Tensor
    begin: Tensor
    end: Tensor
    counts: Tensor  # [1] parts in all


def split_tiles(tiles: Tiles, workers: int, *, copies: int = 1, least_blocks: int = 8) -> SplitTiles:
    """Cut every tile that costs more than a worker's mean load into equal parts; no host synchronization.

    Args:
        tiles: in longest-first order. workers: SMs. copies: heads, each of which has all these tiles.
        least_blocks: parts are never planned smaller than this: below it the merge costs more than it wins.

    The capacity is ``tiles.capacity + workers + 1``: cutting at the mean load makes at most one more part for each worker's
    worth of work.
    """
    cost = tiles.cost.long()
    size = ((cost.sum() * copies + workers - 1) // workers).clamp(min=least_blocks)
    valid = tiles.seq >= 0
    parts = torch.where(valid, ((cost + size - 1) // size).clamp(min=1), 0)
    ends = torch.cumsum(parts, 0)
    slot = torch.arange(tiles.capacity + workers + 1, device=cost.device)
    if not tiles.capacity:
        hole = torch.full_like(slot, -1, dtype=torch.int32)
        return SplitTiles(hole, hole, hole, hole, hole, slot.new_zeros(1, dtype=torch.int32))
    tile = torch.searchsorted(ends, slot, right=True).clamp(max=tiles.capacity - 1)
    part, num = slot - (ends - parts)[tile], parts[tile].clamp(min=1)
    begin, end = part * cost[tile] // num, (part + 1) * cost[tile] // num
    inside = slot < ends[-1]
    columns = [torch.where(inside, x, -1).to(torch.int32) for x in (tile, part, num, begin, end)]
    return SplitTiles(*columns, ends[-1:].to(torch.int32))
