"""The reference as a backend: plain PyTorch on any device, gradients by autograd, fp32 (fp64 for fp64 inputs) inside.

MXFP8 is simulated: operands are rounded as the kernels round them, and multiplied in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jfa.kernels.base import Problem, came_quantized, no_backward
from jfa.reference import attention, mxfp8_attention, mxfp8_attention_backward

BLOCK_LISTS = True
MXFP8 = True


def supports(problem: Problem) -> str | None:
    """Support everything."""
    return None


def forms(problem: Problem) -> dict[str, str]:
    """Say that MXFP8 is simulated; there is nothing to say about anything else."""
    if problem.precision != "mxfp8":
        return {}
    forward = "MXFP8 simulated: Q, K, V and P are in e4m3 with shared scales, products are fp32"
    backward = "MXFP8 simulated: P again from the forward's Q and K; dO, P and dS rounded, too"
    return {"forward": forward + came_quantized(problem), "backward": no_backward(problem) or backward}


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan=None) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out])."""
    with torch.no_grad(), _as_given(problem):
        out, lse = _attend(problem, q, k, v)
    return out.contiguous(), lse.to(lse_dtype(problem)).contiguous()


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, plan=None, needs=(True, True, True)):
    """Compute gradients by running the forward again under autograd; of MXFP8 by its own backward."""
    if problem.precision == "mxfp8":
        settings = _settings(problem) | dict(dtype=torch.float32)
        grads = mxfp8_attention_backward(dout, dlse, q, k, v, out, lse, **settings)
        return tuple(grad.to(x.dtype) if need else None for grad, x, need in zip(grads, (q, k, v), needs))
    inputs = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs)]
    wanted = [x for x in inputs if x.requires_grad]
    with torch.enable_grad(), _as_given(problem):
        again, lse_again = _attend(problem, *inputs)
        outputs, grads = [again], [dout]
        if dlse is not None and lse_again.requires_grad:
            # The LSE of a query without keys is a constant -inf.
            outputs.append(torch.where(torch.isfinite(lse_again), lse_again, 0))
            grads.append(dlse.to(lse_again.dtype))
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    return tuple(_or_zeros(next(found), x) if need else None for x, need in zip(inputs, needs))


def lse_dtype(problem: Problem) -> torch.dtype:
    """Return fp64 for fp64 inputs (so that gradcheck can judge it), else fp32."""
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def _attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if problem.precision == "mxfp8":
        out, lse = mxfp8_attention(q, k, v, **_settings(problem), dtype=torch.float32, return_lse=True)
        return out.to(q.dtype), lse
    return attention(q, k, v, **_settings(problem), return_lse=True, block_lists=problem.block_lists)


def _as_given(problem: Problem):
    """Return a context in which autocast, which has cast the inputs already, leaves products alone."""
    return torch.autocast(problem.device.type, enabled=False)


def _settings(problem: Problem) -> dict[str, object]:
    return dict(
        query_offset=problem.query_offset,
        key_offset=problem.key_offset,
        sm_scale=problem.sm_scale,
        band=problem.band,
        broadcast_q=problem.broadcast_q,
        output_offset=problem.output_offset,
    )


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
