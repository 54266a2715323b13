"""Jagged attention forward for sm_90: a producer brings tiles by TMA, consumer warp groups run wgmma and the softmax.

    query [total_q, H, D] --ragged TMA--> q tiles  \\
    key   [total_kv, H_kv, D]  ------->   k ring    > consumers --ragged TMA--> out [rows_out, H, Dv], lse [H, rows_out]
    value [total_kv, H_kv, Dv] ------->   v ring   /

A consumer is a warp group with 64 query rows. A CTA has heads * parts of them (jfa.kernels.hopper.config):

* parts = 2, heads = 1: a tile is 128 queries of one head. The two consumers share every key and value block and take
  turns on the tensor cores, one computing its softmax while the other multiplies. The choice for long queries.
* parts = 1, heads = 2: a tile is 64 queries of two neighbouring heads, each consumer with its own ring. The choice for
  at most 64 queries per sequence: then memory is the limit, and neighbouring heads lie side by side there.

The grid is persistent and draws tiles from a queue, longest first (jfa.kernels.hopper.queue). Resident
queries, those of broadcast_q where they fit one tile, are the same in every tile of a program: they are loaded once.

Within a tile key blocks run from the last to the first, so the block that hangs over the sequence's end is the first
one, which is masked in any case; see jfa.kernels.common.band for the peeled loops.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait

from jfa.kernels.common.block_lists import EDGES, block_lists
from jfa.kernels.common.nouns import Span, aggregate
from jfa.kernels.common.ring import alloc_ring
from jfa.kernels.common.softmax import softmax_end, softmax_step
from jfa.kernels.hopper.listed import query_list
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Query rows of one consumer: the M of a wgmma.
ROWS = tl.constexpr(64)
# Named barrier on which consumer 0 waits for its turn at the tensor cores; consumer 1 waits on the next one.
TURN = tl.constexpr(9)


@aggregate
class Softmax:
    """A consumer's 64 rows so far: sums of p V, not yet divided, maxima, sums of p, and the last block's p."""

    acc: tl.tensor
    row_max: tl.tensor
    row_sum: tl.tensor
    p: tl.tensor


@triton.jit
def wait_turn(part, PARTS: tl.constexpr):
    """Ping-pong: block until the other consumer of the tile has issued its scores."""
    if PARTS == 2:
        tlx.named_barrier_wait(TURN + part, 256)


@triton.jit
def pass_turn(part, PARTS: tl.constexpr):
    """Ping-pong: let the other consumer issue its scores."""
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
def produce(desc_q, desc_k, desc_v, rows_q, queue, q, k, v, group, lists, cfg: tl.constexpr):
    """Producer: of every tile the queries, then the key and value blocks from last to first."""
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
        if not cfg.resident or done == 0:
            for c in tl.static_range(CONSUMERS):
                q.nth(c).load(done, desc_q, queries.box(tile.row + c % cfg.parts * ROWS, first_head + c // cfg.parts))
        for back in range(blocks.count()):
            row = blocks.block(back) * cfg.block_n
            for h in tl.static_range(HEADS):
                k.nth(h).load(count + back, desc_k, tile.kv.box(row, (first_head + h) // group))
            for h in tl.static_range(HEADS):
                v.nth(h).load(count + back, desc_v, tile.kv.box(row, (first_head + h) // group))
        count += blocks.count()
        done += 1
        unit = queue.draw(done)


@triton.jit
def score_block(q_tile, k, count, part, PARTS: tl.constexpr):
    """Issue the scores [ROWS, BLOCK_N] of the count-th key block; they are not waited for."""
    slot, phase = k.slot(count)
    tlx.barrier_wait(k.fulls[slot], phase)
    wait_turn(part, PARTS)
    scores = tlx.async_dot(q_tile, tlx.local_trans(k.buffers[slot]))
    pass_turn(part, PARTS)
    return scores


@triton.jit
def accumulate_block(p, acc, v, count):
    """Issue acc += p V of the count-th value block; not waited for."""
    slot, phase = v.slot(count)
    tlx.barrier_wait(v.fulls[slot], phase)
    return tlx.async_dot(p, v.buffers[slot], acc)


@triton.jit
def release(ring, count):
    """Give the count-th buffer of a ring back to the producer."""
    slot, phase = ring.slot(count)
    tlx.barrier_arrive(ring.empties[slot], 1)


@triton.jit
def mask_scores(scores, tile, rows, block, BLOCK_N: tl.constexpr):
    """Scores of a key block, -inf where a pair does not count."""
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.where(tile.pair_mask(rows[:, None], keys[None, :]), scores, float("-inf"))


# What a consumer issues per key block i, and what has then to be done (its products finish in the order of issue):
#
#     issue S(i)              K(i) full; the other consumer has issued its S
#     issue O += P V(i - 1)   V(i - 1) full; P(i - 1) is in registers
#     wait for all but one    S(i) done: K(i) is given back; the softmax of i runs beside P V(i - 1)
#     wait for all            O done: V(i - 1) is given back; O is rescaled by alpha(i)


@triton.jit
def attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, cfg, MASKED: tl.constexpr):
    """One key block in the steady state: its scores run beside the previous block's p V, its softmax behind them."""
    scores = score_block(q_tile, k, count, part, cfg.parts)
    acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
    scores = tlx.async_dot_wait(1, scores)
    release(k, count)
    if MASKED:
        scores = mask_scores(scores, tile, rows, block, cfg.block_n)
    may_be_empty: tl.constexpr = tile.band.has_lo or tile.band.has_hi
    p, row_max, row_sum, alpha = softmax_step(scores, so_far.row_max, so_far.row_sum, scale_log2, may_be_empty)
    acc = tlx.async_dot_wait(0, acc)
    release(v, count - 1)
    return Softmax(acc * alpha[:, None], row_max, row_sum, p.to(so_far.p.dtype)), count + 1


@triton.jit
def attend_band(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, cfg):
    """The key blocks of a band behind the first: masked ones at both edges, between them the bulk, which needs no mask."""
    last = blocks.end - 1
    if tile.band.has_hi:
        for back in range(1, blocks.end - blocks.bulk_end):
            block = last - back
            so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, cfg, True)
    for _ in range(min(blocks.bulk_end, last) - blocks.bulk_begin):
        so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, 0, part, scale_log2, cfg, False)
    if tile.band.has_lo:
        left = min(blocks.bulk_begin, last)
        for back in range(left - blocks.first):
            block = left - 1 - back
            so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, cfg, True)
    return so_far, count


@triton.jit
def attend_list(q_tile, k, v, so_far, count, tile, rows, listed, part, scale_log2, cfg):
    """The listed blocks behind the first. A list rises, so what a band cuts stands at its two ends; see EDGES."""
    bulk = tile.key_blocks(cfg.block_m, cfg.block_n)
    entries = listed.count()
    high = 1
    if tile.band.has_hi:
        for back in tl.static_range(1, EDGES):
            high += ((back < entries) & (listed.block(back) >= bulk.bulk_end)).to(tl.int32)
        for back in range(1, high):
            block = listed.block(back)
            so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, cfg, True)
    low = 0
    if tile.band.has_lo:
        for ahead in tl.static_range(EDGES):
            left = entries - 1 - ahead
            low += ((left >= high) & (listed.block(left) < bulk.bulk_begin)).to(tl.int32)
    for _ in range(entries - high - low):
        so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, 0, part, scale_log2, cfg, False)
    if tile.band.has_lo:
        for back in range(entries - low, entries):
            block = listed.block(back)
            so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, cfg, True)
    return so_far, count


@triton.jit
def attend_tile(q_tile, k, v, count, tile, rows, blocks, part, scale_log2, cfg: tl.constexpr):
    """All key blocks of 64 query rows but the last p V. Returns (Softmax, count)."""
    DV: tl.constexpr = v.buffers.shape[1]
    scores = score_block(q_tile, k, count, part, cfg.parts)
    scores = tlx.async_dot_wait(0, scores)
    release(k, count)
    scores = mask_scores(scores, tile, rows, blocks.block(0), cfg.block_n)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, True)
    so_far = Softmax(tl.zeros([ROWS, DV], tl.float32), row_max, row_sum, p.to(v.buffers.dtype))
    count += 1
    if cfg.list_heads:
        return attend_list(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, cfg)
    else:
        return attend_band(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, cfg)


@triton.jit
def store_tile(desc_o, o_tile, lse, rows_out, acc, so_far, tile, row, head):
    """Epilogue of 64 rows: divide, write the log-sum-exp, and leave by TMA, clipped at the sequence's end."""
    out, row_lse = softmax_end(acc, so_far.row_max, so_far.row_sum)
    rows = row + tl.arange(0, ROWS)
    tl.store(lse + head.to(tl.int64) * rows_out + tile.out.begin + rows, row_lse, mask=rows < tile.out.length)
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(o_tile, out.to(o_tile.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_o, o_tile, tile.out.box(row, head))


@triton.jit
def consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, consumer, cfg: tl.constexpr):
    """Consumer of 64 query rows of every tile: scores, softmax, p V, epilogue.

    The next tile is looked up before the epilogue.
    """
    part: tl.constexpr = consumer % cfg.parts
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
        so_far, count = attend_tile(
            q.buffers[slot], k, v, count, tile, row + tl.arange(0, ROWS), blocks, part, scale_log2, cfg
        )
        if not cfg.resident:
            tlx.barrier_arrive(q.empties[slot], 1)
        acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
        done += 1
        unit = queue.receive(done)
        next_tile, column = queue.next_tile(unit)
        acc = tlx.async_dot_wait(0, acc)
        release(v, count - 1)
        store_tile(desc_o, o_tiles[consumer], lse, rows_out, acc, so_far, tile, row, head)
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
    """Buffers, barriers, and who runs which role. Grid: (programs,), or (programs, H // HEADS) with resident queries.

    desc_q, desc_k, desc_v, desc_o: ragged descriptors of boxes [64, D], [BLOCK_N, D], [BLOCK_N, DV], [64, DV].
    lse [H, rows_out] fp32; records, counts: a list of cfg.block_m queries per tile (jfa.kernels.hopper.tiles);
    counters: one int32 of 0 per grid column; starts, columns, kinds: block lists, or None; cfg: a ForwardConfig.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    lists = block_lists(starts, columns, kinds, list_rows, heads, list_capacity, cfg.list_heads)
    CONSUMERS: tl.constexpr = cfg.consumers
    o_tiles = tlx.local_alloc((ROWS, cfg.head_dim_v), DTYPE, CONSUMERS)
    q = alloc_ring(ROWS, cfg.head_dim, DTYPE, cfg.q_stages, 1, cfg.consumers, BY_THREAD=True)
    k = alloc_ring(cfg.block_n, cfg.head_dim, DTYPE, cfg.stages, cfg.parts, cfg.heads, BY_THREAD=True)
    v = alloc_ring(cfg.block_n, cfg.head_dim_v, DTYPE, cfg.stages, cfg.parts, cfg.heads, BY_THREAD=True)
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
            consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, 0, cfg)
        if cfg.consumers > 1:
            with tlx.async_task(num_warps=4, registers=cfg.registers, replicate=cfg.consumers - 1):  # consumer
                other: tl.constexpr = 1 + tlx.async_task_replica_id()
                consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, lists, other, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, rows_q, queue, q, k, v, group, lists, cfg)
