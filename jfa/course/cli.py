"""The course's subcommands: each takes its arguments as a list and returns an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jfa.course import files
from jfa.course.notebook import Unreadable
from jfa.course.paths import Course, find_course

_TROUBLE = (LookupError, files.Refusal, Unreadable, OSError)


def _command(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Turn lookups and refusals that a user caused into one line and exit status 2."""

    def run(argv: list[str]) -> int:
        try:
            return function(argv)
        except _TROUBLE as error:
            return _complain(function.__name__, error)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def _complain(command: str, error: Exception) -> int:
    """Return one line about something that a user or the system caused, and the exit status for it."""
    text = error.args[0] if isinstance(error, LookupError) and error.args else error
    if isinstance(error, OSError) and not isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError):
        text = f"{error.filename or 'a file'}: {files.words(error)}"
    print(f"jfa {command}: {text}", file=sys.stderr)
    return 2


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"jfa {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@_command
def grade(argv: list[str]) -> int:
    """Grade exercises; return 0 only if all requested ones pass."""
    parser = _parser(
        "grade", "Grade exercises headless: your notebooks' tagged cells, run apart, judged as check() does."
    )
    parser.add_argument("what", nargs="*", help="chapters (2) or exercises (2.3); all if left out")
    parser.add_argument("--solutions", action="store_true", help="grade the solutions instead of your answers")
    parser.add_argument(
        "--from", dest="submissions", type=Path, metavar="DIR", help="grade submissions: one folder per learner"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the data (a notebook's check uses 0)")
    parser.add_argument("--jobs", type=int, default=0, help="answers at a time (default: the number of cores)")
    for name in ("json", "junit", "csv"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write the results as {name.upper()}")
    options = parser.parse_args(argv)
    _start_nursery()
    from jfa.course import catalog, outputs
    from jfa.course.grade import Source, left_aside, read, submissions
    from jfa.course.printable import printable

    sys.stdout.reconfigure(errors="backslashreplace") if hasattr(sys.stdout, "reconfigure") else None
    course, exercises = find_course(), catalog.select(options.what)
    if options.solutions:
        course.require_solutions()
    if options.submissions:
        top = options.submissions
        sources = {p.name: Source(course, "submission", p, top) for p in submissions(top)}
    else:
        sources = {"": Source(course, "solutions" if options.solutions else "exercises")}
    files = {name: path for name in ("json", "junit", "csv") if (path := getattr(options, name))}
    for path in files.values():
        path.open("a").close()  # a file that cannot be written is said now, not after an hour
    for sentence in [*_open_doors(), *filter(None, [left_aside(options.submissions) if options.submissions else ""])]:
        print(f"Note: {printable(sentence)}")
    handed = read(exercises, sources)  # all of it, before any answer runs
    graded = {who: _grade_source(who, exercises, source, handed[who], options) for who, source in sources.items()}
    for name, path in files.items():
        getattr(outputs, f"write_{name}")(path, graded)
    if not (options.solutions or options.submissions):
        _remember(course, graded[""])
    return 0 if graded and exercises and all(r.passed for results in graded.values() for r in results) else 1


def _open_doors() -> list[str]:
    """Return what an answer could do on this system that it should not be able to."""
    from jfa.course import landlock, seccomp

    filtered = "This system filters no system calls: C code of an answer could start and signal other processes."
    return [s for s in (landlock.shortcoming(), "" if seccomp.is_known() else filtered) if s]


def _remember(course: Course, results: list) -> None:
    """Keep progress as check() keeps it: both feed the same."""
    from jfa.course import catalog, report, state

    remarks = [state.record(course, *(r for r in results if r.state != report.MISSING))]
    for number in sorted({int(r.exercise.split(".")[0]) for r in results}):
        state.keep_pristine(course, catalog.chapter(number).stem)
    for remark in filter(None, dict.fromkeys(remarks)):
        print(f"Note: {remark}")


def _grade_source(learner: str, exercises: list, source, handed: dict, options: argparse.Namespace) -> list:
    from jfa.course import grade as grading
    from jfa.course.printable import printable
    from jfa.course.report import summary_line

    learner = printable(learner)
    if learner:
        print(f"== {learner}")
    show = lambda r: print(_brief(r), flush=True)  # noqa: E731
    results = grading.grade(exercises, source, options.seed, options.jobs, show, handed)
    print(f"{learner + ': ' if learner else ''}{summary_line(results)}, seed {options.seed}", flush=True)
    return results


def _brief(result) -> str:
    """Return one line for what passed or was not touched, the whole report for the rest."""
    if result.state in ("wrong", "wrong method"):
        return result.text()
    notes = "".join(f"\n  Note: {n}" for n in result.notes)
    return f"{result.exercise} {result.title}: {result.state}{f'  ({result.seconds:.1f} s)' if result.passed else ''}{notes}"


def _start_nursery() -> None:
    """Start the process that answers are forked from; it imports torch while this one does."""
    from jfa.course.nursery_client import nursery

    nursery()


@_command
def mutants(argv: list[str]) -> int:
    """Print the mutants' table; return 0 only if every mutant is caught by the check that it names."""
    parser = _parser("mutants", "Run every stored mistake as an answer and print which check caught it.")
    parser.add_argument("what", nargs="*", help="chapters or exercises; all if left out")
    options, course = parser.parse_args(argv), find_course()
    course.require_solutions()  # most mutants are edits of them
    _start_nursery()
    from jfa.course import catalog, mutant_table

    exercises = catalog.select(options.what)
    print(f"{'exercise':<9} {'mutant':<44} caught by")
    rows = mutant_table.run_mutants(exercises, course, done=lambda row: print(_mutant_line(row), flush=True))
    wrong = sum(bool(row.fault) for row in rows)
    print(f"exercises: {len(exercises)}; mutants: {len(rows)}, caught as declared: {len(rows) - wrong}")
    return 1 if wrong else 0


def _mutant_line(row) -> str:
    line = f"{row.exercise.id:<9} {row.mutant.name:<44} {row.caught_by or '-'}"
    return f"{line}\n    NOT AS DECLARED: {row.fault}" if row.fault else line


@_command
def hint(argv: list[str]) -> int:
    """Show the next hint, or a given one."""
    parser = _parser("hint", "Show the next hint of an exercise; each call goes one further.")
    parser.add_argument("exercise", help="such as 2.3")
    parser.add_argument("which", nargs="?", type=int, help="1, 2 or 3")
    options = parser.parse_args(argv)
    from jfa.course import notebook_api

    try:
        notebook_api.hint(options.exercise, options.which)
    except ValueError as error:
        print(f"jfa hint: {error}", file=sys.stderr)
        return 2
    return 0


@_command
def progress(argv: list[str]) -> int:
    """Return a bar per chapter."""
    _parser("progress", "What is solved, a bar per chapter.").parse_args(argv)
    from jfa.course import notebook_api

    notebook_api.progress()
    return 0


@_command
def reset(argv: list[str]) -> int:
    """Put exercises back to their start."""
    parser = _parser("reset", "Put an exercise (or a chapter) back to its start. A backup is kept in .jfa/backups.")
    parser.add_argument("what", nargs="+", help="exercises (2.3) or chapters (2)")
    options = parser.parse_args(argv)
    from jfa.course import catalog, upkeep

    course, status, done = find_course(), 0, 0
    _recover(course)
    for exercise in catalog.select(options.what):
        try:
            stem = catalog.chapter(exercise.chapter).stem
            path, _, remark = upkeep.reset(course, exercise, stem, lambda *both: _announce(course, *both))
            print(f"{exercise.id} is back at its start in {_relative(path, course)}{remark and '. ' + remark}")
            done += 1
        except _TROUBLE as error:
            status = _complain("reset", error)
    if done:
        print("If the notebook is open: File > Reload Notebook from Disk.")
    return status


def _announce(course: Course, path: Path, saved: Path) -> None:
    print(f"{_relative(path, course)} as it was: {_relative(saved, course)}", flush=True)


def _recover(course: Course) -> None:
    """Finish an update that was killed."""
    from jfa.course import upkeep

    for sentence in upkeep.recover(course):
        print(sentence, flush=True)


@_command
def update(argv: list[str]) -> int:
    """Carry answers into new skeletons."""
    parser = _parser(
        "update", "After a git pull: carry your answers, by tag, into the new exercises. Backups: .jfa/backups."
    )
    parser.add_argument("what", nargs="*", type=int, help="chapters; all if left out")
    parser.add_argument(
        "--pull", action="store_true", help="run git pull first; edited exercises do not stand in its way"
    )
    options = parser.parse_args(argv)
    from jfa.course import catalog, upkeep

    course, status = find_course(), 0
    _recover(course)
    if options.pull:
        print(upkeep.pull(course, lambda *both: _announce(course, *both)))
    for stem in catalog.stems():
        if options.what and int(stem[:2]) not in options.what:
            continue
        try:
            happened, _ = upkeep.update(course, stem, lambda *both: _announce(course, *both))
            status = max(status, 1 if happened == upkeep.CONFLICT else 0)
            print(f"exercises/{stem}: {happened}")
        except _TROUBLE as error:
            status = _complain("update", error)
    return status


@_command
def watch(argv: list[str]) -> int:
    """Check exercises as they are saved, until Ctrl-C."""
    parser = _parser(
        "watch",
        "Check an exercise as soon as its file is saved, by JupyterLab or any editor, and show the next one once it passes.",
    )
    parser.add_argument("what", nargs="*", help="chapters (2) or exercises (2.3); all if left out")
    parser.epilog = "example: chapter 2, beside an editor or JupyterLab\n    jfa watch 2\nCtrl-C ends it"
    options = parser.parse_args(argv)
    _start_nursery()
    from jfa.course import catalog
    from jfa.course import watch as watching

    sys.stdout.reconfigure(errors="backslashreplace") if hasattr(sys.stdout, "reconfigure") else None
    say = lambda text: print(text, flush=True)  # noqa: E731
    watching.run(watching.Watch(find_course(), catalog.select(options.what), say))
    return 0


@_command
def notebook(argv: list[str]) -> int:
    """Write a chapter as a notebook for elsewhere."""
    parser = _parser(
        "notebook",
        "Write a chapter as an .ipynb whose first cell fetches the course and what it needs: for Colab, or any Jupyter.",
    )
    parser.add_argument("chapter", type=int, help="its number, such as 04")
    parser.add_argument("--exercises", action="store_true", help="the chapter's exercises, with your answers so far")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the .ipynb or its folder (default: here)")
    parser.add_argument(
        "--repository", default="", metavar="URL", help="where to clone from (default: this checkout's origin)"
    )
    parser.epilog = (
        "example: chapter 04 on Colab\n    jfa notebook 04 --repository https://github.com/OWNER/REPOSITORY\n"
        "then, on Colab: File > Upload notebook, choose 04_jagged_forward.ipynb, run the cells from the top"
    )
    options = parser.parse_args(argv)
    from jfa.course import anywhere

    kind = "exercises" if options.exercises else "notebooks"
    written = anywhere.write(find_course(), options.chapter, kind, options.to, options.repository)
    print(f"wrote {written.path}")
    if not written.repository:
        print(
            "This checkout has no remote that others can reach: set REPOSITORY in the first cell, or give --repository.",
            file=sys.stderr,
        )
    return 0


@_command
def release(argv: list[str]) -> int:
    """Write a copy of the course for handing out."""
    parser = _parser("release", "For instructors: write the course to DIR, exercises at their start.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    without = "leave out the solutions and the answers quoted in the checks (their references stay: the judge compares with them)"
    parser.add_argument("--without-solutions", action="store_true", help=without)
    options = parser.parse_args(argv)
    from jfa.course import release as releasing

    written = releasing.release(find_course(), options.folder, with_solutions=not options.without_solutions)
    kind = "without solutions" if options.without_solutions else "with solutions"
    print(f"{len(written)} files written to {options.folder}, {kind}")
    return 0


@_command
def strip(argv: list[str]) -> int:
    """Make exercises/ from solutions/."""
    parser = _parser(
        "strip", "For authors: make exercises/NN_topic.py from solutions/NN_topic.py. Backups: .jfa/backups."
    )
    parser.add_argument("what", nargs="*", type=int, help="chapters; all if left out")
    parser.add_argument("--to", type=Path, metavar="DIR", help="another folder than exercises/")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if exercises/ is not what solutions/ gives"
    )
    options = parser.parse_args(argv)
    course = find_course()
    course.require_solutions()
    if options.check:
        return _check_stripped(course)
    from jfa.course import upkeep

    _recover(course)
    for path in upkeep.make_exercises(
        course, options.to, set(options.what) or None, lambda *both: _announce(course, *both)
    ):
        print(f"wrote {path}")
    return 0


def _check_stripped(course: Course) -> int:
    from jfa.course import notebook, upkeep

    stale = []
    for path in sorted(course.solutions.glob("[0-9][0-9]_*.py")):
        there = course.exercises / path.name
        if not there.exists() or notebook.read_bytes(there) != upkeep.stripped(path).text.encode():
            stale.append(path.stem)
    print(
        f"not what solutions/ gives: {', '.join(stale)}; run jfa strip"
        if stale
        else "exercises/ is what solutions/ gives"
    )
    return 1 if stale else 0


def _relative(path: Path, course: Course) -> Path:
    return path.relative_to(course.root) if path.is_relative_to(course.root) else path
