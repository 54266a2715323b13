"""The course engine: check(), hint(), progress() in a notebook, and the same judge behind ``jfa grade``.

The files that judge an answer, from the outside in:

    notebook_api, cli   check("2.3", merge) in a notebook; jfa grade 2.3 in a terminal (through grade, answers, outputs)
    catalog, checks/    which exercises there are; spec: the words in which one is described
    judge               makes cases, has the answer run, weighs what came back; runs no learner code
    launch, nursery     start a process for the answer, read its messages, end it; a clean warm process to fork from
    child               the answer's process: namespace, cases, what it returned (measure: how it computed it)
    guard, closed_modules, seccomp    what an answer may not do; torch as it was before a notebook patched it
    wire                numbers and text between the two, never a pickle
    trial, compare      check by check, the smallest case first; where and how results differ, in sentences
    mutants             known mistakes, to recognise one; mutant_table: every mistake against the check that catches it
    report              the one result: text and HTML

Files of learners and authors: notebook (cells of .py and .ipynb), strip (solutions to exercises), watch (checks at each save),
upkeep (reset, update), state (progress, backups in .jfa/), release (for instructors), anywhere (an .ipynb for Colab; markdown: its
links), paths.
"""

from __future__ import annotations

_HOMES = {"check": "jfa.course.notebook_api", "hint": "jfa.course.notebook_api", "progress": "jfa.course.notebook_api"}

__all__ = ["check", "hint", "progress"]


def __getattr__(name: str):
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jfa.course' has no attribute {name!r}")
