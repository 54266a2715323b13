"""``jfa lab``: JupyterLab with the chapters opening as notebooks, and nothing written outside the checkout.

Standard library only, so that it starts at once. The settings are in ``jupyter/``; the files that Jupyter, IPython,
matplotlib and Triton write go into the ignored folder ``.jfa/``.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

FIRST_CHAPTER = "notebooks/00_start_here.py"

# variable -> folder inside .jfa/
STATE_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "jupyter/config",
    "JUPYTER_DATA_DIR": "jupyter/data",
    "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
    "JUPYTERLAB_SETTINGS_DIR": "jupyter/lab/settings",
    "JUPYTERLAB_WORKSPACES_DIR": "jupyter/lab/workspaces",
    "IPYTHONDIR": "ipython",
    "MPLCONFIGDIR": "cache/matplotlib",
    "TRITON_CACHE_DIR": "cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "XDG_CACHE_HOME": "cache",  # completion (parso, jedi) and whatever else caches
}


def find_root(start: Path | None = None) -> Path | None:
    """Return the checkout of the course: the nearest folder upwards with Lab settings of ours, else this package's."""
    start = Path.cwd() if start is None else Path(start)
    for folder in (start, *start.parents, Path(__file__).resolve().parent.parent):
        if (folder / "jupyter" / "labconfig").is_dir() and (folder / "jupytext.toml").is_file():
            return folder
    return None


def environment(root: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that JupyterLab and its kernels get: ``base`` with the state folders of ``root``."""
    env = dict(os.environ if base is None else base)
    for name, folder in STATE_FOLDERS.items():
        env[name] = str(root / ".jfa" / folder)
    env["JUPYTER_CONFIG_PATH"] = str(root / "jupyter")
    # Terminals and kernels find this environment's `jfa` and `python` even if it was never activated.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def command(root: Path, chapter: str | None = None, options: list[str] = ()) -> list[str]:
    """Return the command line that opens ``chapter`` (a path inside ``root``) with the checkout as JupyterLab's root."""
    chapter = FIRST_CHAPTER if chapter is None else chapter
    page = f"/lab/tree/{chapter}" if (root / chapter).is_file() else "/lab"
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}", f"--LabApp.default_url={page}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # containers; the server still listens on this machine only and asks for its token
    return [*words, *options]


def main(argv: list[str]) -> int:
    """Become JupyterLab; options that are not ours are its. Returns (1 or 2) only if it cannot be started."""
    parser = argparse.ArgumentParser(
        prog="jfa lab",
        description="Open JupyterLab at the first chapter. Other options go to JupyterLab: --no-browser, --port=8890",
    )
    parser.add_argument("chapter", nargs="?", help=f"the file to open (default {FIRST_CHAPTER})")
    known, options = parser.parse_known_args(argv)
    root = find_root()
    if root is None:
        print("jfa lab: run it inside a checkout of the course (where jupytext.toml is)", file=sys.stderr)
        return 2
    missing = [name for name in ("jupyterlab", "jupytext") if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(
            f"jfa lab: {names} not installed here; run `make lab` once, or pip install -r requirements.txt",
            file=sys.stderr,
        )
        return 1
    chapter = known.chapter
    if chapter is not None:
        path = Path(chapter).resolve()
        if not path.is_file() or not path.is_relative_to(root):
            print(f"jfa lab: {chapter} is no file of {root}", file=sys.stderr)
            return 2
        chapter = path.relative_to(root).as_posix()
    os.chdir(root)
    words = command(root, chapter, options)
    # JupyterLab takes this process's place: Ctrl-C and a kill reach it directly, and nothing is left behind.
    os.execve(words[0], words, environment(root))
