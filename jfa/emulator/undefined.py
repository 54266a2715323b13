"""Undefined values, without Triton: which lanes hold no usable value, and where each of them came from.

In addition to its data a block has *marks*: an array of the block's shape, 0 where a lane is defined, else the number of its
`Origin` (a masked lane of a load without `other`, memory that was never written, a product that was not waited for).
None stands for "all lanes are defined", so a kernel without undefined values pays nothing. Two undefined operands give
the mark with the larger number.

Undefined values may be moved and computed with. `check` reports uses that affect what the kernel does: in a store to
global memory, a condition, an address, a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .context import context
from .errors import PoisonError
from .locations import here, show

MARK = np.dtype(np.uint16)
_MOST = np.iinfo(MARK).max  # origins of a launch that are told apart


@dataclass(frozen=True)
class Origin:
    """The origin of undefined lanes: a key of _KINDS, the kernel's lines, and the buffer's name."""

    kind: str
    where: tuple
    name: str | None = None


# ---- marks


def mark(kind: str, where: tuple, name: str | None = None) -> np.uint16:
    """Return the mark of lanes that come from this origin."""
    launch = context.launch
    launch.has_undefined = True
    numbers = launch.origins
    return MARK.type(numbers.setdefault(Origin(kind, where, name), min(len(numbers) + 1, _MOST)))


def some(marks):
    """Return `marks`, or None where every lane is defined."""
    return marks if marks is not None and np.any(marks) else None


def union(*operands):
    """Return marks of lanes that depend on one lane of each operand, which are broadcast; None where nothing is undefined."""
    marks = None
    for operand in operands:
        if operand is not None:
            marks = operand if marks is None else np.maximum(marks, operand)
    return None if some(marks) is None else np.array(marks, MARK)  # a copy: marks of a pending product change in place


def everywhere(marks, shape=()):
    """Return marks of lanes that may each depend on every marked lane."""
    return None if some(marks) is None else np.full(shape, np.max(marks), MARK)


def reduced(marks, axis, keep=False):
    """Return marks of a reduction over `axis`."""
    return None if marks is None else some(np.maximum.reduce(marks, axis=axis, keepdims=keep))


def selected(condition, marks, a_marks, b_marks):
    """Return marks of `a` where `condition` holds and of `b` elsewhere; `marks`: of the condition."""
    zero = MARK.type(0)
    return union(marks, np.where(condition, zero if a_marks is None else a_marks, zero if b_marks is None else b_marks))


def conjunction(a, a_marks, b, b_marks, absorbing):
    """Return marks of a & b (absorbing: 0) or a | b (absorbing: all ones): a defined operand of that value decides alone."""
    zero = MARK.type(0)
    a_marks, b_marks = (zero if m is None else m for m in (a_marks, b_marks))
    decided = ((a == absorbing) & (a_marks == 0)) | ((b == absorbing) & (b_marks == 0))
    return some(np.where(decided, zero, np.maximum(a_marks, b_marks)))


def product(a_marks, b_marks):
    """Return marks of a @ b: a row is undefined if one of a's lanes in it is, a column if one of b's lanes in it is."""
    rows, columns = reduced(a_marks, -1, True), reduced(b_marks, -2, True)
    if rows is None or columns is None:
        return rows if columns is None else columns
    return np.maximum(rows, columns)


# ---- uses

_STORE = "stores {} value(s)"
USES = {
    "store": _STORE,
    "branch": "branches on {} value(s)",
    "bound": "takes {} value(s) for a loop bound",
    "assert": "asserts {} value(s)",
    "address": "takes {} value(s) for an address",
    "mask": "takes {} value(s) for a mask",
    "offset": "takes {} value(s) for a descriptor's offset, shape or stride",
    "number": "takes {} value(s) for an index, a size, a phase or a predicate",
    "compare": "compares {} value(s) with memory",
}
_KINDS = {
    "masked load": "that were never loaded",
    "masked atomic": "that no atomic returned",
    "unwritten memory": "out of {name}, where nobody had written",
    "unwaited product": "made from a product that was still being computed",
    "no return": "of a function that ended without a `return`",
    "ended loop": "of a loop's variable after its loop",
}


def check(marks, use: str = "store", where: tuple | None = None) -> bool:
    """Report the marked lanes, once per origin and place; whether there are any. `use`: a key of USES."""
    if some(marks) is None:
        return False
    where = here() if where is None else where
    launch = context.launch
    origins = list(launch.origins)
    for number, count in zip(*np.unique(marks, return_counts=True)):
        key = (int(number), where[:1], use)
        if number and key not in launch.reported:
            launch.reported.add(key)
            launch.report(_error(origins[number - 1], int(count), use, where))
    return True


def _error(origin: Origin, count: int, use: str, where: tuple) -> PoisonError:
    summary = f"{USES[use].format(count)} {_KINDS[origin.kind].format(name=origin.name)}"
    at, came = show(where), show(origin.where)
    if origin.kind == "unwritten memory":
        return PoisonError(
            summary, [f"{'stored' if use == 'store' else 'used'} at {at}", f"read at {came}"], where=where
        )
    if origin.kind == "unwaited product":
        return PoisonError(
            summary,
            [f"{'stored' if use == 'store' else 'used'} at {at}", f"the async_dot stands at {came}"],
            cause="async_dot returns at once; on a GPU its registers hold anything until the product is waited for.\n"
            "  Fix: x = tlx.async_dot_wait(0, x) before x is used.",
            where=where,
        )
    if origin.kind == "no return":
        return PoisonError(
            summary,
            [f"at {at}", f"the function ends at {came}"],
            cause="where another `return` of a function returns a value, its end without one returns a register that nobody set.\n"
            "  Fix: write a `return` for that case, too.",
            where=where,
        )
    if origin.kind == "ended loop":
        return PoisonError(
            summary,
            [f"at {at}", f"the loop stands at {came}"],
            cause="the compiler keeps the variable of a `for` in its loop; after the loop its register holds anything.\n"
            "  Fix: compute what is needed from the loop's bounds, or keep it in a name of its own, set before the loop.",
            where=where,
        )
    if origin.kind == "masked atomic":
        lines, fix = [f"they are masked lanes of the atomic at {came}"], "use its result under the atomic's mask only"
    else:
        lines = [f"they are masked lanes of the load without `other` at {came}"]
        fix = "pass other=0.0 (or what suits the computation) to that load"
    fix += ", or mask this store alike." if use == "store" else "."
    return PoisonError(
        summary,
        [f"at {at}", *lines],
        cause=f"such lanes hold whatever the register held: on a GPU, garbage that may look right.\n  Fix: {fix}",
        where=where,
    )
