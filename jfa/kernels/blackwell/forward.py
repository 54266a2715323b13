"""The Blackwell forward: persistent CTAs, five roles, two softmax groups in ping-pong.

One CTA works on a tile of 256 queries of one head, in two halves of 128 rows that share each block of 128 keys:

    load        1 warp    TMA: Q once a tile, then K and V blocks through one ring of buffers
    mma         1 warp    tensor cores: S = Q K^T of a half, O += P V of a half, always alternating
    softmax     2 x 4     a group a half: maximum, exp2, row sum; leaves P where S was, in slices
    correction  4 warps   rescales O where the maximum grew, at the end divides by the sum and writes O to SMEM, LSE out
    store       1 warp    TMA: O to global memory, half of its columns at a time

While one group computes its exponentials the tensor cores multiply for the other. The same goes on from tile to tile: a tile's
last P V goes out between the next tile's first S, and O leaves while the next tile's softmax runs. A tile of at most 128 queries
would leave the second half empty, so there both groups take the *same* queries and every other key block ("shared" below), and the
correction merges their results. All communication is by mbarriers: ``*_full`` says that data is there, ``*_empty`` that it has been
consumed.

TMEM (512 columns at D = 128): S0 S1 O0 O1. P and alpha live inside their own S. What protects them is order, not more barriers:
S(i+1) of a half is issued after P V(i) of that half, which waits until alpha(i) has been read. Row sums and maxima are in SMEM,
for the next tile's S arrives before they are read.

Jagged: every TMA box is bounded by its own sequence (:mod:`jfa.kernels.common.ragged`), so a tail tile reads zeros and never its
neighbour, and stores nothing past its end.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.lists import read_out_begin, read_record, read_shape
from jfa.kernels.blackwell.softmax import NO_MAXIMUM, exp2_shared, running_maximum, split_columns
from jfa.kernels.common.band import key_blocks
from jfa.kernels.common.packed import fma_pairs, mul_pairs
from jfa.kernels.common.ragged import ragged_box
from jfa.kernels.common.units import all_ctas, ring, this_cta, zigzag_unit

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,  # [H, rows_out] fp32
    records_ptr,  # [tiles, 9] int32, longest first; see jfa.kernels.blackwell.lists
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    rows_out,
    scale_log2,  # |sm_scale| * log2(e), positive
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    HEAD_DIM: tl.constexpr,  # 64 or 128: the tensors' head dims padded
    KV_BUFFERS: tl.constexpr,
    P_SLICES: tl.constexpr,
    FMA_EIGHTHS: tl.constexpr,  # of each slice's columns: their exp2 runs on the FMA pipe
    ONE_Q: tl.constexpr,  # tiles of 128 queries: every tile is shared, and its second Q and O buffers become ring
    CLC: tl.constexpr,  # steal units through cluster launch control; else a static zigzag
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    NEGATIVE: tl.constexpr,  # sm_scale < 0
    SOFTMAX_REGISTERS: tl.constexpr = 184,
    SMALL_REGISTERS: tl.constexpr = 32,
    O_COLUMNS: tl.constexpr = 32,  # of O that the correction holds in registers at a time
    O_PARTS: tl.constexpr = 2,  # in which O leaves through as many buffers
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    Q_BUFFERS: tl.constexpr = 1 if ONE_Q else 2
    O_SLICES: tl.constexpr = HEAD_DIM // O_COLUMNS
    dtype = tlx.dtype_of(q_desc)

    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, Q_BUFFERS)
    kv_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    o_parts = tlx.local_alloc((BLOCK_M, HEAD_DIM // O_PARTS), dtype, O_PARTS)  # the columns of one half's O
    sums = tlx.local_alloc((BLOCK_M,), tl.float32, 2)
    maxima = tlx.local_alloc((BLOCK_M,), tl.float32, 2)

    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    p_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), dtype, 2, tlx.storage_kind.tmem, reuse=s_storage)
    alphas = tlx.local_alloc((BLOCK_M, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(
        tlx.reuse_group(
            s_tiles,
            tlx.reuse_group(p_tiles, alphas, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 2, tlx.storage_kind.tmem)

    q_fulls = tlx.alloc_barriers(Q_BUFFERS)
    q_empties = tlx.alloc_barriers(Q_BUFFERS)
    kv_fulls = tlx.alloc_barriers(KV_BUFFERS)
    kv_empties = tlx.alloc_barriers(KV_BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2 * P_SLICES)
    alpha_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)  # rescaled or, at a tile's start, free: P V may write
    acc_fulls = tlx.alloc_barriers(2)  # the tile's last P V is done
    sum_fulls = tlx.alloc_barriers(2)
    sum_empties = tlx.alloc_barriers(2)
    o_fulls = tlx.alloc_barriers(O_PARTS)
    o_empties = tlx.alloc_barriers(O_PARTS)
    if CLC:
        queue = tlx.clc_create_context(num_consumers=6, num_stages=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            outs = 0
            for half in tl.static_range(2):
                tlx.barrier_arrive(acc_readys[half])
            while (unit >= 0) & (unit < units):
                row, q_len, k_len, lo, hi = read_shape(records_ptr, unit // HEADS, HAS_LO, HAS_HI)
                out_begin = read_out_begin(records_ptr, unit // HEADS)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                correct_accumulators(
                    accs, alphas, alpha_fulls, acc_readys, steps, steps_done - done, O_SLICES, BLOCK_M, HEAD_DIM
                )
                outs = finish_tile(
                    accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
                    lse_ptr + (unit % HEADS).to(tl.int64) * rows_out + out_begin, row, q_len, shared, done, outs, dtype,
                    ONE_Q, O_PARTS, O_SLICES, BLOCK_M, HEAD_DIM,
                )  # fmt: skip
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = zigzag_unit(done + 1, this_cta(), all_ctas())
                steps_done += steps
                done += 1

        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS, replicate=2):  # softmax
            half = tlx.async_task_replica_id()
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            while (unit >= 0) & (unit < units):
                row, q_len, k_len, lo, hi = read_shape(records_ptr, unit // HEADS, HAS_LO, HAS_HI)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                softmax_tile(
                    s_tiles, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls, sum_empties, half,
                    row + half * (1 - shared) * BLOCK_M, q_len, k_len, lo, hi, first, steps, shared, done,
                    steps_done, scale_log2, dtype, P_SLICES, FMA_EIGHTHS, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, NEGATIVE,
                )  # fmt: skip
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = zigzag_unit(done + 1, this_cta(), all_ctas())
                steps_done += steps
                done += 1

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # mma
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            blocks = 0
            steps = 0
            shared = 0
            going = unit < units
            while going:  # a tile's last P V goes out between the next tile's first S, so one round follows the last tile
                going = (unit >= 0) & (unit < units)
                steps_before = steps
                shared_before = shared
                row, q_len, k_len, lo, hi = read_shape(records_ptr, tl.where(going, unit // HEADS, 0), HAS_LO, HAS_HI)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                steps = tl.where(going, steps, 1)
                blocks = multiply_tile(
                    q_tiles, kv_tiles, s_tiles, p_tiles, accs,
                    q_fulls, q_empties, kv_fulls, kv_empties, s_fulls, p_fulls, acc_readys, acc_fulls,
                    going, steps, shared, steps_before, shared_before, done, steps_done, blocks,
                    ONE_Q, KV_BUFFERS, P_SLICES, BLOCK_N, HEAD_DIM,
                )  # fmt: skip
                if going:
                    if CLC:
                        unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                    else:
                        unit = zigzag_unit(done + 1, this_cta(), all_ctas())
                steps_done += steps
                done += 1

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # load
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                if CLC:  # two answers may be on their way: this role is up to a tile ahead of the others
                    tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                row, q_begin, q_len, k_begin, k_len, _, lo, hi, _ = read_record(records_ptr, unit // HEADS)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                blocks = load_tile(
                    q_desc, k_desc, v_desc, q_tiles, kv_tiles, q_fulls, q_empties, kv_fulls, kv_empties,
                    unit % HEADS, row, q_begin, q_len, k_begin, k_len, first, steps, shared, done, blocks,
                    GROUP, ONE_Q, KV_BUFFERS, BLOCK_M, BLOCK_N, HEAD_DIM,
                )  # fmt: skip
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = zigzag_unit(done + 1, this_cta(), all_ctas())
                done += 1

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # store
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            outs = 0
            while (unit >= 0) & (unit < units):
                row, q_len, _, _, _ = read_shape(records_ptr, unit // HEADS, False, False)
                out_begin = read_out_begin(records_ptr, unit // HEADS)
                head = unit % HEADS
                if CLC:  # before the wait for O, so that the answer's slot is free early
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = zigzag_unit(done + 1, this_cta(), all_ctas())
                outs = store_tile(
                    o_desc, o_parts, o_fulls, o_empties, head, row, out_begin, q_len, outs, ONE_Q, O_PARTS, BLOCK_M, HEAD_DIM
                )
                done += 1


# ----------------------------------------------------------------------------------------------------- steps and rings


@triton.jit
def key_steps(
    row, q_len, k_len, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_Q: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """(first key block, steps, shared): a step is one block for both halves or, in a shared tile (1, else 0), one for each.

    There is always a step: a tile that sees no key gets one wholly masked block, so that no role waits for another in vain.
    """
    if ONE_Q:
        shared = 1
        first, _, _, end = key_blocks(row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
    else:
        shared = (q_len - row <= BLOCK_M).to(tl.int32)
        first, _, _, end = key_blocks(row, 2 * BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
    return first, (end - first + shared) >> shared, shared


# ---------------------------------------------------------------------------------------------------------------- load


@triton.jit
def load_tile(
    q_desc, k_desc, v_desc, q_tiles, kv_tiles, q_fulls, q_empties, kv_fulls, kv_empties,
    head, row, q_begin, q_len, k_begin, k_len, first, steps, shared, done, blocks,
    GROUP: tl.constexpr, ONE_Q: tl.constexpr, KV_BUFFERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Loads Q and then K and V blocks, numbered as :func:`multiply_tile` counts them. Returns ``blocks``."""
    keys = (k_begin, k_len, head // GROUP)
    kv = (kv_tiles, kv_fulls, kv_empties)
    stride = BLOCK_N << shared
    key = first * BLOCK_N

    # K first: the ring has room for it before the tile before is done with Q.
    blocks = load_keys(k_desc, kv, keys, key, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
    load_queries(q_desc, q_tiles, q_fulls, q_empties, 0, row, q_begin, q_len, head, done, BLOCK_M, HEAD_DIM)
    if not ONE_Q:
        # A shared tile ends before this half: the box is zeros and costs no traffic, but keeps the barriers' phases in step.
        load_queries(q_desc, q_tiles, q_fulls, q_empties, 1, row + BLOCK_M, q_begin, q_len, head, done, BLOCK_M, HEAD_DIM)
    if shared:
        blocks = load_keys(k_desc, kv, keys, key + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
    for step in range(0, steps):
        blocks = load_keys(v_desc, kv, keys, key, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
        if shared:
            blocks = load_keys(v_desc, kv, keys, key + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
        key += stride
        if step + 1 < steps:
            blocks = load_keys(k_desc, kv, keys, key, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
            if shared:
                blocks = load_keys(k_desc, kv, keys, key + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
    return blocks


@triton.jit
def load_queries(
    desc, tiles, fulls, empties, half: tl.constexpr, row, begin, length, head, done,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One half's Q, once the previous tile's has been used."""
    tlx.barrier_wait(empties[half], (done & 1) ^ 1)
    tlx.barrier_expect_bytes(fulls[half], BLOCK_M * HEAD_DIM * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(desc, tiles[half], ragged_box(begin, length, row, head), fulls[half])


@triton.jit
def load_keys(
    desc, kv, keys, key, blocks, KV_BUFFERS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """One block of K or V into the ring's next buffer. Returns how many blocks that makes."""
    tiles, fulls, empties = kv
    begin, length, head = keys
    buffer, phase = ring(blocks, KV_BUFFERS)
    tlx.barrier_wait(empties[buffer], phase ^ 1)
    tlx.barrier_expect_bytes(fulls[buffer], BLOCK_N * HEAD_DIM * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(desc, tiles[buffer], ragged_box(begin, length, key, head), fulls[buffer])
    return blocks + 1


# ----------------------------------------------------------------------------------------------------------------- mma


@triton.jit
def multiply_tile(
    q_tiles, kv_tiles, s_tiles, p_tiles, accs,
    q_fulls, q_empties, kv_fulls, kv_empties, s_fulls, p_fulls, acc_readys, acc_fulls,
    going, steps, shared, steps_before, shared_before, done, steps_done, blocks,
    ONE_Q: tl.constexpr, KV_BUFFERS: tl.constexpr, P_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Issues, per step, the previous P0 V, S0, the previous P1 V, S1: one half multiplies while the other half's softmax runs.

    Before a tile's first step "the previous" is the last of the tile before; after the last tile (not ``going``) there are no
    more S. The ring holds, for a step, the previous V and then K, two of each in a shared tile. Returns ``blocks``. Both halves
    are issued from one place: each product keeps a dozen addresses in registers.
    """
    for step in range(0, steps):
        pending = (step > 0) | (done > 0)
        v_shared = tl.where(step > 0, shared, shared_before)
        use_acc = tl.where(step > 0, step, steps_before) > 1
        phase = (steps_done + step - 1) & 1
        k = blocks + tl.where(pending, 1 + v_shared, 0)
        for half in range(0, 2):
            if pending:
                accumulate(
                    half, kv_tiles, p_tiles, accs, kv_fulls, kv_empties, p_fulls, acc_readys,
                    blocks + half * v_shared, phase, v_shared, use_acc, KV_BUFFERS, P_SLICES, BLOCK_N, HEAD_DIM,
                )  # fmt: skip
                if step == 0:
                    tlx.tcgen05_commit(acc_fulls[half])
            if going:
                score(
                    half, q_tiles, kv_tiles, s_tiles, q_fulls, q_empties, kv_fulls, kv_empties, s_fulls,
                    k + half * shared, step == 0, step + 1 == steps, done & 1, shared, ONE_Q, KV_BUFFERS,
                )  # fmt: skip
        blocks = k + tl.where(going, 1 + shared, 0)
    return blocks


@triton.jit
def score(
    half, q_tiles, kv_tiles, s_tiles, q_fulls, q_empties, kv_fulls, kv_empties, s_fulls,
    block, is_first, is_last, q_phase, shared, ONE_Q: tl.constexpr, KV_BUFFERS: tl.constexpr,
):  # fmt: skip
    """S = Q K^T of one half with the ring's ``block``; a tile's first waits for Q, its last frees it. Half 1 frees a common K.

    What arrives on ``s_fulls`` says that S is there, and that all products issued before are done.
    """
    if is_first:
        if ONE_Q:
            if half == 0:
                tlx.barrier_wait(q_fulls[0], q_phase)
        else:
            tlx.barrier_wait(q_fulls[half], q_phase)
    buffer, phase = ring(block, KV_BUFFERS)
    if (half == 0) | (shared == 1):
        tlx.barrier_wait(kv_fulls[buffer], phase)
    q = 0 if ONE_Q else half * (1 - shared)
    tlx.async_dot(q_tiles[q], tlx.local_trans(kv_tiles[buffer]), s_tiles[half], use_acc=False, mBarriers=[s_fulls[half]])
    if (half == 1) | (shared == 1):
        tlx.tcgen05_commit(kv_empties[buffer])
    if is_last:
        if ONE_Q:
            if half == 1:
                tlx.tcgen05_commit(q_empties[0])
        else:
            if shared == 0:
                tlx.tcgen05_commit(q_empties[half])
            elif half == 1:
                tlx.tcgen05_commit(q_empties[0])
                tlx.tcgen05_commit(q_empties[1])


@triton.jit
def accumulate(
    half, kv_tiles, p_tiles, accs, kv_fulls, kv_empties, p_fulls, acc_readys,
    block, phase, shared, use_acc,
    KV_BUFFERS: tl.constexpr, P_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """O += P V of one half, slice by slice as softmax publishes them; the first step of a tile overwrites O."""
    SLICE: tl.constexpr = BLOCK_N // P_SLICES
    buffer, kv_phase = ring(block, KV_BUFFERS)
    if (half == 0) | (shared == 1):
        tlx.barrier_wait(kv_fulls[buffer], kv_phase)
    tlx.barrier_wait(acc_readys[half], phase)
    for i in tl.static_range(P_SLICES):
        tlx.barrier_wait(p_fulls[half * P_SLICES + i], phase)
        p_slice = tlx.subslice(p_tiles[half], i * SLICE, SLICE)
        v_slice = tlx.local_slice(kv_tiles[buffer], [i * SLICE, 0], [SLICE, HEAD_DIM])
        tlx.async_dot(p_slice, v_slice, accs[half], use_acc=use_acc if i == 0 else True, force_async=True)
    if (half == 1) | (shared == 1):
        tlx.tcgen05_commit(kv_empties[buffer])


# ------------------------------------------------------------------------------------------------------------- softmax


@triton.jit
def softmax_tile(
    s_tiles, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls, sum_empties, half,
    row, q_len, k_len, lo, hi, first, steps, shared, done, steps_done, scale_log2, dtype: tl.constexpr,
    P_SLICES: tl.constexpr, FMA_EIGHTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """One half's softmax over its key blocks, peeled: masked blocks at the left edge, the bulk, masked blocks at the right."""
    _, bulk_begin, bulk_end, _ = key_blocks(row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
    # In steps of this half: its step s is block first + (s << shared), one further for the second half of a shared tile.
    start = first + half * shared
    left_end = min(max(bulk_begin - start + shared, 0) >> shared, steps)
    bulk_stop = min(max(max(bulk_end - start + shared, 0) >> shared, left_end), steps)

    row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_LO:
        row_max, row_sum = softmax_steps(
            s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
            0, left_end, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype,
            P_SLICES, 0, BLOCK_M, BLOCK_N, True, HAS_LO, HAS_HI, NEGATIVE,
        )  # fmt: skip
    row_max, row_sum = softmax_steps(
        s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
        left_end if HAS_LO else 0, bulk_stop, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype,
        P_SLICES, FMA_EIGHTHS, BLOCK_M, BLOCK_N, False, HAS_LO, HAS_HI, NEGATIVE,
    )  # fmt: skip
    row_max, row_sum = softmax_steps(
        s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
        bulk_stop, steps, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype,
        P_SLICES, 0, BLOCK_M, BLOCK_N, True, HAS_LO, HAS_HI, NEGATIVE,
    )  # fmt: skip

    tlx.barrier_wait(sum_empties[half], (done & 1) ^ 1)
    tlx.local_store(sums[half], row_sum)
    tlx.local_store(maxima[half], row_max)
    tlx.barrier_arrive(sum_fulls[half])


@triton.jit
def softmax_steps(
    s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
    step_begin, step_end, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype: tl.constexpr,
    P_SLICES: tl.constexpr, FMA_EIGHTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Online softmax over one stretch of steps, all masked or none. Returns (row_max, row_sum)."""
    SLICE: tl.constexpr = BLOCK_N // P_SLICES
    for step in range(step_begin, step_end):
        tlx.barrier_wait(s_fulls[half], (steps_done + step) & 1)
        scores = tlx.local_load(s_tiles[half])
        if NEGATIVE:
            scores = -scores
        if MASKED:
            key = (start + (step << shared)) * BLOCK_N
            scores = mask_scores(scores, row, key, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI)

        row_max, alpha = running_maximum(scores, row_max, scale_log2)
        if step > 0:  # nothing is accumulated yet before the first
            tlx.local_store(alphas[half], alpha[:, None])
            tlx.barrier_arrive(alpha_fulls[half])

        exponents = split_columns(fma_pairs(scores, scale_log2, -row_max[:, None]), P_SLICES)
        published = ()
        for i in tl.static_range(P_SLICES):
            p = exp2_shared(exponents[i], FMA_EIGHTHS)
            tlx.local_store(tlx.subslice(p_tiles[half], i * SLICE, SLICE), p.to(dtype))
            tlx.barrier_arrive(p_fulls[half * P_SLICES + i])
            published = published + (p,)
        # The sum is in nobody's way: the tensor cores wait for P alone.
        row_sum = row_sum * alpha
        for i in tl.static_range(P_SLICES):
            row_sum += tl.sum(published[i], 1)
    return row_max, row_sum


@triton.jit
def mask_scores(
    scores, row, key, k_len, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where the band or the sequence's end excludes the pair. Two bounds a row, counted from the block."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    stop = tl.full([BLOCK_M], k_len - key, tl.int32)
    if HAS_HI:
        stop = tl.minimum(stop, rows + (hi + 1 - key))
    scores = tl.where(columns < stop[:, None], scores, float("-inf"))
    if HAS_LO:
        scores = tl.where(columns >= (rows + (lo - key))[:, None], scores, float("-inf"))
    return scores


# ---------------------------------------------------------------------------------------------------------- correction


@triton.jit
def correct_accumulators(
    accs, alphas, alpha_fulls, acc_readys, steps, alphas_done,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Before each P V but a tile's first, O *= alpha if any row of the half asks for it."""
    for step in range(1, steps):
        phase = (alphas_done + step - 1) & 1
        for half in tl.static_range(2):
            tlx.barrier_wait(alpha_fulls[half], phase)
            alpha = tlx.local_load(alphas[half])
            if rescale_needed(alpha):
                for i in tl.static_range(SLICES):
                    part = tlx.subslice(accs[half], i * HEAD_DIM // SLICES, HEAD_DIM // SLICES)
                    tlx.local_store(part, mul_pairs(tlx.local_load(part), alpha))
            tlx.barrier_arrive(acc_readys[half])


@triton.jit
def rescale_needed(alpha):
    """Whether any row's factor is below 1: one answer for all warps, so that they branch together."""
    return tl.min(tl.reshape(alpha, [alpha.shape[0]]), 0) < 1.0


@triton.jit
def finish_tile(
    accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
    lse_ptr, row, out_len, shared, done, outs, dtype: tl.constexpr,
    ONE_Q: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Divides by the row sums, writes O to SMEM for the store role and LSE to memory. Returns ``outs``: halves written so far."""
    phase = done & 1
    if shared:
        finish_shared(
            accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
            lse_ptr, row, out_len, phase, outs, dtype, PARTS, 2 * SLICES, BLOCK_M, HEAD_DIM,
        )  # fmt: skip
        outs += 1
    if not ONE_Q:
        if shared == 0:
            for half in tl.static_range(2):
                finish_half(
                    half, accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
                    lse_ptr, row + half * BLOCK_M, out_len, phase, outs + half, dtype, PARTS, SLICES, BLOCK_M, HEAD_DIM,
                )  # fmt: skip
            outs += 2
    return outs


@triton.jit
def take_sums(half: tl.constexpr, sums, maxima, sum_fulls, sum_empties, phase):
    """(row sum, row maximum), both [M, 1], of a half that has seen all its keys."""
    tlx.barrier_wait(sum_fulls[half], phase)
    row_sum = tlx.local_load(sums[half])
    row_max = tlx.local_load(maxima[half])
    tlx.barrier_arrive(sum_empties[half])
    return row_sum, row_max


@triton.jit
def finish_half(
    half: tl.constexpr, accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
    lse_ptr, row, out_len, phase, outs, dtype: tl.constexpr,
    PARTS: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One half's O and LSE; its accumulator is free as soon as it has been read, while the store is still under way."""
    WIDTH: tl.constexpr = HEAD_DIM // SLICES
    row_sum, row_max = take_sums(half, sums, maxima, sum_fulls, sum_empties, phase)
    inverse = safe_inverse(row_sum)[:, None]
    if half == 0:  # there is time until the product is done; for half 1 there is none, its accumulator waits to be read
        store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M)
    tlx.barrier_wait(acc_fulls[half], phase)
    for part in tl.static_range(PARTS):
        tlx.barrier_wait(o_empties[part], (outs & 1) ^ 1)
        for i in tl.static_range(SLICES // PARTS):
            out = tlx.local_load(tlx.subslice(accs[half], (part * SLICES // PARTS + i) * WIDTH, WIDTH)) * inverse
            if part == PARTS - 1 and i == SLICES // PARTS - 1:
                tlx.barrier_arrive(acc_readys[half])
            tlx.local_store(tlx.local_slice(o_parts[part], [0, i * WIDTH], [BLOCK_M, WIDTH]), out.to(dtype))
        tlx.fence("async_shared")
        tlx.barrier_arrive(o_fulls[part])
    if half == 1:
        store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M)


@triton.jit
def finish_shared(
    accs, sums, maxima, o_parts, sum_fulls, sum_empties, acc_fulls, acc_readys, o_fulls, o_empties,
    lse_ptr, row, out_len, phase, outs, dtype: tl.constexpr,
    PARTS: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The merge of a shared tile: each half's O weighted by its share of the common sum. Two accumulators, so narrower slices."""
    WIDTH: tl.constexpr = HEAD_DIM // SLICES
    sum_0, max_0 = take_sums(0, sums, maxima, sum_fulls, sum_empties, phase)
    sum_1, max_1 = take_sums(1, sums, maxima, sum_fulls, sum_empties, phase)
    row_max = tl.maximum(max_0, max_1)
    weight_0 = tl.math.exp2(max_0 - row_max)
    weight_1 = tl.math.exp2(max_1 - row_max)
    row_sum = sum_0 * weight_0 + sum_1 * weight_1
    store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M)
    inverse = safe_inverse(row_sum)
    weight_0 = (weight_0 * inverse)[:, None]
    weight_1 = (weight_1 * inverse)[:, None]
    tlx.barrier_wait(acc_fulls[0], phase)
    tlx.barrier_wait(acc_fulls[1], phase)
    for part in tl.static_range(PARTS):
        tlx.barrier_wait(o_empties[part], (outs & 1) ^ 1)
        for i in tl.static_range(SLICES // PARTS):
            out = tlx.local_load(tlx.subslice(accs[0], (part * SLICES // PARTS + i) * WIDTH, WIDTH)) * weight_0
            out += tlx.local_load(tlx.subslice(accs[1], (part * SLICES // PARTS + i) * WIDTH, WIDTH)) * weight_1
            if part == PARTS - 1 and i == SLICES // PARTS - 1:
                for half in tl.static_range(2):
                    tlx.barrier_arrive(acc_readys[half])
            tlx.local_store(tlx.local_slice(o_parts[part], [0, i * WIDTH], [BLOCK_M, WIDTH]), out.to(dtype))
        tlx.fence("async_shared")
        tlx.barrier_arrive(o_fulls[part])


@triton.jit
def safe_inverse(row_sum):
    """1 / row_sum; 0 for a row without keys, whose output is 0."""
    return tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


@triton.jit
def store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M: tl.constexpr):
    """Natural log-sum-exp of the tile's rows; log2(0) makes it -inf for a row without keys."""
    rows = row + tl.arange(0, BLOCK_M)
    lse = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(lse_ptr + rows, lse, mask=rows < out_len)


# --------------------------------------------------------------------------------------------------------------- store


@triton.jit
def store_tile(
    o_desc, o_parts, o_fulls, o_empties, head, row, out_begin, out_len, outs,
    ONE_Q: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """O from SMEM to memory, part by part; rows past the sequence's end are clipped by the ragged box. Returns ``outs``."""
    halves = 1
    if not ONE_Q:
        halves = tl.where(out_len - row > BLOCK_M, 2, 1)
    for half in range(0, halves):
        for part in tl.static_range(PARTS):
            tlx.barrier_wait(o_fulls[part], outs & 1)
            box = ragged_box(out_begin, out_len, row + half * BLOCK_M, head, part * HEAD_DIM // PARTS)
            tlx.async_descriptor_store(o_desc, o_parts[part], box)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(o_empties[part])
        outs += 1
    return outs
