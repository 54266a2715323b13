"""How an answer computes: torch operations counted and sized while it runs, and the emulator's counts for kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jfa.course import host_reads
from jfa.course.guard import FAMILIES, Violations, note_host_read, note_operation


class Meter(TorchDispatchMode):
    """Counts torch operations by name and keeps the size of the largest new tensor; sees every operation below autograd."""

    def __init__(self, forbidden: Iterable[str], violations: Violations):
        super().__init__()
        self.forbidden = set(forbidden)
        self.families = [f for f in self.forbidden if f in FAMILIES]
        self.violations = violations
        self.operations: Counter[str] = Counter()
        self.peak_numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1] if hasattr(func, "_schema") else getattr(func, "__name__", "")
        note_operation(name, self.families, self.violations)
        if host_reads.WORD in self.forbidden:
            note_host_read(host_reads.by_operation(name, args), self.violations)
        if getattr(func, "namespace", "") == "jfa" and "jfa.attention" in self.forbidden:
            self.violations.add("jfa.attention")
        self.operations[name.rstrip("_") or name] += 1
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if any(result.numel() > self.peak_numel for result in results):
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            new = (result.numel() for result in results if _memory(result) not in given)
            self.peak_numel = max(self.peak_numel, *new, 0)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's hook: skipping would import the whole compiler (seconds) at the first operation of every answer."""
        return False

    def take(self) -> dict[str, int]:
        """The counts so far, and start again from zero."""
        counts = {f"op:{name}": n for name, n in self.operations.items()}
        counts |= {"ops": sum(self.operations.values()), "peak_numel": self.peak_numel}
        self.operations.clear()
        self.peak_numel = 0
        return counts


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's elements lie: a view lies where its base does, and a view is no new tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own kind
        return id(tensor)


@contextlib.contextmanager
def kernel_counts(active: bool) -> Iterator[dict[str, int]]:
    """Counts of the kernels launched inside (:class:`jfa.emulator.Counts`) by name; filled in at the end."""
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
        counts |= {name: int(count) for name, count in vars(seen).items()}
