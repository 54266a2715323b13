"""Results of grading as files: JSON for programs, JUnit for CI, CSV for an instructor's list."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

from jfa.course.printable import printable
from jfa.course.report import HEADLINES, Result

Graded = dict[str, list[Result]]  # by learner; "" is this checkout


def write_json(path: Path, graded: Graded) -> None:
    """Print everything there is to know about each result."""
    content = [
        {"learner": printable(learner), "results": [r.as_dict() for r in results]}
        for learner, results in graded.items()
    ]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_csv(path: Path, graded: Graded) -> None:
    """Print one line per learner and exercise: learner, exercise, title, state, passed, check, message, seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["learner", "exercise", "title", "state", "passed", "check", "message", "seed"])
        for learner, results in graded.items():
            for r in results:
                check = r.failed.name if r.failed else ""
                table.writerow(
                    [_plain(learner), r.exercise, r.title, r.state, int(r.passed), check, _plain(r.message), r.seed]
                )


def _plain(text: str) -> str:
    """Return text that a spreadsheet does not take for a formula (messages quote learners' code)."""
    line = " ".join(printable(text).split())
    return f"'{line}" if line[:1] in ("=", "+", "-", "@") else line


def write_junit(path: Path, graded: Graded) -> None:
    """Print a test suite per learner, a test case per exercise."""
    root = ElementTree.Element("testsuites")
    for learner, results in graded.items():
        failures = sum(not r.passed for r in results)
        suite = ElementTree.SubElement(
            root, "testsuite", name=_xml(printable(learner)) or "jfa", tests=str(len(results)), failures=str(failures),
            time=f"{sum(r.seconds for r in results):.2f}",
        )  # fmt: skip
        for r in results:
            about = {"classname": f"chapter{r.exercise.split('.')[0]}", "name": f"{r.exercise} {r.title}"}
            case = ElementTree.SubElement(suite, "testcase", about, time=f"{r.seconds:.2f}")
            if not r.passed:
                failure = ElementTree.SubElement(
                    case, "failure", type=r.state, message=_xml(r.message or HEADLINES[r.state])
                )
                failure.text = _xml(r.text())
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """Return text without the characters XML has no place for."""
    return "".join(
        c for c in text if c in "\t\n" or 0x20 <= ord(c) < 0xD800 or 0xE000 <= ord(c) < 0xFFFE or ord(c) > 0xFFFF
    )
