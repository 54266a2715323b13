"""The grid names its cells, tells their sizes, and shows where `auto` or a peer makes us look slow."""

from __future__ import annotations

import json

import pytest
import torch

from jfa.bench import cli, grid, runner
from jfa.bench.shapes import Shape

TINY = [
    Shape("self/16/8", 2, 2, 16, lambda: torch.tensor([3, 8, 1], dtype=torch.int32)),
    Shape("pma4/16/8", 2, 1, 16, lambda: torch.tensor([5, 2], dtype=torch.int32), shared_q=4),
]


def test_cells_have_names_of_their_own_and_cover_kinds_and_head_dims():
    cells = grid.cells()
    assert len({c.name for c in cells}) == len(cells)
    kinds = {c.name.split("/")[0] for c in cells}
    assert {"self", "causal", "window", "gqa-causal", "few-1", "short-causal", "pma32", "long-causal"} <= kinds
    assert {c.head_dim for c in cells} == set(grid.DIMS)
    assert all(c.heads % c.kv_heads == 0 for c in cells)


def test_facts_are_sizes():
    own, shared = (grid.facts(shape) for shape in TINY)
    assert (own["batches"], own["rows_q"], own["rows_kv"], own["longest_q"]) == (3, 12, 12, 8)
    assert (shared["rows_q"], shared["longest_q"], shared["longest_kv"], shared["kv_heads"]) == (4, 4, 5, 1)
    json.dumps(own)


def test_a_grid_without_a_gpu_times_the_reference(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(grid, "cells", lambda: TINY)
    written = tmp_path / "grid.json"
    assert cli.main(["--grid", "--runs", "1", "--peers", "--json", str(written)]) == 0
    result = json.loads(written.read_text())
    assert set(result["cells"]) == {"self/16/8", "pma4/16/8"}
    assert {c["auto"] for c in result["cells"].values()} == {"reference"}
    assert [t["name"] for t in result["times"]] == ["jfa:reference"] * 2
    assert cli.main(["--grid", "--shapes", "dense"]) == 2
    assert "no cell is named so" in capsys.readouterr().out


def test_a_peer_timed_in_a_process_of_its_own_joins_the_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(grid, "cells", lambda: TINY)
    other = tmp_path / "peer.json"
    times = [
        runner.Timing("self/16/8", "fa4", forward_ms=1e-6),
        runner.Timing("self/16/8", "jfa:portable", forward_ms=1e-9),
        runner.Timing("elsewhere/16/8", "fa4", forward_ms=1e-9),
    ]
    other.write_text(json.dumps({"times": [vars(t) for t in times]}))
    written = tmp_path / "grid.json"
    assert cli.main(["--grid", "--runs", "1", "--peers", "--beside", str(other), "--json", str(written)]) == 0
    found = [(t["shape"], t["name"]) for t in json.loads(written.read_text())["times"]]
    assert found == [("self/16/8", "jfa:reference"), ("pma4/16/8", "jfa:reference"), ("self/16/8", "fa4")]
    assert "behind" in capsys.readouterr().out


def timings(**milliseconds):
    return [
        {"shape": "self/16/8", "name": name.replace("_", ":"), "forward_ms": ms, "backward_ms": None}
        for name, ms in milliseconds.items()
    ]


@pytest.mark.parametrize(
    "measured, auto, shown, behind",
    [
        (dict(jfa_hopper=1.0, jfa_portable=2.0, fa2=1.5), "hopper", "1.50", False),
        (dict(jfa_hopper=2.0, jfa_portable=1.0, fa2=1.5), "hopper", "portable 2.00", True),
        (dict(jfa_hopper=2.0, fa2=None, fa4=1.0), "hopper", "fa4  0.50", True),
    ],
)
def test_a_row_shows_a_wrong_choice_and_a_faster_peer(measured, auto, shown, behind):
    text = grid.drawn({"cells": {"self/16/8": {"auto": auto}}, "times": timings(**measured)})
    (row,) = text.splitlines()[1:]
    assert shown in row and ("behind" in row) == behind


def test_memory_counts_what_a_pass_returns_as_its_own():
    device = torch.device("cpu")
    assert runner.with_memory(lambda: 3, device) == (3, None, None)
    x = torch.zeros(4, 5)
    assert runner._bytes((x, x.view(-1), None, x[1:])) == 80


def test_a_line_tells_memory_where_it_was_counted():
    timing = runner.Timing("self", "jfa", 1.0, 2.0, 3.0, 4.0, forward_mb=5.25, backward_mb=7.0, kept_mb=0.5)
    assert "5.2 MB, of these 0.5 kept | 7.0 MB" in cli.line(timing)
    assert "MB" not in cli.line(runner.Timing("self", "jfa", 1.0, 2.0, 3.0, 4.0))
