"""The branch that is not taken is tried out for its types without effects; what is refused in a task is the compiler's error."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

emulator.install()


@triton.jit
def _other_branch_loads(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    if n > 2:
        v = i.to(tl.float32)
    else:
        v = tl.load(x + 1000000 + i) / 0.0
    tl.store(out + i, v)


@triton.jit
def _other_branch_loads_another_type(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    if n > 2:
        v = i
    else:
        v = tl.load(x + 1000000 + i)
    tl.store(out + i, v)


@triton.jit
def _other_branch_adds(x, out, n, N: tl.constexpr):
    if n > 2:
        v = 2.5
    else:
        v = tl.atomic_add(out, 1.0)
    tl.store(out + 1, v)


@pytest.mark.parametrize("n", [1, 3])
def test_trying_out_writes_nothing(n):
    out = torch.zeros(16)
    _other_branch_adds[(1,)](torch.zeros(16), out, n, N=16)
    assert out[:2].tolist() == ([0.0, 2.5] if n > 2 else [1.0, 0.0])


def test_trying_out_reads_and_counts_nothing():
    out = torch.zeros(16)
    with emulator.counting() as counts:
        _other_branch_loads[(1,)](torch.zeros(16), out, 3, N=16)
    assert out.tolist() == list(range(16)) and counts.loads == 0 and counts.stores == 1


def test_a_load_of_the_other_branch_has_its_type():
    with pytest.raises(
        triton.CompilationError, match="Mismatched type for v between then block .*int32.* and else block .*fp32"
    ):
        _other_branch_loads_another_type[(1,)](torch.zeros(16), torch.zeros(16), 3, N=16)
