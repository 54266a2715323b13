"""What the kernel itself refuses to an answer's process: every call of the table, every change of a file outside its folder."""

import errno
import os
import platform
import subprocess
import sys

import pytest

from jfa.course import landlock, seccomp

needs_filter = pytest.mark.skipif(not seccomp.is_known(), reason="no system-call filter here")
needs_landlock = pytest.mark.skipif(landlock.version() < 3, reason="no Landlock that knows truncating")

CONFINED = """
import ctypes, os, sys
from jfa.course import landlock, seccomp
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return 0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()
closed, scratch = sys.argv[1], sys.argv[2]
landlock.drop_rights()
landlock.confine([closed], scratch)
seccomp.forbid_processes()
"""


def confined(program: str, closed="/nowhere", scratch="") -> str:
    """What a program prints that runs under an answer's rules."""
    command = [sys.executable, "-c", CONFINED + program, str(closed), str(scratch)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_filter
def test_every_call_of_the_table_fails():
    column = seccomp._MACHINES[platform.machine()][0]
    numbers = {
        name: n[column] for calls in seccomp.FORBIDDEN.values() for name, n in calls.items() if n[column] is not None
    }
    said = confined(f"for name, n in {numbers!r}.items(): print(name, call(n, 0, 0, 0, 0, 0))")
    found = dict(line.split() for line in said.splitlines())
    assert found == dict.fromkeys(numbers, str(errno.EPERM))


@needs_filter
def test_rights_and_times_of_files_are_left_as_they_are_without_an_error():
    column = seccomp._MACHINES[platform.machine()][0]
    numbers = [n[column] for n in seccomp.IGNORED.values() if n[column] is not None]
    assert confined(f"print({{call(n, 0, 0, 0, 0, 0) for n in {numbers!r}}})").strip() == "{0}"


@needs_filter
def test_calls_that_name_a_process_work_on_this_one_only():
    column = seccomp._MACHINES[platform.machine()][0]
    for name, numbers in seccomp.OWN_ONLY.items():
        program = "print(call({0}, {1}, 0, 0, 0), call({0}, os.getpid(), 0, 0, 0) == 1)"
        for other in ("os.getppid()", "1", "-1", "-os.getppid()"):
            assert confined(program.format(numbers[column], other)).split() == ["1", "False"], (name, other)


@needs_filter
@pytest.mark.parametrize("number", [seccomp._NEWEST + 1, 512, 4000, 0x40000000 + 62])
def test_calls_that_nobody_knows_do_not_exist(number):
    assert int(confined(f"print(call({number}, 0, 0, 0))")) == errno.ENOSYS


@needs_filter
def test_calls_of_many_uses_lose_only_the_ones_that_reach_others():
    program = (
        "import fcntl, resource\nfd = os.open('/dev/null', os.O_RDONLY)\nprint(fcntl.fcntl(fd, fcntl.F_GETFL) >= 0)\n"
        "for command in (fcntl.F_SETOWN, 15, fcntl.F_SETLEASE):\n    try: fcntl.fcntl(fd, command, 1)\n"
        "    except PermissionError: print('refused')\n"
        "print(libc.prctl(1, 0), libc.prctl(15, b'name'))\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    )
    assert confined(program).split() == ["True", "refused", "refused", "refused", "-1", "0"]


CHANGES = {
    "write": "open(f, 'w')", "append": "open(f, 'a')", "read and write": "os.open(f, os.O_RDWR)", "create": "open(new, 'x')",
    "truncate": "os.truncate(f, 0)", "remove": "os.remove(f)", "rename": "os.rename(f, new)", "move in": "os.rename(f, s + '/f')",
    "move out": "open(s + '/g', 'w').close(); os.rename(s + '/g', new)",
    "link": "os.link(f, new)", "link in": "os.link(f, s + '/f')",
    "symlink": "os.symlink(f, new)", "mkdir": "os.mkdir(new)", "rmdir": "os.rmdir(empty)", "fifo": "os.mkfifo(new)",
    "chmod": "os.chmod(f, 0o777)", "utime": "os.utime(f, (1, 1))", "xattr": "os.setxattr(f, 'user.a', b'b')",
    "chown": "os.chown(f, 0, 0)", "socket": "import socket; socket.socket(socket.AF_UNIX).bind(new)",
    "device": "os.mknod(new, 0o20600, os.makedev(1, 3))", "run": "os.execv('/bin/true', ['true'])",
    "through a link": "os.symlink(f, s + '/l'); open(s + '/l', 'w')", "through /proc": "open('/proc/self/root' + f, 'w')",
}  # fmt: skip


@needs_landlock
@needs_filter
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_outside_the_folder_changes(tmp_path, change):
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    (outside / "empty").mkdir(parents=True)
    scratch.mkdir()
    (outside / "f").write_text("as it was")
    before = _state(outside)
    names = (
        f"s, f, new, empty = scratch, {str(outside / 'f')!r}, {str(outside / 'new')!r}, {str(outside / 'empty')!r}\n"
    )
    said = confined(
        f"{names}try:\n    {change}\n    print('done')\nexcept OSError as error: print(error.errno)", scratch=scratch
    )
    ignored = {"done"} if change.startswith(("os.chmod", "os.utime")) else set()
    assert said.strip() in {str(errno.EACCES), str(errno.EPERM), str(errno.EXDEV)} | ignored
    assert _state(outside) == before


def _state(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        about = os.lstat(path)
        found[path.name] = (
            about.st_mode,
            about.st_mtime_ns,
            about.st_nlink,
            path.read_bytes() if path.is_file() else b"",
        )
    return found


@needs_landlock
def test_the_folder_of_its_own_can_be_used(tmp_path):
    program = (
        "os.mkdir(scratch + '/a')\nopen(scratch + '/x', 'w').write('abc')\nos.rename(scratch + '/x', scratch + '/a/y')\n"
        "os.truncate(scratch + '/a/y', 1)\nprint(open(scratch + '/a/y').read())\n"
        "os.remove(scratch + '/a/y')\nos.rmdir(scratch + '/a')\n"
        "open('/dev/null', 'w').write('x')\nprint(len(os.urandom(3)), len(open('/dev/urandom', 'rb').read(2)))"
    )
    assert confined(program, scratch=tmp_path).split() == ["a", "3", "2"]
    assert not list(tmp_path.iterdir())


@needs_landlock
@pytest.mark.parametrize(
    "path", ["/proc/{}/environ", "/proc/{}/mem", "/proc/{}/root/etc/passwd", "/dev/mem", "/dev/kmsg"]
)
def test_other_processes_and_devices_are_not_read(path):
    program = f"try:\n    open({path!r}.format(os.getppid()), 'rb').read(1)\n    print('read')\nexcept OSError: print('refused')"
    assert confined(program).strip() == "refused"


def test_a_system_without_landlock_says_so(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert "no Landlock" in landlock.shortcoming() and not landlock.confine(["/nowhere"])
    monkeypatch.setattr(landlock, "version", lambda: 2)
    assert "truncating" in landlock.shortcoming() and "moving" not in landlock.shortcoming()
    monkeypatch.setattr(landlock, "version", lambda: 7)
    assert landlock.shortcoming() == ""
