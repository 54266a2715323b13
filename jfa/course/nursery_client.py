"""The judge's end of the nursery: start it, request children, and learn how they ended. Starting one needs no torch."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, and a nursery starts before its judge has
    from jfa.course.job import Job


class Nursery:
    """A running nursery process; ``start`` and ``wait`` may be called from several threads."""

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        command = [sys.executable, "-P", "-m", "jfa.course.nursery", str(theirs.fileno())]
        quiet = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, **quiet)
        theirs.close()
        self.control = ours
        self.sending, self.changed = threading.Lock(), threading.Condition()
        self.started: list[int] = []
        self.ended: dict[int, int] = {}
        self.gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, job: Job, result_fd: int) -> int:
        """Fork a child for the job; its pid."""
        with tempfile.TemporaryFile() as file:
            file.write(job.pack())
            file.flush()
            with self.sending:
                kind = b"triton" if job.needs_triton else b"plain"
                socket.send_fds(self.control, [kind], [file.fileno(), result_fd])
                with self.changed:
                    self.changed.wait_for(lambda: self.started or self.gone, timeout=120)
                    if not self.started:
                        raise RuntimeError(
                            "the process that runs answers did not start; jfa doctor says what is wrong here"
                        )
                    return self.started.pop(0)

    def wait(self, pid: int, block: bool) -> int | None:
        """Return the wait status of a child, None while it runs."""
        with self.changed:
            if block:
                self.changed.wait_for(lambda: pid in self.ended or self.gone, timeout=30)
            return self.ended.pop(pid, 0 if self.gone else None)

    def close(self) -> None:
        """End the nursery (its children die with it)."""
        self.control.close()
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.control.recv(4096):
                message = json.loads(data)
                with self.changed:
                    if "started" in message:
                        self.started.append(message["started"])
                    else:
                        self.ended[message["ended"]] = message["status"]
                    self.changed.notify_all()
        with self.changed:
            self.gone = True
            self.changed.notify_all()


def _python_path() -> str:
    """Return PYTHONPATH under which the child finds this very package."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    old = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([home, *([old] if old else [])])


_NURSERY: Nursery | None = None
_STARTING = threading.Lock()


def nursery() -> Nursery:
    """Return the nursery of this process, started on first use (and again if it has died)."""
    global _NURSERY
    with _STARTING:
        if _NURSERY is None or _NURSERY.gone:
            if _NURSERY is None:
                atexit.register(close_nursery)
            _NURSERY = Nursery()
        return _NURSERY


def close_nursery() -> None:
    """End this process's nursery, if it has one."""
    global _NURSERY
    if _NURSERY is not None:
        _NURSERY.close()
        _NURSERY = None
