"""Train a small next-item model on jagged batches with data-parallel ranks, tokens balanced over the ranks by zigzag.

    torchrun --standalone --nproc-per-node 2 examples/train_jagged_ddp.py                     gloo on a CPU, NCCL where GPUs are
    torchrun --standalone --nproc-per-node 2 examples/train_jagged_ddp.py --fsdp              FSDP2 in place of DDP
    torchrun ... examples/train_jagged_ddp.py --dim 1024 --layers 4 --users 512 --longest 8192 --json times.json
    python examples/train_jagged_ddp.py                                                       one process, for comparison

A step ends when the slowest rank does. The same batches are dealt to the ranks in three ways, from the same initial weights, so the
losses agree and the step times need not: contiguously as they come (as many users per rank); by zigzag over the lengths; longest
first by the cost of a user, each to the rank with the least so far. Zigzag looks at the order only, which is the same by tokens
(what the linear layers cost) and by causal pairs (what attention costs); longest first weighs both in FLOPs.

Each rank multiplies its summed loss by ranks / tokens of the whole batch, since DDP and FSDP take the mean over ranks: so the
gradient is that of one process with the whole batch, however the users are dealt. Of several rounds the first is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from jfa.bench.runner import environment
from jfa.layout import offsets_from_lengths, pareto_lengths
from jfa.modules import JaggedSelfAttention
from jfa.schedule import balance, longest_first, zigzag

WAYS = ("as they come", "zigzag", "longest first")
WARM_UP = 5  # steps over which the learning rate rises


@dataclass(frozen=True)
class Sizes:
    """The model and its batches: ``users`` sequences per batch over all ranks, of 16 to ``longest`` items."""

    dim: int = 32
    heads: int = 2
    layers: int = 2
    items: int = 64
    users: int = 32
    longest: int = 256


# ------------------------------------------------------------------------------------------------------------- the model
class Block(nn.Module):
    """Causal self attention and a feed-forward layer, each added to its input."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention = JaggedSelfAttention(dim, heads, causal=True)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Return x [total, dim], offsets [B+1] -> [total, dim]; ``longest`` bounds the lengths."""
        x = x + self.attention(self.norms[0](x), offsets, longest)
        return x + self.mlp(self.norms[1](x))


class NextItem(nn.Module):
    """Items -> the logits of each next item."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.item = nn.Embedding(sizes.items, sizes.dim)
        self.blocks = nn.ModuleList([Block(sizes.dim, sizes.heads) for _ in range(sizes.layers)])
        self.score = nn.Linear(sizes.dim, sizes.items)

    def forward(self, items: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Return items [total] int64, offsets [B+1] int32 -> [total, items]."""
        x = self.item(items)
        for block in self.blocks:
            x = block(x, offsets, longest)
        return self.score(x)


# -------------------------------------------------------------------------------------------------------------- the data
def lengths_of(step: int, sizes: Sizes) -> Tensor:
    """Return [users] int32: the history lengths of a batch, with a Pareto tail."""
    return pareto_lengths(sizes.users, 16, sizes.longest, alpha=1.0, seed=step)


def history(step: int, user: int, length: int, sizes: Sizes) -> Tensor:
    """Return [length + 1] int64: a user walks through the items with a stride of their own, and one step in ten goes anywhere."""
    generator = torch.Generator().manual_seed(step * 1_000_003 + user)
    draw = lambda high: torch.randint(high, (length + 1,), generator=generator)
    strides = torch.where(draw(10) == 0, draw(sizes.items), 1 + user % 4)
    return torch.cumsum(strides, 0) % sizes.items


def flops(lengths: Tensor, sizes: Sizes) -> Tensor:
    """Return [users] fp64: FLOPs of each user's matrix products, forward: linear layers by tokens, attention by causal pairs."""
    tokens = lengths.double()
    linear = 2 * sizes.dim * (12 * sizes.dim * sizes.layers + sizes.items)
    return tokens * linear + tokens * (tokens + 1) / 2 * 4 * sizes.dim * sizes.layers


def deal(way: str, lengths: Tensor, ranks: int, sizes: Sizes) -> list[list[int]]:
    """Return the users of each rank."""
    if way == "zigzag":
        return zigzag(lengths.tolist(), ranks)
    if way == "longest first":
        return longest_first(flops(lengths, sizes).tolist(), ranks)
    return [part.tolist() for part in torch.arange(len(lengths)).tensor_split(ranks)]


def batch(step: int, mine: list[int], lengths: Tensor, sizes: Sizes, device: torch.device):
    """Return (items [total], the next ones [total], offsets [B+1], longest) of some users of a batch."""
    walks = [history(step, user, int(lengths[user]), sizes) for user in mine]
    items, following = (torch.cat([walk[part] for walk in walks]).to(device) for part in (slice(-1), slice(1, None)))
    own = lengths[mine]
    return items, following, offsets_from_lengths(own, device=device), int(own.max())


# ------------------------------------------------------------------------------------------------------------ the training
def wrapped(sizes: Sizes, device: torch.device, dtype: torch.dtype, fsdp: bool) -> nn.Module:
    """Return the model, the same on every rank, under DDP or FSDP2; as it is where there is one process."""
    torch.manual_seed(0)
    model = NextItem(sizes).to(device, dtype)
    if not dist.is_initialized():
        return model
    if not fsdp:
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def local_loss(model: nn.Module, data, tokens: int, ranks: int) -> Tensor:
    """Return this rank's part of the batch's mean loss, such that the mean over ranks is that mean."""
    items, following, offsets, longest = data
    with torch.autocast("cuda", torch.bfloat16, enabled=items.is_cuda):
        logits = model(items, offsets, longest)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(exact, following, reduction="sum") * (ranks / tokens)


def train(way: str, sizes: Sizes, steps: int, device: torch.device, dtype=torch.float32, fsdp=False):
    """Train from the same weights; (losses per step, this rank's seconds per step, the model)."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = wrapped(sizes, device, dtype, fsdp)
    rate = min(3e-3, 0.2 / sizes.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    losses, seconds = [], []
    for step in range(steps):
        lengths = lengths_of(step, sizes)
        data = batch(step, deal(way, lengths, ranks, sizes)[rank], lengths, sizes, device)
        together(wait)
        start = time.perf_counter()
        loss = local_loss(model, data, int(lengths.sum()), ranks)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(mean_over_ranks(loss.detach()))
    return losses, seconds, model


def together(wait) -> None:
    """Start a step on all ranks at once."""
    wait()
    if dist.is_initialized():
        dist.barrier()


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a number over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return float(value)


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Return per step the time of the slowest rank: what the step took."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def spread(way: str, sizes: Sizes, steps: int, ranks: int) -> dict[str, float]:
    """Return most loaded rank over the mean, averaged over the steps: by tokens, by causal pairs of attention, by FLOPs of both."""
    found: dict[str, list[float]] = {"tokens": [], "pairs": [], "flops": []}
    for step in range(steps):
        lengths = lengths_of(step, sizes)
        tokens, dealt = lengths.double(), deal(way, lengths, ranks, sizes)
        for name, cost in zip(found, (tokens, tokens * (tokens + 1) / 2, flops(lengths, sizes))):
            found[name].append(balance(dealt, cost.numpy()).imbalance)
    return {name: round(statistics.mean(values), 4) for name, values in found.items()}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by name on the CPU, put together where they are sharded."""
    whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
    state = {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}
    return {name: value.detach().cpu() for name, value in state.items()}


def main() -> None:
    """Train both ways, compare, and write what was measured."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in Sizes().__dict__.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--rounds", type=int, default=3, help="trainings per way, in turns; the first is not counted")
    p.add_argument("--warmup", type=int, default=3, help="steps of a training that are not timed")
    p.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    p.add_argument("--double", action="store_true", help="fp64, to compare with one process (on a CPU)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the times")
    p.add_argument("--save", type=Path, metavar="FILE", help="write the weights after the last training")
    args = p.parse_args()
    device = begin()
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes().__dict__})
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    first = not dist.is_initialized() or dist.get_rank() == 0
    runs = []
    for round_ in range(args.rounds):
        for way in WAYS:
            dtype = torch.float64 if args.double else torch.float32
            losses, seconds, model = train(way, sizes, args.steps, device, dtype, args.fsdp)
            times = [1e3 * s for s in slowest(seconds, device)][args.warmup :]
            run = dict(way=way, round=round_, step_ms=statistics.median(times) if times else None, losses=losses)
            runs.append(run | {"steps_ms": times, "most_over_mean": spread(way, sizes, args.steps, ranks)})
            if first:
                print(line(runs[-1]), flush=True)
    if first and args.json:
        how = "FSDP2" if args.fsdp else "DDP"
        facts = dict(environment=environment(device), ranks=ranks, how=how, sizes=sizes.__dict__, warmup=args.warmup)
        args.json.write_text(json.dumps(facts | summary(runs) | {"runs": runs}, indent=1) + "\n")
    state = full_state(model)  # all ranks take part
    if first and args.save:
        torch.save(state, args.save)
    del model
    end()


def begin() -> torch.device:
    """Join the other processes, where torchrun started several; this process's device."""
    if not torch.cuda.is_available():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl", device_id=device)
    return device


def end() -> None:
    """Leave the other processes; call it when no model is left.

    DDP's reducer owns the process group too. If it is the last owner, it joins gloo's thread while it holds the GIL, and that
    thread may need the GIL to release a tensor: the process would never end. ``destroy_process_group`` releases the GIL first.
    """
    if dist.is_initialized():
        gc.collect()  # a model may be part of a reference cycle
        dist.destroy_process_group()


def line(run: dict) -> str:
    """Return the numbers of one training as text."""
    time_ = "not timed" if run["step_ms"] is None else f"{run['step_ms']:.1f} ms per step"
    most = run["most_over_mean"]
    return (
        f"{run['way']:14} {time_} | most / mean: "
        f"tokens {most['tokens']:.3f}, pairs {most['pairs']:.3f}, FLOPs {most['flops']:.3f}"
        f" | loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}"
    )


def summary(runs: list[dict]) -> dict:
    """Return median step time of each way over the rounds but the first, and how many times faster than contiguously dealt."""
    counted = [r for r in runs if r["round"] > 0] or runs
    median = lambda way: statistics.median(
        [t for r in counted if r["way"] == way for t in r["steps_ms"]] or [float("nan")]
    )
    times = {way: median(way) for way in WAYS}
    return {"step_ms": times, "speedup": {way: times[WAYS[0]] / times[way] for way in WAYS[1:]}}


if __name__ == "__main__":
    main()
