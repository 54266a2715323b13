"""Find the block list of a tile of the Hopper kernels, and the blocks of 64 queries that a tile of keys visits.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.block_lists import Listed, list_of_keys, list_of_queries
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.sequences import sequence_of
from jfa.kernels.hopper.tiles import PAD


@triton.jit
def query_list(tile, head, lists, BROADCAST_Q: tl.constexpr):
    """Return the key blocks that a tile of 128 queries attends to."""
    return list_of_keys(tile, sequence_of(tile, PAD, BROADCAST_Q, True), head, lists, BROADCAST_Q)


@aggregate
class HalfBlocks:
    """Blocks of 64 queries: the halves of listed blocks, without a last half past the sequence's end.

    Attributes:
        listed: blocks of 128 queries.
        last: the sequence's last block of 64; larger numbers in a list are clamped to it.
    """

    listed: Listed
    last: tl.tensor

    @triton.jit
    def count(self):
        """Return how many they are."""
        entries = self.listed.entries()
        beyond = (entries > 0) & (2 * self.listed.nth(entries - 1) + 1 > self.last)
        return 2 * entries - beyond.to(tl.int32)

    @triton.jit
    def nth(self, n):
        """Return the n-th block of 64 queries."""
        return min(2 * self.listed.nth(n // 2) + n % 2, self.last)


@triton.jit
def key_list(tile, head, lists, BROADCAST_Q: tl.constexpr):
    """Return the blocks of 64 queries of one head that attend to a tile of 128 keys."""
    listed = list_of_queries(tile, sequence_of(tile, PAD, BROADCAST_Q, True), head, lists)
    return HalfBlocks(listed, max(tl.cdiv(tile.q.length, 64) - 1, 0))
