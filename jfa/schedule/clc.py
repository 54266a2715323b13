"""A model of Blackwell's cluster launch control (CLC): running CTAs steal the work of CTAs that have not started yet.

A grid has one CTA per tile. The hardware starts as many as fit; each runs its own tile, then asks to cancel a CTA that
is still pending and runs that tile in its place, until an answer says that none is left. Two properties matter: each
tile runs once, and every worker gets exactly one "none left" (-1) and then stops.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jfa.schedule.assign import Assignment, Costs


class ClcQueue:
    """The pending CTAs of a launch of ``num_tiles`` CTAs on a machine that holds ``num_workers`` at once."""

    def __init__(self, num_tiles: int, num_workers: int):
        if num_tiles < 0 or num_workers < 1:
            raise ValueError(f"need num_tiles >= 0 and num_workers >= 1, got {num_tiles} and {num_workers}")
        self.started = min(num_tiles, num_workers)
        self.failed_queries = 0
        self._pending = deque(range(self.started, num_tiles))
        self._done: set[int] = set()

    def first_tile(self, worker: int) -> int:
        """Return the tile that a worker starts with (its own CTA's), or -1 for a worker that no CTA was launched on."""
        return worker if worker < self.started else -1

    def try_cancel(self, worker: int) -> int:
        """Steal the next pending CTA: its tile, or -1 if none is left; after a -1 that worker may not ask again.

        Raises:
            RuntimeError: a worker that never started, or that was told -1 before, asks (undefined on the hardware).
        """
        if worker >= self.started:
            raise RuntimeError(f"worker {worker} never started, so it cannot ask for work")
        if worker in self._done:
            raise RuntimeError(
                f"worker {worker} was told that nothing is left and asks again; the hardware leaves this undefined"
            )
        if self._pending:
            return self._pending.popleft()
        self._done.add(worker)
        self.failed_queries += 1
        return -1


@dataclass
class QueueRun:
    """The result of a simulated launch."""

    assignment: Assignment
    finish: np.ndarray  # [workers] when each worker stopped
    failed_queries: int
    order: list[int] = field(default_factory=list)  # tiles in the order they began

    @property
    def makespan(self) -> float:
        """When the last worker stopped."""
        return float(self.finish.max(initial=0))


def simulate_queue(
    costs: Costs, workers: int, *, order: list[int] | None = None, jitter: float = 0.0, seed: int = 0
) -> QueueRun:
    """Run tiles through a :class:`ClcQueue`: the worker that is free first asks first.

    Args:
        costs: [n] time of each tile.
        order: tile of each CTA (default 0 .. n-1); pass a longest-first order to model a sorted list.
        jitter: each tile takes cost * (1 + jitter * u), u uniform on [-1, 1]: what run-time variance does; equal finishing
            times are broken at random by the same ``seed``.
    """
    rng = np.random.default_rng(seed)
    order = list(range(len(costs))) if order is None else list(order)
    queue = ClcQueue(len(order), workers)
    run = QueueRun([[] for _ in range(workers)], np.zeros(workers), 0)
    free = [(0.0, rng.random(), w) for w in range(queue.started)]
    heapq.heapify(free)
    while free:
        now, _, w = heapq.heappop(free)
        cta = queue.try_cancel(w) if run.assignment[w] else queue.first_tile(w)
        if cta < 0:
            run.finish[w] = now
            continue
        tile = order[cta]
        run.assignment[w].append(tile)
        run.order.append(tile)
        spent = float(costs[tile]) * (1 + jitter * rng.uniform(-1, 1))
        heapq.heappush(free, (now + spent, rng.random(), w))
    run.failed_queries = queue.failed_queries
    return run
