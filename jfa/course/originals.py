"""The libraries as they were before a notebook's cells put something else in their place.

A cell that says ``torch.exp = mine`` or ``jfa.layout.pack = mine`` changes the process that a check lives in, and ``jfa grade``
runs the same cell in the answer's process. Both put the libraries' own functions back and say so in one sentence: they agree.

What is watched: attributes of the modules in ``_LIBRARIES`` and below, methods of the classes of jfa and Triton, the code of their
functions. Each module is looked at once, right after its import.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_STANDARD = (
    "builtins", "math", "cmath", "time", "os", "json", "struct", "random", "itertools", "functools", "operator", "heapq", "bisect",
    "collections", "statistics", "fractions", "decimal", "copy",
)  # fmt: skip
_DEEP = ("jfa", "triton")
_LIBRARIES = ("torch", "numpy", *_DEEP, *_STANDARD)
# they change while they run, or no answer meets them
_ENGINE = (
    "jfa.course",
    "jfa.emulator",
    "triton.knobs",
    "triton.runtime",
    "torch.distributed",
    "torch.testing",
    "numpy.testing",
)
_IGNORED = {"__import__", "input", "print", "open"}  # Jupyter replaces them, and so does the judge
_IGNORED |= {"tzname", "timezone", "altzone", "daylight"}  # time.tzset() sets them
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_MISSING = object()


class _Part(NamedTuple):
    """One attribute as its library made it."""

    place: Any
    name: str
    value: Any
    label: str

    def found(self) -> Any:
        """Return what is there now."""
        if isinstance(self.place, types.FunctionType):
            return getattr(self.place, self.name)
        return vars(self.place).get(self.name, _MISSING)

    def is_replaced(self) -> bool:
        """Return whether something else is there, and no library's own version (torch's compiler has some, Triton wraps)."""
        found = self.found()
        if found is self.value:
            return False
        is_ours = getattr(found, "__name__", "") == self.name or "<locals>" in getattr(found, "__qualname__", "")
        return not (is_ours and _home(found) in _LIBRARIES)


def _home(value: Any) -> str:
    """Return the top package that a function or class comes from."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


class Originals:
    """Parts of the loaded libraries, remembered once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._parts: list[_Part] = []
        self._classes: list[tuple[type, str, frozenset[str]]] = []  # with the names that they had of their own

    def remember(self, name: str, module: Any) -> None:
        """Remember a module of a library, unless it was remembered before."""
        if id(module) in self._seen or not isinstance(module, types.ModuleType) or not _is_watched(name):
            return
        self._seen.add(id(module))
        self._parts += _parts(name, module)
        self._classes += [(cls, f"{name}.{key}", frozenset(vars(cls))) for key, cls in _classes(name, module)]

    def remember_anew(self, name: str, module: Any) -> None:
        """Remember a module as it is now."""
        self._seen.discard(id(module))
        self._parts = [part for part in self._parts if not part.label.startswith(name + ".")]
        self.remember(name, module)

    def remember_loaded(self) -> None:
        """Remember all libraries that are loaded now."""
        for name, module in list(sys.modules.items()):
            self.remember(name, module)

    def replaced(self) -> list[str]:
        """Return the names of what was replaced: ["torch.exp"]."""
        return list(dict.fromkeys(part.label for part in self._changed()))

    def put_back(self) -> list[tuple[_Part, Any]]:
        """Put the originals back; return what was replaced, and by what."""
        changed = [(part, part.found()) for part in self._changed()]
        for part, _ in changed:
            _set(part, part.value)
        return changed

    def _changed(self) -> Iterator[_Part]:
        yield from [part for part in self._parts if part.is_replaced()]
        for cls, label, names in self._classes:  # a name of its own now, where one of a base class was found before
            for name in vars(cls).keys() - names:
                is_ours = _home(vars(cls)[name]) in _LIBRARIES  # Triton adds to its tensors
                if not (is_ours or name.startswith("_")) and any(name in vars(base) for base in cls.__mro__[1:]):
                    yield _Part(cls, name, _MISSING, f"{label}.{name}")

    def accept(self) -> None:
        """Take everything as it is now for the original: the answer's process has closed what an answer may not use."""
        changed = {id(part) for part in self._changed()}
        self._parts = [part._replace(value=part.found()) if id(part) in changed else part for part in self._parts]


def undo(changed: list[tuple[_Part, Any]]) -> None:
    """Replace again what :meth:`Originals.put_back` put back: in a notebook it is the learner's own."""
    for part, found in changed:
        _set(part, found)


def _set(part: _Part, value: Any) -> None:
    delattr(part.place, part.name) if value is _MISSING else setattr(part.place, part.name, value)


def labels(changed: list[tuple[_Part, Any]]) -> list[str]:
    """Return the names of what was replaced, each once."""
    return list(dict.fromkeys(part.label for part, _ in changed))


def sentence(names: list[str]) -> str:
    """Return what a learner reads about it, in check() and in ``jfa grade``."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"This notebook has replaced {', '.join(names[:3])}{more}; judged with the original."


def _is_watched(name: str) -> bool:
    root, *below = name.split(".")
    if root in _STANDARD or any(part.startswith("_") for part in below):
        return root in _STANDARD and not below
    return root in _LIBRARIES and not any(name == e or name.startswith(e + ".") for e in _ENGINE)


def _parts(name: str, module: types.ModuleType) -> Iterator[_Part]:
    deep = name.partition(".")[0] in _DEEP
    for key, value in list(vars(module).items()):
        if not _counts(key, value, name):
            continue
        yield _Part(module, key, value, f"{name}.{key}")
        if deep and (getattr(value, "__module__", None) or "") == name:
            if isinstance(value, types.FunctionType):
                yield from (_Part(value, c, getattr(value, c), f"{name}.{key}") for c in _CODE)
    for key, cls in _classes(name, module):
        yield from _of_class(cls, f"{name}.{key}")


def _classes(name: str, module: types.ModuleType) -> Iterator[tuple[str, type]]:
    """Yield the classes whose methods are watched: those that jfa and Triton define, and torch's tensors."""
    if name == "torch":
        yield "Tensor", module.Tensor
    elif name.partition(".")[0] in _DEEP:
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name and not key.startswith("_"):
                yield key, value


def _of_class(cls: type, label: str) -> Iterator[_Part]:
    for key, value in list(vars(cls).items()):
        is_method = callable(value) or isinstance(
            value, property | staticmethod | classmethod | types.GetSetDescriptorType
        )
        if is_method and key != "__class__":
            yield _Part(cls, key, value, f"{label}.{key}")


def _counts(key: str, value: Any, module: str) -> bool:
    """Return whether a change of this attribute could only be a learner's: functions, classes, modules and constants."""
    if key in _IGNORED or key.startswith("_") or (module, key) == ("torch", "Storage"):  # follows the default dtype
        return False
    kind = type(value)  # not isinstance(): a deprecated object warns when it is asked for its class
    if callable(value) or issubclass(kind, types.ModuleType):
        return True
    return kind in (bool, int, float, str, tuple) and (key.isupper() or module in _STANDARD)


class _Finder:
    """Import hook: has each module of a library remembered as soon as it is loaded."""

    def __init__(self, originals: Originals):
        self.originals, self.looking = originals, set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.looking or not _is_watched(name):
            return None
        self.looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking.discard(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self.originals.remember(name, module)

            try:
                spec.loader.exec_module = exec_module
            except AttributeError:  # a loader that is a class of Python's own
                pass
        return spec


LIBRARIES = Originals()
"""Those of this process, from the moment when the course is imported."""

LIBRARIES.remember_loaded()
sys.meta_path.insert(0, _Finder(LIBRARIES))
