"""Show when each warp role and each engine did what: as a table, a picture and a Chrome trace.

Built from the events of a run under the *timed* policy. All times are modelled cycles (:mod:`jfa.emulator.rates`), not measured.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Okabe-Ito colors, and a hatch or a height besides: color alone must not carry the meaning
LOOK = {
    "compute": {"facecolor": "#0072B2", "hatch": ""},
    "wait": {"facecolor": "#E69F00", "hatch": "////"},
    "occupied": {"facecolor": "#009E73", "hatch": ""},
    "under way": {"facecolor": "#56B4E9", "hatch": ""},
}
IDLE = "#EEEEEE"
ELSEWHERE = "#CC0077"  # of an arrow from another CTA, which the picture does not show
ENGINES = {"MMA": ("tensor core", "tensor"), "TMA": ("TMA", "tma")}  # track -> (title, the unit that its work occupies)
UNITS = {"mufu": "exp2 units"}  # units that belong to no engine and get a lane of their own
THINNEST = 0.001  # share of a run that a role must take to get a lane
WORK = {"m", "bytes"}  # facts of events that are work; a commit has none of them
OWNERS = re.compile(r"(?<![\w.\]])(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")  # "scores." of "scores.s[0]"
WHATEVER = ("buffers", "tiles")  # fields that say less of what they hold than their owner does


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

    @property
    def short(self) -> str:
        """The name without the owners of its buffers and barriers: ``s[0] = buffers[0] @ buffers[2].T``."""
        return OWNERS.sub("", self.name)

    @property
    def target(self) -> str:
        """What a copy or product writes, in one word: ``s[0]``, or ``kv[2]`` for ``kv.buffers[2]``."""
        *owners, last = self.name.replace(" += ", " = ").split(" = ")[0].split(".")
        field, bracket, index = last.partition("[")
        return owners[-1] + bracket + index if owners and field in WHATEVER else last


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
        """Return the cycles in which at least one event of this kind ran (overlapping ones count once)."""
        return _covered((e.start, e.end) for e in self.events if e.kind == kind)


class Name(NamedTuple):
    """Label of a piece of an engine's work: written in the span ``inside``, or after it up to the cycle ``until``."""

    words: str
    inside: tuple[float, float]
    until: float


@dataclass
class Lane:
    """One line of the picture: the spans of each kind, and the names of what its engine did."""

    track: str
    title: str
    bars: dict[str, list[tuple[float, float]]]
    names: list[Name]
    unit: bool = False

    def words(self, lo: float, hi: float) -> str:
        """Return the lane's title, with the share of the cycles from ``lo`` to ``hi`` in which its unit is occupied."""
        if not self.unit or hi <= lo:
            return self.title
        busy = _covered((max(a, lo), min(b, hi)) for a, b in self.bars["occupied"] if b > lo and a < hi)
        return f"{self.title}  {busy / (hi - lo):.0%}"


def _numbered(events: Iterable[Event], spans: list[tuple[float, float]]) -> list[Name]:
    """Return the Names of an engine's work by time: what each writes, and how often it was written before.

    The name may stand in the span of the unit that begins with the work or, where there is as much work as there are spans, in
    the span of the same number.
    """
    work = sorted((e for e in events if "signals" not in e.args or e.args.keys() & WORK), key=lambda e: e.start)
    count: dict[str, int] = defaultdict(int)
    named = []
    for n, e in enumerate(work):
        inside = [spans[n]] if len(spans) == len(work) else [s for s in spans if abs(s[0] - e.start) < 0.5]
        named.append(Name(f"{e.target} #{count[e.target]}", inside[0] if inside else (e.start, e.start), e.end))
        count[e.target] += 1
    return named


def _write_names(ax: Any, lanes: list[Lane], lo: float, hi: float) -> dict[str, str]:
    """Write each name inside its full bar, else over the thin bar behind it: whole, without its number, short, or not at all.

    Returns the short words that were used and what each stands for: {"a": "accs"} where ``a0`` was written for ``accs[0]``.
    """
    wide = ax.figure.get_figwidth() * 72 * 0.75 / (hi - lo)  # points per cycle, about
    brief, used = _initials(name.words for lane in lanes for name in lane.names), {}
    for row, lane in enumerate(lanes):
        full = sorted(lane.bars.get("occupied", ()))
        taken = lo  # where the last name over a thin bar ends
        for name in lane.names:
            begin, stop = (min(max(x, lo), hi) for x in name.inside)
            free = next((a for a, b in full if b > max(stop, taken)), hi)  # the next full bar's begin
            places = [(begin, stop, row, "white"), (max(stop, taken), min(name.until, free, hi), row - 0.14, "black")]
            base, index = _parts(name.words)
            for text in (name.words, name.words.split(" #")[0], brief[base] + index):
                fitting = (place for place in places if (place[1] - place[0]) * wide > _width(text) + 3)
                if place := next(fitting, None):
                    left, right, y, color = place
                    middle = (left + right) / 2
                    ax.text(middle, y, text, ha="center", va="center", fontsize=8, color=color, clip_on=True)
                    taken = taken if color == "white" else middle + (_width(text) / 2 + 3) / wide
                    if text == brief[base] + index and text != name.words.split(" #")[0]:
                        used[brief[base]] = base
                    break
    return {short: base for short, base in used.items() if short != base}


def _parts(words: str) -> tuple[str, str]:
    """Return ("accs", "0") of ``accs[0] #3``, and ("acc", "") of ``acc``."""
    base, _, index = words.split(" #")[0].partition("[")
    return base, index.split("]")[0]


def _initials(names: Iterable[str]) -> dict[str, str]:
    """Return for each buffer's name its shortest beginning that no other begins with: {"accs": "a", "kv": "k"}."""
    bases = {_parts(words)[0] for words in names}
    return {
        base: next(
            base[:n]
            for n in range(1, len(base) + 1)
            if n == len(base) or not any(o.startswith(base[:n]) for o in bases - {base})
        )
        for base in bases
    }


@functools.cache
def _width(text: str) -> float:
    """Return how many points wide a text of 8 points is."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=8).get_extents().width


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
        """Return a launch's timeline: ``Timeline.of(emulator.last())``, after ``options(policy="timed", rates=B200, trace=True)``.

        Raises ValueError if the launch kept no trace.
        """
        if not run.events:
            raise ValueError("this launch kept no events: run it under options(policy='timed', rates=..., trace=True)")
        return cls(run.events, getattr(run.options.rates, "name", ""), run.occupied)

    def between(self, lo: float, hi: float) -> Timeline:
        """Return the part from cycle ``lo`` to ``hi``: events and occupied spans cut there; ValueError if nothing lies in it."""
        cut = [
            e._replace(start=max(e.start, lo), end=min(e.end, hi)) for e in self.events if e.end > lo and e.start < hi
        ]
        if not cut:
            raise ValueError(
                f"no event lies between cycle {lo:g} and {hi:g}: the run is from {self.start:g} to {self.end:g}"
            )
        within = lambda spans: [(max(a, lo), min(b, hi)) for a, b in spans if b > lo and a < hi]
        part = Timeline(cut, self.chip, {key: within(spans) for key, spans in self.occupied.items()})
        part.start, part.end = max(lo, self.start), min(hi, self.end)
        return part

    @property
    def cycles(self) -> float:
        """Modelled cycles from the first event to the last."""
        return self.end - self.start

    def tracks(self, cta: Any = None) -> list[Track]:
        """Return the lanes in order of first appearance, roles before engines; all CTAs, or one."""
        found: dict[tuple, Track] = {}
        for e in self.events:
            if cta is None or e.cta == cta:
                found.setdefault((e.cta, e.track), Track(e.cta, e.track)).events.append(e)
        return sorted(found.values(), key=lambda t: (str(t.cta), t.is_engine))

    def ctas(self) -> list:
        """Return the CTAs that left events, in order of appearance."""
        return list(dict.fromkeys(e.cta for e in self.events))

    def busy(self, resource: str = "tensor", span: tuple[float, float] | None = None) -> float:
        """Return the mean share of the run, or of ``span`` (start, end in cycles), in which a resource was occupied
        (modelled).

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
        """Return the cycles waited per (track, barrier), longest first, summed over CTAs."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for e in self.events:
            if e.kind == "wait":
                total[e.track, e.args.get("barrier", e.name)] += e.end - e.start
        return dict(sorted(total.items(), key=lambda kv: -kv[1]))

    def table(self, max_waits: int = 8) -> str:
        """Return the busy and waiting share of each role and engine, then the barriers that cost most, as text."""
        lines = [f"modelled on {self.chip or 'an unnamed chip'}: {self.cycles:,.0f} cycles"]
        lines.append(f"{'cta':<12} {'track':<26} {'busy':>8} {'waits':>7} {'ops':>6}")
        for t in self.tracks():
            work = t.cycles("async" if t.is_engine else "compute")
            share = [c / self.cycles if self.cycles else 0.0 for c in (work, t.cycles("wait"))]
            mark = "~" if t.is_engine else ""  # an engine's results are under way longer than its unit is occupied
            lines.append(
                f"{_label(t.cta):<12} {t.name:<26} {mark + f'{share[0]:.1%}':>8} {share[1]:>6.1%} {len(t.events):>6}"
            )
        if any(t.is_engine for t in self.tracks()):
            lines.append("~ copies or products under way: how long a unit is occupied stands below")
        for name in dict.fromkeys(name for _, name in self.occupied):
            lines.append(f"{'all':<12} {'unit: ' + name:<26} {self.busy(name):>6.1%}")
        waits = self.waits()
        if waits:
            lines.append(f"{'waits on':<39} {'cycles':>9}   by")
            for (track, barrier), cycles in list(waits.items())[:max_waits]:
                lines.append(f"{barrier:<39} {cycles:>9,.0f}   {track}")
        return "\n".join(lines)

    def beside(self, other: Timeline, names: tuple[str, str] = ("A", "B")) -> str:
        """Return a table of two runs side by side: cycles, shares of each role and unit, the waits that differ most."""
        runs = (self, other)
        times = other.cycles / self.cycles if self.cycles else 0.0
        head = [
            f"modelled on {run.chip or 'an unnamed chip'}: {name} {run.cycles:,.0f} cycles"
            for name, run in zip(names, runs)
        ]
        lines = [*head, f"B / A: {times:.3f}", f"{'':<26} {'busy A':>8} {'busy B':>8} {'waits A':>8} {'waits B':>8}"]
        shares = [run._shares() for run in runs]
        for track in dict.fromkeys([*shares[0], *shares[1]]):
            cells = [share.get(track) for share in shares]
            texts = [f"{c[i]:.1%}" if c else "-" for i in (0, 1) for c in cells]
            lines.append(f"{track:<26} " + " ".join(f"{text:>8}" for text in texts))
        units = dict.fromkeys(name for run in runs for _, name in run.occupied)
        lines += [f"{'unit: ' + name:<26} " + " ".join(f"{run.busy(name):>8.1%}" for run in runs) for name in units]
        waits = [run.waits() for run in runs]
        change = {key: waits[1].get(key, 0.0) - waits[0].get(key, 0.0) for key in (*waits[0], *waits[1])}
        lines.append(f"{'waits that differ most, cycles':<39} {'A':>9} {'B':>9}   by")
        for key in sorted(change, key=lambda key: -abs(change[key]))[:6]:
            lines.append(f"{key[1]:<39} {waits[0].get(key, 0):>9,.0f} {waits[1].get(key, 0):>9,.0f}   {key[0]}")
        return "\n".join(lines)

    def _shares(self) -> dict[str, tuple[float, float]]:
        """Return {track: (busy share, waiting share)}, the mean over the CTAs that have it."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for t in self.tracks():
            work = t.cycles("async" if t.is_engine else "compute")
            found[t.name].append((work / (self.cycles or 1.0), t.cycles("wait") / (self.cycles or 1.0)))
        return {
            name: (sum(a for a, _ in each) / len(each), sum(b for _, b in each) / len(each))
            for name, each in found.items()
        }

    def barriers(self, cta: Any = None) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return per array of barriers (who arrives, who waits), of all CTAs or of one: roles without their number, or engines."""
        found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for e in self.events:
            if cta is not None and e.cta != cta:
                continue
            waits = [e.name.removeprefix("pass ")] if e.name.startswith("pass ") else []
            for names, side in ((e.args.get("signals", ()), 0), (waits, 1)):
                for name in names:
                    sides = found.setdefault(name.split("[")[0], ({}, {}))
                    sides[side][re.sub(r"\[\d+\]$", "", e.track)] = None
        return {name: (tuple(arrives), tuple(waits)) for name, (arrives, waits) in found.items()}

    def signals(self, cta: Any = None) -> list[tuple[Event, Event]]:
        """Return (the arrive, copy or product that completed a phase, the wait that this ended) of all CTAs, or of one, by time."""
        key = lambda e, barrier: (e.args.get("cluster", e.cta), barrier, round(e.end))
        ends = {key(e, barrier): e for e in self.events for barrier in e.args.get("signals", ())}
        pairs = [
            (source, e)
            for e in self.events
            if e.kind == "wait" and (cta is None or e.cta == cta)
            if (source := ends.get(key(e, e.args.get("barrier", "")))) is not None
        ]
        return sorted(pairs, key=lambda pair: pair[1].end)

    def plot(self, cta: Any = None, span: tuple[float, float] | None = None, ax=None):
        """Draw one lane per role, engine and busy unit for one CTA (the first, unless named); return the matplotlib figure.

        A full bar is time in which a role computes or a unit is occupied, a thin bar below it time in which a result is under
        way, and a hatched bar a wait. Arrows lead from what completed a barrier's phase to the wait that this ended; a short one in
        another color says that it was done in another CTA of the cluster. Names of
        buffers that are too long for their box are shortened; a second line below the axis says to what.
        """
        import matplotlib.pyplot as plt
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        cta = self.ctas()[0] if cta is None and self.events else cta
        lanes = self.lanes(cta)
        if ax is None:
            _, ax = plt.subplots(figsize=(11, 1.1 + 0.42 * max(1, len(lanes))), layout="constrained")
        lo, hi = span or (self.start, self.end)
        for row, lane in enumerate(lanes):
            ax.broken_barh(
                [(max(lo, self.start), min(hi, self.end) - max(lo, self.start))], (row - 0.4, 0.8), color=IDLE, zorder=0
            )
            for kind, spans in lane.bars.items():
                shown = [(max(a, lo), min(b, hi) - max(a, lo)) for a, b in spans if b > lo and a < hi]
                low, height = (row + 0.16, 0.24) if kind == "under way" else (row - 0.4, 0.8)
                ax.broken_barh(shown, (low, height), **LOOK[kind], edgecolor="white", linewidth=0.3)
        short = _write_names(ax, lanes, lo, hi)
        from_elsewhere = self._arrows(ax, cta, {lane.track: row for row, lane in enumerate(lanes)}, lo, hi)
        ax.set_yticks(range(len(lanes)), [lane.words(max(lo, self.start), min(hi, self.end)) for lane in lanes])
        ax.set_ylim(len(lanes) - 0.4, -0.6)
        ax.set_xlim(lo, hi)
        said = ", ".join(f"{brief} = {name}" for brief, name in sorted(short.items()))
        ax.set_xlabel(
            f"modelled cycles on {self.chip or 'an unnamed chip'}" + (f"\nin the boxes: {said}" if said else "")
        )
        ax.set_title(f"CTA {_label(cta)}" if lanes else "no events")
        used = [kind for kind in LOOK if any(lane.bars.get(kind) for lane in lanes)]
        handles = [Patch(**LOOK[kind], edgecolor="white", label=kind) for kind in used]
        handles.append(Patch(facecolor=IDLE, edgecolor="#BBBBBB", label="idle or queueing"))
        if from_elsewhere:
            handles.append(Line2D([], [], color=ELSEWHERE, marker="^", lw=0, label="ended by another CTA"))
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return ax.figure

    def lanes(self, cta: Any = None) -> list[Lane]:
        """Return what one CTA's lanes show: its roles, its engines with the unit they occupy, and the exponential units.

        A role that does next to nothing gets no lane.
        """
        found = []
        for track in self.tracks(cta):
            if not track.is_engine:
                if sum(e.end - e.start for e in track.events) < THINNEST * self.cycles:
                    continue  # what a kernel does before its roles part: no picture shows it
                bars = {
                    kind: [(e.start, e.end) for e in track.events if e.kind == kind] for kind in ("compute", "wait")
                }
                found.append(Lane(track.name, track.name, bars, []))
                continue
            title, unit = ENGINES.get(track.name, (track.name, ""))
            spans = self.occupied.get((track.cta, unit), [])
            names = _numbered(track.events, spans)
            flights = [(e.start, e.end) for e in track.events if "signals" not in e.args or e.args.keys() & WORK]
            if track.name not in ENGINES:  # it occupies no unit: its work is an answer that is awaited
                bars = {"under way": flights}
            else:
                bars = {"under way": flights, "occupied": spans} if spans else {"occupied": flights}
            found.append(Lane(track.name, title, bars, names, unit=bool(spans)))
        for unit, title in UNITS.items():
            if spans := self.occupied.get((cta, unit)):
                found.append(Lane(unit, title, {"occupied": spans}, [], unit=True))
        return found

    def _arrows(self, ax: Any, cta: Any, rows: dict[str, int], lo: float, hi: float) -> bool:
        """Draw one thin arrow, straight down or up, from each completing arrival to the wait that it ended.

        What another CTA of the cluster completed has no lane here: a short arrow in another color ends in the wait. Return
        whether there is such a one.
        """
        from_elsewhere = False
        for source, waiting in self.signals(cta):
            if not lo < waiting.end < hi or waiting.track not in rows:
                continue
            b, color = rows[waiting.track], "black"
            if source.cta != waiting.cta:
                tail, head, color, from_elsewhere = b + 0.7, b + 0.15, ELSEWHERE, True
            elif source.track in rows:
                edge = 0.4 if b > rows[source.track] else -0.4
                tail, head = rows[source.track] + edge, b - edge
            else:
                continue
            look = {"arrowstyle": "-|>,head_length=0.25,head_width=0.12", "color": color, "linewidth": 0.7}
            look |= {"shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (waiting.end, head), (waiting.end, tail), arrowprops=look)
        return from_elsewhere

    def chrome_trace(self, path: str | Path) -> Path:
        """Write the events as Chrome trace JSON (chrome://tracing or Perfetto); one microsecond stands for one cycle."""
        from .chrome import trace_events

        path = Path(path)
        content = {"traceEvents": trace_events(self), "otherData": {"chip": self.chip, "times": "modelled"}}
        path.write_text(json.dumps(content), encoding="utf-8")
        return path


def _label(cta: Any) -> str:
    return ",".join(map(str, cta)) if isinstance(cta, tuple) else str(cta)
