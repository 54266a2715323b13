"""Everything about the op that needs a GPU, in one command: checks, a sweep of tile sizes, the benchmark.

    python tests/gpu/run_op.py check tune bench --out DIR

check runs test_op_gpu.py's functions (no pytest needed). tune compiles every candidate in parallel, then times them one by one,
writes tune.json and uses the fastest in the bench that follows. bench writes bench.json, as `jfa bench` does. Needs torch with
CUDA and Triton; jfa from its source tree.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import torch  # noqa: E402

from jfa.attention import make_problem  # noqa: E402
from jfa.bench import cli, peers, runner, shapes  # noqa: E402
from jfa.kernels.portable import config, launch  # noqa: E402
from jfa.kernels.portable.config import Tile  # noqa: E402

PROCESSES = 15  # children that compile: one a core


# --------------------------------------------------------------------------------------------------------------- check
def children():
    """A pool of fresh processes, to be ended before anything is timed."""
    return multiprocessing.get_context("spawn").Pool(PROCESSES)


def check(only: str = "") -> int:
    """Runs the GPU tests side by side, for compiling takes most of their time; the number of failures."""
    tests = importlib.import_module("test_op_gpu")
    jobs = []
    for name in [n for n in dir(tests) if n.startswith("test_") and only in n]:
        seeds = inspect.signature(getattr(tests, name)).parameters.get("seeds")
        jobs.extend([(name, [seed]) for seed in seeds.default] if seeds else [(name, None)])
    jobs.sort(key=lambda job: job[1] is not None)  # the long ones first
    with children() as pool:
        results = list(pool.imap_unordered(_check_one, jobs, 1))
    for name in sorted({name for name, *_ in results}):
        mine = [r for r in results if r[0] == name]
        bad = [message for _, message, _ in mine if message]
        seconds = sum(r[2] for r in mine)
        print(f"{'FAIL' if bad else 'ok':5} {name}: {len(mine) - len(bad)} of {len(mine)}, {seconds:.1f} s", flush=True)
        for message in bad[:4]:
            print("      ", message, flush=True)
    return sum(bool(message) for _, message, _ in results)


def _check_one(job: tuple) -> tuple[str, str, float]:
    """In a child: (test, what is wrong or nothing, seconds)."""
    name, seeds = job
    start, message = time.time(), ""
    try:
        getattr(importlib.import_module("test_op_gpu"), name)(*([seeds] if seeds else []))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a failed test must not hide the others
        message = f"{type(error).__name__}: {str(error)[:1000]}"
        if not isinstance(error, AssertionError):
            message += traceback.format_exc()[-1200:]
    return name, message, time.time() - start


# ---------------------------------------------------------------------------------------------------------------- tune
# Row of config.TILES -> the shape and pass that decide it, and tiles (keep, step, warps, stages[, registers]) to try.
ROWS = {
    "forward-short": ("self", "forward", [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)]),
    "forward-long": ("gqa", "forward", [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3)]),
    "forward-shared-64": (
        "pma32",
        "forward",
        [(64, 64, 4, 2), (64, 64, 4, 2, 168), (64, 32, 4, 3, 168), (64, 64, 4, 3), (32, 32, 2, 3), (32, 32, 2, 4),
         (32, 64, 4, 2, 168)],
    ),
    "forward-shared-128": ("pma128", "forward", [(128, 32, 4, 3), (128, 32, 4, 4), (128, 64, 8, 3)]),
    "dkdv": ("self", "keys", [(64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 4), (64, 16, 4, 4)]),
    "dkdv-grouped": ("gqa", "keys", [(128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 8, 3)]),
    "dq-short": ("self-causal", "queries", [(64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 3)]),
    "dq-long": ("dense", "queries", [(128, 64, 8, 3), (64, 64, 4, 2)]),
    "shared-64": ("pma32", "shared", [(32, 64, 4, 2), (32, 64, 4, 2, 168), (32, 32, 4, 3)]),
    "shared-128": ("pma128", "shared", [(128, 64, 8, 3), (128, 64, 8, 4)]),
}  # fmt: skip
EXTRAS = {
    "forward-shared-64": [dict(split=s, resident=r) for s in (0, 8) for r in (0, 2, 3)],
    "forward-shared-128": [dict(split=s, resident=r) for s in (0, 2, 4) for r in (0, 1, 2)],
    "shared-64": [dict(per=p, piece=n) for p, n in ((2, 512), (2, 1024), (2, 256), (3, 512))],
    "shared-128": [dict(per=1, piece=n) for n in (256, 512, 1024)],
}


def candidates() -> list[dict]:
    """Every (row, shape, pass, tile, extra) to time."""
    return [
        dict(row=row, shape=shape, kind=kind, tile=tile, **extra)
        for row, (shape, kind, tiles) in ROWS.items()
        for tile in tiles
        for extra in EXTRAS.get(row, [{}])
    ]


def apply(best: dict[str, dict]) -> None:
    """Puts the fastest candidates into config's table, for the benchmark that follows."""
    for row, job in best.items():
        config.TILES[row] = Tile(*job["tile"])
        if "split" in job:
            config.SPLIT[row], config.RESIDENT[row] = job["split"], job["resident"]
        if "per" in job:
            config.WORKERS[row] = job["per"]


class Bench:
    """One shape's tensors and the passes on them."""

    def __init__(self, name: str, compile_only: bool = False):
        self.inputs = i = shapes.make_inputs(shapes.SHAPES[name], "cuda")
        shape = i.shape
        self.problem = make_problem(
            i.query, i.key, i.value, i.query_offset, i.key_offset, None, shape.head_dim**-0.5, shape.band,
            bool(shape.shared_q), False, i.max_q, i.max_kv,
        )  # fmt: skip
        self.qkv = tuple(x.detach() for x in (i.query, i.key, i.value))
        if compile_only:
            self.out, self.lse = torch.zeros_like(i.grad_out), torch.zeros(shape.heads, i.grad_out.shape[0], device="cuda")
        else:
            self.out, self.lse = launch.forward(self.problem, *self.qkv)
        self.delta = torch.zeros_like(self.lse)
        launch.delta_pass(self.problem, i.grad_out, None, self.out, self.delta)

    def call(self, job: dict):
        """The function to time for a job."""
        p, tile, grad = self.problem, Tile(*job["tile"]), self.inputs.grad_out
        sms = config.processors(p.device)
        if job["kind"] == "forward":
            split, resident = (job.get(n, 0) * sms // p.num_kv_heads for n in ("split", "resident"))
            return lambda: launch.forward(p, *self.qkv, None, tile, split, resident)
        if job["kind"] == "keys":
            return lambda: launch.dkdv_pass(p, grad, *self.qkv, self.lse, self.delta, None, tile)
        if job["kind"] == "queries":
            return lambda: (launch.dq_pass(p, grad, None, *self.qkv, self.out, self.lse, self.delta, None, tile),)
        config.PIECE = job["piece"]
        workers = job["per"] * sms // p.num_kv_heads
        return lambda: launch.shared_query_backward(p, grad, None, *self.qkv, self.out, self.lse, tile, workers)


def _compile(jobs: list[dict]) -> list[str]:
    """In a child: runs each job once, which leaves its kernel in the cache."""
    errors, benches = [], {}
    for job in jobs:
        try:
            if job["shape"] not in benches:
                benches = {job["shape"]: Bench(job["shape"], compile_only=True)}
            benches[job["shape"]].call(job)()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a candidate may not fit
            errors.append(f"{job}: {type(error).__name__}: {str(error)[:120]}")
    return errors


def _compile_shape(job: tuple) -> None:
    """In a child: one forward and backward of a shape with the table's tiles."""
    name, best = job
    apply(best)
    inputs = shapes.make_inputs(shapes.SHAPES[name], "cuda")
    out = peers.jfa(inputs)()
    torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.grad_out)
    torch.cuda.synchronize()


def tune(out: Path) -> dict[str, dict]:
    """Compiles all candidates in parallel, times each, writes tune.json, prints and returns the best of each row."""
    jobs = candidates()
    start = time.time()
    kernels = {(j["row"], j["tile"], j.get("split", 0) > 0, j.get("resident", 0) > 0): j for j in jobs}
    each = sorted(kernels.values(), key=lambda j: j["shape"])
    size = -(-len(each) // PROCESSES)
    with children() as pool:
        errors = pool.map(_compile, [each[i : i + size] for i in range(0, len(each), size)], 1)
    for error in (e for part in errors for e in part):
        print("does not run:", error)
    print(f"{len(jobs)} candidates compiled in {time.time() - start:.1f} s", flush=True)
    results, bench, first = [], None, {}
    for job in sorted(jobs, key=lambda j: j["shape"]):
        if bench is None or bench.inputs.shape.name != job["shape"]:
            bench, first = Bench(job["shape"]), {}
        print(f"{time.time() - start:.1f} s: {job}", flush=True)
        try:
            call = bench.call(job)
            got = call()
            reference = first.setdefault(job["row"], got)
            apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(got, reference) if a is not None)
            ms = runner.median_ms(call, torch.device("cuda"), 7, warmup=1)
            results.append(dict(job, ms=ms, apart=apart))
            print(f"    {ms:.3f} ms", flush=True)
        except Exception as error:  # noqa: BLE001
            results.append(dict(job, error=f"{type(error).__name__}: {str(error)[:120]}"))
    (out / "tune.json").write_text(json.dumps(results))
    best = {}
    for row in ROWS:
        timed = sorted((r for r in results if r["row"] == row and "ms" in r), key=lambda r: r["ms"])
        best[row] = timed[0]
        rest = lambda r: "".join(f" {n}{r[n]}" for n in ("split", "resident", "per", "piece") if n in r)
        print(row, "; ".join(f"{tuple(r['tile'])}{rest(r)} {r['ms']:.3f}" for r in timed[:5]), flush=True)
    return best


def main() -> int:
    """See the module's docstring."""
    p = argparse.ArgumentParser()
    p.add_argument("what", nargs="+", choices=["check", "tune", "bench"])
    p.add_argument("--out", default=".")
    p.add_argument("--only", default="", help="part of the names of the tests to run")
    p.add_argument("--peers", nargs="*", default=["fa2", "sdpa"])
    p.add_argument("--shapes", nargs="*", default=[])
    args = p.parse_args()
    faulthandler.dump_traceback_later(50, repeat=True)  # where it is, if something takes long
    out, failed, best = Path(args.out), 0, {}
    for what in args.what:
        start = time.time()
        if what == "check":
            failed = check(args.only)
        elif what == "tune":
            best = tune(out)
            apply(best)
        else:
            with children() as pool:
                pool.map(_compile_shape, [(name, best) for name in args.shapes or shapes.DEFAULT], 1)
            print(f"shapes compiled in {time.time() - start:.1f} s", flush=True)
            argv = ["--json", str(out / "bench.json"), "--peers", *args.peers]
            cli.main(argv + (["--shapes", *args.shapes] if args.shapes else []))
        print(f"{what}: {time.time() - start:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
