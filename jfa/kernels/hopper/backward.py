"""Jagged attention backward for sm_90: one pass over key tiles makes dK and dV, and adds to dQ.

For a tile of 128 keys of one key/value head and every block of 64 queries that sees it, transposed (keys are rows):

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK += dS^T Q          dQ += dS K

Two consumer warp groups own 64 keys each: S^T, dP^T, dK and dV never leave their registers, and P^T and dS^T enter the next
product straight from them. Only dQ needs all 128 keys: both write their dS^T to shared memory and go on, and a third warp group,
the adder, makes dQ from it and adds it in fp32 by TMA reduce-add. So nobody who has work waits for dQ, and the three groups'
products fill each other's gaps on the tensor cores. Query heads of a group (GQA) are walked one after another in the same tile, so
dK and dV need no atomics.

Registers decide. A thread of each of the four warp groups together has 512 of them; a consumer gets 208, and dK and dV alone take
128 of these. So a consumer holds one of S^T and dP^T at a time, starts dP^T's sum at -delta instead of keeping delta, and rounds P
in pairs.

dQ is added in whatever order tiles finish. Where that must not be it is left out here and made by jfa.kernels.hopper.backward_dq;
then there are the two consumers only, one of them the default task.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band, query_blocks
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.ragged import ragged_box, ragged_descriptor
from jfa.kernels.common.rounding import rounded_pairs
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import EMULATED_SMS, BackwardConfig, backward_config, separate_dq
from jfa.kernels.hopper.prepare import PaddedRows
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import TileList, key_tiles, padded

KEYS = tl.constexpr(64)  # key rows of one consumer: the M of a wgmma
CONSUMERS = tl.constexpr(2)
BLOCK_M = tl.constexpr(64)  # queries of a block
DQ_COLUMNS = tl.constexpr(64)  # of dQ that the adder holds at a time: 32 registers

BLOCK = 128  # keys of a tile


@triton.jit
def pair_slot(count):
    """(slot, parity) of the count-th use of a ring of two buffers.

    Every ring of blocks here has two. Written with masks: from divisions compilers make several counters to carry along.
    """
    return count & 1, (count >> 1) & 1


@triton.jit
def always_zero(count):
    """0, as an index that seems to change with ``count``.

    Tiles of keys and values have one buffer. With a constant index the compiler computes all matrix descriptors of a tile's slices
    ahead of the loop and keeps them in registers, which spill; so they are computed where they are used.
    """
    return count >> 30


@triton.jit
def load_box(desc, ring, slot, parity, begin, length, row, head, BYTES: tl.constexpr):
    """One box into one buffer of a ring, once its readers have left."""
    tiles, fulls, empties = ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES)
    tlx.async_descriptor_load(desc, tiles[slot], ragged_box(begin, length, row, head), fulls[slot])


@triton.jit
def load_block(desc_q, desc_do, lse2, delta, block_ring, count, q_begin, out_begin, length, row, head, BYTES: tl.constexpr):
    """All that a block of queries brings, on one barrier: their boxes of Q and dO and, from the pointers, their row constants."""
    q_tiles, do_tiles, lse_tiles, delta_tiles, fulls, empties = block_ring
    slot, parity = pair_slot(count)
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], 2 * BYTES + 8 * BLOCK_M)
    tlx.async_descriptor_load(desc_q, q_tiles[slot], ragged_box(q_begin, length, row, head), fulls[slot])
    tlx.async_load(lse2 + row, lse_tiles[slot], bulk=True, barrier=fulls[slot])
    tlx.async_descriptor_load(desc_do, do_tiles[slot], ragged_box(out_begin, length, row, head), fulls[slot])
    tlx.async_load(delta + row, delta_tiles[slot], bulk=True, barrier=fulls[slot])


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, records, num_tiles, items, kv_heads, group, counter, queue,
            k_ring, v_ring, block_ring,
            D: tl.constexpr, TILE_STAGES: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Producer: of every tile its keys and values, then the queries and output gradients of every head and block that sees them."""
    BLOCK_N: tl.constexpr = CONSUMERS * KEYS
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    turn = 0
    count = 0
    item = draw_item(counter, queue, turn, False)
    while item < items:
        tile, kv_head = find_tile(records, num_tiles, kv_heads, item, False)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = query_blocks(row0, BLOCK_N, len_q, len_kv, lo, hi, BLOCK_M, HAS_LO, HAS_HI)
        slot, parity = ring_slot(turn, TILE_STAGES)
        load_box(desc_k, k_ring, slot, parity, kv_begin, len_kv, row0, kv_head, SIZE * BLOCK_N * D)
        load_box(desc_v, v_ring, slot, parity, kv_begin, len_kv, row0, kv_head, SIZE * BLOCK_N * D)
        for head in range(kv_head * group, kv_head * group + group):
            constants = padded_rows.to(tl.int64) * head + pad_begin
            for block in range(first, end):
                load_block(desc_q, desc_do, lse2 + constants, delta + constants, block_ring, count, q_begin, out_begin, len_q,
                           block * BLOCK_M, head, SIZE * BLOCK_M * D)
                count += 1
        turn += 1
        item = draw_item(counter, queue, turn, False)


@triton.jit
def publish_ds(ds_ring, ds, count, part):
    """Writes this consumer's half of a block's dS^T for the adder."""
    ds_tiles, ds_fulls, ds_empties = ds_ring
    slot, parity = pair_slot(count)
    tlx.barrier_wait(ds_empties[slot], parity ^ 1)
    tlx.local_store(tlx.local_slice(ds_tiles[slot], [part * KEYS, 0], [KEYS, BLOCK_M]), ds)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds_fulls[slot], 1)


@triton.jit
def issue_scores(k_tiles, tile_slot, block_ring, count, part, D: tl.constexpr):
    """Issues S^T of the count-th block; it is not waited for."""
    q_tiles, do_tiles, lse_tiles, delta_tiles, fulls, empties = block_ring
    slot, parity = pair_slot(count)
    mine = tlx.local_slice(k_tiles[tile_slot + always_zero(count)], [part * KEYS, 0], [KEYS, D])
    tlx.barrier_wait(fulls[slot], parity)
    return tlx.async_dot(mine, tlx.local_trans(q_tiles[slot]))


@triton.jit
def use_scores(scores, v_tiles, tile_slot, block_ring, dv, count, block, masked, key0, len_kv, lo, hi, scale_log2, part,
               D: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """From a block's S^T: (dS^T, dV with the block's part added). ``masked`` may be known at compile time."""
    q_tiles, do_tiles, lse_tiles, delta_tiles, fulls, empties = block_ring
    slot, parity = pair_slot(count)
    mine = tlx.local_slice(v_tiles[tile_slot + always_zero(count)], [part * KEYS, 0], [KEYS, D])
    row_lse = tlx.local_load(lse_tiles[slot])
    p = tl.math.exp2(scores * scale_log2 - row_lse[None, :])
    if masked:
        keys = key0 + part * KEYS + tl.arange(0, KEYS)
        queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
        p = tl.where(in_band(queries[None, :], keys[:, None], len_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    p = rounded_pairs(p, v_tiles.dtype)  # the one form that is kept: 16 registers a thread instead of 32
    # dV first: products start in the order of their text, so it keeps dP from starting, and filling registers, before p is done
    dv = tlx.async_dot(p, do_tiles[slot], dv)
    less_delta = tl.broadcast_to(-tlx.local_load(delta_tiles[slot])[None, :], [KEYS, BLOCK_M])
    dp = tlx.async_dot(mine, tlx.local_trans(do_tiles[slot]), less_delta)
    dp = tlx.async_dot_wait(0, dp)
    dv = tlx.async_dot_wait(0, dv)
    return (p.to(tl.float32) * dp).to(v_tiles.dtype), dv


@triton.jit
def backward_block(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, block, key0, len_kv, lo, hi, scale_log2, part,
                   D: tl.constexpr, WITH_DQ: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASKED: tl.constexpr):
    """One block of queries against this consumer's 64 keys, from S^T to dK."""
    q_tiles, do_tiles, lse_tiles, delta_tiles, fulls, empties = block_ring
    scores = issue_scores(k_tiles, tile_slot, block_ring, count, part, D)
    scores = tlx.async_dot_wait(0, scores)
    ds, dv = use_scores(scores, v_tiles, tile_slot, block_ring, dv, count, block, MASKED, key0, len_kv, lo, hi, scale_log2, part,
                        D, HAS_LO, HAS_HI)
    dk = tlx.async_dot(ds, q_tiles[count & 1], dk)
    if WITH_DQ:
        publish_ds(ds_ring, ds, count, part)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(empties[count & 1], 1)
    return dk, dv, count + 1


@triton.jit
def walk_blocks(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, blocks, group, key0, len_kv, lo, hi, scale_log2,
                part, D: tl.constexpr, WITH_DQ: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """All blocks of all query heads: masked ones at both edges of the band, between them a bulk that needs no mask."""
    first, bulk_begin, bulk_end, end = blocks
    for _ in range(group):
        if HAS_HI:
            for block in range(first, bulk_begin):
                dk, dv, count = backward_block(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, block, key0, len_kv,
                                               lo, hi, scale_log2, part, D, WITH_DQ, HAS_LO, HAS_HI, True)
        for block in range(bulk_begin, bulk_end):
            dk, dv, count = backward_block(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, block, key0, len_kv,
                                           lo, hi, scale_log2, part, D, WITH_DQ, HAS_LO, HAS_HI, False)
        for block in range(bulk_end, end):
            dk, dv, count = backward_block(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, block, key0, len_kv,
                                           lo, hi, scale_log2, part, D, WITH_DQ, HAS_LO, HAS_HI, True)
    return dk, dv, count


@triton.jit
def walk_blocks_ahead(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, blocks, group, key0, len_kv, lo, hi,
                      scale_log2, part, D: tl.constexpr, WITH_DQ: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """The same as one loop that issues a block's S^T behind the dK of the block before; whether to mask is asked as it runs."""
    first, bulk_begin, bulk_end, end = blocks
    q_tiles, do_tiles, lse_tiles, delta_tiles, fulls, empties = block_ring
    if end > first:
        scores = issue_scores(k_tiles, tile_slot, block_ring, count, part, D)
        scores = tlx.async_dot_wait(0, scores)
        block = first
        masked = (block < bulk_begin) | (block >= bulk_end)
        ds, dv = use_scores(scores, v_tiles, tile_slot, block_ring, dv, count, block, masked, key0, len_kv, lo, hi, scale_log2,
                            part, D, HAS_LO, HAS_HI)
        for _ in range(group * (end - first) - 1):
            dk = tlx.async_dot(ds, q_tiles[count & 1], dk)
            scores = issue_scores(k_tiles, tile_slot, block_ring, count + 1, part, D)
            if WITH_DQ:
                publish_ds(ds_ring, ds, count, part)
            dk = tlx.async_dot_wait(1, dk)
            tlx.barrier_arrive(empties[count & 1], 1)
            scores = tlx.async_dot_wait(0, scores)
            count += 1
            block += 1
            if block == end:
                block = first
            masked = (block < bulk_begin) | (block >= bulk_end)
            ds, dv = use_scores(scores, v_tiles, tile_slot, block_ring, dv, count, block, masked, key0, len_kv, lo, hi, scale_log2,
                                part, D, HAS_LO, HAS_HI)
        dk = tlx.async_dot(ds, q_tiles[count & 1], dk)
        if WITH_DQ:
            publish_ds(ds_ring, ds, count, part)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(empties[count & 1], 1)
        count += 1
    return dk, dv, count


@triton.jit
def store_gradient(desc, stage, gradient, begin, length, row, head):
    """64 rows of dK or dV leave through a staging buffer, clipped at the sequence's end."""
    tlx.local_store(stage, gradient.to(stage.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, stage, ragged_box(begin, length, row, head))


@triton.jit
def consume(desc_dk, desc_dv, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
            k_ring, v_ring, block_ring, ds_ring, stage, part,
            D: tl.constexpr, TILE_STAGES: tl.constexpr, AHEAD: tl.constexpr, WITH_DQ: tl.constexpr,
            HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 keys of every tile."""
    k_tiles, k_fulls, k_empties = k_ring
    v_tiles, v_fulls, v_empties = v_ring
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    while item < items:
        tile, kv_head = find_tile(records, num_tiles, kv_heads, item, False)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        blocks = query_blocks(row0, CONSUMERS * KEYS, len_q, len_kv, lo, hi, BLOCK_M, HAS_LO, HAS_HI)
        dk = tl.zeros([KEYS, D], tl.float32)
        dv = tl.zeros([KEYS, D], tl.float32)
        tile_slot, tile_parity = ring_slot(turn, TILE_STAGES)
        tlx.barrier_wait(k_fulls[tile_slot], tile_parity)
        tlx.barrier_wait(v_fulls[tile_slot], tile_parity)
        if AHEAD:
            dk, dv, count = walk_blocks_ahead(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, blocks, group, row0,
                                              len_kv, lo, hi, scale_log2, part, D, WITH_DQ, HAS_LO, HAS_HI)
        else:
            dk, dv, count = walk_blocks(k_tiles, v_tiles, tile_slot, block_ring, ds_ring, dk, dv, count, blocks, group, row0,
                                        len_kv, lo, hi, scale_log2, part, D, WITH_DQ, HAS_LO, HAS_HI)
        tlx.barrier_arrive(k_empties[tile_slot], 1)
        tlx.barrier_arrive(v_empties[tile_slot], 1)
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dv, stage, dv, kv_begin, len_kv, row0 + part * KEYS, kv_head)
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dk, stage, dk * scale, kv_begin, len_kv, row0 + part * KEYS, kv_head)
        turn += 1
        item = receive_item(queue, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def add_columns(desc_dq, stage, ds_tile, k_tile, empty, row, PENDING: tl.constexpr, COLUMN: tl.constexpr, LAST: tl.constexpr):
    """DQ_COLUMNS columns of a block's dQ = dS K, added in fp32 by TMA. PENDING other additions may still read their stages."""
    columns = tlx.local_slice(k_tile, [0, COLUMN], [CONSUMERS * KEYS, DQ_COLUMNS])
    dq = tlx.async_dot(tlx.local_trans(ds_tile), columns)
    dq = tlx.async_dot_wait(0, dq)
    if LAST:
        tlx.barrier_arrive(empty, 1)
    tlx.async_descriptor_store_wait(PENDING)
    tlx.local_store(stage, dq)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, stage, [row, COLUMN], store_reduce="add")


@triton.jit
def add_block(desc_dq, stages, ds_ring, k_tile, count, row, D: tl.constexpr):
    """dQ [64, D] of one block, from both halves of its dS^T."""
    PARTS: tl.constexpr = D // DQ_COLUMNS
    ds_tiles, ds_fulls, ds_empties = ds_ring
    slot, parity = pair_slot(count)
    tlx.barrier_wait(ds_fulls[slot], parity)
    for part in tl.static_range(PARTS):
        add_columns(desc_dq, stages[part], ds_tiles[slot], k_tile, ds_empties[slot], row, PARTS - 1, part * DQ_COLUMNS,
                    part == PARTS - 1)


@triton.jit
def add_up(desc_dq, dq_rows, records, num_tiles, items, kv_heads, group, queue, k_ring, ds_ring, stages,
           D: tl.constexpr, TILE_STAGES: tl.constexpr, BROADCAST_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Adder: dQ of every block that the consumers have published."""
    k_tiles, k_fulls, k_empties = k_ring
    BLOCK_N: tl.constexpr = CONSUMERS * KEYS
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    while item < items:
        tile, kv_head = find_tile(records, num_tiles, kv_heads, item, False)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = query_blocks(row0, BLOCK_N, len_q, len_kv, lo, hi, BLOCK_M, HAS_LO, HAS_HI)
        begin = pad_begin
        if BROADCAST_Q:
            begin = 0
        tile_slot, tile_parity = ring_slot(turn, TILE_STAGES)
        tlx.barrier_wait(k_fulls[tile_slot], tile_parity)
        for head in range(kv_head * group, kv_head * group + group):
            for block in range(first, end):
                add_block(desc_dq, stages, ds_ring, k_tiles[tile_slot + always_zero(count)], count,
                          head * dq_rows + begin + block * BLOCK_M, D)
                count += 1
        tlx.barrier_arrive(k_empties[tile_slot], 1)
        turn += 1
        item = receive_item(queue, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "dq_rows", "kv_heads", "group"])
def backward_kernel(desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, lse2, delta, padded_rows, dq_rows,
                    records, counts, counter, kv_heads, group, scale, scale_log2,
                    D: tl.constexpr, TILE_STAGES: tl.constexpr, AHEAD: tl.constexpr, WITH_DQ: tl.constexpr,
                    BROADCAST_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs,).

    desc_q, desc_do, desc_dk, desc_dv: ragged, boxes [64, D]; desc_k, desc_v: ragged, [128, D]; desc_dq: plain, fp32,
    [H * dq_rows, D], boxes [64, 64]. lse2, delta [H, padded_rows] fp32. D holds both head dimensions.
    records, counts: a list of 128 keys a tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    BLOCK_N: tl.constexpr = CONSUMERS * KEYS
    READERS: tl.constexpr = CONSUMERS + WITH_DQ
    num_tiles = tl.load(counts + 1)
    items = num_tiles * kv_heads
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, TILE_STAGES)
    v_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, TILE_STAGES)
    q_tiles = tlx.local_alloc((BLOCK_M, D), DTYPE, 2)
    do_tiles = tlx.local_alloc((BLOCK_M, D), DTYPE, 2)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 2)
    dq_stages = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, D // DQ_COLUMNS)
    gradient_stages = tlx.local_alloc((KEYS, D), DTYPE, CONSUMERS)  # a consumer's dV leaves first, then its dK
    lse_tiles = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    delta_tiles = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    k_ring = (k_tiles, tlx.alloc_barriers(TILE_STAGES, arrive_count=1), tlx.alloc_barriers(TILE_STAGES, arrive_count=READERS))
    v_ring = (v_tiles, tlx.alloc_barriers(TILE_STAGES, arrive_count=1), tlx.alloc_barriers(TILE_STAGES, arrive_count=CONSUMERS))
    block_ring = (q_tiles, do_tiles, lse_tiles, delta_tiles, tlx.alloc_barriers(2, arrive_count=1),
                  tlx.alloc_barriers(2, arrive_count=CONSUMERS))
    ds_ring = (ds_tiles, tlx.alloc_barriers(2, arrive_count=CONSUMERS), tlx.alloc_barriers(2, arrive_count=1))
    queue = (drawn, tlx.alloc_barriers(SLOTS, arrive_count=1), tlx.alloc_barriers(SLOTS, arrive_count=READERS))
    with tlx.async_tasks():
        with tlx.async_task("default"):  # the adder where there is one: it gets what registers the others leave
            if WITH_DQ:
                add_up(desc_dq, dq_rows, records, num_tiles, items, kv_heads, group, queue, k_ring, ds_ring, dq_stages,
                       D, TILE_STAGES, BROADCAST_Q, HAS_LO, HAS_HI)
            else:
                consume(desc_dk, desc_dv, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
                        k_ring, v_ring, block_ring, ds_ring, gradient_stages[0], 0, D, TILE_STAGES, AHEAD, WITH_DQ, HAS_LO, HAS_HI)
        if WITH_DQ:
            with tlx.async_task(num_warps=4, registers=REGISTERS):
                consume(desc_dk, desc_dv, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
                        k_ring, v_ring, block_ring, ds_ring, gradient_stages[0], 0, D, TILE_STAGES, AHEAD, WITH_DQ, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            consume(desc_dk, desc_dv, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
                    k_ring, v_ring, block_ring, ds_ring, gradient_stages[1], 1, D, TILE_STAGES, AHEAD, WITH_DQ, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=1, registers=24):
            produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, records, num_tiles, items, kv_heads, group, counter,
                    queue, k_ring, v_ring, block_ring, D, TILE_STAGES, HAS_LO, HAS_HI)


def tile_list(problem: Problem) -> TileList:
    """The list of tiles that :func:`launch` walks."""
    return key_tiles(problem, BLOCK)


def launch(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> torch.Tensor | None:
    """Descriptors and grid; returns dQ's sums [H, rows, D] fp32, padded and not yet scaled. Everything is TMA-ready.

    Where dQ is left to jfa.kernels.hopper.backward_dq: None.
    """
    d = padded_head_dim(problem.head_dim, problem.head_dim_v)
    dq_rows = padded(problem.rows_q) if problem.broadcast_q else rows.count
    with_dq = not separate_dq(problem)
    config = backward_config(d, problem.band.has_lo, with_dq)
    accumulated = torch.zeros(problem.num_heads, dq_rows if with_dq else 1, d, dtype=torch.float32, device=q.device)
    grid = (min(num_sms(problem.device, EMULATED_SMS), tiles.records.shape[0] * problem.num_kv_heads),)
    variant = _variant(config, d, with_dq, problem.broadcast_q, problem.band.has_lo, problem.band.has_hi)
    variant.launch(
        problem.device, grid,
        ragged_descriptor(q, 64, d), ragged_descriptor(k, 128, d), ragged_descriptor(v, 128, d),
        ragged_descriptor(dout, 64, d), TensorDescriptor.from_tensor(accumulated.view(-1, d), [64, 64]),
        ragged_descriptor(dk, 64, d), ragged_descriptor(dv, 64, d), rows.lse2, rows.delta, rows.count, dq_rows,
        tiles.records, tiles.counts, tiles.counters(1), problem.num_kv_heads,
        problem.group_size, problem.sm_scale, scale_log2(problem.sm_scale),
    )
    return accumulated if with_dq else None


@cache
def _variant(config: BackwardConfig, d: int, with_dq: bool, broadcast_q: bool, has_lo: bool, has_hi: bool) -> Variant:
    return Variant(
        backward_kernel, D=d, TILE_STAGES=config.tile_stages, AHEAD=config.ahead, WITH_DQ=with_dq, BROADCAST_Q=broadcast_q,
        HAS_LO=has_lo, HAS_HI=has_hi, REGISTERS=config.registers, num_warps=4, num_stages=1,
    )


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-backward-d128", 128, True, False, False, 0),
        _compile_config("hopper-backward-d128-causal", 128, True, False, True, 80),
        _compile_config("hopper-backward-d128-window", 128, True, True, True, 0),
        _compile_config("hopper-backward-d128-no-dq", 128, False, False, False, 0),
        _compile_config("hopper-backward-d128-no-dq-window", 128, False, True, True, 0),
        _compile_config("hopper-backward-d64", 64, True, False, False, 0),
        _compile_config("hopper-backward-d64-window", 64, True, True, True, 0),
    ]


def _compile_config(name, d, with_dq, has_lo, has_hi, spills):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    config = backward_config(d, has_lo, with_dq)
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.backward:backward_kernel",
        signature=dict(desc_q=desc.format(64, d), desc_k=desc.format(128, d), desc_v=desc.format(128, d),
                       desc_do=desc.format(64, d), desc_dq="tensordesc<fp32[64, 64]>", desc_dk=desc.format(64, d),
                       desc_dv=desc.format(64, d), lse2="*fp32", delta="*fp32", padded_rows="i32", dq_rows="i32",
                       records="*i32", counts="*i32", counter="*i32", kv_heads="i32", group="i32", scale="fp32",
                       scale_log2="fp32"),
        constexprs=dict(D=d, TILE_STAGES=config.tile_stages, AHEAD=config.ahead, WITH_DQ=with_dq,
                        BROADCAST_Q=False, HAS_LO=has_lo, HAS_HI=has_hi, REGISTERS=config.registers),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        max_spill_bytes=spills,
        roles=("adder", "consumer", "consumer", "producer") if with_dq else ("consumer", "consumer", "producer"),
    )
