"""Compare what an answer returned with the reference, and say in one sentence where and how they differ.

Sentences name places and sizes, never the expected numbers: a message should point at the mistake, not give the answer
away.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from jfa.course import kinds
from jfa.course.precision import rounding_errors
from jfa.course.spec import Case, Exercise, Output
from jfa.course.symptom import multiple, symptom
from jfa.course.wire import Other


def structure_fault(value: Any, reference: Any, outputs: tuple[Output, ...], printed: str = "") -> str | None:
    """Return what is wrong with the kind of thing returned (None, a wrong type, too few values), or None."""
    if value is None and reference is not None:
        hint = f" It printed {_quote(printed)}, but printing is not returning." if printed.strip() else ""
        return f"It returned None: the last line must be `return ...`.{hint}"
    if isinstance(reference, tuple | list):
        return _sequence_fault(value, reference, outputs)
    if isinstance(reference, dict):
        if not isinstance(value, dict):
            return f"It returned {kind_of(value)}; a dict with the keys {', '.join(map(repr, reference))} is asked for."
        if set(value) != set(map(str, reference)):
            return f"The dict's keys are {sorted(value)}; asked for: {sorted(map(str, reference))}."
        return None
    if isinstance(value, tuple | list) and len(value) == 1:
        return f"It returned a {type(value).__name__} holding one value; return the value itself (a comma too many?)."
    return _leaf_type_fault(value, reference, outputs[0].name)


def _sequence_fault(value: Any, reference: tuple | list, outputs: tuple[Output, ...]) -> str | None:
    named = len(outputs) == len(reference) and len(outputs) > 1
    wanted = ", ".join(o.name for o in outputs) if named else f"a {type(reference).__name__} of {len(reference)}"
    if not isinstance(value, tuple | list):
        return f"It returned {kind_of(value)}; asked for: {wanted}."
    if len(value) != len(reference):
        return f"It returned {len(value)} value{'s' * (len(value) != 1)}; asked for: {wanted}."
    for name, got, want in zip(
        [o.name for o in outputs] if named else _indexed(outputs[0].name, len(reference)), value, reference
    ):
        fault = _leaf_type_fault(got, want, name)
        if fault:
            return fault
    return None


def _indexed(name: str, count: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(count)]


def _leaf_type_fault(got: Any, want: Any, name: str) -> str | None:
    if isinstance(want, tuple | list):
        if not isinstance(got, tuple | list):
            return f"{name} is {kind_of(got)}; a {type(want).__name__} is asked for."
        if len(got) != len(want):
            return f"{name} has {len(got)} entries instead of {len(want)}."
        return next(
            (f for g, w, n in zip(got, want, _indexed(name, len(want))) if (f := _leaf_type_fault(g, w, n))), None
        )
    if isinstance(want, torch.Tensor) and not isinstance(got, torch.Tensor):
        return f"{name} is {kind_of(got)}; a torch tensor is asked for."
    if isinstance(want, np.ndarray) and not isinstance(got, np.ndarray):
        return f"{name} is {kind_of(got)}; a numpy array is asked for."
    if isinstance(want, str) and not isinstance(got, str):
        return f"{name} is {kind_of(got)}; a string is asked for."
    if isinstance(want, bool | int | float) and _number(got) is None:
        return f"{name} is {kind_of(got)}; a number is asked for."
    return None


def kind_of(value: Any) -> str:
    """Return a value's kind in words: "a list of 3", "a tensor [5, 2] of float32"."""
    if value is None:
        return "None"
    if isinstance(value, Other):
        return f"a {value.type_name}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {'(nested)' if value.is_nested else list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"a numpy array {list(value.shape)} of {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return {"str": "a string", "int": "an int", "bool": "a bool", "float": "a float", "dict": "a dict"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def leaves(value: Any, reference: Any, outputs: tuple[Output, ...]) -> Iterator[tuple[str, Any, Any, Output]]:
    """Yield (name, got, wanted, its Output) for every tensor or number of a result whose structure is right."""
    if isinstance(reference, tuple | list):
        named = len(outputs) == len(reference) and len(outputs) > 1
        for i, (got, want) in enumerate(zip(value, reference)):
            output = outputs[i] if named else outputs[0]
            name = output.name if named else f"{output.name}[{i}]"
            yield from leaves(got, want, (Output(name, output.axes, output.dtype, output.may_alias, output.tol),))
    elif isinstance(reference, dict):
        for key, want in reference.items():
            output = next((o for o in outputs if o.name == key), outputs[0])
            yield f"{key}", value[str(key)], want, output
    else:
        yield outputs[0].name, value, reference, outputs[0]


def form_fault(name: str, got: Any, want: Any, output: Output, fact: dict) -> str | None:
    """Return what is wrong with one returned value's shape, dtype, device, or memory, or None."""
    if output.dtype == "int" and (numbers := _numbers(got)) is not None and numbers.dtype.kind == "f":
        return f"{name} is {kind_of(got)}; a whole number is asked for."
    if not isinstance(want, torch.Tensor | np.ndarray) or getattr(want, "is_nested", False):
        return None
    if tuple(got.shape) != tuple(want.shape):
        return f"{name} has shape {list(got.shape)} instead of {list(want.shape)}.{_shape_hint(got, want)}"
    if output.dtype and _dtype_name(got) != output.dtype:
        return f"{name} is {_dtype_name(got)}; {output.dtype} is asked for."
    if _kind(got) != _kind(want):
        return f"{name} is {_dtype_name(got)}: {_article(_kind(want))} dtype is asked for."
    if fact.get("device", "cpu") != "cpu":
        return f"{name} is on device {fact['device']!r}; the inputs are on 'cpu', and so must the result be."
    if fact.get("shared") and not output.may_alias:
        return f"{name} is a view of one of the inputs: it shares its memory. Return a tensor of its own."
    return None


def _shape_hint(got: Any, want: Any) -> str:
    if sorted(got.shape) == sorted(want.shape):
        return " The axes are in another order."
    if math.prod(got.shape) == math.prod(want.shape):
        return " The number of elements is right, their arrangement is not."
    return ""


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def nan_fault(name: str, got: Any, want: Any, output: Output, case: Case) -> str | None:
    """Return a sentence if the value holds NaN where the reference does not."""
    numbers, right = _numbers(got), _numbers(want)
    if numbers is None or right is None or numbers.dtype.kind != "f" or numbers.shape != right.shape:
        return None
    bad = np.isnan(numbers) & ~np.isnan(right)
    if not bad.any():
        return None
    return (
        f"{name} holds NaN at {place(_first(bad), output, case)}{_spread(bad, output, case)}."
        f"{_never_stored(got, bad) or _origin_of_nan(case)}"
    )


def _origin_of_nan(case: Case) -> str:
    """Return a sentence about where a NaN can come from: out of the inputs, or from the arithmetic."""
    given = [_numbers(x) for x in (*case.args, *case.kwargs.values()) if isinstance(x, torch.Tensor | np.ndarray)]
    if any(x is not None and x.dtype.kind == "f" and np.isnan(x).any() for x in given):
        return (
            " Some rows of the inputs are NaN on purpose, and a product with 0 does not remove one: select, or do not load."
            " Else it comes from inf - inf, 0 / 0 or 0 * inf."
        )
    return " No input is NaN: it comes from inf - inf, 0 / 0 or 0 * inf, or from memory where nothing was stored yet."


def _never_stored(got: Any, bad: np.ndarray) -> str:
    """Return a sentence if NaN is where nothing was ever written: the launch filled memory with NaN of a kind of its own."""
    untouched = kinds.is_unwritten(got)
    if untouched is None or not (bad & untouched).any():
        return ""
    return (
        " Nothing was ever stored there."
        if untouched[bad].all()
        else " To some of these places nothing was ever stored."
    )


def value_fault(
    name: str, got: Any, want: Any, output: Output, case: Case, tol: float, error: float = 0.0
) -> str | None:
    """Return a sentence saying where the value differs from the reference and by how much, or None.

    Allowed is ``tol`` relative to max(1, max |want|), or ``error``, absolute, where that is more.
    """
    if isinstance(want, str):
        return None if got == want else f"{name} is {_quote(got)}, which is not right."
    if want is None:
        return None if got is None else f"{name} should be None."
    if getattr(want, "is_nested", False):
        return _nested_fault(name, got, want, output, case, tol)
    numbers, right = _numbers(got), _numbers(want)
    if numbers is None or right is None or numbers.shape != right.shape:
        return f"{name} is {kind_of(got)}, which cannot be compared."
    bad = mismatch(numbers, right, output.tol or tol, error)
    if not bad.any():
        return None
    if numbers.ndim == 0:
        return f"{name} is {_show(numbers[()])}, which is not right{_off_by(numbers, right, bad)}.{multiple(numbers, right)}"
    first = _first(bad)
    return (
        f"{name} is wrong at {place(first, output, case)}: you have {_show(numbers[first])}{_off_by(numbers, right, bad)}"
        f"{_spread(bad, output, case)}.{symptom(numbers, right, bad, output.tol or tol)}"
    )


def _nested_fault(name: str, got: Any, want: Any, output: Output, case: Case, tol: float) -> str | None:
    if not isinstance(got, torch.Tensor) or not got.is_nested:
        return f"{name} is {kind_of(got)}; a nested tensor is asked for."
    mine, right = got.unbind(), want.unbind()
    if len(mine) != len(right):
        return f"{name} holds {len(mine)} sequences instead of {len(right)}."
    for i, (g, w) in enumerate(zip(mine, right)):
        if g.shape != w.shape:
            return f"sequence {i} of {name} has shape {list(g.shape)} instead of {list(w.shape)}."
        fault = value_fault(f"sequence {i} of {name}", g, w, Output(name, output.axes[1:]), Case(case.name), tol)
        if fault:
            return fault
    return None


def mismatch(numbers: np.ndarray, right: np.ndarray, tol: float, error: float = 0.0) -> np.ndarray:
    """Return True where numbers differ: integers at all, others by more than :func:`value_fault` allows; infinities must agree."""
    if right.dtype.kind in "biu" and numbers.dtype.kind in "biu":
        return numbers != right
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(right)
        scale = max(1.0, float(np.abs(right[finite]).max(initial=0.0)))
        close = np.abs(numbers - right) <= max(tol * scale, error)
        same = (numbers == right) | (np.isnan(numbers) & np.isnan(right))
    return ~((close & finite) | same)


def place(index: tuple[int, ...], output: Output, case: Case) -> str:
    """Return an index in the exercise's words: "sequence 1, row 4, head 0"."""
    axes = output.axes + tuple(f"axis {i}" for i in range(len(output.axes), len(index)))
    return ", ".join(_coordinate(axis, i, case) for axis, i in zip(axes, index)) or "its only value"


def _coordinate(axis: str, i: int, case: Case) -> str:
    if axis == "token" and case.offsets is not None:
        sequence = _sequence_of(i, case.offsets)
        inside = 0 <= sequence < len(case.offsets) - 1
        row = i - case.offsets[sequence] if inside else i
        return f"sequence {sequence}{_label(case, sequence)}, row {row}" if inside else f"row {row} (of no sequence)"
    if axis in ("sequence", "row"):
        return f"{axis} {i}{_label(case, i)}"
    return f"{axis} {i}" if not axis.startswith("axis ") else f"index {i} of {axis}"


def _label(case: Case, i: int) -> str:
    return f" ({case.labels[i]})" if i < len(case.labels) else ""


def _sequence_of(row: int, offsets: tuple[int, ...]) -> int:
    return bisect_right(list(offsets), row) - 1


def _spread(bad: np.ndarray, output: Output, case: Case) -> str:
    """Return how far the fault reaches: which sequences and which heads, the rest right."""
    if bad.ndim == 0 or bad.sum() == 1:
        return ""
    parts = []
    for axis, label in enumerate(output.axes[: bad.ndim]):
        hit = np.flatnonzero(bad.any(axis=tuple(i for i in range(bad.ndim) if i != axis)))
        if label == "token" and case.offsets is not None:
            sequences = sorted({_sequence_of(int(i), case.offsets) for i in hit})
            lengths = np.diff(np.asarray(case.offsets))
            parts.append(_these("sequence", sequences, int((lengths > 0).sum())))
        elif label in ("head", "row", "sequence", "column", "query", "key", "tile"):
            parts.append(_these(label, [int(i) for i in hit], bad.shape[axis]))
    return f" (wrong: {'; '.join(parts)})" if parts else f" ({int(bad.sum())} of {bad.size} values are wrong)"


def _these(label: str, which: list[int], total: int) -> str:
    if len(which) == total and total > 1:
        return f"every {label}"
    shown = ", ".join(map(str, which[:6])) + (", …" if len(which) > 6 else "")
    many = "queries" if label == "query" else f"{label}s"
    return f"{label if len(which) == 1 else many} {shown}"


def _first(bad: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(bad)[0])


def _off_by(numbers: np.ndarray, right: np.ndarray, bad: np.ndarray) -> str:
    """Return ", off by 0.5": by up to that if several numbers are wrong."""
    if numbers.dtype.kind == "b":
        return ""
    with np.errstate(invalid="ignore"):
        error = np.abs(numbers[bad].astype(float) - right[bad].astype(float))
    finite = error[np.isfinite(error)]
    if not finite.size:
        return ""
    return f", off by {'up to ' if bad.sum() > 1 else ''}{finite.max():.3g}"


def _show(number: Any) -> str:
    return f"{float(number):.4g}" if isinstance(number, float | np.floating) else str(number)


def _numbers(value: Any) -> np.ndarray | None:
    """Return a value as a numpy array: float64 for floats, integers and bools as they are; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.is_complex():
            return None
        value = value.detach().to(torch.float64).numpy() if value.is_floating_point() else value.detach().numpy()
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.asarray(value)
        return array.astype(np.float64) if array.dtype.kind == "f" else array if array.dtype.kind in "biu" else None
    return None


def _number(value: Any) -> float | int | bool | None:
    array = _numbers(value)
    return None if array is None or array.size != 1 or array.ndim > 0 else array[()]


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        floating, boolean = value.is_floating_point(), value.dtype == torch.bool
        return "floating" if floating else "bool" if boolean else "complex" if value.is_complex() else "integer"
    return {"f": "floating", "b": "bool", "c": "complex"}.get(value.dtype.kind, "integer")


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _quote(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return repr(line if len(line) <= 60 else line[:60] + "…")


def bits_fault(exercise: Exercise, case: Case, value: Any, again: list) -> str | None:
    """Return a sentence about the first schedule under which the answer returned other numbers than at first, or None."""
    for (policy, seed), other in zip(exercise.schedules, again):
        order = f"With the programs in another order (schedule {policy!r}, seed {seed})"
        if structure_fault(other, value, exercise.outputs):
            return f"{order} it returned {kind_of(other)}."
        for name, got, first, output in leaves(other, value, exercise.outputs):
            numbers, right = _numbers(got), _numbers(first)
            if numbers is None or right is None or numbers.shape != right.shape:
                return f"{order}, {name} is {kind_of(got)}."
            bad = (numbers != right) & ~((numbers != numbers) & (right != right))
            if bad.any():
                return f"{order}, {name} differs at {place(_first(bad), output, case)}{_off_by(numbers, right, bad)}."
    return None


def fault_of(exercise: Exercise, case: Case, event: dict, reference: Any) -> tuple[str, str] | None:
    """Return (check, sentence) of the first thing wrong with one returned value: "returns" or "values"; None if all is right."""
    value = event.get("value")
    fault = structure_fault(value, reference, exercise.outputs, event.get("printed", ""))
    if fault:
        return "returns", fault
    items = list(leaves(value, reference, exercise.outputs))
    facts = event.get("facts", [])
    for i, (name, got, want, output) in enumerate(items):
        fault = form_fault(name, got, want, output, facts[i] if i < len(facts) and isinstance(facts[i], dict) else {})
        if fault:
            return "returns", fault
    for name, got, want, output in items:
        fault = nan_fault(name, got, want, output, case)
        if fault:
            return "returns", fault
    fault = next((f for name, *rest in items if (f := value_fault(name, *rest, case, exercise.tol))), None)
    if fault is None:
        return None
    errors = rounding_errors(exercise, case, [want for _, _, want, _ in items])
    faults = (value_fault(name, *rest, case, exercise.tol, error) for (name, *rest), error in zip(items, errors))
    fault = next((f for f in faults if f), None)
    return ("values", fault) if fault else None


_SMALL = 12  # numbers: what a reader takes in at a glance


def example(exercise: Exercise, case: Case, value: Any, reference: Any) -> str:
    """Return a small case in full: input, value, right value; "" where they are not small or would be the answer itself."""
    if exercise.kind == "value" or not case.args + tuple(case.kwargs):
        return ""
    named = [*zip(inspect.signature(exercise.reference).parameters, case.args), *case.kwargs.items()]
    parts = [_written([v for _, v in named]), _written(value), _written(reference)]
    if not all(parts) or sum(_count(v) for _, v in named) > _SMALL or max(_count(value), _count(reference)) > _SMALL:
        return ""
    given = ", ".join(f"{name} = {_written(v)}" for name, v in named)
    return f"Input: {given}. Yours: {parts[1]}. Right: {parts[2]}."


def _count(value: Any) -> int:
    """Return how many numbers or texts a value holds; tensors count in full."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return math.prod(value.shape)
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, tuple | list) else 1


def _written(value: Any) -> str:
    """Return a value as a reader would write it: numbers to five digits; "" for what cannot be written so."""
    if isinstance(value, torch.Tensor):
        return "" if value.is_nested or value.is_complex() else _written(value.detach().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return _written(value.tolist())
    if isinstance(value, dict):
        parts = [(k, _written(v)) for k, v in value.items()]
        return "{" + ", ".join(f"{k}: {v}" for k, v in parts) + "}" if all(v for _, v in parts) else ""
    if isinstance(value, tuple | list):
        parts = [_written(v) for v in value]
        brackets = "()" if isinstance(value, tuple) else "[]"
        return brackets[0] + ", ".join(parts) + brackets[1] if all(parts) else ""
    if isinstance(value, bool | int | str | None.__class__):
        return repr(value)
    return f"{value:.5g}" if isinstance(value, float) else ""
