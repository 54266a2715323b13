"""From a tile of the Hopper kernels to its block list, and which blocks of 64 queries a tile of keys visits.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.block_lists import Listed
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.hopper.tiles import PAD

# Rows per block, on both sides.
BLOCK = tl.constexpr(128)


@triton.jit
def sequence_of(tile, BROADCAST_Q: tl.constexpr):
    """Return the number of a tile's sequence, which its record does not hold, from where padded rows begin."""
    if BROADCAST_Q:
        rows_q = max(tile.q.length, 1)  # the same for all sequences, but 0 where no output is written
        return tile.pad_begin // (tl.cdiv(rows_q, PAD) * PAD)
    else:
        return tile.pad_begin // PAD - tile.q.begin // PAD - 1


@triton.jit
def query_list(tile, head, lists, BROADCAST_Q: tl.constexpr):
    """Return the key blocks that a tile of 128 queries attends to."""
    sequence = sequence_of(tile, BROADCAST_Q)
    if BROADCAST_Q:
        row = sequence * tl.cdiv(max(tile.q.length, 1), BLOCK)
    else:
        row = tile.q.begin // BLOCK + sequence
    listed = lists.of(head, row + tile.row // BLOCK, tl.cdiv(tile.kv.length, BLOCK))
    if tile.kv.length == 0:  # also rows of no sequence, which own no list
        listed = Listed(listed.columns, listed.kinds, listed.first, listed.first, listed.past)
    return listed


@aggregate
class HalfBlocks:
    """Blocks of 64 queries: the halves of listed blocks, without a last half that lies behind the sequence.

    Attributes:
        listed: blocks of 128 queries.
        last: the sequence's last block of 64: a list that lies leads no further.
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
    row = tile.kv.begin // BLOCK + sequence_of(tile, BROADCAST_Q) + tile.row // BLOCK
    listed = lists.of(head, row, tl.to_tensor(0))
    if (tile.q.length == 0) | (tile.kv.length == 0):  # also rows of no sequence, which own no list
        listed = Listed(listed.columns, listed.kinds, listed.first, listed.first, listed.past)
    return HalfBlocks(listed, max(tl.cdiv(tile.q.length, 64) - 1, 0))
