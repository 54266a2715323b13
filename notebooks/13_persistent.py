# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 Persistent kernels
#
# **Goals.** Let one program per SM work through many tiles, in every role at once.
# Keep the phases of all barriers right from tile to tile.
# Deal tiles by zigzag inside the kernel, then let the hardware hand them out (*cluster launch control*, CLC).
# Remove the idle time between two tiles.
# Read the nine numbers of a tile's record, and say why all roles must end together.
#
# **Time.** 60 minutes, and 250 for the exercises.
# **Needs.** Chapters 08 and 12.
# No GPU: the emulator runs every version, and its cycles are a model of a B200.

# %%
import heapq
import inspect
import linecache
import math

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
from jfa.layout import offsets_from_lengths

D, BM, BN = 128, 128, 128

# %% [markdown]
# ## The mental model: a shop that stays open
#
# Versions 1 to 7 of chapter 12 work like a shop that closes after each customer; version 8 stays open, and this chapter explains how.
# In versions 1 to 7 a program starts, sets up its barriers, loads Q, fills its ring of buffers, works, stores, ends.
# Then the next program does all of that again on the same SM, and in the meantime the tensor core waits.
#
# A **persistent** program stays.
# It takes one tile after another in a loop.
# It keeps its barriers and buffers, and its load role works on the next tile while the others finish this one.
# The picture is not to scale:

# %%
piece = plots.Segment
plots.segments(
    {
        "a program per tile": [
            *(piece(10 * i, 1, "start", None) for i in range(3)),
            *(piece(10 * i + 1, 2, "load", 5) for i in range(3)),
            *(piece(10 * i + 3, 5, f"tile {i}", i) for i in range(3)),
            *(piece(10 * i + 8, 2, "store", 4) for i in range(3)),
        ],
        "persistent": [
            piece(0, 1, "start", None),
            piece(1, 2, "load", 5),
            *(piece(3 + 5.5 * i, 5.5, f"tile {i}", i) for i in range(3)),
            piece(19.5, 2, "store", 4),
        ],
    },
    title="one SM, three tiles: what the tensor core sees",
    xlabel="time, not to scale",
)

# %% [markdown]
# Some words, used from here on:
#
# | word | meaning |
# |---|---|
# | **unit** | a piece of work: one tile of one head; `unit` is its place in the list |
# | **record** | what a kernel must know about a tile, in one row of integers |
# | `done` | tiles that this program has finished |
# | `steps_done` | key blocks of all tiles that this program has finished |
# | **seam** | the time between two tiles in which a hardware unit (such as the tensor core) waits although there is work |
# | **surplus unit** | a unit that was launched, but has no tile |
#
# ## The math: which phase is it?
#
# A barrier counts its completed phases, and a wait names only their parity (chapter 10).
# So a role that waits for the $n$-th completion, counted from 0, must wait for the parity $n \bmod 2$.
# In chapter 12, up to version 7, a program had one tile, and $n$ was the step $j$.
# Now a barrier is used for many tiles:
#
# | barrier | completes | $n$ |
# |---|---|---|
# | `q_fulls`, `acc_fulls`, `sum_fulls` | once per tile | `done` |
# | `s_fulls`, `p_fulls`, `acc_readys` | once per step | `steps_done + j` |
# | `alpha_fulls` | once per step, but not in a tile's first | `steps_done - done + j - 1` |
# | ring of K and V | twice per step, in `BUFFERS` slots | $i$ = `2 * (steps_done + j)`: slot $i \bmod B$, turn $\lfloor i / B \rfloor$ |
#
# Every role keeps its own copy of these two counters, and the copies must agree.
# Here is `s_fulls` over three tiles of 1, 3 and 2 steps.
# The likely mistake is in the last line: restarting the count at each tile.

# %%
steps = [1, 3, 2]
begins = [sum(steps[:t]) for t in range(len(steps))]
pairs = [(begin, t, j) for t, begin in enumerate(begins) for j in range(steps[t])]
plots.segments(
    {
        "tile": [piece(b, n, f"tile {t}", t) for t, (b, n) in enumerate(zip(begins, steps))],
        "step j of the tile": [piece(b + j, 1, str(j), t) for b, t, j in pairs],
        "steps_done + j": [piece(b + j, 1, str(b + j), t) for b, t, j in pairs],
        "parity to wait for": [piece(b + j, 1, str((b + j) % 2), (b + j) % 2) for b, t, j in pairs],
        "if the count restarts": [piece(b + j, 1, str(j % 2), j % 2) for b, t, j in pairs],
    },
    title="one barrier over three tiles of 1, 3 and 2 steps",
    xlabel="completed phases of s_fulls",
    ticks=range(7),
)

# %% [markdown]
# The last two lines agree in tile 0 and differ in tile 1.
# With an even number of steps in every tile they would always agree: a test on such tiles proves nothing.
#
# ## The kernel
#
# These are the roles of chapter 12, version 5, one function per tile and role.
# Two things are new: the counters, and *tuples*.
# A buffer and its barriers are passed as one argument, `queries = (q, q_fulls, q_empties)`, and a role unpacks what it needs.
# A tuple costs nothing: the compiler sees its parts.
#
# A batch is one head of packed sequences.
# To keep the worked code small, each has 256 queries and a whole number of key blocks; version 6 drops that.
# A record here is three numbers: first query row, first key row, key blocks.


# %%
@triton.jit
def ring(count, BUFFERS: tl.constexpr):
    """Return (buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@triton.jit
def read_record(records_ptr, unit):
    """Return (first query row, first key row, steps) of a tile; a step is a block of keys."""
    at = records_ptr + unit * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def load_tile(
    boxes, queries, kv, record, done, steps_done,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Load Q of both halves, then K0 V0 K1 V1 ... through one ring over all tiles."""
    q_desc, k_desc, v_desc = boxes
    q, q_fulls, q_empties = queries
    tiles, fulls, empties = kv
    q_row, kv_row, steps = record
    for half in tl.static_range(2):
        tlx.barrier_wait(q_empties[half], (done & 1) ^ 1)
        tlx.barrier_expect_bytes(q_fulls[half], 2 * BM * D)
        tlx.async_descriptor_load(q_desc, q[half], [q_row + half * BM, 0], q_fulls[half])
    for i in range(2 * steps):
        slot, phase = ring(2 * steps_done + i, BUFFERS)
        tlx.barrier_wait(empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(fulls[slot], 2 * BN * D)
        key = kv_row + i // 2 * BN
        if i % 2 == 0:
            tlx.async_descriptor_load(k_desc, tiles[slot], [key, 0], fulls[slot])
        else:
            tlx.async_descriptor_load(v_desc, tiles[slot], [key, 0], fulls[slot])


# %%
@triton.jit
def score(half, queries, kv, scores, done, j, steps, total, BUFFERS: tl.constexpr):
    """Issue S = Q K^T of one half, step j of its tile, step ``total`` of this program.

    A tile's first step waits for Q, its last gives Q back. Half 1 gives K back.
    """
    q, q_fulls, q_empties = queries
    tiles, fulls, empties = kv
    s, _, s_fulls, _ = scores
    slot, phase = ring(2 * total, BUFFERS)
    if j == 0:
        tlx.barrier_wait(q_fulls[half], done & 1)
    if half == 0:
        tlx.barrier_wait(fulls[slot], phase)
    k_t = tlx.local_trans(tiles[slot])
    tlx.async_dot(q[half], k_t, s[half], use_acc=False, mBarriers=[s_fulls[half]])
    if half == 1:
        tlx.tcgen05_commit(empties[slot])
    if j + 1 == steps:
        tlx.tcgen05_commit(q_empties[half])


@triton.jit
def accumulate(half, kv, scores, outs, total, use_acc, BUFFERS: tl.constexpr):
    """Issue O += P V of one half, step ``total`` of this program. Half 1 gives V back."""
    tiles, fulls, empties = kv
    _, p_tiles, _, p_fulls = scores
    accs, acc_readys, _ = outs
    slot, phase = ring(2 * total + 1, BUFFERS)
    if half == 0:
        tlx.barrier_wait(fulls[slot], phase)
    tlx.barrier_wait(p_fulls[half], total & 1)
    tlx.barrier_wait(acc_readys[half], total & 1)
    tlx.async_dot(p_tiles[half], tiles[slot], accs[half], use_acc=use_acc, force_async=True)
    if half == 1:
        tlx.tcgen05_commit(empties[slot])


@triton.jit
def multiply_tile(queries, kv, scores, outs, ends, steps, done, steps_done, BUFFERS: tl.constexpr):
    """Issue the products of one tile, from its first S to its last P V."""
    _, _, acc_fulls = outs
    _, _, sum_empties = ends
    for half in tl.static_range(2):
        tlx.barrier_wait(sum_empties[half], (done & 1) ^ 1)  # the tile before is stored
        score(half, queries, kv, scores, done, 0, steps, steps_done, BUFFERS)
    for j in range(steps):
        total = steps_done + j
        for half in tl.static_range(2):
            accumulate(half, kv, scores, outs, total, j > 0, BUFFERS)
            if j + 1 < steps:
                score(half, queries, kv, scores, done, j + 1, steps, total + 1, BUFFERS)
            else:
                tlx.tcgen05_commit(acc_fulls[half])


# %%
@triton.jit
def softmax_tile(
    scores, alphas, ends, half, steps, done, steps_done, scale_log2,
    SUMS_IN_S: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Make P of one half: maximum, exponentials, row sum; alpha goes to the correction."""
    s, p_tiles, s_fulls, p_fulls = scores
    alpha_tiles, alpha_fulls = alphas
    sums, sum_fulls, sum_empties = ends
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(steps):
        tlx.barrier_wait(s_fulls[half], (steps_done + j) & 1)
        x = tlx.local_load(s[half])
        top = tl.max(x, axis=1) * scale_log2
        m_new = tl.where(top - m > 8.0, top, m)
        alpha = tl.math.exp2(m - m_new)
        m = m_new
        if j > 0:
            tlx.local_store(alpha_tiles[half], alpha[:, None])
            tlx.barrier_arrive(alpha_fulls[half])
        p = tl.math.exp2(x * scale_log2 - m[:, None])
        tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[half])
        l = l * alpha + tl.sum(p, axis=1)
    if not SUMS_IN_S:
        tlx.barrier_wait(sum_empties[half], (done & 1) ^ 1)
    tlx.local_store(sums[half], l[:, None])
    tlx.barrier_arrive(sum_fulls[half])


@triton.jit
def correct_tile(
    outs, alphas, ends, out_ptr, q_row, steps, done, steps_done,
    SEAMLESS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rescale O where a row needs it; at the tile's end divide by the sums and store."""
    accs, acc_readys, acc_fulls = outs
    alpha_tiles, alpha_fulls = alphas
    sums, sum_fulls, sum_empties = ends
    for j in range(1, steps):
        for half in tl.static_range(2):
            tlx.barrier_wait(alpha_fulls[half], (steps_done - done + j - 1) & 1)
            alpha = tlx.local_load(alpha_tiles[half])
            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)
            tlx.barrier_arrive(acc_readys[half])
    for half in tl.static_range(2):
        tlx.barrier_wait(sum_fulls[half], done & 1)
        l = tlx.local_load(sums[half])
        if SEAMLESS:  # as soon as it is read
            tlx.barrier_arrive(sum_empties[half])
        tlx.barrier_wait(acc_fulls[half], done & 1)
        o = tlx.local_load(accs[half]) / l
        if SEAMLESS:
            tlx.barrier_arrive(acc_readys[half])
        rows, d = q_row + half * BM + tl.arange(0, BM), tl.arange(0, D)
        tl.store(out_ptr + rows[:, None] * D + d[None, :], o)
        if not SEAMLESS:  # when all is done
            tlx.barrier_arrive(sum_empties[half])
            tlx.barrier_arrive(acc_readys[half])


# %% [markdown]
# Look at the last lines of `correct_tile`, where `SEAMLESS` is not set.
# A tile's *first* product needs no rescaling, only a free accumulator.
# So the correction arrives once more on `acc_readys` after each tile, and once before the first tile.
# That makes exactly one arrival per step, and `steps_done + j` counts them.
#
# ### The loop of a role
#
# Each role runs the same loop around its own function:
#
# ```python
# unit, done, steps_done = tl.program_id(0), 0, 0
# while unit < units:
#     record = read_record(records_ptr, unit)
#     ...                                        # this role's part of the tile
#     unit = next_place(done + 1, ZIGZAG)        # versions 1 to 3
#     done, steps_done = done + 1, steps_done + steps
# ```
#
# No role asks another one which tile comes next.
# All roles compute the same number, or (version 4) read the same answer.
#
# The kernel below contains all versions, selected by constants.
# `CLC`, `ASK_LATE` and `SEAMLESS` are explained in their sections; skip them at first.
# `log_ptr` is a log: for each unit the correction stores which program ran it, from when to when (`tlx.clock64` is the SM's clock).


# %%
@triton.jit
def next_place(turn, ZIGZAG: tl.constexpr):
    """Return the place in the list that this program takes in its ``turn``-th turn."""
    worker, workers = tl.program_id(0), tl.num_programs(0)
    if ZIGZAG:
        worker = tl.where(turn % 2 == 0, worker, workers - 1 - worker)
    return turn * workers + worker


@triton.jit
def note(log_ptr, unit, begin):
    """Store which program ran a unit, from when to when."""
    tl.store(log_ptr + unit * 3, tl.program_id(0))
    tl.store(log_ptr + unit * 3 + 1, begin)
    tl.store(log_ptr + unit * 3 + 2, tlx.clock64())


@triton.jit
def multiply_seamless(
    going, queries, kv, scores, outs, steps, steps_before, done, steps_done, BUFFERS: tl.constexpr
):
    """Issue per step and half: the P V that is due, maybe of the tile before; then the next S."""
    _, _, acc_fulls = outs
    for j in range(steps):
        total = steps_done + j
        use_acc = tl.where(j > 0, j, steps_before) > 1
        for half in tl.static_range(2):
            if total > 0:
                accumulate(half, kv, scores, outs, total - 1, use_acc, BUFFERS)
                if j == 0:
                    tlx.tcgen05_commit(acc_fulls[half])
            if going:
                score(half, queries, kv, scores, done, j, steps, total, BUFFERS)


# %%
@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, log_ptr, records_ptr, units, scale_log2,
    ZIGZAG: tl.constexpr, CLC: tl.constexpr, ASK_LATE: tl.constexpr, SEAMLESS: tl.constexpr,
    SUMS_IN_S: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BUFFERS: tl.constexpr,
):  # fmt: skip
    """Attend ``units`` tiles of 256 queries; out: [rows, D] fp32, log: [units, 3] int64."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv_tiles = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    alpha_tiles = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    s_sums = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p_tiles, alpha_tiles, s_sums, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    if SUMS_IN_S:
        sums = s_sums
    else:
        sums = tlx.local_alloc((BM, 1), tl.float32, 2)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2)
    alpha_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)
    acc_fulls = tlx.alloc_barriers(2)
    sum_fulls = tlx.alloc_barriers(2)
    sum_empties = tlx.alloc_barriers(2)
    boxes = (q_desc, k_desc, v_desc)
    queries = (q, q_fulls, q_empties)
    kv = (kv_tiles, kv_fulls, kv_empties)
    scores = (s, p_tiles, s_fulls, p_fulls)
    alphas = (alpha_tiles, alpha_fulls)
    outs = (accs, acc_readys, acc_fulls)
    ends = (sums, sum_fulls, sum_empties)
    if CLC:
        queue = tlx.clc_create_context(num_consumers=5, num_stages=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            unit, done, steps_done = tl.program_id(0), 0, 0
            for half in tl.static_range(2):
                tlx.barrier_arrive(acc_readys[half])
            while (unit >= 0) & (unit < units):
                begin = tlx.clock64()
                q_row, _, steps = read_record(records_ptr, unit)
                correct_tile(
                    outs, alphas, ends, out_ptr, q_row, steps, done, steps_done, SEAMLESS, D, BM
                )
                note(log_ptr, unit, begin)
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = next_place(done + 1, ZIGZAG)
                done, steps_done = done + 1, steps_done + steps
        with tlx.async_task(num_warps=4, registers=192, replicate=2):  # softmax
            half = tlx.async_task_replica_id()
            unit, done, steps_done = tl.program_id(0), 0, 0
            while (unit >= 0) & (unit < units):
                _, _, steps = read_record(records_ptr, unit)
                softmax_tile(
                    scores, alphas, ends, half, steps, done, steps_done, scale_log2, SUMS_IN_S, BM
                )
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = next_place(done + 1, ZIGZAG)
                done, steps_done = done + 1, steps_done + steps
        with tlx.async_task(num_warps=1, registers=32):  # mma
            unit, done, steps_done, steps = tl.program_id(0), 0, 0, 0
            going = unit < units
            while going:
                going = (unit >= 0) & (unit < units)
                steps_before, steps = steps, 1
                if going:
                    _, _, steps = read_record(records_ptr, unit)
                if SEAMLESS:  # one more round follows the last tile, for its last P V
                    multiply_seamless(
                        going, queries, kv, scores, outs,
                        steps, steps_before, done, steps_done, BUFFERS,
                    )  # fmt: skip
                elif going:
                    multiply_tile(queries, kv, scores, outs, ends, steps, done, steps_done, BUFFERS)
                if going:
                    if CLC:
                        unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                    else:
                        unit = next_place(done + 1, ZIGZAG)
                done, steps_done = done + 1, steps_done + steps
        with tlx.async_task(num_warps=1, registers=32):  # load
            unit, done, steps_done = tl.program_id(0), 0, 0
            while (unit >= 0) & (unit < units):
                if CLC and not ASK_LATE:
                    tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                record = read_record(records_ptr, unit)
                load_tile(boxes, queries, kv, record, done, steps_done, D, BM, BN, BUFFERS)
                if CLC and ASK_LATE:
                    tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                if CLC:
                    unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                else:
                    unit = next_place(done + 1, ZIGZAG)
                done, steps_done = done + 1, steps_done + record[2]


# %% [markdown]
# The host's side: a batch, the list of its tiles, a launch on a given number of SMs, and the modelled result.


# %%
def make_batch(blocks, sort, seed=0):
    """Return packed q, k, v of len(blocks) sequences, records [tiles, 3], the answer in fp64."""
    g = torch.Generator().manual_seed(seed)
    rows_q, rows_kv = 256 * len(blocks), BN * sum(blocks)
    q, k, v = (torch.randn(n, D, generator=g).bfloat16() for n in (rows_q, rows_kv, rows_kv))
    kv_rows = offsets_from_lengths(torch.tensor(blocks) * BN).tolist()
    records = [[256 * i, kv_rows[i], n] for i, n in enumerate(blocks)]
    if sort:
        records.sort(key=lambda record: -record[2])
    q_offsets = offsets_from_lengths([256] * len(blocks))
    heads = (t[:, None].double() for t in (q, k, v))
    want = reference.attention(*heads, q_offsets, torch.tensor(kv_rows, dtype=torch.int32))[:, 0]
    return q, k, v, torch.tensor(records, dtype=torch.int32), want


VERSION = dict(ZIGZAG=False, CLC=False, ASK_LATE=False, SEAMLESS=False, SUMS_IN_S=True)


def launch(batch, programs, kernel=forward_kernel, units=None, **changes):
    """Return the output and the log of a launch of ``programs`` programs."""
    q, k, v, records, _ = batch
    out, log = torch.full(q.shape, float("nan")), torch.full((len(records), 3), -1)
    boxes = [TensorDescriptor.from_tensor(t, [BM, D]) for t in (q, k, v)]
    constants = VERSION | changes
    kernel[(programs,)](
        *boxes, out, log, records, units or len(records), math.log2(math.e) / math.sqrt(D),
        D=D, BM=BM, BN=BN, BUFFERS=3, **constants,
    )  # fmt: skip
    return out, log


def check(batch, programs, **changes):
    """Return the largest error of a launch on 2 SMs over three schedules."""
    errors = []
    for policy in ("eager", "lazy", "random"):
        with emulator.options(policy=policy, seed=1, max_ctas=2):
            errors.append((launch(batch, programs, **changes)[0] - batch[-1]).abs().max().item())
    return max(errors)


def study(name, batch, programs, sms, **changes):
    """Model a launch on ``sms`` SMs of a B200: (modelled cycles, tensor core busy, log, run)."""
    with emulator.options(policy="timed", rates=B200, trace=True, races=False, max_ctas=sms):
        out, log = launch(batch, programs, **changes)
    run = emulator.last()
    spans = [s for (_, unit), found in run.occupied.items() if unit == "tensor" for s in found]
    busy = sum(end - begin for begin, end in spans) / (run.time * sms)
    error = (out - batch[-1]).abs().max().item()
    print(f"{name}: {run.time:,.0f} modelled cycles, {busy:.0%} busy, error {error:.0e}")
    return run.time, busy, log, run


SMALL = make_batch([1, 3, 2, 5, 1], sort=True)
print(f"largest error on two SMs, three schedules: {check(SMALL, 2):.0e}")

# %% [markdown]
# ## Versions 1 and 2: one program per tile, one program per SM
#
# With as many programs as tiles each loop runs once: that is chapter 12, version 5.
# With as many programs as SMs the same source is persistent.
# The batch: four tiles of 1,024 keys, on one SM.
# Predict: what does a persistent program save?

# %%
FOUR = make_batch([8, 8, 8, 8], sort=True)
score_board = {
    "1: a program per tile": study("1: a program per tile", FOUR, 4, 1),
    "2: persistent": study("2: persistent", FOUR, 1, 1),
}

# %% [markdown]
# It saves about 4,500 modelled cycles per tile, except for the last one.
# A part of them is the model's guess for a launch (1,500 cycles between two programs of an SM, marked *assumed* in `jfa/emulator/rates.py`).
# The rest is work that overlaps with nothing: the first Q, K and V are loaded, the last O is stored.
#
# A GPU could also put two programs on one SM, so that one works while the other one starts.
# That is not possible here: one program of this kernel fills shared memory and tensor memory.
#
# ## Version 3: zigzag in the kernel
#
# The batch: sixteen tiles of very different lengths on four SMs, at first in the order in which they are packed.
# A static persistent kernel gives every fourth tile to the same SM.
# Zigzag (chapter 08) needs a sorted list and one line of arithmetic, `next_place`.


# %%
def on_sms(log, sms):
    """Return (tile, begin, end) per SM; a program goes to the SM that was free first."""
    mine = {}
    for unit, (program, begin, end) in enumerate(log.tolist()):
        mine.setdefault(program, []).append((str(unit), begin, end))
    free, lines = [(0, sm) for sm in range(sms)], [[] for _ in range(sms)]
    for _, program in sorted((min(t[1] for t in tiles), p) for p, tiles in mine.items()):
        _, sm = heapq.heappop(free)
        lines[sm] += mine[program]
        heapq.heappush(free, (max(t[2] for t in mine[program]), sm))
    return lines


BLOCKS = [2, 1, 10, 3, 2, 1, 5, 1, 4, 3, 1, 2, 4, 3, 2, 2]
PACKED, SORTED = make_batch(BLOCKS, sort=False), make_batch(BLOCKS, sort=True)
SMS = 4
skewed = {
    "1: a program per tile": study("1: a program per tile", PACKED, len(BLOCKS), SMS),
    "2: every fourth tile": study("2: every fourth tile", PACKED, SMS, SMS),
    "3: sorted, zigzag": study("3: sorted, zigzag", SORTED, SMS, SMS, ZIGZAG=True),
}
plots.gantt(
    {name: on_sms(log, SMS) for name, (_, _, log, _) in skewed.items()},
    title="16 tiles on four SMs; the number in a box is the unit",
    xlabel="modelled cycles",
)

# %% [markdown]
# The units of the third picture are places in the sorted list, the others' are in the order of memory.
# Note what version 1 does well: the hardware starts the next program as soon as an SM is free.
# Version 2 gives that up, and on this batch it loses more than it saves on starts.
# Zigzag gets a similar balance without a queue, by planning from the sorted list.
#
# ## Version 4: the hardware hands out the work
#
# Cluster launch control gives both: programs that stay, and a queue.
# The grid has a program for each unit again, and only as many start as there are SMs.
# The others stay pending.
# A running program asks the hardware to *cancel* one of them, and does its tile.
#
# | call | who | what it does |
# |---|---|---|
# | `clc_create_context(num_consumers, num_stages)` | all, before the tasks | per stage: a full barrier, an empty barrier that counts `num_consumers`, 16 bytes for an answer |
# | `clc_producer(queue, parity, k=stage)` | one role only | wait until stage `k` is empty, expect 16 bytes on its full barrier, ask |
# | `clc_consumer(queue, parity, k=stage)` | every role, the asking one too | wait until stage `k` is full, read the answer; if it names a unit, arrive on its empty barrier. Returns the unit, or -1 |
#
# The parities are those of any ring.
# For turn `done` and two stages: the stage is `done & 1`, the consumer waits for `(done >> 1) & 1`, the producer for the opposite, since a stage is free before its first use.
#
# **How many consumers?** Not one per `async_task`, but one per group of warps that calls `clc_consumer`.
# The softmax task has two replicas, so here it is 1 + 2 + 1 + 1 = 5.
# In a cluster the number is multiplied by its CTAs.
#
# **Why two stages?** The load role is a tile ahead of the others.
# With one stage it could not ask again before the slowest role has read the last answer.
#
# A CLC context cannot be handed to another jit function in fbtriton 3.7.4, so the calls are in the kernel itself.

# %%
print(f"largest error on two SMs, three schedules: {check(SMALL, 5, CLC=True):.0e}")
FULL = study("4: CLC, one SM", FOUR, 4, 1, CLC=True)


# %%
def lanes(run, cta, until):
    """Return the handshake as it happened: answers, and which tile each role was in."""
    mine = [e for e in run.events if e[0] == cta and "clc" in e[2] or e[1] == "CLC"]
    tracks = [("load", "load"), ("mma", "mma"), ("softmax[0]", "softmax 0"),
              ("softmax[1]", "softmax 1"), ("correction", "correction")]  # fmt: skip
    asked = [e for e in mine if e[1] == "CLC"]
    rows = {"question": [piece(e[3], e[4] - e[3], f"{n}", 6) for n, e in enumerate(asked)]}
    for stage in (0, 1):
        arrivals = sorted(e[4] for e in mine if e[2] == f"arrive clc_empty[{stage}]")
        row = []
        for n, e in enumerate(asked[stage::2]):
            freed = arrivals[5 * n + 4] if len(arrivals) > 5 * n + 4 else until
            row.append(piece(e[4], freed - e[4], f"answer {2 * n + stage}", 5))
        rows[f"stage {stage} holds"] = row
    for track, words in tracks:
        ends = [e[4] for e in mine if e[1] == track and e[2].startswith("pass clc_full")]
        spans = zip([0, *ends], ends)
        rows[words] = [piece(b, e - b, f"tile {n}", n) for n, (b, e) in enumerate(spans)]
    return rows


run = FULL[3]
plots.segments(
    lanes(run, run.events[0][0], run.time),
    title="CLC on one SM, four tiles: question and answer, and who is in which tile (modelled)",
    xlabel="modelled cycles",
)

# %% [markdown]
# Read it from the top.
# Each question takes 900 cycles (*assumed* in the model).
# The load role asks at the beginning of a tile, and reads the answer at once when it is done with that tile.
# Its stage is held until the last of five readers has read it: the correction, a whole tile later.
# The last answer is -1: no role frees its stage, and no role needs it again.
# Most of the time the roles are in two different tiles.
#
# Now the skewed batch.
# Predict: will the queue beat zigzag?

# %%
skewed["4: sorted, CLC"] = study("4: sorted, CLC", SORTED, len(BLOCKS), SMS, CLC=True)
skewed["4b: asked late"] = study(
    "4b: asked late", SORTED, len(BLOCKS), SMS, CLC=True, ASK_LATE=True
)
plots.gantt(
    {name: on_sms(log, SMS) for name, (_, _, log, _) in list(skewed.items())[2:]},
    title="the sorted list of 16 tiles on four SMs",
    xlabel="modelled cycles",
)

# %% [markdown]
# **Look at the second turn of version 4.**
# SM 0 has the largest tile, and its second tile is unit 4, the largest of those that were left.
# All four programs ask when they begin, in the order in which they began: the second round was *dealt*, before it was known which SM would be free first.
# A queue that is asked one tile ahead balances only from the third round on.
# (Chapter 08 drew the same line for queues that run ahead.)
#
# Version 4b asks when the last load of the tile is on its way.
# The answer takes 900 cycles (assumed), and the ring still holds work for longer than that, so no role waits for the answer.
# Now the SM with the largest tile asks last.
#
# The package asks early, like version 4.
# Moving its question behind the tile's loads was tried once in the model (2026-11-30): 2 % fewer cycles on this batch, the same on four equal tiles.
# It was not tried on a chip, where the time of an answer is not known.
# With 148 SMs and many tiles per SM the dealt round matters less than with four SMs and 16 tiles.
#
# ## Version 5: no seam
#
# Look at the end of a tile in version 2.
# The tensor core has multiplied the last P V of both halves.
# Before the next tile's first S it waits on `sum_empties`, on which the correction arrives when it has stored its half of O: until then the columns of S hold the row sums, and the accumulator is in use.
# That is the safe way to write it at first, and it creates a seam.

# %%
score_board["5: no seam"] = study("5: no seam", FOUR, 1, 1, SEAMLESS=True, SUMS_IN_S=False)
print(f"largest error: {check(SMALL, 2, SEAMLESS=True, SUMS_IN_S=False):.0e}")


def from_seam(run):
    """Return the timeline, with cycle 0 where the correction begins to store the first tile."""
    line = Timeline.of(run)
    seam = min(e.start for e in line.events if e.track == "correction" and e.name == "store")
    events = [(*e[:3], e.start - seam, e.end - seam, e.args) for e in line.events]
    units = {k: [(b - seam, e - seam) for b, e in spans] for k, spans in line.occupied.items()}
    return Timeline(events, "a B200; 0: O of the first tile begins to leave", units)


plots.timelines(
    {name: from_seam(score_board[name][3]) for name in ("2: persistent", "5: no seam")},
    (-3000, 4500),
)

# %% [markdown]
# Look at the tensor core's lane.
# Above, the next tile's `s[0] #8` comes when half 0 is stored, and `s[1] #8` when half 1 is.
# Below it goes on as in the middle of a tile: O0, the next S0, O1, the next S1.
# Three changes do that, and each needs the others.
#
# 1. **The order of products.** A tile's last P0 V is followed by the *next tile's* S0, then P1 V, then S1: the same alternation as between two steps.
#    `multiply_seamless` does not treat the beginning or the end of a tile specially: it issues "the P V that is due".
#    One round more follows the last tile, for its last P V.
# 2. **The row sums move to shared memory.** They were in the columns of S, and the next tile's S is now issued before they have been read.
#    With the sums in shared memory the softmax waits on `sum_empties`, not the tensor core.
# 3. **Give back as soon as it is read.** The correction arrives on `sum_empties` and `acc_readys` right after its loads, and divides and stores afterwards.
#
# The softmax groups begin the next tile while the correction still divides and stores.

# %%
plots.panels(
    list(score_board),
    {
        "modelled cycles": ([r[0] for r in score_board.values()], "{:,.0f}"),
        "tensor core busy (modelled)": ([100 * r[1] for r in score_board.values()], "{:.1f} %"),
    },
    title="four tiles of 256 queries and 1,024 keys on one SM",
)

# %% [markdown]
# Three seams share the 2,300 cycles that this saves.
# How wide a seam is depends on what the correction does in it, and here that is little: one load of O, one division, one store, which the model charges at the rate of its unit and no more.
#
# The package's kernel made the same change, and its notebook ([docs/blackwell-notes.md](../docs/blackwell-notes.md)) has the same four tiles: 57.3 % busy before this step, 62.4 % after it, 64.6 % with an epilogue in wider slices, 66.1 % with Q released by its last S (all modelled).
# Here is the package as it is today:


# %%
def package(len_q, len_kv, sms=1, **options):
    """Model the package's forward on ``sms`` SMs; return (cycles, share of tensor core busy)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, D, generator=g).bfloat16() for n in (len_q, len_kv, len_kv))
    with emulator.options(policy="timed", rates=B200, trace=True, races=False, max_ctas=sms):
        jfa.jagged_flash_attention(
            q, k, v, offsets_from_lengths([len_q]), offsets_from_lengths([len_kv]),
            len_q, len_kv, backend="blackwell", **options,
        )  # fmt: skip
    run = emulator.last()
    spans = [s for (_, unit), found in run.occupied.items() if unit == "tensor" for s in found]
    return run.time, sum(end - begin for begin, end in spans) / (run.time * sms)


cycles, busy = package(1024, 1024)
print(f"the package, four tiles on one SM: {cycles:,.0f} modelled cycles, {busy:.1%} busy")

# %% [markdown]
# Open its entry in [jfa/kernels/blackwell/forward.py](../jfa/kernels/blackwell/forward.py): you know this loop.
# `unit` and `done` of this chapter are one aggregate there, `Walk`.
#
# It does more than version 5: P is written in slices, a quarter of the exponentials run on the FMA pipe, O is stored in slices of 32 columns through small buffers, and the room that this saves gives the ring a fourth buffer.
#
# ## Version 6: jagged
#
# ### A record of nine numbers
#
# With arbitrary lengths, several heads, masks and shared queries, a tile's record has nine numbers.
# A kernel on the device makes the list (chapter 08); `jfa.plan` shows it.

# %%
LENGTHS = [300, 0, 130, 600]
offsets = offsets_from_lengths(LENGTHS)
plan = jfa.plan(
    offsets, offsets, rows_q=sum(LENGTHS), rows_kv=sum(LENGTHS), num_heads=4, num_kv_heads=2,
    head_dim=D, max_seq_len_q=600, max_seq_len_kv=600, causal=True, backend="blackwell",
)  # fmt: skip
records, counts = plan.tensors[:2]
NAMES = ("q_begin", "q_len", "row", "out_begin", "k_begin", "k_len", "lo", "hi", "pad_begin")
tiles = records[: int(counts[0])].tolist()
print(plots.table(NAMES, tiles))
print(f"tiles with work, all tiles: {counts.tolist()}; room for {len(records)} records")

# %% [markdown]
# The records are sorted by work: the last tile of the longest sequence comes first.
# `lo` and `hi` are the band of the mask (chapter 06); an open side has a bound beyond every key, and a kernel compiled without that side does not read it.
# `out_begin` differs from `q_begin` only where queries are shared (chapter 07), `pad_begin` is the backward's.
# Here is the second record on the packed tensors:

# %%
q_begin, q_len, row, out_begin, k_begin, k_len = tiles[1][:6]
total = sum(LENGTHS)


def tape(begin, length, inner, size):
    """Return pieces of a packed tensor: one sequence and, inside it, the rows of a tile."""
    end = min(inner + size, length)
    parts = [(0, begin, "others", None), (begin, inner, "same\nsequence", 5)]
    parts += [(begin + inner, end - inner, "this tile", 0)]
    parts += [(begin + end, length - end, "same\nsequence", 5)]
    parts += [(begin + length, total - begin - length, "others", None)]
    return [piece(*part) for part in parts if part[1] > 0]


plots.segments(
    {
        "query, rows of Q": tape(q_begin, q_len, row, 256),
        "key, rows of K and V": tape(k_begin, k_len, 0, k_len),
        "output, rows of O": tape(out_begin, q_len, row, 256),
    },
    title=f"record 1: q_begin {q_begin}, q_len {q_len}, row {row}, out_begin {out_begin}, "
    f"k_begin {k_begin}, k_len {k_len}",
    xlabel="row of the packed tensor",
)

# %% [markdown]
# A **unit** is a tile of one head: `tile = unit // heads`, `head = unit % heads`, and the key head is `head // group` (chapter 07).
# So the heads of a tile are adjacent in the list, cost the same, and share K and V in the L2 cache.
#
# ### Never zero steps
#
# A query tile of a sequence without keys has nothing to do.
# Zero steps would be the natural choice, but they make the kernel hang: see the pitfalls.
# The package gives such a tile *one wholly masked step*.
# Every role takes the same path as always, and the output is 0, the log-sum-exp minus infinity.
#
# ### Tiles that share their queries
#
# A tile with at most 128 queries left has an empty second half.
# There both softmax groups take the *same* queries and every other key block, and the correction merges two partial results by their sums and maxima (chapter 02).
# Predict the panels first: how do 64, 128, 129 and 256 queries compare?

# %%
sizes = [64, 128, 129, 256]
shared = {n: package(n, 2048) for n in sizes}
plots.panels(
    [f"{n} queries" for n in sizes],
    {
        "modelled cycles": ([shared[n][0] for n in sizes], "{:,.0f}"),
        "tensor core busy (modelled)": ([100 * shared[n][1] for n in sizes], "{:.1f} %"),
    },
    title="one tile of 64 to 256 queries, 2,048 keys, the package's forward on one SM",
)

# %% [markdown]
# 128 queries take three fifths of the time of 129 (modelled).
# ([docs/blackwell-notes.md](../docs/blackwell-notes.md) has 71.3 % for 64 queries and 4,096 keys in the steady part of the run; the panel counts the whole run, with its beginning and its end.)
#
# ### Surplus units
#
# Only the device knows how many tiles there are, so the host sizes the grid by an upper bound, and some units have no tile: **surplus units**.
# Each role reads the count from memory, and its loop runs `while (unit >= 0) & (unit < units)`: both tests, in every role.
#
# The two ends differ: -1 says that nothing is left to steal; a surplus unit says that the list is over, although more programs may be pending.
# Those start later, find that they are surplus, and end.
# It costs little, since the list is sorted and all surplus comes last.
#
# ### All roles end together
#
# Why must they?
# A role that ends early no longer arrives where others wait.
# A role that goes on waits for a tile that is never loaded.
# On a chip there is a third reason, which this emulator does not show.
# A role's warps get their registers with `setmaxnreg` from a pool that the program's warps share, and an increase waits until other warps have given registers back.
# If a warp ends out of step, that wait can last forever: one such hang, and a CLC kernel that hung at its first launch, are reported in flashinfer 4533 (2026-08-15).
#
# And the whole op, jagged, causal, with an empty sequence, four heads on two key heads:

# %%
g = torch.Generator().manual_seed(1)
q = torch.randn(total, 4, D, generator=g).bfloat16()
k, v = (torch.randn(total, 2, D, generator=g).bfloat16() for _ in range(2))
want = reference.attention(q.double(), k.double(), v.double(), offsets, offsets, causal=True)
with emulator.options(policy="random", seed=3, max_ctas=3):
    out = jfa.jagged_flash_attention(
        q, k, v, offsets, offsets, 600, 600, causal=True, backend="blackwell"
    )
print("largest error:", (out - want).abs().max().item())

# %% [markdown]
# ## Through which buffer is O stored?
#
# Version 5 stores O from registers with `tl.store`.
# The package writes it to shared memory, from where a sixth role sends it by TMA.
# But shared memory is full.
# One buffer is nearly free at a tile's end: the tile's own Q, which its last S has read.
#
# The idea is good, and it has a trap.
# *Two* tiles then use Q's buffer: the one whose O is stored through it, and the one whose Q comes next.
# "The last S has read Q" no longer means "Q's buffer is free".
# FlashAttention 3 uses V's buffer instead: there the producer loads the next tile's Q and first K while O is stored, and waits for O's barrier before it loads V (Tri Dao, flash-attention issue 1396, 2025-02-10).
# Two public kernels had this bug: the Triton fork's pull request 2561 moved the wait for O in front of Q's load, and flash-attention 2754 reports errors up to 5.6.
# The package avoids the question with two buffers of 16 KiB.
# Exercise 13.5 is the bug.
#
# ## Summary
#
# * A persistent program processes many tiles; each role counts for itself, and all counts continue from tile to tile.
# * Zigzag deals tiles in advance; CLC hands them out while the kernel runs, and every role reads the same answers.
# * The idle time between two tiles disappears if loads, S and stores of neighboring tiles overlap.
# * A record of nine numbers per tile describes a jagged batch; a tile without work still takes one masked step.
# * All roles must end together: a role that stops early leaves the others waiting.
#
# ## Exercises
#
# Open [exercises/13_persistent.py](../exercises/13_persistent.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 13.1 | phases that go on from tile to tile | 2 | 40 |
# | 13.2 | from a unit to rows and heads | 1 | 20 |
# | 13.3 | the CLC loop of every role | 3 | 65 |
# | 13.4 | bug hunt: surplus units | 2 | 40 |
# | 13.5 | bug hunt: O leaves through Q's buffer | 3 | 40 |
# | 13.6 | predict: who gets which tile from the queue | 2 | 45 |
#
# ## Checkpoint
#
# <details><summary>A role waits once per tile on <code>q_fulls</code>. Which parity in the seventh tile?</summary>
#
# The seventh has `done` = 6, so parity 0.
# How many steps the tiles had does not matter to a barrier that completes once per tile.
# </details>
#
# <details><summary>Why does a kernel with wrong phases pass a test on tiles of 2 and 4 steps?</summary>
#
# A count that restarts and a count that goes on differ only after an odd number of steps.
# </details>
#
# <details><summary>A kernel on CLC has a load warp, an mma warp, three replicas of a softmax task and a default task, in a cluster of two. How many consumers?</summary>
#
# 1 + 1 + 3 + 1 = 6 groups per CTA, two CTAs: 12.
# </details>
#
# <details><summary>What protects the row sums in version 2, and what in version 5?</summary>
#
# In version 2 the tensor core waits on `sum_empties` before it overwrites S, whose columns hold the sums.
# In version 5 they are in shared memory, and the softmax waits on the same barrier before it writes the next tile's sums.
# </details>
#
# <details><summary>Why must the list be sorted, although CLC balances by itself?</summary>
#
# The queue gives out units in their order.
# If the longest comes last, it starts last, and every other SM waits for it (chapter 08).
# </details>
#
# ## Try this
#
# * Give `study` a B200 whose questions take five times as long: `B200.scaled("clc", 5)`. Does asking late still pay?
# * Give the ring two buffers, then four. How much later may the load role ask?
# * Let version 1 run the sorted list. Which version does it come close to, and why is it slower?
# * Zigzag with twice as many SMs as tiles in the first round: who works, who does not?
#
# ## Pitfalls
#
# Each is the kernel above with one place changed, run on two SMs.


# %%
def changed(kernel, old, new, count=1):
    """Return the kernel with one place of its source changed."""
    source = inspect.getsource(kernel.fn)
    assert source.count(old) == count, f"{old!r} occurs {source.count(old)} times"
    source, name = source.replace(old, new), f"<{kernel.fn.__name__}, changed>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = dict(globals())
    exec(compile(source, name, "exec"), space)
    return space[kernel.fn.__name__]


def attempt(batch, programs, lines=6, **changes):
    """Run a launch, and print the beginning of the report, or the tiles without a result."""
    try:
        with emulator.options(policy="lazy", seed=1, max_ctas=2):
            out, _ = launch(batch, programs, **changes)
        missing = int(out.isnan().any(1).sum()) // 256
        print(f"no report; {missing} of {len(batch[3])} tiles without a result")
    except emulator.EmulatorError as error:
        print("\n".join(f"{type(error).__name__}: {error}".splitlines()[:lines]))


# %% [markdown]
# **Phases that restart.** The softmax ignores `steps_done`.

# %%
forgets = changed(
    forward_kernel, "half, steps, done, steps_done, scale", "half, steps, done, 0, scale"
)
attempt(SMALL, 2, kernel=forgets)

# %% [markdown]
# **Zero steps.** One tile of the list has no keys.

# %%
NO_KEYS = (*SMALL[:3], torch.tensor([[0, 0, 2], [256, 0, 0]], dtype=torch.int32), SMALL[4])
attempt(NO_KEYS, 1, SEAMLESS=True, SUMS_IN_S=False, lines=8)

# %% [markdown]
# **One consumer per task, not per group of warps.** Both replicas of the softmax arrive, but only one was counted.

# %%
attempt(SMALL, 5, kernel=changed(forward_kernel, "num_consumers=5", "num_consumers=4"), CLC=True)

# %% [markdown]
# **The producer waits for the consumer's parity.** No role frees a stage before its first use.

# %%
waits = changed(forward_kernel, "((done >> 1) & 1) ^ 1, k=", "(done >> 1) & 1, k=", count=2)
attempt(SMALL, 5, kernel=waits, CLC=True)

# %% [markdown]
# **Row sums left in S**, in a kernel without a seam.

# %%
attempt(SMALL, 2, SEAMLESS=True, SUMS_IN_S=True)

# %% [markdown]
# **A grid of one program per SM, with CLC.** Nothing is pending, so nothing can be stolen.

# %%
attempt(SMALL, 2, CLC=True)

# %% [markdown]
# **A queue that is asked too early**: version 4 against 4b.
# **A role that ends alone**: exercise 13.4.
# **O in Q's buffer**: exercise 13.5.
#
# ## What differs on a GPU
#
# * The time of a launch and of a CLC answer are assumptions of the model.
#   Vary them (`B200.scaled`) before you believe a difference of a few percent.
# * 148 SMs share the L2 cache and memory. Whether tiles that run at the same time share keys matters there, but not in this model, where the SMs share only the queue.
# * Results do not depend on which program runs a tile: each tile is computed in the same order. In the backward they can, where tiles add into one dQ (chapters 05 and 14).
# * A CLC context can be handed to other jit functions in the Triton fork since 2026-08-13 (pull request 2817), so role loops can move out of the kernel there.
# * The compiler's report on this kernel: it fits sm_100 and spills 1.2 KB per thread, as chapter 12's did, since the correction holds whole rows of O in registers. `jfa compile blackwell` shows the package's kernel.
#
# ## Verified here, and not
#
# Every version ran on the emulator when this notebook ran: three schedules on two SMs against fp64, and one timed run each.
# Cycles are modelled.
# The package's share was computed above, as it is today; the figures of its versions are quoted from its notes.
# Nothing in this chapter ran on a Blackwell GPU, and no CLC instruction was executed.
#
# ## Sources
#
# * NVIDIA, PTX ISA, `clusterlaunchcontrol.try_cancel` and `query_cancel`: the 16-byte answer, and what may not be asked after a failed one.
# * TLX in fbtriton 3.7.4: names and semantics of `clc_*`. The kernels are our own.
# * Pull requests and issues, read in 2026: facebookexperimental/triton 2561 and 2817; Dao-AILab/flash-attention 1396 and 2754; flashinfer-ai/flashinfer 4533 (its author's comment of 2026-08-15).
# * [docs/blackwell-notes.md](../docs/blackwell-notes.md): the package's versions and their modelled figures.
#
# Next: [14 The Blackwell backward](14_blackwell_backward.py).
