"""Notebook files: cut as jupytext cuts them, edited without touching another byte."""

import json

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jfa.course import notebook
from jfa.course.notebook import Cell, insert_before, parse_json, parse_percent, read, runnable, to_json

jupytext = pytest.importorskip("jupytext")
StringParser = pytest.importorskip("jupytext.stringparser").StringParser

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
    "hash inside string": "# %%\nx = \"# not a comment ''' \"\n\n# %%\ny = 1\n",
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
    [
        "# %%",
        "# %% [markdown]",
        '# %% tags=["mine"]',
        "# In[3]:",
        "# %%%",
        "x = 1",
        '"""',
        "'''",
        "",
        "",
        "# text",
        "# ```",
    ]
    + ["    y = '\"'", "def f():", "   "]
)


def _left_open(text):
    """Whether a string of three quotes is never closed: jupytext then makes one cell of all that follows."""
    quotes = StringParser("python")
    for line in text.split("\n"):
        quotes.read_line(line)
    return quotes.is_quoted()


@settings(max_examples=300, deadline=None)
@given(st.lists(_LINES, max_size=14))
def test_any_mixture_of_lines_is_cut_alike(lines):
    text = "# %%\nfirst = 0\n" + "".join(line + "\n" for line in lines)
    assume(not _left_open(text))
    code = [
        [source if kind == "code" else kind for kind, source, _ in cells]
        for cells in (_cells(text), _jupytext_cells(text))
    ]
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


_VALUES = st.sampled_from(
    ['["ex-1.1"]', "['ex-2.3', 'slow']", '"a = b"']
    + ['"[x]"', '{"a": [1, 2]}', "true", "3", "[]", '["see [a]", "ex-1.1"]', "None", "half("]
)
_KEYS = st.sampled_from(["tags", "name", "slideshow", "editable", "a.b", "x"])
_TITLES = st.sampled_from(
    ["", "My title", "[markdown]", "title [md]", "[raw]", "a, b", "50% more", "%% deeper", ".hidden", "tags"]
)


@settings(max_examples=400, deadline=None)
@given(_TITLES, st.lists(st.tuples(_KEYS, _VALUES), max_size=3), st.booleans())
@example("", [("tags", '["ex-1.1"]')], True)
@example("my title", [("tags", '["a [b]", "ex-1.1"]'), ("x", "{}")], True)
def test_kind_and_tags_are_jupytexts_however_they_are_written(title, pairs, as_json):
    if as_json:
        options = f"{title} {{{', '.join(f'{json.dumps(k)}: {v}' for k, v in pairs)}}}"
    else:
        options = " ".join([title, *(f"{k}={v}" for k, v in pairs)])
    text = f"# %% {options}\n# x\n\n# %%\ny = 2\n"
    try:
        theirs = jupytext.reads(text, "py:percent").cells[0]
    except Exception:  # noqa: BLE001  jupytext refuses the file, and no kernel ever gets it
        assume(False)
    tags = theirs.metadata.get("tags")
    expected = tuple(t for t in tags if isinstance(t, str)) if isinstance(tags, list | tuple) else ()
    ours = parse_percent(text).cells[0]
    assert (ours.kind, ours.tags) == (theirs.cell_type, expected)


ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}
_ANY_LINE = st.text(st.sampled_from("ab #%'\t\x0b\x0c\x1c\x85\u2028\u2029é\ufeff="), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["", "\ufeff"]),
    st.lists(st.tuples(st.one_of(_LINES, _ANY_LINE), st.sampled_from(["\n", "\r\n", "\r"])), max_size=14),
    st.booleans(),
    st.integers(0, 20),
)
def test_an_edit_leaves_every_other_byte(mark, lines, ends, which):
    text = mark + "".join(line + end for line, end in lines) + ("" if ends else "# %% tags=[]\nlast")
    book = parse_percent(text)
    assert book.head + "".join(c.marker + c.body + c.tail for c in book.cells) == text
    assert book.with_sources({i: c.source for i, c in enumerate(book.cells)}).text == text
    if book.cells:
        i = which % len(book.cells)
        before, after = book.cells[:i], book.cells[i + 1 :]
        new = book.with_sources({i: "changed = 1"}).text
        assert new.startswith(book.head + "".join(c.marker + c.body + c.tail for c in before))
        assert new.endswith("".join(c.marker + c.body + c.tail for c in after)) and "changed = 1" in new


@pytest.mark.parametrize("newline", ENDS.values(), ids=ENDS.keys())
def test_a_longer_answer_is_written_with_the_cells_own_line_ends(newline):
    lines = ["# %%", "x = 1", "", "# %% [markdown]", "# text", "", "# %%", "y = 2"]
    book = parse_percent(newline.join(lines))
    assert book.with_sources({0: "a = 1\nb = 2"}).text == newline.join([lines[0], "a = 1", "b = 2", *lines[2:]])
    assert book.with_sources({1: "one\n\ntwo"}).text == newline.join([*lines[:4], "# one", "#", "# two", *lines[5:]])
    assert book.with_sources({2: "a = 1\nb = 2"}).text == newline.join([*lines[:7], "a = 1", "b = 2"])


def test_mixed_line_ends_stay_where_they_are():
    text = "# %%\r\nx = 1\r\n\n# %%\ny = 2\n\r\n# %%\rz = 3"
    book = parse_percent(text)
    assert [c.source for c in book.cells] == ["x = 1", "y = 2", "z = 3"]
    assert book.with_sources({1: "y = 3\nw = 4"}).text == text.replace("y = 2\n", "y = 3\nw = 4\n")
    assert book.with_sources({2: "z = 4\nw = 5"}).text == text.replace("z = 3", "z = 4\rw = 5")


@pytest.mark.parametrize("quotes", ['"""', "'''"])
@pytest.mark.parametrize("closes_by_chance", [False, True])
def test_an_open_string_ends_at_the_next_marker(quotes, closes_by_chance):
    """However many strings follow: an exercise's marker is never inside one."""
    between = f"# %%\ndef given():\n    {quotes}Doc.{quotes}\n\n" if closes_by_chance else ""
    cells = [
        f'# %% tags=["ex-1.1"]\ndef f():\n    {quotes}half a sentence\n\n',
        '# %%\ncheck("1.1", f)\n\n',
        "# %% [markdown]\n# ## 1.2\n\n",
        between,
        f'# %% tags=["ex-1.2"]\ndef g():\n    {quotes}Doc.{quotes}\n    return MINE\n\n',
        '# %% {"tags": ["ex-1.3"]}\nh = 3\n',
    ]
    book = parse_percent("".join(cells))
    assert [c.marker + c.body + c.tail for c in book.cells] == [c for c in cells if c]
    assert book.with_sources({0: "f = 1"}).text == "".join(['# %% tags=["ex-1.1"]\nf = 1\n\n', *cells[1:]])


def test_an_open_string_in_the_last_exercise_ends_there_too():
    book = parse_percent('# %% tags=["ex-1.1"]\nx = """half\n\n# %%\ncheck("1.1", x)\n')
    assert [c.source for c in book.cells] == ['x = """half', 'check("1.1", x)']


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


STYLES = {
    "nbformat": lambda c: json.dumps(c, indent=1, ensure_ascii=False) + "\n",
    "two blanks, no last newline": lambda c: json.dumps(c, indent=2),
    "one line": lambda c: json.dumps(c, separators=(",", ":")),
    "tabs and CRLF": lambda c: json.dumps(c, indent="\t").replace("\n", "\r\n"),
    "byte-order mark": lambda c: "\ufeff" + json.dumps(c, indent=1),
    "sorted": lambda c: json.dumps(c, indent=1, sort_keys=True),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("as_string", [False, True])
def test_an_ipynb_keeps_every_byte_outside_the_cell(style, as_string):
    content = to_json(parse_percent(HEADER + '# %% tags=["ex-1.1"]\nx = 1  # é\u2028\n\n# %%\ny = 2\n\n# %%\n'))
    content["metadata"]["number"] = 1e22
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["kept, \u00e9"]}]
    if as_string:
        for cell in content["cells"]:
            cell["source"] = "".join(cell["source"])
    text = style(content)
    for i in range(len(parse_json(text).cells)):
        edited = parse_json(text).with_sources({i: "a = 1\nb = '\u2028'"})
        expected = json.loads(json.dumps(content))
        expected["cells"][i]["source"] = "a = 1\nb = '\u2028'" if as_string else ["a = 1\n", "b = '\u2028'"]
        expected["cells"][i]["outputs"] = []
        assert json.loads(edited.text.removeprefix("\ufeff")) == expected
        chunks = [t.split('"cell_type"') for t in (text, edited.text)]
        assert [c for j, c in enumerate(chunks[0]) if j != i + 1] == [c for j, c in enumerate(chunks[1]) if j != i + 1]
        tail = text[text.rindex('"kernelspec"') :]
        assert style is STYLES["sorted"] or edited.text.endswith(tail)


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
    assert [c.source for c in insert_before(book, 2, [Cell("code", "z = 3", ("t",))]).cells] == [
        "x = 1",
        "y = 2",
        "z = 3",
    ]


def test_magics_become_comments_but_not_inside_strings():
    source = '%matplotlib inline\n!ls\nif x:\n    %time f()\ntext = """\n%kept\n"""\ny = 7 % 3'
    plain = runnable(source)
    compile(plain, "cell", "exec")
    assert "\n%kept\n" in plain and "y = 7 % 3" in plain and "ls" not in plain and "\n    f()\n" in plain


def test_unreadable_files_are_named(tmp_path):
    for name, data in (("a.ipynb", b"{"), ("b.ipynb", b'{"cells": 3}'), ("c.py", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name)


def test_dropping_a_cell_takes_its_marker_along():
    book = parse_percent("# %%\nx = 1\n\n# %%\ny = 2\n\n# %%\nz = 3\n")
    assert notebook.drop_cells(book, {1}).text == "# %%\nx = 1\n\n# %%\nz = 3\n"
    assert notebook.drop_cells(book, {2}).text == "# %%\nx = 1\n\n# %%\ny = 2\n"
