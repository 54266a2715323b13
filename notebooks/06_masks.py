# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 Masks and loop peeling
#
# **Goals.** After this chapter you
# * can describe causal masks (both alignments) and windows (both kinds) by two numbers per sequence,
# * can say in closed form which blocks are empty, which are full, and which need a mask,
# * can peel a loop with a `tl.constexpr`,
# * can read in the compiled code what a mask costs,
# * know why −1e9 is not minus infinity.
#
# **Time** 50 minutes to read, 205 for the exercises.
# **You need** chapters 04 (the jagged forward) and 05 (the backward; only for version 4).
# No GPU.

# %%
import math

import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa import plots, reference
from jfa.masks import Band, block_kinds, key_ranges, query_ranges

_ = torch.manual_seed(0)

# %% [markdown]
# ## The mental model: two parallel lines
#
# Draw all pairs of one sequence as a grid: queries down, keys to the right.
# A mask says which squares count.
# Every mask of this chapter is a **band**: the squares between two parallel diagonal lines.
#
# So two numbers are enough.
# Query i sees the keys
#
# $$i + \mathrm{lo} \;\le\; j \;\le\; i + \mathrm{hi}, \qquad 0 \le j < \mathrm{len}_{kv} .$$
#
# A band may have no bound on one side: that side is *open*, and lo is a huge negative number, or hi a huge positive one.
#
# **Causal** means that a query does not see later tokens.
# With as many queries as keys that is hi = 0.
# With unequal lengths one must say *which key belongs to query 0*:
#
# - *top left*: query 0 is aligned with key 0, so hi = 0.
# - *bottom right*: the last query is aligned with the last key, so hi = d, with d = len_kv − len_q.
#   This is the choice of FlashAttention: the queries are the newest tokens, and the earlier keys come from a cache.
#
# **Window** means that a query sees only keys near its own position.
# Again there are two kinds:
#
# - W, counted from both starts: |i − j| ≤ W, so lo = −W and hi = W.
# - (left, right), counted from the bottom-right diagonal, as in FlashAttention: lo = d − left, hi = d + right.
#
# To combine two masks, take the larger lo and the smaller hi.
# The likely mistake is to forget d, and tests with equal lengths do not show it, because then d is 0.

# %%
cases = {
    "causal, bottom right": (12, 16, Band.make("bottom_right")),
    "causal, top left": (12, 16, Band.make("top_left")),
    "window (3, 1)": (12, 16, Band.make(window_size=(3, 1))),
    "more queries than keys": (16, 12, Band.make("bottom_right")),
}
plots.band_planes(
    {name: (n, m, *band.offsets(n, m)) for name, (n, m, band) in cases.items()},
    title="four masks, and the two lines that bound each",
)

# %% [markdown]
# Look at the last mask: with 16 queries and 12 keys, d = −4, and the first four queries see no key.
# That is legal: their output is 0, and their lse is minus infinity.
#
# ## Blocks: empty, partial, full
#
# A kernel works on blocks of BM queries and BN keys.
# Each block is of one of three kinds:
#
# - **empty**: no pair counts. Skip the block, without loading K.
# - **full** (F): all pairs count. The block needs no mask.
# - **partial** (P): some pairs count. The block needs a mask.
#
# In one block j − i takes every value from *smallest* = first key − last query to *largest* = last key − first query.
# So a block is
#
# - empty if smallest > hi or largest < lo,
# - full if smallest ≥ lo and largest ≤ hi, and no key of the block is past the end,
# - partial otherwise.
#
# In a row of blocks the full ones are contiguous, with partial ones to the left and right.
# That is why the loop over blocks can be split into three.

# %%
for name, band, n, m in (
    ("causal, bottom right", Band.make("bottom_right"), 640, 640),
    ("causal, top left, more keys", Band.make("top_left"), 512, 768),
    ("window of 256 back, causal", Band.make("bottom_right", (256, 0)), 640, 640),
    ("more queries than keys", Band.make("bottom_right"), 700, 450),
):
    kinds = block_kinds(band, n, m, 64, 64)
    display(plots.block_map(kinds, title=f"{name}: {n} x {m}", block_m=64, block_n=64))

# %% [markdown]
# In the last picture the first blocks of queries see no key, and the last column is never full: 450 is not a multiple of 64, so the block's last keys do not exist.
#
# What share of the visited blocks needs a mask?
# Predict: does it grow or fall with the length under a causal mask?
# And with a window of fixed width?

# %%
lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
shares = {}
for name, band in (
    ("causal", Band.make(True)),
    ("causal, window 1024", Band.make(True, (1024, 0))),
    ("causal, window 256", Band.make(True, (256, 0))),
):
    shares[name] = []
    for n in lengths:
        kinds = block_kinds(band, n, n, 128, 128)
        shares[name].append(100 * float((kinds == 1).sum() / (kinds > 0).sum()))
plots.lines(
    lengths,
    shares,
    title="visited blocks of 128 x 128 that need a mask",
    xlabel="length",
    ylabel="percent",
    log_x=True,
    from_zero=True,
)

# %% [markdown]
# Under a causal mask one block per row of blocks is on the diagonal, and a row has up to n / 128 blocks, so the share falls like 1 / n.
# At n = 16,384 it is 1.6 %.
# A window has two edges and a fixed number of blocks, so the share stays constant.
# With a window of 256 two thirds of the blocks are at an edge, so there is little to gain by treating full blocks differently.
#
# ## Version 0: every block, every mask
#
# One sequence, one head.
# The mask is applied to each block, needed or not.
# `BM = BN = 16` here.
#
# There is a pitfall already here.
# The first block may be outside the band for some rows.
# Then the maximum m is still −∞, and exp(s − m) = exp(−∞ + ∞) is NaN.
# So the exponent is taken from an *anchor*: m, or 0 while m is −∞. exp(−∞ − 0) is 0, as it should be.


# %%
@triton.jit
def block_step(
    m, l, acc, q, i, block, k_ptr, v_ptr, scale, len_kv, lo, hi,
    D: tl.constexpr, BN: tl.constexpr, APPLY_MASK: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running softmax of the queries i."""
    d = tl.arange(0, D)
    j = block * BN + tl.arange(0, BN)
    if APPLY_MASK:
        k = tl.load(k_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < len_kv, other=0.0)
        v = tl.load(v_ptr + j[:, None] * D + d[None, :], mask=j[:, None] < len_kv, other=0.0)
    else:  # a full block ends inside the sequence: its loads need no mask either
        k = tl.load(k_ptr + j[:, None] * D + d[None, :])
        v = tl.load(v_ptr + j[:, None] * D + d[None, :])
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if APPLY_MASK:
        distance = j[None, :] - i[:, None]
        seen = (distance >= lo) & (distance <= hi) & (j[None, :] < len_kv)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp(m - anchor)
    p = tl.exp(s - anchor[:, None])
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l * alpha + tl.sum(p, axis=1), acc


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, ranges_ptr, out_ptr, scale, len_q, len_kv, lo, hi,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """Attend from BM queries; ranges: [tiles, 4] int32, (first, bulk_begin, bulk_end, end)."""
    tile = tl.program_id(0)
    first = tl.load(ranges_ptr + 4 * tile)
    bulk_begin = tl.load(ranges_ptr + 4 * tile + 1)
    bulk_end = tl.load(ranges_ptr + 4 * tile + 2)
    end = tl.load(ranges_ptr + 4 * tile + 3)
    d = tl.arange(0, D)
    i = tile * BM + tl.arange(0, BM)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :], mask=i[:, None] < len_q, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    if PEEL:
        for block in range(first, bulk_begin):  # left edge
            m, l, acc = block_step(
                m, l, acc, q, i, block, k_ptr, v_ptr, scale, len_kv, lo, hi, D, BN, True
            )
        for block in range(bulk_begin, bulk_end):  # bulk: nothing is masked
            m, l, acc = block_step(
                m, l, acc, q, i, block, k_ptr, v_ptr, scale, len_kv, lo, hi, D, BN, False
            )
        for block in range(bulk_end, end):  # right edge
            m, l, acc = block_step(
                m, l, acc, q, i, block, k_ptr, v_ptr, scale, len_kv, lo, hi, D, BN, True
            )
    else:
        for block in range(first, end):
            m, l, acc = block_step(
                m, l, acc, q, i, block, k_ptr, v_ptr, scale, len_kv, lo, hi, D, BN, True
            )
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + i[:, None] * D + d[None, :], out, mask=i[:, None] < len_q)


def attend(q, k, v, band, version):
    """Run version 0: all blocks masked; 1: empty ones skipped; 2: right edge peeled; 3: both."""
    n, m = len(q), len(k)
    start = torch.arange(0, n, 16)
    stop = (start + 16).clamp(max=n)
    lens = [torch.full_like(start, x) for x in (n, m)]
    first, bulk_begin, bulk_end, end = key_ranges(band, start, stop, *lens, 16)
    if version == 0:
        first, end = torch.zeros_like(first), torch.full_like(end, triton.cdiv(m, 16))
    ranges = torch.stack([first, bulk_begin, bulk_end, end], 1).to(torch.int32)
    if version == 2:  # a tile with a left edge has no bulk here: all its blocks are masked
        no_left_edge = ranges[:, 0] == ranges[:, 1]
        ranges[~no_left_edge, 1:3] = ranges[~no_left_edge, 3:4]
    out = torch.full_like(q, float("nan"))
    attend_kernel[(len(start),)](
        q, k, v, ranges, out, 1 / math.sqrt(q.shape[1]), n, m, *band.offsets(n, m),
        D=q.shape[1], BM=16, BN=16, PEEL=version >= 2,
    )  # fmt: skip
    return out


def right_answer(q, k, v, band):
    offsets = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k)]
    q, k, v = (x.double()[:, None] for x in (q, k, v))
    return reference.attention(q, k, v, *offsets, band=band)[:, 0]


q, k, v = (torch.randn(n, 16) for n in (150, 170, 170))
masks = {
    "causal": Band.make(True),
    "causal, window 40": Band.make(True, (40, 0)),
    "window 30 from the starts": Band.make(window_size=30),
}
for name, band in masks.items():
    errors = [
        (attend(q, k, v, band, x) - right_answer(q, k, v, band)).abs().max() for x in range(4)
    ]
    print(f"{name:<26}", "largest errors of versions 0 to 3:", [f"{float(e):.0e}" for e in errors])

# %% [markdown]
# ## Version 1: skip empty blocks
#
# The loop runs over the blocks from `first` up to, but not including, `end`: those that the band touches.
# In closed form, for the queries `row0 .. last`:
#
# $$\mathrm{first} = \lfloor \max(0, \mathrm{row0} + \mathrm{lo}) / BN \rfloor, \qquad \mathrm{end} = \lceil \min(\mathrm{len}_{kv}, \mathrm{last} + \mathrm{hi} + 1) / BN \rceil .$$
#
# The *first* row extends farthest to the left, the *last* row farthest to the right.
# If the key range is empty, no block is visited.
#
# ## Version 2: bulk and tail
#
# For a causal mask all full blocks come first, then the diagonal.
# So the loop is split in two: a **bulk** without a mask, and a tail with one.
# This is *loop peeling*.
# The body is written once.
# `APPLY_MASK` is a `tl.constexpr`, a value that the compiler knows, so each of the two loops is compiled with only the code that it needs.
#
# ## Version 3: left edge, bulk, right edge
#
# A window also has a left edge.
# The bulk consists of the blocks that *every* row sees completely:
#
# $$\mathrm{bulk\_begin} = \lceil \max(0, \mathrm{last} + \mathrm{lo}) / BN \rceil, \qquad \mathrm{bulk\_end} = \lfloor \min(\mathrm{len}_{kv}, \mathrm{row0} + \mathrm{hi} + 1) / BN \rfloor .$$
#
# Compared with version 1, the first and the last row have changed places, and so have floor and ceiling.
# The range of visited blocks is rounded outward, and the range of full blocks inward.
# Then both are clamped so that first ≤ bulk_begin ≤ bulk_end ≤ end; otherwise a block would be visited twice or not at all.
#
# What does each version save?
# The emulator counts exponentials, loaded elements and *selects*, the elements that `tl.where` computes.

# %%
work = {}
for version, name in enumerate(
    ("v0: all, masked", "v1: empty skipped", "v2: right edge peeled", "v3: both edges peeled")
):
    with emulator.counting() as work[name]:
        attend(q, k, v, masks["causal, window 40"], version)
plots.panels(
    list(work),
    {
        "selects": ([c.selects for c in work.values()], "{:,}"),
        "exponentials": ([c.exponentials for c in work.values()], "{:,}"),
        "elements loaded": ([c.load_elements for c in work.values()], "{:,}"),
    },
    title="150 queries, 170 keys, causal with a window of 40, blocks of 16 x 16",
)

# %% [markdown]
# Skipping empty blocks saves exponentials, loads and products.
# Peeling saves only selects and comparisons.
# Version 2 does not help here, because nearly every tile has a left edge.
#
# ## Version 4: the mirror, for the backward
#
# For dK and dV the backward loops the other way: a tile of keys, over the blocks of queries that see it (chapter 05).
# Key j is seen by the queries j − hi ≤ i ≤ j − lo.
# It is the same band with its sides exchanged and negated, so the same formulas serve.
#
# One thing is not symmetric.
# Queries past the end add to dK, so a query block that hangs over the end is masked (chapter 05 did it by lse = +∞).

# %%
n, m, block = 150, 170, 16
band = masks["causal, window 40"]
start = torch.arange(0, m, block)
stop = (start + block).clamp(max=m)
lens = [torch.full_like(start, x) for x in (n, m)]
ranges = torch.stack(query_ranges(band, start, stop, *lens, block), 1)
print("key tile: first, bulk_begin, bulk_end, end, in blocks of 16 queries")
for t in (0, 1, 2, 5, 9, 10):
    print(f"{t:>8}: {ranges[t].tolist()}")

# %% [markdown]
# ## Version 5: what a mask costs in the machine code
#
# The compiler shows this without a GPU.
# Here is the inner loop in the form that a GPU runs: bf16, base-2 exponentials, 64 x 64 scores on 128 threads, so 32 scores per thread.
# Two instructions of PTX, the assembly language of NVIDIA GPUs, matter here: **setp** compares two numbers and sets a predicate, **selp** selects one of two numbers by a predicate.
#
# The loop is compiled with and without its mask, for a Hopper (sm_90) and a Blackwell (sm_100).
# The cell takes about 20 seconds.
# Predict: how many of each instruction are there per score?

# %%
from jfa.compiled import compile_kernel


@triton.jit
def bf16_loop(
    q_ptr, k_ptr, v_ptr, out_ptr, scale_log2, lo, hi, len_kv, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, APPLY_MASK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :])
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for block in range(blocks):
        j = block * BN + tl.arange(0, BN)
        k = tl.load(k_ptr + j[:, None] * D + d[None, :])
        v = tl.load(v_ptr + j[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale_log2
        if APPLY_MASK:
            distance = j[None, :] - i[:, None]
            seen = (distance >= lo) & (distance <= hi) & (j[None, :] < len_kv)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        m = m_new
    tl.store(out_ptr + i[:, None] * D + d[None, :], acc / l[:, None])


types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*fp32"}
types |= {"scale_log2": "fp32", "lo": "i32", "hi": "i32", "len_kv": "i32", "blocks": "i32"}
reports = {}
for arch in (90, 100):
    for masked in (False, True):
        constants = dict(D=64, BM=64, BN=64, APPLY_MASK=masked)
        name = f"sm_{arch}, {'with' if masked else 'without'} the mask"
        reports[name] = compile_kernel(bf16_loop, types, constants, arch=arch, name=name)
plots.panels(
    list(reports),
    {
        "setp per score": ([r.counts["setp"] / 32 for r in reports.values()], "{:.1f}"),
        "selp per score": ([r.counts["selp"] / 32 for r in reports.values()], "{:.1f}"),
        "registers per thread": ([r.registers for r in reports.values()], "{}"),
    },
    title="the loop body compiled, 32 scores per thread (fbtriton 3.7.4)",
)

# %% [markdown]
# A masked score needs two to three comparisons and three selects; the bulk needs none of them.
# Each score also costs one exponential, which takes about as long as the mask's instructions: per clock, one SM of a B200 computes 16 exponentials or 128 simple operations.
# Six operations per score take 6/128 = 0.047 clocks, and the exponential takes 1/16 = 0.0625.
# So outside the tensor cores a masked block is nearly twice as expensive.
#
# `jfa.compiled.diff` shows the rest of two reports, line by line:

# %%
from jfa.compiled import diff

print(diff(reports["sm_100, without the mask"], reports["sm_100, with the mask"]))

# %% [markdown]
# ## Summary
#
# * A causal mask, a window, or both: a band, i + lo ≤ j ≤ i + hi, two numbers per sequence.
# * With unequal lengths, d = len_kv − len_q says how the two ends are aligned.
# * Blocks are empty (skip), full (no mask) or partial (mask); four numbers per tile say where each kind begins.
# * `APPLY_MASK` as a `tl.constexpr` compiles the body twice: with and without the mask.
# * A row may see nothing in a block, or nothing at all: subtract an anchor, not −∞.
#
# ## Exercises
#
# Open [exercises/06_masks.py](../exercises/06_masks.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 6.1 | the band of a call | 1 | 30 |
# | 6.2 | the four block numbers, inside a kernel | 2 | 40 |
# | 6.3 | the peeled kernel of a jagged window | 3 | 65 |
# | 6.4 | bug hunt: counted from the wrong end | 2 | 15 |
# | 6.5 | bug hunt: the row that may see nothing | 1 | 20 |
# | 6.6 | predict pairs, full and partial blocks | 2 | 35 |
#
# ## Checkpoint
#
# <details><summary>Causal, bottom right, 3 queries and 10 keys. How many pairs count?</summary>
#
# d = 7.
# Query i sees the keys 0 .. i + 7, so the three queries see 8, 9 and 10 keys: 27 pairs.
# </details>
#
# <details><summary>A band with lo = 5 and hi = 2. How many blocks are visited?</summary>
#
# None: no j satisfies both conditions.
# The formulas for `first` and `end` alone may still give a block, so the case lo > hi needs a test of its own.
# </details>
#
# <details><summary>"This block is full, but its last key is past the sequence's end." What is wrong with this sentence?</summary>
#
# Such a block cannot be full.
# The keys past the end must be masked, so it is partial.
# </details>
#
# <details><summary>Why is it safe that rows past the last query are never masked in the forward?</summary>
#
# Each row has its own softmax, and the rows past the end are not stored.
# </details>
#
# ## Try this
#
# - In `attend`, extend version 3's bulk by one block (`bulk_end + 1`).
#   Which masks show the mistake, and which do not?
# - Set `BM = 64` and `BN = 16` in the share picture (`block_kinds(band, n, n, 64, 16)`).
#   Why does the share of partial blocks rise?
# - Compile `bf16_loop` with a causal mask only (`distance <= hi`).
#   How many selects per score are left?
#
# ## Pitfalls
#
# A cell shows each of them.
#
# **−1e9 is a score like any other.** A row that may see no key has only such scores.
# Its maximum is −1e9, and exp(−1e9 + 1e9) = 1.
# So the row averages *everything*:

# %%
s = torch.randn(3, 6)
allowed = torch.ones(3, 6, dtype=torch.bool).tril(-1)  # row 0 sees nothing
values = torch.arange(6.0)
for name, hole in (("-1e9", -1e9), ("-inf", -math.inf)):
    weights = torch.softmax(s.masked_fill(~allowed, hole), 1)
    print(
        f"{name:>5}: row 0 gives",
        (weights @ values)[0].item(),
        "| the mean of all values is",
        values.mean().item(),
    )
top = s.masked_fill(~allowed, -math.inf).amax(1, keepdim=True)
anchor = torch.where(top == -math.inf, 0.0, top)
weights = torch.exp(s.masked_fill(~allowed, -math.inf) - anchor)
print(
    "-inf with an anchor: row 0 gives",
    ((weights @ values) / weights.sum(1).clamp(min=1e-30))[0].item(),
)

# %% [markdown]
# The first line is the worst of the three, because it is a plausible number.
# The second is NaN, which will be noticed.
# (In fp16, whose largest number is 65,504, −1e9 becomes −∞ anyway, and code written for −1e9 produces NaN.)
# The kernel that this course grew from, tlx_jfa (at commit 2889aef of a public fork), masks with −1.0e9, and under a window it also masks the blocks of its bulk loop.
#
# **Triton's `//` is not Python's.** Python rounds down, Triton rounds toward zero as C does.
# They differ for negative numbers, and `row0 + lo` is negative for every window near the start:


# %%
@triton.jit
def divide(x_ptr, out_ptr, BN: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0), tl.load(x_ptr + tl.program_id(0)) // BN)


x = torch.tensor([-17, -16, -5, 5, 17], dtype=torch.int32)
quotients = torch.empty_like(x)
divide[(5,)](x, quotients, BN=16)
print("numbers       ", x.tolist())
print("Python x // 16", [number // 16 for number in x.tolist()])
print("Triton x // 16", quotients.tolist())

# %% [markdown]
# So clamp to 0 *before* the division; then both agree.
#
# **A bulk rounded the wrong way.** Each of the ranges below has one wrong rounding.
# The cell counts over all tiles of 40 small problems: in what share of them would the bulk contain a block that needs a mask?

# %%


def ranges_of(band, n, m, wrong):
    start = torch.arange(0, n, 16)
    stop = (start + 16).clamp(max=n)
    lens = [torch.full_like(start, x) for x in (n, m)]
    first, bulk_begin, bulk_end, end = key_ranges(band, start, stop, *lens, 16)
    if wrong == "bulk_end rounded up":
        bulk_end = torch.minimum(bulk_end + 1, end)
    if wrong == "bulk_begin rounded down":
        bulk_begin = torch.maximum(bulk_begin - 1, first)
    if wrong == "bulk runs to the end":
        bulk_end = torch.where(bulk_end < end, end, bulk_end)
    return first, bulk_begin, bulk_end, end


def wrong_tiles(mistake):
    """Return the share of tiles, in %, whose bulk contains a block that is not full."""
    wrong = tiles = 0
    for n in (1, 16, 50, 64, 100):
        for m in (5, 32, 64, 90):
            for band in (Band.make(True), Band.make(True, (20, 0))):
                _, bulk_begin, bulk_end, _ = ranges_of(band, n, m, mistake)
                kinds = block_kinds(band, n, m, 16, 16)
                for t, row in enumerate(kinds):
                    wrong += bool((row[int(bulk_begin[t]) : int(bulk_end[t])] != 2).any())
                    tiles += 1
    return 100 * wrong / tiles


mistakes = ["none", "bulk_end rounded up", "bulk_begin rounded down", "bulk runs to the end"]
plots.panels(
    mistakes,
    {
        "tiles with an unmasked block that needs a mask, %": (
            [wrong_tiles(x) for x in mistakes],
            "{:.0f}",
        )
    },
    title="one rounding wrong, 40 small problems",
)

# %% [markdown]
# | pitfall | where you saw it |
# |---|---|
# | d = len_kv − len_q forgotten, right for equal lengths | the first picture |
# | −∞ minus −∞ in a row whose block is masked away | version 0's anchor |
# | −1e9 averages what it should hide | row 0 above |
# | truncation of negative numbers | `divide` |
# | a rounding in the wrong direction | the last picture |
# | peeling a narrow window and expecting a gain | the share of partial blocks |
#
# ## What differs on a real GPU
#
# - A second loop costs code size, and its loads start late: those of the first bulk block are not in flight while the left edge runs.
#   This was measured on an H200: a single loop for bulk and edges made one forward faster (shape pma128, 0.2095 → 0.1997 ms), while two loops stayed faster for other kernels ([docs/portable-notes.md](../docs/portable-notes.md), version 13, 2026-11-29).
# - The mask's instructions run in parallel with the tensor cores.
#   Where the tensor cores are the limit, the mask costs no time.
#   Where the softmax is the limit (chapter 09), it does.
# - For Blackwell, the compiler can hold a row's causal mask as bits of one register and move them to predicates in one instruction (facebookexperimental/triton, pull request 1737): fewer comparisons, same result.
#
# ## Verified here, and not
#
# All versions ran on the emulator and were compared with the fp64 reference for three masks.
# The instruction counts come from fbtriton 3.7.4, which compiled the loops when this notebook ran; nothing was timed here.
# The comparison of clocks is arithmetic with the rates of the FlashAttention-4 paper.
#
# ## Sources
#
# - Dao-AILab/flash-attention, its README (version 2.1 on): causal masks aligned to the bottom right, windows (left, right) around that diagonal.
# - FlashAttention-4, arXiv 2603.05451 (2026): 16 exponentials per clock and SM on Blackwell.
# - facebookexperimental/triton, pull request 1737 (2026). tlx_jfa at commit 2889aef of a public fork of ads_model_kernel_library, read 2026-11.
# - NVIDIA, *PTX ISA*: setp, selp.
#   `jfa/masks.py` and `jfa/kernels/common/band.py`: the formulas as the package has them.
#
# Next: [07 GQA and broadcast-Q](07_gqa_and_shared_queries.py).
