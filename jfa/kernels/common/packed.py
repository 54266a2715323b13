"""Arithmetic on pairs of fp32 numbers: one instruction of Blackwell's FMA pipe does two (``fma.rn.f32x2``).

Triton 3.7's NVIDIA build with TLX ships them as inline PTX; elsewhere plain arithmetic stands in, with the same result.
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
