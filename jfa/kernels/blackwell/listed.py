"""Find the block list of a tile of the Blackwell kernels: the key blocks that it visits, or the blocks of queries.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.blackwell.config import BLOCK_M
from jfa.kernels.common.block_lists import EDGES, Listed, list_of_keys, list_of_queries
from jfa.kernels.common.nouns import Span, Tile, aggregate
from jfa.kernels.common.sequences import sequence_of


@aggregate
class ListedSteps:
    """The iteration of a tile of 128 queries over the key blocks of its list; see ``Steps`` in the forward.

    Entry 2 i + h is step i of half h. With an odd number of entries, the last step of half 1 visits a block without
    keys.
    """

    listed: Listed
    count: tl.tensor
    split_keys: tl.tensor  # 1

    @triton.jit
    def block(self, half, step):
        """Return the key block of a half's step."""
        return self.listed.nth(2 * step + half)

    @triton.jit
    def half_tile(self, tile, half):
        """Return the tile of a half's queries: both halves have the same."""
        return tile

    @triton.jit
    def bulk(self, half, blocks):
        """Return the steps [begin, end) that need no mask.

        A list is ascending, so the blocks that a band cuts are at its ends; see EDGES.
        """
        listed, entries = self.listed, self.listed.entries()
        left = 0
        right = 0
        for i in tl.static_range(EDGES):
            left += ((i < entries) & (listed.nth(i) < blocks.bulk_begin)).to(tl.int32)
            right += ((i < entries) & (listed.nth(entries - 1 - i) >= blocks.bulk_end)).to(tl.int32)
        begin = (left + 1) >> 1
        return begin, max((entries - right) >> 1, begin)


@triton.jit
def listed_steps(tile, head, lists, BROADCAST_Q: tl.constexpr):
    """Return a tile's ListedSteps: at least one, wholly masked where the list is empty."""
    listed = list_of_keys(tile, sequence_of(tile, BLOCK_M, BROADCAST_Q, False), head, lists, BROADCAST_Q)
    return ListedSteps(listed, (listed.count() + 1) >> 1, tl.to_tensor(1))


@aggregate
class ListedQueries:
    """The blocks of 128 queries of one head that attend to a tile of keys.

    Attributes:
        listed: the list.
        last: the sequence's last block; larger numbers in a list are clamped to it.
        tile: the tile, without keys where the list is empty: its one block is then wholly masked.
    """

    listed: Listed
    last: tl.tensor
    tile: Tile

    @triton.jit
    def count(self):
        """Return how many blocks to visit: at least one."""
        return self.listed.count()

    @triton.jit
    def nth(self, n):
        """Return the n-th block of queries."""
        return min(self.listed.nth(n), self.last)

    @triton.jit
    def masked(self, n):
        """Return whether some pairs with the n-th block may not count."""
        return self.listed.masked(self.listed.count() - 1 - n)


@triton.jit
def listed_queries(tile, head, lists, BROADCAST_Q: tl.constexpr):
    """Return the ListedQueries of a tile of 128 keys."""
    listed = list_of_queries(tile, sequence_of(tile, BLOCK_M, BROADCAST_Q, False), head, lists)
    keys = Span(tile.kv.begin, tl.where(listed.entries() > 0, tile.kv.length, 0))
    tile = Tile(tile.row, tile.q, keys, tile.out, tile.band, tile.pad_begin)
    return ListedQueries(listed, max(tl.cdiv(tile.q.length, BLOCK_M) - 1, 0), tile)


@triton.jit
def count_listed(tile, first_head, lists, GROUP: tl.constexpr, BROADCAST_Q: tl.constexpr):
    """Return how many blocks of queries of all heads that share keys visit a tile of keys."""
    steps = 0
    for member in range(GROUP):
        steps += listed_queries(tile, first_head + member, lists, BROADCAST_Q).count()
    return steps
