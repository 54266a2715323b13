"""What is computed again from a trace is what the same Python code computes, or nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa.kernels.common.sizes import Size, Trace, same

NUMBERS = st.integers(0, 5000)


def tiles(rows, batches, longest):
    """Return numbers and a choice, as launch code has them."""
    block = 64 if 0 < longest <= 64 else 128
    capacity = max(-(-rows // block) + batches + 2, 1)
    grid = min(132, capacity * 8)
    padded = -(-rows // 64) * 64 + (batches + 2) * 64
    size = 1 << (batches + 1).bit_length()
    odd = (rows % 16 == 0, rows == 1, -5 - rows < -100, bool(rows), 3 * batches >= rows, rows != batches)
    return (capacity, grid, padded, size, 7 - rows, 100 // (batches + 1), 5 % (rows + 1), rows >> 2, block), odd


@settings(max_examples=200, deadline=None)
@given(st.tuples(NUMBERS, NUMBERS, NUMBERS), st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=8))
def test_a_trace_computes_the_same_or_says_that_the_way_is_another(first, others):
    trace = Trace(dict(zip(("rows", "batches", "longest"), first)))
    numbers, odd = tiles(*trace.variables.values())
    again = trace.compile(numbers)
    assert again(*first) == tuple(int(x) for x in tiles(*first)[0])
    assert odd == tiles(*first)[1]
    for other in others:
        expected, choices = tiles(*other)
        found = again(*other)
        if found is not None:
            assert found == expected and choices == odd
        elif choices == odd:  # then another comparison differed: which block, or which side of a min or max
            assert decisions(*other) != decisions(*first)


def decisions(rows, batches, longest):
    block = 64 if 0 < longest <= 64 else 128
    capacity = max(-(-rows // block) + batches + 2, 1)
    return longest > 0, longest <= 64, 132 < capacity * 8, 132 > capacity * 8


@pytest.mark.parametrize(
    "use",
    [
        hash,
        float,
        str,
        abs,
        lambda n: n / 2,
        lambda n: n**2,
        lambda n: {7: 1}.get(n),
        lambda n: n & 3,
        lambda n: f"{n:d}",
    ]
    + [math.ceil, math.sqrt, lambda n: n * 0.5, lambda n: n < 7.5, lambda n: 2 / n, int],
)
def test_what_needs_the_number_itself_pins_it(use):
    trace = Trace({"n": 7})
    assert use(trace.variables["n"]) == use(7)
    again = trace.compile()
    assert again(7) == () and again(8) is None


def test_the_same_line_is_written_once_and_unused_ones_not_at_all():
    trace = Trace({"n": 7})
    n = trace.variables["n"]
    a, b = n * 4 + 1, n * 4 + 1
    assert same(a, b) and a is b and not same(a, n) and same(3, 3) and not same(29, a)
    n // 0 if n < 0 else None
    unused = 100 // n
    assert isinstance(unused, Size)
    assert trace.compile([a])(0) == (1,)  # 100 // 0 is not computed


def test_numbers_of_both_kinds_come_in_order():
    trace = Trace({"a": 2, "b": 3})
    a, b = trace.variables.values()
    assert trace.compile([b, 5, a - b, -1])(10, 4) == (4, 5, 6, -1)
    assert trace.compile([a])(1, 2) == (1,)
