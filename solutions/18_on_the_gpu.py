# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 18: on the GPU
#
# Read [notebooks/18_on_the_gpu.py](../notebooks/18_on_the_gpu.py) first.
# No exercise here needs a GPU: they are about what you do before a run on a GPU, and with its result.
#
# `jfa.masks`, `jfa.schedule` and `jfa.bench` would count for you, so they are not allowed here.

# %% tags=["setup"]
import math
import statistics

import torch

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 18.1 The FLOPs of a causal batch
#
# (difficulty 1 of 3, 15 minutes) TFLOP/s are FLOPs over time, so the FLOPs must be right first.
# Count exactly the pairs that the mask allows.
# The mask is causal and aligned at the end: the last query of a sequence sees its last key, so query `i` of `n` sees the keys `0 .. i + m - n` of `m`.
# Where that is negative it sees none.
#
# The forward has two products, Q K^T and P V: each pair costs `2 * D` FLOPs in each of them, per head.
# The backward has five such products.
# Return a whole number.


# %% tags=["ex-18.1"]
def causal_flops(len_q, len_kv, heads, head_dim, backward=False):
    """Return the FLOPs of the forward's or the backward's products; len_q, len_kv: [B] int64."""
    ### BEGIN SOLUTION
    pairs = 0
    for n, m in zip(len_q.tolist(), len_kv.tolist()):
        pairs += sum(max(i + 1 + m - n, 0) for i in range(n))
    products = 5 if backward else 2
    return products * 2 * head_dim * heads * pairs
    ### END SOLUTION


# %%
check("18.1", causal_flops)

# %% [markdown]
# ## 18.2 The fewest bytes of attention pooling
#
# (difficulty 2 of 3, 15 minutes) A forward with a shared query (`broadcast_q`): B sequences of keys and values, one query `[len_q, heads, head_dim]` for all of them.
# However clever the kernel is, it reads every input once and writes every output once.
# Count these bytes:
#
# - the query, once: it is shared;
# - K and V: `[total_kv, kv_heads, head_dim]` each, and `kv_heads` may be smaller than `heads`;
# - the output: `len_q` rows for *every* sequence, also for one without keys (its rows are zeros, and they must be written);
# - the log-sum-exp: one fp32 number per output row and head.
#
# All but the log-sum-exp have `itemsize` bytes per number.
# Leave the offsets out.
# Return a whole number.


# %% tags=["ex-18.2"]
def pooling_bytes(len_kv, len_q, heads, kv_heads, head_dim, itemsize):
    """Return the fewest bytes of one forward; len_kv: [B] int64, the others ints."""
    ### BEGIN SOLUTION
    batches, total_kv = len(len_kv), int(len_kv.sum())
    query = len_q * heads * head_dim
    keys_and_values = 2 * total_kv * kv_heads * head_dim
    out_rows = batches * len_q
    numbers = query + keys_and_values + out_rows * heads * head_dim
    return numbers * itemsize + out_rows * heads * 4
    ### END SOLUTION


# %%
check("18.2", pooling_bytes)

# %% [markdown]
# ## 18.3 Predict before you measure
#
# (difficulty 1 of 3, 20 minutes) A kernel keeps three units busy at the same time: memory, tensor cores, exponential units.
# Each needs its own time for its own work, and in the best case they overlap completely.
# So the kernel cannot be faster than the slowest of the three.
#
# `chip` holds `tb_per_s` (10^12 bytes per second), `tflops` (10^12 FLOPs per second) and `texp_per_s` (10^12 exponentials per second).
# Return the least time in **milliseconds** and what limits it: `"bytes"`, `"tensor"` or `"exp"`.


# %% tags=["ex-18.3"]
def predict(flops, least_bytes, exponentials, chip):
    """Return (milliseconds, "bytes" | "tensor" | "exp") from one call's numbers and a chip."""
    ### BEGIN SOLUTION
    seconds = {
        "bytes": least_bytes / (chip["tb_per_s"] * 1e12),
        "tensor": flops / (chip["tflops"] * 1e12),
        "exp": exponentials / (chip["texp_per_s"] * 1e12),
    }
    limit = max(seconds, key=seconds.get)
    return seconds[limit] * 1e3, limit
    ### END SOLUTION


# %%
check("18.3", predict)

# %% [markdown]
# ## 18.4 Read a result
#
# (difficulty 2 of 3, 15 minutes) A result file that keeps every run: `result["timings"]` is a list of entries such as
#
# ```python
# {"shape": "self", "name": "fa2", "ms": [1.17, 1.16, 9.41, 1.18], "note": ""}
# {"shape": "self", "name": "fa4", "ms": None, "note": "flash-attn-4 is not installed"}
# ```
#
# `"jfa"` is ours, every other name is a peer.
# For one `shape` find the *best* peer and the ratio of its time to ours: above 1 we are faster.
# A single run is disturbed easily, so compare medians.
# Return (the peer's name, the ratio).
# At least one peer has been measured.


# %% tags=["ex-18.4"]
def ratio_to_best_peer(result, shape):
    """Return (best peer's name, its median time / our median time) for a shape of a result."""
    ### BEGIN SOLUTION
    entries = [t for t in result["timings"] if t["shape"] == shape and t["ms"] is not None]
    medians = {t["name"]: statistics.median(t["ms"]) for t in entries}
    ours = medians.pop("jfa")
    best = min(medians, key=medians.get)
    return best, medians[best] / ours
    ### END SOLUTION


# %%
check("18.4", ratio_to_best_peer)

# %% [markdown]
# ## 18.5 What bounds it?
#
# (difficulty 3 of 3, 15 minutes) A profiler's numbers for one kernel:
#
# - `active_cycles`: for each SM, how many cycles it had work;
# - `dram`, `tensor`, `xu`: how busy memory, tensor cores and exponential units were, in percent of their peak over the *whole* kernel, mean of all SMs.
#
# Decide in this order:
#
# 1. `balance` = mean of the active cycles / largest active cycles. Below 0.75 the answer is `"imbalance"`: most SMs wait for a few.
# 2. Otherwise compute how busy each unit was *while SMs had work*: its percentage divided by `balance`. If the busiest reaches 70 or more, it is the limit: `"bytes"`, `"tensor"` or `"exp"`.
# 3. If none does, the answer is `"waiting"`: roles wait for each other at barriers, and no unit is the limit.
#
# Return (balance, the word).


# %% tags=["ex-18.5"]
def what_bounds(active_cycles, dram, tensor, xu):
    """Return (balance, "imbalance" | "bytes" | "tensor" | "exp" | "waiting").

    active_cycles: [SMs] float; dram, tensor, xu: percent of the peak.
    """
    ### BEGIN SOLUTION
    balance = float(active_cycles.mean() / active_cycles.max())
    if balance < 0.75:
        return balance, "imbalance"
    busy = {"bytes": dram / balance, "tensor": tensor / balance, "exp": xu / balance}
    busiest = max(busy, key=busy.get)
    return balance, busiest if busy[busiest] >= 70 else "waiting"
    ### END SOLUTION


# %%
check("18.5", what_bounds)

# %% [markdown]
# ## 18.6 No schedule beats this
#
# (difficulty 2 of 3, 10 minutes) `costs` are the costs of the tiles of a launch, `workers` is the number of SMs.
# Whatever the order, the launch takes at least as long as its largest tile, and at least as long as the work divided evenly over all SMs.
#
# Return (that bound, `pieces`): `pieces` is the smallest number of equal parts into which the *largest* tile must be cut so that a part is no larger than the even share.
# It is 1 if the largest tile is no larger than that.


# %% tags=["ex-18.6"]
def makespan_bound(costs, workers):
    """Return (least time of the launch, parts of the largest tile); costs: numbers > 0."""
    ### BEGIN SOLUTION
    largest, even_share = max(costs), sum(costs) / workers
    return max(largest, even_share), max(1, math.ceil(largest / even_share))
    ### END SOLUTION


# %%
check("18.6", makespan_bound)
