"""The Hopper backend: what it can do, descriptors, grids, launches; see :mod:`jfa.kernels.base` for the contract.

Nothing here waits for the device: lists of tiles are built on it by one kernel, and their lengths stay there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.block_sparse import BlockLists
from jfa.kernels import portable
from jfa.kernels.base import Problem, list_arguments, unfit_blocks, wrong_gpu
from jfa.kernels.common.host import num_sms, power_of_two, scale_log2
from jfa.kernels.common.launcher import Variant, by_torch
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_descriptor, rows_descriptor
from jfa.kernels.common.transposing import transposed_lists
from jfa.kernels.hopper import backward as general
from jfa.kernels.hopper import backward_resident as resident
from jfa.kernels.hopper import backward_wide as wide
from jfa.kernels.hopper.backward_dq import dq_kernel
from jfa.kernels.hopper.config import (
    ForwardConfig,
    backward_config,
    dq_config,
    forward_config,
    is_resident,
    is_wide,
    resident_config,
    wide_config,
)
from jfa.kernels.hopper.forward import forward_kernel
from jfa.kernels.hopper.prepare import PaddedRows, finish_dq, prepare_rows
from jfa.kernels.hopper.tiles import Lists, TileList, key_tiles, padded, query_tiles
from jfa.kernels.hopper.tiles import make_lists as tile_lists
from jfa.kernels.preference import portable_backward

BLOCK_LISTS = True
TAPE = True  # what a call does may be done again from a tape
INT64_OFFSETS = True
EMULATED_SMS = 2  # on CPU tensors: enough that tiles are dealt to several programs


# ------------------------------------------------------------------------------------------------------------ contract


def supports(problem: Problem) -> str | None:
    """Return None, or one sentence: which argument these kernels cannot do and which backend can."""
    why_not = wrong_gpu(problem, {(9, 0)}, "hopper")
    if why_not:
        return why_not
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"backend 'hopper' takes query in bfloat16 or float16, not {problem.dtype}; backend 'portable' can"
    return _unfit_lists(problem) if problem.block_lists is not None else None


def _unfit_lists(problem: Problem) -> str | None:
    """Return None, or why these kernels cannot walk a problem's block lists."""
    if why_not := unfit_blocks(problem, "hopper", 128):
        return why_not
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "backend 'hopper' walks block_lists with head dims up to 128; backend 'portable' can"
    return None


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and why."""
    cfg, left = forward_config(problem), portable_backward(problem)
    queries = f"{cfg.block_m} queries of {'two heads' if cfg.heads == 2 else 'one head'} per tile"
    kept = "the shared query stays on chip" if cfg.resident else "queries stream"
    if problem.block_lists is not None:
        one_pass = "one pass over key tiles walks the transposed lists; dQ is added up in fp32"
        two_passes = "portable kernels over the block lists: dQ, then dK and dV; repeatable bit by bit"
        backward = two_passes if problem.deterministic else one_pass
    elif left:
        backward = f"portable kernels: {left}"
    elif is_resident(problem):
        backward = f"resident: the {problem.rows_q} shared queries (<= 128) and their dQ stay on chip"
    elif is_wide(problem):
        backward = "two passes of 64 keys and of 128 queries: dK and dV, a warp group each; then dQ"
    elif problem.deterministic:
        backward = "two passes: deterministic=True gives dQ a kernel of its own"
    else:
        backward = "one pass over key tiles; dQ is added up in fp32 in the order in which tiles finish"
    return {"forward": f"{queries}; {kept}", "backward": backward}


def plan(problem: Problem) -> list[Tensor]:
    """Return the tile lists of the forward and the backward, for several calls with the same offsets.

    With block lists also their transpose, which the backward walks.
    """
    lists = _both_lists(problem)
    tensors = [x for tiles in (lists.queries, lists.keys) for x in (tiles.records, tiles.counts)]
    return [*tensors, *transposed_lists(problem).tensors] if problem.block_lists else tensors


def make_lists(problem: Problem) -> Lists | None:
    """Build the lists of one forward and its backward, in one launch; None where there is nothing to list."""
    if portable_backward(problem) or 0 in (problem.num_batches, problem.rows_kv, problem.rows_out):
        return None
    return _both_lists(problem)


def forward(problem: Problem, q, k, v, plan=None, config: ForwardConfig | None = None) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out]); see jfa.kernels.base."""
    cfg = config or forward_config(problem)
    out, lse = _outputs(problem, q)
    if out.numel() == 0:
        return out, lse
    if problem.num_batches == 0 or problem.rows_kv == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tiles = _given_lists(plan).queries if plan else query_tiles(problem, cfg.block_m)
    scale = problem.sm_scale
    if scale < 0:
        q, scale = -q, -scale
    launch_forward(problem, cfg, tiles, *(make_tma_ready(x) for x in (q, k, v)), scale, out, lse)
    return out.contiguous(), lse


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True)):
    """Return (dq, dk, dv) in the inputs' dtypes; see jfa.kernels.base. The portable kernels do some problems."""
    if out.numel() == 0 or problem.num_batches == 0 or problem.rows_kv == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if problem.sm_scale < 0:
        problem = replace(problem, sm_scale=-problem.sm_scale)
        dq, dk, dv = backward(problem, dout, dlse, -q, k, v, out, lse, plan, needs)
        return -dq, dk, dv
    if portable_backward(problem):
        return portable.backward(problem, dout, dlse, q, k, v, out, lse, _given_transpose(plan), needs)
    tensors = (make_tma_ready(x) for x in (q, k, v, dout))
    dk, dv = empty_tma_ready(k, problem.head_dim), empty_tma_ready(v, problem.head_dim_v)
    if is_resident(problem):
        tiles = _given_lists(plan).keys if plan else key_tiles(problem, resident.BLOCK)
        rows = prepare_rows(problem, None, 0, out, dout, lse, dlse, beside=plan is None)
        dq = launch_resident(problem, tiles, rows, *tensors, dk, dv)
    else:
        block = forward_config(problem).block_m
        lists = _given_lists(plan) if plan else _both_lists(problem)
        rows = prepare_rows(problem, lists.queries, block, out, dout, lse, dlse)
        q, k, v, dout = tensors
        if is_wide(problem):
            launch_wide(problem, lists.keys, rows, q, k, v, dout, dk, dv)
            dq = launch_dq(problem, lists.queries, rows, q, k, v, dout)
            return dq, dk.contiguous(), dv.contiguous()
        turned = transposed_lists(problem, _given_transpose(plan)) if problem.block_lists else None
        sums = launch_backward(problem, lists.keys, rows, q, k, v, dout, dk, dv, turned)
        if sums is None:
            queries = lists.queries if block == 128 else query_tiles(problem, 128)
            dq = launch_dq(problem, queries, rows, q, k, v, dout)
        else:
            dq = finish_dq(problem, lists.queries, block, sums, q.dtype)
    return dq, dk.contiguous(), dv.contiguous()


def _given_lists(plan) -> Lists:
    return plan if isinstance(plan, Lists) else Lists(TileList(*plan[:2]), TileList(*plan[2:4]))


def _given_transpose(plan) -> list[Tensor] | None:
    return plan[4:] if isinstance(plan, list) else None


def _both_lists(problem: Problem) -> Lists:
    keys = resident.BLOCK if is_resident(problem) else wide.BLOCK if is_wide(problem) else general.BLOCK
    return tile_lists(problem, forward_config(problem).block_m, keys)


def _outputs(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE, cleared where slots may leave rows out."""
    out = empty_tma_ready(q.new_empty(problem.rows_out, problem.num_heads, 0), problem.head_dim_v)
    lse = q.new_empty(problem.num_heads, problem.rows_out, dtype=torch.float32)
    if problem.output_offset is not None:
        out.zero_()
        lse.fill_(float("-inf"))
    return out, lse


# ------------------------------------------------------------------------------------------------------------ launches
# All tensors are TMA-ready and not empty, and sm_scale >= 0.


@cache
def _variant(kernel, cfg, **options) -> Variant:
    return Variant(kernel, cfg=cfg, num_warps=4, num_stages=1, **options)


def _sms(problem: Problem) -> int:
    return num_sms(problem.device, EMULATED_SMS)


def launch_forward(problem: Problem, cfg: ForwardConfig, tiles: TileList, q, k, v, scale: float, out, lse) -> None:
    """Write out and lse. ``tiles``: of ``cfg.block_m`` queries."""
    columns, lists = problem.num_heads // cfg.heads, problem.block_lists
    if cfg.resident:
        grid = (max(1, _sms(problem) // columns), columns)
    else:
        grid = (min(_sms(problem), tiles.records.shape[0] * columns),)
    boxed = (q, 64), (k, cfg.block_n), (v, cfg.block_n), (out, 64)
    left, left_v = cfg.head_dim - cfg.right, cfg.head_dim_v - cfg.right_v
    widths = (left, left, left_v, left_v), (cfg.right, cfg.right, cfg.right_v, cfg.right_v)
    _variant(forward_kernel, cfg, launch_pdl=True).launch(
        problem.device,
        grid,
        *[ragged_descriptor(*one, n) if n else None for side in widths for one, n in zip(boxed, side)],
        lse,
        *(problem.rows_q, problem.rows_out),
        *(tiles.records, tiles.counts, tiles.counters(columns)),
        *(problem.num_heads, problem.group_size),
        scale_log2(scale),
        *list_arguments(lists),
    )


def launch_backward(
    problem: Problem, tiles: TileList, constants: PaddedRows, q, k, v, dout, dk, dv, lists: BlockLists | None = None
) -> Tensor | None:
    """Write dk and dv, and return dQ's sums [H, rows, D] fp32, padded and not yet scaled.

    Return None where dQ is left to :func:`launch_dq`. ``lists``: the transposed block lists, if the problem has some.
    """
    cfg = backward_config(problem)
    dq_rows = padded(problem.rows_q) if problem.broadcast_q else constants.count
    size = problem.num_heads, dq_rows if cfg.with_dq else 1, cfg.head_dim
    sums = torch.zeros(size, dtype=torch.float32, device=q.device)
    boxes: list[TensorDescriptor | None] = []
    for width in (cfg.head_dim - cfg.right, cfg.right):
        if width == 0:
            boxes += [None] * 7
            continue
        boxes += [ragged_descriptor(x, rows, width) for x, rows in ((q, 64), (k, 128), (v, 128), (dout, 64))]
        boxes += [rows_descriptor(sums, 64, min(width, 64))]
        boxes += [ragged_descriptor(x, 64, width) for x in (dk, dv)]
    _variant(general.backward_kernel, cfg).launch(
        problem.device,
        (min(_sms(problem), tiles.records.shape[0] * problem.num_kv_heads),),
        *boxes,
        *(constants.lse2, constants.delta, constants.count, dq_rows),
        *(tiles.records, tiles.counts, tiles.counters(1)),
        *(problem.num_kv_heads, problem.group_size),
        *(problem.sm_scale, scale_log2(problem.sm_scale)),
        *list_arguments(lists),
    )
    return sums if cfg.with_dq else None


def launch_dq(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout) -> Tensor:
    """Return dq [rows_q, H, D] in q's dtype. ``tiles``: of 128 queries."""
    cfg = dq_config(problem)
    like = q
    if problem.broadcast_q:
        like = torch.empty(problem.rows_out, problem.num_heads, 0, dtype=torch.float32, device=q.device)
    dq = empty_tma_ready(like, problem.head_dim)
    if problem.output_offset is not None:
        dq.zero_()
    queries, values = (cfg.left, cfg.right), (cfg.left_v, cfg.right_v)
    boxed = ((q, queries), (k, queries), (v, values), (dout, values), (dq, queries))
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    _launch_pieces(problem, _variant(dq_kernel, cfg), boxed, rows, tiles, counter, problem.num_heads)
    if not problem.broadcast_q:
        return dq.contiguous()
    total = torch.empty(problem.rows_q, problem.num_heads, problem.head_dim, dtype=q.dtype, device=q.device)
    by_torch(_sum_of_batches, total, dq, problem.output_offset)
    return total


def launch_wide(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> None:
    """Write dk and dv of a problem with head dims beyond 128. ``tiles``: of 64 keys."""
    cfg = wide_config(problem)
    queries, values = (cfg.left, cfg.right), (cfg.left_v, cfg.right_v)
    boxed = ((q, queries), (k, queries), (v, values), (dout, values), (dk, queries), (dv, values))
    kernel = _variant(wide.backward_wide_kernel, cfg)
    _launch_pieces(problem, kernel, boxed, rows, tiles, tiles.counters(1), problem.num_kv_heads)


def _launch_pieces(problem: Problem, kernel: Variant, boxed, rows: PaddedRows, tiles: TileList, counter, heads: int):
    """Launch a kernel of the backward on ``boxed`` tensors, each with the columns of both its pieces; 0: it has one piece."""
    kernel.launch(
        problem.device,
        (min(_sms(problem), tiles.records.shape[0] * heads),),
        *[ragged_descriptor(x, 64, width) if width else None for x, columns in boxed for width in columns],
        *(rows.lse2, rows.delta, rows.count),
        *(tiles.records, tiles.counts, counter),
        *(heads, problem.group_size),
        *(problem.sm_scale, scale_log2(problem.sm_scale)),
    )


def _sum_of_batches(total: Tensor, dq: Tensor, output_offset: Tensor | None) -> None:
    """Write to ``total`` [Lq, H, D] the sum of a shared query's gradients [rows_out, H, D] over the batches, in their order."""
    rows = total.shape[0]
    if output_offset is None:
        total.copy_(dq.reshape(-1, *total.shape).sum(0))
        return
    begin = output_offset[:-1].long()
    inside = (begin >= 0) & (begin <= dq.shape[0] - rows)
    slots = torch.where(inside, begin, 0)[:, None] + torch.arange(rows, device=dq.device)
    total.copy_((dq[slots] * inside[:, None, None, None]).sum(0))


def launch_resident(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> Tensor:
    """Write dk and dv, and return dq [Lq, H, D] in q's dtype."""
    cfg, heads = resident_config(problem), problem.num_heads
    d = cfg.head_dim
    programs = max(1, _sms(problem) // heads)
    partials = torch.empty(programs, heads, d, cfg.rows_q, dtype=torch.float32, device=q.device)
    _variant(resident.backward_resident_kernel, cfg, launch_pdl=True).launch(
        problem.device,
        (programs, heads),
        *[ragged_descriptor(x, size, d) for x, size in ((q, cfg.rows_q), (k, 64), (v, 64), (dout, cfg.rows_q))],
        rows_descriptor(partials, d, cfg.rows_q),
        *[ragged_descriptor(x, 64, d) for x in (dk, dv)],
        *(rows.lse2, rows.delta, rows.count, problem.rows_q),
        *(tiles.records, tiles.counts, tiles.counters(heads)),
        heads,
        *(problem.sm_scale, scale_log2(problem.sm_scale)),
    )
    dq = torch.empty(problem.rows_q, heads, problem.head_dim, dtype=q.dtype, device=q.device)
    _sum_variant(cfg.rows_q, problem.head_dim, d, power_of_two(programs)).launch(
        problem.device, (d // 2, heads), partials, dq, programs, heads, problem.rows_q, problem.sm_scale
    )
    return dq


@cache
def _sum_variant(rows_q: int, dim: int, columns: int, programs: int) -> Variant:
    options = dict(LQ=rows_q, D=dim, D_BLOCK=columns, PROGRAMS=programs, ROWS=2)
    return Variant(resident.sum_kernel, **options, launch_pdl=True)
