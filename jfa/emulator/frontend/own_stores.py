"""Warn where a program loads from global memory what other lanes stored, without a synchronization in between.

On a GPU the warps of a program run independently: a load may execute before another warp's store that precedes it in
the source. Which thread owns a lane is the compiler's choice, so this is only a warning. Accesses count as ordered in
these cases:

- a lane that loads what it stored itself (same place in a block of the same shape) is ordered, and so is a scalar by a scalar;
- a program of one warp is ordered;
- tl.debug_barrier, every TLX operation, an atomic, a product, and a reduction, scan or sort (which meet in shared memory when
  they cross warps) order everything before them with everything after them.

Not checked: stores after loads or stores of other lanes, descriptors, and accesses of different tasks of one program.
"""

import numpy as np

from .. import errors
from ..context import context
from ..locations import here, show

_KEPT = 128  # of a task's stores since its last barrier


class _Store:
    """The addresses that one tl.store wrote, lane by lane."""

    __slots__ = ("allocation", "addresses", "size", "shape", "active", "where", "_ends")

    def __init__(self, allocation, addresses, size, shape, active, where):
        self.allocation, self.addresses, self.size = allocation, addresses, size
        self.shape, self.active, self.where, self._ends = shape, active, where, None

    def ends(self):
        if self._ends is None:
            self._ends = int(self.addresses.min()), int(self.addresses.max()) + self.size
        return self._ends

    def lanes(self):
        return np.arange(self.addresses.size) if self.active is None else np.flatnonzero(self.active)


def note(allocation, addresses, size, shape, active):
    """Note that the running task stores to `addresses` (of its active lanes) from a block of `shape`."""
    task = context.launch.task
    if task is None or task.num_warps == 1 or not task.machine.watch or not addresses.size:
        return
    stores = task.unordered
    if len(stores) == _KEPT:
        del stores[: _KEPT // 2]
    stores.append(_Store(allocation, addresses, size, shape, active, here()))


def check(allocation, addresses, size, active=None):
    """Note a load from the `active` lanes of `addresses`: warn where another lane of the task stored last, without a barrier."""
    task = context.launch.task
    if task is None or not task.unordered or not addresses.size:
        return None
    if active is not None and not active.any():
        return None
    load = _Store(allocation, addresses if active is None else addresses[active], size, addresses.shape, active, ())
    open_places = None  # of the load's, those that no later store of the same lane has written; None: all
    for store in reversed(task.unordered):
        if allocation is not None and store.allocation is not None and store.allocation is not allocation:
            continue
        (lo, hi), (begin, end) = store.ends(), load.ends()
        if hi <= begin or end <= lo:
            continue
        open_places, foreign = _meet(store, load, open_places)
        if foreign:
            return _warn(task, store, allocation)
        if open_places is not None and not open_places.any():
            return None


def _meet(store, load, open_places):
    """Return (places of the load left to look at, whether a lane loads one that another lane stored)."""
    alike = store.shape == load.shape and store.size == load.size
    if alike and store.active is None and load.active is None and np.array_equal(store.addresses, load.addresses):
        return np.zeros(1, bool), False
    stored, loaded = store.addresses.reshape(-1), load.addresses.reshape(-1)
    if store.size != load.size:
        return open_places, bool(np.isin(_bytes(loaded, load.size), _bytes(stored, store.size)).any())
    order = np.argsort(stored, kind="stable")
    at = np.minimum(np.searchsorted(stored, loaded, sorter=order), stored.size - 1)
    same = stored[order[at]] == loaded
    if open_places is not None:
        same &= open_places
    own = store.lanes()[order[at]] == load.lanes() if alike else np.zeros(same.shape, bool)
    return ~same if open_places is None else open_places & ~same, bool((same & ~own).any())


def _bytes(addresses, size):
    return (addresses[:, None] + np.arange(size)).reshape(-1)


def _warn(task, store, allocation):
    name = f"`{allocation.name}`" if allocation is not None else "global memory"
    where = here()
    task.machine.warn(
        errors.GlobalRaceError(
            f"{task.label} loads from {name} what other lanes of it stored, with no barrier between",
            [f"stored at {show(store.where)}", f"loaded at {show(where)}"],
            "the lanes of a program are spread over its warps, and a warp may load before another has stored.\n"
            "  Fix: tl.debug_barrier() between the two, or keep the block in registers (tl.gather, tl.trans, tl.associative_scan).",
            where,
        )
    )


def ordered():
    """Note what all warps of the running task wait for: what it stored so far, all its lanes may load."""
    task = context.launch.task
    if task is not None and task.unordered:
        task.unordered = []
