"""Warp specialisation, barriers between tasks and CTAs, cluster launch control, small utilities."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["eager", "lazy", "random", "timed"], autouse=True)
def schedule(request):
    with emulator.options(policy=request.param, seed=5) as chosen:
        yield chosen


@triton.jit
def _replicas(out, N: tl.constexpr):
    total = 0
    with tlx.async_tasks():
        with tlx.async_task("default"):
            total += 1
            tl.store(out, total)
        with tlx.async_task(num_warps=1, replicate=3):
            replica: tl.constexpr = tlx.async_task_replica_id()
            total += 10 * (replica + 1)
            tl.store(out + 1 + replica, total)


def test_each_task_has_its_own_copy_of_what_it_assigns():
    out = torch.zeros(4)
    _replicas[(1,)](out, 4)
    assert out.tolist() == [1, 10, 20, 30]


@triton.jit
def _only_default(out, SPLIT: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out, 1)
        if SPLIT:
            with tlx.async_task(num_warps=4):
                tl.store(out + 1, 2)


@pytest.mark.parametrize("split", [False, True])
def test_tasks_behind_a_constexpr_condition(split):
    out = torch.zeros(2)
    _only_default[(1,)](out, split)
    assert out.tolist() == [1, 2 if split else 0]


@triton.jit
def _tasks(out, KIND: tl.constexpr):
    if KIND == "no default":
        with tlx.async_tasks():
            with tlx.async_task(num_warps=4):
                tl.store(out, 1)
    elif KIND == "registers for some":
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, registers=80):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4):
                tl.store(out, 1)
    elif KIND == "step of 8":
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, registers=81):
                tl.store(out, 1)
    elif KIND == "default registers":
        with tlx.async_tasks():
            with tlx.async_task("default", registers=80):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, registers=80):
                tl.store(out, 1)
    elif KIND == "too many registers":
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, registers=240, replicate=3):
                tl.store(out, 1)
    elif KIND == "too many threads":
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(out, 1)
            with tlx.async_task(num_warps=8, replicate=4):
                tl.store(out, 1)
    elif KIND == "overlapping warps":
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, warp_group_start_id=4):
                tl.store(out, 1)
            with tlx.async_task(num_warps=4, warp_group_start_id=6):
                tl.store(out, 1)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("registers for some", triton.CompilationError, "ALL or NONE"),
        ("step of 8", triton.CompilationError, "divisible by 8"),
        ("default registers", triton.CompilationError, "Cannot specify registers for the default"),
        ("too many registers", errors.RegisterLimitError, "92,160 registers"),
        ("too many threads", errors.ThreadLimitError, "1152 threads"),
        ("overlapping warps", triton.CompilationError, "Overlapping warp ranges"),
        ("no default", triton.CompilationError, "Default task must be one and only one"),
    ],
)
def test_tasks_that_cannot_be(kind, error, message):
    with pytest.raises(error, match=message):
        _tasks[(1,)](torch.zeros(1), kind)


@triton.jit
def _roles(out, BIG: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, STARTS: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out, 1)
        if STARTS:
            with tlx.async_task(num_warps=8, registers=BIG, warp_group_start_id=4):
                tl.store(out, 1)
            with tlx.async_task(num_warps=1, registers=FIRST, warp_group_start_id=12):
                tl.store(out, 1)
            with tlx.async_task(num_warps=1, registers=SECOND, warp_group_start_id=STARTS):
                tl.store(out, 1)
        else:
            with tlx.async_task(num_warps=1, registers=FIRST):
                tl.store(out, 1)
            with tlx.async_task(num_warps=8, registers=BIG):
                tl.store(out, 1)
            with tlx.async_task(num_warps=1, registers=SECOND):
                tl.store(out, 1)


@pytest.mark.parametrize(
    "numbers, starts, total",
    [
        ((152, 24, 24), 0, None),
        ((152, 24, 152), 0, None),  # 8 x 32 x 152 + 4 x 32 x 152
        ((208, 24, 24), 0, None),
        ((208, 24, 152), 0, "72,704"),
        ((208, 80, 24), 0, "63,488"),
        ((208, 40, 32), 13, None),
        ((208, 40, 32), 16, None),
        ((208, 40, 40), 16, "63,488"),  # in a group of its own
    ],
)
def test_small_tasks_share_the_registers_of_four_warps(numbers, starts, total):
    run = emulator.run(_roles, (1,), torch.zeros(1), *numbers, starts)
    assert [type(f) for f in run.findings] == [errors.RegisterLimitError] * bool(total)
    if total:
        assert f"{total} registers for the tasks" in str(run.findings[0]) and "four warps in a row" in str(
            run.findings[0]
        )


@triton.jit
def _handshake(out, WARP: tl.constexpr, NAMED: tl.constexpr):
    buffer = tlx.local_alloc((128,), tl.float32, 1)
    if WARP:
        full = tlx.alloc_warp_barrier(1, num_warps=4)
    else:
        full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(buffer[0], tl.full((128,), 3.0, tl.float32))
            if NAMED:
                tlx.named_barrier_arrive(9, 256)
            else:
                tlx.barrier_arrive(full[0])
        with tlx.async_task(num_warps=4):
            j = tl.arange(0, 128)
            if NAMED:
                tlx.named_barrier_wait(9, 256)
            else:
                tlx.barrier_wait(full[0], 0)
            tl.store(out + j, tlx.local_load(buffer[0]))


@pytest.mark.parametrize("warp, named", [(False, False), (True, False), (False, True)])
def test_a_value_handed_over(warp, named):
    out = torch.zeros(128)
    _handshake[(1,)](out, warp, named)
    assert (out == 3).all()


# ---------------------------------------------------------------- clusters


@triton.jit
def _exchange(src, out, HOW: tl.constexpr, N: tl.constexpr):
    """Each CTA sends its block to its neighbour."""
    rank = tlx.cluster_cta_rank()
    buffers = tlx.local_alloc((N,), tl.float32, 2)
    bar = tlx.alloc_barriers(1)
    i = tl.arange(0, N)
    value = tl.load(src + rank * N + i)
    tlx.cluster_barrier()
    if HOW == "sync":
        tlx.remote_shmem_store(buffers[0], value, rank ^ 1)
        tlx.cluster_barrier()
    else:
        tlx.barrier_expect_bytes(bar[0], N * 4)
        if HOW == "store":
            tlx.async_remote_shmem_store(buffers[0], value, rank ^ 1, bar[0])
        else:
            tlx.local_store(buffers[1], value)
            tlx.fence("async_shared")
            tlx.async_remote_shmem_copy(buffers[0], buffers[1], rank ^ 1, bar[0])
        tlx.barrier_wait(bar[0], 0)
        tlx.cluster_barrier()  # the neighbour's barrier tells that this CTA's copy is done
    tl.store(out + rank * N + i, tlx.local_load(buffers[0]))
    tl.store(out + 2 * N + rank, tlx.cluster_size_1d().to(tl.float32))


@pytest.mark.parametrize("how", ["sync", "store", "copy"])
def test_blocks_sent_to_the_neighbour(how):
    x, out = torch.randn(2, 64), torch.zeros(2 * 64 + 2)
    _exchange[(2,)](x, out, how, 64, ctas_per_cga=(2, 1, 1))
    assert torch.equal(out[:128].reshape(2, 64), x.flip(0)) and out[128:].tolist() == [2, 2]


@triton.jit
def _multicast(desc, out, M: tl.constexpr, N: tl.constexpr):
    """CTA 0 loads once for both."""
    rank = tlx.cluster_cta_rank()
    tile = tlx.local_alloc((M, N), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(bar[0], M * N * 4)
    tlx.cluster_barrier()
    tlx.async_descriptor_load(desc, tile[0], [0, 0], bar[0], pred=rank == 0, multicast_targets=[0, 1])
    tlx.barrier_wait(bar[0], 0)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + rank * M * N + at, tlx.local_load(tile[0]))


def test_multicast():
    x, out = torch.randn(8, 16), torch.zeros(2, 8, 16)
    _multicast[(2,)](TensorDescriptor.from_tensor(x, [8, 16]), out, 8, 16, ctas_per_cga=(2, 1, 1))
    assert torch.equal(out[0], x) and torch.equal(out[1], x)


# ---------------------------------------------------------------- cluster launch control


@triton.jit
def _steal(out, counts, MULTI: tl.constexpr):
    tile = tl.program_id(0)
    context = tlx.clc_create_context(2 if MULTI else 1)
    producer, consumer = 1, 0
    while tile != -1:
        tlx.clc_producer(context, producer, multi_ctas=MULTI)
        producer ^= 1
        tl.atomic_add(out + tile, 1)
        tile = tlx.clc_consumer(context, consumer, multi_ctas=MULTI)
        consumer ^= 1
    tl.atomic_add(counts, 1)


@pytest.mark.parametrize("multi", [False, True])
def test_every_tile_once(multi):
    out, counts = torch.zeros(20, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with emulator.options(max_ctas=3):
        _steal[(20,)](out, counts, multi, **(dict(ctas_per_cga=(2, 1, 1)) if multi else {}))
    assert (out == 1).all() and counts.item() == (6 if multi else 3)


# ---------------------------------------------------------------- utilities


@triton.jit
def _utilities(out, x, N: tl.constexpr):
    start = tlx.clock64()
    i = tl.arange(0, N)
    ballot = tlx.vote_ballot_sync(0xFFFFFFFF, tl.load(x + i) > 0)
    tl.store(out + i, ballot)
    tl.store(out + N, tlx.vote_ballot_sync(0xFF, start >= 0))
    end = tlx.clock64()
    tl.store(out + N + 1, (end - start > 0).to(tl.int32))
    tl.store(out + N + 2, tlx.size_of(tl.float16) + tlx.size_of(tlx.dtype_of(x)))
    tl.store(out + N + 3, tlx.thread_id(0))


def test_small_things():
    x = torch.where(torch.arange(128) % 32 == 5, 1.0, -1.0)
    out = torch.zeros(132, dtype=torch.int32)
    _utilities[(1,)](out, x, 128)
    assert (out[:128] == 32).all() and out[128:].tolist() == [0xFF, 1, 6, 0]


@triton.jit
def _round(x, r, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tlx.stoch_round(tl.load(x + i), tlx.dtype_of(y), tl.load(r + i)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
def test_stochastic_rounding(dtype):
    n = 4096
    x = torch.full((n,), 1.0 + 1 / 64 + 2.0**-12)
    x[0], x[1], x[2] = 3.0, 1e38, -0.5
    r = torch.randint(0, 2**31 - 1, (n,), dtype=torch.int32)
    y = torch.zeros(n).to(dtype)
    _round[(1,)](x, r, y, n)
    got = y.float()
    assert got[0] == 3 and got[2] == -0.5 and torch.isfinite(got).all()
    low, high = got[3:].min(), got[3:].max()
    assert low <= x[3] <= high and set(got[3:].tolist()) == {low.item(), high.item()}
    assert abs(got[3:].mean() - x[3]) < 0.1 * (high - low)


@triton.jit
def _thread_zero(out, value, B: tl.constexpr):
    offsets = tl.arange(0, B)
    tid = tlx.thread_id(0)
    if tid == 0:
        tl.store(out + offsets, value)
    tl.store(out + B + offsets, value)


def test_a_store_by_some_threads_only():
    out = torch.zeros(64, dtype=torch.int32)
    _thread_zero[(1,)](out, 42, 32, num_warps=1)
    assert out.tolist() == [42] + [0] * 31 + [42] * 32


@triton.jit
def _some_threads(out, n, B: tl.constexpr):
    tid = tlx.thread_id(0)
    offsets = tl.arange(0, B)
    if (tid == 0) and n > 3:
        tl.store(out + offsets, 1)
    if n > 3 and tid == 1:
        tl.store(out + offsets, 1)
    if not (tid < 30):
        tl.store(out + offsets, 1)
    if tid == 5 or tid == 6:
        if n > 3:
            tl.store(out + offsets, 1)
        tl.store(out + B + offsets, 1)
    while tid < 0:
        tid += 1


def test_branches_on_threads():
    out = torch.zeros(64, dtype=torch.int32)
    _some_threads[(1,)](out, 32, 32, num_warps=1)
    assert out.nonzero().flatten().tolist() == [0, 1, 5, 6, 30, 31, 37, 38]


@triton.jit
def _ballot_of_threads(out):
    tid = tlx.thread_id(0)
    ballot = tlx.vote_ballot_sync(0xFFFFFFFF, tid < 16)
    if tid == 0:
        tl.store(out, ballot)


def test_a_ballot_of_threads():
    out = torch.zeros(1, dtype=torch.int32)
    _ballot_of_threads[(1,)](out, num_warps=1)
    assert out.item() == 0xFFFF


@triton.jit
def _late(src, out, N: tl.constexpr):
    tile = tlx.local_alloc((N,), tl.float32, tl.constexpr(1))
    bars = tlx.alloc_barriers(tl.constexpr(2))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_expect_bytes(bars[0], N * 4)
            tlx.async_load(src, tile[0], bulk=True, barrier=bars[0])
            tlx.barrier_wait(bars[1], 0)  # blocked when the engine reads `src`
            tl.store(out + tl.arange(0, N), tlx.local_load(tile[0]))
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(bars[0], 0)
            tlx.barrier_arrive(bars[1])


def test_an_engine_wakes_nobody():
    """What a copy reads through the frontend costs the task that issued it no time and does not wake it."""
    x, out = torch.rand(128), torch.zeros(128)
    with emulator.options(policy="timed"):
        _late[(1,)](x, out, 128)
    assert torch.equal(x, out)


@triton.jit
def _parities(o, parity, N: tl.constexpr, FIXED: tl.constexpr):
    bars = tlx.alloc_barriers(1, arrive_count=1)
    tlx.barrier_arrive(bars[0], 1)
    tlx.barrier_wait(bars[0], parity if FIXED is None else FIXED)
    tl.store(o, 1.0)


@pytest.mark.parametrize("given", ["argument", "constexpr"])
@pytest.mark.parametrize("parity", [-1, 0, 2, 3, 6])
def test_a_parity_is_zero_or_one(parity, given):
    out = torch.zeros(1)
    launch = lambda: _parities[(1,)](out, parity, 32, parity if given == "constexpr" else None)  # noqa: E731
    if parity == 0:
        launch()
        assert out.item() == 1
        return
    with pytest.raises(errors.ParityError, match=f"parity {parity} of mbarrier bars\\[0\\]") as error:
        launch()
    assert "& 1" in str(error.value) and "test_tasks.py" in str(error.value)


@triton.jit
def _phase_number(x, o, n, N: tl.constexpr):
    bars = tlx.alloc_barriers(2, arrive_count=1)
    for k in range(n):
        tlx.barrier_arrive(bars[k % 2], 1)
        tlx.barrier_wait(bars[k % 2], k // 2)
    tl.store(o, n)


def test_the_number_of_a_phase_is_no_parity():
    out = torch.zeros(1)
    _phase_number[(1,)](out, out, 4, 32)
    with pytest.raises(errors.ParityError, match="parity 2"):
        _phase_number[(1,)](out, out, 5, 32)


@triton.jit
def _divides_in_a_task(out):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out, 1)
        with tlx.async_task(num_warps=1):
            _ = 1 / 0


@triton.jit
def _unknown_name_in_a_task(out):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out, nowhere)  # noqa: F821
        with tlx.async_task(num_warps=1):
            tl.store(out + 1, 1)


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [(_divides_in_a_task, "division by zero"), (_unknown_name_in_a_task, "nowhere is not defined")],
    ids=["division", "name"],
)
def test_what_is_refused_in_a_task_is_the_compiler_s_error(kernel, sentence):
    with pytest.raises(triton.CompilationError, match=sentence):
        kernel[(1,)](torch.zeros(4, dtype=torch.int32))
