"""What chapter 17 says about block-sparse attention: the share that a ratio really keeps, what the choice finds, what it saves."""

import json

import pytest
import torch

import jfa
from jfa import emulator
from jfa.bench import recorded
from jfa.bench.shapes import SHAPES
from jfa.block_sparse import grid_of, lists_from_mask, select_blocks
from jfa.emulator.rates import H200
from jfa.layout import offsets_from_lengths
from jfa.schedule import balance, zigzag
from tests.support import ROOT


@pytest.mark.parametrize("ratio, whole, median", [(0.25, 0.28, 0.40), (0.5, 0.52, 0.57), (0.75, 0.77, 1.0)])
def test_short_sequences_keep_more_than_the_ratio(ratio, whole, median):
    lengths = SHAPES["self"].lengths()[0]
    o = offsets_from_lengths(lengths)
    x = torch.randn(int(lengths.sum()), 1, 4, generator=torch.Generator().manual_seed(0))
    lists = select_blocks(x, x, o, o, ratio=ratio)
    grid = grid_of(o, len(x), 128)
    there = grid.exist > 0
    count, blocks = lists.counts[0][there], grid.blocks[grid.seq][there]
    assert round(float(count.sum() / blocks.sum()), 2) == whole
    per_sequence = torch.zeros(len(lengths), dtype=torch.int64).scatter_add_(0, grid.seq[there], count.long())
    assert round(float((per_sequence / grid.blocks**2).median()), 2) == median


def share_of_attention(mixed, block=16, n=256, dim=16):
    """The attention that the best quarter of the blocks holds, of four topics in runs or mixed."""
    g = torch.Generator().manual_seed(4)
    topic = torch.arange(n) // 32 % 4
    topic = topic[torch.randperm(n, generator=g)] if mixed else topic
    centres = 1.5 * torch.randn(4, dim, generator=g)
    q, k = (torch.randn(n, dim, generator=g) + centres[topic] for _ in range(2))
    o = offsets_from_lengths([n])
    lists = select_blocks(q[:, None], k[:, None], o, o, ratio=0.25, block_q=block, block_kv=block)
    p = torch.softmax(q @ k.T / dim**0.5, 1).unflatten(1, (-1, block)).sum(2).unflatten(0, (-1, block)).mean(1)
    rows = torch.repeat_interleave(torch.arange(n // block), lists.counts[0][: n // block])
    return float(p[rows, lists.columns[: len(rows)].long()].sum() / p.sum())


def test_the_choice_finds_topics_that_lie_together_and_no_others():
    assert share_of_attention(mixed=False) > 0.9
    assert share_of_attention(mixed=True) < 0.4


def test_half_of_the_blocks_save_at_least_the_claimed_third_of_modelled_cycles():
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(512, 1, 128, generator=g).bfloat16() for _ in range(3)]
    o = offsets_from_lengths([512])
    cycles = []
    for lists in (None, select_blocks(*x[:2], o, o, ratio=0.5)):
        with emulator.options(policy="timed", rates=H200, races=False, max_ctas=1):
            jfa.jagged_flash_attention(*x, o, o, block_lists=lists, backend="hopper")
        cycles.append(emulator.last().time)
    assert 1.3 * cycles[1] < cycles[0] < 2 * cycles[1]


def test_tiles_are_dealt_by_the_length_of_their_lists():
    masks = [torch.ones(24, 24).bool().triu(-1).tril(1), torch.ones(8, 8).bool(), torch.ones(12, 12).bool()]
    masks[2][:, 1::2] = False
    o = offsets_from_lengths([3072, 1024, 1536])
    lists = lists_from_mask(masks, o, o, total_q=5632, total_kv=5632)
    grid = grid_of(o, 5632, 128)
    counts = lists.counts[0][grid.exist > 0].numpy()
    by_length = grid.blocks[grid.seq][grid.exist > 0].numpy()
    assert round(balance(zigzag(by_length, 8), counts).imbalance, 2) == 1.2
    assert round(balance(zigzag(counts, 8), counts).imbalance, 2) == 1.01


def test_the_chapter_quotes_the_recorded_run():
    run = json.loads((recorded.FOLDER / "h200-2026-11-30-sparse.json").read_text(encoding="utf-8"))
    at = {(t["name"], t["ratio"]): t for t in run["block_sparse"]}
    dense, half, everything = at["hopper dense", 1.0], at["hopper", 0.5], at["hopper", 1.0]
    text = (ROOT / "notebooks" / "17_block_sparse.py").read_text(encoding="utf-8")
    for said, number in (
        ("this run has {:.2f}", dense["forward_ms"] / half["forward_ms"]),
        ("about {:.0f} % slower than the dense kernel", 100 * (everything["forward_ms"] / dense["forward_ms"] - 1)),
        ("takes {:.1f} % of the time of the dense forward", 100 * half["selection_ms"] / dense["forward_ms"]),
        ("and {:.0f} % of the sparse one at ratio 0.5", 100 * half["selection_ms"] / half["forward_ms"]),
    ):
        assert said.format(number) in text
