"""The course engine: check(), hint(), progress() in a notebook, and the same judge behind ``jfa grade``."""

from __future__ import annotations

_HOMES = {"check": "jfa.course.notebook_api", "hint": "jfa.course.notebook_api", "progress": "jfa.course.notebook_api"}

__all__ = ["check", "hint", "progress"]


def __getattr__(name: str):
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jfa.course' has no attribute {name!r}")
