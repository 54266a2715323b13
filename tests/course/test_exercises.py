"""Every exercise of every chapter: what its author promises holds, and what the course promises its readers holds."""

import ast
import inspect
import re

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from jfa.course import catalog, compare, given, notebook, trial
from jfa.course.answers import Pristine, from_notebook, from_source
from jfa.course.judge import judge
from jfa.course.mutant_table import run_mutant
from jfa.course.paths import Course, find_course
from jfa.course.strip import solution_source, strip_cell

COURSE = Course(find_course().root)
CHAPTERS = [c for c in catalog.chapters() if (COURSE.solutions / f"{c.stem}.py").exists()]
PRISTINE = {c.number: Pristine.load(COURSE, c.stem) for c in CHAPTERS}
EXERCISES = [e for c in CHAPTERS for e in c.exercises]


def _by_id(exercise):
    return exercise.id


every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.stem)


def _grade(exercise, source, seed=0):
    return judge(exercise, from_source(source, exercise, PRISTINE[exercise.chapter]), COURSE, seed)


@every_chapter
def test_each_chapter_has_a_cell_for_each_exercise(chapter):
    tagged = PRISTINE[chapter.number].solutions.exercises()
    assert tagged == [e.id for e in chapter.exercises]
    assert 4 <= len(tagged) <= 9


@every_exercise
@pytest.mark.parametrize("seed", [0, 7])
def test_the_solution_passes(exercise, seed):
    pristine = PRISTINE[exercise.chapter]
    solutions = pristine.solutions
    clean = solutions.with_sources(
        {i: solution_source(c.source) for i, c in enumerate(solutions.cells) if c.kind == "code"}
    )
    result = judge(exercise, from_notebook(clean, exercise, pristine), COURSE, seed)
    assert result.passed, result.text()
    assert not [n for n in result.notes if "could not be measured" in n], result.text()


@every_exercise
def test_the_skeleton_is_not_started(exercise):
    pristine = PRISTINE[exercise.chapter]
    result = judge(exercise, from_notebook(pristine.skeleton, exercise, pristine), COURSE)
    assert result.state == "not started"
    assert "Traceback" not in result.text() and "YOUR CODE" in result.text()


@every_exercise
def test_a_comment_in_the_skeleton_does_not_start_it(exercise):
    stub = PRISTINE[exercise.chapter].stub(exercise)
    result = _grade(exercise, f"# hm, where to begin?\n{stub}\n\n")
    assert result.state == "not started"


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e.hunt], ids=_by_id)
def test_a_hunt_says_what_the_given_program_runs_into(exercise):
    result = _grade(exercise, PRISTINE[exercise.chapter].stub(exercise))
    assert result.state == "not started"
    assert len(result.notes) == 1 and result.notes[0].startswith("As it stands: "), result.text()


VARIANTS = [(e, i) for e in EXERCISES for i in range(max(2, len(e.variants)))]


@pytest.mark.parametrize("exercise, index", VARIANTS, ids=lambda v: getattr(v, "id", str(v)))
def test_a_right_answer_in_another_form_passes(exercise, index):
    assert len(exercise.variants) >= 2, f"{exercise.id} has {len(exercise.variants)} variants"
    result = _grade(exercise, exercise.variant(index, PRISTINE[exercise.chapter].solution(exercise)))
    assert result.passed, result.text()


def _label(value):
    return getattr(value, "id", None) or getattr(value, "name", None) or str(value)


@pytest.mark.parametrize("exercise, mutant", [(e, m) for e in EXERCISES for m in e.mutants], ids=_label)
def test_a_known_mistake_fails_its_check_and_is_told(exercise, mutant):
    row = run_mutant(exercise, mutant, COURSE, PRISTINE[exercise.chapter])
    assert not row.fault, row.fault
    assert "tensor(" not in row.result.text(), "a message prints a whole tensor"


@every_exercise
def test_hints_mutants_and_texts_are_there(exercise):
    assert 2 <= len(exercise.hints) <= 3 and all(h.strip() for h in exercise.hints)
    assert len(exercise.mutants) >= 4
    assert len({m.name for m in exercise.mutants}) == len(exercise.mutants)
    names = set(exercise.check_names)
    assert all(m.caught_by in names and m.says for m in exercise.mutants)
    assert 1 <= exercise.difficulty <= 3 and exercise.minutes > 0 and exercise.title


@every_exercise
def test_limits_are_printed_in_the_exercise(exercise):
    text = " ".join(c.source for c in PRISTINE[exercise.chapter].skeleton.cells)
    words = re.sub(r"[\s*`$]+", " ", text)
    for limit in exercise.limits:
        assert limit.text and re.sub(r"[\s*`$]+", " ", limit.text) in words, (
            f"{exercise.id}: {limit.text!r} is not in its text"
        )


@every_exercise
def test_what_is_forbidden_is_said_in_the_text(exercise):
    text = " ".join(c.source for c in PRISTINE[exercise.chapter].skeleton.cells).lower()
    for word in exercise.forbid:
        assert word.lower() in text, f"{exercise.id} forbids {word!r}, and its chapter does not say so"


@every_exercise
def test_what_must_stay_as_given_is_said_in_the_text(exercise):
    text = " ".join(c.source for c in PRISTINE[exercise.chapter].skeleton.cells)
    if exercise.kept:
        assert exercise.kept.text in re.sub(r"[\s*`#]+", " ", text)
        assert set(exercise.kept.names) <= set(given.definitions(PRISTINE[exercise.chapter].stub(exercise)))


def _references(exercise):
    for case in exercise.cases(0):
        if exercise.reference and not case.raises:
            yield case, trial.reference_for(exercise, case)


def _arrays(value):
    if isinstance(value, tuple | list):
        return [a for v in value for a in _arrays(v)]
    if isinstance(value, dict):
        return [a for v in value.values() for a in _arrays(v)]
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [a for v in value.unbind() for a in _arrays(v)]
    numbers = compare._numbers(value)
    return [] if numbers is None else [numbers]


@every_exercise
def test_references_hold_no_nan_and_stand_out_from_the_tolerance(exercise):
    largest = []
    for case, reference in _references(exercise):
        for array in _arrays(reference):
            if array.dtype.kind == "f":
                # a sequence whose own result is NaN, or values that are only moved
                wild = "a neighbor of NaN" in case.name or "NaN and infinities among the values" in case.name
                assert wild or not (np.isnan(array) | np.isposinf(array)).any(), (
                    f"{case.name}: reference holds NaN or +inf"
                )
                assert np.isnan(array).sum() <= array.size // 2, f"{case.name}: most of it is NaN"
                finite = array[np.isfinite(array)]
                largest.append(np.abs(finite).max(initial=0.0))
                assert (
                    finite.size == 0
                    or array.size < 2
                    or exercise.tol * max(1.0, largest[-1]) < 0.05 * max(1.0, largest[-1])
                )
    assert not largest or max(largest) >= 50 * exercise.tol * max(1.0, max(largest)), "zeros would pass"


@every_exercise
def test_cases_hold_no_views(exercise):
    """A tensor travels to the answer's process as its numbers: strides are lost. A launch that wants a view makes it there."""
    for case in exercise.cases(0):
        tensors = [x for x in tree_leaves((case.args, case.kwargs)) if isinstance(x, torch.Tensor) and not x.is_nested]
        assert all(x.is_contiguous() for x in tensors), case.name


def _zeros(value):
    if isinstance(value, tuple | list):
        return type(value)(_zeros(v) for v in value)
    if isinstance(value, dict):
        return {k: _zeros(v) for k, v in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) and not value.is_nested else value


def _arguments(exercise, case):
    """Return a case's arguments by name."""
    names = list(inspect.signature(exercise.call or exercise.reference).parameters)[1 if exercise.call else 0 :]
    return dict(zip(names, case.args)) | case.kwargs


@every_exercise
def test_a_scale_that_is_handed_over_is_not_always_that_of_the_head_dim(exercise):
    if exercise.kind == "value" or not (exercise.call or exercise.reference):
        return
    cases = [_arguments(exercise, c) for c in exercise.cases(0) if not c.raises]
    scaled = [a for a in cases if isinstance(a.get("scale"), float)]
    dims = [{n for t in tree_leaves(a) if isinstance(t, torch.Tensor) for n in t.shape} for a in scaled]
    own = [a["scale"] for a, found in zip(scaled, dims) if all(abs(a["scale"] ** 2 * n - 1) > 1e-3 for n in found)]
    assert own or not scaled, "an answer that makes 1/sqrt(D) itself passes"


@every_exercise
def test_zeros_are_no_answer(exercise):
    wrong = []
    for case, reference in _references(exercise):
        zeros = _zeros(reference)
        if any((a != 0).any() for a in _arrays(reference)) and any(
            isinstance(v, torch.Tensor) for v in _flat(reference)
        ):
            wrong.append(compare.fault_of(exercise, case, {"value": zeros, "facts": []}, reference))
    assert not wrong or any(wrong), "a tensor of zeros passes"


def _flat(value):
    return [v for item in value for v in _flat(item)] if isinstance(value, tuple | list) else [value]


@every_exercise
def test_cases_are_random_and_keep_their_shapes(exercise):
    if exercise.kind == "value":
        return
    zero, one = exercise.cases(0), exercise.cases(1)
    assert len(zero) == len(one) and zero[0].name == one[0].name
    for a, b in zip(zero, one):
        for x, y in zip(_arrays(list(a.args)), _arrays(list(b.args))):
            assert x.shape == y.shape, f"{a.name}: shapes depend on the seed"
    assert [repr(c.args) for c in zero] == [repr(c.args) for c in exercise.cases(0)], "not reproducible"


# ---------------------------------------------------------------------------------------------- nothing leaks


def _lines(source):
    return [line.strip() for line in source.split("\n")]


def _between_markers(source):
    """Lines of the solution regions, long enough to be particular."""
    inside, found = False, []
    for line in _lines(source):
        inside = (inside or "BEGIN SOLUTION" in line) and "END SOLUTION" not in line
        found += [line] if inside and len(line) >= 25 and not line.startswith("#") else []
    return found


@every_chapter
def test_no_solution_line_is_in_the_exercises(chapter):
    solutions, skeleton = PRISTINE[chapter.number].solutions, PRISTINE[chapter.number].skeleton
    secret = {line for c in solutions.cells if c.kind == "code" for line in _between_markers(c.source)}
    given = {line for c in solutions.cells if c.kind == "code" for line in _lines(strip_cell(c.source, c.exercise))}
    shown = {line for c in skeleton.cells if c.kind == "code" for line in _lines(c.source)}
    assert secret, "nothing to solve"
    assert not (secret - given) & shown


class _Anonymous(ast.NodeTransformer):
    """Names replaced by numbers in order of appearance: the same code with other names is the same code."""

    def __init__(self):
        self.numbers = {}

    def _number(self, name):
        return f"n{self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Name(self, node):
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self._number(node.arg), None)


def _bodies(source):
    """(name, parameters and body with anonymous names, number of statements) of the functions a source defines."""
    found = []
    for node in ast.walk(ast.parse(notebook.runnable(source))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            bare = ast.FunctionDef("f", node.args, body or [ast.Pass()], [], lineno=1)
            plain = _Anonymous().visit(ast.parse(ast.unparse(bare)))
            found.append((node.name, ast.dump(plain), sum(isinstance(n, ast.stmt) for b in body for n in ast.walk(b))))
    return found


@every_chapter
def test_no_worked_cell_answers_an_exercise(chapter):
    path = COURSE.notebooks / f"{chapter.stem}.py"
    if not path.exists():
        pytest.skip("the chapter's text is not here")
    worked = {body for c in notebook.read(path).cells if c.kind == "code" for _, body, _ in _bodies(c.source)}
    for exercise in chapter.exercises:
        for name, body, size in _bodies(PRISTINE[chapter.number].solution(exercise)):
            helper = name != exercise.name and size < 3
            assert helper or body not in worked, f"{exercise.id}: the chapter works out {name}"


@every_chapter
def test_every_solution_is_stripped_completely(chapter):
    pristine = PRISTINE[chapter.number]
    assert "SOLUTION" not in pristine.skeleton.text
    setup = next(c for c in pristine.skeleton.cells if c.kind == "code")
    assert "setup" in setup.tags and "progress()" in setup.source
