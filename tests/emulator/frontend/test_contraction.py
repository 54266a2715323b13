"""The option `contract`: fp32 products go into sums and differences unrounded, as the compiler's fused multiply-adds have them."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("greenlet")

import triton.language as tl  # noqa: E402

import jfa.emulator as emulator  # noqa: E402
from jfa.compiled import compile_configs, ship_source  # noqa: E402
from jfa.emulator.frontend.mathlib import rounded_once  # noqa: E402
from jfa.kernels.compile_config import CompileConfig  # noqa: E402

emulator.install()
N = 32


@triton.jit
def product_of(a, b):
    return a * b


# Each kernel computes what `EXPECTED` says of x, y and z, blocks of N numbers.


@triton.jit
def product_minus(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * tl.load(y + i) - tl.load(z + i))


@triton.jit
def minus_product(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(z + i) - tl.load(x + i) * tl.load(y + i))


@triton.jit
def product_plus(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.load(x + i) * tl.load(y + i)
    total += tl.load(z + i)
    tl.store(o + i, total)


@triton.jit
def plus_product(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(z + i) + product_of(tl.load(x + i), tl.load(y + i)))


@triton.jit
def of_constant(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, 0.3 * tl.load(x + i) - tl.load(z + i))


@triton.jit
def two_products(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * tl.load(y + i) - tl.load(z + i) * tl.load(y + i))


@triton.jit
def used_twice(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.load(x + i) * tl.load(y + i)
    tl.store(o + N + i, product)
    tl.store(o + i, product - tl.load(z + i))


@triton.jit
def maximum_first(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.maximum(tl.load(x + i) * tl.load(y + i), -1e30)
    tl.store(o + i, product - tl.load(z + i))


@triton.jit
def masked_first(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.where(tl.load(x + i) > -9.0, tl.load(x + i) * tl.load(y + i), 0.0)
    tl.store(o + i, product - tl.load(z + i))


@triton.jit
def negated_first(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, -(tl.load(x + i) * tl.load(y + i)) + tl.load(z + i))


@triton.jit
def of_scalars(x, y, z, o, N: tl.constexpr):
    tl.store(o, tl.load(x) * tl.load(y) - tl.load(z))


@triton.jit
def in_a_matrix(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.load(x + i).reshape(4, 8) * tl.load(y + i).reshape(4, 8)
    tl.store(o + i, (product - tl.load(z + i).reshape(4, 8)).reshape([N]))


@triton.jit
def moved(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = (tl.load(x + i) * tl.load(y + i)).reshape(4, 8)
    product = tl.trans(product)[:, None, :].reshape(8, 4)
    tl.store(o + i, tl.trans(product).reshape([N]) - tl.load(z + i))


@triton.jit
def halves(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    left, right = (tl.load(x + i) * tl.load(y + i)).reshape(N // 2, 2).split()
    tl.store(o + i, tl.join(left, right).reshape([N]) - tl.load(z + i))


@triton.jit
def undefined_lanes(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    keep = i < N - 3
    tl.store(o + i, tl.load(x + i, mask=keep) * tl.load(y + i, mask=keep) - tl.load(z + i), mask=keep)
    tl.store(o + i, tl.load(x + i) * tl.load(y + i) - tl.load(z + i), mask=i >= N - 3)


def fused(x, y, z):
    """x * y + z of fp32 numbers, rounded once, by exact fractions."""
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist())]
    return torch.tensor([nearest(e) for e in exact])


def nearest(exact: Fraction) -> float:
    """The float32 number nearest to a fraction, to even where two are."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return float(min(around, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1)))


def rounded(x, y, z):
    return x * y + z


C = torch.tensor(0.3)
EXPECTED = {
    product_minus: lambda x, y, z: fused(x, y, -z),
    minus_product: lambda x, y, z: fused(-x, y, z),
    product_plus: fused,
    plus_product: fused,
    of_constant: lambda x, y, z: fused(x, C.expand(N), -z),
    two_products: lambda x, y, z: fused(x, y, -(z * y)),
    used_twice: lambda x, y, z: torch.cat([fused(x, y, -z), x * y]),
    of_scalars: lambda x, y, z: fused(x[:1], y[:1], -z[:1]),
    in_a_matrix: lambda x, y, z: fused(x, y, -z),
    moved: lambda x, y, z: fused(x, y, -z),
    halves: lambda x, y, z: fused(x, y, -z),
    undefined_lanes: lambda x, y, z: fused(x, y, -z),
    maximum_first: lambda x, y, z: rounded(x, y, -z),
    masked_first: lambda x, y, z: rounded(x, y, -z),
    negated_first: lambda x, y, z: rounded(-x, y, z),
}


def numbers(near: bool):
    """x, y and z of N fp32 numbers each; ``near``: z is the rounded product, so that only its rounding is left."""
    rng = torch.Generator().manual_seed(7)
    x, y, z = (torch.randn(N, generator=rng) for _ in range(3))
    return x, y, x * y if near else z


def run(kernel, x, y, z, like, **options):
    out = torch.zeros_like(like)
    with emulator.options(**options):
        kernel[(1,)](x, y, z, out, N=N)
    return out


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("kernel", EXPECTED, ids=lambda k: k.fn.__name__)
def test_a_product_goes_into_a_sum_unrounded(kernel, near):
    x, y, z = numbers(near)
    want = EXPECTED[kernel](x, y, z)
    assert torch.equal(run(kernel, x, y, z, want, contract=True), want)


SEPARATE = [masked_first, maximum_first, negated_first]
DIFFERENCES = [product_minus, minus_product, used_twice, of_scalars, in_a_matrix, moved, halves, undefined_lanes]


@pytest.mark.parametrize("kernel", [*DIFFERENCES, *SEPARATE], ids=lambda k: k.fn.__name__)
def test_without_the_option_every_operation_rounds(kernel):
    """z is the rounded product: a difference of the two is exactly 0."""
    x, y, z = numbers(near=True)
    want = EXPECTED[kernel](x, y, z)
    assert not run(kernel, x, y, z, want)[:N].any()
    assert bool(want[:N].any()) == (kernel in DIFFERENCES)


def test_a_launch_may_forbid_it():
    x, y, z = numbers(near=True)
    out = torch.ones(N)
    with emulator.options(contract=True):
        product_minus[(1,)](x, y, z, out, N=N, enable_fp_fusion=False)
    assert not out.any()


@triton.jit
def fp16_product(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    product = tl.load(x + i).to(tl.float16) * tl.load(y + i).to(tl.float16)
    tl.store(o + i, product.to(tl.float32) - tl.load(z + i))


def test_products_of_narrow_types_stay_rounded():
    x, y, z = numbers(near=False)
    want = (x.half() * y.half()).float() - z
    assert torch.equal(run(fp16_product, x, y, z, want, contract=True), want)


@triton.jit
def row_sums(x, y, o, N: tl.constexpr):
    i = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o + tl.arange(0, 4), tl.sum(tl.load(x + i) * tl.load(y + i), 1))


def test_a_sum_over_an_axis_adds_pairs_unrounded():
    """Neighbours cancel but for the rounding of the second product: without contraction sums are 0."""
    rng = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, N, generator=rng), torch.randn(4, N, generator=rng)
    x[:, 1::2], y[:, 1::2] = -x[:, ::2], y[:, ::2]
    plain, contracted = torch.ones(4), torch.ones(4)
    row_sums[(1,)](x, y, plain, N=N)
    with emulator.options(contract=True):
        row_sums[(1,)](x, y, contracted, N=N)
    left = (x.double() * y.double() - (x * y).double())[:, 1::2].sum(1)
    assert not plain.any() and left.all()
    torch.testing.assert_close(contracted.double(), left, rtol=1e-5, atol=0)


@triton.jit
def welford(a_mean, a_weight, b_mean, b_weight):
    weight = a_weight + b_weight
    delta = b_mean - a_mean
    return a_mean + delta * (b_weight / weight), weight


@triton.jit
def means(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i) * tl.load(y + i)
    mean, weight = tl.reduce((value, value * 0.0 + 1.0), 0, welford)
    tl.store(o, mean)
    tl.store(o + 1, tl.sum(tl.cumsum(value, 0) * 0.0) + weight)


def test_combine_functions_of_products():
    x, y, _ = numbers(near=False)
    out = torch.zeros(2)
    with emulator.options(contract=True):
        means[(1,)](x, y, out, N=N)
    torch.testing.assert_close(out, torch.tensor([(x * y).mean(), float(N)]))


def test_sums_are_rounded_once():
    """Sums of a product of 48 bits and a number far smaller, whose float64 sum lies between two float32 numbers."""
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.integers(2**47, 2**48, 4000).astype(np.float64), -30)
    bits = x.view(np.int64) & ~np.int64((1 << 29) - 1) | np.int64(1 << 28)
    x[::2] = bits.view(np.float64)[::2]  # in the middle of two float32 numbers
    y = rng.choice([1e-9, -1e-9, 1e-30, -1e-30, 0.0], 4000) * x
    got = rounded_once(x, y)
    want = [nearest(Fraction(a) + Fraction(b)) for a, b in zip(x.tolist(), y.tolist())]
    assert np.array_equal(got, np.array(want, np.float32))
    assert (got != (x + y).astype(np.float32)).sum() > 100  # rounding twice would differ


# ---- the compiler beside it

FUSED = [product_minus, minus_product, product_plus, plus_product, of_constant, two_products, used_twice, of_scalars]


@pytest.mark.skipif(not triton.__version__.endswith("+fb"), reason="jfa compile needs fbtriton")
def test_the_compiler_fuses_where_the_emulator_does(tmp_path):
    types = dict.fromkeys(("x", "y", "z", "o"), "*fp32")
    configs = []
    for kernel in [*FUSED, masked_first, maximum_first]:
        name = kernel.fn.__name__
        path = tmp_path / f"{name}.py"
        path.write_text(ship_source(kernel))
        configs.append(CompileConfig(name, f"{path}:{name}", types, {"N": N}, (90,), 1))
    for report in compile_configs(configs, folders={"ptx": str(tmp_path)}):
        assert not report.error, report.error
        text = Path(report.files["ptx"]).read_text()
        fused, sums = (
            len(re.findall(pattern, text)) for pattern in (r"\bfma\.rn\.f32", r"\b(?:add|sub)\.(?:rn\.)?f32")
        )
        alone = report.name.endswith("_first")
        assert (fused, sums) == ((0, 1) if alone else (1, 0)), report.name
