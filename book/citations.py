"""One page of all that the chapters cite, read from their own "Sources" sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_HEADING = re.compile(r"^(#{1,6}) ", flags=re.M)
_SECTION = re.compile(r"^## Sources[ \t]*$\n(.*?)(?=^#{1,2} |\Z)", flags=re.M | re.S)
_ITEM = re.compile(r"^[*-] (.*(?:\n(?:  .*|[ \t]*(?=\n  )))*)", flags=re.M)
_ARXIV = re.compile(r"\barXiv[: ](\d{4}\.\d{4,5})\b")


class NoSources(Exception):
    """A chapter that says nothing of its sources, or in a form that cannot be gathered; the message names it."""


def entries(cells: Iterable[str], chapter: str) -> list[str]:
    """Return the items under a chapter's "## Sources", as Markdown without their bullets. Raises NoSources."""
    sections = [match[1] for cell in cells for match in _SECTION.finditer(cell)]
    items = [" ".join(item.split()) for section in sections for item in _ITEM.findall(section)]
    if not items:
        raise NoSources(f"{chapter} has no section '## Sources' with a list")
    return items


def arxiv_numbers(items: Iterable[str]) -> list[str]:
    """Return arXiv numbers in the order they appear, each once."""
    return list(dict.fromkeys(number for item in items for number in _ARXIV.findall(item)))


def linked(item: str) -> str:
    """Return an item with its arXiv numbers as links."""
    return _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", item)


def page(chapters: Sequence[tuple[str, str, list[str]]]) -> str:
    """Return the page as Markdown, from (title, source of the chapter's page, its items) of each chapter."""
    lines = ["# Sources", "", "What the chapters cite, gathered from the end of each.", ""]
    for title, source, items in chapters:
        lines += [f"## [{title}]({source})", "", *(f"* {linked(item)}" for item in items), ""]
    used: dict[str, list[str]] = {}
    for title, source, items in chapters:
        for number in arxiv_numbers(items):
            used.setdefault(number, []).append(f"[{title}]({source})")
    lines += ["## Papers on arXiv, and where they are cited", "", "| paper | chapters |", "|---|---|"]
    lines += [f"| [{n}](https://arxiv.org/abs/{n}) | {', '.join(used[n])} |" for n in sorted(used)]
    return "\n".join([*lines, ""])
