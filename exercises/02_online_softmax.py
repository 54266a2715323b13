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
    raise NotImplementedError("2.1: not started")  # YOUR CODE


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
    raise NotImplementedError("2.2: not started")  # YOUR CODE


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
    raise NotImplementedError("2.3: not started")  # YOUR CODE


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
    raise NotImplementedError("2.4: not started")  # YOUR CODE


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
    raise NotImplementedError("2.5: not started")  # YOUR CODE


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
    raise NotImplementedError("2.6: not started")  # YOUR CODE


# %%
check("2.6", pool)
