"""What `jfa compile` reports of the portable kernels: the tiles of the table, head dim 128 and 64, bf16, contiguous inputs."""

from __future__ import annotations

from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.portable.backward import dkdv_kernel, dq_kernel
from jfa.kernels.portable.config import TILES
from jfa.kernels.portable.forward import forward_kernel
from jfa.kernels.portable.shared_query import shared_query_kernel

KERNELS = {
    "forward": (forward_kernel, "forward"),
    "dkdv": (dkdv_kernel, "backward"),
    "dq": (dq_kernel, "backward"),
    "shared": (shared_query_kernel, "shared_query"),
}
SCALARS = {"scale": "fp32", "sm_scale": "fp32"}
FP32 = ("lse_ptr", "dlse_ptr", "delta_ptr", "dq_partial_ptr", "partial_acc", "partial_ml")
INT32 = ("units", "counts", "arrivals", "pieces", "key_offset", "output_offset")
# Recorded spill bytes a thread, stores and loads, the most of sm_90 and sm_100: a row of the table may not need more.
SPILLS = {"forward-long": 296, "dq-long": 24, "shared-128": 336, "shared-128-sm100": 320}
# With 128 registers a thread two CTAs fit on a multiprocessor of sm_90: faster on long sequences, though wgmmas then wait.
SERIALIZED = ("forward-long",)
TARGETS = {"shared-128": (90,), "shared-128-sm100": (100,)}
# Contiguous rows, no output_offset, no gradient of the LSE, no mask: what most calls are compiled for.
USUAL = dict(
    stride_qd=1, stride_kd=1, stride_vd=1, stride_dd=1, output_offset=None, dlse_ptr=None, GROUP=1, HAS_SLOTS=False, HAS_LO=False,
    HAS_HI=False, HAS_DLSE=False, NEGATIVE=False, SPLIT=False, PRECISION="tf32", TMA=True,
    TMA_STORE=True, BOXED=True, BOXED_Q=True, BOXED_OUT=True,
)  # fmt: skip


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _config("forward", "forward-short", 128),
        _config("forward", "forward-short", 128, HAS_HI=True),
        _config("forward", "forward-short", 128, GROUP=4),
        _config("forward", "forward-long", 128),
        _config("forward", "forward-short", 64),
        _config("forward", "forward-shared-64", 128, BROADCAST=True),
        _config("forward", "forward-shared-128", 128, BROADCAST=True),
        _config("forward", "forward-short", 128, SPLIT=True),
        _config("dkdv", "dkdv", 128),
        _config("dkdv", "dkdv", 128, HAS_HI=True),
        _config("dkdv", "dkdv", 128, GROUP=4),
        _config("dkdv", "dkdv-d64", 64),
        _config("dq", "dq-short", 128),
        _config("dq", "dq-short", 128, HAS_LO=True, HAS_HI=True),
        _config("dq", "dq-long", 128),
        _config("dq", "dq-short", 64),
        _config("shared", "shared-64", 128, BLOCK_R=32, KEYS_FIRST=True),
        _config("shared", "shared-128", 128, BLOCK_R=128, KEYS_FIRST=False),
        _config("shared", "shared-128-sm100", 128, BLOCK_R=128, KEYS_FIRST=False),
    ]


def _config(kind: str, row: str, dim: int, **more) -> CompileConfig:
    kernel, module = KERNELS[kind]
    tile = TILES[row]
    sides = {"BLOCK_N": tile.keep, "BLOCK_M": tile.step} if kind == "dkdv" else {"BLOCK_M": tile.keep, "BLOCK_N": tile.step}
    group = (USUAL | more)["GROUP"]
    own_side = ("q_desc", "out_desc") if kind == "forward" else ()
    kept, passed = (group, tile.keep), (group if kind == "dkdv" else 1, tile.step)
    known = USUAL | sides | dict(D=dim, DV=dim, BLOCK_D=dim, BLOCK_DV=dim, BROADCAST=False) | more
    if kind == "forward" and group > 1:
        known |= dict(BOXED_Q=False, q_desc=None)
    constexprs = {n: known[n] for n in kernel.arg_names if n in known}
    options = dict(num_stages=tile.stages) | ({"maxnreg": tile.registers} if tile.registers else {})
    tag = "".join(f"-{n.lower()}" for n, on in more.items() if on is True and n != "KEYS_FIRST")
    tag += f"-group{group}" if group > 1 else ""
    return CompileConfig(
        name=f"portable-{row}-d{dim}{tag}",
        kernel=f"jfa.kernels.portable.{module}:{kernel.__name__}",
        signature={n: _type(n, kept if n in own_side else passed, dim) for n in kernel.arg_names if n not in constexprs},
        constexprs=constexprs,
        targets=TARGETS.get(row, (90, 100)),
        num_warps=tile.warps,
        options=options,
        max_spill_bytes=SPILLS.get(row, 0),
        serialized=row in SERIALIZED,
    )


def _type(name: str, box: tuple[int, int], dim: int) -> str:
    if name.endswith("_desc"):
        heads, rows = box
        return f"tensordesc<bf16[1, 1, {heads}, {rows // heads}, {dim}]>"
    if name in SCALARS:
        return SCALARS[name]
    if name in FP32:
        return "*fp32:16"
    if name in INT32:
        return "*i32:16"
    if name.endswith("_ptr"):
        return "*bf16:16"
    return "i32:16" if name.startswith("stride") else "i32"
