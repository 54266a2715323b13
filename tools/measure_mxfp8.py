"""Measure how far MXFP8 attention is from fp64, forward and backward, on several kinds of inputs; write JSON.

    python tools/measure_mxfp8.py
    python tools/measure_mxfp8.py --out jfa/bench/results/cpu-DATE-mxfp8-errors.json

Errors are relative Frobenius norms against fp64 attention on the same bf16 inputs; of the LSE the largest difference. Beside MXFP8
stands bf16 as the reference has it: fp32 products, results rounded to bf16. No GPU is needed: the roundings are simulated.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

import jfa
from jfa import reference
from jfa.bench.runner import environment
from jfa.layout import log_uniform_lengths, offsets_from_lengths

NAMES = ("out", "dq", "dk", "dv")


def plain(lengths_q: list[int], lengths_kv: list[int], dim: int, heads: int = 2, kv_heads: int = 2, seed: int = 0):
    """Return q, k, v, dout in bf16, all normal, and the offsets."""
    g = torch.Generator().manual_seed(seed)
    rows = lambda n, h: torch.randn(n, h, dim, generator=g)
    q, k, v, dout = (
        rows(sum(lengths_q), heads),
        *(rows(sum(lengths_kv), kv_heads) for _ in "kv"),
        rows(sum(lengths_q), heads),
    )
    return [q, k, v, dout], offsets_from_lengths(lengths_q), offsets_from_lengths(lengths_kv)


def cases():
    """Yield (name, tensors, offsets, options)."""
    yield "normal, 256 x 512, D 128", *plain([256], [512], 128), {}
    yield "normal, 256 x 512, D 64", *plain([256], [512], 64), {}
    yield "normal, 128 x 8192, D 128", *plain([128], [8192], 128), {}
    lengths = log_uniform_lengths(12, 16, 1024, seed=1).tolist()
    yield "jagged 16..1024, causal, D 128, 4 heads on 2", *plain(lengths, lengths, 128, heads=4), dict(causal=True)
    tensors, *offsets = plain([256], [512], 128)
    yield "scores 4 times as large", tensors, *offsets, dict(sm_scale=4 / math.sqrt(128))
    tensors, *offsets = plain([256], [512], 128)
    tensors[0][..., 5], tensors[1][..., 5] = tensors[0][..., 5] * 8, tensors[1][..., 5] * 8
    yield "one channel of Q and K 8 times as large", tensors, *offsets, {}
    tensors, *offsets = plain([256], [512], 128)
    for x in tensors:
        x.mul_(1e-6)
    yield "Q, K, V, dO a million times smaller", tensors, *offsets, dict(sm_scale=1e12 / math.sqrt(128))
    tensors, *offsets = plain([256], [512], 128)
    tensors[2] *= torch.exp2(torch.randint(-6, 7, (512, 1, 1), generator=torch.Generator().manual_seed(2)).float())
    yield "rows of V from 2^-6 to 2^6", tensors, *offsets, {}


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the relative Frobenius error."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def errors(
    tensors: list[Tensor], query_offset: Tensor, key_offset: Tensor, options: dict
) -> dict[str, dict[str, float]]:
    """Return the errors of bf16 and of MXFP8."""
    q, k, v, dout = (x.bfloat16() for x in tensors)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(*exact, query_offset, key_offset, return_lse=True, **options)
    wanted = out, *torch.autograd.grad(out, exact, dout.double())
    seen, found = torch.isfinite(lse), {}
    for name, precision in (("bf16", None), ("mxfp8", "mxfp8")):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        got, got_lse = jfa.jagged_flash_attention(
            *leaves, query_offset, key_offset, precision=precision, return_lse=True, **options
        )
        pairs = zip(NAMES, (got, *torch.autograd.grad(got, leaves, dout)), wanted)
        found[name] = {which: round(relative(a, b), 5) for which, a, b in pairs}
        found[name]["lse"] = round((got_lse[seen].double() - lse[seen]).abs().max().item(), 5)
    return found


def main() -> None:
    """Print a table and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    rows = []
    print(f"{'':44s}  {'':5s}  " + "  ".join(f"{name:>7s}" for name in (*NAMES, "lse")))
    for name, tensors, query_offset, key_offset, options in cases():
        found = errors(tensors, query_offset, key_offset, options)
        rows.append(dict(case=name, **found))
        for precision, values in found.items():
            print(f"{name:44s}  {precision:5s}  " + "  ".join(f"{x:7.4f}" for x in values.values()), flush=True)
    if args.out:
        content = dict(environment=environment(torch.device("cpu")), errors=rows)
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
