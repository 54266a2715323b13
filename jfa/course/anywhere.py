"""Write a chapter or its exercises as one .ipynb that fetches the course itself, for Colab or any Jupyter without a
checkout."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jfa.course import notebook
from jfa.course.markdown import replace_links
from jfa.course.notebook import Cell, Notebook
from jfa.course.paths import Course

KINDS = ("notebooks", "exercises")
_BROUGHT = (
    "torch",
    "numpy",
    "matplotlib",
    "greenlet",
)  # installed where they are missing; whatever version is there stays

# One `try`, so that nothing of it becomes a part of an answer. `import jfa` succeeds wherever the course is installed.
_SETUP = """\
# Set-up. Where the course is installed this does nothing; elsewhere (on Colab) it fetches the course and what it needs.
REPOSITORY = {repository!r}
try:
    import jfa
except ImportError:
    import importlib.metadata, importlib.util, os, subprocess, sys

    if not REPOSITORY:
        raise RuntimeError("say where the course is: set REPOSITORY above to an address that git can clone") from None
    course = os.path.abspath("jfa-course")
    if not os.path.isdir(course):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, course], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    missing = [need for name, need in {needs!r}.items() if importlib.util.find_spec(name) is None]
    if missing:
        subprocess.run([*pip, "install", *missing], check=True)
    try:
        triton = importlib.metadata.version("fbtriton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    if triton != {fbtriton!r}:  # the Triton with TLX takes the place of the other one
        subprocess.run([*pip, "uninstall", "-y", "triton"], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", "fbtriton=={fbtriton}"], check=True)
    sys.path.insert(0, course)
    os.environ["JFA_COURSE"] = course
    os.environ["PYTHONPATH"] = course + os.pathsep + os.environ.get("PYTHONPATH", "")
    os.chdir(os.path.join(course, {folder!r}))
"""


@dataclass(frozen=True)
class Written:
    """A written notebook, and the address that its set-up cell clones from ("" if unknown)."""

    path: Path
    repository: str


def find(course: Course, number: int, kind: str) -> Path:
    """Return the file of a chapter in notebooks/ or exercises/; raises LookupError with what there is."""
    folder = course.root / kind
    files = {int(path.name[:2]): path for path in sorted(folder.glob("[0-9][0-9]_*.py"))}
    if number not in files:
        there = ", ".join(f"{n:02}" for n in files) or "nothing"
        raise LookupError(f"there is no chapter {number:02} in {folder}; there is {there}")
    return files[number]


def repository_of(root: Path) -> str:
    """Return the address from which anybody can clone the checkout: its remote "origin" as https, "" if that is none."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return as_https(asked.stdout.strip()) if asked.returncode == 0 else ""


def as_https(remote: str) -> str:
    """Return a remote's address in its https form, "" for addresses of one machine only."""
    ssh = re.fullmatch(r"(?:ssh://)?git@([^:/]+)[:/](.+)", remote)
    if ssh:
        return f"https://{ssh[1]}/{ssh[2]}"
    return re.sub(r"^https://[^@/]+@", "https://", remote) if remote.startswith("https://") else ""  # no user, no token


def needs(root: Path) -> tuple[dict[str, str], str]:
    """Return ({module: requirement} of what is installed where it is missing, fbtriton's pin), from pyproject.toml and the lock."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = project["dependencies"] + [row for extra in project["optional-dependencies"].values() for row in extra]
    named = {re.match(r"[A-Za-z0-9_.-]+", row)[0]: row for row in reversed(rows)}
    pin = re.search(r"^fbtriton==(\S+)$", (root / "requirements.txt").read_text(encoding="utf-8"), flags=re.M)
    return {name: named[name] for name in _BROUGHT}, pin[1]


def standalone(content: Notebook, course: Course, source: Path, repository: str) -> dict:
    """Return the content of an .ipynb: a set-up cell, then the file's cells, with links that lead to the repository."""
    wanted, fbtriton = needs(course.root)
    kind = source.parent.name
    code = _SETUP.format(repository=repository, needs=wanted, fbtriton=fbtriton, folder=kind)
    cells = [
        Cell("markdown", _linked(c.source, f"{kind}/{source.name}", repository)) if c.kind == "markdown" else c
        for c in content.cells
    ]
    setup = Cell("code", code.rstrip("\n"))
    return notebook.to_json(Notebook((setup, *(Cell(c.kind, c.source, c.tags) for c in cells)), ""))


def _linked(text: str, file: str, repository: str) -> str:
    """Return Markdown whose relative links lead to the repository's pages on GitHub; elsewhere they become words."""
    github = re.fullmatch(r"(https://github\.com/[^/]+/[^/]+?)(?:\.git)?/?", repository)

    def replace(image: str, words: str, target: str) -> str:
        path, _, anchor = target.partition("#")
        there = PurePosixPath(file).parent.joinpath(path).as_posix()
        while "/../" in f"/{there}":
            there = re.sub(r"(^|/)[^/]+/\.\./", r"\1", there, count=1)
        if not github:
            return words
        return f"{image}[{words}]({github[1]}/blob/HEAD/{there}{'#' + anchor if anchor else ''})"

    return replace_links(text, replace)


def write(
    course: Course, number: int, kind: str = "notebooks", to: Path | None = None, repository: str = ""
) -> Written:
    """Write a chapter (or its exercises) as an .ipynb; never over an existing file.

    Args:
        to: the file, or a folder for NN_topic.ipynb; the current folder if left out.
        repository: the address to clone from; the checkout's own if left out.

    Raises:
        LookupError: there is no such chapter. FileExistsError: the file exists already.
    """
    source = find(course, number, kind)
    repository = repository or repository_of(course.root)
    path = to if to is not None and to.suffix == ".ipynb" else (to or Path.cwd()) / f"{source.stem}.ipynb"
    text = json.dumps(standalone(notebook.read(source), course, source, repository), indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise FileExistsError(f"{path} is there already: it was left as it is") from None
    return Written(path, repository)
