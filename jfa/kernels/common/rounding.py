"""Rounding to 16 bits, a pair of elements per instruction."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _of_type(assembly, dtype):
    """Return assembly with T as PTX's name of ``dtype`` (tl.bfloat16 or tl.float16), and ONES as the bits of two of its 1."""
    name, ones = ("bf16", "0x3F803F80") if dtype == tl.bfloat16 else ("f16", "0x3C003C00")
    return assembly.replace("T", name).replace("ONES", ones)


_ROUND = tl.constexpr("cvt.rn.Tx2.f32 $0, $2, $1;")
_ROUND_TO_ONE = tl.constexpr("""{
            .reg .b32 pair, one;
            cvt.rn.Tx2.f32 pair, $2, $1;
            mov.b32 one, ONES;
            min.NaN.Tx2 $0, pair, one;
            }""")


@triton.jit
def rounded_pairs(x, dtype: tl.constexpr):
    """Return ``x`` (fp32) in ``dtype`` (tl.bfloat16 or tl.float16), rounded to nearest even like ``x.to(dtype)``.

    The compiler rounds pairs by itself where each result is used once. One that is used twice, such as the probabilities of a
    backward pass, it rounds one by one, on the unit that also computes exponentials and as slowly as those, and
    keeps a register for each half.
    """
    return tl.inline_asm_elementwise(_of_type(_ROUND, dtype), "=r,r,r", [x], dtype=dtype.value, is_pure=True, pack=2)


@triton.jit
def rounded_probabilities(p, dtype: tl.constexpr):
    """Return ``p`` (fp32) rounded like :func:`rounded_pairs`, none above 1: infinity becomes 1, NaN stays.

    A minimum of pairs behind the rounding is half the instructions of one of fp32 numbers before it.
    """
    return tl.inline_asm_elementwise(
        _of_type(_ROUND_TO_ONE, dtype), "=r,r,r", [p], dtype=dtype.value, is_pure=True, pack=2
    )
