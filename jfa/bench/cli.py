"""jfa bench: measure the op and its peers on this machine.

    jfa bench                                   the default shapes, the op against every installed peer
    jfa bench --shapes pma32 self --peers fa2 flex --json result.json --plot result.svg
    jfa bench --peers tlx_jfa=/path/to/package --backend hopper
    jfa bench --grid --jobs 15 --json grid.json kinds x head dims x lengths, and where we are behind; --shapes picks cells
    jfa bench --grid --beside fa4.json          a peer that needs a process of its own, timed there and shown here
    jfa bench --host                            how long a small call keeps the host; without a GPU, launches do nothing

Times are medians of device time with the L2 cache cleared; FLOPs count the pairs that the mask allows, nothing else. Memory is
what a pass has at most beyond its inputs and outputs: forward (and what of it the backward needs) | backward.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch

from jfa.bench import grid, host_time, peers, runner, shapes
from jfa.bench.runner import Timing


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="jfa bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(shapes.SHAPES)}")
    p.add_argument(
        "--peers", nargs="*", metavar="NAME", help=f"of {', '.join(peers.PEERS)}, or NAME=PATH of a Python package"
    )
    p.add_argument("--backend", nargs="+", default=["auto"], help="backends of the op to measure")
    p.add_argument("--runs", type=int, default=20, help="timed runs; the median counts")
    p.add_argument("--forward-only", action="store_true")
    p.add_argument("--grid", action="store_true", help="time the grid of jfa/bench/grid.py instead of the named shapes")
    p.add_argument(
        "--jobs", type=int, default=0, help="with --grid: processes that compile all cells before the first is timed"
    )
    p.add_argument(
        "--beside", metavar="FILE", help="a result of --json whose peers join this one's, from the same machine"
    )
    p.add_argument("--host", action="store_true", help="time the host and not the device")
    p.add_argument("--json", metavar="FILE", help="write the result, with GPU, driver, versions and date")
    p.add_argument("--plot", metavar="FILE", help="write a bar chart (svg, png, pdf)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0, or 2 for arguments that name nothing."""
    args = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.host:
        return _host(device, args.json)
    if args.grid:
        return _grid(args, device)
    tiny = {shape.name: shape for shape in shapes.ON_CPU}
    known = shapes.SHAPES | tiny
    wrong = [("shape", n, known) for n in args.shapes or () if n not in known]
    wrong += [("peer", n, peers.PEERS) for n in args.peers or () if n not in peers.PEERS and "=" not in n]
    for kind, name, names in wrong:
        print(f"jfa bench: unknown {kind} {name!r}; known are {', '.join(names)}")
    if wrong:
        return 2
    beside = _beside(args.beside)
    chosen = [known[n] for n in args.shapes or (tiny if device.type == "cpu" else shapes.DEFAULT)]
    if device.type == "cpu":
        print(
            "No CUDA GPU here: this times the PyTorch reference on the CPU. It says nothing about the kernels' speed."
        )
    implementations = _implementations(args, device)
    extra = {"ceilings": runner.ceilings()} if device.type == "cuda" else {}
    timings = []
    for shape in chosen:
        inputs = shapes.make_inputs(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        chooser = {"selection": peers.selection} if shape.sparse else {}
        for name, build in (implementations | chooser).items():
            timings.append(runner.measure(inputs, name, build, args.runs, not args.forward_only))
            print(line(timings[-1]), flush=True)
        del inputs
        timings += [t for t in beside if t.shape == shape.name]
    result = runner.as_json(timings, device, extra)
    print("\n" + table(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)
    return 0


def _host(device: torch.device, json_file: str | None) -> int:
    times = host_time.measure() if device.type == "cuda" else host_time.measure_stubbed()
    if device.type == "cpu":
        print("No CUDA GPU here: launches do nothing, so this is Python, allocations and the autograd engine.")
    print(host_time.table(times))
    if json_file:
        result = {"environment": runner.environment(device), "host": times}
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _grid(args: argparse.Namespace, device: torch.device) -> int:
    cells = grid.cells()
    chosen = [c for c in cells if args.shapes is None or any(c.name.startswith(name) for name in args.shapes)]
    if not chosen:
        print(f"jfa bench: no cell is named so; cells are {', '.join(c.name for c in cells)}")
        return 2
    others, timings = grid.PEERS if args.peers is None else args.peers, []
    extra = {"ceilings": runner.ceilings()} if device.type == "cuda" else {}
    backends = None if args.backend == ["auto"] else args.backend
    for timing in grid.measure(chosen, device, args.runs, args.jobs, others, backends):
        timings.append(timing)
        print(line(timing), flush=True)
    names = {c.name for c in chosen}
    timings += [t for t in _beside(args.beside) if t.shape in names]
    result = grid.as_json(chosen, timings, device, extra)
    print("\n" + grid.drawn(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _beside(file: str | None) -> list[Timing]:
    """Return the peers' timings of another result: ours are left out, since they ran in that process's conditions."""
    if file is None:
        return []
    result = json.loads(Path(file).read_text())
    timings = [Timing(**t) for t in result.get("times", result.get("timings"))]
    return [t for t in timings if not t.name.startswith("jfa")]


def _implementations(args: argparse.Namespace, device: torch.device) -> dict:
    names = args.peers if args.peers is not None else (list(peers.PEERS) if device.type == "cuda" else [])
    ours = {f"jfa:{b}" if b != "auto" else "jfa": functools.partial(peers.jfa, backend=b) for b in args.backend}
    builds = {n.split("=")[0]: peers.from_path(n.split("=", 1)[1]) if "=" in n else peers.PEERS[n] for n in names}
    if device.type == "cpu":
        builds |= {n: peers.on_cpu for n in builds if n != "sdpa"}
    return ours | builds


def line(t: Timing) -> str:
    """Return one timing as a line of text."""
    if t.forward_ms is None:
        return f"{t.shape:14} {t.name:14} {t.note}"
    if t.forward_tflops is None:
        return f"{t.shape:14} {t.name:14} {t.forward_ms:8.3f} ms"
    backward = f"{t.backward_ms:8.3f} ms {t.backward_tflops:6.1f} TFLOP/s" if t.backward_ms else f"- {t.note}"
    memory = "" if t.forward_mb is None else f" | {t.forward_mb:.1f} MB, of these {t.kept_mb:.1f} kept"
    memory += "" if t.backward_mb is None else f" | {t.backward_mb:.1f} MB"
    return f"{t.shape:14} {t.name:14} {t.forward_ms:8.3f} ms {t.forward_tflops:6.1f} TFLOP/s | {backward}{memory}"


def table(result: dict) -> str:
    """Return the result as text: TFLOP/s (a CPU: milliseconds) forward | backward, ratios of the first implementation to others,
    and what bounds it."""
    by_shape: dict[str, list[dict]] = {}
    for t in result["timings"]:
        by_shape.setdefault(t["shape"], []).append(t)
    names = list(dict.fromkeys(t["name"] for t in result["timings"]))
    env = result["environment"]
    unit = "ms" if env["device"] == "CPU" else "TFLOP/s"
    lines = [f"{env['device']}, {env['date']}, torch {env['torch']}, triton {env['triton']}: {unit} forward | backward"]
    lines.append(f"{'shape':14}" + "".join(f"{n:>26}" for n in names) + f"{'of the bound':>18}")
    for shape, row in by_shape.items():
        found = {t["name"]: t for t in row}
        cells = [_cell(found.get(n), row[0], unit, first=i == 0) for i, n in enumerate(names)]
        lines.append(f"{shape:14}" + "".join(f"{c:>26}" for c in cells) + f"{_of_bound(row[0], result):>18}")
    notes = dict.fromkeys(f"{t['name']} on {t['shape']}: {t['note']}" for t in result["timings"] if t["note"])
    return "\n".join(lines + [f"  {n}" for n in notes])


def _cell(t: dict | None, ours: dict, unit: str, first: bool) -> str:
    parts = []
    for way in ("forward", "backward"):
        rate, our_rate = (x[f"{way}_tflops"] if x else None for x in (t, ours))
        ratio = "" if first or not rate or not our_rate else f" ({our_rate / rate:.2f}x)"
        value = f"{t[f'{way}_ms']:.1f}" if rate and unit == "ms" else f"{rate or 0:.0f}"
        parts.append(value + ratio if rate else "-")
    return " | ".join(parts)


def _of_bound(t: dict, result: dict) -> str:
    """Return how near the first implementation is to the larger of its two floors, bytes and FLOPs: 'mem 81% | mma 45%'."""
    if "ceilings" not in result or t["shape"] not in shapes.SHAPES or not t["forward_ms"]:
        return "-"
    parts = []
    for way, backward in (("forward_ms", False), ("backward_ms", True)):
        floors = floors_ms(t["shape"], result["ceilings"], backward)
        kind = max(floors, key=floors.get)
        parts.append(f"{kind} {100 * floors[kind] / t[way]:.0f}%" if t[way] else "-")
    return " | ".join(parts)


def floors_ms(shape: str, ceilings: dict[str, float], backward: bool) -> dict[str, float]:
    """Return the least milliseconds by bytes ("mem") and by FLOPs ("mma") at the measured ceilings."""
    s = shapes.SHAPES[shape]
    return {
        "mem": s.least_bytes(backward) / ceilings["copy_tb_per_s"] / 1e9,
        "mma": s.flops(backward) / ceilings["bf16_tflops"] / 1e9,
    }


def plot(result: dict, path: str) -> None:
    """Draw two bar charts, forward and backward, one group of bars per shape."""
    from jfa import plots

    names = list(dict.fromkeys(t["name"] for t in result["timings"]))
    labels = list(dict.fromkeys(t["shape"] for t in result["timings"]))
    value = {
        (t["shape"], t["name"], w): t[w] or 0.0
        for t in result["timings"]
        for w in ("forward_tflops", "backward_tflops")
    }
    for way in ("forward", "backward"):
        series = {n: [value.get((s, n, f"{way}_tflops"), 0.0) for s in labels] for n in names}
        env = result["environment"]
        picture = plots.bars(
            labels,
            series,
            title=f"{way}, {env['device']}, {env['date']}",
            xlabel="shape",
            ylabel="TFLOP/s (allowed pairs)",
        )
        target = Path(path)
        picture.save(target.with_stem(f"{target.stem}-{way}"))
