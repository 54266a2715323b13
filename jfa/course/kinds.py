"""Adversarial inputs by name: scores, lengths, turns of a ring, dtypes, numbers. An exercise's cases draw from them.

Moderate random numbers do not show that an answer forgets the running maximum, is right only for an even number of key
blocks, or lets a neighbor's NaN through. Each kind here exists because of mistakes that no other kind shows;
``catches`` says which. The table in CONTRIBUTING, "Adding an exercise", is made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Draw = torch.Generator
"""All randomness comes from one seeded generator, so that a seed means the same numbers everywhere."""


def generator(seed: int) -> Draw:
    """Return a torch generator with this seed."""
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class ScoreKind:
    """One way in which attention scores can be hard: score [i, j] is rows[i] + keys[j] + noise.

    Args:
        says: what is special, in the learner's words; good as a case's name.
        catches: the mistakes that only this kind shows.
        rows: ``rows(n)`` gives what each of n queries adds to its scores.
        keys: ``keys(n, block)`` gives what each of n keys adds to its scores, ``block`` keys being processed at a time.
        noise: the standard deviation of what is added to each score besides.
    """

    says: str
    catches: str
    rows: Callable[[int], torch.Tensor] = torch.zeros
    keys: Callable[[int, int], torch.Tensor] = lambda n, block: torch.zeros(n)
    noise: float = 1.0


def _ramp(start: float, end: float) -> Callable[[int, int], torch.Tensor]:
    return lambda n, block: torch.linspace(start, end, n) if n > 1 else torch.full((n,), end)


def _level(value: float) -> Callable[[int, int], torch.Tensor]:
    return lambda n, block: torch.full((n,), value)


def _alternate(step: float) -> Callable[[int], torch.Tensor]:
    return lambda n: -step * (torch.arange(n) % 2)


def _spike(value: float) -> Callable[[int, int], torch.Tensor]:
    def keys(n: int, block: int) -> torch.Tensor:
        out = torch.zeros(n)
        out[n // 2 : n // 2 + 1] = value
        return out

    return keys


def _one_block(value: float, which: int) -> Callable[[int, int], torch.Tensor]:
    """Return ``value`` in one block of keys: number ``which`` from the front, or the last if there are fewer."""

    def keys(n: int, block: int) -> torch.Tensor:
        out = torch.zeros(n)
        start = min(which, max(n - 1, 0) // block) * block
        out[start : start + block] = value
        return out

    return keys


def _ties(n: int, block: int) -> torch.Tensor:
    return 3.0 * ((torch.arange(n) * 5 + 2) % 3 == 0)


SCORES: dict[str, ScoreKind] = {
    "rising": ScoreKind(
        "scores rise from -100 to 100 along the keys",
        "sum or output not rescaled, the first block's maximum kept, no maximum",
        keys=_ramp(-100.0, 100.0),
    ),
    "falling": ScoreKind(
        "scores fall from 100 to -100 along the keys",
        "the last block's maximum instead of the largest, each block by itself",
        keys=_ramp(100.0, -100.0),
    ),
    "near -150": ScoreKind(
        "all scores near -150",
        "a maximum that starts at 0: every exponential vanishes",
        keys=_level(-150.0),
    ),
    "near -400": ScoreKind(
        "all scores near -400",
        "free lanes filled with -250 or the like, a maximum that starts at -300",
        keys=_level(-400.0),
    ),
    "near -30000": ScoreKind(
        "all scores near -30,000",
        "-1e4 in masked places: a score like any other once all are lower",
        keys=_level(-30000.0),
    ),
    "rows 150 apart": ScoreKind(
        "every second query's scores lie 150 lower",
        "one maximum for a whole tile of queries",
        rows=_alternate(150.0),
    ),
    "above 90": ScoreKind(
        "one score of 95 among small ones",
        "no maximum, or a maximum cut off below 88: exp(95) is infinite in fp32",
        keys=_spike(95.0),
    ),
    "huge in one block": ScoreKind(
        "the second block's scores lie 200 higher",
        "a maximum of the first or last block only, a block left out, no rescaling",
        keys=_one_block(200.0, 1),
    ),
    "ties": ScoreKind(
        "many equal scores",
        "strict comparison with the maximum, the maximum counted once",
        keys=_ties,
        noise=0.0,
    ),
}
"""Every exercise with a softmax has a case of each of these, unless its text excludes such scores."""


def scores(kind: str, queries: int, keys: int, block: int, g: Draw) -> torch.Tensor:
    """Return scores [queries, keys] fp32 of the named kind; ``block`` keys are processed at a time."""
    found = SCORES[kind]
    noise = found.noise * _grid(queries, keys, g)
    return found.rows(queries)[:, None] + found.keys(keys, block)[None, :] + noise


def query_and_key(
    kind: str,
    queries: int,
    keys: int,
    dim: int,
    block: int,
    g: Draw,
    heads: int | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [queries, (heads,) dim] and k [keys, (heads,) dim], fp32, whose scaled scores are of the named kind.

    Args:
        kind: a name of SCORES.
        heads: None leaves the head axis away. All heads are of the kind, with random parts of their own.
        scale: what the scores are multiplied with; default 1 / sqrt(dim).

    The numbers are multiples of 1/8, so that with a scale that is a power of two the scores carry (next to) no rounding error.
    """
    found, scale = SCORES[kind], 1 / math.sqrt(dim) if scale is None else scale
    spread = found.noise / (scale * math.sqrt(dim - 2)) if dim > 2 else 0.0
    many = heads or 1
    q, k = (
        _grid(queries, many * dim, g).reshape(queries, many, dim),
        _grid(keys, many * dim, g).reshape(keys, many, dim),
    )
    q, k = _eighths(q * math.sqrt(spread)), _eighths(k * math.sqrt(spread))
    q[..., 0], k[..., 0] = 8.0, _eighths(found.keys(keys, block) / (8 * scale))[:, None]
    q[..., 1], k[..., 1] = _eighths(found.rows(queries) / (8 * scale))[:, None], 8.0
    return (q, k) if heads else (q[:, 0], k[:, 0])


def drawn(
    kind: str | None, queries: int, keys: int, dim: int, block: int, g: Draw, heads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k as :func:`query_and_key` does; without a kind both are normal numbers, of each head its own.

    A kind's keys differ little from head to head ("ties" not at all): a wrong head goes unnoticed there.
    """
    if kind is not None:
        return query_and_key(kind, queries, keys, dim, block, g, heads)
    return tuple(torch.randn(n, *([heads] if heads else []), dim, generator=g) for n in (queries, keys))


MODERATE = [name for name in SCORES if name != "near -30000"]
"""Kinds that fit into one case: a score of -30,000 carries rounding errors that widen the tolerance for all of its case."""


def score_rows(names: Sequence[str], keys: int, block: int, g: Draw) -> torch.Tensor:
    """Return scores [len(names), keys], one row of each of these kinds; ``names`` are good as a case's labels."""
    return torch.cat([scores(name, 1, keys, block, g) for name in names])


def packed(
    names: Sequence[str], queries: int, keys: int, dim: int, block: int, g: Draw, heads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, q_offsets, k_offsets of a packed batch with one sequence of each of these kinds, all of the same lengths."""
    pairs = [query_and_key(name, queries, keys, dim, block, g, heads) for name in names]
    q, k = (torch.cat(parts) for parts in zip(*pairs))
    return q, k, offsets([queries] * len(names)), offsets([keys] * len(names))


def _grid(rows: int, columns: int, g: Draw) -> torch.Tensor:
    """Return normal numbers rounded to eighths."""
    return _eighths(torch.randn(rows, columns, generator=g))


def _eighths(x: torch.Tensor) -> torch.Tensor:
    return (8 * x).round() / 8


# ---------------------------------------------------------------------------------------------- lengths

RAGGED = [5, 0, 33, 1, 17]
LENGTHS: dict[str, list[int]] = {
    "one token": [1],
    "an empty sequence in the middle": [2, 0, 3],
    "lengths 5, 0, 33, 1, 17": RAGGED,
    "one of 200 among short ones": [4, 200, 1],
    "empty ones at both ends": [0, 7, 0, 0, 3, 0],
    "only empty sequences": [0, 0, 0],
}
"""Lengths of packed sequences by what is special about them."""


def around_block(block: int) -> list[int]:
    """Return lengths at the edges of a block: one below, exactly, one above, twice, twice and one."""
    return [max(block - 1, 1), block, block + 1, 2 * block, 2 * block + 1]


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Return the [B + 1] int32 offsets of B lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


LARGE_COUNTS = [2**24 + 1, 1, 40_000, 2**24 + 3, 0, 7]
"""Lengths whose running sums fp32, int16 and fp16 cannot hold; their total fits in int32."""

LARGE_INTEGERS = [2**24 + 1, 2**31 - 1, 2**31 + 1, 2**53 + 1]
"""Whole numbers that fp32, int32, uint31 and fp64 arithmetic gets wrong, one by one."""

# ---------------------------------------------------------------------------------------------- rings

BLOCKS = (1, 2, 3, 4, 5, 7)
"""Numbers of key blocks, chunks, slices: odd and even, below and above any ring's size, so that no parity is right by luck."""

RINGS = tuple((turns, stages) for stages in (1, 2, 3) for turns in BLOCKS)
"""(rounds, stages) of a ring of buffers: with one stage a buffer that is given back a round late is a deadlock."""

FEW_RINGS = ((1, 2), (3, 2), (1, 1), (5, 1), (7, 3), (4, 2))
"""A choice of RINGS for kernels that take long: both parities of the last round, one stage, a ring larger than a round."""

# ---------------------------------------------------------------------------------------------- values

OWN_SCALE = 0.4
"""A scale that belongs to no head dim in use: an answer that makes 1/sqrt(D) itself fails."""

DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64)
"""Value dtypes besides fp32, for results that must keep the dtype of their input."""

LARGE_BF16 = 2.0**100
"""A factor that bf16 and fp32 hold and fp16 (at most 65,504) does not."""


def poison(x: torch.Tensor, where: slice | torch.Tensor) -> torch.Tensor:
    """Fill rows of a floating tensor, in place, with NaN and both infinities in turn; return it.

    A product with 0 does not remove any of them: only a selection does.
    """
    rows = x[where]
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype)
    x[where] = bad[torch.arange(rows.numel()) % 3].reshape(rows.shape)
    return x


def with_true_zeros(x: torch.Tensor) -> torch.Tensor:
    """Set every third element to 0, in place; return it. A zero among the values is not a free place."""
    x.view(-1)[::3] = 0
    return x


def around(threshold: float) -> list[float]:
    """Return the fp32 numbers just below, exactly at, and just above a threshold: where > and >= differ."""
    at = torch.tensor(threshold)
    return [torch.nextafter(at, torch.tensor(side)).item() for side in (-math.inf, threshold, math.inf)]


_UNWRITTEN = 0x7FC0DEAD  # a NaN that no arithmetic makes


def unwritten(*shape: int) -> torch.Tensor:
    """Return an fp32 output tensor for a kernel, full of NaN by which the judge sees where nothing was ever stored.

    A launch function may call it without an import.
    """
    return torch.full(shape, _UNWRITTEN, dtype=torch.int32).view(torch.float32)


def is_unwritten(tensor: object) -> np.ndarray | None:
    """Return True where a tensor still holds what :func:`unwritten` put there, None if that cannot be known."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.is_nested:
        return None
    return tensor.detach().contiguous().view(torch.int32).numpy() == _UNWRITTEN


# ---------------------------------------------------------------------------------------------- the answer's arithmetic


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16 and convert back: x as a product on tensor cores uses it."""
    return x.to(torch.bfloat16).to(x.dtype)
