"""dQ for head dims beyond 128, sm_90: jfa.kernels.hopper.backward_dq with columns in two pieces.

    S = Q K^T      P = exp2(S scale - lse)      dP = dO V^T      dS = P (dP - delta)      dQ += dS K

Two consumers own 64 query rows of a tile each, and with them up to 128 registers of dQ; key blocks run from the last to
the first. With 256 columns Q and dO leave room for two blocks of 64 keys and one of their values; dQ is stored through
Q's buffer.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.softmax import at_most_one
from jfa.kernels.hopper.backward import always_zero
from jfa.kernels.hopper.columns import (
    Boxes,
    Pieces,
    Tiles,
    add_product,
    alloc_tiles,
    multiply_transposed,
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
    """Take in one key block: dq += dS K. Returns (dq, count)."""
    row = mine.q.first + always_zero(count)  # see always_zero: no descriptors of Q and dO are kept in registers
    slot = k.await_full(count)
    scores = multiply_transposed(mine.q, row, k, slot)
    v_slot = v.await_full(count)
    dp = multiply_transposed(mine.do, row, v, v_slot)
    scores = tlx.async_dot_wait(2, scores)
    p = at_most_one(tl.math.exp2(scores * scale_log2 - mine.lse2[:, None]))
    if masked:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(tile.pair_mask(mine.positions[:, None], keys[None, :]), p, 0.0)
    dp = tlx.async_dot_wait(0, dp)
    v.release(count)
    ds = (p * (dp - mine.delta[:, None])).to(k.left.dtype)
    dq = add_product(ds, k, slot, dq)
    dq = Pieces(tlx.async_dot_wait(0, dq.left), tlx.async_dot_wait(0, dq.right))
    k.release(count)
    return dq, count + 1


@triton.jit
def walk_blocks(mine, k, v, count, tile, blocks, scale_log2):
    """Walk all key blocks of 64 rows, from last to first. Whether to mask is asked as the loop runs. Returns (dq, count)."""
    dq = zero_pieces(ROWS, k)
    for back in range(blocks.count()):
        block = blocks.block(back)
        masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
        dq, count = dq_block(mine, k, v, dq, count, tile, block, scale_log2, masked)
    return dq, count


@triton.jit
def consume(box_dq, constants, queue, q, do, k, v, scale, scale_log2, part):
    """Consume: dQ of 64 query rows of every tile."""
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
        slot = q.await_full(done)
        do.await_full(done)
        mine = Rows(rows, row_lse, row_delta, q, do)
        dq, count = walk_blocks(mine, k, v, count, tile, blocks, scale_log2)
        do.release(done)
        store_pieces(box_dq, q, slot, Pieces(dq.left * scale, dq.right * scale), tile.q, row, head)
        tlx.async_descriptor_store_wait(0)
        q.release(done)
        done += 1
        unit = queue.receive(done)


@triton.jit(do_not_specialize=["padded_rows", "heads", "group"])
def dq_wide_kernel(
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
    """Allocate buffers and barriers, and say who runs which role. Grid: (programs,).

    desc_*: ragged, boxes of 64 rows and the columns that cfg, a WideDqConfig, gives both pieces. lse2, delta
    [H, padded_rows] fp32; records, counts: a list of 128 queries per tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q_left)
    num_tiles = tl.load(counts + 1)
    q = alloc_tiles(ROWS, cfg.left, cfg.right, DTYPE, 1, 1, CONSUMERS)
    do = alloc_tiles(ROWS, cfg.left_v, cfg.right_v, DTYPE, 1, 1, CONSUMERS)
    k = alloc_tiles(BLOCK_N, cfg.left, cfg.right, DTYPE, cfg.stages, CONSUMERS)
    v = alloc_tiles(BLOCK_N, cfg.left_v, cfg.right_v, DTYPE, cfg.stages_v, CONSUMERS)
    numbers = alloc_numbers(CONSUMERS)
    queue = Queue(records, num_tiles, num_tiles * heads, heads, counter, numbers, False, False, cfg.has_lo, cfg.has_hi)
    constants = RowPointers(lse2, delta, padded_rows)
    box_dq = Boxes(desc_dq_left, desc_dq_right, cfg.left)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(box_dq, constants, queue, q, do, k, v, scale, scale_log2, 0)
        with tlx.async_task(num_warps=4, registers=cfg.registers):  # consumer 1
            consume(box_dq, constants, queue, q, do, k, v, scale, scale_log2, 1)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(
                Boxes(desc_q_left, desc_q_right, cfg.left),
                Boxes(desc_k_left, desc_k_right, cfg.left),
                Boxes(desc_v_left, desc_v_right, cfg.left_v),
                Boxes(desc_do_left, desc_do_right, cfg.left_v),
                queue,
                q,
                do,
                k,
                v,
                group,
            )
