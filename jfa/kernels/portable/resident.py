"""The backward of shared queries (PMA), whose dQ is a sum over all sequences.

Of few queries (Lq * group <= 128 packed rows) the whole query is *resident*: a program keeps one key/value head's Q
tile and its dQ on chip in fp32 and walks over a fixed share of all key blocks of all sequences. Each block's dK and dV
are complete after one visit and written once; nothing is accumulated in memory. More queries are cut into tiles, whose
dQ ``shared_dq_kernel`` sums over the sequences; dK and dV are then the ordinary pass over keys. Both leave one partial
dQ per program, which ``sum_dq_kernel`` adds in a fixed order. So the whole backward is deterministic, and the resident
form reads K, V, O, dO once.

A Hopper tensor core needs at least 64 rows in a product's first operand. With fewer queries, keys are the rows of every
product (``keys_first``: scores and dQ are transposed).

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.band import in_band
from jfa.kernels.common.nouns import Span, Tile, aggregate, load_tile
from jfa.kernels.common.sequences import BandConstants, Offsets, Sequences, Sizes
from jfa.kernels.common.softmax import at_most_one
from jfa.kernels.common.units import zigzag_unit
from jfa.kernels.portable.backward import Queries, dq_over_keys, side_of
from jfa.kernels.portable.rows import RUNTIME, Operand, Rows, contiguous, padded, positions


# ------------------------------------------------------------------------------------------------------------- resident
@triton.jit(do_not_specialize=RUNTIME)
def resident_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    dk_ptr,
    dv_ptr,
    dq_partial_ptr,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
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
    rows_q,
    rows_out,
    num_kv_heads,
    workers,
    piece,
    scale,
    sm_scale,
    cfg: tl.constexpr,
):
    """Walk over one worker's pieces of at most ``piece`` keys of one key/value head, dealt in zigzag."""
    kv_head = tl.program_id(0) % num_kv_heads
    G: tl.constexpr = cfg.group
    M: tl.constexpr = cfg.block_m
    out = contiguous(out_ptr, None, num_kv_heads, cfg.head_dim_v, G)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), cfg.head_dim_v, G, False)
    side = side_of(out, dout, lse_ptr, dlse_ptr, None, rows_out)
    k = Operand(k_ptr, k_desc, (k_row, k_head), cfg.head_dim, 1, False)
    v = Operand(v_ptr, v_desc, (v_row, v_head), cfg.head_dim_v, 1, False)
    dk = contiguous(dk_ptr, dk_desc, num_kv_heads, cfg.head_dim, 1)
    dv = contiguous(dv_ptr, dv_desc, num_kv_heads, cfg.head_dim_v, 1)
    q = (
        Operand(q_ptr, None, (q_row, q_head), cfg.head_dim, G, False)
        .of(Span(rows_q * 0, rows_q), kv_head)
        .load(0, M, True)
    )
    worker = tl.program_id(0) // num_kv_heads
    dq = tl.zeros([padded(cfg.head_dim), M] if cfg.keys_first else [M, padded(cfg.head_dim)], tl.float32)
    count = tl.load(counts + 1)
    for done in range(tl.cdiv(count, workers)):
        unit = zigzag_unit(done, worker, workers)
        if unit < count:
            tile = load_tile(records, unit, cfg.has_lo, cfg.has_hi)
            do, lse, delta = side.load(tile, 0, kv_head, M)
            x = Queries(q, do, lse, delta, positions(0, M, G, False))
            # Keys that no query sees are not read: rows that no sequence covers, and those of a slot outside the output.
            read = Span(tile.kv.begin, tl.where(tile.q.length > 0, tile.kv.length, 0))
            keys = KeyRows(k.of(read, kv_head), v.of(read, kv_head), dk.of(tile.kv, kv_head), dv.of(tile.kv, kv_head))
            for n0 in range(tile.row, tl.minimum(tile.row + piece, tile.kv.length), cfg.block_n):
                dq = resident_block(dq, x, keys, n0, tile, scale, sm_scale, cfg)
    store_partial(dq_partial_ptr, dq, tl.program_id(0) * M, cfg.keys_first)


@aggregate
class KeyRows:
    """The keys of a sequence and their gradients in memory."""

    k: Rows
    v: Rows
    dk: Rows
    dv: Rows


@triton.jit
def resident_block(dq, x, keys, n0, tile, scale, sm_scale, cfg):
    """Write dK and dV of the keys n0 .. n0 + BLOCK_N - 1 of one sequence, and add their share to dQ."""
    k = keys.k.load(n0, cfg.block_n, True)
    v = keys.v.load(n0, cfg.block_n, True)
    key = n0 + tl.arange(0, cfg.block_n)
    masked = tile.band.has_lo or tile.band.has_hi or (n0 + cfg.block_n > keys.k.span.length)
    FIRST: tl.constexpr = cfg.keys_first
    ip: tl.constexpr = cfg.precision
    s = tl.dot(k, tl.trans(x.q), input_precision=ip) if FIRST else tl.dot(x.q, tl.trans(k), input_precision=ip)
    p = at_most_one(tl.math.exp2(s * scale - per_query(x.lse, FIRST)))
    if masked:
        p = tl.where(in_sight(tile, keys, per_query(x.position, FIRST), per_query(key, not FIRST)), p, 0.0)
    weights = p.to(x.do.dtype)
    dv = tl.dot(weights if FIRST else tl.trans(weights), x.do, input_precision=ip)
    keys.dv.store(n0, dv, cfg.block_n)
    dp = tl.dot(v, tl.trans(x.do), input_precision=ip) if FIRST else tl.dot(x.do, tl.trans(v), input_precision=ip)
    ds = (p * (dp - per_query(x.delta, FIRST))).to(x.q.dtype)
    dk = tl.dot(ds if FIRST else tl.trans(ds), x.q, input_precision=ip)
    dq = tl.dot(tl.trans(k), ds, dq, input_precision=ip) if FIRST else tl.dot(ds, k, dq, input_precision=ip)
    keys.dk.store(n0, dk * sm_scale, cfg.block_n)
    return dq


@triton.jit
def per_query(numbers, KEYS_FIRST: tl.constexpr):
    """Return one number per query in the shape of the scores."""
    return numbers[None, :] if KEYS_FIRST else numbers[:, None]


@triton.jit
def in_sight(tile, keys, position, key):
    """Return which pairs count among those keys that are read."""
    b = tile.band
    return in_band(position, key, keys.k.span.length, b.lo, b.hi, b.has_lo, b.has_hi)


@triton.jit
def store_partial(dq_partial_ptr, dq, first, KEYS_FIRST: tl.constexpr):
    """Write a program's dQ into the rows ``first`` .. of the partial sums, all of them, padding too."""
    rows = tl.arange(0, dq.shape[1] if KEYS_FIRST else dq.shape[0])
    columns = tl.arange(0, dq.shape[0] if KEYS_FIRST else dq.shape[1])
    at = dq_partial_ptr + tl.cast(first, tl.int64) * (dq.shape[0] if KEYS_FIRST else dq.shape[1])
    if KEYS_FIRST:
        tl.store(at + rows[None, :] * dq.shape[0] + columns[:, None], dq)
    else:
        tl.store(at + rows[:, None] * dq.shape[1] + columns[None, :], dq)


# ------------------------------------------------------------------------------------------------------- longer queries
@triton.jit(do_not_specialize=RUNTIME)
def shared_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    dq_partial_ptr,
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
    key_offset,
    output_offset,
    batches,
    rows_q,
    rows_kv,
    rows_out,
    lo_start,
    lo_end,
    hi_start,
    hi_end,
    num_kv_heads,
    workers,
    tiles,
    scale,
    cfg: tl.constexpr,
):
    """Sum one query tile's dQ over every workers-th sequence, and write delta of its rows for the pass over keys."""
    kv_head = tl.program_id(0) % num_kv_heads
    G: tl.constexpr = cfg.group
    M: tl.constexpr = cfg.block_m
    m0 = tl.program_id(0) // num_kv_heads % tiles * M
    worker = tl.program_id(0) // num_kv_heads // tiles
    offsets = Offsets(key_offset, key_offset, output_offset)
    sizes, band = Sizes(batches, rows_q, rows_kv, rows_out), BandConstants(lo_start, lo_end, hi_start, hi_end)
    sequences = Sequences(offsets, sizes, band, True, cfg.has_lo, cfg.has_hi, False, 0)
    out = contiguous(out_ptr, None, num_kv_heads, cfg.head_dim_v, G)
    dout = Operand(dout_ptr, None, (dout_row, dout_head), cfg.head_dim_v, G, False)
    side = side_of(out, dout, lse_ptr, dlse_ptr, delta_ptr, rows_out)
    k = Operand(k_ptr, k_desc, (k_row, k_head), cfg.head_dim, 1, False)
    v = Operand(v_ptr, v_desc, (v_row, v_head), cfg.head_dim_v, 1, False)
    queries = Operand(q_ptr, None, (q_row, q_head), cfg.head_dim, G, False)
    q = queries.of(Span(rows_q * 0, rows_q), kv_head).load(m0, M, True)
    dq = tl.zeros([M, padded(cfg.head_dim)], tl.float32)
    for b in range(worker, batches, workers):
        tile, _ = sequences.tile(b, False)
        tile = Tile(m0, tile.q, tile.kv, tile.out, tile.band, tile.pad_begin)
        do, lse, delta = side.load(tile, m0, kv_head, M)
        x = Queries(q, do, lse, delta, positions(m0, M, G, False))
        dq = dq_over_keys(dq, x, k.of(tile.kv, kv_head), v.of(tile.kv, kv_head), tile, scale, cfg)
    store_partial(dq_partial_ptr, dq, (worker * num_kv_heads + kv_head) * tiles * M + m0, False)


SUM_BLOCK = tl.constexpr(256)  # numbers of dQ that one program adds up
SUM_STEP = tl.constexpr(16)  # workers at once


@triton.jit(do_not_specialize=RUNTIME)
def sum_dq_kernel(
    dq_partial_ptr,
    dq_ptr,
    rows_q,
    padded_rows,
    num_kv_heads,
    workers,
    sm_scale,
    cfg: tl.constexpr,
):
    """Add all workers' partial dQ [padded_rows, D] of one head, SUM_BLOCK numbers of it, always in the same order."""
    BLOCK_D: tl.constexpr = padded(cfg.head_dim)
    kv_head = tl.program_id(0) % num_kv_heads
    at = tl.program_id(0) // num_kv_heads * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    row = at // BLOCK_D
    column = at % BLOCK_D
    keep = (row < rows_q * cfg.group) & (column < cfg.head_dim)
    total = tl.zeros([SUM_BLOCK], tl.float32)
    for w0 in range(0, workers, SUM_STEP):
        w = w0 + tl.arange(0, SUM_STEP)
        base = (tl.cast(w, tl.int64) * num_kv_heads + kv_head) * padded_rows * BLOCK_D
        mask = (w < workers)[:, None] & keep[None, :]
        total += tl.sum(tl.load(dq_partial_ptr + base[:, None] + at[None, :], mask=mask, other=0.0), 0)
    place = (
        (row // cfg.group) * (num_kv_heads * cfg.group) + kv_head * cfg.group + row % cfg.group
    ) * cfg.head_dim + column
    tl.store(dq_ptr + place, (total * sm_scale).to(dq_ptr.dtype.element_ty), mask=keep)
