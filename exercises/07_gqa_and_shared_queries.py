# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 07: GQA and broadcast-Q
#
# Read [notebooks/07_gqa_and_shared_queries.py](../notebooks/07_gqa_and_shared_queries.py) first.
# All tensors are fp32 and contiguous; offsets are int32.
# `H` query heads share `H_kv` key/value heads in groups of `G = H // H_kv`: query head `h` reads key/value head `h // G`.
# Rows of other sequences, and rows of no sequence, may hold NaN.
# The kernels run on the emulator; ask `tl.dot` for `input_precision="ieee"`.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 7.1 Packed rows
#
# (difficulty 1 of 3, 15 minutes) A tile holds the packed rows `first .. first + rows - 1` of one sequence and one key/value head.
# Packed row `r` is position `r // group` of the sequence, and head `r % group` of the group.
# A sequence of `len_q` positions has `len_q * group` packed rows.
# For key/value head `kv_head`, return three tensors with one entry per row of the tile: its position, its *query* head (counted over all `H`), and whether the row exists.
# Where it does not exist, position and head are -1.


# %% tags=["ex-7.1"]
def packed_rows(first, rows, len_q, group, kv_head):
    """Return (position, head, exists), each [rows]: position and head integers, exists bool."""
    raise NotImplementedError("7.1: not started")  # YOUR CODE


# %%
check("7.1", packed_rows)

# %% [markdown]
# ## 7.2 A forward that reads each key once per group
#
# (difficulty 2 of 3, 60 minutes) Jagged attention with grouped heads.
# The tile list counts *packed* rows: program `(t, c)` works on key/value head `c`, sequence `tiles[t][0]`, packed rows from `tiles[t][1]` on.
# Load the tile's queries (of all heads of the group), loop over the keys once, and store.
# Queries whose sequence has no keys give 0.
#
# Launched on `(number of tiles, H_kv)` with `BM=BN=16`.
# Limits: at most 2 loads for each block of keys of each program, and 7 more for each program; no block larger than 512 elements.


# %% tags=["ex-7.2"]
@triton.jit
def grouped_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    H,
    H_KV,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store out: [total_q, H, D], like q; k, v: [total_kv, H_KV, D]; D is 16 or 32."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    pass  # YOUR CODE


# %%
check("7.2", grouped_kernel)

# %% [markdown]
# ## 7.3 One query for all, and an answer where it is wanted
#
# (difficulty 2 of 3, 55 minutes) Attention pooling.
# `q` is `[Lq, H, D]`, the same for every sequence, and it is not copied.
# Sequence `b` writes `Lq` rows of `out`, and `slots[b]` is the first of them: the caller may want the pooled rows between other rows.
# (`slots` is `[B]` int32; the package's op calls it `output_offset`.)
# If the rows of a slot are not all inside `out` (negative, or past the end), do not write any of them.
# Rows of `out` that no slot covers stay as they are.
# A sequence without keys writes zeros.
#
# Program `(b, h)` of `(B, H)`; `Lq` is at most `BL`.
# Launched with `BL=16, BN=16`.
# Limits: at most 2 loads for each block of keys and 4 more for each program; no block larger than 512 elements.


# %% tags=["ex-7.3"]
@triton.jit
def pooled_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_offsets_ptr,
    slots_ptr,
    out_ptr,
    scale,
    LQ,
    ROWS,
    H,
    D: tl.constexpr,
    BL: tl.constexpr,
    BN: tl.constexpr,
):
    """Store pooled rows in out [ROWS, H, D]; q [LQ, H, D]; k, v [total_kv, H, D]; D is 16 or 32."""
    b, head = tl.program_id(0), tl.program_id(1)
    pass  # YOUR CODE


# %%
check("7.3", pooled_kernel)

# %% [markdown]
# ## 7.4 Predict: who adds how often, and what it costs
#
# (difficulty 1 of 3, 20 minutes) There are three ways to compute dQ of a shared query `[len_q, heads, dim]`, over sequences with the given numbers of keys (`lengths`):
#
# * `"contended"`: each tile of `block` keys of each sequence adds its part to dQ with atomics.
# * `"partials"`: each sequence that has keys stores one partial dQ in memory, and one pass adds them up.
# * `"resident"`: `workers` programs share the sequences that have keys; each keeps its dQ on the chip and stores one partial, and one pass adds them up.
#   Programs that get no sequence store nothing.
#
# Return three predictions:
#
# * `adds`: the number of atomic adds to one element of dQ;
# * `extra`: the number of elements that the partials take in memory;
# * `moved`: the number of elements written to partials and to the final dQ, by stores or atomics (each lane of an atomic counts as one).
#   In the contended way the atomics write dQ itself; in the others the last pass writes it once.
#
# The check uses numbers that are not shown here.


# %% tags=["ex-7.4"]
def dq_traffic(way, lengths, block, workers, len_q, heads, dim):
    """Return (adds, extra, moved), three ints; lengths: list of ints, the keys per sequence."""
    raise NotImplementedError("7.4: not started")  # YOUR CODE


# %%
check("7.4", dq_traffic)

# %% [markdown]
# ## 7.5 Bug hunt: the gradient that stops growing
#
# (difficulty 2 of 3, 15 minutes) A kernel adds up `parts` partial dQ in a fixed order.
# It is right for a few sequences.
# In training, with hundreds of them, the seeds hardly learn.
# The parts are bf16, `dq` is fp32, and the result is far too small.
# Find where the sum loses its terms, and fix it.
# The order of the sum must stay fixed, and no part may be read twice.
#
# Launched on one program for each `BLOCK` elements, 16 or 64.
# Limit: at most as many loads as there are parts, for each program.


# %% tags=["ex-7.5"]
@triton.jit
def sum_kernel(part_ptr, dq_ptr, parts, N, BLOCK: tl.constexpr):
    """Store the sum of the parts in dq: [N] fp32; part: [parts, N] bf16, N a multiple of BLOCK."""
    # YOUR CODE: the kernel below is right for a few parts only
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.bfloat16)
    for b in range(parts):
        total = (total + tl.load(part_ptr + b * N + at)).to(tl.bfloat16)
    tl.store(dq_ptr + at, total.to(tl.float32))


# %%
check("7.5", sum_kernel)

# %% [markdown]
# ## 7.6 The resident dQ
#
# (difficulty 3 of 3, 95 minutes) This is version 5, which the chapter describes but does not show.
# Program `w` of `W` (`W` is `workers`) keeps Q and its own dQ on the chip.
# It processes the sequences `w`, `w + W`, `w + 2 W`, ... and adds the contribution of each.
# At the end it stores one partial.
# A second kernel adds the partials, always in the same order.
# So no atomics are needed, and every run gives the same bits; the check runs your kernels under four orders of their programs and compares bit by bit.
#
# Write both kernels and the launch, for one head.
# `block_dq` is given: it returns the contribution of one block of keys; rows of `k` and `v` that do not exist must be 0.
# `q` is `[LQ, D]`, `k, v` are `[total_kv, D]`, `dout` is `[B, LQ, D]`, `lse` and `delta` are `[B, LQ]`, with natural logarithms.
# The result is `dq [LQ, D]`, fp32.
# Sequences may have no keys: their `lse` is -inf, and they contribute nothing.
# Limits: at most `W * LQ * D + LQ * D` elements stored; the kernels make the products, at least one per block of keys.


# %% tags=["ex-7.6"]
@triton.jit
def block_dq(q, k, v, dout, lse, delta, exists, scale):
    """Return a block's dQ [BL, D]; q, dout [BL, D]; k, v [BN, D]; lse, delta [BL]; exists [BN]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.where(exists[None, :], tl.exp(s - lse[:, None]), 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return tl.dot(p * (dp - delta[:, None]), k, input_precision="ieee") * scale


def resident_dq(q, k, v, dout, lse, delta, k_offsets, scale, workers):
    """Return dq [LQ, D] from kernels of your own; LQ <= 16, D is 16 or 32; blocks of 16 keys."""
    raise NotImplementedError("7.6: not started")  # YOUR CODE


# %%
check("7.6", resident_dq)
