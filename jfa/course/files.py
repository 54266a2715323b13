"""Write a learner's file completely or not at all, and say in one sentence why it could not be written."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
import tempfile
import time
from pathlib import Path

from jfa.course.notebook import Unreadable, read_bytes

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_IN_THE_WAY = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_ABANDONED = 3600  # seconds after which a draft belongs to a process that was killed


class Refusal(Exception):
    """Raised for something that was not done, with one sentence for the learner; the files are unchanged."""


def words(error: OSError) -> str:
    """Return why the system refused, for a sentence."""
    if error.errno in _FULL:
        return "the disk is full or your quota is used up"
    if error.errno in _FORBIDDEN:
        return f"writing is not allowed there ({error.strerror})"
    if error.errno in _IN_THE_WAY:
        return f"{error.filename2 or error.filename or 'something'} is in the way"
    return str(error.strerror or error)


def write_whole(path: Path, data: bytes, before: bytes | None = None) -> None:
    """Write a file by replacing it with a finished copy, so a reader sees the old contents or the new ones.

    The new file has the old one's mode; a link is followed, and stays. ``before`` is what the caller read there: if another
    program has changed the file since, nothing is written. Raises Refusal, and the file is as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        old = target.stat() if target.exists() else None
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise Refusal(f"{path} is no plain file: it was not written")
        if old is not None and not os.access(target, os.W_OK):
            raise Refusal(f"{path} is write-protected: it was not changed")
        _sweep(target)
        handle, draft = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent)
        try:
            _fill(handle, data, old)
            if before is not None and read_bytes(target) != before:
                raise Refusal(
                    f"{path} was changed by another program meanwhile: nothing was written, run the command again"
                )
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise Refusal(f"{path} could not be written, and is as it was: {words(error)}") from error
    except Unreadable as error:
        raise Refusal(str(error)) from error
    _settle(target.parent)


def _fill(handle: int, data: bytes, old: os.stat_result | None) -> None:
    """Write everything to an open draft and close it; on the disk, not only in a cache, when this returns."""
    try:
        os.fchmod(handle, stat.S_IMODE(old.st_mode) if old else 0o666 & ~_umask())
        if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(OSError):
                os.fchown(handle, old.st_uid, old.st_gid)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _settle(folder: Path) -> None:
    """Put the new name on the disk, too, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sweep(target: Path) -> None:
    """Remove drafts of this file that a killed process left behind."""
    for draft in target.parent.glob(f".{glob.escape(target.name[:100])}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _ABANDONED:
                draft.unlink()
