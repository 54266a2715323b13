"""CONTRIBUTING.md says where things are: each name of its table is in the file that stands before it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
PLACES = sorted(set(PLACE.findall(TEXT)))


def names(source: str) -> set[str]:
    """Return the functions and classes of a source, methods as ``Class.method``."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("file, name", PLACES)
def test_a_place_of_the_table_is_there(file, name):
    assert name in names((ROOT / "jfa" / "kernels" / file).read_text(encoding="utf-8"))


def test_the_table_answers_for_every_backend():
    table = TEXT[TEXT.index("| question | portable") :].split("\n\n")[0].splitlines()
    columns = table[0].strip("| ").split(" | ")[1:]
    assert columns == ["portable", "hopper", "blackwell"] and len(table) > 10
    for row in table[2:]:
        assert len(row.strip("|").split("|")) == 4 and all(cell.strip() for cell in row.strip("|").split("|")), row
    assert ("blackwell/backward_1cta.py", "reduce_dq") in PLACES


def test_a_name_that_moved_would_be_seen():
    assert names("class Walk:\n    def next(self): ...\ndef load(): ...\n") == {"Walk", "Walk.next", "load"}
