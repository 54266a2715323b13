"""List the exercises: the check modules, and the notebooks' cells that belong to them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jfa.course import checks, notebook, strip
from jfa.course.notebook import Notebook
from jfa.course.paths import Course
from jfa.course.spec import Exercise


@dataclass(frozen=True)
class Chapter:
    """One chapter: its number, the stem of its files ("02_online_softmax") and its exercises."""

    number: int
    stem: str
    exercises: tuple[Exercise, ...]

    @property
    def title(self) -> str:
        """The stem in words."""
        return self.stem.split("_", 1)[1].replace("_", " ")


def stems() -> list[str]:
    """Return stems of the check modules that exist, in the chapters' order."""
    return sorted(m.name for m in pkgutil.iter_modules(checks.__path__) if m.name[:2].isdigit())


@cache
def _load(stem: str) -> Chapter:
    module = importlib.import_module(f"jfa.course.checks.{stem}")
    return Chapter(int(stem[:2]), stem, tuple(sorted(module.EXERCISES, key=lambda e: e.order)))


def chapters() -> list[Chapter]:
    """Return all chapters that have exercises."""
    return [_load(stem) for stem in stems()]


def chapter(number: int) -> Chapter:
    """Return one chapter; raises LookupError that lists the chapters."""
    for stem in stems():
        if int(stem[:2]) == number:
            return _load(stem)
    known = ", ".join(stem[:2] for stem in stems()) or "none"
    raise LookupError(f"chapter {number} has no exercises here; chapters with exercises: {known}")


def exercise(number: str) -> Exercise:
    """Return one exercise by its "N.M"; raises LookupError that lists the exercises."""
    if not isinstance(number, str) or number.count(".") != 1 or not number.replace(".", "").isdigit():
        raise LookupError(f"an exercise is named by its number, such as '2.3', not {number!r}")
    home = chapter(int(number.split(".")[0]))
    for candidate in home.exercises:
        if candidate.id == number:
            return candidate
    raise LookupError(f"no exercise {number}; chapter {home.number} has {', '.join(e.id for e in home.exercises)}")


def sketches(exercise: Exercise) -> list | None:
    """Return sketches of an exercise's mutants (:mod:`jfa.course.mistakes`) in a release without solutions, else None."""
    stem = next((s for s in stems() if int(s[:2]) == exercise.chapter), None)
    module = importlib.import_module(f"jfa.course.checks.{stem}") if stem else None
    return getattr(module, "MISTAKES", {}).get(exercise.id)


def select(words: list[str]) -> list[Exercise]:
    """Return the exercises that "N" and "N.M" words name, in order, each once; none given means all."""
    found: dict[str, Exercise] = {}
    for word in words or [str(c.number) for c in chapters()]:
        chosen = [exercise(word)] if "." in word else chapter(_number(word)).exercises
        found |= {e.id: e for e in chosen}
    return list(found.values())


def _number(word: str) -> int:
    if not word.isdigit():
        raise LookupError(f"expected a chapter such as 2 or an exercise such as 2.3, got {word!r}")
    return int(word)


def solution_notebook(course: Course, stem: str) -> Notebook | None:
    """Return the chapter's solutions, None in a release without them (or where the file cannot be read)."""
    path = course.solutions / f"{stem}.py"
    try:
        return notebook.read(path) if path.exists() else None
    except notebook.Unreadable:
        return None


def skeleton_notebook(course: Course, stem: str) -> Notebook | None:
    """Return the chapter's pristine exercises: stripped from its solutions, or those of a release; None without either."""
    solutions = solution_notebook(course, stem)
    if solutions is not None:
        try:
            return strip.strip_notebook(solutions)
        except ValueError:  # solutions that somebody is editing
            pass
    path = course.skeletons / f"{stem}.py"
    try:
        return notebook.read(path) if path.exists() else None
    except notebook.Unreadable:
        return None


def exercise_file(course: Course, stem: str) -> tuple[Path | None, str]:
    """Return (the learner's file of a chapter, a remark): the newer one where both .py and .ipynb exist, and the remark says so."""
    return newest([course.exercises / f"{stem}.py", course.exercises / f"{stem}.ipynb"])


def newest(candidates: list[Path]) -> tuple[Path | None, str]:
    """Return the most recently changed of these files, and a remark naming the older ones left aside."""
    found = sorted((p for p in candidates if p.exists()), key=lambda p: p.stat().st_mtime_ns)
    if not found:
        return None, ""
    remark = "".join(f"graded {found[-1].name}; {p.name} is older and was not looked at. " for p in found[:-1]).strip()
    return found[-1], remark
