# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 The jagged forward
#
# **Goals.** After this chapter you
# * can write flash attention over packed sequences: find your rows through the offsets, walk the keys in blocks, mask the tails, keep the log-sum-exp,
# * have seen NaN leak from one sequence into another through V, and stopped it,
# * can go from one launch per sequence to one launch over a list of tiles.
#
# **Time** 75 minutes to read, 210 for the exercises.
# **You need** chapters 02 (online softmax) and 03 (Triton).
# No GPU.

# %%
import math

import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa import plots, reference

_ = torch.manual_seed(0)

# %% [markdown]
# ## The mental model: a tile belongs to one sequence
#
# The packed tensor is one long column of rows, one sequence after another; `offsets` says where each begins.
# Cut each sequence's queries into tiles of `BM` rows.
# The last tile of a sequence is rarely full: its block extends into the *next sequence*, not into empty memory.
# That is the main difference from a padded batch, and the source of most bugs in this chapter.
#
# One program takes one tile and one head.
# It loads its queries once, then loops over the keys of its own sequence in blocks of `BN`.

# %%
LENGTHS = [5, 0, 33, 1, 17]


def tile_rows(lengths, block):
    """Return a lane for the packed rows, and one per tile: its own rows, and others it covers."""
    rows, begin = {"packed rows": []}, 0
    for b, n in enumerate(lengths):
        rows["packed rows"] += [plots.Segment(begin, n, f"sequence {b}", b)] if n else []
        for first in range(0, n, block):
            own, foreign = min(block, n - first), max(0, first + block - n)
            hangs_over = [plots.Segment(begin + n, foreign, "", None)] if foreign else []
            rows[f"tile {len(rows) - 1}"] = [plots.Segment(begin + first, own, "", b), *hangs_over]
        begin += n
    return rows


plots.segments(
    tile_rows(LENGTHS, 16),
    title=f"lengths {LENGTHS}, tiles of 16",
    xlabel="row of the packed tensor; ticks: offsets; hatched: rows of others, or past the end",
    ticks=[0, *torch.tensor(LENGTHS).cumsum(0).unique().tolist()],
)

# %% [markdown]
# There are seven tiles; three are full, and the other four cover hatched rows: rows of the next sequences, or rows past the end of the tensor.
#
# Shapes, for the rest of the chapter:
#
# | name | shape | meaning |
# |---|---|---|
# | `q` | `[total_q, H, D]` | packed queries |
# | `k`, `v` | `[total_kv, H, D]` | packed keys and values |
# | `q_offsets`, `k_offsets` | `[B + 1]` int32 | sequence `b` owns rows `offsets[b] .. offsets[b + 1] - 1` |
# | `out` | `[total_q, H, D]` | packed outputs |
# | `lse` | `[H, total_q]` fp32 | log-sum-exp of each query, natural logarithm; the backward pass needs it |
#
# Row `r` of head `h` starts at element `(r * H + h) * D`.


# %%
def make_problem(len_q, len_kv, heads=2, dim=16):
    """Return random packed q, k, v and their offsets."""
    offsets = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (len_q, len_kv)]
    q, k, v = (torch.randn(sum(n), heads, dim) for n in (len_q, len_kv, len_kv))
    return q, k, v, *offsets


def right_answer(problem):
    """Return (out, lse) in fp64, from the package's reference."""
    q, k, v, q_offsets, k_offsets = problem
    return reference.attention(
        q.double(), k.double(), v.double(), q_offsets, k_offsets, return_lse=True
    )


def largest_error(out, problem):
    return (out - right_answer(problem)[0]).abs().max().item()


# %% [markdown]
# ## Version 0: one launch per sequence
#
# This is the simplest correct way.
# The host slices one sequence out of the packed tensors, and launches a dense flash attention on it.
# The kernel computes chapter 02's recurrence.
#
# For a tile of queries, with $m$ the running maximum, $l$ the running sum and $A$ the running output, a block of keys with scores $S$ gives
#
# $$m' = \max(m, \max_j S_j), \quad \alpha = e^{m - m'}, \quad P = e^{S - m'}, \quad l' = \alpha l + \sum_j P_j, \quad A' = \alpha A + P V .$$
#
# Here $\alpha$ is chapter 02's conversion factor f, and $A$ is its acc.
#
# (`input_precision="ieee"` below keeps `tl.dot` from rounding the fp32 operands to TF32, a format with 11 bits of mantissa, so that errors stay near 1e-7.)


# %%
@triton.jit
def softmax_step(s, m, l):
    """Add one block of scores [BM, BN] to the running softmax: -> (P, alpha, new m, new l)."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    alpha = tl.exp(m - m_new)
    p = tl.exp(s - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def dense_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    len_q,
    len_kv,
    H,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Attend within one sequence; program (tile, head)."""
    head = tl.program_id(1)
    d = tl.arange(0, D)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    q = tl.load(
        q_ptr + (i[:, None] * H + head) * D + d[None, :], mask=i[:, None] < len_q, other=0.0
    )
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, len_kv, BN):
        j = start + tl.arange(0, BN)
        kt = tl.load(
            k_ptr + (j[None, :] * H + head) * D + d[:, None], mask=j[None, :] < len_kv, other=0.0
        )
        v = tl.load(
            v_ptr + (j[:, None] * H + head) * D + d[None, :], mask=j[:, None] < len_kv, other=0.0
        )
        s = tl.where(
            j[None, :] < len_kv, tl.dot(q, kt, input_precision="ieee") * scale, float("-inf")
        )
        p, alpha, m, l = softmax_step(s, m, l)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    tl.store(
        out_ptr + (i[:, None] * H + head) * D + d[None, :],
        acc / l[:, None],
        mask=i[:, None] < len_q,
    )


def attend_v0(q, k, v, q_offsets, k_offsets, block=16):
    out = torch.zeros_like(q)
    heads, dim = q.shape[1:]
    for b in range(len(q_offsets) - 1):
        rows = slice(int(q_offsets[b]), int(q_offsets[b + 1]))
        keys = slice(int(k_offsets[b]), int(k_offsets[b + 1]))
        len_q, len_kv = rows.stop - rows.start, keys.stop - keys.start
        if len_q and len_kv:
            grid = (triton.cdiv(len_q, block), heads)
            dense_kernel[grid](
                q[rows],
                k[keys],
                v[keys],
                out[rows],
                1 / math.sqrt(dim),
                len_q,
                len_kv,
                heads,
                D=dim,
                BM=block,
                BN=block,
            )
    return out


problem = make_problem(LENGTHS, [17, 4, 40, 9, 21])
print("largest error of version 0:", largest_error(attend_v0(*problem), problem))

# %% [markdown]
# The result is right, but on a GPU this would be slow for two reasons.
# The host reads the offsets back, so it cannot launch ahead and the GPU idles.
# And each launch is far too small to fill the chip.

# %% [markdown]
# ## Version 1: one launch, offsets read in the kernel
#
# The grid is (tiles of the longest sequence, heads, sequences).
# Each program loads the bounds of its sequence.
# A program whose tile starts past its sequence's end returns at once.
#
# With `MASK_V=False` this version contains a mistake.
# Scores of keys past the end are set to minus infinity, so their probabilities are exactly 0.
# From that the author concluded that V needs no mask.


# %%
@triton.jit
def jagged_v1(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, out_ptr, scale, total_kv, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK_V: tl.constexpr,
):  # fmt: skip
    """Attend within all sequences; program (tile, head, sequence)."""
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    if q_begin + tile * BM >= q_end:
        return
    d = tl.arange(0, D)
    rows = q_begin + tile * BM + tl.arange(0, BM)
    q = tl.load(
        q_ptr + (rows[:, None] * H + head) * D + d[None, :], mask=rows[:, None] < q_end, other=0.0
    )
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    v_end = k_end if MASK_V else total_kv
    for start in range(k_begin, k_end, BN):
        keys = start + tl.arange(0, BN)
        kt = tl.load(
            k_ptr + (keys[None, :] * H + head) * D + d[:, None],
            mask=keys[None, :] < k_end,
            other=0.0,
        )
        v = tl.load(
            v_ptr + (keys[:, None] * H + head) * D + d[None, :],
            mask=keys[:, None] < v_end,
            other=0.0,
        )
        s = tl.where(
            keys[None, :] < k_end, tl.dot(q, kt, input_precision="ieee") * scale, float("-inf")
        )
        p, alpha, m, l = softmax_step(s, m, l)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + (rows[:, None] * H + head) * D + d[None, :], out, mask=rows[:, None] < q_end)


def attend_v1(q, k, v, q_offsets, k_offsets, mask_v=True, block=16):
    out = torch.full_like(q, float("nan"))
    heads, dim = q.shape[1:]
    longest = int((q_offsets[1:] - q_offsets[:-1]).max())
    grid = (triton.cdiv(longest, block), heads, len(q_offsets) - 1)
    jagged_v1[grid](
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        out,
        1 / math.sqrt(dim),
        len(k),
        heads,
        D=dim,
        BM=block,
        BN=block,
        MASK_V=mask_v,
    )
    return out


print(
    "largest error without a mask on V:", largest_error(attend_v1(*problem, mask_v=False), problem)
)

# %% [markdown]
# The result is right on random numbers, so the kernel ships.
# Weeks later the sequence of one user holds a NaN, from a bad feature or an overflow upstream.
# Predict first: the outputs of which sequences become NaN?


# %%
def poisoned(problem, sequence):
    """Return the same problem with the values of one sequence set to NaN."""
    q, k, v, q_offsets, k_offsets = problem
    v = v.clone()
    v[int(k_offsets[sequence]) : int(k_offsets[sequence + 1])] = float("nan")
    return q, k, v, q_offsets, k_offsets


def sequences_with_nan(out, q_offsets):
    bounds = q_offsets.tolist()
    return [
        b for b, (lo, hi) in enumerate(zip(bounds, bounds[1:])) if torch.isnan(out[lo:hi]).any()
    ]


sick = poisoned(problem, 3)
print("sequence 3 is poisoned")
print(
    "without a mask on V, NaN in sequences:",
    sequences_with_nan(attend_v1(*sick, mask_v=False), sick[3]),
)
print(
    "with a mask on V,    NaN in sequences:",
    sequences_with_nan(attend_v1(*sick, mask_v=True), sick[3]),
)

# %% [markdown]
# **Zero times NaN is NaN.** Sequence 2 has 40 keys, so its last block of 16 holds 8 of its own and 8 of sequence 3.
# Their probabilities are 0, but their values are NaN.
# A probability of 0 does not remove a NaN; replacing the *value* by 0 does.
# So V's tail rows are masked on load.
#
# Every kernel of this course has this problem in some form.
# A GPU's copy engine (TMA, chapter 09), for example, always fetches a whole box of rows, without a mask.
# Chapter 12 shows what to do there.

# %% [markdown]
# ## Version 2: the log-sum-exp, and queries without keys
#
# Two things are missing.
# The backward pass needs $\mathrm{lse}_i = m_i + \ln l_i$ for each query.
# And if a sequence has no keys, the loop does no step, $l = 0$, and `acc / l` is 0/0.
# The package defines the result in that case: output 0, lse minus infinity.
# Version 1's kernel already divides safely; the kernel below also stores the lse.
#
# ## Version 3: a list of tiles
#
# Version 1 launches `tiles of the longest x H x B` programs.
# With skewed lengths almost all of them return at once.
# That is not free: the GPU still has to start and end each of them.
# So make a list of the tiles that exist, and launch one program per entry and head.
# Longest first is a good order: the tiles with the most keys start early, and the short ones fill the gaps (chapter 08).


# %%
@triton.jit
def jagged_v3(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tile_seq_ptr, tile_row_ptr,
    out_ptr, lse_ptr, scale, total_q, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend within all sequences, and store the lse; program (entry of the tile list, head)."""
    head = tl.program_id(1)
    seq = tl.load(tile_seq_ptr + tl.program_id(0))
    first = tl.load(tile_row_ptr + tl.program_id(0))
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d = tl.arange(0, D)
    rows = q_begin + first + tl.arange(0, BM)
    q = tl.load(
        q_ptr + (rows[:, None] * H + head) * D + d[None, :], mask=rows[:, None] < q_end, other=0.0
    )
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(k_begin, k_end, BN):
        keys = start + tl.arange(0, BN)
        kt = tl.load(
            k_ptr + (keys[None, :] * H + head) * D + d[:, None],
            mask=keys[None, :] < k_end,
            other=0.0,
        )
        v = tl.load(
            v_ptr + (keys[:, None] * H + head) * D + d[None, :],
            mask=keys[:, None] < k_end,
            other=0.0,
        )
        s = tl.where(
            keys[None, :] < k_end, tl.dot(q, kt, input_precision="ieee") * scale, float("-inf")
        )
        p, alpha, m, l = softmax_step(s, m, l)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + (rows[:, None] * H + head) * D + d[None, :], out, mask=rows[:, None] < q_end)
    tl.store(lse_ptr + head * total_q + rows, m + tl.log(l), mask=rows < q_end)


def longest_first(q_offsets, k_offsets, block):
    """Return the tiles as two tensors, (sequence, first row), those with the most keys first."""
    len_q = (q_offsets[1:] - q_offsets[:-1]).tolist()
    len_kv = (k_offsets[1:] - k_offsets[:-1]).tolist()
    tiles = [(-len_kv[b], b, row) for b, n in enumerate(len_q) for row in range(0, n, block)]
    _, seq, row = zip(*sorted(tiles))
    return torch.tensor(seq, dtype=torch.int32), torch.tensor(row, dtype=torch.int32)


def attend_v3(q, k, v, q_offsets, k_offsets, block=16):
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("nan"))
    heads, dim = q.shape[1:]
    seq, row = longest_first(q_offsets, k_offsets, block)
    jagged_v3[(len(seq), heads)](
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        seq,
        row,
        out,
        lse,
        1 / math.sqrt(dim),
        len(q),
        heads,
        D=dim,
        BM=block,
        BN=block,
    )
    return out, lse


no_keys = make_problem(LENGTHS, [17, 4, 40, 0, 21])
out, lse = attend_v3(*no_keys)
want_out, want_lse = right_answer(no_keys)
has_keys = torch.isfinite(want_lse)
print("largest error, out:", (out - want_out).abs().max().item())
print("largest error, lse:", (lse - want_lse)[has_keys].abs().max().item())
print("the query without keys: lse", lse[:, 38].tolist(), "out", out[38].abs().max().item())

# %% [markdown]
# How many programs and loads does each version need?
# `emulator.counting()` counts them.

# %%
skewed = make_problem([200, 3, 0, 5, 1, 9, 2, 16], [200, 3, 0, 5, 1, 9, 2, 16], heads=1)
versions = {
    "v0: a launch per sequence": attend_v0,
    "v1: one grid": attend_v1,
    "v3: a tile list": attend_v3,
}
counted = {}
for name, attend in versions.items():
    with emulator.counting() as counted[name]:
        attend(*skewed)
plots.panels(
    list(counted),
    {
        "launches": ([c.launches for c in counted.values()], "{}"),
        "programs": ([c.programs for c in counted.values()], "{}"),
        "loads": ([c.loads for c in counted.values()], "{}"),
    },
    title="eight sequences, one of 200 rows and the others short, one head",
)

# %% [markdown]
# The grid of version 1 has 13 tiles for each of 8 sequences, so 104 programs; 19 have work.
# Version 3 launches these 19, in one launch.
# It does more loads than version 0, since each program loads its own entry of the list and its bounds: two numbers of the list and four offsets.
# That is cheap compared with seven launches and a host that waits for the offsets.
#
# ## What the package does
#
# `jfa.jagged_flash_attention` is version 3 with everything else that a model needs: masks, grouped heads, shared queries, other head sizes and strides, a tile list built on the GPU without a wait on the host, and a backward.
# On CPU tensors it uses the reference, unless you select a kernel with `backend=`; then the emulator runs it.

# %%
import jfa

q, k, v, q_offsets, k_offsets = problem
ours = jfa.jagged_flash_attention(q, k, v, q_offsets, k_offsets, 33, 40, backend="portable")
print(
    "the package's portable kernel, on the emulator, largest error:", largest_error(ours, problem)
)

# %% [markdown]
# ## Summary
#
# * A tile belongs to one sequence and one head; its program loads the bounds from the offsets.
# * The tail of a tile covers rows of the next sequence: mask Q, K *and* V on load, the scores with −∞, and the stores.
# * A query without keys gives output 0 and lse −∞.
# * A list of the tiles that exist replaces a grid sized by the longest sequence.
#
# ## Exercises
#
# Open [exercises/04_jagged_forward.py](../exercises/04_jagged_forward.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 4.1 | a tile list without empty tiles | 1 | 10 |
# | 4.2 | the log-sum-exp of every query | 2 | 30 |
# | 4.3 | the poisoned neighbor | 2 | 10 |
# | 4.4 | attention with a distance penalty | 3 | 50 |
# | 4.5 | one query that pools a sequence | 3 | 45 |
# | 4.6 | merge the parts of a split sequence | 3 | 40 |
# | 4.7 | bug hunt: right for self-attention | 2 | 25 |
#
# ## Checkpoint
#
# 1. Lengths `[64, 64, 1]`, tiles of 64.
#    How many programs do versions 1 and 3 launch per head?
# 2. P is exactly 0 where S is masked. Why must V be masked as well?
# 3. Queries past the sequence's end were loaded as 0.
#    Do they disturb the result?
# 4. Why is `lse` kept, and not `m` and `l`?
#
# <details><summary>Answers</summary>
#
# 1. Three for both: one tile per sequence.
#    The list pays off when lengths differ by more than a tile.
# 2. The product computes `0 * v`.
#    For a NaN or an infinity in `v` that is NaN.
# 3. No. Each row of a tile has its own softmax; such a row is computed but not stored.
# 4. The backward needs $P = e^{S - \mathrm{lse}}$ only.
#    One number per query, and it also merges partial results (chapter 02).
#
# </details>
#
# ## Try this
#
# - Poison a sequence's *keys* instead of its values.
#   Does version 1 leak now?
#   Why, or why not?
# - Replace `longest_first` with the order in memory.
#   The results do not change.
#   What does?
#   Chapter 08 has the answer.
# - Set `BN` to 64 for keys of length 17.
#   How many score columns are wasted?
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | the tile's tail belongs to the next sequence | the first picture |
# | 0 * NaN carries a NaN of the next sequence through V | version 1, poisoned |
# | a query without keys: 0/0 | version 3's last lines |
# | a grid sized by the longest sequence | the count of programs |
#
# ## What differs on a real GPU
#
# - Reading `q_offsets` on the host (`int(...)`, `.tolist()`) waits until the GPU has finished all earlier work.
#   The package builds version 3's list on the GPU instead.
# - A GPU's compiler makes one instruction of a product and a difference, and that instruction does not round the product.
#   In these kernels `tl.where` stands between `* scale` and `- m_new`, so both exponentials get the rounded score.
#   In a kernel without a mask the exponent of the largest score would be the rounding error of its product instead of 0: beyond scores of about 1e9 the exponential overflows and the row becomes NaN.
#   Multiplying Q by `scale` before the product avoids this.
# - The order of the list matters only when there are more tiles than SMs; on the emulator it does not change the result.
# - With bf16 inputs, P is rounded to bf16 before `P @ V`, but the sum `l` is taken from the unrounded P.
#   The package's kernels do this on the emulator and on a GPU.
#
# ## Verified here, and not
#
# Every kernel above ran on the emulator when this notebook ran and was compared with the fp64 reference.
# Nothing here was timed.
#
# ## Sources
#
# - Dao et al., *FlashAttention*, arXiv 2205.14135, and *FlashAttention-2*, arXiv 2307.08691: the recurrence and the log-sum-exp.
# - Milakov and Gimelshein, *Online normalizer calculation for softmax*, arXiv 1805.02867.
#
# Next: [05 the backward](05_backward.py).
