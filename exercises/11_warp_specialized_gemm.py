# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 11: a warp-specialized GEMM
#
# Read [notebooks/11_warp_specialized_gemm.py](../notebooks/11_warp_specialized_gemm.py) first.
# Each kernel is run under several schedules: copies and products complete at once, as late as they may, or in a random order.
# An answer passes when the numbers are right under all of them and the emulator finds nothing; fences count (`fences="strict"`).
#
# Three exercises are bug hunts.
# They give you a faulty kernel.
# Run the check before you change anything: it says "not started", and then the report that the kernel runs into.
# The faulty line is seldom the line that the report names.

# %% tags=["setup"]
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa import plots
from jfa.course import check, hint, progress
from jfa.emulator import sweep

progress()

# %% [markdown]
# The next cell is given: the helpers of the chapter.
# Tiles have 64 or 128 rows and 32 or 64 columns, slices are 16 or 32 wide, and all sizes come from the descriptors' boxes.


# %%
@triton.jit
def place(turn, STAGES: tl.constexpr):
    """Return (slot, phase) of a turn of a ring."""
    return turn % STAGES, (turn // STAGES) & 1


@triton.jit
def load_slice(a_desc, b_desc, a, b, full, row, k):
    """Start the copies of slice k of A and B on one barrier."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    tlx.barrier_expect_bytes(full, 2 * (BM + BN) * BK)
    tlx.async_descriptor_load(a_desc, a, [row, k * BK], full)
    tlx.async_descriptor_load(b_desc, b, [k * BK, 0], full)


@triton.jit
def leave(c_desc, staging, values, row):
    """Start the store of a tile: registers, shared memory, TMA."""
    tlx.local_store(staging, values)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(c_desc, staging, [row, 0])


# %% [markdown]
# ## 11.1 The producer of a ring
#
# (difficulty 1 of 3, 10 minutes) Write the load role: for each of the `steps` slices wait until its buffers are free, announce the bytes *of both operands* on `fulls[slot]`, and start both copies.
# Turn `k` of the ring uses slot `k % STAGES`; `place` gives slot and phase.
# There are 1, 2 or 3 stages: the ring has `STAGES` buffers and uses them all.
# Do it with what is there: two tasks, no `load_slice`, two copies per slice, and one announcement per slice.
#
# Slice k of A starts at `[0, k * BK]`, of B at `[k * BK, 0]`.
# Do not read beyond the last slice.


# %% tags=["ex-11.1"]
@triton.jit
def ring_kernel(a_desc, b_desc, c_desc, steps, STAGES: tl.constexpr):
    """C = A B; A: [BM, >= steps * BK], B: [>= steps * BK, BN] bf16, C: [BM, BN] fp32."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=1)
    done = tlx.alloc_barriers(1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
            for k in range(steps):
                slot, phase = place(k, STAGES)
                tlx.barrier_wait(fulls[slot], phase)
                tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=[empties[slot]])
            tlx.tcgen05_commit(done[0])
            tlx.barrier_wait(done[0], 0)
            leave(c_desc, staging[0], tlx.local_load(acc[0]), 0)
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # load
            for k in range(steps):
                slot, phase = place(k, STAGES)
                pass  # YOUR CODE


# %%
check("11.1", ring_kernel)

# %% [markdown]
# ## 11.2 An epilogue for jagged tiles
#
# (difficulty 3 of 3, 20 minutes) Here tile t sums over `steps[t]` slices, and `steps[t]` may be 0, as with packed sequences of different lengths.
# The load and the MMA role skip a tile without slices, and *do not count it*: it uses no accumulator.
# Write the epilogue.
# It must
#
# 1. walk over the same tiles as the other roles: `tl.program_id(0)`, then every `tl.num_programs(0)`-th, of `tiles`;
# 2. for a tile with slices: wait for its accumulator, load it, give it back on `acc_empties`, and store the tile at row `tile * BM` with `leave`;
# 3. for a tile without: store zeros, with `leave` as well, because the output was never written;
# 4. never write into `staging` while the store before still reads it, and not end before the last store has read it.
#
# The other roles and the kernel stay as they are.
# The accumulators are used in turn: the count-th tile *with slices* of this program has accumulator and phase `place(count, 2)`.


# %% tags=["ex-11.2"]
@triton.jit
def jagged_kernel(a_desc, b_desc, c_desc, steps_ptr, tiles, STAGES: tl.constexpr):
    """C[tile] = A[tile, : steps * BK] B[: steps * BK]; A: [tiles * BM, :], C: [tiles * BM, BN]."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    accs = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    acc_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            jagged_epilogue(c_desc, staging[0], accs, acc_fulls, acc_empties, steps_ptr, tiles)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            jagged_mma(a, b, accs, fulls, empties, acc_fulls, acc_empties, steps_ptr, tiles, STAGES)
        with tlx.async_task(num_warps=1, registers=24):  # load
            jagged_load(a_desc, b_desc, a, b, fulls, empties, steps_ptr, tiles, STAGES)


@triton.jit
def jagged_load(a_desc, b_desc, a, b, fulls, empties, steps_ptr, tiles, STAGES: tl.constexpr):
    """Fill the ring with the slices of all tiles of this program."""
    turn = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        for k in range(tl.load(steps_ptr + tile)):
            slot, phase = place(turn, STAGES)
            tlx.barrier_wait(empties[slot], phase ^ 1)
            row = tile * a_desc.block_shape[0]
            load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], row, k)
            turn += 1


@triton.jit
def jagged_mma(
    a, b, accs, fulls, empties, acc_fulls, acc_empties, steps_ptr, tiles, STAGES: tl.constexpr
):
    """Multiply. A tile without slices is not counted."""
    turn, count = 0, 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        steps = tl.load(steps_ptr + tile)
        if steps > 0:
            which, use = place(count, 2)
            tlx.barrier_wait(acc_empties[which], use ^ 1)
            for k in range(steps):
                slot, phase = place(turn, STAGES)
                free = empties[slot]
                tlx.barrier_wait(fulls[slot], phase)
                tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])
                turn += 1
            tlx.tcgen05_commit(acc_fulls[which])
            count += 1


@triton.jit
def jagged_epilogue(c_desc, staging, accs, acc_fulls, acc_empties, steps_ptr, tiles):
    """Send every tile out: a finished accumulator, or zeros."""
    BM: tl.constexpr = c_desc.block_shape[0]
    BN: tl.constexpr = c_desc.block_shape[1]
    pass  # YOUR CODE


# %%
check("11.2", jagged_kernel)

# %% [markdown]
# ## 11.3 Bug hunt: the second tile hangs
#
# (difficulty 2 of 3, 30 minutes) A launch of one tile is right, and most launches of two tiles hang.
# Some do not: with 2 stages and 4 slices per tile the result is right.
# Run the check, draw the graph in your head, and ask which two roles disagree, and about what.
# One line is wrong.
# Fix it, and leave the rest: three async tasks, one wait per slice on each side of the ring, and each slice copied once; the ring has `STAGES` buffers and uses them all.


# %% tags=["ex-11.3"]
@triton.jit
def second_tile_kernel(a_desc, b_desc, c_desc, tiles, steps, STAGES: tl.constexpr):
    """C = A B by programs that each take several tiles; A: [tiles * BM, steps * BK]."""
    # YOUR CODE: one line below is wrong
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    accs = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    acc_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            count = 0
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                which, use = place(count, 2)
                tlx.barrier_wait(acc_fulls[which], use)
                values = tlx.local_load(accs[which])
                tlx.barrier_arrive(acc_empties[which], 1)
                tlx.async_descriptor_store_wait(0)
                leave(c_desc, staging[0], values, tile * BM)
                count += 1
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            count = 0
            for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):
                which, use = place(count, 2)
                tlx.barrier_wait(acc_empties[which], use ^ 1)
                for k in range(steps):
                    slot, phase = place(k, STAGES)
                    free = empties[slot]
                    tlx.barrier_wait(fulls[slot], phase)
                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])
                tlx.tcgen05_commit(acc_fulls[which])
                count += 1
        with tlx.async_task(num_warps=1, registers=24):  # load
            turn = 0
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                for k in range(steps):
                    slot, phase = place(turn, STAGES)
                    tlx.barrier_wait(empties[slot], phase ^ 1)
                    load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], tile * BM, k)
                    turn += 1


# %%
check("11.3", second_tile_kernel)

# %% [markdown]
# ## 11.4 Bug hunt: right whenever the tensor core is quick
#
# (difficulty 2 of 3, 25 minutes) Here the epilogue was meant to start early.
# On a quick tensor core the numbers are right.
# The report names a load and a product that nothing orders.
# Neither line is wrong: find what should have ordered them.
# Keep three async tasks, one product per slice, and the accumulator handed over by the tensor core itself, once per tile; the ring has `STAGES` buffers and uses them all.


# %% tags=["ex-11.4"]
@triton.jit
def early_kernel(a_desc, b_desc, c_desc, tiles, steps, STAGES: tl.constexpr):
    """C = A B by one program; A: [tiles * BM, steps * BK]."""
    # YOUR CODE: the accumulator below is handed over too early
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    accs = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    acc_empties = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            for tile in range(tiles):
                which, use = place(tile, 2)
                tlx.barrier_wait(acc_fulls[which], use)
                values = tlx.local_load(accs[which])
                tlx.barrier_arrive(acc_empties[which], 1)
                tlx.async_descriptor_store_wait(0)
                leave(c_desc, staging[0], values, tile * BM)
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            for tile in range(tiles):
                which, use = place(tile, 2)
                tlx.barrier_wait(acc_empties[which], use ^ 1)
                for k in range(steps):
                    slot, phase = place(tile * steps + k, STAGES)
                    free = empties[slot]
                    tlx.barrier_wait(fulls[slot], phase)
                    if k == steps - 1:
                        tlx.tcgen05_commit(acc_fulls[which])
                    tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[free])
        with tlx.async_task(num_warps=1, registers=24):  # load
            for tile in range(tiles):
                for k in range(steps):
                    slot, phase = place(tile * steps + k, STAGES)
                    tlx.barrier_wait(empties[slot], phase ^ 1)
                    load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], tile * BM, k)


# %%
check("11.4", early_kernel)

# %% [markdown]
# ## 11.5 Bug hunt: eight warps, one column
#
# (difficulty 3 of 3, 30 minutes) A small network: `out = relu(X W)**2 V`. The hidden layer never leaves the chip: each block of its columns, S, is made in tensor memory, and the *default task of eight warps* turns it into P in bf16, stored over S.
# The kernel was right with four warps.
# With eight it has a race *inside one task*.
# A fence was tried and did not help.
#
# Fix it, and leave the rest: P stays over S (at most 128 columns of tensor memory), both products read tensor memory as given, and two async tasks.
# It is launched with `num_warps=8`; `BM` is 64 or 128, `BH` and `D` are 32 or 64, `K` is 16 or 32.


# %% tags=["ex-11.5"]
@triton.jit
def hidden_kernel(x_desc, w_desc, v_desc, out_ptr, blocks):
    """out [BM, D] = relu(X W)**2 V; X: [BM, K], W: [K, blocks * BH], V: [blocks * BH, D]."""
    # YOUR CODE: two of the eight warps' groups meet in one column below
    BM: tl.constexpr = x_desc.block_shape[0]
    K: tl.constexpr = x_desc.block_shape[1]
    BH: tl.constexpr = w_desc.block_shape[1]
    D: tl.constexpr = v_desc.block_shape[1]
    x = tlx.local_alloc((BM, K), tl.bfloat16, 1)
    w = tlx.local_alloc((K, BH), tl.bfloat16, 1)
    v = tlx.local_alloc((BH, D), tl.bfloat16, 1)
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((BM, BH), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((BM, BH), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    x_full = tlx.alloc_barriers(1)
    loaded = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    p_full = tlx.alloc_barriers(1)
    used = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # activation
            for j in range(blocks):
                tlx.barrier_wait(s_full[0], j & 1)
                hidden = tl.maximum(tlx.local_load(s[0]), 0.0)
                tlx.fence("async_shared")
                tlx.local_store(p[0], (hidden * hidden).to(tl.bfloat16))
                tlx.barrier_arrive(p_full[0], 1)
            tlx.barrier_wait(acc_full[0], 0)
            at = tl.arange(0, BM)[:, None] * D + tl.arange(0, D)[None, :]
            tl.store(out_ptr + at, tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1, registers=24):  # load and mma
            tlx.barrier_expect_bytes(x_full[0], 2 * BM * K)
            tlx.async_descriptor_load(x_desc, x[0], [0, 0], x_full[0])
            tlx.barrier_wait(x_full[0], 0)
            for j in range(blocks):
                if j > 0:
                    tlx.barrier_wait(used[0], (j - 1) & 1)  # the product before has read W, V and P
                tlx.barrier_expect_bytes(loaded[0], 2 * (K * BH + BH * D))
                tlx.async_descriptor_load(w_desc, w[0], [0, j * BH], loaded[0])
                tlx.async_descriptor_load(v_desc, v[0], [j * BH, 0], loaded[0])
                tlx.barrier_wait(loaded[0], j & 1)
                tlx.async_dot(x[0], w[0], s[0], use_acc=False, mBarriers=[s_full[0]])
                tlx.barrier_wait(p_full[0], j & 1)
                tlx.async_dot(p[0], v[0], acc[0], use_acc=j > 0, mBarriers=[used[0]])
            tlx.tcgen05_commit(acc_full[0])


# %%
check("11.5", hidden_kernel)

# %% [markdown]
# ## 11.6 Six broken kernels: what happens?
#
# (difficulty 2 of 3, 25 minutes) No kernel to write.
# `second_tile_kernel` of 11.3, as it should be, is launched on one program with `tiles` tiles of `steps` slices (each at least 1) and a ring of `stages`.
# It is broken in one of six ways:
#
# | fault | what is changed |
# |---|---|
# | `two announcements` | the load role announces A's bytes and B's bytes in two calls of `barrier_expect_bytes` |
# | `kept slices` | the products have no `mBarriers`: nothing arrives on `empties` |
# | `early release` | the epilogue arrives on `acc_empties` *before* it loads the accumulator |
# | `double release` | the epilogue arrives on `acc_empties` twice, after the load |
# | `no store wait` | the epilogue does not wait before it writes into `staging` again; it still waits at the end |
# | `no fence` | `leave` has no fence |
#
# Say what the emulator finds: `"deadlock"`, `"race"`, `"over-arrival"`, `"phase"` (a wait that can come two phases late), `"fence"` or `"nothing"`.
# It depends on the sizes.
# Each of these has *one* finding under all schedules; that was explored, and not guessed.
# The judge runs the broken kernels on sizes that you do not see.


# %% tags=["ex-11.6"]
def findings(tiles, steps, stages):
    """Return {fault: finding} for the six faults."""
    raise NotImplementedError("11.6: not started")  # YOUR CODE


# %%
check("11.6", findings)

# %% [markdown]
# ## Last: sweep your own kernel
#
# `jagged_kernel` of 11.2 is yours.
# Is each of its synchronizations needed, and does the instance below show it?
# Read the map by rows: what would you lose with each?
# Change `STEPS` to `[1, 0, 2]` and look again: which faults are no longer found, and why?
# Nothing is checked here.

# %%
STEPS = [1, 0, 2, 3, 1]


def launch_mine():
    """Launch the jagged kernel on a small instance, the same each time."""
    torch.manual_seed(0)
    a, b = torch.randn(128 * len(STEPS), 64).bfloat16(), torch.randn(64, 32).bfloat16()
    c = torch.empty(128 * len(STEPS), 32)
    given = ((a, [128, 16]), (b, [16, 32]), (c, [128, 32]))
    steps = torch.tensor(STEPS, dtype=torch.int32)
    jagged_kernel[(1,)](
        *(TensorDescriptor.from_tensor(*one) for one in given), steps, len(STEPS), STAGES=2
    )
    return [c]


try:
    swept = sweep.sweep(launch_mine)
    display(plots.sweep_map(swept, title=f"my kernel on {STEPS}"))
except emulator.EmulatorError as error:
    print(f"It does not run yet ({type(error).__name__}): sweep it when its check passes.")
