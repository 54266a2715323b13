"""The stripper: solutions/NN_topic.py -> exercises/NN_topic.py.

It knows nbgrader's ``### BEGIN SOLUTION`` / ``### END SOLUTION``, otter's ``# BEGIN SOLUTION`` / ``# END SOLUTION`` and otter's
``x = 5  # SOLUTION`` at the end of a line. What replaces a region depends on where it stands: a function says that it is not
started, a kernel does nothing (the emulator's messages come from a body that compiles), a name at module level holds ``...``.
A bug hunt gives the faulty code instead: commented lines between ``### STARTER`` and the end marker are uncommented.
"""

from __future__ import annotations

import ast
import re
import textwrap

from jfa.course.notebook import Notebook, drop_cells
from jfa.course.syntax import parse

_BEGIN = re.compile(r"^(?P<indent>\s*)#+\s*BEGIN SOLUTION(?P<silent>\s+NO PROMPT)?\s*$")
_END = re.compile(r"^\s*#+\s*END SOLUTION\s*$")
_STARTER = re.compile(r"^\s*#+\s*STARTER\s*$")
_LINE = re.compile(r"^(?P<left>\s*[A-Za-z_][\w.\[\]'\", ]*?\s*(?::[^=]+)?=)\s*\S.*#\s*SOLUTION\s*$")
NOT_STARTED = "not started"


def strip_notebook(solutions: Notebook) -> Notebook:
    """Return the exercise notebook of a solutions notebook; raises ValueError on unbalanced markers."""
    marked = {i: c for i, c in enumerate(solutions.cells) if c.kind == "code" and has_markers(c.source)}
    stripped = solutions.with_sources({i: strip_cell(c.source, c.exercise) for i, c in marked.items()})
    return drop_cells(stripped, {i for i, c in enumerate(stripped.cells) if "solution-only" in c.tags})


def has_markers(source: str) -> bool:
    """Return whether anything in the cell is stripped."""
    return any(_BEGIN.match(line) or _END.match(line) or _LINE.match(line) for line in source.split("\n"))


def strip_cell(source: str, exercise: str | None) -> str:
    """Return a cell's source with its solution regions replaced by the stub that fits."""
    lines = source.split("\n")
    result: list[str] = []
    i = 0
    while i < len(lines):
        begin, line_mark = _BEGIN.match(lines[i]), _LINE.match(lines[i])
        if begin:
            end = _region_end(lines, i)
            if not begin["silent"]:
                result += _stub(lines, i, end, begin["indent"], exercise)
            i = end
        elif _END.match(lines[i]):
            raise ValueError(f"exercise {exercise}: END SOLUTION without BEGIN at line {i + 1} of the cell")
        else:
            result.append(f"{line_mark['left']} ...  # YOUR CODE" if line_mark else lines[i])
        i += 1
    return "\n".join(result)


def solution_source(source: str) -> str:
    """Return a solution's cell without the marker lines: what runs when a solution is graded."""
    lines, starter = [], False
    for line in source.split("\n"):
        starter = (starter or bool(_STARTER.match(line))) and not _END.match(line)
        if not (starter or _BEGIN.match(line) or _END.match(line)):
            lines.append(line)
    return "\n".join(re.sub(r"\s*#\s*SOLUTION\s*$", "", line) for line in lines)


def _region_end(lines: list[str], begin: int) -> int:
    for i in range(begin + 1, len(lines)):
        if _BEGIN.match(lines[i]):
            break
        if _END.match(lines[i]):
            return i
    raise ValueError(f"BEGIN SOLUTION at line {begin + 1} of the cell has no END SOLUTION")


def _stub(lines: list[str], begin: int, end: int, indent: str, exercise: str | None) -> list[str]:
    """Return the lines that replace the region between these two marker lines."""
    starter = [i for i in range(begin, end) if _STARTER.match(lines[i])]
    if starter:
        return [re.sub(r"^(\s*)# ?", r"\1", line, count=1) for line in lines[starter[0] + 1 : end]]
    function = _enclosing_function(lines, begin, indent)
    if function is None:
        names = _assigned(lines[begin + 1 : end])
        return [f"{indent}{name} = ...  # YOUR CODE" for name in names] or [f"{indent}pass  # YOUR CODE"]
    if _is_kernel(lines, function):
        return [f"{indent}pass  # YOUR CODE"]
    return [f'{indent}raise NotImplementedError("{exercise or "this exercise"}: {NOT_STARTED}")  # YOUR CODE']


def _enclosing_function(lines: list[str], position: int, indent: str) -> int | None:
    """Return the line of the innermost ``def`` around a position at this indentation, or None at module level."""
    depth = len(indent)
    for i in range(position - 1, -1, -1):
        line = lines[i]
        here = len(line) - len(line.lstrip())
        if line.strip() and here < depth:
            if re.match(r"\s*(async\s+)?def\s", line):
                return i
            depth = here if re.match(r"\s*(class|if|for|while|with|try|else|elif|except)\b", line) else depth
    return None


def _is_kernel(lines: list[str], function: int) -> bool:
    """Return whether a decorator above this ``def`` mentions jit."""
    i = function - 1
    while i >= 0 and lines[i].strip():
        if lines[i].lstrip().startswith("@") and "jit" in lines[i]:
            return True
        i -= 1
    return False


def _assigned(region: list[str]) -> list[str]:
    """Return names that a module-level region binds with plain assignments."""
    tree = parse(textwrap.dedent("\n".join(region)))
    names = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names += [t.id for t in targets if isinstance(t, ast.Name)]
    return list(dict.fromkeys(names))
