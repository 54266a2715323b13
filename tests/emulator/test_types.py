"""The machine and the public TLX functions are typed: every function is annotated, and mypy finds nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = sorted(path for room in ("machine", "tlx") for path in (ROOT / "jfa/emulator" / room).glob("*.py"))


def bare(tree):
    """Names of functions with a parameter or a result that has no annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            parameters = [p for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p is not None]
            if node.returns is None or any(p.annotation is None and p.arg not in ("self", "cls") for p in parameters):
                yield f"{node.name}, line {node.lineno}"


@pytest.mark.parametrize("path", TYPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_function_is_annotated(path):
    assert list(bare(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("text", ["def f(a) -> int: ...", "def f(a: int): ...", "def f(*a, b: int) -> None: ..."])
def test_a_bare_function_is_seen(text):
    assert list(bare(ast.parse(text))) == ["f, line 1"]


def test_mypy_finds_nothing():
    """With pyproject.toml's settings, which name the two packages."""
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_would_find_a_wrong_call(tmp_path):
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from jfa.emulator.machine import Task, sync\n\n\n"
        "def wait(task: Task) -> None:\n    sync.fence(task, early='yes')\n"
    )
    done = subprocess.run([sys.executable, "-m", "mypy", str(wrong)], cwd=ROOT, capture_output=True, text=True)
    assert 'Argument "early" to "fence" has incompatible type "str"' in done.stdout
