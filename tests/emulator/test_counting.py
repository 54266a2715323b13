"""Counting what a launch does: the course's limits stand on these numbers."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import jfa.emulator as emulator  # noqa: E402


@triton.jit
def product(a_ptr, b_ptr, out_ptr, n, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + i * N + j)
    b = tl.load(b_ptr + i * N + j, mask=i < n, other=0.0)
    tl.store(out_ptr + tl.program_id(0) * N * N + i * N + j, tl.dot(a, b, input_precision="ieee"))


def test_loads_elements_dots_programs_and_the_largest_block_are_counted():
    a, b, out = torch.randn(16, 16), torch.randn(16, 16), torch.empty(2, 16, 16)
    with emulator.counting() as counts:
        product[(2,)](a, b, out, 10, N=16)
    assert counts.launches == 1
    assert (counts.programs, counts.loads, counts.stores, counts.dots) == (2, 4, 2, 2)
    assert counts.load_elements == 2 * (256 + 160)  # masked lanes are not loaded
    assert counts.store_elements == 2 * 256
    assert counts.peak_tile == 256


def test_launches_outside_are_not_counted():
    a, b, out = torch.randn(16, 16), torch.randn(16, 16), torch.empty(1, 16, 16)
    with emulator.counting() as counts:
        pass
    product[(1,)](a, b, out, 16, N=16)
    assert counts == emulator.Counts()


def test_a_tma_box_counts_as_one_load_in_full():
    tlx = pytest.importorskip("triton.language.extra.tlx")
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def copy(x_desc, out_desc, N: tl.constexpr):
        tile = tlx.local_alloc((N, N), tl.float32, 1)
        full = tlx.alloc_barriers(1, arrive_count=1)
        tlx.barrier_expect_bytes(full[0], N * N * 4)
        tlx.async_descriptor_load(x_desc, tile[0], [0, 0], full[0])
        tlx.barrier_wait(full[0], 0)
        tlx.async_descriptor_store(out_desc, tile[0], [0, 0])
        tlx.async_descriptor_store_wait(0)

    x, out = torch.randn(20, 16), torch.zeros(20, 16)
    with emulator.counting() as counts:
        copy[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), TensorDescriptor.from_tensor(out, [16, 16]), N=16)
    assert torch.equal(out[:16], x[:16])
    assert (counts.loads, counts.load_elements, counts.stores, counts.store_elements) == (1, 256, 1, 256)


@triton.jit
def masked_softmax(x_ptr, out_ptr, n, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    if n > 3:  # a comparison of scalars
        x = tl.where((j < n) & (j >= i - 2), x, float("-inf"))
    p = tl.exp2(x - tl.max(x, 1)[:, None]) + tl.exp(x)
    tl.atomic_add(out_ptr + i * N + j, p, mask=j < n)
    tl.atomic_max(out_ptr, tl.where(n > 3, 1.0, 2.0))


@pytest.mark.parametrize("n, selected", [(5, 64), (2, 0)])
def test_selects_compares_exponentials_and_atomics_are_counted_by_lanes(n, selected):
    with emulator.counting() as counts:
        masked_softmax[(1,)](torch.randn(8, 8), torch.zeros(8, 8), n, N=8)
    assert counts.selects == selected
    assert counts.compares == (8 + 64 if selected else 0) + 8  # j < n is a row of lanes, j >= i - 2 a block of them
    assert counts.exponentials == 2 * 64
    assert (counts.atomics, counts.atomic_elements) == (2, 8 * n + 1)


def test_tensor_memory_tasks_and_operations_are_counted():
    tlx = pytest.importorskip("triton.language.extra.tlx")
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def gemm(a_desc, b_desc, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        a = tlx.local_alloc((M, K), tl.bfloat16, 1)
        b = tlx.local_alloc((K, N), tl.bfloat16, 1)
        acc = tlx.local_alloc((M, N), tl.float32, 2, tlx.storage_kind.tmem)
        loaded = tlx.alloc_barriers(1, arrive_count=1)
        done = tlx.alloc_barriers(2, arrive_count=1)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tlx.local_store(acc[0], tl.load(c_ptr + at))
                tlx.barrier_wait(loaded[0], 0)
                tlx.async_dot(a[0], b[0], acc[0], use_acc=True, mBarriers=[done[0]])
                tlx.async_dot(a[0], b[0], acc[1], use_acc=False, mBarriers=[done[1]])
                tlx.barrier_wait(done[0], 0)
                tlx.barrier_wait(done[1], 0)
                tl.store(out_ptr + at, tlx.local_load(acc[0]) + tlx.local_load(acc[1]))
            with tlx.async_task(num_warps=1):
                tlx.barrier_expect_bytes(loaded[0], 2 * K * (M + N))
                tlx.async_descriptor_load(a_desc, a[0], [0, 0], loaded[0])
                tlx.async_descriptor_load(b_desc, b[0], [0, 0], loaded[0])

    a, b, c = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.randn(128, 64)
    out = torch.empty(128, 64)
    boxes = [TensorDescriptor.from_tensor(x, list(x.shape)) for x in (a, b)]
    with emulator.counting() as counts:
        gemm[(1,)](*boxes, c, out, M=128, N=64, K=64)
    assert torch.allclose(out, 2 * (a.float() @ b.float()) + c, atol=1e-3)
    assert (counts.mmas, counts.accumulated, counts.tasks) == (2, 1, 2)
    assert (counts.tmem_loads, counts.tmem_stores, counts.tmem_columns) == (2, 1, 128)
    assert 2 * 64 * (128 + 64) <= counts.shared_bytes <= 2 * 64 * (128 + 64) + 256
    assert counts.operations["async_descriptor_load"] == 2 and counts.operations["barrier_wait"] == 3
    assert counts.operations["barrier_arrive"] == 0
    assert (counts.loaded_places, counts.stored_places) == (2, 0)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_places_are_counted_where_copies_go_and_come_from(used):
    tlx = pytest.importorskip("triton.language.extra.tlx")
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def stream(x_desc, out_desc, chunks, USED: tl.constexpr):
        tiles = tlx.local_alloc((16, 16), tl.float32, 3)
        fulls = tlx.alloc_barriers(3)
        for k in range(chunks):
            slot, phase = k % USED, (k // USED) & 1
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_expect_bytes(fulls[slot], 16 * 16 * 4)
            tlx.async_descriptor_load(x_desc, tiles[slot], [16 * k, 0], fulls[slot])
            tlx.barrier_wait(fulls[slot], phase)
            if k < 1:
                tlx.async_descriptor_store(out_desc, tiles[slot], [16 * k, 0])
        tlx.async_descriptor_store_wait(0)

    x, out = torch.randn(16 * 7, 16), torch.zeros(16 * 7, 16)
    boxes = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, out)]
    with emulator.counting() as counts:
        for _ in range(2):  # of two launches the larger
            stream[(2,)](*boxes, 7, USED=used)
    assert torch.equal(out[:16], x[:16])
    assert (counts.loaded_places, counts.stored_places) == (used, 1)


def test_scaled_products_count_as_products():
    import triton.language.extra.tlx as tlx

    @triton.jit
    def three(out_ptr, N: tl.constexpr):
        rows, columns = tl.arange(0, 128), tl.arange(0, N)
        a = tlx.local_alloc((128, 128), tl.float8e4nv, 1)
        b = tlx.local_alloc((128, N), tl.float8e4nv, 1)
        scale_a = tlx.local_alloc((128, 4), tl.uint8, 1, tlx.storage_kind.tmem)
        scale_b = tlx.local_alloc((N, 4), tl.uint8, 1, tlx.storage_kind.tmem)
        acc = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)
        tlx.local_store(a[0], tl.full((128, 128), 1.0, tl.float32).to(tl.float8e4nv))
        tlx.local_store(b[0], tl.full((128, N), 1.0, tl.float32).to(tl.float8e4nv))
        tlx.local_store(scale_a[0], tl.full((128, 4), 128, tl.uint8))
        tlx.local_store(scale_b[0], tl.full((N, 4), 127, tl.uint8))
        tlx.fence("async_shared")
        for i in tl.static_range(3):
            tlx.async_dot_scaled(a[0], b[0], acc[0], scale_a[0], "e4m3", scale_b[0], "e4m3", use_acc=i > 0)
        tl.store(out_ptr + rows[:, None] * N + columns[None, :], tlx.local_load(acc[0]))

    out = torch.empty(128, 128)
    with emulator.counting() as counts:
        three[(1,)](out, 128)
    assert (out == 3 * 128 * 2).all()
    assert (counts.mmas, counts.accumulated) == (3, 2)


@triton.jit
def through_block_pointers(x_ptr, out_ptr, rows, columns, M: tl.constexpr, N: tl.constexpr):
    there = tl.make_block_ptr(x_ptr, (rows, columns), (columns, 1), (0, 0), (M, N), (1, 0))
    out = tl.make_block_ptr(out_ptr, (rows, columns), (columns, 1), (0, 0), (M, N), (1, 0))
    x = tl.load(there, boundary_check=(0, 1), padding_option="zero")
    tl.store(out, tl.where(x > 0, x, 0.0), boundary_check=(0,))


@pytest.mark.skipif(not hasattr(tl, "advance"), reason="this Triton has no block pointers of this kind")
@pytest.mark.filterwarnings("ignore")
def test_a_checked_side_of_a_block_pointer_counts_once_per_row_or_column():
    x, out = torch.randn(9, 32), torch.empty(9, 32)
    with emulator.counting() as counts:
        through_block_pointers[(1,)](x, out, 9, 32, M=16, N=32)
    assert torch.equal(out, x.relu())
    assert counts.compares == (16 + 32) + 16 + 16 * 32  # the load's sides, the store's, and x > 0
