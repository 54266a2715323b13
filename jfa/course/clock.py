"""Model the time of an answer's kernels: how many cycles a B200 would take, and what took longest.

The judge runs an answer once more under the emulator's policy "timed" with the rates of :data:`jfa.emulator.rates.B200`.
The number is modelled, not measured, and deterministic: the same source and inputs take the same number of cycles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

MEASURE = "cycles"


class Clock:
    """The launches while the clock ran: ``cycles`` (None if unknown) and ``sentence``, which names what took the
    cycles."""

    def __init__(self, chip: Any):
        self.chip = chip
        self.runs: list[Any] = []

    @property
    def cycles(self) -> int | None:
        """Modelled cycles of all launches, one after another; None if none was launched, or one under a policy of its own."""
        if not self.runs or not all(map(self._saw, self.runs)):
            return None
        return math.ceil(sum(run.time for run in self.runs))

    def _saw(self, run: Any) -> bool:
        return run.options.policy == "timed" and run.options.rates is self.chip

    @property
    def sentence(self) -> str:
        """The busiest unit and the longest wait; or why there are no cycles."""
        if not self.runs:
            return "no kernel was launched"
        if self.cycles is None:
            return "a kernel was launched with options of its own, so the judge's clock did not see it"
        return "; ".join(filter(None, (_launches(len(self.runs)), _busiest(self.runs), _longest_wait(self.runs))))


def _launches(count: int) -> str:
    return f"{count} launches, one after another" if count > 1 else ""


def _timelines(runs: list[Any]) -> Iterator[Any]:
    from jfa.emulator.timeline import Timeline

    return (Timeline.of(run) for run in runs if run.events)


def _busiest(runs: list[Any]) -> str:
    """Return the unit of one SM that was occupied the longest."""
    units: dict[str, float] = {}
    for line in _timelines(runs):
        for name in {name for _, name in line.occupied}:
            units[name] = units.get(name, 0.0) + line.busy(name) * line.cycles
    if not units:
        return ""
    name = max(units, key=units.get)
    return f"the busiest unit is {name} with {units[name]:,.0f} cycles"


def _longest_wait(runs: list[Any]) -> str:
    """Return the barriers that one warp role waited for the longest, all its waits together; an array of barriers is one."""
    waits: dict[tuple[str, str], float] = {}
    for line in _timelines(runs):
        for (track, barrier), cycles in line.waits().items():
            key = track, barrier.partition("[")[0]
            waits[key] = waits.get(key, 0.0) + cycles
    if not waits:
        return "it never waits"
    (track, barrier), cycles = max(waits.items(), key=lambda item: item[1])
    return f"the longest wait is {track}'s for {barrier}, {cycles:,.0f} cycles in all"


@contextlib.contextmanager
def on_the_clock() -> Iterator[Clock]:
    """Run launches inside under policy "timed" with a B200's rates; the clock is complete when the context ends."""
    from jfa import emulator
    from jfa.emulator.frontend.hooks import Last
    from jfa.emulator.rates import B200

    clock = Clock(B200)
    outer, Last.runs = Last.runs, clock.runs
    try:
        with emulator.options(policy="timed", rates=B200, trace=True):
            yield clock
    finally:
        Last.runs = outer
