"""Lines of each solution that its chapter does not show, and the minutes that follow from them.

    .venv/bin/python tools/measure_exercises.py 03 04 10
    .venv/bin/python tools/measure_exercises.py 03 --write        the minutes into its check, exercises and table

Nobody has timed readers. What can be counted is how much of a solution is new: its lines are compared with the chapter's code
after every name but those of Triton, TLX, torch and Python is made the same, so that a worked line with other variables is
not new. Minutes: BASE for the text, the check and the report, then so many for each new line of the solution, each other one,
and, where a program is given to be mended, each line of the functions that must change; all rounded to five minutes. The course
prints these minutes and says that they are such an estimate: ``tests/course/test_minutes.py`` compares them.
"""

from __future__ import annotations

import argparse
import builtins
import io
import keyword
import re
import tokenize
from pathlib import Path

BASE, PER_NEW_LINE, PER_KNOWN_LINE, PER_GIVEN_LINE = 5.0, 2.0, 1.0, 0.5
ROOT = Path(__file__).resolve().parents[1]
PLACES = {  # where a chapter prints the minutes of its exercises: (folder, what stands there)
    "check": ("jfa/course/checks", r'^ +id="(?P<id>\d+\.\d+)",(?:(?!^ +id=").)*?^ +minutes=(?P<minutes>\d+)'),
    "text": (
        "solutions",
        r"^# ## +(?:Exercise )?(?P<id>\d+\.\d+)(?:(?!^# ## ).)*?[Dd]ifficulty \d of 3, (?P<minutes>\d+) minutes",
    ),
    "table": ("notebooks", r"^# \| (?P<id>\d+\.\d+) \|[^\n]*\| (?P<minutes>\d+) \|$"),
}
KEPT = {"tl", "tlx", "torch", "triton", *dir(builtins), *keyword.kwlist}


def shape(line: str) -> str:
    """Return a line with its own names made the same; names behind a dot, and keywords of calls, stay."""
    words, before = [], ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, IndentationError):  # a part of a statement that stands on several lines
        return " ".join(line.split())
    for n, token in enumerate(tokens):
        if token.type in (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.INDENT):
            continue
        follows = tokens[n + 1].string if n + 1 < len(tokens) else ""
        own = token.type == tokenize.NAME and token.string not in KEPT and before != "." and follows != "="
        words.append("name" if own or token.type == tokenize.NUMBER else token.string)
        before = token.string
    return " ".join(words)


def shapes(code: str) -> list[str]:
    """Return the shapes of a text's lines that are neither empty nor comments."""
    lines = (line for line in code.splitlines() if line.strip() and not line.strip().startswith("#"))
    return [shape(line) for line in lines]


def faulty(body: str) -> str:
    """Return those functions of a cell's code that hold what must change, "" if nothing is given to be mended."""
    functions = body.split("\n@triton.jit\n")
    return "\n".join(code for code in functions if "### STARTER" in code)


def cells(text: str) -> dict[str, tuple[str, str]]:
    """Return {exercise id: (the code between its solution's markers, the faulty program of a hunt or "")} of a solutions file."""
    found = {}
    for cell in text.split('# %% tags=["ex-')[1:]:
        name, body = cell.split("\n", 1)
        body = body.split("\n# %%")[0]
        parts = [
            part.split("### END SOLUTION")[0].split("### STARTER")[0] for part in body.split("### BEGIN SOLUTION")[1:]
        ]
        found[name.split('"')[0]] = "\n".join(parts), faulty(body)
    return found


def measured(chapter: str) -> dict[str, tuple[int, int, int]]:
    """Return {exercise id: (lines of its solution, new ones, minutes)} of a chapter, "03"."""
    (notebook,) = (ROOT / "notebooks").glob(f"{chapter}_*.py")
    known = set(shapes(notebook.read_text(encoding="utf-8")))
    found = {}
    for exercise, (code, given) in cells((ROOT / "solutions" / notebook.name).read_text(encoding="utf-8")).items():
        lines = shapes(code)
        new = sum(line not in known for line in lines)
        minutes = BASE + PER_NEW_LINE * new + PER_KNOWN_LINE * (len(lines) - new) + PER_GIVEN_LINE * len(shapes(given))
        found[exercise] = len(lines), new, 5 * max(1, round(minutes / 5))
    return found


def printed(chapter: str) -> dict[str, dict[str, int]]:
    """Return {exercise id: minutes} as a chapter's check, its exercises' text and its notebook's table have them."""
    found = {}
    for where, (folder, pattern) in PLACES.items():
        (path,) = (ROOT / folder).glob(f"{chapter}_*.py")
        matches = re.finditer(pattern, path.read_text(encoding="utf-8"), re.M | re.S)
        found[where] = {match["id"]: int(match["minutes"]) for match in matches}
    return found


def write(chapter: str) -> None:
    """Put the measured minutes wherever the chapter prints them; `jfa strip` makes its exercises of that."""
    minutes = {exercise: found[2] for exercise, found in measured(chapter).items()}

    def renewed(match: re.Match) -> str:
        begin, end = (edge - match.start() for edge in match.span("minutes"))
        return f"{match[0][:begin]}{minutes[match['id']]}{match[0][end:]}"

    for folder, pattern in PLACES.values():
        (path,) = (ROOT / folder).glob(f"{chapter}_*.py")
        text = re.sub(pattern, renewed, path.read_text(encoding="utf-8"), flags=re.M | re.S)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Print one line per exercise; write the minutes if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", default=["03", "04", "10"], help="two digits each")
    parser.add_argument("--write", action="store_true", help="put the minutes into the chapter's files")
    options = parser.parse_args()
    print(f"{'exercise':<9} {'lines':>5} {'new':>4} {'minutes':>8}")
    for chapter in options.chapters:
        if options.write:
            write(chapter)
        for exercise, (lines, new, minutes) in measured(chapter).items():
            print(f"{exercise:<9} {lines:>5} {new:>4} {minutes:>8}")


if __name__ == "__main__":
    main()
