"""Launch the kernels for a Problem: allocate outputs, build lists, choose tiles."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants, cdiv, num_sms, on_device, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.planner import Plan, plan_pass, plan_tiles
from jfa.kernels.common.ragged import BILLION, ragged_descriptor, tma_ready
from jfa.kernels.portable import config
from jfa.kernels.portable.backward import delta_kernel, dkdv_kernel, dq_kernel
from jfa.kernels.portable.config import LEAST_SIDE, Config, Tile
from jfa.kernels.portable.forward import forward_kernel
from jfa.kernels.portable.resident import SUM_BLOCK, resident_kernel, shared_dq_kernel, sum_dq_kernel

ALL = forward_kernel, dq_kernel, dkdv_kernel, delta_kernel, resident_kernel, shared_dq_kernel, sum_dq_kernel
KERNELS = {kernel.__name__: kernel for kernel in ALL}  # a name has a hash already, a kernel computes it in Python


def columns(dim: int) -> int:
    """Return the columns of a tile of rows of ``dim`` elements, as jfa.kernels.portable.rows.padded."""
    return padded_head_dim(dim, least=LEAST_SIDE)


def boxes_of(rows: int, *packed: Tensor, heads: int = 1) -> tuple:
    """Return TMA descriptors of the tensors [total, H, D], or Nones where pointers have to do.

    A box has ``rows`` rows in all, those of ``heads`` heads.
    """
    whole = rows % heads == 0 and heads & (heads - 1) == 0
    if not whole or not config.has_tma(packed[0].device):
        return (None,) * len(packed)
    boxes = []
    for x in packed:
        if not tma_ready(x) or x.shape[0] > BILLION.value:
            return (None,) * len(packed)
        boxes.append(ragged_descriptor(x, rows // heads, columns(x.shape[2]), heads))
    return tuple(boxes)


def constants(problem: Problem) -> tuple:
    """Return the fields of a :class:`.config.Config` that follow from the problem alone, in their order."""
    band, full = problem.band, problem.dtype == torch.float32
    sizes = problem.group_size, problem.head_dim, problem.head_dim_v, band.has_lo, band.has_hi
    return *sizes, "tf32x3" if full else "tf32"


@cache
def variant(name: str, constants: tuple, tile: Tile | None = None, **more) -> Variant:
    """Return the kernel ``name`` for a problem's :func:`constants` and ``more`` fields, with the launch options of ``tile``."""
    return Variant(KERNELS[name], cfg=Config(*constants, **more), **(tile.launch if tile else {}))


def grid_of(problem: Problem, plan: Plan) -> tuple[int]:
    """Return the grid of a kernel that has one program per record and key/value head."""
    return (plan.records.shape[0] * problem.num_kv_heads,)


def strides(*packed: Tensor) -> list[int]:
    """Return the strides of rows and heads of each tensor, in a row."""
    found = []
    for x in packed:
        found += x.stride()[:2]
    return found


def with_rows(x: Tensor) -> Tensor:
    """Return ``x`` with the elements of a row side by side: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor of the shape and type of ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ----------------------------------------------------------------------------------------------------------------- lists
def forward_plan(problem: Problem, tile: Tile | None = None, workers: int | None = None) -> Plan:
    """Return the list of the forward: tiles of packed queries, mega-sequences split for ``workers`` per head."""
    cut = config.forward_cut(problem, tile, workers)
    return plan_tiles(problem, cut, cut.slots * problem.num_kv_heads)


def plan(problem: Problem) -> list[Tensor]:
    """Return the lists of the forward and, unless the query is shared, of dQ and of dK and dV: one tensor each."""
    return [made.words for made in make_lists(problem) or [forward_plan(problem)]]


def make_lists(problem: Problem) -> list[Plan] | None:
    """Return the lists of a forward and of both passes of its backward, by one launch; None where they have none in common."""
    if problem.broadcast_q or problem.block_lists is not None or problem.num_batches == 0:
        return None
    cut = config.forward_cut(problem)
    return plan_pass(problem, cut, cut.slots * problem.num_kv_heads, config.dq_cut(problem), config.dkdv_cut(problem))


def backward_lists(problem: Problem, needs: tuple[bool, bool, bool]) -> tuple[Plan | None, Plan | None]:
    """Return the lists of both passes of a backward by one launch; Nones where it is not both that need one."""
    if problem.broadcast_q or not needs[0] or not any(needs[1:]):
        return None, None
    cut = config.dq_cut(problem)
    return tuple(plan_pass(problem, cut, 0, cut, config.dkdv_cut(problem))[1:])


def given(problem: Problem, words: list[Tensor] | list[Plan] | None) -> list[Plan | None]:
    """Return what :func:`plan` or :func:`make_lists` returned as the lists of the forward, of dQ, and of dK and dV, or Nones."""
    if not words:
        return [None] * 3
    if isinstance(words[0], Plan):
        return words
    cuts = [config.forward_cut(problem)]
    if not problem.broadcast_q:
        cuts += [config.dq_cut(problem), config.dkdv_cut(problem)]
    lists = []
    for tensor, cut in zip(words, cuts):
        counters = cut.slots * problem.num_kv_heads
        lists.append(Plan.of(tensor, cut.capacity(problem), counters, cut.slots > 0))
    return lists + [None] * (3 - len(lists))


# --------------------------------------------------------------------------------------------------------------- forward
def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None = None,
    tile: Tile | None = None,
    workers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one call. The last two arguments override :mod:`.config`, for sweeps."""
    out, lse = _new_outputs(problem, q)
    if problem.num_batches == 0 or problem.rows_out == 0:
        return out.zero_(), lse.fill_(-math.inf)
    tile = tile or config.forward_tile(problem)
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    with on_device(problem):
        plan = plan or forward_plan(problem, tile, workers)
        parts, width = plan.counters.shape[0], columns(problem.head_dim_v)
        partial = torch.empty(parts * tile.keep * (width + 2), dtype=torch.float32, device=q.device)
        k_box, v_box = boxes_of(tile.step, k, v)
        # A box of several heads would become an operand in registers, and triton 3.6 then gave wrong scores.
        (q_box,) = boxes_of(tile.keep, q) if problem.group_size == 1 else (None,)
        (out_box,) = boxes_of(tile.keep, out, heads=problem.group_size)
        tensors, boxes = (q, k, v, out, lse), (q_box, k_box, v_box, out_box)
        listed = plan.records, plan.counts, plan.chunks, plan.counters
        sides = dict(block_m=tile.keep, block_n=tile.step, negative=problem.sm_scale < 0, split=plan.chunks is not None)
        variant("forward_kernel", constants(problem), tile, **sides).launch(
            problem.device,
            grid_of(problem, plan),
            *tensors,
            *boxes,
            *strides(q, k, v),
            *listed,
            *(partial, partial[parts * tile.keep * width :]),
            *(problem.rows_out, problem.num_kv_heads),
            scale_log2(problem.sm_scale),
        )
    return out, lse


def _new_outputs(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs, empty where the kernel writes every row; with an output_offset rows may stay uncovered, and must be 0."""
    out = torch.empty(problem.rows_out, problem.num_heads, problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.num_heads, problem.rows_out, dtype=torch.float32, device=q.device)
    if problem.output_offset is not None:
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


# -------------------------------------------------------------------------------------------------------------- backward
def backward(problem: Problem, dout, dlse, q, k, v, out, lse, needs=(True, True, True), lists=None):
    """Return (dq, dk, dv); those that are not needed may be None."""
    if problem.num_batches == 0 or problem.rows_kv == 0 or problem.rows_q == 0:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dlse = None if dlse is None else dlse.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    q, k, v, dout = (with_rows(x) for x in (q, k, v, dout))
    with on_device(problem):
        if config.is_resident(problem):
            return resident_backward(problem, dout, dlse, q, k, v, out, lse)
        delta = torch.empty_like(lse)
        dq_list, dkdv_list = lists if lists and lists[0] else backward_lists(problem, needs)
        if problem.broadcast_q:
            dq = shared_dq(problem, dout, dlse, q, k, v, out, lse, delta)
        elif needs[0]:
            dq = dq_pass(problem, dout, dlse, q, k, v, out, lse, delta, dq_list)
        else:
            dq = None
            delta_pass(problem, dout, dlse, out, delta)
        if not any(needs[1:]):
            return dq, None, None
        dk, dv = dkdv_pass(problem, dout, q, k, v, lse, delta, dkdv_list)
    return dq, dk, dv


def delta_pass(problem: Problem, dout, dlse, out, delta) -> None:
    """Compute delta of every output row."""
    block = 64
    only_what_it_reads = 1, 0, problem.head_dim_v, False, False, ""  # so that a mask does not compile it again
    variant("delta_kernel", only_what_it_reads, block_m=block).launch(
        problem.device,
        (cdiv(problem.rows_out, block) * problem.num_heads,),
        *(out, dout, dlse, delta),
        *strides(dout),
        *(problem.rows_out, problem.num_heads),
    )


def dq_pass(problem: Problem, dout, dlse, q, k, v, out, lse, delta, plan=None, tile: Tile | None = None) -> Tensor:
    """Return dQ by a pass over query tiles, which computes delta on the way."""
    tile = tile or config.dq_tile(problem)
    plan = plan or plan_tiles(problem, config.dq_cut(problem, tile))
    dq = empty_like(q)
    tensors = q, k, v, out, dout, lse, dlse, delta, dq
    variant("dq_kernel", constants(problem), tile, block_m=tile.keep, block_n=tile.step).launch(
        problem.device,
        grid_of(problem, plan),
        *tensors,
        *boxes_of(tile.step, k, v),
        *strides(q, k, v, dout),
        *(plan.records, plan.counts),
        *(problem.rows_out, problem.num_kv_heads),
        *(scale_log2(problem.sm_scale), problem.sm_scale),
    )
    return dq


def dkdv_pass(
    problem: Problem, dout, q, k, v, lse, delta, plan=None, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Return (dK, dV) by a pass over key tiles."""
    tile = tile or config.dkdv_tile(problem)
    plan = plan or plan_tiles(problem, config.dkdv_cut(problem, tile))
    dk, dv = empty_like(k), empty_like(v)
    tensors = q, k, v, dout, lse, delta, dk, dv
    variant("dkdv_kernel", constants(problem), tile, block_m=tile.step, block_n=tile.keep).launch(
        problem.device,
        grid_of(problem, plan),
        *tensors,
        *boxes_of(tile.step, q, dout, heads=problem.group_size),
        *strides(q, k, v, dout),
        *(plan.records, plan.counts),
        *(problem.rows_out, problem.num_kv_heads),
        *(scale_log2(problem.sm_scale), problem.sm_scale),
    )
    return dk, dv


# ---------------------------------------------------------------------------------------------------------- shared query
def resident_backward(
    problem: Problem, dout, dlse, q, k, v, out, lse, tile: Tile | None = None, workers: int = 0, piece: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a short shared query: Q and dQ stay on chip."""
    tile = tile or config.resident_tile(problem)
    workers = workers or config.resident_workers(problem)
    piece = piece or config.piece(problem)
    plan = plan_tiles(problem, config.resident_cut(piece))
    dk, dv = empty_like(k), empty_like(v)
    partial = _new_partials(problem, workers, tile.keep)
    tensors = q, k, v, out, dout, lse, dlse, dk, dv, partial
    variant("resident_kernel", constants(problem), tile, block_m=tile.keep, block_n=tile.step).launch(
        problem.device,
        (workers * problem.num_kv_heads,),
        *tensors,
        *boxes_of(tile.step, k, v),
        *boxes_of(tile.step, dk, dv),
        *strides(q, k, v, dout),
        *(plan.records, plan.counts),
        *(problem.rows_q, problem.rows_out, problem.num_kv_heads),
        *(workers, piece),
        *(scale_log2(problem.sm_scale), problem.sm_scale),
    )
    return _sum_partials(problem, partial, q, tile.keep, workers), dk, dv


def shared_dq(problem: Problem, dout, dlse, q, k, v, out, lse, delta, tile: Tile | None = None) -> Tensor:
    """Return dQ of a long shared query, tile by tile, each summed over the sequences on chip; delta on the way."""
    tile = tile or config.dq_tile(problem)
    count = cdiv(config.packed_rows(problem), tile.keep)
    sms = num_sms(problem.device, config.EMULATED_SMS)
    workers = min(problem.num_batches, max(1, sms * 2 // (count * problem.num_kv_heads)))
    partial = _new_partials(problem, workers, count * tile.keep)
    tensors = q, k, v, out, dout, lse, dlse, delta, partial
    variant("shared_dq_kernel", constants(problem), tile, block_m=tile.keep, block_n=tile.step).launch(
        problem.device,
        (workers * count * problem.num_kv_heads,),
        *tensors,
        *boxes_of(tile.step, k, v),
        *strides(q, k, v, dout),
        *(problem.key_offset, problem.output_offset),
        *(problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out),
        *band_constants(problem.band),
        *(problem.num_kv_heads, workers, count),
        scale_log2(problem.sm_scale),
    )
    return _sum_partials(problem, partial, q, count * tile.keep, workers)


def _new_partials(problem: Problem, workers: int, rows: int) -> Tensor:
    numbers = workers * problem.num_kv_heads * rows * columns(problem.head_dim)
    return torch.empty(numbers, dtype=torch.float32, device=problem.device)


def _sum_partials(problem: Problem, partial: Tensor, q: Tensor, padded_rows: int, workers: int) -> Tensor:
    dq = empty_like(q)
    only_what_it_reads = problem.group_size, problem.head_dim, 0, False, False, ""
    variant("sum_dq_kernel", only_what_it_reads).launch(
        problem.device,
        (cdiv(padded_rows * columns(problem.head_dim), SUM_BLOCK.value) * problem.num_kv_heads,),
        *(partial, dq),
        *(problem.rows_q, padded_rows),
        *(problem.num_kv_heads, workers),
        problem.sm_scale,
    )
    return dq
