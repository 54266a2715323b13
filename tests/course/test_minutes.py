"""The minutes that the course prints are the estimate that it says they are, and the same wherever they stand."""

import re
import runpy

import pytest

from jfa.course import catalog
from tests.support import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "measure_exercises.py"), run_name="tool")
CHAPTERS = catalog.chapters()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.stem)
def test_minutes_are_the_same_in_check_text_and_table(chapter):
    found = TOOL["printed"](chapter.stem[:2])
    wanted = {e.id: e.minutes for e in chapter.exercises}
    assert found == {place: wanted for place in TOOL["PLACES"]}
    time = next(line for line in _notebook(chapter).split("\n") if re.match(r"# \*\*Time", line))
    assert f" {sum(wanted.values())} for the exercises" in time


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.stem)
def test_minutes_follow_from_the_rule(chapter):
    """One step of five minutes is allowed, so that a line more or less in a chapter changes no exercise."""
    counted = {exercise: minutes for exercise, (_, _, minutes) in TOOL["measured"](chapter.stem[:2]).items()}
    assert counted.keys() == {e.id for e in chapter.exercises}
    off = {e.id: (e.minutes, counted[e.id]) for e in chapter.exercises if abs(e.minutes - counted[e.id]) > 5}
    assert not off, f"{off}: tools/measure_exercises.py {chapter.stem[:2]} --write"


def test_chapter_00_says_what_the_minutes_are():
    text = _notebook(CHAPTERS[0]).replace("\n# ", " ")
    words = {5.0: "five minutes", 2.0: "two", 1.0: "one", 0.5: "half a minute"}
    text_and_report, new, known, given = (
        words[TOOL[name]] for name in ("BASE", "PER_NEW_LINE", "PER_KNOWN_LINE", "PER_GIVEN_LINE")
    )
    assert "not a measurement: no reader has been timed" in text
    assert f"{text_and_report} for an exercise's text and the report, {new} for each line of its solution" in text
    assert f"{known} for each other line, and {given} for each line of a program that is given to be fixed" in text


def _notebook(chapter):
    return (ROOT / "notebooks" / f"{chapter.stem}.py").read_text(encoding="utf-8")
