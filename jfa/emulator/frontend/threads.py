"""Scalars that differ from thread to thread, as `tlx.thread_id` returns them.

The emulator runs tiles, not threads. A `ThreadScalar` keeps the value of every thread of the task through integer
arithmetic and comparisons; every other operation uses the first thread's value. An `if` on one runs its body when any
thread would, and a `tl.store` inside it stores only the elements of those threads: element i belongs to thread i modulo
the task's threads, a scalar to the first.
"""

import operator

import numpy as np
import triton.language as tl

from ..context import context
from .tensor import BOOL, INT32, Scalar, scalar

_OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class ThreadScalar(Scalar):
    """`threads`: the value in every thread; `value`: the first thread's."""

    __hash__ = Scalar.__hash__

    def logical_and(self, other, _semantic=None):
        return (self != 0) & (other != 0)

    def logical_or(self, other, _semantic=None):
        return (self != 0) | (other != 0)


def thread_scalar(threads):
    """Return an int32 or int1 of which every thread has its own value."""
    s = object.__new__(ThreadScalar)
    s.threads, s.value = threads, threads[0].item()
    s.dtype = BOOL if threads.dtype == bool else INT32
    return s


def _values(other):
    """Return the other operand's value in every thread, or None if it is nothing that differs at most by thread."""
    if type(other) is tl.constexpr:
        other = other.value
    if type(other) is ThreadScalar:
        return other.threads
    if type(other) is Scalar:
        return other.value if other.dtype in (INT32, BOOL) and other.undefined is None else None
    return other if isinstance(other, int) else None


def _method(name, swapped=False):
    function = getattr(operator, f"__{name}__")

    def method(self, other, _semantic=None):
        values = _values(other)
        if values is None:
            own = scalar(self.value, self.dtype)
            return function(other, own) if swapped else function(own, other)
        return thread_scalar(np.asarray(function(values, self.threads) if swapped else function(self.threads, values)))

    return method


for _name in _OPERATORS:
    setattr(ThreadScalar, f"__{_name}__", _method(_name))
    setattr(ThreadScalar, f"__r{_name}__", _method(_name, swapped=True))
for _name in _COMPARISONS:
    setattr(ThreadScalar, f"__{_name}__", _method(_name))


def lanes():
    """Return which threads of the running task are at this place; None: all."""
    task = context.launch.task
    return None if task is None else task.lanes


def diverge(condition):
    """Begin an `if` on a ThreadScalar; return whether any thread takes it.

    From here to `converge` only those threads run. If there are none, `else` runs, with all threads that came here.
    """
    task = context.launch.task
    held = condition.threads != 0
    if task.lanes is not None:
        held &= task.lanes
    if not held.any():
        return False
    if not held.all():
        task.lanes = held
    return True


def converge(before):
    """End an `if`: the threads that came to it go on."""
    context.launch.task.lanes = before


def active(mask, shape):
    """Return `mask` of a store without the elements of threads that are not here."""
    here = lanes()
    if here is None:
        return mask
    size = int(np.prod(shape))
    own = np.resize(here, max(size, 1))[:size].reshape(shape) if shape else np.asarray(here[0])
    return own if mask is None else mask & own
