"""check(), hint() and progress() as a notebook uses them: the live function, remarks about what differs, words and colors."""

import functools
import inspect
import types

import pytest
import torch

from jfa.course import catalog, check, guard, hint, launch, notebook_api, progress, state
from jfa.course.sources import compile_visible
from tests.course.test_grade import RIGHT, _write

_CELLS = iter(range(1000))


def _run_cell(source, name, shell=None):
    """Run a cell as IPython does: its source can be found, and it joins the history."""
    module = {"__name__": "__main__", "torch": torch}
    exec(compile_visible(source, f"<ipython-input-{next(_CELLS)}>"), module)
    if shell is not None:
        shell.user_ns["In"].append(source)
    return module[name]


@pytest.fixture
def shell(toy, monkeypatch):
    """A notebook around the test: history, and nothing is printed."""
    fake = types.SimpleNamespace(user_ns={"In": [""]})
    monkeypatch.setattr(notebook_api, "_shell", lambda: fake)
    return fake


def test_a_right_answer_passes_and_is_remembered(toy, shell):
    result = check("90.2", _run_cell(RIGHT["90.2"], "twice", shell))
    assert result.passed and state.states(toy)["90.2"] == "passed"
    assert "passed</b>" in result._repr_html_() and "seed 0" in result._repr_html_()
    assert "✓" in progress()._repr_html_() and "1 of 4 passed" in progress()._repr_html_()


def test_helpers_closures_and_lambdas_of_the_notebook_are_there(toy, shell):
    factor = torch.tensor(2.0)
    assert check("90.2", lambda x: x * factor).passed


def test_the_stub_is_not_started_even_when_called_another_way(toy, shell):
    stub = 'def twice(x):\n    raise NotImplementedError("90.2: not started")  # YOUR CODE'
    assert check("90.2", _run_cell(stub, "twice", shell)).state == "not started"
    edited = 'def twice(x):\n    y = x\n    raise NotImplementedError("90.2: not started")'
    result = check("90.2", _run_cell(edited, "twice", shell))
    assert result.state == "not started" and "Traceback" not in result.text()
    assert check("90.3", ...).state == "not started" and check("90.3", 42).passed


def test_an_exception_points_at_the_learners_line(toy, shell):
    result = check("90.2", _run_cell("def twice(x):\n    y = x\n    return y[99]", "twice", shell))
    assert "IndexError" in result.message and "line 3 of your answer: `return y[99]`" in result.message


@pytest.mark.parametrize("wrong", [torch.ones(3), 5, "twice", None])
def test_giving_the_result_instead_of_the_function_is_explained(toy, shell, wrong):
    result = check("90.2", wrong)
    assert result.state == "wrong" and 'check("90.2", twice)' in result.message


class Doubler:
    """An object that is called."""

    factor = 2

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self(x)


def test_partials_objects_and_methods_are_judged_as_what_they_are(toy, shell):
    right = _run_cell(RIGHT["90.2"], "twice", shell)
    for answer, words in (
        (functools.partial(right), "Checked a partial object"),
        (functools.partial(lambda factor, x: factor * x, 2), "Checked a partial object"),
        (Doubler(), "Checked a Doubler object"),
        (Doubler().method, "Checked `method`"),
        (lambda x: x + x, "a function without a name (a lambda)"),
    ):
        result = check("90.2", answer)
        assert result.passed and any(words in n and "`twice`" in n for n in result.notes), result.text()
    wrong = check("90.2", functools.partial(lambda x: x + 2))
    assert wrong.state == "wrong" and "Two is added." in wrong.text()


def test_a_partial_of_the_stub_is_not_started(toy, shell):
    stub = _run_cell('def twice(x):\n    raise NotImplementedError("90.2: not started")', "twice", shell)
    assert check("90.2", functools.partial(functools.partial(stub))).state == "not started"


def test_beside_a_gpu_in_use_an_object_without_a_source_is_told_so(toy, shell, monkeypatch):
    monkeypatch.setattr(guard, "gpu_in_use", lambda: True)
    result = check("90.2", functools.partial(_run_cell(RIGHT["90.2"], "twice", shell)))
    assert result.state == "wrong" and "A GPU is in use" in result.message and "def twice(...)" in result.message


def test_what_grade_will_find_in_the_file_is_said_truly(toy, shell):
    path = _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    text, answer = path.read_text(), _run_cell(RIGHT["90.2"], "twice", shell)
    cell = f'# %% tags=["ex-90.2"]\n{RIGHT["90.2"]}\n\n\n'
    assert cell in text
    path.write_text(text.replace(cell, cell + cell))
    notes = check("90.2", answer).notes
    assert len(notes) == 1 and "2 cells define `twice`" in notes[0] and "alike" in notes[0]
    other = cell.replace("x + x", "3 * x")
    path.write_text(text.replace(cell, cell + other))
    notes = check("90.2", answer).notes
    assert any("the last of them counts" in n for n in notes) and any("another version" in n for n in notes)
    path.write_text(text.replace(cell, ""))
    (note,) = check("90.2", answer).notes
    assert "no code cell tagged ex-90.2" in note and "jfa update" in note


def test_an_unknown_exercise_is_a_lookup_error(toy, shell):
    with pytest.raises(LookupError, match="90.1, 90.2"):
        check("90.9", len)
    with pytest.raises(LookupError, match="such as '2.3'"):
        check(90.2, len)


def test_check_says_when_function_cell_and_file_differ(toy, shell):
    old = _run_cell("def twice(x):\n    return 3 * x", "twice", shell)
    new = _run_cell(RIGHT["90.2"], "twice", shell)
    assert any("not the `twice` of the cell you ran last" in n for n in check("90.2", old).notes)
    assert any("saved file holds another version" in n and "jfa grade 90.2" in n for n in check("90.2", new).notes)
    _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    assert check("90.2", new).notes == []
    other = _run_cell("def doubled(x):\n    return 2 * x", "doubled", shell)
    assert check("90.2", other).passed


def test_replaced_torch_functions_are_named_judged_with_the_original_and_left_alone(toy, shell, monkeypatch):
    fake = lambda *a, **k: True
    monkeypatch.setattr(torch, "allclose", fake)
    monkeypatch.setattr(torch, "isnan", lambda t: torch.zeros_like(t, dtype=torch.bool))
    result = check("90.2", _run_cell("def twice(x):\n    return 3 * x", "twice", shell))
    assert result.state == "wrong" and any("torch.allclose" in n for n in result.notes)
    assert torch.allclose is fake


def test_a_default_dtype_of_the_notebook_changes_no_verdict(toy, shell):
    torch.set_default_dtype(torch.float64)
    try:
        assert check("90.2", _run_cell(RIGHT["90.2"], "twice", shell)).passed
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_beside_a_gpu_in_use_the_answer_runs_in_a_fresh_process(toy, shell, monkeypatch):
    monkeypatch.setattr(guard, "gpu_in_use", lambda: True)
    monkeypatch.setattr(launch, "run_forked", None)
    assert check("90.2", _run_cell(RIGHT["90.2"], "twice", shell)).passed
    shell.user_ns["In"].append("import math\nFACTOR = 2\n\ndef scaled(x):\n    return FACTOR * x\n\nraise SystemExit")
    assert check("90.2", _run_cell("def twice(x):\n    return scaled(x)", "twice", shell)).passed


def test_a_fork_that_never_woke_is_run_again_in_a_fresh_process(toy, shell, monkeypatch):
    monkeypatch.setattr(launch, "run_forked", lambda *args: launch.Outcome(ended="time"))
    assert check("90.2", _run_cell(RIGHT["90.2"], "twice", shell)).passed


def test_outside_a_notebook_results_are_printed(toy, capsys):
    check("90.2", _run_cell("def twice(x):\n    return x + 2", "twice"))
    text = capsys.readouterr().out
    assert "NOT RIGHT YET" in text and "Two is added." in text and 'hint("90.2")' in text


def test_results_say_the_state_in_words_and_escape_the_learners_text(toy, shell):
    result = check(
        "90.2", _run_cell("def twice(x):\n    raise ValueError('<script>alert(1)</script>')", "twice", shell)
    )
    html = result._repr_html_()
    assert "not right yet" in html and "FAILS" in html and "<script>" not in html and "&lt;script&gt;" in html


def test_hints_show_in_a_box(toy, shell):
    assert "Multiply." in hint("90.2")._repr_html_()
    with pytest.raises(ValueError, match="1 to 2"):
        hint("90.2", 3)


def test_a_long_check_shows_that_it_runs(toy, shell, monkeypatch):
    seen = []
    monkeypatch.setattr(notebook_api._Waiting, "_show", lambda self, html: seen.append(html))
    check("90.2", _run_cell("def twice(x):\n    while True: pass", "twice", shell))
    assert seen and "checking 90.2: 1 s, 0 cases done" in seen[0]


def test_pristine_restores_what_was_deleted_and_what_was_added(monkeypatch):
    original = torch.exp
    del torch.exp
    torch.Tensor.mine = 1
    try:
        with guard.pristine() as replaced:
            assert torch.exp is original and replaced == ["torch.exp"]
        assert not hasattr(torch, "exp") and torch.Tensor.mine == 1
    finally:
        torch.exp = original
        del torch.Tensor.mine


def test_every_public_function_has_a_docstring():
    for function in (check, hint, progress, catalog.exercise):
        assert inspect.getdoc(function)
