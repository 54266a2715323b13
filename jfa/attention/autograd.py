"""Autograd of an eager call, whichever way it takes: what is saved for the backward, and the gradients that it returns.

The long way and a call that is played save the same tensors: torch.utils.checkpoint compares what a forward saved with what its
repetition saves, and a signature's second call is played where the first was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor


class EagerCall:
    """One call, which computes what an autograd function returns.

    Attributes:
        watched: tensors besides query, key and value that nobody may change before the backward: offsets, and a caller's lists.
        versions: of ``watched``, when the forward ran.
    """

    __slots__ = ()
    watched: Sequence[Tensor]
    versions: Sequence[int]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return (out, lse)."""
        raise NotImplementedError

    def backward(self, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor], needs: tuple) -> Sequence:
        """Return (dq, dk, dv), None for those that are not needed. ``tensors``: query, key, value, out, lse."""
        raise NotImplementedError


def attend(query: Tensor, key: Tensor, value: Tensor, call: EagerCall, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse), differentiable; lse is None unless ``with_lse``: an output costs autograd several microseconds."""
    if with_lse:
        return _apply_with_lse(query, key, value, call)
    return _apply(query, key, value, call), None


class _Attention(torch.autograd.Function):
    """The output alone has a gradient."""

    @staticmethod
    def forward(ctx, query, key, value, call):
        out, lse = call.forward(query, key, value)
        _keep(ctx, call, (query, key, value, out, lse))
        return out

    @staticmethod
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        if dout is None:
            return None, None, None, None
        return _gradients(ctx, dout, None, tensors)


class _AttentionWithLse(torch.autograd.Function):
    """The LSE has a gradient, too."""

    @staticmethod
    def forward(ctx, query, key, value, call):
        out, lse = call.forward(query, key, value)
        _keep(ctx, call, (query, key, value, out, lse))
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(tensors[3]) if dout is None else dout
        return _gradients(ctx, dout, dlse, tensors)


def _keep(ctx, call: EagerCall, tensors: tuple[Tensor, ...]) -> None:
    """Keep what a backward needs. Watched tensors are only checked for changes before the backward."""
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    call.versions = versions(call.watched)
    ctx.call = call


_version = attrgetter("_version")


def versions(tensors: Sequence[Tensor]) -> Sequence[int]:
    """Return how often each tensor was changed in place."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # nothing counts the changes of inference mode's
        return [0 if x.is_inference() else x._version for x in tensors]


def _gradients(ctx, dout: Tensor, dlse: Tensor | None, tensors: tuple) -> tuple:
    call = ctx.call
    if versions(call.watched) != call.versions:
        raise RuntimeError(
            "offsets or lists needed for gradient computation have been modified by an inplace operation"
        )
    grads = call.backward(dout, dlse, tensors, ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():
        grads = differentiable_once(grads, dout, dlse, *tensors[:3])
    dq, dk, dv = grads
    return dq, dk, dv, None


# What Function.apply does besides is for torch.func's transforms, and no eager call is under one.
_apply = super(torch.autograd.Function, _Attention).apply
_apply_with_lse = super(torch.autograd.Function, _AttentionWithLse).apply


# -------------------------------------------------------------------------------------------------------- second derivatives
class _DifferentiableOnce(torch.autograd.Function):
    """Connect a gradient to the inputs, so that a second derivative raises an error instead of being incomplete."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, *inputs):
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "jagged_flash_attention has no double backward: its gradients cannot be differentiated again"
        )


def differentiable_once(grads: Sequence[Tensor | None], *inputs: Tensor | None) -> Sequence[Tensor | None]:
    """Return the gradients; with create_graph=True such that differentiating them raises."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    if any(g is not None and isinstance(g, torch._subclasses.FakeTensor) for g in grads):
        return grads  # torch.compile traces
    return [g if g is None else _DifferentiableOnce.apply(g, *inputs) for g in grads]
