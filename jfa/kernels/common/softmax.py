"""One step of the online softmax, and its end, in base 2: scores are multiplied by sm_scale * log2(e), so exp2 does.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import aggregate

LOG2_E = 1.4426950408889634  # host side: sm_scale * LOG2_E
LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(LOG2_E)

# Of a maximum in log2 units. Below it fp32 rounds by at most 4: what is off by so many bits stays inside fp16, even 8 bits behind
# (Blackwell). Beyond it fp32 numbers are at least 16 apart.
HUGE = tl.constexpr(float(1 << 27))

# Of an LSE in log2 units: fp32 numbers there are 1/4 apart, so P is off by a quarter or so. Beyond, an exact 1 is worth more.
HUGE_LSE = tl.constexpr(float(1 << 21))
# Such an LSE x is lowered by x * min(x * LOWERED, MOST_LOWERED): at first by a few units in its last place, which all roundings on
# its way together do not reach, and from 2**26 on by more, since scores may be products' small differences and round accordingly.
LOWERED = tl.constexpr(2.0**-42)
MOST_LOWERED = tl.constexpr(2.0**-16)


@triton.jit
def lse_to_subtract(natural, LOWERED_BY: tl.constexpr = LOWERED):
    """Return a natural LSE in log2 units, for a backward's ``P = min(exp2(score * scale - lse2), 1)``.

    Rows without keys get +inf, so their P is 0. A huge LSE is known to a few units in its last place only, and so is the largest
    exponent of its row, which should be 0: exp2 would make 0 or infinity of it. So the LSE is lowered by more than that, and min
    makes P = 1. The same goes for scores nearer to the largest than a share of 2**-16 (2**-20 at 2**22); all others get P = 0.
    """
    lse2 = natural * _LOG2_E
    share = tl.minimum(tl.abs(lse2) * LOWERED_BY, MOST_LOWERED)
    share = tl.where(tl.abs(lse2) > HUGE_LSE, share, 0.0)
    return tl.where(natural == float("-inf"), float("inf"), lse2 * tl.where(lse2 > 0, 1.0 - share, 1.0 + share))


@triton.jit
def at_most(x, LIMIT: tl.constexpr):
    """Return the smaller of x and LIMIT; NaN stays NaN."""
    return tl.minimum(x, float(LIMIT), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most_one(p):
    """Return probabilities as a backward recomputes them, none above 1; see :func:`lse_to_subtract`."""
    return at_most(p, 1.0)


@triton.jit
def hide(scores, keep, NEGATIVE: tl.constexpr):
    """Return the raw scores with what is -inf after scaling where ``keep`` is false; NEGATIVE: the scale is."""
    if NEGATIVE:
        return tl.where(keep, scores, float("inf"))
    else:
        return tl.where(keep, scores, float("-inf"))


_LOWER = tl.constexpr(1 - 2.0**-21)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
_FRACTION = tl.constexpr((1 << 23) - 1)  # those of an fp32 number's fraction
_REST = tl.constexpr(-(1 << 23))  # its sign and exponent


@aggregate
class Scale:
    """Factors from raw scores to log2 units.

    The compiler makes one instruction of product and difference in ``s * scale - maximum``. It does not round the product, so the
    largest score's exponent is not 0 but what was rounded off its maximum: beyond ``huge`` more bits than P's format holds, in the
    end more than fp32's exponent holds. A row whose maximum is so large is scaled by a power of two instead, which rounds nothing:
    scores that differ then differ by many bits (8 with HUGE), so P is 1 at the maximum and 0 (nearly) elsewhere under either
    factor. The coarse factor is the larger one, so maxima of two blocks keep their order where one is huge and one is not.
    """

    fine: tl.tensor  # sm_scale * log2(e), of either sign, never 0
    coarse: tl.tensor  # the least power of two that is not smaller in size, of the same sign
    huge: tl.constexpr  # size of a maximum in log2 units up to which ``fine`` is used
    raw: tl.constexpr  # compare raw maxima with a limit: none waits for a second product, and one number more is kept

    @triton.jit
    def is_huge(self, extreme):
        """Return whether rows are scaled by ``coarse``, [M]. ``extreme``: raw, the largest score times the sign.

        With ``raw`` the limit is lower by the roundings on the way, so no row scaled by ``fine`` has a maximum beyond ``huge``.
        """
        if self.raw:
            return tl.abs(extreme) > tl.abs(self.huge * _LOWER / self.fine)
        else:
            return tl.abs(extreme * self.fine) > self.huge

    @triton.jit
    def of_rows(self, extreme):
        """Return (maximum in log2 units, factor of this block's scores), [M] each, of raw extremes as in :meth:`is_huge`."""
        factor = tl.where(self.is_huge(extreme), self.coarse, self.fine)
        return extreme * factor, factor

    @triton.jit
    def lse(self, row_max, row_sum):
        """Return the natural log-sum-exp of rows; log2(0) makes it -inf for a row without keys."""
        lse = (row_max + tl.math.log2(row_sum)) * LN_2
        bits = self.fine.to(tl.int32, bitcast=True) - self.coarse.to(tl.int32, bitcast=True) + _ONE
        ratio = bits.to(tl.float32, bitcast=True)  # fine / coarse, exactly: only exponents differ
        return tl.where(tl.abs(row_max) > self.huge, lse * ratio, lse)


@triton.jit
def scale_of(fine, RAW: tl.constexpr):
    """Return the Scale of a factor from raw scores to log2 units; RAW: see there."""
    bits = fine.to(tl.int32, bitcast=True)
    coarse = ((bits + _FRACTION) & _REST).to(tl.float32, bitcast=True)  # a fraction carries into the exponent
    return Scale(fine, coarse, HUGE, RAW)


@triton.jit
def softmax_step(scores, row_max, row_sum, scale, MAY_BE_EMPTY: tl.constexpr, NEGATIVE: tl.constexpr = False):
    """Take the raw scores [M, N] of one more key block into the running maximum and sum [M].

    Returns (p, row_max, row_sum, alpha): p = exp2(scores * factor - row_max) fp32, and alpha, by which whatever was accumulated
    under the old maximum must be multiplied. With MAY_BE_EMPTY a row may have had no key so far (its maximum is -inf); it then
    stays at p = 0. ``scale``: a :class:`Scale`, positive, or negative with NEGATIVE: then the largest scaled score is the
    smallest raw one.
    """
    if NEGATIVE:
        block_max, factor = scale.of_rows(tl.min(scores, 1))
    else:
        block_max, factor = scale.of_rows(tl.max(scores, 1))
    new_max = tl.maximum(row_max, block_max)
    shift = new_max
    if MAY_BE_EMPTY:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * factor[:, None] - shift[:, None])
    alpha = tl.math.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    return p, new_max, row_sum, alpha


@triton.jit
def softmax_end(acc, row_max, row_sum, scale):
    """Return (out, lse): acc divided by its row's sum, and the natural log-sum-exp; 0 and -inf for a row without keys."""
    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc * inverse[:, None], scale.lse(row_max, row_sum)
