"""Given code: what may change (layout, comments, the learner's own statements) and what may not."""

import textwrap

import pytest

from jfa.course import given, judge
from jfa.course.judge import Answer
from jfa.course.spec import Exercise, Kept

SKELETON = '''
@jit
def kernel(x, blocks):
    """What it does."""
    s = alloc(1)
    for j in range(blocks):
        step(s, x, j)


@jit
def step(s, x, j):
    # adds
    s[j] += x


def other():
    return 1
'''
KEPT = Kept(("kernel", "step"), "the body stays as it is", free=("alloc", "share"))
FINE = {
    "as given": ("", ""),
    "layout and comments": ("    # adds\n", "    # adds things up\n\n"),
    "no docstring": ('    """What it does."""\n', ""),
    "its own allocation": ("    s = alloc(1)\n", "    both = tl.share(2)\n    s = alloc(2, both)\n    pass\n"),
    "a function that is not kept": ("return 1", "return 2"),
}
CHANGED = {
    "the loop": ("range(blocks)", "range(1, blocks)"),
    "a helper": ("s[j] += x", "s[j] = x"),
    "the signature": ("def step(s, x, j)", "def step(s, x, j, k=0)"),
    "a decorator": ("@jit\ndef step", "def step"),
    "one statement more": ("        step(s, x, j)\n", "        step(s, x, j)\n        s = s * 2\n"),
    "a function removed": ("def step(", "def step_2("),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_free_may_change(name):
    assert given.changed(KEPT, SKELETON.replace(*FINE[name]), SKELETON) is None


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_given_may_not(name):
    assert "the body stays as it is" in given.changed(KEPT, SKELETON.replace(*CHANGED[name]), SKELETON)


BLOCKS = {
    "if": "if 1 < 2:\n{}",
    "else": "if 1 > 2:\n    pass\nelse:\n{}",
    "try": "try:\n{}\nexcept NameError:\n    pass",
    "except": "try:\n    nothing_here\nexcept NameError:\n{}",
    "finally": "try:\n    pass\nfinally:\n{}",
    "with": "with open(__file__):\n{}",
    "loop": "for _ in range(1):\n{}",
    "match": "match 1:\n    case 1:\n{}",
    "two blocks": "if True:\n    if True:\n{}",
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_given_code_may_stand_in_a_block(block):
    assert given.changed(KEPT, block.format(textwrap.indent(SKELETON, " " * 8)), SKELETON) is None
    other = SKELETON.replace("range(blocks)", "range(blocks - 1)")
    assert given.changed(KEPT, block.format(textwrap.indent(other, " " * 8)), SKELETON) is not None


def test_given_code_that_never_runs_hides_no_change():
    other = textwrap.indent(SKELETON.replace("s[j] += x", "s[j] -= x"), "    ")
    same = textwrap.indent(SKELETON, "    ")
    assert given.changed(KEPT, f"if True:\n{other}\nelse:\n{same}", SKELETON) is not None
    assert given.changed(KEPT, f"{textwrap.dedent(other)}\nif False:\n{same}", SKELETON) is not None
    # the last definition is the given one
    assert given.changed(KEPT, f"if True:\n{other}\n{SKELETON}", SKELETON) is None
    assert given.changed(KEPT, f"def f():\n{same}", SKELETON) is not None  # bound in a function only


def test_a_live_functions_source_has_the_cells_other_functions():
    stub = "def test_what_is_free_may_change(name):\n    pass\n\ndef _helper():\n    pass\n"
    source = given.live_source(test_what_is_free_may_change, stub)
    assert list(given.definitions(source)) == ["test_what_is_free_may_change", "_helper"]


def _helper():
    return "found by its name among the function's globals"


def test_a_notebooks_answer_in_a_helper_is_an_answer():
    """A live kernel that is as given says nothing about the helper that the exercise asks for."""
    stub = SKELETON.replace("s[j] += x", "pass  # YOUR CODE")
    exercise = Exercise(id="1.1", title="t", name="kernel", cases=lambda seed: [])
    written = Answer(source=SKELETON.split("def other")[0], skeleton=stub, live=print, is_live=True)
    assert not judge._is_untouched(written, exercise)
    assert judge._is_untouched(
        Answer(source=stub.split("def other")[0], skeleton=stub, live=print, is_live=True), exercise
    )


REBOUND = {
    "assigned": "step = other",
    "in a tuple": "a, (step, *b) = 1, (other, 2)",
    "annotated": "step: object = other",
    "added to": "step += 1",
    "walrus": "(step := other)",
    "walrus in a comprehension": "[step := other for _ in range(1)]",
    "for": "for step in [other]:\n    pass",
    "with": "with open('f') as step:\n    pass",
    "except": "try:\n    1 / 0\nexcept ZeroDivisionError as step:\n    pass",
    "import as": "import math as step",
    "from import": "from elsewhere import step",
    "from import as": "from elsewhere import other as step",
    "deleted": "del step",
    "match": "match other:\n    case step:\n        pass",
    "match star": "match [1]:\n    case [*step]:\n        pass",
    "match rest": "match {}:\n    case {**step}:\n        pass",
    "async def": "async def step():\n    pass",
    "global": "def launch():\n    global step\n    step = other",
    "global def": "def launch():\n    global step\n    def step():\n        pass",
    "global in a class": "class A:\n    global step\n    step = other",
    "globals()": "globals()['step'] = other",
    "globals().update": "globals().update(step=other)",
    "update with a dict": "vars().update({'step': other})",
    "__setitem__": "globals().__setitem__('step', other)",
    "setattr on the module": "setattr(sys.modules[__name__], 'step', other)",
    "exec": "exec('step = other')",
    "exec of a def": "exec('def step(): pass')",
    "its code": "step.__code__ = other.__code__",
    "its function": "kernel.fn = other",
    "setattr on it": "setattr(step, 'fn', other)",
    "a module's function": "tl.dot = other",
    "below a module": "jfa.layout.pack = other",
    "setattr on a module": "setattr(tl, 'dot', other)",
    "an imported name's attribute": "import weird as w\nw.f = other",
    "deleted attribute": "del tl.dot",
}
LEFT = {
    "a local of the same name": "def launch():\n    step = 3\n    return step",
    "a comprehension's own name": "x = [step for step in range(3)]",
    "an attribute of its own": "class A:\n    pass\nA.step = 3\nx = A()\nx.kernel = 2",
    "a class's field": "class A:\n    step = 3",
    "a parameter": "def launch(step):\n    return step",
    "its name in a text": "print('step')\nnames = {'step': 1}\nnames['other'] = 2",
    "read": "y = step\nz = step.fn\ntable = [kernel]\ntable[0] = 3",
}


@pytest.mark.parametrize("where", [0, 1], ids=["above", "below"])
@pytest.mark.parametrize("how", REBOUND)
def test_no_way_to_bind_a_given_name_goes_unseen(how, where):
    source = "\n".join([REBOUND[how], SKELETON][:: 1 - 2 * where])
    assert "the body stays as it is" in given.changed(KEPT, source, SKELETON)


@pytest.mark.parametrize("how", LEFT)
def test_names_of_ones_own_are_free(how):
    assert given.changed(KEPT, SKELETON + LEFT[how], SKELETON) is None
