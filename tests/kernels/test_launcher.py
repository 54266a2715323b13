"""The short way to launch: same machine code as Triton would pick, same descriptors as Triton's own helper makes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.ragged_tma import create_ragged_descriptor

from jfa.kernels.common.launcher import Variant, facts
from jfa.kernels.common.ragged import ragged_descriptor, tma_ready


@triton.jit(do_not_specialize=["plain"])
def add_kernel(x, maybe, count, plain, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < count, other=0.0) * factor + plain, mask=at < count)


INTS = st.sampled_from([0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**40, -1, -16])
TENSORS = st.sampled_from(
    [torch.zeros(64), torch.zeros(65)[1:], torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)]
)


def specialisation(args):
    """What Triton's own binder for an sm_90 reads off the arguments."""
    binder = create_function_from_signature(
        add_kernel.signature, add_kernel.params, make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    )
    return binder(*args, BLOCK=64)[1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TENSORS, st.one_of(st.none(), TENSORS), INTS, INTS, st.floats(0, 2)), min_size=2, max_size=2))
def test_calls_with_the_same_facts_get_the_same_machine_code(calls):
    kept = Variant(add_kernel, BLOCK=64).specialised
    first, second = calls
    if facts(first, kept) == facts(second, kept):
        assert specialisation(first) == specialisation(second)


def test_constexprs_must_come_last():
    @triton.jit
    def wrong(BLOCK: tl.constexpr, x):
        pass

    with pytest.raises(ValueError, match="constexprs must follow"):
        Variant(wrong, BLOCK=1)


def test_cpu_tensors_go_to_the_emulator():
    x = torch.arange(10, dtype=torch.float32)
    Variant(add_kernel, BLOCK=16, num_warps=1).launch(x.device, (1,), x, None, 10, 3, 2.0)
    assert torch.equal(x, torch.arange(10) * 2.0 + 3)


@pytest.mark.parametrize("rows, heads, dim, boxed_heads", [(50, 4, 64, 1), (7, 6, 72, 2), (1, 1, 128, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ragged_descriptors_are_those_of_triton(rows, heads, dim, boxed_heads, dtype):
    packed = torch.randn(rows, heads, dim + 8, dtype=dtype)[:, :, :dim]
    assert tma_ready(packed)
    ours = ragged_descriptor(packed, 16, 64, boxed_heads)
    theirs = create_ragged_descriptor(packed.permute(1, 0, 2), [boxed_heads, 16, 64], ragged_dim=1)
    assert ours.base.data_ptr() == theirs.base.data_ptr()
    for name in ("shape", "strides", "block_shape", "padding"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_strides_that_tma_cannot_take_are_seen():
    assert not tma_ready(torch.randn(8, 2, 12, dtype=torch.bfloat16))
    assert not tma_ready(torch.randn(8, 2, 33, dtype=torch.bfloat16)[:, :, 1:])
    assert not tma_ready(torch.randn(8, 16, 2, dtype=torch.bfloat16).transpose(1, 2))
    assert not tma_ready(torch.randn(0, 2, 16, dtype=torch.bfloat16))
