"""The forward in plain Triton: one program per unit of work and key/value head.

A unit is a tile of BLOCK_M packed query rows of one sequence, or one of several chunks of its keys where a mega-sequence is
split (see tiles.py). Only the edges of what a tile sees need a mask (a causal diagonal, a window's rims, the sequence's tail); the
bulk, which every row sees whole, runs without. Loads by pointer are masked as well, so there the loop is peeled into two. By
TMA (GPUs from Hopper on) a box ends where its sequence ends: one loop with a branch then keeps the pipeline filled to the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jfa.kernels.common.band import in_band
from jfa.kernels.common.ragged import load_box, store_box
from jfa.kernels.common.sequence import RUNTIME, band_of, count_edges, edge_block, load_rows, seen_range
from jfa.kernels.portable.softmax import hide, softmax_step
from jfa.kernels.portable.tiles import read_unit


@triton.jit
def _attend_block(
    acc,
    l,
    m,
    q,
    k_desc,
    v_desc,
    k_base,
    v_base,
    begin_kv,
    kv_head,
    n0,
    pos,
    len_kv,
    lo,
    hi,
    scale,
    stride_kr,
    stride_kd,
    stride_vr,
    stride_vd,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    masked,
):
    """Adds keys n0 .. n0 + BLOCK_N - 1 to a tile's running (acc, l, m).

    ``masked``: some row may not see all of them. With TMA it is known at run time only, else when compiling.
    """
    rows = tl.arange(0, BLOCK_N)
    k_ptr = k_base + tl.cast(n0, tl.int64) * stride_kr
    v_ptr = v_base + tl.cast(n0, tl.int64) * stride_vr
    if TMA:
        k = load_box(k_desc, begin_kv, len_kv, n0, kv_head, BLOCK_N, BLOCK_D)
    else:
        k = load_rows(k_ptr, rows, tl.arange(0, BLOCK_D), stride_kr, stride_kd, len_kv - n0, D, BLOCK_D, masked)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if masked:
        scores = hide(scores, in_band(pos[:, None], (n0 + rows)[None, :], len_kv, lo, hi, HAS_LO, HAS_HI), NEGATIVE)
    # Without a band the first block of a tile or chunk shows every row a key, so that no maximum stays -inf.
    p, alpha, m = softmax_step(scores, m, scale, NEGATIVE, HAS_LO or HAS_HI)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if TMA:
        v = load_box(v_desc, begin_kv, len_kv, n0, kv_head, BLOCK_N, BLOCK_DV)
    else:
        v = load_rows(v_ptr, rows, tl.arange(0, BLOCK_DV), stride_vr, stride_vd, len_kv - n0, DV, BLOCK_DV, masked)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l, m


@triton.jit
def _leave_part(acc, l, m, partial_acc, partial_ml, slot, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Writes one chunk's (acc, l, m) into its slot, for the chunk that arrives last to merge."""
    slot = tl.cast(slot, tl.int64)
    rows = tl.arange(0, BLOCK_M)
    tl.store(partial_acc + slot * BLOCK_M * BLOCK_DV + rows[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :], acc)
    tl.store(partial_ml + slot * 2 * BLOCK_M + rows, m)
    tl.store(partial_ml + slot * 2 * BLOCK_M + BLOCK_M + rows, l)


@triton.jit
def _merge_chunks(partial_acc, partial_ml, first, chunks, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """(acc, l, m) of a tile from the partial results of its chunks, always summed in the same order."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(0, chunks, num_stages=3):
        slot = tl.cast(first + i, tl.int64)
        part_m = tl.load(partial_ml + slot * 2 * BLOCK_M + rows, cache_modifier=".cg")
        part_l = tl.load(partial_ml + slot * 2 * BLOCK_M + BLOCK_M + rows, cache_modifier=".cg")
        part = tl.load(
            partial_acc + slot * BLOCK_M * BLOCK_DV + rows[:, None] * BLOCK_DV + cols[None, :], cache_modifier=".cg"
        )
        new_m = tl.maximum(m, part_m)
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        old_weight = tl.math.exp2(m - shift)
        weight = tl.math.exp2(part_m - shift)
        l = l * old_weight + part_l * weight
        acc = acc * old_weight[:, None] + part * weight[:, None]
        m = new_m
    return acc, l, m


@triton.jit
def _rows_of_tile(m0, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BOXED: tl.constexpr):
    """(position, head in its group) of a tile's packed rows. A TMA box holds one head's rows after another's."""
    i = tl.arange(0, BLOCK_M)
    if BOXED:
        PLACES: tl.constexpr = BLOCK_M // GROUP
        return m0 // GROUP + i % PLACES, i // PLACES
    return (m0 + i) // GROUP, (m0 + i) % GROUP


@triton.jit
def _store_tile(
    acc, l, m, out_desc, out, lse, first_out, m0, len_q, kv_head, rows_out, stride_or, stride_oh,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, BOXED: tl.constexpr,
    BOXED_OUT: tl.constexpr,
):  # fmt: skip
    """Normalises a tile and writes its output rows and natural-log LSE; a row without keys gets 0 and -inf."""
    pos, in_group = _rows_of_tile(m0, GROUP, BLOCK_M, BOXED)
    head = kv_head * GROUP + in_group
    keep = pos < len_q
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    natural = tl.where(empty, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)
    row = tl.cast(first_out, tl.int64) + pos
    tl.store(lse + tl.cast(head, tl.int64) * rows_out + row, natural, mask=keep)
    if BOXED_OUT:
        store_box(out_desc, first_out, len_q, m0 // GROUP, kv_head * GROUP, acc / l[:, None], GROUP, BLOCK_M, BLOCK_DV)
    else:
        cols = tl.arange(0, BLOCK_DV)
        pointers = out + row[:, None] * stride_or + (head * stride_oh)[:, None] + cols[None, :]
        tl.store(pointers, (acc / l[:, None]).to(out.dtype.element_ty), mask=keep[:, None] & (cols < DV)[None, :])


@triton.jit
def load_queries(
    q_desc, q_ptr, begin_q, m0, len_q, kv_head, stride_qr, stride_qh, stride_qd, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BOXED: tl.constexpr, BOXED_Q: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_D] of packed query rows, zeros past the sequence's end."""
    cols = tl.arange(0, BLOCK_D)
    if BOXED_Q:
        return load_box(q_desc, begin_q, len_q, m0 // GROUP, kv_head * GROUP, BLOCK_M, BLOCK_D)
    pos, in_group = _rows_of_tile(m0, GROUP, BLOCK_M, BOXED)
    rows = q_ptr + (tl.cast(begin_q, tl.int64) + pos) * stride_qr + (kv_head * GROUP + in_group) * stride_qh
    keep = (pos < len_q)[:, None] & (cols < D)[None, :]
    return tl.load(rows[:, None] + cols[None, :] * stride_qd, mask=keep, other=0.0)


@triton.jit
def attend_unit(
    q, k_desc, v_desc, out_desc, k_ptr, v_ptr, out_ptr, lse_ptr, arrivals, partial_acc, partial_ml, first_out, m0, code, slot,
    len_q, begin_kv, len_kv, kv_head, num_kv_heads, rows_out, scale, lo_start, lo_end, hi_start, hi_end,
    stride_kr, stride_kh, stride_kd, stride_vr, stride_vh, stride_vd, stride_or, stride_oh,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    NEGATIVE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BOXED: tl.constexpr,
    BOXED_OUT: tl.constexpr,
):  # fmt: skip
    """One unit: walks over its keys, then writes the tile, or its part of it (whoever arrives last merges and writes)."""
    pos = _rows_of_tile(m0, GROUP, BLOCK_M, BOXED)[0]
    k_base = k_ptr + tl.cast(begin_kv, tl.int64) * stride_kr + kv_head * stride_kh
    v_base = v_ptr + tl.cast(begin_kv, tl.int64) * stride_vr + kv_head * stride_vh

    lo, hi = band_of(len_q, len_kv, lo_start, lo_end, hi_start, hi_end)
    last = tl.maximum(tl.minimum((m0 + BLOCK_M - 1) // GROUP, len_q - 1), m0 // GROUP)
    start, edges, bulk_start, bulk, end = seen_range(m0 // GROUP, last, lo, hi, len_kv, BLOCK_N, HAS_LO, HAS_HI)
    num_edges = count_edges(edges, bulk_start, bulk, end, BLOCK_N)
    chunks = 1
    chunk = 0
    if SPLIT:
        chunks = code & 0xFFFF
        chunk = code >> 16

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if TMA:  # boxes end with the sequence, so one loop does: a second one would wait for its first keys again
        blocks = bulk + num_edges
        for i in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            acc, l, m = _attend_block(
                acc, l, m, q, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, start + i * BLOCK_N, pos, len_kv, lo, hi, scale,
                stride_kr, stride_kd, stride_vr, stride_vd, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                HAS_LO, HAS_HI, NEGATIVE, PRECISION, TMA, (i < edges) | (i >= edges + bulk),
            )  # fmt: skip
    else:
        for i in range(bulk * chunk // chunks, bulk * (chunk + 1) // chunks):
            acc, l, m = _attend_block(
                acc, l, m, q, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, bulk_start + i * BLOCK_N, pos, len_kv, lo, hi,
                scale, stride_kr, stride_kd, stride_vr, stride_vd, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                HAS_LO, HAS_HI, NEGATIVE, PRECISION, TMA, False,
            )  # fmt: skip
        for i in range(num_edges * chunk // chunks, num_edges * (chunk + 1) // chunks):
            acc, l, m = _attend_block(
                acc, l, m, q, k_desc, v_desc, k_base, v_base, begin_kv, kv_head,
                edge_block(i, start, edges, bulk_start, bulk, BLOCK_N), pos, len_kv, lo, hi, scale,
                stride_kr, stride_kd, stride_vr, stride_vd, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                HAS_LO, HAS_HI, NEGATIVE, PRECISION, TMA, True,
            )  # fmt: skip

    arrived = chunks - 1
    if SPLIT:
        if chunks > 1:
            first = slot * num_kv_heads + kv_head * chunks
            _leave_part(acc, l, m, partial_acc, partial_ml, first + chunk, BLOCK_M, BLOCK_DV)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + first, 1, sem="acq_rel")
            if arrived == chunks - 1:
                acc, l, m = _merge_chunks(partial_acc, partial_ml, first, chunks, BLOCK_M, BLOCK_DV)
                tl.store(arrivals + first, 0)  # ready for the next launch with the same plan
    if arrived == chunks - 1:
        _store_tile(
            acc, l, m, out_desc, out_ptr, lse_ptr, first_out, m0, len_q, kv_head, rows_out, stride_or, stride_oh,
            GROUP, DV, BLOCK_M, BLOCK_DV, BOXED, BOXED_OUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    units,
    counts,
    arrivals,
    partial_acc,
    partial_ml,
    output_offset,
    rows_q,
    rows_out,
    num_kv_heads,
    scale,
    lo_start,
    lo_end,
    hi_start,
    hi_end,
    stride_qr,
    stride_qh,
    stride_qd,
    stride_kr,
    stride_kh,
    stride_kd,
    stride_vr,
    stride_vh,
    stride_vd,
    stride_or,
    stride_oh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BOXED: tl.constexpr,
    BOXED_Q: tl.constexpr,
    BOXED_OUT: tl.constexpr,
):
    """This program computes one unit (all of a query tile's keys, or one chunk of them) of one key/value head."""
    kv_head = tl.program_id(0) % num_kv_heads
    used, b, tile, code, slot, begin_q, len_q, begin_kv, len_kv = read_unit(units, counts, tl.program_id(0) // num_kv_heads)
    if not used:
        return
    m0 = tile * BLOCK_M
    first_out = begin_q
    if BROADCAST:
        first_out = b * rows_q
        if HAS_SLOTS:
            first_out = tl.load(output_offset + b)
            inside = (first_out >= 0) & (first_out + rows_q <= rows_out)
            len_q = tl.where(inside, len_q, 0)
            first_out = tl.where(inside, first_out, 0)  # a TMA store at a negative row traps, even one that writes nothing

    q = load_queries(
        q_desc, q_ptr, begin_q, m0, len_q, kv_head, stride_qr, stride_qh, stride_qd, GROUP, D, BLOCK_D, BLOCK_M,
        BOXED, BOXED_Q,
    )  # fmt: skip
    attend_unit(
        q, k_desc, v_desc, out_desc, k_ptr, v_ptr, out_ptr, lse_ptr, arrivals, partial_acc, partial_ml, first_out, m0, code, slot,
        len_q, begin_kv, len_kv, kv_head, num_kv_heads, rows_out, scale, lo_start, lo_end, hi_start, hi_end,
        stride_kr, stride_kh, stride_kd, stride_vr, stride_vh, stride_vd, stride_or, stride_oh,
        GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI,
        NEGATIVE, SPLIT, PRECISION, TMA, BOXED, BOXED_OUT,
    )  # fmt: skip

