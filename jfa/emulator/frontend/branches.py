"""Types that a branch would leave if it were taken: the compiler compares those that both branches of an `if` leave.

The rewriter keeps the assignments of each branch as a `Program`. Where the other branch is taken, the front end runs them on
copies of the names, in a launch of their own: no memory is read or written, nothing waits, nothing is counted. What cannot be
known that way (TLX, atomics, calls with effects) makes the assigned names unknown, and of unknown names nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl

from ..context import Launch, context, running
from ..counting import Active
from . import extension
from .tensor import Tensor, held_dtype, make, scalar

EFFECTS = frozenset(
    """store atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas atomic_load atomic_store
    atomic_poll make_tensor_descriptor load_tensor_descriptor store_tensor_descriptor device_print device_assert static_print
    static_assert debug_barrier inline_asm_elementwise gather scatter thread_id""".split()
)
"""Names of the language's functions and methods that do more than compute, or that cannot be tried out."""


class Unknown(Exception):
    """Raised where a value cannot be had without effects."""


class Program:
    """The assignments of a branch. steps: ("set", names, code), ("if", names, code of the condition, Program, Program),
    ("loop", names, its variable, Program), ("forget", names) or ("read", (), names that may not be bound). returns: whether a
    `return` ends it."""

    def __init__(self) -> None:
        self.steps: list[tuple] = []
        self.returns = False

    @property
    def names(self) -> frozenset[str]:
        """The names that it assigns."""
        return frozenset().union(*(step[1] for step in self.steps))


# ---- made when a kernel is rewritten


class Maker:
    """Makes programs.

    rewrite: returns a statement in the form in which it runs, with each call's function handed to `callable_without_effects`.
    reads: returns the names that a statement or expression reads. doubts: names that may not be bound where they are read.
    """

    def __init__(
        self,
        rewrite: Callable[[ast.stmt], list[ast.stmt]],
        reads: Callable[[ast.AST], Collection[str]],
        doubts: Collection[str],
        filename: str,
        base: int,
    ) -> None:
        self.rewrite, self.reads, self.doubts, self.filename, self.base = rewrite, reads, doubts, filename, base

    def program(self, statements: list[ast.stmt]) -> Program:
        """Return the assignments of some statements, and the reads of doubtful names."""
        made = Program()
        for statement in statements:
            names = _names(statement)
            if names or self._doubtful(statement):
                made.steps += self._steps(statement, names)
            if isinstance(statement, ast.Return):
                made.returns = True
                break
        return made

    def _doubtful(self, statement: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.doubts for n in ast.walk(statement))

    def _steps(self, statement: ast.stmt, names: frozenset[str]) -> Iterator[tuple]:
        compound = isinstance(statement, ast.If | ast.For | ast.While | ast.With)
        head = getattr(statement, "test", getattr(statement, "iter", None)) if compound else statement
        read = [] if head is None else sorted(set(self.reads(head)) & set(self.doubts))
        if read:
            yield "read", frozenset(), read
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield "set", names, _code(self.rewrite(statement), self.filename, self.base)
        elif isinstance(statement, ast.If):
            (test,) = self.rewrite(ast.copy_location(ast.Expr(statement.test), statement))
            keep = ast.copy_location(ast.Assign([ast.Name("__jfa_condition", ast.Store())], test.value), statement)
            code = _code([keep], self.filename, self.base)
            yield "if", names, code, *map(self.program, (statement.body, statement.orelse))
        elif isinstance(statement, ast.For | ast.While) and self._doubtful(statement) and not _is_unrolled(statement):
            target = _names(statement.target) if isinstance(statement, ast.For) else frozenset()
            yield "loop", names, target, self.program(statement.body)
        elif names:
            yield "forget", names


def _is_unrolled(statement: ast.For | ast.While) -> bool:
    function = getattr(getattr(statement, "iter", None), "func", None)
    return getattr(function, "attr", getattr(function, "id", None)) == "static_range"


def _names(statement: ast.stmt) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _code(statements: list[ast.stmt], filename: str, base: int) -> CodeType:
    module = ast.fix_missing_locations(ast.Module(statements, []))
    return compile(ast.increment_lineno(module, base), filename, "exec")


# ---- run where the other branch is taken


def try_out(branch: Program, names: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the names as a branch would leave them, without those that are not known then.

    Raises AssertionError where a nested `if` leaves a name with two types.
    """
    outer, counts = context.launch, Active.counts
    launch = Launch(outer.memory, outer.num_warps, False)
    launch.task, launch.names, launch.fresh = outer.task, outer.names, outer.fresh
    Active.counts = None
    try:
        with running(launch), np.errstate(all="ignore"):
            left = _run(branch, dict(names), namespace)
            left.pop(_UNKNOWN, None)
            return left
    finally:
        Active.counts = counts


def look_into(body: Program, target: Collection[str], names: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Look for names that a loop's body reads and nothing has bound. target: the loop's variable.

    Raises NameError as the compiler does.
    """
    inside = dict(names)
    _forget(inside, target)
    try_out(body, inside, namespace)


def _run(branch: Program, names: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    for kind, assigned, *parts in branch.steps:
        if kind == "read":
            _require(parts[0], names, namespace)
        elif kind == "loop":
            inside = dict(names)
            _forget(inside, parts[0])
            _run(parts[1], inside, namespace)
            _forget(names, parts[0] | (assigned & (names.keys() | _unknown(names))))
        elif kind == "forget" or not _execute(parts[0], names, namespace):
            _forget(names, assigned)
        elif kind == "if":
            condition = names.pop("__jfa_condition")
            if not isinstance(condition, Tensor):
                names = _run(parts[1] if condition else parts[2], names, namespace)
            else:
                then, other = (_run(part, dict(names), namespace) for part in parts[1:])
                compare(then, other, parts[1].names & parts[2].names)
                names = _join(then, other)
        else:
            names[_UNKNOWN] = _unknown(names) - assigned
    return names


_UNKNOWN = "__jfa_unknown"  # key of the names that are bound to what is not known


def _unknown(names: dict[str, Any]) -> frozenset[str]:
    return names.get(_UNKNOWN, frozenset())


def _forget(names: dict[str, Any], which: Collection[str]) -> None:
    """Keep of these names only that they are bound."""
    for name in which:
        names.pop(name, None)
    names[_UNKNOWN] = _unknown(names) | frozenset(which)


def _join(then: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the names that both branches of an `if` leave bound."""
    bound = (then.keys() | _unknown(then)) & (other.keys() | _unknown(other))
    names = {name: value for name, value in then.items() if name in other}
    names[_UNKNOWN] = frozenset(bound - {_UNKNOWN} - (names.keys() - {_UNKNOWN}))
    return names


def _require(read: Collection[str], names: dict[str, Any], namespace: dict[str, Any]) -> None:
    for name in read:
        known = name in names or name in _unknown(names) or name in namespace or name in namespace["__builtins__"]
        if not known:
            raise NameError(f"{name} is not defined", name=name)


def _execute(code: CodeType, names: dict[str, Any], namespace: dict[str, Any]) -> bool:
    try:
        exec(code, namespace, names)
    except Exception:  # whatever it is: then the names are not known, and the launch finds it once it goes there
        return False
    return True


def compare(then: dict[str, Any], other: dict[str, Any], both: Collection[str]) -> None:
    """Require that names that both branches know have one type. both: what both assign, which must be run-time values.

    Raises AssertionError or AttributeError, as the compiler does.
    """
    for name in sorted(then.keys() & other.keys()):
        sides = then[name], other[name]
        for value in sides if name in both else ():
            if value is None or isinstance(value, tl.dtype):
                kind = type(value).__name__
                raise AttributeError(
                    f"{name} is a {kind} after one of two branches: the compiler asks for a run-time value"
                )
        a, b = map(run_time_type, sides)
        if a != b and a is not None and b is not None and not name.startswith("__jfa"):
            raise AssertionError(f"Mismatched type for {name} between then block ({a}) and else block ({b})")


def run_time_type(value: Any) -> Any:
    """Return the type of a run-time value, or of a tuple of them; None for anything else."""
    if isinstance(value, Tensor):
        return str(value.type)
    if isinstance(value, tuple | tl.tuple):
        types = tuple(map(run_time_type, value))
        return None if None in types else types
    return None


def callable_without_effects(function: Any) -> Any:
    """Return a function to call instead, which reads no memory. Raises Unknown if it has effects."""
    if hasattr(function, "uses_tlx"):  # a jit function of the user's
        if function.uses_tlx or any(map(function.names, (*EFFECTS, "load"))):
            raise Unknown
        return function
    name = getattr(function, "__name__", "<lambda>")
    if name == "load" and not hasattr(function, "__self__"):
        return _as_if_loaded
    is_aggregate = getattr(function, "__triton_aggregate__", False)  # whose methods a lambda calls
    if name in EFFECTS or name in ("load", "<lambda>") or is_aggregate or extension.defines(function):
        raise Unknown
    return function


def _as_if_loaded(pointer: Any, *_: Any, **__: Any) -> Any:
    """Return a value of the type that a load would have."""
    if not isinstance(pointer, Tensor):
        raise Unknown
    element = pointer.dtype.element_ty
    shape = pointer.data.shape if type(pointer) is Tensor else ()
    return make(np.zeros(shape, held_dtype(element)), element) if shape else scalar(0, element)
