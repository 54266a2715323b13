"""The Blackwell forward without specialized warps: one group of warps loads, multiplies, exponentiates, in that order.

The same mathematics, TMA boxes and tensor cores as :mod:`jfa.kernels.blackwell.forward`, and nothing overlaps: while the tensor
cores work the warps wait, and the other way round. It is here to be compared with, in the timeline and in `jfa compile`.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.lists import read_record
from jfa.kernels.common.band import in_band, key_blocks
from jfa.kernels.common.ragged import ragged_box

LN_2 = tl.constexpr(0.6931471805599453)
NO_MAXIMUM = tl.constexpr(-1.0e38)  # in place of -inf, so that no difference of two maxima is NaN


@triton.jit
def plain_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,  # [H, rows_out] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.blackwell.lists
    counts_ptr,
    rows_out,
    scale_log2,  # sm_scale * log2(e), positive
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    BLOCK_M: tl.constexpr = 128,
    BLOCK_N: tl.constexpr = 128,
):
    """One program a tile of 128 queries of one head."""
    dtype = tlx.dtype_of(q_desc)
    BYTES: tl.constexpr = BLOCK_N * HEAD_DIM * tlx.size_of(dtype)
    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), dtype, 1)
    k_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, 1)
    v_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), dtype, 1)
    s_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 1, tlx.storage_kind.tmem)
    p_tiles = tlx.local_alloc((BLOCK_M, BLOCK_N), dtype, 1, tlx.storage_kind.tmem)
    accs = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1)
    multiplied = tlx.alloc_barriers(1)

    unit = tl.program_id(0)
    if unit < tl.load(counts_ptr) * HEADS:
        row, q_begin, q_len, k_begin, k_len, out_begin, lo, hi, _ = read_record(records_ptr, unit // HEADS)
        head = unit % HEADS
        tlx.barrier_expect_bytes(loaded[0], BLOCK_M * HEAD_DIM * tlx.size_of(dtype))
        tlx.async_descriptor_load(q_desc, q_tiles[0], ragged_box(q_begin, q_len, row, head), loaded[0])
        tlx.barrier_wait(loaded[0], 0)

        queries = row + tl.arange(0, BLOCK_M)
        row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        tlx.local_store(accs[0], tl.zeros([BLOCK_M, HEAD_DIM], tl.float32))
        first, _, _, end = key_blocks(row, BLOCK_M, q_len, k_len, lo, hi, BLOCK_N, HAS_LO, HAS_HI)
        for block in range(first, end):
            step = block - first
            box = ragged_box(k_begin, k_len, block * BLOCK_N, head // GROUP)
            tlx.barrier_expect_bytes(loaded[0], 2 * BYTES)
            tlx.async_descriptor_load(k_desc, k_tiles[0], box, loaded[0])
            tlx.async_descriptor_load(v_desc, v_tiles[0], box, loaded[0])
            tlx.barrier_wait(loaded[0], (step + 1) & 1)

            tlx.async_dot(q_tiles[0], tlx.local_trans(k_tiles[0]), s_tiles[0], use_acc=False, mBarriers=[multiplied[0]])
            tlx.barrier_wait(multiplied[0], 0)
            scores = tlx.local_load(s_tiles[0]) * scale_log2
            keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
            valid = in_band(queries[:, None], keys[None, :], k_len, lo, hi, HAS_LO, HAS_HI)
            scores = tl.where(valid, scores, float("-inf"))
            grown = tl.maximum(row_max, tl.max(scores, 1))
            alpha = tl.math.exp2(row_max - grown)
            p = tl.math.exp2(scores - grown[:, None])
            row_sum = row_sum * alpha + tl.sum(p, 1)
            row_max = grown

            tlx.local_store(accs[0], tlx.local_load(accs[0]) * alpha[:, None])
            tlx.local_store(p_tiles[0], p.to(dtype))
            tlx.async_dot(p_tiles[0], v_tiles[0], accs[0], use_acc=True, mBarriers=[multiplied[0]])
            tlx.barrier_wait(multiplied[0], 1)

        inverse = tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)
        lse = (row_max + tl.math.log2(row_sum)) * LN_2
        tl.store(lse_ptr + head.to(tl.int64) * rows_out + out_begin + queries, lse, mask=queries < q_len)
        tlx.local_store(q_tiles[0], (tlx.local_load(accs[0]) * inverse[:, None]).to(dtype))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(o_desc, q_tiles[0], ragged_box(out_begin, q_len, row, head))
        tlx.async_descriptor_store_wait(0)
