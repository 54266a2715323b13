"""The Blackwell forward: persistent CTAs, five roles, two softmax groups in ping-pong.

One CTA works on a tile of 256 queries of one head, in two halves of 128 rows that share each block of 128 keys:

    load        1 warp    TMA: Q once per tile, then K and V blocks through one ring
    mma         1 warp    tensor cores: S = Q K^T of a half, O += P V of a half, always alternating
    softmax     2 x 4     a group per half: maximum, exp2, row sum; stores P where S was, in slices
    correction  4 warps   rescales O where the maximum grew, at the end divides by the sum and writes O to SMEM, LSE out
    store       1 warp    TMA: O to global memory, half of its columns at a time

While one group computes its exponentials the tensor cores multiply for the other. The overlap continues across tiles:
the last P V of a tile is issued between the first S products of the next, and O is stored while the next tile's softmax
runs. A tile of at most 128 queries would leave the second half empty, so there both groups take the *same* queries and
every other key block (``split_keys``), and the correction merges their results. All communication is by mbarriers:
``*_fulls`` say that data is there, ``*_empties`` that it has been consumed.

Queries and keys of up to 192 columns (values of up to 128) come in two boxes, of 128 columns and a *tail* of 64, and S
is the sum of two products.

TMEM (512 columns at D = 128): S0 S1 O0 O1. P and alpha share the columns of their own S; the order of the products
protects them (:func:`multiply_tile`). Row sums and maxima are in SMEM, because the next tile's S overwrites TMEM before
they are read.

Jagged: every TMA box is bounded by its own sequence (:mod:`jfa.kernels.common.ragged`), so a tail tile reads zeros and never its
neighbor, and stores nothing past its end.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.blackwell.epilogue import finish_tile, free_accumulators, rescale_steps, store_tile
from jfa.kernels.blackwell.listed import listed_steps
from jfa.kernels.blackwell.softmax import NO_MAXIMUM, exp2_on_both_pipes, running_maximum, split_columns
from jfa.kernels.blackwell.tails import Boxes
from jfa.kernels.common.block_lists import block_lists
from jfa.kernels.common.nouns import Tile, aggregate, load_tile
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.softmax import HUGE, Scale
from jfa.kernels.common.units import first_unit


@triton.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,  # [H, rows_out] fp32
    records_ptr,  # [tiles, 9] int32, longest first; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    rows_out,
    scale_log2,  # |sm_scale| * log2(e), positive
    coarse_scale,  # of the common Scale; made here, before the roles part, it would spill in all of them
    starts,  # block lists, or None; see jfa.block_sparse.BlockLists
    columns,
    kinds,
    list_rows,
    list_capacity,
    q_tail_desc,  # of the columns beyond 128, or None
    k_tail_desc,
    cfg: tl.constexpr,  # ForwardConfig
):
    memory, scale = alloc_memory(tlx.dtype_of(q_desc), cfg), Scale(scale_log2, coarse_scale, HUGE, True)
    lists = block_lists(starts, columns, kinds, list_rows, cfg.heads, list_capacity, cfg.list_heads)
    if cfg.clc:
        queue = tlx.clc_create_context(num_consumers=6, num_stages=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            free_accumulators(memory.accs)
            walk, steps, outs = first_unit(counts_ptr, cfg.heads), 0, 0
            while walk.going():
                steps, outs = correct_tile(memory, lse_ptr, rows_out, records_ptr, walk, steps, outs, scale, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=4, registers=cfg.softmax_registers, replicate=2):  # softmax
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, steps_done = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                steps_done = softmax_tile(memory, half, records_ptr, walk, steps_done, scale, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, issued, going = first_unit(counts_ptr, cfg.heads), nothing_issued(), tl.to_tensor(True)
            while going:  # one round more than tiles: a tile's last P V goes out between the next tile's first S
                going = walk.going()
                issued = multiply_tile(memory, records_ptr, walk, issued, lists, cfg)
                if going:
                    walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load
            walk, kv_count = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                if cfg.clc:  # two answers may be on their way: this role is up to a tile ahead of the others
                    tlx.clc_producer(queue, walk.phase(2) ^ 1, k=walk.stage(2))
                q_boxes, k_boxes = Boxes(q_desc, q_tail_desc), Boxes(k_desc, k_tail_desc)
                kv_count = load_inputs(q_boxes, k_boxes, v_desc, memory, records_ptr, walk, kv_count, lists, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # store
            walk, outs = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():  # takes its answer before the wait for O, so that the answer's slot is free early
                tile, head = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi), walk.head()
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)
                outs = store_tile(o_desc, memory.o, tile, head, outs, cfg)


# ------------------------------------------------------------------------------------------------- memory and barriers


@aggregate
class Scores:
    """S of each half in TMEM, and what the softmax stores in its place: P in 16 bits, and alpha."""

    s: tlx.buffered_tensor  # [2] x [128, 128] fp32
    p: tlx.buffered_tensor  # [2] x [128, 128]
    alphas: tlx.buffered_tensor  # [2] x [128, 1] fp32: the factor for what was accumulated under the maximum before
    s_fulls: tlx.mbarrier
    p_fulls: tlx.mbarrier  # p_slices per half
    alpha_fulls: tlx.mbarrier


@aggregate
class Accumulators:
    """O of each half in TMEM."""

    tiles: tlx.buffered_tensor  # [2] x [128, head_dim] fp32
    readys: tlx.mbarrier  # rescaled or, at a tile's start, free: P V may write
    fulls: tlx.mbarrier  # the tile's last P V is done


@aggregate
class RowSums:
    """Row sums and maxima of each half in SMEM, once per tile."""

    sums: tlx.buffered_tensor  # [2] x [128] fp32
    maxima: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier


@aggregate
class Tails:
    """The columns of Q and K beyond 128. Those of Q come and go with its others; K's have a ring, as V has none of them."""

    q: tlx.buffered_tensor  # [1 or 2] x [128, tail_dim]
    k: Ring


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA. ``q`` is a ring of one per half; ``o`` takes a half's column
    parts in turn."""

    q: Ring
    tails: tl.core.base_value  # Tails, or None where rows end at column 128
    kv: Ring
    o: Ring
    scores: Scores
    accs: Accumulators
    rows: RowSums


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    q = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, 1, 1, cfg.q_halves)
    kv = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, cfg.kv_slots, 1)
    o = alloc_ring(BLOCK_M, cfg.head_dim // cfg.o_parts, DTYPE, cfg.o_slots, 1)
    sums = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    maxima = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    rows = RowSums(sums, maxima, tlx.alloc_barriers(2), tlx.alloc_barriers(2))

    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 2, tlx.storage_kind.tmem, reuse=storage)
    alphas = tlx.local_alloc((BLOCK_M, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p, alphas, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    p_fulls = tlx.alloc_barriers(2 * cfg.p_slices)
    scores = Scores(s, p, alphas, tlx.alloc_barriers(2), p_fulls, tlx.alloc_barriers(2))

    tiles = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 2, tlx.storage_kind.tmem)
    accs = Accumulators(tiles, tlx.alloc_barriers(2), tlx.alloc_barriers(2))
    if cfg.tail_dim:
        q = Ring(q.buffers, q.fulls, q.empties, q.stages, q.bytes + BLOCK_M * cfg.tail_dim * tlx.size_of(DTYPE), 0)
        HALVES: tl.constexpr = cfg.q_halves
        q_tails = tlx.local_alloc((BLOCK_M, cfg.tail_dim), DTYPE, HALVES)
        tails = Tails(q_tails, alloc_ring(BLOCK_N, cfg.tail_dim, DTYPE, cfg.tail_slots, 1))
        return Memory(q, tails, kv, o, scores, accs, rows)
    else:
        return Memory(q, None, kv, o, scores, accs, rows)


# --------------------------------------------------------------------------------------------------------------- steps


@aggregate
class Steps:
    """A tile's walk over its keys: a step is one key block for both halves or, where they split the keys, one for each."""

    first: tl.tensor  # key block
    count: tl.tensor
    split_keys: tl.tensor  # 1 in a tile of at most 128 queries, which both halves take; else 0

    @triton.jit
    def block(self, half, step):
        """Return the key block of a half's step."""
        return self.first + half * self.split_keys + (step << self.split_keys)

    @triton.jit
    def half_tile(self, tile, half):
        """Return the tile of a half's 128 queries."""
        row = tile.row + half * (1 - self.split_keys) * BLOCK_M
        return Tile(row, tile.q, tile.kv, tile.out, tile.band, tile.pad_begin)

    @triton.jit
    def bulk(self, half, blocks):
        """Return the steps [begin, end) of a half that need no mask, from the Blocks of its tile."""
        split_keys, start = self.split_keys, self.block(half, 0)
        begin = min(max(blocks.bulk_begin - start + split_keys, 0) >> split_keys, self.count)
        end = min(max(max(blocks.bulk_end - start + split_keys, 0) >> split_keys, begin), self.count)
        return begin, end


@triton.jit
def walk_steps(tile, walk, lists, cfg: tl.constexpr):
    """Return a tile's Steps, over its list where there are lists."""
    if cfg.list_heads:
        return listed_steps(tile, tl.where(walk.going(), walk.head(), 0), lists, cfg.broadcast_q)
    else:
        return steps_of(tile, cfg)


@triton.jit
def steps_of(tile, cfg: tl.constexpr):
    """Return a tile's Steps: at least one, wholly masked if it sees no key, so that no role waits for another forever."""
    if cfg.split_keys:
        split_keys = tl.to_tensor(1)
    else:
        split_keys = (tile.q.length - tile.row <= BLOCK_M).to(tl.int32)
    blocks = tile.key_blocks(cfg.tile_rows, BLOCK_N)
    return Steps(blocks.first, (blocks.end - blocks.first + split_keys) >> split_keys, split_keys)


# ---------------------------------------------------------------------------------------------------------------- load


@triton.jit
def load_inputs(q_boxes, k_boxes, v_desc, memory, records_ptr, walk, kv_count, lists, cfg: tl.constexpr):
    """Load Q, and K and V blocks in the order in which :func:`multiply_tile` uses them. Returns the blocks loaded so far."""
    HALVES: tl.constexpr = cfg.q_halves
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps, head = walk_steps(tile, walk, lists, cfg), walk.head()
    kv_head = head // cfg.group
    k_count = kv_count >> 1  # a tile has as many blocks of V as of K
    # K first: the ring has room for it before the tile before is done with Q.
    kv_count = load_keys(k_boxes, memory, tile, kv_head, steps.block(0, 0), kv_count, k_count)
    for half in tl.static_range(HALVES):
        # Where keys are split the tile ends before half 1: its box is zeros and costs no traffic, but keeps the phases in step.
        row = tile.row + half * BLOCK_M
        memory.q.nth(half).load(walk.done, q_boxes.main, tile.q.box(row, head))
        if memory.tails is not None:
            box = tile.q.box(row, head, cfg.head_dim)
            tlx.async_descriptor_load(q_boxes.tail, memory.tails.q[half], box, memory.q.fulls[half])
    if steps.split_keys:
        kv_count = load_keys(k_boxes, memory, tile, kv_head, steps.block(1, 0), kv_count, k_count + 1)
    for step in range(0, steps.count):
        kv_count = load_values(v_desc, memory.kv, tile, kv_head, steps, step, kv_count)
        if step + 1 < steps.count:
            k_step = k_count + ((step + 1) << steps.split_keys)
            kv_count = load_keys(k_boxes, memory, tile, kv_head, steps.block(0, step + 1), kv_count, k_step)
            if steps.split_keys:
                kv_count = load_keys(k_boxes, memory, tile, kv_head, steps.block(1, step + 1), kv_count, k_step + 1)
    return kv_count


@triton.jit
def load_values(desc, kv, tile, head, steps, step, kv_count):
    """Load the V of one step: one block, or two where the halves split the keys. Returns the ring's blocks so far."""
    kv.load(kv_count, desc, tile.kv.box(steps.block(0, step) * BLOCK_N, head))
    kv_count += 1
    if steps.split_keys:
        kv.load(kv_count, desc, tile.kv.box(steps.block(1, step) * BLOCK_N, head))
        kv_count += 1
    return kv_count


@triton.jit
def load_keys(k_boxes, memory, tile, head, block, kv_count, k_count):
    """Load one block of K, the ``k_count``-th of all, into the ring's next slot. Returns the ring's blocks so far."""
    memory.kv.load(kv_count, k_boxes.main, tile.kv.box(block * BLOCK_N, head))
    if memory.tails is not None:
        HEAD_DIM: tl.constexpr = memory.kv.buffers.shape[1]
        memory.tails.k.load(k_count, k_boxes.tail, tile.kv.box(block * BLOCK_N, head, HEAD_DIM))
    return kv_count + 1


# ----------------------------------------------------------------------------------------------------------------- mma


@aggregate
class Issued:
    """The mma role's counters at the begin of a tile.

    Attributes:
        steps: of all tiles before.
        blocks: taken from the ring.
        last_steps, last_split: steps of the previous tile, and whether it splits its keys; its last P V are still to be
            issued.
    """

    steps: tl.tensor
    blocks: tl.tensor
    last_steps: tl.tensor
    last_split: tl.tensor


@triton.jit
def nothing_issued():
    """Return Issued before the first tile."""
    return Issued(tl.to_tensor(0), tl.to_tensor(0), tl.to_tensor(0), tl.to_tensor(0))


# Issue order of a step, i its number, P(i-1) and V(i-1) those of the step before (before step 0: of the tile before's last):
#
#   1  O0 += P0(i-1) V(i-1)   waits for P0 slice by slice, and for "O0 rescaled", which the correction signals after reading alpha0
#   2  S0  = Q0 K(i)^T        overwrites P0 and alpha0: P0 is read by 1, issued before; alpha0 was read before 1 could start
#   3  O1 += P1(i-1) V(i-1)   softmax 0 is at work on S0 meanwhile
#   4  S1  = Q1 K(i)^T        as 2, behind 3; softmax 1 is at work on S1 during the next step's 1 and 2
#
# Products run in the order of their issue, so S needs no barrier "free" and alpha none "read". A barrier committed behind a
# product covers all products before it: S0's says that V(i-1) may go once 3 is done, K(i) once 4 is.


@triton.jit
def multiply_tile(memory, records_ptr, walk, issued, lists, cfg: tl.constexpr):
    """Issue a tile's products; after the last tile only the P V that are left. Returns what is Issued then.

    The ring holds, for a step, the previous V and then K, two of each where the halves split the keys. Both halves are
    issued from one place: each product keeps a dozen addresses in registers.
    """
    going = walk.going()
    tile = load_tile(records_ptr, tl.where(going, walk.unit // cfg.heads, 0), cfg.has_lo, cfg.has_hi)
    steps = walk_steps(tile, walk, lists, cfg)
    count, kv_count = tl.where(going, steps.count, 1), issued.blocks
    for step in range(0, count):
        pending = (step > 0) | (walk.done > 0)
        v_split = tl.where(step > 0, steps.split_keys, issued.last_split)
        use_acc = tl.where(step > 0, step, issued.last_steps) > 1
        phase = (issued.steps + step - 1) & 1
        k_count = kv_count + tl.where(pending, 1 + v_split, 0)
        for half in range(0, 2):
            if pending:
                accumulate(memory, half, kv_count + half * v_split, phase, v_split, use_acc, cfg)
                if step == 0:
                    tlx.tcgen05_commit(memory.accs.fulls[half])
            if going:
                if step == 0:
                    await_queries(memory.q, half, walk.done & 1, cfg)
                k_half = half * steps.split_keys
                score(memory, half, k_count + k_half, steps.split_keys, cfg)
                if memory.tails is not None:  # as many blocks of V as of K have come before
                    score_tails(memory, half, (k_count >> 1) + k_half, steps.split_keys, cfg)
                if step + 1 == count:
                    free_queries(memory.q, half, steps.split_keys, cfg)
        kv_count = k_count + tl.where(going, 1 + steps.split_keys, 0)
    return Issued(issued.steps + count, kv_count, count, steps.split_keys)


@triton.jit
def await_queries(q, half, phase, cfg: tl.constexpr):
    """Wait for the Q of a half before a tile's first product with it; where all tiles split their keys there is one."""
    if cfg.split_keys:
        if half == 0:
            tlx.barrier_wait(q.fulls[0], phase)
    else:
        tlx.barrier_wait(q.fulls[half], phase)


@triton.jit
def free_queries(q, half, split_keys, cfg: tl.constexpr):
    """Signal that Q may be overwritten once the products issued so far are done, those of a tile's last step among them."""
    if cfg.split_keys:
        if half == 1:
            tlx.tcgen05_commit(q.empties[0])
    else:
        if split_keys == 0:
            tlx.tcgen05_commit(q.empties[half])
        elif half == 1:
            tlx.tcgen05_commit(q.empties[0])
            tlx.tcgen05_commit(q.empties[1])


@triton.jit
def score(memory, half, kv_count, split_keys, cfg: tl.constexpr):
    """Issue S = Q K^T of one half; with a tail, the part that the first 128 columns make. Half 1 frees a common K.

    What arrives on ``s_fulls`` says that S is there, and that all products issued before are done.
    """
    q, kv, scores = memory.q, memory.kv, memory.scores
    slot, phase = kv.slot(kv_count)
    if (half == 0) | (split_keys == 1):
        tlx.barrier_wait(kv.fulls[slot], phase)
    q_slot = 0 if cfg.split_keys else half * (1 - split_keys)
    k_transposed = tlx.local_trans(kv.buffers[slot])
    if memory.tails is None:
        tlx.async_dot(q.buffers[q_slot], k_transposed, scores.s[half], use_acc=False, mBarriers=[scores.s_fulls[half]])
    else:
        tlx.async_dot(q.buffers[q_slot], k_transposed, scores.s[half], use_acc=False, force_async=True)
    if (half == 1) | (split_keys == 1):
        tlx.tcgen05_commit(kv.empties[slot])


@triton.jit
def score_tails(memory, half, k_count, split_keys, cfg: tl.constexpr):
    """Issue S += Q K^T of the columns beyond 128, behind :func:`score`; then S is there."""
    q, k, scores = memory.tails.q, memory.tails.k, memory.scores
    slot, phase = k.slot(k_count)
    if (half == 0) | (split_keys == 1):
        tlx.barrier_wait(k.fulls[slot], phase)
    q_slot = 0 if cfg.split_keys else half * (1 - split_keys)
    k_transposed = tlx.local_trans(k.buffers[slot])
    tlx.async_dot(q[q_slot], k_transposed, scores.s[half], use_acc=True, mBarriers=[scores.s_fulls[half]])
    if (half == 1) | (split_keys == 1):
        tlx.tcgen05_commit(k.empties[slot])


@triton.jit
def accumulate(memory, half, kv_count, phase, split_keys, use_acc, cfg: tl.constexpr):
    """Issue O += P V of one half, slice by slice as softmax publishes P; the first step of a tile overwrites O."""
    SLICES: tl.constexpr = cfg.p_slices
    WIDTH: tl.constexpr = BLOCK_N // SLICES
    kv, scores, accs = memory.kv, memory.scores, memory.accs
    slot, kv_phase = kv.slot(kv_count)
    if (half == 0) | (split_keys == 1):
        tlx.barrier_wait(kv.fulls[slot], kv_phase)
    tlx.barrier_wait(accs.readys[half], phase)
    for i in tl.static_range(SLICES):
        tlx.barrier_wait(scores.p_fulls[half * SLICES + i], phase)
        p_slice = tlx.subslice(scores.p[half], i * WIDTH, WIDTH)
        v_slice = tlx.local_slice(kv.buffers[slot], [i * WIDTH, 0], [WIDTH, cfg.head_dim])
        tlx.async_dot(p_slice, v_slice, accs.tiles[half], use_acc=use_acc if i == 0 else True, force_async=True)
    if (half == 1) | (split_keys == 1):
        tlx.tcgen05_commit(kv.empties[slot])


# ------------------------------------------------------------------------------------------------------------- softmax


@triton.jit
def softmax_tile(memory, half, records_ptr, walk, steps_done, scale, lists, cfg: tl.constexpr):
    """Walk one half's key blocks, peeled: masked ones at the left edge, the bulk, masked ones at the right.

    Returns the steps done so far.
    """
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps = walk_steps(tile, walk, lists, cfg)
    tile = steps.half_tile(tile, half)
    left_end, bulk_end = steps.bulk(half, tile.key_blocks(BLOCK_M, BLOCK_N))

    row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    state = (row_max, row_sum)
    if cfg.has_lo:
        state = softmax_steps(memory, half, tile, steps, 0, left_end, steps_done, state, scale, True, cfg)
    left_end = left_end if cfg.has_lo else 0
    state = softmax_steps(memory, half, tile, steps, left_end, bulk_end, steps_done, state, scale, False, cfg)
    state = softmax_steps(memory, half, tile, steps, bulk_end, steps.count, steps_done, state, scale, True, cfg)

    row_max, row_sum = state
    hand_rows(memory.rows, half, walk.done, row_max, row_sum)
    return steps_done + steps.count


@triton.jit
def hand_rows(rows, half, done, row_max, row_sum):
    """Hand a tile's row maxima and sums to the correction."""
    tlx.barrier_wait(rows.empties[half], (done & 1) ^ 1)
    tlx.local_store(rows.sums[half], row_sum)
    tlx.local_store(rows.maxima[half], row_max)
    tlx.barrier_arrive(rows.fulls[half])


@triton.jit
def softmax_steps(
    memory, half, tile, steps, begin, end, steps_done, state, scale, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Make P in a stretch of steps, all masked or none. Takes and returns the state of the softmax: (row maxima, row sums)."""
    SLICES: tl.constexpr = cfg.p_slices
    WIDTH: tl.constexpr = BLOCK_N // SLICES
    row_max, row_sum = state
    memory = memory.scores
    for step in range(begin, end):
        tlx.barrier_wait(memory.s_fulls[half], (steps_done + step) & 1)
        scores = tlx.local_load(memory.s[half])
        if cfg.negative:
            scores = -scores
        if MASKED:
            scores = mask_scores(scores, tile, steps.block(half, step) * BLOCK_N)

        row_max, alpha, row_scale = running_maximum(scores, row_max, scale)
        if step > 0:  # nothing is accumulated yet before the first
            tlx.local_store(memory.alphas[half], alpha[:, None])
            tlx.barrier_arrive(memory.alpha_fulls[half])

        exponents = split_columns(fma_pairs(scores, row_scale[:, None], -row_max[:, None]), SLICES)
        published = ()
        for i in tl.static_range(SLICES):
            p = exp2_on_both_pipes(exponents[i], 0 if MASKED else cfg.fma_eighths)
            tlx.local_store(tlx.subslice(memory.p[half], i * WIDTH, WIDTH), p.to(memory.p.dtype))
            tlx.barrier_arrive(memory.p_fulls[half * SLICES + i])
            published = published + (p,)
        # Nothing waits for the sum: the tensor cores need P alone.
        row_sum = row_sum * alpha
        for i in tl.static_range(SLICES):
            row_sum += tl.sum(published[i], 1)
    return row_max, row_sum


@triton.jit
def mask_scores(scores, tile, key):
    """Return the scores with -inf where a pair does not count. Two bounds per row, counted from the block's first ``key``."""
    rows = tile.row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    stop = tl.full([BLOCK_M], tile.kv.length - key, tl.int32)
    if tile.band.has_hi:
        stop = tl.minimum(stop, rows + (tile.band.hi + 1 - key))
    scores = tl.where(columns < stop[:, None], scores, float("-inf"))
    if tile.band.has_lo:
        scores = tl.where(columns >= (rows + (tile.band.lo - key))[:, None], scores, float("-inf"))
    return scores


# ---------------------------------------------------------------------------------------------------------- correction


@triton.jit
def correct_tile(memory, lse_ptr, rows_out, records_ptr, walk, steps_done, outs, scale, lists, cfg: tl.constexpr):
    """Rescale a tile's accumulators while it runs, then write its O and LSE. Returns steps and halves of O done so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps = walk_steps(tile, walk, lists, cfg)
    rescale_steps(memory, steps.count, steps_done - walk.done, cfg)
    outs = finish_tile(memory, lse_ptr, rows_out, tile, steps, walk, outs, scale, cfg)
    return steps_done + steps.count, outs
