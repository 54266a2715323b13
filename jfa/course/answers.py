"""Find the answers in a learner's notebook: the tagged cell, and the helper cells that are the learner's own."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from jfa.course import catalog, strip
from jfa.course.bindings import touches
from jfa.course.given import definitions
from jfa.course.judge import Answer
from jfa.course.magics import UNPARSABLE, runnable
from jfa.course.mutants import without_course_calls
from jfa.course.notebook import Cell, Notebook
from jfa.course.paths import Course
from jfa.course.spec import Exercise
from jfa.course.syntax import parse


@dataclass(frozen=True)
class Pristine:
    """A chapter as shipped: its skeleton, and its solutions where they are here."""

    skeleton: Notebook | None
    solutions: Notebook | None

    @classmethod
    def load(cls, course: Course, stem: str) -> Pristine:
        return cls(catalog.skeleton_notebook(course, stem), catalog.solution_notebook(course, stem))

    def given(self, exercise: Exercise) -> list[str]:
        """Return sources of the shipped cells above an exercise that its answer may use."""
        if self.skeleton is None:
            return []
        above = next(
            (i for i, c in enumerate(self.skeleton.cells) if _is_tagged(c, exercise)), len(self.skeleton.cells)
        )
        return [c.source for c in self.skeleton.cells[:above] if _is_helper(c)]

    def shipped(self) -> set[str]:
        """Return fingerprints of all shipped code cells."""
        return {_fingerprint(c.code) for c in self.skeleton.cells if c.kind == "code"} if self.skeleton else set()

    def stub(self, exercise: Exercise) -> str:
        """Return the pristine cell of an exercise."""
        cell = self.skeleton.answer(exercise.id) if self.skeleton else None
        return cell.source if cell else ""

    def solution(self, exercise: Exercise) -> str:
        """Return the solution's cell without markers, "" in a release without solutions."""
        cell = self.solutions.answer(exercise.id) if self.solutions else None
        return strip.solution_source(cell.source) if cell else ""


def from_notebook(notebook: Notebook, exercise: Exercise, pristine: Pristine) -> Answer | None:
    """Return the answer in a learner's notebook, None if its cell is missing (or is text now).

    Shipped cells are taken as shipped, the learner's own untagged cells run after them; cells of other exercises never run, so
    that a name which a later exercise uses again does no harm. The answer are the tagged cells, and the learner's own ones
    down to the last check() of the exercise that define its name: what check() is given when the notebook runs from its top.
    """
    found = answer_cells(notebook, exercise, pristine)
    if not found:
        return None
    given, shipped = pristine.given(exercise), pristine.shipped()
    first, last = found[0], found[-1]
    own = [
        i
        for i, c in enumerate(notebook.cells)
        if _is_helper(c) and _fingerprint(c.code) not in shipped and i not in found
    ]
    between = [i for i in own if first < i < last]
    # A helper between two parts of an answer may need the first part: both run in their order, then the answer as a whole.
    above = [i for i in range(last) if i in own or between and i in found]
    return Answer(
        source="\n\n\n".join(_without_copies([notebook.cells[i].code for i in found])),
        helpers=_labelled("given", given) + _labelled("helper", [notebook.cells[i].code for i in above]),
        below=[c.code for c in notebook.cells[last + 1 :] if _is_helper(c)],
        skeleton=pristine.stub(exercise),
        solution=pristine.solution(exercise),
        given=given,
    )


def answer_cells(notebook: Notebook, exercise: Exercise, pristine: Pristine) -> list[int]:
    """Return indices of the cells that make up an answer, in their order; [] where there is none."""
    cells, shipped = notebook.cells, pristine.shipped()
    tagged = [i for i, c in enumerate(cells) if _is_tagged(c, exercise)]
    checks = [i for i, c in enumerate(cells) if c.kind == "code" and _checks(c, exercise)]
    untagged = [i for i, c in enumerate(cells) if _is_helper(c) and _defines(c, exercise.name)]
    until = max(checks, default=-1)
    since = tagged[0] if tagged else 0
    names = frozenset(name for i in tagged for name in definitions(cells[i].code))
    untagged += [i for i, c in enumerate(cells) if _is_helper(c) and touches(c.code, names)]
    return sorted(
        {*tagged, *(i for i in untagged if since < i <= until and _fingerprint(cells[i].code) not in shipped)}
    )


def remarks(notebook: Notebook, exercise: Exercise, pristine: Pristine) -> list[str]:
    """Return what a learner should know about how the answer was found: several cells that define it, or one without its tag."""
    found = [notebook.cells[i] for i in answer_cells(notebook, exercise, pristine)]
    defining = [c for c in found if _defines(c, exercise.name)]
    notes = []
    if len(defining) > 1:
        same = len({_fingerprint(c.code) for c in defining}) == 1
        words = "alike, so it does not matter which counts" if same else "the last of them counts"
        notes.append(f"{len(defining)} cells define `{exercise.name}` for {exercise.id}; {words}.")
    if defining and not any(_is_tagged(c, exercise) for c in found):
        notes.append(
            f"The cell that defines `{exercise.name}` has lost its tag {exercise.tag}; it was found by the name."
        )
    return notes


def from_source(source: str, exercise: Exercise, pristine: Pristine) -> Answer:
    """Return an answer given as a cell's source (a variant, a mutant): among the shipped cells."""
    given = pristine.given(exercise)
    return Answer(
        source=source,
        helpers=_labelled("given", given),
        skeleton=pristine.stub(exercise),
        solution=pristine.solution(exercise),
        given=given,
    )


def _labelled(kind: str, sources: list[str]) -> list[tuple[str, str]]:
    """Return (label, runnable source): each cell has a name of its own in tracebacks."""
    return [(f"{kind} cell {i + 1}", runnable(source)) for i, source in enumerate(sources)]


def _without_copies(sources: list[str]) -> list[str]:
    """Return the sources without repetitions, each at its last place: a cell and its copy are one answer."""
    prints = [_fingerprint(s) for s in sources]
    return [s for i, s in enumerate(sources) if prints[i] not in prints[i + 1 :]]


def _is_tagged(cell: Cell, exercise: Exercise) -> bool:
    return cell.kind == "code" and cell.exercise == exercise.id


def _is_helper(cell: Cell) -> bool:
    """Return an untagged cell that does more than call check(), hint() or progress()."""
    if cell.kind != "code" or cell.exercise is not None:
        return False
    try:
        return bool(without_course_calls(cell.code).strip())
    except UNPARSABLE:
        return True


def _checks(cell: Cell, exercise: Exercise) -> bool:
    """Return whether the cell calls check("N.M", ...) for this exercise."""
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "check"
        and n.args and isinstance(n.args[0], ast.Constant) and n.args[0].value == exercise.id
        for n in ast.walk(_tree(cell.code))
    )  # fmt: skip


def _defines(cell: Cell, name: str) -> bool:
    """Return whether the cell binds this name at its top level."""
    bound: set[str] = set()
    for node in _tree(cell.code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return name in bound


def _tree(source: str) -> ast.Module:
    try:
        return parse(source)
    except UNPARSABLE:
        return ast.Module([], [])


def _fingerprint(source: str) -> str:
    """Return a cell's code regardless of comments and layout."""
    try:
        return ast.dump(parse(runnable(source)))
    except UNPARSABLE:
        return source.strip()
