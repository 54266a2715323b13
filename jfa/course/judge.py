"""The judge: makes the cases, has another process run the answer, computes the reference, and compares. It runs no
learner code."""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from jfa.course import catalog, guard, launch, mistakes, report
from jfa.course.given import definitions
from jfa.course.job import Job
from jfa.course.mutants import Mutants
from jfa.course.paths import Course
from jfa.course.printable import clean
from jfa.course.report import Checked, Result
from jfa.course.spec import Case, Exercise
from jfa.course.syntax import parse
from jfa.course.trial import Trial

Closed = Mapping[str, list[str]]
"""Files and folders that an answer may not read, by the word of the violation."""


@dataclass
class Answer:
    """An answer to judge: its cell, and in a notebook also the live object.

    ``helpers`` are (label, source) of cells to run first; ``below`` are sources of cells that may define what is missing.
    ``skeleton`` is the pristine cell; ``solution`` the solution's cell where there is one (to make mutants from).
    """

    source: str
    helpers: list[tuple[str, str]] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    skeleton: str = ""
    solution: str = ""
    given: list[str] = field(default_factory=list)
    live: Any = None
    is_live: bool = False


def judge(
    exercise: Exercise,
    answer: Answer,
    course: Course,
    seed: int = 0,
    waiting: launch.Waiting = launch.say_nothing,
    closed: Closed = MappingProxyType({}),
) -> Result:
    """Judge one answer; never raises for anything the answer is or does.

    Args:
        waiting: called about once per second while the answer runs.
        closed: what the answer may not read besides the course's own solutions and checks.
    """  # fmt: skip
    start = time.monotonic()
    result = Result(exercise.id, exercise.title, report.NOT_STARTED, seed=seed, hints=len(exercise.hints))
    try:
        _judge(exercise, answer, course, waiting, closed, result)
    except Exception as error:  # noqa: BLE001  an answer's text or value may be anything; the next answer is to be judged
        result.state = report.WRONG
        fault = f"This answer could not be judged ({type(error).__name__}: {str(error)[:200]})."
        names = exercise.check_names
        result.checks = [Checked("runs", False, "", fault), *(Checked(n) for n in names if n != "runs")]
    result.seconds = time.monotonic() - start
    return clean(result)


def _judge(
    exercise: Exercise, answer: Answer, course: Course, waiting: launch.Waiting, closed: Closed, result: Result
) -> None:
    """Judge the answer, and fill in ``result``."""
    if not _is_untouched(answer, exercise):
        _try(exercise, answer, course, waiting, closed, result)
    elif exercise.hunt:
        seen = Result(exercise.id, exercise.title, report.WRONG, seed=result.seed)
        _try(exercise, answer, course, waiting, closed, seen)
        result.notes += [f"As it stands: {seen.message}", *seen.notes]


def _try(
    exercise: Exercise, answer: Answer, course: Course, waiting: launch.Waiting, closed: Closed, result: Result
) -> None:
    """Run the answer on its cases and enter into ``result`` what came of it."""
    cases = cases_of(exercise, result.seed)
    outcome = _run(job_for(exercise, answer, course, cases, result.seed, closed), answer, waiting)
    cells = (answer.source, answer.skeleton)
    known = catalog.sketches(exercise) if result.seed == mistakes.SEED and not answer.solution else None
    Trial(exercise, cases, outcome, result, Mutants(answer.solution, answer.given, known), cells).decide()
    if exercise.needs_triton and not result.passed:
        result.notes += triton_trouble()


def triton_trouble() -> list[str]:
    """Return a sentence if Triton is missing or in pieces, for reports that would else blame the answer."""
    try:
        import triton
        import triton.language

        _ = triton.jit, triton.language.load
    except (ImportError, AttributeError) as error:
        return [
            f"Triton does not work here ({error}), which is no fault of your answer: `jfa doctor` says how to repair it."
        ]
    return []


def _run(job: Job, answer: Answer, waiting: launch.Waiting) -> launch.Outcome:
    """Run the answer: forked from this process if it lives here, else (a file's answer, or a GPU in use) from a clean one."""
    if answer.is_live and not guard.gpu_in_use():
        outcome = launch.run_forked(job, answer.live, waiting)
        if outcome.ended != "time" or outcome.events or not answer.source:
            return outcome
        # nothing came at all: a thread of the notebook held a lock at the moment of the fork
    return launch.run_clean(job, waiting)


def _is_untouched(answer: Answer, exercise: Exercise) -> bool:
    """Return whether the answer's AST equals the skeleton's: comments and layout do not make an answer."""
    if answer.is_live and answer.live is ...:
        return True
    if answer.is_live:  # only functions are known of it, not the rest of its cell
        mine, given = definitions(answer.source), definitions(answer.skeleton)
        return exercise.name in mine and all(
            name in given and ast.dump(n) == ast.dump(given[name]) for name, n in mine.items()
        )
    mine, pristine = _tree(answer.source), _tree(answer.skeleton)
    return mine is not None and mine == pristine


def _tree(source: str) -> str | None:
    """Return the cell's AST as text."""
    try:
        tree = parse(textwrap.dedent(source))
        return ast.dump(tree) if tree.body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def cases_of(exercise: Exercise, seed: int) -> list[Case]:
    """Return the exercise's cases, then the first one again with other numbers (cached and hard-coded answers fail there)."""
    if exercise.kind == "value":
        return exercise.cases(seed)
    with torch.random.fork_rng(devices=[]):
        cases, fresh = exercise.cases(seed), exercise.cases(seed + 1)
    again = next((c for c in fresh if not c.raises), None)
    return cases + ([again] if again else [])


def job_for(
    exercise: Exercise,
    answer: Answer,
    course: Course,
    cases: list[Case],
    seed: int,
    closed: Closed = MappingProxyType({}),
) -> Job:
    """Return everything the child gets to know: no reference, no solution, no mutant."""
    return Job(
        source=answer.source,
        helpers=[list(h) for h in answer.helpers],
        below=answer.below,
        name=exercise.name,
        kind=exercise.kind,
        call=textwrap.dedent(inspect.getsource(exercise.call)) if exercise.call else "",
        call_name=exercise.call.__name__ if exercise.call else "",
        cases=[{"args": c.args, "kwargs": c.kwargs, "raises": bool(c.raises)} for c in cases],
        parameters=_parameters(answer.source, exercise),
        forbid=list(exercise.forbidden),
        allow=list(exercise.allow),
        closed={"solutions": course.protected, **closed},
        memory_mb=exercise.memory_mb,
        cpu_seconds=exercise.time_limit,
        needs_triton=exercise.needs_triton,
        schedules=[list(s) for s in exercise.schedules],
        measures=[limit.measure for limit in exercise.limits if isinstance(limit.measure, str)],
        seed=seed,
    )


def _parameters(source: str, exercise: Exercise) -> list[str]:
    """Return names of the answer's parameters, to name a changed input by."""
    if exercise.call is not None:
        return list(inspect.signature(exercise.call).parameters)[1:]
    try:
        tree = parse(textwrap.dedent(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == exercise.name]
    return [a.arg for a in found[-1].args.posonlyargs + found[-1].args.args] if found else []
