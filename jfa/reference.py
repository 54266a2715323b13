"""What is right: attention on packed tensors in plain PyTorch, differentiable, in fp64 if asked.

Two independent ways to the same numbers:

* :func:`attention` groups sequences of like lengths, pads each group and forms every score. It is the judge of all kernels
  and the op's path for CPU tensors.
* :func:`blockwise_attention` walks over blocks of keys with the online softmax of FlashAttention (Dao et al., 2022), never
  holding a whole row of scores: the recurrence that every kernel of this project implements.

Conventions, shared by all: query head h reads key/value head h // (H // H_kv); LSE is the natural logarithm of the sum of
exponentials; a query without keys gives output 0, LSE -inf and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jfa.block_sparse import BlockLists, dense_mask, query_grid
from jfa.layout import lengths_from_offsets
from jfa.masks import Band

# Scores formed at once, over batch and heads. Bounds the memory of a forward; more would not be faster on a CPU.
MAX_SCORES = 1 << 24


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    band: Band | None = None,
    broadcast_q: bool = False,
    output_offset: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    block_lists: BlockLists | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every packed sequence's queries over its own keys.

    Args:
        query: [total_q, H, D], or [Lq, H, D] shared by all sequences with ``broadcast_q``.
        key: [total_kv, H_kv, D]; value: [total_kv, H_kv, Dv]; H a multiple of H_kv.
        query_offset: [B+1] integers; unused with ``broadcast_q``. key_offset: [B+1] integers.
        sm_scale: factor on the scores, 1/sqrt(D) by default; 0 and negative numbers count as given.
        causal, window_size: as :meth:`jfa.masks.Band.make` takes them, or ``band`` in their place.
        broadcast_q: output has B * Lq rows; sequence b fills rows b * Lq on, or ``output_offset[b]`` on.
        dtype: computes in it (default: fp64 for fp64 inputs, else fp32).
        return_lse: also return the log-sum-exp [H, rows_out] in the computing dtype.
        block_lists: of the queries' blocks (:mod:`jfa.block_sparse`); keys of blocks that are not listed do not count.

    Returns:
        out [rows_out, H, Dv] in the query's dtype (in ``dtype`` where that is given); rows of no sequence are 0, their LSE -inf.

    Raises:
        ValueError: H is no multiple of H_kv. Offsets are taken at their word: :func:`jfa.layout.check_offsets` checks them.
    """
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query heads ({query.shape[1]}) must be a multiple of key heads ({key.shape[1]})")
    band = Band.make(causal, window_size) if band is None else band
    scale = 1.0 / math.sqrt(query.shape[-1]) if sm_scale is None else float(sm_scale)
    compute = dtype or (torch.float64 if query.dtype == torch.float64 else torch.float32)
    q, k, v = query.to(compute), key.to(compute), value.to(compute)
    rows = _Rows.of(query, query_offset, key_offset, broadcast_q, output_offset)
    chosen = None if block_lists is None else _Chosen.of(block_lists, query, query_offset, key, key_offset, broadcast_q)
    out_parts, lse_parts, targets = [], [], []
    for part in rows.chunks(query.shape[1]):
        out, lse, target = _attend(q, k, v, rows, part, band, scale, chosen)
        out_parts.append(out)
        lse_parts.append(lse)
        targets.append(target)
    out = q.new_zeros(rows.rows_out, query.shape[1], value.shape[2])
    lse = q.new_full((rows.rows_out, query.shape[1]), -math.inf)
    if targets:
        target = torch.cat(targets)
        out = out.index_copy(0, target, torch.cat(out_parts))
        lse = lse.index_copy(0, target, torch.cat(lse_parts))
    elif any(t.requires_grad for t in (q, k, v)):
        out = out + (q[:0].sum() + k[:0].sum() + v[:0].sum())  # nothing attends to anything, yet backward() must work
    out = out.to(query.dtype) if dtype is None else out
    return (out, lse.T.contiguous()) if return_lse else out


@dataclass
class _Rows:
    """Where each sequence's rows begin, as int64 tensors [B]."""

    q_start: Tensor
    k_start: Tensor
    o_start: Tensor
    len_q: Tensor
    len_kv: Tensor
    rows_out: int

    @classmethod
    def of(cls, query: Tensor, query_offset, key_offset: Tensor, broadcast_q: bool, output_offset) -> _Rows:
        k_start, len_kv = key_offset[:-1].long(), lengths_from_offsets(key_offset).long()
        batches = k_start.numel()
        if not broadcast_q:
            q_start, len_q = query_offset[:-1].long(), lengths_from_offsets(query_offset).long()
            return cls(q_start, k_start, q_start, len_q, len_kv, query.shape[0])
        rows = query.shape[0]
        o_start = (
            torch.arange(batches, device=query.device) * rows if output_offset is None else output_offset[:-1].long()
        )
        return cls(torch.zeros_like(k_start), k_start, o_start, torch.full_like(k_start, rows), len_kv, batches * rows)

    def chunks(self, heads: int) -> Iterator[_Chunk]:
        """Groups of sequences to pad together; sequences without queries or without keys are in none."""
        live = torch.nonzero((self.len_q > 0) & (self.len_kv > 0)).flatten()
        if live.numel() == 0:
            return
        group = _bucket(self.len_q[live]) * 4096 + _bucket(self.len_kv[live])
        order = torch.argsort(group, stable=True)
        sizes = torch.unique_consecutive(group[order], return_counts=True)[1].tolist()
        for members in torch.split(live[order], sizes):
            len_q, len_kv = int(self.len_q[members].max()), int(self.len_kv[members].max())
            together = MAX_SCORES // (len_q * len_kv * heads)
            rows = len_q if together else max(1, MAX_SCORES // (len_kv * heads))  # of one sequence too long for one go
            for ids in torch.split(members, max(1, together)):
                for first in range(0, len_q, rows):
                    yield _Chunk(ids, first, min(rows, len_q - first), len_kv)


@dataclass
class _Chunk:
    """Queries ``first .. first + rows`` of some sequences of like lengths, padded together."""

    ids: Tensor  # which sequences
    first: int
    rows: int
    max_kv: int


def _bucket(lengths: Tensor) -> Tensor:
    """A number shared by lengths within about a quarter of each other, so that padding one group wastes little."""
    return torch.where(lengths <= 8, lengths, (torch.log2(lengths.double()) * 4).long())


@dataclass
class _Chosen:
    """Which key blocks each query block of each sequence lists."""

    mask: Tensor  # [heads, B, query blocks, key blocks] bool
    block_q: int
    block_kv: int

    @classmethod
    def of(cls, lists: BlockLists, query: Tensor, query_offset, key: Tensor, key_offset, broadcast_q: bool) -> _Chosen:
        grid = query_grid(query_offset, key_offset, query.shape[0], lists.block, broadcast_q)
        return cls(dense_mask(lists, grid, -(-key.shape[0] // lists.other_block)), lists.block, lists.other_block)

    def pairs(self, part: _Chunk, heads: int) -> Tensor:
        """[sequences of the chunk, H, rows, max_kv] bool."""
        place = torch.arange(part.rows, device=self.mask.device)
        rows = ((part.first + place) // self.block_q).clamp(max=self.mask.shape[2] - 1)
        columns = torch.arange(part.max_kv, device=self.mask.device) // self.block_kv
        found = self.mask[:, part.ids][:, :, rows][..., columns].transpose(0, 1)
        return found.repeat_interleave(heads // self.mask.shape[0], 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: _Rows, part: _Chunk, band: Band, scale: float, chosen: _Chosen | None
):
    """Pads one chunk and attends: (out [n, H, Dv], lse [n, H], target rows [n]) of the chunk's n real queries."""
    ids = part.ids
    len_q, len_kv = rows.len_q[ids], rows.len_kv[ids]
    q_pad, q_valid = _padded(q, rows.q_start[ids] + part.first, len_q - part.first, part.rows)
    k_pad, _ = _padded(k, rows.k_start[ids], len_kv, part.max_kv)
    v_pad, _ = _padded(v, rows.k_start[ids], len_kv, part.max_kv)
    pairs = None if chosen is None else chosen.pairs(part, q.shape[1])
    out, lse = padded_attention(
        q_pad, k_pad, v_pad, len_q, len_kv, band=band, sm_scale=scale, first_query=part.first, chosen=pairs
    )
    target = rows.o_start[ids][:, None] + part.first + torch.arange(part.rows, device=q.device)
    return out[q_valid], lse[q_valid], target[q_valid]


def _padded(x: Tensor, start: Tensor, length: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    """[total, H, D] -> ([B, max_len, H, D] with zeros in free places, [B, max_len] bool); never a neighbour's rows."""
    place = torch.arange(max_len, device=x.device)
    valid = place < length[:, None]
    index = torch.where(valid, start[:, None] + place, 0)
    rows = x.index_select(0, index.flatten()).unflatten(0, index.shape)
    return torch.where(valid[..., None, None], rows, 0), valid


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    len_q: Tensor,
    len_kv: Tensor,
    *,
    band: Band | None = None,
    sm_scale: float | None = None,
    first_query: int = 0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention on a batch that really is padded, with a mask: what a model does that knows nothing of jagged tensors.

    Args:
        query: [B, Mq, H, D]; key: [B, Mkv, H_kv, D]; value: [B, Mkv, H_kv, Dv].
        len_q, len_kv: [B] lengths; places past them take no part.
        first_query: the number in its sequence of the queries at place 0, where ``query`` is a slice of longer ones.
        chosen: [B, H, Mq, Mkv] bool; pairs that are False do not count either.

    Returns:
        (out [B, Mq, H, Dv], lse [B, Mq, H]); rows without keys are 0 and -inf.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if sm_scale is None else float(sm_scale)
    allowed = padded_mask(len_q, len_kv, query.shape[1], key.shape[1], band, first_query)[:, None]  # [B, 1, Mq, Mkv]
    if chosen is not None:
        allowed = allowed & chosen
    group = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (key, value))
    scores = (scale * (q @ k.transpose(-1, -2))).masked_fill(~allowed, -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)  # a row without keys: exp(-inf - 0) is 0, not NaN
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    live = total > 0
    safe = torch.where(live, total, 1.0)
    out = (weights @ v) / safe
    lse = torch.where(live, top + torch.log(safe), -math.inf)[..., 0]
    return out.transpose(1, 2), lse.transpose(1, 2)


def padded_mask(
    len_q: Tensor, len_kv: Tensor, max_q: int, max_kv: int, band: Band | None = None, first_query: int = 0
) -> Tensor:
    """[B, max_q, max_kv] bool: the pairs of a padded batch that count; row 0 is query ``first_query``."""
    band = band or Band()
    lo, hi = (x[:, None, None] for x in band.bounds(len_q, len_kv))
    i = first_query + torch.arange(max_q, device=len_q.device)[:, None]
    j = torch.arange(max_kv, device=len_q.device)
    inside = (i < len_q[:, None, None]) & (j < len_kv[:, None, None])
    return inside & (j - i >= lo) & (j - i <= hi)


# ---------------------------------------------------------------------------------------------------- online softmax
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Tensor,
    key_offset: Tensor,
    *,
    block_size: int = 64,
    sm_scale: float | None = None,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same attention, one block of keys at a time, with the online softmax; shapes as :func:`attention`.

    For each sequence it keeps the running maximum m, the running sum l and an unnormalised output acc, and never a full row
    of scores. A Python loop over sequences and blocks: for study and for tests, not for speed.
    """
    band = Band.make(causal, window_size)
    scale = 1.0 / math.sqrt(query.shape[-1]) if sm_scale is None else float(sm_scale)
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    lse = query.new_full((query.shape[1], query.shape[0]), -math.inf)
    q_bounds, k_bounds = query_offset.tolist(), key_offset.tolist()
    for q0, q1, k0, k1 in zip(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:]):
        o, s = _blockwise_one(query[q0:q1], key[k0:k1], value[k0:k1], band, scale, block_size)
        out[q0:q1], lse[:, q0:q1] = o, s
    return (out, lse) if return_lse else out


def _blockwise_one(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, block: int) -> tuple[Tensor, Tensor]:
    """One sequence: (out [n, H, Dv], lse [H, n])."""
    group = q.shape[1] // k.shape[1]
    len_q, len_kv = q.shape[0], k.shape[0]
    allowed = band.dense(len_q, len_kv, device=q.device)
    q = q.transpose(0, 1)  # [H, n, D]
    m = q.new_full((q.shape[0], len_q, 1), -math.inf)
    l = q.new_zeros(q.shape[0], len_q, 1)
    acc = q.new_zeros(q.shape[0], len_q, v.shape[2])
    for j in range(0, len_kv, block):
        k_block, v_block = (x[j : j + block].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = (scale * (q @ k_block.transpose(-1, -2))).masked_fill(~allowed[:, j : j + block], -math.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        anchor = torch.where(m_new == -math.inf, 0.0, m_new)  # no key so far: keep exp() away from inf - inf
        weights, shrink = torch.exp(scores - anchor), torch.exp(m - anchor)
        l = l * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ v_block
        m = m_new
    out = acc / torch.where(l > 0, l, 1.0)
    lse = torch.where(l > 0, m + torch.log(l), -math.inf)[..., 0]
    return out.transpose(0, 1), lse


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from the attention over each.

    Args:
        out_a, out_b: [n, H, Dv]; lse_a, lse_b: [H, n], natural log, -inf where that set held no key.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(lse == -math.inf, 0.0, lse)
    share_a, share_b = torch.exp(lse_a - anchor), torch.exp(lse_b - anchor)
    return share_a.T[..., None] * out_a + share_b.T[..., None] * out_b, lse
