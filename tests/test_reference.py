"""The reference against attention written one score at a time, in fp64; its gradients, edges and speed."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa import layout, reference
from jfa.masks import Band

CAUSAL = st.sampled_from([False, True, "top_left"])
WINDOW = st.one_of(st.none(), st.integers(0, 6), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))
PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5)
SEED_LENGTHS = [7, 3, 19, 5, 11]


def one_score_at_a_time(q, k, v, spans, band, scale, rows_out, starts):
    """Plain loops over sequences, heads and queries; shares no code with the reference."""
    out = torch.zeros(rows_out, q.shape[1], v.shape[2], dtype=q.dtype)
    lse = torch.full((q.shape[1], rows_out), -math.inf, dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for (q0, q1, k0, k1), o in zip(spans, starts):
        lo, hi = band.offsets(q1 - q0, k1 - k0)
        for i in range(q1 - q0):
            js = [j for j in range(k1 - k0) if i + lo <= j <= i + hi]
            for h in range(q.shape[1]) if js else ():
                s = torch.stack([scale * (q[q0 + i, h] * k[k0 + j, h // group]).sum() for j in js])
                p = torch.softmax(s, 0)
                out[o + i, h] = sum(p[n] * v[k0 + j, h // group] for n, j in enumerate(js))
                lse[h, o + i] = torch.logsumexp(s, 0)
    return out, lse


def tensors(lengths, heads=2, kv_heads=2, dim=4, dim_v=4, seed=0, dtype=torch.float64, amp=1.0):
    g = torch.Generator().manual_seed(seed)
    total_q, total_kv = (sum(x[i] for x in lengths) for i in (0, 1))
    shapes = ((total_q, heads, dim), (total_kv, kv_heads, dim), (total_kv, kv_heads, dim_v))
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64).mul(amp).to(dtype).requires_grad_() for s in shapes)
    qo, ko = (layout.offsets_from_lengths([x[i] for x in lengths]) for i in (0, 1))
    return q, k, v, qo, ko


@settings(max_examples=60)
@given(PAIRS, CAUSAL, WINDOW, st.sampled_from([(2, 2, 4), (4, 2, 3), (3, 1, 5)]), st.integers(0, 99))
def test_every_feature_equals_the_plain_loops(lengths, causal, window, shape, seed):
    heads, kv_heads, dim_v = shape
    q, k, v, qo, ko = tensors(lengths, heads, kv_heads, dim_v=dim_v, seed=seed)
    out, lse = reference.attention(q, k, v, qo, ko, causal=causal, window_size=window, return_lse=True)
    spans = list(zip(qo[:-1].tolist(), qo[1:].tolist(), ko[:-1].tolist(), ko[1:].tolist()))
    want = one_score_at_a_time(q, k, v, spans, Band.make(causal, window), 0.5, q.shape[0], qo[:-1].tolist())
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        blocks = reference.blockwise_attention(
            q, k, v, qo, ko, block_size=3, causal=causal, window_size=window, return_lse=True
        )
    torch.testing.assert_close(blocks, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=15)
@given(PAIRS, CAUSAL, WINDOW, st.integers(0, 99))
def test_gradients_equal_those_of_the_plain_loops(lengths, causal, window, seed):
    q, k, v, qo, ko = tensors(lengths, 4, 2, dim_v=3, seed=seed)
    spans = list(zip(qo[:-1].tolist(), qo[1:].tolist(), ko[:-1].tolist(), ko[1:].tolist()))
    g = torch.Generator().manual_seed(seed + 1)
    dout = torch.randn(q.shape[0], 4, 3, generator=g, dtype=torch.float64)
    dlse = torch.randn(4, q.shape[0], generator=g, dtype=torch.float64)
    grads = []
    for out, lse in (
        reference.attention(q, k, v, qo, ko, causal=causal, window_size=window, return_lse=True),
        one_score_at_a_time(q, k, v, spans, Band.make(causal, window), 0.5, q.shape[0], qo[:-1].tolist()),
    ):
        loss = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0).sum() + 0 * (q.sum() + k.sum() + v.sum())
        grads.append(torch.autograd.grad(loss, (q, k, v)))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    assert all(x.isfinite().all() for x in grads[0])


def test_gradcheck():
    q, k, v, qo, ko = tensors([(3, 4), (0, 2), (2, 0), (4, 3)], 2, 1, dim_v=3)
    torch.autograd.gradcheck(lambda *x: reference.attention(*x, qo, ko, causal=True, window_size=2), (q, k, v))


@pytest.mark.parametrize("starts", [None, [0, 3, 6, 9], [6, 0, 3, 9]])
def test_broadcast_q_places_its_rows_and_sums_its_gradient(starts):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, generator=g, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(6, 2, 8, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ko = layout.offsets_from_lengths([2, 0, 4])
    offset = None if starts is None else torch.tensor(starts)
    got = reference.attention(q, k, v, None, ko, broadcast_q=True, output_offset=offset, return_lse=True)
    spans = [(0, 3, a, b) for a, b in zip(ko[:-1].tolist(), ko[1:].tolist())]
    want = one_score_at_a_time(q, k, v, spans, Band(), 8**-0.5, 9, starts or [0, 3, 6])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((o * torch.arange(9.0)[:, None, None]).sum(), (q, k, v)) for o, _ in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_seed_recurrence_equals_padded_attention(causal):
    torch.manual_seed(0)
    offsets = layout.offsets_from_lengths(SEED_LENGTHS)
    q, k, v = (torch.randn(45, 1, 32) for _ in range(3))
    blocks = reference.blockwise_attention(q, k, v, offsets, offsets, block_size=16, causal=causal)
    lengths = layout.lengths_from_offsets(offsets)
    band = Band.make(causal)
    padded, _ = reference.padded_attention(*(layout.pad(x, offsets) for x in (q, k, v)), lengths, lengths, band=band)
    assert (blocks - layout.unpad(padded, offsets)).abs().max() < 5e-7


def test_multi_head_equals_scaled_dot_product_attention_on_padded_inputs():
    q, k, v, qo, ko = tensors([(n, n) for n in SEED_LENGTHS], 4, 2, dim=8, dim_v=8)
    n = layout.lengths_from_offsets(qo)
    mask = reference.padded_mask(n, n, 19, 19)[:, None]
    padded = (layout.pad(x, qo).transpose(1, 2) for x in (q, k, v))
    sdpa = F.scaled_dot_product_attention(*padded, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(reference.attention(q, k, v, qo, ko), layout.unpad(sdpa, qo))


@pytest.mark.parametrize("sm_scale", [0.0, -8.0, 0.3])
def test_any_scale_counts_as_given(sm_scale):
    q, k, v, qo, ko = tensors([(4, 5), (3, 2)])
    spans = [(0, 4, 0, 5), (4, 7, 5, 7)]
    out, lse = reference.attention(q, k, v, qo, ko, sm_scale=sm_scale, return_lse=True)
    torch.testing.assert_close(
        (out, lse), one_score_at_a_time(q, k, v, spans, Band(), sm_scale, 7, [0, 4]), rtol=1e-9, atol=1e-9
    )
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    if sm_scale == 0:
        assert not dq.any() and not dk.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_300_neither_overflow_nor_vanish(sign):
    q = torch.full((40, 1, 8), 6.0) + 0.05 * torch.randn(40, 1, 8, generator=torch.Generator().manual_seed(0))
    k = sign * torch.full((40, 1, 8), 6.25)
    v = torch.randn(40, 1, 8, generator=torch.Generator().manual_seed(1))
    offsets = layout.offsets_from_lengths([17, 23])
    f32, lse = reference.attention(q, k, v, offsets, offsets, sm_scale=1.0, window_size=4, return_lse=True)
    f64 = reference.attention(*(x.double() for x in (q, k, v)), offsets, offsets, sm_scale=1.0, window_size=4)
    assert (lse * sign > 250).all() and (f32 - f64).abs().max() < 1e-4
    blocks = reference.blockwise_attention(q, k, v, offsets, offsets, block_size=8, sm_scale=1.0, window_size=4)
    assert (blocks - f64).abs().max() < 1e-4


def test_empty_rows_are_zero_with_zero_gradients_even_through_lse():
    q, k, v, qo, ko = tensors([(4, 0), (3, 5), (0, 2), (6, 2)])
    out, lse = reference.attention(q, k, v, qo, ko, causal=True, return_lse=True)
    empty = [0, 1, 2, 3, 7, 8, 9, 10]  # no keys at all; bottom-right causal with 6 queries over 2 keys
    assert not out[empty].any() and (lse[:, empty] == -math.inf).all()
    (out.sum() + torch.where(lse.isfinite(), lse, 0).sum()).backward()
    assert not q.grad[empty].any() and not k.grad[5:7].any() and not v.grad[5:7].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_nothing_to_attend_to_still_has_a_backward():
    q, k, v, qo, ko = tensors([(4, 0), (0, 3)])
    reference.attention(q, k, v, qo, ko).sum().backward()
    assert not q.grad.any() and not k.grad.any() and not v.grad.any()


def test_rows_past_the_last_offset_are_zero():
    q, k, v, qo, ko = tensors([(5, 6), (5, 6)])
    qo, ko = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 10])
    out = reference.attention(q, k, v, qo, ko)
    out.sum().backward()
    assert not out[8:].any() and not q.grad[8:].any() and not k.grad[10:].any() and not v.grad[10:].any()


def test_poison_in_a_neighbour_stays_there():
    q, k, v, qo, ko = tensors([(5, 4), (3, 7), (6, 5)])
    clean = reference.attention(q, k, v, qo, ko, causal=True)
    dirty = [x.detach().clone() for x in (q, k, v)]
    dirty[0][5:8] = dirty[1][4:11] = dirty[2][4:11] = math.nan
    dirty = [x.requires_grad_() for x in dirty]
    out = reference.attention(*dirty, qo, ko, causal=True)
    keep = [*range(5), *range(8, 14)]
    assert torch.equal(out[keep], clean[keep])
    out[keep].sum().backward()
    assert dirty[0].grad[keep].isfinite().all() and dirty[2].grad[[*range(4), *range(11, 16)]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_fp32(dtype):
    q, k, v, qo, ko = tensors([(9, 12), (4, 4)], dtype=dtype)
    out, lse = reference.attention(q, k, v, qo, ko, return_lse=True)
    exact = reference.attention(q, k, v, qo, ko, dtype=torch.float64)
    assert out.dtype == dtype and lse.dtype == torch.float32 and exact.dtype == torch.float64
    assert torch.equal(out, exact.to(dtype)) or (out.double() - exact).abs().max() < torch.finfo(dtype).eps * 2


def test_merging_two_halves_of_the_keys_gives_the_whole():
    q, k, v, qo, _ = tensors([(5, 8), (4, 8)])
    parts = []
    for rows in ([0, 1, 2, 8], [3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]):
        ko = torch.tensor([0, sum(r < 8 for r in rows), len(rows)])
        parts += reference.attention(q, k[rows], v[rows], qo, ko, return_lse=True)
    whole = reference.attention(q, k, v, qo, torch.tensor([0, 8, 16]), return_lse=True)
    torch.testing.assert_close(reference.merge_attention(*parts), whole)
    nothing = torch.zeros_like(parts[0]), torch.full_like(parts[1], -math.inf)
    torch.testing.assert_close(reference.merge_attention(*nothing, *whole), whole)
    assert torch.equal(reference.merge_attention(*nothing, *nothing)[0], nothing[0])


def test_many_short_sequences_are_batched():
    """70,000 sequences of one row: a loop over sequences would form 70,000 matrix products."""
    n = 70_000
    offsets = torch.arange(n + 1, dtype=torch.int32)
    q, k, v = (torch.randn(n, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    with torch.profiler.profile() as profile:
        out = reference.attention(q, k, v, offsets, offsets)
    assert (out - v).abs().max() < 1e-6
    assert sum(e.count for e in profile.key_averages() if e.key in ("aten::bmm", "aten::matmul")) < 50


@pytest.mark.parametrize("limit", [1, 40, 400])
def test_the_size_of_a_chunk_changes_nothing(limit, monkeypatch):
    """A sequence too long for one go is cut into ranges of queries; the mask must not restart in each."""
    lengths = [(30, 17), (0, 3), (5, 40), (28, 18), (4, 0)]
    q, k, v, qo, ko = tensors(lengths, 4, 2)
    whole = reference.attention(q, k, v, qo, ko, causal=True, window_size=9, return_lse=True)
    monkeypatch.setattr(reference, "MAX_SCORES", limit)
    parts = reference.attention(q, k, v, qo, ko, causal=True, window_size=9, return_lse=True)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((o * torch.arange(4.0)[:, None]).sum(), (q, k, v)) for o, _ in (parts, whole)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_head_counts_must_divide():
    q, k, v, qo, ko = tensors([(3, 4)], 6, 4)
    with pytest.raises(ValueError, match="heads"):
        reference.attention(q, k, v, qo, ko)
