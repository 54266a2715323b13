"""Calls whose inputs are in MXFP8 already: ``jfa::quantized_attention`` for tracers, and a direct path for eager calls.

Inputs are not encoded again. There is no backward, because gradients need every operand encoded along its other axis as
well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.attention import op
from jfa.attention.arguments import QUANTIZED_AXES, check_quantized_offsets
from jfa.kernels.base import Problem
from jfa.mxfp8 import BlockScaled


def attend_eagerly(query, key, value, call: op.Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse); each input is a tensor or a BlockScaled."""
    with torch.no_grad():
        problem = op.prepare(call.problem, call.check, call.query_offset)
        return _run(problem, call.backend, call.check, query, key, value, call.plan)


def attend_by_op(query, key, value, call: op.Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) from the registered op, which torch.compile and other tracers see as one node."""
    problem = call.problem
    parts = [_parts(x) for x in (query, key, value)]
    data, scales, offsets = zip(*parts)
    return torch.ops.jfa.quantized_attention(
        *data,
        *scales,
        *offsets,
        *op.op_arguments(call, call.query_offset, problem.key_offset, problem.output_offset),
    )


def _parts(x) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return an input as a schema can hold it: data, scales, offsets; of a tensor nothing but itself."""
    return (x.data, x.scales, x.offsets) if isinstance(x, BlockScaled) else (x, None, None)


def _run(problem: Problem, backend: str, check: bool, query, key, value, plan) -> tuple[Tensor, Tensor]:
    if check or problem.device.type == "cpu":
        check_quantized_offsets(problem, query, key, value)
    return op.run_forward(problem, backend, query, key, value, plan)


_LIBRARY = torch.library.Library("jfa", "FRAGMENT")
_LIBRARY.define(
    "quantized_attention(Tensor query, Tensor key, Tensor value, Tensor? query_scales, Tensor? key_scales, Tensor? value_scales, "
    "Tensor? query_scale_offsets, Tensor? key_scale_offsets, Tensor? value_scale_offsets, "
    f"{op.COMMON}) -> (Tensor, Tensor)"
)


def _quantized_attention(*given):
    data, scales, offsets, arguments = given[:3], given[3:6], given[6:9], given[9:]
    inputs = [
        x if codes is None else BlockScaled(x, codes, axis, where)
        for x, codes, where, axis in zip(data, scales, offsets, QUANTIZED_AXES.values())
    ]
    problem, backend, plan = op.problem_of(*inputs, arguments)
    return _run(problem, backend, op.checks(arguments), *inputs, plan)


def _quantized_attention_fake(*given):
    out, lse = op.attention_fake(*given[:3], *given[9:])
    return out.to(torch.bfloat16), lse


_LIBRARY.impl("quantized_attention", _quantized_attention, "CompositeExplicitAutograd")
torch.library.register_fake("jfa::quantized_attention", _quantized_attention_fake, lib=_LIBRARY)
torch.library.register_vmap("jfa::quantized_attention", op.each(torch.ops.jfa.quantized_attention), lib=_LIBRARY)
