"""Scores of 1e3 to 1e36 on a GPU: outputs, LSE and gradients of the portable and Hopper kernels beside fp64.

python tests/gpu/run_huge.py [--backend hopper portable] [--dims 64 128 192]

Exit status 1 if a number is not finite or an output is wrong where a row's maximum is clear. A GPU's compiler fuses product and
difference of an exponent, so the product is not rounded; the emulator does that with the option `contract` only, with which
tests/kernels/test_huge_scores.py runs the same problems.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

import jfa  # noqa: E402
from jfa import reference  # noqa: E402

LARGEST = (1e3, 1e6, 1e8, 1e12, 1e30, 1e36)
WAYS = {"full": {}, "causal": {"causal": True}, "shared": {"broadcast_q": True}}


def check(backend: str, dim: int, way: str, largest: float, seed: int = 0, device: str = "cuda") -> bool:
    """Print what one problem gives; return whether it is right. On "cpu" the emulator runs it."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 200, 330, 340], dtype=torch.int32)
    shared = way == "shared"
    q, k, v = (torch.randn(64 if shared and i == 0 else 340, 2, dim, generator=generator) for i in range(3))
    score = torch.einsum("qhd,khd->hqk", q, k).abs().max().item()
    grow = math.sqrt(largest * math.sqrt(dim) / score)
    q, k, v = (x.bfloat16() for x in (q * grow, k * grow, v))
    query_offset = None if shared else offsets
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out64 = reference.attention(*exact, query_offset, offsets, **WAYS[way])
    noise = 1 + 2**-14 * torch.randn(exact[0].shape, generator=generator, dtype=torch.float64)
    moved = reference.attention(exact[0] * noise, *exact[1:], query_offset, offsets, **WAYS[way])
    clear = (moved - out64).abs().amax(2, keepdim=True) < 1e-3  # rows whose maximum leads by more than its rounding
    dout = torch.randn(out64.shape, generator=generator).bfloat16() * clear
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    there = offsets.to(device)
    out, lse = jfa.jagged_flash_attention(
        *inputs, None if shared else there, there, backend=backend, return_lse=True, **WAYS[way]
    )
    gradients = torch.autograd.grad(out, inputs, dout.to(device))
    strange = [int((~torch.isfinite(x)).sum()) for x in (out, lse, *gradients)]
    off = (out.cpu().double() - out64) * clear / out64.abs().clamp(min=1)  # P and out are rounded to bf16
    error = off.abs().nan_to_num(math.inf).max().item()
    right = not any(strange) and error < 2**-6
    if not right:
        print(
            f"{backend} D={dim} {way} {largest:.0e}: not finite in (out, lse, dq, dk, dv) {strange}, out off by {error:.2g}"
        )
    return right


def main() -> int:
    """Check all problems; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["hopper", "portable"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 192])
    args = parser.parse_args()
    problems = [(b, d, w, x) for b in args.backend for d in args.dims for w in WAYS for x in LARGEST]
    wrong = sum(not check(*problem) for problem in problems)
    print(f"{len(problems)} problems, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
