# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 The machine underneath, and why plain Triton stalls
#
# **Goals.** After this chapter you
# * can name the units of one SM and what each does per clock,
# * can compute by hand how many cycles a tile of attention takes on each of them,
# * can read a timeline,
# * can say why one group of warps that does everything leaves most of a Blackwell GPU idle, what helps, and when it does not pay off.
#
# **Time** 60 minutes to read, 195 for the exercises.
# **You need** chapter 04 (the jagged forward).
# No GPU: every cycle count of this chapter is modelled unless it says "measured".

# %%
import math
import re

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa import plots
from jfa.bench import recorded, shapes
from jfa.emulator.rates import B200, H200
from jfa.emulator.timeline import Timeline

D, BM, BN = 128, 128, 128

# %% [markdown]
# ## The mental model: a workshop with several machines
#
# A Triton program looks like a list of orders: load, multiply, exponentiate, store.
# The chip that runs it is a set of workshops, the *streaming multiprocessors* (**SMs**); a B200 has 148 of them.
# In each workshop every kind of order has its own machine (a *unit*), and all machines can run at the same time.
#
# So there are two questions about any kernel.
# How long is each unit busy?
# And how much of that time do the other units idle?

# %%
MACHINE = {  # heading -> ((x, y, width, height), words, color)
    "exp2 units (MUFU)": ((0, 3.1, 2.4, 1.3), "16 exponentials\nper clock", 3),
    "warps": ((2.9, 3.1, 2.7, 1.3), "groups of 32 threads\n128 multiply-adds per clock", 0),
    "tensor memory": ((6.2, 3.1, 3.8, 1.3), "accumulators, 256 KB\n(Blackwell only)", 4),
    "shared memory": ((2.9, 1.3, 2.7, 1.3), "228 KB\n128 bytes per clock", 2),
    "tensor core": (
        (6.2, 1.3, 3.8, 1.3),
        "8192 bf16 FLOP per clock\non a B200, 4096 on an H200",
        1,
    ),
    "TMA": ((0, 1.3, 2.4, 1.3), "copies boxes", 1),
    "L2 and global memory": ((0, 0.3, 10, 0.5), "", 6),
}
LINKS = [
    ("TMA", "L2 and global memory"),
    ("TMA", "shared memory"),
    ("shared memory", "warps"),
    ("exp2 units (MUFU)", "warps"),
    ("shared memory", "tensor core"),
    ("tensor memory", "tensor core"),
    ("tensor memory", "warps"),
]
plots.blocks(MACHINE, LINKS, title="one SM: its units, and what each does per clock")

# %% [markdown]
# | term | what it is |
# |---|---|
# | **warp** | 32 threads that execute the same instructions together. Four warps are a *warp group*. |
# | **MUFU** | the unit that computes exponentials (exp2) and other special functions |
# | **tensor core** | multiplies tiles. On Blackwell one thread starts a product and continues; the product ends later. |
# | **SMEM**, **TMEM** | shared memory; Blackwell's tensor memory, which holds accumulators |
# | **TMA** | the tensor memory accelerator, a copy engine: one thread names a box of a tensor, and the engine copies it |
# | **rate** | how much a unit does per clock. Two users of one unit share its rate. |
# | **latency** | how long you wait for the first result, however fast the unit is |
# | **FLOP/clk** | floating-point operations per clock; a multiply-add counts as two |
#
# The rates are in `jfa/emulator/rates.py`, each with its source.
# "assumed" means that no published number for this chip was found.
# The end of this chapter shows how much depends on those.

# %%
SHOWN = ["tensor_2", "tensor_1", "mufu", "alu", "smem", "tmem_read", "l2", "hbm"]
rows = [[n, B200[n], H200[n], B200.rates[n].unit, B200.rates[n].source] for n in SHOWN]
print(plots.table(["rate", "B200", "H200", "unit", "source for the B200"], rows))

# %% [markdown]
# ## Version 0: arithmetic
#
# Take one step of the forward: M queries, N keys, head dimension D.
#
# $$ \text{tensor} = \frac{2 \cdot 2MND}{\text{FLOP/clk}}, \qquad \exp = \frac{MN}{16}, \qquad \text{SMEM} = \frac{\text{operand bytes}}{128} . $$
#
# The first 2 counts the two products, and the second 2 counts a multiply-add as two FLOPs.
#
# The operand bytes depend on how the tensor core works.
# It takes 128 rows at a time, and reads both operands of each product from SMEM, unless one of them is in tensor memory.
# So S = QKᵀ reads Q and K, and O += PV reads only V, because P is in tensor memory.
# With 256 queries there are two products of 128 rows, and each reads K and V again.


# %%
def tile_cycles(m, n, d, itemsize, chip):
    """Return {unit: cycles} of one forward step; m is a multiple of 128."""
    halves = m // 128
    operands = halves * (128 * d + n * d + n * d) * itemsize  # Q and K, then V
    return {
        "tensor": 2 * 2 * m * n * d / chip[f"tensor_{itemsize}"],
        "exp": m * n / chip["mufu"],
        "SMEM": operands / chip["smem"],
    }


cycles = tile_cycles(256, 128, 128, 2, B200)
print({unit: round(c) for unit, c in cycles.items()}, "sum", round(sum(cycles.values())))
chips = {
    "B200, bf16": tile_cycles(256, 128, 128, 2, B200),
    "B200, FP8": tile_cycles(256, 128, 128, 1, B200),
    "H200, bf16": tile_cycles(256, 128, 128, 2, H200),
}
plots.bars(
    list(chips),
    {unit: [c[unit] for c in chips.values()] for unit in cycles},
    title="256 queries, 128 keys, D = 128: cycles per unit (modelled)",
    xlabel="chip and type",
    ylabel="cycles",
    form="{:.0f}",
)

# %% [markdown]
# These are the 2048, 2048 and 1536 cycles of the FlashAttention-4 paper.
# (On an H200 a product takes 64 rows and P comes from registers, so its SMEM bar is a lower bound.)
#
# Compare Hopper (H200) with Blackwell (B200).
# The tensor core became twice as fast, but the exponentials did not.
# On an H200 the products take longest.
# On a B200 products and exponentials take the same time, and with FP8 the exponentials alone are the limit.
#
# If the units take turns, a step costs the **sum**: 5632 cycles.
# If they overlap perfectly, it costs the **largest**: 2048.
# In the first case the tensor core is busy for 36 % of the time, in the second for 100 %.
# Predict: what is the share in a kernel in which every line waits for the line before?
# (It is lower than 36 %.)
#
# ## Latencies
#
# A rate says how long a unit is *busy*.
# A latency says how long the warp that started the operation *waits* for its result.

# %%
LADDER = {
    "a barrier operation": "barrier",
    "shared memory, a load": "smem_latency",
    "a waiting warp wakes": "wakeup",
    "a matrix product": "mma_latency",
    "global memory, a load": "global_latency",
    "a box by TMA, from L2": "tma_latency",
    "launch of a program": "launch",
}
plots.strips(
    {
        f"{words}{' (assumed)' if B200.rates[name].assumed else ''}": [B200[name]]
        for words, name in LADDER.items()
    },
    title="latencies on a B200, as the model has them",
    xlabel="cycles (log axis)",
    log_x=True,
)

# %% [markdown]
# When a block of K and V is fetched by TMA, its first byte arrives after about 1000 cycles.
# A product takes about 200 cycles in addition to its work.
# A step has one such fetch and two products, so warps that wait for each of them lose 1400 cycles or more per step, whatever the rates.
#
# ## The roof
#
# All SMs share the memory.
# A kernel that does f FLOPs per byte cannot do more FLOPs per second than f times the memory bandwidth.
# For attention f depends on the number of queries that use one read of K and V: with L queries per sequence it is about L FLOPs per byte in bf16.
#
# The dots were measured on one H200 (bf16, forward, recorded 2026-11-29): this package's plain Triton kernel, and its TLX kernel for Hopper.

# %%
H200_ROOF = recorded.newest_ceilings("H200")  # TB/s of a large copy, TFLOP/s of an 8192^3 product
B200_ROOF = (B200["hbm"] * B200["sms"] * B200["clock"] / 1e12, B200.peak_flops() / 1e12)
NAMES = ["pma32", "pma128", "self-window", "self-d64", "self", "dense"]
measured = {"plain Triton, H200": {}, "TLX, H200": {}}
for result in recorded.read_all():
    for t in result.content["timings"]:
        series = {"jfa:portable": "plain Triton, H200", "jfa:hopper": "TLX, H200"}.get(t["name"])
        if series and t["shape"] in NAMES:
            measured[series][t["shape"]] = t["forward_tflops"]
intensity = {n: shapes.SHAPES[n].flops() / shapes.SHAPES[n].least_bytes() for n in NAMES}
plots.roofline(
    intensity,
    {"an H200, measured": H200_ROOF, "a B200, modelled": B200_ROOF},
    measured,
    title="forward: measured points under the roofs of two chips",
)

# %% [markdown]
# To the left of the corner, memory bandwidth is the limit.
# To the right of it, the units inside the SM are.
# There, on `dense` and `self`, the two kernels differ most.
# The end of the chapter returns to this.
#
# ## Enough TLX to read on
#
# Plain Triton has no way to say "start this operation and continue".
# TLX, an extension of Triton, has one.
# You will write TLX from chapter 10 on; here you read it, and exercises 9.5 and 9.6 change it.
#
# | TLX | meaning |
# |---|---|
# | `tlx.local_alloc(shape, dtype, n)` | n buffers in SMEM, or in TMEM with `tlx.storage_kind.tmem` |
# | `tlx.alloc_barriers(n)` | n *mbarriers*. Each counts arrivals; a full count completes a *phase*. |
# | `tlx.barrier_expect_bytes(bar, n)` | tells the barrier: n bytes will come |
# | `tlx.async_descriptor_load(desc, buffer, [row, col], bar)` | starts a copy by TMA and continues. The barrier completes when the bytes have arrived. |
# | `tlx.async_dot(a, b, acc, mBarriers=[bar])` | starts a product and continues. The barrier completes when the product is done. |
# | `tlx.barrier_wait(bar, phase & 1)` | waits until that phase has completed. Phases are numbered 0, 1, 2, ..., and the last bit selects one. |
# | `tlx.local_load(buffer)` | copies SMEM or TMEM to registers; `local_store` copies back |
#
# ## Version 1: one warp group, one thing after another
#
# This is the kernel that a Triton programmer would write, expressed in TLX so that every wait is visible.


# %%
@triton.jit
def softmax_step(scores, m, l, scale_log2):
    """Add one block to a running softmax in base 2: -> (P, alpha, m, l)."""
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    alpha = tl.math.exp2(m - m_new)
    p = tl.math.exp2(scores * scale_log2 - m_new[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, axis=1)


@triton.jit
def load_block(k_desc, v_desc, k_tile, v_tile, full, row, BYTES: tl.constexpr):
    """Start the copies of one block of keys and values; `full` completes when both have arrived."""
    tlx.barrier_expect_bytes(full, 2 * BYTES)
    tlx.async_descriptor_load(k_desc, k_tile, [row, 0], full)
    tlx.async_descriptor_load(v_desc, v_tile, [row, 0], full)


@triton.jit
def turns(
    q_desc, k_desc, v_desc, out_ptr, blocks, scale_log2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend from BM queries; one warp group waits for each operation before it starts the next."""
    row = tl.program_id(0) * BM
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    k = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    v = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    s = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_full = tlx.alloc_barriers(1)
    multiplied = tlx.alloc_barriers(1)

    tlx.barrier_expect_bytes(q_full[0], 2 * BM * D)
    tlx.async_descriptor_load(q_desc, q[0], [row, 0], q_full[0])
    tlx.barrier_wait(q_full[0], 0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(blocks):
        load_block(k_desc, v_desc, k[0], v[0], kv_full[0], j * BN, 2 * BN * D)
        tlx.barrier_wait(kv_full[0], j & 1)  # all warps wait for memory
        tlx.async_dot(q[0], tlx.local_trans(k[0]), s[0], use_acc=False, mBarriers=[multiplied[0]])
        tlx.barrier_wait(multiplied[0], 0)  # all warps wait for the tensor core
        p, alpha, m, l = softmax_step(tlx.local_load(s[0]), m, l, scale_log2)
        tlx.local_store(p_tile[0], p.to(tl.bfloat16))
        if j > 0:
            tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
        tlx.async_dot(p_tile[0], v[0], acc[0], use_acc=j > 0, mBarriers=[multiplied[0]])
        tlx.barrier_wait(multiplied[0], 1)  # and again
    rows, d = row + tl.arange(0, BM), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], tlx.local_load(acc[0]) / l[:, None])


# %%
def make_problem(len_kv, seed=0):
    """Return bf16 q (256 queries, one head), k and v, and the output in fp64."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=g).bfloat16() for n in (256, len_kv, len_kv))
    want = torch.softmax(q.double() @ k.double().t() / math.sqrt(D), dim=1) @ v.double()
    return q, k, v, want


def launcher(kernel, problem, rows, block=BN, **constants):
    """Return a function that launches `kernel` on the problem, `rows` queries per program."""
    q, k, v, _ = problem
    out = torch.full((256, D), float("nan"))
    boxes = [TensorDescriptor.from_tensor(q, [BM, D])]
    boxes += [TensorDescriptor.from_tensor(x, [block, D]) for x in (k, v)]
    scale, blocks = math.log2(math.e) / math.sqrt(D), len(k) // block
    constants |= dict(D=D, BM=BM, BN=block)

    def launch():
        kernel[(256 // rows,)](*boxes, out, blocks, scale, **constants)
        return out

    return launch


def record(launch, chip=B200):
    """Return the timeline of a launch on one SM under the policy "timed" (modelled)."""
    with emulator.options(policy="timed", rates=chip, trace=True, max_ctas=1):
        launch()
    return Timeline.of(emulator.last())


def busy(line, unit="tensor"):
    """Return the share of the run in which a unit of the SM was busy, over all its programs."""
    spans = [s for (_, u), found in line.occupied.items() if u == unit for s in found]
    return sum(end - begin for begin, end in spans) / line.cycles


BLOCKS = 8
PROBLEM = make_problem(BLOCKS * BN)
SCORE = {}  # version -> timeline


def study(name, kernel, rows, block=BN, **constants):
    """Run on three schedules, compare with fp64, then model it on one SM."""
    launch = launcher(kernel, PROBLEM, rows, block, **constants)
    for policy in ("eager", "lazy", "random"):
        with emulator.options(policy=policy, seed=1):
            error = float((launch() - PROBLEM[3]).abs().max())
    SCORE[name] = line = record(launch)
    print(f"{name}: largest error {error:.0e}; {line.cycles:,.0f} modelled cycles for 256 queries,")
    print(f"    tensor core busy {busy(line):.1%}, exp2 units {busy(line, 'mufu'):.1%}")
    return line


line = study("1: turns", turns, BM)
start = line.start + 0.2 * line.cycles
plots.timelines({"version 1: two steps from the middle": line}, (start, start + 14_000))

# %% [markdown]
# **How to read it.**
# There is one lane per worker and one per unit.
# `main` is the warp group; `TMA`, `tensor core` and `exp2 units` are units, each with its busy share of the span shown.
# Orange marks a warp group that waits, and an arrow leads from the completion that ended a wait to the wait.
# Draw a vertical line anywhere: two units are hardly ever busy at the same time.
#
# Over the whole run the tensor core is busy for about 15 % of the time, not 36 %; the difference is latency, which is paid in each step.
# Where do the cycles go?
# The timeline sums the waiting time per barrier.

# %%
for (track, barrier), waited in list(line.waits().items())[:3]:
    print(f"{track} waits {waited:8,.0f} cycles for {barrier}")
steps = 2 * BLOCKS
by_arithmetic = tile_cycles(BM, BN, D, 2, B200)
print(f"a step of 128 queries: {line.cycles / steps:,.0f} cycles; by arithmetic the units need")
print({unit: round(c) for unit, c in by_arithmetic.items()})

# %% [markdown]
# ## What the compiler makes of plain Triton
#
# Does the compiler remove these waits?
# It removes some of them.
# Here is the same loop in plain Triton, compiled for a Hopper (sm_90) and a Blackwell (sm_100) GPU.
# The cell takes about 20 seconds.
# It lists the important instructions of the inner loop in order, in PTX, the assembly language of NVIDIA GPUs; runs of equal instructions are counted.
# Predict: which of the three waits of version 1 are gone?

# %%
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def plain_loop(
    q_ptr, k_ptr, v_ptr, out_ptr, scale_log2, blocks,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :])
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for block in range(blocks):
        j = block * BN + tl.arange(0, BN)
        k = tl.load(k_ptr + j[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k))
        p, alpha, m, l = softmax_step(s, m, l, scale_log2)
        v = tl.load(v_ptr + j[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
    tl.store(out_ptr + i[:, None] * D + d[None, :], acc / l[:, None])


TYPES = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*fp32"}
TYPES |= {"scale_log2": "fp32", "blocks": "i32", "D": "constexpr", "BM": "constexpr"}
WORDS = {  # PTX -> what it means
    "cp.async.cg": "copies of K or V start",
    "cp.async.wait_group": "WAIT for copies",
    "wgmma.mma_async": "a product starts",
    "wgmma.wait_group": "WAIT for products",
    "tcgen05.mma": "a product starts",
    "mbarrier.try_wait": "WAIT for a product",
    "tcgen05.ld": "tensor memory to registers",
    "tcgen05.st": "registers to tensor memory",
    "ex2.approx": "exponentials",
}


def inner_loop(arch, warps):
    """Return (instructions of plain_loop's inner loop in order, SMEM bytes, TMEM columns)."""
    sizes = {"D": 128, "BM": 128, "BN": 128}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(plain_loop, {**TYPES, "BN": "constexpr"}, sizes, aligned)
    made = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps})
    ptx = made.asm["ptx"]
    # a loop: from a label to the last branch back to it
    labels = {m[1]: m.start() for m in re.finditer(r"^(\$L__BB\w+):", ptx, re.M)}
    back = [(labels[m[1]], m.end()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\w+)", ptx)]
    begin, end = max((b for b in back if b[0] < b[1]), key=lambda b: b[1] - b[0])
    loop = ptx[begin:end]
    found = [w for w in re.findall("|".join(map(re.escape, WORDS)), loop)]
    runs = []
    for word in found:
        if runs and runs[-1][0] == word:
            runs[-1][1] += 1
        else:
            runs.append([word, 1])
    return runs, made.metadata.shared, getattr(made.metadata, "tmem_size", 0)


for arch, warps in ((90, 8), (100, 4)):
    runs, smem, columns = inner_loop(arch, warps)
    print(f"sm_{arch}: {smem:,} bytes of SMEM, {columns} columns of TMEM")
    for word, count in runs:
        print(f"    {count:>4} x {word:<20} {WORDS[word]}")

# %% [markdown]
# **The loads no longer make the warps wait.**
# Copies start early and are waited for late; that is the effect of `num_stages`.
#
# **The products still do.**
# On both chips there is a wait between S and the exponentials, because the exponentials need S.
# The same warps compute the exponentials, so they have nothing to do during that wait.
# On sm_100 the compiler even starts the next S early, after PV.
# But then the same warps return to the start of the loop and wait for both products.
#
# **Tensor memory is full.**
# TMEM has 512 columns, and on sm_100 this program takes all of them.
# S and the accumulator need 128 columns each and P needs 64, and the sum is rounded up to a power of two.
# P gets its own columns, although the S that it was computed from is no longer needed.
# If P were stored over S, 256 columns would be enough, and with fewer stages in SMEM two programs would fit on an SM.
# As it is, only one program fits, and while it waits, the units idle.
#
# Triton's model has one kind of warp: all warps run the same code in the same order.
# It cannot express how long a piece of tensor memory is in use, and it has no access to the hardware's queue of chapter 08.
# The rest of this course leaves that model.
#
# ## Versions 2, 3, 4: improvements within the model
#
# - **2: loads ahead.**
#   A ring of two buffers for K and V: the load of the next block starts before this block is used.
#   (That is what `num_stages` does.)
# - **3: two groups.**
#   Two warp groups with 128 queries each, like two programs on one SM.
#   While one waits, the other may work.
#   P must be stored over S, or TMEM is too small.
# - **4: both.**
#   Now SMEM is the limit: two rings of two blocks of 128 keys would take 256 KB.
#   So the blocks have 64 keys.


# %%
@triton.jit
def one_group(
    q_desc, k_desc, v_desc, out_ptr, part, blocks, scale_log2, q, k, v, s, p_tile, acc, q_fulls,
    kv_fulls, multiplied, GROUPS: tl.constexpr, AHEAD: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Run version 1 for the queries of one group; its ring holds AHEAD blocks of keys."""
    row = (tl.program_id(0) * GROUPS + part) * BM
    ring = part * AHEAD  # this group's first buffer
    tlx.barrier_expect_bytes(q_fulls[part], 2 * BM * D)
    tlx.async_descriptor_load(q_desc, q[part], [row, 0], q_fulls[part])
    tlx.barrier_wait(q_fulls[part], 0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    for j in range(AHEAD - 1):
        at = ring + j
        load_block(k_desc, v_desc, k[at], v[at], kv_fulls[at], j * BN, 2 * BN * D)
    for j in range(blocks):
        later = j + AHEAD - 1
        if later < blocks:
            at = ring + later % AHEAD
            load_block(k_desc, v_desc, k[at], v[at], kv_fulls[at], later * BN, 2 * BN * D)
        at = ring + j % AHEAD
        tlx.barrier_wait(kv_fulls[at], (j // AHEAD) & 1)
        keys = tlx.local_trans(k[at])
        tlx.async_dot(q[part], keys, s[part], use_acc=False, mBarriers=[multiplied[part]])
        tlx.barrier_wait(multiplied[part], 0)
        p, alpha, m, l = softmax_step(tlx.local_load(s[part]), m, l, scale_log2)
        tlx.local_store(p_tile[2 * part], p.to(tl.bfloat16))
        if j > 0:
            tlx.local_store(acc[part], tlx.local_load(acc[part]) * alpha[:, None])
        done = multiplied[part]
        tlx.async_dot(p_tile[2 * part], v[at], acc[part], use_acc=j > 0, mBarriers=[done])
        tlx.barrier_wait(multiplied[part], 1)
    rows, d = row + tl.arange(0, BM), tl.arange(0, D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], tlx.local_load(acc[part]) / l[:, None])


@triton.jit
def groups_kernel(
    q_desc, k_desc, v_desc, out_ptr, blocks, scale_log2,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Run GROUPS warp groups, each with its own queries, its own ring and its own half of TMEM."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, GROUPS)
    k = tlx.local_alloc((BN, D), tl.bfloat16, GROUPS * AHEAD)
    v = tlx.local_alloc((BN, D), tl.bfloat16, GROUPS * AHEAD)
    scores = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)  # P is stored over its S
    s = tlx.local_alloc((BM, BN), tl.float32, GROUPS, tlx.storage_kind.tmem, reuse=scores)
    p_tile = tlx.local_alloc((BM, BN), tl.bfloat16, 2 * GROUPS, tlx.storage_kind.tmem, reuse=scores)
    acc = tlx.local_alloc((BM, D), tl.float32, GROUPS, tlx.storage_kind.tmem)
    q_fulls = tlx.alloc_barriers(GROUPS)
    kv_fulls = tlx.alloc_barriers(GROUPS * AHEAD)
    multiplied = tlx.alloc_barriers(GROUPS)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # group 0
            one_group(
                q_desc, k_desc, v_desc, out_ptr, 0, blocks, scale_log2, q, k, v, s, p_tile, acc,
                q_fulls, kv_fulls, multiplied, GROUPS, AHEAD, D, BM, BN,
            )  # fmt: skip
        if GROUPS == 2:
            with tlx.async_task(num_warps=4):  # group 1
                one_group(
                    q_desc, k_desc, v_desc, out_ptr, 1, blocks, scale_log2, q, k, v, s, p_tile, acc,
                    q_fulls, kv_fulls, multiplied, GROUPS, AHEAD, D, BM, BN,
                )  # fmt: skip


study("2: loads ahead", groups_kernel, BM, GROUPS=1, AHEAD=2)
line = study("3: two groups", groups_kernel, 2 * BM, GROUPS=2, AHEAD=1)
study("4: both, 64 keys", groups_kernel, 2 * BM, 64, GROUPS=2, AHEAD=2)
start = line.start + 0.3 * line.cycles
plots.timelines({"version 3: two groups, each as in version 1": line}, (start, start + 14_000))

# %% [markdown]
# Version 2 saves the wait for memory and nothing else.
# Version 3 is nearly twice as fast: when one group waits, the other one often works.
# Version 4 does not combine both gains: it has half as many keys per step, so twice as many waits for products.
#
# What would help now?
# Both groups read *the same* K and V, but each loads its own copy, as two separate programs would.
# **If one worker loaded for both**, a single ring of 128-key blocks would fit.
# **If another worker issued the products**, the tensor core would get the next product while the softmax of the last one still runs.
# Workers with different jobs: that is **warp specialization**.
# Its price is that each transfer of data between workers needs a barrier.
#
# ## Version 5: the package's kernel
#
# The package's forward for Blackwell has six kinds of workers.
# Chapters 10 to 13 build it.
# Here it is a black box, on a problem of the same size: 256 queries and 1024 keys.

# %%
from jfa.kernels.blackwell import modelled

SCORE["5: the package's"] = modelled.record_one_sm(modelled.forward_launch(256, BLOCKS * BN), B200)
names = {"tensor": "tensor core", "mufu": "exp2 units", "smem": "SMEM", "tmem_read": "TMEM reads"}
plots.bars(
    list(SCORE),
    {words: [100 * busy(one, unit) for one in SCORE.values()] for unit, words in names.items()},
    title="share of the time in which each unit is busy, 256 queries x 1024 keys (modelled)",
    xlabel="version",
    ylabel="percent",
    form="{:.0f}",
)

# %%
line = SCORE["5: the package's"]
start = line.start + 0.45 * line.cycles
plots.timelines({"version 5: from the middle": line}, (start, start + 7_000))

# %% [markdown]
# This picture shows half as many cycles as the last timeline.
# The tensor core is busy for three quarters of it, and most of the time at least one of the two softmax groups computes.
# The lanes `mma`, `load` and `store` wait most of the time.
# That costs nothing: a waiting warp occupies no unit, and no other warp waits for it.
#
# ## The bound
#
# How much faster could it be?
# If the units overlapped perfectly, a step would take as long as its busiest unit.
# Compare the cycles per step of 256 queries and 128 keys:

# %%
bound = max(tile_cycles(256, BN, D, 2, B200).values())
versions = {name: one.cycles / BLOCKS for name, one in SCORE.items()}
versions |= {"units take turns (sum)": sum(cycles.values()), "perfect overlap (bound)": bound}
plots.panels(
    list(versions),
    {"modelled cycles per step": (list(versions.values()), "{:,.0f}")},
    title="a step of 256 queries x 128 keys, beginning and end of the tile included",
)

# %% [markdown]
# ## When it does not pay off
#
# A specialized kernel needs time to start: it initializes barriers, starts workers and fills the ring, and meanwhile the units idle.
# So the number of key blocks matters.
# Fit a line through the cycles: a fixed part, and a part per block.

# %%
blocks = [1, 2, 4, 8, 16]
cycles_of = {"1: turns": [], "5: the package's": []}
for n in blocks:
    short = make_problem(n * BN)
    cycles_of["1: turns"].append(record(launcher(turns, short, BM)).cycles)
    cycles_of["5: the package's"].append(
        modelled.record_one_sm(modelled.forward_launch(256, n * BN), B200).cycles
    )
for name, found in cycles_of.items():
    per_block = (found[-1] - found[-2]) / (blocks[-1] - blocks[-2])
    fixed = found[-1] - blocks[-1] * per_block
    print(f"{name:<18} {fixed:6,.0f} cycles + {per_block:6,.0f} per block")
useful = [n * bound for n in blocks]
plots.lines(
    [n * BN for n in blocks],
    {name: [100 * u / c for u, c in zip(useful, found)] for name, found in cycles_of.items()},
    title="tensor cycles that are needed, as a share of the time (modelled)",
    xlabel="keys per sequence",
    ylabel="percent",
    log_x=True,
    from_zero=True,
)

# %% [markdown]
# With 128 keys two thirds of the specialized kernel's time are its beginning and its end.
# In this model it is still twice as fast as version 1, and with 2048 keys more than four times as fast.
#
# The model does not include the cost of registers, code size, or a second program on the SM.
# So look at measurements on an H200, forward: how many times as fast as this package's plain Triton kernel is its TLX kernel?

# %%
order = sorted(NAMES, key=intensity.get)
plain, special = measured["plain Triton, H200"], measured["TLX, H200"]
plots.panels(
    [f"{n}, {intensity[n]:,.0f} FLOPs per byte" for n in order],
    {
        "TLX / plain Triton": ([special[n] / plain[n] for n in order], "{:.2f}"),
        "TLX, share of the roof, %": (
            [100 * special[n] / min(intensity[n] * H200_ROOF[0], H200_ROOF[1]) for n in order],
            "{:.0f}",
        ),
    },
    title="measured on one H200, bf16, forward (driver 580, 2026-11-29)",
)

# %% [markdown]
# In three cases there is little to gain:
#
# - **Memory bandwidth is the limit** (`pma32`): both kernels are near the roof of memory, and no change inside the SM can raise it.
# - **Exponentials are the limit** (`self-d64`): with D = 64 there are half as many FLOPs per exponential.
#   On an H200 both units then need the same time, and the rest of the softmax runs on the same warps.
# - **There are few steps** (`self-window`): a window of 256 keys is only a few blocks per tile.
#   Public reports agree.
#   The TLX template of FlexAttention was *slower* below 512 keys (0.89 times as fast at 128 to 256 keys), and 1.12 to 1.13 times as fast at 8k to 16k keys (PyTorch pull request 188644, 2026).
#
# ## How much depends on unknown rates
#
# Some rates are assumed.
# A conclusion that changes when an assumed rate is halved or doubled would not be reliable.
# The bars show the share of time in which the tensor core is busy, with each rate once at half and once at twice its value.

# %%
DOUBTED = ["tmem_read", "tmem_write", "tma_latency", "wakeup", "barrier", "smem_latency", "cvt"]
short = make_problem(4 * BN)
measures = {
    "version 1": lambda chip: busy(record(launcher(turns, short, BM), chip)),
    "version 5": lambda chip: busy(modelled.record_one_sm(package, chip)),
}
package = modelled.forward_launch(256, 4 * BN)
bars = {}
for name, measure in measures.items():
    base = 100 * measure(B200)
    for rate in DOUBTED:
        found = [100 * measure(B200.scaled(rate, factor)) for factor in (0.5, 2.0)]
        low, high = min(found + [base]), max(found + [base])
        bars[f"{name}, {rate}: {low:.1f} to {high:.1f} %"] = [
            plots.Segment(low, base - low + 0.1, "", 1),
            plots.Segment(base, high - base + 0.1, "", 0),
        ]
plots.segments(
    bars,
    title="tensor core busy, 256 x 512: from its worst to its best (modelled)",
    xlabel="percent; the two colors meet at the current rates",
)

# %% [markdown]
# The ranges of the two versions never overlap, so that conclusion does not depend on the assumed rates.
# *How* busy version 5 is does depend on them.
# It depends on the TMA's latency, because with four blocks of keys the start of the tile weighs a lot, and on the bandwidth of tensor memory, for which no figure for a B200 is published.
#
# ## Summary
#
# * Each unit of an SM has a rate, and operations also have latencies; all units can run at the same time.
# * A step costs between the largest and the sum of its units' cycles, plus the latencies that it waits for.
# * On a B200 products and exponentials are balanced, so they must overlap; in plain Triton the same warps wait for both.
# * Warp specialization: workers with different jobs, a shared ring, and a barrier for each transfer.
# * It gains little if bandwidth or exponentials are the limit, or if there are few steps.
#
# ## Exercises
#
# Open [exercises/09_the_machine_underneath.py](../exercises/09_the_machine_underneath.py).
# The minutes are an [estimate by a rule](00_start_here.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 9.1 | cycles of a tile, unit by unit | 1 | 15 |
# | 9.2 | predict the limit, forward and backward | 2 | 45 |
# | 9.3 | predict the ring: round trip, period, buffers | 2 | 20 |
# | 9.4 | busy shares and the longest chain | 2 | 50 |
# | 9.5 | bug hunt: a wait that comes too early | 2 | 25 |
# | 9.6 | the next product before this softmax | 3 | 40 |
#
# ## Checkpoint
#
# <details><summary>A B200, D = 64, bf16, 256 queries and 128 keys: which unit is the limit?</summary>
#
# The exp2 units.
# The products need 1024 cycles, the exponentials still 2048.
# </details>
#
# <details><summary>A kernel's tensor core is busy for 20 % of the time, its exp2 units too. Is it limited by either?</summary>
#
# Probably by neither: if no unit is near 100 %, waits are the limit.
# </details>
#
# <details><summary>Why can plain Triton hide the wait for K and V, and not the wait for S?</summary>
#
# The next step's K and V do not depend on this step's results, so the same warps can start their loads early.
# The exponentials need S, and they are the next work of those same warps.
# (The product for the *next* S could also start early, as in exercise 9.6. Then one group of warps must interleave by hand what two kinds of workers overlap by themselves.)
# </details>
#
# <details><summary>Two programs on one SM hide each other's waits. Why is that no cure on a B200 for D = 128?</summary>
#
# Both must fit into 512 columns of tensor memory and 228 KB of SMEM.
# And each loads its own K and V.
# </details>
#
# ## Try this
#
# - Model version 1 with H200 rates: `record(launcher(turns, PROBLEM, BM), H200)`.
#   Its tensor core is busy for a larger share.
#   Why?
#   (The kernel itself would not run there: TMEM is Blackwell's.)
# - In version 4 use blocks of 32 keys.
#   Predict the cycles from the runs with 128 and 64 keys.
# - Give `tile_cycles` 8-bit inputs and D = 256.
#   Which unit would you have to make faster, and by how much, before another one becomes the limit?
#
# ## Pitfalls
#
# A cell shows a number for each of them.
#
# **The sum in place of the largest.** "The products take 2048 cycles and the exponentials 2048, so a step takes 4096."
# That is true only if nothing overlaps.
# The opposite mistake is to read a bound as a time:

# %%
step = {name: versions[name] for name in ("1: turns", "5: the package's")}
print({name: f"{c / bound:.1f} times the bound" for name, c in step.items()})

# %% [markdown]
# **Latency counted once per block.**
# With two buffers a load runs during the step before, so its latency costs time only if it is longer than that step.
# The cycles that versions 1 and 2 wait for K and V:

# %%
for name in ("1: turns", "2: loads ahead"):
    kv = sum(c for (_, bar), c in SCORE[name].waits().items() if bar.startswith("kv_full"))
    print(f"{name}: {kv:,.0f} of {SCORE[name].cycles:,.0f} cycles")

# %% [markdown]
# **Padded work counted as work.**
# A tile of 128 rows takes the tensor core just as long if only 32 of them exist.
# "Busy" is not "useful":

# %%
for queries in (32, 64, 128):
    share = queries / 128
    print(f"{queries} queries in a tile of 128: busy 70 % would be {70 * share:.0f} % useful")

# %% [markdown]
# **Speeding up a unit that is not the limit.**
# In version 3 the tensor core is busy for 30 % of the time, and the exp2 units for 34 %.
# How much faster is the kernel if the exponentials take half the time?

# %%
launch = launcher(groups_kernel, PROBLEM, 2 * BM, GROUPS=2, AHEAD=1)
now, then = record(launch).cycles, record(launch, B200.scaled("mufu", 2)).cycles
print(f"{now:,.0f} cycles; with exp2 units twice as fast {then:,.0f}: {1 - then / now:.0%} less")

# %% [markdown]
# | pitfall | where you saw it |
# |---|---|
# | the sum in place of the largest, a bound read as a time | the figure of cycles per step |
# | latency as a cost per block | versions 1 and 2 |
# | busy read as useful | tiles of 32 queries |
# | speeding up a unit that is not the limit | exp2 units twice as fast |
# | FlashAttention-4's algorithm with one kind of warp, without its roles | versions 1 and 5 |
# | specializing a kernel that bandwidth or exponentials limit | the measured ratios |
#
# ## What differs on a real GPU
#
# - Each SM has four schedulers, which hide many short latencies by switching between warps at every instruction.
#   The model switches only between operations.
# - Bank conflicts, lower clocks under a power limit, and the two halves of the L2 cache are not modelled.
#   Whether a B200 can sustain its tensor rate within its power limit is not answered here.
# - Not every Blackwell GPU is a B200.
#   The consumer chips (sm_120) have neither tensor memory nor these products (flash-attention, issue 2634).
# - Published for a B200, not measured here: FlashAttention-4 reaches 1613 TFLOP/s, 71 % of the peak (arXiv 2603.05451, 2026).
#   FP8 does not double that: TLX's own MXFP8 forward ran at about 1180 TFLOP/s, and its bf16 one at 1182 (1.052 ms at batch 1, 32 heads, 8704 tokens, D = 128; facebookexperimental/triton, 2026; TFLOP/s derived).
#   The exponentials are the limit, as the second group of bars in the first bar chart shows.
#
# ## Verified here, and not
#
# Versions 1 to 4 ran on the emulator under three schedules and were compared with fp64; version 5 has tests of its own.
# All their cycles are modelled with the rates of `jfa/emulator/rates.py`, which names its sources; no B200 was available.
# The inner loops were compiled by fbtriton 3.7.4 when this notebook ran.
# The H200 points were measured on 2026-11-29 and are read from `jfa/bench/results`.
#
# ## Sources
#
# - FlashAttention-4, arXiv 2603.05451 (2026): rates per SM, cycles of a tile, 71 % of the peak.
# - SemiAnalysis, microbench-blackwell: clock, product and TMA latencies.
#   TileSight: L2 and HBM bandwidth.
# - PyTorch pull request 188644 (2026): the TLX template of FlexAttention by sequence length.
#   Dao-AILab/flash-attention issue 2634: sm_120.
# - `jfa/emulator/rates.py`, `jfa/kernels/blackwell/modelled.py`, [docs/blackwell-notes.md](../docs/blackwell-notes.md): the full table of doubted rates.
#
# Next: [10 TLX primitives](10_tlx_primitives.py).
