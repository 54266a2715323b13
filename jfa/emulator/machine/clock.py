"""Modelled time (policy "timed"): durations of operations, queues at resources, and the timeline's events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..locations import Where
    from .machine import Machine
    from .tasks import CTA, Task

# Block operations of one warp group that go register by register. In a chain of them the next starts on the first registers
# while the last ones are still under way, so units work at the same time: a chain takes as long as its busiest unit. Anything
# else (a reduction, a load, a barrier) needs the whole block and ends the chain.
_ELEMENTWISE = ("alu", "mufu", "cvt", "int")

Event = tuple[tuple[int, ...], str, str, float, float, dict[str, Any]]
"""(program id, track, name, start, end, facts)."""


class Clock:
    """Modelled time of one launch, in cycles. `time`: the latest end of any operation so far."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.rates, self.trace, self.cold = machine.options.rates, machine.options.trace, machine.options.cold
        self.time = 0.0
        self.events: list[Event] = []
        self.occupied: dict[tuple[tuple[int, ...], str], list[tuple[float, float]]] = {}  # [(begin, end)], traced
        self.touched: set[tuple] = set()  # boxes that TMA loads have fetched, kept with options.cold

    def first_touch(self, place: tuple) -> bool:
        """Return whether a launch with `cold` memory fetches this box for the first time."""
        if not self.cold or place in self.touched:
            return False
        self.touched.add(place)
        return True

    def charge(self, task: Task, op: str, **facts: Any) -> None:
        """Let a synchronous operation of the running task take the time that rates.demand(op, **facts) says."""
        self.machine.scheduler.let_earlier_run(task)
        elementwise = facts.get("kind") in _ELEMENTWISE
        if task.time != task.chain_end:
            task.chain = task.time
        start, end = self.book(task.cta, task.chain if elementwise else task.time, op, facts)
        if end > start:
            title = facts.pop("kind", op)
            self.emit(task.cta, task.name, title, start, end, kind="compute", **facts)
            task.time = max(task.time, end)
        if elementwise:
            task.chain_end = task.time

    def spend(self, task: Task, op: str, title: str, where: Where, **facts: Any) -> None:
        """Charge a task, with a title and a source line for the timeline."""
        self.machine.scheduler.let_earlier_run(task)
        start, end = self.book(task.cta, task.time, op, facts)
        if end > start:
            self.emit(task.cta, task.name, title, start, end, kind="compute", where=where, **facts)
            task.time = end

    def book(self, cta: CTA, time: float, op: str | None, facts: dict[str, Any]) -> tuple[float, float]:
        """Reserve the CTA's resources for an operation that could start at `time`; returns its start and end."""
        if self.rates is None or op is None:
            return time, time + 1
        demand = self.rates.demand(op, **facts)
        start, end = time, time
        free = cta.free
        for resource, cycles in demand.needs.items():
            begin = max(time, free.get(resource, 0.0))
            free[resource] = begin + cycles
            if self.trace:
                self.occupied.setdefault((cta.pid, resource), []).append((begin, begin + cycles))
            end = max(end, begin + cycles)
            start = max(start, begin)
        return min(start, end), end + demand.latency

    def emit(self, cta: CTA, track: str, name: str, start: float, end: float, where: Where = (), **args: Any) -> None:
        """Keep an event for the timeline."""
        if self.trace:
            if where:
                args["src"] = f"{where[0][0]}:{where[0][1]}"
            if len(cta.cluster.ctas) > 1 and ("signals" in args or "barrier" in args):
                args["cluster"] = cta.cluster.ctas[0].pid  # barriers of one name exist once per cluster and rank
            self.events.append((cta.pid, track, name, start, end, args))
