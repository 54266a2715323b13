"""Find every construct in Python source that rebinds a name after its definition, or changes the object that it is
bound to."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Set

from jfa.course.syntax import parse

_LIBRARIES = {"tl", "tlx", "torch", "triton", "jfa", "np", "numpy"}
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "__setitem__", "__delitem__", "setdefault", "pop"}
_RUNNERS = {"exec", "eval", "compile"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def rebound(source: str, names: Set[str]) -> str | None:
    """Return the first thing that a cell sets past its definition, as text, or None.

    That is one of ``names`` bound by anything but ``def`` or ``class`` (an assignment, an import, ``for``, ``with``, ``except``,
    ``match``, a walrus, ``del``, ``globals()[..]``, ``setattr``, ``exec``), an attribute of one, or an attribute of a module.
    """
    try:
        tree = parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return None
    modules = _LIBRARIES | {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found = next((name for name in _module_names(tree, False) if name in names), None)
    return found or next(_changes(tree, names, modules), None)


def touches(source: str, names: Set[str]) -> bool:
    """Return whether a cell gives one of ``names`` another value, defines it again or sets an attribute of it."""
    try:
        tree = parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return False
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound = any(name in names for name in _module_names(tree, False))
    return bound or bool(defined & names) or next(_changes(tree, names, frozenset()), None) is not None


def _module_names(node: ast.AST, is_local: bool) -> Iterator[str]:
    """Yield the module's names that a tree binds or deletes; inside a function only those that it calls global."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            inside = list(ast.walk(child))
            own = {name for part in inside if isinstance(part, ast.Global) for name in part.names}
            yield from (name for part in inside for name in _bound_by(part) if name in own)
            yield from (n.name for n in inside if isinstance(n, _FUNCTIONS) and getattr(n, "name", "") in own)
            if isinstance(child, ast.AsyncFunctionDef) and not is_local:
                yield child.name
        elif isinstance(child, ast.ClassDef):
            own = {name for part in ast.walk(child) if isinstance(part, ast.Global) for name in part.names}
            yield from (name for name in _module_names(child, True) if name in own)
        elif isinstance(child, ast.comprehension):
            yield from _module_names(ast.Expression(child.iter), is_local)
            for condition in child.ifs:
                yield from _module_names(ast.Expression(condition), is_local)
        else:
            yield from _bound_by(child)
            yield from _module_names(child, is_local)


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node itself binds or deletes; the names that ``import *`` binds are unknown."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).split(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _changes(tree: ast.AST, names: Set[str], modules: Set[str]) -> Iterator[str]:
    """Yield names that are changed through an attribute, a dictionary of names, a setter or executed text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _root(node) in names or isinstance(node, ast.Attribute) and _root(node) in modules:
                yield ast.unparse(node)
            elif isinstance(node, ast.Subscript) and _text(node.slice) in names:
                yield _text(node.slice)
        elif isinstance(node, ast.Call):
            yield from _called(node, names, modules)


def _called(call: ast.Call, names: Set[str], modules: Set[str]) -> Iterator[str]:
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    texts = [_text(part) for argument in call.args for part in ast.walk(argument)]
    if function in _SETTERS:
        yield from (text for text in texts if text in names)
        target = call.args[0] if call.args else None
        if function not in ("setdefault", "pop") and _root(target) in names | modules:
            yield ast.unparse(target)
    elif function == "update":
        yield from (name for name in [*texts, *(k.arg for k in call.keywords)] if name in names)
    elif function in _RUNNERS:
        yield from (found for text in texts if text and (found := rebound_text(text, names)))


def rebound_text(text: str, names: Set[str]) -> str | None:
    """Return the names that executed text would set, its definitions included."""
    try:
        tree = parse(text)
    except (SyntaxError, ValueError):
        return None
    defined = (n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    return next((name for name in defined if name in names), None) or rebound(text, names)


def _root(node: ast.AST | None) -> str:
    """Return the name that a chain of attributes and subscripts starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
