"""Compile kernels for sm_90, sm_100 and sm_103 without a GPU: registers, spills of each role, memory, instruction counts.

    jfa compile                                               every shipped configuration on every target, as a table
    jfa compile 'blackwell-*' --arch sm_100 --json
    jfa compile FILE.py:kernel --arch sm_90 --args x_ptr=*fp32 n=i32 BLOCK=128
    jfa compile FILE.py:launch --sass .                       the kernels that a function launches, with its types; SASS here
    jfa compile --diff old.py:launch new.py:launch            or names, name@arch, saved JSON files

example:
    jfa compile jfa.known_value:weighted_sum --arch sm_90 --args values=*fp32 total=*fp32 count=i32 BLOCK=16

Argument types are Triton's: fp32, *bf16, i32, tensordesc<bf16[128, 64]>; ":16" behind one promises a multiple of 16, a number in
place of a type means its type. A constexpr takes a number, True, None, bf16, a name defined in FILE.py, or text.
The exit status is 1 if a kernel does not compile, exceeds a limit of the hardware, or spills more than was recorded for it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jfa.compiled import SMEM_CAP, Report, compile_configs, diff, select, shipped_configs, table
from jfa.kernels.compile_config import CompileConfig
from jfa.workbench.targets import Target, TargetError, find, plain, raised

TYPE = re.compile(r"(\*?(fp|bf|i|u)\d+(e\d+\w*)?(:16)?|tensordesc<.+\[[\d, ]+\]>)$")
DTYPES = {"fp16", "bf16", "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "fp8e4nv", "fp8e5"}
DEFAULT_ARCH = 100  # of kernels that do not come with targets


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    p = argparse.ArgumentParser(
        prog="jfa compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("targets", nargs="*", metavar="TARGET", help="names (shell patterns), FILE.py:NAME or MODULE:NAME")
    p.add_argument(
        "--arch", nargs="+", type=_arch, metavar="SM", help="sm_90, sm_100, sm_103 (default: each one's own)"
    )
    p.add_argument("--args", nargs="+", default=[], metavar="NAME=X", help="types and constants of a kernel in a file")
    p.add_argument("--warps", type=int, default=4, help="warps of its default task (default 4)")
    p.add_argument("--ptx", metavar="FOLDER", help="write NAME.sm_ARCH.ptx there")
    p.add_argument("--sass", metavar="FOLDER", help="write NAME.sm_ARCH.sass there, with source lines")
    p.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two: what differs, side by side")
    p.add_argument("--list", action="store_true", help="name the shipped configurations")
    p.add_argument("--json", action="store_true", help="print reports as JSON")
    p.add_argument("--full", action="store_true", help="one block per kernel in place of one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jfa compile``: return 0, 1 where a kernel has a problem, 2 for arguments that name nothing."""
    args = parser().parse_args(argv)
    try:
        if args.diff:
            left, right = (reports_of(side, args) for side in args.diff)
            return _print_diff(left, right)
        if args.list:
            return _print_list(select(shipped_configs(), args.targets))
        own = any(":" in target for target in args.targets)
        reports = [report for target in args.targets for report in reports_of(target, args)]
        reports = reports if args.targets else compile_configs(shipped_configs(), args.arch, _folders(args))
    except (ValueError, OSError) as error:
        print(f"jfa compile: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([r.to_json() for r in reports], indent=1))
    elif args.full or own:
        print("\n\n".join(_text(r) for r in reports))
    else:
        print(table(reports))
    return int(any(r.problems for r in reports))


def _text(report: Report) -> str:
    """Return a report as text; of one that does not compile, what the compiler says."""
    if report.error:
        return f"{report.name} on sm_{report.arch} does not compile:\n{report.error.strip()}"
    return report.to_text()


# ------------------------------------------------------------------------------------------------- what is to be compiled


def reports_of(target: str, args: argparse.Namespace) -> list[Report]:
    """Return the reports of one argument: a saved file's, or those of compiling what it names.

    Raises:
        ValueError: in a sentence, where it names nothing.
    """
    if target.endswith(".json"):
        return _saved(Path(target))
    if ":" in target:
        return compile_configs(configs_of(find(target), args), None, _folders(args))
    name, _, arch = target.partition("@")
    try:
        archs = [_arch(arch)] if arch else args.arch
    except argparse.ArgumentTypeError as error:
        raise TargetError(f"{target}: {error}") from None
    return compile_configs(select(shipped_configs(), [name]), archs, _folders(args))


def configs_of(target: Target, args: argparse.Namespace) -> list[CompileConfig]:
    """Return what to compile of a kernel, by ``--args``, or of a function, by what it launches."""
    archs = tuple(args.arch or (DEFAULT_ARCH,))
    if target.kernel is not None:
        signature, constexprs = arguments_of(target.kernel, args.args, target.module)
        function = plain(target.kernel)
        place = _place(function, target)
        return [CompileConfig(function.__name__, place, signature, constexprs, archs, args.warps, max_spill_bytes=None)]
    if args.args:
        raise TargetError(f"{target.what} is a function: the types come from its launches, leave --args out")
    return launched_configs(target, archs)


def launched_configs(target: Target, archs: tuple[int, ...]) -> list[CompileConfig]:
    """Return a configuration per kernel and signature that a function launches, without running the kernels."""
    from jfa.workbench.recording import launches_of

    try:
        launches = launches_of(target.launch)
    except Exception as error:
        raise TargetError(raised(target.what, error)) from error
    if not launches:
        raise TargetError(f"{target.what} launches no kernel")
    configs = []
    for launch in launches:
        function = plain(launch.kernel)
        options = dict(launch.options)
        warps = options.pop("num_warps", 4)
        name = function.__name__ + (f"-{len(configs)}" if any(c.name == function.__name__ for c in configs) else "")
        place, types = _place(function, target), launch.signature
        found = CompileConfig(
            name, place, types, launch.constexprs, archs, warps, max_spill_bytes=None, options=options
        )
        configs.append(found)
    return configs


def _place(function: Any, target: Target) -> str:
    """Return where the child finds a kernel: its module, or the file for what was read from one.

    Raises:
        TargetError: for a kernel that a function made.
    """
    if "<locals>" in function.__qualname__:
        raise TargetError(f"{function.__name__} is made inside a function; `jfa.compiled.compile_kernel` compiles such")
    file = inspect.getsourcefile(function)
    own = getattr(target.module, "__file__", None)
    return f"{file}:{function.__name__}" if file == own else f"{function.__module__}:{function.__name__}"


def arguments_of(kernel: Any, given: Sequence[str], module: ModuleType | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (types, constants) of a kernel's parameters from texts NAME=X.

    Raises:
        TargetError: naming what is unknown, missing or no type.
    """
    params = {p.name: p for p in _params(kernel)}
    signature, constexprs = {}, {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in params:
            raise TargetError(f"--args {text!r}: {plain(kernel).__name__} takes {', '.join(params)}, as NAME=X")
        if params[name].is_constexpr:
            constexprs[name] = constant(value, module)
        elif value == "None":
            constexprs[name] = None
        else:
            signature[name] = type_of(value)
    missing = [p for n, p in params.items() if n not in signature and n not in constexprs and not _has_default(p)]
    if missing:
        say = " ".join(
            f"{p.name}={'128' if p.is_constexpr else '*fp32' if 'ptr' in p.name else 'i32'}" for p in missing
        )
        raise TargetError(f"{plain(kernel).__name__} needs types or constants: --args {say} (put yours)")
    return signature, constexprs


def _params(kernel: Any) -> list[Any]:
    while not hasattr(kernel, "params"):
        kernel = kernel.fn
    return kernel.params


def _has_default(p: Any) -> bool:
    return p.is_constexpr and p.has_default


def type_of(text: str) -> str:
    """Return a Triton type from its text, or from a number: 1024 is "i32:16".

    Raises:
        TargetError: it is neither.
    """
    if TYPE.match(text):
        return text
    try:
        number = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        number = None
    if isinstance(number, int) and not isinstance(number, bool):
        return "i32:16" if number % 16 == 0 else "i32"
    if isinstance(number, float):
        return "fp32"
    raise TargetError(f"{text!r} is no type: types read fp32, *bf16, i32, *fp32:16, tensordesc<bf16[128, 64]>")


def constant(text: str, module: ModuleType | None) -> Any:
    """Return a constexpr's value from its text: a literal, a name of the module, a dtype, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if hasattr(module, text):
        value = getattr(module, text)
        return getattr(value, "value", value)
    return f"dtype:{text}" if text in DTYPES else text


def _arch(text: str) -> int:
    """Return 90 from "sm_90", "90" or "sm_90a"."""
    digits = re.fullmatch(r"(?:sm_?)?(\d+)a?", text)
    if not digits or int(digits.group(1)) not in SMEM_CAP:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'sm_{arch}' for arch in SMEM_CAP)}")
    return int(digits.group(1))


def _folders(args: argparse.Namespace) -> dict[str, str]:
    return {kind: str(Path(folder).resolve()) for kind in ("ptx", "sass") if (folder := getattr(args, kind))}


# ------------------------------------------------------------------------------------------------------------ comparing


def _saved(path: Path) -> list[Report]:
    try:
        return [Report.from_json(r) for r in json.loads(path.read_text())]
    except FileNotFoundError:
        raise TargetError(f"there is no file {path}") from None
    except (ValueError, TypeError, AttributeError):
        raise TargetError(f"{path} holds no reports: `jfa compile NAME --json > {path.name}` writes some") from None


def _print_diff(left: list[Report], right: list[Report]) -> int:
    """Print pairs by (name, target) where both sides know it, else by target alone; 1 if there is none or a side fails."""
    by_key, by_arch = {r.key: r for r in right}, {r.arch: r for r in right}
    status, pairs = 0, 0
    for report in left:
        other = by_key.get(report.key) or by_arch.get(report.arch)
        if other is None:
            continue
        pairs += 1
        for side in (report, other):
            if side.error:
                print(_text(side), end="\n\n")
                status = 1
        if not (report.error or other.error):
            same = report.key == other.key
            a, b = (replace(r, name=f"{r.name} {w}") if same else r for r, w in ((report, "A"), (other, "B")))
            print(diff(a, b), end="\n\n")
    if not pairs:
        archs = [", ".join(sorted({f"sm_{r.arch}" for r in side})) for side in (left, right)]
        raise TargetError(f"A is for {archs[0]} and B for {archs[1]}: nothing to compare")
    return status


def _print_list(configs: Sequence[CompileConfig]) -> int:
    for c in configs:
        print(f"{c.name:<44} sm_{', sm_'.join(map(str, c.targets))}  {c.kernel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
