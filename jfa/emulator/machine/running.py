"""The task that runs now in this thread: the thread's launch (context.py) runs one task at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent

from ..context import context
from . import warps

if TYPE_CHECKING:
    from .tasks import Task


def current() -> Task | None:
    """Return the running task, None outside a launch."""
    return context.launch.task


def exchange() -> None:
    """Let the running task's warps meet at a barrier: they exchange values, or were told to."""
    task = context.launch.task
    if task is not None and task.warp_groups:
        warps.join(task)


def pause() -> None:
    """Let others run, where the running task may be waiting for another one to write."""
    task = context.launch.task
    if task is not None:
        task.pause()


def charge(kind: str, elements: int = 1, **facts: object) -> None:
    """Take the time of a block operation of the running task (policy "timed"); nothing under the other policies."""
    task = context.launch.task
    # an engine's arithmetic runs outside every task: it costs what the engine's demand says, and no task's instructions
    if task is not None and task.machine.timed and getcurrent() is task.greenlet:
        task.machine.clock.charge(task, "alu", kind=kind, elements=elements, warps=task.num_warps, **facts)
