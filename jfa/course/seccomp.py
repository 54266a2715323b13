"""A system-call filter for the answer's process, which must not start, signal, trace or change other processes, or
change the machine.

Python's audit hooks see what Python code does; C code bypasses them. The operating system's filter sees every call,
needs no rights and cannot be removed again. ``FORBIDDEN``, ``IGNORED``, ``OWN_ONLY`` and ``WITHOUT`` are all its rules.
Every other call that is older than this table is allowed; newer calls fail as if they did not exist.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

_MACHINES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column of the tables, the kernel's name of the machine
_NEWEST = 469  # file_setattr: the last call that these tables have seen; beyond it lie x86's 32-bit calls, too

FORBIDDEN: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "starts processes": {"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    "reaches other processes": {
        "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
        "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
        "process_mrelease": (448, 448), "kcmp": (312, 272), "setpriority": (141, 140), "ioprio_set": (251, 30),
        "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
        "migrate_pages": (256, 238), "move_pages": (279, 239), "perf_event_open": (298, 241), "setpgid": (109, 154),
        "setsid": (112, 157),
    },
    "shares memory, queues or connections": {
        "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
        "semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
        "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "socket": (41, 198),
    },
    "goes past this filter, Landlock or the memory limit": {
        "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
        "userfaultfd": (323, 282), "memfd_create": (319, 279), "memfd_secret": (447, 447), "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
    },
    "changes what Landlock does not guard: owners and attributes of files": {
        "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
        "lsetxattr": (189, 6), "fsetxattr": (190, 7),
        "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
        "removexattrat": (466, 466), "file_setattr": (469, 469), "mknod": (133, None), "mknodat": (259, 33),
    },
    "changes the machine (some graders are root)": {
        "setns": (308, 268), "unshare": (272, 97), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
        "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
        "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
        "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
        "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
        "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
        "kexec_file_load": (320, 294), "acct": (163, 89), "syslog": (103, 116), "settimeofday": (164, 170),
        "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
        "personality": (135, 92), "modify_ldt": (154, None), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
        "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "lsm_set_self_attr": (460, 460),
        "capset": (126, 91), "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
        "setgroups": (116, 159), "setresuid": (117, 147), "setresgid": (119, 149), "setfsuid": (122, 151),
        "setfsgid": (123, 152), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18), "uselib": (134, None),
    },
}  # fmt: skip
"""Calls that fail (EPERM), by why: name and number, x86_64 and aarch64 (None: the machine has no such call)."""

IGNORED: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
"""Calls that succeed and change nothing: rights and times of files.

Landlock does not guard them and this filter cannot read a path, so the answer's own folder cannot be told from any other.
An error would end what copies, unpacks or touches a file there (:mod:`shutil`, :mod:`zipfile`, :mod:`pathlib`).
"""

OWN_ONLY: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
}  # fmt: skip
"""Calls whose first argument names a process: it must be this one."""

_SELF_IS_ZERO = {"prlimit64", "sched_setaffinity"}  # 0 means "myself" to these, and "my group" to kill

WITHOUT: dict[str, tuple[int, tuple[int, int], tuple[int, ...]]] = {
    "fcntl": (1, (72, 25), (8, 15, 1024)),  # F_SETOWN, F_SETOWN_EX: signals to others; F_SETLEASE: holds others up
    "ioctl": (
        1,
        (16, 29),
        (0x8901, 0x8902, 0x5412, 0x541C),
    ),  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCLINUX: typing for others
    "prctl": (0, (157, 167), (1, 0x59616D61)),  # PR_SET_PDEATHSIG: outliving the judge; PR_SET_PTRACER
}
"""Calls of many uses: which argument says what is wanted, the numbers, and what it must not be."""

_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF: ld word absolute, jeq, jgt, jset, ret
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; of an argument the low half
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2  # prctl


def is_known() -> bool:
    """Return whether this machine's calls are in the tables and its kernel filters calls at all."""
    known = platform.system() == "Linux" and platform.machine() in _MACHINES
    return known and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def forbid_processes() -> bool:
    """Install the filter in this process; whether the kernel took it."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return False
    program = b"".join(_rules(*_MACHINES[platform.machine()], os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(pointer), 0, 0) == 0


def _op(code: int, yes: int, no: int, value: int) -> bytes:
    """Return one BPF instruction: what to do, how many instructions to skip if true or false, its operand."""
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


_IGNORE = _op(_RETURN, 0, 0, _FAIL)  # fails with error 0, which is success
_REFUSE, _PASS = _op(_RETURN, 0, 0, _FAIL | errno.EPERM), _op(_RETURN, 0, 0, _ALLOW)
_UNKNOWN = _op(_RETURN, 0, 0, _FAIL | errno.ENOSYS)


def _rules(column: int, machine: int, pid: int) -> Iterator[bytes]:
    """Yield the filter, one rule after the other; the accumulator holds the call's number between them."""
    yield from (_op(_LOAD, 0, 0, _ARCH), _op(_EQUAL, 1, 0, machine), _REFUSE)  # the calls of another machine: int 0x80
    yield from (_op(_LOAD, 0, 0, _NUMBER), _op(_GREATER, 0, 1, _NEWEST), _UNKNOWN)
    # glibc asks for clone3 first and takes clone where it does not exist; clone's flags can be read here, clone3's cannot
    yield from (_op(_EQUAL, 0, 1, _CLONE3[column]), _UNKNOWN)
    yield from _with_argument(_CLONE[column], 0, [_op(_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSE, _PASS])
    for name, numbers in OWN_ONLY.items():
        allowed = [pid, 0] if name in _SELF_IS_ZERO else [pid]
        yield from _with_argument(numbers[column], 0, [*_jumps(allowed), _REFUSE, _PASS])
    for argument, numbers, banned in WITHOUT.values():
        yield from _with_argument(numbers[column], argument, [*_jumps(list(banned)), _PASS, _REFUSE])
    for calls in FORBIDDEN.values():
        for numbers in calls.values():
            if numbers[column] is not None:
                yield from (_op(_EQUAL, 0, 1, numbers[column]), _REFUSE)
    for numbers in IGNORED.values():
        if numbers[column] is not None:
            yield from (_op(_EQUAL, 0, 1, numbers[column]), _IGNORE)
    yield _PASS


def _with_argument(number: int, argument: int, rest: list[bytes]) -> Iterator[bytes]:
    """Yield for the call of this number ``rest``, which must end in a verdict, with the argument in the accumulator."""
    yield _op(_EQUAL, 0, len(rest) + 1, number)
    yield _op(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    yield from rest


def _jumps(values: list[int]) -> Iterator[bytes]:
    """Yield comparisons that skip the next verdict, and go to the one after it, where one of the values is met."""
    for i, value in enumerate(values):
        yield _op(_EQUAL, len(values) - i, 0, value)
