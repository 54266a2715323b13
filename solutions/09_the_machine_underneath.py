# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 09: the machine underneath
#
# Read [notebooks/09_the_machine_underneath.py](../notebooks/09_the_machine_underneath.py) first.
# The first four exercises are arithmetic, the last two are kernels on the emulator.
# Rates come as a dict, so that the same function serves any chip:
#
# | key | meaning |
# |---|---|
# | `"tensor_2"`, `"tensor_1"` | FLOP per clock for 16-bit and 8-bit inputs |
# | `"rows"` | rows of the first operand that the tensor core takes at a time: 128 on a B200, 64 on an H200 |
# | `"mufu"` | exponentials per clock |
# | `"smem"` | bytes per clock of shared memory, reads and writes together |
#
# You may read `jfa.emulator.rates`, but it does not contain the answers: some of the check's chips are invented.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.course import check, hint, progress

progress()

B200 = {"tensor_2": 8192, "tensor_1": 16384, "rows": 128, "mufu": 16, "smem": 128}

# %% [markdown]
# ## 9.1 Cycles of a tile, unit by unit
#
# (difficulty 1 of 3, 15 minutes) One step of the forward: `M` queries, `N` keys, head dimension `D`, inputs of `itemsize` bytes (2 or 1).
# Return for how many cycles it occupies the tensor core, the exp2 units, and shared memory, as three numbers.
#
# - The two products are S = Q Kᵀ and O += P V.
#   A multiply-add is two FLOPs.
# - The tensor core takes `rates["rows"]` rows of the first operand at a time.
#   A last group with fewer rows takes as long as a full one.
# - For each such group of rows, shared memory delivers the *whole* second operand (K, or V) again.
#   Of the first operand it delivers the rows that exist, once: Q for S.
#   P does not come from shared memory.
# - One exponential per score.
#   The tile has exactly `M` rows.


# %% tags=["ex-9.1"]
def tile_cycles(M, N, D, itemsize, rates):
    """Return (tensor, exp, smem), each in cycles."""
    ### BEGIN SOLUTION
    groups = -(-M // rates["rows"])
    flops = 2 * 2 * groups * rates["rows"] * N * D
    operands = (M * D + groups * 2 * N * D) * itemsize
    return flops / rates[f"tensor_{itemsize}"], M * N / rates["mufu"], operands / rates["smem"]
    ### END SOLUTION


# %%
check("9.1", tile_cycles)

# %% [markdown]
# ## 9.2 Predict the limit, forward and backward
#
# (difficulty 2 of 3, 45 minutes) Which unit limits a perfectly overlapped kernel?
# `direction` is `"forward"` (a tile of 256 queries and 128 keys) or `"backward"` (128 queries, 128 keys).
#
# The forward is that of 9.1.
# The backward has five products.
# M is the number of queries, N the number of keys:
#
# | product | rows x columns, summed over | first operand from |
# |---|---|---|
# | Sᵀ = K Qᵀ | N x M, D | shared memory |
# | dPᵀ = V dOᵀ | N x M, D | shared memory |
# | dV += Pᵀ dO | N x D, M | tensor memory |
# | dK += dSᵀ Q | N x D, M | tensor memory |
# | dQ = dS K | M x D, N | shared memory |
#
# The second operand always comes from shared memory, once per `rates["rows"]` rows, as in 9.1.
# In addition, dS is written to shared memory once (M x N numbers of `itemsize` bytes).
# dQ leaves through it in fp32: it is written once and read once.
# P is recomputed: one exponential per score.
#
# Return two values.
# The first is a string with the names of all units within 5 % of the slowest one (at least 0.95 times its cycles), in alphabetical order and joined by `" and "`, such as `"exp and tensor"`; the names are `exp`, `smem` and `tensor`.
# The second is the number of cycles of the slowest unit.


# %% tags=["ex-9.2"]
def limit(direction, D, itemsize, rates):
    """Return (names, cycles): a string and a number."""
    ### BEGIN SOLUTION
    M, N = (256, 128) if direction == "forward" else (128, 128)
    rows = rates["rows"]
    if direction == "forward":
        products = [(M, N, D, True), (M, D, N, False)]
        other = 0
    else:
        products = [(N, M, D, True), (N, M, D, True), (N, D, M, False), (N, D, M, False)]
        products.append((M, D, N, True))
        other = M * N * itemsize + 2 * M * D * 4
    flops = bytes_read = 0
    for m, n, k, from_smem in products:
        groups = -(-m // rows)
        flops += 2 * groups * rows * n * k
        bytes_read += (groups * n * k + (m * k if from_smem else 0)) * itemsize
    cycles = {
        "exp": M * N / rates["mufu"],
        "smem": (bytes_read + other) / rates["smem"],
        "tensor": flops / rates[f"tensor_{itemsize}"],
    }
    slowest = max(cycles.values())
    return " and ".join(name for name, c in cycles.items() if c >= 0.95 * slowest), slowest
    ### END SOLUTION


# %%
check("9.2", limit)

# %% [markdown]
# ## 9.3 Predict the ring
#
# (difficulty 2 of 3, 20 minutes) One worker loads tiles of B by TMA into a ring of buffers, and another multiplies them: `acc += A B`.
# A `[M, K]` stays in shared memory, and each step has a new B `[K, N]`; both are bf16.
# M is 64 or 128.
# How many buffers does the ring need so that no unit waits for a buffer?
# Little's law gives the answer: the number of buffers in use is the time that one is in use, times the number of buffers needed per cycle.
#
# - **Round trip** of one buffer: the cycles from the start of its load to the start of the next load into it.
#   It is the sum of five parts:
#   1. The load: its latency `"tma_latency"`, then its transfer through the slowest of `"tma_issue"`, `"l2"` and `"smem"` (each in bytes per clock).
#   2. The multiplying worker wakes (`"wakeup"`).
#   3. The product takes the time of the slower of two: the tensor core, and shared memory delivering the operands (A and B, once each).
#   4. The product's latency `"mma_latency"`.
#   5. The loading worker wakes (`"wakeup"`).
# - **Period**: the cycles per step if no unit waits, which is the time of the busiest unit per step.
#   Shared memory is a single unit for all its uses: the transfer of the load and the operands of the product.
# - Fewer than 128 rows of A take the tensor core as long as 128.
#
# Return the round trip, the period, and the smallest number of buffers with which a buffer is free in every period.
# The timed emulator agrees within 10 %: with one buffer a step of this ring takes your round trip, and with your number of buffers it takes your period.


# %% tags=["ex-9.3"]
def ring(M, N, K, rates):
    """Return (round_trip, period, buffers): cycles, cycles, an int."""
    ### BEGIN SOLUTION
    moved = 2 * K * N
    transfer = moved / min(rates["tma_issue"], rates["l2"], rates["smem"])
    tensor = 2 * 128 * N * K / rates["tensor_2"]
    operands = (2 * M * K + moved) / rates["smem"]
    round_trip = rates["tma_latency"] + transfer + rates["wakeup"]
    round_trip += max(tensor, operands) + rates["mma_latency"] + rates["wakeup"]
    period = max(tensor, operands + moved / rates["smem"], transfer)
    return round_trip, period, -int(-round_trip // period)
    ### END SOLUTION


# %%
check("9.3", ring)

# %% [markdown]
# ## 9.4 Busy shares and the longest chain
#
# (difficulty 2 of 3, 50 minutes) Write the tool that reads a timeline.
# `events` is a list of `(unit, start, end)`, with the times in cycles.
# `needs[i]` lists the indices of the events that event i had to wait for (any indices, in any order; no event waits for itself, directly or through others).
#
# - **Busy**: for each unit, its share of the time from the first start to the last end of all events.
#   Events of one unit may overlap; a cycle counts once.
# - **Longest chain**: the largest sum of durations along a path of `needs`.
#   No overlap can make the kernel faster than this.
#   Time that passes *between* two events is not part of it.
#
# Without events return `({}, 0)`; if no time passes at all, shares are 0.
# There may be thousands of events, and very many paths.


# %% tags=["ex-9.4"]
def account(events, needs):
    """Return (busy: {unit: share}, chain: cycles)."""
    ### BEGIN SOLUTION
    if not events:
        return {}, 0
    begin, end = min(e[1] for e in events), max(e[2] for e in events)
    busy = {}
    for unit in {e[0] for e in events}:
        covered, reach = 0, begin
        for start, stop in sorted(e[1:] for e in events if e[0] == unit):
            covered += max(0, stop - max(start, reach))
            reach = max(reach, stop)
        busy[unit] = covered / (end - begin) if end > begin else 0.0
    chain = [None] * len(events)
    for first in range(len(events)):
        todo = [first]
        while todo:
            i = todo[-1]
            open_ones = [n for n in needs[i] if chain[n] is None]
            todo += open_ones
            if not open_ones:
                before = max((chain[n] for n in needs[i]), default=0)
                chain[i] = before + events[i][2] - events[i][1]
                todo.pop()
    return busy, max(chain)
    ### END SOLUTION


# %%
check("9.4", account)

# %% [markdown]
# ## 9.5 Bug hunt: a wait that comes too early
#
# (difficulty 2 of 3, 25 minutes) A kernel has one warp group, two buffers for K and two for S.
# For each of its `M` queries it sums the exponentials of the scores.
# (Scores are small here, so no maximum is subtracted.)
#
# The author's plan: while the tensor core computes the S of block j, the exp2 units work on block j − 1.
# The numbers are right, but the timeline shows the two units taking turns.
# Run the check first: it names the longest wait.
# That wait is needed, but it is in the wrong place.
# Move it to the right one.
# Before you do: which buffer, other than S, is free only after it?
#
# Limit: at most 3,500 modelled cycles, and 1,700 more per block of keys.
# `M` is 64 or 128, `N` too, and `D` is 32 or 128.


# %% tags=["ex-9.5"]
@triton.jit
def sums_kernel(
    q_desc, k_desc, out_ptr, blocks, scale_log2,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store sums of exp2(scores * scale_log2) in out: [M] fp32; q: [M, D], k: [blocks * N, D]."""
    # YOUR CODE: one wait below serializes two units
    q = tlx.local_alloc((M, D), tl.bfloat16, 1)
    k = tlx.local_alloc((N, D), tl.bfloat16, 2)
    s = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(2)
    s_fulls = tlx.alloc_barriers(2)
    tlx.barrier_expect_bytes(q_full[0], 2 * M * D)
    tlx.async_descriptor_load(q_desc, q[0], [0, 0], q_full[0])
    tlx.barrier_expect_bytes(k_fulls[0], 2 * N * D)
    tlx.async_descriptor_load(k_desc, k[0], [0, 0], k_fulls[0])
    tlx.barrier_wait(q_full[0], 0)
    total = tl.zeros((M,), tl.float32)
    for j in range(blocks + 1):  # S of block j, exponentials of block j - 1
        now, other = j % 2, (j + 1) % 2
        ### BEGIN SOLUTION
        if j > 0:
            tlx.barrier_wait(s_fulls[other], ((j - 1) // 2) & 1)
        ### STARTER
        ### END SOLUTION
        if j + 1 < blocks:
            tlx.barrier_expect_bytes(k_fulls[other], 2 * N * D)
            tlx.async_descriptor_load(k_desc, k[other], [(j + 1) * N, 0], k_fulls[other])
        if j < blocks:
            tlx.barrier_wait(k_fulls[now], (j // 2) & 1)
            keys = tlx.local_trans(k[now])
            tlx.async_dot(q[0], keys, s[now], use_acc=False, mBarriers=[s_fulls[now]])
            ### BEGIN SOLUTION
            ### STARTER
            # tlx.barrier_wait(s_fulls[now], (j // 2) & 1)
            ### END SOLUTION
        if j > 0:
            total += tl.sum(tl.math.exp2(tlx.local_load(s[other]) * scale_log2), axis=1)
    tl.store(out_ptr + tl.arange(0, M), total)


# %%
check("9.5", sums_kernel)

# %% [markdown]
# ## 9.6 The next product before this softmax
#
# (difficulty 3 of 3, 40 minutes) The chapter says that the same warps could start the product for the next S early.
# Write that kernel: attention for one tile of `M` queries, one warp group, no tasks.
# Two waits of version 1 must move.
# While the exp2 units work on block j, the tensor core should compute the S of block j + 1; and the wait for block j's PV may come a step later.
#
# Buffers, barriers and helpers are given; the first three loads are started for you.
# Buffers of a ring are used in turn: block j has `k[j % 2]`, `v[j % 2]`, `s[j % 2]`.
# There is one `p` and one `acc`.
# Before each step ask, for each buffer, which operation may still read it.
# The emulator checks it, too.
#
# `blocks` is at least 1.
# Scores may be huge or very negative; every row has visible keys.
# Limit: at most 3,000 modelled cycles, and 1,700 more per block of keys.
# `M` is 64 or 128, `N` and `D` are 32 or 64.
#
# Given, in the next cell: `load_box` starts a copy, and `softmax_step` is that of chapter 04, in base 2.


# %%
@triton.jit
def load_box(desc, tile, full, row, BYTES: tl.constexpr):
    """Start the copy of the box at `row`; `full` completes when it has arrived."""
    tlx.barrier_expect_bytes(full, BYTES)
    tlx.async_descriptor_load(desc, tile, [row, 0], full)


@triton.jit
def softmax_step(scores, m, l, scale_log2):
    """Add one block to a running softmax in base 2: -> (P, alpha, m, l)."""
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores * scale_log2 - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


# %% tags=["ex-9.6"]
@triton.jit
def early_kernel(
    q_desc, k_desc, v_desc, out_ptr, blocks, scale_log2,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store attention in out: [M, D] fp32; q: [M, D], k and v: [blocks * N, D], bf16."""
    q = tlx.local_alloc((M, D), tl.bfloat16, 1)
    k = tlx.local_alloc((N, D), tl.bfloat16, 2)
    v = tlx.local_alloc((N, D), tl.bfloat16, 2)
    s = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
    p = tlx.local_alloc((M, N), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((M, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_fulls = tlx.alloc_barriers(2)
    v_fulls = tlx.alloc_barriers(2)
    s_fulls = tlx.alloc_barriers(2)
    acc_full = tlx.alloc_barriers(1)
    BYTES: tl.constexpr = 2 * N * D
    load_box(q_desc, q[0], q_full[0], 0, 2 * M * D)
    load_box(k_desc, k[0], k_fulls[0], 0, BYTES)
    load_box(v_desc, v[0], v_fulls[0], 0, BYTES)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    ### BEGIN SOLUTION
    if blocks > 1:
        load_box(k_desc, k[1], k_fulls[1], N, BYTES)
    tlx.barrier_wait(q_full[0], 0)
    tlx.barrier_wait(k_fulls[0], 0)
    first = tlx.local_trans(k[0])
    tlx.async_dot(q[0], first, s[0], use_acc=False, mBarriers=[s_fulls[0]])
    for j in range(blocks):
        now, nxt = j % 2, (j + 1) % 2
        if j + 1 < blocks:  # its S buffer: the softmax of block j - 1 has loaded it
            tlx.barrier_wait(k_fulls[nxt], ((j + 1) // 2) & 1)
            keys = tlx.local_trans(k[nxt])
            tlx.async_dot(q[0], keys, s[nxt], use_acc=False, mBarriers=[s_fulls[nxt]])
        tlx.barrier_wait(s_fulls[now], (j // 2) & 1)
        if j + 2 < blocks:  # that product was the last reader of k[now]
            load_box(k_desc, k[now], k_fulls[now], (j + 2) * N, BYTES)
        probs, alpha, m, l = softmax_step(tlx.local_load(s[now]), m, l, scale_log2)
        if j > 0:  # only now are acc, p and the other v free
            tlx.barrier_wait(acc_full[0], (j - 1) & 1)
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        if j + 1 < blocks:
            load_box(v_desc, v[nxt], v_fulls[nxt], (j + 1) * N, BYTES)
        tlx.local_store(p[0], probs.to(tl.bfloat16))
        tlx.barrier_wait(v_fulls[now], (j // 2) & 1)
        tlx.async_dot(p[0], v[now], acc[0], use_acc=j > 0, mBarriers=[acc_full[0]])
    tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)
    ### END SOLUTION
    rows, d = tl.arange(0, M), tl.arange(0, D)
    out = tlx.local_load(acc[0]) / l[:, None]
    tl.store(out_ptr + rows[:, None] * D + d[None, :], out)


# %%
check("9.6", early_kernel)
