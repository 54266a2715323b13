"""How long a small call keeps the host, beside FlashAttention 2's (torch's varlen_attn): microseconds per call, on a GPU.

    python tests/gpu/host_time.py

Eight sequences of 64 tokens, so the device is never waited for. Read the ratios within one run: hosts differ by a factor of 3.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

import jfa  # noqa: E402

SEQUENCES, LENGTH, HEADS, DIM = 8, 64, 8, 128
CALLS, ROUNDS = 30, 9


def host_microseconds(call) -> float:
    """The median over rounds of the host's time for one call; the device is waited for between rounds only."""
    for _ in range(5):
        call()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


def calls() -> tuple[dict, tuple]:
    """Return forward calls by name, functions of no arguments that return the output, and the tensors to differentiate by."""
    rows = SEQUENCES * LENGTH
    q, k, v = (torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    offsets = torch.arange(0, rows + 1, LENGTH, device="cuda", dtype=torch.int32)
    found = {}
    try:
        from torch.nn.attention.varlen import varlen_attn

        found["FlashAttention 2"] = lambda: varlen_attn(q, k, v, offsets, offsets, LENGTH, LENGTH)
    except ImportError:
        pass
    for backend in ("hopper", "blackwell", "portable"):
        options = dict(max_seq_len_q=LENGTH, max_seq_len_kv=LENGTH, backend=backend)
        try:
            plan = jfa.plan(offsets, offsets, rows_q=rows, rows_kv=rows, num_heads=HEADS, head_dim=DIM, **options)
        except ValueError:  # another GPU's kernels
            continue
        found[backend] = lambda o=options: jfa.jagged_flash_attention(q, k, v, offsets, offsets, **o)
        planned = options | {"plan": plan}
        found[f"{backend}, with a plan"] = lambda o=planned: jfa.jagged_flash_attention(q, k, v, offsets, offsets, **o)
    return found, (q, k, v)


def main() -> None:
    """Print one row per implementation."""
    found, inputs = calls()
    print(f"{'':24s} {'forward':>9s} {'and backward':>13s}  us per call on the host, {torch.cuda.get_device_name()}")
    for name, call in found.items():
        gradient = torch.randn_like(call())
        both = host_microseconds(lambda call=call, g=gradient: torch.autograd.grad(call(), inputs, g))
        print(f"{name:24s} {host_microseconds(call):9.1f} {both:13.1f}")


if __name__ == "__main__":
    main()
