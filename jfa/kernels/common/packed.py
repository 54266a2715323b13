"""Arithmetic on pairs of fp32 numbers: one instruction of Blackwell's FMA pipe does two (``fma.rn.f32x2``).

Triton 3.7's NVIDIA build with TLX ships them as inline PTX; elsewhere plain arithmetic stands in, with the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda.inline_ptx_lib import _fma_f32x2 as fma_pairs
    from triton.language.extra.cuda.inline_ptx_lib import _mul_f32x2 as mul_pairs
except ImportError:

    @triton.jit
    def fma_pairs(a, b, c):
        """a * b + c."""
        return a * b + c

    @triton.jit
    def mul_pairs(a, b):
        """a * b."""
        return a * b


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x [even size] in fp32, rounded to a type of 16 bits, two elements an instruction.

    Where the result is used twice, once as fp32 again, the compiler otherwise rounds one element at a time, on the unit that also
    does exponentials and no faster than those: a second exponential for every score.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


__all__ = ["fma_pairs", "mul_pairs", "rounded"]
