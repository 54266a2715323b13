"""Grading files: every exercise asked for, several at a time, from the learner's notebooks, a submission, or the solutions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jfa.course import catalog, notebook, report
from jfa.course.answers import Pristine, from_notebook, remarks
from jfa.course.judge import judge
from jfa.course.paths import Course
from jfa.course.report import Result
from jfa.course.spec import Exercise


@dataclass(frozen=True)
class Source:
    """Where answers come from: a learner's exercises/, the solutions, or a submission folder (of one learner)."""

    course: Course
    kind: str = "exercises"  # "exercises", "solutions", "submission"
    folder: Path | None = None

    def file(self, stem: str) -> tuple[Path | None, str]:
        """(the chapter's file, a remark about it)."""
        if self.kind == "solutions":
            path = self.course.solutions / f"{stem}.py"
            return (path, "") if path.exists() else (None, "")
        if self.kind == "submission":
            found = [p for suffix in (".py", ".ipynb") for p in self.folder.rglob(f"{stem}{suffix}")]
            return catalog.newest([p for p in found if ".ipynb_checkpoints" not in p.parts])
        return catalog.exercise_file(self.course, stem)


def grade(
    exercises: Iterable[Exercise], source: Source, seed: int = 0, workers: int = 0, done: Callable[[Result], None] = lambda r: None
) -> list[Result]:
    """Judge each exercise's answer; results in the order asked. ``done`` hears of each in that order, as soon as it can."""
    opened = _Files(source)
    with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
        waiting = [pool.submit(_grade_one, e, opened.chapter(e), source, seed) for e in exercises]
        results = []
        for future in waiting:
            results.append(future.result())
            done(results[-1])
    return results


@dataclass(frozen=True)
class _Opened:
    """A chapter's file, read once."""

    notebook: notebook.Notebook | None
    remark: str
    pristine: Pristine


class _Files:
    """Reads each chapter's file once."""

    def __init__(self, source: Source):
        self.source, self.opened = source, {}

    def chapter(self, exercise: Exercise) -> _Opened:
        if exercise.chapter not in self.opened:
            stem = catalog.chapter(exercise.chapter).stem
            path, remark = self.source.file(stem)
            pristine = Pristine.load(self.source.course, stem)
            try:
                self.opened[exercise.chapter] = _Opened(self._read(path), remark or _no_file(path, stem), pristine)
            except ValueError as error:
                self.opened[exercise.chapter] = _Opened(None, str(error), pristine)
        return self.opened[exercise.chapter]

    def _read(self, path: Path | None) -> notebook.Notebook | None:
        if path is None:
            return None
        found = notebook.read(path)
        if self.source.kind == "solutions":
            from jfa.course.strip import solution_source

            found = found.with_sources({i: solution_source(c.source) for i, c in enumerate(found.cells) if c.kind == "code"})
        return found


def _no_file(path: Path | None, stem: str) -> str:
    return "" if path else f"there is no file {stem}.py or {stem}.ipynb"


def _grade_one(exercise: Exercise, opened: _Opened, source: Source, seed: int) -> Result:
    answer = from_notebook(opened.notebook, exercise, opened.pristine) if opened.notebook else None
    if answer is None:
        untagged = f"no code cell is tagged {exercise.tag} (deleted, or turned to text?)"
        reason = opened.remark if opened.notebook is None else untagged
        return Result(exercise.id, exercise.title, report.MISSING, notes=[reason], seed=seed)
    result = judge(exercise, answer, source.course, seed)
    result.notes += remarks(opened.notebook, exercise, opened.pristine)
    if opened.remark:
        result.notes.append(opened.remark)
    return result


def submissions(folder: Path) -> list[Path]:
    """One folder a learner, in order of name. Raises NotADirectoryError or LookupError where there are none."""
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder}")
    found = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise LookupError(f"{folder} holds no folder: one for each learner is expected, as in {folder / 'ada' / '01_packing.py'}")
    return found
