"""dQ without atomics: a tile of 128 queries walks its keys and keeps dQ in tensor memory. The deterministic half of the backward.

    S = Q K^T     P = exp2(S scale - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K

    load      1 warp    TMA: Q and dO once a tile, K and V blocks through a ring each
    mma       1 warp    dP of a block, S of the next, then dQ of the block
    compute   2 x 4     each group half of the keys: dS into TMEM where S was; at the end dQ to memory, in fp32

Rows are queries here, so lse and delta are one number a thread. S has two buffers: the next block's scores are ready while the
groups work on this one's. Costs two products more than adding dQ up in :mod:`jfa.kernels.blackwell.backward_1cta`.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.lists import read_record
from jfa.kernels.common.band import in_band, key_blocks
from jfa.kernels.common.packed import fma_pairs
from jfa.kernels.common.ragged import ragged_box
from jfa.kernels.common.units import all_ctas, ring, this_cta, zigzag_unit


@triton.jit
def dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,  # [H * padded_count, HEAD_DIM] fp32, boxes [BLOCK_M, DQ_COLUMNS]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,
    records_ptr,
    counts_ptr,
    padded_count,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BUFFERS: tl.constexpr,  # of K, and as many of V
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    COMPUTE_REGISTERS: tl.constexpr = 160,
    SMALL_REGISTERS: tl.constexpr = 80,
    DQ_COLUMNS: tl.constexpr = 16,
    COLUMNS: tl.constexpr = 32,  # of dS that a compute group works on at a time
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    dtype = tlx.dtype_of(q_desc)
    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, 1)
    do_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, 1)
    k_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    v_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    stages = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, 2)  # one a compute group

    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=s_storage)
    # dS of a half lies inside S of that half: the groups never touch each other's columns.
    ds_tiles = tlx.local_alloc((BLOCK_M, 2 * BLOCK_N), dtype, 2, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(tlx.reuse_group(s_tiles, ds_tiles, group_type=tlx.reuse_group_type.shared))
    dp_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 1, tlx.storage_kind.tmem)
    dq_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)

    q_fulls = tlx.alloc_barriers(1)
    q_empties = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(KV_BUFFERS)
    k_empties = tlx.alloc_barriers(KV_BUFFERS)
    v_fulls = tlx.alloc_barriers(KV_BUFFERS)
    v_empties = tlx.alloc_barriers(KV_BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    dp_fulls = tlx.alloc_barriers(1)
    ds_fulls = tlx.alloc_barriers(2)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1, arrive_count=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # load
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            blocks = 0
            while unit < units:
                row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, _ = read_record(records_ptr, unit // HEADS)
                first, _, _, end = key_blocks(row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
                head = unit % HEADS
                TILE_BYTES: tl.constexpr = BLOCK_M * HEAD_DIM * tlx.size_of(dtype)
                tlx.barrier_wait(q_empties[0], (done & 1) ^ 1)
                tlx.barrier_expect_bytes(q_fulls[0], 2 * TILE_BYTES)
                tlx.async_descriptor_load(q_desc, q_tiles[0], ragged_box(q_begin, q_len, row, head), q_fulls[0])
                tlx.async_descriptor_load(do_desc, do_tiles[0], ragged_box(out_begin, q_len, row, head), q_fulls[0])
                for block in range(first, end):
                    box = ragged_box(k_begin, k_len, block * BLOCK_N, head // GROUP)
                    load_block(k_desc, k_tiles, k_fulls, k_empties, box, blocks, KV_BUFFERS, HEAD_DIM, BLOCK_N)
                    load_block(v_desc, v_tiles, v_fulls, v_empties, box, blocks, KV_BUFFERS, HEAD_DIM, BLOCK_N)
                    blocks += 1
                done += 1
                unit = zigzag_unit(done, this_cta(), all_ctas())

        with tlx.async_task(num_warps=4, registers=COMPUTE_REGISTERS, replicate=2):  # compute
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            blocks = 0
            while unit < units:
                row, _, q_len, _, k_len, _, lo, hi, pad_begin = read_record(records_ptr, unit // HEADS)
                first, bulk_begin, bulk_end, end = key_blocks(
                    row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI
                )
                out_row = (unit % HEADS) * padded_count + pad_begin + row
                lse = tl.load(lse_ptr + out_row + tl.arange(0, BLOCK_M))
                delta = tl.load(delta_ptr + out_row + tl.arange(0, BLOCK_M))
                tiles = (s_tiles, ds_tiles, dp_tiles, s_fulls, dp_fulls, ds_fulls)
                blocks = compute_ds(
                    tiles, tlx.async_task_replica_id(), first, bulk_begin, blocks, lse, delta, row, k_len, lo, hi,
                    scale_log2, dtype, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI,
                )  # fmt: skip
                blocks = compute_ds(
                    tiles, tlx.async_task_replica_id(), bulk_begin, bulk_end, blocks, lse, delta, row, k_len, lo, hi,
                    scale_log2, dtype, BLOCK_M, BLOCK_N, COLUMNS, False, HAS_LO, HAS_HI,
                )  # fmt: skip
                blocks = compute_ds(
                    tiles, tlx.async_task_replica_id(), bulk_end, end, blocks, lse, delta, row, k_len, lo, hi,
                    scale_log2, dtype, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI,
                )  # fmt: skip
                tlx.barrier_wait(dq_fulls[0], done & 1)
                write_dq(dq_desc, dq_tiles, stages, tlx.async_task_replica_id(), out_row, HEAD_DIM, DQ_COLUMNS)
                tlx.barrier_arrive(dq_empties[0])
                done += 1
                unit = zigzag_unit(done, this_cta(), all_ctas())
            tlx.async_descriptor_store_wait(0)

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # mma
            unit = this_cta()
            units = tl.load(counts_ptr) * HEADS
            done = 0
            blocks = 0
            while unit < units:
                row, _, q_len, _, k_len, _, lo, hi, _ = read_record(records_ptr, unit // HEADS)
                first, _, _, end = key_blocks(row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
                smem = (q_tiles, do_tiles, k_tiles, v_tiles)
                tmem = (s_tiles, ds_tiles, dp_tiles, dq_tiles)
                loads = (k_fulls, k_empties, v_fulls, v_empties)
                results = (s_fulls, dp_fulls, ds_fulls)
                tlx.barrier_wait(q_fulls[0], done & 1)
                tlx.barrier_wait(dq_empties[0], (done & 1) ^ 1)
                blocks = multiply_tile(smem, tmem, loads, results, end - first, blocks, KV_BUFFERS, HEAD_DIM, BLOCK_N)
                tlx.tcgen05_commit(q_empties[0])
                tlx.tcgen05_commit(dq_fulls[0])
                done += 1
                unit = zigzag_unit(done, this_cta(), all_ctas())


@triton.jit
def load_block(
    desc, tiles, fulls, empties, box, blocks, BUFFERS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """A block of rows into its ring."""
    buffer, phase = ring(blocks, BUFFERS)
    tlx.barrier_wait(empties[buffer], phase ^ 1)
    tlx.barrier_expect_bytes(fulls[buffer], ROWS * HEAD_DIM * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(desc, tiles[buffer], box, fulls[buffer])


@triton.jit
def multiply_tile(
    smem, tmem, loads, results, steps, blocks,
    KV_BUFFERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Issues a tile's products. Returns the blocks done so far."""
    q_tiles, do_tiles, k_tiles, v_tiles = smem
    _, ds_tiles, dp_tiles, dq_tiles = tmem
    k_fulls, k_empties, v_fulls, v_empties = loads
    _, dp_fulls, ds_fulls = results
    HALF_N: tl.constexpr = BLOCK_N // 2
    score(smem, tmem, loads, results, blocks, KV_BUFFERS)
    for step in range(0, steps):
        buffer, phase = ring(blocks, KV_BUFFERS)
        tlx.barrier_wait(v_fulls[buffer], phase)
        # The groups have read the dP before: dQ of the block before was issued only when their dS was there.
        tlx.async_dot(do_tiles[0], tlx.local_trans(v_tiles[buffer]), dp_tiles[0], use_acc=False, mBarriers=[dp_fulls[0]])
        tlx.tcgen05_commit(v_empties[buffer])
        if step + 1 < steps:
            score(smem, tmem, loads, results, blocks + 1, KV_BUFFERS)
        for half in tl.static_range(2):
            tlx.barrier_wait(ds_fulls[half], blocks & 1)
            ds_half = tlx.subslice(ds_tiles[blocks & 1], half * BLOCK_N, HALF_N)
            k_half = tlx.local_slice(k_tiles[buffer], [half * HALF_N, 0], [HALF_N, HEAD_DIM])
            tlx.async_dot(ds_half, k_half, dq_tiles[0], use_acc=step > 0 if half == 0 else True, force_async=True)
        tlx.tcgen05_commit(k_empties[buffer])
        blocks += 1
    return blocks


@triton.jit
def score(smem, tmem, loads, results, block, KV_BUFFERS: tl.constexpr):
    """S of a block into the buffer that dS of the last but one has left: its dQ was issued before."""
    q_tiles, _, k_tiles, _ = smem
    buffer, phase = ring(block, KV_BUFFERS)
    tlx.barrier_wait(loads[0][buffer], phase)
    tlx.async_dot(
        q_tiles[0], tlx.local_trans(k_tiles[buffer]), tmem[0][block & 1], use_acc=False, mBarriers=[results[0][block & 1]]
    )


@triton.jit
def compute_ds(
    tiles, half: tl.constexpr, block_begin, block_end, blocks, lse, delta, row, k_len, lo, hi,
    scale_log2, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """dS of one half of the keys, over one stretch of blocks, all masked or none. Returns the blocks done so far."""
    s_tiles, ds_tiles, dp_tiles, s_fulls, dp_fulls, ds_fulls = tiles
    FIRST: tl.constexpr = half * (BLOCK_N // 2)
    SLICES: tl.constexpr = BLOCK_N // 2 // COLUMNS
    for block in range(block_begin, block_end):
        tlx.barrier_wait(s_fulls[blocks & 1], (blocks >> 1) & 1)
        probabilities = ()
        for i in tl.static_range(SLICES):
            scores = tlx.local_load(tlx.subslice(s_tiles[blocks & 1], FIRST + i * COLUMNS, COLUMNS))
            p = tl.math.exp2(fma_pairs(scores, scale_log2, -lse[:, None]))
            if MASKED:
                queries = row + tl.arange(0, BLOCK_M)
                keys = block * BLOCK_N + FIRST + i * COLUMNS + tl.arange(0, COLUMNS)
                p = tl.where(in_band(queries[:, None], keys[None, :], k_len, lo, hi, HAS_LO, HAS_HI), p, 0.0)
            probabilities = probabilities + (p,)
        tlx.barrier_wait(dp_fulls[0], blocks & 1)
        for i in tl.static_range(SLICES):
            dp = tlx.local_load(tlx.subslice(dp_tiles[0], FIRST + i * COLUMNS, COLUMNS))
            ds = probabilities[i] * (dp - delta[:, None])
            tlx.local_store(tlx.subslice(ds_tiles[blocks & 1], half * BLOCK_N + i * COLUMNS, COLUMNS), ds.to(dtype))
        tlx.barrier_arrive(ds_fulls[half])
        blocks += 1
    return blocks


@triton.jit
def write_dq(
    dq_desc, dq_tiles, stages, half: tl.constexpr, out_row, HEAD_DIM: tl.constexpr, DQ_COLUMNS: tl.constexpr
):
    """Half of dQ's columns to memory; whole blocks, for the rows are padded. The last store may be under way on return."""
    HALF_D: tl.constexpr = HEAD_DIM // 2
    FIRST: tl.constexpr = half * HALF_D
    for i in tl.static_range(HALF_D // DQ_COLUMNS):
        part = tlx.local_load(tlx.subslice(dq_tiles[0], FIRST + i * DQ_COLUMNS, DQ_COLUMNS))
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(stages[half], part)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(dq_desc, stages[half], [out_row, FIRST + i * DQ_COLUMNS])
