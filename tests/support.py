"""What several tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COURSE = ("notebooks", "exercises", "solutions", "jupyter", "jupytext.toml", "requirements.txt")


def copy_course(target: Path) -> Path:
    """A copy of the course to run, edit and grade in: what a test does there never meets the learner's files or progress.

    The package is linked, not copied: it is what is being tested.
    """
    for name in filter(lambda name: (ROOT / name).exists(), COURSE):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target / name)
    (target / "jfa").symlink_to(ROOT / "jfa")
    return target
