"""dQ in a pass of its own: a tile of queries owns its dQ and walks its keys, so nothing is added atomically and order is fixed.

    S = Q K^T      P = exp2(S scale - lse)      dP = dO V^T      dS = P (dP - delta)      dQ += dS K

Shaped like the forward: a producer, two consumers of 64 query rows each, key blocks from the last to the first. S and dP are
computed a second time (jfa.kernels.hopper.backward has made them for dK and dV), which is the price of an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band, key_blocks
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.ragged import empty_tma_ready, ragged_descriptor
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.old import load_box, store_gradient
from jfa.kernels.hopper.configs import EMULATED_SMS
from jfa.kernels.hopper.prepare import PaddedRows
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import TileList

ROWS = tl.constexpr(64)  # query rows of one consumer
CONSUMERS = tl.constexpr(2)
BLOCK_N = tl.constexpr(64)


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, records, num_tiles, items, heads, group, counter, queue, q_ring, do_ring, k_ring,
            v_ring, D: tl.constexpr, STAGES: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Producer: of every tile the queries and output gradients, then the key and value blocks from last to first."""
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    turn = 0
    count = 0
    item = draw_item(counter, queue, turn, False)
    while item < items:
        tile, head = find_tile(records, num_tiles, heads, item, False)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = key_blocks(row0, CONSUMERS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        for c in tl.static_range(CONSUMERS):
            load_box(desc_q, q_ring, c, turn & 1, q_begin, len_q, row0 + c * ROWS, head, SIZE * ROWS * D)
            load_box(desc_do, do_ring, c, turn & 1, out_begin, len_q, row0 + c * ROWS, head, SIZE * ROWS * D)
        for back in range(end - first):
            slot, parity = ring_slot(count, STAGES)
            row = (end - 1 - back) * BLOCK_N
            load_box(desc_k, k_ring, slot, parity, kv_begin, len_kv, row, head // group, SIZE * BLOCK_N * D)
            load_box(desc_v, v_ring, slot, parity, kv_begin, len_kv, row, head // group, SIZE * BLOCK_N * D)
            count += 1
        turn += 1
        item = draw_item(counter, queue, turn, False)


@triton.jit
def dq_block(q_tile, do_tile, k_ring, v_ring, dq, row_lse, row_delta, count, rows, block, len_kv, lo, hi, scale_log2,
             STAGES: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASKED: tl.constexpr):
    """One key block: dq += dS K."""
    k_tiles, k_fulls, k_empties = k_ring
    v_tiles, v_fulls, v_empties = v_ring
    slot, parity = ring_slot(count, STAGES)
    tlx.barrier_wait(k_fulls[slot], parity)
    scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[slot]))
    tlx.barrier_wait(v_fulls[slot], parity)
    dp = tlx.async_dot(do_tile, tlx.local_trans(v_tiles[slot]))
    scores = tlx.async_dot_wait(1, scores)
    p = tl.math.exp2(scores * scale_log2 - row_lse[:, None])
    if MASKED:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(in_band(rows[:, None], keys[None, :], len_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    dp = tlx.async_dot_wait(0, dp)
    tlx.barrier_arrive(v_empties[slot], 1)
    ds = (p * (dp - row_delta[:, None])).to(q_tile.dtype)
    dq = tlx.async_dot(ds, k_tiles[slot], dq)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k_empties[slot], 1)
    return dq, count + 1


@triton.jit
def consume(desc_dq, lse2, delta, padded_rows, records, num_tiles, items, heads, scale, scale_log2, queue,
            q_ring, do_ring, k_ring, v_ring, stages, part,
            D: tl.constexpr, STAGES: tl.constexpr, BROADCAST_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 query rows of every tile. With shared queries every batch's dQ goes to its own output rows."""
    q_tiles, q_fulls, q_empties = q_ring
    do_tiles, do_fulls, do_empties = do_ring
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    while item < items:
        tile, head = find_tile(records, num_tiles, heads, item, False)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = key_blocks(row0, CONSUMERS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        rows = row0 + part * ROWS + tl.arange(0, ROWS)
        exist = rows < len_q
        constants = padded_rows.to(tl.int64) * head + pad_begin + rows
        row_lse = tl.load(lse2 + constants, mask=exist, other=float("inf"))
        row_delta = tl.load(delta + constants, mask=exist, other=0.0)
        dq = tl.zeros([ROWS, D], tl.float32)
        tlx.barrier_wait(q_fulls[part], turn & 1)
        tlx.barrier_wait(do_fulls[part], turn & 1)
        for back in range(end - bulk_end):
            dq, count = dq_block(
                q_tiles[part], do_tiles[part], k_ring, v_ring, dq, row_lse, row_delta, count, rows, end - 1 - back, len_kv,
                lo, hi, scale_log2, STAGES, HAS_LO, HAS_HI, True)
        for _ in range(bulk_end - bulk_begin):
            dq, count = dq_block(
                q_tiles[part], do_tiles[part], k_ring, v_ring, dq, row_lse, row_delta, count, rows, 0, len_kv,
                lo, hi, scale_log2, STAGES, HAS_LO, HAS_HI, False)
        if HAS_LO:
            for back in range(bulk_begin - first):
                dq, count = dq_block(
                    q_tiles[part], do_tiles[part], k_ring, v_ring, dq, row_lse, row_delta, count, rows, bulk_begin - 1 - back,
                    len_kv, lo, hi, scale_log2, STAGES, HAS_LO, HAS_HI, True)
        tlx.barrier_arrive(q_empties[part], 1)
        tlx.barrier_arrive(do_empties[part], 1)
        begin = q_begin
        if BROADCAST_Q:
            begin = out_begin
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dq, stages[part], dq * scale, begin, len_q, row0 + part * ROWS, head)
        turn += 1
        item = receive_item(queue, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "heads", "group"])
def dq_kernel(desc_q, desc_k, desc_v, desc_do, desc_dq, lse2, delta, padded_rows, records, counts, counter, heads, group, scale,
              scale_log2, D: tl.constexpr, STAGES: tl.constexpr, BROADCAST_Q: tl.constexpr,
              HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs,).

    desc_q, desc_k, desc_v, desc_do, desc_dq: ragged, boxes [64, D]; lse2, delta [H, padded_rows] fp32; records, counts: a list of
    128 queries a tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    num_tiles = tl.load(counts + 1)
    items = num_tiles * heads
    q_tiles = tlx.local_alloc((ROWS, D), DTYPE, CONSUMERS)
    do_tiles = tlx.local_alloc((ROWS, D), DTYPE, CONSUMERS)
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, STAGES)
    v_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, STAGES)
    stages = tlx.local_alloc((ROWS, D), tlx.dtype_of(desc_dq), CONSUMERS)
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    q_ring = (q_tiles, tlx.alloc_barriers(CONSUMERS, arrive_count=1), tlx.alloc_barriers(CONSUMERS, arrive_count=1))
    do_ring = (do_tiles, tlx.alloc_barriers(CONSUMERS, arrive_count=1), tlx.alloc_barriers(CONSUMERS, arrive_count=1))
    k_ring = (k_tiles, tlx.alloc_barriers(STAGES, arrive_count=1), tlx.alloc_barriers(STAGES, arrive_count=CONSUMERS))
    v_ring = (v_tiles, tlx.alloc_barriers(STAGES, arrive_count=1), tlx.alloc_barriers(STAGES, arrive_count=CONSUMERS))
    queue = (drawn, tlx.alloc_barriers(SLOTS, arrive_count=1), tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS))
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(desc_dq, lse2, delta, padded_rows, records, num_tiles, items, heads, scale, scale_log2, queue,
                    q_ring, do_ring, k_ring, v_ring, stages, 0, D, STAGES, BROADCAST_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=REGISTERS):  # consumer 1
            consume(desc_dq, lse2, delta, padded_rows, records, num_tiles, items, heads, scale, scale_log2, queue,
                    q_ring, do_ring, k_ring, v_ring, stages, 1, D, STAGES, BROADCAST_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, desc_do, records, num_tiles, items, heads, group, counter, queue, q_ring, do_ring,
                    k_ring, v_ring, D, STAGES, HAS_LO, HAS_HI)


def launch(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout) -> torch.Tensor:
    """dq [rows_q, H, D] in q's dtype. Everything is TMA-ready; ``tiles``: of 128 queries."""
    d = padded_head_dim(problem.head_dim, problem.head_dim_v)
    if problem.broadcast_q:
        like = torch.zeros(problem.rows_out, problem.num_heads, 0, dtype=torch.float32, device=q.device)
    else:
        like = q
    dq = empty_tma_ready(like, problem.head_dim)
    if problem.output_offset is not None:
        dq.zero_()
    grid = (min(num_sms(problem.device, EMULATED_SMS), tiles.records.shape[0] * problem.num_heads),)
    dq_kernel[grid](
        ragged_descriptor(q, 64, d), ragged_descriptor(k, 64, d), ragged_descriptor(v, 64, d), ragged_descriptor(dout, 64, d),
        ragged_descriptor(dq, 64, d), rows.lse2, rows.delta, rows.count, tiles.records, tiles.counts,
        torch.zeros(1, dtype=torch.int32, device=q.device), problem.num_heads, problem.group_size, problem.sm_scale,
        scale_log2(problem.sm_scale), D=d, STAGES=3, BROADCAST_Q=problem.broadcast_q,
        HAS_LO=problem.band.has_lo, HAS_HI=problem.band.has_hi, REGISTERS=240, num_warps=4, num_stages=1,
    )
    if not problem.broadcast_q:
        return dq.contiguous()
    return _sum_of_batches(problem, dq).to(q.dtype)


def _sum_of_batches(problem: Problem, dq: torch.Tensor) -> torch.Tensor:
    """[rows_out, H, D] -> [Lq, H, D]: the gradients of a shared query, added in the batches' order."""
    lq, batches = problem.rows_q, problem.num_batches
    if problem.output_offset is None:
        return dq.reshape(batches, lq, problem.num_heads, -1).sum(0)
    begin = problem.output_offset[:-1].long()
    inside = (begin >= 0) & (begin <= problem.rows_out - lq)
    slots = torch.where(inside, begin, 0)[:, None] + torch.arange(lq, device=dq.device)
    return (dq[slots] * inside[:, None, None, None]).sum(0)


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [_compile_config("hopper-backward-dq-d128", 128, False), _compile_config("hopper-backward-dq-d64-causal", 64, True)]


def _compile_config(name, d, has_hi):
    desc = f"tensordesc<bf16[1, 1, 1, 64, {d}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.backward_dq:dq_kernel",
        signature=dict(desc_q=desc, desc_k=desc, desc_v=desc, desc_do=desc, desc_dq=desc, lse2="*fp32", delta="*fp32",
                       padded_rows="i32", records="*i32", counts="*i32", counter="*i32", heads="i32", group="i32", scale="fp32",
                       scale_log2="fp32"),
        constexprs=dict(D=d, STAGES=3, BROADCAST_Q=False, HAS_LO=False, HAS_HI=has_hi, REGISTERS=240),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        roles=("consumer", "consumer", "producer"),
    )
