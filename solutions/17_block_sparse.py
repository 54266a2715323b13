# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 17: block-sparse attention
#
# Read [notebooks/17_block_sparse.py](../notebooks/17_block_sparse.py) first.
#
# Blocks are counted inside their sequence; the last block of a sequence may have fewer rows than `block`.
# Here the blocks of all sequences are also numbered one after another, without holes: a sequence of `n` rows adds `ceil(n / block)` of them, an empty one adds none.
# A pair of blocks has a **kind**: 2 (FULL) if both blocks are whole and every pair of their rows counts, 1 (PARTIAL) if some pairs count.
# That is the package's meaning, and it is the same from the queries' side and from the keys' side.
#
# The kernel runs on the emulator; ask `tl.dot` for `input_precision="ieee"`.
#
# `jfa.block_sparse` and `jfa.block_select` contain answers, so they are not allowed here, and neither is `jfa.masks`.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 17.1 Pooled block scores of a jagged batch
#
# (difficulty 1 of 3, 35 minutes) `q` is [rows, H, D], `k` is [rows, H_kv, D], both packed by their offsets; query head h belongs to key head `h // (H // H_kv)`.
# Pool each block to the mean over its rows that exist, and score every block of queries against the key blocks of its own sequence: pooled query · pooled key · `scale`.
#
# Return [H, R, W]: R blocks of queries of all sequences, numbered one after another; W the most key blocks of any sequence.
# Where a sequence has no such key block, the score is minus infinity.
# Rows behind the last offset belong to no sequence and may hold anything, NaN too.
#
# The pooling must come before the product: no new tensor has more elements than `block * H * D` times the number of blocks (of queries or of keys, whichever are more).


# %% tags=["ex-17.1"]
def block_scores(q, k, q_offsets, k_offsets, scale, block):
    """Return [H, R, W], fp32."""
    ### BEGIN SOLUTION
    heads, group = q.shape[1], q.shape[1] // k.shape[1]

    def pooled(x, offsets):
        bounds = offsets.tolist()
        found = []
        for begin, end in zip(bounds, bounds[1:]):
            means = [rows.mean(0) for rows in x[begin:end].split(block) if len(rows)]
            found.append(torch.stack(means) if means else x.new_zeros(0, *x.shape[1:]))
        return found

    queries, keys = pooled(q, q_offsets), pooled(k, k_offsets)
    width = max(map(len, keys))
    out = torch.full((heads, sum(map(len, queries)), width), float("-inf"))
    row = 0
    for a, b in zip(queries, keys):
        b = b.repeat_interleave(group, 1)
        out[:, row : row + len(a), : len(b)] = torch.einsum("ihd,jhd->hij", a, b) * scale
        row += len(a)
    return out
    ### END SOLUTION


# %%
check("17.1", block_scores)

# %% [markdown]
# ## 17.2 Choose the best blocks, as lists
#
# (difficulty 2 of 3, 40 minutes) `scores` is [H, R, W]; `candidates` [R, W] is True for key blocks with at least one pair that the mask allows, `always` [R, W] for those that must be chosen, whatever their score is.
# A block of `always` that is not a candidate does not count.
# Scores of blocks that are not candidates may be anything.
#
# The ratio is `share / parts`, two whole numbers above 0.
# Of n candidates a row chooses ceil(n * share / parts), exactly, but at least as many as `always` names; with no candidates it chooses none.
# Those of `always` come first, then the highest scores; of equal scores the lower block wins; NaN counts as plus infinity.
# Each head chooses for itself.
#
# Return two int32 tensors:
#
# * `starts` [H * R + 1]: the list of head h, row r lies from `starts[h * R + r]` to the next start;
# * `columns` [H * R * W]: the lists one after another, each in *ascending* order; -1 in the places behind the last list.


# %% tags=["ex-17.2"]
def choose(scores, candidates, always, share, parts):
    """Return (starts [H * R + 1] int32, columns [H * R * W] int32)."""
    ### BEGIN SOLUTION
    heads, rows, width = scores.shape
    kept = always & candidates
    n = candidates.sum(1)
    count = torch.maximum((n * share + parts - 1) // parts, kept.sum(1))
    rank = torch.where(scores.isnan(), float("inf"), scores)
    by_score = rank.sort(dim=2, descending=True, stable=True).indices
    tier = (kept.int() + candidates.int()).expand(heads, rows, width)
    by_tier = tier.gather(2, by_score).sort(dim=2, descending=True, stable=True).indices
    order = by_score.gather(2, by_tier)
    chosen = torch.zeros(heads, rows, width, dtype=torch.bool)
    chosen.scatter_(2, order, torch.arange(width) < count[:, None].expand(heads, rows, 1))
    starts = torch.zeros(heads * rows + 1, dtype=torch.int32)
    starts[1:] = chosen.sum(2).flatten().cumsum(0)
    columns = torch.full((heads * rows * width,), -1, dtype=torch.int32)
    found = chosen.nonzero()[:, 2]
    columns[: len(found)] = found.int()
    return starts, columns
    ### END SOLUTION


# %%
check("17.2", choose)

# %% [markdown]
# ## 17.3 Transpose the lists
#
# (difficulty 2 of 3, 40 minutes) The backward needs to know which blocks of queries chose a block of keys.
#
# `starts` [heads * R + 1], `columns` and `kinds` [capacity] are lists of `heads` heads over R blocks of queries; a column is a key block counted *inside its sequence*.
# Entries from `starts[-1]` on may hold anything.
# `q_first` and `k_first` [B + 1] give the number of each sequence's first block, of queries and of keys, in the numbering over all sequences; `k_blocks` is `k_first[-1]` as a Python number.
#
# Return lists of the same form from the keys' side: `starts` [heads * k_blocks + 1] int32, `columns` [capacity] int32, the blocks of queries inside their sequence, in ascending order within a list; `kinds` [capacity] int8.
# Behind the last list `columns` is -1 and `kinds` is 0.
# A pair keeps its kind.
#
# **No host reads**: the host may not read a number of a tensor, so no `.item()`, `.tolist()`, `int(...)`, no `if` or `range` on a tensor, and no operation whose result's size depends on the numbers (`nonzero`, `x[mask]`, `repeat_interleave` without `output_size`).


# %% tags=["ex-17.3"]
def turn(starts, columns, kinds, q_first, k_first, heads, k_blocks):
    """Return (starts [heads * k_blocks + 1], columns [capacity] int32, kinds [capacity] int8)."""
    ### BEGIN SOLUTION
    lists = starts.numel() - 1
    rows = lists // heads
    entries = torch.arange(columns.numel())
    real = entries < starts[-1]
    owner = torch.searchsorted(starts[1:].long(), entries, right=True).clamp(max=max(lists - 1, 0))
    head, row = owner // max(rows, 1), owner % max(rows, 1)
    seq = torch.searchsorted(q_first[1:].long(), row, right=True).clamp(max=q_first.numel() - 2)
    target = head * k_blocks + k_first.long()[seq] + columns
    target = torch.where(real, target, heads * k_blocks)
    order = target.argsort(stable=True)
    counts = torch.zeros(heads * k_blocks + 1, dtype=torch.int64)
    counts.scatter_add_(0, target, torch.ones_like(target))
    new_starts = torch.zeros(heads * k_blocks + 1, dtype=torch.int32)
    new_starts[1:] = counts[:-1].cumsum(0)
    inside = torch.where(real, row - q_first.long()[seq], -1)
    new_kinds = torch.where(real, kinds, 0)
    return new_starts, inside[order].int(), new_kinds[order].to(torch.int8)
    ### END SOLUTION


# %%
check("17.3", turn)

# %% [markdown]
# ## 17.4 The forward kernel over lists
#
# (difficulty 2 of 3, 50 minutes) The chapter's kernel handles one head of one sequence.
# Write the general kernel: packed sequences, heads that share key heads, and the LSE.
#
# The mask is causal, bottom right: query `i` sees the keys `j <= i + len_kv - len_q` of its own sequence, of those blocks that its list names.
# Launched on `(number of tiles, H)`: program `(t, h)` works on `tiles[t] = (sequence, first query in it)`, and its list is that of head h, row t, from `starts[h * T + t]` to the next start, with `T` tiles.
# `kinds` is 2 for FULL, 1 for PARTIAL.
# Query head h uses key head `h // GROUP`.
# `BM` and `BN` are 16 or 32.
#
# A query whose list or mask leaves it no key gets out 0 and lse minus infinity.
# The lse is the natural logarithm.
# Scores may be huge or very negative.
# Rows of other sequences may hold NaN.
#
# Limits: a program loads what is chosen, so all loads together take at most `2 * BN * D + 8` elements per list entry, and `BM * D + 16` per program.
# `tl.where` may make blocks of scores for PARTIAL entries only: at most 2 blocks of `BM * BN` each, and `4 * BM` lanes more per entry and per program.


# %% tags=["ex-17.4"]
@triton.jit
def sparse_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr,
    starts_ptr, columns_ptr, kinds_ptr, out_ptr, lse_ptr, scale, T, H,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend: q, out [total_q, H, D]; k, v [total_kv, H // GROUP, D]; lse [total_q, H]; fp32."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    row0 = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, k_begin = tl.load(q_offsets_ptr + seq), tl.load(k_offsets_ptr + seq)
    len_q = tl.load(q_offsets_ptr + seq + 1) - q_begin
    len_kv = tl.load(k_offsets_ptr + seq + 1) - k_begin
    ### BEGIN SOLUTION
    d = tl.arange(0, D)
    i = row0 + tl.arange(0, BM)
    at_rows = (q_begin + i) * H + head
    q = tl.load(q_ptr + at_rows[:, None] * D + d[None, :], mask=(i < len_q)[:, None], other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    begin = tl.load(starts_ptr + head * T + tile)
    end = tl.load(starts_ptr + head * T + tile + 1)
    for entry in range(begin, end):
        j = tl.load(columns_ptr + entry) * BN + tl.arange(0, BN)
        at = ((k_begin + j) * (H // GROUP) + head // GROUP)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=(j < len_kv)[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=(j < len_kv)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if tl.load(kinds_ptr + entry) == 1:
            seen = (j[None, :] - i[:, None] <= len_kv - len_q) & (j < len_kv)[None, :]
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m - anchor)
        p = tl.exp(s - anchor[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    some = l > 0
    out = acc / tl.where(some, l, 1.0)[:, None]
    lse = tl.where(some, m + tl.log(tl.where(some, l, 1.0)), float("-inf"))
    tl.store(out_ptr + at_rows[:, None] * D + d[None, :], out, mask=(i < len_q)[:, None])
    tl.store(lse_ptr + at_rows, lse, mask=i < len_q)
    ### END SOLUTION


# %%
check("17.4", sparse_kernel)

# %% [markdown]
# ## 17.5 Bug hunt: the last block counts as full
#
# (difficulty 2 of 3, 10 minutes) For each entry of some lists you get the block of queries `i`, the block of keys `j`, the lengths of their sequence, and its band: a pair of rows counts if `lo <= key row - query row <= hi`, both counted in the sequence.
# All are int64 tensors of one length.
# Each of these pairs of blocks has at least one pair of rows that counts.
#
# Return int8 kinds: 2 if both blocks are whole and every pair of their rows counts, else 1.
# A whole block is one of which all `block` rows exist.
#
# The function below is right for lengths that are multiples of the block.
# Run the check, find out which entries are wrong, and fix it for all lengths.


# %% tags=["ex-17.5"]
def pair_kinds(i, j, len_q, len_kv, lo, hi, block):
    """Return [entries] int8: 2 FULL, 1 PARTIAL."""
    # YOUR CODE: below, a block that extends past the end may count as full
    q_begin, k_begin = i * block, j * block
    ### BEGIN SOLUTION
    whole = (q_begin + block <= len_q) & (k_begin + block <= len_kv)
    ### STARTER
    # whole = (q_begin < len_q) & (k_begin < len_kv)
    ### END SOLUTION
    q_last = torch.minimum(q_begin + block, len_q) - 1
    k_last = torch.minimum(k_begin + block, len_kv) - 1
    full = whole & (k_begin - q_last >= lo) & (k_last - q_begin <= hi)
    return torch.where(full, 2, 1).to(torch.int8)


# %%
check("17.5", pair_kinds)

# %% [markdown]
# ## 17.6 Predict: the ratio at which sparse stops paying
#
# (difficulty 2 of 3, 20 minutes) Compute a model of one sequence, in whole cycles.
# `candidates` is a list: the number of candidate key blocks n of each block of queries, the same for all heads.
# The sequence has `key_blocks` blocks of keys.
#
# * A dense tile takes `start` cycles, and `step` per candidate.
# * A sparse tile takes `start` cycles, and `step + lost` per chosen block: the block's number is read from memory, and a part of the overlap is lost.
# * Choosing comes first: `pool` cycles per block that is pooled, and `score` per candidate and query head. Query blocks are pooled for each of `heads` heads, key blocks for each of `kv_heads`.
# * With a ratio of r percent a tile with n candidates chooses ceil(r * n / 100) blocks. A tile without candidates still takes `start` cycles, dense or sparse.
#
# All tiles of all heads run one after another.
# Return three whole numbers:
#
# * `dense`: cycles of the dense attention, all heads;
# * `choice`: cycles of the choosing;
# * `percent`: the largest r of 1, 2, ..., 100 with which choosing and sparse tiles together take *fewer* cycles than the dense attention; 0 if there is none.
#
# Try one block of queries with 2 candidates, then 64 with 64: why is the answer so different?


# %% tags=["ex-17.6"]
def predict(candidates, key_blocks, heads, kv_heads, start, step, lost, pool, score):
    """Return (dense, choice, percent), ints; candidates: a list of ints, the rest ints."""
    ### BEGIN SOLUTION
    dense = heads * sum(start + step * n for n in candidates)
    choice = pool * (heads * len(candidates) + kv_heads * key_blocks)
    choice += score * heads * sum(candidates)

    def sparse(percent):
        chosen = [(percent * n + 99) // 100 for n in candidates]
        return choice + heads * sum(start + (step + lost) * c for c in chosen)

    paying = [r for r in range(1, 101) if sparse(r) < dense]
    return dense, choice, max(paying, default=0)
    ### END SOLUTION


# %%
check("17.6", predict)
