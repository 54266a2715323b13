"""The portable kernels over block lists, on the emulator, against the fp64 reference over the same lists."""

import math
import random
from dataclasses import replace

import pytest
import torch

import jfa
from jfa import reference
from jfa.block_sparse import lists_from_mask, select_blocks
from tests.kernels.sparse_cases import judge, tensors


def random_case(seed):
    """Lengths with zeros and tails, any mask, any blocks, any list heads, some lists empty."""
    rng = random.Random(seed)
    count = rng.choice([1, 3, 4])
    lengths = lambda: [rng.choice([0, 1, 5, 17, 33, 64, rng.randint(1, 120)]) for _ in range(count)]
    kv_heads, group = rng.choice([(1, 1), (1, 3), (2, 2)])
    shared = rng.choice([0, 0, 5, 40])
    len_kv = lengths()
    len_q = [shared] * count if shared else lengths()
    block_q, block_kv = rng.choice([(16, 16), (32, 16), (16, 32), (64, 64)])
    band = rng.choice([{}, dict(causal=True), dict(window_size=rng.randint(0, 40)), dict(window_size=(20, 5))])
    dims = rng.choice([(16, 16), (24, 16), (16, 40)])
    q, k, v, qo, ko = tensors(
        len_q, len_kv, kv_heads * group, kv_heads, *dims, shared=shared, seed=seed, poison=rng.choice([0, 7])
    )
    heads = rng.choice([1, kv_heads, kv_heads * group])
    g = torch.Generator().manual_seed(seed)
    masks = [
        torch.rand(heads, -(-n // block_q), -(-m // block_kv), generator=g) < rng.choice([0.2, 0.6])
        for n, m in zip(len_q, len_kv)
    ]
    sides = dict(total_q=len(q), total_kv=len(k), broadcast_q=bool(shared), block_q=block_q, block_kv=block_kv)
    lists = lists_from_mask(masks, qo, ko, **sides, **band)
    options = dict(band, sm_scale=rng.choice([None, -0.3, 0.0, 1.0]), broadcast_q=bool(shared))
    return q, k, v, qo, ko, lists, options


@pytest.mark.parametrize("seed", range(16))
def test_random_lists(seed):
    *case, options = random_case(seed)
    judge(*case, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 216))
def test_many_random_lists(seed):
    *case, options = random_case(seed)
    judge(*case, **options)


@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, tol):
    q, k, v, qo, ko = tensors([40, 0, 33], [70, 9, 50], 4, 2, 16, 16, dtype)
    judge(q, k, v, qo, ko, select_blocks(q, k, qo, ko, ratio=0.5, block_q=16, block_kv=16), tol=tol)


def test_shared_queries_in_slots_of_their_own():
    q, k, v, _, ko = tensors([20] * 3, [40, 0, 17], 2, 1, 16, 16, shared=20)
    slots = torch.tensor([40, 0, 20, 60], dtype=torch.int32)
    lists = select_blocks(q, k, None, ko, ratio=0.5, broadcast_q=True, block_q=16, block_kv=16)
    judge(q, k, v, None, ko, lists, broadcast_q=True, output_offset=slots)


def test_gradients_repeat_bit_by_bit_whatever_the_schedule():
    q, k, v, qo, ko = tensors([40, 20], [70, 50], 4, 2, 16, 16)
    lists = select_blocks(q, k, qo, ko, ratio=0.5, block_q=16, block_kv=16)
    runs = []
    for seed in range(3):
        with jfa.emulator.options(policy="random", seed=seed):
            runs.append(judge(q, k, v, qo, ko, lists))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_lists_of_everything_are_dense_attention():
    q, k, v, qo, ko = tensors([40, 0, 33], [70, 9, 50], 2, 2, 16, 16)
    lists = select_blocks(q, k, qo, ko, ratio=1.0, causal=True, block_q=16, block_kv=32)
    out, *_ = judge(q, k, v, qo, ko, lists, causal=True)
    dense = reference.attention(q, k, v, qo, ko, causal=True)
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=0)


def test_empty_lists_write_zeros():
    q, k, v, qo, ko = tensors([20, 5], [40, 9], 2, 1, 16, 16)
    nothing = [torch.zeros(2, 3, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)]
    lists = lists_from_mask(nothing, qo, ko, total_q=25, total_kv=49, block_q=16, block_kv=16)
    out, *grads = judge(q, k, v, qo, ko, lists)
    assert not out.any() and not any(x.any() for x in grads)


@pytest.mark.parametrize(
    "changes",
    [
        dict(columns=(0, 10**6)),
        dict(columns=(1, -5)),
        dict(starts=(1, 10**6)),
        dict(starts=(0, -9)),
        dict(starts=(2, 0)),
    ],
    ids=str,
)
def test_wrong_lists_touch_nothing_outside(changes):
    """On the emulator an access outside a tensor is an error; the op's own check is passed by."""
    q, k, v, qo, ko = (x.detach() if x.is_floating_point() else x for x in tensors([20, 30], [50, 40], 1, 1, 16, 16))
    lists = select_blocks(q, k, qo, ko, ratio=1.0, block_q=16, block_kv=16)
    for field, (at, value) in changes.items():
        x = getattr(lists, field).clone()
        x[at] = value
        lists = replace(lists, **{field: x})
    problem = jfa.attention.make_problem(q, k, v, qo, ko, None, 0.25, jfa.Band(), False, False, 0, 0, lists)
    backend = jfa.kernels.registry.load("portable")
    out, lse = backend.forward(problem, q, k, v)
    backend.backward(problem, torch.ones_like(out), None, q, k, v, out, lse)
    assert torch.isfinite(out).all() and math.isfinite(float(lse[torch.isfinite(lse)].sum()))
