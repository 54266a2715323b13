"""Turn IPython's syntax into plain Python: ``%magic``, ``!shell``, ``name?``, ``x = %time f()``, ``%%time``.

A notebook's kernel understands it, the process that grades an answer does not. IPython itself finds the places (a line
that begins with ``%`` or ``!=`` inside brackets is no magic); the replacement keeps its line number.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from jfa.course import syntax

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # what ast.parse raises for any text

_RUNS_ITS_CELL = {"time", "capture", "prun"}  # cell magics whose body runs in the notebook's own namespace
_PROMPT = re.compile(r"\s*(In ?\[\d+\]:|>>>)")
# As jupytext: magics stand in a .py file as comments. (It does so with help and shell lines, too, which need no care here.)
_COMMENTED = re.compile(r"(?P<indent>\s*)# ?(?P<magic>%{1,3}[a-zA-Z].*|[a-zA-Z_]\w*\s*=\s*%{1,3}[a-zA-Z].*)")


@lru_cache(maxsize=4096)
def runnable(source: str, otherwise: str | None = None) -> str:
    """Return a cell's source as plain Python, lines kept; ``otherwise`` (default: as it is) where no Python comes of it."""
    if not _PROMPT.match(source) and "get_ipython" not in source and _parses(source):
        return source
    cell_magic = re.match(r"\s*%%(\w+)", source)
    plain = _cell_magic(source, cell_magic) if cell_magic else _without_magics(source)
    return plain if _parses(plain) else source if otherwise is None else otherwise


def uncomment_magics(source: str) -> str:
    """Return a .py cell's source as jupytext hands it to a kernel: ``# %time f()`` is a magic there."""
    if "%" not in source:
        return source
    lines, quotes, goes_on = source.split("\n"), None, False
    for i, line in enumerate(lines):
        magic = _COMMENTED.fullmatch(line) if quotes is None else None
        if magic:
            lines[i] = magic["indent"] + magic["magic"]
        elif goes_on:
            lines[i] = re.sub(r"^(\s*)# ?", r"\1", line)
        goes_on = (goes_on or bool(magic)) and line.rstrip().endswith("\\")
        quotes = open_quotes(line, quotes)
    return "\n".join(lines)


def open_quotes(line: str, quotes: str | None) -> str | None:
    """Return which triple quotes are open after this line, given those open before it."""
    if quotes is None and line.lstrip().startswith("#"):
        return None
    i, single = 0, None
    while i < len(line):
        char = line[i]
        if char == "\\":
            i += 2
        elif quotes:
            i, quotes = (i + 3, None) if line.startswith(quotes, i) else (i + 1, quotes)
        elif single:
            single = None if char == single else single
            i += 1
        elif char == "#":
            break
        elif line.startswith(('"""', "'''"), i):
            quotes = char * 3
            i += 3
        else:
            single = char if char in "\"'" else None
            i += 1
    return quotes


def parse(source: str) -> ast.Module:
    """Return the tree of a source that may hold magics; raises one of UNPARSABLE."""
    return syntax.parse(runnable(source))


def _parses(source: str) -> bool:
    try:
        syntax.parse(source)
    except UNPARSABLE:
        return False
    return True


def _cell_magic(source: str, magic: re.Match) -> str:
    """Return a cell without its ``%%time`` or the like; with any other one it is no Python at all (a shell's, a file's text)."""
    lines = source.split("\n")
    at = source[: magic.start(1)].count("\n")
    if magic[1] not in _RUNS_ITS_CELL:
        return "\n".join(f"# {line}" for line in lines)
    return "\n".join(["#" for _ in lines[:at]] + [f"# {lines[at]}", runnable("\n".join(lines[at + 1 :]))])


def _without_magics(source: str) -> str:
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        return _without_lines(source)
    blank = re.match(r"(?:[ \t]*\n)*", source)[0]  # IPython drops them, and lines are counted
    try:
        text = TransformerManager().transform_cell(source)
        return blank + _without_calls(text.removesuffix("\n"))
    except UNPARSABLE:
        return source


def _without_calls(text: str) -> str:
    """Return IPython's ``get_ipython().run_line_magic(...)`` and the like, replaced by what they would leave in the namespace."""
    tree, data = syntax.parse(text), [line.encode() for line in text.split("\n")]
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if _is_ipython_call(node) and node.lineno == node.end_lineno]
    for node in sorted(calls, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        line = data[node.lineno - 1]
        new = _stand_in(node, id(node) in statements)
        data[node.lineno - 1] = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
    return b"\n".join(data).decode()


def _is_ipython_call(node: ast.AST) -> bool:
    """Return whether a node is get_ipython().anything(...)"""
    shell = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython"


def _stand_in(call: ast.Call, is_statement: bool) -> str:
    """Return a magic's value: of ``%time`` its statement's, of a shell command no lines, of anything else None."""
    words = [a.value for a in call.args if isinstance(a, ast.Constant)]
    if call.func.attr == "getoutput":
        return "[]"
    if call.func.attr == "run_line_magic" and not str(words[0]).isidentifier():
        raise SyntaxError("no magic has such a name")
    if call.func.attr == "run_line_magic" and len(words) == 2 and words[0] == "time" and _parses(words[1]):
        statement = syntax.parse(words[1]).body
        if is_statement and statement and "\n" not in words[1]:
            return words[1]
        if len(statement) == 1 and isinstance(statement[0], ast.Expr):
            return f"({words[1]})"
    return "None"


def _without_lines(source: str) -> str:
    """Return code where there is no IPython: lines that begin with % or ! become nothing, if Python stumbles over them."""
    lines = source.split("\n")
    for _ in lines:
        try:
            syntax.parse("\n".join(lines))
            break
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines) or not lines[at].lstrip().startswith(("%", "!")):
                break
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            lines[at] = f"{indent}pass  # {lines[at].strip()}"
        except UNPARSABLE:
            break
    return "\n".join(lines)
