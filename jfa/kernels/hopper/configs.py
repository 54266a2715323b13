"""Tile shapes of the Hopper kernels by class of problem, chosen by measurement (docs/hopper-notes.md), never in a user's call."""

from __future__ import annotations

from dataclasses import dataclass

from jfa.kernels.base import Problem
from jfa.kernels.common.host import padded_head_dim

NARROW = 1024  # keys of a window, both sides together
EMULATED_SMS = 2  # workers on CPU tensors: enough that tiles are dealt to several


@dataclass(frozen=True)
class ForwardConfig:
    """Choices of the forward kernel; see jfa.kernels.hopper.forward for what parts and heads are."""

    block_n: int  # keys of a block
    stages: int  # key/value blocks in flight, for each head
    parts: int  # consumers that share a head's blocks: a tile has 64 * parts queries
    heads: int  # heads of a tile
    resident_q: bool
    q_stages: int = 2  # tiles of queries in flight
    registers: int = 240  # of a consumer's thread

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.parts


def forward_config(problem: Problem) -> ForwardConfig:
    """The forward's tile shape for a problem, from what its shapes and hints say."""
    if problem.block_lists is not None:
        return ForwardConfig(problem.block_lists.other_block, 2, 2, 1, resident_q=False)
    width = padded_head_dim(problem.head_dim, problem.head_dim_v)
    resident = problem.broadcast_q and problem.rows_q <= 128
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    if (0 < longest <= 64 or _narrow(problem)) and width <= 128:
        heads = 2 if problem.num_heads % 2 == 0 else 1
        return ForwardConfig(64, 512 // (width * heads), 1, heads, resident, q_stages=1 if resident else 2)
    if resident and width == 128:
        return ForwardConfig(64, 4, 2, 1, resident, q_stages=1)
    if width == 64 and problem.num_heads % 2 == 0 and not resident:
        return ForwardConfig(128, 2, 1, 2, resident)
    block_n, stages = {64: (128, 3), 128: (128, 2), 256: (32, 2)}[width]
    return ForwardConfig(block_n, stages, 2, 1, resident, q_stages=1 if resident or width == 256 else 2)


def _narrow(problem: Problem) -> bool:
    """Whether a window leaves a tile so few keys that 64 queries waste less at its edges than 128: measured 24 % faster."""
    band = problem.band
    for lo, hi in ((band.lo_start, band.hi_start), (band.lo_end, band.hi_end)):
        if lo is not None and hi is not None and hi - lo <= NARROW:
            return not problem.broadcast_q
    return False


@dataclass(frozen=True)
class BackwardConfig:
    """Choices of the backward kernel for queries of their own; see jfa.kernels.hopper.backward."""

    tile_stages: int  # tiles of keys and values in flight
    ahead: bool  # issue a block's scores behind the block before
    registers: int  # of a consumer's thread


def backward_config(width: int, has_lo: bool, with_dq: bool) -> BackwardConfig:
    """The backward's choices for a padded head dimension, a mask open or not to the left, and dQ in the same pass or not.

    Scores ahead gain 7 % with D = 64 (with a second tile in flight) and 3 % with a window, whose many edges then share one loop;
    with D = 128 they lose 2 % on all else. Three groups and one warp share 512 registers: 2 * 208, 72 for the adder, 24.
    """
    narrow = width == 64
    return BackwardConfig(tile_stages=2 if narrow else 1, ahead=narrow or has_lo, registers=208 if with_dq else 240)


def separate_dq(problem: Problem) -> bool:
    """Whether dQ is made by a pass of its own (jfa.kernels.hopper.backward_dq) rather than added up by the pass over keys.

    It repeats two of five products: the one pass with an adder (jfa.kernels.hopper.backward) is faster on every shape measured, by
    8 % (narrow window) to 34 % (dense). But its sums depend on the order in which tiles finish.
    """
    return problem.deterministic
