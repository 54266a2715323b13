"""Carry the marks of undefined lanes (see ..undefined) from the operands of operations to their results.

Every operation of the builder, and every TLX function, is wrapped here. `carries` gives its rule. An operation without
a rule is assumed to mix all lanes: one undefined lane makes all of its results undefined, so a new operation errs on
the safe side. Operations with the rule `itself` set the marks of their results themselves.
"""

import functools

import numpy as np
import triton.language as tl

from ..context import context
from ..counting import Active
from ..undefined import MARK, everywhere, product, selected, some, union
from . import contraction
from .tensor import Scalar, Tensor, make, scalar


def carries(rule):
    """Give a function its rule: rule(function, operands, result) -> marks of the result, or of each of several results."""

    def declare(function):
        function.carries = rule
        return function

    return declare


def rule_of(function):
    """Return the rule of an operation."""
    return getattr(function, "carries", mixed)


def carry(rule, function, operands, result):
    """Give the result of an operation the marks of its operands."""
    if any_undefined(operands):
        put(result, rule(function, operands, result), operands)
    return result


def carrying(function):
    """Return `function` with marks carried by its rule."""
    rule = rule_of(function)
    if rule is itself:
        return function

    @functools.wraps(function)
    def call(*operands, **named):
        result = function(*operands, **named)
        if rule is moved and context.launch.contracts:
            contraction.move(function, operands, result)
        if context.launch.has_undefined:
            carry(rule, function, (*operands, *named.values()), result)
        return result

    return call


def carrying_builder(cls):
    """Return a class of builder whose operations carry marks."""
    for name, function in list(vars(cls).items()):
        if name.startswith("create_"):
            setattr(cls, name, carrying(function))
    return cls


def any_undefined(operands):
    """Return whether one of these values, or of those in lists and tuples among them, has undefined lanes."""
    for operand in operands:
        kind = type(operand)
        if kind is Tensor or kind is Scalar:
            if operand.undefined is not None:
                return True
        elif kind not in _NO_VALUES and isinstance(operand, (tuple, list, tl.tuple)) and any_undefined(operand):
            return True
    return False


_NO_VALUES = frozenset((int, float, bool, str, type(None), tl.dtype, tl.constexpr))


def put(result, marks, operands=()):
    """Set the marks of a new value, or of several; `operands` that were handed through keep their own."""
    if isinstance(result, tuple | list):
        each = marks if isinstance(marks, tuple) else (marks,) * len(result)
        for one, its in zip(result, each):
            put(one, its, operands)
    elif isinstance(result, Tensor) and some(marks) is not None and not any(result is o for o in operands):
        shape = () if isinstance(result, Scalar) else result.data.shape
        result.undefined = np.broadcast_to(marks, shape) if shape else MARK.type(np.max(marks))
    return result


def _marks(operands):
    """Yield the marks of all values among the operands, however deep."""
    for operand in operands:
        if isinstance(operand, tuple | list | tl.tuple):
            yield from _marks(operand)
        else:
            yield getattr(operand, "undefined", None)


# ---- rules


def itself(function, operands, result):
    """Let the function set the marks of its results."""


def mixed(function, operands, result):
    """Let every lane of the result depend on every lane of the operands."""
    return everywhere(union(*[everywhere(m) for m in _marks(operands)]))


def lanewise(function, operands, result):
    """Let a lane of the result depend on that lane of each operand."""
    return union(*_marks(operands))


def moved(function, operands, result):
    """Move the marks along with lanes that are only moved, repeated or picked."""
    counts, Active.counts = Active.counts, None
    try:
        marks = function(*[_as_value(o) for o in operands])
    finally:
        Active.counts = counts
    return tuple(m.data for m in marks) if isinstance(marks, tuple) else marks.data


def _as_value(operand):
    """Return a value of the marks of a value."""
    if isinstance(operand, Scalar):
        return scalar(0 if operand.undefined is None else int(operand.undefined), tl.uint16)
    if isinstance(operand, Tensor):
        marks = operand.undefined
        return make(np.zeros(operand.data.shape, MARK) if marks is None else np.asarray(marks), tl.uint16)
    return operand


def chosen(function, operands, result):
    """Carry the marks of select(condition, a, b)."""
    condition, a, b = operands[-3:]
    return selected(condition.data, condition.undefined, a.undefined, b.undefined)


def multiplied(function, operands, result):
    """Carry the marks of dot(a, b, accumulator): rows and columns."""
    _, a, b, accumulator = operands[:4]
    return union(product(a.undefined, b.undefined), accumulator.undefined)
