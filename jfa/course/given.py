"""Compare the code that an answer must leave unchanged, as syntax: comments and layout may change."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from typing import Any

from jfa.course import guard
from jfa.course.bindings import rebound
from jfa.course.notebook import runnable
from jfa.course.spec import Kept
from jfa.course.syntax import parse


def definitions(source: str) -> dict[str, ast.AST]:
    """Return the functions and classes that a cell binds, by name; the last one of a name counts."""
    return {name: found[-1] for name, found in _candidates(source).items()}


def _candidates(source: str) -> dict[str, list[ast.AST]]:
    """Return by name all definitions that the cell may leave bound: below ``if``, ``try``, ``with`` or a loop it may be any."""
    try:
        tree = parse(textwrap.dedent(runnable(source)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[ast.AST]] = {}
    for node, is_sure in _bound(tree.body, True):
        found[node.name] = [*([] if is_sure else found.get(node.name, [])), node]
    return found


def _bound(statements: list[ast.AST], is_sure: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the definitions among statements and in their blocks, and whether each is reached for sure."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node, is_sure
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case) and not isinstance(
            node, ast.AsyncFunctionDef
        ):
            yield from _bound(list(ast.iter_child_nodes(node)), False)


def live_source(answer: Any, stub: str) -> str:
    """Return the cell of a live function, and the stub's other functions as that function would find them, "" if unknown."""
    function = getattr(answer, "fn", answer)
    cell = _cell(function) or _source(answer)
    others = [n for n in definitions(stub) if n not in definitions(cell)]
    found = [getattr(function, "__globals__", {}).get(name) for name in others]
    return "\n\n".join(text for text in (cell, *map(_source, found)) if text)


def _cell(function: Any) -> str:
    """Return the whole cell that defines a function, as ``jfa grade`` reads it; "" for what comes from a file."""
    name = getattr(getattr(function, "__code__", None), "co_filename", "")
    return "".join(linecache.getlines(name)) if guard.is_own_file(name) else ""


def _source(value: Any) -> str:
    try:
        return "" if value is None else textwrap.dedent(inspect.getsource(getattr(value, "fn", value)))
    except (OSError, TypeError):
        return ""


def changed(kept: Kept, source: str, skeleton: str) -> str | None:
    """Return a sentence if an answer changed what the exercise gave, else None."""
    mine, given = _candidates(source), definitions(skeleton)
    for name in kept.names:
        if name not in mine and name in given:
            return f"`{name}` is missing from the cell; it is given and stays as it is ({kept.text})."
        if name in given and any(_plain(m, kept.free) != _plain(given[name], kept.free) for m in mine[name]):
            return f"`{name}` was changed beyond what is asked for ({kept.text})."
    found = rebound(runnable(source), frozenset(kept.names) & given.keys())
    return f"`{found}` is given another value; it is given and stays as it is ({kept.text})." if found else None


def _plain(node: ast.AST, free: tuple[str, ...]) -> str:
    """Return a definition as text, without docstrings, `pass`, and the statements that are the learner's."""
    return ast.unparse(_Without(free).visit(parse(ast.unparse(node))))


class _Without(ast.NodeTransformer):
    def __init__(self, free: tuple[str, ...]):
        self.free = free

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Pass) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return None
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and self._is_free(node):
            return None
        return super().visit(node)

    def _is_free(self, node: ast.stmt) -> bool:
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        return any(getattr(f, "attr", getattr(f, "id", "")) in self.free for f in calls)
