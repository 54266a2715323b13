"""Calls whose inputs are in MXFP8 already: ``jfa::quantized_attention`` for tracers, and a direct path for eager calls.

Inputs are not encoded again, neither by the forward nor by the backward. Gradients need every encoded input along both
axes, and go to the tensors that were encoded (:func:`jfa.mxfp8.quantize_jagged` with ``both=True``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.attention import op
from jfa.attention.arguments import QUANTIZED_AXES, check_quantized_offsets, needs_gradient
from jfa.attention.autograd import differentiable_once
from jfa.kernels.base import Problem
from jfa.mxfp8 import BlockScaled, other_axis

PARTS = 6  # tensors of an input as a schema can hold it


def attend_eagerly(query, key, value, call: op.Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse); each input is a tensor or a BlockScaled."""
    return _attend(query, key, value, call, False)


def attend_by_op(query, key, value, call: op.Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) from the registered op, which torch.compile and other tracers see as one node.

    Raises:
        NotImplementedError: a gradient inside a transform of torch.func.
    """
    return _attend(query, key, value, call, True)


def _attend(query, key, value, call: op.Call, by_op: bool) -> tuple[Tensor, Tensor]:
    inputs = query, key, value
    parts = [part for x in inputs for part in _parts(x)]
    if not (torch.is_grad_enabled() and any(needs_gradient(x) for x in inputs)):
        with torch.no_grad():
            return _forward(parts, call, by_op)
    if op.under_transform():
        raise NotImplementedError(
            "torch.func cannot differentiate a call with quantized inputs; torch.autograd and torch.compile can"
        )
    sources = (x.source if isinstance(x, BlockScaled) else x for x in inputs)
    return _Attention.apply(*sources, call, by_op, *parts)


class _Attention(torch.autograd.Function):
    """Gradients go to what was encoded; both passes multiply the encodings, which are all that is kept of it."""

    @staticmethod
    def forward(ctx, query, key, value, call, by_op, *parts):
        out, lse = _forward(parts, call, by_op)
        ctx.save_for_backward(*parts, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.by_op = call, by_op
        ctx.dtypes = [None if x is None else x.dtype for x in (query, key, value)]
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *parts, out, lse = ctx.saved_tensors
        rest = (None,) * (2 + len(parts))
        if dout is None and dlse is None:
            return None, None, None, *rest
        needs = list(ctx.needs_input_grad[:3])
        grads = _backward(dout, dlse, parts, out, lse, needs, ctx.call, ctx.by_op)
        grads = [g.to(dtype) if need else None for g, need, dtype in zip(grads, needs, ctx.dtypes)]
        if torch.is_grad_enabled():  # the sources are not kept: whoever differentiates again comes upon this leaf
            grads = differentiable_once(grads, dout, dlse, torch.zeros((), device=out.device, requires_grad=True))
        return *grads, *rest


# ------------------------------------------------------------------------------------------------------- parts of inputs
def _parts(x) -> tuple[Tensor | None, ...]:
    """Return an input as a schema can hold it: data, scales, offsets; data, scales, offsets of the other encoding."""
    if not isinstance(x, BlockScaled):
        return x, None, None, None, None, None
    other = (None, None, None) if x.other is None else (x.other.data, x.other.scales, x.other.offsets)
    return x.data, x.scales, x.offsets, *other


def _inputs(parts) -> list[Tensor | BlockScaled]:
    """Return query, key and value of their parts."""
    found = []
    for i, axis in enumerate(QUANTIZED_AXES.values()):
        data, scales, offsets, *other = parts[PARTS * i : PARTS * (i + 1)]
        if scales is None:
            found.append(data)
            continue
        turned = None if other[0] is None else BlockScaled(other[0], other[1], other_axis(axis), other[2])
        found.append(BlockScaled(data, scales, axis, offsets, other=turned))
    return found


# ------------------------------------------------------------------------------------------------------------ both passes
def _forward(parts, call: op.Call, by_op: bool) -> tuple[Tensor, Tensor]:
    if by_op:
        return torch.ops.jfa.quantized_attention(list(parts), *_arguments(call))
    problem = op.prepare(call.problem, call.check, call.query_offset)
    return _run(problem, call.backend, call.check, _inputs(parts), call.plan)


def _backward(dout, dlse, parts, out, lse, needs: list[bool], call: op.Call, by_op: bool):
    if by_op:
        return torch.ops.jfa.quantized_attention_backward(dout, dlse, list(parts), out, lse, needs, *_arguments(call))
    problem = op.prepare(call.problem, False, call.query_offset)
    return _run_backward(problem, call.backend, dout, dlse, _inputs(parts), out, lse, call.plan, needs)


def _arguments(call: op.Call) -> tuple:
    return op.op_arguments(call, call.query_offset, call.problem.key_offset, call.problem.output_offset)


def _run(problem: Problem, backend: str, check: bool, inputs, plan) -> tuple[Tensor, Tensor]:
    if check or problem.device.type == "cpu":
        check_quantized_offsets(problem, *inputs)
    return op.run_forward(problem, backend, *inputs, plan)


def _run_backward(problem: Problem, backend: str, dout, dlse, inputs, out, lse, plan, needs: list[bool]) -> tuple:
    if backend != "reference":
        dout, dlse = (x if x is None else op.plain_gradient(x) for x in (dout, dlse))
    grads = op.run_backward(problem, backend, dout, dlse, *inputs, out, lse, plan, tuple(needs))
    return tuple(out.new_empty(0) if not need else grad for grad, need in zip(grads, needs))


# ------------------------------------------------------------------------------------------------------------------- ops
_LIBRARY = torch.library.Library("jfa", "FRAGMENT")
_LIBRARY.define(f"quantized_attention(Tensor?[] parts, {op.COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "quantized_attention_backward(Tensor? dout, Tensor? dlse, Tensor?[] parts, Tensor out, Tensor lse, bool[] needs, "
    f"{op.COMMON}) -> (Tensor, Tensor, Tensor)"
)


def _quantized_attention(parts, *arguments):
    inputs = _inputs(parts)
    problem, backend, plan = op.problem_of(*inputs, arguments)
    return _run(problem, backend, op.checks(arguments), inputs, plan)


def _quantized_attention_backward(dout, dlse, parts, out, lse, needs, *arguments):
    inputs = _inputs(parts)
    problem, backend, plan = op.problem_of(*inputs, arguments)
    return _run_backward(problem, backend, dout, dlse, inputs, out, lse, plan, needs)


def _quantized_attention_fake(parts, *arguments):
    out, lse = op.attention_fake(*parts[::PARTS], *arguments)
    return out.to(torch.bfloat16), lse


def _quantized_attention_backward_fake(dout, dlse, parts, out, lse, needs, *arguments):
    return tuple(out.new_empty(x.shape if need else 0) for x, need in zip(parts[::PARTS], needs))


_LIBRARY.impl("quantized_attention", _quantized_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("quantized_attention_backward", _quantized_attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("jfa::quantized_attention", _quantized_attention_fake, lib=_LIBRARY)
torch.library.register_fake("jfa::quantized_attention_backward", _quantized_attention_backward_fake, lib=_LIBRARY)
torch.library.register_vmap("jfa::quantized_attention", op.each(torch.ops.jfa.quantized_attention), lib=_LIBRARY)
