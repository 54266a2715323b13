"""Named problems to measure: seeded lengths, heads, mask; with exact FLOPs and the minimum of bytes.

Sources: the PMA, self, cross and GQA shapes are the ones of this project's reference measurements on an H200; `gdpa-*` from the
public GDPA blog (B 1152, H 4, d 128); `ragged-*` from TritonBench's ragged attention (meta-pytorch/tritonbench); `tiny-8192`, very
many very short sequences, from flash-attention's pull request 2520, where a scheduler that looks at every batch was 73x slower;
`sparse-50` and `sparse-25` keep that share of the 128 x 128 blocks of `sparse-100` (:func:`jfa.block_sparse.select_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jfa.block_sparse import BlockLists, select_blocks, share_of
from jfa.layout import log_uniform_lengths, offsets_from_lengths, pareto_lengths, sparsity_lengths
from jfa.masks import Band, allowed_pairs, attention_flops

BLOCK = 128  # rows per block of the shapes with block lists


@dataclass(frozen=True)
class Shape:
    """One problem. Lengths come from functions, so tensors are made only when it is measured."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    len_kv: Callable[[], Tensor]
    len_q: Callable[[], Tensor] | None = None  # None: as len_kv (self attention)
    shared_q: int = 0  # Lq of a shared query; 0: every sequence has its own queries
    causal: bool = False
    window_size: int | None = None
    sparse: float = (
        0.0  # share of each query block's key blocks that block lists keep; 0: no lists. Lengths are whole blocks.
    )

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return ([B] query lengths, [B] key lengths)."""
        kv = self.len_kv()
        if self.shared_q:
            return torch.full_like(kv, self.shared_q), kv
        return (self.len_q() if self.len_q else kv), kv

    @property
    def band(self) -> Band:
        """The mask."""
        return Band.make(self.causal, self.window_size)

    def flops(self, backward: bool = False) -> int:
        """Return the FLOPs of the matrix products over the pairs that count."""
        if self.sparse:
            blocks = self.lengths()[1].long() // BLOCK
            pairs = int((blocks * share_of(self.sparse, blocks)).sum()) * BLOCK**2
        else:
            pairs = int(allowed_pairs(self.band, *self.lengths()).sum())
        return attention_flops(pairs, self.heads, self.head_dim, backward=backward)

    def least_bytes(self, backward: bool = False, itemsize: int = 2) -> int:
        """Return the bytes of every input read once and every output written once (K, V, Q, O; backward also dO, dQ, dK, dV)."""
        q_rows, kv_rows = (int(x.sum()) for x in self.lengths())
        own_q = self.shared_q or q_rows
        q, out, kv = own_q * self.heads, q_rows * self.heads, 2 * kv_rows * self.kv_heads
        words = (2 * q + 2 * out + 2 * kv) if backward else (q + out + kv)
        return words * self.head_dim * itemsize


def _dense(batch: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.full((batch,), length, dtype=torch.int32)


def _self128() -> Tensor:
    return log_uniform_lengths(128, 16, 4096, seed=1)


def _long_blocks() -> Tensor:
    return (log_uniform_lengths(24, 2048, 8192, seed=1) + BLOCK - 1) // BLOCK * BLOCK


_LONG = Shape("sparse-100", 4, 4, 128, _long_blocks)
_SELF = Shape("self", 4, 4, 128, _self128)
_DENSE = Shape("dense", 16, 16, 128, _dense(4, 8192))

_ALL = [
    Shape("pma32", 4, 4, 128, lambda: pareto_lengths(1024, 64, 4096, alpha=1.0, seed=2), shared_q=32),
    Shape("pma128", 4, 4, 128, lambda: pareto_lengths(512, 128, 8192, alpha=1.0, seed=3), shared_q=128),
    _SELF,
    replace(_SELF, name="self-causal", causal=True),
    replace(_SELF, name="self-window", window_size=256),
    Shape(
        "cross",
        4,
        4,
        128,
        lambda: log_uniform_lengths(256, 64, 4096, seed=5),
        lambda: log_uniform_lengths(256, 8, 512, seed=4),
    ),
    replace(_SELF, name="gqa", heads=16),
    replace(_SELF, name="self-d64", heads=8, kv_heads=8, head_dim=64),
    _DENSE,
    replace(_DENSE, name="dense-causal", causal=True),
    Shape("tiny-8192", 12, 12, 128, _dense(8192, 34)),
    *(Shape(f"gdpa-{n}", 4, 4, 128, _dense(1152, n)) for n in (256, 512, 1024, 2048)),
    _LONG,
    *(replace(_LONG, name=f"sparse-{share}", sparse=share / 100) for share in (50, 25)),
    Shape("self-1024", 4, 4, 128, _dense(256, 1024)),
    Shape("self-1024-causal", 4, 4, 128, _dense(256, 1024), causal=True),
    Shape("pma200", 4, 4, 128, _dense(512, 1024), shared_q=200),
    *(Shape(f"ragged-{n}", 4, 4, 128, lambda n=n: sparsity_lengths(128, n, 0.5, seed=6)) for n in (256, 512, 1024)),
]
SHAPES = {shape.name: shape for shape in _ALL}
DEFAULT = ("pma32", "pma128", "self", "self-causal", "self-window", "cross", "gqa", "self-d64", "dense", "dense-causal")
ON_CPU = (
    Shape("tiny-self", 2, 2, 32, lambda: log_uniform_lengths(8, 4, 64, seed=1)),
    Shape("tiny-pma", 2, 2, 32, lambda: pareto_lengths(16, 8, 128, seed=2), shared_q=8),
)


@dataclass
class Inputs:
    """The tensors of a shape on a device; query is [Lq, H, D] where it is shared."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    query_offset: Tensor
    key_offset: Tensor
    max_q: int
    max_kv: int
    block_lists: BlockLists | None = None

    @property
    def arguments(self) -> tuple:
        """The positional arguments of jagged_flash_attention."""
        return self.query, self.key, self.value, self.query_offset, self.key_offset, self.max_q, self.max_kv

    def select(self) -> BlockLists:
        """Select the shape's share of blocks from query and key."""
        q, k, *offsets = self.query, self.key, self.query_offset, self.key_offset
        return select_blocks(q, k, *offsets, ratio=self.shape.sparse, max_seq_len_kv=self.max_kv)

    def expanded_query(self) -> tuple[Tensor, Tensor]:
        """Return (query, query_offset) for peers that know no shared query: B copies of it, as a view where that is possible."""
        if not self.shape.shared_q:
            return self.query, self.query_offset
        batches = self.key_offset.numel() - 1
        copies = self.query.unsqueeze(0).expand(batches, *self.query.shape).flatten(0, 1)
        offsets = torch.arange(batches + 1, device=self.query.device, dtype=torch.int32) * self.shape.shared_q
        return copies, offsets


def make_inputs(shape: Shape, device: str | torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """Return random normal tensors, never zeros."""
    len_q, len_kv = shape.lengths()
    total_q, total_kv = int(len_q.sum()), int(len_kv.sum())
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, shape.head_dim, device=device, dtype=dtype, generator=generator)

    inputs = Inputs(
        shape,
        normal(shape.shared_q or total_q, shape.heads).requires_grad_(),
        normal(total_kv, shape.kv_heads).requires_grad_(),
        normal(total_kv, shape.kv_heads).requires_grad_(),
        normal(total_q, shape.heads),
        offsets_from_lengths([shape.shared_q] if shape.shared_q else len_q, device=device),
        offsets_from_lengths(len_kv, device=device),
        int(len_q.max()),
        int(len_kv.max()),
    )
    return replace(inputs, block_lists=inputs.select()) if shape.sparse else inputs
