"""Print how long check() takes in a notebook: the solution of every exercise, judged as a learner's answer is.

    python tools/measure_checks.py 0 1 2

A benchmark, not a test: it prints, and nothing fails for being slow.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
import types
from pathlib import Path

REPEATS = 5


def seconds_of_checks(words: list[str]) -> dict[str, float]:
    """Return median seconds of check() by exercise, the function being alive in this process as in a notebook's kernel."""
    from jfa.course import catalog, check
    from jfa.course.answers import Pristine
    from jfa.course.mutants import without_course_calls
    from jfa.course.paths import Course
    from jfa.course.sources import compile_visible

    course = Course(Path(__file__).resolve().parent.parent)
    medians = {}
    for exercise in catalog.select(words):
        pristine = Pristine.load(course, catalog.chapter(exercise.chapter).stem)
        cells = [without_course_calls(source) for source in pristine.given(exercise)]
        module = types.ModuleType("solution")
        for number, cell in enumerate([*cells, pristine.solution(exercise)]):
            exec(compile_visible(cell, f"<cell {exercise.id} {number}>"), vars(module))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                result = check(exercise.id, vars(module)[exercise.name])
            times.append(time.perf_counter() - start)
            if not result.passed:
                raise SystemExit(result.text())
        medians[exercise.id] = statistics.median(times)
    return medians


def main() -> None:
    """Print the table; progress is kept in a folder that is thrown away."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="chapters (2) or exercises (2.3); all if left out")
    words = parser.parse_args().what
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        for name in ("exercises", "solutions", "jfa"):
            (Path(folder) / name).symlink_to(root / name)
        os.environ["JFA_COURSE"] = folder
        medians = seconds_of_checks(words)
    for number, seconds in medians.items():
        print(f"check({number})  {seconds:6.3f} s")
    values = medians.values()
    print(f"median of {len(medians)} exercises  {statistics.median(values):.3f} s, longest {max(values):.3f} s")


if __name__ == "__main__":
    main()
