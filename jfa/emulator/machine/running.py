"""What runs now. One launch runs at a time in a process, one task of it at a time: the tasks share Python's globals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent

from . import warps

if TYPE_CHECKING:
    from .tasks import Task


class Running:
    """`task`: the task that runs now, None outside a launch."""

    task: Task | None = None


def current() -> Task | None:
    """Return the running task, None outside a launch."""
    return Running.task


def exchange() -> None:
    """Let the running task's warps meet at a barrier: they exchange values, or were told to."""
    if Running.task is not None and Running.task.warp_groups:
        warps.join(Running.task)


def charge(kind: str, elements: int = 1, **facts: object) -> None:
    """Take the time of a block operation of the running task (policy "timed"); nothing under the other policies."""
    task = Running.task
    # an engine's arithmetic runs outside every task: it costs what the engine's demand says, and nobody's instructions
    if task is not None and task.machine.timed and getcurrent() is task.greenlet:
        task.machine.clock.charge(task, "alu", kind=kind, elements=elements, warps=task.num_warps, **facts)
