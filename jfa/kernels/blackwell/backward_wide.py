"""dK and dV of queries and keys with up to 192 columns, values with up to 128. dQ has a kernel of its own, backward_dq_wide.

For a tile of 128 keys of one key/value head, each query head of its group and each block of 64 queries, transposed:

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)        dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)           dK += dS^T Q

    load       4 warps   TMA: K and V once per tile; per block Q with its rows' lse and delta, and dO
    compute    2 x 4     each group half of the queries: P^T and dS^T into TMEM where S^T was; at the end dV and dK into SMEM
    mma        1 warp    the four products
    store      1 warp    TMA: dK and dV to memory

Tensor memory decides: dK and dV take 192 + 128 of its 512 columns, S^T and dP^T of 128 queries would take 256 more. Of 64 queries
there is room for S^T twice and dP^T, and none for dQ, whose kernel repeats two products of the five. So nothing is added up in
memory, and the result is the same bit by bit. dS^T is the left operand of its only product and stays in TMEM.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_memory import RowConstants
from jfa.kernels.blackwell.config import BLOCK_N, WIDE_BLOCK
from jfa.kernels.blackwell.tails import (
    Boxes,
    TailRing,
    TailSums,
    add_half,
    alloc_pieces,
    alloc_tail_ring,
    alloc_tail_sums,
    score,
    store_piece,
    write_piece,
)
from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.rounding import rounded_probabilities
from jfa.kernels.common.units import first_unit

BLOCK_M = WIDE_BLOCK  # queries of a block
HALF_M = tl.constexpr(BLOCK_M.value // 2)  # of a compute group
PIECES = tl.constexpr(5)  # of 64 columns: two of dV, three of dK


@triton.jit
def wide_backward_kernel(
    q_desc,
    q_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    do_desc,
    dk_desc,  # boxes of 64 columns, as of dV
    dv_desc,
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    padded_count,
    scale_log2,  # sm_scale * log2(e)
    sm_scale,
    cfg: tl.constexpr,  # WideConfig
):
    memory = alloc_memory(tlx.dtype_of(q_desc), cfg)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # load
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            constants = RowPointers(lse_ptr, delta_ptr, padded_count)
            q_boxes, k_boxes = Boxes(q_desc, q_tail_desc), Boxes(k_desc, k_tail_desc)
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                memory.k.load(walk.done, k_boxes, tile.kv, tile.row, walk.head())
                memory.v.load(walk.done, v_desc, tile.kv.box(tile.row, walk.head()))
                count = load_queries(q_boxes, do_desc, constants, memory, tile, walk, count, cfg)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                count = compute_tile(memory, half, tile, count, scale_log2, cfg)
                write_gradients(memory, half, walk.done, sm_scale)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                count = multiply_tile(memory, tile, walk, count, cfg)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # store
            walk = first_unit(counts_ptr, cfg.heads)
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                store_tile(dk_desc, dv_desc, memory.pieces, tile, walk)
                walk = walk.next(0, False)


# ------------------------------------------------------------------------------------------------- memory and barriers


@aggregate
class Scores:
    """S^T of two blocks in TMEM, each with P^T and dS^T inside; dP^T of one.

    Columns of S of a half of the queries hold its P, then its dS: the compute groups never touch each other's columns.
    """

    s: tlx.buffered_tensor  # [2] x [128 keys, 64 queries] fp32
    weights: tlx.buffered_tensor  # [2] x [128, 128]: 32 columns of P and 32 of dS, per half
    dp: tlx.buffered_tensor
    s_fulls: tlx.mbarrier
    p_fulls: tlx.mbarrier  # per half of each S
    dp_fulls: tlx.mbarrier
    ds_fulls: tlx.mbarrier  # per half


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA."""

    k: TailRing
    v: Ring
    q: TailRing
    do: Ring
    rows: RowConstants
    scores: Scores
    dk: TailSums
    dv: tlx.buffered_tensor
    dkv_fulls: tlx.mbarrier  # the tile's last product is done
    dkv_empties: tlx.mbarrier  # both compute groups have read dK and dV
    pieces: Ring  # of dV, then dK, on their way to memory


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    k = alloc_tail_ring(BLOCK_N, DTYPE, 1, 1, 0, cfg)
    v = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, 1, 1)
    # Q is emptied by the mma role, its lse and delta by both compute groups. They arrive together.
    q = alloc_tail_ring(BLOCK_M, DTYPE, cfg.slots, 3, 2 * 4 * BLOCK_M, cfg)
    do = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, cfg.value_slots, 1)
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, q.main.stages)
    rows = RowConstants(lses, tlx.local_alloc((BLOCK_M,), tl.float32, q.main.stages), q.main)
    dv = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dk = alloc_tail_sums(BLOCK_N, cfg)
    empties, pieces = tlx.alloc_barriers(1, arrive_count=2), alloc_pieces(BLOCK_N, cfg.tail_dim, DTYPE)
    return Memory(k, v, q, do, rows, alloc_scores(DTYPE), dk, dv, tlx.alloc_barriers(1), empties, pieces)


@triton.jit
def alloc_scores(DTYPE: tl.constexpr):
    """Allocate Scores."""
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    weights = tlx.local_alloc((BLOCK_N, 2 * BLOCK_M), DTYPE, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, weights, group_type=tlx.reuse_group_type.shared))
    dp = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem)
    s_fulls, p_fulls = tlx.alloc_barriers(2), tlx.alloc_barriers(4)
    return Scores(s, weights, dp, s_fulls, p_fulls, tlx.alloc_barriers(1), tlx.alloc_barriers(2))


@triton.jit
def query_steps(tile):
    """Return the Blocks of queries that see a key tile, at least one."""
    return tile.query_blocks(BLOCK_N, BLOCK_M).at_least_one()


# ---------------------------------------------------------------------------------------------------------------- load


@triton.jit
def load_queries(q_boxes, do_desc, constants, memory, tile, walk, count, cfg: tl.constexpr):
    """Load Q, its rows' lse and delta, and dO, block by block for each head of the group. Returns the blocks loaded so far."""
    blocks, first_head = query_steps(tile), walk.head() * cfg.group
    for member in range(cfg.group):
        head = first_head + member
        lse, delta = constants.of_sequence(tile, head)
        for block in range(blocks.first, blocks.end):
            row = block * BLOCK_M
            memory.q.load(count, q_boxes, tile.q, row, head)
            memory.rows.load(count, lse + row, delta + row)
            memory.do.load(count, do_desc, tile.out.box(row, head))
            count += 1
    return count


# ----------------------------------------------------------------------------------------------------------------- mma

# Issue order of a step, i its number, i-1 the block before (of the same tile; step 0 has none):
#
#   1  S(i)   = K Q(i)^T        into the buffer of S(i-2), P(i-2), dS(i-2), which 2 and 3 of the step before have read
#   2  dV    += P(i-1)^T dO     half by half as the compute groups publish P
#   3  dK    += dS(i-1)^T Q     half by half as they publish dS
#   4  dP(i)  = V dO(i)^T       over dP(i-1), which was read before dS(i-1) was published
#
# Products run in the order of their issue. The compute groups make dS(i-1) during 1 and 2, and P(i) during 3 and 4. P may be
# published a block ahead of 2, so it has a barrier per S. A tile's first 2 waits until both groups have read dK and dV of the
# tile before. K is freed by a tile's last 1 and V by its last 4, so those of the next tile come while this one ends.


@triton.jit
def multiply_tile(memory, tile, walk, count, cfg: tl.constexpr):
    """Issue a tile's products. Returns the blocks done so far."""
    k, v, q, do, scores = memory.k, memory.v, memory.q, memory.do, memory.scores
    steps = query_steps(tile).count() * cfg.group
    tlx.barrier_wait(k.main.fulls[0], walk.done & 1)
    for step in range(0, steps + 1):
        if step < steps:
            slot, phase = q.main.slot(count)
            tlx.barrier_wait(q.main.fulls[slot], phase)
            score(k, 0, q, slot, scores.s[count & 1], scores.s_fulls[count & 1])
        if step + 1 == steps:
            tlx.tcgen05_commit(k.main.empties[0])
        if step == 1:
            tlx.barrier_wait(memory.dkv_empties[0], (walk.done & 1) ^ 1)
        if step > 0:
            multiply_weights(memory, count - 1, step > 1)
        else:
            tlx.barrier_wait(v.fulls[0], walk.done & 1)
        if step < steps:
            slot, phase = do.slot(count)
            tlx.barrier_wait(do.fulls[slot], phase)
            do_transposed = tlx.local_trans(do.buffers[slot])
            tlx.async_dot(v.buffers[0], do_transposed, scores.dp[0], use_acc=False, mBarriers=[scores.dp_fulls[0]])
            count += 1
        if step + 1 == steps:
            tlx.tcgen05_commit(v.empties[0])
    tlx.tcgen05_commit(memory.dkv_fulls[0])
    return count


@triton.jit
def multiply_weights(memory, count, use_acc):
    """Issue dV += P^T dO and dK += dS^T Q of the count-th block, half by half, and free its dO and Q."""
    scores, at = memory.scores, count & 1
    HEAD_DIM: tl.constexpr = memory.do.buffers.shape[1]
    slot, _ = memory.do.slot(count)
    for half in tl.static_range(2):
        tlx.barrier_wait(scores.p_fulls[2 * at + half], (count >> 1) & 1)
        p = tlx.subslice(scores.weights[at], half * BLOCK_M, HALF_M)
        do = tlx.local_slice(memory.do.buffers[slot], [half * HALF_M, 0], [HALF_M, HEAD_DIM])
        tlx.async_dot(p, do, memory.dv[0], use_acc=use_acc if half == 0 else True, force_async=True)
    tlx.tcgen05_commit(memory.do.empties[slot])
    slot, _ = memory.q.main.slot(count)
    for half in tl.static_range(2):
        tlx.barrier_wait(scores.ds_fulls[half], count & 1)
        use_acc = use_acc if half == 0 else True
        add_half(scores.weights[at], half * BLOCK_M + HALF_M, memory.q, slot, half, memory.dk, use_acc)
    tlx.tcgen05_commit(memory.q.main.empties[slot])


# ------------------------------------------------------------------------------------------------------------- compute


@triton.jit
def compute_tile(memory, half: tl.constexpr, tile, count, scale_log2, cfg: tl.constexpr):
    """Make P^T and dS^T for half of the queries: masked blocks, the bulk, masked blocks. Returns the blocks done so far."""
    blocks = query_steps(tile)
    begin, end = blocks.bulk_begin, blocks.bulk_end
    for _ in range(cfg.group):
        count = compute_stretch(memory, half, tile, blocks.first, begin, count, scale_log2, True)
        count = compute_stretch(memory, half, tile, begin, end, count, scale_log2, False)
        count = compute_stretch(memory, half, tile, end, blocks.end, count, scale_log2, True)
    return count


@triton.jit
def compute_stretch(memory, half: tl.constexpr, tile, begin, end, count, scale_log2, MASKED: tl.constexpr):
    """Make P^T and dS^T for half of the queries in a stretch of blocks, all masked or none. Returns the blocks done so far."""
    FIRST: tl.constexpr = half * HALF_M
    scores, rows, ring = memory.scores, memory.rows, memory.q.main
    for block in range(begin, end):
        slot, phase = ring.slot(count)
        at = count & 1
        tlx.barrier_wait(ring.fulls[slot], phase)
        tlx.barrier_wait(scores.s_fulls[at], (count >> 1) & 1)
        lse = tlx.local_load(tlx.local_slice(rows.lses[slot], [FIRST], [HALF_M]))
        s = tlx.local_load(tlx.subslice(scores.s[at], FIRST, HALF_M))
        p = tl.math.exp2(fma_pairs(s, scale_log2, -lse[None, :]))
        if MASKED:
            keys = tile.row + tl.arange(0, BLOCK_N)
            queries = block * BLOCK_M + FIRST + tl.arange(0, HALF_M)
            p = tl.where(tile.pair_mask(queries[None, :], keys[:, None]), p, 0.0)
        p = rounded_probabilities(p, scores.weights.dtype)
        tlx.local_store(tlx.subslice(scores.weights[at], 2 * FIRST, HALF_M), p)
        tlx.barrier_arrive(scores.p_fulls[2 * at + half])

        delta = tlx.local_load(tlx.local_slice(rows.deltas[slot], [FIRST], [HALF_M]))
        tlx.barrier_wait(scores.dp_fulls[0], count & 1)
        dp = tlx.local_load(tlx.subslice(scores.dp[0], FIRST, HALF_M))
        ds = p.to(tl.float32) * (dp - delta[None, :])
        tlx.local_store(tlx.subslice(scores.weights[at], 2 * FIRST + HALF_M, HALF_M), ds.to(scores.weights.dtype))
        tlx.barrier_arrive(ring.empties[slot])
        tlx.barrier_arrive(scores.ds_fulls[half])
        count += 1
    return count


@triton.jit
def write_gradients(memory, half: tl.constexpr, done, sm_scale):
    """Copy half of each piece of dV and dK to SMEM. Then the next tile's products may overwrite them."""
    WIDTH: tl.constexpr = memory.pieces.buffers.shape[1]
    pieces, count = memory.pieces, PIECES * done
    tlx.barrier_wait(memory.dkv_fulls[0], done & 1)
    for i in tl.static_range(2):
        write_piece(memory.dv[0], i * WIDTH, half, 1.0, pieces, count + i)
    for i in tl.static_range(2):
        write_piece(memory.dk.main[0], i * WIDTH, half, sm_scale, pieces, count + 2 + i)
    write_piece(memory.dk.tail[0], 0, half, sm_scale, pieces, count + 4)
    tlx.barrier_arrive(memory.dkv_empties[0])


# --------------------------------------------------------------------------------------------------------------- store


@triton.jit
def store_tile(dk_desc, dv_desc, pieces, tile, walk):
    """Copy dV and dK from SMEM to memory, piece by piece."""
    WIDTH: tl.constexpr = pieces.buffers.shape[1]
    count, head = PIECES * walk.done, walk.head()
    for i in tl.static_range(2):
        store_piece(dv_desc, pieces, count + i, tile.kv.box(tile.row, head, i * WIDTH))
    for i in tl.static_range(3):
        store_piece(dk_desc, pieces, count + 2 + i, tile.kv.box(tile.row, head, i * WIDTH))
