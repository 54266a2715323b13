"""Pairs of CTAs that work on one tile: which CTA's barrier counts what, and which unit of work a pair takes.

A product of a pair (``two_ctas=True``) has its rows on two SMs: each CTA holds its own rows of A and of the result, and half of
B's columns, which both tensor cores read. So boxes of B are halved, and a product starts only when both halves are there:

    who                     does                                             on whose barrier
    load, each CTA          TMA of its own rows and of its half of B         the leader's: it expects the bytes of both
    compute, each CTA       arrives when its operand is written              the leader's
    mma of the leader       waits, issues for both                           its own
    tensor cores            a commit with two_ctas                           both CTAs', so each CTA waits on its own barrier

A CTA can wait only on its own barriers, but can arrive at those of the other. The leader is the CTA of rank 0. The
compiler makes both CTAs wait for each other before the first instruction that could reach the other, and at the end of
a kernel with such products.

No ``from __future__ import annotations`` here: Triton reads the annotations as types.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.common.units import Walk, all_ctas, this_cta, zigzag_unit

CTAS = tl.constexpr(2)  # of a pair


@triton.jit
def leads():
    """Return whether this CTA is its pair's leader."""
    return tlx.cluster_cta_rank() == 0


@triton.jit
def arrive_at_leader(bar):
    """Arrive once at the leader's ``bar``."""
    tlx.barrier_arrive(bar, 1, remote_cta_rank=0)


@triton.jit
def expect_halves(bar, BYTES: tl.constexpr):
    """Announce BYTES of each CTA on the leader's ``bar``, which counts the copies of both. The other CTA does nothing."""
    tlx.barrier_expect_bytes(bar, CTAS * BYTES, pred=leads())


@triton.jit
def load_half(ring, count, desc, box):
    """Fill the count-th slot of a Ring with this CTA's half by TMA, once the products that read it in both CTAs are done."""
    slot, phase = ring.slot(count)
    tlx.barrier_wait(ring.empties[slot], phase ^ 1)
    expect_halves(ring.fulls[slot], ring.bytes)
    tlx.async_descriptor_load(desc, ring.buffers[slot], box, ring.fulls[slot], two_ctas=True)


@triton.jit
def first_pair(counts, HEADS: tl.constexpr):
    """Start a pair's walk through a list; see :func:`jfa.kernels.common.units.first_unit`."""
    return Walk(this_cta() // CTAS, tl.load(counts) * HEADS, tl.to_tensor(0), HEADS)


@triton.jit
def next_pair(walk, answer, cfg: tl.constexpr):
    """Return the walk at the pair's next unit; ``answer`` is the queue's, the number of a CTA or -1."""
    done = walk.done + 1
    if cfg.clc:
        unit = answer >> 1  # -1 stays -1
    elif cfg.zigzag:
        unit = zigzag_unit(done, this_cta() // CTAS, all_ctas() // CTAS)
    else:
        unit = done * (all_ctas() // CTAS) + this_cta() // CTAS
    return Walk(unit, walk.units, done, walk.heads)
