"""The kinds are what they say: each would show the mistake it is there for, and their scores arrive through q and k unharmed."""

import math

import pytest
import torch

from jfa.course import kinds

N, KEYS, BLOCK = 6, 40, 16
every_kind = pytest.mark.parametrize("kind", kinds.SCORES)


def _scores(kind):
    return kinds.scores(kind, N, KEYS, BLOCK, kinds.generator(3))


def _online(scores, first=-math.inf, fill=None, per_tile=False, keep_first=False, rescale=True):
    """LSE of each row, block by block in fp32, with one of the usual mistakes."""
    if fill is not None:
        scores = torch.cat([scores, torch.full((N, -KEYS % BLOCK), fill)], 1)
    m, l = torch.full((N,), first), torch.zeros(N)
    for start in range(0, scores.shape[1], BLOCK):
        s = scores[:, start : start + BLOCK]
        top = s.amax().expand(N) if per_tile else s.amax(1)
        new = m if keep_first and start else torch.maximum(m, top)
        l = (l * torch.exp(m - new) if rescale else l) + torch.exp(s - new[:, None]).sum(1)
        m = new
    return m + torch.log(l)


MISTAKES = {
    "near -150": {"first": 0.0},
    "near -400": {"fill": -250.0},
    "near -30000": {"fill": -1e4},
    "rows 150 apart": {"per_tile": True},
    "rising": {"keep_first": True},
    "huge in one block": {"keep_first": True},
    "above 90": {"first": -math.inf, "keep_first": True},
}


def _error(kind, **mistake):
    scores = _scores(kind)
    return (
        (_online(scores, **mistake) - torch.logsumexp(scores.double(), 1)).abs().nan_to_num(nan=math.inf).max().item()
    )


@every_kind
def test_the_online_softmax_survives_every_kind(kind):
    assert _error(kind) < 2e-7 * max(1.0, _scores(kind).abs().max().item()) * 4


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_kind_shows_its_mistake(kind):
    assert _error(kind, **MISTAKES[kind]) > 1e-3


def test_no_rescaling_shows_where_the_maximum_rises():
    assert _error("rising", rescale=False) > 0.01


def test_falling_scores_need_the_first_blocks_maximum():
    scores = _scores("falling")
    assert (scores.amax(1) - scores[:, -BLOCK:].amax(1) > 89).all()


def test_ties_are_ties():
    scores = _scores("ties")
    assert ((scores == scores.amax(1, keepdim=True)).sum(1) > 3).all() and len(scores.unique()) > 1


@every_kind
@pytest.mark.parametrize("dim, heads", [(4, None), (16, None), (16, 2), (32, 1), (128, None)])
def test_queries_and_keys_have_the_scores_of_their_kind(kind, dim, heads):
    q, k = kinds.query_and_key(kind, N, KEYS, dim, BLOCK, kinds.generator(5), heads=heads)
    assert q.shape == ((N, dim) if heads is None else (N, heads, dim)) and q.is_contiguous() and k.is_contiguous()
    q, k = q.reshape(N, -1, dim).double(), k.reshape(KEYS, -1, dim).double()
    found = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
    profile = kinds.SCORES[kind].rows(N)[:, None] + kinds.SCORES[kind].keys(KEYS, BLOCK)[None, :]
    assert (found - profile).abs().max() < 12 and (found - profile).std() <= 2


@every_kind
def test_numbers_depend_on_the_seed_and_shapes_do_not(kind):
    one, same, other = (kinds.query_and_key(kind, N, KEYS, 16, BLOCK, kinds.generator(s)) for s in (1, 1, 2))
    assert torch.equal(one[1], same[1]) and one[1].shape == other[1].shape
    assert kinds.SCORES[kind].noise == 0 or not torch.equal(one[1], other[1])


@every_kind
def test_scores_are_exact_where_the_scale_is_a_power_of_two(kind):
    q, k = kinds.query_and_key(kind, N, KEYS, 16, BLOCK, kinds.generator(7))
    assert torch.equal((q @ k.T).double(), q.double() @ k.double().T)


def test_poison_is_of_all_three_kinds_and_stays_where_it_is_put():
    x = kinds.poison(torch.ones(5, 3), slice(1, 3))
    assert x[1:3].isnan().any() and (x[1:3] == math.inf).any() and (x[1:3] == -math.inf).any()
    assert (x[[0, 3, 4]] == 1).all()


def test_lengths_rings_and_numbers_hold_what_their_names_say():
    assert kinds.offsets([3, 0, 2]).tolist() == [0, 3, 3, 5] and kinds.offsets([]).dtype == torch.int32
    assert sum(kinds.LARGE_COUNTS) < 2**31 and any(torch.tensor(float(n)).int().item() != n for n in kinds.LARGE_COUNTS)
    assert {(turns + 1) % 2 for turns, stages in kinds.FEW_RINGS} == {0, 1} and any(s == 1 for _, s in kinds.FEW_RINGS)
    assert all(ring in kinds.RINGS for ring in kinds.FEW_RINGS)
    below, at, above = kinds.around(70.0)
    assert below < at == 70.0 < above and kinds.around_block(16) == [15, 16, 17, 32, 33]
    assert (kinds.with_true_zeros(torch.ones(2, 3)) == 0).sum() == 2
    assert (
        torch.tensor(kinds.LARGE_BF16).to(torch.bfloat16).isfinite() and torch.tensor(kinds.LARGE_BF16).half().isinf()
    )
