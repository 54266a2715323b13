"""Notebook files as lists of cells: jupytext's py:percent and .ipynb, read and edited without jupytext or nbformat.

A GPU machine may lack jupytext, and an edit must not change any other byte of a learner's file. So a cell of a .py file
keeps its exact text, one of an .ipynb its place in the JSON, and ``with_sources`` changes only that.
"""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from jfa.course.magics import open_quotes, runnable, uncomment_magics

LARGEST = 200 * 2**20  # bytes of a notebook; one with many pictures has some ten million

_MARKER = re.compile(r"\s*#\s*(?:%%%*\s(?P<options>.*)|(?:%%|<codecell>|In\[[0-9 ]*\]:?)\s*)")
# not str.splitlines: a form feed or U+2028 ends no line of Python
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_EXERCISE_TAG = re.compile(r"ex-(\d+\.\d+)")
_KINDS = (("[markdown]", "markdown"), ("[raw]", "raw"), ("[md]", "markdown"))
_BARE_KEY, _KEY = re.compile(r"[a-zA-Z_.]+[a-zA-Z0-9_.]*"), re.compile(r"[a-zA-Z0-9_.@/-]+")


class Unreadable(ValueError):
    """Raised for a file that is not a notebook, with one sentence that names it."""


@dataclass(frozen=True)
class Cell:
    """One cell: kind is "code", "markdown" or "raw".

    In a .py file its exact text is marker + body + tail, where tail are the blank lines before the next cell. In an .ipynb
    ``entry`` is its JSON.
    """

    kind: str
    source: str
    tags: tuple[str, ...] = ()
    marker: str = field(default="", compare=False)
    body: str = field(default="", compare=False)
    tail: str = field(default="", compare=False)
    entry: dict | None = field(default=None, compare=False, repr=False)

    @property
    def exercise(self) -> str | None:
        """The "N.M" of an ``ex-N.M`` tag."""
        for tag in self.tags:
            match = _EXERCISE_TAG.fullmatch(tag)
            if match:
                return match[1]
        return None

    @property
    def code(self) -> str:
        """The source as plain Python, without magics: what runs when it is graded. In a .py file magics are comments."""
        return (
            runnable(uncomment_magics(self.source), self.source) if self.marker or self.body else runnable(self.source)
        )


@dataclass(frozen=True)
class Notebook:
    """A file's cells, and its whole text; ``head`` is what a .py file has above its first cell."""

    cells: tuple[Cell, ...]
    text: str
    is_json: bool = False
    head: str = ""

    def answer(self, exercise: str) -> Cell | None:
        """Return the first code cell tagged for this exercise, or None (missing, or turned into text)."""
        return next((c for c in self.cells if c.kind == "code" and c.exercise == exercise), None)

    def answer_source(self, exercise: str) -> str | None:
        """Return the source of all code cells tagged for this exercise, joined: a learner may have split the cell."""
        sources = [c.source for c in self.cells if c.kind == "code" and c.exercise == exercise]
        return "\n\n\n".join(sources) if sources else None

    def exercises(self) -> list[str]:
        """Return ids of the tagged code cells, in the file's order."""
        return [c.exercise for c in self.cells if c.kind == "code" and c.exercise]

    def with_sources(self, sources: dict[int, str]) -> Notebook:
        """Return a copy with the cells at these indices replaced; everything else keeps its bytes."""
        changed = {i: s for i, s in sources.items() if s != self.cells[i].source}
        return _edit_json(self, changed) if self.is_json else _edit_percent(self, changed)

    def newline(self) -> str:
        """Return the line end that most of the file's lines have."""
        ends = re.findall(r"\r\n|\r|\n", self.text)
        return max(("\n", "\r\n", "\r"), key=ends.count)


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Notebook:
    """Return the notebook at ``path``; raises Unreadable, a ValueError with one sentence that names the file."""
    path = Path(path)
    text = decode(read_bytes(path), path)
    try:
        return parse_json(text) if path.suffix == ".ipynb" else parse_percent(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{path} is no notebook: its JSON is broken at line {error.lineno}: {error.msg}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is no notebook that can be read: {type(error).__name__}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return the contents of a plain file of sane size; raises Unreadable for everything else (a folder, a pipe, no permission)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise Unreadable(f"{path} is no plain file")
            if about.st_size > LARGEST:
                raise Unreadable(f"{path} is too large for a notebook: {about.st_size / 2**20:.0f} MiB")
            return file.read()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from error


def decode(data: bytes, path: Path) -> str:
    """Return the bytes of a file as text; raises Unreadable naming the first line that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\r|\n", data[: error.start])) + 1
        what = f"line {line} holds the byte 0x{data[error.start]:02x}"
        raise Unreadable(f"{path} is not UTF-8 text: {what}; save it as UTF-8 in your editor") from error


def parse_json(text: str) -> Notebook:
    """Return cells of an .ipynb file's text."""
    cells = []
    for entry in json.loads(text.removeprefix("\ufeff"))["cells"]:
        source = entry.get("source", "")
        source = source if isinstance(source, str) else "".join(source)
        metadata = entry.get("metadata")
        tags = metadata.get("tags") if isinstance(metadata, dict) else None
        cells.append(Cell(entry["cell_type"], source, _strings(tags), entry=entry))
    return Notebook(tuple(cells), text, is_json=True)


def parse_percent(text: str) -> Notebook:
    """Return cells of a py:percent file's text, cut where jupytext cuts them: a ``# %%`` inside a string starts no cell."""
    lines = _LINE.findall(text)
    plain = [line.rstrip("\r\n").removeprefix("\ufeff" if i == 0 else "") for i, line in enumerate(lines)]
    position = start = _after_header(plain)
    cells = []
    while start < len(lines):
        marker = _MARKER.fullmatch(plain[start])
        kind, tags = _options(marker["options"] or "") if marker else ("code", ())
        stop = _next_marker(plain, start, kind)
        first = start + 1 if marker else start
        last = max(first, stop - _separators(plain[start:stop]))
        if not marker and not cells and not any(line.strip() for line in plain[first:last]):
            position = stop  # blank lines above the first cell
        else:
            parts = ("".join(lines[a:b]) for a, b in ((start, first), (first, last), (last, stop)))
            cells.append(Cell(kind, _source(plain[first:last], kind), tags, *parts))
        start = stop
    return Notebook(tuple(cells), text, head="".join(lines[:position]))


def _after_header(lines: list[str]) -> int:
    """Return number of lines of the ``# ---`` block on top, and blank lines after it."""
    position = 0
    if lines and lines[0].strip() == "# ---":
        end = next((i for i in range(1, len(lines)) if lines[i].strip() == "# ---"), None)
        position = 0 if end is None else end + 1
    while position < len(lines) and not lines[position].strip():
        position += 1
    return position


def _options(options: str) -> tuple[str, tuple[str, ...]]:
    """Return kind and tags of a marker line: ``Title [markdown] key=value ...``, or the keys as JSON."""
    options = options.strip()
    brace, sign = options.find("{"), options.find("=")
    if brace >= 0 and (sign < 0 or brace < sign):
        title, metadata = options[:brace], _literal(options[brace:])
    else:
        title = options if sign < 0 else options[:sign].rstrip().rpartition(" ")[0]
        metadata = _key_values(options[len(title) :])
    kind = next((k for word, k in _KINDS if word in title), "code")
    return kind, _strings(metadata.get("tags") if isinstance(metadata, dict) else None)


def _key_values(text: str) -> dict:
    """Return ``key=value key ...`` read from its end, because a value may hold blanks and equal signs; stops at what is neither."""
    found: dict = {}
    text = text.strip()
    while text:
        rest, _, last = text.rpartition(" ")
        if _BARE_KEY.fullmatch(last):
            found.setdefault(last, None)
            text = rest.strip()
            continue
        for sign in [i for i in range(len(text) - 1, -1, -1) if text[i] == "="]:
            rest, _, key = text[:sign].rstrip().rpartition(" ")
            value = _literal(text[sign + 1 :])
            if _KEY.fullmatch(key) and value is not _NOTHING:
                found.setdefault(key, value)
                text = rest.strip()
                break
        else:
            return found
    return found


_NOTHING = object()


def _literal(text: str) -> object:
    """Return a value written as JSON or as a Python literal; _NOTHING where it is neither."""
    for load in (json.loads, ast.literal_eval):
        try:
            return load(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return _NOTHING


def _strings(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list | tuple) else ()


def _next_marker(lines: list[str], start: int, kind: str) -> int:
    """Return the line of the first cell marker after ``start`` that is neither in a string nor in a Markdown fence.

    An exercise's marker ends every string: one that is still open there was never closed, and must not swallow the cells
    behind it. Such a cell ends at the first marker line, quoted or not.
    """
    quotes, fence, first = None, None, None
    for i in range(start, len(lines)):
        line, is_marker = lines[i], i > start and _MARKER.fullmatch(lines[i])
        first = i if first is None and is_marker else first
        quoted = quotes is not None
        if quoted and is_marker and _exercise_of(is_marker["options"] or ""):
            return first
        quotes = open_quotes(line, quotes)
        if quoted:
            continue
        if kind != "code":
            fence, inside = _follow_fence(_uncomment(line), fence, lines[i + 1 :])
            if inside:
                continue
        if is_marker:
            return i
    return len(lines) if quotes is None or first is None else first


def _exercise_of(options: str) -> bool:
    return any(_EXERCISE_TAG.fullmatch(tag) for tag in _options(options)[1])


def _follow_fence(text: str, fence: str | None, following: list[str]) -> tuple[str | None, bool]:
    """Return (fence open after this line, whether the line belongs to a fence); a fence that never closes is none."""
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
    """Return how many empty lines at a cell's end separate it from the next one and are not its content."""
    if len(cell) >= 3 and cell[-3].strip() and not cell[-2].strip() and not cell[-1].strip():
        return 2
    return 1 if cell and cell[-1] == "" else 0


def _uncomment(line: str) -> str:
    return line[2:] if line.startswith("# ") else line[1:] if line.startswith("#") else line


def _source(content: list[str], kind: str) -> str:
    return "\n".join(content if kind == "code" else map(_uncomment, content))


# -- editing ---------------------------------------------------------------------------------------------------------


def _edit_percent(notebook: Notebook, sources: dict[int, str]) -> Notebook:
    cells = [_with_source(c, sources[i], notebook) if i in sources else c for i, c in enumerate(notebook.cells)]
    return parse_percent(notebook.head + "".join(c.marker + c.body + c.tail for c in cells))


def _with_source(cell: Cell, source: str, notebook: Notebook) -> Cell:
    """Return the cell with another body, its lines ended as its marker is; a file without a last newline keeps none."""
    end = re.search(r"\r\n|\r|\n", cell.marker + cell.body)
    newline = end[0] if end else notebook.newline()
    body = "".join(line + newline for line in _as_lines(source, cell.kind))
    marker = cell.marker if not cell.marker or cell.marker.endswith(("\r", "\n")) or not body else cell.marker + newline
    if not (cell.marker + cell.body + cell.tail).endswith(("\r", "\n")):
        body = body.removesuffix(newline)
    return replace(cell, marker=marker, body=body)


def _as_lines(source: str, kind: str) -> list[str]:
    """Return a source's lines as a .py file has them."""
    lines = re.split(r"\r\n|\r|\n", source) if source else []
    return lines if kind == "code" else [f"# {line}" if line else "#" for line in lines]


def _edit_json(notebook: Notebook, sources: dict[int, str]) -> Notebook:
    """Replace the values of source, outputs and execution_count in the text; all else keeps its bytes."""
    text, changes = notebook.text, []
    places = _elements(text, _members(text, _skip(text, text.startswith("\ufeff")))["cells"][0])
    for index, source in sources.items():
        spans = _members(text, places[index][0])
        new = {"source": _json_source(text, spans["source"], source)} if "source" in spans else {}
        if notebook.cells[index].kind == "code":
            new |= {"outputs": "[]", "execution_count": "null"}
        changes += [(*spans[key], value) for key, value in new.items() if key in spans]
    for first, last, value in sorted(changes, reverse=True):
        text = text[:first] + value + text[last:]
    return parse_json(text)


def _json_source(text: str, span: tuple[int, int], source: str) -> str:
    """Return a source as JSON, written as the old one was: a string, or a list with a line (or not) for each of its lines."""
    old = text[span[0] : span[1]]
    if old.startswith('"'):
        return dump(source)
    lines = [dump(line) for line in source_lines(source)]
    inside = re.match(r"\[(\s*)", old)[1]
    if old.strip("[] \t\r\n") == "":  # an empty list: one step further in than its key's line
        indent = re.search(r"(\r?\n[ \t]*)\"[^\"]*\"\s*:\s*$", text[: span[0]])
        inside, close = (indent[1] + " ", indent[1]) if indent else ("", "")
    else:
        close = re.search(r"(\s*)\]$", old)[1]
    return f"[{inside}{(',' + (inside or ' ')).join(lines)}{close}]" if lines else "[]"


def source_lines(source: str) -> list[str]:
    """Return a source as an .ipynb holds it: its lines, each with its newline."""
    return re.findall(r"[^\n]*\n|[^\n]+", source)


def dump(value: object, indent: str | None = None) -> str:
    """Return JSON in the characters themselves, or escaped where UTF-8 has none for them (lone surrogates)."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def _skip(text: str, at: int) -> int:
    return re.compile(r"[ \t\r\n]*").match(text, at).end()


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """Return the positions of the values of the JSON object that begins at ``at``."""
    spans, at = {}, _skip(text, at + 1)
    while text[at] != "}":
        key, at = json.JSONDecoder().raw_decode(text, at)
        first = _skip(text, _skip(text, at) + 1)
        at = json.JSONDecoder().raw_decode(text, first)[1]
        spans[key] = (first, at)
        at = _after_comma(text, at)
    return spans


def _elements(text: str, at: int) -> list[tuple[int, int]]:
    """Return the positions of the elements of the JSON list that begins at ``at``."""
    spans, at = [], _skip(text, at + 1)
    while text[at] != "]":
        end = json.JSONDecoder().raw_decode(text, at)[1]
        spans.append((at, end))
        at = _after_comma(text, end)
    return spans


def _after_comma(text: str, at: int) -> int:
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at


def drop_cells(notebook: Notebook, unwanted: set[int]) -> Notebook:
    """Return a copy of a py:percent notebook without some cells (markers and separating lines go with them)."""
    kept = [c.marker + c.body + c.tail for i, c in enumerate(notebook.cells) if i not in unwanted]
    return parse_percent((notebook.head + "".join(kept)).rstrip("\n") + "\n")


def insert_before(notebook: Notebook, index: int, cells: list[Cell]) -> Notebook:
    """Return a copy of a py:percent notebook with these cells put in front of the cell at ``index`` (its length: at the end)."""
    blocks = [c.marker + c.body + c.tail for c in notebook.cells]
    return join_percent(notebook.head, blocks[:index] + [as_percent(c) for c in cells] + blocks[index:], "\n")


def as_percent(cell: Cell) -> str:
    """Return the text of a cell in a .py file, from its marker to the blank line behind it: as it stood there, or made."""
    if cell.marker:
        return cell.marker + cell.body + cell.tail
    tags = f" tags={dump(list(cell.tags))}" if cell.tags else ""
    kind = "" if cell.kind == "code" else f" [{cell.kind}]"
    return "".join(line + "\n" for line in [f"# %%{kind}{tags}", *_as_lines(cell.source, cell.kind), ""])


def join_percent(head: str, blocks: list[str], newline: str) -> Notebook:
    """Return a py:percent notebook of these cells' texts, a blank line between each two and none at the end."""
    text = head
    for block in blocks:
        while text and not re.search(r"(?:^|\r\n|\r|\n)[ \t]*(?:\r\n|\r|\n)$", text):
            text += newline
        text += block
    return parse_percent(re.sub(r"[\r\n]+$", "", text) + newline)


def to_json(notebook: Notebook) -> dict:
    """Return the notebook as the content of an .ipynb file, without outputs."""
    cells = [json_entry(cell, f"cell-{i}") for i, cell in enumerate(notebook.cells)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def json_entry(cell: Cell, name: str) -> dict:
    """Return a cell as an .ipynb holds it, without outputs; ``name`` is its id."""
    entry = {"cell_type": cell.kind, "id": name, "metadata": {"tags": list(cell.tags)} if cell.tags else {}}
    entry["source"] = source_lines(cell.source)
    return entry | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {})
