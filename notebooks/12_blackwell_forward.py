# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 The Blackwell forward
#
# **Goals.** Build the warp-specialized forward of a B200 step by step: from one role to the five of the package's kernel.
# (Two replicas of a task are one role here and everywhere in this course.)
# At each step predict what the timeline will show, then look.
# In the end explain every barrier of the package's kernel.
#
# **Time.** 150 minutes, and 385 for the exercises.
# **Needs.** Chapters 04 and 10.
# No GPU: the emulator runs every version; its cycles are a model of a B200.

# %%
import importlib
import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa
import jfa.emulator as emulator
from jfa import plots, reference
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline
from jfa.kernels.blackwell.modelled import busy_share, forward_launch, record_one_sm
from jfa.kernels.common.nouns import aggregate
from jfa.kernels.common.ring import Ring, alloc_ring
from jfa.masks import Band, block_kinds

DIM, BLOCK, BLOCKS = 128, 128, 8  # head dim; queries of a half and keys of a block; key blocks
D, BM, BN = tl.constexpr(DIM), tl.constexpr(BLOCK), tl.constexpr(BLOCK)  # as kernels read them

# %% [markdown]
# ## The mental model: four jobs that want to run at the same time
#
# One step of attention takes 256 queries, in two halves of 128, against a block of 128 keys.
# On one SM of a B200 its parts cost (FlashAttention-4 paper, cycles for D = 128):
#
# | job | unit | cycles |
# |---|---|---|
# | $S = QK^T$ and $O \mathrel{+}= PV$, both halves | tensor core | 2,048 |
# | $2 \cdot 128 \cdot 128$ exponentials | exp2 units (MUFU) | 2,048 |
# | operands of the products | shared memory | 1,536 |
# | K and V from memory | TMA | in parallel |
#
# If the jobs run one after another, a step costs their sum.
# If they overlap, it costs the largest.
# This chapter is about that overlap.
# The tensor core is asynchronous already; it is idle only while the other jobs make it wait.
#
# All versions solve one problem: 512 queries, two tiles of 256, against 1,024 keys of one head, on one SM.
# Versions 1 to 3 take 128 queries per program, the later ones 256; programs run one after another.
# The numbers are checked on a smaller problem, 256 queries against 384 keys, under three schedules.


# %%
def make_problem(len_q, len_kv, seed=0):
    """Return q, k, v of one head in bf16, and their dense attention in fp64."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, DIM, generator=g).bfloat16() for n in (len_q, len_kv, len_kv))
    want = torch.softmax(q.double() @ k.double().t() / math.sqrt(DIM), dim=1) @ v.double()
    return q, k, v, want


TILE, QUERIES = 2 * BLOCK, 4 * BLOCK
SMALL, LARGE = make_problem(TILE, 3 * BLOCK), make_problem(QUERIES, BLOCKS * BLOCK)
SCALE_LOG2 = math.log2(math.e) / math.sqrt(DIM)
SCORE = []  # (version, modelled cycles, tensor core busy: whole run, steady state)
LINES = {}  # version -> timeline of its first program


def launch(kernel, problem, rows=BLOCK, **constants):
    """Run a kernel of ``rows`` queries per program; return its output [queries, D]."""
    q, k, v, _ = problem
    out = torch.full(q.shape, float("nan"))
    boxes = [TensorDescriptor.from_tensor(t, [BLOCK, DIM]) for t in (q, k, v)]
    kernel[(len(q) // rows,)](*boxes, out, SCALE_LOG2, len(k) // BLOCK, **constants)
    return out


def model(run):
    """Run something on one modelled SM; return the timeline of all its programs."""
    return record_one_sm(run, B200)


def busy(line, begin, end):
    """Return the share of the cycles ``begin`` .. ``end`` in which the tensor core worked."""
    spans = [s for (_, unit), each in line.occupied.items() if unit == "tensor" for s in each]
    return sum(max(0, min(b, end) - max(a, begin)) for a, b in spans) / (end - begin)


def enter(name, line):
    """Add a modelled run to SCORE; return the timeline of its first program."""
    first = line.ctas()[0]
    mine = {key: spans for key, spans in line.occupied.items() if key[0] == first}
    LINES[name] = Timeline([e for e in line.events if e.cta == first], "B200", mine)
    steps = [e.start for e in LINES[name].events if e.track == "MMA" and e.target == "s[0]"]
    whole, steady = busy(line, line.start, line.end), busy(line, steps[2], steps[6])
    SCORE.append((name, line.cycles, whole, steady))
    print(f"{name}: {line.cycles:,.0f} modelled cycles, tensor core busy {whole:.0%} of the run,")
    print(f"{steady:.0%} in the steady state (blocks 2 to 5 of the first tile)")
    return LINES[name]


def study(name, kernel, launch=launch, small=SMALL, **constants):
    """Compare a version with fp64 on three schedules, then model it; return a timeline."""
    errors = []
    for policy in ("eager", "lazy", "random"):
        with emulator.options(policy=policy, seed=1):
            errors.append((launch(kernel, small, **constants) - small[3]).abs().max().item())
    print(f"largest error on three schedules: {max(errors):.1e}")
    return enter(name, model(lambda: launch(kernel, LARGE, **constants)))


def show(line, cycles=9000):
    """Draw a stretch of a version's timeline from the middle of its first program."""
    start = line.start + 0.4 * line.cycles
    words = f"{SCORE[-1][0]}: {cycles:,} cycles from the middle of the first program"
    return plots.timelines({words: line}, (start, start + cycles))


# %%
@triton.jit
def softmax_block(scores, m, l, scale_log2):
    """Return (P, alpha, new m, new l) of a step of the online softmax, in base 2."""
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores * scale_log2 - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def store_columns(out_ptr, row, column, values):
    """Store values [BM, N] to BM rows of out [queries, D], from column ``column`` on."""
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, values.shape[1])
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], values)


# %% [markdown]
# ## Version 1: one role does everything
#
# All steps run one after another: load, wait, multiply, wait, softmax, multiply, wait.
# `S`, `P` and the accumulator are in tensor memory.
#
# Predict: for which share of the time will the tensor core work?


# %%
@triton.jit
def one_role(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks):
    """Attend with the 128 queries of one program."""
    row = tl.program_id(0) * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    k = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    v = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)

    tlx.barrier_expect_bytes(q_full[0], 2 * BM * D)
    tlx.async_descriptor_load(q_desc, q[0], [row, 0], q_full[0])
    tlx.barrier_wait(q_full[0], 0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        phase = j & 1
        tlx.barrier_expect_bytes(kv_full[0], 4 * BN * D)
        tlx.async_descriptor_load(k_desc, k[0], [j * BN, 0], kv_full[0])
        tlx.async_descriptor_load(v_desc, v[0], [j * BN, 0], kv_full[0])
        tlx.barrier_wait(kv_full[0], phase)
        k_t = tlx.local_trans(k[0])
        tlx.async_dot(q[0], k_t, s[0], use_acc=False, mBarriers=[s_full[0]])
        tlx.barrier_wait(s_full[0], phase)
        p, alpha, m, l = softmax_block(tlx.local_load(s[0]), m, l, scale_log2)
        tlx.local_store(p_tile[0], p.to(tl.bfloat16))
        if j > 0:
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        tlx.async_dot(p_tile[0], v[0], acc[0], use_acc=j > 0, mBarriers=[acc_full[0]])
        tlx.barrier_wait(acc_full[0], phase)
    store_columns(out_ptr, row, 0, tlx.local_load(acc[0]) / l[:, None])


# %%
line = study("1: one role", one_role)
show(line)

# %% [markdown]
# **Look.** At any moment exactly one unit works, and all others wait.
# A full bar is a unit at work; a thin bar below it is the latency until the result is there.
#
# ## Aggregates: one name for values that belong together
#
# From here on several roles share buffers and barriers.
# A ring of buffers has six fields that belong together: the memory, two arrays of barriers, the number of buffers, their size, and the index of the first one.
# If they were passed one by one, the roles of this chapter would take up to fourteen arguments, and two swapped barriers make a kernel hang.
# So the package gives such a group a name, and this chapter does the same.
# A Triton *aggregate* is a class that the compiler splits into its fields at the start: it costs no register and no instruction.
# `Ring` is the package's, from [jfa/kernels/common/ring.py](../jfa/kernels/common/ring.py):
#
# | | what it does |
# |---|---|
# | `alloc_ring(ROWS, COLUMNS, DTYPE, STAGES, READERS)` | allocates the buffers and the barriers `fulls` and `empties` |
# | `ring.slot(count)` | returns buffer and phase of the ring's `count`-th use |
# | `ring.load(count, desc, box)` | waits until that buffer is empty, announces its bytes, copies a box into it |
# | `ring.nth(number)` | returns ring number `number` of an allocation that several equal rings share |
#
# The compile-time choices of a version are passed as one object as well, a constexpr called `cfg`:


# %%
@dataclass(frozen=True)
class Config:
    """Compile-time choices of a version; names as in the package's ForwardConfig."""

    halves: int = 2  # of 128 queries, per program
    kv_slots: int = 3  # buffers of the ring of K and V
    threshold: float = 8.0  # bits by which a maximum may be exceeded
    p_slices: int = 1  # slices in which P is stored and handed over
    fma_eighths: int = 0  # eighths of the exponentials that are computed on the FMA pipe
    o_parts: int = 2  # parts in which O is stored, each through a buffer
    o_columns: int = 32  # columns of O that the correction holds in registers at a time


# %% [markdown]
# ## Version 2: a load role
#
# A warp of its own runs ahead through a ring of three buffers.
# K and V share the ring: K0, V0, K1, V1, ...
# When a product ends, it arrives on the barrier that frees the buffer: `mBarriers=[s_full[0], kv.empties[slot]]`.
#
# Predict: which of the waits disappears, and which does not?


# %%
@triton.jit
def load_role(q_desc, k_desc, v_desc, q, kv, row, blocks, cfg: tl.constexpr):
    """Load Q of each half once, then K0 V0 K1 V1 ... through one ring."""
    HALVES: tl.constexpr = cfg.halves
    for half in tl.static_range(HALVES):
        q.nth(half).load(0, q_desc, [row + half * BM, 0])
    for i in range(2 * blocks):
        if i % 2 == 0:
            kv.load(i, k_desc, [i // 2 * BN, 0])
        else:
            kv.load(i, v_desc, [i // 2 * BN, 0])


# %%
@triton.jit
def two_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, cfg: tl.constexpr):
    """Attend with the 128 queries of one program."""
    row = tl.program_id(0) * BM
    q = alloc_ring(BM, D, tl.bfloat16, 1, 1)
    kv = alloc_ring(BN, D, tl.bfloat16, cfg.kv_slots, 1)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    s_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # everything else
            tlx.barrier_wait(q.fulls[0], 0)
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                k_slot, k_phase = kv.slot(2 * j)
                tlx.barrier_wait(kv.fulls[k_slot], k_phase)
                k_t, k_read = tlx.local_trans(kv.buffers[k_slot]), kv.empties[k_slot]
                tlx.async_dot(q.buffers[0], k_t, s[0], use_acc=False, mBarriers=[s_full[0], k_read])
                tlx.barrier_wait(s_full[0], j & 1)
                p, alpha, m, l = softmax_block(tlx.local_load(s[0]), m, l, scale_log2)
                tlx.local_store(p_tile[0], p.to(tl.bfloat16))
                if j > 0:
                    tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
                v_slot, v_phase = kv.slot(2 * j + 1)
                tlx.barrier_wait(kv.fulls[v_slot], v_phase)
                v, v_read = kv.buffers[v_slot], kv.empties[v_slot]
                tlx.async_dot(p_tile[0], v, acc[0], use_acc=j > 0, mBarriers=[acc_full[0], v_read])
                tlx.barrier_wait(acc_full[0], j & 1)
            store_columns(out_ptr, row, 0, tlx.local_load(acc[0]) / l[:, None])
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, q, kv, row, blocks, cfg)


# %%
line = study("2: load role", two_roles, cfg=Config(halves=1))
show(line)

# %% [markdown]
# ## Version 3: an MMA role, and P inside S
#
# One warp does nothing but issue products: the mma role.
# The softmax role now only arrives on "P is full" and waits for "S is full".
#
# Tensor memory has 512 columns.
# Two halves want S (128 columns each), P (64, since bf16 takes half) and an accumulator (128): 640.
# But P of a half is written only after its S has been read.
# So P may share the columns of S.
# `storage_alias_spec` expresses that; it adds no barrier.
# Only the order of the products keeps the two apart: the next S of a half is issued after the product that reads its P, and the tensor core executes one task's products in order.
# That order is observed, and the emulator models it.
# PTX promises it only for products on one accumulator and of one shape (chapter 10), and these two write different accumulators.

# %%
piece = plots.Segment
names = (("S0", 0), ("S1", 0), ("O0", 2), ("O1", 2))
plots.segments(
    {
        "S and O": [piece(128 * i, 128, name, look) for i, (name, look) in enumerate(names)],
        "P, in S": [piece(0, 64, "P0", 3), piece(128, 64, "P1", 3)],
    },
    title="tensor memory at D = 128",
    xlabel="column (128 lanes of 4 bytes each)",
    ticks=range(0, 513, 64),
)

# %% [markdown]
# The aggregates of tensor memory follow, with all that later versions need: `alphas` and `readys` are used from version 5 on, `maxima` and the `empties` of the row sums in version 8.
# A barrier or a column inside S that a version does not use costs it nothing.


# %%
@aggregate
class Scores:
    """S of each half, and what the softmax stores inside it: P in 16 bits, and alpha."""

    s: tlx.buffered_tensor  # [halves] x [128, 128] fp32
    p: tlx.buffered_tensor  # [halves] x [128, 128] bf16
    alphas: tlx.buffered_tensor  # [halves] x [128, 1] fp32
    s_fulls: tlx.mbarrier
    p_fulls: tlx.mbarrier  # p_slices per half
    alpha_fulls: tlx.mbarrier


@aggregate
class Accumulators:
    """O of each half."""

    tiles: tlx.buffered_tensor  # [halves] x [128, D] fp32
    readys: tlx.mbarrier  # rescaled or, at the start, free: P V may write
    fulls: tlx.mbarrier  # the last P V is done


@aggregate
class RowSums:
    """Row sums and maxima of each half, once per tile."""

    sums: tlx.buffered_tensor
    maxima: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier


@aggregate
class Memory:
    """Buffers and barriers shared by a program's roles; ``q`` is a ring of one per half."""

    q: Ring
    kv: Ring
    scores: Scores
    accs: Accumulators
    rows: RowSums


@triton.jit
def alloc_memory(cfg: tl.constexpr):
    """Allocate a program's memory; P, alpha and the row sums are inside S of their half."""
    HALVES: tl.constexpr = cfg.halves
    q = alloc_ring(BM, D, tl.bfloat16, 1, 1, HALVES)
    kv = alloc_ring(BN, D, tl.bfloat16, cfg.kv_slots, 1)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, HALVES, tlx.storage_kind.tmem, reuse=storage)
    p = tlx.local_alloc((BM, BN), tl.bfloat16, HALVES, tlx.storage_kind.tmem, reuse=storage)
    alphas = tlx.local_alloc((BM, 1), tl.float32, HALVES, tlx.storage_kind.tmem, reuse=storage)
    sums = tlx.local_alloc((BM, 1), tl.float32, HALVES, tlx.storage_kind.tmem, reuse=storage)
    maxima = tlx.local_alloc((BM, 1), tl.float32, HALVES, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p, alphas, sums, maxima, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    s_fulls = tlx.alloc_barriers(HALVES)
    p_fulls = tlx.alloc_barriers(HALVES * cfg.p_slices)
    alpha_fulls = tlx.alloc_barriers(HALVES)
    scores = Scores(s, p, alphas, s_fulls, p_fulls, alpha_fulls)
    tiles = tlx.local_alloc((BM, D), tl.float32, HALVES, tlx.storage_kind.tmem)
    accs = Accumulators(tiles, tlx.alloc_barriers(HALVES), tlx.alloc_barriers(HALVES))
    rows = RowSums(sums, maxima, tlx.alloc_barriers(HALVES), tlx.alloc_barriers(HALVES))
    return Memory(q, kv, scores, accs, rows)


# %% [markdown]
# Two functions issue products; the MMA role is a loop around them.
# Half 0 waits for the block of keys that both halves share, half 1 frees it.


# %%
@triton.jit
def score(memory, half, step, HALVES: tl.constexpr):
    """Issue S = Q K^T of a half's step."""
    kv, scores = memory.kv, memory.scores
    slot, phase = kv.slot(2 * step)
    if half == 0:
        tlx.barrier_wait(kv.fulls[slot], phase)
    q, k_t = memory.q.buffers[half], tlx.local_trans(kv.buffers[slot])
    tlx.async_dot(q, k_t, scores.s[half], use_acc=False, mBarriers=[scores.s_fulls[half]])
    if half == HALVES - 1:
        tlx.tcgen05_commit(kv.empties[slot])


@triton.jit
def accumulate(memory, half, step, HALVES: tl.constexpr):
    """Issue O += P V of a half's step; the first step overwrites O."""
    kv, scores, accs = memory.kv, memory.scores, memory.accs
    slot, phase = kv.slot(2 * step + 1)
    if half == 0:
        tlx.barrier_wait(kv.fulls[slot], phase)
    tlx.barrier_wait(scores.p_fulls[half], step & 1)
    p, v, done = scores.p[half], kv.buffers[slot], accs.fulls[half]
    tlx.async_dot(p, v, accs.tiles[half], use_acc=step > 0, mBarriers=[done])
    if half == HALVES - 1:
        tlx.tcgen05_commit(kv.empties[slot])


@triton.jit
def mma_role(memory, blocks, cfg: tl.constexpr):
    """Issue S of the first block for all halves; then per block and half P V and its next S."""
    HALVES: tl.constexpr = cfg.halves
    for half in tl.static_range(HALVES):
        tlx.barrier_wait(memory.q.fulls[half], 0)
        score(memory, half, 0, HALVES)
    for j in range(blocks):
        for half in tl.static_range(HALVES):
            accumulate(memory, half, j, HALVES)
            if j + 1 < blocks:
                score(memory, half, j + 1, HALVES)


# %%
@triton.jit
def softmax_role(memory, half, out_ptr, row, scale_log2, blocks):
    """Compute the softmax of one half, rescale its accumulator, and store the result."""
    scores, accs = memory.scores, memory.accs
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(scores.s_fulls[half], j & 1)
        p, alpha, m, l = softmax_block(tlx.local_load(scores.s[half]), m, l, scale_log2)
        if j > 0:
            tlx.barrier_wait(accs.fulls[half], (j - 1) & 1)
            tlx.local_store(accs.tiles[half], tlx.local_load(accs.tiles[half]) * alpha[:, None])
        tlx.local_store(scores.p[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(scores.p_fulls[half])
    tlx.barrier_wait(accs.fulls[half], (blocks - 1) & 1)
    store_columns(out_ptr, row, 0, tlx.local_load(accs.tiles[half]) / l[:, None])


@triton.jit
def three_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, cfg: tl.constexpr):
    """Attend with 128 queries per half in one program."""
    memory, row = alloc_memory(cfg), tl.program_id(0) * cfg.halves * BM
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax 0
            softmax_role(memory, 0, out_ptr, row, scale_log2, blocks)
        if cfg.halves == 2:
            with tlx.async_task(num_warps=4):  # softmax 1
                softmax_role(memory, 1, out_ptr, row + BM, scale_log2, blocks)
        with tlx.async_task(num_warps=1):  # mma
            mma_role(memory, blocks, cfg)
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, memory.q, memory.kv, row, blocks, cfg)


# %% [markdown]
# Predict: one half only.
# What does the new role gain?

# %%
line = study("3: MMA role", three_roles, cfg=Config(halves=1))
show(line)

# %% [markdown]
# **Look.** It hardly helps: while the softmax works, nothing is multiplied.
# With one half there is no other product to issue, but that is not the reason.
# P is inside S, so the next S would overwrite the P that is being computed.
#
# ### Version 3b: S of its own
#
# One half needs 128 columns for S, 64 for P and 128 for its accumulator: 320, and there are 512.
# So P may have columns of its own.
# Then the next S can be issued as soon as the softmax has S in registers, and the tensor core multiplies while the exponentials are computed.
# One more barrier says that S has been read.


# %%
@triton.jit
def mma_early(memory, s_empties, blocks):
    """Issue, for one half, the next S as soon as this one has been read, and then P V."""
    tlx.barrier_wait(memory.q.fulls[0], 0)
    score(memory, 0, 0, 1)
    for j in range(blocks):
        if j + 1 < blocks:
            tlx.barrier_wait(s_empties[0], j & 1)
            score(memory, 0, j + 1, 1)
        accumulate(memory, 0, j, 1)


@triton.jit
def softmax_early(memory, s_empties, out_ptr, row, scale_log2, blocks):
    """Do as softmax_role does, but free S before computing."""
    scores, accs = memory.scores, memory.accs
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(scores.s_fulls[0], j & 1)
        s = tlx.local_load(scores.s[0])
        tlx.barrier_arrive(s_empties[0])
        p, alpha, m, l = softmax_block(s, m, l, scale_log2)
        if j > 0:
            tlx.barrier_wait(accs.fulls[0], (j - 1) & 1)
            tlx.local_store(accs.tiles[0], tlx.local_load(accs.tiles[0]) * alpha[:, None])
        tlx.local_store(scores.p[0], p.to(tl.bfloat16))
        tlx.barrier_arrive(scores.p_fulls[0])
    tlx.barrier_wait(accs.fulls[0], (blocks - 1) & 1)
    store_columns(out_ptr, row, 0, tlx.local_load(accs.tiles[0]) / l[:, None])


@triton.jit
def three_roles_apart(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, cfg: tl.constexpr):
    """Attend with the 128 queries of one program."""
    memory, row = alloc_memory(cfg), tl.program_id(0) * BM
    p = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)  # columns of its own
    s_empties = tlx.alloc_barriers(1)
    old = memory.scores
    scores = Scores(old.s, p, old.alphas, old.s_fulls, old.p_fulls, old.alpha_fulls)
    memory = Memory(memory.q, memory.kv, scores, memory.accs, memory.rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax
            softmax_early(memory, s_empties, out_ptr, row, scale_log2, blocks)
        with tlx.async_task(num_warps=1):  # mma
            mma_early(memory, s_empties, blocks)
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, memory.q, memory.kv, row, blocks, cfg)


# %%
line = study("3b: S of its own", three_roles_apart, cfg=Config(halves=1))
show(line)

# %% [markdown]
# That is nearly a quarter fewer cycles, with one half.
# What remains is the chain S, softmax, P V, with one group of softmax warps for all of it.
#
# ## Version 4: two softmax groups in ping-pong
#
# Now two halves share every block of keys.
# While one group computes exponentials, the tensor core multiplies for the other.
# The MMA role alternates: P0 V, next S0, P1 V, next S1.
# Both halves fill the 512 columns, so P is inside S again: now the other half keeps the tensor core busy.
#
# Predict: how much faster, at most?

# %%
line = study("4: ping-pong", three_roles, rows=TILE, cfg=Config())
show(line)

# %% [markdown]
# ## Version 5: a correction role, and rescaling only when it matters
#
# Each group still rescales its own accumulator: it loads 128 columns, multiplies, stores them, and only then may P V start.
# Two ideas take that off its critical path.
#
# 1. **A correction role.** The softmax hands over `alpha` and goes on.
#    Four other warps rescale, while the exponentials run.
# 2. **A stale maximum is fine.** $e^{s - m}$ is exact for *any* reference $m$, as long as it does not overflow.
#    So keep the old maximum until it is exceeded by more than 8 (in log2 units: a factor of 256).
#    Then `alpha` is 1 for nearly every block, and the correction only has to check.
#    The sum in the final division was made with the same reference, so nothing is approximate.
#
# `alpha` and the row sums are columns inside S.
#
# Predict: which of the two ideas will show in the modelled cycles, and which will not?


# %%
@triton.jit
def running_maximum(s, m, scale_log2, cfg: tl.constexpr):
    """Return (maximum to use from now on, factor for what was accumulated under the old one)."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
    m_new = tl.where(m_new - m > cfg.threshold, m_new, m)
    return m_new, tl.math.exp2(m - m_new)


@triton.jit
def hand_alpha(scores, half, step, alpha):
    """Hand alpha to the correction; before the first step nothing is accumulated yet."""
    if step > 0:
        tlx.local_store(scores.alphas[half], alpha[:, None])
        tlx.barrier_arrive(scores.alpha_fulls[half])


@triton.jit
def softmax_only(memory, half, scale_log2, blocks, cfg: tl.constexpr):
    """Compute maxima, exponentials and row sums of one half; hand over alpha and P."""
    scores, rows = memory.scores, memory.rows
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(scores.s_fulls[half], j & 1)
        s = tlx.local_load(scores.s[half])
        m, alpha = running_maximum(s, m, scale_log2, cfg)
        hand_alpha(scores, half, j, alpha)
        p = tl.math.exp2(s * scale_log2 - m[:, None])
        tlx.local_store(scores.p[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(scores.p_fulls[half])
        l = l * alpha + tl.sum(p, axis=1)
    tlx.local_store(rows.sums[half], l[:, None])
    tlx.barrier_arrive(rows.fulls[half])


# %%
@triton.jit
def correction_role(memory, out_ptr, row, blocks):
    """Rescale an accumulator only if some row needs it, and store the result."""
    scores, accs, rows = memory.scores, memory.accs, memory.rows
    for half in tl.static_range(2):
        tlx.barrier_arrive(accs.readys[half])  # the first product overwrites: nothing to rescale
    for j in range(1, blocks):
        for half in tl.static_range(2):
            tlx.barrier_wait(scores.alpha_fulls[half], (j - 1) & 1)
            alpha = tlx.local_load(scores.alphas[half])
            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
                tlx.local_store(accs.tiles[half], tlx.local_load(accs.tiles[half]) * alpha)
            tlx.barrier_arrive(accs.readys[half])
    for half in tl.static_range(2):
        tlx.barrier_wait(rows.fulls[half], 0)
        l = tlx.local_load(rows.sums[half])
        tlx.barrier_wait(accs.fulls[half], 0)
        store_columns(out_ptr, row + half * BM, 0, tlx.local_load(accs.tiles[half]) / l)


@triton.jit
def accumulate_ready(memory, half, step, use_acc, cfg: tl.constexpr):
    """Do as accumulate does, but wait for the rescaled O too, and take P slice by slice."""
    SLICES: tl.constexpr = cfg.p_slices
    WIDTH: tl.constexpr = BN // SLICES
    kv, scores, accs = memory.kv, memory.scores, memory.accs
    slot, phase = kv.slot(2 * step + 1)
    if half == 0:
        tlx.barrier_wait(kv.fulls[slot], phase)
    tlx.barrier_wait(accs.readys[half], step & 1)
    for i in tl.static_range(SLICES):
        tlx.barrier_wait(scores.p_fulls[half * SLICES + i], step & 1)
        p = tlx.subslice(scores.p[half], i * WIDTH, WIDTH)
        v = tlx.local_slice(kv.buffers[slot], [i * WIDTH, 0], [WIDTH, D])
        add = use_acc if i == 0 else True
        tlx.async_dot(p, v, accs.tiles[half], use_acc=add, force_async=True)
    if half == 1:
        tlx.tcgen05_commit(kv.empties[slot])


@triton.jit
def mma_corrected(memory, blocks, cfg: tl.constexpr):
    """Issue as before, but commit "the last P V is done" once, behind it."""
    for half in tl.static_range(2):
        tlx.barrier_wait(memory.q.fulls[half], 0)
        score(memory, half, 0, 2)
    for j in range(blocks):
        for half in tl.static_range(2):
            accumulate_ready(memory, half, j, j > 0, cfg)
            if j + 1 < blocks:
                score(memory, half, j + 1, 2)
            else:
                tlx.tcgen05_commit(memory.accs.fulls[half])


# %%
@triton.jit
def four_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, cfg: tl.constexpr):
    """Attend with the 256 queries of one program."""
    memory, row = alloc_memory(cfg), tl.program_id(0) * 2 * BM
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            correction_role(memory, out_ptr, row, blocks)
        with tlx.async_task(num_warps=4, registers=192, replicate=2):  # softmax
            softmax_only(memory, tlx.async_task_replica_id(), scale_log2, blocks, cfg)
        with tlx.async_task(num_warps=1, registers=32):  # mma
            mma_corrected(memory, blocks, cfg)
        with tlx.async_task(num_warps=1, registers=32):  # load
            load_role(q_desc, k_desc, v_desc, memory.q, memory.kv, row, blocks, cfg)


# %%
line = study("5a: correction role", four_roles, rows=TILE, cfg=Config(threshold=0.0))
line = study("5b: and a threshold of 8", four_roles, rows=TILE, cfg=Config())
show(line)

# %% [markdown]
# The next picture shows what the columns of S of half 0 hold over time, and which role uses them: the last blocks of the tile, from the events of that run.
# `alpha` and the row sum take one column each, 64 and 65, behind P: two lines, drawn thicker than they are.


# %%
def holds(line):
    """Return which role holds which columns of half 0's S when, for ``plots.tmem_map``."""
    events = sorted(line.events, key=lambda e: e.start)

    def times(words, track=""):
        found = [e for e in events if e.short.startswith(words) and e.track.startswith(track)]
        return [(e.start, e.end) for e in found]

    def after(spans, moment):
        return next(span for span in spans if span[0] >= moment)

    scores, products = times("s[0] ", "MMA"), times("tiles[0] ", "MMA")
    reads, writes = times("load s[0]"), times("store p[0]")
    found = []
    for (begin, done), (limit, _) in zip(scores, [*scores[1:], (line.end, line.end)]):
        read, made = after(reads, done)[1], after(writes, done)[1]
        used = min(after(products, made)[1], limit)
        found += [plots.Hold(0, 128, begin, done, "mma", "S")]
        found += [plots.Hold(0, 128, done, read, "softmax", "S")]
        found += [plots.Hold(0, 64, read, made, "softmax", "P")]
        found += [plots.Hold(0, 64, made, used, "mma", "P")]
    for column, name, words in ((64, "alphas[0]", "alpha"), (65, "sums[0]", "row sum")):
        for left, taken in zip(times(f"store {name}"), times(f"load {name}")):
            found.append(plots.Hold(column, 1, left[0], taken[1], "correction", words))
    return found


version_5 = LINES["5b: and a threshold of 8"]
plots.tmem_map(
    holds(version_5),
    title="the 128 columns of half 0's S in version 5, and which role holds them",
    columns=128,
    span=(version_5.end - 14000, version_5.end - 3000),
)

# %% [markdown]
# The correction does not wait for the product before it touches the accumulator.
# It need not: `alpha` of a block comes from a group that has read S of that block, that S was issued after the earlier product, and a task's products finish in order, as observed (version 3).
# Write such an argument down and check it: the emulator's race detector found no conflict on three schedules.
#
# **Look.** The separate role makes the kernel faster; the threshold makes no difference.
# In this model four correction warps have time to spare, and rescaling every block costs no time.
# On a chip the loads and stores that the threshold saves are traffic of tensor memory, which storing P needs too.
# Whether that matters there is a question for a measurement, not for this picture.
#
# How often would a threshold of 0 rescale, and a threshold of 8?


# %%
def rescales(threshold, blocks=64, rows=1024, seed=0):
    """Return the share of (row, block) pairs, after block 0, whose reference maximum moves."""
    g = torch.Generator().manual_seed(seed)
    tops = (torch.randn(rows, blocks, BLOCK, generator=g) * math.log2(math.e)).amax(dim=2)
    at, moved = tops[:, 0], 0
    for j in range(1, blocks):
        grew = tops[:, j] - at > threshold
        at = torch.where(grew, tops[:, j], at)
        moved += int(grew.sum())
    return moved / (rows * (blocks - 1))


for threshold in (0.0, 1.0, 8.0):
    print(f"threshold {threshold:>3}: {rescales(threshold):.2%} of rows and blocks rescale")

# %% [markdown]
# A whole half is rescaled as soon as one of its 128 rows needs it, so even a few percent of rows would touch nearly every block.
# One decision for 128 rows is a limit of the tile model, in which all warps of a task branch together.
# The hardware can decide per warp, and FlashAttention-4 does: there 32 rows share a vote.
#
# ## Version 6: P in slices
#
# What limits version 5?
# Follow one half through a step: S is loaded from tensor memory, its maxima are taken, 16,384 exponentials are computed, converted and stored, and only then can the tensor core start P V and the next S.
# That chain is longer than the other half's products.
#
# But a product over 128 keys is the sum of two products over 64.
# So the softmax publishes P in slices, with a barrier for each, and P V starts on the first slice while the second is still being computed.
# `accumulate_ready` above was written for that: a slice of P's columns meets the same rows of V.
# The row sum moves behind the last slice, where no other role waits for it.
#
# Slices also take fewer registers, and that holds for the correction too: it takes O in slices of 32 columns.


# %%
from jfa.kernels.blackwell.softmax import exp2_on_both_pipes, split_columns


@triton.jit
def softmax_step(scores, half, step, j, state, scale_log2, cfg: tl.constexpr):
    """Make P of a half's step, number ``j`` of its tile; take and return (maxima, row sums)."""
    SLICES: tl.constexpr = cfg.p_slices
    WIDTH: tl.constexpr = BN // SLICES
    m, l = state
    tlx.barrier_wait(scores.s_fulls[half], step & 1)
    s = tlx.local_load(scores.s[half])
    m, alpha = running_maximum(s, m, scale_log2, cfg)
    hand_alpha(scores, half, j, alpha)
    exponents = split_columns(s * scale_log2 - m[:, None], SLICES)
    published = ()
    for i in tl.static_range(SLICES):
        p = exp2_on_both_pipes(exponents[i], cfg.fma_eighths)  # with 0: exp2 as before
        tlx.local_store(tlx.subslice(scores.p[half], i * WIDTH, WIDTH), p.to(tl.bfloat16))
        tlx.barrier_arrive(scores.p_fulls[half * SLICES + i])
        published = published + (p,)
    l = l * alpha
    for i in tl.static_range(SLICES):
        l += tl.sum(published[i], axis=1)
    return m, l


@triton.jit
def softmax_sliced(memory, half, scale_log2, blocks, cfg: tl.constexpr):
    """Compute the softmax of one half of one tile, slice by slice."""
    state = (tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32))
    for j in range(blocks):
        state = softmax_step(memory.scores, half, j, j, state, scale_log2, cfg)
    m, l = state
    tlx.local_store(memory.rows.sums[half], l[:, None])
    tlx.barrier_arrive(memory.rows.fulls[half])


# %%
@triton.jit
def rescale_step(memory, half, phase, cfg: tl.constexpr):
    """Multiply O of a half by alpha, slice by slice, if any row needs it."""
    WIDTH: tl.constexpr = cfg.o_columns
    scores, accs = memory.scores, memory.accs
    tlx.barrier_wait(scores.alpha_fulls[half], phase)
    alpha = tlx.local_load(scores.alphas[half])
    if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
        for i in tl.static_range(D // WIDTH):
            part = tlx.subslice(accs.tiles[half], i * WIDTH, WIDTH)
            tlx.local_store(part, tlx.local_load(part) * alpha)
    tlx.barrier_arrive(accs.readys[half])


@triton.jit
def correct_sliced(memory, out_ptr, row, blocks, cfg: tl.constexpr):
    """Do as correction_role does, with ``o_columns`` columns of O in registers at a time."""
    WIDTH: tl.constexpr = cfg.o_columns
    accs, rows = memory.accs, memory.rows
    for half in tl.static_range(2):
        tlx.barrier_arrive(accs.readys[half])
    for j in range(1, blocks):
        for half in tl.static_range(2):
            rescale_step(memory, half, (j - 1) & 1, cfg)
    for half in tl.static_range(2):
        tlx.barrier_wait(rows.fulls[half], 0)
        l = tlx.local_load(rows.sums[half])
        tlx.barrier_wait(accs.fulls[half], 0)
        for i in tl.static_range(D // WIDTH):
            part = tlx.local_load(tlx.subslice(accs.tiles[half], i * WIDTH, WIDTH))
            store_columns(out_ptr, row + half * BM, i * WIDTH, part / l)


@triton.jit
def sliced_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, cfg: tl.constexpr):
    """Attend with the 256 queries of one program, in the roles of version 5, in slices."""
    memory, row = alloc_memory(cfg), tl.program_id(0) * 2 * BM
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            correct_sliced(memory, out_ptr, row, blocks, cfg)
        with tlx.async_task(num_warps=4, registers=184, replicate=2):  # softmax
            softmax_sliced(memory, tlx.async_task_replica_id(), scale_log2, blocks, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            mma_corrected(memory, blocks, cfg)
        with tlx.async_task(num_warps=1, registers=24):  # load
            load_role(q_desc, k_desc, v_desc, memory.q, memory.kv, row, blocks, cfg)


# %% [markdown]
# Predict: the exponentials take as long as before.
# What gets shorter?

# %%
line = study("6: P in slices", sliced_roles, rows=TILE, cfg=Config(p_slices=2))
show(line)

# %% [markdown]
# ## Version 7: a share of exp2 on the FMA pipe
#
# The exp2 units make 16 results per cycle and SM; a half's 16,384 exponentials occupy them for 1,024 cycles.
# The FMA pipe, which multiplies and adds, makes 128 results per cycle at the same time.
# $2^x$ can be computed there: split $x = n + f$ with an integer $n$ and $|f| \le 1/2$, compute $2^f$ by a polynomial, and add $n$ to the exponent bits of the result (FlashAttention-4).
# P is rounded to bf16 afterwards, so a polynomial of degree 3 is exact enough:

# %%
softmax = importlib.import_module("jfa.kernels.blackwell.softmax")
cubic = [getattr(softmax, f"CUBIC_{i}").value for i in range(4)]
f = torch.linspace(-0.5, 0.5, 201)
power = cubic[0] + f * (cubic[1] + f * (cubic[2] + f * cubic[3]))
exact = torch.exp2(f.double())
off = {
    "polynomial of degree 3": (power / exact - 1).abs(),
    "rounding to bf16": (exact.bfloat16() / exact - 1).abs(),
}
plots.lines(
    f[::10].tolist(),
    {name: (100 * error[::10]).tolist() for name, error in off.items()},
    title="2^f, |f| <= 1/2: error of the polynomial, and of bf16",
    xlabel="f",
    ylabel="relative error, percent",
)

# %% [markdown]
# Which share of the exponentials should go there?
# Both units must work at the same time, so each slice is divided: a quarter of its columns goes to the FMA pipe, three quarters to the exp2 units.
# `exp2_on_both_pipes` of the package does that; version 6 already called it, with a share of 0.
#
# Predict: what would half of the columns do?

# %%
line = study(
    "7: exp2 on both pipes", sliced_roles, rows=TILE, cfg=Config(p_slices=2, fma_eighths=2)
)
show(line)

# %% [markdown]
# Slices and shares help in different places.
# One tile of 256 queries, modelled:

# %%
ONE_TILE = make_problem(TILE, BLOCKS * BLOCK)


def cycles(kernel, cfg):
    """Modelled cycles of one tile of 256 queries and 1,024 keys."""
    return model(lambda: launch(kernel, ONE_TILE, rows=TILE, cfg=cfg)).cycles


shares = (0, 2)
ablation = {
    n: [cycles(sliced_roles, Config(p_slices=n, fma_eighths=e)) for e in shares] for n in (1, 2, 4)
}
plots.bars(
    [f"{e} eighths" for e in shares],
    {f"P in {n} slice{'s' * (n > 1)}": values for n, values in ablation.items()},
    title="one tile of 256 queries and 1,024 keys",
    xlabel="share of each slice's exponentials on the FMA pipe",
    ylabel="modelled cycles",
    form="{:,.0f}",
)

# %% [markdown]
# **Look.** Each helps alone, and together they give less than the sum.
# Slices hide the last exponentials behind the product; exponentials that the FMA pipe has made shorter leave less to hide.
# One more slice costs a store and an arrival in the chain.
# These are modelled rates: on a GPU, find the best pair by measuring.
#
# ## Version 8: a store role, and no seam
#
# So far a program solves one tile and ends.
# Its first products wait for Q and K, its last ones are followed by a division and a store, and in both times the tensor core is idle.
# We call this gap between two tiles the *seam*.
# In version 8 a program keeps its SM and takes one tile after another (chapter 13 is about that), and the seam is closed:
#
# - **S is issued early.** The mma role's loop does not stop at a tile's end: after a tile's last P0 V comes the next tile's first S0, and after that the last P1 V.
#   So the softmax groups go on while O is still being divided and stored.
#   The loop runs one round more than there are tiles, for the last P V.
# - **Row sums move to shared memory.** Inside S the next tile's S would overwrite them before the correction has read them.
#   The barriers `rows.fulls` and `rows.empties` hand them over.
# - **A store role.** The correction writes O in bf16 to shared memory, in two parts with a buffer each, and another role copies it out by TMA.
#   Once `o.empties` has completed, the correction takes the next half while the copy is under way.
#   An accumulator is free as soon as it has been read: then the correction arrives on `accs.readys`.
# - **Q is freed by its last S**, and the load role fetches the next tile's K before its Q: the ring has a free buffer for K earlier.
# - **A fourth buffer** for K and V: storing O in parts leaves shared memory for it.
#
# All counters continue from tile to tile: `done` tiles, and `done * blocks + j` steps.


# %%
@triton.jit
def alloc_persistent(cfg: tl.constexpr):
    """Allocate memory with row sums and maxima in SMEM, and the ring through which O is stored."""
    memory = alloc_memory(cfg)
    sums = tlx.local_alloc((BM,), tl.float32, 2)
    maxima = tlx.local_alloc((BM,), tl.float32, 2)
    rows = RowSums(sums, maxima, memory.rows.fulls, memory.rows.empties)
    o = alloc_ring(BM, D // cfg.o_parts, tl.bfloat16, cfg.o_parts, 1)
    return Memory(memory.q, memory.kv, memory.scores, memory.accs, rows), o


@triton.jit
def load_tile(q_desc, k_desc, v_desc, memory, tile, done, blocks):
    """Load K0, Q of both halves, V0 K1 V1 ..., through rings that continue from tile to tile."""
    kv, loaded = memory.kv, 2 * done * blocks
    kv.load(loaded, k_desc, [0, 0])
    for half in tl.static_range(2):
        memory.q.nth(half).load(done, q_desc, [(2 * tile + half) * BM, 0])
    for j in range(blocks):
        kv.load(loaded + 2 * j + 1, v_desc, [j * BN, 0])
        if j + 1 < blocks:
            kv.load(loaded + 2 * j + 2, k_desc, [(j + 1) * BN, 0])


@triton.jit
def multiply_tile(memory, going, done, blocks, cfg: tl.constexpr):
    """Issue per step and half the P V that is due, maybe the previous tile's, and the next S."""
    steps = tl.where(going, blocks, 1)
    for j in range(steps):
        step = done * blocks + j
        for half in tl.static_range(2):
            if step > 0:
                accumulate_ready(memory, half, step - 1, (step - 1) % blocks > 0, cfg)
                if j == 0:
                    tlx.tcgen05_commit(memory.accs.fulls[half])
            if going:
                if j == 0:
                    tlx.barrier_wait(memory.q.fulls[half], done & 1)
                score(memory, half, step, 2)
                if j + 1 == blocks:
                    tlx.tcgen05_commit(memory.q.empties[half])


# %%
@triton.jit
def softmax_tile(memory, half, done, blocks, scale_log2, cfg: tl.constexpr):
    """Compute the softmax of one half of a tile, and hand over its row sums and maxima."""
    rows = memory.rows
    state = (tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32))
    for j in range(blocks):
        state = softmax_step(memory.scores, half, done * blocks + j, j, state, scale_log2, cfg)
    m, l = state
    tlx.barrier_wait(rows.empties[half], (done & 1) ^ 1)
    tlx.local_store(rows.sums[half], l)
    tlx.local_store(rows.maxima[half], m)
    tlx.barrier_arrive(rows.fulls[half])


@triton.jit
def finish_half(memory, o, half: tl.constexpr, lse_ptr, tile, done, cfg: tl.constexpr):
    """Write a half's log-sum-exp, and O to the buffers of the store role."""
    PARTS: tl.constexpr = cfg.o_parts
    WIDTH: tl.constexpr = cfg.o_columns
    SLICES: tl.constexpr = D // PARTS // WIDTH  # of a part
    accs, rows = memory.accs, memory.rows
    tlx.barrier_wait(rows.fulls[half], done & 1)
    l, m = tlx.local_load(rows.sums[half]), tlx.local_load(rows.maxima[half])
    tlx.barrier_arrive(rows.empties[half])
    at = (2 * tile + half) * BM + tl.arange(0, BM)
    tl.store(lse_ptr + at, (m + tl.math.log2(l)) * 0.6931471805599453)
    inverse = (1.0 / l)[:, None]
    tlx.barrier_wait(accs.fulls[half], done & 1)
    for part in tl.static_range(PARTS):
        tlx.barrier_wait(o.empties[part], ((2 * done + half) & 1) ^ 1)
        for i in tl.static_range(SLICES):
            columns = tlx.subslice(accs.tiles[half], (part * SLICES + i) * WIDTH, WIDTH)
            out = tlx.local_load(columns) * inverse
            if part == PARTS - 1 and i == SLICES - 1:
                tlx.barrier_arrive(accs.readys[half])
            staged = tlx.local_slice(o.buffers[part], [0, i * WIDTH], [BM, WIDTH])
            tlx.local_store(staged, out.to(tl.bfloat16))
        tlx.fence("async_shared")
        tlx.barrier_arrive(o.fulls[part])


@triton.jit
def correct_tile(memory, o, lse_ptr, tile, done, blocks, cfg: tl.constexpr):
    """Rescale a tile's accumulators while it runs, then finish both halves."""
    for j in range(1, blocks):
        for half in tl.static_range(2):
            rescale_step(memory, half, (done * (blocks - 1) + j - 1) & 1, cfg)
    for half in tl.static_range(2):
        finish_half(memory, o, half, lse_ptr, tile, done, cfg)


@triton.jit
def store_tile(o_desc, o, tile, done, cfg: tl.constexpr):
    """Copy O out, part by part."""
    PARTS: tl.constexpr = cfg.o_parts
    for half in range(2):
        for part in tl.static_range(PARTS):
            tlx.barrier_wait(o.fulls[part], (2 * done + half) & 1)
            box = [(2 * tile + half) * BM, part * (D // PARTS)]
            tlx.async_descriptor_store(o_desc, o.buffers[part], box)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(o.empties[part])


# %%
@triton.jit
def persistent_roles(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, tiles, scale_log2, blocks, cfg: tl.constexpr
):
    """Attend with every num_programs-th 256 queries: o [queries, D] bf16, lse [queries] fp32."""
    memory, o = alloc_persistent(cfg)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            for half in tl.static_range(2):
                tlx.barrier_arrive(memory.accs.readys[half])
            done = 0
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                correct_tile(memory, o, lse_ptr, tile, done, blocks, cfg)
                done += 1
        with tlx.async_task(num_warps=4, registers=184, replicate=2):  # softmax
            half: tl.constexpr = tlx.async_task_replica_id()
            done = 0
            for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):
                softmax_tile(memory, half, done, blocks, scale_log2, cfg)
                done += 1
        with tlx.async_task(num_warps=1, registers=24):  # mma
            workers, done = tl.num_programs(0), 0
            for tile in range(tl.program_id(0), tiles + workers, workers):  # one round more
                multiply_tile(memory, tile < tiles, done, blocks, cfg)
                done += 1
        with tlx.async_task(num_warps=1, registers=24):  # load
            done = 0
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                load_tile(q_desc, k_desc, v_desc, memory, tile, done, blocks)
                done += 1
        with tlx.async_task(num_warps=1, registers=24):  # store
            done = 0
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                store_tile(o_desc, o, tile, done, cfg)
                done += 1


# %%
LAST = Config(kv_slots=4, p_slices=2, fma_eighths=2)


def launch_persistent(kernel, problem, cfg, programs=1):
    """Run version 8 on ``programs`` SMs, check the log-sum-exp, and return the output."""
    q, k, v, _ = problem
    out, lse = torch.full_like(q, float("nan")), torch.full((len(q),), float("nan"))
    boxes = [TensorDescriptor.from_tensor(t, [BLOCK, DIM]) for t in (q, k, v)]
    o_box = TensorDescriptor.from_tensor(out, [BLOCK, DIM // cfg.o_parts])
    tiles, blocks = len(q) // TILE, len(k) // BLOCK
    kernel[(programs,)](*boxes, o_box, lse, tiles, SCALE_LOG2, blocks, cfg=cfg)
    want = torch.logsumexp(q.double() @ k.double().t() / math.sqrt(DIM), dim=1)
    assert (lse - want).abs().max() < 1e-4
    return out


two_tiles = make_problem(QUERIES, 3 * BLOCK)
line = study("8: store role, no seam", persistent_roles, launch_persistent, two_tiles, cfg=LAST)
show(line)

# %% [markdown]
# The error is larger because this version writes O in bf16, as the package does.
# Here is the seam of version 7 and of version 8 on one axis: the last third of the first tile and the beginning of the second.

# %%
eight, seven = "8: store role, no seam", "7: exp2 on both pipes"
begins = [e.start for e in LINES[eight].events if e.target == "s[0]" and e.track == "MMA"]
window = (begins[BLOCKS] - 4500, begins[BLOCKS] + 4500)  # about the first S0 of the second tile
plots.timelines({seven: LINES[seven], eight: LINES[eight]}, window)

# %% [markdown]
# ## The score
#
# Add the package's kernel on the same problem, and compare:

# %%
package = enter("the package's kernel", model(forward_launch(QUERIES, BLOCKS * BLOCK)))

# %%
flops = 4 * QUERIES * BLOCKS * BLOCK * DIM
plots.panels(
    [name for name, *_ in SCORE],
    {
        "modelled TFLOP/s of a B200": (
            [flops / B200.seconds(time) * B200["sms"] / 1e12 for _, time, *_ in SCORE],
            "{:.0f}",
        ),
        "tensor core busy, whole run (modelled)": ([100 * w for _, _, w, _ in SCORE], "{:.0f} %"),
        "in the steady state (modelled)": ([100 * s for *_, s in SCORE], "{:.0f} %"),
    },
    title="512 queries, 1,024 keys, D = 128, on one SM",
)

# %%
long_tile = record_one_sm(forward_launch(256, 2048), B200)
print("the package's kernel on one tile of 256 queries and 2,048 keys, from 35 to 80 % of the run:")
print(f"tensor core busy {busy_share(long_tile, 0.35, 0.8):.1%} (modelled)")

# %% [markdown]
# Version 8 and the package's kernel have the same roles, the same barriers, and issue copies and products in the same order.
# The package's roles also read per tile what a jagged batch needs: bounds, masks, heads.
#
# Five versions on one axis: the same 9,000 cycles of each, in its steady state.
# Follow the green boxes of the tensor core from panel to panel (`s[0]` is a product S, `a0` a product P V or a slice of one, written to `accs[0]`), and the arrows from what completed a barrier's phase to the wait that this ended.

# %%
rungs = ("1: one role", "3b: S of its own", "4: ping-pong", "5b: and a threshold of 8", eight)
plots.timelines({name: LINES[name] for name in rungs}, (9000, 18000))

# %% [markdown]
# ## What the compiler says
#
# `jfa.compiled` compiles a kernel for sm_100 without a GPU.
# Its registers per thread, spills, shared and tensor memory are facts, not a model.
# The cell takes about 20 seconds on two idle cores.

# %%
from jfa.compiled import compile_kernel

box = f"tensordesc<bf16[{BLOCK}, {DIM}]>"
boxes = {"q_desc": box, "k_desc": box, "v_desc": box}
numbers = {"scale_log2": "fp32", "blocks": "i32"}
to_rows = {**boxes, "out_ptr": "*fp32", **numbers}
to_boxes = {
    **boxes,
    "o_desc": f"tensordesc<bf16[{BLOCK}, {DIM // 2}]>",
    "lse_ptr": "*fp32",
    "tiles": "i32",
    **numbers,
}
wanted = {
    "1: one role": (one_role, to_rows, {}),
    "5: four roles": (four_roles, to_rows, {"cfg": Config()}),
    "6: P in slices": (sliced_roles, to_rows, {"cfg": Config(p_slices=2)}),
    "8: store role, no seam": (persistent_roles, to_boxes, {"cfg": LAST}),
}
print(f"compiling {len(wanted)} kernels ...", flush=True)
with ThreadPoolExecutor(2) as pool:
    reports = list(
        pool.map(lambda one: compile_kernel(one[0], *one[1:], arch=100), wanted.values())
    )
rows = [
    [name, r.registers, r.spill_stores, r.spill_loads, r.smem, r.tmem]
    for name, r in zip(wanted, reports)
]
headers = [
    "sm_100",
    "registers at launch",
    "spills: stored",
    "loaded",
    "SMEM, bytes",
    "TMEM, columns",
]
print(plots.table(headers, rows))
print()
print(reports[-1].to_text())

# %% [markdown]
# **Read it.** Spills are bytes per thread that do not fit into registers and go to memory and back.
#
# Version 1 fits into its registers.
# The report says 512 of 512 columns of tensor memory although its buffers need 320: columns are allocated in powers of two.
# So a second CTA of this kernel fits onto the SM only after the first has ended.
#
# Version 5 spills over a kilobyte per thread.
# Its correction loads rows of 128 columns of O with 96 registers per thread, and in its softmax a row of 128 scores and its 128 exponentials do not fit into 192 registers at once.
# Version 6 takes both in slices, and redistributes the registers: 184 per thread for the softmax and 24 for the small roles leave 120 for the correction.
# It still spills a few addresses.
# (With 192, 32 and 96 it spills 328 and 680 bytes, nearly all of it the correction's; compiled for this text, November 2026.)
# Version 8 spills nothing.
# The emulator shows none of that; only the compiler does.
# `jfa compile blackwell` prints the report of the package's kernels.

# %% [markdown]
# ## Jagged: edges and bulk
#
# Three things turn version 8 into the package's kernel.
#
# - **Boundaries.** Every TMA box is bounded by its own sequence: a *ragged* descriptor fills rows past the end with zeros and stores nothing there.
#   So NaN of a neighboring sequence cannot leak through V (chapter 04's trap).
# - **Peeling.** A mask costs two comparisons and a select per score.
#   Most blocks need none: every query of the tile sees every key of the block.
#   The loop is split into masked blocks at the left edge, an unmasked bulk, and masked blocks at the right edge.
# - **Lists.** Each program walks a list of tiles that have work, with their bounds (chapter 13).

# %%
kinds = block_kinds(Band.make(causal=True, window_size=(600, 0)), 512, 1100, 128, 128)
title = "512 queries, 1,100 keys, causal, 600 keys back"
plots.block_map(kinds, title=title, block_m=128, block_n=128)

# %% [markdown]
# Each row of blocks is one tile's loop: some P (partly visible: an edge), then F (fully visible: the bulk), then P.
# Blocks without a letter are not visited.

# %% [markdown]
# ## Read the kernel
#
# Open [jfa/kernels/blackwell/forward.py](../jfa/kernels/blackwell/forward.py).
# Its docstring draws the roles; the entry is a list of roles, each a loop over tiles; each role is one function below it.
# The end of a tile, where O is stored, is in [epilogue.py](../jfa/kernels/blackwell/epilogue.py).
# You have met all of them:

# %%
forward, epilogue = (
    importlib.import_module(f"jfa.kernels.blackwell.{file}") for file in ("forward", "epilogue")
)
mine = [load_tile, multiply_tile, softmax_tile, softmax_step, correct_tile, finish_half, store_tile]
theirs = "load_inputs multiply_tile softmax_tile softmax_steps correct_tile finish_half store_tile"
for one, name in zip(mine, theirs.split()):
    function = getattr(epilogue if hasattr(epilogue, name) else forward, name).fn
    words = inspect.getdoc(function).splitlines()[0]
    print(f"{one.fn.__name__:<14} here, {name:<14} there: {words}")

# %% [markdown]
# You have also met every barrier.
# The table is made from a run of the package's kernel: which roles arrive, and which wait.
# The last column is ours.
# Cover it and write down your own first.

# %%
BARRIERS = {
    "q.fulls": "Q of this half is there",
    "q.empties": "the tile's last S of this half has read Q",
    "kv.fulls": "a block of K or V is there",
    "kv.empties": "the products of both halves have read the block",
    "scores.s_fulls": "S is there, and all products before it are done",
    "scores.alpha_fulls": "alpha is there, and S has been read",
    "scores.p_fulls": "this slice of P is there",
    "accs.readys": "O is rescaled; at a tile's start: the last tile's O has been read",
    "accs.fulls": "the tile's last P V is done: O is complete",
    "rows.fulls": "row sums and maxima are there",
    "rows.empties": "they have been read",
    "o.fulls": "this part of O is staged in shared memory",
    "o.empties": "its copy has been read out",
}


def barrier_table(line, meanings):
    """Return a table: who arrives at each barrier of a run, who waits, and what it says."""
    found = line.barriers()
    assert set(found) == set(meanings)
    rows = [[name, *(", ".join(side) for side in found[name]), meanings[name]] for name in meanings]
    return plots.table(["barrier", "who arrives", "who waits", "what it says"], rows)


print(barrier_table(package, BARRIERS))

# %% [markdown]
# MMA stands for a product, or a commit after it; TMA for a copy.
# Version 8 has the same barriers, with the same roles on both sides:

# %%
same = LINES[eight].barriers() == package.barriers()
print("the same barriers, arrivals and waits:", same)

# %% [markdown]
# Three barriers of the file do not occur in this run:
#
# | barrier | when there is one | what it says |
# |---|---|---|
# | `tails.k.fulls` | head dims beyond 128 | columns 128 and up of a block of K are there: they are a separate box |
# | `tails.k.empties` | the same | the products of both halves have read them |
# | the queue's | tiles are stolen | chapter 13 |
#
# The columns of Q beyond 128 are loaded with the other columns of Q: `q.fulls` counts the bytes of both.

# %% [markdown]
# Now run it on three sequences: one is empty, no length is a multiple of a block, and the mask is causal.
# It is the same source that a B200 runs.

# %%
lengths = [200, 0, 77]
offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
q, k, v = (torch.randn(sum(lengths), 1, DIM).bfloat16() for _ in range(3))
want = reference.attention(q.double(), k.double(), v.double(), offsets, offsets, causal=True)
with emulator.options(policy="timed", rates=B200, trace=True, max_ctas=1):
    out = jfa.jagged_flash_attention(
        q, k, v, offsets, offsets, 200, 200, causal=True, backend="blackwell"
    )
print("largest error:", (out - want).abs().max().item())
line = Timeline.of(emulator.last())
busiest = max(line.ctas(), key=lambda cta: sum(e.cta == cta for e in line.events))
plots.timelines(
    {"the package's forward, its busiest CTA": (line, busiest)},
    (0, max(e.end for e in line.events if e.cta == busiest)),
)

# %% [markdown]
# You know every lane but one: `CLC` asks the hardware for the next tile (chapter 13).
# With 277 rows there is little of the steady state to see: the picture shows how a tile begins and ends.

# %% [markdown]
# ## Summary
#
# * Products and exponentials of a step take equally long, so a fast forward must overlap them.
# * P inside S makes S, softmax and P V depend on each other; a second half of queries gives the tensor core other work meanwhile.
# * A correction role takes the rescaling off the softmax's path, and a stale maximum makes most rescalings unnecessary and stays exact.
# * Slices of P let P V start early; a share of the exponentials goes to the FMA pipe.
# * Across tiles, the next tile's S is issued before the last P V, and a store role copies O out: no seam.
# * The order of products in one task protects columns that have no barrier of their own.
#
# ## Exercises
#
# Open [exercises/12_blackwell_forward.py](../exercises/12_blackwell_forward.py).
# Their kernels pass buffers and barriers one by one, so your code names each of them.
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 12.1 | rescale only when it matters, in PyTorch | 2 | 40 |
# | 12.2 | six buffers into 512 columns | 2 | 30 |
# | 12.3 | bug hunt: scores that come too early | 2 | 40 |
# | 12.4 | a role to write: the correction | 3 | 35 |
# | 12.5 | ping-pong | 3 | 55 |
# | 12.6 | peel the loop | 2 | 25 |
# | 12.7 | slice P, in slices that get shorter | 3 | 55 |
# | 12.8 | the next tile's S, early, for tiles of unequal length | 3 | 65 |
# | 12.9 | registers from a compile report | 2 | 40 |
#
# ## Checkpoint
#
# 1. Why does version 3 gain so little over version 2?
# 2. What keeps S(i + 1) of a half from overwriting P(i) in the same columns?
# 3. With a stale maximum, exponentials may exceed 1. By how much, and why is that harmless?
# 4. Why must all warps of the correction take the same branch?
# 5. `scores` has no barrier "S is free", and none "alpha has been read". Why does it need neither?
# 6. Why can version 8 not leave the row sums inside S?
# 7. Which role waits for `accs.readys` in a tile's first step, and for what?
#
# <details><summary>Answers</summary>
#
# 1. P is inside S, so S, softmax and P V depend on each other in a circle, and one more role does not break it.
#    Separate columns for P (version 3b) or a second half do.
# 2. The order of products: both are issued by the MMA role, S(i + 1) after P(i) V, and a task's products run in order (observed, and promised by PTX only for one accumulator and shape).
# 3. By a factor of at most 2^8 = 256, far inside bf16's range.
#    Output and row sum carry the same factor, and the division removes it.
# 4. In the tile model all warps of a task branch together, so the decision is one number for the whole half: the smallest alpha.
#    On the hardware it may be one per warp, if each warp rescales its own 32 rows and all of them arrive.
# 5. The next S of a half is issued after P V, P V waits for `accs.readys`, and the correction arrives there after it has read alpha.
#    P V also waits for `p_fulls`, and the softmax arrives there after it has read S.
# 6. The next tile's first S is issued before the correction has read them, and no barrier would delay it.
# 7. The mma role, until the correction has read the previous tile's O out of the accumulator.
#    In a program's first tile the correction arrives at once.
#
# </details>
#
# ## Try this
#
# - Give version 4 a ring of two buffers, then of four (`kv_slots`). From which number on does one more buffer gain nothing?
# - Slow the exponentials: `B200.scaled("mufu", 0.5)` in `model`. Which versions lose most?
# - Swap the order in `mma_role`: both P V first, then both S. Predict the timeline, then look.
# - Half of the exponentials on the FMA pipe: `fma_eighths=4`. Which unit is the bottleneck now? (`line.table()` says it.)
# - Take `kv_slots=3` in `LAST`. Which role waits longer?
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | one more role, with P still inside S | version 3 against 3b |
# | 640 columns needed, 512 there | exercise 12.2 |
# | S overwritten while it is read | exercise 12.3 |
# | rescaling on the critical path | version 4 against 5 |
# | a role with too few registers | version 5 against 6 in the compiler's table |
# | a tile's end that the next tile waits for | version 7 against 8 |
# | a zero probability does not stop a NaN in V | the jagged section |
#
# ## What differs on a real GPU
#
# - Registers: each softmax thread holds a row of 128 scores.
#   So the package's kernel gives most registers to the softmax and 24 to 40 to the small roles; `jfa compile` prints the shares.
# - The first tile waits for memory, not for L2; a grid ends when its slowest CTA does.
# - Numbers: the tensor core rounds sums in its own way; differences stay within bf16's.
#
# ## Verified here, and not
#
# Every version ran on the emulator when this notebook ran: three schedules, no finding, against fp64.
# A test compares version 8 with the package's kernel: roles, barriers, the order in which each role meets them, products and copies (`tests/kernels/blackwell/test_ladder.py`).
# Another breaks each synchronization of version 8 in turn, in 58 ways: 57 are found; the remaining one is harmless by an argument that holds on every schedule of a small launch (`tests/kernels/blackwell/test_sweep_ladder.py`).
# Cycles are modelled; with the same rules the model is within 10 percent of three kernels timed on an H200 (`tests/emulator/test_rates.py`).
# Nothing in this chapter ran on a Blackwell GPU.
#
# ## Sources
#
# - FlashAttention-4, arXiv 2603.05451: cycles per tile, ping-pong, conditional rescaling, the exponential on the FMA pipe.
# - TLX in fbtriton 3.7.4: names and semantics. The kernels are our own.
# - Milakov and Gimelshein, arXiv 1805.02867: the online softmax.
#
# Next: [13 Persistent kernels](13_persistent.py).
