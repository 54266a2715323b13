"""Operations that engines do for a task: TMA copies, tensor-core MMAs, cp.async, cluster launch control.

Each function issues an AsyncOp. Under the eager policy it completes at once; otherwise the scheduler chooses when. The
race detector treats both in the same way: no task is ordered after the operation until a barrier orders it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from ..counting import Active
from .users import note, note_copy, note_start

if TYPE_CHECKING:
    from ..locations import Where
    from .barriers import MBarrier
    from .machine import Shape
    from .storage import View
    from .tasks import CTA, AsyncOp, Task


# ---------------------------------------------------------------- TMA


def tma_load(
    task: Task,
    fetch: Callable[[], np.ndarray],
    targets: Sequence[tuple[View, str, MBarrier]],
    nbytes: int,
    where: Where,
    title: str = "",
    facts: dict[str, Any] | None = None,
) -> None:
    """Copy a box into shared memory. fetch() -> stored array; targets: [(view, name, barrier), ...], one per CTA."""
    machine = task.machine

    def run(op: AsyncOp) -> None:
        data = fetch()
        for view, name, bar in targets:
            machine.detector.op_access(op, view, True, name)
            view.write(data.reshape(view.shape))
            bar.deliver(nbytes, op.clock, op.end, (f"{nbytes} bytes of {title}", op.label, where, op.turns, task.label))

    facts = facts or {"bytes": nbytes, "multicast": len(targets)}
    signals = [(bar, 0, -nbytes) for *_, bar in targets]
    op = machine.scheduler.issue(
        task, "TMA load", run, where, demand="tma_load", title=title, facts=facts, signals=signals
    )
    for view, name, _ in targets:
        note_copy(view.storage.cta, op, f"a TMA load of {name}")


def tma_store(
    task: Task,
    put: Callable[..., None],
    view: View,
    name: str,
    nbytes: int,
    where: Where,
    title: str = "",
    reduce: bool = False,
) -> None:
    """Copy a view to global memory: put(array[, its marks]). Its own bulk group of the issuing task."""
    machine = task.machine

    def run(op: AsyncOp) -> None:
        machine.detector.op_access(op, view, False, name)
        marks = view.undefined
        put(view.read()) if marks is None else put(view.read(), marks)

    op = machine.scheduler.issue(
        task,
        "TMA store",
        run,
        where,
        demand="tma_reduce" if reduce else "tma_store",
        title=title,
        facts={"bytes": nbytes},
    )
    task.stores.append(op)


def store_wait(task: Task, pending: int, where: Where) -> None:
    """Wait until at most `pending` TMA stores of this task still read shared memory."""
    while len(task.stores) > pending:
        op = task.stores.pop(0)
        _wait(task, op, lambda: f"TMA stores ({len(task.stores) + 1} outstanding, {pending} allowed)", where, "store")


def _wait(task: Task, op: AsyncOp, why: Callable[[], str], where: Where, name: str) -> None:
    started = task.time
    task.machine.scheduler.wait_for(task, op, why, where)
    if task.machine.timed and task.time > started:
        task.machine.clock.emit(
            task.cta, task.name, f"wait {name}", started, task.time, where, kind="wait", barrier=name
        )


def remote_copy(
    task: Task,
    source: Any,
    target: View,
    target_name: str,
    bar: MBarrier,
    nbytes: int,
    where: Where,
    title: str = "",
    source_name: str = "",
    undefined: np.ndarray | None = None,
) -> None:
    """Copy shared memory (a view, or an array out of registers with its marks) to a peer CTA; its bytes count on the peer's
    barrier."""
    machine = task.machine
    values = None if hasattr(source, "storage") else source

    def run(op: AsyncOp) -> None:
        if values is None:
            machine.detector.op_access(op, source, False, source_name)
        machine.detector.op_access(op, target, True, target_name, generic=values is not None)
        marks = source.undefined if values is None else undefined
        marks = None if marks is None else marks.reshape(target.shape)
        target.write((source.read() if values is None else values).reshape(target.shape), marks)
        bar.deliver(nbytes, op.clock, op.end, (f"{nbytes} bytes of {title}", op.label, where, op.turns, task.label))

    signals, facts = [(bar, 0, -nbytes)], {"bytes": nbytes}
    note_start(task, target.storage.cta, where, f"a copy to {target_name}")
    there = [(target.storage.cta, "remote_store")] if target.storage.cta is not task.cta else []
    op = machine.scheduler.issue(
        task, "remote copy", run, where, demand="tma_load", title=title, facts=facts, signals=signals, beside=there
    )
    note_copy(target.storage.cta, op, f"a copy to {target_name}")
    if values is None:
        note_copy(source.storage.cta, op, f"a copy of {source_name} to another CTA")


# ---------------------------------------------------------------- cp.async


def cp_async(
    task: Task,
    fetch: Callable[[], np.ndarray],
    view: View,
    name: str,
    nbytes: int,
    where: Where,
    title: str = "",
    undefined: np.ndarray | None = None,
) -> None:
    """Copy gathered global memory into shared memory; joins the task's open group. fetch() -> stored array; `undefined`: its
    marks."""
    machine = task.machine
    data = fetch()

    def run(op: AsyncOp) -> None:
        machine.detector.op_access(op, view, True, name)
        view.write(data, undefined)

    facts = {"bytes": nbytes, "warps": task.num_warps}
    op = machine.scheduler.issue(task, "cp.async", run, where, demand="global_load", title=title, facts=facts)
    task.copies.append(op)


def commit_group(task: Task) -> None:
    task.groups.append(list(task.copies))
    task.copies.clear()  # in place: the default task shares it with the code around it


def wait_group(task: Task, pending: int, where: Where) -> None:
    """Wait until at most `pending` committed groups are outstanding."""
    while len(task.groups) > pending:
        for op in task.groups.pop(0):
            _wait(task, op, lambda: f"cp.async groups ({pending} may be outstanding)", where, "cp.async")


# ---------------------------------------------------------------- tensor core


def mma(
    task: Task,
    compute: Callable[[], None],
    reads: Sequence[tuple[View, str]],
    writes: Sequence[tuple[View, str]],
    bars: Sequence[MBarrier],
    where: Where,
    title: str = "",
    facts: dict[str, Any] | None = None,
    wait: bool = False,
    peers: Sequence[CTA] = (),
) -> None:
    """Issue a tcgen05 operation on the task's pipe.

    compute() does the arithmetic and stores the result; reads and writes are [(view, name), ...]; each of bars gets
    one arrival when this and all earlier operations of the task have finished. wait: the compiler waits for it
    (async_dot without barriers). peers: the other CTA of a pair, whose tensor core works as long.
    """
    machine = task.machine
    if Active.counts is not None and facts:
        Active.counts.dots += 1

    def run(op: AsyncOp) -> None:
        for view, name in reads:
            machine.detector.op_access(op, view, False, name)
        for view, name in writes:
            machine.detector.op_access(op, view, True, name)
        compute()
        for bar in bars:
            bar.arrive(1, op.clock, op.end, ("commit of the MMA", op.label, where, op.turns, task.label))

    signals, demand = [(bar, 1, 0) for bar in bars], "mma" if facts else None
    beside = [(cta, "mma") for cta in peers if facts]
    op = machine.scheduler.issue(
        task,
        "mma",
        run,
        where,
        pipe=True,
        demand=demand,
        track="MMA",
        title=title,
        facts=facts,
        signals=signals,
        beside=beside,
    )
    _note_arrivals(task, op, bars)
    for view, name in (*reads, *writes):
        if view.storage.cta is not task.cta:
            note(view.storage.cta, op, op.component, op.clock[op.component.id], where, f"an MMA that uses {name}")
    if wait:
        _wait(task, op, lambda: "its own MMA", where, "MMA")


def commit(task: Task, bars: Sequence[MBarrier], where: Where, title: str = "") -> None:
    """Arrive once on each barrier when all earlier tensor-core operations of the task have finished."""

    def run(op: AsyncOp) -> None:
        for bar in bars:
            bar.arrive(1, op.clock, op.end, ("commit", op.label, where, op.turns, task.label))

    signals = [(bar, 1, 0) for bar in bars]
    op = task.machine.scheduler.issue(
        task, "commit", run, where, pipe=True, demand="commit", track="MMA", title=title, facts={}, signals=signals
    )
    _note_arrivals(task, op, bars)


def _note_arrivals(task: Task, op: AsyncOp, bars: Sequence[MBarrier]) -> None:
    """Hold commits that arrive at barriers of other CTAs; one is held done when the MMA before it is, as at the CTA's own end."""
    mma = last_mma(op)
    for bar in bars:
        if bar.cta is not task.cta and mma is not None:
            note(bar.cta, op, mma.component, mma.clock[mma.component.id], op.where, f"a commit to mbarrier {bar.name}")


def last_mma(op: AsyncOp | None) -> AsyncOp | None:
    """Return the MMA that a commit follows; the operation itself if it is one."""
    while op is not None and op.kind == "commit":
        op = op.info
    return op


def wgmma(
    task: Task,
    reads: Sequence[tuple[View, str]],
    where: Where,
    title: str = "",
    facts: dict[str, Any] | None = None,
    pending: Pending | None = None,
) -> None:
    """Issue Hopper's MMA, whose result is in registers. Its reads last until wgmma_wait; then the Pending result is there."""
    machine = task.machine
    if Active.counts is not None:
        Active.counts.dots += 1

    def run(op: AsyncOp) -> None:
        for view, name in reads:
            machine.detector.op_access(op, view, False, name)

    op = machine.scheduler.issue(
        task, "wgmma", run, where, pipe=True, demand="mma", track="MMA", title=title, facts=facts
    )
    task.dots.append(op)
    if pending is not None:
        pending.op = op
        task.results[id(pending.block)] = pending


class Pending:
    """The result of a wgmma that has not been waited for: the array `block` and its `marks` (or None), which the kernel
    holds already, and the contents that they will get."""

    def __init__(
        self, block: np.ndarray, marks: np.ndarray | None, result: np.ndarray, result_marks: np.ndarray | None
    ) -> None:
        self.block, self.marks, self.result, self.result_marks = block, marks, result, result_marks
        self.op: AsyncOp | None = None

    def finish(self) -> None:
        self.block[...] = self.result
        if self.marks is not None:
            self.marks[...] = 0 if self.result_marks is None else self.result_marks


def wgmma_wait(task: Task, pending: int, where: Where) -> None:
    while len(task.dots) > pending:
        done = task.dots.pop(0)
        _wait(task, done, lambda: f"MMAs ({pending} may be outstanding)", where, "MMA")
        for key in [key for key, pending in task.results.items() if pending.op is done]:
            task.results.pop(key).finish()


# ---------------------------------------------------------------- cluster launch control


class ClcResponse:
    """The 16-byte answers of cluster launch control, one per stage, as try_cancel wrote them."""

    def __init__(self, cta: CTA, stages: int, storage_view: Callable[[int], View]) -> None:
        self.cta, self.view, self.failed = cta, storage_view, False
        self.values: list[Shape | None] = [None] * stages


def clc_try_cancel(
    task: Task, responses: Sequence[ClcResponse], stage: int, bars: Sequence[MBarrier], where: Where
) -> None:
    """Ask for a cluster that has not started. responses: one ClcResponse a CTA of the cluster; bars: their full barriers."""
    machine = task.machine
    if responses[0].failed:
        raise errors.ClcError(
            f"{task.label} asks for another tile after the answer was that none is left",
            ["the hardware leaves this undefined"],
            where=where,
        )

    def run(op: AsyncOp) -> None:
        origin = machine.steal()
        if origin is None:
            responses[0].failed = True
        machine.stats["clc queries" if origin else "clc failed queries"] += 1
        for response, bar in zip(responses, bars):
            machine.detector.op_access(op, response.view(stage), True, "the CLC response")
            response.view(stage).write(0)
            response.values[stage] = origin
            bar.deliver(16, op.clock, op.end, ("CLC response", op.label, where, op.turns, task.label))

    signals = [(bar, 0, -16) for bar in bars]
    machine.scheduler.issue(
        task,
        "CLC query",
        run,
        where,
        demand="clc",
        track="CLC",
        title="try_cancel",
        facts={"bytes": 16},
        signals=signals,
    )


def clc_query(task: Task, response: ClcResponse, stage: int, where: Where) -> Shape | None:
    """Return the origin (x, y, z) of the cluster that was taken over, or None."""
    task.machine.detector.task_access(task, response.view(stage), False, where, "the CLC response")
    return response.values[stage]
