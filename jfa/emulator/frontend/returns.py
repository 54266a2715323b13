"""One type for all that a function returns: the compiler looks at every `return`, at those that are not reached as well.

Where the types differ it refuses the function. Constants that differ become run-time values, and of tuples of several lengths the
shortest counts. Where the function ends without a `return`, its result is undefined.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import triton.language as tl

from ..context import context
from ..locations import here
from ..undefined import MARK, mark
from . import branches
from .tensor import Hooks, Tensor, fix, literal, make

_NUMBERS = (bool, int, float)


class Constant:
    """The type of what the compiler knows: its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.value == other.value

    __hash__ = None

    def __str__(self) -> str:
        return f"a constexpr {self.value!r}"


class Tuple:
    """The types of a tuple's elements, and the tuple's class where its elements have names."""

    def __init__(self, elements: list[Any], fields: type | None) -> None:
        self.elements, self.fields = elements, fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuple) and (self.elements, self.fields) == (other.elements, other.fields)

    __hash__ = None

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.elements))})"


def common_type(bodies: tuple, variables: dict[str, Any]) -> Any:
    """Return the type that all values have that a function returns with these arguments, None where it is not known.

    Raises AssertionError or TypeError as the compiler does, at the first `return` that does not fit those before it.
    """
    known, (body,) = context.launch.returned, bodies
    key = id(body), tuple((name, _key(value)) for name, value in variables.items())
    if key not in known:
        found = branches.returned_by(body, variables, sys._getframe(1).f_globals)
        known[key] = None if any(value is branches.Unknown for value, _ in found) or not found else _reduced(found)
    return known[key]


def _reduced(found: list[tuple[Any, int]]) -> Any:
    common, *others = ((_type(value), line) for value, line in found)
    common, seen = common[0], [str(common[0])]
    for other, line in others:
        seen.append(str(other))
        try:
            common = _common(common, other, f"Note all return types were: [{', '.join(seen)}]")
        except (AssertionError, TypeError) as error:
            error.kernel_line = line
            raise
    return common


def returned(value: Any, common: Any) -> Any:
    """Return a value that a function returns as one of the type of all that it returns."""
    return value if common is None else _cast(value, common)


def returned_nothing(common: Any) -> Any:
    """Return the result of a function that ends without a `return`: an undefined value of the type that it returns elsewhere."""
    return None if common is None else _undefined(common)


# ---- types


def _key(value: Any) -> Any:
    """Return what tells the types of arguments apart."""
    if isinstance(value, Tensor):
        return str(value.type)
    if isinstance(value, tuple | tl.tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, (*_NUMBERS, str, tl.dtype)):
        return type(value), str(value)
    return getattr(value, "compiled_type", None) or id(value)


def _type(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.type
    if isinstance(value, tuple | tl.tuple):
        fields = value.type.fields if isinstance(value, tl.tuple) else getattr(value, "_fields", None)
        return Tuple([_type(v) for v in value], fields)
    if isinstance(value, tl.core.base_value) and not isinstance(value, tl.constexpr):
        return getattr(value, "compiled_type", None) or type(value).__name__
    return Constant(tl.core._unwrap_if_constexpr(value))


def _common(a: Any, b: Any, note: str) -> Any:
    if isinstance(a, Tuple):
        _require(isinstance(b, Tuple) and a.fields == b.fields, a, b, note)
        return Tuple([_common(x, y, note) for x, y in zip(a.elements, b.elements)], a.fields)
    if isinstance(a, Constant) or isinstance(b, Constant):
        if a == b:
            return a
        a, b = map(_run_time, (a, b))
    _require(a == b, a, b, note)
    return a


def _require(fits: bool, a: Any, b: Any, note: str) -> None:
    if not fits:
        raise AssertionError(f"Return type mismatch: {a} and {b}. {note}")


def _run_time(kind: Any) -> Any:
    """Return the type of a value once it is a run-time value."""
    if isinstance(kind, tl.dtype):
        return kind
    value = kind.value if isinstance(kind, Constant) else kind
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"cannot convert {value} of type {type(value)} to tensor")
    return literal(value).type


# ---- values


def _cast(value: Any, kind: Any) -> Any:
    if isinstance(kind, Tuple) and not isinstance(value, tl.tuple):
        elements = [_cast(v, k) for v, k in zip(value, kind.elements)]
        return type(value)(*elements) if kind.fields else type(value)(elements)
    if isinstance(kind, tl.dtype) and not isinstance(value, Tensor):
        return fix(Hooks.semantic.scalar_constant(tl.core._unwrap_if_constexpr(value), kind))
    return value


def _undefined(kind: Any) -> Any:
    if isinstance(kind, Tuple):
        return tuple(map(_undefined, kind.elements))
    if isinstance(kind, Constant):
        return kind.value
    if not isinstance(kind, tl.dtype):
        return None
    shape = tuple(map(int, kind.shape)) if kind.is_block() else ()
    origin = mark("no return", here()) if context.launch.follows_undefined else None
    zero = literal(0).to(kind.scalar)
    data = np.full(shape, zero.value, zero.data.dtype)
    return make(data, zero.dtype, undefined=None if origin is None else np.full(shape, origin, MARK))
