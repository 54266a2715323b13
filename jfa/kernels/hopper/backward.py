"""Jagged attention backward for sm_90: one pass over key tiles makes dK and dV, and adds to dQ.

For a tile of 128 keys of one key/value head and every block of 64 queries that sees it, transposed (keys are rows):

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK += dS^T Q          dQ += dS K

Two consumer warp groups own 64 keys each: S^T, dP^T, dK and dV never leave their registers, and P^T and dS^T enter the next
product straight from them. Only dQ needs all 128 keys: both write their dS^T to shared memory, and they take turns in making
dQ from it, one block each. So a consumer waits for the other only every second block, and while one adds up dQ the other is
already in the next block. dQ leaves by TMA reduce-add in fp32. Query heads of a group (GQA) are walked one after another in the
same tile, so dK and dV need no atomics.

dQ is added in whatever order tiles finish. Where that must not be, or a pass of its own is faster (jfa.kernels.hopper.configs), it
is left out here and made by jfa.kernels.hopper.backward_dq.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band, query_blocks
from jfa.kernels.common.ragged import ragged_box, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import TINY_SCALE, padded_dim, separate_dq, workers
from jfa.kernels.hopper.prepare import PaddedRows
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import TileList, key_tiles, padded

KEYS = tl.constexpr(64)  # key rows of one consumer: the M of a wgmma
CONSUMERS = tl.constexpr(2)
BLOCK_M = tl.constexpr(64)  # queries of a block
DS_STAGES = tl.constexpr(2)  # blocks of dS^T: the one whose dQ is being made and the next


@triton.jit
def load_box(desc, ring, slot, parity, begin, length, row, head, BYTES: tl.constexpr):
    """One box into one buffer of a ring, once its readers have left."""
    tiles, fulls, empties = ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES)
    tlx.async_descriptor_load(desc, tiles[slot], ragged_box(begin, length, row, head), fulls[slot])


@triton.jit
def load_box_and_rows(desc, ring, slot, parity, begin, length, row, head, row_values, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """The same, and on the same barrier one fp32 constant a row: ROWS of them from the pointer row_values on."""
    tiles, fulls, empties, constants = ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES + 4 * ROWS)
    tlx.async_descriptor_load(desc, tiles[slot], ragged_box(begin, length, row, head), fulls[slot])
    tlx.async_load(row_values, constants[slot], bulk=True, barrier=fulls[slot])


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, records, num_tiles, items, kv_heads, group, counter, queue,
            k_ring, v_ring, q_ring, do_ring,
            D: tl.constexpr, STAGES: tl.constexpr,
            HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
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
        load_box(desc_k, k_ring, 0, turn & 1, kv_begin, len_kv, row0, kv_head, SIZE * BLOCK_N * D)
        load_box(desc_v, v_ring, 0, turn & 1, kv_begin, len_kv, row0, kv_head, SIZE * BLOCK_N * D)
        for head in range(kv_head * group, kv_head * group + group):
            constants = padded_rows.to(tl.int64) * head + pad_begin
            for block in range(first, end):
                slot, parity = ring_slot(count, STAGES)
                load_box_and_rows(desc_q, q_ring, slot, parity, q_begin, len_q, block * BLOCK_M, head,
                                  lse2 + constants + block * BLOCK_M, BLOCK_M, SIZE * BLOCK_M * D)
                load_box_and_rows(desc_do, do_ring, slot, parity, out_begin, len_q, block * BLOCK_M, head,
                                  delta + constants + block * BLOCK_M, BLOCK_M, SIZE * BLOCK_M * D)
                count += 1
        turn += 1
        item = draw_item(counter, queue, turn, False)


@triton.jit
def publish_ds(ds_ring, ds, count, part):
    """Writes this consumer's half of a block's dS^T; where the block's dQ is the other's turn, tells it."""
    ds_tiles, ds_fulls, ds_empties = ds_ring
    slot, parity = ring_slot(count, DS_STAGES)
    theirs = count % 2 != part
    tlx.barrier_wait(ds_empties[slot], parity ^ 1, pred=theirs)
    tlx.local_store(tlx.local_slice(ds_tiles[slot], [part * KEYS, 0], [KEYS, BLOCK_M]), ds)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds_fulls[slot], 1, pred=theirs)


@triton.jit
def add_dq(desc_dq, stage, ds_ring, k_tile, count, row):
    """This consumer's turn: dQ [64, D] of the block from both halves of dS^T, added in fp32 by TMA."""
    ds_tiles, ds_fulls, ds_empties = ds_ring
    slot, parity = ring_slot(count, DS_STAGES)
    tlx.barrier_wait(ds_fulls[slot], parity)
    dq = tlx.async_dot(tlx.local_trans(ds_tiles[slot]), k_tile)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(ds_empties[slot], 1)
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(stage, dq)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, stage, [row, 0], store_reduce="add")


@triton.jit
def backward_block(desc_dq, k_tile, v_tile, q_ring, do_ring, ds_ring, dq_stage, dk, dv, count, block, dq_row,
                   key0, len_kv, lo, hi, scale_log2, part,
                   D: tl.constexpr, STAGES: tl.constexpr, WITH_DQ: tl.constexpr,
                   HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASKED: tl.constexpr):
    """One block of queries against this consumer's 64 keys."""
    q_tiles, q_fulls, q_empties, lse_tiles = q_ring
    do_tiles, do_fulls, do_empties, delta_tiles = do_ring
    slot, parity = ring_slot(count, STAGES)
    mine = tlx.local_slice(k_tile, [part * KEYS, 0], [KEYS, D])
    tlx.barrier_wait(q_fulls[slot], parity)
    scores = tlx.async_dot(mine, tlx.local_trans(q_tiles[slot]))
    tlx.barrier_wait(do_fulls[slot], parity)
    dp = tlx.async_dot(tlx.local_slice(v_tile, [part * KEYS, 0], [KEYS, D]), tlx.local_trans(do_tiles[slot]))
    scores = tlx.async_dot_wait(1, scores)
    row_lse = tlx.local_load(lse_tiles[slot])
    p = tl.math.exp2(scores * scale_log2 - row_lse[None, :])
    if MASKED:
        keys = key0 + part * KEYS + tl.arange(0, KEYS)
        queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
        p = tl.where(in_band(queries[None, :], keys[:, None], len_kv, lo, hi, HAS_LO, HAS_HI), p, 0.0)
    p = p.to(k_tile.dtype)  # the one form that is kept: 16 registers a thread instead of 32
    dv = tlx.async_dot(p, do_tiles[slot], dv)
    dp = tlx.async_dot_wait(1, dp)
    row_delta = tlx.local_load(delta_tiles[slot])
    ds = (p.to(tl.float32) * (dp - row_delta[None, :])).to(k_tile.dtype)
    dk = tlx.async_dot(ds, q_tiles[slot], dk)
    if WITH_DQ:
        publish_ds(ds_ring, ds, count, part)
    dv = tlx.async_dot_wait(1, dv)
    tlx.barrier_arrive(do_empties[slot], 1)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(q_empties[slot], 1)
    if WITH_DQ:
        if count % 2 == part:
            add_dq(desc_dq, dq_stage, ds_ring, k_tile, count, dq_row + block * BLOCK_M)
    return dk, dv, count + 1


@triton.jit
def store_gradient(desc, stage, gradient, begin, length, row, head):
    """64 rows of dK or dV leave through a staging buffer, clipped at the sequence's end."""
    tlx.local_store(stage, gradient.to(stage.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, stage, ragged_box(begin, length, row, head))


@triton.jit
def consume(desc_dq, desc_dk, desc_dv, dq_rows, records, num_tiles, items, kv_heads, group,
            scale, scale_log2, queue, k_ring, v_ring, q_ring, do_ring, ds_ring, dq_stages, gradient_stages, part,
            D: tl.constexpr, STAGES: tl.constexpr, WITH_DQ: tl.constexpr,
            BROADCAST_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 keys of every tile."""
    k_tiles, k_fulls, k_empties = k_ring
    v_tiles, v_fulls, v_empties = v_ring
    BLOCK_N: tl.constexpr = CONSUMERS * KEYS
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    tile, kv_head = find_tile(records, num_tiles, kv_heads, item, False)
    while item < items:
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = query_blocks(row0, BLOCK_N, len_q, len_kv, lo, hi, BLOCK_M, HAS_LO, HAS_HI)
        dq_begin = pad_begin
        if BROADCAST_Q:
            dq_begin = 0
        dk = tl.zeros([KEYS, D], tl.float32)
        dv = tl.zeros([KEYS, D], tl.float32)
        tlx.barrier_wait(k_fulls[0], turn & 1)
        tlx.barrier_wait(v_fulls[0], turn & 1)
        for head in range(kv_head * group, kv_head * group + group):
            dq_row = head * dq_rows + dq_begin
            if HAS_HI:
                for block in range(first, bulk_begin):
                    dk, dv, count = backward_block(
                        desc_dq, k_tiles[0], v_tiles[0], q_ring, do_ring, ds_ring, dq_stages[part], dk, dv, count, block, dq_row,
                        row0, len_kv, lo, hi, scale_log2, part, D, STAGES, WITH_DQ, HAS_LO, HAS_HI, True)
            for block in range(bulk_begin, bulk_end):
                dk, dv, count = backward_block(
                    desc_dq, k_tiles[0], v_tiles[0], q_ring, do_ring, ds_ring, dq_stages[part], dk, dv, count, block, dq_row,
                    row0, len_kv, lo, hi, scale_log2, part, D, STAGES, WITH_DQ, HAS_LO, HAS_HI, False)
            for block in range(bulk_end, end):
                dk, dv, count = backward_block(
                    desc_dq, k_tiles[0], v_tiles[0], q_ring, do_ring, ds_ring, dq_stages[part], dk, dv, count, block, dq_row,
                    row0, len_kv, lo, hi, scale_log2, part, D, STAGES, WITH_DQ, HAS_LO, HAS_HI, True)
        tlx.barrier_arrive(k_empties[0], 1)
        tlx.barrier_arrive(v_empties[0], 1)
        mine = row0 + part * KEYS
        turn += 1
        item = receive_item(queue, turn)
        tile, next_head = find_tile(records, num_tiles, kv_heads, item, False)
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dv, gradient_stages[2 * part], dv, kv_begin, len_kv, mine, kv_head)
        store_gradient(desc_dk, gradient_stages[2 * part + 1], dk * scale, kv_begin, len_kv, mine, kv_head)
        kv_head = next_head
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "dq_rows", "kv_heads", "group"])
def backward_kernel(desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, lse2, delta, padded_rows, dq_rows,
                    records, counts, counter, kv_heads, group, scale, scale_log2,
                    D: tl.constexpr, STAGES: tl.constexpr, WITH_DQ: tl.constexpr,
                    BROADCAST_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs,).

    desc_q, desc_do, desc_dk, desc_dv: ragged, boxes [64, D]; desc_k, desc_v: ragged, [128, D]; desc_dq: plain, fp32,
    [H * dq_rows, D], boxes [64, D]. lse2, delta [H, padded_rows] fp32. D holds both head dimensions.
    records, counts: a list of 128 keys a tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    BLOCK_N: tl.constexpr = CONSUMERS * KEYS
    num_tiles = tl.load(counts + 1)
    items = num_tiles * kv_heads
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, 1)
    v_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, 1)
    q_tiles = tlx.local_alloc((BLOCK_M, D), DTYPE, STAGES)
    do_tiles = tlx.local_alloc((BLOCK_M, D), DTYPE, STAGES)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, DS_STAGES)
    dq_stages = tlx.local_alloc((BLOCK_M, D), tl.float32, CONSUMERS)
    gradient_stages = tlx.local_alloc((KEYS, D), DTYPE, 2 * CONSUMERS, reuse=dq_stages)  # dV, dK: in their consumer's dq_stage
    k_ring = (k_tiles, tlx.alloc_barriers(1, arrive_count=1), tlx.alloc_barriers(1, arrive_count=CONSUMERS))
    v_ring = (v_tiles, tlx.alloc_barriers(1, arrive_count=1), tlx.alloc_barriers(1, arrive_count=CONSUMERS))
    lse_tiles = tlx.local_alloc((BLOCK_M,), tl.float32, STAGES)
    delta_tiles = tlx.local_alloc((BLOCK_M,), tl.float32, STAGES)
    q_ring = (q_tiles, tlx.alloc_barriers(STAGES, arrive_count=1), tlx.alloc_barriers(STAGES, arrive_count=CONSUMERS),
              lse_tiles)
    do_ring = (do_tiles, tlx.alloc_barriers(STAGES, arrive_count=1), tlx.alloc_barriers(STAGES, arrive_count=CONSUMERS),
               delta_tiles)
    ds_ring = (ds_tiles, tlx.alloc_barriers(DS_STAGES, arrive_count=1), tlx.alloc_barriers(DS_STAGES, arrive_count=1))
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    queue = (drawn, tlx.alloc_barriers(SLOTS, arrive_count=1), tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS))
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(desc_dq, desc_dk, desc_dv, dq_rows, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
                    k_ring, v_ring, q_ring, do_ring, ds_ring, dq_stages, gradient_stages, 0,
                    D, STAGES, WITH_DQ, BROADCAST_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=REGISTERS):  # consumer 1
            consume(desc_dq, desc_dk, desc_dv, dq_rows, records, num_tiles, items, kv_heads, group, scale, scale_log2, queue,
                    k_ring, v_ring, q_ring, do_ring, ds_ring, dq_stages, gradient_stages, 1,
                    D, STAGES, WITH_DQ, BROADCAST_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, records, num_tiles, items, kv_heads, group, counter,
                    queue, k_ring, v_ring, q_ring, do_ring, D, STAGES, HAS_LO, HAS_HI)


def tile_list(problem: Problem) -> TileList:
    """The list of tiles that :func:`launch` walks."""
    return key_tiles(problem, 128)


def launch(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> torch.Tensor | None:
    """Descriptors and grid; returns dQ's sums [H, rows, D] fp32, padded and not yet scaled. Everything is TMA-ready.

    Where dQ is left to jfa.kernels.hopper.backward_dq: None.
    """
    d = max(padded_dim(problem.head_dim), padded_dim(problem.head_dim_v))
    dq_rows = padded(problem.rows_q) if problem.broadcast_q else rows.count
    with_dq = not separate_dq(problem)
    accumulated = torch.zeros(problem.num_heads, dq_rows if with_dq else 1, d, dtype=torch.float32, device=q.device)
    grid = (min(workers(problem.device), tiles.records.shape[0] * problem.num_kv_heads),)
    backward_kernel[grid](
        ragged_descriptor(q, 64, d), ragged_descriptor(k, 128, d), ragged_descriptor(v, 128, d),
        ragged_descriptor(dout, 64, d), TensorDescriptor.from_tensor(accumulated.view(-1, d), [64, d]),
        ragged_descriptor(dk, 64, d), ragged_descriptor(dv, 64, d), rows.lse2, rows.delta, rows.count, dq_rows,
        tiles.records, tiles.counts, torch.zeros(1, dtype=torch.int32, device=q.device), problem.num_kv_heads,
        problem.group_size, problem.sm_scale, max(problem.sm_scale * LOG2_E, TINY_SCALE),
        D=d, STAGES=2, WITH_DQ=with_dq, BROADCAST_Q=problem.broadcast_q,
        HAS_LO=problem.band.has_lo, HAS_HI=problem.band.has_hi, REGISTERS=240, num_warps=4, num_stages=1,
    )
    return accumulated if with_dq else None


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-backward-d128", 128, 2, True, False, False, 1000),
        _compile_config("hopper-backward-d128-causal", 128, 2, True, False, True, 1500),
        _compile_config("hopper-backward-d128-window", 128, 2, True, True, True, 1900),
        _compile_config("hopper-backward-d128-no-dq", 128, 2, False, False, False, 250),
        _compile_config("hopper-backward-d64", 64, 2, True, False, False, 0),
    ]


def _compile_config(name, d, stages, with_dq, has_lo, has_hi, spills):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.backward:backward_kernel",
        signature=dict(desc_q=desc.format(64, d), desc_k=desc.format(128, d), desc_v=desc.format(128, d),
                       desc_do=desc.format(64, d), desc_dq=f"tensordesc<fp32[64, {d}]>", desc_dk=desc.format(64, d),
                       desc_dv=desc.format(64, d), lse2="*fp32", delta="*fp32", padded_rows="i32", dq_rows="i32",
                       records="*i32", counts="*i32", counter="*i32", kv_heads="i32", group="i32", scale="fp32",
                       scale_log2="fp32"),
        constexprs=dict(D=d, STAGES=stages, WITH_DQ=with_dq, BROADCAST_Q=False, HAS_LO=has_lo,
                        HAS_HI=has_hi, REGISTERS=240),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        max_spill_bytes=spills,
        roles=("consumer", "consumer", "producer"),
    )
