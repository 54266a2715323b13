"""Rows behind the last sequence may hold NaN: with shared queries they reach no gradient."""

from __future__ import annotations

import pytest
import torch

import jfa
from jfa import emulator
from jfa.layout import offsets_from_lengths
from jfa.reference import attention


@pytest.mark.parametrize("policy", ["eager", "random"])
@pytest.mark.parametrize("rows_q", [20, 128])
@pytest.mark.parametrize("lengths, slack", [([80, 0, 5], 6), ([0, 130], 140), ([], 6)])
def test_slack_keys_reach_no_gradient_of_a_shared_query(rows_q, lengths, slack, policy):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows_q, 2, 64, generator=generator)
    key, value = (torch.randn(sum(lengths) + slack, 2, 64, generator=generator) for _ in range(2))
    for x in (key, value):
        x[sum(lengths) :] = torch.nan
    tensors = [x.bfloat16().requires_grad_() for x in (query, key, value)]
    offsets = offsets_from_lengths(lengths)
    with emulator.options(policy=policy):
        out = jfa.jagged_flash_attention(*tensors, None, offsets, broadcast_q=True, backend="hopper")
        grad = torch.randn(out.shape, generator=generator).to(out)
        got = torch.autograd.grad(out, tensors, grad)
    clean = [x.detach().double().nan_to_num().requires_grad_() for x in tensors]
    truth = [torch.zeros_like(x) for x in clean]
    if lengths:
        truth = torch.autograd.grad(
            attention(*clean, None, offsets, broadcast_q=True, dtype=torch.float64), clean, grad.double()
        )
    for name, g, t in zip(("dquery", "dkey", "dvalue"), got, truth):
        allowed = 0.03 * max(1.0, float(t.abs().max()))
        torch.testing.assert_close(g.double(), t, atol=allowed, rtol=0.0, msg=lambda m: f"{name}: {m}")
