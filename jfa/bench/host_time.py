"""How long a small call keeps the host, beside FlashAttention 2's (torch's varlen_attn): microseconds per call.

Eight sequences of 64 tokens, so the device is never waited for. Read the ratios within one run: hosts differ by a factor of 3.
Without a GPU launches do nothing (:func:`measure_stubbed`): what is left is Python, torch's allocations and the autograd engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import jfa
from jfa.attention import prepared

SEQUENCES, LENGTH, HEADS, DIM = 8, 64, 8, 128
CALLS, ROUNDS = 30, 9
BACKENDS = ("hopper", "blackwell", "portable")
FA2 = "FlashAttention 2"


def host_microseconds(call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Return the median over rounds of the host's time for one call; the device is waited for between rounds only."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(5):
        call()
    found = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found)


def calls(backends: tuple[str, ...] = BACKENDS, device: str = "cuda") -> tuple[dict[str, Callable], tuple[Tensor, ...]]:
    """Return forward calls by name, functions of no arguments that return the output, and the tensors to differentiate by.

    Backends that this device does not have are left out.
    """
    rows = SEQUENCES * LENGTH
    dtype = torch.bfloat16
    q, k, v = (torch.randn(rows, HEADS, DIM, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    offsets = torch.arange(0, rows + 1, LENGTH, device=device, dtype=torch.int32)
    found: dict[str, Callable] = {}
    try:
        from torch.nn.attention.varlen import varlen_attn

        if device == "cuda":
            found[FA2] = lambda: varlen_attn(q, k, v, offsets, offsets, LENGTH, LENGTH)
    except ImportError:
        pass
    for backend in backends:
        options = dict(max_seq_len_q=LENGTH, max_seq_len_kv=LENGTH, backend=backend)
        try:
            plan = jfa.plan(offsets, offsets, rows_q=rows, rows_kv=rows, num_heads=HEADS, head_dim=DIM, **options)
        except ValueError:  # another GPU's kernels
            continue
        found[backend] = lambda o=options: jfa.jagged_flash_attention(q, k, v, offsets, offsets, **o)
        if backend != "reference":
            found[f"{backend}, new shapes"] = lambda call=found[backend]: (prepared.forget(), call())[1]
        planned = options | {"plan": plan}
        found[f"{backend}, with a plan"] = lambda o=planned: jfa.jagged_flash_attention(q, k, v, offsets, offsets, **o)
    return found, (q, k, v)


def measure(backends: tuple[str, ...] = BACKENDS, device: str = "cuda", **bounds: int) -> dict[str, dict[str, float]]:
    """Return per implementation the microseconds of a forward, of one without gradients, and of a forward and backward ("both").

    "new shapes": nothing is known of the call but what compiled. ``bounds``: ``calls`` per round and ``rounds``.
    """
    found, inputs = calls(backends, device)
    times = {}
    for name, call in found.items():
        gradient = torch.randn_like(call())
        both = lambda call=call, g=gradient: torch.autograd.grad(call(), inputs, g)
        times[name] = {"forward": host_microseconds(call, **bounds)}
        with torch.no_grad():
            times[name]["no gradients"] = host_microseconds(call, **bounds)
        times[name]["both"] = host_microseconds(both, **bounds)
    return times


def measure_stubbed(**bounds: int) -> dict[str, dict[str, float]]:
    """Return the same of the backends whose launches can be left out, on the CPU."""
    from jfa.bench.stub import stubbed

    with stubbed():
        return measure(("hopper", "portable"), "cpu", **bounds)


def table(times: dict[str, dict[str, float]]) -> str:
    """Microseconds per small call on the host, and the ratio to FlashAttention 2's where that is there."""
    lines = [f"{'host, us per small call':26} {'forward':>9} {'no gradients':>13} {'with backward':>14}"]
    peer = times.get(FA2)
    for name, t in times.items():
        share = f"   {t['forward'] / peer['forward']:.2f}, {t['both'] / peer['both']:.2f} of FA2's" if peer else ""
        lines.append(f"{name:26} {t['forward']:9.1f} {t.get('no gradients', 0):13.1f} {t['both']:14.1f}{share}")
    return "\n".join(lines)
