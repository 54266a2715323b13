"""The Blackwell backward on one CTA: a tile of 128 keys computes its dK and dV and adds to the dQ of every query that
sees it.

For one key/value head, each query head of its group and each block of 128 queries, transposed (keys are rows):

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)        dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)           dK += dS^T Q           dQ = dS K

    load       1 warp    TMA: K and V once per tile; per block Q with its rows' lse and delta, and dO
    mma        1 warp    the five products, in the order S, [dQ and dK of the block before], dP, dV
    compute    2 x 4     each group half of the queries: P^T into TMEM where S^T was, dS^T into SMEM; at the end dK and dV
    reduce     4 warps   dQ from TMEM in slices through staged SMEM to memory, by TMA reduce-add in fp32; then stores dK and dV

TMEM at D = 128 is full: S^T (P^T inside it), dP^T, dV, dK of 128 columns each, so dQ takes dP^T's place and the next
dP^T must wait until the reduction has read it. Some slices of dQ (``cfg.held_slices``) are therefore loaded into
registers before the wait for staging buffers, which releases TMEM earlier. At D = 64 dQ has columns of its own.

Jagged: Q, K, V, dO, dK, dV go through boxes bounded by their sequence. lse, delta and dQ live in padded arrays, where no block
reaches into the next sequence (:mod:`jfa.kernels.common.padded_rows`); a query that does not exist has lse = +inf, so P = 0.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_memory import alloc_memory
from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N, HALF_M
from jfa.kernels.blackwell.listed import count_listed, listed_queries
from jfa.kernels.common.block_lists import block_lists
from jfa.kernels.common.nouns import RowPointers
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.rounding import rounded_probabilities
from jfa.kernels.common.units import first_unit


@triton.jit
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    dq_desc,  # [H * dq_rows, head_dim] fp32, boxes [BLOCK_M, dq_columns]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    padded_count,
    dq_rows,
    scale_log2,  # sm_scale * log2(e)
    sm_scale,
    starts,  # transposed block lists, or None; see jfa.block_sparse.BlockLists
    columns,
    kinds,
    list_rows,
    list_capacity,
    cfg: tl.constexpr,  # BackwardConfig
):
    memory = alloc_memory(tlx.dtype_of(q_desc), cfg)
    lists = block_lists(starts, columns, kinds, list_rows, cfg.heads * cfg.group, list_capacity, cfg.list_heads)
    if cfg.clc:
        queue = tlx.clc_create_context(num_consumers=5)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                if cfg.clc:
                    tlx.clc_producer(queue, walk.phase(1) ^ 1)
                q_count = reduce_tile(
                    dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, q_count, lists, cfg
                )
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                q_count = compute_tile(memory, half, records_ptr, walk, q_count, scale_log2, sm_scale, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                q_count = multiply_tile(memory, records_ptr, walk, q_count, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load
            walk, q_count = first_unit(counts_ptr, cfg.heads), 0
            constants = RowPointers(lse_ptr, delta_ptr, padded_count)
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                load_keys(k_desc, v_desc, memory.keys, tile, walk)
                q_count = load_queries(q_desc, do_desc, constants, memory, tile, walk, q_count, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(1)) if cfg.clc else 0, cfg.clc, cfg.zigzag)


@triton.jit
def head_steps(tile, head, lists, cfg: tl.constexpr):
    """Return the blocks of one head's queries that see a key tile, at least one: those of its list, where there are lists."""
    if cfg.list_heads:
        return listed_queries(tile, head, lists, cfg.broadcast_q)
    else:
        return query_steps(tile)


@triton.jit
def count_steps(tile, first_head, lists, cfg: tl.constexpr):
    """Return the blocks of queries that a key tile visits in all heads of its group."""
    if cfg.list_heads:
        return count_listed(tile, first_head, lists, cfg.group, cfg.broadcast_q)
    else:
        return query_steps(tile).count() * cfg.group


@triton.jit
def query_steps(tile):
    """Return the Blocks of queries that a band lets see a key tile, at least one."""
    return tile.query_blocks(BLOCK_N, BLOCK_M).at_least_one()


# ---------------------------------------------------------------------------------------------------------------- load


@triton.jit
def load_keys(k_desc, v_desc, keys, tile, walk):
    """Load a tile's K and V once dK and dV of the tile before have left."""
    BYTES: tl.constexpr = BLOCK_N * keys.k.shape[1] * tlx.size_of(keys.k.dtype)
    box = tile.kv.box(tile.row, walk.head())
    tlx.barrier_wait(keys.empties[0], (walk.done & 1) ^ 1)
    tlx.barrier_expect_bytes(keys.k_fulls[0], BYTES)
    tlx.async_descriptor_load(k_desc, keys.k[0], box, keys.k_fulls[0])
    tlx.barrier_expect_bytes(keys.v_fulls[0], BYTES)
    tlx.async_descriptor_load(v_desc, keys.v[0], box, keys.v_fulls[0])


@triton.jit
def load_queries(q_desc, do_desc, constants, memory, tile, walk, q_count, lists, cfg: tl.constexpr):
    """Load Q, its rows' lse and delta, and dO, block by block for each head of the group. Returns the blocks loaded so far."""
    first_head = walk.head() * cfg.group
    for member in range(cfg.group):
        head = first_head + member
        blocks = head_steps(tile, head, lists, cfg)
        lse, delta = constants.of_sequence(tile, head)
        for n in range(blocks.count()):
            row = blocks.nth(n) * BLOCK_M
            memory.q.load(q_count, q_desc, tile.q.box(row, head))
            memory.rows.load(q_count, lse + row, delta + row)
            memory.do.load(q_count, do_desc, tile.out.box(row, head))
            q_count += 1
    return q_count


# ----------------------------------------------------------------------------------------------------------------- mma

# Issue order of a step, i its number, i-1 the block before (of the same tile; step 0 has none):
#
#   1  S(i)   = K Q(i)^T        overwrites P(i-1), which 5 of the step before has read, and S(i-1), read before that P was written
#   2  dQ     = dS(i-1) K       first of the two that need dS: the reduction is waiting. At D = 128 into dP(i-1), read before dS
#   3  dK    += dS(i-1)^T Q(i-1)
#   4  dP(i)  = V dO(i)^T       behind 2 and 3: when it is there, dS may be overwritten. At D = 128 waits until dQ has been read
#   5  dV    += P(i)^T dO(i)    half by half as the compute groups publish P
#
# Products run in the order of their issue. 1 stands before 2 so that the compute groups have scores to work on while dS(i-1) is
# multiplied. A new tile's K is there only after dK and dV of the tile before have left through its buffer: so 3 and 5 may
# overwrite their tensor memory.


@triton.jit
def multiply_tile(memory, records_ptr, walk, q_count, lists, cfg: tl.constexpr):
    """Issue a tile's products. Returns the blocks done so far."""
    keys, q, do, scores = memory.keys, memory.q, memory.do, memory.scores
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps = count_steps(tile, walk.head() * cfg.group, lists, cfg)

    tlx.barrier_wait(keys.k_fulls[0], walk.done & 1)
    for step in range(0, steps + 1):
        q_slot, q_phase = q.slot(q_count)
        do_slot, do_phase = do.slot(q_count)
        if step < steps:
            tlx.barrier_wait(q.fulls[q_slot], q_phase)
            q_transposed = tlx.local_trans(q.buffers[q_slot])
            tlx.async_dot(keys.k[0], q_transposed, scores.s[0], use_acc=False, mBarriers=[scores.s_fulls[0]])
        if step > 0:
            multiply_ds(memory, q_count - 1, step > 1, cfg)
        else:
            tlx.barrier_wait(keys.v_fulls[0], walk.done & 1)
        if step < steps:
            tlx.barrier_wait(do.fulls[do_slot], do_phase)
            if cfg.dq_takes_dp and cfg.with_dq:
                tlx.barrier_wait(memory.grads.dq_empties[0], (q_count & 1) ^ 1)
            do_transposed = tlx.local_trans(do.buffers[do_slot])
            tlx.async_dot(keys.v[0], do_transposed, scores.dp[0], use_acc=False, mBarriers=[scores.dp_fulls[0]])
            multiply_p(scores, do.buffers[do_slot], memory.grads.dv, q_count, step > 0)
            tlx.tcgen05_commit(do.empties[do_slot])
            q_count += 1
    tlx.tcgen05_commit(memory.grads.dkv_fulls[0])
    return q_count


@triton.jit
def multiply_p(scores, do, dv, count, use_acc):
    """Issue dV += P^T dO of the count-th block, half by half."""
    HEAD_DIM: tl.constexpr = do.shape[1]
    for half in tl.static_range(2):
        tlx.barrier_wait(scores.p_fulls[half], count & 1)
        p_half = tlx.subslice(scores.p[0], half * BLOCK_M, HALF_M)
        do_half = tlx.local_slice(do, [half * HALF_M, 0], [HALF_M, HEAD_DIM])
        tlx.async_dot(p_half, do_half, dv[0], use_acc=use_acc if half == 0 else True, force_async=True)


@triton.jit
def multiply_ds(memory, count, use_acc, cfg: tl.constexpr):
    """Issue dQ = dS K and dK += dS^T Q of the count-th block, whose dS^T [keys, queries] lies in SMEM."""
    q, scores, grads = memory.q, memory.scores, memory.grads
    phase = count & 1
    q_slot, _ = q.slot(count)
    tlx.barrier_wait(scores.ds_fulls[0], phase)
    tlx.barrier_wait(scores.ds_fulls[1], phase)
    if cfg.with_dq:
        if not cfg.dq_takes_dp:
            tlx.barrier_wait(grads.dq_empties[0], phase ^ 1)
        ds = tlx.local_trans(scores.ds[0])
        tlx.async_dot(ds, memory.keys.k[0], grads.dq[0], use_acc=False, mBarriers=[grads.dq_fulls[0]])
    tlx.async_dot(scores.ds[0], q.buffers[q_slot], grads.dk[0], use_acc=use_acc, force_async=True)
    tlx.tcgen05_commit(q.empties[q_slot])


# ------------------------------------------------------------------------------------------------------------- compute


@triton.jit
def compute_tile(
    memory, half: tl.constexpr, records_ptr, walk, q_count, scale_log2, sm_scale, lists, cfg: tl.constexpr
):
    """Make P^T and dS^T for half of the queries, block by block, then write half of dK and dV. Returns the blocks done so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    for member in range(cfg.group):
        blocks = head_steps(tile, walk.head() * cfg.group + member, lists, cfg)
        if cfg.list_heads:
            q_count = compute_listed(memory.scores, memory.rows, half, blocks, q_count, scale_log2, cfg)
        else:
            q_count = compute_blocks(memory.scores, memory.rows, half, tile, blocks, q_count, scale_log2, cfg)
    keys = memory.keys
    write_dkv(memory.grads, keys.k[0], keys.v[0], keys.out_fulls, half, walk.done, sm_scale)
    return q_count


@triton.jit
def compute_blocks(scores, rows, half: tl.constexpr, tile, blocks, count, scale_log2, cfg: tl.constexpr):
    """Walk the query blocks of one head, peeled: masked blocks, the bulk, masked blocks. Returns the blocks done so far."""
    begin, end = blocks.bulk_begin, blocks.bulk_end
    count = compute_stretch(scores, rows, half, tile, blocks.first, begin, count, scale_log2, True, cfg)
    count = compute_stretch(scores, rows, half, tile, begin, end, count, scale_log2, False, cfg)
    return compute_stretch(scores, rows, half, tile, end, blocks.end, count, scale_log2, True, cfg)


@triton.jit
def compute_listed(scores, rows, half: tl.constexpr, blocks, count, scale_log2, cfg: tl.constexpr):
    """Walk the listed query blocks of one head; whether to mask is asked per block. Returns the blocks done so far."""
    for n in range(blocks.count()):
        block = blocks.nth(n)
        if blocks.masked(n):
            compute_stretch(scores, rows, half, blocks.tile, block, block + 1, count, scale_log2, True, cfg)
        else:
            compute_stretch(scores, rows, half, blocks.tile, block, block + 1, count, scale_log2, False, cfg)
        count += 1
    return count


@triton.jit
def compute_stretch(
    scores, rows, half: tl.constexpr, tile, begin, end, count, scale_log2, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Make P^T and dS^T for half of the queries in a stretch of blocks, all masked or none. Returns the blocks done so far."""
    COLUMNS: tl.constexpr = cfg.columns
    SLICES: tl.constexpr = HALF_M // COLUMNS
    FIRST: tl.constexpr = half * HALF_M
    for block in range(begin, end):
        phase = count & 1
        slot, q_phase = rows.ring.slot(count)

        tlx.barrier_wait(rows.ring.fulls[slot], q_phase)
        tlx.barrier_wait(scores.s_fulls[0], phase)
        kept = ()
        for i in tl.static_range(SLICES):
            lse = tlx.local_load(tlx.local_slice(rows.lses[slot], [FIRST + i * COLUMNS], [COLUMNS]))
            s = tlx.local_load(tlx.subslice(scores.s[0], FIRST + i * COLUMNS, COLUMNS))
            p = tl.math.exp2(fma_pairs(s, scale_log2, -lse[None, :]))
            if MASKED:
                p = mask_pairs(p, tile, block * BLOCK_M + FIRST + i * COLUMNS, cfg)
            kept = kept + (rounded_probabilities(p, scores.p.dtype),)
        for i in tl.static_range(SLICES):  # only now: P lies where S was
            tlx.local_store(tlx.subslice(scores.p[0], half * BLOCK_M + i * COLUMNS, COLUMNS), kept[i])
        tlx.barrier_arrive(scores.p_fulls[half])

        tlx.barrier_wait(scores.dp_fulls[0], phase)
        for i in tl.static_range(SLICES):
            delta = tlx.local_load(tlx.local_slice(rows.deltas[slot], [FIRST + i * COLUMNS], [COLUMNS]))
            dp = tlx.local_load(tlx.subslice(scores.dp[0], FIRST + i * COLUMNS, COLUMNS))
            ds = kept[i].to(tl.float32) * (dp - delta[None, :])
            ds_slice = tlx.local_slice(scores.ds[0], [0, FIRST + i * COLUMNS], [BLOCK_N, COLUMNS])
            tlx.local_store(ds_slice, ds.to(scores.ds.dtype))
        tlx.barrier_arrive(rows.ring.empties[slot])
        tlx.fence("async_shared")
        tlx.barrier_arrive(scores.ds_fulls[half])
        count += 1
    return count


@triton.jit
def mask_pairs(p, tile, first_query, cfg: tl.constexpr):
    """Return P^T [128 keys, columns] with 0 where a pair does not count."""
    keys = tile.row + tl.arange(0, BLOCK_N)
    queries = first_query + tl.arange(0, p.shape[1])
    if cfg.head_rows:
        queries = queries % cfg.head_rows
    return tl.where(tile.pair_mask(queries[None, :], keys[:, None]), p, 0.0)


@triton.jit
def write_dkv(grads, dk, dv, out_fulls, half: tl.constexpr, done, sm_scale):
    """Copy half of dK's and dV's columns from TMEM to the SMEM ``dk`` and ``dv``, whose operands the tile no longer needs."""
    HALF_D: tl.constexpr = dk.shape[1] // 2
    tlx.barrier_wait(grads.dkv_fulls[0], done & 1)
    values = tlx.local_load(tlx.subslice(grads.dv[0], half * HALF_D, HALF_D)).to(dv.dtype)
    tlx.local_store(tlx.local_slice(dv, [0, half * HALF_D], [BLOCK_N, HALF_D]), values)
    keys = (tlx.local_load(tlx.subslice(grads.dk[0], half * HALF_D, HALF_D)) * sm_scale).to(dk.dtype)
    tlx.local_store(tlx.local_slice(dk, [0, half * HALF_D], [BLOCK_N, HALF_D]), keys)
    tlx.fence("async_shared")
    tlx.barrier_arrive(out_fulls[0])


# -------------------------------------------------------------------------------------------------------------- reduce


@triton.jit
def reduce_tile(dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, q_count, lists, cfg: tl.constexpr):
    """Add every block's dQ of a tile to memory, then store dK and dV. Returns the blocks done so far."""
    tile, keys = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi), memory.keys
    if cfg.with_dq:
        q_count = reduce_blocks(dq_desc, memory.grads, tile, walk, dq_rows, q_count, lists, cfg)
    store_dkv(dk_desc, dv_desc, keys.k[0], keys.v[0], keys, tile, walk)
    return q_count


@triton.jit
def reduce_blocks(dq_desc, grads, tile, walk, dq_rows, q_count, lists, cfg: tl.constexpr):
    """Add every block's dQ of a tile to memory, for each head of the group. Returns the blocks done so far."""
    first_head = walk.head() * cfg.group
    for member in range(cfg.group):
        blocks = head_steps(tile, first_head + member, lists, cfg)
        row = (first_head + member) * dq_rows + (0 if cfg.broadcast_q else tile.pad_begin)
        for n in range(blocks.count()):
            reduce_dq(dq_desc, grads, row + blocks.nth(n) * BLOCK_M, q_count, cfg)
            q_count += 1
    return q_count


@triton.jit
def store_dkv(dk_desc, dv_desc, dk, dv, keys, tile, walk):
    """Store a tile's dK and dV from SMEM, and give the memory of its keys back."""
    tlx.barrier_wait(keys.out_fulls[0], walk.done & 1)
    box = tile.kv.box(tile.row, walk.head())
    tlx.async_descriptor_store(dv_desc, dv, box)
    tlx.async_descriptor_store(dk_desc, dk, box)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(keys.empties[0])


@triton.jit
def reduce_dq(dq_desc, grads, row, count, cfg: tl.constexpr):
    """Add the count-th block's dQ to the 128 rows from ``row``, slice by slice; held slices leave last, when TMEM is free."""
    WIDTH: tl.constexpr = cfg.dq_columns
    SLICES: tl.constexpr = cfg.head_dim // WIDTH
    HELD: tl.constexpr = cfg.held_slices
    tl.static_assert(
        SLICES % cfg.dq_stages == 0, "a block of dQ starts with the staging buffer that was filled longest ago"
    )
    tlx.barrier_wait(grads.dq_fulls[0], count & 1)
    for i in tl.static_range(SLICES - HELD):
        part = tlx.local_load(tlx.subslice(grads.dq[0], i * WIDTH, WIDTH))
        add_slice(dq_desc, grads.stages, part, row, i, cfg)
    held = ()
    for i in tl.static_range(SLICES - HELD, SLICES):
        held = held + (tlx.local_load(tlx.subslice(grads.dq[0], i * WIDTH, WIDTH)),)
    tlx.barrier_arrive(grads.dq_empties[0])
    for i in tl.static_range(HELD):
        add_slice(dq_desc, grads.stages, held[i], row, SLICES - HELD + i, cfg)


@triton.jit
def add_slice(dq_desc, stages, part, row, i: tl.constexpr, cfg: tl.constexpr):
    """Write one slice into the staging buffer that was filled longest ago, and add it to memory from there, in fp32."""
    stage = stages[i % cfg.dq_stages]
    tlx.async_descriptor_store_wait(cfg.dq_stages - 1)
    tlx.local_store(stage, part)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(dq_desc, stage, [row, i * cfg.dq_columns], store_reduce="add")
