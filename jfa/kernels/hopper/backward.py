"""Jagged attention backward for sm_90: one pass over key tiles computes dK and dV, and adds to dQ.

For a tile of 128 keys of one key/value head and every block of 64 queries that sees it, transposed (keys are rows):

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK += dS^T Q          dQ += dS K

Two consumer warp groups own 64 keys each: S^T, dP^T, dK and dV never leave their registers, and P^T and dS^T enter the
next product straight from them. Only dQ needs all 128 keys: both write their dS^T to shared memory and continue, and a
third warp group, the adder, computes dQ from it and adds it in fp32 by TMA reduce-add. So the consumers do not wait for
dQ, and the products of the three groups overlap on the tensor cores. Query heads of a group (GQA) are walked one after
another in the same tile, so dK and dV need no atomics.

Registers are the limit. One thread from each of the four warp groups has 512 of them together; a consumer gets 208 per
thread, and dK and dV alone take 128 of these. So a consumer holds one of S^T and dP^T at a time, starts dP^T's sum at
-delta instead of keeping delta, and rounds P in pairs.

dQ is added in the order in which tiles finish. Where gradients must be deterministic, jfa.kernels.hopper.backward_dq
computes dQ instead; then this kernel has the two consumers only, one of them the default task.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.block_lists import block_lists
from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.ring import Ring, pair_slot
from jfa.kernels.common.rounding import rounded_probabilities
from jfa.kernels.hopper.columns import (
    Pieces,
    Tiles,
    add_product,
    add_product_of_rows,
    alloc_pieces,
    alloc_tiles,
    both_boxes,
    load_pieces,
    multiply_rows,
    stage_tiles,
    store_pieces,
    zero_pieces,
)
from jfa.kernels.hopper.listed import key_list
from jfa.kernels.hopper.queue import Queue, alloc_numbers

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
    """A ring of two blocks of 64 queries: Q, dO and, per row, log-sum-exp and delta, all on Q's barriers."""

    q: Tiles
    do: Tiles
    lse: tlx.buffered_tensor
    delta: tlx.buffered_tensor


@aggregate
class Operands:
    """Buffers that both consumers read and, in ``ds``, write for the adder if there is one."""

    k: Tiles
    v: Tiles
    queries: Queries
    ds: Ring
    scale_log2: tl.tensor
    with_dq: tl.constexpr


@aggregate
class Sums:
    """dK and dV [64, D] of a consumer's keys so far."""

    dk: Pieces
    dv: Pieces


@triton.jit
def alloc_queries(LEFT: tl.constexpr, RIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Allocate the ring of query blocks."""
    OTHER_BYTES: tl.constexpr = BLOCK_M * ((LEFT + RIGHT) * tlx.size_of(DTYPE) + 2 * 4)
    q = alloc_tiles(BLOCK_M, LEFT, RIGHT, DTYPE, 2, CONSUMERS, 1, OTHER_BYTES)
    left, right = alloc_pieces(BLOCK_M, LEFT, RIGHT, DTYPE, 2)
    lse = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    delta = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    return Queries(q, stage_tiles(q, left, right, RIGHT), lse, delta)


@triton.jit
def alloc_operands(DTYPE: tl.constexpr, scale_log2, cfg: tl.constexpr):
    """Allocate what both consumers read, and two blocks of dS for the adder."""
    LEFT: tl.constexpr = cfg.head_dim - cfg.right
    k = alloc_tiles(BLOCK_N, LEFT, cfg.right, DTYPE, cfg.tile_stages, CONSUMERS + cfg.with_dq)
    v = alloc_tiles(BLOCK_N, LEFT, cfg.right, DTYPE, cfg.tile_stages, CONSUMERS)
    queries = alloc_queries(LEFT, cfg.right, DTYPE)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 2)
    ds_fulls = tlx.alloc_barriers(2, arrive_count=CONSUMERS)
    ds = Ring(ds_tiles, ds_fulls, tlx.alloc_barriers(2, arrive_count=1), 2, 0, 0)
    return Operands(k, v, queries, ds, scale_log2, cfg.with_dq)


@triton.jit
def always_zero(count):
    """Return 0, as an index that seems to change with ``count``.

    Tiles of keys and values have one buffer. With a constant index the compiler computes all matrix descriptors of a
    tile's slices ahead of the loop and keeps them in registers, which spill; so they are computed where they are used.
    """
    return count >> 30


@triton.jit
def visits(tile, head, lists, cfg: tl.constexpr):
    """Return the blocks of one head's queries that a tile visits: those that its band leaves, or those that its list names."""
    if cfg.list_heads == 0:
        return tile.query_blocks(BLOCK_N, BLOCK_M)
    else:
        return key_list(tile, head, lists, cfg.broadcast_q)


@triton.jit
def load_queries(box_q, box_do, lse2, delta, queries, count, tile, row, head):
    """Fill the count-th slot; ``lse2`` and ``delta`` point at the constants of the sequence's first query."""
    q = queries.q
    slot, phase = pair_slot(count)
    tlx.barrier_wait(q.empties[slot], phase ^ 1)
    tlx.barrier_expect_bytes(q.fulls[slot], q.bytes)
    load_pieces(q, slot, box_q, tile.q, row, head)
    tlx.async_load(lse2 + row, queries.lse[slot], bulk=True, barrier=q.fulls[slot])
    load_pieces(queries.do, slot, box_do, tile.out, row, head)
    tlx.async_load(delta + row, queries.delta[slot], bulk=True, barrier=q.fulls[slot])


@triton.jit
def produce(box_q, box_k, box_v, box_do, constants, queue, k, v, queries, group, lists, cfg: tl.constexpr):
    """Produce of every tile its keys and values, then, head by head, the blocks of queries that see them."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        k.load(done, box_k, tile.kv, tile.row, kv_head)
        v.load(done, box_v, tile.kv, tile.row, kv_head)
        for head in range(kv_head * group, kv_head * group + group):
            lse2, delta = constants.of_sequence(tile, head)
            blocks = visits(tile, head, lists, cfg)
            for n in range(blocks.count()):
                load_queries(box_q, box_do, lse2, delta, queries, count, tile, blocks.nth(n) * BLOCK_M, head)
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
    q = operands.queries.q
    at, phase = pair_slot(count)
    tlx.barrier_wait(q.fulls[at], phase)
    return multiply_rows(operands.k, slot + always_zero(count), part * KEYS, q, at, KEYS)


@triton.jit
def use_scores(operands, part, tile, slot, scores, dv, count, block, masked):
    """Return (dS^T, dV with the block's part added) from a block's S^T. ``masked`` may be known at compile time."""
    queries = operands.queries
    v = operands.v
    at, phase = pair_slot(count)
    row_lse = tlx.local_load(queries.lse[at])
    p = tl.math.exp2(scores * operands.scale_log2 - row_lse[None, :])
    if masked:
        keys = tile.row + part * KEYS + tl.arange(0, KEYS)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        p = tl.where(tile.pair_mask(rows[None, :], keys[:, None]), p, 0.0)
    # The one form that is kept: 16 registers per thread instead of 32.
    p = rounded_probabilities(p, v.left.dtype)
    # dV first: products start in the order of their text, so it keeps dP from starting, and from filling registers,
    # before p is done.
    dv = add_product(p, queries.do, at, dv)
    less_delta = tl.broadcast_to(-tlx.local_load(queries.delta[at])[None, :], [KEYS, BLOCK_M])
    dp = add_product_of_rows(v, slot + always_zero(count), part * KEYS, queries.do, at, less_delta, KEYS)
    dp = tlx.async_dot_wait(0, dp)
    left = tlx.async_dot_wait(0, dv.left)
    right = dv.right
    if v.width > 0:
        right = tlx.async_dot_wait(0, dv.right)
    return (p.to(tl.float32) * dp).to(v.left.dtype), Pieces(left, right)


# What a consumer issues per block of queries, and what has then to be done (its products finish in the order of issue):
#
#     issue S^T       Q and dO of the block full; waited for at once, as P needs all of it
#     issue dV +=     P rounded, in registers
#     issue dP^T      dO has been there since S^T; waited for with dV: dS needs dP^T
#     issue dK +=     dS in registers; its copy for the adder goes to shared memory meanwhile
#     wait for all    dK done: Q and dO are not read any more, and are given back


@triton.jit
def backward_block(operands, part, tile, slot, sums, count, block, masked):
    """Compute one block of queries against a consumer's 64 keys, from S^T to dK. Return (sums, count).

    ``masked`` may be known at compile time.
    """
    queries = operands.queries
    scores = issue_scores(operands, part, slot, count)
    scores = tlx.async_dot_wait(0, scores)
    ds, dv = use_scores(operands, part, tile, slot, scores, sums.dv, count, block, masked)
    dk = add_product(ds, queries.q, count & 1, sums.dk)
    if operands.with_dq:
        publish_ds(operands.ds, ds, count, part)
    left = tlx.async_dot_wait(0, dk.left)
    right = dk.right
    if queries.q.width > 0:
        right = tlx.async_dot_wait(0, dk.right)
    tlx.barrier_arrive(queries.q.empties[count & 1], 1)
    return Sums(Pieces(left, right), dv), count + 1


@triton.jit
def walk_blocks(operands, part, tile, slot, sums, count, blocks, group):
    """Walk all blocks of all query heads: masked ones at both edges of the band, between them a bulk that needs no mask."""
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
def walk_lists(operands, part, tile, slot, sums, count, lists, first_head, group, BROADCAST_Q: tl.constexpr):
    """Walk the listed blocks of all query heads, each with the list of its own; whether to mask is asked as the loop runs."""
    bulk = tile.query_blocks(BLOCK_N, BLOCK_M)
    for head in range(first_head, first_head + group):
        listed = key_list(tile, head, lists, BROADCAST_Q)
        for i in range(listed.count()):
            block = listed.nth(i)
            masked = (block < bulk.bulk_begin) | (block >= bulk.bulk_end)
            sums, count = backward_block(operands, part, tile, slot, sums, count, block, masked)
    return sums, count


@triton.jit
def walk_blocks_ahead(operands, part, tile, slot, sums, count, blocks, group):
    """Walk them in one loop that issues a block's S^T behind the dK of the block before.

    Whether a block is masked is asked as the loop runs.
    """
    queries = operands.queries
    LATER: tl.constexpr = 1 + (queries.q.width > 0)  # products of the next S^T
    if blocks.end > blocks.first:
        scores = issue_scores(operands, part, slot, count)
        scores = tlx.async_dot_wait(0, scores)
        block = blocks.first
        masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
        ds, dv = use_scores(operands, part, tile, slot, scores, sums.dv, count, block, masked)
        dk = sums.dk
        for _ in range(group * (blocks.end - blocks.first) - 1):
            dk = add_product(ds, queries.q, count & 1, dk)
            scores = issue_scores(operands, part, slot, count + 1)
            if operands.with_dq:
                publish_ds(operands.ds, ds, count, part)
            left = tlx.async_dot_wait(LATER, dk.left)
            right = dk.right
            if queries.q.width > 0:
                right = tlx.async_dot_wait(LATER, dk.right)
            dk = Pieces(left, right)
            tlx.barrier_arrive(queries.q.empties[count & 1], 1)
            scores = tlx.async_dot_wait(0, scores)
            count += 1
            block += 1
            if block == blocks.end:
                block = blocks.first
            masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
            ds, dv = use_scores(operands, part, tile, slot, scores, dv, count, block, masked)
        dk = add_product(ds, queries.q, count & 1, dk)
        if operands.with_dq:
            publish_ds(operands.ds, ds, count, part)
        left = tlx.async_dot_wait(0, dk.left)
        right = dk.right
        if queries.q.width > 0:
            right = tlx.async_dot_wait(0, dk.right)
        dk = Pieces(left, right)
        tlx.barrier_arrive(queries.q.empties[count & 1], 1)
        count += 1
        sums = Sums(dk, dv)
    return sums, count


@triton.jit
def consume(box_dk, box_dv, stages, queue, operands, group, scale, lists, part: tl.constexpr, cfg: tl.constexpr):
    """Consume: dV and dK of 64 keys of every tile."""
    k = operands.k
    v = operands.v
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        sums = Sums(zero_pieces(KEYS, k), zero_pieces(KEYS, v))
        slot, phase = k.slot(done)
        tlx.barrier_wait(k.fulls[slot], phase)
        tlx.barrier_wait(v.fulls[slot], phase)
        if cfg.list_heads > 0:
            sums, count = walk_lists(
                operands, part, tile, slot, sums, count, lists, kv_head * group, group, cfg.broadcast_q
            )
        elif cfg.ahead:
            sums, count = walk_blocks_ahead(operands, part, tile, slot, sums, count, blocks, group)
        else:
            sums, count = walk_blocks(operands, part, tile, slot, sums, count, blocks, group)
        tlx.barrier_arrive(k.empties[slot], 1)
        tlx.barrier_arrive(v.empties[slot], 1)
        tlx.async_descriptor_store_wait(0)
        store_pieces(box_dv, stages, part, sums.dv, tile.kv, tile.row + part * KEYS, kv_head)
        tlx.async_descriptor_store_wait(0)
        store_pieces(box_dk, stages, part, sums.dk.times(scale), tile.kv, tile.row + part * KEYS, kv_head)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def add_columns(
    box_dq, stage, ds, slot, k, k_slot, row, PENDING: tl.constexpr, COLUMN: tl.constexpr, LAST: tl.constexpr
):
    """Add the columns from COLUMN on of a block's dQ = dS K in fp32 by TMA: DQ_COLUMNS of the left piece, or the right one.

    PENDING other additions may still read their stages. The LAST columns give dS back.
    """
    LEFT: tl.constexpr = k.left.shape[1]
    if COLUMN < LEFT:
        columns = tlx.local_slice(k.left[k_slot], [0, COLUMN], [BLOCK_N, DQ_COLUMNS])
        dq = tlx.async_dot(tlx.local_trans(ds.buffers[slot]), columns)
    else:
        dq = tlx.async_dot(tlx.local_trans(ds.buffers[slot]), k.right[k_slot])
    dq = tlx.async_dot_wait(0, dq)
    if LAST:
        tlx.barrier_arrive(ds.empties[slot], 1)
    tlx.async_descriptor_store_wait(PENDING)
    tlx.local_store(stage, dq)
    tlx.fence("async_shared")
    if COLUMN < LEFT:
        tlx.async_descriptor_store(box_dq.left, stage, [row, COLUMN], store_reduce="add")
    else:
        tlx.async_descriptor_store(box_dq.right, stage, [row, COLUMN], store_reduce="add")


@triton.jit
def add_block(box_dq, stages, ds, k, k_slot, count, row):
    """Add dQ [64, D] of one block, from both halves of its dS^T, DQ_COLUMNS or fewer at a time."""
    LEFT: tl.constexpr = k.left.shape[1]
    PENDING: tl.constexpr = LEFT // DQ_COLUMNS - 1 + (k.width > 0)
    slot, phase = pair_slot(count)
    tlx.barrier_wait(ds.fulls[slot], phase)
    for i in tl.static_range(LEFT // DQ_COLUMNS):
        add_columns(box_dq, stages.left[i], ds, slot, k, k_slot, row, PENDING, i * DQ_COLUMNS, i == PENDING)
    if k.width > 0:
        add_columns(box_dq, stages.right[0], ds, slot, k, k_slot, row, PENDING, LEFT, True)


@triton.jit
def add_up(box_dq, stages, dq_rows, queue, k, ds, group, lists, cfg: tl.constexpr):
    """Add dQ of every block that the consumers have published."""
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        begin = tile.pad_begin
        if cfg.broadcast_q:
            begin = 0
        slot, phase = k.slot(done)
        tlx.barrier_wait(k.fulls[slot], phase)
        for head in range(kv_head * group, kv_head * group + group):
            row = head * dq_rows + begin
            blocks = visits(tile, head, lists, cfg)
            for n in range(blocks.count()):
                add_block(box_dq, stages, ds, k, slot + always_zero(count), count, row + blocks.nth(n) * BLOCK_M)
                count += 1
        tlx.barrier_arrive(k.empties[slot], 1)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "dq_rows", "kv_heads", "group", "list_rows", "list_capacity"])
def backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    desc_dk,
    desc_dv,
    desc_q_right,
    desc_k_right,
    desc_v_right,
    desc_do_right,
    desc_dq_right,
    desc_dk_right,
    desc_dv_right,
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
    starts,
    columns,
    kinds,
    list_rows,
    list_capacity,
    cfg: tl.constexpr,
):
    """Allocate buffers and barriers, and assign the roles to warps. Grid: (programs,).

    desc_q, desc_do, desc_dk, desc_dv: ragged, boxes [64, D]; desc_k, desc_v: ragged, [128, D]; desc_dq: plain, fp32,
    [H * dq_rows, D], boxes [64, 64]. Where columns lie in two pieces these are of the left one, and desc_*_right of the right
    one, else None. lse2, delta [H, padded_rows] fp32. D holds both head dimensions. records, counts: a list of 128 keys per
    tile; counter: one int32 of 0; cfg: a BackwardConfig. starts, columns, kinds: transposed block lists, or None.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    LEFT: tl.constexpr = cfg.head_dim - cfg.right
    num_tiles = tl.load(counts + 1)
    operands = alloc_operands(DTYPE, scale_log2, cfg)
    k, v, queries, ds = operands.k, operands.v, operands.queries, operands.ds
    dq_left = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, LEFT // DQ_COLUMNS)
    dq_right = dq_left
    if cfg.right > 0:
        dq_right = tlx.local_alloc((BLOCK_M, cfg.right), tl.float32, 1)
    dq_stages = stage_tiles(k, dq_left, dq_right, cfg.right)
    # A consumer's dV leaves first, then its dK.
    left, right = alloc_pieces(KEYS, LEFT, cfg.right, DTYPE, CONSUMERS)
    stages = stage_tiles(k, left, right, cfg.right)
    box_dk = both_boxes(desc_dk, desc_dk_right, LEFT, cfg.right)
    box_dv = both_boxes(desc_dv, desc_dv_right, LEFT, cfg.right)
    lists = block_lists(starts, columns, kinds, list_rows, kv_heads * group, list_capacity, cfg.list_heads)
    numbers = alloc_numbers(CONSUMERS + cfg.with_dq)
    queue = Queue(
        records, num_tiles, num_tiles * kv_heads, kv_heads, counter, numbers, False, False, cfg.has_lo, cfg.has_hi
    )
    with tlx.async_tasks():
        # The adder, where there is one, is the default task: it gets what registers the others leave.
        with tlx.async_task("default"):  # adder of dQ
            if cfg.with_dq:
                box_dq = both_boxes(desc_dq, desc_dq_right, LEFT, cfg.right)
                add_up(box_dq, dq_stages, dq_rows, queue, k, ds, group, lists, cfg)
            else:
                consume(box_dk, box_dv, stages, queue, operands, group, scale, lists, 0, cfg)
        if cfg.with_dq:
            with tlx.async_task(num_warps=4, registers=cfg.registers):  # consumer 0
                consume(box_dk, box_dv, stages, queue, operands, group, scale, lists, 0, cfg)
        with tlx.async_task(num_warps=4, registers=cfg.registers):  # consumer 1
            consume(box_dk, box_dv, stages, queue, operands, group, scale, lists, 1, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            box_q = both_boxes(desc_q, desc_q_right, LEFT, cfg.right)
            box_k = both_boxes(desc_k, desc_k_right, LEFT, cfg.right)
            box_v = both_boxes(desc_v, desc_v_right, LEFT, cfg.right)
            box_do = both_boxes(desc_do, desc_do_right, LEFT, cfg.right)
            constants = RowPointers(lse2, delta, padded_rows)
            produce(box_q, box_k, box_v, box_do, constants, queue, k, v, queries, group, lists, cfg)
