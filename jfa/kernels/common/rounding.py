"""Rounding to 16 bits, a pair of elements per instruction."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_pairs(x, dtype: tl.constexpr):
    """Return ``x`` (fp32) in ``dtype`` (tl.bfloat16 or tl.float16), rounded to nearest even like ``x.to(dtype)``.

    The compiler rounds pairs by itself where each result is used once. One that is used twice, such as the probabilities of a
    backward pass, it rounds one by one, on the unit that also computes exponentials and as slowly as those, and
    keeps a register for each half.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def rounded_probabilities(p, dtype: tl.constexpr):
    """Return ``p`` (fp32) rounded like :func:`rounded_pairs`, none above 1: infinity becomes 1, NaN stays.

    A minimum of pairs behind the rounding is half the instructions of one of fp32 numbers before it.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, one;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            mov.b32 one, 0x3F803F80;
            min.NaN.bf16x2 $0, pair, one;
            }""",
            "=r,r,r",
            [p],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, one;
            cvt.rn.f16x2.f32 pair, $2, $1;
            mov.b32 one, 0x3C003C00;
            min.NaN.f16x2 $0, pair, one;
            }""",
            "=r,r,r",
            [p],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
