"""MXFP8 attention in PyTorch: without its roundings it is attention, with them it is what a loop over rows says."""

from __future__ import annotations

import math

import pytest
import torch

from jfa import mxfp8, reference
from jfa.layout import offsets_from_lengths
from jfa.masks import Band

CASES = {
    "self": dict(len_q=[5, 0, 33, 1, 17], len_kv=[5, 0, 33, 1, 17]),
    "lengths differ": dict(len_q=[40, 0, 7, 33], len_kv=[3, 9, 0, 70]),
    "causal": dict(len_q=[33, 64, 10], len_kv=[40, 64, 3], causal=True),
    "top left": dict(len_q=[33, 10], len_kv=[12, 40], causal="top_left"),
    "window": dict(len_q=[50, 33], len_kv=[50, 70], window_size=(9, 3)),
    "one-sided": dict(len_q=[50, 33], len_kv=[50, 70], window_size=5, causal=True),
    "shared queries": dict(len_q=35, len_kv=[40, 0, 5, 64]),
    "shared queries in slots": dict(len_q=35, len_kv=[40, 9, 5], slots=[70, 0, 35]),
    "grouped heads": dict(len_q=[40, 3], len_kv=[33, 70], heads=4),
    "another value dim": dict(len_q=[40, 3], len_kv=[33, 70], dim_v=24, scale=-0.3),
}


def problem(len_q, len_kv, heads=2, kv_heads=2, dim=48, dim_v=48, slots=None, scale=None, seed=0, **mask):
    """Return (q, k, v, offsets), the options of a call, and dout, dlse."""
    g = torch.Generator().manual_seed(seed)
    shared = isinstance(len_q, int)
    make = lambda n, h, d: torch.randn(n, h, d, generator=g).bfloat16()
    rows_q = len_q if shared else sum(len_q)
    q, k, v = make(rows_q, heads, dim), make(sum(len_kv), kv_heads, dim), make(sum(len_kv), kv_heads, dim_v)
    rows_out = rows_q * len(len_kv) if shared else rows_q
    offsets = (None if shared else offsets_from_lengths(len_q)), offsets_from_lengths(len_kv)
    options = dict(mask, broadcast_q=shared, sm_scale=scale)
    if slots:
        options["output_offset"] = torch.tensor([*slots, rows_out], dtype=torch.int32)
    dout = make(rows_out, heads, dim_v)
    dlse = torch.randn(heads, rows_out, generator=g)
    return (q, k, v, *offsets), options, dout, dlse


def results(attend, inputs, options, dout, dlse, dtype=torch.float64):
    """Return (out, lse, dq, dk, dv) in fp64."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs[:3]]
    out, lse = attend(*leaves, *inputs[3:], dtype=torch.float64, return_lse=True, **options)
    loss = (out * dout.double()).sum() + (torch.where(torch.isfinite(lse), lse, 0) * dlse).sum()
    return out.detach(), lse.detach(), *(g.double() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("case", CASES)
def test_without_its_roundings_it_is_attention(case, monkeypatch):
    class Exact:
        def __init__(self, x):
            self.x = x

        def dequantize(self):
            return self.x

    monkeypatch.setattr(reference, "quantize_jagged", lambda x, *a, **k: Exact(x.double()))
    monkeypatch.setattr(reference, "_rounded_p", lambda p: p)
    monkeypatch.setattr(reference, "_rounded_squares", lambda ds: ds)
    call = problem(**CASES[case])
    want, found = (results(f, *call) for f in (reference.attention, reference.mxfp8_attention))
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # inputs and P V pass through fp32 in places


def blocks(rows, columns=None):
    """Return slices of 32 rows."""
    return [slice(i, i + 32) for i in range(0, rows, 32)]


def one_group(x):
    """Return the numbers of one group, rounded with their own scale; the rule from the specification's words."""
    amax = x.abs().max().item()
    if amax == 0:
        return x.clone()
    scale = 2.0 ** math.ceil(math.log2(amax / 448))
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def rounded(x, axis):
    """Return a matrix [rows, columns] with groups of 32 along an axis, or in squares (None)."""
    y = x.clone()
    for a in blocks(x.shape[0]) if axis in (0, None) else [slice(i, i + 1) for i in range(x.shape[0])]:
        for b in blocks(x.shape[1]) if axis in (1, None) else [slice(i, i + 1) for i in range(x.shape[1])]:
            y[a, b] = one_group(x[a, b])
    return y


def by_hand(q, k, v, dout, dlse, allowed, scale):
    """Return (out, lse, dq, dk, dv) of one sequence and head, all [rows, dim] fp64."""
    s = scale * rounded(q, 1) @ rounded(k, 1).T
    out, lse = torch.zeros(len(q), v.shape[1]).double(), torch.full((len(q),), -math.inf).double()
    v_columns = rounded(v, 0)
    for i in range(len(q)):
        seen = allowed[i]
        if not seen.any():
            continue
        row = s[i, seen] / math.log(2)
        p = 2.0 ** (row - math.ceil(row.max()))
        fixed = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
        out[i], lse[i] = fixed @ v_columns[seen] / p.sum(), math.log(p.sum()) + math.ceil(row.max()) * math.log(2)
    p = torch.where(allowed, torch.exp(s - torch.where(lse == -math.inf, 0, lse)[:, None]), 0)
    fixed = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
    dp = rounded(dout, 1) @ rounded(v, 1).T
    delta = (out * dout).sum(1) - torch.where(lse == -math.inf, 0, dlse)
    ds = rounded(p * (dp - delta[:, None]), None)
    return out, lse, scale * ds @ rounded(k, 0), scale * ds.T @ rounded(q, 0), fixed.T @ rounded(dout, 0)


@pytest.mark.parametrize("case", CASES)
def test_every_rounding_by_hand(case):
    inputs, options, dout, dlse = problem(**CASES[case])
    q, k, v, q_offset, k_offset = inputs
    out, lse, dq, dk, dv = results(reference.mxfp8_attention, inputs, options, dout, dlse, torch.bfloat16)
    found = tuple(x.clone() for x in (dq, dk, dv))
    band = Band.make(options.get("causal", False), options.get("window_size"))
    scale = options["sm_scale"] or q.shape[2] ** -0.5
    group = q.shape[1] // k.shape[1]
    want = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for b in range(k_offset.numel() - 1):
        keys = slice(int(k_offset[b]), int(k_offset[b + 1]))
        queries = slice(0, len(q)) if q_offset is None else slice(int(q_offset[b]), int(q_offset[b + 1]))
        start = queries.start
        if q_offset is None:
            start = int(options["output_offset"][b]) if "output_offset" in options else b * len(q)
        rows = slice(start, start + queries.stop - queries.start)
        allowed = band.dense(rows.stop - rows.start, keys.stop - keys.start)
        for h in range(q.shape[1]):
            mine = (q[queries, h], k[keys, h // group], v[keys, h // group], dout[rows, h], dlse[h, rows])
            if not allowed.numel():
                continue
            o, l, *grads = by_hand(*(x.double() for x in mine), allowed, scale)
            torch.testing.assert_close(out[rows, h], o, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(lse[h, rows], l, rtol=1e-9, atol=1e-9)
            want[0][queries, h] += grads[0]
            want[1][keys, h // group] += grads[1]
            want[2][keys, h // group] += grads[2]
    for a, b in zip(found, want):  # gradients are rounded to the inputs' bf16
        torch.testing.assert_close(a, b, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("case", ["self", "causal", "shared queries", "grouped heads"])
def test_cut_into_chunks_it_is_the_same(case, monkeypatch):
    call = problem(**CASES[case])
    whole = results(reference.mxfp8_attention, *call)
    monkeypatch.setattr(reference, "MAX_SCORES", 1)
    for a, b in zip(results(reference.mxfp8_attention, *call), whole):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["self", "causal"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_neighbour_changes_nothing(case, bad):
    inputs, options, dout, dlse = problem(**CASES[case], seed=1)
    clean = results(reference.mxfp8_attention, inputs, options, dout, dlse)
    offsets = inputs[3]
    others = torch.ones(int(offsets[-1]), dtype=torch.bool)
    others[int(offsets[2]) : int(offsets[3])] = False
    keys = torch.ones(len(inputs[1]), dtype=torch.bool)
    keys[int(inputs[4][2]) : int(inputs[4][3])] = False
    poisoned = [x.clone() for x in (*inputs[:3], dout)]
    for x, kept in zip(poisoned, (others, keys, keys, others)):
        x[~kept] = bad
    found = results(reference.mxfp8_attention, (*poisoned[:3], *inputs[3:]), options, poisoned[3], dlse)
    for a, b, kept in zip(found, clean, (others, None, others, keys, keys)):
        if kept is None:
            assert torch.equal(a[:, others], b[:, others])
        else:
            assert torch.equal(a[kept], b[kept])


def test_a_nan_takes_what_it_should():
    """A key with NaN in one group: every query that sees it, and none that does not."""
    inputs, options, *_ = problem([40], [40], causal=True)
    inputs[1][20, 0, 3] = math.nan
    out, lse = reference.mxfp8_attention(*inputs, return_lse=True, **options)
    assert out[20:, 0].isnan().all() and lse[0, 20:].isnan().all()
    assert not out[:20].isnan().any() and not out[:, 1].isnan().any()


@pytest.mark.parametrize("mask", [{}, dict(causal=True)])
def test_how_far_it_is_from_exact(mask):
    call = problem([256, 100], [512, 300], heads=2, dim=128, dim_v=128, **mask)
    want, found = (results(f, *call) for f in (reference.attention, reference.mxfp8_attention))
    error = [((a - b).norm() / b.norm()).item() for a, b in zip((found[0], *found[2:]), (want[0], *want[2:]))]
    assert 0.04 < error[0] < 0.06
    assert all(0.04 < e < 0.075 for e in error[1:])


def test_the_output_has_the_querys_type_unless_told():
    inputs, options, *_ = problem([9], [12])
    out, lse = reference.mxfp8_attention(*inputs, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float64
    out, lse = reference.mxfp8_attention(*inputs, return_lse=True, dtype=torch.float32)
    assert out.dtype == lse.dtype == torch.float32


def test_nothing_attends_to_anything():
    for len_q, len_kv in (([0], [0]), ([3, 0], [0, 4]), ([], []), (5, [])):
        inputs, options, dout, dlse = problem(len_q, len_kv)
        out, lse, *grads = results(reference.mxfp8_attention, inputs, options, dout, dlse)
        assert not out.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)


def test_p_stays_below_what_e4m3_holds():
    assert (
        256 < mxfp8.E4M3_MAX
        and mxfp8.P_CODE == 127 - 8
        and math.log2(mxfp8.E4M3_MAX / 256) == pytest.approx(0.807, abs=1e-3)
    )


# ------------------------------------------------------------------------------------------------------------ block sizes
@pytest.mark.parametrize("block", [1, 16, 32, 128, 500])
@pytest.mark.parametrize("margin", [0, 4])
@pytest.mark.parametrize("spread", [1, 4])
def test_the_block_size_matters_to_denormal_probabilities_only(block, margin, spread):
    """P as a walk over blocks of keys rounds it, in the end's unit, against P as the reference does."""
    scores = spread * torch.randn(40, 500, generator=torch.Generator().manual_seed(block)).double()
    whole = torch.ceil(scores.amax(1, keepdim=True))
    want = reference._rounded_p(torch.exp2(scores - whole))
    parts, base = [], torch.full((40, 1), -math.inf).double()
    for keys in scores.split(block, 1):
        top = torch.ceil(keys.amax(1, keepdim=True))
        base = torch.where(top > base, top + margin, base)
        parts.append(reference._rounded_p(torch.exp2(keys - base)) * torch.exp2(base - whole))
    found = torch.cat(parts, 1)
    normal = torch.exp2(scores - whole) >= 2.0 ** (margin - 14)
    assert torch.equal(found[normal], want[normal]) and normal.any()
    assert (found - want).abs().max() <= 2.0 ** (margin - 17)


def test_the_block_size_does_matter_to_denormal_probabilities():
    scores = torch.tensor([[-17.3, 0.0]]).double()
    want = reference._rounded_p(torch.exp2(scores))
    early = reference._rounded_p(torch.exp2(scores + 17)) * 2.0**-17  # as if its block had been the first, by itself
    assert early[0, 0] != want[0, 0]


# ------------------------------------------------------------------------------------------------- one rounding at a time
@pytest.mark.parametrize("name", reference.ROUNDED)
def test_an_operand_that_stays_exact_leaves_only_its_own_rounding_out(name):
    (q, k, v, q_offset, k_offset), options, dout, dlse = problem([40, 3], [33, 70])
    band, scale = Band.make(), 48**-0.5

    def call(exact):
        made = reference._ScaledCall(q_offset, k_offset, None, False, band, scale, torch.float64, frozenset(exact))
        out, lse = made.forward(q, k, v)
        return out, *made.backward(dout, dlse, q, k, v, out, lse)

    plain, nothing, others = call(()), call(reference.ROUNDED), call({name})
    assert any(not torch.equal(a, b) for a, b in zip(others, plain))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(*leaves, q_offset, k_offset, return_lse=True, dtype=torch.float64)
    loss = (out * dout.double()).sum() + (lse * dlse).sum()
    for a, b in zip(nothing, (out, *torch.autograd.grad(loss, leaves))):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
