"""Known mistakes without their code: sketches of what each returns, for releases without solutions.

A sketch holds the form of a result and, of its numbers, a few weighted sums with fixed random weights. Equal results
have equal sums; different results have different sums almost surely. The code cannot be recovered from a sketch. Inputs
are those of seed 0, which a notebook's check() and ``jfa grade`` use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from jfa.course.spec import Case, Exercise, Mutant

SEED = 0
_SUMS = 6
_MOST = 8.0  # standard deviations by which the sums of equal results may differ
_STAND_INS = {"nan": 1.7, "posinf": 3.1e4, "neginf": -2.9e4}

Sketch = Any  # nested lists, dicts and numbers: what repr() writes and Python reads


def sketch(value: Any) -> Sketch:
    """Return the sketch of a returned value; raises TypeError for what no exercise asks for."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return ["nested", *(sketch(part) for part in value.unbind())]
        if value.is_complex():
            value = torch.view_as_real(value)
        kind = "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
        return _numbers("tensor", kind, value.detach().to(torch.float64).numpy())
    if isinstance(value, np.ndarray | np.generic):
        return _numbers("array", np.asarray(value).dtype.kind, np.asarray(value, dtype=np.float64))
    if isinstance(value, bool | str) or value is None:
        return ["plain", repr(value)]
    if isinstance(value, int | float):
        return _numbers("number", type(value).__name__, np.asarray(float(value)))
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(sketch, value)]
    if isinstance(value, dict):
        return {str(key): sketch(entry) for key, entry in value.items()}
    raise TypeError(f"no sketch of a {type(value).__name__}")


def _numbers(form: str, kind: str, numbers: np.ndarray) -> Sketch:
    flat = np.nan_to_num(numbers.reshape(-1), **_STAND_INS)
    scale = float(np.abs(flat).max(initial=1.0))
    weights = np.random.default_rng(len(flat)).standard_normal((_SUMS, len(flat)))
    sums = weights @ flat / math.sqrt(max(len(flat), 1))
    if not np.isfinite(sums).all():
        raise TypeError("no sketch of numbers beyond all measure")
    return [form, kind, list(numbers.shape), scale, [float(f"{s:.9g}") for s in sums]]


def alike(one: Sketch, other: Sketch, tol: float) -> bool:
    """Return whether two sketches may be of results that agree within ``tol`` relative to their largest number."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[k], other[k], tol) for k in one)
    if isinstance(one, list) and one[:1] == other[:1] and one and one[0] in ("tensor", "array", "number"):
        if one[1:3] != other[1:3]:
            return False
        allowed = (_MOST * tol + 1e-8) * max(one[3], other[3])
        return all(abs(a - b) <= allowed for a, b in zip(one[4], other[4], strict=True))
    if isinstance(one, list):
        return len(one) == len(other) and all(alike(a, b, tol) for a, b in zip(one, other, strict=True))
    return one == other


def sketches(exercise: Exercise, cases: Sequence[Case], run: Callable[[Mutant, Case], Any]) -> list[list[Sketch]]:
    """Return for each mutant of an exercise its sketch on each case, None where there is nothing to recognise.

    ``run(mutant, case)`` gives what the mutant returns; it may raise.
    """
    return [[_sketch_of(mutant, case, run) for case in cases] for mutant in exercise.mutants]


def _sketch_of(mutant: Mutant, case: Case, run: Callable[[Mutant, Case], Any]) -> Sketch:
    if case.raises or not mutant.recognise or mutant.caught_by == "runs":
        return None
    try:
        return sketch(run(mutant, case))
    except Exception:  # noqa: BLE001  a mutant may fail on this case: then it is not this mistake
        return None
