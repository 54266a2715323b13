"""What chapter 07 says of shared queries and shared heads: shapes, whose gradient is a sum, and why nobody owns its addresses."""

import math

import pytest
import torch
import triton
import triton.language as tl

import jfa
from jfa import emulator, reference
from jfa.layout import offsets_from_lengths

LENGTHS = [7, 3, 19, 5, 11]
OFFSETS = offsets_from_lengths(LENGTHS)


def pooled(seeds, history, **kwargs):
    """[B * Lq, 1, D] answers of shared seeds [Lq, D] over a packed history [total, D]."""
    x = history[:, None]
    return jfa.jagged_flash_attention(
        seeds[:, None], x, x, None, OFFSETS, len(seeds), max(LENGTHS), broadcast_q=True, **kwargs
    )


def by_sequence(seeds, history):
    """The sketch: [B, Lq, D], one sequence after the other."""
    parts = history.split(LENGTHS)
    return torch.stack([torch.softmax(seeds @ h.T / math.sqrt(seeds.shape[1]), -1) @ h for h in parts])


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_the_sketch_of_the_seed_and_its_batch_mean(backend):
    torch.manual_seed(0)
    seeds, history = torch.randn(4, 32), torch.randn(45, 32)
    stacked = by_sequence(seeds, history)
    assert stacked.mean(0).shape == (4, 32)
    out = pooled(seeds, history, backend=backend).reshape(5, 4, 32)
    torch.testing.assert_close(out, stacked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.mean(0), stacked.mean(0), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_shared_query_is_the_sum_over_the_sequences():
    torch.manual_seed(1)
    seeds, history = (
        torch.randn(4, 32, dtype=torch.float64, requires_grad=True),
        torch.randn(45, 32, dtype=torch.float64),
    )
    weight = torch.randn(5, 4, 32, dtype=torch.float64)
    (whole,) = torch.autograd.grad((pooled(seeds, history).reshape(5, 4, 32) * weight).sum(), seeds)
    each = [torch.autograd.grad((by_sequence(seeds, history)[b] * weight[b]).sum(), seeds)[0] for b in range(5)]
    torch.testing.assert_close(whole, sum(each))
    assert not torch.allclose(whole, sum(each) / 5)


@triton.jit
def _add_up(x_ptr, dq_ptr, ATOMIC: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + at)
    if ATOMIC:
        tl.atomic_add(dq_ptr + at, x)
    else:
        tl.store(dq_ptr + at, tl.load(dq_ptr + at) + x)


def test_an_epilogue_that_assumes_a_private_address_is_a_race_and_atomics_are_no_fixed_order():
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    run = emulator.run(_add_up, (40,), x, torch.zeros(16), ATOMIC=False, N=16)
    assert "two programs" in str(run.findings[0]) and "dq_ptr" in str(run.findings[0])
    results = []
    for seed in range(4):
        results.append(torch.zeros(16))
        with emulator.options(policy="random", seed=seed):
            _add_up[(40,)](x, results[-1], ATOMIC=True, N=16)
        torch.testing.assert_close(results[-1], x.sum(0), rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(results[0], other) for other in results[1:])


def test_grouped_heads_with_packing_equal_repeated_ones():
    torch.manual_seed(3)
    q = torch.randn(45, 8, 16, dtype=torch.float64)
    k, v = (torch.randn(45, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(45, 8, 16, dtype=torch.float64)
    shared = jfa.jagged_flash_attention(q, k, v, OFFSETS, OFFSETS, 19, 19)
    repeated = [x.detach().repeat_interleave(4, 1).requires_grad_() for x in (k, v)]
    ordinary = reference.attention(q, *repeated, OFFSETS, OFFSETS)
    torch.testing.assert_close(shared, ordinary)
    grads = torch.autograd.grad((shared * weight).sum(), [k, v])
    wide = torch.autograd.grad((ordinary * weight).sum(), repeated)
    for grad, other in zip(grads, wide):
        torch.testing.assert_close(grad, other.reshape(45, 2, 4, 16).sum(2))
