"""The backward in plain Triton, in two passes over the scores.

With P = exp2(S * scale - LSE) and delta = rowsum(O * dO) - dLSE:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dK = scale dS^T Q      dQ = scale dS K

``dkdv_kernel`` keeps a tile of keys and walks over the queries that see it; ``dq_kernel`` keeps a tile of queries and walks
over its keys. Each owns what it writes, so gradients repeat bit by bit. One pass that adds dQ with fp32 atomics needs five
products instead of seven, and was slower on an H200 (docs/portable-notes.md).

Packed rows (sequence.py) make the walk over queries a walk over all heads of a group: dK and dV are their sum, in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jfa.kernels.common.band import in_band
from jfa.kernels.common.ragged import load_box
from jfa.kernels.common.sequence import RUNTIME, band_of, count_edges, edge_block, load_rows, seen_range
from jfa.kernels.portable.tiles import read_unit

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_packed(base, begin, r0, limit, head0, stride_row, stride_head, stride_col, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
                COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_R, BLOCK_COLS] of packed query rows r0 on, of the sequence whose first row is ``begin``."""
    rows = tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_COLS)
    if BLOCK_R % GROUP == 0:  # then r0 is a multiple of GROUP, and what varies inside the tile does not depend on it
        start = base + (tl.cast(begin, tl.int64) + r0 // GROUP) * stride_row + head0 * stride_head
        offset = (rows // GROUP) * stride_row + (rows % GROUP) * stride_head
    else:
        start = base + tl.cast(begin, tl.int64) * stride_row + head0 * stride_head
        offset = ((r0 + rows) // GROUP) * tl.cast(stride_row, tl.int64) + ((r0 + rows) % GROUP) * stride_head
    pointers = start + offset[:, None] + cols[None, :] * stride_col
    if MASKED:
        keep = (rows < limit - r0)[:, None]
        if COLS != BLOCK_COLS:
            keep = keep & (cols < COLS)[None, :]
        return tl.load(pointers, mask=keep, other=0.0)
    if COLS != BLOCK_COLS:
        return tl.load(pointers, mask=(cols < COLS)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_packed_scalars(base, begin, row, limit, head0, rows_out, other, GROUP: tl.constexpr):
    """One fp32 number for each packed row, from a tensor [H, rows_out] (LSE, delta)."""
    head = tl.cast(head0 + row % GROUP, tl.int64)
    return tl.load(base + head * rows_out + begin + row // GROUP, mask=row < limit, other=other)


@triton.jit
def to_log2(lse):
    """Natural LSE -> log2 units; rows without keys get +inf, so that exp2(s - lse) is 0 for them."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit(do_not_specialize=RUNTIME)
def delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, rows_out, num_heads, stride_or, stride_oh, stride_dr, stride_dh, stride_dd,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """This program computes delta [H, rows_out] of BLOCK_M rows of one head: only where dQ, whose pass does it, is not wanted."""
    row = tl.program_id(0) // num_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0) % num_heads
    wide = tl.cast(row, tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_DV)[None, :]
    keep = (row < rows_out)[:, None] & (cols < DV)
    o = tl.load(out_ptr + wide * stride_or + head * stride_oh + cols, mask=keep, other=0.0).to(tl.float32)
    do = tl.load(dout_ptr + wide * stride_dr + head * stride_dh + cols * stride_dd, mask=keep, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    place = tl.cast(head, tl.int64) * rows_out + row
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place, mask=row < rows_out, other=0.0)
    tl.store(delta_ptr + place, delta, mask=row < rows_out)


@triton.jit
def _dkdv_block(
    dk, dv, k, v, q_desc, dout_desc, q_ptr, dout_ptr, lse_ptr, delta_ptr, r0, first_q, first_out, packed_len, n0, len_kv, lo, hi,
    head0, rows_out, scale, stride_qr, stride_qh, stride_qd, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, masked,
):  # fmt: skip
    """Adds packed query rows r0 .. r0 + BLOCK_M - 1 to a key tile's (dK, dV)."""
    row = r0 + tl.arange(0, BLOCK_M)
    if TMA:  # a box holds one head after another: the same packed rows in another order
        PLACES: tl.constexpr = BLOCK_M // GROUP
        row = r0 + tl.arange(0, BLOCK_M) % PLACES * GROUP + tl.arange(0, BLOCK_M) // PLACES
        q = load_box(q_desc, first_q, packed_len // GROUP, r0 // GROUP, head0, BLOCK_M, BLOCK_D)
    else:
        q = load_packed(q_ptr, first_q, r0, packed_len, head0, stride_qr, stride_qh, stride_qd, BLOCK_M, GROUP, D, BLOCK_D, masked)
    lse = to_log2(load_packed_scalars(lse_ptr, first_out, row, packed_len, head0, rows_out, float("inf"), GROUP))
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.math.exp2(s * scale - lse[None, :])
    if HAS_LO or HAS_HI:  # else queries past the end have P = 0 by their LSE, and keys past the end are computed and not stored
        if masked:
            j = (n0 + tl.arange(0, BLOCK_N))[:, None]
            p = tl.where(in_band((row // GROUP)[None, :], j, len_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    if TMA:
        do = load_box(dout_desc, first_out, packed_len // GROUP, r0 // GROUP, head0, BLOCK_M, BLOCK_DV)
    else:
        do = load_packed(
            dout_ptr, first_out, r0, packed_len, head0, stride_dr, stride_dh, stride_dd, BLOCK_M, GROUP, DV, BLOCK_DV, masked
        )
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    delta = load_packed_scalars(delta_ptr, first_out, row, packed_len, head0, rows_out, 0.0, GROUP)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, q_desc, dout_desc, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, units, counts,
    output_offset, num_batches, rows_q, rows_out, num_kv_heads, scale, sm_scale,
    lo_start, lo_end, hi_start, hi_end, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd,
    stride_vr, stride_vh, stride_vd, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BROADCAST: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """This program computes dK and dV of one tile of keys of one head, over all queries (of the whole group) that see it."""
    kv_head = tl.program_id(0) % num_kv_heads
    used, b, tile, _, _, begin_kv, len_kv, first_q, len_q = read_unit(units, counts, tl.program_id(0) // num_kv_heads)
    if not used:
        return
    n0 = tile * BLOCK_N
    head0 = kv_head * GROUP
    first_out = first_q
    if BROADCAST:
        first_out = b * rows_q
        if HAS_SLOTS:
            first_out = tl.load(output_offset + tl.minimum(b, num_batches))
            len_q = tl.where((first_out >= 0) & (first_out + rows_q <= rows_out), len_q, 0)

    rows = tl.arange(0, BLOCK_N)
    k_base = k_ptr + (tl.cast(begin_kv, tl.int64) + n0) * stride_kr + kv_head * stride_kh
    v_base = v_ptr + (tl.cast(begin_kv, tl.int64) + n0) * stride_vr + kv_head * stride_vh
    k = load_rows(k_base, rows, tl.arange(0, BLOCK_D), stride_kr, stride_kd, len_kv - n0, D, BLOCK_D, True)
    v = load_rows(v_base, rows, tl.arange(0, BLOCK_DV), stride_vr, stride_vd, len_kv - n0, DV, BLOCK_DV, True)

    # Key j is seen by the queries j - hi .. j - lo: the same question as the forward's, with the sides exchanged.
    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    last = tl.minimum(n0 + BLOCK_N, len_kv) - 1
    packed_len = len_q * GROUP
    start, edges, bulk_start, bulk, end = _seen_packed(n0, last, lo, hi, len_q, BLOCK_M, GROUP, HAS_LO, HAS_HI)
    num_edges = count_edges(edges, bulk_start, bulk, end, BLOCK_M)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if TMA:  # one loop, since boxes end with the sequence: a second one would wait for its first queries again
        for i in range(bulk + num_edges):
            dk, dv = _dkdv_block(
                dk, dv, k, v, q_desc, dout_desc, q_ptr, dout_ptr, lse_ptr, delta_ptr, start + i * BLOCK_M,
                first_q, first_out, packed_len, n0, len_kv, lo, hi, head0, rows_out, scale,
                stride_qr, stride_qh, stride_qd, stride_dr, stride_dh, stride_dd, GROUP, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA, (i < edges) | (i >= edges + bulk),
            )  # fmt: skip
    else:
        for i in range(bulk):
            dk, dv = _dkdv_block(
                dk, dv, k, v, q_desc, dout_desc, q_ptr, dout_ptr, lse_ptr, delta_ptr, bulk_start + i * BLOCK_M,
                first_q, first_out, packed_len, n0, len_kv, lo, hi, head0, rows_out, scale,
                stride_qr, stride_qh, stride_qd, stride_dr, stride_dh, stride_dd, GROUP, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA, False,
            )  # fmt: skip
        for i in range(num_edges):
            dk, dv = _dkdv_block(
                dk, dv, k, v, q_desc, dout_desc, q_ptr, dout_ptr, lse_ptr, delta_ptr,
                edge_block(i, start, edges, bulk_start, bulk, BLOCK_M),
                first_q, first_out, packed_len, n0, len_kv, lo, hi, head0, rows_out, scale,
                stride_qr, stride_qh, stride_qd, stride_dr, stride_dh, stride_dd, GROUP, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA, True,
            )  # fmt: skip

    store_grad(dk_ptr, dk * sm_scale, begin_kv, n0, len_kv, kv_head, num_kv_heads, D, BLOCK_D, BLOCK_N)
    store_grad(dv_ptr, dv, begin_kv, n0, len_kv, kv_head, num_kv_heads, DV, BLOCK_DV, BLOCK_N)


@triton.jit
def _seen_packed(first, last, lo, hi, len_q, BLOCK: tl.constexpr, GROUP: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Which packed query rows see the keys first..last, cut as by seen_range."""
    start = 0
    full_from = 0
    if HAS_HI:
        start = tl.minimum(tl.maximum(first - hi, 0), len_q)
        full_from = tl.minimum(tl.maximum(last - hi, 0), len_q)
    end = len_q
    full_to = len_q
    if HAS_LO:
        end = tl.maximum(tl.minimum(last - lo + 1, len_q), start)
        full_to = tl.maximum(tl.minimum(first - lo + 1, len_q), start)
    edge_blocks = tl.cdiv((tl.minimum(full_from, end) - start) * GROUP, BLOCK)
    bulk_start = start * GROUP + edge_blocks * BLOCK
    bulk_blocks = tl.maximum(full_to * GROUP - bulk_start, 0) // BLOCK
    return start * GROUP, edge_blocks, bulk_start, bulk_blocks, end * GROUP


@triton.jit
def store_grad(ptr, grad, begin, n0, length, head, num_heads, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes rows n0 on of a sequence into a contiguous gradient [rows, num_heads, COLS], never past the sequence's end."""
    rows = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_COLS)
    base = ptr + ((tl.cast(begin, tl.int64) + n0) * num_heads + head) * COLS
    keep = (rows < length - n0)[:, None] & (cols < COLS)[None, :]
    tl.store(base + rows[:, None] * (num_heads * COLS) + cols[None, :], grad.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def dq_block(
    dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, n0, pos, len_kv, lo, hi, scale,
    stride_kr, stride_kd, stride_vr, stride_vd,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, masked,
):  # fmt: skip
    """Adds keys n0 .. n0 + BLOCK_N - 1 to a query tile's dQ."""
    rows = tl.arange(0, BLOCK_N)
    k_ptr = k_base + tl.cast(n0, tl.int64) * stride_kr
    v_ptr = v_base + tl.cast(n0, tl.int64) * stride_vr
    if TMA:
        k = load_box(k_desc, begin_kv, len_kv, n0, kv_head, BLOCK_N, BLOCK_D)
        v = load_box(v_desc, begin_kv, len_kv, n0, kv_head, BLOCK_N, BLOCK_DV)
    else:
        k = load_rows(k_ptr, rows, tl.arange(0, BLOCK_D), stride_kr, stride_kd, len_kv - n0, D, BLOCK_D, masked)
        v = load_rows(v_ptr, rows, tl.arange(0, BLOCK_DV), stride_vr, stride_vd, len_kv - n0, DV, BLOCK_DV, masked)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p = tl.math.exp2(s * scale - lse[:, None])
    if masked:
        p = tl.where(in_band(pos[:, None], (n0 + rows)[None, :], len_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit
def dq_over_keys(
    dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, m0, len_q, len_kv, scale,
    lo_start, lo_end, hi_start, hi_end, stride_kr, stride_kd, stride_vr, stride_vd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds all of a sequence's keys to the dQ of the tile of packed queries m0 .. m0 + BLOCK_M - 1."""
    pos = (m0 + tl.arange(0, BLOCK_M)) // GROUP
    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    last = tl.maximum(tl.minimum((m0 + BLOCK_M - 1) // GROUP, len_q - 1), m0 // GROUP)
    start, edges, bulk_start, bulk, end = seen_range(m0 // GROUP, last, lo, hi, len_kv, BLOCK_N, HAS_LO, HAS_HI)
    num_edges = count_edges(edges, bulk_start, bulk, end, BLOCK_N)
    for i in range(bulk):
        dq = dq_block(
            dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, bulk_start + i * BLOCK_N, pos, len_kv,
            lo, hi, scale, stride_kr, stride_kd, stride_vr, stride_vd, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
            HAS_LO, HAS_HI, PRECISION, TMA, False,
        )  # fmt: skip
    for i in range(num_edges):
        dq = dq_block(
            dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head,
            edge_block(i, start, edges, bulk_start, bulk, BLOCK_N), pos, len_kv, lo, hi, scale, stride_kr, stride_kd,
            stride_vr, stride_vd, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA, True,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=RUNTIME)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr, units, counts,
    rows_q, num_kv_heads, scale, sm_scale,
    lo_start, lo_end, hi_start, hi_end, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd,
    stride_vr, stride_vh, stride_vd, stride_or, stride_oh, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    HAS_DLSE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """This program computes dQ of one tile of packed queries, and delta of its rows for the pass over keys that follows."""
    kv_head = tl.program_id(0) % num_kv_heads
    used, b, tile, _, _, first_q, len_q, begin_kv, len_kv = read_unit(units, counts, tl.program_id(0) // num_kv_heads)
    if not used:
        return
    m0 = tile * BLOCK_M
    head0 = kv_head * GROUP
    packed_len = len_q * GROUP
    row = m0 + tl.arange(0, BLOCK_M)
    pos = row // GROUP
    do = load_packed(dout_ptr, first_q, m0, packed_len, head0, stride_dr, stride_dh, stride_dd, BLOCK_M, GROUP, DV, BLOCK_DV, True)
    o = load_packed(out_ptr, first_q, m0, packed_len, head0, stride_or, stride_oh, 1, BLOCK_M, GROUP, DV, BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= load_packed_scalars(dlse_ptr, first_q, row, packed_len, head0, rows_q, 0.0, GROUP)
    place = tl.cast(head0 + row % GROUP, tl.int64) * rows_q + first_q + pos
    tl.store(delta_ptr + place, delta, mask=row < packed_len)
    lse = to_log2(load_packed_scalars(lse_ptr, first_q, row, packed_len, head0, rows_q, float("inf"), GROUP))
    q = load_packed(q_ptr, first_q, m0, packed_len, head0, stride_qr, stride_qh, stride_qd, BLOCK_M, GROUP, D, BLOCK_D, True)
    k_base = k_ptr + tl.cast(begin_kv, tl.int64) * stride_kr + kv_head * stride_kh
    v_base = v_ptr + tl.cast(begin_kv, tl.int64) * stride_vr + kv_head * stride_vh

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = dq_over_keys(
        dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, m0, len_q, len_kv, scale,
        lo_start, lo_end, hi_start, hi_end, stride_kr, stride_kd, stride_vr, stride_vd,
        GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK_D)
    out_row = (tl.cast(first_q, tl.int64) + pos) * (num_kv_heads * GROUP) + head0 + row % GROUP
    keep = (row < packed_len)[:, None] & (cols < D)[None, :]
    tl.store(dq_ptr + out_row[:, None] * D + cols[None, :], (dq * sm_scale).to(dq_ptr.dtype.element_ty), mask=keep)

