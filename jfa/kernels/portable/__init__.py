"""Plain Triton: any CUDA GPU, and CPU tensors on the emulator. The backend contract is in jfa.kernels.base."""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import on_device
from jfa.kernels.portable import block_sparse_launch, config, launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
BLOCK_LISTS = True
TAPE = True  # what a call does may be done again from a tape
INT64_OFFSETS = True


def supports(problem: Problem) -> str | None:
    """Return None, or why this backend cannot do what is asked."""
    if problem.dtype not in DTYPES:
        return f"query is {problem.dtype}, which backend 'portable' does not compute in; backend 'reference' can"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"a head dim of more than {MAX_HEAD_DIM} is too large for backend 'portable'; backend 'reference' can"
    if problem.device.type not in ("cuda", "cpu"):
        return f"query is on {problem.device.type}, backend 'portable' runs on cuda and cpu; backend 'reference' can"
    if problem.block_lists is not None and any(rows < 16 or rows & rows - 1 for rows in problem.block_lists.sizes):
        queries, keys = problem.block_lists.sizes
        return (
            "backend 'portable' walks block_lists with blocks of a power of two from 16 on, not of "
            f"{queries} queries and {keys} keys; backend 'reference' can"
        )
    return None


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out])."""
    if problem.block_lists is not None:
        return block_sparse_launch.forward(problem, q, k, v, plan)
    return launch.forward(problem, q, k, v, launch.given(problem, plan)[0])


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True)):
    """Return (dq, dk, dv)."""
    if problem.block_lists is not None:
        return block_sparse_launch.backward(problem, dout, dlse, q, k, v, out, lse, needs, plan)
    return launch.backward(problem, dout, dlse, q, k, v, out, lse, needs, launch.given(problem, plan)[1:])


def plan(problem: Problem) -> list[Tensor]:
    """Return the lists of the forward and, unless the query is shared, of the passes over queries and over keys.

    With block lists they are the records of both sides' blocks, and the transposed lists.
    """
    if problem.num_batches == 0:
        return []
    with on_device(problem):
        if problem.block_lists is not None:
            return block_sparse_launch.plan(problem)
        return launch.plan(problem)


def make_lists(problem: Problem) -> list | block_sparse_launch.Records | None:
    """Build the lists of one forward and its backward, in one launch; None where there is nothing to share."""
    with on_device(problem):
        if problem.block_lists is not None:
            return block_sparse_launch.make_records(problem)
        return launch.make_lists(problem)


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and why."""
    if problem.block_lists is not None:
        lists = problem.block_lists
        sizes = f"blocks of {lists.block} queries and {lists.other_block} keys"
        return {
            "forward": f"walks the block lists, {sizes}",
            "backward": "two passes: dQ over the lists, dK and dV over their transpose; repeatable bit by bit",
        }
    tile = config.forward_tile(problem)
    workers = config.split_workers(problem)
    whole = f"long tiles are split over {workers} workers per head" if workers else "tiles are not split over keys"
    if config.is_resident(problem):
        backward = f"resident: the shared query's {config.packed_rows(problem)} packed rows and their dQ stay on chip"
    elif problem.broadcast_q:
        backward = "two passes; the shared query's dQ is summed per worker, then over the workers in order"
    else:
        backward = "two passes: dQ by query tiles, dK and dV by key tiles; repeatable bit by bit"
    return {
        "forward": f"{tile.keep} packed query rows per tile, {tile.step} keys per step; {whole}",
        "backward": backward,
    }
