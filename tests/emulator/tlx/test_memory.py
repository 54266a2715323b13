"""Buffers, views, aliases, copies: small kernels against torch, under several schedules."""

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
def _views(src, out, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + cols[None, :]
    tiles = tlx.local_alloc((M, N), tl.float32, 2)
    tlx.local_store(tiles[1], tl.load(src + at))
    tl.store(out + cols[:, None] * M + rows[None, :], tlx.local_load(tlx.local_trans(tiles[1])))
    out += M * N
    half = tlx.local_slice(tiles[1], [M // 2, 0], [M // 2, N])
    low = tl.arange(0, M // 2)
    tl.store(out + low[:, None] * N + cols[None, :], tlx.local_load(half))
    out += M * N
    flat = tlx.local_reshape(tiles[1], [M * N])
    tl.store(out + tl.arange(0, M * N), tlx.local_load(flat))


def test_trans_slice_reshape_and_rows():
    x = torch.randn(32, 64)
    out = torch.zeros(3, 32, 64)
    _views[(1,)](x, out, 32, 64)
    assert torch.equal(out[0].reshape(64, 32), x.T)
    assert torch.equal(out[1, :16], x[16:])
    assert torch.equal(out[2], x)


@triton.jit
def _element_by_element(src, out, N: tl.constexpr):
    buffers = tlx.local_alloc((N,), tl.float32, 1)
    tlx.async_load(src + tl.arange(0, N), buffers[0])
    tlx.async_load_commit_group()
    tlx.async_load_wait_group(tl.constexpr(0))
    total = tl.zeros((1,), tl.float32)
    for i in range(N):
        total += tlx.local_load(buffers[0][i])
    tl.store(out + tl.arange(0, 1), total)


def test_indexing_a_vector_gives_one_element():
    x, out = torch.arange(16.0), torch.zeros(1)
    _element_by_element[(1,)](x, out, 16)
    assert out.item() == x.sum()


@triton.jit
def _reinterpret(src, out, half_src, half_out, M: tl.constexpr, N: tl.constexpr):
    """An array of tiles as one tile, and fp32 memory that holds fp16 next."""
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    pair = tlx.local_alloc((M // 2, N), tl.float32, 2)
    whole = tlx.local_reinterpret(pair, tl.float32, [M, N])
    tlx.local_store(whole, tl.load(src + rows[:, None] * N + cols[None, :]))
    low = tl.arange(0, M // 2)
    tl.store(out + low[:, None] * N + cols[None, :], tlx.local_load(pair[1]))
    wide = tlx.local_alloc((M, N), tl.float32, 1, tlx.storage_kind.tmem)
    narrow = tlx.local_reinterpret(wide[0], tl.float16)
    tlx.local_store(narrow, tl.load(half_src + rows[:, None] * N + cols[None, :]))
    tl.store(half_out + rows[:, None] * N + cols[None, :], tlx.local_load(narrow))


@triton.jit
def _wider(out, SPACE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    tile = tlx.local_alloc((M, N), tl.bfloat16, 1, SPACE)
    view = tlx.local_reinterpret(tile[0], tl.float32)
    tlx.local_store(view, tl.full((M, N), 1.0, tl.float32))


@pytest.mark.parametrize("space", [tlx.storage_kind.smem, tlx.storage_kind.tmem])
def test_a_view_in_a_wider_type_that_ends_past_its_buffer_is_found_where_it_is_used(space):
    with pytest.raises(emulator.errors.BufferIndexError, match="ends past its buffer") as found:
        with emulator.options(arch=100):
            _wider[(1,)](torch.empty(1), space, 128, 32)
    assert "a view of 16384 bytes of tile, which has 8192 from there on" in str(found.value)
    assert "local_store(view" in str(found.value)


@pytest.mark.parametrize("rows", [64, 128])
def test_reinterpretation(rows):
    x, h = torch.randn(rows, 32), torch.randn(rows, 32).half()
    out, half_out = torch.zeros(rows // 2, 32), torch.zeros(rows, 32).half()
    _reinterpret[(1,)](x, out, h, half_out, rows, 32)
    assert torch.equal(out, x[rows // 2 :]) and torch.equal(half_out, h)


@triton.jit
def _gather_scatter(src, index, out, N: tl.constexpr):
    i = tl.arange(0, N)
    buffers = tlx.local_alloc((N,), tl.float32, 2)
    tlx.local_store(buffers[0], tl.load(src + i))
    picked = tlx.local_gather(buffers[0], tl.load(index + i), 0)
    tl.store(out + i, picked)
    tlx.local_store(buffers[1], tl.zeros((N,), tl.float32))
    tlx.local_scatter(buffers[1], tl.load(src + i), tl.load(index + i), 0)
    tl.store(out + N + i, tlx.local_load(buffers[1]))


def test_gather_and_scatter():
    x, index, out = torch.randn(64), torch.randperm(64).int(), torch.zeros(2, 64)
    _gather_scatter[(1,)](x, index, out, 64)
    assert torch.equal(out[0], x[index.long()])
    assert torch.equal(out[1], torch.zeros(64).scatter(0, index.long(), x))


@triton.jit
def _groups(src, out, n, N: tl.constexpr):
    """Two cp.async groups in flight; masked lanes become zero or `other`."""
    i = tl.arange(0, N)
    buffers = tlx.local_alloc((N,), tl.float32, 2)
    first = tlx.async_load(src + i, buffers[0], mask=i < n)
    first = tlx.async_load_commit_group([first])
    tlx.async_load(src + i, buffers[1], mask=i < n, other=7.0)
    tlx.async_load_commit_group()
    tlx.async_load_wait_group(1, [first])
    tl.store(out + i, tlx.local_load(buffers[0]))
    tlx.async_load_wait_group(0)
    tl.store(out + N + i, tlx.local_load(buffers[1]))


def test_cp_async_groups():
    x, out = torch.randn(64), torch.zeros(2, 64)
    _groups[(1,)](x, out, 50, 64)
    assert torch.equal(out[0, :50], x[:50]) and (out[0, 50:] == 0).all()
    assert torch.equal(out[1, :50], x[:50]) and (out[1, 50:] == 7).all()


@triton.jit
def _bulk(src, out, N: tl.constexpr):
    buffer = tlx.local_alloc((N,), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(bar[0], N * 4)
    tlx.async_load(src, buffer[0], bulk=True, barrier=bar[0])
    tlx.barrier_wait(bar[0], 0)
    tlx.local_store(buffer[0], tlx.local_load(buffer[0]) * 2)
    tlx.fence("async_shared")
    tlx.async_store(out, buffer[0], N * 4)
    tlx.async_descriptor_store_wait(0)


def test_bulk_copies_both_ways():
    x, out = torch.randn(128), torch.zeros(128)
    _bulk[(1,)](x, out, 128)
    assert torch.equal(out, x * 2)


@triton.jit
def _unit_box(desc, out, M: tl.constexpr, N: tl.constexpr):
    """A box with leading dimensions of one into a two-dimensional buffer."""
    tile = tlx.local_alloc((M, N), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(bar[0], M * N * 4)
    tlx.async_descriptor_load(desc, tile[0], [1, 2, 8, 0], bar[0])
    tlx.barrier_wait(bar[0], 0)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tlx.local_load(tile[0]))


def test_boxes_with_leading_units():
    x, out = torch.randn(2, 3, 32, 16), torch.zeros(8, 16)
    _unit_box[(1,)](TensorDescriptor.from_tensor(x, [1, 1, 8, 16]), out, 8, 16)
    assert torch.equal(out, x[1, 2, 8:16])


@triton.jit
def _device_descriptors(src, out, rows, N: tl.constexpr):
    ptrs = tlx.allocate_tensor_descriptor(2)
    tlx.make_tensor_descriptor(ptrs[0], src, [rows, N], [N, tl.constexpr(1)], [8, N])
    tlx.make_tensor_descriptor(ptrs[1], out, [rows, N], [N, tl.constexpr(1)], [8, N])
    source = tlx.reinterpret_tensor_descriptor(ptrs[0], [8, N], tl.float32)
    target = tlx.reinterpret_tensor_descriptor(ptrs[1], [8, N], tl.float32)
    tile = tlx.local_alloc((8, N), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    phase = 0
    for row in range(0, rows, 8):
        tlx.barrier_expect_bytes(bar[0], 8 * N * 4)
        tlx.async_descriptor_load(source, tile[0], [row, 0], bar[0])
        tlx.barrier_wait(bar[0], phase)
        tlx.async_descriptor_store(target, tile[0], [row, 0], store_reduce="add")
        tlx.async_descriptor_store_wait(0)
        phase ^= 1


def test_descriptors_made_in_the_kernel_clip_and_add():
    x, out = torch.randn(21, 16), torch.ones(24, 16)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    _device_descriptors[(1,)](x, out, 21, 16)
    assert torch.equal(out[:21], x + 1) and (out[21:] == 1).all()


@triton.jit
def _overlap(out, N: tl.constexpr):
    """S and (two slices of P, alpha) share tensor memory; the slices of tile 0 must not reach tile 1."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    s = tlx.local_alloc((128, N), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, N // 2), tl.float16, 4, tlx.storage_kind.tmem, reuse=spec)
    alpha = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(
        tlx.reuse_group(
            s,
            tlx.reuse_group(tlx.reuse_group(p, group_size=2), alpha, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    for i in tl.static_range(4):
        tlx.local_store(p[i], tl.full((128, N // 2), i + 1.0, tl.float16))
    for i in tl.static_range(2):
        tlx.local_store(alpha[i], tl.full((128, 1), i + 10.0, tl.float32))
    at = tl.arange(0, 128)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :]
    for i in tl.static_range(4):
        tl.store(out + i * 128 * (N // 2) + at, tlx.local_load(p[i]).to(tl.float32))


def test_a_reuse_group_keeps_distinct_tiles_apart():
    out = torch.zeros(4, 128, 32)
    _overlap[(1,)](out, 64)
    assert [t.unique().tolist() for t in out] == [[1.0], [2.0], [3.0], [4.0]]


@triton.jit
def _alias(out, N: tl.constexpr):
    wide = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)
    narrow = tlx.local_alloc((128, N), tl.float16, 1, tlx.storage_kind.tmem, reuse=wide)
    tlx.local_store(wide[0], tl.full((128, N), 1.0, tl.float32))
    tlx.local_store(narrow[0], tl.full((128, N), 2.0, tl.float16))
    right = tlx.subslice(wide[0], N // 2, N // 2)
    at = tl.arange(0, 128)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :]
    tl.store(out + at, tlx.local_load(right))


def test_a_narrow_alias_covers_the_left_half_only():
    out = torch.zeros(128, 32)
    _alias[(1,)](out, 64)
    assert (out == 1).all()


# ---------------------------------------------------------------- what is refused


@triton.jit
def _mistake(out, KIND: tl.constexpr):
    if KIND == "index":
        tiles = tlx.local_alloc((16, 16), tl.float32, 2)
        tlx.local_store(tiles[2], tl.zeros((16, 16), tl.float32))
    elif KIND == "barrier index":
        bars = tlx.alloc_barriers(2)
        tlx.barrier_arrive(bars[2])
    elif KIND == "shared memory":
        tlx.local_alloc((128, 256), tl.float32, 2)
    elif KIND == "dtype":
        tiles = tlx.local_alloc((16, 16), tl.float32, 1)
        tlx.local_store(tiles[0], tl.zeros((16, 16), tl.float16))
    elif KIND == "shape":
        tiles = tlx.local_alloc((16, 16), tl.float32, 1)
        tlx.local_store(tiles[0], tl.zeros((16, 32), tl.float32))
    elif KIND == "subslice of smem":
        tiles = tlx.local_alloc((16, 16), tl.float32, 1)
        tlx.subslice(tiles[0], 0, 8)
    elif KIND == "subslice at run time":
        tiles = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
        for i in range(2):
            tlx.subslice(tiles[0], i * 32, 32)
    elif KIND == "storage":
        tiles = tlx.local_alloc((128, 16), tl.float32, 1)
        tlx.local_alloc((128, 16), tl.float32, 1, tlx.storage_kind.tmem, reuse=tiles)
    elif KIND == "permutation":
        tiles = tlx.local_alloc((16, 16), tl.float32, 1)
        tlx.local_trans(tiles[0], (0, 0))
    elif KIND == "fence":
        tlx.fence("async")
    elif KIND == "remote wait":
        bars = tlx.alloc_barriers(1)
        tlx.barrier_wait(tlx.remote_view(bars[0], 0), 0)
    elif KIND == "rank":
        bars = tlx.alloc_barriers(1)
        tlx.barrier_arrive(bars[0], 1, remote_cta_rank=2)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("index", errors.BufferIndexError, "there are 2 buffers"),
        ("barrier index", errors.BufferIndexError, "there are 2 barriers"),
        ("shared memory", errors.SharedMemoryError, "262,144 bytes"),
        ("dtype", triton.CompilationError, "local_store: the block is fp16"),
        ("shape", triton.CompilationError, r"is \[16, 32\]"),
        ("subslice of smem", triton.CompilationError, "only supported for tmem"),
        ("subslice at run time", triton.CompilationError, "must be known when the kernel is compiled"),
        ("storage", triton.CompilationError, "different storage"),
        ("permutation", triton.CompilationError, "permutation"),
        ("fence", triton.CompilationError, "fence scope must be"),
        ("remote wait", triton.CompilationError, "barrier_wait does not support remote_view"),
        ("rank", errors.ClusterError, "rank 2 does not exist"),
    ],
)
def test_mistakes(kind, error, message):
    with pytest.raises(error, match=message):
        if kind in ("remote wait", "rank"):
            _mistake[(2,)](torch.zeros(1), kind, ctas_per_cga=(2, 1, 1))
        else:
            _mistake[(1,)](torch.zeros(1), kind)


@triton.jit
def _wrong_box(desc, offset, M: tl.constexpr, N: tl.constexpr):
    tile = tlx.local_alloc((M, N), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(bar[0], M * N * 4)
    tlx.async_descriptor_load(desc, tile[0], [0, offset], bar[0])
    tlx.barrier_wait(bar[0], 0)


def test_a_box_that_is_not_the_buffer_s_shape():
    with pytest.raises(errors.DescriptorError, match=r"box is \[8, 16\], tile\[0\] is \[16, 16\]"):
        _wrong_box[(1,)](TensorDescriptor.from_tensor(torch.zeros(32, 16), [8, 16]), 0, 16, 16)


def test_an_inner_offset_that_tma_cannot_address():
    with pytest.raises(errors.DescriptorError, match="no multiple of 16"):
        _wrong_box[(1,)](TensorDescriptor.from_tensor(torch.zeros(32, 64), [16, 16]), 3, 16, 16)


def test_a_descriptor_of_no_rows_loads_zeros_and_stores_nothing():
    """Source: ROCm/rocm-systems PR 9936: an emulator took extent 0 as unbounded."""
    base = torch.ones(8, 16)
    out = torch.full((8, 16), -1.0)
    _round_trip[(1,)](base, out, 0, 8, 16)
    assert (out == 0).all() and (base == 1).all()


@triton.jit
def _round_trip(base, out, rows, M: tl.constexpr, N: tl.constexpr):
    desc = tl.make_tensor_descriptor(base, shape=[rows, N], strides=[N, 1], block_shape=[M, N])
    tile = tlx.local_alloc((M, N), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(bar[0], M * N * 4)
    tlx.async_descriptor_load(desc, tile[0], [0, 0], bar[0])
    tlx.barrier_wait(bar[0], 0)
    value = tlx.local_load(tile[0])
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], value)
    tlx.local_store(tile[0], value + 5)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, tile[0], [0, 0])
    tlx.async_descriptor_store_wait(0)
