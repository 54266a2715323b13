"""The code has one format: ruff's, with the settings of pyproject.toml and of the chapters' folders."""

import subprocess
import sys

from tests.support import ROOT


def ruff(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_linter_finds_nothing():
    done = ruff("check", "--output-format", "concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_formatted():
    done = ruff("format", "--diff", ".")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_an_unformatted_cell_would_be_seen(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("# %%\nx = {'a':1}\n", encoding="utf-8")
    assert ruff("format", "--diff", str(cell)).returncode == 1
