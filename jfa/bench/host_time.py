"""Measure the host time of a small call beside FlashAttention 2's (torch's varlen_attn), in microseconds per call.

The batch has eight sequences of 64 tokens, so the host never waits for the device. Compare only ratios within one run:
hosts differ by a factor of 3. In one row batches of different totals alternate, as in training on jagged data. Without
a GPU launches do nothing (:func:`measure_stubbed`); the times then cover Python, torch's allocations and the autograd
engine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import jfa
from jfa.attention import make_problem, op
from jfa.masks import Band

SEQUENCES, LENGTH, HEADS, DIM = 8, 64, 8, 128
CALLS, ROUNDS = 30, 9
TOTALS = 16  # batches of different rows that take turns
NEW_TOTALS, NEW_SIGNATURE, BY_OP = "new totals each call", "new signature", "the registered op"
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


@dataclass(frozen=True)
class Batch:
    """Inputs of one call: tensors [rows, HEADS, DIM], offsets, and a gradient of the output."""

    tensors: tuple[Tensor, Tensor, Tensor]
    offsets: Tensor
    gradient: Tensor


def batch(extra: int, device: str, dtype: torch.dtype = torch.int32) -> Batch:
    """Return SEQUENCES sequences of LENGTH tokens, of which the last has ``extra`` fewer."""
    rows = SEQUENCES * LENGTH - extra
    like = dict(device=device, dtype=torch.bfloat16)
    tensors = tuple(torch.randn(rows, HEADS, DIM, requires_grad=True, **like) for _ in range(3))
    offsets = torch.arange(0, SEQUENCES * LENGTH + 1, LENGTH, device=device, dtype=dtype).clamp(max=rows)
    return Batch(tensors, offsets, torch.randn(rows, HEADS, DIM, **like))


def calls(backends: tuple[str, ...] = BACKENDS, device: str = "cuda") -> dict[str, Callable[[], tuple[Tensor, Batch]]]:
    """Return forward calls by name, functions of no arguments that return the output and its inputs.

    Backends that this device does not have are left out.
    """
    one, wide = batch(0, device), batch(0, device, torch.int64)
    others = itertools.cycle([batch(n, device) for n in range(1, TOTALS + 1)])
    found: dict[str, Callable[[], tuple[Tensor, Batch]]] = {}
    scales = (0.08 + 1e-9 * i for i in itertools.count())  # one that never was is a new signature
    try:
        from torch.nn.attention.varlen import varlen_attn

        if device == "cuda":
            found[FA2] = lambda: (varlen_attn(*one.tensors, one.offsets, one.offsets, LENGTH, LENGTH), one)
    except ImportError:
        pass

    def attend(b: Batch, **options) -> tuple[Tensor, Batch]:
        return jfa.jagged_flash_attention(*b.tensors, b.offsets, b.offsets, **options), b

    sizes = dict(rows_q=SEQUENCES * LENGTH, rows_kv=SEQUENCES * LENGTH, num_heads=HEADS, head_dim=DIM)
    for backend in backends:
        options = dict(max_seq_len_q=LENGTH, max_seq_len_kv=LENGTH, backend=backend)
        try:
            plan = jfa.plan(one.offsets, one.offsets, **sizes, **options)
        except ValueError:  # another GPU's kernels
            continue
        found[backend] = lambda o=options: attend(one, **o)
        if backend != "reference":
            found[f"{backend}, {NEW_TOTALS}"] = lambda o=options: attend(next(others), **o)
            found[f"{backend}, int64 offsets"] = lambda o=options: attend(wide, **o)
            found[f"{backend}, {NEW_SIGNATURE}"] = lambda o=options: attend(one, sm_scale=next(scales), **o)
            found[f"{backend}, {BY_OP}"] = partial(_by_op, one, backend)
        found[f"{backend}, with a plan"] = lambda o=options | {"plan": plan}: attend(one, **o)
    return found


def _by_op(b: Batch, backend: str) -> tuple[Tensor, Batch]:
    """Call what torch.compile's graphs call, with its autograd."""
    settings = DIM**-0.5, Band.make(), False, False, LENGTH, LENGTH
    problem = make_problem(*b.tensors, b.offsets, b.offsets, None, *settings)
    return op.attend_by_op(*b.tensors, op.Call(problem, backend, None, False, b.offsets))[0], b


def measure(backends: tuple[str, ...] = BACKENDS, device: str = "cuda", **bounds: int) -> dict[str, dict[str, float]]:
    """Return per implementation the microseconds of a forward, of one without gradients, and of a forward and backward ("both").

    "new totals each call": the batch before had another number of rows. "new signature": nothing is known of the call but
    what compiled. "the registered op": what torch.compile's graphs call, by torch.library and its autograd.

    Args:
        bounds: ``per_round`` (calls) and ``rounds``.
    """
    found = calls(backends, device)

    def with_backward(call: Callable) -> None:
        out, made_of = call()
        torch.autograd.grad(out, made_of.tensors, made_of.gradient)

    both = host_microseconds({name: partial(with_backward, call) for name, call in found.items()}, **bounds)
    forward = host_microseconds(found, **bounds)
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
    lines = [f"{'host, us per small call':32} {'forward':>9} {'no gradients':>13} {'with backward':>14}"]
    peer = times.get(FA2)
    for name, t in times.items():
        share = f"   {t['forward'] / peer['forward']:.2f}, {t['both'] / peer['both']:.2f} of FA2's" if peer else ""
        lines.append(f"{name:32} {t['forward']:9.1f} {t.get('no gradients', 0):13.1f} {t['both']:14.1f}{share}")
    return "\n".join(lines)
