"""Make untrusted text safe to print: without terminal escape sequences and unpaired surrogates."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from jfa.course.report import Result

_HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
}  # controls, marks (such as those that turn the direction), surrogates, line separators


def printable(text: str) -> str:
    """Return the text with what moves the cursor, hides or cannot be encoded as an escape: ``\\x1b``, ``\\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(result: Result) -> Result:
    """Return the result, changed in place: all its sentences quote code and exceptions of learners."""
    result.recognised = printable(result.recognised)
    result.notes = [printable(note) for note in result.notes]
    result.checks = [replace(c, case=printable(c.case), message=printable(c.message)) for c in result.checks]
    return result
