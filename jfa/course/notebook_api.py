"""The functions that an exercise notebook calls: check("2.3", merge), hint("2.3"), progress()."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from html import escape
from typing import Any

from jfa.course import bindings, catalog, guard, magics, notebook, originals, report, state
from jfa.course.answers import Pristine, from_notebook, remarks
from jfa.course.given import definitions, live_source
from jfa.course.judge import Answer, judge
from jfa.course.mutants import without_course_calls
from jfa.course.paths import Course, find_course
from jfa.course.report import Checked, Result
from jfa.course.spec import Exercise
from jfa.course.syntax import parse

NOTEBOOK_SEED = 0  # fixed, so that a message can be talked about; `jfa grade --seed` uses others


def check(number: str, answer: Any) -> Result:
    """Judge an answer: ``check("2.3", merge)``.

    Args:
        number: the exercise, "N.M".
        answer: the function (or kernel, or value) itself, not the result of calling it.

    Returns:
        A Result, which a notebook shows in colors and words; outside of one it is printed.

    Raises:
        LookupError: there is no such exercise.
    """
    with guard.pristine() as replaced:
        exercise, course = catalog.exercise(number), find_course()
        stem = catalog.chapter(exercise.chapter).stem
        result = _misuse(exercise, answer) or _judge(exercise, answer, course, stem)
        if replaced:
            result.notes.append(originals.sentence(replaced))
        result.notes += filter(None, [state.record(course, result)])
        state.keep_pristine(course, stem)
    if not _in_notebook():
        print(result.text())
    return result


def _judge(exercise: Exercise, answer: Any, course: Course, stem: str) -> Result:
    pristine = Pristine.load(course, stem)
    saved, notes = _saved_answer(exercise, course, stem, pristine)
    source = _source_of(answer, pristine.stub(exercise))
    if exercise.kind == "value" and saved is not None:
        source = saved.source  # a value has no source of its own; beside a GPU in use the cell runs again
    live = Answer(
        source=source,
        helpers=_history_helpers(),
        below=saved.below if saved else [],
        skeleton=pristine.stub(exercise),
        solution=pristine.solution(exercise),
        given=pristine.given(exercise),
        live=answer,
        is_live=True,
    )
    waiting = _Waiting(exercise.id)
    result = judge(exercise, live, course, NOTEBOOK_SEED, waiting)
    waiting.end()
    result.notes += _differences(exercise, answer, source, saved, stem) + notes
    return result


def _source_of(answer: Any, stub: str) -> str:
    """Return the cell of a live answer, and of the cells run after it those that change what the stub's cell defines."""
    source = live_source(_unwrapped(answer), stub)
    names = frozenset(definitions(stub))
    cells = _history()
    last = max((i for i, cell in enumerate(cells) if names & definitions(cell).keys()), default=len(cells))
    later = [cell for cell in cells[last + 1 :] if bindings.touches(magics.runnable(cell), names)]
    return "\n\n\n".join(filter(None, [_without_course(source), *map(_without_course, later)]))


def _without_course(source: str) -> str:
    """Return a cell without its calls of the course; as it is, lines and comments, where it has none."""
    try:
        has_calls = "check(" in source or "hint(" in source or "progress(" in source or "jfa.course" in source
        return without_course_calls(source) if has_calls else source
    except magics.UNPARSABLE:
        return source


class _Waiting:
    """A line in the notebook while a check runs for more than a second; gone when it ends."""

    def __init__(self, number: str):
        self.number, self.shown = number, None

    def __call__(self, seconds: float, done: int) -> None:
        self._show(f"<i>checking {self.number}: {seconds:.0f} s, {done} cases done</i>")

    def end(self) -> None:
        if self.shown is not None:
            self._show("")

    def _show(self, html: str) -> None:
        if not _in_notebook():
            return
        from IPython.display import HTML, display

        if self.shown is None:
            self.shown = display(HTML(html), display_id=True)
        else:
            self.shown.update(HTML(html))


def _misuse(exercise: Exercise, answer: Any) -> Result | None:
    """Return a result that says so when what was given to check() cannot be an answer."""
    if exercise.kind == "value" or answer is ...:
        return None
    what = type(answer).__name__
    if not callable(answer) and not hasattr(answer, "fn"):
        message = f'check() was given a {what}; give it the function itself: check("{exercise.id}", {exercise.name}).'
    elif guard.gpu_in_use() and not live_source(answer, ""):
        message = (
            f"A GPU is in use here, so an answer runs in a fresh process, from its source, and this {what} has none. "
            f'Write a function in a cell: def {exercise.name}(...), then check("{exercise.id}", {exercise.name}).'
        )
    else:
        return None
    checks = [
        Checked(n, False if n == "runs" else None, "", message if n == "runs" else "") for n in exercise.check_names
    ]
    return Result(exercise.id, exercise.title, report.WRONG, checks, hints=len(exercise.hints))


def _saved_answer(exercise: Exercise, course: Course, stem: str, pristine: Pristine) -> tuple[Answer | None, list[str]]:
    """Return (the answer in the saved file, what `jfa grade` would have to say about that file)."""
    path, _ = catalog.exercise_file(course, stem)
    if path is None:
        return None, []
    try:
        book = notebook.read(path)
    except ValueError as error:
        return None, [f"`jfa grade {exercise.id}` cannot read your saved file: {error}"]
    saved = from_notebook(book, exercise, pristine)
    if saved is None:
        lost = f"The saved file has no code cell tagged {exercise.tag}: `jfa grade {exercise.id}` will find no answer there."
        return None, [f"{lost} `jfa update` brings the cell back."]
    return saved, remarks(book, exercise, pristine)


def _unwrapped(answer: Any) -> Any:
    """Return the function inside partials and wrappers made with functools.wraps."""
    while isinstance(answer, functools.partial):
        answer = answer.func
    return inspect.unwrap(answer) if inspect.isfunction(answer) else answer


def _differences(exercise: Exercise, answer: Any, source: str, saved: Answer | None, stem: str) -> list[str]:
    """Return where the function, the cell last run and the saved file are not the same thing."""
    if exercise.kind == "value" or answer is ...:
        return []
    name = getattr(getattr(answer, "fn", answer), "__name__", None)
    if name is None:
        what = type(answer).__name__
        return [
            f"Checked a {what} object; `jfa grade {exercise.id}` will call `{exercise.name}` as your saved file defines it."
        ]
    if name != exercise.name:
        what = "a function without a name (a lambda)" if name == "<lambda>" else f"`{name}`"
        return [f"Checked {what}; `jfa grade {exercise.id}` will look for `{exercise.name}`."]
    mine = _definition(source, exercise.name)
    if mine is None:
        return []
    notes = []
    run = next((d for s in reversed(_history()) if (d := _definition(s, exercise.name))), None)
    if run is not None and run != mine:
        notes.append(f"The function given to check() is not the `{exercise.name}` of the cell you ran last.")
    if saved is not None and _definition(saved.source, exercise.name) != mine:
        notes.append(
            f"The saved file holds another version: save exercises/{stem}.py before `jfa grade {exercise.id}`."
        )
    return notes


def _definition(source: str, name: str) -> str | None:
    """Return the AST of a function's definition in a source, as text."""
    try:
        found = [n for n in magics.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
        return ast.dump(found[-1]) if found else None
    except magics.UNPARSABLE:
        return None


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None


def _in_notebook() -> bool:
    return _shell() is not None


def _history() -> list[str]:
    """Return sources of the cells run so far."""
    shell = _shell()
    cells = shell.user_ns.get("In", []) if shell is not None else []
    return [c for c in cells if isinstance(c, str)]


def _history_helpers() -> list[tuple[str, str]]:
    """Return imports, definitions and constants of the cells run so far: what a fresh process (beside a GPU) needs of them."""
    helpers = []
    for number, source in enumerate(_history()):
        try:
            tree = parse(without_course_calls(source))
        except magics.UNPARSABLE:
            continue
        tree.body = [node for node in tree.body if _is_definition(node)]
        if tree.body:
            helpers.append((f"helper cell In[{number}]", ast.unparse(tree)))
    return helpers


def _is_definition(node: ast.stmt) -> bool:
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, kinds) or isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


# ---------------------------------------------------------------------------------------------- hints


class Text:
    """A short text: as it is in a terminal, in a box in a notebook."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<div style="border-left:6px solid #56B4E9;padding:.4em .9em">{escape(self.text)}</div>'


def hint(number: str, which: int | None = None) -> Text:
    """Show the next hint of an exercise, from a nudge to nearly the answer; ``which`` (1, 2, 3) shows one outright."""
    exercise, course = catalog.exercise(number), find_course()
    count = len(exercise.hints)
    if not count:
        return Text(f"{number} has no hints.")
    if which is not None and not 1 <= which <= count:
        raise ValueError(f"which must be 1 to {count}, got {which}")
    index, remark = state.next_hint(course, number, count) if which is None else (which - 1, "")
    more = "" if index + 1 == count else f" (hint {index + 2} goes further)"
    note = f"\n{remark}" if remark else ""
    text = Text(f"Hint {index + 1} of {count} for {number}: {exercise.hints[index]}{more}{note}")
    if not _in_notebook():
        print(text)
    return text


# ---------------------------------------------------------------------------------------------- progress

_CELLS = 20  # width of a terminal's bar


class Progress:
    """A bar per chapter: how many exercises are passed, tried, untouched. It shows the checks run so far; `jfa grade`
    decides."""

    def __init__(self, rows: list[tuple[str, list[tuple[str, str]]]], note: str = ""):
        self.rows, self.note = rows, note

    def __repr__(self) -> str:
        return "\n".join([*map(self._line, self.rows), *filter(None, [self.note])]) or "no chapters with exercises here"

    def _line(self, row: tuple[str, list[tuple[str, str]]]) -> str:
        title, items = row
        passed = sum(s == "passed" for _, s in items)
        full = round(_CELLS * passed / max(len(items), 1))
        tried = [i for i, s in items if s in ("wrong", "wrong method")]
        rest = f"  in work: {', '.join(tried)}" if tried else ""
        return f"{title:<28} [{'#' * full}{'.' * (_CELLS - full)}] {passed} of {len(items)} passed{rest}"

    def _repr_html_(self) -> str:
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f'<table style="border-collapse:collapse">{"".join(map(self._row, self.rows))}</table>{note}'

    def _row(self, row: tuple[str, list[tuple[str, str]]]) -> str:
        title, items = row
        cells = "".join(
            f'<span title="{escape(i)}: {escape(s)}" style="display:inline-block;width:3.2em;margin-right:2px;text-align:center;'
            f'color:#000;background:{_BACKGROUNDS.get(s, "#dddddd")}">{escape(i)}{_SYMBOLS.get(s, "")}</span>'
            for i, s in items
        )
        passed = sum(s == "passed" for _, s in items)
        style = "padding:2px 10px;text-align:left"
        words = f"{passed} of {len(items)} passed"
        return f'<tr><td style="{style}">{escape(title)}</td><td style="{style}">{cells}</td><td style="{style}">{words}</td></tr>'


_BACKGROUNDS = {"passed": "#5fd0ae", "wrong": "#f2a477", "wrong method": "#f3cf80"}
_SYMBOLS = {"passed": " ✓", "wrong": " ✗", "wrong method": " ~"}


def progress() -> Progress:
    """Show what is solved so far, a bar per chapter."""
    course = find_course()
    known = state.states(course)
    rows = []
    for chapter in catalog.chapters():
        rows.append(
            (
                f"{chapter.number:02d} {chapter.title}",
                [(e.id, known.get(e.id, "not started")) for e in chapter.exercises],
            )
        )
    shown = Progress(rows, state.trouble(course))
    if not _in_notebook():
        print(shown)
    return shown
