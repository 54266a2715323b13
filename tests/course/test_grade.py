"""Grading files: cells by tag, helpers, missing cells, two copies, submissions, and what the command prints and returns."""

import csv
import json
import os
import shutil
from xml.etree import ElementTree

import pytest

from jfa.course import catalog, cli, notebook
from jfa.course.grade import Source, grade
from jfa.course.notebook import Cell, insert_before, to_json

RIGHT = {
    "90.1": "def row_means(x, offsets):\n    n = torch.tensor(offsets).diff()\n"
    "    return torch.stack([x[a:b].sum(0) for a, b in zip(offsets, offsets[1:])]) / n.clamp(min=1)[:, None], n",
    "90.2": "def twice(x):\n    return x + x",
    "90.3": "answer = 42",
    "90.4": "def lengths_of(offsets):\n    out = [b - a for a, b in zip(offsets, offsets[1:])]\n"
    "    if min(out) < 0:\n        raise ValueError('offsets')\n    return out",
}
FILE = "90_toy"


def _write(folder, answers, suffix=".py", start=None):
    """An exercise file with these answers in place of the stubs."""
    book = notebook.read(start or folder / f"{FILE}.py")
    edited = book.with_sources({i: answers[c.exercise] for i, c in enumerate(book.cells) if c.exercise in answers})
    text = edited.text if suffix == ".py" else json.dumps(to_json(edited))
    (folder / f"{FILE}{suffix}").write_text(text)
    return folder / f"{FILE}{suffix}"


def _states(toy, source=None):
    return {r.exercise: r.state for r in grade(catalog.select([]), source or Source(toy))}


def test_answers_are_taken_from_their_tagged_cells(toy):
    _write(toy.exercises, {"90.2": RIGHT["90.2"], "90.3": "answer = 41"})
    assert _states(toy) == {"90.1": "not started", "90.2": "passed", "90.3": "wrong", "90.4": "not started"}


def test_an_ipynb_is_graded_alike(toy):
    _write(toy.exercises, RIGHT, ".ipynb")
    (toy.exercises / f"{FILE}.py").unlink()
    assert set(_states(toy).values()) == {"passed"}


@pytest.mark.parametrize("newer, older, passes", [(".py", ".ipynb", True), (".ipynb", ".py", False)])
def test_of_two_copies_the_newer_is_graded_and_named(toy, newer, older, passes):
    """JU-5"""
    ipynb = _write(toy.exercises, {}, ".ipynb")
    py = _write(toy.exercises, RIGHT, ".py")
    first, last = (ipynb, py) if newer == ".py" else (py, ipynb)
    os.utime(first, (1000, 1000))
    os.utime(last, (2000, 2000))
    result = grade([catalog.exercise("90.2")], Source(toy))[0]
    assert result.passed == passes
    assert any(f"graded {FILE}{newer}" in n and f"{FILE}{older} is older" in n for n in result.notes)


def test_missing_and_retyped_cells_are_said_to_be_missing(toy):
    """LE-15"""
    path = _write(toy.exercises, RIGHT)
    book = notebook.read(path)
    text = notebook.drop_cells(book, {next(i for i, c in enumerate(book.cells) if c.exercise == "90.1")}).text
    path.write_text(text.replace('# %% tags=["ex-90.3"]\nanswer', '# %% [markdown] tags=["ex-90.3"]\n# answer'))
    states = _states(toy)
    assert states == {"90.1": "missing", "90.2": "passed", "90.3": "missing", "90.4": "passed"}
    (toy.exercises / f"{FILE}.py").unlink()
    assert set(_states(toy).values()) == {"missing"}


def _insert(toy, before, source):
    path = toy.exercises / f"{FILE}.py"
    book = notebook.read(path)
    index = next(i for i, c in enumerate(book.cells) if c.exercise == before)
    path.write_text(insert_before(book, index, [Cell("code", source)]).text)


def test_an_answer_split_over_two_cells_is_whole(toy):
    _write(toy.exercises, {"90.2": "factor = 2"})
    path = toy.exercises / f"{FILE}.py"
    book = notebook.read(path)
    index = next(i for i, c in enumerate(book.cells) if c.exercise == "90.2") + 1
    part = Cell("code", "def twice(x):\n    return factor * x", ("ex-90.2",))
    path.write_text(insert_before(book, index, [part]).text)
    assert _states(toy)["90.2"] == "passed"
    assert cli.reset(["90.2"]) == 0
    assert _states(toy)["90.2"] == "not started" and "factor * x" not in path.read_text()


def test_helper_cells_run_and_may_fail(toy):
    _write(toy.exercises, {"90.2": "def twice(x):\n    return plus(x, x)"})
    _insert(toy, "90.2", "def plus(a, b):\n    return a + b")
    _insert(toy, "90.2", "%matplotlib inline\nundefined_name")
    result = grade([catalog.exercise("90.2")], Source(toy))[0]
    assert result.passed and any("NameError" in n for n in result.notes), result.text()


def test_numpy_in_a_helper_cell_is_no_fault_until_the_answer_uses_it(toy):
    _write(toy.exercises, {"90.1": RIGHT["90.1"]})
    _insert(toy, "90.1", "import numpy as np\n\ndef through_numpy(x):\n    return np.asarray(x)")
    assert _states(toy)["90.1"] == "passed"
    _write(toy.exercises, {"90.1": RIGHT["90.1"].replace("    n = ", "    through_numpy(x)\n    n = ")})
    assert _states(toy)["90.1"] == "wrong method"


def test_a_helper_below_the_answer_counts_too(toy):
    _write(toy.exercises, {"90.2": "def twice(x):\n    return plus(x, x)"})
    _insert(toy, "90.3", "def plus(a, b):\n    return a + b\n\nraise RuntimeError('cells below do not run')")
    assert _states(toy)["90.2"] == "passed"


def test_a_name_used_again_later_does_no_harm(toy):
    """LE-16"""
    _write(
        toy.exercises, {"90.2": "BLOCK = 2\n\ndef twice(x):\n    return x * BLOCK", "90.3": "BLOCK = 64\nanswer = 42"}
    )
    assert _states(toy)["90.2"] == "passed"


def test_the_notebooks_own_checks_and_progress_are_ignored(toy):
    path = _write(toy.exercises, {"90.2": "def twice(x):\n    return x"})
    toy.state.mkdir()
    (toy.state / "progress.json").write_text('{"states": {"90.2": "passed"}}')
    path.write_text(path.read_text().replace("import torch\n", "import torch\n\ncheck = lambda *a: 'passed'\n", 1))
    assert _states(toy)["90.2"] == "wrong"


def test_a_wrong_answer_does_not_stop_the_others(toy):
    """LE-11"""
    _write(toy.exercises, RIGHT | {"90.2": "def twice(x):\n    while True: pass"})
    assert _states(toy) == {"90.1": "passed", "90.2": "wrong", "90.3": "passed", "90.4": "passed"}


def test_the_command_fails_until_everything_asked_passes(toy, capsys):
    assert cli.grade(["90"]) == 1
    text = capsys.readouterr().out
    assert text.count("not started") == 5 and "0 of 4 passed (4 not started)" in text
    assert cli.grade(["90", "--solutions"]) == 0
    assert "4 of 4 passed, seed 0" in capsys.readouterr().out
    _write(toy.exercises, {"90.3": "answer = 42"})
    assert cli.grade(["90.3", "--seed", "7"]) == 0
    assert "1 of 1 passed, seed 7" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["91"], ["90.9"], ["x"], ["90.x"]])
def test_what_does_not_exist_is_named(toy, capsys, words):
    assert cli.grade(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("jfa grade: ") and error.count("\n") == 1


def test_results_as_files(toy, tmp_path, capsys):
    _write(toy.exercises, RIGHT | {"90.2": "def twice(x):\n    return x + 2\n", "90.3": "answer = '=cmd()'"})
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "junit", "csv")}
    assert cli.grade([a for kind, path in files.items() for a in (f"--{kind}", str(path))]) == 1
    results = json.loads(files["json"].read_text())[0]["results"]
    assert [r["state"] for r in results] == ["passed", "wrong", "wrong", "passed"]
    assert results[1]["recognised"] == "Two is added." and results[1]["caught_by"] == "values"
    suite = ElementTree.parse(files["junit"]).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    rows = list(csv.DictReader(files["csv"].open()))
    assert [r["passed"] for r in rows] == ["1", "0", "0", "1"] and rows[0]["exercise"] == "90.1"
    assert not any(v.startswith(("=", "+", "@")) for r in rows for v in r.values())


def test_a_folder_without_submissions_is_said_to_be_one(toy, tmp_path, capsys):
    assert cli.grade(["--from", str(tmp_path / "nowhere")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    folder = tmp_path / "handed in"
    folder.mkdir()
    (folder / f"{FILE}.py").write_text("")
    assert cli.grade(["--from", str(folder)]) == 2
    assert "one for each learner is expected" in capsys.readouterr().err


def test_submissions_are_graded_by_learner(toy, tmp_path, capsys):
    folder = tmp_path / "handed-in"
    for learner, answers in (("ada", RIGHT), ("bob", {"90.3": "answer = 1"}), ("cyd", {})):
        target = folder / learner / ("exercises" if learner == "ada" else "")
        target.mkdir(parents=True)
        if learner != "cyd":
            _write(target, answers, ".ipynb" if learner == "bob" else ".py", toy.exercises / f"{FILE}.py")
    report = tmp_path / "grades.csv"
    assert cli.grade(["--from", str(folder), "--seed", "3", "--csv", str(report)]) == 1
    rows = list(csv.DictReader(report.open()))
    passed = {name: sum(int(r["passed"]) for r in rows if r["learner"] == name) for name in ("ada", "bob", "cyd")}
    assert passed == {"ada": 4, "bob": 0, "cyd": 0}
    assert {r["state"] for r in rows if r["learner"] == "cyd"} == {"missing"}


def test_the_interpreter_at_work_grades_whatever_kernels_are_registered(toy, tmp_path, monkeypatch):
    """JU-6"""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text('{"argv": ["/nowhere/python"], "display_name": "Python 3", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", "/nowhere")
    _write(toy.exercises, {"90.3": "import sys\nanswer = 42 if sys.executable else 0"})
    assert _states(toy)["90.3"] == "passed"


def test_a_submission_cannot_bring_its_own_set_up_or_judge(toy, tmp_path):
    """Answers are spliced into the pristine file: shipped cells are taken as shipped."""
    folder = tmp_path / "eve"
    folder.mkdir()
    path = _write(folder, {"90.2": "def twice(x):\n    return x"}, start=toy.exercises / f"{FILE}.py")
    text = path.read_text().replace("import torch\n", "import torch\nimport sys\nsys.exit(0)\n", 1)
    path.write_text(text)
    shutil.copy(path, folder / "unrelated.py")
    assert _states(toy, Source(toy, "submission", folder))["90.2"] == "wrong"
