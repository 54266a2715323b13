"""Notebook files: cut as jupytext cuts them, edited without touching another byte."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa.course import notebook
from jfa.course.notebook import Cell, insert_before, parse_json, parse_percent, read, runnable, to_json

jupytext = pytest.importorskip("jupytext")

HEADER = "# ---\n# jupyter:\n#   kernelspec:\n#     display_name: Python 3\n#     language: python\n#     name: python3\n# ---\n\n"

TRICKY = {
    "marker in a docstring": '# %%\ndef f():\n    """Text\n# %% not a cell\n    """\n    return 1\n\n# %%\ny = 2\n',
    "marker in a comment's quote": "# %%\nx = 'it''s'\n# don't stop\n\n# %%\ny = 2\n",
    "blank ends": "# %%\nx = 1\n   \n\n# %%\ny = 2\n\n\n\n# %%\nz = 3\n",
    "escaped quotes": "# %%\nx = '\\''\ny = \"\\\\\"\n\n# %%\nz = 3\n",
    "tags": '# %% tags=["ex-1.1"]\nx = 1\n\n# %% [markdown] tags=["note"]\n# text\n#\n# more\n',
    "title and tags": '# %% A title tags=["ex-2.10", "slow"]\nx = 1\n',
    "no first marker": "import os\n\n# %%\nx = 1\n",
    "fence in Markdown": "# %% [markdown]\n# ```mermaid\n# %% a comment of mermaid\n# ```\n# after\n\n# %%\nx = 1\n",
    "hash inside string": '# %%\nx = "# not a comment \'\'\' "\n\n# %%\ny = 1\n',
    "two blank lines between functions": "# %%\ndef f():\n    pass\n\n\n# %%\nf()\n",
}


def _cells(text):
    return [(c.kind, c.source, list(c.tags)) for c in parse_percent(text).cells]


def _jupytext_cells(text):
    book = jupytext.reads(text, "py:percent")
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in book.cells if c.source or len(book.cells) > 1]


@pytest.mark.parametrize("text", TRICKY.values(), ids=TRICKY.keys())
@pytest.mark.parametrize("header", ["", HEADER])
def test_cells_are_jupytexts_cells(text, header):
    assert _cells(header + text) == _jupytext_cells(header + text)


_LINES = st.sampled_from(
    ["# %%", "# %% [markdown]", '# %% tags=["ex-1.2"]', "x = 1", '"""', "'''", "", "", "# text", "# ```"]
    + ["    y = '\"'", "def f():", "   "]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_LINES, max_size=14))
def test_any_mixture_of_lines_is_cut_alike(lines):
    text = "# %%\nfirst = 0\n" + "".join(line + "\n" for line in lines)
    code = [[source if kind == "code" else kind for kind, source, _ in cells] for cells in (_cells(text), _jupytext_cells(text))]
    assert code[0] == code[1]


@pytest.mark.parametrize("text", TRICKY.values(), ids=TRICKY.keys())
def test_an_edit_changes_its_cell_only(text):
    book = parse_percent(HEADER + text)
    same = book.with_sources({i: c.source for i, c in enumerate(book.cells)})
    assert same.text == book.text
    for i, cell in enumerate(book.cells):
        edited = book.with_sources({i: "changed = 1"})
        assert edited.cells[i].source == "changed = 1"
        others = [c.source for j, c in enumerate(edited.cells) if j != i]
        assert others == [c.source for j, c in enumerate(book.cells) if j != i]
        assert edited.with_sources({i: cell.source}).text == book.text


def test_windows_line_ends_survive_an_edit():
    book = parse_percent("# %%\r\nx = 1\r\n\r\n# %%\r\ny = 2\r\n")
    assert book.with_sources({0: "x = 3"}).text == "# %%\r\nx = 3\r\n\r\n# %%\r\ny = 2\r\n"


def test_ipynb_keeps_everything_but_the_cell():
    content = to_json(parse_percent(HEADER + TRICKY["tags"]))
    content["metadata"]["mine"] = {"kept": True}
    content["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["old"]}]
    book = parse_json(json.dumps(content))
    edited = book.with_sources({0: "x = 5\ny = 6"})
    new = json.loads(edited.text)
    assert new["metadata"]["mine"] == {"kept": True}
    assert new["cells"][0]["source"] == ["x = 5\n", "y = 6"] and new["cells"][0]["outputs"] == []
    assert edited.answer("1.1").source == "x = 5\ny = 6"


def test_py_and_ipynb_hold_the_same_cells():
    for text in TRICKY.values():
        book = parse_percent(HEADER + text)
        again = parse_json(json.dumps(to_json(book)))
        assert [(c.kind, c.source, c.tags) for c in again.cells] == [(c.kind, c.source, c.tags) for c in book.cells]


def test_a_tagged_cell_turned_to_text_is_no_answer():
    assert parse_percent('# %% [markdown] tags=["ex-1.1"]\n# x = 1\n').answer("1.1") is None


def test_insertion_in_front_and_at_the_end():
    book = parse_percent("# %%\nx = 1\n\n# %%\ny = 2\n")
    between = insert_before(book, 1, [Cell("code", "mine = 1"), Cell("markdown", "my note\n\nmore")])
    assert [c.source for c in between.cells] == ["x = 1", "mine = 1", "my note\n\nmore", "y = 2"]
    assert [c.source for c in insert_before(book, 2, [Cell("code", "z = 3", ("t",))]).cells] == ["x = 1", "y = 2", "z = 3"]


def test_magics_become_comments_but_not_inside_strings():
    source = '%matplotlib inline\n!ls\nif x:\n    %time f()\ntext = """\n%kept\n"""\ny = 7 % 3'
    plain = runnable(source)
    compile(plain, "cell", "exec")
    assert "\n%kept\n" in plain and "y = 7 % 3" in plain and "pass  # !ls" in plain


def test_unreadable_files_are_named(tmp_path):
    for name, data in (("a.ipynb", b"{"), ("b.ipynb", b'{"cells": 3}'), ("c.py", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)


def test_dropping_a_cell_takes_its_marker_along():
    book = parse_percent("# %%\nx = 1\n\n# %%\ny = 2\n\n# %%\nz = 3\n")
    assert notebook.drop_cells(book, {1}).text == "# %%\nx = 1\n\n# %%\nz = 3\n"
    assert notebook.drop_cells(book, {2}).text == "# %%\nx = 1\n\n# %%\ny = 2\n"
