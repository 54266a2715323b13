"""Before and after the backward: per-row constants in padded arrays, and fp32 gradients to the input's dtype. Plain Triton.

The backward's loops read log-sum-exp and delta, and add to dQ, in whole blocks of 64 queries. In a packed array such a block would
reach into the next sequence; so these arrays give every sequence whole blocks (jfa.kernels.hopper.tiles.padded_rows). Rows that
do not exist get lse = +inf, which makes their probabilities 0. Both kernels walk the forward's list of tiles.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jfa.kernels.base import Problem
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.softmax import LOG2_E as _LOG2_E
from jfa.kernels.hopper.tiles import PAD, TileList, load_tile, padded, padded_rows

LOG2_E = tl.constexpr(_LOG2_E)


@dataclass(frozen=True)
class PaddedRows:
    """Constants of every query row, padded: lse2, delta [H, count] fp32."""

    lse2: torch.Tensor
    delta: torch.Tensor
    count: int


@aggregate
class RowConstants:
    """The same inside a kernel: pointers to lse2 and delta [H, padded_rows]."""

    lse2: tl.tensor
    delta: tl.tensor
    padded_rows: tl.tensor

    @triton.jit
    def of_sequence(self, tile, head):
        """Return (lse2, delta), pointers to the constants of the first query of a tile's sequence."""
        begin = self.padded_rows.to(tl.int64) * head + tile.pad_begin
        return self.lse2 + begin, self.delta + begin


def prepare_rows(problem: Problem, tiles: TileList | None, block: int, out, dout, lse, dlse, beside: bool = False) -> PaddedRows:
    """lse in base 2 and delta = rowsum(out * dout) - dlse, padded. ``dout``: any strides.

    ``tiles``: of ``block`` queries. None with shared queries: where those lie can be told without a list. ``beside``: the
    launch before this one was the list kernel, whose results are not used here: run beside it, and end after it.
    """
    count, heads = padded_rows(problem), problem.num_heads
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    lse2, delta = torch.empty(2, heads, count, dtype=torch.float32, device=out.device)
    if tiles is None:
        parts = padded(problem.rows_q) // int(PAD)
        programs, where, counts = problem.num_batches * parts, problem.output_offset, lse
    else:
        parts = block // int(PAD)
        programs, where, counts = tiles.records.shape[0] * parts, tiles.records, tiles.counts
    variant = _prepare_variant(
        problem.head_dim_v, dlse is not None, tiles is None, tiles is None and where is not None, beside, parts
    )
    variant.launch(
        problem.device, (programs, heads),
        out, dout, lse, lse if dlse is None else dlse.contiguous(), lse if where is None else where, counts, lse2, delta, heads,
        problem.rows_out, count, problem.rows_q if problem.broadcast_q else 1, dout.stride(0), dout.stride(1),
    )
    return PaddedRows(lse2, delta, count)


def finish_dq(problem: Problem, tiles: TileList, block: int, accumulated: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dq [rows_q, H, D] from its sums [H, padded, D_BLOCK] fp32: unpadded, scaled, in ``dtype``."""
    if problem.broadcast_q:
        dq = accumulated[:, : problem.rows_q, : problem.head_dim].permute(1, 0, 2) * problem.sm_scale
        return dq.to(dtype).contiguous()
    dq = torch.empty(problem.rows_q, problem.num_heads, problem.head_dim, dtype=dtype, device=accumulated.device)
    parts = block // PAD.value
    _finish_variant(problem.head_dim, accumulated.shape[2], parts).launch(
        problem.device, (tiles.records.shape[0] * parts, problem.num_heads),
        accumulated, dq, tiles.records, tiles.counts, problem.num_heads, accumulated.shape[1], problem.sm_scale,
    )
    return dq


@cache
def _prepare_variant(dim: int, has_dlse: bool, shared: bool, slots: bool, beside: bool, parts: int) -> Variant:
    return Variant(
        prepare_kernel, DV=dim, DV_BLOCK=triton.next_power_of_2(dim), HAS_DLSE=has_dlse, SHARED=shared, SLOTS=slots, BESIDE=beside,
        PARTS=parts, ROWS=PAD.value, launch_pdl=True,
    )


@cache
def _finish_variant(dim: int, columns: int, parts: int) -> Variant:
    return Variant(finish_kernel, D=dim, D_BLOCK=columns, PARTS=parts, ROWS=PAD.value)


@triton.jit
def shared_query_tile(output_offset, batch, rows_q, rows_out, PAD_ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """(len_q, out_begin, pad_begin) of a batch with shared queries, as jfa.kernels.hopper.tiles.segment has them."""
    len_q = rows_q
    out_begin = batch * rows_q
    if SLOTS:
        out_begin = tl.load(output_offset + batch)
        len_q = tl.where((out_begin >= 0) & (out_begin <= rows_out - rows_q), len_q, 0)
        out_begin = tl.where(len_q > 0, out_begin, 0)
    return len_q, out_begin, batch * PAD_ROWS


@triton.jit(do_not_specialize=["heads", "rows_out", "padded_rows", "least_rows"])
def prepare_kernel(out, dout, lse, dlse, where, counts, lse2, delta, heads, rows_out, padded_rows, least_rows,
                   stride_row, stride_head,
                   DV: tl.constexpr, DV_BLOCK: tl.constexpr, HAS_DLSE: tl.constexpr, SHARED: tl.constexpr, SLOTS: tl.constexpr,
                   BESIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """One program ROWS queries of a tile of PARTS * ROWS, and a head: lse2 = lse * log2(e), delta = rowsum(out * dout) - dlse.

    out, dout [rows_out, H, DV] (dout with the strides given, out contiguous); lse, dlse [H, rows_out]; lse2, delta
    [H, padded_rows]. Padding is written for ``least_rows`` even where a sequence has fewer (Lq with shared queries, else 1).
    where, counts: the list of tiles; SHARED: a batch is a tile, and where is the output's offsets, if there are such (SLOTS).
    """
    gdc_launch_dependents()
    if not BESIDE:
        gdc_wait()
    tile = tl.program_id(0) // PARTS
    head = tl.program_id(1).to(tl.int64)
    if SHARED:
        tiles = tile + 1
    else:
        tiles = tl.load(counts + 1)
    if tile < tiles:
        if SHARED:
            row0 = 0
            len_q, out_begin, pad_begin = shared_query_tile(where, tile, least_rows, rows_out, PARTS * ROWS, SLOTS)
        else:
            q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = load_tile(where, tile)
        rows = row0 + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, DV_BLOCK)
        valid = rows < len_q
        inside = valid[:, None] & (columns < DV)[None, :]
        row = (out_begin + rows).to(tl.int64)
        o = tl.load(out + (row * heads + head)[:, None] * DV + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        do = tl.load(dout + (row * stride_row + head * stride_head)[:, None] + columns[None, :], mask=inside, other=0.0)
        d = tl.sum(o * do.to(tl.float32), 1)
        if HAS_DLSE:
            d -= tl.load(dlse + head * rows_out + row, mask=valid, other=0.0)
        natural = tl.load(lse + head * rows_out + row, mask=valid, other=float("-inf"))
        to = head * padded_rows + pad_begin + rows
        padding = rows < tl.cdiv(tl.maximum(len_q, least_rows), ROWS) * ROWS
        tl.store(lse2 + to, tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E), mask=padding)
        tl.store(delta + to, tl.where(natural == float("-inf"), 0.0, d), mask=padding)
    if BESIDE:  # the next kernel waits for this one only, and needs the list
        gdc_wait()


@triton.jit(do_not_specialize=["heads", "padded_rows"])
def finish_kernel(accumulated, dq, records, counts, heads, padded_rows, scale,
                  D: tl.constexpr, D_BLOCK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """One program ROWS queries of a tile and a head: dq [rows_q, H, D] = accumulated [H, padded_rows, D_BLOCK] * scale."""
    tile = tl.program_id(0) // PARTS
    head = tl.program_id(1).to(tl.int64)
    if tile < tl.load(counts + 1):
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = load_tile(records, tile)
        rows = row0 + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, D_BLOCK)
        inside = (rows < len_q)[:, None] & (columns < D)[None, :]
        x = tl.load(accumulated + ((head * padded_rows + pad_begin + rows) * D_BLOCK)[:, None] + columns[None, :], mask=inside)
        row = (q_begin + rows).to(tl.int64)
        tl.store(dq + (row * heads + head)[:, None] * D + columns[None, :], (x * scale).to(dq.dtype.element_ty), mask=inside)
