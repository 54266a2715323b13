"""Compare the length of the kernels' sources at two commits, part by part: what is new apart from what is only written otherwise.

python tools/count_kernel_lines.py 8defbbd            that commit and the working tree
python tools/count_kernel_lines.py 8defbbd HEAD
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jfa.bench.lines import code_lines  # noqa: E402

# A file's part: the first row one of whose words is in its path. The rest is the attention kernels themselves.
PARTS = {
    "MXFP8": ("mxfp8", "scales", "quantize"),
    "pairs of CTAs": ("backward_2cta", "blackwell/pair"),
    "wide heads on Hopper": ("_wide", "hopper/columns", "hopper/late"),
    "block lists": ("listed", "block_sparse", "block_lists"),
    "host time: tapes, packets, sizes": ("tape", "packet", "recorder", "sizes", "driver", "launcher", "prepared"),
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


def lengths(commit: str | None) -> tuple[Counter, Counter]:
    """Return {part: lines} and {part: lines of code}, the latter without blank lines, comments and docstrings."""
    lines, code = Counter(), Counter()
    for path, source in sources(commit).items():
        lines[part_of(path)] += source.count("\n")
        code[part_of(path)] += code_lines(source)
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
