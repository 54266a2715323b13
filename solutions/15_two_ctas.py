# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 15: two CTAs
#
# Read [notebooks/15_two_ctas.py](../notebooks/15_two_ctas.py) first.
# Each kernel is run on pairs of CTAs under several schedules, with strict fences.
# An answer passes when the numbers are right under all of them and the emulator reports nothing.
#
# Two exercises are bug hunts.
# They give you a faulty kernel.
# Run the check before you change anything: it says "not started", and then prints the emulator's report on that kernel.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa import plots
from jfa.course import check, hint, progress

progress()

# %% [markdown]
# The next cell is given: helpers of the chapter.


# %%
@triton.jit
def place(turn, STAGES: tl.constexpr):
    """Return (slot, phase) of a turn of a ring."""
    return turn % STAGES, (turn // STAGES) & 1


@triton.jit
def leave(c_ptr, acc, done, row, end):
    """Store a finished tile's rows before `end`."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    tlx.barrier_wait(done, 0)
    rows = row + tl.arange(0, BM)
    at = rows[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(c_ptr + at, tlx.local_load(acc), mask=rows[:, None] < end)


# %% [markdown]
# ## 15.1 Predict: bytes and columns
#
# (difficulty 1 of 3, 20 minutes) No kernel.
# A product C = A B in bf16 has `m` rows per CTA (64 or 128), `n` columns and a depth of `k`.
# B is in shared memory; A is there too, or in tensor memory (`a_in_tmem`).
# C is fp32, in tensor memory.
#
# Return four whole numbers:
#
# * `one`: the bytes that one CTA's product reads from shared memory;
# * `pair`: the bytes that the *leader's SM* reads from its shared memory if two CTAs multiply together, each with `m` rows of its own;
# * `one_columns`, `pair_columns`: the columns of tensor memory that must be allocated per CTA for C. Allocations are powers of two, and at least 32.
#
# A pair with 64 rows per CTA folds C over both halves of the lanes; a single CTA does not.


# %% tags=["ex-15.1"]
def traffic(m, n, k, a_in_tmem):
    """Return (one, pair, one_columns, pair_columns)."""
    ### BEGIN SOLUTION
    a = 0 if a_in_tmem else 2 * m * k
    folded = n // 2 if m == 64 else n

    def allocated(columns):
        size = 32
        while size < columns:
            size *= 2
        return size

    return a + 2 * n * k, a + n * k, allocated(n), allocated(folded)
    ### END SOLUTION


# %%
check("15.1", traffic)

# %% [markdown]
# ## 15.2 Who expects, who arrives where, who issues
#
# (difficulty 2 of 3, 25 minutes) C = relu(X)² B by pairs: BM rows of X per CTA, all columns of B per pair.
# Now **threads make A**: the role `make_a` loads X, squares it and stores it into the ring in shared memory, while the TMA loads B.
#
# A slice is ready for the product when *three* arrivals have come to the leader's barrier `fulls[slot]`: the announcement of B's bytes of both CTAs (`barrier_expect_bytes` counts as one arrival), and one of each CTA's `make_a`.
# So `fulls` has `arrive_count=3`.
# A slot is free when the product that read it is done: `empties[slot]`, one arrival per CTA's own barrier.
# Both roles that fill a slot wait for it.
#
# Write the end of `make_a`, which hands A over, and the roles `load_b` and `multiply` of the pair:
#
# * CTA `rank` holds columns `rank * HALF` to `rank * HALF + HALF - 1` of B; slice k starts at row `k * BK`;
# * one product per slice, for both CTAs;
# * `done[0]` completes in both CTAs when all products are done.
#
# The kernel `pair_kernel` stays as it is.
# Launched with 1 to 7 slices, `BM` 64 or 128, `BK` 16 or 32, `HALF` 32 or 64 and `STAGES` 1 to 3.


# %% tags=["ex-15.2"]
@triton.jit
def pair_kernel(x_ptr, b_desc, c_ptr, steps, BM: tl.constexpr, STAGES: tl.constexpr):
    """Compute C [programs * BM, 2 * HALF] = relu(X)**2 B; X: [programs * BM, steps * BK]."""
    BK: tl.constexpr = b_desc.block_shape[0]
    HALF: tl.constexpr = b_desc.block_shape[1]
    rank, row = tlx.cluster_cta_rank(), tl.program_id(0) * BM
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, HALF), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((BM, 2 * HALF), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=3)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # make A
            make_a(x_ptr, a, fulls, empties, row, steps, STAGES)
            leave(c_ptr, acc[0], done[0], row, row + BM)
        with tlx.async_task(num_warps=1, registers=24):  # load
            load_b(b_desc, b, fulls, empties, rank, steps, STAGES)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            multiply(a, b, acc, fulls, empties, done, rank, steps, STAGES)


@triton.jit
def make_a(x_ptr, a, fulls, empties, row, steps, STAGES: tl.constexpr):
    """Square this CTA's rows of X, slice by slice."""
    BM: tl.constexpr = a.shape[0]
    BK: tl.constexpr = a.shape[1]
    at = (row + tl.arange(0, BM))[:, None] * (steps * BK) + tl.arange(0, BK)[None, :]
    for k in range(steps):
        slot, phase = place(k, STAGES)
        x = tl.maximum(tl.load(x_ptr + at + k * BK).to(tl.float32), 0.0)
        tlx.barrier_wait(empties[slot], phase ^ 1)
        tlx.local_store(a[slot], (x * x).to(tl.bfloat16))
        ### BEGIN SOLUTION
        tlx.fence("async_shared")
        tlx.barrier_arrive(fulls[slot], 1, remote_cta_rank=0)
        ### END SOLUTION


@triton.jit
def load_b(b_desc, b, fulls, empties, rank, steps, STAGES: tl.constexpr):
    """Load this CTA's half of B, slice by slice."""
    BK: tl.constexpr = b_desc.block_shape[0]
    HALF: tl.constexpr = b_desc.block_shape[1]
    ### BEGIN SOLUTION
    for k in range(steps):
        slot, phase = place(k, STAGES)
        tlx.barrier_wait(empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(fulls[slot], 2 * 2 * BK * HALF, pred=rank == 0)
        box = [k * BK, rank * HALF]
        tlx.async_descriptor_load(b_desc, b[slot], box, fulls[slot], two_ctas=True)
    ### END SOLUTION


@triton.jit
def multiply(a, b, acc, fulls, empties, done, rank, steps, STAGES: tl.constexpr):
    """Issue one product per slice, for both CTAs."""
    ### BEGIN SOLUTION
    if rank == 0:
        for k in range(steps):
            slot, phase = place(k, STAGES)
            free = [empties[slot]]
            tlx.barrier_wait(fulls[slot], phase)
            tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=free, two_ctas=True)
        tlx.tcgen05_commit(done[0], two_ctas=True)
    ### END SOLUTION


# %%
check("15.2", pair_kernel)

# %% [markdown]
# ## 15.3 Bug hunt: the neighbor's buffer
#
# (difficulty 2 of 3, 5 minutes) Two CTAs share the columns of X and compute each row's maximum.
# For each block of rows each CTA computes the maximum of its columns and stores it into the *other's* `inbox`.
# A CTA whose columns do not exist sends nothing, so the inbox is first filled with minus infinity.
# The result is right on most runs.
# Fix the kernel, and keep `remote_shmem_store`, one or none per CTA and block.
# Launched on one pair, with different numbers of rows `R` per block and of columns `C` per CTA.
#
# For the inbox, find all writes and reads, and what orders each two of them.
# The inbox is used again for the next block.


# %% tags=["ex-15.3"]
@triton.jit
def neighbour_kernel(x_ptr, out_ptr, blocks, columns, R: tl.constexpr, C: tl.constexpr):
    """Store out [blocks * R]: each row's maximum of X [blocks * R, columns], columns <= 2 C."""
    # YOUR CODE: something is missing below
    rank = tlx.cluster_cta_rank()
    inbox = tlx.local_alloc((R,), tl.float32, 1)
    at = rank * C + tl.arange(0, C)
    for j in range(blocks):
        tlx.local_store(inbox[0], tl.full((R,), float("-inf"), tl.float32))
        ### BEGIN SOLUTION
        tlx.cluster_barrier()
        ### END SOLUTION
        rows = j * R + tl.arange(0, R)
        spot = rows[:, None] * columns + at[None, :]
        x = tl.load(x_ptr + spot, mask=at[None, :] < columns, other=float("-inf"))
        mine = tl.max(x, 1)
        if rank * C < columns:
            tlx.remote_shmem_store(inbox[0], mine, 1 - rank)
        tlx.cluster_barrier()
        if rank == 0:
            tl.store(out_ptr + rows, tl.maximum(mine, tlx.local_load(inbox[0])))


# %%
check("15.3", neighbour_kernel)

# %% [markdown]
# ## 15.4 The exchange, with two buffers
#
# (difficulty 3 of 3, 25 minutes) dQ = dS K of a pair again, but dS has **two** tiles, so a block may be made and sent while the one before is being multiplied.
# Block `j` uses slot `j % 2`; each slot has its own barriers and its own staging tile.
# `parts[2 * slot + r]` is the part of slot's tile that holds the keys of CTA `r`.
#
# `made(...)` returns dS^T of this CTA's keys and of `HALF` queries: half `h` of block `j` has the queries from `(2 * j + h) * HALF`.
# CTA `h` needs them.
# Keys that do not exist are zero there, so a CTA without any keys does the same as the other.
#
# Write two roles:
#
# * `give`: once the slot is free, store the half that this CTA needs into its own tile, and send the other half, through `staging[slot]`, to the peer's tile; arrive on the leader's `ds_fulls[slot]` when the first half is stored;
# * `pass_on`: wait in this CTA for what the peer sends (`come[slot]`, `2 * BN * HALF` bytes), and arrive on the leader's `ds_fulls[slot]`.
#
# `ds_fulls` has `arrive_count=4`: two CTAs, two roles.
# `ds_empties[slot]` gets an arrival in both CTAs when the product has read the slot's tiles.
# Use one copy per block and CTA.
# The other roles are in the next cell; the kernel stays as it is.
# Launched on one pair with 1 to 6 blocks, `BN` 16 to 64, `HALF` 64 or 128 and `D` 64 or 128.


# %%
@triton.jit
def made(ds_ptr, keys, rank, first_query, queries, BN: tl.constexpr, HALF: tl.constexpr):
    """Return dS^T [BN, HALF] of this CTA's keys, zero where a key does not exist."""
    key, query = rank * BN + tl.arange(0, BN), first_query + tl.arange(0, HALF)
    at = key[:, None] * queries + query[None, :]
    return tl.load(ds_ptr + at, mask=key[:, None] < keys, other=0.0)


@triton.jit
def multiply_dq(ds, k, dq, ds_fulls, ds_empties, dq_fulls, dq_empties, blocks):
    """Issue dQ of each block, for both CTAs (role mma of the leader)."""
    for j in range(blocks):
        slot, phase = place(j, 2)
        tlx.barrier_wait(ds_fulls[slot], phase)
        tlx.barrier_wait(dq_empties[0], (j & 1) ^ 1)
        after = [dq_fulls[0], ds_empties[slot]]
        rows = tlx.local_trans(ds[slot])
        tlx.async_dot(rows, k, dq, use_acc=False, mBarriers=after, two_ctas=True)


@triton.jit
def store_dq(dq_ptr, dq, dq_fulls, dq_empties, blocks, rank):
    """Store HALF rows of each block's dQ (role reduce)."""
    HALF: tl.constexpr = dq.shape[0]
    D: tl.constexpr = dq.shape[1]
    for j in range(blocks):
        tlx.barrier_wait(dq_fulls[0], j & 1)
        values = tlx.local_load(dq)
        tlx.barrier_arrive(dq_empties[0], 1, remote_cta_rank=0)
        rows = (2 * j + rank) * HALF + tl.arange(0, HALF)
        tl.store(dq_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], values)


# %% tags=["ex-15.4"]
@triton.jit
def exchange_kernel(
    ds_ptr, k_desc, dq_ptr, blocks, keys, BN: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr
):
    """Compute dQ = dS K of at most 2 BN keys; ds_ptr: dS^T [keys, blocks * 2 * HALF]."""
    rank = tlx.cluster_cta_rank()
    k = tlx.local_alloc((2 * BN, D // 2), tl.bfloat16, 1)
    ds = tlx.local_alloc((2 * BN, HALF), tl.bfloat16, 2)
    parts = tlx.local_alloc((BN, HALF), tl.bfloat16, 4, reuse=ds)
    staging = tlx.local_alloc((BN, HALF), tl.bfloat16, 2)
    dq = tlx.local_alloc((HALF, D), tl.float32, 1, tlx.storage_kind.tmem)
    k_full = tlx.alloc_barriers(1)
    come = tlx.alloc_barriers(2)
    ds_fulls = tlx.alloc_barriers(2, arrive_count=4)
    ds_empties = tlx.alloc_barriers(2)
    dq_fulls = tlx.alloc_barriers(1)
    dq_empties = tlx.alloc_barriers(1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # compute
            give(ds_ptr, parts, staging, come, ds_fulls, ds_empties, blocks, keys, rank)
        with tlx.async_task(num_warps=4, registers=152):  # reduce
            store_dq(dq_ptr, dq[0], dq_fulls, dq_empties, blocks, rank)
        with tlx.async_task(num_warps=1, registers=24):  # relay
            pass_on(come, ds_fulls, blocks, BN, HALF)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            tlx.barrier_expect_bytes(k_full[0], 4 * BN * D, pred=rank == 0)
            tlx.async_descriptor_load(k_desc, k[0], [0, rank * D // 2], k_full[0], two_ctas=True)
            if rank == 0:
                tlx.barrier_wait(k_full[0], 0)
                multiply_dq(ds, k[0], dq[0], ds_fulls, ds_empties, dq_fulls, dq_empties, blocks)


@triton.jit
def give(ds_ptr, parts, staging, come, ds_fulls, ds_empties, blocks, keys, rank):
    """Store one half of dS here, and copy the other to the peer (role compute)."""
    BN: tl.constexpr = parts.shape[0]
    HALF: tl.constexpr = parts.shape[1]
    queries = blocks * 2 * HALF
    ### BEGIN SOLUTION
    for j in range(blocks):
        slot, phase = place(j, 2)
        part = 2 * slot + rank
        tlx.barrier_wait(ds_empties[slot], phase ^ 1)
        mine = made(ds_ptr, keys, rank, (2 * j + rank) * HALF, queries, BN, HALF)
        other = made(ds_ptr, keys, rank, (2 * j + 1 - rank) * HALF, queries, BN, HALF)
        tlx.local_store(parts[part], mine)
        tlx.local_store(staging[slot], other)
        tlx.fence("async_shared")
        tlx.async_remote_shmem_copy(parts[part], staging[slot], 1 - rank, come[slot])
        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)
    ### END SOLUTION


@triton.jit
def pass_on(come, ds_fulls, blocks, BN: tl.constexpr, HALF: tl.constexpr):
    """Wait for each half that is sent here, and arrive at the leader's ds_fulls (role relay)."""
    ### BEGIN SOLUTION
    for j in range(blocks):
        slot, phase = place(j, 2)
        tlx.barrier_expect_bytes(come[slot], 2 * BN * HALF)
        tlx.barrier_wait(come[slot], phase)
        tlx.barrier_arrive(ds_fulls[slot], 1, remote_cta_rank=0)
    ### END SOLUTION


# %%
check("15.4", exchange_kernel)

# %% [markdown]
# ## 15.5 Bug hunt: an odd number of tiles
#
# (difficulty 2 of 3, 25 minutes) A is a packed tensor: the rows of all sequences, one after the other.
# Each pair multiplies 256 rows *of one sequence*, always 128 per CTA, and a list gives each pair's tile: its first row and the end of its sequence.
# The number of slices, their depth, the columns and `STAGES` differ from launch to launch.
# The kernel hangs as soon as a sequence has an odd number of 128-row tiles.
# It tries to save the work of a CTA that has no rows.
#
# Fix it: each pair makes one product per slice, for both CTAs, and no row of another sequence is written.
# The products read the shared memory of both: each CTA waits in `leave` until the products are done, with rows or without.


# %% tags=["ex-15.5"]
@triton.jit
def odd_kernel(a_desc, b_desc, c_ptr, records_ptr, steps, STAGES: tl.constexpr):
    """Compute C = A B per tile; records [pairs, 2]: its first row, and its sequence's end."""
    # YOUR CODE: a pair that leaves one behind, below
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    HALF: tl.constexpr = b_desc.block_shape[1]
    rank = tlx.cluster_cta_rank()
    record = records_ptr + tl.program_id(0) // 2 * 2
    row, end = tl.load(record) + rank * BM, tl.load(record + 1)
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, HALF), tl.bfloat16, STAGES)
    acc = tlx.local_alloc((BM, 2 * HALF), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            leave(c_ptr, acc[0], done[0], row, end)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            if rank == 0:
                for k in range(steps):
                    slot, phase = place(k, STAGES)
                    tlx.barrier_wait(fulls[slot], phase)
                    free = [empties[slot]]
                    tlx.async_dot(
                        a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=free, two_ctas=True
                    )
                tlx.tcgen05_commit(done[0], two_ctas=True)
        with tlx.async_task(num_warps=1, registers=24):  # load
            ### BEGIN SOLUTION
            turns = steps
            ### STARTER
            # turns = tl.where(row < end, steps, 0)
            ### END SOLUTION
            for k in range(turns):
                slot, phase = place(k, STAGES)
                full = fulls[slot]
                tlx.barrier_wait(empties[slot], phase ^ 1)
                tlx.barrier_expect_bytes(full, 2 * 2 * (BM + HALF) * BK, pred=rank == 0)
                tlx.async_descriptor_load(a_desc, a[slot], [row, k * BK], full, two_ctas=True)
                box = [k * BK, rank * HALF]
                tlx.async_descriptor_load(b_desc, b[slot], box, full, two_ctas=True)


# %%
check("15.5", odd_kernel)

# %% [markdown]
# ## 15.6 Which form, and why
#
# (difficulty 1 of 3, 30 minutes) Write a function that chooses a form of the backward and gives the reason.
# The first line of this table that fits decides:
#
# | the call | form | the reason must contain |
# |---|---|---|
# | shared queries, and queries x heads per key head at most 128 | `"resident"` | that product, as a number, and the word *queries* |
# | `deterministic` | `"single"` | the word *deterministic* |
# | `head_dim` at most 64 | `"single"` | `head_dim` as a number |
# | fewer than 512 keys per sequence | `"single"` | that mean, rounded down, and the word *keys* |
# | anything else | `"pair"` | the same |
#
# "Keys per sequence" is the mean over the sequences that have keys: the others have no tiles.
# Without any keys the mean is 0.
# `lengths_q` and `lengths_kv` are lists; with shared queries `lengths_q` has one entry.


# %% tags=["ex-15.6"]
def backward_form(lengths_q, lengths_kv, head_dim, group, broadcast_q, deterministic):
    """Return (form, reason), two strings. group: query heads per key head."""
    ### BEGIN SOLUTION
    if broadcast_q and lengths_q[0] * group <= 128:
        return (
            "resident",
            f"{lengths_q[0] * group} queries in all heads of a group stay on the chip",
        )
    if deterministic:
        return "single", "deterministic: dQ has a kernel of its own"
    if head_dim <= 64:
        return "single", f"head_dim {head_dim}: the pair's kernel is for 128"
    lengths = [n for n in lengths_kv if n > 0]
    keys = sum(lengths) // max(len(lengths), 1)
    if keys < 512:
        return "single", f"{keys} keys per sequence would leave half of a pair idle"
    return "pair", f"{keys} keys per sequence fill tiles of 256"
    ### END SOLUTION


# %%
check("15.6", backward_form)
