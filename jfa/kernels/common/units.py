"""From a unit of work to a tile: what a persistent kernel does before each tile.

A tile list (:class:`jfa.schedule.Tiles`) is for one head; unit u is tile ``u // HEADS``, head ``u % HEADS``: the heads of a tile,
which cost the same and share keys under GQA, stand side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def this_cta():
    """tl.program_id(0), read anew where it is asked for.

    The warps of all roles but the first wait for work in a loop. Compilers take what never changes out of that loop, ask for it
    once, and keep it in a register of every role, which a role that needs all of its own pays for with spills. What looks as if it
    might change stays where it is.
    """
    return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def all_ctas():
    """tl.num_programs(0), read anew where it is asked for; see :func:`this_cta`."""
    return tl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def zigzag_unit(round_, worker, workers):
    """The unit that ``worker`` takes in ``round_`` of a longest-first list: every second round is dealt backwards.

    It grows with the round, so a worker is done at the first unit past the list. See :func:`jfa.schedule.zigzag_slot`.
    """
    backwards = round_ & 1
    return round_ * workers + worker + backwards * (workers - 1 - 2 * worker)


@triton.jit
def ring(count, BUFFERS: tl.constexpr):
    """(buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@triton.jit
def has_work(unit, units):
    """Whether ``unit`` is one of the list's ``units``; a queue that has run dry answers -1."""
    return (unit >= 0) & (unit < units)


@triton.jit
def next_unit(done, answer, CLC: tl.constexpr, ZIGZAG: tl.constexpr = True):
    """Return the unit that this CTA takes after ``done + 1`` of them: the queue's ``answer``, or its turn in a static deal.

    The answer is read by the kernel itself: a queue cannot be passed to a function (fbtriton 3.7.4 gives its responses the wrong type).
    """
    if CLC:
        return answer
    elif ZIGZAG:
        return zigzag_unit(done + 1, this_cta(), all_ctas())
    else:
        return (done + 1) * all_ctas() + this_cta()
