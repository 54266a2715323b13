"""Gradients for scores up to 1e36, every backend and form of the backward on the emulator, against fp64.

P is recomputed as exp2(score * scale - lse). At such sizes one unit in the LSE's last place is more bits than fp32 has exponents:
P was 0 or infinite where it should have been 1.
"""

import dataclasses
import functools
import math

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import jfa  # noqa: E402
from jfa import block_sparse, reference  # noqa: E402
from jfa.kernels import portable  # noqa: E402
from jfa.kernels.base import Problem  # noqa: E402
from jfa.kernels.blackwell import launch as blackwell  # noqa: E402
from jfa.kernels.blackwell import mxfp8_launch  # noqa: E402
from jfa.kernels.blackwell.config import backward_config  # noqa: E402
from jfa.kernels.common.rounding import rounded_probabilities  # noqa: E402
from jfa.kernels.common.softmax import at_most_one, lse_to_subtract  # noqa: E402
from jfa.kernels.hopper import launch as hopper  # noqa: E402
from jfa.masks import Band  # noqa: E402
from tests.kernels.blackwell import cases  # noqa: E402
from tests.kernels.blackwell.cases import DEVICE, make  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="runs on the emulator")

CAUSAL = Band.make(causal=True)
PROBLEMS = {
    "self": dict(len_q=[140, 40], len_kv=[140, 40]),
    "cross, grouped, d128": dict(len_q=[150, 60], len_kv=[200, 130], heads=2, kv_heads=1, head_dim=128),
    "causal, d128": dict(len_q=[150, 30], len_kv=[150, 30], head_dim=128, band=CAUSAL),
    "window, fp16": dict(len_q=[150], len_kv=[140], band=Band.make(window_size=30), dtype=torch.float16),
    "pma, grouped": dict(len_q=24, len_kv=[140, 0, 200], heads=4, kv_heads=2, head_dim=128),
    "pma, long": dict(len_q=150, len_kv=[140, 30]),
    "causal, d192": dict(len_q=[70, 20], len_kv=[70, 90], head_dim=192, band=CAUSAL),
    "d192, dv128": dict(len_q=[70, 20], len_kv=[150, 90], head_dim=192, head_dim_v=128),
    "negative scale": dict(len_q=[140], len_kv=[150], sm_scale=-0.1),
}
LARGEST = [1e6, 1e12, 1e30, 1e36]
# fp16 holds no q and k whose products are larger
FP16_LARGEST = [1e6, 1e7]


def rows_of(problem: Problem) -> tuple[int, int]:
    """(query rows, key rows) that a sequence covers."""
    rows_q = problem.rows_q if problem.broadcast_q else int(problem.query_offset[-1])
    return rows_q, int(problem.key_offset[-1])


def with_scores_of(problem: Problem, q, k, largest: float):
    """q and k scaled by one factor, so that the largest score of a query and a key of any two sequences is ``largest``."""
    rows_q, rows_k = rows_of(problem)
    keys = k[:rows_k].double().repeat_interleave(problem.group_size, 1)
    scores = torch.einsum("qhd,khd->hqk", q[:rows_q].double(), keys) * problem.sm_scale
    grow = math.sqrt(largest / scores.abs().max().item())
    return (q * grow).to(q.dtype), (k * grow).to(k.dtype)


def assert_right(problem: Problem, q, k, v, dout, lse, got, want, tolerance: float) -> None:
    """Errors of dq and dk in units of one dS of 1, of dv in units of the largest dO row; P's own error is LSE's last place."""
    rows_q, rows_k = rows_of(problem)
    dp = (dout.double().norm(dim=2).max() * v[:rows_k].double().norm(dim=2).max()).item() * abs(problem.sm_scale)
    units = (k[:rows_k].double().abs().max() * dp, q[:rows_q].double().abs().max() * dp, dout.double().abs().max())
    known = lse[torch.isfinite(lse)].abs().max().item() * math.log2(math.e)
    of_p = math.expm1(8 * 2**-24 * known) if known < 2**21 else 0.0
    for name, g, w, unit in zip(("dq", "dk", "dv"), got, want, units):
        assert torch.isfinite(g).all(), f"{name} is not finite"
        error = ((g.double() - w.double()).abs().max() / unit).item()
        assert error <= tolerance + of_p, f"{name}: {error:.3g}"


def run_blackwell(problem, q, k, v, dout, form=None, deterministic=False):
    out, lse = blackwell.forward(problem, q, k, v)
    problem = dataclasses.replace(problem, deterministic=deterministic)
    config = backward_config(problem, form=form)
    return lse, blackwell.backward(problem, dout, None, q, k, v, out, lse, config=config)


def run_backend(backend, problem, q, k, v, dout, deterministic=False):
    out, lse = backend.forward(problem, q, k, v)
    problem = dataclasses.replace(problem, deterministic=deterministic)
    return lse, backend.backward(problem, dout, None, q, k, v, out, lse)


FORMS = {
    "portable": functools.partial(run_backend, portable),
    "hopper": functools.partial(run_backend, hopper),
    "hopper, deterministic": functools.partial(run_backend, hopper, deterministic=True),
    "blackwell": run_blackwell,
    "blackwell, one CTA": functools.partial(run_blackwell, form="single"),
    "blackwell, two CTAs": functools.partial(run_blackwell, form="pair"),
    "blackwell, deterministic": functools.partial(run_blackwell, form="single", deterministic=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_stay_right(name, form):
    if PROBLEMS[name].get("head_dim", 64) > 128 and form.startswith("blackwell"):
        if "head_dim_v" not in PROBLEMS[name] or form != "blackwell":
            pytest.skip("takes values of up to 128 columns, and head dims beyond 128 in one form only")
    for largest in FP16_LARGEST if PROBLEMS[name].get("dtype") == torch.float16 else LARGEST:
        problem, q, k, v, dout = make(**PROBLEMS[name], seed=3)
        q, k = with_scores_of(problem, q, k, largest)
        dout *= clear(lambda *x: cases.reference(problem, *x)[0], q, k, v)
        lse, got = FORMS[form](problem, q, k, v, dout)
        _, _, *want = cases.reference(problem, q, k, v, dout)
        assert_right(problem, q, k, v, dout, lse, got, want, 2**-6)


def clear(attend, q, k, v, least=0.9):
    """[rows, H, 1]: 1 for rows whose fp64 output stays when each number of q is changed by 2**-14, else 0.

    The others have scores so close that fp32 products decide which key is theirs: their dO is set to 0. More than ``least`` stay.
    """
    exact = [x.detach().double().nan_to_num() for x in (q, k, v)]
    noise = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    moved = attend(exact[0] * (1 + 2**-14 * noise), *exact[1:]) - attend(*exact)
    same = moved.abs().amax(2, keepdim=True) < 1e-3
    assert same.double().mean() > least
    return same


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_call_and_its_gradients_stay_right(largest, dtype):
    """fp32, which only the portable kernels take, and shared queries in both orders of its resident form."""
    for seed, queries in enumerate((5, 20, 70)):
        rng = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(rows, 2, 64, generator=rng) for rows in (queries, 210, 210))
        grow = math.sqrt(largest / (torch.einsum("qhd,khd->hqk", q, k).abs().max().item() / 8))
        q, k, v = ((x * f).to(dtype).requires_grad_() for x, f in ((q, grow), (k, grow), (v, 1.0)))
        offset = torch.tensor([0, 70, 70, 200, 210], dtype=torch.int32)
        out = jfa.jagged_flash_attention(q, k, v, None, offset, broadcast_q=True, backend="portable")
        dout = torch.randn(out.shape, generator=rng).to(dtype)
        dout *= clear(lambda *x: reference.attention(*x, None, offset, broadcast_q=True), q, k, v)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(reference.attention(*exact, None, offset, broadcast_q=True), exact, dout.double())
        got = torch.autograd.grad(out, (q, k, v), dout)
        of_p = math.expm1(8 * 2**-24 * largest * math.log2(math.e)) if largest < 1.4e6 else 0.0
        for name, g, w, unit in zip(("dq", "dk", "dv"), got, want, (grow, grow, 1.0)):
            assert torch.isfinite(g).all(), name
            assert ((g.double() - w).abs().max() / unit).item() <= 0.1 + 4 * of_p, (queries, name)


@pytest.mark.parametrize("backend", ["portable", "hopper", "blackwell"])
@pytest.mark.parametrize("largest", [1e6, 1e12, 1e36])
def test_block_lists(backend, largest):
    rng = torch.Generator().manual_seed(1)
    offset = torch.tensor([0, 300, 420], dtype=torch.int32)
    q, k, v = (torch.randn(420, 2, 64, generator=rng) for _ in range(3))
    lists = block_sparse.select_blocks(q, k, offset, offset, ratio=0.5)
    grow = math.sqrt(largest / (torch.einsum("qhd,khd->hqk", q, k).abs().max().item() / 8))
    q, k, v = ((x * f).bfloat16().requires_grad_() for x, f in ((q, grow), (k, grow), (v, 1.0)))
    out = jfa.jagged_flash_attention(q, k, v, offset, offset, block_lists=lists, backend=backend)
    dout = torch.randn(out.shape, generator=rng).bfloat16()
    dout *= clear(lambda *x: reference.attention(*x, offset, offset, block_lists=lists), q, k, v)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = reference.attention(*exact, offset, offset, block_lists=lists)
    want = torch.autograd.grad(want, exact, dout.double())
    of_p = math.expm1(8 * 2**-24 * largest * math.log2(math.e)) if largest < 1.4e6 else 0.0
    for name, g, w, unit in zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), want, (grow, grow, 1)):
        assert torch.isfinite(g).all(), name
        assert ((g.double() - w).abs().max() / unit).item() <= 0.1 + 4 * of_p, name


# ------------------------------------------------------------------------------------------------- ties, NaN, row constants


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("largest", [3e4, 1e12, 1e36])
def test_ties(form, largest):
    """Two equal keys and values. Their P is 1/2 as long as an LSE can say so; it is 1, never more, where it cannot."""
    problem, q, k, v, dout = make([40], [90], head_dim=64, seed=1)
    k[1:90] *= 0.1
    k[60], v[60] = k[0], v[0]
    q[:40] = (q[:40].abs() + 0.5) * k[0].sign()
    q, k = with_scores_of(problem, q, k, largest)
    lse, got = FORMS[form](problem, q, k, v, dout)
    _, _, *want = cases.reference(problem, q, k, v, dout)
    assert want[2][0].double().norm() > 0.9 * dout[:40].double().sum(0).norm() / 2
    got[2][[0, 60]] /= 1 if largest < 1e6 else 2
    assert_right(problem, q, k, v, dout, lse, got, want, 2**-5)


@pytest.mark.parametrize("form", FORMS)
def test_nan_still_spreads(form):
    problem, q, k, v, dout = make([40], [90], seed=1)
    q[7] = float("nan")
    _, (dq, dk, dv) = FORMS[form](problem, q, k, v, dout)
    assert dq[7].isnan().all() and not dq[:7].isnan().any() and not dq[8:40].isnan().any()
    assert dk[:90].isnan().all() and dv[:90].isnan().all()


@pytest.mark.parametrize("name", ["self", "pma, grouped", "causal, d128"])
@pytest.mark.parametrize("largest", [1e6, 1e12, 1e36])
@pytest.mark.parametrize("deterministic", [False, True])
def test_mxfp8(name, largest, deterministic):
    """Against fp64 on the operands as the forward rounded them; P and dS are rounded to e4m3, so errors are coarse."""
    problem, q, k, v, dout = make(**PROBLEMS[name], seed=3)
    problem = dataclasses.replace(problem, deterministic=deterministic)
    q, k = with_scores_of(problem, q, k, largest)
    rounded = [x.dequantize().to(q.dtype) for x in mxfp8_launch.encode_inputs(problem, q, k, v)]
    dout *= clear(lambda *x: cases.reference(problem, *x)[0], *rounded)
    out, lse = mxfp8_launch.forward(problem, q, k, v)
    got = mxfp8_launch.backward(problem, dout, None, q, k, v, out, lse)
    _, _, *want = cases.reference(problem, *rounded, dout)
    assert_right(problem, q, k, v, dout, lse, got, want, 2**-2)


@triton.jit
def constants_kernel(lse_ptr, out_ptr):
    at = tl.arange(0, 16)
    tl.store(out_ptr + at, lse_to_subtract(tl.load(lse_ptr + at)))


@triton.jit
def capped_kernel(x_ptr, out_ptr, paired_ptr, DTYPE: tl.constexpr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, at_most_one(x))
    tl.store(paired_ptr + at, rounded_probabilities(x, DTYPE))


def test_row_constants_are_lowered_only_where_they_are_huge():
    inf = math.inf
    lse = [-inf, inf, 0.0, -3.5, 80.0, 1e4, -1e6, 1.4e6, 1.5e6, -1.5e6, 1e9, -1e12, 1e30, 1e36, -1e36, 3e38]
    got = torch.empty(16)
    constants_kernel[(1,)](torch.tensor(lse), got)
    for x, y in zip(lse, got.tolist()):
        exact = x * math.log2(math.e)
        if abs(exact) > torch.finfo(torch.float32).max:
            assert y == (inf if x == -inf else exact and inf)
        elif abs(exact) < 2**21:
            assert abs(y - exact) <= 2**-23 * abs(exact)
        else:
            share = min(abs(exact) * 2**-42, 2**-16)
            assert 0.75 * share * abs(exact) < exact - y < 1.25 * share * abs(exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_above_one_become_one_and_nan_stays(dtype):
    x = torch.tensor(
        [0.0, 1.0, 1.0 + 2**-20, 1.2, 0.3337, 1e-30, math.inf, math.nan, 3e38, 0.999, 0.9999, 7, 0.5, 2, 1, 0]
    )
    out, paired = torch.empty(16), torch.empty(16, dtype=dtype)
    capped_kernel[(1,)](x, out, paired, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
    torch.testing.assert_close(out, x.clamp(max=1.0), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(paired, x.clamp(max=1.0).to(dtype), rtol=0, atol=0, equal_nan=True)
