"""The Blackwell backward on MXFP8, one CTA per tile of 128 keys: five products of e4m3 operands.

Roles, tiles and the path of dQ are those of :mod:`jfa.kernels.blackwell.backward_1cta`. Operands and the axis of their
groups:

    S^T  = K Q^T      over D         K, Q by head dim
    dP^T = V dO^T     over D         V, dO by head dim
    dV  += P^T dO     over queries   P^T at the fixed scale 2**-8, dO by tokens
    dK  += dS^T Q     over queries   dS in squares of 32 x 32, Q by tokens
    dQ   = dS K       over keys      the same dS, K by tokens

P is recomputed from the Q and K that the forward multiplied. A square of dS has one scale, so dS and dS^T are the same
bytes; its codes are written twice, as rows of keys and as rows of queries.

TMEM at D = 128: S^T, dP^T, dV, dK of 128 columns each. dQ takes dP^T's place, P^T (32 columns) S^T's. Scales lie in
columns that are free at the time: those of S and dK inside dP^T, once its columns there have been read (``dp_reads``);
those of dP, dV and dQ inside S^T next to P, once both compute groups have read it (``s_reads``). At D = 64 dQ and all
scales have columns of their own.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_1cta import mask_pairs, query_steps, reduce_blocks, store_dkv, write_dkv
from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N, HALF_M
from jfa.kernels.blackwell.mxfp8_memory import SQUARE, SQUARES, alloc_memory
from jfa.kernels.blackwell.scales import (
    P_BITS,
    TILE_BYTES,
    ScaleTiles,
    copy_scales,
    first_key_block,
    first_query_block,
)
from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.quantize import inverse_scale, magnitude_bits, scale_code
from jfa.kernels.common.softmax import at_most
from jfa.kernels.common.units import first_unit

P_UNIT = tl.constexpr(2.0**-P_BITS.value)  # of P in registers, which is stored as P * 2**8


@triton.jit(do_not_specialize=["q_blocks", "kv_blocks", "do_blocks"])
def mxfp8_backward_kernel(
    q_desc,  # groups along the head dim; those called _t have groups along tokens
    q_t_desc,
    k_desc,
    k_t_desc,
    v_desc,
    do_desc,
    do_t_desc,
    dk_desc,
    dv_desc,
    dq_desc,  # [H * dq_rows, head_dim] fp32, boxes [BLOCK_M, dq_columns]
    q_scales,  # [heads, blocks] x 512 uint8; see jfa.kernels.blackwell.scales
    q_t_scales,
    k_scales,
    k_t_scales,
    v_scales,
    do_scales,
    do_t_scales,
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    q_blocks,  # scale blocks per head
    kv_blocks,
    do_blocks,
    padded_count,
    dq_rows,
    scale_log2,  # sm_scale * log2(e)
    sm_scale,
    cfg: tl.constexpr,  # BackwardConfig
):
    memory = alloc_memory(tlx.dtype_of(dk_desc), cfg)
    if cfg.clc:
        queue = tlx.clc_create_context(num_consumers=5)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                if cfg.clc:
                    tlx.clc_producer(queue, walk.phase(1) ^ 1)
                q_count = reduce_tile(dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, q_count, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                q_count = compute_tile(memory, half, records_ptr, walk, q_count, scale_log2, sm_scale, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                q_count = multiply_tile(memory, records_ptr, walk, q_count, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            constants = RowPointers(lse_ptr, delta_ptr, padded_count)
            k, k_t = Encoded(k_desc, k_scales, kv_blocks), Encoded(k_t_desc, k_t_scales, kv_blocks)
            v, q = Encoded(v_desc, v_scales, kv_blocks), Encoded(q_desc, q_scales, q_blocks)
            q_t, do = Encoded(q_t_desc, q_t_scales, q_blocks), Encoded(do_desc, do_scales, do_blocks)
            do_t = Encoded(do_t_desc, do_t_scales, do_blocks)
            while walk.going():
                load_key_tile(k, k_t, v, memory.keys, records_ptr, walk, cfg)
                q_count = load_blocks(q, q_t, do, do_t, constants, memory, records_ptr, walk, q_count, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)


# ---------------------------------------------------------------------------------------------------------------- load


@aggregate
class Encoded:
    """An encoded tensor in memory: a ragged descriptor of its numbers, and its scale tiles."""

    desc: tl.core.base_value
    scales: tl.tensor
    blocks: tl.tensor  # scale blocks per head

    @triton.jit
    def scales_at(self, head, block):
        """Return the address of the scale tile of a block; see ScaleTiles."""
        return ScaleTiles(self.scales, self.blocks).at(head, block)


@triton.jit
def load_key_tile(k, k_t, v, keys, records_ptr, walk, cfg: tl.constexpr):
    """Load K in both encodings and V once the tile before has left."""
    BYTES: tl.constexpr = 3 * (BLOCK_N * cfg.head_dim + TILE_BYTES)
    tile, head = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi), walk.head()
    box = tile.kv.box(tile.row, head)
    block = first_key_block(tile, cfg.broadcast_q) + tile.row // BLOCK_N
    tlx.barrier_wait(keys.empties[0], (walk.done & 1) ^ 1)
    tlx.barrier_expect_bytes(keys.fulls[0], BYTES)
    load_scaled(k.desc, keys, 0, box, k.scales_at(head, block))
    load_scaled(k_t.desc, keys, 1, box, k_t.scales_at(head, block))
    load_scaled(v.desc, keys, 2, box, v.scales_at(head, block))


@triton.jit
def load_scaled(desc, keys, number: tl.constexpr, box, scales):
    """Load one of a tile's operands and its scales."""
    tlx.async_descriptor_load(desc, keys.tiles[number], box, keys.fulls[0])
    tlx.async_load(scales, keys.scales[number], bulk=True, barrier=keys.fulls[0])


@triton.jit
def load_blocks(q, q_t, do, do_t, constants, memory, records_ptr, walk, q_count, cfg: tl.constexpr):
    """Load Q, its rows' lse and delta, and dO, in both encodings, block by block for each head. Returns the blocks so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    blocks = query_steps(tile)
    first = first_query_block(tile, cfg.broadcast_q)
    for member in range(cfg.group):
        head = walk.head() * cfg.group + member
        lse, delta = constants.of_sequence(tile, head)
        for block in range(blocks.first, blocks.end):
            row = block * BLOCK_M
            q_box, do_box = tile.q.box(row, head), tile.out.box(row, head)
            do_block = tile.pad_begin // BLOCK_M + block
            memory.q.load(q_count, q.desc, q_box, q.scales_at(head, first + block))
            memory.rows.load(q_count, lse + row, delta + row)
            memory.do.load(q_count, do.desc, do_box, do.scales_at(head, do_block))
            memory.do_t.load(q_count, do_t.desc, do_box, do_t.scales_at(head, do_block))
            memory.q_t.load(q_count, q_t.desc, q_box, q_t.scales_at(head, first + block))
            q_count += 1
    return q_count


# ----------------------------------------------------------------------------------------------------------------- mma

# Issue order of a step, i its number, i-1 the block before (of the same tile; step 0 has none). Scales are copied right before.
# What is said of places and waits for them is true at D = 128 only:
#
#   1  S(i)   = K Q(i)^T        scales inside dP(i-1), whose columns there were read; the compute groups still make dS(i-1)
#   2  dK    += dS(i-1)^T Q     scales inside dP(i-1), too, which dS(i-1) says was read
#   3  dQ     = dS(i-1) K       into dP(i-1), behind 1 and 2, which used scales there; its own lie inside S(i), once that is read
#   4  dP(i)  = V dO(i)^T       once dQ has been read; scales inside S(i). When it is there, dS may be overwritten
#   5  dV    += P(i)^T dO(i)    scales inside S(i), next to P(i)
#
# At D = 64 only dQ waits for a place: until the one before has been read. Copies and products run in the order of their issue, so 1
# of the next step may overwrite P and the scales of 3, 4 and 5. A new tile's K is there only after dK and dV of the tile before
# have left through its memory, behind its last dQ.


@triton.jit
def multiply_tile(memory, records_ptr, walk, q_count, cfg: tl.constexpr):
    """Issue a tile's products. Returns the blocks done so far."""
    scores, grads = memory.scores, memory.grads
    blocks = query_steps(walk.tile(records_ptr, cfg.has_lo, cfg.has_hi))
    steps = blocks.count() * cfg.group
    tlx.barrier_wait(memory.keys.fulls[0], walk.done & 1)
    for step in range(0, steps + 1):
        phase = q_count & 1
        if step < steps:
            if cfg.dq_takes_dp and step > 0:
                tlx.barrier_wait(scores.dp_reads[0], phase ^ 1)
            multiply_s(memory, q_count)
        if step > 0:
            tlx.barrier_wait(scores.ds_fulls[0], phase ^ 1)
            multiply_dk(memory, q_count - 1, step > 1)
        if cfg.dq_takes_dp and step < steps:
            tlx.barrier_wait(scores.s_reads[0], phase)
        if step > 0:
            if not cfg.dq_takes_dp:
                tlx.barrier_wait(grads.dq_empties[0], phase)
            multiply_dq(memory)
        if step < steps:
            if cfg.dq_takes_dp and step > 0:
                tlx.barrier_wait(grads.dq_empties[0], phase ^ 1)
            multiply_dp(memory, q_count)
            multiply_dv(memory, q_count, step > 0)
            q_count += 1
    tlx.tcgen05_commit(grads.dkv_fulls[0])
    return q_count


@triton.jit
def multiply_s(memory, count):
    """Issue S^T = K Q^T of the count-th block, and free its Q by head dim."""
    q, keys, scores, columns = memory.q, memory.keys, memory.scores, memory.columns
    slot, phase = q.slot(count)
    tlx.barrier_wait(q.ring.fulls[slot], phase)
    copy_scales(keys.scales[0], columns.s[0])
    q.copy_codes(slot, columns.s[1])
    tlx.async_dot_scaled(
        keys.tiles[0],
        tlx.local_trans(q.ring.buffers[slot]),
        scores.s[0],
        columns.s[0],
        "e4m3",
        columns.s[1],
        "e4m3",
        use_acc=False,
        mBarriers=[scores.s_fulls[0]],
    )
    tlx.tcgen05_commit(q.ring.empties[slot])


@triton.jit
def multiply_dk(memory, count, use_acc):
    """Issue dK += dS^T Q of the count-th block, and free its Q by tokens."""
    q, scores, columns = memory.q_t, memory.scores, memory.columns
    slot, phase = q.slot(count)
    tlx.barrier_wait(q.ring.fulls[slot], phase)
    tlx.tmem_copy(scores.codes[0], columns.dk[0])
    q.copy_codes(slot, columns.dk[1])
    tlx.async_dot_scaled(
        scores.ds[0],
        q.ring.buffers[slot],
        memory.grads.dk[0],
        columns.dk[0],
        "e4m3",
        columns.dk[1],
        "e4m3",
        use_acc=use_acc,
        force_async=True,
    )
    tlx.tcgen05_commit(q.ring.empties[slot])


@triton.jit
def multiply_dq(memory):
    """Issue dQ = dS K of a block."""
    keys, scores, columns = memory.keys, memory.scores, memory.columns
    tlx.tmem_copy(scores.codes[1], columns.dq[0])
    copy_scales(keys.scales[1], columns.dq[1])
    tlx.async_dot_scaled(
        tlx.local_trans(scores.ds[0]),
        keys.tiles[1],
        memory.grads.dq[0],
        columns.dq[0],
        "e4m3",
        columns.dq[1],
        "e4m3",
        use_acc=False,
        mBarriers=[memory.grads.dq_fulls[0]],
    )


@triton.jit
def multiply_dp(memory, count):
    """Issue dP^T = V dO^T of the count-th block, and free its dO by head dim."""
    do, keys, scores, columns = memory.do, memory.keys, memory.scores, memory.columns
    slot, phase = do.slot(count)
    tlx.barrier_wait(do.ring.fulls[slot], phase)
    copy_scales(keys.scales[2], columns.dp[0])
    do.copy_codes(slot, columns.dp[1])
    tlx.async_dot_scaled(
        keys.tiles[2],
        tlx.local_trans(do.ring.buffers[slot]),
        scores.dp[0],
        columns.dp[0],
        "e4m3",
        columns.dp[1],
        "e4m3",
        use_acc=False,
        mBarriers=[scores.dp_fulls[0]],
    )
    tlx.tcgen05_commit(do.ring.empties[slot])


@triton.jit
def multiply_dv(memory, count, use_acc):
    """Issue dV += P^T dO of the count-th block, and free its dO by tokens."""
    do, scores, columns = memory.do_t, memory.scores, memory.columns
    slot, phase = do.slot(count)
    tlx.barrier_wait(do.ring.fulls[slot], phase)
    copy_scales(memory.p_scales[0], columns.dv[0])
    do.copy_codes(slot, columns.dv[1])
    tlx.barrier_wait(scores.p_fulls[0], count & 1)
    tlx.async_dot_scaled(
        scores.p[0],
        do.ring.buffers[slot],
        memory.grads.dv[0],
        columns.dv[0],
        "e4m3",
        columns.dv[1],
        "e4m3",
        use_acc=use_acc,
        force_async=True,
    )
    tlx.tcgen05_commit(do.ring.empties[slot])


# ------------------------------------------------------------------------------------------------------------- compute


@triton.jit
def compute_tile(memory, half: tl.constexpr, records_ptr, walk, q_count, scale_log2, sm_scale, cfg: tl.constexpr):
    """Make P^T and dS^T for half of the queries, block by block, then write half of dK and dV. Returns the blocks done so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    blocks = query_steps(tile)
    begin, end = blocks.bulk_begin, blocks.bulk_end
    scores, rows = memory.scores, memory.rows
    for _ in range(cfg.group):  # peeled: masked blocks, the bulk, masked blocks
        q_count = compute_stretch(scores, rows, half, tile, blocks.first, begin, q_count, scale_log2, True, cfg)
        q_count = compute_stretch(scores, rows, half, tile, begin, end, q_count, scale_log2, False, cfg)
        q_count = compute_stretch(scores, rows, half, tile, end, blocks.end, q_count, scale_log2, True, cfg)
    keys = memory.keys
    write_dkv(memory.grads, keys.outs[0], keys.outs[1], keys.out_fulls, half, walk.done, sm_scale)
    return q_count


@triton.jit
def compute_stretch(
    scores, rows, half: tl.constexpr, tile, begin, end, count, scale_log2, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Make P^T and dS^T for half of the queries in a stretch of blocks, all masked or none. Returns the blocks done so far."""
    SLICES: tl.constexpr = HALF_M // SQUARE
    FIRST: tl.constexpr = half * HALF_M
    for block in range(begin, end):
        phase = count & 1
        slot, q_phase = rows.ring.slot(count)
        tlx.barrier_wait(rows.ring.fulls[slot], q_phase)
        tlx.barrier_wait(scores.s_fulls[0], phase)
        raw = ()
        for i in tl.static_range(SLICES):
            raw = raw + (tlx.local_load(tlx.subslice(scores.s[0], FIRST + i * SQUARE, SQUARE)),)
        tlx.barrier_arrive(scores.s_reads[0])
        kept = ()
        for i in tl.static_range(SLICES):
            lse = tlx.local_load(tlx.local_slice(rows.lses[slot], [FIRST + i * SQUARE], [SQUARE]))
            p = at_most(tl.math.exp2(fma_pairs(raw[i], scale_log2, (P_BITS - lse)[None, :])), 1 << P_BITS)
            if MASKED:
                p = mask_pairs(p, tile, block * BLOCK_M + FIRST + i * SQUARE, cfg)
            kept = kept + (p,)
        tlx.barrier_wait(scores.s_reads[0], phase)  # P of one half lies in what the other half reads
        for i in tl.static_range(SLICES):
            tlx.local_store(tlx.subslice(scores.p[0], FIRST + i * SQUARE, SQUARE), kept[i].to(scores.p.dtype))
        tlx.barrier_arrive(scores.p_fulls[0])

        tlx.barrier_wait(scores.dp_fulls[0], phase)
        for i in tl.static_range(SLICES):
            delta = tlx.local_load(tlx.local_slice(rows.deltas[slot], [FIRST + i * SQUARE], [SQUARE]))
            dp = tlx.local_load(tlx.subslice(scores.dp[0], FIRST + i * SQUARE, SQUARE))
            if i == 0:  # scales lie in the first columns of each half
                tlx.barrier_arrive(scores.dp_reads[0])
            ds = kept[i] * tl.fma(dp, P_UNIT, (-P_UNIT * delta)[None, :])
            store_squares(scores, ds, half * SLICES + i)
        tlx.barrier_arrive(rows.ring.empties[slot])
        tlx.fence("async_shared")
        tlx.barrier_arrive(scores.ds_fulls[0])
        count += 1
    return count


@triton.jit
def store_squares(scores, ds, column: tl.constexpr):
    """Round dS^T [128 keys, 32 queries] in squares, and leave it and its four codes, in rows of keys and in rows of queries."""
    squares = tl.reshape(ds, [SQUARES, SQUARE, SQUARE])
    bits = tl.max(tl.max(magnitude_bits(squares), 2), 1)
    rounded = (squares * inverse_scale(bits)[:, None, None]).to(scores.ds.dtype)
    ds_slice = tlx.local_slice(scores.ds[0], [0, column * SQUARE], [BLOCK_N, SQUARE])
    tlx.local_store(ds_slice, tl.reshape(rounded, [BLOCK_N, SQUARE]))
    codes = tl.broadcast_to(scale_code(bits).to(tl.uint8)[None, :], [SQUARE, SQUARES])
    by_keys = tlx.local_slice(scores.codes[0], [0, 0, 0, 0, column], [1, 1, SQUARE, SQUARES, 1])
    tlx.local_store(by_keys, tl.reshape(codes, [1, 1, SQUARE, SQUARES, 1]))
    by_queries = tlx.local_slice(scores.codes[1], [0, 0, 0, column, 0], [1, 1, SQUARE, 1, SQUARES])
    tlx.local_store(by_queries, tl.reshape(codes, [1, 1, SQUARE, 1, SQUARES]))


# -------------------------------------------------------------------------------------------------------------- reduce


@triton.jit
def reduce_tile(dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, q_count, cfg: tl.constexpr):
    """Add every block's dQ of a tile to memory, then store dK and dV. Returns the blocks done so far."""
    tile, keys = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi), memory.keys
    q_count = reduce_blocks(dq_desc, memory.grads, tile, walk, dq_rows, q_count, None, cfg)
    store_dkv(dk_desc, dv_desc, keys.outs[0], keys.outs[1], keys, tile, walk)
    return q_count
