"""Say what a wrong result looks like: the right one times a number, moved, rounded, at other places. It names no expected number.

A learner whose mistake nobody foresaw still reads more than a place and a size.
"""

from __future__ import annotations

import math

import numpy as np

_FEWEST = 4  # wrong numbers: with fewer, many patterns fit by chance
_NAMED = {math.log2(math.e): "log2(e)", math.log(2): "ln 2", 0.5: "one half", math.sqrt(2): "the root of 2"}
_PLAIN = (-1.0, 2.0, 4.0, 8.0, 0.5, 0.25, 0.125)  # factors by which one number alone is told to be off
_ROUNDED = 2.0**-7  # relative: bf16 rounds by at most 2**-9, and sums of a few such errors stay below this


def symptom(numbers: np.ndarray, right: np.ndarray, bad: np.ndarray, tol: float) -> str:
    """Return a sentence about the pattern of the wrong numbers, "" if none fits.

    Args:
        numbers: what the answer returned; ``right``: the reference of the same shape; ``bad``: where they differ.
        tol: relative to the largest number, what counts as equal.
    """
    if numbers.ndim == 0 or bad.sum() < _FEWEST or "b" in (numbers.dtype.kind, right.dtype.kind):
        return ""
    got, want = numbers[bad].astype(float), right[bad].astype(float)
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return ""
    near = max(16 * tol, 1e-6) * max(1e-30, float(np.abs(np.concatenate([got, want])).max()))
    if np.abs(got).max() == 0:
        return " All of these are 0."
    return _constant(got, want, near) or _elsewhere(got, want, near) or _fewer_bits(numbers, right, bad)


def multiple(number: np.ndarray, right: np.ndarray) -> str:
    """Return a sentence if one number is the right one with the wrong sign, or times a small power of two; else ""."""
    if (
        "b" in (number.dtype.kind, right.dtype.kind)
        or not right
        or not np.isfinite([float(number), float(right)]).all()
    ):
        return ""
    factor = next((f for f in _PLAIN if math.isclose(float(number), f * float(right), rel_tol=1e-9)), None)
    if factor is None:
        return ""
    return " It has the wrong sign." if factor < 0 else f" It is {factor:g} times what it must be."


def _constant(got: np.ndarray, want: np.ndarray, near: float) -> str:
    """Return a sentence if all numbers are off by one factor, or by one summand."""
    if np.ptp(want) <= near:  # constant: a factor and a summand cannot be told apart
        return ""
    factor = float(got @ want / (want @ want))
    if np.abs(got - factor * want).max() <= near and abs(factor) > 1e-6:
        if abs(factor + 1) < 1e-3:
            return " They have the wrong sign."
        known = next((f", {name}," for value, name in _NAMED.items() if abs(factor / value - 1) < 1e-4), "")
        return f" They are {factor:.4g}{known} times what they must be."
    moved = got - want
    if np.ptp(moved) <= near:
        return f" Each is {abs(moved.mean()):.4g} too {'large' if moved.mean() > 0 else 'small'}."
    return ""


def _elsewhere(got: np.ndarray, want: np.ndarray, near: float) -> str:
    """Return a sentence if the numbers are the right ones in another order."""
    if np.abs(np.sort(got) - np.sort(want)).max() <= near and len(np.unique(want)) > _FEWEST:
        return " The numbers are right, but they stand at wrong places."
    return ""


def _fewer_bits(numbers: np.ndarray, right: np.ndarray, bad: np.ndarray) -> str:
    """Return a sentence if the errors are small everywhere, of both signs, as roundings are."""
    if numbers.dtype.kind != "f" or bad.mean() < 0.5:
        return ""
    error = (numbers - right)[np.isfinite(right)]
    largest = float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
    if np.abs(error).max() > _ROUNDED * largest or abs(error.mean()) > 0.5 * np.abs(error).mean():
        return ""
    return (
        " Errors this small, of both signs, come from a rounding to fewer bits on the way (bf16, fp16, TF32),"
        " or from a factor inside that is slightly off."
    )
