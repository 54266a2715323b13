"""async_dot_scaled as the public kernels use it: scales in 5-D boxes, in both memories, pairs of CTAs, fp4 beside fp8."""

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.mxfp8 import pack_scales, scale_codes, scale_values

tlx = pytest.importorskip("triton.language.extra.tlx")
pytestmark = pytest.mark.filterwarnings("ignore")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(params=["eager", "lazy", "random"], autouse=True)
def schedule(request):
    with emulator.options(policy=request.param, seed=7) as chosen:
        yield chosen


def operand(fmt: str, rows: int, columns: int, seed: int):
    """Return (what lies in memory, its values [rows, columns] fp32); fp4 is packed along the columns, the even one low."""
    g = torch.Generator().manual_seed(seed)
    if fmt != "e2m1":
        x = torch.randn(rows, columns, generator=g).to(FP8[fmt])
        return x, x.float()
    codes = torch.randint(0, 16, (rows, columns), generator=g)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8), E2M1[codes]


def scales(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return codes [rows, columns] that all differ from their neighbours'."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(118, 136, (rows, columns), generator=g).to(torch.uint8)


def box_of(codes: torch.Tensor) -> TensorDescriptor:
    """Return a descriptor of the scales in one box, [1, rows / 128, columns / 4, 2, 256]."""
    tiles = pack_scales(codes)
    x = tiles.reshape(1, *tiles.shape[:2], 2, 256)
    return TensorDescriptor.from_tensor(x, list(x.shape))


def exact(a, a_scale, b, b_scale):
    """Return (A a_scale) (B b_scale) in fp64; b [N, K]."""
    wide = lambda x, codes: x.double() * scale_values(codes).double().repeat_interleave(32, 1)[:, : x.shape[1]]
    return wide(a, a_scale) @ wide(b, b_scale).T


def assert_close(found, wanted):
    """Fail unless fp32 sums of K products explain the difference."""
    assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@triton.jit
def _boxes(
    a_desc, a_scale_desc, b_desc, b_scale_desc, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr, TMEM: tl.constexpr,
):  # fmt: skip
    """c [M, N] = A B^T; A [M, A_COLUMNS] and B [N, B_COLUMNS] lie with K last, B is transposed in shared memory."""
    REP_M: tl.constexpr = M // 128
    REP_N: tl.constexpr = N // 128
    REP_K: tl.constexpr = (K + 127) // 128
    a = tlx.local_alloc((M, A_COLUMNS), tlx.dtype_of(a_desc), 1)
    b = tlx.local_alloc((N, B_COLUMNS), tlx.dtype_of(b_desc), 1)
    a_scale = tlx.local_alloc((1, REP_M, REP_K, 2, 256), tl.uint8, 1)
    b_scale = tlx.local_alloc((1, REP_N, REP_K, 2, 256), tl.uint8, 1)
    loaded = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(loaded[0], M * A_COLUMNS + N * B_COLUMNS + (REP_M + REP_N) * REP_K * 512)
    tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
    tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])
    tlx.async_descriptor_load(a_scale_desc, a_scale[0], [0, 0, 0, 0, 0], loaded[0])
    tlx.async_descriptor_load(b_scale_desc, b_scale[0], [0, 0, 0, 0, 0], loaded[0])
    tlx.barrier_wait(loaded[0], 0)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    right = tlx.local_trans(b[0])
    if TMEM:
        a_tmem = tlx.local_alloc((M, K // 32), tl.uint8, 1, tlx.storage_kind.tmem)
        b_tmem = tlx.local_alloc((N, K // 32), tl.uint8, 1, tlx.storage_kind.tmem)
        tlx.tmem_copy(a_scale[0], a_tmem[0])
        tlx.tmem_copy(b_scale[0], b_tmem[0])
        tlx.async_dot_scaled(a[0], right, acc[0], a_tmem[0], A_FORMAT, b_tmem[0], B_FORMAT, use_acc=False)
    else:
        tlx.async_dot_scaled(a[0], right, acc[0], a_scale[0], A_FORMAT, b_scale[0], B_FORMAT, use_acc=False)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tlx.local_load(acc[0]))


@pytest.mark.parametrize("b_format", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("a_format", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("tmem", [False, True])
def test_scales_in_5d_boxes(a_format, b_format, tmem):
    m, n, k = 128, 128, 256
    (a, a_values), (b, b_values) = operand(a_format, m, k, 1), operand(b_format, n, k, 2)
    sa, sb, c = scales(m, k // 32, 3), scales(n, k // 32, 4), torch.empty(m, n)
    descriptors = [TensorDescriptor.from_tensor(x, list(x.shape)) for x in (a, b)]
    formats = a_format, b_format, a.shape[1], b.shape[1]
    _boxes[(1,)](descriptors[0], box_of(sa), descriptors[1], box_of(sb), c, m, n, k, *formats, tmem)
    assert_close(c, exact(a_values, sa, b_values, sb))


@pytest.mark.parametrize("m, n, k", [(128, 256, 128), (128, 128, 512)])
def test_other_shapes(m, n, k):
    (a, a_values), (b, b_values) = operand("e4m3", m, k, 5), operand("e4m3", n, k, 6)
    sa, sb, c = scales(m, k // 32, 7), scales(n, k // 32, 8), torch.empty(m, n)
    descriptors = [TensorDescriptor.from_tensor(x, list(x.shape)) for x in (a, b)]
    _boxes[(1,)](descriptors[0], box_of(sa), descriptors[1], box_of(sb), c, m, n, k, "e4m3", "e4m3", k, k, True)
    assert_close(c, exact(a_values, sa, b_values, sb))


@triton.jit
def _stored(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_TMEM: tl.constexpr):
    """Two slots of scales in tensor memory, written from registers: 2**-127 in the one, 2**(r % 8 - 3) per row r in the other."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tlx.local_alloc((M, K), tl.float8e4nv, 1)
    b_tile = tlx.local_alloc((K, N), tl.float8e4nv, 1)
    block = tl.load(a + rows[:, None] * K + depth[None, :])
    tlx.local_store(a_tile[0], block)
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + cols[None, :]))
    tlx.fence("async_shared")
    left = a_tile[0]
    if A_TMEM:
        a_tmem = tlx.local_alloc((M, K), tl.float8e4nv, 1, tlx.storage_kind.tmem)
        tlx.local_store(a_tmem[0], block)
        left = a_tmem[0]
    sa = tlx.local_alloc((M, K // 32), tl.uint8, 2, tlx.storage_kind.tmem)
    sb = tlx.local_alloc((N, K // 32), tl.uint8, 2, tlx.storage_kind.tmem)
    tlx.local_store(sa[0], tl.full((M, K // 32), 0, tl.uint8))
    tlx.local_store(sb[0], tl.full((N, K // 32), 0, tl.uint8))
    one = tl.full((M, K // 32), 124, tl.uint8)
    tlx.local_store(sa[1], one + (rows % 8).to(tl.uint8)[:, None])
    tlx.local_store(sb[1], tl.full((N, K // 32), 127, tl.uint8))
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    for i in tl.static_range(2):
        tlx.async_dot_scaled(left, b_tile[0], acc[0], sa[i], "e4m3", sb[i], "e4m3", use_acc=False)
        at = i * M * N + rows[:, None] * N + cols[None, :]
        tl.store(c + at, tlx.local_load(acc[0]))


@pytest.mark.parametrize("a_in_tmem", [False, True])
def test_two_slots_of_scales_written_from_registers(a_in_tmem):
    m, n, k = 128, 128, 256
    (a, a_values), (b, _) = operand("e4m3", m, k, 9), operand("e4m3", k, n, 10)
    c = torch.empty(2, m, n)
    _stored[(1,)](a, b, c, m, n, k, a_in_tmem)
    assert not c[0].any()  # 2**-254 is no fp32 number
    factor = torch.exp2(torch.arange(m) % 8 - 3.0)[:, None]
    assert_close(c[1], (factor * a_values).double() @ b.double())


@triton.jit
def _pair(a, b, a_scale, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Each CTA holds M rows of a, half the columns of b, and the scales of all columns or (not WHOLE) of its half."""
    rank = tlx.cluster_cta_rank()
    rows, cols, depth, half = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, N // 2)
    a_tile = tlx.local_alloc((M, K), tl.float8e4nv, 1)
    b_tile = tlx.local_alloc((K, N // 2), tl.float8e4nv, 1)
    COUNT: tl.constexpr = N if WHOLE else N // 2
    ROWS: tl.constexpr = max(M, 128)
    sa = tlx.local_alloc((ROWS // 128, K // 128, 32, 16), tl.uint8, 1)
    sb = tlx.local_alloc((COUNT // 128, K // 128, 32, 16), tl.uint8, 1)
    acc = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    ready = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)
    tlx.local_store(a_tile[0], tl.load(a + (rank * M + rows)[:, None] * K + depth[None, :]))
    tlx.local_store(b_tile[0], tl.load(b + depth[:, None] * N + (rank * (N // 2) + half)[None, :]))
    own = tl.load(a_scale + rank * (ROWS * K // 32) + tl.arange(0, ROWS * K // 32))
    tlx.local_store(sa[0], own.reshape(ROWS // 128, K // 128, 32, 16))
    first = 0 if WHOLE else rank * (COUNT * K // 32)
    other = tl.load(b_scale + first + tl.arange(0, COUNT * K // 32))
    tlx.local_store(sb[0], other.reshape(COUNT // 128, K // 128, 32, 16))
    tlx.fence("async_shared")
    tlx.barrier_arrive(ready[0], 1, remote_cta_rank=0)
    tlx.barrier_wait(ready[0], 0, pred=rank == 0)
    tlx.async_dot_scaled(
        a_tile[0], b_tile[0], acc[0], sa[0], "e4m3", sb[0], "e4m3", use_acc=False, mBarriers=[done[0]], two_ctas=True
    )
    tlx.barrier_wait(done[0], 0)
    tl.store(c + (rank * M + rows)[:, None] * N + cols[None, :], tlx.local_load(acc[0]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_pair_of_ctas(whole):
    m, n, k = 128, 256, 128
    (a, a_values), (b, _) = operand("e4m3", 2 * m, k, 11), operand("e4m3", k, n, 12)
    sa, sb, c = scales(2 * m, k // 32, 13), scales(n, k // 32, 14), torch.empty(2 * m, n)
    _pair[(2,)](a, b, pack_scales(sa), pack_scales(sb), c, m, n, k, whole, ctas_per_cga=(2, 1, 1))
    assert_close(c, exact(a_values, sa, b.float().T, sb))


def test_a_pair_of_ctas_with_64_rows_each_is_refused():
    """As by fbtriton 3.7.4, whose scaled product has 128 rows."""
    a, b = operand("e4m3", 128, 128, 11)[0], operand("e4m3", 128, 256, 12)[0]
    sa, sb = scales(256, 4, 13), scales(256, 4, 14)
    with pytest.raises(triton.CompilationError, match="takes 128 rows of each, got 64"):
        _pair[(2,)](
            a, b, pack_scales(sa), pack_scales(sb), torch.empty(128, 256), 64, 256, 128, True, ctas_per_cga=(2, 1, 1)
        )


def test_scales_of_a_wrong_row_are_seen():
    """The comparison above notices scales that are read in any other order."""
    (_, a), (_, b) = operand("e4m3", 128, 128, 15), operand("e4m3", 128, 128, 16)
    sa, sb = scales(128, 4, 17), scales(128, 4, 18)
    with pytest.raises(AssertionError):
        assert_close(exact(a, pack_scales(sa).reshape(128, 4), b, sb), exact(a, sa, b, sb))


# ------------------------------------------------------------------------------------------------- quantising a block
@triton.jit
def _quantise(x, data, codes, M: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :]
    values, exponents = tlx._to_mxfp8_block(tl.load(x + at), 32, DTYPE)
    tl.store(data + at, values)
    tl.store(codes + tl.arange(0, M)[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :], exponents)


@pytest.mark.parametrize("fmt, largest", [("e4m3", 448.0), ("e5m2", 57344.0)])
@pytest.mark.parametrize("kind", ["ones", "zeros", "random", "rows of all sizes", "a NaN", "an infinity"])
def test_to_mxfp8_block(fmt, largest, kind):
    g = torch.Generator().manual_seed(19)
    x = torch.randn(128, 128, generator=g) * 100
    if kind in ("ones", "zeros"):
        x = torch.full_like(x, float(kind == "ones"))
    if kind == "rows of all sizes":
        x = x * torch.exp2(torch.arange(128.0) - 64)[:, None]
    if kind == "a NaN":
        x[3, 40] = math.nan
    if kind == "an infinity":
        x[3, 40] = -math.inf
    data, codes = torch.empty(128, 128).to(FP8[fmt]), torch.empty(128, 4, dtype=torch.uint8)
    _quantise[(1,)](x, data, codes, 128, 128, tl.float8e4nv if fmt == "e4m3" else tl.float8e5)
    groups = x.reshape(128, 4, 32)
    amax = groups.abs().amax(2)
    want = torch.ceil(torch.log2(amax.double() / largest)) + 127
    want = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, want))
    assert codes[~amax.isnan()].tolist() == want[~amax.isnan()].tolist()
    assert (codes[amax.isnan()] == 255).all() and int((codes == 255).sum()) == (kind == "a NaN")
    assert data[3, 40].isnan().item() == (kind in ("a NaN", "an infinity"))  # the factor of 2**127 is 0
    inverse = torch.exp2(127 - codes.double())[:, :, None]
    exact_data = torch.where(amax[:, :, None] == 0, 0, groups * inverse).clamp(-largest, largest)
    whole = (codes < 254)[:, :, None].expand_as(groups)
    assert torch.equal(data.reshape(128, 4, 32).float()[whole], exact_data.float().to(FP8[fmt]).float()[whole])
    if fmt == "e4m3":
        assert torch.equal(codes, scale_codes(amax))
