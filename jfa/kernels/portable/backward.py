"""The backward in plain Triton, in two passes over the scores.

With P = exp2(S * scale - LSE) and delta = rowsum(O * dO) - dLSE:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dK = scale dS^T Q      dQ = scale dS K

``dkdv_kernel`` keeps a tile of keys and walks over the queries that see it; ``dq_kernel`` keeps a tile of queries and
walks over its keys. Each program owns what it writes, so gradients are bitwise reproducible. A single pass that adds dQ
with fp32 atomics needs five products instead of seven, but was slower on an H200 (docs/portable-notes.md).

Packed rows (rows.py) make the walk over queries a walk over all heads of a group: dK and dV are their sum, in fp32.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import Span, aggregate, load_tile
from jfa.kernels.common.softmax import at_most_one, lse_to_subtract
from jfa.kernels.portable.rows import Operand, Rows, contiguous, padded, per_row, positions
from jfa.kernels.portable.walk import seen_keys, seen_queries

# Numbers that change with the data: Triton would compile again for each that turns divisible by 16.
RUNTIME = ["rows_out"]


@aggregate
class Choices:
    """Compile-time choices of a backward."""

    block_m: tl.constexpr
    block_n: tl.constexpr
    group: tl.constexpr
    boxed: tl.constexpr  # order of packed rows; see jfa.kernels.portable.rows
    precision: tl.constexpr


@aggregate
class Queries:
    """Data of a block of packed query rows in a backward: tiles [rows, D] and [rows, Dv], numbers [rows] in log2
    units."""

    q: tl.tensor
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    position: tl.tensor


@triton.jit
def delta_of(out, dout, dlse, r0, BLOCK: tl.constexpr):
    """Return (dO, delta) of a block of packed rows; ``dlse`` may be None."""
    do = dout.load(r0, BLOCK, True)
    delta = tl.sum(out.load(r0, BLOCK, True).to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        delta -= dlse.load_numbers(r0, BLOCK, 0.0)
    return do, delta


@aggregate
class Side:
    """Tensors that are read per query row in addition to Q. ``dlse`` may be None; ``delta``, if not None, is written."""

    out: Operand
    dout: Operand
    lse: Operand
    dlse: tl.core.base_value
    delta: tl.core.base_value

    @triton.jit
    def load(self, tile, r0, kv_head, BLOCK: tl.constexpr):
        """Return (dO, LSE in log2 units, delta) of the packed rows from r0 on in one sequence."""
        dlse = None
        if self.dlse is not None:
            dlse = self.dlse.of(tile.out, kv_head)
        do, delta = delta_of(self.out.of(tile.out, kv_head), self.dout.of(tile.out, kv_head), dlse, r0, BLOCK)
        if self.delta is not None:
            self.delta.of(tile.out, kv_head).store_numbers(r0, delta, BLOCK)
        lse = lse_to_subtract(self.lse.of(tile.out, kv_head).load_numbers(r0, BLOCK, float("inf")))
        return do, lse, delta


@triton.jit
def side_of(out, dout, lse_ptr, dlse_ptr, delta_ptr, rows_out):
    """Return the Side of a kernel; ``dlse_ptr`` and ``delta_ptr`` may be None."""
    dlse = None
    if dlse_ptr is not None:
        dlse = per_row(dlse_ptr, rows_out, out.group, False)
    delta = None
    if delta_ptr is not None:
        delta = per_row(delta_ptr, rows_out, out.group, False)
    return Side(out, dout, per_row(lse_ptr, rows_out, out.group, False), dlse, delta)


# ------------------------------------------------------------------------------------------------------------------ dQ
@triton.jit(do_not_specialize=RUNTIME)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
    k_desc,
    v_desc,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    records,
    counts,
    rows_out,
    num_kv_heads,
    scale,
    sm_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dQ of one tile of packed queries, and delta of its rows for the pass over keys that follows."""
    kv_head = tl.program_id(0) % num_kv_heads
    unit = tl.program_id(0) // num_kv_heads
    tile = load_tile(records, unit, HAS_LO, HAS_HI)
    if unit >= tl.load(counts + 1):
        return
    c = Choices(BLOCK_M, BLOCK_N, GROUP, False, PRECISION)
    out = contiguous(out_ptr, None, num_kv_heads, DV, GROUP, False)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), DV, GROUP, False)
    side = side_of(out, dout, lse_ptr, dlse_ptr, delta_ptr, rows_out)
    do, lse, delta = side.load(tile, tile.row, kv_head, BLOCK_M)
    q = Operand(q_ptr, None, (q_row, q_head), D, GROUP, False).of(tile.q, kv_head).load(tile.row, BLOCK_M, True)
    x = Queries(q, do, lse, delta, positions(tile.row, BLOCK_M, GROUP, False))
    k = Operand(k_ptr, k_desc, (k_row, k_head), D, 1, False).of(tile.kv, kv_head)
    v = Operand(v_ptr, v_desc, (v_row, v_head), DV, 1, False).of(tile.kv, kv_head)
    dq = dq_over_keys(tl.zeros([BLOCK_M, padded(D)], tl.float32), x, k, v, tile, scale, c)
    contiguous(dq_ptr, None, num_kv_heads, D, GROUP, False).of(tile.q, kv_head).store(tile.row, dq * sm_scale, BLOCK_M)


@triton.jit
def dq_over_keys(dq, x, k, v, tile, scale, c):
    """Add all keys that a tile of packed queries sees to its dQ [BLOCK_M, D]."""
    seen = seen_keys(tile, c.block_m, c.block_n, c.group)
    for i in range(seen.bulk_begin, seen.bulk_end):
        dq = dq_block(dq, x, k, v, i, tile, scale, c, False)
    bulk = seen.bulk_end - seen.bulk_begin
    for i in range(seen.first, seen.end - bulk):
        edge = tl.where(i < seen.bulk_begin, i, i + bulk)
        dq = dq_block(dq, x, k, v, edge, tile, scale, c, True)
    return dq


@triton.jit
def dq_block(dq, x, k, v, i, tile, scale, c, masked: tl.constexpr):
    """Add the i-th block of keys to a query tile's dQ."""
    n0 = i * c.block_n
    keys = k.load(n0, c.block_n, masked)
    values = v.load(n0, c.block_n, masked)
    s = tl.dot(x.q, tl.trans(keys), input_precision=c.precision)
    dp = tl.dot(x.do, tl.trans(values), input_precision=c.precision)
    p = at_most_one(tl.math.exp2(s * scale - x.lse[:, None]))
    if masked:
        key = n0 + tl.arange(0, c.block_n)
        p = tl.where(tile.pair_mask(x.position[:, None], key[None, :]), p, 0.0)
    ds = (p * (dp - x.delta[:, None])).to(keys.dtype)
    return tl.dot(ds, keys, dq, input_precision=c.precision)


# ----------------------------------------------------------------------------------------------------------- dK and dV
@triton.jit(do_not_specialize=RUNTIME)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_desc,
    dout_desc,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    records,
    counts,
    rows_out,
    num_kv_heads,
    scale,
    sm_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dK and dV of one tile of keys of one head, over all queries (of the whole group) that see it."""
    kv_head = tl.program_id(0) % num_kv_heads
    unit = tl.program_id(0) // num_kv_heads
    tile = load_tile(records, unit, HAS_LO, HAS_HI)
    if unit >= tl.load(counts + 1):
        return
    BOXED: tl.constexpr = q_desc is not None
    c = Choices(BLOCK_M, BLOCK_N, GROUP, BOXED, PRECISION)
    k = Operand(k_ptr, None, (k_row, k_head), D, 1, False).of(tile.kv, kv_head).load(tile.row, BLOCK_N, True)
    v = Operand(v_ptr, None, (v_row, v_head), DV, 1, False).of(tile.kv, kv_head).load(tile.row, BLOCK_N, True)
    q = Operand(q_ptr, q_desc, (q_row, q_head), D, GROUP, BOXED).of(tile.q, kv_head)
    dout = Operand(dout_ptr, dout_desc, (dout_row, dout_head), DV, GROUP, BOXED).of(tile.out, kv_head)
    lse = per_row(lse_ptr, rows_out, GROUP, BOXED).of(tile.out, kv_head)
    delta = per_row(delta_ptr, rows_out, GROUP, BOXED).of(tile.out, kv_head)
    dk, dv = dkdv_over_queries(k, v, QueryRows(q, dout, lse, delta), tile, scale, c)
    contiguous(dk_ptr, None, num_kv_heads, D, 1, False).of(tile.kv, kv_head).store(tile.row, dk * sm_scale, BLOCK_N)
    contiguous(dv_ptr, None, num_kv_heads, DV, 1, False).of(tile.kv, kv_head).store(tile.row, dv, BLOCK_N)


@aggregate
class QueryRows:
    """The query rows of a sequence, as a pass over keys reads them."""

    q: Rows
    dout: Rows
    lse: Rows
    delta: Rows


@triton.jit
def dkdv_over_queries(k, v, rows, tile, scale, c):
    """Return (dK / sm_scale, dV) of a tile of keys: [BLOCK_N, D] and [BLOCK_N, Dv], fp32."""
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(v.shape, tl.float32)
    seen = seen_queries(tile, c.block_n, c.block_m, c.group)
    if (
        rows.q.tensor.desc is not None
    ):  # boxes end with the sequence: a second loop would wait for its first queries again
        for i in range(seen.first, seen.end):
            dk, dv = dkdv_block(dk, dv, k, v, rows, i, tile, scale, c, (i < seen.bulk_begin) | (i >= seen.bulk_end))
    else:
        whole = tl.maximum(tl.minimum(seen.bulk_end, tile.q.length * c.group // c.block_m), seen.bulk_begin)
        for i in range(seen.bulk_begin, whole):
            dk, dv = dkdv_block(dk, dv, k, v, rows, i, tile, scale, c, False)
        bulk = whole - seen.bulk_begin
        for i in range(seen.first, seen.end - bulk):
            edge = tl.where(i < seen.bulk_begin, i, i + bulk)
            dk, dv = dkdv_block(dk, dv, k, v, rows, edge, tile, scale, c, True)
    return dk, dv


@triton.jit
def dkdv_block(dk, dv, k, v, rows, i, tile, scale, c, masked):
    """Add the i-th block of packed query rows to a key tile's (dK, dV)."""
    r0 = i * c.block_m
    q = rows.q.load(r0, c.block_m, masked)
    lse = lse_to_subtract(rows.lse.load_numbers(r0, c.block_m, float("inf")))
    s = tl.dot(k, tl.trans(q), input_precision=c.precision)
    p = at_most_one(tl.math.exp2(s * scale - lse[None, :]))
    # Without a band queries past the end have P = 0 by their LSE, and keys past the end are computed and not stored.
    if tile.band.has_lo or tile.band.has_hi:
        if masked:
            key = tile.row + tl.arange(0, c.block_n)
            position = positions(r0, c.block_m, c.group, c.boxed)
            p = tl.where(tile.pair_mask(position[None, :], key[:, None]), p, 0.0)
    do = rows.dout.load(r0, c.block_m, masked)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=c.precision)
    dp = tl.dot(v, tl.trans(do), input_precision=c.precision)
    delta = rows.delta.load_numbers(r0, c.block_m, 0.0)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=c.precision)
    return dk, dv


# --------------------------------------------------------------------------------------------------------------- delta
@triton.jit(do_not_specialize=RUNTIME)
def delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    dout_row,
    dout_head,
    rows_out,
    num_heads,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute delta [H, rows_out] of BLOCK_M rows of one head: only where dQ, whose pass does it, is not wanted."""
    r0 = tl.program_id(0) // num_heads * BLOCK_M
    head = tl.program_id(0) % num_heads
    rows = Span(rows_out * 0, rows_out)
    out = contiguous(out_ptr, None, num_heads, DV, 1, False).of(rows, head)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), DV, 1, False).of(rows, head)
    dlse = None
    if dlse_ptr is not None:
        dlse = per_row(dlse_ptr, rows_out, 1, False).of(rows, head)
    _, delta = delta_of(out, dout, dlse, r0, BLOCK_M)
    per_row(delta_ptr, rows_out, 1, False).of(rows, head).store_numbers(r0, delta, BLOCK_M)
