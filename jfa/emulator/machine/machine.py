"""The machine of one launch: runs clusters of CTAs, task by task, operation by operation.

Its parts: scheduler.py (what runs next), detector.py (unordered accesses), diagnosis.py (reports), clock.py (modelled
time). This module has the launch itself: it starts clusters, runs what the scheduler picks, and ends clusters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from greenlet import getcurrent

from .. import errors
from ..context import context
from ..options import Options
from . import limits, warps
from .clock import Clock
from .detector import Detector
from .diagnosis import Diagnosis, deadlock, livelock
from .scheduler import Scheduler
from .shadow import join
from .tasks import CTA, AsyncOp, Cluster, Task

Shape = tuple[int, int, int]


class Run:
    """The record of a launch: findings and warnings (errors.EmulatorError), events, operation counts, modelled time."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.kernel, self.options = machine, machine.kernel, machine.options
        self.findings, self.warnings = machine.diagnosis.findings, machine.diagnosis.warnings
        clock = machine.clock
        self.events, self.occupied, self.time = clock.events, clock.occupied, clock.time
        self.stats, self.steps = machine.stats, machine.steps

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        return f"<run of {self.kernel}: {len(self.findings)} findings, {len(self.warnings)} warnings>"


class Machine:
    """One launch. `stats`: how often each operation was issued; `steps`: iterations of the scheduling loop."""

    def __init__(self, options: Options | None = None, kernel: str = "kernel") -> None:
        self.options, self.kernel = options or Options(), kernel
        self.timed, self.watch = self.options.policy == "timed", self.options.races
        self.control, self.fault = self.options.control, self.options.fault
        self.stats: Counter[str] = Counter()
        self.steps = 0
        self.clock = Clock(self)
        self.diagnosis = Diagnosis(self)
        self.detector = Detector(self)
        self.scheduler = Scheduler(self)
        self.pending_clusters: deque[Shape] = deque()  # the origins of those that have not started
        self.clusters: list[Cluster] = []
        self.single_cta = True

    # ------------------------------------------------------------ launching
    def launch(
        self,
        entry: Callable[[], object],
        grid: int | Sequence[int] = (1, 1, 1),
        cluster: int | Sequence[int] = (1, 1, 1),
        num_warps: int = 4,
    ) -> Run:
        """Run `entry()` once per CTA of the grid; returns the Run, or raises the first error (report="raise")."""
        grid, cluster = _three(grid), _three(cluster)
        _check_launch(cluster, num_warps)
        refused = _refused_grid(grid, cluster)
        if refused is not None:  # the compiler comes before the driver: let it object first
            grid = cluster
        self.entry, self.grid, self.cluster_shape, self.num_warps = entry, grid, cluster, num_warps
        self.single_cta = grid == (1, 1, 1)
        self.pending_clusters.extend(_cluster_origins(grid, cluster))
        state, self.scheduler.hub = context.launch, getcurrent()
        outer = state.task
        try:
            if self.control is not None:
                self.control.begin(self)
            with np.errstate(all="ignore"):
                self._run()
        except errors.EmulatorError as error:
            self._end_with(refused or error)
        finally:
            self.scheduler.end_all()
            self.clusters.clear()
            del self.entry, self.scheduler.hub  # a Run is kept long: what the launch loop held goes
            state.task = outer
        if refused is not None and refused not in self.diagnosis.findings:
            self._end_with(refused)
        return Run(self)

    def _end_with(self, error: errors.EmulatorError) -> None:
        self.diagnosis.note_early_reads(error)
        if self.options.report == "collect":
            self.diagnosis.findings.append(error)
        else:
            error.run = Run(self)
            raise error

    # ------------------------------------------------------------ the loop
    def _run(self) -> None:
        for _ in range(self.options.max_ctas or self.options.num_sms):
            self.start_cluster()
        scheduler, limit, state = self.scheduler, self.options.max_steps, context.launch
        while True:
            chosen = scheduler.pick()
            if chosen is None:
                if scheduler.tasks:
                    raise deadlock(self)
                if not self.start_cluster(self.clock.time):
                    return
                continue
            self.steps += 1
            if self.steps > limit:
                raise livelock(scheduler.tasks, limit)
            if isinstance(chosen, AsyncOp):
                scheduler.ops.remove(chosen)
                scheduler.complete(chosen)
                continue
            state.task = chosen
            chosen.greenlet.switch()
            if chosen.done:
                self._task_ended(chosen)

    # ------------------------------------------------------------ starts and ends
    def start_cluster(self, start: float = 0.0) -> bool:
        """Start the next cluster at a moment of modelled time; False if all have."""
        if not self.pending_clusters:
            return False
        origin = self.pending_clusters.popleft()
        cluster = Cluster(self, start)
        cx, cy, cz = self.cluster_shape
        for rank in range(cx * cy * cz):
            pid = (origin[0] + rank % cx, origin[1] + rank // cx % cy, origin[2] + rank // (cx * cy))
            cluster.ctas.append(CTA(self, cluster, pid, rank, self.grid, self.num_warps))
        self.clusters.append(cluster)
        cluster.live = len(cluster.ctas)
        self.stats["ctas"] += cluster.live
        for cta in cluster.ctas:
            self.scheduler.add(Task(self, cta, "main", self.entry, self.num_warps))
        return True

    def steal(self) -> Shape | None:
        """Take the origin of a cluster that has not started, or None."""
        return self.pending_clusters.popleft() if self.pending_clusters else None

    def _task_ended(self, task: Task) -> None:
        self.scheduler.tasks.remove(task)
        self.clock.time = max(self.clock.time, task.time)
        self.detector.task_ended(task)
        cluster = task.cta.cluster
        if task.parent is not None:
            self._return_to(task.parent, task)
        else:
            cluster.live -= 1
        cluster.barrier.settle()
        if cluster.live == 0 and task.parent is None:
            self.detector.cluster_ended(cluster)
            self.clusters.remove(cluster)
            self.start_cluster(task.time)
        task.greenlet = _ENDED

    def _return_to(self, parent: Task, task: Task) -> None:
        """End a task of a region: its parent knows what it knew, and goes on after the last."""
        warps.join(task)
        join(parent.clock, task.clock)
        parent.children.discard(task)
        parent.time = max(parent.time, task.time)
        if not parent.children and parent.waiting == "region":
            self.scheduler.wake(parent)
        if task.pipe is not None:
            task.cta.pipes.append((task, task.pipe))

    # ------------------------------------------------------------ findings
    def report(self, error: errors.EmulatorError) -> None:
        """Raise an error after which the machine could go on, or gather it under report="collect"."""
        self.diagnosis.report(error)

    def warn(self, finding: errors.EmulatorError) -> None:
        """Keep a warning, once for each kind and place."""
        self.diagnosis.warn(finding)


class _Ended:
    """Stands in for a finished task's greenlet, so that it can be freed."""

    dead = True


_ENDED = _Ended()


def _refused_grid(grid: Shape, cluster: Shape) -> errors.LaunchError | None:
    if any(g % c for g, c in zip(grid, cluster)):
        return errors.LaunchError(f"the grid {grid} is not divisible by the cluster {cluster}")
    return None


def _check_launch(cluster: Shape, num_warps: int) -> None:
    if cluster[0] * cluster[1] * cluster[2] > limits.MAX_CLUSTER:
        raise errors.LaunchError(f"a cluster of {cluster} has more than {limits.MAX_CLUSTER} CTAs")
    if num_warps * limits.WARP > limits.MAX_THREADS:
        raise errors.ThreadLimitError(f"num_warps={num_warps} is more than {limits.MAX_THREADS} threads")


def _three(value: int | Sequence[int]) -> Shape:
    x, y, z, *_ = *(int(v) for v in (value if isinstance(value, Sequence) else (value,))), 1, 1, 1
    return x, y, z


def _cluster_origins(grid: Shape, cluster: Shape) -> list[Shape]:
    return [
        (x, y, z)
        for z in range(0, grid[2], cluster[2])
        for y in range(0, grid[1], cluster[1])
        for x in range(0, grid[0], cluster[0])
    ]


def launch(
    entry: Callable[[], object],
    grid: int | Sequence[int] = (1, 1, 1),
    cluster: int | Sequence[int] = (1, 1, 1),
    num_warps: int = 4,
    options: Options | None = None,
    kernel: str = "kernel",
) -> Run:
    """Run `entry()` as every CTA of a grid on a fresh machine."""
    return Machine(options, kernel).launch(entry, grid, cluster, num_warps)
