"""Print how long a learner waits: set-up, later starts, a check(), grading two chapters.

    python tools/measure_course.py            # in a checkout that is set up
    python tools/measure_course.py --first    # also a first set-up, in an empty clone (downloads everything again)

A benchmark, not a test: it prints, and nothing fails for being slow.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ("1", "2")
REPEATS = 3


def seconds_until_lab_answers(checkout: Path) -> float:
    """Time from typing `make lab` until JupyterLab serves its page; it is stopped then."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = ["make", "lab", f"LAB=--no-browser --port={port} --IdentityProvider.token=t"]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=checkout, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/lab?token=t", timeout=5).read()
                return time.perf_counter() - started
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"make lab ended with status {process.returncode}; run it to see why")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def seconds_of_first_lab() -> float:
    """Time the same in an empty clone, with an empty pip cache: the first `make lab` ever."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jfa"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        return seconds_until_lab_answers(clone)


def seconds_of_grading() -> float:
    """Return `jfa grade 1 2 --solutions`."""
    started = time.perf_counter()
    command = [str(ROOT / ".venv/bin/jfa"), "grade", *CHAPTERS, "--solutions"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", action="store_true", help="also a first set-up")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    if args.first:
        print(f"first make lab, until the page is served   {seconds_of_first_lab():6.1f} s")
    later = [seconds_until_lab_answers(ROOT) for _ in range(REPEATS)]
    print(f"later make lab, median of {REPEATS}                {statistics.median(later):6.1f} s")
    print(f"jfa grade {' '.join(CHAPTERS)} --solutions                 {seconds_of_grading():6.1f} s")


if __name__ == "__main__":
    main()
