"""Lists of tiles for the persistent Hopper kernels: made on the device without a synchronisation, read by every role.

A list is one int32 tensor [capacity, 8], a record a tile, longest tile first, and how many of the records are valid. The order and
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

FIELDS = tl.constexpr(8)  # of a record: q_begin, len_q, row0 of the tile, out_begin, kv_begin, len_kv, lo, hi


@dataclass(frozen=True)
class TileList:
    """``records`` [capacity, 8] int32 and ``counts`` [2] int32 = (tiles that have work, all valid tiles)."""

    records: torch.Tensor
    counts: torch.Tensor


@triton.jit
def load_tile(records, index):
    """The eight numbers of a tile: (q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi)."""
    at = records + index * FIELDS
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3),
            tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7))


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
        batch = (seq - margins).clamp(0, problem.num_batches - 1)
        real = (seq >= margins) & (seq - margins < problem.num_batches)
        len_q = torch.where(real, problem.rows_q, 0).to(torch.int32)
        q_begin = torch.zeros_like(len_q)
        out_begin = (batch * problem.rows_q).to(torch.int32)
        if problem.output_offset is not None:
            out_begin = problem.output_offset[batch]
            inside = (out_begin >= 0) & (out_begin <= problem.rows_out - problem.rows_q)
            len_q = torch.where(inside, len_q, 0)  # a slot that is not inside the output is neither written nor read
            out_begin = torch.where(inside, out_begin, 0)
    else:
        q_begin, len_q = queries[seq], queries[seq + 1] - queries[seq]
        out_begin = q_begin
    lo, hi = problem.band.bounds(len_q, len_kv)
    fields = [q_begin, len_q, tiles.row, out_begin, kv_begin, len_kv, lo, hi]
    return TileList(torch.stack([f.to(torch.int32) for f in fields], 1).contiguous(), tiles.counts)
