"""MXFP8: the quantizer's bytes against PyTorch's, and attention against the reference that rounds the same operands."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

import jfa
from jfa import mxfp8, reference
from jfa.kernels.common import quantize
from jfa.layout import offsets_from_lengths

BAD = (math.nan, -math.nan, math.inf, -math.inf)
LENGTHS = (0, 1, 5, 31, 32, 33, 127, 128, 129, 700)
TOLERANCE = 4e-3  # relative, of which rounding the results to bf16 takes 1.7e-3


# -------------------------------------------------------------------------------------------------------- the quantizer
def odd_numbers(rng: random.Random, shape) -> Tensor:
    """Return numbers of a random spread of exponents, zeros of both signs, denormals, NaN and infinities among them."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    spread = rng.choice([3, 40, 148])
    powers = torch.exp2(torch.randint(-spread, min(spread, 120), shape, generator=g).double())
    x = (torch.randn(shape, generator=g).double() * powers).float()
    kind, bad = torch.rand(shape, generator=g), rng.choice([0.0, 0.001])
    x = torch.where(kind < 0.1, torch.copysign(torch.zeros(()), x), x)
    for i, odd in enumerate(BAD):
        x = torch.where((kind > 1 - bad * (i + 1)) & (kind <= 1 - bad * i), odd, x)
    return x.to(rng.choice(mxfp8.DTYPES))


def random_tensor(seed: int) -> tuple[Tensor, Tensor, int | None]:
    """Return (x, offsets, length) of a jagged tensor of any shape, on the CPU; its rows of no sequence are NaN."""
    rng = random.Random(seed)
    count, heads = rng.randint(0, 6), rng.randint(1, 4)
    dim, spare = rng.choice([1, 16, 40, 64, 72, 128, 160, 256]), rng.choice([0, 0, 3, 200])
    if rng.random() < 0.2:
        length, order = rng.choice(LENGTHS), rng.sample(range(count), count)
        offsets = torch.tensor([*(length * i for i in order), length * count], dtype=torch.int32)
        return odd_numbers(rng, (length * count + spare, heads, dim)), offsets, length
    lengths = [rng.choice(LENGTHS) for _ in range(count)]
    x = odd_numbers(rng, (sum(lengths) + spare, heads, dim))
    x[sum(lengths) :] = math.nan
    return x, offsets_from_lengths(lengths), None


def wrong_bytes(seed: int, device: str = "cuda") -> list[str]:
    """Return what differs between the kernel's bytes and PyTorch's, on the CPU and on the device."""
    x, offsets, length = random_tensor(seed)
    there, offsets_there = x.to(device), offsets.to(device)
    both = quantize.quantize_both(there, offsets_there, length=length)
    alone = [quantize.quantize_jagged(there, offsets_there, axis, length=length) for axis in mxfp8.AXES]
    found = []
    for axis, *given in zip(mxfp8.AXES, both, alone):
        for source, where in ((x, offsets), (there, offsets_there)):
            want = mxfp8.quantize_jagged(source, where, axis, length=length)
            for form, got in zip(("both", "alone"), given):
                data = (got.data.view(torch.uint8).cpu() != want.data.view(torch.uint8).cpu()).sum().item()
                scales = (got.scales.cpu() != want.scales.cpu()).sum().item()
                if data or scales:
                    against = f"{form} {axis} against {source.device.type}"
                    found.append(f"{against}: {data} of {x.numel()} bytes, {scales} scales differ")
    return found


# --------------------------------------------------------------------------------------------------------- attention
def random_problem(seed: int, device: str = "cuda"):
    """Return (inputs, options): any lengths, masks, grouped heads or shared queries, in bf16."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    lengths = lambda: [rng.choice([0, 1, 31, 128, 129, rng.randint(1, 700)]) for _ in range(count)]
    kv_heads, group, dim = rng.randint(1, 2), rng.choice([1, 1, 3]), rng.choice([64, 128, 128])
    shared = rng.choice([0, 0, 0, 32, 128, 200])
    len_q, len_kv = [shared] * count if shared else lengths(), lengths()
    g = torch.Generator().manual_seed(seed)
    rows = lambda n, h: torch.randn(n, h, dim, generator=g).bfloat16().to(device).requires_grad_()
    q, k, v = rows(shared or sum(len_q), kv_heads * group), rows(sum(len_kv), kv_heads), rows(sum(len_kv), kv_heads)
    query_offset, key_offset = (offsets_from_lengths(x, device=device) for x in (len_q, len_kv))
    band = rng.choice([{}, {}, dict(causal=True), dict(window_size=(300, 40))])
    return (q, k, v, None if shared else query_offset, key_offset), dict(band, broadcast_q=bool(shared))


def wrong_attention(seed: int, backend: str, device: str = "cuda") -> list[str]:
    """Return what differs from the reference in fp64 with the same roundings: names of outputs and by how much."""
    inputs, options = random_problem(seed, device)
    call = dict(options, precision="mxfp8", return_lse=True)
    out, lse = jfa.jagged_flash_attention(*inputs, backend=backend, **call)
    want, want_lse = reference.mxfp8_attention(*inputs, **options, return_lse=True, dtype=torch.float64)
    seen = torch.isfinite(want_lse)
    g = torch.Generator().manual_seed(seed + 1)
    dout = torch.randn(out.shape, generator=g).bfloat16().to(device)
    dlse = torch.randn(lse.shape, generator=g).to(device) * seen
    got = torch.autograd.grad((out, lse), inputs[:3], (dout, dlse))
    # The backward is judged by itself, from what the forward gave it.
    truth = reference.mxfp8_attention_backward(dout, dlse, *inputs[:3], out, lse, *inputs[3:], **options)
    found = [] if torch.equal(torch.isfinite(lse), seen) else ["lse: other rows without keys"]
    for name, a, b in zip(("out", "dq", "dk", "dv", "lse"), (out, *got, lse[seen]), (want, *truth, want_lse[seen])):
        difference, size = (a.double() - b).norm().item(), b.norm().item()
        if not difference <= TOLERANCE * size:  # where all is 0, nothing but 0 will do
            found.append(f"{name}: {difference:.3g} of {size:.3g}")
    return found
