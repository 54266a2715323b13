"""A whole call of `jfa verify`, with children that answer as a GPU would: the file, second calls, failures, the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jfa.verify import cli
from jfa.verify.record import Record


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def call(tmp_path, runner: str, *argv: str) -> tuple[int, dict]:
    """Run a session on the CPU with a fake runner; (exit status, the file's content)."""
    out = tmp_path / "result.json"
    basic = ["--out", str(out), "--backends", "portable", "--shapes", "self", "gqa", "--processes", "2", *argv]
    status = cli.Session(cli.parser().parse_args(basic), "cpu", f"tests.verify.fakes:{runner}").run()
    return status, json.loads(out.read_text())


def test_a_sound_gpu_gives_a_complete_file(tmp_path, capsys):
    status, content = call(tmp_path, "suite")
    printed = capsys.readouterr().out
    assert status == 0 and content["not_run"] == [] and content["first_failure"] is None
    assert {"device", "jfa", "torch", "triton", "date", "sources", "python", "cores"} <= content["environment"].keys()
    assert content["ceilings"] == {"copy_tb_per_s": 4.0, "bf16_tflops": 800.0}
    assert content["host_us"]["portable"] == {"forward": 50.0, "both": 200.0}
    assert [(t["shape"], t["name"]) for t in content["timings"]][:2] == [("self", "jfa:portable"), ("self", "fa2")]
    assert content["ratios"]["self"]["forward"] == {"fa2": 2.0, "fa4": 3.0, "cudnn": 4.0}
    assert "nothing failed" in printed and "result.json, a file worth sending" in printed
    assert "random problems: 20 of 20 done, 0 failed" in printed
    assert Path("state/verify.log").exists(), "the log lies in the state folder"


def test_the_file_is_one_that_jfa_bench_reads(tmp_path):
    from jfa.bench import recorded

    call(tmp_path, "suite")
    (found,) = recorded.read_all(tmp_path)
    assert found.shapes() == ["self", "gqa"]
    assert found.fastest("self") == ("jfa:portable", 100.0)


def test_a_second_call_runs_only_what_is_left(tmp_path):
    status, content = call(tmp_path, "suite", "--minutes", "0")
    assert status == cli.INCOMPLETE and len(content["not_run"]) > 50 and not content["outcomes"]
    status, content = call(tmp_path, "suite", "--only", "first", "op")
    done = dict(content["outcomes"])
    assert status == cli.INCOMPLETE and {key.split(":")[0] for key in done} == {"first", "op"}
    status, content = call(tmp_path, "suite")
    assert status == 0 and content["not_run"] == []
    assert {key: content["outcomes"][key] for key in done} == done, "what was done is not done again"
    assert len(content["calls"]) == 3


def test_an_interrupted_call_keeps_what_it_has_and_goes_on(tmp_path, capsys):
    status, content = call(tmp_path, "interrupted", "--processes", "1")
    assert status == cli.INCOMPLETE and content["outcomes"]["random:portable:30"]["state"] == "right"
    assert "random:portable:40" in content["not_run"]
    assert "stopped; the same command continues" in capsys.readouterr().out
    assert call(tmp_path, "suite")[0] == 0


def test_the_first_failure_is_named_with_the_command_that_repeats_it(tmp_path, capsys):
    status, content = call(tmp_path, "one_wrong")
    printed = capsys.readouterr().out
    assert status == 1 and content["first_failure"]["key"] == "prepare:portable:self/jfa:portable"
    assert "FIRST FAILURE prepare:portable:self/jfa:portable, wrong" in printed
    assert "FAILED random:portable:40, wrong" in printed
    assert "2 failed; first: prepare:portable:self/jfa:portable" in printed
    assert "jfa verify --again --only 'prepare:portable:self/jfa:portable'" in printed
    names = [t["name"] for t in content["timings"] if t["shape"] == "self"]
    assert names == ["fa2", "fa4", "cudnn"], "what failed when it was compiled is not timed"


def test_nothing_in_the_file_names_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere/jane")
    _, content = call(tmp_path, "one_wrong", "--only", "random")
    text = json.dumps(content)
    assert "~/kernels.py" in text and "jane" not in text


def test_again_runs_what_failed_once_more(tmp_path):
    call(tmp_path, "one_wrong", "--only", "random")
    status, content = call(tmp_path, "suite", "--only", "random")
    assert status == 1 and content["first_failure"]["key"] == "random:portable:40", "a failure is kept"
    status, content = call(tmp_path, "suite", "--again")
    assert status == 0 and content["outcomes"]["random:portable:40"]["state"] == "right"


def test_a_backend_without_one_right_call_is_not_tried_further(tmp_path, capsys):
    status, content = call(tmp_path, "broken_portable")
    states = {key: o["state"] for key, o in content["outcomes"].items()}
    assert status == 1 and states["first:portable:one sequence"] == "wrong"
    assert states["random:portable:0"] == states["op:portable:any_strides"] == "left out"
    assert [t["name"] for t in content["timings"] if t["shape"] == "gqa"] == ["fa2", "fa4", "cudnn"]
    assert set(content["host_us"]) == {"FlashAttention 2"}
    assert "first:portable:one sequence" in content["first_failure"]["key"] or content["first_failure"][
        "key"
    ].startswith("first:")
    status, content = call(tmp_path, "suite", "--again")
    assert content["outcomes"]["random:portable:0"]["state"] == "right", "what was left out is made up for"


def test_a_file_of_another_machine_is_not_continued(tmp_path):
    _, content = call(tmp_path, "suite", "--only", "first")
    content["environment"]["torch"] = "1.0"
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(cli.Mistake, match="torch 1.0 there.*--fresh"):
        call(tmp_path, "suite")
    assert call(tmp_path, "suite", "--fresh", "--only", "first")[1]["environment"]["torch"] != "1.0"


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--only", "ops"], "no job matches 'ops:\\*'"),
        (["--shapes", "selfie"], "no shape 'selfie'; known are pma32"),
        (["--peers", "fa3"], "no peer 'fa3'"),
        (["--backends", "volta"], "no backend 'volta'"),
        (["--predictions", "missing.json"], "predictions cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, argv, sentence):
    with pytest.raises(cli.Mistake, match=sentence):
        call(tmp_path, "suite", *argv)


def test_a_file_can_be_shown_without_a_gpu(tmp_path, capsys):
    call(tmp_path, "one_wrong")
    capsys.readouterr()
    assert cli.main(["--show", str(tmp_path / "result.json")]) == 0
    printed = capsys.readouterr().out
    assert "2 failed; first: prepare:portable:self/jfa:portable" in printed and "of FA2's" in printed


@pytest.mark.parametrize(
    "text, sentence", [("{", "not JSON"), ("[]", "no result file"), ('{"format": 2}', "no result file")]
)
def test_another_file_is_not_shown(tmp_path, capsys, text, sentence):
    (tmp_path / "other.json").write_text(text)
    assert cli.main(["--show", str(tmp_path / "other.json")]) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_what_can_be_done(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, sentence in ((None, "is a build without CUDA"), ("13.0", "finds none")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert cli.main([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jfa verify: needs an NVIDIA GPU") and sentence in line and "jfa emulator sweep" in line


def test_list_names_every_job_without_a_gpu(capsys):
    assert cli.main(["--list", "--backends", "portable", "--only", "repeat", "time"]) == 0
    printed = capsys.readouterr().out
    assert "repeat:portable:  pma32, pma128, self, cross" in printed and "time:all:  pma32" in printed


def test_a_part_written_file_is_never_the_result(tmp_path, monkeypatch):
    record = Record(tmp_path / "r.json", {"format": "jfa verify 1", "outcomes": {}})
    record.save()
    monkeypatch.setattr(json, "dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record.save()
    assert Record.read(tmp_path / "r.json").content["format"] == "jfa verify 1"


def test_the_recorded_file_is_complete_and_can_be_shown(root, capsys):
    """What `jfa verify --minutes 4 --peers fa2` wrote on an H200."""
    path = root / "docs" / "verify-h200-2026-11-30.json"
    assert cli.main(["--show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed and "nothing failed" in printed and "not yet run" not in printed
    content = json.loads(path.read_text())
    assert content["not_run"] == [] and sum(call["seconds"] for call in content["calls"]) < 15 * 60
