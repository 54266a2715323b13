# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 14: the Blackwell backward
#
# Read [notebooks/14_blackwell_backward.py](../notebooks/14_blackwell_backward.py) first.
# Each kernel here is a piece of the backward, with small whole numbers as data, so that sums are exact in any order.
# They run on the emulator under several schedules, and an answer passes when the numbers are right and nothing is found.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.course import check, hint, progress

progress()

# %% [markdown]
# The next cell is given.
# Exercises 14.1 and 14.2 use it.
#
# **The work.** A program is one key tile of one sequence.
# It has `blocks` blocks of `BM` queries, and for each of them dS `[BM, BN]` is ready in memory.
# The load role brings dS, the mma role makes dQ = dS K in tensor memory, one block after the other, in one buffer `dq[0]`.
# **You** are the reduce role: add each block's dQ to memory through stages.
#
# * Wait on `dq_fulls[0]`: block `j` of this program is in `dq[0]`. The mma role completes it once per block.
# * Arrive on `dq_empties[0]` when dQ has been read: once per block.
# * After your role the kernel uses the stages' memory for something else (`reuse`). When you return, no store may still read it.
# * A record has four numbers: `q_begin`, `q_len`, the first row of dS, the first row of K.


# %%
@triton.jit
def read_record(records_ptr):
    """Return (q_begin, q_len, ds_row, k_row) of this program's tile."""
    at = records_ptr + tl.program_id(0) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_blocks(
    ds_desc, k_desc, slots, key, ds_row, k_row, blocks,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Load K once, and dS of each block through two slots."""
    ds_tiles, ds_fulls, ds_empties = slots
    k_tile, k_full = key
    if blocks > 0:
        tlx.barrier_expect_bytes(k_full[0], 2 * BN * D)
        tlx.async_descriptor_load(k_desc, k_tile[0], [k_row, 0], k_full[0])
    for j in range(blocks):
        tlx.barrier_wait(ds_empties[j % 2], ((j // 2) & 1) ^ 1)
        tlx.barrier_expect_bytes(ds_fulls[j % 2], 2 * BM * BN)
        tlx.async_descriptor_load(ds_desc, ds_tiles[j % 2], [ds_row + j * BM, 0], ds_fulls[j % 2])


@triton.jit
def multiply_blocks(slots, key, dq, dq_fulls, dq_empties, blocks):
    """Multiply dQ = dS K of each block, into the same columns."""
    ds_tiles, ds_fulls, ds_empties = slots
    k_tile, k_full = key
    if blocks > 0:
        tlx.barrier_wait(k_full[0], 0)
    for j in range(blocks):
        tlx.barrier_wait(ds_fulls[j % 2], (j // 2) & 1)
        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)
        tlx.async_dot(ds_tiles[j % 2], k_tile[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])
        tlx.tcgen05_commit(ds_empties[j % 2])


@triton.jit
def reuse(stages, STAGES: tl.constexpr, BM: tl.constexpr, NCOL: tl.constexpr):
    """Clear the stages' memory, in place of the code that would use it next."""
    for i in tl.static_range(STAGES):
        tlx.local_store(stages[i], tl.zeros((BM, NCOL), tl.float32))


# %% [markdown]
# ## 14.1 Bug hunt: the sketch of dQ's staging
#
# (difficulty 2 of 3, 35 minutes) The text that this course grew from has a sketch, never run, that stores dQ in slices of `NCOL` columns through two stages.
# `reduce_sketch` follows it, and has four faults of different kinds.
# Run the check, repair what it finds, run it again: each fault hides the next.
# All blocks are whole here, so nothing needs to be clipped.
# Only `reduce_sketch` is yours; the kernel stays as it is.
# `BM` is 64 or 128, `D` is 32, 64 or 128, `NCOL` is 16 or 32, and the number of slices is even.
# The two stages must overlap, so waiting for all stores before each slice is too slow: at most 8,000 modelled cycles, and 4,700 more per block after the first (one program, `BM` = 128, `D` = 64, `NCOL` = 16).


# %% tags=["ex-14.1"]
@triton.jit
def reduce_sketch(
    dq_desc, dq, dq_fulls, dq_empties, stages, row, blocks,
    BM: tl.constexpr, D: tl.constexpr, NCOL: tl.constexpr,
):  # fmt: skip
    """Add dQ of each block to the rows from ``row``, in slices, through two stages."""
    # YOUR CODE: repair this function
    SLICES: tl.constexpr = D // NCOL
    for j in range(blocks):
        tlx.barrier_wait(dq_fulls[0], j & 1)
        for i in tl.static_range(SLICES):
            dq = tlx.local_load(tlx.subslice(dq[0], i * NCOL, NCOL))
            dq = dq.to(tl.float32)
            tlx.local_store(stages[i % 2], dq)
            tlx.async_descriptor_store_wait(1)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(
                dq_desc, stages[i % 2], [row + j * BM, 0], store_reduce="add"
            )
        tlx.barrier_arrive(dq_empties[0])


@triton.jit
def sketch_kernel(
    ds_desc, k_desc, dq_desc, records_ptr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, NCOL: tl.constexpr,
):  # fmt: skip
    """Run the roles reduce (default), mma, load."""
    ds_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2)
    ds_fulls = tlx.alloc_barriers(2)
    ds_empties = tlx.alloc_barriers(2)
    k_tile = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    k_full = tlx.alloc_barriers(1)
    dq = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1)
    stages = tlx.local_alloc((BM, NCOL), tl.float32, 2)
    slots = (ds_tiles, ds_fulls, ds_empties)
    key = (k_tile, k_full)
    q_begin, q_len, ds_row, k_row = read_record(records_ptr)
    blocks = tl.cdiv(q_len, BM)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            reduce_sketch(dq_desc, dq, dq_fulls, dq_empties, stages, q_begin, blocks, BM, D, NCOL)
            reuse(stages, 2, BM, NCOL)
        with tlx.async_task(num_warps=1):  # mma
            multiply_blocks(slots, key, dq, dq_fulls, dq_empties, blocks)
        with tlx.async_task(num_warps=1):  # load
            load_blocks(ds_desc, k_desc, slots, key, ds_row, k_row, blocks, BM, BN, D)


# %%
check("14.1", sketch_kernel)

# %% [markdown]
# ## 14.2 The reduce role, staged and clipped
#
# (difficulty 2 of 3, 30 minutes) Now from scratch, and for jagged sequences.
# Write `reduce_role`: slices take all `STAGES` stages in turn, 1, 2, 3 or 4 of them, of `NCOL` columns each.
# `BM` is 64 or 128, `D` is 32, 64 or 128, `NCOL` is 16 or 32.
#
# * `dq_desc` is dQ `[rows, D]` in fp32, packed: the rows after a sequence's last query belong to the next sequence.
#   The stages' boxes always have `BM` rows, so a last block that is not full reaches into the next sequence.
#   Add nothing there: neither a number nor a NaN.
# * Rows of dQ from `q_len` on are undefined: any numbers, or NaN.
# * `STAGES` need not divide the number of slices `D // NCOL`.
#   So slice `i` does not use the same stage in each block.
# * A program without queries (`blocks` = 0) does nothing.
# * Memory already holds the parts of other programs: add, do not overwrite.
# * Only `reduce_role` is yours; the kernel stays as it is.


# %% tags=["ex-14.2"]
@triton.jit
def staged_kernel(
    ds_desc, k_desc, dq_desc, records_ptr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, NCOL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run the roles reduce (default), mma, load."""
    ds_tiles = tlx.local_alloc((BM, BN), tl.bfloat16, 2)
    ds_fulls = tlx.alloc_barriers(2)
    ds_empties = tlx.alloc_barriers(2)
    k_tile = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    k_full = tlx.alloc_barriers(1)
    dq = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1)
    stages = tlx.local_alloc((BM, NCOL), tl.float32, STAGES)
    slots = (ds_tiles, ds_fulls, ds_empties)
    key = (k_tile, k_full)
    q_begin, q_len, ds_row, k_row = read_record(records_ptr)
    blocks = tl.cdiv(q_len, BM)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            reduce_role(
                dq_desc,
                dq,
                dq_fulls,
                dq_empties,
                stages,
                q_begin,
                q_len,
                blocks,
                BM,
                D,
                NCOL,
                STAGES,
            )
            reuse(stages, STAGES, BM, NCOL)
        with tlx.async_task(num_warps=1):  # mma
            multiply_blocks(slots, key, dq, dq_fulls, dq_empties, blocks)
        with tlx.async_task(num_warps=1):  # load
            load_blocks(ds_desc, k_desc, slots, key, ds_row, k_row, blocks, BM, BN, D)


@triton.jit
def reduce_role(
    dq_desc, dq, dq_fulls, dq_empties, stages, q_begin, q_len, blocks,
    BM: tl.constexpr, D: tl.constexpr, NCOL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add dQ of each block to its rows of memory."""
    pass  # YOUR CODE


# %%
check("14.2", staged_kernel)

# %% [markdown]
# ## 14.3 Bug hunt: dQ in dP's columns
#
# (difficulty 3 of 3, 20 minutes) The core of the backward, simplified: a program has K and V of 128 keys and walks over blocks of 128 queries.
#
# * mma makes dP = V dO^T in `dp[0]`;
# * compute multiplies it with `w`, a matrix in memory that stands for P, and writes dS to shared memory;
# * mma makes dQ = dS^T K **in the same columns as dP**;
# * reduce adds dQ to memory.
#
# dO has two slots, dS one.
# The given roles are right; `seat_mma` is not, and the line that the report names is not the only one to look at.
# The fix is one statement: a wait.
# On which barrier, for which phase, and before *which* product?
# Only `seat_mma` is yours; the kernel stays as it is.


# %%
@triton.jit
def seat_load(k_desc, v_desc, do_desc, kv, dos, blocks, B: tl.constexpr, D: tl.constexpr):
    """Load K and V once, and dO of each block through two slots."""
    k, v, kv_full = kv
    do, do_fulls, do_empties = dos
    tlx.barrier_expect_bytes(kv_full[0], 4 * B * D)
    tlx.async_descriptor_load(k_desc, k[0], [0, 0], kv_full[0])
    tlx.async_descriptor_load(v_desc, v[0], [0, 0], kv_full[0])
    for j in range(blocks):
        tlx.barrier_wait(do_empties[j % 2], ((j // 2) & 1) ^ 1)
        tlx.barrier_expect_bytes(do_fulls[j % 2], 2 * B * D)
        tlx.async_descriptor_load(do_desc, do[j % 2], [j * B, 0], do_fulls[j % 2])


@triton.jit
def seat_compute(w_ptr, dp, dp_fulls, ds, ds_fulls, blocks, B: tl.constexpr):
    """Write dS = w dP, [keys, queries], to shared memory."""
    for j in range(blocks):
        tlx.barrier_wait(dp_fulls[0], j & 1)
        at = tl.arange(0, B)[:, None] * (blocks * B) + j * B + tl.arange(0, B)[None, :]
        value = tl.load(w_ptr + at) * tlx.local_load(dp[0])
        tlx.local_store(ds[0], value.to(tl.bfloat16))
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_fulls[0])


@triton.jit
def seat_reduce(
    dq_desc, dq, dq_fulls, dq_empties, stages, blocks, B: tl.constexpr, D: tl.constexpr
):
    """Add dQ to memory in slices of 16 columns."""
    for j in range(blocks):
        tlx.barrier_wait(dq_fulls[0], j & 1)
        for i in tl.static_range(D // 16):
            part = tlx.local_load(tlx.subslice(dq[0], i * 16, 16))
            tlx.async_descriptor_store_wait(1)
            tlx.local_store(stages[i % 2], part)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, stages[i % 2], [j * B, i * 16], store_reduce="add")
        tlx.barrier_arrive(dq_empties[0])
    tlx.async_descriptor_store_wait(0)


# %% tags=["ex-14.3"]
@triton.jit
def seat_mma(
    kv, dos, dp, dp_fulls, ds, ds_fulls, dq, dq_fulls, dq_empties, blocks,
):  # fmt: skip
    """Multiply dP and dQ of each block, in the same columns."""
    # YOUR CODE: something is missing here
    k, v, kv_full = kv
    do, do_fulls, do_empties = dos
    tlx.barrier_wait(kv_full[0], 0)
    for j in range(blocks):
        tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)
        do_t = tlx.local_trans(do[j % 2])
        tlx.async_dot(v[0], do_t, dp[0], use_acc=False, mBarriers=[dp_fulls[0]])
        tlx.tcgen05_commit(do_empties[j % 2])
        tlx.barrier_wait(ds_fulls[0], j & 1)
        ds_rows = tlx.local_trans(ds[0])
        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])


@triton.jit
def seat_kernel(k_desc, v_desc, do_desc, w_ptr, dq_desc, blocks, B: tl.constexpr, D: tl.constexpr):
    """Run the roles reduce (default), compute, mma, load."""
    k = tlx.local_alloc((B, D), tl.bfloat16, 1)
    v = tlx.local_alloc((B, D), tl.bfloat16, 1)
    kv_full = tlx.alloc_barriers(1)
    do = tlx.local_alloc((B, D), tl.bfloat16, 2)
    do_fulls = tlx.alloc_barriers(2)
    do_empties = tlx.alloc_barriers(2)
    ds = tlx.local_alloc((B, B), tl.bfloat16, 1)
    ds_fulls = tlx.alloc_barriers(1)
    dp = tlx.local_alloc((B, B), tl.float32, 1, tlx.storage_kind.tmem)
    dp_fulls = tlx.alloc_barriers(1)
    dq = tlx.local_alloc((B, D), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1)
    stages = tlx.local_alloc((B, 16), tl.float32, 2)
    kv, dos = (k, v, kv_full), (do, do_fulls, do_empties)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            seat_reduce(dq_desc, dq, dq_fulls, dq_empties, stages, blocks, B, D)
        with tlx.async_task(num_warps=4):  # compute
            seat_compute(w_ptr, dp, dp_fulls, ds, ds_fulls, blocks, B)
        with tlx.async_task(num_warps=1):  # mma
            seat_mma(kv, dos, dp, dp_fulls, ds, ds_fulls, dq, dq_fulls, dq_empties, blocks)
        with tlx.async_task(num_warps=1):  # load
            seat_load(k_desc, v_desc, do_desc, kv, dos, blocks, B, D)


# %%
check("14.3", seat_kernel)

# %% [markdown]
# ## 14.4 Early release, against the clock
#
# (difficulty 2 of 3, 50 minutes) The kernel of 14.3 once more, with its mma role repaired; now the reduce role is yours.
# dQ has `SLICES = D // 16` slices, and there are `STAGES` stages, a divisor of `SLICES`.
# The last `HELD` slices (0 to `SLICES`) must leave tensor memory *before* the role waits for a stage for any of them.
# Arrive on `dq_empties[0]` as soon as they have been loaded.
# Memory already holds the parts of other programs: add all slices, do not overwrite.
#
# `B` is 64 or 128.
# Time is checked as well.
# A launch with `B` = 128 may take at most as many modelled cycles as the table says:
#
# | blocks | columns of dQ | stages | held | cycles |
# |---|---|---|---|---|
# | 2 | 64 | 2 | 0 | 13,000 |
# | 3 | 64 | 1 | 2 | 22,200 |
# | 4 | 64 | 2 | 2 | 19,000 |
# | 3 | 64 | 2 | 4 | 14,770 |
# | 3 | 128 | 2 | 4 | 24,200 |
# | 3 | 128 | 2 | 6 | 23,000 |
# | 4 | 128 | 4 | 5 | 23,300 |
#
# Only `reduce_early` is yours; the kernel stays as it is.


# %%
@triton.jit
def early_mma(
    kv, dos, dp, dp_fulls, ds, ds_fulls, dq, dq_fulls, dq_empties, blocks,
):  # fmt: skip
    """Multiply dP and dQ in the same columns; the next dP waits for the reduction."""
    k, v, kv_full = kv
    do, do_fulls, do_empties = dos
    tlx.barrier_wait(kv_full[0], 0)
    for j in range(blocks):
        tlx.barrier_wait(do_fulls[j % 2], (j // 2) & 1)
        do_t = tlx.local_trans(do[j % 2])
        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)
        tlx.async_dot(v[0], do_t, dp[0], use_acc=False, mBarriers=[dp_fulls[0]])
        tlx.tcgen05_commit(do_empties[j % 2])
        tlx.barrier_wait(ds_fulls[0], j & 1)
        ds_rows = tlx.local_trans(ds[0])
        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_fulls[0]])


# %% tags=["ex-14.4"]
@triton.jit
def early_kernel(
    k_desc, v_desc, do_desc, w_ptr, dq_desc, blocks,
    B: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Run the roles reduce (default), compute, mma, load."""
    k = tlx.local_alloc((B, D), tl.bfloat16, 1)
    v = tlx.local_alloc((B, D), tl.bfloat16, 1)
    kv_full = tlx.alloc_barriers(1)
    do = tlx.local_alloc((B, D), tl.bfloat16, 2)
    do_fulls = tlx.alloc_barriers(2)
    do_empties = tlx.alloc_barriers(2)
    ds = tlx.local_alloc((B, B), tl.bfloat16, 1)
    ds_fulls = tlx.alloc_barriers(1)
    dp = tlx.local_alloc((B, B), tl.float32, 1, tlx.storage_kind.tmem)
    dp_fulls = tlx.alloc_barriers(1)
    dq = tlx.local_alloc((B, D), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1)
    stages = tlx.local_alloc((B, 16), tl.float32, STAGES)
    kv, dos = (k, v, kv_full), (do, do_fulls, do_empties)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reduce
            reduce_early(dq_desc, dq, dq_fulls, dq_empties, stages, blocks, B, D, STAGES, HELD)
        with tlx.async_task(num_warps=4):  # compute
            seat_compute(w_ptr, dp, dp_fulls, ds, ds_fulls, blocks, B)
        with tlx.async_task(num_warps=1):  # mma
            early_mma(kv, dos, dp, dp_fulls, ds, ds_fulls, dq, dq_fulls, dq_empties, blocks)
        with tlx.async_task(num_warps=1):  # load
            seat_load(k_desc, v_desc, do_desc, kv, dos, blocks, B, D)


@triton.jit
def reduce_early(
    dq_desc, dq, dq_fulls, dq_empties, stages, blocks,
    B: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Add dQ of each block to memory; the last HELD slices leave tensor memory early."""
    pass  # YOUR CODE


# %%
check("14.4", early_kernel)

# %% [markdown]
# ## 14.5 Predict: stages and held slices, do they fit?
#
# (difficulty 2 of 3, 20 minutes) No kernel: estimate the budget of the package's backward before it is compiled.
#
# **Shared memory**, in bytes, for blocks of 128 queries and tiles of 128 keys:
#
# * K and V, one buffer each; Q in `q_slots`, dO in `do_slots` buffers; all bf16, `head_dim` columns;
# * dS, one buffer, bf16; lse and delta, fp32, one of each per slot of Q;
# * `stages` stages of `columns` columns of dQ, fp32;
# * 1,024 bytes for barriers and what the compiler adds. A CTA has 232,448.
#
# **Registers.** 65,536 per SM, 32 threads per warp.
# Two compute groups of four warps have `compute` registers per thread.
# mma and load are one warp each, but registers are handed out to groups of four warps: theirs has 128 threads, two warps of them idle, with 40 each.
# The reduce role's four warps have what is left.
# As a rule of thumb, dQ needs one register per held column, one per column of the slice that is on its way, and 8 for all else.
#
# Return three whole numbers: `shared`, the bytes of shared memory; `left`, the registers per thread of the reduce role; and `most`, how many slices it can hold at most (no more than there are), or -1 if there is not enough shared memory, or if there are not enough registers even for 0 held slices.
#
# The rule is rough: it agrees with nine of the ten rows of the chapter's compile table.
# The tenth, two stages of 32 columns with two held, is exactly at its limit, and spills 4 bytes per thread.


# %% tags=["ex-14.5"]
def budget(head_dim, q_slots, do_slots, stages, columns, compute):
    """Return (shared, left, most)."""
    raise NotImplementedError("14.5: not started")  # YOUR CODE


# %%
check("14.5", budget)

# %% [markdown]
# ## 14.6 dQ stays in tensor memory over all tiles
#
# (difficulty 3 of 3, 30 minutes) The resident form.
# All tiles share one block of `B` queries, so Q is loaded once, and dQ is a sum over *all tiles of a program*, whichever sequences they belong to.
# For each tile, dS `[queries, keys]` and K are ready in memory.
# The mma role has two products per tile:
#
# * dQ += dS K, in `dq[0]`, from the first tile of this program to its last. It is stored **once**, as this program's partial;
# * dK = dS^T Q, in `dk[0]`, which is stored **after each tile**.
#
# Write `resident_mma` for the tiles `begin` to `end - 1`:
#
# * `q_full[0]`: Q is there, once;
# * `tiles = (ds, k, fulls, empties)`: a ring of two slots; the n-th tile *of this program* is in slot `n % 2`. A slot is free when the products that read it are done;
# * `dk_fulls[0]`, `dk_empties[0]`: the store role reads dK after each tile, and then arrives on `dk_empties[0]`;
# * `dq_full[0]`: dQ of all tiles is there. The store role waits for it once, and not at all if the program has no tiles.
#
# A program may have no tiles; the store role then stores zeros as its partial.
# Only `resident_mma` is yours; the kernel stays as it is.


# %%
@triton.jit
def resident_load(
    q_desc, ds_desc, k_desc, q, q_full, tiles, begin, end, B: tl.constexpr, D: tl.constexpr
):
    """Load Q once, and dS and K of each tile through two slots."""
    ds, k, fulls, empties = tiles
    if begin < end:
        tlx.barrier_expect_bytes(q_full[0], 2 * B * D)
        tlx.async_descriptor_load(q_desc, q[0], [0, 0], q_full[0])
    for n in range(end - begin):
        tlx.barrier_wait(empties[n % 2], ((n // 2) & 1) ^ 1)
        tlx.barrier_expect_bytes(fulls[n % 2], 2 * B * B + 2 * B * D)
        row = (begin + n) * B
        tlx.async_descriptor_load(ds_desc, ds[n % 2], [row, 0], fulls[n % 2])
        tlx.async_descriptor_load(k_desc, k[n % 2], [row, 0], fulls[n % 2])


@triton.jit
def resident_store(
    dk_ptr, part_ptr, dk, dk_fulls, dk_empties, dq, dq_full, begin, end,
    B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store dK of each tile, then the partial of dQ."""
    inner = tl.arange(0, B)[:, None] * D + tl.arange(0, D)[None, :]
    for n in range(end - begin):
        tlx.barrier_wait(dk_fulls[0], n & 1)
        value = tlx.local_load(dk[0])
        tlx.barrier_arrive(dk_empties[0])
        tl.store(dk_ptr + (begin + n) * B * D + inner, value)
    part_ptr += tl.program_id(0) * B * D
    if begin < end:
        tlx.barrier_wait(dq_full[0], 0)
        tl.store(part_ptr + inner, tlx.local_load(dq[0]))
    else:
        tl.store(part_ptr + inner, tl.zeros((B, D), tl.float32))


# %% tags=["ex-14.6"]
@triton.jit
def resident_kernel(
    q_desc, ds_desc, k_desc, dk_ptr, part_ptr, count, B: tl.constexpr, D: tl.constexpr
):
    """Run the roles store (default), mma, load. A program has an equal share of ``count`` tiles."""
    q = tlx.local_alloc((B, D), tl.bfloat16, 1)
    q_full = tlx.alloc_barriers(1)
    ds = tlx.local_alloc((B, B), tl.bfloat16, 2)
    k = tlx.local_alloc((B, D), tl.bfloat16, 2)
    fulls = tlx.alloc_barriers(2)
    empties = tlx.alloc_barriers(2)
    dk = tlx.local_alloc((B, D), tl.float32, 1, tlx.storage_kind.tmem)
    dk_fulls = tlx.alloc_barriers(1)
    dk_empties = tlx.alloc_barriers(1)
    dq = tlx.local_alloc((B, D), tl.float32, 1, tlx.storage_kind.tmem)
    dq_full = tlx.alloc_barriers(1)
    tiles = (ds, k, fulls, empties)
    begin = tl.program_id(0) * count // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * count // tl.num_programs(0)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # store
            resident_store(
                dk_ptr, part_ptr, dk, dk_fulls, dk_empties, dq, dq_full, begin, end, B, D
            )
        with tlx.async_task(num_warps=1):  # mma
            resident_mma(q, q_full, tiles, dk, dk_fulls, dk_empties, dq, dq_full, begin, end)
        with tlx.async_task(num_warps=1):  # load
            resident_load(q_desc, ds_desc, k_desc, q, q_full, tiles, begin, end, B, D)


@triton.jit
def resident_mma(q, q_full, tiles, dk, dk_fulls, dk_empties, dq, dq_full, begin, end):
    """Issue both products of each tile."""
    pass  # YOUR CODE


# %%
check("14.6", resident_kernel)
