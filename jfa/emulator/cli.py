"""``jfa timeline`` and ``jfa emulator``: look at kernels on the CPU."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path


def timeline(argv: list[str]) -> int:
    """``jfa timeline WHAT``: run a launch under the timed policy; write picture and trace, print the table."""
    from jfa.emulator.rates import CHIPS
    from jfa.emulator.tutorials import RECIPES

    parser = argparse.ArgumentParser(prog="jfa timeline", description=timeline.__doc__)
    parser.add_argument(
        "what", help=f"MODULE:FUNCTION or FILE.py:FUNCTION that launches a kernel, or one of {', '.join(RECIPES)}"
    )
    parser.add_argument(
        "--chip", choices=sorted(CHIPS), help="whose rates; default: H200 for names with hopper, else B200"
    )
    parser.add_argument("--ctas", type=int, default=1, help="CTAs that run at the same time (default 1)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for NAME.png and NAME.json (default: here)")
    args = parser.parse_args(argv)
    try:
        launch = RECIPES.get(args.what) or _find(args.what)
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        print(f"jfa timeline: {args.what}: {error}", file=sys.stderr)
        return 2
    chip = CHIPS[args.chip or ("H200" if "hopper" in args.what else "B200")]
    drawn = record(launch, chip, max_ctas=args.ctas)
    print(drawn.table())
    stem = args.out / args.what.replace(":", ".").replace("/", ".")
    args.out.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("agg")
    picture, trace = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".json")
    drawn.plot().savefig(picture, dpi=120)
    drawn.chrome_trace(trace)
    print(f"picture: {picture}\ntrace (Perfetto, chrome://tracing): {trace}")
    return 0


def record(launch, chip, **options):
    """The :class:`Timeline` of the last kernel that ``launch()`` launches, with ``chip``'s rates (modelled)."""
    import jfa.emulator as emulator
    from jfa.emulator.timeline import Timeline

    with emulator.options(policy="timed", rates=chip, trace=True, **options):
        launch()
    return Timeline.of(emulator.last())


def _find(what: str):
    """The function behind MODULE:FUNCTION or FILE.py:FUNCTION."""
    place, colon, name = what.rpartition(":")
    if not colon:
        raise ValueError(
            "say MODULE:FUNCTION or FILE.py:FUNCTION; the function launches the kernel and takes no arguments"
        )
    if place.endswith(".py"):
        names = runpy.run_path(place)
        if name not in names:
            raise AttributeError(f"{place} has no {name}")
        return names[name]
    return getattr(importlib.import_module(place), name)


def main(argv: list[str]) -> int:
    """``jfa emulator sweep``: break each synchronisation in turn; ``jfa emulator explore``: run every class of schedules."""
    commands = {
        "sweep": "jfa.emulator.sweep:main",
        "explore": "jfa.emulator.explore:main",
        "timeline": "jfa.emulator.cli:timeline",
    }
    if not argv or argv[0] not in commands:
        print(f"usage: jfa emulator {{{','.join(commands)}}} ...", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    module, function = commands[argv[0]].split(":")
    return getattr(importlib.import_module(module), function)(argv[1:])
