"""Operations that a task does itself: barriers, fences, loads and stores, starting other tasks.

Every function takes the running task, plain Python values and `where`, the source location. The caller has checked the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from . import limits, warps
from .control import ADD, WAIT, Use
from .shadow import fence as _fence
from .shadow import join
from .tasks import Task
from .users import note, note_start

if TYPE_CHECKING:
    from ..locations import Where
    from .barriers import MBarrier, NamedBarrier
    from .storage import View
    from .tasks import CTA


def wait(task: Task, bar: MBarrier, parity: int, where: Where) -> None:
    """Wait until the phase of that parity has completed."""
    control = task.machine.control
    if control is not None:
        why = lambda: f"mbarrier {bar.label}, parity {parity}: {bar.state()}"  # noqa: E731
        control.before(task, Use(WAIT, bar, parity=parity), where, why)
        bar.seen(task, where)
        return
    if task.machine.fault is not None:
        _remember(task, stores=False)
    waited = not bar.passes(parity)
    if waited:
        started = task.time
        task.parity = parity
        bar.waiters.append(task)
        task.machine.scheduler.block(task, bar, lambda: f"mbarrier {bar.label}, parity {parity}: {bar.state()}", where)
        if task.machine.timed:
            _waited(task, bar.label, started, bar.time, where)
    else:
        bar.seen(task, where)
    if task.machine.timed:
        task.machine.clock.spend(task, "barrier_wait", f"pass {bar.name}", where, waited=waited)


def _waited(task: Task, name: str, started: float, until: float, where: Where) -> None:
    task.time = max(task.time, until)
    if task.time > started:
        task.machine.clock.emit(
            task.cta, task.name, f"wait {name}", started, task.time, where, kind="wait", barrier=name
        )


def arrive(task: Task, bar: MBarrier, count: int, where: Where) -> None:
    """Make `count` arrivals (a per-thread barrier counts the task's threads)."""
    if bar.per_thread:
        count *= 32 * task.num_warps
    if task.machine.timed:
        task.machine.clock.spend(task, "barrier_arrive", f"arrive {bar.name}", where, signals=(bar.label,))
    if task.machine.control is not None:
        task.machine.control.before(task, Use(ADD, bar, count), where)
    if bar.cta is not task.cta:
        note(bar.cta, task, task.component, task.clock[task.component.id], where, f"an arrive at mbarrier {bar.name}")
    if task.warp_groups and not bar.per_thread:
        warps.join(task)
    bar.arrive(count, warps.told(task), task.time, ("arrive", task.label, where, task.turns))
    task.publish()


def expect_bytes(task: Task, bar: MBarrier, nbytes: int, where: Where) -> None:
    """Announce bytes and arrive once."""
    if task.machine.control is not None:
        task.machine.control.before(task, Use(ADD, bar, 1, nbytes), where)
    bar.expect(nbytes)
    warps.join(task)
    bar.arrive(1, task.clock, task.time, (f"expect of {nbytes} bytes", task.label, where, task.turns))
    task.publish()


def named_arrive(task: Task, number: int, threads: int, where: Where) -> None:
    if task.machine.control is not None:
        task.machine.control.before(task, Use(ADD, _named(task.cta, number), 32 * task.num_warps), where)
    _named(task.cta, number).enter(task, threads, where, "arrive")
    task.publish()


def named_wait(task: Task, number: int, threads: int, where: Where) -> None:
    bar = _named(task.cta, number)
    if task.machine.control is not None:
        task.machine.control.before(task, Use(ADD, bar, 32 * task.num_warps), where)
    whole = threads >= limits.WARP * task.num_warps  # else some of its warps may pass before the others come
    if whole:
        warps.join(task)
    apart = {} if whole else {g.component.id: task.clock.get(g.component.id, 0) for g in task.warp_groups}
    generation = bar.enter(task, threads, where, "wait")
    task.publish()
    started = task.time
    if bar.generation == generation:
        bar.waiters.append(task)
        task.machine.scheduler.block(task, bar, lambda: f"named barrier {number}: {bar.state()}", where)
    join(task.clock, bar.clock)
    task.clock.update(apart)
    if task.machine.timed:
        _waited(task, f"named barrier {number}", started, bar.time, where)


def _named(cta: CTA, number: int) -> NamedBarrier:
    from .barriers import NamedBarrier

    if number not in cta.named:
        cta.named[number] = NamedBarrier(number, cta)
    return cta.named[number]


def cluster_wait(task: Task, where: Where) -> None:
    """Arrive at the cluster barrier and wait for every other live task of the cluster."""
    bar = task.cta.cluster.barrier
    warps.join(task)
    generation = bar.enter(task)
    task.publish()
    started = task.time
    if bar.generation == generation:
        task.machine.scheduler.block(task, bar, lambda: f"the cluster barrier; {bar.state()}", where)
    join(task.clock, bar.clock)
    if task.machine.timed:
        _waited(task, "cluster barrier", started, bar.time, where)


def fence(task: Task, early: bool = False) -> None:
    """Order ordinary stores that this task knows of before later reads by the async proxy.

    early (fault injection): only those it knew of before the last store of its own, or before its last wait where it has
    stored nothing since its last fence.
    """
    _fence(task.clock, task.before if early else task.clock)
    task.publish()  # what it stores from now on is not fenced
    if task.machine.fault is not None:
        task.before, task.stored = dict(task.clock), False


def _remember(task: Task, stores: bool) -> None:
    """Keep, for a fence that is to come early, what the task knew before this store or wait."""
    if stores or not task.stored:
        task.before, task.stored = dict(task.clock), stores
        task.publish()


def load(task: Task, view: View, where: Where, name: str) -> np.ndarray:
    """Return the elements of a view (stored form, not to be kept: copy)."""
    task.machine.detector.task_access(task, view, False, where, name)
    return view.read()


def store(task: Task, view: View, values: Any, where: Where, name: str, undefined: np.ndarray | None = None) -> None:
    """Write a view's elements (stored form); `undefined`: their marks."""
    if task.machine.fault is not None:
        _remember(task, stores=True)
    task.machine.detector.task_access(task, view, True, where, name)
    if view.storage.cta is not task.cta:
        note_start(task, view.storage.cta, where, f"a store to {name}")
        note(view.storage.cta, task, task.component, task.clock[task.component.id], where, f"a store to {name}")
    view.write(values, undefined)


def run_region(
    task: Task, specs: Sequence[tuple[str, Callable[[], object], int, int]], where: Where, default: int | None = None
) -> None:
    """Start the tasks of an async_tasks region and wait for all of them.

    specs: [(name, body, num_warps, replica), ...]; body() is the task's code. default: the spec that runs on the warps of
    `task` itself, so each of the two waits for TMA stores and cp.async groups of the other.
    """
    machine, cta = task.machine, task.cta
    warps.join(task)
    children = [Task(machine, cta, name, body, num_warps, replica, task) for name, body, num_warps, replica in specs]
    if default is not None:
        own = children[default]
        own.stores, own.copies, own.groups = task.stores, task.copies, task.groups
    task.publish()
    task.children = set(children)
    for child in children:
        machine.scheduler.add(child)
    machine.scheduler.block(task, "region", lambda: "the end of its async_tasks", where)


def peer(task: Task, rank: int, where: Where) -> CTA:
    """Return the CTA of that rank in the task's cluster."""
    ctas = task.cta.cluster.ctas
    if not 0 <= rank < len(ctas):
        raise errors.ClusterError(
            f"cluster rank {rank} does not exist: the cluster has {len(ctas)} CTA(s)", where=where
        )
    return ctas[rank]


def twin(task: Task, index: int, cta: CTA, where: Where) -> Any:
    """Return what CTA `cta` allocated as its number `index`. Waits until it has: the launch of a cluster makes sure on the GPU."""
    if len(cta.allocations) <= index:
        cta.alloc_waiters.append(task)
        task.machine.scheduler.block(task, cta, lambda: f"{cta.label} to allocate its buffers", where)
        return twin(task, index, cta, where)
    return cta.allocations[index]


def allocated(cta: CTA, item: Any) -> int:
    """Register a buffer, barrier array or CLC context of a CTA; returns its number, the same in every CTA of the cluster."""
    cta.allocations.append(item)
    waiters, cta.alloc_waiters = cta.alloc_waiters, []
    for task in waiters:
        task.machine.scheduler.wake(task)
    return len(cta.allocations) - 1
