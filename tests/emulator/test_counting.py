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
