"""Other attention implementations behind one small interface, each with a sentence where it cannot run here.

A peer is a function ``build(inputs) -> call``; ``call()`` runs one forward and returns the packed output, differentiable
with respect to inputs.query, key and value. A peer that lacks a feature raises :class:`Unavailable`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from jfa.attention import jagged_flash_attention
from jfa.bench.shapes import BLOCK, Inputs
from jfa.block_sparse import dense_mask, grid_of
from jfa.layout import pad, unpad

Call = Callable[[], Tensor]


class Unavailable(Exception):
    """Raised with the reason why a peer cannot run a shape here."""


def jfa(inputs: Inputs, backend: str = "auto", **options: object) -> Call:
    """Return this project's op, tile lists built in every call; ``options`` are passed to it
    (``deterministic=True``)."""
    shape = inputs.shape
    return lambda: jagged_flash_attention(
        *inputs.arguments,
        broadcast_q=bool(shape.shared_q),
        causal=shape.causal,
        window_size=shape.window_size,
        backend=backend,
        block_lists=inputs.block_lists,
        **options,
    )


def selection(inputs: Inputs) -> Call:
    """Return the choice of the blocks that the op's calls above walk: pooled scores and lists, without attention."""
    if inputs.block_lists is None:
        raise Unavailable("the shape has no block lists")
    return inputs.select


def dense_only(build: Callable[[Inputs], Call]) -> Callable[[Inputs], Call]:
    """Return a peer that says so where a shape has block lists, which it cannot walk."""

    @functools.wraps(build)
    def checked(inputs: Inputs) -> Call:
        if inputs.block_lists is not None:
            raise Unavailable("knows no block lists for packed sequences")
        return build(inputs)

    return checked


@dense_only
def fa2(inputs: Inputs) -> Call:
    """Return FlashAttention 2 as PyTorch ships it: torch.nn.attention.varlen.varlen_attn."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable("this PyTorch has no torch.nn.attention.varlen") from error
    shape, known = inputs.shape, inspect.signature(varlen_attn).parameters
    options: dict = {}
    if shape.heads != shape.kv_heads:
        if "enable_gqa" not in known:
            raise Unavailable("varlen_attn of this PyTorch knows no grouped heads")
        options["enable_gqa"] = True
    if "window_size" in known:
        window = shape.window_size
        options["window_size"] = (-1, 0) if shape.causal else (-1, -1) if window is None else (window, window)
    elif shape.window_size is not None:
        raise Unavailable("varlen_attn of this PyTorch knows no window")
    else:
        options["is_causal"] = shape.causal

    def call() -> Tensor:
        query, query_offset = inputs.expanded_query()
        return varlen_attn(
            query, inputs.key, inputs.value, query_offset, inputs.key_offset, inputs.max_q, inputs.max_kv, **options
        )

    return call


@dense_only
def fa4(inputs: Inputs) -> Call:
    """Return FlashAttention 4 (package flash-attn-4)."""
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable("flash-attn-4 is not installed") from error
    shape = inputs.shape
    window = (None, None) if shape.window_size is None else (shape.window_size, shape.window_size)

    def call() -> Tensor:
        query, query_offset = inputs.expanded_query()
        out = flash_attn_varlen_func(
            query,
            inputs.key,
            inputs.value,
            cu_seqlens_q=query_offset,
            cu_seqlens_k=inputs.key_offset,
            max_seqlen_q=inputs.max_q,
            max_seqlen_k=inputs.max_kv,
            causal=shape.causal,
            window_size=window,
        )
        return out[0] if isinstance(out, tuple) else out

    return call


def flex(inputs: Inputs) -> Call:
    """Return FlexAttention, compiled, with a block mask by sequence number; the block mask is built beforehand, not timed.

    Block lists become a block mask of the same blocks.
    """
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask

    torch._functorch.config.donated_buffer = (
        False  # else its backward runs only once per forward, and the timing keeps the graph
    )
    if inputs.block_lists is not None:
        return _flex_over_blocks(inputs)
    shape = inputs.shape
    query, query_offset = inputs.expanded_query()
    q_id, q_pos = _numbers(query_offset, query.shape[0])
    k_id, k_pos = _numbers(inputs.key_offset, inputs.key.shape[0])
    lengths = inputs.key_offset.diff() - query_offset.diff()

    def mask(b, h, i, j):
        keep = q_id[i] == k_id[j]
        if shape.causal:
            keep = keep & (k_pos[j] <= q_pos[i] + lengths[q_id[i]])
        if shape.window_size is not None:
            keep = keep & ((k_pos[j] - q_pos[i]).abs() <= shape.window_size)
        return keep

    compiled_mask = torch.compile(create_block_mask)
    block_mask = compiled_mask(mask, None, None, query.shape[0], inputs.key.shape[0], device=query.device)
    return _flex_call(inputs, block_mask)


def _flex_over_blocks(inputs: Inputs) -> Call:
    """Return FlexAttention with the block mask of an input's block lists."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape, rows, chosen = inputs.shape, inputs.key.shape[0], _chosen_blocks(inputs)
    mask = lambda b, h, i, j: chosen[h, i // BLOCK, j // BLOCK]
    block_mask = torch.compile(create_block_mask)(mask, None, shape.heads, rows, rows, device=chosen.device)
    return _flex_call(inputs, block_mask)


def _flex_call(inputs: Inputs, block_mask) -> Call:
    """Return FlexAttention, compiled, on packed tensors as a batch of one."""
    from torch.nn.attention.flex_attention import flex_attention

    run = torch.compile(flex_attention)

    def call() -> Tensor:
        query, _ = inputs.expanded_query()
        packed = (x.transpose(0, 1).unsqueeze(0) for x in (query, inputs.key, inputs.value))
        out = run(*packed, block_mask=block_mask, enable_gqa=inputs.shape.heads != inputs.shape.kv_heads)
        return out.squeeze(0).transpose(0, 1)

    return call


def _chosen_blocks(inputs: Inputs) -> Tensor:
    """Return [H, blocks, blocks] bool over the packed rows: their grid is the lists' grid, as the lengths are whole blocks."""
    offsets, rows = inputs.key_offset, inputs.key.shape[0]
    seq = torch.searchsorted(offsets[1:].long(), torch.arange(0, rows, BLOCK, device=offsets.device), right=True)
    local = torch.arange(rows // BLOCK, device=offsets.device) - offsets.long()[seq] // BLOCK
    of_sequence = dense_mask(inputs.block_lists, grid_of(offsets, rows, BLOCK), rows // BLOCK)
    table = (seq[:, None] == seq) & of_sequence[:, seq, local][:, :, local]
    return table.expand(inputs.shape.heads, -1, -1).contiguous()


def _numbers(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return ([rows] sequence number, [rows] position inside it)."""
    row = torch.arange(rows, device=offsets.device)
    number = torch.searchsorted(offsets[1:].long(), row, right=True)
    return number, row - offsets[number]


@dense_only
def sdpa(inputs: Inputs) -> Call:
    """Return PyTorch's scaled_dot_product_attention on the padded batch, with a mask of real keys; padding is part of the time."""
    from torch.nn.functional import scaled_dot_product_attention

    shape = inputs.shape
    len_q, len_kv = (x.to(inputs.key.device) for x in shape.lengths())
    batches, scores = len_kv.numel(), len_kv.numel() * inputs.max_q * inputs.max_kv
    full = bool((len_q == inputs.max_q).all() and (len_kv == inputs.max_kv).all())
    if shape.window_size is not None or (shape.causal and not full) or (not full and scores > 1 << 34):
        raise Unavailable("padded SDPA would need a mask too large to form")
    kv_row = torch.arange(inputs.max_kv, device=len_kv.device)
    mask = None if full else (kv_row < len_kv[:, None])[:, None, None, :]

    def call() -> Tensor:
        query, query_offset = inputs.expanded_query()
        q = pad(query, query_offset, inputs.max_q).transpose(1, 2)
        k, v = (pad(x, inputs.key_offset, inputs.max_kv).transpose(1, 2) for x in (inputs.key, inputs.value))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
        )
        return unpad(out.transpose(1, 2).reshape(batches, inputs.max_q, shape.heads, -1), query_offset, query.shape[0])

    return call


def cudnn(inputs: Inputs) -> Call:
    """Return the cuDNN backend of scaled_dot_product_attention: dense shapes only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = sdpa(inputs)
    padded_rows = inputs.max_kv * (inputs.key_offset.numel() - 1)
    if inputs.shape.len_q is not None or inputs.shape.shared_q or padded_rows != inputs.key.shape[0]:
        raise Unavailable("through PyTorch cuDNN takes dense batches only")

    def with_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return with_cudnn


def from_path(path: str) -> Callable[[Inputs], Call]:
    """Return a peer from the user's Python file or package (tlx_jfa=PATH) that defines jagged_flash_attention as this project does.

    The file's folder joins sys.path, for the modules beside it. A function that takes output_offset gets it with a shared query.
    """

    @dense_only
    def build(inputs: Inputs) -> Call:
        file = Path(path)
        file = file / "__init__.py" if file.is_dir() else file
        if not file.exists():
            raise Unavailable(f"{path} does not exist")
        function, shape = _load(file).jagged_flash_attention, inputs.shape
        if shape.causal:
            raise Unavailable("a peer from a path is not run with causal masks")
        options = {"broadcast_q": bool(shape.shared_q), "window_size": shape.window_size}
        if shape.shared_q and "output_offset" in inspect.signature(function).parameters:
            options["output_offset"] = inputs.expanded_query()[1]

        def call() -> Tensor:
            out = function(*inputs.arguments, **options)
            return out[0] if isinstance(out, tuple | list) else out

        return call

    return build


def _load(file: Path):
    """Return the module in a file outside of any package on the path."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"jfa_peer_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def on_cpu(inputs: Inputs) -> Call:
    """Stand in for a peer that a CPU cannot run."""
    raise Unavailable("runs on a CUDA GPU only")


PEERS = {"fa2": fa2, "fa4": fa4, "flex": flex, "sdpa": sdpa, "cudnn": cudnn}
