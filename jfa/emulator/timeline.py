"""What each warp role and each engine did when: a table, a picture and a Chrome trace.

Built from the events of a run under the *timed* policy. All times are modelled cycles (:mod:`jfa.emulator.rates`), not measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("compute", "wait", "async")
# Okabe-Ito colours, and a hatch besides: colour alone must not carry the meaning
LOOK = {
    "compute": dict(color="#0072B2", hatch=""),
    "wait": dict(color="#E69F00", hatch="////"),
    "async": dict(color="#009E73", hatch="...."),
}


class Event(NamedTuple):
    """One operation: ``start`` and ``end`` in modelled cycles; ``args["kind"]`` is compute, wait or async."""

    cta: Any
    track: str
    name: str
    start: float
    end: float
    args: dict

    @property
    def kind(self) -> str:
        return self.args.get("kind", "compute")


@dataclass
class Track:
    """One lane of the picture: a warp role, or an engine, of one CTA."""

    cta: Any
    name: str
    events: list[Event] = field(default_factory=list)

    @property
    def is_engine(self) -> bool:
        return any(e.kind == "async" for e in self.events)

    def cycles(self, kind: str) -> float:
        """Cycles in which at least one event of this kind ran (overlapping ones count once)."""
        return _covered((e.start, e.end) for e in self.events if e.kind == kind)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


class Timeline:
    """The events of one run.

    Args:
        events: (cta, track, name, start, end, args) tuples, times in cycles.
        chip: the name of the chip whose rates gave the times.
        occupied: for each (cta, resource) the spans (begin, end) in which it was occupied, in cycles.
    """

    def __init__(self, events: Iterable[tuple], chip: str = "", occupied: dict | None = None):
        self.events = [Event(*e) for e in events]
        self.chip = chip
        self.occupied = dict(occupied or {})
        self.start = min((e.start for e in self.events), default=0.0)
        self.end = max((e.end for e in self.events), default=0.0)

    @classmethod
    def of(cls, run) -> Timeline:
        """The timeline of a launch: ``Timeline.of(emulator.last())``, after ``options(policy="timed", rates=B200, trace=True)``.

        Raises ValueError if the launch kept no trace.
        """
        if not run.events:
            raise ValueError("this launch kept no events: run it under options(policy='timed', rates=..., trace=True)")
        return cls(run.events, getattr(run.options.rates, "name", ""), run.occupied)

    @property
    def cycles(self) -> float:
        """Modelled cycles from the first event to the last."""
        return self.end - self.start

    def tracks(self, cta: Any = None) -> list[Track]:
        """Lanes in order of first appearance, roles before engines; all CTAs, or one."""
        found: dict[tuple, Track] = {}
        for e in self.events:
            if cta is None or e.cta == cta:
                found.setdefault((e.cta, e.track), Track(e.cta, e.track)).events.append(e)
        return sorted(found.values(), key=lambda t: (str(t.cta), t.is_engine))

    def ctas(self) -> list:
        """The CTAs that left events, in order of appearance."""
        return list(dict.fromkeys(e.cta for e in self.events))

    def busy(self, resource: str = "tensor", span: tuple[float, float] | None = None) -> float:
        """Mean share of the run, or of ``span`` (start, end in cycles), in which a resource was occupied (modelled).

        The mean is over the CTAs that used the resource. A span leaves ramp-up and tail out.
        """
        lo, hi = span or (self.start, self.end)
        shares = [
            _covered((max(begin, lo), min(end, hi)) for begin, end in spans if end > lo and begin < hi) / (hi - lo)
            for (_, name), spans in self.occupied.items()
            if name == resource
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def waits(self) -> dict[tuple[str, str], float]:
        """Cycles waited per (track, barrier), longest first, summed over CTAs."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for e in self.events:
            if e.kind == "wait":
                total[e.track, e.args.get("barrier", e.name)] += e.end - e.start
        return dict(sorted(total.items(), key=lambda kv: -kv[1]))

    def table(self, max_waits: int = 8) -> str:
        """Busy and waiting share of each role and engine, then the barriers that cost most, as text."""
        lines = [f"modelled on {self.chip or 'an unnamed chip'}: {self.cycles:,.0f} cycles"]
        lines.append(f"{'cta':<12} {'track':<26} {'busy':>7} {'waits':>7} {'ops':>6}")
        for t in self.tracks():
            work = t.cycles("async" if t.is_engine else "compute")
            share = [c / self.cycles if self.cycles else 0.0 for c in (work, t.cycles("wait"))]
            lines.append(f"{_label(t.cta):<12} {t.name:<26} {share[0]:>6.1%} {share[1]:>6.1%} {len(t.events):>6}")
        for name in dict.fromkeys(name for _, name in self.occupied):
            lines.append(f"{'all':<12} {'unit: ' + name:<26} {self.busy(name):>6.1%}")
        waits = self.waits()
        if waits:
            lines.append(f"{'waits on':<39} {'cycles':>9}   by")
            for (track, barrier), cycles in list(waits.items())[:max_waits]:
                lines.append(f"{barrier:<39} {cycles:>9,.0f}   {track}")
        return "\n".join(lines)

    def plot(self, cta: Any = None, span: tuple[float, float] | None = None, ax=None):
        """Draw one lane a role and engine for one CTA (the first, unless named); returns the matplotlib figure."""
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch

        tracks = self.tracks(self.ctas()[0] if cta is None and self.events else cta)
        if ax is None:
            _, ax = plt.subplots(figsize=(11, 0.9 + 0.42 * max(1, len(tracks))), layout="constrained")
        lo, hi = span or (self.start, self.end)
        for row, track in enumerate(tracks):
            for kind in KINDS:
                bars = [
                    (e.start, e.end - e.start) for e in track.events if e.kind == kind and e.end > lo and e.start < hi
                ]
                if bars:
                    style = LOOK[kind]
                    ax.broken_barh(
                        bars,
                        (row - 0.4, 0.8),
                        facecolor=style["color"],
                        hatch=style["hatch"],
                        edgecolor="white",
                        linewidth=0.3,
                    )
        ax.set_yticks(range(len(tracks)), [t.name for t in tracks])
        ax.set_ylim(len(tracks) - 0.4, -0.6)
        ax.set_xlim(lo, hi)
        ax.set_xlabel(f"modelled cycles on {self.chip or 'an unnamed chip'}")
        ax.set_title(f"CTA {_label(tracks[0].cta)}" if tracks else "no events")
        handles = [Patch(facecolor=LOOK[k]["color"], hatch=LOOK[k]["hatch"], edgecolor="white", label=k) for k in KINDS]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return ax.figure

    def chrome_trace(self, path: str | Path) -> Path:
        """Write the events as Chrome trace JSON (chrome://tracing or Perfetto); one microsecond stands for one cycle."""
        processes: dict[Any, int] = {}
        threads: dict[tuple, int] = {}
        out = []
        for e in self.events:
            p = processes.setdefault(e.cta, len(processes))
            t = threads.setdefault((e.cta, e.track), len(threads))
            args = {k: v if isinstance(v, str | int | float | bool) else str(v) for k, v in e.args.items()}
            out.append(
                dict(
                    ph="X",
                    name=e.name,
                    cat=e.kind,
                    pid=p,
                    tid=t,
                    ts=e.start,
                    dur=max(e.end - e.start, 0.001),
                    args=args,
                )
            )
        for cta, p in processes.items():
            out.append(dict(ph="M", name="process_name", pid=p, args=dict(name=f"CTA {_label(cta)}")))
        for (cta, track), t in threads.items():
            out.append(dict(ph="M", name="thread_name", pid=processes[cta], tid=t, args=dict(name=track)))
        path = Path(path)
        path.write_text(json.dumps(dict(traceEvents=out, otherData=dict(chip=self.chip, times="modelled"))))
        return path


def _label(cta: Any) -> str:
    return ",".join(map(str, cta)) if isinstance(cta, tuple) else str(cta)
