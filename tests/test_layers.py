"""Imports of the package point down the list in CONTRIBUTING.md. Nothing is imported here: the sources are parsed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "jfa"
BLOCK = re.search(r"```layers\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S).group(1)
LAYERS = [[f"jfa.{name.strip()}" for name in line.split(",")] for line in BLOCK.strip().splitlines()]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
# The package's own file may be imported by all: it loads what it offers on use. `python -m jfa` is the command line.
ROOT_FILES = {"jfa.__init__", "jfa.__main__", "jfa.kernels.__init__"}


def module_of(path: Path) -> str:
    """Return the dotted name of a source file; a package's ends in ``.__init__``."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def unit_of(module: str) -> str | None:
    """Return the row's name that a module belongs to: the longest one that it starts with."""
    found = [unit for unit in LEVEL if f"{module}.".startswith(f"{unit}.")]
    return max(found, key=len, default=None)


def imports(source: str, module: str) -> list[tuple[str, int]]:
    """Return (dotted name, line) of everything of jfa that a source imports, at any depth; relative imports resolved."""
    package, found = module.split(".")[:-1], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{start}.{alias.name}", node.lineno) for alias in node.names]
    return [(name, line) for name, line in found if name.split(".")[0] == "jfa"]


def upward(source: str, module: str) -> list[str]:
    """Return a sentence for each import of a module that does not point down."""
    mine, wrong = unit_of(module), []
    for name, line in imports(source, module):
        other = unit_of(name)
        if other is not None and other != mine and LEVEL[other] <= LEVEL[mine]:
            wrong.append(f"{module}, line {line}: {mine} must not import {name}")
    return wrong


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if module_of(path) not in ROOT_FILES)


def test_every_module_has_a_place_in_the_list():
    assert [module_of(path) for path in SOURCES if unit_of(module_of(path)) is None] == []
    assert [unit for unit in LEVEL if not any(unit_of(module_of(path)) == unit for path in SOURCES)] == []


def test_imports_point_down():
    wrong = [w for path in SOURCES for w in upward(path.read_text(encoding="utf-8"), module_of(path))]
    assert wrong == []


@pytest.mark.parametrize(
    "source, module, wrong",
    [
        ("from jfa.kernels.hopper import tiles", "jfa.kernels.common.band", 1),
        ("def f():\n    import jfa.attention", "jfa.kernels.base", 1),
        ("from ..hopper.tiles import PAD", "jfa.kernels.blackwell.forward", 1),
        ("from .. import masks", "jfa.emulator.rates", 1),
        ("from jfa import plots", "jfa.doctor", 1),
        ("from ..common import band\nimport triton", "jfa.kernels.blackwell.forward", 0),
        ("from . import tiles\nfrom jfa import masks", "jfa.kernels.hopper.forward", 0),
        ("from ...emulator import run", "jfa.course.checks.x", 0),
    ],
)
def test_the_rule_itself(source, module, wrong):
    assert len(upward(source, module)) == wrong
