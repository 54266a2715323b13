# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 The Blackwell backward
#
# **Goals.** Write the five products transposed, and say why.
# Know at any moment which role uses which columns of tensor memory.
# Let dQ leave through staging buffers by TMA reduce-add, and release its columns early.
# Trade registers against cycles, with the compiler's report on both sides.
# Keep dQ on the chip where all sequences share their queries.
#
# **Time.** 90 minutes, and 185 for the exercises.
# **Needs.** Chapters 05 and 12.
# No GPU: the emulator runs every version, and its cycles are a model of a B200.

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
from jfa import plots, reference
from jfa.emulator.rates import B200
from jfa.emulator.timeline import Timeline
from jfa.kernels.blackwell import backward_1cta, examples, launch
from jfa.layout import offsets_from_lengths

D, BM, BN = 128, 128, 128

# %% [markdown]
# ## The mental model: four seats for five results
#
# In the forward the difficult part was the softmax.
# In the backward it is *space* in tensor memory.
# Five products per block need space for five results, and at D = 128 tensor memory has space for four.
# So two results, dP and dQ, share one place (we call it the *seat*) in turn, and dQ is slow to leave it.
# The next dP has to wait until dQ is out.
# Most of this chapter is about that one seat.
#
# A program takes a tile of 128 keys and walks over all blocks of 128 queries that see it (chapter 05).
# dK and dV of the tile stay on the chip until all blocks are done.
# dQ of a block does not: other programs add to the same dQ, so each block's part is sent to memory right away and added there.

# %%
boxes = {
    "load": ((0.0, 1.6, 1.9, 1.4), "1 warp\nTMA: K, V;\nQ, dO per block", 5),
    "mma": ((3.1, 1.6, 2.3, 1.4), "1 warp\nfive products\nper block", 0),
    "compute": ((6.7, 2.5, 2.6, 1.4), "2 groups of 4 warps\nP from S\ndS from dP", 2),
    "reduce": ((6.7, 0.5, 2.6, 1.4), "4 warps\ndQ out of\ntensor memory", 1),
    "memory": ((10.3, 0.5, 1.7, 1.4), "dQ, fp32:\nmany programs\nadd", 5),
}
links = [("load", "mma", "->"), ("mma", "compute"), ("mma", "reduce"), ("reduce", "memory", "->")]
plots.blocks(boxes, links, title="four roles, and what each hands to the next")

# %% [markdown]
# ## The math, down to shapes
#
# Chapter 05 had S with a row per query.
# Here S is transposed: **keys are rows**.
#
# | | product | first operand is in | result [rows, columns] | is needed |
# |---|---|---|---|---|
# | 1 | $S^T = K Q^T$ | shared memory | [keys, queries] | until P is made |
# | 2 | $dP^T = V\, dO^T$ | shared memory | [keys, queries] | until dS is made |
# | 3 | $dV \mathrel{+}= P^T dO$ | **tensor memory** | [keys, D] | all blocks |
# | 4 | $dK \mathrel{+}= dS^T Q$ | shared memory | [keys, D] | all blocks |
# | 5 | $dQ = dS\, K$ | shared memory, read transposed | [queries, D] | until it has left |
#
# with $P^T = 2^{S^T \cdot scale - lse}$ and $dS^T = P^T \circ (dP^T - \delta)$, where $lse$ and $\delta$ belong to a query, so to a *column*.
#
# Why transposed?
# A product's first operand may be in tensor memory, with its rows on the same lanes as the result's.
# dV has a row per key, and so has $P^T$: it can go from the registers straight back to tensor memory.
# If S were not transposed, P would have to go through shared memory to be read transposed.
# $dS^T$ must go there anyway: product 5 reads it transposed, and an operand in tensor memory cannot be read transposed.
#
# A query that does not exist gets $lse = +\infty$, so its column of P is zero, and nothing else needs a mask.
#
# ### The memory budget
#
# At $D = 128$ each fp32 result takes 128 of the 512 columns: S, dP, dV and dK fill tensor memory, and P shares the columns of S (chapter 12).
# No columns are left for dQ.
# It takes the place of dP, which is free once dS is made.
# Shared memory, in KiB:

# %%
kib = {"K": 32, "V": 32, "Q, two slots": 64, "dO": 32, "dS": 32, "dQ's stages, 4 x 8": 32}
print(plots.table(("buffer", "KiB"), [*kib.items(), ("lse and delta, two slots", 2)]))
print(f"together {sum(kib.values()) + 2} of 227 KiB")

# %% [markdown]
# ## Version 1: one role
#
# Four warps do all steps, one after the other.
# It is chapter 05's kernel with tensor memory, for lengths that are multiples of 128.
# Read it for the *order of the five products* and for the reuse of `dp`.


# %%
@triton.jit
def one_role(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    blocks, scale_log2, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dK, dV of 128 keys; add dQ / scale of all blocks to memory. lse is in base 2."""
    q = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    do = tlx.local_alloc((BM, D), tl.bfloat16, 1)
    k = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    v = tlx.local_alloc((BN, D), tl.bfloat16, 1)
    ds = tlx.local_alloc((BN, BM), tl.bfloat16, 1)
    stage = tlx.local_alloc((BM, D), tl.float32, 1)
    s = tlx.local_alloc((BN, BM), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((BN, BM), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((BN, BM), tl.float32, 1, tlx.storage_kind.tmem)
    dq = tlx.local_alloc((BM, D), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    dv = tlx.local_alloc((BN, D), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BN, D), tl.float32, 1, tlx.storage_kind.tmem)
    kv_full = tlx.alloc_barriers(1)
    q_full = tlx.alloc_barriers(1)
    s_full = tlx.alloc_barriers(1)
    dp_full = tlx.alloc_barriers(1)
    dq_full = tlx.alloc_barriers(1)

    first_key = tl.program_id(0) * BN
    tlx.barrier_expect_bytes(kv_full[0], 4 * BN * D)
    tlx.async_descriptor_load(k_desc, k[0], [first_key, 0], kv_full[0])
    tlx.async_descriptor_load(v_desc, v[0], [first_key, 0], kv_full[0])
    tlx.barrier_wait(kv_full[0], 0)
    for j in range(blocks):
        rows = j * BM + tl.arange(0, BM)
        tlx.barrier_expect_bytes(q_full[0], 4 * BM * D)
        tlx.async_descriptor_load(q_desc, q[0], [j * BM, 0], q_full[0])
        tlx.async_descriptor_load(do_desc, do[0], [j * BM, 0], q_full[0])
        tlx.barrier_wait(q_full[0], j & 1)
        tlx.async_dot(k[0], tlx.local_trans(q[0]), s[0], use_acc=False, mBarriers=[s_full[0]])
        tlx.async_dot(v[0], tlx.local_trans(do[0]), dp[0], use_acc=False, mBarriers=[dp_full[0]])

        tlx.barrier_wait(s_full[0], j & 1)
        lse = tl.load(lse_ptr + rows)
        p_t = tl.math.exp2(tlx.local_load(s[0]) * scale_log2 - lse[None, :])
        tlx.local_store(p[0], p_t.to(tl.bfloat16))
        tlx.async_dot(p[0], do[0], dv[0], use_acc=j > 0, force_async=True)

        tlx.barrier_wait(dp_full[0], j & 1)
        ds_t = p_t * (tlx.local_load(dp[0]) - tl.load(delta_ptr + rows)[None, :])
        tlx.local_store(ds[0], ds_t.to(tl.bfloat16))
        tlx.fence("async_shared")  # the tensor core reads shared memory by another way
        tlx.async_dot(ds[0], q[0], dk[0], use_acc=j > 0, force_async=True)
        ds_rows = tlx.local_trans(ds[0])
        tlx.async_dot(ds_rows, k[0], dq[0], use_acc=False, mBarriers=[dq_full[0]])

        tlx.barrier_wait(dq_full[0], j & 1)  # products run in order: dV and dK are done, too
        tlx.async_descriptor_store_wait(0)  # the stage is empty
        tlx.local_store(stage[0], tlx.local_load(dq[0]))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(dq_desc, stage[0], [j * BM, 0], store_reduce="add")
    tlx.async_descriptor_store_wait(0)
    at = (first_key + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, tlx.local_load(dk[0]))
    tl.store(dv_ptr + at, tlx.local_load(dv[0]))


# %% [markdown]
# Three things to see:
#
# * **One wait for three products.** The tensor core finishes products in the order in which one warp issued them. So the last one's barrier says that dV and dK are done as well.
# * **`store_reduce="add"`.** The TMA adds the stage to memory, one fp32 number after the other, at the L2 cache. No warp waits for it; the kernel must only not overwrite the stage before `store_wait` says that it has been read.
# * **No scale on dQ.** It is multiplied once, at the very end, outside. The sketch that this course grew from also multiplied dQ by $\ln 2$, since its K was scaled into base 2. The public kernel (2889aef) feeds K unscaled, and so do we: that factor is out of date, and its symptom is a dQ that is too small by the factor 0.69.

# %%
GENERATOR = torch.Generator().manual_seed(0)


def inputs(len_q, len_kv):
    """Return q, k, v, dout bf16, lse (base 2), delta fp32; and (dq, dk, dv) fp64 by autograd."""
    q, k, v, do = (
        torch.randn(n, D, generator=GENERATOR).bfloat16() for n in (len_q, len_kv, len_kv, len_q)
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T / math.sqrt(D)
    out = scores.softmax(1) @ leaves[2]
    want = torch.autograd.grad(out, leaves, do.double())
    lse = (scores.logsumexp(1) / math.log(2)).detach().float()
    return (q, k, v, do, lse, (out * do.double()).sum(1).detach().float()), want


def run_one_role(q, k, v, do, lse, delta):
    """Return (dq, dk, dv) in fp32."""
    dq, dk, dv = (torch.zeros(len(t), D) for t in (q, k, v))
    boxes = [TensorDescriptor.from_tensor(t, [128, D]) for t in (q, k, v, do, dq)]
    scale = D**-0.5
    one_role[(len(k) // BN,)](
        *boxes, dk, dv, lse, delta, len(q) // BM, scale / math.log(2), D=D, BM=BM, BN=BN
    )
    return dq * scale, dk * scale, dv


given, want = inputs(256, 256)
for policy in ("lazy", "random"):
    with emulator.options(policy=policy, seed=1):
        found = run_one_role(*given)
    errors = [float((a - b).abs().max()) for a, b in zip(found, want)]
    print(f"{policy:7} largest error of dQ, dK, dV:", *(f"{e:.4f}" for e in errors))

# %% [markdown]
# The operands are bf16, so errors near 0.01 are expected.
# Now the modelled time: one tile of 128 keys against 1,024 queries.


# %%
def timed(launch, *args, **kwargs):
    """Return the timeline of the last kernel that a call launches, on the modelled B200."""
    with emulator.options(policy="timed", rates=B200, trace=True):
        launch(*args, **kwargs)
    return Timeline.of(emulator.last())


def middle(line):
    """Return the steady part of a run: from 35 to 80 %."""
    return tuple(line.start + share * line.cycles for share in (0.35, 0.8))


lines = {"1: one role": timed(run_one_role, *inputs(1024, 128)[0])}
print(lines["1: one role"].table(max_waits=4))

# %% [markdown]
# ## Version 2: four roles
#
# From here on the kernel is the package's, [jfa/kernels/blackwell/backward_1cta.py](../jfa/kernels/blackwell/backward_1cta.py).
# It has options, and with all of them off it is the straightforward version: four roles, one stage for dQ, nothing released early.
# `examples.backward` runs it on the same tile.
#
# Open the file next to this page.
# The comment at its top lists the roles.
# In [backward_memory.py](../jfa/kernels/blackwell/backward_memory.py) `Memory` and the aggregates above it name every buffer together with its barriers.
# The mma role's order is the table above `multiply_tile`:

# %%
source = inspect.getsource(backward_1cta)
print(source[source.index("# Issue order") : source.index("@triton.jit\ndef multiply_tile")])

# %% [markdown]
# ### How dQ is stored
#
# A slice is 16 columns of dQ: 128 rows of 64 bytes, 8 KiB.
# The reduce role loads a slice into registers, writes it to a stage, and has the TMA add it to memory.


# %%
print(inspect.getsource(backward_1cta.add_slice.fn))
print(inspect.getsource(backward_1cta.reduce_dq.fn))

# %% [markdown]
# `async_descriptor_store_wait(n)` waits until at most `n` of *this task's* stores have not yet read their stage.
# With `stages - 1` pending stores allowed, the stage that was filled longest ago is free.
#
# `held` is early release, version 4.
# Predict before you run: how much do two stages win over one, and four over two?

# %%
CHOICES = {
    "2: four roles, 1 stage": dict(dq_stages=1, held_slices=0),
    "3: 2 stages": dict(dq_stages=2, held_slices=0),
    "4: 2 stages, 2 slices held": dict(dq_stages=2, held_slices=2),
    "5: 4 stages": dict(dq_stages=4, held_slices=0),
    "6: 4 stages, 5 held (shipped)": dict(),
    "   4 stages, 8 held (spills)": dict(held_slices=8),
}
lines |= {name: timed(examples.backward, **choice) for name, choice in CHOICES.items()}
plots.panels(
    list(lines),
    {
        "modelled cycles": ([line.cycles for line in lines.values()], "{:,.0f}"),
        "tensor core busy in the middle (modelled)": (
            [100 * line.busy("tensor", middle(line)) for line in lines.values()],
            "{:.1f} %",
        ),
    },
    title="one tile of 128 keys against 1,024 queries, D = 128",
)

# %% [markdown]
# A surprise: version 2 has four roles and is *slower* than the straight line.
# Version 1 sends a whole dQ at once, through a stage of 64 KiB; version 2 sends eight slices through one stage of 8 KiB, and before each it waits until the TMA has read the one before.
# Roles gain nothing while they all wait for one stage.
#
# Here is that wait, in versions 2 and 6: the lanes of reduce and TMA.
# A slice goes from tensor memory to registers, to a stage, to L2.

# %%
SPAN = (20_000, 30_000)  # modelled cycles
first = lines["2: four roles, 1 stage"]
shipped = lines["6: 4 stages, 5 held (shipped)"]
plots.timelines({"version 2": first, "version 6": shipped}, span=SPAN)

# %% [markdown]
# In version 2 the compute groups wait for dP nearly all the time.
# dP's columns are held by dQ, and dQ leaves slice by slice.
#
# ## Which role uses which columns, and when
#
# The same two versions as maps of tensor memory, taken from their modelled events.
# Time goes to the right.
# `mma` holds columns while the tensor core writes them, `compute` while it reads S or dP and while P waits for its product, `reduce` while dQ leaves.


# %%
def holds(line):
    """Return which role holds which columns when: pieces for ``plots.tmem_map``."""
    products = [e for e in line.events if e.track == "MMA" and " @ " in e.short]
    loads = [e for e in line.events if e.short.startswith("load ")]
    found = []
    for first, names in ((0, ["s"]), (128, ["dp", "dq"])):
        here = sorted(
            (e for e in products if e.short.split("[")[0] in names), key=lambda e: e.start
        )
        starts = [e.start for e in here] + [line.end]
        for e, following in zip(here, starts[1:]):
            name = e.short.split("[")[0]
            readers = [r for r in loads if r.short.startswith(f"load {name}[0]")]
            if name == "s":  # then P is there, until the products of dV have read it
                readers += [m for m in products if m.short.startswith("dv")]
            until = max([r.end for r in readers if e.end <= r.start < following], default=e.end)
            until, owner = min(until, following), "reduce" if name == "dq" else "compute"
            words = {"s": "S", "dp": "dP", "dq": "dQ"}[name]
            found.append(plots.Hold(first, 128, e.start, e.end, "mma", words))
            found.append(
                plots.Hold(first, 128, e.end, until, owner, "S, P" if name == "s" else words)
            )
    for first, name in ((256, "dv"), (384, "dk")):
        parts = [e for e in products if e.short.startswith(name)]
        begin, end = parts[0].start, max(e.end for e in parts)
        found.append(
            plots.Hold(first, 128, begin, end, "mma", f"d{name[1].upper()}, of all blocks")
        )
    return found


BLOCKS = (10_000, 37_000)  # modelled cycles: two blocks of version 2, five of version 6
plots.tmem_map(holds(first), title="version 2, one stage, nothing held", span=BLOCKS)

# %%
plots.tmem_map(holds(shipped), title="version 6, as shipped", span=BLOCKS)

# %% [markdown]
# Follow columns 128 to 255: dP written, dP read, dQ written, dQ read, and again.
# The grey gaps are time in which no role uses them.
# In version 2 `reduce` holds them most of the time.
# In version 6 it holds them for the loads of eight slices, and most stores come later.
#
# ## Versions 3 to 6: stages and early release
#
# **Stages** let the reduction write slice `i + 1` while the TMA still reads slice `i`.
# More are better, until shared memory is full: with eight stages the kernel does not fit (a pitfall below).
#
# **Early release** needs no shared memory.
# The stages are full after the first slices, so the reduction would wait with the rest of dQ still in tensor memory.
# Instead it loads the last `held_slices` slices into registers, *arrives on `dq_empties`*, and only then waits for stages.
# So the mma role may overwrite the columns earlier.
#
# The cost is registers: a slice of 16 columns is 16 registers per thread.
# The reduce role gets the registers that the other roles leave.
# Registers are allocated to groups of four warps, so mma and load, with two idle warps, count as 128 threads:

# %%
pool, compute, small = 65_536, 2 * 128 * 184, 128 * 40
print(f"left for reduce: {(pool - compute - small) // 128} registers per thread")

# %% [markdown]
# The compiler decides whether that is enough.
# This table was made with `jfa.compiled` for sm_100 (fbtriton 3.7.4, November 2026), the kernel without a causal mask or window at D = 128, with tiles from the CLC queue; spills in bytes per thread, cycles modelled:
#
# | stages x columns | held slices | columns held | spill stores / loads | modelled cycles |
# |---|---|---|---|---|
# | 1 x 16 | 0 | 0 | 0 / 0 | 112,099 |
# | 2 x 16 | 0 | 0 | 0 / 0 | 73,345 |
# | 4 x 16 | 0 | 0 | 0 / 0 | 55,510 |
# | 4 x 16 | 4 | 64 | 0 / 0 | 47,913 |
# | 4 x 16 | **5** | 80 | 0 / 0 | 47,905 |
# | 4 x 16 | 6 | 96 | 36 / 76 | 46,737 |
# | 4 x 16 | 7 | 112 | 100 / 140 | 45,558 |
# | 4 x 16 | 8 | 128 | 164 / 204 | 46,470 |
# | 2 x 32 | 2 | 64 | 4 / 12 | 45,790 |
# | 2 x 32 | 3 | 96 | 76 / 132 | 44,213 |
#
# The model has no registers (chapter 12), and here that matters.
# Six or more held slices are faster *in the model*, and they spill.
# Five is the largest number of held slices of 16 columns without spills.
# In every row the compiler's report gives the reduce role the 104 registers computed above.
#
# **Fewer, wider slices?**
# The Triton fork changed its backward in pull request 2848 (2026-08-14): one stage of 128 x 32 in place of two of 128 x 16.
# It reports half the reduce launches, shared-store bank conflicts down from 69.6 to 37.2 million, and 2.0 % more throughput.
# Our kernel has `dq_columns`, so you can try 32 columns at equal shared memory.
# The model has **no bank conflicts**, so it cannot show that gain; what it shows is only the smaller number of waits.

# %%
wide = {
    "4 stages x 16 columns, 5 held": lines["6: 4 stages, 5 held (shipped)"],
    "2 stages x 32 columns, 2 held": timed(
        examples.backward, dq_columns=32, dq_stages=2, held_slices=2
    ),
}
for name, line in wide.items():
    print(f"{name}: {line.cycles:,.0f} modelled cycles")

# %% [markdown]
# ## Version 7: the order of the products
#
# The order in the table is a choice.
# The next cell moves one product at a time in the mma role, by editing the source of the package's function.


# %%
def changed(kernel, *pairs):
    """Return a function of backward_1cta with places of its source changed."""
    source = inspect.getsource(kernel.fn)
    for old, new in pairs:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    name = f"<{kernel.fn.__name__}, changed {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = dict(vars(backward_1cta))
    exec(compile(source, name, "exec"), space)
    return space[kernel.fn.__name__]


@contextlib.contextmanager
def replaced(**functions):
    """Replace functions of the package's kernel inside a `with` block."""
    before = {name: getattr(backward_1cta, name) for name in functions}
    for name, function in functions.items():
        setattr(backward_1cta, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(backward_1cta, name, function)


tile, ds = backward_1cta.multiply_tile, backward_1cta.multiply_ds
text = inspect.getsource(tile.fn)
S = text[text.index("        if step < steps:\n") : text.index("        if step > 0:\n")]
DP = "        if step < steps:\n            tlx.barrier_wait(do.fulls"
DV = "            multiply_p(scores, do.buffers[do_slot], memory.grads.dv, q_count, step > 0)\n"
SEAT = "            if cfg.dq_takes_dp and"
text = inspect.getsource(ds.fn)
DK = text[text.index("    tlx.async_dot(scores.ds[0]") : text.index("    tlx.tcgen05_commit")]
DQ = "    if cfg.with_dq:\n"
ORDERS = {
    "S  dQ dK dP dV   as shipped": {},
    "dQ dK S  dP dV   S behind dK": dict(multiply_tile=changed(tile, (S, ""), (DP, S + DP))),
    "S  dK dQ dP dV   dK before dQ": dict(multiply_ds=changed(ds, (DK, ""), (DQ, DK + DQ))),
    "S  dQ dK dV dP   dV before dP": dict(multiply_tile=changed(tile, (DV, ""), (SEAT, DV + SEAT))),
}
cycles = []
for functions in ORDERS.values():
    with replaced(**functions):
        cycles.append(timed(examples.backward).cycles)
plots.panels(
    list(ORDERS),
    {"modelled cycles": (cycles, "{:,.0f}")},
    title="the same tile, five products in four orders",
)

# %% [markdown]
# Issuing S first gives the compute groups work while dS of the block before is multiplied.
# dQ before dK lets the reduction start one product earlier.
# dV before dP is even faster in this model: dV does not need the seat, so the tensor core works while dQ leaves it.
# The difference is 1.4 % of modelled cycles: measure it on a chip before you believe it.
#
# Why is each order *correct*?
# The table says it line by line: whatever a product overwrites has already been read, either by a product that was issued earlier, or by a role that then arrived on a barrier for which the mma role waits.
#
# ## Version 8: short shared queries keep dQ on the chip
#
# With `broadcast_q` (chapter 07) all sequences add into the *same* few rows of dQ.
# The general kernel then sends every tile's dQ to the same addresses:


# %%
batches, keys_each, heads = 6, 512, 1
tiles = batches * keys_each // 128
plots.bars(
    ["self attention,\n512 queries each", "32 shared queries,\nresident", "the same,\ngeneral"],
    {"adds per address of dQ": [keys_each // 128, 1, tiles]},
    title="6 sequences of 512 keys: adds into one number of dQ",
    xlabel="",
    ylabel="adds",
    form="{:.0f}",
)  # fmt: skip

# %% [markdown]
# At most 128 queries fit into one block.
# So a program can keep Q in shared memory and dQ in tensor memory while *all its tiles, of all sequences,* pass by.
# At D = 128 the four places are S, dP, dQ, and one that dV and dK use in turn.
# At its end a program writes one fp32 partial; a second kernel adds the partials in a fixed order, so the result does not depend on which program was first.
#
# The package has it in [backward_resident.py](../jfa/kernels/blackwell/backward_resident.py).
# Its notes have 32 shared queries against six sequences of 512 keys on one SM: 150,827 modelled cycles resident, 276,415 in the general form; with four query heads per key head 150,827 and 647,648, since the heads of a group share the block of 128 rows.
# Exercise 14.6 is that idea.
#
# ## Version 9: the same bits every time
#
# fp32 sums depend on their order (chapter 05), and the order in which programs add to dQ changes from run to run.
# With `deterministic=True` a separate kernel computes dQ, with tiles of queries: each number of dQ is written by one program.


# %%
g = torch.Generator().manual_seed(2)
LENGTHS_Q, LENGTHS_KV = [40, 0, 60], [300, 0, 130]
on_q, on_kv = (offsets_from_lengths(n) for n in (LENGTHS_Q, LENGTHS_KV))
sizes = [sum(LENGTHS_Q), sum(LENGTHS_KV), sum(LENGTHS_KV), sum(LENGTHS_Q)]
data = [torch.randn(n, 1, D, generator=g).bfloat16() for n in sizes]


def gradients(seed, **options):
    """Return the op's dQ (bf16) and its fp32 sums in memory; ``seed`` draws the programs' order."""
    sums, inner = [], launch.launch_backward
    launch.launch_backward = lambda *args: (inner(*args), sums.append(args[7].clone()))
    q, k, v = (t.clone().requires_grad_() for t in data[:3])
    try:
        with emulator.options(policy="random", seed=seed, max_ctas=3, races=False):
            out = jfa.jagged_flash_attention(
                q, k, v, on_q, on_kv, 60, 300, backend="blackwell", **options
            )
            out.backward(data[3])
    finally:
        launch.launch_backward = inner
    return q.grad, sums[0]


leaves = [t.double().requires_grad_() for t in data[:3]]
reference.attention(*leaves, on_q, on_kv).backward(data[3].double())
for deterministic in (False, True):
    (dq, sums), (again, sums_again) = (gradients(s, deterministic=deterministic) for s in (1, 3))
    error = (dq.double() - leaves[0].grad).abs().max().item()
    print(f"deterministic={deterministic!s:5}  largest error {error:.4f}", end="  ")
    print(f"equal bits of dQ in bf16: {torch.equal(dq, again)}", end="  ")
    print("" if deterministic else f"of its sums in fp32: {torch.equal(sums, sums_again)}")

# %% [markdown]
# Three key tiles add to each number of the first sequence.
# In bf16 two orders often round to the same bits, so equal bits of the result prove nothing; the fp32 sums show the difference.
# The price is a second pass over Q and K: S and dP are computed twice, seven products instead of five.
#
# ## What is claimed in public
#
# * *The text this course grew from (May 2026), on a B200:* the contended reduce-add costs 9 to 11 % of the tensor core's time; the backward of broadcast-Q is 50 % and the dense backward 17 % faster than FlashAttention 4's.
# * *The Triton fork, pull request 2848 (2026-08-14), same chip:* its dense backward has 814 TFLOP/s on average against 840 for FlashAttention 4, 0.97 of it.
#
# Both are quoted with their dates, and they do not agree.
# Versions, shapes and drivers differ, and neither was measured here.
#
# ## Summary
#
# * With keys as rows, P goes from registers straight to tensor memory, as a left operand; dS goes to shared memory, because dQ reads it transposed.
# * Five products need five results, and at D = 128 tensor memory has space for four: dQ shares the columns of dP.
# * dQ is sent to memory in slices, by TMA reduce-add through staging buffers; loading the last slices early frees the columns.
# * Held slices cost registers: the compiler's report, not the model, shows how many fit.
# * Short shared queries keep dQ on the chip; `deterministic=True` computes dQ in a separate kernel.
#
# ## Exercises
#
# Open [exercises/14_blackwell_backward.py](../exercises/14_blackwell_backward.py).
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 14.1 | bug hunt: the sketch of dQ's staging, four faults | 2 | 35 |
# | 14.2 | the reduce role, staged and clipped | 2 | 30 |
# | 14.3 | bug hunt: dQ in dP's columns | 3 | 20 |
# | 14.4 | early release, against the clock | 2 | 50 |
# | 14.5 | predict: stages and held slices, do they fit? | 2 | 20 |
# | 14.6 | dQ stays in tensor memory over all tiles | 3 | 30 |
#
# ## Checkpoint
#
# For the first question open `backward_1cta.py` only, and write your own table before you unfold ours.
#
# <details><summary>Which barrier protects which buffer? For each buffer: which role waits for what before it is <em>read</em>, and before it is <em>overwritten</em>?</summary>
#
# | buffer | read after | overwritten after |
# |---|---|---|
# | K, V (shared) | `k_fulls`, `v_fulls` (load's TMA) | `dkv_fulls`: compute writes dV and dK there; then `empties` (reduce, after dV and dK have left): load writes the next tile's K and V |
# | dV, dK in K's and V's buffers | `out_fulls`, two arrivals (compute) | `keys.empties` |
# | Q | `q.fulls` | `q.empties`, three arrivals: mma by commit behind dK, and both compute groups |
# | lse, delta | `q.fulls` (they come with Q) | `q.empties`: here the arrivals of the compute groups matter |
# | dO | `do.fulls` | `do.empties`, committed behind dV |
# | S | `s_fulls` | no barrier of its own: P's `p_fulls`, both halves, came after S was read, and dV was issued before the next S |
# | P (in S) | `p_fulls`, one per half | products run in order: the next S is behind dV |
# | dP | `dp_fulls` | `ds_fulls`, both halves: dP was read before dS was there; so dQ may take the place |
# | dS (shared) | `ds_fulls`, one per half | `dp_fulls` of the next block: dP was issued behind dQ and dK, so it says that they have read dS |
# | dQ (in dP) | `dq_fulls` | `dq_empties` (reduce): mma waits for it before dP at D = 128, before dQ at D = 64 |
# | stages | the TMA reads after `fence` | `async_descriptor_store_wait(stages - 1)`: no barrier, the task's own stores |
# | dV, dK (tensor memory) | `dkv_fulls` | no barrier: the next tile's K is there only after dV and dK have left |
# </details>
#
# <details><summary>Why does a block of Q need two slots?</summary>
#
# S of block i is issued before dK of block i - 1, so two blocks of Q are in use at once.
# With one slot the load of Q(i) waits for dK(i-1), which the mma role issues after S(i), which waits for Q(i).
# </details>
#
# <details><summary>Why is P written only after all slices of S were loaded?</summary>
#
# P of a half lies in the first half of its S's columns.
# Columns that are not loaded yet would be overwritten.
# </details>
#
# <details><summary>D = 64: what changes about dQ?</summary>
#
# S and dP keep their 128 columns, dV and dK need 64 each: 384.
# So dQ has 64 columns of its own.
# The mma role waits for `dq_empties` before the next dQ, not before the next dP, and that is a whole step later.
# </details>
#
# <details><summary>Why does the last block's dQ not need a wait of its own at a tile's end?</summary>
#
# The reduce role stores dV and dK and then waits with `store_wait(0)` for all of its stores, dQ's among them.
# </details>
#
# ## Try this
#
# * Double the latency of TMA: put `B200.scaled("tma_latency", 2)` into `timed`. Which version suffers most, and what does that say about stages?
# * Hold slices with one stage only. From how many on does it stop helping, and why?
# * `jfa timeline jfa.kernels.blackwell.examples:backward` draws the whole run.
# * Swap dV and dP in a copy of the package, run `tests/kernels/blackwell`, and compile it.
#
# ## Pitfalls
#
# Each is the package's kernel with one place changed.


# %%
def attempt(choice=None, lines=slice(4), **functions):
    """Run the example, and print some lines of the report."""
    try:
        with replaced(**functions), emulator.options(policy="lazy", seed=1, fences="strict"):
            examples.backward(**(choice or {}))
        print("no report")
    except Exception as error:
        print("\n".join(f"{type(error).__name__}: {error}".splitlines()[lines]))


# %% [markdown]
# **dP does not wait for the seat.** The reduction still reads dQ.

# %%
text = inspect.getsource(tile.fn)
WAIT = text[text.index(SEAT) : text.index("            do_transposed")]
attempt(multiply_tile=changed(tile, (WAIT, "")))

# %% [markdown]
# **Released before the last slice is loaded.** The arrival comes before the loads of the held slices.

# %%
reduce_dq, add_slice = backward_1cta.reduce_dq, backward_1cta.add_slice
ARRIVE = "    tlx.barrier_arrive(grads.dq_empties[0])\n"
attempt(reduce_dq=changed(reduce_dq, (ARRIVE, ""), ("    held = ()\n", ARRIVE + "    held = ()\n")))

# %% [markdown]
# **A stage is refilled too soon.** One pending store too many is allowed.

# %%
attempt(add_slice=changed(add_slice, ("cfg.dq_stages - 1", "cfg.dq_stages")))

# %% [markdown]
# **No fence.** The TMA may read the stage as it was before.

# %%
attempt(add_slice=changed(add_slice, ('    tlx.fence("async_shared")\n', "")))

# %% [markdown]
# **A plain store instead of an add.** The epilogue assumes that no other program writes to its addresses.
# One tile alone is right; with three key tiles the last store wins.

# %%
plain = changed(add_slice, (', store_reduce="add"', ""))
with replaced(add_slice=plain):
    wrong, _ = gradients(1)
print("largest error of dQ:", (wrong.double() - leaves[0].grad).abs().max().item())

# %% [markdown]
# **One slot for Q**, and **eight stages**.

# %%
attempt(dict(q_slots=1), slice(-3, None))
attempt(dict(dq_stages=8), slice(2))

# %% [markdown]
# ## What differs on a GPU
#
# * The model gives a reduce-add the L2's bandwidth and no contention between programs. On a chip adds to the same address wait for each other; the 9 to 11 % above are about that.
# * The model has no bank conflicts, so the stores into the stages are too fast in it.
# * The rate of tensor memory is an assumption (no rate of a B200 has been published), and this chapter's chain depends on it.
# * The model has no registers; the compiler's table above shows what they limit.
#
# ## Verified here, and not
#
# Version 1 ran under two schedules against autograd in fp64, and the package's op against the reference, jagged and causal.
# All cycles are modelled.
# The compile table and the figures of the resident form are quoted, with the command in [docs/blackwell-notes.md](../docs/blackwell-notes.md).
# Nothing in this chapter ran on a Blackwell GPU.
# The orders of version 7 ran once each, timed, with the race detector on; the package's tests cover the shipped one only.
#
# ## Sources
#
# * NVIDIA, PTX ISA: `cp.reduce.async.bulk.tensor`, `tcgen05.mma` (an operand in tensor memory), `setmaxnreg`.
# * TLX in fbtriton 3.7.4: names and semantics. The kernels are our own.
# * facebookexperimental/triton, pull request 2848 (2026-08-14).
# * The text that this course grew from (May 2026), quoted as claimed.
# * [docs/blackwell-notes.md](../docs/blackwell-notes.md): the package's versions, modelled and compiled.
#
# Next: [15 Two CTAs](15_two_ctas.py).
