"""Undefined lanes through shared and tensor memory, copies and products of the tensor core."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["eager", "lazy", "random"], autouse=True)
def schedule(request):
    with emulator.options(policy=request.param, seed=5) as chosen:
        yield chosen


def found(kernel, *arguments, grid=(1,), **launch):
    """The reports of a launch, all of them about undefined values."""
    reports = emulator.run(kernel, grid, *arguments, **launch).findings
    assert all(type(r) is errors.PoisonError for r in reports), [str(r) for r in reports]
    return [str(r) for r in reports]


@triton.jit
def through(x, out, n, HOW: tl.constexpr, DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr):
    rows, cols = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    at = rows * N + cols
    v = tl.load(x + at, mask=rows < n).to(DTYPE)  # the origin
    if HOW == "tmem":
        tiles = tlx.local_alloc((M, N), DTYPE, 2, tlx.storage_kind.tmem)
    else:
        tiles = tlx.local_alloc((M, N), DTYPE, 2)
    tlx.local_store(tiles[0], v)
    r = tlx.local_load(tiles[0])
    if HOW == "trans":
        r = tl.trans(tlx.local_load(tlx.local_trans(tiles[0])))
    elif HOW == "reshape":
        r = tl.reshape(tlx.local_load(tlx.local_reshape(tiles[0], [M * N])), (M, N))
    elif HOW == "overwritten":
        tlx.local_store(tiles[0], tl.zeros((M, N), DTYPE))
        r = tlx.local_load(tiles[0])
    elif HOW == "other tile":
        tlx.local_store(tiles[1], tl.zeros((M, N), DTYPE))
        r = tlx.local_load(tiles[1])
    elif HOW == "gather":
        r = tlx.local_gather(tiles[0], tl.broadcast_to(rows, (M, N)), 0)
    elif HOW == "scatter":
        tlx.local_store(tiles[1], tl.zeros((M, N), DTYPE))
        tlx.local_scatter(tiles[1], v, tl.broadcast_to(rows, (M, N)), 0)
        r = tlx.local_load(tiles[1])
    if MASK:
        tl.store(out + at, r.to(tl.float32), mask=rows < n)
    else:
        tl.store(out + at, r.to(tl.float32))


@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16, tl.float8e5, tl.int8, tl.int64], ids=str)
@pytest.mark.parametrize("how", ["plain", "trans", "reshape", "gather", "scatter", "tmem"])
def test_memory_keeps_the_marks_of_what_is_stored(how, dtype):
    if how == "tmem" and dtype not in (tl.float32, tl.float16, tl.bfloat16):
        pytest.skip("not in tensor memory")
    x, out = torch.randn(128, 32), torch.zeros(128, 32)
    (report,) = found(through, x, out, 100, how, dtype, 128, 32, False)
    assert f"stores {28 * 32} value(s) that were never loaded" in report and "# the origin" in report
    assert found(through, x, out, 100, how, dtype, 128, 32, True) == []


@pytest.mark.parametrize("how", ["overwritten", "other tile"])
def test_a_store_of_defined_values_defines_the_memory(how):
    assert found(through, torch.randn(128, 32), torch.zeros(128, 32), 100, how, tl.float32, 128, 32, False) == []


@triton.jit
def halves(x, out, n, N: tl.constexpr):
    """A tile stored as fp32 and read as fp16: a lane is undefined if one of its bytes is."""
    i = tl.arange(0, N)
    tile = tlx.local_alloc((N,), tl.float32, 1)
    tlx.local_store(tile[0], tl.load(x + i, mask=i != n))
    narrow = tlx.local_reinterpret(tile[0], tl.float16, [2 * N])
    j = tl.arange(0, 2 * N)
    tl.store(out + j, tlx.local_load(narrow))


def test_bytes_keep_their_marks_under_another_type():
    (report,) = found(halves, torch.randn(64), torch.zeros(128).half(), 5, 64)
    assert "stores 2 value(s)" in report


@triton.jit
def partly_written(out, M: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr):
    rows, cols = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tlx.local_alloc((M, N), tl.int16, 1)
    tlx.local_store(tlx.local_slice(tile[0], [0, 0], [M // 2, N]), tl.full((M // 2, N), -1, tl.int16))
    v = tlx.local_load(tile[0])
    if SKIP:
        tl.store(out + rows * N + cols, v, mask=rows < M // 2)
    else:
        tl.store(out + rows * N + cols, v)


def test_what_nobody_wrote_is_known_by_its_place_not_by_its_bits():
    out = torch.zeros(64, 128, dtype=torch.int16)
    (report,) = found(partly_written, out, 64, 128, False)
    assert (
        f"stores {32 * 128} value(s) out of tile[0], where nobody had written" in report
        and "v = tlx.local_load" in report
    )
    assert found(partly_written, out, 64, 128, True) == []
    assert (out[:32] == -1).all()


@triton.jit
def boxed(x, target, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tile = tlx.local_alloc((ROWS, COLS), tl.float32, 1)
    tlx.local_store(tile[0], tl.load(x + rows * COLS + cols, mask=rows < n))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(target, tile[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


def test_a_tma_store_looks_at_the_lanes_inside_the_tensor():
    x, out = torch.randn(32, 16), torch.zeros(20, 16)
    box = TensorDescriptor.from_tensor(out, [32, 16])
    assert found(boxed, x, box, 20, 32, 16) == [] and torch.equal(out, x[:20])
    (report,) = found(boxed, x, box, 19, 32, 16)
    assert "stores 16 value(s)" in report and "tlx.async_descriptor_store" in report and "tl.load" in report


@triton.jit
def remote(x, out, n, N: tl.constexpr, ASYNC: tl.constexpr, MASK: tl.constexpr):
    """Each CTA sends its block to the other one."""
    i = tl.arange(0, N)
    rank = tlx.cluster_cta_rank()
    tile = tlx.local_alloc((N,), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    if ASYNC:
        tlx.barrier_expect_bytes(bar[0], N * 4)
    tlx.cluster_barrier()
    v = tl.load(x + i, mask=i < n)
    if ASYNC:
        tlx.async_remote_shmem_store(tile[0], v, rank ^ 1, bar[0])
        tlx.barrier_wait(bar[0], 0)
    else:
        tlx.remote_shmem_store(tile[0], v, rank ^ 1)
    tlx.cluster_barrier()
    if MASK:
        tl.store(out + rank * N + i, tlx.local_load(tile[0]), mask=i < n)
    else:
        tl.store(out + rank * N + i, tlx.local_load(tile[0]))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_ctas_memory_gets_the_marks(asynchronous):
    x, out = torch.randn(64), torch.zeros(128)
    reports = found(remote, x, out, 60, 64, asynchronous, False, grid=(2,), ctas_per_cga=(2, 1, 1))
    assert reports and all("stores 4 value(s) that were never loaded" in r for r in reports)
    assert found(remote, x, out, 60, 64, asynchronous, True, grid=(2,), ctas_per_cga=(2, 1, 1)) == []


@triton.jit
def blackwell(
    a, b, c, m, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr, TWICE: tl.constexpr
):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tl.float16, 1)
    b_tile = tlx.local_alloc((K, N), tl.float16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    inside = (rows[:, None] < m) & (depth[None, :] < k)
    tlx.local_store(a_tile[0], tl.load(a + rows[:, None] * K + depth[None, :], mask=inside))
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + cols[None, :]))
    tlx.fence("async_shared")
    tlx.async_dot(a_tile[0], b_tile[0], acc[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    if TWICE != "":
        tlx.local_store(a_tile[0], tl.zeros((M, K), tl.float16))
        tlx.fence("async_shared")
        tlx.async_dot(a_tile[0], b_tile[0], acc[0], use_acc=TWICE == "accumulate", mBarriers=[done[0]])
        tlx.barrier_wait(done[0], 1)
    r = tlx.local_load(acc[0])
    if MASK:
        tl.store(c + rows[:, None] * N + cols[None, :], r, mask=rows[:, None] < m)
    else:
        tl.store(c + rows[:, None] * N + cols[None, :], r)


@pytest.mark.parametrize("twice", ["", "accumulate"])
def test_rows_of_an_operand_are_rows_of_the_product(twice):
    a, b, c = torch.randn(128, 64).half(), torch.randn(64, 64).half(), torch.zeros(128, 64)
    assert found(blackwell, a, b, c, 100, 64, 128, 64, 64, True, twice) == []
    torch.testing.assert_close(c[:100], a[:100].float() @ b.float(), atol=1e-2, rtol=1e-2)
    (report,) = found(blackwell, a, b, c, 100, 64, 128, 64, 64, False, twice)
    assert f"stores {28 * 64} value(s) that were never loaded" in report


def test_an_undefined_tail_of_k_reaches_every_row():
    a, b, c = torch.randn(128, 64).half(), torch.randn(64, 64).half(), torch.zeros(128, 64)
    (report,) = found(blackwell, a, b, c, 128, 50, 128, 64, 64, True, "")
    assert f"stores {128 * 64} value(s) that were never loaded" in report


def test_a_product_that_replaces_an_undefined_one_is_defined():
    a, b, c = torch.randn(128, 64).half(), torch.randn(64, 64).half(), torch.ones(128, 64)
    assert found(blackwell, a, b, c, 100, 50, 128, 64, 64, False, "replace") == [] and (c == 0).all()


@triton.jit
def hopper(
    a, b, c, m, M: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr, REGISTERS: tl.constexpr, WAIT: tl.constexpr
):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, M), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tl.float16, 1)
    b_tile = tlx.local_alloc((K, M), tl.float16, 1)
    block = tl.load(a + rows[:, None] * K + depth[None, :], mask=rows[:, None] < m)
    tlx.local_store(a_tile[0], block)
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * M + cols[None, :]))
    tlx.fence("async_shared")
    if REGISTERS:
        acc = tlx.async_dot(block, b_tile[0])
    else:
        acc = tlx.async_dot(a_tile[0], b_tile[0])
    early = tl.maximum(acc, -1.0)
    acc = tlx.async_dot_wait(0, acc)
    r = acc if WAIT else early
    if MASK:
        tl.store(c + rows[:, None] * M + cols[None, :], r, mask=rows[:, None] < m)
    else:
        tl.store(c + rows[:, None] * M + cols[None, :], r)


@pytest.mark.parametrize("registers", [False, True])
def test_products_in_registers(registers):
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.zeros(64, 64)
    assert found(hopper, a, b, c, 50, 64, 32, True, registers, True) == []
    torch.testing.assert_close(c[:50], a[:50].float() @ b.float(), atol=1e-2, rtol=1e-2)
    (report,) = found(hopper, a, b, c, 50, 64, 32, False, registers, True)
    assert f"stores {14 * 64} value(s) that were never loaded" in report


def test_what_was_made_of_a_product_before_its_wait_stays_undefined():
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.zeros(64, 64)
    (report,) = found(hopper, a, b, c, 64, 64, 32, False, False, False)
    assert (
        "stores 4096 value(s) made from a product that was still being computed" in report
        and "tlx.async_dot(" in report
    )


@triton.jit
def phases(x, out, n):
    bar = tlx.alloc_barriers(1)
    tlx.barrier_arrive(bar[0])
    phase = tl.load(x, mask=n < 0)
    tlx.barrier_wait(bar[0], phase & 1)
    tl.store(out, 1.0)


def test_a_barriers_phase_must_be_defined():
    with pytest.raises(errors.PoisonError, match="(?s)takes 1 value.*an index, a size, a phase.*mask=n < 0"):
        phases[(1,)](torch.ones(1, dtype=torch.int32), torch.zeros(1), 4)


@triton.jit
def votes(x, out, n, MASK: tl.constexpr):
    i = tl.arange(0, 128)
    v = tl.load(x + i, mask=i < n)
    r = tlx.warp_redux(v, "max")
    if MASK:
        tl.store(out + i, r, mask=i < 96)
    else:
        tl.store(out + i, r)


def test_a_vote_of_a_warp_is_undefined_if_a_lane_of_the_warp_is():
    x, out = torch.randn(128), torch.zeros(128)
    assert found(votes, x, out, 100, True) == []
    (report,) = found(votes, x, out, 100, False)
    assert "stores 32 value(s)" in report
