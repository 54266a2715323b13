"""The Hopper variants that ship, for `jfa compile`: what launch.py launches for typical problems."""

from __future__ import annotations

from dataclasses import replace

from jfa.kernels.base import Problem
from jfa.kernels.common.example import example_problem
from jfa.kernels.common.planner import Cut, PlanConfig, plan_kernel, plan_shape
from jfa.kernels.compile_config import CompileConfig, typed
from jfa.kernels.hopper.backward import backward_kernel
from jfa.kernels.hopper.backward_dq import dq_kernel
from jfa.kernels.hopper.backward_resident import backward_resident_kernel, sum_kernel
from jfa.kernels.hopper.backward_wide import backward_wide_kernel
from jfa.kernels.hopper.config import (
    ForwardConfig,
    backward_config,
    dq_config,
    forward_config,
    resident_config,
    wide_config,
)
from jfa.kernels.hopper.forward import forward_kernel
from jfa.kernels.hopper.prepare import finish_kernel, prepare_kernel
from jfa.kernels.hopper.tiles import PAD
from jfa.masks import Band

CAUSAL = Band.make(causal=True)
WINDOW = Band.make(causal=True, window_size=2048)
NARROW = Band.make(causal=True, window_size=256)
SHARED = dict(broadcast_q=True)

FORWARD = {
    "d128": example_problem(128),
    "d128-causal": example_problem(128, CAUSAL),
    "d128-window": example_problem(128, WINDOW),
    "narrow-d128": example_problem(128, NARROW),
    "d64": example_problem(64),
    "d64-one-head": example_problem(64, num_heads=3, num_kv_heads=3),
    "d256": example_problem(256),
    "d256-causal": example_problem(256, CAUSAL),
    "d256-window": example_problem(256, WINDOW),
    "d192": example_problem(192),
    "d192-causal": example_problem(192, CAUSAL),
    "d192-dv128": replace(example_problem(192), head_dim_v=128),
    "d192-dv128-causal": replace(example_problem(192, CAUSAL), head_dim_v=128),
    "short-d128": example_problem(128, rows_q=32, **SHARED),
    "resident-d128": example_problem(128, rows_q=128, **SHARED),
}
BACKWARD = {
    "d128": example_problem(128),
    "d128-causal": example_problem(128, CAUSAL),
    "d128-window": example_problem(128, WINDOW),
    "d128-no-dq": example_problem(128, deterministic=True),
    "d128-no-dq-window": example_problem(128, WINDOW, deterministic=True),
    "d64": example_problem(64),
    "d64-window": example_problem(64, WINDOW),
    "d96": example_problem(96),
    "d96-causal": example_problem(96, CAUSAL),
    "d96-window": example_problem(96, WINDOW),
    "d96-no-dq": example_problem(96, deterministic=True),
}
DQ = {"d128": example_problem(128), "d64-causal": example_problem(64, CAUSAL)}
WIDE = {
    "d256": example_problem(256),
    "d256-causal": example_problem(256, CAUSAL),
    "d256-window": example_problem(256, WINDOW),
    "d192-dv128": replace(example_problem(192), head_dim_v=128),
    "d192-dv128-causal": replace(example_problem(192, CAUSAL), head_dim_v=128),
}
RESIDENT = {
    "q64-d128": example_problem(128, rows_q=64, **SHARED),
    "q128-d128": example_problem(128, rows_q=128, **SHARED),
    "q128-d128-static": example_problem(128, rows_q=128, deterministic=True, **SHARED),
    "q64-d64": example_problem(64, rows_q=64, **SHARED),
    "q64-d128-causal": example_problem(128, CAUSAL, rows_q=64, **SHARED),
    "q64-d128-window": example_problem(128, NARROW, rows_q=64, **SHARED),
    "q128-d128-causal": example_problem(128, CAUSAL, rows_q=128, **SHARED),
    "q128-d128-window": example_problem(128, NARROW, rows_q=128, **SHARED),
}
# Spill stores plus loads per thread in bytes, as ptxas reported them; more is a regression. Others: 0.
SPILLS = {
    "backward-sparse-d128": 20,
    "backward-sparse-d128-causal": 20,
    "backward-d128-causal": 80,
    "backward-wide-d256-causal": 8,
    "backward-wide-d256-window": 8,
    "forward-d256-window": 52,
    "backward-resident-q128-d128": 32,
    "backward-resident-q128-d128-static": 32,
    "backward-resident-q128-d128-causal": 736,
    "backward-resident-q128-d128-window": 1616,
    "both-lists-2048": 16,
}


def compile_configs() -> list[CompileConfig]:
    """Return a configuration per form of each kernel that :mod:`jfa.kernels.hopper.launch` launches."""
    return [
        *(_forward(name, forward_config(problem)) for name, problem in FORWARD.items()),
        *_sparse(),
        *(_backward(name, problem) for name, problem in BACKWARD.items()),
        *(_dq(name, problem) for name, problem in DQ.items()),
        *(_wide(name, problem) for name, problem in WIDE.items()),
        *(_dq(f"wide-{name}", problem) for name, problem in WIDE.items()),
        *(_resident(name, problem) for name, problem in RESIDENT.items()),
        *_lists(),
        *_small(),
    ]


def _box(rows: int, columns: int) -> str:
    """Return the type of a ragged descriptor; see jfa.kernels.common.ragged."""
    return f"tensordesc<bf16[1, 1, 1, {rows}, {columns}]>"


def _boxes(rows: int, columns: tuple[int, int], names: str, left: str = "") -> dict[str, str | None]:
    """Return the types of the descriptors of both pieces of some tensors; None where the right one has no columns."""
    sides = zip((left, "_right"), columns)
    return {
        f"desc_{name}{side}": _box(rows, width) if width else None for side, width in sides for name in names.split()
    }


def _config(
    name: str, kernel, constexprs: dict, boxes: dict | None = None, roles: tuple[str, ...] = (), warps: int = 4
) -> CompileConfig:
    return CompileConfig(
        name=f"hopper-{name}",
        **typed(kernel, constexprs, boxes or {}),
        targets=(90,),
        num_warps=warps,
        roles=roles,
        max_spill_bytes=SPILLS.get(name, 0),
    )


def _forward(name: str, cfg: ForwardConfig) -> CompileConfig:
    queries, values = (cfg.head_dim - cfg.right, cfg.right), (cfg.head_dim_v - cfg.right_v, cfg.right_v)
    boxes = _boxes(64, queries, "q") | _boxes(cfg.block_n, queries, "k") | _boxes(cfg.block_n, values, "v")
    roles = ("consumer",) * cfg.consumers + ("producer",)
    return _config(f"forward-{name}", forward_kernel, {"cfg": cfg}, boxes | _boxes(64, values, "o"), roles)


def _sparse() -> list[CompileConfig]:
    """Return the forward and the backward over block lists of 8 heads."""
    walk = dict(block_n=128, heads=1, parts=2, list_heads=8)
    configs = {name: replace(forward_config(FORWARD[name]), **walk) for name in ("d128", "d128-causal")}
    backward = [_backward(f"sparse-{name}", BACKWARD[name], list_heads=8) for name in ("d128", "d128-causal", "d64")]
    return [_forward(f"sparse-{name}", cfg) for name, cfg in configs.items()] + backward


def _backward(name: str, problem: Problem, list_heads: int = 0) -> CompileConfig:
    cfg = replace(backward_config(problem), list_heads=list_heads)
    columns = cfg.head_dim - cfg.right, cfg.right
    boxes = _boxes(64, columns, "q do dk dv") | _boxes(128, columns, "k v")
    for side, width in zip(("", "_right"), columns):
        boxes[f"desc_dq{side}"] = f"tensordesc<fp32[64, {min(width, 64)}]>" if width else None
    roles = ("adder",) * cfg.with_dq + ("consumer", "consumer", "producer")
    return _config(f"backward-{name}", backward_kernel, {"cfg": cfg}, boxes, roles)


def _dq(name: str, problem: Problem) -> CompileConfig:
    cfg = dq_config(problem)
    boxes = _boxes(64, (cfg.left, cfg.right), "q k dq", "_left") | _boxes(
        64, (cfg.left_v, cfg.right_v), "v do", "_left"
    )
    return _config(f"backward-dq-{name}", dq_kernel, {"cfg": cfg}, boxes, ("consumer", "consumer", "producer"))


def _wide(name: str, problem: Problem) -> CompileConfig:
    cfg = wide_config(problem)
    boxes = _boxes(64, (cfg.left, cfg.right), "q k dk", "_left")
    boxes |= _boxes(64, (cfg.left_v, cfg.right_v), "v do dv", "_left")
    roles = ("weights group", "scores group", "producer")
    return _config(f"backward-wide-{name}", backward_wide_kernel, {"cfg": cfg}, boxes, roles)


def _resident(name: str, problem: Problem) -> CompileConfig:
    cfg = resident_config(problem)
    boxes = dict.fromkeys(("desc_q", "desc_do"), _box(cfg.rows_q, cfg.head_dim))
    boxes |= dict.fromkeys(("desc_k", "desc_v", "desc_dk", "desc_dv"), _box(64, cfg.head_dim))
    boxes |= {"desc_dq": f"tensordesc<fp32[{cfg.head_dim}, {cfg.rows_q}]>"}
    roles = ("key group", "key group", "query group", "producer")
    return _config(f"backward-resident-{name}", backward_resident_kernel, {"cfg": cfg}, boxes, roles)


def _lists() -> list[CompileConfig]:
    """Return the kernel that makes the lists of tiles: one list, the other, both, both for many sequences."""
    causal, shared = example_problem(128, CAUSAL), example_problem(128, rows_q=64, **SHARED)
    slots, many = replace(shared, output_offset=shared.key_offset), replace(shared, num_batches=2000)
    queries, keys, heads = Cut(128), Cut(1024, keys=True), causal.num_heads
    shapes = {
        "list-queries": plan_shape(causal, queries, heads, pad=PAD.value),
        "list-keys": plan_shape(slots, keys, heads, pad=PAD.value),
        "both-lists": plan_shape(causal, queries, heads, 128, pad=PAD.value),
        "both-lists-2048": plan_shape(many, Cut(64), heads, 1024, pad=PAD.value),
    }
    return [_list(name, PlanConfig(*shape), name == "list-keys") for name, shape in shapes.items()]


def _list(name: str, cfg: PlanConfig, slots: bool) -> CompileConfig:
    missing = ["chunks", "dq_records", "dq_counts"]
    missing += [] if slots else ["output_offset"]
    missing += [] if cfg.key_block else ["key_records", "key_counts", "key_counters"]
    return _config(name, plan_kernel, {"cfg": cfg} | dict.fromkeys(missing), warps=8 if cfg.others > 1024 else 4)


def _small() -> list[CompileConfig]:
    """Return the small kernels before and after the backward."""
    options = dict(DV=128, DV_BLOCK=128, PARTS=2, ROWS=64)
    listed = options | dict(HAS_DLSE=False, RESIDENT=False, SLOTS=False, BESIDE=False)
    resident = options | dict(HAS_DLSE=True, RESIDENT=True, SLOTS=True, BESIDE=True)
    return [
        _config("prepare", prepare_kernel, listed),
        _config("prepare-resident", prepare_kernel, resident),
        _config("finish-dq", finish_kernel, dict(D=128, D_BLOCK=128, WIDTH=128, PARTS=2, ROWS=64)),
        _config("sum-partials", sum_kernel, dict(LQ=128, D=128, D_BLOCK=128, PROGRAMS=32, ROWS=2)),
    ]
