"""Train a small model that reads jagged user histories: self attention, then pooling by learned queries. Runs on a CPU.

    python examples/pool_user_histories.py [--steps 60]

Every synthetic user is a history of item numbers, most short, a few long (a Pareto tail). Half of all items are "liked"; the label
is whether more than half of the user's last eight are. The model must learn which items, and that only recent ones count.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from jfa.layout import offsets_from_lengths, pareto_lengths
from jfa.modules import PMA, JaggedSelfAttention

ITEMS = 64


class HistoryModel(nn.Module):
    """Item and recency embeddings -> one layer of causal self attention -> 4 pooled rows -> one number per user."""

    def __init__(self, dim: int = 32, seeds: int = 4):
        super().__init__()
        self.item = nn.Embedding(ITEMS, dim)
        self.recency = nn.Embedding(16, dim)
        self.attention = JaggedSelfAttention(dim, num_heads=4, num_kv_heads=2, causal=True)
        self.pool = PMA(dim, num_heads=4, num_seeds=seeds)
        self.score = nn.Linear(seeds * dim, 1)

    def forward(self, items: Tensor, age: Tensor, offsets: Tensor) -> Tensor:
        """Return items, age [total] int64, offsets [B+1] -> logits [B]."""
        x = self.item(items) + self.recency(age.clamp(max=15))
        x = x + self.attention(x, offsets)
        return self.score(self.pool(x, offsets).flatten(1)).squeeze(1)


def make_batch(users: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (items [total], age [total] counted from the newest item, offsets [B+1], labels [B])."""
    lengths = pareto_lengths(users, 4, 200, seed=seed)
    offsets = offsets_from_lengths(lengths)
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(ITEMS, (int(lengths.sum()),), generator=generator)
    age = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in lengths])
    liked = torch.where(age < 8, (items < ITEMS // 2).float() * 2 - 1, 0.0)
    totals = torch.zeros(users).index_add_(0, torch.repeat_interleave(torch.arange(users), lengths), liked)
    return items, age, offsets, (totals > 0).float()


def train(steps: int = 60, users: int = 64, report: int = 10) -> list[float]:
    """Train; return the loss of every step."""
    torch.manual_seed(0)
    model = HistoryModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        items, age, offsets, labels = make_batch(users, seed=step)
        loss = binary_cross_entropy_with_logits(model(items, age, offsets), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if report and step % report == 0:
            longest = int(offsets.diff().max())
            print(
                f"step {step:3}  loss {losses[-1]:.3f}  ({len(items)} items of {users} users, the longest history {longest})"
            )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    train(parser.parse_args().steps)
