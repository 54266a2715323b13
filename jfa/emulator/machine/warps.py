"""Warp groups of one task: which warps touch which part of a tensor-memory tile, and when they are synchronized.

Each warp reaches a quarter of the 128 lanes, so a task of 8 warps is two groups of four that share the lanes and split
the columns of every tile they load or store (PTX: tcgen05.ld and tcgen05.st, shape 32x32b; Triton: its default layout).
The groups run independently: one may overwrite what the other has yet to load. A *join* is a barrier of all warps of
the task, which the compiler puts after each store to tensor memory, before an arrive, at a reduction and wherever a
layout changes through shared memory; it puts none between a load and the store that follows it. All of this was read in
the PTX that fbtriton 3.7.4 generates for sm_100.

A group has a component of its own in the vector clocks. The task's clock holds, for each group, the steps that are
ordered before those of all the task's warps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .shadow import Access

if TYPE_CHECKING:
    from ..locations import Where
    from .shadow import Report
    from .storage import View
    from .tasks import Task


WARPS = 4  # of a group: together they reach all lanes


class WarpGroup:
    """Four warps of a task as an actor of the race detector. `count`: their epoch; the task's clock may lag behind."""

    __slots__ = ("task", "number", "component", "count")

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.number, self.count = task, number, 1
        self.component = task.machine.detector.new_component(self)

    @property
    def label(self) -> str:
        first = WARPS * self.number
        return f"warps {first} to {first + WARPS - 1} of {self.task.label}"

    @property
    def turns(self) -> Any:
        return self.task.turns


def access(task: Task, view: View, write: bool, where: Where, name: str, report: Report) -> None:
    """Note that each group loads its share of a tensor-memory tile, or stores it, after which the groups join."""
    if not task.warp_groups:
        task.warp_groups = [WarpGroup(task, k) for k in range(task.num_warps // WARPS)]
    shadow, clock = view.storage.shadow, task.clock
    for group, region in zip(task.warp_groups, view.shares(len(task.warp_groups))):
        if region is None or (write and group.number and region is view.region):
            continue  # a tile too narrow to be split is loaded by all and stored by the first
        number = group.component.id
        seen = clock.get(number, 0)
        clock[number] = group.count
        noted = Access(group.component, dict(clock), write, True, group, where, name, region)
        (shadow.write if write else shadow.read)(region, noted, clock, report)
        clock[number] = seen
    if write:
        join(task)


def join(task: Task) -> None:
    """Order all warps of the task at a barrier: each group knows what the others have done."""
    clock = task.clock
    for group in task.warp_groups:
        clock[group.component.id] = group.count
        group.count += 1


def told(task: Task) -> dict[int, Any]:
    """Return the clock that an arrival of every single thread publishes: it covers all groups, which do not wait for each other."""
    if not task.warp_groups:
        return task.clock
    clock = dict(task.clock)
    for group in task.warp_groups:
        clock[group.component.id] = group.count
        group.count += 1
    return clock
