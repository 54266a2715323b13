"""Close modules of the package to an answer: calling the finished function does not solve an exercise."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jfa.course.guard import Violations


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


def close(words: Iterable[str], allow: Iterable[str], violations: Violations) -> dict[str, list[str]]:
    """Make the modules among ``words`` unusable in this process: not importable, and loaded functions raise.

    ``allow`` names modules ("jfa.kernels.common") or functions ("jfa.reference.merge", with whatever they call) that stay open.

    Returns:
        The closed modules' files by word, compiled ones included: they must not be read either.
    """
    rules = [_rule(word, allow) for word in words if word.startswith("jfa.")]
    for rule in rules:
        for module in (*rule.modules, *(f.rpartition(".")[0] for f in rule.functions)):
            importlib.import_module(module)  # now, while what it needs is still open
        for name in [n for n in sys.modules if n == rule.word or n.startswith(rule.word + ".")]:
            if not _is_engine(name):
                _shut(name, rule, violations)
    sys.meta_path.insert(0, _Blocker(rules, violations))
    return {rule.word: files for rule in rules if rule.word != "jfa.course" and (files := _files(rule))}


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


def _shut(name: str, rule: _Closed, violations: Violations) -> None:
    """Disarm a loaded module, and forget it if it is closed as a whole."""
    if any(name == m or name.startswith(m + ".") for m in rule.modules):
        return
    kept = {f.rpartition(".")[2] for f in rule.functions if f.rpartition(".")[0] == name}
    _disarm(sys.modules[name], rule.word, violations, kept)
    if rule.refuses(name):
        del sys.modules[name]
        parent, _, leaf = name.rpartition(".")
        vars(sys.modules.get(parent, types.ModuleType("none"))).pop(leaf, None)


class _Blocker:
    """A finder that refuses closed modules."""

    def __init__(self, rules: list[_Closed], violations: Violations):
        self.rules, self.violations = rules, violations

    def find_spec(self, name, path=None, target=None):
        for rule in self.rules:
            if rule.refuses(name):
                raise self.violations.add(rule.word)
        return None


def _disarm(module: types.ModuleType, word: str, violations: Violations, kept: set[str]) -> None:
    """Swap the code of a module's functions, so that every reference to them is dead, wherever the answer got it from."""
    kept = _reachable(module, kept)
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name not in kept:
            if not value.__code__.co_freevars:
                value.__code__ = _refuse.__code__
                value.__kwdefaults__ = {"_refusal": lambda: violations.add(word)}


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
