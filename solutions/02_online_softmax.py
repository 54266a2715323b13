# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 02: online softmax
#
# The chapter is `notebooks/02_online_softmax.py`.
# Each exercise stands alone.
#
# `torch.softmax` and `torch.logsumexp` are forbidden here, in all their forms: you are building them.
# So are `jfa.layout` (except where an exercise gives it to you) and torch's nested tensors.
# LSE is the natural logarithm of a row's sum of exponentials.
# A row that may see no key has output 0 and LSE -inf.
#
# Scores may lie anywhere between -50,000 and 50,000, in any order along the keys, unless an exercise says otherwise.
# Results are tensors of their own and share no memory with the inputs.
# Limits on operations and memory hold for NumPy and Python lists as well.

# %% tags=["setup"]
import torch

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 2.1 A softmax with a mask, and its LSE
#
# *Difficulty 1 of 3, 20 minutes.*
#
# The chapter's stable softmax had no mask.
# Add one.
# Where `allowed` is False, the score does not exist: it may be any number, even larger than all others, and it must neither get a weight nor influence one.
# A row may have no allowed score at all: its weights are 0 and its LSE is -inf.
# Scores lie anywhere between -10,000 and 10,000.


# %% tags=["ex-2.1"]
def masked_softmax(scores, allowed):
    """Return (weights [R, C], lse [R]); scores: [R, C] float, allowed: [R, C] bool."""
    ### BEGIN SOLUTION
    scores = torch.where(allowed, scores, -torch.inf)
    top = scores.amax(1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(1, keepdim=True)
    lse = top + torch.log(total)
    return weights / torch.where(total > 0, total, 1.0), lse[:, 0]
    ### END SOLUTION


# %%
check("2.1", masked_softmax)

# %% [markdown]
# ## 2.2 Merge two halves
#
# *Difficulty 2 of 3, 15 minutes.*
#
# Two workers processed different keys for the same n queries.
# Each returns its maximum `m` [n], its sum `l` [n] of exp(score - m), and its unnormalized output `acc` [n, D], the sum of exp(score - m) * value.
# Merge them into the `(m, l, acc)` that a single worker would return for all keys.
#
# A worker that saw no key for a query returns m = -inf, l = 0, acc = 0 for it.
# That may hold for both.
# The limit: **at most 2 exponentials** (calls of `torch.exp`, or of any function that exponentiates: `exp2`, `e ** x`, ...; each may work on a whole tensor), and **no number leaves torch as a Python float**.


# %% tags=["ex-2.2"]
def merge(m1, l1, acc1, m2, l2, acc2):
    """Return (m [n], l [n], acc [n, D]) of both halves together; each half has the same shapes."""
    ### BEGIN SOLUTION
    m = torch.maximum(m1, m2)
    anchor = torch.where(m == -torch.inf, 0.0, m)
    share1, share2 = torch.exp(m1 - anchor), torch.exp(m2 - anchor)
    l = l1 * share1 + l2 * share2
    acc = acc1 * share1[:, None] + acc2 * share2[:, None]
    return m, l, acc
    ### END SOLUTION


# %%
check("2.2", merge)

# %% [markdown]
# ## 2.3 Blockwise causal attention
#
# *Difficulty 2 of 3, 35 minutes.*
#
# The chapter's blockwise attention let every query see every key.
# Make it causal: query i sees the keys 0..i.
# Take the keys in blocks of `block` (the last one may be shorter) and return the LSE as well.
# Scores are scaled by 1/sqrt(D).
#
# The limit is the point of the exercise: **no tensor with more than n x max(block, D) elements**, and **no more than 12 times that alive at the same time** in all tensors you make together, lists included.
# A whole n x n matrix of scores, or a mask of that size, is too large, also as a list of rows.
# And `block` decides the blocks: **one exponential for the scores of a whole block of keys**, not one per key.


# %% tags=["ex-2.3"]
def causal_attention(q, k, v, block):
    """Return (out [n, D], lse [n]); q, k, v: [n, D], block: keys per block."""
    ### BEGIN SOLUTION
    n, dim = q.shape
    row = torch.arange(n)[:, None]
    m = q.new_full((n, 1), -torch.inf)
    l = q.new_zeros(n, 1)
    acc = torch.zeros_like(v)
    for start in range(0, n, block):
        column = torch.arange(start, min(start + block, n))
        scores = q @ k[start : start + block].T / dim**0.5
        scores = torch.where(column <= row, scores, -torch.inf)
        new_m = torch.maximum(m, scores.amax(1, keepdim=True))
        weights = torch.exp(scores - new_m)
        shrink = torch.exp(m - new_m)
        l = l * shrink + weights.sum(1, keepdim=True)
        acc = acc * shrink + weights @ v[start : start + block]
        m = new_m
    return acc / l, (m + torch.log(l))[:, 0]
    ### END SOLUTION


# %%
check("2.3", causal_attention)

# %% [markdown]
# ## 2.4 A packed batch, two lengths each
#
# *Difficulty 2 of 3, 45 minutes.*
#
# Cross-attention on packed tensors: sequence b owns the rows `q_offsets[b] : q_offsets[b + 1]` of `q` and the rows `k_offsets[b] : k_offsets[b + 1]` of `k` and `v`.
# Its queries see all its keys and no others.
# Either length may be 0.
# After the last offset, `k` and `v` have rows that belong to no sequence and hold NaN.
#
# Take the keys in blocks again: **no tensor with more than total_q x max(block, D) elements**, no more than 12 times that alive at the same time, and one exponential for the scores of a whole block of keys.


# %% tags=["ex-2.4"]
def packed_attention(q, k, v, q_offsets, k_offsets, block):
    """Return (out [total_q, D], lse [total_q]); q: [total_q, D], k, v: [total_kv, D]."""
    ### BEGIN SOLUTION
    out = torch.zeros_like(q)
    lse = q.new_full((len(q),), -torch.inf)
    for b in range(len(q_offsets) - 1):
        mine = slice(int(q_offsets[b]), int(q_offsets[b + 1]))
        first, last = int(k_offsets[b]), int(k_offsets[b + 1])
        queries = q[mine] / q.shape[1] ** 0.5
        m = q.new_full((len(queries),), -torch.inf)
        l = torch.zeros_like(m)
        acc = torch.zeros_like(queries)
        for start in range(first, last, block):
            end = min(start + block, last)
            scores = queries @ k[start:end].T
            new_m = torch.maximum(m, scores.amax(1))
            weights = torch.exp(scores - new_m[:, None])
            shrink = torch.exp(m - new_m)
            l = l * shrink + weights.sum(1)
            acc = acc * shrink[:, None] + weights @ v[start:end]
            m = new_m
        if last > first:
            out[mine] = acc / l[:, None]
            lse[mine] = m + torch.log(l)
    return out, lse
    ### END SOLUTION


# %%
check("2.4", packed_attention)

# %% [markdown]
# ## 2.5 Shared key heads (GQA)
#
# *Difficulty 3 of 3, 35 minutes.*
#
# Now with heads.
# There are H query heads and fewer key/value heads, H_kv.
# Query head h reads key/value head **h // (H // H_kv)**: neighboring query heads share one.
# There is one sequence with few queries and many keys, and every query sees every key.
# The LSE has one row per query, like the output: [n_q, H].
# (The package keeps it transposed, [H, n_q], so that a kernel writes contiguous numbers per head.)
#
# The point of sharing is that K and V are small, so do not expand them: **no tensor with more than n_q x H x max(block, D) elements**.
# Repeating K for each query head breaks that limit, and so does a copy of all of K.
# Together, no more than 12 times that alive at the same time.
# `block` decides the blocks, as in 2.3: one exponential for the scores of a whole block of keys.


# %% tags=["ex-2.5"]
def gqa_attention(q, k, v, block):
    """Return (out [n_q, H, D], lse [n_q, H]); q: [n_q, H, D], k, v: [n_kv, H_kv, D]."""
    ### BEGIN SOLUTION
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim)
    m = q.new_full((n, kv_heads, heads // kv_heads), -torch.inf)
    l = torch.zeros_like(m)
    acc = torch.zeros_like(grouped)
    for start in range(0, len(k), block):
        scores = torch.einsum("ihgd,jhd->ihgj", grouped, k[start : start + block]) / dim**0.5
        new_m = torch.maximum(m, scores.amax(-1))
        weights = torch.exp(scores - new_m[..., None])
        shrink = torch.exp(m - new_m)
        l = l * shrink + weights.sum(-1)
        update = torch.einsum("ihgj,jhd->ihgd", weights, v[start : start + block])
        acc = acc * shrink[..., None] + update
        m = new_m
    out, lse = acc / l[..., None], m + torch.log(l)
    return out.reshape(n, heads, dim), lse.reshape(n, heads)
    ### END SOLUTION


# %%
check("2.5", gqa_attention)

# %% [markdown]
# ## 2.6 One set of queries for all sequences (broadcast-Q)
#
# *Difficulty 3 of 3, 25 minutes.*
#
# Attention pooling has a few learned queries, the same for every sequence: `q` is `[L, D]`.
# Sequence b's answer fills the output rows `b * L` to `b * L + L - 1`.
# A sequence without keys gets zeros.
#
# With so few queries a loop over sequences is nearly all overhead.
# The packed layout offers something better: one product `k @ q.T` gives all scores of all sequences, one row per key.
# Then you need a maximum and two sums *per sequence*, along the packed rows.
# The limit: **at most 50 torch operations, however many sequences there are** (NumPy's count as well).
# `jfa.layout.sequence_ids(k_offsets, total)` returns the sequence of each key row; look at `scatter_reduce` (with "amax") and `index_add`.

# %% tags=["ex-2.6"]
from jfa.layout import sequence_ids


def pool(q, k, v, k_offsets):
    """Return the pooled rows [B * L, D]; q: [L, D], k, v: [total_kv, D], k_offsets: [B+1] int32."""
    ### BEGIN SOLUTION
    batches, length, dim = len(k_offsets) - 1, len(q), q.shape[1]
    owner = sequence_ids(k_offsets, len(k))
    scores = k @ q.T / dim**0.5
    m = scores.new_full((batches, length), -torch.inf)
    m = m.scatter_reduce(0, owner[:, None].expand_as(scores), scores, "amax")
    weights = torch.exp(scores - m[owner])
    l = torch.zeros_like(m).index_add(0, owner, weights)
    acc = q.new_zeros(batches, length, dim).index_add(0, owner, weights[:, :, None] * v[:, None, :])
    out = acc / torch.where(l > 0, l, 1.0)[:, :, None]
    return out.reshape(batches * length, dim)
    ### END SOLUTION


# %%
check("2.6", pool)
