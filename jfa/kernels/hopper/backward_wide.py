"""dK and dV for head dims beyond 128, sm_90: a warp group per gradient. dQ has its own pass, backward_dq.

For a tile of 64 keys of one key/value head and every block of 64 queries that sees it, transposed (keys are rows):

    weights group:    S^T  = K Q^T     P^T  = exp2(S^T scale - lse)      dV += P^T dO
    scores group:     dP^T = V dO^T    dS^T = P^T (dP^T - delta)         dK += dS^T Q

Registers are the limit: dK and dV of 64 keys and 256 columns are 128 KB, half of the register file. Each group owns one
of them whole (128 registers per thread) and computes the left factor of its second product in registers. Only P^T [64,
64] passes from one group to the other, through shared memory, 8 KB per block. So no product is computed twice, and the
only wait is for P. Each group issues its next first product ahead of its second one, so exp2 and dS run at the same time as
products.

Dividing the columns of dK and dV among both groups instead would make each compute S^T and dP^T twice, or by halves of
32 queries, whose products are bound by shared memory (1.5 times their tensor time), and would pass P and dS both ways.

Adding dQ up here, as jfa.kernels.hopper.backward does for 128 keys, would move 64 KB of fp32 per block through shared
memory and to L2, for 64 keys. The separate pass repeats two products of five, but moves less, has no sums to clear and
to convert, and is deterministic. docs/hopper-notes.md has the numbers.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import RowPointers, aggregate
from jfa.kernels.common.ring import Ring, alloc_ring, pair_slot
from jfa.kernels.common.rounding import rounded_pairs, rounded_probabilities
from jfa.kernels.hopper.backward import always_zero
from jfa.kernels.hopper.columns import (
    Boxes,
    Pieces,
    Tiles,
    add_product,
    alloc_tiles,
    load_pieces,
    multiply_transposed,
    store_pieces,
    zero_pieces,
)
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Keys of a tile, on the host and in the kernel; queries of a block.
BLOCK = 64
BLOCK_N = tl.constexpr(BLOCK)
BLOCK_M = tl.constexpr(64)
GROUPS = tl.constexpr(2)


@aggregate
class Rows:
    """A ring of blocks of 64 queries and of one constant per row, on one barrier."""

    tiles: Tiles
    constants: tlx.buffered_tensor

    @triton.jit
    def load(self, count, boxes, rows, row, head, constants):
        """Fill the count-th slot; ``constants`` points at the one of the sequence's first query."""
        tiles = self.tiles
        slot, phase = tiles.slot(count)
        tlx.barrier_wait(tiles.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(tiles.fulls[slot], tiles.bytes)
        load_pieces(tiles, slot, boxes, rows, row, head)
        tlx.async_load(constants + row, self.constants[slot], bulk=True, barrier=tiles.fulls[slot])


@aggregate
class Operands:
    """Buffers that both groups read.

    Attributes:
        k, v: the tile's keys and values. dK is stored through K's buffer, dV through V's.
        q, do: rings of query blocks, with log-sum-exp in Q's ring and delta in dO's.
        p: ring of P^T, from the weights group to the scores group.
        k_read, v_read: barriers: the group that reads K (or V) is done with the tile's.
        scale_log2: from scores to log2 units.
    """

    k: Tiles
    v: Tiles
    q: Rows
    do: Rows
    p: Ring
    k_read: tlx.mbarrier
    v_read: tlx.mbarrier
    scale_log2: tl.tensor


@triton.jit
def alloc_rows(LEFT: tl.constexpr, RIGHT: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):
    """Allocate a ring of query blocks."""
    tiles = alloc_tiles(BLOCK_M, LEFT, RIGHT, DTYPE, STAGES, GROUPS, 1, BLOCK_M * 4)
    return Rows(tiles, tlx.local_alloc((BLOCK_M,), tl.float32, STAGES))


@triton.jit
def produce(box_q, box_k, box_v, box_do, constants, queue, operands, group):
    """Produce of every tile its keys and values, then, head by head, the blocks of queries that see them."""
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        operands.k.load(done, box_k, tile.kv, tile.row, kv_head)
        operands.v.load(done, box_v, tile.kv, tile.row, kv_head)
        for head in range(kv_head * group, kv_head * group + group):
            lse2, delta = constants.of_sequence(tile, head)
            for block in range(blocks.first, blocks.end):
                operands.q.load(count, box_q, tile.q, block * BLOCK_M, head, lse2)
                operands.do.load(count, box_do, tile.out, block * BLOCK_M, head, delta)
                count += 1
        done += 1
        unit = queue.draw(done)


# What the weights group issues per block i, and what has then to be done (its products finish in the order of issue):
#
#     issue S^T(i)              Q(i) full
#     issue dV += P(i-1) dO     dO(i-1) full; P(i-1) is in registers
#     wait for all but dV       S^T(i) done: Q(i) is given back; P(i) is made, and handed over, during dV's product
#     wait for all              dV done: dO(i-1) is given back


@triton.jit
def issue_scores(operands, count):
    """Issue S^T of the count-th block; it is not waited for."""
    slot = operands.q.tiles.await_full(count)
    return multiply_transposed(operands.k, always_zero(count), operands.q.tiles, slot)


@triton.jit
def make_weights(operands, tile, scores, count, block, masked):
    """Return P^T of the count-th block from its S^T, rounded, and hand it to the other group. Q is given back."""
    queries = operands.q
    slot, phase = queries.tiles.slot(count)
    row_lse = tlx.local_load(queries.constants[slot])
    queries.tiles.release(count)
    p = tl.math.exp2(scores * operands.scale_log2 - row_lse[None, :])
    if masked:
        keys = tile.row + tl.arange(0, BLOCK_N)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        p = tl.where(tile.pair_mask(rows[None, :], keys[:, None]), p, 0.0)
    p = rounded_probabilities(p, operands.k.left.dtype)
    ring = operands.p
    at, phase = pair_slot(count)
    tlx.barrier_wait(ring.empties[at], phase ^ 1)
    tlx.local_store(ring.buffers[at], p)
    tlx.barrier_arrive(ring.fulls[at], 1)
    return p


@triton.jit
def add_values(operands, p, dv, count):
    """Issue dV += P^T dO of the count-th block; not waited for."""
    slot = operands.do.tiles.await_full(count)
    return add_product(p, operands.do.tiles, slot, dv)


@triton.jit
def walk_weights(operands, tile, blocks, heads, dv, count):
    """Walk all blocks of ``heads`` query heads for dV. Whether to mask is asked as the loop runs. Returns (dV, count)."""
    if blocks.end > blocks.first:
        block = blocks.first
        masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
        scores = issue_scores(operands, count)
        scores = tlx.async_dot_wait(0, scores)
        p = make_weights(operands, tile, scores, count, block, masked)
        for _ in range(heads * (blocks.end - blocks.first) - 1):
            scores = issue_scores(operands, count + 1)
            dv = add_values(operands, p, dv, count)
            scores = tlx.async_dot_wait(2, scores)
            block += 1
            if block == blocks.end:
                block = blocks.first
            masked = (block < blocks.bulk_begin) | (block >= blocks.bulk_end)
            p = make_weights(operands, tile, scores, count + 1, block, masked)
            dv = Pieces(tlx.async_dot_wait(0, dv.left), tlx.async_dot_wait(0, dv.right))
            operands.do.tiles.release(count)
            count += 1
        dv = add_values(operands, p, dv, count)
        dv = Pieces(tlx.async_dot_wait(0, dv.left), tlx.async_dot_wait(0, dv.right))
        operands.do.tiles.release(count)
        count += 1
    return dv, count


@triton.jit
def sum_values(box_dv, queue, operands, group):
    """Make P^T and dV of every tile: the weights group."""
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        operands.k.await_full(done)
        dv, count = walk_weights(operands, tile, blocks, group, zero_pieces(BLOCK_N, operands.v), count)
        tlx.barrier_arrive(operands.k_read[0], 1)
        tlx.barrier_wait(operands.v_read[0], done & 1)
        store_pieces(box_dv, operands.v, always_zero(count), dv, tile.kv, tile.row, kv_head)
        tlx.async_descriptor_store_wait(0)
        operands.v.release(done)
        done += 1
        unit = queue.receive(done)


# What the scores group issues per block i:
#
#     issue dP^T(i)             dO(i) full; its sum starts at -delta
#     issue dK += dS(i-1) Q     Q(i-1) full; dS(i-1) is in registers
#     wait for all but dK       dP^T(i) done: dO(i) is given back; dS(i) = P(i) dP(i) during dK's product
#     wait for all              dK done: Q(i-1) is given back


@triton.jit
def issue_dp(operands, count):
    """Issue dP^T - delta of the count-th block; it is not waited for."""
    slot = operands.do.tiles.await_full(count)
    less_delta = tl.broadcast_to(-tlx.local_load(operands.do.constants[slot])[None, :], [BLOCK_N, BLOCK_M])
    v = always_zero(count)
    dp = tlx.async_dot(operands.v.left[v], tlx.local_trans(operands.do.tiles.left[slot]), less_delta)
    return tlx.async_dot(operands.v.right[v], tlx.local_trans(operands.do.tiles.right[slot]), dp)


@triton.jit
def make_ds(operands, dp, count):
    """Return dS^T of the count-th block, rounded, from its dP^T - delta and the other group's P^T. dO is given back."""
    operands.do.tiles.release(count)
    ring = operands.p
    at, phase = pair_slot(count)
    tlx.barrier_wait(ring.fulls[at], phase)
    p = tlx.local_load(ring.buffers[at])
    tlx.barrier_arrive(ring.empties[at], 1)
    return rounded_pairs(p.to(tl.float32) * dp, p.dtype)


@triton.jit
def add_keys(operands, ds, dk, count):
    """Issue dK += dS^T Q of the count-th block; not waited for."""
    slot = operands.q.tiles.await_full(count)
    return add_product(ds, operands.q.tiles, slot, dk)


@triton.jit
def walk_scores(operands, blocks, heads, dk, count):
    """Walk all blocks of ``heads`` query heads for dK. Returns (dK, count)."""
    if blocks.end > blocks.first:
        dp = issue_dp(operands, count)
        dp = tlx.async_dot_wait(0, dp)
        ds = make_ds(operands, dp, count)
        for _ in range(heads * (blocks.end - blocks.first) - 1):
            dp = issue_dp(operands, count + 1)
            dk = add_keys(operands, ds, dk, count)
            dp = tlx.async_dot_wait(2, dp)
            ds = make_ds(operands, dp, count + 1)
            dk = Pieces(tlx.async_dot_wait(0, dk.left), tlx.async_dot_wait(0, dk.right))
            operands.q.tiles.release(count)
            count += 1
        dk = add_keys(operands, ds, dk, count)
        dk = Pieces(tlx.async_dot_wait(0, dk.left), tlx.async_dot_wait(0, dk.right))
        operands.q.tiles.release(count)
        count += 1
    return dk, count


@triton.jit
def sum_keys(box_dk, queue, operands, group, scale):
    """Make dS^T and dK of every tile: the scores group."""
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, kv_head = queue.next_tile(unit)
        blocks = tile.query_blocks(BLOCK_N, BLOCK_M)
        operands.v.await_full(done)
        dk, count = walk_scores(operands, blocks, group, zero_pieces(BLOCK_N, operands.k), count)
        tlx.barrier_arrive(operands.v_read[0], 1)
        tlx.barrier_wait(operands.k_read[0], done & 1)
        store_pieces(box_dk, operands.k, always_zero(count), dk.times(scale), tile.kv, tile.row, kv_head)
        tlx.async_descriptor_store_wait(0)
        operands.k.release(done)
        done += 1
        unit = queue.receive(done)


@triton.jit(do_not_specialize=["padded_rows", "kv_heads", "group"])
def backward_wide_kernel(
    desc_q_left,
    desc_q_right,
    desc_k_left,
    desc_k_right,
    desc_v_left,
    desc_v_right,
    desc_do_left,
    desc_do_right,
    desc_dk_left,
    desc_dk_right,
    desc_dv_left,
    desc_dv_right,
    lse2,
    delta,
    padded_rows,
    records,
    counts,
    counter,
    kv_heads,
    group,
    scale,
    scale_log2,
    cfg: tl.constexpr,
):
    """Allocate buffers and barriers, and assign the roles to warps. Grid: (programs,).

    desc_*: ragged, boxes of 64 rows and the columns that cfg, a WideConfig, gives both pieces. lse2, delta [H, padded_rows]
    fp32; records, counts: a list of 64 keys per tile; counter: one int32 of 0.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q_left)
    num_tiles = tl.load(counts + 1)
    k = alloc_tiles(BLOCK_N, cfg.left, cfg.right, DTYPE, 1, 1)
    v = alloc_tiles(BLOCK_N, cfg.left_v, cfg.right_v, DTYPE, 1, 1)
    q = alloc_rows(cfg.left, cfg.right, DTYPE, cfg.stages)
    do = alloc_rows(cfg.left_v, cfg.right_v, DTYPE, cfg.stages)
    p = alloc_ring(BLOCK_N, BLOCK_M, DTYPE, 2, 1)
    k_read = tlx.alloc_barriers(1, arrive_count=1)
    v_read = tlx.alloc_barriers(1, arrive_count=1)
    operands = Operands(k, v, q, do, p, k_read, v_read, scale_log2)
    numbers = alloc_numbers(GROUPS)
    queue = Queue(
        records, num_tiles, num_tiles * kv_heads, kv_heads, counter, numbers, False, False, cfg.has_lo, cfg.has_hi
    )
    with tlx.async_tasks():
        with tlx.async_task("default"):  # weights group
            sum_values(Boxes(desc_dv_left, desc_dv_right, cfg.left_v), queue, operands, group)
        with tlx.async_task(num_warps=4, registers=cfg.registers):  # scores group
            sum_keys(Boxes(desc_dk_left, desc_dk_right, cfg.left), queue, operands, group, scale)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            produce(
                Boxes(desc_q_left, desc_q_right, cfg.left),
                Boxes(desc_k_left, desc_k_right, cfg.left),
                Boxes(desc_v_left, desc_v_right, cfg.left_v),
                Boxes(desc_do_left, desc_do_right, cfg.left_v),
                RowPointers(lse2, delta, padded_rows),
                queue,
                operands,
                group,
            )
