"""Inject faults: break each synchronization of a kernel in turn and see whether, and how, the emulator finds it::

    from jfa.emulator import sweep
    result = sweep.sweep(lambda: [my_matmul(a, b)])
    print(result.table())
    result.clean          # mutants that nothing found: for a human to judge

If all mutants of a kernel are found, the emulator knows of no superfluous synchronization. A clean mutant means that
the synchronization is superfluous, or that the kernel's tests do not cover it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import errors
from .locations import source

FAULTS = {
    "barrier_wait": ("drop", "flip", "late"),
    "barrier_arrive": ("drop",),
    "barrier_expect_bytes": ("drop", "half"),
    "named_barrier_wait": ("drop",),
    "named_barrier_arrive": ("drop",),
    "cluster_barrier": ("drop",),
    "tcgen05_commit": ("drop",),
    "async_dot": ("nobar",),
    "async_dot_scaled": ("nobar",),
    "async_dot_wait": ("drop",),
    "async_descriptor_store_wait": ("drop",),
    "async_load_wait_group": ("drop",),
    "fence": ("drop", "early"),
}
"""What can be broken at a site: drop it, wait for the other phase (flip), wait one operation too late (late), announce
half the bytes (half), leave out an MMA's barriers (nobar), fence before the store that the fence is for (early)."""

SCHEDULES = (
    dict(policy="eager"),
    dict(policy="lazy", seed=1),
    dict(policy="random", seed=1),
    dict(policy="random", seed=2),
)
"""Tried in this order until one of them finds the mutant."""


@dataclass(frozen=True)
class Site:
    """A synchronization in the source: its kind and place; `count`: its executions in the run without faults."""

    kind: str
    file: str
    line: int
    count: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        return source((self.file, self.line))

    def hit(self, kind, where) -> bool:
        return kind == self.kind and bool(where) and where[0] == (self.file, self.line)


@dataclass
class Mutant:
    """One site broken in one way.

    found: the error's class name, "wrong result", "warning" for one that the whole kernel does not give, "" if every
    schedule ran clean.
    """

    site: Site
    how: str
    found: str = ""
    schedule: str = ""
    report: str = ""

    def __str__(self):
        place = f"{os.path.basename(self.site.file)}:{self.site.line}"
        return f"{self.how:5} {self.site.kind:28} {place:<24} {self.found or 'CLEAN':18} {self.site.text[:70]}"


@dataclass
class Result:
    """The mutants of a sweep that were tried, and those for which the time did not suffice."""

    mutants: list[Mutant]
    untried: list[Mutant] = field(default_factory=list)

    @property
    def found(self) -> list[Mutant]:
        return [m for m in self.mutants if m.found]

    @property
    def clean(self) -> list[Mutant]:
        return [m for m in self.mutants if not m.found]

    def table(self) -> str:
        """Return counts by kind, fault and finding, then the clean mutants line by line."""
        counts = Counter((m.site.kind, m.how, m.found or "CLEAN") for m in self.mutants)
        lines = [f"{len(self.mutants)} mutants, {len(self.found)} found"]
        lines += [f"  {kind:28} {how:5} {found:18} {n:4}" for (kind, how, found), n in sorted(counts.items())]
        if self.clean:
            lines += ["not found:", *("  " + str(m) for m in self.clean)]
        if self.untried:
            lines.append(f"not tried, for lack of time: {len(self.untried)}")
        return "\n".join(lines)


def _run(launch, **options):
    """Return (outputs, warnings) of a launch, which may be of several kernels, under options, quietly."""
    from . import options as emulator_options
    from .frontend.hooks import Last

    Last.runs = runs = []
    try:
        with emulator_options(report="raise", **options), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = launch()
    finally:
        Last.runs = None
    found = {(w.kind, w.where[:1]): w for run in runs for w in run.warnings}
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [t for t in outputs if t is None or hasattr(type(t), "clone")], found  # a launch itself returns a kernel


def sites(launch: Callable, kernel: str = "") -> list[Site]:
    """Return the synchronization sites that a launch executes, in order of first execution; those of one kernel, if it is named."""
    seen: Counter = Counter()

    def record(kind, name, task, where):
        if kind in FAULTS and where and kernel in ("", task.machine.kernel):
            seen[(kind, *where[0])] += 1

    _run(launch, fault=record)
    return [Site(kind, file, line, count) for (kind, file, line), count in seen.items()]


def mutants_of(found: Sequence[Site]) -> list[Mutant]:
    """Return every way to break every site."""
    return [Mutant(site, how) for site in found for how in FAULTS[site.kind]]


def _same(outputs, expected, tolerance) -> bool:
    for got, want in zip(outputs, expected):
        got, want = got.double(), want.double()
        if got.shape != want.shape or not bool(((got - want).abs() <= tolerance).all()):  # NaN compares false
            return False
    return True


def judge(
    mutant: Mutant, launch: Callable, expected, known=(), schedules=SCHEDULES, tolerance=2e-2, kernel: str = ""
) -> Mutant:
    """Run the mutant under each schedule until one finds it; fills in found, schedule and report.

    known: warnings of the whole kernel. kernel: break it in the kernel of that name only.
    """

    def fault(kind, name, task, where):
        return mutant.how if mutant.site.hit(kind, where) and kernel in ("", task.machine.kernel) else None

    for schedule in schedules:
        try:
            outputs, warned = _run(launch, fault=fault, **schedule)
        except errors.EmulatorError as error:
            return _note(mutant, type(error).__name__, schedule, str(error))
        if not _same(outputs, expected, tolerance):
            return _note(mutant, "wrong result", schedule, "")
        fresh = [w for key, w in warned.items() if key not in known]
        if fresh:
            missing = isinstance(fresh[0], errors.MissingFenceError)
            return _note(mutant, "MissingFenceError" if missing else "warning", schedule, str(fresh[0]))
    return mutant


def _note(mutant, found, schedule, report):
    mutant.found, mutant.report = found, report
    mutant.schedule = " ".join(str(v) for v in schedule.values())
    return mutant


def sweep(
    launch: Callable,
    schedules=SCHEDULES,
    tolerance=2e-2,
    select: Callable | None = None,
    progress=None,
    kernel: str = "",
    seconds: float | None = None,
) -> Result:
    """Break every synchronization that `launch()` executes and judge each mutant.

    launch: launches the kernel and returns its output tensors; must give the same result each time.
    select: keeps the mutants for which select(mutant) is true. progress: called with each judged mutant.
    kernel: of several kernels that are launched the one to break. seconds: begin no mutant after so long; the rest is `untried`.
    """
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    expected, warned = _run(launch)
    expected, known = [t.clone() for t in expected], set(warned)
    chosen = [m for m in mutants_of(sites(launch, kernel)) if select is None or select(m)]
    for index, mutant in enumerate(chosen):
        if time.monotonic() > end:
            return Result(chosen[:index], chosen[index:])
        judge(mutant, launch, expected, known, schedules, tolerance, kernel)
        if progress is not None:
            progress(mutant)
    return Result(chosen)
