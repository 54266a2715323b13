"""The command line: ``jfa SUBCOMMAND ...``.

A table of names; the module behind one is imported only when it is called, so that ``jfa lab`` starts without torch and
``jfa doctor`` can report a torch or Triton that does not import.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """One subcommand: where its ``main(argv) -> int`` lives, and one line of help."""

    target: str  # "module:function"
    help: str


COMMANDS = {
    "lab": Command("jfa.lab:main", "open JupyterLab at the first chapter, everything it writes kept in .jfa/"),
    "doctor": Command("jfa.doctor:main", "is this installation sound? each line with the command that repairs it"),
    "grade": Command("jfa.course.cli:grade", "grade exercises: jfa grade 1.2, jfa grade 1 2, jfa grade --solutions"),
    "hint": Command("jfa.course.cli:hint", "the next hint of an exercise: jfa hint 1.2"),
    "progress": Command("jfa.course.cli:progress", "what is solved, a bar a chapter"),
    "reset": Command("jfa.course.cli:reset", "put an exercise back to its start (a backup is kept): jfa reset 1.2"),
    "update": Command("jfa.course.cli:update", "after a git pull: carry your answers into the new exercises"),
    "release": Command("jfa.course.cli:release", "for instructors: the course without its solutions"),
    "strip": Command("jfa.course.cli:strip", "for authors: make exercises/ from solutions/"),
    "mutants": Command("jfa.course.cli:mutants", "table of known mistakes and the check that catches each"),
    "compile": Command("jfa.compiled:main", "compile a kernel for a GPU that is not here: registers, spills, memory"),
    "timeline": Command("jfa.emulator.cli:timeline", "what each role of a kernel did when, on the emulator's clock"),
    "emulator": Command("jfa.emulator.cli:main", "sweep a kernel's synchronisation on the emulator for faults it would miss"),
    "bench": Command("jfa.bench.cli:main", "measure kernels on this machine's GPU and store the results"),
}


def usage() -> str:
    """The text of ``jfa --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"usage: jfa COMMAND [options]     (jfa COMMAND --help says more)\n\n{rows}\n"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, 2 where there is no such command."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"jfa {_version()}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"jfa: no command named {argv[0]!r}{_did_you_mean(argv[0])}\n\n{usage()}", file=sys.stderr)
        return 2
    module, function = command.target.split(":")
    try:
        return getattr(import_module(module), function)(argv[1:]) or 0
    except KeyboardInterrupt:
        print("\njfa: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `jfa mutants | head`: who read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141


def _version() -> str:
    from jfa import __version__

    return __version__


def _did_you_mean(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
