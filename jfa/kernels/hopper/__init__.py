"""TLX kernels for sm_90 (H100, H200): TMA producers, wgmma consumers, persistent over lists of valid tiles."""

from __future__ import annotations

import torch

from jfa.kernels.base import Problem, wrong_gpu
from jfa.kernels.hopper import backward as _backward
from jfa.kernels.hopper import forward as _forward

forward = _forward.forward
backward = _backward.backward

__all__ = ["backward", "forward", "plan", "supports"]


def supports(problem: Problem) -> str | None:
    """None, or one sentence: which argument these kernels cannot do and which backend can."""
    why_not = wrong_gpu(problem, {(9, 0)}, "hopper")
    if why_not:
        return why_not
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"backend 'hopper' takes query in bfloat16 or float16, not {problem.dtype}; backend 'portable' can"
    return None


def plan(problem: Problem) -> list[torch.Tensor]:
    """Tile lists of the forward and the backward, for several calls with the same offsets."""
    lists = _forward.tile_list(problem), _backward.tile_list(problem)
    return [x for tiles in lists for x in (tiles.records, tiles.counts)]
