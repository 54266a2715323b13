# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 06: masks and loop peeling
#
# Read [notebooks/06_masks.py](../notebooks/06_masks.py) first.
# A band is two numbers: query `i` sees the keys `i + lo <= j <= i + hi` with `0 <= j < len_kv`, both counted from the start of their own sequence.
# An open side is `-2**30` or `2**30`.
# `d = len_kv - len_q` throughout.
#
# The kernels run on the emulator; ask `tl.dot` for `input_precision="ieee"`.
#
# `jfa.masks` and `jfa.schedule` contain the answers of 6.1, 6.2 and 6.6, so they are out of bounds here.
# So is torch's own softmax in 6.4, where the work block by block is the point.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 6.1 The band of a call
#
# (difficulty 1 of 3, 30 minutes) Turn the arguments of a call into the band's two numbers, `(lo, hi)`.
#
# - `causal`: `None`, `"top_left"` or `"bottom_right"`.
# - `window`: `None`; or an int W, for keys with `|i - j| <= W`; or a pair `(left, right)` around the bottom-right diagonal, in which -1 leaves that side open.
#
# If both are given, a pair of query and key must satisfy both.


# %% tags=["ex-6.1"]
def band(causal, window, len_q, len_kv):
    """Return (lo, hi), ints; an open side is -2**30 or 2**30."""
    raise NotImplementedError("6.1: not started")  # YOUR CODE


# %%
check("6.1", band)

# %% [markdown]
# ## 6.2 The four block numbers, inside a kernel
#
# (difficulty 2 of 3, 40 minutes) In a jagged kernel each program computes its own ranges.
# Program `t` reads the row `tiles[t] = (row0, rows, len_q, len_kv, lo, hi)` and stores `(first, bulk_begin, bulk_end, end)`, in blocks of `BN` keys, to `ranges[t]`.
#
# The tile holds the queries `row0 .. row0 + rows - 1`; those past the last query do not exist, but query `row0` does.
# Blocks `first .. end - 1` are those with at least one pair that counts.
# Blocks `bulk_begin .. bulk_end - 1` are those that need no mask: *every* query of the tile sees *all* `BN` keys.
# If no pair counts, store four zeros.
# If there is no bulk, `bulk_begin` and `bulk_end` are both `end`.
#
# In a kernel `//` rounds toward zero.


# %% tags=["ex-6.2"]
@triton.jit
def ranges_kernel(tiles_ptr, ranges_ptr, BN: tl.constexpr):
    """Store ranges: [T, 4] int32; tiles: [T, 6] int32; one program per tile."""
    tile = tl.program_id(0)
    row0 = tl.load(tiles_ptr + 6 * tile)
    rows = tl.load(tiles_ptr + 6 * tile + 1)
    len_q = tl.load(tiles_ptr + 6 * tile + 2)
    len_kv = tl.load(tiles_ptr + 6 * tile + 3)
    lo = tl.load(tiles_ptr + 6 * tile + 4)
    hi = tl.load(tiles_ptr + 6 * tile + 5)
    pass  # YOUR CODE


# %%
check("6.2", ranges_kernel)

# %% [markdown]
# ## 6.3 The peeled kernel of a jagged window
#
# (difficulty 3 of 3, 65 minutes) The chapter's kernel handles one sequence and gets its ranges from the host.
# Write the complete one: packed sequences, heads, and ranges computed in the kernel.
# Query `i` sees key `j` of its own sequence if `d - left <= j - i <= d + right`, with `d = len_kv - len_q`; `left` and `right` are at least 0.
# A query that sees no key gives 0.
#
# Launched on `(number of tiles, H)`: program `(t, h)` works on `tiles[t] = (sequence, first query in it)`.
# `BM = BN = 16`.
# Scores may be huge or very negative.
# Rows of other sequences may hold NaN.
#
# Limits: comparisons and `tl.where` may make blocks of scores for partial blocks only, so each at most 3 times their number of scores and 256 elements more per program; no more exponentials than visited blocks have scores, and 32 more per block and per program.


# %% tags=["ex-6.3"]
@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, left, right, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store out: [total_q, H, D], like q; k, v: [total_kv, H, D]; fp32, contiguous."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    row0 = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, k_begin = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    len_q = tl.load(q_offsets_ptr + seq + 1) - q_begin
    len_kv = tl.load(k_offsets_ptr + seq + 1) - k_begin
    pass  # YOUR CODE


# %%
check("6.3", window_kernel)

# %% [markdown]
# ## 6.4 Bug hunt: counted from the wrong end
#
# (difficulty 2 of 3, 15 minutes) One sequence in PyTorch, blockwise, with a window `(left, right)` around the bottom-right diagonal.
# It passed every test with as many queries as keys.
# Run the check first.
# It names a row of the output; the mistake is elsewhere.
# Fix it, and keep the work small: no block of keys that no query sees may be used.
#
# Limits: at most 2 matrix products per block of keys that some query sees; no new tensor with more elements than n x block scores, or than q, k or v.
# A query that sees no key gives 0.


# %% tags=["ex-6.4"]
def window_attention(q, k, v, left, right, block):
    """Return the output [n, D]; q: [n, D], k, v: [m, D]; keys are taken `block` at a time."""
    # YOUR CODE: fix this function
    n, m = len(q), len(k)
    lo, hi = -left, right
    i = torch.arange(n)[:, None]
    top = torch.full((n, 1), -torch.inf)
    total, acc = torch.zeros(n, 1), torch.zeros(n, v.shape[1])
    begin, end = max(0, lo), min(m, n - 1 + hi + 1)
    for start in range(begin // block * block, end, block):
        j = torch.arange(start, min(start + block, m))
        s = q @ k[j].T / q.shape[1] ** 0.5
        s = torch.where((j - i >= lo) & (j - i <= hi), s, -torch.inf)
        new = torch.maximum(top, s.amax(1, keepdim=True))
        anchor = torch.where(new == -torch.inf, 0.0, new)
        p, keep = torch.exp(s - anchor), torch.exp(top - anchor)
        total, acc, top = total * keep + p.sum(1, keepdim=True), acc * keep + p @ v[j], new
    return acc / torch.where(total > 0, total, 1.0)


# %%
check("6.4", window_attention)

# %% [markdown]
# ## 6.5 Bug hunt: the row that may see nothing
#
# (difficulty 1 of 3, 20 minutes) One step of an online softmax, from a library that masks with −1e9.
# Two things go wrong: a row that may see no key gets weights, and a row whose true scores are lower than −1e9 gives weight to masked keys.
# Fix it.
# A row that has seen no key so far keeps `m = -inf` and `l = 0`, and its weights are 0.
# `p` are the weights of this block relative to the new m, and `alpha` is the factor that converts the old sum.


# %% tags=["ex-6.5"]
def softmax_step(s, allowed, m, l):
    """Return (p [n, block], alpha [n], new m [n], new l [n]).

    s: [n, block] float; allowed: [n, block] bool; m, l: [n], the state so far.
    """
    # YOUR CODE: fix this function
    s = torch.where(allowed, s, -1e9)
    m_new = torch.maximum(m, s.amax(1))
    alpha = torch.exp(m - m_new)
    p = torch.exp(s - m_new[:, None])
    return p, alpha, m_new, l * alpha + p.sum(1)


# %%
check("6.5", softmax_step)

# %% [markdown]
# ## 6.6 Predict pairs, full and partial blocks
#
# (difficulty 2 of 3, 35 minutes) It is useful to know a kernel's work before it runs.
# For packed sequences with one band per sequence, return the number of pairs that count, of full blocks and of partial blocks.
# Each sequence is divided into blocks of `BM` queries by `BN` keys.
# Rows past the last query do not matter; keys past the last key make a block partial.
# Lengths go up to 100,000: a loop over pairs takes too long, a loop over tiles is fine.


# %% tags=["ex-6.6"]
def work(len_q, len_kv, lo, hi, BM, BN):
    """Return (pairs, full, partial), ints; len_q, len_kv, lo, hi: lists, one int per sequence."""
    raise NotImplementedError("6.6: not started")  # YOUR CODE


# %%
check("6.6", work)
