"""The judge's side of running an answer: start the process, read its messages, end it and its children at the limit."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jfa.course import child, wire
from jfa.course.job import Job
from jfa.course.nursery_client import nursery

_FRAME = struct.Struct("<Q")
_MAX_BYTES, _MAX_EVENTS = 2**29, 20_000  # of all messages of a run
# What an answer may leave in its temporary folder. So few files are made, and found, before its time is up.
SCRATCH_MB, _SCRATCH_FILES = 256, 1_000
_SCRATCH_PATH = 2_000  # characters
_WALL_FACTOR = 20  # wall seconds allowed at most for each second of the limit
_LOAD_SECONDS = 30  # for a child's own imports (Triton, the emulator) before the answer runs


@dataclass
class Outcome:
    """The outcome of one run: the messages, in order, and how the process ended.

    ``ended`` is "done" (all messages came), "time", "disk" (too much written), "died" (``status`` is the wait status), or "garbled"
    (messages that cannot be read, or that lack the seal).
    """

    events: list[dict] = field(default_factory=list)
    ended: str = "died"
    status: int = 0
    seconds: float = 0.0

    def last(self, kind: str) -> dict | None:
        """Return the last message of a kind."""
        return next((e for e in reversed(self.events) if e.get("event") == kind), None)


Waiting = Callable[[float, int], None]
"""What is called about once per second while an answer runs: seconds so far, cases done."""


def say_nothing(seconds: float, done: int) -> None:
    """Do nothing: for callers that show no progress."""


def run_forked(job: Job, answer: Any, waiting: Waiting = say_nothing) -> Outcome:
    """Run a live function in a fork of this process (a notebook's kernel)."""
    with _sealed(job) as job:
        read, write = os.pipe()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a fork of a process whose OpenMP threads are in use would wait for them forever
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads; the child only computes
                pid = os.fork()
            if pid == 0:
                _in_fork(job, read, write, answer)
        finally:
            torch.set_num_threads(threads)
        os.close(write)
        return _follow(job, pid, read, lambda wait: _wait(pid, wait), waiting)


def _in_fork(job: Job, read: int, write: int, answer: Any) -> None:
    """Run the forked child to its end: it must never return into the notebook."""
    try:
        os.close(read)
        child.run(Job.unpack(job.pack()), write, live=answer)
    finally:
        os._exit(70)


def run_clean(job: Job, waiting: Waiting = say_nothing) -> Outcome:
    """Run an answer given as source in a child of the nursery."""
    with _sealed(job) as job:
        read, write = os.pipe()
        try:
            home = nursery()
            pid = home.start(job, write)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return _follow(job, pid, read, lambda wait: home.wait(pid, wait), waiting)


@contextlib.contextmanager
def _sealed(job: Job) -> Iterator[Job]:
    """Yield the job with a key for its messages and a temporary folder of its own, which is removed at the end."""
    try:
        folder = tempfile.mkdtemp(prefix="jfa_answer_")
    except OSError:  # no room, or nowhere to write: then the answer cannot write either
        folder = ""
    try:
        yield replace(job, key=os.urandom(32).hex(), scratch=folder)
    finally:
        if folder:
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove an answer's files, however deeply nested or protected their folders are."""

    def open_up(function: Callable, path: str, error: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700, follow_symlinks=False) if os.path.islink(path) else os.chmod(path, 0o700)

    with contextlib.suppress(OSError, RecursionError, NotImplementedError):
        shutil.rmtree(folder, onerror=open_up)
    if os.path.lexists(folder):
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def _is_full(folder: str) -> bool:
    """Return whether a folder holds more than an answer may write, or is too deep to look through."""
    size, files, todo = 0, 0, [folder]
    while todo:
        top = todo.pop()
        if len(top) > _SCRATCH_PATH:
            return True
        with contextlib.suppress(OSError), os.scandir(top) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    todo += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                if files > _SCRATCH_FILES or size > SCRATCH_MB * 2**20:
                    return True
    return False


def _wait(pid: int, block: bool) -> int | None:
    """Return the wait status of a forked child, None while it runs."""
    try:
        done, status = os.waitpid(pid, 0 if block else os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if done else None


# ---------------------------------------------------------------------------------------------- following a child


def _follow(job: Job, pid: int, read: int, wait: Callable[[bool], int | None], waiting: Waiting) -> Outcome:
    """Read messages until the last one, the limit, or the process's end; leaves no process of the group alive."""
    outcome, start, told, looked = Outcome(), time.monotonic(), 1.0, 0.0
    status, inbox, clock = None, _Inbox(bytes.fromhex(job.key), outcome), _Clock(job, pid)
    poll = select.poll()  # select() knows no descriptors beyond 1023
    poll.register(read, select.POLLIN | select.POLLHUP)
    try:
        while True:
            if time.monotonic() - start > told:
                waiting(told, sum(e["event"] == "case" for e in outcome.events))
                told += 1.0
            if job.scratch and time.monotonic() - start > looked + 0.5:
                looked = time.monotonic() - start
                if _is_full(job.scratch):
                    outcome.ended = "disk"
                    break
            if poll.poll(50):
                chunk = os.read(read, 1 << 20)
                if not inbox.take(chunk):
                    outcome.ended = "garbled"
                    break
                if _complete(outcome):
                    outcome.ended = "done"
                    break
                if not chunk:
                    break
            elif status is not None:
                break  # it has ended, and whatever it wrote before has been read
            else:
                status = wait(False)
            if clock.is_up(outcome):
                outcome.ended = "time"
                break
    finally:
        os.close(read)
        outcome.status = _end(pid, wait, status, gently=outcome.ended == "done")
        outcome.seconds = time.monotonic() - start
    return outcome


class _Inbox:
    """Split the bytes of a result pipe into messages, and reject those without the seal."""

    def __init__(self, key: bytes, outcome: Outcome):
        self.key, self.outcome = key, outcome
        self.buffer, self.received = bytearray(), 0

    def take(self, chunk: bytes) -> bool:
        """Move whole messages to the outcome; False if they cannot be read, or are too many."""
        self.buffer += chunk
        self.received += len(chunk)
        head = _FRAME.size + wire.SEAL_BYTES
        while len(self.buffer) >= head:
            (size,) = _FRAME.unpack_from(self.buffer)
            if size > _MAX_BYTES or self.received > 2 * _MAX_BYTES or len(self.outcome.events) > _MAX_EVENTS:
                return False
            if len(self.buffer) < head + size:
                return True
            seal, data = bytes(self.buffer[_FRAME.size : head]), bytes(self.buffer[head : head + size])
            del self.buffer[: head + size]
            if not self._enter(seal, data):
                return False
        return True

    def _enter(self, seal: bytes, data: bytes) -> bool:
        if not hmac.compare_digest(seal, wire.seal(self.key, len(self.outcome.events), data)):
            return False
        try:
            event = wire.unpack(data)
        except wire.WireError:
            return False
        if _is_wellformed(event):
            self.outcome.events.append(event)
            return True
        return False


_FIELDS = {
    "loaded": {},
    "broken": {"message": str},
    "notes": {"notes": list},
    "missing": {"defined": list},
    "no kernel": {"type": str},
    "case": {
        "index": int,
        "facts": list,
        "changed": list,
        "counts": dict,
        "printed": str,
        "emulator": list,
        "again": list,
        "modelled": str,
    },
    "raised": {"index": int, "type": str, "message": str, "line": int, "text": str}
    | {"report": bool, "memory": bool, "violations": list, "bases": list},
    "violation": {"word": str},
    "end": {},
}  # what each message must hold: it comes from a process that ran somebody's code


def _is_wellformed(event: Any) -> bool:
    """Return whether a message has its fields, of the right types, and lists of text or dicts only."""
    fields = (
        _FIELDS.get(event.get("event")) if isinstance(event, dict) and isinstance(event.get("event"), str) else None
    )
    if fields is None or not all(type(event.get(name)) is kind for name, kind in fields.items()):
        return False
    lists = [v for k, v in event.items() if k not in ("value", "again") and isinstance(v, list)]
    return all(isinstance(entry, str | dict) for entries in lists for entry in entries)


def _complete(outcome: Outcome) -> bool:
    last = outcome.events[-1] if outcome.events else {}
    return last.get("event") in ("end", "missing", "no kernel", "broken") or (
        last.get("event") == "raised" and last.get("index") == -1
    )


class _Clock:
    """Measure how long a child has computed and how long it has slept; time in which a busy machine does not run it is
    not counted."""

    def __init__(self, job: Job, pid: int):
        self.limit, self.pid = job.cpu_seconds, pid
        self.loading = _LOAD_SECONDS if job.needs_triton else 0
        self.slept, self.last = 0.0, time.monotonic()
        self.start = self.last

    def is_up(self, outcome: Outcome) -> bool:
        """Return whether the limit is used up; imports before the answer's own code have a limit of their own."""
        computed, asleep = self._look()
        now = time.monotonic()
        self.slept += now - self.last if asleep else 0.0
        self.last = now
        limit = self.limit + (0 if outcome.events else self.loading)
        return computed > limit or self.slept > limit or now - self.start > _WALL_FACTOR * limit

    def _look(self) -> tuple[float, bool]:
        """Return (seconds of CPU so far, whether it sleeps), from /proc."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return sum(int(n) for n in fields[11:15]) / os.sysconf("SC_CLK_TCK"), fields[
                0
            ] != "R"  # stopped counts as asleep
        except (OSError, ValueError, IndexError):
            return 0.0, False


def _end(pid: int, wait: Callable[[bool], int | None], status: int | None, gently: bool) -> int:
    """Kill the child's process group and collect the child, unless it was already; its wait status, which can be asked for once."""
    deadline = time.monotonic() + (1.0 if gently else 0.0)
    status = wait(False) if status is None else status
    while status is None and time.monotonic() < deadline:
        time.sleep(0.001)
        status = wait(False)
    for kill in (os.killpg, os.kill):  # the group may not exist yet when a child is killed at its very start
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if kill is os.killpg or status is None:
                kill(pid, signal.SIGKILL)
    status = wait(True) if status is None else status
    return signal.SIGKILL if status is None else status
