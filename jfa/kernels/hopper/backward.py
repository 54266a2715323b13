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

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ragged import ragged_descriptor
from jfa.kernels.common.ring import Ring, alloc_ring, pair_slot
from jfa.kernels.common.rounding import rounded_pairs
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import EMULATED_SMS, BackwardConfig, backward_config, separate_dq
from jfa.kernels.hopper.prepare import PaddedRows, RowConstants
from jfa.kernels.hopper.queue import Queue, alloc_numbers
from jfa.kernels.hopper.tiles import TileList, key_tiles, padded

# Key rows of one consumer: the M of a wgmma.
KEYS = tl.constexpr(64)
CONSUMERS = tl.constexpr(2)
# Keys of a tile, on the host and in the kernel.
BLOCK = 128
BLOCK_N = tl.constexpr(BLOCK)
# Queries of a block.
BLOCK_M = tl.constexpr(64)
# Columns of dQ that the adder holds at a time: 32 registers.
DQ_COLUMNS = tl.constexpr(64)


@aggregate
class Queries:
    """A ring of two blocks of 64 queries: Q, dO and, per row, log-sum-exp and delta, all on one barrier."""

    q: tlx.buffered_tensor
    do: tlx.buffered_tensor
    lse: tlx.buffered_tensor
    delta: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    bytes: tl.constexpr


@aggregate
class Operands:
    """What both consumers read and, in ``ds``, write for the adder if there is one."""

    k: Ring
    v: Ring
    queries: Queries
    ds: Ring
    scale_log2: tl.tensor
    with_dq: tl.constexpr


@aggregate
class Sums:
    """dK and dV [64, D] of a consumer's keys so far."""

    dk: tl.tensor
    dv: tl.tensor


@triton.jit
def alloc_queries(D: tl.constexpr, DTYPE: tl.constexpr):
    """Allocate the ring of query blocks."""
    q = tlx.local_alloc((BLOCK_M, D), DTYPE, 2)
    do = tlx.local_alloc((BLOCK_M, D), DTYPE, 2)
    lse = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    delta = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    fulls = tlx.alloc_barriers(2, arrive_count=1)
    empties = tlx.alloc_barriers(2, arrive_count=CONSUMERS)
    return Queries(q, do, lse, delta, fulls, empties, 2 * BLOCK_M * (D * tlx.size_of(DTYPE) + 4))


@triton.jit
def always_zero(count):
    """Return 0, as an index that seems to change with ``count``.

    Tiles of keys and values have one buffer. With a constant index the compiler computes all matrix descriptors of a
    tile's slices ahead of the loop and keeps them in registers, which spill; so they are computed where they are used.
    """
    return count >> 30


@triton.jit
def load_queries(desc_q, desc_do, lse2, delta, queries, count, tile, row, head):
    """Fill the count-th slot; ``lse2`` and ``delta`` point at the constants of the sequence's first query."""
    slot, phase = pair_slot(count)
    tlx.barrier_wait(queries.empties[slot], phase ^ 1)
    tlx.barrier_expect_bytes(queries.fulls[slot], queries.bytes)
    tlx.async_descriptor_load(desc_q, queries.q[slot], tile.q.box(row, head), queries.fulls[slot])
    tlx.async_load(lse2 + row, queries.lse[slot], bulk=True, barrier=queries.fulls[slot])
    tlx.async_descriptor_load(desc_do, queries.do[slot], tile.out.box(row, head), queries.fulls[slot])
    tlx.async_load(delta + row, queries.delta[slot], bulk=True, barrier=queries.fulls[slot])


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, constants, queue, k, v, queries, group):
    """Producer: of every tile its keys and values, then, head by head, the blocks of queries that see them."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        k.load(done, desc_k, tile.kv.box(tile.row, kv_head))
        v.load(done, desc_v, tile.kv.box(tile.row, kv_head))
        for head in range(kv_head * group, kv_head * group + group):
            lse2, delta = constants.of_sequence(tile, head)
            for block in range(blocks.first, blocks.end):
                load_queries(desc_q, desc_do, lse2, delta, queries, count, tile, block * BLOCK_M, head)
                count += 1
        done += 1
        unit = queue.draw(done)


@triton.jit
def publish_ds(ring, ds, count, part):
    """Write this consumer's half of a block's dS^T for the adder."""
    slot, phase = pair_slot(count)
    tlx.barrier_wait(ring.empties[slot], phase ^ 1)
    tlx.local_store(tlx.local_slice(ring.buffers[slot], [part * KEYS, 0], [KEYS, BLOCK_M]), ds)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ring.fulls[slot], 1)


@triton.jit
def issue_scores(operands, part, slot, count):
    """Issue S^T of the count-th block; it is not waited for."""
    D: tl.constexpr = operands.k.buffers.shape[1]
    queries = operands.queries
    at, phase = pair_slot(count)
    keys = tlx.local_slice(operands.k.buffers[slot + always_zero(count)], [part * KEYS, 0], [KEYS, D])
    tlx.barrier_wait(queries.fulls[at], phase)
    return tlx.async_dot(keys, tlx.local_trans(queries.q[at]))


@triton.jit
def use_scores(operands, part, tile, slot, scores, dv, count, block, masked):
    """Return (dS^T, dV with the block's part added) from a block's S^T. ``masked`` may be known at compile time."""
    D: tl.constexpr = operands.v.buffers.shape[1]
    queries = operands.queries
    at, phase = pair_slot(count)
    values = tlx.local_slice(operands.v.buffers[slot + always_zero(count)], [part * KEYS, 0], [KEYS, D])
    row_lse = tlx.local_load(queries.lse[at])
    p = tl.math.exp2(scores * operands.scale_log2 - row_lse[None, :])
    if masked:
        keys = tile.row + part * KEYS + tl.arange(0, KEYS)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        p = tl.where(tile.pair_mask(rows[None, :], keys[:, None]), p, 0.0)
    # The one form that is kept: 16 registers per thread instead of 32.
    p = rounded_pairs(p, values.dtype)
    # dV first: products start in the order of their text, so it keeps dP from starting, and from filling registers,
    # before p is done.
    dv = tlx.async_dot(p, queries.do[at], dv)
    less_delta = tl.broadcast_to(-tlx.local_load(queries.delta[at])[None, :], [KEYS, BLOCK_M])
    dp = tlx.async_dot(values, tlx.local_trans(queries.do[at]), less_delta)
    dp = tlx.async_dot_wait(0, dp)
    dv = tlx.async_dot_wait(0, dv)
    return (p.to(tl.float32) * dp).to(values.dtype), dv


@triton.jit
def backward_block(operands, part, tile, slot, sums, count, block, MASKED: tl.constexpr):
    """One block of queries against a consumer's 64 keys, from S^T to dK. Returns (sums, count)."""
    queries = operands.queries
    scores = issue_scores(operands, part, slot, count)
    scores = tlx.async_dot_wait(0, scores)
    ds, dv = use_scores(operands, part, tile, slot, scores, sums.dv, count, block, MASKED)
    dk = tlx.async_dot(ds, queries.q[count & 1], sums.dk)
    if operands.with_dq:
        publish_ds(operands.ds, ds, count, part)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(queries.empties[count & 1], 1)
    return Sums(dk, dv), count + 1


@triton.jit
def walk_blocks(operands, part, tile, slot, sums, count, blocks, group):
    """All blocks of all query heads: masked ones at both edges of the band, between them a bulk that needs no mask."""
    for _ in range(group):
        if tile.band.has_hi:
            for block in range(blocks.first, blocks.bulk_begin):
                sums, count = backward_block(operands, part, tile, slot, sums, count, block, True)
        for block in range(blocks.bulk_begin, blocks.bulk_end):
            sums, count = backward_block(operands, part, tile, slot, sums, count, block, False)
        for block in range(blocks.bulk_end, blocks.end):
            sums, count = backward_block(operands, part, tile, slot, sums, count, block, True)
    return sums, count


@triton.jit
def walk_blocks_ahead(operands, part, tile, slot, sums, count, blocks, group):
    """The same as one loop that issues a block's S^T behind the dK of the block before.

    Whether a block is masked is asked as the loop runs.
    """
    queries = operands.queries
    if blocks.end > blocks.first:
        scores = issue_scores(operands, part, slot, count)
        scores = tlx.async_dot_wait(0, scores)
        block = blocks.first
        masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
        ds, dv = use_scores(operands, part, tile, slot, scores, sums.dv, count, block, masked)
        dk = sums.dk
        for _ in range(group * (blocks.end - blocks.first) - 1):
            dk = tlx.async_dot(ds, queries.q[count & 1], dk)
            scores = issue_scores(operands, part, slot, count + 1)
            if operands.with_dq:
                publish_ds(operands.ds, ds, count, part)
            dk = tlx.async_dot_wait(1, dk)
            tlx.barrier_arrive(queries.empties[count & 1], 1)
            scores = tlx.async_dot_wait(0, scores)
            count += 1
            block += 1
            if block == blocks.end:
                block = blocks.first
            masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
            ds, dv = use_scores(operands, part, tile, slot, scores, dv, count, block, masked)
        dk = tlx.async_dot(ds, queries.q[count & 1], dk)
        if operands.with_dq:
            publish_ds(operands.ds, ds, count, part)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(queries.empties[count & 1], 1)
        count += 1
        sums = Sums(dk, dv)
    return sums, count


@triton.jit
def store_gradient(desc, stage, gradient, rows, row, head):
    """64 rows of a gradient leave through a staging buffer, clipped at the end of the sequence, the Span ``rows``."""
    tlx.local_store(stage, gradient.to(stage.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, stage, rows.box(row, head))


@triton.jit
def consume(desc_dk, desc_dv, stages, queue, operands, group, scale, part: tl.constexpr, AHEAD: tl.constexpr):
    """Consumer of 64 keys of every tile: dV and dK."""
    D: tl.constexpr = stages.shape[1]
    k = operands.k
    v = operands.v
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        sums = Sums(tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32))
        slot, phase = k.slot(done)
        tlx.barrier_wait(k.fulls[slot], phase)
        tlx.barrier_wait(v.fulls[slot], phase)
        if AHEAD:
            sums, count = walk_blocks_ahead(operands, part, tile, slot, sums, count, blocks, group)
        else:
            sums, count = walk_blocks(operands, part, tile, slot, sums, count, blocks, group)
        tlx.barrier_arrive(k.empties[slot], 1)
        tlx.barrier_arrive(v.empties[slot], 1)
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dv, stages[part], sums.dv, tile.kv, tile.row + part * KEYS, kv_head)
        tlx.async_descriptor_store_wait(0)
        store_gradient(desc_dk, stages[part], sums.dk * scale, tile.kv, tile.row + part * KEYS, kv_head)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def add_columns(
    desc_dq, stage, ds, slot, k_tile, row, PENDING: tl.constexpr, COLUMN: tl.constexpr, LAST: tl.constexpr
):
    """DQ_COLUMNS columns of a block's dQ = dS K, added in fp32 by TMA.

    PENDING other additions may still read their stages. The LAST columns give dS back.
    """
    columns = tlx.local_slice(k_tile, [0, COLUMN], [BLOCK_N, DQ_COLUMNS])
    dq = tlx.async_dot(tlx.local_trans(ds.buffers[slot]), columns)
    dq = tlx.async_dot_wait(0, dq)
    if LAST:
        tlx.barrier_arrive(ds.empties[slot], 1)
    tlx.async_descriptor_store_wait(PENDING)
    tlx.local_store(stage, dq)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, stage, [row, COLUMN], store_reduce="add")


@triton.jit
def add_block(desc_dq, stages, ds, k_tile, count, row):
    """dQ [64, D] of one block, from both halves of its dS^T."""
    PARTS: tl.constexpr = k_tile.shape[1] // DQ_COLUMNS
    slot, phase = pair_slot(count)
    tlx.barrier_wait(ds.fulls[slot], phase)
    for i in tl.static_range(PARTS):
        add_columns(desc_dq, stages[i], ds, slot, k_tile, row, PARTS - 1, i * DQ_COLUMNS, i == PARTS - 1)


@triton.jit
def add_up(desc_dq, stages, dq_rows, queue, k, ds, group, BROADCAST_Q: tl.constexpr):
    """Adder: dQ of every block that the consumers have published."""
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        begin = tile.pad_begin
        if BROADCAST_Q:
            begin = 0
        slot, phase = k.slot(done)
        tlx.barrier_wait(k.fulls[slot], phase)
        for head in range(kv_head * group, kv_head * group + group):
            for block in range(blocks.first, blocks.end):
                row = head * dq_rows + begin + block * BLOCK_M
                add_block(desc_dq, stages, ds, k.buffers[slot + always_zero(count)], count, row)
                count += 1
        tlx.barrier_arrive(k.empties[slot], 1)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "dq_rows", "kv_heads", "group"])
def backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    desc_dk,
    desc_dv,
    lse2,
    delta,
    padded_rows,
    dq_rows,
    records,
    counts,
    counter,
    kv_heads,
    group,
    scale,
    scale_log2,
    D: tl.constexpr,
    TILE_STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    WITH_DQ: tl.constexpr,
    BROADCAST_Q: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Buffers, barriers, and who runs which role. Grid: (programs,).

    desc_q, desc_do, desc_dk, desc_dv: ragged, boxes [64, D]; desc_k, desc_v: ragged, [128, D]; desc_dq: plain, fp32,
    [H * dq_rows, D], boxes [64, 64]. lse2, delta [H, padded_rows] fp32. D holds both head dimensions.
    records, counts: a list of 128 keys per tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    READERS: tl.constexpr = CONSUMERS + WITH_DQ
    num_tiles = tl.load(counts + 1)
    k = alloc_ring(BLOCK_N, D, DTYPE, TILE_STAGES, READERS)
    v = alloc_ring(BLOCK_N, D, DTYPE, TILE_STAGES, CONSUMERS)
    queries = alloc_queries(D, DTYPE)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 2)
    dq_stages = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, D // DQ_COLUMNS)
    # A consumer's dV leaves first, then its dK.
    stages = tlx.local_alloc((KEYS, D), DTYPE, CONSUMERS)
    ds_fulls = tlx.alloc_barriers(2, arrive_count=CONSUMERS)
    ds = Ring(ds_tiles, ds_fulls, tlx.alloc_barriers(2, arrive_count=1), 2, 0, 0)
    operands = Operands(k, v, queries, ds, scale_log2, WITH_DQ)
    numbers = alloc_numbers(READERS)
    queue = Queue(records, num_tiles, num_tiles * kv_heads, kv_heads, counter, numbers, False, False, HAS_LO, HAS_HI)
    with tlx.async_tasks():
        # The adder, where there is one, is the default task: it gets what registers the others leave.
        with tlx.async_task("default"):
            if WITH_DQ:
                add_up(desc_dq, dq_stages, dq_rows, queue, k, ds, group, BROADCAST_Q)
            else:
                consume(desc_dk, desc_dv, stages, queue, operands, group, scale, 0, AHEAD)
        if WITH_DQ:
            with tlx.async_task(num_warps=4, registers=REGISTERS):
                consume(desc_dk, desc_dv, stages, queue, operands, group, scale, 0, AHEAD)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            consume(desc_dk, desc_dv, stages, queue, operands, group, scale, 1, AHEAD)
        with tlx.async_task(num_warps=1, registers=24):
            constants = RowConstants(lse2, delta, padded_rows)
            produce(desc_q, desc_k, desc_v, desc_do, constants, queue, k, v, queries, group)


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
