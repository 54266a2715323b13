"""Jagged attention forward for sm_90: a producer brings tiles by TMA, consumer warp groups run wgmma and the softmax.

    query [total_q, H, D] --ragged TMA--> q tiles  \\
    key   [total_kv, H_kv, D]  ------->   k ring    > consumers --ragged TMA--> out [rows_out, H, Dv], lse [H, rows_out]
    value [total_kv, H_kv, Dv] ------->   v ring   /

A consumer is a warp group with 64 query rows. A CTA has HEADS * PARTS of them:

* PARTS = 2, HEADS = 1: a tile is 128 queries of one head. The two consumers share every key and value block and take turns on the
  tensor cores, one computing its softmax while the other multiplies. The choice for long queries.
* PARTS = 1, HEADS = 2: a tile is 64 queries of two neighbouring heads, each consumer with its own ring. The choice for at most 64
  queries a sequence: then memory is the limit, and neighbouring heads lie side by side there.

The grid is persistent and draws tiles from a queue, longest first (jfa.kernels.hopper.queue). With RESIDENT_Q every tile of a
program has the same queries (broadcast_q with one tile of them): they are loaded once.

Within a tile key blocks run from the last to the first, so the block that hangs over the sequence's end is the first one, which is
masked in any case; see jfa.kernels.common.band for the peeled loops.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band, key_blocks
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_box, ragged_descriptor
from jfa.kernels.common.softmax import softmax_end, softmax_step
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import EMULATED_SMS, ForwardConfig, forward_config
from jfa.kernels.hopper.queue import SLOTS, draw_item, find_tile, receive_item, ring_slot
from jfa.kernels.hopper.tiles import Lists, TileList, query_tiles

ROWS = tl.constexpr(64)  # query rows of one consumer: the M of a wgmma


@triton.jit
def wait_turn(part, PARTS: tl.constexpr):
    """Ping-pong: block until the other consumer of the tile has issued its scores."""
    if PARTS == 2:
        if part == 0:
            tlx.named_barrier_wait(9, 256)
        else:
            tlx.named_barrier_wait(10, 256)


@triton.jit
def pass_turn(part, PARTS: tl.constexpr):
    """Ping-pong: let the other consumer issue its scores."""
    if PARTS == 2:
        if part == 0:
            tlx.named_barrier_arrive(10, 256)
        else:
            tlx.named_barrier_arrive(9, 256)


@triton.jit
def load_box(desc, ring, slot, parity, begin, length, row, head, BYTES: tl.constexpr):
    """One box into one buffer of a ring, once its readers have left."""
    tiles, fulls, empties = ring
    tlx.barrier_wait(empties[slot], parity ^ 1)
    tlx.barrier_expect_bytes(fulls[slot], BYTES)
    tlx.async_descriptor_load(desc, tiles[slot], ragged_box(begin, length, row, head), fulls[slot])


@triton.jit
def load_keys_values(desc_k, desc_v, k_ring, v_ring, count, kv_begin, len_kv, row, first_head, group, SIZE: tl.constexpr,
                     D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr):
    """The count-th key block and value block of every head of the tile."""
    slot, parity = ring_slot(count, STAGES)
    for h in tl.static_range(HEADS):
        load_box(desc_k, k_ring, slot + h * STAGES, parity, kv_begin, len_kv, row, (first_head + h) // group, SIZE * BLOCK_N * D)
    for h in tl.static_range(HEADS):
        load_box(desc_v, v_ring, slot + h * STAGES, parity, kv_begin, len_kv, row, (first_head + h) // group, SIZE * BLOCK_N * DV)


@triton.jit
def produce(desc_q, desc_k, desc_v, rows_q, records, num_tiles, items, heads, group, counter, queue, q_ring, k_ring, v_ring,
            D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, Q_STAGES: tl.constexpr,
            HEADS: tl.constexpr, PARTS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Producer: of every tile the queries, then the key and value blocks from last to first."""
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    CONSUMERS: tl.constexpr = HEADS * PARTS
    turn = 0
    count = 0
    item = draw_item(counter, queue, turn, False)
    while item < items:
        tile, column = find_tile(records, num_tiles, heads // HEADS, item, RESIDENT_Q)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        first, bulk_begin, bulk_end, end = key_blocks(row0, PARTS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        first_head = column * HEADS
        if RESIDENT_Q:
            q_begin = 0
            len_q = rows_q
        if not RESIDENT_Q or turn == 0:
            slot, parity = ring_slot(turn, Q_STAGES)
            for c in tl.static_range(CONSUMERS):
                load_box(desc_q, q_ring, slot * CONSUMERS + c, parity, q_begin, len_q, row0 + c % PARTS * ROWS,
                         first_head + c // PARTS, SIZE * ROWS * D)
        for back in range(end - first):
            load_keys_values(desc_k, desc_v, k_ring, v_ring, count + back, kv_begin, len_kv, (end - 1 - back) * BLOCK_N,
                             first_head, group, SIZE, D, DV, BLOCK_N, STAGES, HEADS)
        count += end - first
        turn += 1
        item = draw_item(counter, queue, turn, False)


@triton.jit
def score_block(q_tile, k_ring, base, count, part, STAGES: tl.constexpr, PARTS: tl.constexpr):
    """Issues the scores [ROWS, BLOCK_N] of the count-th key block; they are not waited for."""
    tiles, fulls, empties = k_ring
    slot, parity = ring_slot(count, STAGES)
    tlx.barrier_wait(fulls[base + slot], parity)
    wait_turn(part, PARTS)
    scores = tlx.async_dot(q_tile, tlx.local_trans(tiles[base + slot]))
    pass_turn(part, PARTS)
    return scores


@triton.jit
def accumulate_block(p, acc, v_ring, base, count, STAGES: tl.constexpr):
    """Issues acc += p V of the count-th value block; not waited for."""
    tiles, fulls, empties = v_ring
    slot, parity = ring_slot(count, STAGES)
    tlx.barrier_wait(fulls[base + slot], parity)
    return tlx.async_dot(p, tiles[base + slot], acc)


@triton.jit
def release(ring, base, count, STAGES: tl.constexpr):
    """Gives the count-th buffer of a ring back to the producer."""
    tiles, fulls, empties = ring
    tlx.barrier_arrive(empties[base + count % STAGES], 1)


@triton.jit
def attend_block(q_tile, k_ring, v_ring, base, part, acc, row_max, row_sum, p, count, rows, block, len_kv, lo, hi, scale_log2,
                 BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                 HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASKED: tl.constexpr):
    """One key block in the steady state: its scores run beside the previous block's p V, its softmax behind them."""
    scores = score_block(q_tile, k_ring, base, count, part, STAGES, PARTS)
    acc = accumulate_block(p, acc, v_ring, base, count - 1, STAGES)
    scores = tlx.async_dot_wait(1, scores)
    release(k_ring, base, count, STAGES)
    if MASKED:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = in_band(rows[:, None], keys[None, :], len_kv, lo, hi, HAS_LO, HAS_HI)
        scores = tl.where(valid, scores, float("-inf"))
    next_p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, HAS_LO or HAS_HI)
    acc = tlx.async_dot_wait(0, acc)
    release(v_ring, base, count - 1, STAGES)
    return acc * alpha[:, None], row_max, row_sum, next_p.to(p.dtype), count + 1


@triton.jit
def attend_tile(q_tile, k_ring, v_ring, base, part, count, rows, blocks, len_kv, lo, hi, scale_log2, DTYPE: tl.constexpr,
                DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """All key blocks of 64 query rows but the last p V. Returns (acc, row_max, row_sum, p, count), acc not yet divided."""
    first, bulk_begin, bulk_end, end = blocks
    scores = score_block(q_tile, k_ring, base, count, part, STAGES, PARTS)
    scores = tlx.async_dot_wait(0, scores)
    release(k_ring, base, count, STAGES)
    keys = (end - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = in_band(rows[:, None], keys[None, :], len_kv, lo, hi, HAS_LO, HAS_HI)
    scores = tl.where(valid, scores, float("-inf"))
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, True)
    p = p.to(DTYPE)
    acc = tl.zeros([ROWS, DV], tl.float32)
    count += 1
    if HAS_HI:
        for back in range(1, end - bulk_end):
            acc, row_max, row_sum, p, count = attend_block(
                q_tile, k_ring, v_ring, base, part, acc, row_max, row_sum, p, count, rows, end - 1 - back, len_kv, lo, hi,
                scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, True)
    for _ in range(min(bulk_end, end - 1) - bulk_begin):
        acc, row_max, row_sum, p, count = attend_block(
            q_tile, k_ring, v_ring, base, part, acc, row_max, row_sum, p, count, rows, 0, len_kv, lo, hi,
            scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, False)
    if HAS_LO:
        left = min(bulk_begin, end - 1)
        for back in range(left - first):
            acc, row_max, row_sum, p, count = attend_block(
                q_tile, k_ring, v_ring, base, part, acc, row_max, row_sum, p, count, rows, left - 1 - back, len_kv, lo, hi,
                scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, True)
    return acc, row_max, row_sum, p, count


@triton.jit
def store_tile(desc_o, o_tile, lse, acc, row_max, row_sum, out_begin, len_q, row0, rows, head, rows_out):
    """Epilogue of 64 rows: divide, write the log-sum-exp, and leave through shared memory by TMA, clipped at the sequence's end."""
    out, row_lse = softmax_end(acc, row_max, row_sum)
    tl.store(lse + head.to(tl.int64) * rows_out + out_begin + rows, row_lse, mask=rows < len_q)
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(o_tile, out.to(o_tile.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_o, o_tile, ragged_box(out_begin, len_q, row0, head))


@triton.jit
def consume(desc_o, lse, rows_out, records, num_tiles, items, heads, scale_log2, queue, q_ring, k_ring, v_ring, o_tiles, consumer,
            DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, Q_STAGES: tl.constexpr, HEADS: tl.constexpr,
            PARTS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 query rows of every tile: scores, softmax, p V, epilogue. The next tile is looked up before the epilogue."""
    q_tiles, q_fulls, q_empties = q_ring
    part: tl.constexpr = consumer % PARTS
    base: tl.constexpr = consumer // PARTS * STAGES
    if PARTS == 2 and part == 1:
        tlx.named_barrier_arrive(9, 256)
    turn = 0
    count = 0
    item = receive_item(queue, turn)
    tile, column = find_tile(records, num_tiles, heads // HEADS, item, RESIDENT_Q)
    while item < items:
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi, pad_begin = tile
        blocks = key_blocks(row0, PARTS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        head = column * HEADS + consumer // PARTS
        mine = row0 + part * ROWS
        rows = mine + tl.arange(0, ROWS)
        slot, parity = ring_slot(turn, Q_STAGES)
        q = slot * HEADS * PARTS + consumer
        if not RESIDENT_Q or turn == 0:
            tlx.barrier_wait(q_fulls[q], parity)
        acc, row_max, row_sum, p, count = attend_tile(
            q_tiles[q], k_ring, v_ring, base, part, count, rows, blocks, len_kv, lo, hi, scale_log2, o_tiles.dtype,
            DV, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI)
        if not RESIDENT_Q:
            tlx.barrier_arrive(q_empties[q], 1)
        acc = accumulate_block(p, acc, v_ring, base, count - 1, STAGES)
        turn += 1
        item = receive_item(queue, turn)
        tile, column = find_tile(records, num_tiles, heads // HEADS, item, RESIDENT_Q)
        acc = tlx.async_dot_wait(0, acc)
        release(v_ring, base, count - 1, STAGES)
        store_tile(desc_o, o_tiles[consumer], lse, acc, row_max, row_sum, out_begin, len_q, mine, rows, head, rows_out)
    if PARTS == 2 and part == 0:
        tlx.named_barrier_wait(9, 256)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["rows_q", "rows_out", "heads", "group"])
def forward_kernel(desc_q, desc_k, desc_v, desc_o, lse, rows_q, rows_out, records, counts, counters, heads, group, scale_log2,
                   D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, Q_STAGES: tl.constexpr,
                   HEADS: tl.constexpr, PARTS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
                   REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (programs,), or (programs, H // HEADS) with resident queries.

    desc_q, desc_k, desc_v, desc_o: ragged descriptors of boxes [64, D], [BLOCK_N, D], [BLOCK_N, DV], [64, DV].
    lse [H, rows_out] fp32; records, counts: a list of PARTS * 64 queries a tile (jfa.kernels.hopper.tiles);
    counters: one int32 of 0 for each grid column. Buffers are given back through warp barriers: every thread arrives by
    itself, which saves the warp group two synchronisations a block.
    """
    CONSUMERS: tl.constexpr = HEADS * PARTS
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    o_tiles = tlx.local_alloc((ROWS, DV), DTYPE, CONSUMERS)
    q_tiles = tlx.local_alloc((ROWS, D), DTYPE, Q_STAGES * CONSUMERS)
    q_fulls = tlx.alloc_barriers(Q_STAGES * CONSUMERS, arrive_count=1)
    q_empties = tlx.alloc_warp_barrier(Q_STAGES * CONSUMERS, num_warps=4, num_arrivals=1)
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, HEADS * STAGES)
    k_fulls = tlx.alloc_barriers(HEADS * STAGES, arrive_count=1)
    k_empties = tlx.alloc_warp_barrier(HEADS * STAGES, num_warps=4, num_arrivals=PARTS)
    v_tiles = tlx.local_alloc((BLOCK_N, DV), DTYPE, HEADS * STAGES)
    v_fulls = tlx.alloc_barriers(HEADS * STAGES, arrive_count=1)
    v_empties = tlx.alloc_warp_barrier(HEADS * STAGES, num_warps=4, num_arrivals=PARTS)
    drawn = tlx.local_alloc((1,), tl.int32, SLOTS)
    drawn_fulls = tlx.alloc_barriers(SLOTS, arrive_count=1)
    drawn_empties = tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS)
    q_ring = (q_tiles, q_fulls, q_empties)
    k_ring = (k_tiles, k_fulls, k_empties)
    v_ring = (v_tiles, v_fulls, v_empties)
    queue = (drawn, drawn_fulls, drawn_empties)
    gdc_wait()  # from here on the list is read
    num_tiles = tl.load(counts + 1)
    items = num_tiles
    if not RESIDENT_Q:
        items = num_tiles * (heads // HEADS)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer 0
            consume(desc_o, lse, rows_out, records, num_tiles, items, heads, scale_log2, queue, q_ring, k_ring, v_ring, o_tiles, 0,
                    DV, BLOCK_N, STAGES, Q_STAGES, HEADS, PARTS, RESIDENT_Q, HAS_LO, HAS_HI)
        if CONSUMERS > 1:
            with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS - 1):  # the other consumers
                consume(desc_o, lse, rows_out, records, num_tiles, items, heads, scale_log2, queue, q_ring, k_ring, v_ring, o_tiles,
                        1 + tlx.async_task_replica_id(), DV, BLOCK_N, STAGES, Q_STAGES, HEADS, PARTS, RESIDENT_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            if RESIDENT_Q:
                counters += tl.program_id(1)
            produce(desc_q, desc_k, desc_v, rows_q, records, num_tiles, items, heads, group, counters, queue, q_ring, k_ring,
                    v_ring, D, DV, BLOCK_N, STAGES, Q_STAGES, HEADS, PARTS, RESIDENT_Q, HAS_LO, HAS_HI)


def forward(problem: Problem, q, k, v, plan=None, config: ForwardConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows_out, H, Dv], lse [H, rows_out]): see jfa.kernels.base. ``plan``: [records, counts, ...] of :func:`tile_list`."""
    config = config or forward_config(problem)
    out, lse = _outputs(problem, q)
    if out.numel() == 0:
        return out, lse
    if problem.num_batches == 0 or problem.rows_kv == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    if isinstance(plan, Lists):
        tiles = plan.queries
    else:
        tiles = TileList(*plan[:2]) if plan else tile_list(problem, config)
    scale = problem.sm_scale
    if scale < 0:
        q, scale = -q, -scale
    launch(problem, config, tiles, *(make_tma_ready(x) for x in (q, k, v)), scale, out, lse)
    return out.contiguous(), lse


def tile_list(problem: Problem, config: ForwardConfig | None = None) -> TileList:
    """The list of tiles that :func:`forward` walks."""
    config = config or forward_config(problem)
    return query_tiles(problem, config.block_m)


def launch(problem: Problem, config: ForwardConfig, tiles: TileList, q, k, v, scale: float, out, lse) -> None:
    """Descriptors and grid. Everything is TMA-ready and not empty; scale >= 0."""
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    programs = num_sms(problem.device, EMULATED_SMS)
    columns = problem.num_heads // config.heads
    if config.resident_q:
        grid = (max(1, programs // columns), columns)
    else:
        grid = (min(programs, tiles.records.shape[0] * columns),)
    variant = _variant(config, d, dv, problem.band.has_lo, problem.band.has_hi)
    variant.launch(
        problem.device, grid,
        ragged_descriptor(q, 64, d), ragged_descriptor(k, config.block_n, d), ragged_descriptor(v, config.block_n, dv),
        ragged_descriptor(out, 64, dv), lse, problem.rows_q, problem.rows_out, tiles.records, tiles.counts,
        tiles.counters(columns), problem.num_heads, problem.group_size, scale_log2(scale),
    )


@cache
def _variant(config: ForwardConfig, d: int, dv: int, has_lo: bool, has_hi: bool) -> Variant:
    return Variant(
        forward_kernel, D=d, DV=dv, BLOCK_N=config.block_n, STAGES=config.stages, Q_STAGES=config.q_stages, HEADS=config.heads,
        PARTS=config.parts, RESIDENT_Q=config.resident_q, HAS_LO=has_lo, HAS_HI=has_hi, REGISTERS=config.registers,
        num_warps=4, num_stages=1, launch_pdl=True,
    )


def _outputs(problem: Problem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, cleared where slots may leave rows out."""
    out = empty_tma_ready(q.new_empty(problem.rows_out, problem.num_heads, 0), problem.head_dim_v)
    lse = q.new_empty(problem.num_heads, problem.rows_out, dtype=torch.float32)
    if problem.output_offset is not None:
        out.zero_()
        lse.fill_(float("-inf"))
    return out, lse


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-forward-d128", 128, 128, 2, 1, 2, False, False, False),
        _compile_config("hopper-forward-d128-causal", 128, 128, 2, 1, 2, False, False, True),
        _compile_config("hopper-forward-d128-window", 128, 128, 2, 1, 2, False, True, True),
        _compile_config("hopper-forward-d64", 64, 128, 2, 1, 2, False, False, False),
        _compile_config("hopper-forward-d256", 256, 32, 2, 1, 2, False, True, True),
        _compile_config("hopper-forward-short-d128", 128, 64, 2, 2, 1, True, False, False),
        _compile_config("hopper-forward-resident-d128", 128, 128, 2, 1, 2, True, False, False),
    ]


def _compile_config(name, d, block_n, stages, heads, parts, resident, has_lo, has_hi):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.forward:forward_kernel",
        signature=dict(desc_q=desc.format(64, d), desc_k=desc.format(block_n, d), desc_v=desc.format(block_n, d),
                       desc_o=desc.format(64, d), lse="*fp32", rows_q="i32", rows_out="i32", records="*i32",
                       counts="*i32", counters="*i32", heads="i32", group="i32", scale_log2="fp32"),
        constexprs=dict(D=d, DV=d, BLOCK_N=block_n, STAGES=stages, Q_STAGES=1 if resident or d == 256 else 2, HEADS=heads,
                        PARTS=parts, RESIDENT_Q=resident, HAS_LO=has_lo, HAS_HI=has_hi, REGISTERS=240),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        roles=("consumer",) * (heads * parts) + ("producer",),
    )
