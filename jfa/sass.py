"""Disassemble the machine code of a compiled kernel with source lines, and attribute each spill to a role.

A role is an ``async_task`` block of the kernel. The disassembler names the source line of every instruction with the calls that it
was inlined through, so an instruction belongs to the block in which one of these lines lies.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BEFORE = "before the roles part"
WHOLE = "the kernel"
_PLACE = re.compile(r'(?:File|at) "([^"]+)", line (\d+)')
_LOCAL = re.compile(r"\b(STL|LDL)((?:\.\w+)*) ")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class NoDisassembler(RuntimeError):
    """Raised when Triton ships no nvdisasm and none is on PATH."""


@dataclass(frozen=True)
class Block:
    """One ``async_task`` block.

    Attributes:
        first, last: its lines in the file.
        default: whether it is the default task.
        replicas: number of its replicas; None where the source does not give it as a number.
        comment: the comment after the ``with``, often the role's name.
    """

    first: int
    last: int
    default: bool
    replicas: int | None = 1
    comment: str = ""


def disassemble(cubin: bytes) -> str:
    """Return a kernel's SASS with source lines and inlined calls.

    Raises:
        NoDisassembler: if there is none.
        RuntimeError: with what it says, if it cannot read the code.
    """
    with tempfile.TemporaryDirectory(prefix="jfa-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([_nvdisasm(), "-gi", "-c", str(path)], capture_output=True, text=True)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"nvdisasm: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return done.stdout


def _nvdisasm() -> str:
    import shutil

    import triton

    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    found = str(shipped) if shipped.exists() else shutil.which("nvdisasm")
    if found is None:
        raise NoDisassembler("this Triton ships no nvdisasm, and none is on PATH: SASS and spills by role need one")
    return found


def blocks_of(kernel: Callable) -> list[Block]:
    """Return the ``async_task`` blocks of a kernel's Python function, in the order of the source; none for a plain kernel."""
    lines, start = inspect.getsourcelines(kernel)
    tree = ast.parse(inspect.cleandoc("\n" + "".join(lines)) if lines[0][:1].isspace() else "".join(lines))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and _name(call.func) == "async_task":
            comment = lines[node.lineno - 1].partition("#")[2].strip()
            place = (node.lineno + start - 1, node.end_lineno + start - 1)
            found.append(Block(*place, bool(call.args), _replicas(call), comment if len(comment) <= 24 else ""))
    return sorted(found, key=lambda block: block.first)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _replicas(call: ast.Call) -> int | None:
    """Return how often a task is there: 1 unless ``replicate`` says so, None where it is no literal."""
    for keyword in call.keywords:
        if keyword.arg == "replicate":
            value = getattr(keyword.value, "value", None)
            return value if isinstance(value, int) else None
    return 1


def labels_of(blocks: Sequence[Block], roles: Sequence[str]) -> list[str]:
    """Return each block's name: that of its role, or of all its replicas.

    ``roles`` are the names of the warp groups, the default task's first, then the others in the order of the source.
    """
    rest, labels = list(roles[1:]), []
    for block, count in zip(blocks, _counts(blocks, len(roles))):
        if block.default:
            labels.append(roles[0] if roles else "default")
            continue
        mine, rest = rest[:count], rest[count:]
        labels.append(", ".join(dict.fromkeys(mine)) or f"task at line {block.first}")
    return labels


def names_of(blocks: Sequence[Block], groups: int) -> list[str]:
    """Return a name for each of ``groups`` warp groups: the comments of their blocks, else "default" and "task 1"."""
    default, others = "default", []
    for block, count in zip(blocks, _counts(blocks, groups)):
        if block.default:
            default = block.comment or default
            continue
        first = len(others) + 1
        numbered = [f"{block.comment} {i}" if count > 1 else block.comment for i in range(count)]
        others += numbered if block.comment else [f"task {first + i}" for i in range(count)]
    return [default, *others]


def _counts(blocks: Sequence[Block], groups: int) -> list[int]:
    """Return the warp groups of each block; where the source leaves that open, what the others leave of ``groups``."""
    others = [block for block in blocks if not block.default]
    known = sum(block.replicas or 0 for block in others)
    unknown = max(1, sum(block.replicas is None for block in others))
    return [
        block.replicas if block.replicas is not None else max(1, (groups - 1 - known) // unknown) for block in blocks
    ]


def spills_by_role(sass: str, file: str, blocks: Sequence[Block], labels: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return {role: (bytes stored, bytes loaded)} of one thread's spills, roles without any left out.

    ``file`` is the kernel's source file as the line information names it.
    """
    found: dict[str, list[int]] = {}
    chain: list[tuple[str, int]] = []
    in_places = False
    unplaced: list[tuple[str, int]] = []  # accesses with no role's line before them: the next line may be a role's
    role_of = lambda: _role(chain, file, blocks, labels)

    def count(role: str, accesses: list[tuple[str, int]]) -> None:
        for kind, width in accesses:
            found.setdefault(role, [0, 0])[kind == "LDL"] += width

    for line in sass.splitlines():
        if "//## File" in line:
            chain = (chain if in_places else []) + [(f, int(n)) for f, n in _PLACE.findall(line)]
            in_places = True
            continue
        if in_places:
            count(role_of() or BEFORE, unplaced)
            unplaced, in_places = [], False
        if match := _LOCAL.search(line):
            access = [(match.group(1), _width(match.group(2)))]
            if role := role_of():
                count(role, access)
            else:
                unplaced += access
    count(BEFORE, unplaced)
    if not blocks:
        found = {WHOLE: found[BEFORE]} if found else {}
    return {role: (stores, loads) for role, (stores, loads) in found.items()}


_real = functools.cache(os.path.realpath)


def _role(chain: Sequence[tuple[str, int]], file: str, blocks: Sequence[Block], labels: Sequence[str]) -> str | None:
    """Return the label of the block in which a line of the chain lies."""
    for place, number in chain:
        if _real(place) == _real(file):
            for block, label in zip(blocks, labels):
                if block.first <= number <= block.last:
                    return label
    return None


def _width(suffixes: str) -> int:
    """Return bytes of one access: ".64" is 8; none of the suffixes, 4."""
    return next((_BYTES[s] for s in suffixes.split(".") if s in _BYTES), 4)
