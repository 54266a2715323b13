"""The choice of blocks by their pooled scores."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from jfa.block_sparse.grid import Grid, block_pairs, capacity_of, grid_of, of_rows, query_grid
from jfa.block_sparse.lists import BlockLists, compressed
from jfa.masks import Band

MOST_PARTS = 1_000_000  # the ratio is taken as the nearest fraction with at most this denominator
MAX_SCORES = 1 << 24  # pooled scores formed at once
ALWAYS = ("diagonal", "first", "last")


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
            ends aligned), "first", "last". They count toward the share; where they are more, all of them are kept.
        causal, window_size, sm_scale: as in :func:`jfa.jagged_flash_attention`.
        max_seq_len_kv: a bound of the key lengths: the lists' memory grows with it. Without it the key tensor's rows are the bound.
        block_q, block_kv: rows per block, powers of two from 16 on.

    Returns:
        Lists for the queries' grid, one set per query head. No gradient flows through the choice.

    Raises:
        ValueError, TypeError: naming the argument that is wrong.
    """
    _check_arguments(query, key, ratio, keep, block_q, block_kv)
    band = Band.make(causal, window_size)
    batches = key_offset.numel() - 1
    longest = key.shape[0] if max_seq_len_kv is None else min(max_seq_len_kv, key.shape[0])
    width = -(-longest // block_kv)
    scale = query.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    share = fraction(ratio)
    most = min(width, max(_share(share, width), 1, _most_kept(keep, block_q, block_kv)))
    rows = batches * -(-query.shape[0] // block_q) if broadcast_q else capacity_of(query.shape[0], batches, block_q)
    capacity = rows * query.shape[1] * most
    if key.device.type == "cuda" and capacity and query.dtype != torch.float64:
        from jfa import block_select  # needs Triton, which the reference does without

        rows_of_both = rows, capacity_of(key.shape[0], batches, block_kv)
        given = query.detach(), key.detach(), query_offset, key_offset, band, scale, share, keep, broadcast_q
        with torch.cuda.device(key.device):
            made = block_select.choose(*given, (block_q, block_kv), width, rows_of_both, capacity)
        return BlockLists(*made, query.shape[1], rows, block_q, block_kv)
    grid_q = query_grid(query_offset, key_offset, query.shape[0], block_q, broadcast_q)
    grid_k = grid_of(key_offset, key.shape[0], block_kv)
    with torch.no_grad():
        touched, full = block_pairs(band, grid_q, grid_k, width)
        pooled_q, pooled_k = pool_blocks(query, grid_q), pool_blocks(key, grid_k)
        always = _always(keep, grid_q, grid_k, width) & touched
        group = max(1, query.shape[1] // max(1, key.shape[1]))
        parts = []
        for head in range(query.shape[1]):
            scores = _pooled_scores(pooled_q[:, head], pooled_k[:, head // group], grid_q, grid_k, width) * scale
            parts.append(_best(scores, touched, always, share))
        chosen = torch.stack(parts) if parts else touched.new_zeros(0, *touched.shape)
    return compressed(chosen, full, capacity, block_q, block_kv)


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


def _always(keep: Sequence[str], grid_q: Grid, grid_k: Grid, width: int) -> Tensor:
    """Return [rows, width]: the blocks that are chosen whatever they score."""
    column = torch.arange(width, device=grid_q.seq.device)
    length = of_rows(grid_k.length, grid_q)
    found = torch.zeros(grid_q.rows, width, dtype=torch.bool, device=column.device)
    if "first" in keep:
        found |= column == 0
    if "last" in keep:
        found |= column == ((length - 1) // grid_k.block)[:, None]
    if "diagonal" in keep:
        aligned = grid_q.index * grid_q.block + length - of_rows(grid_q.length, grid_q)
        low, high = (aligned // grid_k.block)[:, None], ((aligned + grid_q.exist - 1) // grid_k.block)[:, None]
        found |= (column >= low) & (column <= high)
    return found


def fraction(ratio: float) -> tuple[int, int]:
    """Return the ratio as (numerator, denominator), so that 0.7 of 10 blocks are 7 on every device."""
    fraction = Fraction(ratio).limit_denominator(MOST_PARTS)
    return max(fraction.numerator, 1), fraction.denominator


def share_of(ratio: float, candidates: Tensor) -> Tensor:
    """Return how many of each row's candidate blocks :func:`select_blocks` keeps with ``ratio`` (and an empty ``keep``)."""
    return _share(fraction(ratio), candidates)


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


def _check_arguments(
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
