"""Keep a learner's progress, hints seen, backups and pristine copies in the ignored folder .jfa/.

A failure here must not prevent a verdict: the caller shows a sentence about what could not be kept. Only a failed
backup raises Refusal, because without a backup a learner's file must not be changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from jfa.course import catalog, notebook
from jfa.course.files import Refusal, words, write_whole
from jfa.course.notebook import Notebook, Unreadable
from jfa.course.paths import Course
from jfa.course.report import Result

# -- progress --------------------------------------------------------------------------------------------------------


def load(course: Course) -> dict:
    """Return the progress file: {"states": {exercise: state}, "hints": {exercise: number shown}, ...}.

    A damaged one counts as empty where it is damaged (it is no proof of anything: grade never looks at it).
    """
    return _read(course)[0]


def trouble(course: Course) -> str:
    """Return a sentence if the progress file is there and cannot be understood, else ""."""
    damage = _read(course)[1]
    return f"{_file(course)} cannot be understood ({damage}); what it held does not show here." if damage else ""


def record(course: Course, *results: Result) -> str:
    """Remember the states of results; a passed exercise stays passed. "", or a sentence if they could not be kept."""

    def change(content: dict) -> None:
        for result in results:
            if content["states"].get(result.exercise) != "passed" or result.passed:
                content["states"][result.exercise] = result.state

    return _change(course, change)


def forget(course: Course, exercise: str) -> str:
    """Forget state and hints of an exercise that was put back to its start; "", or a sentence as of :func:`record`."""

    def change(content: dict) -> None:
        for part in ("states", "hints"):
            content[part].pop(exercise, None)

    return _change(course, change)


def next_hint(course: Course, exercise: str, count: int) -> tuple[int, str]:
    """Return (index of the hint to show next, a sentence if that could not be kept): one further each time, the last one again."""
    shown = 0

    def change(content: dict) -> None:
        nonlocal shown
        shown = content["hints"].get(exercise, 0)
        content["hints"][exercise] = min(shown + 1, count)

    remark = _change(course, change)
    return min(shown, count - 1), remark


def states(course: Course) -> dict[str, str]:
    """Return state by exercise id, of those checked so far."""
    return load(course)["states"]


def _file(course: Course) -> Path:
    return course.state / "progress.json"


def _read(course: Course) -> tuple[dict, str]:
    """Return (contents with both parts in their right form, what is wrong with the file or "")."""
    empty: dict = {"states": {}, "hints": {}}
    if not os.path.lexists(_file(course)):
        return empty, ""
    try:
        content = json.loads(notebook.read_bytes(_file(course)))
    except Unreadable as error:
        return empty, str(error)
    except (ValueError, RecursionError) as error:
        return empty, f"{type(error).__name__}: {error}"
    if not isinstance(content, dict):
        return empty, "it holds no table"
    whole = content | {
        "states": _entries(content.get("states", {}), lambda v: isinstance(v, str)),
        "hints": _entries(
            content.get("hints", {}), lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0
        ),
    }
    return whole, "" if whole == empty | content else "entries of another form"


def _entries(value: object, fits: Callable[[object], bool]) -> dict:
    return {k: v for k, v in value.items() if fits(v)} if isinstance(value, dict) else {}


def _change(course: Course, change: Callable[[dict], None]) -> str:
    """Read, change and write the progress file, one process at a time; a damaged one is set aside first."""
    try:
        course.state.mkdir(parents=True, exist_ok=True)
        with _locked(course):
            content, damage = _read(course)
            aside = _set_aside(_file(course)) if damage else None
            change(content)
            write_whole(_file(course), (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        return f"Your progress was not kept in {course.state}: {words(error)}."
    except Refusal as refusal:
        return f"Your progress was not kept: {refusal}."
    return f"{_file(course)} could not be understood ({damage}); it is called {aside.name} now." if aside else ""


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.stem}-damaged-{_now()}{path.suffix}")
    os.replace(path, aside)
    return aside


@contextlib.contextmanager
def _locked(course: Course) -> Iterator[None]:
    """Admit one process at a time, where the file system has locks: two notebooks may be checked at once."""
    with open(course.state / "lock", "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


# -- backups and pristine copies -------------------------------------------------------------------------------------


def backup(course: Course, path: Path, data: bytes) -> Path:
    """Copy a learner's file to .jfa/backups/TIME/ before it is changed; returns the copy's path. Raises Refusal."""
    folder = course.state / "backups" / _now()
    try:
        folder.mkdir(parents=True)
        write_whole(folder / path.name, data)
    except (OSError, Refusal) as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        cause = error if isinstance(error, OSError) else error.__cause__
        why = words(cause) if isinstance(cause, OSError) else str(error)
        raise Refusal(
            f"{path} was not changed, because no backup of it can be kept in {folder.parent}: {why}"
        ) from error
    return folder / path.name


def keep_pristine(course: Course, stem: str) -> None:
    """Keep a copy of the chapter's present skeleton, so that a later update can tell shipped cells from the learner's own."""
    skeleton = catalog.skeleton_notebook(course, stem)
    if skeleton is None:
        return
    path = course.state / "skeletons" / f"{stem}.{_digest(skeleton.text.encode())}.py"
    with contextlib.suppress(OSError, Refusal):  # without it an update keeps more than it must
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, skeleton.text.encode())


def known_pristine(course: Course, stem: str) -> list[Notebook]:
    """Return every skeleton of the chapter that this checkout has seen, without copies that were changed since they were kept."""
    known = []
    with contextlib.suppress(OSError):
        for path in sorted((course.state / "skeletons").glob(f"{stem}.*.py")):
            with contextlib.suppress(Unreadable):
                data = notebook.read_bytes(path)
                if _digest(data) == path.name.split(".")[-2]:
                    known.append(notebook.parse_percent(data.decode()))
    return known


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
