"""Paths of the course: exercises, solutions, and the ignored folder with progress and backups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Course:
    """One checkout (or release) of the course. ``root`` holds exercises/ and, except in a release, solutions/."""

    root: Path

    @property
    def exercises(self) -> Path:
        return self.root / "exercises"

    @property
    def solutions(self) -> Path:
        return self.root / "solutions"

    def require_solutions(self) -> None:
        """Raise LookupError in a release without solutions."""
        if not any(self.solutions.glob("*.py")):
            raise LookupError(
                f"there are no solutions in {self.root}: this copy of the course was handed out without them"
            )

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def skeletons(self) -> Path:
        """Pristine exercises of a release, which has no solutions to make them from."""
        return self.root / "jfa" / "course" / "skeletons"

    @property
    def state(self) -> Path:
        """The ignored folder: progress, backups."""
        return self.root / ".jfa"

    @property
    def protected(self) -> list[str]:
        """Folders whose files an answer may not read."""
        checks = {Path(p, "course", "checks").resolve() for p in (_PACKAGE, self.root / "jfa")}
        return [str(p) for p in (self.solutions, *sorted(checks), self.skeletons, *_git(self.root))]


def _git(root: Path) -> list[Path]:
    """Return git's folder of a checkout, which holds every version of the solutions; in a worktree the one it belongs to."""
    git = root / ".git"
    try:
        if git.is_file():
            git = root / git.read_text().removeprefix("gitdir:").strip()
            git = git / (git / "commondir").read_text().strip()
        return [git.resolve()] if git.is_dir() else []
    except (OSError, ValueError):
        return []


def find_course(start: Path | None = None) -> Course:
    """Return the course around ``start`` (default: the current folder), else the one this package lies in.

    The environment variable JFA_COURSE names one outright.
    """
    if os.environ.get("JFA_COURSE"):
        return Course(Path(os.environ["JFA_COURSE"]).resolve())
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "exercises").is_dir() and (folder / "jfa").is_dir():
            return Course(folder)
    return Course(_PACKAGE.parent)
