"""Tile sizes, warps and pipeline stages for a problem: a table that an H200 measured, not a tuner that runs on every call.

The numbers are the fastest of a sweep (tests/gpu/run_op.py tune; docs/portable-notes.md tells which and by how much). Which row
of the table a problem gets follows from shapes alone: nothing here reads an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from jfa.kernels.base import Problem


@dataclass(frozen=True)
class Tile:
    """One kernel's configuration: rows kept, rows passed by in a step, warps, pipeline stages, registers a thread (None: any)."""

    keep: int
    step: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def launch(self) -> dict:
        """The launch options of Triton."""
        options = dict(num_warps=self.warps, num_stages=self.stages)
        return options if self.registers is None else options | {"maxnreg": self.registers}


TILES = {
    # Packed rows of a mean sequence decide between short and long.
    "forward-short": Tile(64, 64, 4, 3),
    "forward-long": Tile(128, 64, 8, 3),
    "forward-shared-64": Tile(64, 32, 4, 3, 168),  # a shared query of at most 64 packed rows
    "forward-shared-128": Tile(64, 64, 4, 3),  # two tiles a sequence: the second finds its keys in the L2 cache
    "dkdv": Tile(64, 32, 4, 3),
    "dkdv-grouped": Tile(128, 64, 8, 3),
    "dq-short": Tile(64, 64, 4, 2),
    "dq-long": Tile(128, 64, 8, 3),
    "dq-d64": Tile(64, 64, 4, 3),
    "shared-64": Tile(64, 64, 4, 2),
    "shared-128": Tile(128, 64, 8, 3),
    # Head dims above 128, or above 64 in fp32; then those beyond that: not swept, sized to fit.
    "wide": Tile(64, 32, 4, 2),
    "wide-backward": Tile(64, 32, 4, 1),
    "widest": Tile(32, 16, 4, 1),
}
EMULATED = Tile(32, 32, 4, 1)  # small enough that short test sequences have several blocks
LONG = 2048  # packed rows
SHARED_ROWS = 128  # packed rows of a shared query that one program can keep in the backward
SPLIT = {"forward-shared-64": 0, "forward-shared-128": 0}  # workers a multiprocessor that mega-sequences are split for
WORKERS = {"shared-64": 2, "shared-128": 1}  # programs a multiprocessor in the shared query's backward
PIECE = {"shared-64": 1024, "shared-128": 2048}  # keys of one piece there: short to balance, long to load dO once for many


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


def forward_row(problem: Problem) -> str:
    """The table's row for the forward."""
    wide, rows = width(problem), typical_rows(problem)
    if wide > 128:
        return "wide" if wide <= 256 else "widest"
    if problem.broadcast_q and rows <= SHARED_ROWS:
        return "forward-shared-64" if rows <= 64 else "forward-shared-128"
    return "forward-long" if rows > LONG else "forward-short"


def forward_tile(problem: Problem) -> Tile:
    """Query rows kept, key rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    return TILES[forward_row(problem)]


def split_workers(problem: Problem) -> int:
    """Workers a head that mega-sequences are split for (0: not split): where few tiles make the longest one the last to end."""
    if problem.device.type == "cpu":
        return 4
    return SPLIT.get(forward_row(problem), 0) * processors(problem.device) // problem.num_kv_heads


def dkdv_tile(problem: Problem) -> Tile:
    """Key rows kept, packed query rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return TILES["wide-backward" if wide <= 256 else "widest"]
    return TILES["dkdv-grouped" if problem.group_size > 1 else "dkdv"]


def dq_tile(problem: Problem) -> Tile:
    """Packed query rows kept, key rows a step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return TILES["wide-backward" if wide <= 256 else "widest"]
    if wide <= 64:
        return TILES["dq-d64"]
    return TILES["dq-long" if typical_rows(problem) > LONG else "dq-short"]


def keeps_shared_query(problem: Problem) -> bool:
    """Whether the backward can keep the whole shared query and its dQ on chip."""
    return problem.broadcast_q and packed_rows(problem) <= (SHARED_ROWS if width(problem) <= 128 else 32)


def shared_row(problem: Problem) -> str:
    """The table's row for the backward of a short shared query."""
    return "shared-64" if packed_rows(problem) <= 64 else "shared-128"


def shared_tile(problem: Problem) -> Tile:
    """Packed rows kept (all of them), key rows a step, for the backward of a short shared query."""
    rows, wide = pow2(packed_rows(problem)), width(problem)
    if problem.device.type == "cpu":
        return Tile(rows, 16, 4, 1)
    if wide > 128:
        return Tile(rows, 32 if wide <= 256 else 16, 4, 1)
    tile = TILES[shared_row(problem)]
    return Tile(rows, tile.step, tile.warps, tile.stages, tile.registers)


def shared_workers(problem: Problem) -> int:
    """Programs a key/value head of the shared query's backward."""
    if problem.device.type == "cpu":
        return 4
    return max(1, WORKERS[shared_row(problem)] * processors(problem.device) // problem.num_kv_heads)


def piece(problem: Problem) -> int:
    """Keys of one piece in the shared query's backward."""
    return 64 if problem.device.type == "cpu" else PIECE[shared_row(problem)]
