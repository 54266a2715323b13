"""Results of earlier runs: the JSON files that `jfa bench --json` wrote, read back, compared and drawn.

The files in results/ were recorded on the GPUs that they name. Figures published by others are kept separately, in
QUOTED.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jfa.bench import shapes

FOLDER = Path(__file__).parent / "results"
OURS = "jfa"  # names of this project's op: "jfa", "jfa:portable", "jfa:hopper", ...
WAYS = ("forward", "backward")


class Quoted(NamedTuple):
    """A figure published by others that was not measured here."""

    gpu: str
    claim: str
    source: str


_CHAPTER = "public chapter and README of Jagged Flash Attention, May 2026"
_FA4 = "FlashAttention-4 paper, arXiv 2603.05451"
QUOTED = (
    Quoted("B200", "JFA on jagged broadcast-Q, bf16: forward 13 % and backward 50 % above FA4", _CHAPTER),
    Quoted("B200", "JFA dense: forward about 87 % of FA4, backward 17 % above it", _CHAPTER),
    Quoted("B200", "zigzag order alone: about 20 % of the jagged forward", _CHAPTER),
    Quoted("B200", "JFA is about 3.2 thousand lines, FA4 about 10 thousand", _CHAPTER),
    Quoted("B200", "FA4: 1613 TFLOP/s, 71 % of the peak, 1.3 times cuDNN 9.13", _FA4),
    Quoted(
        "B200",
        "longest first: 4-8 % with as many key heads as query heads, 7-14 % with 8 query heads per key head",
        _FA4,
    ),
)


@dataclass(frozen=True)
class Recorded:
    """One result file: its name without the ending, and what it holds."""

    name: str
    content: dict

    @property
    def on_gpu(self) -> bool:
        """Whether it was measured on a GPU."""
        return self.content["environment"].get("device", "CPU") != "CPU"

    @property
    def gpu(self) -> str:
        """The device's short name: "H200"."""
        return self.content["environment"].get("device", "CPU").removeprefix("NVIDIA ")

    @property
    def where(self) -> str:
        """GPU, driver, versions and date in one line."""
        env = self.content["environment"]
        parts = [env.get("device", "unknown device")]
        parts += [
            f"{key} {env[key]}" for key in ("driver", "cuda", "torch", "triton") if env.get(key, "None") != "None"
        ]
        return ", ".join([*parts, env.get("date", "no date")])

    @property
    def ceilings(self) -> tuple[float, float] | None:
        """(TB/s of a copy, TFLOP/s of a bf16 matrix product) measured in the same run, if it measured them."""
        found = self.content.get("ceilings", {})
        return (
            (found["copy_tb_per_s"], found["bf16_tflops"])
            if "copy_tb_per_s" in found and "bf16_tflops" in found
            else None
        )

    def shapes(self) -> list[str]:
        """Return the names of the shapes in it, in their order."""
        return list(dict.fromkeys(t["shape"] for t in self.content["timings"]))

    def fastest(self, shape: str, way: str = "forward", ours: bool = True) -> tuple[str, float] | None:
        """Return (name, TFLOP/s) of the fastest of our backends on a shape, or of the fastest peer; None where there is none."""
        found = [
            (t["name"], t[f"{way}_tflops"])
            for t in self.content["timings"]
            if t["shape"] == shape and t.get(f"{way}_tflops") and is_ours(t["name"]) == ours
        ]
        return max(found, key=lambda pair: pair[1], default=None)

    def comparison(self, way: str) -> list[list]:
        """Return rows (shape, our fastest backend, TFLOP/s, best peer, TFLOP/s, ratio, share of the bound in %), numbers or "-"."""
        rows = []
        for shape in self.shapes():
            mine, peer = self.fastest(shape, way), self.fastest(shape, way, ours=False)
            ratio = mine[1] / peer[1] if mine and peer else "-"
            rows.append([shape, *(mine or ("-", "-")), *(peer or ("-", "-")), ratio, self.share_of_bound(shape, way)])
        return rows

    def share_of_bound(self, shape: str, way: str) -> float | str:
        """Return how near our fastest backend is to the larger of its two floors, bytes or FLOPs, in %; "-" where unknown."""
        mine = self.fastest(shape, way)
        if mine is None or self.ceilings is None or shape not in shapes.SHAPES:
            return "-"
        return 100 * mine[1] / bound_tflops(shape, self.ceilings, way)


def is_ours(name: str) -> bool:
    """Return whether a timing's name is one of this project's backends."""
    return name.split(":")[0] == OURS


def bound_tflops(shape: str, ceilings: tuple[float, float], way: str = "forward") -> float:
    """Return the TFLOP/s that nothing can exceed on a shape: the roof over its FLOPs per byte, at (TB/s, TFLOP/s)."""
    return min(intensity(shape, way) * ceilings[0], ceilings[1])


def intensity(shape: str, way: str = "forward") -> float:
    """Return the FLOPs per byte that must be moved at least."""
    s, backward = shapes.SHAPES[shape], way == "backward"
    return s.flops(backward) / s.least_bytes(backward)


def read_all(folder: Path = FOLDER) -> list[Recorded]:
    """Read every result file of a folder, by name; files of another kind are left out."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and {"environment", "timings"} <= content.keys():
            found.append(Recorded(path.stem, content))
    return found


def newest_ceilings(gpu: str, folder: Path = FOLDER) -> tuple[float, float]:
    """Return (TB/s of a copy, TFLOP/s of a bf16 product) as the newest recorded run on a GPU measured them.

    Of several runs of one day the first by name counts. Raises LookupError if no run on this GPU measured its ceilings.
    """
    runs = [r for r in read_all(folder) if r.gpu == gpu and r.ceilings]
    if not runs:
        raise LookupError(f"no run on a GPU named {gpu} in {folder} measured its ceilings")
    return _newest(runs)


def _newest(runs: Iterable[Recorded]) -> tuple[float, float]:
    return max(runs, key=lambda r: r.content["environment"].get("date", "")).ceilings


def roofline(
    results: Iterable[Recorded], way: str = "forward", roofs: dict | None = None, names: Iterable[str] = shapes.DEFAULT
):
    """Draw our fastest backend of every GPU result under one roof per GPU, the newest measured; a :class:`jfa.plots.Picture`.

    ``roofs`` adds more, name -> (TB/s, TFLOP/s): for a first look at the shapes no result is needed.
    """
    from jfa import plots

    results = [r for r in results if r.on_gpu]
    names = [n for n in names if n in shapes.SHAPES]
    measured_on = sorted({r.gpu for r in results if r.ceilings})
    roofs = dict(roofs or {}) | {
        f"{gpu}, measured": _newest(r for r in results if r.gpu == gpu and r.ceilings) for gpu in measured_on
    }
    measured = {}
    for r in results:
        for label, ours in ((f"{r.name}: ours", True), (f"{r.name}: best peer", False)):
            points = {n: best[1] for n in names if (best := r.fastest(n, way, ours))}
            measured |= {label: points} if points else {}
    title = f"{way}: what bytes and FLOPs allow" + (", and what was measured" if measured else "")
    return plots.roofline({n: intensity(n, way) for n in names}, roofs, measured, title=title)
