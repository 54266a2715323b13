"""Elementwise arithmetic in every type against torch: promotion, rounding, wrap-around, casts, masks."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import jfa  # noqa: F401  (installs the launch hook)

N = 256
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@triton.jit
def binary(x, y, o, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, i < n, other=1), tl.load(y + i, i < n, other=1)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "floordiv":
        r = a // b
    elif OP == "mod":
        r = a % b
    elif OP == "and":
        r = a & b
    elif OP == "or":
        r = a | b
    elif OP == "xor":
        r = a ^ b
    elif OP == "lt":
        r = (a < b).to(tl.int32)
    elif OP == "ge":
        r = (a >= b).to(tl.int32)
    elif OP == "eq":
        r = (a == b).to(tl.int32)
    elif OP == "max":
        r = tl.maximum(a, b)
    else:
        r = min(a, b)
    tl.store(o + i, r.to(o.dtype.element_ty), i < n)


def sample(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(N, generator=generator, dtype=torch.float64) * 3).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -1000), min(info.max, 1000)
    values = torch.randint(low, high, (N,), generator=generator, dtype=torch.int64)
    return torch.where(values == 0, 7, values).to(dtype)


def run_binary(op, x, y, out_dtype):
    out = torch.empty(N, dtype=out_dtype)
    binary[(triton.cdiv(N, 64),)](x, y, out, N, OP=op, BLOCK=64)
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_float_arithmetic_rounds_once_to_nearest_even(op, dtype):
    x, y = sample(dtype, 0), sample(dtype, 1)
    expected = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op](x, y)
    assert torch.equal(run_binary(op, x, y, dtype), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_division_of_narrow_floats_is_done_in_float32(dtype):
    x, y = sample(dtype, 0), sample(dtype, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(run_binary("div", x, y, wide), x.to(wide) / y.to(wide))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["lt", "ge", "eq", "max", "min"])
def test_float_comparison_and_extrema(op, dtype):
    x, y = sample(dtype, 0), sample(dtype, 1)
    y[:50] = x[:50]
    if op in ("max", "min"):
        expected = (torch.maximum if op == "max" else torch.minimum)(x, y)
        assert torch.equal(run_binary(op, x, y, dtype), expected)
    else:
        expected = {"lt": torch.lt, "ge": torch.ge, "eq": torch.eq}[op](x, y).to(torch.int32)
        assert torch.equal(run_binary(op, x, y, torch.int32), expected)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "and", "or", "xor"])
def test_integer_arithmetic_wraps(op, dtype):
    x, y = sample(dtype, 0), sample(dtype, 1)
    functions = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    expected = torch.from_numpy(functions[op](x.numpy(), y.numpy()))
    assert torch.equal(run_binary(op, x, y, dtype), expected)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_division_truncates_as_in_c(dtype):
    x, y = sample(dtype, 0), sample(dtype, 1)
    expected = torch.div(x, y, rounding_mode="trunc")
    assert torch.equal(run_binary("floordiv", x, y, dtype), expected)
    assert torch.equal(run_binary("mod", x, y, dtype), torch.fmod(x, y))


@triton.jit
def promote(x, y, o, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i) + tl.load(y + i))


@pytest.mark.parametrize(
    "left,right,result",
    [
        (torch.int32, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.int64, torch.float16, torch.float16),
        (torch.int8, torch.int32, torch.int32),
        (torch.int32, torch.int64, torch.int64),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_mixed_types_promote_as_triton_does(left, right, result):
    x, y = sample(left, 0), sample(right, 1)
    out = torch.empty(N, dtype=result)
    promote[(1,)](x, y, out, BLOCK=N)
    assert torch.equal(out, (x.to(result) + y.to(result)).to(result))


@triton.jit
def cast(x, o, BLOCK: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if BITS:
        r = v.to(o.dtype.element_ty, bitcast=True)
    elif MODE is None:
        r = v.to(o.dtype.element_ty)
    else:
        r = v.to(o.dtype.element_ty, fp_downcast_rounding=MODE)
    tl.store(o + i, r)


def run_cast(x, dtype, bits=False, mode=None):
    out = torch.empty(x.shape, dtype=dtype)
    cast[(1,)](x, out, BLOCK=x.numel(), BITS=bits, MODE=mode)
    return out


@pytest.mark.parametrize(
    "target", [*FLOATS, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_casts_from_floats(source, target):
    x = sample(source, 3)
    assert torch.equal(run_cast(x, target).view(torch.uint8), x.to(target).view(torch.uint8))


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_casts_from_fp8_are_exact(source, target):
    x = torch.arange(256, dtype=torch.uint8).view(source)
    got, expected = run_cast(x, target), x.to(target)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0))


def test_fp8_saturates_to_the_largest_finite():
    x = torch.tensor([1e6, -1e6, 448.0, 470.0] * 4)
    assert run_cast(x, torch.float8_e4m3fn).float().tolist()[:4] == [448.0, -448.0, 448.0, 448.0]


def test_rounding_toward_zero():
    x = torch.tensor([1.0 + 2**-7 - 2**-20, -1.0 - 2**-7 + 2**-20, 3.9999, -0.1] * 4)
    expected = torch.from_numpy((x.numpy().view(np.uint32) & 0xFFFF0000).view(np.float32)).bfloat16()
    assert torch.equal(run_cast(x, torch.bfloat16, mode="rtz"), expected)
    assert (run_cast(x, torch.float16, mode="rtz").abs().double() <= x.abs().double()).all()


@pytest.mark.parametrize(
    "source,target",
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
        (torch.int32, torch.float32),
    ],
)
def test_bitcast_keeps_the_bits(source, target):
    x = sample(source, 5)
    assert torch.equal(run_cast(x, target, bits=True).view(torch.uint8), x.view(target).view(torch.uint8))


def test_bf16_examples_that_tritons_interpreter_gets_wrong():
    x, y = torch.tensor([2.5, -5.0] * 32).bfloat16(), torch.tensor([2.0, -2.0] * 32).bfloat16()
    out = torch.empty(64, dtype=torch.bfloat16)
    promote[(1,)](x, y, out, BLOCK=64)
    assert out[:2].tolist() == [4.5, -7.0]


@triton.jit
def scalars(o, a, b, f):
    """Run-time scalars: every operator once."""
    tl.store(o + 0, a + b)
    tl.store(o + 1, a - b)
    tl.store(o + 2, a * b)
    tl.store(o + 3, a // b)
    tl.store(o + 4, a % b)
    tl.store(o + 5, a << 2)
    tl.store(o + 6, a >> 1)
    tl.store(o + 7, a & b)
    tl.store(o + 8, -a)
    tl.store(o + 9, (a / b * 1000).to(tl.int32))
    tl.store(o + 10, (f * a).to(tl.int32))
    tl.store(o + 11, ~a)
    tl.store(o + 12, tl.where(a < b, a, b))
    tl.store(o + 13, min(a, b))
    tl.store(o + 14, max(a, 5))
    tl.store(o + 15, tl.cdiv(a, 4))
    tl.store(o + 16, 100 - a)
    tl.store(o + 17, 100 // b)
    tl.store(o + 18, (a > 0) & (b > 0))
    tl.store(o + 19, (not (a > 0)) or b > 100)


@pytest.mark.parametrize("a,b", [(17, 5), (-17, 5), (17, -5), (2147483647, 2)])
def test_scalar_operators(a, b):
    out = torch.zeros(20, dtype=torch.int32)
    scalars[(1,)](out, a, b, 1.5)

    def i32(v):
        return (v + 2**31) % 2**32 - 2**31

    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    hundred = 100 // abs(b) * (1 if b > 0 else -1)
    expected = [a + b, a - b, a * b, quotient, a - quotient * b, a << 2, a >> 1, a & b, -a]
    assert out[:9].tolist() == [i32(v) for v in expected]
    ratio = np.float32(a) / np.float32(b) * np.float32(1000)
    assert out[9].item() == int(max(min(np.trunc(ratio), 2**31 - 1), -(2**31)))
    product = np.float32(1.5) * np.float32(a)
    assert out[10].item() == int(max(min(np.trunc(product), 2**31 - 1), -(2**31)))
    assert out[11:15].tolist() == [~a, min(a, b), min(a, b), max(a, 5)]
    rounded = i32(a + 3)
    assert out[15].item() == abs(rounded) // 4 * (1 if rounded >= 0 else -1)
    assert out[16:18].tolist() == [i32(100 - a), hundred]
    assert out[18:].tolist() == [int(a > 0 and b > 0), int(not a > 0 or b > 100)]


@triton.jit
def unary(x, o, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if OP == "exp":
        r = tl.exp(v)
    elif OP == "exp2":
        r = tl.math.exp2(v)
    elif OP == "log":
        r = tl.log(v)
    elif OP == "log2":
        r = v.log2()
    elif OP == "sqrt":
        r = tl.sqrt(v)
    elif OP == "sqrt_rn":
        r = tl.math.sqrt_rn(v)
    elif OP == "rsqrt":
        r = tl.rsqrt(v)
    elif OP == "sin":
        r = tl.sin(v)
    elif OP == "cos":
        r = tl.cos(v)
    elif OP == "erf":
        r = tl.erf(v)
    elif OP == "floor":
        r = tl.floor(v)
    elif OP == "ceil":
        r = tl.ceil(v)
    elif OP == "abs":
        r = abs(v) if OP == "never" else tl.abs(v)
    elif OP == "sigmoid":
        r = tl.sigmoid(v)
    elif OP == "softmax":
        r = tl.softmax(v)
    elif OP == "clamp":
        r = tl.clamp(v, -0.5, 0.5)
    elif OP == "fma":
        r = tl.fma(v, v, v)
    elif OP == "div_rn":
        r = tl.div_rn(v, v + 3.0)
    elif OP == "fdiv":
        r = tl.fdiv(v, v + 3.0)
    else:
        r = -v
    tl.store(o + i, r)


REFERENCES = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "sqrt_rn": torch.sqrt,
    "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil,
    "abs": torch.abs, "sigmoid": torch.sigmoid, "softmax": lambda v: torch.softmax(v, 0), "clamp": lambda v: v.clamp(-0.5, 0.5),
    "fma": lambda v: (v.double() * v.double() + v.double()).float(), "div_rn": lambda v: v / (v + 3.0),
    "fdiv": lambda v: v / (v + 3.0),
    "neg": torch.neg,
}  # fmt: skip


@pytest.mark.parametrize("op", REFERENCES)
def test_unary_functions(op):
    x = sample(torch.float32, 9)
    if op in ("log", "log2", "sqrt", "sqrt_rn", "rsqrt"):
        x = x.abs() + 0.1
    out = torch.empty(N)
    unary[(1,)](x, out, OP=op, BLOCK=N)
    torch.testing.assert_close(out, REFERENCES[op](x), rtol=2e-6, atol=2e-7)


@triton.jit
def umulhi_and_shift(x, y, high, shifted, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(high + i, tl.umulhi(a, b))
    tl.store(shifted + i, a >> 3)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64], ids=str)
def test_high_half_of_a_product_and_logical_shift(dtype):
    bits = 32 if dtype == torch.uint32 else 64
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**bits, 64, dtype=f"uint{bits}") for _ in range(2))
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    high, shifted = torch.empty(64, dtype=dtype), torch.empty(64, dtype=dtype)
    umulhi_and_shift[(1,)](x, y, high, shifted, BLOCK=64)
    assert high.tolist() == [int(p) * int(q) >> bits for p, q in zip(a, b)]
    assert shifted.tolist() == [int(p) >> 3 for p in a]


@triton.jit
def random_numbers(o, p, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o + i, tl.rand(seed, i))
    tl.store(p + i, tl.randn(seed, i))


def test_random_numbers_are_uniform_and_normal():
    uniform, normal = torch.empty(4096), torch.empty(4096)
    random_numbers[(1,)](uniform, normal, 1234, BLOCK=4096)
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert abs(normal.mean()) < 0.06 and abs(normal.std() - 1) < 0.05
