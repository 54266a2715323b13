"""Every chapter and every solution runs from top to bottom, and saving one in JupyterLab changes no byte of it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path

import pytest

from jfa.course import notebook
from tests.support import ROOT, copy_course

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
SOLUTIONS = sorted((ROOT / "solutions").glob("[0-9]*.py"))
EXERCISES = sorted((ROOT / "exercises").glob("[0-9]*.py"))
SECONDS = 300  # a chapter that hangs; the longest takes a small part of it


def name(path: Path) -> str:
    """notebooks/00_start_here"""
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(scope="module")
def forkserver():
    """A process that has imported the slow packages once; each chapter runs in a fork of it, so none sees another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton.language", "matplotlib.pyplot", "IPython.display"])
    return context


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the course, which the tests run in."""
    return copy_course(tmp_path_factory.mktemp("course"))


WIDEST = 100  # columns of a code cell: what JupyterLab shows beside its sidebar without scrolling


@pytest.mark.parametrize("path", CHAPTERS + SOLUTIONS + EXERCISES, ids=name)
def test_code_cells_are_not_too_wide_to_read(path):
    cells = [c for c in notebook.read(path).cells if c.kind == "code"]
    wide = [line for c in cells for line in c.source.split("\n") if len(line) > WIDEST]
    assert not wide, f"{name(path)}: {len(wide)} lines of code are wider than {WIDEST} columns, such as {wide[0]}"


def run_as_script(path: str, course: str, results) -> None:
    """In the child: run the file in its folder, as a kernel would; report the traceback, '' if there was none."""
    import builtins

    from IPython.display import display

    builtins.display = display  # a notebook has it without an import
    os.environ["JFA_COURSE"] = course
    os.chdir(Path(path).parent)
    sys.path.insert(0, course)
    try:
        runpy.run_path(path, run_name="__main__")
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


@pytest.mark.parametrize("path", [*CHAPTERS, *SOLUTIONS], ids=name)
def test_runs_from_top_to_bottom(path, forkserver, course):
    results = forkserver.Queue()
    copy = course / path.relative_to(ROOT)
    child = forkserver.Process(target=run_as_script, args=(str(copy), str(course), results))
    child.start()
    try:
        assert results.get(timeout=SECONDS) == ""
    finally:
        child.join(5)
        child.kill()


@pytest.mark.parametrize("path", CHAPTERS, ids=name)
def test_runs_as_a_notebook(path, course, tmp_path, monkeypatch):
    import jupytext
    from nbclient import NotebookClient

    monkeypatch.setenv("JFA_COURSE", str(course))
    monkeypatch.setenv("PYTHONPATH", str(course))
    for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    notebook = jupytext.read(path)
    resources = {"metadata": {"path": str(course / path.parent.name)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", [*CHAPTERS, *EXERCISES, *SOLUTIONS], ids=name)
def test_run_all_and_save_change_no_byte(path, tmp_path):
    """What JupyterLab's save does, without the browser: outputs, counts and the kernel's description are dropped."""
    from jupytext import TextFileContentsManager
    from nbformat.v4 import new_output

    folder = tmp_path / path.parent.name
    folder.mkdir()
    shutil.copy(path, folder)
    shutil.copy(ROOT / "jupytext.toml", tmp_path)
    manager = TextFileContentsManager(root_dir=str(tmp_path))
    model = manager.get(f"{path.parent.name}/{path.name}", type="notebook")
    notebook = model["content"]
    notebook.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python", "version": "3.13.0", "file_extension": ".py"}
    for count, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.execution_count = count + 1
        cell.outputs = [new_output("stream", name="stdout", text="3\n")]
        cell.metadata["scrolled"] = True
    manager.save(model, f"{path.parent.name}/{path.name}")
    assert (folder / path.name).read_text() == path.read_text()
