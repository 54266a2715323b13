"""Numbers that follow from a call's sizes, written down while Python computes them, to be computed again for other sizes.

A :class:`Size` is an int that knows its :class:`Trace`. Arithmetic with it gives another one and adds a line to the trace;
a comparison gives a plain bool and adds the *condition* that the same comparison came out the same way. So code
that chooses tiles, grids and shapes runs as it is, and :meth:`Trace.compile` turns what it did into a Python function of the sizes:
the numbers, or None where other sizes take another way through that code.

What needs the number itself (a hash, a float, a bit pattern) pins it: then the condition is that it is this number. C code
that reads an int past its methods cannot be noticed: ``range``, a list's index, ``list * n``, a float left of an operator.
Functions of torch are not such code, because none runs while a call is recorded (jfa.kernels.common.recorder).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Size(int):
    """An int of a trace, computed by its line ``name``."""

    name: str
    trace: Trace

    def __bool__(self):
        return self.trace.holds(self.name, int.__bool__(self))

    def __neg__(self):
        return self.trace.number(f"-{self.name}", int.__neg__(self))

    def __pos__(self):
        return self

    def bit_length(self):
        """Return the bits of the number, without sign."""
        return self.trace.number(f"{self.name}.bit_length()", int.bit_length(self))

    def pinned(self) -> int:
        """Return the number as a plain int; the trace is then one of this number only."""
        value = int.__add__(self, 0)
        self.trace.holds(f"{self.name} == {value}", True)
        return value


def _binary(name: str, symbol: str, reflected: bool):
    plain = getattr(int, name)

    def method(self, other):
        if not isinstance(other, int):
            return getattr(int, name)(self.pinned(), other)
        left, right = (other, self) if reflected else (self, other)
        return self.trace.number(f"{written(left)} {symbol} {written(right)}", plain(self, other))

    return method


def _comparison(name: str, symbol: str):
    plain = getattr(int, name)

    def method(self, other):
        if not isinstance(other, int):
            return getattr(self.pinned(), name)(other)
        if isinstance(other, Size) and other.name == self.name:
            return plain(self, other)
        return self.trace.holds(f"{self.name} {symbol} {written(other)}", plain(self, other))

    return method


def _pinning(name: str):
    def method(self, *others):
        return getattr(int, name)(self.pinned(), *(x.pinned() if isinstance(x, Size) else x for x in others))

    return method


_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lshift": "<<", "rshift": ">>"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_PINNING = (
    "hash index int float abs invert round trunc floor ceil truediv rtruediv divmod rdivmod pow rpow and rand or ror xor rxor "
    "str repr format"
)
for _name, _symbol in _OPERATORS.items():
    setattr(Size, f"__{_name}__", _binary(f"__{_name}__", _symbol, False))
    setattr(Size, f"__r{_name}__", _binary(f"__r{_name}__", _symbol, True))
for _name, _symbol in _COMPARISONS.items():
    setattr(Size, f"__{_name}__", _comparison(f"__{_name}__", _symbol))
for _name in _PINNING.split():
    setattr(Size, f"__{_name}__", _pinning(f"__{_name}__"))


def written(x: int) -> str:
    """Return an int as a trace's source has it."""
    return x.name if isinstance(x, Size) else f"({int(x)})" if x < 0 else str(int(x))


def same(a: int, b: int) -> bool:
    """Return whether two numbers are equal for all sizes, as far as the trace tells; adds no condition."""
    if isinstance(a, Size) or isinstance(b, Size):
        return isinstance(a, Size) and isinstance(b, Size) and a.name == b.name
    return a == b


class Trace:
    """Lines of a function of some sizes.

    Args:
        variables: the sizes by name, with the values for which the lines are written down now.
    """

    def __init__(self, variables: dict[str, int]):
        self._lines: list[tuple[str, str]] = []  # (name, or "" for a condition; source)
        self._known: dict[str, Size] = {}
        self._conditions: dict[str, bool] = {}
        self.variables = {name: self._size(name, value) for name, value in variables.items()}

    def _size(self, name: str, value: int) -> Size:
        made = Size(value)
        made.name, made.trace = name, self
        return made

    def number(self, source: str, value: int) -> Size:
        """Return the Size of a line, an earlier one with the same source if there is one."""
        known = self._known.get(source)
        if known is None:
            name = f"n{len(self._known)}"
            self._lines.append((name, source))
            known = self._known[source] = self._size(name, value)
        return known

    def holds(self, source: str, truth: bool) -> bool:
        """Add the condition that ``source`` is as true as it is now; return ``truth``."""
        if source not in self._conditions:
            self._conditions[source] = truth
            self._lines.append(("", f"if not ({source}):" if truth else f"if {source}:"))
        return truth

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
