"""jfa verify: is everything right and fast on the GPU that is here? One command, one file worth sending.

    jfa verify                                        everything, at most 14 minutes; the same command continues
    jfa verify --minutes 4                            a sample: simple calls, most checks, all times, some random problems
    jfa verify --list                                 what would run
    jfa verify --again --only 'random:hopper:40'      one job once more
    jfa verify --show FILE.json                       the summary of a file, which needs no GPU

Each check compares with fp64 or with the same call made differently; a kernel that hangs or crashes ends its own process only.
Times are medians of device time; the ratios of a shape come from one process. The file holds the GPU, driver, versions and date,
every outcome, the times, and the comparison with what was predicted; it does not name you or your machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MINUTES = 14.0
TIMES_MINUTES = 6.0  # what the times may take: the checks before them leave as much
PROCESSES = 15
INCOMPLETE = 3  # exit status: nothing failed so far, but not everything was run


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="jfa verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="the result file (default: jfa-verify-GPU.json, here)")
    p.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"minutes after which no job begins (default {MINUTES:g})"
    )
    p.add_argument(
        "--only", nargs="+", metavar="JOB", help="jobs KIND:BACKEND:ITEM; shell patterns and 'op' for 'op:*'"
    )
    p.add_argument("--again", action="store_true", help="run failed jobs, or those of --only, once more")
    p.add_argument("--fresh", action="store_true", help="begin the file again")
    p.add_argument("--shapes", nargs="+", metavar="NAME", help="what to time (default: the ten named shapes)")
    p.add_argument("--peers", nargs="*", metavar="NAME", help="what to time beside ours (default: fa2 fa4 cudnn)")
    p.add_argument("--backends", nargs="+", metavar="NAME", help="what to check (default: all that run on this GPU)")
    p.add_argument("--predictions", type=Path, metavar="FILE", help="default: those that came with jfa")
    p.add_argument("--processes", type=int, help="jobs side by side (default: one per core, 15 at most)")
    p.add_argument("--list", action="store_true", help="name the jobs and end")
    p.add_argument("--show", type=Path, metavar="FILE", help="print the summary of a result file and end")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print what matters. 0: all right; 1: something failed; 2: cannot run; 3: right so far, not complete."""
    args = parser().parse_args(argv)
    os.environ.setdefault("TRITON_CACHE_DIR", str(state_folder() / "cache" / "triton"))
    from jfa.verify.record import Record

    if args.show:
        try:
            print(Record.read(args.show).summary())
        except (OSError, ValueError) as error:
            return _refuse(str(error))
        return 0
    if not args.list and (why := no_gpu()):
        return _refuse(why)
    try:
        return Session(args).run()
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        if _is_expected(error):
            return _refuse(str(error.args[0] if isinstance(error, KeyError) else error))
        raise


def _is_expected(error: Exception) -> bool:
    """Return whether an error is a sentence for the user."""
    from jfa.verify.pool import NoChild
    from jfa.verify.record import AnotherMachine

    return isinstance(error, Mistake | NoChild | AnotherMachine | OSError)


class Mistake(ValueError):
    """Raised for a command-line argument that names nothing."""


def _refuse(sentence: str) -> int:
    print(f"jfa verify: {sentence}", file=sys.stderr)
    return 2


def state_folder() -> Path:
    """Return where caches and the log go: the ignored state folder, never the home folder."""
    return Path(os.environ.get("JFA_STATE", Path.cwd() / ".jfa"))


def no_gpu() -> str | None:
    """Return why nothing can be verified here, in a sentence; None where a GPU answers."""
    import torch

    without = "Without a GPU, `make test` and `jfa emulator sweep` check the kernels on the emulator."
    if torch.version.cuda is None:
        return f"needs an NVIDIA GPU, and PyTorch {torch.__version__} is a build without CUDA. {without}"
    if not torch.cuda.is_available():
        return f"needs an NVIDIA GPU, and PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds none. {without}"
    return None


class Session:
    """One call of `jfa verify`."""

    def __init__(self, args: argparse.Namespace, device: str = "cuda", runner: str | None = None):
        from jfa.verify import record, suite

        self.args, self.device, self.runner = args, device, runner or suite.RUNNER
        self.start = time.time()
        here = device if device != "cuda" or _has_gpu() else "cpu"  # --list works without a GPU
        self.facts, self.offered = record.environment(here), suite.offered(here)
        self.predictions = _read_predictions(args.predictions)
        mine = [p for p in self.predictions if p.is_for(self.facts["device"])]
        self.backends = self._backends()
        self.stages = suite.stages(self.backends, self._shapes(), self._peers(), mine, device)

    # ----------------------------------------------------------------------------------------------------- the arguments

    def _backends(self) -> list[str]:
        from jfa.verify import suite

        wanted = self.args.backends or list(suite.BACKENDS)
        for name in wanted:
            if name not in self.offered:
                raise Mistake(f"no backend {name!r}; known are {', '.join(self.offered)}")
        found = [name for name in wanted if self.offered[name] is None]
        if not found:
            raise Mistake("; ".join(self.offered[name] or "" for name in wanted))
        return found

    def _shapes(self) -> list[str]:
        from jfa.bench import shapes

        known = shapes.SHAPES | {shape.name: shape for shape in shapes.ON_CPU}
        return _known(self.args.shapes or list(shapes.DEFAULT), known, "shape")

    def _peers(self) -> list[str]:
        from jfa.bench import peers
        from jfa.verify import suite

        return _known(list(suite.PEERS) if self.args.peers is None else self.args.peers, peers.PEERS, "peer")

    def chosen(self) -> list:
        """Return the stages with only the jobs asked for. Raises Mistake where a pattern matches none."""
        from dataclasses import replace

        if not self.args.only:
            return self.stages
        patterns = [p if ":" in p else f"{p}:*" for p in self.args.only]
        keys = [job.key for stage in self.stages for job in stage.jobs]
        for pattern in patterns:
            if not fnmatch.filter(keys, pattern):
                raise Mistake(f"no job matches {pattern!r}; `jfa verify --list` names them")
        matches = lambda job: any(fnmatch.fnmatch(job.key, p) for p in patterns)
        return [replace(stage, jobs=tuple(job for job in stage.jobs if matches(job))) for stage in self.stages]

    # ----------------------------------------------------------------------------------------------------------- running

    def run(self) -> int:
        """Run what is left of the suite; the exit status."""
        from jfa.verify.record import Record

        stages = self.chosen()
        if self.args.list:
            print_list(stages)
            return 0
        name = self.facts["device"].lower().replace(" ", "-")
        path = self.args.out or Path(f"jfa-verify-{name}.json")
        try:
            self.record = Record.open(path, self.facts, self.args.fresh)
        except ValueError as error:
            hint = "--fresh begins the file again, --out names another"
            raise Mistake(f"{path} cannot be continued: {error}. {hint}") from None
        self._forget(stages)
        self.record.content["backends"] = self.offered
        self.processes = self.args.processes or min(PROCESSES, os.cpu_count() or 1)
        self.record.begin(minutes=self.args.minutes, processes=self.processes)
        self._greet(path)
        try:
            for stage in stages:
                self._stage(stage)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues")
        finally:
            planned = [job for stage in self.stages for job in stage.jobs]
            self.record.finish(planned, self.predictions, time.time() - self.start)
        print(f"\n{self.record.summary()}\n\nwritten: {path}, a file worth sending")
        return 1 if self.record.failures else INCOMPLETE if self.record.content["not_run"] else 0

    def _forget(self, stages: list) -> None:
        """Drop the outcomes that --again repeats."""
        if not self.args.again:
            return
        failed = {key for key, _ in self.record.failures}
        for stage in stages:
            for job in stage.jobs:
                if self.args.only or job.key in failed:
                    self.record.forget(job.key)

    def _greet(self, path: Path) -> None:
        env = self.facts
        known = ", ".join(f"{key} {env[key]}" for key in ("driver", "torch", "triton", "jfa") if key in env)
        print(f"{env['device']}, {known}")
        print(f"backends: {', '.join(self.backends)}; {self.processes} jobs side by side; results: {path}")
        for sentence in filter(None, self.offered.values()):
            print(f"  not here: {sentence}")
        done = len(self.record.content["outcomes"])
        if done:
            print(f"continuing: {done} jobs are done")
        print(f"at most {self.args.minutes:g} minutes; Ctrl-C stops, the same command continues", flush=True)

    def _stage(self, stage) -> None:
        from jfa.verify.pool import LEFT_OUT, Outcome, Pool
        from jfa.verify.suite import without

        todo = [job for job in stage.jobs if not self.record.has(job)]
        hopeless, failed = self._hopeless(), {key for key, _ in self.record.failures}
        for job in [job for job in todo if job.backend in hopeless]:
            self.record.note(job, Outcome(LEFT_OUT, message="not even the simplest calls are right on this backend"))
        todo = [without(job, hopeless, failed) for job in todo if job.backend not in hopeless]
        if not todo:
            return
        progress = Progress(stage.name, len(todo), self.start, self.record)
        log = state_folder() / "verify.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with Pool(self.runner, 1 if stage.alone else self.processes, log, progress.note, progress.tick) as pool:
            left = pool.run(todo, self._deadline(stage))
        progress.end(len(left))

    def _deadline(self, stage) -> float:
        """Return when nothing more of a stage is begun: what comes before the times leaves room for these."""
        from jfa.verify.suite import TIMES

        end = self.start + 60 * self.args.minutes
        names = [s.name for s in self.stages]
        before_times = names.index(stage.name) < names.index(TIMES)
        return end - 60 * min(TIMES_MINUTES, self.args.minutes / 2) if before_times else end

    def _hopeless(self) -> set[str]:
        """Return the backends of which every one of the simplest calls failed."""
        from jfa.verify.pool import BAD

        states: dict[str, Counter] = {}
        for key, outcome in self.record.content["outcomes"].items():
            kind, backend, _ = key.split(":", 2)
            if kind == "first":
                states.setdefault(backend, Counter())["bad" if outcome["state"] in BAD else "good"] += 1
        return {backend for backend, count in states.items() if count["bad"] > 1 and not count["good"]}


class Progress:
    """Print a stage's progress: each failure at once, and the state every few seconds."""

    EVERY = 5.0

    def __init__(self, name: str, total: int, start: float, record):
        self.name, self.total, self.start, self.record = name, total, start, record
        self.count: Counter = Counter()
        self.said = time.time()

    def note(self, job, outcome) -> None:
        """Record and count an outcome; print it if it is bad, or if it is a time."""
        self.record.note(job, outcome)
        self.count["done"] += 1
        self.count["failed"] += outcome.bad
        if outcome.bad:
            first = "FIRST FAILURE" if len(self.record.failures) == 1 else "FAILED"
            print(f"{self._clock()} {first} {job.key}, {outcome.state}: {outcome.message}", flush=True)
        elif job.kind == "time":
            from jfa.bench import cli, runner

            for timing in outcome.value:
                print(f"{self._clock()} {cli.line(runner.Timing(**timing))}", flush=True)

    def tick(self) -> None:
        """Say how far it is."""
        if time.time() - self.said > self.EVERY:
            self.said = time.time()
            print(f"{self._clock()} {self.name}: {self._words()}", flush=True)

    def end(self, left: int) -> None:
        """Say how it ended."""
        late = f"; {left} not begun, for lack of time" if left else ""
        print(f"{self._clock()} {self.name}: {self._words()}{late}", flush=True)

    def _words(self) -> str:
        return f"{self.count['done']} of {self.total} done, {self.count['failed']} failed"

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.time() - self.start), 60)
        return f"[{minutes:2}:{seconds:02}]"


def print_list(stages: Sequence) -> None:
    """Name every job, stage by stage, with what its kind shows."""
    from jfa.verify.suite import CHECKS

    for stage in stages:
        print(f"{stage.name}: {len(stage.jobs)} jobs{', one after the other' if stage.alone else ''}")
        kinds = list(dict.fromkeys((job.kind, job.backend) for job in stage.jobs))
        for kind, backend in kinds:
            items = [str(job.item) for job in stage.jobs if (job.kind, job.backend) == (kind, backend)]
            shown = ", ".join(items) if len(items) <= 12 else f"{items[0]}, {items[1]} ... {items[-1]}"
            print(f"  {kind}:{backend}:  {shown}    {CHECKS[kind].help if kind in CHECKS else ''}".rstrip())


def _known(names: list[str], known: dict, what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise Mistake(f"no {what} {name!r}; known are {', '.join(known)}")
    return names


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _read_predictions(path: Path | None) -> list:
    from jfa.verify import predictions

    try:
        return predictions.read(path)
    except (OSError, ValueError, TypeError) as error:
        raise Mistake(f"the predictions cannot be read: {error}") from None
