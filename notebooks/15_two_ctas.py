# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 Two CTAs
#
# **Goals.** Know what a pair of CTAs shares and what it does not.
# Let one of the two, the leader, issue products for both, and count bytes and arrivals on the correct CTA's barrier.
# Halve what a product reads from shared memory.
# Exchange dS through distributed shared memory, in two forms.
# Budget tensor and shared memory of a pair.
# Choose between the resident form, a pair and a single CTA by shape.
# Know the ways in which a pair hangs.
#
# **Time.** 90 minutes, and 130 for the exercises.
#
# **Needs.** Chapters 12 and 14.
# No GPU: the emulator runs pairs of CTAs, and its cycles are a model of a B200.

# %%
import contextlib
import inspect
import linecache
import math

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa
import jfa.emulator as emulator
from jfa import plots
from jfa.compiled import compile_kernel
from jfa.emulator import sweep
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline
from jfa.kernels.blackwell import backward_2cta, config, examples, launch, pair_memory
from jfa.kernels.common.padded_rows import padded_rows, row_constants
from jfa.kernels.common.ragged import empty_tma_ready
from jfa.layout import offsets_from_lengths

torch.manual_seed(0)
PAIR = dict(ctas_per_cga=(2, 1, 1))  # a launch option: programs 2 i and 2 i + 1 are a pair

# %% [markdown]
# ## The mental model: one product on two SMs
#
# A *cluster* is a group of CTAs that the hardware starts together, on neighboring SMs.
# In a cluster of two the tensor cores of both SMs can work on *one* product C = A B.
#
# * Each SM holds its own rows of A and computes the same rows of C: no other SM reads them.
# * B is split: each SM holds half of its columns, and the tensor cores of both SMs read both halves.
#
# This is the gain: **each SM holds and reads half of B.**
# This is the cost: a product can start only when *both* CTAs are ready, and both must learn that it is done.
#
# Each CTA still has its own program counter, its own shared memory, tensor memory and barriers, and may be ahead of or behind the other.
# Four operations cross from one CTA to the other:
#
# | what | in TLX |
# |---|---|
# | a product of the pair, issued by the CTA of even rank, the *leader* | `async_dot(..., two_ctas=True)` |
# | its completion, which arrives in both CTAs | `mBarriers=` of such a product, `tcgen05_commit(bar, two_ctas=True)` |
# | a copy whose bytes count on the leader's barrier | `async_descriptor_load(..., two_ctas=True)` |
# | arrivals at, and writes to, the other CTA's shared memory | `barrier_arrive(bar, 1, remote_cta_rank=r)`, `async_remote_shmem_copy`, `async_remote_shmem_store` |
#
# Waiting does not: **a CTA cannot wait on a barrier of the other CTA.**
# It waits on its own barriers only, but it may arrive on those of both.

# %%
memories = {
    "SM 0: the leader": ((0.0, 0.0, 4.3, 3.9), "", 5),
    "SM 1: the peer": ((6.5, 0.0, 4.3, 3.9), "", 5),
    "A, rows 0-127": ((0.2, 2.15, 1.9, 1.1), "shared memory", 0),
    "B, columns 0-63": ((2.2, 2.15, 1.9, 1.1), "shared memory", 2),
    "C, rows 0-127": ((0.2, 0.35, 3.9, 1.1), "tensor memory,\nall 128 columns", 1),
    "A, rows 128-255": ((6.7, 2.15, 1.9, 1.1), "shared memory", 0),
    "B, columns 64-127": ((8.7, 2.15, 1.9, 1.1), "shared memory", 2),
    "C, rows 128-255": ((6.7, 0.35, 3.9, 1.1), "tensor memory,\nall 128 columns", 1),
}
shares = [("SM 0: the leader", "SM 1: the peer")]
plots.blocks(memories, shares, title="C = A B by a pair: only B is read by both")

# %% [markdown]
# ## The math, down to bytes
#
# `C = A B` with `M` rows per CTA, in bf16.
# Per slice of `K` columns of A, **per CTA**:
#
# | | one CTA | a CTA of a pair |
# |---|---|---|
# | A to shared memory, and read from there | $2 M K$ bytes | $2 M K$ |
# | B to shared memory, and read from there | $2 K N$ | $K N$ |
# | FLOPs | $2 M N K$ | $2 M N K$ |
# | columns of tensor memory for C | $N$ | $N$; but $N / 2$ if $M = 64$ |
#
# Look at the last cell.
# With 128 rows per CTA each row has a lane of tensor memory.
# With 64 rows per CTA a single CTA leaves lanes empty; a pair's accumulator does not: it *folds*, and the second half of its columns is in the other 64 lanes.
# So a result of [64, 128] takes 64 columns.
# Because of that the fifth result of chapter 14, dQ, will fit.
#
# How much does a pair save?
# The tensor core takes `2 M N K / 8192` cycles, shared memory delivers 128 bytes per cycle.
# At `M = N = 128` a single CTA reads as long as it multiplies, and its shared memory also receives what the TMA writes.


# %%
def per_slice(n, k=64, m=128):
    """Return (tensor cycles, read cycles of one CTA, of a CTA of a pair) of a modelled slice."""
    one = B200.demand("mma", m=m, n=n, k=k).needs
    pair = B200.demand("mma", m=2 * m, n=n, k=k, two_cta=True).needs
    assert one["tensor"] == pair["tensor"]
    return one["tensor"], one["smem"], pair["smem"]


widths = (64, 128, 256)
cycles = [per_slice(n) for n in widths]
plots.bars(
    [f"N = {n}" for n in widths],
    {
        name: [c[i] for c in cycles]
        for i, name in enumerate(("tensor core", "shared memory, one CTA", "shared memory, a pair"))
    },
    title="one slice, K = 64 (modelled)",
    xlabel="",
    ylabel="cycles per SM",
    form="{:.0f}",
)

# %% [markdown]
# ## Version 1: one CTA
#
# The GEMM of chapter 11, version 2: a load role, an mma role, and a ring between them.
# Two programs make two tiles of 128 x 256, and both load all of B.


# %%
@triton.jit
def place(turn, STAGES: tl.constexpr):
    """Return (slot, phase) of a turn of a ring."""
    return turn % STAGES, (turn // STAGES) & 1


@triton.jit
def leave(c_ptr, acc, done, row):
    """Store a finished tile, by plain stores: this chapter is not about the epilogue."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    tlx.barrier_wait(done, 0)
    at = (row + tl.arange(0, BM))[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(c_ptr + at, tlx.local_load(acc))


@triton.jit
def one_cta(a_desc, b_desc, c_ptr, steps, STAGES: tl.constexpr):
    """Compute C = A B, BM rows per program."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    row = tl.program_id(0) * BM
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            leave(c_ptr, acc[0], done[0], row)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            for k in range(steps):
                slot, phase = place(k, STAGES)
                free = empties[slot]
                tlx.barrier_wait(fulls[slot], phase)
                tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=[free])
            tlx.tcgen05_commit(done[0])
        with tlx.async_task(num_warps=1, registers=24):  # load
            for k in range(steps):
                slot, phase = place(k, STAGES)
                tlx.barrier_wait(empties[slot], phase ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], 2 * (BM + BN) * BK)
                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], fulls[slot])
                tlx.async_descriptor_load(b_desc, b[slot], [k * BK, 0], fulls[slot])


def multiply(kernel, a, b, columns, stages=4, bk=64, **options):
    """Compute C = A B by a kernel of this chapter; boxes of B have `columns` columns."""
    c = torch.full((len(a), b.shape[1]), float("nan"))
    boxes = [
        TensorDescriptor.from_tensor(a, [128, bk]),
        TensorDescriptor.from_tensor(b, [bk, columns]),
    ]
    kernel[(-(-len(a) // 128),)](*boxes, c, a.shape[1] // bk, STAGES=stages, **options)
    return c


def timed(launch, *args, **kwargs):
    """Return the timeline of a launch, modelled with the rates of a B200."""
    with emulator.options(policy="timed", rates=B200, trace=True):
        launch(*args, **kwargs)
    return Timeline.of(emulator.last())


A, B = torch.randn(256, 1024).bfloat16(), torch.randn(1024, 256).bfloat16()
print("largest error:", (multiply(one_cta, A, B, 256) - A.double() @ B.double()).abs().max().item())

# %% [markdown]
# ## Version 2: a pair
#
# Compare it with version 1.
# Five places are different; each has a numbered comment.
# Before you read on: which of the two CTAs must wait for what, and where?


# %%
@triton.jit
def pair(a_desc, b_desc, c_ptr, steps, STAGES: tl.constexpr):
    """Compute C = A B, 2 x BM rows per pair. The boxes of B have half of the columns."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    HALF: tl.constexpr = b_desc.block_shape[1]  # 1. each CTA holds half of B
    rank = tlx.cluster_cta_rank()
    row = tl.program_id(0) * BM
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, HALF), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((BM, 2 * HALF), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            leave(c_ptr, acc[0], done[0], row)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            if rank == 0:  # 2. the leader issues for both
                for k in range(steps):
                    slot, phase = place(k, STAGES)
                    free = [empties[slot]]
                    tlx.barrier_wait(fulls[slot], phase)
                    # 3. it completes in both CTAs: the `empties` of each gets an arrival
                    tlx.async_dot(
                        a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=free, two_ctas=True
                    )
                tlx.tcgen05_commit(done[0], two_ctas=True)
        with tlx.async_task(num_warps=1, registers=24):  # load
            for k in range(steps):
                slot, phase = place(k, STAGES)
                full = fulls[slot]
                tlx.barrier_wait(empties[slot], phase ^ 1)
                # 4. the leader announces the bytes of both CTAs, once
                tlx.barrier_expect_bytes(full, 2 * 2 * (BM + HALF) * BK, pred=rank == 0)
                # 5. both CTAs' copies count on the leader's barrier
                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)
                tlx.async_descriptor_load(
                    b_desc, b[slot], [k * BK, rank * HALF], full, two_ctas=True
                )


for policy in ("eager", "lazy", "random"):
    with emulator.options(policy=policy, seed=1):
        error = (multiply(pair, A, B, 128, **PAIR) - A.double() @ B.double()).abs().max()
    print(f"{policy:7} largest error: {error:.1e}")

# %% [markdown]
# Follow one slice.
# Each load role waits for `empties` of *its own CTA*, so the two may start their copies at different times.
# The bytes of all four copies count on one barrier, the leader's `fulls[slot]`.
# When they are complete, only the leader can see it.
# That is enough, because only the leader issues products.
# The product reads the shared memory of both CTAs, and when it is done it arrives at `empties[slot]` *in both*.
#
# May the peer's copy come before the leader has announced any bytes?
# Yes.
# Then the count of bytes is below zero for a while, and the phase cannot end, because the announcement is the one arrival that it needs.
# May the peer be a whole phase ahead?
# No: it waits for `empties`, and the product that arrives there is issued after the leader's own wait.

# %%
lines = {
    "one CTA": timed(multiply, one_cta, A, B, 256),
    "pair": timed(multiply, pair, A, B, 128, **PAIR),
}
middle = (3_000, 8_000)  # modelled cycles: the ring is full, the epilogue has not begun
plots.panels(
    list(lines),
    {
        "modelled cycles": ([line.cycles for line in lines.values()], "{:,.0f}"),
        "tensor core busy": (
            [100 * line.busy("tensor", middle) for line in lines.values()],
            "{:.0f} %",
        ),
        "shared memory busy": (
            [100 * line.busy("smem", middle) for line in lines.values()],
            "{:.0f} %",
        ),
    },
    title="256 x 256 x 1024 on two SMs; busy: in the middle of the run (modelled)",
)

# %%
plots.timelines(
    {f"pair, {w}": (lines["pair"], (cta, 0, 0)) for cta, w in ((0, "leader"), (1, "peer"))}
)

# %% [markdown]
# In this picture the peer's mma role issues nothing, and still its tensor core works.
#
# ## The five products of the backward on two SMs
#
# Now the backward of chapter 14: 128 queries at a time against **2 x 128 keys**, D = 128.
# Keys are rows in the transposed products, so each CTA owns 128 keys.
#
# | product | A: own rows | B: half per CTA | result per CTA |
# |---|---|---|---|
# | $S^T = K Q^T$ | K [128, 128] | Q, 64 *rows* | [128, 128] |
# | $dP^T = V\, dO^T$ | V [128, 128] | dO, 64 *rows* | [128, 128] |
# | $dV \mathrel{+}= P^T dO$ | $P^T$, tensor memory | dO, 64 *columns* | [128, 128] |
# | $dK \mathrel{+}= dS^T Q$ | $dS^T$, tensor memory | Q, 64 *columns* | [128, 128] |
# | $dQ = dS\, K$ | dS, 64 queries of its own x **all 256 keys** | K of all 256 keys, 64 *columns* | [64, 128], folded: 64 columns |
#
# Half of B means half of its *columns*.
# For $Q^T$ these are 64 queries, so rows of Q; for Q in the fourth product they are 64 columns.
# So Q and dO are loaded twice, once cut along the rows and once along the columns: two boxes of 16 KiB, together as much as one whole tile.
#
# In the first four products each CTA has its own rows of A.
# In the fifth the rows are queries.
# Each CTA has made dS of *its keys* and needs dS of *its queries*, for the other CTA's keys too.
# So the two CTAs must exchange parts of dS, and nothing else.

# %%
exchange = {
    "SM 0: keys 0-127": ((0.0, 0.0, 4.5, 4.3), "", 5),
    "SM 1: keys 128-255": ((6.7, 0.0, 4.5, 4.3), "", 5),
    "keys 0-127, queries 0-63": ((0.2, 2.6, 4.1, 1.0), "made here, stays", 0),
    "keys 0-127, queries 64-127": ((0.2, 1.4, 4.1, 1.0), "made here, needed there", 2),
    "dQ, queries 0-63": ((0.2, 0.2, 4.1, 1.0), "from all 256 keys", 1),
    "keys 128-255, queries 64-127": ((6.9, 2.6, 4.1, 1.0), "made here, stays", 0),
    "dQ, queries 64-127": ((6.9, 1.4, 4.1, 1.0), "from all 256 keys", 1),
    "keys 128-255, queries 0-63": ((6.9, 0.2, 4.1, 1.0), "made here, needed there", 2),
}
arrows = [
    ("keys 0-127, queries 64-127", "dQ, queries 64-127", "->"),
    ("keys 128-255, queries 0-63", "dQ, queries 0-63", "->"),
]
plots.blocks(exchange, arrows, title="dS of a pair: half of it goes to the other CTA")

# %% [markdown]
# ### What it saves
#
# Bytes that a CTA's products read from shared memory per block of 128 queries, in KiB: A's part is the same, B's is half.

# %%
KIB = 1024


def reads(m, n, k, in_tmem=False, halves=1):
    """Return the KiB that one CTA's share of a product reads from shared memory, bf16."""
    return (0 if in_tmem else 2 * m * k / KIB) + 2 * n * k / halves / KIB


one = {
    "S": reads(128, 128, 128),
    "dP": reads(128, 128, 128),
    "dV": reads(128, 128, 128, in_tmem=True),
    "dK": reads(128, 128, 128, in_tmem=True),
    "dQ": reads(128, 128, 128),
}
two = {
    "S": reads(128, 128, 128, halves=2),
    "dP": reads(128, 128, 128, halves=2),
    "dV": reads(128, 128, 128, in_tmem=True, halves=2),
    "dK": reads(128, 128, 128, in_tmem=True, halves=2),
    "dQ": reads(64, 128, 256, halves=2),
}
plots.bars(
    list(one),
    {
        "one CTA, 128 keys": list(one.values()),
        "a CTA of a pair, 128 of 256 keys": list(two.values()),
    },
    title="shared memory that the products of one block read",
    xlabel="",
    ylabel="KiB per CTA",
    form="{:.0f}",
)

# %% [markdown]
# The product of dQ saves nothing: half of B, but over twice as many keys.
# dQ gains in another way.
# A pair's dQ of a block is [128, 128] *for 256 keys*: each CTA sends 64 rows to memory, half as much as before, and adds half as often to each address.
#
# Not only products use shared memory.
# This table counts all uses, in cycles of 128 bytes:

# %%
rows = {}
for name, products, ds, dq in (
    ("one CTA", sum(one.values()), 32, 64 + 64),
    ("pair, dS through a copy (form A)", sum(two.values()), 16 + 16 + 16 + 16, 32 + 32),
    ("pair, dS as words (form B)", sum(two.values()), 16 + 16, 32 + 32),
):
    parts = [int(x * KIB / 128) for x in (products, ds, dq)]
    rows[name] = [*parts, sum(parts)]
tensor = 5 * 2 * 128**3 // 8192
header = ("", "products", "dS", "dQ's stages", "together")
print(plots.table(header, [(name, *r) for name, r in rows.items()]))
print(f"the tensor core's cycles for the five products: {tensor}")

# %% [markdown]
# The column dS: a single CTA writes dS once.
# In a pair, half of dS goes to the other CTA: form A writes it, reads it, and writes it again in the other CTA's memory; form B only writes it there.
# The column of dQ's stages: fp32, written by threads and read by the TMA.
#
# The loads of Q and dO are not in the table, 512 cycles in each line.
# (Chapter 14's kernel reads dS for dK from shared memory as well: 256 cycles more than the first line.)
#
# The FlashAttention-4 paper has 3,328 cycles for one CTA, as here, and **2,688** for a pair.
# Its pair differs from ours in the last column: it counts a whole dQ tile of 64 KiB per CTA (1,024 cycles), a product for it of 48 KiB, and no exchange.
# In all three counts one thing is the same: *for a single CTA shared memory is the limit, with 3,328 against 2,560 cycles; for a pair it no longer is, or hardly.*
#
# ### The memory budget
#
# Shared memory per CTA at D = 128: K 32, V 32, rows of Q 16 and of dO 16, columns of Q 16 and of dO 16, columns of K for dQ 32, dS 32 KiB: 192 of 227.
# Stages for dQ, lse and delta, and for form A a staging tile of 16 KiB must fit into the rest.
#
# Tensor memory: S, dP, dV and dK take 128 columns each, as before.
# P^T is bf16 and takes the lower half of S's columns.
# The folded dQ takes the **upper half**; in chapter 14 it had to share dP's columns.
# Version 6 has a map.
#
# Two groups of four warps read S, each half of it (chapter 11, eight warps).
# **Before P or dQ is written into these columns, both groups must have read S.**
# A public kernel lacked that synchronization, and was wrong in 13 % of its runs on a B200 (chapter 11).
#
# ## Version 3: S, dP, dV, dK of a pair
#
# One role per CTA does all steps one after the other, as version 1 of chapter 14 does; there is no dQ yet.
# Operands that *threads* make need a second kind of signal: both CTAs' P must be in tensor memory before the leader may issue.
# So `p_full` counts **two arrivals**, one from each CTA, and both CTAs arrive on the leader's `p_full`.
# Only the leader waits where `pred=leads`; in the peer `async_dot(two_ctas=True)` issues nothing.


# %%
@triton.jit
def pair_dkv(
    k_desc, v_desc, q_rows, do_rows, q_columns, do_columns, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    blocks, scale_log2, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dK / scale and dV of 2 x BN keys from blocks of BM queries; lse in base 2."""
    rank = tlx.cluster_cta_rank()
    leads = rank == 0
    k = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    v = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    q = tlx.local_alloc((BM // 2, D), tl.bfloat16, 1)
    do = tlx.local_alloc((BM // 2, D), tl.bfloat16, 1)
    q_half = tlx.local_alloc((BM, D // 2), tl.bfloat16, 1)
    do_half = tlx.local_alloc((BM, D // 2), tl.bfloat16, 1)
    s = tlx.local_alloc((BN, BM), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((BN, BM), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((BN, BM), tl.float32, 1, tlx.storage_kind.tmem)
    ds = tlx.local_alloc((BN, BM), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=dp)
    dv = tlx.local_alloc((BN, D), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BN, D), tl.float32, 1, tlx.storage_kind.tmem)
    kv_full = tlx.alloc_barriers(1)
    q_full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    dp_full = tlx.alloc_barriers(1)
    p_full = tlx.alloc_barriers(1, arrive_count=2)
    ds_full = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)

    key = tl.program_id(0) * BN
    tlx.barrier_expect_bytes(kv_full[0], 2 * 4 * BN * D, pred=leads)
    tlx.async_descriptor_load(k_desc, k[0], [key, 0], kv_full[0], two_ctas=True)
    tlx.async_descriptor_load(v_desc, v[0], [key, 0], kv_full[0], two_ctas=True)
    tlx.barrier_wait(kv_full[0], 0, pred=leads)
    for j in range(blocks):
        row, mine, column = j * BM, j * BM + rank * (BM // 2), rank * (D // 2)
        full = q_full[0]
        tlx.barrier_expect_bytes(full, 2 * 4 * BM * D, pred=leads)
        tlx.async_descriptor_load(q_rows, q[0], [mine, 0], full, two_ctas=True)
        tlx.async_descriptor_load(do_rows, do[0], [mine, 0], full, two_ctas=True)
        tlx.async_descriptor_load(q_columns, q_half[0], [row, column], full, two_ctas=True)
        tlx.async_descriptor_load(do_columns, do_half[0], [row, column], full, two_ctas=True)
        tlx.barrier_wait(full, j & 1, pred=leads)
        q_t, do_t, s_bar, dp_bar = (
            tlx.local_trans(q[0]),
            tlx.local_trans(do[0]),
            s_full[0],
            dp_full[0],
        )
        tlx.async_dot(k[0], q_t, s[0], use_acc=False, mBarriers=[s_bar], two_ctas=True)
        tlx.async_dot(v[0], do_t, dp[0], use_acc=False, mBarriers=[dp_bar], two_ctas=True)

        tlx.barrier_wait(s_full[0], j & 1)  # in both CTAs
        rows = row + tl.arange(0, BM)
        p_t = tl.math.exp2(tlx.local_load(s[0]) * scale_log2 - tl.load(lse_ptr + rows)[None, :])
        tlx.local_store(p[0], p_t.to(tl.bfloat16))
        tlx.barrier_arrive(p_full[0], 1, remote_cta_rank=0)  # "P of this CTA is there"
        tlx.barrier_wait(p_full[0], j & 1, pred=leads)
        tlx.async_dot(p[0], do_half[0], dv[0], use_acc=j > 0, force_async=True, two_ctas=True)

        tlx.barrier_wait(dp_full[0], j & 1)
        ds_t = p_t * (tlx.local_load(dp[0]) - tl.load(delta_ptr + rows)[None, :])
        tlx.local_store(ds[0], ds_t.to(tl.bfloat16))
        tlx.barrier_arrive(ds_full[0], 1, remote_cta_rank=0)
        tlx.barrier_wait(ds_full[0], j & 1, pred=leads)
        tlx.async_dot(ds[0], q_half[0], dk[0], use_acc=j > 0, mBarriers=[done[0]], two_ctas=True)
        tlx.barrier_wait(done[0], j & 1)  # in both CTAs: Q and dO may be replaced
    at = (key + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, tlx.local_load(dk[0]))
    tl.store(dv_ptr + at, tlx.local_load(dv[0]))


D, BM, BN = 128, 128, 128


def inputs(len_q, len_kv):
    """Return q, k, v, dout bf16, lse (base 2), delta fp32; and (dq, dk, dv) fp64 by autograd."""
    q, k, v, do = (torch.randn(n, D).bfloat16() for n in (len_q, len_kv, len_kv, len_q))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T / math.sqrt(D)
    out = scores.softmax(1) @ leaves[2]
    want = torch.autograd.grad(out, leaves, do.double())
    lse = (scores.logsumexp(1) / math.log(2)).detach().float()
    return (q, k, v, do, lse, (out * do.double()).sum(1).detach().float()), want


def run_dkv(q, k, v, do, lse, delta):
    """Return (dk, dv) in fp32."""
    dk, dv = (torch.full((len(k), D), float("nan")) for _ in range(2))
    whole, rows, columns = [BN, D], [BM // 2, D], [BM, D // 2]
    given = ((k, whole), (v, whole), (q, rows), (do, rows), (q, columns), (do, columns))
    boxes = [TensorDescriptor.from_tensor(t, box) for t, box in given]
    scale = D**-0.5
    pair_dkv[(len(k) // BN,)](
        *boxes, dk, dv, lse, delta, len(q) // BM, scale / math.log(2), D=D, BM=BM, BN=BN, **PAIR
    )
    return dk * scale, dv


given, want = inputs(384, 512)
for policy in ("lazy", "random"):
    with emulator.options(policy=policy, seed=1):
        found = run_dkv(*given)
    errors = [float((a - b).abs().max()) for a, b in zip(found, want[1:])]
    print(f"{policy:7} largest error of dK, dV:", *(f"{e:.4f}" for e in errors))

# %% [markdown]
# This run had two pairs, four tiles of 128 keys, and no exchange.
#
# ## Version 4: the exchange, by copies (form A)
#
# This version computes the fifth product alone: dS^T is given in memory, and a load replaces the softmax that would have made it.
# Each CTA has a tile `ds` of [256 keys, 64 queries], and sees it as two `parts` of 128 keys.
# **`parts[r]` holds what CTA r has made, in both CTAs.**
# So a CTA writes the half that it needs itself into its own `parts[rank]`, and the other half into `parts[rank]` of the *other CTA*.
# Each line below names a role and what it does per block:
#
# ```
# compute     wait ds_empties      the product before has read both CTAs' tiles
#             own half   -> parts[rank]
#             other half -> staging
#             fence                the TMA and the tensor core will read what threads wrote
#             copy staging -> the peer's parts[rank]; the bytes count on the PEER's `come`
#             arrive at the leader's ds_fulls
# relay       expect and wait for its own CTA's `come`; fence; arrive at the leader's ds_fulls
# mma         the leader: wait for four arrivals, multiply, complete in both CTAs
# reduce      read dQ from tensor memory; arrive at the leader's dq_empties
# ```
#
# Why a relay?
# The bytes can only be counted by a barrier of the CTA that receives them, and the leader must learn that they are there.
# The leader cannot wait on the peer's barrier, so a role of the receiving CTA waits and then arrives on a barrier of the leader.
# A separate warp does that, so no softmax group has to wait.


# %%
@triton.jit
def made(ds_ptr, key, query, queries, BN: tl.constexpr, HALF: tl.constexpr):
    """Load dS^T of BN keys and HALF queries from memory, in place of the softmax."""
    at = (key + tl.arange(0, BN))[:, None] * queries + (query + tl.arange(0, HALF))[None, :]
    return tl.load(ds_ptr + at)


@triton.jit
def send_copies(ds_ptr, parts, staging, come, ds_fulls, ds_empties, blocks, rank):
    """Store one half of dS here, and copy the other to the peer (role compute)."""
    BN: tl.constexpr = parts.shape[0]
    HALF: tl.constexpr = parts.shape[1]
    queries, key, peer = blocks * 2 * HALF, rank * BN, 1 - rank
    for j in range(blocks):
        tlx.barrier_wait(ds_empties[0], (j & 1) ^ 1)
        mine = made(ds_ptr, key, (2 * j + rank) * HALF, queries, BN, HALF)
        tlx.local_store(parts[rank], mine)
        other = made(ds_ptr, key, (2 * j + peer) * HALF, queries, BN, HALF)
        tlx.local_store(staging[0], other)
        tlx.fence("async_shared")
        tlx.async_remote_shmem_copy(parts[rank], staging[0], peer, come[0])
        tlx.barrier_arrive(ds_fulls[0], 1, remote_cta_rank=0)


@triton.jit
def relay(come, ds_fulls, blocks, BYTES: tl.constexpr):
    """Wait here for what the peer sends, and arrive at the leader's ds_fulls."""
    for j in range(blocks):
        tlx.barrier_expect_bytes(come[0], BYTES)
        tlx.barrier_wait(come[0], j & 1)
        tlx.fence("async_shared")  # for form B: what came may have been written by threads
        tlx.barrier_arrive(ds_fulls[0], 1, remote_cta_rank=0)


@triton.jit
def multiply_dq(ds, keys, dq, ds_fulls, ds_empties, dq_fulls, dq_empties, blocks):
    """Issue dQ of each block, for both CTAs (role mma of the leader)."""
    ds_rows, after = tlx.local_trans(ds), [dq_fulls[0], ds_empties[0]]
    for j in range(blocks):
        tlx.barrier_wait(ds_fulls[0], j & 1)
        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)
        tlx.async_dot(ds_rows, keys, dq, use_acc=False, mBarriers=after, two_ctas=True)


@triton.jit
def store_dq(dq_ptr, dq, dq_fulls, dq_empties, blocks, rank):
    """Store 64 rows of each block's dQ, here by plain stores (role reduce)."""
    HALF: tl.constexpr = dq.shape[0]
    D: tl.constexpr = dq.shape[1]
    for j in range(blocks):
        tlx.barrier_wait(dq_fulls[0], j & 1)
        values = tlx.local_load(dq)
        tlx.barrier_arrive(dq_empties[0], 1, remote_cta_rank=0)
        rows = (2 * j + rank) * HALF + tl.arange(0, HALF)
        tl.store(dq_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], values)


@triton.jit
def exchange_copies(
    ds_ptr, k_desc, dq_ptr, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute dQ = dS K of 2 x BN keys by one pair. ds_ptr: dS^T [2 BN, blocks * BM]."""
    rank = tlx.cluster_cta_rank()
    HALF: tl.constexpr = BM // 2
    keys = tlx.local_alloc((2 * BN, D // 2), tl.bfloat16, 1)
    ds = tlx.local_alloc((2 * BN, HALF), tl.bfloat16, 1)
    parts = tlx.local_alloc((BN, HALF), tl.bfloat16, 2, reuse=ds)
    staging = tlx.local_alloc((BN, HALF), tl.bfloat16, 1)
    dq = tlx.local_alloc((HALF, D), tl.float32, 1, tlx.storage_kind.tmem)
    k_full = tlx.alloc_barriers(1)
    come = tlx.alloc_barriers(1)
    ds_fulls = tlx.alloc_barriers(1, arrive_count=4)  # two CTAs, compute and relay of each
    ds_empties = tlx.alloc_barriers(1)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # compute
            send_copies(ds_ptr, parts, staging, come, ds_fulls, ds_empties, blocks, rank)
        with tlx.async_task(num_warps=4, registers=152):  # reduce
            store_dq(dq_ptr, dq[0], dq_fulls, dq_empties, blocks, rank)
        with tlx.async_task(num_warps=1, registers=24):  # relay
            relay(come, ds_fulls, blocks, 2 * BN * HALF)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            tlx.barrier_expect_bytes(k_full[0], 4 * BN * D, pred=rank == 0)
            tlx.async_descriptor_load(k_desc, keys[0], [0, rank * D // 2], k_full[0], two_ctas=True)
            if rank == 0:
                tlx.barrier_wait(k_full[0], 0)
                multiply_dq(
                    ds[0], keys[0], dq[0], ds_fulls, ds_empties, dq_fulls, dq_empties, blocks
                )


def run_exchange(kernel, ds_t, k):
    """Return dQ [queries, D] fp32 of dS^T [256, queries] and K [256, D]."""
    dq = torch.full((ds_t.shape[1], D), float("nan"))
    box = TensorDescriptor.from_tensor(k, [2 * BN, D // 2])
    kernel[(2,)](ds_t, box, dq, ds_t.shape[1] // BM, D=D, BM=BM, BN=BN, **PAIR)
    return dq


def largest_errors(kernel):
    """Print the largest error of dQ under three schedules, with fences checked strictly."""
    for policy in ("eager", "lazy", "random"):
        with emulator.options(policy=policy, seed=2, fences="strict"):
            error = (run_exchange(kernel, DS, K) - DS.double().T @ K.double()).abs().max()
        print(f"{policy:7} largest error: {error:.1e}")


DS, K = torch.randn(256, 4 * BM).bfloat16(), torch.randn(256, D).bfloat16()
largest_errors(exchange_copies)

# %% [markdown]
# Four questions about this code, and their answers:
#
# * *Which barrier protects the peer's tile from being overwritten while the tensor core reads it?* `ds_empties`, and the sender waits for its own: the product completes in both CTAs at once, so one wait covers both tiles.
# * *Which barrier protects `staging`?* The same one. The product can only have been issued after the peer's relay had arrived, and that is after the copy has read `staging`.
# * *Why four arrivals?* One per CTA for the half that it keeps, and one per CTA for the half that it has received. Two would do, those of the relays: what a relay has received was sent behind the sender's own store and fence. But then that proof would have to be written next to the code; with four arrivals the reader needs no proof.
# * *Which rows of dQ does a CTA store?* 64 of 128, and no row belongs to both. If both stored 128 rows, each would be added twice.
#
# ## Version 5: the exchange, by words (form B)
#
# The half of dS that goes to the peer is in registers.
# Why store it to `staging` and copy it from there?
# `async_remote_shmem_store` writes from registers into the peer's shared memory; its bytes count on the peer's barrier as before.
# That needs no staging tile, and causes less traffic (the table above).
#
# The instruction that it compiles to (`st.async`) handles 32- and 64-bit words only, and dS has 16 bits.
# So two neighboring numbers are packed into one word, and a second buffer gives the peer's tile as words.


# %%
@triton.jit
def two_per_word(x):
    """Pack [R, C] of 16 bits into [R, C / 2] int32: word i has columns 2 i (low), 2 i + 1."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (R, C // 2, 2)))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def send_words(ds_ptr, parts, words, come, ds_fulls, ds_empties, blocks, rank):
    """Store one half of dS here, and the other from registers to the peer (role compute)."""
    BN: tl.constexpr = parts.shape[0]
    HALF: tl.constexpr = parts.shape[1]
    queries, key, peer = blocks * 2 * HALF, rank * BN, 1 - rank
    for j in range(blocks):
        tlx.barrier_wait(ds_empties[0], (j & 1) ^ 1)
        other = made(ds_ptr, key, (2 * j + peer) * HALF, queries, BN, HALF)
        tlx.async_remote_shmem_store(words[rank], two_per_word(other), peer, come[0])
        mine = made(ds_ptr, key, (2 * j + rank) * HALF, queries, BN, HALF)
        tlx.local_store(parts[rank], mine)
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_fulls[0], 1, remote_cta_rank=0)


@triton.jit
def exchange_words(
    ds_ptr, k_desc, dq_ptr, blocks, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute dQ = dS K of 2 x BN keys by one pair. ds_ptr: dS^T [2 BN, blocks * BM]."""
    rank = tlx.cluster_cta_rank()
    HALF: tl.constexpr = BM // 2
    keys = tlx.local_alloc((2 * BN, D // 2), tl.bfloat16, 1)
    words = tlx.local_alloc((BN, HALF // 2), tl.int32, 2)
    parts = tlx.local_alloc((BN, HALF), tl.bfloat16, 2, reuse=words)
    ds = tlx.local_alloc((2 * BN, HALF), tl.bfloat16, 1, reuse=words)
    dq = tlx.local_alloc((HALF, D), tl.float32, 1, tlx.storage_kind.tmem)
    k_full = tlx.alloc_barriers(1)
    come = tlx.alloc_barriers(1)
    ds_fulls = tlx.alloc_barriers(1, arrive_count=4)
    ds_empties = tlx.alloc_barriers(1)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # compute
            send_words(ds_ptr, parts, words, come, ds_fulls, ds_empties, blocks, rank)
        with tlx.async_task(num_warps=4, registers=152):  # reduce
            store_dq(dq_ptr, dq[0], dq_fulls, dq_empties, blocks, rank)
        with tlx.async_task(num_warps=1, registers=24):  # relay
            relay(come, ds_fulls, blocks, 2 * BN * HALF)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            tlx.barrier_expect_bytes(k_full[0], 4 * BN * D, pred=rank == 0)
            tlx.async_descriptor_load(k_desc, keys[0], [0, rank * D // 2], k_full[0], two_ctas=True)
            if rank == 0:
                tlx.barrier_wait(k_full[0], 0)
                multiply_dq(
                    ds[0], keys[0], dq[0], ds_fulls, ds_empties, dq_fulls, dq_empties, blocks
                )


largest_errors(exchange_words)

# %% [markdown]
# ### Is each synchronization needed?
#
# Break each of them in turn, on three blocks (chapter 11, version 5).
# Predict: which one does form A not need?


# %%
def three_blocks(kernel):
    """Return a launch of a kernel whose inputs are the same each time."""

    def launch():
        torch.manual_seed(3)
        ds_t, k = torch.randn(256, 3 * BM).bfloat16(), torch.randn(256, D).bfloat16()
        return [run_exchange(kernel, ds_t, k)]

    return launch


swept = {kernel: sweep.sweep(three_blocks(kernel)) for kernel in (exchange_copies, exchange_words)}
for kernel, result in swept.items():
    print(f"{kernel.fn.__name__}: {len(result.mutants)} broken kernels, not found:")
    print(*(f"    {m.how:6} {m.site.text}" for m in result.clean), sep="\n")
plots.sweep_map(swept[exchange_copies], title="form A, three blocks")

# %% [markdown]
# In form A the relay's fence protects nothing: the copy engine wrote the received half, and the tensor core reads through the same proxy.
# In form B threads *of another CTA* wrote it, and the receiver must fence.
#
# Two details of the second kernel:
#
# * `parts` and `words` are *two buffers*, and `parts[rank]` is an index. A run-time index compiles; a `local_slice` at a run-time offset does not.
# * The words are allocated first, and the bf16 buffers reuse them. In the opposite order the compiler (fbtriton 3.7.4) refuses to place the wider type over the narrower one.
#
# Which form is better?
# The package uses form A: *one* instruction per block and CTA, where words are 4,096 stores, each of which updates a barrier of the other CTA.
# Its price is 16 KiB of staging.
# We have not measured which of the two is faster on a GPU.
#
# The compiler's report on both forms, for sm_100:

# %%
types = dict(ds_ptr="*bf16", k_desc="tensordesc<bf16[256, 64]>", dq_ptr="*fp32", blocks="i32")
table = []
for kernel in (exchange_copies, exchange_words):
    r = compile_kernel(kernel, types, dict(D=D, BM=BM, BN=BN), arch=100, options=PAIR)
    counts = [r.counts[name] for name in ("dsmem.copy", "dsmem.store", "barrier.cluster")]
    table.append((r.name, r.smem, r.tmem, *counts))
header = ("", "SMEM, B", "TMEM columns", "copies", "st.async", "cluster barriers")
print(plots.table(header, table))

# %% [markdown]
# dQ of [64, 128] takes 64 columns, because it folds.
# 32 `st.async` per thread are 128 x 32 words over 128 threads.
# The compiler has inserted the cluster barriers; more about them under "Pitfalls".
#
# Here is the timeline of a pair in form A.
# A short arrow in magenta ends a wait from the other CTA: a `relay` waits for its peer's `compute`, and the leader's product waits for both.

# %%
line = timed(run_exchange, exchange_copies, DS, K)
plots.timelines({"leader": (line, (0, 0, 0)), "peer": (line, (1, 0, 0))})

# %% [markdown]
# ## Version 6: the backward
#
# The package's kernel is [backward_2cta.py](../jfa/kernels/blackwell/backward_2cta.py), with the pair's helpers in [pair.py](../jfa/kernels/blackwell/pair.py).
# You know its parts by now.
# Read the text at its top first, then the table of barriers in [pair_memory.py](../jfa/kernels/blackwell/pair_memory.py): each line says *which CTA's* barrier it is.
#
# Three choices differ from our versions 3 and 4:
#
# * **A tile is 256 keys**, one entry of the list for the whole pair. So there is no list with an odd number of tiles to pad with a sentinel (chapter 08): where a sequence ends in the first half, the second CTA's keys are past the end, load as zeros, are masked, and are never stored. Both CTAs always take the same number of steps.
# * **The peer's mma warp is the relay.** It has nothing to issue anyway.
# * **dS is written twice**: into dP's columns of tensor memory, as A of dK (which does not wait for the exchange), and into shared memory, for dQ. During the exchange the tensor core computes dK.

# %%
barriers = inspect.getsource(pair_memory)
print(barriers[barriers.index("# Who arrives at") : barriers.index("@aggregate")])
source = inspect.getsource(backward_2cta)
print(
    source[source.index("# Issue order of a step") : source.index("@triton.jit\ndef multiply_tile")]
)
print(inspect.getsource(backward_2cta.give_ds.fn))

# %% [markdown]
# `give_ds` is version 4 in eight lines: a group makes dS of 64 queries.
# The group whose queries belong to this CTA keeps its half, the other group sends.
#
# The same work by both forms, on two SMs: 256 keys against 1,024 queries.


# %%
def package(form, queries=1024, keys=256):
    """Run the package's backward on one tile of 256 keys, by one pair or by two single CTAs."""
    problem, q, k, v, dout = examples.example(queries, keys)
    chosen = config.backward_config(problem, form=form)
    rows = padded_rows(problem, config.BLOCK)
    lse = torch.zeros(1, queries)
    lse2, delta = row_constants(problem, rows, torch.zeros_like(dout), dout, lse, None)
    sums = torch.zeros(1, rows.count, problem.head_dim)
    dk, dv = (empty_tma_ready(x, x.shape[2]).zero_() for x in (k, v))
    tiles = launch.key_list(problem, chosen.tile_rows)
    run = launch.launch_pair if form == "pair" else launch.launch_backward
    run(problem, dout, q, k, v, dk, dv, sums, lse2, delta, *tiles, chosen)


backwards = {form: timed(package, form) for form in ("single", "pair")}


def steady(line):
    """Return the steady part of a run: from 35 to 80 %."""
    return tuple(line.start + share * line.cycles for share in (0.35, 0.8))


plots.panels(
    list(backwards),
    {
        "modelled cycles": ([x.cycles for x in backwards.values()], "{:,.0f}"),
        "tensor core busy": (
            [100 * x.busy("tensor", steady(x)) for x in backwards.values()],
            "{:.1f} %",
        ),
        "shared memory busy": (
            [100 * x.busy("smem", steady(x)) for x in backwards.values()],
            "{:.1f} %",
        ),
    },
    title="256 keys, 1,024 queries, D = 128, two SMs; busy: in the middle (modelled)",
)

# %% [markdown]
# Other shapes, from [docs/blackwell-notes.md](../docs/blackwell-notes.md) (November 2026; `python -m jfa.kernels.blackwell.modelled --pair`), whole runs on two modelled SMs:
#
# | queries, keys | single, cycles | pair, cycles | ratio |
# |---|---|---|---|
# | 1024, 1024 | 191,292 | 145,574 | 1.31 |
# | the same, causal | 118,862 | 99,771 | 1.19 |
# | 256, 1024 | 66,470 | 53,889 | 1.23 |
# | 128, 1024 | 46,413 | 39,453 | 1.18 |
# | 512, 256 | 27,099 | 23,605 | 1.15 |
#
# The same notes have the compiler's report: 232,068 bytes of shared memory of 232,448, all 512 columns, no spills without a mask, and with a causal mask spills of 8 / 12 bytes per thread (stores / loads).
#
# The next picture shows which role holds which columns of the leader's tensor memory, from the events of the run above.
# Compare it with chapter 14's map: dQ has its own columns, *next to P*, and no longer uses those of dP.


# %%
def holds(line):
    """Return which role holds which columns when, for ``plots.tmem_map``."""
    events = sorted((e for e in line.events if e.cta == (0, 0, 0)), key=lambda e: e.start)

    def named(prefix, begin, end):
        return [e for e in events if e.short.startswith(prefix) and begin <= e.start < end]

    def steps(product):
        starts = [e for e in events if e.track == "MMA" and e.short.startswith(product)]
        return zip(starts, [e.start for e in starts[1:]] + [line.end])

    found = []

    def hold(first, columns, begin, end, owner, words, limit=math.inf):
        end = min(end, limit)  # a product may still be under way when the next one is issued
        if end > begin:
            found.append(plots.Hold(first, columns, begin, end, owner, words))

    for s, end in steps("s[0] ="):
        reads, writes = named("load s[0]", s.start, end), named("store p[0]", s.start, end)
        hold(0, 128, s.start, s.end, "mma", "S")
        read = max(e.end for e in reads)
        hold(0, 128, s.end, read, "compute", "S")
        filled = max(e.end for e in writes)
        hold(0, 64, read, filled, "compute", "P")
        used = max(e.end for e in named("dv[0] +=", s.start, end))
        hold(0, 64, filled, used, "mma", "P", end)
    for dq, end in steps("dq[0] ="):
        following = [e.start for e in named("s[0] =", dq.start, end)]
        left = max(e.end for e in named("load dq_lanes", dq.end, end))
        hold(64, 64, dq.start, dq.end, "mma", "dQ")
        hold(64, 64, dq.end, left, "reduce", "dQ", min([end, *following]))
    for dp, end in steps("dp[0] ="):
        written = max(e.end for e in named("store ds_t[0]", dp.start, end))
        used = max(e.end for e in named("dk[0] +=", dp.start, end))
        hold(128, 128, dp.start, dp.end, "mma", "dP")
        hold(128, 128, dp.end, written, "compute", "dP, dS")
        hold(128, 128, written, used, "mma", "dS", end)
    for first, name in ((256, "dv"), (384, "dk")):
        parts = named(f"{name}[0] +=", 0, line.end)
        hold(first, 128, parts[0].start, parts[-1].end, "mma", f"d{name[1].upper()}, of all blocks")
    return found


plots.tmem_map(
    holds(backwards["pair"]), title="the pair's leader, four blocks", span=(16_000, 32_500)
)

# %% [markdown]
# ## Version 7: which form for which shape
#
# There are now three forms of the backward, and the package chooses one by the shape of a call.
# One function decides, and gives the reason.

# %%
print(inspect.getsource(config.backward_form))


def asked(lengths_q, lengths_kv, dim=128, heads=1, **options):
    """Return what `jfa.explain` says about the backward of a call with one key head."""
    q = torch.zeros(sum(lengths_q), heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(sum(lengths_kv), 1, dim, dtype=torch.bfloat16)
    offsets = [offsets_from_lengths(n) for n in (lengths_q, lengths_kv)]
    said = jfa.explain(q, k, k, *offsets, backend="blackwell", **options)
    return next(line.strip() for line in str(said).splitlines() if "backward" in line)


calls = {
    "self, 2,048 tokens each": asked([2048] * 2, [2048] * 2),
    "self, 300 each": asked([300] * 4, [300] * 4),
    "self, head dim 64": asked([2048], [2048], dim=64),
    "deterministic": asked([2048], [2048], deterministic=True),
    "32 shared queries, 4 heads": asked([32], [2000] * 2, heads=4, broadcast_q=True),
    "256 shared queries": asked([256], [2000] * 2, broadcast_q=True),
}
for call, answer in calls.items():
    print(f"{call}\n    {answer}")

# %% [markdown]
# Why in this order?
#
# * **Resident** first: with at most 128 shared queries dQ stays on the chip until the end. No form that adds to memory can have that; a pair saves shared-memory reads, the resident form saves *all* adds.
# * **Deterministic**: the order of adds changes from run to run, so a separate kernel computes dQ (chapter 14, version 9). The package has that kernel for single CTAs only.
# * **D <= 64**: the pair's kernel has tiles of 128 columns; half of them would be empty.
# * **Block lists** (chapter 17): one CTA per tile processes a list.
# * **Few keys per sequence**: a tile of 256 keys whose sequence has 100 keys leaves one CTA with masked rows only. Chapter 8 calls it waste by tile size: a list of tiles of 256 keys covers more rows than one of 128.
#
# The last rule is about averages: a sequence's last tile is half empty on average.
# With a gain of 1.31 the two forms break even at 142 keys; with the causal gain of 1.19, at 273; the package takes the pair from 512 keys on.
# Predict for sequences of 128, 129, 300 and 2,048 keys:
# How much of a pair's work is masked, and how much of a single CTA's?


# %%
def covered(lengths, tile):
    """Return the share of the rows in tiles of `tile` keys that hold a key."""
    return sum(lengths) / sum(-(-n // tile) * tile for n in lengths)


lengths = (128, 129, 300, 600, 2048)
plots.bars(
    [f"{n:,} keys" for n in lengths],
    {f"tiles of {t}": [100 * covered([n], t) for n in lengths] for t in (128, 256)},
    title="rows of a sequence's tiles that hold keys",
    xlabel="",
    ylabel="%",
    form="{:.0f}",
)

# %% [markdown]
# **Resident on a pair?** 129 to 256 shared queries do not fit into one CTA's tensor memory.
# They would fit into a pair's: S 64 and dP 64 columns (blocks of 64 queries), dQ of 256 queries 2 x 64, dV and dK 128 each, together 512.
# But shared memory is too small: K, V and K's columns 96 KiB, Q and dO by rows and by columns 128, dS with what is sent 48, together 272 of 227 KiB.
# The notes say how much would remain if fewer buffers were kept, and why we did not build it.
#
# ### What the public kernel chooses
#
# | shape | tlx_jfa (commit 2889aef) | here |
# |---|---|---|
# | shared queries, `Lq * G <= 128` | pair, if D = 128, one head per key head, no window, and `cpu_key_offset` was given | resident |
# | shared queries, more of them | the same | pair where sequences are long enough, else single |
# | self and cross attention, D > 64 | one CTA | pair where sequences are long enough, else single |
# | D <= 64, or deterministic | one CTA | single |
#
# Two remarks on that source, from reading it:
#
# * Its public function takes no CPU offsets and passes none on. So the usage shown in its README never reaches the two-CTA kernel; to get it, call the operator that the function wraps with `cpu_query_offset=` and `cpu_key_offset=`.
# * A comment says why self and cross attention use one CTA: bulk copies of lse and delta at unaligned offsets fault. We store these rows padded, so that reason does not apply here.
#
# ## How a pair hangs
#
# **One: a CTA ends early.** Its share of a slice is never loaded, and the leader waits for its bytes.
# Below, the peer's load role loads one slice fewer, as if its tile were shorter.


# %%
def changed(kernel, *pairs):
    """Return a kernel or role of this chapter with places of its source changed."""
    source = inspect.getsource(kernel.fn)
    for old, new in pairs:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    name = f"<{kernel.fn.__name__}, changed {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = dict(globals())
    exec(compile(source, name, "exec"), space)
    return space[kernel.fn.__name__]


def small_product(kernel):
    """Launch a pair's GEMM on eight slices."""
    return multiply(kernel, A[:, :512], B[:512], 128, **PAIR)


def error_of(launch, *args):
    """Return the emulator's error of a launch, or None."""
    try:
        with emulator.options(policy="lazy", seed=1, fences="strict"):
            launch(*args)
    except emulator.EmulatorError as error:
        return error


LOAD = "registers=24):  # load\n            for k in range(steps):"
leaves = error_of(small_product, changed(pair, (LOAD, LOAD.replace("steps", "steps - rank"))))
print(leaves)

# %%
plots.wait_graph(leaves, title="the peer's load role has ended: both epilogues wait for the leader")

# %% [markdown]
# Usual causes are an odd number of tiles, an `if` around a CTA's share, or an early `return`.
# The rule is short:
# **what one CTA of a pair does, both do**, the same number of times.
# Rows that do not exist are masked, not skipped.
#
# **Two: a completion in one CTA only.** `tcgen05_commit` without `two_ctas` arrives in the leader only.

# %%
ALONE = ("tcgen05_commit(done[0], two_ctas=True)", "tcgen05_commit(done[0])")
plots.wait_graph(
    error_of(small_product, changed(pair, ALONE)), title="a commit that reaches the leader only"
)

# %% [markdown]
# **Three: a signal at the wrong CTA.** The peer arrives on its own barrier instead of the leader's, or its copy counts on its own barrier.
# The cause is a forgotten `remote_cta_rank=0` or `two_ctas=True`; when you read the source, each arrival seems to be there.


# %%
def report(launch, *args, lines=slice(3)):
    """Print some lines of the error of a launch."""
    error = error_of(launch, *args)
    print(
        "no report"
        if error is None
        else "\n".join(f"{type(error).__name__}: {error}".splitlines()[lines])
    )


HOME = ("[row, k * BK], full, two_ctas=True)", "[row, k * BK], full)")
report(small_product, changed(pair, HOME))

# %% [markdown]
# ## Pitfalls
#
# **Bytes of one CTA announced.** The leader announces only its own bytes: the phase ends before the peer's half is there.

# %%
report(small_product, changed(pair, ("2 * 2 * (BM + HALF) * BK", "2 * (BM + HALF) * BK")))

# %% [markdown]
# **Both announce.** The peer announces on *its* barrier bytes that count on the leader's.

# %%
report(small_product, changed(pair, (", pred=rank == 0)", ")")))


# %% [markdown]
# **The wrong half, or the wrong place.** A CTA that sends the half that it should keep computes wrong numbers, and the emulator cannot detect that.
# A copy into `parts[1 - rank]` is a race with the CTA that writes there.


# %%
@contextlib.contextmanager
def replaced(**functions):
    """Replace roles of this chapter inside a `with` block."""
    before = {name: globals()[name] for name in functions}
    globals().update(functions)
    try:
        yield
    finally:
        globals().update(before)


def exchanged(kernel):
    """Launch an exchange whose roles may have been replaced; print how far dQ is off."""
    error = (run_exchange(changed(kernel), DS, K) - DS.double().T @ K.double()).abs().max()
    print(f"largest error: {error:.1e}")


with replaced(send_copies=changed(send_copies, ("2 * j + peer", "2 * j + rank"))):
    report(exchanged, exchange_copies)
with replaced(send_copies=changed(send_copies, ("copy(parts[rank]", "copy(parts[peer]"))):
    report(exchanged, exchange_copies)

# %% [markdown]
# **No wait for a free tile.** Without the wait for `ds_empties` the next block overwrites dS while it is being multiplied, or `staging` while it is being copied.

# %%
WAIT = "        tlx.barrier_wait(ds_empties[0], (j & 1) ^ 1)\n"
with replaced(send_copies=changed(send_copies, (WAIT, ""))):
    report(exchanged, exchange_copies)

# %% [markdown]
# **Both CTAs store all of dQ.** Each would be added twice; here the plain stores collide.

# %%
with replaced(store_dq=changed(store_dq, ("(2 * j + rank) * HALF", "2 * j * HALF"))):
    report(exchanged, exchange_copies)


# %% [markdown]
# **A write before the peer has started.** A cluster's CTAs are placed together, but that does not mean that the other one has run its first instruction, or that its barriers are initialized.
# fbtriton 3.7.4 puts a cluster barrier at the start of a kernel that arrives at remote barriers or has products of a pair, and one at the end of the latter.
# It adds none to a kernel that only *writes* to its neighbor (compiled for sm_100; in pull request 2292 of the fork the maintainers fix a test for that reason).


# %%
@triton.jit
def neighbors(x_ptr, out_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    """Exchange the blocks of two CTAs."""
    rank = tlx.cluster_cta_rank()
    inbox = tlx.local_alloc((N,), tl.float32, 1)
    come = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(come[0], 4 * N)
    if BARRIER:
        tlx.cluster_barrier()
    mine = tl.load(x_ptr + rank * N + tl.arange(0, N))
    tlx.async_remote_shmem_store(inbox[0], mine, 1 - rank, come[0])
    tlx.barrier_wait(come[0], 0)
    tl.store(out_ptr + rank * N + tl.arange(0, N), tlx.local_load(inbox[0]))


def give(barrier):
    """Launch it, and print whether the blocks were exchanged."""
    x, out = torch.randn(2, 64), torch.zeros(2, 64)
    neighbors[(2,)](x, out, 64, barrier, **PAIR)
    print("right:", torch.equal(out, x.flip(0)))


report(give, False, lines=slice(4))
report(give, True)

# %% [markdown]
# The numbers are right in both, here as on most runs of a GPU.
# The fault is that nothing orders the write after the start of the peer.
#
# ## What is claimed in public
#
# All of these numbers are for B200s; we measured none of them:
#
# * *The text this course grew from (May 2026):* for shared queries the forward is 13 % and the backward 50 % faster than FlashAttention 4's; its dense forward has 87 % of its speed, and its dense backward is 17 % faster.
# * *The Triton fork, pull request 1591 (2026-05-26):* the two-CTA backward reaches 866 TFLOP/s at 8k tokens where the one-CTA kernel has 827 (fp16). At 1k it is *slower*, 312.5 against 327.3; at 16k it has 1,163 where FlashAttention 4 has 1,289 (bf16).
# * *Comments in tlx_jfa (2889aef):* its persistent pair is 6 to 12 % faster than one CTA on shared queries.
# * *The fork, pull request 2560 (2026-07-30):* a two-CTA **forward**. On average FlashAttention 4's, with two CTAs, has 1,210 TFLOP/s and the fork's with one CTA 1,182: about 2 % are at stake there.
# * *cuDNN's front end, issue 1085:* version 9.26 no longer uses its two-CTA configurations for ragged forwards, and takes 22 to 33 % longer at 4k to 16k tokens with head dims (192, 128).
#
# ## Summary
#
# * In a pair each CTA holds its own rows of A and C, and half of B; one product runs on both SMs.
# * The leader issues for both, and bytes and arrivals count on the leader's barriers; its products complete in both CTAs.
# * A CTA waits on its own barriers only, so a relay tells the leader what the other CTA has received.
# * dS is exchanged by one copy per block (form A) or by stores of words (form B), which need a fence.
# * With 64 rows per CTA an accumulator folds, so dQ fits into the columns that P leaves free.
# * What one CTA of a pair does, both do, the same number of times; rows that do not exist are masked.
#
# ## Exercises
#
# Open [exercises/15_two_ctas.py](../exercises/15_two_ctas.py).
#
# | | what | difficulty | minutes |
# |---|---|---|---|
# | 15.1 | predict: bytes and columns, one CTA and a pair | 1 | 20 |
# | 15.2 | a pair's product: who expects, who arrives where, who issues | 2 | 25 |
# | 15.3 | bug hunt: the neighbor's buffer | 2 | 5 |
# | 15.4 | the exchange, with two buffers | 3 | 25 |
# | 15.5 | bug hunt: an odd number of tiles | 2 | 25 |
# | 15.6 | which form, and why | 1 | 30 |
#
# ## Checkpoint
#
# 1. Version 2: why does the peer's load role wait for `empties` of its own CTA, and what arrives there?
# 2. A pair's dQ is [64, 128] per CTA. Why does it take 64 columns, and what would it take in a single CTA with M = 64?
# 3. Why can the leader not wait for the exchanged dS itself?
# 4. Form B needs a fence in the relay, form A does not. Why?
# 5. A sequence of 130 keys: what does the second CTA of its tile do, step by step?
# 6. Which of the five products reads as many bytes per CTA in a pair as in a single CTA, and what does the pair gain there?
#
# <details><summary>Answers</summary>
#
# 1. No CTA can wait on a barrier of another. The leader's product arrives in both CTAs, by `two_ctas=True`.
# 2. The second half of its columns is in lanes 64 to 127. In a single CTA it takes 128 columns and leaves lanes empty.
# 3. Its bytes can only be counted by a barrier of the CTA into which they are written, and waits are local.
# 4. Threads write the words, so the tensor core sees them only behind a fence. The copy engine makes a copy, and the barrier orders its writes before the tensor core's reads.
# 5. Everything the first one does: two of its keys exist, 126 load as zeros and are masked. It sends halves of dS, receives halves, takes its 64 rows of dQ, and its stores of dK and dV are clipped at the end.
# 6. dQ: half of B, twice the keys. But only 64 rows of dQ leave each CTA, and each address is added to once per 256 keys.
#
# </details>
#
# ## Try this
#
# * Multiply on a pair with 2 stages and with 6. Which of the two forms needs fewer stages for the same cycles, and why?
# * Give the tensor core half of its rate (`B200.scaled("tensor_2", 0.5)`). How much of the pair's gain remains? And with `"smem"` doubled?
# * Sweep the exchange on two blocks, and on one. Which faults are no longer found, and why?
# * Turn `exchange_copies` into a ring of two dS tiles. (This is exercise 15.4.)
# * `package("pair", keys=128)`: how long does a pair take for half a tile?
#
# ## What differs on a GPU
#
# * A deadlock gives no report: the kernel hangs, and a debugger shows two CTAs.
# * The model gives distributed shared memory the latency of a TMA load and the bandwidth of shared memory. It does not model the network between SMs.
# * Arrivals at a remote barrier cost more than local ones; the model makes no difference.
# * A cluster needs two free SMs of one GPC at once. Where a GPC has an odd number of free SMs, one stays idle.
# * Layouts: the words of form B are written where the bf16 tile expects them. We read that from the compiler's layouts (both are swizzled over 128 bytes), but did not run it.
#
# ## Verified here, and not
#
# | what | how |
# |---|---|
# | versions 1 to 5 | run above on the emulator, under several schedules, against fp64 |
# | version 6, the package's kernel | modelled above; the package's tests check its numbers (`tests/kernels/blackwell`) |
# | both forms of the exchange compile for sm_100 | fbtriton 3.7.4, the cell in version 5 |
# | cycles | modelled |
# | anything on a Blackwell GPU | not run |
#
# ## Sources
#
# * NVIDIA, PTX ISA: `tcgen05.mma` with `cta_group::2`, its data path layouts; `mapa`, `st.async`, `cp.async.bulk` to `shared::cluster`; `barrier.cluster`.
# * TLX in fbtriton 3.7.4: names and semantics; what its compiler inserts was read from compiled kernels.
# * facebookexperimental/triton, pull requests 1591 (2026-05-26), 2292 (2026-07-22), 2560 (2026-07-30), issue 1992.
# * FlashAttention-4 (arXiv 2603.05451): cycles per tile of one CTA and of a pair.
# * tlx_jfa at commit 2889aef of a public fork of ads_model_kernel_library.
# * cudnn-frontend, issue 1085.
# * The text that this course grew from (May 2026), quoted as claimed.
#
# Next: [16 MXFP8](16_mxfp8.py).
