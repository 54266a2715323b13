"""Derive how far a right answer may be from fp64, from the arithmetic in which it computes, case by case.

A fixed tolerance is either too tight for scores of -30,000, where one rounding of a score moves a weight by 0.2 %, or
so wide that a result 1 % off passes. So the judge measures the reference itself: how far from fp64 is it when computed
in the answer's precision, and in fp64 from inputs that are one rounding away? An answer's error may be a small multiple
of that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jfa.course.spec import Case, Exercise

_ONE_ROUNDING = 2.0**-24  # relative, of fp32: kernels accumulate in it whatever the inputs' dtype


def reference_for(exercise: Exercise, case: Case) -> Any:
    """Return the right result of a case: the reference gets fresh copies, floating tensors in float64."""
    return exercise.reference(*_mapped(case.args, _upcast), **_mapped(case.kwargs, _upcast))


def rounding_errors(exercise: Exercise, case: Case, right: list[Any]) -> list[float]:
    """Return the absolute error that arithmetic alone explains, for each leaf of the right result, times the exercise's slack.

    Args:
        right: the leaves of ``reference_for(exercise, case)``, in order.
    """
    worst = [0.0] * len(right)
    for attempt in _attempts(exercise, case):
        for i, (found, want) in enumerate(zip(_leaves(attempt), right)):
            worst[i] = max(worst[i], _distance(found, want))
    return [exercise.slack * error for error in worst]


def _attempts(exercise: Exercise, case: Case) -> list[Any]:
    """Compute the result in the exercise's own model of the arithmetic, or else in fp32 and from inputs one rounding away."""
    if exercise.arithmetic is not None:
        return [exercise.arithmetic(*_mapped(case.args, _copy), **_mapped(case.kwargs, _copy))]
    found = []
    for change in (_accumulated, _Nudge()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(exercise.reference(*_mapped(case.args, change), **_mapped(case.kwargs, change)))
        except (RuntimeError, ValueError, TypeError, ArithmeticError):
            continue  # a reference that insists on fp64, say: the other attempt counts
    return found


class _Nudge:
    """Move every floating-point number by one rounding, up or down at random, in float64."""

    def __init__(self):
        self.draw = torch.Generator().manual_seed(1)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            signs = 2 * torch.randint(0, 2, value.shape, generator=self.draw) - 1
            return value.detach().to(torch.float64) * (1 + _ONE_ROUNDING * signs)
        return value * (1 + _ONE_ROUNDING) if type(value) is float else _copy(value)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if hasattr(value, "tobytes") else value


def _accumulated(value: Any) -> Any:
    """Return a copy in the precision that sums are kept in: fp32 for tensors of fewer bits."""
    copy = _copy(value)
    narrow = isinstance(copy, torch.Tensor) and copy.is_floating_point() and copy.element_size() < 4
    return copy.to(torch.float32) if narrow else copy


def _upcast(value: Any) -> Any:
    copy = _copy(value)
    return copy.to(torch.float64) if isinstance(copy, torch.Tensor) and copy.is_floating_point() else copy


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor, array or number in nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for v in value for leaf in _leaves(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    return [value]


def _distance(found: Any, want: Any) -> float:
    """Return the largest difference of two numeric leaves where both are finite; 0 for anything else."""
    a, b = _floats(found), _floats(want)
    if a is None or b is None or a.shape != b.shape:
        return 0.0
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)
    return float(error[np.isfinite(a) & np.isfinite(b)].max(initial=0.0))


def _floats(value: Any) -> np.ndarray | None:
    if isinstance(value, torch.Tensor):
        return None if value.is_nested or not value.is_floating_point() else value.detach().to(torch.float64).numpy()
    if isinstance(value, float):
        return np.asarray(value) if math.isfinite(value) else None
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else None
