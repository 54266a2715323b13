"""Writes what Sphinx reads: a folder of chapters with their outputs, exercises, notes, the API's list and files that are linked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat

from book import citations, execute
from book.links import Site, toctree
from jfa.course import anywhere, catalog, notebook, strip
from jfa.course.notebook import Notebook
from jfa.course.paths import Course

# The public modules, in the order in which a reader meets them: heading -> modules.
API = {
    "The op": ("jfa.attention", "jfa.modules"),
    "Layouts, masks, references": ("jfa.layout", "jfa.masks", "jfa.block_sparse", "jfa.mxfp8", "jfa.reference"),
    "Schedules": ("jfa.schedule.tiles", "jfa.schedule.assign", "jfa.schedule.clc", "jfa.schedule.split"),
    "Backends": ("jfa.kernels.base", "jfa.kernels.registry"),
    "Emulator": (
        "jfa.emulator", "jfa.emulator.errors", "jfa.emulator.sweep", "jfa.emulator.explore",
        "jfa.emulator.timeline", "jfa.emulator.rates", "jfa.compiled",
    ),
    "Course": ("jfa.course.notebook_api", "jfa.course.spec", "jfa.plots"),
    "Measuring": ("jfa.bench.shapes", "jfa.bench.runner", "jfa.bench.recorded"),
}  # fmt: skip
ELSEWHERE = {
    "jfa.emulator": "EmulatorError, NotSupported"
}  # names that a module passes on; the page of their own module has them
_LEXERS = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}


@dataclass(frozen=True)
class Plan:
    """What goes into the book. ``outputs`` gives the outputs of chapters' code cells, by stem; None shows the code alone."""

    root: Path
    target: Path
    chapters: list[Path]
    outputs: dict[str, list] | None
    with_solutions: bool = False
    only: bool = False  # a part of the chapters: links to the others become words


def write(plan: Plan) -> list[str]:
    """Write the source folder again; exercises that chapters name and that are not there yet.

    Raises:
        links.BrokenLink, citations.NoSources: naming the file.
    """
    shutil.rmtree(plan.target, ignore_errors=True)
    folders = {"notebooks": ("chapters", ".ipynb"), "exercises": ("exercises", ".md")}
    if plan.with_solutions:
        folders["solutions"] = ("solutions", ".md")
    site = _PartOfSite(plan.root, folders, plan) if plan.only else Site(plan.root, folders)
    chapters = [_write_chapter(plan, site, path) for path in plan.chapters]
    _put(plan.target / "sources.md", citations.page(chapters))
    _write_api(plan.target)
    notes = [f"docs/{path.name}" for path in sorted((plan.root / "docs").glob("*.md"))]
    for file in notes:
        site.page(file)
    _write_home(plan, site, [source for _, source, _ in chapters], notes)
    site.follow(lambda file, page: _write_file(plan, site, file, page))
    _write_list_of_files(plan, site)
    for image in site.images:
        _copy(plan.root / image, plan.target / image)
    return sorted(site.to_come)


class _PartOfSite(Site):
    """A site with some of the chapters only."""

    def __init__(self, root: Path, folders: dict, plan: Plan):
        super().__init__(root, folders)
        self.stems = {path.stem for path in plan.chapters}

    def page(self, file: str) -> str | None:
        path = Path(file)
        if path.parts[0] in self.folders and path.suffix == ".py" and path.stem not in self.stems:
            return None
        return super().page(file)


# -- chapters and exercises --------------------------------------------------------------------------------------------


def _write_chapter(plan: Plan, site: Site, path: Path) -> tuple[str, str, list[str]]:
    """Return one chapter's page and those of its exercises; (title, source of the page, what it cites)."""
    page = f"chapters/{path.stem}.ipynb"
    chapter = execute.read(path)
    if plan.outputs is not None:
        execute.with_outputs(chapter, plan.outputs[path.stem])
    texts = [cell.source for cell in chapter.cells if cell.cell_type == "markdown"]
    cited = citations.entries(texts, path.name)
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            cell.source = site.rewrite(cell.source, f"notebooks/{path.name}", page)
    below = _write_exercises(plan, site, path.stem)
    anywhere.write(Course(plan.root), int(path.stem[:2]), to=plan.target / "downloads")
    file = f"{path.stem}.ipynb"
    foot = f"Run it elsewhere: {{download}}`{file} <../downloads/{file}>` fetches the course by itself, on Colab too."
    chapter.cells.append(nbformat.v4.new_markdown_cell("---\n\n" + foot))
    if below:
        chapter.cells.append(nbformat.v4.new_markdown_cell(toctree(below, page)))
    _put(plan.target / page, nbformat.writes(chapter))
    title = re.search(r"^# (.+)$", texts[0], flags=re.M)
    return (
        title[1] if title else path.stem,
        page,
        [site.rewrite(x, f"notebooks/{path.name}", "sources.md") for x in cited],
    )


def _write_exercises(plan: Plan, site: Site, stem: str) -> list[str]:
    """Return the pages that belong to a chapter: its exercises, and its solutions where they are asked for."""
    written = []
    skeleton = plan.root / "exercises" / f"{stem}.py"
    if skeleton.exists():
        hints = {e.id: e.hints for c in catalog.chapters() if c.stem == stem for e in c.exercises}
        text = exercise_page(notebook.read(skeleton), hints)
        _put(plan.target / f"exercises/{stem}.md", site.rewrite(text, f"exercises/{stem}.py", f"exercises/{stem}.md"))
        written.append(f"exercises/{stem}.md")
    solutions = plan.root / "solutions" / f"{stem}.py"
    if plan.with_solutions and solutions.exists():
        text = exercise_page(notebook.read(solutions), {}, strip.solution_source)
        text = re.sub(r"^# Exercises?\b|^# Solutions?\b", "# Solutions", text, count=1, flags=re.M)
        _put(plan.target / f"solutions/{stem}.md", site.rewrite(text, f"solutions/{stem}.py", f"solutions/{stem}.md"))
        written.append(f"solutions/{stem}.md")
    return written


def exercise_page(cells: Notebook, hints: dict[str, tuple[str, ...]], shown: Callable[[str], str] = str) -> str:
    """Return exercises as Markdown: text, gaps as code, and below each check the hints of its exercise, folded one by one."""
    parts, exercise = [], None
    for cell in cells.cells:
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{shown(cell.source)}\n```")
        exercise = cell.exercise or exercise
        if exercise in hints and f'check("{exercise}"' in cell.source:
            parts.append(folded(hints.pop(exercise)))
    return "\n\n".join([*parts, ""])


def folded(hints: tuple[str, ...]) -> str:
    """Return hints as HTML that unfolds one after another; their words stand as they are, no Markdown."""
    inner = ""
    for number in range(len(hints), 0, -1):
        text = f"<p>{escape(hints[number - 1])}</p>{inner}"
        inner = f'<details class="hint"><summary>hint {number} of {len(hints)}</summary>{text}</details>'
    return inner.replace("\n", " ")


# -- the other pages ---------------------------------------------------------------------------------------------------


def _write_home(plan: Plan, site: Site, chapters: list[str], notes: list[str]) -> None:
    """Write the first page: the README, and below it the tables of contents that the sidebar shows."""
    text = site.rewrite((plan.root / "README.md").read_text(encoding="utf-8"), "README.md", "index.md")
    trees = [
        toctree(chapters, "index.md", caption="Chapters"),
        toctree([site.page(file) for file in notes], "index.md", caption="Notes"),
        toctree(["api/index.rst", "sources.md", "files.md"], "index.md", caption="Reference", depth=2),
    ]
    _put(plan.target / "index.md", "\n\n".join([text, *trees]))


def _write_api(target: Path) -> None:
    """Write a page per public module, its members from their docstrings, and a list of the pages."""
    lines = ["API", "===", "", "Public modules by what they are for, from their docstrings."]
    for heading, modules in API.items():
        lines += [
            "",
            heading,
            "-" * len(heading),
            "",
            ".. toctree::",
            "   :maxdepth: 1",
            "",
            *(f"   {m}" for m in modules),
        ]
        for module in modules:
            title = f"``{module}``"
            body = [
                title,
                "=" * len(title),
                "",
                ".. highlight:: default",
                "",
                f".. automodule:: {module}",
                "   :members:",
            ]
            if module in ELSEWHERE:
                body.append(f"   :exclude-members: {ELSEWHERE[module]}")
            _put(target / "api" / f"{module}.rst", "\n".join([*body, ""]))
    _put(target / "api" / "index.rst", "\n".join([*lines, ""]))


def _write_file(plan: Plan, site: Site, file: str, page: str) -> None:
    """Write the page of a linked file: Markdown rendered, everything else as it is."""
    text = (plan.root / file).read_text(encoding="utf-8")
    if file.endswith(".md"):
        _put(plan.target / page, site.rewrite(text, file, page))
        return
    _copy(plan.root / file, (plan.target / page).with_suffix(""))
    lexer = _LEXERS.get(Path(file).suffix, "text")
    body = f"# {file}\n\n```{{literalinclude}} {Path(file).name}\n:language: {lexer}\n:linenos:\n```\n"
    _put(plan.target / page, body)


def _write_list_of_files(plan: Plan, site: Site) -> None:
    """Write the page that lists the files which the others link to, the notes (which have a place of their own) apart."""
    notes = {file for file in site.found if Path(file).parent.as_posix() == "docs" and file.endswith(".md")}
    pages = [page for file, page in sorted(site.found.items()) if file not in notes]
    tree = toctree(pages, "files.md", hidden=False) if pages else ""
    _put(plan.target / "files.md", f"# Files\n\nFiles of the repository that the other pages link to.\n\n{tree}")


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
