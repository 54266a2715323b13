"""Map a unit of work to a tile, as a persistent kernel does before each tile.

A tile list (:class:`jfa.schedule.Tiles`) is for one head; unit u is tile ``u // HEADS``, head ``u % HEADS``: the heads
of a tile, which cost the same and share keys under GQA, have consecutive units.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl

from jfa.kernels.common.nouns import aggregate, load_tile


@triton.jit
def this_cta():
    """Return tl.program_id(0), read again at each call.

    The warps of all roles but the first wait for work in a loop. Compilers take what never changes out of that loop, ask for it
    once, and keep it in a register of every role, which a role that needs all of its own pays for with spills. What looks as if it
    might change stays where it is.
    """
    return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def all_ctas():
    """Return tl.num_programs(0), read again at each call; see :func:`this_cta`."""
    return tl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def zigzag_unit(round_, worker, workers):
    """Return the unit that ``worker`` takes in ``round_`` of a longest-first list: every second round is dealt backwards.

    It grows with the round, so a worker is done at the first unit past the list. See :func:`jfa.schedule.zigzag_slot`.
    """
    backwards = round_ & 1
    return round_ * workers + worker + backwards * (workers - 1 - 2 * worker)


@aggregate
class Walk:
    """The progress of a role through a tile list. Every role of a CTA takes the same units in the same order.

    Attributes:
        unit: the unit it is at; -1, or one past the list, at its end.
        units: units of the list that have work.
        done: units that this CTA has finished.
        heads: per tile.
    """

    unit: tl.tensor
    units: tl.tensor
    done: tl.tensor
    heads: tl.constexpr

    @triton.jit
    def going(self):
        """Return whether there is a unit; -1 is past the list as an unsigned number."""
        return self.unit.to(tl.uint32) < self.units.to(tl.uint32)

    @triton.jit
    def head(self):
        """Return the unit's head."""
        return self.unit % self.heads

    @triton.jit
    def tile(self, records, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
        """Read the unit's record."""
        return load_tile(records, self.unit // self.heads, HAS_LO, HAS_HI)

    @triton.jit
    def stage(self, STAGES: tl.constexpr):
        """Return which of a queue's STAGES, a power of two, holds the answer for the unit after this one."""
        return self.done & (STAGES - 1)

    @triton.jit
    def phase(self, STAGES: tl.constexpr):
        """Return the phase in which that answer arrives."""
        return (self.done & STAGES) // STAGES

    @triton.jit
    def next(self, answer, CLC: tl.constexpr, ZIGZAG: tl.constexpr = True):
        """Return the walk at its next unit: the queue's ``answer``, or this CTA's turn in a static deal.

        The kernel itself reads the answer: a queue cannot be passed to a function, where fbtriton 3.7.4 mistakes the type of its
        responses.
        """
        done = self.done + 1
        if CLC:
            unit = answer
        elif ZIGZAG:
            unit = zigzag_unit(done, this_cta(), all_ctas())
        else:
            unit = done * all_ctas() + this_cta()
        return Walk(unit, self.units, done, self.heads)


@triton.jit
def first_unit(counts, HEADS: tl.constexpr):
    """Start a walk through a list; ``counts`` begins with its number of tiles that have work."""
    return Walk(this_cta(), tl.load(counts) * HEADS, tl.to_tensor(0), HEADS)
