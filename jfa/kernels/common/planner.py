"""Build lists of tiles, the sequences with most work first, with one small kernel, without a sort or a synchronization.

A list is ``records`` [capacity, RECORD] int32 (:class:`jfa.kernels.common.nouns.Tile`) and ``counts`` [2] int32. The
capacity follows from shapes alone, so building works inside a CUDA-graph capture. A record holds all that a kernel must
know about its tile, so none of its roles reads offsets.

Sorting without a sort: a sequence's first slot is the number of tiles of all sequences with more work than it. Counting
them costs B comparisons per sequence, much less than launching the several kernels of a sort; ties are ordered by
position, so a list is deterministic. From some thousand sequences on torch sorts instead.

Options of the one planner:

- tiles of queries or of keys; of rows packed with the heads of a group (PACK rows per position);
- SPLIT: a tile with much more work than the mean load of a worker becomes several records, one per chunk of its other side;
- RESTS: a sequence's last tile, if it is not full, is ordered by its own number of rows and not with its sequence;
- counters are cleared by the same kernel, for the launch that reads the list;
- PAD: records say where a sequence's queries begin in arrays padded to whole blocks, and the kernel that reads the list may be
  set up while it is made (programmatic dependent launch).

:mod:`jfa.kernels.common.tile_list` orders tile by tile instead, for kernels that assign tiles statically and cannot
draw them from a queue.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants, cdiv, power_of_two
from jfa.kernels.common.launcher import Variant, by_torch
from jfa.kernels.common.nouns import RECORD, Band, Span, Tile, aggregate, store_record
from jfa.kernels.common.sequences import BandConstants, Offsets, Sequences, Sizes

FAR = tl.constexpr(1 << 28)  # an open side of a band for differences of bounds, which must not overflow
HEADER = 4  # words before a list: its two counts, and what keeps the rest aligned to 16 bytes
OWN = 8  # sequences that one program lists
TILES = 16  # tiles that it writes at once
LEAST_CHUNK = 256  # rows: shorter chunks cost more in merging than they save
SORT_FROM = 8192  # sequences from which on a sort is quicker than comparing all with all


@dataclass
class Plan:
    """One list, and the other arrays that a launch needs.

    Attributes:
        records: [capacity, RECORD] int32.
        counts: [2] int32: tiles that have work, all valid tiles.
        counters: [number] int32 zeros: counters of a launch, which resets them to zero.
        chunks: [capacity, 2] int32, or None where nothing is split: chunk << 16 | chunks of the tile, and the tile's first partial
            result among all of a head's.
    """

    words: Tensor  # the one allocation behind the others
    records: Tensor
    counts: Tensor
    counters: Tensor
    chunks: Tensor | None

    @classmethod
    def of(cls, words: Tensor, capacity: int, counters: int, split: bool) -> "Plan":
        """Return the views of a list of ``capacity`` records; ``words`` has :func:`words_of` elements."""
        width, after = RECORD.value, HEADER + capacity * RECORD.value
        records = words.as_strided((capacity, width), (width, 1), HEADER)  # split and view take twice as long
        chunks = words.as_strided((capacity, 2), (2, 1), after) if split else None
        counters = words.as_strided((counters,), (1,), after + capacity * 2 * split)
        return cls(words, records, words.as_strided((2,), (1,)), counters, chunks)


def words_of(capacity: int, counters: int, split: bool) -> int:
    """Return the int32 elements of a plan."""
    return HEADER + capacity * (RECORD.value + 2 * split) + counters


@dataclass(frozen=True)
class Cut:
    """The division of a list's side into tiles.

    Attributes:
        block: rows per tile, of ``pack`` rows per position.
        keys: tiles of keys, else of queries.
        slots: partial results per head, at most; 0: nothing is split. The workers per head are half as many.
        rests: order a sequence's last, shorter tile by its own rows.
        least_chunk: rows of the other side that a chunk has at least.
    """

    block: int
    keys: bool = False
    pack: int = 1
    slots: int = 0
    rests: bool = False
    least_chunk: int = LEAST_CHUNK

    def capacity(self, problem: Problem) -> int:
        """Return an upper bound of the number of records, from shapes alone: a multiple of 4.

        So what lies behind them is at whole 16 bytes for any number of rows, and Triton compiles its readers once.
        """
        if problem.broadcast_q and not self.keys:
            tiles = -(-problem.rows_q * self.pack // self.block) * problem.num_batches
        else:
            rows = problem.rows_kv if self.keys else problem.rows_q
            tiles = -(-rows * self.pack // self.block) + problem.num_batches + 2
        return -(-(max(tiles, 1) + self.slots) // 4) * 4


def plan_tiles(problem: Problem, cut: Cut, counters: int = 0) -> Plan:
    """List a problem's tiles. Rows that no sequence covers are in the list too, for zeros to be written."""
    plan = _unwritten(problem, cut, counters)
    if problem.num_batches > SORT_FROM and not (problem.output_offset is not None or cut.rests):
        plan.counters.zero_()
        by_torch(_sort, plan, problem, cut)
        return plan
    _launch(problem, cut, counters, plan)
    return plan


def _unwritten(problem: Problem, cut: Cut, counters: int) -> Plan:
    room = cut.capacity(problem)
    words = torch.empty(words_of(room, counters, cut.slots > 0), dtype=torch.int32, device=problem.device)
    return Plan.of(words, room, counters, cut.slots > 0)


def plan_pass(problem: Problem, forward: Cut, counters: int, dq: Cut, keys: Cut) -> list[Plan]:
    """Build the lists of a forward and of the two passes of its backward, in one launch where nothing is sorted.

    Queries of their own only. Where dQ's tiles are the forward's, their list is the same.
    """
    if problem.num_batches > SORT_FROM:
        return [plan_tiles(problem, forward, counters), plan_tiles(problem, dq), plan_tiles(problem, keys)]
    first, third = _unwritten(problem, forward, counters), _unwritten(problem, keys, 0)
    if dq.block == forward.block and not forward.slots:
        _launch(problem, forward, counters, first, third, keys.block)
        return [first, first, third]
    second = _unwritten(problem, dq, 0)
    _launch(problem, forward, counters, first, third, keys.block, second, dq.block)
    return [first, second, third]


def plan_padded(problem: Problem, cut: Cut, keys: Cut | None, counters: int, pad: int) -> list[Plan]:
    """List the tiles of ``cut`` and, by the same launch, those of ``keys``, if given; each list has ``counters`` of its own.

    ``pad``: see :class:`jfa.kernels.common.sequences.Sequences`. No number of sequences is sorted by torch.
    """
    plans = [_unwritten(problem, one, counters) for one in (cut, keys) if one]
    _launch(problem, cut, counters, *plans, key_block=keys.block if keys else 0, pad=pad)
    return plans


def _launch(
    problem: Problem,
    cut: Cut,
    counters: int,
    plan: Plan,
    keys: Plan | None = None,
    key_block: int = 0,
    dq: Plan | None = None,
    dq_block: int = 0,
    pad: int = 0,
) -> None:
    """Fill ``plan``, and by the same launch the lists of a backward's passes where they are given."""
    segments = (problem.num_batches + 2) * (2 if cut.rests else 1)
    _variant(*plan_shape(problem, cut, counters, key_block, dq_block, pad)).launch(
        problem.device,
        (cdiv(segments, OWN), 1 + (keys is not None) + (dq is not None)),
        *(problem.query_offset, problem.key_offset, problem.output_offset),
        *(plan.records, plan.counts, plan.chunks, plan.counters),
        *((keys.records, keys.counts, keys.counters) if keys else (None, None, None)),
        *((dq.records, dq.counts) if dq else (None, None)),
        counters,
        *(problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out),
        *[made.records.shape[0] if made else 0 for made in (plan, keys, dq)],
        *(cut.slots, cut.least_chunk),
        *band_constants(problem.band),
    )


def plan_shape(problem: Problem, cut: Cut, counters: int, key_block: int = 0, dq_block: int = 0, pad: int = 0) -> tuple:
    """Return the fields of the :class:`PlanConfig` of a launch, in their order."""
    segments = (problem.num_batches + 2) * (2 if cut.rests else 1)
    others = min(2048, max(256, power_of_two(segments)))
    down, size = problem.band.has_hi and not cut.keys, power_of_two(counters) if counters else 0
    return cut.block, cut.keys, cut.pack, cut.rests, problem.broadcast_q, down, key_block, dq_block, others, size, pad


@dataclass(frozen=True)
class PlanConfig:
    """Compile-time configuration of the planner's kernel.

    Attributes:
        block, keys, pack, rests: how the first list is cut; see :class:`Cut`.
        broadcast_q: the queries are shared.
        down: a sequence's last queries come first.
        key_block, dq_block: rows per tile of the lists of a backward's passes over keys and for dQ; 0: that list is not made.
        others: segments that are compared at once.
        counters: counters of a list to clear, rounded up to a power of two.
        pad: rows to whose multiples a backward pads each sequence's queries; 0: its kernels have no such arrays.
        own: segments that one program lists.
        step: tiles of each that it writes at once.
    """

    block: int
    keys: bool
    pack: int
    rests: bool
    broadcast_q: bool
    down: bool
    key_block: int
    dq_block: int
    others: int
    counters: int
    pad: int
    own: int = OWN
    step: int = TILES


@cache
def _variant(*shape) -> Variant:
    """Return the variant of a PlanConfig of those fields."""
    cfg = PlanConfig(*shape)
    return Variant(plan_kernel, cfg=cfg, num_warps=8 if cfg.others > 1024 else 4)


# Triton would compile again for each of these that turns divisible by 16.
UNSPECIALISED = (
    "num_counters batches rows_q rows_kv rows_out capacity key_capacity dq_capacity slots least_chunk "
    "lo_start lo_end hi_start hi_end"
).split()


@triton.jit(do_not_specialize=UNSPECIALISED)
def plan_kernel(
    query_offset,
    key_offset,
    output_offset,
    records,
    counts,
    chunks,
    counters,
    key_records,
    key_counts,
    key_counters,
    dq_records,
    dq_counts,
    num_counters,
    batches,
    rows_q,
    rows_kv,
    rows_out,
    capacity,
    key_capacity,
    dq_capacity,
    slots,
    least_chunk,
    lo_start,
    lo_end,
    hi_start,
    hi_end,
    cfg: tl.constexpr,
):
    """List OWN segments of one list: find their first records by counting, then write them. Grid: (programs, lists).

    The first list is what a :class:`Cut` says; key_*, dq_*: those of a backward's passes, or None.
    """
    if cfg.pad:
        gdc_launch_dependents()  # the kernel that reads the list may be set up already; it waits for this one's end itself
    band = BandConstants(lo_start, lo_end, hi_start, hi_end)
    rows = Sizes(batches, rows_q, rows_kv, rows_out)
    offsets = Offsets(query_offset, key_offset, output_offset)
    sequences = Sequences(offsets, rows, band, cfg.broadcast_q, True, True, True, cfg.pad)
    number = tl.program_id(1) if cfg.key_block > 0 else 0
    if number == 0:
        to = Target(records, counts, chunks, counters, num_counters, capacity, cfg.counters)
        cut = Cutting(cfg.block, cfg.keys, cfg.pack, cfg.down, cfg.rests, chunks is not None)
        write_list(sequences, to, cut, slots, least_chunk, cfg.own, cfg.others, cfg.step)
    elif cfg.dq_block > 0 and number == 2:
        to_dq = Target(dq_records, dq_counts, None, counters, num_counters, dq_capacity, 0)
        by_dq = Cutting(cfg.dq_block, False, cfg.pack, cfg.down, False, False)
        write_list(sequences, to_dq, by_dq, 0, 0, cfg.own, cfg.others, cfg.step)
    elif cfg.key_block > 0:
        size: tl.constexpr = cfg.counters if cfg.pad else 0
        to_keys = Target(key_records, key_counts, None, key_counters, num_counters, key_capacity, size)
        by_keys = Cutting(cfg.key_block, True, 1, False, False, False)
        write_list(sequences, to_keys, by_keys, 0, 0, cfg.own, cfg.others, cfg.step)


@aggregate
class Target:
    """Memory that a list is written to: the arrays of a :class:`Plan`. ``size`` is ``num_counters`` rounded up to a
    power of two, or 0."""

    records: tl.tensor
    counts: tl.tensor
    chunks: tl.core.base_value
    counters: tl.tensor
    num_counters: tl.tensor
    capacity: tl.tensor
    size: tl.constexpr


@triton.jit
def write_list(sequences, to, cut, slots, least_chunk, OWN: tl.constexpr, OTHERS: tl.constexpr, TILES: tl.constexpr):
    """List this program's OWN segments; see :func:`plan_kernel`."""
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    chunk = to.capacity * 0
    if cut.split:
        chunk = mean_load(sequences, cut, slots, least_chunk, OTHERS)
    tile, rows, work = segment(sequences, i, cut)
    parts = parts_of(work, chunk, cut)
    first, first_slot, busy, total = place(sequences, i, tl.cdiv(work, parts), chunk, cut, OWN, OTHERS)
    if tl.program_id(0) == 0:
        tl.store(to.counts, tl.minimum(busy, to.capacity))
        tl.store(to.counts + 1, tl.minimum(total, to.capacity))
        if to.size > 0:
            n = tl.arange(0, to.size)
            tl.store(to.counters + n, 0, mask=n < to.num_counters)
    write_records(to, tile, tl.cdiv(rows, cut.block), parts, first, first_slot, cut, TILES)


@triton.jit
def write_records(to, tile, tiles, parts, first, first_slot, cut, TILES: tl.constexpr):
    """Write the records of segments of ``tiles`` tiles, each of ``parts`` chunks, from the places ``first`` on."""
    records = tiles * parts
    for base in range(0, tl.max(records, 0), TILES):
        t = base + tl.arange(0, TILES)[None, :]
        number = t // parts[:, None]
        index = first[:, None] + t
        mask = (t < records[:, None]) & (index < to.capacity)
        row = number * cut.block
        if cut.down:
            row = (tiles[:, None] - 1 - number) * cut.block
        store_record(to.records, index, columns(tile), tile.row[:, None] + row, mask)
        if cut.split:
            code = (t % parts[:, None]) << 16 | parts[:, None]
            tl.store(to.chunks + index * 2, code, mask=mask)
            tl.store(to.chunks + index * 2 + 1, first_slot[:, None] + number * parts[:, None], mask=mask)


@aggregate
class Cutting:
    """:class:`Cut` inside a kernel; ``down``: a sequence's last rows come first."""

    block: tl.constexpr
    keys: tl.constexpr
    pack: tl.constexpr
    down: tl.constexpr
    rests: tl.constexpr
    split: tl.constexpr


@triton.jit
def segment(sequences, i, cut):
    """Return (tile, rows, work) of segments ``i`` [N]: their first tile, the rows to cut into tiles, and what one tile costs.

    A segment is a sequence, or with ``rests`` its whole tiles (even numbers) or its last, shorter one (odd numbers).
    """
    if cut.rests:
        tile, rows = sequences.tile(i // 2, cut.keys)
        whole = rows // cut.block * cut.block
        rest = i % 2 == 1
        row = tl.where(rest, whole, 0)
        rows = tl.where(rest, rows - whole, whole)
        return Tile(row, tile.q, tile.kv, tile.out, tile.band, tile.pad_begin), rows, tl.minimum(rows, cut.block)
    else:
        tile, rows = sequences.tile(i, cut.keys)
        return tile, rows * cut.pack, work_of(tile, cut, sequences.broadcast_q)


@triton.jit
def work_of(tile, cut, BROADCAST_Q: tl.constexpr):
    """Estimate what a tile of a sequence costs, in rows of the other side; 0 if there is nothing to do.

    Shared queries are equally many everywhere: then sequences with more keys come first, whose tiles are full.
    """
    other = tile.kv.length
    if cut.keys and not BROADCAST_Q:
        other = tile.q.length
    width = tl.minimum(tile.band.hi, FAR) - tl.maximum(tile.band.lo, -FAR) + (cut.block + cut.pack - 1) // cut.pack
    return tl.where((tile.q.length > 0) & (tile.kv.length > 0), tl.minimum(other, tl.maximum(width, 0)), 0)


@triton.jit
def mean_load(sequences, cut, slots, least_chunk, OTHERS: tl.constexpr):
    """Return how long a chunk is: the mean load of a worker, of which there are ``slots / 2`` per head.

    So no record is longer than that by more than half, and there are at most ``slots`` chunks of split tiles, whatever the
    lengths are.
    """
    total = tl.zeros([OTHERS], tl.int64)
    for base in range(0, sequences.rows.batches + 2, OTHERS):
        _, rows, work = segment(sequences, base + tl.arange(0, OTHERS), cut)
        total += tl.cast(tl.cdiv(rows, cut.block), tl.int64) * work
    return tl.cast(tl.maximum(tl.cdiv(tl.sum(total, 0) * 2, slots), least_chunk), tl.int32)


@triton.jit
def parts_of(work, chunk, cut):
    """Return into how many chunks a tile is cut: none is shorter than three quarters of ``chunk``."""
    parts = work * 0 + 1
    if cut.split:
        parts = tl.minimum(tl.where(work * 2 > chunk * 3, tl.cdiv(work, chunk), 1), 1024)
    return parts


@triton.jit
def place(sequences, i, cost, chunk, cut, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """Return (first records, first partial results) of the segments ``i`` of these costs, and how many records work, and are."""
    first = tl.zeros([OWN], tl.int32)
    first_slot = tl.zeros([OWN], tl.int32)
    busy = 0
    total = 0
    segments = sequences.rows.batches + 2
    if cut.rests:
        segments = segments * 2
    for base in range(0, segments, OTHERS):
        o = base + tl.arange(0, OTHERS)
        _, rows, work = segment(sequences, o, cut)
        records = tl.cdiv(rows, cut.block)
        o_cost = work
        if cut.split:
            parts = parts_of(work, chunk, cut)
            o_cost = tl.cdiv(work, parts)
            records *= parts
        before = (o_cost[None, :] > cost[:, None]) | ((o_cost[None, :] == cost[:, None]) & (o[None, :] < i[:, None]))
        first += tl.sum(tl.where(before, records[None, :], 0), 1)
        if cut.split:
            first_slot += tl.sum(tl.where(before & (parts > 1)[None, :], records[None, :], 0), 1)
        busy += tl.sum(tl.where(work > 0, records, 0), 0)
        total += tl.sum(records, 0)
    return first, first_slot, busy, total


@triton.jit
def columns(tile):
    """Return a Tile of blocks [N] as one of columns [N, 1]."""
    q = Span(tile.q.begin[:, None], tile.q.length[:, None])
    kv = Span(tile.kv.begin[:, None], tile.kv.length[:, None])
    out = Span(tile.out.begin[:, None], tile.out.length[:, None])
    band = Band(tile.band.lo[:, None], tile.band.hi[:, None], True, True)
    return Tile(tile.row[:, None], q, kv, out, band, tile.pad_begin[:, None])


# ------------------------------------------------------------------------------------------------------- many sequences
def _sort(plan: Plan, problem: Problem, cut: Cut) -> None:
    """Fill a list, unsplit, by torch's sort: for very many sequences. Its order differs only among tiles of equal work."""
    q_begin, len_q = _spans(problem.query_offset, problem.rows_q, problem)
    kv_begin, len_kv = _spans(problem.key_offset, problem.rows_kv, problem)
    real = torch.ones_like(len_kv)
    real[0], real[-1] = 0, 0
    out_begin = q_begin
    if problem.broadcast_q:
        q_begin, len_q = torch.zeros_like(kv_begin), real * problem.rows_q
        out_begin = (torch.arange(len(real), device=problem.device) - 1) * problem.rows_q
    rows = len_kv if cut.keys else len_q * cut.pack
    len_q, len_kv = (len_q * real, len_kv) if cut.keys else (len_q, len_kv * real)
    lo_start, lo_end, hi_start, hi_end = band_constants(problem.band)
    lo = (len_kv - len_q + lo_end).clamp(min=lo_start)
    hi = (len_kv - len_q + hi_end).clamp(max=hi_start)
    width = (hi.clamp(max=FAR.value) - lo.clamp(min=-FAR.value) + -(-cut.block // cut.pack)).clamp(min=0)
    work = torch.minimum(len_q if cut.keys and not problem.broadcast_q else len_kv, width) * (len_q > 0) * (len_kv > 0)
    tiles = -(-rows // cut.block)
    order = torch.sort(work, descending=True, stable=True).indices
    ends = torch.cumsum(tiles[order], 0)
    index = torch.arange(plan.records.shape[0], device=problem.device)
    at = torch.searchsorted(ends, index, right=True).clamp(max=len(order) - 1)
    s = order[at]
    number = index - (ends[at] - tiles[s])
    if problem.band.has_hi and not cut.keys:
        number = tiles[s] - 1 - number
    fields = q_begin[s], len_q[s], number * cut.block, out_begin[s], kv_begin[s], len_kv[s], lo[s], hi[s], 0 * s
    plan.records.copy_(torch.stack(fields, 1))
    if plan.chunks is not None:
        plan.chunks[:, 0] = 1  # chunk 0 of 1
        plan.chunks[:, 1] = 0
    counts = torch.stack([(tiles * (work > 0)).sum(), tiles.sum()])
    plan.counts.copy_(counts.clamp(max=len(index)))


def _spans(offset: Tensor, rows: int, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return (first row, number of rows) of the margin before the sequences, of the sequences, and of the margin behind."""
    inside = torch.nn.functional.pad(offset.long().clamp(0, rows), (1, 0))
    ends = torch.nn.functional.pad(inside[1:], (0, 1), value=rows)
    return inside, (ends - inside).clamp(min=0)
