"""Train a small jagged model with attention in bf16 and in MXFP8, from the same weights on the same batches; compare the losses.

    python examples/train_mxfp8.py                            four precisions, two seeds: some minutes on a CPU
    python examples/train_mxfp8.py --steps 40 --seeds 1
    python examples/train_mxfp8.py --json curves.json

Where no Blackwell GPU is there, MXFP8 is simulated: operands are rounded as its tensor cores take them, products are fp32. A fourth
run has the forward in MXFP8 and a backward that recomputes P in bf16's precision: it does not differentiate what the forward
computed. Histories repeat a motif, so the next item can be told only by attending to the last time it came.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import jfa
from jfa.bench.runner import environment
from jfa.layout import log_uniform_lengths, offsets_from_lengths

PRECISIONS = ("fp32", "bf16", "mxfp8", "mxfp8 forward only")


@dataclass(frozen=True)
class Sizes:
    """The model and its batches: ``users`` histories of 16 to ``longest`` items per batch."""

    dim: int = 128
    heads: int = 2
    layers: int = 2
    items: int = 32
    users: int = 8
    longest: int = 128


# ----------------------------------------------------------------------------------------------------------- the attention
class ForwardOnly(torch.autograd.Function):
    """MXFP8 attention with a backward in bf16's precision, fed with the MXFP8 forward's output and log-sum-exp.

    So P = exp(S - lse) comes from other scores than the log-sum-exp, and its rows do not sum to 1.
    """

    @staticmethod
    def forward(ctx, q, k, v, offsets):
        out, lse = jfa.jagged_flash_attention(
            q, k, v, offsets, offsets, causal=True, precision="mxfp8", backend="reference", return_lse=True
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, offsets = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for a, b in pairwise(offsets.tolist()):
            of_sequence = (x[a:b].transpose(0, 1).float() for x in (q, k, v, out, dout))  # [heads, tokens, head dim]
            for grad, part in zip(grads, one_backward(*of_sequence, lse[:, a:b, None])):
                grad[a:b] = part.transpose(0, 1)
        return *grads, None


def one_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of one sequence's causal attention, all [heads, tokens, head dim] fp32, from lse [heads, tokens, 1]."""
    scale = q.shape[2] ** -0.5
    p = torch.exp(scale * q @ k.mT - lse).tril()
    ds = p * (dout @ v.mT - (out * dout).sum(2, keepdim=True))
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ dout


def attend(precision: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Return q, k, v [total, heads, head dim] fp32 -> [total, heads, head dim] fp32, causal."""
    if precision == "fp32":
        return jfa.jagged_flash_attention(q, k, v, offsets, offsets, causal=True)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    if precision == "mxfp8 forward only":
        return ForwardOnly.apply(q, k, v, offsets).float()
    asked = "mxfp8" if precision == "mxfp8" else None
    return jfa.jagged_flash_attention(q, k, v, offsets, offsets, causal=True, precision=asked).float()


# --------------------------------------------------------------------------------------------------------------- the model
class Block(nn.Module):
    """Causal self attention in a given precision and a feed-forward layer, each added to its input."""

    def __init__(self, sizes: Sizes, precision: str):
        super().__init__()
        self.precision, self.heads = precision, sizes.heads
        self.norms = nn.ModuleList([nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)])
        self.to_qkv, self.to_out = nn.Linear(sizes.dim, 3 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.mlp = nn.Sequential(nn.Linear(sizes.dim, 4 * sizes.dim), nn.GELU(), nn.Linear(4 * sizes.dim, sizes.dim))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return x [total, dim], offsets [B+1] -> [total, dim]."""
        q, k, v = self.to_qkv(self.norms[0](x)).unflatten(1, (3, self.heads, -1)).unbind(1)
        x = x + self.to_out(attend(self.precision, q, k, v, offsets).flatten(1))
        return x + self.mlp(self.norms[1](x))


class NextItem(nn.Module):
    """Items and their places -> the logits of each next item."""

    def __init__(self, sizes: Sizes, precision: str):
        super().__init__()
        self.item, self.place = nn.Embedding(sizes.items, sizes.dim), nn.Embedding(sizes.longest, sizes.dim)
        self.blocks = nn.ModuleList([Block(sizes, precision) for _ in range(sizes.layers)])
        self.score = nn.Sequential(nn.LayerNorm(sizes.dim), nn.Linear(sizes.dim, sizes.items))

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        """Return items [total] int64, offsets [B+1] int32 -> [total, items]."""
        x = self.item(items) + self.place(jfa.layout.positions(offsets, items.shape[0]))
        for block in self.blocks:
            x = block(x, offsets)
        return self.score(x)


# ------------------------------------------------------------------------------------------------------------ the training
def batch(step: int, seed: int, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return (items [total], the next ones [total], offsets [B+1]): histories repeat motifs of their own, one item in 25 is any."""
    lengths = log_uniform_lengths(sizes.users, 16, sizes.longest, seed=1_000 * seed + step)
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)
    walks = []
    for length in lengths.tolist():
        motif = draw(sizes.items, 6 + int(draw(6, 1)))
        walk = motif.repeat(length // len(motif) + 2)[: length + 1]
        walks.append(torch.where(draw(25, length + 1) == 0, draw(sizes.items, length + 1), walk))
    items, following = (torch.cat([walk[part] for walk in walks]) for part in (slice(-1), slice(1, None)))
    return items, following, offsets_from_lengths(lengths)


def train(precision: str, sizes: Sizes, steps: int, seed: int, device: torch.device) -> list[float]:
    """Train; return the loss of every step."""
    torch.manual_seed(seed)
    model = NextItem(sizes, precision).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        items, following, offsets = (x.to(device) for x in batch(step, seed, sizes))
        loss = cross_entropy(model(items, offsets), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
    return losses


def main() -> None:
    """Train what the command line asks for, print a table, write the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the curves, the sizes and the versions")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    device, curves = torch.device(args.device), []
    last = max(1, args.steps // 10)
    print(f"mean loss of the last {last} of {args.steps} steps")
    for precision in args.precisions:
        for seed in range(args.seeds):
            losses = train(precision, sizes, args.steps, seed, device)
            curves.append(dict(precision=precision, seed=seed, losses=losses))
            print(f"{precision:18s}  seed {seed}  {sum(losses[-last:]) / last:.4f}", flush=True)
    if args.json:
        found = dict(environment=environment(device), sizes=asdict(sizes), steps=args.steps, last=last, curves=curves)
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
