"""Small utilities: ranks, clocks, dtypes, warp votes, stochastic rounding, layout diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .. import dtypes, errors
from ..frontend import values
from ..frontend.carry import carries, itself, lanewise
from ..frontend.threads import ThreadScalar, thread_scalar
from ..locations import here, show
from .api import Value, api, begin, integer, plain, running
from .buffers import buffered_tensor

_WARP = 32


@api
def cluster_cta_rank() -> Value:
    """Return this CTA's number in its cluster, over all dimensions."""
    return values.make_scalar(running().cta.rank, tl.int32)


@api
def cluster_size_1d() -> Value:
    """Return how many CTAs the cluster has."""
    return values.make_scalar(len(running().cta.cluster.ctas), tl.int32)


@api
def thread_id(axis: Value) -> Value:
    """Return the index of the thread within its CTA. The emulator works on whole tiles: `frontend/threads.py` says what
    of a thread's own doings it follows (a warning says so too)."""
    axis = plain(axis)
    if axis not in (0, 1, 2):
        raise ValueError(f"thread_id axis must be 0, 1, or 2 but got {axis}")
    task = running()
    task.machine.warn(
        errors.NotSupported(
            "thread_id: the emulator runs tiles, not threads; stores and votes go by thread, everything else as in the first one",
            [f"at {show(here())}"],
            "",
            here(),
        )
    )
    if axis:
        return values.make_scalar(0, tl.int32)
    return thread_scalar(np.arange(_WARP * task.num_warps, dtype=np.int32))


@api
def dtype_of(v: Any) -> Any:
    """Return element type of a block, a pointer, a descriptor or a buffer."""
    if isinstance(v, buffered_tensor):
        return v.dtype
    if isinstance(v, tl.tensor):
        dtype = v.dtype
        return dtype.element_ty if dtype.is_ptr() else dtype
    if hasattr(v, "block_shape"):
        return v.dtype
    raise ValueError(f"dtype_of only works on tensors and tensor descriptors, but got {v}")


@api
def size_of(dtype: Any) -> int:
    """Return bytes of one element."""
    dtype = plain(dtype)
    assert isinstance(dtype, tl.dtype), f"size_of expects a dtype, but got {type(dtype)}"
    return dtype.primitive_bitwidth // 8


@api
def get_fp8_format_name(dtype: Any) -> str:
    """Return "e5m2" or "e4m3"."""
    dtype = plain(dtype)
    assert isinstance(dtype, tl.dtype), f"get_fp8_format_name expects a dtype, but got {type(dtype)}"
    names = {"fp8e5": "e5m2", "fp8e4nv": "e4m3"}
    if dtype.name not in names:
        raise AssertionError(
            f"get_fp8_format_name only supports tl.float8e5 (e5m2) and tl.float8e4nv (e4m3), but got {dtype}"
        )
    return names[dtype.name]


@api
def clock64() -> Value:
    """Return a counter that advances: modelled cycles under the timed policy, operations so far otherwise."""
    task, _, _ = begin("clock64", "")
    machine = task.machine
    machine.stats["clock"] += 1
    now = int(task.time) if machine.timed else sum(machine.stats.values())
    return values.make_scalar(now, tl.int64)


# ---------------------------------------------------------------- warps


@api
def vote_ballot_sync(mask: Value, pred: Value) -> Value:
    """Return every lane's predicate as one bit, for each warp: a block of int32 in the predicate's shape.

    Element i belongs to thread i modulo the task's threads; a thread with several elements votes yes if any of them
    does, and all its elements get its warp's ballot (asked of an H200: tests/gpu/h200_facts.json).
    """
    mask = integer(mask) & 0xFFFFFFFF
    task, _, _ = begin("vote_ballot_sync", "")
    if type(pred) is ThreadScalar:
        return thread_scalar(_ballots(pred.threads != 0, mask))
    if not isinstance(pred, tl.tensor) or not values.is_block(pred):
        return values.make_scalar(int(np.uint32(mask if values.scalar(pred) else 0).view(np.int32)), tl.int32)
    data = values.to_numpy(pred)
    flat = (data != 0).reshape(-1)
    threads = _WARP * task.num_warps
    votes = np.resize(flat, threads) if flat.size < threads else flat.reshape(-1, threads).any(axis=0)
    return values.from_numpy(np.resize(_ballots(votes, mask), flat.size).reshape(data.shape), tl.int32)


def _ballots(votes: np.ndarray, mask: int) -> np.ndarray:
    """Return what every thread gets: its warp's votes as bits."""
    bits = np.uint64(1) << np.arange(_WARP, dtype=np.uint64)
    ballots = (votes.reshape(-1, _WARP) * bits).sum(axis=1, dtype=np.uint64) & np.uint64(mask)
    return np.repeat(ballots.astype(np.uint32).view(np.int32), _WARP)


_REDUX = {
    "max": lambda rows: rows.max(axis=1),
    "min": lambda rows: rows.min(axis=1),
    "abs_max": lambda rows: np.abs(rows).max(axis=1),
    "abs_min": lambda rows: np.abs(rows).min(axis=1),
}


@api
@carries(itself)
def warp_redux(x: Value, op: Any) -> Value:
    """Replace each element by the reduction over its warp's 32 lanes: 32 consecutive rows (axis 0) hold one element per lane."""
    data, marks = values.to_numpy(x), values.undefined(x)
    reduced = _over_warps(data, _REDUX[plain(op)])
    return values.from_numpy(reduced, x.dtype, None if marks is None else _over_warps(marks, _REDUX["max"]))


def _over_warps(data: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return each element replaced by function(rows of a warp's 32 elements)."""
    if data.ndim == 2 and data.shape[0] % _WARP == 0:
        blocks = data.reshape(-1, _WARP, data.shape[1]).transpose(0, 2, 1)
        reduced = function(blocks.reshape(-1, _WARP)).reshape(blocks.shape[:2])
        out = np.repeat(reduced, _WARP, axis=0)
    else:
        rows = data.reshape(-1, _WARP) if data.size % _WARP == 0 else data.reshape(1, -1)
        out = np.repeat(function(rows), rows.shape[1]).reshape(data.shape)
    return np.ascontiguousarray(out)


# ---------------------------------------------------------------- rounding

_DROPPED = {"bf16": 16, "fp16": 13, "fp8e4nv": 20, "fp8e5": 21}  # fp32 mantissa bits that the format lacks
_LARGEST = {"bf16": 3.3895313892515355e38, "fp16": 65504.0, "fp8e4nv": 448.0, "fp8e5": 57344.0}
_SMALLEST_EXPONENT = {"bf16": -126, "fp16": -14, "fp8e4nv": -6, "fp8e5": -14}


@api
@carries(lanewise)
def stoch_round(src: Any, dst_ty: Any, rand_bits: Value) -> Value:
    """Round fp32 to fp8, bf16 or fp16, up with the probability of what is cut off; saturates. rand_bits: one uint32 per element."""
    dst_ty = plain(dst_ty)
    assert running().machine.options.arch != 90, "stoch_round requires compute capability >= 100 (Blackwell GPU)"
    assert src.dtype.name == "fp32", (
        f"Stochastic rounding only supports fp32 source, got {src.dtype}. Source must be float32."
    )
    assert dst_ty.name in _DROPPED, (
        f"Stochastic rounding only supports fp8/fp16/bf16 destination, got {dst_ty}. "
        "Supported types: float8e5 (fp8 E5M2), float8e4nv (fp8 E4M3FN), float16, bfloat16"
    )
    if values.is_block(src) != values.is_block(rand_bits):
        raise ValueError(
            "src and rand_bits must both be blocks or both be scalars, "
            f"got src_ty.is_block()={values.is_block(src)}, rbits_ty.is_block()={values.is_block(rand_bits)}"
        )
    x = np.atleast_1d(np.asarray(values.to_numpy(src), np.float32))
    random = np.atleast_1d(np.asarray(values.to_numpy(rand_bits))).astype(np.uint32)
    assert x.shape == random.shape, f"rand_bits shape {random.shape} must match src shape {x.shape}"
    out = _round_stochastically(x, dst_ty.name, random)
    return values.from_numpy(out if values.is_block(src) else out.reshape(()), dst_ty)


def _round_stochastically(x: np.ndarray, name: str, random: np.ndarray) -> np.ndarray:
    """Add random bits below the last kept one, then cut; in units of the last place, so subnormals work too."""
    _, exponent = np.frexp(x.astype(np.float64))
    lowest = _SMALLEST_EXPONENT[name]
    kept = 23 - _DROPPED[name]
    unit = np.exp2((np.maximum(exponent - 1, lowest) - kept).astype(np.float64))
    bits = min(16, _DROPPED[name])
    noise = (random & np.uint32((1 << bits) - 1)).astype(np.float64) / (1 << bits)
    rounded = np.sign(x) * np.floor(np.abs(x.astype(np.float64)) / unit + noise) * unit
    limit = _LARGEST[name]
    rounded = np.where(np.isnan(x), np.nan, np.clip(rounded, -limit, limit))
    return dtypes.round_to(rounded.astype(np.float32), name)


# ---------------------------------------------------------------- diagnostics


@api
def assert_same_layout(lhs: Any, rhs: Any) -> None:
    """Compare nothing: layouts are the compiler's."""


@api
def dump_layout(x: Value) -> None:
    """Print nothing: layouts are the compiler's."""


__all__ = [
    *("assert_same_layout", "clock64", "cluster_cta_rank", "cluster_size_1d", "dtype_of", "dump_layout"),
    *("get_fp8_format_name", "size_of", "stoch_round", "thread_id", "vote_ballot_sync", "warp_redux"),
]
