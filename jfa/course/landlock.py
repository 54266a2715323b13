"""Restrict what the answer's process may read and write, by Linux's Landlock (since 5.13, for any user).

The audit hook of :mod:`jfa.course.guard` sees what Python opens, and names it; C code bypasses it. Landlock is enforced
by the operating system and cannot be removed again. Reading is allowed everywhere except below the closed files and
folders and in /dev; writing, making, removing, renaming and truncating only below the answer's own temporary folder;
running programs, connecting over TCP, signals and abstract sockets to the outside not at all, as far as the kernel's
version of Landlock knows these rights.

Not restricted: listing the names of files, and changing rights, owners and times of files (:mod:`jfa.course.seccomp`
refuses these changes).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_READ = 1 << 2  # READ_FILE; folders stay listable, or imports would find nothing
_WRITE = 1 << 1  # WRITE_FILE
_HANDLED = {
    1: {  # the version of Landlock that brought the rights
        "execute": 1 << 0, "write_file": _WRITE, "read_file": _READ, "remove_dir": 1 << 4, "remove_file": 1 << 5,
        "make_char": 1 << 6, "make_dir": 1 << 7, "make_reg": 1 << 8, "make_sock": 1 << 9, "make_fifo": 1 << 10,
        "make_block": 1 << 11, "make_sym": 1 << 12,
    },
    2: {"refer": 1 << 13},  # renaming and linking from one folder to another
    3: {"truncate": 1 << 14},
    5: {"ioctl_dev": 1 << 15},
}  # fmt: skip
_IN_SCRATCH = {
    "write_file",
    "read_file",
    "remove_dir",
    "remove_file",
    "make_dir",
    "make_reg",
    "make_sym",
    "refer",
    "truncate",
}
_DEVICES = {"null": _READ | _WRITE, "full": _READ | _WRITE, "zero": _READ, "urandom": _READ, "random": _READ}  # of /dev
_NET_VERSION, _NET = 4, 0b11  # binding and connecting TCP
_SCOPE_VERSION, _SCOPE = 6, 0b11  # abstract unix sockets, signals
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_ASK_VERSION = 1  # a flag of _CREATE
_PATH_BENEATH = 1  # the kind of rule
_NO_NEW_PRIVS = 38  # prctl


def version() -> int:
    """Return version of the kernel's Landlock, 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, 0, _ASK_VERSION))


def shortcoming() -> str:
    """Return one sentence about what an answer could do on this kernel, "" where Landlock holds everything it should."""
    found = version()
    if found == 0:
        return (
            "This system has no Landlock: answers are kept from the files of others, and from writing outside their temporary "
            "folder, in Python only; C code of an answer could do both."
        )
    missing = [
        words for since, words in ((2, "moving files between folders"), (3, "truncating files")) if found < since
    ]
    if not missing:
        return ""
    return f"The Landlock of this kernel is old (version {found}): C code of an answer is not kept from {' and '.join(missing)}."


def confine(closed: Iterable[str], scratch: str = "") -> bool:
    """Take the rights away for the rest of this process's life; whether the kernel knows how.

    Args:
        closed: files and folders that cannot be read any more. Files that later appear beside them, or beside a folder above
            them, cannot be read by this process either.
        scratch: the one folder to write in; "" for none.
    """
    found = version()
    if not found:
        return False
    rights = {name: bit for since, names in _HANDLED.items() if since <= found for name, bit in names.items()}
    handled = [sum(rights.values()), _NET if found >= _NET_VERSION else 0, _SCOPE if found >= _SCOPE_VERSION else 0]
    attributes = struct.pack("=QQQ", *handled)[: 24 if found >= _SCOPE_VERSION else 16 if found >= _NET_VERSION else 8]
    libc = ctypes.CDLL(None, use_errno=True)
    rules = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path in _open_paths([*(Path(os.path.realpath(c)) for c in closed), Path("/dev")]):
            _allow(libc, rules, path, _READ)
        for name, bits in _DEVICES.items():
            _allow(libc, rules, Path("/dev", name), bits & handled[0])
        if scratch:
            _allow(
                libc,
                rules,
                Path(os.path.realpath(scratch)),
                sum(bit for name, bit in rights.items() if name in _IN_SCRATCH),
            )
        return libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _open_paths(closed: list[Path]) -> Iterator[Path]:
    """Yield the largest files and folders that hold nothing closed, from the root down."""
    shut, above = set(closed), {parent for path in closed for parent in path.parents}
    todo = [Path("/")]
    while todo:
        folder = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:  # not ours to read, or gone
            continue
        for entry in entries:
            path = Path(entry.path)
            if path in shut or entry.is_symlink():  # what a link names has a place, and a rule, of its own
                continue
            if path in above:
                todo.append(path)
            else:
                yield path


def _allow(libc: ctypes.CDLL, rules: int, path: Path, bits: int) -> None:
    """Add one rule: these rights at or below ``path``."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", bits, fd), 0)
    finally:
        os.close(fd)


_CAPSET, _CAPABILITY_VERSION = "capset", 0x20080522
_KEPT = 1 << 2  # CAP_DAC_READ_SEARCH: root reads the files of a learner's account as before


def drop_rights() -> None:
    """Give up what only root may do; nothing changes for any other user."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    getattr(libc, _CAPSET)(header, struct.pack("=6I", _KEPT, _KEPT, 0, 0, 0, 0))
