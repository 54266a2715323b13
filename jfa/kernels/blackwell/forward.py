"""The Blackwell forward: persistent CTAs, five roles, two softmax groups in ping-pong.

One CTA works on a tile of 256 queries of one head, in two halves of 128 rows that share each block of 128 keys:

    load        1 warp    TMA: Q once a tile, then K and V blocks through one ring of buffers
    mma         1 warp    tensor cores: S = Q K^T of a half, O += P V of a half, always alternating
    softmax     2 x 4     a group a half: maximum, exp2, row sum; leaves P where S was, in slices
    correction  4 warps   rescales O where the maximum grew, at the end divides by the sum and writes O to SMEM, LSE out
    store       1 warp    TMA: O to global memory

While one group computes its exponentials the tensor cores multiply for the other. A tile of at most 128 queries would leave
the second half empty, so there both groups take the *same* queries and every other key block ("shared" below), and the correction
merges their results. All communication is by mbarriers: ``*_full`` says that data is there, ``*_empty`` that it has been consumed.

TMEM (512 columns at D = 128): S0 S1 O0 O1. P, alpha, l and m live inside their own S. What protects them is order, not more
barriers: S(i+1) of a half is issued after P V(i) of that half, which waits until alpha(i) has been read.

Jagged: every TMA box is bounded by its own sequence (:mod:`jfa.kernels.common.ragged`), so a tail tile reads zeros and never its
neighbour, and stores nothing past its end.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.lists import read_out_begin, read_record, read_shape
from jfa.kernels.blackwell.softmax import NO_MAXIMUM, exp2_on_fma_pipe, running_maximum, split_columns
from jfa.kernels.common.band import key_blocks
from jfa.kernels.common.packed import fma_pairs, mul_pairs
from jfa.kernels.common.ragged import ragged_box
from jfa.kernels.common.units import ring, zigzag_unit

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
    FMA_SLICES: tl.constexpr,  # slices of P whose exp2 runs on the FMA pipe
    ONE_Q: tl.constexpr,  # tiles of 128 queries: every tile is shared, and its second Q and O buffers become ring
    CLC: tl.constexpr,  # steal units through cluster launch control; else a static zigzag
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    NEGATIVE: tl.constexpr,  # sm_scale < 0
    SOFTMAX_REGISTERS: tl.constexpr = 192,
    SMALL_REGISTERS: tl.constexpr = 32,
    O_COLUMNS: tl.constexpr = 16,  # of O that the correction holds in registers at a time
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    Q_BUFFERS: tl.constexpr = 1 if ONE_Q else 2
    O_SLICES: tl.constexpr = HEAD_DIM // O_COLUMNS
    dtype = tlx.dtype_of(q_desc)

    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, Q_BUFFERS)
    kv_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    o_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, Q_BUFFERS)

    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    p_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), dtype, 2, tlx.storage_kind.tmem, reuse=s_storage)
    alphas = tlx.local_alloc((BLOCK_M, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    sums = tlx.local_alloc((BLOCK_M, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    maxima = tlx.local_alloc((BLOCK_M, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(
        tlx.reuse_group(
            s_tiles,
            tlx.reuse_group(p_tiles, alphas, sums, maxima, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 2, tlx.storage_kind.tmem)

    q_fulls = tlx.alloc_barriers(Q_BUFFERS)
    q_empties = tlx.alloc_barriers(Q_BUFFERS)
    kv_fulls = tlx.alloc_barriers(KV_BUFFERS)
    kv_empties = tlx.alloc_barriers(KV_BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    s_empties = tlx.alloc_barriers(2)  # l and m of the tile have been read: the next tile may write S
    p_fulls = tlx.alloc_barriers(2 * P_SLICES)
    alpha_fulls = tlx.alloc_barriers(2)
    sum_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)  # rescaled (or free, at a tile's start): P V may accumulate
    acc_fulls = tlx.alloc_barriers(2)  # the tile's last P V is done
    o_fulls = tlx.alloc_barriers(Q_BUFFERS)
    o_empties = tlx.alloc_barriers(Q_BUFFERS)
    if CLC:
        queue = tlx.clc_create_context(num_consumers=6)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            unit = tl.program_id(0)
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            while (unit >= 0) & (unit < units):
                if CLC:
                    tlx.clc_producer(queue, (done & 1) ^ 1)
                row, q_len, k_len, lo, hi = read_shape(records_ptr, unit // HEADS, HAS_LO, HAS_HI)
                out_begin = read_out_begin(records_ptr, unit // HEADS)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                correct_accumulators(
                    accs, alphas, alpha_fulls, acc_readys, steps, steps_done, done, O_SLICES, BLOCK_M, HEAD_DIM
                )
                finish_tile(
                    accs, sums, maxima, o_tiles, sum_fulls, s_empties, acc_fulls, o_fulls, o_empties,
                    lse_ptr + (unit % HEADS).to(tl.int64) * rows_out + out_begin, row, q_len, shared, done, dtype,
                    ONE_Q, O_SLICES, BLOCK_M, HEAD_DIM,
                )  # fmt: skip
                steps_done += steps
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = zigzag_unit(done, tl.program_id(0), tl.num_programs(0))

        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS, replicate=2):  # softmax
            half = tlx.async_task_replica_id()
            unit = tl.program_id(0)
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            while (unit >= 0) & (unit < units):
                row, q_len, k_len, lo, hi = read_shape(records_ptr, unit // HEADS, HAS_LO, HAS_HI)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                softmax_tile(
                    s_tiles, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls, half,
                    row + half * (1 - shared) * BLOCK_M, q_len, k_len, lo, hi, first, steps, shared,
                    steps_done, scale_log2, dtype, P_SLICES, FMA_SLICES, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, NEGATIVE,
                )  # fmt: skip
                steps_done += steps
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = zigzag_unit(done, tl.program_id(0), tl.num_programs(0))

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # mma
            unit = tl.program_id(0)
            units = tl.load(counts_ptr) * HEADS
            done = 0
            steps_done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                row, q_len, k_len, lo, hi = read_shape(records_ptr, unit // HEADS, HAS_LO, HAS_HI)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                blocks = multiply_tile(
                    q_tiles, kv_tiles, s_tiles, p_tiles, accs,
                    q_fulls, q_empties, kv_fulls, kv_empties, s_fulls, s_empties, p_fulls, acc_readys, acc_fulls,
                    steps, shared, done, steps_done, blocks, ONE_Q, KV_BUFFERS, P_SLICES, BLOCK_N, HEAD_DIM,
                )  # fmt: skip
                steps_done += steps
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = zigzag_unit(done, tl.program_id(0), tl.num_programs(0))

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # load
            unit = tl.program_id(0)
            units = tl.load(counts_ptr) * HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                row, q_begin, q_len, k_begin, k_len, _, lo, hi, _ = read_record(records_ptr, unit // HEADS)
                first, steps, shared = key_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, ONE_Q, HAS_LO, HAS_HI)
                blocks = load_tile(
                    q_desc, k_desc, v_desc, q_tiles, kv_tiles, q_fulls, q_empties, kv_fulls, kv_empties,
                    unit % HEADS, row, q_begin, q_len, k_begin, k_len, first, steps, shared, done, blocks,
                    GROUP, ONE_Q, KV_BUFFERS, BLOCK_M, BLOCK_N, HEAD_DIM,
                )  # fmt: skip
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = zigzag_unit(done, tl.program_id(0), tl.num_programs(0))

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # store
            unit = tl.program_id(0)
            units = tl.load(counts_ptr) * HEADS
            done = 0
            while (unit >= 0) & (unit < units):
                row, q_len, _, _, _ = read_shape(records_ptr, unit // HEADS, False, False)
                out_begin = read_out_begin(records_ptr, unit // HEADS)
                store_tile(o_desc, o_tiles, o_fulls, o_empties, unit % HEADS, row, out_begin, q_len, done, ONE_Q, BLOCK_M)
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = zigzag_unit(done, tl.program_id(0), tl.num_programs(0))


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
    """Loads Q and then K and V blocks in the very order in which :func:`multiply_tile` uses them up. Returns ``blocks``."""
    keys = (k_begin, k_len, head // GROUP)
    kv = (kv_tiles, kv_fulls, kv_empties)
    stride = BLOCK_N << shared
    key = first * BLOCK_N

    load_queries(q_desc, q_tiles, q_fulls, q_empties, 0, row, q_begin, q_len, head, done, BLOCK_M, HEAD_DIM)
    blocks = load_keys(k_desc, kv, keys, key, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
    if not ONE_Q:
        # A shared tile ends before this half: the box is zeros and costs no traffic, but keeps the barriers' phases in step.
        load_queries(q_desc, q_tiles, q_fulls, q_empties, 1, row + BLOCK_M, q_begin, q_len, head, done, BLOCK_M, HEAD_DIM)
    if shared:
        blocks = load_keys(k_desc, kv, keys, key + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
    for step in range(0, steps):
        more = step + 1 < steps
        blocks = load_keys(v_desc, kv, keys, key, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
        if more:
            blocks = load_keys(k_desc, kv, keys, key + stride, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
        if shared:
            blocks = load_keys(v_desc, kv, keys, key + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
            if more:
                blocks = load_keys(k_desc, kv, keys, key + stride + BLOCK_N, blocks, KV_BUFFERS, BLOCK_N, HEAD_DIM)
        key += stride
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
    q_fulls, q_empties, kv_fulls, kv_empties, s_fulls, s_empties, p_fulls, acc_readys, acc_fulls,
    steps, shared, done, steps_done, blocks,
    ONE_Q: tl.constexpr, KV_BUFFERS: tl.constexpr, P_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Issues, per step, P0 V, the next S0, P1 V, the next S1: one half multiplies while the other half's softmax runs.

    The two halves use the same K and V block, except in a shared tile, where each has its own. Returns ``blocks``.
    """
    tile_phase = done & 1
    second_q = 0 if ONE_Q else 1 - shared

    tlx.barrier_wait(q_fulls[0], tile_phase)
    k_buffer, k_phase = ring(blocks, KV_BUFFERS)
    tlx.barrier_wait(kv_fulls[k_buffer], k_phase)
    tlx.barrier_wait(s_empties[0], tile_phase ^ 1)
    score(q_tiles[0], kv_tiles[k_buffer], s_tiles[0], s_fulls[0])
    if shared:
        tlx.tcgen05_commit(kv_empties[k_buffer])
        blocks += 1
        k_buffer, k_phase = ring(blocks, KV_BUFFERS)
        tlx.barrier_wait(kv_fulls[k_buffer], k_phase)
    if not ONE_Q:
        tlx.barrier_wait(q_fulls[1], tile_phase)
    tlx.barrier_wait(s_empties[1], tile_phase ^ 1)
    score(q_tiles[second_q], kv_tiles[k_buffer], s_tiles[1], s_fulls[1])
    tlx.tcgen05_commit(kv_empties[k_buffer])
    blocks += 1

    for step in range(0, steps):
        more = step + 1 < steps
        phase = (steps_done + step) & 1
        v_buffer, v_phase = ring(blocks, KV_BUFFERS)
        blocks += 1
        if not more:
            tlx.tcgen05_commit(q_empties[0])
            if not ONE_Q:
                tlx.tcgen05_commit(q_empties[1])
        tlx.barrier_wait(kv_fulls[v_buffer], v_phase)
        v_tile = kv_tiles[v_buffer]
        accumulate(0, p_tiles, v_tile, accs, p_fulls, acc_readys, phase, step > 0, P_SLICES, BLOCK_N, HEAD_DIM)
        if shared:
            tlx.tcgen05_commit(kv_empties[v_buffer])
        if more:
            k_buffer, k_phase = ring(blocks, KV_BUFFERS)
            blocks += 1
            tlx.barrier_wait(kv_fulls[k_buffer], k_phase)
            score(q_tiles[0], kv_tiles[k_buffer], s_tiles[0], s_fulls[0])
            if shared:
                tlx.tcgen05_commit(kv_empties[k_buffer])
        else:
            tlx.tcgen05_commit(acc_fulls[0])
        if shared:
            v_buffer, v_phase = ring(blocks, KV_BUFFERS)
            blocks += 1
            tlx.barrier_wait(kv_fulls[v_buffer], v_phase)
        v_tile = kv_tiles[v_buffer]
        accumulate(1, p_tiles, v_tile, accs, p_fulls, acc_readys, phase, step > 0, P_SLICES, BLOCK_N, HEAD_DIM)
        tlx.tcgen05_commit(kv_empties[v_buffer])
        if more:
            if shared:
                k_buffer, k_phase = ring(blocks, KV_BUFFERS)
                blocks += 1
                tlx.barrier_wait(kv_fulls[k_buffer], k_phase)
            score(q_tiles[second_q], kv_tiles[k_buffer], s_tiles[1], s_fulls[1])
            tlx.tcgen05_commit(kv_empties[k_buffer])
        else:
            tlx.tcgen05_commit(acc_fulls[1])
    return blocks


@triton.jit
def score(q_tile, k_tile, s_tile, s_full):
    """S = Q K^T; ``s_full`` is arrived on when it is done, and with it all that was issued before."""
    tlx.async_dot(q_tile, tlx.local_trans(k_tile), s_tile, use_acc=False, mBarriers=[s_full])


@triton.jit
def accumulate(
    half: tl.constexpr, p_tiles, v_tile, accs, p_fulls, acc_readys, phase, use_acc,
    P_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """O += P V of one half, slice by slice as softmax publishes them; the first step of a tile overwrites O."""
    SLICE: tl.constexpr = BLOCK_N // P_SLICES
    tlx.barrier_wait(acc_readys[half], phase)
    for i in tl.static_range(P_SLICES):
        tlx.barrier_wait(p_fulls[half * P_SLICES + i], phase)
        p_slice = tlx.subslice(p_tiles[half], i * SLICE, SLICE)
        v_slice = tlx.local_slice(v_tile, [i * SLICE, 0], [SLICE, HEAD_DIM])
        tlx.async_dot(p_slice, v_slice, accs[half], use_acc=use_acc if i == 0 else True, force_async=True)


# ------------------------------------------------------------------------------------------------------------- softmax


@triton.jit
def softmax_tile(
    s_tiles, p_tiles, alphas, sums, maxima, s_fulls, p_fulls, alpha_fulls, sum_fulls, half,
    row, q_len, k_len, lo, hi, first, steps, shared, steps_done, scale_log2, dtype: tl.constexpr,
    P_SLICES: tl.constexpr, FMA_SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
        P_SLICES, FMA_SLICES, BLOCK_M, BLOCK_N, False, HAS_LO, HAS_HI, NEGATIVE,
    )  # fmt: skip
    row_max, row_sum = softmax_steps(
        s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
        bulk_stop, steps, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype,
        P_SLICES, 0, BLOCK_M, BLOCK_N, True, HAS_LO, HAS_HI, NEGATIVE,
    )  # fmt: skip

    tlx.local_store(sums[half], row_sum[:, None])
    tlx.local_store(maxima[half], row_max[:, None])
    tlx.barrier_arrive(sum_fulls[half])


@triton.jit
def softmax_steps(
    s_tiles, p_tiles, alphas, s_fulls, p_fulls, alpha_fulls, half, row_max, row_sum,
    step_begin, step_end, start, shared, row, k_len, lo, hi, steps_done, scale_log2, dtype: tl.constexpr,
    P_SLICES: tl.constexpr, FMA_SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
            p = exp2_on_fma_pipe(exponents[i]) if i < FMA_SLICES else tl.math.exp2(exponents[i])
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
    accs, alphas, alpha_fulls, acc_readys, steps, steps_done, done,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Before each further P V, O *= alpha if any row of the half asks for it."""
    for half in tl.static_range(2):
        tlx.barrier_arrive(acc_readys[half])  # the previous tile's O has been read: the first P V may overwrite it
    for step in range(1, steps):
        phase = (steps_done - done + step - 1) & 1  # a tile has one alpha fewer than steps
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
    accs, sums, maxima, o_tiles, sum_fulls, s_empties, acc_fulls, o_fulls, o_empties,
    lse_ptr, row, out_len, shared, done, dtype: tl.constexpr,
    ONE_Q: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Divides by the row sums, writes O to SMEM for the store role and LSE to memory."""
    phase = done & 1
    tlx.barrier_wait(sum_fulls[0], phase)
    sum_0 = tlx.local_load(sums[0])
    max_0 = tlx.local_load(maxima[0])
    tlx.barrier_arrive(s_empties[0])
    tlx.barrier_wait(sum_fulls[1], phase)
    sum_1 = tlx.local_load(sums[1])
    max_1 = tlx.local_load(maxima[1])
    tlx.barrier_arrive(s_empties[1])

    if shared:
        finish_shared(
            accs, o_tiles, acc_fulls, o_fulls, o_empties, lse_ptr, row, out_len, sum_0, max_0, sum_1, max_1, phase,
            dtype, ONE_Q, SLICES, BLOCK_M, HEAD_DIM,
        )  # fmt: skip
    else:
        finish_half(
            0, accs, o_tiles, acc_fulls, o_fulls, o_empties, lse_ptr, row, out_len, sum_0, max_0, phase,
            dtype, SLICES, BLOCK_M, HEAD_DIM,
        )  # fmt: skip
        finish_half(
            1, accs, o_tiles, acc_fulls, o_fulls, o_empties, lse_ptr, row + BLOCK_M, out_len, sum_1, max_1, phase,
            dtype, SLICES, BLOCK_M, HEAD_DIM,
        )  # fmt: skip


@triton.jit
def finish_half(
    half: tl.constexpr, accs, o_tiles, acc_fulls, o_fulls, o_empties, lse_ptr, row, out_len, row_sum, row_max, phase,
    dtype: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One half's O and LSE."""
    WIDTH: tl.constexpr = HEAD_DIM // SLICES
    store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M)
    inverse = safe_inverse(row_sum)
    tlx.barrier_wait(acc_fulls[half], phase)
    tlx.barrier_wait(o_empties[half], phase ^ 1)
    for i in tl.static_range(SLICES):
        out = tlx.local_load(tlx.subslice(accs[half], i * WIDTH, WIDTH)) * inverse
        tlx.local_store(tlx.local_slice(o_tiles[half], [0, i * WIDTH], [BLOCK_M, WIDTH]), out.to(dtype))
    tlx.fence("async_shared")
    tlx.barrier_arrive(o_fulls[half])


@triton.jit
def finish_shared(
    accs, o_tiles, acc_fulls, o_fulls, o_empties, lse_ptr, row, out_len, sum_0, max_0, sum_1, max_1, phase,
    dtype: tl.constexpr, ONE_Q: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The merge of a shared tile: each half's O weighted by its share of the common sum."""
    WIDTH: tl.constexpr = HEAD_DIM // SLICES
    row_max = tl.maximum(max_0, max_1)
    weight_0 = tl.math.exp2(max_0 - row_max)
    weight_1 = tl.math.exp2(max_1 - row_max)
    row_sum = sum_0 * weight_0 + sum_1 * weight_1
    store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M)
    inverse = safe_inverse(row_sum)
    tlx.barrier_wait(acc_fulls[0], phase)
    tlx.barrier_wait(acc_fulls[1], phase)
    tlx.barrier_wait(o_empties[0], phase ^ 1)
    for i in tl.static_range(SLICES):
        part_0 = tlx.local_load(tlx.subslice(accs[0], i * WIDTH, WIDTH)) * (weight_0 * inverse)
        part_1 = tlx.local_load(tlx.subslice(accs[1], i * WIDTH, WIDTH)) * (weight_1 * inverse)
        tlx.local_store(tlx.local_slice(o_tiles[0], [0, i * WIDTH], [BLOCK_M, WIDTH]), (part_0 + part_1).to(dtype))
    tlx.fence("async_shared")
    tlx.barrier_arrive(o_fulls[0])
    if not ONE_Q:  # nothing to store in the other buffer, but its phases move on, and no two of them at once
        tlx.barrier_wait(o_empties[1], phase ^ 1)
        tlx.barrier_arrive(o_fulls[1])


@triton.jit
def safe_inverse(row_sum):
    """1 / row_sum; 0 for a row without keys, whose output is 0."""
    return tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


@triton.jit
def store_lse(lse_ptr, row, out_len, row_max, row_sum, BLOCK_M: tl.constexpr):
    """Natural log-sum-exp of the tile's rows; log2(0) makes it -inf for a row without keys."""
    rows = row + tl.arange(0, BLOCK_M)
    lse = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(lse_ptr + rows, tl.reshape(lse, [BLOCK_M]), mask=rows < out_len)


# --------------------------------------------------------------------------------------------------------------- store


@triton.jit
def store_tile(
    o_desc, o_tiles, o_fulls, o_empties, head, row, out_begin, out_len, done, ONE_Q: tl.constexpr, BLOCK_M: tl.constexpr
):
    """O from SMEM to memory; rows past the sequence's end are clipped by the ragged box."""
    for half in tl.static_range(1 if ONE_Q else 2):
        tlx.barrier_wait(o_fulls[half], done & 1)
        if row + half * BLOCK_M < out_len:
            box = ragged_box(out_begin, out_len, row + half * BLOCK_M, head)
            tlx.async_descriptor_store(o_desc, o_tiles[half], box)
            tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(o_empties[half])
