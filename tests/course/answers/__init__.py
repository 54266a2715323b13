"""Answers to the exercises as readers write them, wrong and right: a file for each chapter, judged like a learner's.

They were written from the exercise's text, without a look at its check. A wrong answer that a check once accepted is besides a
known mistake in ``jfa/course/checks``, so that a learner is told what it is.

    python -m tests.course.answers 9 11.2      judge these and print each verdict and its message
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

from jfa.course import catalog
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import judge
from jfa.course.paths import Course
from jfa.course.report import Result
from jfa.course.spec import edited

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Attempt:
    """One answer to one exercise.

    Attributes:
        exercise: its id, "9.1".
        name: what is special about it, in a few words.
        right: whether it must pass.
        edits: (old, new) pairs that make it from the solution's cell and a last newline; each old text occurs exactly once.
        source: or the whole cell.
    """

    exercise: str
    name: str
    right: bool
    edits: tuple[tuple[str, str], ...] = ()
    source: str = ""

    def cell(self, solution: str) -> str:
        """Return the answer's whole cell."""
        return self.source or edited(solution + "\n", self.edits, f"{self.exercise} {self.name!r}")


def wrong(exercise: str, name: str, *edits: tuple[str, str], source: str = "") -> Attempt:
    """Return an answer that must fail."""
    return Attempt(exercise, name, False, edits, source)


def right(exercise: str, name: str, *edits: tuple[str, str], source: str = "") -> Attempt:
    """Return an answer that must pass."""
    return Attempt(exercise, name, True, edits, source)


def chapters() -> list[int]:
    """Return the numbers of the chapters that have a file here."""
    return sorted(int(path.stem[1:]) for path in HERE.glob("c[0-9][0-9].py"))


def load(chapter: int) -> list[Attempt]:
    """Return the answers of a chapter."""
    return runpy.run_path(str(HERE / f"c{chapter:02d}.py"))["ATTEMPTS"]


def graded(attempt: Attempt, course: Course, pristine: Pristine, seed: int = 0) -> Result:
    """Judge one answer as ``jfa grade`` does."""
    exercise = catalog.exercise(attempt.exercise)
    source = attempt.cell(pristine.solution(exercise))
    return judge(exercise, from_source(source, exercise, pristine), course, seed)
