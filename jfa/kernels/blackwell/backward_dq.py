"""dQ without atomics: a tile of 128 queries walks its keys and keeps dQ in tensor memory, for a deterministic backward.

    S = Q K^T     P = exp2(S scale - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K

    load      1 warp    TMA: Q and dO once per tile, K and V blocks through a ring each
    mma       1 warp    dP of a block, S of the next, then dQ of the block
    compute   2 x 4     each group half of the keys: dS into TMEM where S was; at the end dQ to memory, in fp32

Rows are queries here, so lse and delta are one number per thread. S has two buffers: the next block's scores are ready while the
groups work on this one's. This costs two more products than adding up dQ in :mod:`jfa.kernels.blackwell.backward_1cta`.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.softmax import at_most_one
from jfa.kernels.common.units import first_unit

HALF_N = tl.constexpr(BLOCK_N.value // 2)  # keys of a compute group
COLUMNS = tl.constexpr(32)  # of S and dP that a compute group holds at a time


@triton.jit
def dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,  # [H * padded_count, head_dim] fp32, boxes [BLOCK_M, dq_columns]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,
    records_ptr,
    counts_ptr,
    padded_count,
    scale_log2,
    cfg: tl.constexpr,  # DqConfig
):
    memory = alloc_memory(tlx.dtype_of(q_desc), cfg)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # load
            walk, kv_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                load_queries(q_desc, do_desc, memory, tile, walk)
                kv_count = load_keys(k_desc, v_desc, memory, tile, walk.head() // cfg.group, kv_count)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, kv_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                row = walk.head() * padded_count + tile.pad_begin + tile.row
                lse = tl.load(lse_ptr + row + tl.arange(0, BLOCK_M))
                delta = tl.load(delta_ptr + row + tl.arange(0, BLOCK_M))
                kv_count = compute_tile(memory.scores, half, tile, (lse, delta), kv_count, scale_log2)
                tlx.barrier_wait(memory.dq_fulls[0], walk.done & 1)
                write_dq(dq_desc, memory.dq, memory.stages, half, row, cfg)
                tlx.barrier_arrive(memory.dq_empties[0])
                walk = walk.next(0, False)
            tlx.async_descriptor_store_wait(0)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, kv_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                kv_count = multiply_tile(memory, records_ptr, walk, kv_count, cfg)
                walk = walk.next(0, False)


@aggregate
class Scores:
    """S, dS inside it, and dP in TMEM. ``s`` and ``ds`` have two buffers; ``ds_fulls`` has a barrier per half of the keys.

    dS of a half lies inside S of that half: the compute groups never touch each other's columns.
    """

    s: tlx.buffered_tensor  # [2] x [128 queries, keys] fp32
    ds: tlx.buffered_tensor  # [2] x [128, 2 keys], of which the first quarter is used, and the third
    dp: tlx.buffered_tensor
    s_fulls: tlx.mbarrier
    ds_fulls: tlx.mbarrier
    dp_fulls: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA; ``do`` is filled and released together with ``q``."""

    q: Ring
    do: tlx.buffered_tensor
    k: Ring
    v: Ring
    scores: Scores
    dq: tlx.buffered_tensor
    dq_fulls: tlx.mbarrier
    dq_empties: tlx.mbarrier
    stages: tlx.buffered_tensor  # in SMEM, one per compute group, between dQ and memory


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    q = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, 1, 1)
    q = Ring(q.buffers, q.fulls, q.empties, q.stages, 2 * q.bytes, 0)
    do = tlx.local_alloc((BLOCK_M, cfg.head_dim), DTYPE, 1)
    k = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.kv_slots, 1)
    v = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.kv_slots, 1)
    stages = tlx.local_alloc((BLOCK_M, cfg.dq_columns), tl.float32, 2)
    scores = alloc_scores(DTYPE, BLOCK_N)
    dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dq_empties = tlx.alloc_barriers(1, arrive_count=2)
    return Memory(q, do, k, v, scores, dq, tlx.alloc_barriers(1), dq_empties, stages)


@triton.jit
def alloc_scores(DTYPE: tl.constexpr, KEYS: tl.constexpr):
    """Allocate Scores of blocks of KEYS keys."""
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_M, KEYS), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    ds = tlx.local_alloc((BLOCK_M, 2 * KEYS), DTYPE, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, ds, group_type=tlx.reuse_group_type.shared))
    dp = tlx.local_alloc((BLOCK_M, KEYS), tl.float32, 1, tlx.storage_kind.tmem)
    return Scores(s, ds, dp, tlx.alloc_barriers(2), tlx.alloc_barriers(2), tlx.alloc_barriers(1))


@triton.jit
def load_queries(q_desc, do_desc, memory, tile, walk):
    """Load a tile's Q and dO, which share their barriers."""
    memory.q.load(walk.done, q_desc, tile.q.box(tile.row, walk.head()))
    tlx.async_descriptor_load(do_desc, memory.do[0], tile.out.box(tile.row, walk.head()), memory.q.fulls[0])


@triton.jit
def load_keys(k_desc, v_desc, memory, tile, kv_head, kv_count):
    """Load K and V of a tile's key blocks. Returns the blocks loaded so far."""
    blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
    for block in range(blocks.first, blocks.end):
        box = tile.kv.box(block * BLOCK_N, kv_head)
        memory.k.load(kv_count, k_desc, box)
        memory.v.load(kv_count, v_desc, box)
        kv_count += 1
    return kv_count


# Issue order of a step, i its number:
#
#   1  dP(i)  = dO V(i)^T     dP(i-1) was read before the groups published dS(i-1), which 3 of the step before waited for
#   2  S(i+1) = Q K(i+1)^T    into the buffer of S(i-1) and dS(i-1), which 3 of the step before has read
#   3  dQ    += dS(i) K(i)    half by half as the compute groups publish dS
#
# Products run in the order of their issue; S(0) stands before the first step. A tile's first dQ waits until both groups have read
# the dQ of the tile before.


@triton.jit
def multiply_tile(memory, records_ptr, walk, kv_count, cfg: tl.constexpr):
    """Issue a tile's products. Returns the blocks done so far."""
    k, v, scores = memory.k, memory.v, memory.scores
    blocks = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi).key_blocks(BLOCK_M, BLOCK_N)
    steps = blocks.end - blocks.first
    tlx.barrier_wait(memory.q.fulls[0], walk.done & 1)
    tlx.barrier_wait(memory.dq_empties[0], (walk.done & 1) ^ 1)
    score(memory, kv_count)
    for step in range(0, steps):
        slot, phase = v.slot(kv_count)
        tlx.barrier_wait(v.fulls[slot], phase)
        v_transposed = tlx.local_trans(v.buffers[slot])
        tlx.async_dot(memory.do[0], v_transposed, scores.dp[0], use_acc=False, mBarriers=[scores.dp_fulls[0]])
        tlx.tcgen05_commit(v.empties[slot])
        if step + 1 < steps:
            score(memory, kv_count + 1)
        for half in tl.static_range(2):
            tlx.barrier_wait(scores.ds_fulls[half], kv_count & 1)
            ds_half = tlx.subslice(scores.ds[kv_count & 1], half * BLOCK_N, HALF_N)
            k_half = tlx.local_slice(k.buffers[slot], [half * HALF_N, 0], [HALF_N, cfg.head_dim])
            tlx.async_dot(ds_half, k_half, memory.dq[0], use_acc=step > 0 if half == 0 else True, force_async=True)
        tlx.tcgen05_commit(k.empties[slot])
        kv_count += 1
    tlx.tcgen05_commit(memory.q.empties[0])
    tlx.tcgen05_commit(memory.dq_fulls[0])
    return kv_count


@triton.jit
def score(memory, kv_count):
    """Issue S = Q K^T of the count-th block."""
    k, scores = memory.k, memory.scores
    slot, phase = k.slot(kv_count)
    tlx.barrier_wait(k.fulls[slot], phase)
    k_transposed = tlx.local_trans(k.buffers[slot])
    s_full = scores.s_fulls[kv_count & 1]
    tlx.async_dot(memory.q.buffers[0], k_transposed, scores.s[kv_count & 1], use_acc=False, mBarriers=[s_full])


@triton.jit
def compute_tile(scores, half: tl.constexpr, tile, rows, count, scale_log2):
    """Make dS for half of the keys, peeled: masked blocks, the bulk, masked blocks. Returns the blocks done so far."""
    blocks = tile.key_blocks(BLOCK_M, scores.s.shape[1])
    begin, end = blocks.bulk_begin, blocks.bulk_end
    count = compute_stretch(scores, half, tile, blocks.first, begin, rows, count, scale_log2, True)
    count = compute_stretch(scores, half, tile, begin, end, rows, count, scale_log2, False)
    return compute_stretch(scores, half, tile, end, blocks.end, rows, count, scale_log2, True)


@triton.jit
def compute_stretch(scores, half: tl.constexpr, tile, begin, end, rows, count, scale_log2, MASKED: tl.constexpr):
    """Make dS for half of the keys in a stretch of blocks, all masked or none. Returns the blocks done so far."""
    KEYS: tl.constexpr = scores.s.shape[1]
    FIRST: tl.constexpr = half * (KEYS // 2)
    SLICES: tl.constexpr = KEYS // 2 // COLUMNS
    lse, delta = rows
    for block in range(begin, end):
        at = count & 1
        tlx.barrier_wait(scores.s_fulls[at], (count >> 1) & 1)
        kept = ()
        for i in tl.static_range(SLICES):
            s = tlx.local_load(tlx.subslice(scores.s[at], FIRST + i * COLUMNS, COLUMNS))
            p = at_most_one(tl.math.exp2(fma_pairs(s, scale_log2, -lse[:, None])))
            if MASKED:
                queries = tile.row + tl.arange(0, BLOCK_M)
                keys = block * KEYS + FIRST + i * COLUMNS + tl.arange(0, COLUMNS)
                p = tl.where(tile.pair_mask(queries[:, None], keys[None, :]), p, 0.0)
            kept = kept + (p,)
        tlx.barrier_wait(scores.dp_fulls[0], count & 1)
        for i in tl.static_range(SLICES):
            dp = tlx.local_load(tlx.subslice(scores.dp[0], FIRST + i * COLUMNS, COLUMNS))
            ds = kept[i] * (dp - delta[:, None])
            tlx.local_store(tlx.subslice(scores.ds[at], 2 * FIRST + i * COLUMNS, COLUMNS), ds.to(scores.ds.dtype))
        tlx.barrier_arrive(scores.ds_fulls[half])
        count += 1
    return count


@triton.jit
def write_dq(dq_desc, dq, stages, half: tl.constexpr, row, cfg: tl.constexpr):
    """Copy half of dQ's columns to the 128 rows from ``row``, which are padded. The last store may be under way on return."""
    WIDTH: tl.constexpr = cfg.dq_columns
    HALF_D: tl.constexpr = cfg.head_dim // 2
    for i in tl.static_range(HALF_D // WIDTH):
        part = tlx.local_load(tlx.subslice(dq[0], half * HALF_D + i * WIDTH, WIDTH))
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(stages[half], part)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(dq_desc, stages[half], [row, half * HALF_D + i * WIDTH])
