"""Lists of tiles for the persistent Hopper kernels: made on the device without a synchronisation, read by every role.

A list is one int32 tensor [capacity, 9], a record a tile, longest tile first, and how many of the records are valid. The order and
the count come from :mod:`jfa.schedule.tiles`; this module adds where the sequences lie, so that a role reads one record and
needs no offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jfa.kernels.base import Problem
from jfa.schedule import tiles as schedule

FIELDS = tl.constexpr(9)  # of a record; see load_tile
PAD = 64  # rows: the unit in which the backward pads every sequence (see padded_begins)


@dataclass(frozen=True)
class TileList:
    """``records`` [capacity, 9] int32 and ``counts`` [2] int32 = (tiles that have work, all valid tiles)."""

    records: torch.Tensor
    counts: torch.Tensor


@triton.jit
def load_tile(records, index):
    """(q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin).

    row0 is the tile's first row inside its sequence; begins are rows of the tensors; i + lo <= j <= i + hi is the band; pad_begin
    is where the sequence's queries begin in the backward's padded arrays.
    """
    at = records + index * FIELDS
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
            tl.load(at + 6), tl.load(at + 7), tl.load(at + 8))


def query_tiles(problem: Problem, block_m: int, block_n: int) -> TileList:
    """Tiles of ``block_m`` queries of every sequence, for the forward: the most key blocks first.

    Tiles without keys are in the list too (the kernel writes 0 and -inf there), and so are rows that no sequence covers.
    """
    keys = _clean(problem.key_offset, problem.rows_kv)
    if problem.broadcast_q:
        queries = None
    else:
        queries, keys = _with_margins(_clean(problem.query_offset, problem.rows_q), keys, problem.rows_q)
    tiles = schedule.query_tiles(queries, keys, block_m, block_n, total_q=problem.rows_q, band=problem.band,
                                 broadcast_q=problem.broadcast_q)
    return _records(problem, tiles, queries, keys)


def key_tiles(problem: Problem, block_n: int, block_m: int) -> TileList:
    """Tiles of ``block_n`` keys of every sequence, for the backward: the most query blocks first. row0 is a key row here.

    Tiles without queries are in the list too (the kernel writes 0 there), and so are rows that no sequence covers.
    """
    keys = _clean(problem.key_offset, problem.rows_kv)
    queries = None
    if problem.broadcast_q:
        keys = torch.cat([keys.new_zeros(1), keys, keys.new_full((1,), problem.rows_kv)])
    else:
        keys, queries = _with_margins(keys, _clean(problem.query_offset, problem.rows_q), problem.rows_kv)
    tiles = schedule.key_tiles(queries, keys, block_n, block_m, total_q=problem.rows_q, total_kv=problem.rows_kv,
                               band=problem.band, broadcast_q=problem.broadcast_q)
    return _records(problem, tiles, queries, keys, margins=1)


def _clean(offset: torch.Tensor, rows: int) -> torch.Tensor:
    """Offsets as they must be: inside [0, rows] and never falling, so that no lie leads outside a tensor."""
    return offset.clamp(0, rows).cummax(0).values


def _with_margins(mine: torch.Tensor, other: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a pseudo-sequence before and after: the rows of ``mine`` that no sequence covers, with nothing of ``other``."""
    mine = torch.cat([mine.new_zeros(1), mine, mine.new_full((1,), rows)])
    return mine, torch.cat([other[:1], other, other[-1:]])


def _records(problem: Problem, tiles: schedule.Tiles, queries: torch.Tensor | None, keys: torch.Tensor,
             margins: int = 0) -> TileList:
    """Gathers a record for every tile. ``margins``: pseudo-sequences before the first real one when queries are broadcast."""
    seq = tiles.seq.clamp(min=0).long()
    kv_begin, len_kv = keys[seq], keys[seq + 1] - keys[seq]
    if queries is None:
        batch = seq - margins
        out_begin, len_q = _slots(problem)
        real = (batch >= 0) & (batch < problem.num_batches)
        batch = batch.clamp(0, problem.num_batches - 1)
        out_begin, len_q = out_begin[batch], torch.where(real, len_q[batch], 0)
        q_begin = torch.zeros_like(len_q)
        pad_begin = batch * padded(problem.rows_q)
    else:
        q_begin, len_q = queries[seq], queries[seq + 1] - queries[seq]
        out_begin = q_begin
        pad_begin = padded_begins(q_begin, seq)
    lo, hi = problem.band.bounds(len_q, len_kv)
    fields = [q_begin, len_q, tiles.row, out_begin, kv_begin, len_kv, lo, hi, pad_begin]
    return TileList(torch.stack([f.to(torch.int32) for f in fields], 1).contiguous(), tiles.counts)


def _slots(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(first output row, queries) of every batch with broadcast_q; a slot that is not inside the output has no queries."""
    batch = torch.arange(problem.num_batches, device=problem.device, dtype=torch.int32)
    if problem.output_offset is None:
        return batch * problem.rows_q, torch.full_like(batch, problem.rows_q)
    begin = problem.output_offset[:-1]
    inside = (begin >= 0) & (begin <= problem.rows_out - problem.rows_q)
    return torch.where(inside, begin, 0), torch.where(inside, problem.rows_q, 0).to(torch.int32)


# ------------------------------------------------------------------------------------ the backward's padded arrays of queries
def padded(rows: int) -> int:
    """Rows rounded up to whole blocks of PAD."""
    return -(-rows // PAD) * PAD


def padded_begins(begin: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """Where segment number ``segment``, whose first row is ``begin``, starts when every segment begins a new block of PAD rows.

    Needs no prefix sum: a segment's predecessors grow by less than PAD rows each.
    """
    return (begin + segment * PAD) // PAD * PAD


def padded_rows(problem: Problem) -> int:
    """Rows of an array that holds every sequence's output rows padded: an upper bound from shapes."""
    if problem.broadcast_q:
        return problem.num_batches * padded(problem.rows_q)
    return padded(problem.rows_q) + (problem.num_batches + 2) * PAD


def padded_blocks(problem: Problem) -> torch.Tensor:
    """[padded_rows / PAD, 2] int32: of every padded block its first output row and how many of its rows exist (0: none)."""
    start = torch.arange(padded_rows(problem) // PAD, device=problem.device) * PAD
    if problem.broadcast_q:
        out_begin, len_q = _slots(problem)
        segment = start // padded(problem.rows_q)
        begin, inside = out_begin[segment], start % padded(problem.rows_q)
    else:
        offset = _clean(problem.query_offset, problem.rows_q)
        offset = torch.cat([offset.new_zeros(1), offset, offset.new_full((1,), problem.rows_q)])
        pads = padded_begins(offset[:-1], torch.arange(offset.numel() - 1, device=problem.device))
        segment = torch.searchsorted(pads, start, right=True) - 1
        len_q = offset[1:] - offset[:-1]
        begin, inside = offset[segment], start - pads[segment]
    exist = (len_q[segment] - inside).clamp(0, PAD)
    return torch.stack([(begin + inside).to(torch.int32), exist.to(torch.int32)], 1).contiguous()
