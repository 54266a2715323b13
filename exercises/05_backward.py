# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 05: the backward
#
# Read [notebooks/05_backward.py](../notebooks/05_backward.py) first.
# Packed tensors are as in chapter 04: `q: [total_q, H, D]`, `lse` and `delta: [H, total_q]`, offsets `[B + 1]` int32, all contiguous.
# `lse` is natural.
# The kernels run on the emulator; ask `tl.dot` for `input_precision="ieee"`.
#
# Rows of other sequences may hold NaN or huge numbers: none of them may reach your result.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 5.1 Delta of every packed row
#
# (difficulty 1 of 3, 10 minutes) Before it processes any block, the backward needs `delta[h, t]`: the dot product of `dout` and `out` in row `t`, head `h`, minus the gradient of lse.
# `dlse` is `None` if lse was not used.
# Inputs may be bf16.
# Products of two bf16 numbers do not fit bf16, so compute in fp32 and return fp32.


# %% tags=["ex-5.1"]
def row_constants(out, dout, dlse):
    """Return delta [H, total_q] fp32.

    out, dout: [total_q, H, Dv] fp32 or bf16; dlse: [H, total_q] fp32 or None.
    """
    raise NotImplementedError("5.1: not started")  # YOUR CODE


# %%
check("5.1", row_constants)

# %% [markdown]
# ## 5.2 One block's contributions
#
# (difficulty 2 of 3, 15 minutes) You get some queries of a sequence and some of its keys.
# Compute what this block adds to the three gradients, dQ, dK and dV.
# `lse` and `delta` belong to the *whole* rows, and a row may have many more keys than you are given.
# So a softmax over this block does not give P.
#
# A row with `lse = -inf` sees no key.
# It adds nothing to any gradient, whatever its `q`, `dout` and `delta` hold, NaN included, and its row of `dq` is 0.
#
# Limit: at most 5 matrix products.


# %% tags=["ex-5.2"]
def block_gradients(q, k, v, dout, lse, delta, scale):
    """Return (dq [m, D], dk [n, D], dv [n, Dv]).

    q: [m, D], k: [n, D], v: [n, Dv], dout: [m, Dv], lse, delta: [m], all fp32.
    """
    raise NotImplementedError("5.2: not started")  # YOUR CODE


# %%
check("5.2", block_gradients)

# %% [markdown]
# ## 5.3 The jagged dK/dV kernel
#
# (difficulty 2 of 3, 35 minutes) The mirror of the chapter's jagged dQ kernel, with an addition.
# `GROUP` query heads share a key head: query head `h` reads key head `h // GROUP` (chapter 02).
# So the gradients of a key head are sums over the heads of its group.
#
# Launched on `(number of tiles, H // GROUP)`: program `(t, g)` works on key head `g` and on the *key* tile `tiles[t] = (sequence, first key in it)`.
# `BM = BN = 16`.
# `lse` is `-inf` for queries whose sequence has no key.
# `dk` and `dv` hold NaN before the launch.
# Keys whose sequence has no query get 0.
#
# Limits: no block larger than 512 elements; at most 8 loads per program, and 4 more for each block of queries and head of the group.


# %% tags=["ex-5.3"]
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr,
    tiles_ptr, dk_ptr, dv_ptr, scale, total_q, H,
    D: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store dk, dv: [total_kv, H // GROUP, D], like k, v; q, dout: [total_q, H, D]; all fp32."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    pass  # YOUR CODE


# %%
check("5.3", dkdv_kernel)

# %% [markdown]
# ## 5.4 Bug hunt: right for one sequence
#
# (difficulty 2 of 3, 30 minutes) This is version 2 of the chapter, made jagged by a colleague: one kernel, dQ by atomics.
# Run the check before you change anything, and read the emulator's report.
# The line that it names is where the error shows, not where it is made.
# Ask where the values in that line come from.
# A first fix can be right for one sequence and still be wrong for two.
#
# Launched on `(number of key tiles, H)`, `BM = BN = 16`; `dq` holds 0 before the launch, `dk` and `dv` hold NaN.
# Queries whose sequence has no key have `lse = -inf` and get `dq = 0`; their other inputs may be NaN.


# %% tags=["ex-5.4"]
@triton.jit
def one_pass_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr,
    tiles_ptr, dq_ptr, dk_ptr, dv_ptr, scale, total_q, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dq: [total_q, H, D], like q, dout; dk, dv: [total_kv, H, D], like k, v."""
    # YOUR CODE: fix this kernel
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d = tl.arange(0, D)
    keys = k_begin + first + tl.arange(0, BN)
    at_keys = (keys[:, None] * H + head) * D + d[None, :]
    k = tl.load(k_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)
    v = tl.load(v_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for start in range(q_begin, q_end, BM):
        rows = start + tl.arange(0, BM)
        mine = rows < total_q
        at_rows = (rows[:, None] * H + head) * D + d[None, :]
        q = tl.load(q_ptr + at_rows, mask=mine[:, None], other=0.0)
        do = tl.load(dout_ptr + at_rows, mask=mine[:, None], other=0.0)
        lse = tl.load(lse_ptr + head * total_q + rows, mask=mine, other=float("inf"))
        delta = tl.load(delta_ptr + head * total_q + rows, mask=mine, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
        ds = tl.where(keys[None, :] < k_end, ds, 0.0)
        part = tl.dot(ds, k, input_precision="ieee") * scale
        tl.atomic_add(dq_ptr + at_rows, part)
    tl.store(dk_ptr + at_keys, dk * scale, mask=keys[:, None] < k_end)
    tl.store(dv_ptr + at_keys, dv, mask=keys[:, None] < k_end)


# %%
check("5.4", one_pass_kernel)

# %% [markdown]
# ## 5.5 Predict products, bytes and additions
#
# (difficulty 2 of 3, 30 minutes) There are three ways to compute a packed backward, here without a mask and with the same head dim `D` for all tensors:
#
# - `"stored"`: the forward kept P.
#   Counted as one kernel that reads P and does the other four products, without atomics.
# - `"atomics"`: version 2.
# - `"two kernels"`: version 3.
#
# Predict three integers.
#
# - **FLOPs** of the matrix products, over the pairs that exist.
#   A product costs 2 · D FLOPs per pair and head.
# - **Bytes**, the least that must be moved: each kernel reads each tensor that it needs once, and writes each result once.
#   `q, k, v, dout`, the three gradients and P are bf16 (2 bytes); `lse` and `delta` are fp32 (4).
#   `delta` is given; P makes `lse` unnecessary.
#   With atomics there is also an fp32 accumulator with the shape of `dq`: zeros are written to it once, and it is read once to make `dq`.
#   The bytes that the additions themselves move are not counted.
# - **Additions**: how many fp32 numbers atomics add, with key tiles of `BN` keys.


# %% tags=["ex-5.5"]
def cost(strategy, len_q, len_kv, heads, D, BN):
    """Return (FLOPs, bytes, additions), ints; len_q, len_kv: lists of ints."""
    raise NotImplementedError("5.5: not started")  # YOUR CODE


# %%
check("5.5", cost)

# %% [markdown]
# ## 5.6 Back through a merge
#
# (difficulty 3 of 3, 25 minutes) Two workers each attended to a part of the keys, and chapter 02's merge combined their results:
# `lse = log(exp(lse1) + exp(lse2))`, `out = exp(lse1 - lse) · out1 + exp(lse2 - lse) · out2`.
# You get the gradients `dout` and `dlse` of the merged result.
# Compute the gradients for each worker: `dout1`, `dlse1` and `dout2`, `dlse2`.
# Then each worker runs its backward as if it had been alone, with delta as in 5.1.
#
# This is where dlse comes from: even if the merged lse is not used (`dlse` is 0), the lse of each part has a gradient, because it determines the part's share.
#
# A part without keys has `lse = -inf` and `out = 0`; its gradients are 0, and the other part gets everything.
# Both may be empty.
# The lse may be several hundred, positive or negative.


# %% tags=["ex-5.6"]
def merge_backward(out1, lse1, out2, lse2, dout, dlse):
    """Return (dout1, dlse1, dout2, dlse2), with the shapes of out1, lse1, out2, lse2.

    out1, out2, dout: [T, H, D]; lse1, lse2, dlse: [H, T], all fp32.
    """
    raise NotImplementedError("5.6: not started")  # YOUR CODE


# %%
check("5.6", merge_backward)
