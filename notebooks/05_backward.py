# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 The backward
#
# **Goals.** After this chapter you
# * can derive the five matrix products of the backward and write them by hand,
# * know why the output and one number per query, the log-sum-exp, are all that the forward must keep,
# * can decide which program may write dQ, and have seen that atomics make results differ from run to run,
# * can check the gradients of a packed op.
#
# **Time** 75 minutes to read, 145 for the exercises.
# **You need** chapter 04 (the jagged forward).
# No GPU.

# %%
import math

import torch
import triton
import triton.language as tl

import jfa
import jfa.emulator as emulator
from jfa import plots, reference

_ = torch.manual_seed(0)

# %% [markdown]
# ## The mental model: compute it again
#
# The forward computed P, the matrix of probabilities, block by block, and discarded every block.
# The backward needs P again.
# There are two ways to get it.
#
# *Store it*: one number per (query, key) pair.
# That is the memory that flash attention was invented to avoid.
#
# *Recompute it* from Q, K and one number per query, the log-sum-exp: P = exp(S − lse).
# This costs one more matrix product.
# It needs no running maximum and no rescaling, because the log-sum-exp is already known.
#
# So in one way the backward is simpler than the forward.
# Each block of P is final when it is computed, and blocks may come in any order.
#
# Here is the work for one block of BM queries and BN keys.
# Read an arrow as "goes into".
# Five boxes are matrix products: S, dP, dV, dK, dQ.
# Q, K and dO are needed a second time in the bottom row; those arrows are left out.

# %%
places = {
    "Q": ((0.0, 3.0, 1.6, 0.7), "[BM, D]", 5),
    "K": ((0.0, 1.5, 1.6, 0.7), "[BN, D]", 5),
    "S = Q Kᵀ": ((2.4, 1.5, 1.6, 2.2), "product 1\n[BM, BN]\n\nthen\nP = exp(S − lse)", 0),
    "dS = P (dP − delta)": ((4.8, 1.5, 2.2, 2.2), "[BM, BN]\nelement by element", 2),
    "dP = dO Vᵀ": ((7.8, 1.5, 1.6, 2.2), "product 2\n[BM, BN]", 0),
    "dO": ((10.2, 3.0, 1.6, 0.7), "[BM, D]", 5),
    "V": ((10.2, 1.5, 1.6, 0.7), "[BN, D]", 5),
    "dV = Pᵀ dO": ((2.4, 0.0, 1.6, 0.8), "product 3, [BN, D]", 1),
    "dK = dSᵀ Q": ((4.8, 0.0, 1.6, 0.8), "product 4, [BN, D]", 1),
    "dQ = dS K": ((6.6, 0.0, 1.6, 0.8), "product 5, [BM, D]", 1),
}
arrows = [
    ("Q", "S = Q Kᵀ"), ("K", "S = Q Kᵀ"), ("S = Q Kᵀ", "dS = P (dP − delta)"),
    ("dO", "dP = dO Vᵀ"), ("V", "dP = dO Vᵀ"), ("dP = dO Vᵀ", "dS = P (dP − delta)"),
    ("S = Q Kᵀ", "dV = Pᵀ dO"), ("dS = P (dP − delta)", "dK = dSᵀ Q"),
]  # fmt: skip
arrows.append(("dS = P (dP − delta)", "dQ = dS K"))
plots.blocks(places, arrows, title="one block of the backward (scale left out)", directed=True)

# %% [markdown]
# ## The math, down to shapes
#
# One sequence, one head.
# `n` queries, `m` keys.
# A gradient is written with a d in front: dQ is the derivative of the loss with respect to Q, and has Q's shape.
# The gradient of the output, dO, is given.
#
# The forward was
#
# $$S = \mathrm{scale}\; Q K^T, \qquad P_{ij} = e^{S_{ij} - \mathrm{lse}_i}, \qquad O = P V .$$
#
# **The last step first.** The product O = P V is an ordinary matrix product, so
#
# $$dV = P^T dO, \qquad dP = dO\, V^T .$$
#
# **Through the softmax.** A row of P sums to 1.
# Raising one score lowers all other probabilities of its row.
# The derivative of the softmax is
#
# $$dS_{ij} = P_{ij}\,\Big(dP_{ij} - \sum_k P_{ik}\, dP_{ik}\Big).$$
#
# The sum runs over the *whole row*, but a program that works on a block of keys has only a part of the row.
#
# **Delta.** Substitute dP, and the sum needs only the output, which the forward has already computed:
#
# $$\sum_k P_{ik}\,dP_{ik} \;=\; \sum_k P_{ik}\,(dO_i \cdot V_k) \;=\; dO_i \cdot \sum_k P_{ik} V_k \;=\; dO_i \cdot O_i .$$
#
# The result is called $\mathrm{delta}_i$.
# It is one number per query, computed from two rows in memory, without P.
#
# **Through the scores.**
#
# $$dQ = \mathrm{scale}\; dS\, K, \qquad dK = \mathrm{scale}\; dS^T Q .$$
#
# | product | shapes | sums over |
# |---|---|---|
# | S = Q Kᵀ | [n, D] [D, m] | D |
# | dP = dO Vᵀ | [n, D] [D, m] | D |
# | dV = Pᵀ dO | [m, n] [n, D] | queries |
# | dK = dSᵀ Q | [m, n] [n, D] | queries |
# | dQ = dS K | [n, m] [m, D] | keys |
#
# The forward has two products of this size, so the backward does 5/2 = 2.5 times its FLOPs.
#
# Look at the last column: dV and dK sum over *queries*, dQ sums over *keys*.
# A program that holds a tile of keys can finish dK and dV alone, but has only a part of dQ.
# This asymmetry shapes every backward kernel.
#
# **If lse is an output as well** (chapter 02 merges with it), it has a gradient of its own, dlse.
# Since $\partial\,\mathrm{lse}_i / \partial S_{ij} = P_{ij}$, it only changes delta:
#
# $$\mathrm{delta}_i = dO_i \cdot O_i - d\mathrm{lse}_i .$$
#
# **A query without keys** has lse = −∞, and no P at all.
# Its gradients are 0.
# The formula alone does not give that: exp(S − (−∞)) is infinite.
#
# ## Version 0: dense, P stored
#
# The formulas in a few lines of PyTorch, compared with autograd in double precision:


# %%
def forward_dense(q, k, v, scale):
    s = scale * q @ k.T
    lse = torch.logsumexp(s, 1)
    p = torch.exp(s - lse[:, None])
    return p @ v, lse, p


def backward_v0(q, k, v, out, dout, p, scale):
    """Return dq, dk, dv from the stored P, [n, m]."""
    dv = p.T @ dout
    dp = dout @ v.T
    delta = (out * dout).sum(1, keepdim=True)
    ds = p * (dp - delta)
    return scale * ds @ k, scale * ds.T @ q, dv


def by_autograd(q, k, v, dout, scale):
    """Return dq, dk, dv in double precision from PyTorch's autograd."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = torch.softmax(scale * q @ k.T, 1) @ v
    return torch.autograd.grad(out, (q, k, v), dout.double())


def apart(ours, right):
    """Return the largest difference over several pairs of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, right))


n, m, D = 50, 70, 16
scale = 1 / math.sqrt(D)
q, k, v, dout = (torch.randn(rows, D) for rows in (n, m, m, n))
right = by_autograd(q, k, v, dout, scale)
out, lse, p = forward_dense(q, k, v, scale)
print("version 0, largest error:", apart(backward_v0(q, k, v, out, dout, p, scale), right))

# %% [markdown]
# ## Version 1: P recomputed, block by block
#
# The same five products, one block of keys at a time.
# From the forward only `out` and `lse` are kept, and no tensor has n · m elements.


# %%
def backward_v1(q, k, v, out, lse, dout, scale, block=16):
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (out * dout).sum(1, keepdim=True)
    largest = 0
    for j in range(0, len(k), block):
        keys = slice(j, j + block)
        p = torch.exp(scale * q @ k[keys].T - lse[:, None])  # [n, block], final
        ds = p * (dout @ v[keys].T - delta)
        dv[keys] = p.T @ dout  # finished: this block owns these keys
        dk[keys] = scale * ds.T @ q  # finished
        dq += scale * ds @ k[keys]  # a part: every block adds to the same rows
        largest = max(largest, p.numel())
    return (dq, dk, dv), largest


grads, largest = backward_v1(q, k, v, out, lse, dout, scale)
print("version 1, largest error:", apart(grads, right))
print("largest block of P:", largest, "elements; all of P:", n * m)

# %% [markdown]
# How much memory does storing P cost?
# PyTorch can count it: it calls a hook for each tensor that autograd keeps for the backward.
# Predict first: by what factor does the count grow when n doubles?


# %%
def elements_kept(attend, n, dim=64):
    """Count the elements that autograd keeps for the backward; one head, n queries, n keys."""
    kept = {}

    def see(x):
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    inputs = [torch.randn(n, 1, dim, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        _ = attend(*inputs)  # held until the count is done
    return sum(kept.values())


def store_p(q, k, v):
    return torch.softmax(q[:, 0] @ k[:, 0].T / math.sqrt(q.shape[2]), 1) @ v[:, 0]


def recompute_p(q, k, v):
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    return jfa.jagged_flash_attention(q, k, v, offsets, offsets, len(q), len(q))


counted = [256, 512, 1024, 2048]
sizes = [*counted, 4096, 8192, 16384]
stored = [elements_kept(store_p, n) for n in counted] + [3 * n * 64 + n * n for n in sizes[4:]]
again = [elements_kept(recompute_p, n) for n in counted] + [4 * n * 64 + n for n in sizes[4:]]
plots.lines(
    sizes,
    {"P stored": stored, "P recomputed": again},
    title="elements kept for the backward, one head, D = 64",
    xlabel="n",
    ylabel="elements",
    log_x=True,
    log_y=True,
)  # fmt: skip

# %% [markdown]
# Up to n = 2048 the elements were counted by PyTorch; beyond that they follow from a formula.
# If P is stored, they are Q, K, V and n² elements of P.
# If P is recomputed, they are Q, K, V, the output and n elements of lse.
# At n = 16,384 that is 272 million against 4.2 million elements per head: 64 times less.
#
# ## Who owns what
#
# Now split the work among programs.
# There are two ways to divide the grid of blocks.
#
# *By key tiles.* A program holds a tile of K and V, and loops over the queries.
# It finishes dK and dV of its keys alone, but it computes only a part of each row of dQ.
# So all programs must add to the same dQ in memory, with **atomics**: additions that the memory system carries out one after another, so that none is lost.
#
# *Twice.* One kernel is divided by key tiles and computes dK and dV; a second one is divided by query tiles and computes dQ.
# Then each result has one owner, and no additions in memory are needed.
# But the second kernel needs dS as well, so it computes S and dP again.

# %%
by_key_tile = torch.arange(3).repeat(4, 1)
by_query_tile = torch.arange(4)[:, None].repeat(1, 3)
plots.owners(
    {
        "version 2: one kernel": (by_key_tile, "dQ", "dK\ndV"),
        "version 3: dK and dV": (by_key_tile, "", "dK\ndV"),
        "version 3: dQ": (by_query_tile, "dQ", ""),
    },
    title="who computes a block of S (number and color: the program), and who writes the results",
)

# %% [markdown]
# | | products per block | additions to dQ in memory | results repeat bit by bit |
# |---|---|---|---|
# | version 2, one kernel | 5 | all of dQ, once per key tile | no |
# | version 3, two kernels | 4 + 3 = 7 | none | yes |
#
# ## Version 2: one kernel, dQ by atomics
#
# A program takes a tile of `BN` keys of one sequence, one head.
# All kernels of this chapter use `block_of_ds`.
#
# Look at the values of masked lanes.
# Those of `lse` are plus infinity: then P = exp(S − ∞) is exactly 0 for queries past the end.
# No other mask is needed for them.


# %%
@triton.jit
def block_of_ds(q, k, v, do, lse, delta, scale):
    """Return P and dS of one block, both [BM, BN]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.exp(s - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None])


@triton.jit
def by_keys(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, first_keys_ptr, dq_ptr, dk_ptr, dv_ptr,
    scale, len_q, len_kv, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ADD_DQ: tl.constexpr, MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """Store dK and dV of BN keys from first_keys[program] on; with ADD_DQ, add their part of dQ."""
    d = tl.arange(0, D)
    j = tl.load(first_keys_ptr + tl.program_id(0)) + tl.arange(0, BN)
    at_keys = j[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)
    v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for start in range(0, len_q, BM):
        i = start + tl.arange(0, BM)
        at_rows = i[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at_rows, mask=i[:, None] < len_q, other=0.0)
        do = tl.load(do_ptr + at_rows, mask=i[:, None] < len_q, other=0.0)
        lse = tl.load(lse_ptr + i, mask=i < len_q, other=float("inf"))
        delta = tl.load(delta_ptr + i, mask=i < len_q, other=0.0)
        p, ds = block_of_ds(q, k, v, do, lse, delta, scale)
        dv = tl.dot(tl.trans(p), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
        if ADD_DQ:
            if MASK_KEYS:
                ds = tl.where(j[None, :] < len_kv, ds, 0.0)
            dq = tl.dot(ds, k, input_precision="ieee") * scale
            tl.atomic_add(dq_ptr + at_rows, dq, mask=i[:, None] < len_q)
    tl.store(dk_ptr + at_keys, dk * scale, mask=j[:, None] < len_kv)
    tl.store(dv_ptr + at_keys, dv, mask=j[:, None] < len_kv)


def backward_v2(q, k, v, out, lse, dout, scale, order=None, dq_dtype=torch.float32, mask=True):
    """Return dq, dk, dv from one kernel; `order` is the order in which the key tiles run."""
    first_keys = torch.arange(0, len(k), 16, dtype=torch.int32)
    first_keys = first_keys if order is None else first_keys[order]
    dq = torch.zeros(q.shape, dtype=dq_dtype)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    delta = (out * dout).sum(1)
    by_keys[(len(first_keys),)](
        q, k, v, dout, lse, delta, first_keys, dq, dk, dv, scale, len(q), len(k),
        D=q.shape[1], BM=16, BN=16, ADD_DQ=True, MASK_KEYS=mask,
    )  # fmt: skip
    return dq, dk, dv


print("version 2, largest error:", apart(backward_v2(q, k, v, out, lse, dout, scale), right))

# %% [markdown]
# **Why `MASK_KEYS`?** The tail of K is loaded as 0, so a key past the end adds dS · 0 = 0 to dQ.
# It seems that no mask is needed.
# Try it without one, first on the same numbers, then with scores that are all far below zero.
# Predict both lines of the output.

# %%
low_q, low_k = q.abs() * 7, -k.abs() * 7  # every score far below 0
low_out, low_lse, _ = forward_dense(low_q, low_k, v, scale)
low_right = by_autograd(low_q, low_k, v, dout, scale)
print("lse of the low scores: from", low_lse.min().item(), "to", low_lse.max().item())
for name, args, want in (
    ("ordinary scores", (q, k, v, out, lse), right),
    ("low scores", (low_q, low_k, v, low_out, low_lse), low_right),
):
    bare, masked = (backward_v2(*args, dout, scale, mask=mask) for mask in (False, True))
    print(f"{name}: without the mask NaN in {int(bare[0].isnan().any(1).sum())} rows of dQ;",
          f"with it, error {apart(masked, want):.1g}")  # fmt: skip

# %% [markdown]
# A key past the end has the score 0, because its row of K was loaded as 0.
# If lse is below −88, then exp(0 − lse) overflows to infinity, and infinity times 0 is NaN.
# It is the same problem as in chapter 04's tail tile: multiplying by 0 does not remove a number that is not finite.
#
# In dK and dV it does no harm: their row j depends only on column j of P, and rows past the end are not stored.
#
# ## Version 3: two kernels, one owner per result
#
# For dK and dV use the same kernel without the addition.
# For dQ use its mirror: hold a tile of queries, and loop over the keys.


# %%
@triton.jit
def by_queries(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, scale, len_q, len_kv,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store dQ of the BM queries of this program."""
    d = tl.arange(0, D)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    at_rows = i[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_rows, mask=i[:, None] < len_q, other=0.0)
    do = tl.load(do_ptr + at_rows, mask=i[:, None] < len_q, other=0.0)
    lse = tl.load(lse_ptr + i, mask=i < len_q, other=float("inf"))
    delta = tl.load(delta_ptr + i, mask=i < len_q, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for start in range(0, len_kv, BN):
        j = start + tl.arange(0, BN)
        at_keys = j[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)
        v = tl.load(v_ptr + at_keys, mask=j[:, None] < len_kv, other=0.0)
        _, ds = block_of_ds(q, k, v, do, lse, delta, scale)
        ds = tl.where(j[None, :] < len_kv, ds, 0.0)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    tl.store(dq_ptr + at_rows, dq * scale, mask=i[:, None] < len_q)


def backward_v3(q, k, v, out, lse, dout, scale, order=None):
    first_keys = torch.arange(0, len(k), 16, dtype=torch.int32)
    first_keys = first_keys if order is None else first_keys[order]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = (out * dout).sum(1)
    common = (q, k, v, dout, lse, delta)
    sizes = {"D": q.shape[1], "BM": 16, "BN": 16}
    by_keys[(len(first_keys),)](
        *common,
        first_keys,
        dq,
        dk,
        dv,
        scale,
        len(q),
        len(k),
        **sizes,
        ADD_DQ=False,
        MASK_KEYS=False,
    )
    by_queries[(triton.cdiv(len(q), 16),)](*common, dq, scale, len(q), len(k), **sizes)
    return dq, dk, dv


print("version 3, largest error:", apart(backward_v3(q, k, v, out, lse, dout, scale), right))

# %% [markdown]
# The work of both versions, counted by the emulator on 50 queries and 70 keys (4 x 5 blocks):

# %%
versions = {"v2: one kernel, atomics": backward_v2, "v3: two kernels": backward_v3}
work = {}
for name, backward in versions.items():
    with emulator.counting() as work[name]:
        backward(q, k, v, out, lse, dout, scale)
plots.panels(
    list(work),
    {
        "matrix products": ([c.dots for c in work.values()], "{}"),
        "elements loaded": ([c.load_elements for c in work.values()], "{:,}"),
        "elements added by atomics": ([c.atomic_elements for c in work.values()], "{:,}"),
    },
    title="one sequence, one head, 20 blocks of 16 x 16",
)

# %% [markdown]
# 100 products against 140, as in the table above.
# Version 2 also does 4,000 additions: each of 5 key tiles adds to all 800 elements of dQ.
#
# Which is faster depends on the machine.
# On one H200, plain Triton took 2.97 ms with atomics and 1.65 + 1.01 ms with two kernels, on the benchmark shape *self* (2026-11-29, recorded in [docs/portable-notes.md](../docs/portable-notes.md)).
# Chapter 14's kernel for Blackwell uses atomics: there a separate group of warps adds dQ while the tensor cores continue.
#
# ## How the order changes the bits
#
# Each addition of floating-point numbers rounds, so another order gives another result.
# With atomics the programs add in the order in which they happen to arrive, and on a GPU that differs from run to run.
# On the emulator they add in the order of the tile list, so we can choose the order.
# The next cell tries 20 of them, and compares one element of dQ, accumulated in fp32 and in bf16, with fp64.

# %%
many = torch.randn(400, D)
values = torch.randn(400, D)
wide_out, wide_lse, _ = forward_dense(q, many, values, scale)
wide_right = by_autograd(q, many, values, dout, scale)[0]
orders = [torch.randperm(25, generator=torch.Generator().manual_seed(s)) for s in range(20)]


def one_element(backward, **options):
    """Return the absolute error of dQ[3, 5] for each of the 20 orders."""
    runs = [
        backward(q, many, values, wide_out, wide_lse, dout, scale, order, **options)[0]
        for order in orders
    ]
    return [abs(float(dq[3, 5]) - float(wide_right[3, 5])) for dq in runs]


spread = {
    "v2, added in bf16": one_element(backward_v2, dq_dtype=torch.bfloat16),
    "v2, added in fp32": one_element(backward_v2),
    "v3, two kernels": one_element(backward_v3),
}
plots.strips(
    spread,
    title=f"error of dQ[3, 5] (it is {float(wide_right[3, 5]):.4f}) in 20 orders of 25 key tiles",
    xlabel="distance from the fp64 result",
    log_x=True,
)

# %% [markdown]
# In version 2, twenty orders give several answers.
# In fp32 they differ in the seventh digit, which is harmless for training but makes debugging by comparing two runs harder.
# In bf16, with 25 roundings to 8 bits, the worst one is off by about a hundredth of the value.
# So dQ is always accumulated in fp32, even if it is returned in bf16.
#
# Version 3 gives one answer.
# It is not more accurate, only repeatable: each program adds in the order of its own loop.
# A kernel with this property is called *deterministic*.
#
# An addition without an atomic would be worse: load dQ, add, store.
# If two programs load the same old value, one of their parts is lost.
# The emulator detects that:


# %%
@triton.jit
def add_without_atomics(x_ptr, total_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + i)
    tl.store(total_ptr + i, tl.load(total_ptr + i) + x)


try:
    add_without_atomics[(2,)](torch.ones(2, 16), torch.zeros(16), N=16)
except emulator.EmulatorError as error:
    print(str(error)[:400])

# %% [markdown]
# ## Version 4: jagged
#
# For packed sequences each kernel gets a tile list, as in chapter 04.
# The list for dQ has tiles of *queries*, and the list for dK and dV has tiles of *keys*.
# Heads are the second axis of the grid.
#
# Here is the dQ kernel; comments mark what is new compared with version 3.


# %%
@triton.jit
def jagged_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, q_offsets_ptr, k_offsets_ptr,
    tiles_ptr, dq_ptr, scale, total_q, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store dQ of packed sequences; program (entry of the list of query tiles, head)."""
    head = tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    q_begin, q_end = tl.load(q_offsets_ptr + seq), tl.load(q_offsets_ptr + seq + 1)
    k_begin, k_end = tl.load(k_offsets_ptr + seq), tl.load(k_offsets_ptr + seq + 1)
    d = tl.arange(0, D)
    rows = q_begin + first + tl.arange(0, BM)
    mine = rows < q_end  # not `< total_q`: the tail of this tile covers the next sequence
    at_rows = (rows[:, None] * H + head) * D + d[None, :]
    q = tl.load(q_ptr + at_rows, mask=mine[:, None], other=0.0)
    do = tl.load(do_ptr + at_rows, mask=mine[:, None], other=0.0)
    lse = tl.load(lse_ptr + head * total_q + rows, mask=mine, other=float("inf"))  # [H, total_q]
    delta = tl.load(delta_ptr + head * total_q + rows, mask=mine, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for start in range(k_begin, k_end, BN):  # no keys: no step, dQ stays 0
        keys = start + tl.arange(0, BN)
        at_keys = (keys[:, None] * H + head) * D + d[None, :]
        k = tl.load(k_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)
        v = tl.load(v_ptr + at_keys, mask=keys[:, None] < k_end, other=0.0)
        _, ds = block_of_ds(q, k, v, do, lse, delta, scale)
        ds = tl.where(keys[None, :] < k_end, ds, 0.0)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    tl.store(dq_ptr + at_rows, dq * scale, mask=mine[:, None])


def tiles_of(offsets, block=16):
    """Return the tiles, [tiles, 2] int32: (sequence, first row in it)."""
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    tiles = [(b, row) for b, n in enumerate(lengths) for row in range(0, n, block)]
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2)


def packed_problem(len_q, len_kv, heads=2, dim=16, dtype=torch.float32):
    offsets = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (len_q, len_kv)]
    tensors = [torch.randn(sum(x), heads, dim, dtype=dtype) for x in (len_q, len_kv, len_kv, len_q)]
    return *tensors, *offsets


LEN_Q, LEN_KV = [5, 0, 33, 1, 17], [17, 4, 40, 0, 21]
pq, pk, pv, pdout, q_offsets, k_offsets = packed_problem(LEN_Q, LEN_KV)
inputs = [x.double().requires_grad_() for x in (pq, pk, pv)]
pout, plse = reference.attention(*inputs, q_offsets, k_offsets, return_lse=True)
packed_right = torch.autograd.grad(pout, inputs, pdout.double())

out32, lse32 = pout.detach().float(), plse.detach().float()
pdelta = (out32 * pdout).sum(2).T.contiguous()  # [H, total_q]
tiles = tiles_of(q_offsets)
pdq = torch.full_like(pq, float("nan"))
jagged_dq[(len(tiles), 2)](
    pq,
    pk,
    pv,
    pdout,
    lse32,
    pdelta,
    q_offsets,
    k_offsets,
    tiles,
    pdq,
    scale,
    len(pq),
    2,
    D=16,
    BM=16,
    BN=16,
)
print("version 4, dQ, largest error:", apart([pdq], packed_right[:1]))
print("the query without keys: lse", lse32[:, 38].tolist(), "dQ", pdq[38].abs().max().item())

# %% [markdown]
# The kernel for dK and dV, over a list of key tiles, is exercise 5.3.
# There a group of query heads shares a key head, which adds one more sum.
# Exercise 5.4 is version 2 for packed sequences, with a mistake in it.
#
# ## Version 5: the package's op, and a check that needs no formula
#
# `torch.autograd.gradcheck` does not need to know how a gradient was derived.
# It changes each input element a little in both directions and compares the slope of the outputs with the result of `backward()`.
# It needs double precision, because in fp32 rounding would dominate the slope.
# It is slow, with two forwards per input element, so the problem here is tiny.
# The check covers both outputs, out and lse.

# %%
tiny = packed_problem([2, 0, 3, 1], [3, 2, 4, 0], heads=2, dim=4, dtype=torch.float64)
leaves = [x.requires_grad_() for x in tiny[:3]]


def op(q, k, v):
    return jfa.jagged_flash_attention(q, k, v, *tiny[4:], 3, 4, return_lse=True)


def op_finite(q, k, v):
    """Leave out the queries that see no key: their lse is minus infinity, which has no slope."""
    out, lse = op(q, k, v)
    return out, lse[torch.isfinite(lse)]


print("gradcheck of the packed op, out and lse:", torch.autograd.gradcheck(op_finite, leaves))

# %% [markdown]
# The same op with the portable kernel, on the emulator.
# It is version 3 with everything else that a model needs: masks, grouped heads, shared queries, other head sizes.

# %%
leaves = [x.clone().requires_grad_() for x in (pq, pk, pv)]
ours = jfa.jagged_flash_attention(*leaves, q_offsets, k_offsets, 33, 40, backend="portable")
print(
    "portable kernel, largest error:", apart(torch.autograd.grad(ours, leaves, pdout), packed_right)
)

# %% [markdown]
# ## Summary
#
# * There are five products: S and dP give P and dS, and from these follow dV, dK and dQ.
# * P = exp(S − lse), dS = P (dP − delta), delta = dO · O − dlse.
# * The forward keeps `out` and `lse`; nothing of size n · m is stored.
# * A key tile owns dK and dV, a query tile owns dQ: either add dQ with atomics, or compute S and dP twice.
# * The order of atomics differs from run to run, so their results do not repeat; dQ is accumulated in fp32.
# * Mask the keys past the end in dS, and load lse as +∞ for queries past the end.
#
# ## Exercises
#
# Open [exercises/05_backward.py](../exercises/05_backward.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 5.1 | delta of every packed row, with the gradient of lse | 1 | 10 |
# | 5.2 | one block's contributions, by hand | 2 | 15 |
# | 5.3 | the jagged dK/dV kernel, with grouped heads | 2 | 35 |
# | 5.4 | bug hunt: right for one sequence | 2 | 30 |
# | 5.5 | predict products, bytes and additions | 2 | 30 |
# | 5.6 | back through a merge of two halves | 3 | 25 |
#
# ## Checkpoint
#
# <details><summary>Why do the rows of dS sum to 0 (when lse has no gradient)?</summary>
#
# Adding the same number to all scores of a row changes no probability, so the loss does not change.
# The sum of dS over the row is that derivative.
# In the formula: the sum of P (dP − delta) is delta − delta.
# </details>
#
# <details><summary>A colleague computes delta as the sum of P · dP over each block, and subtracts that. What goes wrong?</summary>
#
# The sum over one block is only a part of the row's sum.
# It is right only if one block holds all keys.
# Over the *whole* row the sum of P · dP is delta, so that works, but it is slower.
# </details>
#
# <details><summary>Queries past the end get lse = +∞ and Q = 0. Is one of the two enough?</summary>
#
# With lse = +∞ alone, P is 0, so dV and dS are 0, as long as the loaded Q and dO are finite.
# With Q = dO = 0 alone, P is exp(0 − lse), which may overflow.
# The kernels do both, since the rows of the next sequence may hold anything.
# </details>
#
# <details><summary>Sequences of 64 queries and 1,000,000 keys. Which of version 3's kernels lacks parallel work?</summary>
#
# The kernel for dQ: there is one tile of queries per head, with a loop over a million keys.
# Either several programs split the keys and their parts are added, or the launch waits for one program.
# See chapters 07 and 08.
# </details>
#
# ## Try this
#
# - In version 2, give each key tile its own dQ buffer, so `[tiles, n, D]` in all, and sum at the end.
#   Then the result repeats bit by bit.
#   How much memory does that take for n = 16,384, D = 128, tiles of 128?
# - Set one row of `dout` to 0.
#   Which rows of the three gradients become 0, and which only change?
# - Multiply `dout` by 1000.
#   Which intermediate values grow, and which do not? (bf16 has the range for it; fp16 ends at 65,504.)
#
# ## Pitfalls
#
# The formulas below contain one mistake each, and run on version 1's numbers.


# %%
def with_mistake(mistake):
    """Return the errors of (dq, dk, dv) of version 0's formulas with one mistake."""
    log2e = math.log2(math.e)
    s = scale * q @ k.T
    p = (
        torch.exp2(s * log2e - lse[:, None])
        if mistake == "natural lse in exp2"
        else torch.exp(s - lse[:, None])
    )
    delta = 0 if mistake == "no delta" else (out * dout).sum(1, keepdim=True)
    ds = p * (dout @ v.T - delta)
    to_k = 1.0 if mistake == "scale on dQ only" else scale
    grads = scale * ds @ k, to_k * ds.T @ q, p.T @ dout
    return [float((a - b).abs().max()) for a, b in zip(grads, right)]


names = ["nothing", "natural lse in exp2", "no delta", "scale on dQ only"]
errors = {name: with_mistake(name) for name in names}
plots.panels(
    names,
    {
        f"error of {x}": ([errors[name][i] for name in names], "{:.1g}")
        for i, x in enumerate(("dQ", "dK", "dV"))
    },
    title="one mistake each; a test of dV alone misses two of the three",
    one_axis=True,
)

# %% [markdown]
# | pitfall | where you saw it |
# |---|---|
# | lse in one base, exponential in another | the picture above |
# | delta forgotten: dV is right, so a test of dV passes | the picture above |
# | the scale on one of dQ and dK, or twice (once in Q, once at the end) | the picture above |
# | 0 · ∞ in dQ for keys past the end | version 2 with low scores |
# | rows of the next sequence in a tail tile | version 4's mark, exercise 5.4 |
# | an epilogue that assumes a private address | `add_without_atomics` |
# | dQ added up in bf16 | the strips |
# | a query without keys | version 4's last line |
#
# On the sixth: an *epilogue* is the part of a kernel that handles its finished accumulator.
# For a matrix product it is a plain store, since no other program writes to the same tile.
# For dQ in version 2 that is not true.
# A template that just stores the tile, or that also applies an optimizer step to it, is right for dK and dV and wrong for dQ.
# Chapters 07 and 14 return to this.
#
# ## What differs on a real GPU
#
# - Operands are bf16, so P and dS are rounded to bf16 before products 3, 4 and 5.
#   The accumulators stay fp32.
# - The backward holds more at once than the forward: two accumulators and five operand tiles.
#   Registers are the tightest resource, so tiles are smaller than in the forward.
# - Atomics on fp32 exist in vector form (four at a time, in the L2 cache).
#   If many programs add to the same row, they wait for each other: chapter 07 counts how often.
# - According to FlashAttention 4's paper (2026), its deterministic backward reaches at most three quarters of the speed of its nondeterministic one on a B200.
#   A pull request of that project (number 2150) reports 1201 TFLOP/s for packed sequences on a B200, 1232 for dense ones, and 913 with determinism.
#   These figures are quoted, not measured here.
#
# ## Verified here, and not
#
# Every version ran on a CPU or on the emulator when this notebook ran, and was compared with autograd in double precision; gradcheck ran on the op.
# The kept elements were counted up to n = 2048.
# Nothing here was timed.
# The two H200 times are quoted from this project's own notes.
#
# ## Sources
#
# - Dao et al., *FlashAttention*, arXiv 2205.14135 (2022), appendix B: the backward with recomputation.
#   Dao, *FlashAttention-2*, arXiv 2307.08691 (2023): lse in place of maximum and sum, dQ by atomics.
# - FlashAttention 4, arXiv 2603.05451 (2026), and Dao-AILab/flash-attention pull request 2150 (2026): the figures of the deterministic backward.
# - `jfa/kernels/portable/backward.py`: version 3 with everything; `docs/portable-notes.md`, version 2: both ways measured on one H200, 2026-11-29.
#
# Next: [06 masks and loop peeling](06_masks.py).
