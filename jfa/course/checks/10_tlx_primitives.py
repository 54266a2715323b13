"""Checks of chapter 10: TLX primitives. Every launch is repeated under several schedules; the first axis of a result is the schedule."""

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output

SCHEDULES = 4  # eager, lazy and two random ones: see the launch functions


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _each_schedule(out):
    """Return the reference's result once for each schedule that the launch functions go through."""
    return torch.stack([out] * SCHEDULES)


def _at_least(name, measure, each, text):
    """Require that in every launch the operation happens ``each`` times or more (a number, or a function of the case)."""
    return Limit(name, measure, at_least=lambda case: SCHEDULES * (each(case) if callable(each) else each), text=text)


def _places(measure, count, text):
    """Require that the copies go through exactly so many places of shared memory: a ring uses the buffers it is given."""
    return Limit("all the buffers", measure, at_most=count, at_least=count, text=text)


# -- 10.1 --------------------------------------------------------------------------------------------------------------


def _scale_cases(seed):
    g = _rng(seed)

    def case(name, rows, cols, factor):
        return Case(name, (torch.randn(rows, cols, generator=g), factor))

    return [case("16 x 16", 16, 16, 3.0), case("32 x 64", 32, 64, -0.5)]


def _scale_launch(kernel, x, factor):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(*x.shape)
        boxes = [TensorDescriptor.from_tensor(t, list(x.shape)) for t in (x, out)]
        with emulator.options(policy=policy, seed=seed, fences="strict"):
            kernel[(1,)](*boxes, factor, ROWS=x.shape[0], COLS=x.shape[1])
        for warning in emulator.last().warnings:
            raise warning
        results.append(out)
    return torch.stack(results)


SCALE = Exercise(
    id="10.1",
    title="In by TMA, out by TMA",
    name="scale_kernel",
    kind="kernel",
    call=_scale_launch,
    cases=_scale_cases,
    reference=lambda x, factor: _each_schedule(x * factor),
    outputs=(Output("out", ("schedule", "row", "column")),),
    difficulty=1,
    minutes=15,
    tol=1e-6,
    limits=(
        _at_least("in by TMA", "tlx:async_descriptor_load", 1, "load it with the TMA into shared memory"),
        _at_least("read from its buffer", "tlx:local_load", 1, "multiply by `factor` in registers"),
        _at_least("through shared memory", "tlx:local_store", 1, "put the result into a second buffer"),
        _at_least("out by TMA", "tlx:async_descriptor_store", 1, "let the TMA store that buffer"),
    ),
    time_limit=20.0,
    hints=(
        "Announce the bytes on the barrier, start the load on it, wait for its first phase. Then the tile is yours to read.",
        "Write with local_store into the other buffer. The TMA does not see your stores until a fence; the fence comes between the last local_store and the TMA store.",
        "barrier_expect_bytes(loaded[0], ROWS * COLS * 4); async_descriptor_load(x_desc, source[0], [0, 0], loaded[0]); barrier_wait(loaded[0], 0); local_load, local_store, fence, async_descriptor_store, async_descriptor_store_wait(0).",
    ),
    mutants=(
        Mutant(
            "no fence",
            "the TMA store reads what threads wrote, without a fence.",
            caught_by="runs",
            edit=('    tlx.fence("async_shared")\n', ""),
            expect="fence",
            recognise=False,
        ),
        Mutant(
            "does not wait for the load",
            "the tile is read before the TMA has delivered it.",
            caught_by="runs",
            edit=("    tlx.barrier_wait(loaded[0], 0)\n", ""),
            expect="source",
            recognise=False,
        ),
        Mutant(
            "expects half the bytes",
            "an fp32 element has four bytes.",
            caught_by="runs",
            edit=("ROWS * COLS * 4", "ROWS * COLS * 2"),
            expect="bytes",
            recognise=False,
        ),
        Mutant(
            "waits for the wrong phase",
            "a fresh barrier lets parity 1 pass at once.",
            caught_by="runs",
            edit=("tlx.barrier_wait(loaded[0], 0)", "tlx.barrier_wait(loaded[0], 1)"),
            expect="source",
            recognise=False,
        ),
        Mutant(
            "does not wait for the store",
            "the kernel ends while the TMA may still read the buffer.",
            caught_by="runs",
            edit=("\n    tlx.async_descriptor_store_wait(0)", ""),
            expect="nobody waited for",
            recognise=False,
        ),
        Mutant(
            "fence before the store",
            "a fence covers what was written before it.",
            caught_by="runs",
            edit=(
                '    tlx.local_store(result[0], x * factor)\n    tlx.fence("async_shared")\n',
                '    tlx.fence("async_shared")\n    tlx.local_store(result[0], x * factor)\n',
            ),
            expect="fence",
            recognise=False,
        ),
        Mutant(
            "no shared memory of its own",
            "right numbers, but descriptors loaded and stored in registers: no buffer, no barrier, no fence.",
            caught_by="in by TMA",
            source="""
@triton.jit
def scale_kernel(x_desc, out_desc, factor, ROWS: tl.constexpr, COLS: tl.constexpr):
    out_desc.store([0, 0], x_desc.load([0, 0]) * factor)
""",
            expect="load it with the TMA",
            recognise=False,
        ),
        Mutant(
            "stores the source",
            "The buffer that was stored is the unscaled one.",
            edit=("async_descriptor_store(out_desc, result[0]", "async_descriptor_store(out_desc, source[0]"),
        ),
        Mutant(
            "loads once more",
            "right numbers, but what the TMA brought is never read: the descriptor loads the tile a second time.",
            caught_by="read from its buffer",
            edit=("x = tlx.local_load(source[0])", "x = x_desc.load([0, 0])"),
            expect="multiply by",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def scale_kernel(x_desc, out_desc, factor, ROWS: tl.constexpr, COLS: tl.constexpr):
    source = tlx.local_alloc((ROWS, COLS), tl.float32, 1)
    result = tlx.local_alloc((ROWS, COLS), tl.float32, 1)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    inbox = tlx.local_view(source, 0)
    outbox = tlx.local_view(result, 0)
    bar = tlx.local_view(loaded, 0)
    tlx.barrier_expect_bytes(bar, ROWS * COLS * tlx.size_of(tl.float32))
    tlx.async_descriptor_load(x_desc, inbox, [0, 0], bar)
    tlx.barrier_wait(bar, 0)
    tlx.local_store(outbox, factor * tlx.local_load(inbox))
    tlx.fence_async_shared()
    tlx.async_descriptor_store(out_desc, outbox, [0, 0])
    tlx.async_descriptor_store_wait(0)
""",
        """
@triton.jit
def scale_kernel(x_desc, out_desc, factor, ROWS: tl.constexpr, COLS: tl.constexpr):
    source = tlx.local_alloc((ROWS, COLS), tl.float32, 1)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    tlx.barrier_expect_bytes(loaded[0], ROWS * COLS * 4)
    tlx.async_descriptor_load(x_desc, source[0], [0, 0], loaded[0])
    tlx.barrier_wait(loaded[0], 0)
    x = tlx.local_load(source[0])
    tlx.local_store(source[0], x * factor)       # in place: one buffer is enough
    tlx.fence("async_shared")
    tlx.async_descriptor_store(out_desc, source[0], [0, 0])
    tlx.async_descriptor_store_wait(0)
""",
    ),
)

# -- 10.2 --------------------------------------------------------------------------------------------------------------


def _ring_cases(seed):
    start = 3 * (seed % 7)
    return [
        Case("the first round of two buffers", (start, 2)),
        Case("the first buffer's second turn", (start + 2, 2)),
        *(
            Case(f"{stages} buffers, a {when} round", (start + k, stages))
            for stages in (1, 3, 4)
            for when, k in (("first", 1), ("later", 5), ("late", 10))
        ),
    ]


def _ring(k, stages):
    return k % stages, (k // stages) % 2, (k // stages + 1) % 2


RING = Exercise(
    id="10.2",
    title="The parity puzzle",
    name="ring_round",
    cases=_ring_cases,
    reference=_ring,
    outputs=(Output("buffer"), Output("full parity"), Output("empty parity")),
    difficulty=1,
    minutes=10,
    hints=(
        "How often has the ring gone round before round k? Each turn completes one phase of each buffer's barriers.",
        "In turn t the consumer waits for phase t of full. The producer needs phase t - 1 of empty, and in turn 0 nothing: which parity passes on a fresh barrier?",
        "turn = k // stages; return k % stages, turn % 2, (turn + 1) % 2.",
    ),
    mutants=(
        Mutant(
            "producer waits like the consumer",
            "The producer would wait for the consumer before it has given it anything: in the first turn it must pass a fresh barrier.",
            edit=("(turn + 1) % 2", "turn % 2"),
        ),
        Mutant(
            "parity flips every round",
            "The parity flips with each turn around the ring, not with each round.",
            edit=("turn = k // stages", "turn = k"),
        ),
        Mutant(
            "phase instead of parity",
            "A wait takes a parity, 0 or 1, not the number of the phase.",
            edit=("k % stages, turn % 2, (turn + 1) % 2", "k % stages, turn, turn + 1"),
        ),
        Mutant(
            "buffer from the turn",
            "Rounds walk through the buffers one by one: the buffer is the remainder, not the quotient.",
            edit=("return k % stages", "return turn % stages"),
        ),
    ),
    variants=(
        """
def ring_round(k, stages):
    slot, full, empty = 0, 0, 1
    for _ in range(k):
        slot += 1
        if slot == stages:
            slot, full, empty = 0, full ^ 1, empty ^ 1
    return slot, full, empty
""",
        """
def ring_round(k, stages):
    turn, slot = divmod(k, stages)
    return slot, turn & 1, 1 - (turn & 1)
""",
    ),
)

# -- 10.3 and 10.4: streams through a ring ---------------------------------------------------------------------------------


def _stream_cases(seed):
    g = _rng(seed)

    def case(chunks, stages, rows=16, cols=16):
        name = f"{chunks} chunk{'s' * (chunks > 1)}, {stages} stage{'s' * (stages > 1)}"
        return Case(name, (torch.randn(rows, chunks * cols, generator=g) - 3.0, chunks, stages))

    return [case(*ring) for ring in kinds.FEW_RINGS] + [case(9, 2, rows=32, cols=32)]


def _stream_launch(kernel, x, chunks, stages):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, rows, cols = [], x.shape[0], x.shape[1] // chunks
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(rows)
        box = TensorDescriptor.from_tensor(x, [rows, cols])
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](box, out, chunks, ROWS=rows, COLS=cols, STAGES=stages)
        results.append(out)
    return torch.stack(results)


RING_LIMITS = (
    Limit("two tasks", "tasks", at_least=2, text="a producer and a consumer, two async tasks"),
    _at_least(
        "every chunk through the ring",
        "tlx:async_descriptor_load",
        lambda case: case.args[1],
        "every chunk goes through the ring",
    ),
    _at_least(
        "waits for every chunk", "tlx:barrier_wait", lambda case: 2 * case.args[1], "every chunk goes through the ring"
    ),
    _places("loaded_places", lambda case: min(case.args[1:]), "the ring has STAGES buffers and uses them all"),
)


def _one_buffer(*edit):
    """Return the mutant of a ring whose rounds all go through its first buffer."""
    return Mutant(
        "one buffer, whatever STAGES is",
        "every chunk goes through one buffer, so the producer never runs ahead.",
        caught_by="all the buffers",
        edit=edit,
        expect="the ring has STAGES buffers and uses them all",
        recognise=False,
    )


_ROUND = "                slot = k % STAGES\n                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)\n"
_FIRST = "                slot = 0\n                tlx.barrier_wait(fulls[slot], k & 1)\n"
_FIRST_ONLY = (
    (
        "                slot = k % STAGES\n                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n",
        "                slot = 0\n                tlx.barrier_wait(empties[slot], (k & 1) ^ 1)\n",
    ),
    (_ROUND, _FIRST),
)

_RING_PRODUCER = """
        with tlx.async_task(num_warps=1):  # producer
            for k in range(chunks):
                slot = k % STAGES
                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 4)
                tlx.async_descriptor_load(x_desc, tiles[slot], [0, k * COLS], fulls[slot])
"""

_RING_HEAD = """
@triton.jit
def {name}(x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    tiles = tlx.local_alloc((ROWS, COLS), tl.float32, STAGES)
    fulls = tlx.alloc_barriers(STAGES, arrive_count=1)
    empties = tlx.alloc_barriers(STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # consumer
"""

ROW_MAX = Exercise(
    id="10.3",
    title="A consumer",
    name="row_max_kernel",
    kind="kernel",
    call=_stream_launch,
    cases=_stream_cases,
    reference=lambda x, chunks, stages: _each_schedule(x.amax(dim=1)),
    outputs=(Output("out", ("schedule", "row")),),
    difficulty=2,
    minutes=10,
    tol=1e-6,
    time_limit=30.0,
    limits=RING_LIMITS,
    hints=(
        "The consumer's loop mirrors the producer's: the same rounds, the same slots. It waits where the producer completes, and arrives where the producer waits.",
        "Exercise 10.2 gives the slot and the parity. Arrive on empties[slot] only after the values are in registers.",
        "for k in range(chunks): slot = k % STAGES; barrier_wait(fulls[slot], (k // STAGES) & 1); largest = tl.maximum(largest, tl.max(tlx.local_load(tiles[slot]), axis=1)); barrier_arrive(empties[slot], 1).",
    ),
    mutants=(
        _one_buffer(*_FIRST_ONLY),
        Mutant(
            "never frees a buffer",
            "the producer waits for an arrive that never comes.",
            caught_by="runs",
            edit=("                tlx.barrier_arrive(empties[slot], 1)\n", ""),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "frees before reading",
            "the producer may refill a buffer that is being read.",
            caught_by="runs",
            edit=(
                "                largest = tl.maximum(largest, tl.max(tlx.local_load(tiles[slot]), axis=1))\n                tlx.barrier_arrive(empties[slot], 1)\n",
                "                tlx.barrier_arrive(empties[slot], 1)\n                largest = tl.maximum(largest, tl.max(tlx.local_load(tiles[slot]), axis=1))\n",
            ),
            expect="tiles",
            recognise=False,
        ),
        Mutant(
            "waits for parity 0 forever",
            "in the second turn that phase is long over.",
            caught_by="runs",
            edit=("tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)", "tlx.barrier_wait(fulls[slot], 0)"),
            expect="two phases late",
            recognise=False,
        ),
        Mutant(
            "never waits",
            "buffers are read before they are filled.",
            caught_by="runs",
            edit=("                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)\n", ""),
            expect="where nobody had written",
            recognise=False,
        ),
        Mutant(
            "no ring",
            "right numbers, but no task, no buffer, no barrier: the chunks are loaded one after the other.",
            caught_by="two tasks",
            source="""
@triton.jit
def row_max_kernel(x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    found = tl.full((ROWS,), float("-inf"), tl.float32)
    for k in range(chunks):
        found = tl.maximum(found, tl.max(x_desc.load([0, k * COLS]), axis=1))
    tl.store(out_ptr + tl.arange(0, ROWS), found)
""",
            expect="two async tasks",
            recognise=False,
        ),
        Mutant(
            "frees a buffer one round late",
            "with one stage the producer waits for the buffer that is given back after its next load.",
            caught_by="runs",
            edit=(
                "                tlx.barrier_arrive(empties[slot], 1)\n",
                "                if k > 0:\n                    tlx.barrier_arrive(empties[(k - 1) % STAGES], 1)\n",
            ),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "parity without & 1",
            "a parity is 0 or 1, not the number of the turn.",
            caught_by="runs",
            edit=("tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)", "tlx.barrier_wait(fulls[slot], k // STAGES)"),
            expect="parity",
            recognise=False,
        ),
        Mutant(
            "keeps the last chunk only",
            "Only the last chunk counts: keep the maximum of what was and what came.",
            edit=(
                "tl.maximum(largest, tl.max(tlx.local_load(tiles[slot]), axis=1))",
                "tl.max(tlx.local_load(tiles[slot]), axis=1)",
            ),
        ),
    ),
    variants=(
        _RING_HEAD.format(name="row_max_kernel")
        + """
            largest = tl.full((ROWS,), -1e30, tl.float32)
            slot = 0
            phase = 0
            for k in range(chunks):
                tlx.barrier_wait(fulls[slot], phase)
                chunk = tlx.local_load(tiles[slot])
                tlx.barrier_arrive(empties[slot], 1)
                largest = tl.maximum(largest, tl.max(chunk, axis=1))
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
            tl.store(out_ptr + tl.arange(0, ROWS), largest)
"""
        + _RING_PRODUCER,
        _RING_HEAD.format(name="row_max_kernel")
        + """
            best = tl.full((ROWS, COLS), float("-inf"), tl.float32)
            for k in range(chunks):
                bar = tlx.local_view(fulls, k % STAGES)
                tlx.barrier_wait(bar, k // STAGES % 2)
                best = tl.maximum(best, tlx.local_load(tlx.local_view(tiles, k % STAGES)))
                tlx.barrier_arrive(tlx.local_view(empties, k % STAGES), 1)
            tl.store(out_ptr + tl.arange(0, ROWS), tl.max(best, 1))
"""
        + _RING_PRODUCER,
    ),
)

ROW_SUM = Exercise(
    id="10.4",
    title="Bug hunt: given back twice",
    name="row_sum_kernel",
    kind="kernel",
    hunt=True,
    call=_stream_launch,
    cases=_stream_cases,
    reference=lambda x, chunks, stages: _each_schedule(x.sum(dim=1)),
    outputs=(Output("out", ("schedule", "row")),),
    difficulty=2,
    minutes=20,
    tol=1e-5,
    time_limit=30.0,
    limits=RING_LIMITS,
    hints=(
        "The report names the barrier the producer waits on. Who should arrive there, and where does it arrive instead?",
        "With one chunk, and with two, all is well: only the second turn needs the buffers back.",
        "The consumer gives back buffer 0 in every round. It must give back the one it just read: empties[slot].",
    ),
    mutants=(
        _one_buffer(*_FIRST_ONLY),
        Mutant(
            "always gives back buffer 0",
            "the given kernel with the same fault in another form.",
            caught_by="runs",
            edit=("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[slot * 0], 1)"),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "no ring",
            "right numbers, but no task, no buffer, no barrier: the chunks are loaded one after the other.",
            caught_by="two tasks",
            source="""
@triton.jit
def row_sum_kernel(x_desc, out_ptr, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    found = tl.full((ROWS,), 0.0, tl.float32)
    for k in range(chunks):
        found = found + tl.sum(x_desc.load([0, k * COLS]), axis=1)
    tl.store(out_ptr + tl.arange(0, ROWS), found)
""",
            expect="two async tasks",
            recognise=False,
        ),
        Mutant(
            "gives back twice",
            "two arrivals where the barrier was made for one.",
            caught_by="runs",
            edit=("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(empties[slot], 2)"),
            expect="arriv",
            recognise=False,
        ),
        Mutant(
            "arrives on full",
            "the consumer completes a phase of its own barrier.",
            caught_by="runs",
            edit=("tlx.barrier_arrive(empties[slot], 1)", "tlx.barrier_arrive(fulls[slot], 1)"),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "takes the producer's wait away",
            "nothing holds the producer back now: it overwrites what is being read.",
            caught_by="runs",
            edit=("                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n", ""),
            expect="tiles",
            recognise=False,
        ),
    ),
    variants=(
        _RING_HEAD.format(name="row_sum_kernel")
        + """
            total = tl.zeros((ROWS,), tl.float32)
            for k in range(chunks):
                slot = k % STAGES
                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)
                chunk = tlx.local_load(tiles[slot])
                tlx.barrier_arrive(empties[k % STAGES])
                total += tl.sum(chunk, axis=1)
            tl.store(out_ptr + tl.arange(0, ROWS), total)
"""
        + _RING_PRODUCER,
        _RING_HEAD.format(name="row_sum_kernel")
        + """
            total = tl.zeros((ROWS,), tl.float32)
            for k in range(chunks):
                slot = k % STAGES
                tlx.barrier_wait(fulls[slot], (k // STAGES) & 1)
                total += tl.sum(tlx.local_load(tiles[slot]), axis=1)
                for i in tl.static_range(STAGES):
                    if i == slot:
                        tlx.barrier_arrive(empties[i], 1)
            tl.store(out_ptr + tl.arange(0, ROWS), total)
"""
        + _RING_PRODUCER,
    ),
)

# -- 10.5 --------------------------------------------------------------------------------------------------------------


def _gemm_cases(seed):
    g = _rng(seed)

    def case(name, steps, n=64, k=64, m=128):
        a = torch.randn(m, steps * k, generator=g).to(torch.bfloat16)
        b = torch.randn(steps * k, n, generator=g).to(torch.bfloat16)
        return Case(name, (a, b, steps))

    return [
        case("one slice of K", 1),
        case("three slices", 3),
        case("two slices", 2),
        case("five slices", 5, k=32),
        case("two slices, 128 columns", 2, n=128, k=32),
        case("three slices, 64 rows", 3, n=32, k=64, m=64),
    ]


def _gemm_launch(kernel, a, b, steps):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, m, n, k = [], a.shape[0], b.shape[1], a.shape[1] // steps
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(m, n)
        boxes = [TensorDescriptor.from_tensor(a, [m, k]), TensorDescriptor.from_tensor(b, [k, n])]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](*boxes, out, steps, M=m, N=n, K=k)
        results.append(out)
    return torch.stack(results)


_GEMM_FRAME = """
@triton.jit
def gemm_kernel(a_desc, b_desc, out_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1, arrive_count=1)
    empty = tlx.alloc_barriers(1, arrive_count=1)
    done = tlx.alloc_barriers(1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # epilogue
            tlx.barrier_wait(done[0], 0)
            m, n = tl.arange(0, M), tl.arange(0, N)
            tl.store(out_ptr + m[:, None] * N + n[None, :], tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1):  # load
            for k in range(steps):
                tlx.barrier_wait(empty[0], (k & 1) ^ 1)
                tlx.barrier_expect_bytes(full[0], 2 * (M * K + K * N))
                tlx.async_descriptor_load(a_desc, a[0], [0, k * K], full[0])
                tlx.async_descriptor_load(b_desc, b[0], [k * K, 0], full[0])
        with tlx.async_task(num_warps=1):  # mma
            for k in range(steps):
                tlx.barrier_wait(full[0], k & 1)
"""

GEMM = Exercise(
    id="10.5",
    title="Bug hunt: right under some schedules only",
    name="gemm_kernel",
    kind="kernel",
    hunt=True,
    call=_gemm_launch,
    cases=_gemm_cases,
    reference=lambda a, b, steps: _each_schedule(a @ b),
    outputs=(Output("out", ("schedule", "row", "column")),),
    difficulty=3,
    minutes=20,
    tol=1e-5,
    time_limit=60.0,
    limits=(
        Limit("three tasks", "tasks", at_least=3, text="three async tasks and tensor memory, as given"),
        _at_least(
            "products in tensor memory",
            "mmas",
            lambda case: case.args[2],
            "three async tasks and tensor memory, as given",
        ),
        _at_least(
            "slices by TMA",
            "tlx:async_descriptor_load",
            lambda case: 2 * case.args[2],
            "three async tasks and tensor memory, as given",
        ),
    ),
    hints=(
        "One of the two accesses is the load of the next slice. What tells the load task that the buffer is free, and when is that said?",
        "A barrier_arrive after async_dot happens when the product was *issued*. You want an arrival when it is *done*.",
        "async_dot takes mBarriers=[...]: each gets one arrival when the product has finished. Give it empty[0] and drop the barrier_arrive.",
    ),
    mutants=(
        Mutant(
            "128 rows for good",
            "the announced bytes depend on M.",
            caught_by="runs",
            edit=("2 * (M * K + K * N)", "2 * (128 * K + K * N)"),
            expect="full",
            recognise=False,
        ),
        Mutant(
            "frees the buffers before the product",
            "the given kernel's mistake in another form.",
            caught_by="runs",
            edit=(
                "tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, mBarriers=[empty[0]])",
                "tlx.barrier_arrive(empty[0], 1)\n                tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, force_async=True)",
            ),
            expect="shared memory a[0]",
            recognise=False,
        ),
        Mutant(
            "one loop of tl.dot",
            "right numbers, but no task, no buffer and no tensor memory are left.",
            caught_by="three tasks",
            source="""
@triton.jit
def gemm_kernel(a_desc, b_desc, out_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for k in range(steps):
        acc = tl.dot(a_desc.load([0, k * K]), b_desc.load([k * K, 0]), acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)
""",
            expect="as given",
            recognise=False,
        ),
        Mutant(
            "never frees the buffers",
            "the load task waits forever.",
            caught_by="runs",
            edit=(", mBarriers=[empty[0]])", ", force_async=True)"),
            expect="empty",
            recognise=False,
        ),
        Mutant(
            "completion on the wrong barrier",
            "the epilogue starts after the first slice.",
            caught_by="runs",
            edit=("mBarriers=[empty[0]]", "mBarriers=[empty[0], done[0]]"),
            expect="done",
            recognise=False,
        ),
        Mutant(
            "starts every slice afresh",
            "Each slice replaces the accumulator: only the first product may ignore what it holds.",
            edit=("use_acc=k > 0", "use_acc=False"),
        ),
        Mutant(
            "accumulates onto nothing",
            "the first product adds to tensor memory that was never written.",
            caught_by="runs",
            edit=("use_acc=k > 0", "use_acc=True"),
            expect="acc[0]",
            recognise=False,
        ),
    ),
    variants=(
        _GEMM_FRAME
        + """
                tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, force_async=True)
                tlx.tcgen05_commit(empty[0])
            tlx.tcgen05_commit(done[0])
""",
        _GEMM_FRAME.replace("    done = ", "    product = tlx.alloc_barriers(1, arrive_count=1)\n    done = ")
        + """
                tlx.async_dot(a[0], b[0], acc[0], use_acc=k != 0, mBarriers=[product[0]])
                tlx.barrier_wait(product[0], k & 1)
                tlx.barrier_arrive(empty[0], 1)
            tlx.tcgen05_commit(done[0])
""",
    ),
)

# -- 10.6 --------------------------------------------------------------------------------------------------------------


def _add_cases(seed):
    g = _rng(seed)

    def case(m, n, k):
        a = torch.randn(m, k, generator=g).to(torch.bfloat16)
        b = torch.randn(k, n, generator=g).to(torch.bfloat16)
        return Case(f"{m} x {n} x {k}", (a, b, 5.0 * torch.randn(m, n, generator=g)))

    return [case(128, 64, 64), case(128, 128, 64), case(128, 64, 128), case(64, 128, 64), case(64, 64, 128)]


def _add_launch(kernel, a, b, c):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, (m, k), n = [], a.shape, b.shape[1]
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        out = unwritten(m, n)
        boxes = [TensorDescriptor.from_tensor(a, [m, k]), TensorDescriptor.from_tensor(b, [k, n])]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](*boxes, c, out, M=m, N=n, K=k)
        results.append(out)
    return torch.stack(results)


GEMM_ADD = Exercise(
    id="10.6",
    title="One product in tensor memory",
    name="gemm_add_kernel",
    kind="kernel",
    call=_add_launch,
    cases=_add_cases,
    reference=lambda a, b, c: _each_schedule(a @ b + c),
    outputs=(Output("out", ("schedule", "row", "column")),),
    difficulty=3,
    minutes=20,
    tol=1e-5,
    time_limit=60.0,
    limits=(
        _at_least("A and B by TMA", "tlx:async_descriptor_load", 2, "A and B come by TMA"),
        _at_least("C in tensor memory", "tmem_stores", 1, "put into tensor memory as the accumulator's first value"),
        _at_least("added by async_dot", "accumulated", 1, "one async_dot adds to it"),
    ),
    hints=(
        "Three buffers (a, b in shared memory, the accumulator with tlx.storage_kind.tmem) and two barriers: one for the loads, one for the product.",
        "Two loads may share one barrier: announce the bytes of both together. Put C into the accumulator with local_store, then async_dot(..., use_acc=True, mBarriers=[done[0]]).",
        "expect 2 * (M * K + K * N) bytes; load a and b; local_store(acc[0], tl.load(c_ptr + at)); wait loaded; async_dot; wait done; store local_load(acc[0]).",
    ),
    mutants=(
        Mutant(
            "128 rows for good",
            "the announced bytes depend on M.",
            caught_by="runs",
            edit=("2 * (M * K + K * N)", "2 * (128 * K + K * N)"),
            expect="loaded",
            recognise=False,
        ),
        Mutant(
            "reads before the product is done",
            "async_dot returns at once.",
            caught_by="runs",
            edit=("    tlx.barrier_wait(done[0], 0)\n", ""),
            expect="acc[0]",
            recognise=False,
        ),
        Mutant(
            "multiplies before the tiles are there",
            "the tensor core reads shared memory that the TMA has yet to fill.",
            caught_by="runs",
            edit=("    tlx.barrier_wait(loaded[0], 0)\n", ""),
            expect="shared memory a[0]",
            recognise=False,
        ),
        Mutant(
            "forgets C",
            "C is not in the result: use_acc=False throws away what the accumulator held.",
            edit=("use_acc=True", "use_acc=False"),
        ),
        Mutant(
            "C added after the product",
            "right numbers, but C is added in registers: the accumulator did not begin with it.",
            caught_by="C in tensor memory",
            edit=(
                ("    tlx.local_store(acc[0], tl.load(c_ptr + at))\n", ""),
                ("use_acc=True", "use_acc=False"),
                ("tlx.local_load(acc[0]))", "tlx.local_load(acc[0]) + tl.load(c_ptr + at))"),
            ),
            expect="first value",
            recognise=False,
        ),
        Mutant(
            "tl.dot instead of async_dot",
            "right numbers, but the product was made in registers.",
            caught_by="added by async_dot",
            edit=(
                (
                    "    tlx.async_dot(a[0], b[0], acc[0], use_acc=True, mBarriers=[done[0]])\n    tlx.barrier_wait(done[0], 0)\n",
                    "",
                ),
                (
                    "tlx.local_load(acc[0]))",
                    "tl.dot(tlx.local_load(a[0]), tlx.local_load(b[0]), tlx.local_load(acc[0])))",
                ),
            ),
            expect="adds to it",
            recognise=False,
        ),
        Mutant(
            "announces only A's bytes",
            "the barrier is told of one tile and gets two.",
            caught_by="runs",
            edit=("2 * (M * K + K * N)", "2 * M * K"),
            expect="bytes",
            recognise=False,
        ),
        Mutant(
            "accumulator in shared memory",
            "a Blackwell product accumulates in tensor memory.",
            caught_by="runs",
            edit=("tl.float32, 1, tlx.storage_kind.tmem)", "tl.float32, 1)"),
            expect="tmem",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def gemm_add_kernel(a_desc, b_desc, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, tl.constexpr(1), tlx.storage_kind.tmem)
    bars = tlx.alloc_barriers(num_barriers=3, arrive_count=1)
    tlx.local_store(tlx.local_view(acc, 0), tl.load(c_ptr + at))
    tlx.barrier_expect_bytes(bars[0], M * K * 2)
    tlx.async_descriptor_load(a_desc, a[0], [0, 0], bars[0])
    tlx.barrier_expect_bytes(bars[1], K * N * 2)
    tlx.async_descriptor_load(b_desc, b[0], [0, 0], bars[1])
    tlx.barrier_wait(bars[0], 0)
    tlx.barrier_wait(bars[1], 0)
    tlx.async_dot(a[0], b[0], acc[0], force_async=True)
    tlx.tcgen05_commit(bars[2])
    tlx.barrier_wait(bars[2], 0)
    tl.store(out_ptr + at, tlx.local_load(acc[0]))
""",
        """
@triton.jit
def gemm_add_kernel(a_desc, b_desc, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tlx.local_alloc((M, K), tl.bfloat16, 1)
    b = tlx.local_alloc((K, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(1, arrive_count=1)
    done = tlx.alloc_barriers(1, arrive_count=1)
    tlx.local_store(acc[0], tl.load(c_ptr + at))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(done[0], 0)
            tl.store(out_ptr + at, tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(loaded[0], 2 * K * (M + N))
            tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
            tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])
            tlx.barrier_wait(loaded[0], 0)
            tlx.async_dot(a[0], b[0], acc[0], use_acc=True, mBarriers=[done[0]])
""",
    ),
)

# -- 10.7 --------------------------------------------------------------------------------------------------------------


def _two_cases(seed):
    g = _rng(seed)

    def case(chunks, stages, rows=16, cols=16):
        name = f"{chunks} chunk{'s' * (chunks > 1)}, {stages} stage{'s' * (stages > 1)}"
        x = torch.randn(rows, chunks * cols, generator=g) - 3.0
        y = torch.randn(rows, chunks * cols, generator=g).to(torch.bfloat16)
        return Case(name, (x, y, chunks, stages))

    return [case(*ring) for ring in kinds.FEW_RINGS] + [case(9, 2, rows=32, cols=32)]


def _two_launch(kernel, x, y, chunks, stages):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    results, rows, cols = [], x.shape[0], x.shape[1] // chunks
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        dot, largest = unwritten(rows), unwritten(rows)
        boxes = [TensorDescriptor.from_tensor(t, [rows, cols]) for t in (x, y)]
        with emulator.options(policy=policy, seed=seed):
            kernel[(1,)](*boxes, dot, largest, chunks, ROWS=rows, COLS=cols, STAGES=stages)
        results.append((dot, largest))
    return tuple(torch.stack(parts) for parts in zip(*results))


TWO_CONSUMERS = Exercise(
    id="10.7",
    title="A producer for two consumers",
    name="two_consumers_kernel",
    kind="kernel",
    call=_two_launch,
    cases=_two_cases,
    reference=lambda x, y, chunks, stages: (
        _each_schedule((x * y).sum(dim=1)),
        _each_schedule((x + y).amax(dim=1)),
    ),
    outputs=(Output("dot", ("schedule", "row")), Output("largest", ("schedule", "row"))),
    difficulty=3,
    minutes=15,
    tol=1e-5,
    time_limit=30.0,
    limits=(
        Limit("three tasks", "tasks", at_least=3, text="three async tasks"),
        _at_least(
            "every chunk through the ring",
            "tlx:async_descriptor_load",
            lambda case: 2 * case.args[2],
            "every chunk of both matrices goes through the ring",
        ),
        _places("loaded_places", lambda case: 2 * min(case.args[2:]), "the ring has STAGES buffers and uses them all"),
    ),
    hints=(
        "Count the arrivals of one turn: who arrives at fulls, and who at empties? That is each barrier's arrive_count.",
        "The producer's loop mirrors a consumer's. One announcement may cover both copies: the bytes of an fp32 and of a bf16 tile.",
        "fulls: arrive_count=1, empties: arrive_count=2. In round k: wait empties[slot] for ((k // STAGES) & 1) ^ 1, expect ROWS * COLS * 6 bytes on fulls[slot], load x and y at [0, k * COLS].",
    ),
    mutants=(
        _one_buffer(
            *(
                (f"{_ROUND}                {then}", f"{_FIRST}                {then}")
                for then in ("total += tl.sum(tlx.local_load(xs", "both = tlx")
            ),
            _FIRST_ONLY[0],
        ),
        Mutant(
            "one consumer is enough",
            "the first of the two consumers to arrive frees the buffer while the other still reads it.",
            caught_by="runs",
            edit=(
                "empties = tlx.alloc_barriers(STAGES, arrive_count=2)",
                "empties = tlx.alloc_barriers(STAGES, arrive_count=1)",
            ),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "counts the copies as arrivals",
            "a copy delivers bytes and does not arrive: only the announcement does.",
            caught_by="runs",
            edit=(
                "fulls = tlx.alloc_barriers(STAGES, arrive_count=1)",
                "fulls = tlx.alloc_barriers(STAGES, arrive_count=2)",
            ),
            expect="fulls",
            recognise=False,
        ),
        Mutant(
            "two fp32 tiles announced",
            "an element of y has two bytes.",
            caught_by="runs",
            edit=("(4 + 2)", "(4 + 4)"),
            expect="bytes",
            recognise=False,
        ),
        Mutant(
            "nothing holds the producer back",
            "a buffer is filled again while it is read.",
            caught_by="runs",
            edit=("                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n", ""),
            recognise=False,
        ),
        Mutant(
            "waits like a consumer",
            "in the first turn no buffer has been given back: the producer must pass a fresh barrier.",
            caught_by="runs",
            edit=(
                "tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)",
                "tlx.barrier_wait(empties[slot], (k // STAGES) & 1)",
            ),
            expect="empties",
            recognise=False,
        ),
        Mutant(
            "waits between the copies",
            "x is copied before the buffer is free.",
            caught_by="runs",
            edit=(
                ("                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n", ""),
                (
                    "                tlx.async_descriptor_load(y_desc",
                    "                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)\n                tlx.async_descriptor_load(y_desc",
                ),
            ),
            recognise=False,
        ),
        Mutant(
            "y of the first chunk always",
            "Every round brought the first chunk of y.",
            edit=("ys[slot], [0, k * COLS]", "ys[slot], [0, 0]"),
        ),
        Mutant(
            "y announced on a barrier of its own turn",
            "y's copy completes on the next buffer's barrier, so it is not waited for.",
            caught_by="runs",
            edit=("ys[slot], [0, k * COLS], fulls[slot])", "ys[slot], [0, k * COLS], fulls[(k + 1) % STAGES])"),
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "fulls = tlx.alloc_barriers(STAGES, arrive_count=1)",
                "fulls = tlx.alloc_barriers(STAGES, arrive_count=2)",
            ),
            (
                "                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * (4 + 2))\n",
                "                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 2)\n                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * 4)\n",
            ),
        ),
        (
            (
                """            for k in range(chunks):
                slot = k % STAGES
                tlx.barrier_wait(empties[slot], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(fulls[slot], ROWS * COLS * (4 + 2))
                tlx.async_descriptor_load(x_desc, xs[slot], [0, k * COLS], fulls[slot])
                tlx.async_descriptor_load(y_desc, ys[slot], [0, k * COLS], fulls[slot])""",
                """            at, slot, phase = 0, 0, 1
            for _ in range(chunks):
                tlx.barrier_wait(empties[slot], phase)
                tlx.barrier_expect_bytes(fulls[slot], 6 * ROWS * COLS)
                tlx.async_descriptor_load(y_desc, ys[slot], [0, at], fulls[slot])
                tlx.async_descriptor_load(x_desc, xs[slot], [0, at], fulls[slot])
                at += COLS
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
""",
            ),
        ),
    ),
)

# -- 10.8 --------------------------------------------------------------------------------------------------------------


def _exp_cases(seed):
    g = _rng(seed)

    def case(chunks, stages, rows=64, cols=64):
        name = f"{chunks} chunk{'s' * (chunks > 1)}, {stages} stage{'s' * (stages > 1)}"
        return Case(name, (torch.randn(rows, chunks * cols, generator=g), chunks, stages))

    return [case(1, 1), case(3, 1), case(4, 2), case(9, 2), case(7, 3), case(1, 3), case(5, 2, 32, 128)]


def _exp_launch(kernel, x, chunks, stages):
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out = unwritten(*x.shape)
    rows, cols = x.shape[0], x.shape[1] // chunks
    kernel[(1,)](x, TensorDescriptor.from_tensor(out, [rows, cols]), chunks, ROWS=rows, COLS=cols, STAGES=stages)
    for warning in emulator.last().warnings:  # a missing fence
        raise warning
    return out


def _exp_cycles(case):
    _, chunks, stages = case.args
    return 700 * chunks + 1000 if stages > 1 and chunks > 1 else None


EXP_STREAM = Exercise(
    id="10.8",
    title="A store pipeline",
    name="exp_stream_kernel",
    kind="kernel",
    call=_exp_launch,
    cases=_exp_cases,
    reference=lambda x, chunks, stages: torch.exp(x),
    outputs=(Output("out", ("row", "column")),),
    difficulty=3,
    minutes=15,
    tol=1e-6,
    time_limit=30.0,
    schedules=(("lazy", 0), ("random", 1), ("random", 2)),
    limits=(
        Limit(
            "out by TMA",
            "tlx:async_descriptor_store",
            at_least=lambda case: case.args[1],
            text="every chunk leaves by TMA",
        ),
        _places("stored_places", lambda case: min(case.args[1:]), "all STAGES buffers take part, and no more"),
        Limit(
            "stores overlap",
            "cycles",
            at_most=_exp_cycles,
            text="with two stages or more at most 700 modelled cycles per chunk and 1,000 besides",
        ),
    ),
    hints=(
        "Before round k writes its buffer, the store of round k - STAGES must have read it. How many stores may be under way at that moment?",
        "The stores of rounds k - STAGES + 1 to k - 1 may be: STAGES - 1 of them. So wait(STAGES - 1) stands before the local_store, a fence behind it, and wait(0) once behind the loop.",
        'async_descriptor_store_wait(STAGES - 1); local_store(staging[k % STAGES], tl.exp(x)); fence("async_shared"); async_descriptor_store(out_desc, staging[k % STAGES], [0, k * COLS]); behind the loop async_descriptor_store_wait(0).',
    ),
    mutants=(
        Mutant(
            "two buffers, whatever STAGES is",
            "the third buffer is never used, so one store less can be under way.",
            caught_by="all the buffers",
            edit=(
                (
                    "tlx.local_store(staging[k % STAGES]",
                    "DEPTH: tl.constexpr = 2 if STAGES > 2 else STAGES\n        tlx.local_store(staging[k % DEPTH]",
                ),
                (
                    "tlx.async_descriptor_store_wait(STAGES - 1)",
                    "tlx.async_descriptor_store_wait(1 if STAGES > 1 else 0)",
                ),
                ("out_desc, staging[k % STAGES]", "out_desc, staging[k % DEPTH]"),
            ),
            expect="TMA stores read 2 places in shared memory; at least 3 asked for",
            recognise=False,
        ),
        Mutant(
            "one store too many",
            "with STAGES stores under way the buffer that comes next is still being read.",
            caught_by="runs",
            edit=("tlx.async_descriptor_store_wait(STAGES - 1)", "tlx.async_descriptor_store_wait(STAGES)"),
            expect="staging[0]",
            recognise=False,
        ),
        Mutant(
            "waits for every store",
            "right numbers, but each chunk waits until the one before it has left.",
            caught_by="stores overlap",
            edit=("tlx.async_descriptor_store_wait(STAGES - 1)", "tlx.async_descriptor_store_wait(0)"),
            expect="700 modelled cycles",
            recognise=False,
        ),
        Mutant(
            "waits behind the write",
            "the wait comes when the buffer has been written already.",
            caught_by="runs",
            edit=(
                "        tlx.async_descriptor_store_wait(STAGES - 1)\n        tlx.local_store(staging[k % STAGES], tl.exp(x))\n",
                "        tlx.local_store(staging[k % STAGES], tl.exp(x))\n        tlx.async_descriptor_store_wait(STAGES - 1)\n",
            ),
            expect="staging[0]",
            recognise=False,
        ),
        Mutant(
            "no fence",
            "the TMA reads what threads wrote, and nothing makes it visible.",
            caught_by="runs",
            edit=('        tlx.fence("async_shared")\n', ""),
            expect="fence",
            recognise=False,
        ),
        Mutant(
            "fence behind the store",
            "a fence covers what was written before it, for what reads after it.",
            caught_by="runs",
            edit=(
                '        tlx.fence("async_shared")\n        tlx.async_descriptor_store(out_desc, staging[k % STAGES], [0, k * COLS])\n',
                '        tlx.async_descriptor_store(out_desc, staging[k % STAGES], [0, k * COLS])\n        tlx.fence("async_shared")\n',
            ),
            expect="fence",
            recognise=False,
        ),
        Mutant(
            "the last stores are left alone",
            "the kernel ends while the TMA may still read its buffers.",
            caught_by="runs",
            edit=("    tlx.async_descriptor_store_wait(0)", "    pass"),
            expect="nobody waited for",
            recognise=False,
        ),
        Mutant(
            "one buffer for all",
            "all chunks go through the first buffer, and the wait allows for more.",
            caught_by="runs",
            edit=(
                ("tlx.local_store(staging[k % STAGES]", "tlx.local_store(staging[0]"),
                ("out_desc, staging[k % STAGES]", "out_desc, staging[0]"),
            ),
            expect="staging[0]",
            recognise=False,
        ),
        Mutant(
            "stored by the threads",
            "right numbers, but the chunks leave by ordinary stores.",
            caught_by="out by TMA",
            source="""
@triton.jit
def exp_stream_kernel(x_ptr, out_desc, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    for k in range(chunks):
        x = tl.load(x_ptr + r[:, None] * (chunks * COLS) + k * COLS + c[None, :])
        out_desc.store([0, k * COLS], tl.exp(x))
""",
            expect="leaves by TMA",
            recognise=False,
        ),
    ),
    variants=(
        (
            ("        tlx.async_descriptor_store_wait(STAGES - 1)\n", ""),
            (
                "[0, k * COLS])\n",
                "[0, k * COLS])\n        tlx.async_descriptor_store_wait(STAGES - 1)  # the next buffer is free\n",
            ),
        ),
        """
@triton.jit
def exp_stream_kernel(x_ptr, out_desc, chunks, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    staging = tlx.local_alloc((ROWS, COLS), tl.float32, STAGES)
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    slot = 0
    for k in range(chunks):
        x = tl.load(x_ptr + r[:, None] * (chunks * COLS) + k * COLS + c[None, :])
        y = tl.exp(x)
        if k >= STAGES:
            tlx.async_descriptor_store_wait(STAGES - 1)
        view = tlx.local_view(staging, slot)
        tlx.local_store(view, y)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(out_desc, view, [0, k * COLS])
        slot = (slot + 1) % STAGES
    tlx.async_descriptor_store_wait(0)
""",
    ),
)

# -- 10.9 --------------------------------------------------------------------------------------------------------------

SQUARE_SUM = Exercise(
    id="10.9",
    title="Bug hunt: an innocent wait",
    name="square_sum_kernel",
    kind="kernel",
    hunt=True,
    call=_stream_launch,
    cases=_stream_cases,
    reference=lambda x, chunks, stages: _each_schedule((x * x).sum(dim=1)),
    outputs=(Output("out", ("schedule", "row")),),
    difficulty=3,
    minutes=20,
    tol=1e-5,
    time_limit=30.0,
    limits=RING_LIMITS,
    hints=(
        "Nothing is wrong with the line of the report. Ask for each wait which phase it must wait for, and which it does wait for.",
        "With two buffers: round 0 waits for phase 0 of fulls[0], round 1 for phase 0 of fulls[1]. What is phase in round 1?",
        "The phase flips when the ring has gone round once, that is when slot has just reached STAGES, not after every round.",
    ),
    mutants=(
        _one_buffer(
            ("phase = phase ^ (slot == STAGES)", "phase = phase ^ 1"),
            ("slot = slot % STAGES", "slot = 0"),
            ("empties[k % STAGES], ((k // STAGES) & 1) ^ 1", "empties[0], (k & 1) ^ 1"),
            ("fulls[k % STAGES], ROWS * COLS * 4", "fulls[0], ROWS * COLS * 4"),
            ("tiles[k % STAGES], [0, k * COLS], fulls[k % STAGES]", "tiles[0], [0, k * COLS], fulls[0]"),
        ),
        Mutant(
            "flips when the turn begins",
            "the phase flips behind the first buffer of a turn instead of behind the last.",
            caught_by="runs",
            edit=("phase = phase ^ (slot == STAGES)", "phase = phase ^ (slot == 1)"),
            recognise=False,
        ),
        Mutant(
            "never flips",
            "in the second turn the wait asks for the phase of the first again.",
            caught_by="runs",
            edit=("phase = phase ^ (slot == STAGES)", "phase = phase"),
            expect="two phases late",
            recognise=False,
        ),
        Mutant(
            "starts with the other phase",
            "a fresh barrier passes a wait for parity 1: nothing was filled yet.",
            caught_by="runs",
            edit=("slot, phase = 0, 0", "slot, phase = 0, 1"),
            recognise=False,
        ),
        Mutant(
            "flips one buffer early",
            "the last buffer of a turn is waited for with the next turn's parity.",
            caught_by="runs",
            edit=("phase = phase ^ (slot == STAGES)", "phase = phase ^ (slot == STAGES - 1)"),
            recognise=False,
        ),
        Mutant(
            "the slot is wrapped first",
            "behind the wrap slot never equals STAGES, so the phase never flips.",
            caught_by="runs",
            edit=(
                (
                    "                phase = phase ^ (slot == STAGES)\n                slot = slot % STAGES\n",
                    "                slot = slot % STAGES\n                phase = phase ^ (slot == STAGES)\n",
                ),
            ),
            expect="two phases late",
            recognise=False,
        ),
        Mutant(
            "the producer is made to agree",
            "both sides use the wrong parity now: the producer waits for a buffer that was not given back.",
            caught_by="runs",
            edit=(
                ("phase = phase ^ (slot == STAGES)", "phase = phase ^ 1"),
                ("((k // STAGES) & 1) ^ 1", "(k & 1) ^ 1"),
            ),
            recognise=False,
        ),
        Mutant(
            "the consumer waits for empties as well",
            "an arrive that is never made is waited for.",
            caught_by="runs",
            edit=(
                ("phase = phase ^ (slot == STAGES)", "phase = phase ^ 1"),
                (
                    "                tile = tlx.local_load(tiles[slot])\n",
                    "                tlx.barrier_wait(empties[slot], phase)\n                tile = tlx.local_load(tiles[slot])\n",
                ),
            ),
            recognise=False,
        ),
    ),
    variants=(
        (
            (
                "                phase = phase ^ (slot == STAGES)\n                slot = slot % STAGES\n",
                "                if slot == STAGES:\n                    slot = 0\n                    phase ^= 1\n",
            ),
        ),
        (
            ("            for _ in range(chunks):\n", "            for k in range(chunks):\n"),
            ("                phase = phase ^ (slot == STAGES)\n", "                phase = ((k + 1) // STAGES) & 1\n"),
        ),
    ),
)

EXERCISES = [SCALE, RING, ROW_MAX, ROW_SUM, GEMM, GEMM_ADD, TWO_CONSUMERS, EXP_STREAM, SQUARE_SUM]
