# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 MXFP8
#
# **Goals.** Say what a shared power-of-two scale can do for 8-bit numbers, and what it cannot.
# Know which operand of attention is scaled along which axis, and why.
# Quantize packed sequences so that no group and no NaN crosses from one to the next.
# Give the tensor core its scales in the layout that it requires, and quantize P inside the kernel.
# Explain why MXFP8 saves less than half of the time.
#
# **Time.** 80 minutes, and 185 for the exercises.
# **Needs.** Chapter 12; chapter 14 for the backward.
# No GPU: PyTorch has the 8-bit types, and the emulator runs every kernel.

# %%
import dataclasses
import inspect
import json
import math

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa
import jfa.emulator as emulator
from jfa import plots, reference
from jfa.bench import recorded
from jfa.emulator.rates import B200
from jfa.kernels.blackwell import examples, launch, mxfp8_forward, mxfp8_launch
from jfa.kernels.blackwell.config import mxfp8_config
from jfa.layout import offsets_from_lengths
from jfa.mxfp8 import first_blocks, pack_scales, quantize_jagged

D, BLOCK = 128, 128
LOG2_E = math.log2(math.e)

# %% [markdown]
# ## The mental model: a ruler that moves by octaves
#
# **FP8 E4M3** (*e4m3* from here on) is one byte: a sign, 4 bits of exponent, 3 bits of mantissa.
# Think of its numbers as the marks of a ruler with **eight marks per octave**, where an octave is the range from one power of two to the next.
# The ruler begins at $2^{-6}$ (below it there are only the seven multiples of $2^{-9}$), and it ends at **448**.
# There is no infinity, and NaN is the code 0x7F.
#
# **E8M0** is a byte, too, and holds an exponent only: code $e$ means $2^{e-127}$, and 0xFF means NaN.
# The *scales* have this format.
# Multiplied by such a scale, the ruler moves by whole octaves.
#
# Look at three rulers, one above the other; the thick line is their length.
# Where two of them overlap, which one has the finer marks?

# %%
codes = torch.arange(1, 127, dtype=torch.uint8)  # the positive numbers
marks = codes.view(torch.float8_e4m3fn).float()
print("smallest", marks[0].item(), "| largest", marks[-1].item(), "| how many", len(marks))
plots.rulers(
    {f"scale 2^{k}": marks * 2.0**k for k in (-6, 0, 6)},
    title="e4m3 numbers times a scale, a stretch of nine octaves",
    xlabel="value",
    xlim=(0.1, 60),
)

# %% [markdown]
# Neither: the marks coincide.
# The scale moves the *ends* of the ruler, and each octave has eight marks, wherever it is.
# This is the main point of the chapter:
#
# > A power-of-two scale buys **range, not precision**.
#
# An integer format is different: the distances between its marks are equal, so its scale decides how fine they are.
# To see the difference, multiply numbers from a normal distribution by larger and larger powers of two.
# The error is relative, $\lVert \hat x - x \rVert / \lVert x \rVert$, as everywhere in this chapter.


# %%
def e4m3(x):
    """Round to e4m3 and back; numbers beyond 448 become 448."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def relative_error(found, wanted):
    """Return the Frobenius norm of the difference, divided by that of ``wanted``."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def quantize(x):
    """Return (e4m3 [..., n], codes [..., n / 32]) of x [..., n]: a scale per 32 of the last axis.

    For ordinary numbers; the special ones are exercise 16.1.
    """
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    codes = 127 + (largest / 448).log2().ceil()
    data = (groups / torch.exp2(codes - 127)[..., None]).flatten(-2)
    return data.clamp(-448, 448).to(torch.float8_e4m3fn), codes.to(torch.uint8)


def dequantize(data, codes):
    """Return the numbers that data and codes stand for, fp32."""
    return (
        data.float().unflatten(-1, (-1, 32)) * torch.exp2(codes.float() - 127)[..., None]
    ).flatten(-2)


def int8(x):
    """Round to multiples of 1/32 with at most 127 steps: 8-bit integers with a fixed scale."""
    return (32 * x).round().clamp(-127, 127) / 32


g = torch.Generator().manual_seed(0)
normal = torch.randn(256, 128, generator=g)
offsets_2 = list(range(-16, 17, 2))
plots.lines(
    offsets_2,
    {
        "integers, fixed scale": [
            relative_error(int8(normal * 2.0**k), normal * 2.0**k) for k in offsets_2
        ],
        "e4m3, no scale": [
            relative_error(e4m3(normal * 2.0**k), normal * 2.0**k) for k in offsets_2
        ],
        "e4m3, a scale per 32": [
            relative_error(dequantize(*quantize(normal * 2.0**k)), normal * 2.0**k)
            for k in offsets_2
        ],
    },
    title="relative error of normal numbers times 2^k",
    xlabel="k",
    ylabel="relative error",
    from_zero=True,
)

# %% [markdown]
# The integers are good at one scale only, and on both sides of it the error grows at once.
# The error of e4m3 is constant over some ten octaves and then rises steeply: on the left because numbers become too small, on the right because they saturate.
# With a scale per 32 the error is constant everywhere, but *not smaller*: 0.026, the price of three bits of mantissa.
#
# So three questions are important for quantized attention, and none of them is "how many scales?":
#
# 1. Do all numbers of a group fit on the ruler?
# 2. Which numbers share a group, and what happens to them if one of them is huge, or NaN?
# 3. Along which axis are the groups?
#
# ## The math, down to shapes
#
# **MXFP8** is e4m3 with one E8M0 scale per **32** numbers: 8.25 bits per number.
# The tensor core multiplies $A$ $[M, K]$ by $B$ $[K, N]$, one group of the contracted axis after the other:
#
# $$ C_{ij} = \sum_{g} 2^{a_{ig} + b_{gj} - 254} \sum_{k \in g} \hat A_{ik} \hat B_{kj} $$
#
# A scale can be taken out of the inner sum only if it is the same for all 32 terms of that sum.
# Hence the rule: **groups lie along the contracted axis.**
#
# Attention contracts over different axes in different products:
#
# | product | contracted over | groups of the first | groups of the second |
# |---|---|---|---|
# | $S = Q K^T$ | D | Q along D | K along D |
# | $O = P V$ | keys | P: one constant | V along keys |
# | $dP = dO\, V^T$ | D | dO along D | V along D |
# | $dV = P^T dO$ | queries | P: the constant | dO along queries |
# | $dK = dS^T Q$ | queries | dS: squares of 32 x 32 | Q along queries |
# | $dQ = dS\, K$ | keys | the same dS | K along keys |
#
# The forward needs Q and K along D ("row" encoding) and V along tokens ("column" encoding).
# The backward needs Q, K and dO in both encodings and V along D; with P and dS these are nine.
# In forward and backward together, each of Q, K, V and dO is quantized twice.
# P and dS are made inside the kernel and never written to memory.
#
# The choice of a scale is called RCEIL: round the exponent *up*.
#
# $$ e = 127 + \lceil \log_2 (\max_{k \in g} |x_k| / 448) \rceil $$
#
# so the group's largest number ends up between 224 and 448, and nothing saturates.
#
# ## Version 0: one scale for the whole tensor
#
# If scales buy range and not precision, one scale should be as good as thousands.
# It is, until the tensor has an outlier.


# %%
def one_scale(x):
    """Round to e4m3 and back with a single power of two for the whole tensor, by RCEIL."""
    scale = torch.exp2((x.abs().max() / 448).log2().ceil())
    return e4m3(x / scale) * scale


sizes = [0, 4, 8, 10, 12, 14, 16, 18, 20]
one, per_group, sharing = [], [], []
for k in sizes:
    x = normal.clone()
    x[0, 0] = 2.0**k
    rest = torch.ones_like(x, dtype=torch.bool)
    rest[0, 0] = False
    one.append(relative_error(one_scale(x)[rest], x[rest]))
    grouped = dequantize(*quantize(x))
    per_group.append(relative_error(grouped[rest], x[rest]))
    sharing.append(relative_error(grouped[0, 1:32], x[0, 1:32]))
plots.lines(
    sizes,
    {
        "one scale": one,
        "per 32: all": per_group,
        "per 32: its group": sharing,
    },
    title="one outlier among 32,768 numbers: error of the others",
    xlabel="log2 of the outlier",
    ylabel="relative error",
    from_zero=True,
)

# %% [markdown]
# Up to $2^{12}$ there is no effect.
# Beyond it small numbers fall below the ruler's lower end: with one scale those of the whole tensor, with groups only those of the outlier's group.
# Groups *limit* the damage to 32 numbers, and do nothing else.
#
# ## Version 1: groups of 32, and what a NaN does
#
# `quantize` above is complete for ordinary numbers.
# A kernel does the same in a few instructions; here is TLX's helper on four groups: ordinary numbers, zeros, a NaN, and one whose largest number is exactly 448.


# %%
@triton.jit
def quantize_kernel(x_ptr, out_ptr, codes_ptr, M: tl.constexpr, K: tl.constexpr):
    """Store the e4m3 numbers of x [M, K] as fp32, and a code per 32 columns."""
    rows, columns = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + columns[None, :])
    data, codes = tlx._to_mxfp8_block(x, 32, tl.float8e4nv)
    tl.store(out_ptr + rows[:, None] * K + columns[None, :], data.to(tl.float32))
    tl.store(codes_ptr + rows[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :], codes)


x = normal[:1].clone()
x[0, 32:64], x[0, 70], x[0, 96:128] = 0.0, float("nan"), 448.0
data, codes = torch.empty(1, 128), torch.empty(1, 4, dtype=torch.uint8)
quantize_kernel[(1,)](x, data, codes, 1, 128)
there = data * torch.exp2(codes.float() - 127).masked_fill(
    codes == 255, math.nan
).repeat_interleave(32)
for n, name in enumerate(("ordinary", "zeros", "one NaN", "448")):
    part = slice(32 * n, 32 * n + 32)
    print(
        f"{name:9} code {codes[0, n]:3} = 0x{codes[0, n]:02X}",
        f"NaN: {int(x[0, part].isnan().sum())} before, {int(there[0, part].isnan().sum())} after",
    )

# %% [markdown]
# **One NaN becomes 32.** Its group's code is 0xFF, which E8M0 defines as NaN, so the other 31 numbers are lost with it.
# In bf16 a NaN is one bad number.
# In MXFP8 it is a bad *group*.
# Along D the group belongs to one token, which was lost anyway.
# Along tokens, 31 neighboring tokens are lost too, and if a group crosses from one sequence into the next, tokens of *another sequence*: a new way to leak, which no mask stops.
#
# ## Version 2: quantized attention in PyTorch
#
# The reference for all that follows: one head, everything rounded where the kernel rounds it.
# `p` chooses P's scales: "own", one per 32 keys, or "fixed", the constant $2^{-8}$: P is at most 1, so it is stored as $256 P \le 256 < 448$.
# `behind` makes the maximum stale, as chapter 12's lazy rescaling does: it is that many octaves too low, so P may exceed 1 by as many octaves.


# %%
def along_tokens(x):
    """Quantize [tokens, D] with groups along tokens, and dequantize."""
    return dequantize(*quantize(x.T.contiguous())).T


def mx_attention(q, k, v, p="fixed", behind=0.0, inputs=True):
    """Attend with one head: q [queries, D], k, v [keys, D], fp32; ``inputs``: round them, too."""
    if inputs:
        q, k, v = dequantize(*quantize(q)), dequantize(*quantize(k)), along_tokens(v)
    s = q @ k.T * (LOG2_E / math.sqrt(q.shape[1]))
    weights = torch.exp2(s - (s.amax(1, keepdim=True) - behind))
    total = weights.sum(1, keepdim=True)
    if p == "own":
        weights = dequantize(*quantize(weights))
    elif p == "fixed":
        weights = e4m3(256 * weights) / 256
    return weights @ v / total


g = torch.Generator().manual_seed(0)
q = torch.randn(256, D, generator=g)
k, v = (torch.randn(512, D, generator=g) for _ in range(2))
exact = torch.softmax(q.double() @ k.double().T / math.sqrt(D), 1) @ v.double()
half = [t.bfloat16().float() for t in (q, k, v)]
p16 = torch.softmax(half[0] @ half[1].T / math.sqrt(D), 1).bfloat16().float()
print(f"bf16                   {relative_error(p16 @ half[2], exact):.4f}")
for p in ("own", "fixed"):
    print(f"MXFP8, P's scale {p:5} {relative_error(mx_attention(q, k, v, p), exact):.4f}", end="")
    print(f"   only P rounded {relative_error(mx_attention(q, k, v, p, inputs=False), exact):.4f}")

# %% [markdown]
# These are 256 queries, 512 keys, and normal numbers.
# Scales of P's own groups cost a maximum per 32 numbers of every row, and gain nothing: they would improve only numbers below $2^{-14}$ of the row's largest number.
# So kernels use the constant.
#
# ### How wrong may the maximum be?
#
# Chapter 12 kept an old maximum until it was exceeded by 8 octaves.
# P then reaches 256, which is well inside bf16's range.
# Stored as $256 P$ it must not exceed 448.
# What if the maximum is too high?
# Predict both ends of the flat part before you run it.

# %%
stale = [-12, -10, -8, -6, -4, -2, 0, 0.4, 0.8, 1, 1.5, 2, 4, 8]
errors = [relative_error(mx_attention(q, k, v, behind=t), exact) for t in stale]
print("the bound: log2(448 / 256) =", round(math.log2(448 / 256), 3))
plots.lines(
    stale,
    {"error of O": errors},
    title="all rows use a maximum that is t octaves too low",
    xlabel="t, octaves (negative: too high)",
    ylabel="relative error",
    from_zero=True,
)

# %% [markdown]
# Above 0.807 the largest P saturate, and they matter most: the error is 0.074 at 1, 0.29 at 2, 0.97 at 8.
# So chapter 12's threshold of 8 cannot be used: the maximum must not be too low.
#
# But look to the left.
# A maximum that is 8 octaves **too high** costs almost nothing: 256 P is then at most 1, and e4m3 has nine more octaves below that, six of them with all eight marks.
# So the idea works in the other direction.
# When the maximum has to grow, let it grow by a **margin** more than it must, and the next few blocks need no rescaling.
# How often does a row's accumulator have to be rescaled, over 16 blocks of 32 keys?

# %%
octaves = q @ k.T * (LOG2_E / math.sqrt(D))
for margin in (0, 1, 2, 4):
    top, times = torch.full((256,), -math.inf), torch.zeros(256)
    for part in octaves.split(32, dim=1):
        needed = part.amax(1).ceil()
        grows = needed > top
        times += grows & (top > -math.inf)
        top = torch.where(grows, needed + margin, top)
    print(f"margin {margin}: {times.mean():.2f} rescalings per row")

# %% [markdown]
# ## Version 3: $S = Q K^T$ with scales
#
# The instruction is `tlx.async_dot_scaled(A, B, acc, A_scale, "e4m3", B_scale, "e4m3")`.
# Data comes by TMA as before, at half of the bytes.
# The tensor core reads the scales from tensor memory: the TMA loads them into shared memory, and `tlx.tmem_copy` copies them on; it runs on the tensor core's own pipe, so products issued behind it see them without a barrier.
# (TLX also takes scales in shared memory.)
#
# In memory the scales of 128 rows x 4 groups (that is 128 numbers of each row) are **one tile of 512 bytes** in a special order: 32 lines of 16 bytes.
# Here is the beginning of a tile and its last line; each cell has `row,group`.


# %%
row, group = (torch.arange(512).div(4, rounding_mode="floor"), torch.arange(512) % 4)
at_row, at_group = (pack_scales(t.reshape(128, 4))[0, 0] for t in (row, group))
lines = [0, 1, 2, 31]
cells = [[f"{at_row[i, j]},{at_group[i, j]}" for j in range(16)] for i in lines]
plots.number_grids(
    {"byte 0 to 15 of lines 0, 1, 2 and 31": cells},
    looks={"byte 0 to 15 of lines 0, 1, 2 and 31": at_row[lines].div(32, rounding_mode="floor")},
    title="a scale tile: which (row, group) each byte belongs to",
)

# %% [markdown]
# A line holds the four rows that are equal modulo 32.
# Exercise 16.2 asks for the formula.
#
# One program computes 128 x 128 scores:


# %%
@triton.jit
def scores_kernel(
    q_desc, k_desc, q_codes_desc, k_codes_desc, out_ptr, columns,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store S [queries, keys]; data [tokens, D], codes [tokens / 128, 1, 32, 16], whole blocks."""
    i, j = tl.program_id(0), tl.program_id(1)
    q = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    k = tlx.local_alloc((BLOCK, D), tl.float8e4nv, 1)
    q_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    k_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    s = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1, tlx.storage_kind.tmem)
    q_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    k_scale = tlx.local_alloc((BLOCK, D // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)

    tlx.barrier_expect_bytes(full[0], 2 * (BLOCK * D + BLOCK * D // 32))
    tlx.async_descriptor_load(q_desc, q[0], [i * BLOCK, 0], full[0])
    tlx.async_descriptor_load(k_desc, k[0], [j * BLOCK, 0], full[0])
    tlx.async_descriptor_load(q_codes_desc, q_codes[0], [i, 0, 0, 0], full[0])
    tlx.async_descriptor_load(k_codes_desc, k_codes[0], [j, 0, 0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.tmem_copy(q_codes[0], q_scale[0])
    tlx.tmem_copy(k_codes[0], k_scale[0])
    k_transposed = tlx.local_trans(k[0])
    tlx.async_dot_scaled(
        q[0], k_transposed, s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
        use_acc=False, mBarriers=[s_full[0]],
    )  # fmt: skip
    tlx.barrier_wait(s_full[0], 0)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    at = rows[:, None] * columns + j * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, tlx.local_load(s[0]))


def boxes(data, codes):
    """Make descriptors of a quantized operand: 128 x 128 boxes of data, whole scale tiles."""
    return (
        TensorDescriptor.from_tensor(data, [BLOCK, D]),
        TensorDescriptor.from_tensor(codes, [1, 1, 32, 16]),
    )


(q8, q_codes), (k8, k_codes) = quantize(q), quantize(k)
q_box, q_scales = boxes(q8, pack_scales(q_codes))
k_box, k_scales = boxes(k8, pack_scales(k_codes))
scores = torch.full((256, 512), math.nan)
for policy in ("eager", "lazy", "random"):
    with emulator.options(policy=policy, seed=1):
        scores_kernel[(2, 4)](q_box, k_box, q_scales, k_scales, scores, 512, D=D, BLOCK=BLOCK)
    wanted = dequantize(q8, q_codes) @ dequantize(k8, k_codes).T
    print(
        f"{policy:6} against the quantized product {relative_error(scores, wanted):.0e},",
        f"against Q K^T {relative_error(scores, q @ k.T):.3f}",
    )

# %% [markdown]
# The two errors mean different things.
# Against the *quantized* product the kernel must be as exact as fp32: that tests whether it is correct.
# Against the true product it is off by 0.037: that is due to the format, and no kernel can do better.
# We test every kernel of this chapter by the first number; the second is the price of using MXFP8.
#
# ## Version 4: P quantized inside the kernel
#
# This is the forward with one role, as version 1 of chapter 12.
# Three things are new:
#
# * **P goes from registers to tensor memory as e4m3**: 128 x 128 numbers take 32 columns instead of 64.
# * **P's scale tile is a constant.** Code 119 is $2^{-8}$; it is stored once, before the loop.
# * **The running maximum is rounded up to a whole number** of octaves (our softmax is in base 2, so octaves are its unit). The reason comes below.


# %%
@triton.jit
def load_operand(desc, codes_desc, tile, codes, row, block, full):
    """Load one operand and its scale tile, on one barrier that already expects their bytes."""
    tlx.async_descriptor_load(desc, tile, [row, 0], full)
    tlx.async_descriptor_load(codes_desc, codes, [block, 0, 0, 0], full)


@triton.jit
def mx_forward(
    q_desc, k_desc, v_desc, q_codes_desc, k_codes_desc, v_codes_desc, out_ptr, scale_log2, blocks,
    WHOLE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store O [queries, D] of one head in whole blocks. WHOLE: the maximum is rounded up."""
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

    tlx.local_store(p_scale[0], tl.full((BLOCK, BLOCK // 32), 119, tl.uint8))  # 2^-8
    tlx.barrier_expect_bytes(q_full[0], BYTES)
    load_operand(q_desc, q_codes_desc, q[0], q_codes[0], i * BLOCK, i, q_full[0])
    tlx.barrier_wait(q_full[0], 0)
    tlx.tmem_copy(q_codes[0], q_scale[0])
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    for j in range(blocks):
        tlx.barrier_expect_bytes(kv_full[0], 2 * BYTES)
        load_operand(k_desc, k_codes_desc, k[0], k_codes[0], j * BLOCK, j, kv_full[0])
        load_operand(v_desc, v_codes_desc, v[0], v_codes[0], j * BLOCK, j, kv_full[0])
        tlx.barrier_wait(kv_full[0], j & 1)
        tlx.tmem_copy(k_codes[0], k_scale[0])
        tlx.tmem_copy(v_codes[0], v_scale[0])
        tlx.async_dot_scaled(
            q[0], tlx.local_trans(k[0]), s[0], q_scale[0], "e4m3", k_scale[0], "e4m3",
            use_acc=False, mBarriers=[s_full[0]],
        )  # fmt: skip
        tlx.barrier_wait(s_full[0], j & 1)
        x = tlx.local_load(s[0]) * scale_log2
        m_new = tl.max(x, axis=1)
        if WHOLE:
            m_new = tl.ceil(m_new)
        m_new = tl.maximum(m, m_new)  # threshold 0: no stale maximum
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(x - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)  # of P as it is, not of 256 P
        m = m_new
        tlx.local_store(p_tile[0], (p * 256.0).to(tl.float8e4nv))
        if j > 0:
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        tlx.async_dot_scaled(
            p_tile[0], v[0], acc[0], p_scale[0], "e4m3", v_scale[0], "e4m3",
            use_acc=j > 0, mBarriers=[acc_full[0]],
        )  # fmt: skip
        tlx.barrier_wait(acc_full[0], j & 1)
    rows, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], tlx.local_load(acc[0]) / l[:, None])


# %% [markdown]
# V's groups lie along keys, the axis that $P V$ contracts.
# So its scale tile has a row per *column* of V, and four groups of 32 keys: quantize $V^T$, and transpose the data back.


# %%
v8, v_codes = quantize(v.T.contiguous())  # [D, keys], codes [D, keys / 32]
v8 = v8.T.contiguous()
v_tiles = torch.cat(
    [pack_scales(c.contiguous()) for c in v_codes.split(4, dim=1)]
)  # a tile per key block
v_box, v_scales = boxes(v8, v_tiles)


def run_forward(whole, policy="lazy"):
    """Return O of version 4, fp32."""
    out = torch.full((256, D), math.nan)
    given = (q_box, k_box, v_box, q_scales, k_scales, v_scales)
    with emulator.options(policy=policy, seed=1):
        mx_forward[(2,)](
            *given, out, LOG2_E / math.sqrt(D), 512 // BLOCK, WHOLE=whole, D=D, BLOCK=BLOCK
        )
    return out


def whole_reference(q, k, v):
    """Do as mx_attention does, with the maximum rounded up to a whole number of octaves."""
    q, k, v = dequantize(*quantize(q)), dequantize(*quantize(k)), along_tokens(v)
    s = q @ k.T * (LOG2_E / math.sqrt(D))
    weights = torch.exp2(s - s.amax(1, keepdim=True).ceil())
    return (e4m3(256 * weights) / 256) @ v / weights.sum(1, keepdim=True)


wanted = {False: mx_attention(q, k, v), True: whole_reference(q, k, v)}
for whole, name in ((False, "the true maximum"), (True, "rounded up      ")):
    out = run_forward(whole)
    print(
        f"{name}: against its reference {relative_error(out, wanted[whole]):.0e},",
        f"against fp64 {relative_error(out, exact):.4f}",
    )
others = [run_forward(True, policy) for policy in ("eager", "random")]
print("the same bits under two other schedules:", all(torch.equal(out, o) for o in others))

# %% [markdown]
# **Look at the first line.** Against fp64 the kernel is as good as its reference, but the two differ by 2 %.
# Is it broken?
#
# No.
# The reference rounds P relative to the row's *final* maximum.
# The kernel rounds each block's P relative to the maximum *so far*, and multiplies the sum by `alpha` later.
# Rounding and multiplying do not commute, unless the factor is a power of two.
# With other block sizes or another order the rounding errors are different: the result is right, but cannot be checked to better than 2 %.
#
# With a maximum that is a whole number of octaves every `alpha` *is* a power of two.
# Then the order of blocks does not matter, and kernel and reference agree to the last bits of fp32.
# (Except for P below $2^{-14}$ of the maximum: they are subnormal as e4m3, and an early block with a lower maximum stores them a little more exactly.)
# The price is that P's largest stored number is between 128 and 256 instead of 256, and the error of this example grows from 0.053 to 0.056.
# The package's reference and its kernel do it this way.
# `reference.mxfp8_attention` takes packed sequences, as the op does:

# %%
whole = offsets_from_lengths([256]), offsets_from_lengths([512])
heads = [t[:, None] for t in (q, k, v)]
packaged = reference.mxfp8_attention(*heads, *whole)[:, 0]
print(f"version 4 against reference.mxfp8_attention: {relative_error(out, packaged):.0e}")

# %% [markdown]
#
# ## Version 5: the roles of chapter 12
#
# ### Why the gain is small
#
# One might expect that a tensor core of twice the speed halves the time.
# But 8-bit operands do not save a single exponential.
# The emulator counts them:

# %%
with emulator.counting() as counts:
    run_forward(True)
print(f"{counts.exponentials:,} exponentials: {256 * 512:,} for P, the rest for alpha")
print(f"{counts.mmas} products, {counts.tmem_columns} columns of tensor memory")

# %% [markdown]
# So compute the cycles first, from the same rates as in chapter 12: one step of 256 queries against 128 keys.

# %%
step = {"tensor core": [], "exp2 units": [], "shared memory": []}
for itemsize in (2, 1):
    products = [
        B200.demand("mma", m=128, n=128, k=128, itemsize_a=itemsize, a_space=space).needs
        for space in ("smem", "smem", "tmem", "tmem")
    ]
    step["tensor core"].append(sum(need["tensor"] for need in products))
    step["exp2 units"].append(2 * 128 * 128 / B200["mufu"])
    step["shared memory"].append(sum(need["smem"] for need in products))
plots.bars(
    list(step),
    {"bf16": [a for a, _ in step.values()], "MXFP8": [b for _, b in step.values()]},
    title="modelled cycles of one step on a B200, D = 128",
    xlabel="",
    ylabel="cycles",
    form="{:,.0f}",
)

# %% [markdown]
# In bf16 products and exponentials take equally long, 2,048 cycles.
# In MXFP8 the products take half of that, and the exponentials take as long as before.
# A kernel that overlapped everything perfectly would then be limited by the exp2 units, and be *not a cycle faster*.
#
# Faster products help only if some exponentials are computed elsewhere than on the exp2 units.
# Chapter 12's package kernel computes a part of them by a polynomial on the FMA pipe; here the choice of that part matters most (exercise 16.3).
# And the FMA pipe has other work: scaling, maxima, sums, and now rounding P to 8 bits.
#
# ### The layout of tensor memory
#
# At D = 128 S0, S1, O0, O1 already fill the 512 columns, so scale tiles must share columns with another buffer.
# A tile of 128 rows and 4 groups takes 4 columns.
# P takes 32 columns now, inside its S of 128, so 96 columns of each S are unused while P is there.
#
# But *when* are they free?
# The scales for S of half 0 are read while S0 is being **written**, so they must not be inside S0.
# They are inside S1, and S1 must have been read before they are copied there.
#
# The package's kernel, [jfa/kernels/blackwell/mxfp8_forward.py](../jfa/kernels/blackwell/mxfp8_forward.py), goes one step further and puts P of a half into the other half's S as well:

# %%
own = ("P", "q", "k", "v", "p")
widths = (32, 4, 4, 4, 4)
inside = []
for which in (0, 1):
    at = 128 * (1 - which)
    for name, width in zip(own, widths):
        words = f"P{which}" if name == "P" else ""
        inside.append(plots.Segment(at, width, words, 3 if name == "P" else 2))
        at += width
plots.segments(
    {
        "fp32 results": [
            plots.Segment(128 * n, 128, name, 0) for n, name in enumerate(("S0", "S1", "O0", "O1"))
        ],
        "P and four scale tiles": inside,
    },
    title="tensor memory at D = 128: P and scales of a half are inside S of the other half",
    xlabel="column (128 lanes of 4 bytes each)",
    ticks=range(0, 513, 64),
)

# %% [markdown]
# Why P, too?
# With P0 inside S0 (chapter 12) the next S0 had to wait for $P_0 V$.
# Now products are fast and the softmax is slow, so its next scores should be there *before* it has finished with the old ones.
# With P0 in S1 the next S0 may be written as soon as S0 is in registers: S is computed one step ahead.
# All this is correct because of the order in which products are issued; here it is, from the source:

# %%
source = inspect.getsource(mxfp8_forward)
print(source[source.index("# Issue order") : source.index("@triton.jit\ndef multiply_tile")])

# %% [markdown]
# The rest is as in chapter 12: five roles, with a correction and a store role.
# K and V have one ring each, of four slots of 16 KiB.
# alpha is in shared memory, since its old place in S is taken.
# The maximum as a whole number, with its margin, is `integer_maximum` in [mxfp8_softmax.py](../jfa/kernels/blackwell/mxfp8_softmax.py).
#
# Now the modelled time, on one tile of 256 queries against 2,048 keys (about 20 seconds).
# `fma_parts` is how many sixteenths of the exponentials the FMA pipe computes.
# Predict: does the fastest choice leave more or fewer exponentials on the exp2 units than in bf16?


# %%
def modelled(launch, *args, **options):
    """Return (modelled cycles, {unit: share of the time that it works}) of one launch."""
    with emulator.options(policy="timed", rates=B200, races=False, trace=True, max_ctas=1):
        launch(*args, **options)
    run = emulator.last()
    used = dict.fromkeys(("tensor", "mufu", "alu"), 0.0)
    for (_, unit), spans in run.occupied.items():
        if unit in used:
            used[unit] += sum(end - begin for begin, end in spans) / run.time
    return run.time, used


problem, *tensors, _ = examples.example(256, 2048)
runs = {"bf16": modelled(launch.forward, problem, *tensors)}
for parts in (0, 4, 8):
    choice = dataclasses.replace(mxfp8_config(problem), fma_parts=parts)
    runs[f"MXFP8, {parts} of 16"] = modelled(mxfp8_launch.forward, problem, *tensors, config=choice)
plots.panels(
    list(runs),
    {
        "modelled cycles": ([time for time, _ in runs.values()], "{:,.0f}"),
        "tensor core": ([100 * used["tensor"] for _, used in runs.values()], "{:.0f} %"),
        "exp2 units": ([100 * used["mufu"] for _, used in runs.values()], "{:.0f} %"),
        "FMA pipe and ALU": ([100 * used["alu"] for _, used in runs.values()], "{:.0f} %"),
    },
    title="one tile of 256 x 2,048, D = 128, on a modelled B200",
)

# %%
for name, (time, _) in runs.items():
    print(f"{name:16} {runs['bf16'][0] / time:.2f} times as fast as bf16 (modelled)")

# %% [markdown]
# Even with every exponential on the exp2 units MXFP8 is faster, because no kernel overlaps perfectly, and shorter products cause shorter waits.
# A quarter of them on the FMA pipe is the best of the three, and what the package uses: the same quarter as in bf16.
# With none the exp2 units are the busiest; with half the FMA pipe is, because it also scales, takes maxima, adds up rows and converts P to 8 bits.
# The tensor core is idle more than half of the time, so a faster one would gain nothing.
# (This is one tile, so its beginning and end weigh more than in a long run.)
#
# Compiled for sm_100 (fbtriton 3.7.4, November 2026, `jfa compile "blackwell-mxfp8-forward-*"`), D = 128 without a mask: no spills, 207,388 bytes of shared memory with the queue, all 512 columns.
# With a window 8 bytes per thread are spilled and 28 loaded back.
#
# The polynomial on the FMA pipe is FlashAttention-4's idea; only the balance is different here.
# The polynomial has one degree more than in bf16: where P is rounded to three bits, an error of $10^{-4}$ changes one rounding in a thousand.
#
# ## Version 6: jagged
#
# Along D nothing changes: a group belongs to one token.
# Along tokens a group is 32 *rows*, and sequences do not end at multiples of 32.
# Take four sequences of 40, 70, 20 and 48 tokens.
# Groups cut from the packed rows cross three borders; groups counted from each sequence's own start cross none, and the last group of a sequence is filled up with zeros.

# %%
lengths = [40, 70, 20, 48]
o = offsets_from_lengths(lengths)
bounds = o.tolist()


def groups(begin, end):
    """Return groups of 32 from ``begin`` on: (first, length), the last one shorter."""
    return [(at, min(32, end - at)) for at in range(begin, end, 32)]


def crosses(first, length):
    return any(first < border < first + length for border in bounds)


spans = list(zip(bounds, bounds[1:]))
crossing = [(*part, "crosses", 1) if crosses(*part) else (*part, "", 0) for part in groups(0, 178)]
plots.segments(
    {
        "sequences": [plots.Segment(b, e - b, f"{n}", 2) for n, (b, e) in enumerate(spans)],
        "groups of packed rows": [plots.Segment(*part) for part in crossing],
        "groups of each sequence": [
            plots.Segment(*part) for begin, end in spans for part in groups(begin, end)
        ],
    },
    title="178 packed tokens: groups of 32 along tokens",
    xlabel="row",
    ticks=bounds,
)

# %% [markdown]
# How bad is a group that is shared with another sequence?
# Predict: half of the group belongs to a sequence whose values are $2^{10}$ times larger.
# What happens to the error of the other half?

# %%
mine, other = v[:16], v[16:32]
pair = offsets_from_lengths([16, 16])
print("  larger by   shared group   own group")
for octaves in (0, 10, 12, 14, 16, 20):
    packed = torch.cat([mine, other * 2.0**octaves])
    shared = along_tokens(packed)[:16]
    apart = quantize_jagged(packed[:, None], pair, "tokens").dequantize()[:16, 0]
    print(
        f"    2^{octaves:<2}        {relative_error(shared, mine):.4f}        ",
        f"{relative_error(apart, mine):.4f}",
    )

# %% [markdown]
# Up to $2^{10}$ nothing changes: the scale has enough range for both.
# Beyond that small numbers are lost; at $2^{20}$ the first sequence's values are all zero.
# A batch of ordinary numbers will never show you this fault.
# A NaN of another sequence shows it at once:

# %%
packed = v[: bounds[-1]].clone()
packed[45] = math.nan  # a token of sequence 1
shared = torch.cat([along_tokens(packed[:160]), packed[160:]])
apart = quantize_jagged(packed[:, None], o, "tokens").dequantize()[:, 0]
for name, x in (("packed rows", shared), ("each sequence", apart)):
    lost = [int(x[b:e].isnan().any(1).sum()) for b, e in spans]
    print(f"groups of {name:13}: tokens lost per sequence {lost}")

# %% [markdown]
# Inside sequence 1 the 31 neighboring tokens are lost in either case.
# Sequence 0 must not be affected.
#
# ### Where the scales are in memory
#
# Scale tiles are for 128 tokens each, so each sequence needs whole tiles of its own, and a kernel must find its first tile without adding up lengths.
# The package uses the rule of chapter 05 for padded rows: sequence $b$ begins at block $\lfloor o_b / 128 \rfloor + b$.
# It leaves at most one tile unused per sequence.

# %%
batch = [300, 0, 128, 40]
ob = offsets_from_lengths(batch)
x = torch.randn(sum(batch), 2, D, generator=g)
encoded = {axis: quantize_jagged(x, ob, axis) for axis in ("head_dim", "tokens")}
for axis, one in encoded.items():
    print(
        f"{axis:8}: data {tuple(one.data.shape)} {one.data.dtype}, scales {tuple(one.scales.shape)}"
    )
begin = first_blocks(ob[:-1])
for n, length in enumerate(batch):
    tiles = [int(begin[n]) + i for i in range(-(-length // 128))]
    print(f"sequence {n}: {length:3} tokens, tiles {tiles}")

# %% [markdown]
# The data stays packed, in both encodings: the ragged descriptor (chapter 12) cuts a box that extends past a sequence's end, and the rows past the end read as zero.
#
# The op does all of it with `precision="mxfp8"`: it takes bf16 tensors, quantizes them per sequence, and runs the kernel.
# The next cell has two query heads on one key head, a causal mask, and a last sequence full of NaN; it runs on the emulator:

# %%
batch = [150, 0, 70]
ob = offsets_from_lengths([*batch, 60])
inputs = [torch.randn(280, h, D, generator=g).bfloat16() for h in (2, 1, 1)]
for one in inputs[1:]:
    one[220:] = math.nan  # sequence 3: its own rows are lost, and no others
call = dict(causal=True)
found = jfa.jagged_flash_attention(
    *inputs, ob, ob, 150, 150, precision="mxfp8", backend="blackwell", **call
)
wanted_o = reference.mxfp8_attention(*inputs, ob, ob, dtype=torch.float64, **call)
true_o = reference.attention(*(t.double() for t in inputs), ob, ob, **call)
print(
    "rows with NaN:", sorted(set(found.isnan().nonzero()[:, 0].tolist())) == list(range(220, 280))
)
print(f"against the reference in MXFP8 {relative_error(found[:220], wanted_o[:220]):.0e}", end=", ")
print(f"against fp64 {relative_error(found[:220], true_o[:220]):.3f}")

# %% [markdown]
# The first of the two is the error of rounding the output to bf16.
#
# On a GPU one Triton pass writes both encodings, [jfa/kernels/common/quantize.py](../jfa/kernels/common/quantize.py).
# It does not need a Blackwell GPU; these times are from one recorded run on one H200, 113 thousand tokens of 64 sequences:

# %%
run = json.loads((recorded.FOLDER / "h200-2026-11-30-mxfp8.json").read_text())
print("measured on", run["environment"]["device"], run["environment"]["date"])
for one in run["quantizer"]:
    print(
        f"D = {one['head_dim']:3}, {one['encoding']:8}: {one['ms']:.3f} ms,",
        f"{one['of_copy']:.0%} of the speed of a copy of as many bytes",
    )

# %% [markdown]
# ## Version 7: the backward
#
# The table at the beginning has six products.
# Five of them belong to the backward, S among them: it is computed again.
#
# **P has the same constant in both directions.** $P^T$ in $dV = P^T dO$ is contracted over queries, but a constant is the same along every axis.
#
# **dS needs two encodings**, along queries for dK and along keys for dQ, and it exists in registers only.
# Squares of 32 x 32 with one scale serve both: such a square is 32 long along either axis.
# Is a scale per 1,024 numbers worse than one per 32?
# It should not be, since scales buy range and not precision.


# %%
def squares(x):
    """Quantize with one scale per 32 x 32, and dequantize."""
    parts = x.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    scale = torch.exp2((parts.abs().amax((1, 3), keepdim=True) / 448).log2().ceil())
    return (e4m3(parts / scale) * scale).flatten(2).flatten(0, 1)


do = torch.randn(256, D, generator=torch.Generator().manual_seed(1)).double()
p64 = torch.softmax(q.double() @ k.double().T / math.sqrt(D), 1)
ds = p64 * (do @ v.double().T - (exact * do).sum(1, keepdim=True))
dq, dk = ds @ k.double(), ds.T @ q.double()
along_keys, along_queries = dequantize(*quantize(ds)), along_tokens(ds)
print("only dS rounded     per 32   32 x 32")
print(f"dQ = dS K           {relative_error(along_keys.double() @ k.double(), dq):.4f}   ", end="")
print(f"{relative_error(squares(ds).double() @ k.double(), dq):.4f}")
print(
    f"dK = dS^T Q         {relative_error(along_queries.T.double() @ q.double(), dk):.4f}   ",
    end="",
)
print(f"{relative_error(squares(ds).T.double() @ q.double(), dk):.4f}")

# %% [markdown]
# The errors are the same to four digits.
#
# **The backward recomputes P, in the forward's precision.**
# The forward stores the LSE of its *quantized* scores.
# If the backward computes S from the unquantized Q and K, the rows of P no longer sum to 1:

# %%
q_q, k_q = dequantize(q8, q_codes), dequantize(k8, k_codes)
lse = torch.logsumexp(q_q @ k_q.T / math.sqrt(D), 1)
for name, a, b in (("quantized, as in the forward", q_q, k_q), ("bf16", half[0], half[1])):
    rows = torch.exp(a @ b.T / math.sqrt(D) - lse[:, None]).sum(1)
    print(f"S from {name:29} a row of P sums to {rows.min():.4f} ... {rows.max():.4f}")

# %% [markdown]
# The sums are up to 2 % too large or too small, in every step of a training.
# The authors of Attn-QAT (arXiv 2603.00040) report that training diverges if the backward recomputes P in another precision than the forward's; their format is FP4.
#
# ### The error of everything together
#
# The package's reference has the whole backward, through autograd.
# Here is the same problem with everything rounded, against fp64:

# %%
grads = []
for attend, cast in (
    (reference.attention, torch.float64),
    (reference.mxfp8_attention, torch.float32),
):
    leaves = [t.to(cast).requires_grad_() for t in heads]
    result = attend(*leaves, *whole)
    grads.append([result, *torch.autograd.grad(result, leaves, do[:, None].to(cast))])
costs = {
    name: relative_error(found.detach(), wanted.detach())
    for name, wanted, found in zip(("O", "dQ", "dK", "dV"), *grads)
}
plots.bars(
    list(costs),
    {"MXFP8": list(costs.values())},
    title="relative error against fp64, normal numbers, everything rounded",
    xlabel="",
    ylabel="relative error",
)

# %% [markdown]
# dQ and dK have the largest errors: S enters through P, dP is a product of rounded operands, dS is rounded, and so is the K or Q that it is multiplied by.
# Independent errors add in squares: 0.037 of S, 0.037 of dP, 0.027 of dS and 0.026 of the last operand give $\sqrt{0.037^2 + 0.037^2 + 0.027^2 + 0.026^2} \approx 0.064$.
# Most of it is due to the format's three bits of mantissa, and no choice of scales can reduce it.
#
# ### What the package does today
#
# The errors above are those of the reference.
# On Blackwell the op's backward computes the five products of the table in 8 bits; the emulator runs it below.
# With `deterministic=True` the op multiplies in **bf16** the numbers that the forward *rounded*: bf16 holds them exactly, so it starts from the forward's P; but P, dS and dO are rounded to bf16 only.

# %%
short = offsets_from_lengths([128])
given = [t[:128, None].bfloat16() for t in (q, k, v)]
grad_out = do[:128, None].bfloat16()
kernel = dict(precision="mxfp8", backend="blackwell")
ways = {
    "fp64": lambda *t: reference.attention(*t, short, short),
    "the reference": lambda *t: reference.mxfp8_attention(*t, short, short),
    "the op on Blackwell": lambda *t: jfa.jagged_flash_attention(*t, short, short, **kernel),
    "the same, deterministic": lambda *t: jfa.jagged_flash_attention(
        *t, short, short, **kernel, deterministic=True
    ),
}
gradients = {}
for name, attend in ways.items():
    exact = torch.float64 if name == "fp64" else torch.bfloat16
    leaves = [t.detach().to(exact).requires_grad_() for t in given]
    result = attend(*leaves)
    gradients[name] = torch.autograd.grad(result, leaves, grad_out.to(result.dtype))
for name in list(gradients)[1:]:
    said = [
        f"{what} {relative_error(a, b):.3f}"
        for what, a, b in zip(("dQ", "dK", "dV"), gradients[name], gradients["fp64"])
    ]
    print(f"{name:24} {', '.join(said)}")

# %% [markdown]
# ### Tensors that are already in MXFP8
#
# If many calls read the same keys and values, encode them once.
# The op takes what `quantize_jagged` returns in place of a tensor: query and key along `"head_dim"`, value along `"tokens"`.
# It multiplies them as they are, so the result has the same bits as a call that encodes the same numbers itself.
# Gradients need each operand along its other axis, too: if you ask for a gradient together with such a cache, you get an error, not a zero.
# `quantize_jagged(..., both=True)` encodes along both axes, and attention's gradient then goes to the tensor that was encoded.

# %%
cache = quantize_jagged(given[1], short, "head_dim"), quantize_jagged(given[2], short, "tokens")
encoded_by_the_call = jfa.jagged_flash_attention(*given, short, short, precision="mxfp8")
print(
    "same bits:",
    torch.equal(jfa.jagged_flash_attention(given[0], *cache, short), encoded_by_the_call),
)
stored = sum(t.data.nbytes + t.scales.nbytes for t in cache)
print(f"keys and values: {sum(t.nbytes for t in given[1:]):,} bytes in bf16, {stored:,} encoded")
try:
    jfa.jagged_flash_attention(given[0].clone().requires_grad_(), *cache, short)
except ValueError as error:
    print(error)

leaves = [x.clone().requires_grad_() for x in given]
axes = "head_dim", "head_dim", "tokens"
both = [quantize_jagged(x, short, axis, both=True) for x, axis in zip(leaves, axes)]
jfa.jagged_flash_attention(*both).float().sum().backward()
found = [x.grad for x in leaves]
leaves = [x.clone().requires_grad_() for x in given]
jfa.jagged_flash_attention(*leaves, short, short, precision="mxfp8").float().sum().backward()
print("same gradients:", all(torch.equal(g, x.grad) for g, x in zip(found, leaves)))

# %% [markdown]
# ### Which inputs break it
#
# Take four kinds of input: all inputs a million times smaller; rows of V between $2^{-6}$ and $2^6$; scores four times as large; one channel of Q and K eight times as large.
# Predict which two increase the error.
# These errors were recorded on a CPU, with the package's reference ([docs/mxfp8-notes.md](../docs/mxfp8-notes.md)):

# %%
measured = json.loads((recorded.FOLDER / "cpu-2026-11-30-mxfp8-errors.json").read_text())["errors"]
picked = [one for one in measured if one["case"].split(",")[0] != "normal"] + measured[:1]
plots.panels(
    [one["case"] for one in picked],
    {
        name: ([one["mxfp8"][name] for one in picked], "{:.3f}")
        for name in ("out", "dq", "dk", "dv")
    },
    title="relative error against fp64",
    one_axis=True,
)

# %% [markdown]
# A scale provides range, so the size of the inputs alone does not matter.
# **Large scores** do.
# The error of a score is relative to it, and the exponential turns it into an error of P: $2^{s + \epsilon} = 2^s \cdot 2^\epsilon$.
# Scores four times as large make the error of P four times as large.
# One large channel makes large scores.
# The other channels of its group are not affected: three octaves are well inside the range.
#
# ### Does it train?
#
# We trained a small model of two layers, D = 64, on histories of 16 to 128 items, for 400 steps, in each precision from the same weights and on the same batches.
# MXFP8 is *simulated*: operands are rounded, products are fp32.
# Recorded by [examples/train_mxfp8.py](../examples/train_mxfp8.py) on a CPU.

# %%
trained = json.loads((recorded.FOLDER / "cpu-2026-11-30-mxfp8-training.json").read_text())
losses = {
    (c["precision"], c["seed"]): torch.tensor(c["losses"]).unflatten(0, (-1, 40)).mean(1)
    for c in trained["curves"]
}
kinds = ("bf16", "mxfp8", "mxfp8 forward only")
plots.lines(
    [40 * n + 20 for n in range(10)],
    {f"{kind}, seed 1": (losses[kind, 1] - losses["fp32", 1]).tolist() for kind in kinds},
    title="loss above that of fp32, means of 40 steps",
    xlabel="step",
    ylabel="difference of losses",
)

# %%
for kind in ("fp32", *kinds):
    last = [f"{float(losses[kind, seed][-1]):.4f}" for seed in (0, 1)]
    print(f"{kind:18} mean loss of the last 40 steps: {last[0]} and {last[1]} (two seeds)")

# %% [markdown]
# The loss falls from 3.6 to about 1.4 in all of them; the loss of MXFP8 is at most 0.02 higher during the run and 0.003 higher at the end.
# "Forward only" has the forward in MXFP8 and a backward that recomputes P from bf16: the mistake described above.
# In this small run it does *not* diverge.
# Divergence was reported for much larger models and lengths than this one, so the run neither shows nor refutes it.
#
# ## What is claimed in public
#
# These numbers are quoted with their dates; we measured none of them.
# The table lists pull requests of the Triton fork (facebookexperimental/triton), at 8k tokens where a length matters; not all of them name the head dim:
#
# | | pull request | reported |
# |---|---|---|
# | P goes to tensor memory, not to shared memory | 1311, 2026-04-22 | 74 -> 425 TFLOP/s forward |
# | the forward's order of work, on a GB200 | 1521, 2026-05-15 | 1,010 -> 1,086 TFLOP/s |
# | P's fixed scale $2^{-8}$ in the backward | 1628, 2026-06-01 | +2.0 to +3.0 % |
# | the backward | 1654, 2026-06-08 | 741 -> 818 TFLOP/s |
# | alpha through shared memory | 2771, 2026-08-06 | +1.3 % |
# | separate correction warps, on a shared GPU | 2814, 2026-08-11 | 6.6 % lower mean latency |
# | forward and backward in its library: dense or causal, D = 128, lengths a multiple of 256 | 3621, 2026-09-16 | |
#
# * *cuDNN's documentation* (2026-04-20): the same axes as in the table above, a fixed scale for P, and dS quantized in both orientations on the fly.
# * *QuACK*, pull request 198 (2026-09-03, open): scales per 32 x 32, so that a transposition needs no new quantization.
# * *Attn-QAT* (arXiv 2603.00040): 1.39 times FlashAttention 4 on a B200, with FP4.
#
# ## Summary
#
# * A power-of-two scale buys range, not precision: e4m3 has eight numbers per octave at any scale.
# * Groups of 32 lie along the contracted axis, so operands of several products need several encodings.
# * P needs only a constant scale, and the maximum must not be more than 0.807 octaves too low.
# * With a maximum that is a whole number of octaves, kernel and reference agree to the last bits of fp32.
# * Faster products save less than half of the time, because the exponentials take as long as before.
# * Groups must not cross sequences: a NaN or a huge number of one sequence would reach the other.
#
# ## Exercises
#
# Open [exercises/16_mxfp8.py](../exercises/16_mxfp8.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 16.1 | quantize, with zeros, NaN, infinity and exact borders | 1 | 30 |
# | 16.2 | where is a scale stored, and back | 2 | 20 |
# | 16.3 | predict: the largest threshold, and how many exponentials must leave | 2 | 15 |
# | 16.4 | a Triton kernel: quantize a jagged batch along tokens | 3 | 30 |
# | 16.5 | bug hunt: scores scaled along the wrong axis | 2 | 45 |
# | 16.6 | bug hunt: P's scale, applied here and forgotten there | 2 | 45 |
#
# ## Checkpoint
#
# <details><summary>Why must groups lie along the contracted axis?</summary>
#
# The tensor core adds 32 products before it multiplies by a scale.
# Only a factor that all 32 share can be multiplied afterwards.
# </details>
#
# <details><summary>Which tensors of forward and backward are quantized twice, and which never reach memory?</summary>
#
# Q, K, V and dO twice: along D and along tokens.
# P and dS are made and quantized in the kernel; P with a constant, dS in squares.
# </details>
#
# <details><summary>A group's largest number is 449. Which code does RCEIL give, and what is 449 stored as?</summary>
#
# 449 / 448 is a little more than 1, so the scale is 2: code 128.
# 449 / 2 = 224.5 is rounded to 224, which stands for 448, and nothing saturates.
# With code 127 it would have saturated at 448: the same number.
# 470 shows the difference: with code 128 it is stored as 240, which is 480; with code 127 it is 448.
# </details>
#
# <details><summary>Chapter 12 rescales only when the maximum grew by 8 octaves. Why not here?</summary>
#
# P would reach 256, stored as 65,536. e4m3 ends at 448.
# At most log2(448 / 256) = 0.807 octaves are possible.
# A maximum that is too *high* by up to about eight octaves is harmless, so a kernel may raise it in advance.
# </details>
#
# <details><summary>Two variants in this course keep the structure of chapter 12's kernel. What does each change?</summary>
#
# MXFP8 changes the contents of a tile (bytes, scales, P's rounding), not which tiles there are.
# Block-sparse attention (chapter 17) changes which key block comes next, not the contents of a tile.
# </details>
#
# ## Try this
#
# * Replace `ceil` by `floor` in `quantize`. Why is the error of normal numbers larger, not smaller?
# * In `mx_attention` store $16 P$ instead of $256 P$. How stale may the maximum be, and what does it cost?
# * Make `quantize` use e5m2 (largest number 57,344) and draw the second figure again. What is the price of its wider range?
# * Let `run_forward` go over the key blocks from the last to the first, with and without WHOLE.
#
# ## Pitfalls
#
# **The codes of the other axis.** A tile of 128 tokens x 128 columns has 128 x 4 codes in either encoding, so there is no error if they are mixed up.
# With equal scales the result is right, and normal numbers have nearly equal scales: the largest of 32 of them is mostly between 1.75 and 3.5.

# %%
block = v[:128]
samples = {
    "all numbers 1": torch.ones(128, D),
    "normal numbers": block,
    "tokens of different size": block * torch.exp2(torch.arange(128) % 8)[:, None],
}
for name, x in samples.items():
    data, codes = quantize(x)
    other = quantize(x.T.contiguous())[1]
    wrong = relative_error(dequantize(data, other), x)
    print(f"{name:25} {relative_error(dequantize(data, codes), x):.3f}, other axis {wrong:.3f}")

# %% [markdown]
# **Infinity is not NaN.** E8M0 has no infinity.
# The package gives a group with an infinity the largest scale, code 254: the infinity becomes $448 \cdot 2^{127}$, which is infinite in fp32, and the others of its group become 0.

# %%
x = v[:32, :1].clone()
x[5] = math.inf
there = quantize_jagged(x[:, None], offsets_from_lengths([32]), "tokens").dequantize()
print("infinite:", int(there.isinf().sum()), "| NaN:", int(there.isnan().sum()), end=" | ")
print("zeros:", int((there == 0).sum()))

# %% [markdown]
# **The sum of 256 P.** If the row sum is taken from the numbers that are stored, and the product has P's scale, O is 256 times too small.
# If the product does not get the scale, O is 256 times too large.
# If both are wrong, O is right, and only the LSE shows it: it is 8 octaves too large.
# These variants differ by one line each: exercise 16.6.
#
# **A threshold above 0.807.** See version 2: at 8 octaves the error is 0.97.
# A margin in the other direction is harmless.
#
# **A group across a border.** See version 6: harmless up to $2^{10}$, and not beyond.
#
# | pitfall | where you saw it |
# |---|---|
# | a scale per 32 as if it were precision | the second figure |
# | an outlier, one scale | version 0 |
# | a NaN makes its whole group NaN | version 1, version 6 |
# | a maximum that is too low | version 2 |
# | a reference in another order of rounding | version 4 |
# | half of the products' time is not half of the time | version 5 |
# | P of the backward in another precision | version 7 |
#
# ## What differs on a real GPU
#
# * Quantizing is a separate pass over Q, K, V, and in the backward dO; the time saved must be more than this pass takes.
# * The conversion to e4m3 takes instructions of the same warps that compute exponentials.
# * The tensor core's power limit: 8-bit products at full rate may lower the clock. The model has one fixed clock.
# * Scale tiles compete for tensor memory's bandwidth; in the model their copies are free.
#
# ## Verified here, and not
#
# Versions 3 and 4 ran on the emulator under several schedules and agree with the quantized reference to fp32's last bits.
# The errors against fp64 were computed here or read from the recorded file; a trained model's numbers may be worse than any of these.
# The training run was simulated on a CPU: two seeds, a small model.
# The quantizer's times were measured on one H200.
# The package's forward and backward ran on the emulator, jagged, against the package's reference; the package's tests have more shapes, and its sweep breaks each of their barriers in turn.
# The cycles of version 5 are modelled.
# Nothing in this chapter ran on a Blackwell GPU.
#
# ## Sources
#
# * OCP Microscaling Formats (MX) Specification v1.0: e4m3, E8M0, groups of 32.
# * NVIDIA, PTX ISA: `tcgen05.mma` with block scaling, `tcgen05.cp`. TLX in fbtriton 3.7.4: names and semantics. The kernels are our own.
# * cuDNN frontend documentation, MXFP8 attention scaling (2026-04-20).
# * facebookexperimental/triton: pull requests 1311, 1521, 1628, 1654, 2771, 2814, 3621; Dao-AILab/quack: pull request 198 (read 2026-11).
# * Attn-QAT, arXiv 2603.00040.
# * The text that this course grew from (May 2026): its first variant.
#
# Next: [17 Block-sparse attention](17_block_sparse.py).
