# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 On the GPU: run it, measure it
#
# **Goals.** After this chapter you
# * can say, before anything runs, how fast a shape could be on a chip, and what stops it from being faster,
# * can check and time the op on the machine you have, and compare your result with recorded ones,
# * can tell from five counters which unit of the GPU limits a kernel.
#
# **Time.** 60 minutes, and 90 for the exercises.
# **Needs.** Any kernel chapter (04 is enough).
#
# This notebook runs on a B200, an H100 or H200, another NVIDIA GPU, or none.
# It detects which of them it has.
# Without a GPU it shows the emulator's model, what the compiler says, and results that were recorded on real GPUs.
# On a GPU the suite and the cell that measures compile kernels, ours and those of the libraries that we compare with (the *peers*): allow some minutes the first time.
# On two idle cores of a CPU everything runs in about a minute: 40 seconds of processor time were measured, including the two compilations.

# %%
import json
import statistics
import time

import torch

import jfa
from jfa import layout, masks, plots, reference
from jfa.bench import cli as bench
from jfa.bench import lines, recorded, shapes
from jfa.bench.recorded import WAYS
from jfa.course.paths import find_course
from jfa.emulator.rates import B200, H200

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HERE = torch.cuda.get_device_name() if GPU else "CPU, no GPU"

# %% [markdown]
# ## Which GPU, which backend
#
# `jfa doctor` prints a full report of the environment.
# Two facts matter for this chapter: which GPU there is, and which backend a call gets.
# `jfa.explain` takes the arguments of a call and returns the backend and the reason for it.

# %%
q = torch.randn(8, 2, 64, dtype=torch.bfloat16, device=DEVICE)
offsets = layout.offsets_from_lengths([5, 3], device=DEVICE)
print("this machine:", HERE)
print(jfa.explain(q, q, q, offsets, offsets, 5, 5))

# %% [markdown]
# ## Mental model: three units under one roof
#
# A kernel keeps three units busy at the same time.
# **Memory** delivers bytes.
# **Tensor cores** multiply.
# The **exponential units** (NVIDIA calls them MUFU or XU) compute `exp2`.
# In the best case all three work at the same time, and the slowest one determines the time.
#
# The first two make a *roof*: the largest possible TFLOP/s for each number of FLOPs per byte.
# Each shape has a place on the horizontal axis: its FLOPs per byte that it must move.
# Left of the roof's corner the bytes are the limit, right of it the FLOPs.
# No kernel can be above the roof, so it shows how much there is to gain before you write a line.

# %%
# a large copy and an 8192^3 bf16 product, as the newest recorded run on an H200 measured them
MEASURED_H200 = dict(zip(("tb_per_s", "tflops"), recorded.newest_ceilings("H200")))
MODELLED_B200 = {
    "tb_per_s": B200["hbm"] * B200["sms"] * B200["clock"] / 1e12,
    "tflops": B200.peak_flops() / 1e12,
}
ROOFS = {
    "an H200, measured": tuple(MEASURED_H200.values()),
    "a B200, modelled": tuple(MODELLED_B200.values()),
}
recorded.roofline([], roofs=ROOFS)

# %% [markdown]
# Look at `pma32`: 32 shared queries read long key sequences.
# It is far left.
# However good its kernel is, it cannot exceed 130 TFLOP/s on an H200: a sixth of the limit of `dense`.
# So 100 TFLOP/s are not slow for this shape.
#
# ### The math
#
# | | forward | backward |
# |---|---|---|
# | pairs | $p=$ the (query, key) pairs that the mask allows, over all sequences | the same |
# | FLOPs | $4\,p\,H\,D$: two products | $10\,p\,H\,D$: five products |
# | bytes, at least | $Q$, $K$, $V$ once, $O$ once | also $dO$; $dQ$, $dK$, $dV$ once |
# | exponentials | $p\,H$ | $p\,H$ |
#
# $$ t \;\ge\; \max\left(\frac{\text{bytes}}{\text{TB/s}},\; \frac{\text{FLOPs}}{\text{TFLOP/s}},\; \frac{\text{exponentials}}{16 \cdot \text{SMs} \cdot \text{clock}}\right) $$
#
# Each SM computes 16 exponentials per clock, on both chips.
# The tensor cores became twice as fast from Hopper to Blackwell, the exponential units did not.
# So another unit may become the limit.
# The table shows which one, for the forward.


# %%
def floor_rows(names, chip, ceilings):
    """Return rows (shape, ms by bytes, by FLOPs, by exponentials, the limit) of a forward."""
    exps_per_ms = 16 * chip["sms"] * chip["clock_sustained"] / 1e3
    rows = []
    for name in names:
        s = shapes.SHAPES[name]
        by_bytes = s.least_bytes() / ceilings["tb_per_s"] / 1e9
        by_flops = s.flops() / ceilings["tflops"] / 1e9
        by_exps = s.flops() / (4 * s.head_dim) / exps_per_ms
        largest = max(by_bytes, by_flops, by_exps)
        close = [
            word
            for word, ms in (("bytes", by_bytes), ("tensor", by_flops), ("exp", by_exps))
            if ms > 0.95 * largest
        ]
        rows.append([name, by_bytes, by_flops, by_exps, " and ".join(close)])
    return rows


headers = ["shape", "bytes, ms", "tensor, ms", "exp, ms", "limit"]
print("forward on an H200: bytes and FLOPs at measured ceilings, exponentials modelled")
print(plots.table(headers, floor_rows(shapes.DEFAULT, H200, MEASURED_H200)))
print("\nforward on a B200, all modelled")
print(plots.table(headers, floor_rows(shapes.DEFAULT, B200, MODELLED_B200)))

# %% [markdown]
# Two things to see.
# With `D = 128` a B200 needs as long for the exponentials as for the products: this is why its kernels compute a part of them on other units (chapter 12).
# With `D = 64` there are half as many FLOPs per exponential, and on a B200 the exponentials alone are the limit.
#
# ## Before every measurement: is it right?
#
# The time of a kernel means nothing if its result is wrong.
# The suite below is small: masks, grouped heads, a shared query, empty sequences, a NaN in a neighboring sequence.
# Each result and each gradient is compared with float64.
# The allowed error is twice the error of the same computation in bf16, plus one rounding.

# %%
SUITE = {
    "self, with empty ones": dict(len_q=[5, 0, 33, 1, 17]),
    "cross, queries without keys": dict(len_q=[9, 20, 0, 4], len_kv=[40, 0, 7, 65]),
    "causal, more keys than queries": dict(len_q=[12, 30], len_kv=[50, 31], causal=True),
    "window of 9": dict(len_q=[70, 3], window_size=9),
    "four query heads, two key heads": dict(len_q=[33, 18], heads=4, causal=True),
    "32 shared queries": dict(len_q=32, len_kv=[80, 0, 5]),
    "a long one among short ones": dict(len_q=[3, 200, 1]),
}


def suite_inputs(len_q, len_kv=None, heads=2, **options):
    """Make the tensors of one case; its last sequence has no queries, and NaN keys and values."""
    shared = isinstance(len_q, int)
    len_kv = [*(len_kv or len_q), 6]
    rows_q = len_q if shared else sum(len_q)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows_q, heads, 64, generator=generator)
    k, v = (torch.randn(sum(len_kv), 2, 64, generator=generator) for _ in range(2))
    if shared:
        # a shared query has rows in every sequence, so here the NaN rows belong to no sequence
        len_kv = len_kv[:-1]
    k[sum(len_kv) - (0 if shared else 6) :] = torch.nan
    v[sum(len_kv) - (0 if shared else 6) :] = torch.nan
    tensors = [x.bfloat16().to(DEVICE).requires_grad_() for x in (q, k, v)]
    query_offset = None if shared else layout.offsets_from_lengths([*len_q, 0], device=DEVICE)
    return (
        tensors,
        (query_offset, layout.offsets_from_lengths(len_kv, device=DEVICE)),
        dict(broadcast_q=shared, **options),
    )


def results(attend, tensors, dtype):
    """Return [out, dQ, dK, dV] in float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = attend(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, grad))]


def worst_ratio(backend, case):
    """Return the largest error / allowed error of out, dQ, dK, dV: right if at most 1.

    NaN counts as an infinite error.
    """
    tensors, offsets, options = suite_inputs(**case)
    by_reference = lambda dtype: (
        lambda q, k, v: reference.attention(q, k, v, *offsets, dtype=dtype, **options)
    )
    ours = lambda q, k, v: jfa.jagged_flash_attention(q, k, v, *offsets, backend=backend, **options)
    got = results(ours, tensors, torch.bfloat16)
    truth = results(by_reference(torch.float64), tensors, torch.float64)
    low = results(by_reference(torch.bfloat16), tensors, torch.bfloat16)
    ratios = []
    for g, t, p in zip(got, truth, low):
        known = torch.isfinite(t)  # rows of the NaN sequence have no gradient to compare
        allowed = 2 * (p - t)[known].nan_to_num().abs().max() + 2**-7 * t[known].abs().max()
        ratios.append(float((g - t)[known].nan_to_num(nan=torch.inf).abs().max() / allowed))
    return max(ratios)


def backends_here():
    """Return the backends that can run here: those for this GPU; on a CPU all, emulated."""
    example = [torch.zeros(8, 2, 64, dtype=torch.bfloat16, device=DEVICE)] * 3
    usable = []
    for name in ("portable", "hopper", "blackwell"):
        try:
            jfa.explain(*example, offsets, offsets, 5, 5, backend=name)
            usable.append(name)
        except ValueError as why_not:
            print(f"not here: {why_not}")
    return usable


# %%
verdicts = {}
for backend in backends_here():
    for name, case in SUITE.items():
        start = time.perf_counter()
        try:
            ratio, says = worst_ratio(backend, case), ""
        except Exception as error:  # one broken case must not hide the others
            ratio, says = float("inf"), f"   {type(error).__name__}: {str(error).splitlines()[0]}"
        verdicts[backend, name] = ratio
        word, seconds = "right" if ratio <= 1 else "WRONG", time.perf_counter() - start
        print(
            f"{word}  {backend:<10} {name:<34} error / allowed {ratio:.2f}   {seconds:.1f} s{says}",
            flush=True,
        )
print(
    f"{sum(r <= 1 for r in verdicts.values())} of {len(verdicts)} right, on {HERE}"
    + ("" if GPU else " (kernels on the emulator)")
)

# %% [markdown]
# ## How to time, and how not to
#
# A GPU works asynchronously: a launch returns at once, and the work is done later.
# Five habits make a timing reliable:
#
# | habit | without it |
# |---|---|
# | time between two *events on the device*, and wait for the second | you time how long Python takes to queue the work |
# | warm up first | the first call compiles |
# | clear the L2 cache before each run | a small problem is read from the cache, which does not happen in training |
# | random inputs, never zeros | zeros need less power, and the clock rises |
# | the median of several runs | one disturbed run moves the mean |
#
# `jfa/bench/runner.py` follows all five in a hundred lines.
# You can see the effect of the last one on any machine.
#
# The next cell times the same small call forty times.
# Four of the runs are disturbed on purpose, as another program might disturb them: each contains a pause ten times as long as the call.
# Predict: by how much does the mean move, and by how much the median?


# %%
def wall_clock_ms(call, runs, disturb=lambda run: 0.0):
    """Return the milliseconds of each run, including a pause of `disturb(run)` seconds."""
    times = []
    for run in range(runs):
        start = time.perf_counter()
        call()
        if GPU:
            torch.cuda.synchronize()
        time.sleep(disturb(run))
        times.append((time.perf_counter() - start) * 1e3)
    return times


inputs = shapes.make_inputs(shapes.ON_CPU[0], DEVICE, torch.bfloat16 if GPU else torch.float32)
small_call = lambda: jfa.jagged_flash_attention(*inputs.arguments)
wall_clock_ms(small_call, 3)  # warm up
usual = statistics.median(wall_clock_ms(small_call, 20))
DISTURBED = {6, 17, 23, 34}
times = wall_clock_ms(small_call, 40, lambda run: usual / 100 if run in DISTURBED else 0.0)
left_alone = [t for run, t in enumerate(times) if run not in DISTURBED]
for name, of in (("median", statistics.median), ("mean", statistics.fmean)):
    alone, every = of(left_alone), of(times)
    print(f"{name:<6} of the 36 undisturbed runs {alone:.3g} ms, of all forty {every:.3g} ms")
run = list(range(len(times)))
plots.lines(
    run,
    {
        "one run": times,
        "median of all": [statistics.median(times)] * len(run),
        "mean of all": [statistics.fmean(times)] * len(run),
    },
    title=f"the same call forty times, four of them disturbed, {HERE}",
    xlabel="run",
    ylabel="ms",
    from_zero=True,
)

# %% [markdown]
# Four disturbed runs of forty, each ten times too long, double the mean.
# The median moves by two places among the forty times in sorted order, which is a step to a neighboring time.
#
# **The likely mistake: no waiting.** On a GPU the next cell times one call twice, without and with waiting for the device.

# %%
if GPU:
    busy = shapes.make_inputs(shapes.SHAPES["self"], DEVICE)
    call = lambda: jfa.jagged_flash_attention(*busy.arguments)
    wall_clock_ms(call, 3)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    queued = (time.perf_counter() - start) * 1e3
    waited = statistics.median(wall_clock_ms(call, 10))
    print(f"time to queue the call: {queued:.3f} ms; time until it is done: {waited:.3f} ms")
else:
    print("no GPU here: a CPU call returns when it is done, so there is nothing to see")

# %% [markdown]
# **The likely mistake: FLOPs of the padded batch.** TFLOP/s are FLOPs over time, and the FLOPs depend on what is counted.
# With all pairs of the padded rectangle, a jagged kernel seems faster than the GPU can be.
# Here only pairs that the mask allows are counted.
# The table shows by which factor the padded count would be larger:

# %%
rows = []
for name in shapes.DEFAULT:
    s = shapes.SHAPES[name]
    rows.append([name, s.flops() / 1e9, 1 / (1 - masks.flop_waste(*s.lengths(), s.band))])
print(plots.table(["shape", "GFLOP forward, exact", "padded would be x"], rows))

# %% [markdown]
# ## Measure here
#
# This is the shell command `jfa bench --json FILE`, called from Python.
# On a GPU it times three shapes, from the left, the middle and the right of the roof, and every peer that is installed; the result names the peers that are not.
# On a CPU it times the PyTorch reference on two tiny shapes, which shows only the form of a result.

# %%
folder = find_course().state / "results"  # ignored by git
folder.mkdir(parents=True, exist_ok=True)
result_file = (
    folder / f"{HERE.replace(',', '').replace(' ', '-')}-{time.strftime('%Y-%m-%d-%H%M')}.json"
)
POINTS = ["pma32", "self", "dense"]
status = bench.main(
    ["--json", str(result_file), *(["--shapes", *POINTS] if GPU else ["--runs", "5"])]
)

# %%
here = recorded.Recorded(result_file.stem, json.loads(result_file.read_text()))
print(here.where)
if GPU and here.fastest("dense"):
    backend, tflops = here.fastest("dense")
    share = here.share_of_bound("dense", "forward")
    print(f"one point: dense forward, {backend}: {tflops:.0f} TFLOP/s", end=" ")
    print(f"= {share:.0f} % of the roof measured here")

# %% [markdown]
# ## What was recorded
#
# The files in `jfa/bench/results/` are such results, each from one run on the GPU that it names, with driver, versions and date.
# "ratio" compares our fastest backend with the best peer *of the same run*.
# Times of two runs or two machines are not compared.
# A peer that a run's list does not name was not installed, and the ratio says nothing about it.
# "of bound" is our share of the roof that the run itself measured.
# A name such as `jfa:hopper-deterministic` is the same backend with gradients that are the same bits in every run; its forward is the same kernel, timed once more.

# %%
known = recorded.read_all()
columns = ["shape", "ours", "TFLOP/s", "best peer", "TFLOP/s", "ratio", "of bound, %"]
for result in known:
    others = dict.fromkeys(
        t["name"] for t in result.content["timings"] if not recorded.is_ours(t["name"])
    )
    print(f"{result.name}: {result.where}")
    print(f"peers in this run: {', '.join(others) or 'none'}. {result.content.get('note', '')}")
    for way in WAYS:
        print(f"\n{way}\n{plots.table(columns, result.comparison(way))}")
    print()
if not known:
    print("no result file is in jfa/bench/results")

# %% [markdown]
# The same results under the roof: every recorded GPU, and this one if it is a GPU.


# %%
def under_the_roof(way):
    """Draw the shapes, the roofs, and all results."""
    everything = known + ([here] if GPU else [])
    return recorded.roofline(
        everything, way, roofs=None if any(r.ceilings for r in everything) else ROOFS
    )


under_the_roof("forward")

# %%
under_the_roof("backward")

# %% [markdown]
# How to read it: go straight up from a point to the roof.
# That distance is the most that any kernel can gain on this shape.
# A point near the slope is limited by memory, and a faster product will not help it.
# A point far below both lines waits: for exponentials, for a barrier, or for the one SM that got the longest sequence.
#
# If your GPU is one that was recorded, compare your point with it:

# %%
same_gpu = [r for r in known if GPU and r.gpu == here.gpu]
rows = []
for r in same_gpu:
    for shape in POINTS:
        theirs, mine = r.fastest(shape), here.fastest(shape)
        if theirs and mine:
            rows.append([r.name, shape, theirs[1], mine[1], mine[1] / theirs[1]])
print(
    plots.table(["recorded in", "shape", "then, TFLOP/s", "here, TFLOP/s", "here / then"], rows)
    if rows
    else "nothing recorded on this device"
)

# %% [markdown]
# ### Quoted, not measured
#
# We had no B200 to measure on.
# These figures are quoted from others.

# %%
for figure in recorded.QUOTED:
    print(f"{figure.gpu}, quoted: {figure.claim} ({figure.source})")

# %% [markdown]
# ## Without a GPU: what the compiler says
#
# `jfa compile` compiles a kernel for a GPU that this machine does not have.
# It cannot tell how fast the kernel is.
# It can tell whether it fits, how many registers each role gets, and whether values are spilled.
# This takes ten seconds or more per kernel.

# %%
from jfa.compiled import compile_configs, select, shipped_configs

reports = []
for name in ("hopper-forward-d128", "blackwell-forward-d128-full-static"):
    print(f"compiling {name} ...", flush=True)
    configs = select(shipped_configs(), [name])
    reports += compile_configs(configs, [min(configs[0].targets)])
    print(reports[-1].to_text(), end="\n\n", flush=True)

# %% [markdown]
# Where Triton has no TLX, the report says that the kernel does not compile here; `jfa doctor` says how to get one that has it.
#
# ## Without a GPU: what the model says
#
# The emulator models time.
# Its rates are in `jfa/emulator/rates.py`, each with a source.
# Below, the Hopper forward runs on two modelled SMs: one sequence of 640, one of 128, one of 64.
# Everything in this picture is modelled.

# %%
from jfa.emulator.cli import record

LENGTHS = [640, 128, 64]
tape = layout.offsets_from_lengths(LENGTHS)
q, k, v = (torch.randn(sum(LENGTHS), 1, 128).bfloat16() for _ in range(3))


def modelled(backend, chip):
    """Return the timeline of one forward on two SMs of a chip."""
    launch = lambda: jfa.jagged_flash_attention(
        q, k, v, tape, tape, max(LENGTHS), max(LENGTHS), backend=backend
    )
    return record(launch, chip, max_ctas=2, num_sms=2)


hopper = modelled("hopper", H200)
plots.timelines({f"modelled SM {cta[0]}": (hopper, cta) for cta in hopper.ctas()})

# %% [markdown]
# ## Profile: five numbers and what they mean
#
# A time says that a kernel is slow.
# A profiler says what it waits for.
# On a machine with Nsight Compute:
#
# ```
# ncu --kernel-name regex:forward_kernel --launch-skip 5 --launch-count 1 --metrics \
# gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed,\
# sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,\
# sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed,\
# smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio,\
# sm__cycles_active.avg,sm__cycles_active.max \
# python -m jfa bench --shapes pma32 --peers --forward-only --runs 3
# ```
#
# | | counter | high means | seen in the kernel as | what helps |
# |---|---|---|---|---|
# | 1 | `gpu__dram_throughput` | **memory**: TMA cannot load tiles faster | consumers wait at `k_fulls`, `v_fulls` | fewer bytes: read Q once, keep tiles, no copies. Near 100 %: done |
# | 2 | `sm__pipe_tensor_cycles_active` | **tensor cores** are busy | softmax waits for scores | skip empty blocks, peel masks. Near 100 %: done |
# | 3 | `sm__inst_executed_pipe_xu` | **exponentials** (and conversions) | the tensor core waits for P | two groups in ping-pong, a polynomial on other units, fewer rescalings |
# | 4 | `smsp__..._stalled_barrier` while 1-3 are low | **waiting**: roles hand over too late | the barrier with the longest wait in `jfa timeline` | more buffers, earlier releases, another order |
# | 5 | `sm__cycles_active.avg` far below `.max` | **imbalance**: a few SMs got the long sequences | CTAs that end early in the timeline | longest first, zigzag, split the longest (chapter 08) |
#
# Read them from the bottom.
# With idle SMs every mean is low, so 5 comes first.
# Then 1, 2 and 3: one of them near its peak is the limit, and reaching a limit is not a fault.
# Only if none is near its peak, look at 4.
#
# **The likely mistake** is to read 4 alone.
# Warps of a specialized kernel wait most of the time *by design*: the producer waits for an empty buffer, and that is right.
# A wait is bad only while no unit is busy.
# Note also that a wait for an `mbarrier` is a loop of try-wait instructions, which a profiler may count as another stall than `barrier`.
# The profiler's source view shows the line.
#
# The names differ between chips and versions; `ncu --query-metrics` lists yours.
# Counters may need permission: `ERR_NVGPUCTRPERM` means that the administrator has to allow them.
#
# The emulator has the same five, modelled.
# Which rows of the table apply?


# %%
def five_numbers(timeline):
    """Return modelled counterparts of the five counters: means over SMs and the whole run."""
    ends = [max(e.end for t in timeline.tracks(cta) for e in t.events) for cta in timeline.ctas()]
    waits = timeline.waits()
    (track, barrier), cycles = next(iter(waits.items()))
    return {
        "1 memory path (L2), busy": f"{timeline.busy('l2'):.0%}",
        "2 tensor cores, busy": f"{timeline.busy('tensor'):.0%}",
        "3 exponential units, busy": f"{timeline.busy('mufu'):.0%}",
        "4 longest wait": f"{track} at {barrier}, {cycles:,.0f} cycles",
        "5 balance, mean / longest SM": f"{sum(ends) / len(ends) / max(ends):.2f}",
    }


for backend, chip, drawn in (
    ("hopper", H200, hopper),
    ("blackwell", B200, modelled("blackwell", B200)),
):
    print(f"{backend} forward on two SMs with the rates of the {chip.name}, modelled")
    print("\n".join(f"  {name:<30} {value}" for name, value in five_numbers(drawn).items()))

# %% [markdown]
# Read them from the bottom again.
# With short sequences on two SMs, a part of the distance to 100 % is due to the SM that ends first.
# On the Hopper model the memory path and the tensor cores are both busy most of the time, so they overlap.
# On the Blackwell model no unit is near its peak, so counter 4 may be read, and it names a role that waits by design, for a finished output.
# A test compares the model with times measured for long sequences on an H200 (`tests/emulator/test_rates.py`).
#
# ## How long are the kernels?
#
# Size matters too: it is what you have to read and maintain.
# The next cell counts lines of code, without blank lines, comments and docstrings.

# %%
files = lines.kernel_files()
print(plots.table(["package", "file", "lines of code"], files))
totals = {}
for package, _, count in files:
    totals[package] = totals.get(package, 0) + count
plots.bars(
    list(totals),
    {"lines of code": list(totals.values())},
    title="kernel sources with their host side, counted",
    xlabel="package",
    ylabel="lines of code",
    form="{:.0f}",
)

# %% [markdown]
# Quoted for comparison: about 3.2 thousand lines for JFA on Blackwell against about 10 thousand for FA4.
# How those were counted is not known, and the feature lists differ, so this is a size and not a comparison of quality.
# A backend here also uses `common`.
#
# ## The original as a peer
#
# The public kernels that this course grew from need a Blackwell GPU and fbtriton.
# You clone them; they are not part of this repository.
# The repository changes, and not every commit has them: at 2c128ab there was no `tlx_jfa` folder in it, while a public fork, `jackiexu77/ads_model_kernel_library-1`, had one at 7f421ec (both read in November 2026).
# So look for the file by its name in your clone, and check what was found:
#
# ```
# git clone https://github.com/facebookresearch/ads_model_kernel_library peer    # or a fork
# PEER=$(find "$PWD/peer" -name tlx_jagged_flash_attention.py | head -n 1)
# echo "found: ${PEER:-nothing: try a fork}"; git -C peer log -1 --format=%H
# export TRITON_ALLOW_NON_CONSTEXPR_GLOBALS=1
# jfa bench --shapes pma32 pma128 self self-window --peers fa4 tlx_jfa=$PEER --json mine.json
# ```
#
# `tlx_jfa=FILE` is any Python file with a function `jagged_flash_attention` that takes the arguments of ours.
# It can import modules from its own folder.
# The public `tlx_jfa` has no causal mask, and its backward does not support grouped heads, so time shapes without them.
#
# **What such a run measures.** In the source read, the public function `jagged_flash_attention` has no parameter for offsets on the CPU and passes none.
# Without them its load balancing is off, and so is the backward on pairs of CTAs, which needs a shared query, `D = 128`, one query head per key head, no window and the CPU offsets.
# To get that backward, call the operator that the function wraps.
# Put this file into the folder of the one that was found, and pass *its* path:
#
# ```python
# # peer_balanced.py
# import torch
# import tlx_jagged_flash_attention  # registers the operator
#
# copies = {}  # id -> (offsets, their copy on the CPU), made in the first call of a shape, which is not timed
#
#
# def on_cpu(offsets):
#     if id(offsets) not in copies:
#         copies[id(offsets)] = offsets, offsets.cpu()
#     return copies[id(offsets)][1]
#
#
# def jagged_flash_attention(q, k, v, query_offset, key_offset, max_q, max_kv, output_offset=None, **options):
#     return torch.ops.ads_mkl.tlx_jagged_flash_attention(
#         q, k, v, query_offset, key_offset, max_q, max_kv, output_offset=output_offset,
#         cpu_query_offset=on_cpu(query_offset), cpu_key_offset=on_cpu(key_offset), **options
#     )[0]
# ```
#
# A result should say which of the two it measured.
# Neither was run for this text.
#
# ## Share a result
#
# The next cell prints where your result is, and what others need to judge it: the GPU, the driver, the versions, the date, the ceilings of the same run, and every peer that did not run, with the reason.

# %%
print("written:", result_file.relative_to(find_course().root))
print(json.dumps(here.content["environment"], indent=1))
notes = [f"{t['name']} on {t['shape']}: {t['note']}" for t in here.content["timings"] if t["note"]]
print("\n".join(notes) if notes else "nothing was left out")
if not GPU:
    print("a CPU's result is for looking at the format; please do not share it as a measurement")

# %% [markdown]
# ## Summary
#
# * Bytes, FLOPs and exponentials give a least time for every shape; compare measured times with it.
# * Check the result before you time it, against float64, with an error allowed that bf16 explains.
# * Time on the device, after a warm-up, with a cleared L2 cache and random inputs, and report the median.
# * Count only the FLOPs of pairs that the mask allows.
# * Compare with peers of the same run; read the balance of the SMs before the other counters.
#
# ## Exercises
#
# Open [exercises/18_on_the_gpu.py](../exercises/18_on_the_gpu.py).
# None of them needs a GPU.
#
# | | | difficulty | minutes |
# |---|---|---|---|
# | 18.1 | the FLOPs of a causal batch | 1 | 15 |
# | 18.2 | the fewest bytes of attention pooling | 2 | 15 |
# | 18.3 | predict before you measure | 1 | 20 |
# | 18.4 | read a result | 2 | 15 |
# | 18.5 | what bounds it? | 3 | 15 |
# | 18.6 | no schedule beats this | 2 | 10 |
#
# ## Checkpoint
#
# 1. A kernel reaches 104 TFLOP/s on `pma32` on an H200 whose tensor cores do 790. Is that bad?
# 2. A report claims 900 TFLOP/s on `self` with an H200. What do you ask first?
# 3. Why is the limit of a `D = 64` forward another one on Blackwell than on Hopper?
# 4. Tensor cores 45 %, memory 30 %, exponentials 25 %, mean active cycles half of the largest. What do you change?
# 5. Why is a ratio within one run worth more than a ratio of two published numbers?
#
# <details><summary>Answers</summary>
#
# 1. No. The roof over `pma32` is near 128 TFLOP/s at 4.24 TB/s: that is 81 % of what bytes allow.
# 2. Which FLOPs were counted. No bf16 kernel can exceed the rate of the tensor cores. With the FLOPs of the padded rectangle such a number is easy to reach.
# 3. Per exponential there are half as many FLOPs as with `D = 128`. The tensor cores became twice as fast, the exponential units did not.
# 4. The distribution of work. Half of the SM time is idle; while SMs work, the percentages are twice as high.
# 5. The clock, the temperature, the driver, the versions, the lengths and the counting of FLOPs are the same for both.
#
# </details>
#
# ## Try this
#
# - On a GPU: run `pma32` and `dense` with `--backend portable hopper`. At which of them is the difference larger? Predict from the roof.
# - Change `LENGTHS` to `[256, 256, 256]` and run the model again. Which of the five numbers changes most?
# - `jfa timeline hopper_fa_ws_pipelined_pingpong` draws a public kernel. Find the barrier with the longest wait, and say whether it is a fault.
#
# ## Pitfalls
#
# | pitfall | where you saw it |
# |---|---|
# | timing the queue | "How to time", second cell |
# | the mean of disturbed runs | the forty runs |
# | FLOPs of the padded batch | the table of exact counts |
# | TFLOP/s without a roof | the first picture |
# | percentages of idle SMs | counter 5 comes first |
# | a wait mistaken for a fault | counter 4 |
#
# ## What differs on a GPU
#
# On a GPU the suite runs the compiled kernels, and your points join the picture.
# On a CPU the same suite runs the kernels' sources on the emulator, and the times say nothing about a GPU.
#
# ## Verified here, and not
#
# - The suite and the exact counts ran when this notebook ran, on the device printed at its top.
# - On one H200 (driver 580, torch 2.11, 2026-11-29) every cell ran but the compiler's and the emulator's, with three cases of the suite and without
#   FlexAttention: `dense` forward gave 728 TFLOP/s, 1.00 times the one recorded then.
# - Recorded results were measured on the GPU that each file names. The floors of an H200 rest on its measured copy and product.
# - All B200 figures are modelled or quoted. No kernel of this project has been timed on a B200.
# - The `ncu` command and the original as a peer were not run for this text. The names of the counters are from the sources below.
#
# ## Sources
#
# - Williams, Waterman, Patterson, *Roofline*, Communications of the ACM 52 (2009): the roof.
# - FlashAttention-4, arXiv 2603.05451: 16 exponentials, and 4096 and 8192 bf16 FLOPs, per clock and SM, and the five products of the backward.
# - Ceilings of the H200: `jfa bench` measures them in every run (`runner.ceilings`). Rates of the model: `jfa/emulator/rates.py`.
# - NVIDIA, *Nsight Compute: Profiling Guide*: metric names, and what a stall reason means.
# - `tlx_jfa` in a public fork of facebookresearch/ads_model_kernel_library, jackiexu77/ads_model_kernel_library-1 at 7f421ec, read 2026-11: the peer, its
#   arguments, and when its backward takes pairs of CTAs.
# - Named shapes: `jfa/bench/shapes.py`, each with its source.
# - What was tried, predicted and measured during development: the lab notebooks `docs/*-notes.md`.
