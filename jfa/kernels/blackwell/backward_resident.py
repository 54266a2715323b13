"""The backward of a short shared query: Q and dQ stay in SMEM and TMEM while a CTA processes its sequences.

With broadcast_q and at most 128 queries one block of queries completes the dK and dV of every key tile; only dQ is a
sum over key tiles. Query heads that share a key head share the block, 128 / group rows each, so that the products add
up their gradients of K and V. A CTA keeps one key head and a fixed share of the list's key tiles, from any sequences:
it adds up their dQ in tensor memory and stores one fp32 partial at its end, whereas
:mod:`jfa.kernels.blackwell.backward_1cta` adds every tile's dQ to the same few rows of memory. The partials are summed
in the order of the CTAs, so the result is deterministic.

Roles and products are those of the general backward. TMEM at D = 128: S^T (P^T inside it), dP^T, dQ, and one place that holds dV,
then dK; at D = 64 they have a place each.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_1cta import compute_blocks, multiply_p, query_steps
from jfa.kernels.blackwell.backward_dq import write_dq
from jfa.kernels.blackwell.backward_memory import RowConstants, Scores, alloc_scores
from jfa.kernels.blackwell.config import BLOCK_M, BLOCK_N
from jfa.kernels.common.nouns import RowPointers, Span, aggregate, load_tile
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.kernels.common.units import all_ctas, this_cta


@triton.jit
def resident_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    dq_desc,  # [CTAs * BLOCK_M, head_dim] fp32, boxes [BLOCK_M, dq_columns]
    lse_ptr,  # [H, padded_count] fp32, in base 2
    delta_ptr,
    records_ptr,
    counts_ptr,
    rows_q,
    padded_count,
    scale_log2,
    sm_scale,
    cfg: tl.constexpr,  # BackwardConfig; its group is a power of two
):
    memory = alloc_memory(tlx.dtype_of(q_desc), cfg)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # store
            begin, end = own_tiles(counts_ptr, cfg.heads)
            for index in range(begin, end):
                tile = load_tile(records_ptr, index, cfg.has_lo, cfg.has_hi)
                store_tile(dk_desc, dv_desc, memory, tile, this_cta() % cfg.heads, index - begin)

        with tlx.async_task(num_warps=4, registers=cfg.compute_registers, replicate=2):  # compute
            half: tl.constexpr = tlx.async_task_replica_id()
            begin, end = own_tiles(counts_ptr, cfg.heads)
            for index in range(begin, end):
                tile = load_tile(records_ptr, index, cfg.has_lo, cfg.has_hi)
                compute_tile(memory, half, tile, index - begin, scale_log2, sm_scale, cfg)
            if begin < end:  # dQ is complete since dK of the last tile is: it was issued before
                write_dq(dq_desc, memory.grads.dq, memory.stages, half, this_cta() * BLOCK_M, cfg)
                tlx.async_descriptor_store_wait(0)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # mma
            begin, end = own_tiles(counts_ptr, cfg.heads)
            if begin < end:
                tlx.barrier_wait(memory.q.fulls[0], 0)
            for index in range(begin, end):
                multiply_tile(memory, index - begin, cfg)

        with tlx.async_task(num_warps=1, registers=cfg.small_registers):  # load
            begin, end = own_tiles(counts_ptr, cfg.heads)
            head = this_cta() % cfg.heads
            if begin < end:
                tlx.barrier_expect_bytes(memory.q.fulls[0], memory.q.bytes)
                load_group(q_desc, memory.q, Span(tl.to_tensor(0), rows_q), head, cfg)
            constants = RowPointers(lse_ptr, delta_ptr, padded_count)
            for index in range(begin, end):
                tile = load_tile(records_ptr, index, cfg.has_lo, cfg.has_hi)
                load_inputs(k_desc, v_desc, do_desc, constants, memory, tile, head, index - begin, cfg)


@triton.jit
def own_tiles(counts_ptr, HEADS: tl.constexpr):
    """Return this CTA's part [begin, end) of the list. Program p works for key head p % HEADS."""
    tiles = tl.load(counts_ptr)
    share = this_cta() // HEADS
    shares = all_ctas() // HEADS
    return share * tiles // shares, (share + 1) * tiles // shares


# ------------------------------------------------------------------------------------------------- memory and barriers


@aggregate
class Gradients:
    """dV and dK of a tile (at D = 128 one after the other in the same columns) and dQ of all tiles; TMEM, fp32."""

    dv: tlx.buffered_tensor
    dk: tlx.buffered_tensor
    dq: tlx.buffered_tensor
    dv_fulls: tlx.mbarrier
    dv_empties: tlx.mbarrier
    dk_fulls: tlx.mbarrier
    dk_empties: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by the roles of a CTA; V is filled and released together with K."""

    q: Ring
    k: Ring  # emptied when dK and dV have left by its and V's buffers
    v: tlx.buffered_tensor
    out_fulls: tlx.mbarrier  # dK and dV have been written to K's and V's buffers
    do: Ring
    rows: RowConstants
    scores: Scores
    grads: Gradients
    stages: tlx.buffered_tensor  # one per compute group, between dQ and memory


@triton.jit
def alloc_memory(DTYPE: tl.constexpr, cfg: tl.constexpr):
    """Allocate SMEM, TMEM and barriers of one CTA."""
    q = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, 1, 1)
    k = alloc_ring(BLOCK_N, cfg.head_dim, DTYPE, 2, 1)
    k = Ring(k.buffers, k.fulls, k.empties, k.stages, 2 * k.bytes, 0)
    v = tlx.local_alloc((BLOCK_N, cfg.head_dim), DTYPE, 2)
    out_fulls = tlx.alloc_barriers(2, arrive_count=2)
    do = alloc_ring(BLOCK_M, cfg.head_dim, DTYPE, 1, 1)
    # dQ leaves once, at the end: through the buffer of dS, which is free by then.
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    ds = tlx.local_alloc((BLOCK_N, BLOCK_M), DTYPE, 1, reuse=storage)
    stages = tlx.local_alloc((BLOCK_M, cfg.dq_columns), tl.float32, 2, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(ds, tlx.reuse_group(stages, group_size=2), group_type=tlx.reuse_group_type.shared)
    )
    lses = tlx.local_alloc((BLOCK_M,), tl.float32, 1)
    deltas = tlx.local_alloc((BLOCK_M,), tl.float32, 1)
    row_empties = tlx.alloc_barriers(1, arrive_count=2)
    rows = RowConstants(lses, deltas, Ring(lses, tlx.alloc_barriers(1), row_empties, 1, 2 * 4 * BLOCK_M, 0))
    return Memory(q, k, v, out_fulls, do, rows, alloc_scores(ds), alloc_gradients(cfg), stages)


@triton.jit
def alloc_gradients(cfg: tl.constexpr):
    """Allocate Gradients; dV and dK share a place where tensor memory is full."""
    dv = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    if cfg.dk_takes_dv:
        dk = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem, reuse=dv)
    else:
        dk = tlx.local_alloc((BLOCK_N, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dq = tlx.local_alloc((BLOCK_M, cfg.head_dim), tl.float32, 1, tlx.storage_kind.tmem)
    dv_fulls, dk_fulls = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    dv_empties, dk_empties = tlx.alloc_barriers(1, arrive_count=2), tlx.alloc_barriers(1, arrive_count=2)
    return Gradients(dv, dk, dq, dv_fulls, dv_empties, dk_fulls, dk_empties)


# ---------------------------------------------------------------------------------------------------------------- load


@triton.jit
def load_inputs(k_desc, v_desc, do_desc, constants, memory, tile, head, count, cfg: tl.constexpr):
    """Load the CTA's count-th tile: K and V, the queries' lse and delta, dO."""
    HEAD_ROWS: tl.constexpr = BLOCK_M // cfg.group
    k, do, rows = memory.k, memory.do, memory.rows
    box = tile.kv.box(tile.row, head)
    k.load(count, k_desc, box)
    slot, _ = k.slot(count)
    tlx.async_descriptor_load(v_desc, memory.v[slot], box, k.fulls[slot])

    tlx.barrier_wait(rows.ring.empties[0], (count & 1) ^ 1)
    tlx.barrier_expect_bytes(rows.ring.fulls[0], rows.ring.bytes)
    for member in tl.static_range(BLOCK_M // HEAD_ROWS):
        at = (head * cfg.group + member).to(tl.int64) * constants.count + tile.pad_begin
        lse = tlx.local_slice(rows.lses[0], [member * HEAD_ROWS], [HEAD_ROWS])
        delta = tlx.local_slice(rows.deltas[0], [member * HEAD_ROWS], [HEAD_ROWS])
        tlx.async_load(constants.lse + at, lse, bulk=True, barrier=rows.ring.fulls[0])
        tlx.async_load(constants.delta + at, delta, bulk=True, barrier=rows.ring.fulls[0])

    tlx.barrier_wait(do.empties[0], (count & 1) ^ 1)
    tlx.barrier_expect_bytes(do.fulls[0], do.bytes)
    load_group(do_desc, do, tile.out, head, cfg)


@triton.jit
def load_group(desc, ring, span, head, cfg: tl.constexpr):
    """Load the rows of a key head's query heads, each head's into its own part of a ring's only buffer."""
    HEAD_ROWS: tl.constexpr = BLOCK_M // cfg.group
    for member in tl.static_range(BLOCK_M // HEAD_ROWS):
        rows = tlx.local_slice(ring.buffers[0], [member * HEAD_ROWS, 0], [HEAD_ROWS, cfg.head_dim])
        tlx.async_descriptor_load(desc, rows, span.box(0, head * cfg.group + member), ring.fulls[0])


# ----------------------------------------------------------------------------------------------------------------- mma

# Issue order of a tile:
#
#   1  S   = K Q^T        overwrites P of the tile before, which 3 of that tile has read
#   2  dP  = V dO^T       overwrites the dP before, read before the dS that 4 of that tile waited for
#   3  dV  = P^T dO       waits until the groups have read what lies there: at D = 128 the dK before, else the dV before
#   4  dQ += dS K         the only product that adds to what the tiles before left
#   5  dK  = dS^T Q       at D = 128 waits until dV has been read; else the wait for dS says that the dK before has been
#
# Products run in the order of their issue, and dS is written only when 2 is done: 4 and 5 of the tile before are then, too.


@triton.jit
def multiply_tile(memory, count, cfg: tl.constexpr):
    """Issue the five products of the CTA's count-th tile."""
    q, k, do, scores, grads = memory.q, memory.k, memory.do, memory.scores, memory.grads
    slot, k_phase = k.slot(count)
    phase = count & 1

    tlx.barrier_wait(k.fulls[slot], k_phase)
    q_transposed, do_transposed = tlx.local_trans(q.buffers[0]), tlx.local_trans(do.buffers[0])
    tlx.async_dot(k.buffers[slot], q_transposed, scores.s[0], use_acc=False, mBarriers=[scores.s_fulls[0]])
    tlx.barrier_wait(do.fulls[0], phase)
    tlx.async_dot(memory.v[slot], do_transposed, scores.dp[0], use_acc=False, mBarriers=[scores.dp_fulls[0]])
    if cfg.dk_takes_dv:
        tlx.barrier_wait(grads.dk_empties[0], phase ^ 1)
    else:
        tlx.barrier_wait(grads.dv_empties[0], phase ^ 1)
    multiply_p(scores, do.buffers[0], grads.dv, count, False)
    tlx.tcgen05_commit(grads.dv_fulls[0])
    tlx.tcgen05_commit(do.empties[0])
    tlx.barrier_wait(scores.ds_fulls[0], phase)
    tlx.barrier_wait(scores.ds_fulls[1], phase)
    ds_transposed = tlx.local_trans(scores.ds[0])
    tlx.async_dot(ds_transposed, k.buffers[slot], grads.dq[0], use_acc=count > 0, force_async=True)
    if cfg.dk_takes_dv:
        tlx.barrier_wait(grads.dv_empties[0], phase)
    tlx.async_dot(scores.ds[0], q.buffers[0], grads.dk[0], use_acc=False, force_async=True)
    tlx.tcgen05_commit(grads.dk_fulls[0])


# --------------------------------------------------------------------------------------------------- compute and store


@triton.jit
def compute_tile(memory, half: tl.constexpr, tile, count, scale_log2, sm_scale, cfg: tl.constexpr):
    """Make P^T and dS^T for half of the queries, then write half of dV and dK, in the CTA's count-th tile."""
    grads = memory.grads
    compute_blocks(memory.scores, memory.rows, half, tile, query_steps(tile), count, scale_log2, cfg)
    slot, _ = memory.k.slot(count)
    write_half(grads.dv, memory.v[slot], grads.dv_fulls, grads.dv_empties, half, count, 1.0, cfg)
    write_half(grads.dk, memory.k.buffers[slot], grads.dk_fulls, grads.dk_empties, half, count, sm_scale, cfg)
    tlx.fence("async_shared")
    tlx.barrier_arrive(memory.out_fulls[slot])


@triton.jit
def write_half(grad, staged, fulls, empties, half: tl.constexpr, count, scale, cfg: tl.constexpr):
    """Copy half of dV's or dK's columns from TMEM to the SMEM of V or K, which no product reads any more."""
    HALF_D: tl.constexpr = cfg.head_dim // 2
    tlx.barrier_wait(fulls[0], count & 1)
    out = (tlx.local_load(tlx.subslice(grad[0], half * HALF_D, HALF_D)) * scale).to(staged.dtype)
    tlx.barrier_arrive(empties[0])
    tlx.local_store(tlx.local_slice(staged, [0, half * HALF_D], [BLOCK_N, HALF_D]), out)


@triton.jit
def store_tile(dk_desc, dv_desc, memory, tile, head, count):
    """Copy dV and dK of the CTA's count-th tile from SMEM to memory."""
    slot, phase = memory.k.slot(count)
    box = tile.kv.box(tile.row, head)
    tlx.barrier_wait(memory.out_fulls[slot], phase)
    tlx.async_descriptor_store(dv_desc, memory.v[slot], box)
    tlx.async_descriptor_store(dk_desc, memory.k.buffers[slot], box)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(memory.k.empties[slot])
