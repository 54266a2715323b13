"""Submissions that are odd, greedy or hostile: each has its own sentence, everybody else is graded, the table is complete."""

import csv
import json
import os
import time

import pytest

from jfa.course import cli, intake, landlock, notebook, state
from jfa.course.grade import Source, read
from jfa.course.printable import printable

FILE = "90_toy"
RIGHT = {"90.2": "def twice(x):\n    return x + x", "90.3": "answer = 42"}


@pytest.fixture
def course(toy):
    """The toy course with submissions of ada and zoe, who are right; hand_in(learner, answers) adds one."""
    top = toy.root / "handed in"

    def hand_in(learner, answers, suffix=".py"):
        book = notebook.read(toy.exercises / f"{FILE}.py")
        edited = book.with_sources({i: answers[c.exercise] for i, c in enumerate(book.cells) if c.exercise in answers})
        path = top / learner / f"{FILE}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = edited.text if suffix == ".py" else json.dumps(notebook.to_json(edited))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    hand_in("ada", RIGHT)
    hand_in("zoe", RIGHT)
    return toy, top, hand_in


def graded(course, capsys, *words):
    """({(learner, exercise): row of the table}, what was printed), after a check that the others are graded."""
    toy, top, _ = course
    table = toy.root / "table.csv"
    status = cli.grade(["90.2", "90.3", "--from", str(top), "--csv", str(table), *words])
    rows = {(r["learner"], r["exercise"]): r for r in csv.DictReader(table.open(encoding="utf-8"))}
    assert status == int(any(r["passed"] == "0" for r in rows.values()))
    assert len(rows) == 2 * len({learner for learner, _ in rows})
    for friend in ("ada", "zoe"):
        assert rows[friend, "90.2"]["passed"] == rows[friend, "90.3"]["passed"] == "1"
    return rows, capsys.readouterr().out


def replaced_by(make):
    def change(course):
        path = course[2]("eve", RIGHT)
        path.unlink()
        make(path, course)

    return change


def linked_folder(course):
    (course[1] / "eve").symlink_to(course[1] / "ada")


ODD = {
    "link to the solution": (replaced_by(lambda p, c: p.symlink_to(c[0].solutions / f"{FILE}.py")), "link"),
    "link to a friend": (replaced_by(lambda p, c: p.symlink_to(c[1] / "ada" / f"{FILE}.py")), "link"),
    "dangling link": (replaced_by(lambda p, c: p.symlink_to("nowhere")), "link"),
    "hard link to the solution": (replaced_by(lambda p, c: os.link(c[0].solutions / f"{FILE}.py", p)), "hard link"),
    "folder": (replaced_by(lambda p, c: p.mkdir()), "folder"),
    "pipe": (replaced_by(lambda p, c: os.mkfifo(p)), "pipe"),
    "linked folder": (linked_folder, "link"),
    "folder below": (replaced_by(lambda p, c: (p.parent / "more").symlink_to(c[1] / "ada")), "link"),
    "huge": (replaced_by(lambda p, c: p.write_bytes(b"#" * (5 << 20))), "MiB"),
    "broken JSON": (replaced_by(lambda p, c: p.with_suffix(".ipynb").write_text("{")), "JSON"),
    "deep JSON": (replaced_by(lambda p, c: p.with_suffix(".ipynb").write_text("[" * 100_000)), "Recursion"),
    "bytes": (replaced_by(lambda p, c: p.write_bytes(bytes(range(256)))), "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_get_a_sentence(course, capsys, kind):
    make, words = ODD[kind]
    make(course)
    rows, said = graded(course, capsys)
    assert rows["eve", "90.2"]["state"] == "missing"
    assert words in said.split("== eve")[1].split("== zoe")[0]


NEAR = {
    "a browser's copy": ("90_toy (1).py", "90_toy (1).py: only a file of exactly that name"),
    "capital letters": ("90_Toy.PY", "90_Toy.PY: only"),
    "Markdown": ("90_toy.md", "90_toy.md: only"),
    "an archive": ("Exercises.ZIP", "Exercises.ZIP: unpack it"),
    "an archive of another kind": ("mine.tar.gz", "mine.tar.gz: unpack it"),
    "something else": ("essay.txt", "no file 90_toy.py or 90_toy.ipynb\n"),
}


@pytest.mark.parametrize("kind", NEAR)
def test_a_missing_file_is_said_with_what_lies_there_instead(course, capsys, kind):
    name, words = NEAR[kind]
    (course[1] / "eve" / "deep").mkdir(parents=True)
    (course[1] / "eve" / "deep" / name).write_bytes(b"\x00PK")
    rows, said = graded(course, capsys)
    assert rows["eve", "90.2"]["state"] == "missing"
    assert words in said.split("== eve")[1].split("== zoe")[0]


def test_what_lies_beside_the_folders_is_named(course, capsys):
    for name in ("ada.zip", "lo\x1bose.py"):
        (course[1] / name).write_text("")
    (course[1] / ".hidden").mkdir()
    said = graded(course, capsys)[1]
    assert any(line.endswith(": .hidden, ada.zip, lo\\x1bose.py") for line in said.splitlines())


def test_jupytexts_light_format_is_named(course, capsys):
    light = '# ---\n# jupyter:\n# ---\n\nimport torch\n\n# + tags=["ex-90.2"]\ndef twice(x):\n    return 2 * x\n# -\n'
    course[2]("eve", {}).write_text(light)
    rows, said = graded(course, capsys)
    assert rows["eve", "90.2"]["state"] == "missing" and "light format" in said.split("== eve")[1].split("== zoe")[0]


def test_a_cell_that_is_too_long_is_left_out(course, capsys):
    course[2]("eve", {"90.2": "def twice(x):\n    return 2 * x\n" + "# long\n" * 20_000, "90.3": RIGHT["90.3"]})
    rows, said = graded(course, capsys)
    assert rows["eve", "90.2"]["state"] == "missing" and "longer than 100,000" in said
    assert rows["eve", "90.3"]["passed"] == "1"


DEEP = {
    "signs": "-" * 30_000 + "1",
    "attributes": "x" + ".a" * 20_000,
    "brackets": "[" * 190 + "]" * 190,
    "sums": "+".join(["1"] * 20_000),
    "calls": "f(" * 150 + ")" * 150,
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_expressions_are_their_own_authors_trouble(course, capsys, kind):
    course[2]("eve", {"90.2": f"def twice(x):\n    return {DEEP[kind]}", "90.3": RIGHT["90.3"]})
    rows, _ = graded(course, capsys)
    assert rows["eve", "90.2"]["passed"] == "0" and rows["eve", "90.3"]["passed"] == "1"


ODD_TEXT = {
    "raised": r"raise ValueError('\ud800 \x1b[2J \u202e')",
    "type": r"raise type('E\udfff', (Exception,), {})('\x9b31m')",
    "printed": r"print('\udc80\x07\u2028'); return x",
    "returned": r"return '\ud800'",
    "not text": r"raise type('E', (Exception,), {'__str__': lambda s: 1})()",
    "message that raises": r"raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})()",
}


@pytest.mark.parametrize("kind", ODD_TEXT)
def test_text_of_learners_is_printed_escaped(course, capsys, kind):
    course[2]("eve", {"90.2": f"def twice(x):\n    {ODD_TEXT[kind]}", "90.3": RIGHT["90.3"]})
    rows, said = graded(
        course, capsys, "--json", str(course[0].root / "r.json"), "--junit", str(course[0].root / "r.xml")
    )
    assert rows["eve", "90.2"]["passed"] == "0" and rows["eve", "90.3"]["passed"] == "1"
    assert said == printable(said) and said.encode("utf-8")
    assert "1/0" not in said or "ZeroDivision" in said


def test_names_of_learners_are_printed_escaped(course, capsys):
    name = os.fsdecode(b"e\xffve\x1b[31m")
    course[2](name, {"90.2": RIGHT["90.2"]})
    rows, said = graded(course, capsys)
    assert "e\\udcffve\\x1b[31m" in said and rows["e\\udcffve\\x1b[31m", "90.2"]["passed"] == "1"


def test_surrogates_in_a_notebook_are_a_syntax_error_of_that_cell(course, capsys):
    course[2]("eve", {"90.2": "def twice(x):\n    return '\ud800'", "90.3": RIGHT["90.3"]}, ".ipynb")
    (course[1] / "eve" / f"{FILE}.py").unlink(missing_ok=True)
    rows, _ = graded(course, capsys)
    assert rows["eve", "90.2"]["passed"] == "0" and rows["eve", "90.3"]["passed"] == "1"


READS = [
    "open('{ada}').read()", "__import__('pathlib').Path('{ada}').read_text()", "__import__('os').listdir('{top}/ada')",
    "__import__('numpy').fromfile('{ada}', dtype='uint8')", "open('{exercises}').read()",
    "__import__('shutil').copy('{ada}', 'here')",
]  # fmt: skip


@pytest.mark.parametrize("way", READS)
def test_other_submissions_are_closed(course, capsys, way):
    toy, top, hand_in = course
    way = way.format(ada=top / "ada" / f"{FILE}.py", top=top, exercises=toy.exercises / f"{FILE}.py")
    hand_in("eve", {"90.2": f"def twice(x):\n    try: {way}\n    except Exception: pass\n    return 2 * x"})
    rows, _ = graded(course, capsys)
    assert rows["eve", "90.2"]["state"] == "wrong method" and "somebody else" in rows["eve", "90.2"]["message"]


def test_everything_is_read_before_anything_runs(course, monkeypatch):
    toy, top, _ = course
    from jfa.course import catalog

    exercises = catalog.select(["90"])
    handed = read(exercises, {n: Source(toy, "submission", top / n, top) for n in ("ada", "zoe")})
    (top / "zoe" / f"{FILE}.py").write_text("changed since")
    assert handed["zoe"][90].notebook.answer_source("90.3") == RIGHT["90.3"]


def test_a_whole_checkout_may_be_handed_in(course, capsys):
    path = course[2]("eve", {"90.2": "def twice(x):\n    return x"})
    for place, age in (("notebooks", 0), ("solutions", 0), ("exercises", 1000), ("old", 0)):
        (path.parent / place).mkdir()
        copy = path.parent / place / path.name
        copy.write_text((course[1] / "ada" / path.name).read_text() if place == "exercises" else path.read_text())
        os.utime(copy, (time.time() - age,) * 2)
    rows, _ = graded(course, capsys)
    assert rows["eve", "90.2"]["passed"] == "1"


def test_what_is_closed_never_holds_python_or_the_course(toy, tmp_path):
    top = toy.root.parent
    paths = intake.closed(top, toy)["submissions"]
    assert not any(str(toy.root).startswith(p + os.sep) or p == str(toy.root) for p in paths)


def test_a_system_without_landlock_is_named_in_the_report(course, capsys, monkeypatch):
    monkeypatch.setattr(landlock, "shortcoming", lambda: "This system has no Landlock: ...")
    _, said = graded(course, capsys, "--seed", "1")
    assert said.startswith("Note: This system has no Landlock")


def test_grading_feeds_the_progress_that_check_feeds(toy, capsys):
    book = notebook.read(toy.exercises / f"{FILE}.py")
    answers = {"90.2": RIGHT["90.2"], "90.3": "answer = 1"}
    text = book.with_sources({i: answers[c.exercise] for i, c in enumerate(book.cells) if c.exercise in answers}).text
    (toy.exercises / f"{FILE}.py").write_text(text)
    cli.grade(["90"])
    assert state.states(toy) == {"90.1": "not started", "90.2": "passed", "90.3": "wrong", "90.4": "not started"}
    cli.grade(["90", "--solutions"])
    assert state.states(toy)["90.4"] == "not started"
    assert "90.3" in capsys.readouterr().out
