"""Where undefined lanes are an error, where they are not, and what the reports say."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator.errors import PoisonError

emulator.install()


def findings(kernel, *arguments, grid=(1,), **options):
    found = emulator.run(kernel, grid, *arguments, **options).findings
    assert all(type(f) is PoisonError for f in found), [str(f) for f in found]
    return [str(f) for f in found]


@triton.jit
def uses(x, at, out, n, USE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    few = i < n
    v = tl.load(at + i, mask=few)  # the origin
    last = tl.load(at + n, mask=n < 0)
    if USE == "if":
        if last > 0:
            tl.store(out, 1.0)
    elif USE == "while":
        while last > 0:
            last -= 1
    elif USE == "range":
        for _ in range(last):
            tl.store(out, 1.0)
    elif USE == "and":
        if (n > 0) & (last > 0):
            tl.store(out, 1.0)
    elif USE == "load address":
        tl.store(out + i, tl.load(x + v), mask=few)
    elif USE == "store address":
        tl.store(out + v, 1.0)
    elif USE == "atomic address":
        tl.atomic_add(out + v, 1.0)
    elif USE == "load mask":
        tl.store(out + i, tl.load(x + i, mask=v >= 0, other=0.0), mask=few)
    elif USE == "store mask":
        tl.store(out + i, 1.0, mask=v >= 0)
    elif USE == "atomic mask":
        tl.atomic_add(out + i, 1.0, mask=v >= 0)
    elif USE == "store":
        tl.store(out + i, v.to(tl.float32))
    elif USE == "atomic":
        tl.atomic_add(out + i, v.to(tl.float32))
    elif USE == "scalar":
        tl.store(out, last.to(tl.float32))
    elif USE == "other":
        tl.store(out + i, tl.load(x + i, mask=few, other=v.to(tl.float32)))
    elif USE == "assert":
        tl.device_assert(v >= 0)
    elif USE == "cas":
        tl.atomic_cas(at, last, 0)


PHRASES = {
    "if": "branches on 1 value", "while": "branches on 1 value", "and": "branches on 1 value",
    "range": "1 value.* for a loop bound",
    "load address": "6 value.* for an address", "store address": "6 value.* for an address", "assert": "asserts 6 value",
    "atomic address": "6 value.* for an address", "load mask": "6 value.* for a mask", "store mask": "6 value.* for a mask",
    "atomic mask": "6 value.* for a mask", "store": "stores 6 value", "atomic": "stores 6 value", "scalar": "stores 1 value",
    "other": "stores 6 value", "cas": "compares 1 value",
}  # fmt: skip


@pytest.mark.parametrize("use", PHRASES)
def test_each_use_is_an_error_that_names_the_load(use):
    x, at, out = torch.randn(16), torch.arange(16, dtype=torch.int32), torch.zeros(16)
    found = findings(uses, x, at, out, 10, use, 16)
    assert len(found) == 1
    summary, place, origin, *_ = found[0].splitlines()
    assert re.search(PHRASES[use], summary) and "test_undefined_uses.py" in place
    line = "last = tl.load" if use in ("if", "while", "range", "and", "scalar", "cas") else "v = tl.load"
    assert "load without `other`" in origin and line in origin


@triton.jit
def harmless(x, at, out, n, USE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    few = i < n
    v = tl.load(at + i, mask=few)
    if USE == "where":
        tl.store(out + i, tl.where(few, v, 0).to(tl.float32))
    elif USE == "mask of both":
        tl.store(out + i, tl.load(x + v, mask=few & (v < 8), other=1.0), mask=few)
    elif USE == "address under mask":
        tl.store(out + v, tl.load(x + v, mask=few), mask=few)
    elif USE == "gather under mask":
        tl.store(out + i, tl.gather(tl.load(x + i), v, 0), mask=few)
    elif USE == "computed under mask":
        tl.store(out + i, tl.exp(-v.to(tl.float16).to(tl.float32)).to(tl.bfloat16).to(tl.float32), mask=few)
    elif USE == "never used":
        tl.store(out + i, i + n)
    elif USE == "atomic under mask":
        old = tl.atomic_add(out + i, 1.0, mask=few)
        tl.store(out + i, old, mask=few)
    elif USE == "assert under mask":
        tl.device_assert((v >= 0) | (i >= n))
    elif USE == "rows of a product":
        rows, cols = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        a = tl.load(x + cols + 0 * rows, mask=rows < n).to(tl.float16)
        b = tl.load(x + rows + 0 * cols).to(tl.float16)
        tl.store(out + rows, tl.sum(tl.dot(a, b), 1, keep_dims=True), mask=rows < n)


HARMLESS = (
    *("where", "mask of both", "address under mask", "gather under mask", "computed under mask", "never used"),
    *("atomic under mask", "assert under mask", "rows of a product"),
)


@pytest.mark.parametrize("use", HARMLESS)
def test_lanes_that_are_masked_again_are_no_error(use):
    assert findings(harmless, torch.randn(16), torch.arange(16, dtype=torch.int32), torch.zeros(16), 10, use, 16) == []


@triton.jit
def two_loads(x, y, out, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i, mask=i >= 4)
    b = tl.load(y + i, mask=i < N - 2)
    if HOW == "sum":
        tl.store(out + i, a + b)
    else:
        tl.store(out + i, a + b, mask=i >= 4)


def test_each_lane_knows_its_own_load():
    x = torch.randn(16)
    both = findings(two_loads, x, x, torch.zeros(16), 16, "sum")
    assert ["stores 4 value(s)" in both[0], "a = tl.load" in both[0]] == [True, True]
    assert ["stores 2 value(s)" in both[1], "b = tl.load" in both[1]] == [True, True]
    (one,) = findings(two_loads, x, x, torch.zeros(16), 16, "tail")
    assert "stores 2 value(s)" in one and "b = tl.load" in one


@triton.jit
def masked_atomic(out, old, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(out + i, 1.0, mask=i < n))


def test_masked_lanes_of_an_atomic_return_nothing():
    (found,) = findings(masked_atomic, torch.zeros(16), torch.zeros(16), 12, 16)
    assert "stores 4 value(s) that no atomic returned" in found and "the atomic at" in found


@triton.jit
def boxes(source, target, n, ROWS: tl.constexpr, COLS: tl.constexpr, OFFSET: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    v = tl.load(source + at, mask=tl.arange(0, ROWS)[:, None] < n)
    target.store([OFFSET, 0], v)


def test_a_descriptor_store_looks_at_the_lanes_inside_the_tensor():
    x, out = torch.randn(16, 16), torch.zeros(10, 16)
    box = TensorDescriptor.from_tensor(out, [16, 16])
    assert findings(boxes, x, box, 10, 16, 16, 0) == []
    assert torch.equal(out, x[:10])
    (found,) = findings(boxes, x, box, 9, 16, 16, 0)
    assert "stores 16 value(s) that were never loaded" in found
    assert findings(boxes, x, box, 8, 16, 16, 2) == []


@triton.jit
def offset_box(source, target, at, n):
    row = tl.load(at, mask=n < 0)
    target.store([row, 0], source.load([0, 0]))


def test_an_undefined_offset_of_a_box_is_an_error():
    x, out = torch.randn(16, 16), torch.zeros(16, 16)
    source, target = (TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, out))
    with pytest.raises(PoisonError, match="for a descriptor's offset"):
        offset_box[(1,)](source, target, torch.zeros(1, dtype=torch.int32), 3)


@triton.jit
def repeated(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i, mask=i < n)
    for _ in range(3):
        tl.store(out + i, v)
    tl.store(out + i, v)


def test_a_place_is_reported_once_and_every_launch_anew():
    x, out = torch.randn(16), torch.zeros(16)
    for _ in range(2):
        assert len(findings(repeated, x, out, 10, 16)) == 2
    assert findings(repeated, x, out, 16, 16) == []


def test_without_the_check_masked_lanes_are_zero():
    x, out = torch.randn(16), torch.ones(16)
    with emulator.options(poison=False):
        repeated[(1,)](x, out, 10, 16)
    assert torch.equal(out[:10], x[:10]) and (out[10:] == 0).all()


TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
TYPES += (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_plain_copy_in_every_type(dtype):
    x, out = torch.ones(16).to(dtype), torch.zeros(16).to(dtype)
    assert len(findings(repeated, x, out, 10, 16)) == 2
    assert findings(repeated, x, out, 16, 16) == []


@triton.jit
def stepped(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.where(i < n, v * 2.5 - 1, 0.0))


def test_defined_lanes_keep_their_values_bit_for_bit():
    x, out = torch.randn(64), torch.zeros(64)
    stepped[(1,)](x, out, 50, 64)
    expected = x.numpy()[:50] * np.float32(2.5) - np.float32(1)
    assert np.array_equal(out.numpy()[:50], expected) and (out[50:] == 0).all()


# ---------------------------------------------------------------- the variable of a loop, after the loop


@triton.jit
def _after_a_loop(x, out, n, KIND: tl.constexpr):
    total = 0.0
    for k in range(1, n):
        total += tl.load(x + k)
    if KIND == "store":
        tl.store(out, k)
    elif KIND == "address":
        tl.store(out, tl.load(x + k))
    elif KIND == "changed":
        k += 1
        tl.store(out, k * 2)
    elif KIND == "branch":
        if k > 1:
            tl.store(out, 1.0)
    elif KIND == "again":
        for k in range(3):
            total += k
        tl.store(out, total)
    elif KIND == "new value":
        k = 7
        tl.store(out, k + total)
    elif KIND == "unrolled":
        for k in tl.static_range(3):
            total += k
        tl.store(out, total + k)


@pytest.mark.parametrize("kind", ["store", "address", "changed", "branch"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_loop_variable_is_undefined_after_its_loop(kind, n):
    """The compiler puts a poison value there: PTX stores a register that nothing has written."""
    with pytest.raises(PoisonError, match="of a loop's variable after its loop") as caught:
        _after_a_loop[(1,)](torch.ones(8), torch.zeros(1), n, kind)
    assert "for k in range(1, n):" in str(caught.value)


@pytest.mark.parametrize("kind, expected", [("again", 3 + 3), ("new value", 7 + 3), ("unrolled", 3 + 3 + 2)])
def test_a_loop_variable_that_gets_a_value_again_is_defined(kind, expected):
    out = torch.zeros(1)
    run = emulator.run(_after_a_loop, (1,), torch.ones(8), out, 4, kind)
    assert run.clean and out.item() == expected


def test_a_loop_variable_nobody_looks_for_holds_its_last_value():
    out = torch.zeros(1)
    assert emulator.run(_after_a_loop, (1,), torch.ones(8), out, 4, "store", poison=False).clean and out.item() == 3
