"""Answers as readers write them: each wrong one fails, each right one passes. A sample here, all of them with the slow tests."""

import pytest

from jfa.course import catalog
from jfa.course.answers import Pristine
from jfa.course.paths import Course, find_course
from tests.course.answers import chapters, graded, load

COURSE = Course(find_course().root)
ATTEMPTS = [a for chapter in chapters() for a in load(chapter)]
PRISTINE = {c: Pristine.load(COURSE, catalog.chapter(c).stem) for c in chapters()}
EXERCISES = list(dict.fromkeys(a.exercise for a in ATTEMPTS))


def _verdict(attempt):
    """Return what is not as it must be, "" if all is."""
    result = graded(attempt, COURSE, PRISTINE[int(attempt.exercise.split(".")[0])])
    if result.passed == attempt.right and result.state != "not started":
        return "" if attempt.right or result.message else f"{attempt.name}: no message"
    return f"{attempt.name} ({'right' if attempt.right else 'wrong'}): {result.state}\n{result.text()}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_there_are_wrong_answers_of_ten_kinds_and_right_ones(exercise):
    mine = [a for a in ATTEMPTS if a.exercise == exercise]
    assert sum(not a.right for a in mine) >= 7 and sum(a.right for a in mine) >= 1
    assert len({a.name for a in mine}) == len(mine)
    stub = PRISTINE[int(exercise.split(".")[0])].stub(catalog.exercise(exercise))
    cells = [a.cell(PRISTINE[int(exercise.split(".")[0])].solution(catalog.exercise(exercise))) for a in mine]
    assert len(set(cells)) == len(cells) and stub not in cells


@pytest.mark.parametrize("attempt", ATTEMPTS[::25], ids=lambda a: f"{a.exercise} {a.name}")
def test_a_sample_is_judged_as_it_must_be(attempt):
    assert not _verdict(attempt)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_answer_is_judged_as_it_must_be(exercise):
    odd = [v for a in ATTEMPTS if a.exercise == exercise if (v := _verdict(a))]
    assert not odd, "\n".join(odd)
