"""Tile records: what a kernel must know about a tile, gathered into one row of eight numbers.

A role reads one row a tile, all of it at once, in place of walking from a tile to its sequence to its offsets; and the kernel
carries one pointer where it would carry six, which matters to a softmax group whose registers are full of scores.
Built by torch operations on the tensors' device, without reading anything back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.schedule import Tiles

RECORD = tl.constexpr(8)  # numbers of a record: row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi


def tile_records(problem: Problem, tiles: Tiles) -> Tensor:
    """[capacity, 8] int32: (row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi) of each tile.

    ``row`` is the tile's first row inside its sequence (of queries in a forward list, of keys in a backward one). Offsets that
    lie are clamped into the tensors; a tile whose output slot is not wholly inside the output has out_begin -1.
    """
    seq = tiles.seq.clamp(min=0).long()
    k_begin, k_len = _spans(problem.key_offset, problem.rows_kv)
    if problem.broadcast_q:
        q_begin, q_len = torch.zeros_like(k_begin), torch.full_like(k_begin, problem.rows_q)
    else:
        q_begin, q_len = _spans(problem.query_offset, problem.rows_q)
    lo, hi = problem.band.bounds(q_len, k_len)
    columns = (q_begin, q_len, k_begin, k_len, _output_begin(problem, q_begin, q_len), lo, hi)
    by_sequence = torch.stack([c.to(torch.int32).expand_as(q_len) for c in columns], 1)
    return torch.cat([tiles.row[:, None], by_sequence[seq]], 1) if seq.numel() else tiles.row.new_zeros(0, 8)


def _spans(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(begin, length) of each sequence, inside a tensor of ``rows`` rows."""
    inside = offsets.clamp(0, rows)
    begin = inside[:-1]
    return begin, (inside[1:] - begin).clamp(min=0)


def _output_begin(problem: Problem, q_begin: Tensor, q_len: Tensor) -> Tensor:
    """First output row of each sequence; -1 where its slot is not wholly inside the output."""
    if not problem.broadcast_q:
        return q_begin
    if problem.output_offset is None:
        return torch.arange(q_len.numel(), device=q_len.device, dtype=torch.int32) * problem.rows_q
    begin = problem.output_offset[:-1]
    return torch.where((begin >= 0) & (begin <= problem.rows_out - q_len), begin, -1)


@triton.jit
def read_record(records_ptr, tile):
    """The record of a tile: (row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi)."""
    at = records_ptr + tile * RECORD
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3),
        tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip
