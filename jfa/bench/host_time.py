"""How long a small call keeps the host, beside FlashAttention 2's (torch's varlen_attn): microseconds per call.

Eight sequences of 64 tokens, so the device is never waited for. Read the ratios within one run: hosts differ by a factor of 3.
Without a GPU launches do nothing (:func:`measure_stubbed`): what is left is Python, torch's allocations and the autograd engine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import jfa

SEQUENCES, LENGTH, HEADS, DIM = 8, 64, 8, 128
CALLS, ROUNDS = 30, 9
BACKENDS = ("hopper", "blackwell", "portable")
FA2 = "FlashAttention 2"


def host_microseconds(calls: dict[str, Callable], per_round: int = CALLS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median over rounds of the host's time for one call of each; the device is waited for between them only.

    All take their turn in every round: a host that slows down for a while slows down all.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-1, rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(per_round):
                call()
            if round_ >= 0:  # the first only warms up
                found[name].append((time.perf_counter() - start) / per_round * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def calls(backends: tuple[str, ...] = BACKENDS, device: str = "cuda") -> tuple[dict[str, Callable], tuple[Tensor, ...]]:
    """Return forward calls by name, functions of no arguments that return the output, and the tensors to differentiate by.

    Backends that this device does not have are left out.
    """
    rows = SEQUENCES * LENGTH
    dtype = torch.bfloat16
    q, k, v = (torch.randn(rows, HEADS, DIM, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    offsets = torch.arange(0, rows + 1, LENGTH, device=device, dtype=torch.int32)
    found: dict[str, Callable] = {}
    scales = (0.08 + 1e-9 * i for i in itertools.count())  # one that never was is a new signature, as other shapes are
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
            found[f"{backend}, new shapes"] = lambda o=options: jfa.jagged_flash_attention(
                q, k, v, offsets, offsets, sm_scale=next(scales), **o
            )
        planned = options | {"plan": plan}
        found[f"{backend}, with a plan"] = lambda o=planned: jfa.jagged_flash_attention(q, k, v, offsets, offsets, **o)
    return found, (q, k, v)


def measure(backends: tuple[str, ...] = BACKENDS, device: str = "cuda", **bounds: int) -> dict[str, dict[str, float]]:
    """Return per implementation the microseconds of a forward, of one without gradients, and of a forward and backward ("both").

    "new shapes": nothing is known of the call but what compiled. ``bounds``: ``per_round`` (calls) and ``rounds``.
    """
    found, inputs = calls(backends, device)
    with_backward = {}
    for name, call in found.items():
        gradient = torch.randn_like(call())
        with_backward[name] = lambda call=call, g=gradient: torch.autograd.grad(call(), inputs, g)
    forward, both = host_microseconds(found, **bounds), host_microseconds(with_backward, **bounds)
    with torch.no_grad():
        alone = host_microseconds(found, **bounds)
    return {name: {"forward": forward[name], "no gradients": alone[name], "both": both[name]} for name in found}


def measure_stubbed(**bounds: int) -> dict[str, dict[str, float]]:
    """Return the same of the backends whose launches can be left out, on the CPU."""
    from jfa.bench.stub import stubbed

    with stubbed():
        return measure(("hopper", "portable"), "cpu", **bounds)


def table(times: dict[str, dict[str, float]]) -> str:
    """Return microseconds per small call on the host, and the ratio to FlashAttention 2's where that is there."""
    lines = [f"{'host, us per small call':26} {'forward':>9} {'no gradients':>13} {'with backward':>14}"]
    peer = times.get(FA2)
    for name, t in times.items():
        share = f"   {t['forward'] / peer['forward']:.2f}, {t['both'] / peer['both']:.2f} of FA2's" if peer else ""
        lines.append(f"{name:26} {t['forward']:9.1f} {t.get('no gradients', 0):13.1f} {t['both']:14.1f}{share}")
    return "\n".join(lines)
