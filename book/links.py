"""Which page of the book a file of the checkout gets, and what links between files become between pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from jfa.course.markdown import replace_links


class BrokenLink(Exception):
    """A link in the checkout that leads to no file; the message names both ends."""


class Site:
    """Pages by the file they are made from.

    ``folders`` says which folders of the checkout have pages of a kind of their own: folder -> (folder of the pages, suffix of
    Sphinx's source). A link to any other file gives it a page too: Markdown is rendered, everything else is shown as it is.
    """

    def __init__(self, root: Path, folders: dict[str, tuple[str, str]], home: str = "README.md"):
        self.root, self.folders, self.home = root, folders, home
        self.found: dict[str, str] = {}  # file of the checkout -> Sphinx source that shows it, in the order of links
        self.images: set[str] = set()
        self.to_come: set[str] = set()  # exercises that a chapter names before they are written

    def page(self, file: str) -> str | None:
        """Return the Sphinx source (a path below the source folder) that shows a file, None for files that the book leaves out."""
        if file == self.home:
            return "index.md"
        path = PurePosixPath(file)
        top = path.parts[0]
        if top == "solutions" and top not in self.folders:
            return None
        if top in self.folders and len(path.parts) == 2 and path.suffix == ".py":
            folder, suffix = self.folders[top]
            return f"{folder}/{path.stem}{suffix}"
        made = f"pages/{file}" if path.suffix == ".md" else f"files/{file}.md"
        return self.found.setdefault(file, made)

    def rewrite(self, text: str, file: str, page: str) -> str:
        """Return Markdown of a file with every relative link turned into one from ``page``. Raises BrokenLink."""

        def replace(image: str, words: str, target: str) -> str:
            path, _, anchor = target.partition("#")
            there = os.path.normpath(PurePosixPath(file).parent / path)
            if there.startswith("..") or not (self.root / there).is_file():
                if there.startswith("exercises/"):
                    self.to_come.add(there)
                    return words
                raise BrokenLink(f"{file} links to {target}, which is no file of the checkout")
            if image:
                self.images.add(there)
                return f"![{words}]({_relative(there, page)})"
            source = self.page(there)
            if source is None:
                return words
            return f"[{words}]({_relative(source, page)}{'#' + anchor if anchor else ''})"

        return replace_links(text, replace)

    def follow(self, write: Callable[[str, str], None]) -> None:
        """Write the pages that links asked for, and those that their own links ask for: ``write(file, page)``."""
        done: set[str] = set()
        while todo := [file for file in self.found if file not in done]:
            for file in todo:
                write(file, self.found[file])
                done.add(file)


def _relative(source: str, page: str) -> str:
    return os.path.relpath(source, PurePosixPath(page).parent)


def toctree(pages: Iterable[str], page: str, *, caption: str = "", hidden: bool = True, depth: int = 1) -> str:
    """Return a table of contents as MyST: sources below the source folder, listed from ``page``."""
    options = [f":caption: {caption}"] * bool(caption) + [":hidden:"] * hidden + [f":maxdepth: {depth}"]
    names = [_relative(re.sub(r"\.(md|rst|ipynb)$", "", source), page) for source in pages]
    return "\n".join(["```{toctree}", *options, "", *names, "```", ""])
