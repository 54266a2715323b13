"""The planner's lists against lists made by hand and by torch, and what its options do."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from jfa.kernels.common import planner  # noqa: E402
from jfa.kernels.common.nouns import FIELDS  # noqa: E402
from jfa.kernels.common.planner import Cut, Plan, plan_pass, plan_tiles  # noqa: E402
from jfa.schedule.tiles import key_tiles, query_tiles  # noqa: E402
from tests.kernels.test_tile_list import BANDS, LENGTHS, problem_of  # noqa: E402


def records(plan: Plan) -> list[dict[str, int]]:
    """The valid records of a list, their numbers by name."""
    return [dict(zip(FIELDS, r)) for r in plan.records[: int(plan.counts[1])].tolist()]


def by_hand(problem, pairs, cut: Cut) -> list[dict[str, int]]:
    """Every tile in the order of the list: sequences by falling work, a causal query tile's last rows first."""
    found = []
    q_begin = kv_begin = 0
    for s, (len_q, len_kv) in enumerate(pairs):
        if problem.broadcast_q:
            q_begin, len_q = 0, problem.rows_q
        lo, hi = problem.band.offsets(len_q, len_kv)
        rows = len_kv if cut.keys else len_q * cut.pack
        other = len_q if cut.keys and not problem.broadcast_q else len_kv
        far = planner.FAR.value
        width = max(0, min(hi, far) - max(lo, -far) + -(-cut.block // cut.pack))
        work = min(other, width) if len_q and len_kv else 0
        tiles = list(range(0, rows, cut.block))
        if problem.band.has_hi and not cut.keys:
            tiles.reverse()
        out_begin = s * len_q if problem.broadcast_q else q_begin
        for row in tiles:
            record = (q_begin, len_q, row, out_begin, kv_begin, len_kv)
            found.append((-work, s, dict(zip(FIELDS, record))))
        kv_begin += len_kv
        q_begin += len_q
    found.sort(key=lambda f: f[:2])
    return [f[2] for f in found]


@settings(max_examples=25, deadline=None)
@given(LENGTHS, BANDS, st.sampled_from([None, 5, 40]), st.booleans(), st.sampled_from([1, 3, 4]), st.booleans())
def test_every_tile_once_and_the_longest_sequences_first(pairs, band, shared, keys, pack, by_sort):
    problem = problem_of(pairs, band, shared)
    cut = Cut(16, keys=keys, pack=1 if keys else pack)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "SORT_FROM", 0 if by_sort else 1 << 30)
        plan = plan_tiles(problem, cut)
    got, want = records(plan), by_hand(problem, pairs, cut)
    assert [{n: r[n] for n in want[0]} for r in got] == want if want else got == []
    assert len(got) <= cut.capacity(problem)
    for record in got:
        lo, hi = problem.band.offsets(record["len_q"], record["len_kv"])
        far = planner.FAR.value
        assert (max(record["lo"], -far), min(record["hi"], far)) == (max(lo, -far), min(hi, far))


@settings(max_examples=15, deadline=None)
@given(LENGTHS, BANDS, st.booleans())
def test_no_tile_with_work_is_left_out(pairs, band, keys):
    """Against the lists that torch operations make."""
    problem = problem_of(pairs, band)
    plan = plan_tiles(problem, Cut(16, keys=keys))
    offsets = (problem.query_offset, problem.key_offset)
    sizes = dict(total_q=problem.rows_q, total_kv=problem.rows_kv)
    if keys:
        exact = key_tiles(*offsets, 16, 16, band=problem.band, **sizes)
    else:
        exact = query_tiles(*offsets, 16, 16, band=problem.band, total_q=problem.rows_q)
    begins = problem.key_offset if keys else problem.query_offset
    working = records(plan)[: int(plan.counts[0])]
    listed = {r["kv_begin" if keys else "q_begin"] + r["row"] for r in working}
    busy = zip(exact.seq.tolist(), exact.row.tolist(), exact.cost.tolist())
    assert {int(begins[s]) + row for s, row, cost in busy if cost > 0} <= listed
    assert plan.counts[1] == exact.counts[1]


def test_a_mega_sequence_is_split_and_every_key_belongs_to_one_chunk():
    problem = problem_of([(1, n) for n in (900, 10, 0, 64, 33)], shared=4)
    plan = plan_tiles(problem, Cut(32, slots=8, least_chunk=64), counters=8)
    chunks = plan.chunks.view(-1, 2)[: int(plan.counts[1])].tolist()
    by_length = {}
    for record, (code, slot) in zip(records(plan), chunks):
        by_length.setdefault(record["len_kv"], []).append((code >> 16, code & 0xFFFF, slot))
    longest = by_length.pop(900)
    assert [c[0] for c in longest] == list(range(len(longest))) and {c[1] for c in longest} == {len(longest)}
    assert 1 < len(longest) <= 8 and {c[2] for c in longest} == {0}
    assert all(c == [(0, 1, c[0][2])] for c in by_length.values())
    assert plan.counters.tolist() == [0] * 8


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(1, 6), st.sampled_from([16, 200]))
def test_chunks_never_exceed_the_slots_and_slots_do_not_overlap(lengths, workers, least):
    problem = problem_of([(1, n) for n in lengths], shared=40)
    plan = plan_tiles(problem, Cut(16, slots=2 * workers, least_chunk=least), counters=2 * workers)
    valid = int(plan.counts[1])
    assert valid <= len(plan.records)
    taken = []
    for code, slot in plan.chunks.view(-1, 2)[:valid].tolist():
        if code & 0xFFFF > 1:
            taken.append(slot + (code >> 16))
    assert len(set(taken)) == len(taken) and all(0 <= t < 2 * workers for t in taken)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=7), st.sampled_from([16, 64]))
def test_rests_come_behind_whole_tiles_the_longest_first(lengths, block):
    problem = problem_of([(1, n) for n in lengths], shared=3)
    got = records(plan_tiles(problem, Cut(block, keys=True, rests=True)))
    rows = [min(block, r["len_kv"] - r["row"]) for r in got]
    assert rows == sorted(rows, reverse=True) and sum(rows) == sum(lengths)
    assert len({(r["kv_begin"], r["row"]) for r in got}) == len(got)


def test_rows_that_no_sequence_covers_are_listed_without_work():
    problem = problem_of([(5, 6)])
    offset = torch.tensor([1, 3], dtype=torch.int32)
    problem = dataclasses.replace(problem, query_offset=offset)
    got = records(plan_tiles(problem, Cut(32)))
    spans = [(r["q_begin"], r["len_q"], r["len_kv"]) for r in got]
    assert spans == [(1, 2, 6), (0, 1, 0), (3, 2, 0)]
    keys = records(plan_tiles(dataclasses.replace(problem, key_offset=offset), Cut(32, keys=True)))
    assert [(r["kv_begin"], r["len_kv"], r["len_q"]) for r in keys] == [(1, 2, 2), (0, 1, 0), (3, 3, 0)]


def test_a_slot_outside_the_output_leaves_no_queries():
    slots = torch.tensor([4, 0, -1, 6], dtype=torch.int32)
    problem = problem_of([(1, 5), (1, 4), (1, 3)], shared=3, slots=slots)
    problem = dataclasses.replace(problem, rows_out=6)
    got = records(plan_tiles(problem, Cut(16, keys=True)))
    assert {r["len_kv"]: (r["out_begin"], r["len_q"]) for r in got} == {5: (0, 0), 4: (0, 3), 3: (0, 0)}


@pytest.mark.parametrize("lies", [[-7, 400, 90], [50, 20, 10], [0, 0, 1 << 30]])
@pytest.mark.parametrize("by_sort", [False, True])
def test_offsets_that_lie_lead_nowhere_outside(lies, by_sort, monkeypatch):
    monkeypatch.setattr(planner, "SORT_FROM", 0 if by_sort else 1 << 30)
    problem = problem_of([(30, 40), (20, 25)])
    offsets = dict.fromkeys(("query_offset", "key_offset"), torch.tensor(lies, dtype=torch.int32))
    for keys in (False, True):
        plan = plan_tiles(dataclasses.replace(problem, **offsets), Cut(16, keys=keys))
        assert 0 <= plan.counts[0] <= plan.counts[1] <= len(plan.records)
        for r in records(plan):
            assert 0 <= r["q_begin"] and r["q_begin"] + r["len_q"] <= problem.rows_q
            assert 0 <= r["kv_begin"] and r["kv_begin"] + r["len_kv"] <= problem.rows_kv


@settings(max_examples=20, deadline=None)
@given(LENGTHS, BANDS, st.sampled_from([1, 3]), st.sampled_from([16, 32]), st.sampled_from([0, 8]), st.booleans())
def test_the_lists_of_a_forward_and_its_backward_are_those_made_one_by_one(pairs, band, pack, dq_block, slots, by_sort):
    problem = problem_of(pairs, band, None)
    cuts = Cut(16, pack=pack, slots=slots, least_chunk=32), Cut(dq_block, pack=pack), Cut(32, keys=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "SORT_FROM", 0 if by_sort else 1 << 30)
        together = plan_pass(problem, cuts[0], slots, *cuts[1:])
        alone = [plan_tiles(problem, cut, counters) for cut, counters in zip(cuts, (slots, 0, 0))]
    assert (together[0] is together[1]) == (dq_block == 16 and not slots and not by_sort)
    for one, other in zip(together, alone):
        number = int(other.counts[1])
        assert torch.equal(one.counts, other.counts) and torch.equal(one.records[:number], other.records[:number])
        if other.chunks is not None:
            assert torch.equal(one.chunks[:number], other.chunks[:number]) and not one.counters.any()
