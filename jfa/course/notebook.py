"""Notebook files as lists of cells: jupytext's py:percent and .ipynb, read and edited without either library.

A GPU machine may lack jupytext, and an edit must leave every other byte of a learner's file alone. So cells know their
lines, and ``replace`` changes only those.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_MARKER = re.compile(r"^\s*#\s*%%(%*)(\s(?P<options>.*))?$")
_TAGS = re.compile(r"tags\s*=\s*(\[[^\]]*\])")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_EXERCISE_TAG = re.compile(r"ex-(\d+\.\d+)")


@dataclass(frozen=True)
class Cell:
    """One cell: kind is "code", "markdown" or "raw"; first and last (exclusive) are its content's lines in a .py file."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()
    first: int = 0
    last: int = 0

    @property
    def exercise(self) -> str | None:
        """The "N.M" of an ``ex-N.M`` tag."""
        for tag in self.tags:
            match = _EXERCISE_TAG.fullmatch(tag)
            if match:
                return match[1]
        return None


@dataclass(frozen=True)
class Notebook:
    """A file's cells, and what is needed to write it back: its lines (.py) or its JSON (.ipynb)."""

    cells: tuple[Cell, ...]
    text: str
    is_json: bool = False

    def answer(self, exercise: str) -> Cell | None:
        """The code cell tagged for this exercise, or None (missing, or turned into text)."""
        return next((c for c in self.cells if c.kind == "code" and c.exercise == exercise), None)

    def answer_source(self, exercise: str) -> str | None:
        """The source of all code cells tagged for this exercise, joined: a learner may have split the cell."""
        sources = [c.source for c in self.cells if c.kind == "code" and c.exercise == exercise]
        return "\n\n\n".join(sources) if sources else None

    def exercises(self) -> list[str]:
        """Ids of the tagged code cells, in the file's order."""
        return [c.exercise for c in self.cells if c.kind == "code" and c.exercise]

    def with_sources(self, sources: dict[int, str]) -> Notebook:
        """A copy with the cells at these indices replaced; everything else keeps its bytes."""
        return _edit_json(self, sources) if self.is_json else _edit_percent(self, sources)


def read(path: Path) -> Notebook:
    """The notebook at ``path``; raises ValueError naming the file where it cannot be understood."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return parse_json(text) if Path(path).suffix == ".ipynb" else parse_percent(text)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no notebook that can be read: {error}") from error


def parse_json(text: str) -> Notebook:
    """Cells of an .ipynb file's text."""
    cells = []
    for cell in json.loads(text)["cells"]:
        source = cell.get("source", "")
        source = source if isinstance(source, str) else "".join(source)
        tags = tuple(t for t in cell.get("metadata", {}).get("tags", ()) if isinstance(t, str))
        cells.append(Cell(cell["cell_type"], source, tags))
    return Notebook(tuple(cells), text, is_json=True)


def parse_percent(text: str) -> Notebook:
    """Cells of a py:percent file's text, cut where jupytext cuts them: a ``# %%`` inside a string starts no cell."""
    lines = text.splitlines()
    start = _after_header(lines)
    cells = []
    while start < len(lines):
        marker = _MARKER.match(lines[start])
        kind, tags = _options(marker["options"] or "") if marker else ("code", ())
        stop = _next_marker(lines, start, kind)
        first = start + 1 if marker else start
        last = max(first, stop - _separators(lines[start:stop]))
        content = lines[first:last]
        if marker or any(line.strip() for line in content):
            cells.append(Cell(kind, _source(content, kind), tags, first, last))
        start = stop
    return Notebook(tuple(cells), text)


def _after_header(lines: list[str]) -> int:
    """Number of lines of the ``# ---`` block on top, and blank lines after it."""
    position = 0
    if lines and lines[0].strip() == "# ---":
        end = next((i for i in range(1, len(lines)) if lines[i].strip() == "# ---"), None)
        position = 0 if end is None else end + 1
    while position < len(lines) and not lines[position].strip():
        position += 1
    return position


def _options(options: str) -> tuple[str, tuple[str, ...]]:
    """Kind and tags of a marker line."""
    kind = next((k for word, k in (("[markdown]", "markdown"), ("[md]", "markdown"), ("[raw]", "raw")) if word in options), "code")
    match = _TAGS.search(options)
    try:
        tags = tuple(json.loads(match[1].replace("'", '"'))) if match else ()
    except json.JSONDecodeError:
        tags = ()
    return kind, tags


def _next_marker(lines: list[str], start: int, kind: str) -> int:
    """The line of the first cell marker after ``start`` that is neither in a string nor in a Markdown fence."""
    quotes, fence = None, None
    for i in range(start, len(lines)):
        line = lines[i]
        quoted = quotes is not None
        quotes = _open_quotes(line, quotes)
        if quoted:
            continue
        if kind != "code":
            fence, inside = _follow_fence(_uncomment(line), fence, lines[i + 1 :])
            if inside:
                continue
        if i > start and _MARKER.match(line):
            return i
    return len(lines)


def _open_quotes(line: str, quotes: str | None) -> str | None:
    """Which triple quotes are open after this line, given those open before it."""
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


def _follow_fence(text: str, fence: str | None, following: list[str]) -> tuple[str | None, bool]:
    """(fence open after this line, whether the line belongs to a fence); a fence that never closes is none."""
    if fence:
        return (None if _closes(text, fence) else fence), True
    match = _FENCE.match(text)
    if match and any(_closes(_uncomment(line), match[1]) for line in following):
        return match[1], True
    return None, False


def _closes(text: str, fence: str) -> bool:
    stripped = text.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}


def _separators(cell: list[str]) -> int:
    """How many empty lines at a cell's end separate it from the next one and are not its content."""
    if len(cell) >= 3 and cell[-3].strip() and not cell[-2].strip() and not cell[-1].strip():
        return 2
    return 1 if cell and cell[-1] == "" else 0


def _uncomment(line: str) -> str:
    return line[2:] if line.startswith("# ") else line[1:] if line.startswith("#") else line


def _source(content: list[str], kind: str) -> str:
    return "\n".join(content if kind == "code" else map(_uncomment, content))


def _edit_percent(notebook: Notebook, sources: dict[int, str]) -> Notebook:
    newline = "\r\n" if "\r\n" in notebook.text else "\n"
    lines = notebook.text.splitlines()
    for index in sorted(sources, reverse=True):
        cell = notebook.cells[index]
        if sources[index] == cell.source:
            continue
        new = sources[index].split("\n") if sources[index] else []
        if cell.kind != "code":
            new = [f"# {line}" if line else "#" for line in new]
        lines[cell.first : cell.last] = new
    end = newline if notebook.text.endswith("\n") else ""
    return parse_percent(newline.join(lines) + end)


def _edit_json(notebook: Notebook, sources: dict[int, str]) -> Notebook:
    content = json.loads(notebook.text)
    for index, source in sources.items():
        content["cells"][index]["source"] = source.splitlines(keepends=True)
        if content["cells"][index]["cell_type"] == "code":
            content["cells"][index].update(outputs=[], execution_count=None)
    return parse_json(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def drop_cells(notebook: Notebook, unwanted: set[int]) -> Notebook:
    """A copy of a py:percent notebook without some cells (markers and separating lines go with them)."""
    lines = notebook.text.splitlines()
    for index in sorted(unwanted, reverse=True):
        cell = notebook.cells[index]
        follower = notebook.cells[index + 1].first - 1 if index + 1 < len(notebook.cells) else len(lines)
        del lines[cell.first - 1 : follower]
    return parse_percent("\n".join(lines).rstrip("\n") + "\n")


def runnable(source: str) -> str:
    """A cell's source with IPython's ``%magic`` and ``!shell`` lines turned into comments, line numbers kept."""
    lines = source.split("\n")
    quotes = None
    for i, line in enumerate(lines):
        if quotes is None and line.lstrip().startswith(("%", "!")):
            indent = line[: len(line) - len(line.lstrip())]
            lines[i] = f"{indent}pass  # {line.strip()}"
        quotes = _open_quotes(line, quotes)
    return "\n".join(lines)


def insert_before(notebook: Notebook, index: int, cells: list[Cell]) -> Notebook:
    """A copy of a py:percent notebook with these cells put in front of the cell at ``index`` (its length: at the end)."""
    lines = notebook.text.splitlines()
    at = notebook.cells[index].first - 1 if index < len(notebook.cells) else len(lines)
    new: list[str] = [] if at < len(lines) or not lines or not lines[-1] else [""]
    for cell in cells:
        tags = f" tags={json.dumps(list(cell.tags))}" if cell.tags else ""
        kind = "" if cell.kind == "code" else f" [{cell.kind}]"
        body = cell.source.splitlines()
        new += [f"# %%{kind}{tags}", *(body if cell.kind == "code" else [f"# {b}" if b else "#" for b in body]), ""]
    lines[at:at] = new
    return parse_percent("\n".join(lines).rstrip("\n") + "\n")


def to_json(notebook: Notebook) -> dict:
    """The notebook as the content of an .ipynb file, without outputs."""
    cells = []
    for i, cell in enumerate(notebook.cells):
        entry = {"cell_type": cell.kind, "id": f"cell-{i}", "metadata": {"tags": list(cell.tags)} if cell.tags else {}}
        entry["source"] = cell.source.splitlines(keepends=True)
        cells.append(entry | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {}))
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
