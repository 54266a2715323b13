"""The Blackwell backward on a pair of CTAs: a tile of 256 keys, 128 in each, against blocks of 128 queries, at D = 128.

The five products of :mod:`backward_1cta <jfa.kernels.blackwell.backward_1cta>`, each issued once for both CTAs. Rows of A and of
the result lie where their keys are; of B each CTA holds half, which halves what a product reads from SMEM:

    product             A, own rows                       B, half of its columns       result per CTA
    S^T  = K Q^T        K [128 keys, D] SMEM              64 rows of Q                 [128, 128] TMEM
    dP^T = V dO^T       V [128, D] SMEM                   64 rows of dO                [128, 128]
    dV  += P^T dO       P^T [128, 128 queries] TMEM       64 columns of dO             [128, D]
    dK  += dS^T Q       dS^T [128, 128] TMEM              64 columns of Q              [128, D]
    dQ   = dS K         dS [64 queries, 256 keys] SMEM    64 columns of K, 256 keys    [64 queries, D]

Only the rows of dQ are split by queries: CTA r owns queries 64 r to 64 r + 63 of a block and needs their dS for *both*
CTAs' keys. So each compute group, which computes dS of 64 queries, either keeps it or sends it to the other CTA
(:func:`give_ds`).

    load rows     1 warp    TMA: K and V, rows of Q with lse and delta, rows of dO
    load columns  1 warp    TMA: columns of K, dO and Q
    mma           1 warp    leader: all products, in the order S, dK of the block before, dP, dQ of the block before, dV.
                            The other CTA's issues nothing: it tells the leader when the exchanged dS has arrived
    compute       2 x 4     each group half of the queries, of its own CTA's keys: P^T and dS^T; at the end dK and dV
    reduce        4 warps   64 rows of dQ out of TMEM at once, through staged SMEM to memory by TMA reduce-add in fp32; dK and dV

TMEM: S^T 128 columns (P^T in its lower 64, dQ in its upper 64), dP^T 128 (dS^T inside, each half in its own columns), dV and dK 128
each. A pair's accumulator of 64 rows and 128 columns takes all 128 lanes of 64 columns: lanes 64 to 127 hold columns 64 to 127.

An odd number of 128-key tiles needs nothing special: the second CTA's keys lie past the sequence's end, load as zeros, are masked,
and its stores are clipped. Both CTAs always take the same number of steps.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N, HALF_M
from jfa.kernels.blackwell.pair import CTAS, arrive_at_leader, first_pair, leads, load_half, next_pair
from jfa.kernels.blackwell.pair_memory import SENT, TILE_N, alloc_memory
from jfa.kernels.common.nouns import RowPointers
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.rounding import rounded_pairs, rounded_probabilities


@triton.jit
def pair_backward_kernel(
    q_rows_desc,  # boxes [64, head_dim]
    q_columns_desc,  # boxes [128, head_dim / 2]
    do_rows_desc,
    do_columns_desc,
    k_desc,  # boxes [128, head_dim]
    k_columns_desc,  # boxes [256, head_dim / 2]
    v_desc,
    dk_desc,  # boxes [128, head_dim / 2]
    dv_desc,
    dq_desc,  # [2, H * dq_rows, head_dim / 2] fp32, boxes [2, 64, dq_columns]: both halves of the columns of 64 rows
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,  # [tiles, 9] int32, of 256 keys; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    padded_count,
    dq_rows,
    scale_log2,  # sm_scale * log2(e)
    sm_scale,
    cfg: tl.constexpr,  # BackwardConfig
):
    memory = alloc_memory(tlx.dtype_of(k_desc), cfg)
    if cfg.clc:
        queue = tlx.clc_create_context(num_consumers=12)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            walk, count = first_pair(counts_ptr, cfg.heads), 0
            while walk.going():
                if cfg.clc:
                    tlx.clc_producer(queue, walk.phase(1) ^ 1, multi_ctas=True)
                count = reduce_tile(dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, count, cfg)
                walk = next_pair(walk, tlx.clc_consumer(queue, walk.phase(1), multi_ctas=True) if cfg.clc else 0, cfg)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, count = first_pair(counts_ptr, cfg.heads), 0
            while walk.going():
                count = compute_tile(memory, half, records_ptr, walk, count, scale_log2, sm_scale, cfg)
                walk = next_pair(walk, tlx.clc_consumer(queue, walk.phase(1), multi_ctas=True) if cfg.clc else 0, cfg)

        with tlx.async_task(num_warps=1, registers=cfg.mma_registers):  # mma
            walk, count = first_pair(counts_ptr, cfg.heads), 0
            while walk.going():
                count = multiply_or_relay(memory, records_ptr, walk, count, cfg)
                walk = next_pair(walk, tlx.clc_consumer(queue, walk.phase(1), multi_ctas=True) if cfg.clc else 0, cfg)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load rows
            walk, count = first_pair(counts_ptr, cfg.heads), 0
            constants = RowPointers(lse_ptr, delta_ptr, padded_count)
            while walk.going():
                load_keys(k_desc, v_desc, memory, records_ptr, walk, cfg)
                count = load_rows(q_rows_desc, do_rows_desc, constants, memory, records_ptr, walk, count, cfg)
                walk = next_pair(walk, tlx.clc_consumer(queue, walk.phase(1), multi_ctas=True) if cfg.clc else 0, cfg)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load columns
            walk, count = first_pair(counts_ptr, cfg.heads), 0
            while walk.going():
                load_key_columns(k_columns_desc, memory, records_ptr, walk, cfg)
                count = load_columns(q_columns_desc, do_columns_desc, memory, records_ptr, walk, count, cfg)
                walk = next_pair(walk, tlx.clc_consumer(queue, walk.phase(1), multi_ctas=True) if cfg.clc else 0, cfg)


@triton.jit
def query_steps(tile):
    """Return the Blocks of queries that see a tile of 256 keys, at least one."""
    return tile.query_blocks(TILE_N, BLOCK_M).at_least_one()


# ---------------------------------------------------------------------------------------------------------------- load

# Two roles, so that no load waits behind one whose buffer is freed later: S and dP free rows of Q and dO, dV and the next step's dK
# free columns.


@triton.jit
def load_keys(k_desc, v_desc, memory, records_ptr, walk, cfg: tl.constexpr):
    """Load K and V of this CTA's 128 keys."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    box = tile.kv.box(tile.row + tlx.cluster_cta_rank() * BLOCK_N, walk.head())
    load_half(memory.k, walk.done, k_desc, box)
    load_half(memory.v, walk.done, v_desc, box)


@triton.jit
def load_key_columns(k_columns_desc, memory, records_ptr, walk, cfg: tl.constexpr):
    """Load half of K's columns for all 256 keys. Then wait until dV of the tile before has left the buffers that come next."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    column = tlx.cluster_cta_rank() * memory.k_columns.buffers.shape[1]
    load_half(memory.k_columns, walk.done, k_columns_desc, tile.kv.box(tile.row, walk.head(), column))
    tlx.barrier_wait(memory.grads.out_empties[0], (walk.done & 1) ^ 1)


@triton.jit
def load_rows(q_rows_desc, do_rows_desc, constants, memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Load 64 rows of Q and of dO, and lse and delta of all 128, block by block per head. Returns the blocks loaded so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    blocks = query_steps(tile)
    for member in range(cfg.group):
        head = walk.head() * cfg.group + member
        lse, delta = constants.of_sequence(tile, head)
        for block in range(blocks.first, blocks.end):
            row = block * BLOCK_M
            own = row + tlx.cluster_cta_rank() * HALF_M
            load_half(memory.q_rows, count, q_rows_desc, tile.q.box(own, head))
            load_constants(memory.lses, count, lse + row)
            load_half(memory.do_rows, count, do_rows_desc, tile.out.box(own, head))
            load_constants(memory.deltas, count, delta + row)
            count += 1
    return count


@triton.jit
def load_constants(ring, count, source):
    """Fill the count-th slot with 128 numbers from ``source`` once both compute groups have read what it holds."""
    slot, phase = ring.slot(count)
    tlx.barrier_wait(ring.empties[slot], phase ^ 1)
    tlx.barrier_expect_bytes(ring.fulls[slot], ring.bytes)
    tlx.async_load(source, ring.buffers[slot], bulk=True, barrier=ring.fulls[slot])


@triton.jit
def load_columns(q_columns_desc, do_columns_desc, memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Load half of the columns of dO and Q, block by block per head. Returns the blocks loaded so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    blocks = query_steps(tile)
    column = tlx.cluster_cta_rank() * (cfg.head_dim // 2)
    for member in range(cfg.group):
        head = walk.head() * cfg.group + member
        for block in range(blocks.first, blocks.end):
            load_half(memory.do_columns, count, do_columns_desc, tile.out.box(block * BLOCK_M, head, column))
            load_half(memory.q_columns, count, q_columns_desc, tile.q.box(block * BLOCK_M, head, column))
            count += 1
    return count


# ----------------------------------------------------------------------------------------------------------------- mma


@triton.jit
def multiply_or_relay(memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Issue a tile's products in the leader; tell it of arrivals in the other CTA. Returns the blocks done so far."""
    if leads():
        count = multiply_tile(memory, records_ptr, walk, count, cfg)
    else:
        count = relay_tile(memory, records_ptr, walk, count, cfg)
    return count


# Issue order of a step, i its number, i-1 the block before (of the same tile; step 0 has none):
#
#   1  S(i)   = K Q(i)^T          over P(i-1), read by 5 of the step before, and dQ(i-2), which the reduction must have read
#   2  dK    += dS(i-1)^T Q(i-1)  dS in TMEM, half by half: needs no exchange, so it covers the time of it
#   3  dP(i)  = V dO(i)^T         over dS(i-1), which 2 has read
#   4  dQ     = dS(i-1) K         over S(i) of the second half, as soon as that has been read. Needs the exchanged dS
#   5  dV    += P(i)^T dO(i)      meanwhile dQ leaves, as 1 of the next step needs its place
#
# Products run in the order of their issue. Step `steps` does 2 and 4 only; there 4 overwrites dQ(i-2), so it waits like 1. A new
# tile's S may run while dK and dV of the tile before leave. Its 3 may not: dS comes after it, into the memory by which they leave.


@triton.jit
def multiply_tile(memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Issue a tile's products for both CTAs. Returns the blocks done so far."""
    scores, grads = memory.scores, memory.grads
    blocks = query_steps(walk.tile(records_ptr, cfg.has_lo, cfg.has_hi))
    steps = (blocks.end - blocks.first) * cfg.group

    tlx.barrier_wait(memory.k.fulls[memory.k.first], walk.done & 1)
    tlx.barrier_wait(grads.dq_empties[0], (count & 1) ^ 1)  # of the tile before, its last
    for step in range(0, steps + 1):
        if step > 1:
            tlx.barrier_wait(grads.dq_empties[0], count & 1)  # of two blocks before
        if step < steps:
            multiply_rows(memory.k, memory.q_rows, count, scores.s[0], scores.s_fulls[0])
        if step > 0:
            multiply_ds(memory, count - 1, step > 1)
        else:
            tlx.barrier_wait(memory.v.fulls[memory.v.first], walk.done & 1)
            tlx.barrier_wait(memory.k_columns.fulls[0], walk.done & 1)
            tlx.barrier_wait(grads.out_pairs[0], (walk.done & 1) ^ 1)
        if step < steps:
            multiply_rows(memory.v, memory.do_rows, count, scores.dp[0], scores.dp_fulls[0])
            if step == steps - 1:
                tlx.tcgen05_commit(memory.k.empties[memory.k.first], two_ctas=True)
                tlx.tcgen05_commit(memory.v.empties[memory.v.first], two_ctas=True)
            tlx.barrier_wait(scores.s_empties[0], count & 1)
        if step > 0:
            multiply_dq(memory, count - 1)
        if step < steps:
            multiply_p(memory, count, step > 0)
            count += 1
    tlx.tcgen05_commit(memory.k_columns.empties[0], two_ctas=True)
    tlx.tcgen05_commit(grads.dkv_fulls[0], two_ctas=True)
    return count


@triton.jit
def multiply_rows(keys, ring, count, result, done):
    """Issue result = A B^T, A being K or V and B 64 rows in each CTA."""
    slot, phase = ring.slot(count)
    tlx.barrier_wait(ring.fulls[slot], phase)
    transposed = tlx.local_trans(ring.buffers[slot])
    tlx.async_dot(
        keys.buffers[keys.first], transposed, result, use_acc=False, mBarriers=[done, ring.empties[slot]], two_ctas=True
    )


@triton.jit
def multiply_p(memory, count, use_acc):
    """Issue dV += P^T dO of the count-th block, half by half."""
    ring = memory.do_columns
    slot, phase = ring.slot(count)
    tlx.barrier_wait(ring.fulls[slot], phase)
    for half in tl.static_range(2):
        tlx.barrier_wait(memory.scores.p_fulls[half], count & 1)
        p = tlx.subslice(memory.scores.p[0], half * HALF_M, HALF_M)
        do = tlx.local_slice(ring.buffers[slot], [half * HALF_M, 0], [HALF_M, ring.buffers.shape[1]])
        first = use_acc if half == 0 else True
        tlx.async_dot(p, do, memory.grads.dv[0], use_acc=first, force_async=True, two_ctas=True)
    tlx.tcgen05_commit(ring.empties[slot], two_ctas=True)


@triton.jit
def multiply_ds(memory, count, use_acc):
    """Issue dK += dS^T Q of the count-th block, half by half as the compute groups publish dS^T in TMEM."""
    ring, scores = memory.q_columns, memory.scores
    slot, phase = ring.slot(count)
    tlx.barrier_wait(ring.fulls[slot], phase)
    for half in tl.static_range(2):
        tlx.barrier_wait(scores.ds_t_fulls[half], count & 1)
        ds = tlx.subslice(scores.ds_t[0], half * BLOCK_M, HALF_M)
        q = tlx.local_slice(ring.buffers[slot], [half * HALF_M, 0], [HALF_M, ring.buffers.shape[1]])
        first = use_acc if half == 0 else True
        tlx.async_dot(ds, q, memory.grads.dk[0], use_acc=first, force_async=True, two_ctas=True)
    tlx.tcgen05_commit(ring.empties[slot], two_ctas=True)


@triton.jit
def multiply_dq(memory, count):
    """Issue dQ = dS K of the count-th block, once both CTAs have the dS of their 64 queries."""
    scores, grads = memory.scores, memory.grads
    take_ds(scores, count)
    tlx.barrier_wait(scores.ds_pairs[0], count & 1)
    ds = tlx.local_trans(scores.ds[0])
    done = [grads.dq_fulls[0]]
    tlx.async_dot(ds, memory.k_columns.buffers[0], grads.dq[0], use_acc=False, mBarriers=done, two_ctas=True)


@triton.jit
def relay_tile(memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Tell the leader, block by block, that this CTA has the dS of its 64 queries. Returns the blocks done so far.

    A copy to another CTA can only complete at a barrier of that CTA, so the leader cannot see it by itself.
    """
    blocks = query_steps(walk.tile(records_ptr, cfg.has_lo, cfg.has_hi))
    for _ in range((blocks.end - blocks.first) * cfg.group):
        take_ds(memory.scores, count)
        arrive_at_leader(memory.scores.ds_pairs[0])
        count += 1
    return count


@triton.jit
def take_ds(scores, count):
    """Wait until dS of this CTA's 64 queries is complete: its own keys', and the other CTA's by a copy."""
    tlx.barrier_expect_bytes(scores.ds_fulls[0], BLOCK_N * HALF_M * tlx.size_of(scores.ds.dtype))
    tlx.barrier_wait(scores.ds_fulls[0], count & 1)
    tlx.fence("async_shared")  # another thread, perhaps of another CTA, issues what reads it


# ------------------------------------------------------------------------------------------------------------- compute


@triton.jit
def compute_tile(memory, half: tl.constexpr, records_ptr, walk, count, scale_log2, sm_scale, cfg: tl.constexpr):
    """Make P^T and dS^T for half of the queries, block by block, then write half of dK and dV. Returns the blocks done so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    blocks = query_steps(tile)
    begin, end = blocks.bulk_begin, blocks.bulk_end
    if not cfg.has_lo:  # then blocks behind the bulk are masked for surplus keys only, and so is every block
        begin = tl.where(end < blocks.end, blocks.end, begin)
        end = blocks.end
    for _ in range(cfg.group):
        count = compute_stretch(memory, half, tile, blocks.first, begin, count, scale_log2, True, cfg)
        count = compute_stretch(memory, half, tile, begin, end, count, scale_log2, False, cfg)
        if cfg.has_lo:
            count = compute_stretch(memory, half, tile, end, blocks.end, count, scale_log2, True, cfg)
    write_dkv(memory, half, walk.done, sm_scale, cfg)
    return count


@triton.jit
def write_dkv(memory, half: tl.constexpr, done, sm_scale, cfg: tl.constexpr):
    """Copy half of dV's and dK's columns from TMEM to the SMEM through which they leave."""
    HALF_D: tl.constexpr = cfg.head_dim // 2
    grads, dv_out, dk_out = memory.grads, memory.q_columns.buffers, memory.scores.ds_parts
    tlx.barrier_wait(grads.dkv_fulls[0], done & 1)
    dv = tlx.local_load(tlx.subslice(grads.dv[0], half * HALF_D, HALF_D)).to(dv_out.dtype)
    tlx.local_store(dv_out[half], dv)
    dk = (tlx.local_load(tlx.subslice(grads.dk[0], half * HALF_D, HALF_D)) * sm_scale).to(dk_out.dtype)
    tlx.local_store(dk_out[half], dk)
    tlx.fence("async_shared")
    tlx.barrier_arrive(grads.out_fulls[0])


@triton.jit
def compute_stretch(
    memory, half: tl.constexpr, tile, begin, end, count, scale_log2, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Make P^T and dS^T for half of the queries in a stretch of blocks, all masked or none. Returns the blocks done so far."""
    scores, lses, deltas = memory.scores, memory.lses, memory.deltas
    COLUMNS: tl.constexpr = cfg.columns
    SLICES: tl.constexpr = HALF_M // COLUMNS
    FIRST: tl.constexpr = half * HALF_M
    for block in range(begin, end):
        phase = count & 1
        slot, lse_phase = lses.slot(count)

        tlx.barrier_wait(lses.fulls[slot], lse_phase)
        tlx.barrier_wait(scores.s_fulls[0], phase)
        s = ()
        for i in tl.static_range(SLICES):
            s = s + (tlx.local_load(tlx.subslice(scores.s[0], FIRST + i * COLUMNS, COLUMNS)),)
        if half == 0:
            tlx.barrier_arrive(scores.s_reads[0])
        else:
            arrive_at_leader(scores.s_empties[0])
        p = ()
        for i in tl.static_range(SLICES):
            lse = tlx.local_load(tlx.local_slice(lses.buffers[slot], [FIRST + i * COLUMNS], [COLUMNS]))
            exact = tl.math.exp2(fma_pairs(s[i], scale_log2, -lse[None, :]))
            if MASKED:
                first_key = tile.row + tlx.cluster_cta_rank() * BLOCK_N
                exact = mask_pairs(exact, tile, first_key, block * BLOCK_M + FIRST + i * COLUMNS)
            p = p + (rounded_probabilities(exact, scores.p.dtype),)
        tlx.barrier_arrive(lses.empties[slot])
        if half == 1:
            tlx.barrier_wait(scores.s_reads[0], phase)
        for i in tl.static_range(SLICES):
            tlx.local_store(tlx.subslice(scores.p[0], FIRST + i * COLUMNS, COLUMNS), p[i])
        arrive_at_leader(scores.p_fulls[half])

        tlx.barrier_wait(deltas.fulls[0], phase)
        tlx.barrier_wait(scores.dp_fulls[0], phase)
        ds = ()
        for i in tl.static_range(SLICES):
            delta = tlx.local_load(tlx.local_slice(deltas.buffers[0], [FIRST + i * COLUMNS], [COLUMNS]))
            dp = tlx.local_load(tlx.subslice(scores.dp[0], FIRST + i * COLUMNS, COLUMNS))
            exact = p[i].to(tl.float32) * (dp - delta[None, :])
            ds = ds + (rounded_pairs(exact, scores.ds.dtype),)
        tlx.barrier_arrive(deltas.empties[0])
        tlx.barrier_wait(memory.grads.dq_fulls[0], phase ^ 1)  # dQ of the block before: dS has been read in both CTAs
        give_ds(scores, half, ds, cfg)
        for i in tl.static_range(SLICES):
            tlx.local_store(tlx.subslice(scores.ds_t[0], half * BLOCK_M + i * COLUMNS, COLUMNS), ds[i])
        arrive_at_leader(scores.ds_t_fulls[half])
        count += 1
    return count


@triton.jit
def mask_pairs(p, tile, first_key, first_query):
    """Return P^T [128 keys, columns] with 0 where a pair does not count.

    A thread has one key, hence at most two bounds, to which it compares column numbers known to the compiler. The mask of
    :meth:`Tile.pair_mask` says the same, but takes a register per column, and this kernel has none to spare.
    """
    columns = tl.arange(0, p.shape[1])[None, :]
    keys = first_key + tl.arange(0, BLOCK_N)
    least = keys * 0
    if tile.band.has_hi:
        least = keys - tile.band.hi - first_query
    least = tl.where(keys < tile.kv.length, least, p.shape[1])
    counts = columns >= least[:, None]
    if tile.band.has_lo:
        counts = counts & (columns <= (keys - tile.band.lo - first_query)[:, None])
    return tl.where(counts, p, 0.0)


@triton.jit
def give_ds(scores, half: tl.constexpr, ds, cfg: tl.constexpr):
    """Put dS^T of half of the queries into the SMEM of the CTA of that rank, at the place of this CTA's keys."""
    COLUMNS: tl.constexpr = cfg.columns
    rank = tlx.cluster_cta_rank()
    part = tl.where(rank == half, rank, SENT)
    for i in tl.static_range(HALF_M // COLUMNS):
        tlx.local_store(tlx.local_slice(scores.ds_parts[part], [0, i * COLUMNS], [BLOCK_N, COLUMNS]), ds[i])
    tlx.fence("async_shared")
    if rank == half:
        tlx.barrier_arrive(scores.ds_fulls[0])
    else:
        tlx.async_remote_shmem_copy(scores.ds_parts[rank], scores.ds_parts[SENT], half, scores.ds_fulls[0])


# -------------------------------------------------------------------------------------------------------------- reduce


@triton.jit
def reduce_tile(dq_desc, dk_desc, dv_desc, memory, records_ptr, walk, dq_rows, count, cfg: tl.constexpr):
    """Add every block's dQ of a tile to memory, then store dK and dV. Returns the blocks done so far."""
    tile, grads = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi), memory.grads
    rank = tlx.cluster_cta_rank()
    blocks = query_steps(tile)
    first_head = walk.head() * cfg.group
    for member in range(cfg.group):
        row = (first_head + member) * dq_rows + (0 if cfg.broadcast_q else tile.pad_begin) + rank * HALF_M
        for block in range(blocks.first, blocks.end):
            reduce_dq(dq_desc, grads, row + block * BLOCK_M, count, cfg)
            count += 1
    tlx.barrier_wait(grads.out_fulls[0], walk.done & 1)
    for half in tl.static_range(2):
        box = tile.kv.box(tile.row + rank * BLOCK_N, walk.head(), half * (cfg.head_dim // 2))
        tlx.async_descriptor_store(dv_desc, memory.q_columns.buffers[half], box)
        tlx.async_descriptor_store(dk_desc, memory.scores.ds_parts[half], box)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(grads.out_empties[0])
    arrive_at_leader(grads.out_pairs[0])
    return count


@triton.jit
def reduce_dq(dq_desc, grads, row, count, cfg: tl.constexpr):
    """Add the count-th block's dQ to the 64 rows from ``row``. All of it is read first, so that tensor memory is free early."""
    WIDTH: tl.constexpr = cfg.dq_columns
    SLICES: tl.constexpr = cfg.head_dim // 2 // WIDTH
    tl.static_assert(
        SLICES % cfg.dq_stages == 0, "a block of dQ starts with the staging buffer that was filled longest ago"
    )
    tlx.barrier_wait(grads.dq_fulls[0], count & 1)
    held = ()
    for i in tl.static_range(SLICES):
        held = held + (tlx.local_load(tlx.subslice(grads.dq_lanes[0], i * WIDTH, WIDTH)),)
    arrive_at_leader(grads.dq_empties[0])
    for i in tl.static_range(SLICES):
        stage = grads.stages[i % cfg.dq_stages]
        tlx.async_descriptor_store_wait(cfg.dq_stages - 1)
        tlx.local_store(stage, held[i])
        tlx.fence("async_shared")
        both = tlx.local_reshape(stage, (CTAS, HALF_M, WIDTH))  # the halves of the columns, one below the other
        tlx.async_descriptor_store(dq_desc, both, [0, row, i * WIDTH], store_reduce="add")
