"""Arrays in which every sequence owns whole blocks of rows, so that a backward's loops read and add without masks.

A backward walks queries in blocks of ``pad`` rows: it reads their log-sum-exp and delta and adds to their dQ. In a
packed array the last block of a sequence would reach into the next one, and a bulk copy could start at an unaligned
address; the padding avoids both. Rows that do not exist get lse = +inf, which makes their probabilities 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.sequences import rows_of
from jfa.kernels.common.softmax import lse_to_subtract


@dataclass(frozen=True)
class PaddedRows:
    """The shape of such arrays for one problem.

    ``blocks`` [count / pad, 2] int32 gives each block's first row in the output and how many of its rows exist.
    """

    blocks: Tensor
    count: int
    pad: int


def padded(rows: int, pad: int) -> int:
    """Return rows rounded up to whole blocks."""
    return -(-rows // pad) * pad


def padded_rows(problem: Problem, pad: int) -> PaddedRows:
    """Return the layout for a problem: its size from shapes, its blocks from offsets, on the device.

    Every sequence, even an empty one, owns a block, and begins at its first row plus ``pad`` rows for every sequence before it,
    rounded down to a block: each of them grows by less than that. So no prefix sum is needed.
    """
    if problem.broadcast_q:
        count = problem.num_batches * padded(problem.rows_q, pad)
    else:
        count = padded(problem.rows_q, pad) + (problem.num_batches + 1) * pad
    blocks = torch.empty(count // pad, 2, dtype=torch.int32, device=problem.device)
    blocks_kernel[(triton.cdiv(count // pad, 128),)](
        problem.query_offset,
        problem.key_offset if problem.output_offset is None else problem.output_offset,
        blocks,
        *(problem.num_batches, problem.rows_q, problem.rows_out, count // pad),
        BROADCAST_Q=problem.broadcast_q,
        SLOTS=problem.output_offset is not None,
        PAD=pad,
        STEPS=problem.num_batches.bit_length(),
        N=128,
    )
    return PaddedRows(blocks, count, pad)


def row_constants(problem: Problem, rows: PaddedRows, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None):
    """Return (lse2, delta), each [H, count] fp32: lse in base 2, as P's recomputation subtracts it, and rowsum(out * dout) - dlse.

    out, dout [rows_out, H, Dv] with a last stride of 1; lse, dlse [H, rows_out].
    """
    lse2, delta = torch.empty(2, problem.num_heads, rows.count, dtype=torch.float32, device=out.device)
    constants_kernel[(rows.count // rows.pad, problem.num_heads)](
        *(out, dout, lse, lse if dlse is None else dlse.contiguous()),
        *(rows.blocks, lse2, delta),
        *(problem.rows_out, rows.count),
        *(*out.stride()[:2], *dout.stride()[:2]),
        DIM=problem.head_dim_v,
        DIM_BLOCK=triton.next_power_of_2(problem.head_dim_v),
        HAS_DLSE=dlse is not None,
        ROWS=rows.pad,
        num_warps=8,
    )
    return lse2, delta


def finish_dq(problem: Problem, rows: PaddedRows, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dq [rows_q, H, D] = sm_scale * sums, from [H, padded rows, columns] fp32; rows that no sequence covers become 0."""
    if problem.broadcast_q:
        dq = sums[:, : problem.rows_q, : problem.head_dim].permute(1, 0, 2) * problem.sm_scale
        return dq.to(dtype).contiguous()
    dq = torch.zeros(problem.rows_q, problem.num_heads, problem.head_dim, dtype=dtype, device=sums.device)
    finish_kernel[(rows.count // rows.pad, problem.num_heads)](
        *(sums, dq, rows.blocks),
        *(problem.num_heads, rows.count),
        problem.sm_scale,
        DIM=problem.head_dim,
        COLUMNS=sums.shape[2],
        ROWS=rows.pad,
    )
    return dq


@triton.jit(do_not_specialize=["batches", "rows_q", "rows_out", "count"])
def blocks_kernel(
    query_offset,
    output_offset,
    blocks,
    batches,
    rows_q,
    rows_out,
    count,
    BROADCAST_Q: tl.constexpr,
    SLOTS: tl.constexpr,
    PAD: tl.constexpr,
    STEPS: tl.constexpr,
    N: tl.constexpr,
):
    """Describe N padded blocks per program; see :class:`PaddedRows`. Halving STEPS times finds each block's sequence."""
    block = tl.program_id(0) * N + tl.arange(0, N)
    row = block * PAD
    if BROADCAST_Q:
        blocks_each = tl.cdiv(rows_q, PAD)
        seq = tl.minimum(block // blocks_each, batches - 1)
        begin = seq * rows_q
        length = begin * 0 + rows_q
        if SLOTS:
            begin = tl.load(output_offset + seq)
            length = tl.where((begin >= 0) & (begin <= rows_out - rows_q), rows_q, 0)
        inside = row - seq * blocks_each * PAD
    else:
        seq = block * 0
        last = seq + batches - 1
        for _ in range(STEPS):
            middle = (seq + last + 1) // 2
            begin, _ = rows_of(query_offset, middle, rows_q)
            here = (begin + middle * PAD) // PAD * PAD <= row
            seq = tl.where(here, middle, seq)
            last = tl.where(here, last, middle - 1)
        begin, length = rows_of(query_offset, seq, rows_q)
        inside = row - (begin + seq * PAD) // PAD * PAD
    exist = tl.where(inside >= 0, tl.minimum(tl.maximum(length - inside, 0), PAD), 0)
    tl.store(blocks + 2 * block, tl.where(exist > 0, begin + inside, 0), mask=block < count)
    tl.store(blocks + 2 * block + 1, exist, mask=block < count)


@triton.jit
def constants_kernel(
    out,
    dout,
    lse,
    dlse,
    blocks,
    lse2,
    delta,
    rows_out,
    padded_count,
    out_row,
    out_head,
    dout_row,
    dout_head,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the constants of one padded block and head per program; see :func:`row_constants`. Strides are in elements."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(blocks + 2 * block)
    exist = tl.load(blocks + 2 * block + 1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, DIM_BLOCK)[None, :]
    valid = rows < exist
    inside = valid[:, None] & (columns < DIM)
    row = (begin + rows).to(tl.int64)
    o = tl.load(out + (row * out_row + head * out_head)[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(dout + (row * dout_row + head * dout_head)[:, None] + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.sum(o * do, 1)
    if HAS_DLSE:
        d -= tl.load(dlse + head * rows_out + row, mask=valid, other=0.0)
    natural = tl.load(lse + head * rows_out + row, mask=valid, other=float("-inf"))
    empty = natural == float("-inf")
    to = head * padded_count + block * ROWS + rows
    tl.store(lse2 + to, lse_to_subtract(natural))
    tl.store(delta + to, tl.where(empty, 0.0, d))


@triton.jit
def finish_kernel(
    sums, dq, blocks, heads, padded_count, scale, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Write dq of one padded block and head per program: dq [rows_q, H, D] = scale * sums [H, padded_count, COLUMNS]."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(blocks + 2 * block)
    exist = tl.load(blocks + 2 * block + 1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    if exist > 0:
        inside = (rows < exist)[:, None] & (columns < DIM)
        x = tl.load(
            sums + ((head * padded_count + block * ROWS + rows) * COLUMNS)[:, None] + columns, mask=inside, other=0.0
        )
        at = ((begin + rows).to(tl.int64) * heads + head)[:, None] * DIM + columns
        tl.store(dq + at, (x * scale).to(dq.dtype.element_ty), mask=inside)
