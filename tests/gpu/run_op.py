"""Everything about the op that needs a GPU, in one command: checks, a sweep of tile sizes, the benchmark.

    python tests/gpu/run_op.py check tune bench --out DIR

check runs test_op_gpu.py's functions (no pytest needed). tune compiles every candidate in parallel, then times them one by one
and writes tune.json. bench writes bench.json, as `jfa bench` does. Needs torch with CUDA and Triton; jfa from its source tree.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import torch  # noqa: E402

from jfa.attention import make_problem  # noqa: E402
from jfa.bench import cli, runner, shapes  # noqa: E402
from jfa.kernels.portable import config, launch  # noqa: E402
from jfa.kernels.portable.config import Tile  # noqa: E402

SPLIT = [0, 2, 4, 8]  # workers a multiprocessor that mega-sequences are split for


# --------------------------------------------------------------------------------------------------------------- check
def check(only: str = "", processes: int = 14) -> int:
    """Runs the GPU tests side by side, for compiling takes most of their time; the number of failures."""
    tests = importlib.import_module("test_op_gpu")
    jobs = []
    for name in [n for n in dir(tests) if n.startswith("test_") and only in n]:
        seeds = inspect.signature(getattr(tests, name)).parameters.get("seeds")
        jobs.extend([(name, [seed]) for seed in seeds.default] if seeds else [(name, None)])
    jobs.sort(key=lambda job: job[1] is not None)  # the long ones first
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
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
def candidates() -> list[dict]:
    """Every (shape, pass, tile, extra) to time."""
    forward_long = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3),
                    (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 4), (128, 32, 8, 4)]  # fmt: skip
    forward_32 = [(32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 4, 2), (32, 128, 8, 2), (32, 64, 2, 3), (32, 32, 2, 4)]
    forward_128 = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 32, 4, 3)]
    keys = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3)]
    queries = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
               (128, 32, 8, 3)]  # fmt: skip
    shared_32 = [(32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 1), (32, 128, 8, 2), (32, 32, 4, 2), (32, 64, 8, 2)]
    shared_128 = [(128, 64, 8, 1), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 128, 8, 1)]
    jobs = []

    def add(shape: str, kind: str, tiles, extras=({},)):
        jobs.extend(dict(shape=shape, kind=kind, tile=t, **e) for t in tiles for e in extras)

    for name in ("self", "self-causal", "cross", "self-window", "dense"):
        add(name, "forward", forward_long if name != "dense" else forward_long[:5], [dict(split=0)])
        if name != "dense":
            add(name, "keys", keys)
            add(name, "atomic", keys)
            add(name, "queries", queries)
    add("self-d64", "forward", forward_long, [dict(split=0)])
    for kind, tiles in (("keys", keys), ("atomic", keys), ("queries", queries)):
        add("self-d64", kind, tiles)
    for kind, tiles in (("forward", forward_long[:5]), ("keys", keys[:4]), ("atomic", keys[:4]), ("queries", queries[:4])):
        add("gqa", kind, tiles, [dict(split=0)] if kind == "forward" else [{}])
    add("cross", "forward", [(128, 64, 8, 3), (64, 64, 4, 3)], [dict(split=s) for s in SPLIT[1:]])
    add("pma32", "forward", forward_32, [dict(split=s) for s in SPLIT])
    add("pma128", "forward", forward_128, [dict(split=s) for s in SPLIT])
    add("pma32", "shared", shared_32, [dict(per=p, piece=512) for p in (1, 2, 3)])
    add("pma128", "shared", shared_128, [dict(per=p, piece=512) for p in (1, 2)])
    return jobs


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
        self.delta = torch.empty_like(self.lse)
        launch.delta_pass(self.problem, i.grad_out, None, self.out, self.delta, None)

    def call(self, job: dict):
        """The function to time for a job."""
        p, tile, grad = self.problem, Tile(*job["tile"]), self.inputs.grad_out
        sms = config.processors(p.device)
        if job["kind"] == "forward":
            return lambda: launch.forward(p, *self.qkv, None, tile, job["split"] * sms // p.num_kv_heads)
        if job["kind"] == "keys":
            return lambda: launch.dkdv_pass(p, grad, *self.qkv, self.lse, self.delta, None, None, tile)
        if job["kind"] == "queries":
            return lambda: (launch.dq_pass(p, grad, None, *self.qkv, self.out, self.lse, self.delta, None, tile),)
        if job["kind"] == "atomic":
            return lambda: launch.atomic_backward(p, grad, None, *self.qkv, self.out, self.lse, self.delta, None, tile)
        launch.PIECE = job["piece"]
        workers = job["per"] * sms // p.num_kv_heads
        return lambda: launch.shared_query_backward(p, grad, None, *self.qkv, self.out, self.lse, tile, workers)


def _compile(jobs: list[dict]) -> list[str]:
    """In a child: runs each job once, which leaves its kernel in the cache."""
    errors, benches = [], {}
    for job in jobs:
        try:
            if job["shape"] not in benches:
                benches = {job["shape"]: Bench(job["shape"])}
            benches[job["shape"]].call(job)()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a candidate may not fit
            errors.append(f"{job}: {type(error).__name__}: {str(error)[:120]}")
    return errors


def tune(out: Path, processes: int = 14) -> None:
    """Compiles all candidates in parallel, times each, writes tune.json, prints the best of each shape and pass."""
    jobs = candidates()
    start = time.time()
    by_shape = sorted(jobs, key=lambda j: (j["shape"], j["kind"], j["tile"]))
    size = -(-len(by_shape) // processes)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        errors = pool.map(_compile, [by_shape[i : i + size] for i in range(0, len(by_shape), size)], 1)
    for error in (e for part in errors for e in part):
        print("does not run:", error)
    print(f"{len(jobs)} candidates compiled in {time.time() - start:.1f} s", flush=True)
    results, bench, first = [], None, {}
    for job in sorted(jobs, key=lambda j: j["shape"]):
        if bench is None or bench.inputs.shape.name != job["shape"]:
            bench, first = Bench(job["shape"]), {}
        try:
            call = bench.call(job)
            got = call()
            reference = first.setdefault(job["kind"], got)
            apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(got, reference) if a is not None)
            ms = runner.median_ms(call, torch.device("cuda"), 7, warmup=1)
            results.append(dict(job, ms=ms, apart=apart))
        except Exception as error:  # noqa: BLE001
            results.append(dict(job, error=f"{type(error).__name__}: {str(error)[:120]}"))
    (out / "tune.json").write_text(json.dumps(results))
    groups: dict = {}
    for r in results:
        if "ms" in r:
            groups.setdefault((r["shape"], r["kind"]), []).append(r)
    for (shape, kind), rows in groups.items():
        rows.sort(key=lambda r: r["ms"])
        rest = lambda r: {k: v for k, v in r.items() if k in ("split", "per", "piece")}
        print(shape, kind, " ".join(f"{tuple(r['tile'])}{rest(r) or ''}={r['ms']:.3f}" for r in rows[:4]), flush=True)


def main() -> int:
    """See the module's docstring."""
    p = argparse.ArgumentParser()
    p.add_argument("what", nargs="+", choices=["check", "tune", "bench"])
    p.add_argument("--out", default=".")
    p.add_argument("--only", default="", help="part of the names of the tests to run")
    p.add_argument("--peers", nargs="*", default=["fa2", "sdpa"])
    p.add_argument("--shapes", nargs="*", default=[])
    args = p.parse_args()
    out, failed = Path(args.out), 0
    for what in args.what:
        start = time.time()
        if what == "check":
            failed = check(args.only)
        elif what == "tune":
            tune(out)
        else:
            argv = ["--json", str(out / "bench.json"), "--peers", *args.peers]
            cli.main(argv + (["--shapes", *args.shapes] if args.shapes else []))
        print(f"{what}: {time.time() - start:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
