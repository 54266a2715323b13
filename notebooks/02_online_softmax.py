# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 Online softmax
#
# **Goals.** After this chapter you
# * can compute a softmax that neither overflows nor underflows,
# * can compute attention block by block, without ever holding a whole row of scores, and say why the result is exact,
# * know what the LSE (log-sum-exp) is good for: merging partial results, and later the backward pass.
#
# **Time** 40 minutes to read, 175 for the exercises.
# **You need** chapter 01.
#
# ## Mental model: a running total in a currency that changes
#
# You add up amounts, measured in a currency that the largest amount so far defines.
# When a larger amount comes along, the total so far must be converted, by one factor.
# Then you go on in the new currency.
# At the end you have the exact total, and you have looked at each amount once.
#
# In the picture one query meets 16 keys, four at a time.
# Above: the scores, and the running maximum **m**, the currency.
# Below: the running sum **l**.
# When m rises, the old sum (hatched) is converted (dotted), and the block's own sum is added on top.

# %%
import math

import torch

from jfa import layout, plots, reference
from jfa.masks import Band

generator = torch.Generator().manual_seed(4)
lift = torch.tensor([0.0, 1.5, 0.0, 2.5]).repeat_interleave(4)
scores = torch.randn(16, generator=generator) + lift
plots.online_walk(scores.tolist(), block=4)

# %% [markdown]
# Look at the third block: its scores are all below m.
# There the factor is 1, and nothing is converted.
# Only a *new* maximum requires a conversion.
#
# ## The math
#
# For one query, scores s_j (j = 1 ... n) and values v_j (rows of D numbers):
#
# $$ o = \frac{\sum_j e^{s_j} v_j}{\sum_j e^{s_j}} = \frac{\sum_j e^{s_j - m} v_j}{\sum_j e^{s_j - m}} \quad \text{for every number } m. $$
#
# The second form multiplies numerator and denominator of the first by the same number, e^(−m).
# So m may be chosen freely.
# The largest score is the choice that keeps every exponential at most 1, and at least one of them at exactly 1.
#
# **Online.** Keep three things while the keys come in blocks:
#
# | | shape, for n queries | meaning |
# |---|---|---|
# | m | [n] | largest score so far |
# | l | [n] | sum of exp(s − m) so far |
# | acc | [n, D] | sum of exp(s − m) · v so far |
#
# A block with scores S [n, block] and values V [block, D] changes them to
#
# $$ m' = \max(m, \max_j S_{\cdot j}), \quad f = e^{m - m'}, \quad l' = f\,l + \sum_j e^{S_{\cdot j} - m'}, \quad acc' = f\,acc + e^{S - m'} V. $$
#
# Here f is the conversion factor.
# At the end o = acc / l, and the **log-sum-exp** is LSE = m + ln l.
#
# The likely mistake is to convert l and forget acc, or the reverse.
# Both are in the old currency.
#
# ## Version 0: as written
#
# This is the formula without m.
# The exponential overflows above 88.7 in float32 and above 11.09 in float16, and scores around 100 are not unusual.


# %%
def softmax_as_written(s):
    e = torch.exp(s)
    return e / e.sum()


three = torch.tensor([0.0, 1.0, 2.0])
for shift in (0.0, 50.0, 100.0, -110.0):
    print(f"scores near {shift:6.0f}:", softmax_as_written(three + shift))

# %% [markdown]
# All four lines should be equal.
# Too large: inf / inf is NaN.
# Too small: 0 / 0 is NaN.
#
# ## Version 1: two passes
#
# Subtract the maximum first.
# This reads all scores twice, so all of them must be kept.


# %%
def softmax_stable(s):
    e = torch.exp(s - s.max())
    return e / e.sum()


for shift in (0.0, 50.0, 100.0, -110.0):
    print(f"scores near {shift:6.0f}:", softmax_stable(three + shift))

# %% [markdown]
# ## Version 2: one pass, one number at a time
#
# Here is the running total in its smallest form: plain Python, one score after another.
# `m` starts at minus infinity and `l` at 0, the state before the first score.


# %%
def running_sum(numbers):
    """Return the maximum m and the sum l of exp(s - m) over all numbers s."""
    m, l = -math.inf, 0.0
    for s in numbers:
        if s > m:
            l = l * math.exp(m - s) + 1.0  # convert, then add exp(s - s)
            m = s
        else:
            l = l + math.exp(s - m)
    return m, l


m, l = running_sum(scores.tolist())
print("m + ln l  =", m + math.log(l))
print("logsumexp =", float(torch.logsumexp(scores.double(), 0)))

# %% [markdown]
# exp(−∞ − s) is 0, so the first number needs no special case.
# Two workers who each processed half of the numbers can merge their results in the same way.
# That is exercise 2.2, and it is how a long sequence is split among several workers.
#
# ## Version 3: attention of one sequence, block by block
#
# The same for all queries of a sequence at once, and with acc.
# The loop is over blocks of keys.
# At any time only [n, block] scores exist, never [n, n].


# %%
def apart(a, b):
    """Return the largest difference between two tensors."""
    return float((a - b).abs().max())


def attention_in_blocks(q, k, v, block):
    """Attend from every query to every key, in blocks of keys: q, k, v [n, D] -> [n, D]."""
    m = torch.full((len(q), 1), -torch.inf)
    l = torch.zeros(len(q), 1)
    acc = torch.zeros_like(v)
    for k_block, v_block in zip(k.split(block), v.split(block)):
        s = q @ k_block.T / q.shape[1] ** 0.5  # [n, block]
        m_new = torch.maximum(m, s.max(1, keepdim=True).values)
        p = torch.exp(s - m_new)
        f = torch.exp(m - m_new)
        l = f * l + p.sum(1, keepdim=True)
        acc = f * acc + p @ v_block
        m = m_new
    return acc / l


q, k, v = (torch.randn(200, 32, generator=generator) for _ in range(3))
whole = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
print("blocks of 16 against PyTorch:", apart(attention_in_blocks(q, k, v, 16), whole))

# %% [markdown]
# This is not an approximation.
# The block size changes the order of additions, so the last digit may differ, and nothing else.
# Predict before you look: does the error grow with the number of blocks?

# %%
exact = torch.softmax(q.double() @ k.double().T / 32**0.5, 1) @ v.double()
sizes = [1, 2, 4, 8, 16, 32, 64, 128]
errors = [apart(attention_in_blocks(q, k, v, size), exact) for size in sizes]
plots.lines(
    sizes,
    {"largest error": errors},
    title="float32 in blocks against float64",
    xlabel="keys per block",
    ylabel="error",
    log_x=True,
    from_zero=True,
)

# %% [markdown]
# A few units in the seventh digit, at every size: that is the precision of float32.
#
# The blocks save memory.
# The number of elements that must exist at once, for one head with D = 128 and blocks of 128 keys:

# %%
lengths_n = [512, 1024, 2048, 4096, 8192, 16384]
plots.lines(
    lengths_n,
    {
        "all scores: n x n": [n * n for n in lengths_n],
        "one block and acc: n x (128 + 128)": [n * 256 for n in lengths_n],
    },
    title="elements that must exist at once",
    xlabel="n",
    ylabel="elements",
    log_x=True,
    log_y=True,
)

# %% [markdown]
# ## Version 4: packed sequences
#
# For a packed batch, put an outer loop over the sequences around it, and take the bounds of queries and keys from their offsets.
# The package's `blockwise_attention` is this loop, with masks and heads; every kernel of this course computes the same recurrence.
# Here it is compared with attention that really pads, on the lengths of chapter 01, with D = 32 and blocks of 16.
# (*Causal* means that a query sees only its own position and earlier ones; chapter 06 is about such masks.)

# %%
lengths = [7, 3, 19, 5, 11]
offsets = layout.offsets_from_lengths(lengths)
n = layout.lengths_from_offsets(offsets)
torch.manual_seed(0)
packed = [torch.randn(45, 1, 32) for _ in range(3)]
for causal in (False, True):
    blocks = reference.blockwise_attention(*packed, offsets, offsets, block_size=16, causal=causal)
    rectangles = [layout.pad(x, offsets) for x in packed]
    padded, _ = reference.padded_attention(*rectangles, n, n, band=Band.make(causal))
    print(f"causal={causal}: largest difference {apart(blocks, layout.unpad(padded, offsets)):.1e}")

# %% [markdown]
# ## Version 5: heads, and heads that share
#
# With H heads the packed tensors are [total, H, D], and each head attends independently of the others.
# In **grouped-query attention** (GQA) there are fewer key/value heads than query heads.
# Query head h reads key/value head h // (H // H_kv), so neighboring query heads share one.
#
# The likely mistake is h % H_kv.
# The shapes agree and the outputs look plausible, but a model trained with one rule gives wrong results with the other.

# %%
H, H_kv = 6, 2
sharing = torch.zeros(H, H_kv, dtype=torch.bool)
other = torch.zeros(H, H_kv, dtype=torch.bool)
for h in range(H):
    sharing[h, h // (H // H_kv)] = True
    other[h, h % H_kv] = True
plots.score_grids(
    {"h // (H // H_kv)": sharing, "h % H_kv, wrong": other},
    title="who reads whom",
    xlabel="key/value head",
    ylabel="query head",
    counts=False,
)

# %% [markdown]
# PyTorch's own function gives a second opinion, on padded inputs with a mask: six query heads over two key/value heads.

# %%
q = torch.randn(45, H, 16, generator=generator)
k, v = (torch.randn(45, H_kv, 16, generator=generator) for _ in range(2))
mask = reference.padded_mask(n, n, 19, 19)[:, None]  # [B, 1, M, M]
padded = (layout.pad(x, offsets).transpose(1, 2) for x in (q, k, v))  # [B, heads, M, D]
by_torch = torch.nn.functional.scaled_dot_product_attention(
    *padded, attn_mask=mask, enable_gqa=True
)
by_torch = layout.unpad(by_torch.transpose(1, 2), offsets)

out, lse = reference.blockwise_attention(q, k, v, offsets, offsets, block_size=16, return_lse=True)
print("against scaled_dot_product_attention:", apart(out, by_torch))
print("out", tuple(out.shape), "| lse", tuple(lse.shape), "= [heads, rows]")

# %% [markdown]
# ## Version 6: merge two halves by their LSE
#
# Give one worker the first half of each sequence's keys, and another the rest.
# Each returns its normalized output and its LSE.
# That is enough to compute the whole: if a and b are the two LSEs, the whole has the LSE L = ln(e^a + e^b).
# Its output is the sum of both outputs, weighted by e^(a − L) and e^(b − L).
# The package's `merge_attention` does this for packed outputs.

# %%
half = (n + 1) // 2
starts, ends = offsets[:-1].tolist(), offsets[1:].tolist()
first = torch.tensor([r for a, h in zip(starts, half.tolist()) for r in range(a, a + h)])
second = torch.tensor([r for a, b, h in zip(starts, ends, half.tolist()) for r in range(a + h, b)])
parts = []
for rows, counts in ((first, half), (second, n - half)):
    key_offset = layout.offsets_from_lengths(counts)
    parts += reference.attention(q, k[rows], v[rows], offsets, key_offset, return_lse=True)
merged, merged_lse = reference.merge_attention(*parts)
print("merged against whole:", apart(merged, out), "| LSE:", apart(merged_lse, lse))

# %% [markdown]
# The same merge is used when a sequence is split over several SMs, the processors of a GPU (chapter 08), or when part of the keys is on another machine.
# The backward pass needs the LSE as well: P = exp(S − LSE) recomputes any block of the weights (chapter 05).
#
# ## Version 7: one set of queries for all sequences
#
# *Attention pooling* turns a history of any length into a fixed number of rows.
# A few learned queries, shared by all sequences, attend to the keys of each sequence.
# Q has L rows and is the same for every sequence b; output rows b·L to b·L + L − 1 belong to sequence b.
# The package calls this **broadcast-Q**.

# %%
shared = torch.randn(2, 1, 16, generator=generator)  # L = 2 queries
history_offset = layout.offsets_from_lengths([4, 0, 30])
history_k, history_v = (torch.randn(34, 1, 16, generator=generator) for _ in range(2))
pooled = reference.attention(shared, history_k, history_v, None, history_offset, broadcast_q=True)
zeros = torch.nonzero((pooled[:, 0] == 0).all(1)).flatten().tolist()
print("pooled", tuple(pooled.shape), "| rows of zeros:", zeros, "(no history)")

# %% [markdown]
# For 10,000 short histories, a loop over sequences is almost pure overhead.
# Exercise 2.6 finds a way without one.
#
# ## How often does the maximum rise?
#
# If scores come in random order, the n-th block holds a new maximum with probability 1/n.
# So the number of conversions grows only like the logarithm of the number of blocks.
# This matters on Blackwell, where each conversion reads and writes acc in a separate memory: chapter 12 skips most of them.

# %%
counts = [1, 2, 4, 8, 16, 32, 64]
trials = torch.randn(2000, 64, 16, generator=generator).amax(2)  # the maximum of each block of 16
new = trials.cummax(1).values.diff(dim=1) > 0  # does block i + 1 hold a new maximum?
rises = [1 + float(new[:, : c - 1].float().sum(1).mean()) for c in counts]
harmonic = [sum(1 / i for i in range(1, c + 1)) for c in counts]
plots.lines(
    counts,
    {"counted over 2000 rows": rises, "1 + 1/2 + ... + 1/blocks": harmonic},
    title="blocks in which the maximum rises",
    xlabel="blocks",
    ylabel="rises",
    log_x=True,
)

# %% [markdown]
# ## Summary
#
# * Subtracting any m leaves a softmax unchanged; the maximum keeps it in range.
# * Online: m, l and acc are updated block by block, and a new maximum converts l and acc by one factor.
# * The result is exact up to rounding, and only one block of scores exists at a time.
# * LSE = m + ln l is enough to merge partial results, and to recompute the weights later.
#
# ## Exercises
#
# Open [exercises/02_online_softmax.py](../exercises/02_online_softmax.py).
# In 2.3 to 2.5 an answer that computes all scores at once gets "right answer, wrong method": the method is the point.
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 2.1 | a softmax with a mask, and its LSE | 1 | 20 |
# | 2.2 | merge two halves | 2 | 15 |
# | 2.3 | blockwise causal attention | 2 | 35 |
# | 2.4 | a packed batch, two lengths each | 2 | 45 |
# | 2.5 | shared key heads (GQA) | 3 | 35 |
# | 2.6 | one set of queries for all sequences | 3 | 25 |
#
# ## Checkpoint
#
# <details><summary>All 128 keys of a query have the same score, 500. What are m, l and the LSE?</summary>
#
# m = 500, l = 128, LSE = 500 + ln 128 ≈ 504.85.
# The weights are 1/128 each.
# </details>
#
# <details><summary>Blocks come in falling order: the first holds all the largest scores. How often is acc converted?</summary>
#
# Never, after the first block.
# The factor is 1 from then on.
# </details>
#
# <details><summary>Could m be any upper bound of the scores instead of the maximum?</summary>
#
# In exact arithmetic any number will do.
# In float32 the bound must not be much larger than the largest score: with a bound 110 above, every exponential is 0.
# </details>
#
# <details><summary>Why is the LSE of a query without keys −∞, and not 0?</summary>
#
# It is the logarithm of an empty sum, ln 0.
# And merging then needs no special case: the weight e^(−∞ − L) is 0.
# </details>
#
# ## Try this
#
# * In `attention_in_blocks`, start m at 0 instead of −∞ and give it scores near −200.
#   Predict the output first.
# * Sort the keys so that scores rise along the sequence, and count the conversions with the last picture's code.
#   Then let them fall.
#
# ## Pitfalls
#
# A cell below each one shows its effect.
#
# **acc is not converted.** The bug stays hidden if the first block holds the maximum.
# Here are two orders of the same keys, and the error of the broken version:


# %%
def broken_in_blocks(q, k, v, block):
    """Compute attention_in_blocks with one factor forgotten."""
    m, l, acc = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1), torch.zeros_like(v)
    for k_block, v_block in zip(k.split(block), v.split(block)):
        s = q @ k_block.T / q.shape[1] ** 0.5
        m_new = torch.maximum(m, s.max(1, keepdim=True).values)
        p = torch.exp(s - m_new)
        l = torch.exp(m - m_new) * l + p.sum(1, keepdim=True)
        acc = acc + p @ v_block  # the factor is missing
        m = m_new
    return acc / l


direction = torch.randn(1, 32, generator=generator)
q1 = direction.repeat(64, 1)
k1 = direction * torch.linspace(3, 0, 64)[:, None]  # scores fall along the sequence
v1 = torch.randn(64, 32, generator=generator)
for name, order in (
    ("falling scores", torch.arange(64)),
    ("rising scores", torch.arange(63, -1, -1)),
):
    right = attention_in_blocks(q1, k1[order], v1[order], 16)
    broken = broken_in_blocks(q1, k1[order], v1[order], 16)
    print(f"{name}: error {apart(broken, right):.2g}")

# %% [markdown]
# A single test with falling scores would not have found it.
# That is why the checks of this course use several orders, huge scores and very negative ones.
#
# **m starts at 0.** Then m never falls below 0.
# For scores near −200 every exponential is 0, and so is l.

# %%
s = torch.tensor([-200.0, -201.0, -202.0])
m = torch.clamp(s.max(), min=0.0)  # the effect of starting at 0
print("exponentials with m = 0:          ", torch.exp(s - m))
print("exponentials with the true maximum:", torch.exp(s - s.max()))

# %% [markdown]
# **−∞ minus −∞.** If a block, or a whole row, is masked away, m stays −∞ and s − m is NaN.
# The cure is to subtract 0 there: exp(−∞ − 0) is 0, as it should be.

# %%
masked = torch.full((3,), -torch.inf)
print("naive:", torch.exp(masked - masked.max()))
print("cured:", torch.exp(masked - 0.0))

# %% [markdown]
# **A logarithm of another base.** GPUs compute powers of 2, so kernels often keep the LSE in base 2.
# If the two are mixed up, outputs stay right, but merged results and gradients are wrong.
# In this course every LSE is a natural logarithm.
# The error of one merge with the wrong base:

# %%
in_base_2 = [lse / math.log(2) for lse in (parts[1], parts[3])]
wrong, _ = reference.merge_attention(parts[0], in_base_2[0], parts[2], in_base_2[1])
print("merged with base-2 numbers:", apart(wrong, out), "| merged right:", apart(merged, out))

# %% [markdown]
# ## What differs on a GPU
#
# * exp(x) is computed as 2^(x·log₂e): one multiplication and the hardware's power of 2.
#   The factor log₂e is combined with the scale of the scores.
# * The products run on tensor cores in bfloat16 or float16, with float32 sums. m, l and acc stay float32.
#   The weights are rounded to 16 bits before they are multiplied by V.
# * Blocks have 64 to 128 keys, and several are being loaded at once.
#   The recurrence is the one above.
# * A kernel may deliberately keep an old m while it is close enough to the maximum, as in chapter 12.
#
# ## What was verified here
#
# Everything ran on a CPU in float32.
# Blockwise equals padded within 5·10⁻⁷ on the lengths of chapter 01, causal or not; six heads over two agree with PyTorch's own function up to rounding.
# The tests of `jfa.reference` repeat it in float64 for random lengths, masks, heads and scores of ±300, gradients too.
# Element counts are arithmetic, not measurements.
# No GPU was used.
#
# ## Sources
#
# * Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018: the running maximum and sum.
# * Dao et al., *FlashAttention*, 2022, section 3.1: the same with acc, in blocks.
# * Ainslie et al., *GQA*, 2023: shared key/value heads.
# * The lengths, D = 32 and blocks of 16 with seed 0: the chapter this course grew from.
#
# Next: [03 first Triton kernels](03_first_triton_kernels.py).
