"""Memory of the backward on a pair of CTAs: buffers, tensor memory, and which CTA owns which barrier.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N, HALF_M
from jfa.kernels.blackwell.pair import CTAS
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring

TILE_N = tl.constexpr(CTAS.value * BLOCK_N.value)  # keys of a tile
# Index of the buffer from which dS is copied to the other CTA; 0 and 1 are the parts of dS by rank
SENT = tl.constexpr(2)

# Who arrives at which barrier, and who waits; "leader" means at the leader's only, "both" that each CTA has its own.
#
#   barrier                      arrivals of a phase                                       waits
#   k, v, k_columns, q_*, do_*
#     fulls                      leader: bytes of both CTAs' TMA                           mma
#     empties                    both: commit of the last product that reads it            load
#   lses, deltas fulls; empties  both: bytes of a bulk copy; two compute groups            compute; load rows
#   s_fulls, dp_fulls            both: commit of S, dP                                     compute
#   s_reads                      both: group 0, which has read the S under P of group 1    group 1
#   s_empties                    leader: group 1 of both CTAs, which has read S under dQ   mma
#   p_fulls[h], ds_t_fulls[h]    leader: group h of both CTAs, which has written TMEM      mma
#   ds_fulls                     both: the group that keeps its dS; bytes of the other's   mma
#   ds_pairs                     leader: the other CTA's mma role                          mma
#   dq_fulls                     both: commit of dQ                                        reduce; compute, before it overwrites dS
#   dq_empties                   leader: reduce of both CTAs                               mma
#   dkv_fulls                    both: commit of the tile's last product                   compute
#   out_fulls                    both: two compute groups, which have written dK and dV    reduce
#   out_empties                  both: reduce, when dK and dV have left                    load columns
#   out_pairs                    leader: reduce of both CTAs, then                         mma


@aggregate
class Scores:
    """S^T and dP^T in TMEM, P^T and dS^T inside them, dS^T of 64 queries and 256 keys in SMEM."""

    s: tlx.buffered_tensor  # [128 keys, 128 queries] fp32
    p: tlx.buffered_tensor  # [128, 128] in the lower 64 columns of S
    dp: tlx.buffered_tensor
    # [128, 256], of which columns 0 to 63 and 128 to 191 are used: each half inside its own half of dP
    ds_t: tlx.buffered_tensor
    ds: tlx.buffered_tensor  # [256 keys, 64 queries]
    # 3 x [128, 64]: the halves of ds by the rank of the CTA whose keys they are, and what is sent
    ds_parts: tlx.buffered_tensor
    s_fulls: tlx.mbarrier
    s_reads: tlx.mbarrier
    s_empties: tlx.mbarrier
    p_fulls: tlx.mbarrier
    dp_fulls: tlx.mbarrier
    ds_t_fulls: tlx.mbarrier
    ds_fulls: tlx.mbarrier
    ds_pairs: tlx.mbarrier


@aggregate
class Gradients:
    """dV, dK of a tile and 64 rows of a block's dQ in TMEM, fp32; ``stages`` in SMEM between dQ and the reduce-add."""

    dv: tlx.buffered_tensor
    dk: tlx.buffered_tensor
    dq: tlx.buffered_tensor  # [64, head_dim]
    # the same as it lies: [128 lanes, head_dim / 2], lanes 64 to 127 the upper half of the columns
    dq_lanes: tlx.buffered_tensor
    stages: tlx.buffered_tensor
    dkv_fulls: tlx.mbarrier
    out_fulls: tlx.mbarrier
    out_empties: tlx.mbarrier
    out_pairs: tlx.mbarrier
    dq_fulls: tlx.mbarrier
    dq_empties: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA, and with the other CTA.

    dV and dK of a tile are stored in halves of their columns through buffers that its last products have released: dV
        through those of the columns of Q and dO, dK through the two parts of dS. So the loads of the next tile's K and
        V need not wait for them.
    """

    k: Ring  # [128, head_dim], own keys
    v: Ring
    k_columns: Ring  # [256, head_dim / 2]
    q_rows: Ring
    q_columns: Ring
    do_rows: Ring
    do_columns: Ring
    lses: Ring  # [128] fp32
    deltas: Ring
    scores: Scores
    grads: Gradients


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    DIM: tl.constexpr = cfg.head_dim
    HALF_D: tl.constexpr = cfg.head_dim // 2
    keys = alloc_ring(BLOCK_N, DIM, DTYPE, 1, 1, RINGS=2)
    k_columns = alloc_ring(TILE_N, HALF_D, DTYPE, 1, 1)
    rows = alloc_ring(HALF_M, DIM, DTYPE, 1, 1, RINGS=2)
    columns = alloc_ring(BLOCK_M, HALF_D, DTYPE, 1, 1, RINGS=2)
    lses, deltas = alloc_constants(2), alloc_constants(1)
    scores, grads = alloc_products(DTYPE, cfg)
    k, v, q_rows, do_rows = keys.nth(0), keys.nth(1), rows.nth(0), rows.nth(1)
    return Memory(k, v, k_columns, q_rows, columns.nth(0), do_rows, columns.nth(1), lses, deltas, scores, grads)


@triton.jit
def alloc_constants(STAGES: tl.constexpr):
    """Allocate a ring of blocks of 128 fp32 numbers, one per query, that both compute groups empty."""
    buffers = tlx.local_alloc((BLOCK_M,), tl.float32, STAGES)
    empties = tlx.alloc_barriers(STAGES, arrive_count=2)
    return Ring(buffers, tlx.alloc_barriers(STAGES), empties, STAGES, 4 * BLOCK_M, 0)


@triton.jit
def alloc_products(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate Scores and Gradients: tensor memory is full, so P and dQ lie side by side where S is."""
    STAGES: tl.constexpr = cfg.dq_stages
    s_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=s_storage)
    p = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 1, tlx.storage_kind.tmem, reuse=s_storage)
    dq = tlx.local_alloc((HALF_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=s_storage)
    dq_lanes = tlx.local_alloc((BLOCK_M, cfg.head_dim // 2), tl.float32, 1, tlx.storage_kind.tmem, reuse=s_storage)
    s_storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(
                p,
                tlx.reuse_group(dq, dq_lanes, group_type=tlx.reuse_group_type.shared),
                group_type=tlx.reuse_group_type.distinct,
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    dp_storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    dp = tlx.local_alloc((BLOCK_N, BLOCK_M), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp_storage)
    ds_t = tlx.local_alloc((BLOCK_N, 2 * BLOCK_M), DTYPE, 1, tlx.storage_kind.tmem, reuse=dp_storage)
    dp_storage.set_buffer_overlap(tlx.reuse_group(dp, ds_t, group_type=tlx.reuse_group_type.shared))
    ds_parts = tlx.local_alloc((BLOCK_N, HALF_M), DTYPE, SENT + 1)
    ds = tlx.local_alloc((TILE_N, HALF_M), DTYPE, 1, reuse=ds_parts)
    s_fulls, s_reads, p_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(1), tlx.alloc_barriers(2, arrive_count=CTAS)
    dp_fulls, ds_t_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(2, arrive_count=CTAS)
    s_empties = tlx.alloc_barriers(1, arrive_count=CTAS)
    ds_fulls, ds_pairs = tlx.alloc_barriers(1, arrive_count=2), tlx.alloc_barriers(1)
    scores = Scores(
        s, p, dp, ds_t, ds, ds_parts, s_fulls, s_reads, s_empties, p_fulls, dp_fulls, ds_t_fulls, ds_fulls, ds_pairs
    )
    dv = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    stages = tlx.local_alloc((BLOCK_M, cfg.dq_columns), tl.float32, STAGES)
    dkv_fulls, dq_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1, arrive_count=CTAS)
    out_fulls, out_empties = tlx.alloc_barriers(1, arrive_count=2), tlx.alloc_barriers(1)
    out_pairs = tlx.alloc_barriers(1, arrive_count=CTAS)
    outs = (out_fulls, out_empties, out_pairs)
    return scores, Gradients(dv, dk, dq, dq_lanes, stages, dkv_fulls, *outs, dq_fulls, dq_empties)
