"""Bands: what they let through, counted and cut into blocks, against the plain definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfa.masks import Band, Block, allowed_pairs, attention_flops, block_kinds, flop_waste, key_ranges, query_ranges

CAUSAL = st.sampled_from([False, True, "bottom_right", "top_left"])
WINDOW = st.one_of(st.none(), st.integers(0, 12), st.tuples(st.integers(-1, 9), st.integers(-1, 9)))
LENGTH = st.integers(0, 25)


def by_definition(causal, window, len_q, len_kv):
    """The mask straight from the op's text, one pair at a time."""
    allowed = np.zeros((len_q, len_kv), dtype=bool)
    shift = len_kv - len_q
    for i in range(len_q):
        for j in range(len_kv):
            ok = True
            if causal in (True, "bottom_right"):
                ok &= j <= i + shift
            elif causal == "top_left":
                ok &= j <= i
            if isinstance(window, int):
                ok &= abs(i - j) <= window
            elif window is not None:
                left, right = window
                ok &= left == -1 or j >= i + shift - left
                ok &= right == -1 or j <= i + shift + right
            allowed[i, j] = ok
    return allowed


@given(CAUSAL, WINDOW, LENGTH, LENGTH)
def test_dense_mask_is_the_definition(causal, window, len_q, len_kv):
    dense = Band.make(causal, window).dense(len_q, len_kv)
    np.testing.assert_array_equal(dense.numpy(), by_definition(causal, window, len_q, len_kv))


@given(CAUSAL, WINDOW, st.lists(st.tuples(LENGTH, LENGTH), max_size=8))
def test_pairs_are_counted_exactly(causal, window, lengths):
    band = Band.make(causal, window)
    len_q, len_kv = (torch.tensor([x[i] for x in lengths], dtype=torch.int32) for i in (0, 1))
    want = [int(band.dense(q, k).sum()) for q, k in lengths]
    assert allowed_pairs(band, len_q, len_kv).tolist() == want


def test_pairs_of_huge_sequences_do_not_overflow():
    n = torch.tensor([1_000_000_000])
    assert allowed_pairs(Band.make(), n, n).item() == 10**18
    assert allowed_pairs(Band.make(causal=True), n, n).item() == 1_000_000_000 * 1_000_000_001 // 2


@given(CAUSAL, WINDOW, LENGTH, LENGTH, st.integers(1, 8), st.integers(1, 8))
def test_blocks_are_named_after_their_scores(causal, window, len_q, len_kv, block_m, block_n):
    band = Band.make(causal, window)
    dense, kinds = band.dense(len_q, len_kv), block_kinds(band, len_q, len_kv, block_m, block_n)
    assert kinds.shape == (-(-len_q // block_m), -(-len_kv // block_n))
    for m, row in enumerate(kinds.tolist()):
        for n, kind in enumerate(row):
            block = dense[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
            whole = bool(block.all()) and block.shape[1] == block_n
            assert kind == (Block.FULL if whole else Block.PARTIAL if bool(block.any()) else Block.EMPTY)


@given(CAUSAL, WINDOW, st.integers(1, 25), LENGTH, st.integers(1, 8), st.integers(1, 8))
def test_key_ranges_peel_each_row_of_blocks(causal, window, len_q, len_kv, block_m, block_n):
    band = Band.make(causal, window)
    kinds = block_kinds(band, len_q, len_kv, block_m, block_n)
    start = torch.arange(0, len_q, block_m)
    end = (start + block_m).clamp(max=len_q)
    ranges = key_ranges(band, start, end, torch.full_like(start, len_q), torch.full_like(start, len_kv), block_n)
    check_peeling(kinds, ranges)


@given(CAUSAL, WINDOW, LENGTH, st.integers(1, 25), st.integers(1, 8), st.integers(1, 8))
def test_query_ranges_mirror_them_for_the_backward(causal, window, len_q, len_kv, block_m, block_n):
    band = Band.make(causal, window)
    dense = band.dense(len_q, len_kv)
    start = torch.arange(0, len_kv, block_n)
    end = (start + block_n).clamp(max=len_kv)
    ranges = query_ranges(band, start, end, torch.full_like(start, len_q), torch.full_like(start, len_kv), block_m)
    kinds = torch.zeros(start.numel(), -(-len_q // block_m), dtype=torch.int8)
    for n in range(kinds.shape[0]):
        for m in range(kinds.shape[1]):
            block = dense[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
            whole = bool(block.all()) and block.shape[0] == block_m
            kinds[n, m] = Block.FULL if whole else Block.PARTIAL if bool(block.any()) else Block.EMPTY
    check_peeling(kinds, ranges)


def check_peeling(kinds, ranges):
    for row, (first, full_first, full_end, end) in zip(kinds.tolist(), zip(*(r.tolist() for r in ranges))):
        touched = [n for n, kind in enumerate(row) if kind != Block.EMPTY]
        assert list(range(first, end)) == touched
        assert first <= full_first <= full_end <= end
        assert list(range(full_first, full_end)) == [n for n, kind in enumerate(row) if kind == Block.FULL]


def test_flops_are_two_products_forward_and_five_backward():
    assert attention_flops(100, 4, 128) == 4 * 100 * 4 * 128
    assert attention_flops(100, 4, 128, backward=True) == 2.5 * attention_flops(100, 4, 128)
    assert attention_flops(100, 4, 192, 128) == 2 * 100 * 4 * (192 + 128)
    assert attention_flops(100, 4, 192, 128, backward=True) == 2 * 100 * 4 * (3 * 192 + 2 * 128)


def test_flop_waste_of_the_seed_lengths():
    assert round(100 * flop_waste(torch.tensor([7, 3, 19, 5, 11])), 1) == 68.7
    assert flop_waste(torch.tensor([], dtype=torch.int32)) == 0.0


@pytest.mark.parametrize("kwargs, error, name", [
    ({"causal": "left"}, ValueError, "causal"),
    ({"window_size": -2}, ValueError, "window_size"),
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"window_size": 1.5}, TypeError, "window_size"),
    ({"window_size": (1, 2, 3)}, TypeError, "window_size"),
    ({"window_size": True}, TypeError, "window_size"),
])  # fmt: skip
def test_bad_masks_are_refused_by_name(kwargs, error, name):
    with pytest.raises(error, match=name):
        Band.make(**kwargs)
