"""dQ in a pass of its own: a tile of queries owns its dQ and walks its keys, so the order of its sums is fixed.

    S = Q K^T      P = exp2(S scale - lse)      dP = dO V^T      dS = P (dP - delta)      dQ += dS K

Shaped like the forward: a producer, two consumers of 64 query rows each, key blocks from the last to the first. S and
dP are computed a second time (jfa.kernels.hopper.backward computes them for dK and dV), which is the cost of a fixed
order.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.ring import alloc_ring
from jfa.kernels.common.softmax import at_most_one
from jfa.kernels.hopper.backward import store_gradient
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Query rows of one consumer.
ROWS = tl.constexpr(64)
CONSUMERS = tl.constexpr(2)
# Queries of a tile and keys of a block.
BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(64)


@aggregate
class Rows:
    """A consumer's 64 query rows of a tile: their positions, constants, and buffers of Q and dO."""

    positions: tl.tensor
    lse2: tl.tensor
    delta: tl.tensor
    q: tlx.buffered_tensor
    do: tlx.buffered_tensor


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, queue, q, do, k, v, group):
    """Produce of every tile the queries and output gradients, then the key and value blocks from last to first."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, head = queue.next_tile(unit)
        blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
        for c in tl.static_range(CONSUMERS):
            q.nth(c).load(done, desc_q, tile.q.box(tile.row + c * ROWS, head))
            do.nth(c).load(done, desc_do, tile.out.box(tile.row + c * ROWS, head))
        for back in range(blocks.end - blocks.first):
            box = tile.kv.box((blocks.end - 1 - back) * BLOCK_N, head // group)
            k.load(count, desc_k, box)
            v.load(count, desc_v, box)
            count += 1
        done += 1
        unit = queue.draw(done)


@triton.jit
def dq_block(mine, k, v, dq, count, tile, block, scale_log2, MASKED: tl.constexpr):
    """Compute one key block: dq += dS K. Return (dq, count)."""
    slot, phase = k.slot(count)
    tlx.barrier_wait(k.fulls[slot], phase)
    scores = tlx.async_dot(mine.q, tlx.local_trans(k.buffers[slot]))
    tlx.barrier_wait(v.fulls[slot], phase)
    dp = tlx.async_dot(mine.do, tlx.local_trans(v.buffers[slot]))
    scores = tlx.async_dot_wait(1, scores)
    p = at_most_one(tl.math.exp2(scores * scale_log2 - mine.lse2[:, None]))
    if MASKED:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(tile.pair_mask(mine.positions[:, None], keys[None, :]), p, 0.0)
    dp = tlx.async_dot_wait(0, dp)
    tlx.barrier_arrive(v.empties[slot], 1)
    ds = (p * (dp - mine.delta[:, None])).to(k.buffers.dtype)
    dq = tlx.async_dot(ds, k.buffers[slot], dq)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k.empties[slot], 1)
    return dq, count + 1


@triton.jit
def walk_blocks(mine, k, v, count, tile, blocks, scale_log2):
    """Walk all key blocks of 64 rows, from last to first: masked ones at both edges of the band. Return (dq, count)."""
    D: tl.constexpr = k.buffers.shape[1]
    dq = tl.zeros([ROWS, D], tl.float32)
    for back in range(blocks.end - blocks.bulk_end):
        dq, count = dq_block(mine, k, v, dq, count, tile, blocks.end - 1 - back, scale_log2, True)
    for _ in range(blocks.bulk_end - blocks.bulk_begin):
        dq, count = dq_block(mine, k, v, dq, count, tile, 0, scale_log2, False)
    if tile.band.has_lo:
        for back in range(blocks.bulk_begin - blocks.first):
            dq, count = dq_block(mine, k, v, dq, count, tile, blocks.bulk_begin - 1 - back, scale_log2, True)
    return dq, count


@triton.jit
def consume(desc_dq, stage, constants, queue, q, do, k, v, scale, scale_log2, part, BROADCAST_Q: tl.constexpr):
    """Consume: dQ of 64 query rows of every tile. With shared queries every batch's dQ goes to its own output rows."""
    q = q.nth(part)
    do = do.nth(part)
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, head = queue.next_tile(unit)
        blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
        row = tile.row + part * ROWS
        rows = row + tl.arange(0, ROWS)
        exist = rows < tile.q.length
        lse2, delta = constants.of_sequence(tile, head)
        row_lse = tl.load(lse2 + rows, mask=exist, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=exist, other=0.0)
        slot, phase = q.slot(done)
        tlx.barrier_wait(q.fulls[slot], phase)
        tlx.barrier_wait(do.fulls[slot], phase)
        mine = Rows(rows, row_lse, row_delta, q.buffers[slot], do.buffers[slot])
        dq, count = walk_blocks(mine, k, v, count, tile, blocks, scale_log2)
        tlx.barrier_arrive(q.empties[slot], 1)
        tlx.barrier_arrive(do.empties[slot], 1)
        to = tile.q
        if BROADCAST_Q:
            to = tile.out
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dq, stage, dq * scale, to, row, head)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "heads", "group"])
def dq_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    lse2,
    delta,
    padded_rows,
    records,
    counts,
    counter,
    heads,
    group,
    scale,
    scale_log2,
    cfg: tl.constexpr,
):
    """Allocate buffers and barriers, and say who runs which role. Grid: (programs,).

    desc_q, desc_k, desc_v, desc_do, desc_dq: ragged, boxes [64, D]; lse2, delta [H, padded_rows] fp32; records, counts:
    a list of 128 queries per tile; counter: one int32 of 0; cfg: a DqConfig.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    num_tiles = tl.load(counts + 1)
    q = alloc_ring(ROWS, cfg.head_dim, DTYPE, 1, 1, CONSUMERS)
    do = alloc_ring(ROWS, cfg.head_dim, DTYPE, 1, 1, CONSUMERS)
    k = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.stages, CONSUMERS)
    v = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.stages, CONSUMERS)
    stages = tlx.local_alloc((ROWS, cfg.head_dim), tlx.dtype_of(desc_dq), CONSUMERS)
    numbers = alloc_numbers(CONSUMERS)
    queue = Queue(records, num_tiles, num_tiles * heads, heads, counter, numbers, False, False, cfg.has_lo, cfg.has_hi)
    constants = RowPointers(lse2, delta, padded_rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(desc_dq, stages[0], constants, queue, q, do, k, v, scale, scale_log2, 0, cfg.broadcast_q)
        with tlx.async_task(num_warps=4, registers=cfg.registers):  # consumer 1
            consume(desc_dq, stages[1], constants, queue, q, do, k, v, scale, scale_log2, 1, cfg.broadcast_q)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, desc_do, queue, q, do, k, v, group)
