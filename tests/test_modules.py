"""The two layers: shapes, gradients, nested tensors, agreement with plain PyTorch; and the examples do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
import torch

from jfa.layout import offsets_from_lengths, unpack
from jfa.modules import PMA, JaggedSelfAttention

LENGTHS = [5, 0, 3, 9]


def packed(dim: int = 16):
    """(x [total, dim], offsets)."""
    torch.manual_seed(0)
    return torch.randn(sum(LENGTHS), dim, requires_grad=True), offsets_from_lengths(LENGTHS)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_self_attention_is_that_of_each_sequence_alone(kv_heads):
    x, offsets = packed()
    layer = JaggedSelfAttention(16, 4, kv_heads, causal=True)
    out = layer(x, offsets, 9)
    assert out.shape == x.shape
    for part, whole in zip(unpack(x, offsets), unpack(out, offsets)):
        alone = layer(part, offsets_from_lengths([len(part)])) if len(part) else part
        torch.testing.assert_close(whole, alone)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_pma_pools_as_plain_attention_with_the_seeds_does():
    x, offsets = packed()
    layer = PMA(16, 4, num_seeds=3, num_kv_heads=2)
    out = layer(x, offsets)
    assert out.shape == (4, 3, 16)
    for b, part in enumerate(unpack(x, offsets)):
        k, v = layer.to_kv(part).unflatten(-1, (-1, 4)).chunk(2, dim=1)
        k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
        p = torch.softmax(layer.seeds.transpose(0, 1) @ k.mT / 2, -1) if len(part) else torch.zeros(4, 3, 0)
        torch.testing.assert_close(out[b], layer.to_out((p @ v).transpose(0, 1).flatten(1)))
    out.square().sum().backward()
    assert layer.seeds.grad.abs().sum() > 0


def test_nested_tensors_in_and_out():
    x, offsets = packed()
    nested = torch.nested.nested_tensor_from_jagged(x, offsets=offsets.long())
    layer, pool = JaggedSelfAttention(16, 4), PMA(16, 4, 2)
    torch.testing.assert_close(layer(nested).values(), layer(x, offsets))
    torch.testing.assert_close(pool(nested), pool(x, offsets))


def test_the_kernel_gives_what_the_reference_gives():
    x, offsets = packed()
    for layer in (JaggedSelfAttention(16, 2, 1, window_size=3), PMA(16, 2, 3)):
        expected = layer(x, offsets)
        layer.backend = "portable"
        torch.testing.assert_close(layer(x, offsets), expected)


@pytest.mark.parametrize("make", [lambda: PMA(10, 4, 2), lambda: JaggedSelfAttention(16, 4, 3), lambda: PMA(16, 0, 2)])
def test_head_counts_must_divide(make):
    with pytest.raises(ValueError, match="num_heads"):
        make()


def test_offsets_are_needed_for_packed_input():
    with pytest.raises(TypeError, match="offsets"):
        PMA(16, 4, 2)(packed()[0])


def test_the_example_learns(root):
    example = runpy.run_path(str(root / "examples" / "pool_user_histories.py"))
    losses = example["train"](steps=40, users=32, report=0)
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def test_pooling_needs_a_seed():
    with pytest.raises(ValueError, match="num_seeds"):
        PMA(16, 4, 0)


@pytest.fixture(scope="module")
def rank_lines(root):
    """What the four ranks print: rule -> its numbers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(root / "examples" / "balance_ranks.py")], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "most / mean" in line]
    return {line.split(" tokens [")[0].strip(): [float(n) for n in re.findall(r"\d[\d.e+-]*", line)] for line in lines}


def test_ranks_get_even_tokens_or_even_pairs(rank_lines):
    assert list(rank_lines) == ["as they come", "zigzag", "longest first, tokens", "longest first, pairs"]
    tokens, pairs = ({name: numbers[at] for name, numbers in rank_lines.items()} for at in (4, 5))
    assert tokens["longest first, tokens"] < 1.01 < tokens["zigzag"] < tokens["as they come"]
    assert pairs["longest first, pairs"] < 1.01 < pairs["zigzag"] < pairs["as they come"]


def test_gradients_of_ranks_are_weighted_by_tokens(rank_lines):
    by_tokens, by_mean = ([numbers[at] for numbers in rank_lines.values()] for at in (6, 7))
    assert max(by_tokens) < 1e-6 and min(by_mean) > 50 * max(by_tokens)


@pytest.mark.parametrize(
    "build, word",
    [
        (lambda: PMA(16, 4, 2, backend="Portabel"), "backend"),
        (lambda: PMA(16, 4, 2.0), "num_seeds"),
        (lambda: PMA(16, 4, 2, precision="fp8"), "precision"),
        (lambda: JaggedSelfAttention(16, 4, precision=8), "precision"),
        (lambda: JaggedSelfAttention(16, 4, backend=None), "backend"),
        (lambda: JaggedSelfAttention(16, 4, causal="left"), "causal"),
        (lambda: JaggedSelfAttention(16, 4, window_size=-3), "window_size"),
        (lambda: JaggedSelfAttention(16, 4.0), "num_heads"),
        (lambda: JaggedSelfAttention(1024, 2), "head dim"),
    ],
)
def test_impossible_arguments_are_refused_when_a_layer_is_built(build, word):
    with pytest.raises((TypeError, ValueError), match=word):
        build()


def test_layers_pass_their_precision_on():
    x, offsets = (
        torch.randn(56, 64, generator=torch.Generator().manual_seed(1)).bfloat16(),
        offsets_from_lengths([5, 51]),
    )
    for make in (lambda **k: JaggedSelfAttention(64, 2, **k), lambda **k: PMA(64, 2, 4, **k)):
        torch.manual_seed(0)
        plain = make().bfloat16()
        rounded = make(precision="mxfp8").bfloat16()
        rounded.load_state_dict(plain.state_dict())
        error = (plain(x, offsets) - rounded(x, offsets)).norm() / plain(x, offsets).norm()
        assert 0.005 < error < 0.2
