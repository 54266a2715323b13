"""Lists of tiles for the persistent Hopper kernels: one small kernel makes them, every role reads them.

They are lists by sequence with both margins (:mod:`jfa.kernels.common.planner`): the list of a forward, of its
backward, or both in one launch. The kernel that reads a list may be set up while the list is built (programmatic
dependent launch), and uses the counters that the list's kernel clears.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants, cdiv, power_of_two
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.nouns import RECORD
from jfa.kernels.common.planner import HEADER, OWN, TILES, Cut, Cutting, Target, write_list
from jfa.kernels.common.sequences import BandConstants, Offsets, Sequences, Sizes

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


UNSPECIALISED = "heads batches rows_q rows_kv rows_out capacity key_capacity lo_start lo_end hi_start hi_end".split()


@triton.jit(do_not_specialize=UNSPECIALISED)
def list_kernel(
    query_offset,
    key_offset,
    output_offset,
    records,
    counts,
    counters,
    key_records,
    key_counts,
    key_counters,
    heads,
    batches,
    rows_q,
    rows_kv,
    rows_out,
    capacity,
    key_capacity,
    lo_start,
    lo_end,
    hi_start,
    hi_end,
    cfg: tl.constexpr,
):
    """Write the list of a forward, of its backward (key_*), or both in one launch. Grid: (programs, lists).

    cfg: a ListConfig. A list that it does not ask for is not touched.
    """
    gdc_launch_dependents()  # the kernel that reads the list may be set up already; it waits for this one's end itself
    slots = None
    if cfg.slots:
        slots = output_offset
    offsets = Offsets(query_offset, key_offset, slots)
    rows = Sizes(batches, rows_q, rows_kv, rows_out)
    band = BandConstants(lo_start, lo_end, hi_start, hi_end)
    sequences = Sequences(offsets, rows, band, cfg.broadcast_q, True, True, True, PAD)
    queries = Target(records, counts, None, counters, heads, capacity, cfg.heads)
    keys = Target(key_records, key_counts, None, key_counters, heads, key_capacity, cfg.heads)
    by_queries = Cutting(cfg.block, False, 1, cfg.down, False, False)
    by_keys = Cutting(cfg.key_block, True, 1, False, False, False)
    if cfg.block and cfg.key_block:
        if tl.program_id(1) == 0:
            write_list(sequences, queries, by_queries, 0, 0, cfg.own, cfg.others, cfg.step)
        else:
            write_list(sequences, keys, by_keys, 0, 0, cfg.own, cfg.others, cfg.step)
    elif cfg.block:
        write_list(sequences, queries, by_queries, 0, 0, cfg.own, cfg.others, cfg.step)
    else:
        write_list(sequences, keys, by_keys, 0, 0, cfg.own, cfg.others, cfg.step)


@dataclass(frozen=True)
class ListConfig:
    """Compile-time configuration of the list kernel.

    Attributes:
        block, key_block: queries and keys per tile; 0: that list is not made.
        down: a sequence's last queries first; they see the most keys under a mask that is open to the left.
        broadcast_q, slots: shared queries; an output offset for them.
        others: segments that are compared at once.
        heads: counters to clear, rounded up to a power of two.
        own: segments that one program lists.
        step: tiles of each that it writes at once.
    """

    block: int
    key_block: int
    down: bool
    broadcast_q: bool
    slots: bool
    others: int
    heads: int
    own: int = OWN
    step: int = TILES


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
    return make_lists(problem, block, 0).queries


def key_tiles(problem: Problem, block: int) -> TileList:
    """List the tiles of ``block`` keys of every sequence, for the backward: the most queries first. Rows are key rows.

    Tiles without queries are in the list too (the kernel writes 0 there), and so are rows that no sequence covers.
    """
    return make_lists(problem, 0, block).keys


def make_lists(problem: Problem, block: int, key_block: int) -> Lists:
    """Make :func:`query_tiles` and :func:`key_tiles` by one launch. A list of 0 rows per tile is left unwritten."""
    queries, keys = _empty_list(problem, block, False), _empty_list(problem, key_block, True)
    offsets = problem.query_offset, problem.key_offset, problem.output_offset
    sizes = problem.num_heads, problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out
    cfg = list_config(problem, block, key_block)
    _variant(cfg).launch(
        problem.device,
        (cdiv(problem.num_batches + 2, cfg.own), 2 if block and key_block else 1),
        *(queries.counts if x is None else x for x in offsets),
        *(queries.records, queries.counts, queries.cleared, keys.records, keys.counts, keys.cleared),
        *sizes,
        queries.records.shape[0],
        keys.records.shape[0],
        *band_constants(problem.band),
    )
    return Lists(queries, keys)


def list_config(problem: Problem, block: int, key_block: int) -> ListConfig:
    """Choose how the list kernel runs."""
    others = min(2048, max(256, power_of_two(problem.num_batches + 2)))
    slots, heads = problem.output_offset is not None, power_of_two(problem.num_heads)
    return ListConfig(block, key_block, problem.band.has_hi, problem.broadcast_q, slots, others, heads)


@cache
def _variant(cfg: ListConfig) -> Variant:
    return Variant(list_kernel, cfg=cfg, num_warps=8 if cfg.others > 1024 else 4)


def _empty_list(problem: Problem, block: int, keys: bool) -> TileList:
    heads, room = problem.num_heads, Cut(block, keys).capacity(problem) if block else 1
    begin = HEADER + -(-heads // 4) * 4  # at whole 16 bytes
    words = torch.empty(begin + room * RECORD.value, dtype=torch.int32, device=problem.device)
    records = words.as_strided((room, RECORD.value), (RECORD.value, 1), begin)  # split and view take twice as long
    return TileList(records, words.as_strided((2,), (1,)), words.as_strided((heads,), (1,), HEADER))


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
