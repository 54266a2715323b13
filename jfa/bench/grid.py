"""Kinds of problems x head dims x lengths: every backend and peer is timed on each, to see where a rule or a kernel is
slow.

No kernel was tuned on the cells' shapes. A cell's name is "kind/head dim/length". Compiling takes longer than timing,
so every cell first runs once in a separate process, which fills Triton's cache on disk.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from jfa.attention import explain
from jfa.bench import peers, runner, shapes
from jfa.bench.shapes import Shape
from jfa.layout import log_uniform_lengths, pareto_lengths

TOKENS = 65536  # of a cell with sequences of its own queries
WIDTH = 1024  # heads x head dim
DIMS = (64, 96, 128, 192, 256)
LENGTHS = (64, 512, 4096)
PEERS = ("fa2", "fa4")
KEPT = ("fa4",)  # peers that can keep what they compile on disk (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1)
BACKENDS = ("hopper", "blackwell", "portable")


def _around(length: int, tokens: int = TOKENS) -> Callable[[], Tensor]:
    """Return lengths between an eighth of ``length`` and all of it, about ``tokens`` in all."""
    return lambda: log_uniform_lengths(max(1, tokens * 2 // length), max(1, length // 8), length, seed=length)


def _same(count: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.full((count,), length, dtype=torch.int32)


def _keys_from(least: int) -> Callable[[], Tensor]:
    return lambda: log_uniform_lengths(64, least, 8192, seed=least)


def _pareto() -> Tensor:
    return pareto_lengths(512, 64, 4096, alpha=1.0, seed=2)


def _one_among_many() -> Tensor:
    lengths = torch.full((128,), 64, dtype=torch.int32)
    lengths[77] = 32768
    return lengths


def cells() -> list[Shape]:
    """Return the grid's shapes."""
    found = []
    for dim in DIMS:
        heads = max(2, WIDTH // dim // 2 * 2)
        for length in LENGTHS:
            own = Shape(f"self/{dim}/{length}", heads, heads, dim, _around(length))
            found += [own, replace(own, name=f"causal/{dim}/{length}", causal=True)]
        found.append(Shape(f"pma32/{dim}/512", heads, heads, dim, _pareto, shared_q=32))
        found.append(replace(found[-1], name=f"pma128/{dim}/512", shared_q=128))
    for dim in (64, 128, 256):
        grouped = Shape(f"gqa-causal/{dim}/4096", 4 * 1024 // dim, 1024 // dim, dim, _around(4096), causal=True)
        found += [grouped, replace(grouped, name=f"window/{dim}/4096", window_size=256, causal=False)]
    for dim in (64, 128):
        for queries in (1, 4, 16):
            found.append(Shape(f"few-{queries}/{dim}/8192", 32, 8, dim, _keys_from(1024), _same(64, queries)))
        found.append(Shape(f"cross-256/{dim}/8192", 8, 8, dim, _keys_from(2048), _same(64, 256)))
        short = Shape(f"short/{dim}/256", 8, 8, dim, lambda: log_uniform_lengths(2048, 8, 256, seed=9))
        found += [short, replace(short, name=f"short-causal/{dim}/256", causal=True)]
        found.append(replace(short, name=f"short-grouped/{dim}/256", heads=16, kv_heads=4, causal=True))
    found.append(Shape("long-causal/128/65536", 8, 8, 128, _same(1, 65536), causal=True))
    found.append(Shape("one-long/128/32768", 8, 8, 128, _one_among_many, causal=True))
    return found


def facts(shape: Shape) -> dict:
    """Return what a rule may look at: sizes, not lengths."""
    len_q, len_kv = shape.lengths()
    return {
        "name": shape.name,
        "batches": len_kv.numel(),
        "rows_q": shape.shared_q or int(len_q.sum()),
        "rows_kv": int(len_kv.sum()),
        "longest_q": int(len_q.max()),
        "longest_kv": int(len_kv.max()),
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "shared_q": shape.shared_q,
        "causal": shape.causal,
        "window_size": shape.window_size,
        "least_mb": [shape.least_bytes(backward) / 1e6 for backward in (False, True)],
    }


def names(device: torch.device, others: Iterable[str] = PEERS, backends: Iterable[str] | None = None) -> list[str]:
    """Return the names of our backends (None: those available here), then the peers'."""
    kinds = backends or [b for b in BACKENDS if device.type == "cuda" and _there(b, device)] or ["reference"]
    return [*(f"jfa:{b}" for b in kinds), *others]


def builder(name: str) -> Callable:
    """Return what :func:`jfa.bench.runner.measure` builds an implementation with."""
    return partial(peers.jfa, backend=name.removeprefix("jfa:")) if name.startswith("jfa:") else peers.PEERS[name]


def _there(backend: str, device: torch.device) -> bool:
    """Return whether a backend takes bf16 problems on a device; nothing is launched."""
    inputs = shapes.make_inputs(Shape("probe", 1, 1, 64, _same(1, 16)), device)
    try:
        explain(*inputs.arguments, backend=backend)
    except ValueError:
        return False
    return True


def measure(
    chosen: list[Shape],
    device: torch.device,
    runs: int = 10,
    jobs: int = 0,
    others: Iterable[str] = PEERS,
    backends: Iterable[str] | None = None,
) -> Iterator[runner.Timing]:
    """Yield a timing per cell and implementation. ``jobs``: processes that compile first; 0: none."""
    all_of_them = names(device, others, backends)
    if jobs:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            work = [(shape.name, name) for shape in chosen for name in all_of_them if name in KEPT or "jfa:" in name]
            for _ in pool.imap_unordered(_prepare, work, 1):
                pass
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in chosen:
        inputs = shapes.make_inputs(shape, device, dtype)
        for name in all_of_them:
            yield runner.measure(inputs, name, builder(name), runs)
        del inputs


def _prepare(job: tuple[str, str]) -> None:
    """Compile, in a child: run forward and backward."""
    shape = next(s for s in cells() if s.name == job[0])
    device = torch.device("cuda")
    runner.measure(shapes.make_inputs(shape, device), job[1], builder(job[1]), runs=1)


def choice(shape: Shape, device: torch.device) -> str:
    """Return the backend that ``auto`` takes."""
    inputs = shapes.make_inputs(shape, device)
    options = dict(broadcast_q=bool(shape.shared_q), causal=shape.causal, window_size=shape.window_size)
    return explain(*inputs.arguments, **options).backend


def as_json(chosen: list[Shape], timings: list[runner.Timing], device: torch.device, extra: dict) -> dict:
    """Return a result file's contents: environment, the cells' sizes with what ``auto`` took, and "times".

    Not "timings": these shapes are no named ones, and readers of other results pass the file by.
    """
    result = runner.as_json(timings, device, extra)
    known = {shape.name: facts(shape) | {"auto": choice(shape, device)} for shape in chosen}
    return {"times" if key == "timings" else key: x for key, x in result.items()} | {"cells": known}


def drawn(result: dict) -> str:
    """Return the grid as text: per cell and pass what ``auto`` took and its time, which of ours is faster, and the best peer."""
    lines = [f"{'cell':26}{'pass':>5} {'auto':10}{'ms':>9}{'fastest':>10}{'peer':>6}  peer's time / ours (| is 1)"]
    for name, cell in result["cells"].items():
        for way in ("forward", "backward"):
            row = _row(result, name, cell["auto"], way)
            if row:
                lines.append(f"{name:26}{way[:3]:>5} " + row)
    return "\n".join(lines)


def _row(result: dict, name: str, auto: str, way: str) -> str:
    times = {t["name"]: t[f"{way}_ms"] for t in result["times"] if t["shape"] == name and t[f"{way}_ms"]}
    ours = {n: ms for n, ms in times.items() if n.startswith("jfa")}
    mine = ours.get(f"jfa:{auto}")
    if mine is None:
        return ""
    best = min(ours, key=ours.get)
    others = {n: ms for n, ms in times.items() if n not in ours}
    peer = min(others, key=others.get, default=None)
    ratio = others[peer] / mine if peer else None
    fastest = "" if best == f"jfa:{auto}" else f"{best[4:]} {mine / ours[best]:.2f}"
    return f"{auto:10}{mine:9.3f} {fastest:>14}{peer or '-':>5} " + (f"{ratio:5.2f} {_bar(ratio)}" if ratio else "")


def _bar(ratio: float, width: int = 20) -> str:
    """Return a bar that reaches the mark in its middle where the ratio is 1."""
    filled = min(2 * width, round(ratio * width))
    return "".join("|" if i == width else "#" if i < filled else "." for i in range(2 * width + 1)) + (
        "" if ratio >= 1 else "  behind"
    )
