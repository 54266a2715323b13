"""What `jfa lab` starts, and with which environment; the browser tests look at the running thing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jfa import lab
from tests.support import ROOT


def test_everything_jupyter_writes_is_in_the_state_folder(tmp_path):
    env = lab.environment(tmp_path, {"PATH": "/usr/bin", "JUPYTER_DATA_DIR": "/elsewhere"})
    for name in lab.STATE_FOLDERS:
        assert Path(env[name]).is_relative_to(tmp_path / ".jfa"), name
    assert env["JUPYTER_CONFIG_PATH"] == str(tmp_path / "jupyter")


def test_terminals_find_this_environment_first():
    env = lab.environment(ROOT, {"PATH": "/usr/bin"})
    assert env["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"


def test_the_checkout_is_the_root_folder_and_the_first_chapter_the_page(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / lab.FIRST_CHAPTER).write_text("")
    words = lab.command(tmp_path, options=["--no-browser"])
    assert f"--ServerApp.root_dir={tmp_path}" in words
    assert f"--LabApp.default_url=/lab/tree/{lab.FIRST_CHAPTER}" in words
    assert words[-1] == "--no-browser"


def test_without_the_first_chapter_it_still_starts(tmp_path):
    assert "--LabApp.default_url=/lab" in lab.command(tmp_path)


def test_the_checkout_is_found_from_a_folder_inside_it(tmp_path):
    (tmp_path / "jupyter" / "labconfig").mkdir(parents=True)
    (tmp_path / "jupytext.toml").write_text("")
    (tmp_path / "exercises" / "deep").mkdir(parents=True)
    assert lab.find_root(tmp_path / "exercises" / "deep") == tmp_path


def test_outside_of_any_checkout_the_packages_own_is_taken(tmp_path):
    assert lab.find_root(tmp_path) == ROOT


@pytest.fixture
def started(monkeypatch):
    """The commands that the process would have become."""
    commands = []
    monkeypatch.setattr(lab.os, "execve", lambda path, words, env: commands.append(words))
    return commands


def test_a_named_file_is_opened_and_other_options_go_to_jupyterlab(started, monkeypatch):
    monkeypatch.chdir(ROOT)
    lab.main(["README.md", "--port=8890", "--no-browser"])
    (command,) = started
    assert "--LabApp.default_url=/lab/tree/README.md" in command
    assert command[-2:] == ["--port=8890", "--no-browser"]


def test_a_file_that_is_not_in_the_checkout_is_refused(started, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    assert lab.main([str(tmp_path / "elsewhere.py")]) == 2
    assert "is no file of" in capsys.readouterr().err and not started


def test_a_missing_jupyterlab_is_told_what_to_do(started, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(lab, "find_spec", lambda name: None if name == "jupytext" else object())
    assert lab.main([]) == 1
    assert "jupytext not installed here; run `make lab`" in capsys.readouterr().err and not started
