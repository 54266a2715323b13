"""Tile lists: every block of rows once, none empty, sized without looking, sorted, dealt and split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfa.layout import offsets_from_lengths
from jfa.masks import Band, block_kinds
from jfa.schedule import key_tiles, max_tiles, query_tiles, split_tiles, zigzag_list

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=7)
BAND = st.builds(Band.make, st.sampled_from([False, True, "top_left"]), st.one_of(st.none(), st.integers(0, 9)))
BLOCK = st.sampled_from([1, 4, 16])


def offsets(pairs):
    return [offsets_from_lengths([p[i] for p in pairs]) for i in (0, 1)]


def listed(tiles):
    """{(seq, row): cost} of the valid slots."""
    valid = tiles.seq >= 0
    rows = list(zip(tiles.seq[valid].tolist(), tiles.row[valid].tolist()))
    assert len(set(rows)) == len(rows), "a tile is listed twice"
    return dict(zip(rows, tiles.cost[valid].tolist()))


@given(PAIRS, BAND, BLOCK, BLOCK, st.booleans())
def test_query_tiles_cover_every_query_block_once(pairs, band, block_m, block_n, longest_first):
    qo, ko = offsets(pairs)
    total = int(qo[-1])
    tiles = query_tiles(qo, ko, block_m, block_n, total_q=total, band=band, longest_first=longest_first)
    want = {}
    for b, (lq, lk) in enumerate(pairs):
        costs = (block_kinds(band, lq, lk, block_m, block_n) > 0).sum(1)
        want.update({(b, m * block_m): int(c) for m, c in enumerate(costs)})
    assert listed(tiles) == want
    assert tiles.capacity == max_tiles(total, block_m, len(pairs)) and len(want) <= tiles.capacity
    assert tiles.counts.tolist() == [sum(c > 0 for c in want.values()), len(want)]
    assert (tiles.seq[len(want) :] == -1).all() and (tiles.row[len(want) :] == -1).all()
    if longest_first:
        assert (tiles.cost.diff() <= 0).all()


@given(PAIRS, BAND, BLOCK, BLOCK)
def test_key_tiles_cost_the_query_blocks_that_see_them(pairs, band, block_n, block_m):
    qo, ko = offsets(pairs)
    tiles = key_tiles(qo, ko, block_n, block_m, total_q=int(qo[-1]), total_kv=int(ko[-1]), band=band)
    want = {}
    for b, (lq, lk) in enumerate(pairs):
        costs = (block_kinds(band, lq, lk, block_m, block_n) > 0).sum(0)
        want.update({(b, n * block_n): int(c) for n, c in enumerate(costs)})
    assert listed(tiles) == want


def test_surplus_slots_never_name_a_sequence():
    qo = offsets_from_lengths([0, 130, 1, 0, 64])
    tiles = query_tiles(qo, qo, 64, 64, total_q=195, longest_first=False)
    per_head = [(b, r // 64) for b, r in zip(tiles.seq.tolist(), tiles.row.tolist()) if b >= 0]
    assert per_head == [(1, 0), (1, 1), (1, 2), (2, 0), (4, 0)]
    assert 2 * int(tiles.counts[1]) == 10 and 5 not in tiles.seq.tolist()


def test_broadcast_queries_need_no_query_offsets():
    ko = offsets_from_lengths([5, 0, 100])
    tiles = query_tiles(None, ko, 32, 64, total_q=40, broadcast_q=True)
    assert listed(tiles) == {(2, 0): 2, (2, 32): 2, (0, 0): 1, (0, 32): 1, (1, 0): 0, (1, 32): 0}
    assert tiles.counts.tolist() == [4, 6] and tiles.seq[:2].tolist() == [2, 2]
    back = key_tiles(None, ko, 64, 16, total_q=40, total_kv=105, broadcast_q=True)
    assert listed(back) == {(0, 0): 3, (2, 0): 3, (2, 64): 3}


def test_tiles_without_keys_stand_last():
    qo, ko = offsets([(64, 0), (64, 10), (64, 300)])
    tiles = query_tiles(qo, ko, 64, 64, total_q=192)
    assert tiles.seq[:3].tolist() == [2, 1, 0] and tiles.counts.tolist() == [2, 3]


@pytest.mark.parametrize("bad", [[0, -5, 9], [0, 900, 3], [7, 3, 1]])
def test_offsets_that_lie_stay_within_the_list(bad):
    lies = torch.tensor(bad, dtype=torch.int32)
    tiles = query_tiles(lies, lies, 4, 4, total_q=9)
    assert tiles.capacity == max_tiles(9, 4, 2) and tiles.seq.max() < 2 and tiles.seq.min() >= -1


def test_no_sequences_give_an_empty_list():
    nothing = torch.zeros(1, dtype=torch.int32)
    tiles = query_tiles(nothing, nothing, 64, 64, total_q=0)
    assert tiles.capacity == 0 and tiles.counts.tolist() == [0, 0]
    assert zigzag_list(tiles, 4).capacity == 0 and split_tiles(tiles, 4).counts.tolist() == [0]


class HostRead(Exception):
    """Somebody asked a tensor for its numbers."""


@pytest.mark.parametrize("broadcast_q", [False, True])
def test_lists_are_built_without_reading_a_tensor(broadcast_q, monkeypatch):
    def refuse(self, *args):
        raise HostRead

    qo, ko = offsets([(40, 9), (0, 80), (7, 300)])
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    band = Band.make(True, (16, -1))
    tiles = query_tiles(qo, ko, 16, 16, total_q=47, band=band, broadcast_q=broadcast_q)
    key_tiles(qo, ko, 16, 16, total_q=47, total_kv=389, band=band, broadcast_q=broadcast_q)
    zigzag_list(tiles, 5)
    split_tiles(tiles, 5, copies=2)


@given(PAIRS, st.integers(1, 6))
def test_zigzag_list_deals_the_sorted_tiles(pairs, workers):
    qo, ko = offsets(pairs)
    tiles = query_tiles(qo, ko, 4, 4, total_q=int(qo[-1]))
    dealt = zigzag_list(tiles, workers)
    assert listed(dealt) == listed(tiles) and dealt.capacity % workers == 0
    for r in range(0, dealt.capacity // workers):
        mine = dealt.cost[r * workers : (r + 1) * workers]
        source = tiles.cost[r * workers : (r + 1) * workers].tolist()
        source += [0] * (workers - len(source))
        assert mine.tolist() == (source if r % 2 == 0 else source[::-1])


@given(PAIRS, st.integers(1, 9), st.integers(1, 3), st.integers(1, 5))
def test_split_parts_tile_the_keys_of_every_tile(pairs, workers, copies, least):
    qo, ko = offsets(pairs)
    tiles = query_tiles(qo, ko, 4, 4, total_q=int(qo[-1]))
    split = split_tiles(tiles, workers, copies=copies, least_blocks=least)
    count = int(split.counts)
    assert (split.tile[count:] == -1).all()
    limit = max(-(-int(tiles.cost.sum()) * copies // workers), least)
    covered = {}
    for t, p, n, a, b in zip(
        *(x[:count].tolist() for x in (split.tile, split.part, split.parts, split.begin, split.end))
    ):
        assert b - a <= limit and 0 <= p < n and a == covered.get(t, 0)
        covered[t] = b
    assert covered == {t: c for t, c in enumerate(tiles.cost.tolist()) if tiles.seq[t] >= 0}
