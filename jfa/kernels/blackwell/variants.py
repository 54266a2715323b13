"""The Blackwell variants that ship, for `jfa compile`: what the host side launches for typical problems."""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.block_sparse import BlockLists
from jfa.kernels.base import Problem
from jfa.kernels.blackwell.backward_1cta import backward_kernel
from jfa.kernels.blackwell.backward_2cta import pair_backward_kernel
from jfa.kernels.blackwell.backward_dq import dq_kernel
from jfa.kernels.blackwell.backward_dq_wide import wide_dq_kernel
from jfa.kernels.blackwell.backward_resident import resident_backward_kernel
from jfa.kernels.blackwell.backward_wide import wide_backward_kernel
from jfa.kernels.blackwell.config import (
    BLOCK,
    TAIL,
    WIDE_BLOCK,
    backward_config,
    dq_config,
    forward_config,
    mxfp8_backward_config,
    mxfp8_config,
    plain_config,
    wide_config,
)
from jfa.kernels.blackwell.forward import forward_kernel
from jfa.kernels.blackwell.mxfp8_backward import mxfp8_backward_kernel
from jfa.kernels.blackwell.mxfp8_forward import mxfp8_forward_kernel
from jfa.kernels.blackwell.plain import plain_forward_kernel
from jfa.kernels.common.example import example_problem
from jfa.kernels.common.padded_rows import blocks_kernel, constants_kernel, finish_kernel
from jfa.kernels.common.tile_list import list_kernel
from jfa.kernels.compile_config import CompileConfig, typed
from jfa.masks import Band

TARGETS = (100, 103)
FORWARD_ROLES = ("correction", "softmax 0", "softmax 1", "mma", "load", "store")
RESIDENT_ROLES = ("store", "compute 0", "compute 1", "mma", "load")
DQ_ROLES = ("load", "compute 0", "compute 1", "mma")
WIDE_ROLES = ("load", "compute 0", "compute 1", "mma", "store")
PAIR_ROLES = ("reduce", "compute 0", "compute 1", "mma", "load rows", "load columns")
BACKWARD_ROLES = ("reduce", "compute 0", "compute 1", "mma", "load")
BANDS = {"full": Band(), "causal": Band.make(causal=True), "window": Band.make(causal=True, window_size=256)}

# Spill stores plus loads of one thread in bytes, as ptxas reported them: more is a regression.
FORWARD_SPILLS = {
    False: 20,
    True: 36,
}  # of masked bands, by stealing: one or two values made before the roles part; others: 0
TAIL_SPILLS = (
    132  # of rows in two boxes where keys are split: three values made before the roles part, read by every role
)
PLAIN_SPILLS = 0
MXFP8_BACKWARD_SPILLS = 40  # of shared queries; the others 24 at most
BACKWARD_SPILLS = 0  # of all backward kernels on one CTA
PAIR_SPILLS = {
    "full": 0,
    "causal": 20,
    "window": 28,
}  # of the pair's, by mask: two or three values of a compute group, per block
LISTED_BACKWARD_SPILLS = 24  # one value stored once, whatever the registers of the roles


def short_queries(head_dim: int, band: Band | None = None, group: int = 1) -> Problem:
    """Return a problem with 32 queries that all sequences share."""
    return example_problem(head_dim, band, rows_q=32, broadcast_q=True, num_kv_heads=4 // group)


def with_lists(problem: Problem) -> Problem:
    """Return the problem with block lists of every head; only their sizes matter."""
    nothing = torch.zeros(1, dtype=torch.int32)
    lists = BlockLists(nothing, nothing, nothing.to(torch.int8), problem.num_heads, 1, BLOCK, BLOCK)
    return replace(problem, block_lists=lists)


def compile_configs() -> list[CompileConfig]:
    """Return what the host side launches: both head dims, three masks and short shared queries, both schedules.

    The backward steals in the main ones only; it is here with grouped heads, too, and without dQ where it is deterministic.
    """
    configs = []
    for head_dim in (64, 128):
        problems = {mask: example_problem(head_dim, band) for mask, band in BANDS.items()}
        problems["pma"] = short_queries(head_dim)
        grouped = example_problem(head_dim, BANDS["causal"], num_kv_heads=1)
        for name, problem in problems.items():
            configs += [_forward(f"d{head_dim}-{name}", problem, clc) for clc in (False, True)]
            configs += [_mxfp8_forward(f"d{head_dim}-{name}", problem, clc) for clc in (False, True)]
            configs += [_mxfp8_backward(f"d{head_dim}-{name}", problem, clc) for clc in (False, True)]
            for clc in (False, True) if head_dim == 128 and name != "window" else (False,):
                configs.append(_backward(f"d{head_dim}-{name}", problem, clc))
        if head_dim == 128:
            for name, problem in problems.items():
                configs += [_pair(f"d{head_dim}-{name}", problem, clc) for clc in (False, True)]
            configs.append(_pair(f"d{head_dim}-causal-gqa", grouped, True))
        for name in ("full", "causal", "window"):
            configs.append(_dq(f"d{head_dim}-{name}", replace(problems[name], deterministic=True)))
        configs.append(
            _backward(f"d{head_dim}-causal-deterministic", replace(problems["causal"], deterministic=True), False)
        )
        configs.append(_backward(f"d{head_dim}-causal-gqa", grouped, True))
        configs.append(_resident(f"d{head_dim}", problems["pma"]))
        configs.append(_resident(f"d{head_dim}-causal", short_queries(head_dim, BANDS["causal"])))
        configs.append(_resident(f"d{head_dim}-causal-gqa", short_queries(head_dim, BANDS["causal"], 4)))
        configs.append(_plain(f"d{head_dim}-full", problems["full"]))
        for name in ("full", "causal"):
            listed = with_lists(problems[name])
            configs.append(_forward(f"d{head_dim}-{name}-lists", listed, True))
            configs.append(_backward(f"d{head_dim}-{name}-lists", listed, True))
    wide = {name: example_problem(192, band, head_dim_v=128) for name, band in BANDS.items()}
    wide["pma"] = example_problem(192, head_dim_v=128, rows_q=32, broadcast_q=True)
    for name, problem in wide.items():
        configs += [_forward(f"d192-{name}", problem, clc) for clc in (False, True)]
    configs.append(_forward("d192-full-lists", with_lists(wide["full"]), True))
    for name in BANDS:
        configs += [_wide(f"d192-{name}", wide[name]), _wide_dq(f"d192-{name}", wide[name])]
    configs.append(_wide("d192-causal-gqa", replace(wide["causal"], num_kv_heads=1)))
    return configs + _lists()


def _box(columns: int, rows: int = BLOCK, dtype: str = "bf16") -> str:
    """Return the type of a ragged descriptor; see jfa.kernels.common.ragged."""
    return f"tensordesc<{dtype}[1, 1, 1, {rows}, {columns}]>"


def _boxes(names: str, *box) -> dict[str, str]:
    """Return the types of some descriptors, all with the same :func:`_box`."""
    return {f"{name}_desc": _box(*box) for name in names.split()}


def _attention(name: str, kernel, cfg, boxes: dict[str, str | None], roles: tuple[str, ...], spills: int):
    """Return the configuration of one of the attention kernels."""
    shape = typed(kernel, {"cfg": cfg}, boxes)
    return CompileConfig(name=f"blackwell-{name}", **shape, targets=TARGETS, roles=roles, max_spill_bytes=spills)


def _forward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = forward_config(problem, clc=clc)
    boxes = _boxes("q k v", cfg.head_dim) | _boxes("o", cfg.head_dim // cfg.o_parts)
    tails = _boxes("q_tail k_tail", cfg.tail_dim)
    spills = FORWARD_SPILLS[clc] if problem.band != Band() else 0
    if cfg.tail_dim and cfg.split_keys:
        spills = TAIL_SPILLS
    boxes |= tails if cfg.tail_dim else dict.fromkeys(tails)
    return _attention(f"forward-{name}-{_schedule(clc)}", forward_kernel, cfg, boxes, FORWARD_ROLES, spills)


def _schedule(clc: bool) -> str:
    return "clc" if clc else "static"


def _mxfp8_forward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = mxfp8_config(problem, clc=clc)
    boxes = _boxes("q k v", cfg.head_dim, BLOCK, "fp8e4nv") | _boxes("o", cfg.head_dim // cfg.o_parts)
    spills = FORWARD_SPILLS[clc] if problem.band != Band() else 0
    name = f"mxfp8-forward-{name}-{_schedule(clc)}"
    return _attention(name, mxfp8_forward_kernel, cfg, boxes, FORWARD_ROLES, spills)


def _mxfp8_backward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = mxfp8_backward_config(problem, clc=clc)
    boxes = (
        _boxes("q q_t k k_t v do do_t", cfg.head_dim, BLOCK, "fp8e4nv") | _boxes("dk dv", cfg.head_dim) | _dq_box(cfg)
    )
    name = f"mxfp8-backward-{name}-{_schedule(clc)}"
    return _attention(name, mxfp8_backward_kernel, cfg, boxes, BACKWARD_ROLES, MXFP8_BACKWARD_SPILLS)


def _plain(name: str, problem: Problem) -> CompileConfig:
    cfg = plain_config(problem)
    return _attention(f"plain-{name}", plain_forward_kernel, cfg, _boxes("q k v o", cfg.head_dim), (), PLAIN_SPILLS)


def _dq_box(cfg) -> dict[str, str]:
    return {"dq_desc": f"tensordesc<fp32[{BLOCK}, {cfg.dq_columns}]>"}


def _backward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = backward_config(problem, clc=clc, form="single")
    spills = LISTED_BACKWARD_SPILLS if cfg.list_heads else BACKWARD_SPILLS
    boxes = _boxes("q k v do dk dv", cfg.head_dim) | _dq_box(cfg)
    return _attention(f"backward-{name}-{_schedule(cfg.clc)}", backward_kernel, cfg, boxes, BACKWARD_ROLES, spills)


def _pair(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = backward_config(problem, clc=clc, form="pair")
    columns, half = cfg.head_dim, cfg.head_dim // 2
    boxes = _boxes("q_rows do_rows", columns, BLOCK // 2) | _boxes("q_columns do_columns dk dv", half)
    boxes |= _boxes("k v", columns) | _boxes("k_columns", half, 2 * BLOCK)
    boxes |= {"dq_desc": f"tensordesc<fp32[2, {BLOCK // 2}, {cfg.dq_columns}]>"}
    spills = next(PAIR_SPILLS[mask] for mask, band in BANDS.items() if band == problem.band)
    name = f"backward-pair-{name}-{_schedule(cfg.clc)}"
    config = _attention(name, pair_backward_kernel, cfg, boxes, PAIR_ROLES, spills)
    return replace(config, options={"ctas_per_cga": (2, 1, 1)})


def _resident(name: str, problem: Problem) -> CompileConfig:
    cfg = backward_config(problem)
    boxes = _boxes("q do", cfg.head_dim, BLOCK // cfg.group) | _boxes("k v dk dv", cfg.head_dim) | _dq_box(cfg)
    name = f"backward-resident-{name}"
    return _attention(name, resident_backward_kernel, cfg, boxes, RESIDENT_ROLES, BACKWARD_SPILLS)


def _dq(name: str, problem: Problem) -> CompileConfig:
    cfg = dq_config(problem)
    boxes = _boxes("q k v do", cfg.head_dim) | _dq_box(cfg)
    return _attention(f"dq-{name}", dq_kernel, cfg, boxes, DQ_ROLES, BACKWARD_SPILLS)


def _wide(name: str, problem: Problem) -> CompileConfig:
    cfg, rows = wide_config(problem, keys=True), WIDE_BLOCK.value
    boxes = _boxes("q do", BLOCK, rows) | _boxes("q_tail", TAIL, rows)
    boxes |= _boxes("k v", BLOCK) | _boxes("k_tail dk dv", TAIL)
    return _attention(f"backward-wide-{name}", wide_backward_kernel, cfg, boxes, WIDE_ROLES, BACKWARD_SPILLS)


def _wide_dq(name: str, problem: Problem) -> CompileConfig:
    cfg, rows = wide_config(problem, keys=False), WIDE_BLOCK.value
    boxes = _boxes("q do", BLOCK) | _boxes("q_tail dq", TAIL)
    boxes |= _boxes("k v", BLOCK, rows) | _boxes("k_tail", TAIL, rows)
    return _attention(f"dq-wide-{name}", wide_dq_kernel, cfg, boxes, WIDE_ROLES, BACKWARD_SPILLS)


def _lists() -> list[CompileConfig]:
    """Return the small kernels before and after the backward, and those that make the lists of tiles."""
    listed = {"BLOCK": BLOCK, "BROADCAST_Q": False, "SLOTS": False, "PAD": BLOCK, "TILES": 16, "OTHERS": 256}
    of_blocks = {"BROADCAST_Q": False, "SLOTS": False, "PAD": BLOCK, "STEPS": 8, "N": 128}
    small = {
        "list-queries": (list_kernel, listed | {"KEYS": False}),
        "list-keys": (list_kernel, listed | {"KEYS": True}),
        "blocks": (blocks_kernel, of_blocks),
        "constants": (constants_kernel, {"DIM": 128, "DIM_BLOCK": 128, "ROWS": BLOCK, "HAS_DLSE": True}),
        "finish": (finish_kernel, {"DIM": 128, "COLUMNS": 128, "ROWS": BLOCK}),
    }
    return [
        CompileConfig(
            name=f"blackwell-{name}",
            **typed(kernel, constexprs, {}),
            targets=TARGETS,
            num_warps=8 if name == "constants" else 4,
        )
        for name, (kernel, constexprs) in small.items()
    ]
