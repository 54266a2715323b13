"""Scores of 1 to 1e36 with products that go into sums unrounded, as on a GPU, and without: every backend, against fp64.

An exponent ``s * scale - m`` whose product is not rounded while m was is not 0 for the largest score. Up to HUGE it is small;
beyond, rows are scaled by a power of two (`jfa.kernels.common.softmax.Scale`). Without that an H200 gave NaN from 1e12 on.
"""

import math
import random

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("greenlet")

import triton.language as tl  # noqa: E402

import jfa  # noqa: E402
import jfa.emulator as emulator  # noqa: E402
from jfa import block_sparse, reference  # noqa: E402
from jfa.kernels.common import softmax  # noqa: E402
from jfa.kernels.common.softmax import HUGE, scale_of  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.gpu.run_huge import LARGEST, WAYS, check  # noqa: E402
from tests.kernels.blackwell import cases  # noqa: E402
from tests.kernels.blackwell.cases import DEVICE, make  # noqa: E402
from tests.kernels.test_huge_gradients import FORMS, assert_right, clear, rows_of, with_scores_of  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="runs on the emulator")

INF = math.inf
CONTRACT = pytest.mark.parametrize("contract", [False, True], ids=["rounded", "contracted"])
BACKENDS = ["portable", "hopper", "blackwell"]


# ------------------------------------------------------------------------------------------- what a GPU runs, with its arithmetic


@pytest.mark.parametrize("largest", [1e8, 1e12, 1e36])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_the_gpus_problems_are_right(backend, way, largest):
    with emulator.options(contract=True):
        assert check(backend, 64, way, largest, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_the_gpus_problems_of_larger_head_dims_are_right(backend, way, dim):
    with emulator.options(contract=True):
        assert all(check(backend, dim, way, largest, device="cpu") for largest in LARGEST)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_without_the_coarse_factor_they_are_not(backend, monkeypatch):
    """The fault as the H200 shows it, which only contraction shows here."""
    monkeypatch.setattr(softmax, "HUGE", tl.constexpr(INF))
    assert check(backend, 64, "full", 1e12, device="cpu")
    with emulator.options(contract=True):
        assert check(backend, 64, "full", 1e6, device="cpu")
        assert not check(backend, 64, "full", 1e12, device="cpu")


# ---------------------------------------------------------------------------------------------------------- random problems

SIZES = [1.0, 1e3, 1e6, 1e8, 1e12, 1e30, 1e36]
BANDS = [Band(), Band(), Band.make(causal=True), Band.make(causal="top_left"), Band.make(window_size=(30, 9))]


def random_problem(seed: int):
    """(form, problem, q, k, v, dout) of a jagged problem with zeros and tails, any mask, grouping, head dim and size of scores."""
    rng = random.Random(seed)
    form = list(FORMS)[seed % len(FORMS)]
    dims = [32, 64, 96, 128] + ([160, 192] if "blackwell" not in form else [])
    some = lambda: rng.choice([0, 1, rng.randint(2, 60), rng.randint(61, 150)])
    batches, kv_heads = rng.randint(1, 3), rng.choice([1, 2])
    dim = rng.choice([64, 128] if "blackwell" in form else dims)
    len_q = rng.choice([rng.randint(1, 90), [some() for _ in range(batches)]])
    case = make(
        len_q if isinstance(len_q, int) or any(len_q) else [17, *len_q[1:]],
        [rng.randint(1, 200), *(some() for _ in range(batches - 1))],
        heads=kv_heads * rng.choice([1, 2]),
        kv_heads=kv_heads,
        head_dim=dim,
        band=rng.choice(BANDS),
        sm_scale=rng.choice([None, None, 0.1, -0.3, 1.0, math.log(2)]),
        seed=seed,
    )
    problem, q, k, *rest = case
    return form, problem, *with_scores_of(problem, q, k, SIZES[seed // 2 % len(SIZES)]), *rest


def assert_random_problem_is_right(seed: int):
    form, problem, q, k, v, dout = random_problem(seed)
    if SIZES[seed // 2 % len(SIZES)] >= 1e6:
        dout *= clear(lambda *x: cases.reference(problem, *x)[0], q, k, v, least=0.5)
    with emulator.options(policy=("eager", "lazy", "random")[seed % 3], seed=seed, contract=seed % 2 == 1):
        lse, got = FORMS[form](problem, q, k, v, dout)
    _, want_lse, *want = cases.reference(problem, q, k, v, dout)
    assert_lse(problem, q, k, lse, want_lse)
    most = max(
        1.0, (want[2].abs().max() / dout.abs().max()).item()
    )  # a dv that sums many rows is rounded at its own size
    assert_right(problem, q, k, v, dout, lse, got, want, 2**-6 * most)


def assert_lse(problem, q, k, lse, want):
    """Products are fp32 sums: an LSE may be off by their roundings, of the size of its row's largest products."""
    rows_q, rows_k = rows_of(problem)
    sizes = q[:rows_q].double().norm(dim=2).max() * k[:rows_k].double().norm(dim=2).max() * abs(problem.sm_scale)
    finite = torch.isfinite(want)
    if not finite.any():
        pytest.skip("no row sees a key")
    assert torch.equal(torch.isfinite(lse), finite)
    assert (lse.double() - want)[finite].abs().max().nan_to_num() <= 2**-18 * sizes + 2**-10


# Every form at every size, an odd and an even seed each: 98 problems, of which CI runs a few.
SEEDS = range(2 * len(SIZES) * len(FORMS))


@pytest.mark.parametrize("seed", [s if s % 7 == 3 else pytest.param(s, marks=pytest.mark.slow) for s in SEEDS])
def test_random_problems(seed):
    assert_random_problem_is_right(seed)


@CONTRACT
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_lists(backend, contract):
    rng = torch.Generator().manual_seed(2)
    offset = torch.tensor([0, 260, 330], dtype=torch.int32)
    q, k, v = (torch.randn(330, 2, 64, generator=rng) for _ in range(3))
    lists = block_sparse.select_blocks(q, k, offset, offset, ratio=0.6)
    grow = math.sqrt(1e15 / (torch.einsum("qhd,khd->hqk", q, k).abs().max().item() / 8))
    q, k, v = (x.bfloat16() for x in (q * grow, k * grow, v))
    exact = [x.double() for x in (q, k, v)]
    options = dict(block_lists=lists, return_lse=True)
    with emulator.options(contract=contract):
        out, lse = jfa.jagged_flash_attention(q, k, v, offset, offset, backend=backend, **options)
    want, want_lse = reference.attention(*exact, offset, offset, **options)
    rows = clear(lambda *x: reference.attention(*x, offset, offset, block_lists=lists), q, k, v)
    assert ((out.double() - want) * rows).abs().max() < 0.03
    torch.testing.assert_close(lse.double(), want_lse, rtol=2**-18, atol=2**-18 * 1e15)


# -------------------------------------------------------------------------------------- maxima that cross HUGE between blocks


def one_score_per_key(scores, dtype, scale):
    """(q, k, v) of one query and one key per score: q[0] * k[j, 0] is scores[j] / scale as near as the type gets; v is random."""
    rng = torch.Generator().manual_seed(4)
    raw = torch.tensor(scores, dtype=torch.float64) / scale
    level = 2.0 ** (torch.log2(raw.abs().max()).item() // 2)
    q, k = torch.zeros(1, 1, 64), torch.zeros(len(scores), 1, 64)
    q[0, 0, 0] = level
    k[:, 0, 0] = raw / level
    v = torch.randn(len(scores), 1, 64, generator=rng)
    return q.to(dtype), k.to(dtype), v.to(dtype)


HUGE_LN = HUGE.value * math.log(2)  # HUGE as a natural score
STEPS = [0.5, -3.0, 0.93, -0.93, 1.08, -1.08, 2.9, -0.01, 1.9, -1.9]
ORDERS = {
    "rising": sorted,
    "falling": lambda x: sorted(x, reverse=True),
    "mixed": lambda x: random.Random(1).sample(x, len(x)),
    "falling below 0": lambda x: [-abs(y) for y in sorted(x, key=abs)],
    "rising below 0": lambda x: [-abs(y) for y in sorted(x, key=abs, reverse=True)],
}


@CONTRACT
@pytest.mark.parametrize("sm_scale", [0.11, -0.11])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_maximum_crosses_the_limit_between_blocks(backend, order, sm_scale, contract):
    """A level per stretch of 40 keys, so blocks of 64 and 128 hold some below and some beyond; the largest is one key."""
    levels = ORDERS[order]([step * HUGE_LN for step in STEPS])
    scores = [level - 0.3 * abs(level) * (j % 40 != 7) for level in levels for j in range(40)]
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = one_score_per_key(scores, dtype, sm_scale)
        if not (torch.isfinite(q).all() and torch.isfinite(k).all()):
            continue
        offsets = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, len(scores)], dtype=torch.int32)
        options = dict(sm_scale=sm_scale, return_lse=True)
        with emulator.options(contract=contract):
            out, lse = jfa.jagged_flash_attention(q, k, v, *offsets, backend=backend, **options)
        want, want_lse = reference.attention(q.double(), k.double(), v.double(), *offsets, **options)
        assert (out.double() - want).abs().max() < 0.02
        torch.testing.assert_close(lse.double(), want_lse, rtol=2**-21, atol=0)


@CONTRACT
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_holds_probabilities_up_to_the_limit(backend, contract):
    """Below the limit an exponent is off by the maximum's rounding: 2 to that power must fit fp16."""
    rng = torch.Generator().manual_seed(0)
    offset = torch.tensor([0, 150, 280], dtype=torch.int32)
    for log2 in (26.5, 27.5, 28.5, 29.5):
        q, k, v = (torch.randn(280, 1, 64, generator=rng) for _ in range(3))
        grow = math.sqrt(2**log2 * math.log(2) / (torch.einsum("qhd,khd->hqk", q, k) / 8).abs().max().item())
        q, k, v = (x.half() for x in (q * grow, k * grow, v))
        with emulator.options(contract=contract):
            out = jfa.jagged_flash_attention(q, k, v, offset, offset, backend=backend)
        want = reference.attention(*(x.double() for x in (q, k, v)), offset, offset)
        rows = clear(lambda *x: reference.attention(*x, offset, offset), q, k, v)
        assert ((out.double() - want) * rows).abs().max() < 0.01


# ----------------------------------------------------------------------------------------------------------- the two factors


@triton.jit
def factors_kernel(scores, fine, maxima, factors, lse, N: tl.constexpr, RAW: tl.constexpr):
    at = tl.arange(0, N)
    scale = scale_of(fine, RAW)
    top, factor = scale.of_rows(tl.load(scores + at))
    tl.store(maxima + at, top)
    tl.store(factors + at, factor)
    tl.store(lse + at, scale.lse(top, tl.full([N], 1.0, tl.float32)))


FINE = [1.4426950408889634, 0.125, 0.18, 1.0, 1 - 2.0**-24, 1 + 2.0**-23, 3.999, 2.0**-120 * 1.44, 77.7]
FINE += [
    1 - 2.0**-22,
    1 - 3 * 2.0**-23,
    1 - 2.0**-21,
]  # the power of two above is about as near as the limit for raw maxima


@CONTRACT
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("fine", [sign * x for x in FINE for sign in (1, -1)])
def test_maxima_keep_their_order_and_the_lse_its_size(fine, raw, contract):
    """Around the limit by single units of the last place, and up to 1e36 in log2 units.

    With raw maxima the limit is lower by 2**-21: between the two, an LSE may be that of the other factor, if that is as near.
    """
    fine = torch.tensor(fine).item()
    edge = torch.tensor(HUGE.value / abs(fine))
    near = [edge]
    for towards in (INF, 0.0):
        x = edge
        for _ in range(20):
            near.append(x := torch.nextafter(x, torch.tensor(towards)))
    spread = [f * edge for f in (1e-9, 1e-3, 0.4, 0.9, 0.999, 1.001, 1.1, 1.99, 2.01, 3.0, 1e9, 1e20)]
    sizes = torch.stack([*near, *spread])
    sizes = sizes[torch.isfinite(sizes) & (sizes * abs(fine) < 1e37)]
    scores = torch.zeros(128)
    scores[: len(sizes)], scores[64 : 64 + len(sizes)] = sizes, -sizes
    maxima, factors, lse = (torch.empty(128) for _ in range(3))
    with emulator.options(contract=contract):
        factors_kernel[(1,)](scores, fine, maxima, factors, lse, N=128, RAW=raw)
    order = (scores.double() * fine).argsort(stable=True)
    assert (maxima[order].diff() >= 0).all()
    coarse = factors[factors != fine]
    assert (
        torch.equal(coarse, coarse.sign() * 2.0 ** coarse.abs().log2().round()) and (coarse.abs() < 2 * abs(fine)).all()
    )
    assert ((maxima.double() == scores.double() * factors.double()) | (maxima.abs() <= HUGE.value)).all()
    if len(coarse):  # else the factor itself is a power of two
        assert (maxima.abs()[factors == fine] <= HUGE.value).all()
    torch.testing.assert_close(
        lse.double(), scores.double() * fine * math.log(2), rtol=2**-21 + 2**-23 if raw else 2**-22, atol=0
    )


@pytest.mark.parametrize("raw", [False, True])
def test_rows_without_keys_and_nan(raw):
    scores = torch.full((128,), -INF)
    scores[1] = math.nan
    maxima, factors, lse = (torch.empty(128) for _ in range(3))
    factors_kernel[(1,)](scores, 0.3, maxima, factors, lse, N=128, RAW=raw)
    assert (maxima[2:] == -INF).all() and (lse[2:] == -INF).all() and maxima[1].isnan() and lse[1].isnan()
