"""Everything about the op that needs a GPU, in one command: a sweep of tile sizes, the benchmark, checks.

    python tests/gpu/run_op.py bench --sweep --out DIR      times candidates first, uses the fastest, writes sweep.json, bench.json
    python tests/gpu/run_op.py check                        test_op_gpu.py's and test_schedule_gpu.py's functions, side by side
                                                            (no pytest needed)

Compiling takes most of the time. So every shape has a process of its own: all compile at once, then each times what it compiled
while the others wait. Needs torch with CUDA and Triton; jfa runs from its source tree.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import torch  # noqa: E402

from jfa.attention import make_problem  # noqa: E402
from jfa.bench import cli, peers, runner, shapes  # noqa: E402
from jfa.kernels.common.host import num_sms  # noqa: E402
from jfa.kernels.portable import config, launch  # noqa: E402
from jfa.kernels.portable.config import Tile  # noqa: E402
from jfa.verify import list_checks, op_checks  # noqa: E402

TESTS = {"test_op_gpu": op_checks.CHECKS, "test_schedule_gpu": list_checks.CHECKS}  # module -> checks, each by name
PROCESSES = 15  # children that compile: one a core
CONTEXT = multiprocessing.get_context("spawn")


# --------------------------------------------------------------------------------------------------------------- check
def check(only: str = "") -> int:
    """Runs the GPU tests; the number of failures."""
    jobs = []
    for module, checks in TESTS.items():
        tests = importlib.import_module(module)
        for name in [n for n in dir(tests) if n.startswith("test_") and only in n]:
            wanted = inspect.signature(getattr(tests, name)).parameters
            seeds = wanted["seeds"].default if "seeds" in wanted else None
            several = [[check] for check in checks] if seeds is None else [[[seed]] for seed in seeds]
            jobs.extend((module, name, arguments) for arguments in several)
    jobs.sort(key=lambda job: job[1] != "test_the_op")  # the long ones first
    results: list[tuple] = []
    with CONTEXT.Pool(PROCESSES) as pool:
        for result in pool.imap_unordered(_check_one, jobs, 1):
            results.append(result)
            if result[1]:
                print(f"FAIL  {result[0]}: {result[1]}", flush=True)
    for name in sorted({name for name, *_ in results}):
        mine = [r for r in results if r[0] == name]
        good = sum(not message for _, message, _ in mine)
        print(f"{name}: {good} of {len(mine)} ok, {sum(r[2] for r in mine):.1f} s", flush=True)
    return sum(bool(message) for _, message, _ in results)


def _check_one(job: tuple) -> tuple[str, str, float]:
    """In a child: (test, what is wrong or nothing, seconds)."""
    module, name, arguments = job
    start, message = time.time(), ""
    try:
        getattr(importlib.import_module(module), name)(*arguments)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a failed test must not hide the others
        message = f"{type(error).__name__}: {str(error)[:1000]}"
        if not isinstance(error, AssertionError):
            message += traceback.format_exc()[-1200:]
    return name, message, time.time() - start


# --------------------------------------------------------------------------------------------------------------- sweep
# Shape -> [(row of config.TILES that it decides, pass, tiles (keep, step, warps, stages[, registers]), further choices)]
SWEEP = {
    "pma32": [
        ("forward-shared-64", "forward", [(64, 32, 4, 3, 128), (64, 32, 4, 4, 168), (64, 64, 4, 3)], [{}]),
        ("resident-64", "resident", [(32, 64, 4, 2)], [dict(per=2, piece=n) for n in (512, 1024, 1536)]),
    ],
    "pma128": [
        ("forward-shared-128", "forward", [(64, 64, 4, 3), (64, 32, 4, 3, 128), (128, 64, 8, 3)], [{}]),
        ("resident-128", "resident", [(128, 64, 8, 3)], [dict(per=1, piece=n) for n in (1024, 1536, 2048)]),
    ],
    "self": [
        ("forward-short", "forward", [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2, 128)], [{}]),
        ("dkdv", "keys", [(64, 64, 4, 2), (64, 32, 4, 3)], [{}]),
        ("dq-short", "queries", [(64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3, 128)], [{}]),
    ],
    "dense": [
        ("forward-long", "forward", [(64, 64, 4, 3), (128, 64, 8, 2, 128)], [{}]),
        ("dq-long", "queries", [(64, 64, 4, 2), (128, 64, 8, 3)], [{}]),
    ],
}  # fmt: skip


class Bench:
    """One shape's tensors and the passes on them."""

    def __init__(self, name: str):
        self.inputs = i = shapes.make_inputs(shapes.SHAPES[name], "cuda")
        shape = i.shape
        self.problem = make_problem(
            i.query, i.key, i.value, i.query_offset, i.key_offset, None, shape.head_dim**-0.5, shape.band,
            bool(shape.shared_q), False, i.max_q, i.max_kv,
        )  # fmt: skip
        self.qkv = tuple(x.detach() for x in (i.query, i.key, i.value))
        self.out, self.lse = launch.forward(self.problem, *self.qkv)
        self.delta = torch.zeros_like(self.lse)
        launch.delta_pass(self.problem, i.grad_out, None, self.out, self.delta)

    def call(self, job: dict):
        """The function to time for a job."""
        p, tile, grad = self.problem, Tile(*job["tile"]), self.inputs.grad_out
        if job["kind"] == "forward":
            return lambda: launch.forward(p, *self.qkv, None, tile)
        if job["kind"] == "keys":
            return lambda: launch.dkdv_pass(p, grad, *self.qkv, self.lse, self.delta, None, tile)
        if job["kind"] == "queries":
            return lambda: (launch.dq_pass(p, grad, None, *self.qkv, self.out, self.lse, self.delta, None, tile),)
        if job["kind"] == "plan":
            return lambda: launch.forward_plan(p, tile, 0)
        workers = job["per"] * num_sms(p.device, config.EMULATED_SMS) // p.num_kv_heads
        return lambda: launch.resident_backward(
            p, grad, None, *self.qkv, self.out, self.lse, tile, workers, job["piece"]
        )


def candidates(name: str) -> list[dict]:
    """What to time on a shape."""
    rows = SWEEP.get(name, [])
    jobs = [dict(row=r, kind=k, tile=t, **e) for r, k, tiles, extras in rows for t in tiles for e in extras]
    return jobs + ([dict(row="plan", kind="plan", tile=(64, 32, 4, 2))] if jobs else [])


def apply(job: dict) -> None:
    """Puts a candidate into config's tables, for the benchmark that follows in this process."""
    row = job["row"]
    config.TILES[row] = Tile(*job["tile"])
    if "piece" in job:
        config.WORKERS[row], config.PIECE[row] = job["per"], job["piece"]


def _prepare(name: str, sweep: bool, names: list[str]) -> str:
    """In a shape's process: makes the tensors and runs everything once, which compiles it."""
    start = time.time()
    try:
        _prepare.bench = Bench(name)
        for job in candidates(name) if sweep else []:
            _prepare.bench.call(job)()
        for build in [peers.jfa, *(peers.PEERS[peer] for peer in names)]:
            _once(_prepare.bench.inputs, build)
        return f"{name} ready after {time.time() - start:.1f} s"
    except Exception:  # noqa: BLE001  the other shapes go on
        return traceback.format_exc()[-1500:]


def _once(inputs: shapes.Inputs, build) -> None:
    """One forward and backward; what cannot run is found out when it is measured."""
    try:
        out = build(inputs)()
        torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.grad_out.view_as(out))
        torch.cuda.synchronize()
    except (RuntimeError, peers.Unavailable):
        torch.cuda.empty_cache()


def _measure(name: str, sweep: bool, names: list[str]) -> tuple[list[dict], list[dict]]:
    """In a shape's process, alone on the GPU: (candidates with times, the benchmark's timings)."""
    bench, timed = _prepare.bench, []
    for job in candidates(name) if sweep else []:
        timed.append(dict(job, shape=name, ms=runner.median_ms(bench.call(job), torch.device("cuda"), 9, warmup=1)))
    for row in {job["row"] for job in timed} - {"plan"}:
        apply(min((job for job in timed if job["row"] == row), key=lambda job: job["ms"]))
    found = [runner.measure(bench.inputs, "jfa", peers.jfa)]
    found += [runner.measure(bench.inputs, peer, peers.PEERS[peer]) for peer in names]
    return timed, [asdict(t) for t in found]


def bench(out: Path, names: list[str], chosen: list[str], sweep: bool) -> None:
    """All shapes: compiled at once, then timed one after the other."""
    start = time.time()
    pools = {name: CONTEXT.Pool(1) for name in chosen}
    waiting = {name: pool.apply_async(_prepare, (name, sweep, names)) for name, pool in pools.items()}
    for answer in waiting.values():
        print(answer.get(), flush=True)
    device = torch.device("cuda")
    result = runner.as_json([], device, {"ceilings": runner.ceilings()})
    timed: list[dict] = []
    for name, pool in pools.items():
        more, timings = pool.apply(_measure, (name, sweep, names))
        timed += more
        result["timings"] += timings
        for job in sorted(more, key=lambda j: (j["row"], j["ms"])):
            print(name, {k: v for k, v in job.items() if k not in ("kind", "shape")}, flush=True)
        for t in timings:
            print(cli.line(runner.Timing(**t)), flush=True)
        (out / "sweep.json").write_text(json.dumps(timed))
        (out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
        pool.terminate()
    print(cli.table(result))
    print(f"bench: {time.time() - start:.1f} s", flush=True)


def main() -> int:
    """See the module's docstring."""
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=["check", "bench"])
    p.add_argument("--out", default=".")
    p.add_argument("--only", default="", help="check: part of the names of the tests to run")
    p.add_argument("--sweep", action="store_true")
    p.add_argument("--peers", nargs="*", default=["fa2", "sdpa"])
    p.add_argument("--shapes", nargs="*", default=list(shapes.DEFAULT))
    args = p.parse_args()
    if args.what == "check":
        return check(args.only)
    bench(Path(args.out), args.peers, args.shapes, args.sweep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
