"""Tile sizes, warps and pipeline stages for a problem: a table measured on an H200, not a tuner that runs on every
call.

The numbers are the fastest of a sweep (tests/gpu/run_op.py tune; docs/portable-notes.md says which and by how much).
Which row of the table a problem gets follows from shapes alone: nothing here reads an offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from jfa.kernels.base import Problem
from jfa.kernels.common.host import num_sms, padded_head_dim, power_of_two
from jfa.kernels.common.planner import LEAST_CHUNK, Cut
from jfa.kernels.preference import TINY, mean_at_most


@dataclass(frozen=True)
class Tile:
    """One kernel's configuration: rows of the tile, rows of the other side per step, warps, pipeline stages, registers
    per thread (None: any)."""

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


@dataclass(frozen=True)
class Config:
    """Compile-time configuration of a kernel.

    Attributes:
        group, head_dim, head_dim_v, has_lo, has_hi: heads per key/value head, head dims, and the band's sides that are bounded.
        precision: of products, as tl.dot's ``input_precision``.
        block_m, block_n: packed query rows, and keys, of a tile or a step.
        negative: sm_scale < 0, where the forward's maxima are minima.
        split: some tiles of the forward are cut into chunks of their keys.
    """

    group: int
    head_dim: int
    head_dim_v: int
    has_lo: bool
    has_hi: bool
    precision: str
    block_m: int = 0
    block_n: int = 0
    negative: bool = False
    split: bool = False

    @property
    def keys_first(self) -> bool:
        """Whether a resident query has too few rows for a product's first operand."""
        return self.block_m < 64


TILES = {
    # Packed rows of a mean sequence decide between short and long.
    "forward-short": Tile(64, 64, 4, 3),
    # Less memory and fewer registers each: four programs on a multiprocessor, not two.
    "forward-brief": Tile(64, 32, 4, 2),
    "forward-brief-d64": Tile(64, 32, 4, 3),
    "forward-long": Tile(128, 64, 8, 2, 128),
    "forward-shared-64": Tile(64, 32, 4, 3, 128),  # a shared query of at most 64 packed rows
    "forward-shared-128": Tile(64, 64, 4, 3),  # two tiles per sequence: the second finds its keys in the L2 cache
    "dkdv": Tile(64, 64, 4, 2),
    "dkdv-d64": Tile(64, 64, 4, 2, 168),
    "dkdv-brief-d64": Tile(64, 32, 4, 3),
    "dq-tiny": Tile(64, 32, 4, 2, 168),  # sequences that fill half a tile or less
    "dq-tiny-d64": Tile(64, 32, 4, 2),
    "dq-short": Tile(64, 64, 4, 2),
    "dq-long": Tile(128, 64, 8, 3),
    "resident-64": Tile(64, 64, 4, 2),
    "resident-128": Tile(128, 64, 8, 3),
    "resident-128-sm100": Tile(
        128, 64, 8, 2
    ),  # there products pass through shared memory as well: compiled, not measured
    # Head dims above 128, or above 64 in fp32; then those beyond that: not swept, sized to fit.
    "wide": Tile(64, 32, 4, 2),
    "wide-dkdv": Tile(64, 64, 8, 2),  # with four warps the sums alone would fill all registers
    "wide-dkdv-sm100": Tile(64, 32, 8, 2),  # what fits there: compiled, not measured
    "wide-dq": Tile(64, 64, 8, 2),
    "wide-resident": Tile(32, 64, 8, 2),
    "wide-backward-fp32": Tile(64, 32, 4, 1),
    "widest": Tile(32, 16, 4, 1),
}
EMULATED_SMS = 4  # enough that mega-sequences are split in tests too
LEAST_SIDE = 16  # of an operand of tl.dot
EMULATED = Tile(32, 32, 4, 1)  # small enough that short test sequences have several blocks
LONG = 4096  # packed rows: more than that
# Packed rows, and keys, of a mean sequence: at most.
BRIEF = 512
OUTLIER = 8  # times that: the longest sequence, where a hint tells it
LARGE_MEMORY = 200_000  # bytes of shared memory: less, and the whole of a long shared query does not stay on chip
RESIDENT_ROWS = 128  # packed rows of a shared query that one program can keep in the backward
FEW_TILES = 4  # per multiprocessor: with fewer, mega-sequences are split
SPLIT = 1  # workers per multiprocessor for which they are split
WORKERS = {"resident-64": 2, "resident-128": 1}  # programs per multiprocessor in the shared query's backward
PIECE = {
    "resident-64": 1024,
    "resident-128": 1536,
}  # keys of one piece there: short to balance, long to load dO once for many


@cache
def has_tma(device: torch.device) -> bool:
    """Return whether tiles can be fetched by TMA: NVIDIA GPUs from Hopper on, and the emulator."""
    return device.type == "cpu" or generation(device) >= 9


@cache
def generation(device: torch.device) -> int:
    """Return an NVIDIA GPU's major compute capability (9 Hopper, 10 Blackwell); 0 for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


@cache
def shared_memory(device: torch.device) -> int:
    """Return bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return LARGE_MEMORY
    told = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return told or {9: 232_448, 10: 232_448}.get(generation(device), 101_376)


def fitted(tile: Tile, problem: Problem, kept: int, passed: int) -> Tile:
    """Return the tile with as many stages as shared memory has room for, next to ``kept`` tiles that stay and ``passed`` per stage.

    The table is an H200's, where all fit; a GPU with 99 KB of it runs the same tiles with a shorter pipeline.
    """
    columns = padded_head_dim(problem.head_dim, problem.head_dim_v, least=LEAST_SIDE) * problem.dtype.itemsize
    room = shared_memory(problem.device) - kept * tile.keep * columns
    return replace(tile, stages=max(1, min(tile.stages, room // (passed * tile.step * columns))))


def packed_rows(problem: Problem) -> int:
    """Return packed query rows of a shared query."""
    return problem.rows_q * problem.group_size


def typical_rows(problem: Problem) -> int:
    """Return packed query rows of a mean sequence: known from shapes alone."""
    if problem.broadcast_q:
        return packed_rows(problem)
    return problem.rows_q * problem.group_size // max(1, problem.num_batches)


def are_brief(rows: int, problem: Problem) -> bool:
    """Return whether a mean sequence has at most ``rows`` packed query rows of its own, and keys.

    One long sequence among many short ones has little weight in a mean, but its tiles end last: where a hint tells of more
    than ``OUTLIER`` times as many rows the answer is no.
    """
    group = problem.group_size
    if problem.broadcast_q or not mean_at_most(rows, max(problem.rows_q * group, problem.rows_kv), problem):
        return False
    return max(problem.max_seq_len_q * group, problem.max_seq_len_kv) <= OUTLIER * rows


def width(problem: Problem) -> int:
    """Return the larger head dimension as tiles have it, in units of bf16: fp32 counts twice."""
    columns = padded_head_dim(problem.head_dim, problem.head_dim_v, least=LEAST_SIDE)
    return columns * 2 if problem.dtype == torch.float32 else columns


def forward_row(problem: Problem) -> str:
    """Return the table's row for the forward."""
    wide, rows = width(problem), typical_rows(problem)
    if wide > 128:
        return "wide" if wide <= 256 else "widest"
    if problem.broadcast_q and rows <= RESIDENT_ROWS:
        return "forward-shared-64" if rows <= 64 else "forward-shared-128"
    if are_brief(BRIEF, problem):
        return "forward-brief-d64" if wide <= 64 else "forward-brief"
    return "forward-long" if rows > LONG else "forward-short"


def forward_tile(problem: Problem) -> Tile:
    """Return the forward's configuration: query rows of the tile, key rows per step."""
    if problem.device.type == "cpu":
        return EMULATED
    return fitted(TILES[forward_row(problem)], problem, 1, 2)


def split_workers(problem: Problem) -> int:
    """Return workers per head that mega-sequences are split over keys for; 0: not split.

    Known from shapes alone: where there are at most a few tiles for each multiprocessor, the longest one ends last and alone, or
    some have nothing to do at all. Where there are many, splitting costs more than it balances (docs/portable-notes.md).
    """
    if problem.device.type == "cpu":
        return 4
    sms, keep = num_sms(problem.device, EMULATED_SMS), forward_tile(problem).keep
    tiles = -(-problem.rows_q * problem.group_size // keep)
    tiles = tiles * problem.num_batches if problem.broadcast_q else tiles + problem.num_batches
    return SPLIT * sms // problem.num_kv_heads if tiles * problem.num_kv_heads < FEW_TILES * sms else 0


def dkdv_tile(problem: Problem) -> Tile:
    """Return key rows kept, packed query rows per step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return _wide_backward("wide-dkdv", problem)
    row = "dkdv" if wide > 64 else "dkdv-brief-d64" if are_brief(BRIEF, problem) else "dkdv-d64"
    return fitted(TILES[row], problem, 2, 2)


def _wide_backward(row: str, problem: Problem) -> Tile:
    if width(problem) > 256:
        return TILES["widest"]
    if problem.dtype == torch.float32:
        return TILES["wide-backward-fp32"]
    if row == "wide-dkdv" and generation(problem.device) >= 10:
        row += "-sm100"
    return fitted(TILES[row], problem, 2, 2)


def dq_tile(problem: Problem) -> Tile:
    """Return packed query rows kept, key rows per step."""
    if problem.device.type == "cpu":
        return EMULATED
    wide = width(problem)
    if wide > 128:
        return _wide_backward("wide-dq", problem)
    if are_brief(TINY, problem):
        row = "dq-tiny" if wide > 64 else "dq-tiny-d64"
    else:
        row = "dq-long" if typical_rows(problem) > LONG and wide > 64 else "dq-short"
    return fitted(TILES[row], problem, 2, 2)


def is_resident(problem: Problem) -> bool:
    """Return whether the backward can keep the whole shared query and its dQ on chip."""
    wide, full = width(problem), problem.dtype == torch.float32
    most = 0 if wide > 256 else 32 if wide > 128 else 64 if full else RESIDENT_ROWS
    if shared_memory(problem.device) < LARGE_MEMORY:
        most = min(most, 32)
    return problem.broadcast_q and packed_rows(problem) <= most


def resident_row(problem: Problem) -> str:
    """Return the table's row for the backward of a short shared query."""
    return "resident-64" if packed_rows(problem) <= 64 else "resident-128"


def resident_tile(problem: Problem) -> Tile:
    """Return packed rows kept (all of them), key rows per step, for the backward of a short shared query."""
    rows, wide = max(LEAST_SIDE, power_of_two(packed_rows(problem))), width(problem)
    if problem.device.type == "cpu":
        return Tile(rows, 16, 4, 1)
    if wide > 128 or problem.dtype == torch.float32:
        if wide <= 256 and problem.dtype != torch.float32 and generation(problem.device) == 9:  # measured there only
            return fitted(replace(TILES["wide-resident"], keep=rows), problem, 3, 2)
        return Tile(rows, 32, 4, 1)
    row = resident_row(problem)
    if row == "resident-128" and generation(problem.device) >= 10:
        row += "-sm100"
    return fitted(replace(TILES[row], keep=rows), problem, 3, 2)


def resident_workers(problem: Problem) -> int:
    """Return the programs per key/value head of the shared query's backward."""
    if problem.device.type == "cpu":
        return 4
    return max(1, WORKERS[resident_row(problem)] * num_sms(problem.device, EMULATED_SMS) // problem.num_kv_heads)


def piece(problem: Problem) -> int:
    """Return keys of one piece in the shared query's backward."""
    return 64 if problem.device.type == "cpu" else PIECE[resident_row(problem)]


# ------------------------------------------------------------------------------------------------------- how tiles are cut
def forward_cut(problem: Problem, tile: Tile | None = None, workers: int | None = None) -> Cut:
    """Return how the forward's queries are cut; with ``workers`` mega-sequences are split for that many per head."""
    tile = tile or forward_tile(problem)
    workers = split_workers(problem) if workers is None else workers
    # on the emulator short tests are to split as well
    least_chunk = 64 if problem.device.type == "cpu" else LEAST_CHUNK
    return Cut(tile.keep, pack=problem.group_size, slots=2 * workers, least_chunk=least_chunk)


def dq_cut(problem: Problem, tile: Tile | None = None) -> Cut:
    """Return how the queries are cut for dQ."""
    return Cut((tile or dq_tile(problem)).keep, pack=problem.group_size)


def dkdv_cut(problem: Problem, tile: Tile | None = None) -> Cut:
    """Return how the keys are cut for dK and dV."""
    return Cut((tile or dkdv_tile(problem)).keep, keys=True)


def resident_cut(keys: int) -> Cut:
    """Return how the keys are cut for a resident query: pieces of ``keys``, the rests by themselves, as they are dealt out."""
    return Cut(keys, keys=True, rests=True)
