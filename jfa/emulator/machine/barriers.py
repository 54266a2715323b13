"""Barriers: mbarriers in shared memory, named barriers, the cluster barrier.

An mbarrier counts arrivals and transaction bytes. Its phase number starts at 0; a phase completes when no arrival is
pending and no byte is outstanding, and the next begins. wait(parity) passes when the phase in progress has the other
parity: so a fresh barrier passes parity 1 and blocks on 0, and a waiter cannot tell two phases ahead from none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import errors
from ..locations import show, turn
from . import limits, warps
from .shadow import join

if TYPE_CHECKING:
    from ..locations import Where
    from .shadow import VectorClock
    from .tasks import CTA, Cluster, Task


_HISTORY = 6  # arrivals remembered for the report


class MBarrier:
    """One mbarrier. `count` arrivals complete a phase; `per_thread` barriers (alloc_warp_barrier) count threads, not calls."""

    __slots__ = (
        *(
            "name",
            "cta",
            "count",
            "per_thread",
            "pending",
            "bytes",
            "phase",
            "gathered",
            "clock",
            "time",
            "gathered_time",
        ),
        *("history", "waiters", "passed_by", "seen_by", "arrivers", "sources"),
    )

    def __init__(self, name: str, cta: CTA, count: int, per_thread: bool = False) -> None:
        self.name, self.cta, self.count, self.per_thread = name, cta, count, per_thread
        self.pending, self.bytes, self.phase = count, 0, 0
        self.gathered: VectorClock = {}  # clocks of this phase's arrivals
        self.clock: VectorClock = {}  # what a waiter of the last completed phase learns
        self.time = self.gathered_time = 0.0
        self.history: list[tuple[int, tuple]] = []
        self.waiters: list[Task] = []
        self.arrivers: list[tuple] = []  # who has arrived in the phase in progress
        self.sources: dict[
            str, None
        ] = {}  # labels of the tasks that have ever arrived, or whose copies and products have, in order
        self.passed_by: dict[Task, int] = {}  # task -> its counter when it passed the phase before this one
        self.seen_by: dict[Task, tuple[int, Where]] = {}  # task -> (phase it passed last, location)

    # ------------------------------------------------------------ arriving
    def arrive(self, count: int, clock: dict, time: float, what: tuple) -> None:
        """Count `count` arrivals of an actor whose clock is given; `what` = (verb, actor, location[, turns[, task]]) for reports.

        task: the label of the one that the actor, an engine's operation, works for.
        """
        self._note(clock, time, what)
        self.pending -= count
        if self.pending < 0:
            over, self.pending = -self.pending, 0
            before = f", after {' and '.join(dict.fromkeys(w[1] for w in self.arrivers))}" if self.arrivers else ""
            raise errors.OverArrivalError(
                f"mbarrier {self.label} got {over} arrival{'s' * (over > 1)} more than its arrive_count={self.count} in phase "
                f"{self.phase}: the last is {what[1]}'s{before}",
                ["arrivals of this phase, last one last:", *(_entry(self.phase, w) for w in (*self.arrivers, what))],
                where=what[2],
            )
        self.arrivers.append(what)
        self._complete()

    def expect(self, nbytes: int) -> None:
        """Announce bytes for the current phase (the arrival that goes with it is separate)."""
        self.bytes += nbytes

    def deliver(self, nbytes: int, clock: dict, time: float, what: tuple) -> None:
        """Count `nbytes` of a copy that have landed."""
        self._note(clock, time, what)
        self.bytes -= nbytes
        self._complete()

    def _note(self, clock: VectorClock, time: float, what: tuple) -> None:
        join(self.gathered, clock)
        if time > self.gathered_time:
            self.gathered_time = time
        self.history.append((self.phase, what))
        self.sources[what[-1] if len(what) > 4 else what[1]] = None
        if len(self.history) > _HISTORY:
            del self.history[0]

    def _complete(self) -> None:
        if self.pending or self.bytes:
            return
        missed = [task for task, count in self.passed_by.items() if self.gathered.get(task.component.id, 0) < count]
        self.phase += 1
        self.pending, self.arrivers = self.count, []
        self.clock = self.gathered
        self.gathered = dict(self.clock)
        self.time = self.gathered_time
        self.passed_by = {}
        if missed and self.cta.machine.options.races:
            self._overrun(missed[0])
        for task in self.waiters[:]:
            if self.passes(task.parity):
                self.waiters.remove(task)
                self.seen(task, task.where)
                task.machine.scheduler.wake(task)

    def _overrun(self, task: Task) -> None:
        phase, where = self.seen_by[task]
        self.cta.machine.report(
            errors.PhaseError(
                f"a wait on mbarrier {self.label} can come two phases late: "
                f"nothing keeps phase {self.phase - 1} from completing"
                f" "
                f"before {task.label} has seen phase {phase}",
                [
                    f"wait for phase {phase} (parity {phase & 1}) by {task.label}",
                    f"    at {show(where)}{turn(task.turns)}",
                    f"what completed phase {self.phase - 1} did not follow from that wait:",
                    *self.show_history(),
                ],
                where=where,
            )
        )

    # ------------------------------------------------------------ waiting
    def passes(self, parity: int) -> bool:
        return (self.phase & 1) != parity

    def seen(self, task: Task, where: Where) -> None:
        """Let `task`, a wait of which passed, learn what the completed phase's arrivals knew."""
        phase = self.phase - 1
        last = self.seen_by.get(task)
        again = last is not None and last[0] == phase
        if again or phase < 0:
            task.early.pop(self, None)
            task.early[self] = (phase, again, where, task.turns)
        elif task.early and self in task.early and not task.early[self][1]:
            del task.early[self]
        self.seen_by[task] = (phase, where)
        self.passed_by[task] = task.clock[task.component.id]
        join(task.clock, self.clock)

    # ------------------------------------------------------------ reports
    @property
    def label(self) -> str:
        return self.name if len(self.cta.cluster.ctas) == 1 else f"{self.name} of cta {self.cta.rank}"

    def state(self) -> str:
        arrived = self.count - self.pending
        text = f"phase {self.phase} (parity {self.phase & 1}) in progress: {arrived} of {self.count} arrivals"
        if self.bytes:
            text += (
                f", {self.bytes} bytes outstanding" if self.bytes > 0 else f", {-self.bytes} bytes more than announced"
            )
        return text

    def show_history(self) -> list[str]:
        if not self.history:
            return ["    nobody ever arrived"]
        return [_entry(phase, what) for phase, what in self.history]


def _entry(phase: int, what: tuple) -> str:
    verb, actor, where, *turns = what
    return f"    phase {phase}: {verb} by {actor} at {show(where)}{turn(turns[0]) if turns else ''}"


class NamedBarrier:
    """bar.sync / bar.arrive: threads, not calls; the count is given by each user and must agree."""

    __slots__ = (
        "number",
        "cta",
        "arrived",
        "expected",
        "generation",
        "gathered",
        "clock",
        "waiters",
        "time",
        "history",
        "sources",
    )

    def __init__(self, number: int, cta: CTA) -> None:
        self.number, self.cta = number, cta
        self.arrived, self.generation, self.time = 0, 0, 0.0
        self.expected: int | None = None
        self.gathered: VectorClock = {}
        self.clock: VectorClock = {}
        self.waiters: list[Task] = []
        self.history: list[tuple[str, str, Where]] = []
        self.sources: dict[str, None] = {}  # labels of the tasks that have ever come here, in order

    @property
    def label(self) -> str:
        return f"named barrier {self.number}"

    def enter(self, task: Task, threads: int, where: Where, verb: str) -> int:
        """Count task's threads in; returns the generation to wait for."""
        if not 0 <= self.number < limits.NAMED_BARRIERS:
            raise errors.NamedBarrierError(
                f"named barrier {self.number}: ids go from 0 to 15", [f"at {show(where)}"], where=where
            )
        if threads % limits.WARP or threads <= 0:
            raise errors.NamedBarrierError(
                f"named barrier {self.number}: {threads} threads is no multiple of 32",
                [f"at {show(where)}"],
                where=where,
            )
        if self.expected is not None and self.expected != threads:
            raise errors.NamedBarrierError(
                f"named barrier {self.number}: {task.label} says {threads} threads, earlier users of this round said "
                f"{self.expected}",
                [f"at {show(where)}", *self.show_history()],
                where=where,
            )
        generation = self.generation
        self.expected = threads
        self.arrived += limits.WARP * task.num_warps
        self.history = [*self.history[-_HISTORY:], (verb, task.label, where)]
        self.sources[task.label] = None
        join(self.gathered, warps.told(task))
        self.time = max(self.time, task.time)
        own = limits.WARP * task.num_warps
        alone = self.arrived == own and own % threads == 0  # its own warps open the barrier, several times over
        if self.arrived > threads and not alone:
            raise errors.NamedBarrierError(
                f"named barrier {self.number}: {self.arrived} threads arrived, its users said {threads}",
                self.show_history(),
                where=where,
            )
        if self.arrived == threads or alone:
            self.arrived, self.expected, self.generation = 0, None, generation + 1
            self.clock, self.gathered = self.gathered, {}
            for waiter in self.waiters:
                waiter.machine.scheduler.wake(waiter)
            self.waiters = []
        return generation

    def state(self) -> str:
        return f"{self.arrived} of {self.expected} threads"

    def show_history(self) -> list[str]:
        return [f"    {verb} by {actor} at {show(where)}" for verb, actor, where in self.history]


class ClusterBarrier:
    """barrier.cluster: every live warp of every CTA of the cluster; warps that have left count as arrived."""

    __slots__ = ("cluster", "inside", "generation", "gathered", "clock", "time")
    label = "the cluster barrier"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.generation, self.time = cluster, 0, 0.0
        self.inside: list[Task] = []
        self.gathered: VectorClock = {}
        self.clock: VectorClock = {}

    def enter(self, task: Task) -> int:
        generation = self.generation
        join(self.gathered, task.clock)
        self.time = max(self.time, task.time)
        self.inside.append(task)
        self.settle()
        return generation

    def settle(self) -> None:
        """Open if every task that still runs is inside (also called when a task ends)."""
        if not self.inside or self.missing():
            return
        self.generation += 1
        self.clock, self.gathered = self.gathered, {}
        inside, self.inside = self.inside, []
        for task in inside:
            if task.waiting is self:
                task.machine.scheduler.wake(task)

    def missing(self) -> list[Task]:
        return [t for t in self.cluster.workers() if t not in self.inside]

    def state(self) -> str:
        return "missing: " + ", ".join(t.label for t in self.missing())
