"""Lists of tiles for the persistent Hopper kernels: made by one small kernel, without a synchronisation, read by every role.

A list is one int32 tensor [capacity, 9], a record a tile, and how many of the records are valid. Sequences with much work come
first, and a record says all that a role must know, so that no role reads offsets. The capacity follows from shapes alone, so
building works inside a CUDA-graph capture.

Sorting without a sort: a sequence's first slot is the number of tiles of all sequences with more work than it. Counting them costs
B comparisons a sequence, which is nothing beside launching the several kernels of a sort; ties go by position, so a list is
always the same.

Besides the B sequences a list may hold two margins: the rows before the first offset and those behind the last, which no sequence
covers and which get zeros. Offsets are clamped, so that no lie in them leads outside a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.sequence import band_of

FIELDS = tl.constexpr(9)  # of a record; see load_tile
FAR = tl.constexpr(1 << 28)  # an open side of a band for differences of bounds, which must not overflow
HEADER = 4  # words before a list: its two counts, and what keeps the rest aligned to 16 bytes
PAD = tl.constexpr(64)  # rows: the unit in which the backward pads every sequence's queries (see padded_rows)


@dataclass
class TileList:
    """``records`` [capacity, 9] int32 and ``counts`` [2] int32 = (tiles that have work, all valid tiles)."""

    records: torch.Tensor
    counts: torch.Tensor
    cleared: torch.Tensor | None = None  # int32 of 0, one a head, as long as no launch has drawn from them

    def counters(self, number: int) -> torch.Tensor:
        """``number`` int32 of 0 for one launch to draw tiles from.

        The list's kernel cleared some along the way, for the first launch that asks; a launch to clear others costs 2 us.
        """
        cleared, self.cleared = self.cleared, None
        if cleared is not None and cleared.numel() >= number:
            return cleared[:number]
        return torch.zeros(number, dtype=torch.int32, device=self.records.device)


@triton.jit
def load_tile(records, index):
    """(q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin).

    row0 is the tile's first row inside its sequence; begins are rows of the tensors; i + lo <= j <= i + hi is the band; pad_begin
    is where the sequence's queries begin in the backward's padded arrays.
    """
    at = records + index * FIELDS
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
            tl.load(at + 6), tl.load(at + 7), tl.load(at + 8))


@triton.jit
def span(offset, s, batches, rows, mask):
    """(begin, length) of segment ``s``: 0 is the margin before the first sequence, batches + 1 the one behind the last."""
    begin = tl.load(offset + s - 1, mask=mask & (s > 0), other=0)
    end = tl.load(offset + s, mask=mask & (s <= batches), other=rows)
    begin = tl.minimum(tl.maximum(begin, 0), rows)
    return begin, tl.maximum(tl.minimum(end, rows) - begin, 0)


@triton.jit
def segment(query_offset, key_offset, output_offset, s, batches, rows_q, rows_kv, rows_out,
            KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr):
    """(q_begin, len_q, out_begin, kv_begin, len_kv, pad_begin, rows to cut into tiles) of the segments ``s`` [N]."""
    mask = s < batches + 2
    real = (s > 0) & (s <= batches)
    kv_begin, len_kv = span(key_offset, s, batches, rows_kv, mask)
    if BROADCAST_Q:
        q_begin = s * 0
        len_q = tl.where(real, rows_q, 0)
        cut = len_q
        out_begin = (s - 1) * rows_q
        if SLOTS:  # a slot that is not inside the output is neither written nor read
            out_begin = tl.load(output_offset + s - 1, mask=real, other=0)
            len_q = tl.where((out_begin >= 0) & (out_begin <= rows_out - rows_q), len_q, 0)
            out_begin = tl.where(len_q > 0, out_begin, 0)
        pad_begin = tl.minimum(tl.maximum(s - 1, 0), batches - 1) * (tl.cdiv(rows_q, PAD) * PAD)
    else:
        q_begin, len_q = span(query_offset, s, batches, rows_q, mask)
        cut = len_q
        out_begin = q_begin
        pad_begin = (q_begin + s * PAD) // PAD * PAD
    if KEYS:
        cut = len_kv
        len_q = tl.where(real, len_q, 0)
    else:
        len_kv = tl.where(real, len_kv, 0)
    return q_begin, len_q, out_begin, kv_begin, len_kv, pad_begin, tl.where(mask, cut, 0)


@triton.jit
def work_of(len_q, len_kv, lo, hi, BLOCK: tl.constexpr, KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr):
    """An estimate of what a tile of a sequence costs, in rows of the other side; 0 if there is nothing to do.

    Shared queries are equally many everywhere: then sequences with more keys come first, whose tiles are full.
    """
    other = len_kv
    if KEYS and not BROADCAST_Q:
        other = len_q
    width = tl.maximum(tl.minimum(hi, FAR) - tl.maximum(lo, -FAR) + BLOCK, 0)
    return tl.where((len_q > 0) & (len_kv > 0), tl.minimum(other, width), 0)


@triton.jit
def store_records(records, slot, row, mask, q_begin, len_q, out_begin, kv_begin, len_kv, lo, hi, pad_begin):
    """Writes the records of [sequences, tiles]; everything but slot and row is [sequences, 1]."""
    at = records + slot * FIELDS
    tl.store(at, q_begin + row * 0, mask=mask)
    tl.store(at + 1, len_q + row * 0, mask=mask)
    tl.store(at + 2, row, mask=mask)
    tl.store(at + 3, out_begin + row * 0, mask=mask)
    tl.store(at + 4, kv_begin + row * 0, mask=mask)
    tl.store(at + 5, len_kv + row * 0, mask=mask)
    tl.store(at + 6, lo + row * 0, mask=mask)
    tl.store(at + 7, hi + row * 0, mask=mask)
    tl.store(at + 8, pad_begin + row * 0, mask=mask)


@triton.jit
def write_list(query_offset, key_offset, output_offset, records, counts, counters, heads, batches, rows_q, rows_kv, rows_out,
               capacity, lo_start, lo_end, hi_start, hi_end,
               BLOCK: tl.constexpr, KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr, DOWN: tl.constexpr,
               OWN: tl.constexpr, OTHERS: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr):
    """List OWN sequences: find their first slots by counting, then write their records.

    KEYS: tiles of keys, for the backward; else of queries. DOWN: a sequence's last rows first. ``counters`` [heads] are cleared.
    Segments are numbered 0 .. batches + 1.
    """
    s = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q_begin, len_q, out_begin, kv_begin, len_kv, pad_begin, cut = segment(
        query_offset, key_offset, output_offset, s, batches, rows_q, rows_kv, rows_out, KEYS, BROADCAST_Q, SLOTS)
    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    work = work_of(len_q, len_kv, lo, hi, BLOCK, KEYS, BROADCAST_Q)
    first = tl.zeros([OWN], tl.int32)
    busy = 0
    total = 0
    for base in range(0, batches + 2, OTHERS):
        o = base + tl.arange(0, OTHERS)
        _, o_len_q, _, _, o_len_kv, _, o_cut = segment(
            query_offset, key_offset, output_offset, o, batches, rows_q, rows_kv, rows_out, KEYS, BROADCAST_Q, SLOTS)
        o_lo, o_hi = band_of(o_len_q, o_len_kv, lo_start, lo_end, hi_start, hi_end)
        o_work = work_of(o_len_q, o_len_kv, o_lo, o_hi, BLOCK, KEYS, BROADCAST_Q)
        o_tiles = tl.cdiv(o_cut, BLOCK)
        before = (o_work[None, :] > work[:, None]) | ((o_work[None, :] == work[:, None]) & (o[None, :] < s[:, None]))
        first += tl.sum(tl.where(before, o_tiles[None, :], 0), 1)
        busy += tl.sum(tl.where(o_work > 0, o_tiles, 0), 0)
        total += tl.sum(o_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(counts, tl.minimum(busy, capacity))
        tl.store(counts + 1, tl.minimum(total, capacity))
        tl.store(counters + tl.arange(0, HEADS), 0, mask=tl.arange(0, HEADS) < heads)
    tiles = tl.cdiv(cut, BLOCK)
    for base in range(0, tl.max(tiles, 0), TILES):
        t = base + tl.arange(0, TILES)[None, :]
        slot = first[:, None] + t
        row = t * BLOCK
        if DOWN:
            row = (tiles[:, None] - 1 - t) * BLOCK
        store_records(records, slot, row, (t < tiles[:, None]) & (slot < capacity), q_begin[:, None], len_q[:, None],
                      out_begin[:, None], kv_begin[:, None], len_kv[:, None], lo[:, None], hi[:, None], pad_begin[:, None])


UNSPECIALISED = ["heads", "batches", "rows_q", "rows_kv", "rows_out", "capacity", "key_capacity", "lo_start", "lo_end", "hi_start",
                 "hi_end"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def list_kernel(query_offset, key_offset, output_offset, records, counts, counters, heads, batches, rows_q, rows_kv, rows_out,
                capacity, lo_start, lo_end, hi_start, hi_end,
                BLOCK: tl.constexpr, KEYS: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr, DOWN: tl.constexpr,
                OWN: tl.constexpr, OTHERS: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr):
    """Write one list; see :func:`write_list`. Grid: (programs,)."""
    gdc_launch_dependents()  # the kernel that reads the list may be set up already; it waits for this one's end itself
    write_list(query_offset, key_offset, output_offset, records, counts, counters, heads, batches, rows_q, rows_kv, rows_out,
               capacity, lo_start, lo_end, hi_start, hi_end, BLOCK, KEYS, BROADCAST_Q, SLOTS, DOWN, OWN, OTHERS, TILES, HEADS)


@triton.jit(do_not_specialize=UNSPECIALISED)
def both_lists_kernel(query_offset, key_offset, output_offset, records, counts, counters, key_records, key_counts, key_counters,
                      heads, batches, rows_q, rows_kv, rows_out, capacity, key_capacity, lo_start, lo_end, hi_start, hi_end,
                      BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, BROADCAST_Q: tl.constexpr, SLOTS: tl.constexpr,
                      DOWN: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr):
    """Write the lists of a forward and of its backward in one launch. Grid: (programs, 2)."""
    gdc_launch_dependents()
    if tl.program_id(1) == 0:
        write_list(query_offset, key_offset, output_offset, records, counts, counters, heads, batches, rows_q, rows_kv, rows_out,
                   capacity, lo_start, lo_end, hi_start, hi_end, BLOCK, False, BROADCAST_Q, SLOTS, DOWN, OWN, OTHERS, TILES, HEADS)
    else:
        write_list(query_offset, key_offset, output_offset, key_records, key_counts, key_counters, heads, batches, rows_q, rows_kv,
                   rows_out, key_capacity, lo_start, lo_end, hi_start, hi_end, KEY_BLOCK, True, BROADCAST_Q, SLOTS, False, OWN,
                   OTHERS, TILES, HEADS)


@dataclass
class Lists:
    """The lists of one forward and of its backward."""

    queries: TileList
    keys: TileList


def query_tiles(problem: Problem, block: int) -> TileList:
    """List the tiles of ``block`` queries of every sequence, for the forward: the most keys first.

    Tiles without keys are in the list too (the kernel writes 0 and -inf there), and so are rows that no sequence covers.
    """
    return _list(problem, block, query_capacity(problem, block), keys=False)


def key_tiles(problem: Problem, block: int) -> TileList:
    """List the tiles of ``block`` keys of every sequence, for the backward: the most queries first. row0 is a key row here.

    Tiles without queries are in the list too (the kernel writes 0 there), and so are rows that no sequence covers.
    """
    return _list(problem, block, _capacity(problem.rows_kv, problem, block), keys=True)


def both_tiles(problem: Problem, block: int, key_block: int) -> Lists:
    """:func:`query_tiles` and :func:`key_tiles` by one launch."""
    queries = _empty_list(problem, query_capacity(problem, block))
    keys = _empty_list(problem, _capacity(problem.rows_kv, problem, key_block))
    programs, options = _programs(problem)
    variant = _both_variant(block, key_block, problem.band.has_hi, *options)
    variant.launch(
        problem.device, (programs, 2), *_offsets(problem, queries.counts), queries.records, queries.counts, queries.cleared,
        keys.records, keys.counts, keys.cleared, *_sizes(problem), queries.records.shape[0], keys.records.shape[0],
        *band_constants(problem.band),
    )
    return Lists(queries, keys)


def query_capacity(problem: Problem, block: int) -> int:
    """Records that a list of query tiles may need."""
    if problem.broadcast_q:
        return problem.num_batches * -(-problem.rows_q // block)
    return _capacity(problem.rows_q, problem, block)


def _capacity(rows: int, problem: Problem, block: int) -> int:
    return -(-rows // block) + problem.num_batches + 2


def _list(problem: Problem, block: int, capacity: int, keys: bool) -> TileList:
    tiles = _empty_list(problem, capacity)
    programs, options = _programs(problem)
    _list_variant(block, keys, problem.band.has_hi and not keys, *options).launch(
        problem.device, (programs,), *_offsets(problem, tiles.counts), tiles.records, tiles.counts, tiles.cleared,
        *_sizes(problem), capacity, *band_constants(problem.band),
    )
    return tiles


def _empty_list(problem: Problem, capacity: int) -> TileList:
    words = torch.empty(max(capacity, 1) * FIELDS.value + HEADER + problem.num_heads, dtype=torch.int32, device=problem.device)
    counts, counters, records = words.split((HEADER, problem.num_heads, max(capacity, 1) * FIELDS.value))
    return TileList(records.view(-1, FIELDS.value), counts[:2], counters)


def _offsets(problem: Problem, stand_in: torch.Tensor) -> tuple[torch.Tensor, ...]:
    slots = problem.output_offset
    return problem.query_offset, problem.key_offset, stand_in if slots is None else slots


def _sizes(problem: Problem) -> tuple[int, ...]:
    return problem.num_heads, problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out


OWN = 8  # sequences that one program lists


def _programs(problem: Problem) -> tuple[int, tuple]:
    """Return the number of programs and the options that both list kernels share."""
    others = min(2048, max(256, triton.next_power_of_2(problem.num_batches + 2)))
    heads = triton.next_power_of_2(problem.num_heads)
    return triton.cdiv(problem.num_batches + 2, OWN), (problem.broadcast_q, problem.output_offset is not None, others, heads)


@cache
def _list_variant(block: int, keys: bool, down: bool, *options) -> Variant:
    return Variant(list_kernel, BLOCK=block, KEYS=keys, DOWN=down, **_common(*options))


@cache
def _both_variant(block: int, key_block: int, down: bool, *options) -> Variant:
    return Variant(both_lists_kernel, BLOCK=block, KEY_BLOCK=key_block, DOWN=down, **_common(*options))


def _common(broadcast_q: bool, slots: bool, others: int, heads: int) -> dict:
    warps = 8 if others > 1024 else 4
    return dict(BROADCAST_Q=broadcast_q, SLOTS=slots, OWN=OWN, OTHERS=others, TILES=16, HEADS=heads, num_warps=warps)


def padded(rows: int) -> int:
    """Rows rounded up to whole blocks of PAD."""
    return -(-rows // int(PAD)) * int(PAD)


def padded_rows(problem: Problem) -> int:
    """Rows of an array that gives every sequence's queries whole blocks of PAD: an upper bound from shapes.

    Segment s starts at (begin + s * PAD) rounded down to a block: no prefix sum is needed, as its predecessors grow by less than
    PAD rows each.
    """
    if problem.broadcast_q:
        return problem.num_batches * padded(problem.rows_q)
    return padded(problem.rows_q) + (problem.num_batches + 2) * int(PAD)
