"""A process that answers are forked from: it has imported torch, and has not loaded any check or solution.

Importing torch costs a second or two, a fork ten milliseconds. The judge's process starts one nursery
(``python -m jfa.course.nursery FD``) and asks it for children over a socket; each request brings the job's file and the result
pipe along.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def main(fd: int) -> None:
    """Serve requests until the judge's end of the socket closes."""
    import torch

    from jfa.course import child  # noqa: F401  warm before the first fork

    torch.set_num_threads(1)
    control = socket.socket(fileno=fd)
    wake, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(control)
        if control in ready and not _serve(control):
            return


def _reap(control: socket.socket) -> None:
    """Tell the judge about every child that ended: {"ended": pid, "status": wait status}."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _send(control, {"ended": pid, "status": status})


def _serve(control: socket.socket) -> bool:
    """Serve one request: fork a child for it; return False when the judge has gone."""
    data, fds, _, _ = socket.recv_fds(control, 64, 2)
    if not data:
        return False
    if data.startswith(b"triton"):
        _warm_triton()
    pid = os.fork()
    if pid == 0:
        _become_child(control, *fds)
    for fd in fds:
        os.close(fd)
    _send(control, {"started": pid})
    return True


def _warm_triton() -> None:
    """Import Triton and the emulator once, so that every later child has them."""
    try:
        import jfa.emulator  # noqa: F401
    except ImportError:
        pass  # the child's own import says what is wrong


def _become_child(control: socket.socket, job_fd: int, result_fd: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control.close()
    from jfa.course import child
    from jfa.course.job import Job

    with os.fdopen(job_fd, "rb") as file:
        file.seek(0)
        job = Job.unpack(file.read())
    child.run(job, result_fd)


def _send(control: socket.socket, message: dict) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
