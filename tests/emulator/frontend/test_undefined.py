"""Undefined lanes through every operation: an oracle of two runs with different garbage, and what each operation does exactly."""

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import jfa.emulator as emulator
from jfa.emulator import dtypes
from jfa.emulator.context import Launch, running
from jfa.emulator.frontend import carry, language
from jfa.emulator.frontend.access import MemoryBuilder
from jfa.emulator.frontend.binding import bind
from jfa.emulator.frontend.builder import Builder
from jfa.emulator.frontend.semantic import BUILDER
from jfa.emulator.frontend.tensor import Scalar, Tensor, make, scalar
from jfa.emulator.undefined import MARK, mark, some

emulator.install()

FLOATS = [tl.float32, tl.bfloat16, tl.float16, tl.float64, tl.float8e4nv, tl.float8e5]
INTEGERS = [tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint32]


@pytest.fixture(autouse=True)
def launch():
    """The state of a launch that has met undefined values; what it reports."""
    found = []
    with running(Launch(report=found.append)):
        mark("masked load", ())
        yield found


def _values(rng, dtype, shape, wild):
    """Values of a type in held form; wild ones are extreme as well."""
    held = dtypes.held(dtype.name)
    if held == np.bool_:
        return rng.random(shape) < 0.5
    if held.kind in "iu":
        info = np.iinfo(held)
        low, high = (info.min, info.max) if wild else (max(info.min, -20), 20)
        return rng.integers(low, high, shape, dtype=held, endpoint=True)
    data = rng.normal(size=shape) * (1e4 if wild else 2)
    if wild:
        data = np.where(rng.random(shape) < 0.5, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], shape), data)
    with np.errstate(all="ignore"):
        return dtypes.round_to(data.astype(held), dtype.name)


def block(seed, dtype, shape, run, share=0.3):
    """A block of which a share of the lanes is undefined: equal in every run but for those lanes."""
    rng = np.random.default_rng(seed)
    data, marks = _values(rng, dtype, shape, False), (rng.random(shape) < share).astype(MARK)
    garbage = _values(np.random.default_rng([seed, run + 1]), dtype, shape, True)
    return make(np.where(marks, garbage, data), dtype, None, some(marks))


def marked(x):
    """Which lanes of a value are undefined."""
    return np.zeros(x.data.shape, bool) if x.undefined is None else np.asarray(x.undefined) != 0


# ---- two runs with different garbage

own = {name: bind(getattr(tl, name)) for name in (
    "exp exp2 log sqrt abs sin floor sigmoid softmax where maximum minimum clamp fma sum max min argmax argmin xor_sum reduce "
    "associative_scan cumsum cumprod sort flip trans permute reshape broadcast_to expand_dims join split cat gather histogram dot "
    "map_elementwise interleave ravel umulhi full topk"
).split()}  # fmt: skip


@triton.jit
def keeps_larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def pairs(a, i, b, j):
    return a + b, tl.maximum(i, j)


@triton.jit
def folded(a, b):
    return a * 2 + b


def _to(dtype):
    return lambda x, y: x.to(dtype)


def _is_float(x):
    return x.dtype.is_floating()


OPERATIONS = {
    "neg": lambda x, y: -x, "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "rsub": lambda x, y: 1 - x,
    "mul": lambda x, y: x * y, "times 0": lambda x, y: x * 0, "div": lambda x, y: x / y, "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y, "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << 2, "shr": lambda x, y: x >> y, "invert": lambda x, y: ~x,
    "lt": lambda x, y: x < y, "eq": lambda x, y: x == y, "positive": lambda x, y: x > 0,
    "logical": lambda x, y: (x > 0).logical_and(y > 0), "either": lambda x, y: (x > 0).logical_or(y > 0),
    "where own": lambda x, y: own["where"](x > 0, x, y), "where other": lambda x, y: own["where"](y > 0, x, 0),
    "maximum": lambda x, y: own["maximum"](x, y), "minimum 0": lambda x, y: own["minimum"](x, 0),
    "clamp": lambda x, y: own["clamp"](x, -1.0, 1.0), "fma": lambda x, y: own["fma"](x, y, x),
    "exp": lambda x, y: own["exp"](x), "log": lambda x, y: own["log"](x), "sqrt": lambda x, y: own["sqrt"](x),
    "abs": lambda x, y: own["abs"](x), "floor": lambda x, y: own["floor"](x), "sigmoid": lambda x, y: own["sigmoid"](x),
    "softmax": lambda x, y: own["softmax"](x), "sum": lambda x, y: own["sum"](x, 0, keep_dims=True),
    "sum rows": lambda x, y: own["sum"](x, x.data.ndim - 1), "max": lambda x, y: own["max"](x, 0),
    "min": lambda x, y: own["min"](x, x.data.ndim - 1, keep_dims=True), "argmax": lambda x, y: own["argmax"](x, 0),
    "argmin": lambda x, y: own["argmin"](x, x.data.ndim - 1), "xor_sum": lambda x, y: own["xor_sum"](x, 0),
    "max at": lambda x, y: own["max"](x, 0, return_indices=True)[1],
    "reduce": lambda x, y: own["reduce"](x, 0, bind(keeps_larger)),
    "reduce two": lambda x, y: own["reduce"]((x, y), 0, bind(pairs))[0],
    "scan": lambda x, y: own["associative_scan"](x, 0, bind(keeps_larger)),
    "scan back": lambda x, y: own["associative_scan"](x, 0, bind(keeps_larger), reverse=True),
    "cumsum": lambda x, y: own["cumsum"](x, 0), "cumprod": lambda x, y: own["cumprod"](x, x.data.ndim - 1, reverse=True),
    "sort": lambda x, y: own["sort"](x), "flip": lambda x, y: own["flip"](x, 0), "T": lambda x, y: x.T,
    "none": lambda x, y: x[None, :] if x.data.ndim == 1 else x, "ravel": lambda x, y: own["ravel"](x),
    "reshape": lambda x, y: own["reshape"](x, (2, x.data.size // 2)),
    "broadcast": lambda x, y: own["broadcast_to"](x[:, None], (x.data.size, 2)) if x.data.ndim == 1 else x,
    "join": lambda x, y: own["join"](x, y), "interleave": lambda x, y: own["interleave"](x, y),
    "split": lambda x, y: own["split"](own["join"](x, y))[1], "cat": lambda x, y: own["cat"](own["ravel"](x), own["ravel"](y)),
    "topk": lambda x, y: own["topk"](x, 2),
    "gather": lambda x, y: own["gather"](x, (own["abs"](y) % x.data.shape[0]).to(tl.int32), 0),
    "histogram": lambda x, y: own["histogram"](own["ravel"](x).to(tl.int32), 8),
    "masked histogram": lambda x, y: own["histogram"](own["ravel"](x).to(tl.int32), 8, own["ravel"](y) > 0),
    "map": lambda x, y: own["map_elementwise"](bind(folded), x, y), "umulhi": lambda x, y: own["umulhi"](x, y),
    "bits": lambda x, y: x.to({1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[dtypes.itemsize(x.dtype.name)], bitcast=True),
    "dot": lambda x, y: own["dot"](*(own["broadcast_to"](own["sum"](v, 1, keep_dims=True), (16, 16)) if v.data.shape[0] == 16
                                     else own["full"]((16, 16), own["sum"](v), v.dtype) for v in (x, y))),
    "first": lambda x, y: own["full"]((8,), own["max"](own["ravel"](x), 0), x.dtype),
} | {f"to {t.name}": _to(t) for t in (*FLOATS, *INTEGERS, tl.int1)}  # fmt: skip
REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError, IndexError, KeyError)
MOST = 64


def _chain(names, seed, dtype, shape, run):
    """What the operations give one after the other; one that this type or shape does not take is left out."""
    x, results = block(seed, dtype, shape, run), []
    for number, name in enumerate(names):
        y = block([seed, number], x.dtype, x.data.shape, run)
        try:
            with np.errstate(all="ignore"):
                result = OPERATIONS[name](x, y)
        except Exception as error:  # the compiler's own errors are many; what matters is that both runs agree
            if not isinstance(error, REFUSALS) and not type(error).__module__.startswith(("triton", "jfa.emulator")):
                raise
            results.append((name, type(error)))
            continue
        results.append((name, result))
        if (
            type(result) is Tensor
            and result.data.ndim <= 3
            and 4 <= result.data.size <= 4 * MOST
            and min(result.data.shape) > 0
        ):
            x = result
    return results


def _differs(a, b):
    same = a == b
    if a.dtype.kind == "f":
        same |= np.isnan(a) & np.isnan(b)
    return ~same


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([*FLOATS, *INTEGERS, tl.int1]),
    st.sampled_from([(16,), (4, 8), (16, 4), (2, 4, 4)]),
)
def test_lanes_that_depend_on_garbage_are_marked(names, seed, dtype, shape):
    runs = [_chain(names, seed, dtype, shape, run) for run in range(2)]
    for (name, first), (_, second) in zip(*runs):
        if isinstance(first, type) or isinstance(second, type):
            assert first is second, f"{name}: {first} and {second}"
            continue
        a, b = np.asarray(first.data), np.asarray(second.data)
        wrong = _differs(a, b) & ~(marked(first) & marked(second))
        assert not wrong.any(), f"{names} of {dtype}: {name} gives {a[wrong]} or {b[wrong]}, unmarked"
        assert (marked(first) == marked(second)).all(), f"{name}: the marks depend on garbage"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_alone(name):
    """Every operation runs for some type, gives marks where it must, and gives none for defined operands."""
    ran = 0
    for dtype in (tl.float32, tl.int32, tl.int1, tl.bfloat16, tl.uint8):
        for shape in ((16,), (16, 4)):
            runs = [_chain([name], 7, dtype, shape, run)[0][1] for run in range(2)]
            if isinstance(runs[0], type):
                continue
            ran += 1
            a, b = (np.asarray(r.data) for r in runs)
            assert not (_differs(a, b) & ~marked(runs[0])).any()
            x, y = (block(s, dtype, shape, 0, share=0.0) for s in (1, 2))
            assert OPERATIONS[name](x, y).undefined is None
    assert ran


# ---- exactly which lanes


def lanes(data, undefined, dtype=tl.float32):
    marks = np.asarray(undefined, MARK)
    return make(np.asarray(data).astype(dtypes.held(dtype.name)), dtype, None, some(marks))


def _expect(result, undefined):
    assert marked(result).astype(int).tolist() == undefined


def test_select_follows_the_chosen_lanes():
    x, mask = lanes([1, 2, 3, 4], [0, 0, 1, 1]), lanes([1, 1, 0, 1], [0, 0, 0, 0], tl.int1)
    _expect(own["where"](mask, x, 0.0), [0, 0, 0, 1])
    _expect(own["where"](x > 2, 5.0, 7.0), [0, 0, 1, 1])
    _expect(own["where"](mask, 0.0, x), [0, 0, 1, 0])


@pytest.mark.parametrize("dtype", [tl.int1, tl.int32, tl.uint8])
def test_zero_decides_an_and_and_all_ones_an_or(dtype):
    x, false = lanes([1, 1, 1, 1], [0, 1, 1, 0], dtype), lanes([0, 0, 1, 1], [0, 0, 1, 1], dtype)
    _expect(x & false, [0, 0, 1, 1])
    _expect(false & x, [0, 0, 1, 1])
    ones = lanes([True] * 4, [0] * 4, tl.int1) if dtype is tl.int1 else lanes([1] * 4, [0] * 4, dtype) * 0 - 1
    _expect(x | ones, [0, 0, 0, 0])
    _expect(x | false, [0, 1, 1, 0 if dtype is tl.int1 else 1])
    if dtype is tl.int1:
        _expect(x.logical_and(false), [0, 0, 1, 1])
        _expect(x.logical_or(ones), [0, 0, 0, 0])


def test_nothing_times_zero_is_defined():
    x = lanes([1, 2], [0, 1])
    _expect(x * 0, [0, 1])
    _expect(x - x, [0, 1])
    _expect((x * 0).to(tl.int8) & 3, [0, 1])


def test_a_reduction_is_undefined_if_a_lane_is():
    x = lanes([[1, 2], [3, 4]], [[0, 1], [0, 0]])
    for name in ("sum", "max", "min", "argmax", "argmin"):
        _expect(own[name](x, 1), [1, 0])
        _expect(own[name](x, 0), [0, 1])
    _expect(own["cumsum"](x, 1), [[0, 1], [0, 0]])
    _expect(own["associative_scan"](x, 1, bind(keeps_larger), reverse=True), [[1, 1], [0, 0]])
    _expect(own["sort"](x), [[1, 1], [0, 0]])


def test_shapes_move_marks():
    x = lanes([[1, 2], [3, 4]], [[0, 1], [0, 0]])
    _expect(x.T, [[0, 0], [1, 0]])
    _expect(own["reshape"](x, (4,)), [0, 1, 0, 0])
    _expect(own["flip"](x, 1), [[1, 0], [0, 0]])
    _expect(own["join"](x, x)[None], [[[[0, 0], [1, 1]], [[0, 0], [0, 0]]]])
    _expect(own["split"](x)[1], [1, 0])
    _expect(own["cat"](own["ravel"](x), own["ravel"](x)), [0, 1, 0, 0] * 2)


def test_a_product_is_undefined_in_rows_of_a_and_columns_of_b():
    a, b = (np.zeros((16, 16), int) for _ in range(2))
    a[3, 5] = b[2, 7] = 1
    product = own["dot"](lanes(np.ones((16, 16)), a, tl.float16), lanes(np.ones((16, 16)), b, tl.float16))
    expected = np.zeros((16, 16), int)
    expected[3], expected[:, 7] = 1, 1
    _expect(product, expected.tolist())


def test_an_accumulator_brings_its_own_marks():
    zeros, marks = np.zeros((16, 16)), np.zeros((16, 16), int)
    marks[1, 2] = 1
    x = lanes(zeros, zeros, tl.float16)
    _expect(own["dot"](x, x, lanes(zeros, marks)), marks.tolist())


def test_elements_that_share_a_run_of_inline_ptx_are_undefined_together():
    x = lanes(np.arange(8), [0, 0, 0, 1, 0, 0, 0, 0], tl.uint32)
    asm = bind(tl.inline_asm_elementwise)
    alone = asm("add.u32 $0, $1, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1)
    _expect(alone, [0, 0, 0, 1, 0, 0, 0, 0])
    two = asm("add.u32 $0, $2, $3; add.u32 $1, $2, $3;", "=r,=r,r,r", [x], dtype=tl.uint32, is_pure=True, pack=2)
    _expect(two, [0, 0, 1, 1, 0, 0, 0, 0])


# ---- what comes later


def test_an_operation_without_a_rule_mixes_all_lanes():
    @carry.carrying_builder
    class Later(type(BUILDER)):
        def create_rotation(self, a, *, by=1):
            return make(np.roll(a.data, by), a.dtype)

    x = lanes([1, 2, 3, 4], [0, 0, 1, 0])
    _expect(Later().create_rotation(x), [1, 1, 1, 1])
    assert Later().create_rotation(lanes([1, 2], [0, 0])).undefined is None


@pytest.mark.parametrize("builder", [Builder, MemoryBuilder])
def test_every_operation_of_the_builder_has_a_rule(builder):
    assert [n for n, f in vars(builder).items() if n.startswith("create_") and not hasattr(f, "carries")] == []


NO_OPERAND = (
    "program_id num_programs arange static_assert static_print device_print range static_range condition constexpr "
    "load store make_tensor_descriptor load_tensor_descriptor store_tensor_descriptor _experimental_descriptor_load "
    "_experimental_descriptor_store dot_scaled zeros zeros_like make_block_ptr advance"
).split()  # of these the last ones read memory or take a shape only: see test_memory.py
CALLS = {
    "flip": lambda f, x: f(x, 0),
    "full": lambda f, x: f((4,), own["sum"](x, 0), tl.float32), "where": lambda f, x: f(x > 0, x, x),
    "cdiv": lambda f, x: f(x.to(tl.int32), 2),
    **{n: lambda f, x: f(x, 4) for n in ("multiple_of", "max_contiguous", "max_constancy")},
    "minimum": lambda f, x: f(x, x), "maximum": lambda f, x: f(x, 0.0), "reshape": lambda f, x: f(x, (2, 2)),
    "view": lambda f, x: f(x, (2, 2)), "split": lambda f, x: f(own["reshape"](x, (2, 2)))[1], "cat": lambda f, x: f(x, x),
    "builtin_min": lambda f, x: f(x, x), "builtin_max": lambda f, x: f(own["sum"](x.to(tl.int32), 0), 3),
    "reduce": lambda f, x: f(x, 0, bind(keeps_larger)), "associative_scan": lambda f, x: f(x, 0, bind(keeps_larger)),
    "map_elementwise": lambda f, x: f(bind(folded), x, x), "max": lambda f, x: f(x, 0), "min": lambda f, x: f(x, 0),
    "argmax": lambda f, x: f(x, 0), "argmin": lambda f, x: f(x, 0), "sum": lambda f, x: f(x, 0), "topk": lambda f, x: f(x, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", sorted(n for n in language._TABLE if n not in NO_OPERAND and not n.startswith("atomic"))
)
def test_every_direct_version_carries_marks(name):
    """A name of the table that has no call here is called with the block alone: give it one when it takes more."""
    function, x = language._TABLE[name], lanes([1, 2, 3, 4], [0, 0, 0, 1])
    result = CALLS.get(name, lambda f, x: f(x))(function, x)
    assert marked(result).any()


def test_a_scalar_keeps_its_mark():
    total = own["sum"](lanes([1, 2], [0, 1]), 0)
    assert type(total) is Scalar and marked(total + 1) and marked(-total) and marked(total.to(tl.int32) * 0)
    assert marked(scalar(3, tl.int32) + total.to(tl.int32)) and not marked(scalar(3, tl.int32) + 1)
