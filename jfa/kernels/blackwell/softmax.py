"""The arithmetic of one softmax step on Blackwell, in base 2.

Two things differ from the textbook. The running maximum may stay behind the true one by up to ``THRESHOLD`` bits: the accumulator
is then not rescaled, which is exact as long as P, the row sum and the accumulator use the same maximum (FlashAttention-4, arXiv
2603.05451). And a share of the exponentials runs on the FMA pipe, since the special function unit is as busy as the tensor cores.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.softmax import LN_2

# Stands for "no key seen yet" in place of -inf, so that no difference of two maxima is NaN. Scores never come near it.
NO_MAXIMUM = tl.constexpr(-1.0e38)
# Growth of the maximum, in bits, that is put up with before the accumulator is rescaled: P stays below 2**8, far inside fp16.
THRESHOLD = tl.constexpr(8.0)

HUGE = tl.constexpr(float(1 << 30))  # of a maximum in log2 units: fp32 numbers there are at least 64 apart

ROUND_TO_INT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves the rounded integer in the low mantissa bits
# 2**f on [-1/2, 1/2], minimax in the relative error (our own Remez exchange): 7.5e-5 in fp32.
CUBIC_0 = tl.constexpr(0.9999280571937561)
CUBIC_1 = tl.constexpr(0.6932609677314758)
CUBIC_2 = tl.constexpr(0.2426111251115799)
CUBIC_3 = tl.constexpr(0.0551716685295105)
SMALLEST_POWER = tl.constexpr(-125.0)  # below it the exponent field would run out


@aggregate
class Scale:
    """Factors from raw scores to log2 units.

    The exponent ``s * scale - maximum`` rounds only the maximum. Beyond ``HUGE`` that alone may be off by more than fp32 exponents
    reach. A row whose maximum is so large is scaled by a power of two instead, which rounds nothing: scores that differ then
    differ by 64 bits or more, so P is 1 at the maximum and 0 elsewhere under either factor.
    """

    fine: tl.tensor  # |sm_scale| * log2(e), positive
    coarse: tl.tensor  # the least power of two that is not smaller
    limit: tl.tensor  # raw scores up to which ``fine`` is used: just below HUGE / fine

    @triton.jit
    def lse(self, row_max, row_sum):
        """Return the natural log-sum-exp of rows; log2(0) makes it -inf for a row without keys."""
        lse = (row_max + tl.math.log2(row_sum)) * LN_2
        return tl.where(tl.abs(row_max) > HUGE, lse * (self.fine / self.coarse), lse)


@triton.jit
def running_maximum(scores, row_max, scale):
    """Return (maximum to use from now on, factor for what was accumulated under the old one, this block's scale), each [M].

    ``scores`` [M, N] are raw; maxima are in log2 units.
    """
    largest = tl.max(scores, 1)
    row_scale = tl.where(tl.abs(largest) > scale.limit, scale.coarse, scale.fine)
    grown = tl.maximum(row_max, largest * row_scale)
    growth = row_max - grown  # negative
    keep = growth >= -THRESHOLD
    alpha = tl.where(keep, 1.0, tl.math.exp2(growth))
    return tl.where(keep, row_max, grown), alpha, row_scale


@triton.jit
def split_columns(x, PARTS: tl.constexpr):
    """Return x [M, N] as a tuple of PARTS blocks [M, N / PARTS] from left to right; a thread that holds a row moves nothing."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        return split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)


@triton.jit
def join_columns(left, right):
    """Put two blocks [M, N] side by side, [M, 2 N]: the inverse of one split."""
    return tl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@triton.jit
def exp2_on_both_pipes(x, EIGHTHS: tl.constexpr, OF: tl.constexpr = 8):
    """Return 2**x of a block [M, N]: EIGHTHS of OF equal parts of its columns on the FMA pipe, the rest by special function units.

    Both kinds lie inside one block, with nothing between them that would wait: so the two units work side by side.
    """
    if EIGHTHS == 0:
        return tl.math.exp2(x)
    elif EIGHTHS >= OF:
        return exp2_on_fma_pipe(x)
    else:
        left, right = split_columns(x, 2)
        HALF: tl.constexpr = OF // 2
        return join_columns(
            exp2_on_both_pipes(left, EIGHTHS if EIGHTHS < HALF else HALF, HALF),
            exp2_on_both_pipes(right, EIGHTHS - HALF if EIGHTHS > HALF else 0, HALF),
        )


@triton.jit
def exp2_on_fma_pipe(x):
    """Return 2**x for finite x <= 100 without the special function unit; relative error 7.5e-5, where bf16 rounds at 4e-3.

    x = n + f with f in [-1/2, 1/2]: a cubic gives 2**f, and n is added to its exponent bits.
    """
    x = tl.maximum(x, SMALLEST_POWER)
    shifted = x + ROUND_TO_INT
    f = x - (shifted - ROUND_TO_INT)
    power = CUBIC_0 + f * (CUBIC_1 + f * (CUBIC_2 + f * CUBIC_3))
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (power.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)
