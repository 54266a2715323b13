"""Buffers, tensor memory and barriers of the MXFP8 backward: which buffers share memory, and where the scales are.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_memory import RowConstants
from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.blackwell.scales import GROUPS, TILE_BYTES, ScaledRing, alloc_p_scales, alloc_scaled_ring
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring

SQUARE = tl.constexpr(32)  # rows and columns of dS that share a scale
SQUARES = tl.constexpr(BLOCK_N.value // SQUARE.value)


@aggregate
class Keys:
    """K by head dim, K by tokens and V by head dim of a tile in SMEM. At its end dV and dK leave through the same memory."""

    tiles: tlx.buffered_tensor  # [4] x [128, head_dim] e4m3: K, K by tokens, V; the last is there for the outputs
    scales: tlx.buffered_tensor  # [3] x [512] uint8
    outs: tlx.buffered_tensor  # [2] x [128, head_dim] in 16 bits, in the same memory: dK, dV
    fulls: tlx.mbarrier
    out_fulls: tlx.mbarrier
    empties: tlx.mbarrier  # dK and dV have left


@aggregate
class Scores:
    """S^T with P^T in its place, and dP^T, in TMEM; dS^T and the codes of its squares in SMEM."""

    s: tlx.buffered_tensor  # [128 keys, 128 queries] fp32
    p: tlx.buffered_tensor  # [128, 128] e4m3
    dp: tlx.buffered_tensor
    ds: tlx.buffered_tensor  # [128, 128] e4m3
    codes: tlx.buffered_tensor  # [2] x a scale tile: rows of keys, rows of queries
    s_fulls: tlx.mbarrier
    s_reads: tlx.mbarrier  # S^T is in registers
    p_fulls: tlx.mbarrier
    dp_fulls: tlx.mbarrier
    dp_reads: tlx.mbarrier  # the columns of dP^T in which scales lie are in registers; only where scales lie there
    ds_fulls: tlx.mbarrier


@aggregate
class ScaleColumns:
    """Scale tiles in TMEM, [128, 4] uint8 each: A's and B's of each product, inside S^T but for those of S and dK."""

    dp: tlx.buffered_tensor  # [2]
    dv: tlx.buffered_tensor
    dq: tlx.buffered_tensor
    s: tlx.buffered_tensor  # inside dP^T
    dk: tlx.buffered_tensor


@aggregate
class Gradients:
    """dV, dK of a tile and dQ of a block in TMEM, fp32; ``stages`` in SMEM between dQ and the reduce-add."""

    dv: tlx.buffered_tensor
    dk: tlx.buffered_tensor
    dq: tlx.buffered_tensor
    stages: tlx.buffered_tensor
    dkv_fulls: tlx.mbarrier
    dq_fulls: tlx.mbarrier
    dq_empties: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA; ``rows`` uses the barriers of ``q``. ``_t``: groups along
    tokens."""

    keys: Keys
    q: ScaledRing
    q_t: ScaledRing
    do: ScaledRing
    do_t: ScaledRing
    rows: RowConstants
    p_scales: tlx.buffered_tensor
    scores: Scores
    columns: ScaleColumns
    grads: Gradients


@triton.jit
def alloc_memory(OUT: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA; OUT is the dtype of dK and dV."""
    STAGES: tl.constexpr = cfg.dq_stages
    tiles = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float8e4nv, 4)
    outs = tlx.local_alloc((BLOCK_N, cfg.head_dim), OUT, 2, reuse=tiles)
    key_scales = tlx.local_alloc((TILE_BYTES,), tl.uint8, 3)
    out_fulls = tlx.alloc_barriers(1, arrive_count=2)
    keys = Keys(tiles, key_scales, outs, tlx.alloc_barriers(1), out_fulls, tlx.alloc_barriers(1))
    # Q is emptied by the mma role, its lse and delta by both compute groups. They arrive together.
    q = alloc_ring(BLOCK_M, cfg.head_dim, tl.float8e4nv, cfg.q_slots, 3)
    q = Ring(q.buffers, q.fulls, q.empties, q.stages, q.bytes + 2 * 4 * BLOCK_M, 0)
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, q.stages)
    deltas = tlx.local_alloc((BLOCK_M,), tl.float32, q.stages)
    rows = RowConstants(lses, deltas, q)
    q_scaled = ScaledRing(q, tlx.local_alloc((TILE_BYTES,), tl.uint8, q.stages))
    q_t = alloc_scaled_ring(BLOCK_M, cfg.head_dim, cfg.q_slots)
    do = alloc_scaled_ring(BLOCK_M, cfg.head_dim, cfg.do_slots)
    do_t = alloc_scaled_ring(BLOCK_M, cfg.head_dim, cfg.do_slots)
    ds = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float8e4nv, 1)
    codes = tlx.local_alloc((1, 1, SQUARE, SQUARES, SQUARES), tl.uint8, 2)
    scores, columns, dq = alloc_scores(ds, codes, cfg)
    dv = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    stages = tlx.local_alloc((BLOCK_M, cfg.dq_columns), tl.float32, STAGES)
    grads = Gradients(dv, dk, dq, stages, tlx.alloc_barriers(1), tlx.alloc_barriers(1), tlx.alloc_barriers(1))
    return Memory(keys, q_scaled, q_t, do, do_t, rows, alloc_p_scales(), scores, columns, grads)


@triton.jit
def alloc_scores(ds, codes, cfg: tl.constexpr):
    """Return (Scores, ScaleColumns, dQ): S^T, dP^T, dQ and scales in TMEM, with ``ds`` and ``codes`` in SMEM."""
    if cfg.dq_takes_dp:
        s, p, dp, dq, columns = alloc_tight(cfg)
    else:
        s, p, dp, dq, columns = alloc_roomy(cfg)
    s_fulls, s_reads = tlx.alloc_barriers(1), tlx.alloc_barriers(1, arrive_count=2)
    p_fulls, dp_fulls = tlx.alloc_barriers(1, arrive_count=2), tlx.alloc_barriers(1)
    dp_reads, ds_fulls = tlx.alloc_barriers(1, arrive_count=2), tlx.alloc_barriers(1, arrive_count=2)
    scores = Scores(s, p, dp, ds, codes, s_fulls, s_reads, p_fulls, dp_fulls, dp_reads, ds_fulls)
    return scores, columns, dq


@triton.jit
def alloc_tight(cfg: tl.constexpr):
    """Allocate S, P, dP, dQ and scales where tensor memory is full: P and scales inside S, dQ in dP's place, scales inside dP."""
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float8e4nv, 1, tlx.storage_kind.tmem, reuse=storage)
    dp_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    dv_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    dq_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(
                p,
                tlx.reuse_group(dp_columns, group_type=tlx.reuse_group_type.shared, group_size=2),
                tlx.reuse_group(dv_columns, group_type=tlx.reuse_group_type.shared, group_size=2),
                tlx.reuse_group(dq_columns, group_type=tlx.reuse_group_type.shared, group_size=2),
                group_type=tlx.reuse_group_type.distinct,
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    storage_dp = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    dp = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage_dp)
    dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage_dp)
    s_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage_dp)
    dk_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem, reuse=storage_dp)
    storage_dp.set_buffer_overlap(
        tlx.reuse_group(
            dp,
            dq,
            tlx.reuse_group(
                tlx.reuse_group(s_columns, group_type=tlx.reuse_group_type.shared, group_size=2),
                tlx.reuse_group(dk_columns, group_type=tlx.reuse_group_type.shared, group_size=2),
                group_type=tlx.reuse_group_type.distinct,
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    return s, p, dp, dq, ScaleColumns(dp_columns, dv_columns, dq_columns, s_columns, dk_columns)


@triton.jit
def alloc_roomy(cfg: tl.constexpr):
    """Allocate S with P inside, dP, dQ and scales, each in a place of its own: 360 columns in addition to dV and dK at D = 64."""
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float8e4nv, 1, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))
    dp = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem)
    dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dp_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem)
    dv_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem)
    dq_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem)
    s_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem)
    dk_columns = tlx.local_alloc((BLOCK_N, GROUPS), tl.uint8, 2, tlx.storage_kind.tmem)
    return s, p, dp, dq, ScaleColumns(dp_columns, dv_columns, dq_columns, s_columns, dk_columns)
