"""Fixtures: the engine's own toy chapter in a temporary course, so that no test reads a learner's files."""

import shutil
from pathlib import Path

import pytest

from jfa.course import catalog, checks, nursery_client, upkeep
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import judge
from jfa.course.paths import Course

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def nursery():
    """One nursery for all tests; gone at the end."""
    yield nursery_client.nursery()
    nursery_client.close_nursery()


def _course(source, folder, monkeypatch):
    """A course of one chapter with untouched exercises, in a temporary folder."""
    monkeypatch.setattr(checks, "__path__", [str(source / "checks")])
    shutil.copytree(source / "solutions", folder / "solutions")
    course = Course(folder)
    upkeep.make_exercises(course)
    (folder / "jfa").mkdir()
    monkeypatch.setenv("JFA_COURSE", str(folder))
    return course


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Chapter 90: plain functions."""
    return _course(HERE / "toy", tmp_path, monkeypatch)


@pytest.fixture
def toy_kernels(tmp_path, monkeypatch):
    """Chapter 91: kernels."""
    return _course(HERE / "toy_kernels", tmp_path, monkeypatch)


@pytest.fixture
def judged(toy):
    """judged("90.2", source) -> Result of grading that source as the exercise's cell."""
    pristine = Pristine.load(toy, "90_toy")

    def run(number, source, seed=0):
        exercise = catalog.exercise(number)
        return judge(exercise, from_source(source, exercise, pristine), toy, seed)

    return run
