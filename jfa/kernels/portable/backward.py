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
from jfa.kernels.portable.rows import RUNTIME, Operand, Rows, contiguous, padded, per_row, positions
from jfa.kernels.portable.walk import seen_keys, seen_queries


@aggregate
class Queries:
    """Data of a block of packed query rows: tiles [rows, D] and [rows, Dv], numbers [rows], the LSE in log2 units."""

    q: tl.tensor
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    position: tl.tensor


@triton.jit
def delta_of(out, dout, dlse, span, kv_head, r0, BLOCK: tl.constexpr):
    """Return (dO, delta) of a block of packed rows of one sequence; ``dlse`` may have no tensor."""
    outputs, grads = out.of(span, kv_head), dout.of(span, kv_head)
    do = grads.load(r0, BLOCK, True)
    delta = tl.sum(outputs.load(r0, BLOCK, True).to(tl.float32) * do.to(tl.float32), 1)
    if dlse.ptr is not None:
        delta -= dlse.of(span, kv_head).load_numbers(r0, BLOCK, 0.0)
    return do, delta


@aggregate
class Side:
    """Tensors that are read per query row in addition to Q, or written (``delta``); the last two may have no ``ptr``."""

    out: Operand
    dout: Operand
    lse: Operand
    dlse: Operand
    delta: Operand

    @triton.jit
    def load(self, tile, r0, kv_head, BLOCK: tl.constexpr):
        """Return (dO, LSE in log2 units, delta) of the packed rows from r0 on in one sequence."""
        do, delta = delta_of(self.out, self.dout, self.dlse, tile.out, kv_head, r0, BLOCK)
        if self.delta.ptr is not None:
            self.delta.of(tile.out, kv_head).store_numbers(r0, delta, BLOCK)
        lse = lse_to_subtract(self.lse.of(tile.out, kv_head).load_numbers(r0, BLOCK, float("inf")))
        return do, lse, delta


@triton.jit
def side_of(out, dout, lse_ptr, dlse_ptr, delta_ptr, rows_out):
    """Return the Side of a kernel; ``dlse_ptr`` and ``delta_ptr`` may be None."""
    G: tl.constexpr = out.group
    dlse, delta = per_row(dlse_ptr, rows_out, G), per_row(delta_ptr, rows_out, G)
    return Side(out, dout, per_row(lse_ptr, rows_out, G), dlse, delta)


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
    cfg: tl.constexpr,
):
    """Compute dQ of one tile of packed queries, and delta of its rows for the pass over keys that follows."""
    kv_head = tl.program_id(0) % num_kv_heads
    unit = tl.program_id(0) // num_kv_heads
    tile = load_tile(records, unit, cfg.has_lo, cfg.has_hi)
    if unit >= tl.load(counts + 1):
        return
    G: tl.constexpr = cfg.group
    M: tl.constexpr = cfg.block_m
    out = contiguous(out_ptr, None, num_kv_heads, cfg.head_dim_v, G)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), cfg.head_dim_v, G, False)
    side = side_of(out, dout, lse_ptr, dlse_ptr, delta_ptr, rows_out)
    do, lse, delta = side.load(tile, tile.row, kv_head, M)
    q = Operand(q_ptr, None, (q_row, q_head), cfg.head_dim, G, False).of(tile.q, kv_head).load(tile.row, M, True)
    x = Queries(q, do, lse, delta, positions(tile.row, M, G, False))
    k = Operand(k_ptr, k_desc, (k_row, k_head), cfg.head_dim, 1, False).of(tile.kv, kv_head)
    v = Operand(v_ptr, v_desc, (v_row, v_head), cfg.head_dim_v, 1, False).of(tile.kv, kv_head)
    dq = dq_over_keys(tl.zeros([M, padded(cfg.head_dim)], tl.float32), x, k, v, tile, scale, cfg)
    contiguous(dq_ptr, None, num_kv_heads, cfg.head_dim, G).of(tile.q, kv_head).store(tile.row, dq * sm_scale, M)


@triton.jit
def dq_over_keys(dq, x, k, v, tile, scale, cfg):
    """Add all keys that a tile of packed queries sees to its dQ [BLOCK_M, D]."""
    seen = seen_keys(tile, cfg.block_m, cfg.block_n, cfg.group)
    for i in range(seen.bulk_begin, seen.bulk_end):
        dq = dq_block(dq, x, k, v, i, tile, scale, cfg, False)
    bulk = seen.bulk_end - seen.bulk_begin
    for i in range(seen.first, seen.end - bulk):
        edge = tl.where(i < seen.bulk_begin, i, i + bulk)
        dq = dq_block(dq, x, k, v, edge, tile, scale, cfg, True)
    return dq


@triton.jit
def dq_block(dq, x, k, v, i, tile, scale, cfg, masked: tl.constexpr):
    """Add the i-th block of keys to a query tile's dQ."""
    n0 = i * cfg.block_n
    keys = k.load(n0, cfg.block_n, masked)
    values = v.load(n0, cfg.block_n, masked)
    s = tl.dot(x.q, tl.trans(keys), input_precision=cfg.precision)
    dp = tl.dot(x.do, tl.trans(values), input_precision=cfg.precision)
    p = at_most_one(tl.math.exp2(s * scale - x.lse[:, None]))
    if masked:
        key = n0 + tl.arange(0, cfg.block_n)
        p = tl.where(tile.pair_mask(x.position[:, None], key[None, :]), p, 0.0)
    ds = (p * (dp - x.delta[:, None])).to(keys.dtype)
    return tl.dot(ds, keys, dq, input_precision=cfg.precision)


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
    cfg: tl.constexpr,
):
    """Compute dK and dV of one tile of keys of one head, over all queries (of the whole group) that see it."""
    kv_head = tl.program_id(0) % num_kv_heads
    unit = tl.program_id(0) // num_kv_heads
    tile = load_tile(records, unit, cfg.has_lo, cfg.has_hi)
    if unit >= tl.load(counts + 1):
        return
    BOXED: tl.constexpr = q_desc is not None
    N: tl.constexpr = cfg.block_n
    k = Operand(k_ptr, None, (k_row, k_head), cfg.head_dim, 1, False).of(tile.kv, kv_head).load(tile.row, N, True)
    v = Operand(v_ptr, None, (v_row, v_head), cfg.head_dim_v, 1, False).of(tile.kv, kv_head).load(tile.row, N, True)
    q = Operand(q_ptr, q_desc, (q_row, q_head), cfg.head_dim, cfg.group, BOXED).of(tile.q, kv_head)
    dout = Operand(dout_ptr, dout_desc, (dout_row, dout_head), cfg.head_dim_v, cfg.group, BOXED).of(tile.out, kv_head)
    lse = per_row(lse_ptr, rows_out, cfg.group, BOXED).of(tile.out, kv_head)
    delta = per_row(delta_ptr, rows_out, cfg.group, BOXED).of(tile.out, kv_head)
    dk, dv = dkdv_over_queries(k, v, QueryRows(q, dout, lse, delta), tile, scale, cfg)
    contiguous(dk_ptr, None, num_kv_heads, cfg.head_dim, 1).of(tile.kv, kv_head).store(tile.row, dk * sm_scale, N)
    contiguous(dv_ptr, None, num_kv_heads, cfg.head_dim_v, 1).of(tile.kv, kv_head).store(tile.row, dv, N)


@aggregate
class QueryRows:
    """The query rows of a sequence, as a pass over keys reads them."""

    q: Rows
    dout: Rows
    lse: Rows
    delta: Rows


@triton.jit
def dkdv_over_queries(k, v, rows, tile, scale, cfg):
    """Return (dK / sm_scale, dV) of a tile of keys: [BLOCK_N, D] and [BLOCK_N, Dv], fp32."""
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(v.shape, tl.float32)
    seen = seen_queries(tile, cfg.block_n, cfg.block_m, cfg.group)
    if rows.q.tensor.desc is not None:  # as in the forward: one loop
        for i in range(seen.first, seen.end):
            dk, dv = dkdv_block(dk, dv, k, v, rows, i, tile, scale, cfg, (i < seen.bulk_begin) | (i >= seen.bulk_end))
    else:
        whole = tl.maximum(tl.minimum(seen.bulk_end, tile.q.length * cfg.group // cfg.block_m), seen.bulk_begin)
        for i in range(seen.bulk_begin, whole):
            dk, dv = dkdv_block(dk, dv, k, v, rows, i, tile, scale, cfg, False)
        bulk = whole - seen.bulk_begin
        for i in range(seen.first, seen.end - bulk):
            edge = tl.where(i < seen.bulk_begin, i, i + bulk)
            dk, dv = dkdv_block(dk, dv, k, v, rows, edge, tile, scale, cfg, True)
    return dk, dv


@triton.jit
def dkdv_block(dk, dv, k, v, rows, i, tile, scale, cfg, masked):
    """Add the i-th block of packed query rows to a key tile's (dK, dV)."""
    r0 = i * cfg.block_m
    q = rows.q.load(r0, cfg.block_m, masked)
    lse = lse_to_subtract(rows.lse.load_numbers(r0, cfg.block_m, float("inf")))
    s = tl.dot(k, tl.trans(q), input_precision=cfg.precision)
    p = at_most_one(tl.math.exp2(s * scale - lse[None, :]))
    # Without a band queries past the end have P = 0 by their LSE, and keys past the end are computed and not stored.
    if tile.band.has_lo or tile.band.has_hi:
        if masked:
            key = tile.row + tl.arange(0, cfg.block_n)
            position = positions(r0, cfg.block_m, cfg.group, rows.q.tensor.boxed)
            p = tl.where(tile.pair_mask(position[None, :], key[:, None]), p, 0.0)
    do = rows.dout.load(r0, cfg.block_m, masked)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=cfg.precision)
    dp = tl.dot(v, tl.trans(do), input_precision=cfg.precision)
    delta = rows.delta.load_numbers(r0, cfg.block_m, 0.0)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=cfg.precision)
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
    cfg: tl.constexpr,
):
    """Compute delta [H, rows_out] of ``block_m`` rows of one head: only where dQ, whose pass does it, is not wanted."""
    r0 = tl.program_id(0) // num_heads * cfg.block_m
    head = tl.program_id(0) % num_heads
    rows = Span(rows_out * 0, rows_out)
    out = contiguous(out_ptr, None, num_heads, cfg.head_dim_v, 1)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), cfg.head_dim_v, 1, False)
    _, delta = delta_of(out, dout, per_row(dlse_ptr, rows_out, 1), rows, head, r0, cfg.block_m)
    per_row(delta_ptr, rows_out, 1).of(rows, head).store_numbers(r0, delta, cfg.block_m)
