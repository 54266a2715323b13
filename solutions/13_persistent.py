# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 13: persistent kernels
#
# Read [notebooks/13_persistent.py](../notebooks/13_persistent.py) first.
# The kernels here do less than attention, so that they stay short and quick: what matters is which role waits for which.
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
# Exercises 13.1, 13.3 and 13.4 use it.
#
# **The work.** Sequences are packed.
# Tile `u` takes `2 * BM` rows of `q` and all keys of its sequence, and its output is, for each of its rows, the product of the query with the *sum of the keys*: `out[i] = q[i] . (k[0] + k[1] + ...)`.
# A record has three numbers: `q_row`, `k_row`, `k_len`.
# The rows of `q` come in two halves of `BM`; the keys come in blocks of `BM` rows, so a tile has `ceil(k_len / BM)` steps, but never zero: a tile without keys does one step, in which nothing counts.
# The rows after the last key of a sequence belong to other sequences and may hold anything, NaN included.
# `BM` and `D` differ from launch to launch.


# %%
@triton.jit
def ring(count, STAGES: tl.constexpr):
    """Return (stage, phase) of the count-th use of a ring of buffers."""
    return count % STAGES, (count // STAGES) & 1


@triton.jit
def read_record(records_ptr, unit):
    """Return (q_row, k_row, k_len) of a tile."""
    return (
        tl.load(records_ptr + unit * 3),
        tl.load(records_ptr + unit * 3 + 1),
        tl.load(records_ptr + unit * 3 + 2),
    )


@triton.jit
def steps_of(k_len, BM: tl.constexpr):
    """Return the number of blocks of keys that a tile visits: at least one."""
    return tl.maximum(tl.cdiv(k_len, BM), 1)


@triton.jit
def load_tile(
    q_desc, k_desc, queries, keys, record, done, steps_done,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Load role: both halves of Q, then the tile's blocks of K through the ring."""
    q_tiles, q_fulls, q_empties = queries
    k_tiles, k_fulls, k_empties = keys
    q_row, k_row, k_len = record
    for half in tl.static_range(2):
        tlx.barrier_wait(q_empties[half], (done & 1) ^ 1)
        tlx.barrier_expect_bytes(q_fulls[half], 4 * BM * D)
        tlx.async_descriptor_load(q_desc, q_tiles[half], [q_row + half * BM, 0], q_fulls[half])
    for j in range(steps_of(k_len, BM)):
        stage, phase = ring(steps_done + j, STAGES)
        tlx.barrier_wait(k_empties[stage], phase ^ 1)
        tlx.barrier_expect_bytes(k_fulls[stage], 4 * BM * D)
        tlx.async_descriptor_load(k_desc, k_tiles[stage], [k_row + j * BM, 0], k_fulls[stage])


@triton.jit
def store_tile(out_ptr, outs, record, done, BM: tl.constexpr):
    """Store role: the results of both halves to memory."""
    o_tiles, o_fulls, o_empties = outs
    q_row, _, _ = record
    for half in tl.static_range(2):
        tlx.barrier_wait(o_fulls[half], done & 1)
        x = tlx.local_load(o_tiles[half])
        tlx.barrier_arrive(o_empties[half])
        tl.store(out_ptr + q_row + half * BM + tl.arange(0, BM), x)


# %% [markdown]
# ## 13.1 Phases that go on from tile to tile
#
# (difficulty 2 of 3, 40 minutes) The kernel `sum_kernel` is static and persistent: program `w` of `W` takes the units `w`, `w + W`, `w + 2 W`, ... below `units`.
# Its load and store roles are there.
# Write `compute_role`: all tiles of this program, for one `half` (it runs as two replicas, and each half has its own Q and its own result; both read the same blocks of K).
#
# * `queries = (q_tiles, q_fulls, q_empties)`: one buffer per half, filled once per tile.
#   Arrive on `q_empties[half]` when Q has been read.
# * `keys = (k_tiles, k_fulls, k_empties)`: the ring of `STAGES` (1, 2 or 3) blocks `[BM, D]`, one block per step.
#   A block is free when both halves have arrived on its `k_empties`.
# * `outs = (o_tiles, o_fulls, o_empties)`: one buffer `[BM]` per half; wait until the store role has emptied it, store, arrive on `o_fulls[half]`.
#
# Keys from `k_len` on do not count, and may be NaN.
# Only `compute_role` is yours; the kernel stays as it is.


# %% tags=["ex-13.1"]
@triton.jit
def sum_kernel(
    q_desc, k_desc, out_ptr, records_ptr, units,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out: [rows of q] fp32; roles: store (default), compute x 2, load."""
    q_tiles = tlx.local_alloc((BM, D), tl.float32, 2)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    k_tiles = tlx.local_alloc((BM, D), tl.float32, STAGES)
    k_fulls = tlx.alloc_barriers(STAGES)
    k_empties = tlx.alloc_barriers(STAGES, arrive_count=2)
    o_tiles = tlx.local_alloc((BM,), tl.float32, 2)
    o_fulls = tlx.alloc_barriers(2)
    o_empties = tlx.alloc_barriers(2)
    queries = (q_tiles, q_fulls, q_empties)
    keys = (k_tiles, k_fulls, k_empties)
    outs = (o_tiles, o_fulls, o_empties)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # store
            unit, done = tl.program_id(0), 0
            while unit < units:
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                unit, done = unit + tl.num_programs(0), done + 1
        with tlx.async_task(num_warps=4, replicate=2):  # compute
            half = tlx.async_task_replica_id()
            compute_role(queries, keys, outs, half, records_ptr, units, BM, D, STAGES)
        with tlx.async_task(num_warps=1):  # load
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit < units:
                record = read_record(records_ptr, unit)
                load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)
                steps_done += steps_of(record[2], BM)
                unit, done = unit + tl.num_programs(0), done + 1


@triton.jit
def compute_role(
    queries, keys, outs, half, records_ptr, units,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with one half of all tiles of this program."""
    ### BEGIN SOLUTION
    q_tiles, q_fulls, q_empties = queries
    k_tiles, k_fulls, k_empties = keys
    o_tiles, o_fulls, o_empties = outs
    unit, done, steps_done = tl.program_id(0), 0, 0
    while unit < units:
        _, _, k_len = read_record(records_ptr, unit)
        steps = steps_of(k_len, BM)
        total = tl.zeros((D,), tl.float32)
        for j in range(steps):
            stage, phase = ring(steps_done + j, STAGES)
            tlx.barrier_wait(k_fulls[stage], phase)
            block = tlx.local_load(k_tiles[stage])
            tlx.barrier_arrive(k_empties[stage])
            real = j * BM + tl.arange(0, BM) < k_len
            total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)
        tlx.barrier_wait(q_fulls[half], done & 1)
        x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)
        tlx.barrier_arrive(q_empties[half])
        tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)
        tlx.local_store(o_tiles[half], x)
        tlx.barrier_arrive(o_fulls[half])
        steps_done += steps
        unit, done = unit + tl.num_programs(0), done + 1
    ### END SOLUTION


# %%
check("13.1", sum_kernel)

# %% [markdown]
# ## 13.2 From a unit to rows and heads
#
# (difficulty 1 of 3, 20 minutes) No kernel: the arithmetic at the beginning of every role, on the host.
# `records` `[room, 9]` has a record per tile in the chapter's order: `q_begin, q_len, row, out_begin, k_begin, k_len, lo, hi, pad_begin`.
# The first `tiles` of them are tiles; the others are not initialized.
# Unit `u` is one head of one tile, and the heads of a tile are adjacent.
# A tile has two halves of `block` rows each; rows from `q_len` on do not exist.
#
# Return seven whole numbers:
#
# * `head` and `kv_head`: `heads` is a multiple of `kv_heads`, and neighboring heads share a key head;
# * `begin`, `middle`, `end`: rows of the packed `query`. The first half is `begin .. middle - 1`, the second `middle .. end - 1`, only rows that exist;
# * `out_row`: the row of the output that belongs to `begin`. It differs from `begin` where queries are shared;
# * `shared`: 1 if the second half is empty, else 0.
#
# For a surplus unit, one that has no tile, return -1 seven times.


# %% tags=["ex-13.2"]
def locate(unit, records, tiles, heads, kv_heads, block):
    """Return (head, kv_head, begin, middle, end, out_row, shared)."""
    ### BEGIN SOLUTION
    tile, head = unit // heads, unit % heads
    if tile >= tiles:
        return (-1,) * 7
    q_begin, q_len, row, out_begin = records[tile, :4].tolist()
    begin, end = q_begin + row, q_begin + min(row + 2 * block, q_len)
    middle = min(begin + block, end)
    kv_head = head // (heads // kv_heads)
    return head, kv_head, begin, middle, end, out_begin + row, int(middle == end)
    ### END SOLUTION


# %%
check("13.2", locate)

# %% [markdown]
# ## 13.3 The CLC loop of every role
#
# (difficulty 3 of 3, 65 minutes) Now the hardware hands out the units.
# The kernel is launched with one program per unit, and fewer of them fit at a time.
# Three functions do one tile each: `load_tile`, `compute_tile` and `store_tile`.
# Write what is around them: the context of the queue (two stages are enough) and the loop of each role.
#
# * Every program begins with its own unit, `tl.program_id(0)`.
# * One role asks for the next unit, once per tile: best the load role, which is the first to need it. All roles read the answer.
# * After -1 a role ends, and no role asks again.
# * The programs that began do all the work: the check counts programs, questions and failed questions.
# * The ring of K has `STAGES` buffers and uses them all.
#
# The three functions take `done`, the number of tiles that this program has finished, and `steps_done`, the number of steps of those tiles.


# %%
@triton.jit
def compute_tile(
    queries, keys, outs, half, record, done, steps_done,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute role: one half of one tile."""
    q_tiles, q_fulls, q_empties = queries
    k_tiles, k_fulls, k_empties = keys
    o_tiles, o_fulls, o_empties = outs
    _, _, k_len = record
    total = tl.zeros((D,), tl.float32)
    for j in range(steps_of(k_len, BM)):
        stage, phase = ring(steps_done + j, STAGES)
        tlx.barrier_wait(k_fulls[stage], phase)
        block = tlx.local_load(k_tiles[stage])
        tlx.barrier_arrive(k_empties[stage])
        real = j * BM + tl.arange(0, BM) < k_len
        total += tl.sum(tl.where(real[:, None], block, 0.0), axis=0)
    tlx.barrier_wait(q_fulls[half], done & 1)
    x = tl.sum(tlx.local_load(q_tiles[half]) * total[None, :], axis=1)
    tlx.barrier_arrive(q_empties[half])
    tlx.barrier_wait(o_empties[half], (done & 1) ^ 1)
    tlx.local_store(o_tiles[half], x)
    tlx.barrier_arrive(o_fulls[half])


# %% tags=["ex-13.3"]
@triton.jit
def clc_kernel(
    q_desc, k_desc, out_ptr, records_ptr, BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr
):
    """out: [rows of q] fp32; roles: store (default), compute x 2, load; one program per unit."""
    q_tiles = tlx.local_alloc((BM, D), tl.float32, 2)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    k_tiles = tlx.local_alloc((BM, D), tl.float32, STAGES)
    k_fulls = tlx.alloc_barriers(STAGES)
    k_empties = tlx.alloc_barriers(STAGES, arrive_count=2)
    o_tiles = tlx.local_alloc((BM,), tl.float32, 2)
    o_fulls = tlx.alloc_barriers(2)
    o_empties = tlx.alloc_barriers(2)
    queries = (q_tiles, q_fulls, q_empties)
    keys = (k_tiles, k_fulls, k_empties)
    outs = (o_tiles, o_fulls, o_empties)
    ### BEGIN SOLUTION
    queue = tlx.clc_create_context(num_consumers=4, num_stages=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # store
            unit, done = tl.program_id(0), 0
            while unit >= 0:
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                done += 1
        with tlx.async_task(num_warps=4, replicate=2):  # compute
            half = tlx.async_task_replica_id()
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit >= 0:
                record = read_record(records_ptr, unit)
                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
        with tlx.async_task(num_warps=1):  # load
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit >= 0:
                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                record = read_record(records_ptr, unit)
                load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
    ### STARTER
    # # YOUR CODE: the queue's context, and code in place of each pass
    # with tlx.async_tasks():
    #     with tlx.async_task("default"):  # store
    #         pass
    #     with tlx.async_task(num_warps=4, replicate=2):  # compute
    #         pass
    #     with tlx.async_task(num_warps=1):  # load
    #         pass
    ### END SOLUTION


# %%
check("13.3", clc_kernel)

# %% [markdown]
# ## 13.4 Bug hunt: surplus units
#
# (difficulty 2 of 3, 40 minutes) The list of tiles is made on the device, so its length is in memory: `count`.
# The launch has `room` programs, an upper bound; the list is sorted, so units from `count` on are surplus.
# Their records are not initialized.
#
# The kernel below is right without surplus units, and hangs with them.
# Each role by itself looks sensible.
# Run the check first, find out which role waits for what, and then let all roles treat a surplus unit in the *same* way.
# Nothing may be done with a surplus unit's record, no result may change, no tile is done twice, the ring of K has `STAGES` buffers and uses them all, and the queue still hands out the units.
# All units may be surplus.


# %% tags=["ex-13.4"]
@triton.jit
def surplus_kernel(
    q_desc, k_desc, out_ptr, records_ptr, count_ptr,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out: [rows of q] fp32; roles: store (default), compute x 2, load; a program per record."""
    # YOUR CODE: below, the roles disagree about surplus units
    q_tiles = tlx.local_alloc((BM, D), tl.float32, 2)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    k_tiles = tlx.local_alloc((BM, D), tl.float32, STAGES)
    k_fulls = tlx.alloc_barriers(STAGES)
    k_empties = tlx.alloc_barriers(STAGES, arrive_count=2)
    o_tiles = tlx.local_alloc((BM,), tl.float32, 2)
    o_fulls = tlx.alloc_barriers(2)
    o_empties = tlx.alloc_barriers(2)
    queries = (q_tiles, q_fulls, q_empties)
    keys = (k_tiles, k_fulls, k_empties)
    outs = (o_tiles, o_fulls, o_empties)
    queue = tlx.clc_create_context(num_consumers=4, num_stages=2)
    with tlx.async_tasks():
        ### BEGIN SOLUTION
        with tlx.async_task("default"):  # store
            count = tl.load(count_ptr)
            unit, done = tl.program_id(0), 0
            while (unit >= 0) & (unit < count):
                store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                done += 1
        ### STARTER
        # with tlx.async_task("default"):  # store
        #     count = tl.load(count_ptr)
        #     unit, done = tl.program_id(0), 0
        #     while unit >= 0:
        #         if unit < count:
        #             store_tile(out_ptr, outs, read_record(records_ptr, unit), done, BM)
        #         unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
        #         done += 1
        ### END SOLUTION
        with tlx.async_task(num_warps=4, replicate=2):  # compute
            half = tlx.async_task_replica_id()
            count = tl.load(count_ptr)
            unit, done, steps_done = tl.program_id(0), 0, 0
            while (unit >= 0) & (unit < count):
                record = read_record(records_ptr, unit)
                compute_tile(queries, keys, outs, half, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1
        with tlx.async_task(num_warps=1):  # load
            count = tl.load(count_ptr)
            unit, done, steps_done = tl.program_id(0), 0, 0
            while (unit >= 0) & (unit < count):
                tlx.clc_producer(queue, ((done >> 1) & 1) ^ 1, k=done & 1)
                record = read_record(records_ptr, unit)
                load_tile(q_desc, k_desc, queries, keys, record, done, steps_done, BM, D, STAGES)
                unit = tlx.clc_consumer(queue, (done >> 1) & 1, k=done & 1)
                steps_done += steps_of(record[2], BM)
                done += 1


# %%
check("13.4", surplus_kernel)

# %% [markdown]
# ## 13.5 Bug hunt: O leaves through Q's buffer
#
# (difficulty 3 of 3, 40 minutes) A static persistent kernel on the tensor core: `out = sum over blocks of Q K^T`, in bf16, with `Q`, `K` blocks and the output tile all of `[BM, D]`.
# Roles: epilogue (default), mma, load, store.
# Tiles take both buffers of Q in turn, and the ring of K has STAGES buffers and uses them all.
#
# Shared memory is scarce, so the result leaves through the buffer of the tile's own Q: the epilogue writes it there once the tile's last product is done, and the store role sends it by TMA.
# `q_empties` says that the products have read Q.
# `o_empties` says that O has left.
#
# The kernel is right for one tile and for two.
# Run the check, see which two accesses the report names, and fix the kernel.
# Fences count here.
# `BM = D` is 64 or 128, and there are 1, 2 or 3 `STAGES`.
# O keeps leaving through Q's buffer (with `BM` = 64 and two stages all of shared memory together takes at most 34,000 bytes), and the loads still run ahead of the products: eight tiles of 64 rows with two blocks each take at most 16,000 modelled cycles.


# %% tags=["ex-13.5"]
@triton.jit
def reuse_kernel(
    q_desc, k_desc, o_desc, steps_ptr, units,
    BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out: [units * BM, D] bf16; tile u takes its BM rows of Q and the first steps[u] blocks."""
    # YOUR CODE: below, two tiles use one buffer at once
    q_tiles = tlx.local_alloc((BM, D), tl.bfloat16, 2)
    k_tiles = tlx.local_alloc((BM, D), tl.bfloat16, STAGES)
    accs = tlx.local_alloc((BM, BM), tl.float32, 2, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(2)
    q_empties = tlx.alloc_barriers(2)
    k_fulls = tlx.alloc_barriers(STAGES)
    k_empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    acc_empties = tlx.alloc_barriers(2)
    o_fulls = tlx.alloc_barriers(2)
    o_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            unit, done = tl.program_id(0), 0
            while unit < units:
                slot, phase = ring(done, 2)
                tlx.barrier_wait(acc_fulls[slot], phase)
                o = tlx.local_load(accs[slot])
                tlx.barrier_arrive(acc_empties[slot])
                tlx.barrier_wait(o_empties[slot], phase ^ 1)
                tlx.local_store(q_tiles[slot], o.to(tl.bfloat16))
                tlx.fence("async_shared")
                tlx.barrier_arrive(o_fulls[slot])
                unit, done = unit + tl.num_programs(0), done + 1
        with tlx.async_task(num_warps=1):  # mma
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit < units:
                steps = tl.load(steps_ptr + unit)
                slot, phase = ring(done, 2)
                tlx.barrier_wait(q_fulls[slot], phase)
                tlx.barrier_wait(acc_empties[slot], phase ^ 1)
                for j in range(steps):
                    stage, k_phase = ring(steps_done + j, STAGES)
                    tlx.barrier_wait(k_fulls[stage], k_phase)
                    k_t = tlx.local_trans(k_tiles[stage])
                    tlx.async_dot(
                        q_tiles[slot], k_t, accs[slot], use_acc=j > 0, mBarriers=[k_empties[stage]]
                    )
                tlx.tcgen05_commit(q_empties[slot])
                tlx.tcgen05_commit(acc_fulls[slot])
                steps_done += steps
                unit, done = unit + tl.num_programs(0), done + 1
        with tlx.async_task(num_warps=1):  # load
            unit, done, steps_done = tl.program_id(0), 0, 0
            while unit < units:
                steps = tl.load(steps_ptr + unit)
                slot, phase = ring(done, 2)
                tlx.barrier_wait(q_empties[slot], phase ^ 1)
                ### BEGIN SOLUTION
                tlx.barrier_wait(o_empties[slot], phase ^ 1)
                ### STARTER
                ### END SOLUTION
                tlx.barrier_expect_bytes(q_fulls[slot], 2 * BM * D)
                tlx.async_descriptor_load(q_desc, q_tiles[slot], [unit * BM, 0], q_fulls[slot])
                for j in range(steps):
                    stage, k_phase = ring(steps_done + j, STAGES)
                    tlx.barrier_wait(k_empties[stage], k_phase ^ 1)
                    tlx.barrier_expect_bytes(k_fulls[stage], 2 * BM * D)
                    tlx.async_descriptor_load(k_desc, k_tiles[stage], [j * BM, 0], k_fulls[stage])
                steps_done += steps
                unit, done = unit + tl.num_programs(0), done + 1
        with tlx.async_task(num_warps=1):  # store
            unit, done = tl.program_id(0), 0
            while unit < units:
                slot, phase = ring(done, 2)
                tlx.barrier_wait(o_fulls[slot], phase)
                tlx.async_descriptor_store(o_desc, q_tiles[slot], [unit * BM, 0])
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(o_empties[slot])
                unit, done = unit + tl.num_programs(0), done + 1


# %%
check("13.5", reuse_kernel)

# %% [markdown]
# ## 13.6 Predict: who gets which tile from the queue
#
# (difficulty 2 of 3, 45 minutes) `costs` are the times that the tiles of a list really take, in the order of the list.
# A launch has one program per tile, and `sms` SMs hold one program each.
# The first programs start at time 0: program 0 on SM 0, program 1 on SM 1, ...; with fewer tiles than SMs the other SMs stay empty.
# Each program runs its own tile first, then what it steals, tile after tile without a pause.
# A question is answered at once, with the next pending tile of the list, or with -1.
#
# * `early`: a program asks for its next tile when it *begins* a tile (the chapter's version 4).
#   Else it asks when it has *finished* one.
# * Of questions at the same time, the one from the SM with the smaller number comes first.
# * A program that was told -1 asks no more. It ends when it has nothing left to run.
#
# Return four things:
#
# * `owner`: for each tile the SM that runs it, a list of whole numbers;
# * `failed`: how many questions were answered -1;
# * `queue_end`: when the last program ends;
# * `zigzag_end`: when a static launch of `sms` programs ends that deals the same list by zigzag (chapter 08): round 0 from SM 0 upwards, round 1 backwards, and so on.
#
# `jfa.schedule` is closed here.
# When does stealing win?
# Try costs that the list's order foresaw, and costs that it did not.


# %% tags=["ex-13.6"]
def predict(costs, sms, early):
    """Return (owner, failed, queue_end, zigzag_end); costs: list of floats."""
    ### BEGIN SOLUTION
    started = min(len(costs), sms)
    answers = iter(range(started, len(costs)))
    owner, ends, failed = [-1] * len(costs), [0.0] * sms, 0
    upcoming = list(range(started))  # the tile that an SM begins next; None: it has yet to ask
    free = [(0.0, sm) for sm in range(started)]
    while free:
        now, sm = min(free)
        free.remove((now, sm))
        tile = next(answers, -1) if upcoming[sm] is None else upcoming[sm]
        failed += upcoming[sm] is None and tile < 0
        if tile < 0:
            continue
        owner[tile], ends[sm] = sm, now + costs[tile]
        free.append((ends[sm], sm))
        upcoming[sm] = next(answers, -1) if early else None
        failed += early and upcoming[sm] < 0
    loads = [0.0] * sms
    for place, cost in enumerate(costs):
        turn, worker = divmod(place, sms)
        loads[sms - 1 - worker if turn % 2 else worker] += cost
    return owner, int(failed), max(ends), max(loads)
    ### END SOLUTION


# %%
check("13.6", predict)
