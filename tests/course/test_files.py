"""Files are written whole or not at all; whatever happens, what a learner wrote is in the file or in a backup that was named."""

import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa.course import catalog, check, cli, files, hint, notebook, progress, release, state, upkeep
from jfa.course.carry import carry
from jfa.course.files import Refusal, write_whole
from jfa.course.notebook import parse_json, parse_percent, to_json
from jfa.course.paths import Course
from jfa.course.report import Result
from tests.course.test_grade import FILE, RIGHT, _write
from tests.course.test_upkeep import _commit, _file, _new_course_version
from tests.support import ROOT


def _backups(course):
    return [p.read_bytes() for p in sorted((course.state / "backups").rglob("*")) if p.is_file()]


# ---------------------------------------------------------------------------------------------- one file


def test_a_written_file_keeps_its_mode_and_its_link(tmp_path):
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("real.py")
    write_whole(link, b"new")
    assert link.is_symlink() and real.read_text() == "new" and stat.S_IMODE(real.stat().st_mode) == 0o640
    (tmp_path / "to nowhere").symlink_to("fresh")
    write_whole(tmp_path / "to nowhere", b"new")
    assert (tmp_path / "fresh").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "link.py", "real.py", "to nowhere"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "no folder", "changed"])
def test_what_cannot_be_written_is_a_sentence(tmp_path, kind):
    path = tmp_path / "x.py"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to("x.py")
    elif kind == "no folder":
        path = tmp_path / "missing" / "x.py"
    else:
        path.write_text("of another program")
    with pytest.raises(Refusal, match=re.escape(str(path))):
        write_whole(path, b"new", before=b"what I read")
    assert kind != "changed" or path.read_text() == "of another program"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "fchmod", "close"])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_an_error_at_any_step_leaves_the_old_file(tmp_path, monkeypatch, call, code):
    path = tmp_path / "x.py"
    path.write_text("old")
    number, original, left = getattr(files.errno, code), getattr(os, call), [1]

    def fail(*args, **kwargs):
        if left.pop() if left else False:
            if call == "close":
                original(*args)
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(Refusal, match="is as it was"):
        write_whole(path, b"new" * 1000)
    monkeypatch.undo()
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.py"]


def test_drafts_of_killed_processes_are_swept_away(tmp_path):
    path, old, young = tmp_path / "x[1].py", tmp_path / ".x[1].py.aaaa.tmp", tmp_path / ".x[1].py.bbbb.tmp"
    for p in (path, old, young):
        p.write_text("x")
    os.utime(old, (1, 1))
    write_whole(path, b"new")
    assert not old.exists() and young.exists()


# ---------------------------------------------------------------------------------------------- reset, update, strip

FORMS = {
    "CRLF": lambda t: t.replace("\n", "\r\n").encode(),
    "some CRLF": lambda t: re.sub(r"\n(?=[a-z])", "\r\n", t).encode(),
    "form feed, VT, NEL, separators": lambda t: t.replace("## 90.3", "## \x0b\x0c\x1c\x85\u2028\u2029 90.3").encode(),
    "BOM, tabs": lambda t: t.replace("## 90.3", "##\t90.3\t").encode("utf-8-sig"),
    "no last newline": lambda t: t.rstrip("\n").encode(),
    "many last newlines": lambda t: (t + "\n\n").encode(),
}


# Where line ends are mixed inside the cell itself, the new one gets those of its marker: tests/course/test_notebook.py
@pytest.mark.parametrize("form", [f for name, f in FORMS.items() if name != "some CRLF"])
@pytest.mark.parametrize("which", ["90.1", "90.2", "90.4"])
def test_a_reset_changes_one_cell(toy, form, which):
    pristine = form(_file(toy).read_text())
    before = form(_write(toy.exercises, {which: RIGHT[which]}).read_text())
    _file(toy).write_bytes(before)
    assert cli.reset([which]) == 0
    assert _file(toy).read_bytes() == pristine
    assert _backups(toy) == [before]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_an_update_carries_an_answers_bytes_and_the_files_line_ends(toy, form):
    cli.update([])
    mine = RIGHT["90.1"] + "\n    # mine: \x0c \u2028"
    _file(toy).write_bytes(form(_write(toy.exercises, {"90.1": mine}).read_text()))
    own = parse_percent(_file(toy).read_bytes().decode()).answer("90.1")
    _new_course_version(toy)
    assert cli.update([]) == 0
    text = _file(toy).read_bytes().decode()
    new = parse_percent(text)
    assert new.answer("90.1").body == own.body and "said better" in text
    assert ("\r\n" in text) == ("CRLF" in next(k for k, f in FORMS.items() if f is form))
    assert text.startswith("\ufeff") == (form is FORMS["BOM, tabs"])
    assert re.search(r"[\r\n]*$", text)[0] == re.search(r"[\r\n]*$", form("x\n").decode())[0]


ANSWERS = {
    "quotes the stub": "def twice(x):\n"
    '    """Not: raise NotImplementedError("90.2: not started")  # YOUR CODE"""\n    return x + x',
    "half written": 'def twice(x):\n    y = x  # MINE\n    raise NotImplementedError("90.2: not started")  # YOUR CODE',
    "only a comment": "def twice(x):\n"
    '    # MINE: add it to itself?\n    raise NotImplementedError("90.2: not started")  # YOUR CODE',
    "does not compile": "def twice(x:\n    return MINE",
    "an open string": 'def twice(x):\n    """MINE\n    return x + x',
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("changes", [True, False])
def test_what_somebody_worked_on_is_an_answer(toy, answer, remembers, changes, capsys):
    if remembers:
        cli.update([])
    _write(toy.exercises, {"90.2": answer, "90.4": RIGHT["90.4"]})
    if changes:
        _new_course_version(toy)
    before = _file(toy).read_bytes()
    capsys.readouterr()
    assert cli.update([]) == 0
    said = capsys.readouterr().out
    book = notebook.read(_file(toy))
    assert book.answer("90.2").source == answer and book.answer("90.4").source == RIGHT["90.4"]
    assert ("said better" in _file(toy).read_text()) == changes
    assert (_file(toy).read_bytes() == before) != changes and ("as it was: .jfa/backups" in said) == changes


def _own_things(text):
    text = text.replace("import torch\n", "import torch\nimport math  # MY IMPORT\n", 1)
    above = "# %% [markdown]\n# MY NOTE\n\n# %%\nmy_number = 5\n\n# %% [raw]\n# MY RAW\n\n"
    text = text.replace('# %% tags=["ex-90.2"]', above + '# %% tags=["ex-90.2"]')
    text = text.replace('# %%\ncheck("90.3"', '# %%\nprint("MY TRIAL")\n\n# %%\ncheck("90.3"')
    return text + "\n# %% [markdown]\n# MY LAST WORD\n"


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
def test_own_cells_and_lines_survive_an_update_where_they_stood(toy, remembers, suffix):
    if remembers:
        cli.update([])
    path = _file(toy)
    path.write_text(_own_things(path.read_text()))
    if suffix == ".ipynb":
        content = to_json(notebook.read(path))
        note = next(c for c in content["cells"] if "MY NOTE" in "".join(c["source"]))
        note["attachments"] = {"picture.png": {"image/png": "AAAA"}}
        content["metadata"]["mine"] = [1.5]
        path.unlink()
        path = path.with_suffix(".ipynb")
        path.write_text(json.dumps(content, indent=2))
    _new_course_version(toy)
    assert cli.update([]) == 0
    book = notebook.read(path)
    sources = [c.source for c in book.cells]
    for words in (
        "MY IMPORT",
        "MY NOTE",
        "my_number = 5",
        "MY RAW",
        "MY TRIAL",
        "MY LAST WORD",
        "said better",
        "import math\n",
    ):
        assert sum(words in s for s in sources) == 1, words
    at = next(i for i, c in enumerate(book.cells) if c.exercise == "90.2")
    assert [s.strip() for s in sources[at - 3 : at]] == ["MY NOTE", "my_number = 5", "MY RAW"]
    at = next(i for i, s in enumerate(sources) if "MY TRIAL" in s)
    assert book.cells[at - 1].exercise == "90.3" and 'check("90.3"' in sources[at + 1] and sources[-1] == "MY LAST WORD"
    if suffix == ".ipynb":
        content = json.loads(path.read_text())
        assert content["metadata"]["mine"] == [1.5] and '\n  "' in path.read_text()
        assert any(c.get("attachments") for c in content["cells"])
        assert len({c["id"] for c in content["cells"]}) == len(content["cells"])
    again = path.read_bytes()
    assert cli.update([]) == 0 and path.read_bytes() == again


_CELL = st.tuples(
    st.sampled_from(["", " [markdown]", ' tags=["ex-90.2"]', ' tags=["mine"]']), st.text("ab\n#'\"=", max_size=12)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), _CELL), max_size=5), st.booleans())
def test_no_own_line_is_lost_wherever_it_stands(cells, as_json):
    """Whatever cells a learner has: after an update each is there with all its text, or the update refuses."""
    old, new = _versions()
    blocks = [c.marker + c.body + c.tail for c in old.cells]
    for number, (at, (options, text)) in enumerate(cells):
        lines = [f"mine_{number} = 0", *text.split("\n")]
        body = "\n".join(lines if "markdown" not in options else [f"# {line}" for line in lines])
        blocks.insert(at % (len(blocks) + 1), f"# %%{options}\n{body}\n\n")
    mine = parse_percent(old.head + "".join(blocks))
    if as_json:
        mine = parse_json(json.dumps(to_json(mine)))
    try:
        text, _ = carry(mine, new, [old])
    except Refusal:
        return
    result = (parse_json if as_json else parse_percent)(text)
    kept = [(c.kind, c.source.strip()) for c in result.cells]
    for cell in mine.cells:
        if "mine_" in cell.source:
            assert (cell.kind, cell.source.strip()) in kept
    assert "said better" in text


def _versions():
    """The toy chapter's skeleton, and its next version."""
    text = upkeep.stripped(ROOT / "tests" / "course" / "toy" / "solutions" / f"{FILE}.py").text
    return parse_percent(text), parse_percent(text.replace("## 90.2 Twice", "## 90.2 Twice, said better"))


def test_an_older_version_is_known_from_gits_history_of_the_solutions(toy):
    """A learner commits answers: what git has in exercises/ is no proof that a cell was shipped."""
    subprocess.run(["git", "init", "-q", str(toy.root)], check=True)
    (toy.root / ".gitignore").write_text(".jfa/\n")
    _file(toy).write_text(_file(toy).read_text() + "\n# %% [markdown]\n# MY NOTE\n")
    _commit(toy.root, "one")
    _new_course_version(toy)
    _commit(toy.root, "two")
    assert cli.update([]) == 0
    text = _file(toy).read_text()
    assert text.count("## 90.2 Twice") == 1 and "said better" in text and "MY NOTE" in text


def test_strip_backs_up_what_it_overwrites(toy, capsys):
    mine = _write(toy.exercises, RIGHT).read_bytes()
    assert cli.strip([]) == 0
    assert _backups(toy) == [mine] and "as it was: .jfa/backups" in capsys.readouterr().out
    assert cli.strip([]) == 0 and _backups(toy) == [mine]


COMMANDS = {"reset": ["90.2"], "update": [], "strip": []}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("trouble", ["backups is a file", ".jfa is a file", "changed meanwhile", "folder is gone"])
def test_without_a_backup_nothing_changes(toy, name, trouble, monkeypatch, capsys):
    mine = _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    before = mine.read_bytes()
    _new_course_version(toy)
    if trouble == "backups is a file":
        toy.state.mkdir()
        (toy.state / "backups").write_text("")
    elif trouble == ".jfa is a file":
        toy.state.write_text("")
    elif trouble == "changed meanwhile":
        original, read, before = state.backup, before, before + b"# saved by Lab\n"
        monkeypatch.setattr(
            state, "backup", lambda *args: (mine.write_bytes(read + b"# saved by Lab\n"), original(*args))[1]
        )
    else:
        monkeypatch.setattr(
            files.tempfile, "mkstemp", lambda **k: (_ for _ in ()).throw(OSError(30, "Read-only file system"))
        )
    assert getattr(cli, name)(COMMANDS[name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"jfa {name}: ") and mine.read_bytes() == before


KILLED = """
import os, signal, sys
from jfa.course import cli, files
original = os.replace
def replace(source, target):
    if str(target).endswith("/exercises/90_toy.py"):
        os.kill(os.getpid(), signal.SIGKILL)
    original(source, target)
files.os.replace = replace
from jfa.course import checks
checks.__path__[:] = [sys.argv[1]]
getattr(cli, sys.argv[2])(sys.argv[3:])
"""


def _in_a_process(course, program, *words, **options):
    env = dict(os.environ, JFA_COURSE=str(course.root), PYTHONPATH=str(ROOT))
    checks = str(ROOT / "tests" / "course" / "toy" / "checks")
    command = [sys.executable, "-c", program, checks, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, **options)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_the_old_file_and_has_named_its_backup(toy, name):
    before = _write(toy.exercises, {"90.2": RIGHT["90.2"]}).read_bytes()
    _new_course_version(toy)
    done = _in_a_process(toy, KILLED, name, *COMMANDS[name])
    assert done.returncode == -signal.SIGKILL and _file(toy).read_bytes() == before
    named = re.search(r"as it was: (\S+)", done.stdout)[1]
    assert (toy.root / named).read_bytes() == before


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("space", ["nothing", "half a backup", "the backup", "all"])
def test_a_full_disk_costs_nothing(toy, name, space):
    before = _write(toy.exercises, {"90.2": "twice = 3"}).read_bytes()  # shorter than what is written instead
    _new_course_version(toy)
    room = {"nothing": 0, "half a backup": len(before) // 2, "the backup": len(before) + 1, "all": 10**6}[space]
    program = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass")
    program = program.replace("getattr(cli", "sys.exit(getattr(cli").rstrip() + ")"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # noqa: E731
    done = _in_a_process(toy, program, name, *COMMANDS[name], preexec_fn=limit)
    assert "Traceback" not in done.stderr
    if room < 10**6:
        assert done.returncode == 2 and _file(toy).read_bytes() == before and "disk is full" in done.stderr
        assert _backups(toy) == ([before] if space == "the backup" else [])
    else:
        assert done.returncode == 0, done.stderr
    assert not list(toy.exercises.glob(".*"))


@pytest.mark.parametrize("edited_since", [False, True])
def test_a_pull_that_was_killed_is_put_right(toy, tmp_path_factory, monkeypatch, capsys, edited_since):
    upstream, mine = toy.root, Course(tmp_path_factory.mktemp("mine") / "clone")
    subprocess.run(["git", "init", "-q", str(upstream)], check=True)
    (upstream / "jfa" / "keep").write_text("")
    (upstream / ".gitignore").write_text(".jfa/\n")
    _commit(upstream, "one")
    subprocess.run(["git", "clone", "-q", str(upstream), str(mine.root)], check=True)
    answered = _write(mine.exercises, {"90.2": RIGHT["90.2"]}).read_bytes()
    _new_course_version(toy)
    upkeep.make_exercises(toy)
    _commit(upstream, "two")
    done = _in_a_process(mine, KILLED, "update", "--pull")
    assert done.returncode == -signal.SIGKILL and RIGHT["90.2"] not in _file(mine).read_text()
    saved = mine.root / re.search(r"as it was: (\S+)", done.stdout)[1]
    assert saved.read_bytes() == answered
    monkeypatch.setenv("JFA_COURSE", str(mine.root))
    if edited_since:
        _file(mine).write_text(_file(mine).read_text() + "\n# new work\n")
    assert cli.update([]) == 0
    said, text = capsys.readouterr().out, _file(mine).read_text()
    assert "an update was interrupted" in said and str(saved) in said
    assert (RIGHT["90.2"] in text) != edited_since and ("# new work" in text) == edited_since
    assert cli.update([]) == 0 and "interrupted" not in capsys.readouterr().out


def test_a_file_in_another_encoding_is_one_sentence_and_the_rest_is_done(toy, capsys):
    _file(toy).write_bytes(_file(toy).read_bytes() + "# caf\u00e9\n".encode("latin-1"))
    before = _file(toy).read_bytes()
    line = before.count(b"\n")
    for name, words in (("reset", ["90.2", "90.3"]), ("update", []), ("grade", ["90.2"])):
        status = getattr(cli, name)(words)
        said = capsys.readouterr()
        assert status == (1 if name == "grade" else 2) and f"line {line} holds the byte 0xe9" in said.out + said.err
    assert _file(toy).read_bytes() == before
    assert any("is not UTF-8" in n for n in check("90.2", lambda x: x + x).notes)


# ---------------------------------------------------------------------------------------------- .jfa

DAMAGED = {
    "cut": b'{"states": {"90.1": "pas',
    "a list": b"[1, 2]",
    "null": b"null",
    "lists inside": b'{"states": ["90.1"], "hints": 7}',
    "numbers as states": b'{"states": {"90.1": 3, "90.3": "passed"}, "hints": {"90.2": true, "90.1": -1}}',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a folder": None,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_progress_is_set_aside_with_a_sentence(toy, content, capsys):
    path = toy.state / "progress.json"
    toy.state.mkdir()
    path.mkdir() if content is None else path.write_bytes(content)
    assert "cannot be understood" in repr(progress())
    remark = state.record(toy, Result("90.2", "", "passed"))
    aside = list(toy.state.glob("progress-damaged-*.json"))
    assert len(aside) == 1 and aside[0].name in remark
    assert content is None or aside[0].read_bytes() == content
    assert state.states(toy)["90.2"] == "passed" and "understood" not in repr(progress())


def test_where_nothing_can_be_kept_there_is_a_verdict_and_a_sentence(toy, capsys):
    toy.state.write_text("a file in the way")
    result = check("90.2", lambda x: x + x)
    assert result.passed and any("progress was not kept" in n for n in result.notes)
    assert "Hint 1 of 2" in hint("90.2").text and "not kept" in hint("90.2").text
    assert cli.progress([]) == 0 and cli.hint(["90.2"]) == 0


def test_two_processes_that_record_at_once_lose_nothing(toy):
    program = "import sys\nfrom jfa.course import checks, state\nfrom jfa.course.paths import find_course\n"
    program += "from jfa.course.report import Result\nchecks.__path__[:] = [sys.argv[1]]\n"
    program += "for i in range(40): state.record(find_course(), Result(f'{sys.argv[2]}.{i}', '', 'passed'))\n"
    env = dict(os.environ, JFA_COURSE=str(toy.root), PYTHONPATH=str(ROOT))
    running = [subprocess.Popen([sys.executable, "-c", program, "x", str(n)], env=env) for n in (1, 2)]
    assert [p.wait() for p in running] == [0, 0]
    assert len(state.states(toy)) == 80


def test_several_results_are_recorded_at_once_and_a_pass_stays(toy):
    assert state.record(toy, Result("90.1", "", "passed"), Result("90.2", "", "wrong")) == ""
    assert state.record(toy, Result("90.1", "", "wrong"), Result("90.2", "", "passed")) == ""
    assert state.states(toy) == {"90.1": "passed", "90.2": "passed"}


def test_a_remembered_skeleton_that_was_edited_counts_for_nothing(toy):
    state.keep_pristine(toy, FILE)
    (kept,) = (toy.state / "skeletons").iterdir()
    assert len(state.known_pristine(toy, FILE)) == 1
    kept.write_text(kept.read_text() + "\n# %%\nmine = 1\n")
    assert state.known_pristine(toy, FILE) == []


@pytest.mark.parametrize("with_git", [True, False])
@pytest.mark.parametrize("with_solutions", [True, False])
def test_reset_works_in_any_release(toy, tmp_path_factory, monkeypatch, with_git, with_solutions):
    folder = tmp_path_factory.mktemp("handed out") / "course"
    release.release(toy, folder, with_solutions)
    handed = Course(folder)
    if with_git:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        _commit(folder, "handed out")
    monkeypatch.setenv("JFA_COURSE", str(folder))
    pristine = _file(handed).read_bytes()
    _write(handed.exercises, {"90.2": RIGHT["90.2"]})
    assert cli.reset(["90.2"]) == 0 and _file(handed).read_bytes() == pristine
    _file(handed).unlink()
    assert cli.update([]) == 0 and _file(handed).read_bytes() == pristine


def test_reset_uses_what_it_remembers_where_the_solutions_were_taken_away(toy):
    cli.update([])
    pristine = _file(toy).read_bytes()
    _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    (toy.solutions / f"{FILE}.py").unlink()
    assert cli.reset(["90.2"]) == 0 and _file(toy).read_bytes() == pristine


def test_solutions_that_somebody_is_editing_stop_nothing_but_strip(toy, capsys):
    path = toy.solutions / f"{FILE}.py"
    path.write_text(path.read_text().replace("### END SOLUTION", "", 1))
    assert cli.strip([]) == 2 and FILE in capsys.readouterr().err
    assert catalog.skeleton_notebook(toy, FILE) is None
    assert cli.reset(["90.2"]) == 2 and "not in this checkout" in capsys.readouterr().err
    assert cli.update([]) == 0
