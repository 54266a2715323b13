"""Close modules of the package to an answer: calling the finished function does not solve an exercise."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jfa
from jfa.course import originals
from jfa.course.guard import ForbiddenError, Violations
from jfa.course.syntax import parse


@dataclass(frozen=True)
class _Closed:
    """A closed module with its submodules, except for some modules (with their submodules) and single functions."""

    word: str
    modules: tuple[str, ...]
    functions: tuple[str, ...]

    def refuses(self, name: str) -> bool:
        """Return whether the module of this name is closed. Parents of an excepted module are open, but their functions
        refuse calls."""
        if name != self.word and not name.startswith(self.word + "."):
            return False
        below = any(name == m or name.startswith(m + ".") for m in self.modules)
        leads = any(f.startswith(name + ".") for f in self.functions + self.modules)
        return not (below or leads)


def close(words: Iterable[str], allow: Iterable[str], violations: Violations, beside: Iterable[str] = ()) -> Closed:
    """Make the modules among ``words`` unusable in this process: not importable, and loaded functions raise.

    ``allow`` names modules ("jfa.kernels.common") or functions ("jfa.reference.merge", with whatever they call) that stay open.
    ``beside`` are the cells beside the answer: what they import is loaded now, for its files cannot be read afterwards.

    Returns:
        What is closed.
    """
    rules = [_rule(word, allow) for word in words if word.startswith("jfa.")]
    for rule in rules:
        for module in (*rule.modules, *(f.rpartition(".")[0] for f in rule.functions)):
            importlib.import_module(module)  # now, while what it needs is still open
    for name in {name for source in beside for name in _imported(source)}:
        if any(rule.refuses(name) for rule in rules if rule.word != "jfa.course"):
            with contextlib.suppress(Exception):  # a name in a module, or nothing at all: the cell's own import says so
                importlib.import_module(name)
    files = {rule.word: found for rule in rules if rule.word != "jfa.course" and (found := _files(rule))}
    closed = Closed(rules, violations, files)
    closed.shut_loaded()
    sys.meta_path.insert(0, closed)
    return closed


def _imported(source: str) -> Iterator[str]:
    """Yield the names of the package's modules that a cell may import, or reach as attributes."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in (name for name in names if name.startswith("jfa.")):
            first, *rest = name.split(".")[1:]
            home = jfa._LAZY.get(first, f"jfa.{first}")
            yield from (".".join([home, *rest[:n]]) for n in range(len(rest) + 1))


def _files(rule: _Closed) -> list[str]:
    """Return files of the modules that a rule closes."""
    top = _HOME.joinpath(*rule.word.split(".")[1:])
    found = []
    for path in top.rglob("*.py") if top.is_dir() else [top.with_suffix(".py")]:
        parts = path.relative_to(_HOME).with_suffix("").parts
        name = ".".join(("jfa", *parts)).removesuffix(".__init__")
        if not any(name == m or name.startswith(m + ".") for m in rule.modules):
            found += [path, *(path.parent / "__pycache__").glob(f"{path.stem}.*")]
    return [str(path) for path in found]


_HOME = Path(__file__).resolve().parent.parent  # of the package: its modules lie below it by their dotted names


def _rule(word: str, allow: Iterable[str]) -> _Closed:
    below = [a for a in allow if a.startswith(word + ".")]
    modules = tuple(a for a in below if _is_module(a))
    return _Closed(word, modules, tuple(a for a in below if a not in modules))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module without modules below it
        return False


def _is_engine(name: str) -> bool:
    """Return modules of the engine itself that this process is running."""
    return name.startswith("jfa.course") and not name.startswith("jfa.course.checks")


class Closed:
    """An import hook that refuses the closed modules.

    Cells beside the answer may import them, for a notebook's other cells are not judged; what they get is disarmed: it counts, and
    raises, as soon as the answer calls it, just as in the notebook itself.

    Attributes:
        files: the closed modules' files by word, compiled ones included: they must not be read either.
    """

    def __init__(self, rules: list[_Closed], violations: Violations, files: dict[str, list[str]]):
        self.rules, self.violations, self.files = rules, violations, files
        self.disarmed: dict[str, types.ModuleType] = {}
        self.is_lenient = False

    def shut_loaded(self) -> None:
        """Disarm the closed modules that are loaded, and forget them."""
        for rule in self.rules:
            for name in [n for n in sys.modules if n == rule.word or n.startswith(rule.word + ".")]:
                if not _is_engine(name):
                    self._shut(name, rule)

    def _shut(self, name: str, rule: _Closed) -> None:
        """Disarm a loaded module, and forget it if it is closed as a whole."""
        if any(name == m or name.startswith(m + ".") for m in rule.modules):
            return
        kept = {f.rpartition(".")[2] for f in rule.functions if f.rpartition(".")[0] == name}
        if name not in self.disarmed:
            _disarm(sys.modules[name], rule.word, self, kept)
            originals.LIBRARIES.remember_anew(name, sys.modules[name])
        if rule.refuses(name):
            self.disarmed[name] = sys.modules.pop(name)
            parent, _, leaf = name.rpartition(".")
            vars(sys.modules.get(parent, types.ModuleType("none"))).pop(leaf, None)

    def refusal(self, word: str) -> Exception:
        """Return what to raise; it counts unless a cell beside the answer is running."""
        return ForbiddenError(f"{word}: not allowed in this exercise") if self.is_lenient else self.violations.add(word)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        rule = next((rule for rule in self.rules if rule.refuses(name)), None)
        if rule is None:
            return None
        if not self.is_lenient or rule.word in ("jfa.course", "solutions"):
            raise self.violations.add(rule.word)
        if name not in self.disarmed:
            raise self.refusal(rule.word)
        module = self.disarmed[name]
        return importlib.machinery.ModuleSpec(name, _Loaded(module), is_package=hasattr(module, "__path__"))

    @contextlib.contextmanager
    def lenient(self) -> Iterator[None]:
        """Let cells beside the answer import what is closed; the answer's own cell cannot."""
        self.is_lenient = True
        try:
            yield
        finally:
            self.is_lenient = False
            self.shut_loaded()


class _Loaded:
    """A loader that has its module already."""

    def __init__(self, module: types.ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__, module.__loader__ = self.spec, self.spec and self.spec.loader


def _disarm(module: types.ModuleType, word: str, closed: Closed, kept: set[str]) -> None:
    """Swap the code of a module's functions, so that every reference to them is dead, wherever the answer got it from."""
    kept = _reachable(module, kept)
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name not in kept:
            if not value.__code__.co_freevars:
                value.__code__ = _refuse.__code__
                value.__kwdefaults__ = {"_refusal": lambda: closed.refusal(word)}


def _refuse(*args, _refusal, **kwargs):
    """Do what a disarmed function does instead."""
    raise _refusal()


def _reachable(module: types.ModuleType, names: set[str]) -> set[str]:
    """Return the module's functions that these ones call, directly or not."""
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        value = vars(module).get(name)
        if name not in found and isinstance(value, types.FunctionType):
            found.add(name)
            todo += value.__code__.co_names
    return found
