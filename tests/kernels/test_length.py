"""Kernels can be read: no function is longer than a screen or two, none is called with a row of values to be counted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

LINES = 60  # per function: its docstring and statements; parameters stand one per line where they are many
ARGUMENTS = 12  # per call of a jit function, by position
FOLDERS = ROOT / "jfa" / "kernels", ROOT / "examples"
SOURCES = sorted([*(p for folder in FOLDERS for p in folder.rglob("*.py")), *(ROOT / "jfa").glob("*.py")])


def jit_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the functions and methods under a decorator of Triton's JIT."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)]


def too_long(tree: ast.AST) -> list[str]:
    """Return a sentence per jit function of more than LINES lines."""
    found = [(f.name, f.end_lineno - f.body[0].lineno + 1) for f in jit_functions(tree)]
    return [f"{name} has {lines} lines" for name, lines in found if lines > LINES]


def too_many_arguments(tree: ast.AST, constructors: set[str]) -> list[str]:
    """Return a sentence per call inside a jit function with more than ARGUMENTS values; records are built of their fields."""
    calls = [c for f in jit_functions(tree) for c in ast.walk(f) if isinstance(c, ast.Call)]
    long = [(ast.unparse(c.func), len(c.args), c.lineno) for c in calls if len(c.args) > ARGUMENTS]
    return [f"line {line}: {name} gets {number} values" for name, number, line in long if name not in constructors]


def aggregates(tree: ast.AST) -> set[str]:
    """Return the names of a module's aggregates."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {c.name for c in classes if any(ast.unparse(d) == "aggregate" for d in c.decorator_list)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_two_screens_and_calls_can_be_read(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert too_long(tree) == []
    assert too_many_arguments(tree, aggregates(tree)) == []


def test_every_kernel_of_the_package_is_looked_at():
    seen = {path.stem for path in SOURCES if jit_functions(ast.parse(path.read_text(encoding="utf-8")))}
    assert {"block_select", "known_value", "planner", "backward_dq", "mxfp8_memory", "quantize", "block_sparse"} <= seen


def test_a_long_function_and_a_long_call_would_be_seen():
    body = "\n".join(f"    x{i} = {i}" for i in range(LINES + 1))
    call = f"    f({', '.join('x' * (ARGUMENTS + 1))})"
    tree = ast.parse(
        f"@triton.jit(do_not_specialize=['n'])\ndef kernel(\n    n,\n):\n{body}\n{call}\n\ndef host():\n{body}\n"
    )
    assert too_long(tree) == [f"kernel has {LINES + 2} lines"]
    assert len(too_many_arguments(tree, set())) == 1
