"""Tile lists made by one kernel, against lists made by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.kernels.base import Problem  # noqa: E402
from jfa.kernels.common.padded_rows import padded_rows  # noqa: E402
from jfa.kernels.common.tile_list import tile_list  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402
from jfa.masks import Band  # noqa: E402
from jfa.schedule import key_tiles, query_tiles  # noqa: E402

PAD = 32
BANDS = st.builds(
    Band.make,
    st.sampled_from([False, True, "top_left"]),
    st.one_of(st.none(), st.integers(0, 60), st.tuples(st.integers(-1, 40), st.integers(-1, 40))),
)
LENGTHS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6)


def problem_of(pairs, band=None, shared: int | None = None, slots=None) -> Problem:
    """A problem of (len_q, len_kv) pairs; ``shared``: that many shared queries in their place."""
    rows_q = shared or sum(q for q, _ in pairs)
    offset = offsets_from_lengths([rows_q] if shared else [q for q, _ in pairs])
    return Problem(
        num_batches=len(pairs), num_heads=1, num_kv_heads=1, head_dim=64, head_dim_v=64, rows_q=rows_q,
        rows_kv=sum(k for _, k in pairs), rows_out=len(pairs) * shared if shared else rows_q, dtype=torch.bfloat16,
        device=torch.device("cpu"), sm_scale=1.0, band=band or Band(), broadcast_q=shared is not None, deterministic=False,
        query_offset=offset, key_offset=offsets_from_lengths([k for _, k in pairs]), output_offset=slots,
    )  # fmt: skip


def by_hand(problem: Problem, pairs, block: int, keys: bool) -> tuple[list[list[int]], int]:
    """(records in order, how many have work): every tile's work is counted in rows of the other side, the most first."""
    tiles = []
    q_begin = kv_begin = 0
    for s, (len_q, len_kv) in enumerate(pairs):
        out_begin, pad_begin = q_begin, (q_begin + s * PAD) // PAD * PAD
        if problem.broadcast_q:
            len_q, q_begin, pad_begin = problem.rows_q, 0, s * (-(-problem.rows_q // PAD) * PAD)
            out_begin = s * len_q
            if problem.output_offset is not None:
                out_begin = int(problem.output_offset[s])
                if not 0 <= out_begin <= problem.rows_out - len_q:
                    len_q = out_begin = 0
        lo, hi = problem.band.offsets(len_q, len_kv)
        rows, other, low, high = (len_kv, len_q, -hi, -lo) if keys else (len_q, len_kv, lo, hi)
        for row in range(0, rows, block):
            # As if the sequence's last tile were full: at worst it is visited in vain.
            work = min(other, row + block + high) - max(0, row + low)
            record = [q_begin, len_q, row, out_begin, kv_begin, len_kv, lo, hi, pad_begin]
            tiles.append((-max(work, 0), s, row, record))
        kv_begin += len_kv
        q_begin += len_q
    tiles.sort(key=lambda t: t[:3])
    return [t[3] for t in tiles], sum(t[0] < 0 for t in tiles)


def check(problem: Problem, pairs, block: int, keys: bool) -> None:
    records, counts = tile_list(problem, block, keys, PAD)
    want, busy = by_hand(problem, pairs, block, keys)
    assert counts.tolist() == [busy, len(want)] and len(want) <= len(records)
    closed = 1 << 29  # an open side of a band is only known to be far away
    got = records[: len(want)].clone()
    for column, (low, high) in {6: (-closed, closed), 7: (-closed, closed)}.items():
        got[:, column] = got[:, column].clamp(low, high)
    assert got.tolist() == [[*r[:6], max(r[6], -closed), min(r[7], closed), r[8]] for r in want]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, BANDS, st.booleans(), st.sampled_from([16, 32]))
def test_every_tile_once_and_the_most_work_first(pairs, band, keys, block):
    check(problem_of(pairs, band), pairs, block, keys)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 50), st.sampled_from([None, [0], [-1], [10_000], [3]]), st.booleans(), BANDS)
def test_shared_queries_and_slots(pairs, shared, first_slot, keys, band):
    slots = None
    if first_slot is not None:
        slots = torch.tensor([*first_slot, *(s * shared for s in range(1, len(pairs) + 1))], dtype=torch.int32)
    check(problem_of(pairs, band, shared, slots), pairs, 16, keys)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, BANDS, st.booleans())
def test_no_tile_with_work_is_left_out(pairs, band, keys):
    """Against the lists that torch operations make, which know exactly which tile sees nothing."""
    problem = problem_of(pairs, band)
    records, counts = tile_list(problem, 16, keys, PAD)
    offsets = (problem.query_offset, problem.key_offset)
    if keys:
        exact = key_tiles(*offsets, 16, 16, total_q=problem.rows_q, total_kv=problem.rows_kv, band=band)
    else:
        exact = query_tiles(*offsets, 16, 16, total_q=problem.rows_q, band=band)
    begins = problem.key_offset if keys else problem.query_offset
    busy = zip(exact.seq.tolist(), exact.row.tolist(), exact.cost.tolist())
    listed = {(int(r[4] if keys else r[0]) + int(r[2])) for r in records[: counts[0]]}
    assert {int(begins[s]) + row for s, row, cost in busy if cost > 0} <= listed
    assert counts[1] == exact.counts[1]


def test_many_sequences_and_a_long_one():
    pairs = [(5, 7)] * 300 + [(2000, 40)]
    check(problem_of(pairs, Band.make(causal=True)), pairs, 16, False)


def test_nothing_to_list():
    for pairs in ([(0, 0)], [(0, 5), (3, 0)], [(40, 40)]):
        band = Band.make(window_size=(0, -1)) if pairs == [(40, 40)] else None
        check(problem_of(pairs, band), pairs, 16, False)
        check(problem_of(pairs, band), pairs, 16, True)
    problem = problem_of([(4, 4)])
    empty = dataclasses.replace(
        problem, num_batches=0, query_offset=problem.query_offset[:1], key_offset=problem.key_offset[:1]
    )
    records, counts = tile_list(empty, 16, False, PAD)
    assert records.shape == (0, 9) and counts.tolist() == [0, 0]


@pytest.mark.parametrize("lies", [[-7, 400, 90], [50, 20, 10], [0, 0, 1 << 30]])
def test_offsets_that_lie_lead_nowhere_outside(lies):
    problem = problem_of([(30, 40), (20, 25)])
    lying = dataclasses.replace(
        problem, **dict.fromkeys(("query_offset", "key_offset"), torch.tensor(lies, dtype=torch.int32))
    )
    for keys in (False, True):
        records, counts = tile_list(lying, 16, keys, PAD)
        assert 0 <= counts[0] <= counts[1] <= len(records)
    rows = padded_rows(lying, PAD)
    begin, exist = rows.blocks.unbind(1)
    assert (
        (exist >= 0).all() and (exist <= PAD).all() and (begin >= 0).all() and (begin + exist <= problem.rows_q).all()
    )


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.one_of(st.none(), st.integers(1, 50)))
def test_every_query_has_one_place_in_the_padded_rows(pairs, shared):
    problem = problem_of(pairs, shared=shared)
    rows = padded_rows(problem, PAD)
    assert rows.count == PAD * len(rows.blocks)
    covered = [r for begin, exist in rows.blocks.tolist() for r in range(begin, begin + exist)]
    assert sorted(covered) == list(range(problem.rows_out))
    records, counts = tile_list(problem, 16, False, PAD)
    for record in records[: counts[1]].tolist():  # a list's pad_begin is where these blocks begin
        assert rows.blocks[record[8] // PAD, 0] == record[3]
