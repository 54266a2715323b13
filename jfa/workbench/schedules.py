"""jfa emulator sweep | explore: test whether a kernel is right under other timings, and whether faults in it would be
found.

    jfa emulator sweep FILE.py:launch         break each synchronization in turn: what nothing finds is superfluous or untested
    jfa emulator explore FILE.py:launch       run every class of schedules of a small launch, up to a bound

example:
    jfa emulator sweep hopper-forward-d64 --lengths 300 --seconds 10
    jfa emulator explore hopper-finish-dq --lengths 9 --seconds 20

A target is FILE.py:FUNCTION or MODULE:FUNCTION, a function without arguments that launches the kernel and returns its output
tensors; or a name of `jfa compile --list`, which is launched on a small problem; or a public tutorial's.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from jfa.emulator.errors import EmulatorError
from jfa.emulator.explore import explore
from jfa.emulator.sweep import sweep
from jfa.workbench.targets import TargetError, launch_of
from jfa.workbench.timeline import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jfa emulator``: return 0; 1 where something is wrong; 2 for arguments that name nothing."""
    args = parser().parse_args(argv)
    try:
        target = launch_of(args.target, args.lengths)
        return args.run(target, args)
    except ValueError as error:
        print(f"jfa emulator {args.command}: {error}", file=sys.stderr)
        return 2
    except EmulatorError as error:
        print(f"jfa emulator {args.command}: the kernel is wrong as it is\n{error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="jfa emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="{sweep,explore}")
    for name, run, example in (
        ("sweep", _sweep, "jfa emulator sweep hopper-forward-d64 --lengths 300 --seconds 10"),
        ("explore", _explore, "jfa emulator explore hopper-finish-dq --lengths 9 --seconds 20"),
    ):
        about = __doc__.splitlines()[{"sweep": 2, "explore": 3}[name]].strip()
        c = commands.add_parser(
            name,
            help=about.partition(":launch")[2].strip(),
            description=f"{about}\n\nexample:\n    {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        c.set_defaults(run=run)
        c.add_argument(
            "target", metavar="TARGET", help="FILE.py:FUNCTION, MODULE:FUNCTION, a shipped or a tutorial's name"
        )
        c.add_argument("--lengths", nargs="+", type=int, metavar="N", help="sequence lengths for a shipped name")
        c.add_argument("--seconds", type=float, help="time limit in seconds; what was left out is reported")
        if name == "sweep":
            c.add_argument("--verbose", action="store_true", help="print every mutant as it is judged")
        else:
            c.add_argument(
                "--executions", type=int, default=20_000, help="largest number of executions (default 20000)"
            )
            c.add_argument("--all", action="store_true", help="go on after the first bad schedule")
            c.add_argument("--ctas", type=int, default=1, help="CTAs resident at the same time (default 1)")
    return p


def _sweep(target, args: argparse.Namespace) -> int:
    progress = (lambda m: print(m, flush=True)) if args.verbose else None
    outputs = lambda: _tensors(target.launch(), target.what)
    found = guarded(target, lambda: sweep(outputs, progress=progress, kernel=target.runs, seconds=args.seconds))
    print(found.table())
    return 0


def _tensors(outputs, what: str):
    """Return what a launch returned, if that is tensors: without them a wrong result could not be told from a right one."""
    import torch

    listed = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    if not listed or not all(isinstance(x, torch.Tensor) for x in listed):
        raise TargetError(f"{what} must return its output tensors, so that a wrong result is seen")
    return listed


def _explore(target, args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bounds = dict(executions=args.executions, seconds=args.seconds, stop=not args.all, max_ctas=args.ctas)
        found = guarded(target, lambda: explore(target.launch, **bounds))
    print(found)
    return 0 if found.clean else 1


if __name__ == "__main__":
    sys.exit(main())
