"""From a Problem to launches: outputs allocated, strides and constants passed, tiles chosen."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants, num_sms, on_device, padded_head_dim, scale_log2
from jfa.kernels.common.ragged import BILLION, ragged_descriptor, tma_ready
from jfa.kernels.portable import config, tiles
from jfa.kernels.portable.backward import delta_kernel, dkdv_kernel, dq_kernel
from jfa.kernels.portable.config import LEAST_SIDE, Tile
from jfa.kernels.portable.forward import forward_kernel
from jfa.kernels.portable.shared_query import plan_pieces, shared_dq_kernel, shared_query_kernel, sum_dq_kernel
from jfa.kernels.portable.tiles import Units


def boxes_of(rows: int, *packed: Tensor, heads: int = 1) -> tuple:
    """TMA descriptors with boxes of ``rows`` rows of the tensors [total, H, D], or Nones where pointers have to do.

    With ``heads`` a box has that many heads' rows, ``rows`` in all.
    """
    whole = rows % heads == 0 and heads & (heads - 1) == 0
    ready = config.has_tma(packed[0].device) and all(tma_ready(x) and x.shape[0] <= BILLION.value for x in packed)
    if not (whole and ready):
        return (None,) * len(packed)
    return tuple(ragged_descriptor(x, rows // heads, padded_head_dim(x.shape[2], least=LEAST_SIDE), heads) for x in packed)


def constants(problem: Problem) -> dict:
    """The constexprs that all kernels share."""
    return dict(
        GROUP=problem.group_size,
        D=problem.head_dim,
        DV=problem.head_dim_v,
        BLOCK_D=padded_head_dim(problem.head_dim, least=LEAST_SIDE),
        BLOCK_DV=padded_head_dim(problem.head_dim_v, least=LEAST_SIDE),
        HAS_LO=problem.band.has_lo,
        HAS_HI=problem.band.has_hi,
        PRECISION="tf32x3" if problem.dtype == torch.float32 else "tf32",
    )


# ----------------------------------------------------------------------------------------------------------------- forward
def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    units: Units | None = None,
    tile: Tile | None = None,
    workers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call. The last two override :mod:`.config`, for sweeps."""
    out, lse = _new_outputs(problem, q)
    if problem.num_batches == 0 or problem.rows_out == 0:
        return out.zero_(), lse.fill_(-math.inf)
    tile = tile or config.forward_tile(problem)
    workers = config.split_workers(problem) if workers is None else workers
    with on_device(problem):
        units = units or tiles.query_units(problem, tile.keep, tile.step, workers)
        parts, block_dv = units.slots * problem.num_kv_heads, padded_head_dim(problem.head_dim_v, least=LEAST_SIDE)
        partial = torch.empty(parts * tile.keep * (block_dv + 2), dtype=torch.float32, device=q.device)
        k_box, v_box = boxes_of(tile.step, k, v)
        # A box of several heads would become an operand in registers, and triton 3.6 then gave wrong scores.
        (q_box,) = boxes_of(tile.keep, q) if problem.group_size == 1 else (None,)
        (out_box,) = boxes_of(tile.keep, out, heads=problem.group_size)
        boxes = q_box, k_box, v_box, out_box
        tensors = out, lse, units.units, units.counts, units.arrivals, partial, partial[parts * tile.keep * block_dv :]
        scalars = (
            scale_log2(problem.sm_scale),
            *band_constants(problem.band),
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *out.stride()[:2],
        )
        options = dict(
            BLOCK_M=tile.keep,
            BLOCK_N=tile.step,
            BROADCAST=problem.broadcast_q,
            HAS_SLOTS=problem.output_offset is not None,
            NEGATIVE=problem.sm_scale < 0,
            SPLIT=units.slots > 0,
            TMA=k_box is not None,
            BOXED=q_box is not None or out_box is not None,
            BOXED_Q=q_box is not None,
            BOXED_OUT=out_box is not None,
            **tile.launch,
            **constants(problem),
        )
        rows = problem.output_offset, problem.rows_q, problem.rows_out, problem.num_kv_heads
        forward_kernel[(units.capacity * problem.num_kv_heads,)](q, k, v, *boxes, *tensors, *rows, *scalars, **options)
    return out, lse


def _new_outputs(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    """Empty where the kernel writes every row; with an output_offset rows may stay uncovered, and must be 0."""
    out = torch.empty(problem.rows_out, problem.num_heads, problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.num_heads, problem.rows_out, dtype=torch.float32, device=q.device)
    if problem.output_offset is not None:
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


# ---------------------------------------------------------------------------------------------------------------- backward
def backward(problem: Problem, dout, dlse, q, k, v, out, lse, needs=(True, True, True), lists=None):
    """(dq, dk, dv); those that are not needed may be None."""
    if problem.num_batches == 0 or problem.rows_kv == 0 or problem.rows_q == 0:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dlse = None if dlse is None else dlse.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    with on_device(problem):
        if config.keeps_shared_query(problem):
            return shared_query_backward(problem, dout, dlse, q, k, v, out, lse)
        delta = torch.empty_like(lse)
        query_units, key_units = lists or (None, None)
        if problem.broadcast_q:
            dq = shared_dq(problem, dout, dlse, q, k, v, out, lse, delta)
        elif needs[0]:
            dq = dq_pass(problem, dout, dlse, q, k, v, out, lse, delta, query_units)
        else:
            dq = None
            delta_pass(problem, dout, dlse, out, delta)
        if not any(needs[1:]):
            return dq, None, None
        dk, dv = dkdv_pass(problem, dout, q, k, v, lse, delta, key_units)
    return dq, dk, dv


def delta_pass(problem: Problem, dout, dlse, out, delta) -> None:
    """delta of every output row."""
    block = 64
    delta_kernel[(triton.cdiv(problem.rows_out, block) * problem.num_heads,)](
        out, dout, dlse, delta, problem.rows_out, problem.num_heads, *out.stride()[:2], *dout.stride(),
        DV=problem.head_dim_v, BLOCK_DV=padded_head_dim(problem.head_dim_v, least=LEAST_SIDE), BLOCK_M=block,
        HAS_DLSE=dlse is not None,
    )  # fmt: skip


def dq_pass(problem: Problem, dout, dlse, q, k, v, out, lse, delta, units=None, tile: Tile | None = None) -> Tensor:
    """dQ by a pass over query tiles; delta on the way."""
    tile = tile or config.dq_tile(problem)
    units = units or tiles.query_units(problem, tile.keep, tile.step)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    boxes = boxes_of(tile.step, k, v)
    dq_kernel[(units.capacity * problem.num_kv_heads,)](
        q, k, v, *boxes, out, dout, lse, dlse, delta, dq, units.units, units.counts,
        problem.rows_q, problem.num_kv_heads,
        scale_log2(problem.sm_scale), problem.sm_scale, *band_constants(problem.band), *q.stride(), *k.stride(), *v.stride(),
        *out.stride()[:2], *dout.stride(), BLOCK_M=tile.keep, BLOCK_N=tile.step, HAS_DLSE=dlse is not None,
        TMA=boxes[0] is not None, **tile.launch, **constants(problem),
    )  # fmt: skip
    return dq


def dkdv_pass(problem: Problem, dout, q, k, v, lse, delta, units=None, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """(dK, dV) by a pass over key tiles."""
    tile = tile or config.dkdv_tile(problem)
    units = units or tiles.key_units(problem, tile.keep, tile.step)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    boxes = boxes_of(tile.step, q, dout, heads=problem.group_size)
    dkdv_kernel[(units.capacity * problem.num_kv_heads,)](
        q, k, v, *boxes, dout, lse, delta, dk, dv, units.units, units.counts,
        problem.output_offset, problem.num_batches, problem.rows_q, problem.rows_out, problem.num_kv_heads,
        scale_log2(problem.sm_scale), problem.sm_scale, *band_constants(problem.band),
        *q.stride(), *k.stride(), *v.stride(), *dout.stride(), BLOCK_M=tile.step, BLOCK_N=tile.keep,
        BROADCAST=problem.broadcast_q, HAS_SLOTS=problem.output_offset is not None,
        TMA=boxes[0] is not None, **tile.launch, **constants(problem),
    )  # fmt: skip
    return dk, dv


# ------------------------------------------------------------------------------------------------------------ shared query
def shared_query_backward(
    problem: Problem, dout, dlse, q, k, v, out, lse, tile: Tile | None = None, workers: int = 0, piece: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a short shared query: Q and dQ stay on chip."""
    tile = tile or config.shared_tile(problem)
    workers = workers or config.shared_workers(problem)
    piece = piece or config.piece(problem)
    capacity = triton.cdiv(problem.rows_kv, piece) + problem.num_batches + 1
    words = torch.empty(tiles.HEADER + 2 * capacity, dtype=torch.int32, device=q.device)
    counts, pieces = words[:1], words[tiles.HEADER :]
    plan_pieces[(triton.cdiv(problem.num_batches + 1, tiles.SEQUENCES),)](
        pieces, counts, problem.key_offset, problem.num_batches, problem.rows_kv, capacity, piece,
        **tiles.planner_options(problem.num_batches + 1),
    )  # fmt: skip
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    partial = _new_partials(problem, workers, tile.keep)
    boxes = boxes_of(tile.step, k, v)
    grad_boxes = boxes_of(tile.step, dk, dv)
    shared_query_kernel[(workers * problem.num_kv_heads,)](
        q, k, v, *boxes, *grad_boxes, out, dout, lse, dlse, dk, dv, partial, pieces, counts,
        problem.key_offset, problem.output_offset, problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out,
        problem.num_kv_heads, workers, piece, scale_log2(problem.sm_scale), problem.sm_scale, *band_constants(problem.band),
        *q.stride(), *k.stride(), *v.stride(), *out.stride()[:2], *dout.stride(),
        BLOCK_R=tile.keep, BLOCK_N=tile.step, KEYS_FIRST=tile.keep < 64,
        HAS_SLOTS=problem.output_offset is not None,
        HAS_DLSE=dlse is not None, TMA=boxes[0] is not None, TMA_STORE=grad_boxes[0] is not None,
        **tile.launch, **constants(problem),
    )  # fmt: skip
    return _sum_partials(problem, partial, q, tile.keep, workers), dk, dv


def shared_dq(problem: Problem, dout, dlse, q, k, v, out, lse, delta, tile: Tile | None = None) -> Tensor:
    """dQ of a long shared query, tile by tile, each summed over the sequences on chip; delta on the way."""
    tile = tile or config.dq_tile(problem)
    count = triton.cdiv(config.packed_rows(problem), tile.keep)
    workers = min(problem.num_batches, max(1, num_sms(q.device, config.EMULATED_SMS) * 2 // (count * problem.num_kv_heads)))
    partial = _new_partials(problem, workers, count * tile.keep)
    boxes = boxes_of(tile.step, k, v)
    shared_dq_kernel[(workers * count * problem.num_kv_heads,)](
        q, k, v, *boxes, out, dout, lse, dlse, delta, partial,
        problem.key_offset, problem.output_offset, problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out,
        problem.num_kv_heads, workers, count, scale_log2(problem.sm_scale), *band_constants(problem.band),
        *q.stride(), *k.stride(), *v.stride(), *out.stride()[:2], *dout.stride(),
        BLOCK_M=tile.keep, BLOCK_N=tile.step, HAS_SLOTS=problem.output_offset is not None, HAS_DLSE=dlse is not None,
        TMA=boxes[0] is not None, **tile.launch, **constants(problem),
    )  # fmt: skip
    return _sum_partials(problem, partial, q, count * tile.keep, workers)


def _new_partials(problem: Problem, workers: int, rows: int) -> Tensor:
    return torch.empty(
        workers * problem.num_kv_heads * rows * padded_head_dim(problem.head_dim, least=LEAST_SIDE),
        dtype=torch.float32,
        device=problem.device,
    )


def _sum_partials(problem: Problem, partial: Tensor, q: Tensor, padded_rows: int, workers: int) -> Tensor:
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = 256
    block_d = padded_head_dim(problem.head_dim, least=LEAST_SIDE)
    sum_dq_kernel[(triton.cdiv(padded_rows * block_d, block) * problem.num_kv_heads,)](
        partial, dq, problem.rows_q, padded_rows, problem.num_kv_heads, workers, problem.sm_scale,
        GROUP=problem.group_size, D=problem.head_dim, BLOCK_D=block_d, BLOCK=block, STEP=16,
    )  # fmt: skip
    return dq
