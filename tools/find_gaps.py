"""Print careless answers, made by machine from the solutions, that a check does not notice.

    python tools/find_gaps.py 10 15.5

Two kinds: a number that the exercise hands over is ignored (its value in one of the cases stands there instead), and what stands
beside a loop is left out when the loop has no turns. A number that is the same in every case is named, too. A side of a
descriptor's box counts as a number, and a number is ignored in each of the learner's functions, one after the other. Not every
line is a gap: a number may not matter, and what is skipped may be nothing. Look at each, and close what is one with a case or a
limit.
"""

from __future__ import annotations

import argparse
import ast
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jfa.course import catalog
from jfa.course.answers import Pristine, from_source
from jfa.course.judge import cases_of, judge
from jfa.course.paths import Course
from jfa.course.spec import Case, Exercise

_PLAIN = (bool, int, float, str)
_SECONDS = 240  # of one exercise; what is left over is said


class _Launched(Exception):  # noqa: N818  carries the arguments of a launch out of an exercise's call
    pass


class _Recorder:
    """Stands for a kernel: its first launch raises what it was given."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            raise _Launched(args, kwargs)

        return launch

    run = __call__ = __getitem__


def given_values(exercise: Exercise, case: Case, names: list[str]) -> dict[str, Any]:
    """Return the plain values that the answer is handed in one case, by parameter; sides of boxes as "a_desc.block_shape[0]"."""
    args, kwargs = case.args, case.kwargs
    if exercise.call is not None:
        try:
            exercise.call(_Recorder(), *copy.deepcopy(args), **copy.deepcopy(kwargs))
            return {}
        except _Launched as seen:
            args, kwargs = seen.args
        except Exception:  # noqa: BLE001  a launch that is made in another way
            return {}
    values = {name: value for name, value in (dict(zip(names, args)) | dict(kwargs)).items() if name in names}
    sides = {
        f"{name}.block_shape[{axis}]": side
        for name, value in values.items()
        for axis, side in enumerate(getattr(value, "block_shape", ()))
    }
    return sides | {name: value for name, value in values.items() if isinstance(value, _PLAIN)}


class _Pinned(ast.NodeTransformer):
    """Puts a value in place of a name, or of a side of a descriptor's box, that is read."""

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_read = node.id == self.name and isinstance(node.ctx, ast.Load)
        return ast.copy_location(ast.Constant(self.value), node) if is_read else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node) == self.name:
            return ast.copy_location(ast.Constant(self.value), node)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return self.generic_visit(node)


def pinned(tree: ast.Module, function: str, name: str, value: Any) -> str:
    """Return the cell with one parameter of a function ignored."""
    tree = copy.deepcopy(tree)
    chosen = _function(tree, function)
    chosen.body = [_Pinned(name, value).visit(statement) for statement in chosen.body]
    return ast.unparse(ast.fix_missing_locations(tree))


def without_empty_turns(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (what, cell): the statements beside each loop run only if the loop has turns."""
    for number, (block, at) in enumerate(_loops(tree)):
        changed = copy.deepcopy(tree)
        body, place = list(_loops(changed))[number]
        loop = body[place]
        if not (isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") == "range"):
            continue
        bounds = loop.iter.args
        low, high = (ast.Constant(0), bounds[0]) if len(bounds) == 1 else bounds[:2]
        test = ast.Compare(copy.deepcopy(low), [ast.Lt()], [copy.deepcopy(high)])
        known = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
        first = max((i + 1 for i in range(place) if known & _stored(body[i])), default=0)
        first = max(first, max((i + 1 for i in range(place) if _stored(body[i])), default=0))
        last = place + 1
        while last < len(body) and not isinstance(body[last], ast.Return):
            last += 1
        if first < place or last > place + 1:
            body[first:last] = [ast.If(test, body[first:last], [])]
            yield (
                f"nothing beside the loop in line {block[at].lineno} without turns",
                ast.unparse(ast.fix_missing_locations(changed)),
            )


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _loops(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield (block, index) of every for loop."""
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield from ((block, i) for i, s in enumerate(block) if isinstance(s, ast.For))


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name][-1]


def answers(exercise: Exercise, solution: str) -> Iterator[tuple[str, str]]:
    """Yield (what is careless, cell)."""
    tree = ast.parse(solution)
    names = _parameters(_function(tree, exercise.name))
    seen: dict[str, list[Any]] = {}
    for case in cases_of(exercise, 0):
        if not case.raises:
            for name, value in given_values(exercise, case, names).items():
                kept = seen.setdefault(name, [])
                kept += [value] if value not in kept else []
    given = exercise.kept.names if exercise.kept else ()
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name in given:
            continue
        read = {ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Name | ast.Subscript)}
        where = "" if function.name == exercise.name else f" in {function.name}"
        for name, values in seen.items():
            if name in read and name.split(".")[0] in _parameters(function):
                for value in values[:3]:
                    only = " (the same in every case)" if len(values) == 1 else ""
                    yield f"{name} is {value!r}{where}, whatever it is{only}", pinned(tree, function.name, name, value)
    yield from without_empty_turns(tree)


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.posonlyargs + function.args.args + function.args.kwonlyargs]


def main() -> None:
    """Print what passes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="chapters (2) or exercises (2.3); all if left out")
    course = Course(Path(__file__).resolve().parent.parent)
    tried = passed = 0
    for exercise in catalog.select(parser.parse_args().what):
        if exercise.kind == "value":
            continue
        pristine = Pristine.load(course, catalog.chapter(exercise.chapter).stem)
        until = time.monotonic() + _SECONDS
        for what, source in answers(exercise, pristine.solution(exercise)):
            if time.monotonic() > until:
                print(f"{exercise.id}  not tried: {what}", flush=True)
                continue
            result = judge(exercise, from_source(source, exercise, pristine), course)
            tried += 1
            passed += result.passed
            if result.passed:
                print(f"{exercise.id}  passes: {what}", flush=True)
    print(f"{tried} answers tried, {passed} passed")


if __name__ == "__main__":
    main()
