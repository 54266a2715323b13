"""Who acts: tasks (one a warp-specialised region and replica), asynchronous operations, CTAs and clusters."""

from __future__ import annotations

import contextvars

from greenlet import greenlet

from ..locations import here
from .barriers import ClusterBarrier


class Task:
    """A group of warps that run one piece of code. It runs until it waits, then another task does.

    clock is its vector clock (see shadow.py), time its virtual time under the timed policy.
    """

    def __init__(self, machine, cta, name, body, num_warps, replica=0, parent=None):
        self.machine, self.cta, self.name, self.parent = machine, cta, name, parent
        self.num_warps, self.replica = num_warps, replica
        self.component = machine.detector.new_component(self)
        self.clock = dict(parent.clock) if parent else {}
        self.clock[self.component.id] = 1
        self.time = parent.time if parent else cta.cluster.start
        self.chain = self.chain_end = self.time
        self.waiting = self.why = None
        self.where, self.parity, self.done = (), 0, False
        self.children = set()
        self.stores = []  # TMA stores not waited for
        self.dots = []  # Hopper MMAs not waited for
        self.results = {}  # of these: the block that async_dot returned, by its identity, and what it will hold
        self.copies, self.groups = [], []  # cp.async: open group, committed groups
        self.pipe = None  # the last MMA this task issued
        self.warp_groups = []  # of a task of more than four warps that has used tensor memory
        self.early = {}  # barrier -> (phase, passed before?, where, turns) of waits that passed too early, or before any arrival
        self.turns = (
            parent.turns if parent else None
        )  # the loops it is in, innermost first: (name, value, outer loop's, site)
        self.lanes = None  # in a branch that only some threads take: which (the frontend's)
        self.deferred = None  # fault injection: [operations to go, barrier, parity, where] of a wait put off
        self.before, self.stored = (
            {},
            False,
        )  # fault injection: the clock that a fence is to see that comes early, see sync.fence
        self.unordered = []  # stores to global memory since its last barrier (frontend/own_stores.py)
        self.is_main = parent is None
        self.registers = None
        self.regions = []
        self.greenlet = greenlet(lambda: self._run(body), machine.scheduler.hub)
        self.greenlet.gr_context = contextvars.copy_context()

    def _run(self, body):
        body()
        if self.is_main and self.machine.control is not None:
            self.machine.control.end(self)
        self.done = True

    @property
    def label(self) -> str:
        rank = "" if self.cta.alone else f"cta{self.cta.pid}/"
        return rank + self.name

    def publish(self) -> None:
        """Called after a release: what this task does from now on is not covered by it."""
        self.clock[self.component.id] += 1

    def pause(self) -> None:
        """Let others run (used by code that polls)."""
        self.machine.scheduler.pause(self)

    def stands(self):
        """Where in the kernel it is: where it was suspended, or where it waits."""
        frame = self.greenlet.gr_frame if not self.done else None
        return (here(frame=frame) if frame is not None else ()) or self.where

    def end(self) -> None:
        """End the task's greenlet, wherever it stands."""
        if not self.greenlet.dead:
            self.greenlet.throw()
        self.done = True

    def __repr__(self):
        return f"<task {self.label}>"


class AsyncOp:
    """Something an engine does for a task: a copy, an MMA, a commit. `run(op)` moves the data and signals."""

    __slots__ = (
        *("kind", "run", "task", "component", "clock", "where", "previous", "done"),
        *("start", "end", "waiters", "title", "barrier", "phase", "info", "piped", "turns", "signals"),
    )

    def __init__(self, kind, run, task, component, clock, where, previous=None, title=""):
        self.kind, self.run, self.task, self.component, self.clock, self.where = (
            kind,
            run,
            task,
            component,
            clock,
            where,
        )
        self.previous, self.title = previous, title
        self.done, self.start, self.end, self.waiters = False, 0.0, 0.0, []
        self.barrier = self.phase = self.info = (
            None  # barrier: where its bytes are counted; phase: of that barrier at issue
        )
        self.piped, self.turns, self.signals = False, task.turns, ()

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

    def __init__(self, machine, cluster, pid, rank, grid, num_warps):
        self.machine, self.cluster, self.pid, self.rank = machine, cluster, pid, rank
        self.grid, self.num_warps = grid, num_warps
        self.allocations = []  # in program order: finds the same object of a peer CTA
        self.sites = {}  # allocation site -> bytes or columns it takes
        self.smem_bytes = self.tmem_columns = 0
        self.named = {}
        self.tasks = []
        self.alloc_waiters = []
        self.free = {}  # resource -> time it is free from (timed policy)
        self.pair_barrier, self.pair_parity = None, 0  # of two-CTA MMAs that the compiler waits for
        self.pipes = []  # (task, last MMA) of every task that issued one
        self.users = {}  # of its shared memory: copies into it and other CTAs, see users.py
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

    def __init__(self, machine, start=0.0):
        self.machine, self.start, self.ctas, self.live = machine, start, [], 0
        self.paired = False  # whether it issued an MMA of a pair of CTAs
        self.finished = []  # components of completed copies, until all tasks have heard of them
        self.barrier = ClusterBarrier(self)

    def workers(self):
        """The tasks whose warps still run: the children of an open async_tasks region stand for their parent."""
        return [t for cta in self.ctas for t in cta.tasks if not t.done and not t.children]
