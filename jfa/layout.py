"""Jagged batches: many sequences of different lengths, one after another in one tensor, without padding.

``lengths`` [B] and ``offsets`` [B+1] are equivalent: sequence ``b`` holds rows ``offsets[b] : offsets[b+1]`` of a
*packed* tensor ``values`` [total, ...]. Everything here runs on the device of its tensors; only :func:`unpack`,
:func:`pad` without ``max_len``, and checks of offsets' *contents* read offsets back to the host.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

LengthsLike = Tensor | np.ndarray | Sequence[int]


# ---------------------------------------------------------------------------------------------------- offsets and lengths
def offsets_from_lengths(lengths: LengthsLike, *, device: torch.device | str | None = None) -> Tensor:
    """Return row numbers at which sequences begin, and one more for the end: [B] lengths -> [B+1] int32 offsets.

    Raises:
        TypeError, ValueError: naming ``lengths`` (not 1-D, not integers, negative, or a sum past int32). Lengths in a CUDA
            tensor are not read back: their signs are the caller's word.
    """
    lengths = torch.as_tensor(lengths, device=device)
    if lengths.numel() == 0 and lengths.ndim == 1:
        lengths = lengths.to(torch.int64)  # torch.as_tensor([]) is a float tensor
    if lengths.ndim != 1:
        raise ValueError(f"lengths must be 1-D, got {lengths.ndim}-D")
    _require_integers("lengths", lengths)
    if lengths.device.type == "cpu" and lengths.numel():
        if int(lengths.min()) < 0:
            raise ValueError(f"lengths must not be negative, got {int(lengths.min())} at {int(lengths.argmin())}")
        if int(lengths.sum(dtype=torch.int64)) > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"lengths sum to {int(lengths.sum(dtype=torch.int64))} rows, more than int32 offsets can hold"
            )
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    offsets[1:] = torch.cumsum(lengths, 0, dtype=torch.int64)
    return offsets


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Return [B+1] offsets -> [B] lengths, in the offsets' own dtype."""
    return offsets[1:] - offsets[:-1]


def check_offsets(
    offsets: Tensor,
    rows: int | None = None,
    *,
    name: str = "offsets",
    batches: int | None = None,
    contents: bool = True,
) -> None:
    """Raise an error that names the argument unless ``offsets`` describes sequences inside a tensor of ``rows`` rows.

    Args:
        offsets: [B+1] int32 or int64.
        rows: rows of the packed tensor; offsets may end before them (the rows left over belong to no sequence).
        name: the caller's name of the argument.
        batches: the number of sequences there must be.
        contents: also check the numbers (start at 0, never decreasing, inside the tensor). On a GPU that waits for the device.

    Raises:
        TypeError: not a tensor of int32 or int64.
        ValueError: not 1-D, empty, of another length than ``batches + 1``, or with contents that lie.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of int32, got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (int64 is accepted), got {offsets.dtype}")
    if offsets.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {offsets.layout}")
    if offsets.ndim != 1 or offsets.numel() < 1:
        raise ValueError(
            f"{name} must be 1-D with one entry more than there are sequences, got shape {tuple(offsets.shape)}"
        )
    if batches is not None and offsets.numel() != batches + 1:
        raise ValueError(f"{name} has {offsets.numel()} entries, but {batches} sequences need {batches + 1}")
    if contents:
        _check_contents(offsets.detach().cpu(), rows, name)


def _check_contents(offsets: Tensor, rows: int | None, name: str) -> None:
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} must start at 0, got {int(offsets[0])}")
    drops = torch.nonzero(offsets[1:] < offsets[:-1])
    if drops.numel():
        b = int(drops[0])
        raise ValueError(
            f"{name} must not decrease, but {name}[{b + 1}] = {int(offsets[b + 1])} < {name}[{b}] = {int(offsets[b])}"
        )
    if rows is not None and int(offsets[-1]) > rows:
        raise ValueError(f"{name} ends at {int(offsets[-1])}, but the tensor has only {rows} rows")


def _require_integers(name: str, x: Tensor) -> None:
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {x.dtype}")


# ------------------------------------------------------------------------------------------------- pack, unpack and pad
def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return B tensors [n_b, ...] -> (values [sum n_b, ...], offsets [B+1] int32).

    Raises:
        ValueError: naming ``sequences`` if there is none (nothing tells the row shape then) or their row shapes differ.
    """
    if len(sequences) == 0:
        raise ValueError("sequences is empty, so the shape of a row is unknown; build values and offsets by hand")
    shapes = {tuple(s.shape[1:]) for s in sequences}
    if len(shapes) != 1:
        raise ValueError(f"sequences must have rows of one shape, got {sorted(shapes)}")
    offsets = offsets_from_lengths([s.shape[0] for s in sequences], device=sequences[0].device)
    return torch.cat(list(sequences)), offsets


def unpack(values: Tensor, offsets: Tensor) -> list[Tensor]:
    """Return (values [total, ...], offsets [B+1]) -> B views [n_b, ...]: nothing is copied. Reads the offsets on the host."""
    bounds = offsets.tolist()
    return [values[a:b] for a, b in zip(bounds[:-1], bounds[1:])]


def pad(values: Tensor, offsets: Tensor, max_len: int | None = None, fill: float = 0.0) -> Tensor:
    """Return packed [total, ...] -> padded [B, max_len, ...], free places holding ``fill``; differentiable in ``values``.

    ``max_len`` defaults to the longest length, which waits for the device; rows past a given ``max_len`` are dropped.
    """
    if max_len is None:
        lengths = lengths_from_offsets(offsets)
        max_len = int(lengths.max()) if lengths.numel() else 0
    index, valid = gather_index(offsets, max_len, values.shape[0])
    if values.shape[0] == 0:
        return values.new_full((*index.shape, *values.shape[1:]), fill)
    rows = values.index_select(0, index.flatten()).unflatten(0, index.shape)
    return torch.where(valid.view(*valid.shape, *[1] * (values.ndim - 1)), rows, fill)


def unpad(padded: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Pack padded [B, max_len, ...] to [total, ...]; ``total`` defaults to ``offsets[-1]``, read on the host."""
    total = int(offsets[-1]) if total is None else total
    if total == 0 or padded.shape[0] == 0:
        return padded.new_zeros((total, *padded.shape[2:]))
    b, i = sequence_ids(offsets, total), positions(offsets, total)
    return padded[b, i]


def gather_index(offsets: Tensor, max_len: int, total: int) -> tuple[Tensor, Tensor]:
    """Return ([B, max_len] int64 row of each padded place, [B, max_len] bool whether it is a real one); safe rows everywhere."""
    place = torch.arange(max_len, device=offsets.device)
    start, length = offsets[:-1, None].long(), lengths_from_offsets(offsets)[:, None]
    valid = place < length
    return torch.where(valid, start + place, 0).clamp(0, max(total - 1, 0)), valid


def sequence_ids(offsets: Tensor, total: int) -> Tensor:
    """Return [total] int64: the sequence that owns each row (rows past the last offset get B). No host synchronization."""
    rows = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)


def positions(offsets: Tensor, total: int) -> Tensor:
    """Return [total] int64: each row's position inside its sequence. No host synchronization."""
    rows = torch.arange(total, device=offsets.device)
    return rows - offsets.long()[sequence_ids(offsets, total).clamp(max=offsets.numel() - 1)]


def padding_waste(lengths: LengthsLike) -> float:
    """Return the share of the places of a padded batch [B, max] that hold no token: 1 - sum(lengths) / (B * max). 0 if
    there is none."""
    lengths = torch.as_tensor(lengths)
    places = lengths.numel() * int(lengths.max()) if lengths.numel() else 0
    return 1.0 - int(lengths.sum()) / places if places else 0.0


# --------------------------------------------------------------------------------------------- torch's nested tensors
def to_nested(values: Tensor, offsets: Tensor) -> Tensor:
    """Return a torch nested tensor of layout ``torch.jagged`` [B, j, ...] over ``values``' own memory: no copy of the rows.

    Rows past ``offsets[-1]`` belong to no sequence and stay reachable through ``.values()`` only.
    """
    with _quiet("torch.fx._symbolic_trace"):  # torch 2.13 warns there about a deprecated helper that it calls itself
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def from_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return a jagged nested tensor -> (values [total, ...], offsets [B+1] int32).

    ``values`` shares the nested tensor's memory, except where its sequences have holes between them (a narrowed nested
    tensor): those rows are gathered. A transposed one, [B, H, j, D], comes back as [total, H, D] (a view).

    Raises:
        TypeError: naming ``nested`` if it is no nested tensor of layout ``torch.jagged``.
    """
    if not (isinstance(nested, Tensor) and nested.is_nested and nested.layout == torch.jagged):
        raise TypeError("nested must be a torch nested tensor with layout=torch.jagged")
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    ragged_dim = nested._ragged_idx - 1  # of values, which have no batch dimension
    if ragged_dim:
        values = values.movedim(ragged_dim, 0)
    if lengths is None:
        return values, offsets.to(torch.int32)
    packed = offsets_from_lengths(lengths)
    total = int(packed[-1])
    rows = offsets.long()[sequence_ids(packed, total)] + positions(packed, total)
    return values.index_select(0, rows), packed


# ---------------------------------------------------------------------------------------------------- length generators
def uniform_lengths(num: int, low: int, high: int, *, seed: int) -> Tensor:
    """Return [num] int32 lengths, each of ``low .. high`` equally likely (both included)."""
    _check_range(low, high)
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high + 1, num).astype(np.int32))


def log_uniform_lengths(num: int, low: int, high: int, *, seed: int) -> Tensor:
    """Return [num] int32 lengths whose logarithm is uniform on ``low .. high``: as many of 16..32 as of 2048..4096."""
    _check_range(low, high, least=1)
    u = np.random.default_rng(seed).random(num)
    return _rounded(np.exp(np.log(low) + u * (np.log(high) - np.log(low))), low, high)


def pareto_lengths(num: int, low: int, high: int, *, alpha: float = 1.5, seed: int) -> Tensor:
    """Return [num] int32 lengths with a Pareto tail, P(length > x) ~ x**-alpha, bounded to ``low .. high`` (by inverting its CDF).

    User histories look like this: most are short, a few are enormous and hold much of the work.
    """
    _check_range(low, high, least=1)
    if alpha <= 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    u = np.random.default_rng(seed).random(num)
    return _rounded(low * (1 - u * (1 - (low / high) ** alpha)) ** (-1 / alpha), low, high)


def sparsity_lengths(num: int, max_len: int, sparsity: float, *, seed: int) -> Tensor:
    """Return [num] int32 lengths by TritonBench's rule (meta-pytorch/tritonbench, ragged attention), mean about sparsity * max_len.

    ``sparsity`` 1 gives ``max_len`` everywhere; from 0.5 on lengths are uniform on [(2s - 1) max_len, max_len), below on
    [1, 2 s max_len).
    """
    if not 0 < sparsity <= 1:
        raise ValueError(f"sparsity must lie in (0, 1], got {sparsity}")
    if sparsity == 1:
        return torch.full((num,), max_len, dtype=torch.int32)
    low, high = (int((2 * sparsity - 1) * max_len), max_len) if sparsity >= 0.5 else (1, int(2 * sparsity * max_len))
    return uniform_lengths(num, low, max(high - 1, low), seed=seed)


GENERATORS = {
    "uniform": uniform_lengths,
    "log-uniform": log_uniform_lengths,
    "pareto": pareto_lengths,
    "sparsity": sparsity_lengths,
}


def _check_range(low: int, high: int, least: int = 0) -> None:
    if not least <= low <= high:
        raise ValueError(f"low and high must satisfy {least} <= low <= high, got low={low}, high={high}")


def _rounded(x: np.ndarray, low: int, high: int) -> Tensor:
    return torch.from_numpy(np.clip(np.rint(x), low, high).astype(np.int32))
