"""The Blackwell kernels' host side: what fits, which configuration, descriptors, grids, launches.

Nothing here waits for the device: lists of tiles are built by torch operations on it, and their lengths stay there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jfa.kernels.base import Problem, wrong_gpu
from jfa.kernels.blackwell.forward import forward_kernel
from jfa.kernels.blackwell.lists import tile_records
from jfa.kernels.common.ragged import make_tma_ready, ragged_descriptor
from jfa.schedule import query_tiles

LOG2_E = 1.4426950408889634
BLOCK = 128  # rows of a softmax group, keys of a block: the M of one MMA and its N
EMULATED_SMS = 2  # without a GPU: enough to have CTAs that take several tiles and CTAs side by side
ZERO_SCALE = 2.0**-100  # stands for sm_scale = 0: scores vanish, and a masked -inf stays -inf
DTYPES = (torch.bfloat16, torch.float16)


def supports(problem: Problem) -> str | None:
    """None, or one sentence: what this backend cannot do, and which can."""
    why = wrong_gpu(problem, {(10, 0), (10, 3)}, "blackwell")
    if why:
        return why
    if problem.dtype not in DTYPES:
        return f"backend 'blackwell' needs bfloat16 or float16 query, got {problem.dtype}; backend 'portable' can"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        largest = max(problem.head_dim, problem.head_dim_v)
        return f"backend 'blackwell' needs head dims of query and value up to 128, got {largest}; backend 'portable' can"
    return None


@dataclass(frozen=True)
class ForwardConfig:
    """Choices of the forward that do not change its result.

    Attributes:
        one_q: tiles of 128 queries, each shared by both softmax groups; else tiles of 256.
        clc: steal tiles through cluster launch control; else deal them in zigzag.
        kv_buffers: ring of K and V blocks.
        p_slices: slices in which P is published.
        fma_slices: slices of P, of ``p_slices``, whose exp2 runs on the FMA pipe.
    """

    one_q: bool
    clc: bool = False
    kv_buffers: int = 3
    p_slices: int = 4
    fma_slices: int = 1


def padded_head_dim(problem: Problem) -> int:
    """Columns of every tile: 64 or 128; TMA fills what a tensor lacks with zeros."""
    return 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128


def forward_config(problem: Problem, clc: bool = False) -> ForwardConfig:
    """Tiles of 128 queries where no sequence is longer; ring buffers fill the shared memory."""
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    one_q = 0 < longest <= BLOCK
    buffers = 5 if one_q else 3
    if padded_head_dim(problem) == 64:
        buffers *= 2
    return ForwardConfig(one_q=one_q, clc=clc, kv_buffers=buffers)


def forward_lists(problem: Problem, config: ForwardConfig) -> list[Tensor]:
    """[records, counts] of the forward's tiles, longest first, built without synchronising."""
    tiles = query_tiles(
        problem.query_offset,
        problem.key_offset,
        BLOCK if config.one_q else 2 * BLOCK,
        BLOCK,
        total_q=problem.rows_q,
        band=problem.band,
        broadcast_q=problem.broadcast_q,
    )
    return [tile_records(problem, tiles), tiles.counts]


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan=None, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor]:
    """(out [rows_out, H, Dv], lse [H, rows_out] fp32). Rows that no tile covers keep their 0 and -inf."""
    config = config or forward_config(problem)
    out = q.new_zeros(problem.rows_out, problem.num_heads, problem.head_dim_v)
    lse = torch.full((problem.num_heads, problem.rows_out), -torch.inf, dtype=torch.float32, device=q.device)
    if 0 in (out.numel(), q.numel(), k.numel(), problem.num_batches):
        return out, lse
    records, counts = plan[:2] if plan else forward_lists(problem, config)
    out_tma = make_tma_ready(out)
    launch_forward(problem, q, k, v, out_tma, lse, records, counts, config)
    return (out if out_tma is out else out.copy_(out_tma)), lse


def launch_forward(problem: Problem, q, k, v, out, lse, records: Tensor, counts: Tensor, config: ForwardConfig) -> None:
    """One launch; ``out`` must be addressable by TMA."""
    head_dim = padded_head_dim(problem)
    units = records.shape[0] * problem.num_heads
    forward_kernel[(units if config.clc else min(units, streaming_multiprocessors(problem.device)),)](
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (q, k, v)),
        ragged_descriptor(out, BLOCK, head_dim),
        lse,
        records,
        counts,
        problem.rows_out,
        (abs(problem.sm_scale) or ZERO_SCALE) * LOG2_E,
        **forward_constexprs(problem, config),
        num_warps=4,
        num_stages=1,
    )


def forward_constexprs(problem: Problem, config: ForwardConfig) -> dict[str, int | bool]:
    """The forward kernel's compile-time choices for a problem."""
    return {
        "HEADS": problem.num_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "KV_BUFFERS": config.kv_buffers,
        "P_SLICES": config.p_slices,
        "FMA_SLICES": config.fma_slices,
        "ONE_Q": config.one_q,
        "CLC": config.clc,
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
        "NEGATIVE": problem.sm_scale < 0,
    }


def streaming_multiprocessors(device: torch.device) -> int:
    """CTAs that a persistent kernel starts: one an SM."""
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
