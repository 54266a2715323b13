"""What a notebook has and a plain process lacks: names that cells below define, ``__main__``, a shell, results of check()."""

import pytest

from jfa.course import check
from tests.course.test_agreement import _both, shell  # noqa: F401  a fixture

RIGHT = "def twice(x):\n    return x + x\n"
USES = "def twice(x):\n    return use(x)"
BELOW = {
    "a constant": ("def twice(x):\n    return FACTOR * x", "FACTOR = 2"),
    "a dtype": ("def twice(x):\n    return (2 * x).to(KIND)", "KIND = torch.float32"),
    "arithmetic of constants": ("def twice(x):\n    return FACTOR * x", "FACTOR = OTHER = -(1 - 3)"),
    "a lambda": (USES, "use = lambda x: x + x"),
    "an import": ("def twice(x):\n    return op.add(x, x)", "import operator as op"),
    "a name out of a module": ("def twice(x):\n    return add(x, x)", "from operator import add"),
    "a constant of a function below": (USES, "def use(x):\n    return N * x\n\n\nN = 2"),
    "a class that can be called": (USES, "class use:\n    def __new__(cls, x):\n        return x + x"),
}


@pytest.mark.parametrize("name", BELOW)
def test_what_a_cell_below_defines_counts_for_both(toy, shell, name):  # noqa: F811
    answer, below = BELOW[name]
    checked, graded = _both(toy, shell, "", answer, below)
    assert checked.passed and graded.passed, graded.text()


def test_a_cell_below_does_not_replace_what_the_answer_has(judged, toy):
    from jfa.course import catalog
    from jfa.course.answers import Pristine, from_source
    from jfa.course.judge import judge

    exercise = catalog.exercise("90.2")
    answer = from_source("N = 2\n\n\ndef twice(x):\n    return N * x", exercise, Pristine.load(toy, "90_toy"))
    answer.below = ["N = 3\ntwice = lambda x: x", "import numpy, jfa.layout", "M = 1 / 0"]
    assert judge(exercise, answer, toy).passed


IN_THE_CELL = {
    "the result of its check": "r = check('90.2', twice)\nassert r.passed and r.state == 'passed'",
    "its text": "print(check('90.2', twice).text(), hint('90.2'), progress())",
    "the shell": "ip = get_ipython()\nip.run_line_magic('matplotlib', 'inline')\nip.events.register('post_run_cell', print)",
    "run as a program": "if __name__ == '__main__':\n    print(twice(torch.ones(2)))",
    "a definition for the program": "if __name__ == '__main__':\n    def twice(x):\n        return 2 * x",
    "pickled": "import pickle\n\n\nclass Box:\n    pass\n\n\npickle.loads(pickle.dumps(Box()))",
    "looks for a tool": "import subprocess\n\ntry:\n    subprocess.run(['fc-list'])\nexcept OSError:\n    pass",
}


@pytest.mark.parametrize("name", IN_THE_CELL)
def test_what_stands_below_the_answer_in_its_cell_runs_as_in_a_notebook(judged, name):
    result = judged("90.2", f"from jfa.course import check, hint, progress\n\n\n{RIGHT}\n\n{IN_THE_CELL[name]}\n")
    assert result.passed, result.text()


def test_the_silent_check_decides_nothing(judged):
    wrong = (
        "from jfa.course import check\n\n\ndef twice(x):\n    return 3 * x\n\n\nassert check('90.2', twice).passed\n"
    )
    assert judged("90.2", wrong).failed.name == "values" and callable(check)


def test_a_process_that_the_answer_starts_is_still_refused(judged):
    result = judged("90.2", "import os\n\n\ndef twice(x):\n    os.system('true')\n    return 2 * x\n")
    assert not result.passed and "starts and signals no other processes" in result.message
