"""The arithmetic of one softmax step on Blackwell, in base 2.

Two things differ from the textbook. The running maximum may lag behind the true one by up to ``THRESHOLD`` bits: the
accumulator is then not rescaled, which is exact as long as P, the row sum and the accumulator use the same maximum
(FlashAttention-4, arXiv 2603.05451). And a share of the exponentials runs on the FMA pipe, since the special function
unit is as busy as the tensor cores.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

# Stands for "no key seen yet" instead of -inf, so that no difference of two maxima is NaN. Scores never come near it.
NO_MAXIMUM = tl.constexpr(-1.0e38)
# Growth of the maximum, in bits, that is tolerated before the accumulator is rescaled: P stays below 2**8, far inside fp16.
THRESHOLD = tl.constexpr(8.0)

ROUND_TO_INT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves the rounded integer in the low mantissa bits
# 2**f on [-1/2, 1/2], minimax in the relative error (our own Remez exchange): 7.5e-5 in fp32.
CUBIC_0 = tl.constexpr(0.9999280571937561)
CUBIC_1 = tl.constexpr(0.6932609677314758)
CUBIC_2 = tl.constexpr(0.2426111251115799)
CUBIC_3 = tl.constexpr(0.0551716685295105)
# The same of degree 4: 2.7e-6. Where P is rounded to few bits, an error of the cubic flips one rounding in a thousand.
QUARTIC_0 = tl.constexpr(0.999999261445712)
QUARTIC_1 = tl.constexpr(0.6931218147366899)
QUARTIC_2 = tl.constexpr(0.24024744827864145)
QUARTIC_3 = tl.constexpr(0.055917860319385004)
QUARTIC_4 = tl.constexpr(0.009570101911150505)
SMALLEST_POWER = tl.constexpr(-125.0)  # below it the exponent field would run out


@triton.jit
def running_maximum(scores, row_max, scale):
    """Return (maximum to use from now on, factor for what was accumulated under the old one, this block's scale), each [M].

    ``scores`` [M, N] are raw; maxima are in log2 units.
    """
    block_max, row_scale = scale.of_rows(tl.max(scores, 1))
    grown = tl.maximum(row_max, block_max)
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
def exp2_on_both_pipes(x, PARTS: tl.constexpr, OF: tl.constexpr = 8, DEGREE: tl.constexpr = 3):
    """Return 2**x of a block [M, N]: PARTS of OF equal parts of its columns on the FMA pipe, the rest by special function units.

    Both kinds lie inside one block, with nothing between them that would wait: so the two units work side by side.
    """
    if PARTS == 0:
        return tl.math.exp2(x)
    elif PARTS >= OF:
        return exp2_on_fma_pipe(x, DEGREE)
    else:
        left, right = split_columns(x, 2)
        HALF: tl.constexpr = OF // 2
        return join_columns(
            exp2_on_both_pipes(left, PARTS if PARTS < HALF else HALF, HALF, DEGREE),
            exp2_on_both_pipes(right, PARTS - HALF if PARTS > HALF else 0, HALF, DEGREE),
        )


@triton.jit
def exp2_on_fma_pipe(x, DEGREE: tl.constexpr = 3):
    """Return 2**x for finite x <= 100 without the special function unit.

    The relative error is 7.5e-5 with DEGREE 3, less than bf16 rounds (4e-3), and 2.7e-6 with DEGREE 4. x = n + f with f in
    [-1/2, 1/2]: a polynomial gives 2**f, and n is added to its exponent bits.
    """
    x = tl.maximum(x, SMALLEST_POWER)
    shifted = x + ROUND_TO_INT
    f = x - (shifted - ROUND_TO_INT)
    if DEGREE == 3:
        power = CUBIC_0 + f * (CUBIC_1 + f * (CUBIC_2 + f * CUBIC_3))
        exponent = shifted.to(tl.int32, bitcast=True) << 23
        return (power.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)
    else:
        power = QUARTIC_0 + f * (QUARTIC_1 + f * (QUARTIC_2 + f * (QUARTIC_3 + f * QUARTIC_4)))
        return add_to_exponent(power, shifted)


@triton.jit
def add_to_exponent(power, shifted):
    """Return power * 2**n, n in the low bits of ``shifted``: shift and addition in one instruction."""
    return tl.inline_asm_elementwise(
        "mad.lo.s32 $0, $2, 8388608, $1;", "=r,r,r", [power, shifted], dtype=tl.float32, is_pure=True, pack=1
    )
