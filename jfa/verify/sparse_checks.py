"""Compare random problems with block lists with the fp64 reference over the same lists."""

from __future__ import annotations

import random

import torch

import jfa
from jfa import reference
from jfa.block_sparse import lists_from_mask
from jfa.layout import offsets_from_lengths

BLOCK = 128


def random_problem(seed: int, device: str = "cuda"):
    """Return (inputs, lists, options): any lengths, masks and list heads, in bf16."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    lengths = lambda: [rng.choice([0, 1, 128, 129, rng.randint(1, 900)]) for _ in range(count)]
    kv_heads, group, dim = 2, rng.choice([1, 3]), rng.choice([64, 128])
    shared = rng.choice([0, 0, 0, 32, 128, 200])
    len_q, len_kv = [shared] * count if shared else lengths(), lengths()
    g = torch.Generator(device=device).manual_seed(seed)
    rows = lambda n, h: torch.randn(n, h, dim, generator=g, device=device).bfloat16().requires_grad_()
    q, k, v = rows(shared or sum(len_q), kv_heads * group), rows(sum(len_kv), kv_heads), rows(sum(len_kv), kv_heads)
    qo, ko = (offsets_from_lengths(x, device=device) for x in (len_q, len_kv))
    qo = None if shared else qo
    band = rng.choice([{}, dict(causal=True), dict(window_size=(300, 40))])
    heads = rng.choice([1, kv_heads * group])
    blocks = lambda n: -(-n // BLOCK)
    masks = [torch.rand(heads, blocks(n), blocks(m), generator=g, device=device) < 0.5 for n, m in zip(len_q, len_kv)]
    lists = lists_from_mask(masks, qo, ko, total_q=len(q), total_kv=len(k), broadcast_q=bool(shared), **band)
    return (q, k, v, qo, ko), lists, dict(band, broadcast_q=bool(shared))


def wrong(seed: int, backend: str, device: str = "cuda") -> list[str]:
    """Return what differs from the fp64 reference: names of outputs and by how much."""
    inputs, lists, options = random_problem(seed, device)
    call = dict(options, block_lists=lists, return_lse=True)
    out, lse = jfa.jagged_flash_attention(*inputs, backend=backend, **call)
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    want, want_lse = reference.attention(*exact, *inputs[3:], **call)
    seen = torch.isfinite(want_lse)
    dout, dlse = torch.randn_like(want), torch.randn_like(want_lse) * seen
    loss = lambda o, l: (o.double() * dout).sum() + (torch.where(seen, l, 0).double() * dlse).sum()
    got, truth = torch.autograd.grad(loss(out, lse), inputs[:3]), torch.autograd.grad(loss(want, want_lse), exact)
    found = [] if torch.equal(torch.isfinite(lse), seen) else ["lse: other rows without keys"]
    for name, a, b in zip(("out", "dq", "dk", "dv", "lse"), (out, *got, lse[seen]), (want, *truth, want_lse[seen])):
        error = (a.double() - b).abs().max().item() if b.numel() else 0.0
        if not error <= 2e-2 * max(1.0, b.abs().max().item() if b.numel() else 0.0):
            found.append(f"{name}: {error:.3g}")
    return found
