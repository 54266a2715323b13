"""Combine functions of tl.reduce and tl.associative_scan get scalars: they may branch, and shapes are those of scalars."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

emulator.install()


@triton.jit
def _larger_of_evens(a, b):
    """The larger even number; an odd one loses; branches within branches."""
    result = a
    if a % 2 == 1:
        result = b
    elif b % 2 == 0:
        if b > a:
            result = b
    return result


@triton.jit
def _first_in_range(a, b):
    return a if a > 100 and a < 200 else b


@triton.jit
def _by_rank(a, b):
    if len(a.shape) == 0:
        return a + b
    else:
        return a - b


@triton.jit
def _with_helper(a, b):
    return _larger_of_evens(a, b) + 0


@triton.jit
def _restart(total_a, flag_a, total_b, flag_b):
    """A segmented sum: a flag starts a segment."""
    total, flag = total_b, flag_b
    if flag_b == 0:
        total, flag = total_a + total_b, flag_a
    return total, flag


@triton.jit
def _branches(x, o, N: tl.constexpr, COMBINE: tl.constexpr, SCAN: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, N)[:, None] * 8 + tl.arange(0, 8)[None, :]
    block = tl.load(x + at)
    if SCAN:
        tl.store(o + at, tl.associative_scan(block, AXIS, COMBINE))
    else:
        out = tl.reduce(block, AXIS, COMBINE)
        tl.store(o + tl.arange(0, out.shape[0]), out)


def _expected(x, combine, axis, scan):
    rows, out = x.movedim(axis, -1).reshape(-1, x.shape[axis]).tolist(), []
    for row in rows:
        line = [row[0]]
        for value in row[1:]:
            line.append(combine(line[-1], value))
        out.append(line if scan else line[-1])
    shape = [x.shape[1 - axis], *([x.shape[axis]] if scan else [])]
    return torch.tensor(out).reshape(shape).movedim(-1, axis) if scan else torch.tensor(out).reshape(shape)


def _evens(a, b):
    return b if a % 2 else (b if b % 2 == 0 and b > a else a)


CASES = {
    "branches": (_larger_of_evens, _evens),
    "conditional": (_first_in_range, lambda a, b: a if 100 < a < 200 else b),
    "rank": (_by_rank, lambda a, b: a + b),
    "helper": (_with_helper, _evens),
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_combine_functions_that_branch(name, axis, scan):
    if name == "conditional" and not scan:
        pytest.skip("the order of a reduction is the compiler's: this function does not commute")
    combine, python = CASES[name]
    x = torch.randint(0, 300, (16, 8), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    expected = _expected(x, python, axis, scan)
    out = torch.zeros(expected.shape, dtype=torch.int32)
    _branches[(1,)](x, out, 16, combine, scan, axis)
    assert torch.equal(out, expected.int())


@triton.jit
def _segments(x, flags, o, N: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, N)
    total, _ = tl.associative_scan((tl.load(x + at), tl.load(flags + at)), 0, _restart, reverse=REVERSE)
    tl.store(o + at, total)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_segmented_sum(reverse):
    x, flags, out = torch.randn(64), (torch.rand(64) < 0.2).int(), torch.zeros(64)
    _segments[(1,)](x, flags, out, 64, reverse)
    expected, total = torch.zeros(64), 0.0
    for i in reversed(range(64)) if reverse else range(64):
        total = x[i].item() if flags[i] else total + x[i].item()
        expected[i] = total
    assert torch.allclose(out, expected, atol=1e-5)
