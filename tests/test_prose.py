"""The rules of the prose that can be checked mechanically: how docstrings begin, "per" in rates, words that are riddles."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from jfa.course import notebook
from tests.support import ROOT

PACKAGE = sorted((ROOT / "jfa").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("jfa", "notebooks", "solutions", "docs", "examples", "tools", "book")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md")
) + sorted(ROOT.glob("*.md"))

# The chapters and their solutions; the exercises are made of these.
CHAPTERS = sorted(path for folder in ("notebooks", "solutions") for path in (ROOT / folder).glob("[0-9]*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "jfa").rglob("*.md")])

# Words that begin a docstring which describes a thing where it should say what the function does.
NO_VERBS = set(
    "a all an any both each every everything for from how in its like no nothing of on one only some something that the there "
    "these this two what when where whether which who whoever whose why with".split()
)
NOUNS = set("amount fraction index mean name number share size sum time value".split())  # before "of": no verbs
# Words that begin a riddle where a docstring of a class or a module should name the thing or say what it does.
QUESTIONS = set("how what when where whether which who whoever whose why everybody nobody somebody".split())
QUANTITY = (
    "bytes|registers?|programs|tiles|rows|keys|queries|columns|cycles|words|numbers?|launches|CTAs|warps|threads|steps|entries|partials?|"
    "FLOPs|bits|pairs|workers|us|ms|microseconds|milliseconds|seconds|MB|KB|KiB|tokens|scales|bars|squares?|instructions|folders?|"
    "arrivals?|barriers?|buffers?|messages?|cells?|once|twice"
)
UNIT = (
    "thread|warp|tile|sequence|role|CTA|program|element|row|head|key head|step|launch|call|task|lane|SM|worker|token|user|"
    "learner|exercise|rank|second|batch|shape|group|block|multiprocessor|stage|slice|line|pass|forward|backward|chapter|topic|"
    "column|phase|minute|microsecond|MMA"
)
VERB = "takes|loads|stores|launches|goes|of|is|gets|waits|needs|has|holds|reads|writes|makes|leaves|sees"
PER = re.compile(rf"\b(?:{QUANTITY}) an? (?:{UNIT})\b(?! (?:{VERB})\b)")
RIDDLES = re.compile(
    r"\bhears?\b|\bheard\b|\bin (?:nobody|no \w+)'s way\b|\bhas not the\b|\bwhat of what\b|\bof what\b[^.]*\bof which\b",
    re.IGNORECASE,
)
# American spelling, and words of the house that a reader from elsewhere must translate.
FOREIGN = re.compile(
    r"\b(?:neighbour(?!_)|colour|behaviour|(?:un)?normalis|optimis|quantis|serialis|practis|towards\b|learnt\b|nobody\b|everybody\b|"
    r"somebody\b|whoever\b|mend(?:s|ed|ing)?\b|hears?\b|alike\b|anew\b|in vain\b|beside\b|"
    r"(?:synchron|(?:un)?initial|special|summar|organ)is(?:e|es|ed|ing|ation|ations)\b|for ever\b)",
    re.IGNORECASE,
)
# British spelling alone: what the package's docstrings, comments and messages are held to.
BRITISH = re.compile(
    r"\b(?:neighbour(?:s|ing)?\b(?!_)|(?:synchron|(?:un)?initial|special|(?:un)?normal|optim|serial|summar|organ)"
    r"is(?:e|es|ed|ing|ation|ations)\b(?!\()|(?:un)?quantis(?:es|ed|er|ers|ing|ation)\b|towards\b|learnt\b|for ever\b|"
    r"anew\b|in vain\b)",
    re.IGNORECASE,
)
NAMES = re.compile(r"\b(?:quantise|quantise_tokens)\b")  # of exercises, as learners' answers have them
FENCED = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)  # commands, output and names in a page
# The end of a sentence and the start of the next: "... first. Then", not "B. Smith" and not "`a. B`".
SENTENCES = re.compile(r"[a-z0-9)`\"*][.?!]\)? +(?=[A-Z][a-z]|[A-Z] |`)")
NO_PROSE = re.compile(r"\s*(?:[|#<>$*(-]|\d+\. )")  # tables, headings, folds, formulas, lead-ins, items, asides


def may_be_verb(word: str) -> bool:
    """Return whether a docstring may start with a word: "return", but not "returns", "returning" or "the"."""
    inflected = word.endswith("ing") and word not in ("bring", "ring") or word.endswith("s") and not word.endswith("ss")
    return word[:1].isalpha() and word not in NO_VERBS and not word.endswith(" of") and not inflected


# lengths: [B] int64 tensor -> [B+1] int32 tensor
SIGNATURE = re.compile(r"\w+: \[[^\]]*\][\w ]* -> \[[^\]]*\][\w ]*\.?$")


def first_words(source: str) -> list[tuple[int, str]]:
    """Return (line, first word in lower case, or "share of") per function's docstring.

    A property may be described, and a docstring that is a signature has no verb.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").split()
            described = any("property" in ast.unparse(d) for d in node.decorator_list)
            if text and not described and not SIGNATURE.match(" ".join(text)):
                word = text[0].strip(".,:;").lower()
                found.append((node.lineno, f"{word} of" if word in NOUNS and text[1:2] == ["of"] else word))
    return found


def questions(source: str) -> list[str]:
    """Return a sentence per docstring of a class or of the module that starts with a question word."""
    texts = [
        (getattr(node, "lineno", 1), (ast.get_docstring(node) or "").split())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.Module)
    ]
    words = [(line, text[0].strip(".,:;").lower()) for line, text in texts if text]
    return [f"line {line}: a docstring that starts with {word!r}" for line, word in words if word in QUESTIONS]


def without_verb(source: str) -> list[str]:
    """Return a sentence per docstring that starts with no verb."""
    bad = [(line, word) for line, word in first_words(source) if not may_be_verb(word)]
    return [f"line {line}: a docstring that starts with {word!r}" for line, word in bad]


def phrases(text: str) -> list[str]:
    """Return a sentence per phrase that the rules exclude."""
    lines = text.splitlines()
    return [
        f"line {i}: {m.group()!r}" for i, line in enumerate(lines, 1) for r in (PER, RIDDLES) for m in r.finditer(line)
    ]


def foreign(text: str) -> list[str]:
    """Return a sentence per word that a chapter should not use."""
    lines = [NAMES.sub("", line) for line in text.splitlines()]
    return [f"line {i}: {m.group()!r}" for i, line in enumerate(lines, 1) for m in FOREIGN.finditer(line)]


def prose(page: str) -> str:
    """Return a page without code; its lines keep their numbers."""
    return FENCED.sub(lambda m: "\n" * m.group().count("\n"), page)


def comments_and_texts(source: str) -> str:
    """Return the comments and string literals of a module, one a line."""
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join(token.string for token in found if token.type in kinds)


def crowded(source: str) -> list[str]:
    """Return each line of Markdown prose that holds more than one sentence; code between ``` is no prose."""
    found, code = [], False
    for line in source.splitlines():
        code ^= line.startswith("```")
        if not code and not NO_PROSE.match(line) and SENTENCES.search(line):
            found.append(line)
    return found


@pytest.mark.parametrize("path", [*PACKAGE, *CHAPTERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_functions_start_with_a_verb(path: Path):
    assert without_verb(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_classes_and_modules_ask_no_question(path: Path):
    assert questions(path.read_text(encoding="utf-8")) == []


def test_rates_are_per_something_and_nobody_hears():
    found = {str(path.relative_to(ROOT)): phrases(path.read_text(encoding="utf-8")) for path in TEXTS}
    assert {name: bad for name, bad in found.items() if bad} == {}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_chapters_are_american_and_have_a_sentence_per_line(path: Path):
    assert foreign(path.read_text(encoding="utf-8")) == []
    assert [x for c in notebook.read(path).cells if c.kind == "markdown" for x in crowded(c.source)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_american_and_free_of_house_words(path: Path):
    assert foreign(prose(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_docstrings_and_messages_are_american(path: Path):
    text = comments_and_texts(path.read_text(encoding="utf-8"))
    assert [m.group() for m in BRITISH.finditer(text)] == []


NOTEBOOKS = [p for p in CHAPTERS if p.parent.name == "notebooks"]


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda p: p.stem)
def test_chapters_have_a_summary_before_the_exercises(path: Path):
    text = path.read_text(encoding="utf-8")
    points = text[text.index("\n# ## Summary\n") : text.index("\n# ## Exercises\n")].count("\n# * ")
    assert 3 <= points <= 7


@pytest.mark.parametrize(("path", "after"), list(zip(NOTEBOOKS, NOTEBOOKS[1:])), ids=lambda p: p.stem)
def test_chapters_end_with_a_link_to_the_next_one(path: Path, after: Path):
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"\n# Next: \[{after.stem[:2]} [^\]]+\]\({after.name}\)\.\n*$", text)


def test_breaches_would_be_seen():
    assert without_verb('def f():\n    """The value of x."""') and without_verb('def f():\n    """(a, b) of x."""')
    assert not without_verb('def f(x):\n    """lengths: [B] int64 -> [B+1] int32."""')
    assert without_verb('def f(x):\n    """lengths: [B] int64 -> [B+1] int32, their sums."""')
    assert not without_verb('class A:\n    @property\n    def f(self):\n        """The value of x."""')
    for text in ("Returns x.", "Returning x.", "Index of x.", "Share of x in y."):
        assert without_verb(f'def f():\n    """{text}"""'), text
    for text in ("Pass x on.", "Bring x.", "Return x.", "Process x."):
        assert not without_verb(f'def f():\n    """{text}"""'), text
    assert questions('"""How x works."""') and questions('class A:\n    """What x holds."""')
    assert not questions('"""Count x: what it holds."""\nclass A:\n    """The contents of x."""')
    for text in ("one load takes 3 ms a step", "once a launch", "4 scales a column.", "each task hears of it"):
        assert phrases(text), text
    for text in ("the bytes a copy moves", "which rows a tile needs", "the registers a thread holds"):
        assert not phrases(text), text
    assert phrases("It spills 12 bytes a thread.") and phrases("``waiting`` hears of long runs.")
    assert not phrases("Which tiles a program takes, and 12 bytes per thread.")
    for text in (
        "its neighbour",
        "normalised",
        "Whoever holds a tile",
        "read it beside this",
        "mend it",
        "moved towards it",
    ):
        assert foreign(text), text
    for text in (
        "recommended",
        "on the other side",
        "toward it",
        "amendments",
        "neighboring",
        "modelled",
        "the besides",
        "specialist",
        "check the answer quantise(x)",
    ):
        assert not foreign(text), text
    for text in ("its neighbours", "Synchronise it", "the quantiser", "an uninitialised lane", "made anew"):
        assert foreign(text) and BRITISH.search(text), text
    for text in ("neighbour_kernel", "memory.synchronise(3)", "quantise", "specialised_for"):
        assert not BRITISH.search(text), text
    assert comments_and_texts('x = "one"  # two\nneighbour = 3') == '"one"\n# two'
    assert prose("a\n```\nbeside\n```\nb `beside` c") == "a\n\n\n\nb  c"
    assert crowded("It is full. The next one is not.") and crowded("Is it? `x` says so.")
    for text in (
        "By R. L. Graham, in 1969.",
        "Of Q, K and V, e.g. the first",
        "| a. Then | b |",
        "**Why?** It is so. Then",
    ):
        assert not crowded(text), text
