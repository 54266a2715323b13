"""TLX kernels for sm_90 (H100, H200): TMA producers, wgmma consumers, persistent over lists of valid tiles."""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.kernels import portable
from jfa.kernels.base import Problem, wrong_gpu
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready
from jfa.kernels.hopper import backward as _general
from jfa.kernels.hopper import backward_dq as _dq
from jfa.kernels.hopper import backward_shared_q as _shared_q
from jfa.kernels.hopper import forward as _forward
from jfa.kernels.hopper.configs import forward_config
from jfa.kernels.hopper.prepare import finish_dq, prepare_rows
from jfa.kernels.hopper.tiles import Lists, TileList, both_tiles, query_tiles

BLOCK_LISTS = True

__all__ = ["backward", "forms", "forward", "make_lists", "plan", "supports"]

forward = _forward.forward


def supports(problem: Problem) -> str | None:
    """None, or one sentence: which argument these kernels cannot do and which backend can."""
    why_not = wrong_gpu(problem, {(9, 0)}, "hopper")
    if why_not:
        return why_not
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"backend 'hopper' takes query in bfloat16 or float16, not {problem.dtype}; backend 'portable' can"
    return _walks(problem) if problem.block_lists is not None else None


def _walks(problem: Problem) -> str | None:
    """None, or why these kernels cannot walk a problem's block lists."""
    lists = problem.block_lists
    if (lists.block, lists.other_block) != (128, 128):
        sizes = f"{lists.block} queries and {lists.other_block} keys"
        return f"backend 'hopper' walks block_lists with blocks of 128, not of {sizes}; backend 'portable' can"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "backend 'hopper' walks block_lists with head dims up to 128; backend 'portable' can"
    return None


def plan(problem: Problem) -> list[torch.Tensor]:
    """Tile lists of the forward and the backward, for several calls with the same offsets."""
    lists = _lists(problem)
    return [x for tiles in (lists.queries, lists.keys) for x in (tiles.records, tiles.counts)]


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True)):
    """(dq, dk, dv) in the inputs' dtypes: see jfa.kernels.base. Head dimensions beyond 128 are done by the portable kernels."""
    if out.numel() == 0 or problem.num_batches == 0 or problem.rows_kv == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if problem.sm_scale < 0:
        problem = replace(problem, sm_scale=-problem.sm_scale)
        dq, dk, dv = backward(problem, dout, dlse, -q, k, v, out, lse, plan, needs)
        return -dq, dk, dv
    if problem.block_lists is not None:
        return portable.backward(problem, dout, dlse, q, k, v, out, lse, None, needs)
    if max(problem.head_dim, problem.head_dim_v) > 128:  # dK and dV of 64 keys would fill a consumer's registers
        return portable.backward(problem, dout, dlse, q, k, v, out, lse, None, needs)
    if _shared_q.applies(problem):
        return _backward_shared_q(problem, dout, dlse, q, k, v, out, lse, plan)
    block = forward_config(problem).block_m
    given = _given_lists(plan) if plan else _lists(problem)
    lists, key_lists = given.queries, given.keys
    rows = prepare_rows(problem, lists, block, out, dout, lse, dlse)
    q, k, v, dout = (make_tma_ready(x) for x in (q, k, v, dout))
    dk, dv = empty_tma_ready(k, problem.head_dim), empty_tma_ready(v, problem.head_dim_v)
    accumulated = _general.launch(problem, key_lists, rows, q, k, v, dout, dk, dv)
    if accumulated is None:
        dq_tiles = lists if block == 128 else query_tiles(problem, 128)
        dq = _dq.launch(problem, dq_tiles, rows, q, k, v, dout)
    else:
        dq = finish_dq(problem, lists, block, accumulated, q.dtype)
    return dq, dk.contiguous(), dv.contiguous()


def _backward_shared_q(problem: Problem, dout, dlse, q, k, v, out, lse, plan):
    q, k, v, dout = (make_tma_ready(x) for x in (q, k, v, dout))
    dlse = None if dlse is None else dlse.contiguous()
    dk, dv = empty_tma_ready(k, problem.head_dim), empty_tma_ready(v, problem.head_dim_v)
    tiles = _given_lists(plan).keys if plan else _shared_q.tile_list(problem)
    rows = prepare_rows(problem, None, 0, out, dout, lse, dlse, beside=plan is None)
    dq = _shared_q.launch(problem, tiles, rows, q, k, v, dout, dk, dv)
    return dq, dk.contiguous(), dv.contiguous()


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and on what grounds."""
    config = forward_config(problem)
    queries = f"{config.block_m} queries of {'two heads' if config.heads == 2 else 'one head'} per tile"
    kept = "the shared query stays on chip" if config.resident_q else "queries stream"
    if problem.block_lists is not None:
        backward = "portable kernels over the block lists: dQ, then dK and dV; repeatable bit by bit"
    elif max(problem.head_dim, problem.head_dim_v) > 128:
        backward = f"portable kernels: head dim {max(problem.head_dim, problem.head_dim_v)} > 128"
    elif _shared_q.applies(problem):
        backward = f"resident: the {problem.rows_q} shared queries (<= 128) and their dQ stay on chip"
    elif problem.deterministic:
        backward = "two passes: deterministic=True gives dQ a kernel of its own"
    else:
        backward = "one pass over key tiles; dQ is added up in fp32 in the order in which tiles finish"
    return {"forward": f"{queries}; {kept}", "backward": backward}


def make_lists(problem: Problem) -> Lists | None:
    """Build what one forward and its backward walk, in one launch; None where there is nothing to list."""
    wide = max(problem.head_dim, problem.head_dim_v) > 128  # the backward is the portable one
    wide = wide or problem.block_lists is not None
    if wide or 0 in (problem.num_batches, problem.rows_kv, problem.rows_out):
        return None
    return _lists(problem)


def _given_lists(plan) -> Lists:
    return plan if isinstance(plan, Lists) else Lists(TileList(*plan[:2]), TileList(*plan[2:4]))


def _lists(problem: Problem) -> Lists:
    return both_tiles(problem, forward_config(problem).block_m, _backward_kernel(problem).BLOCK)


def _backward_kernel(problem: Problem):
    return _shared_q if _shared_q.applies(problem) else _general
