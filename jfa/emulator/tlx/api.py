"""Helpers of all modules here: how a TLX function reads its arguments and reports a mistake.

A function marked `@api` is what a kernel calls. Mistakes that the compiler would refuse (an assertion, a ValueError or
TypeError in TLX's own Python) become Triton's CompilationError with the kernel's line, as on a GPU; errors of the
emulated machine pass through unchanged.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import triton.language as tl
from triton.compiler.errors import CompilationError

from .. import errors
from ..context import context
from ..frontend import values
from ..frontend.carry import carry, itself, rule_of
from ..frontend.explain import advice
from ..locations import here

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.tasks import Task


Value = Any
"""What a kernel hands over: a block, a scalar, a constexpr or a Python value."""

LEFT_OUT: Any = object()
"""The default of optional parameters whose explicit None the compiler refuses: to TLX's Python it is a constexpr, not None."""

F = TypeVar("F", bound=Callable)

_constexpr = tl.constexpr
_REFUSED = (AssertionError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError, KeyError)


def running() -> Task:
    """Return the running task."""
    task = context.launch.task
    if task is None:
        raise RuntimeError("TLX functions run inside a kernel only: launch it with kernel[grid](...)")
    return task


def api(function: F) -> F:
    """Mark a function that kernels call. Its result is undefined where an argument is, unless `carries` says better."""

    rule = rule_of(function)
    carries_marks = rule is not itself

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            if context.launch.has_undefined and carries_marks and result is not None:
                carry(rule, function, (*args, *kwargs.values()), result)
            return result
        except (errors.EmulatorError, CompilationError):
            raise
        except _REFUSED as error:
            raise compilation_error(str(error), here()) from error

    vars(call)["takes_name"] = "_name" in inspect.signature(function).parameters  # of the variable it is assigned to
    return cast(F, call)


def wants_constants(**places: int) -> Callable[[F], F]:
    """Mark parameters, by name and position, of which the compiler reads the value of a constexpr and takes no plain number."""

    def decorate(function: F) -> F:
        vars(function)["constants"] = places
        return function

    return decorate


def compilation_error(message: str, where: Where) -> CompilationError:
    """Return Triton's own error with the line of the kernel."""
    line = linecache.getline(*where[0]) if where else ""
    node = ast.Pass()
    node.lineno, node.col_offset = 1, len(line) - len(line.lstrip())
    return CompilationError(
        line.rstrip("\n") or None,
        node,
        message + (f"\n(at {where[0][0]}:{where[0][1]})" if where else "") + advice(message),
    )


def plain(x: Value) -> Any:
    """Return a constexpr's value; anything else as it is."""
    return x.value if type(x) is _constexpr else x


def integer(x: Value) -> int:
    """Return a Python int from an int, constexpr or scalar of a kernel; a float is refused, as 4.0 for 4."""
    if type(x) is int:
        return x
    x = plain(x)
    if isinstance(x, float) or isinstance(x, tl.tensor) and not x.dtype.is_int():
        raise TypeError(f"an integer is needed, not {x!r}")
    return values.integer(x)


def integers(xs: Any) -> list[int]:
    return [integer(x) for x in plain(xs)]


def truth(x: Value) -> bool:
    return x if type(x) is bool else bool(values.scalar(x))


def predicate(x: Value) -> bool:
    """Return a `pred` argument: left out, or an int1 that the kernel computes."""
    if x is LEFT_OUT:
        return True
    if not isinstance(x, tl.tensor):
        raise AttributeError(f"`pred` must be a value that the kernel computes, not the constant {plain(x)!r}")
    if x.dtype.name != "int1":
        raise TypeError(f"`pred` must be an int1, such as n > 0, not {x.dtype}")
    return truth(x)


def constant(x: Value, name: str) -> Any:
    """Return a value that the compiler must know: refuse a run-time scalar."""
    x = plain(x)
    if isinstance(x, tl.tensor):
        raise ValueError(f"`{name}` must be a constexpr, got a value that is only known when the kernel runs")
    return x


def begin(kind: str, name: str) -> tuple[Task, Where, str | None]:
    """Start of an operation: (task, where, fault)."""
    task = running()
    where = here()
    fault = task.machine.scheduler.step(task, kind, name, where)
    return task, where, fault
