"""Compiling a cell so that tracebacks, inspect and Triton find its source, though it lies in no file."""

from __future__ import annotations

import linecache
import types


def compile_visible(source: str, filename: str) -> types.CodeType:
    """The source as code; its lines are put where ``inspect.getsource`` looks for a file of this name."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return compile(source, filename, "exec")
