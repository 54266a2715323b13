"""Files that the answer's process cannot open, whichever way it asks: Linux's Landlock, since 5.13, for any user.

The audit hook of :mod:`jfa.course.guard` sees what Python opens, and names it; ctypes goes past it. Landlock sits in the kernel: it
allows reading below what a rule names and refuses the rest. So everything gets a rule but the way down to the closed folders.

What it leaves open: names of files can still be listed, and a kernel without Landlock closes nothing (the audit hook remains).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_READ_FILE = 1 << 2  # LANDLOCK_ACCESS_FS_READ_FILE; directories stay listable, or imports would find nothing
_PATH_BENEATH = 1  # the kind of rule
_NO_NEW_PRIVS = 38  # prctl


def close_folders(folders: Iterable[str]) -> bool:
    """For the rest of this process's life no file below these folders can be opened; whether the kernel knows how.

    Files that later appear beside them, or beside a folder above them, cannot be read by this process either.
    """
    closed = [Path(os.path.realpath(folder)) for folder in folders]
    libc = ctypes.CDLL(None, use_errno=True)
    rules = libc.syscall(_CREATE, struct.pack("=Q", _READ_FILE), 8, 0)
    if rules < 0:
        return False
    try:
        for path in _open_paths(closed):
            _allow(libc, rules, path)
        return libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _open_paths(closed: list[Path]) -> Iterator[Path]:
    """The largest files and folders that hold nothing closed, from the root down."""
    todo = [Path("/")]
    while todo:
        folder = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:  # not ours to read, or gone
            continue
        for entry in entries:
            path = Path(entry.path)
            if path in closed or entry.is_symlink():  # what a link names has a place, and a rule, of its own
                continue
            if any(path in target.parents for target in closed):
                todo.append(path)
            else:
                yield path


def _allow(libc: ctypes.CDLL, rules: int, path: Path) -> None:
    """One rule: files at or below ``path`` may be read."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", _READ_FILE, fd), 0)
    finally:
        os.close(fd)
