"""check() in a notebook and ``jfa grade`` on its file: one verdict and one sentence, whatever else the notebook has done."""

import builtins
import types

import pytest
import torch

from jfa.course import catalog, check, given, notebook_api, originals
from jfa.course.grade import Source, grade
from jfa.course.notebook import Cell, insert_before, read
from jfa.course.sources import compile_visible
from jfa.course.spec import Kept
from tests.course.test_grade import FILE

_NUMBERS = iter(range(10_000))
RIGHT = "def twice(x):\n    return x + x"


@pytest.fixture
def shell(toy, monkeypatch):
    """A notebook around the test; what its cells put in the place of library functions is put back."""
    fake = types.SimpleNamespace(user_ns={"In": [""], "torch": torch, "__name__": "__main__"})
    monkeypatch.setattr(notebook_api, "_shell", lambda: fake)
    yield fake
    originals.LIBRARIES.put_back()


def _run(shell, source):
    shell.user_ns["In"].append(source)
    exec(compile_visible(source, f"<ipython-input-{next(_NUMBERS)}>"), shell.user_ns)


def _both(toy, shell, own, answer=RIGHT, below=""):
    """Return the results of check() and of grading, of a notebook with own cells above and below the answer."""
    for cell in filter(None, (own, answer, below)):
        _run(shell, cell)
    checked = check("90.2", shell.user_ns["twice"])
    book = read(toy.exercises / f"{FILE}.py")
    at = next(i for i, c in enumerate(book.cells) if c.exercise == "90.2")
    (toy.exercises / f"{FILE}.py").write_text(book.with_sources({at: answer}).text)
    for source, place in ((below, at + 1), (own, at)):
        if source:
            book = read(toy.exercises / f"{FILE}.py")
            (toy.exercises / f"{FILE}.py").write_text(insert_before(book, place, [Cell("code", source)]).text)
    (graded,) = grade([catalog.exercise("90.2")], Source(toy))
    return checked, graded


def _replaced(result):
    return [note for note in result.notes if "has replaced" in note]


REPLACED = {
    "a function of torch": ("torch.add = torch.sub", "torch.add"),
    "a function of its own": ("torch.exp = lambda x: x", "torch.exp"),
    "a deleted function": ("del torch.sin", "torch.sin"),
    "a tensor's method": ("torch.Tensor.add = lambda a, b: a", "torch.Tensor.add"),
    "by setattr": ("setattr(torch.nn.functional, 'relu', torch.tanh)", "torch.nn.functional.relu"),
    "by its dictionary": ("vars(torch)['mul'] = torch.div", "torch.mul"),
    "the package's function": ("import jfa.layout\njfa.layout.pack = len", "jfa.layout.pack"),
    "imported and replaced at once": ("import jfa.mxfp8 as m\nm.encode = len", "jfa.mxfp8.encode"),
    "a function's code": (
        "import jfa.layout\njfa.layout.unpack.__code__ = (lambda *a: 3).__code__",
        "jfa.layout.unpack",
    ),
    "a method of the package": ("import jfa.masks\njfa.masks.Band.__eq__ = lambda a, b: True", "jfa.masks.Band.__eq__"),
    "a constant": ("import math\nmath.pi = 3", "math.pi"),
    "a builtin": ("import builtins\nbuiltins.sum = max", "builtins.sum"),
    "a language's function": ("import triton.language as tl\ntl.dot = tl.exp", "triton.language.dot"),
}


@pytest.mark.parametrize("own, name", REPLACED.values(), ids=REPLACED)
def test_what_a_cell_replaced_is_judged_with_the_original_by_both(toy, shell, own, name):
    if "triton" in own:
        pytest.importorskip("triton")
    checked, graded = _both(toy, shell, own)
    assert checked.state == graded.state == "passed", (checked.text(), graded.text())
    assert _replaced(checked) == _replaced(graded) and name in _replaced(checked)[0]


def test_the_notebook_keeps_what_it_replaced(toy, shell):
    mine = lambda *args: 3
    shell.user_ns["mine"] = mine
    _run(shell, "import builtins\nbuiltins.sum = mine")
    _run(shell, RIGHT)
    try:
        assert check("90.2", shell.user_ns["twice"]).passed and builtins.sum is mine
    finally:
        originals.LIBRARIES.put_back()


def test_nothing_is_said_where_nothing_was_replaced(toy, shell):
    checked, graded = _both(
        toy, shell, "torch.mine = 3\ntorch.Tensor.other = 4\nimport jfa.layout\nmine = jfa.layout.pack"
    )
    assert checked.passed and graded.passed and not _replaced(checked) + _replaced(graded)


AT_RUN_TIME = {
    "torch": "torch.add = torch.sub\n    return x + x",
    "a method": "torch.Tensor.double = lambda t: t\n    return x + x",
    "in a helper": "spoil()\n    return x + x",
}


@pytest.mark.parametrize("body", AT_RUN_TIME.values(), ids=AT_RUN_TIME)
def test_what_the_answer_replaces_while_it_runs_is_named_by_both(toy, shell, body):
    checked, graded = _both(toy, shell, "def spoil():\n    torch.sin = torch.cos", f"def twice(x):\n    {body}")
    assert checked.state == graded.state == "wrong method" and checked.message == graded.message
    assert "in its place" in checked.message


BESIDE = {
    "imported": "from jfa.layout import pack",
    "imported as a whole": "import jfa.reference as r\nkept = r",
    "asked for": "import jfa\nop = jfa.jagged_flash_attention",
    "played with": "from jfa.layout import pack\npack([torch.ones(2, 3)])\n\ndef half(x):\n    return x / 2",
}


@pytest.mark.parametrize("own", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("used", [False, True], ids=["beside", "used"])
def test_what_is_closed_counts_where_the_answer_uses_it(toy, shell, monkeypatch, own, used):
    from dataclasses import replace

    strict = replace(catalog.exercise("90.2"), forbid=("jfa.layout",))
    monkeypatch.setattr(catalog, "exercise", lambda number: strict)
    call = {"pack": "pack([x])", "kept": "kept.attention(x, x, x)", "op": "op(x, x, x)"}
    use = next(call[name] for name in call if name in own) if used else "x"
    before = "half(x)" if "half" in own else "x"
    checked, graded = _both(toy, shell, own, f"def twice(x):\n    {before}, {use}\n    return x + x")
    assert checked.state == graded.state == ("wrong method" if used else "passed"), (checked.text(), graded.text())
    assert checked.message == graded.message


CHANGED_BELOW = {
    "defined anew": "def twice(x):\n    return 3 * x",
    "another code": "twice.__code__ = (lambda x: 3 * x).__code__",
    "its defaults": "twice = lambda x: 3 * x",
}


@pytest.mark.parametrize("below", CHANGED_BELOW.values(), ids=CHANGED_BELOW)
def test_a_cell_between_the_answer_and_its_check_counts_for_both(toy, shell, below):
    checked, graded = _both(toy, shell, "", below=below)
    assert checked.state == graded.state == "wrong" and checked.message == graded.message


@pytest.mark.parametrize("change", ["tl.dot = other", "step.fn = other", "step = other"])
def test_given_code_is_compared_in_the_whole_cell(toy, shell, change):
    stub = "def step(x):\n    return x\n\n\ndef twice(x):\n    return 0"
    tl = shell.user_ns["tl"] = types.SimpleNamespace()
    shell.user_ns["other"] = lambda x: x
    cell = f"{stub}\n\n\n{change}"
    _run(shell, f"{cell}\n\n\ncheck = print\ncheck('90.2', twice)")
    source = notebook_api._source_of(shell.user_ns["twice"], stub)
    kept = Kept(("step",), "it stays as it is")
    assert given.changed(kept, source, stub) == given.changed(kept, cell, stub) is not None
    assert not hasattr(tl, "nothing")
