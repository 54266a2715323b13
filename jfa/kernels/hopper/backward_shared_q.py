"""Backward for shared queries (broadcast_q, at most 128 of them): dQ stays on the chip across all sequences of a head.

Every sequence has the same queries, so the general backward would add B times into the same few rows of dQ. Here one tile of
queries completes the gradients of a key block: dK and dV of 128 keys are written once, straight away, and dQ^T is accumulated
in registers over every key block of every sequence that a program visits. A program keeps one head (grid column) with its Q
resident, and at the end leaves one partial dQ; the partials of a head are summed in order afterwards.

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV = P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK = dS^T Q          dQ^T += K^T dS^T

Two consumers own 64 keys of a block each. dS^T meets in shared memory. With D = 128 each consumer accumulates half of dQ^T's
rows from all 128 keys; with D = 64 each accumulates all rows from its own keys, and leaves a partial of its own.

Tiles are runs of TILE_KEYS keys of a sequence (longer ones are cut: no sequence is too long for one program), drawn from a
queue; with STATIC they are dealt out beforehand, so that every program sums the same blocks in the same order in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band
from jfa.kernels.common.ragged import ragged_box, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.backward import CONSUMERS, KEYS, load_box, store_gradient
from jfa.kernels.hopper.configs import TINY_SCALE, padded_dim, workers
from jfa.kernels.hopper.prepare import PaddedRows
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import TileList, key_tiles

TILE_KEYS = 1024  # keys of a tile: cut so that no program is left with a mega-sequence, at the price of reloading dO
BLOCK_N = tl.constexpr(128)
BOTH = tl.constexpr(256)  # threads of both consumers
DS_READY = tl.constexpr(9)  # named barrier: both halves of dS^T are written
DS_READ = tl.constexpr(10)  # named barrier: both consumers have read the previous block's dS^T


@triton.jit
def load_output_gradients(desc_do, do_ring, slot, parity, out_begin, len_q, head, row_delta, row_lse, HALVES: tl.constexpr,
                          BYTES: tl.constexpr):
    """A tile's dO, and on the same barrier delta and lse2 of its rows, 64 a buffer."""
    do_tiles, fulls, empties, delta_tiles, lse_tiles = do_ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES + 2 * 4 * 64 * HALVES)
    tlx.async_descriptor_load(desc_do, do_tiles[slot], ragged_box(out_begin, len_q, 0, head), fulls[slot])
    for half in tl.static_range(HALVES):
        tlx.async_load(row_delta + half * 64, delta_tiles[slot * HALVES + half], bulk=True, barrier=fulls[slot])
        tlx.async_load(row_lse + half * 64, lse_tiles[slot * HALVES + half], bulk=True, barrier=fulls[slot])


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, rows_q, records, num_tiles, counter, queue,
            q_ring, k_ring, v_ring, do_ring, LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
            DO_STAGES: tl.constexpr, TILE: tl.constexpr, STATIC: tl.constexpr):
    """Producer: the queries once; of every tile its output gradients and row constants, then its key and value blocks."""
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    head = tl.program_id(1)
    load_box(desc_q, q_ring, 0, 0, 0, rows_q, 0, head, SIZE * LQ * D)
    constants = padded_rows.to(tl.int64) * head
    turn = 0
    count = 0
    item = draw_item(counter, queue, turn, STATIC)
    while item < num_tiles:
        tile, column = find_tile(records, num_tiles, 1, item, True)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        slot, parity = ring_slot(turn, DO_STAGES)
        load_output_gradients(desc_do, do_ring, slot, parity, out_begin, len_q, head, delta + constants + pad_begin,
                              lse2 + constants + pad_begin, LQ // 64, SIZE * LQ * D)
        seen = len_kv
        if len_q == 0:  # rows of no sequence may hold anything: load zeros in their place
            seen = 0
        for row in range(row0, min(row0 + TILE, len_kv), BLOCK_N):
            slot, parity = ring_slot(count, K_STAGES)
            load_box(desc_k, k_ring, slot, parity, kv_begin, seen, row, head, SIZE * BLOCK_N * D)
            slot, parity = ring_slot(count, V_STAGES)
            load_box(desc_v, v_ring, slot, parity, kv_begin, seen, row, head, SIZE * BLOCK_N * D)
            count += 1
        turn += 1
        item = draw_item(counter, queue, turn, STATIC)


@triton.jit
def half_block(k_tile, v_tile, q_tile, do_tile, lse_tile, delta_tile, ds_tile, dv, keys, seen, lo, hi, scale_log2, part,
               HALF: tl.constexpr, D: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """This consumer's keys against 64 of the queries: dS^T to ds_tile, and dv with P^T dO issued."""
    q = tlx.local_slice(q_tile, [HALF * 64, 0], [64, D])
    do = tlx.local_slice(do_tile, [HALF * 64, 0], [64, D])
    scores = tlx.async_dot(tlx.local_slice(k_tile, [part * KEYS, 0], [KEYS, D]), tlx.local_trans(q))
    dp = tlx.async_dot(tlx.local_slice(v_tile, [part * KEYS, 0], [KEYS, D]), tlx.local_trans(do))
    scores = tlx.async_dot_wait(1, scores)
    p = tl.math.exp2(scores * scale_log2 - tlx.local_load(lse_tile)[None, :])
    queries = HALF * 64 + tl.arange(0, 64)
    p = tl.where(in_band(queries[None, :], keys[:, None], seen, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    p = p.to(q_tile.dtype)
    if HALF == 0:
        dv = tlx.async_dot(p, do)
    else:
        dv = tlx.async_dot(p, do, dv)
    dp = tlx.async_dot_wait(1, dp)
    ds = (p.to(tl.float32) * (dp - tlx.local_load(delta_tile)[None, :])).to(q_tile.dtype)
    if HALF == 0:
        tlx.named_barrier_wait(DS_READ, BOTH)
    tlx.local_store(tlx.local_slice(ds_tile, [part * KEYS, HALF * 64], [KEYS, 64]), ds)
    return dv


@triton.jit
def consume_block(desc_dk, desc_dv, q_tile, k_ring, v_ring, do_ring, do_slot, ds_tile, stage, dq, count,
                  row, kv_begin, len_kv, seen, lo, hi, head, scale, scale_log2, part,
                  LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
                  HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """64 of the 128 keys from ``row`` on, of which those below ``seen`` count: writes their dK and dV, adds to dq."""
    k_tiles, k_fulls, k_empties = k_ring
    v_tiles, v_fulls, v_empties = v_ring
    do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles = do_ring
    HALVES: tl.constexpr = LQ // 64
    k, k_parity = ring_slot(count, K_STAGES)
    v, v_parity = ring_slot(count, V_STAGES)
    mine = row + part * KEYS
    keys = mine + tl.arange(0, KEYS)
    tlx.barrier_wait(k_fulls[k], k_parity)
    tlx.barrier_wait(v_fulls[v], v_parity)
    dv = half_block(
        k_tiles[k], v_tiles[v], q_tile, do_tiles[do_slot], lse_tiles[do_slot * HALVES], delta_tiles[do_slot * HALVES],
        ds_tile, None, keys, seen, lo, hi, scale_log2, part, 0, D, HAS_LO, HAS_HI)
    if HALVES == 2:
        dv = half_block(
            k_tiles[k], v_tiles[v], q_tile, do_tiles[do_slot], lse_tiles[do_slot * 2 + 1], delta_tiles[do_slot * 2 + 1],
            ds_tile, dv, keys, seen, lo, hi, scale_log2, part, 1, D, HAS_LO, HAS_HI)
    tlx.barrier_arrive(v_empties[v], 1)
    tlx.fence("async_shared")
    dv = tlx.async_dot_wait(0, dv)
    tlx.named_barrier_wait(DS_READY, BOTH)
    own_ds = tlx.local_slice(ds_tile, [part * KEYS, 0], [KEYS, LQ])
    dk = tlx.async_dot(own_ds, q_tile)
    if D == 64:
        dq = tlx.async_dot(tlx.local_trans(tlx.local_slice(k_tiles[k], [part * KEYS, 0], [KEYS, D])), own_ds, dq)
    else:
        half = tlx.local_slice(k_tiles[k], [0, part * 64], [BLOCK_N, 64])
        dq = tlx.async_dot(tlx.local_trans(half), ds_tile, dq)
    tlx.async_descriptor_store_wait(0)
    store_gradient(desc_dv, stage, dv, kv_begin, len_kv, mine, head)
    dk = tlx.async_dot_wait(1, dk)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k_empties[k], 1)
    tlx.async_descriptor_store_wait(0)
    store_gradient(desc_dk, stage, dk * scale, kv_begin, len_kv, mine, head)
    return dq, count + 1


@triton.jit
def consume(desc_dq, desc_dk, desc_dv, records, num_tiles, heads, scale, scale_log2, queue, q_ring, k_ring, v_ring, do_ring,
            ds_tiles, stages, dq_stages, part, LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
            DO_STAGES: tl.constexpr, TILE: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 keys of every block; at the end it leaves its rows of the program's dQ^T."""
    q_tiles, q_fulls, q_empties = q_ring
    do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles = do_ring
    head = tl.program_id(1)
    tlx.barrier_wait(q_fulls[0], 0)
    dq = tl.zeros([64, LQ], tl.float32)
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    while item < num_tiles:
        tile, column = find_tile(records, num_tiles, 1, item, True)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        slot, parity = ring_slot(turn, DO_STAGES)
        tlx.barrier_wait(do_fulls[slot], parity)
        seen = len_kv
        if len_q == 0:  # rows of no sequence: gradients of 0
            seen = 0
        for row in range(row0, min(row0 + TILE, len_kv), BLOCK_N):
            dq, count = consume_block(
                desc_dk, desc_dv, q_tiles[0], k_ring, v_ring, do_ring, slot, ds_tiles[0], stages[part], dq, count, row, kv_begin,
                len_kv, seen, lo, hi, head, scale, scale_log2, part, LQ, D, K_STAGES, V_STAGES, HAS_LO, HAS_HI)
        tlx.barrier_arrive(do_empties[slot], 1)
        turn += 1
        item = receive_item(queue, turn)
    tlx.async_descriptor_store_wait(0)
    tlx.named_barrier_wait(DS_READ, BOTH)
    tlx.local_store(dq_stages[part], dq)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, dq_stages[part], [((tl.program_id(0) * heads + head) * CONSUMERS + part) * 64, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "rows_q", "heads"])
def backward_shared_q_kernel(desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, lse2, delta, padded_rows, rows_q,
                             records, counts, counters, heads, scale, scale_log2,
                             LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
                             DO_STAGES: tl.constexpr, TILE: tl.constexpr, STATIC: tl.constexpr, HAS_LO: tl.constexpr,
                             HAS_HI: tl.constexpr, REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs a head, H).

    desc_q, desc_do: ragged, boxes [LQ, D]; desc_k, desc_v: ragged, [128, D]; desc_dk, desc_dv: ragged, [64, D]; desc_dq: plain,
    fp32 [programs * H * 2 * 64, LQ], boxes [64, LQ]. lse2, delta [H, padded_rows] fp32.
    records, counts: a list of TILE keys a tile; counters: one int32 of 0 a head.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    num_tiles = tl.load(counts + 1)
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, K_STAGES)
    v_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, V_STAGES)
    q_tiles = tlx.local_alloc((LQ, D), DTYPE, 1)
    do_tiles = tlx.local_alloc((LQ, D), DTYPE, DO_STAGES)
    ds_tiles = tlx.local_alloc((BLOCK_N, LQ), DTYPE, 1)
    delta_tiles = tlx.local_alloc((64,), tl.float32, DO_STAGES * (LQ // 64))
    lse_tiles = tlx.local_alloc((64,), tl.float32, DO_STAGES * (LQ // 64))
    stages = tlx.local_alloc((KEYS, D), DTYPE, CONSUMERS)  # where dV and dK wait for their TMA store
    dq_stages = tlx.local_alloc((64, LQ), tl.float32, CONSUMERS, reuse=k_tiles)  # used when the key ring has been emptied
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    k_ring = (k_tiles, tlx.alloc_barriers(K_STAGES, arrive_count=1), tlx.alloc_barriers(K_STAGES, arrive_count=CONSUMERS))
    v_ring = (v_tiles, tlx.alloc_barriers(V_STAGES, arrive_count=1), tlx.alloc_barriers(V_STAGES, arrive_count=CONSUMERS))
    q_ring = (q_tiles, tlx.alloc_barriers(1, arrive_count=1), tlx.alloc_barriers(1, arrive_count=CONSUMERS))
    do_fulls = tlx.alloc_barriers(DO_STAGES, arrive_count=1)
    do_empties = tlx.alloc_barriers(DO_STAGES, arrive_count=CONSUMERS)
    do_ring = (do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles)
    queue = (drawn, tlx.alloc_barriers(SLOTS, arrive_count=1), tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS))
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(desc_dq, desc_dk, desc_dv, records, num_tiles, heads, scale, scale_log2, queue, q_ring, k_ring, v_ring,
                    do_ring, ds_tiles, stages, dq_stages, 0, LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=REGISTERS):  # consumer 1
            consume(desc_dq, desc_dk, desc_dv, records, num_tiles, heads, scale, scale_log2, queue, q_ring, k_ring, v_ring,
                    do_ring, ds_tiles, stages, dq_stages, 1, LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, rows_q, records, num_tiles,
                    counters + tl.program_id(1), queue, q_ring, k_ring, v_ring, do_ring,
                    LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, STATIC)


def applies(problem: Problem) -> bool:
    """Whether this kernel can do the problem's backward; the general one can do every one."""
    return (problem.broadcast_q and problem.rows_q <= 128 and problem.group_size == 1
            and padded_dim(problem.head_dim) == padded_dim(problem.head_dim_v) <= 128)


def tile_list(problem: Problem) -> TileList:
    """The list of tiles that :func:`launch` walks."""
    return key_tiles(problem, TILE_KEYS)


def launch(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> torch.Tensor:
    """Descriptors and grid; returns dQ [H, Lq, D] fp32, not yet scaled. Everything is TMA-ready."""
    d, lq, heads = padded_dim(problem.head_dim), 64 if problem.rows_q <= 64 else 128, problem.num_heads
    grid = (max(1, workers(problem.device) // heads), heads)
    partials = torch.empty(grid[0], heads, 2, 64, lq, dtype=torch.float32, device=q.device)
    backward_shared_q_kernel[grid](
        ragged_descriptor(q, lq, d), ragged_descriptor(k, 128, d), ragged_descriptor(v, 128, d), ragged_descriptor(dout, lq, d),
        TensorDescriptor.from_tensor(partials.view(-1, lq), [64, lq]), ragged_descriptor(dk, 64, d), ragged_descriptor(dv, 64, d),
        rows.lse2, rows.delta, rows.count, problem.rows_q, tiles.records, tiles.counts,
        torch.zeros(heads, dtype=torch.int32, device=q.device), heads, problem.sm_scale,
        max(problem.sm_scale * LOG2_E, TINY_SCALE),
        LQ=lq, D=d, K_STAGES=2, V_STAGES=1 if lq == 128 else 2, DO_STAGES=1 if lq == 128 else 2, TILE=TILE_KEYS,
        STATIC=problem.deterministic, HAS_LO=problem.band.has_lo, HAS_HI=problem.band.has_hi, REGISTERS=240,
        num_warps=4, num_stages=1,
    )
    if d == 64:  # each consumer left a partial of all rows
        dq = partials.sum((0, 2))
    else:
        dq = partials.sum(0).view(heads, d, lq)
    return dq.transpose(1, 2)


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-backward-shared-q64-d128", 64, 128, 2, 0),
        _compile_config("hopper-backward-shared-q128-d128", 128, 128, 1, 1200),
        _compile_config("hopper-backward-shared-q64-d64", 64, 64, 2, 0),
    ]


def _compile_config(name, lq, d, do_stages, spills):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.backward_shared_q:backward_shared_q_kernel",
        signature=dict(desc_q=desc.format(lq, d), desc_k=desc.format(128, d), desc_v=desc.format(128, d),
                       desc_do=desc.format(lq, d), desc_dq=f"tensordesc<fp32[64, {lq}]>", desc_dk=desc.format(64, d),
                       desc_dv=desc.format(64, d), lse2="*fp32", delta="*fp32", padded_rows="i32", rows_q="i32", records="*i32",
                       counts="*i32", counters="*i32", heads="i32", scale="fp32", scale_log2="fp32"),
        constexprs=dict(LQ=lq, D=d, K_STAGES=2, V_STAGES=do_stages, DO_STAGES=do_stages, TILE=1024,
                        STATIC=False, HAS_LO=False, HAS_HI=False, REGISTERS=240),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        max_spill_bytes=spills,
        roles=("consumer", "consumer", "producer"),
    )
