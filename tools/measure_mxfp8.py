"""Measure how far MXFP8 attention is from fp64, forward and backward, on several kinds of inputs; write JSON.

    python tools/measure_mxfp8.py
    python tools/measure_mxfp8.py --out jfa/bench/results/cpu-DATE-mxfp8-errors.json
    python tools/measure_mxfp8.py --parts --out jfa/bench/results/cpu-DATE-mxfp8-parts.json

``--parts`` tells what each rounding costs, on normal numbers: each operand's alone, all but it, and all under other rules.

Errors are relative Frobenius norms against fp64 attention on the same bf16 inputs; of the LSE the largest difference. Beside MXFP8
stands bf16 as the reference has it: fp32 products, results rounded to bf16. No GPU is needed: the roundings are simulated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import jfa
from jfa import mxfp8, reference
from jfa.bench.runner import environment
from jfa.layout import log_uniform_lengths, offsets_from_lengths
from jfa.masks import Band

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


def parts(lengths_q: list[int], lengths_kv: list[int], dim: int, seed: int = 0) -> list[dict]:
    """Return errors by what is rounded: "all", "only X" and "all but X" of every operand X, and all by other rules."""
    tensors, *offsets = plain(lengths_q, lengths_kv, dim, seed=seed)
    q, k, v, dout = (x.bfloat16() for x in tensors)
    every = frozenset(reference.ROUNDED)

    def call(exact: frozenset[str]) -> tuple[Tensor, ...]:
        settings = None, False, Band.make(), dim**-0.5, torch.float64, exact
        made = reference._ScaledCall(*offsets, *settings)
        out, lse = made.forward(q, k, v)
        return out, *made.backward(dout, None, q, k, v, out, lse)

    wanted = call(every)
    rows = [("all", frozenset())]
    rows += [(f"only {name}", every - {name}) for name in reference.ROUNDED]
    rows += [(f"all but {name}", frozenset({name})) for name in reference.ROUNDED]
    rows += [("all but Q and K by head_dim", frozenset({"Q by head_dim", "K by head_dim"}))]
    rows += [
        (
            "only dP's operands, Q and K by tokens",
            every - {"dO by head_dim", "V by head_dim", "Q by tokens", "K by tokens"},
        )
    ]
    found = [(name, call(exact)) for name, exact in rows]
    for name, rule in RULES.items():
        with rule():
            found.append((name, call(frozenset())))
    return [
        dict(rounded=name, **{n: round(relative(a, b), 5) for n, a, b in zip(NAMES, got, wanted)})
        for name, got in found
    ]


def floor_codes(amax: Tensor) -> Tensor:
    """Return the codes of the OCP specification's conversion, floor(log2 amax) - 8: up to an eighth of a binade saturates."""
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF
    return ((bits >> 23) - 8).clamp(0, 254).to(torch.uint8)


def one_more_bit(amax: Tensor) -> Tensor:
    """Return the codes of scales twice as large as needed: the largest value lies in the lower half of the range."""
    return (mxfp8.scale_codes(amax).int() + 1).clamp(max=254).to(torch.uint8)


@contextmanager
def scales_by(codes: Callable[[Tensor], Tensor]):
    """Choose scales by another rule, in groups and in squares."""
    kept = mxfp8.scale_codes
    mxfp8.scale_codes = reference.scale_codes = lambda amax: _with(kept, codes, amax)
    try:
        yield
    finally:
        mxfp8.scale_codes = reference.scale_codes = kept


def _with(kept: Callable, codes: Callable, amax: Tensor) -> Tensor:
    """Return codes by a rule that may call the usual one."""
    changed, mxfp8.scale_codes = mxfp8.scale_codes, kept
    try:
        return codes(amax)
    finally:
        mxfp8.scale_codes = changed


@contextmanager
def p_times(factor: int):
    """Store P as ``factor`` times P."""
    kept = reference._rounded_p
    reference._rounded_p = lambda p: (factor * p).float().to(torch.float8_e4m3fn).to(p.dtype) / factor
    try:
        yield
    finally:
        reference._rounded_p = kept


@contextmanager
def rows_of_ds():
    """Give dS a scale per 32 keys of a query, as dQ alone would have it, in place of one per square."""
    kept = reference._rounded_squares

    def rounded(ds: Tensor) -> Tensor:
        groups = ds.float().unflatten(-1, (-1, mxfp8.GROUP))
        codes = mxfp8.scale_codes(mxfp8.magnitude(groups, -1))[..., None]
        return (mxfp8.encode(groups, codes).float() * mxfp8.scale_values(codes)).flatten(-2).to(ds.dtype)

    reference._rounded_squares = rounded
    try:
        yield
    finally:
        reference._rounded_squares = kept


RULES = {
    "all, scales by floor (OCP)": lambda: scales_by(floor_codes),
    "all, scales twice as large": lambda: scales_by(one_more_bit),
    "all, P stored as 16 P": lambda: p_times(16),
    "all, dS per 32 keys": rows_of_ds,
}


def main() -> None:
    """Print a table and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--parts", action="store_true", help="what each rounding costs, 256 queries x 512 keys, D = 128"
    )
    args = parser.parse_args()
    if args.parts:
        rows = parts([256], [512], 128)
        for row in rows:
            print(f"{row['rounded']:40s}" + "  ".join(f"{row[name]:7.4f}" for name in NAMES))
        _write(args.out, parts=rows)
        return
    rows = []
    print(f"{'':44s}  {'':5s}  " + "  ".join(f"{name:>7s}" for name in (*NAMES, "lse")))
    for name, tensors, query_offset, key_offset, options in cases():
        found = errors(tensors, query_offset, key_offset, options)
        rows.append(dict(case=name, **found))
        for precision, values in found.items():
            print(f"{name:44s}  {precision:5s}  " + "  ".join(f"{x:7.4f}" for x in values.values()), flush=True)
    _write(args.out, errors=rows)


def _write(path: Path | None, **content) -> None:
    if path:
        content = dict(environment=environment(torch.device("cpu")), **content)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
