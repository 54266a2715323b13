"""The running maximum of the MXFP8 forward, in base 2: whole numbers, so that P rounds the same whatever the order of blocks."""

import triton
import triton.language as tl

from jfa.kernels.blackwell.softmax import split_columns

# at least 4 apart: below it a maximum is off by fewer bits than e4m3 has to spare
HUGE_MXFP8 = tl.constexpr(float(1 << 26))
# of a row's base, which exceeds its maximum by a margin and roundings
HUGE_BASE = tl.constexpr(HUGE_MXFP8.value + 64)

HALF_ULP = tl.constexpr(2.0**-24)  # of an fp32 number, relative, at most


@triton.jit
def integer_maximum(scores, row_base, scale, ROOM: tl.constexpr, MARGIN: tl.constexpr):
    """Return (base to use from now on, factor for what was accumulated under the old one, this block's scale), each [M].

    For a P that is then rounded to few bits: 2**(s - base) never exceeds 2**ROOM. A base is whole, so factors are powers of
    two. Scaled by one P rounds as before, so the result does not depend on the blocks in which the base was smaller: any order of
    blocks gives it. Where the base must grow it grows by MARGIN more, so that it will not have to again soon. Rows of huge scores
    (:class:`jfa.kernels.common.softmax.Scale`) take their maximum itself as base.
    """
    largest = tl.max(scores, 1)
    is_huge = scale.is_huge(largest)
    top, row_scale = scale.of_rows(largest)
    whole = tl.math.ceil(top + tl.abs(top) * HALF_ULP)  # not below the true product
    grown = tl.where(is_huge, top, whole + (MARGIN - ROOM))
    grown = tl.where(tl.where(is_huge, top, whole) > row_base + ROOM, grown, row_base)
    return grown, tl.math.exp2(row_base - grown), row_scale


@triton.jit
def fold_columns(x, COLUMNS: tl.constexpr):
    """Return a block [M, COLUMNS] with the row sums of x [M, N]: halves are added to each other, as x's elements get ready."""
    if x.shape[1] == COLUMNS:
        return x
    else:
        left, right = split_columns(x, 2)
        return fold_columns(left + right, COLUMNS)
