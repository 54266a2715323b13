# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 08: load balance
#
# Read [notebooks/08_load_balance.py](../notebooks/08_load_balance.py) first.
# `jfa.schedule` is out of bounds here, because you are building it, and so is `jfa.layout` in 8.2.
# Everything runs on a CPU.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 8.1 Zigzag, as a persistent kernel computes it
#
# (difficulty 1 of 3, 15 minutes) `count` tiles are sorted by falling cost: place 0 is the largest.
# Round `r` assigns the places `r * workers` to `r * workers + workers - 1`, one per worker.
# Even rounds (0, 2, ...) go from worker 0 upward, odd rounds backward, so that worker 0 gets the last place of the round.
# The last round may be short: places from `count` on do not exist, and a worker that would get one gets nothing.
#
# Return the places that one worker runs, in order.
# The check calls your function for all workers.
# The chapter's 48 tiles on 8 workers must get the loads that the chapter prints.


# %% tags=["ex-8.1"]
def zigzag_places(worker, workers, count):
    """Return the worker's places in the sorted list, a list of ints; worker counts from 0."""
    ### BEGIN SOLUTION
    places = []
    for r in range(-(-count // workers)):
        turn = worker if r % 2 == 0 else workers - 1 - worker
        if r * workers + turn < count:
            places.append(r * workers + turn)
    return places
    ### END SOLUTION


# %%
check("8.1", zigzag_places)

# %% [markdown]
# ## 8.2 A sorted tile list that never asks the host
#
# (difficulty 2 of 3, 25 minutes) Causal self-attention over packed sequences.
# Make the list of all query tiles, the most expensive first, with tensor operations only.
#
# * Sequence `b` has `n = offsets[b + 1] - offsets[b]` rows, possibly none, and `ceil(n / block_m)` tiles.
# * A tile that begins at row `r` of a sequence of `n` rows sees the keys `0 .. min(r + block_m, n) - 1`.
#   Its cost is its number of blocks of `block_n` keys: `ceil(min(r + block_m, n) / block_n)`.
# * All results have the capacity `ceil(total / block_m) + B` slots.
#   `total` is the number of rows of the packed tensor, at least `offsets[-1]`.
# * Order: falling cost; tiles of equal cost stay in memory order.
#   After the last tile `seq` and `row` are -1, and `cost` is 0.
#   `row` counts from the start of its sequence, and `count` is a tensor with one number, the number of tiles.
#
# **No host reads**: no number of a tensor may be read on the host, so no `.item()`, `.tolist()`, `int(...)`, no `if` or `range` on a tensor, and no operation whose result's size depends on values (`nonzero`, `x[mask]`, `repeat_interleave` without `output_size`).
# And no loop over sequences: at most 60 torch operations, however many sequences there are.


# %% tags=["ex-8.2"]
def sorted_tiles(offsets, total, block_m, block_n):
    """Return (seq, row, cost [capacity], count [1]), integers; offsets [B + 1] int32, B >= 1."""
    ### BEGIN SOLUTION
    lengths = (offsets[1:] - offsets[:-1]).long()
    slot = torch.arange(-(-total // block_m) + len(lengths), device=offsets.device)
    tiles = (lengths + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    seq = torch.searchsorted(ends, slot, right=True).clamp(max=len(lengths) - 1)
    row = (slot - (ends - tiles)[seq]) * block_m
    seen = torch.minimum(row + block_m, lengths[seq])
    cost = torch.where(slot < ends[-1], (seen + block_n - 1) // block_n, 0)
    cost, order = torch.sort(cost, descending=True, stable=True)
    there = slot < ends[-1]  # a tile costs at least 1, so the tiles come first
    return torch.where(there, seq[order], -1), torch.where(there, row[order], -1), cost, ends[-1:]
    ### END SOLUTION


# %%
check("8.2", sorted_tiles)

# %% [markdown]
# ## 8.3 Predict: how often does a mega-tile decide?
#
# (difficulty 2 of 3, 15 minutes) This turns the chapter's question into a number.
# The costs of `tiles` tiles are drawn independently, with $P(\text{cost} > x) = x^{-\alpha}$ for $x \ge 1$.
# Each tile exists once per head (`heads` of them), with the same cost.
# What is the probability that the largest tile alone costs more than the mean load of the `workers`?
# In such a batch a mega-tile decides, and no schedule of whole tiles reaches the mean load.
#
# Write the function that predicts this probability; compute it or simulate it.
# The check uses alphas, heads and workers that are not shown here, and compares with its own simulation; within 0.015 is right.
# Ten thousand random batches are enough for that.
# (If $u$ is uniform on $(0, 1]$, then $u^{-1/\alpha}$ has this distribution.)


# %% tags=["ex-8.3"]
def mega_share(alpha, tiles, heads, workers):
    """Return the share of batches, 0 to 1, whose largest tile costs more than the mean load."""
    ### BEGIN SOLUTION
    u = 1 - torch.rand(20_000, tiles, dtype=torch.float64)
    cost = u ** (-1 / alpha)
    mean_load = heads * cost.sum(1) / workers
    return float((cost.amax(1) > mean_load).double().mean())
    ### END SOLUTION


# %%
check("8.3", mega_share)

# %% [markdown]
# ## 8.4 Bug hunt: a queue worker that is too eager
#
# (difficulty 2 of 3, 20 minutes) A persistent kernel with a queue in memory: `asked` is a counter, normally 0 at the start, and one atomic add draws a number from it.
# W programs share `count` tiles.
# They follow the rules of CLC:
#
# * The first tile of program `w` is tile `w`.
#   It is not requested.
# * The other tiles, from W on, are drawn from the counter: the first one drawn is tile W.
# * A program draws exactly once per tile that it runs, before it runs the tile, so that the answer arrives in time.
#   If the drawn tile is past the end, it stops and draws no more.
#   So in the end `asked` equals `count`.
# * Another launch may have drawn from the same counter before: then it does not start at 0, and the tiles already drawn are not yours.
#
# Each tile must be added to `out` once.
# The kernel below breaks two of the rules.
# Run the check first.
# Its report names a line where two programs conflict; that is not the line to fix.


# %% tags=["ex-8.4"]
@triton.jit
def queue_kernel(x_ptr, out_ptr, asked_ptr, count, BLOCK: tl.constexpr):
    """Add 2 x to out, tile by tile; x, out: [count * BLOCK] fp32, asked: [1] int32."""
    # YOUR CODE: below, tiles are drawn wrongly
    rows = tl.arange(0, BLOCK)
    tile = tl.program_id(0)
    ### BEGIN SOLUTION
    while tile < count:
        upcoming = tl.num_programs(0) + tl.atomic_add(asked_ptr, 1)
        at = tile * BLOCK + rows
        x = tl.load(x_ptr + at)
        tl.store(out_ptr + at, tl.load(out_ptr + at) + 2 * x)
        tile = upcoming
    ### STARTER
    # upcoming = tl.atomic_add(asked_ptr, 1)
    # while tile < count:
    #     at = tile * BLOCK + rows
    #     x = tl.load(x_ptr + at)
    #     tl.store(out_ptr + at, tl.load(out_ptr + at) + 2 * x)
    #     tile = upcoming
    #     upcoming = tl.atomic_add(asked_ptr, 1)
    ### END SOLUTION


# %%
check("8.4", queue_kernel)

# %% [markdown]
# ## 8.5 Cut the long tiles, and merge them
#
# (difficulty 3 of 3, 45 minutes) Each sequence has one query, `q[b]`, and its own packed keys.
# So each sequence is one tile, and its cost is its number of blocks of keys, `ceil(n / block)`.
# Cut the tiles that cost more than the mean load:
#
# * `size = max(1, ceil(sum of all costs / workers))`, in blocks.
# * A tile with `cost > size` is cut into `parts = ceil(cost / size)` nearly equal parts.
#   Part `p` takes the blocks `p * cost // parts` up to, but not including, `(p + 1) * cost // parts`.
#   Other tiles with keys have one part.
#   A sequence without keys has no part, and its output is 0.
# * Each part computes its output and log-sum-exp by itself, as a separate worker would: no tensor with more than size x block x D elements, unless it is `out` or `plan`.
#   Then the parts of a tile are merged.
#
# Return the outputs, the plan (one row per part: sequence, first block, end block; in order), and `moved`, an int: how many numbers are stored for the merge.
# Each part of a cut tile stores `D + 1` numbers, a whole tile none.
# `torch.softmax` and `torch.logsumexp` are forbidden, and nested tensors, too.
# Scores are `q . k / sqrt(D)`.
# Rows after the last offset belong to no sequence and hold NaN.


# %% tags=["ex-8.5"]
def attend_in_parts(q, k, v, k_offsets, workers, block):
    """Return (out [B, D], plan [parts, 3] ints, moved); q [B, D]; k, v [rows, D]."""
    ### BEGIN SOLUTION
    bounds, dim = k_offsets.tolist(), q.shape[1]
    costs = [-(-(end - begin) // block) for begin, end in zip(bounds, bounds[1:])]
    size = max(1, -(-sum(costs) // workers))
    out, plan, moved = torch.zeros_like(q), [], 0
    for b, cost in enumerate(costs):
        parts = -(-cost // size)
        acc, lse = torch.zeros(dim), torch.tensor(-torch.inf)
        for p in range(parts):
            first, end = p * cost // parts, (p + 1) * cost // parts
            plan.append((b, first, end))
            rows = slice(bounds[b] + first * block, min(bounds[b] + end * block, bounds[b + 1]))
            scores = k[rows] @ q[b] / dim**0.5
            top = scores.max()
            weights = torch.exp(scores - top)
            part, part_lse = weights @ v[rows] / weights.sum(), top + torch.log(weights.sum())
            both = torch.logaddexp(lse, part_lse)
            acc = acc * torch.exp(lse - both) + part * torch.exp(part_lse - both)
            lse = both
        out[b] = acc
        moved += parts * (dim + 1) if parts > 1 else 0
    return out, torch.tensor(plan, dtype=torch.int64).reshape(-1, 3), moved
    ### END SOLUTION


# %%
check("8.5", attend_in_parts)

# %% [markdown]
# ## 8.6 Predict: empty tiles and sentinels
#
# (difficulty 1 of 3, 15 minutes) Sequences of the given `lengths` are cut into tiles of `block` rows.
# Predict three numbers:
#
# * `launched`: the programs of a grid that is sized by the longest sequence, with the same number of tiles for each sequence;
# * `valid`: the number of those that have at least one row;
# * `share`: a kernel on two CTAs takes the tiles of a sequence in pairs, and an odd one gets an empty companion, a sentinel.
#   Return the share of sentinels among all tiles launched then, valid ones and sentinels; 0 if there are none.
#
# The check uses lengths that are not shown here.
# One of them is the bench shape `pma32`, whose share is 20.5 %.


# %% tags=["ex-8.6"]
def count_tiles(lengths, block):
    """Return (launched, valid, share): int, int, float in 0 .. 1; lengths: [B] integer tensor."""
    ### BEGIN SOLUTION
    tiles = (lengths.long() + block - 1) // block
    valid = int(tiles.sum())
    paired = int(((tiles + 1) // 2 * 2).sum())
    return len(lengths) * int(tiles.max()), valid, (paired - valid) / paired if paired else 0.0
    ### END SOLUTION


# %%
check("8.6", count_tiles)
