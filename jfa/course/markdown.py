"""Find links in Markdown, except in code spans and fences, where `kernel[grid](x)` looks like a link."""

from __future__ import annotations

import re
from collections.abc import Callable

_FENCE = r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"
_SPAN = r"(?P<ticks>(?<!`)`+(?!`)).+?(?<!`)(?P=ticks)(?!`)"
_LINK = r"(?P<image>!?)\[(?P<words>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^()\s]+)\)"
_PIECES = re.compile(f"{_FENCE}|{_SPAN}|{_LINK}", flags=re.M | re.S)
_ELSEWHERE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|#|//")


def replace_links(text: str, replace: Callable[[str, str, str], str]) -> str:
    """Return the text with each relative link or image replaced by ``replace("!" or "", words, target)``."""

    def piece(match: re.Match) -> str:
        target = match["target"]
        return (
            match[0] if target is None or _ELSEWHERE.match(target) else replace(match["image"], match["words"], target)
        )

    return _PIECES.sub(piece, text)
