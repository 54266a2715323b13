"""Copy the course for instructors to hand out, without the solutions and the right answers kept in the checks."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

from jfa.course import catalog, mistakes, mutants, upkeep
from jfa.course.answers import Pristine
from jfa.course.judge import cases_of
from jfa.course.paths import Course
from jfa.course.syntax import parse

_NEVER = {".git", ".venv", ".jfa", "__pycache__", ".ruff_cache", ".pytest_cache", "build", "dist", ".ipynb_checkpoints"}
_GIVEAWAYS = {"variants", "edit"}  # keyword arguments of a spec that hold (parts of) right answers


def release(course: Course, folder: Path, with_solutions: bool) -> list[str]:
    """Write the release to an empty or new folder; the relative paths written. Raises FileExistsError if it holds anything."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    written = []
    for relative in _files(course.root):
        if relative.parts[0] == "exercises" or (relative.parts[0] == "solutions" and not with_solutions):
            continue
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(course.root / relative, target)
        written.append(str(relative))
    _write_exercises(course, folder, with_solutions)
    if not with_solutions:
        for path in sorted((folder / "jfa" / "course" / "checks").glob("[0-9]*.py")):
            source = without_answers(path.read_text(encoding="utf-8"))
            path.write_text(f"{source.rstrip()}\n\n{_mistakes(course, path.stem)}", encoding="utf-8")
    return written


def _mistakes(course: Course, stem: str) -> str:
    """Return source that names what each mutant returns, in sketches: mutants cannot be made without the solutions."""
    home = next((c for c in catalog.chapters() if c.stem == stem), None)
    pristine = Pristine.load(course, stem)
    lines = ["# What known mistakes return, by exercise, mutant and case: see jfa/course/mistakes.py", "MISTAKES = {"]
    for exercise in home.exercises if home else ():
        cases = cases_of(exercise, mistakes.SEED)
        found = mutants.recognisable(exercise, cases, pristine.solution(exercise), pristine.given(exercise))
        lines.append(f"    {exercise.id!r}: {found!r},  # noqa: E501")
    return "\n".join([*lines, "}", ""])


def _files(root: Path) -> list[Path]:
    """Return the checkout's files: those git knows, or, where there is no git, all but caches and state."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    names = [Path(n) for n in listed.stdout.split("\0") if n] if listed.returncode == 0 else []
    names = names or [p.relative_to(root) for p in root.rglob("*") if p.is_file()]
    return sorted(n for n in names if not _NEVER & set(n.parts) and (root / n).is_file())


def _write_exercises(course: Course, folder: Path, with_solutions: bool) -> None:
    target = Course(folder)
    upkeep.make_exercises(course, target.exercises)
    if not with_solutions:
        target.skeletons.mkdir(parents=True, exist_ok=True)
        for path in target.exercises.glob("*.py"):
            shutil.copy2(path, target.skeletons / path.name)


def without_answers(source: str) -> str:
    """Return a check module's source without its variants and without the parts of the solution that mutants quote."""
    tree = parse(source)
    spans = [k for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg in _GIVEAWAYS]
    names = {n.id for k in spans for n in ast.walk(k.value) if isinstance(n, ast.Name)}
    spans += [
        n for n in tree.body
        if isinstance(n, ast.Assign) and all(isinstance(t, ast.Name) and t.id in names for t in n.targets)
    ]  # fmt: skip
    data = source.encode()
    starts = _line_starts(data)
    for node in sorted(spans, key=lambda n: (n.value.lineno, n.value.col_offset), reverse=True):
        first = starts[node.value.lineno - 1] + node.value.col_offset
        last = starts[node.value.end_lineno - 1] + node.value.end_col_offset
        data = data[:first] + b"()" + data[last:]
    return data.decode()


def _line_starts(data: bytes) -> list[int]:
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts
