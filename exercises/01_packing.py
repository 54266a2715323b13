# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 01: packing and waste
#
# The chapter is `notebooks/01_packing.py`.
# Each exercise stands alone: none needs the answer of another.
#
# `values` is always a packed tensor, and `offsets` holds the row at which each sequence begins, with one more entry for the end.
# Sequences of length 0 are ordinary sequences.
#
# Out of bounds here: `jfa.layout` and torch's nested tensors, which do the packing for you.
# Results are tensors of their own and share no memory with the inputs.

# %% tags=["setup"]
import torch

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 1.1 Offsets from lengths
#
# *Difficulty 1 of 3, 10 minutes.*
#
# Make the B+1 offsets of B lengths.
# The first is 0, the last the number of all tokens.
# Kernels want them as **int32**.
# A batch of no sequences has the offsets `[0]`.
# A batch may have many millions of tokens.


# %% tags=["ex-1.1"]
def offsets_from_lengths(lengths):
    """lengths: [B] int64 tensor -> [B+1] int32 tensor."""
    raise NotImplementedError("1.1: not started")  # YOUR CODE


# %%
check("1.1", offsets_from_lengths)

# %% [markdown]
# ## 1.2 Whose row is it?
#
# *Difficulty 2 of 3, 15 minutes.*
#
# A kernel that looks at row `r` of a packed tensor asks: which sequence is this, and which position inside it?
# Answer for all rows at once: return two tensors with one entry per row, `sequence` and `position`, both counted from 0.
# Mind the empty sequences: they own no row, but they count when sequences are numbered.


# %% tags=["ex-1.2"]
def locate_rows(offsets):
    """Return (sequence [total], position [total]), integers of any width; offsets: [B+1] int32."""
    raise NotImplementedError("1.2: not started")  # YOUR CODE


# %%
check("1.2", locate_rows)

# %% [markdown]
# ## 1.3 From packed to padded
#
# *Difficulty 2 of 3, 15 minutes.*
#
# Return a rectangle `[B, longest, D]`, as long as the longest sequence: line `b` begins with the rows of sequence `b`.
# All other places hold `fill`, and nothing of another sequence, even if that one holds NaN.
# Zeros, NaN and infinities among the values are ordinary values: keep them.
# The values may have any dtype, and the rectangle has the same: no value may change by a bit.


# %% tags=["ex-1.3"]
def to_padded(values, offsets, fill):
    """Return [B, longest, D]; values: [total, D], offsets: [B+1] int32, fill: number."""
    raise NotImplementedError("1.3: not started")  # YOUR CODE


# %%
check("1.3", to_padded)

# %% [markdown]
# ## 1.4 The waste of a cross-attention batch
#
# *Difficulty 2 of 3, 15 minutes.*
#
# The chapter counted the waste of self-attention.
# In *cross*-attention sequence b has `len_q[b]` queries and `len_kv[b]` keys.
# Padded, the queries become a rectangle of `B x max(len_q)` places, the keys one of `B x max(len_kv)`, and every sequence computes `max(len_q) x max(len_kv)` scores.
#
# Return two shares between 0 and 1:
#
# * **tokens**: the share of places, in both rectangles together, that hold no token;
# * **pairs**: the share of computed scores that belong to no real (query, key) pair.
#
# A batch with no places wastes nothing (0.0), and one with no scores wastes no pairs.


# %% tags=["ex-1.4"]
def cross_waste(len_q, len_kv):
    """Return (token waste, pair waste), floats; len_q, len_kv: lists of B ints."""
    raise NotImplementedError("1.4: not started")  # YOUR CODE


# %%
check("1.4", cross_waste)

# %% [markdown]
# ## 1.5 Shuffle a packed batch
#
# *Difficulty 3 of 3, 15 minutes.*
#
# A data loader wants the sequences in another order, or only some of them, or one of them twice: `order` lists the sequences of the new batch.
# Build it, packed as well: its values and its int32 offsets.
#
# A Python loop over the sequences is slow on a GPU, so the limit is: **at most 60 torch operations, however many sequences there are**.
# (Slicing and indexing count too. So do NumPy's operations, and each number that leaves torch as a Python float.)
# The values keep their dtype and every bit.


# %% tags=["ex-1.5"]
def take_sequences(values, offsets, order):
    """Return the new values [new total, D] and the new offsets [N+1] int32.

    values: [total, D], offsets: [B+1] int32, order: [N] int64, each 0..B-1.
    """
    raise NotImplementedError("1.5: not started")  # YOUR CODE


# %%
check("1.5", take_sequences)

# %% [markdown]
# ## 1.6 Attention on padded data
#
# *Difficulty 3 of 3, 15 minutes.*
#
# Self-attention on a batch that came padded: `q`, `k` and `v` are `[B, M, D]`, and only the first `lengths[b]` places of line b hold tokens.
# The other places hold **garbage**: huge numbers, even NaN.
# None of it may reach the output.
# Scores are scaled by 1/sqrt(D).
# Output places without a token are 0, so a sequence of length 0 is all zeros.
#
# `torch.softmax` is allowed here.
# The likely mistake is to rely on the weights: 0 times NaN is NaN.


# %% tags=["ex-1.6"]
def padded_attention(q, k, v, lengths):
    """Return the output [B, M, D]; q, k, v: [B, M, D], lengths: [B] int64."""
    raise NotImplementedError("1.6: not started")  # YOUR CODE


# %%
check("1.6", padded_attention)
