"""From a learner's notebook to the answers in it: the tagged cell, and the helper cells that are the learner's own."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from jfa.course import catalog, strip
from jfa.course.judge import Answer
from jfa.course.mutants import without_course_calls
from jfa.course.notebook import Cell, Notebook, runnable
from jfa.course.paths import Course
from jfa.course.spec import Exercise


@dataclass(frozen=True)
class Pristine:
    """A chapter as shipped: its skeleton, and its solutions where they are here."""

    skeleton: Notebook | None
    solutions: Notebook | None

    @classmethod
    def load(cls, course: Course, stem: str) -> Pristine:
        return cls(catalog.skeleton_notebook(course, stem), catalog.solution_notebook(course, stem))

    def given(self, exercise: Exercise) -> list[str]:
        """Sources of the shipped cells above an exercise that its answer may use."""
        return [] if self.skeleton is None else [c.source for c in _untagged_above(self.skeleton, exercise.id)]

    def stub(self, exercise: Exercise) -> str:
        """The pristine cell of an exercise."""
        cell = self.skeleton.answer(exercise.id) if self.skeleton else None
        return cell.source if cell else ""

    def solution(self, exercise: Exercise) -> str:
        """The solution's cell without markers, "" in a release without solutions."""
        cell = self.solutions.answer(exercise.id) if self.solutions else None
        return strip.solution_source(cell.source) if cell else ""


def from_notebook(notebook: Notebook, exercise: Exercise, pristine: Pristine) -> Answer | None:
    """The answer in a learner's notebook, None if its cell is missing (or is text now).

    Shipped cells are taken as shipped, the learner's own untagged cells run after them; cells of other exercises never run, so
    that a name which a later exercise uses again does no harm.
    """
    source = notebook.answer_source(exercise.id)
    if source is None:
        return None
    given = pristine.given(exercise)
    shipped = {_fingerprint(source) for source in given}
    own = [c for c in _untagged_above(notebook, exercise.id) if _fingerprint(c.source) not in shipped]
    return Answer(
        source=runnable(source),
        helpers=_labelled("given", given) + _labelled("helper", [c.source for c in own]),
        below=[runnable(c.source) for c in _untagged_below(notebook, exercise.id)],
        skeleton=pristine.stub(exercise),
        solution=pristine.solution(exercise),
        given=given,
    )


def from_source(source: str, exercise: Exercise, pristine: Pristine) -> Answer:
    """An answer given as a cell's source (a variant, a mutant): among the shipped cells."""
    given = pristine.given(exercise)
    return Answer(
        source=source,
        helpers=_labelled("given", given),
        skeleton=pristine.stub(exercise),
        solution=pristine.solution(exercise),
        given=given,
    )


def _labelled(kind: str, sources: list[str]) -> list[tuple[str, str]]:
    """(label, runnable source): each cell has a name of its own in tracebacks."""
    return [(f"{kind} cell {i + 1}", runnable(source)) for i, source in enumerate(sources)]


def _untagged_above(notebook: Notebook, exercise: str) -> list[Cell]:
    return _helpers(notebook.cells[: _position(notebook, exercise)])


def _untagged_below(notebook: Notebook, exercise: str) -> list[Cell]:
    return _helpers(notebook.cells[_position(notebook, exercise) + 1 :])


def _position(notebook: Notebook, exercise: str) -> int:
    cell = notebook.answer(exercise)
    return notebook.cells.index(cell) if cell else len(notebook.cells)


def _helpers(cells: tuple[Cell, ...]) -> list[Cell]:
    return [c for c in cells if c.kind == "code" and c.exercise is None and _has_work(c.source)]


def _has_work(source: str) -> bool:
    """Whether a cell does more than call check(), hint() or progress()."""
    try:
        return bool(without_course_calls(source).strip())
    except SyntaxError:
        return True


def _fingerprint(source: str) -> str:
    """A cell's code regardless of comments and layout."""
    try:
        return ast.dump(ast.parse(runnable(source)))
    except SyntaxError:
        return source.strip()
