"""The tensor core: Blackwell's and Hopper's, pairs of CTAs, block scales."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["eager", "lazy", "random"], autouse=True)
def schedule(request):
    with emulator.options(policy=request.param, seed=5) as chosen:
        yield chosen


@triton.jit
def _blackwell(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_TMEM: tl.constexpr, DOTS: tl.constexpr):
    """c = DOTS * a @ b: one MMA that the compiler waits for, then several behind one commit."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tlx.dtype_of(a), 1)
    b_tile = tlx.local_alloc((K, N), tlx.dtype_of(b), 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    a_block = tl.load(a + rows[:, None] * K + depth[None, :])
    tlx.local_store(a_tile[0], a_block)
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + cols[None, :]))
    tlx.fence("async_shared")
    left = a_tile[0]
    if A_TMEM:
        a_tmem = tlx.local_alloc((M, K), tlx.dtype_of(a), 1, tlx.storage_kind.tmem)
        tlx.local_store(a_tmem[0], a_block)
        left = a_tmem[0]
    tlx.async_dot(left, b_tile[0], acc[0], use_acc=False)
    bars = tlx.alloc_barriers(DOTS)
    for i in tl.static_range(DOTS - 1):
        tlx.async_dot(left, b_tile[0], acc[0], mBarriers=[bars[i]])
    tlx.tcgen05_commit(bars[DOTS - 1])
    tlx.barrier_wait(bars[DOTS - 1], 0)
    tl.store(c + rows[:, None] * N + cols[None, :], tlx.local_load(acc[0]))


@pytest.mark.parametrize("m, n, k", [(64, 32, 16), (128, 64, 64), (128, 32, 32)])
@pytest.mark.parametrize("in_tmem", [False, True])
def test_blackwell(m, n, k, in_tmem):
    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n)
    _blackwell[(1,)](a, b, c, m, n, k, in_tmem, 3)
    torch.testing.assert_close(c, 3 * (a.float() @ b.float()), atol=1e-3, rtol=1e-3)


@triton.jit
def _hopper(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_REGISTERS: tl.constexpr):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tlx.dtype_of(a), 1)
    b_tile = tlx.local_alloc((N, K), tlx.dtype_of(b), 1)
    block = tl.load(a + rows[:, None] * K + depth[None, :])
    tlx.local_store(a_tile[0], block)
    tlx.local_store(b_tile[0], tl.load(b + cols[:, None] * K + depth[None, :]))
    tlx.fence("async_shared")
    acc = tl.zeros((M, N), tl.float32)
    if A_REGISTERS:
        acc = tlx.async_dot(block, tlx.local_trans(b_tile[0]), acc)
    else:
        acc = tlx.async_dot(a_tile[0], tlx.local_trans(b_tile[0]), acc)
    second = tlx.async_dot(a_tile[0], tlx.local_trans(b_tile[0]))
    acc = tlx.async_dot_wait(1, acc)
    second = tlx.async_dot_wait(0, second)
    tl.store(c + rows[:, None] * N + cols[None, :], acc + second)


@pytest.mark.parametrize("in_registers", [False, True])
def test_hopper(in_registers):
    a, b, c = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16(), torch.zeros(64, 64)
    _hopper[(1,)](a, b, c, 64, 64, 32, in_registers)
    torch.testing.assert_close(c, 2 * (a.float() @ b.float().T), atol=1e-3, rtol=1e-3)


@triton.jit
def _overwritten_too_early(a, c, M: tl.constexpr):
    rows = tl.arange(0, M)
    at = rows[:, None] * M + rows[None, :]
    tile = tlx.local_alloc((M, M), tl.float16, 1)
    tlx.local_store(tile[0], tl.load(a + at))
    tlx.fence("async_shared")
    acc = tlx.async_dot(tile[0], tile[0])
    tlx.local_store(tile[0], tl.zeros((M, M), tl.float16))
    acc = tlx.async_dot_wait(0, acc)
    tl.store(c + at, acc)


def test_an_operand_written_before_the_wait_is_a_race():
    with pytest.raises(errors.RaceError, match="wgmma"):
        _overwritten_too_early[(1,)](torch.zeros(64, 64).half(), torch.zeros(64, 64), 64)


@triton.jit
def _never_waited(a, c, M: tl.constexpr, STORE: tl.constexpr):
    rows = tl.arange(0, M)
    at = rows[:, None] * M + rows[None, :]
    tile = tlx.local_alloc((M, M), tl.float16, 1)
    tlx.local_store(tile[0], tl.load(a + at))
    tlx.fence("async_shared")
    product = tlx.async_dot(tile[0], tile[0])
    if STORE:
        tl.store(c + at, product)


def test_a_result_that_was_never_waited_for():
    with pytest.raises(errors.InFlightError, match="never waited for"):
        _never_waited[(1,)](torch.zeros(64, 64).half(), torch.zeros(64, 64), 64, False)


def test_a_result_that_is_stored_before_it_is_there():
    with pytest.raises(errors.PoisonError, match="4096 value.s. made from a product that was still being computed"):
        _never_waited[(1,)](torch.zeros(64, 64).half(), torch.zeros(64, 64), 64, True)


@triton.jit
def _a_masked_load_after_a_product(a, c, M: tl.constexpr):
    rows = tl.arange(0, M)
    at = rows[:, None] * M + rows[None, :]
    tile = tlx.local_alloc((M, M), tl.float16, 1)
    tlx.local_store(tile[0], tl.load(a + at))
    tlx.fence("async_shared")
    product = tlx.async_dot_wait(0, tlx.async_dot(tile[0], tile[0]))
    tl.store(c + at, product)
    row = tl.load(c + rows, mask=rows < M - 2)
    tl.store(c + rows, row)


def test_each_poison_is_said_to_be_what_it_is():
    with pytest.raises(errors.PoisonError, match="(?s)stores 2 value.s. that were never loaded.*mask=rows < M - 2"):
        _a_masked_load_after_a_product[(1,)](torch.zeros(64, 64).half(), torch.zeros(64, 64), 64)


@triton.jit
def _used_between_waits(a, c, M: tl.constexpr, WAIT: tl.constexpr):
    """x is ready once one MMA at most is in flight; y, which accumulates onto x's product, is waited for at the end."""
    rows = tl.arange(0, M)
    at = rows[:, None] * M + rows[None, :]
    tile = tlx.local_alloc((M, M), tl.float16, 1)
    tlx.local_store(tile[0], tl.load(a + at))
    tlx.fence("async_shared")
    x = tlx.async_dot(tile[0], tile[0])
    y = tlx.async_dot(tile[0], tile[0], x)
    if WAIT:
        x = tlx.async_dot_wait(1, x)
    doubled = x * 2.0
    y = tlx.async_dot_wait(0, y)
    tl.store(c + at, doubled + y)


def test_an_accumulator_may_be_passed_on_unwaited_but_not_computed_with():
    a, c = torch.randn(64, 64).half(), torch.zeros(64, 64)
    _used_between_waits[(1,)](a, c, 64, True)
    product = a.float() @ a.float()
    torch.testing.assert_close(c, 4 * product, atol=1e-3, rtol=1e-4)
    with pytest.raises(errors.PoisonError, match="async_dot_wait"):
        _used_between_waits[(1,)](a, c, 64, False)


# ---------------------------------------------------------------- two CTAs


@triton.jit
def _pair(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_TMEM: tl.constexpr, BARRIER: tl.constexpr):
    """Each CTA holds M rows of a and half the columns of b; CTA 0 issues."""
    rank = tlx.cluster_cta_rank()
    rows, cols, depth, half = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, N // 2)
    a_tile = tlx.local_alloc((M, K), tl.float16, 1)
    b_tile = tlx.local_alloc((K, N // 2), tl.float16, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    ready = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)
    block = tl.load(a + (rank * M + rows)[:, None] * K + depth[None, :])
    tlx.local_store(a_tile[0], block)
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + (rank * (N // 2) + half)[None, :]))
    tlx.fence("async_shared")
    left = a_tile[0]
    if A_TMEM:
        a_tmem = tlx.local_alloc((M, K), tl.float16, 1, tlx.storage_kind.tmem)
        tlx.local_store(a_tmem[0], block)
        left = a_tmem[0]
    tlx.barrier_arrive(ready[0], 1, remote_cta_rank=0)
    tlx.barrier_wait(ready[0], 0, pred=rank == 0)
    if BARRIER:
        tlx.async_dot(left, b_tile[0], acc[0], use_acc=False, mBarriers=[done[0]], two_ctas=True)
        tlx.barrier_wait(done[0], 0)
    else:
        tlx.async_dot(left, b_tile[0], acc[0], use_acc=False, two_ctas=True)
    tl.store(c + (rank * M + rows)[:, None] * N + cols[None, :], tlx.local_load(acc[0]))


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_a_pair_of_ctas(m, in_tmem, barrier):
    a, b, c = torch.randn(2 * m, 32).half(), torch.randn(32, 64).half(), torch.zeros(2 * m, 64)
    _pair[(2,)](a, b, c, m, 64, 32, in_tmem, barrier, ctas_per_cga=(2, 1, 1))
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-3, rtol=1e-3)


def test_a_pair_without_its_cluster_is_refused():
    with pytest.raises(errors.ClusterError, match="remote_cta_rank needs a cluster of more than one CTA"):
        _pair[(2,)](
            torch.zeros(128, 32).half(), torch.zeros(32, 64).half(), torch.zeros(128, 64), 64, 64, 32, False, True
        )


# ---------------------------------------------------------------- block scales


def _pack(scale):
    """[rows, cols] -> the packed order of the tensor core, [rows / 128, cols / 4, 32, 16]."""
    rows, cols = scale.shape
    return (
        scale.reshape(rows // 128, 4, 32, cols // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(rows // 128, cols // 4, 32, 16)
        .contiguous()
    )


def _factor(scale):
    return torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)


@triton.jit
def _scaled(
    a, b, c, a_scale, b_scale, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, TMEM: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    a_tile = tlx.local_alloc((M, KA), tlx.dtype_of(a), 1)
    b_tile = tlx.local_alloc((KB, N), tlx.dtype_of(b), 1)
    sa = tlx.local_alloc((M // 128, K // 128, 32, 16), tl.uint8, 1)
    sb = tlx.local_alloc((N // 128, K // 128, 32, 16), tl.uint8, 1)
    tlx.local_store(a_tile[0], tl.load(a + rows[:, None] * KA + tl.arange(0, KA)[None, :]))
    tlx.local_store(b_tile[0], tl.load(b + tl.arange(0, KB)[:, None] * N + cols[None, :]))
    tlx.local_store(sa[0], tl.load(a_scale + tl.arange(0, M * K // 32)).reshape(M // 128, K // 128, 32, 16))
    tlx.local_store(sb[0], tl.load(b_scale + tl.arange(0, N * K // 32)).reshape(N // 128, K // 128, 32, 16))
    tlx.fence("async_shared")
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    if TMEM:
        ta = tlx.local_alloc((M, K // 32), tl.uint8, 1, tlx.storage_kind.tmem)
        tb = tlx.local_alloc((N, K // 32), tl.uint8, 1, tlx.storage_kind.tmem)
        tlx.tmem_copy(sa[0], ta[0])
        tlx.tmem_copy(sb[0], tb[0])
        tlx.async_dot_scaled(a_tile[0], b_tile[0], acc[0], ta[0], A_FORMAT, tb[0], B_FORMAT, use_acc=False)
    else:
        tlx.async_dot_scaled(a_tile[0], b_tile[0], acc[0], sa[0], A_FORMAT, sb[0], B_FORMAT, use_acc=False)
    tl.store(c + rows[:, None] * N + cols[None, :], tlx.local_load(acc[0]))


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _operand(fmt, rows, cols, along):
    """(what the kernel gets, its values); fp4 is packed two a byte along axis `along`, the even element low."""
    if fmt != "e2m1":
        x = torch.randn(rows, cols).to(_DTYPES[fmt])
        return x, x.float()
    codes = torch.randint(0, 16, (rows, cols))
    even, odd = (codes[0::2], codes[1::2]) if along == 0 else (codes[:, 0::2], codes[:, 1::2])
    return (even | (odd << 4)).to(torch.uint8).contiguous(), _E2M1[codes]


@pytest.mark.parametrize("a_format, b_format", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e2m1", "e2m1")])
@pytest.mark.parametrize("in_tmem", [False, True])
def test_block_scales(a_format, b_format, in_tmem):
    m, n, k = 128, 128, 256
    (a, av), (b, bv) = _operand(a_format, m, k, 1), _operand(b_format, k, n, 0)
    sa, sb = (torch.randint(120, 132, (rows, k // 32)).to(torch.uint8) for rows in (m, n))
    c = torch.zeros(m, n)
    _scaled[(1,)](a, b, c, _pack(sa), _pack(sb), m, n, k, a.shape[1], b.shape[0], a_format, b_format, in_tmem)
    expected = (av * _factor(sa)) @ (bv * _factor(sb).T)
    torch.testing.assert_close(c, expected, atol=1e-2, rtol=1e-4)


def test_a_scale_of_255_is_nan():
    m = n = 128
    a, b = torch.ones(m, 128).to(torch.float8_e4m3fn), torch.ones(128, n).to(torch.float8_e4m3fn)
    sa, sb = (torch.full((128, 4), 127, dtype=torch.uint8) for _ in range(2))
    sa[5, 2] = 255
    c = torch.zeros(m, n)
    _scaled[(1,)](a, b, c, _pack(sa), _pack(sb), m, n, 128, 128, 128, "e4m3", "e4m3", False)
    assert torch.isnan(c[5]).all() and (c[4] == 128).all()


@triton.jit
def _quantise(x, data, scale, M: tl.constexpr, K: tl.constexpr):
    rows = tl.arange(0, M)
    block = tl.load(x + rows[:, None] * K + tl.arange(0, K)[None, :])
    values, exponents = tlx._to_mxfp8_block(block, 32, tl.float8e4nv)
    tl.store(data + rows[:, None] * K + tl.arange(0, K)[None, :], values)
    tl.store(scale + rows[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :], exponents)


def test_quantising_a_block():
    x = torch.randn(64, 128) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())
    x[3, 32:64] = 0
    data, scale = torch.zeros(64, 128).to(torch.float8_e4m3fn), torch.zeros(64, 4, dtype=torch.uint8)
    _quantise[(1,)](x, data, scale, 64, 128)
    amax = x.reshape(64, 4, 32).abs().amax(-1)
    assert (torch.exp2(scale.float() - 127) * 448 >= amax).all()  # rounded up: nothing saturates
    back = data.float() * _factor(scale)
    assert ((back - x).abs() <= amax.repeat_interleave(32, 1) / 16).all()
    assert (data.float()[3, 32:64] == 0).all()


# ---------------------------------------------------------------- what is refused


@triton.jit
def _bad_dot(out, KIND: tl.constexpr):
    M: tl.constexpr = 32 if KIND == "m" else 128
    N: tl.constexpr = 16 if KIND == "n" else 32 if KIND == "shape" else 64
    K: tl.constexpr = 8 if KIND == "k" else 32
    a = tlx.local_alloc((M, K), tl.bfloat16 if KIND == "dtype" else tl.float16, 1)
    b = tlx.local_alloc((K, N), tl.float16, 1)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("m", "M must be at least 64"),
        ("n", "N must be at least 32"),
        ("k", "K must be at least 16"),
        ("dtype", "same dtype"),
        ("shape", "the accumulator"),
    ],
)
def test_shapes_the_compiler_refuses(kind, message):
    with pytest.raises(triton.CompilationError, match=message):
        _bad_dot[(1,)](torch.zeros(1), kind)


@triton.jit
def _unwaited(out):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    acc = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(a[0], tl.zeros((128, 32), tl.float16))
    tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))
    tlx.fence("async_shared")
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, force_async=True)


def test_a_kernel_that_ends_before_its_mma():
    with pytest.raises(errors.InFlightError, match="may still run"):
        _unwaited[(1,)](torch.zeros(1))


@triton.jit
def _accumulates_onto_nothing(out):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    acc = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(a[0], tl.zeros((128, 32), tl.float16))
    tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))
    tlx.fence("async_shared")
    tlx.async_dot(a[0], b[0], acc[0])


def test_the_first_mma_must_not_accumulate():
    with pytest.raises(errors.PoisonError, match=r"tensor memory acc\[0\]"):
        _accumulates_onto_nothing[(1,)](torch.zeros(1))


@triton.jit
def _uniform_scales(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BYTE: tl.constexpr):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tl.float8e4nv, 1)
    b_tile = tlx.local_alloc((K, N), tl.float8e4nv, 1)
    tlx.local_store(a_tile[0], tl.load(a + rows[:, None] * K + depth[None, :]))
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + cols[None, :]))
    tlx.fence("async_shared")
    scale_a = tlx.local_alloc((M, K // 32), tl.uint8, 1, tlx.storage_kind.tmem)
    scale_b = tlx.local_alloc((K, N // 32), tl.uint8, 1, tlx.storage_kind.tmem)  # (N, K // 32) is meant: as many bytes
    tlx.local_store(scale_a[0], tl.full((M, K // 32), 127, tl.uint8))
    tlx.local_store(scale_b[0], tl.full((K, N // 32), BYTE, tl.uint8))
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.async_dot_scaled(a_tile[0], b_tile[0], acc[0], scale_a[0], "e4m3", scale_b[0], "e4m3", use_acc=False)
    tl.store(c + rows[:, None] * N + cols[None, :], tlx.local_load(acc[0]))


def test_block_scales_of_another_shape():
    a, b = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((128, 256), (256, 128)))
    c = torch.empty(128, 128)
    _uniform_scales[(1,)](a, b, c, 128, 128, 256, 128)
    torch.testing.assert_close(c, 2 * (a.float() @ b.float()), atol=1e-3, rtol=1e-4)
