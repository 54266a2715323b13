"""Jagged attention forward for sm_90: a producer loads tiles by TMA, consumer warp groups run wgmma and the softmax.

    query [total_q, H, D] --ragged TMA--> q tiles  \\
    key   [total_kv, H_kv, D]  ------->   k ring    > consumers --ragged TMA--> out [rows_out, H, Dv], lse [H, rows_out]
    value [total_kv, H_kv, Dv] ------->   v ring   /

A consumer is a warp group with 64 query rows. A CTA has heads * parts of them (jfa.kernels.hopper.config):

* parts = 2, heads = 1: a tile is 128 queries of one head. The two consumers share every key and value block and take
  turns on the tensor cores, one computing its softmax while the other multiplies. The choice for long queries.
* parts = 1, heads = 2: a tile is 64 queries of two neighboring heads, each consumer with its own ring. The choice for
  at most 64 queries per sequence: then memory bandwidth is the limit, and the data of neighboring heads are adjacent
  in memory.

The grid is persistent and draws tiles from a queue, longest first (jfa.kernels.hopper.queue). Resident queries, those
of broadcast_q where they fit one tile, are the same in every tile of a program: they are loaded once.

Within a tile key blocks run from the last to the first, so the block that reaches past the sequence's end comes first,
where blocks are masked anyway; see jfa.kernels.common.band for the peeled loops.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait

from jfa.kernels.common.block_lists import EDGES, block_lists
from jfa.kernels.common.nouns import Span, aggregate
from jfa.kernels.common.softmax import scale_of, softmax_end, softmax_step
from jfa.kernels.hopper.columns import (
    Pieces,
    Tiles,
    add_product,
    alloc_pieces,
    alloc_tiles,
    both_boxes,
    multiply_transposed,
    stage_tiles,
    store_pieces,
    zero_pieces,
)
from jfa.kernels.hopper.listed import query_list
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Query rows of one consumer: the M of a wgmma.
ROWS = tl.constexpr(64)
# Named barrier on which consumer 0 waits for its turn at the tensor cores; consumer 1 waits on the next one.
TURN = tl.constexpr(9)


@aggregate
class Rows:
    """A consumer's 64 query rows of a tile: their positions in the sequence, and the ring and slot that hold them."""

    positions: tl.tensor
    q: Tiles
    slot: tl.tensor


@aggregate
class Softmax:
    """A consumer's 64 rows so far: sums of p V, not yet divided, maxima, sums of p, and the last block's p."""

    acc: Pieces
    row_max: tl.tensor
    row_sum: tl.tensor
    p: tl.tensor


@triton.jit
def wait_turn(part, PARTS: tl.constexpr):
    """Wait (ping-pong) until the other consumer of the tile has issued its scores."""
    if PARTS == 2:
        tlx.named_barrier_wait(TURN + part, 256)


@triton.jit
def pass_turn(part, PARTS: tl.constexpr):
    """Let (ping-pong) the other consumer issue its scores."""
    if PARTS == 2:
        tlx.named_barrier_arrive(TURN + 1 - part, 256)


@triton.jit
def walk(tile, head, lists, cfg: tl.constexpr):
    """Return what a tile visits: the key blocks that its band leaves, or those that its list names."""
    if cfg.list_heads == 0:
        return tile.key_blocks(cfg.block_m, cfg.block_n)
    else:
        return query_list(tile, head, lists, cfg.broadcast_q)


@triton.jit
def produce(box_q, box_k, box_v, rows_q, queue, q, k, v, group, lists, cfg: tl.constexpr):
    """Produce of every tile the queries, then the key and value blocks from last to first."""
    HEADS: tl.constexpr = cfg.heads
    CONSUMERS: tl.constexpr = cfg.consumers
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, column = queue.next_tile(unit)
        first_head = column * cfg.heads
        blocks = walk(tile, first_head, lists, cfg)
        queries = tile.q
        if cfg.resident:
            queries = Span(tl.to_tensor(0), rows_q)
        if not cfg.late_queries and (not cfg.resident or done == 0):
            for c in tl.static_range(CONSUMERS):
                q.nth(c).load(done, box_q, queries, tile.row + c % cfg.parts * ROWS, first_head + c // cfg.parts)
        for back in range(blocks.count()):
            row = blocks.block(back) * cfg.block_n
            for h in tl.static_range(HEADS):
                k.nth(h).load(count + back, box_k, tile.kv, row, (first_head + h) // group)
            for h in tl.static_range(HEADS):
                v.nth(h).load(count + back, box_v, tile.kv, row, (first_head + h) // group)
            if cfg.late_queries:
                if back == 0:
                    for c in tl.static_range(CONSUMERS):
                        q.nth(c).load(done, box_q, queries, tile.row + c * ROWS, first_head)
        count += blocks.count()
        done += 1
        unit = queue.draw(done)


@triton.jit
def score_block(mine, k, count, part, PARTS: tl.constexpr):
    """Issue the scores [ROWS, BLOCK_N] of the count-th key block; they are not waited for."""
    slot = k.await_full(count)
    wait_turn(part, PARTS)
    scores = multiply_transposed(mine.q, mine.slot, k, slot)
    pass_turn(part, PARTS)
    return scores


@triton.jit
def accumulate_block(p, acc, v, count):
    """Issue acc += p V of the count-th value block; not waited for."""
    slot = v.await_full(count)
    return add_product(p, v, slot, acc)


@triton.jit
def scaled(acc, factor, v):
    """Return a sum as wide as ``v`` with its rows multiplied by ``factor``."""
    right = acc.right
    if v.width > 0:
        right = acc.right * factor[:, None]
    return Pieces(acc.left * factor[:, None], right)


@triton.jit
def mask_scores(scores, tile, rows, block, BLOCK_N: tl.constexpr):
    """Return scores of a key block, -inf where a pair does not count."""
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.where(tile.pair_mask(rows[:, None], keys[None, :]), scores, float("-inf"))


# What a consumer issues per key block i, and what has then to be done (its products finish in the order of issue):
#
#     issue S(i)              K(i) full; the other consumer has issued its S
#     issue O += P V(i - 1)   V(i - 1) full; P(i - 1) is in registers
#     wait for all but one    S(i) done: K(i) is given back; the softmax of i runs during P V(i - 1)
#     wait for all            O done: V(i - 1) is given back; O is rescaled by alpha(i)


@triton.jit
def attend_block(mine, k, v, so_far, count, tile, block, part, scale, cfg, MASKED: tl.constexpr):
    """Compute one key block in the steady state: its scores run during the previous block's p V, its softmax behind them."""
    scores = score_block(mine, k, count, part, cfg.parts)
    acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
    LATER: tl.constexpr = 1 + (v.width > 0)  # products of p V
    scores = tlx.async_dot_wait(LATER, scores)
    k.release(count)
    if MASKED:
        scores = mask_scores(scores, tile, mine.positions, block, cfg.block_n)
    may_be_empty: tl.constexpr = tile.band.has_lo or tile.band.has_hi
    p, row_max, row_sum, alpha = softmax_step(scores, so_far.row_max, so_far.row_sum, scale, may_be_empty)
    left = tlx.async_dot_wait(0, acc.left)
    right = acc.right
    if v.width > 0:
        right = tlx.async_dot_wait(0, acc.right)
    v.release(count - 1)
    acc = scaled(Pieces(left, right), alpha, v)
    return Softmax(acc, row_max, row_sum, p.to(so_far.p.dtype)), count + 1


@triton.jit
def attend_band(mine, k, v, so_far, count, tile, blocks, part, scale, cfg):
    """Walk the key blocks of a band behind the first: masked ones at both edges, between them the bulk, which needs no mask."""
    last = blocks.end - 1
    if tile.band.has_hi:
        for back in range(1, blocks.end - blocks.bulk_end):
            block = last - back
            so_far, count = attend_block(mine, k, v, so_far, count, tile, block, part, scale, cfg, True)
    for _ in range(min(blocks.bulk_end, last) - blocks.bulk_begin):
        so_far, count = attend_block(mine, k, v, so_far, count, tile, 0, part, scale, cfg, False)
    if tile.band.has_lo:
        left = min(blocks.bulk_begin, last)
        for back in range(left - blocks.first):
            block = left - 1 - back
            so_far, count = attend_block(mine, k, v, so_far, count, tile, block, part, scale, cfg, True)
    return so_far, count


@triton.jit
def attend_list(mine, k, v, so_far, count, tile, listed, part, scale, cfg):
    """Walk the listed blocks behind the first. A list is ascending, so the blocks that a band cuts are at its ends; see EDGES."""
    bulk = tile.key_blocks(cfg.block_m, cfg.block_n)
    entries = listed.count()
    high = 1
    if tile.band.has_hi:
        for back in tl.static_range(1, EDGES):
            high += ((back < entries) & (listed.block(back) >= bulk.bulk_end)).to(tl.int32)
        for back in range(1, high):
            block = listed.block(back)
            so_far, count = attend_block(mine, k, v, so_far, count, tile, block, part, scale, cfg, True)
    low = 0
    if tile.band.has_lo:
        for ahead in tl.static_range(EDGES):
            left = entries - 1 - ahead
            low += ((left >= high) & (listed.block(left) < bulk.bulk_begin)).to(tl.int32)
    for _ in range(entries - high - low):
        so_far, count = attend_block(mine, k, v, so_far, count, tile, 0, part, scale, cfg, False)
    if tile.band.has_lo:
        for back in range(entries - low, entries):
            block = listed.block(back)
            so_far, count = attend_block(mine, k, v, so_far, count, tile, block, part, scale, cfg, True)
    return so_far, count


@triton.jit
def attend_tile(mine, k, v, count, tile, blocks, part, scale, cfg: tl.constexpr):
    """Compute all key blocks of 64 query rows but the last p V. Return (Softmax, count)."""
    scores = score_block(mine, k, count, part, cfg.parts)
    scores = tlx.async_dot_wait(0, scores)
    k.release(count)
    scores = mask_scores(scores, tile, mine.positions, blocks.block(0), cfg.block_n)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale, True)
    so_far = Softmax(zero_pieces(ROWS, v), row_max, row_sum, p.to(v.left.dtype))
    count += 1
    if cfg.list_heads:
        return attend_list(mine, k, v, so_far, count, tile, blocks, part, scale, cfg)
    else:
        return attend_band(mine, k, v, so_far, count, tile, blocks, part, scale, cfg)


@triton.jit
def store_tile(box_o, o_tiles, slot, lse, rows_out, acc, so_far, tile, row, head, scale):
    """Finish 64 rows: divide, write the log-sum-exp, and store O by TMA, clipped at the sequence's end."""
    left, row_lse = softmax_end(acc.left, so_far.row_max, so_far.row_sum, scale)
    right = acc.right
    if o_tiles.width > 0:
        right, row_lse = softmax_end(acc.right, so_far.row_max, so_far.row_sum, scale)
    rows = row + tl.arange(0, ROWS)
    tl.store(lse + head.to(tl.int64) * rows_out + tile.out.begin + rows, row_lse, mask=rows < tile.out.length)
    tlx.async_descriptor_store_wait(0)
    store_pieces(box_o, o_tiles, slot, Pieces(left, right), tile.out, row, head)


@triton.jit
def consume(box_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, consumer, cfg: tl.constexpr):
    """Consume 64 query rows of every tile: scores, softmax, p V, epilogue.

    The next tile is looked up before the epilogue.
    """
    part: tl.constexpr = consumer % cfg.parts
    scale = scale_of(scale_log2, True)
    q = q.nth(consumer)
    k = k.nth(consumer // cfg.parts)
    v = v.nth(consumer // cfg.parts)
    if cfg.parts == 2 and part == 1:
        pass_turn(part, cfg.parts)
    done = 0
    count = 0
    unit = queue.receive(done)
    tile, column = queue.next_tile(unit)
    while unit < queue.units:
        head = column * cfg.heads + consumer // cfg.parts
        row = tile.row + part * ROWS
        blocks = walk(tile, head, lists, cfg)
        slot, phase = q.slot(done)
        if not cfg.resident or done == 0:
            tlx.barrier_wait(q.fulls[slot], phase)
        mine = Rows(row + tl.arange(0, ROWS), q, slot)
        so_far, count = attend_tile(mine, k, v, count, tile, blocks, part, scale, cfg)
        if not cfg.resident and not cfg.late_queries:
            tlx.barrier_arrive(q.empties[slot], 1)
        acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
        done += 1
        unit = queue.receive(done)
        next_tile, column = queue.next_tile(unit)
        left = tlx.async_dot_wait(0, acc.left)
        right = acc.right
        if v.width > 0:
            right = tlx.async_dot_wait(0, acc.right)
        acc = Pieces(left, right)
        v.release(count - 1)
        if cfg.late_queries:
            store_tile(box_o, o_tiles, slot, lse, rows_out, acc, so_far, tile, row, head, scale)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(q.empties[slot], 1)
        else:
            store_tile(box_o, o_tiles, consumer, lse, rows_out, acc, so_far, tile, row, head, scale)
        tile = next_tile
    if cfg.parts == 2 and part == 0:
        wait_turn(part, cfg.parts)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["rows_q", "rows_out", "heads", "group", "list_rows", "list_capacity"])
def forward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
    desc_q_right,
    desc_k_right,
    desc_v_right,
    desc_o_right,
    lse,
    rows_q,
    rows_out,
    records,
    counts,
    counters,
    heads,
    group,
    scale_log2,
    starts,
    columns,
    kinds,
    list_rows,
    list_capacity,
    cfg: tl.constexpr,
):
    """Allocate buffers and barriers, and assign the roles to warps. Grid: (programs,); with resident queries (programs,
    H // HEADS).

    desc_q, desc_k, desc_v, desc_o: ragged descriptors of boxes [64, D], [BLOCK_N, D], [BLOCK_N, DV], [64, DV]; where
    columns lie in two pieces those of the left one, and desc_*_right of the right one, else None.
    lse [H, rows_out] fp32; records, counts: a list of cfg.block_m queries per tile (jfa.kernels.hopper.tiles);
    counters: one int32 of 0 per grid column; starts, columns, kinds: block lists, or None; cfg: a ForwardConfig.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    lists = block_lists(starts, columns, kinds, list_rows, heads, list_capacity, cfg.list_heads)
    CONSUMERS: tl.constexpr = cfg.consumers
    LEFT: tl.constexpr = cfg.head_dim - cfg.right
    LEFT_V: tl.constexpr = cfg.head_dim_v - cfg.right_v
    q = alloc_tiles(ROWS, LEFT, cfg.right, DTYPE, cfg.q_stages, 1, CONSUMERS, BY_THREAD=True)
    k = alloc_tiles(cfg.block_n, LEFT, cfg.right, DTYPE, cfg.stages, cfg.parts, cfg.heads, BY_THREAD=True)
    v = alloc_tiles(cfg.block_n, LEFT_V, cfg.right_v, DTYPE, cfg.stages, cfg.parts, cfg.heads, BY_THREAD=True)
    if cfg.late_queries:
        o_tiles = stage_tiles(q, q.left, q.right, cfg.right_v)
    else:
        o_left, o_right = alloc_pieces(ROWS, LEFT_V, cfg.right_v, DTYPE, CONSUMERS)
        o_tiles = stage_tiles(q, o_left, o_right, cfg.right_v)
    box_q = both_boxes(desc_q, desc_q_right, LEFT, cfg.right)
    box_k = both_boxes(desc_k, desc_k_right, LEFT, cfg.right)
    box_v = both_boxes(desc_v, desc_v_right, LEFT_V, cfg.right_v)
    box_o = both_boxes(desc_o, desc_o_right, LEFT_V, cfg.right_v)
    numbers = alloc_numbers(cfg.consumers)
    gdc_wait()  # from here on the list is read
    head_columns = heads // cfg.heads
    num_tiles = tl.load(counts + 1)
    units = num_tiles
    if cfg.resident:
        counters += tl.program_id(1)
    else:
        units = num_tiles * head_columns
    queue = Queue(
        records, num_tiles, units, head_columns, counters, numbers, cfg.resident, False, cfg.has_lo, cfg.has_hi
    )
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(box_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, 0, cfg)
        if cfg.consumers > 1:
            with tlx.async_task(num_warps=4, registers=cfg.registers, replicate=cfg.consumers - 1):  # consumer
                other: tl.constexpr = 1 + tlx.async_task_replica_id()
                consume(box_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, other, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(box_q, box_k, box_v, rows_q, queue, q, k, v, group, lists, cfg)
