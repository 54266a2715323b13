"""Changing learners' files without losing anything: reset to the start, carry answers into new skeletons, make exercises."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from jfa.course import catalog, state
from jfa.course.notebook import Cell, Notebook, insert_before, read, to_json
from jfa.course.paths import Course
from jfa.course.spec import Exercise
from jfa.course.strip import NOT_STARTED


def make_exercises(course: Course, folder: Path | None = None, numbers: set[int] | None = None) -> list[Path]:
    """Write exercises/NN_topic.py for every chapter with solutions (or only these chapters); the files written.

    For the course's authors: it overwrites. Learners use reset and update.
    """
    written = []
    target = folder or course.exercises
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(course.solutions.glob("[0-9][0-9]_*.py")):
        if numbers is None or int(path.stem[:2]) in numbers:
            skeleton = catalog.skeleton_notebook(course, path.stem)
            destination = target / path.name
            if not destination.exists() or destination.read_text() != skeleton.text:
                destination.write_text(skeleton.text)
                written.append(destination)
    return written


def reset(course: Course, exercise: Exercise, stem: str) -> tuple[Path, Path]:
    """Put one exercise's cell back to its start; (file, backup). Raises LookupError where there is nothing to reset."""
    skeleton = catalog.skeleton_notebook(course, stem)
    path, _ = catalog.exercise_file(course, stem)
    if skeleton is None or skeleton.answer(exercise.id) is None:
        raise LookupError(f"the pristine text of {exercise.id} is not in this checkout")
    if path is None:
        raise LookupError(f"there is no exercises/{stem}.py; jfa update brings it back")
    mine = read(path)
    cell = mine.answer(exercise.id)
    if cell is None:
        raise LookupError(f"{path.name} has no cell tagged {exercise.tag}; jfa update brings it back")
    saved = state.backup(course, path)
    sources = {i: "" for i, c in enumerate(mine.cells) if c.kind == "code" and c.exercise == exercise.id}  # parts of a split cell
    sources[mine.cells.index(cell)] = skeleton.answer(exercise.id).source
    path.write_text(mine.with_sources(sources).text, encoding="utf-8")
    state.forget(course, exercise.id)
    return path, saved


def pull(course: Course) -> str:
    """``git pull`` although exercises were edited: they step aside and come back, for update() to carry them over.

    Returns git's own words. Raises LookupError where the pull fails; every file is then as it was before.
    """
    for stem in catalog.stems():
        state.keep_pristine(course, stem)  # tomorrow's update must know today's shipped cells
    changed = _git(course, "diff", "--name-only", "--relative", "HEAD", "--", "exercises").split()
    mine = {course.root / name: (course.root / name).read_bytes() for name in changed if (course.root / name).exists()}
    for path in mine:
        state.backup(course, path)
    try:
        if mine:
            _git(course, "checkout", "HEAD", "--", *changed)
        return _git(course, "pull", "--ff-only").strip()
    finally:
        for path, content in mine.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _git(course: Course, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(course.root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LookupError(f"git {arguments[0]} failed, nothing was changed: {done.stderr.strip()}")
    return done.stdout


def update(course: Course, stem: str) -> tuple[str, Path | None]:
    """Carry the answers of a chapter's exercise file into the present skeleton: (what happened, backup or None)."""
    skeleton = catalog.skeleton_notebook(course, stem)
    path, remark = catalog.exercise_file(course, stem)
    if skeleton is None:
        return "no pristine text here: left alone", None
    if path is None:
        course.exercises.mkdir(parents=True, exist_ok=True)
        (course.exercises / f"{stem}.py").write_text(skeleton.text, encoding="utf-8")
        state.keep_pristine(course, stem)
        return "new", None
    text = path.read_text(encoding="utf-8")
    if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in text.splitlines()):
        return "holds git's conflict marks: take your side (git checkout --ours), then run jfa update again", None
    merged, carried = carry(read(path), skeleton, state.known_pristine(course, stem), path.suffix == ".ipynb")
    state.keep_pristine(course, stem)
    if merged == text:
        return "up to date" + (f" ({remark})" if remark else ""), None
    saved = state.backup(course, path)
    path.write_text(merged, encoding="utf-8")
    return f"updated, {carried} answer{'s' * (carried != 1)} carried over" + (f" ({remark})" if remark else ""), saved


def carry(mine: Notebook, skeleton: Notebook, seen: list[Notebook], as_json: bool) -> tuple[str, int]:
    """(text of the new file, answers carried): tagged cells by tag, the learner's own cells above the exercise they stood above."""
    shipped = {(c.kind, c.source.strip()) for n in [skeleton, *seen] for c in n.cells}
    answers = {c.exercise: mine.answer_source(c.exercise) for c in mine.cells if _is_answer(c, shipped)}
    known = {c.exercise for c in skeleton.cells if c.exercise}
    sources = {i: answers[c.exercise] for i, c in enumerate(skeleton.cells) if c.kind == "code" and c.exercise in answers}
    own = _own_cells(mine, shipped, bool(seen), known)
    result = skeleton.with_sources(sources)
    for following, cells in reversed(own):
        target = result.answer(following) if following else None
        index = result.cells.index(target) if target else len(result.cells)
        result = insert_before(result, index, cells)
    text = json.dumps(to_json(result), indent=1, ensure_ascii=False) + "\n" if as_json else result.text
    return text, len(sources)


def _is_answer(cell: Cell, shipped: set) -> bool:
    """A tagged code cell that somebody has worked on."""
    if cell.kind != "code" or cell.exercise is None:
        return False
    untouched = ("code", cell.source.strip()) in shipped
    stub = f'raise NotImplementedError("{cell.exercise}: {NOT_STARTED}")' in cell.source
    return not untouched and not stub


def _own_cells(mine: Notebook, shipped: set, remembers: bool, known: set[str]) -> list[tuple[str | None, list[Cell]]]:
    """The learner's own cells with the exercise they precede: what no skeleton ``shipped``. Where nothing ``remembers`` older
    skeletons, only answers whose exercise is gone and code that defines something count as own."""
    groups: list[tuple[str | None, list[Cell]]] = []
    waiting: list[Cell] = []
    for cell in mine.cells:
        if cell.exercise in known and cell.kind == "code":
            groups.append((cell.exercise, waiting))
            waiting = []
        elif _is_own(cell, shipped, remembers):
            waiting.append(cell)
    groups.append((None, waiting))
    return [(exercise, cells) for exercise, cells in groups if cells]


def _is_own(cell: Cell, shipped: set, remembers: bool) -> bool:
    if not cell.source.strip() or "setup" in cell.tags or (cell.kind, cell.source.strip()) in shipped:
        return False
    return remembers or cell.kind == "code" and (cell.exercise is not None or any(w in cell.source for w in ("def ", "class ")))
