"""Send a kernel and its constants to the process that compiles: the source of a notebook's kernel, values as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import textwrap
from typing import Any


def ship_source(kernel: Any) -> str:
    """Return one module's text that defines ``kernel`` and all it uses: jit functions, aggregates, modules, plain values."""
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    header = "import triton\nimport triton.language as tl\n\n"
    return header + "\n".join(parts.values())


def _collect(kernel: Any, parts: dict[str, str]) -> None:
    fn = plain_function(kernel)
    key = f"{fn.__module__}.{fn.__qualname__}"
    if key in parts:
        return
    parts[key] = ""  # marks it as being collected, for recursion
    for name, value in used_names(fn).items():
        line = _ship_value(name, value, parts)
        if line:
            parts.setdefault(f"value {name}", line)
    source = textwrap.dedent(inspect.getsource(fn))
    body = source[source.index("def ") :] if "def " in source else source
    parts.pop(key)
    parts[key] = f"\n\n@triton.jit\n{body}"


def used_names(fn: Any) -> dict[str, Any]:
    """Return what the names of a function mean outside it. No set of the values: a jit function's hash parses its whole source."""
    used = inspect.getclosurevars(fn)
    return {**used.globals, **used.nonlocals}


def _ship_value(name: str, value: Any, parts: dict[str, str]) -> str | None:
    """Return the line that makes ``name`` mean ``value`` in the shipped module; None where nothing is needed."""
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}"
    if is_jit(value):
        fn = plain_function(value)
        if fn.__module__ and fn.__module__ != "__main__" and importlib.util.find_spec(fn.__module__.split(".")[0]):
            return f"from {fn.__module__} import {fn.__name__} as {name}"
        _collect(value, parts)
        return None if fn.__name__ == name else f"{name} = {fn.__name__}"
    inner = getattr(value, "value", value)
    if isinstance(inner, bool | int | float | str | type(None)):
        return f"{name} = tl.constexpr({inner!r})"
    if getattr(value, "__triton_aggregate__", False) and value.__module__ == "__main__":
        _collect_aggregate(value, parts)
        return None if value.__name__ == name else f"{name} = {value.__name__}"
    module = getattr(value, "__module__", None)
    if module and hasattr(value, "__name__"):
        return f"from {module} import {value.__name__} as {name}"
    raise TypeError(
        f"cannot ship {name} = {value!r}: a kernel may use modules, jit functions, aggregates and plain constants"
    )


def _collect_aggregate(cls: Any, parts: dict[str, str]) -> None:
    """Add an aggregate of a notebook, built by :func:`jfa.kernels.common.nouns.aggregate`: fields and jit methods.

    Python finds no source of a class in a cell, so it is written again from its annotations.
    """
    key = f"aggregate {cls.__name__}"
    if key in parts:
        return
    parts[key] = ""
    lines = [f"\n\n@_aggregate\nclass {cls.__name__}:"]
    lines += [f"    {field}: {kind.__name__}" for field, kind in cls.__annotations__.items()]
    used = {kind.__name__: kind for kind in cls.__annotations__.values()}
    methods = [plain_function(method) for method in vars(cls).values() if is_jit(method)]
    for needed in (used, *map(used_names, methods)):
        for name, value in needed.items():
            line = _ship_value(name, value, parts)
            if line:
                parts.setdefault(f"value {name}", line)
    for method in methods:
        source = textwrap.dedent(inspect.getsource(method))
        lines.append(textwrap.indent("\n@triton.jit\n" + source[source.index("def ") :], "    "))
    parts.setdefault("value _aggregate", "from jfa.kernels.common.nouns import aggregate as _aggregate")
    parts.pop(key)
    parts[key] = "\n".join(lines) + "\n"


def is_jit(value: Any) -> bool:
    return type(value).__name__ in ("JITFunction", "InterpretedFunction") or hasattr(value, "fn")


def plain_function(kernel: Any) -> Any:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def encode(value: Any) -> Any:
    """Return a constexpr's value as JSON can carry it; a dataclass by its name and fields."""
    value = getattr(value, "value", value)
    if dataclasses.is_dataclass(value):
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": vars(value)}
    return value if isinstance(value, bool | int | float | str | type(None)) else f"dtype:{value}"


def decode(value: Any) -> Any:
    if isinstance(value, dict):
        module, name = value["class"].split(":")
        if module == "__main__":  # of a notebook, which is not here: what a kernel reads are its fields
            return dataclasses.make_dataclass(name, list(value["fields"]), frozen=True)(**value["fields"])
        return getattr(importlib.import_module(module), name)(**value["fields"])
    if isinstance(value, str) and value.startswith("dtype:"):
        import triton.language as tl

        return tl.dtype(value[6:])
    return value
