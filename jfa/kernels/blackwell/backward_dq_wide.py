"""dQ of queries and keys with up to 192 columns: a tile of 128 queries walks its keys and keeps dQ in tensor memory.

    S = Q K^T     P = exp2(S scale - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K

    load      4 warps   TMA: Q and dO once per tile, K and V in blocks of 64 keys, through a ring each
    compute   2 x 4     each group half of the keys: dS into TMEM where S was; at the end dQ into SMEM
    mma       1 warp    the three products
    store     1 warp    TMA: dQ to memory

As :mod:`jfa.kernels.blackwell.backward_dq`, but dQ is stored as it is returned, not in fp32; and blocks are of 64 keys, since S
twice, dP and dQ of 128 keys would need 576 of 512 columns of tensor memory.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_dq import Scores, alloc_scores, compute_tile
from jfa.kernels.blackwell.config import BLOCK_M, WIDE_BLOCK
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
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.units import first_unit

BLOCK_N = WIDE_BLOCK  # keys of a block
PIECES = tl.constexpr(3)  # of 64 columns of dQ


@triton.jit
def wide_dq_kernel(
    q_desc,
    q_tail_desc,
    k_desc,
    k_tail_desc,
    v_desc,
    do_desc,
    dq_desc,  # boxes of 64 columns
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,
    counts_ptr,
    padded_count,
    scale_log2,
    sm_scale,
    cfg: tl.constexpr,  # WideConfig
):
    memory = alloc_memory(tlx.dtype_of(q_desc), cfg)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # load
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            q_boxes, k_boxes = Boxes(q_desc, q_tail_desc), Boxes(k_desc, k_tail_desc)
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                load_queries(q_boxes, do_desc, memory, tile, walk)
                count = load_keys(k_boxes, v_desc, memory, tile, walk.head() // cfg.group, count)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                row = walk.head() * padded_count + tile.pad_begin + tile.row + tl.arange(0, BLOCK_M)
                rows = (tl.load(lse_ptr + row), tl.load(delta_ptr + row))
                count = compute_tile(memory.scores, half, tile, rows, count, scale_log2)
                write_dq(memory, half, walk.done, sm_scale)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                count = multiply_tile(memory, tile, walk, count)
                walk = walk.next(0, False)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # store
            walk = first_unit(counts_ptr, cfg.heads)
            while walk.going():
                tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
                store_tile(dq_desc, memory.pieces, tile, walk)
                walk = walk.next(0, False)


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA; ``do`` is loaded and freed with ``q``."""

    q: TailRing
    do: tlx.buffered_tensor
    k: TailRing
    v: Ring
    scores: Scores
    dq: TailSums
    dq_fulls: tlx.mbarrier  # the tile's last product is done
    dq_empties: tlx.mbarrier  # both compute groups have read dQ
    pieces: Ring  # of dQ on their way to memory


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    q = alloc_tail_ring(BLOCK_M, DTYPE, 1, 1, BLOCK_M * cfg.head_dim * tlx.size_of(DTYPE), cfg)
    do = tlx.local_alloc((BLOCK_M, cfg.head_dim), DTYPE, 1)
    k = alloc_tail_ring(BLOCK_N, DTYPE, cfg.slots, 1, 0, cfg)
    v = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.value_slots, 1)
    scores = alloc_scores(DTYPE, BLOCK_N)
    empties, pieces = tlx.alloc_barriers(1, arrive_count=2), alloc_pieces(BLOCK_M, cfg.tail_dim, DTYPE)
    return Memory(q, do, k, v, scores, alloc_tail_sums(BLOCK_M, cfg), tlx.alloc_barriers(1), empties, pieces)


@triton.jit
def load_queries(q_boxes, do_desc, memory, tile, walk):
    """Load a tile's Q and dO, which share their barriers."""
    memory.q.load(walk.done, q_boxes, tile.q, tile.row, walk.head())
    box = tile.out.box(tile.row, walk.head())
    tlx.async_descriptor_load(do_desc, memory.do[0], box, memory.q.main.fulls[0])


@triton.jit
def load_keys(k_boxes, v_desc, memory, tile, kv_head, count):
    """Load K and V of a tile's key blocks. Returns the blocks loaded so far."""
    blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
    for block in range(blocks.first, blocks.end):
        memory.k.load(count, k_boxes, tile.kv, block * BLOCK_N, kv_head)
        memory.v.load(count, v_desc, tile.kv.box(block * BLOCK_N, kv_head))
        count += 1
    return count


# Issue order of a step, i its number, i-1 the block before (of the same tile; step 0 has none):
#
#   1  S(i)   = Q K(i)^T     into the buffer of S(i-2) and dS(i-2), which 2 of the step before has read
#   2  dQ    += dS(i-1) K    half by half as the compute groups publish dS
#   3  dP(i)  = dO V(i)^T    over dP(i-1), which was read before dS(i-1) was published
#
# Products run in the order of their issue. A tile's first 2 waits until both groups have read dQ of the tile before. Its last 3
# frees Q and dO, so those of the next tile come while this one ends.


@triton.jit
def multiply_tile(memory, tile, walk, count):
    """Issue a tile's products. Returns the blocks done so far."""
    q, k, v, scores = memory.q, memory.k, memory.v, memory.scores
    blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
    steps = blocks.end - blocks.first
    tlx.barrier_wait(q.main.fulls[0], walk.done & 1)
    for step in range(0, steps + 1):
        if step < steps:
            slot, phase = k.main.slot(count)
            tlx.barrier_wait(k.main.fulls[slot], phase)
            score(q, 0, k, slot, scores.s[count & 1], scores.s_fulls[count & 1])
        if step == 1:
            tlx.barrier_wait(memory.dq_empties[0], (walk.done & 1) ^ 1)
        if step > 0:
            multiply_ds(memory, count - 1, step > 1)
        if step < steps:
            slot, phase = v.slot(count)
            tlx.barrier_wait(v.fulls[slot], phase)
            v_transposed = tlx.local_trans(v.buffers[slot])
            tlx.async_dot(memory.do[0], v_transposed, scores.dp[0], use_acc=False, mBarriers=[scores.dp_fulls[0]])
            tlx.tcgen05_commit(v.empties[slot])
            count += 1
        if step + 1 == steps:
            tlx.tcgen05_commit(q.main.empties[0])
    tlx.tcgen05_commit(memory.dq_fulls[0])
    return count


@triton.jit
def multiply_ds(memory, count, use_acc):
    """Issue dQ += dS K of the count-th block, half by half, and free its K."""
    scores, k = memory.scores, memory.k
    slot, _ = k.main.slot(count)
    for half in tl.static_range(2):
        tlx.barrier_wait(scores.ds_fulls[half], count & 1)
        add_half(scores.ds[count & 1], half * BLOCK_N, k, slot, half, memory.dq, use_acc if half == 0 else True)
    tlx.tcgen05_commit(k.main.empties[slot])


@triton.jit
def write_dq(memory, half: tl.constexpr, done, sm_scale):
    """Copy half of each piece of dQ to SMEM. Then the next tile's products may overwrite it."""
    WIDTH: tl.constexpr = memory.pieces.buffers.shape[1]
    count = PIECES * done
    tlx.barrier_wait(memory.dq_fulls[0], done & 1)
    for i in tl.static_range(2):
        write_piece(memory.dq.main[0], i * WIDTH, half, sm_scale, memory.pieces, count + i)
    write_piece(memory.dq.tail[0], 0, half, sm_scale, memory.pieces, count + 2)
    tlx.barrier_arrive(memory.dq_empties[0])


@triton.jit
def store_tile(dq_desc, pieces, tile, walk):
    """Copy dQ from SMEM to memory, piece by piece."""
    WIDTH: tl.constexpr = pieces.buffers.shape[1]
    for i in tl.static_range(3):
        box = tile.q.box(tile.row, walk.head(), i * WIDTH)
        store_piece(dq_desc, pieces, PIECES * walk.done + i, box)
