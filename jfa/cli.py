"""The command line: ``jfa SUBCOMMAND ...``.

A table of subcommands. The module of one is imported only when it is called, so ``jfa lab`` starts without torch and
``jfa doctor`` can report a torch or Triton that does not import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """One subcommand: where its ``main(argv) -> int`` lives, and one line of help."""

    target: str  # "module:function"
    help: str


GROUPS = {
    "learning": ("lab", "watch", "hint", "progress", "grade", "reset", "update", "notebook", "doctor"),
    "kernel development": ("compile", "timeline", "emulator", "bench", "verify"),
    "instructors (grade --from reads submissions)": ("release",),
    "authors of chapters": ("strip", "mutants"),
}

COMMANDS = {
    "lab": Command("jfa.lab:main", "open JupyterLab at the first chapter, everything it writes kept in .jfa/"),
    "watch": Command(
        "jfa.course.cli:watch", "check each exercise as its file is saved, and show the next: jfa watch 2"
    ),
    "doctor": Command("jfa.doctor:main", "is this installation sound? each line with the command that repairs it"),
    "grade": Command("jfa.course.cli:grade", "grade exercises: jfa grade 1.2, jfa grade 1 2, jfa grade --solutions"),
    "hint": Command("jfa.course.cli:hint", "the next hint of an exercise: jfa hint 1.2"),
    "progress": Command("jfa.course.cli:progress", "what is solved, a bar per chapter"),
    "reset": Command("jfa.course.cli:reset", "put an exercise back to its start (a backup is kept): jfa reset 1.2"),
    "update": Command("jfa.course.cli:update", "after a git pull: carry your answers into the new exercises"),
    "notebook": Command(
        "jfa.course.cli:notebook", "write a chapter as an .ipynb that installs what it needs: jfa notebook 04"
    ),
    "release": Command(
        "jfa.course.cli:release", "write the course to a folder to hand out, with or without its solutions"
    ),
    "strip": Command("jfa.course.cli:strip", "make exercises/ from solutions/"),
    "mutants": Command("jfa.course.cli:mutants", "table of known mistakes and the check that catches each"),
    "compile": Command(
        "jfa.workbench.compile:main", "compile a kernel for a GPU that is not here: registers, spills, memory"
    ),
    "timeline": Command("jfa.workbench.timeline:main", "what each role of a kernel did when, on the emulator's clock"),
    "emulator": Command(
        "jfa.workbench.schedules:main", "sweep a kernel's synchronization on the emulator for faults it would miss"
    ),
    "bench": Command("jfa.bench.cli:main", "measure kernels on this machine's GPU and store the results"),
    "verify": Command(
        "jfa.verify.cli:main", "check and time everything on this machine's GPU, and write one result file"
    ),
}


# What a plain `pip install jfa` does not bring: a module that is missing -> what to say and do.
NEEDS = {
    "triton.language.extra.tlx": "this needs Triton with TLX: pip install 'jfa[tlx]' (jfa doctor says which Triton is here)",
    "triton": "this needs Triton with TLX: pip install 'jfa[tlx]'",
    "greenlet": "this needs the emulator: pip install 'jfa[emulator]'",
    "matplotlib": "this needs matplotlib: pip install 'jfa[course]'",
}


def usage() -> str:
    """Return the text of ``jfa --help``."""
    width = max(map(len, COMMANDS))
    groups = []
    for title, names in GROUPS.items():
        groups += [f"\n{title}", *(f"  {name:<{width}}  {COMMANDS[name].help}" for name in names)]
    return "usage: jfa COMMAND [options]     (jfa COMMAND --help says more)\n" + "\n".join(groups) + "\n"


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
        return _load(argv[0], module, function)(argv[1:]) or 0
    except KeyboardInterrupt:
        print("\njfa: stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        needs = next((what for module, what in NEEDS.items() if f"{error.name}.".startswith(module + ".")), None)
        if needs is None:
            raise
        print(f"jfa {argv[0]}: {needs}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `jfa mutants | head`: who read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141


def _load(name: str, module: str, function: str) -> Callable[[list[str]], int]:
    """Return the function behind a command; a doctor that cannot be imported is a sentence, not a traceback."""
    try:
        return getattr(import_module(module), function)
    except Exception as error:
        if name != "doctor":
            raise
        print(f"jfa doctor does not start: {type(error).__name__}: {error}{_path_hint()}", file=sys.stderr)
        return lambda argv: 1


def _path_hint() -> str:
    """Return what is nearly always to blame where Python's own modules do not import."""
    if os.environ.get("PYTHONPATH"):
        return "\nPYTHONPATH is set, and a file there may hide one of Python's own. repair: unset PYTHONPATH"
    return "\nA file in this folder may hide one of Python's own: try from another folder."


def _version() -> str:
    from jfa import __version__

    return __version__


def _did_you_mean(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
