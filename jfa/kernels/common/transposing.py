"""Transpose the block lists of a call, for the passes over keys."""

from __future__ import annotations

from functools import cache

import torch

from jfa import block_select
from jfa.block_sparse import BlockLists, transpose
from jfa.block_sparse.grid import capacity_of
from jfa.kernels.base import Problem
from jfa.kernels.common import launcher
from jfa.kernels.common.launcher import Variant, by_torch


def transposed_lists(problem: Problem, given: list[torch.Tensor] | None = None) -> BlockLists:
    """Return a problem's transposed block lists: from a plan's tensors, or newly computed, where launches go."""
    lists = problem.block_lists
    if given:
        return lists.other_side(*given)
    rows = capacity_of(problem.rows_kv, problem.num_batches, lists.other_block)
    offsets, totals = (problem.query_offset, problem.key_offset), (problem.rows_q, problem.rows_kv)
    if not launcher.by_driver(problem.device) or rows == 0 or lists.columns.numel() == 0:
        sides = dict(total_q=totals[0], total_kv=totals[1], broadcast_q=problem.broadcast_q)
        return transpose(lists, *offsets, **sides)
    sizes = lists.tensors, lists.heads, lists.rows, *offsets, *totals, problem.broadcast_q, lists.sizes, rows
    return lists.other_side(*block_select.transposed(*sizes, _launch, by_torch))


def _launch(device: torch.device, grid: tuple[int, ...], args: tuple, options: dict) -> None:
    _variant(**options).launch(device, grid, *args)


@cache
def _variant(**options) -> Variant:
    return Variant(block_select.transpose_kernel, **options)
