"""The Blackwell backward on one CTA: a tile of 128 keys makes its dK and dV and adds to the dQ of every query that sees it.

For one key/value head, each query head of its group and each block of 128 queries, transposed (keys are rows):

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)        dV += P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)           dK += dS^T Q           dQ = dS K

    load       1 warp    TMA: K and V once a tile; per block Q with its rows' lse and delta, and dO
    mma        1 warp    the five products, in the order S, [dQ and dK of the block before], dP, dV
    compute    2 x 4     each group half of the queries: P^T into TMEM where S^T was, dS^T into SMEM; at the end dK and dV
    reduce     4 warps   dQ from TMEM in slices through staged SMEM to memory, by TMA reduce-add in fp32; then stores dK and dV

TMEM at D = 128 is full: S^T (P^T inside it), dP^T, dV, dK of 128 columns each, so dQ takes dP^T's place and the next dP^T must wait
until the reduction has read it. ``HELD_SLICES`` of dQ are therefore pulled into registers before the wait for staging buffers:
TMEM is free that much earlier. At D = 64 dQ has columns of its own.

Jagged: Q, K, V, dO, dK, dV go through boxes bounded by their sequence. lse, delta and dQ live in padded arrays, where no block
reaches into the next sequence (:mod:`jfa.kernels.common.padded_rows`); a query that does not exist has lse = +inf, so P = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_dq import load_block
from jfa.kernels.blackwell.lists import read_record
from jfa.kernels.common.band import in_band, query_blocks
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ragged import ragged_box
from jfa.kernels.common.rounding import rounded_pairs
from jfa.kernels.common.units import all_ctas, ring, this_cta, zigzag_unit


@triton.jit
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    dq_desc,  # [H * dq_rows, HEAD_DIM] fp32, boxes [BLOCK_M, DQ_COLUMNS]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,  # [H, padded_count] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.blackwell.lists
    counts_ptr,  # [2] int32: tiles with work, all tiles; the kernel visits the first kind
    padded_count,
    dq_rows,
    scale_log2,  # sm_scale * log2(e)
    sm_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    HEAD_DIM: tl.constexpr,  # 64 or 128: the tensors' head dims padded
    Q_BUFFERS: tl.constexpr,
    DO_BUFFERS: tl.constexpr,
    DQ_STAGES: tl.constexpr,  # SMEM buffers between TMEM and the reduce-add
    HELD_SLICES: tl.constexpr,  # slices of dQ held in registers so that TMEM is released early; 0: after the last store
    WITH_DQ: tl.constexpr,  # False where another kernel makes dQ
    CLC: tl.constexpr,
    ZIGZAG: tl.constexpr,  # static schedule: zigzag, else round robin
    BROADCAST_Q: tl.constexpr,  # all sequences add to the same dQ
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    COMPUTE_REGISTERS: tl.constexpr,
    SMALL_REGISTERS: tl.constexpr = 40,
    DQ_COLUMNS: tl.constexpr = 16,
    COLUMNS: tl.constexpr = 32,  # of P and dS that a compute group works on at a time
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    tl.static_assert(Q_BUFFERS >= 2, "S of a block is issued before dK of the block before it, so two blocks of Q are in use")
    DQ_TAKES_DP: tl.constexpr = HEAD_DIM == 128
    dtype = tlx.dtype_of(q_desc)

    k_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, 1)
    v_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, 1)
    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, Q_BUFFERS)
    do_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, DO_BUFFERS)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), dtype, 1)
    dq_stages = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, DQ_STAGES)
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, Q_BUFFERS)
    deltas = tlx.local_alloc((BLOCK_M,), tl.float32, Q_BUFFERS)

    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=s_storage)
    # P of a half lies inside S of that half: the groups never touch each other's columns.
    p_tiles = tlx.local_alloc((BLOCK_N, 2 * BLOCK_M), dtype, 1, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(tlx.reuse_group(s_tiles, p_tiles, group_type=tlx.reuse_group_type.shared))
    dp_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem)
    if DQ_TAKES_DP:
        dq_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp_tiles)
    else:
        dq_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dv_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dk_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)

    k_fulls = tlx.alloc_barriers(1)
    v_fulls = tlx.alloc_barriers(1)
    kv_empties = tlx.alloc_barriers(1)  # dK and dV, staged in K's and V's buffers, have left
    q_fulls = tlx.alloc_barriers(Q_BUFFERS)
    q_empties = tlx.alloc_barriers(Q_BUFFERS, arrive_count=3)  # mma for Q, both compute groups for lse and delta
    do_fulls = tlx.alloc_barriers(DO_BUFFERS)
    do_empties = tlx.alloc_barriers(DO_BUFFERS)
    s_fulls = tlx.alloc_barriers(1)
    p_fulls = tlx.alloc_barriers(2)
    dp_fulls = tlx.alloc_barriers(1)
    ds_fulls = tlx.alloc_barriers(2)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1)
    dkv_fulls = tlx.alloc_barriers(1)  # the tile's last product is done, K and V will not be read again
    out_fulls = tlx.alloc_barriers(1, arrive_count=2)  # dK and dV have been read from TMEM and written to SMEM
    if CLC:
        queue = tlx.clc_create_context(num_consumers=5)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            unit = this_cta()
            units = tl.load(counts_ptr) * KV_HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                if CLC:
                    tlx.clc_producer(queue, (done & 1) ^ 1)
                row, _, q_len, k_begin, k_len, _, lo, hi, pad_begin = read_record(records_ptr, unit // KV_HEADS)
                first, _, _, end = query_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI)
                kv_head = unit % KV_HEADS
                if WITH_DQ:
                    blocks = reduce_dq(
                        dq_desc, dq_tiles, dq_stages, dq_fulls, dq_empties, kv_head * GROUP,
                        0 if BROADCAST_Q else pad_begin, dq_rows, first, end, blocks,
                        GROUP, HEAD_DIM, DQ_STAGES, HELD_SLICES, DQ_COLUMNS, BLOCK_M,
                    )  # fmt: skip
                tlx.barrier_wait(out_fulls[0], done & 1)
                tlx.async_descriptor_store(dv_desc, v_tiles[0], ragged_box(k_begin, k_len, row, kv_head))
                tlx.async_descriptor_store(dk_desc, k_tiles[0], ragged_box(k_begin, k_len, row, kv_head))
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(kv_empties[0])
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = static_unit(done, ZIGZAG)

        with tlx.async_task(num_warps=4, registers=COMPUTE_REGISTERS, replicate=2):  # compute
            unit = this_cta()
            units = tl.load(counts_ptr) * KV_HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                row, _, q_len, _, k_len, _, lo, hi, _ = read_record(records_ptr, unit // KV_HEADS)
                first, bulk_begin, bulk_end, end = query_steps(
                    row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI
                )
                tiles = (s_tiles, p_tiles, dp_tiles, ds_tiles, lses, deltas)
                barriers = (s_fulls, p_fulls, dp_fulls, ds_fulls, q_fulls, q_empties)
                for _ in range(GROUP):
                    blocks = compute_blocks(
                        tiles, barriers, tlx.async_task_replica_id(), first, bulk_begin,
                        blocks, row, k_len, lo, hi, scale_log2, dtype,
                        Q_BUFFERS, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI,
                    )  # fmt: skip
                    blocks = compute_blocks(
                        tiles, barriers, tlx.async_task_replica_id(), bulk_begin, bulk_end,
                        blocks, row, k_len, lo, hi, scale_log2, dtype,
                        Q_BUFFERS, BLOCK_M, BLOCK_N, COLUMNS, False, HAS_LO, HAS_HI,
                    )  # fmt: skip
                    blocks = compute_blocks(
                        tiles, barriers, tlx.async_task_replica_id(), bulk_end, end,
                        blocks, row, k_len, lo, hi, scale_log2, dtype,
                        Q_BUFFERS, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI,
                    )  # fmt: skip
                write_dkv(
                    dk_tiles, dv_tiles, k_tiles, v_tiles, dkv_fulls, out_fulls,
                    tlx.async_task_replica_id(), done, sm_scale, dtype, HEAD_DIM, BLOCK_N,
                )  # fmt: skip
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = static_unit(done, ZIGZAG)

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # mma
            unit = this_cta()
            units = tl.load(counts_ptr) * KV_HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                row, _, q_len, _, k_len, _, lo, hi, _ = read_record(records_ptr, unit // KV_HEADS)
                first, _, _, end = query_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI)
                smem = (k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles)
                tmem = (s_tiles, p_tiles, dp_tiles, dq_tiles, dv_tiles, dk_tiles)
                loads = (k_fulls, v_fulls, q_fulls, q_empties, do_fulls, do_empties)
                results = (s_fulls, p_fulls, dp_fulls, ds_fulls, dq_fulls, dq_empties, dkv_fulls)
                blocks = multiply_tile(
                    smem, tmem, loads, results, (end - first) * GROUP, blocks, done,
                    HEAD_DIM, Q_BUFFERS, DO_BUFFERS, DQ_TAKES_DP, WITH_DQ, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = static_unit(done, ZIGZAG)

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # load
            unit = this_cta()
            units = tl.load(counts_ptr) * KV_HEADS
            done = 0
            blocks = 0
            while (unit >= 0) & (unit < units):
                row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, pad_begin = read_record(
                    records_ptr, unit // KV_HEADS
                )
                first, _, _, end = query_steps(row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI)
                kv_head = unit % KV_HEADS
                KV_BYTES: tl.constexpr = BLOCK_N * HEAD_DIM * tlx.size_of(dtype)
                tlx.barrier_wait(kv_empties[0], (done & 1) ^ 1)
                tlx.barrier_expect_bytes(k_fulls[0], KV_BYTES)
                tlx.async_descriptor_load(k_desc, k_tiles[0], ragged_box(k_begin, k_len, row, kv_head), k_fulls[0])
                tlx.barrier_expect_bytes(v_fulls[0], KV_BYTES)
                tlx.async_descriptor_load(v_desc, v_tiles[0], ragged_box(k_begin, k_len, row, kv_head), v_fulls[0])
                for member in range(GROUP):
                    head = kv_head * GROUP + member
                    constants = head.to(tl.int64) * padded_count + pad_begin
                    for block in range(first, end):
                        q_row = block * BLOCK_M
                        load_queries(
                            q_desc, q_tiles, lses, deltas, q_fulls, q_empties, ragged_box(q_begin, q_len, q_row, head),
                            lse_ptr + constants + q_row, delta_ptr + constants + q_row, blocks,
                            Q_BUFFERS, HEAD_DIM, BLOCK_M,
                        )  # fmt: skip
                        load_block(
                            do_desc, do_tiles, do_fulls, do_empties, ragged_box(out_begin, q_len, q_row, head), blocks,
                            DO_BUFFERS, HEAD_DIM, BLOCK_M,
                        )  # fmt: skip
                        blocks += 1
                done += 1
                if CLC:
                    unit = tlx.clc_consumer(queue, (done - 1) & 1)
                else:
                    unit = static_unit(done, ZIGZAG)


@triton.jit
def static_unit(round_, ZIGZAG: tl.constexpr):
    """The unit that this CTA takes in a round of a static schedule."""
    if ZIGZAG:
        return zigzag_unit(round_, this_cta(), all_ctas())
    else:
        return round_ * all_ctas() + this_cta()


@triton.jit
def query_steps(
    row, q_len, k_len, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """(first, bulk_begin, bulk_end, end) of the query blocks that see a key tile.

    A tile that no query sees gets one wholly masked block, so that no role waits for another in vain.
    """
    first, bulk_begin, bulk_end, end = query_blocks(row, BLOCK_N, q_len, k_len, lo, hi, BLOCK_M, HAS_LO, HAS_HI)
    nothing = end <= first
    return (
        tl.where(nothing, 0, first), tl.where(nothing, 0, bulk_begin),
        tl.where(nothing, 0, bulk_end), tl.where(nothing, 1, end),
    )  # fmt: skip


@triton.jit
def load_queries(
    desc, tiles, lses, deltas, fulls, empties, box, lse_ptr, delta_ptr, blocks,
    BUFFERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A block of Q, and on the same barrier its rows' lse and delta."""
    buffer, phase = ring(blocks, BUFFERS)
    tlx.barrier_wait(empties[buffer], phase ^ 1)
    tlx.barrier_expect_bytes(fulls[buffer], BLOCK_M * HEAD_DIM * tlx.size_of(tlx.dtype_of(desc)) + 8 * BLOCK_M)
    tlx.async_descriptor_load(desc, tiles[buffer], box, fulls[buffer])
    tlx.async_load(lse_ptr, lses[buffer], bulk=True, barrier=fulls[buffer])
    tlx.async_load(delta_ptr, deltas[buffer], bulk=True, barrier=fulls[buffer])


# ----------------------------------------------------------------------------------------------------------------- mma


@triton.jit
def multiply_tile(
    smem, tmem, loads, results, steps, blocks, done,
    HEAD_DIM: tl.constexpr, Q_BUFFERS: tl.constexpr, DO_BUFFERS: tl.constexpr, DQ_TAKES_DP: tl.constexpr,
    WITH_DQ: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Issues a tile's products. Returns the blocks done so far.

    S of a block comes before dQ and dK of the block before it, so that compute has scores to work on meanwhile. A new tile's K is
    there only after dK and dV of the tile before have left through its buffer: their tensor memory is free by then.
    """
    k_tiles, v_tiles, q_tiles, do_tiles, _ = smem
    s_tiles, p_tiles, dp_tiles, _, dv_tiles, dk_tiles = tmem
    k_fulls, v_fulls, q_fulls, q_empties, do_fulls, do_empties = loads
    s_fulls, p_fulls, dp_fulls, _, _, dq_empties, dkv_fulls = results
    HALF_M: tl.constexpr = BLOCK_M // 2

    tlx.barrier_wait(k_fulls[0], done & 1)
    for step in range(0, steps + 1):
        phase = blocks & 1
        q_buffer, q_phase = ring(blocks, Q_BUFFERS)
        do_buffer, do_phase = ring(blocks, DO_BUFFERS)
        if step < steps:
            tlx.barrier_wait(q_fulls[q_buffer], q_phase)
            tlx.async_dot(
                k_tiles[0], tlx.local_trans(q_tiles[q_buffer]), s_tiles[0], use_acc=False, mBarriers=[s_fulls[0]]
            )
        if step > 0:
            multiply_ds(smem, tmem, loads, results, blocks - 1, step > 1, Q_BUFFERS, DQ_TAKES_DP, WITH_DQ)
        else:
            tlx.barrier_wait(v_fulls[0], done & 1)
        if step < steps:
            tlx.barrier_wait(do_fulls[do_buffer], do_phase)
            if DQ_TAKES_DP and WITH_DQ:
                tlx.barrier_wait(dq_empties[0], phase ^ 1)
            tlx.async_dot(
                v_tiles[0], tlx.local_trans(do_tiles[do_buffer]), dp_tiles[0], use_acc=False, mBarriers=[dp_fulls[0]]
            )
            for half in tl.static_range(2):
                tlx.barrier_wait(p_fulls[half], phase)
                p_half = tlx.subslice(p_tiles[0], half * BLOCK_M, HALF_M)
                do_half = tlx.local_slice(do_tiles[do_buffer], [half * HALF_M, 0], [HALF_M, HEAD_DIM])
                tlx.async_dot(p_half, do_half, dv_tiles[0], use_acc=step > 0 if half == 0 else True, force_async=True)
            tlx.tcgen05_commit(do_empties[do_buffer])
            blocks += 1
    tlx.tcgen05_commit(dkv_fulls[0])
    return blocks


@triton.jit
def multiply_ds(
    smem, tmem, loads, results, block, use_acc,
    Q_BUFFERS: tl.constexpr, DQ_TAKES_DP: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """dQ = dS K and dK += dS^T Q of one block, whose dS^T [keys, queries] lies in SMEM; dQ first: the reduction is waiting."""
    k_tiles, _, q_tiles, _, ds_tiles = smem
    _, _, _, dq_tiles, _, dk_tiles = tmem
    _, _, _, q_empties, _, _ = loads
    _, _, _, ds_fulls, dq_fulls, dq_empties, _ = results
    phase = block & 1
    q_buffer, _ = ring(block, Q_BUFFERS)
    tlx.barrier_wait(ds_fulls[0], phase)
    tlx.barrier_wait(ds_fulls[1], phase)
    if WITH_DQ:
        if not DQ_TAKES_DP:
            tlx.barrier_wait(dq_empties[0], phase ^ 1)
        tlx.async_dot(
            tlx.local_trans(ds_tiles[0]), k_tiles[0], dq_tiles[0], use_acc=False, mBarriers=[dq_fulls[0]]
        )
    tlx.async_dot(ds_tiles[0], q_tiles[q_buffer], dk_tiles[0], use_acc=use_acc, force_async=True)
    tlx.tcgen05_commit(q_empties[q_buffer])


# ------------------------------------------------------------------------------------------------------------- compute


@triton.jit
def compute_blocks(
    tiles, barriers, half: tl.constexpr, block_begin, block_end, blocks, row, k_len, lo, hi, scale_log2, dtype: tl.constexpr,
    Q_BUFFERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    HEAD_ROWS: tl.constexpr = 0,
):  # fmt: skip
    """P^T and dS^T of one half of the queries, over one stretch of blocks, all masked or none. Returns the blocks done.

    HEAD_ROWS: where a block holds several heads' queries, the rows of each.
    """
    s_tiles, p_tiles, dp_tiles, ds_tiles, lses, deltas = tiles
    s_fulls, p_fulls, dp_fulls, ds_fulls, q_fulls, q_empties = barriers
    HALF_M: tl.constexpr = BLOCK_M // 2
    SLICES: tl.constexpr = HALF_M // COLUMNS
    FIRST: tl.constexpr = half * HALF_M
    for block in range(block_begin, block_end):
        phase = blocks & 1
        q_buffer, q_phase = ring(blocks, Q_BUFFERS)

        tlx.barrier_wait(q_fulls[q_buffer], q_phase)
        tlx.barrier_wait(s_fulls[0], phase)
        kept = ()
        for i in tl.static_range(SLICES):
            lse = tlx.local_load(tlx.local_slice(lses[q_buffer], [FIRST + i * COLUMNS], [COLUMNS]))
            scores = tlx.local_load(tlx.subslice(s_tiles[0], FIRST + i * COLUMNS, COLUMNS))
            p = tl.math.exp2(fma_pairs(scores, scale_log2, -lse[None, :]))
            if MASKED:
                keys = row + tl.arange(0, BLOCK_N)
                queries = block * BLOCK_M + FIRST + i * COLUMNS + tl.arange(0, COLUMNS)
                if HEAD_ROWS:
                    queries = queries % HEAD_ROWS
                p = tl.where(in_band(queries[None, :], keys[:, None], k_len, lo, hi, HAS_LO, HAS_HI), p, 0.0)
            kept = kept + (rounded_pairs(p, dtype),)
        for i in tl.static_range(SLICES):  # only now: P lies where S was
            tlx.local_store(tlx.subslice(p_tiles[0], half * BLOCK_M + i * COLUMNS, COLUMNS), kept[i])
        tlx.barrier_arrive(p_fulls[half])

        tlx.barrier_wait(dp_fulls[0], phase)
        for i in tl.static_range(SLICES):
            delta = tlx.local_load(tlx.local_slice(deltas[q_buffer], [FIRST + i * COLUMNS], [COLUMNS]))
            dp = tlx.local_load(tlx.subslice(dp_tiles[0], FIRST + i * COLUMNS, COLUMNS))
            ds = kept[i].to(tl.float32) * (dp - delta[None, :])
            tlx.local_store(tlx.local_slice(ds_tiles[0], [0, FIRST + i * COLUMNS], [BLOCK_N, COLUMNS]), ds.to(dtype))
        tlx.barrier_arrive(q_empties[q_buffer])
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_fulls[half])
        blocks += 1
    return blocks


@triton.jit
def write_dkv(
    dk_tiles, dv_tiles, k_tiles, v_tiles, dkv_fulls, out_fulls, half: tl.constexpr, done, sm_scale,
    dtype: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Half of dK's and dV's columns from TMEM to the SMEM of K and V, which the tile no longer needs."""
    HALF_D: tl.constexpr = HEAD_DIM // 2
    tlx.barrier_wait(dkv_fulls[0], done & 1)
    dv = tlx.local_load(tlx.subslice(dv_tiles[0], half * HALF_D, HALF_D)).to(dtype)
    tlx.local_store(tlx.local_slice(v_tiles[0], [0, half * HALF_D], [BLOCK_N, HALF_D]), dv)
    dk = (tlx.local_load(tlx.subslice(dk_tiles[0], half * HALF_D, HALF_D)) * sm_scale).to(dtype)
    tlx.local_store(tlx.local_slice(k_tiles[0], [0, half * HALF_D], [BLOCK_N, HALF_D]), dk)
    tlx.fence("async_shared")
    tlx.barrier_arrive(out_fulls[0])


# -------------------------------------------------------------------------------------------------------------- reduce


@triton.jit
def reduce_dq(
    dq_desc, dq_tiles, dq_stages, dq_fulls, dq_empties, first_head, dq_begin, dq_rows, first, end, blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DQ_STAGES: tl.constexpr, HELD_SLICES: tl.constexpr,
    DQ_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds every block's dQ of a tile to memory, slice by slice. Returns the blocks done so far."""
    SLICES: tl.constexpr = HEAD_DIM // DQ_COLUMNS
    tl.static_assert(SLICES % DQ_STAGES == 0, "a block of dQ starts with the staging buffer that was filled longest ago")
    for member in range(GROUP):
        head_row = (first_head + member) * dq_rows + dq_begin
        for block in range(first, end):
            row = head_row + block * BLOCK_M
            tlx.barrier_wait(dq_fulls[0], blocks & 1)
            for i in tl.static_range(SLICES - HELD_SLICES):
                part = tlx.local_load(tlx.subslice(dq_tiles[0], i * DQ_COLUMNS, DQ_COLUMNS))
                add_slice(dq_desc, dq_stages, part, row, i, DQ_STAGES, DQ_COLUMNS)
            held = ()
            for i in tl.static_range(SLICES - HELD_SLICES, SLICES):
                held = held + (tlx.local_load(tlx.subslice(dq_tiles[0], i * DQ_COLUMNS, DQ_COLUMNS)),)
            tlx.barrier_arrive(dq_empties[0])
            for i in tl.static_range(HELD_SLICES):
                add_slice(dq_desc, dq_stages, held[i], row, SLICES - HELD_SLICES + i, DQ_STAGES, DQ_COLUMNS)
            blocks += 1
    return blocks


@triton.jit
def add_slice(dq_desc, dq_stages, part, row, i: tl.constexpr, DQ_STAGES: tl.constexpr, DQ_COLUMNS: tl.constexpr):
    """One slice into the staging buffer whose last reader has left, and from there added to memory in fp32."""
    stage = dq_stages[i % DQ_STAGES]
    tlx.async_descriptor_store_wait(DQ_STAGES - 1)
    tlx.local_store(stage, part)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(dq_desc, stage, [row, i * DQ_COLUMNS], store_reduce="add")
