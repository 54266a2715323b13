"""Block-sparse attention on packed sequences: which blocks of keys each block of queries attends to.

:func:`select_blocks` scores pooled blocks against each other and keeps the best ones of every query block; users may
also bring lists of their own (:func:`lists_from_mask`, or a :class:`BlockLists` built by hand). A kernel walks a list
in place of all key blocks, its backward walks the :func:`transpose`. Only :func:`check_lists` and
:func:`lists_from_mask` wait for the device.

Blocks are counted inside their sequence: block ``i`` holds rows ``i * block .. (i + 1) * block - 1`` of it, the last
one fewer. The *grid* of one side numbers the blocks of all sequences one after another: block ``i`` of sequence ``b``,
which begins at packed row ``r``, is grid row ``r // block + b + i``, which a kernel computes without a table. Some grid
rows hold no block, and have empty lists.
"""

from __future__ import annotations

from jfa.block_sparse.checks import check_lists
from jfa.block_sparse.grid import Grid, grid_of, query_grid
from jfa.block_sparse.lists import BlockLists, dense_mask, lists_from_mask, transpose
from jfa.block_sparse.selection import pool_blocks, select_blocks, share_of

__all__ = [
    "BlockLists", "Grid", "check_lists", "dense_mask", "grid_of", "lists_from_mask", "pool_blocks", "query_grid", "select_blocks",
    "share_of", "transpose",
]  # fmt: skip
