"""Compare predictions that were written down before they could be measured with the measurements.

`docs/sealed-predictions.json` is a list of objects: id, what, shape, unit, predicted, low, high, how, date; and, where `jfa verify`
can measure it by itself, gpu ("B200") and measure: {"way": "forward" or "backward", "of": implementation, "over": implementation,
"shape": a name of jfa.bench.shapes, where `shape` is none}.
With "over" the unit is "x": the time of `over` divided by the time of `of`, both from one run; else it is "ms" or "TFLOP/s".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PLACES = (
    Path(__file__).with_name("sealed-predictions.json"),
    Path(__file__).parents[2] / "docs" / "sealed-predictions.json",
)
UNITS = ("ms", "TFLOP/s", "x")


@dataclass(frozen=True)
class Prediction:
    """One prediction; ``low`` and ``high`` are its error bars, all three numbers in ``unit``."""

    id: str
    what: str
    shape: str
    unit: str
    predicted: float
    low: float
    high: float
    how: str = ""
    date: str = ""
    gpu: str = "B200"
    measure: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def measurable(self) -> bool:
        """Whether it says what to time, in a unit that a time gives."""
        return (
            bool(self.measure.get("of")) and self.measure.get("way") in ("forward", "backward") and self.unit in UNITS
        )

    @property
    def timed_on(self) -> str:
        """The named shape on which it is timed."""
        return self.measure.get("shape", self.shape)

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names of what has to be timed on its shape."""
        return tuple(self.measure[key] for key in ("of", "over") if self.measure.get(key)) if self.measurable else ()

    def is_for(self, device: str) -> bool:
        """Return whether a device's name, such as "NVIDIA B200", is the one it is about."""
        return self.gpu.lower() in device.lower()


def read(path: Path | None = None) -> list[Prediction]:
    """Return the predictions of a file; without one, those that came with the package, none if none did.

    Fields that are not known here are left alone.

    Raises:
        OSError: a named file cannot be read.
        ValueError: it is not a list of predictions.
    """
    if path is None:
        path = next((place for place in PLACES if place.is_file()), None)
        if path is None:
            return []
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    content = content.get("predictions", content) if isinstance(content, dict) else content
    known = {f.name for f in fields(Prediction)}
    try:
        return [Prediction(**{k: v for k, v in entry.items() if k in known}) for entry in content]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a list of predictions: {error}") from None


def compare(predictions: Iterable[Prediction], timings: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Return per prediction what was measured and the verdict: "inside", "below", "above" its error bars, or why there is none."""
    found = {(t["shape"], t["name"]): t for t in timings}
    rows = []
    for p in predictions:
        measured, verdict = _measured(p, found, device)
        if measured is not None:
            verdict = "inside" if p.low <= measured <= p.high else "below" if measured < p.low else "above"
        row = {name: getattr(p, name) for name in ("id", "what", "shape", "unit", "predicted", "low", "high")}
        rows.append(row | {"measured": measured, "verdict": verdict})
    return rows


def _measured(p: Prediction, found: dict[tuple[str, str], dict], device: str) -> tuple[float | None, str]:
    """Return (the number in the prediction's unit, or None; why there is none)."""
    if not p.is_for(device):
        return None, f"for a {p.gpu}"
    if not p.measurable:
        return None, "to be measured by hand"
    way = p.measure["way"]
    of, over = (found.get((p.timed_on, p.measure.get(key, "")), {}) for key in ("of", "over"))
    wanted = [("of", of)] + [("over", over)] * ("over" in p.measure)
    for key, timing in wanted:
        if not timing.get(f"{way}_ms"):
            return None, f"{p.measure[key]} was not timed: {timing.get('note') or 'not yet run'}"
    if "over" in p.measure:
        return over[f"{way}_ms"] / of[f"{way}_ms"], ""
    return of[f"{way}_ms" if p.unit == "ms" else f"{way}_tflops"], ""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the comparison as text, one line per prediction."""
    lines = [("prediction", "shape", "predicted", "measured", "verdict")]
    for r in rows:
        predicted = f"{r['predicted']:g} ({r['low']:g} to {r['high']:g}) {r['unit']}"
        measured = "-" if r["measured"] is None else f"{r['measured']:.3g} {r['unit']}"
        lines.append((r["id"], str(r["shape"]), predicted, measured, r["verdict"]))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)
