"""Deal tiles to workers ahead of time (round robin, zigzag, longest first), and measure the balance.

A *tile* is a number 0 .. n-1 with a cost; an *assignment* is one list of tiles per worker, in the order they run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Costs = Sequence[float] | np.ndarray
Assignment = list[list[int]]


def round_robin(costs: Costs | int, workers: int) -> Assignment:
    """Deal tile t to worker t % workers, in the given order. ``costs`` may be a plain number of tiles."""
    num = _count(costs)
    _check_workers(workers)
    return [list(range(w, num, workers)) for w in range(workers)]


def zigzag(costs: Costs | int, workers: int) -> Assignment:
    """Deal the largest first, every second round backwards, so that no worker gets the larger one each time.

    With a plain number of tiles they count as sorted already.
    """
    num = _count(costs)
    _check_workers(workers)
    order = np.arange(num) if isinstance(costs, int) else descending(costs)
    rounds = -(-num // workers)
    slots = ([zigzag_slot(r, w, workers) for r in range(rounds)] for w in range(workers))
    return [[int(order[s]) for s in mine if s < num] for mine in slots]


def zigzag_slot(round_: int, worker: int, workers: int) -> int:
    """Return position in the sorted list that ``worker`` takes in ``round_``: the same arithmetic a persistent kernel does."""
    return round_ * workers + (worker if round_ % 2 == 0 else workers - 1 - worker)


def longest_first(costs: Costs, workers: int) -> Assignment:
    """Give each tile, largest first, to the worker with the least so far: Graham's LPT rule, at most 4/3 of the best makespan."""
    _check_workers(workers)
    heap = [(0.0, w) for w in range(workers)]
    assignment: Assignment = [[] for _ in range(workers)]
    for t in descending(costs):
        load, w = heapq.heappop(heap)
        assignment[w].append(int(t))
        heapq.heappush(heap, (load + float(costs[t]), w))
    return assignment


def descending(costs: Costs) -> np.ndarray:
    """Return the tile numbers by falling cost; equal ones keep their order."""
    return np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable")


@dataclass(frozen=True)
class Balance:
    """The balance of an assignment. Loads are sums of costs, in the costs' unit."""

    loads: np.ndarray  # [workers]
    largest: float  # the largest single tile

    @property
    def makespan(self) -> float:
        """The most loaded worker's load: when the kernel ends."""
        return float(self.loads.max(initial=0))

    @property
    def mean(self) -> float:
        """Mean load of a worker."""
        return float(self.loads.mean())

    @property
    def imbalance(self) -> float:
        """Makespan over mean load; 1 is even. 1 as well if there is no work."""
        return self.makespan / self.mean if self.mean else 1.0

    @property
    def range(self) -> float:
        """Most loaded minus least loaded."""
        return float(self.loads.max(initial=0) - self.loads.min(initial=self.makespan))

    @property
    def bound(self) -> float:
        """No schedule of whole tiles ends before this: max(largest tile, mean load)."""
        return max(self.largest, self.mean)


def balance(assignment: Assignment, costs: Costs) -> Balance:
    """Load statistics of an assignment."""
    costs = np.asarray(costs)
    loads = np.array([costs[mine].sum() if mine else 0 for mine in assignment])
    return Balance(loads, float(costs.max(initial=0)))


def _count(costs: Costs | int) -> int:
    num = costs if isinstance(costs, int) else len(costs)
    if num < 0:
        raise ValueError(f"the number of tiles must be >= 0, got {num}")
    return num


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
