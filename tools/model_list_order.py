"""What sorting tiles by the length of their block lists would bring: makespan of a queue on 132 SMs over its lower bound, modelled.

    python tools/model_list_order.py

Tiles come from the tile list in the order of how many key blocks they *may* visit. Compared with the order of how many their
lists name, which would take a sort on the device per call. A tile costs its listed blocks plus one for its beginning and end.
"""

from __future__ import annotations

import numpy as np

from jfa.layout import log_uniform_lengths
from jfa.schedule.assign import descending
from jfa.schedule.clc import simulate_queue

SMS, HEADS, BLOCK, SEEDS = 132, 4, 128, 10
LENGTHS = {"128 sequences of 16 to 4096": (128, 16, 4096), "24 of 2048 to 8192": (24, 2048, 8192)}
SHARES = ("half of every tile's", "any share, per tile", "any share, per sequence")


def tiles(lengths: np.ndarray, share: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return (candidate blocks, cost) of every tile of every head."""
    blocks = np.repeat(-(-lengths // BLOCK), -(-lengths // BLOCK) * HEADS)
    if share == SHARES[0]:
        kept = np.full(len(blocks), 0.5)
    elif share == SHARES[1]:
        kept = rng.uniform(0, 1, len(blocks))
    else:
        kept = np.repeat(rng.uniform(0, 1, len(lengths)), -(-lengths // BLOCK) * HEADS)
    return blocks, np.maximum(np.ceil(kept * blocks), 1) + 1


def overhead(lengths: tuple[int, int, int], share: str) -> tuple[float, float]:
    """Return the mean makespan over the bound: by candidates, by lists."""
    found = []
    for seed in range(SEEDS):
        blocks, cost = tiles(log_uniform_lengths(*lengths, seed=seed).numpy(), share, np.random.default_rng(seed))
        bound = max(cost.max(), cost.sum() / SMS)
        orders = descending(blocks), descending(cost)
        found.append([simulate_queue(cost, SMS, order=list(order)).makespan / bound for order in orders])
    return tuple(np.mean(found, axis=0))


def main() -> None:
    """Print the table."""
    print("| lengths | blocks kept | by candidates | by lists |\n|---|---|---|---|")
    for name, lengths in LENGTHS.items():
        for share in SHARES:
            print(f"| {name} | {share} | " + " | ".join(f"{x:.3f}" for x in overhead(lengths, share)) + " |")


if __name__ == "__main__":
    main()
