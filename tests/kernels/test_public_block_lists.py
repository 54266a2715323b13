"""What went wrong with block-sparse attention elsewhere, on every backend that walks lists, against the fp64 reference.

Each case is named after the public report whose kind it is (read 2026-11); the numbers are our own.
"""

from dataclasses import replace

import pytest
import torch

import jfa
from jfa.block_sparse import lists_from_mask, select_blocks, transpose
from jfa.masks import Block
from tests.kernels.sparse_cases import judge, tensors

BACKENDS = ("portable", "hopper", "blackwell")
backends = pytest.mark.parametrize("backend", BACKENDS)
TOL = 1.5e-2  # bf16 probabilities and outputs


def case(len_q, len_kv, heads=1, kv_heads=1, dim=64, **options):
    return tensors(len_q, len_kv, heads, kv_heads, dim, dim, torch.bfloat16, **options)


def mask_lists(masks, q, k, qo, ko, **band):
    """Lists of the blocks that ``masks``, one [heads, blocks, blocks] per sequence, choose."""
    chosen = [torch.tensor(m).bool() for m in masks]
    return lists_from_mask(chosen, qo, ko, total_q=len(q), total_kv=len(k), **band)


@backends
def test_tilelang_1330_no_block_for_some_queries(backend):
    """Rows without a key are 0 with LSE -inf and have no gradient, beside rows that have keys (also LMCache 3092)."""
    q, k, v, qo, ko = case([300, 130], [260, 140])
    lists = mask_lists([[[[1, 0, 1], [0, 0, 0], [0, 1, 0]]], [[[0, 0], [0, 1]]]], q, k, qo, ko)
    out, dq, *_ = judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend)
    assert (out[128:256] == 0).all() and (dq[128:256] == 0).all() and (out[:128] != 0).any()


@backends
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attention_2623_a_causal_pattern_as_lists_has_causal_gradients(backend, dim):
    q, k, v, qo, ko = case([300], [300], dim=dim)
    lists = select_blocks(q, k, qo, ko, ratio=1.0, causal=True)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    results = []
    for given in (dict(block_lists=lists), {}):
        out = jfa.jagged_flash_attention(q, k, v, qo, ko, causal=True, backend=backend, **given)
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    for ours, dense in zip(*results):
        torch.testing.assert_close(ours.double(), dense.double(), atol=TOL * float(dense.abs().max()), rtol=0)


@backends
def test_pytorch_188322_lists_count_without_any_mask(backend):
    """No causal mask, no window, whole blocks: the lists alone say what is left out."""
    q, k, v, qo, ko = case([256], [384])
    lists = mask_lists([[[[0, 1, 0], [1, 0, 1]]]], q, k, qo, ko)
    out, *_ = judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend)
    dense = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend)
    assert (out - dense).abs().max() > 0.05


@backends
def test_pytorch_136601_a_transposed_list_knows_its_own_sequence(backend):
    """Under a causal mask the kinds and counts of the keys' lists differ with the length: long and short ones in one batch."""
    q, k, v, qo, ko = case([390, 129, 256], [390, 129, 256])
    lists = select_blocks(q, k, qo, ko, ratio=1.0, causal=True)
    turned = transpose(lists, qo, ko, total_q=len(q), total_kv=len(k))
    # Keys 0..127 of the long one meet four blocks of queries: their own, cut by the diagonal, and three whole ones.
    first = turned.kinds[turned.starts[0] : turned.starts[1]].tolist()
    assert first[0] == Block.PARTIAL and first[1:3] == [Block.FULL] * 2 and len(first) == 4
    judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend, causal=True)


@backends
@pytest.mark.parametrize("length", [64, 129, 255])
def test_pytorch_159247_keys_that_end_inside_a_block(backend, length):
    """The rest of the last block holds a stranger's NaN (also FastVideo 925, where its probabilities were infinite)."""
    q, k, v, qo, ko = case([130], [length], poison=70)
    lists = select_blocks(q, k, qo, ko, ratio=1.0)
    judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend)


@backends
def test_pytorch_182593_a_full_block_may_be_called_partial(backend):
    """PARTIAL asks for a mask that changes nothing; the same blocks give the same numbers."""
    q, k, v, qo, ko = case([256], [300])
    lists = mask_lists([[[[1, 1, 1], [0, 1, 1]]]], q, k, qo, ko)
    careful = replace(lists, kinds=torch.full_like(lists.kinds, int(Block.PARTIAL)))
    results = []
    for given in (lists, careful):
        out = jfa.jagged_flash_attention(q, k, v, qo, ko, backend=backend, block_lists=given)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


@backends
@pytest.mark.parametrize("list_heads", [1, 2, 4])
def test_flashinfer_886_heads_choose_for_themselves_or_share(backend, list_heads):
    """Lists of all heads, of a key head, of a query head: each query head reads its own."""
    q, k, v, qo, ko = case([140], [390], heads=4, kv_heads=2)
    g = torch.Generator().manual_seed(list_heads)
    masks = [(torch.rand(list_heads, 2, 4, generator=g) < 0.5).tolist()]
    judge(q, k, v, qo, ko, mask_lists(masks, q, k, qo, ko), tol=TOL, backend=backend)


@backends
def test_flashinfer_4533_the_longest_lists_come_last(backend):
    """Roles that disagree about what is left wait for ever: lists of 0, 1, 2, 3 and 5 entries, the empty ones first and last."""
    q, k, v, qo, ko = case([640], [640])
    counts = (0, 1, 5, 2, 0)
    masks = [[[[int(column < count) for column in range(5)] for count in counts]]]
    lists = mask_lists(masks, q, k, qo, ko)
    assert lists.counts[0, :5].tolist() == list(counts)
    judge(q, k, v, qo, ko, lists, tol=TOL, backend=backend)
