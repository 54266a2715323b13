"""The order in which ``auto`` tries backends that support a problem, by kinds of problems, as measured.

The first kind in the table that applies decides. It depends on sizes only, never on offsets, and holds for the H200 on
which it was measured (jfa/bench/results/h200-2026-12-01-grid.json, written by ``jfa bench --grid``). A GPU without
Hopper's kernels has no choice, and Blackwell's order was not measured. ``tests/kernels/test_preference.py`` holds the
table, and what the Hopper backend leaves to the portable kernels (:func:`portable_backward`), against the recorded
times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jfa.kernels.base import Problem

# The first that supports a request wins; reference is last because it is right everywhere and fast nowhere.
USUAL = ("blackwell", "hopper", "portable", "reference")
PORTABLE_FIRST = ("blackwell", "portable", "hopper", "reference")
FEW = 64  # packed rows: one tile of the portable kernels holds all query heads of a key head
SHORT = 128  # rows of a mean sequence
TINY = 32  # likewise: a tile of 64 rows is half empty
MANY = 512  # sequences: fewer keep no GPU busy, and were not measured
WIDE = 128  # head dimension


@dataclass(frozen=True)
class Kind:
    """A kind of problems, and the best order of backends for it.

    Attributes:
        name: in words, with the reason.
        applies: whether a problem is one.
        order: names of backends, the first that supports the problem wins.
    """

    name: str
    applies: Callable[[Problem], bool]
    order: tuple[str, ...]


def mean_at_most(most: int, rows: int, problem: Problem) -> bool:
    """Return whether sequences with ``rows`` rows in all have at most ``most`` on average.

    It is a comparison of products, so that a recorded call knows for which sizes it holds.
    """
    return rows <= most * max(1, problem.num_batches)


def _few_queries(problem: Problem) -> bool:
    few = mean_at_most(FEW, problem.rows_q * problem.group_size, problem)
    return not problem.broadcast_q and few and not mean_at_most(FEW, problem.rows_kv, problem)


def _many_short(problem: Problem) -> bool:
    many = not problem.broadcast_q and problem.num_batches >= MANY
    return many and mean_at_most(SHORT, max(problem.rows_q, problem.rows_kv), problem)


def _full_or_wide(problem: Problem) -> bool:
    """Return whether tiles of 64 packed rows are mostly full, or heads wide."""
    full = problem.group_size > 1 or not mean_at_most(TINY, max(problem.rows_q, problem.rows_kv), problem)
    return full or max(problem.head_dim, problem.head_dim_v) > WIDE


KINDS = (
    Kind("few queries: grouped heads fill one tile, keys are split over programs", _few_queries, PORTABLE_FIRST),
    Kind(
        "many short sequences that fill half a tile or more, alone or with grouped heads, or with wide ones",
        lambda problem: _many_short(problem) and _full_or_wide(problem),
        PORTABLE_FIRST,
    ),
    Kind("all others", lambda problem: True, USUAL),
)


def kind_of(problem: Problem) -> Kind:
    """Return the first kind that applies to a problem."""
    return next(kind for kind in KINDS if kind.applies(problem))


def portable_backward(problem: Problem) -> str:
    """Return why the Hopper backend's backward is the portable kernels', "" where it is its own.

    Sums of dQ in fp32 are cleared, added to and read for whole blocks of 64 queries: with short sequences that is most of a
    backward's time and 100 times its memory. Shared queries of which a tile holds few, with head dims that fill it badly, are
    computed mostly for nothing.
    """
    if problem.block_lists is not None:
        return "repeatable bit by bit over block lists" if problem.deterministic else ""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > WIDE and problem.broadcast_q:
        return f"shared queries with head dim {widest} > {WIDE}"
    if _many_short(problem):
        return f"many sequences of {SHORT} rows or fewer on average: dQ needs no sums in memory"
    if problem.broadcast_q and problem.num_batches >= MANY and problem.rows_q <= 32 and 64 < widest <= 96:
        return f"at most 32 shared queries, and head dim {widest} fills three quarters of a tile or less"
    return ""
