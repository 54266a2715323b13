"""Find the files of a submission. The folder is untrusted: it may hold links, pipes, or a folder with a chapter's name.

Links out of the folder are not followed, and only plain files are read. Anything else is reported in one sentence.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from jfa.course import catalog
from jfa.course.paths import Course

LONGEST_CELL = 100_000  # characters of one cell
_LARGEST = {".py": 4 * 2**20, ".ipynb": 32 * 2**20}  # bytes of a file; an .ipynb may hold pictures
_MOST_ENTRIES = 20_000  # files and folders of one submission
_NO_ANSWERS = {
    "notebooks",
    "solutions",
    "node_modules",
    "site-packages",
    "__pycache__",
}  # a whole checkout may be handed in
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_KINDS = (
    (stat.S_ISLNK, "a link, which is not followed"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def find(folder: Path, stem: str) -> tuple[Path | None, str]:
    """Return (a chapter's file in a learner's folder, a remark); without a file the remark says what is there instead."""
    oddity = _oddity(folder)
    if oddity and oddity != "a folder":
        return None, f"{folder.name} is {oddity}; a submission is a folder of plain files"
    found, odd, remarks = _candidates(folder, {f"{stem}.py", f"{stem}.ipynb"})
    plain = [p for p in found if p.parent.name == "exercises"] or found
    if not plain:
        nothing = [] if odd else [f"there is no file {stem}.py or {stem}.ipynb{_instead(folder, stem)}"]
        return None, "; ".join(odd + remarks + nothing)
    path, older = catalog.newest(plain)
    if path.stat().st_size > _LARGEST[path.suffix]:
        return (
            None,
            f"{path.name} has {path.stat().st_size / 2**20:.0f} MiB; at most {_LARGEST[path.suffix] // 2**20} MiB are read",
        )
    return path, "; ".join(filter(None, [older, *odd]))


def _instead(folder: Path, stem: str) -> str:
    """Return what a submission holds that may have been meant as a chapter's file, in words; "" for nothing like it."""
    archives, others, seen = [], [], 0
    for _, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        archives += [f for f in sorted(files) if f.lower().endswith(_ARCHIVES)]
        others += [f for f in sorted(files) if f.lower().startswith(stem.lower())]
        folders[:] = [f for f in folders if f not in _NO_ANSWERS and not f.startswith(".")]
        if seen > _MOST_ENTRIES:
            break
    if others:
        return f", but {', '.join(others[:3])}: only a file of exactly that name is read"
    return f", but {', '.join(archives[:3])}: unpack it in the learner's folder" if archives else ""


def _candidates(folder: Path, names: set[str]) -> tuple[list[Path], list[str], list[str]]:
    """Return (plain files of these names, sentences about other things of these names, what could not be looked at)."""
    found, odd, remarks, seen = [], [], [], 0
    unreadable = lambda error: remarks.append(f"{Path(error.filename).name} cannot be read: {error.strerror}")  # noqa: E731
    for top, folders, files in os.walk(folder, onerror=unreadable):
        seen += len(folders) + len(files)
        if seen > _MOST_ENTRIES:
            return found, odd, [*remarks, f"it holds more than {_MOST_ENTRIES} files: not all were looked at"]
        for name in sorted(names.intersection(folders + files)):
            oddity = _oddity(Path(top, name))
            odd.append(f"{name} is {oddity}") if oddity else found.append(Path(top, name))
        links = [f for f in folders if os.path.islink(os.path.join(top, f))]
        remarks += [f"{name} is a link, which is not followed" for name in links if name not in names]
        folders[:] = [f for f in folders if f not in _NO_ANSWERS | names and not f.startswith(".")]
    return found, odd, remarks[:3]


def _oddity(path: Path) -> str:
    """Return the kind of a path that is not a plain file, "" for a plain file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        return f"not there: {error.strerror}"
    return next((words for test, words in _KINDS if test(mode)), "")


def shared(paths: dict[str, Iterable[Path]], course: Course) -> dict[Path, str]:
    """Return files that are one and the same file under several names (hard links): a sentence for each.

    ``paths`` are the files to be read, by learner.
    """
    owners = defaultdict(set)
    for learner, files in paths.items():
        for path in files:
            owners[_identity(path)].add(learner)
    solutions = {_identity(p) for p in course.solutions.glob("*.py")}
    sentences = {}
    for learner, files in paths.items():
        for path in files:
            others = sorted(owners[_identity(path)] - {learner})
            whose = ["the solution", *others] if _identity(path) in solutions else others
            if whose:
                sentences[path] = f"{path.name} is a second name (a hard link) for the file of {', '.join(whose[:3])}"
    return sentences


def _identity(path: Path) -> tuple[int, int]:
    try:
        about = os.lstat(path)
    except OSError:
        return (0, hash(path))
    return about.st_dev, about.st_ino


def closed(folder: Path, course: Course) -> dict[str, list[str]]:
    """Return what an answer may not read while the submissions in ``folder`` are graded, by the word of the violation."""
    needed = [Path(p).resolve() for p in (course.root, sys.prefix, sys.base_prefix, Path(__file__).parent)]
    top = folder.resolve()
    if any(
        n.is_relative_to(top) for n in needed
    ):  # it lies above the course or Python itself: only what is beside those
        tops = [p.resolve() for p in top.iterdir() if not any(n.is_relative_to(p.resolve()) for n in needed)]
        tops = [p for p in tops if not any(p.is_relative_to(n) for n in needed)]
    else:
        tops = [top]
    own = [course.exercises, course.state / "backups", course.state / "skeletons"]
    return {"submissions": [str(p) for p in (*tops, *own)]}
