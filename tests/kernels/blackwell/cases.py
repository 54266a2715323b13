"""Random jagged problems for the Blackwell kernels, and the fp64 answer to them."""

from __future__ import annotations

import torch

from jfa.kernels.base import Problem
from jfa.masks import Band
from jfa.reference import attention

# Every order in which a GPU may finish asynchronous work and let warps run is right; these are the ones that find mistakes.
SCHEDULES = [{"policy": "eager"}, {"policy": "lazy"}, *({"policy": "random", "seed": s} for s in (1, 2, 3))]
SCHEDULE_NAMES = ["eager", "lazy", "random-1", "random-2", "random-3"]
NO_MASK = Band()
# On a machine with a Blackwell GPU the same tests run on it, unchanged; the schedules then mean nothing.
DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10 else "cpu"


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def make(
    len_q: list[int] | int,
    len_kv: list[int],
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    band: Band = NO_MASK,
    dtype: torch.dtype = torch.bfloat16,
    sm_scale: float | None = None,
    deterministic: bool = False,
    output_offset: torch.Tensor | None = None,
    seed: int = 0,
):
    """(problem, q, k, v, dout); ``len_q`` a number means broadcast_q. The tensors end in slack rows of NaN no kernel may touch."""
    rng = torch.Generator().manual_seed(seed)
    broadcast = isinstance(len_q, int)
    slack = 0 if broadcast else 2
    rows_q = len_q if broadcast else sum(len_q) + slack
    rows_kv = sum(len_kv) + 2
    rows_out = len(len_kv) * rows_q if broadcast else rows_q
    kv_heads, head_dim_v = kv_heads or heads, head_dim_v or head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)

    q, k = normal(rows_q, heads, head_dim), normal(rows_kv, kv_heads, head_dim)
    v, dout = normal(rows_kv, kv_heads, head_dim_v), normal(rows_out, heads, head_dim_v)
    for poisoned, rows in ((q, slack), (k, 2), (v, 2)):
        poisoned[poisoned.shape[0] - rows :] = float("nan")
    problem = Problem(
        num_batches=len(len_kv), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
        rows_q=rows_q, rows_kv=rows_kv, rows_out=rows_out, dtype=dtype, device=q.device,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale, band=band, broadcast_q=broadcast,
        deterministic=deterministic, query_offset=offsets([rows_q] if broadcast else len_q), key_offset=offsets(len_kv),
        output_offset=output_offset, max_seq_len_q=0 if broadcast else max(len_q), max_seq_len_kv=max(len_kv),
    )  # fmt: skip
    return problem, q, k, v, dout


def reference(problem: Problem, q, k, v, dout=None):
    """(out, lse) in fp64, and with ``dout`` also (dq, dk, dv); slack rows count as 0."""
    inputs = [x.double().nan_to_num().requires_grad_(dout is not None) for x in (q, k, v)]
    out, lse = attention(
        *inputs,
        None if problem.broadcast_q else problem.query_offset,
        problem.key_offset,
        sm_scale=problem.sm_scale,
        band=problem.band,
        broadcast_q=problem.broadcast_q,
        output_offset=problem.output_offset,
        return_lse=True,
    )
    if dout is None:
        return out, lse
    return out, lse, *torch.autograd.grad(out, inputs, dout.double())


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Errors of a few roundings of the dtype, relative to the largest entry; infinities must sit in the same places."""
    got, want = got.detach().double(), want.detach().double()
    assert torch.equal(torch.isfinite(got), torch.isfinite(want)), f"{name}: non-finite entries differ"
    finite = torch.isfinite(want)
    error = (got - want)[finite].abs().max().item() if finite.any() else 0.0
    limit = (1.2e-2 if dtype == torch.bfloat16 else 2e-3) * max(
        1.0, want[finite].abs().max().item() if finite.any() else 1.0
    )
    assert error <= limit, f"{name}: largest error {error:.3g}, allowed {limit:.3g}"
