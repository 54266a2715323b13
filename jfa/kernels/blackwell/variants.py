"""The Blackwell variants that ship, for `jfa compile`: what the host side launches for typical problems."""

from __future__ import annotations

from dataclasses import replace

import torch

from jfa.block_sparse import BlockLists
from jfa.kernels.base import Problem
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
from jfa.kernels.common.example import example_problem
from jfa.kernels.compile_config import CompileConfig
from jfa.masks import Band

TARGETS = (100, 103)
TAILS = ("q_tail_desc", "k_tail_desc")
LISTS = {"starts": "*i32", "columns": "*i32", "kinds": "*i8", "list_rows": "i32", "list_capacity": "i32"}
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


def _box(columns: int, rows: int = BLOCK) -> str:
    """Return the type of a ragged descriptor; see jfa.kernels.common.ragged."""
    return f"tensordesc<bf16[1, 1, 1, {rows}, {columns}]>"


def _attention(
    name: str,
    kernel: str,
    signature: dict[str, str],
    cfg,
    roles: tuple[str, ...],
    spills: int,
    walks_lists: bool = False,
) -> CompileConfig:
    """Return the configuration of one of the attention kernels; one that walks lists can be compiled without them."""
    lists = LISTS if walks_lists else {}
    if walks_lists and cfg.list_heads:
        signature, lists = signature | lists, {}
    return CompileConfig(
        name=f"blackwell-{name}",
        kernel=f"jfa.kernels.blackwell.{kernel}",
        signature=signature,
        constexprs={"cfg": cfg} | dict.fromkeys(lists),
        targets=TARGETS,
        roles=roles,
        max_spill_bytes=spills,
    )


def _forward_signature(columns: int, o_columns: int) -> dict[str, str]:
    return {
        **dict.fromkeys(("q_desc", "k_desc", "v_desc"), _box(columns)),
        "o_desc": _box(o_columns),
        "lse_ptr": "*fp32",
        **dict.fromkeys(("records_ptr", "counts_ptr"), "*i32"),
        "rows_out": "i32",
        "scale_log2": "fp32",
    }


def _forward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = forward_config(problem, clc=clc)
    signature = _forward_signature(cfg.head_dim, cfg.head_dim // cfg.o_parts)
    signature |= dict.fromkeys(("coarse_scale", "score_limit"), "fp32")
    spills = FORWARD_SPILLS[clc] if problem.band != Band() else 0
    if cfg.tail_dim and cfg.split_keys:
        spills = TAIL_SPILLS
    name = f"forward-{name}-{'clc' if clc else 'static'}"
    if cfg.tail_dim:
        signature |= dict.fromkeys(TAILS, _box(cfg.tail_dim))
    config = _attention(name, "forward:forward_kernel", signature, cfg, FORWARD_ROLES, spills, True)
    return config if cfg.tail_dim else replace(config, constexprs=config.constexprs | dict.fromkeys(TAILS))


def _mxfp8_forward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = mxfp8_config(problem, clc=clc)
    signature = _forward_signature(cfg.head_dim, cfg.head_dim // cfg.o_parts)
    signature |= dict.fromkeys(("q_desc", "k_desc", "v_desc"), _box(cfg.head_dim).replace("bf16", "fp8e4nv"))
    signature |= dict.fromkeys(("q_scales", "k_scales", "v_scales"), "*u8")
    signature |= dict.fromkeys(("q_blocks", "kv_blocks"), "i32") | dict.fromkeys(
        ("coarse_scale", "score_limit"), "fp32"
    )
    spills = FORWARD_SPILLS[clc] if problem.band != Band() else 0
    name = f"mxfp8-forward-{name}-{'clc' if clc else 'static'}"
    return _attention(name, "mxfp8_forward:mxfp8_forward_kernel", signature, cfg, FORWARD_ROLES, spills)


def _mxfp8_backward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = mxfp8_backward_config(problem, clc=clc)
    encoded = ("q", "q_t", "k", "k_t", "v", "do", "do_t")
    signature = {f"{x}_desc": _box(cfg.head_dim).replace("bf16", "fp8e4nv") for x in encoded}
    signature |= {k: v for k, v in _backward_signature(cfg).items() if k not in signature}
    signature |= {f"{x}_scales": "*u8" for x in encoded} | dict.fromkeys(("q_blocks", "kv_blocks", "do_blocks"), "i32")
    name = f"mxfp8-backward-{name}-{'clc' if clc else 'static'}"
    kernel = "mxfp8_backward:mxfp8_backward_kernel"
    return _attention(name, kernel, signature, cfg, BACKWARD_ROLES, MXFP8_BACKWARD_SPILLS)


def _plain(name: str, problem: Problem) -> CompileConfig:
    cfg = plain_config(problem)
    signature = _forward_signature(cfg.head_dim, cfg.head_dim)
    return _attention(f"plain-{name}", "plain:plain_forward_kernel", signature, cfg, (), PLAIN_SPILLS)


def _backward_signature(cfg) -> dict[str, str]:
    return {
        **dict.fromkeys(("q_desc", "k_desc", "v_desc", "do_desc", "dk_desc", "dv_desc"), _box(cfg.head_dim)),
        "dq_desc": f"tensordesc<fp32[{BLOCK}, {cfg.dq_columns}]>",
        **dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32"),
        **dict.fromkeys(("records_ptr", "counts_ptr"), "*i32"),
        **dict.fromkeys(("padded_count", "dq_rows"), "i32"),
        **dict.fromkeys(("scale_log2", "sm_scale"), "fp32"),
    }


def _backward(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = backward_config(problem, clc=clc, form="single")
    spills = LISTED_BACKWARD_SPILLS if cfg.list_heads else BACKWARD_SPILLS
    name = f"backward-{name}-{'clc' if cfg.clc else 'static'}"
    signature = _backward_signature(cfg)
    return _attention(name, "backward_1cta:backward_kernel", signature, cfg, BACKWARD_ROLES, spills, True)


def _pair(name: str, problem: Problem, clc: bool) -> CompileConfig:
    cfg = backward_config(problem, clc=clc, form="pair")
    rows, columns = _box(cfg.head_dim, BLOCK // 2), _box(cfg.head_dim // 2)
    signature = {
        **{f"{x}_{part}_desc": box for x in ("q", "do") for part, box in (("rows", rows), ("columns", columns))},
        **dict.fromkeys(("k_desc", "v_desc"), _box(cfg.head_dim)),
        **dict.fromkeys(("dk_desc", "dv_desc"), columns),
        "k_columns_desc": _box(cfg.head_dim // 2, 2 * BLOCK),
        "dq_desc": f"tensordesc<fp32[2, {BLOCK // 2}, {cfg.dq_columns}]>",
    }
    signature |= {k: v for k, v in _backward_signature(cfg).items() if k not in signature and not k.endswith("_desc")}
    spills = next(PAIR_SPILLS[mask] for mask, band in BANDS.items() if band == problem.band)
    name = f"backward-pair-{name}-{'clc' if cfg.clc else 'static'}"
    config = _attention(name, "backward_2cta:pair_backward_kernel", signature, cfg, PAIR_ROLES, spills)
    return replace(config, options={"ctas_per_cga": (2, 1, 1)})


def _resident(name: str, problem: Problem) -> CompileConfig:
    cfg = backward_config(problem)
    signature = {k: v for k, v in _backward_signature(cfg).items() if k != "dq_rows"} | {"rows_q": "i32"}
    signature |= dict.fromkeys(("q_desc", "do_desc"), _box(cfg.head_dim, BLOCK // cfg.group))
    return _attention(
        f"backward-resident-{name}",
        "backward_resident:resident_backward_kernel",
        signature,
        cfg,
        RESIDENT_ROLES,
        BACKWARD_SPILLS,
    )


def _dq(name: str, problem: Problem) -> CompileConfig:
    cfg = dq_config(problem)
    without = ("dk_desc", "dv_desc", "dq_rows", "sm_scale")
    signature = {k: v for k, v in _backward_signature(cfg).items() if k not in without}
    return _attention(f"dq-{name}", "backward_dq:dq_kernel", signature, cfg, DQ_ROLES, BACKWARD_SPILLS)


def _boxes(names: str, rows: int = BLOCK) -> dict[str, str]:
    """Return the types of descriptors of 128 columns; of a name with a + also that of the 64 columns behind them."""
    types = {}
    for name in names.split():
        types[f"{name.removesuffix('+')}_desc"] = _box(BLOCK, rows)
        if name.endswith("+"):
            types[f"{name.removesuffix('+')}_tail_desc"] = _box(TAIL, rows)
    return types


def _wide_numbers() -> dict[str, str]:
    """Return the types of what both kernels of the backward of rows in two boxes take besides descriptors."""
    pointers = dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32") | dict.fromkeys(("records_ptr", "counts_ptr"), "*i32")
    return pointers | {"padded_count": "i32", "scale_log2": "fp32", "sm_scale": "fp32"}


def _wide(name: str, problem: Problem) -> CompileConfig:
    rows = WIDE_BLOCK.value
    signature = _boxes("q+", rows) | _boxes("k+ v") | _boxes("do", rows)
    signature |= dict.fromkeys(("dk_desc", "dv_desc"), _box(TAIL)) | _wide_numbers()
    cfg, kernel = wide_config(problem, keys=True), "backward_wide:wide_backward_kernel"
    return _attention(f"backward-wide-{name}", kernel, signature, cfg, WIDE_ROLES, BACKWARD_SPILLS)


def _wide_dq(name: str, problem: Problem) -> CompileConfig:
    rows = WIDE_BLOCK.value
    signature = _boxes("q+") | _boxes("k+ v", rows) | _boxes("do") | {"dq_desc": _box(TAIL)} | _wide_numbers()
    cfg, kernel = wide_config(problem, keys=False), "backward_dq_wide:wide_dq_kernel"
    return _attention(f"dq-wide-{name}", kernel, signature, cfg, WIDE_ROLES, BACKWARD_SPILLS)


def _lists() -> list[CompileConfig]:
    """Return the small kernels before and after the backward, and those that make the lists of tiles."""
    offsets = dict.fromkeys(("query_offset", "key_offset", "output_offset", "records", "counts"), "*i32")
    numbers = "batches rows_q rows_kv rows_out capacity lo_start lo_end hi_start hi_end".split()
    listed = {"BLOCK": BLOCK, "BROADCAST_Q": False, "SLOTS": False, "PAD": BLOCK, "TILES": 16, "OTHERS": 256}
    floats = dict.fromkeys(("lse", "dlse", "lse2", "delta"), "*fp32")
    integers = dict.fromkeys(("rows_out", "padded_count", "out_row", "out_head", "dout_row", "dout_head"), "i32")
    shape = {"DIM": 128, "ROWS": BLOCK}
    rows, lists = "jfa.kernels.common.padded_rows", "jfa.kernels.common.tile_list:list_kernel"
    small = {
        "list-queries": (lists, offsets | dict.fromkeys(numbers, "i32"), listed | {"KEYS": False}),
        "list-keys": (lists, offsets | dict.fromkeys(numbers, "i32"), listed | {"KEYS": True}),
        "blocks": (
            f"{rows}:blocks_kernel",
            dict.fromkeys(("query_offset", "output_offset", "blocks"), "*i32")
            | dict.fromkeys(("batches", "rows_q", "rows_out", "count"), "i32"),
            {"BROADCAST_Q": False, "SLOTS": False, "PAD": BLOCK, "STEPS": 8, "N": 128},
        ),
        "constants": (
            f"{rows}:constants_kernel",
            dict.fromkeys(("out", "dout"), "*bf16") | floats | {"blocks": "*i32"} | integers,
            shape | {"DIM_BLOCK": 128, "HAS_DLSE": True},
        ),
        "finish": (
            f"{rows}:finish_kernel",
            {"sums": "*fp32", "dq": "*bf16", "blocks": "*i32", "heads": "i32", "padded_count": "i32", "scale": "fp32"},
            shape | {"COLUMNS": 128},
        ),
    }
    return [
        CompileConfig(
            name=f"blackwell-{name}",
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            targets=TARGETS,
            num_warps=8 if name == "constants" else 4,
            max_spill_bytes=0,
        )
        for name, (kernel, signature, constexprs) in small.items()
    ]
