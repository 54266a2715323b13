"""The backward of a short shared query: Q and dQ stay on the chip while all sequences pass by.

With broadcast_q and at most 128 queries one block of queries completes the dK and dV of every key tile; only dQ is a sum. Query
heads that share a key head share the block, 128 / GROUP rows each, so that the products add up their gradients of K and V. A
CTA keeps one key head and a fixed share of the list's key tiles, of whatever sequences: it adds their dQ up in tensor memory
and leaves one fp32 partial at its end, where :mod:`jfa.kernels.blackwell.backward_1cta` sends every tile's dQ to the same few
rows of memory. The partials are summed in the order of the CTAs: deterministic for free.

Roles and products are those of the general backward. TMEM at D = 128: S^T (P^T inside it), dP^T, dQ, and one place that holds dV,
then dK; at D = 64 they have a place each.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_1cta import compute_blocks, query_steps
from jfa.kernels.blackwell.backward_dq import write_dq
from jfa.kernels.blackwell.lists import read_record
from jfa.kernels.common.ragged import ragged_box
from jfa.kernels.common.units import all_ctas, ring, this_cta


@triton.jit
def pma_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    dq_desc,  # [workers * KV_HEADS * BLOCK_M, HEAD_DIM] fp32, boxes [BLOCK_M, DQ_COLUMNS]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,
    records_ptr,
    counts_ptr,
    rows_q,
    padded_count,
    scale_log2,
    sm_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head, and a tile; a power of two
    HEAD_DIM: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    COMPUTE_REGISTERS: tl.constexpr = 184,
    SMALL_REGISTERS: tl.constexpr = 40,
    DQ_COLUMNS: tl.constexpr = 16,
    COLUMNS: tl.constexpr = 32,
    KV_BUFFERS: tl.constexpr = 2,
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    DV_AND_DK_SHARE: tl.constexpr = HEAD_DIM == 128
    HEAD_ROWS: tl.constexpr = BLOCK_M // GROUP
    SHARED_ROWS: tl.constexpr = HEAD_ROWS if GROUP > 1 else 0
    dtype = tlx.dtype_of(q_desc)

    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, 1)
    k_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    v_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, KV_BUFFERS)
    do_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, 1)
    # dQ leaves once, at the end: through the buffer of dS, which is free by then.
    ds_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    ds_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), dtype, 1, reuse=ds_storage)
    stages = tlx.local_alloc((BLOCK_M, DQ_COLUMNS), tl.float32, 2, reuse=ds_storage)
    ds_storage.set_buffer_overlap(
        tlx.reuse_group(ds_tiles, tlx.reuse_group(stages, group_size=2), group_type=tlx.reuse_group_type.shared)
    )
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, 1)
    deltas = tlx.local_alloc((BLOCK_M,), tl.float32, 1)

    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=s_storage)
    p_tiles = tlx.local_alloc((BLOCK_N, 2 * BLOCK_M), dtype, 1, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(tlx.reuse_group(s_tiles, p_tiles, group_type=tlx.reuse_group_type.shared))
    dp_tiles = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem)
    dv_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    if DV_AND_DK_SHARE:
        dk_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dv_tiles)
    else:
        dk_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dq_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)

    q_fulls = tlx.alloc_barriers(1)
    kv_fulls = tlx.alloc_barriers(KV_BUFFERS)
    kv_empties = tlx.alloc_barriers(KV_BUFFERS)  # dK and dV, staged in K's and V's buffers, have left
    row_fulls = tlx.alloc_barriers(1)  # lse and delta
    row_empties = tlx.alloc_barriers(1, arrive_count=2)
    do_fulls = tlx.alloc_barriers(1)
    do_empties = tlx.alloc_barriers(1)
    s_fulls = tlx.alloc_barriers(1)
    p_fulls = tlx.alloc_barriers(2)
    dp_fulls = tlx.alloc_barriers(1)
    ds_fulls = tlx.alloc_barriers(2)
    dv_fulls = tlx.alloc_barriers(1)
    dv_empties = tlx.alloc_barriers(1, arrive_count=2)
    dk_fulls = tlx.alloc_barriers(1)
    dk_empties = tlx.alloc_barriers(1, arrive_count=2)
    out_fulls = tlx.alloc_barriers(KV_BUFFERS, arrive_count=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # store
            begin, end = share(counts_ptr, KV_HEADS)
            for tile in range(begin, end):
                row, _, _, k_begin, k_len, _, _, _, _ = read_record(records_ptr, tile)
                head = this_cta() % KV_HEADS
                done = tile - begin
                buffer, phase = ring(done, KV_BUFFERS)
                tlx.barrier_wait(out_fulls[buffer], phase)
                tlx.async_descriptor_store(dv_desc, v_tiles[buffer], ragged_box(k_begin, k_len, row, head))
                tlx.async_descriptor_store(dk_desc, k_tiles[buffer], ragged_box(k_begin, k_len, row, head))
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(kv_empties[buffer])

        with tlx.async_task(num_warps=4, registers=COMPUTE_REGISTERS, replicate=2):  # compute
            begin, end = share(counts_ptr, KV_HEADS)
            for tile in range(begin, end):
                row, _, q_len, _, k_len, _, lo, hi, _ = read_record(records_ptr, tile)
                first, bulk_begin, bulk_end, last = query_steps(
                    row, q_len, k_len, lo, hi, BLOCK_M, BLOCK_N, HAS_LO, HAS_HI
                )
                done = tile - begin
                tiles = (s_tiles, p_tiles, dp_tiles, ds_tiles, lses, deltas)
                barriers = (s_fulls, p_fulls, dp_fulls, ds_fulls, row_fulls, row_empties)
                # At most one block of queries: it is masked (in one of the two loops) or it is bulk.
                compute_blocks(
                    tiles, barriers, tlx.async_task_replica_id(), first, bulk_begin,
                    done, row, k_len, lo, hi, scale_log2, dtype,
                    1, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI, SHARED_ROWS,
                )  # fmt: skip
                compute_blocks(
                    tiles, barriers, tlx.async_task_replica_id(), bulk_begin, bulk_end,
                    done, row, k_len, lo, hi, scale_log2, dtype,
                    1, BLOCK_M, BLOCK_N, COLUMNS, False, HAS_LO, HAS_HI, SHARED_ROWS,
                )  # fmt: skip
                compute_blocks(
                    tiles, barriers, tlx.async_task_replica_id(), bulk_end, last,
                    done, row, k_len, lo, hi, scale_log2, dtype,
                    1, BLOCK_M, BLOCK_N, COLUMNS, True, HAS_LO, HAS_HI, SHARED_ROWS,
                )  # fmt: skip
                buffer, _ = ring(done, KV_BUFFERS)
                write_half(
                    dv_tiles, v_tiles[buffer], dv_fulls, dv_empties, tlx.async_task_replica_id(), done, 1.0,
                    dtype, HEAD_DIM, BLOCK_N,
                )  # fmt: skip
                write_half(
                    dk_tiles, k_tiles[buffer], dk_fulls, dk_empties, tlx.async_task_replica_id(), done, sm_scale,
                    dtype, HEAD_DIM, BLOCK_N,
                )  # fmt: skip
                tlx.fence("async_shared")
                tlx.barrier_arrive(out_fulls[buffer])
            if begin < end:
                # Complete since dK of the last tile is: dQ was issued before it.
                write_dq(
                    dq_desc, dq_tiles, stages, tlx.async_task_replica_id(), this_cta() * BLOCK_M, HEAD_DIM, DQ_COLUMNS
                )
                tlx.async_descriptor_store_wait(0)

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # mma
            begin, end = share(counts_ptr, KV_HEADS)
            if begin < end:
                tlx.barrier_wait(q_fulls[0], 0)
            for tile in range(begin, end):
                done = tile - begin
                smem = (q_tiles, k_tiles, v_tiles, do_tiles, ds_tiles)
                tmem = (s_tiles, p_tiles, dp_tiles, dv_tiles, dk_tiles, dq_tiles)
                ready = (kv_fulls, do_fulls, p_fulls, ds_fulls, dv_empties, dk_empties)
                results = (s_fulls, dp_fulls, dv_fulls, dk_fulls, do_empties)
                multiply_tile(smem, tmem, ready, results, done, DV_AND_DK_SHARE, KV_BUFFERS, HEAD_DIM, BLOCK_M)

        with tlx.async_task(num_warps=1, registers=SMALL_REGISTERS):  # load
            begin, end = share(counts_ptr, KV_HEADS)
            head = this_cta() % KV_HEADS
            SIZE: tl.constexpr = tlx.size_of(dtype)
            if begin < end:
                tlx.barrier_expect_bytes(q_fulls[0], BLOCK_M * HEAD_DIM * SIZE)
                load_group(q_desc, q_tiles[0], 0, rows_q, head, q_fulls[0], GROUP, HEAD_ROWS, HEAD_DIM)
            for tile in range(begin, end):
                row, _, q_len, k_begin, k_len, out_begin, _, _, pad_begin = read_record(records_ptr, tile)
                done = tile - begin
                buffer, phase = ring(done, KV_BUFFERS)
                box = ragged_box(k_begin, k_len, row, head)
                tlx.barrier_wait(kv_empties[buffer], phase ^ 1)
                tlx.barrier_expect_bytes(kv_fulls[buffer], 2 * BLOCK_N * HEAD_DIM * SIZE)
                tlx.async_descriptor_load(k_desc, k_tiles[buffer], box, kv_fulls[buffer])
                tlx.async_descriptor_load(v_desc, v_tiles[buffer], box, kv_fulls[buffer])
                tlx.barrier_wait(row_empties[0], (done & 1) ^ 1)
                tlx.barrier_expect_bytes(row_fulls[0], 8 * BLOCK_M)
                for member in tl.static_range(GROUP):
                    constants = (head * GROUP + member).to(tl.int64) * padded_count + pad_begin
                    lse = tlx.local_slice(lses[0], [member * HEAD_ROWS], [HEAD_ROWS])
                    delta = tlx.local_slice(deltas[0], [member * HEAD_ROWS], [HEAD_ROWS])
                    tlx.async_load(lse_ptr + constants, lse, bulk=True, barrier=row_fulls[0])
                    tlx.async_load(delta_ptr + constants, delta, bulk=True, barrier=row_fulls[0])
                tlx.barrier_wait(do_empties[0], (done & 1) ^ 1)
                tlx.barrier_expect_bytes(do_fulls[0], BLOCK_M * HEAD_DIM * SIZE)
                load_group(do_desc, do_tiles[0], out_begin, q_len, head, do_fulls[0], GROUP, HEAD_ROWS, HEAD_DIM)


@triton.jit
def load_group(
    desc, tile, begin, length, head, full, GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """The rows of a key head's query heads, each head's into its own part of the tile."""
    for member in tl.static_range(GROUP):
        rows = tlx.local_slice(tile, [member * HEAD_ROWS, 0], [HEAD_ROWS, HEAD_DIM])
        tlx.async_descriptor_load(desc, rows, ragged_box(begin, length, 0, head * GROUP + member), full)


@triton.jit
def share(counts_ptr, HEADS: tl.constexpr):
    """This CTA's part [begin, end) of the list: program p works for key head p % HEADS, and neighbours share no tile's keys."""
    tiles = tl.load(counts_ptr)
    worker = this_cta() // HEADS
    workers = all_ctas() // HEADS
    return worker * tiles // workers, (worker + 1) * tiles // workers


@triton.jit
def multiply_tile(
    smem, tmem, ready, results, done,
    DV_AND_DK_SHARE: tl.constexpr, KV_BUFFERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The five products of a key tile; only dQ adds to what the tiles before left."""
    q_tiles, k_tiles, v_tiles, do_tiles, ds_tiles = smem
    s_tiles, p_tiles, dp_tiles, dv_tiles, dk_tiles, dq_tiles = tmem
    kv_fulls, do_fulls, p_fulls, ds_fulls, dv_empties, dk_empties = ready
    s_fulls, dp_fulls, dv_fulls, dk_fulls, do_empties = results
    HALF_M: tl.constexpr = BLOCK_M // 2
    buffer, kv_phase = ring(done, KV_BUFFERS)
    phase = done & 1

    tlx.barrier_wait(kv_fulls[buffer], kv_phase)
    tlx.async_dot(k_tiles[buffer], tlx.local_trans(q_tiles[0]), s_tiles[0], use_acc=False, mBarriers=[s_fulls[0]])
    tlx.barrier_wait(do_fulls[0], phase)
    tlx.async_dot(v_tiles[buffer], tlx.local_trans(do_tiles[0]), dp_tiles[0], use_acc=False, mBarriers=[dp_fulls[0]])
    if DV_AND_DK_SHARE:
        tlx.barrier_wait(dk_empties[0], phase ^ 1)
    else:
        tlx.barrier_wait(dv_empties[0], phase ^ 1)
    for half in tl.static_range(2):
        tlx.barrier_wait(p_fulls[half], phase)
        p_half = tlx.subslice(p_tiles[0], half * BLOCK_M, HALF_M)
        do_half = tlx.local_slice(do_tiles[0], [half * HALF_M, 0], [HALF_M, HEAD_DIM])
        tlx.async_dot(p_half, do_half, dv_tiles[0], use_acc=half > 0, force_async=True)
    tlx.tcgen05_commit(dv_fulls[0])
    tlx.tcgen05_commit(do_empties[0])
    tlx.barrier_wait(ds_fulls[0], phase)
    tlx.barrier_wait(ds_fulls[1], phase)
    tlx.async_dot(tlx.local_trans(ds_tiles[0]), k_tiles[buffer], dq_tiles[0], use_acc=done > 0, force_async=True)
    if DV_AND_DK_SHARE:  # else dS says it: a group has read the dK before it makes the next dS
        tlx.barrier_wait(dv_empties[0], phase)
    tlx.async_dot(ds_tiles[0], q_tiles[0], dk_tiles[0], use_acc=False, force_async=True)
    tlx.tcgen05_commit(dk_fulls[0])


@triton.jit
def write_half(
    grad_tiles, tile, fulls, empties, half: tl.constexpr, done, scale,
    dtype: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Half of dV's or dK's columns from TMEM to the SMEM of V or K, which no product reads any more."""
    HALF_D: tl.constexpr = HEAD_DIM // 2
    tlx.barrier_wait(fulls[0], done & 1)
    grad = (tlx.local_load(tlx.subslice(grad_tiles[0], half * HALF_D, HALF_D)) * scale).to(dtype)
    tlx.barrier_arrive(empties[0])
    tlx.local_store(tlx.local_slice(tile, [0, half * HALF_D], [BLOCK_N, HALF_D]), grad)
