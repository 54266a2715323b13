# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · TLX primitives
#
# **Goals.** Know the machine under a warp-specialized kernel: shared and tensor memory, the TMA, the tensor core, barriers. Use each from TLX, the Triton extension that names
# them. Break each on purpose and read the report.
#
# **Time.** 90 minutes, and 120 for the exercises. **Needs.** Chapter 03. No GPU: TLX kernels have no interpreter anywhere else; here the emulator runs them.

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
# A GPU has many *streaming multiprocessors* (SMs): 148 on a B200. One block of threads, a *CTA* (what Triton calls a program), lives on one SM. Everything below is inside one SM.

# %%
LANES = "32 fp32 lanes\n4 exp2 units"
MACHINE = {  # heading -> ((x, y, width, height), words, colour)
    "warps": (
        (0, 3.2, 6.4, 2.0),
        "32 threads each, up to 32 warps in a CTA; registers 256 KB, at most 255 a thread",
        0,
    ),
    **{f"scheduler {i}": ((0.15 + 1.55 * i, 3.3, 1.4, 1.0), LANES, 0) for i in range(4)},
    "tensor memory (TMEM)": (
        (7.0, 3.2, 3.0, 2.0),
        "128 lanes x 512 columns\nof 4 bytes: accumulators",
        4,
    ),
    "shared memory (SMEM)": (
        (2.9, 1.4, 3.5, 1.3),
        "228 KB, 128 bytes a clock:\ntiles of A and B, barriers",
        2,
    ),
    "tensor core": (
        (7.0, 1.4, 3.0, 1.3),
        "D = A B + D, asynchronous\nA: SMEM or TMEM, B: SMEM, D: TMEM",
        1,
    ),
    "TMA": ((0, 1.4, 2.4, 1.3), "copies boxes between global\nand shared memory, asynchronous", 1),
    "L2 and global memory": ((0, 0.4, 10, 0.5), "", 6),
}
LINKS = [
    ("TMA", "L2 and global memory"),
    ("TMA", "shared memory (SMEM)"),
    ("shared memory (SMEM)", "warps"),
]
LINKS += [
    ("shared memory (SMEM)", "tensor core"),
    ("tensor memory (TMEM)", "tensor core"),
    ("tensor memory (TMEM)", "warps"),
]
plots.blocks(
    MACHINE, LINKS, title="one SM of a Blackwell GPU: who computes, what remembers, who moves data"
)

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
# The TMA and the tensor core work *beside* your threads. They finish when they finish. Nothing in your program's order of lines says when: only barriers do. That is the
# whole art, and every bug of this chapter.

# %% [markdown]
# ## 1. Buffers
#
# `tlx.local_alloc(shape, dtype, count)` makes `count` buffers of one shape; `buffers[i]` is a view of one. `local_store` and `local_load` move a block between registers and a buffer.
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
# **Broken.** Fill buffer 1 and read buffer 0. On a GPU you get whatever an earlier kernel left there: perhaps your own right numbers from the last run. The emulator fills fresh memory with
# poison. Predict first: which of the two lines will the report name?

# %%
attempt(lambda: transpose_in_smem[(1,)](x, out, N=32, FIRST=1))

# %% [markdown]
# ## 2. A TMA load and its barrier
#
# The copy engine needs a *descriptor*: base address, shape, strides, and the box it moves. The host makes one from a tensor. In the kernel:
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
# **Broken twice.** First the wrong number of bytes: two bytes an element, a habit from bf16. Then no wait. Predict what each report says before you run the cell.

# %%
attempt(lambda: run_tma_copy(nbytes=32 * 32 * 2))
print()
attempt(lambda: run_tma_copy(wait=False))

# %% [markdown]
# The second one is a *race*: two accesses to one place, at least one of them a write, and no barrier between them. The emulator does not need the copy to be late to see it. It keeps, for every
# task and engine, what it can know of the others, and reports accesses that nobody ordered. A race is found even on the run where the numbers come out right.

# %% [markdown]
# ## 3. Phases: the parity puzzle
#
# A barrier is used again and again. Each time it completes, its *phase* goes up by one. A wait names only the phase's parity, 0 or 1:
#
# > `barrier_wait(bar, p)` returns once the phase with parity `p` has completed, looking one phase back.
#
# On a fresh barrier phase 0 is in progress. A wait for parity 0 holds. A wait for parity 1 passes: the phase "before the first" counts as complete. That is how a producer gets
# through its first turn without special cases.

# %%
PASSES = ("wait(0) holds\nwait(1) passes", "wait(0) passes\nwait(1) holds")
plots.segments(
    {"barrier": [plots.Segment(n, 1, f"phase {n} in progress\n{PASSES[n % 2]}", n % 2) for n in range(3)]},
    title="one barrier's life", xlabel="completed phases; at each border all arrivals and bytes are in", ticks=range(4),
)  # fmt: skip

# %% [markdown]
# **The likely mistake.** A parity cannot tell "one phase ahead" from "three". If a producer runs two turns ahead of a consumer, the consumer's wait passes on the wrong turn. So every buffer has two
# barriers: `full`, which holds the consumer back, and `empty`, which holds the producer back.

# %% [markdown]
# ## 4. Async tasks: a producer and a consumer
#
# `with tlx.async_tasks():` splits the CTA's warps into roles. Each `with tlx.async_task(...)` is one role with warps of its own; `"default"` takes the warps the kernel was launched with.
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
# **Broken.** Take the producer's wait away. It now refills buffers before anybody has read them. One mistake can show in more than one way. Run it on two schedules: copies that finish at once, and
# copies that finish as late as they may. Predict first: who is blamed, the producer or the consumer?

# %%
attempt(lambda: run_stream(hold_back=False), policy="eager")
print()
attempt(lambda: run_stream(hold_back=False), policy="lazy")

# %% [markdown]
# The first report sees two copies into one buffer that nothing orders. The second sees the producer announce a third chunk on a barrier whose phase has not completed. Both point at the producer: it came round
# too early.

# %% [markdown]
# ### What each role does when
#
# The emulator also keeps a clock: its *timed* policy knows how many cycles a copy, a load or 4,096 exponentials take on a B200. The picture is a model, not a measurement, and says so.
# Predict first: with one buffer, which role waits? With three?


# %%
def timeline(launch):
    """The timeline of a launch, modelled on a B200."""
    with emulator.options(policy="timed", rates=B200, trace=True):
        launch()
    return Timeline.of(emulator.last())


one, three = (timeline(lambda: run_stream(stages)) for stages in (1, 3))
print(f"{one.cycles:,.0f} modelled cycles with one buffer, {three.cycles:,.0f} with three")
plots.timelines({"one buffer": one, "three buffers": three})

# %% [markdown]
# With one buffer the copy and the arithmetic take turns: both roles wait most of the time. With three the copies run ahead, and the launch takes less than half as long. The consumer still waits,
# once for each turn of the ring: three chunks of this little arithmetic are over before the copy that replaces the first of them has arrived.

# %% [markdown]
# ## 5. Tensor memory and the tensor core
#
# `tlx.local_alloc(..., tlx.storage_kind.tmem)` makes buffers in tensor memory: 128 lanes by 512 columns of 4 bytes, no more. `tlx.async_dot(a, b, acc, use_acc=..., mBarriers=[bar])` starts
# `acc = a @ b` (or `acc += a @ b`) and returns. Each barrier in `mBarriers` gets one arrival when this product *and every earlier one of the same task* is done.


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
# **Broken twice.** Read the accumulator without waiting for the product. Then ask for five accumulators of 128 columns: 640 columns of 512.
# Predict first: one of the two is refused before anything is copied. Which?

# %%
attempt(lambda: run_product(wait=False))
print()
attempt(lambda: run_product(accumulators=5))

# %% [markdown]
# A whole kernel keeps scores, probabilities and two outputs in these 512 columns. Chapter 12 shows how: buffers that are never alive at the same time share columns.

# %% [markdown]
# ## 6. Fences: two ways into one memory
#
# Threads and engines reach shared memory by two paths, the *generic* and the *async* proxy. A barrier orders time. It does not make what threads wrote through one path visible on the other. `tlx.fence("async_shared")` does.
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
# Today's compiler adds this fence by itself where writer and reader stand in one task. Across tasks it cannot. `fences="strict"` asks the emulator to insist on all of them.

# %% [markdown]
# ## How to read a report
#
# | you read | it means | look for |
# |---|---|---|
# | `DeadlockError` | everybody waits, nothing is in flight | the barrier it names: who should arrive there? |
# | `RaceError` | two accesses, one a write, unordered | the two lines: which barrier should lie between them? |
# | `OverArrivalError` | more arrivals in a phase than the barrier counts | a role that comes round too early, or `arrive_count` |
# | `PhaseError` | a wait can pass on an old phase | a producer that nothing holds back |
# | `ExpectBytesError` | bytes announced and delivered differ | element size, number of loads on the barrier |
# | `PoisonError` | memory that nobody wrote | `use_acc` on the first product; a wrong buffer number |
# | `MissingFenceError` | threads wrote, an engine reads | `tlx.fence("async_shared")` before the hand-over |
# | `TensorMemoryError` | more than 512 columns | buffers that could share |
#
# ## Exercises
#
# Open [exercises/10_tlx_primitives.py](../exercises/10_tlx_primitives.py): a tile in and out by TMA, the parity puzzle, a consumer, two bug hunts, and a product in tensor memory.
#
# ## Checkpoint
#
# 1. A barrier made with `arrive_count=2` gets one arrival and all expected bytes. Has its phase completed?
# 2. Why does the producer wait for `phase ^ 1`?
# 3. A race was reported, and the output is right. Is the report wrong?
# 4. How many fp32 accumulators of 128 x 256 fit into tensor memory?
#
# <details><summary>Answers</summary>
#
# 1. No. A phase needs all arrivals *and* all bytes.
# 2. In its first turn nobody has given a buffer back. Parity 1 passes on a fresh barrier, so the first turn goes through, and later turns wait for the consumer.
# 3. No. It says that nothing in the program makes the output right. Another schedule, another clock, another chip may show it.
# 4. Two: 256 columns each.
#
# </details>
#
# ## Try this
#
# - Run `stream_exp` with `STAGES=2` under `policy="random"` with ten seeds. Are the sums bitwise the same? Why?
# - In `one_product`, give `mBarriers` the barrier `loaded[0]` instead of `done[0]`, and wait for its parity 1. Does it work? Is it wise?
# - Change the producer of `stream_exp` to expect the bytes *after* the load. Does the emulator mind?
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | reading a buffer nobody filled | section 1 |
# | bytes counted in elements, or for one load of two | section 2 |
# | no wait: right by luck | section 2, section 5 |
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
# Every kernel above ran on the emulator when this notebook ran. Nothing in this chapter ran on a Blackwell GPU.
#
# ## Sources
#
# - TLX in fbtriton 3.7.4 (`triton.language.extra.tlx`): names and semantics.
# - NVIDIA, PTX ISA 8.8: `mbarrier`, `cp.async.bulk.tensor`, `tcgen05`, and the proxy fences.
# - The rates of the model: `jfa/emulator/rates.py`.
