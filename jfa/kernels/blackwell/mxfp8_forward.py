"""The Blackwell forward on MXFP8: e4m3 operands with a power-of-two scale per 32 values along the contracted axis.

Roles, tiles, walk and epilogue are :mod:`jfa.kernels.blackwell.forward`'s. What differs:

    S = Q K^T    groups along D; the scales of Q and K come with their tiles and go through TMEM
    P            e4m3 of P * 2**8, in 32 columns; one constant scale 2**-8. The row sum is that of the unrounded P
    O += P V     V in an encoding of its own, groups along the keys
    maximum      whole bits, with a margin: P never exceeds 1 (:func:`jfa.kernels.blackwell.mxfp8_softmax.integer_maximum`)

The products take half as long as in 16 bits, the softmax takes the same time. So S of a half is computed one step
ahead, and its softmax does not wait for its own P V. P of half h therefore lies inside S of the *other* half, which is
not needed at the same time. So do the scales for S and O of h, 4 columns each: TMEM at D = 128 is full with S0 S1 O0
O1, and scales must not lie in the S that they belong to. P and scales may be written once that other S has been read,
which the softmax signals on ``s_reads``. alpha is in SMEM.

Jagged: data boxes end with their sequence, and a sequence owns whole scale tiles; a block past the last one that a tile
sees takes the scales of that one.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.blackwell.epilogue import finish_tile, free_accumulators, rescale, store_tile
from jfa.kernels.blackwell.forward import (
    Issued,
    RowSums,
    await_queries,
    free_queries,
    hand_rows,
    mask_scores,
    nothing_issued,
    steps_of,
)
from jfa.kernels.blackwell.mxfp8_softmax import HUGE_BASE, HUGE_MXFP8, fold_columns, integer_maximum
from jfa.kernels.blackwell.scales import (
    GROUPS,
    P_BITS,
    ScaledRing,
    ScaleTiles,
    alloc_p_scales,
    alloc_scaled_ring,
    copy_scales,
    first_key_block,
    first_query_block,
)
from jfa.kernels.blackwell.softmax import NO_MAXIMUM, exp2_on_both_pipes
from jfa.kernels.common.nouns import Span, aggregate, load_tile
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ring import Ring, alloc_ring, pair_slot
from jfa.kernels.common.softmax import Scale
from jfa.kernels.common.units import first_unit


@triton.jit(do_not_specialize=["q_blocks", "kv_blocks"])
def mxfp8_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    q_scales,  # [H, blocks] x 512 uint8, groups along D; see jfa.kernels.blackwell.scales
    k_scales,
    v_scales,  # groups along the keys
    lse_ptr,  # [H, rows_out] fp32
    records_ptr,  # [tiles, 9] int32, longest first; see jfa.kernels.common.tile_list
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    q_blocks,  # scale blocks per head
    kv_blocks,
    rows_out,
    scale_log2,  # |sm_scale| * log2(e), positive
    coarse_scale,  # of the common Scale; made here, before the roles part, it would spill in all of them
    cfg: tl.constexpr,  # Mxfp8Config
):
    memory, scale = alloc_memory(tlx.dtype_of(o_desc), cfg), Scale(scale_log2, coarse_scale, HUGE_MXFP8, True)
    if cfg.clc:
        queue = tlx.clc_create_context(num_consumers=6, num_stages=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            free_accumulators(memory.accs)
            walk, steps, outs = first_unit(counts_ptr, cfg.heads), 0, 0
            while walk.going():
                steps, outs = correct_tile(memory, lse_ptr, rows_out, records_ptr, walk, steps, outs, scale, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=4, registers=cfg.softmax_registers, replicate=2):  # softmax
            half: tl.constexpr = tlx.async_task_replica_id()
            walk, steps_done = first_unit(counts_ptr, cfg.heads), 0
            while walk.going():
                steps_done = softmax_tile(memory, half, records_ptr, walk, steps_done, scale, cfg)
                walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            walk, issued, going = first_unit(counts_ptr, cfg.heads), nothing_issued(), tl.to_tensor(True)
            while going:  # one round more than tiles: a tile's last P V goes out between the next tile's first S
                going = walk.going()
                issued = multiply_tile(memory, records_ptr, walk, issued, cfg)
                if going:
                    walk = walk.next(tlx.clc_consumer(queue, walk.phase(2), k=walk.stage(2)) if cfg.clc else 0, cfg.clc)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load
            walk, count = first_unit(counts_ptr, cfg.heads), 0
            sources = sources_of(q_scales, k_scales, v_scales, q_blocks, kv_blocks)
            while walk.going():
                if cfg.clc:  # two answers may be on their way: this role is up to a tile ahead of the others
                    tlx.clc_producer(queue, walk.phase(2) ^ 1, k=walk.stage(2))
                count = load_inputs(q_desc, k_desc, v_desc, sources, memory, records_ptr, walk, count, cfg)
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
    """S of each half and P in TMEM; alpha in SMEM."""

    s: tlx.buffered_tensor  # [2] x [128, 128] fp32
    p: tlx.buffered_tensor  # [2] x [128, 128] e4m3: buffer r lies inside S of half r and holds P of the other half
    alphas: tlx.buffered_tensor  # [4] x [128] fp32, in turn two per half: the factor for what was accumulated before
    s_fulls: tlx.mbarrier
    s_reads: tlx.mbarrier  # S is in registers: its columns may take the other half's P and scales
    p_fulls: tlx.mbarrier
    alpha_fulls: tlx.mbarrier  # as alphas


@aggregate
class Accumulators:
    """O of each half in TMEM."""

    tiles: tlx.buffered_tensor  # [2] x [128, head_dim] fp32
    readys: tlx.mbarrier  # rescaled or, at a tile's start, free: P V may write
    idles: tlx.mbarrier  # a step's P V is done
    fulls: tlx.mbarrier  # the tile's last P V is done


@aggregate
class ScaleColumns:
    """Scale tiles in TMEM, [2] x [128, 4] uint8 each: buffer r lies inside S of half r and is for S and O of the other half."""

    q: tlx.buffered_tensor
    k: tlx.buffered_tensor
    v: tlx.buffered_tensor
    p: tlx.buffered_tensor


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA. ``q`` is a ring of one per half; ``o`` has a slot per column
    part of a half."""

    q: ScaledRing
    k: ScaledRing
    v: ScaledRing
    p_scales: tlx.buffered_tensor  # in SMEM: P's constant scale
    o: Ring
    scores: Scores
    columns: ScaleColumns
    accs: Accumulators
    rows: RowSums


@triton.jit
def alloc_memory(OUT: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA; OUT is the output's dtype."""
    q = alloc_scaled_ring(BLOCK_M, cfg.head_dim, 1, cfg.q_halves)
    k = alloc_scaled_ring(BLOCK_N, cfg.head_dim, cfg.kv_slots // 2)
    v = alloc_scaled_ring(BLOCK_N, cfg.head_dim, cfg.kv_slots // 2)
    o = alloc_ring(BLOCK_M, cfg.head_dim // cfg.o_parts, OUT, cfg.o_slots, 1)
    sums = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    maxima = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    rows = RowSums(sums, maxima, tlx.alloc_barriers(2), tlx.alloc_barriers(2))
    alphas = tlx.local_alloc((BLOCK_M,), tl.float32, 4)

    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float8e4nv, 2, tlx.storage_kind.tmem, reuse=storage)
    q_columns = tlx.local_alloc((BLOCK_M, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    k_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    v_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    p_columns = tlx.local_alloc((BLOCK_M, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p, q_columns, k_columns, v_columns, p_columns, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    scores = Scores(
        s, p, alphas, tlx.alloc_barriers(2), tlx.alloc_barriers(2), tlx.alloc_barriers(2), tlx.alloc_barriers(4)
    )
    columns = ScaleColumns(q_columns, k_columns, v_columns, p_columns)

    tiles = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 2, tlx.storage_kind.tmem)
    accs = Accumulators(tiles, tlx.alloc_barriers(2), tlx.alloc_barriers(2), tlx.alloc_barriers(2))
    return Memory(q, k, v, alloc_p_scales(), o, scores, columns, accs, rows)


# ---------------------------------------------------------------------------------------------------------------- load


@aggregate
class Sources:
    """The scales of Q, K and V in memory."""

    q: ScaleTiles
    k: ScaleTiles
    v: ScaleTiles


@triton.jit
def sources_of(q_scales, k_scales, v_scales, q_blocks, kv_blocks):
    """Return Sources of tensors with so many scale blocks per head."""
    return Sources(ScaleTiles(q_scales, q_blocks), ScaleTiles(k_scales, kv_blocks), ScaleTiles(v_scales, kv_blocks))


@triton.jit
def load_inputs(q_desc, k_desc, v_desc, sources, memory, records_ptr, walk, count, cfg: tl.constexpr):
    """Load Q, and K and V blocks about as :func:`multiply_tile` uses them.

    Returns how many blocks of K, and of V, are loaded so far.
    """
    HALVES: tl.constexpr = cfg.q_halves
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps, head = steps_of(tile, cfg), walk.head()
    last = tl.maximum(tile.key_blocks(cfg.tile_rows, BLOCK_N).end - 1, steps.first)
    keys = KeyBlocks(tile.kv, last, first_key_block(tile, cfg.broadcast_q), head // cfg.group)
    q_block = first_query_block(tile, cfg.broadcast_q) + tile.row // BLOCK_M
    for step in range(0, steps.count):
        # K first: the ring has room for it before the tile before is done with Q.
        load_step(k_desc, sources.k, memory.k, keys, steps, step, count)
        if step == 0:
            for half in tl.static_range(HALVES):
                # Where keys are split the tile ends before half 1: its box is zeros, its scales are half 0's.
                box = tile.q.box(tile.row + half * BLOCK_M, head)
                scales = sources.q.at(head, q_block + half * (1 - steps.split_keys))
                memory.q.nth(half).load(walk.done, q_desc, box, scales)
        load_step(v_desc, sources.v, memory.v, keys, steps, step, count)
        count += 1 + steps.split_keys
    return count


@aggregate
class KeyBlocks:
    """The place of a tile's keys: sequence, last block that the tile sees, the sequence's first scale block, head."""

    kv: Span
    last: tl.tensor
    first_scales: tl.tensor
    head: tl.tensor


@triton.jit
def load_step(desc, source, ring, keys, steps, step, count):
    """Load the K or V of one step: one block, or two where the halves split the keys."""
    load_keys(desc, source, ring, keys, steps.block(0, step), count)
    if steps.split_keys:
        load_keys(desc, source, ring, keys, steps.block(1, step), count + 1)


@triton.jit
def load_keys(desc, source, ring, keys, block, count):
    """Load one block of K or V and its scales into the ring's count-th slot.

    Past the last block that counts the data may be zeros, and the scales behind may be the next sequence's, in which NaN is a
    code; so they are those of the last block.
    """
    scales = source.at(keys.head, keys.first_scales + tl.minimum(block, keys.last))
    ring.load(count, desc, keys.kv.box(block * BLOCK_N, keys.head), scales)


# ----------------------------------------------------------------------------------------------------------------- mma

# Issue order of a step, i its number, P(i-1) and V(i-1) those of the step before (before step 0: of the tile before's last). A
# product's scales are copied right before it:
#
#   1  S0  = Q0 K(i)^T        scales inside S1(i-1), once that is read. Overwrites P1(i-2), in use until 4 of the step before
#   2  O0 += P0(i-1) V(i-1)   P0 and scales inside S1(i-1), which 1 has waited for; softmax 0 is at work on S0(i) meanwhile
#   3  S1  = Q1 K(i)^T        scales inside S0(i), once that is read. Overwrites P0(i-1), in use until 2
#   4  O1 += P1(i-1) V(i-1)   P1 and scales inside S0(i), which 3 has waited for; softmax 1 is at work on S1(i) meanwhile
#
# Copies and products run in the order of their issue, so neither P nor a scale needs a barrier "read": what overwrites it is
# issued later. S of h is read before it is overwritten, for the other half's product in between waited for that. alpha of a
# step may come before the one of the step before is read, but not before the one of two steps before, which 2 or 4 waited for: so
# there are two.


@triton.jit
def multiply_tile(memory, records_ptr, walk, issued, cfg: tl.constexpr):
    """Issue a tile's products; after the last tile only the P V that are left. Returns what is Issued then.

    Both halves are issued from one place: each product keeps a dozen addresses in registers. ``issued.blocks`` counts blocks
    of K; V is a step behind.
    """
    going = walk.going()
    tile = load_tile(records_ptr, tl.where(going, walk.unit // cfg.heads, 0), cfg.has_lo, cfg.has_hi)
    steps = steps_of(tile, cfg)
    count, k_count = tl.where(going, steps.count, 1), issued.blocks
    v_count = k_count - tl.where(walk.done > 0, 1 + issued.last_split, 0)
    for step in range(0, count):
        pending = (step > 0) | (walk.done > 0)
        v_split = tl.where(step > 0, steps.split_keys, issued.last_split)
        use_acc = tl.where(step > 0, step, issued.last_steps) > 1
        phase = (issued.steps + step - 1) & 1
        for half in range(0, 2):
            if going | (half == 0):
                tlx.barrier_wait(memory.scores.s_reads[1 - half], phase ^ half)
            if going:
                k_half = k_count + half * steps.split_keys
                score(memory, half, k_half, step == 0, step + 1 == count, walk.done & 1, steps.split_keys, cfg)
            elif half == 0:
                tlx.tcgen05_commit(memory.scores.s_reads[0])  # no further S0 is written where softmax 1 stores P
            if pending:
                accumulate(memory, half, v_count + half * v_split, phase, v_split, use_acc)
                if step == 0:
                    tlx.tcgen05_commit(memory.accs.fulls[half])
        k_count += tl.where(going, 1 + steps.split_keys, 0)
        v_count += tl.where(pending, 1 + v_split, 0)
    return Issued(issued.steps + count, k_count, count, steps.split_keys)


@triton.jit
def score(memory, half, k_count, is_first, is_last, q_phase, split_keys, cfg: tl.constexpr):
    """Issue S = Q K^T of one half; a tile's first waits for Q, its last frees it. Half 1 frees a common K."""
    q, k, scores, columns = memory.q, memory.k, memory.scores, memory.columns
    if is_first:
        await_queries(q.ring, half, q_phase, cfg)
    slot, phase = k.slot(k_count)
    if (half == 0) | (split_keys == 1):
        tlx.barrier_wait(k.ring.fulls[slot], phase)
    q_slot = 0 if cfg.split_keys else half * (1 - split_keys)
    q.copy_codes(q_slot, columns.q[1 - half])
    k.copy_codes(slot, columns.k[1 - half])
    tlx.async_dot_scaled(
        q.ring.buffers[q_slot],
        tlx.local_trans(k.ring.buffers[slot]),
        scores.s[half],
        columns.q[1 - half],
        "e4m3",
        columns.k[1 - half],
        "e4m3",
        use_acc=False,
        mBarriers=[scores.s_fulls[half]],
    )
    if (half == 1) | (split_keys == 1):
        tlx.tcgen05_commit(k.ring.empties[slot])
    if is_last:
        free_queries(q.ring, half, split_keys, cfg)


@triton.jit
def accumulate(memory, half, v_count, phase, split_keys, use_acc):
    """Issue O += P V of one half; the first step of a tile overwrites O. The scales are on their way before P is there."""
    v, scores, columns, accs = memory.v, memory.scores, memory.columns, memory.accs
    slot, v_phase = v.slot(v_count)
    if (half == 0) | (split_keys == 1):
        tlx.barrier_wait(v.ring.fulls[slot], v_phase)
    v.copy_codes(slot, columns.v[1 - half])
    copy_scales(memory.p_scales[0], columns.p[1 - half])
    tlx.barrier_wait(accs.readys[half], phase)
    tlx.barrier_wait(scores.p_fulls[half], phase)
    tlx.async_dot_scaled(
        scores.p[1 - half],
        v.ring.buffers[slot],
        accs.tiles[half],
        columns.p[1 - half],
        "e4m3",
        columns.v[1 - half],
        "e4m3",
        use_acc=use_acc,
        mBarriers=[accs.idles[half]],
    )
    if (half == 1) | (split_keys == 1):
        tlx.tcgen05_commit(v.ring.empties[slot])


# ------------------------------------------------------------------------------------------------------------- softmax


@triton.jit
def softmax_tile(memory, half, records_ptr, walk, steps_done, scale, cfg: tl.constexpr):
    """Walk one half's key blocks, peeled: masked ones at the left edge, the bulk, masked ones at the right.

    Returns the steps done so far.
    """
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps = steps_of(tile, cfg)
    tile = steps.half_tile(tile, half)
    left_end, bulk_end = steps.bulk(half, tile.key_blocks(BLOCK_M, BLOCK_N))

    row_base = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    state = (row_base, row_sum)
    if cfg.has_lo:
        state = softmax_steps(memory, half, tile, steps, 0, left_end, steps_done, walk.done, state, scale, True, cfg)
    left_end = left_end if cfg.has_lo else 0
    state = softmax_steps(
        memory, half, tile, steps, left_end, bulk_end, steps_done, walk.done, state, scale, False, cfg
    )
    state = softmax_steps(
        memory, half, tile, steps, bulk_end, steps.count, steps_done, walk.done, state, scale, True, cfg
    )

    row_base, row_sum = state
    hand_rows(memory.rows, half, walk.done, row_base + P_BITS, row_sum * (1.0 / (1 << P_BITS)))
    return steps_done + steps.count


@triton.jit
def softmax_steps(
    memory, half, tile, steps, begin, end, steps_done, done, state, scale, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Make P in a stretch of steps, all masked or none. Takes and returns (row bases, row sums of P * 2**8)."""
    row_base, row_sum = state
    memory = memory.scores
    for step in range(begin, end):
        number = steps_done + step
        tlx.barrier_wait(memory.s_fulls[half], number & 1)
        scores = tlx.local_load(memory.s[half])
        tlx.barrier_arrive(memory.s_reads[half])
        if cfg.negative:
            scores = -scores
        if MASKED:
            scores = mask_scores(scores, tile, steps.block(half, step) * BLOCK_N)

        row_base, alpha, row_scale = integer_maximum(scores, row_base, scale, P_BITS, cfg.margin)
        exponents = fma_pairs(scores, row_scale[:, None], -row_base[:, None])
        p = exp2_on_both_pipes(exponents, 0 if MASKED else cfg.fma_parts, 16, 4)
        rounded = p.to(memory.p.dtype)
        row_sum = row_sum * alpha + tl.sum(fold_columns(p, 16), 1)
        if step > 0:  # nothing is accumulated yet before the first
            slot, _ = alpha_slot(half, number - done - 1)
            tlx.local_store(memory.alphas[slot], alpha)
            tlx.barrier_arrive(memory.alpha_fulls[slot])
        tlx.barrier_wait(memory.s_reads[1 - half], (number + half) & 1)  # S0 is a step ahead of S1
        tlx.local_store(memory.p[1 - half], rounded)
        tlx.barrier_arrive(memory.p_fulls[half])
    return row_base, row_sum


# ---------------------------------------------------------------------------------------------------------- correction


@triton.jit
def correct_tile(memory, lse_ptr, rows_out, records_ptr, walk, steps_done, outs, scale, cfg: tl.constexpr):
    """Rescale a tile's accumulators while it runs, then write its O and LSE. Returns steps and halves of O done so far."""
    tile = walk.tile(records_ptr, cfg.has_lo, cfg.has_hi)
    steps = steps_of(tile, cfg)
    rescale_steps(memory, steps.count, steps_done, walk.done, cfg)
    bases = Scale(scale.fine, scale.coarse, HUGE_BASE, True)
    outs = finish_tile(memory, lse_ptr, rows_out, tile, steps, walk, outs, bases, cfg)
    return steps_done + steps.count, outs


@triton.jit
def rescale_steps(memory, count, steps_done, done, cfg: tl.constexpr):
    """Multiply O by alpha between a step's P V and the next, if any row of the half needs it."""
    scores, accs = memory.scores, memory.accs
    for step in range(1, count):
        number = steps_done + step - 1
        for half in tl.static_range(2):
            slot, phase = alpha_slot(half, number - done)
            tlx.barrier_wait(scores.alpha_fulls[slot], phase)
            alpha = tlx.local_load(scores.alphas[slot])[:, None]
            tlx.barrier_wait(accs.idles[half], number & 1)
            rescale(accs.tiles[half], alpha, cfg)
            tlx.barrier_arrive(accs.readys[half])


@triton.jit
def alpha_slot(half, count):
    """Return (slot, phase) of a half's count-th alpha."""
    slot, phase = pair_slot(count)
    return half * 2 + slot, phase
