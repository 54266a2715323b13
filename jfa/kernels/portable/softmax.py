"""One step of the online softmax on raw scores, for scales of either sign.

The running maximum is kept in log2 units *after* scaling, so that p = exp2(s * scale - m) is one fused multiply-add and one
exp2 an element. With a negative scale the largest scaled score is the smallest raw one: NEGATIVE picks the minimum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hide(scores, keep, NEGATIVE: tl.constexpr):
    """Scores with -inf (after scaling) where ``keep`` is false."""
    if NEGATIVE:
        return tl.where(keep, scores, float("inf"))
    return tl.where(keep, scores, float("-inf"))


@triton.jit
def softmax_step(scores, m, scale, NEGATIVE: tl.constexpr, MASKED: tl.constexpr):
    """(p, alpha, new m) of a block of raw scores [M, N]: p = exp2(s * scale - new m), alpha rescales what was summed before.

    A row that has seen no key yet has m = -inf: its p and alpha are 0, never NaN.
    """
    if NEGATIVE:
        top = tl.min(scores, 1) * scale
    else:
        top = tl.max(scores, 1) * scale
    new_m = tl.maximum(m, top)
    shift = new_m
    if MASKED:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.math.exp2(scores * scale - shift[:, None])
    alpha = tl.math.exp2(m - shift)
    return p, alpha, new_m
