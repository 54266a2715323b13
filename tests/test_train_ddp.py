"""examples/train_jagged_ddp.py: two processes train as one does, under DDP and FSDP2, and the times are written."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

SCRIPT = ROOT / "examples" / "train_jagged_ddp.py"
# torchrun takes a free port and opens it a moment later: another program may have it by then. Nothing else is tried twice.
PORT_LOST = re.compile(r"EADDRINUSE|[Aa]ddress already in use|Connection (?:refused|reset|closed)")
SMALL = [
    "--double",
    "--rounds",
    "1",
    "--steps",
    "3",
    "--warmup",
    "1",
    "--users",
    "9",
    "--longest",
    "60",
    "--layers",
    "1",
]


def launch(folder, ranks: int, *options: str) -> tuple[dict, dict, str]:
    """Run the example on some processes; (weights after it, its JSON, what it printed)."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    weights, times = folder / f"{ranks}{len(options)}.pt", folder / f"{ranks}{len(options)}.json"
    command = [*start, str(SCRIPT), *SMALL, "--save", str(weights), "--json", str(times), *options]
    run = lambda: subprocess.run(command, capture_output=True, text=True, timeout=250)
    done = run()
    if done.returncode and PORT_LOST.search(done.stderr):
        done = run()
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return torch.load(weights), json.loads(times.read_text()), done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.xdist_group("torchrun")  # one start at a time
@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["DDP", "FSDP2"])
def test_two_processes_train_as_one_does(alone, options, tmp_path):
    weights, found, printed = launch(tmp_path, 2, *options)
    assert weights.keys() == alone[0].keys() and found["ranks"] == 2
    for name, value in weights.items():
        torch.testing.assert_close(value, alone[0][name], atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    # from the same weights over the same batches: dealing changes the order of additions only
    for run in found["runs"]:
        assert run["losses"] == pytest.approx(alone[1]["runs"][0]["losses"], abs=1e-10)
        assert len(run["steps_ms"]) == 2, "three steps, one of them to warm up"
    assert set(found["step_ms"]) == {"as they come", "zigzag", "longest first"}
    assert all(found["speedup"][way] > 0 for way in ("zigzag", "longest first"))
    assert {"device", "torch", "date"} <= found["environment"].keys()
    assert printed.count("ms per step") == 3, "one rank prints"


# The reducer of a DDP model that outlives its process group may join gloo's thread while holding the GIL which that thread needs.
NO_MODEL_LEFT = """
import gc, runpy
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def destroy(end=dist.destroy_process_group):
    print("models left:", sum(isinstance(x, DistributedDataParallel) for x in gc.get_objects()))
    end()

dist.destroy_process_group = destroy
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.xdist_group("torchrun")
def test_no_model_outlives_its_process_group(monkeypatch):
    # port 0: rank 0 opens any that is free
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    code = NO_MODEL_LEFT.format(script=str(SCRIPT))
    done = subprocess.run([sys.executable, "-c", code, *SMALL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "models left: 0"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT), run_name="example")


def test_the_weights_of_a_training_differ_from_the_first_ones(alone, example):
    torch.manual_seed(0)
    fresh = example["NextItem"](example["Sizes"](users=9, longest=60, layers=1)).double().state_dict()
    assert all(not torch.equal(alone[0][name], value) for name, value in fresh.items() if "weight" in name)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_user_is_dealt_once_and_zigzag_is_more_even(example, ranks):
    sizes = example["Sizes"](users=64, longest=4096)
    lengths = example["lengths_of"](5, sizes)
    for way in example["WAYS"]:
        dealt = example["deal"](way, lengths, ranks, sizes)
        assert sorted(u for part in dealt for u in part) == list(range(64))
    contiguous, zigzag, longest = (example["spread"](way, sizes, 10, ranks) for way in example["WAYS"])
    for cost in ("tokens", "pairs", "flops"):
        assert 1 <= zigzag[cost] < contiguous[cost]
    assert 1 <= longest["flops"] < zigzag["flops"], "longest first weighs what it deals"


def test_a_users_cost_is_that_of_its_matrix_products(example):
    """Counted by hand for one layer: QKV and output 8 d^2 per token, the MLP 16 d^2, the scores' two products 4 d per pair."""
    sizes = example["Sizes"](dim=8, layers=1, items=10)
    (cost,) = example["flops"](torch.tensor([3]), sizes).tolist()
    assert cost == 3 * (8 + 16) * 8**2 + 3 * 2 * 8 * 10 + 6 * 4 * 8


def test_the_first_round_is_not_counted(example):
    runs = [dict(way=way, round=r, steps_ms=[100.0 if r == 0 else t]) for r in (0, 1, 2) for way, t in
            (("as they come", 6.0), ("zigzag", 4.0), ("longest first", 3.0))]  # fmt: skip
    assert example["summary"](runs)["speedup"] == {"zigzag": 1.5, "longest first": 2.0}
    assert example["summary"](runs[:3])["step_ms"]["zigzag"] == 100.0, "of one round that one counts"


def test_a_history_depends_on_its_step_and_user_only(example):
    sizes = example["Sizes"]()
    one = example["history"](3, 7, 20, sizes)
    assert torch.equal(one, example["history"](3, 7, 20, sizes)) and len(one) == 21
    assert not torch.equal(one, example["history"](3, 8, 20, sizes))


def test_the_model_learns(example):
    sizes = example["Sizes"](items=16, users=24, longest=64, layers=1)
    losses, seconds, _ = example["train"]("zigzag", sizes, 40, torch.device("cpu"))
    assert len(losses) == len(seconds) == 40
    assert losses[-1] < 0.8 * losses[0]


def test_the_loss_falls_from_the_first_steps_of_a_wide_model(example):
    sizes = example["Sizes"](dim=128, heads=2, items=512, users=12, longest=64, layers=2)
    losses, _, _ = example["train"]("longest first", sizes, 8, torch.device("cpu"))
    assert max(losses) < losses[0] + 0.05 and losses[-1] < losses[0] - 0.1
