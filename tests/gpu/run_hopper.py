"""Everything about the Hopper kernels that needs a GPU of sm_90, in one command, without network or pytest.

    python tests/gpu/run_hopper.py check [--first 0] [--cases 1000] [--seconds 500]
                                                               random problems against fp64, repeatability, the op
    compute-sanitizer --report-api-errors no python tests/gpu/run_hopper.py sample --cases 8
    python tests/gpu/run_hopper.py record --out FILE           results of small problems, to compare with the emulator's
    python tests/gpu/run_hopper.py time --out FILE             this project's times on the named shapes
    python tests/gpu/run_hopper.py time --peers jfa:portable fa2 fa4 flex cudnn sdpa --out FILE     in their environment
    python tests/gpu/run_hopper.py merge OUT FILES... [--ours jfa:portable]     one result file, and the table of ratios

The peers need the Triton that belongs to PyTorch, and these kernels the one with TLX; so each side is timed by a
command of its own, on the same machine, one right after the other. Compiling takes most of the time: every shape has a
process of its own, all compile at once, then each times what it compiled while the others wait.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import torch  # noqa: E402

from jfa.bench import peers, runner, shapes  # noqa: E402
from jfa.verify import numbers  # noqa: E402
from jfa.verify.op_checks import CHECKS  # noqa: E402

PROCESSES = 15  # children that compile: one a core
CONTEXT = multiprocessing.get_context("spawn")


# --------------------------------------------------------------------------------------------------------------- check
KINDS = ("random", "large", "wide", "repeat", "op")


def check(first: int, cases: int, seconds: float, kinds: list[str]) -> int:
    """Random cases ``first`` .. ``first + cases`` and the rest of the suite, side by side; the number of failures.

    After ``seconds`` no more is begun, and how far it came is said: a later run takes up there.
    """
    which = {"random": range(first, first + cases, 10), "large": range(40), "wide": range(12)}
    which |= {"repeat": numbers.REPEATED, "op": list(CHECKS)}
    jobs = [(kind, n, time.time() + seconds) for kind in reversed(kinds) for n in which[kind]]
    start, failed, done, left, said = time.time(), 0, {}, {}, 0.0
    with CONTEXT.Pool(PROCESSES) as pool:
        for kind, count, message, n in pool.imap_unordered(_check_one, jobs, 1):
            done[kind] = done.get(kind, 0) + count
            if message == LATE:
                left.setdefault(kind, []).append(n)
            elif message:
                failed += 1
                print(f"FAIL {kind} {n}: {message}", flush=True)
            if time.time() - said > 5:
                said = time.time()
                print(f"{said - start:.0f} s: judged {done}", flush=True)
    print(f"not begun: {left}" if left else "nothing left out", flush=True)
    print(f"check: {done}, {failed} jobs failed, {time.time() - start:.1f} s", flush=True)
    return failed


LATE = "late"


def _check_one(job: tuple) -> tuple[str, int, str, object]:
    """In a child: (kind, problems judged, what is wrong or nothing, which one)."""
    kind, n, deadline = job
    if time.time() > deadline:
        return kind, 0, LATE, n
    try:
        count = RUN[kind](n)
        torch.cuda.synchronize()
        return kind, count, "", n
    except Exception as error:  # noqa: BLE001  one failure must not hide the others
        text = f"{type(error).__name__}: {str(error)[:700]}"
        return kind, 0, text if isinstance(error, AssertionError) else text + traceback.format_exc()[-900:], n


def sample(first: int, cases: int) -> int:
    """A few random cases one after another in this process, for a tool that watches it, such as compute-sanitizer."""
    failed = 0
    for n in range(first, first + cases):
        for kind, run in (("random", numbers.random_problem), ("large", numbers.large)):
            message = ""
            try:
                run(n, "hopper")
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  the tool shall see the others, too
                message = f"{type(error).__name__}: {str(error)[:300]}"
            failed += bool(message)
            print(f"{kind} {n}: {message or 'right'}", flush=True)
    return failed


def _op_test(name: str) -> int:
    try:
        CHECKS[name]("hopper")
    except ValueError as refusal:
        if "bfloat16 or float16" not in str(refusal):  # a check in fp32 asks for what this backend does not do
            raise
        return 0
    return 1


RUN = {
    "random": functools.partial(numbers.random_batch, backend="hopper"),
    "large": functools.partial(numbers.large, backend="hopper"),
    "wide": functools.partial(numbers.wide, backend="hopper"),
    "repeat": functools.partial(numbers.repeat, backend="hopper"),
    "op": _op_test,
}


# -------------------------------------------------------------------------------------------------------------- record
def record(out: Path) -> None:
    """What this GPU makes of the small problems that a test on the CPU gives to the emulator."""
    from kernels.hopper.same_problems import PROBLEMS, results

    torch.save({name: results(case, "cuda", options) for name, (case, options) in PROBLEMS.items()}, out)


# ---------------------------------------------------------------------------------------------------------------- time
OURS = {
    "jfa:hopper": functools.partial(peers.jfa, backend="hopper"),
    "jfa:hopper-deterministic": functools.partial(peers.jfa, backend="hopper", deterministic=True),
    "jfa:portable": functools.partial(peers.jfa, backend="portable"),
}


def _implementations(names: list[str]) -> dict:
    known = OURS | peers.PEERS
    return {name: known[name] for name in names or ("jfa:hopper", "jfa:hopper-deterministic")}


def _prepare(shape: str, names: list[str]) -> str:
    """In a shape's process: makes the tensors and runs everything once, which compiles it."""
    start = time.time()
    _prepare.inputs = inputs = shapes.make_inputs(shapes.SHAPES[shape], "cuda")
    for build in _implementations(names).values():
        try:
            out = build(inputs)()
            torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.grad_out.view_as(out))
            torch.cuda.synchronize()
            out = None
        except Exception:  # noqa: BLE001  what cannot run is said when it is measured
            pass
        torch.cuda.empty_cache()
    return f"{shape} ready after {time.time() - start:.1f} s"


def _measure(names: list[str]) -> list[dict]:
    """In a shape's process, alone on the GPU."""
    return [asdict(runner.measure(_prepare.inputs, name, build)) for name, build in _implementations(names).items()]


def time_shapes(out: Path, chosen: list[str], names: list[str], wait: Path | None) -> None:
    """All shapes: compiled at once, then timed one after the other.

    With ``wait`` this makes the file WAIT.ready when everything is compiled, and times when the file WAIT is there:
    several such commands, each with libraries of its own, compile side by side and time one by one.
    """
    pools = {shape: CONTEXT.Pool(1) for shape in chosen}
    waiting = {shape: pool.apply_async(_prepare, (shape, names)) for shape, pool in pools.items()}
    print("; ".join(answer.get() for answer in waiting.values()), flush=True)
    if wait:
        Path(f"{wait}.ready").touch()
        while not wait.exists():
            time.sleep(0.2)
    device = torch.device("cuda")
    result = runner.as_json([], device, {"ceilings": runner.ceilings()})
    for shape, pool in pools.items():
        result["timings"] += pool.apply(_measure, (names,))
        print(f"{time.strftime('%H:%M:%S')} {shape} timed", flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        pool.terminate()


# --------------------------------------------------------------------------------------------------------------- merge
def merge(out: Path, files: list[Path], ours: str) -> None:
    """Write one file of all sides, in the form of jfa bench, and print the table.

    Of this project's rows only those named ``ours``* are taken.
    """
    parts = [json.loads(f.read_text()) for f in files]
    result = {
        "environment": parts[0]["environment"],
        "ceilings": parts[0]["ceilings"],
        "peer_environments": [p["environment"] for p in parts[1:]],
        "timings": [
            t for p in parts for t in p["timings"] if t["name"].startswith(ours) or not t["name"].startswith("jfa")
        ],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result, ours))


def _limit(shape: shapes.Shape, backward: bool) -> float:
    """Return the milliseconds no version can beat by much on an H200: bytes at 4.2 TB/s or FLOPs at 770 TFLOP/s.

    Both rates were measured there.
    """
    return max(shape.least_bytes(backward) / 4.2e9, shape.flops(backward) / 770e9)


def table(result: dict, name_of_ours: str = "jfa:hopper") -> str:
    """Per shape and pass: this project's time and rate, how far from the limit, the best peer, and the ratio to it."""
    lines = [
        "| shape | pass | ms | TFLOP/s | time / limit | best peer | its ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(t["shape"] for t in result["timings"]):
        mine = [t for t in result["timings"] if t["shape"] == name]
        for which in ("forward", "backward"):
            limit = _limit(shapes.SHAPES[name], which == "backward")
            ours = next((t for t in mine if t["name"] == name_of_ours and t[f"{which}_ms"]), None)
            others = [t for t in mine if not t["name"].startswith("jfa") and t[f"{which}_ms"]]
            best = min(others, key=lambda t: t[f"{which}_ms"], default=None)
            if ours is None:
                continue
            ms = ours[f"{which}_ms"]
            row = [name, which, f"{ms:.3f}", f"{ours[f'{which}_tflops']:.0f}", f"{ms / limit:.2f}"]
            row += (
                [best["name"], f"{best[f'{which}_ms']:.3f}", f"{best[f'{which}_ms'] / ms:.2f}"] if best else ["-"] * 3
            )
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    """See the module's docstring."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["check", "sample", "record", "time", "merge"])
    p.add_argument("files", nargs="*", type=Path, help="merge: the result, then its parts")
    p.add_argument("--ours", default="jfa:hopper", help="merge: this project's backend whose rows go into the file")
    p.add_argument("--out", type=Path, default=Path("hopper.json"))
    p.add_argument("--cases", type=int, default=1000)
    p.add_argument("--first", type=int, default=0, help="check, sample: the first random case")
    p.add_argument("--seconds", type=float, default=1e9, help="check: begin nothing after so many seconds")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="check: parts of the suite")
    p.add_argument(
        "--peers", nargs="*", default=[], help=f"time: of {', '.join([*OURS, *peers.PEERS])}; default: the first two"
    )
    p.add_argument("--wait", type=Path, help="time: compile, make WAIT.ready, and time as soon as there is a file WAIT")
    p.add_argument("--shapes", nargs="*", default=list(shapes.DEFAULT))
    args = p.parse_args()
    if args.what == "check":
        return check(args.first, args.cases, args.seconds, args.kinds)
    if args.what == "sample":
        return sample(args.first, args.cases)
    if args.what == "record":
        record(args.out)
    elif args.what == "time":
        time_shapes(args.out, args.shapes, args.peers, args.wait)
    else:
        merge(args.files[0], args.files[1:], args.ours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
