"""Launch the kernels in :mod:`.block_sparse` for a problem with block lists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from jfa.block_sparse import BlockLists
from jfa.block_sparse.grid import capacity_of, query_capacity
from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants, on_device, scale_log2
from jfa.kernels.common.launcher import Variant, by_torch
from jfa.kernels.common.transposing import transposed_lists
from jfa.kernels.compile_config import CompileConfig, typed
from jfa.kernels.portable import block_sparse as kernels
from jfa.kernels.portable import launch
from jfa.kernels.portable.config import EMULATED, Tile

FORWARD, DQ, DKDV = Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)  # not swept
WIDE = Tile(32, 32, 4, 1)  # head dims above 128, or above 64 in fp32


@dataclass
class Records:
    """Data of each block for the kernels; one serves a forward and its backward.

    Attributes:
        queries: [blocks, 8] int32, of the queries' grid; see :func:`jfa.kernels.portable.block_sparse.load_record`.
        keys: the same of the keys' grid, or None.
        turned: (starts, columns, kinds) of the transposed lists, if a plan has them.
    """

    queries: Tensor
    keys: Tensor | None
    turned: list[Tensor] | None = None


def blocks_of(problem: Problem) -> tuple[int, int]:
    """Return the rows of the queries' grid and of the keys' grid."""
    lists, sequences = problem.block_lists, problem.num_batches
    queries = query_capacity(problem.rows_q, sequences, lists.block, problem.broadcast_q)
    return queries, capacity_of(problem.rows_kv, sequences, lists.other_block)


def make_records(problem: Problem, with_keys: bool = True) -> Records | None:
    """Write the records of both sides, or of the queries' blocks alone; None where a side has no blocks."""
    (queries, keys), lists = blocks_of(problem), problem.block_lists
    if queries == 0 or keys == 0:
        return None
    count = queries + keys if with_keys else queries
    words = torch.empty(count, 8, dtype=torch.int32, device=problem.device)
    offsets = problem.query_offset, problem.key_offset, problem.output_offset
    sizes = queries, problem.num_batches, problem.rows_q, problem.rows_kv, problem.rows_out
    shared = problem.broadcast_q
    constants = ("BLOCK_Q", lists.block), ("BLOCK_KV", lists.other_block), ("BROADCAST_Q", shared), ("num_warps", 1)
    arguments = *offsets, words, *sizes, *band_constants(problem.band)
    _variant(kernels.record_kernel, constants).launch(problem.device, (count,), *arguments)
    return Records(words[:queries], words[queries:] if with_keys else None)


def plan(problem: Problem) -> list[Tensor]:
    """Return the records of both sides and the transposed lists; only those where a side has no blocks."""
    records, turned = make_records(problem), transposed_lists(problem).tensors
    return list(turned) if records is None else [records.queries, records.keys, *turned]


def given_records(problem: Problem, plan: Records | list[Tensor] | None, with_keys: bool) -> Records | None:
    """Return the records in what :func:`plan` or :func:`make_records` returned, or in a plan of transposed lists; or new ones."""
    if isinstance(plan, Records):
        return plan
    if plan and len(plan) == 5:
        return Records(plan[0], plan[1], plan[2:])
    records = make_records(problem, with_keys)
    if records is not None:
        records.turned = plan or None
    return records


# --------------------------------------------------------------------------------------------------------------- passes
def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, plan=None) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out])."""
    out = torch.zeros(problem.rows_out, problem.num_heads, problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.num_heads, problem.rows_out, dtype=torch.float32, device=q.device).fill_(-math.inf)
    with on_device(problem):
        records = given_records(problem, plan, False)
        if records is None:
            return out, lse
        tile, lists, heads = _tile(problem, FORWARD), problem.block_lists, problem.num_heads
        constants = _constants(problem, lists, tile.keep, tile.step) + (("NEGATIVE", problem.sm_scale < 0),)
        _variant(kernels.forward_kernel, constants, tile).launch(
            problem.device, _grid(records.queries, lists, tile, heads), q, k, v, out, lse, *_lists(records.queries, lists),
            heads, problem.rows_out, scale_log2(problem.sm_scale), *q.stride(), *k.stride(), *v.stride(),
        )  # fmt: skip
    return out, lse


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, needs=(True, True, True), plan=None):
    """Return (dq, dk, dv); those that are not needed are None. ``plan``: see :func:`given_records`."""
    with on_device(problem):
        records = given_records(problem, plan, True)
        if records is None:
            return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dout, out, lse = launch.with_rows(dout), out.contiguous(), lse.contiguous()
        delta = launch.empty_like(lse)
        launch.delta_pass(problem, dout, None if dlse is None else dlse.contiguous(), out, delta)
        given = problem, records, dout, q, k, v, lse, delta
        dq = _dq(*given) if needs[0] else None
        dk, dv = _dkdv(*given) if any(needs[1:]) else (None, None)
    return dq, dk, dv


def _dq(problem: Problem, records: Records, dout, q, k, v, lse, delta) -> Tensor:
    rows = problem.rows_out, *q.shape[1:]
    dq = torch.zeros(rows, dtype=torch.float32 if problem.broadcast_q else q.dtype, device=q.device)
    tile, lists, heads = _tile(problem, DQ), problem.block_lists, problem.num_heads
    _variant(kernels.dq_kernel, _constants(problem, lists, tile.keep, tile.step), tile).launch(
        problem.device, _grid(records.queries, lists, tile, heads),
        q, k, v, dout, lse, delta, dq, *_lists(records.queries, lists), heads, problem.rows_out,
        scale_log2(problem.sm_scale), problem.sm_scale, *q.stride(), *k.stride(), *v.stride(), *dout.stride(),
    )  # fmt: skip
    if not problem.broadcast_q:
        return dq
    total = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_torch(_sum_of_batches, total, dq)
    return total


def _sum_of_batches(total: Tensor, dq: Tensor) -> None:
    """Write to ``total`` [Lq, H, D] the sum of a shared query's gradients [B * Lq, H, D] over the sequences."""
    total.copy_(dq.view(-1, *total.shape).sum(0))


def _dkdv(problem: Problem, records: Records, dout, q, k, v, lse, delta) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    turned, tile = transposed_lists(problem, records.turned), _tile(problem, DKDV)
    _variant(kernels.dkdv_kernel, _constants(problem, turned, tile.step, tile.keep), tile).launch(
        problem.device, _grid(records.keys, turned, tile, problem.num_kv_heads),
        q, k, v, dout, lse, delta, dk, dv, *_lists(records.keys, turned), problem.num_heads, problem.rows_out,
        scale_log2(problem.sm_scale), problem.sm_scale, *q.stride(), *k.stride(), *v.stride(), *dout.stride(),
    )  # fmt: skip
    return dk, dv


def _lists(records: Tensor, lists: BlockLists) -> tuple:
    return records, *lists.tensors, records.shape[0], lists.columns.numel()


def _grid(records: Tensor, lists: BlockLists, tile: Tile, heads: int) -> tuple[int]:
    return (records.shape[0] * (lists.block // tile.keep) * heads,)


def _constants(problem: Problem, lists: BlockLists, queries: int, keys: int) -> tuple:
    """Return the constexprs of a kernel that walks ``lists``, with tiles of so many queries and keys."""
    sizes = dict(BLOCK_D=launch.columns(problem.head_dim), BLOCK_DV=launch.columns(problem.head_dim_v))
    sizes |= dict(BLOCK_M=queries, BLOCK_N=keys, ROWS=lists.block, COLUMNS=lists.other_block, LIST_HEADS=lists.heads)
    names = "GROUP", "D", "DV", "HAS_LO", "HAS_HI", "PRECISION"
    return tuple((sizes | dict(zip(names, launch.constants(problem)))).items())


@cache
def _variant(kernel, constants: tuple, tile: Tile | None = None) -> Variant:
    return Variant(kernel, **dict(constants), **(tile.launch if tile else {}))


def _tile(problem: Problem, tile: Tile) -> Tile:
    """Return a tile that fits the head dims and divides the blocks."""
    if problem.device.type == "cpu":
        tile = EMULATED
    elif max(problem.head_dim, problem.head_dim_v) * problem.dtype.itemsize > 256:
        tile = WIDE
    lists = problem.block_lists
    most = min(lists.block, lists.other_block)
    return Tile(min(tile.keep, most), min(tile.step, most), tile.warps, tile.stages, tile.registers)


# ------------------------------------------------------------------------------------------------------------- compiling
def compile_configs() -> list[CompileConfig]:
    """Return the variants that jfa compile reports: head dim 128, bf16, blocks of 128, with and without a mask."""
    kinds = (("forward", FORWARD), ("dq", DQ), ("dkdv", DKDV))
    return [_config(kind, tile, causal) for kind, tile in kinds for causal in (False, True)]


def _config(kind: str, tile: Tile, causal: bool) -> CompileConfig:
    kernel = getattr(kernels, f"{kind}_kernel")
    sides = dict(BLOCK_N=tile.keep, BLOCK_M=tile.step) if kind == "dkdv" else dict(BLOCK_M=tile.keep, BLOCK_N=tile.step)
    known = dict(D=128, DV=128, BLOCK_D=128, BLOCK_DV=128, GROUP=1, ROWS=128, COLUMNS=128, LIST_HEADS=8, HAS_LO=False)
    known |= sides | dict(HAS_HI=causal, NEGATIVE=False, PRECISION="tf32")
    known |= dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_dd"), 1)
    return CompileConfig(
        name=f"portable-block-sparse-{kind}{'-causal' if causal else ''}",
        **typed(kernel, {name: known[name] for name in kernel.arg_names if name in known}, {}, aligned=True),
        targets=(90, 100),
        num_warps=tile.warps,
        options=dict(num_stages=tile.stages),
        max_spill_bytes=0,
    )
