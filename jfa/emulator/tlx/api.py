"""Shared by every module here: how a TLX function reads its arguments and reports a mistake.

A function marked `@api` is what a kernel calls. Mistakes that the compiler would refuse (an assertion, a ValueError or
TypeError in TLX's own
Python) become triton's CompilationError with the kernel's line, as on a GPU; what the machine finds passes through unchanged.
"""

from __future__ import annotations

import ast
import functools
import linecache

import triton.language as tl
from triton.compiler.errors import CompilationError

from .. import errors
from ..frontend import values
from ..frontend.carry import carry, itself, rule_of
from ..locations import here
from ..machine.running import Running
from ..undefined import Undefined

_constexpr = tl.constexpr
_REFUSED = (AssertionError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError, KeyError)


def running():
    """The running task."""
    task = Running.task
    if task is None:
        raise RuntimeError("TLX functions run inside a kernel only: launch it with kernel[grid](...)")
    return task


def api(function):
    """Mark a function that kernels call. Its result is undefined where an argument is, unless `carries` says better."""

    rule = rule_of(function)
    carries_marks = rule is not itself

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            result = function(*args, **kwargs)
            if Undefined.live and carries_marks and result is not None:
                carry(rule, function, (*args, *kwargs.values()), result)
            return result
        except (errors.EmulatorError, CompilationError):
            raise
        except _REFUSED as error:
            raise compilation_error(str(error), here()) from error

    call.takes_name = getattr(function, "takes_name", False)
    call.__jfa_api__ = True
    return call


def compilation_error(message, where) -> CompilationError:
    """Triton's own error with the line of the kernel."""
    line = linecache.getline(*where[0]) if where else ""
    node = ast.Pass()
    node.lineno, node.col_offset = 1, len(line) - len(line.lstrip())
    return CompilationError(
        line.rstrip("\n") or None, node, f"{message}" + (f"\n(at {where[0][0]}:{where[0][1]})" if where else "")
    )


def plain(x):
    """A constexpr's value; anything else as it is."""
    return x.value if type(x) is _constexpr else x


def integer(x) -> int:
    """A Python int from an int, constexpr or scalar of a kernel; a number with a fraction's type is refused, as 4.0 for 4."""
    if type(x) is int:
        return x
    x = plain(x)
    if isinstance(x, float) or isinstance(x, tl.tensor) and not x.dtype.is_int():
        raise TypeError(f"an integer is needed, not {x!r}")
    return values.integer(x)


def integers(xs):
    return [integer(x) for x in plain(xs)]


def truth(x) -> bool:
    return x if type(x) is bool else bool(values.scalar(x))


def predicate(x) -> bool:
    """A `pred` argument: None, or an int1 that the kernel computes."""
    if x is None:
        return True
    if not isinstance(x, tl.tensor):
        raise AttributeError(f"`pred` must be a value that the kernel computes, not the constant {plain(x)!r}")
    if x.dtype.name != "int1":
        raise TypeError(f"`pred` must be an int1, such as n > 0, not {x.dtype}")
    return truth(x)


def constant(x, name):
    """A value the compiler must know: refuse a run-time scalar."""
    x = plain(x)
    if isinstance(x, tl.tensor):
        raise ValueError(f"`{name}` must be a constexpr, got a value that is only known when the kernel runs")
    return x


def begin(kind: str, name: str):
    """Start of an operation: (task, where, fault)."""
    task = running()
    where = here()
    fault = task.machine.scheduler.step(task, kind, name, where)
    return task, where, fault
