"""docs/debug-a-kernel.md: each command prints what the page shows, and the lines it quotes are in the files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("triton.language.extra.tlx")
pytest.importorskip("matplotlib")

PAGE = (ROOT / "docs" / "debug-a-kernel.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples" / "debug_a_kernel"
COMMANDS = re.findall(r"```console\n\$ (jfa [^\n]*)\n(.*?)```", PAGE, flags=re.S)
CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
FAILS = ("jfa timeline hangs.py:launch", "jfa emulator explore races.py:launch")


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command of the page beside the examples' files; what it writes stays in ``folder``."""
    for path in FOLDER.glob("*.py"):
        (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    environment = os.environ | {"JFA_STATE": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jfa", *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def shown_in(shown: str, printed: str) -> bool:
    """Whether the lines of the page are the printed ones; "..." stands for any others, or for a line's end."""
    pattern = re.escape(shown.strip("\n")).replace(re.escape("..."), r"[\s\S]*?")
    return (
        re.search(r"(?:\A|\n)" + pattern + (r"" if shown.strip().endswith("...") else r"\s*(?:\Z|\n)"), printed)
        is not None
    )


def test_the_page_has_every_tool():
    used = {" ".join(command.split()[1:3]) for command, _ in COMMANDS}
    assert {"emulator explore", "emulator sweep", "timeline right.py:launch", "compile --diff"} <= used
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command, shown", COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(command, shown, tmp_path):
    if command.startswith("jfa compile") and not __import__("triton").__version__.endswith("+fb"):
        pytest.skip("compiling TLX needs fbtriton")
    done = run(command, tmp_path)
    printed = "\n".join(line.rstrip() for line in (done.stdout + done.stderr).splitlines())
    assert done.returncode == (command in FAILS), done.stderr
    assert shown_in(shown, printed), f"{command} printed\n{printed}"


def test_a_comparison_that_would_notice():
    assert shown_in("a 1\n...\nc 3\n", "x\na 1\nb 2\nc 3\nd")
    assert not shown_in("a 1\n...\nc 4\n", "a 1\nb 2\nc 3") and not shown_in("a\nb\n", "a\nx\nb")
    assert shown_in("in 3 executions, ...\n", "in 3 executions, 0.7 s: 1 ok")


def dedented(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip() and not line.strip().startswith('"""')]


@pytest.mark.parametrize(
    "code, file", list(zip(CODE, ["hangs", "hangs", "races", "right"])), ids=["launch", "roles", "2", "3"]
)
def test_the_lines_on_the_page_are_in_the_file(code, file):
    lines, wanted = dedented((FOLDER / f"{file}.py").read_text(encoding="utf-8")), dedented(code)
    assert any(lines[i : i + len(wanted)] == wanted for i in range(len(lines))), code


def test_versions_differ_in_what_the_page_says_only():
    texts = [dedented((FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in ("hangs", "races", "right")]
    changed = [a for a, b in zip(texts[0], texts[1]) if a != b]
    assert changed == ["tlx.barrier_wait(empties[slot], phase)"]
    moved = [a for a, b in zip(texts[1], texts[2]) if a != b]
    assert moved == ["tlx.barrier_arrive(empties[slot], 1)", "tile = tlx.local_load(ring[slot])"]
