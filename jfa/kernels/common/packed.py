"""Arithmetic on pairs of fp32 numbers: one instruction of Blackwell's FMA pipe computes both (``fma.rn.f32x2``).

fbtriton 3.7 provides these functions as inline PTX; elsewhere plain arithmetic replaces them, with the same result.
"""

from __future__ import annotations

import triton

try:
    from triton.language.extra.cuda.inline_ptx_lib import _fma_f32x2 as fma_pairs
    from triton.language.extra.cuda.inline_ptx_lib import _mul_f32x2 as mul_pairs
except ImportError:

    @triton.jit
    def fma_pairs(a, b, c):
        """Return a * b + c."""
        return a * b + c

    @triton.jit
    def mul_pairs(a, b):
        """Return a * b."""
        return a * b


__all__ = ["fma_pairs", "mul_pairs"]
