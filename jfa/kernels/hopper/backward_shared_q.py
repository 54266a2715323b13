"""Backward for shared queries (broadcast_q, at most 128 of them): dQ stays on the chip across all sequences of a head.

Every sequence has the same queries, so the general backward would add B times into the same few rows of dQ. Here one tile of
queries completes the gradients of a key block: dK and dV of 64 keys are written once, straight away, and dQ^T is accumulated
in registers over every key block of every sequence that a program visits. A program keeps one head (grid column) with its Q
resident, and at the end leaves one partial dQ; the partials of a head are summed in order afterwards.

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV = P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK = dS^T Q          dQ^T += K^T dS^T

Four roles. Two *key groups* take 64 keys in turn, each against all queries at once and one product after another, so that a
thread never holds more than two accumulators. They share nothing but their input and drift apart: one multiplies while the other
is busy with exponentials and stores. Each hands its dS^T through shared memory to the *query group*, which does nothing but
hold dQ^T and add to it. The producer brings keys, values and output gradients.

The accumulators of S^T and dP^T start from -lse/scale and -delta: no row constants stay in registers, nothing is subtracted.

Shared memory is what limits the rings, so buffers serve twice: dV leaves through the buffer of its own values, which no product
reads any more, and dK through that of its dS^T.

Tiles are runs of TILE_KEYS keys of a sequence (longer ones are cut: no sequence is too long for one program), drawn from a
queue; with STATIC they are dealt out beforehand, so that every program sums the same blocks in the same order in every run.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.ragged import ragged_box, ragged_descriptor
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.old import load_box, store_gradient
from jfa.kernels.hopper.configs import EMULATED_SMS
from jfa.kernels.hopper.prepare import PaddedRows
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import TileList, key_tiles

BLOCK = TILE_KEYS = 1024  # keys of a tile: cut so that no program is left with a mega-sequence, at the price of reloading dO
KEYS = tl.constexpr(64)  # keys of a block: the M of a wgmma
GROUPS = tl.constexpr(2)  # key groups


@triton.jit
def load_output_gradients(desc_do, do_ring, slot, parity, out_begin, len_q, head, row_delta, row_lse, LQ: tl.constexpr,
                          BYTES: tl.constexpr):
    """A tile's dO, and on the same barrier delta and lse2 of its rows."""
    do_tiles, fulls, empties, delta_tiles, lse_tiles = do_ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES + 2 * 4 * LQ)
    tlx.async_descriptor_load(desc_do, do_tiles[slot], ragged_box(out_begin, len_q, 0, head), fulls[slot])
    tlx.async_load(row_delta, delta_tiles[slot], bulk=True, barrier=fulls[slot])
    tlx.async_load(row_lse, lse_tiles[slot], bulk=True, barrier=fulls[slot])


@triton.jit
def tile_rows(tile, TILE: tl.constexpr):
    """(first key, end of the keys, keys that count) of a tile. Keys of no sequence count for nothing: they may hold anything."""
    q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
    seen = len_kv
    if len_q == 0:
        seen = 0
    return row0, min(row0 + TILE, len_kv), seen


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
        first, end, seen = tile_rows(tile, TILE)
        slot, parity = ring_slot(turn, DO_STAGES)
        load_output_gradients(desc_do, do_ring, slot, parity, out_begin, len_q, head, delta + constants + pad_begin,
                              lse2 + constants + pad_begin, LQ, SIZE * LQ * D)
        for row in range(first, end, KEYS):
            slot, parity = ring_slot(count, K_STAGES)
            load_box(desc_k, k_ring, slot, parity, kv_begin, seen, row, head, SIZE * KEYS * D)
            slot, parity = ring_slot(count, V_STAGES)
            load_box(desc_v, v_ring, slot, parity, kv_begin, seen, row, head, SIZE * KEYS * D)
            count += 1
        turn += 1
        item = draw_item(counter, queue, turn, STATIC)


@triton.jit
def row_constants(tile, LQ: tl.constexpr):
    """[1, LQ] of a buffer, read in pieces of 64: a read of fewer elements than threads takes on the layout of its use."""
    if LQ == 128:
        low = tlx.local_load(tlx.local_slice(tile, [0], [64]))
        high = tlx.local_load(tlx.local_slice(tile, [64], [64]))
        return tl.join(low, high).permute(1, 0).reshape([LQ])[None, :]
    else:
        return tlx.local_load(tile)[None, :]


@triton.jit
def key_block(desc_dk, desc_dv, q_tile, k_ring, v_ring, do_tile, delta_tile, lse_tile, ds_ring, stage, group, count, use,
              row, kv_begin, len_kv, seen, lo, hi, head, scale, scale_log2, LQ: tl.constexpr, D: tl.constexpr,
              K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """The count-th block, this group's use-th: its dS^T goes to the query group, its dV and dK leave."""
    k_tiles, k_fulls, k_empties = k_ring
    v_tiles, v_fulls, v_empties = v_ring
    ds_tiles, ds_fulls, ds_empties = ds_ring
    k, k_parity = ring_slot(count, K_STAGES)
    v, v_parity = ring_slot(count, V_STAGES)
    tlx.barrier_wait(k_fulls[k], k_parity)
    start = tl.zeros([KEYS, LQ], tl.float32) + row_constants(lse_tile, LQ) * (-1.0 / scale_log2)
    scores = tlx.async_dot(k_tiles[k], tlx.local_trans(q_tile), start)
    tlx.barrier_wait(v_fulls[v], v_parity)
    start = tl.zeros([KEYS, LQ], tl.float32) - row_constants(delta_tile, LQ)
    dp = tlx.async_dot(v_tiles[v], tlx.local_trans(do_tile), start)
    scores = tlx.async_dot_wait(1, scores)
    p = tl.math.exp2(scores * scale_log2)
    keys = row + tl.arange(0, KEYS)
    p = tl.where(in_band(tl.arange(0, LQ)[None, :], keys[:, None], seen, lo, hi, HAS_LO, HAS_HI), p, 0.0).to(q_tile.dtype)
    dp = tlx.async_dot_wait(0, dp)
    ds = (p.to(tl.float32) * dp).to(q_tile.dtype)
    dv = tlx.async_dot(p, do_tile)
    tlx.async_descriptor_store_wait(0)  # the previous dK has left this buffer
    tlx.local_store(ds_tiles[group], ds)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds_fulls[group], 1)
    dv = tlx.async_dot_wait(0, dv)
    tlx.local_store(v_tiles[v], dv.to(q_tile.dtype))
    dk = tlx.async_dot(ds, q_tile)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dv, v_tiles[v], ragged_box(kv_begin, len_kv, row, head))
    dk = tlx.async_dot_wait(0, dk) * scale
    tlx.barrier_wait(ds_empties[group], use & 1)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(v_empties[v], 1)
    store_gradient(desc_dk, stage, dk, kv_begin, len_kv, row, head)


@triton.jit
def key_group(desc_dk, desc_dv, records, num_tiles, scale, scale_log2, queue, q_ring, k_ring, v_ring, do_ring, ds_ring, stages,
              group, LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr, DO_STAGES: tl.constexpr,
              TILE: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Every second block of 64 keys: scores, their gradients, dV and dK."""
    q_tiles, q_fulls, q_empties = q_ring
    do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles = do_ring
    head = tl.program_id(1)
    tlx.barrier_wait(q_fulls[0], 0)
    turn = 0
    count = 0
    use = 0
    item = receive_item(queue, turn)
    while item < num_tiles:
        tile, column = find_tile(records, num_tiles, 1, item, True)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, end, seen = tile_rows(tile, TILE)
        slot, parity = ring_slot(turn, DO_STAGES)
        tlx.barrier_wait(do_fulls[slot], parity)
        skip = (count + group) % GROUPS  # blocks alternate across tiles, too
        for row in range(first + skip * KEYS, end, GROUPS * KEYS):
            at = count + (row - first) // KEYS
            # at >> 30 is 0; the compiler does not know, and so does not keep the addresses of Q's parts in registers
            key_block(desc_dk, desc_dv, q_tiles[at >> 30], k_ring, v_ring, do_tiles[slot], delta_tiles[slot], lse_tiles[slot],
                      ds_ring, stages[group], group, at, use, row, kv_begin, len_kv, seen, lo, hi, head, scale, scale_log2,
                      LQ, D, K_STAGES, V_STAGES, HAS_LO, HAS_HI)
            use += 1
        tlx.barrier_arrive(do_empties[slot], 1)
        count += tl.cdiv(end - first, KEYS)
        turn += 1
        item = receive_item(queue, turn)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def query_group(desc_dq, records, num_tiles, heads, queue, k_ring, do_ring, ds_ring, dq_stages,
                LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, DO_STAGES: tl.constexpr, TILE: tl.constexpr):
    """dQ^T [D, LQ] += K^T dS^T over all blocks; at the end it leaves the program's partial."""
    k_tiles, k_fulls, k_empties = k_ring
    ds_tiles, ds_fulls, ds_empties = ds_ring
    do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles = do_ring
    dq = tl.zeros([D, LQ], tl.float32)
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    while item < num_tiles:
        tile, column = find_tile(records, num_tiles, 1, item, True)
        first, end, seen = tile_rows(tile, TILE)
        for _ in range(first, end, KEYS):
            k, k_parity = ring_slot(count, K_STAGES)
            group, parity = ring_slot(count, GROUPS)
            tlx.barrier_wait(k_fulls[k], k_parity)
            tlx.barrier_wait(ds_fulls[group], parity)
            dq = tlx.async_dot(tlx.local_trans(k_tiles[k]), ds_tiles[group], dq)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(ds_empties[group], 1)
            tlx.barrier_arrive(k_empties[k], 1)
            count += 1
        turn += 1
        item = receive_item(queue, turn)
    for slot in tl.static_range(DO_STAGES):  # dQ leaves through the buffers of dO, once nobody needs one any more
        last, parity = ring_slot(tl.maximum(turn - 1 - slot, 0), DO_STAGES)
        tlx.barrier_wait(do_empties[last], parity, pred=turn > slot)
    tlx.local_store(dq_stages[0], dq)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, dq_stages[0], [(tl.program_id(0) * heads + tl.program_id(1)) * D, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "rows_q", "heads"])
def backward_shared_q_kernel(desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, lse2, delta, padded_rows, rows_q,
                             records, counts, counters, heads, scale, scale_log2,
                             LQ: tl.constexpr, D: tl.constexpr, K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
                             DO_STAGES: tl.constexpr, TILE: tl.constexpr, STATIC: tl.constexpr, HAS_LO: tl.constexpr,
                             HAS_HI: tl.constexpr, KEY_REGISTERS: tl.constexpr, QUERY_REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs a head, H).

    desc_q, desc_do: ragged, boxes [LQ, D]; desc_k, desc_v, desc_dk, desc_dv: ragged, [64, D]; desc_dq: plain, fp32
    [programs * H * D, LQ], boxes [D, LQ]. lse2, delta [H, padded_rows] fp32.
    records, counts: a list of TILE keys a tile; counters: one int32 of 0 a head.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    k_tiles = tlx.local_alloc((KEYS, D), DTYPE, K_STAGES)
    v_tiles = tlx.local_alloc((KEYS, D), DTYPE, V_STAGES)
    q_tiles = tlx.local_alloc((LQ, D), DTYPE, 1)
    do_tiles = tlx.local_alloc((LQ, D), DTYPE, DO_STAGES)
    dq_stages = tlx.local_alloc((D, LQ), tl.float32, 1, reuse=do_tiles)
    ds_tiles = tlx.local_alloc((KEYS, LQ), DTYPE, GROUPS)
    if LQ == D:
        stages = tlx.local_alloc((KEYS, D), DTYPE, GROUPS, reuse=ds_tiles)
    else:
        stages = tlx.local_alloc((KEYS, D), DTYPE, GROUPS)
    delta_tiles = tlx.local_alloc((LQ,), tl.float32, DO_STAGES)
    lse_tiles = tlx.local_alloc((LQ,), tl.float32, DO_STAGES)
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    k_ring = (k_tiles, tlx.alloc_barriers(K_STAGES, arrive_count=1), tlx.alloc_barriers(K_STAGES, arrive_count=1))
    v_ring = (v_tiles, tlx.alloc_barriers(V_STAGES, arrive_count=1), tlx.alloc_barriers(V_STAGES, arrive_count=1))
    q_ring = (q_tiles, tlx.alloc_barriers(1, arrive_count=1), tlx.alloc_barriers(1, arrive_count=1))
    do_fulls = tlx.alloc_barriers(DO_STAGES, arrive_count=1)
    do_empties = tlx.alloc_barriers(DO_STAGES, arrive_count=GROUPS)
    do_ring = (do_tiles, do_fulls, do_empties, delta_tiles, lse_tiles)
    ds_ring = (ds_tiles, tlx.alloc_barriers(GROUPS, arrive_count=1), tlx.alloc_barriers(GROUPS, arrive_count=1))
    queue = (drawn, tlx.alloc_barriers(SLOTS, arrive_count=1), tlx.alloc_barriers(SLOTS, arrive_count=GROUPS + 1))
    gdc_wait()  # from here on the list and the row constants are read
    num_tiles = tl.load(counts + 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # key group 0
            key_group(desc_dk, desc_dv, records, num_tiles, scale, scale_log2, queue, q_ring, k_ring, v_ring, do_ring, ds_ring,
                      stages, 0, LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=KEY_REGISTERS):  # key group 1
            key_group(desc_dk, desc_dv, records, num_tiles, scale, scale_log2, queue, q_ring, k_ring, v_ring, do_ring, ds_ring,
                      stages, 1, LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=QUERY_REGISTERS):  # query group
            query_group(desc_dq, records, num_tiles, heads, queue, k_ring, do_ring, ds_ring, dq_stages,
                        LQ, D, K_STAGES, DO_STAGES, TILE)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(desc_q, desc_k, desc_v, desc_do, lse2, delta, padded_rows, rows_q, records, num_tiles,
                    counters + tl.program_id(1), queue, q_ring, k_ring, v_ring, do_ring,
                    LQ, D, K_STAGES, V_STAGES, DO_STAGES, TILE, STATIC)


@triton.jit(do_not_specialize=["programs", "heads", "rows_q"])
def sum_kernel(partials, dq, programs, heads, rows_q, scale, LQ: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
               PROGRAMS: tl.constexpr, ROWS: tl.constexpr):
    """One program ROWS of the head dimension and a head: dq [rows_q, H, D] = scale * the partials' sum.

    partials: [programs, H, D_BLOCK, LQ]. All partials of an element are read at once and added in a tree that is always the same.
    """
    gdc_wait()
    head = tl.program_id(1)
    n = tl.arange(0, PROGRAMS)[:, None, None]
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, LQ)
    at = ((n * heads + head) * D_BLOCK + d[None, :, None]) * LQ + i[None, None, :]
    total = tl.sum(tl.load(partials + at, mask=n < programs, other=0.0), 0) * scale
    to = dq + (i[None, :] * heads + head) * D + d[:, None]
    tl.store(to, total.to(dq.dtype.element_ty), mask=(i < rows_q)[None, :] & (d < D)[:, None])


def applies(problem: Problem) -> bool:
    """Whether this kernel can do the problem's backward; the general one can do every one."""
    return (problem.broadcast_q and problem.rows_q <= 128 and problem.group_size == 1
            and padded_head_dim(problem.head_dim) == padded_head_dim(problem.head_dim_v) <= 128)


def tile_list(problem: Problem) -> TileList:
    """The list of tiles that :func:`launch` walks."""
    return key_tiles(problem, BLOCK)


def launch(problem: Problem, tiles: TileList, rows: PaddedRows, q, k, v, dout, dk, dv) -> torch.Tensor:
    """Descriptors and grid; returns dQ [Lq, H, D] in q's dtype. Everything is TMA-ready."""
    d, heads = padded_head_dim(problem.head_dim), problem.num_heads
    lq = 64 if problem.rows_q <= 64 else 128
    grid = (max(1, num_sms(problem.device, EMULATED_SMS) // heads), heads)
    partials = torch.empty(grid[0], heads, d, lq, dtype=torch.float32, device=q.device)
    stages = 4 if lq * d < 128 * 128 else 3
    _variant(lq, d, stages, problem.deterministic, problem.band.has_lo, problem.band.has_hi).launch(
        problem.device, grid,
        ragged_descriptor(q, lq, d), ragged_descriptor(k, 64, d), ragged_descriptor(v, 64, d), ragged_descriptor(dout, lq, d),
        TensorDescriptor.from_tensor(partials.view(-1, lq), [d, lq]), ragged_descriptor(dk, 64, d), ragged_descriptor(dv, 64, d),
        rows.lse2, rows.delta, rows.count, problem.rows_q, tiles.records, tiles.counts,
        tiles.counters(heads), heads, problem.sm_scale,
        scale_log2(problem.sm_scale),
    )
    dq = torch.empty(problem.rows_q, heads, problem.head_dim, dtype=q.dtype, device=q.device)
    _sum_variant(lq, problem.head_dim, d, triton.next_power_of_2(grid[0])).launch(
        problem.device, (d // 2, heads), partials, dq, grid[0], heads, problem.rows_q, problem.sm_scale
    )
    return dq


@cache
def _variant(lq: int, d: int, stages: int, static: bool, has_lo: bool, has_hi: bool) -> Variant:
    return Variant(
        backward_shared_q_kernel, LQ=lq, D=d, K_STAGES=stages, V_STAGES=stages, DO_STAGES=2, TILE=TILE_KEYS, STATIC=static,
        HAS_LO=has_lo, HAS_HI=has_hi, KEY_REGISTERS=160, QUERY_REGISTERS=160, num_warps=4, num_stages=1, launch_pdl=True,
    )


@cache
def _sum_variant(lq: int, dim: int, columns: int, programs: int) -> Variant:
    return Variant(sum_kernel, LQ=lq, D=dim, D_BLOCK=columns, PROGRAMS=programs, ROWS=2, launch_pdl=True)


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-backward-shared-q64-d128", 64, 128, 4, 0),
        _compile_config("hopper-backward-shared-q128-d128", 128, 128, 3, 20),
        _compile_config("hopper-backward-shared-q64-d64", 64, 64, 4, 0),
        _compile_config("hopper-backward-shared-q64-d128-causal", 64, 128, 4, 0, has_hi=True),
        _compile_config("hopper-backward-shared-q64-d128-window", 64, 128, 4, 0, has_lo=True, has_hi=True),
        _compile_config("hopper-backward-shared-q128-d128-causal", 128, 128, 3, 700, has_hi=True),
        _compile_config("hopper-backward-shared-q128-d128-window", 128, 128, 3, 1604, has_lo=True, has_hi=True),
    ]


def _compile_config(name, lq, d, stages, spills, has_lo=False, has_hi=False):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.backward_shared_q:backward_shared_q_kernel",
        signature=dict(desc_q=desc.format(lq, d), desc_k=desc.format(64, d), desc_v=desc.format(64, d),
                       desc_do=desc.format(lq, d), desc_dq=f"tensordesc<fp32[{d}, {lq}]>", desc_dk=desc.format(64, d),
                       desc_dv=desc.format(64, d), lse2="*fp32", delta="*fp32", padded_rows="i32", rows_q="i32", records="*i32",
                       counts="*i32", counters="*i32", heads="i32", scale="fp32", scale_log2="fp32"),
        constexprs=dict(LQ=lq, D=d, K_STAGES=stages, V_STAGES=stages, DO_STAGES=2, TILE=1024,
                        STATIC=False, HAS_LO=has_lo, HAS_HI=has_hi, KEY_REGISTERS=160, QUERY_REGISTERS=160),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        max_spill_bytes=spills,
        roles=("key group", "key group", "query group", "producer"),
    )
