"""A system-call filter for the answer's process: no new processes, no signals to others, no looking into their memory.

Python's audit hooks see what Python code does; ctypes goes past them. The kernel's filter sees every call. It needs no rights
and cannot be taken off again. Where it does not exist (another system, an old kernel) the rest of the engine still holds: the
judge ends the whole process group.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_NUMBERS = {  # system call numbers, from each architecture's unistd table of Linux
    "x86_64": {
        "arch": 0xC000003E, "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "execveat": 322, "kill": 62,
        "tgkill": 234, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    },
    "aarch64": {
        "arch": 0xC00000B7, "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "kill": 129, "tgkill": 131, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271,
    },
}  # fmt: skip
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld word absolute, jeq, jset, ret
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (low half of the argument)
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2  # prctl


def forbid_processes() -> bool:
    """Install the filter in this process; whether the kernel took it."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return False
    program = b"".join(_rules(dict(numbers), os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(pointer), 0, 0) == 0


def _op(code: int, yes: int, no: int, value: int) -> bytes:
    """One BPF instruction: what to do, how many instructions to skip if true or false, its operand."""
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


def _rules(numbers: dict[str, int], pid: int) -> list[bytes]:
    """The filter: threads may start, signals may go to this process itself, everything else of the table fails."""
    fail, allow = _op(_RETURN, 0, 0, _FAIL | errno.EPERM), _op(_RETURN, 0, 0, _ALLOW)
    rules = [_op(_LOAD, 0, 0, _ARCH), _op(_EQUAL, 1, 0, numbers.pop("arch")), allow, _op(_LOAD, 0, 0, _NUMBER)]
    # glibc asks for clone3 first and takes clone where it does not exist; clone's flags can be read here, clone3's cannot
    rules += [_op(_EQUAL, 0, 1, numbers.pop("clone3")), _op(_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    own, thread = _op(_EQUAL, 1, 0, pid), _op(_ANY_BIT, 1, 0, _CLONE_THREAD)
    for name, test in (("clone", thread), ("kill", own), ("tgkill", own)):
        rules += [_op(_EQUAL, 0, 4, numbers.pop(name)), _op(_LOAD, 0, 0, _FIRST_ARGUMENT), test, fail, allow]
    for number in numbers.values():
        rules += [_op(_EQUAL, 0, 1, number), fail]
    return [*rules, allow]
