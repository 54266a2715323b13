"""The machine of one launch: runs clusters of CTAs, task by task, operation by operation.

One thing happens at a time. `pick()` chooses what is next: a task that can run, or an asynchronous operation that can
complete. The
four policies differ only there (and in whether an operation completes when it is issued).
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import Counter, deque

import numpy as np
from greenlet import getcurrent

from .. import errors
from ..locations import here, show, turn
from ..options import Options
from . import engines, limits, sync, users, warps
from .shadow import Access, Component, join
from .tasks import CTA, AsyncOp, Cluster, Task

_lock = threading.RLock()  # one launch at a time in a process: tasks share Python's globals
_running: Task | None = None

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
_COLLECT_EVERY = 64  # completed operations between two clean-ups of the clocks


def current() -> Task | None:
    """The task that runs now, None outside a launch."""
    return _running


class Run:
    """What a launch left behind: findings and warnings (errors.EmulatorError), events, operation counts, modelled time."""

    def __init__(self, machine):
        self.machine, self.kernel, self.options = machine, machine.kernel, machine.options
        self.findings, self.warnings = machine.findings, machine.warnings
        self.events, self.stats, self.time, self.steps = machine.events, machine.stats, machine.time, machine.steps
        self.occupied = machine.occupied

    @property
    def clean(self) -> bool:
        return not self.findings

    def __repr__(self):
        return f"<run of {self.kernel}: {len(self.findings)} findings, {len(self.warnings)} warnings>"


# Block operations of one warp group that go register by register. In a chain of them the next starts on the first registers
# while the last ones are still under way, so units work side by side: a chain takes as long as its busiest unit. Anything
# else (a reduction, a load, a barrier) needs the whole block and ends the chain.
_ELEMENTWISE = ("alu", "mufu", "cvt", "int")


class Machine:
    def __init__(self, options: Options | None = None, kernel="kernel"):
        self.options, self.kernel = options or Options(), kernel
        o = self.options
        self.policy, self.timed, self.eager = o.policy, o.policy == "timed", o.policy == "eager"
        self.control = o.control  # who chooses every step: a replay or an exploration
        self.preempts = o.policy in ("random", "timed")
        self.watch, self.fault, self.trace = o.races, o.fault, o.trace
        self.rng = random.Random(o.seed)
        self.ready, self.ops, self.tasks = deque(), [], []
        self.hub = None
        self.findings, self.warnings, self.events, self.stats = [], [], [], Counter()
        self.touched = set()  # boxes that TMA loads have fetched, kept with options.cold
        self.occupied = {}  # (CTA, resource) -> [(begin, end)] in modelled cycles, kept with the trace
        self._reported = set()
        self.read_early = {}  # place where memory that nobody wrote was loaded -> notes on the waits before
        self._components = 0
        self._since_collect = 0
        self._idle = 0
        self.steps, self.time = 0, 0.0
        self.pending_clusters = deque()
        self.single_cta = True
        self.clusters = []
        self.live_clusters = 0

    # ------------------------------------------------------------ launching
    def launch(self, entry, grid=(1, 1, 1), cluster=(1, 1, 1), num_warps=4) -> Run:
        """Run `entry()` once a CTA of the grid; returns the Run, or raises the first error (report="raise")."""
        global _running
        grid, cluster = _three(grid), _three(cluster)
        self._check_launch(grid, cluster, num_warps)
        refused = self._refused_grid(grid, cluster)
        if refused is not None:  # the compiler comes before the driver: let it object first
            grid = cluster
        self.entry, self.grid, self.cluster_shape, self.num_warps = entry, grid, cluster, num_warps
        self.single_cta = grid == (1, 1, 1)
        self.pending_clusters.extend(_cluster_origins(grid, cluster))
        with _lock:
            outer, self.hub = _running, getcurrent()
            try:
                if self.control is not None:
                    self.control.begin(self)
                with np.errstate(all="ignore"):
                    self._run()
            except errors.EmulatorError as error:
                self._end_with(refused or error)
            finally:
                self._end_all()
                _running = outer
        if refused is not None and refused not in self.findings:
            self._end_with(refused)
        return Run(self)

    @staticmethod
    def _refused_grid(grid, cluster):
        if any(g % c for g, c in zip(grid, cluster)):
            return errors.LaunchError(f"the grid {grid} is not divisible by the cluster {cluster}")
        return None

    def _check_launch(self, grid, cluster, num_warps):
        if cluster[0] * cluster[1] * cluster[2] > limits.MAX_CLUSTER:
            raise errors.LaunchError(f"a cluster of {cluster} has more than {limits.MAX_CLUSTER} CTAs")
        if num_warps * limits.WARP > limits.MAX_THREADS:
            raise errors.ThreadLimitError(f"num_warps={num_warps} is more than {limits.MAX_THREADS} threads")

    def _end_with(self, error):
        self._note_early_reads(error)
        if self.options.report == "collect":
            self.findings.append(error)
        else:
            error.run = Run(self)
            raise error

    def _end_all(self):
        for task in self.tasks:
            task.end()
        self.tasks, self.ops = [], []
        self.ready.clear()
        self.clusters.clear()
        self.hub = self.entry = None

    def _start_cluster(self, start=0.0) -> bool:
        if not self.pending_clusters:
            return False
        origin = self.pending_clusters.popleft()
        cluster = Cluster(self, start)
        cx, cy, cz = self.cluster_shape
        for rank in range(cx * cy * cz):
            pid = (origin[0] + rank % cx, origin[1] + rank // cx % cy, origin[2] + rank // (cx * cy))
            cluster.ctas.append(CTA(self, cluster, pid, rank, self.grid, self.num_warps))
        self.clusters.append(cluster)
        self.live_clusters += 1
        cluster.live = len(cluster.ctas)
        self.stats["ctas"] += cluster.live
        for cta in cluster.ctas:
            self.add_task(Task(self, cta, "main", self.entry, self.num_warps))
        return True

    def add_task(self, task):
        task.cta.tasks.append(task)
        self.tasks.append(task)
        self.ready.append(task)

    def steal(self):
        """CLC: the origin of a cluster that has not started, or None."""
        return self.pending_clusters.popleft() if self.pending_clusters else None

    # ------------------------------------------------------------ the loop
    def _run(self):
        global _running
        for _ in range(self.options.max_ctas or self.options.num_sms):
            self._start_cluster()
        limit = self.options.max_steps
        while True:
            chosen = self.pick()
            if chosen is None:
                if self.tasks:
                    raise self._deadlock()
                if not self._start_cluster(self.time):
                    return
                continue
            self.steps += 1
            if self.steps > limit:
                where = next((at for at in (t.stands() for t in self.tasks) if at), ())
                raise errors.LivelockError(f"no end after {limit} scheduling steps", self._who_runs(), where=where)
            if type(chosen) is AsyncOp:
                self.ops.remove(chosen)
                self.complete(chosen)
                continue
            _running = chosen
            chosen.greenlet.switch()
            if chosen.done:
                self._task_ended(chosen)

    def pick(self):
        """What happens next: a ready task or an operation that can complete; None if neither exists."""
        if self.control is not None:
            return self.control.pick(self)
        ready, policy = self.ready, self.policy
        if policy == "eager":
            return ready.popleft() if ready else (self.ops[0] if self.ops else None)
        if policy == "lazy" and ready:
            return self._take(self.rng.randrange(len(ready)))
        ops = [op for op in self.ops if op.eligible] if self.ops else ()
        if policy == "timed":
            return self._earliest(ops)
        if not ready and not ops:
            return None
        index = self.rng.randrange(len(ready) + len(ops))
        return self._take(index) if index < len(ready) else ops[index - len(ready)]

    def _take(self, index):
        ready = self.ready
        if index == 0:
            return ready.popleft()
        task = ready[index]
        del ready[index]
        return task

    def _earliest(self, ops):
        best = None
        for op in ops:
            if best is None or op.end < best.end:
                best = op
        index = None
        for k, task in enumerate(self.ready):
            if (best is None or task.time < best.end) and (index is None or task.time < self.ready[index].time):
                index = k
        return best if index is None else self._take(index)

    def _task_ended(self, task):
        self.tasks.remove(task)
        self.time = max(self.time, task.time)
        self._check_stores(task)
        self._check_dots(task)
        cluster = task.cta.cluster
        if task.parent is not None:
            parent = task.parent
            warps.join(task)
            join(parent.clock, task.clock)
            parent.children.discard(task)
            parent.time = max(parent.time, task.time)
            if not parent.children and parent.waiting == "region":
                self.wake(parent)
            if task.pipe is not None:
                task.cta.pipes.append((task, task.pipe))
        else:
            cluster.live -= 1
        cluster.barrier.settle()
        if cluster.live == 0 and task.parent is None:
            self._check_cluster_end(cluster)
            self.clusters.remove(cluster)
            self.live_clusters -= 1
            self._start_cluster(task.time)
        task.greenlet = _ENDED

    # ------------------------------------------------------------ checks at the end of a task and a cluster
    def _check_dots(self, task):
        if task.dots and self.watch:
            op = task.dots[0]
            self.report(
                errors.InFlightError(
                    f"{task.label} ends while {len(task.dots)} of its MMAs may still run: their result was never waited for",
                    [f"issued at {show(op.where)}"],
                    "tlx.async_dot_wait(0, acc) is missing before acc is used.",
                    op.where,
                )
            )

    def _check_stores(self, task):
        if task.stores and self.watch:
            op = task.stores[0]
            self.warn(
                errors.InFlightError(
                    f"{task.label} ends with {len(task.stores)} TMA store(s) that nobody waited for",
                    [f"first issued at {show(op.where)}"],
                    "tlx.async_descriptor_store_wait(0) is missing at the end; "
                    "the shared memory may be handed on while it is still"
                    " read.",
                    op.where,
                )
            )

    def _check_cluster_end(self, cluster):
        known = {}
        for cta in cluster.ctas:
            for task in cta.tasks:
                join(known, task.clock)
        for cta in cluster.ctas:
            mains = [(t, t.pipe) for t in cta.tasks if t.is_main and t.pipe is not None]
            for task, last in (*cta.pipes, *mains):
                op = engines.last_mma(last)
                if op is not None and op.clock[op.component.id] > known.get(op.component.id, 0):
                    self.report(
                        errors.InFlightError(
                            f"{cta.label} ends while an MMA of {task.label} may still run: nobody waited for it",
                            [f"MMA issued at {show(op.where)}"],
                            where=op.where,
                        )
                    )
            self._check_bytes(cta)
        users.check(cluster)

    def _check_bytes(self, cta):
        for bar in self._barriers(cta):
            if bar.bytes and not any(op.barrier is bar for op in self.ops):
                self.report(self._bytes_error(bar, "the CTA ends"))

    def _barriers(self, cta):
        for item in cta.allocations:
            yield from getattr(item, "barriers", ())
        if cta.pair_barrier is not None:
            yield cta.pair_barrier

    def _bytes_error(self, bar, when):
        if bar.bytes > 0:
            what = f"{bar.bytes} bytes more were announced on mbarrier {bar.label} than the copies delivered"
        else:
            what = f"{-bar.bytes} bytes more were delivered on mbarrier {bar.label} than barrier_expect_bytes announced"
        return errors.ExpectBytesError(
            what,
            [f"found when {when}; {bar.state()}", *bar.show_history()],
            where=bar.history[-1][1][2] if bar.history else (),
        )

    # ------------------------------------------------------------ waiting and waking
    def block(self, task, waiting, why, where):
        """Suspend `task` until someone wakes it. `why()` says what it waits for."""
        task.waiting, task.why, task.where = waiting, why, where
        self.hub.switch()

    def wake(self, task):
        task.waiting = task.why = None
        self._idle = 0
        self.ready.append(task)

    def pause(self, task):
        """Put a running task at the end of the queue. Under 'lazy' operations get a chance, for the task may poll for
        their effect."""
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
                f"{task.label} polls and nobody changes anything", [f"at {show(here())}"], where=here()
            )
        if self.timed:
            task.time += 1
        if self.pending_clusters and self._idle % _PATIENCE == 0:
            self._start_cluster(task.time)  # whoever it polls for may not be resident yet
        self.ready.append(task)
        self.hub.switch()

    def step(self, task, kind, name, where):
        """Start of every TLX operation: others may run first (random, timed), and faults are injected. Returns the fault
        or None."""
        self.stats[kind] += 1
        if task.unordered:
            task.unordered = []
        if task.deferred is not None and kind not in _NO_ACCESS:
            self._overdue(task)
        if self.preempts:
            if not self.timed or self._someone_earlier(task):
                self.ready.append(task)
                self.hub.switch()
        if self.fault is not None:
            return self.fault(kind, name, task, where)
        return None

    def _let_earlier_run(self, task):
        """Resources serve in the order of time: whoever is behind this task books first."""
        if self.timed and self._someone_earlier(task):
            self.ready.append(task)
            self.hub.switch()

    @staticmethod
    def _overdue(task):
        """Fault injection: a wait that was put off until one more operation has run."""
        deferred = task.deferred
        deferred[0] -= 1
        if deferred[0] < 0:
            task.deferred = None
            sync.wait(task, *deferred[1:])

    def _someone_earlier(self, task):
        now = task.time
        for other in self.ready:
            if other.time < now:
                return True
        for op in self.ops:
            if op.end < now and op.eligible:
                return True
        return False

    # ------------------------------------------------------------ asynchronous operations
    def new_component(self, label) -> Component:
        self._components += 1
        return Component(self._components, label)

    def issue(self, task, kind, run, where, *, pipe=False, demand=None, track="TMA", title="", facts=None, signals=()):
        """Hand an operation to an engine. pipe: it follows the task's earlier MMAs in order. `run(op)` moves data and
        signals: (barrier, arrivals, bytes added) of each in `signals`."""
        if task.warp_groups and kind not in ("TMA load", "cp.async"):
            warps.join(task)  # one thread issues, after a barrier of all
        previous = task.pipe if pipe else None
        clock = dict(task.clock)
        if pipe:
            if previous is not None:
                join(clock, previous.clock)
                component = previous.component
                clock[component.id] = previous.clock[component.id] + 1
            else:
                component = self.new_component(f"MMA pipe of {task.label}")
                clock[component.id] = 1
        else:
            component = self.new_component(kind)
            clock[component.id] = 1
        op = AsyncOp(
            kind, run, task, component, clock, where, None if previous is None or previous.done else previous, title
        )
        op.piped = pipe
        if pipe:
            op.info = previous if kind == "commit" else None
            task.pipe = op
        op.signals = signals
        if signals and not pipe:
            op.barrier, op.phase = signals[0][0], signals[0][0].phase
        task.clock[task.component.id] += 1
        if self.timed:
            op.start, op.end = self._book(task.cta, task.time, demand, facts or {})
            if previous is not None:
                op.end = max(op.end, previous.end)
            self.emit(task.cta, track, title or kind, op.start, op.end, kind="async", where=where, **(facts or {}))
        if self.control is not None:
            self.control.issued(self, op)
        elif self.eager:
            self.complete(op)
        else:
            self.ops.append(op)
        return op

    def complete(self, op):
        """The operation takes effect."""
        try:
            op.run(op)
        except errors.EmulatorError as error:
            error.where = error.where or op.where  # no kernel code is on the stack when an engine works
            raise
        op.done = True
        op.previous = op.run = None
        self.time = max(self.time, op.end)
        for task in op.waiters:
            self.wake(task)
        op.waiters = []
        self._idle = 0
        if not op.piped:
            op.task.cta.cluster.finished.append(op.component)
        self._since_collect += 1
        if self._since_collect >= _COLLECT_EVERY:
            self._collect()

    def wait_for(self, task, op, why, where):
        """Block `task` until `op` has completed; it then knows of everything the operation knew."""
        if not op.done:
            op.waiters.append(task)
            self.block(task, op, why, where)
        join(task.clock, op.clock)
        if self.timed:
            task.time = max(task.time, op.end)

    def _collect(self):
        """Retire the components of finished copies that every live task of their cluster has heard of."""
        self._since_collect = 0
        for cluster in self.clusters:
            tasks = [t for cta in cluster.ctas for t in cta.tasks]
            clocks = [t.clock for t in tasks if t.is_main and t.done or not t.done and t.waiting != "region"]
            clocks += [op.clock for op in self.ops if op.task.cta.cluster is cluster]
            dead, left = [], []
            for component in cluster.finished:
                (dead if all(component.id in clock for clock in clocks) else left).append(component)
            if not dead:
                continue
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

    def _clocks_of(self, cluster):
        yield from (cluster.barrier.gathered, cluster.barrier.clock)
        for op in self.ops:
            yield op.clock
        for cta in cluster.ctas:
            for task in cta.tasks:
                yield task.clock
                if task.pipe is not None:
                    yield task.pipe.clock
            for bar in (*self._barriers(cta), *cta.named.values()):
                yield from (bar.clock, bar.gathered)

    # ------------------------------------------------------------ memory accesses
    def access(self, actor, component, clock, view, write, generic, where, name, report=None):
        """`actor` (a Task or an AsyncOp) reads or writes `view`, the buffer called `name`: look for races, poison,
        missing fences.

        generic: through the generic proxy, that is by ordinary loads and stores.
        """
        region = view._region or view.region
        access = Access(component, clock[component.id], write, generic, actor, where, name, region)
        shadow = view.storage.shadow
        (shadow.write if write else shadow.read)(region, access, clock, report or self._memory_error)

    def task_access(self, task, view, write, where, name):
        """An ordinary access of a task."""
        if self.watch:
            self._access_of(task, view, write, where, name, self._memory_error)

    def _access_of(self, task, view, write, where, name, report):
        if task.num_warps > warps.WARPS and view.storage.space == "tmem":
            warps.access(task, view, write, where, name, report)
        else:
            self.access(task, task.component, task.clock, view, write, True, where, name, report)

    def tolerant_read(self, task, view, where, name) -> bool:
        """A read that may meet poison, for kernels load memory that nobody wrote and never use it. Returns whether it did."""
        if not self.watch:
            return False
        met = []

        def report(kind, *what):
            met.append(kind) if kind == "poison" else self._memory_error(kind, *what)

        self._access_of(task, view, False, where, name, report)
        if met:
            self.read_early.setdefault(show(where), early_waits(task))
        return bool(met)

    def op_access(self, op, view, write, name, generic=False):
        """An access of an engine."""
        if self.watch:
            self.access(op, op.component, op.clock, view, write, generic, op.where, name)

    def _memory_error(self, kind, earlier, later, shadow):
        key = (
            kind,
            id(shadow.storage),
            earlier and earlier.where[:1],
            later.where[:1],
            earlier and earlier.write,
            later.write,
        )
        if key in self._reported:
            return
        self._reported.add(key)
        storage = shadow.storage
        space = "shared" if storage.space == "smem" else "tensor"
        place = f"{space} memory {later.name}" + ("" if storage.cta.alone else f" of cta{storage.cta.pid}")
        if kind == "poison":
            summary = f"{later.actor.label} reads {place} where nobody has written"
            details = [f"read at {show(later.where)}{turn(later.turns)}", *early_waits(_task_of(later.actor))]
            self.report(errors.PoisonError(summary, details, where=later.where))
        elif kind == "fence":
            if storage.space == "smem":
                self._missing_fence(place, earlier, later)
        else:
            self._race(place, earlier, later, shadow)

    def _missing_fence(self, place, earlier, later):
        finding = errors.MissingFenceError(
            f"{later.actor.label} reads {place} through the async proxy, but the stores to it were never fenced",
            [
                f"stored by {earlier.actor.label} at {show(earlier.where)}",
                f"read by {later.actor.label} at {show(later.where)}",
            ],
            where=earlier.where,
        )
        if self.options.fences == "strict":
            self.report(finding)
        else:
            finding.details.append(
                'a warning: fbtriton\'s compiler puts this fence in; fences="strict" makes it an error'
            )
            self.warn(finding)

    def _race(self, place, earlier, later, shadow):
        details = [_describe(a) for a in (earlier, later)]
        late = next((a.actor for a in (earlier, later) if isinstance(a.actor, AsyncOp) and a.actor.landed_late), None)
        if late is not None:
            error = self._bytes_error(late.barrier, f"its barrier went on before the {late.label} had landed")
            error.details[1:1] = [f"so two accesses to {place} are not ordered:", *details]
            self.report(error)
            return
        details += _alias(earlier, later, shadow.storage)
        for access in (later, earlier):
            notes = early_waits(_task_of(access.actor), again_only=True)
            if notes:
                details += notes
                break
        cause = None
        if (
            all(isinstance(a.actor, warps.WarpGroup) for a in (earlier, later))
            and earlier.actor.task is later.actor.task
        ):
            cause = (
                "the warps of one task run apart: each loads its own share, and may store while others still load.\n"
                "  Fix: tl.debug_barrier() or tlx.named_barrier_wait(...) of all its threads between the load and the store."
            )
        self.report(errors.RaceError(f"two accesses to {place} that nothing orders", details, cause, later.where))

    # ------------------------------------------------------------ reports
    def report(self, error):
        """An error after which the machine could go on: raised, or gathered under report="collect"."""
        self._note_early_reads(error)
        if self.options.report == "collect":
            self.findings.append(error)
        else:
            raise error

    def _note_early_reads(self, error):
        """Add to a report of poison which waits before the load passed too early."""
        if isinstance(error, errors.PoisonError):
            facts = "\n".join(error.details)
            for place, notes in self.read_early.items():
                if place in facts and not set(notes) & set(error.details):
                    error.details += notes

    def warn(self, finding):
        key = ("warning", finding.kind, finding.where[:1])
        if key in self._reported:
            return
        self._reported.add(key)
        self.warnings.append(finding)
        if self.options.report == "raise":
            errors.warn(finding)

    def _who_runs(self):
        return [f"{t.label} at {show(t.stands())}{turn(t.turns)}" for t in self.tasks]

    def _deadlock(self):
        """Name what is wrong when nothing can go on."""
        waiting = [t for t in self.tasks if t.waiting not in (None, "region")]
        for task in waiting:
            bar = task.waiting
            if getattr(bar, "bytes", 0) and not bar.pending:
                return self._bytes_error(bar, f"nothing can go on: {task.label} waits at {show(task.where)}")
        for task in waiting:
            bar = task.waiting
            last = getattr(bar, "seen_by", {}).get(task)
            if last is not None and bar.phase == last[0] + 3:
                error = errors.PhaseError(
                    f"{task.label} waits for mbarrier {bar.label} two phases late: it last saw phase {last[0]}"
                )
                break
        else:
            error = errors.DeadlockError(
                "deadlock: every live task waits, and nothing is in flight that could wake one"
            )
        for task in waiting:
            error.details.append(f"{task.label} waits for {task.why()}")
            error.details.append(f"    at {show(task.where)}")
            if hasattr(task.waiting, "show_history"):
                error.details.extend("    " + line.strip() for line in task.waiting.show_history()[-2:])
            error.details.extend(early_waits(task, only=task.waiting))
        for task in self.tasks:
            error.details.extend(line for line in early_waits(task, again_only=True) if line not in error.details)
        ended = sorted({t.label for c in self.clusters for cta in c.ctas for t in cta.tasks if t.done})
        if ended:
            error.details.append("already ended: " + ", ".join(ended))
        error.where = waiting[0].where if waiting else ()
        return error

    # ------------------------------------------------------------ time (policy "timed")
    def first_touch(self, place) -> bool:
        """Whether a launch with `cold` memory fetches this box for the first time."""
        if not self.options.cold or place in self.touched:
            return False
        self.touched.add(place)
        return True

    def charge(self, op, **facts):
        """A synchronous operation of the running task takes the time that rates.demand(op, **facts) says."""
        task = _running
        self._let_earlier_run(task)
        elementwise = facts.get("kind") in _ELEMENTWISE
        if task.time != task.chain_end:
            task.chain = task.time
        start, end = self._book(task.cta, task.chain if elementwise else task.time, op, facts)
        if end > start:
            title = facts.pop("kind", op)
            self.emit(task.cta, task.name, title, start, end, kind="compute", **facts)
            task.time = max(task.time, end)
        if elementwise:
            task.chain_end = task.time

    def spend(self, task, op, title, where, **facts):
        """Like charge, with a title and a source line for the timeline."""
        self._let_earlier_run(task)
        start, end = self._book(task.cta, task.time, op, facts)
        if end > start:
            self.emit(task.cta, task.name, title, start, end, kind="compute", where=where, **facts)
            task.time = end

    def _book(self, cta, time, op, facts):
        rates = self.options.rates
        if rates is None or op is None:
            return time, time + 1
        demand = rates.demand(op, **facts)
        start, end = time, time
        free = cta.free
        for resource, cycles in demand.needs.items():
            begin = max(time, free.get(resource, 0.0))
            free[resource] = begin + cycles
            if self.trace:
                self.occupied.setdefault((cta.pid, resource), []).append((begin, begin + cycles))
            end = max(end, begin + cycles)
            start = max(start, begin)
        return min(start, end), end + demand.latency

    def emit(self, cta, track, name, start, end, where=(), **args):
        """Keep an event for the timeline."""
        if self.trace:
            if where:
                args["src"] = f"{where[0][0]}:{where[0][1]}"
            self.events.append((cta.pid, track, name, start, end, args))


class _Ended:
    """Stands in for a finished task's greenlet, so that it can be freed."""

    dead = True


_ENDED = _Ended()


def _describe(access):
    verb = "write" if access.write else "read "
    return f"{verb} of {access.name} by {access.actor.label} at {show(access.where)}{turn(access.turns)}"


def _alias(earlier, later, storage) -> list[str]:
    """Why accesses to buffers of two names meet: which lies in the other, or that they overlap."""
    names = [re.sub(r"[\[.].*", "", a.name) for a in (earlier, later)]
    if names[0] == names[1] or earlier.region is None or later.region is None:
        return []
    cells = "columns" if storage.space == "tmem" else "bytes"
    inner, outer = sorted((earlier, later), key=lambda a: sum(atom.size for atom in a.region.atoms))
    inside = {a.number for a in inner.region.atoms} <= {a.number for a in outer.region.atoms}
    how = f"lies in the {cells} of" if inside else f"shares {cells} with"
    return [f"note: {inner.name} {how} {outer.name}: they are one storage"]


def _task_of(actor):
    return actor if isinstance(actor, Task) else actor.task


def early_waits(task, only=None, again_only=False) -> list[str]:
    """Notes on a task's waits that passed on a phase passed before, or before anything had arrived; newest first, at most two.

    only: on this barrier alone. again_only: not the first wait on a fresh barrier, on which producers rightly pass.
    """
    notes = []
    for bar, (phase, again, where, turns) in reversed(task.early.items()):
        if (only is None or bar is only) and (again or not again_only):
            what = "before anything had arrived" if phase < 0 else f"on phase {phase}, which it had passed before"
            notes.append(f"note: at {show(where)}{turn(turns)}")
            notes.append(f"    {task.label} waited on {bar.label} (parity {phase & 1}) and passed {what}")
    return notes[:4]


def _three(value):
    value = tuple(int(v) for v in (value if isinstance(value, (tuple, list)) else (value,)))
    return value + (1,) * (3 - len(value))


def _cluster_origins(grid, cluster):
    return [
        (x, y, z)
        for z in range(0, grid[2], cluster[2])
        for y in range(0, grid[1], cluster[1])
        for x in range(0, grid[0], cluster[0])
    ]


def launch(entry, grid=(1, 1, 1), cluster=(1, 1, 1), num_warps=4, options=None, kernel="kernel") -> Run:
    """Run `entry()` as every CTA of a grid on a fresh machine."""
    return Machine(options, kernel).launch(entry, grid, cluster, num_warps)


def exchange():
    """The running task's warps meet at a barrier: they exchange values, or were told to."""
    if _running is not None and _running.warp_groups:
        warps.join(_running)


def charge(kind, elements=1, **facts):
    """Time of a block operation of the running task (policy "timed"); nothing under the other policies."""
    # an engine's arithmetic runs outside every task: it costs what the engine's demand says, and nobody's instructions
    if _running is not None and _running.machine.timed and getcurrent() is _running.greenlet:
        _running.machine.charge("alu", kind=kind, elements=elements, warps=_running.num_warps, **facts)


@contextlib.contextmanager
def running(task):
    """For tests: make `task` the current one."""
    global _running
    old, _running = _running, task
    try:
        yield task
    finally:
        _running = old
