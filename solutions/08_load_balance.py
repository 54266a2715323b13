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
# `jfa.schedule` is closed here, for you are building it, and so is `jfa.layout` in 8.2.
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
# (difficulty 1 of 3, 15 minutes) `count` tiles lie sorted by falling cost: place 0 is the largest.
# Round `r` deals the places `r * workers` to `r * workers + workers - 1`, one for each worker.
# Even rounds (0, 2, ...) are dealt from worker 0 upwards, odd rounds backwards, so that worker 0 gets the last place of the round.
# The last round may be short: places from `count` on do not exist, and who would get one gets nothing.
#
# Which places does one worker run, in order?
# The check deals with your function to all workers.
# The chapter's 48 tiles on 8 workers must come out with the loads of the text.


# %% tags=["ex-8.1"]
def zigzag_places(worker, workers, count):
    """worker in 0 .. workers - 1 -> list of ints: its places in the sorted list, by round."""
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
# (difficulty 2 of 3, 25 minutes) Causal self attention over packed sequences.
# Make the list of all query tiles, the most expensive first, with tensor operations only.
#
# * Sequence `b` has `offsets[b + 1] - offsets[b]` rows, maybe none, and a tile for every `block_m` rows begun.
# * A tile that begins at row `r` of a sequence of `n` rows sees the keys `0 .. min(r + block_m, n) - 1`.
#   Its cost is the number of blocks of `block_n` keys begun: `ceil(min(r + block_m, n) / block_n)`.
# * All results have the capacity `ceil(total / block_m) + B` slots.
#   `total` is the number of rows of the packed tensor, at least `offsets[-1]`.
# * Order: falling cost; tiles of equal cost stay in the order of memory.
#   Behind the last tile `seq` and `row` are -1, and `cost` is 0.
#   `count` is a tensor with one number.
#
# **No host reads**: no number of a tensor may be asked for, so no `.item()`, `.tolist()`, `int(...)`, no `if` or `range` on a tensor, and no operation whose result's size depends on numbers (`nonzero`, `x[mask]`, `repeat_interleave` without `output_size`).
# And no loop over sequences: at most 60 torch operations, however many sequences there are.


# %% tags=["ex-8.2"]
def sorted_tiles(offsets, total, block_m, block_n):
    """offsets [B + 1] int32, B >= 1 -> (seq, row, cost [capacity], count [1]): integers."""
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
# (difficulty 2 of 3, 15 minutes) The chapter's question, turned into a number.
# The costs of `tiles` tiles are drawn independently, with $P(\text{cost} > x) = x^{-\alpha}$ for $x \ge 1$.
# Each tile exists once for each of `heads` heads, with the same cost.
# What is the chance that the largest tile alone costs more than the mean load of the `workers`?
# In those batches no schedule of whole tiles is any better than another.
#
# Write the function that predicts it.
# Compute it or simulate it, as you like.
# The check asks for alphas, heads and workers that are not shown here, and compares with a simulation of its own; within 0.015 is right.
# Ten thousand random batches are enough for that.
# (If $u$ is uniform on $(0, 1]$, then $u^{-1/\alpha}$ has this distribution.)


# %% tags=["ex-8.3"]
def mega_share(alpha, tiles, heads, workers):
    """-> float in 0 .. 1: the share of batches whose largest tile costs more than the mean load."""
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
# (difficulty 2 of 3, 20 minutes) A persistent kernel with a queue in memory: `asked` is a counter that starts at 0, and one atomic add draws a number.
# W programs share `count` tiles.
# They obey the rules of CLC:
#
# * The first tile of program `w` is tile `w`.
#   It is not asked for.
# * The other tiles, from W on, are drawn from the counter: the first one drawn is tile W.
# * A program asks exactly once for each tile it runs, before it runs it, so that the answer is there in time.
#   If what it gets lies past the end, it stops and asks no more.
#   So in the end `asked` equals `count`.
# * Another launch may have drawn from the same counter before: then it does not start at 0, and the tiles that were drawn are not yours.
#
# Each tile is added to `out` once.
# The kernel below breaks two of the rules.
# Run the check first.
# Its report names a line where two programs meet; that is not the line to mend.


# %% tags=["ex-8.4"]
@triton.jit
def queue_kernel(x_ptr, out_ptr, asked_ptr, count, BLOCK: tl.constexpr):
    """out += 2 x, tile by tile; x, out: [count * BLOCK] fp32, asked: [1] int32."""
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
# So each sequence is one tile, and its cost is its number of blocks, `ceil(n / block)`.
# Cut what is longer than the mean load:
#
# * `size = max(1, ceil(sum of all costs / workers))`, in blocks.
# * A tile with `cost > size` is cut into `parts = ceil(cost / size)` nearly equal parts.
#   Part `p` takes the blocks `p * cost // parts` up to, but not including, `(p + 1) * cost // parts`.
#   Other tiles with keys are one part.
#   A sequence without keys has none, and its output is 0.
# * Each part computes its output and log-sum-exp by itself, as a worker of its own would: no tensor with more than size x block x D elements, unless it is `out` or `plan`.
#   Then the parts of a tile are merged.
#
# Return the outputs, the plan (one row for each part: sequence, first block, end block; in order), and what the merge costs: a part of a cut tile leaves `D + 1` numbers in memory, a whole tile nothing; `moved` is their total number.
# `torch.softmax` and `torch.logsumexp` are forbidden, and nested tensors, too.
# Scores are `q . k / sqrt(D)`.
# Behind the last offset lie rows of no sequence, which hold NaN.


# %% tags=["ex-8.5"]
def attend_in_parts(q, k, v, k_offsets, workers, block):
    """q [B, D]; k, v [rows, D]; k_offsets [B + 1] -> (out [B, D], plan [parts, 3] ints, moved)."""
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
# * `launched`: the programs of a grid that is sized by the longest sequence, one row of tiles for each sequence;
# * `valid`: how many of them have at least one row;
# * `share`: a kernel on two CTAs takes the tiles of a sequence in pairs, and an odd one gets an empty companion, a sentinel.
#   Of all units then launched, valid ones and sentinels, which share are sentinels?
#   0 where nothing is launched.
#
# The check asks for lengths that are not shown here.
# One of them is the bench shape `pma32`, whose share is 20.5 %.


# %% tags=["ex-8.6"]
def count_tiles(lengths, block):
    """lengths [B] integers -> (launched int, valid int, share float in 0 .. 1)."""
    ### BEGIN SOLUTION
    tiles = (lengths.long() + block - 1) // block
    valid = int(tiles.sum())
    paired = int(((tiles + 1) // 2 * 2).sum())
    return len(lengths) * int(tiles.max()), valid, (paired - valid) / paired if paired else 0.0
    ### END SOLUTION


# %%
check("8.6", count_tiles)
