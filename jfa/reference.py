"""Reference attention on packed tensors in plain PyTorch, differentiable, in fp64 on request.

It computes the same numbers in two independent ways:

* :func:`attention` groups sequences of like lengths, pads each group and forms every score. All kernels are compared
  with it, and the op uses it for CPU tensors.
* :func:`blockwise_attention` walks over blocks of keys with the online softmax of FlashAttention (Dao et al., 2022), never
  holding a whole row of scores: the recurrence that every kernel of this project implements.

:func:`mxfp8_attention` is the reference of kernels that multiply in MXFP8: it rounds exactly what they round.

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
from jfa.mxfp8 import E4M3_MAX, GROUP, BlockScaled, encode, magnitude, quantize_jagged, scale_codes, scale_values

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
    """Compute attention of every packed sequence's queries over its own keys.

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
    """The first row of each sequence, as int64 tensors [B]."""

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

    def chunks(self, heads: int, multiple: int = 1) -> Iterator[_Chunk]:
        """Yield groups of sequences to pad together; sequences without queries or without keys are in none.

        A sequence that is too long for one group is cut after a multiple of ``multiple`` queries.
        """
        live = torch.nonzero((self.len_q > 0) & (self.len_kv > 0)).flatten()
        if live.numel() == 0:
            return
        group = _bucket(self.len_q[live]) * 4096 + _bucket(self.len_kv[live])
        order = torch.argsort(group, stable=True)
        sizes = torch.unique_consecutive(group[order], return_counts=True)[1].tolist()
        for members in torch.split(live[order], sizes):
            len_q, len_kv = int(self.len_q[members].max()), int(self.len_kv[members].max())
            together = MAX_SCORES // (len_q * len_kv * heads)
            rows = len_q  # or fewer, of one sequence too long for one go
            if not together:
                rows = max(1, MAX_SCORES // (len_kv * heads * multiple)) * multiple
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
    """Return a number shared by lengths within about a quarter of each other, so that padding one group wastes little."""
    return torch.where(lengths <= 8, lengths, (torch.log2(lengths.double()) * 4).long())


@dataclass
class _Chosen:
    """The key blocks that each query block of each sequence lists."""

    mask: Tensor  # [heads, B, query blocks, key blocks] bool
    block_q: int
    block_kv: int

    @classmethod
    def of(cls, lists: BlockLists, query: Tensor, query_offset, key: Tensor, key_offset, broadcast_q: bool) -> _Chosen:
        grid = query_grid(query_offset, key_offset, query.shape[0], lists.block, broadcast_q)
        return cls(dense_mask(lists, grid, -(-key.shape[0] // lists.other_block)), lists.block, lists.other_block)

    def pairs(self, part: _Chunk, heads: int) -> Tensor:
        """Return [sequences of the chunk, H, rows, max_kv] bool."""
        place = torch.arange(part.rows, device=self.mask.device)
        rows = ((part.first + place) // self.block_q).clamp(max=self.mask.shape[2] - 1)
        columns = torch.arange(part.max_kv, device=self.mask.device) // self.block_kv
        found = self.mask[:, part.ids][:, :, rows][..., columns].transpose(0, 1)
        return found.repeat_interleave(heads // self.mask.shape[0], 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: _Rows, part: _Chunk, band: Band, scale: float, chosen: _Chosen | None
):
    """Pad one chunk and attend: (out [n, H, Dv], lse [n, H], target rows [n]) of the chunk's n real queries."""
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
    """Pad [total, H, D] to ([B, max_len, H, D] with zeros in free places, [B, max_len] bool); never a neighbor's rows."""
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
    """Compute attention on a batch that really is padded, with a mask, as a model does that has no jagged tensors.

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
    """Return [B, max_q, max_kv] bool: the pairs of a padded batch that count; row 0 is query ``first_query``."""
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
    """Return the same attention, one block of keys at a time, with the online softmax; shapes as :func:`attention`.

    For each sequence it keeps the running maximum m, the running sum l and an unnormalized output acc, and never a full row
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
    """Return one sequence: (out [n, H, Dv], lse [H, n])."""
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
    """Return attention over the union of two disjoint sets of keys from the attention over each.

    Args:
        out_a, out_b: [n, H, Dv]; lse_a, lse_b: [H, n], natural log, -inf where that set held no key.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(lse == -math.inf, 0.0, lse)
    share_a, share_b = torch.exp(lse_a - anchor), torch.exp(lse_b - anchor)
    return share_a.T[..., None] * out_a + share_b.T[..., None] * out_b, lse


# -------------------------------------------------------------------------------------------------------------- MXFP8
# What is rounded: the forward's operands, then those that only the backward has.
ROUNDED = (
    "Q by head_dim",
    "K by head_dim",
    "P",
    "V by tokens",
    "dO by head_dim",
    "V by head_dim",
    "dO by tokens",
    "dS",
)
ROUNDED += ("Q by tokens", "K by tokens")


def mxfp8_attention(
    query: Tensor | BlockScaled,
    key: Tensor | BlockScaled,
    value: Tensor | BlockScaled,
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention whose products have MXFP8 operands; shapes and arguments as :func:`attention`.

    Every operand is encoded along the axis that its product contracts (:mod:`jfa.mxfp8`). The forward: S = Q K^T from Q and K in
    groups along the head dim; P = 2**(S log2(e) - m) with m the row's maximum rounded up to a whole number; O = P V, P rounded
    to e4m3 at the fixed scale 2**-8 and V in groups of keys. The row sum adds P as it was before that.

    A kernel that walks over blocks of keys has another m for early blocks, a smaller one, or a larger one where it adds a margin.
    Both differ by whole numbers, so P rounds to the same value wherever e4m3 holds it as a normal number in both: at or above
    2**-14 here, or 2**(margin - 14). Below that the block size matters: denormal numbers lie 2**-17 apart (2**(margin - 17)), and
    those of an early block with a smaller m lie closer. Each such P may differ from this reference's by one such step.

    The backward (:func:`mxfp8_attention_backward`) follows through autograd, once. It forms P from the same Q and K.

    Args:
        query, key, value: also encoded already, query and key along "head_dim" and value along "tokens", for these offsets; then
            autograd does not follow.
        dtype: of everything that is not encoded, default fp64; the output and the LSE are in it if it is given, else in the
            query's and in fp64.
    """
    band = Band.make(causal, window_size) if band is None else band
    scale = 1.0 / math.sqrt(query.shape[-1]) if sm_scale is None else float(sm_scale)
    call = _ScaledCall(query_offset, key_offset, output_offset, broadcast_q, band, scale, dtype or torch.float64)
    if any(isinstance(x, BlockScaled) for x in (query, key, value)):
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            out, lse = call.forward(query, key, value)
    else:
        out, lse = _ScaledAttention.apply(query, key, value, call)
    out = out.to(query.dtype) if dtype is None else out
    return (out, lse) if return_lse else out


def mxfp8_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor | BlockScaled,
    key: Tensor | BlockScaled,
    value: Tensor | BlockScaled,
    out: Tensor,
    lse: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in ``dtype`` (default fp64), from a forward's ``out`` [rows_out, H, Dv] and ``lse`` [H, rows_out].

    P = exp(S - lse) from Q and K as the forward encodes them. dV = P^T dO with P at the fixed scale and dO in groups of queries;
    dP = dO V^T with both in groups along the head dim; dS = P (dP - delta + dlse) from P before its rounding, delta the sum of
    out * dout over a row; dK = dS^T Q and dQ = dS K with one scale per 32 x 32 square of dS, counted from the sequence's first
    query and key, and Q and K in groups of tokens. Inputs may be encoded already, along both axes (``quantize_jagged(...,
    both=True)``).
    """
    band = Band.make(causal, window_size) if band is None else band
    scale = 1.0 / math.sqrt(query.shape[-1]) if sm_scale is None else float(sm_scale)
    call = _ScaledCall(query_offset, key_offset, output_offset, broadcast_q, band, scale, dtype or torch.float64)
    with torch.autocast(query.device.type, enabled=False):
        return call.backward(dout, dlse, query, key, value, out, lse)


class _ScaledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, call):
        with torch.autocast(query.device.type, enabled=False):
            out, lse = call.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        query, key, value, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        with torch.autocast(query.device.type, enabled=False):
            grads = ctx.call.backward(dout, dlse, query, key, value, out, lse)
        return *(g.to(x.dtype) for g, x in zip(grads, (query, key, value))), None


@dataclass
class _ScaledCall:
    """The arguments of a call in MXFP8 besides its tensors. ``exact``: operands of :data:`ROUNDED` that are not
    rounded."""

    query_offset: Tensor | None
    key_offset: Tensor
    output_offset: Tensor | None
    broadcast_q: bool
    band: Band
    scale: float
    dtype: torch.dtype
    exact: frozenset[str] = frozenset()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out [rows_out, H, Dv], lse [H, rows_out]) in the computing dtype."""
        heads = query.shape[1]
        rows = _Rows.of(query, self.query_offset, self.key_offset, self.broadcast_q, self.output_offset)
        q, k, v = self.queries(query, "head_dim"), self.keys(key, "head_dim"), self.keys(value, "tokens", "V")
        out = q.new_zeros(rows.rows_out, heads, value.shape[2])
        lse = q.new_full((rows.rows_out, heads), -math.inf)
        for chunk in rows.chunks(heads, GROUP):
            part = _ScaledPart(self, rows, chunk, heads)
            log2_p = part.scores(q, k)
            top = torch.ceil(log2_p.amax(-1, keepdim=True))
            top = torch.where(top == -math.inf, 0, top)
            p = torch.exp2(log2_p - top)
            total = p.sum(-1, keepdim=True)
            safe = torch.where(total == 0, 1, total)
            part.write(out, (self.rounded_p(p) @ part.of_keys(v)) / safe)
            row_lse = torch.where(total == 0, -math.inf, (top + torch.log2(safe)) * math.log(2))
            part.write(lse.unsqueeze(2), row_lse)
        return out, lse.T.contiguous()

    def backward(self, dout, dlse, query, key, value, out, lse) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) in the computing dtype."""
        heads = query.shape[1]
        rows = _Rows.of(query, self.query_offset, self.key_offset, self.broadcast_q, self.output_offset)
        delta = (out.to(self.dtype) * dout.to(self.dtype)).sum(2)  # [rows_out, H]
        if dlse is not None:
            delta = delta - torch.where(torch.isfinite(lse), dlse.to(self.dtype), 0).T
        lse2 = (lse.to(self.dtype) / math.log(2)).T
        q, k, v = self.queries(query, "head_dim"), self.keys(key, "head_dim"), self.keys(value, "head_dim", "V")
        q_columns, k_columns = self.queries(query, "tokens"), self.keys(key, "tokens")
        do, do_columns = self.outputs(dout, "head_dim"), self.outputs(dout, "tokens")
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for chunk in rows.chunks(heads, GROUP):
            part = _ScaledPart(self, rows, chunk, heads)
            log2_p, row_lse = part.scores(q, k), part.of_outputs(lse2.unsqueeze(2))
            p = torch.where(log2_p == -math.inf, 0, torch.exp2(log2_p - row_lse))
            part.add_keys(dv, self.rounded_p(p).mT @ part.of_outputs(do_columns))
            dp = part.of_outputs(do) @ part.of_keys(v).mT
            ds = torch.where(log2_p == -math.inf, 0, p * (dp - part.of_outputs(delta.unsqueeze(2))))
            ds = ds if "dS" in self.exact else _rounded_squares(ds)
            part.add_keys(dk, self.scale * (ds.mT @ part.of_queries(q_columns)))
            part.add_queries(dq, self.scale * (ds @ part.of_keys(k_columns)))
        return dq, dk, dv

    def rounded_p(self, p: Tensor) -> Tensor:
        """Return probabilities as the products see them."""
        return p if "P" in self.exact else _rounded_p(p)

    def queries(self, x: Tensor, axis: str) -> Tensor:
        """Return what ``x`` [rows_q, H, *] is in MXFP8."""
        offsets = self.key_offset.new_tensor([0, x.shape[0]]) if self.broadcast_q else self.query_offset
        return self.encoded(x, offsets, axis, "Q")

    def keys(self, x: Tensor, axis: str, name: str = "K") -> Tensor:
        """Return what ``x`` [rows_kv, H_kv, *] is in MXFP8."""
        return self.encoded(x, self.key_offset, axis, name)

    def outputs(self, x: Tensor, axis: str) -> Tensor:
        """Return what ``x`` [rows_out, H, Dv] is in MXFP8."""
        if not self.broadcast_q:
            return self.encoded(x, self.query_offset, axis, "dO")
        batches = self.key_offset.numel() - 1
        length = x.shape[0] // batches if batches else 0
        slots = torch.arange(batches + 1, device=x.device) * length
        return self.encoded(x, slots if self.output_offset is None else self.output_offset, axis, "dO", length)

    def encoded(
        self, x: Tensor | BlockScaled, offsets: Tensor, axis: str, name: str, length: int | None = None
    ) -> Tensor:
        if isinstance(x, BlockScaled):
            return x.along(axis).dequantize().to(self.dtype)
        if f"{name} by {axis}" in self.exact:
            return x.detach().to(self.dtype)
        x = x.float() if x.dtype == torch.float64 else x
        return quantize_jagged(x.detach(), offsets, axis, length=length).dequantize().to(self.dtype)


class _ScaledPart:
    """A chunk of a call: gathers packed rows to [sequences, H, rows, *] and adds such blocks to packed rows.

    Its numbers of query and key rows are multiples of the group size. Rows of a chunk that do not exist are 0, and
    their results are dropped.
    """

    def __init__(self, call: _ScaledCall, rows: _Rows, chunk: _Chunk, heads: int):
        self.call, self.heads, ids = call, heads, chunk.ids
        self.first = chunk.first
        self.len_q, self.len_kv = rows.len_q[ids], rows.len_kv[ids]
        self.q_start, self.o_start = rows.q_start[ids] + chunk.first, rows.o_start[ids] + chunk.first
        self.k_start = rows.k_start[ids]
        self.rows, self.max_kv = (-(-n // GROUP) * GROUP for n in (chunk.rows, chunk.max_kv))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return S in log2 units, -inf where a pair does not count."""
        allowed = padded_mask(self.len_q, self.len_kv, self.rows, self.max_kv, self.call.band, self.first)[:, None]
        s = (self.call.scale / math.log(2)) * (self.of_queries(q) @ self.of_keys(k).mT)
        return s.masked_fill(~allowed, -math.inf)

    def of_queries(self, x: Tensor) -> Tensor:
        return _padded(x, self.q_start, self.len_q - self.first, self.rows)[0].transpose(1, 2)

    def of_outputs(self, x: Tensor) -> Tensor:
        return _padded(x, self.o_start, self.len_q - self.first, self.rows)[0].transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return keys' rows, each head as often as query heads read it."""
        rows = _padded(x, self.k_start, self.len_kv, self.max_kv)[0].transpose(1, 2)
        return rows.repeat_interleave(self.heads // x.shape[1], 1)

    def write(self, packed: Tensor, block: Tensor) -> None:
        """Write rows of the output."""
        index, valid = self.index(self.o_start, self.len_q - self.first, self.rows)
        packed[index] = block.transpose(1, 2)[valid]

    def add_queries(self, packed: Tensor, block: Tensor) -> None:
        index, valid = self.index(self.q_start, self.len_q - self.first, self.rows)
        packed.index_add_(0, index, block.transpose(1, 2)[valid])

    def add_keys(self, packed: Tensor, block: Tensor) -> None:
        """Add to keys' rows; query heads that share a key head are summed."""
        block = block.unflatten(1, (packed.shape[1], -1)).sum(2)
        index, valid = self.index(self.k_start, self.len_kv, self.max_kv)
        packed.index_add_(0, index, block.transpose(1, 2)[valid])

    def index(self, start: Tensor, length: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return (packed row of each row that exists, [sequences, rows] whether it does)."""
        place = torch.arange(rows, device=start.device)
        valid = place < length[:, None]
        return (start[:, None] + place)[valid], valid


def _rounded_p(p: Tensor) -> Tensor:
    """Return probabilities as e4m3 numbers times 2**-8."""
    return (256 * p).float().clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(p.dtype) / 256


def _rounded_squares(ds: Tensor) -> Tensor:
    """Return dS [..., rows, columns] as e4m3 numbers with one scale per 32 x 32 square."""
    squares = ds.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., rows/32, 32, columns/32, 32]
    codes = scale_codes(magnitude(magnitude(squares, -1), -2))[..., :, None, :, None]
    values = encode(squares, codes).float() * scale_values(codes)
    return values.flatten(-4, -3).flatten(-2).to(ds.dtype)
