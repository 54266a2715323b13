"""Jagged attention forward for sm_90: producer warps bring tiles by TMA, consumer warp groups run wgmma and the softmax.

    query [total_q, H, D] --ragged TMA--> q_tiles  \\
    key   [total_kv, H_kv, D]  ------->   k_tiles   > consumers --ragged TMA--> out [rows_out, H, Dv], lse [H, rows_out]
    value [total_kv, H_kv, Dv] ------->   v_tiles  /

A CTA runs STREAMS independent streams. A stream has one producer warp, one ring of key/value blocks and PARTS consumers of 64 query
rows each, which share the ring:

* one stream of two parts (a tile of 128 queries): the two consumers take turns on the tensor cores, one computing its softmax
  while the other multiplies. The choice for long queries.
* two streams of one part (64 queries each): each consumer walks its own tiles, so short and long sequences do not wait for each
  other. The choice for at most 64 queries a sequence.

The grid is persistent: a worker takes every n-th tile of a list that was sorted longest first, in alternating direction
(jfa.kernels.hopper.tiles). With RESIDENT_Q every tile of a worker has the same queries (broadcast_q with one tile of them):
they are loaded once.

Within a tile key blocks run from the last to the first, so the block that hangs over the sequence's end is the first one, which is
masked in any case; see jfa.kernels.common.band for the peeled loops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.base import Problem
from jfa.kernels.common.band import in_band, key_blocks
from jfa.kernels.common.ragged import make_tma_ready, ragged_box, ragged_descriptor
from jfa.kernels.common.softmax import LOG2_E, softmax_end, softmax_step
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import ForwardConfig, forward_config, padded_dim, workers
from jfa.kernels.hopper.tiles import TileList, item_at, load_tile, query_tiles, turns_of

TINY_SCALE = 2.0**-120  # stands for a scale of 0: scores vanish beside it, and -inf times it stays -inf
ROWS = tl.constexpr(64)  # query rows of one consumer: the M of a wgmma


@triton.jit
def ring_slot(count, STAGES: tl.constexpr):
    """(slot, parity) of the count-th use of a ring of STAGES buffers."""
    return count % STAGES, (count // STAGES) & 1


@triton.jit
def wait_turn(part, PARTS: tl.constexpr):
    """Ping-pong: block until the other consumer of the stream has issued its scores."""
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
def load_box(desc, buffer, full, empty, parity, begin, length, row, head, BYTES: tl.constexpr):
    """One box into one buffer, once its readers have left."""
    tlx.barrier_wait(empty, parity ^ 1)
    tlx.barrier_expect_bytes(full, BYTES)
    tlx.async_descriptor_load(desc, buffer, ragged_box(begin, length, row, head), full)


@triton.jit
def worker_of(stream, STREAMS: tl.constexpr):
    """(worker, workers): every stream of every program along axis 0 is a worker of its own."""
    return stream * tl.num_programs(0) + tl.program_id(0), STREAMS * tl.num_programs(0)


@triton.jit
def read_item(records, turn, worker, workers, heads, RESIDENT_Q: tl.constexpr):
    """(tile, head) of a worker's turn. With resident queries a program keeps the head of its grid column."""
    item = item_at(turn, worker, workers)
    if RESIDENT_Q:
        head = tl.program_id(1)
        tile = load_tile(records, item)
    else:
        head = item % heads
        tile = load_tile(records, item // heads)
    return tile, head


@triton.jit
def count_turns(counts, worker, workers, heads, RESIDENT_Q: tl.constexpr):
    """How many tiles this worker will see."""
    items = tl.load(counts + 1)
    if not RESIDENT_Q:
        items *= heads
    return turns_of(worker, workers, items)


@triton.jit
def produce(desc_q, desc_k, desc_v, rows_q, records, counts, heads, group,
            q_tiles, q_fulls, q_empties, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream,
            D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
            STREAMS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Producer of one stream: of every tile the queries, then the key and value blocks from last to first."""
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_q))
    worker, workers = worker_of(stream, STREAMS)
    count = 0
    for turn in range(count_turns(counts, worker, workers, heads, RESIDENT_Q)):
        tile, head = read_item(records, turn, worker, workers, heads, RESIDENT_Q)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi = tile
        first, bulk_begin, bulk_end, end = key_blocks(row0, PARTS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        if RESIDENT_Q:
            q_begin = 0
            len_q = rows_q
        if not RESIDENT_Q or turn == 0:
            for part in tl.static_range(PARTS):
                q = stream * PARTS + part
                load_box(desc_q, q_tiles[q], q_fulls[q], q_empties[q], turn & 1, q_begin, len_q, row0 + part * ROWS, head,
                         SIZE * ROWS * D)
        for back in range(end - first):
            slot, parity = ring_slot(count, STAGES)
            slot += stream * STAGES
            row = (end - 1 - back) * BLOCK_N
            load_box(desc_k, k_tiles[slot], k_fulls[slot], k_empties[slot], parity, kv_begin, len_kv, row, head // group,
                     SIZE * BLOCK_N * D)
            load_box(desc_v, v_tiles[slot], v_fulls[slot], v_empties[slot], parity, kv_begin, len_kv, row, head // group,
                     SIZE * BLOCK_N * DV)
            count += 1


@triton.jit
def score_block(q_tile, k_tiles, k_fulls, stream, count, part, STAGES: tl.constexpr, PARTS: tl.constexpr):
    """Issues the scores [ROWS, BLOCK_N] of the count-th key block; they are not waited for."""
    slot, parity = ring_slot(count, STAGES)
    slot += stream * STAGES
    tlx.barrier_wait(k_fulls[slot], parity)
    wait_turn(part, PARTS)
    scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[slot]))
    pass_turn(part, PARTS)
    return scores


@triton.jit
def accumulate_block(p, acc, v_tiles, v_fulls, stream, count, STAGES: tl.constexpr):
    """Issues acc += p V of the count-th value block; not waited for."""
    slot, parity = ring_slot(count, STAGES)
    slot += stream * STAGES
    tlx.barrier_wait(v_fulls[slot], parity)
    return tlx.async_dot(p, v_tiles[slot], acc)


@triton.jit
def release(empties, stream, count, STAGES: tl.constexpr):
    """Gives the count-th buffer of a ring back to its producer."""
    tlx.barrier_arrive(empties[stream * STAGES + count % STAGES], 1)


@triton.jit
def attend_block(q_tile, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part,
                 acc, row_max, row_sum, p, count, rows, block, len_kv, lo, hi, scale_log2,
                 BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                 HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASKED: tl.constexpr):
    """One key block in the steady state: its scores run beside the previous block's p V, its softmax behind them."""
    scores = score_block(q_tile, k_tiles, k_fulls, stream, count, part, STAGES, PARTS)
    acc = accumulate_block(p, acc, v_tiles, v_fulls, stream, count - 1, STAGES)
    scores = tlx.async_dot_wait(1, scores)
    release(k_empties, stream, count, STAGES)
    if MASKED:
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = in_band(rows[:, None], keys[None, :], len_kv, lo, hi, HAS_LO, HAS_HI)
        scores = tl.where(valid, scores, float("-inf"))
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, HAS_LO or HAS_HI)
    acc = tlx.async_dot_wait(0, acc)
    release(v_empties, stream, count - 1, STAGES)
    acc = acc * alpha[:, None]
    return acc, row_max, row_sum, p.to(v_tiles.dtype), count + 1


@triton.jit
def attend_tile(q_tile, q_empty, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part,
                count, rows, blocks, len_kv, lo, hi, scale_log2,
                DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """All key blocks of 64 query rows, last block first. Returns (acc, row_max, row_sum, count) with acc not yet divided."""
    first, bulk_begin, bulk_end, end = blocks
    scores = score_block(q_tile, k_tiles, k_fulls, stream, count, part, STAGES, PARTS)
    scores = tlx.async_dot_wait(0, scores)
    release(k_empties, stream, count, STAGES)
    keys = (end - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = in_band(rows[:, None], keys[None, :], len_kv, lo, hi, HAS_LO, HAS_HI)
    scores = tl.where(valid, scores, float("-inf"))
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, True)
    p = p.to(v_tiles.dtype)
    acc = tl.zeros([ROWS, DV], tl.float32)
    count += 1
    if HAS_HI:
        for back in range(1, end - bulk_end):
            acc, row_max, row_sum, p, count = attend_block(
                q_tile, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part, acc, row_max, row_sum, p, count,
                rows, end - 1 - back, len_kv, lo, hi, scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, True)
    bulk_end = min(bulk_end, end - 1)
    for _ in range(bulk_end - bulk_begin):
        acc, row_max, row_sum, p, count = attend_block(
            q_tile, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part, acc, row_max, row_sum, p, count,
            rows, 0, len_kv, lo, hi, scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, False)
    if HAS_LO:
        left = min(bulk_begin, end - 1)
        for back in range(left - first):
            acc, row_max, row_sum, p, count = attend_block(
                q_tile, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part, acc, row_max, row_sum, p, count,
                rows, left - 1 - back, len_kv, lo, hi, scale_log2, BLOCK_N, STAGES, PARTS, HAS_LO, HAS_HI, True)
    if not RESIDENT_Q:
        tlx.barrier_arrive(q_empty, 1)
    acc = accumulate_block(p, acc, v_tiles, v_fulls, stream, count - 1, STAGES)
    acc = tlx.async_dot_wait(0, acc)
    release(v_empties, stream, count - 1, STAGES)
    return acc, row_max, row_sum, count


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
def consume(desc_o, lse, rows_out, records, counts, heads, scale_log2,
            q_tiles, q_fulls, q_empties, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, o_tiles, consumer,
            DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
            STREAMS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Consumer of 64 query rows of every tile of its stream: scores, softmax, p V, epilogue."""
    stream: tl.constexpr = consumer // PARTS
    part: tl.constexpr = consumer % PARTS
    worker, workers = worker_of(stream, STREAMS)
    if PARTS == 2 and part == 1:
        tlx.named_barrier_arrive(9, 256)
    count = 0
    for turn in range(count_turns(counts, worker, workers, heads, RESIDENT_Q)):
        tile, head = read_item(records, turn, worker, workers, heads, RESIDENT_Q)
        q_begin, len_q, row0, out_begin, kv_begin, len_kv, lo, hi = tile
        blocks = key_blocks(row0, PARTS * ROWS, len_q, len_kv, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        rows = row0 + part * ROWS + tl.arange(0, ROWS)
        if not RESIDENT_Q or turn == 0:
            tlx.barrier_wait(q_fulls[consumer], turn & 1)
        acc, row_max, row_sum, count = attend_tile(
            q_tiles[consumer], q_empties[consumer], k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, stream, part,
            count, rows, blocks, len_kv, lo, hi, scale_log2, DV, BLOCK_N, STAGES, PARTS, RESIDENT_Q, HAS_LO, HAS_HI)
        store_tile(desc_o, o_tiles[consumer], lse, acc, row_max, row_sum, out_begin, len_q, row0 + part * ROWS, rows,
                   head, rows_out)
    if PARTS == 2 and part == 0:
        tlx.named_barrier_wait(9, 256)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["rows_q", "rows_out", "heads", "group"])
def forward_kernel(desc_q, desc_k, desc_v, desc_o, lse, rows_q, rows_out, records, counts, heads, group, scale_log2,
                   D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                   STREAMS: tl.constexpr, RESIDENT_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
                   REGISTERS: tl.constexpr):
    """Buffers, barriers, and who runs which role. Grid: (workers,), or (workers a head, H) with resident queries.

    desc_q, desc_k, desc_v, desc_o: ragged descriptors of boxes [64, D], [BLOCK_N, D], [BLOCK_N, DV], [64, DV].
    lse [H, rows_out] fp32; records, counts: a list of PARTS * 64 queries a tile (jfa.kernels.hopper.tiles).
    """
    CONSUMERS: tl.constexpr = STREAMS * PARTS
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tiles = tlx.local_alloc((ROWS, D), DTYPE, CONSUMERS)
    k_tiles = tlx.local_alloc((BLOCK_N, D), DTYPE, STREAMS * STAGES)
    v_tiles = tlx.local_alloc((BLOCK_N, DV), DTYPE, STREAMS * STAGES)
    o_tiles = tlx.local_alloc((ROWS, DV), DTYPE, CONSUMERS)
    q_fulls = tlx.alloc_barriers(CONSUMERS, arrive_count=1)
    q_empties = tlx.alloc_barriers(CONSUMERS, arrive_count=1)
    k_fulls = tlx.alloc_barriers(STREAMS * STAGES, arrive_count=1)
    k_empties = tlx.alloc_barriers(STREAMS * STAGES, arrive_count=PARTS)
    v_fulls = tlx.alloc_barriers(STREAMS * STAGES, arrive_count=1)
    v_empties = tlx.alloc_barriers(STREAMS * STAGES, arrive_count=PARTS)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # producer of stream 0
            produce(desc_q, desc_k, desc_v, rows_q, records, counts, heads, group,
                    q_tiles, q_fulls, q_empties, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, 0,
                    D, DV, BLOCK_N, STAGES, PARTS, STREAMS, RESIDENT_Q, HAS_LO, HAS_HI)
        if STREAMS > 1:
            with tlx.async_task(num_warps=1, registers=24, replicate=STREAMS - 1):  # producers of the other streams
                produce(desc_q, desc_k, desc_v, rows_q, records, counts, heads, group,
                        q_tiles, q_fulls, q_empties, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties,
                        1 + tlx.async_task_replica_id(),
                        D, DV, BLOCK_N, STAGES, PARTS, STREAMS, RESIDENT_Q, HAS_LO, HAS_HI)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS):  # consumers
            consume(desc_o, lse, rows_out, records, counts, heads, scale_log2,
                    q_tiles, q_fulls, q_empties, k_tiles, k_fulls, k_empties, v_tiles, v_fulls, v_empties, o_tiles,
                    tlx.async_task_replica_id(),
                    DV, BLOCK_N, STAGES, PARTS, STREAMS, RESIDENT_Q, HAS_LO, HAS_HI)


def forward(problem: Problem, q, k, v, plan=None, config: ForwardConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows_out, H, Dv], lse [H, rows_out]): see jfa.kernels.base. ``plan``: [records, counts, ...] of :func:`tile_list`."""
    config = config or forward_config(problem)
    out, lse = _outputs(problem, q)
    if out.numel() == 0:
        return out, lse
    if problem.num_batches == 0 or problem.rows_kv == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tiles = TileList(*plan[:2]) if plan else tile_list(problem, config)
    scale = problem.sm_scale
    if scale < 0:
        q, scale = -q, -scale
    launch(problem, config, tiles, *(make_tma_ready(x) for x in (q, k, v)), scale, out, lse)
    return out.contiguous(), lse


def tile_list(problem: Problem, config: ForwardConfig | None = None) -> TileList:
    """The list of tiles that :func:`forward` walks."""
    config = config or forward_config(problem)
    return query_tiles(problem, config.block_m, config.block_n)


def launch(problem: Problem, config: ForwardConfig, tiles: TileList, q, k, v, scale: float, out, lse) -> None:
    """Descriptors and grid. Everything is TMA-ready and not empty; scale >= 0."""
    d, dv = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    programs = workers(problem.device)
    if config.resident_q:
        grid = (max(1, programs // problem.num_heads), problem.num_heads)
    else:
        grid = (min(programs, tiles.records.shape[0] * problem.num_heads),)
    forward_kernel[grid](
        ragged_descriptor(q, 64, d), ragged_descriptor(k, config.block_n, d), ragged_descriptor(v, config.block_n, dv),
        ragged_descriptor(out, 64, dv), lse, problem.rows_q, problem.rows_out, tiles.records, tiles.counts,
        problem.num_heads, problem.group_size, max(scale * LOG2_E, TINY_SCALE),
        D=d, DV=dv, BLOCK_N=config.block_n, STAGES=config.stages, PARTS=config.parts, STREAMS=config.streams,
        RESIDENT_Q=config.resident_q, HAS_LO=problem.band.has_lo, HAS_HI=problem.band.has_hi, REGISTERS=config.registers,
        num_warps=4,
    )


def _outputs(problem: Problem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; with rows padded to 16 bytes where TMA needs it, and cleared where the slots may leave rows out."""
    step = 16 // q.element_size()
    width = -(-problem.head_dim_v // step) * step
    out = q.new_empty(problem.rows_out, problem.num_heads, width)[:, :, : problem.head_dim_v]
    lse = q.new_empty(problem.num_heads, problem.rows_out, dtype=torch.float32)
    if problem.output_offset is not None:
        out.zero_()
        lse.fill_(float("-inf"))
    return out, lse


def compile_configs() -> list[CompileConfig]:
    """The variants that jfa compile reports."""
    return [
        _compile_config("hopper-forward-d128", 128, 128, 2, 2, 1, False, False, False),
        _compile_config("hopper-forward-d128-causal", 128, 128, 2, 2, 1, False, False, True),
        _compile_config("hopper-forward-d128-window", 128, 128, 2, 2, 1, False, True, True),
        _compile_config("hopper-forward-d64", 64, 128, 4, 2, 1, False, False, False),
        _compile_config("hopper-forward-d256", 256, 32, 2, 2, 1, False, True, True),
        _compile_config("hopper-forward-short-d128", 128, 64, 2, 1, 2, True, False, False),
        _compile_config("hopper-forward-resident-d128", 128, 128, 2, 2, 1, True, False, False),
    ]


def _compile_config(name, d, block_n, stages, parts, streams, resident, has_lo, has_hi):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.forward:forward_kernel",
        signature=dict(desc_q=desc.format(64, d), desc_k=desc.format(block_n, d), desc_v=desc.format(block_n, d),
                       desc_o=desc.format(64, d), lse="*fp32", rows_q="i32", rows_out="i32", records="*i32",
                       counts="*i32", heads="i32", group="i32", scale_log2="fp32"),
        constexprs=dict(D=d, DV=d, BLOCK_N=block_n, STAGES=stages, PARTS=parts, STREAMS=streams, RESIDENT_Q=resident,
                        HAS_LO=has_lo, HAS_HI=has_hi, REGISTERS=232),
        targets=(90,),
        num_warps=4,
    )
