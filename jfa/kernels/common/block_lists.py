"""Block lists inside a kernel: find a tile's list, and the block that its n-th entry names.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import aggregate
from jfa.masks import Block

FULL = tl.constexpr(int(Block.FULL))
# Rows per block, on both sides, of the lists that Hopper and Blackwell kernels walk.
BLOCK = tl.constexpr(128)
# The most key blocks that one bound of a band cuts: it moves by as many keys as a tile has queries, at most a block.
EDGES = tl.constexpr(3)


@aggregate
class Lists:
    """Block lists in memory, as :class:`jfa.block_sparse.BlockLists`; HEADS of them, for a call of ``num_heads`` query heads."""

    starts: tl.tensor
    columns: tl.tensor
    kinds: tl.tensor
    rows: tl.tensor
    num_heads: tl.tensor
    capacity: tl.tensor
    HEADS: tl.constexpr

    @triton.jit
    def of(self, head, row, past):
        """Return the list of a head's grid row, inside ``columns`` whatever the starts say.

        ``past`` is a block that holds no key of the sequence: it stands in for an empty list's entry.
        """
        row = tl.minimum(tl.maximum(row, 0), self.rows - 1)
        at = self.starts + head * self.HEADS // self.num_heads * self.rows + row
        first = tl.minimum(tl.maximum(tl.load(at), 0), self.capacity)
        return Listed(self.columns, self.kinds, first, tl.minimum(tl.load(at + 1), self.capacity), past)


@aggregate
class Listed:
    """One list. Kernels go through it from its last entry to its first, as a dense tile goes through its blocks."""

    columns: tl.tensor
    kinds: tl.tensor
    first: tl.tensor
    end: tl.tensor
    past: tl.tensor

    @triton.jit
    def only_if(self, there):
        """Return the list, or an empty one."""
        return Listed(self.columns, self.kinds, self.first, tl.where(there, self.end, self.first), self.past)

    @triton.jit
    def entries(self):
        """Return the number of entries, which may be 0."""
        return max(self.end - self.first, 0)

    @triton.jit
    def count(self):
        """Return the number of blocks to visit: at least one, so that every role of a kernel takes the same path."""
        return max(self.end - self.first, 1)

    @triton.jit
    def nth(self, n):
        """Return the block named by entry ``n``, counted from the front: a number there is only below :meth:`entries`."""
        at = self.first + n
        return max(tl.load(self.columns + at, mask=(at >= self.first) & (at < self.end), other=self.past), 0)

    @triton.jit
    def block(self, back):
        """Return the block named by the entry ``back`` places before the last one."""
        at = self.end - 1 - back
        return max(tl.load(self.columns + at, mask=(at >= self.first) & (at < self.end), other=self.past), 0)

    @triton.jit
    def masked(self, back):
        """Return whether some pairs with that block may not count."""
        at = self.end - 1 - back
        return tl.load(self.kinds + at, mask=at >= self.first, other=0) != FULL


@triton.jit
def block_lists(starts, columns, kinds, rows, num_heads, capacity, HEADS: tl.constexpr):
    """Return Lists, or 0 with HEADS 0: a kernel that walks its band has none.

    A number that equals 1 arrives as the compiler's, which a field of values does not take.
    """
    if HEADS:
        return Lists(starts, columns, kinds, tl.to_tensor(rows), tl.to_tensor(num_heads), tl.to_tensor(capacity), HEADS)
    else:
        return tl.to_tensor(0)


@triton.jit
def list_of_keys(tile, sequence, head, lists, BROADCAST_Q: tl.constexpr):
    """Return the key blocks that a tile of BLOCK queries attends to; none where its sequence has no keys."""
    if BROADCAST_Q:
        row = sequence * tl.cdiv(max(tile.q.length, 1), BLOCK)
    else:
        row = tile.q.begin // BLOCK + sequence
    listed = lists.of(head, row + tile.row // BLOCK, tl.cdiv(tile.kv.length, BLOCK))
    return listed.only_if(tile.kv.length > 0)


@triton.jit
def list_of_queries(tile, sequence, head, lists):
    """Return the blocks of queries of one head that attend to a tile of BLOCK keys; none where one side has no rows."""
    row = tile.kv.begin // BLOCK + sequence + tile.row // BLOCK
    return lists.of(head, row, tl.to_tensor(0)).only_if((tile.q.length > 0) & (tile.kv.length > 0))
