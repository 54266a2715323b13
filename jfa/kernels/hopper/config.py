"""Compile-time configuration of each Hopper kernel: the host's choices, and facts that the problem dictates.

The choices come from measurements (docs/hopper-notes.md); callers cannot set them. A kernel takes one of these objects
as its constexpr ``cfg``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jfa.kernels.base import Problem
from jfa.kernels.common.host import padded_head_dim

NARROW = 1024  # keys of a window, both sides together
SHARED_MEMORY = 232_448 - 900  # bytes for the buffers of one program; barriers take the rest


@dataclass(frozen=True)
class Config:
    """Facts about a problem that every kernel needs.

    Attributes:
        head_dim: columns of a tile of queries or keys: 64, 128 or 256. TMA fills what a tensor lacks with zeros.
        has_lo, has_hi: which sides of the band are bounded.
    """

    head_dim: int
    has_lo: bool
    has_hi: bool


@dataclass(frozen=True)
class ForwardConfig(Config):
    """Choices of the forward; see jfa.kernels.hopper.forward.

    Attributes:
        head_dim_v: columns of a tile of values.
        block_n: keys of a block.
        stages: key and value blocks in flight, per head.
        parts: consumers that share a head's blocks: a tile has 64 * parts queries.
        heads: heads of a tile.
        resident: the queries are the same in every tile of a program (broadcast_q with one tile) and are loaded once.
        q_stages: tiles of queries in flight.
        list_heads: heads of the block lists that tiles walk; 0: they walk their band.
        broadcast_q: with block lists: whether all sequences have the same queries.
        registers: per thread of a consumer.
        right, right_v: columns in the right piece of queries and keys, and of values (jfa.kernels.hopper.columns); 0:
            there is only one piece.
        late_queries: outputs are stored through the buffer of their queries, so a tile's queries are loaded after its
            first keys and values. Only for one head and one tile of queries in flight; the pieces of values are as wide
            as those of queries.
    """

    head_dim_v: int
    block_n: int
    stages: int
    parts: int
    heads: int
    resident: bool
    q_stages: int
    list_heads: int = 0
    broadcast_q: bool = False
    registers: int = 240
    right: int = 0
    right_v: int = 0
    late_queries: bool = False

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.parts

    @property
    def consumers(self) -> int:
        """Warp groups that compute."""
        return self.parts * self.heads


def forward_config(problem: Problem) -> ForwardConfig:
    """Choose the forward's tile shape for a problem, from what its shapes and hints say."""
    d, dv, band = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v), problem.band
    if problem.block_lists is not None:
        lists = problem.block_lists
        cfg = ForwardConfig(d, band.has_lo, band.has_hi, dv, lists.other_block, 2, 2, 1, resident=False, q_stages=2)
        return replace(cfg, list_heads=lists.heads, broadcast_q=problem.broadcast_q)
    width = max(d, dv)
    resident = problem.broadcast_q and problem.rows_q <= 128
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    even = problem.num_heads % 2 == 0
    if (0 < longest <= 64 or _narrow(problem)) and width <= 128:
        heads = 2 if even else 1
        block_n, stages, parts = 64, 512 // (width * heads), 1
    elif resident and width == 128:
        block_n, stages, parts, heads = 64, 4, 2, 1
    elif width == 64 and even and not resident:
        block_n, stages, parts, heads = 128, 2, 1, 2
    elif resident:
        parts, heads = 2, 1
        block_n, stages = {64: (128, 3), 128: (128, 2), 256: (32, 2)}[width]
    else:
        return _long_config(problem)
    q_stages = 1 if resident or width == 256 else 2
    return ForwardConfig(d, band.has_lo, band.has_hi, dv, block_n, stages, parts, heads, resident, q_stages)


def _long_config(problem: Problem) -> ForwardConfig:
    """Choose the forward's tile shape for 128 queries of one head: as many keys per block as there is room for.

    Outputs leave through their queries' buffers only where that makes room: it costs 4 % (D = 192). A piece of 32 columns,
    for head dims of 65 to 96, makes the forward 15 % slower, though it computes a quarter less.
    """
    (left, right), (left_v, right_v) = _pieces(problem.head_dim), _pieces(problem.head_dim_v)
    d, dv, band = left + right, left_v + right_v, problem.band
    q_stages, block_n, late, row = 2, 128, False, 2 * (d + dv)
    room = SHARED_MEMORY - 128 * 2 * (2 * d + dv)
    if max(d, dv) > 128:
        late_room = SHARED_MEMORY - 128 * 2 * d if left == left_v and right_v in (0, right) else 0
        room += 128 * 2 * d
        q_stages, block_n = 1, 128 if late_room >= 2 * 128 * row else 64
        late = room < 2 * block_n * row <= late_room
        room = late_room if late else room
    cfg = ForwardConfig(
        d, band.has_lo, band.has_hi, dv, block_n, min(3, room // (block_n * row)), 2, 1, False, q_stages
    )
    return replace(cfg, right=right, right_v=right_v, late_queries=late)


def _pieces(dim: int) -> tuple[int, int]:
    """Return the columns of the left and the right piece of a forward's tile for rows of ``dim``."""
    return next(pieces for pieces in ((64, 0), (128, 0), (128, 64), (256, 0)) if dim <= sum(pieces))


def _narrow(problem: Problem) -> bool:
    """Return whether a window leaves a tile so few keys that 64 queries waste less at its edges than 128.

    Measured: 24 % faster.
    """
    band = problem.band
    for lo, hi in ((band.lo_start, band.hi_start), (band.lo_end, band.hi_end)):
        if lo is not None and hi is not None and hi - lo <= NARROW:
            return not problem.broadcast_q
    return False


@dataclass(frozen=True)
class BackwardConfig(Config):
    """Choices of the backward for queries of their own; see jfa.kernels.hopper.backward.

    Attributes:
        with_dq: add up dQ; else another kernel makes it.
        broadcast_q: all sequences add to the same dQ.
        tile_stages: tiles of keys and values in flight.
        ahead: issue a block's scores right after the products of the block before.
        registers: per thread of a consumer.
        list_heads: heads of the transposed block lists that tiles walk; 0: they walk their band.
        right: columns of head_dim in the right piece (jfa.kernels.hopper.columns); 0: there is only one piece.
    """

    with_dq: bool
    broadcast_q: bool
    tile_stages: int
    ahead: bool
    registers: int
    list_heads: int = 0
    right: int = 0


def backward_config(problem: Problem) -> BackwardConfig:
    """Choose how the backward of a problem runs.

    Scores ahead gain 7 % with D = 64 (with a second tile in flight) and 3 % with a window, whose many edges then share
    one loop; with D = 128 they lose 2 % on all else. Head dims of 65 to 96 are computed as 64 + 32 columns, 14 to 16 %
    faster than as 128; of that a causal mask owes 4 % to scores ahead. Three groups and one warp share 512 registers:
    2 * 208, 72 for the adder, 24.

    dQ gets a pass of its own only where the order of its sums must not depend on the order in which tiles finish. That
    pass repeats two of five products: adding up is faster on every shape measured, by 8 % (narrow window) to 34 %
    (dense).
    """
    d, band, lists = padded_head_dim(problem.head_dim, problem.head_dim_v), problem.band, problem.block_lists
    with_dq = not problem.deterministic
    right = 32 if 64 < max(problem.head_dim, problem.head_dim_v) <= 96 and lists is None else 0
    return BackwardConfig(
        96 if right else d,
        band.has_lo,
        band.has_hi,
        with_dq=with_dq,
        broadcast_q=problem.broadcast_q,
        tile_stages=2 if d == 64 or right else 1,
        ahead=d == 64 or right > 0 or band.has_lo,
        registers=208 if with_dq else 240,
        list_heads=lists.heads if lists else 0,
        right=right,
    )


def split_columns(dim: int) -> tuple[int, int]:
    """Return the columns of the left and the right piece of a tile for rows of ``dim``; jfa.kernels.hopper.columns."""
    pieces = {64: (32, 32), 96: (64, 32), 128: (64, 64), 192: (128, 64), 256: (128, 128)}
    return next(pair for columns, pair in pieces.items() if dim <= columns)


@dataclass(frozen=True)
class WideConfig:
    """Choices of the backward for head dims beyond 128; see jfa.kernels.hopper.backward_wide.

    Attributes:
        left, right: columns of both pieces of a tile of queries or keys.
        left_v, right_v: the same of values and output gradients.
        has_lo, has_hi: which sides of the band are bounded.
        stages: blocks of queries in flight, at least two: products of two blocks overlap.
        registers: per thread of the group that is not the default task.
    """

    left: int
    right: int
    left_v: int
    right_v: int
    has_lo: bool
    has_hi: bool
    stages: int
    registers: int = 240


@dataclass(frozen=True)
class DqConfig(WideConfig):
    """Choices of the pass that makes dQ alone, for any head dim; see jfa.kernels.hopper.backward_dq.

    Attributes:
        stages: blocks of keys in flight.
        stages_v: blocks of values in flight.
        broadcast_q: all sequences have the same queries, and each leaves a dQ of its own.
    """

    stages_v: int = 1
    broadcast_q: bool = False

    @property
    def wide(self) -> bool:
        """Whether columns lie in two pieces, and registers and shared memory are short."""
        return self.right > 0


def is_wide(problem: Problem) -> bool:
    """Return whether a problem's backward has kernels for head dims beyond 128; shared queries' have not."""
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    return wide and not problem.broadcast_q and problem.block_lists is None


def wide_config(problem: Problem) -> WideConfig:
    """Choose how dK and dV of a problem that :func:`is_wide` are made."""
    columns = *split_columns(problem.head_dim), *split_columns(problem.head_dim_v)
    tile, weights = 64 * 2 * sum(columns), 3 * 64 * 64 * 2  # two P, and dS on its way to be an operand
    stages = min(4, (SHARED_MEMORY - tile - weights) // (tile + 2 * 64 * 4))
    return WideConfig(*columns, problem.band.has_lo, problem.band.has_hi, stages)


def dq_config(problem: Problem) -> DqConfig:
    """Choose how dQ's own pass runs: 128 queries stay, blocks of 64 keys stream."""
    if is_wide(problem):
        columns = *split_columns(problem.head_dim), *split_columns(problem.head_dim_v)
        tile = 64 * 2 * sum(columns)
        stages = min(4, (SHARED_MEMORY - 2 * tile) // tile)
    else:
        d = padded_head_dim(problem.head_dim, problem.head_dim_v)
        columns, stages = (d, 0, d, 0), 3
    stages_k, band = max(2, stages), problem.band
    return DqConfig(*columns, band.has_lo, band.has_hi, stages_k, stages_v=stages, broadcast_q=problem.broadcast_q)


@dataclass(frozen=True)
class ResidentConfig(Config):
    """Choices of the backward that keeps shared queries on the chip; see jfa.kernels.hopper.backward_resident.

    Attributes:
        rows_q: rows of the tile of queries, 64 or 128.
        stages: key and value blocks in flight.
        static: assign tiles beforehand, so that every program sums the same blocks in every run.
        do_stages: tiles of output gradients in flight.
        key_registers, query_registers: per thread of those groups.
    """

    rows_q: int
    stages: int
    static: bool
    do_stages: int = 2
    key_registers: int = 160
    query_registers: int = 160


def is_resident(problem: Problem) -> bool:
    """Return whether a problem's queries and their dQ fit on the chip; the general backward can do every problem."""
    shared = problem.broadcast_q and problem.rows_q <= 128 and problem.group_size == 1 and problem.block_lists is None
    return shared and padded_head_dim(problem.head_dim) == padded_head_dim(problem.head_dim_v) <= 128


def resident_config(problem: Problem) -> ResidentConfig:
    """Choose how the backward of a problem that :func:`is_resident` runs."""
    d, band = padded_head_dim(problem.head_dim), problem.band
    rows_q = 64 if problem.rows_q <= 64 else 128
    stages = 4 if rows_q * d < 128 * 128 else 3
    return ResidentConfig(d, band.has_lo, band.has_hi, rows_q, stages, problem.deterministic)
