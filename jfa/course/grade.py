"""Grade the requested exercises, several at a time, from the learner's notebooks, a submission, or the solutions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from jfa.course import catalog, intake, notebook, report
from jfa.course.answers import Pristine, from_notebook, remarks
from jfa.course.judge import judge
from jfa.course.paths import Course
from jfa.course.printable import clean
from jfa.course.report import Result
from jfa.course.spec import Exercise


@dataclass(frozen=True)
class Source:
    """The source of answers: a learner's exercises/, the solutions, or a submission folder (of one learner).

    ``handed_in`` is the folder of all submissions: while one is graded, its answers can read nothing in that folder.
    """

    course: Course
    kind: str = "exercises"  # "exercises", "solutions", "submission"
    folder: Path | None = None
    handed_in: Path | None = None

    def file(self, stem: str) -> tuple[Path | None, str]:
        """Return (the chapter's file, a remark about it)."""
        if self.kind == "solutions":
            path = self.course.solutions / f"{stem}.py"
            return (path, "") if path.exists() else (None, "")
        if self.kind == "submission":
            return intake.find(self.folder, stem)
        return catalog.exercise_file(self.course, stem)

    @property
    def closed(self) -> dict[str, list[str]]:
        """What its answers may not read besides the course's own files."""
        if self.kind != "submission":
            return {}
        return intake.closed(self.handed_in, self.course) if self.handed_in else {"submissions": [str(self.folder)]}


@dataclass(frozen=True)
class Opened:
    """A chapter's file of one learner, read once; ``notebook`` is None where ``remark`` says why."""

    notebook: notebook.Notebook | None
    remark: str
    pristine: Pristine


Handed = dict[int, Opened]  # by chapter


def read(exercises: Iterable[Exercise], sources: dict[str, Source]) -> dict[str, Handed]:
    """Read every chapter of every learner, before any answer runs; never raises for a malformed submission."""
    exercises = list(exercises)
    stems = {e.chapter: catalog.chapter(e.chapter).stem for e in exercises}
    pristine = {(s.course, stem): Pristine.load(s.course, stem) for s in sources.values() for stem in stems.values()}
    found = {learner: {chapter: s.file(stem) for chapter, stem in stems.items()} for learner, s in sources.items()}
    paths = {learner: [path for path, _ in files.values() if path] for learner, files in found.items()}
    submitted = {learner: paths[learner] for learner, s in sources.items() if s.kind == "submission"}
    shared = intake.shared(submitted, next(iter(sources.values())).course) if submitted else {}
    handed: dict[str, Handed] = {}
    for learner, source in sources.items():
        handed[learner] = {}
        for chapter, (path, remark) in found[learner].items():
            stem = stems[chapter]
            content, why = (None, shared[path]) if path in shared else _open(path, source)
            remark = why or remark or ("" if path else f"there is no file {stem}.py or {stem}.ipynb")
            handed[learner][chapter] = Opened(content, remark, pristine[source.course, stem])
    return handed


def _open(path: Path | None, source: Source) -> tuple[notebook.Notebook | None, str]:
    """Return (a file's notebook, why there is none)."""
    if path is None:
        return None, ""
    try:
        found = notebook.read(path)
        if source.kind == "solutions":
            from jfa.course.strip import solution_source

            found = found.with_sources(
                {i: solution_source(c.source) for i, c in enumerate(found.cells) if c.kind == "code"}
            )
        return found, ""
    except Exception as error:  # noqa: BLE001  whatever a file holds, the others are to be graded
        return None, str(error) if isinstance(
            error, notebook.Unreadable
        ) else f"{path.name} cannot be read: {_words(error)}"


def grade(
    exercises: Iterable[Exercise],
    source: Source,
    seed: int = 0,
    workers: int = 0,
    done: Callable[[Result], None] = lambda r: None,
    handed: Handed | None = None,
) -> list[Result]:
    """Judge each exercise's answer; results in the order asked. ``done`` is called with each in that order, as soon as it can.

    ``handed`` is what was read before; left out, everything is read now, before the first answer runs.
    """  # fmt: skip
    exercises = list(exercises)
    handed = read(exercises, {"": source})[""] if handed is None else handed
    if workers == 1:  # in this thread, which Ctrl-C reaches at once
        return [_told(_grade_one(e, handed[e.chapter], source, seed), done) for e in exercises]
    with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
        waiting = [pool.submit(_grade_one, e, handed[e.chapter], source, seed) for e in exercises]
        results = []
        for future in waiting:
            results.append(future.result())
            done(results[-1])
    return results


def _told(result: Result, done: Callable[[Result], None]) -> Result:
    done(result)
    return result


def _grade_one(exercise: Exercise, opened: Opened, source: Source, seed: int) -> Result:
    """Return one exercise's result; an error becomes its sentence and does not affect other exercises."""
    try:
        return clean(_judged(exercise, opened, source, seed))
    except Exception as error:  # noqa: BLE001  see above
        fault = report.Checked("runs", False, "", f"This answer could not be judged: {_words(error)}.")
        return clean(Result(exercise.id, exercise.title, report.WRONG, [fault], seed=seed))


def _judged(exercise: Exercise, opened: Opened, source: Source, seed: int) -> Result:
    content, notes = opened.notebook, [opened.remark] if opened.remark else []
    if content is not None:
        content, too_long = _without_huge_cells(content, exercise)
        notes += too_long
    answer = from_notebook(content, exercise, opened.pristine) if content else None
    if answer is None:
        notes = notes or [f"no code cell is tagged {exercise.tag} ({_why_untagged(content)})"]
        return Result(exercise.id, exercise.title, report.MISSING, notes=notes, seed=seed)
    result = judge(exercise, answer, source.course, seed, closed=source.closed)
    result.notes += [*notes, *remarks(content, exercise, opened.pristine)]
    return result


def _why_untagged(content: notebook.Notebook) -> str:
    """Return the likely reason that a notebook has no cell for an exercise, in words."""
    is_light = any(re.search(r"(?m)^# \+ .*ex-\d", c.source) for c in content.cells if c.kind == "code")
    return (
        "the file is in Jupytext's light format: `jupytext --to py:percent FILE` brings the cells back"
        if is_light
        else "deleted, or turned to text?"
    )


def _without_huge_cells(content: notebook.Notebook, exercise: Exercise) -> tuple[notebook.Notebook, list[str]]:
    """Return the notebook without code cells that are too long to read, and sentences about them."""
    longest = intake.LONGEST_CELL
    huge = [c for c in content.cells if c.kind == "code" and len(c.source) > longest]
    if not huge:
        return content, []
    notes = [f"{len(huge)} code cells of more than {longest:,} characters were left out"]
    if any(c.exercise == exercise.id for c in huge):
        notes = [f"the cell tagged {exercise.tag} is longer than {longest:,} characters, the most that is read"]
    return replace(content, cells=tuple(c for c in content.cells if c not in huge)), notes


def _words(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def left_aside(folder: Path) -> str:
    """Return a sentence about what lies beside the learners' folders and is not graded; "" if nothing does."""
    names = sorted(p.name for p in folder.iterdir() if not (p.is_dir() or p.is_symlink()) or p.name.startswith("."))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"not graded, because a submission is a folder whose name begins with no dot: {shown}" if names else ""


def submissions(folder: Path) -> list[Path]:
    """Return one folder per learner, in order of name. Raises NotADirectoryError or LookupError where there are none."""
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder}")
    found = sorted(p for p in folder.iterdir() if (p.is_dir() or p.is_symlink()) and not p.name.startswith("."))
    if not found:
        raise LookupError(
            f"{folder} holds no folder: one for each learner is expected, as in {folder / 'ada' / '01_packing.py'}"
        )
    return found
