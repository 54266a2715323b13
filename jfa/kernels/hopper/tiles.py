"""Lists of tiles for the persistent Hopper kernels: the planner's kernel makes them, every role reads them.

They are lists by sequence with both margins (:mod:`jfa.kernels.common.planner`): the list of a forward, of its
backward, or both in one launch. The kernel that reads a list may be set up while the list is built (programmatic
dependent launch), and uses the counters that the list's kernel clears.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from jfa.kernels.base import Problem
from jfa.kernels.common.planner import Cut, plan_padded

# Rows: the unit in which the backward pads every sequence's queries (see padded_rows).
PAD = tl.constexpr(64)


@dataclass
class TileList:
    """``records`` [capacity, RECORD] int32 and ``counts`` [2] int32 = (tiles that have work, all valid tiles)."""

    records: torch.Tensor
    counts: torch.Tensor
    cleared: torch.Tensor | None = None  # int32 of 0, one per head, as long as no launch has drawn from them

    def counters(self, number: int) -> torch.Tensor:
        """Return ``number`` int32 of 0 for one launch to draw tiles from.

        The list's kernel cleared some along the way, for the first launch that asks; to clear others takes 2 us.
        """
        cleared, self.cleared = self.cleared, None
        if cleared is not None and cleared.numel() >= number:
            return cleared[:number]
        return torch.zeros(number, dtype=torch.int32, device=self.records.device)


@dataclass
class Lists:
    """The lists of one forward and of its backward."""

    queries: TileList
    keys: TileList


def query_tiles(problem: Problem, block: int) -> TileList:
    """List the tiles of ``block`` queries of every sequence, for the forward: the most keys first.

    Tiles without keys are in the list too (the kernel writes 0 and -inf there), and so are rows that no sequence
    covers.
    """
    return _listed(problem, Cut(block))[0]


def key_tiles(problem: Problem, block: int) -> TileList:
    """List the tiles of ``block`` keys of every sequence, for the backward: the most queries first. Rows are key rows.

    Tiles without queries are in the list too (the kernel writes 0 there), and so are rows that no sequence covers.
    """
    return _listed(problem, Cut(block, keys=True))[0]


def make_lists(problem: Problem, block: int, key_block: int) -> Lists:
    """Make :func:`query_tiles` and :func:`key_tiles` by one launch."""
    return Lists(*_listed(problem, Cut(block), Cut(key_block, keys=True)))


def _listed(problem: Problem, cut: Cut, keys: Cut | None = None) -> list[TileList]:
    plans = plan_padded(problem, cut, keys, problem.num_heads, PAD.value)
    return [TileList(plan.records, plan.counts, plan.counters) for plan in plans]


def padded(rows: int) -> int:
    """Return rows rounded up to whole blocks of PAD."""
    return -(-rows // int(PAD)) * int(PAD)


def padded_rows(problem: Problem) -> int:
    """Return rows of an array that gives every sequence's queries whole blocks of PAD: an upper bound from shapes.

    Segment s starts at (begin + s * PAD) rounded down to a block: no prefix sum is needed, as its predecessors grow by
    less than PAD rows each.
    """
    if problem.broadcast_q:
        return problem.num_batches * padded(problem.rows_q)
    return padded(problem.rows_q) + (problem.num_batches + 2) * int(PAD)
