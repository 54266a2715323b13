"""Jagged attention forward for sm_90: a producer brings tiles by TMA, consumer warp groups run wgmma and the softmax.

    query [total_q, H, D] --ragged TMA--> q tiles  \\
    key   [total_kv, H_kv, D]  ------->   k ring    > consumers --ragged TMA--> out [rows_out, H, Dv], lse [H, rows_out]
    value [total_kv, H_kv, Dv] ------->   v ring   /

A consumer is a warp group with 64 query rows. A CTA has HEADS * PARTS of them:

* PARTS = 2, HEADS = 1: a tile is 128 queries of one head. The two consumers share every key and value block and take
  turns on the tensor cores, one computing its softmax while the other multiplies. The choice for long queries.
* PARTS = 1, HEADS = 2: a tile is 64 queries of two neighbouring heads, each consumer with its own ring. The choice for
  at most 64 queries a sequence: then memory is the limit, and neighbouring heads lie side by side there.

The grid is persistent and draws tiles from a queue, longest first (jfa.kernels.hopper.queue). With RESIDENT_Q every
tile of a program has the same queries (broadcast_q with one tile of them): they are loaded once.

Within a tile key blocks run from the last to the first, so the block that hangs over the sequence's end is the first
one, which is masked in any case; see jfa.kernels.common.band for the peeled loops.
"""

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait

from jfa.kernels.base import Problem
from jfa.kernels.common.block_lists import Listed, block_lists
from jfa.kernels.common.host import num_sms, padded_head_dim, scale_log2
from jfa.kernels.common.launcher import Variant
from jfa.kernels.common.nouns import Span, aggregate
from jfa.kernels.common.ragged import empty_tma_ready, make_tma_ready, ragged_descriptor
from jfa.kernels.common.ring import alloc_ring
from jfa.kernels.common.softmax import softmax_end, softmax_step
from jfa.kernels.compile_config import CompileConfig
from jfa.kernels.hopper.configs import EMULATED_SMS, ForwardConfig, forward_config
from jfa.kernels.hopper.queue import Queue, alloc_numbers
from jfa.kernels.hopper.tiles import PAD, Lists, TileList, query_tiles

# Query rows of one consumer: the M of a wgmma.
ROWS = tl.constexpr(64)
# Named barrier on which consumer 0 waits for its turn at the tensor cores; consumer 1 waits on the next one.
TURN = tl.constexpr(9)
# The most key blocks that one bound of a band cuts: it moves by as many keys as a tile has queries, at most a block of keys.
EDGES = tl.constexpr(3)


@aggregate
class Form:
    """Choices made at compile time; see jfa.kernels.hopper.config.ForwardConfig."""

    block_n: tl.constexpr
    heads: tl.constexpr
    parts: tl.constexpr
    resident: tl.constexpr
    sparse: tl.constexpr
    broadcast: tl.constexpr


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
def walk(tile, head, lists, form):
    """Return what a tile visits: the key blocks that its band leaves, or those that its list names."""
    if not form.sparse:
        return tile.key_blocks(form.parts * ROWS, form.block_n)
    else:
        begin = tile.q.begin
        if form.broadcast:
            rows_q = max(tile.q.length, 1)  # the same for all sequences, but 0 where no output is written
            seq = tile.pad_begin // (tl.cdiv(rows_q, PAD) * PAD)
            row = seq * tl.cdiv(rows_q, form.parts * ROWS) + tile.row // (form.parts * ROWS)
        else:
            seq = tile.pad_begin // PAD - begin // PAD - 1
            row = begin // (form.parts * ROWS) + seq + tile.row // (form.parts * ROWS)
        past = tl.cdiv(tile.kv.length, form.block_n)
        listed = lists.of(head, row, past)
        if tile.kv.length == 0:  # also rows of no sequence, which own no list
            listed = Listed(listed.columns, listed.kinds, listed.first, listed.first, past)
        return listed


@triton.jit
def produce(desc_q, desc_k, desc_v, rows_q, queue, q, k, v, group, form, lists):
    """Producer: of every tile the queries, then the key and value blocks from last to first."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, column = queue.next_tile(unit)
        first_head = column * form.heads
        blocks = walk(tile, first_head, lists, form)
        queries = tile.q
        if form.resident:
            queries = Span(tl.to_tensor(0), rows_q)
        if not form.resident or done == 0:
            for c in tl.static_range(form.heads * form.parts):
                q.nth(c).load(done, desc_q, queries.box(tile.row + c % form.parts * ROWS, first_head + c // form.parts))
        for back in range(blocks.count()):
            row = blocks.block(back) * form.block_n
            for h in tl.static_range(form.heads):
                k.nth(h).load(count + back, desc_k, tile.kv.box(row, (first_head + h) // group))
            for h in tl.static_range(form.heads):
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


@triton.jit
def attend_block(q_tile, k, v, so_far, count, tile, rows, block, part, scale_log2, form, MASKED: tl.constexpr):
    """One key block in the steady state: its scores run beside the previous block's p V, its softmax behind them."""
    scores = score_block(q_tile, k, count, part, form.parts)
    acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
    scores = tlx.async_dot_wait(1, scores)
    release(k, count)
    if MASKED:
        scores = mask_scores(scores, tile, rows, block, form.block_n)
    may_be_empty: tl.constexpr = tile.band.has_lo or tile.band.has_hi
    p, row_max, row_sum, alpha = softmax_step(scores, so_far.row_max, so_far.row_sum, scale_log2, may_be_empty)
    acc = tlx.async_dot_wait(0, acc)
    release(v, count - 1)
    return Softmax(acc * alpha[:, None], row_max, row_sum, p.to(so_far.p.dtype)), count + 1


@triton.jit
def attend_band(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, form):
    """The key blocks of a band behind the first: masked ones at both edges, between them the bulk, which needs no mask."""
    if tile.band.has_hi:
        for back in range(1, blocks.end - blocks.bulk_end):
            so_far, count = attend_block(
                q_tile, k, v, so_far, count, tile, rows, blocks.end - 1 - back, part, scale_log2, form, True
            )
    for _ in range(min(blocks.bulk_end, blocks.end - 1) - blocks.bulk_begin):
        so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, 0, part, scale_log2, form, False)
    if tile.band.has_lo:
        left = min(blocks.bulk_begin, blocks.end - 1)
        for back in range(left - blocks.first):
            so_far, count = attend_block(
                q_tile, k, v, so_far, count, tile, rows, left - 1 - back, part, scale_log2, form, True
            )
    return so_far, count


@triton.jit
def attend_list(q_tile, k, v, so_far, count, tile, rows, listed, part, scale_log2, form):
    """The listed blocks behind the first. A list rises, so what a band cuts stands at its two ends; see EDGES."""
    bulk = tile.key_blocks(form.parts * ROWS, form.block_n)
    entries = listed.count()
    high = 1
    if tile.band.has_hi:
        for back in tl.static_range(1, EDGES):
            high += ((back < entries) & (listed.block(back) >= bulk.bulk_end)).to(tl.int32)
        for back in range(1, high):
            so_far, count = attend_block(
                q_tile, k, v, so_far, count, tile, rows, listed.block(back), part, scale_log2, form, True
            )
    low = 0
    if tile.band.has_lo:
        for ahead in tl.static_range(EDGES):
            left = entries - 1 - ahead
            low += ((left >= high) & (listed.block(left) < bulk.bulk_begin)).to(tl.int32)
    for _ in range(entries - high - low):
        so_far, count = attend_block(q_tile, k, v, so_far, count, tile, rows, 0, part, scale_log2, form, False)
    if tile.band.has_lo:
        for back in range(entries - low, entries):
            so_far, count = attend_block(
                q_tile, k, v, so_far, count, tile, rows, listed.block(back), part, scale_log2, form, True
            )
    return so_far, count


@triton.jit
def attend_tile(q_tile, k, v, count, tile, rows, blocks, part, scale_log2, form):
    """All key blocks of 64 query rows but the last p V. Returns (Softmax, count)."""
    DV: tl.constexpr = v.buffers.shape[1]
    scores = score_block(q_tile, k, count, part, form.parts)
    scores = tlx.async_dot_wait(0, scores)
    release(k, count)
    scores = mask_scores(scores, tile, rows, blocks.block(0), form.block_n)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale_log2, True)
    so_far = Softmax(tl.zeros([ROWS, DV], tl.float32), row_max, row_sum, p.to(v.buffers.dtype))
    count += 1
    if form.sparse:
        return attend_list(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, form)
    else:
        return attend_band(q_tile, k, v, so_far, count, tile, rows, blocks, part, scale_log2, form)


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
def consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, consumer, form, lists):
    """Consumer of 64 query rows of every tile: scores, softmax, p V, epilogue.

    The next tile is looked up before the epilogue.
    """
    part: tl.constexpr = consumer % form.parts
    q = q.nth(consumer)
    k = k.nth(consumer // form.parts)
    v = v.nth(consumer // form.parts)
    if form.parts == 2 and part == 1:
        pass_turn(part, form.parts)
    done = 0
    count = 0
    unit = queue.receive(done)
    tile, column = queue.next_tile(unit)
    while unit < queue.units:
        head = column * form.heads + consumer // form.parts
        row = tile.row + part * ROWS
        blocks = walk(tile, head, lists, form)
        slot, phase = q.slot(done)
        if not form.resident or done == 0:
            tlx.barrier_wait(q.fulls[slot], phase)
        so_far, count = attend_tile(
            q.buffers[slot], k, v, count, tile, row + tl.arange(0, ROWS), blocks, part, scale_log2, form
        )
        if not form.resident:
            tlx.barrier_arrive(q.empties[slot], 1)
        acc = accumulate_block(so_far.p, so_far.acc, v, count - 1)
        done += 1
        unit = queue.receive(done)
        next_tile, column = queue.next_tile(unit)
        acc = tlx.async_dot_wait(0, acc)
        release(v, count - 1)
        store_tile(desc_o, o_tiles[consumer], lse, rows_out, acc, so_far, tile, row, head)
        tile = next_tile
    if form.parts == 2 and part == 0:
        wait_turn(part, form.parts)
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
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    Q_STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDENT_Q: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    REGISTERS: tl.constexpr,
    LIST_HEADS: tl.constexpr,
    BROADCAST: tl.constexpr,
):
    """Buffers, barriers, and who runs which role. Grid: (programs,), or (programs, H // HEADS) with resident queries.

    desc_q, desc_k, desc_v, desc_o: ragged descriptors of boxes [64, D], [BLOCK_N, D], [BLOCK_N, DV], [64, DV].
    lse [H, rows_out] fp32; records, counts: a list of PARTS * 64 queries per tile (jfa.kernels.hopper.tiles);
    counters: one int32 of 0 per grid column. starts, columns, kinds: block lists, None without (LIST_HEADS = 0).
    """
    CONSUMERS: tl.constexpr = HEADS * PARTS
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    form = Form(BLOCK_N, HEADS, PARTS, RESIDENT_Q, LIST_HEADS > 0, BROADCAST)
    lists = form  # stands for none
    if LIST_HEADS > 0:
        lists = block_lists(starts, columns, kinds, list_rows, heads, list_capacity, LIST_HEADS)
    o_tiles = tlx.local_alloc((ROWS, DV), DTYPE, CONSUMERS)
    q = alloc_ring(ROWS, D, DTYPE, Q_STAGES, 1, RINGS=CONSUMERS, BY_THREAD=True)
    k = alloc_ring(BLOCK_N, D, DTYPE, STAGES, PARTS, RINGS=HEADS, BY_THREAD=True)
    v = alloc_ring(BLOCK_N, DV, DTYPE, STAGES, PARTS, RINGS=HEADS, BY_THREAD=True)
    numbers = alloc_numbers(CONSUMERS)
    gdc_wait()  # from here on the list is read
    columns = heads // HEADS
    num_tiles = tl.load(counts + 1)
    units = num_tiles
    if RESIDENT_Q:
        counters += tl.program_id(1)
    else:
        units = num_tiles * columns
    queue = Queue(records, num_tiles, units, columns, counters, numbers, RESIDENT_Q, False, HAS_LO, HAS_HI)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, 0, form, lists)
        if CONSUMERS > 1:
            with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS - 1):
                other: tl.constexpr = 1 + tlx.async_task_replica_id()
                consume(desc_o, o_tiles, lse, rows_out, queue, q, k, v, scale_log2, other, form, lists)
        with tlx.async_task(num_warps=1, registers=24):
            produce(desc_q, desc_k, desc_v, rows_q, queue, q, k, v, group, form, lists)


def forward(
    problem: Problem, q, k, v, plan=None, config: ForwardConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
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
    lists = problem.block_lists
    variant = _variant(
        config, d, dv, problem.band.has_lo, problem.band.has_hi, lists.heads if lists else 0, problem.broadcast_q
    )
    variant.launch(
        problem.device,
        grid,
        ragged_descriptor(q, 64, d),
        ragged_descriptor(k, config.block_n, d),
        ragged_descriptor(v, config.block_n, dv),
        ragged_descriptor(out, 64, dv),
        lse,
        problem.rows_q,
        problem.rows_out,
        tiles.records,
        tiles.counts,
        tiles.counters(columns),
        problem.num_heads,
        problem.group_size,
        scale_log2(scale),
        *((*lists.tensors, lists.rows, lists.columns.numel()) if lists else (None,) * 5),
    )


@cache
def _variant(
    config: ForwardConfig, d: int, dv: int, has_lo: bool, has_hi: bool, list_heads: int, broadcast: bool
) -> Variant:
    return Variant(
        forward_kernel,
        D=d,
        DV=dv,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        Q_STAGES=config.q_stages,
        HEADS=config.heads,
        PARTS=config.parts,
        RESIDENT_Q=config.resident_q,
        HAS_LO=has_lo,
        HAS_HI=has_hi,
        REGISTERS=config.registers,
        LIST_HEADS=list_heads,
        BROADCAST=broadcast and list_heads > 0,
        num_warps=4,
        num_stages=1,
        launch_pdl=True,
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
        _compile_config("hopper-forward-sparse-d128", 128, 128, 2, 1, 2, False, False, False, list_heads=8),
        _compile_config("hopper-forward-sparse-d128-causal", 128, 128, 2, 1, 2, False, False, True, list_heads=8),
    ]


def _compile_config(name, d, block_n, stages, heads, parts, resident, has_lo, has_hi, list_heads=0):
    desc = "tensordesc<bf16[1, 1, 1, {}, {}]>"
    return CompileConfig(
        name=name,
        kernel="jfa.kernels.hopper.forward:forward_kernel",
        signature=dict(
            desc_q=desc.format(64, d),
            desc_k=desc.format(block_n, d),
            desc_v=desc.format(block_n, d),
            desc_o=desc.format(64, d),
            lse="*fp32",
            rows_q="i32",
            rows_out="i32",
            records="*i32",
            counts="*i32",
            counters="*i32",
            heads="i32",
            group="i32",
            scale_log2="fp32",
            **(
                dict(starts="*i32", columns="*i32", kinds="*i8", list_rows="i32", list_capacity="i32")
                if list_heads
                else {}
            ),
        ),
        constexprs=dict(
            D=d,
            DV=d,
            BLOCK_N=block_n,
            STAGES=stages,
            Q_STAGES=1 if resident or d == 256 else 2,
            HEADS=heads,
            PARTS=parts,
            RESIDENT_Q=resident,
            HAS_LO=has_lo,
            HAS_HI=has_hi,
            REGISTERS=240,
            LIST_HEADS=list_heads,
            BROADCAST=False,
            **({} if list_heads else dict.fromkeys(("starts", "columns", "kinds", "list_rows", "list_capacity"))),
        ),
        targets=(90,),
        num_warps=4,
        options=dict(num_stages=1),
        roles=("consumer",) * (heads * parts) + ("producer",),
    )
