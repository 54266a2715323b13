"""Compare the length of the kernels' sources at two commits, part by part: what is new apart from what is only written otherwise.

python tools/count_kernel_lines.py 8defbbd            that commit and the working tree
python tools/count_kernel_lines.py 8defbbd HEAD
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jfa.bench.lines import code_lines  # noqa: E402

# The part of a file, or of a function or class at its top level: the first row one of whose words is in its path, or in its name.
# The rest is the attention kernels themselves.
PARTS = {
    "MXFP8": ("mxfp8", "scales", "quantize"),
    "pairs of CTAs": ("backward_2cta", "blackwell/pair", "pair_refused", "launch_pair"),
    "wide heads": ("wide", "hopper/columns", "hopper/late", "launch_pieces", "tails"),
    "block lists": (
        "listed",
        "block_sparse",
        "block_list",
        "walk_lists",
        "transposed_lists",
        "unfit_lists",
        "unfit_blocks",
    ),
    "host time: tapes, packets, sizes": (
        "tape",
        "packet",
        "recorder",
        "common/sizes",
        "driver",
        "launcher",
        "prepared",
    ),
    "what is compiled, modelled, preferred": (
        "variants",
        "examples",
        "example",
        "modelled",
        "preference",
        "compile_config",
    ),
}
REST = "forward, backward, lists, contract"


def part_of(path: str) -> str:
    """Return the part that a file belongs to."""
    name = path.removeprefix("jfa/kernels/").removesuffix(".py")
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), REST)


def sources(commit: str | None) -> dict[str, str]:
    """Return {path: source} of jfa/kernels at a commit; None: in the working tree."""
    if commit is None:
        return {
            str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in (ROOT / "jfa" / "kernels").rglob("*.py")
        }
    paths = _git("ls-tree", "-r", "--name-only", commit, "jfa/kernels").split()
    return {path: _git("show", f"{commit}:{path}") for path in paths if path.endswith(".py")}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def pieces(path: str, source: str) -> list[tuple[str, str]]:
    """Return (part, source) of a file without the definitions that are of another part, and of each of those."""
    lines, own = source.splitlines(keepends=True), part_of(path)
    found, at = [], 0
    rest = ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            part = next(
                (part for part, words in PARTS.items() if any(word in node.name.lower() for word in words)), own
            )
            if own == REST and part != own:
                begin = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                rest += "".join(lines[at:begin])
                found.append((part, "".join(lines[begin : node.end_lineno])))
                at = node.end_lineno
    return [(own, rest + "".join(lines[at:])), *found]


def lengths(commit: str | None) -> tuple[Counter, Counter]:
    """Return {part: lines} and {part: lines of code}, the latter without blank lines, comments and docstrings."""
    lines, code = Counter(), Counter()
    for path, source in sources(commit).items():
        for part, text in pieces(path, source):
            lines[part] += text.count("\n")
            code[part] += code_lines(text)
    return lines, code


def main(arguments: list[str]) -> None:
    """Print the table; ``arguments`` are the commits."""
    before, after = lengths(arguments[0]), lengths(arguments[1] if len(arguments) > 1 else None)
    print(f"{'':40}{'lines':>16}{'lines of code':>18}")
    for part in [REST, *PARTS]:
        print(f"{part:40}" + "".join(f"{b[part]:9,} -> {a[part]:5,}" for b, a in zip(before, after)))
    print(f"{'all':40}" + "".join(f"{b.total():9,} -> {a.total():5,}" for b, a in zip(before, after)))


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
