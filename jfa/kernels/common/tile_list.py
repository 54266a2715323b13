"""Lists of tiles in falling order of each tile's own work, without a sort, and without the host reading anything back.

For kernels that assign the tiles of a list statically. Where tiles are drawn from a queue, sequences in falling order
of work suffice, which takes fewer comparisons: :mod:`jfa.kernels.common.planner`, whose records these are. ``counts``
[2] int32 = (tiles with work, all tiles).

Sorting without a sort: a tile's slot is the number of tiles before it. With work measured in rows of the other side, those of one
sequence that have more than some amount lie side by side: the work of its t-th tile is the least of four numbers,

    all rows there are,   the band's width,   one that grows by a tile's rows with t,   one that falls by as much

so they are counted by a subtraction. Ties are ordered by sequence, then by row, so a list is deterministic.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa.kernels.base import Problem
from jfa.kernels.common.host import band_constants
from jfa.kernels.common.nouns import RECORD, aggregate, store_record
from jfa.kernels.common.sequences import BandConstants, Offsets, Sequences, Sizes

FAR = tl.constexpr(1 << 29)  # an open side of a band, where bounds are added and must not overflow
_TILES = 16  # tiles of a sequence that a program places at once
_OTHERS = 256  # sequences that it counts at once


def tile_list(problem: Problem, block: int, keys: bool, pad: int) -> tuple[Tensor, Tensor]:
    """Return (records, counts) of a problem's tiles of ``block`` queries or, with ``keys``, of ``block`` keys.

    ``pad``: rows to whose multiples the backward pads each sequence's queries (see jfa.kernels.common.padded_rows). Sequences
    without rows have no tile; neither do shared queries whose slot is not inside the output.
    """
    batches = problem.num_batches
    if problem.broadcast_q and not keys:
        capacity = batches * -(-problem.rows_q // block)
    else:
        capacity = -(-(problem.rows_kv if keys else problem.rows_q) // block) + batches
    records = torch.empty(capacity if batches else 0, RECORD.value, dtype=torch.int32, device=problem.device)
    counts = torch.empty(2, dtype=torch.int32, device=problem.device)
    if not records.numel():
        return records, counts.zero_()
    slots = problem.output_offset if problem.output_offset is not None else problem.key_offset
    parts = min(64, -(-capacity // (_TILES * batches)))
    list_kernel[(batches, parts)](
        *(problem.query_offset, problem.key_offset, slots),
        *(records, counts),
        *(batches, problem.rows_q, problem.rows_kv, problem.rows_out, capacity),
        *band_constants(problem.band),
        BLOCK=block,
        KEYS=keys,
        BROADCAST_Q=problem.broadcast_q,
        SLOTS=problem.output_offset is not None,
        PAD=pad,
        TILES=_TILES,
        OTHERS=_OTHERS,
    )
    return records, counts


@triton.jit(do_not_specialize="batches rows_q rows_kv rows_out capacity lo_start lo_end hi_start hi_end".split())
def list_kernel(
    query_offset,
    key_offset,
    output_offset,
    records,
    counts,
    batches,
    rows_q,
    rows_kv,
    rows_out,
    capacity,
    lo_start,
    lo_end,
    hi_start,
    hi_end,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    BROADCAST_Q: tl.constexpr,
    SLOTS: tl.constexpr,
    PAD: tl.constexpr,
    TILES: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Place every parts-th group of TILES tiles of a sequence. Grid: (batches, parts)."""
    output = None
    if SLOTS:
        output = output_offset
    band = BandConstants(lo_start, lo_end, hi_start, hi_end)
    rows = Sizes(batches, rows_q, rows_kv, rows_out)
    sequences = Sequences(Offsets(query_offset, key_offset, output), rows, band, BROADCAST_Q, True, True, False, PAD)
    s = tl.program_id(0)
    tile, sides = sides_of(sequences, s, KEYS)
    for base in range(tl.program_id(1) * TILES, tl.cdiv(sides.rows, BLOCK), tl.num_programs(1) * TILES):
        t = base + tl.arange(0, TILES)
        slot = slot_of(sequences, s, t, sides, BLOCK, KEYS, OTHERS)
        inside = (t < tl.cdiv(sides.rows, BLOCK)) & (slot < capacity)
        store_record(records, slot, tile, t * BLOCK, inside)
    if (s == 0) & (tl.program_id(1) == 0):
        count_tiles(counts, sequences, capacity, BLOCK, KEYS, OTHERS)


@aggregate
class Sides:
    """A sequence as the list sees it: row i of its ``rows`` sees the rows i + low .. i + high of the ``other`` side's."""

    rows: tl.tensor
    other: tl.tensor
    low: tl.tensor
    high: tl.tensor


@triton.jit
def sides_of(sequences, s, KEYS: tl.constexpr):
    """Return (Tile at row 0, Sides) of the sequences ``s``, numbered from 0; there are no rows past the last one."""
    tile, _ = sequences.tile(tl.minimum(s, sequences.rows.batches - 1), KEYS)
    real = s < sequences.rows.batches
    low = tl.maximum(tile.band.lo, -FAR)
    high = tl.minimum(tile.band.hi, FAR)
    if KEYS:
        sides = Sides(tl.where(real, tile.kv.length, 0), tile.q.length, -high, -low)
    else:
        sides = Sides(tl.where(real, tile.q.length, 0), tile.kv.length, low, high)
    return tile, sides


@triton.jit
def slot_of(sequences, s, tile, sides, BLOCK: tl.constexpr, KEYS: tl.constexpr, OTHERS: tl.constexpr):
    """Return the places of the tiles ``tile`` [N] of the sequence ``s``: the number of tiles before each."""
    rising = (tile + 1) * BLOCK + sides.high
    falling = sides.other - sides.low - tile * BLOCK
    work = tl.minimum(tl.minimum(sides.other, BLOCK + sides.high - sides.low), tl.minimum(falling, rising))
    work = tl.maximum(work, 0)
    slot = ties_before(tile, work, sides, BLOCK)
    for start in range(0, sequences.rows.batches, OTHERS):
        others = start + tl.arange(0, OTHERS)[None, :]
        _, theirs = sides_of(sequences, others, KEYS)
        first, end = tiles_above(work[:, None] - (others < s), theirs, BLOCK)
        slot += tl.sum(end - first, 1)
    return slot


@triton.jit
def count_tiles(counts, sequences, capacity, BLOCK: tl.constexpr, KEYS: tl.constexpr, OTHERS: tl.constexpr):
    """Write how many tiles have work, and how many there are."""
    busy = 0
    total = 0
    for start in range(0, sequences.rows.batches, OTHERS):
        _, theirs = sides_of(sequences, start + tl.arange(0, OTHERS), KEYS)
        first, end = tiles_above(theirs.rows * 0, theirs, BLOCK)
        busy += tl.sum(end - first, 0)
        total += tl.sum(tl.cdiv(theirs.rows, BLOCK), 0)
    tl.store(counts, tl.minimum(busy, capacity))
    tl.store(counts + 1, tl.minimum(total, capacity))


@triton.jit
def tiles_above(work, sides, BLOCK: tl.constexpr):
    """Return (first, end) of the tiles of a sequence that have more than ``work`` to do; all of them have more than -1."""
    tiles = tl.cdiv(sides.rows, BLOCK)
    first = tl.maximum((work - sides.high) // BLOCK, 0)
    end = tl.minimum(tl.cdiv(sides.other - sides.low - work, BLOCK), tiles)
    some = (sides.other > work) & (BLOCK + sides.high - sides.low > work) & (first < end)
    first = tl.where(some & (work >= 0), first, 0)
    end = tl.where(work < 0, tiles, tl.where(some, end, 0))
    return first, end


@triton.jit
def ties_before(tile, work, sides, BLOCK: tl.constexpr):
    """Return how many tiles of the sequence before ``tile`` have exactly the same ``work``."""
    first, end = tiles_above(work, sides, BLOCK)
    least_first, least_end = tiles_above(work - 1, sides, BLOCK)
    at_least = tl.maximum(tl.minimum(least_end, tile) - least_first, 0)
    return at_least - tl.maximum(tl.minimum(end, tile) - first, 0)
