"""Example launches on CPU tensors: `jfa timeline jfa.kernels.blackwell.examples:forward`, or any other function below.

In each the kernel of interest is launched last, because the timeline shows the last launch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.block_sparse import select_blocks
from jfa.kernels.base import Problem
from jfa.kernels.blackwell import launch, mxfp8_launch
from jfa.kernels.blackwell.config import BLOCK, backward_config
from jfa.kernels.common.padded_rows import padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready
from jfa.layout import offsets_from_lengths
from jfa.masks import Band


def example(len_q: int, len_kv: int, head_dim: int = 128, causal: bool = False):
    """Return (problem, q, k, v, dout) of one sequence and one head, bf16."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(n, 1, head_dim, generator=rng).to(torch.bfloat16) for n in (len_q, len_kv, len_kv, len_q)
    )
    problem = Problem(
        num_batches=1, num_heads=1, num_kv_heads=1, head_dim=head_dim, head_dim_v=head_dim,
        rows_q=len_q, rows_kv=len_kv, rows_out=len_q, dtype=q.dtype, device=q.device,
        sm_scale=head_dim**-0.5, band=Band.make(causal), broadcast_q=False, deterministic=False,
        query_offset=offsets_from_lengths([len_q]), key_offset=offsets_from_lengths([len_kv]),
        max_seq_len_q=len_q, max_seq_len_kv=len_kv,
    )  # fmt: skip
    return problem, q, k, v, dout


def forward() -> None:
    """Run one tile of 256 queries against 1024 keys."""
    problem, q, k, v, _ = example(256, 1024)
    launch.forward(problem, q, k, v)


def split_keys() -> None:
    """Run one tile of 64 queries: both softmax groups take the same queries and every other key block."""
    problem, q, k, v, _ = example(64, 1024)
    launch.forward(problem, q, k, v)


def block_sparse(ratio: float = 0.5, length: int = 1024, gradients: bool = False) -> None:
    """Run eight tiles of 128 queries over the share ``ratio`` of the key blocks, or, with ``gradients``, the backward over it."""
    problem, q, k, v, dout = example(length, length)
    lists = select_blocks(q, k, problem.query_offset, problem.key_offset, ratio=ratio)
    problem = replace(problem, block_lists=lists)
    out, lse = launch.forward(problem, q, k, v)
    if gradients:
        launch.backward(problem, dout, None, q, k, v, out, lse)


def mxfp8() -> None:
    """Run one tile of 256 queries against 1024 keys in MXFP8."""
    problem, q, k, v, _ = example(256, 1024)
    mxfp8_launch.forward(problem, q, k, v)


def plain() -> None:
    """Run the kernel without specialized warps on 128 queries and 1024 keys."""
    problem, q, k, v, _ = example(128, 1024)
    launch.plain_forward(problem, q, k, v)


def backward(**choices) -> None:
    """Run one tile of 128 keys against 1024 queries; ``choices`` as in :class:`jfa.kernels.blackwell.config.BackwardConfig`."""
    problem, q, k, v, dout = example(1024, 128)
    config = replace(backward_config(problem), **choices)
    rows = padded_rows(problem, BLOCK)
    lse = torch.zeros(1, problem.rows_out)
    lse2, delta = row_constants(problem, rows, torch.zeros_like(dout), dout, lse, None)
    sums = torch.zeros(1, rows.count, problem.head_dim)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    launch.launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, *launch.key_list(problem), config)


def backward_before() -> None:
    """Run the same without early release and with one staging buffer."""
    backward(held_slices=0, dq_stages=1)
