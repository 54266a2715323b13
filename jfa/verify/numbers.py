"""Sweeps of random problems against fp64, by number: the same number is the same problem on every machine.

Each function judges problems on one backend, returns how many it judged, and raises AssertionError naming what is wrong.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from jfa.bench import peers, shapes
from jfa.verify.cases import Case, judge, random_case

HALF = (torch.bfloat16, torch.bfloat16, torch.float16)
BATCH = 10  # problems per number of `random_batch`: the cost of a job is then more than that of handing it out

FIRST = {
    "one sequence": Case([64], [64], dim=64),
    "sequences of different lengths": Case([5, 70, 0, 33], [130, 70, 3, 1], dim=64),
    "head size 128": Case([200, 40], [130, 300], dim=128),
    "causal": Case([150, 20], [150, 260], dim=64, options=dict(causal=True)),
    "window": Case([150, 20], [150, 260], dim=64, options=dict(window_size=30)),
    "grouped heads": Case([150, 20], [150, 260], heads=8, kv_heads=2, dim=64),
    "shared queries": Case([1] * 5, [130, 5, 0, 300, 140], dim=128, shared_q=32),
}
"""The simplest problems, in the order in which a kernel would get them right."""


def first(name: str, backend: str, device: str = "cuda") -> int:
    """Judge one of :data:`FIRST` in bfloat16, forward and backward."""
    judge(replace(FIRST[name], dtype=torch.bfloat16), device, backend=backend)
    return 1


def random_problem(seed: int, backend: str, device: str = "cuda") -> int:
    """Judge one small problem: any lengths, masks, heads; every fifth with ``deterministic``."""
    judge(random_case(seed, HALF[seed % 3]), device, backend=backend, deterministic=seed % 5 == 4)
    return 1


def random_batch(begin: int, backend: str, device: str = "cuda") -> int:
    """Judge the problems ``begin`` .. ``begin + BATCH - 1``."""
    return sum(random_problem(seed, backend, device) for seed in range(begin, begin + BATCH))


def large(seed: int, backend: str, device: str = "cuda") -> int:
    """Judge a problem of up to nine sequences of up to 1500 tokens with the usual head sizes."""
    rng = random.Random(seed)
    case = random_case(1000 + seed, HALF[seed % 3], longest=1500, most=9)
    case.dim = (64, 128, 128, 80, 96, 128)[seed % 6]
    case.dim_v = rng.choice([None, None, 64, 128])
    case.scale_up = 1.0
    judge(case, device, backend=backend, deterministic=seed % 4 == 3)
    return 1


def wide(seed: int, backend: str, device: str = "cuda") -> int:
    """Judge a problem with a head size beyond 128."""
    case = random_case(2000 + seed, HALF[seed % 3], longest=300)
    case.dim, case.dim_v = ((160, 160), (256, 256), (192, 128), (128, 256))[seed % 4]
    case.scale_up = 1.0
    judge(case, device, backend=backend, deterministic=seed % 3 == 2)
    return 1


REPEATED = ("pma32", "pma128", "self", "cross")


def repeat(shape: str, backend: str, device: str = "cuda", times: int = 10) -> int:
    """Compute the deterministic gradients of a named shape ``times`` times; all bits must be equal."""
    inputs = shapes.make_inputs(known_shape(shape), device)
    call = peers.jfa(inputs, backend=backend, deterministic=True)
    grads = lambda: torch.autograd.grad(call(), (inputs.query, inputs.key, inputs.value), inputs.grad_out)
    first = grads()
    for _ in range(times - 1):
        assert all(torch.equal(a, b) for a, b in zip(first, grads())), f"{shape}: gradients differ from run to run"
    return times


def known_shape(name: str) -> shapes.Shape:
    """Return a named shape, or one of the tiny ones for a CPU. Raises KeyError for another name."""
    return (shapes.SHAPES | {shape.name: shape for shape in shapes.ON_CPU})[name]
