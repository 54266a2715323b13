"""Products that go into a sum unrounded, as a GPU's compiler computes them: the option `contract`.

x * y + z is one instruction there, a fused multiply-add: the product is exact and the sum rounded once. Whatever else uses the
product gets it rounded. So in a launch that contracts, an fp32 product has its exact value in addition to its data (two fp32
factors have 48 bits, float64 has 53), operations that only move lanes take it along, and a sum or a difference uses it. Of two
products in one sum the left one goes in unrounded. Assignments, calls and loops are seen through; selects and memory are not.
"""

import numpy as np
import triton.language as tl

from ..counting import Active
from .mathlib import rounded_once
from .tensor import Scalar, Tensor, make, scalar


def exact_product(a, b):
    """Return the exact product of two fp32 values, float64."""
    return np.multiply(a.data, b.data, dtype=np.float64)


def rounded(value):
    """Return a value that is no product any more, for functions that take blocks apart."""
    return value if value.exact is None else make(value.data, value.dtype, None, value.undefined)


def added(a, b, negative):
    """Return a + b, or a - b if ``negative``, of two fp32 values of which one is an exact product at least."""
    x, y = (a.exact, b.data) if a.exact is not None else (a.data, b.exact)
    return rounded_once(np.asarray(x, np.float64), np.negative(y, dtype=np.float64) if negative else y)


def sum_in_pairs(exact, data, axis):
    """Return neighbors along an axis of even extent added up, [..., extent / 2]: the later product goes in unrounded.

    What a thread does that adds up products of its own.
    """
    odd, even = (np.moveaxis(x, axis, -1) for x in (exact, data))
    return np.moveaxis(rounded_once(odd[..., 1::2], even[..., 0::2].astype(np.float64)), -1, axis)


def move(function, operands, result):
    """Let the exact values of products go the way of lanes that ``function`` only moves, repeats or picks."""
    if all(getattr(o, "exact", None) is None for o in operands):
        return
    counts, Active.counts = Active.counts, None
    try:
        moved = function(*[_exactly(o) for o in operands])
    finally:
        Active.counts = counts
    results, values = (result, moved) if isinstance(result, tuple) else ((result,), (moved,))
    for one, value in zip(results, values):
        one.exact = value.data


def _exactly(operand):
    """Return a value of float64 with an operand's exact value: its own where it was no product."""
    if not isinstance(operand, Tensor):
        return operand
    data = operand.data if operand.exact is None else operand.exact
    if isinstance(operand, Scalar):
        return scalar(float(data), tl.float64)
    return make(np.asarray(data, np.float64), tl.float64)
