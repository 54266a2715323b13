"""Parsing from several threads: one at a time, everywhere, and never blocked in a forked child."""

import ast
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jfa.course
from jfa.course import syntax


def test_one_text_is_parsed_at_a_time(monkeypatch):
    busy, most = [], []
    real = ast.parse

    def slow(source):
        busy.append(source)
        most.append(len(busy))
        time.sleep(0.005)
        busy.pop()
        return real(source)

    monkeypatch.setattr(syntax.ast, "parse", slow)
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(syntax.parse, [f"x = {i}" for i in range(12)]))
    assert max(most) == 1
    assert [tree.body[0].value.value for tree in trees] == list(range(12))


def test_a_text_that_is_none_raises_and_frees_the_turn():
    for _ in range(2):
        with pytest.raises(SyntaxError):
            syntax.parse("def (")


def test_a_forked_child_parses_whoever_had_the_turn():
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with syntax._TURN.lock:
            held.set()
            go_on.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if syntax.parse("y = 1").body else 1)
    status = _ended(child)
    go_on.set()
    holder.join()
    assert status == 0


def _ended(child, seconds=20.0):
    """Return a child's exit status; one that hangs is killed and gives None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_nothing_else_of_the_course_parses_by_itself():
    sources = Path(jfa.course.__file__).parent.glob("*.py")
    assert [p.name for p in sources if "ast.parse(" in p.read_text(encoding="utf-8")] == ["syntax.py"]
