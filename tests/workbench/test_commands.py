"""`jfa timeline` and `jfa emulator sweep|explore` on files of one's own and on shipped names; what each --help shows runs."""

from __future__ import annotations

import json
import re
import shlex

import pytest

pytest.importorskip("triton.language.extra.tlx")
pytest.importorskip("matplotlib")

from jfa import cli  # noqa: E402
from jfa.workbench import compile as compile_tool  # noqa: E402
from jfa.workbench import launches, schedules, timeline  # noqa: E402
from tests.support import ROOT  # noqa: E402

OWN = str(ROOT / "tests" / "workbench" / "own.py")
needs_compiler = pytest.mark.skipif("not __import__('triton').__version__.endswith('+fb')", reason="needs fbtriton")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------------------------------------- timeline


def test_a_timeline_of_ones_own_launch(tmp_path, capsys):
    assert timeline.main([f"{OWN}:launch_box", "--out", "drawn"]) == 0
    said = capsys.readouterr().out
    assert "modelled on B200" in said and "reader" in said and "TMA" in said
    picture, trace = (tmp_path / "drawn" / f"own.launch_box.{kind}" for kind in ("png", "json"))
    assert picture.stat().st_size > 1000 and json.loads(trace.read_text())["traceEvents"]


def test_two_runs_side_by_side_and_a_span(tmp_path, capsys):
    assert timeline.main([f"{OWN}:launch_box", "--beside", "tests.workbench.own:launch_box", "--chip", "H200"]) == 0
    said = capsys.readouterr().out
    assert "B / A: 1.000" in said and said.count("modelled on H200") == 2
    pictures = [path.name for path in tmp_path.rglob("*.png")]
    assert pictures == ["own.launch_box-beside-tests.workbench.own.launch_box.png"]
    assert timeline.file_names(["a/k.py:run", "b/k.py:run", "name"]) == ["k.run", "k.run-2", "name"]
    assert timeline.main([f"{OWN}:launch_box", "--span", "100:900"]) == 0
    assert "modelled on B200: 800 cycles" in capsys.readouterr().out
    assert timeline.main([f"{OWN}:launch_box", "--span", "900000:900001"]) == 2
    assert "no event lies between" in capsys.readouterr().err


def test_a_kernel_among_several(capsys):
    assert timeline.main([f"{OWN}:launch_two", "--kernel", "scale"]) == 0
    assert "reader" not in capsys.readouterr().out
    assert timeline.main([f"{OWN}:launch_two", "--kernel", "gemm"]) == 2
    assert "no kernel named gemm was launched, but scale, first_box" in capsys.readouterr().err


def test_a_shipped_name_is_launched_on_a_small_problem(capsys):
    assert timeline.main(["hopper-forward-d64", "--lengths", "64"]) == 0
    assert "modelled on H200" in capsys.readouterr().out


def test_a_tutorial_is_drawn(capsys):
    pytest.importorskip("triton.language.extra.tlx.tutorials.blackwell_fa_ws", exc_type=ImportError)
    assert timeline.main(["blackwell_fa_ws"]) == 0
    assert "modelled on B200" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- sweep and exploration


def test_sweeps_of_ones_own_launch_and_of_a_shipped_name(capsys):
    assert schedules.main(["sweep", f"{OWN}:launch_box", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "barrier_wait" in said and re.search(r"^\d+ mutants, \d+ found", said, re.M)
    assert schedules.main(["sweep", "hopper-forward-d64", "--lengths", "40", "--seconds", "1"]) == 0
    assert "not tried, for lack of time" in capsys.readouterr().out


@pytest.mark.parametrize("name, status", [("launch_pipeline", 0), ("launch_broken", 1)])
def test_explorations(name, status, capsys):
    assert schedules.main(["explore", f"tests.emulator.test_explore:{name}"]) == status
    said = capsys.readouterr().out
    assert "1 class of schedules" in said and ("policy='replay:" in said) == bool(status)


def test_a_shipped_kernel_is_explored(capsys):
    assert schedules.main(["explore", "hopper-finish-dq", "--lengths", "9", "--executions", "3"]) == 0
    assert "schedules" in capsys.readouterr().out


@pytest.mark.parametrize("run, argv", [(timeline.main, []), (schedules.main, ["sweep"]), (schedules.main, ["explore"])])
def test_what_the_emulator_finds_is_said_and_the_status_is_1(run, argv, capsys):
    assert run([*argv, f"{OWN}:out_of_bounds"]) == 1
    said = capsys.readouterr()
    assert "outside" in said.out + said.err and "own.py" in said.out + said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("run, argv", [(timeline.main, []), (schedules.main, ["sweep"]), (schedules.main, ["explore"])])
@pytest.mark.parametrize(
    "target, sentence",
    [
        (f"{OWN}:scale", "is a kernel: name a function without arguments"),
        (f"{OWN}:fails", "fails raises IndexError, line"),
        (f"{OWN}:needs", "needs arguments"),
        ("nowhere.module:launch", "there is no module nowhere"),
        ("hopper-nothing", "no kernel configuration matches 'hopper-nothing'"),
    ],
)
def test_a_mistake_is_one_sentence(run, argv, target, sentence, capsys):
    assert run([*argv, target]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("jfa ") and sentence in line


def test_a_sweep_needs_outputs(capsys):
    assert schedules.main(["sweep", f"{OWN}:returns_nothing"]) == 2
    assert "must return its output tensors" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- launches of shipped names


NAMES = [
    "blackwell-forward-d64-causal-clc",
    "blackwell-forward-d128-full-static",
    "blackwell-backward-resident-d64-causal-gqa",
    "blackwell-backward-d128-pma-static",
    "blackwell-dq-d64-window",
    "blackwell-plain-d64-full",
    "blackwell-list-keys",
    "hopper-forward-sparse-d128",
    "hopper-backward-d128-no-dq",
    "hopper-backward-resident-q64-d128-causal",
    "hopper-prepare",
    "portable-forward-short-d64",
    "portable-dq-short-d128-has_lo-has_hi",
    "portable-dkdv-d128-has_hi",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_launches_its_kernel_with_its_choices(name):
    """Noted, not run: the very kernel with the very constants that `jfa compile` compiles."""
    from jfa.compiled import select, shipped_configs
    from jfa.workbench.recording import recorded

    target = launches.named(name)
    (config,) = select(shipped_configs(), [name])
    call = target.launch.__self__
    with recorded() as found:
        call._pass(dry=True)
    mine = [one for one in found if launches._same_kernel(one, config)]
    assert target.runs == config.kernel.rpartition(":")[2]
    assert any(
        all(
            str(one.constexprs.get(key)) == str(value).removeprefix("dtype:")
            for key, value in config.constexprs.items()
        )
        for one in mine
    )


@pytest.mark.parametrize("name", ["hopper-forward-d64-one-head", "blackwell-forward-d64-pma-static"])
def test_what_a_named_launch_computes_is_right(name):
    import torch

    from jfa.kernels import registry

    call = launches.named(name, (70, 33)).launch.__self__
    out, lse = call.run()
    problem, q, k, v = call._problem()
    want, want_lse = registry.load("reference").forward(problem, q.double(), k.double(), v.double(), None)
    torch.testing.assert_close(out.double(), want.double(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-3, rtol=1e-3)


def test_a_name_without_a_small_problem_says_so():
    with pytest.raises(launches.TargetError, match="no small problem is known that launches quantize-d64"):
        launches.named("quantize-d64")


# ------------------------------------------------------------------------------------------------------------- the help


HELP = {
    "compile": [compile_tool.parser().format_help()],
    "timeline": [timeline.parser().format_help()],
    "emulator": [schedules.parser().format_help()],
    "verify": [],
}
EXAMPLES = [
    line.strip()
    for text in (compile_tool.__doc__, timeline.__doc__, schedules.__doc__)
    for line in text.partition("example:\n")[2].partition("\n\n")[0].splitlines()
]


@needs_compiler
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_of_each_help_runs(example, capsys):
    words = shlex.split(example)
    assert words[0] == "jfa" and any(example in text for text in HELP[words[1]])
    assert cli.main(words[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", ["sweep", "explore"])
def test_a_subcommands_help_has_its_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        schedules.main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert any(example in said for example in EXAMPLES if command in example)
