"""The rule of `auto` against recorded times: nowhere on the grid does a call get what is over 4 % slower than the best of ours."""

from __future__ import annotations

import json

import pytest
import torch

from jfa.attention import make_problem
from jfa.bench.recorded import FOLDER
from jfa.kernels import preference, registry
from jfa.masks import Band

GRID = json.loads((FOLDER / "h200-2026-12-01-grid.json").read_text(encoding="utf-8"))
ALLOWED = 1.04  # two runs of one kernel differ by a percent or two


def problem_of(cell: dict, **more):
    """The problem of a cell, as registry and kernels see it: sizes, and offsets without contents."""
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    q = meta(cell["rows_q"], cell["heads"], cell["head_dim"])
    k = meta(cell["rows_kv"], cell["kv_heads"], cell["head_dim"])
    offsets = meta(cell["batches"] + 1, dtype=torch.int32)
    band, shared = Band.make(cell["causal"], cell["window_size"]), bool(cell["shared_q"])
    hints = cell["longest_q"], cell["longest_kv"]
    return make_problem(q, k, k, offsets, offsets, None, 1.0, band, shared, more.get("deterministic", False), *hints)


def milliseconds(name: str) -> dict[str, float]:
    """Forward and backward together, by what makes them: a backend's own kernels, or Hopper's forward and the portable backward."""
    hopper, portable = (
        next(t for t in GRID["times"] if (t["shape"], t["name"]) == (name, f"jfa:{b}")) for b in ("hopper", "portable")
    )
    return {
        "hopper": hopper["forward_ms"] + hopper["backward_ms"],
        "hopper, portable": hopper["forward_ms"] + portable["backward_ms"],
        "portable": portable["forward_ms"] + portable["backward_ms"],
    }


def taken(problem) -> str:
    """What a call gets on an H200."""
    first = next(b for b in preference.kind_of(problem).order if b in ("hopper", "portable"))
    return "hopper, portable" if first == "hopper" and preference.portable_backward(problem) else first


@pytest.mark.parametrize("name", GRID["cells"])
def test_what_a_call_gets_is_nowhere_much_slower_than_the_best(name):
    times, way = milliseconds(name), taken(problem_of(GRID["cells"][name]))
    assert times[way] <= ALLOWED * min(times.values()), (way, times)


def test_each_kind_is_on_the_grid():
    """No row of the table rests on nothing."""
    kinds = {preference.kind_of(problem_of(cell)).name for cell in GRID["cells"].values()}
    assert kinds == {kind.name for kind in preference.KINDS}
    ways = {
        preference.portable_backward(problem_of(cell)).split(":")[0].split(" ")[0] for cell in GRID["cells"].values()
    }
    assert ways == {"", "shared", "many", "at"}


def test_the_record_says_where_it_comes_from():
    assert GRID["environment"]["device"] == "NVIDIA H200"
    assert GRID["environment"].keys() >= {"driver", "torch", "triton", "date"} and GRID["ceilings"]


def test_what_was_not_measured_stays_as_it_was():
    usual = dict(rows_q=4096, rows_kv=4096, heads=8, kv_heads=2, head_dim=128, shared_q=0, causal=False)
    usual |= dict(window_size=None, longest_q=64, longest_kv=64)
    few_sequences = problem_of(usual | dict(batches=64))
    assert preference.kind_of(few_sequences).order == preference.USUAL
    assert not preference.portable_backward(few_sequences)
    assert not preference.portable_backward(problem_of(usual | dict(batches=64), deterministic=True))
    empty = problem_of(usual | dict(batches=0, rows_q=0, rows_kv=0))
    assert preference.kind_of(empty).order == preference.USUAL and not preference.portable_backward(empty)


def test_auto_tries_in_the_table_s_order_and_says_so(monkeypatch):
    problem = problem_of(GRID["cells"]["few-1/128/8192"])
    monkeypatch.setattr(registry, "objection", lambda name, problem: None if name != "blackwell" else "another GPU")
    assert registry.pick(problem, "auto") == "portable"
    monkeypatch.setattr(registry, "load", lambda *ignored: None)
    said = registry.choose(problem, "auto")
    assert [name for name, _ in said.reasons] == ["blackwell", "portable"]
    assert "few queries" in said.reasons[-1][1]
