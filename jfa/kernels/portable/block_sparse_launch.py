"""Launch the kernels in :mod:`.block_sparse` for a problem with block lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jfa.block_sparse import Grid, grid_of, query_grid
from jfa.kernels.base import Problem, transposed_lists
from jfa.kernels.common.host import on_device, scale_log2
from jfa.kernels.compile_config import CompileConfig, typed
from jfa.kernels.portable import block_sparse as kernels
from jfa.kernels.portable import launch
from jfa.kernels.portable.config import EMULATED, Tile

FORWARD, DQ, DKDV = Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)  # not swept
WIDE = Tile(32, 32, 4, 1)  # head dims above 128, or above 64 in fp32


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [rows_out, H, Dv], lse [H, rows_out])."""
    out = torch.zeros(problem.rows_out, problem.num_heads, problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.full((problem.num_heads, problem.rows_out), -math.inf, dtype=torch.float32, device=q.device)
    queries, keys = grids(problem)
    if queries.rows:
        tile = _tile(problem, FORWARD)
        with on_device(problem):
            kernels.forward_kernel[_grid(queries, tile.keep, problem.num_heads)](
                q, k, v, out, lse, *_lists(problem, problem.block_lists, queries, queries, keys),
                problem.num_heads, problem.rows_out, scale_log2(problem.sm_scale), *q.stride(), *k.stride(), *v.stride(),
                BLOCK_M=tile.keep, BLOCK_N=tile.step, NEGATIVE=problem.sm_scale < 0,
                **_sizes(problem, problem.block_lists), **tile.launch, **launch.constants(problem),
            )  # fmt: skip
    return out, lse


def backward(problem: Problem, dout, dlse, q, k, v, out, lse, needs=(True, True, True), turned=None):
    """Return (dq, dk, dv); those that are not needed are None. ``turned``: the transposed lists' tensors, if a plan has them."""
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    delta = torch.zeros_like(lse)
    with on_device(problem):
        if problem.rows_out and problem.num_batches:
            launch.delta_pass(problem, dout, dlse, out, delta)
        given = problem, dout, q, k, v, lse, delta
        dq = _dq(*given) if needs[0] else None
        dk, dv = _dkdv(*given, turned) if any(needs[1:]) else (None, None)
    return dq, dk, dv


def _dq(problem: Problem, dout, q, k, v, lse, delta) -> Tensor:
    rows = problem.rows_out, *q.shape[1:]
    dq = torch.zeros(rows, dtype=torch.float32 if problem.broadcast_q else q.dtype, device=q.device)
    queries, keys = grids(problem)
    tile = _tile(problem, DQ)
    if queries.rows:
        kernels.dq_kernel[_grid(queries, tile.keep, problem.num_heads)](
            q, k, v, dout, lse, delta, dq, *_lists(problem, problem.block_lists, queries, queries, keys),
            problem.num_heads, problem.rows_out, scale_log2(problem.sm_scale), problem.sm_scale,
            *q.stride(), *k.stride(), *v.stride(), *dout.stride(), BLOCK_M=tile.keep, BLOCK_N=tile.step,
            **_sizes(problem, problem.block_lists), **tile.launch, **launch.constants(problem),
        )  # fmt: skip
    if not problem.broadcast_q:
        return dq
    return dq.view(-1, *q.shape).sum(0).to(q.dtype) if problem.num_batches else torch.zeros_like(q)


def _dkdv(problem: Problem, dout, q, k, v, lse, delta, turned=None) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    queries, keys = grids(problem)
    if queries.rows and keys.rows:
        turned = transposed_lists(problem, turned)
        tile = _tile(problem, DKDV)
        kernels.dkdv_kernel[_grid(keys, tile.keep, problem.num_kv_heads)](
            q, k, v, dout, lse, delta, dk, dv, *_lists(problem, turned, keys, queries, keys),
            problem.num_heads, problem.rows_out, scale_log2(problem.sm_scale), problem.sm_scale,
            *q.stride(), *k.stride(), *v.stride(), *dout.stride(), BLOCK_M=tile.step, BLOCK_N=tile.keep,
            **_sizes(problem, turned), **tile.launch, **launch.constants(problem),
        )  # fmt: skip
    return dk, dv


def grids(problem: Problem) -> tuple[Grid, Grid]:
    """Return the grids of the queries' and the keys' blocks."""
    lists = problem.block_lists
    offsets = problem.query_offset, problem.key_offset
    queries = query_grid(*offsets, problem.rows_q, lists.block, problem.broadcast_q)
    return queries, grid_of(problem.key_offset, problem.rows_kv, lists.other_block)


def records_of(problem: Problem, side: Grid, queries: Grid, keys: Grid) -> Tensor:
    """Return [side.rows, 8] int32: what :func:`jfa.kernels.portable.block_sparse.load_record` reads, per row of the walking side.

    A sequence whose output rows are not inside the tensor has no queries.
    """
    len_q, q_begin, out_begin = queries.length, _begins(problem.query_offset, problem.rows_q), None
    if problem.broadcast_q:
        q_begin = torch.zeros_like(len_q)
        out_begin = torch.arange(problem.num_batches, device=len_q.device) * problem.rows_q
        if problem.output_offset is not None:
            out_begin = problem.output_offset[:-1].long()
            inside = (out_begin >= 0) & (out_begin + problem.rows_q <= problem.rows_out)
            len_q, out_begin = torch.where(inside, len_q, 0), torch.where(inside, out_begin, 0)
    lo, hi = problem.band.bounds(len_q, keys.length)
    out_begin = q_begin if out_begin is None else out_begin
    fields = q_begin, len_q, out_begin, _begins(problem.key_offset, problem.rows_kv), keys.length, lo, hi
    of_sequence = torch.stack(fields, 1)[side.seq]
    row = torch.where(side.exist > 0, side.index * side.block, 1 << 30)  # past any sequence: nothing to do
    return torch.cat([of_sequence, row[:, None]], 1).to(torch.int32)


def _begins(offsets: Tensor, rows: int) -> Tensor:
    return offsets[:-1].long().clamp(0, rows)


def _lists(problem: Problem, lists, side: Grid, queries: Grid, keys: Grid) -> tuple:
    records = records_of(problem, side, queries, keys)
    return records, *lists.tensors, side.rows, lists.columns.numel()


def _grid(side: Grid, keep: int, heads: int) -> tuple[int]:
    return (side.rows * (side.block // keep) * heads,)


def _sizes(problem: Problem, lists) -> dict:
    sizes = dict(BLOCK_D=launch.columns(problem.head_dim), BLOCK_DV=launch.columns(problem.head_dim_v))
    return sizes | dict(ROWS=lists.block, COLUMNS=lists.other_block, LIST_HEADS=lists.heads)


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
