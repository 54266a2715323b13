# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 GQA and broadcast-Q
#
# **Goals.** After this chapter you
# * can pack the heads of a group into the rows of one tile, so that keys and values are read once,
# * can share one set of queries among all sequences without copying it,
# * know why its gradient is the hard one, and can compare three ways to sum it: by additions per address, by memory, and by whether the bits repeat,
# * can read the roofline of attention pooling.
#
# **Time** 60 minutes to read, 260 for the exercises.
# **You need** chapters 04 and 05 (the forward kernel; the five products of the backward).
# No GPU.

# %%
import math

import torch
import triton
import triton.language as tl

import jfa
import jfa.emulator as emulator
from jfa import plots, reference
from jfa.bench import recorded
from jfa.layout import offsets_from_lengths, pareto_lengths

_ = torch.manual_seed(0)

# %% [markdown]
# ## The mental model: who shares what
#
# Attention has three input tensors, and each of them may be shared.
#
# * **Grouped-query attention** (GQA): `H` query heads share `H_kv` key/value heads.
#   A group of `G = H / H_kv` neighboring query heads reads one key/value head.
#   The keys and values of a long history are what takes memory and bandwidth, so this saves a factor of `G`.
# * **Broadcast-Q**: all *sequences* share one set of queries.
#   A few learned queries, called **seeds**, are applied to the history of every user, and each history gives one output row per seed.
#   The Set Transformer calls this pooling by multihead attention (**PMA**).
#   The text that this course grew from names two uses of it: the seed pooling of Meta's GEM, and Kunlun (arXiv 2602.10016), where dense queries attend to jagged keys.
#
# In the pictures a filled cell means that the row's query reads the column's key.

# %%
H, H_KV = 8, 2
private = torch.eye(H, dtype=torch.bool)
grouped = torch.zeros(H, H_KV, dtype=torch.bool)
grouped[torch.arange(H), torch.arange(H) // (H // H_KV)] = True
shared = torch.zeros(6, 18, dtype=torch.bool)
for b, (begin, end) in enumerate(zip([0, 5, 5, 9, 10, 16], [5, 5, 9, 10, 16, 18])):
    shared[b, begin:end] = True
plots.score_grids(
    {"own key heads": private, "GQA: h reads h // G": grouped},
    title="eight query heads", xlabel="key/value head", ylabel="query head", counts=False,
)  # fmt: skip

# %%
plots.score_grids(
    {"one seed, six histories": shared},
    title="broadcast-Q: every row is the same query",
    xlabel="key, packed", ylabel="sequence", counts=False,
)  # fmt: skip

# %% [markdown]
# ## The math, down to shapes
#
# | | GQA | broadcast-Q |
# |---|---|---|
# | `q` | `[total_q, H, D]` | `[Lq, H, D]` |
# | `k`, `v` | `[total_kv, H_kv, D]` | `[total_kv, H, D]` |
# | `out` | `[total_q, H, D]` | `[B * Lq, H, D]`, or wherever `output_offset` says |
# | sums in the backward | dK, dV over the heads of a group | dQ over **all sequences** |
#
# In the forward, a shared tensor is only read.
# In the backward, its gradient is a *sum over all heads or sequences that share it*:
#
# $$ dK_c = \sum_{h \,\in\, \text{group } c} \; \text{scale} \cdot dS_h^{T} Q_h , \qquad dQ = \sum_{b=1}^{B} \; \text{scale} \cdot dS_b K_b . $$
#
# The first sum has `G` terms, which one program can compute in one tile.
# The second has `B` terms, often thousands, from sequences that different programs work on.
# That is the main difficulty of this chapter.
#
# ## Version 0: keys repeated
#
# The obvious way to do GQA is to repeat each key head `G` times and call ordinary attention.
# The result is right, but nothing is saved.
# Count the elements that the package's kernel loads, with keys repeated and with keys shared:


# %%
def loaded(q, k, v, offsets):
    """Count the elements that the package's portable kernel loads."""
    n = int(offsets.diff().max())
    with emulator.counting() as counted:
        jfa.jagged_flash_attention(q, k, v, offsets, offsets, n, n, backend="portable")
    return counted.load_elements


LENGTHS = [5, 0, 33, 1, 17]
offsets = offsets_from_lengths(LENGTHS)
q = torch.randn(56, H, 16)
k, v = (torch.randn(56, H_KV, 16) for _ in range(2))
repeated = [x.repeat_interleave(H // H_KV, dim=1) for x in (k, v)]
totals = {"keys repeated": loaded(q, *repeated, offsets), "keys shared": loaded(q, k, v, offsets)}
plots.panels(
    list(totals),
    {"elements loaded": (list(totals.values()), "{:,}")},
    title=f"lengths {LENGTHS}, 8 query heads, 2 key heads",
)

# %% [markdown]
# ## Version 1: heads become rows
#
# How does a kernel read a key once for four heads?
# A tile is a block of *rows*, and each row has its own softmax.
# The rows need not be different positions, so put the heads of a group next to each other:
#
# $$ r \;\mapsto\; \text{position } r \,/\!/\, G, \quad \text{head } r \bmod G . $$
#
# A sequence of `n` positions has `n * G` packed rows.
# Everything between the load of Q and the store of O stays the same.
# In memory the heads of a position are adjacent, so the loads are as contiguous as before.

# %%
unused = plots.Segment(12, 4, "", None)
tail = {
    "packed row": [*(plots.Segment(r, 1, str(r), r // 4) for r in range(12)), unused],
    "position": [*(plots.Segment(4 * i, 4, f"position {i}", i) for i in range(3)), unused],
    "head": [*(plots.Segment(r, 1, f"h{r % 4}", r // 4) for r in range(12)), unused],
}
plots.segments(
    tail,
    title="a tile of 16 packed rows: three positions, group 4; four rows are unused",
    xlabel="row of the tile",
)

# %% [markdown]
# There are two likely mistakes.
# One is `h % H_kv` instead of `h // G`: the shapes agree, but the results are wrong.
# The other is a mask by position: the rows of a sequence end at `n * G`, not at `n`.
# In PyTorch the packing is one line, and so is the unpacking:

# %%
n, G = 33, H // H_KV
one_q, one_k, one_v = q[5:38], k[5:38], v[5:38]
rows = one_q.reshape(n, H_KV, G, 16).transpose(0, 1).reshape(H_KV, n * G, 16)
scores = rows @ one_k.permute(1, 2, 0) / 4
packed = torch.softmax(scores, -1) @ one_v.transpose(0, 1)
back = packed.reshape(H_KV, n, G, 16).transpose(0, 1).reshape(n, H, 16)
right = reference.attention(q, k, v, offsets, offsets)[5:38]
print("packed heads against the reference:", float((back - right).abs().max()))

# %% [markdown]
# Packing helps most when there are few queries.
# With one new token per sequence (decoding), a tile of one row wastes most of a tensor core that works on 64 rows at a time.
# A group of eight heads gives it eight rows.
#
# In the backward, the packed rows also compute the group's sum: `dS^T Q` sums over rows, and the rows include the heads of the group.
# The likely mistake there is to compute one dK per query head and store each over the one before.
#
# ## Version 2: broadcast-Q, read in place
#
# The easy way is to make `B` copies of the seeds and call ordinary attention.
# A kernel does not need the copies: the query's address simply does not depend on `b`.
# The figure shows the memory that the copies take, for 32 seeds of 4 heads with D = 128, in bf16:

# %%
batches = [16, 64, 256, 1024, 4096]
seed_bytes = 32 * 4 * 128 * 2
plots.lines(
    batches,
    {
        "B copies of Q": [B * seed_bytes / 2**20 for B in batches],
        "one Q": [seed_bytes / 2**20 for _ in batches],
    },
    title="memory of the queries", xlabel="sequences", ylabel="MiB", log_x=True, log_y=True,
)  # fmt: skip

# %% [markdown]
# ### The original text's sketch
#
# The text that this course grew from pools in a loop, stacks the results, and ends with a mean over the batch:

# %%
seeds = torch.randn(4, 32)
history = torch.randn(45, 32)
bounds = offsets_from_lengths([7, 3, 19, 5, 11]).tolist()
pooled = []
for begin, end in zip(bounds, bounds[1:]):
    keys = history[begin:end]
    pooled.append(torch.softmax(seeds @ keys.T / math.sqrt(32), -1) @ keys)
stacked = torch.stack(pooled)
print("pooled:", tuple(stacked.shape))
print("the sketch's mean over the batch:", tuple(stacked.mean(0).shape))

# %% [markdown]
# Do not copy the last step.
# The purpose of pooling is the result of shape `(5, 4, 32)`: four rows per user.
# The mean over users, of shape `(4, 32)`, no longer says anything about a single user.
# It only shows that a sum over the batch has the shape of the *query*, which is also the shape of the query's gradient.
# The package's op returns `B * Lq` packed rows:

# %%
x = history[:, None]
op = jfa.jagged_flash_attention(
    seeds[:, None], x, x, None, torch.tensor(bounds, dtype=torch.int32), 4, 19,
    broadcast_q=True, backend="portable",
)  # fmt: skip
print("the op:", tuple(op.shape), "| apart:", float((op.reshape(5, 4, 32) - stacked).abs().max()))

# %% [markdown]
# ## Version 3: the gradient of a shared query, contended
#
# This is chapter 05's backward, for one head: `P` from the log-sum-exp, `dP = dO V^T`, `dS = P * (dP - delta)`.
# Only one program computes dK and dV of a key tile, and it stores them.
# All programs compute parts of dQ.
# The first idea is that of chapter 05: all of them add to dQ with atomics.
# The kernel below does this with `WAY="atomic"`; it shows only dQ, and its other two ways are used further down.


# %%
@triton.jit
def key_tile_dq(
    q, dout, lse, delta, k_ptr, v_ptr, start, end, scale, D: tl.constexpr, BN: tl.constexpr
):
    """Return the contribution of one block of keys to dQ: [LQ, D]."""
    j, d = start + tl.arange(0, BN), tl.arange(0, D)
    at = j[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at, mask=j[:, None] < end, other=0.0)
    v = tl.load(v_ptr + at, mask=j[:, None] < end, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.where(j[None, :] < end, tl.exp(s - lse[:, None]), 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return tl.dot(p * (dp - delta[:, None]), k, input_precision="ieee") * scale


@triton.jit
def each_sequence(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, offsets_ptr, dq_ptr, scale,
    WAY: tl.constexpr, LQ: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add sequence b's dQ to the shared one, or store it as partial b; one program per sequence."""
    b = tl.program_id(0)
    i, d = tl.arange(0, LQ), tl.arange(0, D)
    at = i[:, None] * D + d[None, :]
    q, dout = tl.load(q_ptr + at), tl.load(dout_ptr + b * LQ * D + at)
    lse, delta = tl.load(lse_ptr + b * LQ + i), tl.load(delta_ptr + b * LQ + i)
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    dq = tl.zeros((LQ, D), tl.float32)
    for start in range(begin, end, BN):
        dq += key_tile_dq(q, dout, lse, delta, k_ptr, v_ptr, start, end, scale, D, BN)
    if WAY == "atomic":
        tl.atomic_add(dq_ptr + at, dq)
    elif WAY == "store":
        tl.store(dq_ptr + at, tl.load(dq_ptr + at) + dq)
    else:
        tl.store(dq_ptr + b * LQ * D + at, dq)


# %% [markdown]
# Here is a problem with 40 sequences; lse, delta and the exact gradient come from the reference:

# %%
B, LQ, D = 40, 16, 16
lengths = pareto_lengths(B, 4, 60, seed=1)
kv_offsets = offsets_from_lengths(lengths)
q = torch.randn(LQ, D)
k, v = (torch.randn(int(lengths.sum()), D) for _ in range(2))
dout = torch.randn(B, LQ, D) + 0.5
seeds64 = q.double()[:, None].requires_grad_()
answer, lse = reference.attention(
    seeds64, k.double()[:, None], v.double()[:, None], None, kv_offsets,
    broadcast_q=True, return_lse=True,
)  # fmt: skip
answer.backward(dout.double().reshape(B * LQ, 1, D))
exact = seeds64.grad[:, 0]
delta = (answer[:, 0].detach() * dout.double().reshape(B * LQ, D)).sum(1).float().reshape(B, LQ)
lse = lse[0].detach().float().reshape(B, LQ)


def dq_by(way, **schedule):
    """Return dQ from one launch; partials are added here, in the order of the sequences."""
    dq = torch.zeros(LQ, D) if way != "partial" else torch.empty(B, LQ, D)
    with emulator.options(**schedule):
        each_sequence[(B,)](
            q, k, v, dout, lse, delta, kv_offsets, dq, 0.25, WAY=way, LQ=LQ, D=D, BN=16
        )
    if way == "partial":
        total = torch.zeros(LQ, D)
        for part in dq:
            total += part
        return total
    return dq


print("contended, error:", float((dq_by("atomic") - exact).abs().max()))

# %% [markdown]
# The result is right, but there are two problems.
# Each of the 256 elements of dQ gets 40 additions, and a GPU executes additions to one address one after another.
# And their order is arbitrary:

# %%
orders = [dq_by("atomic", policy="random", seed=s) for s in range(12)]
differ = sum(not torch.equal(orders[0], other) for other in orders[1:])
print(f"contended: {differ} of 11 other orders change the bits")
orders = [dq_by("partial", policy="random", seed=s) for s in range(12)]
differ = sum(not torch.equal(orders[0], other) for other in orders[1:])
print(f"partials:  {differ} of 11 other orders change the bits")

# %% [markdown]
# ## Version 4: one partial per sequence
#
# Now each address has one writer.
# Sequence `b` stores its dQ as partial `b`, and a second pass adds the partials in the order of the sequences.
# That is the last branch of the kernel, and the second line of the output above: the bits are the same under every order.
# The price is memory: `B` times the size of dQ, written and read again.
#
# ## Version 5: Q and dQ stay on the chip
#
# One partial per *sequence* is more than is needed; one per *worker* is enough.
# A worker is a program that processes many sequences, one after another, and there is one per SM (chapter 08 calls such a program *persistent*).
# It keeps Q and its own dQ on the chip.
# For each of its sequences it loads the keys, stores dK and dV, and adds to its dQ.
# At the end it stores one partial.
# With 132 workers there are at most 132 partials, whatever `B` is.
#
# This is the package's backward for shared queries, `jfa/kernels/portable/resident.py`; you write the dQ part in exercise 7.6.
# The figure compares the three ways for 64 and for 1,024 sequences of 1,000 keys, on 132 SMs with key tiles of 128.
# In the contended way each key tile adds once, as in a kernel that is divided by key tiles:


# %%
def compared(B, keys=1000, block=128, workers=132):
    """Return, per way, (adds to one address, partial dQs in memory)."""
    tiles = B * -(-keys // block)
    return [(tiles, 0), (0, B), (0, min(workers, B))]


ways = ["v3: contended", "v4: a partial per sequence", "v5: a partial per worker"]
plots.panels(
    ways,
    {
        "adds to each address, B = 64": ([a for a, _ in compared(64)], "{:,}"),
        "partials, B = 64": ([p for _, p in compared(64)], "{:,}"),
        "adds to each address, B = 1024": ([a for a, _ in compared(1024)], "{:,}"),
        "partials, B = 1024": ([p for _, p in compared(1024)], "{:,}"),
    },
    title="dQ of a shared query",
)

# %% [markdown]
# The next picture shows the owners of the addresses.
# Each line is one of the ways, and each box is one copy of dQ in memory, with the sequences that are added up in it:

# %%
crowd = {
    "v3": [plots.Segment(0, 12, "all 12 sequences add here", 1)],
    "v4": [plots.Segment(b, 1, f"b{b}", b) for b in range(12)],
    "v5": [plots.Segment(4 * w, 4, f"worker {w}: its own dQ", w) for w in range(3)],
}
plots.segments(crowd, title="12 sequences, 3 workers: who writes to which dQ", xlabel="sequence")

# %% [markdown]
# Nothing else in the backward changes, since dK and dV of each sequence have their own addresses.
# So dQ is harder than dK and dV here because of *ownership*, not because of the mathematics.
#
# ## In which precision to add
#
# The sum also needs enough precision.
# bf16 has a mantissa of 8 bits.
# Above 256 neighboring bf16 numbers are 2 apart, so adding 1 to 256 gives 256.
# A sum of many parts of the same sign stops growing:

# %%
counts = [1, 4, 16, 64, 256, 1024]
parts = (1 + 0.25 * torch.randn(1024, 64)).to(torch.bfloat16)
relative = {"bf16 sum": [], "fp32 sum": []}
for name, dtype in (("bf16 sum", torch.bfloat16), ("fp32 sum", torch.float32)):
    total = torch.zeros(64, dtype=dtype)
    for count, part in enumerate(parts, 1):
        total = total + part.to(dtype)
        if count in counts:
            true = parts[:count].double().sum(0)
            relative[name].append(float(((total.double() - true) / true).abs().mean()) + 1e-9)
plots.lines(
    counts, relative,
    title="sum of B bf16 parts near 1: relative error", xlabel="parts", ylabel="error",
    log_x=True, log_y=True,
)  # fmt: skip

# %% [markdown]
# At 256 parts the error of the bf16 sum is 0.7 %, which a test may accept.
# At 1,024 parts the sum has lost half of its value.
# The public source of the original kernel, `jfa2889`, takes care of it: it keeps dQ in fp32 if `broadcast_q` is set, and in the query's dtype otherwise.
# (`jfa2889` is `tlx_jfa` at commit 2889aef of a public fork of ads_model_kernel_library. Its backward also asserts `G == 1`, and its CPU path asserts that `broadcast_q` is off, so GQA gradients and PMA on a CPU are beyond it.)
#
# ## The roof
#
# How fast can pooling be?
# There are few seeds: with 32 queries, each number read from K is used in 2 x 32 FLOPs.
# So reading K and V from memory takes longer than the products.
# The two figures are *rooflines* of one H200: below the sloped roof the memory's bandwidth is the limit, below the flat one the tensor cores are.
# The points are recorded results, in TFLOP/s: *ours* is this package, *best peer* the fastest other implementation that was measured.
# For comparison, `self` is a batch of ordinary self-attention, and `cross` one of cross-attention (`jfa/bench/shapes.py` has their lengths).

# %%
results = recorded.read_all()
names = ("pma32", "pma128", "cross", "self")
recorded.roofline([r for r in results if r.on_gpu], "forward", names=names)

# %%
recorded.roofline([r for r in results if r.on_gpu], "backward", names=names)

# %% [markdown]
# `pma32` (32 seeds) is on the slope: 117 TFLOP/s forward and 129 backward, close to its roof.
# `pma128` (128 seeds) does four times as much work per byte: 416 and 473.
# FlashAttention 4, called with `B` copies of the query, reached 47 and 49 on `pma32`, and 204 and 166 on `pma128` (all on one H200, 2026-11-29, `jfa/bench/results`).
# The difference does not come from faster products, but from reading Q once and summing dQ once.
#
# ## Summary
#
# * GQA: pack the heads of a group into rows, row r = position r // G and head r mod G, so that a tile reads each key once.
# * Broadcast-Q: the query's address does not depend on the sequence; the output has `B * Lq` rows.
# * The gradient of a shared tensor is a sum over all that share it: over G heads in one tile, or over B sequences in many programs.
# * dQ of a shared query: atomics (contended, not repeatable), one partial per sequence, or one partial per worker.
# * Add in fp32.
#
# ## Exercises
#
# Open [exercises/07_gqa_and_shared_queries.py](../exercises/07_gqa_and_shared_queries.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 7.1 | packed rows | 1 | 15 |
# | 7.2 | a forward that reads each key once per group | 2 | 60 |
# | 7.3 | one query for all, and an answer where it is wanted | 2 | 55 |
# | 7.4 | predict: who adds how often, and what it costs | 1 | 20 |
# | 7.5 | bug hunt: the gradient that stops growing | 2 | 15 |
# | 7.6 | the resident dQ | 3 | 95 |
#
# ## Checkpoint
#
# <details><summary>What is broadcast-Q, and why is dQ harder than dK and dV there?</summary>
#
# One dense set of queries for all jagged sequences.
# In the forward it is only read.
# In the backward its gradient is a sum over all sequences, so all of them add to the same few addresses; dK and dV of a sequence have one owner each.
# </details>
#
# <details><summary>H = 12, H_kv = 3. Which key head does query head 7 read? Which packed row is position 5, head 7?</summary>
#
# G = 4, so key head 7 // 4 = 1.
# Inside the group it is head 3: row 5 * 4 + 3 = 23.
# </details>
#
# <details><summary>Where does GQA's backward sum over the group, if heads are packed into rows?</summary>
#
# In the product `dS^T Q` itself: it sums over the packed rows, which are the positions of all heads of the group.
# </details>
#
# <details><summary>Each sequence has its own lse and delta, although all have the same query. Why?</summary>
#
# Both belong to a row of scores, and the scores depend on the sequence's own keys.
# </details>
#
# <details><summary>The loss is a mean over users. Does dQ become a mean over sequences?</summary>
#
# No: the factor 1/B is already in dO, and the backward sums.
# If you divide again, the gradient of the seeds is B times too small.
# </details>
#
# ## Try this
#
# * Combine GQA and packing: give `jagged_flash_attention` 8 query heads and 2 key heads on jagged lengths, and compare the gradients of K with those of repeated keys, summed over the group.
# * Use `output_offset` to place the pooled rows before each user's history in one packed tensor.
# * In `dq_by("partial")`, add the partials in reversed order.
#   Are the bits the same?
#   Is the result any worse?
#
# ## Pitfalls
#
# **An epilogue that assumes a private address.** Take the working kernel and replace the atomic add by load, add, store.
# With one sequence it is right.
# The emulator reports what happens with forty:

# %%
run = emulator.run(
    each_sequence, (B,), q, k, v, dout, lse, delta, kv_offsets, torch.zeros(LQ, D), 0.25,
    WAY="store", LQ=LQ, D=D, BN=16,
)  # fmt: skip
print(str(run.findings[0]).split("\n")[0])

# %% [markdown]
# Kernels written for ordinary queries, which have one owner each, often have such an epilogue, and it is easy to overlook.
#
# **h % H_kv.** Both maps give every key head the same number of readers, so nothing looks odd.
# How large is the error?

# %%
n = max(LENGTHS)
heads = torch.randn(56, H, 16)
two = torch.randn(56, H_KV, 16)
right = reference.attention(heads, two, two, offsets, offsets)
tiled = two.repeat(1, H // H_KV, 1)  # head h reads h % H_kv
wrong = reference.attention(heads, tiled, tiled, offsets, offsets)
off = [float((right[:, h] - wrong[:, h]).abs().max()) for h in range(H)]
print("largest error by head:", [round(e, 2) for e in off])

# %% [markdown]
# **The mean over the batch**: the sketch above.
# **B copies of Q**: the memory figure.
# **A bf16 sum**: the precision figure.
# **The delta or lse of another sequence**: exercise 7.6 has both among its known mistakes.
#
# ## What differs on a GPU
#
# * Atomics to one address are executed one after another in the L2 cache.
#   Here they are only counted.
# * A worker keeps Q, dQ and one key tile on the chip: registers and shared memory limit `Lq * G` to 128 packed rows in the package's kernel for version 5.
#   With more rows, a separate pass computes dQ.
# * Blackwell's tensor core works on 128 rows at a time, so 32 seeds fill a quarter of it.
#   That costs no time, since memory is the limit.
#
# ## Verified here, and not
#
# The kernels above ran on the emulator when this notebook ran, and dQ was compared with fp64 autograd.
# The TFLOP/s were measured on one H200 and are read from the recorded files.
# Nothing was timed here.
#
# ## Sources
#
# * Ainslie et al., *GQA*, arXiv 2305.13245.
#   Lee et al., *Set Transformer*, arXiv 1810.00825 (2019): PMA.
# * The text that this course grew from (May 2026): GEM's seed pooling, Kunlun (arXiv 2602.10016), the sketch.
# * `tlx_jfa` at 2889aef, read in 2026.
#   `jfa/bench/results/h200-2026-11-29-*.json`.
#
# Next: [08 load balance](08_load_balance.py).
