"""Fixtures: the engine's own toy chapter in a temporary course, so that no test reads a learner's files."""

import shutil
from pathlib import Path

import pytest

from jfa.course import catalog, checks, nursery_client, upkeep
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import judge
from jfa.course.paths import Course

TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="session", autouse=True)
def nursery():
    """One nursery for all tests; gone at the end."""
    yield nursery_client.nursery()
    nursery_client.close_nursery()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A course of one chapter, 90, with untouched exercises, in a temporary folder."""
    monkeypatch.setattr(checks, "__path__", [str(TOY / "checks")])
    shutil.copytree(TOY / "solutions", tmp_path / "solutions")
    course = Course(tmp_path)
    upkeep.make_exercises(course)
    (tmp_path / "jfa").mkdir()
    monkeypatch.setenv("JFA_COURSE", str(tmp_path))
    return course


@pytest.fixture
def judged(toy):
    """judged("90.2", source) -> Result of grading that source as the exercise's cell."""
    pristine = Pristine.load(toy, "90_toy")

    def run(number, source, seed=0):
        exercise = catalog.exercise(number)
        return judge(exercise, from_source(source, exercise, pristine), toy, seed)

    return run
