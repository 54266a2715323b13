# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 04: the jagged forward
#
# Read [notebooks/04_jagged_forward.py](../notebooks/04_jagged_forward.py) first.
# All tensors are packed: `q: [total_q, H, D]`, `k: [total_kv, H, D]`, `v: [total_kv, H, Dv]`, fp32 and contiguous; `q_offsets, k_offsets: [B + 1]` int32.
# `Dv` equals `D` unless an exercise says otherwise.
# Rows of other sequences may hold NaN or huge numbers: none of them may reach your result.
# The kernels run on the emulator.
#
# Every program does its own share of the work and no other: **each element of a result is stored once**.
# Scores may lie anywhere between -50,000 and 50,000, in any order along the keys, and those of neighboring queries may differ by hundreds.
#
# `tl.dot` rounds fp32 operands to TF32, which is too coarse for the checks here: ask for `input_precision="ieee"`.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 4.1 A tile list without empty tiles
#
# (difficulty 1 of 3, 10 minutes) On the host: from the packed `offsets` and a block size, make the list of tiles that the launch needs.
# A tile is a pair (sequence, first row inside the sequence).
# A sequence of length `n` has `ceil(n / block)` tiles; one of length 0 has none.
# Return a tensor `[tiles, 2]`, int32, sequences in order, rows ascending.
# (`jfa.schedule`, which makes such lists, is out of bounds here.)
#
# Example: lengths `[3, 0, 5]` and block 2 give `(0, 0), (0, 2), (2, 0), (2, 2), (2, 4)`.


# %% tags=["ex-4.1"]
def tile_list(offsets, block):
    """Return [tiles, 2] int32: (sequence, first row inside it); offsets: [B + 1] int32."""
    raise NotImplementedError("4.1: not started")  # YOUR CODE


# %%
check("4.1", tile_list)

# %% [markdown]
# ## 4.2 The log-sum-exp of every query
#
# (difficulty 2 of 3, 30 minutes) The forward pass keeps one number for the backward: `lse[h, t] = log(sum over keys j of exp(scale * q_t . k_j))`, over the keys of `t`'s own sequence, natural logarithm, `-inf` where that sequence has no key.
# Write the kernel that computes only this, walking the keys in blocks.
#
# Launched on `(number of tiles, H)`: program `(t, h)` works on the tile `tiles[t] = (sequence, first row)`, a list as in 4.1 with block `BM`.
# `BM=BN=16`.
# Limit: no block larger than 512 elements.


# %% tags=["ex-4.2"]
@triton.jit
def lse_kernel(
    q_ptr,
    k_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    tiles_ptr,
    lse_ptr,
    scale,
    total_q,
    H,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store lse: [H, total_q] fp32; q: [total_q, H, D], k: [total_kv, H, D]; D is 16 or 32."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    pass  # YOUR CODE


# %%
check("4.2", lse_kernel)

# %% [markdown]
# ## 4.3 The poisoned neighbor
#
# (difficulty 2 of 3, 10 minutes) One step of a forward pass: `acc = acc + P @ V` for one block of keys, of which only the first `valid` belong to this sequence.
# The probabilities of the other keys are already 0.
# Those keys belong to the next sequence, and in this exercise the next sequence is broken: its values are NaN and infinities.
# `0 * NaN` is NaN.
# Finish the kernel so that nothing of the next sequence reaches `acc`, in at most 3 loads.
#
# Launched as `pv_kernel[(1,)](p, v, acc, valid, ROWS=16, KEYS=16, D=16)`, and with other sizes.
# The tensor `v` has `KEYS` rows, all of them readable.
# Limit: at most 3 loads.


# %% tags=["ex-4.3"]
@triton.jit
def pv_kernel(
    p_ptr, v_ptr, acc_ptr, valid, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    """Add P @ V[:valid] to acc; p: [ROWS, KEYS], v: [KEYS, D], acc: [ROWS, D], all fp32."""
    r, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    p = tl.load(p_ptr + r[:, None] * KEYS + j[None, :])
    acc = tl.load(acc_ptr + r[:, None] * D + d[None, :])
    pass  # YOUR CODE
    tl.store(acc_ptr + r[:, None] * D + d[None, :], acc)


# %%
check("4.3", pv_kernel)

# %% [markdown]
# ## 4.4 Attention with a distance penalty
#
# (difficulty 3 of 3, 50 minutes) The whole jagged forward with an addition (ALiBi): each score is lowered by `slope[h]` per position between query and key.
# So `s = scale * q_i . k_j - slope[h] * |i - j|`, with `i` and `j` counted from the start of their own sequence.
# Queries whose sequence has no keys give 0.
# `Dv` may differ from `D`.
#
# Launched as in 4.2, on `(number of tiles, H)`, `BM=BN=16`.
# Limit: no block larger than 512 elements.


# %% tags=["ex-4.4"]
@triton.jit
def alibi_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slope_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    H,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store out: [total_q, H, DV] fp32; slope: [H] fp32; D and DV are 16 or 32."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    pass  # YOUR CODE


# %%
check("4.4", alibi_kernel)

# %% [markdown]
# ## 4.5 One query that pools a sequence
#
# (difficulty 3 of 3, 45 minutes) Attention pooling: one learned query `q: [H, D]`, the same for every sequence, attends to each sequence's keys, and the sequence becomes one row `out[b, h]`.
# Program `(b, h)` computes it for sequence `b` and head `h`.
# For a single query use a product and `tl.sum` instead of `tl.dot`.
# A sequence without keys gives 0.
#
# Launched as `pool_kernel[(B, H)](q, k, v, k_offsets, out, scale, H, D=D, BN=16)`, and with other `BN`.
# Limits: no block larger than `BN` rows of `D` columns, and at most 2 loads for each block of keys and 3 more for each program.


# %% tags=["ex-4.5"]
@triton.jit
def pool_kernel(
    q_ptr, k_ptr, v_ptr, k_offsets_ptr, out_ptr, scale, H, D: tl.constexpr, BN: tl.constexpr
):
    """Store out: [B, H, D] fp32; q: [H, D]; k, v: [total_kv, H, D]; D is a power of two."""
    pass  # YOUR CODE


# %%
check("4.5", pool_kernel)

# %% [markdown]
# ## 4.6 Merge the parts
#
# (difficulty 3 of 3, 40 minutes) A long sequence may be given to several programs, each with a share of the keys.
# Part `p` of `parts` has stored its normalized output `outs[p]` and its `lses[p]`, as if its keys were the only ones.
# Merge them, in one kernel and for any number of parts: `lse` is the log of the sum of all `exp(lses[p])`, and the share of part `p` in `out` is `exp(lses[p] - lse)`.
# A part without keys for a row has `-inf` there, and its row of `outs` was never written: it may hold NaN.
# A row without any key gets `out` 0 and `lse` `-inf`.
#
# Launched as `merge_kernel[(cdiv(total_q, BM), H)](outs, lses, out, lse, parts, total_q, H, D=D, BM=16)`.
# `lses` lie between -50,000 and 50,000.
# Limits: no block larger than 512 elements, and at most 2 loads for each part and program.


# %% tags=["ex-4.6"]
@triton.jit
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, parts, total_q, H, D: tl.constexpr, BM: tl.constexpr
):
    """Merge outs [parts, total_q, H, D], lses [parts, H, total_q]; out, lse have no parts axis."""
    pass  # YOUR CODE


# %%
check("4.6", merge_kernel)

# %% [markdown]
# ## 4.7 Bug hunt: right for self-attention
#
# (difficulty 2 of 3, 25 minutes) This is the chapter's forward, and it has passed every test with as many keys as queries.
# Called with more or fewer keys than queries, it fails, and the report names the load of K.
# That line is innocent: its mask compares with the end that it was given.
# One other line is wrong.
# A second mask on the load would silence the report, but give wrong numbers where there are more keys than queries.
#
# Launched as in 4.2, on `(number of tiles, H)`, `BM=BN=16`.


# %% tags=["ex-4.7"]
@triton.jit
def cross_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, tiles_ptr, out_ptr, scale, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store out: [total_q, H, D] fp32; program (tile, head)."""
    # YOUR CODE: one line below is wrong
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    d = tl.arange(0, D)
    rows = q_begin + first + tl.arange(0, BM)
    at = (rows[:, None] * H + head) * D + d[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < q_end, other=0.0) * scale
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(k_begin, k_end, BN):
        keys = start + tl.arange(0, BN)
        mine = keys < k_end
        kt = tl.load(
            k_ptr + (keys[None, :] * H + head) * D + d[:, None], mask=mine[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + (keys[:, None] * H + head) * D + d[None, :], mask=mine[:, None], other=0.0
        )
        s = tl.where(mine[None, :], tl.dot(q, kt, input_precision="ieee"), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + at, out, mask=rows[:, None] < q_end)


# %%
check("4.7", cross_kernel)
