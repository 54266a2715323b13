"""Known mistakes are recognised by sketches where the solutions are not: as with them, and nothing else is."""

import math

import numpy as np
import pytest
import torch

from jfa.course import catalog, mistakes, release
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import cases_of, judge
from jfa.course.mutants import recognisable, source_of
from jfa.course.strip import solution_source

VALUES = [
    torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5), torch.tensor([True, False]), torch.empty(0, 3),
    torch.tensor([1.0, math.nan, math.inf, -math.inf]), np.arange(4, dtype=np.int16), 3, 2.5, True, None, "word", [1, (2.0, None)],
    {"a": torch.ones(2), "b": 1}, torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), torch.tensor([1 + 2j]),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(VALUES)))
def test_a_value_is_like_itself_and_like_no_other(i):
    kept = eval(repr(mistakes.sketch(VALUES[i])))
    assert [mistakes.alike(mistakes.sketch(v), kept, 1e-4) for v in VALUES] == [j == i for j in range(len(VALUES))]


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
def test_rounding_passes_and_one_other_number_does_not(size):
    value = torch.randn(size, generator=torch.Generator().manual_seed(2))
    kept = mistakes.sketch(value)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 3e-5
    assert mistakes.alike(mistakes.sketch(value + noise), kept, 1e-4)
    assert not mistakes.alike(mistakes.sketch(value * 1.01), kept, 1e-4)
    assert not mistakes.alike(mistakes.sketch(value.flip(0) + (1 if size == 1 else 0)), kept, 1e-4)
    one = value.clone()
    one[size // 2] += 1.0
    assert not mistakes.alike(mistakes.sketch(one), kept, 1e-5)


def test_a_release_without_solutions_recognises_what_the_course_does(toy, tmp_path_factory, monkeypatch):
    pristine = Pristine.load(toy, "90_toy")
    source = release._mistakes(toy, "90_toy")
    kept: dict = {}
    exec(source, kept)
    named = 0
    for exercise in catalog.chapter(90).exercises:
        for mutant in exercise.mutants:
            with_solution = from_source(source_of(mutant, pristine.solution(exercise)), exercise, pristine)
            expected = judge(exercise, with_solution, toy)
            monkeypatch.setattr(catalog, "sketches", lambda e: kept["MISTAKES"].get(e.id))
            with_solution.solution = ""
            found = judge(exercise, with_solution, toy)
            assert (found.state, found.recognised) == (expected.state, expected.recognised), mutant.name
            named += bool(found.recognised) and not mutant.source
    assert named >= 3
    assert "return x + x" not in source


def test_a_wrong_answer_of_another_kind_is_not_recognised(toy, monkeypatch):
    exercise, pristine = catalog.exercise("90.2"), Pristine.load(toy, "90_toy")
    solution = solution_source(pristine.solution(exercise))
    kept = recognisable(exercise, cases_of(exercise, 0), solution, pristine.given(exercise))
    monkeypatch.setattr(catalog, "sketches", lambda e: kept)
    answer = from_source("def twice(x):\n    return 2 * x + 1e-2", exercise, pristine)
    answer.solution = ""
    assert judge(exercise, answer, toy).recognised == ""


@pytest.mark.parametrize("released", [False, True])
def test_an_answer_that_is_like_a_mistake_in_one_case_only_is_not_recognised(toy, monkeypatch, released):
    exercise, pristine = catalog.exercise("90.2"), Pristine.load(toy, "90_toy")
    solution = solution_source(pristine.solution(exercise))
    cases = cases_of(exercise, 0)
    kept = recognisable(exercise, cases, solution, pristine.given(exercise))
    monkeypatch.setattr(catalog, "sketches", lambda e: kept)

    def recognised(source):
        answer = from_source(source, exercise, pristine)
        answer.solution = "" if released else answer.solution
        return judge(exercise, answer, toy).recognised

    sizes = [case.args[0].shape[0] for case in cases]
    last = f"def twice(x):\n    return x + 2 if x.shape[0] == {max(sizes)} else 2 * x"
    first = f"def twice(x):\n    return 2 * x if x.shape[0] == {max(sizes)} else x + 2"
    assert recognised("def twice(x):\n    return x + 2") == "Two is added."
    assert [recognised(last), recognised(first)] == ["", ""]
