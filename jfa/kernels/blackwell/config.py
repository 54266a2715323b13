"""Compile-time configuration of each Blackwell kernel: the host's choices, and facts that the problem dictates.

A kernel takes one of these objects as its constexpr ``cfg``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton.language as tl

from jfa.kernels.base import Problem
from jfa.kernels.common.host import padded_head_dim

BLOCK = 128  # rows of a softmax or compute group, keys of a block: the M of one MMA and its N
BLOCK_M = tl.constexpr(BLOCK)
BLOCK_N = tl.constexpr(BLOCK)
HALF_M = tl.constexpr(BLOCK // 2)  # queries of a compute group in the backward
TAIL = 64  # columns of Q and K beyond the 128 of a box
WIDE_BLOCK = tl.constexpr(64)  # rows of a block in the backward of such rows
FORMS = ("resident", "pair", "single", "wide")
PAIR_KEYS = 512  # mean keys per sequence from which a pair of CTAs is worth its half-empty last tiles


@dataclass(frozen=True)
class Config:
    """Facts about a problem that every kernel needs.

    Attributes:
        heads: heads of the tile list; a unit of work is one tile of one of them.
        group: query heads per key head.
        head_dim: columns of every tile, 64 or 128; TMA fills what a tensor lacks with zeros.
        has_lo, has_hi: which sides of the band are bounded.
    """

    heads: int
    group: int
    head_dim: int
    has_lo: bool
    has_hi: bool


@dataclass(frozen=True)
class ForwardConfig(Config):
    """Choices of the forward; apart from ``negative`` they do not change its result.

    Attributes:
        negative: whether sm_scale is below 0.
        split_keys: tiles of 128 queries whose keys are divided between the softmax groups; else tiles of 256.
        clc: steal tiles through cluster launch control; else deal them in zigzag.
        kv_slots: ring of K and V blocks.
        softmax_registers: per thread of the softmax groups; the correction gets the registers that remain.
        small_registers: per thread of mma, load and store.
        p_slices: slices in which P is stored and handed to the mma role.
        fma_eighths: eighths of each slice's columns whose exp2 runs on the FMA pipe.
        o_parts: column parts in which O is stored.
        o_slots: buffers through which the parts are stored in turn; a divisor of o_parts.
        o_columns: columns of O that the correction holds in registers at a time.
        tail_dim: columns of Q and K beyond ``head_dim``, 0 or 64.
        tail_slots: ring of those columns of K.
        list_heads: heads of the block lists that tiles walk, which then split their keys; 0: they walk their band.
        broadcast_q: with block lists: whether all sequences have the same queries.
    """

    negative: bool
    split_keys: bool
    clc: bool
    kv_slots: int
    softmax_registers: int
    small_registers: int
    p_slices: int = 2
    fma_eighths: int = 2
    o_parts: int = 2
    o_slots: int = 2
    o_columns: int = 32
    tail_dim: int = 0
    tail_slots: int = 2
    list_heads: int = 0
    broadcast_q: bool = False

    @property
    def tile_rows(self) -> int:
        """Number of queries in a whole tile."""
        return BLOCK if self.split_keys else 2 * BLOCK

    @property
    def q_halves(self) -> int:
        """Buffers of Q, one per half; where all tiles split their keys the second one's memory is the ring's."""
        return 1 if self.split_keys else 2


@dataclass(frozen=True)
class Mxfp8Config(ForwardConfig):
    """Choices of the MXFP8 forward; those of the forward that do not apply to it are ``p_slices`` and ``fma_eighths``.

    Attributes:
        broadcast_q: all sequences share the queries, and their scales.
        kv_slots: buffers of the rings of K and of V together.
        fma_parts: sixteenths of a block's columns whose exp2 runs on the FMA pipe.
        margin: bits by which a maximum that has to grow exceeds the scores, so that later ones need no rescaling. P is rounded to
            multiples of 2**-9 / 2**8 where it is small, so a margin costs it as many bits there.
    """

    broadcast_q: bool = False
    fma_parts: int = 4
    margin: int = 4


@dataclass(frozen=True)
class BackwardConfig(Config):
    """Choices of the backward; they affect only the order in which dQ is summed.

    Attributes:
        form: "resident": Q and dQ stay on the chip (broadcast queries, at most 128 in all heads that share keys). "pair": tiles of
            256 keys on two CTAs. "single": tiles of 128 keys. "wide": dK and dV of 128 keys, and another kernel for dQ, as
            :class:`WideConfig` says. Of the attributes below the resident form reads the registers only, the pair none about
            rings, the wide form none.
        with_dq: add up dQ; else another kernel makes it.
        broadcast_q: all sequences add to the same dQ.
        clc: steal tiles through cluster launch control; else a static schedule.
        zigzag: static schedule in zigzag, else round robin (which keeps the key blocks of a sequence together).
        do_slots, q_slots: rings of dO, and of Q with its rows' lse and delta.
        held_slices: slices of dQ loaded into registers, so that tensor memory is released before they are stored.
        dq_stages: SMEM buffers through which slices of dQ are stored; a divisor of the number of slices.
        dq_columns: columns of a slice of dQ.
        compute_registers: per thread of the compute groups; the reduction gets the registers that remain.
        small_registers: per thread of mma and load.
        mma_registers: per thread of the pair's mma role, whose two code paths per tile need more.
        columns: columns of P and dS that a compute group works on at a time.
        list_heads: heads of the transposed block lists that tiles walk; 0: they walk their band.
    """

    form: str
    with_dq: bool
    broadcast_q: bool
    clc: bool
    zigzag: bool
    do_slots: int
    held_slices: int
    compute_registers: int
    q_slots: int = 2
    dq_stages: int = 4
    dq_columns: int = 16
    small_registers: int = 40
    mma_registers: int = 72
    columns: int = 32
    list_heads: int = 0

    @property
    def ctas(self) -> int:
        """CTAs that share a tile."""
        return 2 if self.form == "pair" else 1

    @property
    def tile_rows(self) -> int:
        """Number of keys in a tile."""
        return self.ctas * BLOCK

    @property
    def dk_takes_dv(self) -> bool:
        """Whether tensor memory is full in the resident form, so that dK lies where dV was."""
        return self.head_dim == 128

    @property
    def dq_takes_dp(self) -> bool:
        """Whether tensor memory is full in the general form, so that dQ lies where dP was."""
        return self.head_dim == 128

    @property
    def head_rows(self) -> int:
        """Number of queries per head in a block that several heads share; 0 where a block is one head's."""
        return BLOCK // self.group if self.form == "resident" and self.group > 1 else 0


@dataclass(frozen=True)
class DqConfig(Config):
    """Choices of the deterministic dQ: rings of ``kv_slots`` blocks of K and as many of V; other fields as in
    BackwardConfig."""

    kv_slots: int = 2
    dq_columns: int = 16
    compute_registers: int = 160
    small_registers: int = 80


@dataclass(frozen=True)
class WideConfig(Config):
    """Choices of the backward of queries and keys with a tail, in both of its kernels; they change no result.

    Attributes:
        tail_dim: columns of Q and K beyond ``head_dim``.
        slots: ring of blocks with a tail: of Q, with its rows' lse and delta; in dQ's kernel of K.
        value_slots: ring of blocks of dO; in dQ's kernel of V.
        compute_registers: per thread of the compute groups; the load role gets what all others leave.
        small_registers: per thread of mma and store.
    """

    tail_dim: int = TAIL
    slots: int = 3
    value_slots: int = 2
    compute_registers: int = 176
    small_registers: int = 64


def forward_config(problem: Problem, clc: bool = True) -> ForwardConfig:
    """Choose tiles of 128 queries where no sequence is longer, and for block lists; ring buffers fill the shared memory.

    Stealing is the default: on skewed lengths a queue over the sorted list ends earlier than any fixed deal of it.
    """
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    lists = problem.block_lists
    tail_dim = TAIL if problem.head_dim > BLOCK else 0
    split_keys = 0 < longest <= BLOCK or lists is not None
    common = _common(problem, problem.num_heads)
    slots = (5 if split_keys else 4) - (tail_dim > 0)
    return ForwardConfig(
        **common,
        negative=problem.sm_scale < 0,
        split_keys=split_keys,
        clc=clc,
        kv_slots=slots * (128 // common["head_dim"]),
        **_forward_registers(problem, split_keys, clc),
        o_parts=4 if tail_dim else 2,  # as many bytes less between O and memory as a tail of K takes
        tail_dim=tail_dim,
        tail_slots=2 if split_keys else 1,
        list_heads=lists.heads if lists else 0,
        broadcast_q=lists is not None and problem.broadcast_q,
    )


def mxfp8_config(problem: Problem, clc: bool = True) -> Mxfp8Config:
    """Choose the MXFP8 forward as :func:`forward_config` does the forward; buffers of the ring are half as large."""
    longest = problem.rows_q if problem.broadcast_q else problem.max_seq_len_q
    split_keys = 0 < longest <= BLOCK
    common = _common(problem, problem.num_heads)
    masked = problem.band.has_lo or problem.band.has_hi
    return Mxfp8Config(
        **common,
        negative=problem.sm_scale < 0,
        split_keys=split_keys,
        clc=clc,
        kv_slots=8 * (128 // common["head_dim"]),
        softmax_registers=192 if masked else 184,
        small_registers=24 if masked else 32,
        broadcast_q=problem.broadcast_q,
    )


def _forward_registers(problem: Problem, split_keys: bool, clc: bool) -> dict[str, int]:
    """Return the registers per thread with which softmax and correction, which gets what is left, spill least (`jfa compile`)."""
    causal = problem.band.has_hi and not (split_keys or problem.band.has_lo)
    if problem.block_lists is not None or causal and clc:
        small = 40
    elif causal or split_keys or problem.band.has_lo:
        small = 32
    else:
        small = 24
    return dict(softmax_registers=192, small_registers=small)


def backward_form(problem: Problem) -> tuple[str, str]:
    """Return which form of the backward a problem gets, one of ``FORMS``, and why, in words.

    Lengths are known by shapes only, so what counts is the mean number of keys per sequence.
    """
    group, columns = problem.group_size, max(problem.head_dim, problem.head_dim_v)
    keys = problem.rows_kv // max(problem.num_batches, 1)
    if problem.head_dim > BLOCK:
        return "wide", f"head dim {problem.head_dim} (> {BLOCK}) leaves dQ no tensor memory next to them"
    resident = problem.broadcast_q and problem.rows_q * group <= BLOCK and group in (1, 2, 4, 8, 16)
    if resident and problem.block_lists is None:
        return "resident", f"{problem.rows_q} queries x {group} heads per key head (<= {BLOCK}) stay on chip"
    if why := pair_refused(problem):
        return "single", why
    if columns <= 64:
        return "single", f"head dim {columns} (<= 64) would leave half of a pair's columns empty"
    if keys < PAIR_KEYS:
        return "single", f"{keys} keys per sequence (< {PAIR_KEYS}) fill a pair's tiles of {2 * BLOCK} keys badly"
    return "pair", f"{keys} keys per sequence (>= {PAIR_KEYS}) and head dim {columns}"


def pair_refused(problem: Problem) -> str | None:
    """Return why a pair of CTAs cannot run a problem, or None."""
    if problem.deterministic:
        return "deterministic=True gives dQ a kernel of its own"
    if problem.block_lists is not None:
        return "the kernel for pairs walks no block lists"
    return None


def backward_config(problem: Problem, clc: bool = True, form: str | None = None) -> BackwardConfig:
    """Choose stealing unless the order matters; broadcast queries, whose key tiles all cost the same, are dealt round robin.

    ``form`` forces one; :func:`backward_form` chooses it otherwise.
    """
    form = form or backward_form(problem)[0]
    if form not in FORMS:
        raise ValueError(f"form {form!r} is not one of {', '.join(FORMS)}")
    if form == "pair" and pair_refused(problem):
        raise ValueError(f"form='pair' cannot be forced: {pair_refused(problem)}")
    if (form == "wide") != (problem.head_dim > BLOCK):
        raise ValueError(f"form={form!r} cannot be forced: 'wide' is for head dims beyond {BLOCK}, and only it")
    common = _common(problem, problem.num_kv_heads)
    if form == "pair":
        common["head_dim"] = BLOCK
    small = common["head_dim"] == 64
    return BackwardConfig(
        **common,
        form=form,
        with_dq=not problem.deterministic,
        broadcast_q=problem.broadcast_q,
        clc=clc and not problem.deterministic,
        zigzag=not problem.broadcast_q,
        do_slots=2 if small else 1,
        held_slices=4 if small else 5,
        # As many as compile without spills together with the slices of dQ that the reduction holds.
        compute_registers=192 if small else 176 if form == "pair" else 184,
        dq_stages=2 if form == "pair" else 4,
        list_heads=problem.block_lists.heads if problem.block_lists else 0,
    )


def mxfp8_backward_config(problem: Problem, clc: bool = True) -> BackwardConfig:
    """Choose the MXFP8 backward's configuration: the general form, in which every tile's dQ is added up."""
    config = backward_config(problem, clc=clc, form="single")
    # As many slices as compile with next to no spills (`jfa compile`); at D = 64 there are four in all.
    held = 2 if config.head_dim == 64 else 4 if config.has_lo or config.has_hi else 3
    return replace(config, with_dq=True, do_slots=1, held_slices=held, compute_registers=200, small_registers=32)


def dq_config(problem: Problem) -> DqConfig:
    """Return the deterministic dQ's configuration."""
    return DqConfig(**_common(problem, problem.num_heads))


def wide_config(problem: Problem, keys: bool) -> WideConfig:
    """Return the configuration of the backward of queries and keys with a tail: of dK and dV, whose tiles are of keys, or of dQ."""
    return WideConfig(**_common(problem, problem.num_kv_heads if keys else problem.num_heads))


def plain_config(problem: Problem) -> Config:
    """Return the configuration of the kernel without specialized warps."""
    return Config(**_common(problem, problem.num_heads))


def _common(problem: Problem, heads: int) -> dict[str, int | bool]:
    """Return the fields of :class:`Config`; columns of Q and K beyond 128 are a kernel's ``tail_dim``."""
    head_dim = padded_head_dim(min(problem.head_dim, BLOCK), problem.head_dim_v, least=64)
    return dict(
        heads=heads, group=problem.group_size, head_dim=head_dim, has_lo=problem.band.has_lo, has_hi=problem.band.has_hi
    )
