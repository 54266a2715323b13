"""Types that a branch would leave if it were taken: the compiler compares those that both branches of an `if` leave.

The rewriter keeps the assignments of each branch as a `Program`. Where the other branch is taken, the front end runs them on
copies of the names, in a launch of their own: no memory is read or written, nothing waits, nothing is counted. What cannot be
known that way (TLX, atomics, calls with effects) makes the assigned names unknown, and of unknown names nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl

from ..context import Launch, context, running
from ..counting import Active
from . import extension, owners
from .tensor import Tensor, held_dtype, make, scalar

EFFECTS = frozenset(
    """store atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas atomic_load atomic_store
    atomic_poll make_tensor_descriptor load_tensor_descriptor store_tensor_descriptor device_print device_assert static_print
    static_assert debug_barrier inline_asm_elementwise gather scatter thread_id""".split()
)
"""Names of the language's functions and methods that do more than compute, or that cannot be tried out."""


OTHER = "__jfa_other"  # what an expression would be that is not evaluated


class Unknown(Exception):
    """Raised where a value cannot be had without effects."""


class Program:
    """The assignments of a branch. returns: whether a `return` ends it.

    steps: ("set", names, code), ("if", names, code of the condition, Program, Program), ("loop", names, its variable, Program),
    ("unrolled", names, code of its values, its variable, Program), ("forget", names), ("return", (), code of the value, line)
    or ("read", (), {name that may not be bound: line}).
    """

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
    reads: returns {name: line} of what a statement or expression reads. doubts: names that may not be bound where they are read.
    """

    def __init__(
        self,
        rewrite: Callable[[ast.stmt], list[ast.stmt]],
        reads: Callable[[ast.AST], dict[str, int]],
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
            if names or self._doubtful(statement) or _has_return(statement):
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
        reads = {} if head is None else self.reads(head)
        read = {name: reads[name] + self.base for name in sorted(reads.keys() & set(self.doubts))}
        if read:
            yield "read", frozenset(), read
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield "set", names, _code(self.rewrite(statement), self.filename, self.base)
        elif isinstance(statement, ast.Return):
            yield "return", names, self._kept(_RETURNED, statement, statement.value), statement.lineno + self.base
        elif isinstance(statement, ast.If):
            code = self._kept(_CONDITION, statement, statement.test)
            yield "if", names, code, *map(self.program, (statement.body, statement.orelse))
        elif isinstance(statement, ast.For) and _is_unrolled(statement) and _has_return(statement):
            code = self._kept(_VALUES, statement, statement.iter)
            yield "unrolled", names, code, _names(statement.target), self.program(statement.body)
        elif isinstance(statement, ast.For | ast.While) and not _is_unrolled(statement):
            target = _names(statement.target) if isinstance(statement, ast.For) else frozenset()
            body = self.program(statement.body) if self._doubtful(statement) else Program()  # no turn changes a type
            yield "loop", names, target, body
        elif names:
            yield "forget", names

    def _kept(self, name: str, statement: ast.stmt, value: ast.expr | None) -> CodeType:
        """Return code that keeps the value of an expression under a name of ours."""
        expression = ast.Expr(ast.Constant(None) if value is None else value)
        (rewritten,) = self.rewrite(ast.fix_missing_locations(ast.copy_location(expression, statement)))
        keep = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], rewritten.value), statement)
        return _code([keep], self.filename, self.base)


_CONDITION, _RETURNED, _VALUES = "__jfa_condition", "__jfa_returned", "__jfa_values"


def _has_return(statement: ast.AST) -> bool:
    return any(isinstance(n, ast.Return) for n in ast.walk(statement))


def _is_unrolled(statement: ast.For | ast.While) -> bool:
    function = getattr(getattr(statement, "iter", None), "func", None)
    return getattr(function, "attr", getattr(function, "id", None)) == "static_range"


def _names(statement: ast.stmt) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _code(statements: list[ast.stmt], filename: str, base: int) -> CodeType:
    module = ast.fix_missing_locations(ast.Module(statements, []))
    return compile(ast.increment_lineno(module, base), filename, "exec")


# ---- run where the other branch is taken


@dataclass
class Names:
    """The names of a kernel while a branch is tried out.

    values: those whose values are known. unknown: those that are bound to what is not known. returned: (value, line) of each
    `return`, where they are wanted.
    """

    values: dict[str, Any]
    unknown: set[str] = field(default_factory=set)
    returned: list[tuple[Any, int]] | None = None

    def copy(self) -> Names:
        return Names(dict(self.values), set(self.unknown), self.returned)

    @property
    def bound(self) -> set[str]:
        return self.values.keys() | self.unknown

    def forget(self, which: Collection[str]) -> None:
        """Keep of these names only that they are bound."""
        for name in which:
            self.values.pop(name, None)
        self.unknown |= set(which)

    def forget_constants(self, which: Collection[str]) -> None:
        """Keep of these names their types, which no turn of a loop changes: of what is no run-time value only that it is bound."""
        self.forget({name for name in which if not isinstance(self.values.get(name), Tensor)})

    def execute(self, code: CodeType, namespace: dict[str, Any]) -> bool:
        """Run some code on the names; whether that worked."""
        try:
            exec(code, namespace, self.values)
        except Exception:  # whatever it is: then the names are not known, and the launch finds it once it goes there
            return False
        return True

    def take(self, other: Names) -> None:
        """Become the same as some other names."""
        self.values, self.unknown = other.values, other.unknown


def try_out(branch: Program, names: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the names as a branch would leave them, without those that are not known then.

    Raises AssertionError where a nested `if` leaves a name with two types.
    """
    return _tried(branch, Names(dict(names)), namespace).values


def returned_by(body: Program, names: dict[str, Any], namespace: dict[str, Any]) -> list[tuple[Any, int]]:
    """Return (value, line) of each `return` of a function; the value is Unknown where it is not known."""
    return _tried(body, Names(dict(names), returned=[]), namespace).returned


def look_into(body: Program, target: Collection[str], names: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Look for names that a loop's body reads and nothing has bound. target: the loop's variable.

    Raises NameError as the compiler does.
    """
    inside = Names(dict(names))
    inside.forget(target)
    _tried(body, inside, namespace)


def _tried(branch: Program, names: Names, namespace: dict[str, Any]) -> Names:
    outer, counts = context.launch, Active.counts
    launch = Launch(outer.memory, outer.num_warps, False)
    launch.task, launch.names, launch.fresh = outer.task, outer.names, outer.fresh
    Active.counts = None
    try:
        with running(launch), np.errstate(all="ignore"):
            _run(branch, names, namespace)
            return names
    finally:
        Active.counts = counts


def _run(branch: Program, names: Names, namespace: dict[str, Any]) -> None:
    for kind, assigned, *parts in branch.steps:
        if kind == "read":
            _require(parts[0], names, namespace)
        elif kind == "return":
            _return(*parts, names, namespace)
        elif kind == "loop":
            _loop(assigned, *parts, names, namespace)
        elif kind == "forget" or not names.execute(parts[0], namespace):
            names.forget(assigned)
        elif kind == "if":
            _branch(*parts[1:], names, namespace)
        elif kind == "unrolled":
            _unrolled(*parts[1:], names, namespace)
        else:
            names.unknown -= assigned


def _return(code: CodeType, line: int, names: Names, namespace: dict[str, Any]) -> None:
    if names.returned is not None:
        known = names.execute(code, namespace)
        names.returned.append((names.values.pop(_RETURNED) if known else Unknown, line))


def _loop(
    assigned: frozenset[str], target: frozenset[str], body: Program, names: Names, namespace: dict[str, Any]
) -> None:
    inside = names.copy()
    inside.forget(target)
    inside.forget_constants(assigned & names.bound)
    _run(body, inside, namespace)
    names.forget(target)
    names.forget_constants(assigned & names.bound)


def _unrolled(target: frozenset[str], body: Program, names: Names, namespace: dict[str, Any]) -> None:
    for value in names.values.pop(_VALUES):
        names.values |= dict.fromkeys(target, value)
        _run(body, names, namespace)


def _branch(then: Program, other: Program, names: Names, namespace: dict[str, Any]) -> None:
    condition = names.values.pop(_CONDITION)
    if not isinstance(condition, Tensor):
        _run(then if condition else other, names, namespace)
        return
    ways = names.copy(), names.copy()
    for part, way in zip((then, other), ways):
        _run(part, way, namespace)
    if names.returned is None:
        compare(*(way.values for way in ways), then.names & other.names)
    names.take(_join(*ways))


def _join(then: Names, other: Names) -> Names:
    """Return the names that both branches of an `if` leave bound."""
    values = {
        n: v for n, v in then.values.items() if n in other.values and run_time_type(v) == run_time_type(other.values[n])
    }
    return Names(values, (then.bound & other.bound) - values.keys())


def _require(read: dict[str, int], names: Names, namespace: dict[str, Any]) -> None:
    for name, line in read.items():
        if not (name in names.bound or name in namespace or name in namespace["__builtins__"]):
            error = NameError(f"{name} is not defined", name=name)
            error.kernel_line = line  # where a report shows it: not where it is tried out
            raise error


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
    return getattr(value, "compiled_type", None)  # of an aggregate


def callable_without_effects(function: Any) -> Any:
    """Return a function to call instead, which reads no memory. Raises Unknown if it has effects."""
    if hasattr(function, "uses_tlx"):  # a jit function of the user's
        if function.uses_tlx or function.names_any(EFFECTS | {"load"}):
            raise Unknown
        return function
    if isinstance(function, owners.Method):
        return owners.Method(callable_without_effects(function.function), function.owner)
    name = getattr(function, "__name__", "<lambda>")
    if name == "load" and not hasattr(function, "__self__"):
        return _as_if_loaded
    names_buffers = getattr(function, "holds", ())  # an aggregate: what it holds learns its name
    if name in EFFECTS or name in ("load", "<lambda>") or names_buffers or extension.defines(function):
        raise Unknown
    return function


def _as_if_loaded(pointer: Any, *_: Any, **__: Any) -> Any:
    """Return a value of the type that a load would have."""
    if not isinstance(pointer, Tensor):
        raise Unknown
    element = pointer.dtype.element_ty
    shape = pointer.data.shape if type(pointer) is Tensor else ()
    return make(np.zeros(shape, held_dtype(element)), element) if shape else scalar(0, element)
