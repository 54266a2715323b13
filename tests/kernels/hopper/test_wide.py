"""Head dims beyond 128 on the emulator: columns in two pieces, dK and dV by a warp group each, dQ by a pass of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import jfa
from jfa import emulator
from jfa.kernels.common.example import example_problem
from jfa.kernels.hopper import config
from jfa.kernels.hopper import launch as hopper
from jfa.kernels.preference import portable_backward
from jfa.layout import offsets_from_lengths
from tests.attention_cases import Case, judge, random_case

POLICIES = ("eager", "lazy", "random")
DIMS = ((136, 136), (160, 160), (192, 128), (192, 192), (256, 256), (64, 200), (250, 40))
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("seed", range(14))
def test_random_cases_agree_with_fp64(seed):
    case = random_case(3000 + seed, FP16 if seed % 3 == 0 else BF16, longest=150)
    case = replace(case, dim=DIMS[seed % 7][0], dim_v=DIMS[seed % 7][1], scale_up=1.0)
    with emulator.options(policy=POLICIES[seed % 3], seed=seed, contract=seed % 2 == 1):
        judge(case, backend="hopper", deterministic=seed % 5 == 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case",
    [
        Case([70, 0, 33, 130], [130, 5, 0, 70], heads=1, kv_heads=1, dim=256, dtype=BF16),
        Case([90, 20], [90, 70], heads=4, kv_heads=2, dim=192, dim_v=128, dtype=BF16, options=dict(causal=True)),
        Case(
            [3, 64, 0, 150], [100, 64, 30, 150], heads=1, dim=160, kv_heads=1, dtype=FP16, options=dict(window_size=20)
        ),
    ],
    ids=["full", "causal gqa", "window"],
)
def test_every_path_agrees_under_every_policy(policy, case):
    with emulator.options(policy=policy, seed=11):
        judge(case, backend="hopper")


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_number_of_query_blocks_in_flight(stages, monkeypatch):
    chosen = config.wide_config
    monkeypatch.setattr(hopper, "wide_config", lambda problem: replace(chosen(problem), stages=stages))
    with emulator.options(policy="random", seed=stages):
        judge(Case([200, 60], [100, 60], heads=2, kv_heads=1, dim=192, dim_v=128, dtype=BF16), backend="hopper")


PIECES = {  # head dims, (head_dim, right), (head_dim_v, right_v), and whether outputs leave through their queries' buffers
    "96": ((96, 96), (96, 32), (96, 32), False),
    "96, late": ((80, 90), (96, 32), (96, 32), True),
    "192, 128, late": ((192, 128), (192, 64), (128, 0), True),
    "192": ((192, 160), (192, 64), (192, 64), False),
    "64, 96": ((64, 96), (64, 0), (96, 32), False),
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_forward_with_columns_in_two_pieces_agrees_with_fp64(name, causal, monkeypatch):
    (dim, dim_v), (d, right), (dv, right_v), late = PIECES[name]
    shipped = config.forward_config

    def pieces(problem):
        cfg = replace(shipped(problem), head_dim=d, head_dim_v=dv, right=right, right_v=right_v, late_queries=late)
        return replace(cfg, block_n=64, stages=2, parts=2, heads=1, q_stages=1)

    monkeypatch.setattr(hopper, "forward_config", pieces)
    case = Case([150, 0, 20], [150, 30, 210], heads=2, kv_heads=1, dim=dim, dim_v=dim_v, dtype=BF16)
    with emulator.options(policy=POLICIES[len(name) % 3], seed=causal):
        judge(replace(case, options=dict(causal=causal)), backend="hopper")


@pytest.mark.parametrize("tile_stages", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("with_dq", [False, True])
def test_a_backward_with_columns_in_two_pieces_agrees_with_fp64(tile_stages, ahead, with_dq, monkeypatch):
    chosen = config.backward_config

    def changed(problem):
        cfg = chosen(problem)
        assert (cfg.head_dim, cfg.right) == (96, 32)
        return replace(cfg, tile_stages=tile_stages, ahead=ahead)

    monkeypatch.setattr(hopper, "backward_config", changed)
    case = Case([150, 0, 20], [150, 30, 210], heads=2, kv_heads=1, dim=88, dim_v=96, dtype=BF16)
    with emulator.options(policy=POLICIES[tile_stages], seed=ahead):
        judge(replace(case, options=dict(causal=ahead)), backend="hopper", deterministic=not with_dq)


def test_shared_queries_too_many_to_stay_add_to_one_dq_in_two_pieces():
    judge(Case([1] * 3, [100, 20, 150], heads=1, kv_heads=1, dim=88, dtype=BF16, shared_q=150), backend="hopper")


FORWARDS = {  # head dims: columns of both pieces of Q and of V, keys of a block, late queries
    (64, 64): ((64, 0), (64, 0), 128, False),
    (96, 96): ((128, 0), (128, 0), 128, False),
    (192, 128): ((128, 64), (128, 0), 128, True),
    (160, 192): ((128, 64), (128, 64), 64, False),
    (256, 256): ((256, 0), (256, 0), 64, True),
    (256, 128): ((256, 0), (128, 0), 64, False),
    (64, 200): ((64, 0), (256, 0), 64, False),
}


@pytest.mark.parametrize("dims", FORWARDS)
def test_which_forward_long_sequences_get(dims):
    problem = replace(example_problem(dims[0], num_heads=3, num_kv_heads=3), head_dim_v=dims[1])
    cfg = config.forward_config(problem)
    found = (cfg.head_dim - cfg.right, cfg.right), (cfg.head_dim_v - cfg.right_v, cfg.right_v)
    assert (*found, cfg.block_n, cfg.late_queries) == FORWARDS[dims]
    memory = 256 * (cfg.q_stages * cfg.head_dim + (not cfg.late_queries) * cfg.head_dim_v)
    assert cfg.stages >= 2
    assert memory + cfg.stages * cfg.block_n * 2 * (cfg.head_dim + cfg.head_dim_v) <= config.SHARED_MEMORY


def test_a_poisoned_neighbour_reaches_nobody():
    rng = torch.Generator().manual_seed(5)
    inputs = [torch.randn(200, 1, 160, generator=rng).bfloat16() for _ in range(4)]
    offsets = offsets_from_lengths([40, 70, 90])

    def gradients(q, k, v, dout):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = jfa.jagged_flash_attention(*tensors, offsets, offsets, 90, 90, backend="hopper")
        return out.detach(), *torch.autograd.grad(out, tensors, dout)

    clean = gradients(*inputs)
    poisoned = [x.clone() for x in inputs]
    for x, value in zip(poisoned, (math.nan, math.nan, math.inf, math.nan)):
        x[40:110] = value
    for a, b in zip(clean, gradients(*poisoned)):
        assert torch.equal(a[:40], b[:40]) and torch.equal(a[110:], b[110:])


def test_gradients_do_not_depend_on_the_order_of_work():
    rng = torch.Generator().manual_seed(6)
    q, k, v, dout = (torch.randn(300, 2, 192, generator=rng).bfloat16() for _ in range(4))
    offsets = offsets_from_lengths([130, 0, 20, 150])
    found = []
    for policy, seed in (("eager", 0), ("lazy", 0), ("random", 1)):
        with emulator.options(policy=policy, seed=seed):
            tensors = [x.clone().requires_grad_() for x in (q, k, v)]
            out = jfa.jagged_flash_attention(*tensors, offsets, offsets, 150, 150, backend="hopper")
            found.append(torch.autograd.grad(out, tensors, dout))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("dim", range(8, 257, 8))
@pytest.mark.parametrize("dim_v", [64, 128, 200, 256])
def test_tiles_hold_their_rows_and_fit_into_shared_memory(dim, dim_v):
    problem = replace(example_problem(dim), head_dim_v=dim_v)
    cfg, dq = config.wide_config(problem), config.dq_config(problem)
    assert dim <= cfg.left + cfg.right < dim + 64 and dim_v <= cfg.left_v + cfg.right_v < dim_v + 64
    tile = 64 * 2 * (cfg.left + cfg.right + cfg.left_v + cfg.right_v)
    assert cfg.stages >= 2 and tile + 3 * 64 * 64 * 2 + cfg.stages * (tile + 512) <= config.SHARED_MEMORY
    keys, values = 64 * 2 * (dq.left + dq.right), 64 * 2 * (dq.left_v + dq.right_v)
    assert dq.stages >= 2 <= dq.stages + dq.stages_v
    staged = 0 if dq.wide else 2 * keys
    assert 2 * (keys + values) + dq.stages * keys + dq.stages_v * values + staged <= config.SHARED_MEMORY


def test_which_backward_a_wide_head_gets():
    wide = example_problem(192)
    assert not portable_backward(wide) and "a warp group each" in hopper.forms(wide)["backward"]
    shared = example_problem(192, rows_q=64, broadcast_q=True)
    assert "shared queries with head dim 192 > 128" in hopper.forms(shared)["backward"]


def test_shared_queries_go_forward_here_and_back_through_portable():
    judge(Case([1] * 2, [100, 20], heads=1, kv_heads=1, dim=256, dtype=BF16, shared_q=65), backend="hopper")
