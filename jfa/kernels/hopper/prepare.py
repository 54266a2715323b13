"""Before and after the backward, in plain Triton: per-row constants in padded arrays, and dQ from fp32 to its dtype.

The backward's loops read log-sum-exp and delta, and add to dQ, in whole blocks of 64 queries. In a packed array such a
block would reach into the next sequence, so these arrays give every sequence whole blocks
(jfa.kernels.hopper.tiles.padded_rows). Rows that do not exist get lse = +inf, which makes their probabilities 0. Both
kernels walk the forward's list of tiles.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jfa.kernels.base import Problem
from jfa.kernels.common.host import power_of_two
from jfa.kernels.common.launcher import Variant, by_torch
from jfa.kernels.common.nouns import load_tile
from jfa.kernels.common.softmax import LOWERED, lse_to_subtract
from jfa.kernels.hopper.tiles import PAD, TileList, padded, padded_rows

# The resident form starts its products with -lse, so each of them rounds at the LSE's size: eight times the margin.
LOWERED_RESIDENT = tl.constexpr(8 * LOWERED.value)


@dataclass(frozen=True)
class PaddedRows:
    """Constants of every query row, padded: lse2, delta [H, count] fp32."""

    lse2: torch.Tensor
    delta: torch.Tensor
    count: int


def prepare_rows(
    problem: Problem, tiles: TileList | None, block: int, out, dout, lse, dlse, beside: bool = False
) -> PaddedRows:
    """Return lse in base 2, as P's recomputation subtracts it, and delta = rowsum(out * dout) - dlse, padded.

    ``dout`` may have any strides.

    Args:
        tiles: of ``block`` queries, or None for shared queries, which need no list.
        beside: the launch before this one was the list kernel, whose results are not used here. Run at the same time, and end
            after it.
    """
    count, heads = padded_rows(problem), problem.num_heads
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dlse = lse if dlse is None else dlse.contiguous()
    has_dlse, slots = dlse is not lse, tiles is None and problem.output_offset is not None
    lse2, delta = torch.empty(2, heads, count, dtype=torch.float32, device=out.device)
    if tiles is None:
        parts = padded(problem.rows_q) // PAD.value
        programs, where, counts = problem.num_batches * parts, problem.output_offset if slots else lse, lse
    else:
        parts = block // PAD.value
        programs, where, counts = tiles.records.shape[0] * parts, tiles.records, tiles.counts
    variant = _prepare_variant(problem.head_dim_v, has_dlse, tiles is None, slots, beside, parts)
    least = problem.rows_q if problem.broadcast_q else 1
    pointers = out, dout, lse, dlse, where, counts, lse2, delta
    variant.launch(
        problem.device, (programs, heads), *pointers, heads, problem.rows_out, count, least, *dout.stride()[:2]
    )
    return PaddedRows(lse2, delta, count)


def finish_dq(problem: Problem, tiles: TileList, block: int, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dq [rows_q, H, D] in ``dtype``, unpadded and scaled, from its sums [H, padded, D_BLOCK] fp32."""
    if problem.broadcast_q:
        dq = torch.empty(problem.rows_q, problem.num_heads, problem.head_dim, dtype=dtype, device=sums.device)
        by_torch(_scaled, dq, sums, problem.sm_scale)
        return dq
    heads, rows, columns = sums.shape
    dq = torch.empty(problem.rows_q, heads, problem.head_dim, dtype=dtype, device=sums.device)
    parts = block // PAD.value
    grid = (tiles.records.shape[0] * parts, heads)
    variant = _finish_variant(problem.head_dim, columns, parts)
    variant.launch(problem.device, grid, sums, dq, tiles.records, tiles.counts, heads, rows, problem.sm_scale)
    return dq


def _scaled(dq: torch.Tensor, sums: torch.Tensor, sm_scale: float) -> None:
    """Write to ``dq`` [Lq, H, D] the sums [H, at least Lq, at least D] times ``sm_scale``."""
    rows, _, dim = dq.shape
    dq.copy_(sums[:, :rows, :dim].permute(1, 0, 2) * sm_scale)


@cache
def _prepare_variant(dim: int, has_dlse: bool, resident: bool, slots: bool, beside: bool, parts: int) -> Variant:
    shape = dict(DV=dim, DV_BLOCK=triton.next_power_of_2(dim), PARTS=parts, ROWS=PAD.value)
    choices = dict(HAS_DLSE=has_dlse, RESIDENT=resident, SLOTS=slots, BESIDE=beside)
    return Variant(prepare_kernel, **shape, **choices, launch_pdl=True)


@cache
def _finish_variant(dim: int, columns: int, parts: int) -> Variant:
    return Variant(finish_kernel, D=dim, D_BLOCK=power_of_two(columns), WIDTH=columns, PARTS=parts, ROWS=PAD.value)


@triton.jit
def rows_of_tile(where, index, rows_q, rows_out, PAD_ROWS: tl.constexpr, RESIDENT: tl.constexpr, SLOTS: tl.constexpr):
    """Return (the tile's first row, first output row, rows that exist, first padded row) of the sequence.

    RESIDENT: a batch is a tile, with what jfa.kernels.common.sequences.Sequences would say of it.
    """
    if RESIDENT:
        exist = rows_q
        begin = index * rows_q
        if SLOTS:
            begin = tl.load(where + index)
            exist = tl.where((begin >= 0) & (begin <= rows_out - rows_q), exist, 0)
            begin = tl.cast(tl.where(exist > 0, begin, 0), tl.int32)
        return 0, begin, exist, index * PAD_ROWS
    else:
        tile = load_tile(where, index, False, False)
        return tile.row, tile.out.begin, tile.out.length, tile.pad_begin


@triton.jit(do_not_specialize=["heads", "rows_out", "padded_rows", "least_rows"])
def prepare_kernel(
    out,
    dout,
    lse,
    dlse,
    where,
    counts,
    lse2,
    delta,
    heads,
    rows_out,
    padded_rows,
    least_rows,
    stride_row,
    stride_head,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    RESIDENT: tl.constexpr,
    SLOTS: tl.constexpr,
    BESIDE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write lse2 = lse * log2(e) and delta = rowsum(out * dout) - dlse; a program per head and ROWS queries of a tile.

    A tile has PARTS * ROWS queries. out, dout [rows_out, H, DV] (dout with the strides given, out contiguous); lse,
    dlse [H, rows_out]; lse2, delta [H, padded_rows]. Padding is written for ``least_rows`` even where a sequence has
    fewer (Lq with shared queries, else 1). where, counts: the list of tiles; RESIDENT: a batch is a tile, and where is
    the output's offsets, if there are such (SLOTS).
    """
    gdc_launch_dependents()
    if not BESIDE:
        gdc_wait()
    index = tl.program_id(0) // PARTS
    head = tl.program_id(1).to(tl.int64)
    tiles = index + 1 if RESIDENT else tl.load(counts + 1)
    if index < tiles:
        first, out_begin, exist, pad_begin = rows_of_tile(
            where, index, least_rows, rows_out, PARTS * ROWS, RESIDENT, SLOTS
        )
        rows = first + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, DV_BLOCK)
        valid = rows < exist
        inside = valid[:, None] & (columns < DV)[None, :]
        row = (out_begin + rows).to(tl.int64)
        o = tl.load(out + (row * heads + head)[:, None] * DV + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        do = tl.load(dout + (row * stride_row + head * stride_head)[:, None] + columns[None, :], mask=inside, other=0.0)
        d = tl.sum(o * do.to(tl.float32), 1)
        if HAS_DLSE:
            d -= tl.load(dlse + head * rows_out + row, mask=valid, other=0.0)
        natural = tl.load(lse + head * rows_out + row, mask=valid, other=float("-inf"))
        to = head * padded_rows + pad_begin + rows
        padding = rows < tl.cdiv(tl.maximum(exist, least_rows), ROWS) * ROWS
        tl.store(lse2 + to, lse_to_subtract(natural, LOWERED_RESIDENT if RESIDENT else LOWERED), mask=padding)
        tl.store(delta + to, tl.where(natural == float("-inf"), 0.0, d), mask=padding)
    if BESIDE:  # the next kernel waits for this one only, and needs the list
        gdc_wait()


@triton.jit(do_not_specialize=["heads", "padded_rows"])
def finish_kernel(
    sums,
    dq,
    records,
    counts,
    heads,
    padded_rows,
    scale,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write dq [rows_q, H, D] = scale * sums [H, padded_rows, WIDTH]; a program per head and ROWS rows."""
    index = tl.program_id(0) // PARTS
    head = tl.program_id(1).to(tl.int64)
    if index < tl.load(counts + 1):
        tile = load_tile(records, index, False, False)
        rows = tile.row + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, D_BLOCK)
        inside = (rows < tile.q.length)[:, None] & (columns < D)[None, :]
        begin = head * padded_rows + tile.pad_begin
        x = tl.load(sums + ((begin + rows) * WIDTH)[:, None] + columns[None, :], mask=inside)
        row = (tile.q.begin + rows).to(tl.int64)
        to = dq + (row * heads + head)[:, None] * D + columns[None, :]
        tl.store(to, (x * scale).to(dq.dtype.element_ty), mask=inside)
