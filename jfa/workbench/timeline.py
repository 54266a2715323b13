"""Show when each role of a kernel did what, on the emulator's clock (modelled, not measured): a table, a picture, a
trace.

    jfa timeline FILE.py:launch                               a function without arguments that launches your kernel
    jfa timeline blackwell-forward-d128-full-clc              a name of `jfa compile --list`, on a small problem
    jfa timeline FILE.py:launch --span 2000:6000              only these cycles
    jfa timeline old.py:launch --beside new.py:launch         two runs side by side

example:
    jfa timeline hopper-forward-d64 --lengths 128 --out timelines

NAME.png is the picture, NAME.json a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jfa.emulator.cli import NoSuchKernelError, record
from jfa.emulator.errors import EmulatorError
from jfa.emulator.rates import CHIPS
from jfa.workbench.targets import Target, TargetError, launch_of, raised


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="jfa timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", metavar="TARGET", help="FILE.py:FUNCTION, MODULE:FUNCTION, a shipped or a tutorial's name")
    p.add_argument("--beside", metavar="TARGET", help="a second run, to compare")
    p.add_argument("--span", type=_span, metavar="FROM:TO", help="cycles to show (default: all)")
    p.add_argument(
        "--kernel", default="", metavar="NAME", help="of several kernels that are launched (default: the last)"
    )
    p.add_argument("--lengths", nargs="+", type=int, metavar="N", help="sequence lengths for a shipped name")
    p.add_argument("--chip", choices=sorted(CHIPS), help="whose rates; default: H200 for names with hopper, else B200")
    p.add_argument("--ctas", type=int, default=1, help="CTAs that run at the same time (default 1)")
    p.add_argument("--out", type=Path, default=Path("."), help="folder for NAME.png and NAME.json (default: here)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jfa timeline``: return 0; 1 where the emulator finds the kernel wrong; 2 for arguments that name nothing."""
    args = parser().parse_args(argv)
    try:
        runs = [run_of(what, args) for what in (args.what, args.beside) if what]
        parts = [run.between(*args.span) if args.span else run for run in runs]
    except (ValueError, NoSuchKernelError) as error:
        print(f"jfa timeline: {error}", file=sys.stderr)
        return 2
    except EmulatorError as error:
        print(error, file=sys.stderr)
        return 1
    print(parts[0].beside(parts[1], (args.what, args.beside)) if args.beside else parts[0].table())
    _write(args, runs)
    return 0


def run_of(what: str, args: argparse.Namespace) -> Any:
    """Run one target on the clock; its Timeline.

    Raises:
        TargetError: it names nothing, or fails otherwise than by what the emulator finds.
        EmulatorError: what the emulator finds.
    """
    target = launch_of(what, args.lengths)
    chip = CHIPS[args.chip or ("H200" if "hopper" in what else "B200")]
    return guarded(target, lambda: record(target.launch, chip, args.kernel or target.runs, max_ctas=args.ctas))


def guarded(target: Target, run: Any) -> Any:
    """Call ``run``; an exception of the user's function becomes a sentence, the emulator's errors stay as they are."""
    try:
        return run()
    except (EmulatorError, NoSuchKernelError, TargetError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, EmulatorError) else None
        raise cause or TargetError(raised(target.what, error)) from error


def _write(args: argparse.Namespace, runs: list[Any]) -> None:
    """Write the picture, both runs below each other, and a trace of each."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    args.out.mkdir(parents=True, exist_ok=True)
    names = file_names([what for what in (args.what, args.beside) if what])
    rows = [1.1 + 0.42 * max(1, len(run.lanes(run.ctas()[0]))) for run in runs]
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(11, sum(rows)), layout="constrained", squeeze=False, height_ratios=rows
    )
    longest = max(run.cycles for run in runs)
    for run, ax, name in zip(runs, axes[:, 0], names):
        run.plot(span=args.span or (run.start, run.start + longest), ax=ax)
        if len(runs) > 1:
            ax.set_title(name)
    picture = args.out / f"{'-beside-'.join(names)}.png"
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    for run, name in zip(runs, names):
        print(f"trace (Perfetto, chrome://tracing): {run.chrome_trace(args.out / f'{name}.json')}")


def file_names(targets: Sequence[str]) -> list[str]:
    """Return a file's name for each target: "FILE.FUNCTION" without the folder, "-2" behind a second of the same name."""
    names: list[str] = []
    for what in targets:
        place, _, function = what.rpartition(":")
        name = f"{Path(place).stem if place.endswith('.py') else place}.{function}" if place else function
        names.append(f"{name}-2" if name in names else name)
    return names


def _span(text: str) -> tuple[float, float]:
    """Return (1000, 5000) from "1000:5000"."""
    first, _, last = text.partition(":")
    try:
        span = float(first), float(last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not read FROM:TO, such as 1000:5000") from None
    if span[0] >= span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return span


if __name__ == "__main__":
    sys.exit(main())
