"""What of the prose's rules can be counted: docstrings of functions start with a verb, rates are per, callbacks are called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = sorted((ROOT / "jfa").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("jfa", "notebooks", "solutions", "docs", "examples", "tools", "book")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md")
) + sorted(ROOT.glob("*.md"))

# Words that begin a docstring which describes a thing where it should say what the function does.
NO_VERBS = set(
    "a all an any both each every everything for from how in its like no nothing of on one only some something that the there "
    "these this two what when where whether which who whoever whose why with".split()
)
QUANTITY = (
    "bytes|registers?|programs|tiles|rows|keys|queries|columns|cycles|words|numbers?|launches|CTAs|warps|threads|steps|entries|partials?|"
    "FLOPs|bits|pairs|workers|us|ms|bars|squares?|instructions|folders?|once|twice"
)
UNIT = (
    "thread|warp|tile|sequence|role|CTA|program|element|row|head|key head|step|launch|call|task|lane|SM|worker|token|user|"
    "learner|exercise|rank|second|batch|shape|group|block|multiprocessor"
)
PER = re.compile(rf"\b(?:{QUANTITY}) an? (?:{UNIT})\b(?! (?:takes|loads|stores|launches|goes|of))")
RIDDLES = re.compile(r"\bhears? of\b|\bin (?:nobody|no \w+)'s way\b|\bhas not the\b|\bwhat of what\b", re.IGNORECASE)


def first_words(source: str) -> list[tuple[int, str]]:
    """Return (line, first word in lower case) of each function's docstring; a property is a thing and may be described."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").split()
            if text and not any("property" in ast.unparse(d) for d in node.decorator_list):
                found.append((node.lineno, text[0].strip(".,:;").lower()))
    return found


def without_verb(source: str) -> list[str]:
    """Return a sentence per docstring that starts with no verb."""
    bad = [(line, word) for line, word in first_words(source) if word in NO_VERBS or not word[:1].isalpha()]
    return [f"line {line}: a docstring that starts with {word!r}" for line, word in bad]


def phrases(text: str) -> list[str]:
    """Return a sentence per phrase that the rules exclude."""
    lines = text.splitlines()
    return [
        f"line {i}: {m.group()!r}" for i, line in enumerate(lines, 1) for r in (PER, RIDDLES) for m in r.finditer(line)
    ]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_functions_start_with_a_verb(path: Path):
    assert without_verb(path.read_text(encoding="utf-8")) == []


def test_rates_are_per_something_and_nobody_hears():
    found = {str(path.relative_to(ROOT)): phrases(path.read_text(encoding="utf-8")) for path in TEXTS}
    assert {name: bad for name, bad in found.items() if bad} == {}


def test_breaches_would_be_seen():
    assert without_verb('def f():\n    """The value of x."""') and without_verb('def f():\n    """(a, b) of x."""')
    assert not without_verb('class A:\n    @property\n    def f(self):\n        """The value of x."""')
    assert phrases("It spills 12 bytes a thread.") and phrases("``waiting`` hears of long runs.")
    assert not phrases("Which tiles a program takes, and 12 bytes per thread.")
