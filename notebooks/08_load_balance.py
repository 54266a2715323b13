# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 Load balance
#
# **Goals.** After this chapter you
# * can say what determines when a launch ends,
# * can assign tiles to workers in four ways (round robin, zigzag, longest first, a queue), and know what information each way uses,
# * know the bound that no assignment of whole tiles beats, and how splitting a tile beats it,
# * can make the list of tiles on the GPU, without making the host wait for it,
# * have seen the same rules at work between four processes.
#
# **Time** 60 minutes to read, 135 for the exercises.
# **You need** chapter 04 (tiles, tile lists).
# No GPU.

# %%
import heapq
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

import jfa
import jfa.emulator as emulator
from jfa import plots, reference
from jfa.bench.shapes import SHAPES
from jfa.kernels.common.units import zigzag_unit
from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from jfa.schedule import balance, longest_first, query_tiles, round_robin, simulate_queue
from jfa.schedule import split_decision, split_tiles, zigzag

# %% [markdown]
# ## The mental model: the slowest worker decides
#
# A GPU is a set of workers, its streaming multiprocessors (**SMs**): an H200 has 132, a B200 has 148.
# Each tile of chapter 04 is a piece of work that one SM does from beginning to end.
# The launch ends when the *last* SM is done, and the others idle while they wait for it.
# So the largest load decides, not the mean.
#
# Here is one batch of 48 tiles, assigned to 8 workers in three ways that this chapter explains.
# The tiles are the example of the text that this course grew from, called *the original text* in this chapter.
# A box is a tile, and its length is its cost; the dashed line is the mean load.

# %%
costs = np.random.default_rng(1).integers(32, 512, size=48)
costs[:3] = [480, 450, 40]
dealt = {
    "round robin": round_robin(costs, 8),
    "zigzag": zigzag(costs, 8),
    "longest first": longest_first(costs, 8),
}
plots.worker_loads(dealt, costs)

# %% [markdown]
# All three do the same work: 12,556 in total, or 1,569.5 per worker.
# Round robin ends at 1,937.
# Zigzag ends at 1,604, longest first at 1,577.
#
# Some terms, used from here on:
#
# | term | meaning |
# |---|---|
# | **cost** of a tile | how long it takes, in any unit; here: how many blocks of keys it visits |
# | **load** of a worker | the sum of its tiles' costs |
# | **makespan** | the largest load: when the launch ends |
# | **imbalance** | makespan / mean load; 1 is even |
# | **static** schedule | the tiles of each worker are fixed before the launch |
# | **dynamic** schedule | a worker that is free takes the next tile |
# | **persistent** kernel | one program per SM, which works through many tiles in a loop |
#
# ## The math: two lower bounds
#
# Let tile $t$ have the cost $c_t$, and let there be $W$ workers.
# Under every schedule some worker has at least the mean load, and some worker has the largest tile:
#
# $$ \text{makespan} \;\ge\; \max\Big( \max_t c_t,\; \frac{1}{W} \sum_t c_t \Big) . $$
#
# Both numbers are known before any tile is assigned.
# A good assignment comes close to the second one, the mean load.
# No assignment of whole tiles beats the first one, the largest tile.
# Most of this chapter is about the second number, and version 5 is about the first.
#
# ## What does a tile cost?
#
# The program of a query tile loops over blocks of keys, and the tile's cost is the number of blocks that it visits.
# That number follows from the lengths and the mask, before any attention is computed.
# Three other measures are likely mistakes:
#
# * *The number of query rows.* A tile with one row runs the same loop as a full one, because empty rows are computed, too.
# * *The number of pairs that count.* A block that is half masked away takes as long as a full one.
# * *One cost for the whole sequence.* Under a causal mask the last tile of a sequence sees all keys, and the first one sees one block.

# %%
LENGTHS = [300, 40, 600, 130, 0, 260]
offsets = offsets_from_lengths(LENGTHS)
whole = query_tiles(offsets, offsets, 128, 128, total_q=sum(LENGTHS), longest_first=False)
causal = query_tiles(
    offsets, offsets, 128, 128, total_q=sum(LENGTHS), band=Band.make(True), longest_first=False
)
count = int(whole.counts[1])
rows = zip(whole.seq[:count].tolist(), whole.row[:count].tolist())
plots.panels(
    [f"sequence {s}, rows from {r}" for s, r in rows],
    {
        "no mask: blocks of 128 keys": (whole.cost[:count].tolist(), "{}"),
        "causal: blocks of 128 keys": (causal.cost[:count].tolist(), "{}"),
    },
    title=f"lengths {LENGTHS}: cost of each tile of 128 queries",
    one_axis=True,
)

# %% [markdown]
# Without a mask, all tiles of a sequence cost the same.
# With a causal mask, the costs rise within each sequence.
#
# ## Version 0: the order of the grid
#
# The simplest launch has one program per tile, in the order of the sequences in memory.
# The hardware starts as many programs as fit on the GPU, and when one ends, it starts the next.
# That is already a queue, and it costs nothing.
# But its order is arbitrary: a long tile at the end starts last, and all other SMs wait for it.
#
# A **persistent** kernel replaces that queue.
# It starts one program per SM and lets it loop over tiles, which saves start-up costs and lets the loads of the next tile begin early (chapter 13).
# Now a rule must say which tiles each program takes.
#
# ## Version 1: sorted, round robin
#
# The obvious rule is that program $w$ takes the tiles $w$, $w + W$, $w + 2W$ and so on.
# It seems to help to sort the tiles by cost first.
# It helps less than expected, because worker 0 gets the largest tile of *each* round.

# %%
in_order = np.sort(costs)[::-1]
named = {
    "unsorted, round robin": (round_robin(costs, 8), costs),
    "sorted, round robin": (round_robin(in_order, 8), in_order),
    "sorted, zigzag": (zigzag(in_order, 8), in_order),
    "sorted, longest first": (longest_first(in_order, 8), in_order),
}
results = {name: balance(*both) for name, both in named.items()}
plots.panels(
    list(results),
    {
        "imbalance": ([b.imbalance for b in results.values()], "{:.3f}"),
        "most minus least loaded": ([b.range for b in results.values()], "{:.0f}"),
    },
    title="48 tiles on 8 workers",
)

# %% [markdown]
# ## Version 2: zigzag
#
# Deal the sorted tiles like cards: the first round from left to right, the second from right to left, and so on.
# The worker that gets the largest tile of one round gets the smallest of the next.


# %%
def rounds(dealt, workers):
    """Return a lane per round: the place of the sorted list that each worker gets in it."""
    turns = max(map(len, dealt))
    return {
        f"round {r}": [plots.Segment(w, 1, str(dealt[w][r]), w) for w in range(workers)]
        for r in range(turns)
    }


plots.segments(
    rounds(zigzag(24, 6), 6),
    title="zigzag: which place of the sorted list each of six workers gets",
    xlabel="worker",
)

# %% [markdown]
# The rule is arithmetic on the round and the worker's number.
# So a persistent kernel needs no list of tiles per worker: each program computes its next place in the sorted list.
# `jfa.schedule.zigzag_slot` is the formula on the host, and `zigzag_unit` the same in a kernel; you write it in exercise 8.1.
#
# The loads of the eight workers are those of the original text:

# %%
print("round robin:", results["unsorted, round robin"].loads.tolist())
print("zigzag:     ", results["sorted, zigzag"].loads.tolist())
before, after = (results[n].makespan for n in ("unsorted, round robin", "sorted, zigzag"))
print(f"the launch ends {100 * (1 - after / before):.0f} % earlier")

# %% [markdown]
# **A claim, and what it is measured against.** The original text says that zigzag alone is worth about 20 % of the forward (claimed, May 2026).
# In this model it is 17 % on these 48 tiles, compared *with round robin in an unsorted order*.
# That is not the same as 20 % compared with an ordinary launch.
# Compared with version 0, the hardware's own queue, the gain depends on the lengths.
# The next cell computes it for this project's benchmark shapes (`jfa/bench/shapes.py`) on the 132 SMs of an H200:


# %%
def head_costs(name):
    """Return the costs of a shape's (tile, head) units, in memory order, in blocks of 128 keys."""
    shape = SHAPES[name]
    len_q, len_kv = shape.lengths()
    shared, total_q = bool(shape.shared_q), shape.shared_q or int(len_q.sum())
    tiles = query_tiles(
        None if shared else offsets_from_lengths(len_q), offsets_from_lengths(len_kv), 128, 128,
        total_q=total_q, band=shape.band, broadcast_q=shared, longest_first=False,
    )  # fmt: skip
    return np.repeat(tiles.cost[tiles.seq >= 0].numpy(), shape.heads)


def over_bound(c, workers):
    """Return makespan / bound of three assignment rules and of the queue in grid order."""
    rules = {"round robin": round_robin, "zigzag": zigzag, "longest first": longest_first}
    spans = {name: balance(rule(c, workers), c) for name, rule in rules.items()}
    bound = spans["zigzag"].bound
    queue = simulate_queue(c, workers).makespan / bound
    return {"queue, grid order": queue} | {n: b.makespan / bound for n, b in spans.items()}


names = ["self", "self-causal", "cross", "pma32", "pma128", "dense-causal"]
table = {name: over_bound(head_costs(name), 132) for name in names}
plots.panels(
    names,
    {rule: ([table[n][rule] for n in names], "{:.2f}") for rule in table["self"]},
    title="makespan over the bound on 132 SMs (modelled; costs in key blocks)",
    one_axis=True,
)

# %% [markdown]
# Compare the bars of each shape.
#
# * `self`, `self-causal`: zigzag is nearly even.
#   It beats the plain grid by 0 to 5 %, and round robin by 12 to 23 %.
#   On `cross` it beats them by 11 % and 35 %.
# * `pma32`, `pma128` (attention pooling, chapter 07): zigzag *loses* to the plain grid.
#   Their lengths have a heavy tail, so the costs fall steeply at the head of the sorted list.
#   Zigzag gives each worker the same *number* of tiles, and no second tile is small enough to make up for a very large first one.
# * Longest first is even for all shapes.
#
# ## Version 3: longest first
#
# Go through the sorted list and give each tile to the worker with the least load so far.
# This is Graham's LPT rule (*longest processing time*, 1969): its makespan is at most 4/3 of the best possible one, and usually much closer.
# It needs the current loads of all workers.
# On the host they are in a heap; a program on the GPU does not know them, and that is why kernels use zigzag.
#
# ## Version 4: a queue
#
# There is a way to get longest first without knowing any loads.
# Sort the list, and let each worker that is free take the next tile.
# If the costs are exact, the two are the same: the first free worker *is* the one with the least load.

# %%
queue = simulate_queue(in_order, 8)
print("longest first ends at", results["sorted, longest first"].makespan)
print("the sorted queue ends at", queue.makespan)

# %% [markdown]
# In practice costs are not exact: clocks differ, caches miss, another kernel shares the SM.
# The queue adapts to the real times, while a static schedule does not.
# In the next cell each tile takes between 1 − j and 1 + j times its planned cost:


# %%
def with_jitter(c, workers, jitter, seed):
    """Return the makespans of (zigzag, queue) over the mean load, with jittered tile times."""
    factor = 1 + jitter * np.random.default_rng(seed).uniform(-1, 1, len(c))
    real = c * factor
    static = balance(zigzag(c, workers), real)
    run = simulate_queue(real, workers, order=np.argsort(-c, kind="stable").tolist())
    return static.makespan / static.mean, run.makespan / static.mean


jitters = [0.0, 0.1, 0.2, 0.4, 0.6, 0.8]
even = np.sort(np.random.default_rng(2).integers(8, 33, size=600))[::-1]
drawn = {j: [with_jitter(even, 64, j, seed) for seed in range(60)] for j in jitters}
plots.bands(
    jitters,
    {
        "zigzag, assigned beforehand": [[z for z, _ in drawn[j]] for j in jitters],
        "queue over the sorted list": [[q for _, q in drawn[j]] for j in jitters],
    },
    title="600 tiles on 64 workers, 60 seeds",
    xlabel="jitter: a tile takes 1 - j to 1 + j times its cost",
    ylabel="makespan / mean load",
)

# %% [markdown]
# ### The queue in hardware: CLC
#
# On Hopper the queue is a counter in memory, with one atomic add per tile.
# On Blackwell the launch hardware has its own: **cluster launch control** (CLC).
# The grid has one program per tile; NVIDIA calls a running program a **CTA** (cooperative thread array).
# As many CTAs as fit on the GPU begin.
# A CTA that is nearly done asks the hardware to *cancel* a program that has not begun, and does that program's tile instead: it *steals* the tile.
# The answer is the number of the stolen program, or -1 if none is left.
#
# The picture shows three workers.
# Each begins with its own tile and asks once per tile that it runs.
# It gets -1 exactly once, and then it stops.

# %%
lane_costs = [9, 4, 6, 5, 3, 4, 2, 3, 2, 2]
run = simulate_queue(lane_costs, 3)
lanes = {}
for w, mine in enumerate(run.assignment):
    at, lane = 0.0, []
    for n, t in enumerate(mine):
        words = f"own tile {t}" if n == 0 else f"stole {t}"
        lane.append(plots.Segment(at, lane_costs[t], words, t))
        at += lane_costs[t]
    lanes[f"worker {w}"] = [*lane, plots.Segment(at, 0.9, "-1", None)]
plots.segments(
    lanes,
    title=f"10 tiles, 3 workers: 7 tiles stolen, {run.failed_queries} answers -1",
    xlabel="time, in units of a tile's cost",
)

# %% [markdown]
# Chapter 13 writes this with TLX: `clc_create_context`, `clc_producer`, `clc_consumer`.
# A kernel that uses CLC must obey three rules:
#
# * The first tile is the program's own; it is not requested.
# * After a -1 the program must not ask again; the hardware's answer would be undefined.
# * There must be programs that have not begun: a grid of one program per SM leaves nothing to steal.
#
# **A queue that fetches ahead stops being a queue.** It is tempting to fetch the next few tiles early, to hide the latency of the answer.
# But a tile that has been fetched is assigned, and can no longer go to another worker.
# In the next cell each worker draws its next tiles *before* it runs the current one:


# %%
def run_ahead(c, workers, ahead):
    """Return the makespan of a queue whose workers draw `ahead` tiles before they need them."""
    waiting = np.sort(c).tolist()  # drawn from the end: the largest first
    held = [[] for _ in range(workers)]
    for _ in range(ahead):  # at the start all workers draw, in turn
        for mine in held:
            mine += [waiting.pop()] if waiting else []
    end, free = 0.0, [(0.0, w) for w in range(workers)]
    while waiting or any(held):
        now, w = heapq.heappop(free)  # the first free worker draws, then runs its oldest tile
        held[w] += [waiting.pop()] if waiting else []
        if held[w]:
            done = now + held[w].pop(0)
            heapq.heappush(free, (done, w))
            end = max(end, done)
    return end


pma = head_costs("pma128")
bound = balance(zigzag(pma, 132), pma).bound
ahead = [0, 1, 2, 4, 8]
plots.bars(
    [str(a) for a in ahead],
    {"makespan / bound": [run_ahead(pma, 132, a) / bound for a in ahead]},
    title="pma128 on 132 SMs: tiles drawn ahead of the one that runs (modelled)",
    xlabel="tiles held in advance",
    ylabel="makespan / bound",
    form="{:.2f}",
)

# %% [markdown]
# One tile in advance costs 12 %; with eight, most of the queue's advantage is gone.
# This happened in this project.
# The notes of its Hopper kernel ([docs/hopper-notes.md](../docs/hopper-notes.md), versions 4 and 5) predicted that a scheduler four tiles ahead would help.
# Measured on an H200, it made pma128 slower, 0.198 ms instead of 0.154 ms: the longest sequences were all assigned before any worker had finished one.
#
# ## Version 5: the mega-tile, and what helps
#
# Now for the other bound, the largest tile.
# Draw costs with a Pareto tail: the probability of a cost above $x$ falls as $x^{-\alpha}$.
# A small $\alpha$ means a heavy tail: a few users with very long histories among many with short ones.
# If the largest tile costs more than the mean load, all workers wait for that one tile; we call it a **mega-tile**.

# %%
alphas = [0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
rules = {"zigzag": zigzag, "longest first": longest_first}
spans = {name: [] for name in ("queue, grid order", *rules)}
largest = []
for alpha in alphas:
    batches = [10 * (np.random.default_rng(s).pareto(alpha, 512) + 1) for s in range(200)]
    bounds = [max(c.max(), c.sum() / 32) for c in batches]
    spans["queue, grid order"].append(
        [simulate_queue(c, 32).makespan / b for c, b in zip(batches, bounds)]
    )
    for name, rule in rules.items():
        spans[name].append([balance(rule(c, 32), c).makespan / b for c, b in zip(batches, bounds)])
    largest.append([c.max() / (c.sum() / 32) for c in batches])
plots.bands(
    alphas,
    spans,
    title="512 tiles on 32 workers, Pareto costs, 200 seeds",
    xlabel="alpha (left: heavy tail)",
    ylabel="makespan / bound",
)

# %% [markdown]
# The lines are medians over the seeds, and the shaded areas hold the middle 80 %.
# On the left all rules are close to the bound.
# But that is not a success; look at the bound itself:

# %%
plots.bands(
    alphas,
    {"largest tile / mean load": largest},
    title="the same batches: how large is the largest tile?",
    xlabel="alpha (left: heavy tail)",
    ylabel="largest / mean load",
    level=(1.0, "above this line the largest tile alone decides"),
    log_y=True,
)

# %% [markdown]
# At $\alpha = 0.8$ one tile costs about ten times the mean load, and under every rule the other 31 workers idle most of the time.
# **The original text is wrong here:** it says that CLC helps when a static schedule cannot cope with a single mega-tile.
# But CLC moves whole tiles, and no order of whole tiles ends before the largest of them.
#
# What helps is to split the tile along its *keys*.
# Chapter 02 showed that partial results over disjoint keys can be merged exactly, by their log-sum-exps.
# So a mega-tile becomes several parts that run in parallel, each part stores an output and an LSE, and one cheap pass merges them.

# %%
mega = np.array([400] + [10] * 32)
decision = split_decision(mega, 8)
sizes = [max(1, -(-int(c) // decision.max_blocks)) for c in mega]
parts = np.array([c / n for c, n in zip(mega, sizes) for _ in range(n)])
plots.worker_loads({"whole tiles, longest first": longest_first(mega, 8)}, mega)

# %%
plots.worker_loads({"the largest cut into parts": longest_first(parts, 8)}, parts)

# %% [markdown]
# With whole tiles, longest first ends at 400, while the mean load is 90.
# With the large tile split, it ends near the mean.
# Splitting has a cost: each part writes a partial output (`D` numbers per row, and the LSE), and the merge reads them again.
# So split only tiles that cost more than the mean load, and into few parts.
# The package's `split_tiles` does this on the GPU.
# The next cell shows that the merge is exact, on one query tile whose 1,000 keys are split in three, and prints a list with split tiles:

# %%
_ = torch.manual_seed(3)
q = torch.randn(16, 2, 32)
k, v = (torch.randn(1000, 2, 32) for _ in range(2))
one = offsets_from_lengths([16])


def attend(first, last):
    keys = offsets_from_lengths([last - first])
    return reference.attention(q, k[first:last], v[first:last], one, keys, return_lse=True)


out, lse = attend(0, 384)
for first, last in ((384, 768), (768, 1000)):
    out, lse = reference.merge_attention(out, lse, *attend(first, last))
print("merged against whole:", float((out - attend(0, 1000)[0]).abs().max()))
keys = offsets_from_lengths([1000, 60, 50, 40])
tiles = query_tiles(None, keys, 16, 16, total_q=16, broadcast_q=True)
cut = split_tiles(tiles, 8)
n = int(cut.counts)
print("list slot:", cut.tile[:n].tolist())
print("part     :", cut.part[:n].tolist())
print("blocks   :", list(zip(cut.begin[:n].tolist(), cut.end[:n].tolist())))

# %% [markdown]
# The number of heads matters as well.
# With 16 heads there are 16 mega-tiles, which occupy 16 SMs.
# The largest tile stays the same, but the mean load grows with the number of heads.
# Exercise 8.3 asks how often a mega-tile still decides.
#
# ## Version 6: the list, made on the device
#
# Where does the sorted list come from?
# Chapter 04 made it on the host, with `.tolist()`.
# With tensors on a GPU, that line waits until all earlier work has finished, then copies, then sorts in Python, while the GPU idles.
#
# If the GPU makes the list, the host does not know how long it will be.
# So the list gets a **capacity** that follows from shapes alone, and the number of entries is stored in a tensor.
# Slots past that count hold -1.
#
# $$ \sum_b \Big\lceil \frac{n_b}{M} \Big\rceil \;\le\; \Big\lceil \frac{\text{total}}{M} \Big\rceil + B . $$
#
# The left side needs the lengths.
# The right side needs `q.shape[0]` and `len(offsets)`, which the host knows.
# Here $n_b$ are the lengths, $M$ is the tile size, and total is their sum.
# The likely mistake is to drop the `+ B`: each sequence may have one tile that is not full.
#
# The rest is done with tensor operations:
#
# 1. Compute the number of tiles of each sequence; its running sum says where each sequence's tiles begin in the list.
# 2. Slot $i$ belongs to the first sequence whose running sum is above $i$: a search in a sorted tensor.
# 3. The row follows by subtraction, and the cost from the row.
# 4. A stable sort by cost puts the list in order.
#
# No step reads a number on the host.
# You write this in exercise 8.2.

# %%
tiles = query_tiles(offsets, offsets, 128, 128, total_q=sum(LENGTHS), band=Band.make(True))
print("capacity:", tiles.capacity, "| tiles with work, all tiles:", tiles.counts.tolist())
for name in ("seq", "row", "cost"):
    print(f"{name:>4}:", getattr(tiles, name).tolist())

# %% [markdown]
# Tiles of equal cost stay in memory order, so that tiles of one sequence run at about the same time and share keys in the L2 cache.
#
# Such code must never make the host wait for the GPU.
# The lines below do, and on a CPU nothing shows it:
#
# | line | why it waits |
# |---|---|
# | `int(x)`, `x.item()`, `x.tolist()`, `if x > 0`, `range(x)`, `torch.zeros(x)` | the host needs a number |
# | `x[mask]`, `nonzero`, `unique`, `torch.where(mask)` | the result's *size* depends on numbers |
# | `repeat_interleave(y, counts)` without `output_size` | the same, well hidden |
#
# ### A kernel that computes its own tiles
#
# Here is a persistent kernel on the emulator.
# Each program loads the count, computes its places in the list, and records what it ran:


# %%
@triton.jit
def static_worker(cost_ptr, counts_ptr, load_ptr, ran_by_ptr):
    """Run the places that zigzag gives to program w of W, until one is past the count."""
    worker, workers = tl.program_id(0), tl.num_programs(0)
    count = tl.load(counts_ptr)
    done, load = 0, 0
    slot = worker
    while slot < count:
        load += tl.load(cost_ptr + slot)  # stands for the work of a tile
        tl.store(ran_by_ptr + slot, worker)
        done += 1
        slot = zigzag_unit(done, worker, workers)
    tl.store(load_ptr + worker, load)


load = torch.zeros(5, dtype=torch.int32)
ran_by = torch.full((tiles.capacity,), -1, dtype=torch.int32)
static_worker[(5,)](tiles.cost, tiles.counts, load, ran_by)
print("who ran the slots:", ran_by.tolist())
print("loads            :", load.tolist())

# %% [markdown]
# ### Empty tiles
#
# Compare the list with a grid that needs none: `max_len / block` tiles per sequence, most of which are past their sequence's end and return at once.
# A static worker takes the empty tiles one after another, and CLC steals them one by one, each with a request and an answer.
# So make a list of valid tiles first, and use CLC second: nothing is gained by stealing empty tiles efficiently.

# %%
shown = ["self", "cross", "pma128"]
grids = {}
for name in shown:
    len_q, len_kv = SHAPES[name].lengths()
    blocks = -(-len_kv // 128)
    pairs = -(-blocks // 2) * 2  # the backward's two-CTA kernel takes key tiles in pairs
    grids[name] = (len(len_kv) * int(blocks.max()), int(blocks.sum()), int(pairs.sum()))
plots.panels(
    shown,
    {
        "grid of the longest": ([g[0] for g in grids.values()], "{:,}"),
        "tiles with work": ([g[1] for g in grids.values()], "{:,}"),
        "with pairs filled up": ([g[2] for g in grids.values()], "{:,}"),
    },
    title="key tiles of 128 for one head",
    one_axis=True,
)

# %% [markdown]
# The last panel is about the backward of chapter 15: two CTAs work on a *pair* of key tiles, so a sequence with an odd number of tiles gets an empty one, called a **sentinel**.
# It wastes little for long sequences and much for short ones; exercise 8.6 computes the share.
#
# ### What a list costs
#
# In the package, a kernel makes the lists; for each sequence it compares the lengths of all others, to find the sequence's place in the order.
# That takes B x B comparisons: negligible for a thousand sequences, but not for ten thousand:

# %%
batches = [32, 64, 128, 256]
listed, attended = [], []
for B in batches:
    even_offsets = torch.arange(B + 1, dtype=torch.int32) * 34
    with emulator.counting() as counted:
        jfa.plan(
            even_offsets, even_offsets, rows_q=34 * B, rows_kv=34 * B,
            num_heads=12, head_dim=128, backend="hopper",
        )  # fmt: skip
    listed.append(counted.load_elements)
    attended.append(B * 34 * 12 * 128 * 3)
plots.lines(
    batches,
    {"the lists read": listed, "attention must read (Q, K, V)": attended},
    title="elements read, B sequences of 34 tokens, 12 heads of 128",
    xlabel="sequences",
    ylabel="elements",
    log_x=True,
    log_y=True,
)

# %% [markdown]
# One line has slope 2, the other slope 1.
# This happens in practice: FlashAttention's varlen scheduler searched all batches in each CTA, and with 8,192 sequences of 34 tokens it was 73 times slower than padding (pull request 2520).
# Metadata computed before the launch fixed it (pull request 2559).
# The benchmark shape `tiny-8192` is that case.
# For this package's portable kernel on an H200, the lists take 5 % of a call's time at 8,192 sequences, and 18 % at twice as many (measured 2026-11-30, docs/portable-notes.md).
#
# ## The same between GPUs
#
# Data-parallel training distributes *sequences* over **ranks** (processes, one GPU each).
# A step ends when the slowest rank does, so it is the same problem, with two differences.
# First, there are two costs at once: that of the linear layers is proportional to tokens, that of attention to pairs.
# Second, the gradients must be added with the right weights.
#
# [examples/balance_ranks.py](../examples/balance_ranks.py) runs four processes, with `torch.distributed` over gloo (its backend for CPUs).
# Predict before you run it: which is better for attention, zigzag by tokens or zigzag by pairs?

# %%
example = Path(jfa.__file__).resolve().parents[1] / "examples" / "balance_ranks.py"
done = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", example],
    capture_output=True,
    text=True,
    check=True,
)
rows = [line for line in done.stdout.splitlines() if "most / mean" in line]
numbers = [[float(x) for x in re.findall(r"\d[\d.e+-]*", row)] for row in rows]
plots.panels(
    [row.split(" tokens [")[0].strip() for row in rows],
    {
        "tokens: most / mean": ([n[4] for n in numbers], "{:.3f}"),
        "pairs: most / mean": ([n[5] for n in numbers], "{:.3f}"),
        "gradient error, sum / tokens": ([n[6] for n in numbers], "{:.0e}"),
        "gradient error, mean of means": ([n[7] for n in numbers], "{:.0e}"),
    },
    title="64 sequences on 4 ranks",
)

# %% [markdown]
# * Both give the same assignment: zigzag uses only the *order*, and sequences sorted by tokens are also sorted by pairs.
#   Longest first uses sizes, so by tokens and by pairs it gives two assignments, and each is even only in its own measure.
# * **The likely mistake is in the last panel.** Each rank computes the mean loss over its own tokens, and the gradients are averaged.
#   That is right if all ranks have the same number of tokens.
#   Otherwise a token on a rank with few tokens gets a larger weight.
#   Instead, add up the sums, and divide by the tokens of all ranks.
#
# ## Policies in use
#
# The table compares the original text, its public source and this project.
# (*Cluster*: CTAs that are launched together, here two, chapter 15.)
#
# | | forward | backward |
# |---|---|---|
# | the original text | zigzag, plus CLC | round robin, blocks of a sequence together, padded to the cluster size |
# | `jfa2889`, its public source | CLC over the list of valid tiles; zigzag is **off** whenever `USE_CLC` is on, and every forward configuration it ships has it on | static lists, made from offsets on the CPU if the caller passes them |
# | this project, Blackwell | CLC over a sorted list; zigzag without CLC | CLC; zigzag, or round robin for shared queries; always static with `deterministic` |
# | this project, Hopper | an atomic counter over a sorted list; zigzag with `deterministic` | sorted lists |
#
# (`jfa2889` is `tlx_jfa` at commit 2889aef of a public fork of facebookresearch's ads_model_kernel_library.)
# The text and the source disagree, and the source is consistent: with a queue the order within a round does not matter.
# Compared with a static list, CLC adapts to times that cannot be planned.
# On a balanced problem the gain is small: 0.53 % on one MXFP8 shape (Triton fork, pull request 2799).
# FlashAttention 4 does not use CLC for varlen attention with as many key heads as query heads.
# Other projects prune empty work: sycl-tla dropped 29 thousand empty groups from a grouped GEMM (pull request 516).
# cuDNN offers an order that is longest first *and* keeps tiles that share keys together in L2 (cudnn-frontend, pull request 585).
#
# Stealing makes results nondeterministic where the *order of additions* matters, as in a backward that adds to dQ in memory.
# A tile of the forward gives the same result on every worker.
#
# ## Summary
#
# * The launch ends with the largest load; the bound is the larger of the mean load and the largest tile.
# * A tile costs the blocks of keys that it visits.
# * Sort by cost; then zigzag (static, arithmetic only), longest first (needs all loads) or a queue (adapts to real times).
# * No order of whole tiles helps against a mega-tile; splitting its keys does.
# * Make the list on the GPU, with a capacity from shapes and a count in a tensor, and without empty tiles.
#
# ## Exercises
#
# Open [exercises/08_load_balance.py](../exercises/08_load_balance.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 8.1 | zigzag, as a persistent kernel computes it | 1 | 15 |
# | 8.2 | a sorted tile list that never asks the host | 2 | 25 |
# | 8.3 | predict: how often does a mega-tile decide? | 2 | 15 |
# | 8.4 | bug hunt: a queue worker that is too eager | 2 | 20 |
# | 8.5 | cut the long tiles, and merge them | 3 | 45 |
# | 8.6 | predict: empty tiles and sentinels | 1 | 15 |
#
# ## Checkpoint
#
# <details><summary>Eight workers, tiles of cost 100, 10, 10, ... (81 tiles in all). What is the bound? Which rule reaches it?</summary>
#
# The sum is 900, the mean load 112.5 and the largest tile 100, so the bound is 112.5; with whole tiles the best makespan is 120.
# Longest first reaches it: one worker gets the tile of 100 and one or two small ones, the others get eleven or twelve small ones.
# </details>
#
# <details><summary>Why does sorted round robin not balance?</summary>
#
# In every round worker 0 gets the largest and the last worker the smallest.
# The differences add up instead of canceling.
# </details>
#
# <details><summary>Which static policy do forward and backward use, and what does CLC add?</summary>
#
# See the table: zigzag over a sorted list if the tiles differ; round robin if they cost the same (shared queries in the backward).
# CLC reacts to the real times of the tiles, which no static plan can.
# It does not split tiles.
# </details>
#
# <details><summary>A colleague sets the grid to the number of SMs and turns CLC on. What happens?</summary>
#
# Every program runs its own tile, asks, and gets -1, because all programs have begun and none is pending.
# All other tiles are never run; or, if each program also has a static list, nothing is ever stolen.
# </details>
#
# <details><summary>Why is the list's capacity an upper bound, and not the number of tiles?</summary>
#
# The number depends on the lengths, which only the device knows.
# A tensor's size must be known on the host.
# </details>
#
# ## Try this
#
# * From the original text: draw Pareto lengths and find the alpha below which a single mega-tile decides.
#   The second figure of version 5 shows it for 512 tiles on 32 workers: the median crosses the line between 1.75 and 2.
#   What changes with 16 heads, and with 4 tiles per worker instead of 16?
# * In `with_jitter`, slow one worker down by a third instead of jittering every tile.
#   How well do zigzag and the queue do?
# * Give `over_bound` 148 workers instead of 132.
#   Which shapes get worse, and why (`pma128`)?
# * Change the example to eight ranks.
#   Which rule loses most?
#
# ## Pitfalls
#
# **Zigzag over an unsorted list** can be worse than round robin: it pairs large and small tiles at random.

# %%
unsorted = [[r * 8 + (w if r % 2 == 0 else 7 - w) for r in range(6)] for w in range(8)]
print("zigzag without sorting:", round(balance(unsorted, costs).imbalance, 3))
print("round robin           :", round(results["unsorted, round robin"].imbalance, 3))

# %% [markdown]
# **Rising order.** "Small ones first, to get going."
# The largest tile starts last.
# The queue, both ways:

# %%
for name, order in (("falling", in_order), ("rising", in_order[::-1])):
    print(f"{name}: the queue ends at {simulate_queue(order, 8).makespan:.0f}")

# %% [markdown]
# **Sequences are sorted instead of tiles.** Under a causal mask the tiles of one sequence differ as much as sequences do.
# The cell compares the makespans of zigzag over both lists, for causal self-attention on 148 workers:

# %%
lengths = SHAPES["self-causal"].lengths()[0]
by_length = lengths.sort(descending=True).values
by_sequence = query_tiles(
    offsets_from_lengths(by_length), offsets_from_lengths(by_length), 128, 128,
    total_q=int(by_length.sum()), band=Band.make(True), longest_first=False,
)  # fmt: skip
c = np.repeat(by_sequence.cost[by_sequence.seq >= 0].numpy(), 4)
as_listed = zigzag(len(c), 148)  # a plain number of tiles: the list counts as sorted already
late = balance(as_listed, c).makespan / balance(zigzag(c, 148), c).makespan
print(f"sorted by sequence, zigzag ends {100 * (late - 1):.0f} % later than sorted by tile")

# %% [markdown]
# **CLC without pruning.** With a grid sized by the longest sequence, every empty tile costs a request and an answer.
# Suppose both together take a quarter of a key block's time:

# %%
c = head_costs("cross")
len_q, _ = SHAPES["cross"].lengths()
empties = 4 * (len(len_q) * int(-(-len_q.max() // 128))) - len(c)
ask = 0.25
full = np.concatenate([c + ask, np.full(empties, ask)])
mixed = np.random.default_rng(0).permutation(len(full)).tolist()
print(f"{empties} empty units and {len(c)} with work")
print(f"unpruned, as the grid has them: {simulate_queue(full, 132, order=mixed).makespan:.1f}")
print(f"pruned and sorted:              {simulate_queue(np.sort(c + ask)[::-1], 132).makespan:.1f}")

# %% [markdown]
# **A static schedule although times vary**, and **a queue that fetches ahead**: see the figures of version 4.
# **A mega-tile left to the scheduler**: see version 5.
# **A mean of means**: see the last panel of the figure with the ranks.
#
# ## What differs on a GPU
#
# * A tile costs more than its key blocks: a program must start, load Q and write O.
#   The package's models add the cost of one block for this, and for short tiles it is most of the cost.
# * The order also affects memory traffic.
#   Tiles of one sequence read the same keys, and if they run at the same time, these stay in the L2 cache: this gained 12 % on the dense shape with this project's Hopper kernel (measured on an H200, docs/hopper-notes.md).
#   That is why longest first keeps tiles of equal cost in memory order.
# * A split that fills idle SMs competes for the memory bandwidth, which all SMs share.
#   If bandwidth is the limit, more busy SMs do not move more bytes.
# * An atomic counter is a round trip to L2, about a microsecond under load.
#   CLC's answer comes from the launch hardware.
#
# ## Verified here, and not
#
# Makespans, bounds, jitter and the CLC lanes are models, which `tests/schedule` tests.
# The persistent kernel and the lists ran on the emulator when this notebook ran, and the four ranks ran as four processes on this CPU.
# Nothing here was timed, and no CLC instruction was executed: no Blackwell GPU was available.
# The quoted times were measured on an H200 and are in the notes named with them.
#
# ## Sources
#
# * R. L. Graham, *Bounds on multiprocessing timing anomalies*, SIAM J. Appl. Math. 17 (1969): longest first and its 4/3.
# * NVIDIA, *CUDA programming guide*, cluster launch control, and PTX ISA `clusterlaunchcontrol.try_cancel` (2025): the meaning of -1, and why no request may follow it.
# * Pull requests, read in 2026: Dao-AILab/flash-attention 2520, 2559; facebookexperimental/triton 2799; NVIDIA/cudnn-frontend 585; sycl-tla 516.
# * `tlx_jfa` at 2889aef, and the original text of this course (May 2026) for its 48 tiles and its claims.
#
# Next: [09 the machine underneath](09_the_machine_underneath.py).
