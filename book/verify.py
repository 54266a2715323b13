"""Reads the finished HTML as a browser without a network would: every link, anchor, image and script must be there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "source": "src",
    "iframe": "src",
}  # fetched without being asked
_NOT_FETCHED = {"canonical", "index", "search", "next", "prev", "author", "copyright"}  # relations of <link>


@dataclass
class Page(HTMLParser):
    """What one page offers (ids) and wants (links, and what it loads)."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note a tag; the parser calls this."""
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if _LOADED.get(tag) in values:
            kind = self.links if set(values.get("rel", "").split()) & _NOT_FETCHED else self.loads
            kind.append(values[_LOADED[tag]])


def read(path: Path) -> Page:
    """Return one page, parsed."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def faults(html: Path, secrets: Iterable[str] = ()) -> list[str]:
    """Return a sentence per link that leads nowhere, per thing loaded from elsewhere, and per one of ``secrets`` that a page says.

    ``secrets`` are words that no page may contain, such as the folder in which the book was built.
    """
    pages = {path: read(path) for path in sorted(html.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(html)
        found += [f"{name}: {what}" for target in page.links if (what := _broken(path, target, pages))]
        for target in page.loads:
            if urlsplit(target).scheme in ("http", "https") or target.startswith("//"):
                found.append(f"{name}: loads {target} from the network")
            elif what := _broken(path, target, pages):
                found.append(f"{name}: {what}")
        text = path.read_text(encoding="utf-8")
        found += [f"{name}: contains {word}" for word in secrets if word in text]
    for path in sorted(html.rglob("*.css")):
        fetched = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(html)}: loads {target} from the network" for target in fetched]
    return list(dict.fromkeys(found))


def _broken(path: Path, target: str, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link of a page, '' if nothing is."""
    parts = urlsplit(target)
    if parts.scheme or target.startswith("//"):
        return ""
    there = path if not parts.path else Path(path.parent, unquote(parts.path)).resolve()
    if not there.is_file():
        return f"{target} leads to no file"
    if parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].ids:
        return f"{target} leads to a page without this anchor"
    return ""
