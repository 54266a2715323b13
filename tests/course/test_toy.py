"""The toy chapter keeps the same promises as a real one: its solution, skeleton, variants and mutants."""

import pytest

from jfa.course import catalog
from jfa.course.answers import Pristine
from jfa.course.grade import Source, grade
from jfa.course.mutant_table import run_mutants
from jfa.course.mutants import run_trusted

IDS = ["90.1", "90.2", "90.3", "90.4"]


def test_solutions_pass_twice_in_any_order(toy):
    exercises = [catalog.exercise(i) for i in IDS]
    for order in (exercises, exercises[::-1]):
        results = grade(order, Source(toy, "solutions"))
        assert [r.exercise for r in results] == [e.id for e in order]
        assert all(r.passed for r in results), [r.text() for r in results]


def test_untouched_exercises_are_not_started(toy):
    results = grade(catalog.select([]), Source(toy))
    assert [r.state for r in results] == ["not started"] * 4


@pytest.mark.parametrize("number", IDS)
@pytest.mark.parametrize("seed", [0, 5])
def test_variants_pass(judged, number, seed):
    for variant in catalog.exercise(number).variants:
        result = judged(number, variant, seed)
        assert result.passed, result.text()


def test_mutants_are_caught_as_declared(toy):
    assert [row.fault for row in run_mutants(catalog.select([]), toy) if row.fault] == []


def test_mutants_run_in_the_judge_without_a_word(toy, capsys, recwarn):
    exercise = catalog.exercise("90.2")
    source = (
        "import warnings\nprint('loud')\nwarnings.warn('loud')\n\ndef twice(x):\n    print('loud')\n    return 3 * x\n"
    )
    case = exercise.cases(0)[0]
    assert bool((run_trusted(exercise, source, case, []) == 3 * case.args[0]).all())
    assert capsys.readouterr().out == "" and not len(recwarn)


def test_without_solutions_the_skeleton_still_serves(toy):
    solutions = (toy.solutions / "90_toy.py").read_text()
    toy.skeletons.mkdir(parents=True)
    (toy.skeletons / "90_toy.py").write_text((toy.exercises / "90_toy.py").read_text())
    (toy.solutions / "90_toy.py").unlink()
    pristine = Pristine.load(toy, "90_toy")
    assert pristine.solution(catalog.exercise("90.2")) == "" and "YOUR CODE" in pristine.stub(catalog.exercise("90.2"))
    assert grade([catalog.exercise("90.2")], Source(toy))[0].state == "not started"
    assert "BEGIN SOLUTION" in solutions
