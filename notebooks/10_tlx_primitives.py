# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 TLX primitives
#
# **Goals.** After this chapter you
# * know the machine under a warp-specialized kernel: shared and tensor memory, the TMA, the tensor core, barriers,
# * can use each from TLX, the Triton extension that names them, and can count arrivals and phases by hand,
# * have broken each on purpose, read the report, and let a *sweep* show which waits, arrivals and fences a kernel needs.
#
# **Time** 100 minutes to read, 145 for the exercises.
# **You need** chapter 03.
# No GPU is needed: the course's emulator runs TLX kernels on a CPU, which Triton's own interpreter cannot.

# %%
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa import plots
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline

torch.manual_seed(0)


def attempt(launch, **options):
    """Run a launch and print the emulator's report, or that there is none."""
    try:
        with emulator.options(**options):
            launch()
        print("nothing found")
    except emulator.EmulatorError as error:
        print(f"{type(error).__name__}: {error}")


# %% [markdown]
# ## The machine on one page
#
# A GPU has many *streaming multiprocessors* (SMs): 148 on a B200.
# One block of threads, a *CTA* (what Triton calls a program), lives on one SM.
# The L2 cache and global memory are outside, shared by all SMs.

# %%
LANES = "32 fp32 lanes\n4 exp2 units"
MACHINE = {  # heading -> ((x, y, width, height), words, color)
    "one SM": ((0, 1.3, 10.4, 4.3), "", 5),
    "warps": (
        (0.2, 3.4, 6.4, 1.8),
        "32 threads each, up to 32 warps in a CTA; registers 256 KB, at most 255 per thread",
        0,
    ),
    **{f"scheduler {i}": ((0.35 + 1.55 * i, 3.5, 1.4, 0.9), LANES, 0) for i in range(4)},
    "tensor memory (TMEM)": (
        (7.2, 3.4, 3.0, 1.8),
        "128 lanes x 512 columns\nof 4 bytes: accumulators",
        4,
    ),
    "plain loads": ((0.2, 1.5, 1.6, 1.3), "tl.load, tl.store:\nL1 cache", 3),
    "TMA": ((2.1, 1.5, 1.7, 1.3), "copies boxes,\nasynchronous", 1),
    "shared memory (SMEM)": (
        (4.2, 1.5, 2.4, 1.3),
        "228 KB, 128 bytes per clock:\ntiles of A and B, barriers",
        2,
    ),
    "tensor core": (
        (7.2, 1.5, 3.0, 1.3),
        "D = A B + D, asynchronous\nA: SMEM or TMEM, B: SMEM, D: TMEM",
        1,
    ),
    "L2 and global memory": ((0, 0.2, 10.4, 0.6), "", 6),
}
LINKS = [
    ("warps", "plain loads"),
    ("plain loads", "L2 and global memory"),
    ("TMA", "L2 and global memory"),
    ("TMA", "shared memory (SMEM)"),
    ("shared memory (SMEM)", "warps"),
    ("shared memory (SMEM)", "tensor core", "->"),
    ("tensor memory (TMEM)", "tensor core"),
    ("tensor memory (TMEM)", "warps"),
]
plots.blocks(MACHINE, LINKS, title="a Blackwell GPU: who computes, what remembers, who moves data")

# %% [markdown]
# | term | what it is |
# |---|---|
# | **warp** | 32 threads that run in step. Four warps form a *warp group*. |
# | **SMEM** | Fast memory of one SM. A kernel splits it into named buffers. |
# | **TMEM** | Blackwell's memory for accumulators. The tensor core writes there; threads load from it. |
# | **TMA** | The copy engine. One thread hands it a *descriptor* and coordinates; it moves a whole box. |
# | **tensor core** | Multiplies tiles. On Blackwell one thread starts a product and does not wait for it. |
# | **mbarrier** | A counter in SMEM. Engines and threads arrive; others wait for its *phase* to complete. |
#
# The tensor core only *reads* shared memory; its results go to tensor memory.
# A plain load goes through the registers of the threads that ask, a TMA copy does not.
# The numbers in the picture are a B200's; `jfa/emulator/rates.py` has the rates with their sources, NVIDIA's CUDA programming guide the sizes.
#
# The TMA and the tensor core work *concurrently* with your threads.
# The order of the lines in your program does not say when they finish: only barriers do.
# Most bugs in this chapter come from forgetting that.

# %% [markdown]
# ## 1. Buffers
#
# `tlx.local_alloc(shape, dtype, count)` makes `count` buffers of one shape; `buffers[i]` is a view of one.
# `local_store` and `local_load` move a block between registers and a buffer.
# A view can be transposed without moving a byte.


# %%
@triton.jit
def transpose_in_smem(x_ptr, out_ptr, N: tl.constexpr, FIRST: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tiles = tlx.local_alloc((N, N), tl.float32, 2)
    tlx.local_store(tiles[FIRST], tl.load(x_ptr + at))
    tl.store(out_ptr + at, tlx.local_load(tlx.local_trans(tiles[0])))


x, out = torch.randn(32, 32), torch.empty(32, 32)
transpose_in_smem[(1,)](x, out, N=32, FIRST=0)
print("largest error:", (out - x.t()).abs().max().item())

# %% [markdown]
# **Broken.** Fill buffer 1 and read buffer 0.
# On a GPU you get whatever an earlier kernel left there: perhaps your own right numbers from the last run.
# The emulator fills fresh memory with poison.
# Predict first: which of the two lines will the report name?

# %%
attempt(lambda: transpose_in_smem[(1,)](x, out, N=32, FIRST=1))

# %% [markdown]
# ## 2. A TMA load and its barrier
#
# The copy engine needs a *descriptor*: base address, shape, strides, and the box it moves.
# The host makes one from a tensor.
# In the kernel:
#
# 1. `barrier_expect_bytes(bar, n)` tells the barrier that `n` bytes will come, and counts as one arrival;
# 2. `async_descriptor_load(desc, buffer, [row, column], bar)` starts the copy and returns at once;
# 3. `barrier_wait(bar, 0)` returns when phase 0 of the barrier has completed: one arrival, and all the bytes.


# %%
@triton.jit
def tma_copy(x_desc, out_ptr, N: tl.constexpr, BYTES: tl.constexpr, WAIT: tl.constexpr):
    tile = tlx.local_alloc((N, N), tl.float32, 1)
    full = tlx.alloc_barriers(1, arrive_count=1)
    tlx.barrier_expect_bytes(full[0], BYTES)
    tlx.async_descriptor_load(x_desc, tile[0], [0, 0], full[0])
    if WAIT:
        tlx.barrier_wait(full[0], 0)
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tlx.local_load(tile[0]))


def run_tma_copy(nbytes=32 * 32 * 4, wait=True):
    tma_copy[(1,)](TensorDescriptor.from_tensor(x, [32, 32]), out, N=32, BYTES=nbytes, WAIT=wait)


run_tma_copy()
print("largest error:", (out - x).abs().max().item())

# %% [markdown]
# **Broken twice.** First the wrong number of bytes: two bytes per element, a habit from bf16.
# Then no wait.
# Predict what each report says before you run the cell.

# %%
attempt(lambda: run_tma_copy(nbytes=32 * 32 * 2))
print()
attempt(lambda: run_tma_copy(wait=False))

# %% [markdown]
# The second one is a *race*: two accesses to one place, at least one of them a write, and no barrier between them.
# The emulator does not need the copy to be late to see it.
# For each task and each engine it tracks which steps of the others must have happened before, and reports two accesses that no barrier orders.
# A race is found even on the run where the numbers come out right.

# %% [markdown]
# ## 3. Phases: the rule of parities
#
# A barrier is used again and again.
# It counts phases 0, 1, 2, ...; a phase completes when all its arrivals and bytes are in, and the next one begins.
# A wait names only a parity, 0 or 1.
# The rule in one line:
#
# > With phase n in progress, `barrier_wait(bar, p)` passes if and only if p ≠ n mod 2.
#
# So a fresh barrier, with phase 0 in progress, holds a wait for 0 and passes a wait for 1.
# That is how a producer gets through its first turn without a special case: it waits for the phase "before the first".

# %%
PASSES = ("wait(0) holds\nwait(1) passes", "wait(0) passes\nwait(1) holds")
plots.segments(
    {
        "barrier": [
            plots.Segment(n, 1, f"phase {n} in progress\n{PASSES[n % 2]}", n % 2) for n in range(4)
        ]
    },
    title="one barrier's life",
    xlabel="completed phases; at each border all arrivals and bytes are in",
    ticks=range(5),
)

# %% [markdown]
# A buffer that is used again needs two barriers: `full`, which holds the consumer back, and `empty`, which holds the producer back.
# Both move on by one phase per turn.
# In turn t the consumer waits for phase t of `full`, so for parity t mod 2.
# The producer waits for phase t − 1 of `empty`, so for parity (t − 1) mod 2, which is 1 in its first turn.
#
# The picture: one buffer, three turns.
# Find the moment at which the producer's second fill begins, and which barrier allowed it.

# %%
FILL, READ = 2.0, 2.0  # one turn: the copy arrives, then the consumer reads
TURN = FILL + READ
ring_picture = {"producer": [], "full": [], "consumer": [], "empty": []}
for t in range(3):
    begin, filled, end = TURN * t, TURN * t + FILL, TURN * (t + 1)
    ring_picture["producer"].append(plots.Segment(begin, FILL, f"turn {t}\nfill", 0))
    hold = plots.Segment(filled, READ, f"wait(empty, {t % 2})\nholds", None)
    ring_picture["producer"].append(hold)
    before = TURN * (t - 1) + FILL if t else 0
    words = f"phase {t}\nwait({t % 2}) holds"
    ring_picture["full"].append(plots.Segment(before, filled - before, words, t % 2 + 2))
    ring_picture["consumer"].append(plots.Segment(begin, FILL, f"wait(full, {t % 2})\nholds", None))
    ring_picture["consumer"].append(plots.Segment(filled, READ, f"turn {t}\nread, arrive", 1))
    ring_picture["empty"].append(
        plots.Segment(begin, TURN, f"phase {t}\nwait({t % 2}) holds", t % 2 + 2)
    )
plots.segments(
    ring_picture,
    title="one buffer, its two barriers, three turns (lengths are not to scale)",
    xlabel="time; hatched: waiting. A wait ends where the phase of its barrier ends",
    ticks=[],
)

# %% [markdown]
# **The likely mistake.** A parity cannot tell phase n from phase n + 2.
# Suppose that the consumer waits for phase 0 of `full`, and that more than one phase has already completed, because nothing held the producer back:


# %%
def passes(in_progress, parity):
    """Return whether a wait for `parity` passes: the rule of parities."""
    return parity != in_progress % 2


SAYS = {
    0: "rightly: nothing was filled yet",
    1: "rightly: phase 0 is complete",
    2: "one turn too many: it waits forever for a phase that it has missed",
    3: "two turns too many: it passes, on the wrong turn's data",
}
for completed, words in SAYS.items():
    verb = "passes" if passes(completed, 0) else "holds"
    print(f"{completed} phases completed, wait(0) {verb:<6} ({words})")

# %% [markdown]
# One turn too many hangs, two too many is silently wrong.
# The emulator reports both where it happens: a wait that can come two phases late is an error there, whether it would pass or hang.
#
# When a phase completes: a barrier made with `arrive_count=c` needs c arrivals and all the bytes that were announced.
#
# | event | arrivals | bytes still awaited |
# |---|---|---|
# | `barrier_expect_bytes(bar, n)` | 1 | + n |
# | a TMA copy on `bar` delivers n bytes | 0 | - n |
# | `barrier_arrive(bar, 1)` in a task, whatever its number of warps | 1 | 0 |
# | a product with `bar` in `mBarriers` is done | 1 for each barrier | 0 |
# | `tcgen05_commit(bar)`, all earlier products done | 1 | 0 |
#
# The last two belong to section 5, where a cell counts all of them on one barrier.

# %% [markdown]
# ## 4. Async tasks: a producer and a consumer
#
# `with tlx.async_tasks():` splits the CTA's warps into roles.
# Each `with tlx.async_task(...)` is one role with warps of its own; `"default"` takes the warps the kernel was launched with.
# The roles run at the same time and meet only at barriers.
#
# Here a producer streams chunks of a wide matrix through a ring of buffers, and a consumer adds up `exp(x)`.


# %%
@triton.jit
def stream_exp(
    x_desc,
    out_ptr,
    chunks,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD_BACK: tl.constexpr,
):
    tiles = tlx.local_alloc((ROWS, COLS), tl.float32, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
            total = tl.zeros((ROWS,), tl.float32)
            for k in range(chunks):
                slot = k % STAGES
                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)
                total += tl.sum(tl.exp(tlx.local_load(tiles[slot])), axis=1)
                tlx.barrier_arrive(empties[slot], 1)
            tl.store(out_ptr + tl.arange(0, ROWS), total)
        with tlx.async_task(num_warps=1):  # producer
            for k in range(chunks):
                slot = k % STAGES
                if HOLD_BACK:
                    tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 4)
                tlx.async_descriptor_load(x_desc, tiles[slot], [0, k * COLS], fulls[slot])


CHUNKS = 8
wide, sums = torch.randn(64, 64 * CHUNKS), torch.empty(64)


def run_stream(stages=2, hold_back=True):
    box = TensorDescriptor.from_tensor(wide, [64, 64])
    stream_exp[(1,)](box, sums, CHUNKS, ROWS=64, COLS=64, STAGES=stages, HOLD_BACK=hold_back)


run_stream()
print("largest relative error:", ((sums - wide.double().exp().sum(1)) / sums).abs().max().item())

# %% [markdown]
# **Broken.** Take the producer's wait away.
# It now refills buffers before they have been read.
# One mistake can show in more than one way.
# Run it on two schedules: copies that finish at once, and copies that finish as late as they may.
# Predict first: which line does each report name, the producer's or the consumer's?

# %%
attempt(lambda: run_stream(hold_back=False), policy="eager")
print()
attempt(lambda: run_stream(hold_back=False), policy="lazy")

# %% [markdown]
# The first report sees two copies into one buffer that nothing orders.
# The second sees the producer announce a third chunk on a barrier whose phase has not completed.
# Both point at the producer: it returned to a buffer too early.

# %% [markdown]
# ### What each role does when
#
# The emulator also keeps a clock: its *timed* policy knows how many cycles a copy, a load or 4,096 exponentials take on a B200.
# The picture is a model, not a measurement.
# Predict first: with one buffer, which role waits?
# With three?


# %%
def timeline(launch):
    """Return the timeline of a launch, modelled on a B200."""
    with emulator.options(policy="timed", rates=B200, trace=True):
        launch()
    return Timeline.of(emulator.last())


one, three = (timeline(lambda: run_stream(stages)) for stages in (1, 3))
print(f"{one.cycles:,.0f} modelled cycles with one buffer, {three.cycles:,.0f} with three")
plots.timelines({"one buffer": one, "three buffers": three})

# %% [markdown]
# With one buffer the copy and the arithmetic take turns: both roles wait most of the time.
# With three the copies run ahead, and the launch takes less than half as long.
# The consumer still waits once per turn of the ring: it finishes three chunks before the copy that replaces the first of them has arrived.

# %% [markdown]
# ### Several workers, and their registers
#
# `replicate=2` makes two tasks of one body; `tlx.async_task_replica_id()` is 0 in one of them and 1 in the other, a number that is known when the kernel is compiled.
# `registers=` says how many registers each thread of a task gets.
# Either all tasks but the default one name it, or none does; the default task gets what is left.
# It is a multiple of 8 from 24 to 256, and the threads of all tasks together have the SM's 65,536.
# Version 5 of chapter 12 uses all of them, with 128 threads each for a correction role, two softmax roles and, counted together as a whole warp group, its single warps:
#
# $$ 128 \cdot (96 + 2 \cdot 192 + 32) = 65{,}536. $$
#
# Below, the default task fills two buffers and each of two workers sums one.
# Both wait for the same phase of the same barrier: a wait takes nothing away, so any number of tasks may pass it.


# %%
@triton.jit
def two_workers(x_ptr, out_ptr, N: tl.constexpr, REGISTERS: tl.constexpr):
    halves = tlx.local_alloc((N // 2, N), tl.float32, 2)
    full = tlx.alloc_barriers(1, arrive_count=1)
    rows, columns = tl.arange(0, N // 2), tl.arange(0, N)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for half in tl.static_range(2):
                at = (half * (N // 2) + rows)[:, None] * N + columns[None, :]
                tlx.local_store(halves[half], tl.load(x_ptr + at))
            tlx.barrier_arrive(full[0], 1)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            worker = tlx.async_task_replica_id()
            tlx.barrier_wait(full[0], 0)
            mine = tlx.local_load(halves[worker])
            tl.store(out_ptr + worker * (N // 2) + tl.arange(0, N // 2), tl.sum(mine, axis=1))


def run_workers(registers=192):
    two_workers[(1,)](x, row_sums, N=32, REGISTERS=registers)


row_sums = torch.empty(32)
run_workers()
print("largest error:", (row_sums - x.sum(1)).abs().max().item())
attempt(lambda: run_workers(registers=256))

# %% [markdown]
# ## 5. Tensor memory and the tensor core
#
# `tlx.local_alloc(..., tlx.storage_kind.tmem)` makes buffers in tensor memory: 128 lanes by 512 columns of 4 bytes, no more.
# `tlx.async_dot(a, b, acc, use_acc=..., mBarriers=[bar])` starts `acc = a @ b` (or `acc += a @ b`) and returns.
# Each barrier in `mBarriers` gets one arrival when this product *and every earlier one of the same task* is done.


# %%
@triton.jit
def one_product(
    a_desc,
    b_desc,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WAIT: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
):
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    done = tlx.alloc_barriers(1, arrive_count=1)
    tlx.barrier_expect_bytes(loaded[0], 2 * (M * K + K * N))
    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])
    tlx.barrier_wait(loaded[0], 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]])
    if WAIT:
        tlx.barrier_wait(done[0], 0)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tlx.local_load(acc[0]))


a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 128).bfloat16()
product = torch.empty(128, 128)


def run_product(wait=True, accumulators=1):
    boxes = TensorDescriptor.from_tensor(a, [128, 64]), TensorDescriptor.from_tensor(b, [64, 128])
    one_product[(1,)](*boxes, product, M=128, N=128, K=64, WAIT=wait, ACCUMULATORS=accumulators)


run_product()
print("largest error:", (product - a.double() @ b.double()).abs().max().item())

# %% [markdown]
# **Broken twice.** Read the accumulator without waiting for the product.
# Then ask for five accumulators of 128 columns: 640 columns of 512.
# Predict first: one of the two is refused before anything is copied.
# Which?

# %%
attempt(lambda: run_product(wait=False))
print()
attempt(lambda: run_product(accumulators=5))

# %% [markdown]
# ### Without a barrier, with a commit, and back into tensor memory
#
# `async_dot` is asynchronous only with `mBarriers` or with `force_async=True`.
# With neither, the compiler adds a barrier of its own and waits for it on the spot.
# `force_async=True` starts a product whose end no barrier reports.
# `tlx.tcgen05_commit(bar)` reports it later: one arrival on `bar` when all products that this task has started so far are done.
#
# `local_load` and `local_store` reach tensor memory as well.
# So an accumulator can be changed between two products, as the correction role of chapter 12 does.
# Below, half of the first product is kept and the second is added to it.


# %%
@triton.jit
def half_and_again(
    a_desc, b_desc, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WAIT: tl.constexpr
):
    """out = 0.5 A B + A B."""
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    done = tlx.alloc_barriers(1, arrive_count=1)
    tlx.barrier_expect_bytes(loaded[0], 2 * (M * K + K * N))
    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])
    tlx.barrier_wait(loaded[0], 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]])
    if WAIT:
        tlx.barrier_wait(done[0], 0)
    tlx.local_store(acc[0], tlx.local_load(acc[0]) * 0.5)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=True, force_async=True)
    tlx.tcgen05_commit(done[0])
    tlx.barrier_wait(done[0], 1)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tlx.local_load(acc[0]))


def run_half(wait=True):
    boxes = TensorDescriptor.from_tensor(a, [128, 64]), TensorDescriptor.from_tensor(b, [64, 128])
    half_and_again[(1,)](*boxes, product, M=128, N=128, K=64, WAIT=wait)


run_half()
print("largest error:", (product - 1.5 * (a.double() @ b.double())).abs().max().item())
attempt(lambda: run_half(wait=False))

# %% [markdown]
# ### Count the arrivals
#
# One barrier, everything that can arrive at it: an announcement and its copy, the arrive of a task of four warps, a product's `mBarriers`, a commit.
# Predict first: with which `arrive_count` does the last wait return, and what is reported with one fewer and one more?


# %%
@triton.jit
def everything_arrives(
    a_desc, b_desc, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr
):
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    once_more = tlx.local_alloc((M, K), tl.bfloat16, 1)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    all_done = tlx.alloc_barriers(1, arrive_count=COUNT)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # arriver
            tlx.barrier_arrive(all_done[0], 1)  # one, of four warps
            tlx.barrier_wait(all_done[0], 0)
        with tlx.async_task(num_warps=1):  # product
            tlx.barrier_expect_bytes(loaded[0], 2 * (M * K + K * N))
            tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
            tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])
            tlx.barrier_wait(loaded[0], 0)
            tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[all_done[0]])  # one
            tlx.tcgen05_commit(all_done[0])  # one
            tlx.barrier_wait(all_done[0], 0)
        with tlx.async_task(num_warps=1):  # copy
            tlx.barrier_expect_bytes(all_done[0], 2 * M * K)  # one, and bytes
            tlx.async_descriptor_load(a_desc, once_more[0], [0, 0], all_done[0])  # none


for count in (3, 4, 5):
    boxes = TensorDescriptor.from_tensor(a, [128, 64]), TensorDescriptor.from_tensor(b, [64, 128])
    print(f"arrive_count={count}: ", end="")
    attempt(lambda: everything_arrives[(1,)](*boxes, M=128, N=128, K=64, COUNT=count))
    print()

# %% [markdown]
# The answer is four.
# With 5 nothing is left that could arrive.
# With 3 the phase may complete without one of the four: here the waits return while the copy is still under way.
#
# ## Tensor memory for experts
#
# A reference page; come back to it from chapter 12.
# [compiled] marks what was read in the PTX that fbtriton 3.7.4 makes for sm_100.
#
# | | |
# |---|---|
# | size | 128 lanes x 512 columns x 4 bytes = 256 KB per SM, all CTAs of the SM together |
# | rows of a tile | row r of a 128-row tile is lane r; its columns are the tile's columns: an fp32 tile of N columns takes N, a bf16 tile N / 2 |
# | who may touch it | warp w reaches only lanes 32 (w mod 4) to 32 (w mod 4) + 31. So a task needs 4 or 8 warps to access a whole tile |
# | shapes of a product | M is 64 or 128, 32 ≤ N ≤ 256 in TLX, K a multiple of 16 for 16-bit types; one instruction does K = 16, so K = 64 is four of them [compiled] |
# | allocation | columns in powers of two, at least 32: three accumulators of 64 columns ask for 192 and get 256, five get 512 [compiled] |
# | wait | a thread's own loads and stores: `tcgen05.wait::ld`, `::st`, put in by the compiler behind each `local_load` and `local_store` [compiled] |
# | commit | `tcgen05.commit`: one arrival when all earlier products of this thread are done. `mBarriers` is the same instruction behind the product [compiled] |
# | fence | `fence("async_shared")` is about shared memory (section 6). PTX has a `tcgen05.fence` too; the kernels compiled for this chapter contain none [compiled] |
#
# Which operations are ordered, and who guarantees it:
#
# | two operations | in order? |
# |---|---|
# | two products of one task on one accumulator, of one shape | promised by PTX: they are pipelined |
# | a commit, and the products before it in its task | promised by PTX |
# | products of one task on different accumulators | observed: Triton's documentation describes the tensor core as one queue per SM, and the emulator assumes that; PTX does not promise it |
# | products of two tasks | no order without a barrier |
# | a thread's load of an accumulator, and a product on it | no order without a barrier |
#
# The picture: four accumulators of 48 fp32 columns, and what is allocated for them.
# The hatched columns are allocated and not used; no other CTA can have them.

# %%
LANE_ROWS = [f"lanes {32 * i} to {32 * i + 31}\nwarps {i}, {i + 4}" for i in range(4)]
columns = [plots.Segment(48 * n, 48, f"acc[{n}]", n) for n in range(4)]
columns.append(plots.Segment(192, 64, "allocated, unused", None))
plots.segments(
    {name: columns for name in LANE_ROWS},
    title="192 columns in use, 256 allocated, 256 free for another CTA",
    xlabel="column (4 bytes each)",
    ticks=range(0, 257, 32),
)

# %% [markdown]
# A whole kernel keeps scores, probabilities and two outputs in these 512 columns.
# Chapter 12 shows how: buffers that are never alive at the same time share columns.

# %% [markdown]
# ## 6. Fences: two paths to one memory
#
# Threads and engines reach shared memory by two paths, the *generic* and the *async* proxy.
# A barrier orders execution.
# It does not make what threads wrote through the generic proxy visible to the async one.
# `tlx.fence("async_shared")` does.
# It belongs between the last `local_store` and whatever lets a TMA store or a tensor core read the buffer.


# %%
@triton.jit
def write_and_ship(out_desc, N: tl.constexpr, FENCE: tl.constexpr):
    tile = tlx.local_alloc((N, N), tl.float32, 1)
    tlx.local_store(tile[0], tl.arange(0, N)[:, None] * 100.0 + tl.arange(0, N)[None, :])
    if FENCE:
        tlx.fence("async_shared")
    tlx.async_descriptor_store(out_desc, tile[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


def run_ship(fence):
    write_and_ship[(1,)](TensorDescriptor.from_tensor(out, [32, 32]), N=32, FENCE=fence)


run_ship(True)
print("row 3:", out[3, :4].tolist())
attempt(lambda: run_ship(False), fences="strict")

# %% [markdown]
# fbtriton 3.7.4 adds this fence by itself, in the task that reads, right before the store: also where the writer is another task (its PTX has a `fence.proxy.async` behind the reader's wait).
# So a kernel without it works there; another compiler may not add it.
# Write the fence right after the stores.
# With `fences="strict"` the emulator reports a missing fence as an error; without it, as a warning.
#
# ## 7. The sweep: which synchronization is needed?
#
# The emulator can break a kernel on purpose.
# A *sweep* does this for each wait, arrive, announcement and fence: it makes a version without it, or with the other parity, or with half the bytes, and runs each version under four schedules.
# Here is the sweep of `stream_exp`.

# %%
from jfa.emulator import sweep


def stream_once():
    """Launch once; a sweep compares what this returns."""
    run_stream(stages=2)
    return [sums.clone()]


swept = sweep.sweep(stream_once)
print(swept.table())
plots.sweep_map(swept)

# %% [markdown]
# Every broken version was found.
# A version that goes unnoticed means one of two things: the synchronization is superfluous, or this launch never needed it, for example because it has one chunk only.
#
# **Sweep your own kernel.** Write a function without arguments that launches it and returns its outputs, and put it in the place of `stream_once`.
# A solved 10.3 is a good start: paste the kernel into a cell, launch it as its text says, and predict before you run which of its lines a sweep will call superfluous.
# In a terminal: `jfa emulator sweep FILE.py:FUNCTION`.

# %% [markdown]
# ## How to read a report
#
# | you read | it means | look for |
# |---|---|---|
# | `DeadlockError` | every task waits, nothing is in flight | the barrier it names: who should arrive there? |
# | `RaceError` | two accesses, one a write, unordered | the two lines: which barrier should order them? |
# | `OverArrivalError` | more arrivals in a phase than the barrier counts | a role that arrives a turn too early, or `arrive_count` |
# | `PhaseError` | a wait can pass on an old phase | a producer that nothing holds back |
# | `ExpectBytesError` | bytes announced and delivered differ | element size, number of loads on the barrier |
# | `PoisonError` | memory that was never written | `use_acc` on the first product; a wrong buffer number |
# | `MissingFenceError` | threads wrote, an engine reads | `tlx.fence("async_shared")` before the hand-over |
# | `TensorMemoryError` | more than 512 columns | buffers that could share |
#
# ## Summary
#
# * A buffer in shared or tensor memory starts undefined; a barrier's phase ends when all its arrivals and all announced bytes are there.
# * The bytes of a TMA load are announced on its barrier, and the task that reads the buffer waits for that phase.
# * A wait names the parity of a phase; a producer waits for `phase ^ 1`, which passes at once on a fresh barrier.
# * A product runs asynchronously in the tensor core; its barrier, or a commit behind it, says when its result is there and its operands are free.
# * Threads and engines reach shared memory by two paths: a fence must come between a thread's store and an engine's read.
# * A sweep breaks each wait, arrival and fence in turn, and so shows which of them a kernel and its tests need.
#
# ## Exercises
#
# Open [exercises/10_tlx_primitives.py](../exercises/10_tlx_primitives.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 10.1 | in by TMA, out by TMA | 1 | 15 |
# | 10.2 | the parity puzzle | 1 | 10 |
# | 10.3 | a consumer | 2 | 10 |
# | 10.4 | bug hunt: given back twice | 2 | 20 |
# | 10.5 | bug hunt: right under some schedules only | 3 | 20 |
# | 10.6 | one product in tensor memory | 3 | 20 |
# | 10.7 | a producer for two consumers | 3 | 15 |
# | 10.8 | a store pipeline | 3 | 15 |
# | 10.9 | bug hunt: an innocent wait | 3 | 20 |
#
# ## Checkpoint
#
# <details><summary>A barrier made with arrive_count=2 gets one arrival and all expected bytes. Has its phase completed?</summary>
#
# No.
# A phase needs all arrivals *and* all bytes.
# </details>
#
# <details><summary>Why does the producer wait for phase ^ 1?</summary>
#
# In its first turn no buffer has been given back yet.
# Parity 1 passes on a fresh barrier, so the first turn goes through, and later turns wait for the consumer.
# </details>
#
# <details><summary>Phase 5 of a barrier is in progress. Which of wait(0) and wait(1) passes?</summary>
#
# wait(0), since 0 ≠ 5 mod 2.
# Phase 4 is complete.
# </details>
#
# <details><summary>A race was reported, and the output is right. Is the report wrong?</summary>
#
# No.
# It says that nothing in the program makes the output right.
# Another schedule, clock rate or chip may show the wrong one.
# </details>
#
# <details><summary>How many fp32 accumulators of 128 x 256 fit into tensor memory? How many columns are allocated for three bf16 tiles of 128 x 128?</summary>
#
# Two: 256 columns each.
# Three bf16 tiles take 3 · 64 = 192 columns, and 256 are allocated.
# </details>
#
# <details><summary>A task starts a product on acc[0], then one on acc[1] with a barrier in mBarriers. The barrier's phase completes. May another task read acc[0]?</summary>
#
# Yes: the arrival comes when this product and every earlier one of the task is done.
# </details>
#
# ## Try this
#
# - Run `stream_exp` with `STAGES=2` under `policy="random"` with ten seeds. Are the sums bitwise the same? Why?
# - In the picture of three turns, take away the producer's waits. Which phase of `full` is in progress when the consumer comes for turn 1?
# - In `one_product`, give `mBarriers` the barrier `loaded[0]` instead of `done[0]`, and wait for its parity 1. Does it work? Is it wise?
# - Change the producer of `stream_exp` to expect the bytes *after* the load. Does the emulator mind?
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | reading a buffer that was never filled | section 1 |
# | bytes counted in elements, or for one load of two | section 2 |
# | no wait: the numbers are right by luck | section 2, section 5 |
# | nothing holds the producer back | section 4 |
# | tensor memory has 512 columns | section 5 |
# | no fence between threads and engines | section 6 |
#
# ## What differs on a real GPU
#
# - A deadlock hangs the kernel. You get no report; you get a process to kill.
# - A race may show once in a thousand runs, or only under load.
# - Cycles: the timelines here come from a model with the rates in `jfa/emulator/rates.py`, each with its source.
# - The emulator works on whole tiles. What single threads of a warp do differently (`tlx.thread_id` in a branch) it cannot express.
#
# ## Verified here, and not
#
# Every kernel above ran on the emulator when this notebook ran.
# Nothing in this chapter ran on a Blackwell GPU.
#
# ## Sources
#
# - TLX in fbtriton 3.7.4 (`triton.language.extra.tlx`): names and semantics. What is marked [compiled] was compiled with it for sm_100 in November 2026.
# - Triton, tutorials of Gluon, *TCGen05 Copy Instruction* (triton-lang.org, read 2026-11): the tensor core as one queue.
# - NVIDIA, PTX ISA 8.8: `mbarrier`, `cp.async.bulk.tensor`, `tcgen05`, and the proxy fences.
# - The rates of the model: `jfa/emulator/rates.py`.
# - NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability: registers, warps and shared memory.
#
# Next: [11 a warp-specialized GEMM](11_warp_specialized_gemm.py).
