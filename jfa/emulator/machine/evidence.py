"""Collect the data of an error for programs and figures: which task waits for which, the vector clocks of a race."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Touch, Wait
from ..locations import MARK

if TYPE_CHECKING:
    from .shadow import Access
    from .tasks import Task


def waits(tasks: Sequence[Task]) -> tuple[Wait, ...]:
    """Return the waits of these blocked tasks."""
    return tuple(_wait(task, tasks) for task in tasks)


def _wait(task: Task, tasks: Sequence[Task]) -> Wait:
    place = task.waiting
    came = _came(place)
    due = () if came else tuple(t.label for t in tasks if t is not task and _arrives(t, place)) or _came_near(place)
    return Wait(task.label, getattr(place, "label", "an operation"), task.says_why(), tuple(task.where), came, due)


def _came(place: Any) -> tuple[str, ...]:
    """Return labels of those who arrived at a barrier before, without those who have in the phase in progress (unless all have)."""
    missing = getattr(place, "missing", None)
    if missing is not None:  # the cluster barrier knows whom it waits for
        return tuple(t.label for t in missing())
    sources = tuple(getattr(place, "sources", ()))
    now = {what[-1] if len(what) > 4 else what[1] for what in getattr(place, "arrivers", ())}
    return tuple(label for label in sources if label not in now) or sources


def _came_near(place: Any) -> tuple[str, ...]:
    """Return labels of those who arrived at other barriers of the same array."""
    near = (bars for item in getattr(place.cta, "allocations", ()) if place in (bars := getattr(item, "barriers", ())))
    return tuple(dict.fromkeys(label for bars in near for bar in bars for label in bar.sources))


# ------------------------------------------------------------ whose code arrives
def _arrives(task: Task, place: Any) -> bool:
    """Return whether a function that the suspended task is in arrives at the array of this barrier, as its source says."""
    frame = task.greenlet.gr_frame
    while frame is not None:
        if MARK in frame.f_globals:
            around = _around(frame.f_code.co_filename, frame.f_lineno)
            crosses = around is not None and _crosses(around)
            named = {name for name, value in frame.f_locals.items() if _holds(value, place, crosses)}
            if named and around is not None and named & _arrived(around, frame.f_globals):
                return True
        frame = frame.f_back
    return False


def _holds(value: Any, place: Any, crosses: bool) -> bool:
    """Return whether a kernel's variable is an array of mbarriers with this one, or a view of it; crosses: or of its twin."""
    bars = getattr(getattr(value, "array", None), "barriers", ())
    return any(bar is place or (crosses and _twins(bar, place)) for bar in bars)


def _twins(bar: Any, place: Any) -> bool:
    """Return whether two barriers are the same one of two CTAs of a cluster."""
    cta = getattr(place, "cta", None)
    return cta is not None and bar.name == place.name and bar.cta.cluster is cta.cluster


@functools.lru_cache(maxsize=256)
def _crosses(node: ast.AST) -> bool:
    """Return whether a call below this node completes, or arrives, in another CTA."""
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
    return any(k.arg in ("two_ctas", "remote_cta_rank") for call in calls for k in call.keywords)


@functools.lru_cache(maxsize=256)
def _around(file: str, line: int) -> ast.FunctionDef | ast.With | None:
    """Return the innermost async_task or function around a line of a file; None where the source is not known."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell with a magic
        return None
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.With) and _is_place(node)]
    nodes = [node for node in nodes if _first_line(node) <= line <= (node.end_lineno or 0)]
    return max(nodes, key=lambda node: node.lineno, default=None)


def _first_line(node: ast.FunctionDef | ast.With) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _is_place(node: ast.FunctionDef | ast.With) -> bool:
    """Return whether a node is a function or a task."""
    return isinstance(node, ast.FunctionDef) or any("async_task(" in ast.unparse(i.context_expr) for i in node.items)


def _arrived(node: ast.AST, known: dict[str, Any], depth: int = 4) -> set[str]:
    """Return names that are arguments of TLX calls other than waits below this node, or that its functions hand to such calls."""
    found: set[str] = set()
    for call in (call for call in ast.walk(node) if isinstance(call, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr != "barrier_wait":
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
        elif isinstance(call.func, ast.Name) and depth:
            given = _handed_on(call, known.get(call.func.id), depth)
        else:
            continue
        found |= {name.id for value in given for name in ast.walk(value) if isinstance(name, ast.Name)}
    return found


def _handed_on(call: ast.Call, function: Any, depth: int) -> list[ast.expr]:
    """Return the arguments of a call of a jit function that arrives at them."""
    # emulated already, or as Triton made it
    function = getattr(function, "python", None) or getattr(function, "fn", None)
    code = getattr(function, "__code__", None)
    body = _around(code.co_filename, code.co_firstlineno) if code is not None else None
    if not isinstance(body, ast.FunctionDef):
        return []
    names = [argument.arg for argument in body.args.args]
    arrived = _arrived(body, function.__globals__, depth - 1)
    given = dict(zip(names, call.args)) | {k.arg: k.value for k in call.keywords if k.arg is not None}
    return [value for name, value in given.items() if name in arrived]


# ------------------------------------------------------------ the clocks of a race
def touches(earlier: Access, later: Access) -> tuple[Touch, Touch]:
    """Return the two accesses of a race (shadow.Access), with clocks whose lines have names instead of numbers."""
    names = _lines(earlier.actor)
    for access in (earlier, later):
        if access.component.id not in names:
            label = access.actor.label
            names[access.component.id] = label if label not in names.values() else f"another {label}"
    return _touch(earlier, names), _touch(later, names)


def _touch(access: Access, names: dict[int, str]) -> Touch:
    clock = {name: access.clock.get(number, 0) for number, name in names.items()}
    return Touch(access.actor.label, access.write, access.name, tuple(access.where), names[access.component.id], clock)


def _lines(actor: Any) -> dict[int, str]:
    """Return component -> name for the tasks of the actor's cluster that run or ran at the same time, and for what they drive."""
    names: dict[int, str] = {}
    for cta in getattr(actor, "task", actor).cta.cluster.ctas:
        for task in cta.tasks:
            names[task.component.id] = task.label
            names |= {group.component.id: group.label for group in task.warp_groups}
            if task.pipe is not None:
                names[task.pipe.component.id] = f"tensor core of {task.label}"
    return names
