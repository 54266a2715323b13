"""The Blackwell forward without specialized warps: one group of warps loads, multiplies, exponentiates, in that order.

It uses the same mathematics, TMA boxes and tensor cores as :mod:`jfa.kernels.blackwell.forward`, but nothing overlaps:
while the tensor cores work the warps wait, and vice versa. It serves as the baseline in the timeline and in `jfa
compile`.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.blackwell.softmax import NO_MAXIMUM
from jfa.kernels.common.nouns import load_tile
from jfa.kernels.common.softmax import scale_of, softmax_end, softmax_step


@triton.jit
def plain_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,  # [H, rows_out] fp32
    records_ptr,  # [tiles, 9] int32; see jfa.kernels.common.tile_list
    counts_ptr,
    rows_out,
    scale_log2,  # sm_scale * log2(e), positive
    cfg: tl.constexpr,  # Config
):
    """Compute a tile of 128 queries of one head per program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    HEAD_DIM: tl.constexpr = cfg.head_dim
    BYTES: tl.constexpr = BLOCK_N * HEAD_DIM * tlx.size_of(DTYPE)
    q_tile = tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, 1)
    k_tile = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, 1)
    v_tile = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, 1)
    s_tile = tlx.local_alloc((BLOCK_M, BLOCK_N), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BLOCK_M, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1)
    multiplied = tlx.alloc_barriers(1)

    unit = tl.program_id(0)
    if unit < tl.load(counts_ptr) * cfg.heads:
        tile = load_tile(records_ptr, unit // cfg.heads, cfg.has_lo, cfg.has_hi)
        head = unit % cfg.heads
        tlx.barrier_expect_bytes(loaded[0], BYTES)
        tlx.async_descriptor_load(q_desc, q_tile[0], tile.q.box(tile.row, head), loaded[0])
        tlx.barrier_wait(loaded[0], 0)

        scale = scale_of(scale_log2, True)
        row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        tlx.local_store(acc[0], tl.zeros([BLOCK_M, HEAD_DIM], tl.float32))
        blocks = tile.key_blocks(BLOCK_M, BLOCK_N)
        for block in range(blocks.first, blocks.end):
            box = tile.kv.box(block * BLOCK_N, head // cfg.group)
            tlx.barrier_expect_bytes(loaded[0], 2 * BYTES)
            tlx.async_descriptor_load(k_desc, k_tile[0], box, loaded[0])
            tlx.async_descriptor_load(v_desc, v_tile[0], box, loaded[0])
            tlx.barrier_wait(loaded[0], (block - blocks.first + 1) & 1)

            tlx.async_dot(q_tile[0], tlx.local_trans(k_tile[0]), s_tile[0], use_acc=False, mBarriers=[multiplied[0]])
            tlx.barrier_wait(multiplied[0], 0)
            scores = mask_pairs(tlx.local_load(s_tile[0]), tile, block)
            p, row_max, row_sum, alpha = softmax_step(scores, row_max, row_sum, scale, False)
            # P first: a thread holds a row of P or of O, but not both without spilling.
            tlx.local_store(p_tile[0], p.to(DTYPE))
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
            tlx.async_dot(p_tile[0], v_tile[0], acc[0], use_acc=True, mBarriers=[multiplied[0]])
            tlx.barrier_wait(multiplied[0], 1)

        out, lse = softmax_end(tlx.local_load(acc[0]), row_max, row_sum, scale)
        write_tile(o_desc, q_tile, lse_ptr + head.to(tl.int64) * rows_out, tile, head, out, lse)


@triton.jit
def mask_pairs(scores, tile, block):
    """Return the scores of a key block, -inf where a pair does not count."""
    queries = tile.row + tl.arange(0, BLOCK_M)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.where(tile.pair_mask(queries[:, None], keys[None, :]), scores, float("-inf"))


@triton.jit
def write_tile(o_desc, staged, lse_ptr, tile, head, out, lse):
    """Write out [128, head_dim], through the SMEM that Q no longer needs, and lse [128] of a tile."""
    queries = tile.row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + tile.out.begin + queries, lse, mask=queries < tile.out.length)
    tlx.local_store(staged[0], out.to(staged.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(o_desc, staged[0], tile.out.box(tile.row, head))
    tlx.async_descriptor_store_wait(0)
