"""Trace the numbers that host code computes from a call's sizes, so they can be computed again for other sizes.

A :class:`Size` is an int that knows its :class:`Trace`. Arithmetic with it gives another one and adds a line to the
trace; a comparison gives a plain bool and adds the *condition* that the same comparison came out the same way. So code
that chooses tiles, grids and shapes runs unchanged, and :meth:`Trace.compile` turns its trace into a Python function of
the sizes that returns the numbers, or None where the sizes take another path through that code. Bounds and divisors of
every number are known, so a comparison that comes out the same for all sizes adds no condition.

An operation that needs the number itself (a hash, a float, a bit pattern) pins it: it adds the condition that the
number is the same. C code that reads an int without calling its methods cannot be traced: ``range``, a list's index,
``list * n``, a float left of an operator. torch's functions would be such code too, but none runs while a call is
recorded (jfa.kernels.common.recorder).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

INF = math.inf


class Size(int):
    """An int of a trace, computed by its line ``name``.

    Attributes:
        lo, hi: bounds that it has wherever the trace's conditions so far hold.
        step: it is a multiple of this, where they hold; 0 for the number 0.
    """

    name: str
    trace: Trace
    lo: float
    hi: float
    step: int

    def __bool__(self):
        return self != 0

    def __neg__(self):
        if self.trace.sources.get(self.name, "").startswith("-"):
            return self.trace.sizes[self.trace.sources[self.name][1:]]
        return self.trace.number(f"-{self.name}", int.__neg__(self), -self.hi, -self.lo, self.step)

    def __pos__(self):
        return self

    def bit_length(self):
        """Return the bits of the number, without sign."""
        most = max(abs(self.lo), abs(self.hi))
        most = most if most == INF else most.bit_length()
        return self.trace.number(f"{self.name}.bit_length()", int.bit_length(self), 0, most, 1)

    def pinned(self) -> int:
        """Return the number as a plain int; the trace is then one of this number only."""
        value = int.__add__(self, 0)
        assert self == value
        return value


# ------------------------------------------------------------------------------------------------- bounds and divisors
def _bounds(x: int) -> tuple[float, float, int]:
    return (x.lo, x.hi, x.step) if isinstance(x, Size) else (x, x, abs(x))


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _add(a: int, b: int) -> tuple:
    (a_lo, a_hi, a_step), (b_lo, b_hi, b_step) = _bounds(a), _bounds(b)
    return a_lo + b_lo, a_hi + b_hi, math.gcd(a_step, b_step)


def _sub(a: int, b: int) -> tuple:
    (a_lo, a_hi, a_step), (b_lo, b_hi, b_step) = _bounds(a), _bounds(b)
    return a_lo - b_hi, a_hi - b_lo, math.gcd(a_step, b_step)


def _mul(a: int, b: int) -> tuple:
    (a_lo, a_hi, a_step), (b_lo, b_hi, b_step) = _bounds(a), _bounds(b)
    corners = [_times(x, y) for x in (a_lo, a_hi) for y in (b_lo, b_hi)]
    return min(corners), max(corners), a_step * b_step


def _floordiv(a: int, b: int) -> tuple:
    lo, hi, step = _bounds(a)
    if isinstance(b, Size) or b <= 0:
        return -INF, INF, 1
    bounds = (x if abs(x) == INF else x // b for x in (lo, hi))
    return *bounds, step // b if step % b == 0 else 1


def _mod(a: int, b: int) -> tuple:
    if isinstance(b, Size) or b <= 0:
        return -INF, INF, 1
    return (0, 0, 0) if _bounds(a)[2] % b == 0 else (0, b - 1, 1)


def _shift(a: int, b: int) -> tuple:
    return -INF, INF, 1


_OPERATORS = {
    "add": ("+", _add),
    "sub": ("-", _sub),
    "mul": ("*", _mul),
    "floordiv": ("//", _floordiv),
    "mod": ("%", _mod),
    "lshift": ("<<", _shift),
    "rshift": (">>", _shift),
}
_NEUTRAL = {"+": 0, "-": 0, "*": 1, "//": 1}  # on the right


# -------------------------------------------------------------------------------------------------------------- methods
def _binary(name: str, symbol: str, bounds: Callable, reflected: bool):
    method_name = f"__{'r' if reflected else ''}{name}__"
    plain = getattr(int, method_name)

    def method(self, other):
        if not isinstance(other, int):
            return getattr(int, method_name)(self.pinned(), other)
        left, right = (other, self) if reflected else (self, other)
        if symbol in "+*" and not isinstance(left, Size):
            left, right = right, left
        if not isinstance(right, Size) and right == _NEUTRAL.get(symbol):
            return left
        return self.trace.number(f"{written(left)} {symbol} {written(right)}", plain(self, other), *bounds(left, right))

    return method


def _comparison(name: str, symbol: str, known: Callable, narrow: Callable):
    plain = getattr(int, f"__{name}__")

    def method(self, other):
        if not isinstance(other, int):
            return getattr(self.pinned(), f"__{name}__")(other)
        truth = plain(self, other)
        if isinstance(other, Size) and other.name == self.name:
            return truth
        lo, hi, _ = _bounds(other)
        if known(self, lo, hi) is None:
            self.trace.holds(f"{self.name} {symbol} {written(other)}", truth)
            if not isinstance(other, Size):
                narrow(self, int(other), truth)
        return truth

    return method


def _known_lt(x: Size, lo: float, hi: float) -> bool | None:
    return True if x.hi < lo else False if x.lo >= hi else None


def _known_le(x: Size, lo: float, hi: float) -> bool | None:
    return True if x.hi <= lo else False if x.lo > hi else None


def _known_eq(x: Size, lo: float, hi: float) -> bool | None:
    return False if x.hi < lo or x.lo > hi else True if x.lo == x.hi == lo == hi else None


def _below(x: Size, most: int, truth: bool) -> None:
    """Note that x <= most, or not."""
    if truth:
        x.hi = min(x.hi, most)
    else:
        x.lo = max(x.lo, most + 1)


def _at(x: Size, value: int, truth: bool) -> None:
    """Note that x == value, or not."""
    if truth:
        x.lo, x.hi = value, value
    elif x.lo == value:
        x.lo = value + 1
    elif x.hi == value:
        x.hi = value - 1


_COMPARISONS = {
    "eq": ("==", _known_eq, _at),
    "ne": ("!=", _known_eq, lambda x, value, truth: _at(x, value, not truth)),
    "lt": ("<", _known_lt, lambda x, value, truth: _below(x, value - 1, truth)),
    "le": ("<=", _known_le, _below),
    "gt": (">", _known_le, lambda x, value, truth: _below(x, value, not truth)),
    "ge": (">=", _known_lt, lambda x, value, truth: _below(x, value - 1, not truth)),
}


def _pinning(name: str):
    def method(self, *others):
        return getattr(int, name)(self.pinned(), *(x.pinned() if isinstance(x, Size) else x for x in others))

    return method


_PINNING = (
    "hash index int float abs invert round trunc floor ceil truediv rtruediv divmod rdivmod pow rpow and rand or ror xor rxor "
    "str repr format"
)
for _name, (_symbol, _of) in _OPERATORS.items():
    setattr(Size, f"__{_name}__", _binary(_name, _symbol, _of, False))
    setattr(Size, f"__r{_name}__", _binary(_name, _symbol, _of, True))
for _name, (_symbol, _known, _narrow) in _COMPARISONS.items():
    setattr(Size, f"__{_name}__", _comparison(_name, _symbol, _known, _narrow))
for _name in _PINNING.split():
    setattr(Size, f"__{_name}__", _pinning(f"__{_name}__"))


def written(x: int) -> str:
    """Return an int as a trace's source has it."""
    return x.name if isinstance(x, Size) else f"({operator.index(x)})" if x < 0 else f"{operator.index(x):d}"


def same(a: int, b: int) -> bool:
    """Return whether two numbers are equal for all sizes, as far as the trace tells; adds no condition."""
    if isinstance(a, Size) or isinstance(b, Size):
        return isinstance(a, Size) and isinstance(b, Size) and a.name == b.name
    return a == b


class Trace:
    """Lines of a function of some sizes, which are never negative.

    Args:
        variables: the sizes by name, with the values for which the lines are written down now.
        most: upper bounds of some of them.
    """

    def __init__(self, variables: dict[str, int], most: dict[str, int] | None = None):
        self._lines: list[tuple[str, str]] = []  # (name, or "" for a condition; source)
        self._known: dict[str, Size] = {}
        self._conditions: set[str] = set()
        self.sources: dict[str, str] = {}
        self.sizes: dict[str, Size] = {}
        for name, value in variables.items():
            self._size(name, value, 0, (most or {}).get(name, INF), 1)
        self.variables = dict(self.sizes)

    def _size(self, name: str, value: int, lo: float, hi: float, step: int) -> Size:
        made = Size(value)
        made.name, made.trace, made.lo, made.hi, made.step = name, self, lo, hi, step
        self.sizes[name] = made
        return made

    def number(self, source: str, value: int, lo: float, hi: float, step: int) -> int:
        """Return the Size of a line: an earlier one of the same source if there is one, or a plain int if bounds leave but that."""
        if lo == hi:
            return value
        known = self._known.get(source)
        if known is None:
            name = f"n{len(self._known)}"
            self._lines.append((name, source))
            self.sources[name] = source
            known = self._known[source] = self._size(name, value, lo, hi, step)
        return known

    def holds(self, source: str, truth: bool) -> None:
        """Add the condition that ``source`` is as true as it is now."""
        if source not in self._conditions:
            self._conditions.add(source)
            self._lines.append(("", f"if not ({source}):" if truth else f"if {source}:"))

    def compile(self, outputs: Sequence[int | tuple] = ()) -> Callable[..., tuple | None]:
        """Return a function of the variables' values, in their order: a tuple of the outputs, or None where a condition fails.

        An output is a number or a tuple of numbers.
        """
        needed = {x.name for y in outputs for x in (y if isinstance(y, tuple) else (y,)) if isinstance(x, Size)}
        body: list[str] = []
        for name, source in reversed(self._lines):
            if name and name not in needed:
                continue
            needed.update(word for word in _words(source))
            body.append(f"    {name} = {source}" if name else f"    {source} return None")
        result = "".join(f"{_output(x)}, " for x in outputs)
        head = f"def measure({', '.join(self.variables)}):"
        names: dict = {}
        exec("\n".join([head, *reversed(body), f"    return ({result})"]), {}, names)
        return names["measure"]


def _output(x: int | tuple) -> str:
    return f"({''.join(f'{written(y)}, ' for y in x)})" if isinstance(x, tuple) else written(x)


def _words(source: str) -> list[str]:
    for symbol in "()-:":
        source = source.replace(symbol, " ")
    return [word.split(".")[0] for word in source.split()]
