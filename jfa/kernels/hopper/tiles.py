"""Lists of tiles for the persistent Hopper kernels: one small kernel makes them, every role reads them.

A list is one int32 tensor [capacity, 9], a record a tile, and how many of the records are valid. Sequences with much
work come first, and a record says all that a role must know, so that no role reads offsets. The capacity follows from
shapes alone, so building works inside a CUDA-graph capture.

Sorting without a sort: a sequence's first slot is the number of tiles of all sequences with more work than it. Counting
them costs B comparisons a sequence, which is nothing beside launching the several kernels of a sort; ties go by
position, so a list is always the same.

Besides the B sequences a list may hold two margins: the rows before the first offset and those behind the last, which
no sequence covers and which get zeros. Offsets are clamped, so that no lie in them leads outside a tensor.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.nouns import RECORD, Band, Span, Tile, aggregate, store_tiles
from jfa.kernels.common.sequence import band_of

# An open side of a band for differences of bounds, which must not overflow.
FAR = tl.constexpr(1 << 28)
# Words before a list: its two counts, and what keeps the rest aligned to 16 bytes.
HEADER = 4
# Rows: the unit in which the backward pads every sequence's queries (see padded_rows).
PAD = tl.constexpr(64)


@dataclass
class TileList:
    """``records`` [capacity, 9] int32 and ``counts`` [2] int32 = (tiles that have work, all valid tiles)."""

    records: torch.Tensor
    counts: torch.Tensor
    cleared: torch.Tensor | None = None  # int32 of 0, one a head, as long as no launch has drawn from them

    def counters(self, number: int) -> torch.Tensor:
        """``number`` int32 of 0 for one launch to draw tiles from.

        The list's kernel cleared some along the way, for the first launch that asks; a launch to clear others costs 2
        us.
        """
        cleared, self.cleared = self.cleared, None
        if cleared is not None and cleared.numel() >= number:
            return cleared[:number]
        return torch.zeros(number, dtype=torch.int32, device=self.records.device)


@aggregate
class Limits:
    """The band of every sequence, as jfa.masks.Band has it."""

    lo_start: tl.tensor
    lo_end: tl.tensor
    hi_start: tl.tensor
    hi_end: tl.tensor


@aggregate
class Sequences:
    """What a planner reads: the offsets and sizes of a problem, and its band.

    Segments are numbered 0 .. batches + 1: a sequence's number is one more than in the offsets, and 0 and batches + 1
    are the margins.
    """

    query_offset: tl.tensor
    key_offset: tl.tensor
    output_offset: tl.tensor
    batches: tl.tensor
    rows_q: tl.tensor
    rows_kv: tl.tensor
    rows_out: tl.tensor
    limits: Limits
    broadcast_q: tl.constexpr
    slots: tl.constexpr

    @triton.jit
    def rows_of(self, offset, s, rows):
        """Return the Span of the segments ``s`` in a tensor of so many rows, inside it whatever the offsets say."""
        begin = tl.load(offset + s - 1, mask=(s > 0) & (s < self.batches + 2), other=0)
        end = tl.load(offset + s, mask=s <= self.batches, other=rows)
        begin = tl.minimum(tl.maximum(begin, 0), rows)
        return Span(begin, tl.maximum(tl.minimum(end, rows) - begin, 0))

    @triton.jit
    def tile(self, s, KEYS: tl.constexpr):
        """Return (Tile at row 0, rows to cut into tiles) of the segments ``s`` [N]; with KEYS they are cut by keys."""
        mask = s < self.batches + 2
        real = (s > 0) & (s <= self.batches)
        kv = self.rows_of(self.key_offset, s, self.rows_kv)
        len_kv = kv.length
        if self.broadcast_q:
            q_begin = s * 0
            len_q = tl.where(real, self.rows_q, 0)
            cut = len_q
            out_begin = (s - 1) * self.rows_q
            if self.slots:  # a slot that is not inside the output is neither written nor read
                out_begin = tl.load(self.output_offset + s - 1, mask=real, other=0)
                len_q = tl.where((out_begin >= 0) & (out_begin <= self.rows_out - self.rows_q), len_q, 0)
                out_begin = tl.where(len_q > 0, out_begin, 0)
            pad_begin = tl.minimum(tl.maximum(s - 1, 0), self.batches - 1) * (tl.cdiv(self.rows_q, PAD) * PAD)
        else:
            q = self.rows_of(self.query_offset, s, self.rows_q)
            q_begin = q.begin
            len_q = q.length
            cut = len_q
            out_begin = q_begin
            pad_begin = (q_begin + s * PAD) // PAD * PAD
        if KEYS:
            cut = len_kv
            len_q = tl.where(real, len_q, 0)
        else:
            len_kv = tl.where(real, len_kv, 0)
        limits = self.limits
        lo, hi = band_of(len_q, len_kv, limits.lo_start, limits.lo_end, limits.hi_start, limits.hi_end)
        q = Span(q_begin, len_q)
        kv = Span(kv.begin, len_kv)
        band = Band(lo, hi, True, True)
        return Tile(s * 0, q, kv, Span(out_begin, len_q), band, pad_begin), tl.where(mask, cut, 0)


@aggregate
class List:
    """Where a list goes: ``records`` [capacity, 9], ``counts`` [2], and ``counters`` [heads], which are cleared."""

    records: tl.tensor
    counts: tl.tensor
    counters: tl.tensor
    capacity: tl.tensor


@triton.jit
def work_of(tile, BLOCK: tl.constexpr, KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr):
    """Return an estimate of what a tile of a sequence costs, in rows of the other side; 0 if there is nothing to do.

    Shared queries are equally many everywhere: then sequences with more keys come first, whose tiles are full.
    """
    other = tile.kv.length
    if KEYS and not BROADCAST_Q:
        other = tile.q.length
    width = tl.maximum(tl.minimum(tile.band.hi, FAR) - tl.maximum(tile.band.lo, -FAR) + BLOCK, 0)
    return tl.where((tile.q.length > 0) & (tile.kv.length > 0), tl.minimum(other, width), 0)


@triton.jit
def count_before(sequences, s, work, BLOCK: tl.constexpr, KEYS: tl.constexpr, OTHERS: tl.constexpr):
    """Return (tiles before those of the segments ``s``, busy tiles, all tiles); ties go by the segments' numbers."""
    before = tl.zeros_like(s)
    busy = 0
    total = 0
    for base in range(0, sequences.batches + 2, OTHERS):
        other = base + tl.arange(0, OTHERS)
        tile, cut = sequences.tile(other, KEYS)
        other_work = work_of(tile, BLOCK, KEYS, sequences.broadcast_q)
        tiles = tl.cdiv(cut, BLOCK)
        more = other_work[None, :] > work[:, None]
        first = more | ((other_work[None, :] == work[:, None]) & (other[None, :] < s[:, None]))
        before += tl.sum(tl.where(first, tiles[None, :], 0), 1)
        busy += tl.sum(tl.where(other_work > 0, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return before, busy, total


@triton.jit
def write_list(sequences, to, heads, BLOCK: tl.constexpr, KEYS: tl.constexpr, DOWN: tl.constexpr, cfg: tl.constexpr):
    """List cfg.own segments: find their first slots by counting, then write their records.

    KEYS: tiles of keys, for the backward; else of queries. DOWN: a sequence's last rows first.
    """
    s = tl.program_id(0) * cfg.own + tl.arange(0, cfg.own)
    tile, cut = sequences.tile(s, KEYS)
    work = work_of(tile, BLOCK, KEYS, sequences.broadcast_q)
    first, busy, total = count_before(sequences, s, work, BLOCK, KEYS, cfg.others)
    if tl.program_id(0) == 0:
        tl.store(to.counts, tl.minimum(busy, to.capacity))
        tl.store(to.counts + 1, tl.minimum(total, to.capacity))
        tl.store(to.counters + tl.arange(0, cfg.heads), 0, mask=tl.arange(0, cfg.heads) < heads)
    tiles = tl.cdiv(cut, BLOCK)
    for base in range(0, tl.max(tiles, 0), cfg.step):
        number = base + tl.arange(0, cfg.step)[None, :]
        slot = first[:, None] + number
        row = number * BLOCK
        if DOWN:
            row = (tiles[:, None] - 1 - number) * BLOCK
        store_tiles(to.records, slot, row, tile, (number < tiles[:, None]) & (slot < to.capacity))


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
    limits = Limits(lo_start, lo_end, hi_start, hi_end)
    sequences = Sequences(
        query_offset, key_offset, output_offset, batches, rows_q, rows_kv, rows_out, limits, cfg.broadcast_q, cfg.slots
    )
    queries = List(records, counts, counters, capacity)
    keys = List(key_records, key_counts, key_counters, key_capacity)
    if cfg.block and cfg.key_block:
        if tl.program_id(1) == 0:
            write_list(sequences, queries, heads, cfg.block, False, cfg.down, cfg)
        else:
            write_list(sequences, keys, heads, cfg.key_block, True, False, cfg)
    elif cfg.block:
        write_list(sequences, queries, heads, cfg.block, False, cfg.down, cfg)
    else:
        write_list(sequences, keys, heads, cfg.key_block, True, False, cfg)


@dataclass(frozen=True)
class ListConfig:
    """What the list kernel is compiled for.

    Attributes:
        block, key_block: queries and keys per tile; 0: that list is not made.
        down: a sequence's last queries first, which see the most keys under a mask open to the left.
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
    own: int = 8
    step: int = 16


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
        (triton.cdiv(problem.num_batches + 2, cfg.own), 2 if block and key_block else 1),
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
    others = min(2048, max(256, triton.next_power_of_2(problem.num_batches + 2)))
    slots, heads = problem.output_offset is not None, triton.next_power_of_2(problem.num_heads)
    return ListConfig(block, key_block, problem.band.has_hi, problem.broadcast_q, slots, others, heads)


@cache
def _variant(cfg: ListConfig) -> Variant:
    return Variant(list_kernel, cfg=cfg, num_warps=8 if cfg.others > 1024 else 4)


def capacity(problem: Problem, block: int, keys: bool) -> int:
    """Return how many records a list of tiles of ``block`` rows may need."""
    if problem.broadcast_q and not keys:
        return problem.num_batches * -(-problem.rows_q // block)
    return -(-(problem.rows_kv if keys else problem.rows_q) // block) + problem.num_batches + 2


def _empty_list(problem: Problem, block: int, keys: bool) -> TileList:
    heads, size = problem.num_heads, max(capacity(problem, block, keys), 1) * RECORD.value if block else RECORD.value
    words = torch.empty(HEADER + heads + size, dtype=torch.int32, device=problem.device)
    counts, counters, records = words.split((HEADER, heads, size))
    return TileList(records.view(-1, RECORD.value), counts[:2], counters)


def padded(rows: int) -> int:
    """Rows rounded up to whole blocks of PAD."""
    return -(-rows // int(PAD)) * int(PAD)


def padded_rows(problem: Problem) -> int:
    """Rows of an array that gives every sequence's queries whole blocks of PAD: an upper bound from shapes.

    Segment s starts at (begin + s * PAD) rounded down to a block: no prefix sum is needed, as its predecessors grow by
    less than PAD rows each.
    """
    if problem.broadcast_q:
        return problem.num_batches * padded(problem.rows_q)
    return padded(problem.rows_q) + (problem.num_batches + 2) * int(PAD)
