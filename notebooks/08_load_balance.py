# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Load balance
#
# **Goals.** Say what decides when a launch ends. Deal tiles to workers four ways, and know what each way looks at: round robin, zigzag, longest first, a queue. Know the bound that no way of dealing
# beats, and the one thing that beats it.
# Make the list of tiles on the device without asking the host.
# See the same rules at work between four GPUs.
#
# **Time.** 60 minutes, and 135 for the exercises. **Needs.** Chapter 04 (tiles, tile lists). No GPU.

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
# A GPU is a row of workers.
# An H200 has 132 streaming multiprocessors (**SMs**), a B200 has 148.
# Each tile of chapter 04 is a parcel of work, and one SM carries it out from beginning to end.
# The launch is over when the *last* SM is done.
# What the others do while they wait for it is nothing.
#
# So the mean load does not matter by itself.
# The largest one does.
# Here is one batch of 48 tiles on 8 workers, dealt in three ways.
# It is the example of the text this course grew from.
# A box is a tile; its length is its cost.

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
# All three do the same work: 12,556, or 1,569.5 for each worker.
# Round robin ends at 1,937.
# Zigzag ends at 1,604, longest first at 1,577.
#
# Some words, used from here on:
#
# | word | meaning |
# |---|---|
# | **cost** of a tile | how long it takes, in any unit; here: how many blocks of keys it visits |
# | **load** of a worker | the sum of its tiles' costs |
# | **makespan** | the largest load: when the launch ends |
# | **imbalance** | makespan / mean load; 1 is even |
# | **static** schedule | who gets which tile is decided before the launch |
# | **dynamic** schedule | whoever is free takes the next tile |
# | **persistent** kernel | one program for each SM, which works through many tiles in a loop |
#
# ## The math: two lower bounds
#
# Let tile $t$ cost $c_t$, let there be $W$ workers.
# Whatever the schedule, some worker has at least the mean load, and some worker has the largest tile:
#
# $$ \text{makespan} \;\ge\; \max\Big( \max_t c_t,\; \frac{1}{W} \sum_t c_t \Big) . $$
#
# Two numbers, known before anything is dealt.
# The second is a matter of dealing well.
# The first is not a matter of dealing at all.
# Keep them apart: most of this chapter is about the second, and the end of it about the first.
#
# ## What does a tile cost?
#
# A query tile walks over blocks of keys.
# Its cost is the number of blocks it visits.
# That is known from the lengths and the mask, before any attention is computed.
# Three likely mistakes:
#
# * *The number of its query rows.* A tile with one row runs the same loop as a full one.
#   Empty rows are computed, too.
# * *The number of pairs that count.* A block that is half masked away takes as long as a full one.
# * *One cost for the whole sequence.* Under a causal mask the last tile of a sequence sees all keys, and the first sees one block.

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
# Without a mask the tiles of a sequence cost the same.
# With a causal mask they are a staircase.
#
# ## Version 0: the order of the grid
#
# The simplest launch has one program for each tile, in the order in which the sequences lie in memory.
# The hardware starts as many programs as fit.
# When one ends, it starts the next.
# That is a queue already, and it costs nothing.
# What it lacks is an order: a long tile that comes last starts last, and everybody waits for it.
#
# A **persistent** kernel takes that queue out of the hardware's hands.
# It starts one program for each SM and lets it loop, which saves starting costs and lets loads of the next tile begin early (chapter 13).
# Now somebody must say which tiles a program takes.
#
# ## Version 1: sorted, round robin
#
# The obvious rule: program $w$ takes the tiles $w, w + W, w + 2W, \dots$ Sorting by cost first seems to help.
# It helps less than one hopes.
# Look at who gets the larger one in *each* round: always worker 0.

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
# Deal like somebody who wants to be fair with a sorted pack: first round from left to right, second round from right to left, and so on.
# Who got the largest of one round gets the smallest of the next.


# %%
def rounds(dealt, workers):
    """Each worker's line: in which round it got which place of the sorted list."""
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
# The whole rule is arithmetic on the round and the worker's number.
# So a persistent kernel needs no list of lists: it computes its next place.
# `jfa.schedule.zigzag_slot` is the formula on the host, `zigzag_unit` the same in a kernel; you write it yourself in exercise 8.1.
#
# The eight loads of the 48 tiles, for comparison with the original text, which has the same ones:

# %%
print("round robin:", results["unsorted, round robin"].loads.tolist())
print("zigzag:     ", results["sorted, zigzag"].loads.tolist())
before, after = (results[n].makespan for n in ("unsorted, round robin", "sorted, zigzag"))
print(f"the launch ends {100 * (1 - after / before):.0f} % earlier")

# %% [markdown]
# **A claim, and what it is measured against.** The original text says that zigzag alone is worth about 20 % of the forward (claimed, May 2026).
# In this model it is 17 % on these 48 tiles, *against round robin in an unsorted order*.
# A reader may take it for 20 % against an ordinary launch.
# Against version 0, the hardware's own queue, it depends on the lengths.
# Here are the bench shapes of this project on an H200's 132 SMs:


# %%
def head_costs(name):
    """The costs of all (tile, head) units of a bench shape, in memory order, in blocks of 128."""
    shape = SHAPES[name]
    len_q, len_kv = shape.lengths()
    shared, total_q = bool(shape.shared_q), shape.shared_q or int(len_q.sum())
    tiles = query_tiles(
        None if shared else offsets_from_lengths(len_q), offsets_from_lengths(len_kv), 128, 128,
        total_q=total_q, band=shape.band, broadcast_q=shared, longest_first=False,
    )  # fmt: skip
    return np.repeat(tiles.cost[tiles.seq >= 0].numpy(), shape.heads)


def over_bound(c, workers):
    """Makespan over the bound: dealing rules, and the queue in grid order."""
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
# Read it by rows.
#
# * `self`, `self-causal`: zigzag is nearly even.
#   Against the plain grid it wins 0 to 5 %, against round robin 12 to 23 %.
#   On `cross` it wins 11 % and 35 %.
# * `pma32`, `pma128` (attention pooling, chapter 07): zigzag *loses* to the plain grid.
#   Their lengths have a heavy tail, so the sorted list falls steeply at its head.
#   Zigzag deals equal *numbers* of tiles.
#   No second tile is small enough to make up for the first.
# * Longest first is even everywhere.
#
# ## Version 3: longest first
#
# Go through the sorted list and give each tile to the worker with the least load so far.
# This is Graham's LPT rule (1969): its makespan is at most 4/3 of the best possible one, in practice within a few per mille.
# It needs the running loads of all workers while it deals.
# On the host that is a heap.
# In a kernel nobody has it, and that is the reason why kernels use zigzag.
#
# ## Version 4: a queue
#
# There is a way to get longest first without computing anything.
# Sort the list, and let whoever is free take the next tile.
# As long as costs are exact the two are the same: the free worker *is* the one with the least load.

# %%
queue = simulate_queue(in_order, 8)
print("longest first ends at", results["sorted, longest first"].makespan)
print("the sorted queue ends at", queue.makespan)

# %% [markdown]
# And where costs are not exact, the queue goes on being right.
# Clocks differ, a cache misses, another kernel shares the SM.
# A static schedule keeps its lists, whatever happens.
# Let every tile take up to `j` more or less than planned:


# %%
def with_jitter(c, workers, jitter, seed):
    """(zigzag, queue) makespans over the mean load, when tiles take other times than planned."""
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
        "zigzag, dealt beforehand": [[z for z, _ in drawn[j]] for j in jitters],
        "queue over the sorted list": [[q for _, q in drawn[j]] for j in jitters],
    },
    title="600 tiles on 64 workers, 60 seeds",
    xlabel="jitter: a tile takes 1 - j to 1 + j times its cost",
    ylabel="makespan / mean load",
)

# %% [markdown]
# ### The queue in hardware: CLC
#
# On Hopper a queue is a counter in memory and one atomic add for each tile.
# On Blackwell the launch hardware offers its own: **cluster launch control** (CLC).
# The grid has one program (CTA) for each tile.
# As many as fit begin.
# A program that is nearly done asks the hardware to *cancel* a program that has not begun, and does its tile instead.
# People say that it steals the tile.
# The answer is the number of the stolen program, or -1: none is left.
#
# The handshake, in lanes.
# Each worker begins with its own tile.
# It asks once for each tile it runs.
# It is told -1 exactly once, and then it stops.

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
    xlabel="time",
)

# %% [markdown]
# Chapter 13 writes this with TLX: `clc_create_context`, `clc_producer`, `clc_consumer`.
# Here we keep the three rules that a kernel must obey.
# The first tile is the program's own, it is not asked for.
# After a -1 that program asks no more; what the hardware would answer is undefined.
# And whoever wants to steal must leave something to be stolen: a grid of one program for each SM has nothing pending.
#
# **A queue that runs ahead is no queue.** It is tempting to fetch the next few tiles early, to hide the time of the answer.
# But fetched is dealt.
# Let each worker draw its next tiles *before* it runs the current one:


# %%
def run_ahead(c, workers, ahead):
    """Makespan of a queue whose workers hold ``ahead`` tiles besides the one that runs."""
    waiting = np.sort(c).tolist()  # drawn from the end: the largest first
    held = [[] for _ in range(workers)]
    for _ in range(ahead):  # at the start everybody draws, in turn
        for mine in held:
            mine += [waiting.pop()] if waiting else []
    end, free = 0.0, [(0.0, w) for w in range(workers)]
    while waiting or any(held):
        now, w = heapq.heappop(free)  # whoever is free first draws, then runs what it drew first
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
# One tile in advance costs 12 %, eight of them nearly undo the queue.
# This happened here.
# The notes of this project's Hopper kernel ([docs/hopper-notes.md](../docs/hopper-notes.md), versions 4 and 5) predicted that a scheduler four tiles ahead would help.
# Measured on an H200 it made pma128 slower, 0.198 ms instead of 0.154 ms.
# The longest sequences had been dealt out before anybody had finished one.
#
# ## Version 5: the mega-tile, and what helps
#
# Back to the first bound.
# Draw lengths with a Pareto tail: the chance of a length above $x$ falls as $x^{-\alpha}$.
# Small $\alpha$ means a heavy tail: a few enormous users among many small ones.
# Where the largest tile costs more than the mean load, everything waits for that one tile.

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
# On the left every rule looks good: all are close to the bound.
# That is no success.
# Look at what the bound is there:

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
# At $\alpha = 0.8$ one tile takes about ten mean loads.
# The other 31 workers idle, whatever the rule.
# **The original text is wrong here:** it asks when a single mega-tile is hopeless for a static schedule, and says that this is CLC's job.
# CLC moves whole tiles.
# No order of whole tiles ends before the largest of them does, and stealing is an order.
#
# What helps is to cut the tile: along its *keys*.
# Chapter 02 showed that partial results over disjoint keys merge exactly, by their log-sum-exps.
# So a mega-tile becomes several parts that run side by side, each of which leaves an output and an LSE, and one cheap pass merges them.

# %%
mega = np.array([400] + [10] * 32)
decision = split_decision(mega, 8)
sizes = [max(1, -(-int(c) // decision.max_blocks)) for c in mega]
parts = np.array([c / n for c, n in zip(mega, sizes) for _ in range(n)])
plots.worker_loads({"whole tiles, longest first": longest_first(mega, 8)}, mega)

# %%
plots.worker_loads({"the largest cut into parts": longest_first(parts, 8)}, parts)

# %% [markdown]
# Longest first on whole tiles ends at 400, with the mean load at 90.
# Cut, it ends near the mean.
# The cost is not nothing: each part writes a partial output (`D` numbers per row, and the LSE), and the merge reads them again.
# So cut only what is longer than the mean load, and not into crumbs.
# `split_tiles` does it on the device.
# That the merge is exact, on one query tile whose 1,000 keys are cut in three:

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
# Heads matter, too.
# With 16 heads there are 16 mega-tiles, and they fill 16 SMs.
# The largest tile stays what it was; the mean load grows with the number of heads.
# Exercise 8.3 asks how often a mega-tile still decides.
#
# ## Version 6: the list, made on the device
#
# Where does the sorted list come from?
# Chapter 04 made it on the host, with `.tolist()`.
# On a GPU that line waits until everything launched before has finished, then copies, then sorts in Python, while the GPU idles.
#
# Made on the device, the list has one difficulty: nobody on the host knows how long it will be.
# So it gets a **capacity** from shapes alone, and a count in a tensor.
# Slots past the count hold -1.
#
# $$ \sum_b \Big\lceil \frac{n_b}{M} \Big\rceil \;\le\; \Big\lceil \frac{\text{total}}{M} \Big\rceil + B . $$
#
# The left side needs the lengths.
# The right side needs `q.shape[0]` and `len(offsets)`, which the host knows.
# The likely mistake is to drop the `+ B`: each sequence may have one tile that is not full.
#
# Then it is bookkeeping with tensor operations.
# How many tiles has each sequence?
# Their running sum says where each sequence's tiles begin in the list.
# Slot $i$ belongs to the first sequence whose running sum is above $i$: a search in a sorted tensor.
# The row follows by subtraction, the cost from the row.
# A stable sort, and done.
# No step asks the host for a number.
# Exercise 8.2 writes it.

# %%
tiles = query_tiles(offsets, offsets, 128, 128, total_q=sum(LENGTHS), band=Band.make(True))
print("capacity:", tiles.capacity, "| tiles with work, all tiles:", tiles.counts.tolist())
for name in ("seq", "row", "cost"):
    print(f"{name:>4}:", getattr(tiles, name).tolist())

# %% [markdown]
# Tiles with the same cost keep the order of memory: neighbours share keys in the L2 cache.
#
# What must *not* happen in such code is easy to write and hard to see, since it costs nothing on a CPU:
#
# | line | why it waits |
# |---|---|
# | `int(x)`, `x.item()`, `x.tolist()`, `if x > 0`, `range(x)`, `torch.zeros(x)` | the host needs a number |
# | `x[mask]`, `nonzero`, `unique`, `torch.where(mask)` | the result's *size* depends on numbers |
# | `repeat_interleave(y, counts)` without `output_size` | the same, well hidden |
#
# ### The kernel that deals itself its tiles
#
# A persistent kernel on the emulator.
# It reads the count from the device and computes its places.
# Each program notes what it ran:


# %%
@triton.jit
def static_worker(cost_ptr, counts_ptr, load_ptr, ran_by_ptr):
    """Program w of W runs the places that zigzag deals to it, until one lies past the count."""
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
# What a list saves becomes clear beside the grid that needs none: `max_len / block` tiles for each sequence, most of which find that they are past their sequence's end and return.
# A static worker takes them in turn.
# CLC steals them one by one, each with its own question and answer.
# So a list of valid tiles comes first and CLC second: stealing empty tiles efficiently gains nothing.

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
# The last panel belongs to the backward of chapter 15: two CTAs work on a *pair* of key tiles, so a sequence with an odd number gets one empty companion.
# People call it a **sentinel**.
# It is a small waste for long sequences and a large one for short ones: exercise 8.6.
#
# ### What a list costs
#
# The package's lists are made by a kernel in which every sequence looks at the lengths of all others, to find its place in the order.
# That is B x B comparisons.
# For a thousand sequences it is nothing.
# For ten thousand it is worth a look:

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
# This is not a theory: FlashAttention's varlen scheduler looked through all batches in each CTA, and at 8,192 sequences of 34 tokens it was 73 times slower than padding (pull request 2520).
# A list of metadata made beforehand repaired it (2559).
# The bench shape `tiny-8192` is that case.
# Measured with our portable kernel on an H200 (2026-11-30, docs/portable-notes.md): the lists are 5 % of the call at 8,192 sequences, and 18 % at twice as many.
#
# ## The same between GPUs
#
# Data-parallel training deals *sequences* to **ranks** (processes, one GPU each).
# A step ends when the slowest rank does, so it is the same problem again, with two things new.
# First, there are two costs at once: the linear layers cost tokens, attention costs pairs.
# Second, the gradients must be added up with the right weights.
#
# [examples/balance_ranks.py](../examples/balance_ranks.py) runs four processes, with `torch.distributed` over gloo (its backend for CPUs).
# Predict before you run it: zigzag by tokens and zigzag by pairs, which is better for attention?

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
# * There is only one zigzag: it looks at the *order*, and sequences sorted by tokens are sorted by pairs.
#   Longest first looks at sizes, so there are two of it, and each is even in its own measure only.
# * **The likely mistake is in the last panel.** Each rank computes a mean loss over its own tokens, and the gradients are averaged.
#   With equal token counts that is right.
#   With jagged shares a token on a rank with few of them weighs more.
#   Add sums, and divide by the tokens of all ranks.
#
# ## Who uses which policy
#
# | | forward | backward |
# |---|---|---|
# | the original text | zigzag, plus CLC | round robin, blocks of a sequence together, padded to the cluster size |
# | `jfa2889`, its public source | CLC over the list of valid tiles; zigzag is **off** whenever `USE_CLC` is on, and every forward configuration it ships has it on | static lists, made from offsets on the CPU if the caller passes them |
# | this project, Blackwell | CLC over a sorted list; zigzag without CLC | CLC; zigzag, or round robin for shared queries; always static with `deterministic` |
# | this project, Hopper | an atomic counter over a sorted list; zigzag with `deterministic` | sorted lists |
#
# (`jfa2889` is `tlx_jfa` at commit 2889aef of a public fork of facebookresearch's ads_model_kernel_library.)
# The text and the source disagree, and the source makes sense: with a queue the order within a round does not matter.
# What CLC adds to a static list is robustness against what cannot be planned.
# On a balanced problem that is little: 0.53 % on one MXFP8 shape (Triton fork, pull request 2799).
# FlashAttention 4 keeps CLC off for varlen attention with as many key heads as query heads.
# Others prune: sycl-tla dropped 29 thousand empty groups from a grouped GEMM (516). cuDNN offers an order that is longest first *and* keeps tiles that share keys together in L2 (cudnn-frontend 585).
#
# Deterministic results and stealing exclude each other where *order of addition* matters: in a backward that adds dQ in memory.
# A forward tile is computed alike by whoever runs it.
#
# ## Exercises
#
# Open [exercises/08_load_balance.py](../exercises/08_load_balance.py).
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
# Sum 900, mean 112.5, largest 100: the bound is 112.5, and with whole tiles of 10 the best is 120.
# Longest first reaches it: one worker gets 100 and 10 or 20, the others eleven or so of the small ones.
# </details>
#
# <details><summary>Why does sorted round robin not balance?</summary>
#
# In every round worker 0 gets the largest and the last worker the smallest.
# The differences add up instead of cancelling.
# </details>
#
# <details><summary>Which static policy do forward and backward use, and what does CLC add?</summary>
#
# See the table: zigzag over a sorted list where tiles differ; round robin where they cost the same (shared queries in the backward).
# CLC adds what no plan has: it reacts to times as they are.
# It does not cut tiles.
# </details>
#
# <details><summary>A colleague sets the grid to the number of SMs and turns CLC on. What happens?</summary>
#
# Every program runs its own tile, asks, and is told -1: all programs have begun, none is pending.
# All other tiles are never run, or, with a static list, nothing is ever stolen.
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
# * The original text's own: draw Pareto lengths and find the tail from which on a single mega-tile is hopeless.
#   The second figure of version 5 shows it for 512 tiles on 32 workers: the median crosses the line between 1.75 and 2.
#   What changes with 16 heads, and with 4 tiles per worker instead of 16?
# * In `with_jitter`, slow one worker down by a third instead of jittering every tile.
#   How does zigzag do, and the queue?
# * Give `over_bound` 148 workers instead of 132.
#   Which shapes get worse, and why (`pma128`)?
# * Change the example to eight ranks.
#   Which rule suffers most?
#
# ## Pitfalls
#
# **Zigzag over an unsorted list** is worse than round robin: it pairs at random, with a pattern.

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
# The makespans of zigzag over both lists, self attention, causal, 148 workers:

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
# **CLC without pruning.** The grid of the longest, with stealing: every empty tile costs a question and an answer.
# Suppose each takes a quarter of a key block's time:

# %%
c = head_costs("cross")
len_q, _ = SHAPES["cross"].lengths()
empties = 4 * (len(len_q) * int(-(-len_q.max() // 128))) - len(c)
ask = 0.25
full = np.concatenate([c + ask, np.full(empties, ask)])
mixed = np.random.default_rng(0).permutation(len(full)).tolist()
print(f"{empties} empty units beside {len(c)} with work")
print(f"unpruned, as the grid has them: {simulate_queue(full, 132, order=mixed).makespan:.1f}")
print(f"pruned and sorted:              {simulate_queue(np.sort(c + ask)[::-1], 132).makespan:.1f}")

# %% [markdown]
# **A static schedule for a problem that is not static**, and **a queue that draws ahead**: the figures of version 4.
# **A mega-tile left to the scheduler**: version 5.
# **Mean of means**: the last panel of the ranks.
#
# ## What differs on a GPU
#
# * A tile does not cost only its key blocks.
#   It begins and ends: loading Q, writing O, starting a program.
#   The package's models add one block for it.
#   Short tiles are mostly that.
# * Order moves data, too.
#   Tiles of one sequence read the same keys.
#   Running them side by side keeps those in the L2 cache: worth 12 % on the dense shape of this project's Hopper kernel (measured on an H200, docs/hopper-notes.md).
#   Longest first keeps equal costs in memory order for that reason.
# * A split that fills idle SMs competes for the memory's bandwidth, which is shared.
#   Where the kernel is bound by bytes, more SMs at work do not move more bytes.
# * An atomic counter is a round trip to L2, about a microsecond under load.
#   CLC's answer comes from the launch hardware.
#
# ## Verified here, and not
#
# Makespans, bounds, jitter and the CLC lanes are models; `tests/schedule` holds them to their promises.
# The persistent kernel and the lists ran on the emulator when this notebook ran, the four ranks as four processes on this CPU.
# Nothing here was timed, and no CLC instruction was executed: no Blackwell GPU was there.
# Times that are quoted were measured on an H200 and stand in the notes that are named.
#
# ## Sources
#
# * R. L. Graham, *Bounds on multiprocessing timing anomalies*, SIAM J. Appl. Math. 17 (1969): longest first and its 4/3.
# * NVIDIA, *CUDA programming guide*, cluster launch control, and PTX ISA `clusterlaunchcontrol.try_cancel` (2025): what a -1 is, and what may not be asked after it.
# * Pull requests, read in 2026: Dao-AILab/flash-attention 2520, 2559; facebookexperimental/triton 2799; NVIDIA/cudnn-frontend 585; sycl-tla 516.
# * `tlx_jfa` at 2889aef, and the original text of this course (May 2026) for its 48 tiles and its claims.
