"""Tile records: what a kernel must know about a tile, gathered into one row of nine numbers.

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
from jfa.kernels.common.padded_rows import clean_offsets, output_slots, padded_begins
from jfa.schedule import Tiles

RECORD = tl.constexpr(9)  # numbers of a record: row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, pad_begin
PAD = 128  # queries: the backward's block, in which it pads every sequence (jfa.kernels.common.padded_rows)


def tile_records(problem: Problem, tiles: Tiles) -> Tensor:
    """[capacity, 9] int32: (row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, pad_begin) of each tile.

    ``row`` is the tile's first row inside its sequence (of queries in a forward list, of keys in a backward one). Offsets that
    lie are clamped into the tensors; a sequence whose output slot is not wholly inside the output has no queries.
    """
    seq = tiles.seq.clamp(min=0).long()
    if not seq.numel():
        return tiles.row.new_zeros(0, 9)
    keys = clean_offsets(problem.key_offset, problem.rows_kv)
    k_begin, k_len = keys[:-1], keys[1:] - keys[:-1]
    if problem.broadcast_q:
        out_begin, q_len = output_slots(problem)
        q_begin = torch.zeros_like(q_len)
    else:
        queries = clean_offsets(problem.query_offset, problem.rows_q)
        q_begin, q_len = queries[:-1], queries[1:] - queries[:-1]
        out_begin = q_begin
    lo, hi = problem.band.bounds(q_len, k_len)
    columns = (q_begin, q_len, k_begin, k_len, out_begin, lo, hi, padded_begins(problem, PAD))
    by_sequence = torch.stack([c.to(torch.int32) for c in columns], 1)
    return torch.cat([tiles.row[:, None], by_sequence[seq]], 1)


@triton.jit
def read_record(records_ptr, tile):
    """The record of a tile: (row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, pad_begin)."""
    at = records_ptr + tile * RECORD
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3),
        tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8),
    )  # fmt: skip


@triton.jit
def read_shape(records_ptr, tile, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """What decides how long a tile is: (row, q_len, k_len, lo, hi); an open side of the band is not read, and 0."""
    at = records_ptr + tile * RECORD
    lo = 0
    hi = 0
    if HAS_LO:
        lo = tl.load(at + 6)
    if HAS_HI:
        hi = tl.load(at + 7)
    return tl.load(at), tl.load(at + 2), tl.load(at + 4), lo, hi


@triton.jit
def read_out_begin(records_ptr, tile):
    """The first output row of a tile's sequence."""
    return tl.load(records_ptr + tile * RECORD + 5)
