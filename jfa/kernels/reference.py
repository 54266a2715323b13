"""The reference as a backend: plain PyTorch on any device, gradients by autograd, fp32 (fp64 for fp64 inputs) inside."""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.reference import attention

BLOCK_LISTS = True


def supports(problem: Problem) -> str | None:
    """Everything."""
    return None


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan=None) -> tuple[Tensor, Tensor]:
    """(out [rows_out, H, Dv], lse [H, rows_out])."""
    with torch.no_grad():
        out, lse = _attend(problem, q, k, v)
    return out.contiguous(), lse.to(lse_dtype(problem)).contiguous()


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True)):
    """Gradients by running the forward again under autograd."""
    inputs = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs)]
    wanted = [x for x in inputs if x.requires_grad]
    with torch.enable_grad():
        again, lse_again = _attend(problem, *inputs)
        outputs, grads = [again], [dout]
        if dlse is not None and lse_again.requires_grad:
            # The LSE of a query without keys is a constant -inf.
            outputs.append(torch.where(torch.isfinite(lse_again), lse_again, 0))
            grads.append(dlse.to(lse_again.dtype))
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    return tuple(_or_zeros(next(found), x) if need else None for x, need in zip(inputs, needs))


def lse_dtype(problem: Problem) -> torch.dtype:
    """fp64 for fp64 inputs (so that gradcheck can judge it), else fp32."""
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def _attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention(
        q,
        k,
        v,
        problem.query_offset,
        problem.key_offset,
        sm_scale=problem.sm_scale,
        band=problem.band,
        broadcast_q=problem.broadcast_q,
        output_offset=problem.output_offset,
        return_lse=True,
        block_lists=problem.block_lists,
    )


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
