"""What is recorded about MXFP8: errors against fp64 can be measured again, curves of a training are what the example writes."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest
import torch

import jfa
from jfa import reference
from jfa.bench.recorded import FOLDER
from tests.support import ROOT


def newest(kind: str) -> dict:
    """Return the newest record of a kind; it names its day and versions."""
    content = json.loads(max(FOLDER.glob(f"*-mxfp8-{kind}.json")).read_text(encoding="utf-8"))
    assert {"date", "torch", "triton", "device"} <= content["environment"].keys()
    return content


@pytest.fixture(scope="module")
def errors() -> dict[str, dict]:
    return {row["case"]: row for row in newest("errors")["errors"]}


@pytest.mark.parametrize("case", ["normal, 256 x 512, D 64", "rows of V from 2^-6 to 2^6"])
def test_the_recorded_errors_come_again(case, errors):
    tool = runpy.run_path(str(ROOT / "tools" / "measure_mxfp8.py"))
    given = next(rest for name, *rest in tool["cases"]() if name == case)
    found = tool["errors"](*given)
    for precision in ("bf16", "mxfp8"):
        for name in ("out", "dq", "dk", "dv"):
            assert found[precision][name] == pytest.approx(errors[case][precision][name], rel=0.03)


def test_the_record_covers_every_case_of_the_tool(errors):
    tool = runpy.run_path(str(ROOT / "tools" / "measure_mxfp8.py"))
    assert [name for name, *_ in tool["cases"]()] == list(errors)


def test_what_the_errors_say(errors):
    """About 0.055 forward and 0.067 for gradients on normal numbers; a power of two in the inputs changes nothing."""
    normal = errors["normal, 256 x 512, D 128"]["mxfp8"]
    assert 0.045 < normal["out"] < 0.06 and all(0.045 < normal[name] < 0.07 for name in ("dq", "dk", "dv"))
    small = errors["Q, K, V, dO a million times smaller"]["mxfp8"]
    assert all(small[name] == pytest.approx(normal[name], rel=0.05) for name in ("out", "dq", "dk", "dv"))
    larger = errors["scores 4 times as large"]["mxfp8"]
    assert larger["out"] > 1.5 * normal["out"]  # the error of a score grows with it, and enters an exponential


# ------------------------------------------------------------------------------------------------------- one rounding at a time
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def parts() -> dict[str, dict]:
    return {row["rounded"]: row for row in newest("parts")["parts"]}


@pytest.mark.slow
def test_the_recorded_parts_come_again(parts):
    tool = runpy.run_path(str(ROOT / "tools" / "measure_mxfp8.py"))
    found = {row["rounded"]: row for row in tool["parts"]([256], [512], 128)}
    assert found.keys() == parts.keys()
    for name, row in found.items():
        for which in NAMES:
            assert row[which] == pytest.approx(parts[name][which], rel=0.02, abs=1e-5), name


@pytest.mark.parametrize("which", NAMES)
def test_squares_of_single_roundings_add_up(which, parts):
    alone = [row[which] for name, row in parts.items() if name.startswith("only") and "operands" not in name]
    assert len(alone) == len(reference.ROUNDED)
    assert sum(x * x for x in alone) ** 0.5 == pytest.approx(parts["all"][which], rel=0.03)


def test_no_choice_of_scales_reaches_0_045_for_queries_and_keys(parts):
    assert all(row[which] > 0.045 for name, row in parts.items() if name.startswith("all") for which in ("dq", "dk"))
    for name in ("scales twice as large", "P stored as 16 P", "dS per 32 keys"):
        for which in NAMES:
            assert parts[f"all, {name}"][which] == pytest.approx(parts["all"][which], rel=0.02)
    assert all(parts["all, scales by floor (OCP)"][which] > 1.05 * parts["all"][which] for which in NAMES)


def test_the_tool_switches_one_rounding_at_a_time():
    """On a small problem, with other numbers than the record's; afterwards everything rounds as before."""
    tool = runpy.run_path(str(ROOT / "tools" / "measure_mxfp8.py"))
    found = {row["rounded"]: row for row in tool["parts"]([40], [70], 32, seed=5)}
    for name in reference.ROUNDED:
        alone = [found[f"only {name}"][which] for which in NAMES]
        assert max(alone) > 0.015 and max(alone) < 0.05, name
        assert all(found[f"all but {name}"][which] < 1.1 * found["all"][which] for which in NAMES)
    assert found["only dO by tokens"]["out"] == found["only dO by tokens"]["dq"] == 0
    again = {row["rounded"]: row for row in tool["parts"]([40], [70], 32, seed=5)}
    assert again == found


# ----------------------------------------------------------------------------------------------------------------- training
SCRIPT = ROOT / "examples" / "train_mxfp8.py"
TINY = [
    "--dim",
    "32",
    "--heads",
    "1",
    "--layers",
    "1",
    "--users",
    "2",
    "--longest",
    "20",
    "--steps",
    "3",
    "--seeds",
    "1",
]


def test_what_the_recorded_curves_say():
    """MXFP8 learns what bf16 learns, in the same steps, and ends within 0.01 of it."""
    content = newest("training")
    curves = {(curve["precision"], curve["seed"]): curve["losses"] for curve in content["curves"]}
    assert {precision for precision, _ in curves} == {"fp32", "bf16", "mxfp8", "mxfp8 forward only"}
    mean = lambda losses: sum(losses[-content["last"] :]) / content["last"]
    for seed in (0, 1):
        bf16, rounded = curves["bf16", seed], curves["mxfp8", seed]
        assert len(bf16) == len(rounded) == content["steps"] and bf16[0] > 2 * mean(bf16)
        assert abs(mean(rounded) - mean(bf16)) < 0.01
        assert max(abs(a - b) for a, b in zip(rounded, bf16)) < 0.1


def test_the_example_trains_in_every_precision(tmp_path):
    target = tmp_path / "curves.json"
    subprocess.run([sys.executable, str(SCRIPT), *TINY, "--json", str(target)], check=True, capture_output=True)
    content = json.loads(target.read_text(encoding="utf-8"))
    losses = {curve["precision"]: curve["losses"] for curve in content["curves"]}
    assert list(losses) == ["fp32", "bf16", "mxfp8", "mxfp8 forward only"]
    assert content["sizes"]["dim"] == 32 and content["environment"]["torch"] == torch.__version__
    for name, curve in losses.items():
        assert len(curve) == 3 and curve == pytest.approx(losses["fp32"], abs=0.05), name
    assert losses["mxfp8"][0] == losses["mxfp8 forward only"][0] != losses["fp32"][0]


def test_its_forward_only_run_recomputes_p_in_bf16():
    example = runpy.run_path(str(SCRIPT))
    g = torch.Generator().manual_seed(0)
    offsets = jfa.layout.offsets_from_lengths([5, 0, 33])
    leaves = [torch.randn(38, 2, 32, generator=g).requires_grad_() for _ in range(3)]
    grad = torch.randn(38, 2, 32, generator=g)
    outs = {name: example["attend"](name, *leaves, offsets) for name in ("bf16", "mxfp8", "mxfp8 forward only")}
    grads = {name: torch.autograd.grad(out, leaves, grad) for name, out in outs.items()}
    assert torch.equal(outs["mxfp8 forward only"], outs["mxfp8"]) and not torch.equal(outs["bf16"], outs["mxfp8"])
    for a, b, other in zip(grads["mxfp8 forward only"], grads["bf16"], grads["mxfp8"]):
        assert 0.005 < (a - b).norm() / b.norm() < 0.1 and not torch.equal(a, other)


def test_its_backward_is_that_of_attention_where_the_forward_was_exact():
    one_backward = runpy.run_path(str(SCRIPT))["one_backward"]
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(2, 20, 8, generator=g).double() for _ in range(4))
    offsets = jfa.layout.offsets_from_lengths([20])
    leaves = [x.transpose(0, 1).clone().requires_grad_() for x in (q, k, v)]
    out, lse = jfa.jagged_flash_attention(*leaves, offsets, offsets, causal=True, return_lse=True)
    want = torch.autograd.grad(out, leaves, dout.transpose(0, 1))
    found = one_backward(q, k, v, out.detach().transpose(0, 1), dout, lse.detach()[:, :, None])
    for a, b in zip(found, want):
        torch.testing.assert_close(a.transpose(0, 1), b)
