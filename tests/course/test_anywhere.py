"""`jfa notebook`: an .ipynb that holds the chapter, fetches the course where it is not, and does nothing where it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from jfa import cli
from jfa.course import anywhere, catalog, notebook
from jfa.course.markdown import replace_links
from jfa.course.paths import Course
from tests.support import ROOT, copy_course

GITHUB = "https://github.com/someone/course"


@pytest.fixture
def course(tmp_path):
    """A copy of the course."""
    (tmp_path / "course").mkdir()
    copy = copy_course(tmp_path / "course")
    shutil.copy(ROOT / "pyproject.toml", copy)
    return Course(copy)


def code_of(path):
    """The sources of an .ipynb's code cells."""
    return [c.source for c in notebook.read(path).cells if c.kind == "code"]


@pytest.mark.parametrize("kind", anywhere.KINDS)
def test_it_holds_the_cells_of_the_file_behind_its_set_up(course, tmp_path, kind):
    written = anywhere.write(course, 3, kind, tmp_path, GITHUB)
    original = notebook.read(course.root / kind / written.path.with_suffix(".py").name)
    cells = notebook.read(written.path).cells
    assert [c.source for c in cells[1:] if c.kind == "code"] == [c.source for c in original.cells if c.kind == "code"]
    assert [c.tags for c in cells[1:]] == [c.tags for c in original.cells]
    content = json.loads(written.path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4 and len({c["id"] for c in content["cells"]}) == len(content["cells"])
    import nbformat

    nbformat.validate(nbformat.from_dict(content))


def test_links_lead_to_the_repository_or_are_words(course, tmp_path):
    for repository, expected in (
        (GITHUB + ".git", f"[exercises/04_jagged_forward.py]({GITHUB}/blob/HEAD/exercises/04_jagged_forward.py)"),
        ("https://example.org/course.git", "Open exercises/04_jagged_forward.py."),
    ):
        path = tmp_path / f"{len(repository)}.ipynb"
        anywhere.write(course, 4, to=path, repository=repository)
        text = "\n".join(c.source for c in notebook.read(path).cells if c.kind == "markdown")
        assert expected in text
        assert "](../" not in text and "](05_" not in text


def test_a_link_in_code_is_code():
    text = "`k[g](x)` [a](b.py) [c](https://d) ![p](q.png)\n```\nk[g](x)\n```"
    seen = []
    replaced = replace_links(text, lambda *parts: seen.append(parts) or "L")
    assert seen == [("", "a", "b.py"), ("!", "p", "q.png")]
    assert replaced == "`k[g](x)` L [c](https://d) L\n```\nk[g](x)\n```"


def test_the_set_up_is_no_part_of_an_answer(course, tmp_path):
    """Neither live in a notebook nor when the .ipynb is handed in: it would start processes there."""
    import ast

    from jfa.course.notebook_api import _is_definition

    setup = code_of(anywhere.write(course, 2, "exercises", tmp_path, GITHUB).path)[0]
    kept = [node for node in ast.parse(setup).body if _is_definition(node)]
    assert [ast.unparse(node) for node in kept] == [f"REPOSITORY = {GITHUB!r}"]


def test_an_exercise_that_was_solved_elsewhere_is_graded(course, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JFA_COURSE", str(course.root))
    path = anywhere.write(course, 1, "exercises", tmp_path / "handed" / "ada", GITHUB).path
    content = json.loads(path.read_text(encoding="utf-8"))
    solution = next(
        c for c in notebook.read(course.solutions / path.with_suffix(".py").name).cells if c.exercise == "1.1"
    )
    for cell in content["cells"]:
        if cell["metadata"].get("tags") == ["ex-1.1"]:
            cell["source"] = solution.source
    path.write_text(json.dumps(content), encoding="utf-8")
    assert cli.main(["grade", "1.1", "--from", str(tmp_path / "handed")]) == 0
    assert "passed" in capsys.readouterr().out


def test_where_the_course_is_installed_the_set_up_does_nothing(course, tmp_path):
    setup = code_of(anywhere.write(course, 0, to=tmp_path, repository=GITHUB).path)[0]
    code = (
        setup + "\nimport os, sys\nprint(os.getcwd(), 'jfa-course' in ''.join(sys.path), os.path.exists('jfa-course'))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout.split(), run.stderr) == ([str(tmp_path), "False", "False"], "")


@pytest.fixture
def repository(course, tmp_path):
    """The course as a repository that can be cloned, its package in it."""
    folder = tmp_path / "repository"
    shutil.copytree(course.root, folder, symlinks=False, ignore=shutil.ignore_patterns("__pycache__", ".jfa"))
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    return f"file://{folder}"


def run_elsewhere(code, folder):
    """Run code where the packages are, but not the course: -S leaves the editable install out."""
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JFA"))} | {"PYTHONPATH": packages}
    return subprocess.run([sys.executable, "-S", "-c", code], cwd=folder, env=env, capture_output=True, text=True)


def test_elsewhere_the_set_up_fetches_the_course_and_goes_into_it(course, repository, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    setup = code_of(anywhere.write(course, 1, "exercises", elsewhere, repository).path)[0]
    code = setup + (
        "\nimport jfa, os\nfrom jfa.course.paths import find_course\n"
        "print(os.getcwd(), jfa.__file__, find_course().root, sep='\\n')"
    )
    for _ in range(2):  # the second time nothing is cloned again
        run = run_elsewhere(code, elsewhere)
        assert run.returncode == 0, run.stderr
        clone = elsewhere / "jfa-course"
        assert run.stdout.split("\n")[:3] == [str(clone / "exercises"), str(clone / "jfa/__init__.py"), str(clone)]


def test_without_an_address_the_set_up_says_what_to_set(course, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JFA_COURSE", str(course.root))
    assert cli.main(["notebook", "1", "--to", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    (path,) = re.findall(r"^wrote (.+)$", printed.out, flags=re.M)
    assert "set REPOSITORY in the first cell" in printed.err
    run = run_elsewhere(code_of(tmp_path / path)[0], tmp_path)
    assert run.returncode == 1 and "set REPOSITORY above" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "remote, address",
    [
        ("https://github.com/a/b.git", "https://github.com/a/b.git"),
        ("https://user:token@github.com/a/b", "https://github.com/a/b"),
        ("git@github.com:a/b.git", "https://github.com/a/b.git"),
        ("ssh://git@git.example.org/a/b", "https://git.example.org/a/b"),
        ("/home/me/b", ""),
        ("file:///home/me/b", ""),
        ("", ""),
    ],
)
def test_an_address_is_one_that_others_can_reach_and_tells_no_secret(remote, address):
    assert anywhere.as_https(remote) == address


def test_a_file_that_is_there_is_left_alone(course, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JFA_COURSE", str(course.root))
    mine = tmp_path / "mine.ipynb"
    mine.write_text("mine")
    assert cli.main(["notebook", "01", "--to", str(mine), "--repository", GITHUB]) == 2
    assert mine.read_text() == "mine" and "is there already" in capsys.readouterr().err


def test_a_chapter_that_is_not_there_is_told(capsys):
    assert cli.main(["notebook", "77"]) == 2
    assert f"there is no chapter 77 in {ROOT / 'notebooks'}; there is 00, 01" in capsys.readouterr().err


def test_what_is_installed_is_what_the_package_asks_for():
    wanted, fbtriton = anywhere.needs(ROOT)
    assert wanted["torch"].startswith("torch>=") and wanted["greenlet"].startswith("greenlet>=")
    assert f"fbtriton=={fbtriton}\n" in (ROOT / "requirements.txt").read_text()


@pytest.mark.parametrize("stem", [c.stem for c in catalog.chapters()])
def test_every_chapter_can_be_written(stem, tmp_path):
    for kind in anywhere.KINDS:
        written = anywhere.write(Course(ROOT), int(stem[:2]), kind, tmp_path / kind, GITHUB)
        assert written.path.name == f"{stem}.ipynb"
