"""Change learners' files without losing anything: reset to the start, carry answers into new skeletons, make exercises.

Every change is announced with the place of its backup before it is made, so the learner knows the backup even if the
change fails.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from jfa.course import catalog, notebook, state, strip
from jfa.course.carry import carry
from jfa.course.files import Refusal, words, write_whole
from jfa.course.notebook import Notebook
from jfa.course.paths import Course
from jfa.course.spec import Exercise

Announce = Callable[
    [Path, Path], None
]  # (file, its backup), called when the backup is on the disk and the file is as it was

CONFLICT = "holds git's conflict marks: take your side (git checkout --ours), then run jfa update again"


def _quietly(file: Path, saved: Path) -> None:
    pass


def _replace(course: Course, path: Path, before: bytes, after: bytes, announce: Announce) -> Path:
    """Back a file up, announce it, change it; returns the path of the backup. Raises Refusal without changing the
    file."""
    saved = state.backup(course, path, before)
    announce(path, saved)
    write_whole(path, after, before)
    return saved


# -- for authors -----------------------------------------------------------------------------------------------------


def make_exercises(
    course: Course, folder: Path | None = None, numbers: set[int] | None = None, announce: Announce = _quietly
) -> list[Path]:
    """Write exercises/NN_topic.py for every chapter with solutions (or only these chapters); the files written.

    For the course's authors. Replaced files are backed up first. Raises Refusal where a file cannot be read or written.
    """
    written = []
    target = folder or course.exercises
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(course.solutions.glob("[0-9][0-9]_*.py")):
        if numbers is not None and int(path.stem[:2]) not in numbers:
            continue
        made, destination = stripped(path).text.encode(), target / path.name
        if not os.path.lexists(destination):
            write_whole(destination, made)
        elif (before := notebook.read_bytes(destination)) != made:
            _replace(course, destination, before, made, announce)
        else:
            continue
        written.append(destination)
    return written


def stripped(path: Path) -> Notebook:
    """Return the exercises that a solutions file gives; raises Refusal naming the file where its marks do not fit together."""
    try:
        return strip.strip_notebook(notebook.read(path))
    except notebook.Unreadable:
        raise
    except (ValueError, SyntaxError) as error:
        raise Refusal(f"{path}: {error}") from error


# -- for learners ----------------------------------------------------------------------------------------------------


def reset(course: Course, exercise: Exercise, stem: str, announce: Announce = _quietly) -> tuple[Path, Path, str]:
    """Put one exercise's cell back to its start: (file, backup, a remark about progress that could not be kept, or "").

    Raises LookupError where there is nothing to reset, Refusal where it cannot be done; the file is then as it was.
    """
    skeleton = catalog.skeleton_notebook(course, stem) or _remembered(course, stem)
    path, _ = catalog.exercise_file(course, stem)
    if skeleton is None or skeleton.answer(exercise.id) is None:
        raise LookupError(f"the pristine text of {exercise.id} is not in this checkout")
    if path is None:
        raise LookupError(f"there is no exercises/{stem}.py; jfa update brings it back")
    before, mine = notebook.read_bytes(path), notebook.read(path)
    cell = mine.answer(exercise.id)
    if cell is None:
        raise LookupError(f"{path.name} has no cell tagged {exercise.tag}; jfa update brings it back")
    sources = {
        i: "" for i, c in enumerate(mine.cells) if c.kind == "code" and c.exercise == exercise.id
    }  # parts of a split cell
    sources[mine.cells.index(cell)] = skeleton.answer(exercise.id).source
    after = mine.with_sources(sources).text.encode()
    saved = _replace(course, path, before, after, announce)
    return path, saved, state.forget(course, exercise.id)


def _remembered(course: Course, stem: str) -> Notebook | None:
    """Return a skeleton that was kept earlier, where solutions and skeletons have been removed."""
    known = state.known_pristine(course, stem)
    return known[-1] if known else None


def update(course: Course, stem: str, announce: Announce = _quietly) -> tuple[str, Path | None]:
    """Carry the answers of a chapter's exercise file into the present skeleton: (what happened, backup or None).

    Raises Unreadable or Refusal, each one sentence; the file is then as it was.
    """
    skeleton = catalog.skeleton_notebook(course, stem)
    path, remark = catalog.exercise_file(course, stem)
    if skeleton is None:
        return "no pristine text here: left alone", None
    if path is None:
        try:
            course.exercises.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"{course.exercises} cannot be made: {words(error)}") from error
        write_whole(course.exercises / f"{stem}.py", skeleton.text.encode())
        state.keep_pristine(course, stem)
        return "new", None
    before = notebook.read_bytes(path)
    remark = f" ({remark})" if remark else ""
    if any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in before.splitlines()):
        return CONFLICT, None
    mine = notebook.read(path)
    carried = carry(mine, skeleton, [])
    if carried is not None:  # only now, because git takes its time
        carried = carry(mine, skeleton, _seen(course, stem))
    state.keep_pristine(course, stem)
    if carried is None or carried[0] == mine.text:
        return f"up to date{remark}", None
    text, count = carried
    saved = _replace(course, path, before, text.encode(), announce)
    return f"updated, {count} answer{'s' * (count != 1)} carried over{remark}", saved


def _seen(course: Course, stem: str) -> list[Notebook]:
    """Return older skeletons: remembered ones, and those of git's history (not of exercises/: a learner may commit answers)."""
    found = state.known_pristine(course, stem)
    for name, is_solution in ((f"solutions/{stem}.py", True), (f"jfa/course/skeletons/{stem}.py", False)):
        for text in _history(course, name):
            try:
                book = notebook.parse_percent(text)
                found.append(strip.strip_notebook(book) if is_solution else book)
            except (ValueError, SyntaxError):
                continue
    return found


def _history(course: Course, name: str, versions: int = 40) -> list[str]:
    """Return the texts that a file had in git, the last ones; [] without git."""
    try:
        commits = _git(course, "log", f"-{versions}", "--format=%H", "--", name).split()
        return [_git(course, "show", f"{commit}:./{name}") for commit in commits]
    except LookupError:
        return []


# -- git pull --------------------------------------------------------------------------------------------------------


def pull(course: Course, announce: Announce = _quietly) -> str:
    """Run ``git pull`` although exercises were edited: they are moved away and put back, for update() to carry them
    over.

    Returns git's own words. Raises LookupError where the pull fails, Refusal where no backup can be kept; every file is then as it
    was before. If the process is killed meanwhile, :func:`recover` puts the files back.
    """
    for stem in catalog.stems():
        state.keep_pristine(course, stem)  # tomorrow's update must know today's shipped cells
    changed = [
        n for n in _git(course, "diff", "--name-only", "-z", "--relative", "HEAD", "--", "exercises").split("\0") if n
    ]
    mine = {name: notebook.read_bytes(course.root / name) for name in changed if (course.root / name).exists()}
    kept = {}
    for name, content in mine.items():
        kept[name] = state.backup(course, course.root / name, content)
        announce(course.root / name, kept[name])
    if not mine:
        return _git(course, "pull", "--ff-only").strip()
    write_whole(_journal(course), json.dumps({name: str(path) for name, path in kept.items()}).encode())
    try:
        _git(course, "checkout", "HEAD", "--", *changed)
        return _git(course, "pull", "--ff-only").strip()
    finally:
        for name, content in mine.items():
            (course.root / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(course.root / name, content)
        _journal(course).unlink(missing_ok=True)


def _journal(course: Course) -> Path:
    """Return the record that exists while files stepped aside for git: {file: its backup}."""
    return course.state / "pulling.json"


def recover(course: Course) -> list[str]:
    """Put back the files that a killed :func:`pull` had moved away; returns a sentence per file, [] if there are
    none."""
    if not _journal(course).is_file():
        return []
    try:
        entries = json.loads(notebook.read_bytes(_journal(course)))
        kept = {str(name): Path(saved) for name, saved in entries.items()}
    except (ValueError, AttributeError, TypeError):
        kept = {}
    said = [_put_back(course, course.root / name, saved) for name, saved in kept.items()]
    try:
        _journal(course).unlink()
    except OSError as error:
        raise Refusal(f"{_journal(course)} cannot be removed: {words(error)}") from error
    return said or [f"an update was interrupted; your files as they were are in {course.state / 'backups'}"]


def _put_back(course: Course, path: Path, saved: Path) -> str:
    """Write a backup to its file again, unless the file has changed since."""
    wanted = notebook.read_bytes(saved)
    try:
        now = notebook.read_bytes(path) if os.path.lexists(path) else None
        if now == wanted:
            return f"an update was interrupted; {path} is whole"
        if now is None or _is_pristine(course, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, wanted)
            return f"an update was interrupted; {path} is put back from {saved}"
    except (Refusal, OSError, notebook.Unreadable) as error:
        return f"an update was interrupted; your version is in {saved}, and was not put back: {error}"
    return f"an update was interrupted, and {path} was edited since; your version from before is in {saved}"


def _is_pristine(course: Course, path: Path) -> bool:
    """Return whether no cell of the file is a learner's: git's version, or one of the skeletons."""
    relative = path.relative_to(course.root).as_posix()
    try:
        committed = _git(course, "show", f"HEAD:./{relative}")
    except LookupError:
        committed = None
    text = notebook.decode(notebook.read_bytes(path), path)
    skeleton = catalog.skeleton_notebook(course, path.stem)
    return text == committed or text in {n.text for n in [*filter(None, [skeleton]), *_seen(course, path.stem)]}


def _git(course: Course, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(course.root), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise LookupError(f"git does not start here ({error.strerror}); nothing was changed") from error
    if done.returncode:
        raise LookupError(
            f"git {arguments[0]} failed, nothing was changed: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout.decode(errors="replace")
