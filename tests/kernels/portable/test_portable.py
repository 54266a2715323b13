"""The portable kernels, the very ones a GPU runs, on the emulator: numbers, isolation, repetition, lies, and the planner."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import jfa
from jfa import emulator
from jfa.attention import make_problem
from jfa.kernels.portable import config, launch
from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from tests.attention_cases import Case, judge, random_case


def attend(*arguments, **options):
    """The op on the portable kernel."""
    return jfa.jagged_flash_attention(*arguments, backend="portable", **options)


def tensors(len_q, len_kv, heads=2, kv_heads=1, dim=16, shared=0, dtype=torch.float32):
    """(query, key, value, query_offset, key_offset)."""
    torch.manual_seed(0)
    rows = lambda n, h: torch.randn(n, h, dim, dtype=dtype, requires_grad=True)
    q = rows(shared or sum(len_q), heads)
    return (
        q,
        rows(sum(len_kv), kv_heads),
        rows(sum(len_kv), kv_heads),
        offsets_from_lengths(len_q),
        offsets_from_lengths(len_kv),
    )


# --------------------------------------------------------------------------------------------------------------- numbers
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@hypothesis_settings(max_examples=16)
def test_random_problems_agree_with_fp64(seed, dtype):
    with emulator.options(contract=seed % 2 == 1):
        judge(random_case(seed, dtype, longest=100, most=4), backend="portable")


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@hypothesis_settings(max_examples=6)
def test_gpus_without_tma_compute_the_same(seed, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "has_tma", lambda device: False)
        judge(random_case(seed, dtype, longest=100, most=4), backend="portable")


@pytest.mark.parametrize(
    "case",
    [
        Case([0, 5, 4, 0], [4, 3, 4, 5], heads=4, kv_heads=1),
        Case([4, 3], [0, 5]),
        Case([3, 0, 3], [2, 3, 2]),
        Case([0, 1, 0, 1], [0, 3, 0, 5], heads=9, kv_heads=3, options=dict(causal=True, sm_scale=1.0)),
        Case([2, 1], [5, 4], options=dict(causal=True)),
        Case([2, 1], [5, 4], options=dict(causal="top_left")),
        Case([9, 2], [3, 8], options=dict(window_size=2)),
        Case([3, 4], [5, 2], heads=6, kv_heads=2, dim=80, dim_v=24),
        Case([3, 4], [5, 2], dim=1, dim_v=3),
        Case([1], [2], dim=256),
        Case([5, 3], [6, 4], options=dict(sm_scale=-8.0)),
        Case([5, 3], [6, 4], options=dict(sm_scale=0.0)),
        Case([150], [150], options=dict(window_size=4), scale_up=75.0),
        Case([7, 2, 1, 0], [200, 3, 0, 4], shared_q=40, heads=6, kv_heads=1),
        Case([1, 1], [3, 90], shared_q=70, heads=4, kv_heads=2, options=dict(causal=True)),
        Case([33, 1, 17], [40, 300, 3], heads=4, kv_heads=2, dtype=torch.bfloat16),
        Case([70], [33], shared_q=0, slack=9, dtype=torch.float16),
    ],
    ids=str,
)
def test_hard_cases_agree_with_fp64(case):
    judge(case, backend="portable")


def test_one_sequence_never_reaches_another():
    q, k, v, qo, ko = tensors([5, 3, 6], [4, 7, 5])
    for options in ({}, dict(causal=True), dict(window_size=2)):
        before = attend(q, k, v, qo, ko, **options)
        poisoned = [x.detach().clone() for x in (q, k, v)]
        poisoned[0][5:8] *= 50
        poisoned[1][4:11] = float("nan")
        poisoned[2][4:11] = float("inf")
        after = attend(*poisoned, qo, ko, **options)
        assert torch.equal(after[:5], before[:5]) and torch.equal(after[8:], before[8:])


def test_dq_of_a_shared_query_is_summed_in_fp32():
    batches = 64
    q = torch.full((2, 1, 16), 0.1, dtype=torch.bfloat16, requires_grad=True)
    k = torch.tensor([1.0, 0.5]).repeat(batches)[:, None, None].expand(-1, 1, 16).bfloat16().requires_grad_()
    v = torch.tensor([1.0, 0.0]).repeat(batches)[:, None, None].expand(-1, 1, 16).bfloat16().requires_grad_()
    offsets = offsets_from_lengths([2] * batches)
    grads = []
    for backend in ("portable", "reference"):
        out = jfa.jagged_flash_attention(q, k, v, None, offsets, broadcast_q=True, sm_scale=1.0, backend=backend)
        grads.append(torch.autograd.grad(out.float().sum(), q)[0].float())
    assert (grads[0] - grads[1]).abs().max() <= 0.02 * grads[1].abs().max()


@pytest.mark.parametrize("shared", [0, 5, 90])
def test_calls_repeat_bit_by_bit_and_a_plan_changes_nothing(shared):
    q, k, v, qo, ko = tensors([33, 1, 17], [40, 129, 3], heads=4, kv_heads=2, shared=shared)
    plan = jfa.plan(
        None if shared else qo, ko, rows_q=q.shape[0], rows_kv=172, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32,
        broadcast_q=bool(shared), backend="portable",
    )  # fmt: skip
    first = None
    for options in ({}, dict(deterministic=True), dict(plan=plan), dict(plan=plan)):
        out = attend(q, k, v, None if shared else qo, ko, broadcast_q=bool(shared), **options)
        got = (out, *torch.autograd.grad(out.sum(), (q, k, v)))
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(first, got))


@pytest.mark.parametrize("needs", ["query", "key", "value", "query value"])
def test_gradients_only_for_what_requires_them(needs):
    q, k, v, qo, ko = tensors([3, 4], [5, 2])
    expected = torch.autograd.grad(attend(q, k, v, qo, ko).sum(), (q, k, v))
    inputs = [x.detach().requires_grad_(n in needs) for n, x in zip(("query", "key", "value"), (q, k, v))]
    attend(*inputs, qo, ko).sum().backward()
    for x, want in zip(inputs, expected):
        assert x.grad is None if not x.requires_grad else torch.equal(x.grad, want)


def test_any_strides_of_inputs_and_of_the_gradient():
    q, k, v, qo, ko = tensors([3, 4], [5, 2], heads=4, kv_heads=2)
    views = [
        q.detach().transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([k.detach()] * 2, -1)[..., 0],
        torch.cat([v.detach().new_zeros(1), v.detach().flatten()])[1:].view(v.shape),
    ]
    for grad in (torch.ones(()).expand(7, 4, 16), torch.randn(16, 4, 7).permute(2, 1, 0)):
        expected = torch.autograd.grad(attend(q, k, v, qo, ko), (q, k, v), grad)
        inputs = [x.requires_grad_() for x in views]
        for got, want in zip(torch.autograd.grad(attend(*inputs, qo, ko), inputs, grad), expected):
            torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------------- offsets that lie
@given(st.lists(st.sampled_from([-9, 0, 3, 7, 40, 1 << 30]), min_size=4, max_size=4), st.sampled_from([0, 3, 70]))
@hypothesis_settings(max_examples=12)
def test_unchecked_lies_touch_nothing_outside(lie, shared):
    """The emulator raises on any access outside a tensor; the op's own check of CPU offsets is passed by."""
    q, k, v, _, _ = tensors([7], [9], heads=2, kv_heads=2, shared=shared)
    offsets = torch.tensor(lie).int()
    slots = torch.tensor(lie[::-1]).int() if shared else None
    band = Band.make(causal=True)
    problem = make_problem(q, k, v, offsets, offsets.flip(0), slots, 0.3, band, bool(shared), False, 0, 0)
    inputs = [x.detach() for x in (q, k, v)]
    with emulator.options(races=False):  # sequences that overlap do write the same rows
        out, lse = launch.forward(problem, *inputs)
        launch.backward(problem, torch.ones_like(out), None, *inputs, out, lse)


def test_a_slot_outside_the_output_is_not_written():
    q, k, v, _, ko = tensors([3], [4, 5], shared=3)
    for slots in ([4, 0, 6], [-1, 3, 6]):
        problem = make_problem(q, k, v, ko, ko, torch.tensor(slots).int(), 0.3, Band(), True, False, 0, 0)
        out, lse = launch.forward(problem, q.detach(), k.detach(), v.detach())
        start = max(slots[:2]) if slots[0] < 0 else slots[1]
        inside = torch.arange(6) // 3 == start // 3
        assert (out[~inside] == 0).all() and torch.isinf(lse[:, ~inside]).all() and (out[inside] != 0).any()


# -------------------------------------------------------------------------------------------------------------- planner
def _problem(len_q, len_kv, band=None, shared=0, heads=1):
    q, k, v, qo, ko = tensors(len_q, len_kv, heads=heads, kv_heads=1, shared=shared)
    return make_problem(q, k, v, qo, ko, None, 0.3, band or Band(), bool(shared), False, 0, 0)


def test_the_table_gives_every_head_dim_and_type_a_tile():
    for dim in (16, 64, 80, 128, 192, 256):
        for dtype in (torch.bfloat16, torch.float32):
            problem = dataclasses.replace(_problem([64], [64]), head_dim=dim, dtype=dtype, device=torch.device("meta"))
            for pick in (config.forward_tile, config.dkdv_tile, config.dq_tile):
                assert pick(problem).keep >= 16


@pytest.mark.parametrize("memory", [232_448, 166_912, 101_376])
def test_tiles_fit_into_smaller_shared_memories(monkeypatch, memory):
    monkeypatch.setattr(config, "shared_memory", lambda device: memory)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (64, 5000):
            sizes = dict(rows_q=rows, head_dim=64, head_dim_v=64, dtype=dtype, device=torch.device("meta"))
            problem = dataclasses.replace(_problem([rows], [rows]), **sizes)
            for pick, kept in ((config.forward_tile, 1), (config.dkdv_tile, 2), (config.dq_tile, 2)):
                tile = pick(problem)
                tiles_held = kept * tile.keep + 2 * tile.stages * tile.step
                assert tile.stages == 1 or tiles_held * 64 * dtype.itemsize <= memory
    shared = dataclasses.replace(_problem([1], [9], shared=128), dtype=torch.bfloat16)
    assert config.is_resident(shared) == (memory > 200_000)
