"""The forward in plain Triton: one program per unit of work and key/value head.

A unit is a tile of BLOCK_M packed query rows of one sequence, or one of several chunks of its keys where a
mega-sequence is split (jfa.kernels.common.planner). Only the edges of what a tile sees need a mask (a causal diagonal,
the ends of a window, the sequence's tail); the bulk, which every row sees whole, runs without. Loads by pointer are
masked as well, so with them the loop is peeled into two. With TMA (GPUs from Hopper on) a box ends where its sequence
ends: a single loop with a branch then keeps the pipeline filled to the end.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import aggregate, load_tile
from jfa.kernels.common.softmax import hide, scale_of, softmax_end, softmax_step
from jfa.kernels.portable.rows import RUNTIME, Operand, contiguous, padded, per_row, positions
from jfa.kernels.portable.walk import seen_keys


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    records,
    counts,
    chunks,
    arrivals,
    partial_acc,
    partial_ml,
    rows_out,
    num_kv_heads,
    scale,
    cfg: tl.constexpr,
):
    """Compute one unit (all of a query tile's keys, or one chunk of them) of one key/value head."""
    kv_head = tl.program_id(0) % num_kv_heads
    unit = tl.program_id(0) // num_kv_heads
    tile = load_tile(records, unit, cfg.has_lo, cfg.has_hi)
    if cfg.split:
        part = load_part(chunks, unit, arrivals, partial_acc, partial_ml, kv_head, num_kv_heads)
    if unit >= tl.load(counts + 1):
        return
    BOXED: tl.constexpr = q_desc is not None or out_desc is not None
    q = Operand(q_ptr, q_desc, (q_row, q_head), cfg.head_dim, cfg.group, BOXED).of(tile.q, kv_head)
    k = Operand(k_ptr, k_desc, (k_row, k_head), cfg.head_dim, 1, False).of(tile.kv, kv_head)
    v = Operand(v_ptr, v_desc, (v_row, v_head), cfg.head_dim_v, 1, False).of(tile.kv, kv_head)
    out = contiguous(out_ptr, out_desc, num_kv_heads, cfg.head_dim_v, cfg.group, BOXED).of(tile.out, kv_head)
    lse = per_row(lse_ptr, rows_out, cfg.group, BOXED).of(tile.out, kv_head)
    factors = scale_of(scale, False)
    if cfg.split:
        acc, l, m = attend(q, k, v, tile, part.chunk, part.chunks, factors, cfg)
        last, acc, l, m = merge(acc, l, m, part)
        if last:
            finish(acc, l, m, out, lse, tile.row, factors, cfg)
    else:
        acc, l, m = attend(q, k, v, tile, 0, 1, factors, cfg)
        finish(acc, l, m, out, lse, tile.row, factors, cfg)


@triton.jit
def attend(q, k, v, tile, chunk, chunks, scale, cfg):
    """Return (acc, l, m) of a query tile over its ``chunk``-th of ``chunks`` parts of what it sees of the keys."""
    M: tl.constexpr = cfg.block_m
    seen = seen_keys(tile, M, cfg.block_n, cfg.group)
    block = q.load(tile.row, M, True)
    position = positions(tile.row, M, cfg.group, q.tensor.boxed)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, padded(v.tensor.dim)], tl.float32)
    if k.tensor.desc is not None:  # boxes end with the sequence: a second loop would wait for its first keys again
        blocks = seen.end - seen.first
        for i in range(seen.first + blocks * chunk // chunks, seen.first + blocks * (chunk + 1) // chunks):
            masked = (i < seen.bulk_begin) | (i >= seen.bulk_end)
            acc, l, m = attend_block(acc, l, m, block, k, v, i, tile, position, scale, cfg, masked)
    else:
        bulk = seen.bulk_end - seen.bulk_begin
        for i in range(bulk * chunk // chunks, bulk * (chunk + 1) // chunks):
            acc, l, m = attend_block(acc, l, m, block, k, v, seen.bulk_begin + i, tile, position, scale, cfg, False)
        edges = seen.end - seen.first - bulk
        for i in range(edges * chunk // chunks, edges * (chunk + 1) // chunks):
            edge = seen.first + i
            edge = tl.where(edge < seen.bulk_begin, edge, edge + bulk)
            acc, l, m = attend_block(acc, l, m, block, k, v, edge, tile, position, scale, cfg, True)
    return acc, l, m


@triton.jit
def attend_block(acc, l, m, q, k, v, i, tile, position, scale, cfg, masked):
    """Add the i-th block of keys to a tile's running (acc, l, m).

    ``masked``: some row may not see all of them. With TMA it is known at run time only, else when compiling.
    """
    n0 = i * cfg.block_n
    keys = k.load(n0, cfg.block_n, masked)
    scores = tl.dot(q, tl.trans(keys), input_precision=cfg.precision)
    if masked:
        key = n0 + tl.arange(0, cfg.block_n)
        keep = tile.pair_mask(position[:, None], key[None, :])
        if cfg.split:  # true everywhere; a mask per column would make ptxas 12.9 wait after each wgmma on sm_90 (C7515)
            keep = keep & (position >= 0)[:, None]
        scores = hide(scores, keep, cfg.negative)
    # Without a band the first block of a tile or chunk shows every row a key, so no maximum stays -inf.
    p, m, l, alpha = softmax_step(scores, m, l, scale, tile.band.has_lo or tile.band.has_hi, cfg.negative)
    acc = acc * alpha[:, None]
    values = v.load(n0, cfg.block_n, masked)
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision=cfg.precision)
    return acc, l, m


@triton.jit
def finish(acc, l, m, out, lse, m0, scale, cfg):
    """Normalize a tile and write its output rows and natural-log LSE; a row without keys gets 0 and -inf."""
    acc, natural = softmax_end(acc, m, l, scale)
    lse.store_numbers(m0, natural, cfg.block_m)
    out.store(m0, acc, cfg.block_m)


# ----------------------------------------------------------------------------------------------------------- split tiles
@aggregate
class Part:
    """One of the chunks into which the keys of a tile are cut.

    Attributes:
        chunk, chunks: which one, and of how many.
        first: where the tile's partial results begin, one slot per chunk.
        arrivals: how many chunks of the tile have arrived.
        acc, ml: partial results: fp32 [slots, BLOCK_M, DV], and [slots, 2, BLOCK_M] of maxima and sums.
    """

    chunk: tl.tensor
    chunks: tl.tensor
    first: tl.tensor
    arrivals: tl.tensor
    acc: tl.tensor
    ml: tl.tensor


@triton.jit
def load_part(chunks, unit, arrivals, partial_acc, partial_ml, kv_head, num_kv_heads):
    """Read which Part a unit is; see jfa.kernels.common.planner.Plan."""
    code = tl.load(chunks + unit * 2)
    count = code & 0xFFFF
    first = tl.load(chunks + unit * 2 + 1) * num_kv_heads + kv_head * count
    return Part(code >> 16, count, first, arrivals + first, partial_acc, partial_ml)


@triton.jit
def merge(acc, l, m, part):
    """Return (last, acc, l, m): the program that arrives ``last`` gets the tile's whole sums, the others store theirs
    to memory."""
    arrived = part.chunks - 1
    if part.chunks > 1:
        leave(acc, l, m, part)
        tl.debug_barrier()
        arrived = tl.atomic_add(part.arrivals, 1, sem="acq_rel")
        if arrived == part.chunks - 1:
            acc, l, m = merge_chunks(acc, l, m, part)
            tl.store(part.arrivals, 0)  # ready for the next launch with the same plan
    return arrived == part.chunks - 1, acc, l, m


@triton.jit
def leave(acc, l, m, part):
    """Write one chunk's (acc, l, m) into its slot, for the chunk that arrives last to merge."""
    slot = tl.cast(part.first + part.chunk, tl.int64)
    rows = tl.arange(0, acc.shape[0])
    columns = tl.arange(0, acc.shape[1])
    at = part.acc + slot * (acc.shape[0] * acc.shape[1])
    tl.store(at + rows[:, None] * acc.shape[1] + columns[None, :], acc)
    at = part.ml + slot * (2 * acc.shape[0])
    tl.store(at + rows, m)
    tl.store(at + acc.shape[0] + rows, l)


@triton.jit
def merge_chunks(acc, l, m, part):
    """Return (acc, l, m) of a tile from the partial results of its chunks, always summed in the same order."""
    rows = tl.arange(0, acc.shape[0])
    columns = tl.arange(0, acc.shape[1])
    m = tl.full(m.shape, float("-inf"), tl.float32)
    l = tl.zeros(l.shape, tl.float32)
    acc = tl.zeros(acc.shape, tl.float32)
    for i in tl.range(0, part.chunks, num_stages=3):
        slot = tl.cast(part.first + i, tl.int64)
        at = part.ml + slot * (2 * acc.shape[0])
        part_m = tl.load(at + rows, cache_modifier=".cg")
        part_l = tl.load(at + acc.shape[0] + rows, cache_modifier=".cg")
        at = part.acc + slot * (acc.shape[0] * acc.shape[1])
        part_acc = tl.load(at + rows[:, None] * acc.shape[1] + columns[None, :], cache_modifier=".cg")
        new_m = tl.maximum(m, part_m)
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        old_weight = tl.math.exp2(m - shift)
        weight = tl.math.exp2(part_m - shift)
        l = l * old_weight + part_l * weight
        acc = acc * old_weight[:, None] + part_acc * weight[:, None]
        m = new_m
    return acc, l, m
