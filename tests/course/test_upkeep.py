"""Nothing a learner wrote is lost: reset, update, release, progress and hints."""

import json
import subprocess

import pytest

from jfa.course import catalog, cli, notebook, release, state, upkeep
from jfa.course.notebook import Cell, insert_before, to_json
from jfa.course.paths import Course
from jfa.course.report import Result
from tests.course.test_grade import FILE, RIGHT, _insert, _write
from tests.support import copy_course


def _file(toy):
    return toy.exercises / f"{FILE}.py"


def test_reset_restores_one_cell_and_keeps_a_backup(toy, capsys):
    pristine = _file(toy).read_text()
    _write(toy.exercises, {"90.2": "def twice(x):\n    return 'mine'", "90.3": "answer = 'kept'"})
    mine = _file(toy).read_text()
    state.record(toy, Result("90.2", "", "passed"))
    assert cli.reset(["90.2"]) == 0
    text = _file(toy).read_text()
    assert "'mine'" not in text and "answer = 'kept'" in text
    backups = list((toy.state / "backups").rglob("*.py"))
    assert [b.read_text() for b in backups] == [mine] and "backups" in capsys.readouterr().out
    assert "90.2" not in state.states(toy)
    assert cli.reset(["90.3"]) == 0
    assert _file(toy).read_text() == pristine and len(list((toy.state / "backups").rglob("*.py"))) == 2


def test_reset_of_a_missing_cell_changes_nothing(toy, capsys):
    _file(toy).write_text(_file(toy).read_text().replace('tags=["ex-90.2"]', ""))
    before = _file(toy).read_text()
    assert cli.reset(["90.2"]) == 2
    assert "jfa update" in capsys.readouterr().err and _file(toy).read_text() == before


def _new_course_version(toy):
    """The course moves on: another text, a new exercise cell's given code, a changed set-up."""
    path = toy.solutions / f"{FILE}.py"
    text = path.read_text().replace("## 90.2 Twice", "## 90.2 Twice, said better")
    path.write_text(text.replace("import torch\n", "import math\nimport torch\n", 1))


@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
def test_update_carries_answers_and_own_cells_into_the_new_text(toy, suffix, capsys):
    assert cli.update([]) == 0  # remembers the present skeleton
    _write(toy.exercises, {"90.2": RIGHT["90.2"], "90.4": RIGHT["90.4"]})
    _insert(toy, "90.2", "def my_helper():\n    return 'precious'")
    book = notebook.read(_file(toy))
    _file(toy).write_text(insert_before(book, len(book.cells), [Cell("markdown", "my last note")]).text)
    if suffix == ".ipynb":
        (toy.exercises / f"{FILE}.ipynb").write_text(json.dumps(to_json(notebook.read(_file(toy)))))
        _file(toy).unlink()
    _new_course_version(toy)
    capsys.readouterr()
    assert cli.update([]) == 0
    assert "2 answers carried over" in capsys.readouterr().out
    new = notebook.read(toy.exercises / f"{FILE}{suffix}")
    sources = [c.source for c in new.cells]
    assert new.answer("90.2").source == RIGHT["90.2"] and "YOUR CODE" in new.answer("90.3").source
    assert any("said better" in s for s in sources) and not any(s.endswith("## 90.2 Twice") for s in sources)
    assert sum("import torch" in s for s in sources) == 1 and any("import math" in s for s in sources)
    helper = sources.index("def my_helper():\n    return 'precious'")
    assert new.cells[helper + 1].exercise == "90.2" and sources[-1] == "my last note"
    assert len(list((toy.state / "backups").rglob(f"*{suffix}"))) == 1
    assert cli.update([]) == 0 and "up to date" in capsys.readouterr().out


def test_update_without_a_memory_keeps_code_that_defines_something(toy):
    _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    _insert(toy, "90.2", "def my_helper():\n    return 1")
    _new_course_version(toy)
    assert cli.update([]) == 0
    text = _file(toy).read_text()
    assert "my_helper" in text and RIGHT["90.2"] in text and text.count("import torch") == 1


@pytest.mark.parametrize("stem", catalog.stems())
def test_a_first_update_changes_no_untouched_chapter(stem, tmp_path):
    """Nothing remembers older skeletons yet, and a chapter's own helper cells define functions too."""
    course = Course(copy_course(tmp_path))
    before = (course.exercises / f"{stem}.py").read_text(encoding="utf-8")
    assert upkeep.update(course, stem) == ("up to date", None)
    assert (course.exercises / f"{stem}.py").read_text(encoding="utf-8") == before


def test_update_brings_back_a_deleted_file_and_stops_at_conflicts(toy, capsys):
    pristine = _file(toy).read_text()
    _file(toy).unlink()
    assert cli.update([]) == 0 and _file(toy).read_text() == pristine
    _file(toy).write_text("<<<<<<< HEAD\n" + pristine)
    assert cli.update([]) == 1 and "conflict" in capsys.readouterr().out


def _commit(folder, message):
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), "add", "-A"], check=True)
    subprocess.run(["git", "-C", str(folder), *author, "commit", "-qm", message], check=True)


def test_update_pulls_although_the_exercises_were_edited(toy, tmp_path_factory, monkeypatch, capsys):
    upstream, mine = toy.root, Course(tmp_path_factory.mktemp("mine") / "clone")
    subprocess.run(["git", "init", "-q", str(upstream)], check=True)
    (upstream / "jfa" / "keep").write_text("")
    (upstream / ".gitignore").write_text(".jfa/\n")
    _commit(upstream, "one")
    subprocess.run(["git", "clone", "-q", str(upstream), str(mine.root)], check=True)
    _write(mine.exercises, {"90.2": RIGHT["90.2"]})
    _new_course_version(toy)
    upkeep.make_exercises(toy)
    _commit(upstream, "two")
    monkeypatch.setenv("JFA_COURSE", str(mine.root))
    assert cli.update(["--pull"]) == 0
    text = _file(mine).read_text()
    assert "said better" in text and RIGHT["90.2"] in text and "1 answer carried over" in capsys.readouterr().out
    edited = _file(mine).read_text()
    (mine.solutions / f"{FILE}.py").write_text("in the way of the next pull")
    _new_course_version(toy)
    (toy.solutions / f"{FILE}.py").write_text((toy.solutions / f"{FILE}.py").read_text() + "\n# more\n")
    _commit(upstream, "three")
    assert cli.update(["--pull"]) == 2
    assert "git pull failed" in capsys.readouterr().err and _file(mine).read_text() == edited


def test_hints_go_one_further_at_each_call(toy, capsys):
    for expected in ("Hint 1 of 2", "Hint 2 of 2", "Hint 2 of 2"):
        assert cli.hint(["90.2"]) == 0
        assert expected in capsys.readouterr().out
    assert cli.hint(["90.2", "1"]) == 0 and "Hint 1 of 2" in capsys.readouterr().out
    assert cli.hint(["90.2", "7"]) == 2 and cli.hint(["90.77"]) == 2


def test_progress_shows_a_bar_a_chapter(toy, capsys):
    state.record(toy, Result("90.2", "", "passed"))
    state.record(toy, Result("90.2", "", "wrong"))
    state.record(toy, Result("90.1", "", "wrong"))
    assert cli.progress([]) == 0
    line = capsys.readouterr().out
    assert "90 toy" in line and "[#####...............] 1 of 4 passed" in line and "in work: 90.1" in line


def test_a_broken_progress_file_is_no_obstacle(toy, capsys):
    toy.state.mkdir()
    for content in ("{", "[]", '{"states": 3, "hints": {"90.1": "x"}}'):
        (toy.state / "progress.json").write_text(content)
        assert cli.progress([]) == 0 and "0 of 4 passed" in capsys.readouterr().out
        assert state.states(toy) == {}


@pytest.fixture
def checkout(toy):
    """The toy course with a copy of its check module, as a checkout has it."""
    target = toy.root / "jfa" / "course" / "checks"
    target.mkdir(parents=True)
    source = catalog.checks.__path__[0]
    (target / f"{FILE}.py").write_text(open(f"{source}/{FILE}.py").read())
    (toy.root / "README.md").write_text("readme")
    (toy.root / ".jfa").mkdir()
    (toy.root / ".jfa" / "progress.json").write_text("{}")
    return toy


def test_a_release_holds_no_answers(checkout, tmp_path_factory, capsys):
    target = tmp_path_factory.mktemp("out") / "release"
    _write(checkout.exercises, RIGHT)
    assert cli.release([str(target), "--without-solutions"]) == 0
    names = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert names == {
        "README.md",
        f"exercises/{FILE}.py",
        f"jfa/course/skeletons/{FILE}.py",
        f"jfa/course/checks/{FILE}.py",
    }
    solution = (checkout.solutions / f"{FILE}.py").read_text()
    stub = (target / "exercises" / f"{FILE}.py").read_text()
    lines = [
        s.strip()
        for s in solution.split("\n")
        if len(s.strip()) > 25 and s not in stub.split("\n") and "SOLUTION" not in s
    ]
    assert lines
    for path in target.rglob("*.py"):
        assert not any(line in path.read_text() for line in lines), path
    assert "BEGIN SOLUTION" not in stub and "return x + x" not in stub
    compile((target / "jfa/course/checks" / f"{FILE}.py").read_text(), "checks", "exec")
    assert cli.release([str(target)]) == 2 and "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["grade", "--solutions"], ["mutants"], ["strip"], ["strip", "--check"]])
def test_what_needs_solutions_says_that_there_are_none(toy, command, capsys):
    for path in toy.solutions.glob("*.py"):
        path.unlink()
    assert getattr(cli, command[0])(command[1:]) == 2
    said = capsys.readouterr()
    assert "handed out without them" in said.err and not said.out


def test_check_modules_lose_their_answers_whatever_their_form():
    source = (
        'RIGHT = """\ndef f():\n    return 1  # ü\n"""\nOTHER = 3\nE = [Exercise(variants=(RIGHT, "def f(): return 2"),\n'
        '    tol=OTHER, mutants=(Mutant("a", edit=("ü return 1", "x")), Mutant("b", source="def f(): return 9")))]\n'
    )
    clean = release.without_answers(source)
    assert "return 1" not in clean and "return 2" not in clean and "return 9" in clean and "OTHER = 3" in clean
    compile(clean, "checks", "exec")
