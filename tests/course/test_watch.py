"""`jfa watch` sees real saves, whoever makes them, checks what they changed, and ends cleanly."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jfa import cli
from jfa.course import catalog, notebook, report, state, watch
from tests.support import copy_course

WRONG = "def twice(x):\n    return x * 3\n"
RIGHT = "def twice(x):\n    return x + x\n"


@pytest.fixture
def watched(toy):
    """A watch over the toy chapter, and what it has said so far."""
    said: list[str] = []
    watching = watch.Watch(toy, catalog.select(["90"]), said.append)
    watching.begin()
    said.clear()
    return watching, said


def with_answer(path: Path, number: str, source: str) -> str:
    """The text of a file with another answer to an exercise."""
    content = notebook.read(path)
    at = next(i for i, cell in enumerate(content.cells) if cell.exercise == number)
    return content.with_sources({at: source}).text


# -- ways to save ------------------------------------------------------------------------------------------------------


def in_place(path, text):
    """As nano does: the file is emptied and written."""
    path.write_text(text)


def by_rename(path, text):
    """As many editors do: a finished file takes the place of the old one."""
    handle, draft = tempfile.mkstemp(dir=path.parent)
    os.write(handle, text.encode())
    os.close(handle)
    os.replace(draft, path)


def with_backup(path, text):
    """As vim does: the old file moves away, then the new one is written under its name."""
    os.rename(path, f"{path}~")
    path.write_text(text)


def by_jupyter(path, text):
    """As JupyterLab does: jupytext's contents manager saves a notebook model into the .py file."""
    import jupytext
    from jupytext import TextFileContentsManager

    manager = TextFileContentsManager(root_dir=str(path.parent))
    model = manager.get(path.name, type="notebook")
    model["content"] = jupytext.reads(text, "py:percent")
    manager.save(model, path.name)


SAVES = [in_place, by_rename, with_backup, by_jupyter]


@pytest.mark.parametrize("save", SAVES, ids=lambda f: f.__name__)
def test_a_save_is_checked_and_the_next_exercise_shown_once_it_passes(watched, toy, save):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    assert not watching.look() and said == []
    save(path, with_answer(path, "90.2", WRONG))
    assert watching.look()
    printed = "\n".join(said)
    assert "90_toy.py was saved" in printed and "90.2 Twice: NOT RIGHT YET" in printed
    assert "90.1" not in printed and "now 90.2" in printed, "only what changed is checked, and it stays the current one"
    assert not watching.look(), "a save is seen once"
    said.clear()
    save(path, with_answer(path, "90.2", RIGHT))
    assert watching.look()
    printed = "\n".join(said)
    assert "90.2 Twice: PASSED" in printed and f"1 of {len(watching.exercises)} exercises passed; now 90.3" in printed
    assert state.states(toy)["90.2"] == report.PASSED


def test_the_place_of_the_next_exercise_is_its_line(watched, toy):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    in_place(path, with_answer(path, "90.2", RIGHT))
    watching.look()
    (place,) = re.findall(r"exercises/90_toy\.py:(\d+)", "\n".join(said))
    assert path.read_text().splitlines()[int(place) - 1] == '# %% tags=["ex-90.3"]'


def test_an_ipynb_that_appears_is_watched(watched, toy):
    watching, said = watched
    content = notebook.to_json(notebook.read(toy.exercises / "90_toy.py"))
    import nbformat

    new = toy.exercises / "90_toy.ipynb"
    nbformat.write(nbformat.from_dict(content), new)
    future = time.time() + 5  # newer than the .py, whatever the file system's clock
    os.utime(new, (future, future))
    assert watching.look()
    for source, words in ((WRONG, "90.2 Twice: NOT RIGHT YET"), (RIGHT, "90.2 Twice: PASSED")):
        said.clear()
        new.write_text(with_answer(new, "90.2", source))
        future += 5
        os.utime(new, (future, future))
        assert watching.look() and words in "\n".join(said)
    assert "exercises/90_toy.ipynb    a hint" in "\n".join(said)


def test_a_save_that_changes_no_answer_checks_the_current_one_again(watched, toy):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    path.write_text(with_answer(path, "90.2", WRONG))
    watching.look()
    said.clear()
    path.write_text(path.read_text() + "\n# %% [markdown]\n# A note of mine.\n")
    assert watching.look() and "90.2 Twice: NOT RIGHT YET" in "\n".join(said)


def test_a_file_that_is_no_notebook_for_a_moment_is_told_and_waited_for(watched, toy):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    text = with_answer(path, "90.2", RIGHT)
    path.write_bytes(b"\xff\xfe broken")
    assert watching.look() and "is not UTF-8 text" in said[-1]
    path.write_text(text)
    said.clear()
    assert watching.look() and "90.2 Twice: PASSED" in "\n".join(said)


def test_a_file_that_is_away_is_not_a_save(watched, toy):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    away = path.with_suffix(".away")
    path.rename(away)
    assert not watching.look() and said == []
    away.rename(path)
    assert not watching.look() and said == [], "it came back as it was"


def test_a_save_in_two_halves_is_read_whole(watched, toy):
    watching, said = watched
    path = toy.exercises / "90_toy.py"
    text = with_answer(path, "90.2", RIGHT)
    begun = threading.Event()

    def slowly():
        with path.open("w") as file:
            file.write(text[: len(text) // 3])
            file.flush()
            begun.set()
            time.sleep(watch.SETTLED / 2)
            file.write(text[len(text) // 3 :])

    writer = threading.Thread(target=slowly)
    writer.start()
    begun.wait()
    assert watching.look()
    writer.join()
    assert "90.2 Twice: PASSED" in "\n".join(said) and "missing" not in "\n".join(said).lower()


def test_swap_files_of_editors_are_no_saves(watched, toy):
    watching, said = watched
    for name in (".90_toy.py.swp", "90_toy.py~", "#90_toy.py#", "4913", "notes.py"):
        (toy.exercises / name).write_text("x")
    assert not watching.look() and said == []


def test_what_was_passed_before_is_passed_over_and_all_done_is_said(toy):
    said: list[str] = []
    solutions = toy.root / "solutions" / "90_toy.py"
    shutil.copy(solutions, toy.exercises / "90_toy.py")
    assert cli.main(["grade", "90.1", "90.2"]) == 0
    watching = watch.Watch(toy, catalog.select(["90"]), said.append)
    assert watching.current.id == "90.3"
    watching.begin()
    printed = "\n".join(said)
    assert "90.1 " not in printed and "90.2 " not in printed, "passed before"
    assert printed.count("PASSED") == len(watching.exercises) - 2
    assert said[-1] == f"\nall done: {len(watching.exercises)} of {len(watching.exercises)} exercises passed"


# -- the command -------------------------------------------------------------------------------------------------------


class Session:
    """`jfa watch` in a process of its own, over a copy of the course."""

    def __init__(self, folder: Path, *words: str):
        self.course = copy_course(folder)
        env = {**os.environ, "JFA_COURSE": str(folder), "PYTHONPATH": str(folder)}
        command = [sys.executable, "-m", "jfa", "watch", *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "bufsize": 0}
        self.process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **streams)
        self.printed = ""

    def wait_for(self, words: str, seconds: float = 180) -> None:
        """Read until the words were printed."""
        until = time.monotonic() + seconds
        while words not in self.printed:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"{words!r} was not printed, but: {self.printed}"
            self.printed += data.decode()

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to the whole group. The exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.printed += self.process.stdout.read().decode()
        return self.process.wait(60)


@pytest.fixture
def session(tmp_path):
    """Start a session; what is left of it is ended."""
    started = []

    def start(*words):
        started.append(Session(tmp_path, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        one.process.stdout.close()


def test_the_command_follows_saves_and_ctrl_c_ends_it_cleanly(session):
    one = session("1.1", "1.2")
    one.wait_for("now 1.1 Offsets from lengths")
    path = one.course / "exercises" / "01_packing.py"
    solution = next(c for c in notebook.read(one.course / "solutions" / "01_packing.py").cells if c.exercise == "1.1")
    by_rename(path, with_answer(path, "1.1", solution.source))
    one.wait_for("1 of 2 exercises passed; now 1.2")
    assert one.interrupt() == 0
    assert one.printed.endswith("\nstopped; 1 of 2 exercises passed\n") and "Traceback" not in one.printed


def test_ctrl_c_while_an_answer_runs_ends_at_once_and_leaves_no_process(session):
    one = session("1.1")
    one.wait_for("now 1.1")
    path = one.course / "exercises" / "01_packing.py"
    endless = "def offsets_from_lengths(lengths):\n    while True:\n        pass\n"
    in_place(path, with_answer(path, "1.1", endless))
    one.wait_for("was saved")
    time.sleep(1)  # into the answer's endless loop; wherever the interrupt falls, it must be clean
    assert one.interrupt() == 0
    assert one.printed.endswith("\nstopped; 0 of 1 exercises passed\n") and "Traceback" not in one.printed
    left = subprocess.run(["pgrep", "-f", str(one.course)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in left if pid != str(os.getpid())] == []


def test_help_has_a_worked_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["watch", "--help"])
    assert "example: chapter 2" in capsys.readouterr().out


def test_an_exercise_that_is_not_there_is_one_line(capsys):
    assert cli.main(["watch", "1.77"]) == 2
    assert capsys.readouterr().err.startswith("jfa watch: no exercise 1.77")
