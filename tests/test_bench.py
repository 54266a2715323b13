"""jfa bench: what a machine without a GPU says, the shapes' exact counts, and the recorded result."""

from __future__ import annotations

import json
from dataclasses import replace

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


def test_host_time_without_a_gpu_leaves_launches_out(capsys, tmp_path):
    pytest.importorskip("triton")
    written = tmp_path / "host.json"
    assert cli.main(["--host", "--json", str(written)]) == 0
    shown, times = capsys.readouterr().out, json.loads(written.read_text())["host"]
    assert "launches do nothing" in shown
    for backend in ("hopper", "portable"):
        for kind in (
            "",
            ", new totals each call",
            ", new signature",
            ", int64 offsets",
            ", with a plan",
            ", the registered op",
        ):
            assert f"{backend}{kind}" in shown
            assert times[f"{backend}{kind}"].keys() == {"forward", "no gradients", "both"}


def test_unknown_names_are_refused(capsys):
    assert cli.main(["--shapes", "round"]) == 2
    assert "round" in capsys.readouterr().out


def test_flops_and_bytes_count_what_the_mask_allows():
    shape = shapes.Shape("two", 4, 2, 8, lambda: torch.tensor([3, 5]).int(), causal=True)
    assert shape.flops() == 4 * (6 + 15) * 4 * 8
    assert shape.flops(backward=True) == 10 * (6 + 15) * 4 * 8
    assert shape.least_bytes() == (8 * 4 * 2 + 2 * 8 * 2) * 8 * 2


def _sparse(ratio):
    lengths = lambda: torch.tensor([384, 128, 1280]).int()
    return shapes.Shape("blocks", 2, 1, 16, lengths, sparse=ratio)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_flops_of_block_lists_count_the_listed_pairs(ratio):
    shape = _sparse(ratio)
    inputs = shapes.make_inputs(shape, "cpu", torch.float32)
    assert shape.flops() == 4 * int(inputs.block_lists.starts[-1]) * 128**2 * 16


def test_block_lists_reach_the_op_and_only_peers_that_can_walk_them():
    inputs = shapes.make_inputs(_sparse(0.5), "cpu", torch.float32)
    dense = shapes.make_inputs(replace(_sparse(0.5), sparse=0.0), "cpu", torch.float32)
    assert not torch.allclose(peers.jfa(inputs)(), peers.jfa(dense)())
    for name in set(peers.PEERS) - {"flex"}:
        timing = runner.measure(inputs, name, peers.PEERS[name])
        assert timing.forward_ms is None and "knows no block lists" in timing.note
    timing = runner.measure(inputs, "selection", peers.selection)
    assert "TFLOP" not in cli.line(timing)
    assert timing.forward_ms > 0 and timing.backward_ms is None and not timing.note
    table = peers._chosen_blocks(inputs)
    assert int(table.sum()) == int(inputs.block_lists.starts[-1]) and table.shape == (2, 14, 14)
    assert not table[:, :3, 3:].any() and not table[:, 4:, :4].any()


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
