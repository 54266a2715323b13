"""The Hopper kernels on the emulator: right for any lengths, masks and heads, under any order of the machine's work."""

from __future__ import annotations

import math
import random

import pytest
import torch

import jfa
from jfa import emulator
from jfa.attention import make_problem
from jfa.kernels.hopper import launch as hopper
from jfa.kernels.hopper import tiles
from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from tests.attention_cases import Case, judge, random_case

POLICIES = ("eager", "lazy", "random")


@pytest.mark.parametrize("seed", range(18))
def test_random_cases_agree_with_fp64(seed):
    dtype = torch.float16 if seed % 3 == 0 else torch.bfloat16
    with emulator.options(policy=POLICIES[seed % 3], seed=seed, contract=seed % 2 == 1):
        judge(random_case(seed, dtype), backend="hopper", deterministic=seed % 5 == 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case",
    [
        Case([70, 0, 33, 1, 200], [130, 5, 0, 300, 140], dim=128, dtype=torch.bfloat16),
        Case([150, 20], [150, 260], heads=4, dim=64, dtype=torch.bfloat16, options=dict(causal=True)),
        Case([3, 64, 0, 7], [100, 64, 30, 0], dim=128, dtype=torch.bfloat16, options=dict(window_size=20)),
        Case([1] * 5, [130, 5, 0, 300, 140], dim=128, dtype=torch.bfloat16, shared_q=32),
        Case([1] * 3, [1100, 7, 140], dim=128, dtype=torch.bfloat16, shared_q=128, options=dict(causal=True)),
        Case([1] * 3, [130, 0, 140], dim=64, dtype=torch.bfloat16, shared_q=150),
        Case([1] * 3, [16, 9, 155], dim=16, dtype=torch.bfloat16, shared_q=33, slack=5),
    ],
    ids=["full", "causal gqa", "window short", "shared 32", "shared 128", "shared 150", "rows of no sequence"],
)
def test_every_path_agrees_under_every_policy(policy, case):
    with emulator.options(policy=policy, seed=7):
        judge(case, backend="hopper")


def _random(rows, heads, dim, seed):
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()


@pytest.mark.parametrize("shared", [0, 32])
def test_a_poisoned_neighbour_reaches_nobody(shared):
    lengths = [40, 70, 90]
    q, k, v = (_random(n, 2, 64, i) for i, n in enumerate([shared or 200, 200, 200]))
    offsets = offsets_from_lengths(lengths)
    call = lambda k, v: jfa.jagged_flash_attention(
        q, k, v, None if shared else offsets, offsets, 90, 90, broadcast_q=bool(shared), backend="hopper"
    )
    clean = call(k, v)
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[40:110], v2[40:110] = math.nan, math.inf
    poisoned = call(k2, v2)
    rows = shared or 40
    last = 2 * shared if shared else 110
    assert torch.equal(clean[:rows], poisoned[:rows]) and torch.equal(clean[last:], poisoned[last:])


@pytest.mark.parametrize("shared", [0, 32, 150])
def test_deterministic_gradients_do_not_depend_on_the_order_of_work(shared):
    q, k, v = (_random(n, 2, 64, i) for i, n in enumerate([shared or 300, 300, 300]))
    offsets = offsets_from_lengths([130, 0, 20, 150])
    found = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)):
        with emulator.options(policy=policy, seed=seed):
            out = jfa.jagged_flash_attention(
                q,
                k,
                v,
                None if shared else offsets,
                offsets,
                150,
                150,
                broadcast_q=bool(shared),
                deterministic=True,
                backend="hopper",
            )
            found.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("seed", range(6))
def test_a_list_holds_every_row_once_and_the_longest_first(seed):
    rng = random.Random(seed)
    len_q, len_kv = ([rng.choice([0, 1, rng.randint(2, 600)]) for _ in range(40)] for _ in range(2))
    problem = make_problem(
        torch.empty(sum(len_q) + 3, 1, 64, dtype=torch.bfloat16),
        *(torch.empty(sum(len_kv) + 5, 1, 64, dtype=torch.bfloat16),) * 2,
        offsets_from_lengths(len_q),
        offsets_from_lengths(len_kv),
        None,
        1.0,
        Band(),
        False,
        False,
        0,
        0,
    )
    for build, begin, length, total, work in (
        (tiles.query_tiles, 0, 1, problem.rows_q, 5),
        (tiles.key_tiles, 4, 5, problem.rows_kv, 1),
    ):
        found = build(problem, 128)
        records = found.records[: int(found.counts[1])].tolist()
        rows = [r[begin] + i for r in records for i in range(r[2], min(r[2] + 128, r[length]))]
        assert sorted(rows) == list(range(total))
        loads = [r[work] if r[1] and r[5] else 0 for r in records]
        assert loads == sorted(loads, reverse=True)
        assert int(found.counts[0]) == sum(x > 0 for x in loads)


def test_lies_in_offsets_lead_nowhere_outside():
    q, k, v = (_random(50, 1, 64, i) for i in range(3))
    lies = torch.tensor([0, 70, 20, 1000], dtype=torch.int32)
    problem = make_problem(q, k, v, lies, lies, None, 0.1, Band(), False, False, 0, 0)
    with torch.no_grad(), emulator.options(races=False):  # these sequences overlap: several programs write a row
        out, lse = hopper.forward(problem, q, k, v)
        grads = hopper.backward(problem, torch.ones_like(out), None, q, k, v, out, lse)
    assert out.shape == (50, 1, 64) and all(g.shape == (50, 1, 64) for g in grads)


def test_supports_names_the_argument():
    assert "bfloat16 or float16" in hopper.supports(
        make_problem(
            *(torch.empty(4, 1, 64),) * 3,
            *(torch.tensor([0, 4], dtype=torch.int32),) * 2,
            None,
            1.0,
            Band(),
            False,
            False,
            0,
            0,
        )
    )
