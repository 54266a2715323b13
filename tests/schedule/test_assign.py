"""Dealing tiles to workers: each once, the seed's figures, the queue's ending, when splitting pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfa.schedule import ClcQueue, balance, longest_first, round_robin, simulate_queue, split_decision, zigzag
from jfa.schedule.assign import descending

COSTS = st.lists(st.integers(0, 500), max_size=60)
WORKERS = st.integers(1, 9)


def seed_costs():
    costs = np.random.default_rng(1).integers(32, 512, size=48)
    costs[:3] = [480, 450, 40]
    return costs


@pytest.mark.parametrize("deal, loads, imbalance, spread", [
    (round_robin, [1937, 1604, 1087, 1569, 1485, 1493, 1468, 1913], 1.234, 850),
    (zigzag, [1604, 1563, 1569, 1573, 1583, 1557, 1545, 1562], 1.022, 59),
])  # fmt: skip
def test_figures_of_the_seed(deal, loads, imbalance, spread):
    result = balance(deal(seed_costs(), 8), seed_costs())
    assert result.loads.tolist() == loads and round(result.imbalance, 3) == imbalance and result.range == spread


@given(COSTS, WORKERS, st.sampled_from([round_robin, zigzag, longest_first]))
def test_every_tile_runs_exactly_once(costs, workers, deal):
    assignment = deal(costs, workers)
    assert len(assignment) == workers and sorted(t for mine in assignment for t in mine) == list(range(len(costs)))
    result = balance(assignment, costs)
    assert result.makespan >= result.bound - 1e-9 or not costs


@given(COSTS, WORKERS)
def test_zigzag_gives_nobody_an_extra_round(costs, workers):
    sizes = [len(mine) for mine in zigzag(costs, workers)]
    assert max(sizes) <= -(-len(costs) // workers)


@given(COSTS.filter(any), WORKERS)
def test_longest_first_is_within_grahams_bound(costs, workers):
    result = balance(longest_first(costs, workers), costs)
    assert result.makespan <= result.mean + result.largest + 1e-9


def test_tile_counts_that_do_not_divide():
    assert zigzag(7, 3) == [[0, 5, 6], [1, 4], [2, 3]]


def test_fewer_tiles_than_workers():
    assert zigzag(2, 5) == [[0], [1], [], [], []] and zigzag(0, 3) == [[], [], []]
    assert round_robin(2, 5) == [[0], [1], [], [], []] and longest_first([], 3) == [[], [], []]


@pytest.mark.parametrize("deal", [round_robin, zigzag, longest_first])
def test_no_workers_is_an_error(deal):
    with pytest.raises(ValueError, match="workers"):
        deal([1, 2], 0)


@pytest.mark.parametrize("tiles, workers, failing", [(10, 4, 4), (3, 4, 3), (0, 4, 0), (1, 1, 1)])
def test_queue_hands_out_each_tile_once_and_ends(tiles, workers, failing):
    for seed in range(100):
        run = simulate_queue([1.0] * tiles, workers, jitter=0.9, seed=seed)
        assert sorted(t for mine in run.assignment for t in mine) == list(range(tiles))
        assert run.failed_queries == failing


def test_queue_refuses_what_the_hardware_leaves_undefined():
    queue = ClcQueue(2, 4)
    assert [queue.first_tile(w) for w in range(4)] == [0, 1, -1, -1]
    assert queue.try_cancel(0) == -1
    with pytest.raises(RuntimeError, match="asks again"):
        queue.try_cancel(0)
    with pytest.raises(RuntimeError, match="never started"):
        queue.try_cancel(3)


def test_sorted_queue_without_jitter_is_longest_first():
    costs = seed_costs()
    run = simulate_queue(costs, 8, order=descending(costs).tolist())
    assert run.makespan == balance(longest_first(costs, 8), costs).makespan


def test_queue_evens_out_what_a_static_list_cannot_know():
    """Run times that differ from the plan: zigzag keeps its lists, the queue adapts."""
    costs = np.full(400, 10.0)
    slow = np.where(np.arange(400) % 8 == 0, 20.0, 10.0)  # every eighth tile takes twice what was planned
    static = balance(zigzag(costs, 8), slow)
    assert simulate_queue(slow, 8).makespan < static.makespan


def test_mega_tile_is_split_and_an_even_batch_is_not():
    even = split_decision([10] * 64, 8)
    assert even.max_blocks is None and even.whole == even.split == 80
    mega = split_decision([400] + [10] * 32, 8)
    assert mega.max_blocks is not None and mega.split < 0.3 * mega.whole
    # enough heads: the mega-tiles fill the machine
    assert split_decision([400] + [10] * 32, 8, copies=8).max_blocks is None
    assert split_decision([], 8).max_blocks is None


def test_no_schedule_beats_a_mega_tile_and_splitting_does():
    """148 workers, 888 tiles with a Pareto tail: the median over seeds of each makespan over the bound of whole tiles."""
    ratios = []
    for seed in range(40):
        costs = np.ceil(10 * (np.random.default_rng(seed).pareto(1.5, 888) + 1)).astype(int)
        whole = [balance(deal(costs, 148), costs) for deal in (round_robin, zigzag, longest_first)]
        spans = [b.makespan for b in whole] + [simulate_queue(costs, 148).makespan, split_decision(costs, 148).split]
        ratios.append([span / whole[0].bound for span in spans])
    robin, zig, longest, queue, split = np.median(ratios, axis=0)
    assert 1.0 <= longest < queue < zig < robin < 1.2
    assert split < 0.5  # half and less of what the largest tile alone takes
