"""Judge the answers kept here and print each verdict with its message."""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jfa.course import catalog, nursery_client
from jfa.course.answers import Pristine
from jfa.course.paths import Course, find_course

from . import chapters, graded, load


def main() -> int:
    """Return 1 if a wrong answer passes or a right one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="chapters (9) or exercises (9.2); all if left out")
    parser.add_argument("--name", default="", help="only answers whose name contains this")
    parser.add_argument("--jsonl", type=Path, help="write the answers' whole cells here instead of judging them")
    options = parser.parse_args()
    course = Course(find_course().root)
    attempts = [a for c in chapters() for a in load(c)]
    if options.what:
        attempts = [a for a in attempts if {a.exercise, a.exercise.split(".")[0]} & set(options.what)]
    attempts = [a for a in attempts if options.name in a.name]
    pristine = {
        c: Pristine.load(course, catalog.chapter(c).stem) for c in {int(a.exercise.split(".")[0]) for a in attempts}
    }

    def of(attempt):
        return pristine[int(attempt.exercise.split(".")[0])]

    if options.jsonl:
        lines = [
            {"exercise": a.exercise, "kind": "right" if a.right else "wrong", "name": a.name}
            | {"code": a.cell(of(a).solution(catalog.exercise(a.exercise)))}
            for a in attempts
        ]
        options.jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 0

    def run(attempt):
        try:
            attempt.cell(of(attempt).solution(catalog.exercise(attempt.exercise)))
        except ValueError as error:
            return error, 0
        start = time.monotonic()
        return graded(attempt, course, of(attempt)), time.monotonic() - start

    odd = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for attempt, (result, seconds) in zip(attempts, pool.map(run, attempts)):
            if isinstance(result, ValueError):
                odd.append(f"BAD {result}")
                continue
            as_it_must = result.passed == attempt.right
            failed = result.failed.name if result.failed else ""
            print(
                f"{'ok ' if as_it_must else 'ODD'} {attempt.exercise} {attempt.name}: {result.state} {failed} ({seconds:.1f} s)"
            )
            if not result.passed:
                known = f" [{result.recognised}]" if result.recognised else ""
                print(f"      {result.failed.case if result.failed else ''}: {result.message}{known}")
            odd += [] if as_it_must else [f"{attempt.exercise} {attempt.name}"]
            sys.stdout.flush()
    print(f"{len(attempts)} answers, {len(odd)} verdicts not as expected", *odd, sep="\n  ")
    nursery_client.close_nursery()
    return int(bool(odd))


if __name__ == "__main__":
    sys.exit(main())
