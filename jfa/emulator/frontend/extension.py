"""The language that kernels may use in addition to Triton's: TLX, which registers itself here when it is imported.

The frontend knows only its name. It is imported on first use, because the import takes a while.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from ..errors import NotSupported

NAME = "triton.language.extra.tlx"
"""What kernels import; its submodules' names begin with it."""


class Extension:
    """Hold the registered module.

    Attributes:
        module: the registered module, None before. load: a function that imports it.
        at_end: called with a CTA when its program has ended.
        handed: type of value -> function(value, whether it is returned) that says why a jit function cannot take or return it.
    """

    module: ModuleType | None = None
    load: Callable[[], object] | None = None
    at_end: Callable[[Any], None] | None = None
    handed: ClassVar[dict[type, Callable[[Any, bool], str | None]]] = {}


def register(module: ModuleType) -> None:
    """Make a module the one that kernels see as NAME."""
    Extension.module = module


def module() -> ModuleType:
    """Return the registered module, imported if need be. Raises NotSupported where there is none."""
    if Extension.module is None and Extension.load is not None:
        Extension.load()
    if Extension.module is None:
        raise NotSupported("TLX is not available on this emulator")
    return Extension.module


def attribute(name: str) -> Any:
    """Return what the registered module has under this name, None if nothing."""
    return getattr(module(), name, None)


def defines(value: Any) -> bool:
    """Return whether a function or class comes from the registered module or one of its own submodules."""
    name = getattr(value, "__module__", None) or ""
    return Extension.module is not None and name.startswith(Extension.module.__name__)
