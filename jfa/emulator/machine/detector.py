"""Find unordered accesses to shared and tensor memory, and operations still in flight when a CTA or cluster ends.

shadow.py has the method (vector clocks); this module records the accesses of tasks and engines and retires lines of the
clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import errors
from ..locations import show
from . import engines, users, warps
from .diagnosis import bytes_error, early_waits
from .shadow import Access, Component, VectorClock, join

if TYPE_CHECKING:
    from ..locations import Where
    from .barriers import MBarrier
    from .machine import Machine
    from .storage import View
    from .tasks import CTA, AsyncOp, Cluster, Task

_COLLECT_EVERY = 64  # completed operations between two clean-ups of the clocks


class Detector:
    """The race detector of one launch. `watch`: whether it looks at all."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.diagnosis, self.watch = machine, machine.diagnosis, machine.options.races
        self._components = 0
        self._since_collect = 0

    # ------------------------------------------------------------ memory accesses
    def access(
        self,
        actor: Task | AsyncOp,
        view: View,
        write: bool,
        generic: bool,
        where: Where,
        name: str,
        report: Callable | None = None,
    ) -> None:
        """Look for races, poison and missing fences: `actor` reads or writes `view`, the buffer called `name`.

        generic: through the generic proxy, that is by ordinary loads and stores. report: takes what is found, as `Shadow` calls it.
        """
        region, component, clock = view._region or view.region, actor.component, actor.clock
        access = Access(component, dict(clock), write, generic, actor, where, name, region)
        shadow = view.storage.shadow
        (shadow.write if write else shadow.read)(region, access, clock, report or self.diagnosis.memory_error)

    def task_access(self, task: Task, view: View, write: bool, where: Where, name: str) -> None:
        """Look at an ordinary access of a task."""
        if self.watch:
            self._access_of(task, view, write, where, name, self.diagnosis.memory_error)

    def _access_of(self, task: Task, view: View, write: bool, where: Where, name: str, report: Callable) -> None:
        if task.num_warps > warps.WARPS and view.storage.space == "tmem":
            warps.access(task, view, write, where, name, report)
        else:
            self.access(task, view, write, True, where, name, report)

    def tolerant_read(self, task: Task, view: View, where: Where, name: str) -> bool:
        """Look at a read that may meet poison: kernels may load memory that was never written and not use it.

        Returns whether it did.
        """
        if not self.watch:
            return False
        met: list[str] = []

        def report(kind: str, *what: Any) -> None:
            if kind == "poison":
                met.append(kind)
            else:
                self.diagnosis.memory_error(kind, *what)

        self._access_of(task, view, False, where, name, report)
        if met:
            self.diagnosis.read_early.setdefault(show(where), early_waits(task))
        return bool(met)

    def op_access(self, op: AsyncOp, view: View, write: bool, name: str, generic: bool = False) -> None:
        """Look at an access of an engine."""
        if self.watch:
            self.access(op, view, write, generic, op.where, name)

    # ------------------------------------------------------------ ends
    def task_ended(self, task: Task) -> None:
        """Report what a task that has ended left under way."""
        if not self.watch:
            return
        if task.stores and (task.parent is None or task.stores is not task.parent.stores):
            self._unread(task)
        copies = [op for group in (*task.groups, task.copies) for op in group]
        if copies and (task.parent is None or task.copies is not task.parent.copies):
            self._uncopied(task, copies)
        if task.dots:
            op = task.dots[0]
            self.machine.report(
                errors.InFlightError(
                    f"{task.label} ends while {len(task.dots)} of its MMAs may still run: their result was never waited for",
                    [f"issued at {show(op.where)}"],
                    "tlx.async_dot_wait(0, acc) is missing before acc is used.",
                    op.where,
                )
            )

    def _unread(self, task: Task) -> None:
        """Report the TMA stores of a task that has ended that may still read shared memory."""
        op, count = task.stores[0], len(task.stores)
        what = f"a TMA store of {op.title}" if count == 1 else f"{count} TMA stores, the first of {op.title},"
        self.machine.report(
            errors.InFlightError(
                f"{task.label} ends while {what} may still read shared memory: nobody waited for it",
                [f"issued at {show(op.where)}"],
                "tlx.async_descriptor_store_wait(0) is missing at the end: the next CTA on this SM gets the shared memory.\n"
                "  Fix: let the task that stores wait for its stores before it ends; no other task can.",
                op.where,
            )
        )

    def _uncopied(self, task: Task, copies: Sequence[AsyncOp]) -> None:
        """Warn of the cp.async copies of a task that has ended that were not waited for."""
        op = copies[0]
        what = (
            f"cp.async into {op.title}" if len(copies) == 1 else f"{len(copies)} cp.async, the first into {op.title},"
        )
        self.machine.warn(
            errors.InFlightError(
                f"{task.label} ends while its {what} may still write to shared memory: nobody waited for it",
                [f"issued at {show(op.where)}"],
                "a prefetch past the last block, or tlx.async_load_wait_group(0) is missing at the end.",
                op.where,
            )
        )

    def cluster_ended(self, cluster: Cluster) -> None:
        """Report MMAs, announced bytes and uses of its memory that a cluster's clock does not cover at its end."""
        known: VectorClock = {}
        for cta in cluster.ctas:
            for task in cta.tasks:
                join(known, task.clock)
        for cta in cluster.ctas:
            self._check_mmas(cta, known)
            self._check_bytes(cta)
        users.check_starts(cluster)
        users.check(cluster)

    def _check_mmas(self, cta: CTA, known: VectorClock) -> None:
        mains = [(t, t.pipe) for t in cta.tasks if t.is_main and t.pipe is not None]
        for task, last in (*cta.pipes, *mains):
            op = engines.last_mma(last)
            if op is not None and op.clock[op.component.id] > known.get(op.component.id, 0):
                self.machine.report(
                    errors.InFlightError(
                        f"{cta.label} ends while an MMA of {task.label} may still run: nobody waited for it",
                        [f"MMA issued at {show(op.where)}"],
                        where=op.where,
                    )
                )

    def _check_bytes(self, cta: CTA) -> None:
        for bar in _barriers(cta):
            if bar.bytes and not any(op.barrier is bar for op in self.machine.scheduler.ops):
                self.machine.report(bytes_error(bar, "the CTA ends"))

    # ------------------------------------------------------------ lines of the vector clocks
    def new_component(self, label: Any) -> Component:
        """Return a new line of the vector clocks."""
        self._components += 1
        return Component(self._components, label)

    def completed(self, op: AsyncOp) -> None:
        """Note a completed operation; now and then forget lines that are not needed any more."""
        if not op.piped:
            op.task.cta.cluster.finished.append(op.component)
        self._since_collect += 1
        if self._since_collect >= _COLLECT_EVERY:
            self._since_collect = 0
            for cluster in self.machine.clusters:
                self._collect(cluster)

    def _collect(self, cluster: Cluster) -> None:
        """Retire the components of finished copies that the clock of every live task of their cluster covers."""
        ops = self.machine.scheduler.ops
        tasks = [t for cta in cluster.ctas for t in cta.tasks]
        clocks = [t.clock for t in tasks if t.is_main and t.done or not t.done and t.waiting != "region"]
        clocks += [op.clock for op in ops if op.task.cta.cluster is cluster]
        dead: list[Component] = []
        left: list[Component] = []
        for component in cluster.finished:
            (dead if all(component.id in clock for clock in clocks) else left).append(component)
        if not dead:
            return
        cluster.finished = left
        for component in dead:
            component.retired = True
        for cta in cluster.ctas:
            users.forget_retired(cta)
        keys = [c.id for c in dead]
        keys += [-1 - k for k in keys]
        for clock in self._clocks_of(cluster):
            for key in keys:
                clock.pop(key, None)

    def _clocks_of(self, cluster: Cluster) -> Iterator[VectorClock]:
        yield from (cluster.barrier.gathered, cluster.barrier.clock)
        for op in self.machine.scheduler.ops:
            yield op.clock
        for cta in cluster.ctas:
            for task in cta.tasks:
                yield task.clock
                if task.pipe is not None:
                    yield task.pipe.clock
            for bar in _barriers(cta):
                yield from (bar.clock, bar.gathered)
            for named in cta.named.values():
                yield from (named.clock, named.gathered)


def _barriers(cta: CTA) -> Iterator[MBarrier]:
    for item in cta.allocations:
        yield from getattr(item, "barriers", ())
    if cta.pair_barrier is not None:
        yield cta.pair_barrier
