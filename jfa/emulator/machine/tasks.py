"""The actors: tasks (one per warp-specialized region and replica), asynchronous operations, CTAs and clusters."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

from ..locations import here
from .barriers import ClusterBarrier

if TYPE_CHECKING:
    from ..locations import Where
    from .barriers import MBarrier, NamedBarrier
    from .engines import Pending
    from .machine import Machine, Shape
    from .shadow import Component, VectorClock
    from .warps import WarpGroup


class Task:
    """A group of warps that run one piece of code. It runs until it waits; then another task runs.

    clock is its vector clock (see shadow.py), time its virtual time under the timed policy.
    """

    def __init__(
        self,
        machine: Machine,
        cta: CTA,
        name: str,
        body: Callable[[], object],
        num_warps: int,
        replica: int = 0,
        parent: Task | None = None,
    ) -> None:
        self.machine, self.cta, self.name, self.parent = machine, cta, name, parent
        self.num_warps, self.replica = num_warps, replica
        self.component = machine.detector.new_component(self)
        self.clock: VectorClock = dict(parent.clock) if parent else {}
        self.clock[self.component.id] = 1
        self.time: float = parent.time if parent else cta.cluster.start
        self.chain = self.chain_end = self.time
        self.waiting: Any = None  # what it waits for: a barrier, an operation, "region", a CTA
        self.why: Callable[[], str] | None = None
        self.where: Where = ()
        self.parity, self.done = 0, False
        self.children: set[Task] = set()
        self.stores: list[AsyncOp] = []  # TMA stores not waited for
        self.dots: list[AsyncOp] = []  # Hopper MMAs not waited for
        self.results: dict[
            int, Pending
        ] = {}  # of these: what the block that async_dot returned, by its identity, will hold
        self.copies: list[AsyncOp] = []  # cp.async: the open group
        self.groups: list[list[AsyncOp]] = []  # and those committed
        self.pipe: AsyncOp | None = None  # the last MMA this task issued
        self.warp_groups: list[WarpGroup] = []  # of a task of more than four warps that has used tensor memory
        # barrier -> (phase, passed before?, where, turns) of waits that passed too early, or before any arrival
        self.early: dict[MBarrier, tuple[int, bool, Where, Any]] = {}
        # the loops it is in, innermost first: (name, value, outer loop's, site)
        self.turns: Any = parent.turns if parent else None
        self.lanes: Any = None  # in a branch that only some threads take: which (the frontend's)
        self.deferred: list | None = (
            None  # fault injection: [operations to go, barrier, parity, where] of a wait put off
        )
        # fault injection: the clock that a fence is to see that comes early, see sync.fence
        self.before: VectorClock = {}
        self.stored = False
        self.unordered: list = []  # stores to global memory since its last barrier (frontend/own_stores.py)
        self.is_main = parent is None
        self.regions: list = []  # open async_tasks regions
        self.greenlet: Any = greenlet(lambda: self._run(body), machine.scheduler.hub)
        self.greenlet.gr_context = contextvars.copy_context()

    def _run(self, body: Callable[[], object]) -> None:
        body()
        if self.is_main and self.machine.control is not None:
            self.machine.control.end(self)
        self.done = True

    @property
    def label(self) -> str:
        rank = "" if self.cta.alone else f"cta{self.cta.pid}/"
        return rank + self.name

    def says_why(self) -> str:
        """Return what a suspended task waits for, in words."""
        return self.why() if self.why is not None else "nothing"

    def publish(self) -> None:
        """Begin a new time after a release: what this task does from now on is not covered by it."""
        self.clock[self.component.id] += 1

    def pause(self) -> None:
        """Let others run (used by code that polls)."""
        self.machine.scheduler.pause(self)

    def stands(self) -> Where:
        """Return its place in the kernel: where it was suspended, or where it waits."""
        frame = self.greenlet.gr_frame if not self.done else None
        return (here(frame=frame) if frame is not None else ()) or self.where

    def end(self) -> None:
        """End the task's greenlet, whatever it is doing."""
        if not self.greenlet.dead:
            self.greenlet.throw()
        self.done = True

    def __repr__(self) -> str:
        return f"<task {self.label}>"


class AsyncOp:
    """An operation that an engine does for a task: a copy, an MMA, a commit. `run(op)` moves the data and signals."""

    __slots__ = (
        *("kind", "run", "task", "component", "clock", "where", "previous", "done"),
        *("start", "end", "waiters", "title", "barrier", "phase", "info", "piped", "turns", "signals"),
    )

    def __init__(
        self,
        kind: str,
        run: Callable[[AsyncOp], None],
        task: Task,
        component: Component,
        clock: VectorClock,
        where: Where,
        previous: AsyncOp | None = None,
        title: str = "",
    ) -> None:
        self.kind, self.task, self.component, self.clock, self.where = kind, task, component, clock, where
        self.run: Any = run  # None once it has run
        self.previous, self.title = previous, title
        self.done, self.start, self.end = False, 0.0, 0.0
        self.waiters: list[Task] = []
        self.barrier: MBarrier | None = None  # where its bytes are counted
        self.phase = 0  # of that barrier at issue
        self.info: AsyncOp | None = None  # of a commit: what it follows
        self.piped, self.turns = False, task.turns
        self.signals: Sequence[tuple[MBarrier, int, int]] = ()

    @property
    def label(self) -> str:
        return f"{self.kind} issued by {self.task.label}"

    @property
    def landed_late(self) -> bool:
        """Whether its barrier completed the phase it belongs to without its bytes."""
        bar = self.barrier
        return bar is not None and (bar.bytes < 0 or (bar.phase > self.phase and not self.done))

    @property
    def eligible(self) -> bool:
        return self.previous is None or self.previous.done


class CTA:
    """One CTA: its memory, its barriers, its tasks."""

    def __init__(self, machine: Machine, cluster: Cluster, pid: Shape, rank: int, grid: Shape, num_warps: int) -> None:
        self.machine, self.cluster, self.pid, self.rank = machine, cluster, pid, rank
        self.grid, self.num_warps = grid, num_warps
        self.allocations: list = []  # in program order: finds the same object of a peer CTA
        self.alias_sets: list = []  # what its allocations share
        self.named: dict[int, NamedBarrier] = {}
        self.tasks: list[Task] = []
        self.alloc_waiters: list[Task] = []
        self.free: dict[str, float] = {}  # resource -> time it is free from (timed policy)
        self.pair_barrier: MBarrier | None = None  # of two-CTA MMAs that the compiler waits for
        self.pair_parity = 0
        self.places: dict[str, set[tuple[int, int]]] = {}  # of its memory, for the counts
        self.pipes: list[tuple[Task, AsyncOp]] = []  # every task that issued an MMA, and its last
        # users of its shared memory: copies into it and other CTAs, see users.py
        self.users: dict[tuple[int, str], tuple[Component, int, Any, Where]] = {}
        self.stays = (
            True  # whether the compiler's own cluster barrier at the end of kernels with paired MMAs is left in
        )

    @property
    def alone(self) -> bool:
        return self.machine.single_cta

    @property
    def label(self) -> str:
        return f"cta{self.pid}"


class Cluster:
    """CTAs that are launched together."""

    def __init__(self, machine: Machine, start: float = 0.0) -> None:
        self.machine, self.start, self.live = machine, start, 0
        self.ctas: list[CTA] = []
        self.paired = False  # whether it issued an MMA of a pair of CTAs
        self.signalled = False  # whether one of its CTAs arrives at a barrier of another
        # writes to a CTA that the writer does not know to have started: (actor's label, CTA) -> (where, what)
        self.early: dict[tuple[str, CTA], tuple[Where, str]] = {}
        self.finished: list[Component] = []  # components of completed copies, until all tasks know of them
        self.barrier = ClusterBarrier(self)

    def workers(self) -> list[Task]:
        """Return the tasks whose warps still run: the children of an open async_tasks region replace their parent."""
        return [t for cta in self.ctas for t in cta.tasks if not t.done and not t.children]
