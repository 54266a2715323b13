"""Backward for shared queries (broadcast_q, at most 128 of them): dQ stays on the chip across all sequences of a head.

Every sequence has the same queries, so the general backward would add B times into the same few rows of dQ. Here one
tile of queries completes the gradients of a key block: dK and dV of 64 keys are written once, straight away, and dQ^T
is accumulated in registers over every key block of every sequence that a program visits. A program keeps one head (grid
column) with its Q resident, and at the end leaves one partial dQ; the partials of a head are summed in order
afterwards.

    S^T  = K Q^T           P^T  = exp2(S^T scale - lse)         dV = P^T dO
    dP^T = V dO^T          dS^T = P^T (dP^T - delta)            dK = dS^T Q          dQ^T += K^T dS^T

Four roles. Two *key groups* take blocks of 64 keys in turn, each against all queries at once and one product after
another, so that a thread never holds more than two accumulators. They share only their input and are not synchronized:
one multiplies while the other computes exponentials or stores. Each hands its dS^T through shared memory to the *query
group*, which only holds dQ^T and adds to it. The producer loads keys, values and output gradients.

The accumulators of S^T and dP^T start from -lse/scale and -delta: no row constants stay in registers, nothing is
subtracted.

Shared memory limits the rings, so buffers are used twice: dV is stored through the buffer of its own values, which no
product reads any more, and dK through that of its dS^T.

Tiles are runs of TILE keys of a sequence (longer ones are cut: no sequence is too long for one program), drawn from a
queue, or assigned beforehand (``static``), so that every program sums the same blocks in the same order in every run.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.cuda import gdc_wait

from jfa.kernels.common.nouns import RowPointers, Span, Tile, aggregate
from jfa.kernels.common.ring import Ring, alloc_ring, ring_slot
from jfa.kernels.common.softmax import at_most
from jfa.kernels.hopper.queue import Queue, alloc_numbers

# Keys of a tile: cut so that no program is left with a mega-sequence, at the price of reloading dO.
BLOCK = 1024
TILE = tl.constexpr(BLOCK)
# Keys of a block: the M of a wgmma.
KEYS = tl.constexpr(64)
# Key groups.
GROUPS = tl.constexpr(2)


@aggregate
class Gradients:
    """A ring of output gradients dO [LQ, D] with delta and log-sum-exp of their rows, on one barrier each."""

    do: tlx.buffered_tensor
    delta: tlx.buffered_tensor
    lse: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    stages: tl.constexpr
    bytes: tl.constexpr


@aggregate
class Operands:
    """Buffers that the key groups read, and ``ds`` and ``stages``, through which they hand on dS^T and dK."""

    q: Ring
    k: Ring
    v: Ring
    gradients: Gradients
    ds: Ring
    stages: tlx.buffered_tensor
    scale: tl.tensor
    scale_log2: tl.tensor


@triton.jit
def alloc_gradients(LQ: tl.constexpr, D: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr):
    """Allocate the ring of output gradients, which both key groups read."""
    do = tlx.local_alloc((LQ, D), DTYPE, STAGES)
    delta = tlx.local_alloc((LQ,), tl.float32, STAGES)
    lse = tlx.local_alloc((LQ,), tl.float32, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=GROUPS)
    return Gradients(do, delta, lse, fulls, empties, STAGES, LQ * (D * tlx.size_of(DTYPE) + 8))


@triton.jit
def load_gradients(desc_do, delta, lse2, gradients, done, box):
    """Load a tile's dO and, from the pointers, its rows' constants."""
    slot, phase = ring_slot(done, gradients.stages)
    tlx.barrier_wait(gradients.empties[slot], phase ^ 1)
    tlx.barrier_expect_bytes(gradients.fulls[slot], gradients.bytes)
    tlx.async_descriptor_load(desc_do, gradients.do[slot], box, gradients.fulls[slot])
    tlx.async_load(delta, gradients.delta[slot], bulk=True, barrier=gradients.fulls[slot])
    tlx.async_load(lse2, gradients.lse[slot], bulk=True, barrier=gradients.fulls[slot])


@triton.jit
def counted(tile):
    """Return the tile without its keys if no query sees them. Keys of no sequence may hold anything."""
    length = tile.kv.length
    if tile.q.length == 0:
        length = 0
    return Tile(tile.row, tile.q, Span(tile.kv.begin, length), tile.out, tile.band, tile.pad_begin)


@triton.jit
def end_of_keys(tile):
    """Return where a tile's keys end inside its sequence."""
    return min(tile.row + TILE, tile.kv.length)


@triton.jit
def produce(desc_q, desc_k, desc_v, desc_do, constants, rows_q, queue, q, k, v, gradients):
    """Produce the queries once, then of every tile its output gradients, keys and values."""
    head = tl.program_id(1)
    q.load(0, desc_q, Span(tl.to_tensor(0), rows_q).box(0, head))
    done = 0
    count = 0
    unit = queue.draw(done)
    while unit < queue.units:
        tile, column = queue.next_tile(unit)
        lse2, delta = constants.of_sequence(tile, head)
        load_gradients(desc_do, delta, lse2, gradients, done, tile.out.box(0, head))
        keys = counted(tile).kv
        for row in range(tile.row, end_of_keys(tile), KEYS):
            k.load(count, desc_k, keys.box(row, head))
            v.load(count, desc_v, keys.box(row, head))
            count += 1
        done += 1
        unit = queue.draw(done)


@triton.jit
def row_constants(buffer):
    """Return [1, LQ] of a buffer, read in pieces of 64.

    A read of fewer elements than threads takes on the layout of its use.
    """
    LQ: tl.constexpr = buffer.shape[0]
    if LQ == 128:
        low = tlx.local_load(tlx.local_slice(buffer, [0], [64]))
        high = tlx.local_load(tlx.local_slice(buffer, [64], [64]))
        return tl.join(low, high).permute(1, 0).reshape([LQ])[None, :]
    else:
        return tlx.local_load(buffer)[None, :]


@triton.jit
def make_ds(operands, tile, slot, count, row):
    """Return (P^T, dS^T) of the count-th key block, whose first key is ``row``, against all queries."""
    q_tiles = operands.q.buffers
    gradients = operands.gradients
    LQ: tl.constexpr = q_tiles.shape[0]
    k, k_phase = operands.k.slot(count)
    v, v_phase = operands.v.slot(count)
    tlx.barrier_wait(operands.k.fulls[k], k_phase)
    start = tl.zeros([KEYS, LQ], tl.float32) + row_constants(gradients.lse[slot]) * (-1.0 / operands.scale_log2)
    # count >> 30 is 0; the compiler does not know, and so does not keep the addresses of Q's parts in registers
    scores = tlx.async_dot(operands.k.buffers[k], tlx.local_trans(q_tiles[count >> 30]), start)
    tlx.barrier_wait(operands.v.fulls[v], v_phase)
    start = tl.zeros([KEYS, LQ], tl.float32) - row_constants(gradients.delta[slot])
    dp = tlx.async_dot(operands.v.buffers[v], tlx.local_trans(gradients.do[slot]), start)
    scores = tlx.async_dot_wait(1, scores)
    p = tl.math.exp2(at_most(scores, 0.0) * operands.scale_log2)
    keys = row + tl.arange(0, KEYS)
    p = tl.where(tile.pair_mask(tl.arange(0, LQ)[None, :], keys[:, None]), p, 0.0).to(q_tiles.dtype)
    dp = tlx.async_dot_wait(0, dp)
    return p, (p.to(tl.float32) * dp).to(q_tiles.dtype)


@triton.jit
def key_block(desc_dk, desc_dv, operands, tile, slot, group, count, use, row, head):
    """Compute the count-th block, this group's use-th: its dS^T goes to the query group, its dV and dK leave."""
    ds_ring = operands.ds
    v_tiles = operands.v.buffers
    v, v_phase = operands.v.slot(count)
    p, ds = make_ds(operands, counted(tile), slot, count, row)
    dv = tlx.async_dot(p, operands.gradients.do[slot])
    # The previous dK has left this buffer.
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(ds_ring.buffers[group], ds)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds_ring.fulls[group], 1)
    dv = tlx.async_dot_wait(0, dv)
    tlx.local_store(v_tiles[v], dv.to(v_tiles.dtype))
    dk = tlx.async_dot(ds, operands.q.buffers[count >> 30])
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dv, v_tiles[v], tile.kv.box(row, head))
    dk = tlx.async_dot_wait(0, dk) * operands.scale
    tlx.barrier_wait(ds_ring.empties[group], use & 1)
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(operands.v.empties[v], 1)
    stage = operands.stages[group]
    tlx.local_store(stage, dk.to(stage.dtype))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dk, stage, tile.kv.box(row, head))


@triton.jit
def key_group(desc_dk, desc_dv, queue, operands, group: tl.constexpr):
    """Compute every second block of 64 keys: scores, their gradients, dV and dK."""
    gradients = operands.gradients
    head = tl.program_id(1)
    tlx.barrier_wait(operands.q.fulls[0], 0)
    done = 0
    count = 0
    use = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, column = queue.next_tile(unit)
        slot, phase = ring_slot(done, gradients.stages)
        tlx.barrier_wait(gradients.fulls[slot], phase)
        end = end_of_keys(tile)
        # Blocks alternate across tiles, too.
        skip = (count + group) % GROUPS
        for row in range(tile.row + skip * KEYS, end, GROUPS * KEYS):
            at = count + (row - tile.row) // KEYS
            key_block(desc_dk, desc_dv, operands, tile, slot, group, at, use, row, head)
            use += 1
        tlx.barrier_arrive(gradients.empties[slot], 1)
        count += tl.cdiv(end - tile.row, KEYS)
        done += 1
        unit = queue.receive(done)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def query_group(desc_dq, dq_tile, heads, queue, k, gradients, ds):
    """Sum dQ^T [D, LQ] += K^T dS^T over all blocks; at the end store the program's partial."""
    D: tl.constexpr = dq_tile.shape[0]
    LQ: tl.constexpr = dq_tile.shape[1]
    dq = tl.zeros([D, LQ], tl.float32)
    done = 0
    count = 0
    unit = queue.receive(done)
    while unit < queue.units:
        tile, column = queue.next_tile(unit)
        for _ in range(tile.row, end_of_keys(tile), KEYS):
            slot, phase = k.slot(count)
            group, ds_phase = ds.slot(count)
            tlx.barrier_wait(k.fulls[slot], phase)
            tlx.barrier_wait(ds.fulls[group], ds_phase)
            dq = tlx.async_dot(tlx.local_trans(k.buffers[slot]), ds.buffers[group], dq)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(ds.empties[group], 1)
            tlx.barrier_arrive(k.empties[slot], 1)
            count += 1
        done += 1
        unit = queue.receive(done)
    # dQ leaves through the buffers of dO, once they are not needed any more.
    for back in tl.static_range(gradients.stages):
        last, phase = ring_slot(tl.maximum(done - 1 - back, 0), gradients.stages)
        tlx.barrier_wait(gradients.empties[last], phase, pred=done > back)
    tlx.local_store(dq_tile, dq)
    tlx.fence("async_shared")
    row = (tl.program_id(0) * heads + tl.program_id(1)) * D
    tlx.async_descriptor_store(desc_dq, dq_tile, [row, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["padded_rows", "rows_q", "heads"])
def backward_resident_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dq,
    desc_dk,
    desc_dv,
    lse2,
    delta,
    padded_rows,
    rows_q,
    records,
    counts,
    counters,
    heads,
    scale,
    scale_log2,
    cfg: tl.constexpr,
):
    """Allocate buffers and barriers, and assign the roles to warps. Grid: (programs per head, H).

    desc_q, desc_do: ragged, boxes [LQ, D]; desc_k, desc_v, desc_dk, desc_dv: ragged, [64, D]; desc_dq: plain, fp32
    [programs * H * D, LQ], boxes [D, LQ]. lse2, delta [H, padded_rows] fp32.
    records, counts: a list of TILE keys per tile; counters: one int32 of 0 per head; cfg: a ResidentConfig.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    LQ: tl.constexpr = cfg.rows_q
    D: tl.constexpr = cfg.head_dim
    k = alloc_ring(KEYS, D, DTYPE, cfg.stages, 1)
    v = alloc_ring(KEYS, D, DTYPE, cfg.stages, 1)
    q = alloc_ring(LQ, D, DTYPE, 1, 1)
    gradients = alloc_gradients(LQ, D, DTYPE, cfg.do_stages)
    dq_tiles = tlx.local_alloc((D, LQ), tl.float32, 1, reuse=gradients.do)
    ds = alloc_ring(KEYS, LQ, DTYPE, GROUPS, 1)
    if LQ == D:
        stages = tlx.local_alloc((KEYS, D), DTYPE, GROUPS, reuse=ds.buffers)
    else:
        stages = tlx.local_alloc((KEYS, D), DTYPE, GROUPS)
    operands = Operands(q, k, v, gradients, ds, stages, scale, scale_log2)
    numbers = alloc_numbers(GROUPS + 1)
    gdc_wait()  # from here on the list and the row constants are read
    num_tiles = tl.load(counts + 1)
    counters += tl.program_id(1)
    queue = Queue(records, num_tiles, num_tiles, heads, counters, numbers, True, cfg.static, cfg.has_lo, cfg.has_hi)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # keys 0
            key_group(desc_dk, desc_dv, queue, operands, 0)
        with tlx.async_task(num_warps=4, registers=cfg.key_registers):  # keys 1
            key_group(desc_dk, desc_dv, queue, operands, 1)
        with tlx.async_task(num_warps=4, registers=cfg.query_registers):  # queries
            query_group(desc_dq, dq_tiles[0], heads, queue, k, gradients, ds)
        with tlx.async_task(num_warps=1, registers=24):  # producer
            constants = RowPointers(lse2, delta, padded_rows)
            produce(desc_q, desc_k, desc_v, desc_do, constants, rows_q, queue, q, k, v, gradients)


@triton.jit(do_not_specialize=["programs", "heads", "rows_q"])
def sum_kernel(
    partials,
    dq,
    programs,
    heads,
    rows_q,
    scale,
    LQ: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write dq [rows_q, H, D] = scale * the partials' sum; one program per head and ROWS of the head dimension.

    partials: [programs, H, D_BLOCK, LQ]. All partials of an element are read at once and added in a tree that is always
    the same.
    """
    gdc_wait()
    head = tl.program_id(1)
    n = tl.arange(0, PROGRAMS)[:, None, None]
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, LQ)
    at = ((n * heads + head) * D_BLOCK + d[None, :, None]) * LQ + i[None, None, :]
    total = tl.sum(tl.load(partials + at, mask=n < programs, other=0.0), 0) * scale
    to = dq + (i[None, :] * heads + head) * D + d[:, None]
    tl.store(to, total.to(dq.dtype.element_ty), mask=(i < rows_q)[None, :] & (d < D)[:, None])
