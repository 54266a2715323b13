"""The portable variants that `jfa compile` reports: the tiles of the table, head dim 128 and 64, bf16, contiguous
inputs."""

from __future__ import annotations

from dataclasses import replace

from jfa.kernels.compile_config import CompileConfig, typed
from jfa.kernels.portable.backward import dkdv_kernel, dq_kernel
from jfa.kernels.portable.config import TILES, Config
from jfa.kernels.portable.forward import forward_kernel
from jfa.kernels.portable.resident import resident_kernel

KERNELS = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dq": dq_kernel,
    "resident": resident_kernel,
}
# Recorded spill bytes per thread, stores and loads, the most of sm_90 and sm_100: a row of the table may not need more.
SPILLS = {
    "forward-long": 292,
    "wide-dkdv": 252,
    "wide-dq": 272,
    "resident-128": 200,
    "resident-128-sm100": 312,
    "dq-tiny": 104,
}
# The same without TMA, on sm_90: only for tensors that it cannot address.
POINTER_SPILLS = {"forward-short": 40, "dq-short": 140, "dkdv": 540}
# With 128 registers per thread two CTAs fit on a multiprocessor of sm_90: faster on long sequences, though wgmmas then wait.
# Wide head dims fill all registers, with whatever tile. Tiny sequences: three programs beat two whose wgmmas do not wait.
SERIALIZED = ("forward-long", "wide-dkdv", "wide-dq", "dq-tiny", "dq-tiny-d64")
TARGETS = {"wide-dkdv": (90,), "wide-dkdv-sm100": (100,), "resident-128": (90,), "resident-128-sm100": (100,)}
# No gradient of the LSE, no mask, nothing split: what most calls are compiled for.
ABSENT = ("dlse_ptr", "chunks")
USUAL = Config(1, 0, 0, False, False, "tf32")


def compile_configs() -> list[CompileConfig]:
    """Return the variants that `jfa compile` reports."""
    return [
        _config("forward", "forward-short", 128),
        _config("forward", "forward-short", 128, has_hi=True),
        _config("forward", "forward-short", 128, group=4),
        _config("forward", "forward-brief", 128),
        _config("forward", "forward-brief", 128, has_hi=True),
        _config("forward", "forward-brief", 128, group=4),
        _config("forward", "forward-brief-d64", 64),
        _config("forward", "forward-long", 128),
        _config("forward", "forward-short", 64),
        _config("forward", "forward-shared-64", 128),
        _config("forward", "forward-short", 128, split=True),
        _config("forward", "forward-short", 128, pointers=True, has_hi=True),
        _config("dkdv", "dkdv", 128),
        _config("dkdv", "dkdv", 128, has_hi=True),
        _config("dkdv", "dkdv", 128, group=4),
        _config("dkdv", "dkdv", 128, pointers=True, has_hi=True),
        _config("dkdv", "dkdv-d64", 64),
        _config("dkdv", "dkdv-brief-d64", 64),
        _config("dq", "dq-tiny", 128),
        _config("dq", "dq-tiny-d64", 64),
        _config("dq", "dq-short", 128),
        _config("dq", "dq-short", 128, has_lo=True, has_hi=True),
        _config("dq", "dq-short", 128, pointers=True, has_hi=True),
        _config("dq", "dq-long", 128),
        _config("dq", "dq-short", 64),
        _config("dkdv", "wide-dkdv", 256),
        _config("dkdv", "wide-dkdv", 256, has_hi=True),
        _config("dkdv", "wide-dkdv-sm100", 256),
        _config("dq", "wide-dq", 256),
        _config("resident", "resident-64", 128, block_m=32),
        _config("resident", "resident-128", 128),
        _config("resident", "resident-128-sm100", 128),
    ]


def _config(kind: str, row: str, dim: int, pointers: bool = False, **more) -> CompileConfig:
    kernel, tile = KERNELS[kind], TILES[row]
    keep, step = ("block_n", "block_m") if kind == "dkdv" else ("block_m", "block_n")
    cfg = replace(USUAL, **({keep: tile.keep, step: tile.step, "head_dim": dim, "head_dim_v": dim} | more))
    known = {n: None for n in ABSENT if n in kernel.arg_names and not (n == "chunks" and cfg.split)} | {"cfg": cfg}
    boxes = {}
    for name in (n for n in kernel.arg_names if n.endswith("_desc")):
        kept = kind == "forward" and name in ("q_desc", "out_desc")
        heads, rows = cfg.group if kept or kind == "dkdv" else 1, tile.keep if kept else tile.step
        there = not (pointers or kind == "forward" and cfg.group > 1 and name == "q_desc")
        boxes[name] = f"tensordesc<bf16[1, 1, {heads}, {rows // heads}, {dim}]>" if there else None
    tags = ["pointers"] * pointers + [name for name, on in more.items() if on is True]
    tag = "".join(f"-{x}" for x in tags + [f"group{cfg.group}"] * (cfg.group > 1))
    return CompileConfig(
        name=f"portable-{row}-d{dim}{tag}",
        **typed(kernel, known, boxes, aligned=True),
        targets=TARGETS.get(row, (90, 100)),
        num_warps=tile.warps,
        options=dict(num_stages=tile.stages) | ({"maxnreg": tile.registers} if tile.registers else {}),
        max_spill_bytes=(POINTER_SPILLS if pointers else SPILLS).get(row, 0),
        serialized=row in SERIALIZED,
    )
