"""Count what an answer does with NumPy arrays: its operations, and each float that leaves them.

A number leaves as a Python float (``tolist``, ``item``, an index, an iterator), in a buffer (``tobytes``, ``bytes``,
``memoryview``), or as the argument of a Python function that NumPy calls per element (``np.vectorize``). All count, so
a loop over them counts wherever it stands.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils._pytree import tree_map

from jfa.course.guard import note_operation

if TYPE_CHECKING:
    from jfa.course.measure import Meter

_MAKERS = (
    "array", "asarray", "asanyarray", "ascontiguousarray", "zeros", "ones", "empty", "full", "arange", "fromiter", "from_dlpack",
    "frombuffer", "memmap",
)  # fmt: skip
_ITERATORS = ("nditer", "ndenumerate", "nested_iters")
_BUFFERS = (bytes, bytearray, memoryview)
_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh", "tanh", "logaddexp", "logaddexp2", "float_power", "power"}
_meter: Meter | None = None


def is_counting() -> bool:
    """Return whether arrays count at the moment."""
    return _meter is not None


def _operation(count: int = 1) -> None:
    if _meter is not None:
        _meter.counts["ops"] += count


def _leave(value: Any) -> None:
    """Count the floats of an array that leaves NumPy."""
    if _meter is not None and isinstance(value, np.ndarray) and value.dtype.kind in "fcO":
        _meter.floats_left(value.size, value.size)


class Array(np.ndarray):
    """A NumPy array whose operations count."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        _operation()
        if _meter is not None and ufunc.__name__.startswith("logaddexp") and method != "__call__":
            note_operation("logsumexp", _meter.families, _meter.violations)
        if out is not None:
            kwargs["out"] = tuple(plain(x) for x in out)
        result = getattr(ufunc, method)(*(plain(x) for x in inputs), **kwargs)
        if ufunc.__name__.endswith("(vectorized)"):  # np.frompyfunc made it: a Python function gets each number
            _leave(max((x for x in inputs if isinstance(x, np.ndarray)), key=np.size))
        if _meter is not None and ufunc.__name__ in _EXPONENTIALS and isinstance(result, np.ndarray | np.generic):
            _meter.exponential(np.asarray(result))
        return as_counted(result)

    def __array_function__(self, func, types, args, kwargs):
        _operation()
        return as_counted(func(*tree_map(_for_numpy, args), **tree_map(_for_numpy, kwargs)))

    def __getitem__(self, key):
        _operation()
        result = super().__getitem__(key)
        if _meter is not None and isinstance(result, np.floating):
            _meter.floats_left(1, 0)
        return result

    def __setitem__(self, key, value):
        _operation()
        super().__setitem__(key, value)

    def view(self, *args, **kwargs):
        """Return a view that counts, too."""
        return as_counted(super().view(*args, **kwargs))

    @property
    def base(self):
        """The array whose memory this one shares; it counts, too."""
        return as_counted(super().base)

    @property
    def flat(self):
        """An iterator over all elements."""
        return _Flat(self)

    @flat.setter
    def flat(self, value):
        _operation()
        self.view(np.ndarray)[...] = np.reshape(np.resize(plain(value), self.size), self.shape)

    @property
    def data(self):
        """The array's memory."""
        _leave(self)
        return super().data


def _leaving(name: str) -> Callable:
    original = getattr(np.ndarray, name)

    def method(self, *args, **kwargs):
        if name != "item":
            _leave(self)
        elif _meter is not None and self.dtype.kind == "f":
            _meter.floats_left(1, 1)
        return original(self, *args, **kwargs)

    return method


for _name in ("tolist", "item", "tobytes", "dump", "dumps", "tofile", "__reduce__", "__reduce_ex__"):
    setattr(Array, _name, _leaving(_name))


class _Flat:
    """Stands for ``array.flat``: going through it counts per element, an index or an assignment once."""

    def __init__(self, array: Array):
        self._array, self._flat = array, np.ndarray.flat.__get__(array)

    def __iter__(self):
        _leave(self._array)
        return iter(self._flat)

    def __next__(self):
        _operation()
        return next(self._flat)

    def __getitem__(self, key):
        _operation()
        return as_counted(self._flat[key])

    def __setitem__(self, key, value):
        _operation()
        self._flat[key] = plain(value)

    def __len__(self):
        return len(self._flat)

    def __array__(self, dtype=None, copy=None):
        return np.array(plain(self._array), dtype=dtype).ravel()

    def __getattr__(self, name):
        return getattr(self._flat, name)


class _Buffer(type):
    """Stands for a built-in class that copies or shows memory: calling it with an array counts the array's floats."""

    def __call__(cls, *args, **kwargs):
        if args:
            _leave(args[0])
        return cls.kind(*args, **kwargs)

    def __instancecheck__(cls, value):
        return isinstance(value, cls.kind)

    def __subclasscheck__(cls, kind):
        return issubclass(kind, cls.kind)

    def __getattr__(cls, name):
        return getattr(type.__getattribute__(cls, "kind"), name)


def plain(value: Any) -> Any:
    """Return the value itself, as an ordinary array if it is one that counts."""
    return np.ndarray.view(value, np.ndarray) if isinstance(value, Array) else value


def _for_numpy(value: Any) -> Any:
    """Return an argument as NumPy's own code gets it: arrays that do not count, and functions that see arrays that do."""
    if not inspect.isfunction(value):
        return plain(value)
    return lambda *args, **kwargs: tree_map(plain, value(*map(as_counted, args), **kwargs))


def as_counted(result: Any) -> Any:
    """Return NumPy's result with its arrays made to count."""
    if isinstance(result, tuple | list):
        return type(result)(as_counted(r) for r in result)
    return result.view(Array) if type(result) is np.ndarray else result


@contextlib.contextmanager
def counted(meter: Meter, names: dict | None = None) -> Iterator[None]:
    """Make NumPy arrays that are made inside count their operations on the meter.

    ``names`` is the learner's namespace: there, and nowhere else, ``bytes`` and its kin count the arrays that they read.
    """
    global _meter

    def making(make):
        return lambda *args, **kwargs: as_counted(make(*args, **kwargs))

    def iterating(make):
        def iterator(*args, **kwargs):
            for value in args:
                _leave(value)
            return make(*args, **kwargs)

        return iterator

    stands = [(np, name, making(getattr(np, name))) for name in _MAKERS]
    stands += [(np, name, iterating(getattr(np, name))) for name in _ITERATORS]
    names = {} if names is None else names
    own = {kind.__name__: _Buffer(kind.__name__, (), {"kind": kind}) for kind in _BUFFERS if kind.__name__ not in names}
    originals = [(holder, name, getattr(holder, name)) for holder, name, _ in stands]
    _meter = meter
    for holder, name, stand in stands:
        setattr(holder, name, stand)
    names |= own
    try:
        yield
    finally:
        _meter = None
        for holder, name, original in originals:
            setattr(holder, name, original)
        for name, stand in own.items():
            if names.get(name) is stand:
                del names[name]
