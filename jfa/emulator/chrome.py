"""A timeline as Chrome trace events, for Perfetto and chrome://tracing.

Viewers do not check the format's rules, so they are kept here: slices of one thread are nested or disjoint, both ends
of a flow lie inside slices and the second is not earlier than the first, and a counter is a list of (time, value). One
microsecond stands for one modelled cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timeline import Event, Timeline

SHORTEST = 0.01  # cycles: an event without length is drawn with this one, and flows bind so far inside their slices


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return all trace events: slices, flows from an arrival to the wait it ends, unit counters, names."""
    processes = {cta: n for n, cta in enumerate(timeline.ctas())}
    lanes = _lanes(timeline.events)
    threads = {lane: n for n, lane in enumerate(dict.fromkeys(lanes))}
    out = []
    places = {}
    for event, lane in zip(timeline.events, lanes):
        place = {"pid": processes[event.cta], "tid": threads[lane]}
        places[id(event)] = place
        length = max(event.end - event.start, SHORTEST)
        out.append({"ph": "X", "name": event.name, "cat": event.kind, **place, "ts": event.start, "dur": length})
        out[-1]["args"] = {k: _plain(v) for k, v in event.args.items()}
    for number, (source, waiting) in enumerate(timeline.signals()):
        out += _flow(number, source, waiting, places)
    for (cta, unit), spans in timeline.occupied.items():
        if cta in processes:
            out += _counter(f"{unit} occupied", processes[cta], spans)
    for cta, number in processes.items():
        words = ",".join(map(str, cta)) if isinstance(cta, tuple) else str(cta)
        out.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"CTA {words}"}})
    for (cta, track, row), number in threads.items():
        name = track if row == 0 else f"{track} ({row + 1})"
        place = {"pid": processes[cta], "tid": number}
        out.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        out.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
    return out


def _lanes(events: Iterable[Event]) -> list[tuple[Any, str, int]]:
    """Return the (cta, track, row) of each event: the first row of its track that is free for its whole length."""
    events = list(events)
    free: dict[tuple[Any, str], list[float]] = {}
    lanes: dict[int, tuple[Any, str, int]] = {}
    for n in sorted(range(len(events)), key=lambda n: events[n].start):
        event = events[n]
        rows = free.setdefault((event.cta, event.track), [])
        row = next((r for r, until in enumerate(rows) if until <= event.start), len(rows))
        rows[row : row + 1] = [max(event.end, event.start + SHORTEST)]
        lanes[n] = (event.cta, event.track, row)
    return [lanes[n] for n in range(len(events))]


def _flow(number: int, source: Event, waiting: Event, places: dict[int, dict]) -> list[dict[str, Any]]:
    """Return both ends of an arrow, each just inside its slice, the second never before the first."""
    begin = max(source.start, source.end - SHORTEST)
    end = max(waiting.start, waiting.end - SHORTEST, begin)
    same = {"cat": "signal", "name": waiting.args["barrier"], "id": number}
    return [
        {"ph": "s", **same, **places[id(source)], "ts": begin},
        {"ph": "f", "bp": "e", **same, **places[id(waiting)], "ts": end},
    ]


def _counter(name: str, process: int, spans: Iterable[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return 1 while a unit is occupied, 0 otherwise; spans that touch are one."""
    edges: list[tuple[float, int]] = []
    for begin, end in sorted(spans):
        if edges and begin <= edges[-1][0]:
            edges[-1] = (max(end, edges[-1][0]), 0)
        else:
            edges += [(begin, 1), (end, 0)]
    return [{"ph": "C", "name": name, "pid": process, "ts": at, "args": {"occupied": value}} for at, value in edges]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
