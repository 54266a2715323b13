"""The Blackwell kernels' host side: what fits, which configuration, descriptors, grids, launches.

Nothing here waits for the device: lists of tiles are built on it by one kernel each, and their lengths stay there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem, wrong_gpu
from jfa.kernels.blackwell.backward_1cta import backward_kernel
from jfa.kernels.blackwell.backward_dq import dq_kernel
from jfa.kernels.blackwell.backward_pma import pma_backward_kernel
from jfa.kernels.blackwell.forward import forward_kernel
from jfa.kernels.blackwell.plain import plain_forward_kernel
from jfa.kernels.common.host import num_sms, scale_log2
from jfa.kernels.common.host import padded_head_dim as _padded_head_dim
from jfa.kernels.common.padded_rows import finish_dq, padded, padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E
from jfa.kernels.common.tile_list import tile_list

BLOCK = 128  # rows of a softmax group, keys of a block: the M of one MMA and its N
O_PARTS = 2  # column parts in which the forward's O leaves
DQ_COLUMNS = 16  # fp32 columns of dQ that leave at once
EMULATED_SMS = 2  # without a GPU: enough to have CTAs that take several tiles and CTAs side by side
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
    if problem.num_heads * (problem.rows_out + (problem.num_batches + 1) * BLOCK) >= 2**31:
        return "backend 'blackwell' counts query rows of all heads in 32 bits, and query has more; backend 'portable' can"
    return None


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and on what grounds."""
    forward, backward = forward_config(problem), backward_config(problem)
    rows = "128 queries per tile, shared by both softmax groups" if forward.one_q else "256 queries per tile"
    if backward.resident:
        how = f"resident: {problem.rows_q} queries x {problem.group_size} heads per key head (<= {BLOCK}) stay on chip"
    elif problem.deterministic:
        how = "one CTA per key tile; deterministic=True gives dQ a kernel of its own"
    else:
        how = "one CTA per key tile; dQ is added up in fp32 in the order in which tiles finish"
    return {"forward": f"{rows}; tiles are {'stolen' if forward.clc else 'dealt in zigzag'}", "backward": how}


@dataclass(frozen=True)
class ForwardConfig:
    """Choices of the forward that do not change its result.

    Attributes:
        one_q: tiles of 128 queries, each shared by both softmax groups; else tiles of 256.
        clc: steal tiles through cluster launch control; else deal them in zigzag.
        kv_buffers: ring of K and V blocks.
        p_slices: slices in which P is published.
        fma_eighths: of each slice's columns, whose exp2 runs on the FMA pipe.
    """

    one_q: bool
    clc: bool = True
    kv_buffers: int = 4
    p_slices: int = 2
    fma_eighths: int = 2


def padded_head_dim(problem: Problem) -> int:
    """Columns of every tile: 64 or 128; TMA fills what a tensor lacks with zeros."""
    return _padded_head_dim(problem.head_dim, problem.head_dim_v, least=64)


def forward_config(problem: Problem, clc: bool = True) -> ForwardConfig:
    """Tiles of 128 queries where no sequence is longer; ring buffers fill the shared memory.

    Stealing is the default: on skewed lengths a queue over the sorted list ends earlier than any fixed deal of it.
    """
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    one_q = 0 < longest <= BLOCK
    buffers = 5 if one_q else 4
    if padded_head_dim(problem) == 64:
        buffers *= 2
    return ForwardConfig(one_q=one_q, clc=clc, kv_buffers=buffers)


def forward_lists(problem: Problem, config: ForwardConfig) -> list[Tensor]:
    """[records, counts] of the forward's tiles, longest first, built without synchronising."""
    return [*tile_list(problem, BLOCK if config.one_q else 2 * BLOCK, keys=False, pad=BLOCK)]


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
    forward_kernel[(units if config.clc else min(units, num_sms(problem.device, EMULATED_SMS)),)](
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (q, k, v)),
        ragged_descriptor(out, BLOCK, head_dim // O_PARTS),
        lse,
        records,
        counts,
        problem.rows_out,
        scale_log2(abs(problem.sm_scale)),
        **forward_constexprs(problem, config),
        num_warps=4,
        num_stages=1,
    )


@dataclass(frozen=True)
class BackwardConfig:
    """Choices of the backward that do not change its result, beyond the order in which dQ is summed.

    Attributes:
        clc: steal tiles through cluster launch control; else a static schedule.
        zigzag: static schedule in zigzag, else round robin (which keeps the key blocks of a sequence together).
        q_buffers, do_buffers: rings of Q with its lse and of dO with its delta.
        dq_stages: shared memory buffers through which slices of dQ leave; a divisor of the number of slices, head_dim / 16.
        held_slices: slices of dQ taken to registers so that their tensor memory is released before they leave.
        resident: keep Q and dQ on the chip (broadcast queries, at most 128 in all heads that share keys); the rest is then unused.
    """

    resident: bool = False
    clc: bool = True
    zigzag: bool = True
    q_buffers: int = 2
    do_buffers: int = 1
    dq_stages: int = 4
    held_slices: int = 4


def backward_config(problem: Problem, clc: bool = True) -> BackwardConfig:
    """Stealing unless the order matters; a static schedule of broadcast queries, whose key tiles cost the same, is round robin."""
    head_dim = padded_head_dim(problem)
    group = problem.group_size
    resident = problem.broadcast_q and problem.rows_q <= BLOCK // group and group in (1, 2, 4, 8, 16)
    clc = clc and not problem.deterministic
    return BackwardConfig(
        resident=resident,
        clc=clc,
        zigzag=not problem.broadcast_q,
        do_buffers=2 if head_dim == 64 else 1,
        held_slices=min(5, head_dim // DQ_COLUMNS),
    )


def backward_lists(problem: Problem) -> list[Tensor]:
    """[records, counts] of the backward's key tiles, built without synchronising."""
    return [*tile_list(problem, BLOCK, keys=True, pad=BLOCK)]


def backward(
    problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True), config: BackwardConfig | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv) in the inputs' dtype; rows that no tile covers are 0. dq is summed in fp32."""
    if 0 in (dout.numel(), q.numel(), k.numel(), problem.num_batches):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    config = config or backward_config(problem)
    records, counts = plan[2:4] if plan else backward_lists(problem)
    dout = make_tma_ready(dout)
    rows = padded_rows(problem, BLOCK)
    lse2, delta = row_constants(problem, rows, out, dout, lse, dlse)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    if config.resident:
        sums = launch_pma(problem, dout, q, k, v, dk, dv, lse2, delta, records, counts)
        return finish_dq(problem, rows, sums, q.dtype), dk.contiguous(), dv.contiguous()
    shared_dq = problem.broadcast_q and not problem.deterministic
    dq_rows = padded(problem.rows_q, BLOCK) if shared_dq else rows.count
    sums = torch.zeros(problem.num_heads, dq_rows, padded_head_dim(problem), dtype=torch.float32, device=q.device)
    launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, records, counts, config)
    if problem.deterministic:
        launch_dq(problem, dout, q, k, v, sums, lse2, delta, *(plan[4:6] if plan else dq_lists(problem)))
        if problem.broadcast_q:
            sums = sums.view(problem.num_heads, problem.num_batches, -1, sums.shape[2]).sum(1)
    return finish_dq(problem, rows, sums, q.dtype), dk.contiguous(), dv.contiguous()


def launch_pma(problem: Problem, dout, q, k, v, dk, dv, lse2, delta, records: Tensor, counts: Tensor) -> Tensor:
    """One launch of the query-resident form; dQ / sm_scale [H, rows, columns] fp32, summed over the CTAs in their order."""
    head_dim, heads, rows = padded_head_dim(problem), problem.num_kv_heads, BLOCK // problem.group_size
    workers = max(1, min(records.shape[0], num_sms(problem.device, EMULATED_SMS) // heads))
    partials = torch.zeros(workers * heads, BLOCK, head_dim, dtype=torch.float32, device=q.device)
    pma_backward_kernel[(workers * heads,)](
        ragged_descriptor(make_tma_ready(q), rows, head_dim),
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (k, v)),
        ragged_descriptor(dout, rows, head_dim),
        *(ragged_descriptor(x, BLOCK, head_dim) for x in (dk, dv)),
        dq_descriptor(partials),
        lse2,
        delta,
        records,
        counts,
        problem.rows_q,
        lse2.shape[1],
        problem.sm_scale * LOG2_E,
        problem.sm_scale,
        **pma_constexprs(problem),
        num_warps=4,
        num_stages=1,
    )
    return partials.view(workers, problem.num_heads, rows, head_dim).sum(0)


def pma_constexprs(problem: Problem) -> dict[str, int | bool]:
    """The query-resident backward's compile-time choices for a problem."""
    return {
        "KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "DQ_COLUMNS": DQ_COLUMNS,
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
    }


def dq_lists(problem: Problem) -> list[Tensor]:
    """[records, counts] of the deterministic dQ's query tiles."""
    return forward_lists(problem, ForwardConfig(one_q=True))


def launch_dq(problem: Problem, dout, q, k, v, sums, lse2, delta, records: Tensor, counts: Tensor) -> None:
    """dQ / sm_scale of every query tile into ``sums`` [H, padded rows, columns] fp32, each tile written once."""
    head_dim = padded_head_dim(problem)
    units = records.shape[0] * problem.num_heads
    dq_kernel[(min(units, num_sms(problem.device, EMULATED_SMS)),)](
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (q, k, v, dout)),
        dq_descriptor(sums),
        lse2,
        delta,
        records,
        counts,
        lse2.shape[1],
        problem.sm_scale * LOG2_E,
        **dq_constexprs(problem),
        num_warps=4,
        num_stages=1,
    )


def dq_constexprs(problem: Problem) -> dict[str, int | bool]:
    """The dQ kernel's compile-time choices for a problem."""
    return {
        "HEADS": problem.num_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "KV_BUFFERS": 2,
        "DQ_COLUMNS": DQ_COLUMNS,
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
    }


def dq_descriptor(sums: Tensor) -> TensorDescriptor:
    """Plain boxes of 128 rows and a few columns on fp32 sums [H, rows, columns]."""
    flat = sums.view(-1, sums.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [BLOCK, DQ_COLUMNS])


def launch_backward(
    problem: Problem, dout, q, k, v, dk, dv, sums, lse2, delta, records: Tensor, counts: Tensor, config: BackwardConfig
) -> None:
    """One launch; dout, dk and dv must be addressable by TMA. ``sums`` [H, rows, columns] fp32 receives dQ / sm_scale."""
    head_dim = padded_head_dim(problem)
    units = records.shape[0] * problem.num_kv_heads
    backward_kernel[(units if config.clc else min(units, num_sms(problem.device, EMULATED_SMS)),)](
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (q, k, v)),
        *(ragged_descriptor(x, BLOCK, head_dim) for x in (dout, dk, dv)),
        dq_descriptor(sums),
        lse2,
        delta,
        records,
        counts,
        lse2.shape[1],
        sums.shape[1],
        problem.sm_scale * LOG2_E,
        problem.sm_scale,
        **backward_constexprs(problem, config),
        num_warps=4,
        num_stages=1,
    )


def backward_constexprs(problem: Problem, config: BackwardConfig) -> dict[str, int | bool]:
    """The backward kernel's compile-time choices for a problem."""
    return {
        "KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "Q_BUFFERS": config.q_buffers,
        "DO_BUFFERS": config.do_buffers,
        "DQ_STAGES": config.dq_stages,
        "HELD_SLICES": config.held_slices,
        "DQ_COLUMNS": DQ_COLUMNS,
        "WITH_DQ": not problem.deterministic,
        "CLC": config.clc,
        "ZIGZAG": config.zigzag,
        "BROADCAST_Q": problem.broadcast_q,
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
        # As many as compile without spills beside the slices of dQ that the reduction holds.
        "COMPUTE_REGISTERS": 192 if padded_head_dim(problem) == 64 else 184,
    }


def plan(problem: Problem) -> list[Tensor]:
    """Tile lists to be reused for the same offsets, two tensors each: forward, backward, and dQ if it is deterministic."""
    lists = [*forward_lists(problem, forward_config(problem)), *backward_lists(problem)]
    return lists + (dq_lists(problem) if problem.deterministic else [])


def plain_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The forward by the non-specialized kernel, for comparison. sm_scale must be positive, head dims multiples of 8."""
    records, counts = forward_lists(problem, ForwardConfig(one_q=True))
    head_dim = padded_head_dim(problem)
    out = q.new_zeros(problem.rows_out, problem.num_heads, problem.head_dim_v)
    lse = torch.full((problem.num_heads, problem.rows_out), -torch.inf, dtype=torch.float32, device=q.device)
    plain_forward_kernel[(records.shape[0] * problem.num_heads,)](
        *(ragged_descriptor(make_tma_ready(x), BLOCK, head_dim) for x in (q, k, v)),
        ragged_descriptor(out, BLOCK, head_dim),
        lse,
        records,
        counts,
        problem.rows_out,
        problem.sm_scale * LOG2_E,
        **plain_constexprs(problem),
        num_warps=4,
        num_stages=1,
    )
    return out, lse


def plain_constexprs(problem: Problem) -> dict[str, int | bool]:
    """The plain forward's compile-time choices for a problem."""
    return {
        "HEADS": problem.num_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
    }


def forward_constexprs(problem: Problem, config: ForwardConfig) -> dict[str, int | bool]:
    """The forward kernel's compile-time choices for a problem."""
    return {
        "HEADS": problem.num_heads,
        "GROUP": problem.group_size,
        "HEAD_DIM": padded_head_dim(problem),
        "KV_BUFFERS": config.kv_buffers,
        "P_SLICES": config.p_slices,
        "FMA_EIGHTHS": config.fma_eighths,
        "O_PARTS": O_PARTS,
        "ONE_Q": config.one_q,
        "CLC": config.clc,
        "HAS_LO": problem.band.has_lo,
        "HAS_HI": problem.band.has_hi,
        "NEGATIVE": problem.sm_scale < 0,
        "SOFTMAX_REGISTERS": softmax_registers(problem, config),
    }


def softmax_registers(problem: Problem, config: ForwardConfig) -> int:
    """Of a thread of the softmax groups, so that they and the correction, which gets what is left, spill least (`jfa compile`)."""
    return 192 if problem.band.has_lo or config.one_q else 184
