"""Happens-before race detection.

What it must find: two accesses to the same bytes of SMEM or TMEM, at least one of them a write, that no chain of
barriers orders; reads of bytes that were never written; ordinary stores read by the async proxy (TMA, tensor core) without a proxy
fence in between. It must find them in *every* schedule in which the two accesses happen, not only in one where they
collide, and it must never report a pair that is ordered.

How: vector clocks. Each *component* (a task; the MMA pipe of a task; one TMA, cp.async or CLC operation) has a counter.
A task's clock holds, for each component, how many of its steps are ordered before the task's next one. Releasing (an
arrive, a commit, a completed copy) publishes the clock on the barrier; passing a wait merges it in. An access is
remembered with its component and counter; a later one whose clock does not cover it is a race. The proxy clock rides in
the same dictionary under the key -1-component: "ordinary writes of that component up to here were fenced".

Where: memory is divided on demand. A `Region` is the bytes of one view; `Atom`s are the pieces that all regions seen
so far cut the storage into. An access looks at its region's atoms only, usually one to four, whatever the tile's
size: this is what makes detection cheap. A new region splits atoms, which copies their history.

What could go wrong, and which tests would show it:
  - a false alarm on a correct kernel: the conformance tests run public kernels under every policy and many random
    seeds;
  - a missed race: the fault sweep drops, flips and moves every synchronization of public kernels and counts the
    mutants found;
  - too coarse granules (a false race between neighbors): tests with 4-byte slots and adjacent byte-wide buffers;
  - components that pile up over thousands of copies: a test counts them; finished copies that the clock of every live
    task covers are retired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..locations import Where
    from .storage import Storage


Report = Callable[..., None]
"""report(kind, earlier access or None, access, shadow): takes what is wrong, see `Shadow.read`."""

VectorClock = dict[int, int]
"""Component -> how many of its steps are known; -1-component -> how far its ordinary writes were fenced."""


class Component:
    """One line of the vector clocks."""

    __slots__ = ("id", "label", "retired")

    def __init__(self, number: int, label: Any) -> None:
        self.id, self.label, self.retired = number, label, False


def join(clock: dict, other: dict) -> None:
    """Merge `other` into `clock`: afterwards clock knows of everything that either knew."""
    get = clock.get
    for key, value in other.items():
        if get(key, 0) < value:
            clock[key] = value


def fence(clock: dict, known: dict) -> None:
    """Make ordinary writes that the clock `known` covers visible to the async proxy: a proxy fence."""
    for key, value in list(known.items()):
        if key >= 0 and clock.get(-1 - key, 0) < value:
            clock[-1 - key] = value


class Access:
    """An access: its Task or AsyncOp, its buffer, its time (component, clock, loop iterations) and its kind."""

    __slots__ = ("component", "count", "clock", "write", "generic", "actor", "where", "name", "region", "turns")

    def __init__(
        self,
        component: Component,
        clock: VectorClock,
        write: bool,
        generic: bool,
        actor: Any,
        where: Where,
        name: str,
        region: Region,
    ) -> None:
        self.component, self.clock, self.write, self.generic = component, clock, write, generic
        self.count = clock[component.id]
        self.actor, self.where, self.name, self.region, self.turns = actor, where, name, region, actor.turns


class Atom:
    __slots__ = ("number", "size", "write", "reads", "regions")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.write: Access | None = None
        self.reads: dict[int, Access] = {}  # by component, since the last write
        self.regions: list[Region] = []


class Region:
    __slots__ = ("atoms",)

    def __init__(self) -> None:
        self.atoms: list[Atom] = []


class Shadow:
    """The access history of one storage of `count` granules of `granule` bytes."""

    def __init__(self, count: int, granule: int, storage: Storage) -> None:
        self.granule, self.storage = granule, storage
        self.owner = np.zeros(count, np.int32)  # granule -> atom
        self.atoms = [Atom(0, count)]
        self.regions: dict[Any, Region] = {}

    # ------------------------------------------------------------ regions
    def region_of_range(self, lo: int, hi: int) -> Region:
        return self.region_of((lo, hi), lambda: slice(lo, hi))

    def region_of(self, key: Any, granules: Callable[[], Any]) -> Region:
        region = self.regions.get(key)
        if region is None:
            region = self.regions[key] = self._add(granules())
        return region

    def _add(self, cells: Any) -> Region:
        region = Region()
        owners = self.owner[cells].copy()
        first = int(owners.flat[0])
        numbers = [first] if (owners == first).all() else [int(n) for n in np.unique(owners)]
        for number in numbers:
            atom = self.atoms[number]
            inside = owners.size if len(numbers) == 1 else int((owners == number).sum())
            if inside != atom.size:
                atom = self._split(atom, cells, owners, inside)
            region.atoms.append(atom)
            atom.regions.append(region)
        return region

    def _split(self, atom: Atom, cells: Any, owners: np.ndarray, inside: int) -> Atom:
        new = Atom(len(self.atoms), inside)
        new.write, new.reads, new.regions = atom.write, dict(atom.reads), list(atom.regions)
        atom.size -= inside
        for region in atom.regions:
            region.atoms.append(new)
        self.atoms.append(new)
        chosen = owners == atom.number
        if isinstance(cells, slice):
            self.owner[cells][chosen] = new.number
        else:
            self.owner[cells[chosen]] = new.number
        return new

    # ------------------------------------------------------------ accesses
    def read(self, region: Region, access: Access, clock: dict, report: Report) -> None:
        """Note a read; `report(kind, earlier access or None, access, shadow)` is called with what is wrong."""
        key = access.component.id
        for atom in region.atoms:
            write = atom.write
            if write is None:
                report("poison", None, access, self)
            elif write.count > clock.get(write.component.id, 0) and not write.component.retired:
                report("race", write, access, self)
            elif not access.generic and write.generic and write.count > clock.get(-1 - write.component.id, 0):
                report("fence", write, access, self)
            atom.reads[key] = access

    def write(self, region: Region, access: Access, clock: dict, report: Report) -> None:
        get = clock.get
        for atom in region.atoms:
            write = atom.write
            if write is not None and write.count > get(write.component.id, 0) and not write.component.retired:
                report("race", write, access, self)
            reads = atom.reads
            if reads:
                for read in reads.values():
                    if read.count > get(read.component.id, 0) and not read.component.retired:
                        report("race", read, access, self)
                        break
                atom.reads = {}
            atom.write = access
