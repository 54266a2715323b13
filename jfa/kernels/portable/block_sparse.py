"""Attention over block lists in plain Triton: a tile visits the blocks of its list instead of all that its mask leaves.

One program computes a tile of one query head, forward and dQ over the queries' lists, dK and dV over their transpose.
Each head has lists of its own, so heads are not packed into rows. No two programs add to the same gradient, so results
are bitwise reproducible.

A block may be longer than a tile or a step: a list's entry then takes several steps, a block of this side several programs.
"""

import triton
import triton.language as tl

from jfa.block_select import sequence_of
from jfa.kernels.common.block_lists import block_lists
from jfa.kernels.common.nouns import Band, Span, Tile, aggregate
from jfa.kernels.common.sequences import BandConstants, Offsets, Sequences, Sizes
from jfa.kernels.common.softmax import at_most_one, hide, lse_to_subtract, scale_of, softmax_end, softmax_step


@aggregate
class Matrix:
    """A packed tensor [rows, heads, COLS] in memory, tiles of it padded to BLOCK columns."""

    base: tl.tensor
    row_stride: tl.tensor
    head_stride: tl.tensor
    col_stride: tl.tensor
    COLS: tl.constexpr
    BLOCK: tl.constexpr

    @triton.jit
    def load(self, span, rows, head):
        """Return [rows, BLOCK]: the rows of a sequence, zeros past its end and past COLS."""
        cols = tl.arange(0, self.BLOCK)
        at = (
            (span.begin.to(tl.int64) + rows)[:, None] * self.row_stride
            + head * self.head_stride
            + cols[None, :] * self.col_stride
        )
        return tl.load(self.base + at, mask=(rows < span.length)[:, None] & (cols < self.COLS)[None, :], other=0.0)

    @triton.jit
    def store(self, span, rows, head, x):
        """Write the rows of a sequence, none past its end."""
        cols = tl.arange(0, self.BLOCK)
        at = (
            (span.begin.to(tl.int64) + rows)[:, None] * self.row_stride
            + head * self.head_stride
            + cols[None, :] * self.col_stride
        )
        keep = (rows < span.length)[:, None] & (cols < self.COLS)[None, :]
        tl.store(self.base + at, x.to(self.base.dtype.element_ty), mask=keep)


@aggregate
class Rows:
    """One number per query row and head, [heads, rows] in memory."""

    base: tl.tensor
    count: tl.tensor

    @triton.jit
    def load(self, span, rows, head, other: tl.constexpr):
        """Return [rows]: the numbers of a sequence's rows, ``other`` past its end."""
        at = head.to(tl.int64) * self.count + span.begin + rows
        return tl.load(self.base + at, mask=rows < span.length, other=other)

    @triton.jit
    def store(self, span, rows, head, x):
        """Write the numbers of a sequence's rows, none past its end."""
        tl.store(self.base + head.to(tl.int64) * self.count + span.begin + rows, x, mask=rows < span.length)


# Triton would compile again for each of these that turns divisible by 16.
RUNTIME = "list_rows capacity rows_out q_blocks batches rows_q rows_kv lo_start lo_end hi_start hi_end".split()


@triton.jit(do_not_specialize=RUNTIME)
def record_kernel(
    query_offset, key_offset, output_offset, records, q_blocks, batches, rows_q, rows_kv, rows_out,
    lo_start, lo_end, hi_start, hi_end, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BROADCAST_Q: tl.constexpr,
):  # fmt: skip
    """Write the record that :func:`load_record` reads, one per program: of ``q_blocks`` blocks of queries, then of keys."""
    row = tl.program_id(0)
    offsets, sizes = Offsets(query_offset, key_offset, output_offset), Sizes(batches, rows_q, rows_kv, rows_out)
    band = BandConstants(lo_start, lo_end, hi_start, hi_end)
    sequences = Sequences(offsets, sizes, band, BROADCAST_Q, True, True, False, 0)
    if row < q_blocks:
        sequence, _, _, index = sequence_of(query_offset, row, batches, rows_q, BLOCK_Q, BROADCAST_Q)
        store_block(records, row, sequences, sequence, index, BLOCK_Q)
    else:
        sequence, _, _, index = sequence_of(key_offset, row - q_blocks, batches, rows_kv, BLOCK_KV, False)
        store_block(records, row, sequences, sequence, index, BLOCK_KV)


@triton.jit
def store_block(records, row, sequences, sequence, index, BLOCK: tl.constexpr):
    """Write the record of a block of a sequence, which may be past its end."""
    tile, _ = sequences.tile(sequence, False)
    at = records + row * 8
    tl.store(at, tile.q.begin)
    tl.store(at + 1, tile.q.length)
    tl.store(at + 2, tile.out.begin)
    tl.store(at + 3, tile.kv.begin)
    tl.store(at + 4, tile.kv.length)
    tl.store(at + 5, tile.band.lo)
    tl.store(at + 6, tile.band.hi)
    tl.store(at + 7, tl.where(index >= 0, index * BLOCK, 1 << 30))  # wrong offsets: no block, like one past the end


@triton.jit
def load_record(records, row, first, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Return the Tile of a grid row: q_begin, len_q, out_begin, kv_begin, len_kv, lo, hi, and the block's first row + ``first``."""
    at = records + row * 8
    len_q = tl.load(at + 1)
    band = Band(tl.load(at + 5), tl.load(at + 6), HAS_LO, HAS_HI)
    begin = tl.load(at + 7) + first
    queries, out, keys = Span(tl.load(at), len_q), Span(tl.load(at + 2), len_q), Span(tl.load(at + 3), tl.load(at + 4))
    return Tile(begin, queries, keys, out, band, begin)


@triton.jit
def attend(state, q, k, v, tile, queries, keys, head, masked, scale, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr):
    """Add the keys at the positions ``keys`` to a tile's running ``state`` (acc, l, m)."""
    acc, l, m = state
    scores = tl.dot(q, tl.trans(k.load(tile.kv, keys, head)), input_precision=PRECISION)
    if masked:
        scores = hide(scores, tile.pair_mask(queries[:, None], keys[None, :]), NEGATIVE)
    p, m, l, alpha = softmax_step(scores, m, l, scale, True, NEGATIVE)
    values = v.load(tile.kv, keys, head)
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l, m


@triton.jit
def matrix(ptr, row, head, col, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a Matrix; a stride of 1 arrives as a number of the compiler's, which a field of values does not take."""
    return Matrix(ptr, tl.to_tensor(row), tl.to_tensor(head), tl.to_tensor(col), COLS, BLOCK)


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, records, starts, columns, kinds, list_rows, capacity, num_heads, rows_out, scale,
    stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd, stride_vr, stride_vh, stride_vd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIST_HEADS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and LSE of BLOCK_M queries of one head; ROWS and COLUMNS are the blocks' rows."""
    PARTS: tl.constexpr = ROWS // BLOCK_M
    head, unit = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    tile = load_record(records, unit // PARTS, unit % PARTS * BLOCK_M, HAS_LO, HAS_HI)
    if tile.row < tile.q.length:
        k = matrix(k_ptr, stride_kr, stride_kh, stride_kd, D, BLOCK_D)
        v = matrix(v_ptr, stride_vr, stride_vh, stride_vd, DV, BLOCK_DV)
        lists = block_lists(starts, columns, kinds, list_rows, num_heads, capacity, LIST_HEADS)
        queries = tile.row + tl.arange(0, BLOCK_M)
        q = matrix(q_ptr, stride_qr, stride_qh, stride_qd, D, BLOCK_D).load(tile.q, queries, head)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        l, m = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
        factors = scale_of(scale, False)
        listed = lists.of(head, unit // PARTS, tl.to_tensor(0))
        for back in range(listed.entries()):
            block, masked = listed.block(back), listed.masked(back)
            for part in range(COLUMNS // BLOCK_N):
                keys = block * COLUMNS + part * BLOCK_N + tl.arange(0, BLOCK_N)
                acc, l, m = attend(
                    (acc, l, m), q, k, v, tile, queries, keys, head // GROUP, masked, factors, NEGATIVE, PRECISION
                )
        acc, natural = softmax_end(acc, m, l, factors)
        Rows(lse_ptr, tl.to_tensor(rows_out)).store(tile.out, queries, head, natural)
        matrix(out_ptr, num_heads * DV, DV, 1, DV, BLOCK_DV).store(tile.out, queries, head, acc)


@triton.jit
def weights(q, k, do, v, lse, delta, tile, queries, keys, masked, scale, PRECISION: tl.constexpr):
    """Return (P, dS) of a block, [queries, keys] or, where q and do are given as columns, [keys, queries]."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    p = at_most_one(tl.math.exp2(scores * scale - lse))
    if masked:
        p = tl.where(tile.pair_mask(queries, keys), p, 0.0)
    return p, p * (tl.dot(do, v, input_precision=PRECISION) - delta)


@triton.jit
def row_constants(lse, delta, tile, queries, head):
    """Return (LSE in log2 units, delta) of queries; of a row without keys or past the end LSE is +inf, so its P is 0."""
    natural = lse.load(tile.out, queries, head, float("-inf"))
    return lse_to_subtract(natural), delta.load(tile.out, queries, head, 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, records, starts, columns, kinds, list_rows, capacity, num_heads,
    rows_out, scale, sm_scale, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd, stride_vr, stride_vh, stride_vd,
    stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIST_HEADS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M queries of one head, in rows of the output: a shared query has one dQ per sequence."""
    PARTS: tl.constexpr = ROWS // BLOCK_M
    head, unit = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    tile = load_record(records, unit // PARTS, unit % PARTS * BLOCK_M, HAS_LO, HAS_HI)
    if tile.row < tile.q.length:
        k = matrix(k_ptr, stride_kr, stride_kh, stride_kd, D, BLOCK_D)
        v = matrix(v_ptr, stride_vr, stride_vh, stride_vd, DV, BLOCK_DV)
        lists = block_lists(starts, columns, kinds, list_rows, num_heads, capacity, LIST_HEADS)
        queries = tile.row + tl.arange(0, BLOCK_M)
        q = matrix(q_ptr, stride_qr, stride_qh, stride_qd, D, BLOCK_D).load(tile.q, queries, head)
        do = matrix(dout_ptr, stride_dr, stride_dh, stride_dd, DV, BLOCK_DV).load(tile.out, queries, head)
        count = tl.to_tensor(rows_out)
        lse, delta = row_constants(Rows(lse_ptr, count), Rows(delta_ptr, count), tile, queries, head)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        listed = lists.of(head, unit // PARTS, tl.to_tensor(0))
        for back in range(listed.entries()):
            block, masked = listed.block(back), listed.masked(back)
            for part in range(COLUMNS // BLOCK_N):
                keys = block * COLUMNS + part * BLOCK_N + tl.arange(0, BLOCK_N)
                k_tile = k.load(tile.kv, keys, head // GROUP)
                v_tile = tl.trans(v.load(tile.kv, keys, head // GROUP))
                _, ds = weights(
                    q, tl.trans(k_tile), do, v_tile, lse[:, None], delta[:, None], tile, queries[:, None], keys[None, :],
                    masked, scale, PRECISION,
                )  # fmt: skip
                dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        matrix(dq_ptr, num_heads * D, D, 1, D, BLOCK_D).store(tile.out, queries, head, dq * sm_scale)


@triton.jit(do_not_specialize=RUNTIME)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, records, starts, columns, kinds, list_rows, capacity,
    num_heads, rows_out, scale, sm_scale, stride_qr, stride_qh, stride_qd, stride_kr, stride_kh, stride_kd,
    stride_vr, stride_vh, stride_vd, stride_dr, stride_dh, stride_dd,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIST_HEADS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys of one key/value head, summed over its group's heads in their order."""
    PARTS: tl.constexpr = ROWS // BLOCK_N
    kv_heads = num_heads // GROUP
    kv_head, unit = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    tile = load_record(records, unit // PARTS, unit % PARTS * BLOCK_N, HAS_LO, HAS_HI)
    if tile.row < tile.kv.length:
        keys = tile.row + tl.arange(0, BLOCK_N)
        k = matrix(k_ptr, stride_kr, stride_kh, stride_kd, D, BLOCK_D).load(tile.kv, keys, kv_head)
        v = matrix(v_ptr, stride_vr, stride_vh, stride_vd, DV, BLOCK_DV).load(tile.kv, keys, kv_head)
        lists = block_lists(starts, columns, kinds, list_rows, num_heads, capacity, LIST_HEADS)
        q_rows = matrix(q_ptr, stride_qr, stride_qh, stride_qd, D, BLOCK_D)
        do_rows = matrix(dout_ptr, stride_dr, stride_dh, stride_dd, DV, BLOCK_DV)
        count = tl.to_tensor(rows_out)
        lse_rows, delta_rows = Rows(lse_ptr, count), Rows(delta_ptr, count)
        dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            listed = lists.of(head, unit // PARTS, tl.to_tensor(0))
            for back in range(listed.entries()):
                block, masked = listed.block(back), listed.masked(back)
                for part in range(COLUMNS // BLOCK_M):
                    queries = block * COLUMNS + part * BLOCK_M + tl.arange(0, BLOCK_M)
                    q = q_rows.load(tile.q, queries, head)
                    do = do_rows.load(tile.out, queries, head)
                    lse, delta = row_constants(lse_rows, delta_rows, tile, queries, head)
                    p, ds = weights(
                        k, tl.trans(q), v, tl.trans(do), lse[None, :], delta[None, :], tile, queries[None, :], keys[:, None],
                        masked, scale, PRECISION,
                    )  # fmt: skip
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        matrix(dk_ptr, kv_heads * D, D, 1, D, BLOCK_D).store(tile.kv, keys, kv_head, dk * sm_scale)
        matrix(dv_ptr, kv_heads * DV, DV, 1, DV, BLOCK_DV).store(tile.kv, keys, kv_head, dv)
