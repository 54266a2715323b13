"""What is released: a wheel that works by itself, one version everywhere, and a README whose numbers are the recorded ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import jfa
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")

OP = """
import json, sys
import torch
import jfa
from jfa.bench import recorded
from jfa import jagged_flash_attention

lengths = torch.tensor([2, 0, 5])
offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
torch.manual_seed(0)
q, k, v = (torch.randn(7, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = jagged_flash_attention(q, k, v, offsets, offsets, 5, 5, causal=True)
out.sum().backward()
mask = torch.zeros(7, 7, dtype=torch.bool)
for a, b in ((0, 2), (2, 7)):
    mask[a:b, a:b] = torch.ones(b - a, b - a, dtype=torch.bool).tril()
heads = [x.detach().transpose(0, 1) for x in (q, k, v)]
truth = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)
print(json.dumps({"file": jfa.__file__, "version": jfa.__version__, "error": float((out - truth).abs().max()),
                  "grad": float(q.grad.abs().sum()), "results": len(recorded.newest_ceilings("H200")),
                  "loaded": sorted({"triton", "greenlet", "matplotlib", "IPython"} & set(sys.modules))}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the files that a build needs, with this environment's setuptools."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "jfa", source / "jfa", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(dist), str(source)], check=True, capture_output=True, text=True)
    (built,) = dist.glob("*.whl")
    return built


def test_the_wheel_has_every_module_and_file_of_the_package(wheel):
    kept = {".py", ".json"}
    wanted = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "jfa").rglob("*")
        if p.suffix in kept and "__pycache__" not in p.parts
    }
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_op_runs_from_the_wheel_alone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # -S leaves site-packages' .pth files out, so that the checkout of the editable install is not found.
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JFA"))}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), packages])
    run = subprocess.run([sys.executable, "-S", "-c", OP], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["file"].startswith(str(tmp_path)) and said["version"] == jfa.__version__
    assert said["error"] < 1e-12 and said["grad"] > 0 and said["results"] == 2
    assert set(said["loaded"]) <= {"triton"}, "the op on a CPU needs torch and numpy only"


def test_one_version_everywhere(wheel):
    assert wheel.name.startswith(f"jfa-{jfa.__version__}-py3-")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jfa.__version__}\n" in citation
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest[1] == jfa.__version__
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.M)


def test_the_citation_has_what_the_format_requires():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["type"] == "software"


def ratios(file, ours, peer, way):
    """How many times as fast as the peer ours was, shape by shape, in a recorded run."""
    record = json.loads((ROOT / "jfa/bench/results" / file).read_text())
    timings = record.get("timings") or record["times"]  # since 2026-11-30 a record names them `times`
    times = {(t["shape"], t["name"]): t.get(way) for t in timings}
    return [
        times[shape, peer] / ms
        for (shape, name), ms in times.items()
        if name == ours and ms and times.get((shape, peer))
    ]


@pytest.mark.parametrize(
    "row, file, ours, peer",
    [
        ("the Hopper kernels against FlashAttention 4", "h200-2026-12-01-fa4.json", "jfa:hopper", "fa4"),
        ("plain Triton against FlashAttention 2", "h200-2026-11-29-portable.json", "jfa:portable", "fa2"),
    ],
)
def test_the_ratios_of_the_readme_are_those_recorded(row, file, ours, peer):
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    said = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) to ([\d.]+) times", line)]
    expected = [ratios(file, ours, peer, way) for way in ("forward_ms", "backward_ms")]
    assert said == [(float(f"{min(r):.2g}"), float(f"{max(r):.2g}")) for r in expected]
    environment = json.loads((ROOT / "jfa/bench/results" / file).read_text())["environment"]
    (heading,) = [line for line in README.splitlines() if line.startswith("| shape by shape")]
    assert environment["device"] in heading and environment["date"] in heading and f"results/{file}" in README


@pytest.mark.slow
def test_the_timeline_of_the_readme_says_what_the_model_says():
    import runpy

    drawn = runpy.run_path(str(ROOT / "tools" / "draw_timeline.py"))
    text = drawn["picture"](drawn["lines"]()).text
    said = re.search(r"busy (\d+) % of the time, with specialized warps (\d+) %", README)
    modelled = re.findall(r"tensor core busy (\d+)% of the time", text)
    assert list(said.groups()) == modelled
