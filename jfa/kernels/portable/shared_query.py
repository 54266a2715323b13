"""The backward of a shared query (PMA): Q stays, the sequences pass by.

All sequences ask the same few questions (Lq * group <= 128 packed rows). A program keeps one key/value head's Q tile and its
dQ on chip in fp32 and walks over a fixed share of all key blocks of all sequences: each block's dK and dV are complete after
one visit and written once, nothing is added in memory. One partial dQ a program is left; ``sum_dq_kernel`` adds them in a
fixed order. So the whole backward is deterministic and reads K, V, O, dO once. (kernel-facts: byte-bound for short queries.)

A Hopper tensor core wants 64 rows or more on a product's first side. Where the queries are fewer, keys are the rows of every
product (KEYS_FIRST: scores and dQ are transposed).
"""

from __future__ import annotations

import triton
import triton.language as tl

from jfa.kernels.common.band import in_band
from jfa.kernels.common.ragged import load_box, store_box
from jfa.kernels.common.sequence import RUNTIME, band_of, load_rows, rows_of, slack_of
from jfa.kernels.portable.backward import dq_over_keys, load_packed, load_packed_scalars, store_grad, to_log2


@triton.jit
def _pieces_of(b, key_offset, num_batches, rows_kv, piece):
    """(whole pieces, rows left over) of sequences b (a block); the slack at B, nothing past it."""
    begin = tl.minimum(tl.maximum(tl.load(key_offset + b, mask=b <= num_batches, other=0), 0), rows_kv)
    end = tl.minimum(tl.load(key_offset + b + 1, mask=b < num_batches, other=0), rows_kv)
    length = tl.where(b < num_batches, tl.maximum(end - begin, 0), tl.where(b == num_batches, rows_kv - begin, 0))
    return length // piece, length % piece


@triton.jit(do_not_specialize=RUNTIME)
def plan_pieces(
    pieces, counts, key_offset, num_batches, rows_kv, capacity, piece,
    SEQUENCES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """This program places SEQUENCES sequences' pieces (sequence, first key): whole pieces first, then the rests, longest first."""
    i = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    whole_i, rest_i = _pieces_of(i, key_offset, num_batches, rows_kv, piece)
    place = tl.zeros([SEQUENCES], tl.int32)
    rank = tl.zeros([SEQUENCES], tl.int32)
    wholes = tl.zeros([SCAN], tl.int32)
    rests = tl.zeros([SCAN], tl.int32)
    for j0 in range(0, num_batches + 1, SCAN):
        j = j0 + tl.arange(0, SCAN)
        whole, rest = _pieces_of(j, key_offset, num_batches, rows_kv, piece)
        earlier = j[None, :] < i[:, None]
        longer = (rest[None, :] > rest_i[:, None]) | ((rest[None, :] == rest_i[:, None]) & earlier)
        place += tl.sum(tl.where(earlier, whole[None, :], 0), 1)
        rank += tl.sum(tl.where(longer & (rest > 0)[None, :], 1, 0), 1)
        wholes += whole
        rests += tl.where(rest > 0, 1, 0)
    total = tl.sum(wholes, 0)
    tl.store(counts, tl.minimum(total + tl.sum(rests, 0), capacity), mask=tl.program_id(0) == 0)
    steps = tl.arange(0, 16)[None, :]
    for t0 in range(0, tl.max(whole_i, 0), 16):
        t = t0 + steps
        at = place[:, None] + t
        keep = (t < whole_i[:, None]) & (at < capacity)
        tl.store(pieces + at * 2, tl.broadcast_to(i[:, None], (SEQUENCES, 16)), mask=keep)
        tl.store(pieces + at * 2 + 1, t * piece + tl.zeros([SEQUENCES, 16], tl.int32), mask=keep)
    at = total + rank
    keep = (rest_i > 0) & (at < capacity)
    tl.store(pieces + at * 2, i, mask=keep)
    tl.store(pieces + at * 2 + 1, whole_i * piece, mask=keep)


@triton.jit
def _leave(
    descriptor, ptr, grad, begin, n0, length, head, num_heads,
    COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Writes a block of dK or dV, by TMA where the gradient's rows allow it."""
    if TMA:
        store_box(descriptor, begin, length, n0, head, grad, 1, BLOCK_N, BLOCK_COLS)
    else:
        store_grad(ptr, grad, begin, n0, length, head, num_heads, COLS, BLOCK_COLS, BLOCK_N)


@triton.jit
def _piece_block(
    dq, q, do, lse, delta, pos, k_desc, v_desc, dk_desc, dv_desc, k_base, v_base, dk_ptr, dv_ptr, begin_kv, n0, len_kv,
    live_kv, lo, hi, kv_head,
    num_kv_heads, scale, sm_scale, stride_kr, stride_kd, stride_vr, stride_vd,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
):  # fmt: skip
    """Writes dK and dV of keys n0 .. n0 + BLOCK_N - 1 of one sequence and adds their share to dQ (KEYS_FIRST: dQ^T).

    ``live_kv`` is len_kv, or 0 where no query looks: then the keys are not read, and zeros are written.
    """
    rows = tl.arange(0, BLOCK_N)
    k_ptr = k_base + tl.cast(n0, tl.int64) * stride_kr
    v_ptr = v_base + tl.cast(n0, tl.int64) * stride_vr
    if TMA:
        k = load_box(k_desc, begin_kv, live_kv, n0, kv_head, BLOCK_N, BLOCK_D)
        v = load_box(v_desc, begin_kv, live_kv, n0, kv_head, BLOCK_N, BLOCK_DV)
    else:
        k = load_rows(k_ptr, rows, tl.arange(0, BLOCK_D), stride_kr, stride_kd, live_kv - n0, D, BLOCK_D, True)
        v = load_rows(v_ptr, rows, tl.arange(0, BLOCK_DV), stride_vr, stride_vd, live_kv - n0, DV, BLOCK_DV, True)
    masked = HAS_LO or HAS_HI or (n0 + BLOCK_N > live_kv)
    if KEYS_FIRST:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.math.exp2(s * scale - lse[None, :])
        if masked:
            p = tl.where(in_band(pos[None, :], (n0 + rows)[:, None], live_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, input_precision=PRECISION)
        _leave(dv_desc, dv_ptr, dv, begin_kv, n0, len_kv, kv_head, num_kv_heads, DV, BLOCK_DV, BLOCK_N, TMA_STORE)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, input_precision=PRECISION)
        dq = tl.dot(tl.trans(k), ds, dq, input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.math.exp2(s * scale - lse[:, None])
        if masked:
            p = tl.where(in_band(pos[:, None], (n0 + rows)[None, :], live_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        _leave(dv_desc, dv_ptr, dv, begin_kv, n0, len_kv, kv_head, num_kv_heads, DV, BLOCK_DV, BLOCK_N, TMA_STORE)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    _leave(dk_desc, dk_ptr, dk * sm_scale, begin_kv, n0, len_kv, kv_head, num_kv_heads, D, BLOCK_D, BLOCK_N, TMA_STORE)
    return dq


@triton.jit(do_not_specialize=RUNTIME)
def shared_query_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, dk_desc, dv_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, dk_ptr, dv_ptr,
    dq_partial_ptr, pieces, counts,
    key_offset, output_offset, num_batches, rows_q, rows_kv, rows_out, num_kv_heads, workers, piece, scale, sm_scale,
    lo_start, lo_end, hi_start, hi_end, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd,
    stride_vr, stride_vh, stride_vd, stride_or, stride_oh, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DLSE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
):  # fmt: skip
    """This program walks over one worker's pieces of one key/value head, dealt in zigzag from the list."""
    worker = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    head0 = kv_head * GROUP
    row = tl.arange(0, BLOCK_R)
    pos = row // GROUP
    q = load_packed(q_ptr, 0, 0, rows_q * GROUP, head0, stride_qr, stride_qh, stride_qd, BLOCK_R, GROUP, D, BLOCK_D, True)
    if KEYS_FIRST:
        dq = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    else:
        dq = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    count = tl.load(counts)
    for turn in range(tl.cdiv(count, workers)):
        at = turn * workers + tl.where(turn % 2 == 0, worker, workers - 1 - worker)
        if at < count:
            b = tl.load(pieces + at * 2)
            c0 = tl.load(pieces + at * 2 + 1)
            packed_len = rows_q * GROUP
            first_out = 0
            if b < num_batches:
                begin_kv, len_kv = rows_of(key_offset, b, rows_kv)
                first_out = b * rows_q
                if HAS_SLOTS:
                    first_out = tl.load(output_offset + b)
                    packed_len = tl.where((first_out >= 0) & (first_out + rows_q <= rows_out), packed_len, 0)
            else:
                begin_kv, len_kv = slack_of(key_offset, num_batches, rows_kv)
                packed_len = 0
            do = load_packed(
                dout_ptr, first_out, 0, packed_len, head0, stride_dr, stride_dh, stride_dd, BLOCK_R, GROUP, DV, BLOCK_DV, True
            )
            o = load_packed(
                out_ptr, first_out, 0, packed_len, head0, stride_or, stride_oh, 1, BLOCK_R, GROUP, DV, BLOCK_DV, True
            )
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            if HAS_DLSE:
                delta -= load_packed_scalars(dlse_ptr, first_out, row, packed_len, head0, rows_out, 0.0, GROUP)
            lse = to_log2(load_packed_scalars(lse_ptr, first_out, row, packed_len, head0, rows_out, float("inf"), GROUP))
            live_kv = tl.where(packed_len > 0, len_kv, 0)
            lo, hi = band_of(rows_q, len_kv, lo_start, lo_end, hi_start, hi_end)
            k_base = k_ptr + tl.cast(begin_kv, tl.int64) * stride_kr + kv_head * stride_kh
            v_base = v_ptr + tl.cast(begin_kv, tl.int64) * stride_vr + kv_head * stride_vh
            for n0 in range(c0, tl.minimum(c0 + piece, len_kv), BLOCK_N):
                dq = _piece_block(
                    dq, q, do, lse, delta, pos, k_desc, v_desc, dk_desc, dv_desc, k_base, v_base, dk_ptr, dv_ptr, begin_kv, n0,
                    len_kv, live_kv, lo, hi, kv_head, num_kv_heads, scale, sm_scale, stride_kr, stride_kd, stride_vr, stride_vd,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, KEYS_FIRST, HAS_LO, HAS_HI, PRECISION, TMA,
                    TMA_STORE,
                )  # fmt: skip
    cols = tl.arange(0, BLOCK_D)
    partial = dq_partial_ptr + tl.cast(tl.program_id(0), tl.int64) * BLOCK_R * BLOCK_D
    if KEYS_FIRST:
        tl.store(partial + row[None, :] * BLOCK_D + cols[:, None], dq)
    else:
        tl.store(partial + row[:, None] * BLOCK_D + cols[None, :], dq)


@triton.jit(do_not_specialize=RUNTIME)
def shared_dq_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_partial_ptr,
    key_offset, output_offset, num_batches, rows_q, rows_kv, rows_out, num_kv_heads, workers, tiles, scale,
    lo_start, lo_end, hi_start, hi_end, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd,
    stride_vr, stride_vh, stride_vd, stride_or, stride_oh, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DLSE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dQ of a shared query too long for one tile: this program sums one tile's dQ over every workers-th sequence.

    It also writes delta of the rows it passes, for the pass over keys (dkdv_kernel) that follows.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    m0 = tl.program_id(0) // num_kv_heads % tiles * BLOCK_M
    worker = tl.program_id(0) // num_kv_heads // tiles
    head0 = kv_head * GROUP
    row = m0 + tl.arange(0, BLOCK_M)
    pos = row // GROUP
    q = load_packed(q_ptr, 0, m0, rows_q * GROUP, head0, stride_qr, stride_qh, stride_qd, BLOCK_M, GROUP, D, BLOCK_D, True)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for b in range(worker, num_batches, workers):
        begin_kv, len_kv = rows_of(key_offset, b, rows_kv)
        packed_len = rows_q * GROUP
        first_out = b * rows_q
        if HAS_SLOTS:
            first_out = tl.load(output_offset + b)
            packed_len = tl.where((first_out >= 0) & (first_out + rows_q <= rows_out), packed_len, 0)
        do = load_packed(
            dout_ptr, first_out, m0, packed_len, head0, stride_dr, stride_dh, stride_dd, BLOCK_M, GROUP, DV, BLOCK_DV, True
        )
        o = load_packed(out_ptr, first_out, m0, packed_len, head0, stride_or, stride_oh, 1, BLOCK_M, GROUP, DV, BLOCK_DV, True)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        if HAS_DLSE:
            delta -= load_packed_scalars(dlse_ptr, first_out, row, packed_len, head0, rows_out, 0.0, GROUP)
        place = tl.cast(head0 + row % GROUP, tl.int64) * rows_out + first_out + pos
        tl.store(delta_ptr + place, delta, mask=row < packed_len)
        lse = to_log2(load_packed_scalars(lse_ptr, first_out, row, packed_len, head0, rows_out, float("inf"), GROUP))
        k_base = k_ptr + tl.cast(begin_kv, tl.int64) * stride_kr + kv_head * stride_kh
        v_base = v_ptr + tl.cast(begin_kv, tl.int64) * stride_vr + kv_head * stride_vh
        dq = dq_over_keys(
            dq, q, do, lse, delta, k_desc, v_desc, k_base, v_base, begin_kv, kv_head, m0, rows_q, len_kv, scale,
            lo_start, lo_end, hi_start, hi_end, stride_kr, stride_kd, stride_vr, stride_vd,
            GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, PRECISION, TMA,
        )  # fmt: skip
    cols = tl.arange(0, BLOCK_D)
    base = (tl.cast(worker, tl.int64) * num_kv_heads + kv_head) * (tiles * BLOCK_M) * BLOCK_D
    tl.store(dq_partial_ptr + base + row[:, None] * BLOCK_D + cols[None, :], dq)


@triton.jit(do_not_specialize=RUNTIME)
def sum_dq_kernel(
    dq_partial_ptr, dq_ptr, rows_q, padded_rows, num_kv_heads, workers, sm_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """This program adds all workers' partial dQ [padded_rows, D] of one head, BLOCK numbers of it, always in the same order."""
    kv_head = tl.program_id(0) % num_kv_heads
    at = tl.program_id(0) // num_kv_heads * BLOCK + tl.arange(0, BLOCK)
    row = at // BLOCK_D
    col = at % BLOCK_D
    keep = (row < rows_q * GROUP) & (col < D)
    total = tl.zeros([BLOCK], tl.float32)
    for w0 in range(0, workers, STEP):
        w = w0 + tl.arange(0, STEP)
        base = (tl.cast(w, tl.int64) * num_kv_heads + kv_head) * padded_rows * BLOCK_D
        part = tl.load(dq_partial_ptr + base[:, None] + at[None, :], mask=(w < workers)[:, None] & keep[None, :], other=0.0)
        total += tl.sum(part, 0)
    place = ((row // GROUP) * (num_kv_heads * GROUP) + kv_head * GROUP + row % GROUP) * D + col
    tl.store(dq_ptr + place, (total * sm_scale).to(dq_ptr.dtype.element_ty), mask=keep)
