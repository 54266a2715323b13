"""Count the lines of the kernels' sources, without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Return the lines that hold code: not blank lines, comments and docstrings. A statement over three lines counts as three."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False):
            found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def kernel_files(folder: Path = KERNELS) -> list[tuple[str, str, int]]:
    """Return (package, file, lines of code) of every kernel source, packages in order of name."""
    return [
        (path.parent.name, path.name, code_lines(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("*/*.py"))
        if path.name != "__init__.py"
    ]
