"""Deal a jagged batch to data-parallel ranks, and add up their gradients. Four processes with gloo, on a CPU:

    torchrun --standalone --nproc-per-node 4 examples/balance_ranks.py

Every rank makes the same batch from its seed and keeps the sequences that a rule deals to it. A step ends when the slowest rank
does, so each rule's most loaded rank is compared with the mean: by tokens (what the projections cost) and by causal pairs (what
attention costs). Then the ranks' gradients are combined in two ways and compared with those of one process that has the whole
batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from jfa.layout import offsets_from_lengths, pareto_lengths
from jfa.modules import JaggedSelfAttention
from jfa.schedule import balance, longest_first, zigzag

DIM = 16


def rules(lengths: Tensor, ranks: int) -> dict[str, list[list[int]]]:
    """Return each rule's sequences of each rank. Zigzag looks at the order only, which is the same by tokens and by pairs."""
    tokens = lengths.tolist()
    return {
        "as they come": [part.tolist() for part in torch.arange(len(tokens)).tensor_split(ranks)],
        "zigzag": zigzag(tokens, ranks),
        "longest first, tokens": longest_first(tokens, ranks),
        "longest first, pairs": longest_first([pairs(n) for n in tokens], ranks),
    }


def pairs(n: int) -> int:
    """Return query-key pairs of a causal sequence of n tokens."""
    return n * (n + 1) // 2


def gradient(model: torch.nn.Module, x: Tensor, lengths: Tensor, mine: list[int]) -> tuple[Tensor, int]:
    """Return (gradient of the summed loss as one vector, tokens) of some sequences of the batch x [total, DIM]."""
    parts = [x.split(lengths.tolist())[b] for b in mine]
    out = model(torch.cat(parts), offsets_from_lengths(lengths[mine]))
    grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    return torch.cat([g.flatten() for g in grads]), len(out)


def combined(grad: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return (sum of all ranks' gradients over the sum of their tokens, mean of the ranks' own means)."""
    total, count, mean = grad.clone(), torch.tensor([float(tokens)]), grad / tokens
    for value in (total, count, mean):
        dist.all_reduce(value)
    return total / count, mean / dist.get_world_size()


def main() -> None:
    """Print one line per rule on rank 0."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lengths = pareto_lengths(64, 8, 256, alpha=1.0, seed=4)
    x = torch.randn(int(lengths.sum()), DIM)
    model = JaggedSelfAttention(DIM, num_heads=2, causal=True)
    whole, tokens = gradient(model, x, lengths, list(range(len(lengths))))
    for name, dealt in rules(lengths, ranks).items():
        by_tokens, by_mean = combined(*gradient(model, x, lengths, dealt[rank]))
        if rank == 0:
            spread = [
                balance(dealt, cost).imbalance for cost in (lengths.numpy(), [pairs(n) for n in lengths.tolist()])
            ]
            errors = [float((g - whole / tokens).norm() / (whole / tokens).norm()) for g in (by_tokens, by_mean)]
            print(f"{name:22} tokens {balance(dealt, lengths.numpy()).loads.tolist()}"
                  f" | most / mean: tokens {spread[0]:.3f}, pairs {spread[1]:.3f}"
                  f" | gradient off by {errors[0]:.0e} (sum / tokens), {errors[1]:.0e} (mean of means)")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
