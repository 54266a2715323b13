"""The Blackwell backend: what it can do, lists, descriptors, grids, launches; see :mod:`jfa.kernels.base` for the contract.

Nothing here waits for the device: lists of tiles are built on it by one kernel each, and their lengths stay there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels import portable
from jfa.kernels.base import Problem, list_arguments, unfit_blocks, wrong_gpu
from jfa.kernels.blackwell.backward_1cta import backward_kernel
from jfa.kernels.blackwell.backward_2cta import pair_backward_kernel
from jfa.kernels.blackwell.backward_dq import dq_kernel
from jfa.kernels.blackwell.backward_dq_wide import wide_dq_kernel
from jfa.kernels.blackwell.backward_resident import resident_backward_kernel
from jfa.kernels.blackwell.backward_wide import wide_backward_kernel
from jfa.kernels.blackwell.config import (
    BLOCK,
    TAIL,
    WIDE_BLOCK,
    BackwardConfig,
    ForwardConfig,
    backward_config,
    backward_form,
    dq_config,
    forward_config,
    plain_config,
    wide_config,
)
from jfa.kernels.blackwell.forward import forward_kernel
from jfa.kernels.blackwell.plain import plain_forward_kernel
from jfa.kernels.common.host import num_sms, scale_log2
from jfa.kernels.common.padded_rows import finish_dq, padded, padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E
from jfa.kernels.common.tile_list import tile_list
from jfa.kernels.common.transposing import transposed_lists

EMULATED_SMS = 2  # without a GPU: enough to have CTAs that take several tiles, and several CTAs at a time
BLOCK_LISTS = True
DTYPES = (torch.bfloat16, torch.float16)
WARPS = dict(num_warps=4, num_stages=1)  # of the default task; the kernels make their pipelines themselves


# ------------------------------------------------------------------------------------------------------------ contract


def supports(problem: Problem) -> str | None:
    """Return None, or a sentence that says what this backend cannot do, and which can."""
    why = wrong_gpu(problem, {(10, 0), (10, 3)}, "blackwell")
    if why:
        return why
    if problem.dtype not in DTYPES:
        return f"backend 'blackwell' needs bfloat16 or float16 query, got {problem.dtype}; backend 'portable' can"
    if problem.head_dim > BLOCK + TAIL or problem.head_dim_v > BLOCK:
        return (
            f"backend 'blackwell' needs head dims up to {BLOCK + TAIL} in query and up to {BLOCK} in value, got "
            f"{problem.head_dim} and {problem.head_dim_v}: scores and outputs of two halves fill the 512 columns of tensor "
            "memory; backend 'portable' can"
        )
    if why := unfit_blocks(problem, "blackwell", BLOCK):
        return why
    if problem.num_heads * (problem.rows_out + (problem.num_batches + 1) * BLOCK) >= 2**31:
        return (
            "backend 'blackwell' counts query rows of all heads in 32 bits, and query has more; backend 'portable' can"
        )
    return None


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and why."""
    forward = forward_config(problem)
    rows = "128 queries per tile, shared by both softmax groups" if forward.split_keys else "256 queries per tile"
    form, why = backward_form(problem)
    order = "" if problem.deterministic else "; dQ is added up in fp32 in the order in which tiles finish"
    how = {
        "resident": f"resident: {why}",
        "single": f"one CTA per tile of {BLOCK} keys: {why}{order}",
        "pair": f"two CTAs per tile of {2 * BLOCK} keys: {why}{order}",
        "wide": f"a kernel for dK and dV, one for dQ: {why}; repeatable bit by bit",
    }[form]
    if reason := portable_backward(problem):
        how = f"portable kernels: {reason}"
    return {"forward": f"{rows}; tiles are {'stolen' if forward.clc else 'dealt in zigzag'}", "backward": how}


def portable_backward(problem: Problem) -> str:
    """Return why this backend's backward is the portable kernels', "" where it is its own."""
    if problem.block_lists is not None and problem.deterministic:
        return "dQ over the block lists, then dK and dV; repeatable bit by bit"
    if problem.head_dim > BLOCK and (problem.block_lists is not None or problem.broadcast_q):
        what = "block lists" if problem.block_lists is not None else "queries that all sequences share"
        return f"head dim {problem.head_dim} (> {BLOCK}) with {what}"
    return ""


def plan(problem: Problem) -> list[Tensor]:
    """Return tile lists to be reused for the same offsets: of the forward, the backward and, if it has its own kernel, dQ.

    With block lists their transpose takes dQ's place.
    """
    lists = [
        *query_list(problem, forward_config(problem).tile_rows),
        *key_list(problem, backward_config(problem).tile_rows),
    ]
    if problem.block_lists is not None:
        return [*lists, *transposed_lists(problem).tensors]
    return lists + (query_list(problem, BLOCK) if problem.deterministic or problem.head_dim > BLOCK else [])


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan=None, config: ForwardConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out] fp32). Rows that no tile covers keep their 0 and -inf."""
    config = config or forward_config(problem)
    out, lse = empty_outputs(problem)
    if 0 in (out.numel(), q.numel(), k.numel(), problem.num_batches):
        return out, lse
    records, counts = plan[:2] if plan else query_list(problem, config.tile_rows)
    out_tma = make_tma_ready(out)
    launch_forward(problem, q, k, v, out_tma, lse, records, counts, config)
    return (out if out_tma is out else out.copy_(out_tma)), lse


def backward(
    problem: Problem,
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    plan=None,
    needs=(True, True, True),
    config: BackwardConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dq, dk, dv) in the inputs' dtype; rows that no tile covers are 0. dq is summed in fp32."""
    if 0 in (dout.numel(), q.numel(), k.numel(), problem.num_batches):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if portable_backward(problem):
        transposed = plan and plan[4:] if problem.block_lists else None
        return portable.backward(problem, dout, dlse, q, k, v, out, lse, transposed, needs)
    config = config or backward_config(problem)
    records, counts = plan[2:4] if plan else key_list(problem, config.tile_rows)
    dout = make_tma_ready(dout)
    rows = padded_rows(problem, BLOCK)
    lse2, delta = row_constants(problem, rows, out, dout, lse, dlse)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    if config.form == "wide":
        dq = empty_tma_ready(q, q.shape[2]).zero_()
        launch_wide(problem, dout, q, k, v, dk, dv, lse2, delta, records, counts)
        launch_wide_dq(problem, dout, q, k, v, dq, lse2, delta, *(plan[4:6] if plan else query_list(problem, BLOCK)))
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    if config.form == "resident":
        sums = launch_resident(problem, dout, q, k, v, dk, dv, lse2, delta, records, counts, config)
        return finish_dq(problem, rows, sums, q.dtype), dk.contiguous(), dv.contiguous()
    one_dq = problem.broadcast_q and not problem.deterministic
    dq_rows = padded(problem.rows_q, BLOCK) if one_dq else rows.count
    sums = torch.zeros(problem.num_heads, dq_rows, config.head_dim, dtype=torch.float32, device=q.device)
    if config.form == "pair":
        launch_pair(problem, dout, q, k, v, dk, dv, sums, lse2, delta, records, counts, config)
    else:
        lists = transposed_lists(problem, plan and plan[4:]) if problem.block_lists else None
        launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, records, counts, config, lists)
    if problem.deterministic:
        launch_dq(problem, dout, q, k, v, sums, lse2, delta, *(plan[4:6] if plan else query_list(problem, BLOCK)))
        if problem.broadcast_q:
            sums = sums.view(problem.num_heads, problem.num_batches, -1, sums.shape[2]).sum(1)
    return finish_dq(problem, rows, sums, q.dtype), dk.contiguous(), dv.contiguous()


def plain_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run the non-specialized kernel, for comparison: as :func:`forward`. sm_scale must be positive, head dims multiples of 8."""
    config = plain_config(problem)
    records, counts = query_list(problem, BLOCK)
    out, lse = empty_outputs(problem)
    plain_forward_kernel[(records.shape[0] * problem.num_heads,)](
        *_boxes(config.head_dim, q, k, v, out),
        lse,
        records,
        counts,
        problem.rows_out,
        problem.sm_scale * LOG2_E,
        config,
        **WARPS,
    )
    return out, lse


# --------------------------------------------------------------------------------------------------- lists and launches


def query_list(problem: Problem, rows: int) -> list[Tensor]:
    """Return [records, counts] of tiles of ``rows`` queries, longest first, built without synchronizing."""
    return [*tile_list(problem, rows, keys=False, pad=BLOCK)]


def key_list(problem: Problem, rows: int = BLOCK) -> list[Tensor]:
    """Return [records, counts] of the backward's tiles of ``rows`` keys, built without synchronizing."""
    return [*tile_list(problem, rows, keys=True, pad=BLOCK)]


def launch_forward(problem: Problem, q, k, v, out, lse, records: Tensor, counts: Tensor, config: ForwardConfig) -> None:
    """Launch the forward once; ``out`` must be addressable by TMA."""
    scale = scale_log2(abs(problem.sm_scale))
    forward_kernel[ctas(problem, records, config.heads, config.clc)](
        *_boxes(config.head_dim, q, k, v),
        *_boxes(config.head_dim // config.o_parts, out),
        lse,
        records,
        counts,
        problem.rows_out,
        scale,
        2.0 ** math.ceil(math.log2(scale)),
        *list_arguments(problem.block_lists),
        *(_boxes(config.tail_dim, q, k) if config.tail_dim else (None, None)),
        config,
        **WARPS,
    )


def launch_backward(
    problem: Problem, dout, q, k, v, dk, dv, sums, lse2, delta, records, counts, config: BackwardConfig, lists=None
) -> None:
    """Launch the general backward once; dout, dk and dv must be addressable by TMA.

    ``sums`` [H, rows, columns] fp32 receives dQ / sm_scale. ``lists``: the transposed block lists, if there are some.
    """
    backward_kernel[ctas(problem, records, config.heads, config.clc)](
        *_boxes(config.head_dim, q, k, v, dout, dk, dv),
        dq_boxes(sums, config.dq_columns),
        *rows_and_scales(problem, lse2, delta, records, counts, sums.shape[1]),
        *list_arguments(lists),
        config,
        **WARPS,
    )


def launch_pair(
    problem: Problem, dout, q, k, v, dk, dv, sums, lse2, delta, records: Tensor, counts: Tensor, config: BackwardConfig
) -> None:
    """Launch the backward on pairs of CTAs once: as :func:`launch_backward`, with a list of tiles of 256 keys."""
    columns, half = config.head_dim, config.head_dim // 2
    units = records.shape[0] * config.heads
    pairs = units if config.clc else min(units, max(1, num_sms(problem.device, EMULATED_SMS) // 2))
    pair_backward_kernel[(2 * pairs,)](
        *_boxes(columns, q, rows=BLOCK // 2),
        *_boxes(half, q),
        *_boxes(columns, dout, rows=BLOCK // 2),
        *_boxes(half, dout),
        *_boxes(columns, k),
        *_boxes(half, k, rows=2 * BLOCK),
        *_boxes(columns, v),
        *_boxes(half, dk, dv),
        _dq_halves(sums, config.dq_columns),
        *rows_and_scales(problem, lse2, delta, records, counts, sums.shape[1]),
        config,
        **WARPS,
        ctas_per_cga=(2, 1, 1),
    )


def launch_resident(
    problem: Problem, dout, q, k, v, dk, dv, lse2, delta, records: Tensor, counts: Tensor, config: BackwardConfig
) -> Tensor:
    """Launch the query-resident form; return dQ / sm_scale [H, rows, columns] fp32, summed over the CTAs in their order."""
    heads, rows = config.heads, BLOCK // config.group
    shares = max(1, min(records.shape[0], num_sms(problem.device, EMULATED_SMS) // heads))
    partials = torch.zeros(shares * heads, BLOCK, config.head_dim, dtype=torch.float32, device=q.device)
    resident_backward_kernel[(shares * heads,)](
        *_boxes(config.head_dim, q, rows=rows),
        *_boxes(config.head_dim, k, v),
        *_boxes(config.head_dim, dout, rows=rows),
        *_boxes(config.head_dim, dk, dv),
        dq_boxes(partials, config.dq_columns),
        lse2,
        delta,
        records,
        counts,
        problem.rows_q,
        lse2.shape[1],
        problem.sm_scale * LOG2_E,
        problem.sm_scale,
        config,
        **WARPS,
    )
    return partials.view(shares, problem.num_heads, rows, config.head_dim).sum(0)


def launch_dq(problem: Problem, dout, q, k, v, sums, lse2, delta, records: Tensor, counts: Tensor) -> None:
    """Write dQ / sm_scale of every query tile into ``sums`` [H, padded rows, columns] fp32, each tile once."""
    config = dq_config(problem)
    dq_kernel[ctas(problem, records, config.heads)](
        *_boxes(config.head_dim, q, k, v, dout),
        dq_boxes(sums, config.dq_columns),
        *rows_and_scales(problem, lse2, delta, records, counts)[:-1],  # dQ is scaled later
        config,
        **WARPS,
    )


def launch_wide(problem: Problem, dout, q, k, v, dk, dv, lse2, delta, records: Tensor, counts: Tensor, config=None):
    """Write dK and dV of queries and keys with a tail; dout, dk and dv must be addressable by TMA."""
    config = config or wide_config(problem, keys=True)
    main, tail, rows = config.head_dim, config.tail_dim, WIDE_BLOCK.value
    wide_backward_kernel[ctas(problem, records, config.heads)](
        *_boxes(main, q, rows=rows),
        *_boxes(tail, q, rows=rows),
        *_boxes(main, k),
        *_boxes(tail, k),
        *_boxes(main, v),
        *_boxes(main, dout, rows=rows),
        *_boxes(tail, dk, dv),
        *rows_and_scales(problem, lse2, delta, records, counts),
        config,
        **WARPS,
    )


def launch_wide_dq(problem: Problem, dout, q, k, v, dq, lse2, delta, records: Tensor, counts: Tensor, config=None):
    """Write dQ of queries and keys with a tail; dout and dq must be addressable by TMA."""
    config = config or wide_config(problem, keys=False)
    main, tail, rows = config.head_dim, config.tail_dim, WIDE_BLOCK.value
    wide_dq_kernel[ctas(problem, records, config.heads)](
        *_boxes(main, q),
        *_boxes(tail, q),
        *_boxes(main, k, rows=rows),
        *_boxes(tail, k, rows=rows),
        *_boxes(main, v, rows=rows),
        *_boxes(main, dout),
        *_boxes(tail, dq),
        *rows_and_scales(problem, lse2, delta, records, counts),
        config,
        **WARPS,
    )


def empty_outputs(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a problem in which no row sees a key: 0 and -inf."""
    device = problem.device
    out = torch.zeros(problem.rows_out, problem.num_heads, problem.head_dim_v, dtype=problem.dtype, device=device)
    return out, torch.full((problem.num_heads, problem.rows_out), -torch.inf, dtype=torch.float32, device=device)


def ctas(problem: Problem, records: Tensor, heads: int, clc: bool = False) -> tuple[int]:
    """Return the grid of a list: with ``clc`` a CTA per unit, to be stolen from; else one per SM."""
    units = records.shape[0] * heads
    return (units if clc else min(units, num_sms(problem.device, EMULATED_SMS)),)


def rows_and_scales(
    problem: Problem, lse2: Tensor, delta: Tensor, records: Tensor, counts: Tensor, *rows: int
) -> tuple:
    """Return pointers, list, padded rows and other counts of ``rows``, and scales, as backward kernels take them."""
    return lse2, delta, records, counts, lse2.shape[1], *rows, problem.sm_scale * LOG2_E, problem.sm_scale


def _boxes(columns: int, *tensors: Tensor, rows: int = BLOCK) -> list[TensorDescriptor]:
    """Return ragged descriptors; tensors to be written must be addressable by TMA, others are copied if they are not."""
    return [ragged_descriptor(make_tma_ready(x), rows, columns) for x in tensors]


def dq_boxes(sums: Tensor, columns: int) -> TensorDescriptor:
    """Return a descriptor of plain boxes of 128 rows and a few columns on fp32 sums [H, rows, columns]."""
    flat = sums.view(-1, sums.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [BLOCK, columns])


def _dq_halves(sums: Tensor, columns: int) -> TensorDescriptor:
    """Return a descriptor of boxes [2, 64, columns] on fp32 sums [H, rows, dim]: a few columns of either half of dim, 64 rows."""
    flat = sums.view(-1, 2, sums.shape[2] // 2).transpose(0, 1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [2, BLOCK // 2, columns])
