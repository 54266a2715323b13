"""Two layers ready to drop into a model: self attention over jagged sequences, and pooling by learned seed queries (PMA).

Both take packed tensors [total, dim] with offsets [B+1], or a torch nested tensor [B, j, dim] of layout torch.jagged,
and never pad. PMA is "pooling by multihead attention" of the Set Transformer (Lee et al., 2019): a few learned queries
are shared by all sequences, and each sequence gets one output row per query.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

from jfa.attention import Plan, jagged_flash_attention
from jfa.attention.arguments import MAX_HEAD_DIM, check_precision
from jfa.kernels.registry import check_name
from jfa.layout import from_nested, to_nested
from jfa.masks import Band
from jfa.mxfp8 import BlockScaled


class JaggedSelfAttention(nn.Module):
    """Multi-head self attention inside each sequence of a jagged batch.

    Args:
        dim: width of the input and the output.
        num_heads: query heads; ``dim`` must be a multiple of it.
        num_kv_heads: key/value heads, a divisor of ``num_heads`` (grouped-query attention); as many as query heads by default.
        causal, window_size: the mask, as :func:`jfa.jagged_flash_attention` takes them.
        bias: whether the projections have one.
        backend: see :func:`jfa.explain`.
        precision: as :func:`jfa.jagged_flash_attention` takes it.

    Shapes: x [total, dim] with offsets [B+1] int32 -> [total, dim]; or x nested [B, j, dim] -> nested [B, j, dim].
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool | str = False,
        window_size: int | tuple[int, int] | None = None,
        bias: bool = True,
        backend: str = "auto",
        precision: str | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(dim, num_heads, num_kv_heads)
        Band.make(causal, window_size)
        check_name(backend)
        check_precision(precision)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.causal, self.window_size, self.backend, self.precision = causal, window_size, backend, precision
        self.to_qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self, x: Tensor, offsets: Tensor | None = None, max_seq_len: int | None = None, plan: Plan | None = None
    ) -> Tensor:
        """Attend; ``max_seq_len`` is a hint, ``plan`` tile lists built once for several layers (:func:`jfa.plan`)."""
        x, offsets, nested = _packed(x, offsets, "x")
        heads = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        out = jagged_flash_attention(
            q,
            k,
            v,
            offsets,
            offsets,
            max_seq_len,
            max_seq_len,
            causal=self.causal,
            window_size=self.window_size,
            backend=self.backend,
            plan=plan,
            precision=self.precision,
        )
        out = self.to_out(out.flatten(1))
        return to_nested(out, offsets) if nested else out

    def extra_repr(self) -> str:
        """Say what print(module) shows."""
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, causal={self.causal}, window_size={self.window_size}"


class PMA(nn.Module):
    """Pool each sequence to ``num_seeds`` rows by attention with learned seed queries, shared by all sequences.

    The seeds go into the kernel once ([num_seeds, H, D]), never copied per sequence; their gradient is the sum over sequences.
    An empty sequence pools to the output projection of 0.

    Args:
        dim: width of the input and the output.
        num_heads: heads; ``dim`` must be a multiple of it.
        num_seeds: learned queries.
        num_kv_heads: key/value heads, a divisor of ``num_heads``.
        bias: whether the projections have one.
        backend: see :func:`jfa.explain`.
        precision: as :func:`jfa.jagged_flash_attention` takes it.

    Shapes: x [total, dim] with offsets [B+1] int32, or nested [B, j, dim] -> [B, num_seeds, dim].
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        num_kv_heads: int | None = None,
        *,
        bias: bool = True,
        backend: str = "auto",
        precision: str | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(dim, num_heads, num_kv_heads)
        check_name(backend)
        check_precision(precision)
        _check_whole("num_seeds", num_seeds)
        if num_seeds < 1:
            raise ValueError(f"num_seeds must be at least 1, got {num_seeds}")
        self.num_heads, self.num_kv_heads, self.head_dim, self.backend = (
            num_heads,
            num_kv_heads,
            dim // num_heads,
            backend,
        )
        self.precision = precision
        self.seeds = nn.Parameter(torch.empty(num_seeds, num_heads, self.head_dim))
        self.to_kv = nn.Linear(dim, 2 * num_kv_heads * self.head_dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)
        nn.init.normal_(self.seeds)

    def forward(
        self, x: Tensor, offsets: Tensor | None = None, max_seq_len: int | None = None, plan: Plan | None = None
    ) -> Tensor:
        """Pool; ``max_seq_len`` is a hint, ``plan`` tile lists built once for several layers (:func:`jfa.plan`)."""
        x, offsets, _ = _packed(x, offsets, "x")
        k, v = self.to_kv(x).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        out = jagged_flash_attention(
            self.seeds.to(k.dtype),
            k,
            v,
            None,
            offsets,
            None,
            max_seq_len,
            broadcast_q=True,
            backend=self.backend,
            plan=plan,
            precision=self.precision,
        )
        return self.to_out(out.flatten(1)).unflatten(0, (-1, self.seeds.shape[0]))

    def extra_repr(self) -> str:
        """Say what print(module) shows."""
        return f"seeds={self.seeds.shape[0]}, heads={self.num_heads}, kv_heads={self.num_kv_heads}"


def _check_heads(dim: int, num_heads: int, num_kv_heads: int) -> None:
    for name, number in (("dim", dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        _check_whole(name, number)
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise ValueError(f"dim ({dim}) must be a positive multiple of num_heads ({num_heads})")
    if dim // num_heads > MAX_HEAD_DIM:
        raise ValueError(f"dim / num_heads is the head dim and must be at most {MAX_HEAD_DIM}, got {dim} / {num_heads}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")


def _check_whole(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {number!r}")


def _packed(x: Tensor, offsets: Tensor | None, name: str) -> tuple[Tensor, Tensor, bool]:
    """Return (values [total, dim], offsets, was it nested)."""
    if not isinstance(x, Tensor):
        hint = "; with precision='mxfp8' the layer encodes what it projects" if isinstance(x, BlockScaled) else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")
    if x.is_nested:
        values, offsets = from_nested(x)
        return values, offsets, True
    if offsets is None:
        raise TypeError(f"offsets is missing: it may be left out only if {name} is a nested tensor")
    if x.ndim != 2:
        raise ValueError(f"{name} must be [total, dim] or a nested tensor [B, j, dim], got shape {tuple(x.shape)}")
    return x, offsets, False
