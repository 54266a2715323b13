"""The Blackwell backend in MXFP8: quantize, then launch.

See :mod:`jfa.kernels.base` for the contract and :mod:`jfa.mxfp8` for the format.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jfa.kernels.base import Problem, came_quantized, no_backward
from jfa.kernels.blackwell import launch
from jfa.kernels.blackwell.config import (
    BLOCK,
    BackwardConfig,
    Mxfp8Config,
    backward_form,
    mxfp8_backward_config,
    mxfp8_config,
)
from jfa.kernels.blackwell.mxfp8_backward import mxfp8_backward_kernel
from jfa.kernels.blackwell.mxfp8_forward import mxfp8_forward_kernel
from jfa.kernels.common.host import scale_log2
from jfa.kernels.common.padded_rows import finish_dq, padded, padded_rows, row_constants
from jfa.kernels.common.quantize import quantize_keys, quantize_outputs, quantize_queries
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E
from jfa.mxfp8 import AXES, BlockScaled

MXFP8 = True


def supports(problem: Problem) -> str | None:
    """Return None, or a sentence that says what this backend cannot do in MXFP8, and which can."""
    if problem.head_dim > BLOCK:
        return f"precision='mxfp8' needs head dims up to {BLOCK}, got {problem.head_dim}; without it backend 'blackwell' can"
    return launch.supports(problem)


def forms(problem: Problem) -> dict[str, str]:
    """Return which kernel each pass of a call gets, and why."""
    config = mxfp8_config(problem)
    rows = "128 queries per tile, shared by both softmax groups" if config.split_keys else "256 queries per tile"
    forward = f"MXFP8, {rows}; tiles are {'stolen' if config.clc else 'dealt in zigzag'}{came_quantized(problem)}"
    if problem.one_way:
        backward = no_backward(problem)
    elif problem.deterministic:
        backward = f"bf16 products of the operands that the forward rounded; {launch.forms(problem)['backward']}"
    else:
        backward = f"MXFP8, one CTA per key tile{_instead_of(problem)}; dQ is added up in fp32 in the order in which tiles finish"
    return {"forward": forward, "backward": backward}


def _instead_of(problem: Problem) -> str:
    """Return why the bf16 backward's form for such a problem is not taken; nothing where it is the same form."""
    form, _ = backward_form(problem)
    return {
        "pair": " (not two: its operands are half as large, and what pairs save is their traffic in shared memory)",
        "resident": " (queries do not stay on chip: scales lie in tiles of 128 queries of one head)",
    }.get(form, "")


def plan(problem: Problem) -> list[Tensor]:
    """Return tile lists to be reused for the same offsets: of the forward and of the backward."""
    return [*launch.query_list(problem, mxfp8_config(problem).tile_rows), *launch.key_list(problem)]


def forward(
    problem: Problem,
    q: Tensor | BlockScaled,
    k: Tensor | BlockScaled,
    v: Tensor | BlockScaled,
    plan=None,
    config: Mxfp8Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out] fp32). Rows that no tile covers keep their 0 and -inf.

    Inputs in 16 bits are encoded; others are taken as they are, Q and K with groups along the head dim and V along the keys.
    """
    config = config or mxfp8_config(problem)
    out, lse = launch.empty_outputs(problem)
    if 0 in (out.numel(), problem.rows_q, problem.rows_kv, problem.num_batches):
        return out, lse
    records, counts = plan[:2] if plan else launch.query_list(problem, config.tile_rows)
    out_tma = make_tma_ready(out)
    quantized = encode_inputs(problem, q, k, v)
    launch_forward(problem, *quantized, out_tma, lse, records, counts, config)
    return (out if out_tma is out else out.copy_(out_tma)), lse


def encode_inputs(problem: Problem, q, k, v) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Return Q and K with groups along the head dim and V with groups along the keys, as the forward multiplies them."""
    if "query" not in problem.quantized:
        (q,) = quantize_queries(problem, q, ("head_dim",))
    if "key" not in problem.quantized and "value" not in problem.quantized:
        (k,), (v,) = quantize_keys(problem, k, v, axes=(("head_dim",), ("tokens",)))
    elif "key" not in problem.quantized:
        ((k,),) = quantize_keys(problem, k, axes=(("head_dim",),))
    elif "value" not in problem.quantized:
        ((v,),) = quantize_keys(problem, v, axes=(("tokens",),))
    return q, k, v


def backward(
    problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True), config=None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dq, dk, dv) in the problem's dtype; rows that no tile covers are 0. dq is summed in fp32.

    Inputs that came encoded have both encodings, and both are taken as they are.
    """
    if 0 in (dout.numel(), problem.rows_q, problem.rows_kv, problem.num_batches):
        return tuple(torch.zeros(x.shape, dtype=problem.dtype, device=x.device) for x in (q, k, v))
    if problem.deterministic:
        return backward_of_rounded(problem, dout, dlse, q, k, v, out, lse, needs)
    config = config or mxfp8_backward_config(problem)
    records, counts = plan[2:4] if plan else launch.key_list(problem)
    dout = make_tma_ready(dout)
    rows = padded_rows(problem, BLOCK)
    lse2, delta = row_constants(problem, rows, out, dout, lse, dlse)
    dk, dv = (empty_tma_ready(out.new_empty(*x.shape[:2], 0), x.shape[2]).zero_() for x in (k, v))
    dq_rows = padded(problem.rows_q, BLOCK) if problem.broadcast_q else rows.count
    sums = torch.zeros(problem.num_heads, dq_rows, config.head_dim, dtype=torch.float32, device=q.device)
    launch_backward(problem, dout, q, k, v, dk, dv, sums, lse2, delta, records, counts, config)
    return finish_dq(problem, rows, sums, problem.dtype), dk.contiguous(), dv.contiguous()


def backward_of_rounded(problem: Problem, dout, dlse, q, k, v, out, lse, needs):
    """Return (dq, dk, dv) by the bf16 backward on the operands that the forward rounded.

    bf16 holds every MXFP8 number, so P is recomputed exactly as the forward had it; the five products are bf16's.
    """
    rounded = (x.dequantize().to(problem.dtype) for x in encode_inputs(problem, q, k, v))
    return launch.backward(problem, dout, dlse, *rounded, out, lse, needs=needs)


def encode_for_backward(problem: Problem, q, k, v) -> tuple[BlockScaled, ...]:
    """Return Q and K along the head dim and along tokens, each, and V along the head dim, as the backward multiplies them."""
    given = {name: x for name, x in (("query", q), ("key", k), ("value", v)) if name in problem.quantized}
    found = {name: tuple(x.along(axis) for axis in AXES) for name, x in given.items()}
    if "query" not in found:
        found["query"] = quantize_queries(problem, q)
    wanted = {name: (x, axes) for name, x, axes in (("key", k, AXES), ("value", v, ("head_dim",))) if name not in found}
    if wanted:
        tensors, axes = zip(*wanted.values())
        found |= zip(wanted, quantize_keys(problem, *tensors, axes=axes))
    return *found["query"], *found["key"], found["value"][0]


def launch_backward(
    problem: Problem, dout, q, k, v, dk, dv, sums, lse2, delta, records: Tensor, counts: Tensor, config: BackwardConfig
) -> None:
    """Quantize and launch the backward once; dk and dv must be addressable by TMA. ``sums`` receives dQ / sm_scale."""
    q_d, q_t, k_d, k_t, v_d = encode_for_backward(problem, q, k, v)
    do_d, do_t = quantize_outputs(problem, dout)
    encoded = (q_d, q_t, k_d, k_t, v_d, do_d, do_t)
    mxfp8_backward_kernel[launch.ctas(problem, records, config.heads, config.clc)](
        *(_boxes(x, config.head_dim) for x in encoded),
        *(ragged_descriptor(x, BLOCK, config.head_dim) for x in (dk, dv)),
        launch.dq_boxes(sums, config.dq_columns),
        *(x.scales for x in encoded),
        lse2,
        delta,
        records,
        counts,
        q_d.scales.shape[1],
        k_d.scales.shape[1],
        do_d.scales.shape[1],
        lse2.shape[1],
        sums.shape[1],
        problem.sm_scale * LOG2_E,
        problem.sm_scale,
        config,
        **launch.WARPS,
    )


def launch_forward(
    problem: Problem,
    q: BlockScaled,
    k: BlockScaled,
    v: BlockScaled,
    out: Tensor,
    lse: Tensor,
    records: Tensor,
    counts: Tensor,
    config: Mxfp8Config,
) -> None:
    """Launch the forward once; q and k have groups along the head dim, v along tokens; ``out`` must be addressable by TMA."""
    scale = scale_log2(abs(problem.sm_scale))
    mxfp8_forward_kernel[launch.ctas(problem, records, config.heads, config.clc)](
        *(_boxes(x, config.head_dim) for x in (q, k, v)),
        ragged_descriptor(out, BLOCK, config.head_dim // config.o_parts),
        *(x.scales.contiguous() for x in (q, k, v)),
        lse,
        records,
        counts,
        q.scales.shape[1],
        k.scales.shape[1],  # V has as many
        problem.rows_out,
        scale,
        2.0 ** math.ceil(math.log2(scale)),
        config,
        **launch.WARPS,
    )


def _boxes(x: BlockScaled, columns: int):
    """Return a ragged descriptor of a quantized tensor's elements, copied if TMA cannot address them."""
    return ragged_descriptor(make_tma_ready(x.data), BLOCK, columns)
