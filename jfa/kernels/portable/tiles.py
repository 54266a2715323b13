"""Units of work without empty ones, longest first, built on the device by one small launch.

A sort would need several launches, each as long as a small attention itself. Instead every sequence finds its own place: it
counts the units of all sequences that come before it. That is B * B comparisons, spread over many programs; from some
thousand sequences on torch sorts instead. Nothing here waits for the device, so a CUDA graph can hold it.

A list is int32 [capacity, 8]: sequence, tile, chunk << 16 | chunks, first partial slot, then the first row and the number of
rows on the tiles' side and on the other, inside the tensors whatever the offsets say: so a program needs one load before it can
fetch its first keys. ``counts`` holds how many entries are used. The rows past the last sequence ("slack") are one more
sequence, number B, with nothing on the other side: its tiles write zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.sequence import RUNTIME
from jfa.masks import UNBOUNDED, Band

WORDS = tl.constexpr(8)  # of an entry
HEADER = 4  # words before the entries, the first of which is the count: entries stay aligned, or kernels would be compiled twice
SEQUENCES = 4  # sequences that one program of the planner places
SCANS = (256, 1024)  # sequences that it looks at in one step: the first that holds them all, else the last
LEAST_CHUNK = 256  # keys: shorter chunks cost more in merging than they save
SORT_FROM = 8192  # sequences from which on a sort is quicker than comparing all with all (modelled: some 100 us of comparisons)


@dataclass(frozen=True)
class Units:
    """A list of units for one launch."""

    words: Tensor  # the one allocation behind the next three
    units: Tensor  # [capacity * 8] int32
    counts: Tensor  # [1] int32
    arrivals: Tensor  # [slots * kv_heads] int32 zeros: how many chunks of a split tile have arrived
    capacity: int
    slots: int  # partial results a head may leave; 0: nothing is split

    @classmethod
    def of(cls, words: Tensor, room: tuple[int, int]) -> Units:
        """The views of a list with ``room`` = (capacity, slots)."""
        capacity, slots = room
        end = HEADER + capacity * WORDS.value
        return cls(words, words[HEADER:end], words[:1], words[end:], capacity, slots)


@triton.jit
def _span(b, offset, num_batches, rows, SHARED: tl.constexpr, SLACK: tl.constexpr):
    """(first row, number of rows) of sequences b (a block), inside the tensor; number B has the slack or nothing, more nothing."""
    real = b < num_batches
    if SHARED:
        return tl.zeros_like(b), tl.where(real, rows, 0)
    begin = tl.minimum(tl.maximum(tl.load(offset + b, mask=b <= num_batches, other=0), 0), rows)
    end = tl.minimum(tl.load(offset + b + 1, mask=real, other=0), rows)
    if SLACK:
        end = tl.where(b == num_batches, rows, end)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _shape_of(
    b, tile_offset, other_offset, num_batches, tile_rows, other_rows, width_limit,
    TILE_SHARED: tl.constexpr, OTHER_SHARED: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr,
):  # fmt: skip
    """(tiles, blocks that the longest of them visits) of sequences b."""
    mine = _span(b, tile_offset, num_batches, tile_rows, TILE_SHARED, True)[1]
    other = _span(b, other_offset, num_batches, other_rows, OTHER_SHARED, False)[1]
    return tl.cdiv(mine * PACK, BLOCK), tl.cdiv(tl.minimum(other, width_limit), OTHER_BLOCK)


@triton.jit
def _chunks_of(width, chunk):
    """Into how many chunks a tile of ``width`` blocks is cut: none shorter than three quarters of ``chunk``."""
    chunks = tl.where(width * 2 > chunk * 3, tl.cdiv(width, chunk), 1)
    return tl.maximum(tl.minimum(chunks, 1024), 1)


@triton.jit(do_not_specialize=RUNTIME)
def plan_units(
    units,
    counts,
    arrivals,
    tile_offset,
    other_offset,
    num_batches,
    num_sequences,
    tile_rows,
    other_rows,
    width_limit,
    capacity,
    slots,
    heads,
    least_chunk,
    TILE_SHARED: tl.constexpr,
    OTHER_SHARED: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SCAN: tl.constexpr,
):
    """This program places SEQUENCES sequences' units in the list, ordered by falling cost, then by number.

    A tile's chunks are as long as the mean load of a worker (there are ``slots / 2`` workers a head): so no unit is longer than
    that, and at most ``slots`` chunks of split tiles exist, whatever the lengths are.
    """
    chunk = 1 << 30
    if SPLIT:
        total = tl.zeros([SCAN], tl.int64)
        for j0 in range(0, num_sequences, SCAN):
            tiles, width = _shape_of(
                j0 + tl.arange(0, SCAN), tile_offset, other_offset, num_batches, tile_rows, other_rows, width_limit,
                TILE_SHARED, OTHER_SHARED, PACK, BLOCK, OTHER_BLOCK,
            )  # fmt: skip
            total += tl.cast(tiles, tl.int64) * width
        chunk = tl.cast(tl.maximum(tl.cdiv(tl.sum(total, 0) * 2, slots), least_chunk), tl.int32)
        first = tl.program_id(0) * SCAN + tl.arange(0, SCAN)
        for a0 in range(0, slots * heads, tl.num_programs(0) * SCAN):
            tl.store(arrivals + a0 + first, 0, mask=a0 + first < slots * heads)

    i = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    tiles_i, width_i = _shape_of(
        i, tile_offset, other_offset, num_batches, tile_rows, other_rows, width_limit,
        TILE_SHARED, OTHER_SHARED, PACK, BLOCK, OTHER_BLOCK,
    )  # fmt: skip
    chunks_i = _chunks_of(width_i, chunk)
    cost_i = tl.cdiv(width_i, chunks_i)
    place = tl.zeros([SEQUENCES], tl.int32)
    slot = tl.zeros([SEQUENCES], tl.int32)
    all_units = tl.zeros([SCAN], tl.int32)
    for j0 in range(0, num_sequences, SCAN):
        j = j0 + tl.arange(0, SCAN)
        tiles, width = _shape_of(
            j, tile_offset, other_offset, num_batches, tile_rows, other_rows, width_limit,
            TILE_SHARED, OTHER_SHARED, PACK, BLOCK, OTHER_BLOCK,
        )  # fmt: skip
        chunks = _chunks_of(width, chunk)
        cost = tl.cdiv(width, chunks)
        before = (cost[None, :] > cost_i[:, None]) | ((cost[None, :] == cost_i[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum(tl.where(before, (tiles * chunks)[None, :], 0), 1)
        if SPLIT:
            slot += tl.sum(tl.where(before & (chunks > 1)[None, :], (tiles * chunks)[None, :], 0), 1)
        all_units += tiles * chunks
    tl.store(counts, tl.minimum(tl.sum(all_units, 0), capacity), mask=tl.program_id(0) == 0)

    begin, length = _span(i, tile_offset, num_batches, tile_rows, TILE_SHARED, True)
    other_begin, other_length = _span(i, other_offset, num_batches, other_rows, OTHER_SHARED, False)
    steps = tl.arange(0, 16)[None, :]
    for t0 in range(0, tl.max(tiles_i * chunks_i, 0), 16):
        t = t0 + steps
        at = place[:, None] + t
        keep = (t < (tiles_i * chunks_i)[:, None]) & (at < capacity)
        tile = t // chunks_i[:, None]
        # The last rows of a causal tile see most keys, the first rows of a key tile are seen by most queries.
        shown = tl.where(LAST_FIRST, tiles_i[:, None] - 1 - tile, tile)
        entry = units + at * WORDS
        everywhere = tl.zeros_like(t)
        tl.store(entry, i[:, None] + everywhere, mask=keep)
        tl.store(entry + 1, shown, mask=keep)
        tl.store(entry + 2, ((t % chunks_i[:, None]) << 16) | chunks_i[:, None], mask=keep)
        tl.store(entry + 3, slot[:, None] + tile * chunks_i[:, None], mask=keep)
        tl.store(entry + 4, begin[:, None] + everywhere, mask=keep)
        tl.store(entry + 5, length[:, None] + everywhere, mask=keep)
        tl.store(entry + 6, other_begin[:, None] + everywhere, mask=keep)
        tl.store(entry + 7, other_length[:, None] + everywhere, mask=keep)


@triton.jit
def read_unit(units, counts, unit):
    """(is it used, sequence, tile, chunk code, slot, first row, rows, first row of the other side, rows): one load deep."""
    entry = units + unit * WORDS
    used = unit < tl.load(counts)
    b, tile, code, slot = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    return used, b, tile, code, slot, tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)


# ------------------------------------------------------------------------------------------------------------- on the host
def query_room(problem: Problem, block_m: int, workers: int = 0) -> tuple[int, int]:
    """(capacity, slots) of a list of query tiles: upper bounds from shapes alone."""
    blocks = triton.cdiv(problem.rows_q * problem.group_size, block_m)
    count = blocks * problem.num_batches if problem.broadcast_q else blocks + problem.num_batches + 1
    return max(count, 1) + 2 * workers, 2 * workers


def key_room(problem: Problem, block_n: int) -> tuple[int, int]:
    """(capacity, 0) of a list of key tiles."""
    return triton.cdiv(problem.rows_kv, block_n) + problem.num_batches + 1, 0


def query_units(problem: Problem, block_m: int, block_n: int, workers: int = 0) -> Units:
    """Tiles of ``block_m`` packed query rows for the forward; with ``workers`` mega-sequences are split for that many a head."""
    side = _Side(problem.query_offset, problem.rows_q, problem.broadcast_q, problem.group_size, block_m)
    other = _Side(problem.key_offset, problem.rows_kv, False, 1, block_n)
    width = _band_width(problem.band, triton.cdiv(block_m, problem.group_size))
    return _build(problem, side, other, width, query_room(problem, block_m, workers), last_first=True)


def key_units(problem: Problem, block_n: int, block_m: int) -> Units:
    """Tiles of ``block_n`` key rows for the backward, those that most queries see first."""
    side = _Side(problem.key_offset, problem.rows_kv, False, 1, block_n)
    other_block = max(1, block_m // problem.group_size)
    other = _Side(problem.query_offset, problem.rows_q, problem.broadcast_q, 1, other_block)
    return _build(problem, side, other, _band_width(problem.band, block_n), key_room(problem, block_n), last_first=False)


@dataclass(frozen=True)
class _Side:
    """One side of the attention as the planner sees it: ``pack`` rows a position, cut into blocks."""

    offset: Tensor
    rows: int
    shared: bool
    pack: int
    block: int


def _build(problem: Problem, side: _Side, other: _Side, width: int, room: tuple[int, int], last_first: bool) -> Units:
    capacity, slots = room
    words = torch.empty(HEADER + capacity * WORDS.value + slots * problem.num_kv_heads, dtype=torch.int32, device=problem.device)
    out = Units.of(words, room)
    # On the emulator short tests are to split as well.
    least_chunk = max(1, (LEAST_CHUNK if problem.device.type == "cuda" else 64) // other.block)
    sequences = problem.num_batches + (0 if side.shared else 1)
    if problem.num_batches > SORT_FROM:
        out.arrivals.zero_()
        _sorted_units(out, problem, side, other, width, last_first)
        return out
    plan_units[(triton.cdiv(max(sequences, 1), SEQUENCES),)](
        out.units,
        out.counts,
        out.arrivals,
        side.offset,
        other.offset,
        problem.num_batches,
        sequences,
        side.rows,
        other.rows,
        width,
        capacity,
        slots,
        problem.num_kv_heads,
        least_chunk,
        TILE_SHARED=side.shared,
        OTHER_SHARED=other.shared,
        PACK=side.pack,
        BLOCK=side.block,
        OTHER_BLOCK=other.block,
        SPLIT=slots > 0,
        LAST_FIRST=last_first,
        **planner_options(sequences),
    )
    return out


def planner_options(sequences: int) -> dict:
    """Constexprs of a planner that looks at all sequences in one step where that is possible, with short code per thread."""
    scan = SCANS[0] if sequences <= SCANS[0] else SCANS[1]
    return dict(SEQUENCES=SEQUENCES, SCAN=scan, num_warps=scan // 128)


def _sorted_units(out: Units, problem: Problem, side: _Side, other: _Side, width: int, last_first: bool) -> None:
    """The list of :func:`plan_units`, unsplit, by a sort: for very many sequences."""
    begin, mine = _spans(side, problem, slack=not side.shared)
    other_begin, theirs = _spans(other, problem, slack=False, pad=not side.shared)
    tiles = -(-mine * side.pack // side.block)
    cost = -(-theirs.clamp(max=width) // other.block)
    order = torch.sort(cost, descending=True, stable=True).indices
    ends = torch.cumsum(tiles[order], 0)
    unit = torch.arange(out.capacity, device=problem.device)
    at = torch.searchsorted(ends, unit, right=True).clamp(max=len(order) - 1)
    seq = order[at]
    tile = unit - (ends[at] - tiles[seq])
    tile = tiles[seq] - 1 - tile if last_first else tile
    one = torch.ones_like(unit)
    words = [seq, tile, one, 0 * one, begin[seq], mine[seq], other_begin[seq], theirs[seq]]
    out.units.copy_(torch.stack(words, 1).flatten())
    out.counts.copy_(ends[-1:].clamp(max=out.capacity))


def _spans(side: _Side, problem: Problem, slack: bool, pad: bool = False) -> tuple[Tensor, Tensor]:
    """(first row, number of rows) of all sequences on one side, and of the slack (or nothing, ``pad``) after them."""
    batches = problem.num_batches
    if side.shared:
        begin = torch.zeros(batches, device=problem.device, dtype=torch.int64)
        length = torch.full_like(begin, side.rows)
    else:
        inside = side.offset.long().clamp(0, side.rows)
        inside = torch.cat([inside, torch.full_like(inside[:1], side.rows)]) if slack else inside
        begin, length = inside[:-1], (inside[1:] - inside[:-1]).clamp(min=0)
    if pad and begin.numel() == batches:
        begin, length = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (begin, length))
    return begin, length


def _band_width(band: Band, rows: int) -> int:
    """The most columns that a tile of ``rows`` rows can see under the band: an estimate for ordering and splitting only."""
    widths = [UNBOUNDED]
    if band.lo_start is not None and band.hi_start is not None:
        widths.append(max(0, band.hi_start - band.lo_start) + rows)
    if band.lo_end is not None and band.hi_end is not None:
        widths.append(max(0, band.hi_end - band.lo_end) + rows)
    return min(widths)
