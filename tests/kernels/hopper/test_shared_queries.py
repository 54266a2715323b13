"""The backward of shared queries: slots of the output anywhere, plans, more keys than a tile, and who sums what."""

from __future__ import annotations

import pytest
import torch

import jfa
from jfa import emulator
from jfa.kernels.hopper import tiles
from jfa.layout import offsets_from_lengths
from jfa.reference import attention

LENGTHS = [70, 0, 5, 130, 1030]


def _tensors(rows_q, dim, heads=2):
    generator = torch.Generator().manual_seed(1)
    rows = lambda n: torch.randn(n, heads, dim, generator=generator).bfloat16().requires_grad_()
    return rows(rows_q), rows(sum(LENGTHS)), rows(sum(LENGTHS)), offsets_from_lengths(LENGTHS)


def _gradients(call, tensors, dead_rows=slice(0, 0)):
    out = call(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    grad[dead_rows] = 0.0
    return torch.autograd.grad(out, tensors, grad.to(out))


def _close(found, truth):
    for name, f, t in zip(("dquery", "dkey", "dvalue"), found, truth):
        torch.testing.assert_close(
            f.double(), t, atol=0.03 * float(t.abs().max()), rtol=0.0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("rows_q, dim", [(40, 64), (100, 128)])
def test_slots_of_the_output_may_lie_anywhere_and_one_outside_counts_for_nothing(rows_q, dim, policy, monkeypatch):
    monkeypatch.setattr("jfa.attention.op.check_contents", lambda *_: None)  # as on a GPU: lies are not looked for
    q, k, v, offsets = _tensors(rows_q, dim)
    dead = slice(4 * rows_q, 5 * rows_q)
    slots = torch.tensor([3, 1, 0, 99, 2, 5], dtype=torch.int32) * rows_q
    with emulator.options(policy=policy, seed=3):
        found = _gradients(
            lambda q, k, v: jfa.jagged_flash_attention(
                q, k, v, None, offsets, broadcast_q=True, output_offset=slots, backend="hopper"
            ),
            (q, k, v),
        )
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    slots[3] = 4 * rows_q  # inside, with an output gradient of 0 there: the same as outside
    truth = _gradients(
        lambda q, k, v: attention(q, k, v, None, offsets, broadcast_q=True, output_offset=slots, dtype=torch.float64),
        exact,
        dead,
    )
    _close(found, truth)


@pytest.mark.parametrize("rows_q", [32, 128])
def test_a_plan_serves_several_calls(rows_q):
    q, k, v, offsets = _tensors(rows_q, 128)
    options = dict(broadcast_q=True, deterministic=True, backend="hopper")
    plan = jfa.plan(None, offsets, rows_q=rows_q, rows_kv=sum(LENGTHS), num_heads=2, head_dim=128, **options)
    call = lambda plan: _gradients(
        lambda q, k, v: jfa.jagged_flash_attention(q, k, v, None, offsets, plan=plan, **options), (q, k, v)
    )
    without = call(None)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(without, call(plan)))


def test_a_list_has_cleared_counters_for_one_launch_only():
    records = torch.zeros(1, 9, dtype=torch.int32)
    found = tiles.TileList(records, records[0, :2], torch.zeros(4, dtype=torch.int32))
    drawn = found.counters(2)
    drawn += 7
    assert found.counters(2).tolist() == [0, 0]
