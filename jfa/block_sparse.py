"""Block-sparse attention on packed sequences: which blocks of keys each block of queries attends to.

:func:`select_blocks` scores pooled blocks against each other and keeps the best ones of every query block; users may also bring
lists of their own (:func:`lists_from_mask`, or a :class:`BlockLists` built by hand). A kernel walks a list in place of all key
blocks, its backward walks the :func:`transpose`. Nothing here waits for the device, apart from :func:`check_lists` and
:func:`lists_from_mask`, which say so.

Blocks are counted inside their sequence: block ``i`` holds rows ``i * block .. (i + 1) * block - 1`` of it, the last one fewer.
The *grid* of one side numbers the blocks of all sequences one after another: block ``i`` of sequence ``b``, which begins at packed
row ``r``, is grid row ``r // block + b + i``: a kernel knows it without a table. Some grid rows hold no block, and own empty lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from jfa.masks import Band, Block

MOST_PARTS = 1_000_000  # the ratio is taken as the nearest fraction with at most this denominator
MAX_SCORES = 1 << 24  # pooled scores formed at once
ALWAYS = ("diagonal", "first", "last")


@dataclass(frozen=True)
class Grid:
    """Blocks of all sequences of one side, one row each; every tensor int64 and on the offsets' device.

    Attributes:
        first: [B+1] row of each sequence's block 0.
        seq: [rows] the sequence of each row, also of those that hold no block.
        index: [rows] which block of its sequence.
        begin: [rows] the block's first row in the packed tensor.
        exist: [rows] how many of its ``block`` rows exist: 0 where there is no block.
        length: [B] the sequences' lengths.
        block: rows per block.
    """

    first: Tensor
    seq: Tensor
    index: Tensor
    begin: Tensor
    exist: Tensor
    length: Tensor
    block: int

    @property
    def rows(self) -> int:
        """Capacity: rows, used or not."""
        return self.seq.numel()

    @property
    def blocks(self) -> Tensor:
        """[B] blocks per sequence."""
        return (self.length + self.block - 1) // self.block


def grid_of(offsets: Tensor, total: int, block: int, *, shared_by: int = 0) -> Grid:
    """Return the grid of packed rows.

    Args:
        offsets: [B+1] integers.
        total: rows of the packed tensor.
        block: rows per block.
        shared_by: with a query that so many sequences share (``broadcast_q``): each of them has its own ``total`` rows; offsets are
            then not read for this side, only their device and count.

    Wrong offsets give wrong blocks, but ``begin .. begin + exist`` always lies inside the tensor.
    """
    device = offsets.device
    if shared_by:
        length = torch.full((shared_by,), total, device=device, dtype=torch.int64)
        start = torch.zeros_like(length)
        capacity = shared_by * -(-total // block)
        first = torch.arange(shared_by + 1, device=device) * -(-total // block)
    else:
        bounds = offsets.long().clamp(0, total).cummax(0).values  # what falls would need more rows than the capacity
        start = bounds[:-1]
        length = bounds[1:] - start
        capacity = _capacity(total, length.numel(), block)
        first = bounds // block + torch.arange(bounds.numel(), device=device)
    row = torch.arange(capacity, device=device)
    if capacity == 0:
        return Grid(first, row, row, row, row, length, block)
    seq = torch.searchsorted(first[1:].contiguous(), row, right=True).clamp(max=length.numel() - 1)
    index = row - first[seq]
    exist = torch.where(row < first[-1], (length[seq] - index * block).clamp(0, block), 0)
    begin = torch.where(exist > 0, start[seq] + index * block, 0)
    return Grid(first, seq, index, begin, exist, length, block)


def query_grid(query_offset: Tensor | None, key_offset: Tensor, total_q: int, block: int, broadcast_q: bool) -> Grid:
    """Return the grid of the queries' blocks; with ``broadcast_q`` every sequence has blocks of its own of the one query."""
    if broadcast_q:
        return grid_of(key_offset, total_q, block, shared_by=key_offset.numel() - 1)
    return grid_of(query_offset, total_q, block)


def _capacity(total: int, batches: int, block: int) -> int:
    """Return the rows of a grid, known from shapes alone."""
    return total // block + batches if batches else 0


@dataclass(frozen=True)
class BlockLists:
    """Which blocks of the other side each block of this side meets, in rising order, per head.

    Attributes:
        starts: [heads * rows + 1] int32; the list of head ``h``, grid row ``r`` begins at entry ``starts[h * rows + r]``.
        columns: [capacity] int32, the other side's block, counted inside the sequence; entries past the last start mean nothing.
        kinds: [capacity] int8, :class:`jfa.masks.Block`: FULL pairs need no mask, PARTIAL ones do.
        heads: 1 (all heads share the lists), H_kv or H; query head ``h`` reads lists of head ``h * heads // H``.
        rows: the grid's capacity on this side.
        block, other_block: rows per block of this side and of the other.
    """

    starts: Tensor
    columns: Tensor
    kinds: Tensor
    heads: int
    rows: int
    block: int
    other_block: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(starts, columns, kinds)."""
        return self.starts, self.columns, self.kinds

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows per block of this side and of the other."""
        return self.block, self.other_block

    @property
    def counts(self) -> Tensor:
        """[heads, rows] int32: entries per list, what a tile costs."""
        return (self.starts[1:] - self.starts[:-1]).view(self.heads, self.rows)

    def other_side(self, starts: Tensor, columns: Tensor, kinds: Tensor) -> BlockLists:
        """Return the transposed lists that consist of these tensors: same heads, block sizes swapped."""
        rows = (starts.numel() - 1) // self.heads
        return BlockLists(starts, columns, kinds, self.heads, rows, self.other_block, self.block)


# ------------------------------------------------------------------------------------------------------------- selection
def select_blocks(
    query: Tensor,
    key: Tensor,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    ratio: float,
    keep: Sequence[str] = (),
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    sm_scale: float | None = None,
    broadcast_q: bool = False,
    max_seq_len_kv: int | None = None,
    block_q: int = 128,
    block_kv: int = 128,
) -> BlockLists:
    """Choose, per head, the key blocks that each block of queries attends to, by scores of pooled blocks.

    A block's pooled row is the mean over those of its rows that exist. The score of a pair is the dot product of the pooled rows
    times ``sm_scale``. Candidates are the blocks that the mask leaves a pair of; of n candidates the ceil(ratio * n) best are kept,
    at least one. Equal scores prefer the lower block. A score that is NaN counts as the largest, so that NaN reaches the output.

    Args:
        query: [total_q, H, D], with ``broadcast_q`` [Lq, H, D]. key: [total_kv, H_kv, D].
        query_offset, key_offset: [B+1] integers; ``query_offset`` is not read with ``broadcast_q``.
        ratio: share of the candidates to keep, in (0, 1], taken as the nearest fraction with a denominator up to a million.
        keep: blocks that are always among the chosen: "diagonal" (the blocks that hold a key aligned with one of the queries, both
            ends aligned), "first", "last". They count towards the share; where they are more, all of them are kept.
        causal, window_size, sm_scale: as in :func:`jfa.jagged_flash_attention`.
        max_seq_len_kv: a bound of the key lengths: the lists' memory grows with it. Without it the key tensor's rows are the bound.
        block_q, block_kv: rows per block, powers of two from 16 on.

    Returns:
        Lists for the queries' grid, one set per query head. No gradient flows through the choice.

    Raises:
        ValueError, TypeError: naming the argument that is wrong.
    """
    _check_selection(query, key, ratio, keep, block_q, block_kv)
    band = Band.make(causal, window_size)
    batches = key_offset.numel() - 1
    longest = key.shape[0] if max_seq_len_kv is None else min(max_seq_len_kv, key.shape[0])
    width = -(-longest // block_kv)
    scale = query.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    share = _fraction(ratio)
    most = min(width, max(_share(share, width), 1, _most_kept(keep, block_q, block_kv)))
    rows = batches * -(-query.shape[0] // block_q) if broadcast_q else _capacity(query.shape[0], batches, block_q)
    capacity = rows * query.shape[1] * most
    if key.device.type == "cuda" and capacity and query.dtype != torch.float64:
        from jfa import block_select  # needs Triton, which the reference does without

        rows_of_both = rows, _capacity(key.shape[0], batches, block_kv)
        given = query.detach(), key.detach(), query_offset, key_offset, band, scale, share, keep, broadcast_q
        with torch.cuda.device(key.device):
            made = block_select.choose(*given, (block_q, block_kv), width, rows_of_both, capacity)
        return BlockLists(*made, query.shape[1], rows, block_q, block_kv)
    grid_q = query_grid(query_offset, key_offset, query.shape[0], block_q, broadcast_q)
    grid_k = grid_of(key_offset, key.shape[0], block_kv)
    with torch.no_grad():
        touched, full = _block_pairs(band, grid_q, grid_k, width)
        pooled_q, pooled_k = pool_blocks(query, grid_q), pool_blocks(key, grid_k)
        always = _always(keep, grid_q, grid_k, width) & touched
        group = max(1, query.shape[1] // max(1, key.shape[1]))
        parts = []
        for head in range(query.shape[1]):
            scores = _pooled_scores(pooled_q[:, head], pooled_k[:, head // group], grid_q, grid_k, width) * scale
            parts.append(_best(scores, touched, always, share))
        chosen = torch.stack(parts) if parts else touched.new_zeros(0, *touched.shape)
    return _compressed(chosen, full, capacity, block_q, block_kv)


def pool_blocks(x: Tensor, grid: Grid) -> Tensor:
    """Return each block's mean over its existing rows: [total, H, D] -> [rows, H, D] fp32, 0 where there is no block.

    fp64 stays fp64. Rows of other sequences do not enter a mean: a NaN there stays there.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if grid.rows == 0 or x.shape[0] == 0:
        return x.new_zeros(grid.rows, *x.shape[1:], dtype=dtype)
    place = torch.arange(grid.block, device=x.device)
    inside = place < grid.exist[:, None]
    at = torch.where(inside, grid.begin[:, None] + place, 0)
    rows = torch.where(inside[..., None, None], x[at].to(dtype), 0)
    return rows.sum(1) / grid.exist.clamp(min=1)[:, None, None]


def _pooled_scores(q: Tensor, k: Tensor, grid_q: Grid, grid_k: Grid, width: int) -> Tensor:
    """Return [rows, width]: pooled query rows [rows, D] times the pooled keys [rows_k, D] of their own sequence."""
    if grid_k.rows == 0 or width == 0:
        return q.new_zeros(q.shape[0], width)
    place = torch.arange(width, device=q.device)
    step = max(1, MAX_SCORES // max(1, width * q.shape[1]))
    parts = []
    for seq, rows in zip(grid_q.seq.split(step), q.split(step)):
        keys = k[torch.where(place < grid_k.blocks[seq][:, None], grid_k.first[seq][:, None] + place, 0)]
        parts.append((keys @ rows[..., None])[..., 0])
    return torch.cat(parts) if parts else q.new_zeros(0, width)


def _block_pairs(band: Band, grid_q: Grid, grid_k: Grid, width: int) -> tuple[Tensor, Tensor]:
    """Return two [rows, width] masks: the blocks of which a pair counts, and the blocks of which all pairs do."""
    len_q, len_kv = grid_q.length, grid_k.length
    lo, hi = (_of_rows(x, grid_q)[:, None] for x in band.bounds(len_q, len_kv))
    length = _of_rows(len_kv, grid_q)[:, None]
    q_begin = (grid_q.index * grid_q.block)[:, None]
    q_last = q_begin + grid_q.exist[:, None] - 1
    k_begin = torch.arange(width, device=len_kv.device) * grid_k.block
    k_last = torch.minimum(k_begin + grid_k.block, length) - 1
    nearest, farthest = k_begin - q_last, k_last - q_begin
    touched = (grid_q.exist[:, None] > 0) & (k_begin < length) & (nearest <= hi) & (farthest >= lo) & (lo <= hi)
    whole = (grid_q.exist[:, None] == grid_q.block) & (k_begin + grid_k.block <= length)
    return touched, touched & whole & (nearest >= lo) & (farthest <= hi)


def _of_rows(per_sequence: Tensor, grid: Grid) -> Tensor:
    return per_sequence[grid.seq] if grid.rows else grid.seq


def _always(keep: Sequence[str], grid_q: Grid, grid_k: Grid, width: int) -> Tensor:
    """Return [rows, width]: the blocks that are chosen whatever they score."""
    column = torch.arange(width, device=grid_q.seq.device)
    length = _of_rows(grid_k.length, grid_q)
    found = torch.zeros(grid_q.rows, width, dtype=torch.bool, device=column.device)
    if "first" in keep:
        found |= column == 0
    if "last" in keep:
        found |= column == ((length - 1) // grid_k.block)[:, None]
    if "diagonal" in keep:
        aligned = grid_q.index * grid_q.block + length - _of_rows(grid_q.length, grid_q)
        low, high = (aligned // grid_k.block)[:, None], ((aligned + grid_q.exist - 1) // grid_k.block)[:, None]
        found |= (column >= low) & (column <= high)
    return found


def _fraction(ratio: float) -> tuple[int, int]:
    """Return the ratio as (numerator, denominator), so that 0.7 of 10 blocks are 7 on every device."""
    fraction = Fraction(ratio).limit_denominator(MOST_PARTS)
    return max(fraction.numerator, 1), fraction.denominator


def share_of(ratio: float, candidates: Tensor) -> Tensor:
    """Return how many of each row's candidate blocks :func:`select_blocks` keeps with ``ratio`` (and an empty ``keep``)."""
    return _share(_fraction(ratio), candidates)


def _share(fraction: tuple[int, int], candidates: Tensor | int) -> Tensor | int:
    """Return the fraction of the candidates, rounded up."""
    share, parts = fraction
    return (candidates * share + parts - 1) // parts


def _best(scores: Tensor, touched: Tensor, always: Tensor, share: tuple[int, int]) -> Tensor:
    """Return [rows, width]: the share of best candidates of each row, those of ``always`` first, then by score, then by place."""
    if scores.shape[1] == 0:
        return touched
    count = torch.maximum(_share(share, touched.sum(1)), always.sum(1)).clamp(min=1)
    rank = torch.where(scores.isnan(), torch.inf, scores)
    by_score = torch.sort(rank, dim=1, descending=True, stable=True).indices
    tier = torch.where(always, 2, 1) * touched  # kept, candidate, no candidate
    by_tier = torch.sort(tier.gather(1, by_score), dim=1, descending=True, stable=True).indices
    order = by_score.gather(1, by_tier)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (place < count[:, None]) & touched


def _most_kept(keep: Sequence[str], block_q: int, block_kv: int) -> int:
    """Return the most blocks of a row that ``keep`` can name."""
    return ("first" in keep) + ("last" in keep) + ("diagonal" in keep) * (-(-block_q // block_kv) + 1)


def _compressed(chosen: Tensor, full: Tensor, capacity: int, block: int, other_block: int) -> BlockLists:
    """Return the lists of a mask [heads, rows, width], in room for ``capacity`` entries."""
    heads, rows, width = chosen.shape
    starts = torch.zeros(heads * rows + 1, dtype=torch.int64, device=chosen.device)
    starts[1:] = torch.cumsum(chosen.sum(2).flatten(), 0)
    place = starts[:-1].view(heads, rows, 1) + torch.cumsum(chosen, 2) - 1
    place = torch.where(chosen, place, capacity).flatten()  # what is not chosen goes to a slot that is cut off
    column = torch.arange(width, device=chosen.device, dtype=torch.int32).expand(heads, rows, width)
    kind = torch.where(full, int(Block.FULL), int(Block.PARTIAL)).to(torch.int8).expand(heads, rows, width)
    columns = torch.zeros(capacity + 1, dtype=torch.int32, device=chosen.device).scatter_(0, place, column.flatten())
    kinds = torch.zeros(capacity + 1, dtype=torch.int8, device=chosen.device).scatter_(0, place, kind.flatten())
    return BlockLists(starts.to(torch.int32), columns[:-1], kinds[:-1], heads, rows, block, other_block)


# ----------------------------------------------------------------------------------------------------------- other makers
def lists_from_mask(
    masks: Sequence[Tensor],
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    broadcast_q: bool = False,
    block_q: int = 128,
    block_kv: int = 128,
) -> BlockLists:
    """Return the lists of block masks of your own, such as tiles of a document mask. Waits for the device.

    Args:
        masks: per sequence a bool tensor [query blocks, key blocks], or [heads, query blocks, key blocks] with heads 1, H_kv or H.
        query_offset, key_offset, causal, window_size, broadcast_q: as in :func:`select_blocks`.
        total_q, total_kv: rows of the query and of the key tensor.

    Blocks that the mask of ``causal`` and ``window_size`` empties are left out.

    Raises:
        ValueError: naming the sequence whose mask has another shape.
    """
    band = Band.make(causal, window_size)
    batches = key_offset.numel() - 1
    grid_q = query_grid(query_offset, key_offset, total_q, block_q, broadcast_q)
    grid_k = grid_of(key_offset, total_kv, block_kv)
    if len(masks) != batches:
        raise ValueError(f"masks must hold one mask per sequence: {batches}, got {len(masks)}")
    masks = [m[None] if m.ndim == 2 else m for m in masks]
    heads = masks[0].shape[0] if masks else 1
    width = max((m.shape[2] for m in masks), default=0)
    chosen = torch.zeros(heads, grid_q.rows, width, dtype=torch.bool, device=key_offset.device)
    for b, mask in enumerate(masks):
        shape = (heads, int(grid_q.blocks[b]), int(grid_k.blocks[b]))
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"masks[{b}] must be {list(shape)} [heads, query blocks, key blocks], got {list(mask.shape)}"
            )
        row = int(grid_q.first[b])
        chosen[:, row : row + shape[1], : shape[2]] = mask.bool()
    touched, full = _block_pairs(band, grid_q, grid_k, width)
    chosen &= touched
    return _compressed(chosen, full, int(chosen.sum()), block_q, block_kv)


def transpose(
    lists: BlockLists,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    broadcast_q: bool = False,
) -> BlockLists:
    """Return the lists of the other side: per block of keys the blocks of queries that chose it, in rising order.

    A kind stays as it was: a pair of blocks is FULL if both are whole and no mask cuts them, from either side. Counted and
    sorted on the device; nothing waits. Arguments as in :func:`lists_from_mask`.
    """
    batches = key_offset.numel() - 1
    device = lists.starts.device
    blocks, rows = (lists.block, lists.other_block), _capacity(total_kv, batches, lists.other_block)
    if device.type == "cuda" and rows and lists.columns.numel():
        from jfa import block_select

        given = lists.tensors, lists.heads, lists.rows, query_offset, key_offset, total_q, total_kv, broadcast_q
        with torch.cuda.device(device):
            made = block_select.transposed(*given, blocks, rows)
        return lists.other_side(*made)
    grid_q = query_grid(query_offset, key_offset, total_q, lists.block, broadcast_q)
    grid_k = grid_of(key_offset, total_kv, lists.other_block)
    entries = torch.arange(lists.columns.numel(), device=device)
    count = lists.heads * grid_k.rows
    if entries.numel() == 0 or count == 0:
        starts = torch.zeros(count + 1, dtype=torch.int32, device=device)
        return replace(lists, starts=starts, rows=grid_k.rows, block=lists.other_block, other_block=lists.block)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True).clamp(
        max=lists.starts.numel() - 2
    )
    head, row = owner // lists.rows, owner % lists.rows
    seq = grid_q.seq[row]
    target = head * grid_k.rows + grid_k.first[seq] + lists.columns
    target = torch.where(entries < lists.starts[-1], target.clamp(0, count - 1), count)
    order = torch.sort(target, stable=True).indices  # stable: queries of one list stay in rising order
    per_list = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add_(0, target, torch.ones_like(target))
    starts = torch.zeros(count + 1, dtype=torch.int64, device=device)
    starts[1:] = torch.cumsum(per_list[:-1], 0)
    return lists.other_side(starts.to(torch.int32), grid_q.index[row][order].to(torch.int32), lists.kinds[order])


def dense_mask(lists: BlockLists, grid: Grid, width: int) -> Tensor:
    """Return [heads, B, blocks, width] bool: which key blocks each query block of each sequence chose.

    Args:
        grid: the grid of the lists' own side. blocks: the most blocks of one sequence. Waits for the device to learn it.
        width: blocks of the other side, at least as many as any sequence has; entries outside are dropped.
    """
    batches = grid.length.numel()
    most = int(grid.blocks.max()) if batches else 0
    found = torch.zeros(lists.heads, batches, most, width + 1, dtype=torch.bool, device=lists.starts.device)
    end = int(lists.starts[-1])
    entries = torch.arange(end, device=found.device)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True)
    head, row = owner // lists.rows, owner % lists.rows
    column = lists.columns[:end].long()
    column = torch.where((column >= 0) & (column < width), column, width)
    found[head, grid.seq[row], grid.index[row], column] = True
    return found[..., :width]


# -------------------------------------------------------------------------------------------------------------- checking
def check_lists(
    lists: BlockLists,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    total_q: int,
    total_kv: int,
    num_heads: int,
    num_kv_heads: int,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    band: Band | None = None,
    broadcast_q: bool = False,
    contents: bool = True,
) -> None:
    """Raise an error that names what is wrong with lists for a call.

    Types, shapes and counts are compared without waiting; ``contents`` also reads the lists, which waits for the device: starts
    that fall or leave ``columns``, blocks outside the sequence, out of order, or twice, and FULL pairs that need a mask. ``band``
    may stand for ``causal`` and ``window_size``.

    Raises:
        TypeError, ValueError: naming ``block_lists`` and, for contents, the head, sequence and query block.
    """
    if not isinstance(lists, BlockLists):
        raise TypeError(f"block_lists must be a jfa.block_sparse.BlockLists, got {type(lists).__name__}")
    for name, dtype in (("starts", torch.int32), ("columns", torch.int32), ("kinds", torch.int8)):
        x = getattr(lists, name)
        if not isinstance(x, Tensor) or x.dtype != dtype or x.ndim != 1:
            found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"block_lists.{name} must be a 1-D {dtype} tensor, got {found}")
        if x.device != key_offset.device:
            raise ValueError(f"block_lists.{name} is on {x.device}, the offsets are on {key_offset.device}")
    if lists.columns.shape != lists.kinds.shape:
        raise ValueError(f"block_lists has {lists.columns.numel()} columns and {lists.kinds.numel()} kinds")
    if lists.heads not in {1, num_kv_heads, num_heads}:
        raise ValueError(f"block_lists.heads must be 1, {num_kv_heads} or {num_heads}, got {lists.heads}")
    batches = key_offset.numel() - 1
    grid_q = query_grid(query_offset, key_offset, total_q, lists.block, broadcast_q)
    if lists.rows != grid_q.rows or lists.starts.numel() != lists.heads * lists.rows + 1:
        raise ValueError(
            f"block_lists must have rows = {grid_q.rows} for {total_q} query rows in {batches} sequences and blocks of "
            f"{lists.block}, and heads * rows + 1 starts; got rows = {lists.rows} and {lists.starts.numel()} starts"
        )
    if contents:
        grid_k = grid_of(key_offset, total_kv, lists.other_block)
        _check_contents(lists, grid_q, grid_k, Band.make(causal, window_size) if band is None else band)


def _check_contents(lists: BlockLists, grid_q: Grid, grid_k: Grid, band: Band) -> None:
    starts = lists.starts.long()
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()) or int(starts[-1]) > lists.columns.numel():
        raise ValueError(
            f"block_lists.starts must begin at 0, never fall, and end within columns ({lists.columns.numel()} entries)"
        )
    end = int(starts[-1])
    entries = torch.arange(end, device=starts.device)
    owner = torch.searchsorted(lists.starts[1:].contiguous(), entries.int(), right=True)
    row, column = owner % lists.rows, lists.columns[:end].long()
    blocks = grid_k.blocks[grid_q.seq[row]] if end else column
    blocks = torch.where(grid_q.exist[row] > 0, blocks, 0) if end else blocks

    def refuse(bad: Tensor, what: str) -> None:
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            head, r = int(owner[at]) // lists.rows, int(row[at])
            place = f"head {head}, sequence {int(grid_q.seq[r])}, query block {int(grid_q.index[r])}"
            raise ValueError(f"block_lists: {what.format(column=int(column[at]), blocks=int(blocks[at]))} ({place})")

    refuse((column < 0) | (column >= blocks), "key block {column} is outside the sequence, which has {blocks}")
    if end > 1:
        step = torch.where(owner[1:] == owner[:-1], column.diff(), 1)
        step = torch.cat([step.new_ones(1), step])
        refuse(step == 0, "key block {column} is listed twice")
        refuse(step < 0, "key block {column} follows a later one; a list must rise")
    kind = lists.kinds[:end]
    refuse((kind != Block.PARTIAL) & (kind != Block.FULL), "key block {column} is neither PARTIAL nor FULL")
    width = int(blocks.max()) if end else 0
    _, full = _block_pairs(band, grid_q, grid_k, width)
    refuse(
        (kind == Block.FULL) & ~full[row, column] if end else kind.bool(),
        "key block {column} is marked FULL, but needs a mask",
    )


def _check_selection(
    query: Tensor, key: Tensor, ratio: float, keep: Sequence[str], block_q: int, block_kv: int
) -> None:
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ValueError(f"ratio must be a number in (0, 1], got {ratio!r}")
    unknown = [name for name in keep if name not in ALWAYS] if not isinstance(keep, str) else [keep]
    if unknown:
        raise ValueError(f"keep must be a sequence of {', '.join(map(repr, ALWAYS))}, got {unknown[0]!r}")
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if not isinstance(block, int) or block < 16 or block & (block - 1):
            raise ValueError(f"{name} must be a power of two from 16 on, got {block!r}")
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [rows, heads, head_dim], got {found}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key heads and head dims equal, got {list(query.shape)} and {list(key.shape)}"
        )
