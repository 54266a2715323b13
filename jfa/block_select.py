"""Select blocks on a GPU: pooled rows, their scores, the best of each row, lists; in six launches without a host wait.

:func:`jfa.block_sparse.select_blocks` says what is chosen; its PyTorch form is the reference of these kernels.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from jfa.masks import Band, Block

FULL, PARTIAL = tl.constexpr(int(Block.FULL)), tl.constexpr(int(Block.PARTIAL))
KEPT, NEVER = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))  # beyond the bits of any number, infinities included
POOLED_ROWS = 128  # of a block at a time
CHUNK = 32  # pooled keys at a time
SEQUENCES = tl.constexpr(256)  # looked at together
RUNTIME = ["heads", "batches", "total", "total_q", "total_kv", "rows", "width", "share", "parts", "lo_start", "lo_end"]
RUNTIME += ["hi_start", "hi_end"]


@triton.jit
def clamped(offset, total):
    """Return an offset, int32 or int64, as an int32 inside a tensor of ``total`` rows."""
    return tl.minimum(tl.maximum(offset, 0), total).to(tl.int32)


@triton.jit
def sequence_of(offsets, row, batches, total, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """Return (sequence, its first row, its length, which of its blocks) of a grid row; SHARED: each has ``total`` rows."""
    if SHARED:
        blocks = tl.cdiv(total, BLOCK)
        return row // blocks, 0, total, row % blocks
    else:
        # the last sequence whose block 0 is not behind ``row``: all are looked at together, not one after another
        low = -1
        for base in range(0, batches, SEQUENCES):
            seq = base + tl.arange(0, SEQUENCES)
            first = clamped(tl.load(offsets + seq, mask=seq < batches, other=0), total) // BLOCK + seq
            low += tl.sum(((first <= row) & (seq < batches)).to(tl.int32), 0)
        low = tl.maximum(low, 0)
        begin = clamped(tl.load(offsets + low), total)
        end = tl.maximum(clamped(tl.load(offsets + low + 1), total), begin)
        return low, begin, end - begin, row - (begin // BLOCK + low)


@triton.jit(do_not_specialize=RUNTIME)
def pool_kernel(
    x_ptr, offsets, pooled, heads, batches, total, stride_r, stride_h, stride_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write pooled [rows, heads, D] fp32: the mean over a block's existing rows. Grid: (rows * heads,), heads side by side."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    _, begin, length, index = sequence_of(offsets, row, batches, total, BLOCK, SHARED)
    exist = tl.minimum(tl.maximum(length - index * BLOCK, 0), BLOCK)
    d = tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for part in range(BLOCK // PART):
        place = part * PART + tl.arange(0, PART)
        at = (begin + index * BLOCK + place).to(tl.int64)[:, None] * stride_r + head * stride_h + d[None, :] * stride_d
        x = tl.load(x_ptr + at, mask=(place < exist)[:, None] & (d < D)[None, :], other=0.0)
        sums += tl.sum(x.to(tl.float32), 0)
    mean = sums / tl.maximum(exist, 1).to(tl.float32)
    tl.store(pooled + (row.to(tl.int64) * heads + head) * D + d, mean, mask=d < D)


@triton.jit(do_not_specialize=RUNTIME)
def score_kernel(
    pooled_q, pooled_k, query_offset, key_offset, scores, batches, total_q, total_kv, width, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CHUNK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write scores [heads, rows, width] fp32 of pooled rows, for the blocks of the row's sequence. Grid: (rows, heads, chunks)."""
    row, head = tl.program_id(0), tl.program_id(1)
    seq, _, len_q, index = sequence_of(query_offset, row, batches, total_q, BLOCK_Q, SHARED)
    begin = clamped(tl.load(key_offset + seq), total_kv)
    length = tl.maximum(clamped(tl.load(key_offset + seq + 1), total_kv), begin) - begin
    block = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    if (index * BLOCK_Q < len_q) & (tl.program_id(2) * CHUNK * BLOCK_KV < length):
        d = tl.arange(0, BLOCK_D)
        inside = (block * BLOCK_KV < length) & (block < width)
        q = tl.load(pooled_q + (row.to(tl.int64) * tl.num_programs(1) + head) * D + d, mask=d < D, other=0.0)
        at = (begin // BLOCK_KV + seq + block).to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP
        k = tl.load(pooled_k + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        out = scores + (head * tl.num_programs(0) + row).to(tl.int64) * width + block
        tl.store(out, tl.sum(k * q[None, :], 1) * scale, mask=inside)


@triton.jit
def order_of(score):
    """Return integers that are ordered as the scores are, NaN above all numbers."""
    score = tl.where(score != score, float("inf"), score) + 0.0  # -0.0 becomes 0.0, which it equals
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=RUNTIME)
def choose_kernel(
    scores, query_offset, key_offset, marks, counts, batches, total_q, total_kv, width, share, parts,
    lo_start, lo_end, hi_start, hi_end, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    DIAGONAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write marks [heads, rows, width] int8, a kind or 0, and counts [heads * rows]. Grid: (rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    seq, _, len_q, index = sequence_of(query_offset, row, batches, total_q, BLOCK_Q, SHARED)
    begin = clamped(tl.load(key_offset + seq), total_kv)
    length = tl.maximum(clamped(tl.load(key_offset + seq + 1), total_kv), begin) - begin
    lo = tl.maximum(lo_start, lo_end + length - len_q)
    hi = tl.minimum(hi_start, hi_end + length - len_q)

    block = tl.arange(0, WIDTH)
    q_begin, k_begin = index * BLOCK_Q, block * BLOCK_KV
    exist = tl.minimum(len_q - q_begin, BLOCK_Q)
    nearest = k_begin - (q_begin + exist - 1)
    farthest = tl.minimum(k_begin + BLOCK_KV, length) - 1 - q_begin
    touched = (exist > 0) & (k_begin < length) & (block < width) & (nearest <= hi) & (farthest >= lo) & (lo <= hi)
    full = (exist == BLOCK_Q) & (k_begin + BLOCK_KV <= length) & (nearest >= lo) & (farthest <= hi)
    always = block < 0
    if FIRST:
        always = always | (block == 0)
    if LAST:
        always = always | (block == (length - 1) // BLOCK_KV)
    if DIAGONAL:
        aligned = q_begin + length - len_q
        always = always | ((k_begin <= aligned + exist - 1) & (k_begin + BLOCK_KV > aligned))
    always = always & touched

    at = (head * tl.num_programs(0) + row).to(tl.int64)
    order = order_of(tl.load(scores + at * width + block, mask=touched, other=0.0))
    order = tl.where(always, KEPT, tl.where(touched, order, NEVER)).to(tl.int64)
    candidates = tl.sum(touched.to(tl.int32), 0)
    count = tl.maximum((candidates.to(tl.int64) * share + parts - 1) // parts, tl.sum(always.to(tl.int32), 0))
    low, high = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):  # the largest number that at least ``count`` of them reach
        middle = low + (high - low + 1) // 2
        enough = tl.sum((order >= middle).to(tl.int64), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = order > low
    left = count - tl.sum(above.to(tl.int64), 0)
    tied = (order == low) & touched
    chosen = (above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= left))) & touched
    tl.store(
        marks + at * width + block, tl.where(chosen, tl.where(full, FULL, PARTIAL), 0).to(tl.int8), mask=block < width
    )
    tl.store(counts + at, tl.sum(chosen.to(tl.int32), 0))


@triton.jit(do_not_specialize=RUNTIME)
def list_kernel(marks, starts, columns, kinds, rows, width, WIDTH: tl.constexpr):
    """Write the marked blocks of each row into its list. Grid: (heads * rows,)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    mark = tl.load(marks + row * width + block, mask=block < width, other=0)
    place = tl.load(starts + row) + tl.cumsum((mark > 0).to(tl.int32), 0) - 1
    tl.store(columns + place, block, mask=mark > 0)
    tl.store(kinds + place, mark, mask=mark > 0)


def choose(
    query, key, query_offset, key_offset, band: Band, scale: float, share: tuple[int, int], keep, broadcast_q: bool, blocks, width,
    rows: tuple[int, int], capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (starts, columns, kinds) as :func:`jfa.block_sparse.select_blocks` describes them.

    Args:
        share: the ratio's numerator and denominator.
        blocks: (block_q, block_kv). width: most key blocks of a sequence. rows: capacities of the two grids.
        capacity: entries that the lists may need.
    """
    heads, dim = query.shape[1:]
    device, batches = key.device, key_offset.numel() - 1
    query_offset = key_offset if broadcast_q else query_offset
    sizes = dict(D=dim, BLOCK_D=triton.next_power_of_2(dim))

    def pooled(x, offsets, block, count, shared):
        out = torch.empty(count, *x.shape[1:], dtype=torch.float32, device=device)
        pool_kernel[(count * x.shape[1],)](
            x, offsets, out, x.shape[1], batches, x.shape[0], *x.stride(), BLOCK=block, PART=min(block, POOLED_ROWS),
            SHARED=shared, **sizes,
        )  # fmt: skip
        return out

    pooled_q = pooled(query, query_offset, blocks[0], rows[0], broadcast_q)
    pooled_k = pooled(key, key_offset, blocks[1], rows[1], False)
    scores = torch.empty(heads, rows[0], width, dtype=torch.float32, device=device)
    common = batches, query.shape[0], key.shape[0], width
    grids = dict(BLOCK_Q=blocks[0], BLOCK_KV=blocks[1], SHARED=broadcast_q)
    score_kernel[(rows[0], heads, triton.cdiv(width, CHUNK))](
        pooled_q, pooled_k, query_offset, key_offset, scores, *common, scale, GROUP=heads // key.shape[1], CHUNK=CHUNK,
        num_warps=2, **sizes, **grids,
    )  # fmt: skip
    marks = torch.empty(heads, rows[0], width, dtype=torch.int8, device=device)
    counts = torch.empty(heads * rows[0], dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(width)
    # a row is counted 33 times: threads beyond it only wait for each other
    few = dict(num_warps=max(1, min(8, padded // 256)))
    kept = dict(DIAGONAL="diagonal" in keep, FIRST="first" in keep, LAST="last" in keep)
    choose_kernel[(rows[0], heads)](
        scores,
        query_offset,
        key_offset,
        marks,
        counts,
        *common,
        *share,
        *band.constants,
        WIDTH=padded,
        **grids,
        **kept,
        **few,
    )
    starts = torch.zeros(heads * rows[0] + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    columns = torch.empty(capacity, dtype=torch.int32, device=device)
    kinds = torch.empty(capacity, dtype=torch.int8, device=device)
    list_kernel[(heads * rows[0],)](marks, starts, columns, kinds, rows[0], width, WIDTH=padded, **few)
    return starts, columns, kinds


# ---------------------------------------------------------------------------------------------------------- transposition
@triton.jit
def place_in(columns, first, end, block, steps):
    """Return the first entry of each rising list [first, end) that is not below ``block``, by bisection."""
    low, high = first, end
    for _ in range(steps):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(columns + middle, mask=low < high, other=0) < block)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=[*RUNTIME, "list_rows", "capacity", "depth"])
def transpose_kernel(
    starts, columns, kinds, query_offset, key_offset, counts, new_starts, new_columns, new_kinds, batches, total_q, total_kv,
    list_rows, capacity, depth, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Find the queries' blocks that list a block of keys: count them, or with FILL write them. Grid: (key grid rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    seq, _, length, index = sequence_of(key_offset, row, batches, total_kv, BLOCK_KV, False)
    if SHARED:
        blocks = tl.cdiv(total_q, BLOCK_Q)
        first_row = seq * blocks
    else:
        q_begin = clamped(tl.load(query_offset + seq), total_q)
        q_end = tl.maximum(clamped(tl.load(query_offset + seq + 1), total_q), q_begin)
        blocks = tl.cdiv(q_end - q_begin, BLOCK_Q)
        first_row = q_begin // BLOCK_Q + seq
    blocks = tl.where(index * BLOCK_KV < length, blocks, 0)
    at = head * tl.num_programs(0) + row
    found = 0
    if FILL:
        found = tl.load(new_starts + at)
    for base in range(0, blocks, ROWS):
        block = base + tl.arange(0, ROWS)
        inside = (block < blocks) & (first_row + block < list_rows)
        list_at = starts + head * list_rows + first_row + block
        first = tl.maximum(tl.load(list_at, mask=inside, other=0), 0)
        end = tl.minimum(tl.load(list_at + 1, mask=inside, other=0), capacity)
        entry = place_in(columns, first, end, index, depth)
        hit = inside & (entry < end)
        hit = hit & (tl.load(columns + entry, mask=hit, other=-1) == index)
        if FILL:
            to = found + tl.cumsum(hit.to(tl.int32), 0) - 1
            keep = hit & (to < capacity)
            tl.store(new_columns + to, block, mask=keep)
            tl.store(new_kinds + to, tl.load(kinds + entry, mask=keep, other=0), mask=keep)
        found += tl.sum(hit.to(tl.int32), 0)
    if not FILL:
        tl.store(counts + at, found)


def _call(function: Callable, *args) -> None:
    function(*args)


def transposed(
    lists: tuple[torch.Tensor, ...], heads: int, list_rows: int, query_offset, key_offset, total_q: int, total_kv: int,
    broadcast_q: bool, blocks: tuple[int, int], rows: int, launch: Callable | None = None, by_torch: Callable = _call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (starts, columns, kinds) of the other side; see :func:`jfa.block_sparse.transpose`.

    Args:
        lists: (starts, columns, kinds) of ``heads`` * ``list_rows`` lists, each rising.
        blocks: (rows per block of queries, of keys). rows: capacity of the keys' grid.
        launch: a function of (device, grid, arguments, constexprs and options) that launches :func:`transpose_kernel` in
            place of Triton's own launcher.
        by_torch: a function that calls its first argument with the others, or notes that it is to be called.
    """
    device, capacity, batches = lists[0].device, lists[1].numel(), key_offset.numel() - 1
    counts = torch.empty(heads * rows, dtype=torch.int32, device=device)
    starts = torch.zeros(heads * rows + 1, dtype=torch.int32, device=device)
    columns, kinds = torch.empty_like(lists[1]), torch.empty_like(lists[2])
    query_offset = key_offset if broadcast_q else query_offset
    depth = max(total_kv // blocks[1] + 1, 1).bit_length() + 1
    to = counts, starts, columns, kinds
    numbers = batches, total_q, total_kv, list_rows, capacity, depth
    for fill in (False, True):
        options = dict(BLOCK_Q=blocks[0], BLOCK_KV=blocks[1], SHARED=broadcast_q, ROWS=32, FILL=fill, num_warps=1)
        given = *lists, query_offset, key_offset, *to, *numbers
        if launch is None:
            transpose_kernel[(rows, heads)](*given, **options)
        else:
            launch(device, (rows, heads), given, options)
        if not fill:
            by_torch(_add_up, counts, starts)
    return starts, columns, kinds


def _add_up(counts: torch.Tensor, starts: torch.Tensor) -> None:
    """Write to ``starts`` behind its first number the sums of ``counts``."""
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
