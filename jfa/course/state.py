"""What the course remembers for a learner, in the ignored folder .jfa/: progress, hints seen, backups, pristine copies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from datetime import datetime
from pathlib import Path

from jfa.course import catalog, notebook
from jfa.course.notebook import Notebook
from jfa.course.paths import Course
from jfa.course.report import Result


def load(course: Course) -> dict:
    """The progress file; an unreadable one counts as empty (it is no proof of anything: grade never looks at it)."""
    try:
        content = json.loads((course.state / "progress.json").read_text())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _save(course: Course, content: dict) -> None:
    course.state.mkdir(parents=True, exist_ok=True)
    path = course.state / "progress.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    draft.replace(path)


def record(course: Course, result: Result) -> None:
    """Remember a check's state; a passed exercise stays passed."""
    content = load(course)
    states = content.setdefault("states", {})
    if states.get(result.exercise) != "passed" or result.passed:
        states[result.exercise] = result.state
        _save(course, content)


def forget(course: Course, exercise: str) -> None:
    """Forget state and hints of an exercise that was put back to its start."""
    content = load(course)
    for part in ("states", "hints"):
        content.get(part, {}).pop(exercise, None)
    _save(course, content)


def next_hint(course: Course, exercise: str, count: int) -> int:
    """Index of the hint to show next: one further at each call, the last one again at the end."""
    content = load(course)
    seen = content.setdefault("hints", {})
    shown = seen.get(exercise, 0) if isinstance(seen.get(exercise, 0), int) else 0
    seen[exercise] = min(shown + 1, count)
    _save(course, content)
    return min(shown, count - 1)


def states(course: Course) -> dict[str, str]:
    """State by exercise id, of those checked so far."""
    found = load(course).get("states", {})
    return found if isinstance(found, dict) else {}


def backup(course: Course, path: Path) -> Path:
    """Copy a learner's file into .jfa/backups/TIME/ before it is changed; where it went."""
    folder = course.state / "backups" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(path, folder / path.name))


def keep_pristine(course: Course, stem: str) -> None:
    """Keep a copy of the chapter's present skeleton, so that a later update can tell shipped cells from the learner's own."""
    skeleton = catalog.skeleton_notebook(course, stem)
    if skeleton is not None:
        folder = course.state / "skeletons"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}.{hashlib.sha256(skeleton.text.encode()).hexdigest()[:12]}.py"
        if not path.exists():
            path.write_text(skeleton.text)


def known_pristine(course: Course, stem: str) -> list[Notebook]:
    """Every skeleton of the chapter this checkout has seen."""
    return [notebook.read(p) for p in sorted((course.state / "skeletons").glob(f"{stem}.*.py"))]
