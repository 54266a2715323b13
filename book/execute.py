"""Chapters with their outputs: run in kernels of their own, kept until the code of a chapter or the package changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from jfa import lab

CELL_SECONDS = 600  # for one cell; a whole chapter takes a small part of it
_COPIED = ("notebooks", "exercises", "solutions", "examples", "docs", "jupyter", "jupytext.toml", "requirements.txt")


class ChapterFailed(Exception):
    """A chapter that does not run from top to bottom; the message names it and ends with the traceback."""


def read(path: Path) -> nbformat.NotebookNode:
    """Return a chapter without outputs, with what Sphinx needs to know of its language."""
    chapter = jupytext.read(path)
    chapter.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    chapter.metadata["language_info"] = {"name": "python", "pygments_lexer": "python"}
    return chapter


def outputs_of(paths: list[Path], root: Path, cache: Path, jobs: int, say=print) -> dict[str, list]:
    """Return {stem: the outputs of each code cell} of chapters, from the cache where it has them. Raises ChapterFailed."""
    cache.mkdir(parents=True, exist_ok=True)
    package = package_digest(root)
    kept = {path.stem: cache / f"{path.stem}.{chapter_digest(path, package)}.json" for path in paths}
    todo = [path for path in paths if not kept[path.stem].exists()]
    if todo:
        copy = copy_course(root, cache / f"course-{os.getpid()}")
        try:
            _run_all(sorted(todo, key=lambda path: -path.stat().st_size), copy, kept, jobs, say)  # about longest first
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return {path.stem: json.loads(kept[path.stem].read_text(encoding="utf-8")) for path in paths}


def with_outputs(chapter: nbformat.NotebookNode, outputs: list[list]) -> nbformat.NotebookNode:
    """Return the chapter with the outputs of its code cells, one list per cell, in their order."""
    cells = [cell for cell in chapter.cells if cell.cell_type == "code"]
    for number, (cell, shown) in enumerate(zip(cells, outputs, strict=True), 1):
        cell.outputs = [nbformat.from_dict(output) for output in shown]
        cell.execution_count = number
    return chapter


def package_digest(root: Path) -> str:
    """Return what outputs depend on besides a chapter: the package's files, Python, and the packages that compute."""
    digest = hashlib.sha256(platform.python_version().encode())
    for name in ("torch", "fbtriton", "numpy", "matplotlib"):
        digest.update(f"{name} {_version(name)}".encode())
    for path in sorted([*(root / "jfa").rglob("*.py"), *(root / "jfa").rglob("*.json")]):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def chapter_digest(path: Path, package: str) -> str:
    """Return the key of a chapter's outputs: its code and the package; its text may change freely."""
    code = [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps([package, code]).encode()).hexdigest()[:16]


def copy_course(root: Path, target: Path) -> Path:
    """Return a copy of the course to run in: nothing that a chapter writes, and no learner's answer, gets from one to the other."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in (name for name in _COPIED if (root / name).exists()):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, target / name)
    (target / "jfa").symlink_to(root / "jfa")
    (target / ".jfa").mkdir()
    return target


def environment(course: Path) -> dict[str, str]:
    """Return what a kernel of the book gets: caches in the copy's .jfa, one thread, and the package that is being documented."""
    env = lab.environment(course)
    env |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return env | {"JFA_COURSE": str(course), "PYTHONPATH": str(course), "MPLBACKEND": "agg", "COLUMNS": "100"}


def _run_all(paths: list[Path], course: Path, kept: dict[str, Path], jobs: int, say) -> None:
    """Run chapters, some at a time; the first that fails ends it. Those that had run by then are kept."""
    with ThreadPoolExecutor(jobs) as pool:  # the threads wait; the kernels are processes
        waiting = [pool.submit(_run_and_keep, path, course, kept[path.stem], say) for path in paths]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_and_keep(path: Path, course: Path, kept: Path, say) -> None:
    """Run one chapter; its outputs take the place of older ones."""
    started = time.monotonic()
    outputs = run(path, course)
    for old in kept.parent.glob(f"{path.stem}.*.json"):
        old.unlink()
    draft = kept.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(outputs), encoding="utf-8")
    draft.replace(kept)
    say(f"  ran {path.stem} in {time.monotonic() - started:.0f} s", flush=True)


def run(path: Path, course: Path) -> list[list]:
    """Run a chapter in a kernel of its own; the outputs of each code cell. Raises ChapterFailed."""
    chapter = read(path)
    resources = {"metadata": {"path": str(course / "notebooks")}}
    client = NotebookClient(chapter, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
    with open(course / f"{path.stem}.log", "w") as log:  # what the kernel says apart from the cells
        try:
            client.execute(env=environment(course), stderr=log)
        except (CellExecutionError, DeadKernelError) as error:
            raise ChapterFailed(f"{path.name} does not run:\n{error}\n{Path(log.name).read_text()[-2000:]}") from error
    return [cell.outputs for cell in chapter.cells if cell.cell_type == "code"]
