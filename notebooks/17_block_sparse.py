# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 Block-sparse attention
#
# **Goals.** Score blocks of keys cheaply and choose the best ones for each block of queries.
# Store the choice as lists, and transpose the lists for the backward.
# Process a list in a kernel, with full and partial blocks treated differently.
# Balance tiles by the length of their list.
# Say what the choice costs, how much attention it loses, and when it does not pay.
#
# **Time.** 70 minutes, and 195 for the exercises.
# **Needs.** Chapters 08 and 12.
# No GPU: the emulator runs every kernel; measured numbers are quoted with GPU and date.

# %%
import dataclasses
import json
import math

import torch
import triton
import triton.language as tl

import jfa
import jfa.emulator as emulator
from jfa import plots, reference
from jfa.bench import recorded
from jfa.bench.shapes import SHAPES
from jfa.block_sparse import check_lists, grid_of, lists_from_mask, select_blocks, transpose
from jfa.emulator.rates import H200
from jfa.layout import offsets_from_lengths
from jfa.masks import Block
from jfa.schedule import balance, zigzag

_ = torch.manual_seed(0)

# %% [markdown]
# ## The mental model: compare summaries, then read a few blocks
#
# Full attention reads every block of keys for every block of queries.
# Block-sparse attention first compares *summaries*, and then reads only the blocks of keys whose summaries fit.
#
# The blocks of keys are those that the kernels have processed since chapter 04.
# The summary of a block is the mean of its rows.
# Queries are summarized too: one mean per block of queries, because a tile of queries processes its key blocks together.
#
# Everything else stays the same: tiles, the running softmax, rings, roles, the backward's five products.
# Only the answer to one question changes: *which key block comes next?*
#
# Here is a sequence of 128 tokens in blocks of 16.
# Its tokens belong to four topics that alternate every 32 tokens, and queries look for keys of their own topic.
# Left: the scores of the summaries.
# Middle: the best three of eight per row.
# Right: the share of the attention that each block gets, in percent per row.


# %%
def tokens(n, dim, kind, g):
    """Make q, k [n, dim]: "random", or four topics in runs of 32 ("clustered"), or "shuffled"."""
    q, k = (torch.randn(n, dim, generator=g) for _ in range(2))
    if kind != "random":
        topic = torch.arange(n) // 32 % 4
        if kind == "shuffled":
            topic = topic[torch.randperm(n, generator=g)]
        centers = 1.5 * torch.randn(4, dim, generator=g)
        q, k = q + centers[topic], k + centers[topic]
    return q, k


def summaries(x, block):
    """Return [n / block, dim], the mean of each block of x [n, dim]."""
    return x.unflatten(0, (-1, block)).mean(1)


def mass(q, k, block, causal=False):
    """Return [blocks, blocks]: the share of a query block's attention that a key block gets."""
    s = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -math.inf)
    p = torch.softmax(s, 1).unflatten(1, (-1, block)).sum(2)
    return p.unflatten(0, (-1, block)).mean(1)


g = torch.Generator().manual_seed(1)
q, k = tokens(128, 16, "clustered", g)
pooled = summaries(q, 16) @ summaries(k, 16).T / 4
best = torch.zeros(8, 8, dtype=torch.int64).scatter_(1, pooled.topk(3, dim=1).indices, 1)
shares = mass(q, k, 16)
plots.number_grids(
    {
        "pooled scores": [[f"{x:.1f}" for x in row] for row in pooled.tolist()],
        "chosen (1)": best,
        "attention, %": [[f"{100 * x:.0f}" for x in row] for row in shares.tolist()],
    },
    looks={"pooled scores": best * 3, "chosen (1)": best * 3, "attention, %": best * 3},
    title="query blocks down, key blocks to the right; orange: the chosen pairs",
)

# %%
kept = float((shares * best).sum() / shares.sum())
print(f"{best.float().mean():.0%} of the pairs carry {kept:.0%} of the attention")

# %% [markdown]
# So a part of the work gives most of the result.
# That works only if attention is concentrated, *and* if it is concentrated by block.
# Predict before you look: which share of the attention is in the best half of the blocks for random tokens?
# And for the same topics, if the tokens are shuffled?


# %%
def recall(kind, ratio, n=512, block=32):
    """Return the share of the attention inside the chosen blocks, one head of ``n`` tokens."""
    causal = kind.endswith("causal")
    q, k = tokens(n, 16, kind.split(",")[0], torch.Generator().manual_seed(2))
    o = offsets_from_lengths([n])
    lists = select_blocks(
        q[:, None], k[:, None], o, o, ratio=ratio, causal=causal, block_q=block, block_kv=block
    )
    chosen = torch.zeros(n // block, n // block)
    for i in range(n // block):
        chosen[i, lists.columns[lists.starts[i] : lists.starts[i + 1]].long()] = 1
    return float((mass(q, k, block, causal) * chosen).sum(1).mean())


ratios = [0.125, 0.25, 0.5, 0.75, 1.0]
sorts = ["clustered", "clustered, causal", "random", "shuffled"]
plots.lines(
    ratios,
    {s: [100 * recall(s, r) for r in ratios] for s in sorts},
    title="share of the attention in the chosen blocks, 512 tokens, blocks of 32",
    xlabel="ratio of blocks that are kept",
    ylabel="percent",
    from_zero=True,
)

# %% [markdown]
# For random tokens, half of the blocks hold little more than half of the attention.
# For shuffled topics it is the same, although each query attends to a quarter of the keys only.
# The mean of tokens of four topics does not summarize any of them.
# Whether the choice works is a property of the data, so measure its *recall* on yours: the share of the attention in the chosen blocks.
#
# ## The math
#
# Take one head: block `i` of queries has the rows $Q_i$, block `j` of keys the rows $K_j$, as many as exist.
#
# | | shape | |
# |---|---|---|
# | pooled queries $\bar q_i$ | [query blocks, D] | the mean over the rows **that exist** |
# | pooled keys $\bar k_j$ | [key blocks, D] | likewise |
# | score $\bar q_i \cdot \bar k_j$ * scale | [query blocks, key blocks] | per sequence and head |
# | candidates $n_i$ | [query blocks] | key blocks with at least one pair that the mask allows |
# | count $c_i$ | [query blocks] | max(1, ceil(ratio * $n_i$)); 0 where $n_i$ is 0 |
#
# The mean is linear, so $\bar q_i \cdot \bar k_j$ is the mean of all scores of the pair of blocks: one product instead of $128^2$.
#
# Three rules make the choice the same everywhere: of equal scores the lower block wins, a list is in ascending order, and every head of every sequence chooses for itself.
# No gradient flows through the choice: a step treats it as a constant.
#
# **Ceil makes short sequences dense.** A sequence of one block keeps it, whatever the ratio.
# Here are the lengths of the bench shape `self`, 128 sequences of 16 to 4,096 tokens in blocks of 128:

# %%
blocks = (SHAPES["self"].lengths()[0].long() + 127) // 128
for ratio in (0.25, 0.5, 0.75):
    count = (ratio * blocks).ceil()
    whole = float((count * blocks).sum() / (blocks * blocks).sum())
    middle = float((count / blocks).median())
    print(
        f"ratio {ratio}: {whole:.2f} of all pairs of blocks, {middle:.2f} for the median sequence"
    )

# %% [markdown]
# Sparse attention is for long sequences.
# The long ones have most of the pairs, so for the whole batch the share is close to the ratio.
#
# ## Version 0: a mask of blocks
#
# The reference of this chapter needs no kernel: expand the table of chosen blocks to a mask, and use dense attention.
# The result is right, and takes as long as before.


# %%
def masked_attention(q, k, v, chosen, block, causal=False):
    """Attend with one head [n, D] under the mask of the chosen blocks, [blocks, blocks]."""
    mask = chosen.bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    mask = mask[: len(q), : len(k)]
    if causal:
        mask = mask.tril()
    s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~mask, -math.inf)
    return torch.softmax(s, 1) @ v


# %% [markdown]
# ## Version 1: lists
#
# A kernel should not look at blocks that were not chosen, not even to skip them.
# So the choice is stored as lists, in a format for sparse matrices (CSR):
#
# - `starts` [rows + 1]: the list of query block r has the entries `starts[r]` to `starts[r + 1] - 1`;
# - `columns`: the chosen key blocks in ascending order, counted inside their sequence;
# - `kinds`: **FULL** pairs need no mask, **PARTIAL** ones do.
#
# In this package FULL means more than in chapter 06: both blocks are whole and no mask cuts the pair.
# For the forward alone, a pair could be full although its query block extends past the sequence's end.
# The backward sums over queries, so there the missing queries must be masked.
# With the stricter meaning a pair has the same kind in both.
#
# `select_blocks` makes lists for packed sequences.
# Here are two sequences, causal, with one head:

# %%
lengths = [100, 40]
o = offsets_from_lengths(lengths)
g = torch.Generator().manual_seed(3)
q, k, v = (torch.randn(140, 1, 16, generator=g) for _ in range(3))
lists = select_blocks(q, k, o, o, ratio=0.5, causal=True, block_q=16, block_kv=16)
grid = grid_of(o, len(q), 16)
letters = {int(Block.FULL): "F", int(Block.PARTIAL): "P"}
for r in range(grid.rows):
    at = range(int(lists.starts[r]), int(lists.starts[r + 1]))
    said = " ".join(f"{int(lists.columns[e])}{letters[int(lists.kinds[e])]}" for e in at)
    if grid.exist[r]:
        print(f"sequence {int(grid.seq[r])}, query block {int(grid.index[r])}: {said}")
print("starts", lists.starts.tolist(), "| space for", lists.columns.numel(), "entries")

# %% [markdown]
# The space for entries is an upper bound that follows from shapes alone, so nothing waits for the device.
# Entries behind the last start have no meaning.
#
# Query block 6 of sequence 0 has 4 queries (100 = 6 * 16 + 4), so all of its pairs are PARTIAL.
#
# Now the kernel.
# Compare its loop with chapter 06: `for block in range(first, end)` became a loop over entries.
# This kernel handles one head of one causal sequence; heads, packed sequences and the LSE are exercise 17.4.


# %%
@triton.jit
def list_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, columns_ptr, kinds_ptr, scale, n,
    D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Attend with queries t * B on, in program t, over the key blocks of list t; causal."""
    tile = tl.program_id(0)
    d = tl.arange(0, D)
    i = tile * B + tl.arange(0, B)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :], mask=i[:, None] < n, other=0.0)
    m = tl.full((B,), float("-inf"), tl.float32)
    l = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, D), tl.float32)
    for entry in range(tl.load(starts_ptr + tile), tl.load(starts_ptr + tile + 1)):
        j = tl.load(columns_ptr + entry) * B + tl.arange(0, B)
        k = tl.load(k_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < n, other=0.0)
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if tl.load(kinds_ptr + entry) == 1:  # PARTIAL
            s = tl.where((j[None, :] <= i[:, None]) & (j[None, :] < n), s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        anchor = tl.where(top == float("-inf"), 0.0, top)
        alpha = tl.exp(m - anchor)
        p = tl.exp(s - anchor[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        m = top
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + i[:, None] * D + d[None, :], out, mask=i[:, None] < n)


def run_lists(ratio, n=100):
    """Attend in the first sequence over its lists; return (error, counts, listed blocks)."""
    o = offsets_from_lengths([n])
    x = [t[:n].contiguous() for t in (q, k, v)]
    kept = select_blocks(*x[:2], o, o, ratio=ratio, causal=True, block_q=16, block_kv=16)
    out = torch.full((n, 16), float("nan"))
    with emulator.counting() as counts:
        list_kernel[(triton.cdiv(n, 16),)](*x, out, *kept.tensors, 0.25, n, D=16, B=16)
    exact = reference.attention(*(t.double() for t in x), o, o, causal=True, block_lists=kept)
    return float((out - exact[:, 0]).abs().max()), counts, int(kept.starts[-1])


runs = {f"ratio {r}": run_lists(r) for r in (1.0, 0.5, 0.25)}
for name, (error, _, entries) in runs.items():
    print(f"{name}: {entries} blocks in all lists, largest error {error:.0e}")
plots.panels(
    list(runs),
    {
        "elements loaded": ([c.load_elements for _, c, _ in runs.values()], "{:,}"),
        "exponentials": ([c.exponentials for _, c, _ in runs.values()], "{:,}"),
        "matrix products": ([c.dots for _, c, _ in runs.values()], "{}"),
    },
    title="one causal sequence of 100 tokens, blocks of 16: all work follows the lists",
)

# %% [markdown]
# A list may be empty.
# Then `l` stays 0, the output is 0, and the LSE is minus infinity: the same convention as for a query that sees no key.
#
# The LSE is that of the *chosen* keys.
# The backward needs it, and so does a merge with other keys (chapter 02).
#
# ## Version 2: the backward's lists
#
# dK and dV belong to a block of keys, and their tile needs the opposite information: *which query blocks chose this key block?*
# That is the transpose of the lists.
# It is computed by counting: count the entries of each key block, take the running sums as starts, and place each entry behind those of earlier query blocks.
# The host does not need to read any count.

# %%
turned = transpose(lists, o, o, total_q=140, total_kv=140)


def strip(one, side):
    """Return the entries of all lists as segments; the color is the list."""
    at = [int(x) for x in one.starts]
    rows = [r for r in range(side.rows) for _ in range(at[r], at[r + 1])]
    columns = one.columns.tolist()
    return [plots.Segment(e, 1, str(columns[e]), r) for e, r in enumerate(rows)]


plots.segments(
    {
        "by query block:\nits key blocks": strip(lists, grid),
        "by key block:\nits query blocks": strip(turned, grid),
    },
    title="the same pairs in both orders; a run of one color is one list",
    xlabel="entry",
    ticks=range(0, int(lists.starts[-1]) + 1, 2),
)

# %% [markdown]
# Both strips have the same entries, sequence 0 first, in ascending order within a list.
# The order matters, because floating-point sums depend on it.
# With ascending lists and one owner per gradient tile the backward gives the same bits every time, whichever program runs first.
#
# The op does all that for `block_lists=`.
# The next cell has two heads that share one key head, compared with fp64:

# %%
q, v = torch.randn(140, 2, 16), torch.randn(140, 1, 16)
k = torch.randn(140, 1, 16)
lists = select_blocks(q, k, o, o, ratio=0.5, causal=True, block_q=16, block_kv=16)
grads = {}
for name, cast in (("portable", torch.float32), ("reference", torch.float64)):
    x = [t.detach().to(cast).requires_grad_() for t in (q, k, v)]
    out = jfa.jagged_flash_attention(*x, o, o, causal=True, block_lists=lists, backend=name)
    grads[name] = [out, *torch.autograd.grad(out.square().sum(), x)]
for what, a, b in zip(("out", "dQ", "dK", "dV"), grads["portable"], grads["reference"]):
    print(f"{what}: largest error {float((a - b).detach().abs().max()):.0e}")

# %% [markdown]
# ## Version 3: the same change in a kernel with roles
#
# A kernel like that of chapter 12 has one more difficulty: *several* roles must agree which block comes next.
# They send each other no messages about it.
# Each role reads the same list and finds the same answer, just as each role computes its own phases in chapter 13.
# The code for it is in [jfa/kernels/common/block_lists.py](../jfa/kernels/common/block_lists.py): `Lists.of` finds a tile's list, `Listed.nth(n)` returns its n-th block.
#
# - The load role reads the number of each block and issues the copies.
# - The softmax role needs the keys' positions where it masks. A list is ascending, so the blocks that a band or the sequence's end cuts are at its two ends, and the Hopper kernel reads the list only there.
# - The role that multiplies does not need the list: it takes what is in the ring. It needs the *count*.
#
# An empty list counts as one block that is behind the sequence and completely masked.
# So no role needs a special case for it, and no role waits for a block that does not come.
#
# Blocks have 128 queries here.
# FlashAttention-4's kernel for Blackwell (SM100), where two softmax groups take 128 queries each, requires 256 (issue 2727 asks for 128; open on 2026-07-23).
# Coarser blocks choose less well: a block of 256 queries must take what either half needs.
# The package's Blackwell forward keeps 128: both softmax groups take the same queries, and each takes every other listed block.
# The price is traffic: each block of keys serves 128 queries, where a dense tile has 256.
#
# The next cell runs the Hopper forward over lists, on a *modelled* H200: one head of 640 tokens, 5 by 5 blocks, one SM.
# It takes about 15 seconds.


# %%
def modelled(ratio):
    """Return the modelled cycles of the Hopper forward; ratio None: the dense kernel."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(640, 1, 128, generator=g).bfloat16() for _ in range(3)]
    o = offsets_from_lengths([640])
    kept = None if ratio is None else select_blocks(*x[:2], o, o, ratio=ratio)
    with emulator.options(policy="timed", rates=H200, races=False, max_ctas=1):
        jfa.jagged_flash_attention(*x, o, o, block_lists=kept, backend="hopper")
    return emulator.last().time


steps = [0.2, 0.4, 0.6, 0.8, 1.0]
cycles = [modelled(r) for r in steps]
dense = modelled(None)
plots.lines(
    steps,
    {"over lists": cycles, "dense kernel": [dense] * 5},
    title="modelled cycles of one head of 640 tokens on one SM of an H200",
    xlabel="ratio",
    ylabel="cycles",
    from_zero=True,
)

# %%
slope = (cycles[-1] - cycles[0]) / (steps[-1] - steps[0])
print(
    f"a line through both ends: {slope:,.0f} * ratio + {cycles[0] - slope * steps[0]:,.0f} cycles"
)

# %% [markdown]
# The line does not go through zero.
# The constant part is the cost of a tile that does not depend on its list: its start, loading Q, storing O, the first filling of the ring.
# So a ratio of 0.2 is not five times as fast.
#
# The Hopper backward processes the transposed lists in the same way, in halves of 64 queries.
# With `deterministic=True` the gradients come from the portable kernels.
#
# ### Measured
#
# 24 sequences of 2,048 to 8,192 tokens (log-uniform, seed 1) in whole blocks of 128, 4 heads, D 128, bf16.
# FlexAttention is PyTorch's compiled kernel, over the same blocks.
# Everything below is read from one recorded run on one H200; the choosing was timed separately.

# %%
run = json.loads((recorded.FOLDER / "h200-2026-11-30-sparse.json").read_text())
print("measured on", run["environment"]["device"], run["environment"]["date"])
measured = {(t["name"], t["ratio"]): t for t in run["block_sparse"]}
dense_ms = measured["hopper dense", 1.0]
kept = [1.0, 0.5, 0.25]
pairs = [measured["hopper", r]["pairs"] for r in kept]
for way in ("forward", "backward"):
    ours, flex = ([measured[name, r][f"{way}_ms"] for r in kept] for name in ("hopper", "flex"))
    display(
        plots.bars(
            ["dense kernel", *(f"{p:.3f}" for p in pairs)],
            {
                "this package, Hopper": [dense_ms[f"{way}_ms"], *ours],
                "FlexAttention": [math.nan, *flex],
            },
            title=f"{way}, one H200, measured 2026-11-30",
            xlabel="share of the pairs of blocks in the lists",
            ylabel="ms",
        )
    )
    said = [f"{dense_ms[f'{way}_ms'] / ms:.2f}" for ms in ours]
    print(f"{way}: times as fast as our dense kernel at ratio {kept}: {', '.join(said)}")

# %% [markdown]
# The original text of this course claims 1.3 to 1.5 for the forward at ratio 0.5 (claimed, May 2026); this run has 1.73.
#
# Lists with *all* blocks are about 6 % slower than the dense kernel in the forward.
# The dense kernel computes the number of its next block, while with lists the load role must read it; we did not measure how much of the 6 % that is.
# And the choice itself takes time.
# Up to which share of the blocks is sparse attention faster?
# A line through the two sparse points gives an estimate:


# %%
def crossing(way, budget):
    """Return (ms per share of the pairs, ms at share 0, share where the line is at the budget)."""
    half, quarter = (measured["hopper", r] for r in (0.5, 0.25))
    rise = (half[f"{way}_ms"] - quarter[f"{way}_ms"]) / (half["pairs"] - quarter["pairs"])
    rest = quarter[f"{way}_ms"] - rise * quarter["pairs"]
    return rise, rest, (budget - rest) / rise


select_ms = measured["hopper", 0.5]["selection_ms"]
for way in ("forward", "backward"):
    rise, rest, share = crossing(way, dense_ms[f"{way}_ms"])
    print(f"{way}: {rise:.2f} ms * share + {rest:.2f} ms, as slow as dense at share {share:.2f}")
share = crossing("forward", dense_ms["forward_ms"] - select_ms)[2]
print(f"forward with its choice ({select_ms:.3f} ms): at share {share:.2f}")

# %% [markdown]
# This is a straight line through two points, not a measurement.
# The choice takes 8.7 % of the time of the dense forward, and 15 % of the sparse one at ratio 0.5; most of that is reading Q and K once to pool them ([docs/hopper-notes.md](../docs/hopper-notes.md), 2026-11-30).
# A training step chooses once, for a forward and a backward.
# Exercise 17.6 makes the same estimate for one sequence, in whole cycles.
#
# ## Version 4: balance by the length of the list
#
# Chapter 08's rules need a cost per tile.
# For a dense tile that is its number of key blocks.
# For a sparse one it is the *length of its list*.
#
# With one ratio for all sequences, the lengths of the lists are proportional to those of the sequences, and the dense order is a good order.
# Lists that you make yourself may have any lengths.
# Here is a batch of three: 3,072 tokens that see neighboring blocks only (3 blocks each), 1,024 tokens that see everything, 1,536 tokens that see every second block.
# `lists_from_mask` makes lists from such tables.

# %%
sizes = [24, 8, 12]
masks = [torch.ones(n, n, dtype=torch.bool) for n in sizes]
masks[0] = masks[0].triu(-1).tril(1)
masks[2][:, 1::2] = False
o3 = offsets_from_lengths([128 * n for n in sizes])
total = 128 * sum(sizes)
own = lists_from_mask(masks, o3, o3, total_q=total, total_kv=total)
side = grid_of(o3, total, 128)
there = side.exist > 0
counts = own.counts[0][there].numpy()
by_length = side.blocks[side.seq][there].numpy()
names = [f"{'ABC'[s]}{i}" for s, i in zip(side.seq[there].tolist(), side.index[there].tolist())]


def gantt_lines(dealt):
    """Return per worker its (tile, begin, end); a tile takes as long as its list."""
    found = []
    for places in dealt:
        ends = [0, *(sum(counts[p] for p in places[: n + 1]) for n in range(len(places)))]
        found.append([(names[p], ends[n], ends[n + 1]) for n, p in enumerate(places)])
    return found


deals = {"by sequence length": zigzag(by_length, 8), "by list length": zigzag(counts, 8)}
plots.gantt(
    {name: gantt_lines(dealt) for name, dealt in deals.items()},
    title="44 tiles on 8 workers, dealt by zigzag",
    xlabel="key blocks",
    bound=(counts.sum() / 8, "even load"),
)

# %%
for name, dealt in deals.items():
    print(f"{name}: imbalance {balance(dealt, counts).imbalance:.3f}")

# %% [markdown]
# The first deal begins with sequence A, the longest, whose tiles are the cheapest.
# The queue of chapter 08 can take the same list: sort by list length, and let each free worker take the next tile.
#
# ## Version 5: shared queries choose per sequence
#
# Attention pooling (chapter 07) has one query tensor for all sequences.
# Its scores still differ from sequence to sequence, so each sequence has its own list.
# `broadcast_q=True` does that: the grid of the queries then has a row per sequence and query block.

# %%
lens = [70, 0, 33]
ok = offsets_from_lengths(lens)
shared = torch.randn(20, 2, 16)
keys, values = torch.randn(103, 2, 16), torch.randn(103, 2, 16)
pma = select_blocks(shared, keys, None, ok, ratio=0.3, broadcast_q=True, block_q=16, block_kv=16)
print("entries per list, head 0:", pma.counts[0].tolist(), "(two query blocks per sequence)")
call = dict(block_lists=pma, broadcast_q=True)
out = jfa.jagged_flash_attention(shared, keys, values, None, ok, backend="portable", **call)
exact = reference.attention(shared.double(), keys.double(), values.double(), None, ok, **call)
print(f"largest error {float((out - exact).abs().max()):.0e}; the empty sequence gives", end=" ")
print(f"{float(out[20:40].abs().max()):.0f}")

# %% [markdown]
# ## Summary
#
# * Pooled scores choose key blocks at the price of one product per pair of blocks.
# * The choice works only if attention is concentrated by block: measure its recall on your data.
# * Lists in CSR form hold the choice; the backward uses their transpose, computed without host reads.
# * FULL pairs need no mask; a pair whose queries or keys extend past the end is PARTIAL.
# * The time of a tile follows the length of its list, plus a constant part; balance by list length.
# * The choice itself takes time, so sparse attention pays for long sequences and small ratios.
#
# ## Exercises
#
# Open [exercises/17_block_sparse.py](../exercises/17_block_sparse.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 17.1 | pooled block scores of a jagged batch | 1 | 35 |
# | 17.2 | choose the best blocks, as lists | 2 | 40 |
# | 17.3 | transpose the lists, without host reads | 2 | 40 |
# | 17.4 | the forward kernel over lists: packed, heads, LSE | 2 | 50 |
# | 17.5 | bug hunt: the last block counts as full | 2 | 10 |
# | 17.6 | predict the ratio at which sparse stops paying | 2 | 20 |
#
# ## Checkpoint
#
# <details><summary>A sequence has 300 keys, blocks of 128. What does pooling divide the last block by?</summary>
#
# By 44, the rows that exist: 300 = 2 * 128 + 44.
# </details>
#
# <details><summary>Ratio 0.25, causal, blocks of 128, equal lengths. How many blocks does query block 5 choose? And query block 2?</summary>
#
# Query block 5 has 6 candidates: ceil(1.5) = 2.
# Query block 2 has 3: ceil(0.75) = 1.
# </details>
#
# <details><summary>Why may a pair of blocks not be FULL if only its query block extends past the end?</summary>
#
# In the forward it would do no harm: rows that do not exist are not stored.
# The backward sums over queries, and rows that do not exist must add nothing to dK and dV.
# </details>
#
# <details><summary>Two heads share a key head. May their lists differ?</summary>
#
# Yes. dK and dV of that key head then sum over both heads' transposed lists.
# </details>
#
# <details><summary>How much cheaper are the pooled scores than the scores themselves?</summary>
#
# One product per pair of blocks instead of 128 * 128.
# The remaining cost is reading Q and K once to pool them.
# </details>
#
# ## Try this
#
# - In `recall`, let `block` be 8, then 128. What happens to "clustered", and why?
# - Give `select_blocks` `keep=("first", "diagonal")` in `recall`. For which data does it help?
# - Replace the mean in `summaries` by the maximum over the rows. Is $\bar q \cdot \bar k$ still the mean of the block's scores?
# - In version 4, let sequence A see everything. Which of the two deals is balanced now?
#
# ## Pitfalls
#
# **Dividing by the block's size.** The last block of a sequence has fewer rows.
# If you divide by 16 nevertheless, its score becomes smaller:

# %%
g = torch.Generator().manual_seed(5)
tail = torch.randn(2, 16, generator=g) + 2.0  # two rows exist
query = torch.randn(16, 16, generator=g).mean(0) + 1.0
right, wrong = (float(query @ tail.sum(0) / n / 4) for n in (2, 16))
print(f"score over 2 rows: {right:.2f}, over 16: {wrong:.2f}, so the tail is hardly ever chosen")

# %% [markdown]
# **A block marked FULL that needs a mask.** Without a mask later keys count, and so do the missing rows of the last block: a key of zeros has the score 0, and exp(0) is 1.

# %%
n = 40
o1 = offsets_from_lengths([n])
q, k, v = (torch.randn(n, 1, 16) for _ in range(3))
lists = select_blocks(q, k, o1, o1, ratio=1.0, causal=True, block_q=16, block_kv=16)
marked = dataclasses.replace(lists, kinds=torch.full_like(lists.kinds, int(Block.FULL)))
exact = reference.attention(q.double(), k.double(), v.double(), o1, o1, causal=True)
for name, one in (("right kinds", lists), ("all FULL", marked)):
    out = torch.full((n, 16), float("nan"))
    list_kernel[(3,)](q, k, v, out, *one.tensors, 0.25, n, D=16, B=16)
    print(f"{name}: largest error {float((out - exact[:, 0]).abs().max()):.0e}")
try:
    jfa.jagged_flash_attention(q, k, v, o1, o1, causal=True, block_lists=marked)
except ValueError as error:
    print(f"the op: {error}")

# %% [markdown]
# There is no crash and no NaN, only wrong numbers.
# The op rejects such lists with a message: on CPU tensors it always reads their contents.
# On a GPU that would wait for the device, so there you must ask for the check: `check_offsets=True`, or `check_lists` in a test.
#
# **Lists that are not ascending, or hold a block twice.** A block that is there twice counts twice.
# An order that changes from run to run changes the last bits of every sum.

# %%
sides = dict(total_q=n, total_kv=n, num_heads=1, num_kv_heads=1)
every = select_blocks(q, k, o1, o1, ratio=1.0, block_q=16, block_kv=16)
for columns in ([0, 1, 2], [0, 0, 2], [2, 1, 0], [0, 1, 3]):
    changed = every.columns.clone()
    changed[:3] = torch.tensor(columns)
    try:
        check_lists(dataclasses.replace(every, columns=changed), o1, o1, **sides)
        print(columns, "fits")
    except ValueError as error:
        print(columns, error)

# %% [markdown]
# **Floor instead of ceil.** With ratio 0.25 and three candidates, floor keeps nothing, and the output of these queries is 0:

# %%
nothing = [torch.zeros(3, 3).bool()]
none = lists_from_mask(nothing, o1, o1, total_q=n, total_kv=n, block_q=16, block_kv=16)
call = dict(block_lists=none, return_lse=True, backend="portable")
out, lse = jfa.jagged_flash_attention(q, k, v, o1, o1, **call)
print("largest output", float(out.abs().max()), "| LSE", float(lse.max()))

# %% [markdown]
# | pitfall | where you saw it |
# |---|---|
# | data whose blocks have no topic | the recall picture |
# | a short sequence is dense at any ratio | the bench shape `self` |
# | a mean over the block's size instead of its rows | `tail` |
# | a block marked FULL that needs a mask | `marked` |
# | unsorted or doubled entries | `check_lists` |
# | floor: empty lists | `none` |
# | tiles dealt by the length of their sequence | the Gantt picture |
#
# ## What differs on a real GPU
#
# - Chosen blocks are scattered. Neighboring tiles of a dense kernel read the same key blocks at nearly the same time, and the L2 cache serves all but the first; with lists they share less.
# - Choosing is a separate launch. For short sequences its latency alone may be more than is saved.
# - The next block's number comes from memory: the load role must read it early enough, or the ring becomes empty.
# - Sparse kernels have their own kinds of deadlocks: FlashAttention 2761 (packed, sparse and split keys together) and FlashInfer 4533, both where roles disagreed about what is left to do.
#
# ## Verified here, and not
#
# The kernels of versions 1, 2 and 5 ran on the emulator and were compared with fp64.
# The cycles of version 3 are modelled.
# The milliseconds were measured on one H200 on 2026-11-30, in one run, and read from the recorded file; the choosing was timed separately.
# The Gantt picture counts key blocks; it is not a measurement.
# The Blackwell kernels over lists ran on the emulator and compile; none of them ran on a GPU.
# Recall was computed for made-up tokens, not for a trained model.
#
# ## Sources
#
# - `jfa/block_sparse/`, `jfa/block_select.py`, `jfa/kernels/portable/block_sparse.py`, `jfa/kernels/hopper/forward.py`: the package.
# - Dao-AILab/flash-attention: issue 2727 (blocks of 128 queries on SM100, open on 2026-07-23), pull request 2794 (backward for packed block-sparse attention, open on 2026-08-14), 2661 (two CTAs), 2761 (a deadlock).
# - flashinfer-ai/flashinfer: issue 3587 (no block-sparse kernel for SM100), 4533 (hangs). Read 2026-11.
# - The text this course grew from: the second variant, with its claim of 1.3 to 1.5 (May 2026).
#
# Next: [18 On the GPU](18_on_the_gpu.py).
