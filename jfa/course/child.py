"""The answer's process: build its namespace, run it on each case, send what it returned. It has no right answers.

It is forked from a notebook's kernel (the function is there, live) or from the nursery, a clean process that has imported torch and
nothing of the course's checks. Messages to the judge: see :func:`run`.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import itertools
import os
import random
import struct
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from jfa.course import (
    arrays,
    clock,
    closed_modules,
    guard,
    kinds,
    landlock,
    measure,
    originals,
    seccomp,
    uncounted,
    wire,
)
from jfa.course.job import Job
from jfa.course.sources import Cells, compile_visible
from jfa.course.syntax import parse

_PRINT_LIMIT = 20_000
_FRAME = struct.Struct("<Q")


class Output(io.TextIOBase):
    """Keep the first part of what the answer prints and drop the rest, so endless output uses no memory."""

    def __init__(self):
        self.kept, self.size = [], 0

    def write(self, text: str) -> int:
        if self.size < _PRINT_LIMIT:
            self.kept.append(text[: _PRINT_LIMIT - self.size])
        self.size += len(text)
        return len(text)

    def writable(self) -> bool:
        return True

    def take(self) -> str:
        """Return what was printed since the last call."""
        text, self.kept, self.size = "".join(self.kept), [], 0
        return text


_PRINTED = Output()  # not found by the name sys.stdout, which is the answer's to change


class Reporter:
    """Send messages through the result pipe, each with its length and a seal whose key only this closure has.

    A learner's code may find the pipe; without the key, what it writes there is rejected as "something that is no
    result".
    """

    def __init__(self, fd: int, key: bytes):
        write, pack, seal, frame, sent = os.write, wire.pack, wire.seal, _FRAME, itertools.count()

        def send(event: str, **fields: Any) -> None:
            data = pack({"event": event, **fields})
            view = memoryview(frame.pack(len(data)) + seal(key, next(sent), data) + data)
            while view:
                view = view[write(fd, view) :]

        self.send = send


def run(job: Job, fd: int, live: Any = None) -> None:
    """Run one answer and end the process: never returns.

    Sends "loaded", then for each case "case" (value, facts about it, changed inputs, counts, printed) or "raised", then "end".
    What is missing tells the judge at which point the process died. "violation" is sent when one happens: nothing that the answer
    does later can take it back.
    """
    status, reporter = 70, Reporter(fd, job.take_key())
    try:
        _isolate(job, fd)
        _run(job, reporter, live)
        status = 0
    except BaseException as error:  # noqa: BLE001  the process must end here, whatever happened
        reporter.send("broken", message=f"{type(error).__name__}: {_short(error)}")
    finally:
        os._exit(status)


def _isolate(job: Job, result: int) -> None:
    """Set descriptors, streams, folders, seeds and torch's state: the same for every answer."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in {0, 1, 2, *_descriptors()} - {null, result}:
        os.dup2(null, fd)  # not closed: an object that still holds the number must not meet another file there
    sys.stdout = sys.stderr = _PRINTED
    sys.stdin = open(os.devnull)  # noqa: SIM115
    warnings.simplefilter("ignore")
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["TMPDIR"] = tempfile.tempdir = job.scratch or tempfile.gettempdir()
    for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch.func makes the first
        os.environ[cache] = os.path.join(tempfile.tempdir, cache.lower())
    sys.dont_write_bytecode = True
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    sys.setrecursionlimit(2000)


def _descriptors() -> set[int]:
    """Return the open descriptors; in a notebook's fork also the kernel's connections."""
    try:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        found = range(3, 1024)
    return {fd for fd in found if _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _run(job: Job, reporter: Reporter, live: Any) -> None:
    violations = guard.Violations(lambda word: reporter.send("violation", word=word))
    if job.needs_triton:
        _load_emulator()
    call = _load_call(job)
    modules = closed_modules.close(job.forbid, job.allow, violations, [source for _, source in job.helpers])
    closed = job.closed | modules.files
    with guard.pristine():
        guard.limit_process(job.memory_mb, job.cpu_seconds)
        landlock.drop_rights()
        landlock.confine([path for paths in closed.values() for path in paths], job.scratch)
        seccomp.forbid_processes()
    if live is not None:
        _forget_checks()
    uncounted.close(violations)
    guard.watch(closed, job.scratch, violations)
    gc.freeze()  # what exists so far, the judge's side of this process, is not among gc.get_objects()
    answer = live
    if live is None:
        answer, found = _load_answer(job, reporter, violations, modules)
        if not found:
            return
    elif "numpy" in job.forbid:
        guard.forbid_numpy_import(violations)
        guard.forbid_numpy_names(getattr(_function(live), "__globals__", {}), violations)
    if job.kind == "kernel" and not _is_kernel(answer):
        reporter.send("no kernel", type=type(answer).__name__)
        return
    reporter.send("loaded")
    if live is not None:
        originals.LIBRARIES.accept()  # what is closed stays closed
    with torch.inference_mode(False):  # a notebook may be in it
        _run_cases(job, reporter, violations, answer, call)


def _load_emulator() -> None:
    """Import Triton and the emulator while imports are still free."""
    import jfa.emulator  # noqa: F401


def _is_kernel(answer: Any) -> bool:
    """Return whether this is a ``@triton.jit`` kernel, tuned or not: anything else could compute on the host."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    from jfa.emulator.frontend.binding import InterpretedFunction, JITFunction

    while type(answer) in (Autotuner, Heuristics):
        answer = answer.fn
    return type(answer) in (JITFunction, InterpretedFunction)


def _forget_checks() -> None:
    """Empty the exercises' descriptions, which lie in the memory of a notebook's fork: the answer has no business there."""
    spec = sys.modules.get("jfa.course.spec")
    for exercise in spec.instances() if spec else ():
        vars(exercise).clear()
    for name in [n for n in sys.modules if n.startswith("jfa.course.checks.")]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, types.FunctionType) and not value.__code__.co_freevars:
                value.__code__ = (lambda *a, **k: None).__code__
        sys.modules.pop(name)
    for name in ("jfa.course.catalog", "jfa.course.judge"):
        sys.modules.pop(name, None)


def _load_call(job: Job) -> Any:
    """Return the exercise's function that calls the answer, made from its source; None for a plain call."""
    if not job.call:
        return None
    namespace = {"__name__": "jfa_call", "torch": torch, "unwritten": kinds.unwritten}
    exec(compile_visible(job.call, "<how the exercise calls the answer>"), namespace)
    return namespace[job.call_name]


# ---------------------------------------------------------------------------------------------- the namespace


def _load_answer(
    job: Job, reporter: Reporter, violations: guard.Violations, modules: closed_modules.Closed
) -> tuple[Any, bool]:
    """Return (answer, whether there is one): run the helper cells and the answer's cell in a fresh module."""
    module = types.ModuleType("__main__")  # its name in a notebook: `if __name__ == "__main__":` holds there, too
    sys.modules["__main__"] = sys.modules["answer"] = module
    sys.modules["jfa.course"] = _silent_course()
    originals.LIBRARIES.accept()  # what is closed stays closed, whatever a cell puts there
    namespace = vars(module)
    namespace["display"] = lambda *args, **kwargs: None  # a notebook has it without an import, and the next
    namespace["get_ipython"] = lambda: _Silent()
    notes, cells, broken, replaced = [], Cells(namespace), [], []
    with modules.lenient():
        for label, source in job.helpers:
            try:
                cells.run(source, f"<{label}>")
            except BaseException as error:  # noqa: BLE001  a helper cell may be half written: only the answer counts
                notes.append(f"{label} raised {type(error).__name__}: {_short(error)}")
                broken.append(source)
            if not label.startswith("given"):
                replaced += originals.labels(originals.LIBRARIES.put_back())
        _define_missing(broken, namespace, job.source)
    if "numpy" in job.forbid:  # only now: a helper cell that plots is no part of the answer
        guard.forbid_numpy_import(violations)
        guard.forbid_numpy_names(namespace, violations)
    try:
        cells.run(job.source, "<your answer>")
        replaced += originals.labels(originals.LIBRARIES.put_back())
        _define_missing(job.below, namespace, job.source)
        if replaced:
            notes.append(originals.sentence(list(dict.fromkeys(replaced))))
    except BaseException as error:  # noqa: BLE001
        reporter.send("raised", index=-1, **_describe(error, violations), notes=notes)
        return None, False
    if job.name not in namespace:
        reporter.send("missing", defined=_defined(job.source), notes=notes)
        return None, False
    if notes:
        reporter.send("notes", notes=notes)
    return namespace[job.name], True


def _silent_course() -> types.ModuleType:
    """Return a jfa.course whose check(), hint() and progress() do nothing: the notebook's own calls are ignored when grading."""
    import jfa

    for name in [n for n in sys.modules if n.startswith("jfa.course.")]:
        del sys.modules[name]  # this process keeps its own references
    course = types.ModuleType("jfa.course")
    course.__path__ = []  # a package, so that importing anything below it meets the guard
    course.check = course.hint = course.progress = lambda *args, **kwargs: _Silent()
    jfa.course = course
    return course


class _Silent:
    """Stands for what check(), hint(), progress() and get_ipython() return: it answers everything, and does nothing."""

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silent:
        return self

    def __iter__(self) -> Iterator:
        return iter(())

    def __eq__(self, other: object) -> bool:
        return True  # assert check(...).state == "passed"

    __hash__ = None

    def __str__(self) -> str:
        return ""


def _define_missing(sources: list[str], namespace: dict, answer: str) -> None:
    """Run definitions in cells below the answer, for names it lacks: a notebook need not be run from top to bottom.

    Functions and classes are defined anyhow; imports and plain values (constants, lambdas, ``torch.int32``) where they or the
    answer use them.
    """
    trees, used = [], set()
    for source in [answer, *sources]:
        with contextlib.suppress(Exception):
            trees.append((source, parse(source)))
    for source, tree in trees:
        used |= {
            n.id for d in tree.body if source == answer or _names(d)[1] for n in ast.walk(d) if isinstance(n, ast.Name)
        }
    for number, (source, tree) in enumerate((s, t) for s, t in trees if s != answer):
        for node in tree.body:
            names, always = _names(node)
            if names and names.isdisjoint(namespace) and (always or names & used):
                with contextlib.suppress(Exception):
                    text = ast.get_source_segment(source, node) or ""
                    exec(compile_visible(text, f"<cell below the answer, {number}: {min(names)}>"), namespace)


def _names(node: ast.stmt) -> tuple[set[str], bool]:
    """Return (names that a statement defines, whether as a function or class); none for a statement that computes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}, True
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}, False
    if isinstance(node, ast.Assign) and _is_plain(node.value) and all(isinstance(t, ast.Name) for t in node.targets):
        return {target.id for target in node.targets}, False
    return set(), False


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression only names values: nothing is called or computed, but for arithmetic of constants."""
    if isinstance(value, ast.Lambda):
        return True
    kinds = ast.Constant | ast.Name | ast.Attribute | ast.Tuple | ast.List | ast.Dict | ast.UnaryOp | ast.BinOp
    syntax = ast.expr_context | ast.operator | ast.unaryop
    return all(isinstance(part, kinds | syntax) for part in ast.walk(value))


def _defined(source: str) -> list[str]:
    """Return names a cell defines."""
    with contextlib.suppress(SyntaxError):
        return [n.name for n in parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return []


# ---------------------------------------------------------------------------------------------- the cases


def _run_cases(job: Job, reporter: Reporter, violations: guard.Violations, answer: Any, call: Any) -> None:
    _PRINTED.take()
    for index, case in enumerate(job.cases):
        inputs = (case["args"], case["kwargs"])
        before = {"args": _copy(case["args"]), "kwargs": _copy(case["kwargs"])}
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        try:
            with _measured(job, violations) as counts:
                value = measure.materialised(answer if job.kind == "value" else _call(call, answer, case))
            again = [_under(schedule, call, answer, case, before) for schedule in job.schedules]
            modelled = _timed(job, call, answer, case, before, counts)
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are answers, too
            reporter.send("raised", index=index, **_describe(error, violations), printed=_PRINTED.take())
            if not case["raises"]:
                break
            continue
        reporter.send(
            "case", index=index, value=value, facts=_facts(value, inputs), changed=_changed(case, before, job.parameters),
            counts=counts, printed=_PRINTED.take(), emulator=_emulator_notes(job), again=again, modelled=modelled,
        )  # fmt: skip
    guard.note_replaced(violations)
    reporter.send("end")


def _call(call: Any, answer: Any, case: dict) -> Any:
    if call is not None:
        return call(answer, *case["args"], **case["kwargs"])
    return answer(*case["args"], **case["kwargs"])


def _under(schedule: list, call: Any, answer: Any, case: dict, before: dict) -> Any:
    """Return what the answer returns for copies of a case's inputs under another schedule of the emulator."""
    from jfa import emulator

    policy, seed = schedule
    with emulator.options(policy=policy, seed=seed):
        return measure.materialised(_call(call, answer, _again(case, before)))


def _again(case: dict, before: dict) -> dict:
    """Return the case with fresh copies of its inputs."""
    return {**case, "args": _copy(before["args"]), "kwargs": _copy(before["kwargs"])}


def _timed(job: Job, call: Any, answer: Any, case: dict, before: dict, counts: dict[str, int]) -> str:
    """Run a case on the modelled clock if a limit asks for it: enter its cycles into ``counts``, return what took the longest."""
    if clock.MEASURE not in job.measures:
        return ""
    with clock.on_the_clock() as seen:
        _call(call, answer, _again(case, before))
    if seen.cycles is not None:
        counts[clock.MEASURE] = seen.cycles
    return seen.sentence


@contextlib.contextmanager
def _measured(job: Job, violations: guard.Violations) -> Iterator[dict[str, int]]:
    """Count everything while the answer runs once; the counts are complete when the context ends."""
    families = [f for f in job.forbid if not (f == "numpy" and job.needs_triton)]
    meter = measure.Meter(families, violations, watch_python="live_numel" in job.measures)
    counts: dict[str, int] = {}
    numpy_counts = (
        contextlib.nullcontext() if job.needs_triton else arrays.counted(meter, vars(sys.modules["__main__"]))
    )
    with (
        numpy_counts,
        measure.kernel_counts(job.needs_triton) as kernel,
        meter,
        measure.Watch(meter),
        uncounted.modes_kept(violations),
    ):
        yield counts
    counts |= meter.take() | kernel


def _leaves(value: Any) -> list[Any]:
    return tree_flatten(value)[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return wire.dense_row(tensor).view(torch.uint8)


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.layout == torch.strided


def _copy(value: Any) -> Any:
    """Return a value that later changes of the original do not reach."""
    if _plain(value):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return [_copy(v) for v in value]
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value.copy() if hasattr(value, "tobytes") else value


def _changed(case: dict, before: dict, parameters: list[str]) -> list[str]:
    """Return names of the arguments that no longer hold what they held."""
    extra = [f"argument {i}" for i in range(len(parameters), len(case["args"]))]
    named = zip(parameters + extra, case["args"], before["args"])
    changed = [name for name, now, old in named if _differs(now, old)]
    return changed + [name for name, now in case["kwargs"].items() if _differs(now, before["kwargs"][name])]


def _differs(now: Any, old: Any) -> bool:
    """Return whether a value is another one than its copy made before; NaN equals itself, bit for bit."""
    if _plain(now):
        return now.shape != old.shape or not torch.equal(_bytes(now), _bytes(old))
    if isinstance(now, tuple | list):
        return len(now) != len(old) or any(map(_differs, now, old))
    if isinstance(now, dict):
        return list(now) != list(old) or any(_differs(v, old[k]) for k, v in now.items())
    if hasattr(now, "tobytes"):
        return now.tobytes() != old.tobytes()
    return isinstance(now, bool | int | float | str) and now != old and now == now


def _facts(value: Any, inputs: tuple) -> list[dict]:
    """Return for each returned tensor or array its device, and whether it shares memory with an input."""
    storages = {t.untyped_storage().data_ptr() for t in _leaves(inputs) if _plain(t) and t.numel()}
    facts = []
    for leaf in _leaves(value):
        if _plain(leaf):
            facts.append(
                {
                    "device": str(leaf.device),
                    "shared": leaf.numel() > 0 and leaf.untyped_storage().data_ptr() in storages,
                }
            )
        else:
            facts.append({"device": "cpu", "shared": False})
    return facts[:100]


def _emulator_notes(job: Job) -> list[str]:
    """Return warnings of the last launch: things that run here and would not do on a GPU."""
    if not job.needs_triton:
        return []
    from jfa import emulator

    last = emulator.last() if hasattr(emulator, "last") else None
    return [_short(w) for w in getattr(last, "warnings", ()) or ()][:5]


# ---------------------------------------------------------------------------------------------- exceptions


def _function(answer: Any) -> Any:
    """Return the Python function inside a jit function."""
    return getattr(answer, "fn", answer)


def _text(error: Any) -> str:
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001  an exception of the answer's own class
        return f"(its text could not be made: {type(another).__name__})"


def _short(error: Any, limit: int = 300) -> str:
    text = _text(error).strip()
    return text if len(text) <= limit else text[:limit] + " …"


def _describe(error: BaseException, violations: guard.Violations) -> dict:
    """Return an exception in plain data: type, message, the learner's own line, whether it is a report of the emulator."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if guard.is_own_file(frame.filename)]
    line, text = (own[-1].lineno, own[-1].line or "") if own else (0, "")
    message = _short(error)
    if isinstance(error, SyntaxError) and error.lineno:
        line, text, message = error.lineno, (error.text or "").strip(), error.msg  # its str() says the line too
    module = type(error).__module__ or ""
    report = module.startswith(("jfa.emulator", "triton"))
    return {
        "type": type(error).__name__, "message": _short(error, 4000) if report else message, "line": int(line),
        "text": text.strip()[:160], "report": report,
        "bases": [c.__name__ for c in type(error).__mro__], "violations": violations.words, "memory": _is_memory(error),
    }  # fmt: skip


def _is_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError) or "not enough memory" in _text(error) or "can't allocate memory" in _text(error)
    )
