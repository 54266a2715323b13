"""Resolve the tools' arguments: FILE.py:FUNCTION, MODULE:FUNCTION, a name of `jfa compile --list`, or a public
tutorial."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

FORMS = "FILE.py:FUNCTION, MODULE:FUNCTION, or a name of `jfa compile --list`"


class TargetError(ValueError):
    """Raised with one sentence that says why an argument names nothing that the tool can use."""


@dataclass
class Target:
    """The target that an argument names.

    Attributes:
        what: the argument.
        launch: a function without arguments that launches kernels, and may return its output tensors; None for a kernel.
        kernel: a ``@triton.jit`` function; None for a launch.
        module: the module of the launch or kernel, if known.
        runs: the name of the kernel to examine among several that are launched; "" for the last.
    """

    what: str
    launch: Callable[[], Any] | None = None
    kernel: Any = None
    module: ModuleType | None = None
    runs: str = ""


def find(what: str) -> Target:
    """Return what FILE.py:NAME or MODULE:NAME names.

    Raises:
        TargetError: there is no such file, module or function, the file fails, or it is something else.
    """
    place, colon, name = what.rpartition(":")
    if not colon or not place:
        raise TargetError(f"{what!r} is none of {FORMS}")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    value = getattr(module, name, None)
    if value is None:
        raise TargetError(f"{place} has no {name}{_instead(module, name)}")
    if is_kernel(value):
        return Target(what, kernel=value, module=module)
    if not callable(value) or inspect.isclass(value):
        raise TargetError(f"{what} is a {type(value).__name__}, not a kernel or a function that launches one")
    needed = [p.name for p in inspect.signature(value).parameters.values() if _is_needed(p)]
    if needed:
        raise TargetError(
            f"{what} needs arguments ({', '.join(needed)}): name a function without any that calls it with small tensors"
        )
    return Target(what, launch=value, module=module)


def launch_of(what: str, lengths: Sequence[int] | None = None) -> Target:
    """Return what an argument names, if that launches a kernel: a function, a shipped configuration or a tutorial.

    ``lengths``: of the sequences that a shipped configuration is launched on.

    Raises:
        TargetError: it names nothing, or a kernel that nobody launches.
    """
    from jfa.emulator.tutorials import RECIPES

    if what in RECIPES:
        return Target(what, launch=RECIPES[what])
    if ":" not in what:
        from jfa.workbench import launches

        return launches.named(what, lengths or launches.LENGTHS)
    target = find(what)
    if target.kernel is not None:
        launching = functions_of(target.module)
        known = f", such as {', '.join(launching)}" if launching else ""
        raise TargetError(f"{what} is a kernel: name a function without arguments that launches it{known}")
    return target


def is_kernel(value: Any) -> bool:
    """Return whether a value is a ``@triton.jit`` function, autotuned or not."""
    return hasattr(value, "fn") and hasattr(value, "run")


def plain(kernel: Any) -> Callable:
    """Return the Python function of a kernel."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def functions_of(module: ModuleType | None) -> list[str]:
    """Return the names of a module's own public functions that need no arguments, a few of them."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    fits = lambda f: not any(_is_needed(p) for p in inspect.signature(f).parameters.values())
    return [name for name in own if fits(getattr(module, name))][:4]


def raised(what: str, error: BaseException) -> str:
    """Return a sentence for an exception that a user's file or launch raised: which, what, and in which of its lines."""
    file = what.rpartition(":")[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(file).name]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    text = (str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines() or [""])[0]
    where = f", line {line}" if line else ""
    return f"{what} raises {type(error).__name__}{where}{': ' + text if text else ''}"


def _is_needed(p: inspect.Parameter) -> bool:
    return p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def _file(path: Path) -> ModuleType:
    """Return a file as a module named after it; its folder joins sys.path, for the modules beside it.

    The folder comes behind the standard library, so that a file named as one of its modules hides none of them.
    """
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        installed = [i for i, place in enumerate(sys.path) if place.endswith(("site-packages", "dist-packages"))]
        sys.path.insert(installed[0] if installed else len(sys.path), str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and aggregates look their module up
    try:
        importlib.import_module("jfa.emulator").install()
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(path.stem)
        raise TargetError(raised(f"{path.name}:", error).replace(": raises", " raises", 1)) from error
    finally:
        if before is not None:  # a file may bear the name of a module in use, such as test.py
            sys.modules[path.stem] = before
    return module


def _module(name: str) -> ModuleType:
    try:
        importlib.import_module("jfa.emulator").install()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            hint = "; a file's name ends in .py" if Path(f"{name}.py").exists() or "/" in name else ""
            raise TargetError(f"there is no module {name}{hint}") from error
        raise TargetError(f"{name} raises {type(error).__name__}: {error}") from error
    except Exception as error:
        raise TargetError(f"{name} raises {type(error).__name__}: {error}") from error


def _instead(module: ModuleType, name: str) -> str:
    """Return a hint: a similar name, or the first of those that the module has."""
    near = get_close_matches(name, vars(module), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    own = [n for n, v in vars(module).items() if is_kernel(v) or getattr(v, "__module__", "") == module.__name__]
    return f"; it has {', '.join(own[:6])}" if own else ""
