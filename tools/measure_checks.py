"""Print how long check() takes in a notebook: the solution of every exercise, judged as a learner's answer is.

    python tools/measure_checks.py 0 1 2
    python tools/measure_checks.py --seconds 120      all chapters, two minutes for each

Beside the seconds that pass stand those that were computed, by this process and the answer's: on a busy machine only they compare.
A benchmark, not a test: it prints, and nothing fails for being slow. Exercises that no time is left for are named.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPEATS = 5


def measured(exercise: Any, until: float) -> Iterator[tuple[float, float]]:
    """Yield (seconds that passed, seconds of CPU) of check(); the function is alive here as in a kernel."""
    from jfa.course import catalog, check
    from jfa.course.answers import Pristine
    from jfa.course.mutants import without_course_calls
    from jfa.course.paths import Course
    from jfa.course.sources import compile_visible

    course = Course(Path(__file__).resolve().parent.parent)
    pristine = Pristine.load(course, catalog.chapter(exercise.chapter).stem)
    cells = [without_course_calls(source) for source in pristine.given(exercise)]
    module = types.ModuleType("solution")
    for number, cell in enumerate([*cells, pristine.solution(exercise)]):
        exec(compile_visible(cell, f"<cell {exercise.id} {number}>"), vars(module))
    for number in range(REPEATS):
        if number and time.monotonic() > until:
            return
        start, computed = time.perf_counter(), _computed()
        with contextlib.redirect_stdout(io.StringIO()):
            result = check(exercise.id, vars(module)[exercise.name])
        yield time.perf_counter() - start, _computed() - computed
        if not result.passed:
            raise SystemExit(result.text())


def _computed() -> float:
    """Return seconds of CPU of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def main() -> None:
    """Print the table; progress is kept in a folder that is thrown away."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="chapters (2) or exercises (2.3); all if left out")
    parser.add_argument("--seconds", type=float, default=600, help="for each chapter (default 600)")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        for name in ("exercises", "solutions", "jfa"):
            (Path(folder) / name).symlink_to(root / name)
        os.environ["JFA_COURSE"] = folder
        from jfa.course import catalog

        chosen = itertools.groupby(catalog.select(options.what), key=lambda exercise: exercise.chapter)
        for chapter, exercises in chosen:
            measure_chapter(chapter, list(exercises), time.monotonic() + options.seconds)


def measure_chapter(chapter: int, exercises: list[Any], until: float) -> None:
    """Print a row per exercise of a chapter and the chapter's medians."""
    walls, computed = {}, {}
    for exercise in exercises:
        if time.monotonic() > until:
            print(f"check({exercise.id}): no time left", flush=True)
            continue
        walls[exercise.id], computed[exercise.id] = map(statistics.median, zip(*measured(exercise, until)))
        print(f"check({exercise.id})  {walls[exercise.id]:7.3f} s, {computed[exercise.id]:7.3f} s computed", flush=True)
    print(
        f"chapter {chapter:02d}, {len(walls)} of {len(exercises)} exercises: median {statistics.median(walls.values()):.3f} s, "
        f"{statistics.median(computed.values()):.3f} s computed; longest {max(walls.values()):.3f} s, "
        f"{max(computed.values()):.3f} s computed",
        flush=True,
    )


if __name__ == "__main__":
    main()
