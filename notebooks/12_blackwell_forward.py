# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · The Blackwell forward
#
# **Goals.** Build the warp-specialized forward of a B200 step by step: one role, then two, three, two softmax groups in ping-pong, and a correction role. (Two replicas of a task are one role here and everywhere in this course.) At each step predict what the
# timeline will show, then look. In the end read the package's kernel as prose.
#
# **Time.** 120 minutes, and 150 for the exercises. **Needs.** Chapters 04 and 10. No GPU: the emulator runs every version; its cycles are a model of a B200.

# %%
import importlib
import inspect
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
from jfa.masks import Band, block_kinds

D, BM, BN, BLOCKS = 128, 128, 128, 8

# %% [markdown]
# ## The mental model: four jobs that want to run at the same time
#
# One step of attention takes 256 queries, in two halves of 128, against a block of 128 keys. On one SM of a B200 its parts cost (FlashAttention-4 paper, cycles for D = 128):
#
# | job | unit | cycles |
# |---|---|---|
# | $S = QK^T$ and $O \mathrel{+}= PV$, both halves | tensor core | 2,048 |
# | $2 \cdot 128 \cdot 128$ exponentials | exp2 units (MUFU) | 2,048 |
# | operands of the products | shared memory | 1,536 |
# | K and V from memory | TMA | beside it |
#
# If the jobs take turns, a step costs their sum. If they overlap, it costs the largest. Everything in this chapter serves that overlap. The tensor core is asynchronous already; what keeps it idle is
# *waiting for us*.

# %%
def make_problem(len_q, len_kv, seed=0):
    """Dense attention of one head in bf16, and the answer in fp64."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=g).bfloat16() for n in (len_q, len_kv, len_kv))
    want = torch.softmax(q.double() @ k.double().t() / math.sqrt(D), dim=1) @ v.double()
    return q, k, v, want


Q, K, V, WANT = make_problem(256, BLOCKS * BN)
SCORE = []  # (version, modelled cycles, tensor core busy) for the comparison at the end
LINES = {}  # version -> timeline of its first program


def launch(kernel, rows, **constants):
    """256 queries, ``rows`` a program."""
    out = torch.full(Q.shape, float("nan"))
    boxes = [TensorDescriptor.from_tensor(t, [BM, D]) for t in (Q, K, V)]
    kernel[(256 // rows,)](*boxes, out, math.log2(math.e) / math.sqrt(D), BLOCKS, D=D, BM=BM, BN=BN, **constants)
    return out


def study(name, kernel, rows=BM, **constants):
    """Run a version on three schedules, compare with fp64, and model it on one SM; returns the timeline of its first program."""
    for policy in ("eager", "lazy", "random"):
        with emulator.options(policy=policy, seed=1):
            error = (launch(kernel, rows, **constants) - WANT).abs().max().item()
    with emulator.options(policy="timed", rates=B200, trace=True, max_ctas=1):
        launch(kernel, rows, **constants)
    run = emulator.last()
    busy = sum(end - begin for (_, unit), spans in run.occupied.items() if unit == "tensor" for begin, end in spans) / run.time
    SCORE.append((name, run.time, busy))
    print(f"{name}: largest error {error:.1e}; {run.time:,.0f} modelled cycles for 256 queries, tensor core busy {busy:.0%}")
    first = run.events[0][0]
    units = {key: spans for key, spans in run.occupied.items() if key[0] == first}
    LINES[name] = Timeline([e for e in run.events if e[0] == first], "B200", units)
    return LINES[name]


def show(line, cycles=9000):
    """A stretch of the timeline from the middle of the run."""
    start = line.start + 0.4 * line.cycles
    return plots.timelines({f"{SCORE[-1][0]}: {cycles:,} cycles from the middle of the first program": line}, (start, start + cycles))

# %%
@triton.jit
def softmax_block(scores, m, l, scale_log2):
    """Online softmax in base 2: -> (P, alpha, new m, new l)."""
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores * scale_log2 - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def store_rows(out_ptr, row, values, D: tl.constexpr, BM: tl.constexpr):
    """values [BM, D] to the rows row .. row + BM - 1 of out."""
    rows, d = row + tl.arange(0, BM), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], values)

# %% [markdown]
# ## Version 1: one role does everything
#
# A straight line: load, wait, multiply, wait, softmax, multiply, wait. `S`, `P` and the accumulator live in tensor memory.
#
# Predict: for which share of the time will the tensor core work?

# %%
@triton.jit
def one_role(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
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
        tlx.async_dot(q[0], tlx.local_trans(k[0]), s[0], use_acc=False, mBarriers=[s_full[0]])
        tlx.barrier_wait(s_full[0], phase)
        p, alpha, m, l = softmax_block(tlx.local_load(s[0]), m, l, scale_log2)
        tlx.local_store(p_tile[0], p.to(tl.bfloat16))
        if j > 0:
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        tlx.async_dot(p_tile[0], v[0], acc[0], use_acc=j > 0, mBarriers=[acc_full[0]])
        tlx.barrier_wait(acc_full[0], phase)
    store_rows(out_ptr, row, tlx.local_load(acc[0]) / l[:, None], D, BM)

# %%
line = study("1: one role", one_role)
show(line)

# %% [markdown]
# **Look.** At any moment exactly one unit works. The rest of the picture is waiting.
#
# ## Version 2: a load role
#
# A warp of its own runs ahead through a ring of three buffers. K and V share the ring: K0, V0, K1, V1, ... The products give the buffers back themselves: `mBarriers=[s_full, kv_empty]`.
#
# Predict: which of the waits disappears, and which does not?

# %%
@triton.jit
def ring(count, BUFFERS: tl.constexpr):
    """(buffer, phase) of the count-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@triton.jit
def load_role(q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, row, blocks, HALVES: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr):
    """Q once, then K0 V0 K1 V1 ... through one ring."""
    for half in tl.static_range(HALVES):
        tlx.barrier_expect_bytes(q_fulls[half], 2 * BM * D)
        tlx.async_descriptor_load(q_desc, q[half], [row + half * BM, 0], q_fulls[half])
    for i in range(2 * blocks):
        slot, phase = ring(i, BUFFERS)
        tlx.barrier_wait(kv_empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(kv_fulls[slot], 2 * BN * D)
        if i % 2 == 0:
            tlx.async_descriptor_load(k_desc, kv[slot], [i // 2 * BN, 0], kv_fulls[slot])
        else:
            tlx.async_descriptor_load(v_desc, kv[slot], [i // 2 * BN, 0], kv_fulls[slot])

# %%
@triton.jit
def two_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr):
    row = tl.program_id(0) * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(1)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # everything else
            tlx.barrier_wait(q_fulls[0], 0)
            m = tl.full((BM,), float("-inf"), tl.float32)
            l = tl.zeros((BM,), tl.float32)
            for j in range(blocks):
                phase = j & 1
                k_slot, k_phase = ring(2 * j, BUFFERS)
                tlx.barrier_wait(kv_fulls[k_slot], k_phase)
                tlx.async_dot(q[0], tlx.local_trans(kv[k_slot]), s[0], use_acc=False, mBarriers=[s_full[0], kv_empties[k_slot]])
                tlx.barrier_wait(s_full[0], phase)
                p, alpha, m, l = softmax_block(tlx.local_load(s[0]), m, l, scale_log2)
                tlx.local_store(p_tile[0], p.to(tl.bfloat16))
                if j > 0:
                    tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
                v_slot, v_phase = ring(2 * j + 1, BUFFERS)
                tlx.barrier_wait(kv_fulls[v_slot], v_phase)
                tlx.async_dot(p_tile[0], kv[v_slot], acc[0], use_acc=j > 0, mBarriers=[acc_full[0], kv_empties[v_slot]])
                tlx.barrier_wait(acc_full[0], phase)
            store_rows(out_ptr, row, tlx.local_load(acc[0]) / l[:, None], D, BM)
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, row, blocks, 1, D, BM, BN, BUFFERS)

# %%
line = study("2: load role", two_roles, BUFFERS=3)
show(line)

# %% [markdown]
# ## Version 3: an MMA role, and P inside S
#
# The products get a warp of their own. The softmax role now only says "P is there" and waits for "S is there".
#
# Tensor memory has 512 columns. Two halves want S (128 columns each), P (64, since bf16 takes half) and an accumulator (128): 640. But P of a half is written only after its S has been read. So P may live in the columns of S.
# `storage_alias_spec` says so; it adds no barrier. What keeps the two apart is order: the next S of a half is issued after the product that reads its P, and the tensor core works one task's products off in order.
# That order is observed, and the emulator models it. PTX promises it only for products on one accumulator and of one shape (chapter 10), and these two write different accumulators.

# %%
plots.segments(
    {
        "S and O": [plots.Segment(128 * i, 128, name, look) for i, (name, look) in enumerate((("S0", 0), ("S1", 0), ("O0", 2), ("O1", 2)))],
        "P, in S": [plots.Segment(0, 64, "P0", 3), plots.Segment(128, 64, "P1", 3)],
    },
    title="tensor memory at D = 128", xlabel="column (128 lanes of 4 bytes each)", ticks=range(0, 513, 64),
)  # fmt: skip

# %%
@triton.jit
def mma_role(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, p_fulls, acc_fulls, blocks, HALVES: tl.constexpr, BUFFERS: tl.constexpr):
    """S of the first block for every half; then, a block at a time, P V of a half followed by its next S."""
    k_slot, k_phase = ring(0, BUFFERS)
    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
    for half in tl.static_range(HALVES):
        tlx.barrier_wait(q_fulls[half], 0)
        tlx.async_dot(q[half], tlx.local_trans(kv[k_slot]), s[half], use_acc=False, mBarriers=[s_fulls[half]])
    tlx.tcgen05_commit(kv_empties[k_slot])
    for j in range(blocks):
        v_slot, v_phase = ring(2 * j + 1, BUFFERS)
        k_slot, k_phase = ring(2 * j + 2, BUFFERS)
        tlx.barrier_wait(kv_fulls[v_slot], v_phase)
        for half in tl.static_range(HALVES):
            tlx.barrier_wait(p_fulls[half], j & 1)
            tlx.async_dot(p_tiles[half], kv[v_slot], accs[half], use_acc=j > 0, mBarriers=[acc_fulls[half]])
            if j + 1 < blocks:
                if half == 0:
                    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
                tlx.async_dot(q[half], tlx.local_trans(kv[k_slot]), s[half], use_acc=False, mBarriers=[s_fulls[half]])
        tlx.tcgen05_commit(kv_empties[v_slot])
        if j + 1 < blocks:
            tlx.tcgen05_commit(kv_empties[k_slot])

# %%
@triton.jit
def softmax_role(s, p_tiles, accs, s_fulls, p_fulls, acc_fulls, out_ptr, row, half, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr):
    """One half: softmax, rescaling of its own accumulator, and the end."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(s_fulls[half], j & 1)
        p, alpha, m, l = softmax_block(tlx.local_load(s[half]), m, l, scale_log2)
        if j > 0:
            tlx.barrier_wait(acc_fulls[half], (j - 1) & 1)
            tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha[:, None])
        tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[half])
    tlx.barrier_wait(acc_fulls[half], (blocks - 1) & 1)
    store_rows(out_ptr, row, tlx.local_load(accs[half]) / l[:, None], D, BM)

# %%
@triton.jit
def three_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr, HALVES: tl.constexpr):
    row = tl.program_id(0) * HALVES * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, HALVES)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, HALVES, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, HALVES, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(s, p_tiles, group_type=tlx.reuse_group_type.shared))
    accs = tlx.local_alloc((BM, D), tl.float32, HALVES, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(HALVES)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(HALVES)
    p_fulls = tlx.alloc_barriers(HALVES)
    acc_fulls = tlx.alloc_barriers(HALVES)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax 0
            softmax_role(s, p_tiles, accs, s_fulls, p_fulls, acc_fulls, out_ptr, row, 0, scale_log2, blocks, D, BM)
        if HALVES == 2:
            with tlx.async_task(num_warps=4):  # softmax 1
                softmax_role(s, p_tiles, accs, s_fulls, p_fulls, acc_fulls, out_ptr, row + BM, 1, scale_log2, blocks, D, BM)
        with tlx.async_task(num_warps=1):  # mma
            mma_role(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, p_fulls, acc_fulls, blocks, HALVES, BUFFERS)
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, row, blocks, HALVES, D, BM, BN, BUFFERS)

# %% [markdown]
# Predict: one half only. What does the new role win?

# %%
line = study("3: MMA role", three_roles, HALVES=1, BUFFERS=3)
show(line)

# %% [markdown]
# **Look.** It hardly helps: while the softmax works, nothing is multiplied. One half has nothing else to offer, but that is not the reason. P lies inside S, so the next S would overwrite the P that is being made.
#
# ### Version 3b: S of its own
#
# One half needs 128 columns for S, 64 for P and 128 for its accumulator: 320, and there are 512. So P may have columns of its own.
# Then the next S can be issued as soon as the softmax has S in registers, and the tensor core multiplies while the exponentials are computed. One barrier more says that S has been read.

# %%
@triton.jit
def mma_early(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, s_empties, p_fulls, acc_fulls, blocks, BUFFERS: tl.constexpr):
    """One half: the next S as soon as this one has been read, and then P V."""
    k_slot, k_phase = ring(0, BUFFERS)
    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
    tlx.barrier_wait(q_fulls[0], 0)
    tlx.async_dot(q[0], tlx.local_trans(kv[k_slot]), s[0], use_acc=False, mBarriers=[s_fulls[0], kv_empties[k_slot]])
    for j in range(blocks):
        if j + 1 < blocks:
            k_slot, k_phase = ring(2 * j + 2, BUFFERS)
            tlx.barrier_wait(kv_fulls[k_slot], k_phase)
            tlx.barrier_wait(s_empties[0], j & 1)
            tlx.async_dot(q[0], tlx.local_trans(kv[k_slot]), s[0], use_acc=False, mBarriers=[s_fulls[0], kv_empties[k_slot]])
        v_slot, v_phase = ring(2 * j + 1, BUFFERS)
        tlx.barrier_wait(kv_fulls[v_slot], v_phase)
        tlx.barrier_wait(p_fulls[0], j & 1)
        tlx.async_dot(p_tiles[0], kv[v_slot], accs[0], use_acc=j > 0, mBarriers=[acc_fulls[0], kv_empties[v_slot]])

# %%
@triton.jit
def softmax_early(s, p_tiles, accs, s_fulls, s_empties, p_fulls, acc_fulls, out_ptr, row, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr):
    """As softmax_role, but it gives S back before it computes."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(s_fulls[0], j & 1)
        scores = tlx.local_load(s[0])
        tlx.barrier_arrive(s_empties[0])
        p, alpha, m, l = softmax_block(scores, m, l, scale_log2)
        if j > 0:
            tlx.barrier_wait(acc_fulls[0], (j - 1) & 1)
            tlx.local_store(accs[0], tlx.local_load(accs[0]) * alpha[:, None])
        tlx.local_store(p_tiles[0], p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[0])
    tlx.barrier_wait(acc_fulls[0], (blocks - 1) & 1)
    store_rows(out_ptr, row, tlx.local_load(accs[0]) / l[:, None], D, BM)


@triton.jit
def three_roles_apart(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr):
    row = tl.program_id(0) * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    accs = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(1)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(1)
    s_empties = tlx.alloc_barriers(1)
    p_fulls = tlx.alloc_barriers(1)
    acc_fulls = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax
            softmax_early(s, p_tiles, accs, s_fulls, s_empties, p_fulls, acc_fulls, out_ptr, row, scale_log2, blocks, D, BM)
        with tlx.async_task(num_warps=1):  # mma
            mma_early(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, s_empties, p_fulls, acc_fulls, blocks, BUFFERS)
        with tlx.async_task(num_warps=1):  # load
            load_role(q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, row, blocks, 1, D, BM, BN, BUFFERS)

# %%
line = study("3b: S of its own", three_roles_apart, BUFFERS=3)
show(line)

# %% [markdown]
# That is a fifth less, with one half. What is left of the circle is S, softmax, P V, and one group of softmax warps that does all of it.
#
# ## Version 4: two softmax groups in ping-pong
#
# Now two halves share every block of keys. While one group computes exponentials, the tensor core multiplies for the other. The MMA role alternates: P0 V, next S0, P1 V, next S1. Both halves fill the 512 columns, so P lies inside S again: what keeps the tensor core busy now is the other half.
#
# Predict: how much faster, at most?

# %%
line = study("4: ping-pong", three_roles, rows=2 * BM, HALVES=2, BUFFERS=3)
show(line)

# %% [markdown]
# ## Version 5: a correction role, and rescaling only when it matters
#
# Each group still rescales its own accumulator: it loads 128 columns, multiplies, stores them, and only then may P V start. Two ideas take that out of its way.
#
# 1. **A role of its own.** The softmax hands over `alpha` and goes on. Four other warps rescale, while the exponentials run.
# 2. **A stale maximum is fine.** $e^{s - m}$ is exact for *any* reference $m$, as long as it does not overflow. So keep the old maximum until it is exceeded by more than 8 (in log2 units: a factor of 256). Then `alpha` is 1 for nearly every
#    block, and the correction only has to look. The end divides by a sum made with the same reference, so nothing is approximate.
#
# `alpha` and the row sums are columns in the same aliased storage.
#
# Predict: which of the two ideas will show in the modelled cycles, and which will not?

# %%
@triton.jit
def softmax_only(s, p_tiles, alphas, sums, s_fulls, p_fulls, alpha_fulls, sum_fulls, half, scale_log2, blocks, THRESHOLD: tl.constexpr, BM: tl.constexpr):
    """One half: maximum, exponentials, row sum. It hands alpha to the correction, P to the tensor core."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        tlx.barrier_wait(s_fulls[half], j & 1)
        scores = tlx.local_load(s[half])
        m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
        m_new = tl.where(m_new - m > THRESHOLD, m_new, m)
        alpha = tl.math.exp2(m - m_new)
        m = m_new
        if j > 0:
            tlx.local_store(alphas[half], alpha[:, None])
            tlx.barrier_arrive(alpha_fulls[half])
        p = tl.math.exp2(scores * scale_log2 - m[:, None])
        tlx.local_store(p_tiles[half], p.to(tl.bfloat16))
        tlx.barrier_arrive(p_fulls[half])
        l = l * alpha + tl.sum(p, axis=1)
    tlx.local_store(sums[half], l[:, None])
    tlx.barrier_arrive(sum_fulls[half])

# %%
@triton.jit
def correction_role(accs, alphas, sums, alpha_fulls, sum_fulls, acc_readys, acc_fulls, out_ptr, row, blocks, D: tl.constexpr, BM: tl.constexpr):
    """Rescales an accumulator only if some row asks for it, and stores the result."""
    for half in tl.static_range(2):
        tlx.barrier_arrive(acc_readys[half])  # the first product overwrites: nothing to rescale
    for j in range(1, blocks):
        for half in tl.static_range(2):
            tlx.barrier_wait(alpha_fulls[half], (j - 1) & 1)
            alpha = tlx.local_load(alphas[half])
            if tl.min(tl.reshape(alpha, [BM]), 0) < 1.0:
                tlx.local_store(accs[half], tlx.local_load(accs[half]) * alpha)
            tlx.barrier_arrive(acc_readys[half])
    for half in tl.static_range(2):
        tlx.barrier_wait(sum_fulls[half], 0)
        l = tlx.local_load(sums[half])
        tlx.barrier_wait(acc_fulls[half], 0)
        store_rows(out_ptr, row + half * BM, tlx.local_load(accs[half]) / l, D, BM)

# %%
@triton.jit
def mma_corrected(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, p_fulls, acc_readys, acc_fulls, blocks, BUFFERS: tl.constexpr):
    """As before, but a product waits for its accumulator to be rescaled too."""
    k_slot, k_phase = ring(0, BUFFERS)
    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
    for half in tl.static_range(2):
        tlx.barrier_wait(q_fulls[half], 0)
        tlx.async_dot(q[half], tlx.local_trans(kv[k_slot]), s[half], use_acc=False, mBarriers=[s_fulls[half]])
    tlx.tcgen05_commit(kv_empties[k_slot])
    for j in range(blocks):
        v_slot, v_phase = ring(2 * j + 1, BUFFERS)
        k_slot, k_phase = ring(2 * j + 2, BUFFERS)
        tlx.barrier_wait(kv_fulls[v_slot], v_phase)
        for half in tl.static_range(2):
            tlx.barrier_wait(p_fulls[half], j & 1)
            tlx.barrier_wait(acc_readys[half], j & 1)
            tlx.async_dot(p_tiles[half], kv[v_slot], accs[half], use_acc=j > 0, force_async=True)
            if j + 1 < blocks:
                if half == 0:
                    tlx.barrier_wait(kv_fulls[k_slot], k_phase)
                tlx.async_dot(q[half], tlx.local_trans(kv[k_slot]), s[half], use_acc=False, mBarriers=[s_fulls[half]])
            else:
                tlx.tcgen05_commit(acc_fulls[half])
        tlx.tcgen05_commit(kv_empties[v_slot])
        if j + 1 < blocks:
            tlx.tcgen05_commit(kv_empties[k_slot])

# %%
@triton.jit
def four_roles(q_desc, k_desc, v_desc, out_ptr, scale_log2, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BUFFERS: tl.constexpr, THRESHOLD: tl.constexpr):
    row = tl.program_id(0) * 2 * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    kv = tlx.local_alloc((BN, D), tl.bfloat16, BUFFERS)
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    p_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=storage)
    alphas = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    sums = tlx.local_alloc((BM, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=storage)
    storage.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(p_tiles, alphas, sums, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    accs = tlx.local_alloc((BM, D), tl.float32, 2, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(2)
    kv_fulls = tlx.alloc_barriers(BUFFERS)
    kv_empties = tlx.alloc_barriers(BUFFERS)
    s_fulls = tlx.alloc_barriers(2)
    p_fulls = tlx.alloc_barriers(2)
    alpha_fulls = tlx.alloc_barriers(2)
    sum_fulls = tlx.alloc_barriers(2)
    acc_readys = tlx.alloc_barriers(2)
    acc_fulls = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # correction
            correction_role(accs, alphas, sums, alpha_fulls, sum_fulls, acc_readys, acc_fulls, out_ptr, row, blocks, D, BM)
        with tlx.async_task(num_warps=4, registers=192, replicate=2):  # softmax
            softmax_only(s, p_tiles, alphas, sums, s_fulls, p_fulls, alpha_fulls, sum_fulls, tlx.async_task_replica_id(), scale_log2, blocks, THRESHOLD, BM)
        with tlx.async_task(num_warps=1, registers=32):  # mma
            mma_corrected(q, kv, s, p_tiles, accs, q_fulls, kv_fulls, kv_empties, s_fulls, p_fulls, acc_readys, acc_fulls, blocks, BUFFERS)
        with tlx.async_task(num_warps=1, registers=32):  # load
            load_role(q_desc, k_desc, v_desc, q, kv, q_fulls, kv_fulls, kv_empties, row, blocks, 2, D, BM, BN, BUFFERS)

# %%
line = study("5a: correction role", four_roles, rows=2 * BM, BUFFERS=3, THRESHOLD=0.0)
line = study("5b: and a threshold of 8", four_roles, rows=2 * BM, BUFFERS=3, THRESHOLD=8.0)
show(line)

# %% [markdown]
# The correction does not wait for the product before it touches the accumulator. It need not: `alpha` of a block comes from a group that has read S of that block, that S was issued after the earlier product, and a task's
# products finish in order, as observed (version 3). Such an argument is worth writing down, and worth checking: the emulator's race detector followed it on three schedules.
#
# **Look.** The role of its own pays; the threshold does not show. In this model four correction warps have time to spare, and rescaling every block costs nobody anything. On a chip the loads and stores it saves are traffic of tensor memory, which the exponentials'
# results want too. Whether that shows there is a question for a measurement, not for this picture.
#
# How often would a threshold of 0 rescale, and a threshold of 8?

# %%
def rescales(threshold, blocks=64, rows=1024, seed=0):
    """Share of (row, block) pairs after the first block whose reference maximum moves, for random scores."""
    g = torch.Generator().manual_seed(seed)
    tops = (torch.randn(rows, blocks, BN, generator=g) * math.log2(math.e)).amax(dim=2)
    reference, moved = tops[:, 0], 0
    for j in range(1, blocks):
        grew = tops[:, j] - reference > threshold
        reference = torch.where(grew, tops[:, j], reference)
        moved += int(grew.sum())
    return moved / (rows * (blocks - 1))


for threshold in (0.0, 1.0, 8.0):
    print(f"threshold {threshold:>3}: {rescales(threshold):.2%} of rows and blocks rescale")

# %% [markdown]
# A whole half is rescaled as soon as one of its 128 rows asks for it, so even a few percent of rows would touch nearly every block.
# One answer for 128 rows is a limit of the tile model, in which a task branches as one. The hardware can decide per warp, and FlashAttention-4 does: there 32 rows share a vote.
#
# ## The score

# %%
tflops = [4 * 256 * BLOCKS * BN * D / B200.seconds(cycles) * B200["sms"] / 1e12 for _, cycles, _ in SCORE]
plots.panels(
    [name for name, _, _ in SCORE],
    {
        "modelled TFLOP/s of a B200": (tflops, "{:.0f}"),
        "tensor core busy, percent (modelled)": ([100 * busy for _, _, busy in SCORE], "{:.0f} %"),
    },
    title="256 queries, 1,024 keys, D = 128",
)

# %% [markdown]
# The ladder on one axis: the same 9,000 cycles of four versions, each in its steady state.
# Follow the green boxes of the tensor core from panel to panel, and the arrows from what completed a barrier's phase to the wait that this ended.

# %%
rungs = ("1: one role", "3b: S of its own", "4: ping-pong", "5a: correction role")
plots.timelines({name: LINES[name] for name in rungs}, (9000, 18000))

# %% [markdown]
# What holds version 5 back? Follow one half through a step: S is loaded from tensor memory, its maximum taken, 16,384 exponentials, converted, stored, and only then can the tensor core start P V and the next S. That chain is longer than the other half's products.
# The package's kernel shortens it: it publishes P in slices, so that the product starts on the first slice while the last is still being computed, and it computes a quarter of each slice's exponentials as a polynomial on the fp32 lanes (the FMA pipe), beside the other three quarters on the exp2 units.
#
# ## What the compiler says
#
# `jfa.compiled` compiles a kernel for sm_100 without a GPU. Registers a thread, spills, shared and tensor memory are facts, not a model. The cell takes about 20 seconds.

# %%
from jfa.compiled import compile_kernel

box = f"tensordesc<bf16[{BM}, {D}]>"
arguments = {"q_desc": box, "k_desc": box, "v_desc": box, "out_ptr": "*fp32", "scale_log2": "fp32", "blocks": "i32"}
for name, kernel, constants in (("1: one role", one_role, {}), ("5: four roles", four_roles, dict(BUFFERS=3, THRESHOLD=8.0))):
    print(f"compiling {name} ...", flush=True)
    report = compile_kernel(kernel, arguments, dict(D=D, BM=BM, BN=BN, **constants), arch=100)
    print(report.to_text())

# %% [markdown]
# **Read it.** Version 1 fits into its registers. It says 512 of 512 columns of tensor memory although its buffers need 320: columns are allocated in powers of two. So no second CTA of it fits onto the SM before the first has ended.
#
# Version 5 spills over a kilobyte per thread: 1,264 bytes stored and 1,324 loaded. Its correction, with 96 registers per thread, loads rows of 128 columns, but that is not all of it.
# With the correction and its stores in slices of 32 columns the compiler still reports 432 and 772 bytes (compiled for this text, November 2026), which is the softmax: a row of 128 scores and its 128 exponentials do not fit into 192 registers at once.
# The emulator does not see any of that; only the compiler does. The package's kernel works in slices in both roles. `jfa compile blackwell` prints its report.

# %% [markdown]
# ## Jagged: edges and bulk
#
# Four things turn version 5 into the package's kernel.
#
# - **Boundaries.** Every TMA box is bounded by its own sequence: a *ragged* descriptor fills rows past the end with zeros and stores nothing there. So a poisoned neighbour cannot leak through V (chapter 04's trap).
# - **Peeling.** A mask costs two comparisons and a select for each score. Most blocks need none: every query of the tile sees every key of the block. The loop is split into masked blocks at the left edge, an unmasked bulk, and masked blocks at the right edge.
# - **Lists.** CTAs are persistent: one a SM, each walks a list of tiles that have work. Chapter 13.
# - **No seam between tiles.** The mma role issues the next tile's first scores before the last P V of this one, so the softmax groups go on while O is still being normalised and stored.

# %%
kinds = block_kinds(Band.make(causal=True, window_size=(600, 0)), 512, 1100, 128, 128)
plots.block_map(kinds, title="512 queries, 1,100 keys, causal, 600 keys back", block_m=128, block_n=128)

# %% [markdown]
# Each line of blocks is one tile's loop: some P (an edge), then F (bulk), then P. Blocks without a letter are never visited.

# %% [markdown]
# ## Read the kernel
#
# Open [jfa/kernels/blackwell/forward.py](../jfa/kernels/blackwell/forward.py). Its docstring draws the roles; the entry allocates, names the barriers and owns the loop over tiles; each role is one function below it. You have met all of them:

# %%
forward = importlib.import_module("jfa.kernels.blackwell.forward")
for name in ("load_inputs", "multiply_tile", "softmax_tile", "softmax_steps", "correct_tile", "rescale_steps", "store_tile"):
    function = getattr(forward, name).fn
    lines = len(inspect.getsource(function).splitlines())
    print(f"{name:<22} {lines:>3} lines   {inspect.getdoc(function).splitlines()[0]}")

# %% [markdown]
# And run it: three sequences, one empty, tails everywhere, causal. The same source that a B200 runs.

# %%
lengths = [200, 0, 77]
offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
q, k, v = (torch.randn(sum(lengths), 1, D).bfloat16() for _ in range(3))
want = reference.attention(q.double(), k.double(), v.double(), offsets, offsets, causal=True)
with emulator.options(policy="timed", rates=B200, trace=True, max_ctas=1):
    out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, 200, 200, causal=True, backend="blackwell")
print("largest error:", (out - want).abs().max().item())
line = Timeline.of(emulator.last())
busiest = max(line.ctas(), key=lambda cta: sum(e.cta == cta for e in line.events))
plots.timelines({"the package's forward, its busiest CTA": (line, busiest)}, (0, max(e.end for e in line.events if e.cta == busiest)))

# %% [markdown]
# You know every lane: correction, two softmax groups, mma, load, and a `store` role of its own. `CLC` asks the hardware for the next tile. With 277 rows there is little of the steady state to see:
# the picture shows how a tile begins and ends.

# %% [markdown]
# ## Exercises
#
# Open [exercises/12_blackwell_forward.py](../exercises/12_blackwell_forward.py): the lazy rescaling in PyTorch, six buffers into 512 columns, scores that come too early, the correction role, ping-pong, and peeling.
#
# ## Checkpoint
#
# 1. Why does version 3 gain so little over version 2?
# 2. What keeps S(i + 1) of a half from overwriting P(i) in the same columns?
# 3. With a stale maximum, exponentials may exceed 1. By how much, and why is that harmless?
# 4. Why must all warps of the correction take the same branch?
#
# <details><summary>Answers</summary>
#
# 1. P lies inside S, so S, softmax and P V depend on each other in a circle, and a role more does not break it. Columns of its own for P (version 3b) or a second half do.
# 2. Order. Both are products of the MMA role, S(i + 1) is issued after P(i) V, and a task's products run in order: observed, and promised by PTX only for one accumulator and shape.
# 3. By a factor of at most 2^8 = 256, in bf16's range by far. Output and row sum carry the same factor, and the division removes it.
# 4. In the tile model a task branches as one, so the decision is one number for the whole half: the smallest alpha. On the hardware it may be one per warp, if each warp rescales its own 32 rows and all of them arrive.
#
# </details>
#
# ## Try this
#
# - Give version 4 a ring of two buffers, then of four. When does the load role stop mattering?
# - Slow the exponentials: `B200.scaled("mufu", 0.5)` in `study`. Which versions suffer most?
# - Swap the order in `mma_role`: both P V first, then both S. Predict the timeline, then look.
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | a role more, and P still inside S | version 3 against 3b |
# | 640 columns of 512 | exercise 12.2 |
# | S overwritten while it is read | exercise 12.3 |
# | rescaling on the critical path | version 4 against 5 |
# | a zero probability does not stop a NaN in V | the jagged section |
#
# ## What differs on a real GPU
#
# - Registers: each softmax thread holds a row of 128 scores. So the package's kernel gives most registers to the softmax and 32 to the small roles; `jfa compile` prints the shares.
# - The first tile waits for memory, not for L2; a grid ends when its slowest CTA does.
# - Numbers: the tensor core rounds sums in its own way; differences stay within bf16's.
#
# ## Verified here, and not
#
# Every version ran on the emulator when this notebook ran: three schedules, no finding, against fp64. Cycles are modelled; with the same rules the model is within 10 percent of three kernels timed on an H200 (`tests/emulator/test_rates.py`).
# Nothing in this chapter ran on a Blackwell GPU.
#
# ## Sources
#
# - FlashAttention-4, arXiv 2603.05451: cycles per tile, ping-pong, conditional rescaling, the exponential on the FMA pipe.
# - TLX in fbtriton 3.7.4: names and semantics. The kernels are our own.
# - Milakov and Gimelshein, arXiv 1805.02867: the online softmax.
