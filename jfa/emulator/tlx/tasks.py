"""Warp specialization: async_tasks, async_task, and what they cost in threads and registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import errors
from ..counting import Active
from ..locations import here, show
from ..machine import limits, sync
from .api import api, plain, running

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.tasks import Task

_GROUP = 4  # warps that setmaxnreg serves together


class async_task:
    """One task of an async_tasks region: async_task("default") or async_task(num_warps=..., registers=..., replicate=...)."""

    def __init__(self, *args: Any, _builder: Any = None, **kwargs: Any) -> None:
        self.is_default = self.is_explict = False
        self.task_ids: list | None = None
        # numbers that the kernel gives, checked where the region ends
        self.num_warps: Any = None
        self.num_regs: Any = None
        self.replicate: Any = None
        self.warp_group_start_id: Any = None
        if args:
            assert len(args) == 1
            if plain(args[0]) != "default":
                self.task_ids = list({plain(t) for t in args[0]})
                return
            self.is_explict = self.is_default = True
            assert "num_regs" not in kwargs and "registers" not in kwargs, (
                "Cannot specify registers for the default async_task; it receives leftover registers from the partition budget"
            )
        else:
            self.is_explict = True
            self.num_warps = plain(kwargs.get("num_warps"))
            self.num_regs = plain(kwargs.get("num_regs", kwargs.get("registers")))
            if self.num_regs is not None and self.num_regs % limits.REGISTER_STEP:
                raise ValueError(f"num_regs must be divisible by 8, got {self.num_regs}")
        self.replicate = plain(kwargs.get("replicate", 1))
        self.warp_group_start_id = plain(kwargs.get("warp_group_start_id"))

    def __enter__(self) -> None:
        raise errors.NotSupported(
            "this async_task was not rewritten: it must be a `with` directly inside `with tlx.async_tasks()`"
        )

    def __exit__(self, *_: Any) -> None:
        pass


class async_tasks:
    """The region: at its end all its tasks run, each on its own warps; the kernel continues once all have ended."""

    def __init__(self, *args: Any, exclusive: Any = False, no_ending_cluster_sync: Any = False, **kwargs: Any) -> None:
        self.exclusive, self.no_ending_cluster_sync = plain(exclusive), plain(no_ending_cluster_sync)
        self.entries: list[tuple[async_task, Callable[[], object], str, Where]] = []

    def __enter__(self) -> async_tasks:
        running().regions.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        task = running()
        if kind is None:
            _run(self, task)
        elif task is not None and self in task.regions:
            task.regions.remove(self)


@api
def _run(region: async_tasks, task: Task) -> None:
    task.regions.remove(region)
    entries = region.entries
    assert entries, "async_tasks() without a task in it"
    if all(entry[0].is_default for entry in entries):  # nothing to specialize: the code runs in place
        for _, body, _, _ in entries:
            body()
        return
    where = entries[0][3]
    assert task.parent is None, (
        "async_tasks() inside an async_task: the compiler specializes warps once, at the outermost level"
    )
    task.cta.stays = task.cta.stays and not region.no_ending_cluster_sync
    _check(task, [entry[0] for entry in entries], where)
    specs: list[tuple[str, Callable, int, int]] = []
    default = None
    for spec, body, name, _ in entries:
        warps = task.cta.num_warps if spec.is_default else spec.num_warps
        default = len(specs) if spec.is_default else default
        for replica in range(spec.replicate):
            specs.append((f"{name}[{replica}]" if spec.replicate > 1 else name, body, warps, replica))
    if Active.counts is not None:
        Active.counts.most("tasks", len(specs))
    sync.run_region(task, specs, where, default)


def _check(task: Task, specs: Sequence[async_task], where: Where) -> None:
    for spec in specs:
        assert spec.is_explict
        assert spec.replicate is not None, "Replicate must be non-None task"
    assert sum(s.is_default for s in specs) == 1, "Default task must be one and only one"
    others = [s for s in specs if not s.is_default]
    for spec in others:
        assert spec.num_warps is not None, "num_warps must be given for every task but the default one"
        assert spec.num_warps in (1, 2, 4, 8, 16), f"num_warps must be a power of two up to 16, got {spec.num_warps}"
    registers = [s.num_regs for s in others if s.num_regs]
    assert len(registers) in (0, len(others)), "Registers are set for either ALL or NONE of non-default tasks"
    starts = [s.warp_group_start_id for s in others if s.warp_group_start_id is not None]
    assert len(starts) in (0, len(others)), (
        "warp_group_start_id must be set for either ALL or NONE of non-default tasks"
    )
    default = next(s for s in specs if s.is_default)
    if starts:
        _check_starts(others, task.cta.num_warps)
    _check_threads(task, others, default, where)
    if registers:
        _check_registers(task, others, default, where)


def _check_starts(others: Sequence[async_task], default_warps: int) -> None:
    ranges = [(s.warp_group_start_id, s.warp_group_start_id + s.num_warps * s.replicate) for s in others]
    for number, (start, end) in enumerate(ranges):
        assert start >= 0, f"warp_group_start_id[{number}] = {start} must be non-negative"
        assert not (start < default_warps and 0 < end), (
            f"Overlapping warp ranges: task {number} uses warps [{start}, {end}) "
            f"which overlaps with default region warps [0, {default_warps})"
        )
        for other, (begin, stop) in enumerate(ranges[number + 1 :], number + 1):
            assert not (start < stop and begin < end), (
                f"Overlapping warp ranges: task {number} uses warps [{start}, {end}) and task {other} uses warps [{begin}, {stop})"
            )


def _warps(task: Task, others: Sequence[async_task], default: async_task) -> int:
    return task.cta.num_warps * default.replicate + sum(s.num_warps * s.replicate for s in others)


def _check_threads(task: Task, others: Sequence[async_task], default: async_task, where: Where) -> None:
    warps = _warps(task, others, default)
    if warps * limits.WARP > limits.MAX_THREADS:
        lines = [f"default: {task.cta.num_warps} warps", *(f"{s.num_warps} warps x {s.replicate}" for s in others)]
        raise errors.ThreadLimitError(
            f"{warps} warps are {warps * 32} threads, a CTA has at most 1024", [f"at {show(where)}", *lines]
        )


def _check_registers(task: Task, others: Sequence[async_task], default: async_task, where: Where) -> None:
    for spec in others:
        if not limits.MIN_REGISTERS <= spec.num_regs <= limits.MAX_REGISTERS:
            raise errors.RegisterLimitError(f"registers={spec.num_regs} is outside 24..256", [f"at {show(where)}"])
    groups = _register_groups(others)
    total = sum(limits.WARP * warps * registers for warps, registers in groups)
    least = limits.MIN_REGISTERS * task.cta.num_warps * default.replicate * limits.WARP
    if total + least > limits.REGISTERS:
        lines = [f"{warps} warps x 32 x {registers} registers" for warps, registers in groups]
        if any(s.num_warps < _GROUP for s in others):
            lines.append("four warps in a row get the most that one of their tasks asks for")
        raise errors.RegisterLimitError(
            f"{total:,} registers for the tasks and at least {least:,} for the default one: an SM has {limits.REGISTERS:,}",
            [f"at {show(where)}", *lines],
        )


def _register_groups(others: Sequence[async_task]) -> list[tuple[int, int]]:
    """Return [(warps, registers per thread), ...] as setmaxnreg serves them: whole groups of four warps.

    The compiler places larger tasks first, and fills the last group up; a group gets what its most demanding task asks for.
    """
    tasks = [s for s in others for _ in range(s.replicate)]
    if all(s.warp_group_start_id is None for s in others):
        tasks.sort(key=lambda s: (-s.num_warps, -s.num_regs))
        starts = [sum(s.num_warps for s in tasks[:k]) for k in range(len(tasks))]
    else:
        starts = [s.warp_group_start_id + s.num_warps * k for s in others for k in range(s.replicate)]
    groups: dict[int, int] = {}
    for spec, start in zip(tasks, starts):
        for number in range(start // _GROUP, (start + spec.num_warps - 1) // _GROUP + 1):
            groups[number] = max(groups.get(number, 0), spec.num_regs)
    return [(_GROUP, registers) for registers in groups.values()]


def register_task(task: async_task, body: Callable[[], object], name: str, location: tuple[str, int]) -> None:
    """Replace a rewritten `with tlx.async_task(...)`: remember the task until its region ends."""
    regions = running().regions
    if not regions:
        raise errors.NotSupported("async_task outside of async_tasks", [f"at {show((location,))}"])
    regions[-1].entries.append((task, body, name, (tuple(location),)))


@api
def async_task_replica_id() -> int:
    """Return which replica of its async_task this is: a constexpr."""
    task = running()
    assert task.parent is not None, (
        "async_task_replica_id must be called inside an async region where the stack must be non-empty"
    )
    return task.replica


class warp_pipeline_stage:
    """AMD only."""

    def __init__(self, label: Any = None, *, priority: Any = None) -> None:
        raise errors.NotSupported(
            "tlx.warp_pipeline_stage is only supported on AMD (HIP) targets", [f"at {show(here())}"]
        )
