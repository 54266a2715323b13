"""What chapters 08 and 13 say about balance: claims that hold, claims that hold against one thing only, and an error."""

import importlib

import numpy as np
import pytest
import torch

from jfa.bench.shapes import SHAPES
from jfa.layout import offsets_from_lengths
from jfa.schedule import balance, longest_first, query_tiles, round_robin, simulate_queue, split_decision, zigzag


def costs_of(name):
    """Costs of all (tile, head) units of a bench shape in memory order, in blocks of 128."""
    shape = SHAPES[name]
    len_q, len_kv = shape.lengths()
    shared = bool(shape.shared_q)
    tiles = query_tiles(
        None if shared else offsets_from_lengths(len_q), offsets_from_lengths(len_kv), 128, 128,
        total_q=shape.shared_q or int(len_q.sum()), band=shape.band, broadcast_q=shared, longest_first=False,
    )  # fmt: skip
    return np.repeat(tiles.cost[tiles.seq >= 0].numpy(), shape.heads)


def test_zigzag_is_worth_17_percent_of_the_48_tiles_against_round_robin():
    costs = np.random.default_rng(1).integers(32, 512, size=48)
    costs[:3] = [480, 450, 40]
    robin, zig = (balance(deal(costs, 8), costs).makespan for deal in (round_robin, zigzag))
    assert round(100 * (1 - zig / robin)) == 17


@pytest.mark.parametrize("name, wins", [("self-causal", True), ("cross", True), ("pma32", False), ("pma128", False)])
def test_zigzag_beats_the_plain_grid_unless_the_tail_is_heavy(name, wins):
    costs = costs_of(name)
    grid, static = simulate_queue(costs, 132).makespan, balance(zigzag(costs, 132), costs).makespan
    assert (static < grid) == wins
    assert (
        balance(longest_first(costs, 132), costs).imbalance
        < 1.02 * balance(zigzag(costs, 132), costs).bound / costs.sum() * 132
    )


def test_a_queue_adds_what_no_plan_has():
    """Times that differ from the plan: the sorted queue stays near the mean, zigzag does not."""
    costs = np.sort(np.random.default_rng(2).integers(8, 33, size=600))[::-1]
    real = costs * (1 + 0.4 * np.random.default_rng(3).uniform(-1, 1, 600))
    static, mean = balance(zigzag(costs, 64), real).makespan, real.sum() / 64
    assert simulate_queue(real, 64).makespan < 1.06 * mean < 1.12 * mean < static


def test_a_list_of_valid_tiles_ends_earlier_than_stealing_from_the_grid_of_the_longest():
    costs = costs_of("cross") + 0.25
    len_q, _ = SHAPES["cross"].lengths()
    empty = 4 * len(len_q) * int(-(-len_q.max() // 128)) - len(costs)
    grid = np.random.default_rng(0).permutation(np.concatenate([costs, np.full(empty, 0.25)]))
    assert empty > len(costs)
    assert simulate_queue(np.sort(costs)[::-1], 132).makespan < 0.9 * simulate_queue(grid, 132).makespan


def test_stealing_does_not_help_a_mega_tile_and_splitting_does():
    costs = np.array([10] * 32 + [400])
    best = max(costs.max(), costs.sum() / 8)
    spans = [simulate_queue(costs, 8, order=order).makespan for order in (list(range(33)), [32, *range(32)])]
    assert min(spans) >= best == 400
    assert split_decision(costs, 8).split < 0.3 * best


def test_the_tail_from_which_on_the_largest_tile_decides():
    """512 tiles on 32 workers: the median batch crosses between alpha 1.75 and 2."""
    for alpha, decides in ((1.0, True), (1.75, True), (2.0, False), (3.0, False)):
        batches = [np.random.default_rng(s).pareto(alpha, 512) + 1 for s in range(200)]
        assert (np.median([c.max() * 32 / c.sum() for c in batches]) > 1) == decides


def test_sentinels_of_pairs_of_key_tiles():
    """What exercise 8.6 counts: 20.5 % of pma32's units, 10.2 % of self's, 6.8 % of pma128's and cross's."""
    share = {}
    for name in ("pma32", "self", "pma128", "cross"):
        tiles = -(-SHAPES[name].lengths()[1].long() // 128)
        pairs = (tiles + 1) // 2 * 2
        share[name] = round(100 * float((pairs - tiles).sum() / pairs.sum()), 1)
    assert share == {"pma32": 20.5, "self": 10.2, "pma128": 6.8, "cross": 6.8}
    assert torch.equal(SHAPES["tiny-8192"].lengths()[0], torch.full((8192,), 34, dtype=torch.int32))


def test_a_queue_that_is_asked_a_tile_ahead_deals_the_second_round():
    """Chapter 13's 16 tiles on four SMs: zigzag ends last, the queue asked early before it, asked late first."""
    predict = importlib.import_module("jfa.course.checks.13_persistent")._predict
    blocks = sorted([2, 1, 10, 3, 2, 1, 5, 1, 4, 3, 1, 2, 4, 3, 2, 2], reverse=True)
    early, _, early_end, zigzag_end = predict(blocks, 4, True)
    late, failed, late_end, _ = predict(blocks, 4, False)
    assert early[:8] == [0, 1, 2, 3] * 2
    assert late[4] != 0, "the SM with the largest tile asks last"
    assert late_end < early_end < zigzag_end
    assert zigzag_end == balance(zigzag(blocks, 4), blocks).makespan
    assert late_end == simulate_queue(blocks, 4).makespan
    assert failed == 4
