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


@triton.jit
def _name_in_the_other_branch(x, out, n, N: tl.constexpr):
    if n > 2:
        tl.store(out, 1.0)
    else:
        tl.store(out, 2.0)
        tl.store(out + 1, missing)  # noqa: F821


@triton.jit
def _name_of_one_way(x, out, n, N: tl.constexpr):
    if N > 99:
        late = n * 2
    if n > 90:
        tl.store(out, 2.0)
        early = n + late
        tl.store(out, early)


@triton.jit
def _name_in_a_loop_without_turns(x, out, n, N: tl.constexpr):
    if N > 99:
        late = n * 2
    for k in range(n - 3):
        early = n + k
        tl.store(out, early + late)


@triton.jit
def _return_in_a_loops_branch(x, out, n, N: tl.constexpr):
    for k in range(n):
        if k > n:
            tl.store(out, 1.0)
            return


@triton.jit
def _import_in_a_branch(x, out, n, N: tl.constexpr):
    if n > 90:
        tl.store(out, 1.0)
        import math  # noqa: F401


@pytest.mark.parametrize(
    "kernel, line, message",
    [
        (_name_in_the_other_branch, "tl.store(out + 1, missing)", "missing is not defined"),
        (_name_of_one_way, "early = n + late", "late is not defined"),
        (_name_in_a_loop_without_turns, "tl.store(out, early + late)", "late is not defined"),
        (_return_in_a_loops_branch, "return", "Cannot have `return` statements"),
        (_import_in_a_branch, "import math", "unsupported AST node type: Import"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refusal_in_code_that_does_not_run_shows_its_own_line(kernel, line, message):
    """Not the line of the `if` or loop around it."""
    with pytest.raises(triton.CompilationError) as caught:
        kernel[(1,)](torch.zeros(16), torch.zeros(16), 3, N=16)
    text, start = kernel.src, kernel.starting_line_number
    expected = next(k for k, code in enumerate(text.splitlines()) if code.strip().startswith(line))
    assert f"test_branches.py:{start + expected + 1}, in {kernel.fn.__name__}" in str(caught.value) and message in str(
        caught.value
    )
