"""Compile a cell so that tracebacks, inspect and Triton find its source, although it is in no file."""

from __future__ import annotations
import __future__

import ast
import asyncio
import inspect
import linecache
import types

_FUTURE = {name: getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}


def compile_visible(source: str, filename: str, flags: int = 0) -> types.CodeType:
    """Return the source as code; its lines are put where ``inspect.getsource`` looks for a file of this name."""
    linecache.cache[filename] = (len(source), None, _lines(source), filename)
    return compile(source, filename, "exec", flags=flags, dont_inherit=True)


def _lines(source: str) -> list[str]:
    """Return lines as Python counts them: a form feed or U+2028 ends none."""
    return [line + "\n" for line in source.split("\n")]


class Cells:
    """Run cells one after another in one namespace, as a notebook's kernel does.

    ``await`` is allowed outside of functions, and ``from __future__ import ...`` holds for the cells that follow.
    """

    def __init__(self, namespace: dict):
        self.namespace, self.flags = namespace, 0

    def run(self, source: str, filename: str) -> None:
        """Run one cell; raises what it raises."""
        code = compile_visible(source, filename, self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        self.flags |= sum(flag for flag in set(_FUTURE.values()) if code.co_flags & flag)
        result = eval(code, self.namespace)
        if inspect.iscoroutine(result):
            asyncio.run(_finish(result))


async def _finish(awaitable: types.CoroutineType) -> None:
    await awaitable
