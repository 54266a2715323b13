"""jfa bench: what a machine without a GPU says, the shapes' exact counts, and the recorded result."""

from __future__ import annotations

import json

import pytest
import torch

from jfa.bench import cli, peers, runner, shapes
from jfa.layout import log_uniform_lengths


def test_a_cpu_says_that_it_times_the_reference(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny = shapes.Shape("tiny", 2, 1, 8, lambda: log_uniform_lengths(3, 2, 9, seed=1), shared_q=2)
    monkeypatch.setattr(shapes, "ON_CPU", (tiny,))
    assert cli.main(["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "result.svg")]) == 0
    assert "reference" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["environment"]["device"] == "CPU" and result["timings"][0]["backward_ms"] > 0
    assert (tmp_path / "result-forward.svg").exists() and (tmp_path / "result-backward.svg").exists()


def test_unknown_names_are_refused(capsys):
    assert cli.main(["--shapes", "round"]) == 2
    assert "round" in capsys.readouterr().out


def test_flops_and_bytes_count_what_the_mask_allows():
    shape = shapes.Shape("two", 4, 2, 8, lambda: torch.tensor([3, 5]).int(), causal=True)
    assert shape.flops() == 4 * (6 + 15) * 4 * 8
    assert shape.flops(backward=True) == 10 * (6 + 15) * 4 * 8
    assert shape.least_bytes() == (8 * 4 * 2 + 2 * 8 * 2) * 8 * 2


@pytest.mark.parametrize("peer", ["fa4", "missing=/nowhere/at/all"])
def test_a_peer_that_is_not_installed_is_said_to_be_so(peer):
    inputs = shapes.make_inputs(shapes.ON_CPU[0], "cpu", torch.float32)
    build = peers.from_path(peer.split("=")[1]) if "=" in peer else peers.PEERS[peer]
    timing = runner.measure(inputs, peer, build)
    assert timing.forward_ms is None and ("installed" in timing.note or "exist" in timing.note)


def test_recorded_results_say_where_they_come_from_and_print_as_a_table(root):
    for path in (root / "jfa" / "bench" / "results").glob("*portable.json"):
        result = json.loads(path.read_text())
        assert {"device", "driver", "torch", "triton", "date"} <= result["environment"].keys()
        assert "pma32" in cli.table(result)
