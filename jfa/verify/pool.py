"""Run jobs in child processes that may fail, hang or die, each job with a time limit of its own.

A kernel that was never run on a GPU can deadlock or write out of bounds. After a CUDA error every later call of the
process fails as well, and a hung process never answers; so the child is replaced after either, and the other jobs
continue.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
START_SECONDS = 120.0  # for a child to import torch and Triton
FAILED_STARTS = 3  # one after another, and no more children are tried
SLEEP_SECONDS = 1.0  # how often the clock is looked at while no child answers

RIGHT, WRONG, ERROR, HUNG, DIED, REFUSED, LEFT_OUT = "right", "wrong", "error", "hung", "died", "refused", "left out"
BAD = (WRONG, ERROR, HUNG, DIED)


@dataclass(frozen=True)
class Job:
    """One job of a child: ``kind`` and ``item`` name it; ``seconds`` is its time limit, compiling included."""

    kind: str
    backend: str
    item: Any
    seconds: float = 120.0
    options: dict = field(default_factory=dict, compare=False, hash=False)

    @property
    def key(self) -> str:
        """The job's name in the result file and for ``--only``: "random:hopper:40"."""
        return f"{self.kind}:{self.backend}:{self.item}"


@dataclass
class Outcome:
    """The end of a job.

    Attributes:
        state: "right", "wrong" (an assertion failed), "error" (anything else was raised), "hung" (no answer within the limit),
            "died" (the process ended), "refused" (the backend does not offer this) or "left out".
        seconds: wall time in the child.
        message: one or a few sentences, empty where all is right.
        value: what the job returned.
        detail: the end of the traceback, for errors that nobody expected.
        at: when it ended, in seconds since the epoch.
    """

    state: str
    seconds: float = 0.0
    message: str = ""
    value: Any = None
    detail: str = ""
    at: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether something is wrong with the kernel or its process."""
        return self.state in BAD


class Refused(Exception):
    """Raised by a job with the backend's sentence that it does not support the problem."""


# ------------------------------------------------------------------------------------------------------------- the child


def _child(connection: Connection, runner: str, log: str) -> None:
    """Answer jobs until None comes; what compilers print goes to the log."""
    with open(log, "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    module, name = runner.split(":")
    run = getattr(importlib.import_module(module), name)
    connection.send(None)  # ready
    while (job := connection.recv()) is not None:
        connection.send(answer(run, job))


def answer(run: Callable[[Job], Any], job: Job) -> Outcome:
    """Run one job and say how it ended."""
    start, found = time.time(), Outcome(RIGHT)
    try:
        found.value = run(job)
    except Refused as reason:
        found = Outcome(REFUSED, message=str(reason))
    except AssertionError as error:
        found = Outcome(
            WRONG, message=str(error)[:1500] or "an assertion failed", detail=traceback.format_exc()[-1500:]
        )
    except Exception as error:  # noqa: BLE001  one failure must not hide the others
        first = str(error).strip().splitlines()[:1]
        found = Outcome(ERROR, message=": ".join([type(error).__name__, *first])[:600])
        found.detail = traceback.format_exc()[-3000:]
    found.seconds, found.at = time.time() - start, time.time()
    return found


def _lost_gpu(outcome: Outcome) -> bool:
    """Return whether the child's CUDA context is no longer usable."""
    return outcome.state == ERROR and ("CUDA error" in outcome.detail or "Triton Error [CUDA]" in outcome.detail)


# ------------------------------------------------------------------------------------------------------------ the parent


class Child:
    """One child process and its current job."""

    def __init__(self, runner: str, log: Path):
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_child, args=(theirs, runner, str(log)), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.ready = False
        self.limit = time.time() + START_SECONDS

    def give(self, job: Job) -> None:
        """Hand out a job; its clock starts now."""
        self.job, self.limit = job, time.time() + job.seconds
        self.connection.send(job)

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        self.process.kill()
        self.process.join(10)


class NoChild(RuntimeError):
    """Raised when child processes do not start, so nothing can run."""


class Pool:
    """Children that run jobs side by side.

    Args:
        runner: "package.module:function", called in the children with a job.
        processes: how many children at most.
        log: file to which the children's output is appended.
        note: called in this process with each job and its outcome, as they end.
        tick: called about once per second while jobs run.
    """

    def __init__(
        self,
        runner: str,
        processes: int,
        log: Path,
        note: Callable[[Job, Outcome], None],
        tick: Callable[[], None] = lambda: None,
    ):
        self.runner, self.processes, self.log, self.note, self.tick = runner, processes, log, note, tick
        self.children: list[Child] = []
        self.failed_starts = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *ignored: object) -> None:
        for child in self.children:
            child.end()
        self.children = []

    def run(self, jobs: Iterable[Job], deadline: float = float("inf")) -> list[Job]:
        """Run the jobs; return those that were not begun before ``deadline`` (seconds since the epoch).

        Raises:
            NoChild: if children end, or do not answer, before their first job.
        """
        todo, left = deque(jobs), []
        while True:
            if time.time() > deadline:
                left += todo
                todo.clear()
            busy = [child for child in self.children if child.job]
            if not todo and not busy:
                return left
            while len(self.children) < min(self.processes, len(todo) + len(busy)):
                self.children.append(Child(self.runner, self.log))
            for child in [c for c in self.children if c.ready and not c.job][: len(todo)]:
                child.give(todo.popleft())
            self._listen()
            self.tick()

    def _listen(self) -> None:
        """Wait a moment for answers; end the children that are late or broken."""
        waited_for = {child.connection: child for child in self.children if child.job or not child.ready}
        for connection in wait(waited_for, SLEEP_SECONDS):
            self._receive(waited_for[connection])
        for child in [c for c in self.children if (c.job or not c.ready) and time.time() > c.limit]:
            self._end(child, HUNG, f"no answer within {child.job.seconds:.0f} s" if child.job else "")

    def _receive(self, child: Child) -> None:
        try:
            outcome = child.connection.recv()
        except (EOFError, OSError):
            child.process.join(10)
            self._end(child, DIED, f"its process ended ({_ending(child.process.exitcode)}); {_last_line(self.log)}")
            return
        if not child.ready:
            child.ready, self.failed_starts = True, 0
            return
        job, child.job = child.job, None
        self.note(job, outcome)
        if _lost_gpu(outcome):
            self._remove(child)

    def _end(self, child: Child, state: str, message: str) -> None:
        """End a child that gives no answer, and say so for its job."""
        job, seconds = child.job, child.job.seconds - (child.limit - time.time()) if child.job else 0.0
        self._remove(child)
        if job is not None:
            self.note(job, Outcome(state, seconds, message, at=time.time()))
            return
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS:
            raise NoChild(f"the processes that run the checks do not start; {_last_line(self.log)}")

    def _remove(self, child: Child) -> None:
        child.end()
        self.children.remove(child)


def _ending(code: int | None) -> str:
    """Say how a process ended: "signal SIGSEGV", "status 1"."""
    if code is not None and code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"status {code}"


def _last_line(log: Path) -> str:
    """Quote the last line that a child printed: often the reason."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"the last line of {log}: {lines[-1][:300]}" if lines else f"{log} has no output of it"
