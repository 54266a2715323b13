"""Check and normalize the arguments of a call: tensors, offsets, nested tensors, autocast, masks, hints.

Nothing here reads a tensor's contents except :func:`check_contents`.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from jfa.block_sparse import BlockLists, check_lists
from jfa.kernels.base import Problem
from jfa.layout import check_offsets as check_offset_tensor
from jfa.layout import from_nested
from jfa.masks import Band
from jfa.mxfp8 import BLOCK, BlockScaled, num_blocks

DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
MAX_HEAD_DIM = 256
LARGEST_INT32 = 2**31 - 1
AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)  # fp64 stays
QUANTIZED_AXES = {
    "query": "head_dim",
    "key": "head_dim",
    "value": "tokens",
}  # the one that each one's product contracts


# ------------------------------------------------------------------------------------------------------- without contents
def check_arguments(
    query, key, value, query_offset, key_offset, broadcast_q=False, output_offset=None, device=None
) -> None:
    """Check types, layouts, shapes, dtypes, devices and head counts; no tensor's contents are read.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, BlockScaled):
            _check_quantized(name, x)
        else:
            _check_tensor(name, x)
    if names := quantized_names(query, key, value):
        _check_with_quantized(names, query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but query is {query.dtype} on {query.device}")
        if x.shape[0] > LARGEST_INT32:
            raise ValueError(
                f"{name} has {x.shape[0]} rows; offsets are int32, so at most {LARGEST_INT32} can be addressed"
            )
    _check_shapes(query, key, value)
    _check_offsets(
        query, query_offset, key_offset, broadcast_q, output_offset, query.device if device is None else device
    )


def _check_tensor(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    if x.ndim != 3:
        raise ValueError(f"{name} must be 3-D [rows, heads, head_dim], got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32 (on the CPU also float64), got {x.dtype}")


def _check_quantized(name: str, x: BlockScaled) -> None:
    """Check an input in MXFP8: its parts belong together, and its groups lie along the axis that its product contracts."""
    _check_parts(name, x)
    if x.axis != QUANTIZED_AXES[name]:
        raise ValueError(
            f"{name} is quantized along {x.axis!r}, but its product contracts {QUANTIZED_AXES[name]!r}: "
            f"quantize_jagged({name}, offsets, {QUANTIZED_AXES[name]!r})"
        )
    _check_encoding(name, x)
    if x.other is not None:
        _check_other(name, x)
    if x.source is not None and (not isinstance(x.source, Tensor) or x.source.shape != x.shape):
        what = tuple(x.source.shape) if isinstance(x.source, Tensor) else type(x.source).__name__
        raise ValueError(f"{name}.source must be the tensor {tuple(x.shape)} that was quantized, got {what}")


def _check_other(name: str, x: BlockScaled) -> None:
    """Check the encoding along the other axis: it is of as many values, in the same sequences."""
    other, called = x.other, f"{name}.other"
    if not isinstance(other, BlockScaled):
        raise TypeError(f"{called} must come from quantize_jagged, got {type(other).__name__}")
    _check_parts(called, other)
    if other.axis == x.axis:
        raise ValueError(f"{called} is quantized along {x.axis!r}, as {name} is: it must be the other axis")
    _check_encoding(called, other)
    if other.shape != x.shape or other.device != x.device or other.offsets.shape != x.offsets.shape:
        raise ValueError(
            f"{called} is of {tuple(other.shape)} in {other.offsets.numel() - 1} sequences on {other.device}, "
            f"but {name} of {tuple(x.shape)} in {x.offsets.numel() - 1} on {x.device}"
        )


def _check_parts(name: str, x: BlockScaled) -> None:
    parts = dict(data=x.data, scales=x.scales, offsets=x.offsets)
    for part, tensor in parts.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}.{part} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != x.data.device:
            raise ValueError(f"{name}.{part} is on {tensor.device}, but {name}.data is on {x.data.device}")


def _check_encoding(name: str, x: BlockScaled) -> None:
    """Check types and shapes of one encoding."""
    if x.length is not None:
        raise ValueError(f"{name} is quantized with length={x.length}, which places outputs: leave length out")
    if x.data.dtype != torch.float8_e4m3fn or x.data.ndim != 3:
        raise ValueError(f"{name}.data must be 3-D float8_e4m3fn, got {x.data.dtype} {tuple(x.data.shape)}")
    check_offset_tensor(x.offsets, name=f"{name}.offsets", contents=False)
    rows, heads, dim = x.shape
    tiles = (heads, num_blocks(rows, x.offsets.numel() - 1), -(-dim // BLOCK), 32, 16)
    if x.scales.dtype != torch.uint8 or tuple(x.scales.shape) != tiles:
        raise ValueError(
            f"{name}.scales must be uint8 {tiles} for data {tuple(x.shape)} and {x.offsets.numel() - 1} sequences, "
            f"got {x.scales.dtype} {tuple(x.scales.shape)}"
        )


def quantized_names(query, key, value) -> tuple[str, ...]:
    """Return which of the three come in MXFP8, as :class:`jfa.mxfp8.BlockScaled`."""
    given = (("query", query), ("key", key), ("value", value))
    return tuple(name for name, x in given if isinstance(x, BlockScaled))


def _check_with_quantized(names: tuple[str, ...], **inputs) -> None:
    """Check what comes in 16 bits next to inputs in MXFP8, and that a gradient can be had if one is wanted."""
    one_way = one_way_names(**inputs)
    company = f"next to quantized {' and '.join(names)}"
    for name, x in inputs.items():
        if name not in names and x.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, or quantized, too, {company}; got {x.dtype}")
        if not torch.is_grad_enabled():
            continue
        if name in names and x.data.requires_grad:
            raise ValueError(
                f"{name}.data requires a gradient, but elements in e4m3 get none: quantize_jagged(x, offsets, axis, both=True) "
                "of a tensor x that requires one passes it on to x"
            )
        if one_way and needs_gradient(x):
            raise ValueError(
                f"{name} requires a gradient {company}, but a backward needs {' and '.join(one_way)} along the other axis, too: "
                "quantize_jagged(x, offsets, axis, both=True); or use torch.no_grad(), or bfloat16 inputs with precision='mxfp8'"
            )


def needs_gradient(x: Tensor | BlockScaled) -> bool:
    """Return whether an input, or what it was encoded from, requires a gradient."""
    source = x.source if isinstance(x, BlockScaled) else x
    return source is not None and source.requires_grad


def one_way_names(query, key, value) -> tuple[str, ...]:
    """Return which of the three come in MXFP8 along the forward's axis only."""
    given = (("query", query), ("key", key), ("value", value))
    return tuple(name for name, x in given if isinstance(x, BlockScaled) and x.other is None)


def unwrap_quantized(query, key, value, query_offset, key_offset, broadcast_q, precision):
    """Return the offsets and the precision of a call, where they are left out those of its inputs in MXFP8, if it has some.

    Raises:
        ValueError: another number of sequences than an input's scales were made for.
    """
    if not (isinstance(query, BlockScaled) or isinstance(key, BlockScaled) or isinstance(value, BlockScaled)):
        return query_offset, key_offset, precision
    names = quantized_names(query, key, value)
    if key_offset is None:
        key_offset = next((x.offsets for x in (key, value) if isinstance(x, BlockScaled)), None)
    if query_offset is None and "query" in names and broadcast_q is False:
        query_offset = query.offsets
    for name, x, offsets in (("query", query, query_offset), ("key", key, key_offset), ("value", value, key_offset)):
        if name not in names or not isinstance(x.offsets, Tensor):
            continue
        wanted = (
            2 if name == "query" and broadcast_q is True else offsets.numel() if isinstance(offsets, Tensor) else None
        )
        if wanted is not None and x.offsets.numel() != wanted:
            raise ValueError(
                f"{name} is quantized for {x.offsets.numel() - 1} sequences, but the call has {wanted - 1}: "
                "its groups begin where its sequences do"
            )
    return query_offset, key_offset, "mxfp8" if precision is None else precision


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    (_, heads, dim), (rows_kv, kv_heads, key_dim), (value_rows, value_heads, value_dim) = (
        query.shape,
        key.shape,
        value.shape,
    )
    if rows_kv != value_rows or kv_heads != value_heads:
        raise ValueError(
            f"key and value must have the same rows and heads, got {tuple(key.shape[:2])} and {tuple(value.shape[:2])}"
        )
    if dim != key_dim:
        raise ValueError(f"query and key must have the same head dim, got {dim} and {key_dim}")
    for name, size in (("query", dim), ("value", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {size}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query's heads ({heads}) must be a multiple of key's heads ({kv_heads})")


def _check_offsets(query, query_offset, key_offset, broadcast_q: bool, output_offset, device: torch.device) -> None:
    if key_offset is None:
        raise TypeError("key_offset is missing: it may be left out only with nested tensors")
    check_offset_tensor(key_offset, name="key_offset", contents=False)
    batches = key_offset.shape[0] - 1
    if broadcast_q:
        if query_offset is not None:
            check_offset_tensor(query_offset, name="query_offset", contents=False)
            if query_offset.shape[0] != 2:
                raise ValueError(
                    "query_offset must be None or [0, Lq] with broadcast_q, because the Lq query rows are one sequence that all "
                    f"share; got {query_offset.shape[0]} entries (the output's rows are placed by output_offset)"
                )
        if output_offset is not None:
            check_offset_tensor(output_offset, name="output_offset", batches=batches, contents=False)
    else:
        if output_offset is not None:
            raise ValueError("output_offset needs broadcast_q=True")
        if query_offset is None:
            raise TypeError("query_offset is missing: it may be left out only with nested tensors or broadcast_q")
        if query_offset is not key_offset:
            check_offset_tensor(query_offset, name="query_offset", contents=False)
            if query_offset.shape[0] != batches + 1:
                raise ValueError(f"query_offset has {query_offset.shape[0] - 1} sequences, key_offset {batches}")
    for name, x in (("key_offset", key_offset), ("query_offset", query_offset), ("output_offset", output_offset)):
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}, but query is on {device}")


def check_switches(broadcast_q, deterministic, return_lse=False, check_offsets=None) -> None:
    """Raise TypeError unless each switch is a bool (``check_offsets``: or None)."""
    for name, value in (("broadcast_q", broadcast_q), ("deterministic", deterministic), ("return_lse", return_lse)):
        if value is not True and value is not False:
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if check_offsets not in (None, True, False):
        raise TypeError(f"check_offsets must be True, False or None, got {check_offsets!r}")


def precision_of(precision: str | None, query: Tensor, block_lists: BlockLists | None = None) -> str:
    """Return the precision as a problem holds it: "" for the inputs' own, or "mxfp8".

    Raises:
        TypeError, ValueError: it is neither None nor "mxfp8", or the inputs do not go with it.
    """
    check_precision(precision)
    if precision is None:
        return ""
    if query.dtype != torch.bfloat16:
        raise TypeError(f"precision='mxfp8' takes bfloat16 inputs, which it encodes itself; query is {query.dtype}")
    if block_lists is not None:
        raise ValueError("precision='mxfp8' does not take block_lists: no backend has both")
    return precision


def check_precision(precision: str | None) -> None:
    """Raise TypeError or ValueError unless ``precision`` is None or "mxfp8"."""
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision must be None or 'mxfp8', got {precision!r}")
    if precision not in (None, "mxfp8"):
        raise ValueError(f"precision must be None (the inputs' own) or 'mxfp8', got {precision!r}")


def maximum(name: str, told) -> int:
    """Return a length hint as an int; 0 means that none was given.

    Raises:
        TypeError, ValueError: it is no whole number, is negative, or does not fit int32.
    """
    if told is None:
        return 0
    if not isinstance(told, int | torch.SymInt):
        whole = isinstance(told, Tensor) and told.numel() == 1 and not (told.is_floating_point() or told.is_complex())
        if not (whole or isinstance(told, numbers.Integral)):
            raise TypeError(f"{name} must be an int, got {told!r}")
        told = int(told)
    if told < 0:
        raise ValueError(f"{name} must not be negative, got {told}")
    if told > LARGEST_INT32:
        raise ValueError(f"{name} must fit int32, as offsets do: at most {LARGEST_INT32}, got {told}")
    return told


def scale_of(sm_scale: float | None, query: Tensor) -> float:
    """Return the factor on the scores: ``sm_scale``, or 1/sqrt(D) where it is None."""
    if sm_scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if isinstance(sm_scale, Tensor) and sm_scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("sm_scale requires a gradient, but gets none: multiply the query by it instead")
    if isinstance(sm_scale, str | bytes | bool) or not hasattr(sm_scale, "__float__"):
        raise TypeError(f"sm_scale must be a number, got {sm_scale!r}")
    try:
        sm_scale = float(sm_scale)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise type(error)(f"sm_scale must be a number in fp64's range: {error}") from None
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale must be finite, got {sm_scale}")
    return sm_scale


def is_packed(query, key, value) -> bool:
    """Return whether the three are packed tensors as a call takes them: neither nested nor in MXFP8, and not to be cast."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False
    kind = query.device.type
    return kind in ("cuda", "cpu") and not torch.is_autocast_enabled(kind)


def autocast(query, key, value) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three in autocast's type where it is on (fp64 stays)."""
    kind = next((x.device.type for x in (query, key, value) if isinstance(x, Tensor)), "")
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in AUTOCAST else x for x in (query, key, value))


# --------------------------------------------------------------------------------------------------------------- contents
def check_contents(problem: Problem, query_offset: Tensor | None = None) -> None:
    """Read the offsets and say what is wrong with them. Waits for the device.

    Args:
        problem: its offsets may still be int64, so numbers beyond int32 are seen as they are.
        query_offset: what a call with ``broadcast_q`` gave; it must be [0, Lq].

    Raises:
        ValueError: naming the argument; on a GPU also while a CUDA graph is captured, where nothing can be read.
    """
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("check_offsets=True reads the offsets, which a CUDA graph capture does not allow")
    check_offset_tensor(problem.key_offset, problem.rows_kv, name="key_offset")
    _check_maximum("max_seq_len_kv", problem.max_seq_len_kv, problem.key_offset)
    if not problem.broadcast_q:
        check_offset_tensor(problem.query_offset, problem.rows_q, name="query_offset")
        _check_maximum("max_seq_len_q", problem.max_seq_len_q, problem.query_offset)
    check_block_lists(problem, contents=True)
    if not problem.broadcast_q:
        return
    if query_offset is not None and query_offset.tolist() != [0, problem.rows_q]:
        raise ValueError(
            f"query_offset must be None or [0, {problem.rows_q}] with broadcast_q, got {query_offset.tolist()}; "
            "the output's rows are placed by output_offset"
        )
    if problem.output_offset is not None:
        _check_slots(problem)


def check_quantized_offsets(problem: Problem, query, key, value) -> None:
    """Read offsets of inputs in MXFP8 and compare them with the call's. Waits for the device.

    Raises:
        ValueError: naming the input whose groups begin elsewhere than the call's sequences.
    """
    own = problem.key_offset.new_tensor([0, problem.rows_q]) if problem.broadcast_q else problem.query_offset
    for name, x, offsets in (
        ("query", query, own),
        ("key", key, problem.key_offset),
        ("value", value, problem.key_offset),
    ):
        if not isinstance(x, BlockScaled):
            continue
        for called, encoding in ((name, x), (f"{name}.other", x.other)):
            if encoding is None or encoding.offsets is offsets:
                continue
            if not torch.equal(encoding.offsets.long(), offsets.long()):
                raise ValueError(
                    f"{called} is quantized for other offsets than the call's, so its groups lie across sequences: "
                    f"{encoding.offsets.tolist()} and {offsets.tolist()}"
                )


def check_block_lists(problem: Problem, contents: bool = False) -> None:
    """Check a problem's block lists, if it has some: types, shapes and devices, and with ``contents`` also what they list.

    Raises:
        TypeError, ValueError: naming block_lists.
    """
    if problem.block_lists is not None:
        check_lists(
            problem.block_lists,
            None if problem.broadcast_q else problem.query_offset,
            problem.key_offset,
            total_q=problem.rows_q,
            total_kv=problem.rows_kv,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            band=problem.band,
            broadcast_q=problem.broadcast_q,
            contents=contents,
        )


def _check_maximum(name: str, told: int, offsets: Tensor) -> None:
    longest = int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0
    if 0 < told < longest:
        raise ValueError(f"{name}={told} is less than the longest sequence, {longest}")


def _check_slots(problem: Problem) -> None:
    starts = problem.output_offset[:-1].tolist()
    for b, start in enumerate(starts):
        if start < 0 or start + problem.rows_q > problem.rows_out:
            raise ValueError(
                f"output_offset[{b}] = {start}: {problem.rows_q} rows from there are not inside the output's {problem.rows_out}"
            )
    ordered = sorted(starts)
    if any(b - a < problem.rows_q for a, b in zip(ordered, ordered[1:])):
        raise ValueError(f"output_offset gives two sequences the same rows: each needs {problem.rows_q} of its own")


def narrowed(offsets: Tensor | None) -> Tensor | None:
    """Return offsets as kernels read them: int32, contiguous. Numbers beyond int32 become its ends, never another valid offset."""
    if offsets is None:
        return None
    if offsets.dtype != torch.int32:
        offsets = offsets.clamp(-LARGEST_INT32 - 1, LARGEST_INT32).to(torch.int32)
    return offsets.contiguous()


# ---------------------------------------------------------------------------------------------------------- nested tensors
def unwrap_nested(query, key, value, query_offset, key_offset):
    """Return packed tensors and their offsets of nested ones, and ``restore``, which nests an output as the query was (or None)."""
    if not (is_nested(query) or is_nested(key) or is_nested(value)):
        return query, key, value, query_offset, key_offset, None
    restore = None
    if is_nested(query):
        source = query
        query, query_offset = _packed_of("query", query)
        offsets = query_offset
        transposed = source._ragged_idx == 2  # [B, H, j, D], as scaled_dot_product_attention takes it

        def restore(out):
            out = torch.nested.nested_tensor_from_jagged(out, offsets=offsets)
            return out.transpose(1, 2) if transposed else out

    given = key, value
    if is_nested(key):
        key, key_offset = _packed_of("key", key)
    if is_nested(value):
        value, value_offset = _packed_of("value", value)
        if is_nested(given[0]):
            _check_same_lengths(*(x.offsets() for x in given), key_offset, value_offset)
    return query, key, value, query_offset, key_offset, restore


def is_nested(x) -> bool:
    """Return whether ``x`` is a nested tensor."""
    return isinstance(x, Tensor) and x.is_nested


def _packed_of(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    if nested.layout != torch.jagged:
        raise TypeError(f"{name} is a nested tensor of layout {nested.layout}; only layout=torch.jagged is packed")
    return from_nested(nested)


def _check_same_lengths(key_source: Tensor, value_source: Tensor, key_offset: Tensor, value_offset: Tensor) -> None:
    """Raise ValueError where key and value differ in sequence lengths.

    One shared offsets tensor guarantees that they are equal; otherwise they are compared on the CPU only, where comparing does
    not block.
    """
    if key_source is value_source or torch.compiler.is_compiling() or key_offset.device.type != "cpu":
        return
    if not torch.equal(key_offset, value_offset):
        raise ValueError("value is a nested tensor with other sequence lengths than key")


# ----------------------------------------------------------------------------------------------------------------- problem
def make_problem(
    q,
    k,
    v,
    query_offset,
    key_offset,
    output_offset,
    sm_scale,
    band: Band,
    broadcast_q,
    deterministic,
    max_q,
    max_kv,
    block_lists: BlockLists | None = None,
    precision: str = "",
) -> Problem:
    """Return the normalized form of a call whose arguments have passed :func:`check_arguments`."""
    batches = key_offset.shape[0] - 1
    rows_q, heads, dim = q.shape
    quantized = quantized_names(q, k, v)
    return Problem(
        num_batches=batches,
        num_heads=heads,
        num_kv_heads=k.shape[1],
        head_dim=dim,
        head_dim_v=v.shape[2],
        rows_q=rows_q,
        rows_kv=k.shape[0],
        rows_out=batches * rows_q if broadcast_q else rows_q,
        dtype=q.dtype,
        device=key_offset.device,
        sm_scale=sm_scale,
        band=band,
        broadcast_q=broadcast_q,
        deterministic=deterministic,
        query_offset=key_offset if broadcast_q else query_offset,
        key_offset=key_offset,
        output_offset=output_offset if broadcast_q else None,
        max_seq_len_q=rows_q if broadcast_q else max_q,
        max_seq_len_kv=max_kv,
        block_lists=block_lists,
        precision=precision,
        quantized=quantized,
        one_way=one_way_names(q, k, v) if quantized else (),
    )
