"""Problems with block lists, and what is right for them: the fp64 reference over the same lists."""

from __future__ import annotations

import torch

import jfa
from jfa import reference
from jfa.layout import offsets_from_lengths


def tensors(len_q, len_kv, heads, kv_heads, dim, dim_v, dtype=torch.float32, shared=0, seed=0, poison=0):
    """(q, k, v, query_offset, key_offset); ``poison`` NaN rows stand behind the last sequence."""
    g = torch.Generator().manual_seed(seed)

    def rows(n, h, d, alone=False):
        x = torch.randn(n + poison * (not alone), h, d, generator=g).to(dtype)
        if poison and not alone:
            x[n:] = float("nan")
        return x.requires_grad_()

    q = rows(shared or sum(len_q), heads, dim, alone=bool(shared))
    k, v = rows(sum(len_kv), kv_heads, dim), rows(sum(len_kv), kv_heads, dim_v)
    return q, k, v, None if shared else offsets_from_lengths(len_q), offsets_from_lengths(len_kv)


def judge(q, k, v, qo, ko, lists, tol=2e-5, backend="portable", **options):
    """Compare out, LSE and the three gradients with the reference's in fp64; return (out, dq, dk, dv)."""
    call = dict(block_lists=lists, return_lse=True, **options)
    out, lse = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend, **call)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, want_lse = reference.attention(*exact, qo, ko, **call)
    g = torch.Generator().manual_seed(9)
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    dout, dlse = torch.randn(out.shape, generator=g).to(out.dtype), torch.randn(lse.shape, generator=g) * seen
    loss = lambda o, l: (o * dout.to(o.dtype)).sum() + (torch.where(seen, l, 0) * dlse.to(l.dtype)).sum()
    got = torch.autograd.grad(loss(out, lse), (q, k, v))
    truth = [x.detach() for x in torch.autograd.grad(loss(want, want_lse), exact)]
    out, want = out.detach(), want.detach()
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *got), (want, *truth)):
        assert torch.isfinite(a).all(), name
        scale = max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        torch.testing.assert_close(a.double(), b, atol=tol * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(lse.double()[seen], want_lse.double()[seen], atol=tol * 10, rtol=tol)
    return out, *got
