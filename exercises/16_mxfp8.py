# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 16: MXFP8
#
# Read [notebooks/16_mxfp8.py](../notebooks/16_mxfp8.py) first.
#
# A **group** is 32 numbers along one axis, and its **code** is a byte: code `e` stands for the scale 2^(e - 127).
# A number of the group is its e4m3 number times the scale.
# The code of a group whose largest magnitude is `amax` is the *smallest* one from 0 on with `amax <= 448 * scale`.
# The definition is exact: the check compares all bits of all codes.
#
# Kernels run on the emulator.
# `jfa.mxfp8` contains answers, so it is not allowed here.

# %% tags=["setup"]
import math

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# ## 16.1 Quantize, with everything that is not ordinary
#
# (difficulty 1 of 3, 30 minutes) `x` is fp32, [..., n], n a multiple of 32, and groups lie along the last axis.
# Return two tensors: `data` [..., n] of `torch.float8_e4m3fn`, and `codes` [..., n / 32] of `torch.uint8`.
#
# * The code is the smallest from 0 on with amax <= 448 * 2^(code - 127). A group of zeros has code 0.
# * A group with a NaN has code 255; its data may be anything.
# * A group with an infinity, but no NaN, has code 254. The infinity is stored as 448, with its sign.
# * Everything else is x / scale, rounded to the nearest e4m3 number.
#
# Numbers may be as small and as large as fp32 allows.
# The chapter's `log2().ceil()` is not exact in fp32; find out where.


# %% tags=["ex-16.1"]
def quantise(x):
    """Return (data [..., n] float8_e4m3fn, codes [..., n / 32] uint8) of x [..., n] fp32."""
    raise NotImplementedError("16.1: not started")  # YOUR CODE


# %%
check("16.1", quantise)

# %% [markdown]
# ## 16.2 Where is a scale stored, and back
#
# (difficulty 2 of 3, 20 minutes) The codes of an operand with `rows` rows and `columns` groups per row are stored in tiles of 128 rows x 4 groups, 512 bytes each.
# Tiles follow each other from left to right, then downwards: all tiles of the first 128 rows, then those of the next.
# If the last tiles are not full, their other bytes belong to no code.
# The order inside a tile is in the chapter's picture of a scale tile.
#
# Return three int64 tensors:
#
# * `at` [n]: the byte of the code of (`row[i]`, `column[i]`), counted from the first tile's first byte;
# * `its_row`, `its_column` [m]: row and column of the code in byte `byte[i]`; -1 in both if the byte belongs to no code.
#
# `row`, `column` and `byte` are int64 tensors, `rows` and `columns` Python numbers.


# %% tags=["ex-16.2"]
def locate(row, column, byte, rows, columns):
    """Return (at [n], its_row [m], its_column [m]), int64."""
    raise NotImplementedError("16.2: not started")  # YOUR CODE


# %%
check("16.2", locate)

# %% [markdown]
# ## 16.3 Predict: the largest threshold, and how many exponentials must leave
#
# (difficulty 2 of 3, 15 minutes) P is at most 1 with the true maximum, and at most 2^t with one that is t octaves too low.
# It is stored as P * 2^`power` in the format `form`: "e4m3" or "e5m2".
# e5m2 has 5 bits of exponent with bias 15 and 2 of mantissa; as in IEEE formats its largest exponent field is kept for infinity and NaN.
#
# A step has `rows` x `keys` scores and two products over `dim`: the tensor core does 4 * rows * keys * dim FLOPs, `flops` per cycle.
# The exp2 units compute `exps` exponentials per cycle.
# An exponential that *leaves* them is computed on the FMA pipe instead: it takes `operations` operations there, and the pipe does `fmas` per cycle.
# All three units work at the same time.
#
# Return four numbers:
#
# * `threshold`: the largest t >= 0 with which no stored P is larger than the format's largest number; -1.0 if P is too large even with the true maximum;
# * `smallest`: the whole number n, the smallest for which P = 2^n is not stored as 0 (a tie between two numbers goes to the even one, which is 0 here);
# * `moved`: the smallest whole number of exponentials that must leave, so that the exp2 units take no longer than the tensor core;
# * `fits`: True if then the FMA pipe takes no longer than the tensor core either.
#
# `rows` to `operations` are whole numbers.


# %% tags=["ex-16.3"]
def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    """Return (threshold: float, smallest: int, moved: int, fits: bool)."""
    raise NotImplementedError("16.3: not started")  # YOUR CODE


# %%
check("16.3", predict)

# %% [markdown]
# ## 16.4 A Triton kernel: quantize a jagged batch along tokens
#
# (difficulty 3 of 3, 30 minutes) `x` and `data` are [total, H, D], packed by `offsets`; groups are 32 *tokens* of one sequence and head, so each of the D columns has scales of its own.
# Groups are counted from the sequence's own start.
# The last one may have fewer than 32 tokens; treat it as if it were filled up with zeros.
#
# Launched on (G, B, H): program (g, b, h) does group g of sequence b, head h; G is large enough for the longest sequence, so many programs have nothing to do.
# Codes are [places, H, D].
# A kernel cannot know how many groups the sequences before have, so the first group of sequence b has place `offsets[b] // 32 + b`, and the others follow.
# Places of no group must stay as they are.
#
# Rules for codes and data as in 16.1, tiny and huge numbers included, but there are no infinities.
# NaN occurs, also in the tokens of a neighboring sequence.
# Each number is loaded once: all loads together take at most `total * H * D` elements, and 8 more per program.
#
# `data_ptr` points to e4m3 numbers (`tl.float8e4nv`), `codes_ptr` to `tl.uint8`.
# Converting to `tl.float8e4nv` rounds to nearest and saturates.
# `y.to(tl.int32, bitcast=True)` gives the bits of fp32: 1 of sign, 8 of exponent, 23 of mantissa.


# %% tags=["ex-16.4"]
@triton.jit
def quantise_tokens(x_ptr, offsets_ptr, data_ptr, codes_ptr, H, D: tl.constexpr):
    """Quantize group g of sequence b, head h, in program (g, b, h)."""
    g, b, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    pass  # YOUR CODE


# %%
check("16.4", quantise_tokens)

# %% [markdown]
# ## 16.5 Bug hunt: scores scaled along the wrong axis
#
# (difficulty 2 of 3, 45 minutes) The backward uses K twice: $S = Q K^T$ contracts over D, $dQ = dS\, K$ over keys.
# This kernel does both products for 128 queries.
# K comes in both encodings: `k_*` with groups along D, `kt_*` with groups along keys.
#
# | | data | tiles of codes |
# |---|---|---|
# | Q | [queries, 128] | [queries / 128, 1, 32, 16] |
# | dS, groups along keys | [queries, keys] | [queries / 128, keys / 128, 32, 16] |
# | K, groups along D | [keys, 128] | [keys / 128, 1, 32, 16] |
# | K, groups along keys | [keys, 128] | [1, keys / 128, 32, 16] |
#
# The kernel is right as long as all scales of K are equal.
# The emulator reports nothing when they are not, because a tile has 512 bytes in either encoding.
# Fix the kernel.
# `s` and `dq` must both be right, for any number of key blocks and of programs, which have 128 queries each.
# `D` and `BLOCK` are always 128, so one tile of codes belongs to each block of data.
# It makes two scaled products per block of keys and program, and must not make more.


# %% tags=["ex-16.5"]
@triton.jit
def both_products(
    q_desc, q_codes_desc, ds_desc, ds_codes_desc, k_desc, k_codes_desc, kt_desc, kt_codes_desc,
    s_ptr, dq_ptr, blocks, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute s [queries, blocks * BLOCK] = Q K^T, dq [queries, D] = dS K; fp32."""
    # YOUR CODE: below, K has the wrong scales in one of the products
    OPERAND: tl.constexpr = BLOCK * D + BLOCK * D // 32  # bytes: data and codes
    i = tl.program_id(0)
    q = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    ds = tlx.local_alloc((BLOCK, BLOCK), tl.float8e4nv, 1)
    k = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    kt = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    q_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    ds_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    k_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    s = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1, tlx.storage_kind.tmem)
    dq = tlx.local_alloc((BLOCK, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    ds_scale = tlx.local_alloc((BLOCK, BLOCK // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    k_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)

    tlx.barrier_expect_bytes(q_full[0], OPERAND)
    tlx.async_descriptor_load(q_desc, q[0], [i * BLOCK, 0], q_full[0])
    tlx.async_descriptor_load(q_codes_desc, q_codes[0], [i, 0, 0, 0], q_full[0])
    tlx.barrier_wait(q_full[0], 0)
    tlx.tmem_copy(q_codes[0], q_scale[0])
    rows, columns = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    for j in range(blocks):
        tlx.barrier_expect_bytes(full[0], 3 * OPERAND - BLOCK * D // 32)
        tlx.async_descriptor_load(ds_desc, ds[0], [i * BLOCK, j * BLOCK], full[0])
        tlx.async_descriptor_load(ds_codes_desc, ds_codes[0], [i, j, 0, 0], full[0])
        tlx.async_descriptor_load(k_desc, k[0], [j * BLOCK, 0], full[0])
        tlx.async_descriptor_load(kt_desc, kt[0], [j * BLOCK, 0], full[0])
        tlx.async_descriptor_load(kt_codes_desc, k_codes[0], [0, j, 0, 0], full[0])
        tlx.barrier_wait(full[0], j & 1)
        tlx.tmem_copy(ds_codes[0], ds_scale[0])
        tlx.tmem_copy(k_codes[0], k_scale[0])
        k_transposed = tlx.local_trans(k[0])
        tlx.async_dot_scaled(
            q[0], k_transposed, s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=False, force_async=True,
        )  # fmt: skip
        tlx.async_dot_scaled(
            ds[0], kt[0], dq[0], ds_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=j > 0, mBarriers=[done[0]],
        )  # fmt: skip
        tlx.barrier_wait(done[0], j & 1)
        at = rows[:, None] * (blocks * BLOCK) + j * BLOCK + columns[None, :]
        tl.store(s_ptr + at, tlx.local_load(s[0]))
    tl.store(dq_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], tlx.local_load(dq[0]))


# %%
check("16.5", both_products)

# %% [markdown]
# ## 16.6 Bug hunt: P's scale, applied here and forgotten there
#
# (difficulty 2 of 3, 45 minutes) This is the chapter's version 4, adapted from a bf16 kernel with two faults.
# The fixed kernel must do this:
#
# * `out` is $P V$ divided by P's row sum, and `lse` = m + log2(row sum), in octaves, as if P had never been scaled.
# * The row sum is that of P *before* it is rounded to e4m3.
# * P is stored as e4m3, as 256 P: its scale is 2^-8. The maximum m is rounded up to a whole number, and no P may saturate.
# * Codes of Q and K are tiles along D, those of V along keys; `scale_log2` is a power of two.
# * It makes two scaled products per block of keys and program.
# * A program has 128 queries; there may be more programs, and any number of key blocks. `D` and `BLOCK` are always 128.
#
# The first case has one key block.
# The second fault needs two.


# %% tags=["ex-16.6"]
@triton.jit
def attend(
    q_desc, k_desc, v_desc, q_codes_desc, k_codes_desc, v_codes_desc, out_ptr, lse_ptr,
    scale_log2, blocks, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out [queries, D], lse [queries] in base 2; fp32."""
    # YOUR CODE: two faults are below
    BYTES: tl.constexpr = BLOCK * D + BLOCK * D // 32
    i = tl.program_id(0)
    q = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    k = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    v = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    q_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    k_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    v_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    s = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float8e4nv, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BLOCK, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    k_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    p_scale = tlx.local_alloc((BLOCK, BLOCK // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    v_scale = tlx.local_alloc((D, BLOCK // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)

    tlx.local_store(p_scale[0], tl.full((BLOCK, BLOCK // 32), 119, tl.uint8))
    tlx.barrier_expect_bytes(q_full[0], BYTES)
    tlx.async_descriptor_load(q_desc, q[0], [i * BLOCK, 0], q_full[0])
    tlx.async_descriptor_load(q_codes_desc, q_codes[0], [i, 0, 0, 0], q_full[0])
    tlx.barrier_wait(q_full[0], 0)
    tlx.tmem_copy(q_codes[0], q_scale[0])
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    for j in range(blocks):
        tlx.barrier_expect_bytes(kv_full[0], 2 * BYTES)
        tlx.async_descriptor_load(k_desc, k[0], [j * BLOCK, 0], kv_full[0])
        tlx.async_descriptor_load(k_codes_desc, k_codes[0], [j, 0, 0, 0], kv_full[0])
        tlx.async_descriptor_load(v_desc, v[0], [j * BLOCK, 0], kv_full[0])
        tlx.async_descriptor_load(v_codes_desc, v_codes[0], [j, 0, 0, 0], kv_full[0])
        tlx.barrier_wait(kv_full[0], j & 1)
        tlx.tmem_copy(k_codes[0], k_scale[0])
        tlx.tmem_copy(v_codes[0], v_scale[0])
        tlx.async_dot_scaled(
            q[0], tlx.local_trans(k[0]), s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=False, mBarriers=[s_full[0]],
        )  # fmt: skip
        tlx.barrier_wait(s_full[0], j & 1)
        x = tlx.local_load(s[0]) * scale_log2
        grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))
        m_new = tl.where(grown - m > 8.0, grown, m)
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(x - m_new[:, None] + 8.0)
        l = l * alpha + tl.sum(p, axis=1)
        tlx.local_store(p_tile[0], p.to(tl.float8e4nv))
        m = m_new
        if j > 0:
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        tlx.async_dot_scaled(
            p_tile[0], v[0], acc[0], p_scale[0], "e4m3", v_scale[0], "e4m3",
            use_acc=j > 0, mBarriers=[acc_full[0]],
        )  # fmt: skip
        tlx.barrier_wait(acc_full[0], j & 1)
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], tlx.local_load(acc[0]) / l[:, None])
    tl.store(lse_ptr + rows, m + tl.math.log2(l))


# %%
check("16.6", attend)
