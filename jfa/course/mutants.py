"""Run known mistakes in the judge on a wrong answer's case, to tell the learner which mistake the answer resembles."""

from __future__ import annotations

import ast
import itertools
import threading
import time
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from jfa.course import compare, mistakes
from jfa.course.magics import runnable
from jfa.course.precision import reference_for
from jfa.course.sources import compile_visible
from jfa.course.spec import Case, Exercise, Mutant
from jfa.course.strip import solution_source
from jfa.course.syntax import parse

_SECONDS = (
    5.0  # of this thread's computing, for all mutants of a case together: a verdict's words must not depend on the load
)
_COARSE = 1e-3  # a tolerance for numbers that are simulated: mutants lie within ten of it
_ONE_AT_A_TIME = threading.Lock()
_COUNT = itertools.count()
_COURSE_NAMES = {"check", "hint", "progress"}


@dataclass(frozen=True)
class Mutants:
    """Sources of an exercise's mutants: the solution's cell ("" where there is none) and the cells given above it.

    ``sketches`` stand for the mutants of a release without solutions: by mutant and case (:mod:`jfa.course.mistakes`).
    """

    solution: str = ""
    given: tuple[str, ...] | list[str] = ()
    sketches: list[list[Any]] | None = None

    def recognise(self, exercise: Exercise, returned: dict[int, tuple[Case, Any]], position: int) -> str:
        """Return ``says`` of the first mutant that returns what the answer returned, else "".

        Args:
            exercise: the exercise.
            returned: the cases on which the answer returned a value, and that value, by position.
            position: the case that failed. A mutant must be wrong there in the same way; and it must return what the answer
                returned in all other cases as well, or two mistakes that look alike in one case are taken for each other.
        """
        deadline = time.thread_time() + _SECONDS
        order = sorted(returned, key=lambda i: i != position)
        if exercise.tol >= _COARSE:
            order = [position]  # simulated numbers: by chance some case would not agree
        for number, mutant in enumerate(exercise.mutants):
            if not mutant.recognise or mutant.caught_by == "runs" or time.thread_time() > deadline:
                continue
            try:
                if all(
                    self._agrees(exercise, number, *returned[i], i, must_be_wrong=i == position)
                    for i in order
                    if i == position or time.thread_time() < deadline
                ):
                    return mutant.says
            except Exception:  # noqa: BLE001  a mutant may fail on a case: then it is not this mistake
                continue
        return ""

    def _agrees(
        self, exercise: Exercise, number: int, case: Case, value: Any, position: int, must_be_wrong: bool
    ) -> bool:
        """Return whether a mutant returns on this case what the answer returned."""
        mutant = exercise.mutants[number]
        if not (self.solution or mutant.source):
            return self._is_sketched(number, position, value, exercise, case, must_be_wrong)
        output = run_trusted(exercise, source_of(mutant, self.solution), case, self.given)
        return _equal(value, output, exercise) and not (must_be_wrong and _is_right(output, case, exercise))

    def _is_sketched(
        self, number: int, position: int, value: Any, exercise: Exercise, case: Case, must_be_wrong: bool
    ) -> bool:
        """Return whether a mutant's sketch on this case is one of the answer's value; without a sketch the mutant is right."""
        if not self.sketches or not 0 <= position < len(self.sketches[number]):
            return not must_be_wrong
        kept = self.sketches[number][position]
        if kept is None:
            return not must_be_wrong and _is_right(value, case, exercise)
        return mistakes.alike(mistakes.sketch(value), kept, _tolerance(exercise))


def source_of(mutant: Mutant, solution: str) -> str:
    """Return a mutant's cell, from the solution's cell with or without markers."""
    return mutant.apply(solution_source(solution))


def run_trusted(exercise: Exercise, source: str, case: Case, given: tuple[str, ...] | list[str]) -> Any:
    """Run course code (a solution, a mutant) in this process on a case's copies; one at a time, for the emulator's sake."""
    module = types.ModuleType("trusted")
    vars(module)["print"] = lambda *args, **kwargs: None  # a mutant's words are not the judge's
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, cell in enumerate([*map(without_course_calls, given), source]):
            exec(compile_visible(cell, f"<course code {next(_COUNT)}.{number}>"), vars(module))
        answer = vars(module)[exercise.name]
        if exercise.kind == "value":
            return answer
        args, kwargs = _copy(case.args), _copy(case.kwargs)
        return exercise.call(answer, *args, **kwargs) if exercise.call else answer(*args, **kwargs)


def without_course_calls(source: str) -> str:
    """Return a cell without its imports from jfa.course and its check(), hint() and progress() calls."""
    tree = parse(runnable(source))
    tree.body = [node for node in tree.body if not _is_course(node)]
    return ast.unparse(tree)


def _is_course(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("jfa.course")
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _COURSE_NAMES


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(_copy(v) for v in value)
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value.copy() if hasattr(value, "tobytes") else value


def _is_right(output: Any, case: Case, exercise: Exercise) -> bool:
    """Return whether this case does not show the mutant's mistake: then its equality with a wrong answer means nothing."""
    right = reference_for(exercise, case)
    leaves = compare.leaves(output, right, exercise.outputs)
    return not any(compare.value_fault(name, got, want, out, case, exercise.tol) for name, got, want, out in leaves)


def _tolerance(exercise: Exercise) -> float:
    return 10 * exercise.tol if exercise.tol < _COARSE else exercise.tol


def recognisable(
    exercise: Exercise, cases: list[Case], solution: str, given: tuple[str, ...] | list[str]
) -> list[list[Any]]:
    """Return sketches of the exercise's mutants, to be kept where the solution is not; nothing where a mutant's result is right."""

    def run(mutant: Mutant, case: Case) -> Any:
        output = run_trusted(exercise, source_of(mutant, solution), case, given)
        if _is_right(output, case, exercise):
            raise ValueError("not wrong on this case")
        return output

    return mistakes.sketches(exercise, cases, run)


def _equal(value: Any, output: Any, exercise: Exercise) -> bool:
    """Return whether the answer returned what the mutant did, within ten times the exercise's tolerance (a coarse one: once)."""
    tol = _tolerance(exercise)
    if compare.structure_fault(value, output, exercise.outputs):
        return False
    for name, got, want, out in compare.leaves(value, output, exercise.outputs):
        if compare.form_fault(name, got, want, out, {}) or compare.value_fault(name, got, want, out, Case("x"), tol):
            return False
    return True
