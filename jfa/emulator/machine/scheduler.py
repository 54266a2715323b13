"""Choose what happens next: one thing at a time, either a runnable task or an asynchronous operation that can complete.

The four policies differ in `pick` only, and in whether an operation completes when it is issued.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from .. import errors
from ..locations import here, show
from . import sync, warps
from .shadow import Component, VectorClock, join
from .tasks import AsyncOp, Task

if TYPE_CHECKING:
    from ..locations import Where
    from .barriers import MBarrier
    from .machine import Machine
    from .tasks import CTA

_NO_ACCESS = (
    "barrier_wait",
    "barrier_expect_bytes",
    "fence",
    "clock64",
    "async_descriptor_store_wait",
    "async_dot_wait",
)  # waits move past these
_PATIENCE = 64  # polls in a row before one more cluster is let in
_POLLS = 200_000  # polls in a row, by all tasks together, without any barrier or copy moving


class Scheduler:
    """The tasks and operations of one launch. `control`: chooses every step in place of the policy (control.py)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        options = machine.options
        self.policy, self.control, self.fault = options.policy, options.control, options.fault
        self.timed, self.eager = options.policy == "timed", options.policy == "eager"
        self.preempts = options.policy in ("random", "timed")
        self.rng = random.Random(options.seed)
        self.tasks: list[Task] = []
        self.ready: deque[Task] = deque()
        self.ops: list[AsyncOp] = []  # issued, not complete
        self.hub: greenlet = getcurrent()  # the launch loop: where a task that waits switches to
        self._idle = 0

    # ------------------------------------------------------------ what is next
    def pick(self) -> Task | AsyncOp | None:
        """Choose a ready task or an operation that can complete; None if neither exists."""
        if self.control is not None:
            return self.control.pick(self.machine)
        ready, policy = self.ready, self.policy
        if policy == "eager":
            return ready.popleft() if ready else (self.ops[0] if self.ops else None)
        if policy == "lazy" and ready:
            return self._take(self.rng.randrange(len(ready)))
        ops = [op for op in self.ops if op.eligible] if self.ops else []
        if policy == "timed":
            return self._earliest(ops)
        if not ready and not ops:
            return None
        index = self.rng.randrange(len(ready) + len(ops))
        return self._take(index) if index < len(ready) else ops[index - len(ready)]

    def _take(self, index: int) -> Task:
        ready = self.ready
        if index == 0:
            return ready.popleft()
        task = ready[index]
        del ready[index]
        return task

    def _earliest(self, ops: Iterable[AsyncOp]) -> Task | AsyncOp | None:
        best = None
        for op in ops:
            if best is None or op.end < best.end:
                best = op
        index = None
        for k, task in enumerate(self.ready):
            if (best is None or task.time < best.end) and (index is None or task.time < self.ready[index].time):
                index = k
        return best if index is None else self._take(index)

    # ------------------------------------------------------------ tasks
    def add(self, task: Task) -> None:
        """Take in a new task, which can run."""
        task.cta.tasks.append(task)
        self.tasks.append(task)
        self.ready.append(task)

    def end_all(self) -> None:
        """End every task, wherever it stands, and forget what is in flight."""
        for task in self.tasks:
            task.end()
        self.tasks, self.ops = [], []
        self.ready.clear()

    def block(self, task: Task, waiting: Any, why: Callable[[], str], where: Where) -> None:
        """Suspend `task` until someone wakes it. `why()` says what it waits for."""
        task.waiting, task.why, task.where = waiting, why, where
        self.hub.switch()

    def wake(self, task: Task) -> None:
        """Let a suspended task go on."""
        task.waiting = task.why = None
        self._idle = 0
        self.ready.append(task)

    def pause(self, task: Task) -> None:
        """Put a running task at the end of the queue.

        Under "lazy" an operation gets a chance, for the task may poll for its effect.
        """
        if self.control is not None:
            self.control.pause(task)
            return
        if self.policy == "lazy":
            for op in [op for op in self.ops if op.eligible][:1]:
                self.ops.remove(op)
                self.complete(op)
        self._idle += 1
        if self._idle > _POLLS:
            raise errors.LivelockError(
                f"{task.label} polls, and no other task changes anything", [f"at {show(here())}"], where=here()
            )
        if self.timed:
            task.time += 1
        if self._idle % _PATIENCE == 0:
            self.machine.start_cluster(task.time)  # the CTA that it polls for may not be resident yet
        self._give_way(task)

    def _give_way(self, task: Task) -> None:
        self.ready.append(task)
        self.hub.switch()

    def step(self, task: Task, kind: str, name: str, where: Where) -> str | None:
        """Begin a TLX operation: others may run first (random, timed), and faults are injected. Returns the fault or None."""
        self.machine.stats[kind] += 1
        if task.unordered:
            task.unordered = []
        if task.deferred is not None and kind not in _NO_ACCESS:
            self._overdue(task, task.deferred)
        if self.preempts and (not self.timed or self._someone_earlier(task)):
            self._give_way(task)
        if self.fault is not None:
            return self.fault(kind, name, task, where)
        return None

    def let_earlier_run(self, task: Task) -> None:
        """Let tasks behind this one in time reserve first: resources serve in the order of time."""
        if self.timed and self._someone_earlier(task):
            self._give_way(task)

    @staticmethod
    def _overdue(task: Task, deferred: list) -> None:
        """Do a deferred wait (an injected fault) once one more operation has run."""
        deferred[0] -= 1
        if deferred[0] < 0:
            task.deferred = None
            sync.wait(task, *deferred[1:])

    def _someone_earlier(self, task: Task) -> bool:
        now = task.time
        for other in self.ready:
            if other.time < now:
                return True
        for op in self.ops:
            if op.end < now and op.eligible:
                return True
        return False

    # ------------------------------------------------------------ asynchronous operations
    def issue(
        self,
        task: Task,
        kind: str,
        run: Callable[[AsyncOp], None],
        where: Where,
        *,
        pipe: bool = False,
        demand: str | None = None,
        track: str = "TMA",
        title: str = "",
        facts: dict[str, Any] | None = None,
        signals: Sequence[tuple[MBarrier, int, int]] = (),
        beside: Sequence[tuple[CTA, str]] = (),
    ) -> AsyncOp:
        """Hand an operation to an engine.

        pipe: it follows the task's earlier MMAs in order. `run(op)` moves data and signals: (barrier, arrivals, bytes added) of
        each in `signals`. demand, facts: what it costs, see Clock.book. beside: other CTAs that it occupies at the same time,
        each with its own demand.
        """
        if task.warp_groups and kind not in ("TMA load", "cp.async"):
            warps.join(task)  # one thread issues, after a barrier of all
        previous = task.pipe if pipe else None
        component, clock = self._component_of(task, kind, pipe, previous)
        op = AsyncOp(
            kind, run, task, component, clock, where, None if previous is None or previous.done else previous, title
        )
        op.piped, op.signals = pipe, signals
        if pipe:
            op.info = previous if kind == "commit" else None
            task.pipe = op
        elif signals:
            op.barrier, op.phase = signals[0][0], signals[0][0].phase
        task.clock[task.component.id] += 1
        if self.timed:
            self._schedule(op, previous, track, title or kind, demand, facts or {}, beside)
        if self.control is not None:
            self.control.issued(self.machine, op)
        elif self.eager:
            self.complete(op)
        else:
            self.ops.append(op)
        return op

    def _component_of(
        self, task: Task, kind: str, pipe: bool, previous: AsyncOp | None
    ) -> tuple[Component, VectorClock]:
        """Return the line of the vector clocks that the operation is on, and what it knows."""
        clock = dict(task.clock)
        if previous is not None:
            join(clock, previous.clock)
            component = previous.component
            clock[component.id] = previous.clock[component.id] + 1
        else:
            component = self.machine.detector.new_component(f"MMA pipe of {task.label}" if pipe else kind)
            clock[component.id] = 1
        return component, clock

    def _schedule(
        self,
        op: AsyncOp,
        previous: AsyncOp | None,
        track: str,
        title: str,
        demand: str | None,
        facts: dict,
        beside: Sequence[tuple[CTA, str]],
    ) -> None:
        task, time = op.task, self.machine.clock
        op.start, op.end = time.book(task.cta, task.time, demand, facts)
        for cta, what in beside:  # it takes as long as the slower of them
            start, end = time.book(cta, task.time, what, facts)
            op.start, op.end = max(op.start, start), max(op.end, end)
        if previous is not None:
            op.end = max(op.end, previous.end)
        for cta, _ in beside:
            time.emit(cta, track, title, op.start, op.end, kind="async", where=op.where, **facts)
        told = {"signals": tuple(bar.label for bar, *_ in op.signals)} if op.signals else {}
        time.emit(task.cta, track, title, op.start, op.end, kind="async", where=op.where, **facts, **told)

    def complete(self, op: AsyncOp) -> None:
        """Let the operation take effect."""
        try:
            op.run(op)
        except errors.EmulatorError as error:
            error.where = error.where or op.where  # no kernel code is on the stack when an engine works
            raise
        op.done = True
        op.previous = op.run = None
        clock = self.machine.clock
        clock.time = max(clock.time, op.end)
        for task in op.waiters:
            self.wake(task)
        op.waiters = []
        self._idle = 0
        self.machine.detector.completed(op)

    def wait_for(self, task: Task, op: AsyncOp, why: Callable[[], str], where: Where) -> None:
        """Block `task` until `op` has completed; it then knows of everything the operation knew."""
        if not op.done:
            op.waiters.append(task)
            self.block(task, op, why, where)
        join(task.clock, op.clock)
        if self.timed:
            task.time = max(task.time, op.end)
