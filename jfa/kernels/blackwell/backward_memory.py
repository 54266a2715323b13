"""Buffers, tensor memory and barriers of the backward on one CTA, in part of the resident form's, too.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring


@aggregate
class RowConstants:
    """lse and delta of blocks of queries in SMEM, with the barriers of a ring (Q's)."""

    lses: tlx.buffered_tensor  # [stages] x [128], or [64] of a smaller block, fp32
    deltas: tlx.buffered_tensor
    ring: Ring

    @triton.jit
    def load(self, count, lse, delta):
        """Copy a block of numbers from each of two pointers into the count-th slot, whose barrier expects them already."""
        slot, _ = self.ring.slot(count)
        tlx.async_load(lse, self.lses[slot], bulk=True, barrier=self.ring.fulls[slot])
        tlx.async_load(delta, self.deltas[slot], bulk=True, barrier=self.ring.fulls[slot])


@aggregate
class Keys:
    """K and V of a tile in SMEM. At the tile's end dK and dV leave through the same buffers."""

    k: tlx.buffered_tensor
    v: tlx.buffered_tensor
    k_fulls: tlx.mbarrier
    v_fulls: tlx.mbarrier
    out_fulls: tlx.mbarrier  # dK and dV have been read from TMEM and written here
    empties: tlx.mbarrier  # dK and dV have left


@aggregate
class Scores:
    """S^T and P^T inside it, and dP^T, in TMEM; dS^T in SMEM. ``p`` and ``ds`` have a barrier per half of the queries.

    P of a half lies inside S of that half: the compute groups never touch each other's columns.
    """

    s: tlx.buffered_tensor  # [128 keys, 128 queries] fp32
    p: tlx.buffered_tensor  # [128, 256], of which columns 0 to 63 and 128 to 191 are used
    dp: tlx.buffered_tensor
    ds: tlx.buffered_tensor
    s_fulls: tlx.mbarrier
    p_fulls: tlx.mbarrier
    dp_fulls: tlx.mbarrier
    ds_fulls: tlx.mbarrier


@aggregate
class Gradients:
    """dV, dK of a tile and dQ of a block in TMEM, fp32; ``stages`` in SMEM between dQ and the reduce-add."""

    dv: tlx.buffered_tensor
    dk: tlx.buffered_tensor
    dq: tlx.buffered_tensor
    stages: tlx.buffered_tensor
    dkv_fulls: tlx.mbarrier  # the tile's last product is done, K and V will not be read again
    dq_fulls: tlx.mbarrier
    dq_empties: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA; ``rows`` uses the barriers of ``q``."""

    keys: Keys
    q: Ring
    do: Ring
    rows: RowConstants
    scores: Scores
    grads: Gradients


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    tl.static_assert(
        cfg.q_slots >= 2, "S of a block is issued before dK of the block before it, so two blocks of Q are in use"
    )
    k = tlx.local_alloc((BLOCK_N, cfg.head_dim), DTYPE, 1)
    v = tlx.local_alloc((BLOCK_N, cfg.head_dim), DTYPE, 1)
    out_fulls = tlx.alloc_barriers(1, arrive_count=2)
    keys = Keys(k, v, tlx.alloc_barriers(1), tlx.alloc_barriers(1), out_fulls, tlx.alloc_barriers(1))
    # Q is emptied by the mma role, its lse and delta by both compute groups. They arrive together.
    q = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, cfg.q_slots, 3)
    q = Ring(q.buffers, q.fulls, q.empties, q.stages, q.bytes + 2 * 4 * BLOCK_M, 0)
    do = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, cfg.do_slots, 1)
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, q.stages)
    deltas = tlx.local_alloc((BLOCK_M,), tl.float32, q.stages)
    scores = alloc_scores(tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 1))
    return Memory(keys, q, do, RowConstants(lses, deltas, q), scores, alloc_gradients(scores, cfg))


@triton.jit
def alloc_scores(ds):
    """Allocate Scores around the given ``ds``."""
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BLOCK_N, 2 * BLOCK_M), ds.dtype, 1, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))
    dp = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem)
    s_fulls, p_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(2)
    dp_fulls, ds_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(2)
    return Scores(s, p, dp, ds, s_fulls, p_fulls, dp_fulls, ds_fulls)


@triton.jit
def alloc_gradients(scores, cfg: tl.constexpr):
    """Allocate Gradients, dQ in dP's place where tensor memory is full."""
    STAGES: tl.constexpr = cfg.dq_stages
    if cfg.dq_takes_dp:
        dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=scores.dp)
    else:
        dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dv = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    stages = tlx.local_alloc((BLOCK_M, cfg.dq_columns), tl.float32, STAGES)
    return Gradients(dv, dk, dq, stages, tlx.alloc_barriers(1), tlx.alloc_barriers(1), tlx.alloc_barriers(1))
