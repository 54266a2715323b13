"""Tile sizes, warps and pipeline stages for a problem: a table that the H200 measured, not a tuner that runs on every call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from jfa.kernels.base import Problem


@dataclass(frozen=True)
class Tile:
    """One kernel's configuration: rows kept, rows passed by in a step, warps, pipeline stages."""

    keep: int
    step: int
    warps: int
    stages: int


EMULATED = Tile(32, 32, 4, 1)  # small enough that short test sequences have several blocks
SHARED_ROWS = 128  # packed rows of a shared query that one program can keep in the backward


def pow2(n: int) -> int:
    """The least power of two >= n, and >= 16, the least side of a tl.dot."""
    return max(16, 1 << max(0, n - 1).bit_length())


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number on the emulator, so that splitting happens in tests too."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def packed_rows(problem: Problem) -> int:
    """Packed query rows of a shared query."""
    return problem.rows_q * problem.group_size


def typical_rows(problem: Problem) -> int:
    """Packed query rows of a mean sequence: known from shapes alone."""
    if problem.broadcast_q:
        return packed_rows(problem)
    return problem.rows_q * problem.group_size // max(1, problem.num_batches)


def width(problem: Problem) -> int:
    """The larger head dimension as tiles have it, in units of bf16: fp32 counts twice."""
    columns = pow2(max(problem.head_dim, problem.head_dim_v))
    return columns * 2 if problem.dtype == torch.float32 else columns


def forward_tile(problem: Problem) -> Tile:
    """Query rows kept, key rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    rows = typical_rows(problem)
    if wide > 128:
        return Tile(64, 32, 4, 2) if wide <= 256 else Tile(32, 16, 4, 1)
    if rows <= 64:
        return Tile(max(16, pow2(rows)), 64, 4, 3)
    return Tile(128, 64, 4, 3) if wide <= 64 else Tile(128, 64, 8, 3)


def split_workers(problem: Problem) -> int:
    """How many workers a head's work is spread over when mega-sequences are split (0: not split)."""
    if problem.deterministic and problem.device.type == "cpu":
        return 0
    return max(1, processors(problem.device) * 4 // problem.num_kv_heads)


def dkdv_tile(problem: Problem) -> Tile:
    """Key rows kept, packed query rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return Tile(64, 32, 4, 1) if wide <= 256 else Tile(32, 16, 4, 1)
    return Tile(128, 64, 8, 2)


def dq_tile(problem: Problem) -> Tile:
    """Packed query rows kept, key rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return Tile(64, 32, 4, 1) if wide <= 256 else Tile(32, 16, 4, 1)
    return Tile(128, 64, 8, 2)


def atomic_dq(problem: Problem) -> bool:
    """Whether the pass over keys adds dQ with atomics, instead of a second pass over queries."""
    return False


def shared_tile(problem: Problem) -> Tile:
    """Packed rows kept (all of them), key rows a step, for the backward of a short shared query."""
    rows = pow2(packed_rows(problem))
    if problem.device.type == "cpu":
        return Tile(rows, 16, 4, 1)
    wide = width(problem)
    if wide > 128:
        return Tile(rows, 32 if wide <= 256 else 16, 4, 1)
    return Tile(rows, 64, 4, 2) if rows <= 64 else Tile(rows, 64, 8, 2)


def shared_workers(problem: Problem) -> int:
    """Programs a key/value head of the shared query's backward."""
    per_processor = 2 if pow2(packed_rows(problem)) <= 64 else 1
    return max(1, processors(problem.device) * per_processor // problem.num_kv_heads)
