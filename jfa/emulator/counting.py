"""Count what kernels do: loads, stores, products, selects, the largest block. Graders see how an answer works."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """Counts of the launches inside ``counting()``, of all programs together.

    Attributes:
        loads, stores: calls of tl.load, tl.store, descriptor loads and stores, and TMA copies, of any size; atomics are neither.
        load_elements, store_elements: lanes that were loaded or stored, masked ones left out; a TMA box counts in full.
        atomics: calls of tl.atomic_add and similar functions.
        atomic_elements: their lanes, masked ones left out.
        selects: lanes of blocks that tl.where made.
        compares: lanes of blocks that a comparison made.
        exponentials: lanes of tl.exp and tl.exp2 on blocks. These three are the price of masks and of the softmax, so they count
            lanes, not calls; scalars are free.
        dots: matrix products of any kind.
        peak_tile: elements of the largest block made.
        programs: how many ran.
        launches: of kernels.
        operations: TLX operations by name (barrier_wait, async_descriptor_load, local_store, ...), as issued.
        mmas: async_dot into tensor memory.
        accumulated: those of them that added to what their accumulator held.
        tmem_loads, tmem_stores: local_load and local_store of tensor memory.
        tasks: async tasks of the largest region, replicas each for itself.
        tmem_columns, shared_bytes: the most that one CTA allocated, shared storage once.
        loaded_places, stored_places: places in the shared memory of one CTA, at most, that TMA loads filled, or TMA stores read:
            a ring of three buffers has three, however many it allocated.
    """

    loads: int = 0
    stores: int = 0
    load_elements: int = 0
    store_elements: int = 0
    atomics: int = 0
    atomic_elements: int = 0
    selects: int = 0
    compares: int = 0
    exponentials: int = 0
    dots: int = 0
    peak_tile: int = 0
    programs: int = 0
    launches: int = 0
    mmas: int = 0
    accumulated: int = 0
    tmem_loads: int = 0
    tmem_stores: int = 0
    tasks: int = 0
    tmem_columns: int = 0
    shared_bytes: int = 0
    loaded_places: int = 0
    stored_places: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def load(self, elements: int) -> None:
        """Count one load of so many elements."""
        self.loads += 1
        self.load_elements += int(elements)

    def store(self, elements: int) -> None:
        """Count one store of so many elements."""
        self.stores += 1
        self.store_elements += int(elements)

    def atomic(self, elements: int) -> None:
        """Count one atomic operation on so many elements."""
        self.atomics += 1
        self.atomic_elements += int(elements)

    def most(self, name: str, amount: int) -> None:
        """Keep the largest amount seen under this name."""
        setattr(self, name, max(getattr(self, name), int(amount)))

    def place(self, name: str, view: Any) -> None:
        """Count the place of a view (a machine's) for its CTA, once."""
        seen = view.storage.cta.places.setdefault(name, set())
        at = view.offsets.flat[0] if view.arr is None else view.arr.__array_interface__["data"][0]
        seen.add((id(view.storage), int(at)))
        self.most(name, len(seen))

    def block(self, elements: int) -> None:
        """Count an operation that made a block of so many elements."""
        if elements > self.peak_tile:
            self.peak_tile = int(elements)


class _Active(threading.local):
    """The counts that this thread's operations add to; None outside ``counting()``."""

    counts: Counts | None = None


Active = _Active()


def count_lanes(name: str, data) -> None:
    """Add the lanes of a block (a numpy array) to one of the counts; a scalar adds nothing."""
    if Active.counts is not None and getattr(data, "ndim", 0):
        setattr(Active.counts, name, getattr(Active.counts, name) + data.size)


@contextlib.contextmanager
def uncounted(name: str) -> Iterator[None]:
    """Leave one of the counts as it is: what happens inside is how a line is executed, not what the kernel requests."""
    before = getattr(Active.counts, name, 0)
    yield
    if Active.counts is not None:
        setattr(Active.counts, name, before)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count in ``with counting() as counts: kernel[grid](...)``; nested blocks count for themselves only."""
    outer, Active.counts = Active.counts, Counts()
    try:
        yield Active.counts
    finally:
        Active.counts = outer
