"""The Hopper variants that ship, for `jfa compile`: what launch.py launches for typical problems."""

from __future__ import annotations

from dataclasses import replace

from jfa.kernels.base import Problem
from jfa.kernels.common.example import example_problem
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.config import (
    BackwardConfig,
    ForwardConfig,
    backward_config,
    dq_config,
    forward_config,
    resident_config,
    wide_config,
)
from jfa.kernels.hopper.tiles import UNSPECIALISED, list_config
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
    "both-lists-2048": 24,
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


def _types(type_: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), type_)


def _config(
    name: str, kernel: str, signature: dict, constexprs: dict, roles: tuple = (), warps: int = 4
) -> CompileConfig:
    return CompileConfig(
        name=f"hopper-{name}",
        kernel=f"jfa.kernels.hopper.{kernel}",
        signature=signature,
        constexprs=constexprs,
        targets=(90,),
        num_warps=warps,
        roles=roles,
        max_spill_bytes=SPILLS.get(name, 0),
    )


def _forward(name: str, cfg: ForwardConfig) -> CompileConfig:
    lists = _types("*i32", "starts columns") | {"kinds": "*i8"} | _types("i32", "list_rows list_capacity")
    constexprs = {"cfg": cfg} if cfg.list_heads else {"cfg": cfg} | dict.fromkeys(lists)
    queries, values = (cfg.head_dim, cfg.right), (cfg.head_dim_v, cfg.right_v)
    shapes = {"q": (64, *queries), "k": (cfg.block_n, *queries), "v": (cfg.block_n, *values), "o": (64, *values)}
    rights = {f"desc_{name}_right": _box(rows, right) for name, (rows, _, right) in shapes.items() if right}
    constexprs |= {f"desc_{name}_right": None for name, (_, _, right) in shapes.items() if not right}
    signature = {
        **{f"desc_{name}": _box(rows, columns - right) for name, (rows, columns, right) in shapes.items()},
        **rights,
        **_types("*fp32", "lse"),
        **_types("i32", "rows_q rows_out heads group"),
        **_types("*i32", "records counts counters"),
        "scale_log2": "fp32",
        **(lists if cfg.list_heads else {}),
    }
    roles = ("consumer",) * cfg.consumers + ("producer",)
    return _config(f"forward-{name}", "forward:forward_kernel", signature, constexprs, roles)


def _sparse() -> list[CompileConfig]:
    """Return the forward and the backward over block lists of 8 heads."""
    walk = dict(block_n=128, heads=1, parts=2, list_heads=8)
    configs = {name: replace(forward_config(FORWARD[name]), **walk) for name in ("d128", "d128-causal")}
    backward = [_backward(f"sparse-{name}", BACKWARD[name], list_heads=8) for name in ("d128", "d128-causal", "d64")]
    return [_forward(f"sparse-{name}", cfg) for name, cfg in configs.items()] + backward


def _backward_signature(boxes: dict[str, str]) -> dict[str, str]:
    pointers = _types("*fp32", "lse2 delta") | _types("*i32", "records counts counter")
    return boxes | pointers | _types("fp32", "scale scale_log2") | _types("i32", "padded_rows group")


def _one_pass_boxes(cfg: BackwardConfig) -> tuple[dict[str, str], dict[str, None]]:
    """Return the types of the descriptors of both pieces, and those that there are not."""
    boxes: dict[str, str] = {}
    for side, width in (("", cfg.head_dim - cfg.right), ("_right", cfg.right)):
        if width:
            boxes |= {f"desc_{name}{side}": _box(64, width) for name in ("q", "do", "dk", "dv")}
            boxes |= {f"desc_{name}{side}": _box(128, width) for name in ("k", "v")}
            boxes[f"desc_dq{side}"] = f"tensordesc<fp32[64, {min(width, 64)}]>"
    rights = [f"desc_{name}_right" for name in ("q", "k", "v", "do", "dq", "dk", "dv")]
    return boxes, {name: None for name in rights if name not in boxes}


def _backward(name: str, problem: Problem, list_heads: int = 0) -> CompileConfig:
    cfg = replace(backward_config(problem), list_heads=list_heads)
    boxes, none = _one_pass_boxes(cfg)
    signature = _backward_signature(boxes) | _types("i32", "dq_rows kv_heads")
    lists = _types("*i32", "starts columns") | {"kinds": "*i8"} | _types("i32", "list_rows list_capacity")
    constexprs = {"cfg": cfg} | none | ({} if list_heads else dict.fromkeys(lists))
    consumers = ("consumer", "consumer", "producer")
    roles = ("adder", *consumers) if cfg.with_dq else consumers
    signature |= lists if list_heads else {}
    return _config(f"backward-{name}", "backward:backward_kernel", signature, constexprs, roles)


def _dq(name: str, problem: Problem) -> CompileConfig:
    cfg = dq_config(problem)
    boxes = _pieces((cfg.left, cfg.right), "q", "k", "dq") | _pieces((cfg.left_v, cfg.right_v), "v", "do")
    signature = _backward_signature(boxes) | {"heads": "i32"}
    none = {} if cfg.wide else {f"desc_{name}_right": None for name in ("q", "k", "v", "do", "dq")}
    roles = ("consumer", "consumer", "producer")
    return _config(f"backward-dq-{name}", "backward_dq:dq_kernel", signature, {"cfg": cfg} | none, roles)


def _pieces(columns: tuple[int, int], *names: str) -> dict[str, str]:
    """Return the types of the descriptors of those pieces of those tensors that have columns."""
    sides = [(side, width) for side, width in zip(("left", "right"), columns) if width]
    return {f"desc_{name}_{side}": _box(64, width) for side, width in sides for name in names}


def _wide(name: str, problem: Problem) -> CompileConfig:
    cfg = wide_config(problem)
    boxes = _pieces((cfg.left, cfg.right), "q", "k", "dk") | _pieces((cfg.left_v, cfg.right_v), "v", "do", "dv")
    signature = _backward_signature(boxes) | {"kv_heads": "i32"}
    roles = ("weights group", "scores group", "producer")
    return _config(f"backward-wide-{name}", "backward_wide:backward_wide_kernel", signature, {"cfg": cfg}, roles)


def _resident(name: str, problem: Problem) -> CompileConfig:
    cfg = resident_config(problem)
    boxes = _types(_box(cfg.rows_q, cfg.head_dim), "desc_q desc_do")
    boxes |= _types(_box(64, cfg.head_dim), "desc_k desc_v desc_dk desc_dv")
    boxes |= {"desc_dq": f"tensordesc<fp32[{cfg.head_dim}, {cfg.rows_q}]>"}
    signature = _backward_signature(boxes) | _types("i32", "rows_q heads") | {"counters": "*i32"}
    roles = ("key group", "key group", "query group", "producer")
    kernel = "backward_resident:backward_resident_kernel"
    return _config(f"backward-resident-{name}", kernel, signature, {"cfg": cfg}, roles)


def _lists() -> list[CompileConfig]:
    """Return the kernel that makes the lists of tiles: one list, the other, both, both for many sequences."""
    pointers = _types("*i32", "query_offset key_offset output_offset records counts counters")
    pointers |= _types("*i32", "key_records key_counts key_counters")
    signature = pointers | _types("i32", " ".join(UNSPECIALISED))
    causal, shared = example_problem(128, CAUSAL), example_problem(128, rows_q=64, **SHARED)
    slots, many = replace(shared, output_offset=shared.key_offset), replace(shared, num_batches=2000)
    configs = {
        "list-queries": list_config(causal, 128, 0),
        "list-keys": list_config(slots, 0, 1024),
        "both-lists": list_config(causal, 128, 128),
        "both-lists-2048": list_config(many, 64, 1024),
    }
    return [
        _config(name, "tiles:list_kernel", signature, {"cfg": cfg}, warps=8 if cfg.others > 1024 else 4)
        for name, cfg in configs.items()
    ]


def _small() -> list[CompileConfig]:
    """Return the small kernels before and after the backward."""
    prepared = _types("*bf16", "out dout") | _types("*fp32", "lse dlse lse2 delta") | _types("*i32", "where counts")
    prepared |= _types("i32", "heads rows_out padded_rows least_rows stride_row stride_head")
    options = dict(DV=128, DV_BLOCK=128, PARTS=2, ROWS=64)
    listed = options | dict(HAS_DLSE=False, RESIDENT=False, SLOTS=False, BESIDE=False)
    resident = options | dict(HAS_DLSE=True, RESIDENT=True, SLOTS=True, BESIDE=True)
    finish = {"sums": "*fp32", "dq": "*bf16", "scale": "fp32", **_types("*i32", "records counts")}
    finish |= _types("i32", "heads padded_rows")
    partials = {"partials": "*fp32", "dq": "*bf16", "scale": "fp32", **_types("i32", "programs heads rows_q")}
    summed = dict(LQ=128, D=128, D_BLOCK=128, PROGRAMS=32, ROWS=2)
    return [
        _config("prepare", "prepare:prepare_kernel", prepared, listed),
        _config("prepare-resident", "prepare:prepare_kernel", prepared, resident),
        _config("finish-dq", "prepare:finish_kernel", finish, dict(D=128, D_BLOCK=128, WIDTH=128, PARTS=2, ROWS=64)),
        _config("sum-partials", "backward_resident:sum_kernel", partials, summed),
    ]
