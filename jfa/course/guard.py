"""Enforce what the answer's process may not do while it runs, and restore torch as it was before a notebook patched it.

This catches the usual short cuts. It is not a sandbox: code that a learner runs in the notebook has the learner's
rights anyway. But an answer cannot decide its own verdict: another process decides, from the numbers that the answer
returned.

Files with references (solutions, checks) are protected twice: the audit hook here reports an access from Python, and
the operating system (:mod:`jfa.course.landlock`) refuses all others, from C code included. Not covered: a copy of them
somewhere else, such as another checkout or git's own objects; C code on a kernel without Landlock; what a notebook read
before it called check().
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import math
import os
import re
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from jfa.course import originals

FAMILIES = {
    "softmax": re.compile(r"soft(max|min)|logsumexp"),
    "sdpa": re.compile(
        r"scaled_dot_product|_flash_attention|varlen_attn|_efficient_attention|multi_?head_attention|_fused_sdp"
    ),
    "flex": re.compile(r"flex_attention"),
    "nested": re.compile(r"^_?nested|_nested|to_padded_tensor|_jagged"),
    "numpy": re.compile(r"^(numpy|__array__)$"),
}
"""Operations by family: matched against the bare name of a torch function or of an aten operation."""

WORDS = {
    "softmax": "torch's own softmax (and logsumexp)",
    "sdpa": "torch's own attention (scaled_dot_product_attention and its kin)",
    "flex": "flex_attention",
    "nested": "torch's nested tensors",
    "numpy": "numpy",
    "solutions": "the solutions (and the course's own checks)",
    "submissions": "somebody else's answers",
    "processes": "other processes",
    "ctypes": "C functions called past Python (ctypes)",
    "modes": "a switch that hides torch operations from counting",
    "registered": "an operation that it registered itself (torch.library), inside which nothing is counted",
}

_LEARNER_MODULES = ("answer", "__main__")


class ForbiddenError(RuntimeError):
    """The answer used something that its exercise forbids."""


class ForbiddenWriteError(ForbiddenError, PermissionError):
    """The answer tried to change a file outside its temporary folder; libraries expect an OSError there."""


class ForbiddenProcessError(ForbiddenError, PermissionError):
    """The answer tried to start or signal a process; libraries that look for a tool (matplotlib: fc-list) expect an OSError."""


class Violations:
    """An answer's violations of the rules, in order; catching the exception does not remove the entry.

    ``tell`` is called with each word when it first occurs; in the answer's process it sends the word to the judge at
    once.
    """

    __slots__ = ("_words", "add")

    def __init__(self, tell: Callable[[str], None] = lambda word: None):
        words: list[str] = []
        self._words = words

        told: set[str] = set()

        def add(word: str) -> ForbiddenError:
            """Record one; the caller raises what this returns."""
            if word not in words:
                words.append(word)
            if word not in told:
                told.add(word)
                tell(word)
            return ForbiddenError(f"{describe(word)}: not allowed in this exercise")

        self.add = add

    @property
    def words(self) -> list[str]:
        """A copy of the words so far."""
        return list(self._words)


def describe(word: str) -> str:
    """Return a forbidden thing in the learner's words."""
    return WORDS.get(word, word)


def note_replaced(violations: Violations) -> None:
    """Record what the answer put in the place of the libraries' own functions while it ran."""
    for name in originals.LIBRARIES.replaced()[:3]:
        violations.add(f"`{name}` with something of its own in its place")


def note_operation(name: str, families: Iterable[str], violations: Violations) -> None:
    """Record the operation if its bare name belongs to one of these families."""
    for family in families:
        if FAMILIES[family].search(name):
            violations.add(family)


def note_host_read(words: str | None, violations: Violations) -> None:
    """Record one way of reading on the host; only the first, for the others tend to be its parts."""
    if words is not None and not any(w.startswith(_HOST_READ) for w in violations.words):
        violations.add(f"{_HOST_READ} ({words})")


_HOST_READ = "numbers of a tensor on the host"


# ---------------------------------------------------------------------------------------------- numpy


class Unusable:
    """Stand-in for a forbidden module in the answer's namespace."""

    def __init__(self, word: str, violations: Violations):
        object.__setattr__(self, "_state", (word, violations))

    def __getattribute__(self, name):
        word, violations = object.__getattribute__(self, "_state")
        raise violations.add(word)

    def __call__(self, *args, **kwargs):
        word, violations = object.__getattribute__(self, "_state")
        raise violations.add(word)


def forbid_numpy_names(namespace: dict, violations: Violations) -> None:
    """Take numpy's name, and the names of its functions, from the answer's namespace."""
    for name, value in list(namespace.items()):
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and home.split(".")[0] == "numpy":
            namespace[name] = Unusable("numpy", violations)


def forbid_numpy_import(violations: Violations) -> None:
    """Refuse ``import numpy`` in the answer's own code; torch and the package still may."""
    original = builtins.__import__

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        if name.split(".")[0] == "numpy" and (globals or {}).get("__name__") in _LEARNER_MODULES:
            raise violations.add("numpy")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded


# ---------------------------------------------------------------------------------------------- the process

_PROCESS_EVENTS = (
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "os.kill", "os.killpg",
    "pty.spawn", "ptrace",
)  # fmt: skip
_THREAD_STARTERS = (
    "start_new_thread",
    "start_new",
    "start_joinable_thread",
    "_start_new_thread",
    "_start_joinable_thread",
)
_C_EVENTS = ("ctypes.dlopen", "ctypes.dlsym")
_FRAME_EVENTS = ("sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile")
_FRAME_ATTRIBUTES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_CHANGES = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,), "os.removexattr": (0,),
}  # fmt: skip
"""Events that change files: which of their arguments are the paths."""

_RELATIVE = (
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
    "os.utime",
)
_FOLDER_EVENTS = ("os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SHOWS_FRAMES = {
    "inspect.py": None,
    "traceback.py": ("walk_tb", "walk_stack"),
}  # by file: functions (None: all) that return frames


def watch(closed: Mapping[str, Iterable[str]], scratch: str, violations: Violations) -> None:
    """Refuse forbidden operations for the rest of this process's life; the operating system's rules enforce them as
    well.

    Args:
        closed: files and folders not to be read, by the word of the violation.
        scratch: the one folder in which files may change; "" for none.
        violations: where reading closed files and calling C functions is recorded. What is merely refused (starting processes and
            threads, writing files, looking at the frames of the judge's code) raises and is not recorded.
    """
    roots = [(os.path.realpath(path), word) for word, paths in closed.items() for path in paths]
    own = os.path.realpath(scratch) + os.sep if scratch else None
    busy = False

    def hook(event: str, args: tuple) -> None:
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            refuse(event, args)
        finally:
            busy = False

    def refuse(event: str, args: tuple) -> None:
        if event == "open":
            if isinstance(args[0], str | bytes):
                opens(os.path.realpath(os.fsdecode(args[0])), args[2])
        elif event in _FRAME_EVENTS or event == "object.__getattr__" and args[1] in _FRAME_ATTRIBUTES:
            if _asked_by_learner(sys._getframe(2), _SHOWS_FRAMES):
                raise ForbiddenError("an answer does not look at the frames of the code that runs it")
        elif event in _FOLDER_EVENTS:
            if args[0] is None or isinstance(args[0], str | bytes):
                reads(os.path.realpath(os.fsdecode(args[0] or ".")))
        elif event in _CHANGES:
            if event in _RELATIVE and args[-1] != -1:
                return  # relative to a folder's descriptor: left to the kernel
            if event in ("os.link", "os.symlink"):
                reads(os.path.realpath(os.fsdecode(args[0])))
            for path in (args[i] for i in _CHANGES[event] if not isinstance(args[i], int)):
                folder, name = os.path.split(os.fsdecode(path))
                changes(os.path.join(os.path.realpath(folder or "."), name))
        elif event in _C_EVENTS:
            if _asked_by_learner(sys._getframe(2), {"ctypes": None}):
                raise violations.add("ctypes")
        elif event in _PROCESS_EVENTS:
            raise ForbiddenProcessError("an answer starts and signals no other processes")
        elif event == "resource.prlimit" and args[0] not in (0, os.getpid()):
            raise ForbiddenProcessError("an answer starts and signals no other processes, nor sets their limits")

    def opens(path: str, flags: int | None) -> None:
        reads(path)
        if isinstance(flags, int) and flags & _WRITING and not path.startswith("/dev/"):
            changes(path)

    def reads(path: str) -> None:
        for root, word in roots:
            if path == root or path.startswith(root + os.sep):
                raise violations.add(word)
        if _OTHER_PROCESS.match(path) and not path.startswith(f"/proc/{os.getpid()}/"):
            raise violations.add("solutions")

    def changes(path: str) -> None:
        reads(path)
        if own is None or not f"{path}{os.sep}".startswith(own):
            raise ForbiddenWriteError(
                "an answer changes no files but in a temporary folder: tempfile.mkdtemp() makes one"
            )

    sys.addaudithook(hook)
    _forbid_threads()


def _forbid_threads() -> None:
    """Refuse threads of Python's: the modes that count torch's operations belong to one thread. Torch's own are not meant."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ForbiddenError("an answer starts no threads: what they compute would not be counted")

    for module in (_thread, threading):
        for name in filter(lambda name: hasattr(module, name), _THREAD_STARTERS):
            setattr(module, name, refuse)


_OTHER_PROCESS = re.compile(r"/proc/\d+/")


def _asked_by_learner(frame: types.FrameType | None, helpers: Mapping[str, tuple[str, ...] | None]) -> bool:
    """Return whether the learner's own code asked, itself or through these library files: torch and Python ask as well."""
    while frame is not None and _is_helper(frame.f_code, helpers):
        frame = frame.f_back
    return frame is not None and is_own_file(frame.f_code.co_filename)


def _is_helper(code: types.CodeType, helpers: Mapping[str, tuple[str, ...] | None]) -> bool:
    """Return whether code lies in one of these library files or folders, and is one of the functions named."""
    if code.co_filename == __file__:
        return True
    folder, name = os.path.split(code.co_filename)
    for key in (name, os.path.basename(folder)):
        if key in helpers and folder.startswith(_LIBRARY):
            return helpers[key] is None or code.co_name in helpers[key]
    return False


_LIBRARY = os.path.dirname(os.__file__)


def is_own_file(filename: str) -> bool:
    """Return whether a frame's file is a cell of the learner's."""
    return filename.startswith(("<your answer", "<helper", "<cell", "<ipython")) or "ipykernel" in filename


def limit_process(memory_mb: int, cpu_seconds: float) -> None:
    """Give the child its own process group, memory and CPU limits, death with the parent and no core dumps; called there."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        size = _virtual_bytes() + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    hard = math.ceil(cpu_seconds) + 5 + math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


# ---------------------------------------------------------------------------------------------- torch as it was


def gpu_in_use() -> bool:
    """Return whether this process holds a GPU: then it cannot be forked."""
    return torch.cuda.is_initialized()


@contextlib.contextmanager
def pristine() -> Iterator[list[str]]:
    """Judge with the functions that torch, numpy and Python had when the course was imported; yields the names found replaced.

    A notebook that says ``torch.allclose = lambda *a: True`` changes the process the judge lives in. What was replaced is put
    back as it was found afterwards: it is the notebook's own.
    """
    dtype = torch.get_default_dtype()
    changed = originals.LIBRARIES.put_back()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield originals.labels(changed)
    finally:
        originals.undo(changed)
        torch.set_default_dtype(dtype)
