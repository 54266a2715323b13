"""Parse Python one text at a time: in CPython 3.11 the parser's depth counter is shared by all threads.

Two threads that parse at once can get "SystemError: AST constructor recursion depth mismatch" for a text without a fault
(CPython issue 106905), and a right answer would count as one that cannot be judged.
"""

from __future__ import annotations

import ast
import os
import threading


class _Turn:
    """A lock that a forked child finds open, whoever held it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()


_TURN = _Turn()


def parse(source: str) -> ast.Module:
    """Return the text's syntax tree; raises what ``ast.parse`` raises for a text that is none."""
    with _TURN.lock:
        return ast.parse(source)
