"""The portable variants that `jfa compile` reports: the tiles of the table, head dim 128 and 64, bf16, contiguous
inputs."""

from __future__ import annotations

from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.portable.backward import dkdv_kernel, dq_kernel
from jfa.kernels.portable.config import TILES
from jfa.kernels.portable.forward import forward_kernel
from jfa.kernels.portable.resident import resident_kernel

KERNELS = {
    "forward": (forward_kernel, "forward"),
    "dkdv": (dkdv_kernel, "backward"),
    "dq": (dq_kernel, "backward"),
    "resident": (resident_kernel, "resident"),
}
SCALARS = {"scale": "fp32", "sm_scale": "fp32"}
FP32 = ("lse_ptr", "dlse_ptr", "delta_ptr", "dq_partial_ptr", "partial_acc", "partial_ml")
INT32 = ("records", "counts", "chunks", "arrivals")
# Recorded spill bytes per thread, stores and loads, the most of sm_90 and sm_100: a row of the table may not need more.
SPILLS = {"forward-long": 292, "wide-dkdv": 252, "wide-dq": 272, "resident-128": 200, "resident-128-sm100": 312}
# The same without TMA, on sm_90: only for tensors that it cannot address.
POINTER_SPILLS = {"forward-short": 40, "dq-short": 140, "dkdv": 540}
# With 128 registers per thread two CTAs fit on a multiprocessor of sm_90: faster on long sequences, though wgmmas then wait.
# Wide head dims fill all registers, with whatever tile.
SERIALIZED = ("forward-long", "wide-dkdv", "wide-dq")
TARGETS = {"wide-dkdv": (90,), "wide-dkdv-sm100": (100,), "resident-128": (90,), "resident-128-sm100": (100,)}
# No gradient of the LSE, no mask, nothing split: what most calls are compiled for.
USUAL = dict(dlse_ptr=None, chunks=None, GROUP=1, HAS_LO=False, HAS_HI=False, NEGATIVE=False, PRECISION="tf32")


def compile_configs() -> list[CompileConfig]:
    """Return the variants that `jfa compile` reports."""
    return [
        _config("forward", "forward-short", 128),
        _config("forward", "forward-short", 128, HAS_HI=True),
        _config("forward", "forward-short", 128, GROUP=4),
        _config("forward", "forward-long", 128),
        _config("forward", "forward-short", 64),
        _config("forward", "forward-shared-64", 128),
        _config("forward", "forward-short", 128, SPLIT=True),
        _config("forward", "forward-short", 128, POINTERS=True, HAS_HI=True),
        _config("dkdv", "dkdv", 128),
        _config("dkdv", "dkdv", 128, HAS_HI=True),
        _config("dkdv", "dkdv", 128, GROUP=4),
        _config("dkdv", "dkdv", 128, POINTERS=True, HAS_HI=True),
        _config("dkdv", "dkdv-d64", 64),
        _config("dq", "dq-short", 128),
        _config("dq", "dq-short", 128, HAS_LO=True, HAS_HI=True),
        _config("dq", "dq-short", 128, POINTERS=True, HAS_HI=True),
        _config("dq", "dq-long", 128),
        _config("dq", "dq-short", 64),
        _config("dkdv", "wide-dkdv", 256),
        _config("dkdv", "wide-dkdv", 256, HAS_HI=True),
        _config("dkdv", "wide-dkdv-sm100", 256),
        _config("dq", "wide-dq", 256),
        _config("resident", "resident-64", 128, BLOCK_M=32, KEYS_FIRST=True),
        _config("resident", "resident-128", 128, KEYS_FIRST=False),
        _config("resident", "resident-128-sm100", 128, KEYS_FIRST=False),
    ]


def _config(kind: str, row: str, dim: int, **more) -> CompileConfig:
    kernel, module = KERNELS[kind]
    tile = TILES[row]
    sides = (
        {"BLOCK_N": tile.keep, "BLOCK_M": tile.step} if kind == "dkdv" else {"BLOCK_M": tile.keep, "BLOCK_N": tile.step}
    )
    group = more.get("GROUP", 1)
    known = USUAL | sides | dict(D=dim, DV=dim) | {n: x for n, x in more.items() if n not in ("SPLIT", "POINTERS")}
    if "SPLIT" in more:
        del known["chunks"]
    if "POINTERS" in more:
        known |= {n: None for n in kernel.arg_names if n.endswith("_desc")}
    if kind == "forward" and group > 1:
        known |= dict(q_desc=None)
    own_side = ("q_desc", "out_desc") if kind == "forward" else ()
    kept, passed = (group, tile.keep), (group if kind == "dkdv" else 1, tile.step)
    constexprs = {n: known[n] for n in kernel.arg_names if n in known}
    tag = "".join(f"-{n.lower()}" for n, on in more.items() if on is True and n != "KEYS_FIRST")
    tag += f"-group{group}" if group > 1 else ""
    return CompileConfig(
        name=f"portable-{row}-d{dim}{tag}",
        kernel=f"jfa.kernels.portable.{module}:{kernel.__name__}",
        signature={
            n: _type(n, kept if n in own_side else passed, dim) for n in kernel.arg_names if n not in constexprs
        },
        constexprs=constexprs,
        targets=TARGETS.get(row, (90, 100)),
        num_warps=tile.warps,
        options=dict(num_stages=tile.stages) | ({"maxnreg": tile.registers} if tile.registers else {}),
        max_spill_bytes=(POINTER_SPILLS if "POINTERS" in more else SPILLS).get(row, 0),
        serialized=row in SERIALIZED,
    )


def _type(name: str, box: tuple[int, int], dim: int):
    if name.endswith("_desc"):
        heads, rows = box
        return f"tensordesc<bf16[1, 1, {heads}, {rows // heads}, {dim}]>"
    if name.endswith(("_row", "_head")):
        return "i32:16"  # contiguous
    if name in SCALARS:
        return SCALARS[name]
    if name in FP32:
        return "*fp32:16"
    if name in INT32:
        return "*i32:16"
    return "*bf16:16" if name.endswith("_ptr") else "i32"
