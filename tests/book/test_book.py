"""The parts of the book's builder: links, hints, citations, kept outputs, and the reading of finished pages."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from book import citations, execute, links, pages, verify
from jfa.course import catalog, notebook
from tests.support import ROOT

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
FOLDERS = {"notebooks": ("chapters", ".ipynb"), "exercises": ("exercises", ".md")}


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a file of each kind that links can lead to."""
    files = [
        "README.md",
        "notebooks/01_a.py",
        "exercises/01_a.py",
        "solutions/01_a.py",
        "docs/notes.md",
        "docs/p.svg",
        "jfa/x.py",
    ]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    return tmp_path


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written, file, page, expected",
    [
        ("[next](01_a.py)", "notebooks/00.py", "chapters/00.ipynb", "[next](01_a.ipynb)"),
        ("[do](../exercises/01_a.py)", "notebooks/01_a.py", "chapters/01_a.ipynb", "[do](../exercises/01_a.md)"),
        ("[see `x`](../jfa/x.py)", "notebooks/01_a.py", "chapters/01_a.ipynb", "[see `x`](../files/jfa/x.py.md)"),
        ("[map](../README.md#inside)", "docs/notes.md", "pages/docs/notes.md", "[map](../../index.md#inside)"),
        ("[n](docs/notes.md)", "README.md", "index.md", "[n](pages/docs/notes.md)"),
        ("[answer](../solutions/01_a.py)", "notebooks/01_a.py", "chapters/01_a.ipynb", "answer"),
        ("![p](docs/p.svg)", "README.md", "index.md", "![p](docs/p.svg)"),
        ("[out](https://example.org/01_a.py) [here](#math)", "README.md", "index.md", None),
        ("`kernel[grid](x)` and ``a[b](c`)``", "README.md", "index.md", None),
        ("```\nkernel[grid](x, y)\n[a](b.py)\n```\n", "README.md", "index.md", None),
        (
            "~~~python\nk[g](x)\n~~~\n[n](docs/notes.md)",
            "README.md",
            "index.md",
            "~~~python\nk[g](x)\n~~~\n[n](pages/docs/notes.md)",
        ),
    ],
)
def test_a_link_leads_to_the_page_of_its_file(checkout, written, file, page, expected):
    site = links.Site(checkout, FOLDERS)
    assert site.rewrite(written, file, page) == (written if expected is None else expected)


def test_solutions_have_links_where_they_have_pages(checkout):
    site = links.Site(checkout, FOLDERS | {"solutions": ("solutions", ".md")})
    assert site.rewrite("[a](solutions/01_a.py)", "README.md", "index.md") == "[a](solutions/01_a.md)"


@pytest.mark.parametrize("target", ["02_b.py", "../docs/nothing.md", "../../outside.md", "../docs"])
def test_a_link_to_no_file_is_an_error_that_names_both_ends(checkout, target):
    with pytest.raises(links.BrokenLink, match=f"notebooks/01_a.py links to {re.escape(target)}"):
        links.Site(checkout, FOLDERS).rewrite(f"[x]({target})", "notebooks/01_a.py", "chapters/01_a.ipynb")


def test_exercises_that_are_not_written_yet_are_named_without_a_link(checkout):
    site = links.Site(checkout, FOLDERS)
    text = "[exercises](../exercises/02_b.py)"
    assert site.rewrite(text, "notebooks/02_b.py", "chapters/02_b.ipynb") == "exercises"
    assert site.to_come == {"exercises/02_b.py"}


def test_pages_that_links_ask_for_are_written_with_those_that_they_ask_for(checkout):
    (checkout / "docs/notes.md").write_text("[x](../jfa/x.py)")
    site, written = links.Site(checkout, FOLDERS), []
    site.rewrite("[n](docs/notes.md)", "README.md", "index.md")

    def write(file, page):
        written.append(page)
        site.rewrite((checkout / file).read_text(), file, page)

    site.follow(write)
    assert written == ["pages/docs/notes.md", "files/jfa/x.py.md"]


def test_a_data_file_beside_the_notes_is_in_the_list_of_files(checkout):
    """Sphinx warns about a page that no list names; notes stand in a list of their own."""
    (checkout / "docs/run.json").write_text("{}")
    site = links.Site(checkout, FOLDERS)
    site.rewrite("[r](docs/run.json) [n](docs/notes.md) [x](jfa/x.py)", "README.md", "index.md")
    pages._write_list_of_files(pages.Plan(checkout, checkout / "out", [], None), site)
    listed = (checkout / "out/files.md").read_text()
    assert "files/docs/run.json" in listed and "files/jfa/x.py" in listed and "notes" not in listed


# -- exercises ---------------------------------------------------------------------------------------------------------

SKELETON = """# %% [markdown]
# # Exercises 01
# Text.

# %% tags=["ex-1.1"]
def f(x):
    raise NotImplementedError("1.1: not started")  # YOUR CODE

# %%
check("1.1", f)
"""


def test_hints_stand_folded_below_their_check():
    page = pages.exercise_page(
        notebook.parse_percent(SKELETON), {"1.1": ("look at <b> & c", "2 * x ** 2"), "1.2": ("other",)}
    )
    before, after = page.split('check("1.1", f)\n```')
    assert "details" not in before and "other" not in page
    assert after.count("<details") == 2 and "hint 1 of 2" in after and "<p>2 * x ** 2</p>" in after
    assert "look at &lt;b&gt; &amp; c" in after
    assert after.index("hint 1 of 2") < after.index("hint 2 of 2"), "the second unfolds inside the first"
    assert "\n\n" not in after.strip(), "a blank line would end the HTML and be read as Markdown"


@pytest.mark.parametrize("chapter", catalog.chapters(), ids=lambda c: c.stem)
def test_every_exercise_of_the_course_gets_its_hints_and_no_answer(chapter):
    hints = {e.id: e.hints for e in chapter.exercises}
    page = pages.exercise_page(notebook.read(ROOT / "exercises" / f"{chapter.stem}.py"), dict(hints))
    assert page.count("<details") == sum(map(len, hints.values()))
    assert page.count("YOUR CODE") >= len(hints) - 1 and "SOLUTION" not in page


@pytest.mark.parametrize("module", [m for modules in pages.API.values() for m in modules])
def test_a_module_of_the_api_is_there(module):
    assert find_spec(module) is not None


def traps(docstring):
    """What Sphinx would stumble over, of the kinds that happen: examples without "::", "::" without an example, |words|."""
    lines = docstring.splitlines()
    for before, blank, line in zip(lines, lines[1:], lines[2:]):
        if blank.strip() or not before.strip() or before.startswith(" "):
            continue
        if line.startswith("    ") and not before.endswith("::"):
            yield f'an indented block after a line without "::": {line.strip()}'
        if before.endswith("::") and line.strip() and not line.startswith(" "):
            yield f'"::" and no indented block: {before}'
    yield from (
        f"|words| outside of code: {word}"
        for word in re.findall(r"(?<![\w`|])\|\w+\|(?![`|])", re.sub(r"``.+?``", "", docstring))
    )


@pytest.mark.parametrize("module", [m for modules in pages.API.values() for m in modules])
def test_docstrings_of_the_api_are_what_sphinx_can_read(module):
    """`make book-check` is the whole check; this one needs no Sphinx."""
    tree = ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8"))
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    public = [n for n in named if not getattr(n, "name", "").startswith("_")]
    found = [f"{getattr(n, 'name', module)}: {trap}" for n in public for trap in traps(ast.get_docstring(n) or "")]
    assert found == []


@pytest.mark.parametrize("text", ["A.\n\n    code()\n", "A::\n\nText.\n", "The size max |x|, in bytes."])
def test_a_trap_is_seen(text):
    assert list(traps(text))
    assert not list(traps("A::\n\n    code()\n\nThe size ``max |x|``.\n\n* a\n"))


# -- citations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_every_chapter_has_sources_that_can_be_gathered(path):
    texts = [c.source for c in notebook.read(path).cells if c.kind == "markdown"]
    section = texts[-1].split("## Sources\n")[1]
    bullets = re.findall(r"^[*-] ", section, flags=re.M)
    assert len(citations.entries(texts, path.name)) == len(bullets) > 0


def test_an_item_over_several_lines_is_one_and_what_follows_the_list_is_none():
    text = "## Sources\n\n* First, arXiv 2205.14135:\n  more of it.\n- Second (arXiv 2205.14135, arXiv 2307.08691).\n"
    text += "\nNext: [02](02.py).\n"
    found = citations.entries(["# Title\n", text], "x.py")
    assert found == ["First, arXiv 2205.14135: more of it.", "Second (arXiv 2205.14135, arXiv 2307.08691)."]
    assert citations.arxiv_numbers(found) == ["2205.14135", "2307.08691"]


def test_the_page_lists_a_paper_once_with_all_its_chapters():
    page = citations.page([("One", "a.ipynb", ["X, arXiv 1805.02867."]), ("Two", "b.ipynb", ["Y, arXiv 1805.02867"])])
    assert "* X, [arXiv 1805.02867](https://arxiv.org/abs/1805.02867)." in page
    assert "| [1805.02867](https://arxiv.org/abs/1805.02867) | [One](a.ipynb), [Two](b.ipynb) |" in page


@pytest.mark.parametrize("text", ["# Nothing\n", "## Sources\n\nIn prose only.\n", "### Sources\n\n* too deep\n"])
def test_a_chapter_without_sources_is_an_error(text):
    with pytest.raises(citations.NoSources, match="07_x.py"):
        citations.entries([text], "07_x.py")


# -- outputs -----------------------------------------------------------------------------------------------------------

CHAPTER = "# %% [markdown]\n# # T\n\n# %%\nprint(1 + 1)\n\n# %%\nimport os\n\nprint(os.path.basename(os.getcwd()))\n"


@pytest.fixture
def chapter(tmp_path):
    """A tiny course with one chapter."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "jfa").mkdir()
    (tmp_path / "jfa" / "a.py").write_text("x = 1\n")
    path = tmp_path / "notebooks" / "01_t.py"
    path.write_text(CHAPTER)
    return path


def test_a_chapter_runs_once_until_its_code_or_the_package_changes(chapter, tmp_path):
    ran: list[str] = []
    build = lambda: execute.outputs_of([chapter], tmp_path, tmp_path / "kept", 1, lambda line, **_: ran.append(line))  # noqa: E731
    first = build()
    assert [outputs[0]["text"] for outputs in first["01_t"]] == ["2\n", "notebooks\n"]
    chapter.write_text(CHAPTER.replace("# # T", "# # Another title"))
    assert build() == first and len(ran) == 1
    shown = execute.with_outputs(execute.read(chapter), first["01_t"])
    assert shown.cells[1].outputs[0].text == "2\n" and "Another" in shown.cells[0].source
    chapter.write_text(CHAPTER.replace("1 + 1", "1 + 2"))
    assert build()["01_t"][0][0]["text"] == "3\n" and len(ran) == 2
    (tmp_path / "jfa" / "a.py").write_text("x = 2\n")
    build()
    assert len(ran) == 3
    assert len(list((tmp_path / "kept").iterdir())) == 1, "older outputs and the copied course are gone"


def test_a_chapter_that_fails_is_named_with_its_error(chapter, tmp_path):
    chapter.write_text("# %%\nraise ValueError('too long a tape')\n")
    with pytest.raises(execute.ChapterFailed, match="(?s)01_t.py does not run.*too long a tape"):
        execute.outputs_of([chapter], tmp_path, tmp_path / "kept", 1, lambda *_, **__: None)
    assert not list((tmp_path / "kept").glob("*.json"))


# -- finished pages ----------------------------------------------------------------------------------------------------


def write_html(folder, **pages):
    """Pages by name."""
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")


def test_links_between_pages_that_are_there_are_no_fault(tmp_path):
    write_html(
        tmp_path,
        a='<a href="b.html#x%20y">b</a><a href="#top">t</a><p id="top"></p>'
        '<a href="https://example.org/">w</a><a href="mailto:a@b">m</a>',
        b='<h1 id="x y">X</h1><img src="data:image/png;base64,AA=="><link rel="canonical" href="https://example.org/b.html">',
    )
    assert verify.faults(tmp_path) == []


@pytest.mark.parametrize(
    "body, words",
    [
        ('<a href="c.html">', "c.html leads to no file"),
        ('<a href="b.html#nothing">', "b.html#nothing leads to a page without this anchor"),
        ('<a href="#nothing">', "#nothing leads to a page without this anchor"),
        ('<img src="_images/x.png">', "_images/x.png leads to no file"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "loads //example.org/x.css from the network"),
        ("<p>built in /home/me/jfa</p>", "contains /home/me/jfa"),
    ],
)
def test_each_fault_of_a_page_is_named(tmp_path, body, words):
    write_html(tmp_path, a=body, b="<h1 id='x'></h1>")
    assert verify.faults(tmp_path, ["/home/me/jfa"]) == [f"a.html: {words}"]


def test_a_style_sheet_that_fetches_a_font_is_a_fault(tmp_path):
    (tmp_path / "s.css").write_text(
        "@font-face { src: url('https://example.org/f.woff2') } b { background: url(local.png) }"
    )
    assert verify.faults(tmp_path) == ["s.css: loads https://example.org/f.woff2 from the network"]


# -- a whole build -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The book of one chapter."""
    from book.__main__ import PACKAGES, main

    if not PACKAGES.is_dir():
        pytest.importorskip("myst_nb", reason="Sphinx is not here: make book installs it")
    target = tmp_path_factory.mktemp("built") / "book"
    assert main(["--chapters", "02", "--to", str(target)]) == 0
    return target


@pytest.mark.slow
def test_one_chapter_becomes_a_book(built):
    page = (built / "chapters" / "02_online_softmax.html").read_text()
    assert "the numbers of this figure" in page and "_static/tex-svg.js" in page
    assert (built / "exercises" / "02_online_softmax.html").exists()
    assert not (built / "solutions").exists()
    assert "FlashAttention" in (built / "sources.html").read_text()
    assert list((built / "_downloads").rglob("02_online_softmax.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_pages_fit_the_window_and_fetch_nothing(built, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    for name in ("index", "chapters/02_online_softmax", "exercises/02_online_softmax", "api/jfa.attention", "sources"):
        page.goto(f"file://{built}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    assert not failed and {url.split(":")[0] for url in asked} <= {"file", "data"}
    page.close()


@pytest.mark.slow
def test_mathematics_is_set_and_the_search_finds_from_the_disk(built, browser):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"file://{built}/chapters/02_online_softmax.html")
    page.wait_for_selector("mjx-container svg", state="attached")
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    page.get_by_placeholder("Search").fill("overflow")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").all_inner_texts()
    assert any("Online softmax" in title for title in found), found
    page.close()


def test_a_chapter_that_is_not_there_is_told(capsys):
    from book import __main__ as command

    options = command._parser().parse_args(["--chapters", "77"])
    assert command.build(options) == 2
    assert "no chapter 77; there are 00 01" in capsys.readouterr().out


def test_help_has_a_worked_example(capsys):
    from book.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "python -m book --chapters 01 --solutions" in capsys.readouterr().out
