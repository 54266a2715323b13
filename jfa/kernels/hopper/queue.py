"""The work queue of a persistent kernel: a counter that producers draw from, and a ring that announces what was drawn.

Blackwell has hardware for this (CLC); here one atomic add per tile does it. A queue balances load that a static
schedule (zigzag) cannot predict: on the benchmark's PMA shape with 128 queries the most loaded SM had 1.42 times the
mean under zigzag and 1.02 times with the queue, by simulation. The order of tiles and their SM then vary from run to
run; the result of a tile does not depend on them.

The producer draws when it has issued the last load of a tile, and no earlier. Drawing a few tiles ahead hides the
atomic's latency, but gives every SM its first tiles at once, which amounts to a static schedule for heavy-tailed
lengths (measured: PMA 16 % slower).

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.nouns import aggregate, load_tile
from jfa.kernels.common.ring import Ring

# Tiles that all heads work through before the next ones: their keys and values stay in L2.
CHUNK = tl.constexpr(32)
# Announced units that consumers may lag behind.
SLOTS = tl.constexpr(2)


@aggregate
class Queue:
    """A list of tiles, and how its units, (tile, head) pairs, are handed out.

    Attributes:
        records, num_tiles: the list.
        units: how many there are.
        heads: number of heads per tile.
        counter: pointer to one int32 that was 0 at launch.
        numbers: ring that tells consumers which units the producer drew.
        by_column: the program's grid column is the head, and a column's units are tiles.
        static: units are assigned in zigzag, the same ones to every program in every run.
        has_lo, has_hi: of the tiles' bands.
    """

    records: tl.tensor
    num_tiles: tl.tensor
    units: tl.tensor
    heads: tl.tensor
    counter: tl.tensor
    numbers: Ring
    by_column: tl.constexpr
    static: tl.constexpr
    has_lo: tl.constexpr
    has_hi: tl.constexpr

    @triton.jit
    def draw(self, done):
        """Take, as producer, the next unit and announce it to the consumers; one past the end tells them to stop.

        A program's first unit is its own number, so its first load does not wait for an atomic.
        """
        if self.static:
            worker = tl.program_id(0)
            workers = tl.num_programs(0)
            unit = done * workers + worker + done % 2 * (workers - 1 - 2 * worker)
        else:
            unit = tl.program_id(0)
            if done > 0:
                unit = tl.num_programs(0) + tl.atomic_add(self.counter, 1, sem="relaxed")
        slot, phase = self.numbers.slot(done)
        tlx.barrier_wait(self.numbers.empties[slot], phase ^ 1)
        tlx.local_store(self.numbers.buffers[slot], tl.full([1], unit, tl.int32))
        tlx.barrier_arrive(self.numbers.fulls[slot], 1)
        return unit

    @triton.jit
    def receive(self, done):
        """Return, to a consumer, the unit that the producer drew after ``done`` others."""
        slot, phase = self.numbers.slot(done)
        tlx.barrier_wait(self.numbers.fulls[slot], phase)
        unit = tl.max(tlx.local_load(self.numbers.buffers[slot]), 0)
        tlx.barrier_arrive(self.numbers.empties[slot], 1)
        return unit

    @triton.jit
    def next_tile(self, unit):
        """Return (tile, head) of a unit. One past the end gives tile 0: a record may be read for it, and is not used.

        Units run through chunks of CHUNK tiles; in a chunk head by head. Lists are sorted longest first, so neighbors
        have about the same length.
        """
        if self.by_column:
            tile = tl.where(unit < self.num_tiles, unit, 0)
            head = tl.program_id(1)
        else:
            # Not self.units, which is the loop's bound: the compiler would keep that comparison, and spill 12 bytes.
            unit = tl.where(unit < self.num_tiles * self.heads, unit, 0)
            first = unit // (CHUNK * self.heads) * CHUNK
            size = max(1, min(CHUNK, self.num_tiles - first))
            rest = unit - first * self.heads
            head = rest // size
            tile = first + rest % size
        return load_tile(self.records, tile, self.has_lo, self.has_hi), head


@triton.jit
def alloc_numbers(CONSUMERS: tl.constexpr):
    """Allocate the ring that announces units to so many consumers."""
    numbers = tlx.local_alloc((1,), tl.int32, SLOTS)
    fulls = tlx.alloc_barriers(SLOTS, arrive_count=1)
    empties = tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS)
    return Ring(numbers, fulls, empties, SLOTS, 4, 0)
