"""All figures of the course, in one style that color-blind readers can read, with their numbers as text.

Colors are Okabe and Ito's (2008). Color never carries a meaning alone: lines have markers, areas have hatches, blocks
have letters. A function returns a :class:`Picture`; as the last line of a notebook cell it shows the image with its
values folded below, in a terminal it prints the values. matplotlib is imported on use, and figures are not registered
with pyplot.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
CYCLE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
EMPTY_PLACE = "#E8E8E8"
DPI = 120
WIDEST = 9.6  # inches: at 100 pixels each what a JupyterLab 1400 pixels wide shows without making letters smaller


@dataclass
class Picture:
    """A finished figure, and its content in words and numbers."""

    figure: Figure
    text: str

    def png(self) -> bytes:
        """Return the image."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def save(self, path: Any) -> None:
        """Write the image to a file; its ending picks the format."""
        self.figure.savefig(path, dpi=DPI)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        image = base64.b64encode(self.png()).decode()
        words = html.escape(self.text)
        width = int(self.figure.get_figwidth() * 100)
        return (
            f'<figure style="margin:0"><img style="max-width:100%;width:{width}px" alt="{html.escape(self.text, quote=True)}" '
            f'src="data:image/png;base64,{image}">'
            f"<details><summary>the numbers of this figure</summary><pre>{words}</pre></details></figure>"
        )


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned plain-text table; floats get four significant digits, numbers are right-aligned."""
    cells = [[_cell(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells)]
    number = [all(isinstance(row[i], int | float | np.number) for row in rows) for i in range(len(headers))]
    lines = [
        "  ".join(x.rjust(w) if n else x.ljust(w) for x, w, n in zip(line, widths, number)).rstrip()
        for line in (list(headers), *cells)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float | np.floating) else str(x)


def canvas(
    width: float = 7.0, height: float = 3.2, rows: int = 1, columns: int = 1, **kwargs: Any
) -> tuple[Figure, Any]:
    """Return a new figure of ``width`` (at most WIDEST) x ``height`` inches in the house style, and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    look = {
        "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
        "hatch.linewidth": 0.6, "legend.frameon": False, "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(min(width, WIDEST), height), layout="constrained")
        return figure, figure.subplots(rows, columns, **kwargs)


def label(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set title and axis labels in one call: no figure goes without them."""
    axes.set_title(title, loc="left", fontsize=10, wrap=True)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)


# ------------------------------------------------------------------------------------------------------- general charts
def lines(
    x: Sequence[float], series: Mapping[str, Sequence[float]], *, title: str, xlabel: str, ylabel: str,
    log_x: bool = False, log_y: bool = False, from_zero: bool = False,
) -> Picture:  # fmt: skip
    """Draw one line per series over common x values, told apart by color, marker and dashes."""
    figure, axes = canvas()
    for i, (name, y) in enumerate(series.items()):
        look = {"color": CYCLE[i % 7], "marker": MARKERS[i % 7], "linestyle": DASHES[i % 4]}
        axes.plot(x, y, markersize=7 if i == 0 else 5, label=name, **look)  # lines that coincide stay visible
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(x), [f"{v:g}" for v in x])
    if log_y:
        axes.set_yscale("log")
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return _finished(figure, axes, x, series, (title, xlabel, ylabel))


def bands(
    x: Sequence[float], samples: Mapping[str, Any], *, title: str, xlabel: str, ylabel: str, level: tuple[float, str] | None = None,
    log_y: bool = False,
) -> Picture:  # fmt: skip
    """Draw the median of many samples over common x values, the middle 80 % shaded.

    Args:
        samples: series -> [len(x), samples].
        level: (y, words) of a dashed line to compare with.
    """
    figure, axes = canvas(7.5, 3.4)
    medians, rows = {}, []
    for i, (name, values) in enumerate(samples.items()):
        low, medians[name], high = np.quantile(np.asarray(values, dtype=float), (0.1, 0.5, 0.9), axis=1)
        look = {"color": CYCLE[i % 7], "marker": MARKERS[i % 7], "linestyle": DASHES[i % 4]}
        axes.plot(x, medians[name], markersize=5, label=name, **look)
        axes.fill_between(x, low, high, color=CYCLE[i % 7], alpha=0.18, hatch=HATCHES[i % 7], linewidth=0)
        rows += [[name, float(v), *(float(q[n]) for q in (low, medians[name], high))] for n, v in enumerate(x)]
    if level is not None:
        axes.axhline(level[0], color=BLACK, linestyle="--", linewidth=1)
        above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(level[1], (x[-1], level[0]), fontsize=8, **above)
    if log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    _finished(figure, axes, x, medians, (title, xlabel, ylabel))
    return Picture(figure, f"{title}\n{table(['', xlabel, '10 %', 'median', '90 %'], rows)}")


def _finished(
    figure, axes, positions: Sequence, series: Mapping[str, Sequence[float]], words: tuple[str, str, str]
) -> Picture:
    """Finish a picture of several series: their legend where there are two, ``words`` (title, xlabel, ylabel), and their table."""
    if len(series) > 1:
        figure.legend(loc="outside right center", frameon=False, fontsize=8)  # below the end of a long title
    label(axes, *words)
    rows = [[position, *(float(values[i]) for values in series.values())] for i, position in enumerate(positions)]
    title, xlabel, _ = words
    return Picture(figure, f"{title}\n{table([xlabel, *series], rows)}")


def bars(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    form: str = "{:.3g}",
) -> Picture:
    """Draw groups of bars, one bar per series in each, with its value written above."""
    figure, axes = canvas(max(5.5, 1.1 * len(labels) + 2.5))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        place = np.arange(len(labels)) + (i - (len(series) - 1) / 2) * width
        drawn = axes.bar(
            place, values, width * 0.92, color=CYCLE[i % 7], hatch=HATCHES[i % 7], edgecolor="white", label=name
        )
        axes.bar_label(drawn, [form.format(v) for v in values], fontsize=8, padding=1)
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(y=0.12)
    return _finished(figure, axes, labels, series, (title, xlabel, ylabel))


def roofline(
    shapes: Mapping[str, float],
    roofs: Mapping[str, tuple[float, float]],
    measured: Mapping[str, Mapping[str, float]],
    *,
    title: str,
) -> Picture:
    """Draw shapes by their FLOPs per byte, under the roofs that memory and tensor cores form.

    Args:
        shapes: name -> FLOPs per byte.
        roofs: name -> (TB/s, TFLOP/s): the roof is the smaller of FLOPs per byte times TB/s, and TFLOP/s.
        measured: series -> shape -> TFLOP/s.
    """
    figure, axes = canvas(9.0, 4.6)
    low, high = 0.6 * min(shapes.values()), 1.7 * max(shapes.values())
    for i, (name, (bandwidth, peak)) in enumerate(roofs.items()):
        corner = peak / bandwidth
        x = [low, min(max(corner, low), high), high]
        words = f"roof of {name}: {bandwidth:.1f} TB/s, {peak:.0f} TFLOP/s"
        axes.plot(
            x, [min(v * bandwidth, peak) for v in x], color=BLACK, linestyle=DASHES[i % 4], linewidth=1.5, label=words
        )
    for i, (name, points) in enumerate(measured.items()):
        x = [shapes[n] for n in points]
        look = {"color": CYCLE[i % 6], "marker": MARKERS[i % 7], "markersize": 7, "alpha": 0.85}
        axes.plot(x, list(points.values()), linestyle="", label=name, **look)
    _log2_axes(axes, (low, high))
    _name_along_top(axes, shapes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    label(axes, "", "FLOPs per byte that must move", "TFLOP/s")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    headers = ["shape", "FLOPs per byte", *(f"under {name}" for name in roofs), *measured]
    rows = [
        [n, x, *(min(x * b, peak) for b, peak in roofs.values()), *(points.get(n, "-") for points in measured.values())]
        for n, x in shapes.items()
    ]
    return Picture(figure, f"{title} (TFLOP/s)\n{table(headers, rows)}")


def _log2_axes(axes: Axes, xlim: tuple[float, float]) -> None:
    """Make both axes logarithmic with powers of two as plain numbers."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(*xlim)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.grid(alpha=0.3)


def _name_along_top(axes: Axes, places: Mapping[str, float], nearest: float = 1.12) -> None:
    """Draw a dotted line and a name above the axes for each x; names that would overlap share one."""
    groups: list[list[str]] = []
    for name, x in sorted(places.items(), key=lambda item: item[1]):
        axes.axvline(x, color="#AAAAAA", linewidth=0.8, linestyle=":")
        if groups and x < nearest * places[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    for group in groups:
        text = {"transform": axes.get_xaxis_transform(), "rotation": 30, "ha": "left", "va": "bottom", "fontsize": 8}
        axes.text(places[group[0]], 1.01, ", ".join(group), **text)


def histograms(samples: Mapping[str, Any], *, title: str, xlabel: str, bins: int = 40, log_x: bool = False) -> Picture:
    """Draw one small histogram per sample over a common axis, the mean marked; counts stand on a log axis.

    ``log_x`` takes bins of equal ratio on a log axis, where a log-uniform sample is flat; all values must be positive.
    """
    figure, panels = canvas(2.4 * len(samples) + 0.6, 2.6, 1, len(samples), sharex=True, sharey=True, squeeze=False)
    arrays = {name: np.asarray(sample) for name, sample in samples.items()}
    top = max(float(a.max()) for a in arrays.values())
    edges = np.linspace(0, top, bins + 1)
    if log_x:
        edges = np.geomspace(min(float(a.min()) for a in arrays.values()), top, bins + 1)
    rows = []
    for i, (axes, (name, sample)) in enumerate(zip(panels[0], arrays.items())):
        axes.hist(sample, edges, color=CYCLE[i % 7], log=True)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        mean = float(sample.mean())
        axes.axvline(mean, color="black", linestyle="--", linewidth=1)
        middle = np.sqrt(edges[0] * top) if log_x else top / 2  # the words stand on the roomier side of the line
        side, words = ("left", f" mean {mean:.0f}") if mean < middle else ("right", f"mean {mean:.0f} ")
        place = {"transform": axes.get_xaxis_transform(), "va": "bottom", "ha": side, "fontsize": 8}
        axes.text(mean, 1.0, words, **place)
        label(axes, f"{name}\n", xlabel, "how many" if i == 0 else "")
        rows.append([name, mean, float(np.median(sample)), int(sample.max())])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    return Picture(figure, f"{title}\n{table(['', 'mean', 'median', 'longest'], rows)}")


def panels(
    labels: Sequence[str],
    quantities: Mapping[str, tuple[Sequence[float], str]],
    *,
    title: str,
    one_axis: bool = False,
) -> Picture:
    """Draw horizontal bars, one panel per quantity, with the value written behind each bar.

    Args:
        labels: what each line of bars is; words may be long here.
        quantities: name, the axis label of its panel -> (one value per label, how to write it: "{:.0f} %").
        one_axis: the panels share a unit, so that bars of all of them can be compared.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = canvas(
        3.0 * len(quantities) + 1.8, 0.34 * len(labels) + 1.2, 1, len(quantities), sharex=one_axis,
        sharey=True, squeeze=False,
    )  # fmt: skip
    for i, (panel, (name, (values, form))) in enumerate(zip(axes[0], quantities.items())):
        drawn = panel.barh(labels, values, color=CYCLE[i % 7], hatch=HATCHES[i % 7], edgecolor="white")
        panel.bar_label(drawn, [form.format(v) for v in values], fontsize=8, padding=3)
        panel.margins(x=0.18)
        if 0 < max(map(abs, values), default=0) < 0.02:
            # An exponent per tick: matplotlib's one exponent for the axis would hide a part of the axis label.
            panel.xaxis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
            panel.xaxis.set_major_formatter(lambda v, _: f"{v:.0e}" if v else "0")
        else:
            panel.xaxis.set_major_locator(MaxNLocator(5))  # six digits per tick still have room
        label(panel, "", name, "")
    axes[0][0].invert_yaxis()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    rows = [[name, *(form.format(values[n]) for values, form in quantities.values())] for n, name in enumerate(labels)]
    return Picture(figure, f"{title}\n{table(['', *quantities], rows)}")


class Segment(NamedTuple):
    """A stretch of a line: ``look`` picks color and hatch; None is somebody else's, drawn pale and hatched."""

    start: float
    length: float
    words: str = ""
    look: int | None = 0


def segments(
    rows: Mapping[str, Sequence[Segment]], *, title: str, xlabel: str, ticks: Sequence[float] | None = None
) -> Picture:
    """Draw labelled stretches along one axis, a line per row: who owns which part. Words that do not fit stand above."""
    height = max((s.words.count("\n") for line in rows.values() for s in line), default=0)
    figure, axes = canvas(9.0, (0.3 + 0.22 * height) * len(rows) + 1.0)
    last = max(s.start + s.length for line in rows.values() for s in line)
    for n, line in enumerate(rows.values()):
        for s in line:
            _segment(axes, n, s, fits=s.length / last * 95 >= max(map(len, s.words.split("\n"))))
    axes.set(xlim=(0, last), ylim=(len(rows) - 0.4, -0.75), yticks=range(len(rows)), yticklabels=list(rows))
    if ticks is not None:
        axes.set_xticks(list(ticks), _staggered(ticks, last))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    label(axes, title, xlabel, "")
    words = [
        [name, s.start, s.start + s.length, s.words.replace("\n", ", ") or ("nobody's" if s.look is None else "")]
        for name, line in rows.items()
        for s in line
    ]
    return Picture(figure, f"{title}\n{table(['', 'from', 'to', ''], words)}")


def _staggered(ticks: Sequence[float], last: float) -> list[str]:
    """Return the ticks as words; one that stands too near the one before it goes a line lower."""
    words: list[str] = []
    for n, tick in enumerate(ticks):
        near = n > 0 and (tick - ticks[n - 1]) / last * 95 < 0.95 * len(f"{tick:g}") and not words[-1].startswith("\n")
        words.append("\n" * near + f"{tick:g}")
    return words


def _segment(axes: Axes, row: int, s: Segment, *, fits: bool) -> None:
    """Draw one stretch at a height of 0.8 about ``row``, with its words inside or above."""
    color = "#FFFFFF" if s.look is None else CYCLE[s.look % 7]
    look = {"hatch": "////", "edgecolor": "#888888"} if s.look is None else {"edgecolor": "white"}
    axes.broken_barh([(s.start, s.length)], (row - 0.3, 0.6), facecolor=color, **look)
    place = {
        "ha": "center",
        "va": "center" if fits else "bottom",
        "fontsize": 8,
        "color": _ink(color) if fits else "black",
    }
    back = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if fits and s.look is None else None
    axes.text(s.start + s.length / 2, row if fits else row - 0.32, s.words, bbox=back, **place)


def number_grids(
    grids: Mapping[str, Any],
    *,
    title: str,
    signs: Sequence[str] = (),
    looks: Mapping[str, Any] | None = None,
    masked: Mapping[str, Any] | None = None,
) -> Picture:
    """Draw small tables of numbers side by side, as the terms of an equation if ``signs`` stand between them.

    Args:
        grids: heading -> numbers [rows, columns].
        signs: what stands behind each grid but the last: "+", "=".
        looks: heading -> palette number of each cell; grids without one have the first color.
        masked: heading -> True for cells that are drawn pale and hatched.
    """
    arrays = {name: np.atleast_2d(np.asarray(grid)) for name, grid in grids.items()}
    widths = [a.shape[1] + 0.7 for a in arrays.values()]
    tall = max(a.shape[0] for a in arrays.values())
    figure, panels = canvas(
        min(11.0, 0.52 * sum(widths) + 0.5), 0.4 * tall + 1.3, 1, len(arrays), squeeze=False, width_ratios=widths
    )
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)  # headings keep off the title and the edge
    for n, (axes, (name, grid)) in enumerate(zip(panels[0], arrays.items())):
        look = np.broadcast_to(np.asarray((looks or {}).get(name, 0)), grid.shape)
        pale = np.broadcast_to(np.asarray((masked or {}).get(name, False), dtype=bool), grid.shape)
        top = (tall - grid.shape[0]) / 2
        for (i, j), number in np.ndenumerate(grid):
            color, hatch = (EMPTY_PLACE, "////") if pale[i, j] else (CYCLE[look[i, j] % 7], "")
            _cells(axes, [(j, top + i)], color, "" if pale[i, j] else str(number), hatch)
        axes.set(xlim=(-0.35, grid.shape[1] + 0.35), ylim=(tall, 0), aspect="equal")
        axes.set_axis_off()
        axes.set_title(name, fontsize=9)
        if n < len(signs):
            axes.text(grid.shape[1] + 0.35, tall / 2, signs[n], ha="center", va="center", fontsize=14, clip_on=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    said = [f"{name.replace(chr(10), ' ')}: {grid.tolist()}" for name, grid in arrays.items()]
    return Picture(figure, "\n".join([title, *said]))


def blocks(
    places: Mapping[str, tuple[tuple[float, float, float, float], str, int]],
    links: Sequence[tuple[str, ...]],
    *,
    title: str,
    directed: bool = False,
) -> Picture:
    """Draw a block diagram: boxes with words, and arrows between boxes that lie side by side or one above the other.

    Args:
        places: heading -> ((x, y, width, height), words, palette number). y grows upwards. A box may lie inside another.
        links: pairs of headings that exchange data; the arrow joins the edges that face each other. A third entry "->" lets data
            flow from the first to the second only.
        directed: whether data flows from the first of each pair to the second only.
    """
    from matplotlib.patches import FancyBboxPatch

    right, top = (max(p[0][i] + p[0][i + 2] for p in places.values()) for i in (0, 1))
    figure, axes = canvas(9.0, 9.0 * (top + 0.2) / (right + 0.2))
    for heading, ((x, y, w, h), words, number) in places.items():
        look = {"facecolor": CYCLE[number % 7] + "22", "edgecolor": CYCLE[number % 7], "linewidth": 1.2}
        axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02", **look))
        axes.text(x + w / 2, y + h - 0.14, heading, ha="center", va="top", fontsize=9, weight="bold")
        axes.text(x + w / 2, y + h - 0.45, words, ha="center", va="top", fontsize=8)
    for a, b, *way in links:
        start, end = _facing(places[a][0], places[b][0])
        look = {"arrowstyle": "->" if directed or way else "<->", "color": BLACK, "linewidth": 1.3}
        axes.annotate("", end, start, arrowprops=look)
    axes.set(xlim=(-0.1, right + 0.1), ylim=(-0.1, top + 0.1))
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10, wrap=True)
    said = [f"{heading}: {' '.join(words.split())}".rstrip(": ") for heading, (_, words, _) in places.items()]
    arrows = [f"{a} {'->' if directed or way else '<->'} {b}" for a, b, *way in links]
    return Picture(figure, "\n".join([title, *said, *arrows]))


def _facing(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> tuple[tuple, tuple]:
    """Return the points of a and of b at which these boxes (x, y, width, height) face each other, amid what they share."""
    for axis in (0, 1):
        first, second = (a, b) if a[axis] < b[axis] else (b, a)
        gap = first[axis] + first[axis + 2], second[axis]
        other = 1 - axis
        low, high = max(a[other], b[other]), min(a[other] + a[other + 2], b[other] + b[other + 2])
        if gap[0] <= gap[1] and low < high:
            middle = (low + high) / 2
            points = tuple((edge, middle) if axis == 0 else (middle, edge) for edge in gap)
            return points if first is a else points[::-1]
    raise ValueError("boxes that are linked must lie side by side or one above the other")


def timelines(drawn: Mapping[str, Any], span: tuple[float, float] | None = None) -> Picture:
    """Draw timelines of the emulator, one below the other over the same cycles; their tables as text.

    Args:
        drawn: heading -> a :class:`jfa.emulator.timeline.Timeline`, drawn by its first CTA, or (timeline, CTA).
        span: (first, last) modelled cycle that is shown; from the earliest start to the latest end, unless given.
    """
    pairs = [(name, *(one if isinstance(one, tuple) else (one, one.ctas()[0]))) for name, one in drawn.items()]
    span = span or (min(line.start for _, line, _ in pairs), max(line.end for _, line, _ in pairs))
    lanes = [len(line.lanes(cta)) for _, line, cta in pairs]
    figure, axes = canvas(
        9.5, 0.3 * sum(lanes) + 0.75 * len(pairs) + 0.3, len(pairs), 1, squeeze=False, height_ratios=lanes
    )
    for n, (panel, (name, line, cta)) in enumerate(zip(axes[:, 0], pairs)):
        line.plot(cta, span=span, ax=panel)
        panel.set_title("")
        below = panel.get_xlabel()  # the axis, and in a second line what names in the boxes are short for
        label(panel, name, below if n == len(pairs) - 1 else below.partition("\n")[2], "")
        legend = panel.get_legend()
        legend.remove() if n else [text.set_fontsize(8) for text in legend.get_texts()]
    told = {id(line): f"{name}\n{line.table()}" for name, line, _ in pairs}
    return Picture(figure, "\n\n".join(told.values()))


# ---------------------------------------------------------------------------------------------------- packing and masks
def padded_and_packed(lengths: Sequence[int]) -> Picture:
    """Draw the same batch twice: as a padded rectangle, and as one packed row with its offsets. For small batches."""
    lengths = [int(n) for n in lengths]
    longest, total = max(lengths), sum(lengths)
    figure, (upper, lower) = canvas(7.2, 0.32 * len(lengths) + 2.2, 2, 1, height_ratios=(len(lengths), 1.6))
    for b, n in enumerate(lengths):
        _cells(upper, [(i, b) for i in range(n)], CYCLE[b % 7], str(b))
        _cells(upper, [(i, b) for i in range(n, longest)], EMPTY_PLACE, "", hatch="////")
    upper.set_xticks(range(0, longest + 1, max(1, longest // 10)))
    upper.set(
        xlim=(0, longest), ylim=(len(lengths), 0), yticks=np.arange(len(lengths)) + 0.5, yticklabels=range(len(lengths))
    )
    places = f"{len(lengths)} x {longest} = {len(lengths) * longest} places, {total} of them used"
    label(upper, f"padded: {places}", "position", "sequence")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for b, n in enumerate(lengths):
        _cells(lower, [(offsets[b] + i, 0) for i in range(n)], CYCLE[b % 7], str(b))
    lower.set(xlim=(0, max(total, 1)), ylim=(1, 0), yticks=[], xticks=sorted(set(offsets.tolist())))
    label(lower, f"packed: {total} rows; the ticks are the offsets {offsets.tolist()}", "row", "")
    waste = 100 * (1 - total / (len(lengths) * longest))
    words = f"{len(lengths) * longest} padded places, {total} packed rows, {waste:.1f} % of the places empty"
    return Picture(figure, f"lengths {lengths}: {words}\noffsets {offsets.tolist()}")


def _cells(axes: Axes, places: Sequence[tuple[float, float]], color: str, text: str, hatch: str = "") -> None:
    """Draw unit squares at (x, y), each with the same short text."""
    from matplotlib.patches import Rectangle

    edge = "#BBBBBB" if hatch else "white"
    for x, y in places:
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor=edge, hatch=hatch, linewidth=0.8))
        if text:
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=_ink(color), fontsize=8)


def _ink(color: str) -> str:
    """Return black or white, whichever reads better on the color."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * r + 0.587 * g + 0.114 * b > 140 else "white"


def score_grids(
    grids: Mapping[str, Any], *, title: str, xlabel: str = "key", ylabel: str = "query", counts: bool = True
) -> Picture:
    """Draw boolean [queries, keys] tables side by side: a filled square with a dot counts, a pale one is computed for nothing.

    ``counts`` writes beside each how many do.
    """
    shapes = [np.shape(grid) for grid in grids.values()]
    height = min(3.4, max(1.7 * rows / max(columns, 1) for rows, columns in shapes) + 1.3)  # no wider than its column
    figure, panels = canvas(max(2.35 * len(grids) + 0.4, 4.5), max(height, 1.9), 1, len(grids), squeeze=False)
    rows = []
    for axes, (name, grid) in zip(panels[0], grids.items()):
        grid = np.asarray(grid, dtype=bool)
        _grid(axes, grid)
        axes.set_aspect("equal")
        label(axes, f"{name}\n{int(grid.sum())} of {grid.size} count" if counts else name, xlabel, ylabel)
        if len(grids) > 3:  # a heading is as wide as its grid, and would be broken in two
            axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=9, wrap=False)
        rows.append([name, int(grid.sum()), grid.size, 100 * (1 - grid.mean()) if grid.size else 0.0])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    if not counts:
        return Picture(figure, "\n".join([title, *(f"{n}: {_true_pairs(g)}" for n, g in grids.items())]))
    return Picture(figure, f"{title}\n{table(['', 'pairs that count', 'pairs computed', 'wasted %'], rows)}")


def _true_pairs(grid: Any) -> str:
    return " ".join(f"{i}->{j}" for i, j in zip(*np.nonzero(np.asarray(grid))))


def _grid(axes: Axes, grid: np.ndarray) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    height, width = grid.shape
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.imshow(
        grid,
        cmap=ListedColormap([EMPTY_PLACE, BLUE]),
        vmin=0,
        vmax=1,
        extent=(0, width, height, 0),
        interpolation="nearest",
    )
    if grid.size <= 500:
        axes.set_xticks(range(width + 1), minor=True)
        axes.set_yticks(range(height + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
        i, j = np.nonzero(grid)
        axes.plot(j + 0.5, i + 0.5, linestyle="", marker=".", markersize=3, color="white")


def block_map(kinds: Any, *, title: str, block_m: int, block_n: int) -> Picture:
    """Draw what each tile of scores needs (:func:`jfa.masks.block_kinds`): F no mask, P a mask, nothing where it is skipped."""
    kinds = np.asarray(kinds)
    figure, axes = canvas(max(4.5, 0.45 * kinds.shape[1] + 1.0), 0.45 * kinds.shape[0] + 1.1)
    for kind, color, letter, hatch in ((0, EMPTY_PLACE, "", ""), (1, ORANGE, "P", "///"), (2, BLUE, "F", "")):
        _cells(axes, [(j, i) for i, j in zip(*np.nonzero(kinds == kind))], color, letter, hatch)
    axes.set(xlim=(0, kinds.shape[1]), ylim=(kinds.shape[0], 0), aspect="equal")
    axes.set_xticks(np.arange(kinds.shape[1]) + 0.5, range(kinds.shape[1]))
    axes.set_yticks(np.arange(kinds.shape[0]) + 0.5, range(kinds.shape[0]))
    label(axes, title, f"block of {block_n} keys", f"block of {block_m} queries")
    counts = [int((kinds == k).sum()) for k in (2, 1, 0)]
    return Picture(figure, f"{title}\n{counts[0]} full, {counts[1]} partial, {counts[2]} empty (skipped) blocks")


def owners(
    grids: Mapping[str, tuple[Any, str, str]], *, title: str, ylabel: str = "query tile", xlabel: str = "key tile"
) -> Picture:
    """Draw who computes each tile of scores, and who writes the results beside and below them.

    Args:
        grids: heading -> (owner numbers [query tiles, key tiles], name of what each row sums up to, name of what each column
            sums up to); "" leaves that side out. A result whose tiles have one owner takes its color, else it is hatched and
            says how many write to it.
    """
    arrays = {name: np.asarray(grid) for name, (grid, _, _) in grids.items()}
    height, width = (max(a.shape[i] for a in arrays.values()) for i in (0, 1))
    figure, panels = canvas(
        0.62 * (width + 3) * len(grids) + 0.3, 0.55 * (height + 3) + 0.5, 1, len(grids), squeeze=False
    )
    figure.get_layout_engine().set(h_pad=0.1)  # headings keep off the title
    lines_ = [title]
    for axes, (name, (_, beside, below)) in zip(panels[0], grids.items()):
        grid = arrays[name]
        for owner in np.unique(grid):
            cells = [(j, i) for i, j in zip(*np.nonzero(grid == owner))]
            _cells(axes, cells, CYCLE[owner % 7], str(owner))
        if beside:
            said = [_result(axes, grid[i], (grid.shape[1] + 1.2, i), beside, (1, 0)) for i in range(len(grid))]
            lines_.append(f"{name}: {beside} of each query tile written by {', '.join(said)}")
        if below:
            said = [_result(axes, grid[:, j], (j, grid.shape[0] + 1.2), below, (0, 1)) for j in range(grid.shape[1])]
            lines_.append(f"{name}: {below} of each key tile written by {', '.join(said)}")
        axes.set(xlim=(-0.05, width + 2.4), ylim=(height + 2.4, -0.05), aspect="equal")
        axes.set_xticks(np.arange(grid.shape[1]) + 0.5, range(grid.shape[1]))
        axes.set_yticks(np.arange(grid.shape[0]) + 0.5, range(grid.shape[0]))
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        label(axes, name, xlabel, ylabel)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    return Picture(figure, "\n".join(lines_))


def _result(axes: Axes, line: np.ndarray, place: tuple[float, float], words: str, step: tuple[int, int]) -> str:
    """Draw a result as a box at ``place``, with an arrow in direction ``step`` from each of its writers; says who they are."""
    writers = sorted(set(line.tolist()))
    alone = len(writers) == 1
    color = CYCLE[writers[0] % 7] if alone else EMPTY_PLACE
    _cells(axes, [place], color, words if alone else f"{words}\n{len(writers)} add", hatch="" if alone else "////")
    for n, writer in enumerate(writers):
        along = (n + 1) / (len(writers) + 1)
        end = np.array(place) + along * (1 - np.array(step))
        look = {"arrowstyle": "->", "color": CYCLE[writer % 7], "linewidth": 1.4}
        axes.annotate("", end, end - 1.15 * np.array(step), arrowprops=look)
    return f"program {writers[0]}" if alone else f"{len(writers)} programs"


def strips(samples: Mapping[str, Sequence[float]], *, title: str, xlabel: str, log_x: bool = False) -> Picture:
    """Draw every value of a few samples as a dot, one line per sample: how far apart they are, and whether they differ at all."""
    figure, axes = canvas(8.0, 0.5 * len(samples) + 1.2)
    rows = []
    for i, (name, values) in enumerate(samples.items()):
        values = np.asarray(values, dtype=float)
        spread = np.linspace(-0.22, 0.22, len(values)) if len(set(values.tolist())) > 1 else np.zeros(len(values))
        axes.plot(values, i + spread, linestyle="", marker=MARKERS[i % 7], color=CYCLE[i % 7], markersize=5, alpha=0.8)
        rows.append([name, len(values), len(set(values.tolist())), float(values.min()), float(values.max())])
    if log_x:
        axes.set_xscale("log")
    axes.set(ylim=(len(samples) - 0.5, -0.5), yticks=range(len(samples)), yticklabels=list(samples))
    axes.grid(alpha=0.3, axis="x")
    label(axes, title, xlabel, "")
    return Picture(figure, f"{title}\n{table(['', 'values', 'different ones', 'smallest', 'largest'], rows)}")


def rulers(
    marks: Mapping[str, Sequence[float]], *, title: str, xlabel: str, xlim: tuple[float, float] | None = None
) -> Picture:
    """Draw the numbers that formats have as the marks of rulers, one below the other over one logarithmic axis.

    Args:
        marks: name -> positive numbers.
        xlim: the stretch that is shown; all of it unless given.
    """
    figure, axes = canvas(9.0, 0.55 * len(marks) + 1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    rows = []
    for i, (name, values) in enumerate(marks.items()):
        values = np.sort(np.asarray(values, dtype=float))
        axes.vlines(values, i - 0.3, i + 0.3, color=CYCLE[i % 7], linestyle=DASHES[0], linewidth=1.2)
        axes.hlines(i + 0.3, values[0], values[-1], color=CYCLE[i % 7], linewidth=2.5)
        rows.append([name, len(values), float(values[0]), float(values[-1])])
    axes.set(ylim=(len(marks) - 0.5, -0.5), yticks=range(len(marks)), yticklabels=list(marks))
    if xlim is not None:
        axes.set_xlim(*xlim)
    axes.grid(alpha=0.3, axis="x")
    label(axes, title, xlabel, "")
    return Picture(figure, f"{title}\n{table(['', 'marks', 'smallest', 'largest'], rows)}")


def band_planes(shown: Mapping[str, tuple[int, int, int, int]], *, title: str) -> Picture:
    """Draw the pairs of a band and the two lines that bound it, one panel per band.

    Args:
        shown: heading -> (len_q, len_kv, lo, hi): query i sees keys i + lo .. i + hi. A side far outside the grid has no line.
    """
    tallest = max(len_q / len_kv for len_q, len_kv, _, _ in shown.values())
    figure, panels = canvas(2.5 * len(shown) + 0.6, max(3.3, 1.3 + 1.9 * tallest), 1, len(shown), squeeze=False)
    rows = []
    for axes, (name, (len_q, len_kv, lo, hi)) in zip(panels[0], shown.items()):
        distance = np.arange(len_kv) - np.arange(len_q)[:, None]
        grid = (distance >= lo) & (distance <= hi)
        _grid(axes, grid)
        ends = np.array([0, len_q])
        for c, edge, words, color, dashes in ((lo, -1, "lo", VERMILLION, "-"), (hi, 1, "hi", GREEN, "--")):
            if -len_q < c < len_kv:
                axes.plot(ends + c + edge, ends, color=color, linestyle=dashes, linewidth=2, label=words, clip_on=True)
        axes.set(xlim=(0, len_kv), ylim=(len_q, 0), aspect="equal")
        label(axes, f"{name}\nlo {_side(lo)}, hi {_side(hi)}", "key j", "query i")
        rows.append([name, len_q, len_kv, _side(lo), _side(hi), int(grid.sum()), int((~grid.any(1)).sum())])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    return Picture(
        figure, f"{title}\n{table(['', 'queries', 'keys', 'lo', 'hi', 'pairs', 'rows that see nothing'], rows)}"
    )


def _side(c: int) -> str:
    return "open" if abs(c) > 1 << 20 else str(c)


# ------------------------------------------------------------------------------------------------------ online softmax
def online_walk(scores: Sequence[float], block: int) -> Picture:
    """Draw one query's scores in blocks: the running maximum m above, the running sum l and its rescaling below."""
    scores = np.asarray(scores, dtype=float)
    figure, (upper, lower) = canvas(7.2, 4.2, 2, 1, sharex=True)
    steps = _online_steps(scores, block)
    for n, (m, _, kept, added, before) in enumerate(steps):
        x = np.arange(n * block, min((n + 1) * block, len(scores)))
        upper.plot(x, scores[x], linestyle="", marker="o", color=BLUE, label="score" if n == 0 else "_")
        upper.hlines(
            m, x[0] - 0.5, x[-1] + 0.5, color=VERMILLION, linewidth=2, label="running max m" if n == 0 else "_"
        )
        _sum_bars(lower, x.mean(), block, before, kept, added, first=n == 0)
    for axes in (upper, lower):
        for border in range(block, len(scores), block):
            axes.axvline(border - 0.5, color="#AAAAAA", linewidth=0.8, linestyle=":")
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    lower.margins(y=0.15)
    label(upper, "the maximum only ever rises", "", "score")
    label(lower, "when it rises, the sum so far shrinks by exp(m_old - m_new)", "key", "running sum l")
    rows = [[n, m, factor, kept, added, kept + added] for n, (m, factor, kept, added, _) in enumerate(steps)]
    return Picture(figure, table(["block", "m", "factor", "l kept", "l added", "l"], rows))


def _online_steps(scores: np.ndarray, block: int) -> list[tuple[float, float, float, float, float]]:
    """Return (m, factor, l kept, l added, l before) after each block of the online softmax."""
    m, l, steps = -np.inf, 0.0, []
    for start in range(0, len(scores), block):
        part = scores[start : start + block]
        new_m = max(m, float(part.max()))
        factor = float(np.exp(m - new_m))
        added = float(np.exp(part - new_m).sum())
        steps.append((new_m, factor, l * factor, added, l))
        m, l = new_m, l * factor + added
    return steps


def _sum_bars(axes: Axes, middle: float, block: int, before: float, kept: float, added: float, *, first: bool) -> None:
    """Draw left l as it was, right what is kept of it, and the block's own sum on top."""
    names = ("l before", "l before x factor", "this block's sum") if first else ("_", "_", "_")
    left, right, width = middle - block / 6, middle + block / 6, block / 4
    axes.bar(left, before, width, color=EMPTY_PLACE, hatch="////", edgecolor="#888888", label=names[0])
    axes.bar(right, kept, width, color=ORANGE, hatch="...", edgecolor="white", label=names[1])
    axes.bar(right, added, width, bottom=kept, color=GREEN, label=names[2])
    axes.text(right, kept + added, f"{kept + added:.2f}", ha="center", va="bottom", fontsize=8)


# ---------------------------------------------------------------------------------------------------------- schedules
def worker_loads(assignments: Mapping[str, Sequence[Sequence[int]]], costs: Sequence[float]) -> Picture:
    """Draw one panel per schedule: each worker's tiles end to end; the dashed line is the mean load that no schedule beats."""
    costs = np.asarray(costs, dtype=float)
    figure, panels = canvas(
        3.2 * len(assignments) + 0.6, 3.0, 1, len(assignments), sharex=True, sharey=True, squeeze=False
    )
    rows = []
    for axes, (name, assignment) in zip(panels[0], assignments.items()):
        loads = [float(costs[list(mine)].sum()) for mine in assignment]
        for w, mine in enumerate(assignment):
            left = 0.0
            for n, t in enumerate(mine):
                axes.barh(
                    w, costs[t], left=left, color=CYCLE[n % 7], hatch=HATCHES[n % 7], edgecolor="white", height=0.8
                )
                left += costs[t]
        axes.axvline(np.mean(loads), color="black", linestyle="--", linewidth=1)
        label(axes, f"{name}: ends at {max(loads):g}", "cost", "worker" if not rows else "")
        rows.append([name, max(loads), float(np.mean(loads)), max(loads) / np.mean(loads), max(loads) - min(loads)])
    panels[0][0].invert_yaxis()
    panels[0][0].set_yticks(range(len(assignment)))
    return Picture(figure, table(["schedule", "makespan", "mean load", "imbalance", "range"], rows))


def gantt(
    runs: Mapping[str, Sequence[Sequence[tuple[str, float, float]]]],
    *,
    title: str,
    xlabel: str,
    bound: tuple[float, str] | None = None,
) -> Picture:
    """Draw which worker ran which tile when, one panel per run over a common axis; a dashed line marks each run's end.

    Args:
        runs: heading -> per worker its (tile, begin, end), in any order. Color and hatch tell a worker's first tile from its
            second and so on; a tile's name is written into its box where it fits.
        bound: (x, words) of a dotted line that no run can end before.
    """
    workers = [len(lines) for lines in runs.values()]
    height = 0.27 * sum(workers) + 0.6 * len(runs) + 0.5
    figure, panels = canvas(9.5, height, len(runs), 1, sharex=True, squeeze=False, height_ratios=workers)
    ends = {name: max((end for line in lines for _, _, end in line), default=0.0) for name, lines in runs.items()}
    last = max([*ends.values(), bound[0] if bound else 0.0])
    rows = []
    for n, (axes, (name, lines)) in enumerate(zip(panels[:, 0], runs.items())):
        for w, line in enumerate(lines):
            _gantt_line(axes, w, line, last)
            spent = sum(end - begin for _, begin, end in line)
            idle = 1 - spent / ends[name] if ends[name] else 0.0
            tiles = ", ".join(tile for tile, _, _ in sorted(line, key=lambda t: t[1]))
            rows.append([name, w, tiles, spent, f"{idle:.0%}"])
        axes.axvline(ends[name], color=BLACK, linestyle="--", linewidth=1)
        if bound:
            axes.axvline(bound[0], color=BLACK, linestyle=":", linewidth=1.2, label=bound[1] if n == 0 else None)
        axes.set(xlim=(0, 1.02 * last), ylim=(len(lines) - 0.4, -0.6), yticks=range(len(lines)))
        label(axes, f"{name}: ends at {ends[name]:,.0f}", xlabel if n == len(runs) - 1 else "", "worker")
    if bound:
        figure.legend(loc="outside upper right", frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return Picture(figure, f"{title}\n{table(['run', 'worker', 'tiles', 'busy', 'idle'], rows)}")


def _gantt_line(axes: Axes, row: int, line: Sequence[tuple[str, float, float]], last: float) -> None:
    """Draw one worker's tiles at the height ``row``; ``last`` is the axis' end, which decides what fits into a box."""
    for n, (tile, begin, end) in enumerate(sorted(line, key=lambda t: t[1])):
        color, hatch = CYCLE[n % 7], HATCHES[n % 7]
        axes.broken_barh([(begin, end - begin)], (row - 0.4, 0.8), facecolor=color, hatch=hatch, edgecolor="white")
        if (end - begin) / last * 95 >= len(tile) + 1:
            back = {"facecolor": color, "edgecolor": "none", "pad": 2.0}
            look = {"ha": "center", "va": "center", "fontsize": 8, "color": _ink(color), "bbox": back}
            axes.text((begin + end) / 2, row, tile, **look)


THIN = 40  # a hold of fewer columns than one in so many would be too thin to see


class Hold(NamedTuple):
    """Tensor-memory columns [first, first + columns) in use from ``begin`` to ``end``; ``words``: their content."""

    first: int
    columns: int
    begin: float
    end: float
    owner: str
    words: str = ""


def tmem_map(
    holds: Sequence[Hold],
    *,
    title: str,
    xlabel: str = "modelled cycles",
    columns: int = 512,
    span: tuple[float, float] | None = None,
) -> Picture:
    """Draw who holds which columns of tensor memory when: time to the right, columns upwards.

    Args:
        holds: in any order. Color and hatch tell owners apart, in the order of their first appearance.
        columns: height of the map.
        span: (first, last) time that is shown; from the earliest begin to the latest end, unless given.

    Raises:
        ValueError: two holds share a column at a time, or one lies outside the map.
    """
    _check_holds(holds, columns)
    lo, hi = span or (min(h.begin for h in holds), max(h.end for h in holds))
    shown = sorted((h for h in holds if h.end > lo and h.begin < hi), key=lambda h: (h.begin, h.first))
    owners_ = list(dict.fromkeys(h.owner for h in shown))
    figure, axes = canvas(9.5, 4.2)
    for h in shown:
        _hold(axes, h, owners_.index(h.owner) % 7, (lo, hi), columns)
    for look, owner in enumerate(owners_):
        axes.broken_barh([], (0, 1), facecolor=CYCLE[look % 7], hatch=HATCHES[look % 7], edgecolor="white", label=owner)
    borders = {0, columns, *(x for h in shown if h.columns >= columns / THIN for x in (h.first, h.first + h.columns))}
    axes.set(xlim=(lo, hi), ylim=(0, columns), yticks=sorted(borders))
    axes.set_facecolor(EMPTY_PLACE)
    figure.legend(loc="outside lower center", ncols=len(owners_), frameon=False, fontsize=8)
    label(axes, title, xlabel, "tensor-memory column")
    rows = [[f"{h.first}..{h.first + h.columns - 1}", h.begin, h.end, h.owner, h.words] for h in shown]
    rows = [[place, f"{begin:,.0f}", f"{end:,.0f}", owner, words] for place, begin, end, owner, words in rows]
    return Picture(figure, f"{title}\n{table(['columns', 'from', 'to', 'owner', 'what'], rows)}")


def _hold(axes: Axes, h: Hold, look: int, span: tuple[float, float], columns: int) -> None:
    """Draw one hold; one of very few columns as a thick line with its words above, else they stand inside if they fit."""
    lo, hi = span
    begin, end = max(h.begin, lo), min(h.end, hi)
    if h.columns < columns / THIN:
        axes.plot([begin, end], [h.first + h.columns / 2] * 2, color=CYCLE[look], linewidth=4, solid_capstyle="butt")
        axes.annotate(
            h.words, ((begin + end) / 2, h.first), (0, 4), textcoords="offset points", ha="center", fontsize=8
        )
        return
    axes.broken_barh(
        [(begin, end - begin)], (h.first, h.columns), facecolor=CYCLE[look], hatch=HATCHES[look], edgecolor="white"
    )
    if (end - begin) / (hi - lo) * 120 >= len(h.words) + 1 and h.words:  # 120 characters fill the width
        back = {"facecolor": CYCLE[look], "edgecolor": "none", "pad": 1.5}
        words = {"ha": "center", "va": "center", "fontsize": 8, "color": _ink(CYCLE[look]), "bbox": back}
        axes.text((begin + end) / 2, h.first + h.columns / 2, h.words, **words)


def _check_holds(holds: Sequence[Hold], columns: int) -> None:
    """Raise ValueError unless each column has at most one owner at a time."""
    for n, a in enumerate(holds):
        if a.first < 0 or a.columns <= 0 or a.first + a.columns > columns or a.end < a.begin:
            raise ValueError(f"{a} does not lie in a map of {columns} columns, or ends before it begins")
        for b in holds[:n]:
            apart = a.first + a.columns <= b.first or b.first + b.columns <= a.first
            if not apart and a.begin < b.end and b.begin < a.end:
                raise ValueError(f"{b} and {a} share a column at a time")


# --------------------------------------------------------------------------------------------------- deadlocks and races
def wait_graph(error: Any, *, title: str = "who waits for whom") -> Picture:
    """Draw a deadlock of the emulator: each waiting task, its barrier, and from whom that barrier's next arrival is due.

    A cycle is drawn bold: each task in it waits for the next. A chain may also end, at a task that has ended or at a
    barrier where no task arrives: then an arrival is missing in the code. Arrows are dashed where nobody has arrived yet:
    they come from the code.

    Args:
        error: a :class:`jfa.emulator.DeadlockError`, or another error whose ``waits`` are not empty (ValueError).
    """
    if not error.waits:
        raise ValueError(f"this {type(error).__name__} is no deadlock: nobody waits")
    due = {wait.task: wait.came or wait.due for wait in error.waits}
    cycle = _cycle(due)
    gone = [name for name in dict.fromkeys(name for names in due.values() for name in names) if name not in due]
    rows = {name: n for n, name in enumerate([*due, *gone])}
    figure, axes = canvas(9.0, 0.85 * len(rows) + 0.7)
    for name, n in rows.items():
        look = {"facecolor": EMPTY_PLACE, "edgecolor": "#888888"} if name in gone else {}
        _named_box(axes, (0.0, n), name, "has ended" if name in error.ended else "", **({"facecolor": SKY} | look))
    for wait in error.waits:
        _wait_row(axes, wait, rows, cycle)
    axes.set(xlim=(-1.3, 5.6), ylim=(len(rows) - 0.4, -0.6))
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10, wrap=True)
    said = [f"{w.task} waits for {w.on}{_who_comes(w, error.ended)}" for w in error.waits]
    if cycle:
        said.append("cycle: " + " -> ".join([*cycle, cycle[0]]))
    else:
        said.append("no cycle: the chain ends where nobody arrives, or where the one who should has ended")
    return Picture(figure, "\n".join([title, *said]))


def _who_comes(wait: Any, ended: Sequence[str]) -> str:
    names = " and ".join(f"{name}{' (has ended)' if name in ended else ''}" for name in wait.came or wait.due)
    if wait.came:
        return f", where {names} arrived before"
    return f", where nobody has arrived yet{'; ' + names + ' should' if names else ''}"


def _cycle(due: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a cycle of the graph name -> names, [] if there is none: the first found by depth."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done or name not in due:
            return []
        found = next(filter(None, (search(other, [*path, name]) for other in due[name])), [])
        done.add(name)
        return found

    return next(filter(None, (search(name, []) for name in due)), [])


def _named_box(axes: Axes, middle: tuple[float, float], name: str, words: str = "", **look: Any) -> None:
    """Draw a box with a name and a line of words, 2.2 wide and 0.6 high."""
    from matplotlib.patches import FancyBboxPatch

    x, y = middle
    look = {"edgecolor": BLACK, "linewidth": 1.0, "boxstyle": "round,pad=0.02"} | look
    axes.add_patch(FancyBboxPatch((x - 1.1, y - 0.28), 2.2, 0.56, **look))
    axes.text(x, y, f"{name}\n{words}" if words else name, ha="center", va="center", fontsize=8)


def _wait_row(axes: Axes, wait: Any, rows: Mapping[str, int], cycle: Sequence[str]) -> None:
    """Draw the barrier a task waits for, the arrow to it, and those to whom its next arrival is due."""
    n, after = rows[wait.task], dict(zip(cycle, [*cycle[1:], *cycle[:1]]))
    names = wait.came or wait.due
    state = wait.state.partition(": ")[2] or wait.state
    _named_box(axes, (4.2, n), wait.on, _short(state), facecolor=YELLOW, boxstyle="square,pad=0.02")
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
    strong = {"color": VERMILLION, "linewidth": 2.4}
    look = strong if wait.task in after else {"color": BLACK, "linewidth": 1.2}
    axes.annotate("", (3.05, n - 0.12), (1.15, n - 0.12), arrowprops=arrow | look)
    axes.text(2.1, n - 0.15, "waits for", ha="center", va="bottom", fontsize=8)
    if not wait.came:
        words = "nobody has arrived yet" + ("" if names else ", and no code was found that does")
        axes.text(4.2, n + 0.41, words, ha="center", va="center", fontsize=8, color=VERMILLION)
    for name in names:
        look = strong if after.get(wait.task) == name else {"color": "#666666", "linewidth": 1.2}
        dashes = {"linestyle": "-" if wait.came else (0, (4, 3))}
        axes.annotate("", (1.15, rows[name] + 0.12), (3.05, n + 0.12), arrowprops=arrow | look | dashes)


def _short(state: str) -> str:
    """Return a barrier's state in at most 34 characters per line."""
    import textwrap

    return "\n".join(textwrap.wrap(state.replace(" in progress", ""), 36)[:2])


def race_clocks(error: Any, *, title: str = "two accesses that nothing orders") -> Picture:
    """Draw the vector clocks of a race's two accesses: how many steps of each task and engine either knew of.

    The earlier access is known to the later one if the later clock reaches the earlier one's own step. In a race it does not.

    Args:
        error: a :class:`jfa.emulator.RaceError`, or another error whose ``accesses`` are not empty (ValueError).
    """
    if not error.accesses:
        raise ValueError(f"this {type(error).__name__} is no race: it has no pair of accesses")
    names = [n for n in error.accesses[0].clock if any(touch.clock[n] for touch in error.accesses)]
    figure, axes = canvas(9.0, 0.42 * len(names) + 1.7)
    most = max(max(touch.clock.values()) for touch in error.accesses)
    for n in range(len(names)):
        axes.hlines(n, 0, most, color="#CCCCCC", linewidth=1)
    said = []
    for when, touch, color, marker, shift in zip(
        ("earlier", "later"), error.accesses, (BLUE, VERMILLION), "os", (-0.14, 0.14)
    ):
        what = f"{when}: {'write' if touch.write else 'read'} of {touch.buffer} by {touch.actor}"
        steps = [touch.clock[name] for name in names]
        rows = np.arange(len(names)) + shift
        axes.plot(steps, rows, color=color, marker=marker, linestyle="--" if when == "later" else "-", label=what)
        axes.plot(
            touch.clock[touch.line],
            names.index(touch.line) + shift,
            marker="*",
            markersize=17,
            color=color,
            linestyle="",
        )
        said.append(what)
    first, later = error.accesses
    gap = f"{when} knows {later.clock[first.line]} of the {first.clock[first.line]} steps of {first.line}"
    axes.axhspan(names.index(first.line) - 0.4, names.index(first.line) + 0.4, color=YELLOW, alpha=0.35, linewidth=0)
    axes.text(most + 0.12, names.index(first.line), gap.replace(" of ", " of\n", 1), va="center", fontsize=8)
    axes.set(xlim=(-0.2, most * 1.45 + 0.5), ylim=(len(names) - 0.4, -0.6), yticks=range(len(names)), yticklabels=names)
    axes.set_xticks(range(0, most + 1, max(1, most // 8)))
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    label(
        axes,
        title,
        "steps of each line that the access knows of (a star is the access's own step)",
        "line of the clocks",
    )
    rows = [[name, first.clock[name], later.clock[name]] for name in names]
    return Picture(figure, "\n".join([title, *said, gap, table(["line", "earlier knows", "later knows"], rows)]))


def _code(line: str) -> str:
    """Return a line of code without its comment, cut to 64 characters."""
    code = line.partition("  #")[0]
    return code if len(code) <= 64 else code[:63] + "…"


FOUND = {  # how a broken synchronization was found: letter, color, hatch
    "DeadlockError": ("D", BLUE, ""), "RaceError": ("R", VERMILLION, ""), "PoisonError": ("U", ORANGE, "..."),
    "PhaseError": ("P", GREEN, ""), "OverArrivalError": ("A", PURPLE, "xx"), "ExpectBytesError": ("B", SKY, "///"),
    "MissingFenceError": ("F", YELLOW, ""), "InFlightError": ("I", "#BBBBBB", ""), "wrong result": ("W", BLACK, ""),
    "warning": ("w", "#FFFFFF", "..."), "": ("-", "#FFFFFF", "////"),
}  # fmt: skip
SAID = {
    "PoisonError": "undefined value", "OverArrivalError": "over-arrival", "ExpectBytesError": "bytes", "PhaseError": "phase",
    "MissingFenceError": "missing fence", "DeadlockError": "deadlock", "RaceError": "race", "InFlightError": "still in flight",
    "": "not found",
}  # fmt: skip


def sweep_map(result: Any, *, title: str = "each synchronization broken in turn") -> Picture:
    """Draw a sweep: a row per synchronization, a column per way to break it, and how the emulator found it.

    Args:
        result: a :class:`jfa.emulator.sweep.Result`.
    """
    faults = list(dict.fromkeys(mutant.how for mutant in result.mutants))
    files = list(dict.fromkeys(mutant.site.file for mutant in result.mutants))
    sites = sorted({mutant.site for mutant in result.mutants}, key=lambda site: (files.index(site.file), site.line))
    figure, axes = canvas(9.0, 0.27 * len(sites) + 1.9)
    seen: dict[str, tuple] = {}
    for mutant in result.mutants:
        letter, color, hatch = look = FOUND.get(mutant.found, ("?", EMPTY_PLACE, ""))
        seen.setdefault(mutant.found, look)
        place = faults.index(mutant.how), sites.index(mutant.site)
        _cells(axes, [place], color, "", hatch)
        back = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
        axes.text(
            place[0] + 0.5, place[1] + 0.5, letter, ha="center", va="center", fontsize=8, color=_ink(color), bbox=back
        )
    axes.set(xlim=(0, len(faults)), ylim=(len(sites), 0))
    axes.set_xticks(np.arange(len(faults)) + 0.5, faults)
    axes.set_yticks(np.arange(len(sites)) + 0.5, [f"{_code(s.text)}  (line {s.line})" for s in sites])
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    label(axes, "", "how it is broken", "synchronization")
    axes.tick_params(length=0)
    from matplotlib.patches import Patch

    keys = [
        Patch(facecolor=color, hatch=hatch, edgecolor="#888888", label=f"{letter}: {SAID.get(found, found)}")
        for found, (letter, color, hatch) in seen.items()
    ]
    if len(result.mutants) < len(sites) * len(faults):
        keys.append(Patch(facecolor="white", edgecolor="#888888", label="empty: does not apply"))
    figure.legend(handles=keys, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    found = {(m.site, m.how): SAID.get(m.found, m.found) for m in result.mutants}
    rows = [[s.line, _code(s.text), *(found.get((s, how), "") for how in faults)] for s in sites]
    words = f"{len(result.mutants)} broken kernels, {len(result.found)} found"
    return Picture(figure, f"{title}: {words}\n{table(['line', 'synchronization', *faults], rows)}")
