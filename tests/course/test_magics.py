"""IPython's syntax in answers: what a notebook's kernel makes of a cell and what grading makes of it leave the same names."""

import ast
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jupytext
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jfa.course import catalog, notebook
from jfa.course.grade import Source, grade
from jfa.course.magics import _without_lines, parse, runnable, uncomment_magics
from jfa.course.notebook import parse_json, parse_percent, to_json
from jfa.course.sources import Cells
from tests.course.test_grade import FILE, RIGHT, _insert, _write


@pytest.fixture(scope="module")
def shell():
    """An IPython of its own, without history; not the one that get_ipython() finds. It replaces __main__, so that is put back."""
    kept = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    yield InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    sys.displayhook, sys.excepthook, sys.modules["__main__"] = kept


def _names(namespace):
    plain = (int, str, float, list, tuple, type(None))
    return {
        k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, plain) and k not in ("In", "Out")
    }


def _without_loop(function):
    """Run it in a thread of its own: another test's event loop may be running in this one."""

    @functools.wraps(function)
    def run(*args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args).result()

    return run


@_without_loop
def _in_kernel(shell, sources):
    shell.reset(new_session=False)
    for source in sources:
        result = shell.run_cell(source, silent=True)
        if not result.success:
            assume(not isinstance(result.error_in_exec, UsageError))  # a magic used wrongly: no matter of Python
            return None
    return _names(shell.user_ns)


@_without_loop
def _graded(sources):
    namespace = {}
    cells = Cells(namespace)
    try:
        for i, source in enumerate(sources):
            cells.run(source, f"<test cell {i}>")
    except Exception:  # noqa: BLE001
        return None
    return _names(namespace)


CELLS = {
    "help": "x = 1\nx?\n?x\nx??\ny = 2",
    "shell": "!true\nx = 1",
    "assigned time": "x = %time 3 + 4\ny = x",
    "time as a statement": "%time x = 3\n%time y = x + 1",
    "in a block": "if True:\n    %time x = 3\n    y = 2",
    "in a loop": "x = 0\nfor i in range(3):\n    %time x = x + 1",
    "timeit is nothing": "x = %timeit -n1 -r1 5\ny = 7",
    "cell time": "%%time\nx = 1\ny = x + 1",
    "cell capture": "%%capture out_\nx = 1\nprint(x)",
    "one in the other": "%%capture\n%%time\nx = 1",
    "another cell magic": "%%writefile /dev/null\nx = = 1",
    "modulo in brackets": "x = (\n    7\n    % 4\n)",
    "unequal in brackets": "x = (\n    7\n    != 4\n)\ny = [1\n!= 2]",
    "after a backslash": "x = 7 \\\n% 4",
    "format": "x = str('%d and %d'\n% (1, 2))",
    "in a string": 'x = """\n%time y = 1\n!ls\n"""',
    "a continued magic": "%time x = 1 + \\\n    2\ny = 3",
    "await": "import asyncio\n\nasync def f():\n    return await asyncio.sleep(0, 4)\n\n"
    "x = await f()\ny = [await f() for _ in range(2)]",
    "async with": "import contextlib\n\n"
    "@contextlib.asynccontextmanager\nasync def c():\n    yield 5\n\nasync with c() as x:\n    y = x",
    "indented": "    x = 1\n    y = 2",
    "prompts": ">>> x = 1\n>>> y = x + 1",
    "prompt": "In [3]: x = 1",
    "blank lines above": "\n\n%time x = 2\ny = 3",
    "umlauts before a magic": "ä = 'ü'; x = 1\nö = %time 'ß'\ny = ö",
    "semicolon and question": "x = 'a?'; y = 3;",
}


@pytest.mark.parametrize("source", CELLS.values(), ids=CELLS.keys())
def test_a_cell_leaves_the_names_that_it_leaves_in_a_kernel(shell, source):
    expected = _in_kernel(shell, [source])
    assert expected is not None
    assert _graded([runnable(source)]) == expected


@pytest.mark.parametrize("source", CELLS.values(), ids=CELLS.keys())
def test_so_it_does_from_a_file_that_jupytext_wrote(shell, source):
    """There, magics are comments."""
    book = jupytext.v3.new_notebook() if hasattr(jupytext, "v3") else jupytext.reads("# %%\n", "py:percent")
    book.cells = [type(book.cells[0])(cell_type="code", source=source, metadata={}, outputs=[], execution_count=None)]
    text = jupytext.writes(book, "py:percent")
    back = jupytext.reads(text, "py:percent")
    expected = _in_kernel(shell, [c.source for c in back.cells])
    if expected is not None:
        assert _graded([c.code for c in parse_percent(text).cells]) == expected


_LINES = st.sampled_from(
    ["x = 1", "y = x", "%time y = 2", "z = %time 5", "!true", "w = !true", "x?"]
    + ["if x:", "    y = 3", "    %time z = 4", "(", ")", "% 2", "!= 3"]
    + ["[", "]", "x = (7", "'''", "# %time y = 9", "for i in range(2):", "    pass", ""]
    + ["w = [1, 2,", "x = 5 \\", "%%time", "from math import pi"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(_LINES, max_size=8))
@example(["x = (7", "% 2", ")"])
@example(["%%time", "x = (7", "!= 3", ")"])
def test_any_mixture_of_lines_runs_alike_or_fails_alike(shell, lines):
    source = "\n".join(["x = 1", *lines] if lines[:1] != ["%%time"] else lines)
    expected = _in_kernel(shell, [source])
    assert _graded([runnable(source)]) == expected


def test_lines_keep_their_numbers():
    source = "\n\n%time x = 1\nif x:\n    y = !ls\n\n    def f():\n        ?f\n        return x\n"
    tree = parse(source)
    assert runnable(source).count("\n") >= source.rstrip("\n").count("\n")
    assert [n.lineno for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] == [7]
    assert [n.lineno for n in ast.walk(parse("%%time\nx = 1\n\ndef f(): pass")) if isinstance(n, ast.FunctionDef)] == [
        4
    ]


def test_broken_code_stays_as_it_was_typed():
    for source in (
        "def f(:\n    return 1",
        "x = '",
        "%time x = 1\ndef f(:",
        "x = (1,\n",
        "\x00",
        "x = '\ud800'",
        "(" * 300,
    ):
        assert runnable(source) == source


def test_a_comment_that_is_no_magic_stays_one():
    source = "x = (\n    1\n    # %d numbers\n)\n# 50 % of it\n# copy the offsets"
    assert runnable(uncomment_magics(source), source) == source
    assert uncomment_magics("# 5 %time\n# % time\n#%time x\n") == "# 5 %time\n# % time\n%time x\n"


def test_without_ipython_lines_that_are_in_python_s_way_go():
    source = "%matplotlib inline\nx = (\n    7\n    % 4\n)\nif x:\n    !ls\ny = 2"
    assert _graded([_without_lines(source)]) == {"x": 3, "y": 2}
    assert _without_lines("def f(:") == "def f(:" and _without_lines("x = 1 +\n%a") == "x = 1 +\n%a"


def test_a_future_import_holds_for_the_cells_that_follow(shell):
    sources = ["from __future__ import annotations", "def f(x: not_there):\n    return 1\n\nx = f(2)"]
    assert _graded(sources) == _in_kernel(shell, sources) == {"x": 1}
    assert _graded(sources[1:]) is None


# ---------------------------------------------------------------------------------------------- whole files

TWICE = {
    "cell time": "%%time\ndef twice(x):\n    return x + x",
    "await": "import asyncio\n\nasync def two():\n    return await asyncio.sleep(0, 2)\n\n"
    "TWO = await two()\n\n\ndef twice(x):\n    return TWO * x",
    "help and shell": "torch.exp?\n!true\n\n\ndef twice(x):\n    return x + x\n\n\nfound = %timeit -n1 -r1 twice(torch.ones(1))",
    "a modulo below": "def twice(x):\n    n = (\n        5\n        % 3\n    )\n    return n * x",
    "display": "def twice(x):\n    return x + x\n\n\ndisplay(twice(torch.ones(2)))",
}


@pytest.mark.parametrize("source", TWICE.values(), ids=TWICE.keys())
@pytest.mark.parametrize("form", ["py", "py by jupytext", "ipynb", "json tags", "BOM", "CRLF"])
def test_what_passes_in_a_notebook_passes_in_grade(toy, source, form):
    path = _write(toy.exercises, {"90.2": source})
    text = path.read_text()
    if form == "py by jupytext":
        book = jupytext.reads(text, "py:percent")
        next(c for c in book.cells if "ex-90.2" in c.metadata.get("tags", ())).source = source
        text = jupytext.writes(book, "py:percent")
    elif form == "json tags":
        text = text.replace('tags=["ex-90.2"]', 'Twice {"tags": ["ex-90.2"]}')
    elif form == "ipynb":
        path.unlink()
        path, text = path.with_suffix(".ipynb"), notebook.dump(to_json(notebook.parse_percent(text)))
        assert parse_json(text).answer("90.2").source == source
    path.write_bytes(
        (text if form != "CRLF" else text.replace("\n", "\r\n")).encode("utf-8-sig" if form == "BOM" else "utf-8")
    )
    result = grade([catalog.exercise("90.2")], Source(toy))[0]
    assert result.passed and not result.notes, result.text()


def _grade(toy, text=None):
    path = toy.exercises / f"{FILE}.py"
    if text is not None:
        path.write_text(text)
    return grade([catalog.exercise("90.2")], Source(toy))[0]


def test_an_answer_in_a_cell_of_its_own_below_the_stub_counts(toy):
    text = (toy.exercises / f"{FILE}.py").read_text()
    mine = f"# %%\n{RIGHT['90.2']}\n\n"
    result = _grade(toy, text.replace('# %%\ncheck("90.2"', mine + '# %%\ncheck("90.2"'))
    assert result.passed and any("2 cells define `twice`" in n and "the last of them counts" in n for n in result.notes)
    assert _grade(toy, text.replace('# %%\ncheck("90.2"', '# %%\ntwice = 3\n\n# %%\ncheck("90.2"')).state == "wrong"
    below = text.replace("# %% [markdown]\n# ## 90.3", f"{mine}# %% [markdown]\n# ## 90.3")
    assert _grade(toy, below).state == "not started"


def test_an_answer_whose_tag_is_gone_is_found_by_its_name(toy):
    path = _write(toy.exercises, {"90.2": RIGHT["90.2"]})
    result = _grade(toy, path.read_text().replace(' tags=["ex-90.2"]', ""))
    assert result.passed and any("has lost its tag ex-90.2" in n for n in result.notes)


def test_copies_of_an_answer_are_one_answer_and_said(toy):
    text = (toy.exercises / f"{FILE}.py").read_text()
    start = text.index('# %% tags=["ex-90.2"]')
    stub = text[start : text.index("# %%", start + 4)]
    result = _grade(toy, text.replace(stub, stub + stub))
    assert result.state == "not started" and any("2 cells define `twice`" in n and "alike" in n for n in result.notes)
    right = f'# %% tags=["ex-90.2"]\n{RIGHT["90.2"]}\n\n\n'
    assert _grade(toy, text.replace(stub, stub + right)).passed
    assert not _grade(toy, text.replace(stub, right + stub)).passed
    assert _grade(toy, text.replace(stub, right + right)).passed


def test_a_helper_between_two_parts_of_an_answer_is_there(toy):
    _write(toy.exercises, {"90.2": "def half(x):\n    return x / 2"})
    path = toy.exercises / f"{FILE}.py"
    rest = '# %%\nfour = int(half(8))\n\n# %% tags=["ex-90.2"]\ndef twice(x):\n    return half(x) * four\n\n\n'
    text = path.read_text().replace('# %%\ncheck("90.2"', rest + '# %%\ncheck("90.2"')
    assert _grade(toy, text).passed
    _insert(toy, "90.2", "unused = 1")
    assert _grade(toy).passed
