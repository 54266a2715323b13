"""What chapter 16 says about MXFP8: a shared power of two buys range and no precision, and what leaves the range is lost."""

import inspect
import math

import pytest
import torch

from jfa.emulator.rates import B200
from jfa.kernels.blackwell import forward, mxfp8_forward
from jfa.layout import offsets_from_lengths
from jfa.mxfp8 import GROUP, P_SCALE_LOG2, encode, quantize_jagged, scale_codes, scale_values

LOG2_E = math.log2(math.e)


def rounded(x, dim):
    """x in MXFP8 with groups along ``dim``, as fp32."""
    groups = x.float().movedim(dim, -1).unflatten(-1, (-1, GROUP))
    codes = scale_codes(groups.abs().amax(-1))[..., None]
    return (encode(groups, codes).float() * scale_values(codes)).flatten(-2).movedim(-1, dim)


def squares(x):
    """x with one scale per 32 x 32."""
    parts = x.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    codes = scale_codes(parts.abs().amax((1, 3)))[:, None, :, None]
    return (encode(parts, codes).float() * scale_values(codes)).flatten(2).flatten(0, 1)


def error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(scope="module")
def problem():
    """q [256, 128], k, v [512, 128], dout, and fp64's P and O."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(n, 128, generator=g) for n in (256, 512, 512, 256))
    p = torch.softmax(q.double() @ k.double().T / math.sqrt(128), 1)
    return q, k, v, dout, p, p @ v.double()


def attention(q, k, v, form, behind=0.0):
    """O with P in a form: "own" scales, the "fixed" one, or "bf16"; the maximum ``behind`` octaves too low."""
    s = rounded(q, 1) @ rounded(k, 1).T * (LOG2_E / math.sqrt(128))
    p = torch.exp2(s - s.amax(1, keepdim=True) + behind)
    total = p.sum(1, keepdim=True)
    if form == "own":
        p = rounded(p, 1)
    else:
        p = encode(p, torch.tensor([127 + P_SCALE_LOG2])).float() * 2.0**P_SCALE_LOG2
    return p @ rounded(v, 0) / total


def test_a_scale_per_32_of_p_is_no_better_than_one_for_all(problem):
    q, k, v, _, _, out = problem
    own, fixed = (error(attention(q, k, v, form), out) for form in ("own", "fixed"))
    assert own == pytest.approx(0.0534, rel=0.01) and fixed == pytest.approx(own, rel=1e-3)


def test_bf16_errs_a_tenth_of_that(problem):
    q, k, v, _, _, out = problem
    q, k, v = (t.bfloat16().float() for t in (q, k, v))
    p = torch.softmax(q @ k.T / math.sqrt(128), 1).bfloat16().float()
    assert error(p @ v, out) < 0.004


@pytest.mark.parametrize("behind, expected", [(0, 0.053), (0.8, 0.054), (1, 0.074), (2, 0.29), (8, 0.97)])
def test_a_stale_maximum_saturates_p_beyond_the_bound(problem, behind, expected):
    q, k, v, _, _, out = problem
    assert error(attention(q, k, v, "fixed", behind), out) == pytest.approx(expected, rel=0.02)
    assert (behind <= math.log2(448 / 2**-P_SCALE_LOG2)) == (expected < 0.06)


@pytest.mark.parametrize("above, expected", [(4, 0.0534), (8, 0.0535), (10, 0.0558), (12, 0.098)])
def test_a_maximum_that_is_too_high_costs_nothing_for_eight_octaves(problem, above, expected):
    q, k, v, _, _, out = problem
    assert error(attention(q, k, v, "fixed", -above), out) == pytest.approx(expected, rel=0.01)


def test_the_bound_is_four_fifths_of_an_octave():
    assert round(math.log2(448 / 2**-P_SCALE_LOG2), 3) == 0.807


def test_one_scale_per_square_serves_both_products_of_ds(problem):
    q, k, v, dout, p, out = problem
    ds = p * (dout.double() @ v.double().T - (out * dout.double()).sum(1, keepdim=True))
    dq, dk = ds @ k.double(), ds.T @ q.double()
    both = squares(ds).double()
    for own, square, exact in (
        (rounded(ds, 1).double() @ k.double(), both @ k.double(), dq),
        (rounded(ds, 0).double().T @ q.double(), both.T @ q.double(), dk),
    ):
        assert error(square, exact) == pytest.approx(error(own, exact), rel=1e-3)
        assert 0.025 < error(square, exact) < 0.028


@pytest.mark.parametrize("octaves, expected", [(10, 0.0267), (12, 0.028), (14, 0.066), (16, 0.26), (20, 1.0)])
def test_a_group_shared_with_a_larger_stranger_is_lost_when_it_leaves_the_range(problem, octaves, expected):
    v = problem[2]
    mine, packed = v[:16], torch.cat([v[:16], v[16:32] * 2.0**octaves])
    assert error(rounded(packed, 0)[:16], mine) == pytest.approx(expected, rel=0.03)
    own = quantize_jagged(packed[:, None], offsets_from_lengths([16, 16]), "tokens").dequantize()[:16, 0]
    assert error(own, mine) < 0.027


def test_one_nan_takes_32_values_along_and_no_stranger():
    x = torch.randn(178, 1, 8, generator=torch.Generator().manual_seed(1))
    x[45, 0, 3] = math.nan
    found = quantize_jagged(x, offsets_from_lengths([40, 70, 20, 48]), "tokens").dequantize()
    assert found.isnan().nonzero()[:, 0].tolist() == list(range(40, 72))


def test_products_take_half_of_the_cycles_and_exponentials_all_of_theirs():
    def products(itemsize):
        needs = [
            B200.demand("mma", m=128, n=128, k=128, itemsize_a=itemsize, a_space=space).needs
            for space in 2 * ("smem", "tmem")
        ]
        return sum(n["tensor"] for n in needs), sum(n["smem"] for n in needs)

    assert products(2) == (2048, 1536) and products(1) == (1024, 768)
    assert 2 * 128 * 128 / B200["mufu"] == 2048


def test_both_variants_keep_the_forwards_roles():
    """MXFP8 has a kernel of its own with the forward's tiles and epilogue; block-sparse is the forward over lists."""
    shared = ("free_accumulators", "mask_scores", "steps_of", "finish_tile", "store_tile")
    assert all(getattr(mxfp8_forward, name) is getattr(forward, name) for name in shared)
    kernels = (forward.forward_kernel, mxfp8_forward.mxfp8_forward_kernel)
    roles = [inspect.getsource(kernel.fn).count("tlx.async_task(") for kernel in kernels]
    assert roles == [5, 5]
    assert "lists" in inspect.getsource(forward.load_inputs.fn)
