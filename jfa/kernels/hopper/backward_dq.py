"""dQ in a pass of its own: a tile of queries owns its dQ and walks its keys, so the order of its sums is fixed.

    S = Q K^T      P = exp2(S scale - lse)      dP = dO V^T      dS = P (dP - delta)      dQ += dS K

Shaped like the forward: a producer, two consumers of 64 query rows each, key blocks from the last to the first. S and
dP are computed a second time (jfa.kernels.hopper.backward computes them for dK and dV), which is the cost of a fixed
order.

Head dims beyond 128 (``cfg.wide``) have their columns in two pieces, so a thread holds up to 128 registers of dQ. A single
loop then asks per block whether to mask. With 256 columns Q and dO leave room for two blocks of keys and one of their
values, and dQ is stored through Q's buffer.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.softmax import at_most_one
from jfa.kernels.hopper.backward import always_zero
from jfa.kernels.hopper.columns import (
    Pieces,
    Tiles,
    add_product,
    alloc_tiles,
    both_boxes,
    multiply_transposed,
    stage_tiles,
    store_pieces,
    zero_pieces,
)
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Query rows of one consumer.
ROWS = tl.constexpr(64)
CONSUMERS = tl.constexpr(2)
# Queries of a tile and keys of a block.
BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(64)


@aggregate
class Rows:
    """A consumer's 64 query rows of a tile: their positions, constants, and tiles of Q and dO, which are one each."""

    positions: tl.tensor
    lse2: tl.tensor
    delta: tl.tensor
    q: Tiles
    do: Tiles


@triton.jit
def produce(box_q, box_k, box_v, box_do, queue, q, do, k, v, group):
    """Produce of every tile the queries and output gradients, then the key and value blocks from last to first."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, head = queue.next_tile(unit)
        blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
        for c in tl.static_range(CONSUMERS):
            q.nth(c).load(done, box_q, tile.q, tile.row + c * ROWS, head)
            do.nth(c).load(done, box_do, tile.out, tile.row + c * ROWS, head)
        for back in range(blocks.count()):
            row = blocks.block(back) * BLOCK_N
            k.load(count, box_k, tile.kv, row, head // group)
            v.load(count, box_v, tile.kv, row, head // group)
            count += 1
        done += 1
        unit = queue.draw(done)


@triton.jit
def dq_block(mine, k, v, dq, count, tile, block, scale_log2, masked):
    """Take in one key block: dq += dS K. Returns (dq, count). ``masked`` may be known at compile time."""
    row = mine.q.first
    if k.width > 0:
        row += always_zero(count)  # see always_zero: no descriptors of Q and dO are kept in registers
    slot = k.await_full(count)
    scores = multiply_transposed(mine.q, row, k, slot)
    v_slot = v.await_full(count)
    dp = multiply_transposed(mine.do, row, v, v_slot)
    scores = tlx.async_dot_wait(1 + (v.width > 0), scores)
    p = at_most_one(tl.math.exp2(scores * scale_log2 - mine.lse2[:, None]))
    if masked:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(tile.pair_mask(mine.positions[:, None], keys[None, :]), p, 0.0)
    dp = tlx.async_dot_wait(0, dp)
    v.release(count)
    ds = (p * (dp - mine.delta[:, None])).to(k.left.dtype)
    dq = add_product(ds, k, slot, dq)
    left = tlx.async_dot_wait(0, dq.left)
    right = dq.right
    if k.width > 0:
        right = tlx.async_dot_wait(0, dq.right)
    k.release(count)
    return Pieces(left, right), count + 1


@triton.jit
def walk_blocks(mine, k, v, count, tile, blocks, scale_log2):
    """Walk all key blocks of 64 rows, from last to first: masked ones at both edges of the band. Return (dq, count)."""
    dq = zero_pieces(ROWS, k)
    if k.width > 0:
        for back in range(blocks.count()):
            block = blocks.block(back)
            masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
            dq, count = dq_block(mine, k, v, dq, count, tile, block, scale_log2, masked)
    else:
        for back in range(blocks.end - blocks.bulk_end):
            dq, count = dq_block(mine, k, v, dq, count, tile, blocks.block(back), scale_log2, True)
        for _ in range(blocks.bulk_end - blocks.bulk_begin):
            dq, count = dq_block(mine, k, v, dq, count, tile, 0, scale_log2, False)
        if tile.band.has_lo:
            for back in range(blocks.bulk_begin - blocks.first):
                dq, count = dq_block(mine, k, v, dq, count, tile, blocks.bulk_begin - 1 - back, scale_log2, True)
    return dq, count


@triton.jit
def consume(box_dq, stages, constants, queue, q, do, k, v, scale, scale_log2, part, cfg: tl.constexpr):
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
        q.await_full(done)
        do.await_full(done)
        mine = Rows(rows, row_lse, row_delta, q, do)
        dq, count = walk_blocks(mine, k, v, count, tile, blocks, scale_log2)
        to = tile.q
        if cfg.broadcast_q:
            to = tile.out
        if cfg.wide:  # dQ leaves through Q's buffer
            do.release(done)
            store_pieces(box_dq, stages, part, dq.times(scale), to, row, head)
            tlx.async_descriptor_store_wait(0)
            q.release(done)
        else:
            q.release(done)
            do.release(done)
            tlx.async_descriptor_store_wait(0)
            store_pieces(box_dq, stages, part, dq.times(scale), to, row, head)
        done += 1
        unit = queue.receive(done)
    if not cfg.wide:
        tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "heads", "group"])
def dq_kernel(
    desc_q_left,
    desc_q_right,
    desc_k_left,
    desc_k_right,
    desc_v_left,
    desc_v_right,
    desc_do_left,
    desc_do_right,
    desc_dq_left,
    desc_dq_right,
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
    """Allocate buffers and barriers, and assign the roles to warps. Grid: (programs,).

    desc_*: ragged, boxes of 64 rows and the columns that cfg, a DqConfig, gives both pieces; None for none. lse2, delta
    [H, padded_rows] fp32; records, counts: a list of 128 queries per tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q_left)
    num_tiles = tl.load(counts + 1)
    q = alloc_tiles(ROWS, cfg.left, cfg.right, DTYPE, 1, 1, CONSUMERS)
    do = alloc_tiles(ROWS, cfg.left_v, cfg.right_v, DTYPE, 1, 1, CONSUMERS)
    k = alloc_tiles(BLOCK_N, cfg.left, cfg.right, DTYPE, cfg.stages, CONSUMERS)
    v = alloc_tiles(BLOCK_N, cfg.left_v, cfg.right_v, DTYPE, cfg.stages_v, CONSUMERS)
    stages = q
    if not cfg.wide:
        buffers = tlx.local_alloc((ROWS, cfg.left), tlx.dtype_of(desc_dq_left), CONSUMERS)
        stages = stage_tiles(q, buffers, buffers, 0)
    numbers = alloc_numbers(CONSUMERS)
    queue = Queue(records, num_tiles, num_tiles * heads, heads, counter, numbers, False, False, cfg.has_lo, cfg.has_hi)
    constants = RowPointers(lse2, delta, padded_rows)
    box_dq = both_boxes(desc_dq_left, desc_dq_right, cfg.left, cfg.right)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(box_dq, stages, constants, queue, q, do, k, v, scale, scale_log2, 0, cfg)
        with tlx.async_task(num_warps=4, registers=cfg.registers):  # consumer 1
            consume(box_dq, stages, constants, queue, q, do, k, v, scale, scale_log2, 1, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            box_q = both_boxes(desc_q_left, desc_q_right, cfg.left, cfg.right)
            box_k = both_boxes(desc_k_left, desc_k_right, cfg.left, cfg.right)
            box_v = both_boxes(desc_v_left, desc_v_right, cfg.left_v, cfg.right_v)
            box_do = both_boxes(desc_do_left, desc_do_right, cfg.left_v, cfg.right_v)
            produce(box_q, box_k, box_v, box_do, queue, q, do, k, v, group)
