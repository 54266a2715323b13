"""Measure how an answer computes: its operations and their sizes, its live memory, and the emulator's counts for
kernels.

An operation that the learner writes counts once, however many operations torch executes for it: ``torch.einsum(...)``
is one. NumPy operations count like torch's, and so does each number that leaves torch as a Python float, so a loop
counts in any library.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jfa.course import arrays, host_reads
from jfa.course.guard import FAMILIES, Violations, is_own_file, note_host_read, note_operation
from jfa.course.wire import Other

_EXPONENTIALS = {
    "exp", "exp2", "expm1", "sigmoid", "tanh", "sinh", "cosh", "softplus", "logaddexp", "logaddexp2", "logsumexp", "logcumsumexp",
    "log_sigmoid_forward", "log_sigmoid", "silu", "elu", "mish", "float_power", "_softmax", "_log_softmax", "linalg_matrix_exp",
}  # fmt: skip
_FREE = {
    "__get__", "__len__", "__repr__", "__str__", "__format__", "__hash__", "dim", "ndimension", "size", "stride", "numel",
    "nelement", "is_floating_point", "is_complex", "is_contiguous", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "requires_grad_", "detach", "tolist", "numpy", "__array__", "__iter__",
}  # fmt: skip
_TO_PYTHON = {
    "item",
    "tolist",
    "__float__",
    "apply_",
    "map_",
    "map2_",
}  # the last three call a Python function per number
# Namespaces of operations before any answer was read; those of others come from it (torch.library), and hide what they do.
_KNOWN_NAMESPACES = {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()} | {"higher_order", "jfa"}
# bytes of Python's own that no answer has to account for: lists of offsets, frames, tensors' wrappers
_PYTHON_FREE = 2**16
_BOOKKEEPING = 600  # bytes that counting one living tensor takes, its Python object included


class Meter(TorchDispatchMode):
    """Count what an answer does; every torch operation below autograd is counted.

    Counts, as :meth:`take` returns them:
        ops: operations the learner wrote, in torch or NumPy, and one for each float that left torch.
        op:NAME: torch operations aten.NAME.
        exponentials: operations that exponentiate a tensor or array, by whatever name. exp_axis:N: those whose result has an axis
        of length N. exp_above_one: how many of their results are larger than 1.
        python_floats: floats that left torch (tolist, item, float).
        peak_numel: elements of the largest new tensor. live_numel: elements of all new tensors that were alive at the same time,
        and of NumPy arrays and Python lists (four bytes count as one).
    """

    def __init__(self, forbidden: Iterable[str], violations: Violations, watch_python: bool = False):
        super().__init__()
        self.forbidden = set(forbidden)
        self.families = [f for f in self.forbidden if f in FAMILIES]
        self.violations = violations
        self.watch_python = watch_python
        self.depth = 0  # inside one operation of the learner's
        self._reset()

    def _reset(self) -> None:
        self.operations: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.peak_numel = 0
        self.alive = _Alive()

    def __enter__(self):
        if self.watch_python:
            tracemalloc.start(1)
            tracemalloc.reset_peak()
            self.python_before = tracemalloc.get_traced_memory()[0]
        return super().__enter__()

    def __exit__(self, *error):
        if self.watch_python:
            used = tracemalloc.get_traced_memory()[1] - self.python_before
            tracemalloc.stop()
            self.alive.peak += max(0, used - _PYTHON_FREE - _BOOKKEEPING * self.alive.most) // 4
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1] if hasattr(func, "_schema") else getattr(func, "__name__", "")
        note_operation(name, self.families, self.violations)
        if host_reads.WORD in self.forbidden:
            note_host_read(host_reads.by_operation(name, args), self.violations)
        namespace = getattr(func, "namespace", "aten")
        if namespace == "jfa" and "jfa.attention" in self.forbidden:
            self.violations.add("jfa.attention")
        if namespace not in _KNOWN_NAMESPACES:
            self.violations.add("registered")
        plain = name.rstrip("_") or name
        self.operations[plain] += 1
        # Inside one operation only what the learner's own code asks for counts: a tensor subclass's, a gradient's, a hook's.
        self.counts["ops"] += self.depth == 0 or is_own_file(sys._getframe(1).f_code.co_filename)
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._new_memory(results, args, kwargs)
        if plain.removeprefix("_foreach_") in _EXPONENTIALS or plain == "pow" and isinstance(args[1], torch.Tensor):
            changed = args[0] if out is None else ()  # a list of tensors, in place
            for result in [*results, *changed]:
                self.exponential(result)
        return out

    def _new_memory(self, results: list[torch.Tensor], args: tuple, kwargs: dict | None) -> None:
        """Enter results that have memory of their own: a view, and what is written into an argument, has none."""
        given = None
        for result in results:
            if not self.alive.knows(result):
                given = (
                    {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
                    if given is None
                    else given
                )
                if _memory(result) not in given:
                    self.peak_numel = max(self.peak_numel, result.numel())
                    self.alive.add(result)

    def floats_left(self, count: int, operations: int) -> None:
        """Count floats that became Python's, and the operations that they stand for: one each, unless counted before."""
        self.counts["python_floats"] += count
        self.counts["ops"] += operations

    def exponential(self, result: Any) -> None:
        """Count one exponentiation and what came of it (a tensor or an array)."""
        self.counts["exponentials"] += 1
        for axis in set(result.shape):
            self.counts[f"exp_axis:{int(axis)}"] += 1
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            self.counts["exp_above_one"] += int((result > 1.0001).sum())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return torch's hook: skipping would import the whole compiler (seconds) at the first operation of every answer."""
        return False

    def take(self) -> dict[str, int]:
        """Return the counts so far, and start again from zero."""
        counts = {f"op:{name}": n for name, n in self.operations.items()} | dict(self.counts)
        for name in ("ops", "exponentials", "exp_above_one", "python_floats"):
            counts.setdefault(name, 0)
        counts |= {"peak_numel": self.peak_numel, "live_numel": self.alive.peak}
        self._reset()
        return counts


class _Alive:
    """Track the memory of new tensors: the largest number of elements alive at the same time."""

    def __init__(self):
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = self.peak = self.most = 0

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in memory that has been entered and is alive."""
        entry = self.found.get(_memory(tensor))
        return entry is not None and not entry[0].expired()

    def add(self, tensor: torch.Tensor) -> None:
        """Enter a new tensor's memory."""
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes() // tensor.element_size()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own kind
            return
        if size == 0:
            return
        where = storage.data_ptr()
        self.total += size - self.found.get(where, (None, 0))[1]
        self.found[where] = (StorageWeakRef(storage), size)
        if self.total > self.peak:  # only then is it worth looking which of them are gone
            self.found = {k: (ref, n) for k, (ref, n) in self.found.items() if not ref.expired()}
            self.total = sum(n for _, n in self.found.values())
            self.peak, self.most = max(self.peak, self.total), max(self.most, len(self.found))


class Watch(TorchFunctionMode):
    """Count the operations that the learner wrote once each, note forbidden ones, and watch the numbers that leave
    torch."""

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        meter = self.meter
        name = getattr(func, "__name__", "") or resolve_name(func) or ""
        note_operation(name, meter.families, meter.violations)
        if host_reads.WORD in meter.forbidden:
            note_host_read(host_reads.by_function(name, args, kwargs or {}), meter.violations)
        meter.counts["ops"] += name not in _FREE
        meter.depth += name != "__iter__"  # going through a tensor row by row is one operation per row
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            meter.depth -= name != "__iter__"
        if name in _TO_PYTHON and args and args[0].is_floating_point():
            meter.floats_left(args[0].numel(), 0 if name in ("item", "__float__") else args[0].numel())
        return arrays.as_counted(out) if name in ("numpy", "__array__") and arrays.is_counting() else out


_MAX_DEPTH, _MAX_ITEMS = 12, 200_000  # of a result, as it crosses over to the judge


def materialised(value: Any) -> Any:
    """Return a result as plain tensors, arrays, numbers, text, lists, tuples and dicts, :class:`jfa.course.wire.Other` elsewhere.

    To be called while counting goes on: whatever a class of the learner's own computes when it is read is computed here, and what
    it would answer later is not asked.
    """
    left = _MAX_ITEMS

    def plain(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > _MAX_DEPTH or left < 0:
            return Other("deeply nested structure" if depth > _MAX_DEPTH else "structure of very many parts")
        if isinstance(value, torch.Tensor):
            return _plain_tensor(value)
        if isinstance(value, np.ndarray):
            return np.ndarray.view(value, np.ndarray)
        for kind, exactly in _EXACTLY.items():
            if isinstance(value, kind):
                return exactly(value)
        if isinstance(value, tuple | list):
            kind = tuple if isinstance(value, tuple) else list
            return kind(plain(v, depth + 1) for v in itertools.islice(kind.__iter__(value), max(left, 0) + 1))
        if isinstance(value, dict):
            return {plain(k, depth + 1): plain(v, depth + 1) for k, v in dict.items(value)}
        known = value is None or isinstance(value, np.generic | torch.dtype | Other)
        return value if known else Other(str(type(value).__name__))

    return plain(value, 0)


_EXACTLY = {
    bool: lambda value: value,
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    str: lambda value: str.__str__(value),
}


def _plain_tensor(value: torch.Tensor) -> Any:
    """Return a tensor without a class of the learner's around it; what has no numbers of its own is no tensor."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._dispatch_keys(value).has(torch._C.DispatchKey.Python):
            return Other(f"tensor of its own class, {kind.__name__}")
        return torch.Tensor.as_subclass(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    """Return where a tensor's elements lie: a view lies where its base does, and a view is no new tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own kind
        return id(tensor)


@contextlib.contextmanager
def kernel_counts(active: bool) -> Iterator[dict[str, int]]:
    """Count what kernels launched inside do (:class:`jfa.emulator.Counts`), TLX operations as "tlx:NAME"; filled in at the end."""
    counts: dict[str, int] = {}
    if not active:
        yield counts
        return
    from jfa import emulator

    if not hasattr(emulator, "counting"):
        yield counts
        return
    with emulator.counting() as seen:
        yield counts
        counts |= {name: int(count) for name, count in vars(seen).items() if name != "operations"}
        counts |= {f"tlx:{name}": int(count) for name, count in seen.operations.items()}
