"""The table of mutants: every known mistake graded like an answer, and the check that caught it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jfa.course import catalog
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import judge
from jfa.course.mutants import source_of
from jfa.course.paths import Course
from jfa.course.report import Result
from jfa.course.spec import Exercise, Mutant


@dataclass(frozen=True)
class Row:
    """The result of grading one mutant."""

    exercise: Exercise
    mutant: Mutant
    result: Result

    @property
    def caught_by(self) -> str:
        """The first check that failed, "" if none did."""
        return self.result.failed.name if self.result.failed else ""

    @property
    def fault(self) -> str:
        """The difference from what the mutant declares, "" if there is none."""
        if self.result.state in ("passed", "not started"):
            return f"not caught ({self.result.state})"
        if self.caught_by != self.mutant.caught_by:
            return f"caught by {self.caught_by!r}, not by {self.mutant.caught_by!r}: {self.result.message}"
        words = self.mutant.expect or (
            self.mutant.says if self.mutant.caught_by == "values" and self.mutant.recognise else ""
        )
        return "" if words in self.result.text() else f"the report does not say {words!r}:\n{self.result.text()}"


def run_mutant(exercise: Exercise, mutant: Mutant, course: Course, pristine: Pristine, seed: int = 0) -> Row:
    """Grade one mutant."""
    answer = from_source(source_of(mutant, pristine.solution(exercise)), exercise, pristine)
    return Row(exercise, mutant, judge(exercise, answer, course, seed))


def run_mutants(exercises: list[Exercise], course: Course, done: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Grade all mutants of these exercises, in parallel; rows in order."""
    pristine = {e.chapter: Pristine.load(course, catalog.chapter(e.chapter).stem) for e in exercises}
    rows = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting = [pool.submit(run_mutant, e, m, course, pristine[e.chapter]) for e in exercises for m in e.mutants]
        for future in waiting:
            rows.append(future.result())
            done(rows[-1])
    return rows
