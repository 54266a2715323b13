# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 A warp-specialized GEMM: hunting deadlocks and races
#
# **Goals.** Build a matrix product (a *GEMM*) out of roles: a ring that feeds the tensor core, a role that multiplies, a role that stores, two accumulators between them, and a loop over tiles that keeps the pipeline full.
# Read a deadlock as a graph and a race as two clocks.
# Break every synchronization of a kernel in turn, and run every schedule of a small launch.
# Know what these tools cannot see.
#
# **Time.** 75 minutes, and 140 for the exercises.
#
# **Needs.** Chapter 10.
# No GPU: the kernels run on the emulator.

# %%
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa import plots
from jfa.emulator import explore, sweep
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline

torch.manual_seed(0)

# %% [markdown]
# ## The mental model: a game of tokens
#
# A ring of buffers is a game with one token per buffer.
# The token says *empty* or *full*.
# The producer may only pick up an empty token; it fills the buffer and puts the token down as full.
# The consumer may only pick up a full one; it reads the buffer and puts the token down as empty.
# A token is in one hand at a time, so a buffer is never overwritten while it is read, nor read before it is filled.
#
# In a kernel each side of a token is a barrier: `fulls[slot]` and `empties[slot]`.
# "Put down" is an arrival, "pick up" is a wait.
# Predict first: a copy takes 3 ticks, a product 2, and several copies may be under way at once.
# How many buffers keep the tensor core busy?


# %%
def token_game(buffers, blocks, copy=3, product=2):
    """Return each buffer's states: filled for `copy` ticks, read for `product` ticks, in order."""
    history, free, busy_until = {f"buffer {n}": [] for n in range(buffers)}, [0] * buffers, 0
    for k in range(blocks):
        slot = k % buffers
        filled = free[slot] + copy
        begin = max(filled, busy_until)
        busy_until = begin + product
        history[f"buffer {slot}"] += [
            plots.Segment(free[slot], copy, f"fill {k}", 3),
            plots.Segment(filled, begin - filled, "full", 2),
            plots.Segment(begin, product, f"read {k}", 0),
        ]
        free[slot] = busy_until
    return {name: [s for s in line if s.length] for name, line in history.items()}


games = {n: token_game(n, 6) for n in (1, 2, 3)}
for n, game in games.items():
    print(f"{n} buffers: {max(s.start + s.length for line in game.values() for s in line)} ticks")
rows = {f"{n} buffers: {row[7:]}": line for n in (2, 3) for row, line in games[n].items()}
plots.segments(rows, title="six blocks through two buffers, and through three", xlabel="ticks")

# %% [markdown]
# A buffer is busy for `copy + product` ticks and used for `product` of them, so `(copy + product) / product` buffers keep the reader busy: 2.5, rounded up to 3.
# With two buffers the reader idles for one tick in five; with three, full buffers wait for the reader.
#
# ## The math, down to shapes
#
# `C = A B` with `A: [M, K]` and `B: [K, N]` in bf16, and `C: [M, N]` in fp32.
# A *tile* of C has `BM x BN` elements.
# It needs `K / BK` *slices*: `[BM, BK]` of A and `[BK, BN]` of B, both through the TMA.
#
# | per slice | BM = BN = 128, BK = 64 |
# |---|---|
# | bytes to shared memory | `2 (BM + BN) BK` = 32,768 |
# | FLOPs | `2 BM BN BK` = 2,097,152 |
# | cycles of the tensor core at 8,192 FLOPs per cycle (a B200's rate in `jfa/emulator/rates.py`) | 256 |
# | cycles until a copy has arrived | about 1,500 in the model |
#
# The last two rows are the whole problem: one copy takes about as long as six products.
# To hide it, copies must be under way while the tensor core works, and the tensor core must work while results leave.

# %%
SHAPE = dict(m=256, n=256, k=512)


def operands(m, n, k):
    """Return A and B in bf16, and an empty C in fp32."""
    return torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)


def boxes(a, b, c, bm=128, bn=128, bk=64):
    """Return descriptors of A, B and C whose boxes are slices and tiles."""
    return [
        TensorDescriptor.from_tensor(a, [bm, bk]),
        TensorDescriptor.from_tensor(b, [bk, bn]),
        TensorDescriptor.from_tensor(c, [bm, bn]),
    ]


def timed(launch):
    """Return the timeline of a launch, modelled with the rates of a B200."""
    with emulator.options(policy="timed", rates=B200, trace=True):
        launch()
    return Timeline.of(emulator.last())


a, b, c = operands(**SHAPE)
wanted = a.double() @ b.double()

# %% [markdown]
# ## Version 1: a straight line
#
# One program per tile, and one step after the other: copy a slice, wait, multiply, wait, and at the end store the tile.
# Two helpers are shared by all versions: `load_slice` starts the two copies of a slice on *one* barrier and announces the bytes of both; `leave` sends a tile out through shared memory.
# The fence makes what threads wrote visible to the TMA (chapter 10, section 6).


# %%
@triton.jit
def load_slice(a_desc, b_desc, a, b, full, row, column, k):
    """Start the copies of slice k of A and B on one barrier."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    tlx.barrier_expect_bytes(full, 2 * (BM + BN) * BK)
    tlx.async_descriptor_load(a_desc, a, [row, k * BK], full)
    tlx.async_descriptor_load(b_desc, b, [k * BK, column], full)


@triton.jit
def leave(c_desc, staging, values, row, column):
    """Store a tile: registers, shared memory, TMA."""
    tlx.local_store(staging, values)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(c_desc, staging, [row, column])


@triton.jit
def straight_line(a_desc, b_desc, c_desc, steps):
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    a = tlx.local_alloc((BM, BK), tl.bfloat16, 1)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, 1)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    for k in range(steps):
        load_slice(a_desc, b_desc, a[0], b[0], full[0], row, column, k)
        tlx.barrier_wait(full[0], k & 1)
        tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, mBarriers=[done[0]])
        tlx.barrier_wait(done[0], k & 1)
    leave(c_desc, staging[0], tlx.local_load(acc[0]), row, column)
    tlx.async_descriptor_store_wait(0)


timelines = {"1 straight line": timed(lambda: straight_line[(2, 2)](*boxes(a, b, c), 512 // 64))}
print("largest error:", (c - wanted).abs().max().item())
print(f"modelled cycles per tile: {timelines['1 straight line'].cycles:,.0f}")

# %% [markdown]
# ## Version 2: a producer and a ring
#
# A second role runs ahead and fills the ring.
# The product itself gives the buffer back: `mBarriers=[empties[slot]]` is an arrival when the product is *done*, not when it was issued.
# One more arrival is needed when *all* products are done: `tcgen05_commit` arrives after everything this task has issued.
#
# A *turn* is one use of the ring: turn `k` uses slot `k % STAGES`, for the `k // STAGES`-th time, so its phase is the parity of that number.


# %%
@triton.jit
def place(turn, STAGES: tl.constexpr):
    """Return (slot, phase) of a turn of a ring."""
    return turn % STAGES, (turn // STAGES) & 1


@triton.jit
def ring(a_desc, b_desc, c_desc, steps, STAGES: tl.constexpr):
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
            for k in range(steps):
                slot, phase = place(k, STAGES)
                tlx.barrier_wait(fulls[slot], phase)
                tlx.async_dot(a[slot], b[slot], acc[0], use_acc=k > 0, mBarriers=[empties[slot]])
            tlx.tcgen05_commit(done[0])
            tlx.barrier_wait(done[0], 0)
            leave(c_desc, staging[0], tlx.local_load(acc[0]), row, column)
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # load
            for k in range(steps):
                slot, phase = place(k, STAGES)
                tlx.barrier_wait(empties[slot], phase ^ 1)
                load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], row, column, k)


c.fill_(float("nan"))
timelines["2 ring of 4"] = timed(lambda: ring[(2, 2)](*boxes(a, b, c), 512 // 64, STAGES=4))
print("largest error:", (c - wanted).abs().max().item())
print(f"modelled cycles per tile: {timelines['2 ring of 4'].cycles:,.0f}")

# %% [markdown]
# ## Version 3: three roles, two accumulators
#
# While a tile is stored, the tensor core has nothing to do: its accumulator is being read.
# A second accumulator and a third role fix that: the MMA role fills one accumulator while the *epilogue* reads the other.
# These two roles play the token game too; their buffers are in tensor memory.
#
# Here each program makes two tiles, so each accumulator is used once and need not be given back.


# %%
@triton.jit
def two_accumulators(a_desc, b_desc, c_desc, steps, STAGES: tl.constexpr):
    BM: tl.constexpr = a_desc.block_shape[0]
    BK: tl.constexpr = a_desc.block_shape[1]
    BN: tl.constexpr = b_desc.block_shape[1]
    row = tl.program_id(0) * BM
    a = tlx.local_alloc((BM, BK), tl.bfloat16, STAGES)
    b = tlx.local_alloc((BK, BN), tl.bfloat16, STAGES)
    staging = tlx.local_alloc((BM, BN), tl.float32, 1)
    accs = tlx.local_alloc((BM, BN), tl.float32, 2, tlx.storage_kind.tmem)
    fulls = tlx.alloc_barriers(STAGES)
    empties = tlx.alloc_barriers(STAGES)
    acc_fulls = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            for t in range(2):
                tlx.barrier_wait(acc_fulls[t], 0)
                leave(c_desc, staging[0], tlx.local_load(accs[t]), row, t * BN)
                tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            for t in range(2):
                for k in range(steps):
                    slot, phase = place(t * steps + k, STAGES)
                    tlx.barrier_wait(fulls[slot], phase)
                    free = empties[slot]
                    tlx.async_dot(a[slot], b[slot], accs[t], use_acc=k > 0, mBarriers=[free])
                tlx.tcgen05_commit(acc_fulls[t])
        with tlx.async_task(num_warps=1, registers=24):  # load
            for t in range(2):
                for k in range(steps):
                    slot, phase = place(t * steps + k, STAGES)
                    tlx.barrier_wait(empties[slot], phase ^ 1)
                    load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], row, t * BN, k)


c.fill_(float("nan"))
timelines["3 two accumulators"] = timed(
    lambda: two_accumulators[(2,)](*boxes(a, b, c), 512 // 64, STAGES=4)
)
print("largest error:", (c - wanted).abs().max().item())
print(f"modelled cycles per tile: {timelines['3 two accumulators'].cycles / 2:,.0f}")

# %% [markdown]
# ## Version 4: persistent
#
# One program per SM, and each walks over its share of the tiles.
# Nothing drains between two tiles: the load role is already copying the next one.
# Two things change, and both are where the bugs are:
#
# - **Turns are counted through all tiles.** The ring does not know where a tile ends. A role that restarts its count at each tile disagrees with the barriers, which do not restart.
# - **Accumulators come back.** The MMA role waits for `acc_empties`, the epilogue arrives there, and a second count says which accumulator it is and in which phase.
#
# Each role is a function of its own now, and the entry is a list of roles.


# %%
@triton.jit
def load_role(a_desc, b_desc, a, b, fulls, empties, tiles, columns, steps, STAGES: tl.constexpr):
    """Fill the ring with the slices of all tiles of this program."""
    BM: tl.constexpr = a_desc.block_shape[0]
    BN: tl.constexpr = b_desc.block_shape[1]
    turn = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile // columns * BM, tile % columns * BN
        for k in range(steps):
            slot, phase = place(turn, STAGES)
            tlx.barrier_wait(empties[slot], phase ^ 1)
            load_slice(a_desc, b_desc, a[slot], b[slot], fulls[slot], row, column, k)
            turn += 1


@triton.jit
def mma_role(
    a, b, accs, fulls, empties, acc_fulls, acc_empties, tiles, steps, STAGES: tl.constexpr
):
    """Multiply: a ring of slices in, two accumulators out."""
    turn, count = 0, 0
    for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):
        which, use = place(count, 2)
        tlx.barrier_wait(acc_empties[which], use ^ 1)
        for k in range(steps):
            slot, phase = place(turn, STAGES)
            tlx.barrier_wait(fulls[slot], phase)
            tlx.async_dot(a[slot], b[slot], accs[which], use_acc=k > 0, mBarriers=[empties[slot]])
            turn += 1
        tlx.tcgen05_commit(acc_fulls[which])
        count += 1


@triton.jit
def epilogue_role(c_desc, staging, accs, acc_fulls, acc_empties, tiles, columns):
    """Send finished tiles out. The accumulator is free once it is in registers."""
    BM: tl.constexpr = c_desc.block_shape[0]
    BN: tl.constexpr = c_desc.block_shape[1]
    count = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        which, use = place(count, 2)
        tlx.barrier_wait(acc_fulls[which], use)
        values = tlx.local_load(accs[which])
        tlx.barrier_arrive(acc_empties[which], 1)
        tlx.async_descriptor_store_wait(0)  # the tile before has left the staging buffer
        leave(c_desc, staging, values, tile // columns * BM, tile % columns * BN)
        count += 1
    tlx.async_descriptor_store_wait(0)


@triton.jit
def persistent(
    a_desc, b_desc, c_desc, tiles, columns, steps, STAGES: tl.constexpr, LESS: tl.constexpr = 0
):
    """C = A B by one program per SM. LESS: so many tiles fewer for the load role (a mistake)."""
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
            epilogue_role(c_desc, staging[0], accs, acc_fulls, acc_empties, tiles, columns)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            mma_role(a, b, accs, fulls, empties, acc_fulls, acc_empties, tiles, steps, STAGES)
        with tlx.async_task(num_warps=1, registers=24):  # load
            load_role(a_desc, b_desc, a, b, fulls, empties, tiles - LESS, columns, steps, STAGES)


c.fill_(float("nan"))
timelines["4 persistent"] = timed(
    lambda: persistent[(1,)](*boxes(a, b, c), 4, 2, 512 // 64, STAGES=4)
)
print("largest error:", (c - wanted).abs().max().item())
print(f"modelled cycles per tile: {timelines['4 persistent'].cycles / 4:,.0f}")
plots.timelines(timelines)

# %% [markdown]
# Read the MMA line of each: isolated products in version 1, one block of products per tile in version 2, and no gap between tiles in version 4.
# In the model a tile costs 18,332 cycles, then 7,836, 6,517 and 5,865.
# The rest is the wait for copies: a tile takes 8 slices of 256 cycles, and the model's TMA delivers a slice about every 650 cycles.
# Predict before you try it (last section): do more stages help?
# Does a larger tile?
#
# ## Reading a deadlock
#
# From here on a small instance is enough: tiles of 128 x 32, slices of 32, and as many tiles and slices as the bug needs.
# `broken` runs it with one synchronization broken.
# `drop` leaves it out, and `flip` waits for the other parity.


# %%
def small(tiles, steps=2, stages=2, programs=1, **options):
    """Launch the persistent GEMM on `tiles` tiles of `steps` slices; return its output."""
    a, b, c = operands(128 * tiles, 32, 32 * steps)
    persistent[(programs,)](
        *boxes(a, b, c, bn=32, bk=32), tiles, 1, steps, STAGES=stages, **options
    )
    return c


def launch_of(tiles, steps=2, stages=2):
    """Return a launch without arguments, the same each time, for `sweep` and `explore`."""

    def launch():
        torch.manual_seed(1)
        return [small(tiles, steps, stages)]

    return launch


def broken(how, kind, barriers, tiles=3, **options):
    """Return the emulator's error when operations `kind` on these barriers are broken."""

    def fault(operation, name, task, where):
        return how if operation == kind and name.startswith(barriers) else None

    try:
        with emulator.options(fault=fault, **options):
            small(tiles)
    except emulator.EmulatorError as error:
        return error


# %% [markdown]
# The most common deadlock of all: the producer waits for `phase`, not for `phase ^ 1`.
# On a fresh barrier parity 0 holds, so it waits until a buffer is emptied that has never been filled.

# %%
stuck = broken("flip", "barrier_wait", "empties")
print(stuck)

# %% [markdown]
# A report of five lines per task is hard to read once there are six roles.
# Draw it: from each task to the barrier it waits for, and from each barrier to the task that must arrive there next.
# The emulator takes the second kind of arrow from the tasks that have arrived there before; if none has, from the tasks whose code contains such an arrival (dashed).

# %%
plots.wait_graph(stuck, title="the producer waits for `phase`: no role can begin")

# %% [markdown]
# The bold arrows form a **cycle**: the load role waits for the MMA role, which waits for the load role.
# The epilogue waits too, but it is not part of the cycle: fix the cycle, and it goes on.
# **Look for the cycle first, then ask which of its waits should have passed.** Here it is the one on a barrier in phase 0 that no task could have completed.
#
# Not every deadlock has a cycle.
# In the next one the roles disagree about the number of tiles: the load role has one fewer.

# %%
try:
    small(3, LESS=1)
except emulator.EmulatorError as error:
    stuck = error
plots.wait_graph(stuck, title="the load role has ended one tile too early")

# %% [markdown]
# The chain ends at a task that **has ended**.
# The arrival will never come: a loop has too few turns, or an arrive is skipped by a branch.
#
# | the graph | look for |
# |---|---|
# | a cycle, and one of its barriers was never used | a wait on the wrong parity at the start |
# | a cycle of barriers that have been used | a phase that is not carried over; a missing arrival |
# | a chain that ends at an ended task | loops of different length; a role that returns early |
# | a chain that ends where no task's code arrives | an arrive on the wrong barrier, or none |
#
# ## Reading a race
#
# A race is two accesses to one place, at least one of them a write, that nothing orders.
# "Nothing orders" has an exact meaning.
# The emulator keeps a *vector clock* per task and per engine: for every other task and engine, the number of its steps that are known to have happened.
# Each arrival ends a step of the task that arrives.
# An arrival stores the task's clock on the barrier, and a wait merges the stored clock into the waiter's own.
# Access 1 is ordered before access 2 if the clock at access 2 includes the step of access 1.
#
# Drop the MMA role's wait for `acc_empties`, and draw the two clocks of the race.

# %%
race = broken("drop", "barrier_wait", "acc_empties")
print(race)
plots.race_clocks(race)

# %% [markdown]
# Read the yellow line.
# The epilogue's load belongs to its step 2 (the star on its own line), and the product knows 0 steps of the epilogue.
# No chain of barriers leads from the load to the product, so in some run the product comes first.
# In this run it did not, and the numbers were right.
# That is why the emulator looks for races in clocks and not in results.
#
# **The likely mistake:** changing the line that the report names.
# The two lines are where the accesses are; the fault is the *missing order between them*, often in a third place.
#
# ## Version 5: break everything, read the table
#
# One broken synchronization shows one report.
# `sweep.sweep` breaks all of them, one at a time, and notes how each was found.
# A kernel is well tested when every broken variant is found.

# %%
result = sweep.sweep(launch_of(tiles=3))
plots.sweep_map(result, title="three tiles of two slices")

# %% [markdown]
# Read it by columns.
# Without an *arrival* a task waits forever: a deadlock.
# Without a *wait* a task goes on too early: a race, or a value that was never written.
# A flipped parity does either: on `empties` it blocks the first turn, on `fulls` it lets the first turn through.
# A missing fence is neither: the order is right, but the TMA may not see what the threads wrote.
#
# Now the same sweep on fewer tiles.
# Predict first: which synchronizations are never needed if there are only two tiles?

# %%
fewer = {tiles: sweep.sweep(launch_of(tiles)) for tiles in (1, 2)}
for tiles, found in fewer.items():
    print(f"{tiles} tiles: {len(found.mutants)} broken kernels, {len(found.clean)} not found")
plots.sweep_map(fewer[2], title="two tiles: three faults are not found")

# %% [markdown]
# With two accumulators and two tiles no role ever waits for an accumulator to come back, so what gives it back is not needed.
# **A variant that is not found is either superfluous, or the test is too small to need it.** A sweep tells you which tests your kernel is missing.
#
# ## Version 6: all schedules, not three of them
#
# A sweep runs each variant under a few schedules: copies at once, copies late, two random ones.
# How many are there?
# `explore` runs a small launch once per *class*: two schedules are in one class if they differ only in the order of steps that commute.
# The GEMM of two tiles and three slices:

# %%
proof = explore.explore(launch_of(tiles=2, steps=3))
print(proof)

# %% [markdown]
# There is one class.
# Every schedule of this instance is equivalent to the one that ran, so that run is a proof: no deadlock, no race and the same numbers, whatever takes how long.
# The reason: no wait of these roles depends on which task comes first, so the code fixes the order of all steps that do not commute.
# Without classes the search would run every order of steps separately; here it stops after 100 of them:


# %%
def once(control):
    """Run one schedule of the GEMM, chosen by the search."""
    with emulator.options(control=control):
        launch_of(tiles=2, steps=3)()
    return explore.Outcome(explore.OK, control.token)


print(explore.search(once, executions=100, reduce=False))

# %% [markdown]
# Take the three faults that two tiles do not show, and ask again.

# %%
for mutant in fewer[2].clean:
    found = {tiles: explore.mutant(mutant, launch_of(tiles)) for tiles in (2, 3)}
    words = {t: "proved equal" if e.proved else e.first.kind for t, e in found.items()}
    print(f"{mutant.how:5} {mutant.site.text:46} {words}")

# %% [markdown]
# At two tiles they are *proved* harmless, and at three they are not.
# "Proved" always means: for these shapes and this grid.
#
# A broken kernel has more classes, because unordered steps may come in either order.
# So one mistake can show in several ways:

# %%
flipped = next(m for m in result.mutants if m.how == "flip" and "fulls[slot]" in m.site.text)
faces = explore.mutant(flipped, launch_of(tiles=3), stop=False)
print(faces)

# %% [markdown]
# Undefined values, races, waits two phases late, and one schedule in which every task waits: all from one flipped bit.
# If two runs of yours report different errors, look for one fault first.
#
# The first bad schedule is a list of choices.
# It replays exactly:


# %%
def flip(kind, name, task, where):
    """Return the fault of that variant, for the emulator."""
    return "flip" if flipped.site.hit(kind, where) else None


try:
    with emulator.options(policy=faces.first.schedule, fault=flip):
        launch_of(tiles=3)()
except emulator.EmulatorError as error:
    print(f"{type(error).__name__}: {error.summary}")

# %% [markdown]
# ## Eight warps are not one
#
# So far we treated a task as one thread of control.
# In fact it has 4 or 8 warps, which run independently until something synchronizes them.
# With 8 warps this matters in tensor memory.
# Each warp reaches only 32 of the 128 lanes, so two groups of four warps share the lanes and split the *columns* of every tile.
# Take scores S in fp32 and store P in bf16 over them, as attention does.
# P needs half the columns:

# %%
S = [plots.Segment(0, 64, "S: loaded by warps 0-3", 0), plots.Segment(64, 64, "by warps 4-7", 1)]
P = [
    plots.Segment(0, 32, "P: stored by\nwarps 0-3", 0),
    plots.Segment(32, 32, "stored by\nwarps 4-7", 1),
]
plots.segments(
    {"before": S, "after": [*P, plots.Segment(64, 64, "free", None)]},
    title="128 columns of S, and P over them: columns 32 to 63 change hands",
    xlabel="column of tensor memory",
    ticks=range(0, 129, 32),
)

# %% [markdown]
# Warps 4-7 store into columns that warps 0-3 still load from, unless something synchronizes the two groups in between.
# Predict which of these four runs is clean: four warps, eight warps, eight with a fence, eight with `tl.debug_barrier()`.


# %%
@triton.jit
def over_itself(x_ptr, BETWEEN: tl.constexpr, N: tl.constexpr):
    """Load S [128, N] fp32 from tensor memory and store its squares in bf16 over it."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, N), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(tlx.reuse_group(s, p, group_type=tlx.reuse_group_type.shared))
    at = tl.arange(0, 128)[:, None] * N + tl.arange(0, N)[None, :]
    tlx.local_store(s[0], tl.load(x_ptr + at))
    values = tlx.local_load(s[0])
    if BETWEEN == "fence":
        tlx.fence("async_shared")
    if BETWEEN == "barrier":
        tl.debug_barrier()
    tlx.local_store(p[0], (values * values).to(tl.bfloat16))


for warps, between in ((4, ""), (8, ""), (8, "fence"), (8, "barrier")):
    try:
        over_itself[(1,)](torch.randn(128, 128), between, 128, num_warps=warps)
        print(f"{warps} warps, {between or 'nothing'} between: nothing found")
    except emulator.EmulatorError as error:
        print(f"{warps} warps, {between or 'nothing'} between: {error.summary}")
        eight = error
print()
print(eight)

# %% [markdown]
# A fence orders memory accesses, not warps.
# A wait does not synchronize the warps of a task either: each warp waits for itself.
# These do: `tl.debug_barrier()`, a named barrier of all threads, an arrive, a reduction over the columns.
# A public kernel had this fault: its authors report wrong results in 13 % of the runs on a B200 (issue 1992, see the sources).
#
# ## What no tile-level tool sees
#
# The emulator orders *buffers and barriers*.
# Global memory between programs is another matter: it knows atomics, but a plain store and a plain load there are not steps of its schedules.
# The next kernel splits K between two programs.
# Each takes a ticket, and the program that comes second adds the other's half.
# It is wrong: the ticket is taken *before* the half is stored, so the second may read a half that is not there.


# %%
@triton.jit
def split_k(a_ptr, b_ptr, half_ptr, tickets_ptr, c_ptr, K: tl.constexpr, N: tl.constexpr):
    """C [N, N] = A [N, 2 K] B [2 K, N] by two programs."""
    half = tl.program_id(0)
    i, j, k = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :], half * K + tl.arange(0, K)
    mine = tl.dot(tl.load(a_ptr + i * 2 * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + j))
    if tl.atomic_add(tickets_ptr, 1) == 0:
        tl.store(half_ptr + i * N + j, mine)
    else:
        tl.store(c_ptr + i * N + j, mine + tl.load(half_ptr + i * N + j))


def launch_split():
    torch.manual_seed(2)
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    out, half, tickets = torch.zeros(16, 16), torch.zeros(16, 16), torch.zeros(1, dtype=torch.int32)
    split_k[(2,)](a, b, half, tickets, out, K=16, N=16)
    return [out]


print(explore.explore(launch_split, max_ctas=2))

# %% [markdown]
# All schedules are "ok", and the kernel is wrong on a GPU.
# Know the limits of your tools:
#
# | not seen here | who sees it |
# |---|---|
# | plain loads and stores of global memory between programs | reading; `compute-sanitizer` on a GPU |
# | what single threads of a warp do differently | reading; the sanitizers |
# | bank conflicts, register spills | the profiler; `jfa compile` |
#
# ## Your own kernel
#
# Put a kernel into a file, with a function that launches a *small* instance and returns its outputs: `launch()` in `my_gemm.py`.
# Then
#
# ```
# jfa emulator sweep my_gemm.py:launch
# jfa emulator explore my_gemm.py:launch
# ```
#
# Small means: every ring goes round at least twice, every accumulator comes back at least once, and there are two programs if you use atomics.
# If the sweep leaves a variant unfound, make the instance larger before you call it superfluous.
#
# ## Summary
#
# * A role is a task with one job; rings of buffers with `fulls` and `empties` connect the roles.
# * Two accumulators let the MMA role start a tile while the epilogue stores the one before.
# * A persistent kernel loops over tiles in every role; the counters of its rings continue from tile to tile.
# * A deadlock is a circle of waits; a race is two accesses that no chain of barriers orders, even if they did not collide in this run.
# * A sweep tells which synchronization the tests need; `explore` runs every class of schedules of a small launch.
# * Eight warps are two groups of four that run apart until an arrive or a row maximum joins them; a wait or a fence does not.
#
# ## Exercises
#
# Open [exercises/11_warp_specialized_gemm.py](../exercises/11_warp_specialized_gemm.py).
#
# | | what | difficulty | minutes |
# |---|---|---|---|
# | 11.1 | the producer of a ring with two operands | 1 | 10 |
# | 11.2 | an epilogue with two accumulators, for tiles that may be empty | 3 | 20 |
# | 11.3 | bug hunt: the second tile hangs | 2 | 30 |
# | 11.4 | bug hunt: right whenever the tensor core is quick | 2 | 25 |
# | 11.5 | bug hunt: eight warps, one column | 3 | 30 |
# | 11.6 | six broken synchronizations: say what each does before you run it | 2 | 25 |
#
# The last cell there sweeps the kernel that you wrote in 11.2.
#
# ## Checkpoint
#
# 1. Version 2 gives a buffer back with `mBarriers=[empties[slot]]`. What breaks if the consumer calls `barrier_arrive(empties[slot], 1)` after `async_dot` instead?
# 2. Why does the MMA role count tiles in `count` and not use the tile's number?
# 3. Why is a kernel whose roles meet only at unconditional waits one class of schedules? Name something that makes it several.
# 4. A sweep of your kernel finds all variants but one: a wait on `acc_empties`. What are the two explanations, and how do you tell them apart?
# 5. Which of these joins the warps of a task: a wait, a fence, an arrive, a row maximum?
#
# <details><summary>Answers</summary>
#
# 1. The arrival says "issued". The producer overwrites a buffer that the tensor core still reads: a race.
# 2. With several programs the tiles of one are 0, 2, 4, ...: their numbers say nothing about how often *this* program has used an accumulator.
# 3. Waits and arrivals of one phase commute: the phase ends with the last of them in any order. An atomic that hands out work, a poll, or two tasks that take turns arriving at one barrier create several.
# 4. The wait is superfluous, or the instance never has more tiles than accumulators. Explore the variant at a larger instance.
# 5. An arrive and a row maximum.
#
# </details>
#
# ## Try this
#
# - `persistent` with `STAGES=2` and 6 on the timeline, then with tiles of 128 x 256. Which of the two brings the products closer together, and why?
# - Move `barrier_arrive(acc_empties[which], 1)` before `local_load(accs[which])`. Which report do you get, and which lines does it name?
# - Sweep `ring` (it needs a launch of its own). Which of its waits can be dropped when `steps <= STAGES`?
# - Give `split_k` its store before the ticket, and room for both halves. Can `explore` tell the two apart? What would it need to know?
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | the producer waits for `phase` | Reading a deadlock |
# | roles that disagree about the number of turns | Reading a deadlock |
# | an accumulator used again without a wait: right numbers, and a race | Reading a race |
# | a test too small to need its barriers | Version 5 |
# | "it ran on three schedules" | Version 6 |
# | a fence or a wait mistaken for a barrier of warps | Eight warps are not one |
# | trusting a tool beyond its limits | What no tile-level tool sees |
#
# ## What differs on a real GPU
#
# - A deadlock is a process that does not end. There is no graph; you build it from a debugger's list of where each warp is.
# - A race shows in some runs only. The public 8-warp fault gave wrong numbers in 13 % of the runs.
# - The cycles above are modelled, with the rates in `jfa/emulator/rates.py`. A real GEMM takes larger tiles, two CTAs per product and more stages.
#
# ## Verified here, and not
#
# | what | how |
# |---|---|
# | all versions give the product within fp32 rounding | run above, on the emulator |
# | every fault of version 4 is found; the proof of two tiles and three slices | run above |
# | version 4 compiles for sm_100 | fbtriton 3.7.4, next cell |
# | times on a B200 | not run |

# %%
from jfa.compiled import compile_kernel

types = {"a_desc": "tensordesc<bf16[128, 64]>", "b_desc": "tensordesc<bf16[64, 128]>"}
types |= {"c_desc": "tensordesc<fp32[128, 128]>", "tiles": "i32", "columns": "i32", "steps": "i32"}
report = compile_kernel(persistent, types, dict(STAGES=4, LESS=0), arch=100)
print(
    f"shared memory {report.smem:,} B, tensor memory {report.tmem} columns, "
    f"registers {[role.registers for role in report.roles]}, spilled bytes {report.spill_stores}"
)

# %% [markdown]
# ## Sources
#
# - TLX in fbtriton 3.7.4 (`triton.language.extra.tlx`). Its tutorial `blackwell-gdpa.py` has two places marked FIXME where the epilogue loads an accumulator without a wait for its last product.
# - facebookexperimental/triton, issue 1992: P over S in one 8-warp task, 13 % wrong runs on a B200. Pull request 2292: a remote store before the peer CTA has started (chapter 15).
# - Triton's ConSan (pull requests 9046 and 10212) checks kernels on a GPU with the same idea of clocks.
# - cute2promela (metaworld.me, 2026-05-27): CuTe kernels as Promela, absence of deadlocks by the model checker SPIN.
# - C. Flanagan and P. Godefroid, "Dynamic partial-order reduction for model checking software", POPL 2005: the idea behind `explore`.
# - The rates of the model: `jfa/emulator/rates.py`.
#
# Next: [12 The Blackwell forward](12_blackwell_forward.py).
