"""Example launches on CPU tensors: `jfa timeline jfa.kernels.blackwell.examples:forward`, or any other function below.

In each the kernel of interest is launched last, because the timeline shows the last launch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.block_sparse import select_blocks
from jfa.kernels.base import Problem
from jfa.kernels.blackwell import launch, mxfp8_launch
from jfa.kernels.blackwell.config import BLOCK, backward_config, wide_config
from jfa.kernels.common.padded_rows import padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready
from jfa.layout import offsets_from_lengths
from jfa.masks import Band


def example(len_q: int, len_kv: int, head_dim: int = 128, causal: bool = False):
    """Return (problem, q, k, v, dout) of one sequence and one head, bf16; values have at most 128 columns."""
    rng, head_dim_v = torch.Generator().manual_seed(0), min(head_dim, BLOCK)
    shapes = ((len_q, head_dim), (len_kv, head_dim), (len_kv, head_dim_v), (len_q, head_dim_v))
    q, k, v, dout = (torch.randn(n, 1, dim, generator=rng).to(torch.bfloat16) for n, dim in shapes)
    problem = Problem(
        num_batches=1, num_heads=1, num_kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v,
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
    lse2, delta = _constants(problem, dout)
    sums = torch.zeros(1, lse2.shape[1], problem.head_dim)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    launch.launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, *launch.key_list(problem), config)


def wide_backward(len_q: int = 1024, len_kv: int = BLOCK, causal: bool = False, **choices) -> None:
    """Run dK and dV of queries and keys with 192 columns; ``choices`` as in :class:`jfa.kernels.blackwell.config.WideConfig`."""
    problem, q, k, v, dout = example(len_q, len_kv, 192, causal)
    constants, config = _constants(problem, dout), replace(wide_config(problem, keys=True), **choices)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    launch.launch_wide(problem, dout, q, k, v, dk, dv, *constants, *launch.key_list(problem), config)


def wide_dq(len_q: int = BLOCK, len_kv: int = 1024, causal: bool = False, **choices) -> None:
    """Run dQ of queries and keys with 192 columns."""
    problem, q, k, v, dout = example(len_q, len_kv, 192, causal)
    constants, config = _constants(problem, dout), replace(wide_config(problem, keys=False), **choices)
    dq = empty_tma_ready(q, q.shape[2]).zero_()
    launch.launch_wide_dq(problem, dout, q, k, v, dq, *constants, *launch.query_list(problem, BLOCK), config)


def _constants(problem: Problem, dout: torch.Tensor):
    """Return (lse2, delta) of an output and an LSE of 0: times do not depend on them."""
    lse = torch.zeros(1, problem.rows_out)
    return row_constants(problem, padded_rows(problem, BLOCK), torch.zeros_like(dout), dout, lse, None)


def backward_before() -> None:
    """Run the same without early release and with one staging buffer."""
    backward(held_slices=0, dq_stages=1)
