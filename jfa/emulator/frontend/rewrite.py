"""Rewrite a kernel's Python source into code that runs and behaves as Triton's code generator treats the AST.

The kernel keeps its file and line numbers. What changes:

* an assigned Python number becomes a Scalar (`x = 0` is an i32), unless annotated `tl.constexpr`;
* `if` and `while` call `__jfa_test`, `and`/`or`/`not`/`is` follow Triton (no short circuit on run-time values);
* loops record their variables' types, and a variable that changes its type is refused as the compiler refuses it;
* `with tlx.async_task(…)` becomes a function of its own that starts with a private copy of the names it assigns;
* a construct that the compiler refuses (break, nested def, try …) raises an error at its line.
"""

import ast
import copy
import linecache
import re
import textwrap
from collections import Counter

import triton.language as tl

from ..locations import MARK
from . import branches

REFUSED = (
    ast.Break, ast.Continue, ast.Try, ast.Raise, ast.Delete, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.ClassDef,
    ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Match,
)  # fmt: skip
REFUSED_EXPRESSIONS = (
    ast.Lambda, ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.Set, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr,
)  # fmt: skip
_TYPE_NAMES = frozenset(name for name, value in vars(tl).items() if isinstance(value, tl.dtype))
_RETURN_IN_A_LOOP = "Cannot have `return` statements inside `while` or `for` statements in triton."
_RETURN_IN_A_TASK = "an async_task has no `return`: its code ends with its block, so put the rest of it under an `if`"
_NOT_A_TASK = (
    "Statements inside async_tasks() must be `with tlx.async_task(...)` blocks or constexpr if-guards around them: "
    "move this one before the region or into a task"
)
_RETURNS = "__jfa_returns"  # the common type of what a function returns
_LANGUAGES = ("tl", "tlx", "triton")  # names of modules, so no field of a config
_NAMED_CALLS = re.compile(r"alloc|storage_alias|create_context|make_tensor_descriptor")


class Features:
    """Features of the installed Triton's compiler that other versions lack."""

    def __init__(self):
        from triton.compiler.code_generator import CodeGenerator

        self.walrus = hasattr(CodeGenerator, "visit_NamedExpr")
        self.chained_comparisons = hasattr(CodeGenerator, "_apply_boolean_values")


class Source:
    """The text of a jit function: dedented source from `def` on, and its position in its file."""

    def __init__(self, python, text, filename, first_line):
        self.python, self.text, self.filename, self.first_line = python, text, filename, first_line

    @classmethod
    def of(cls, jit, python):
        """Make it from a JITFunction (which keeps its source) or a plain function."""
        lines, start = getattr(jit, "raw_src", None), getattr(jit, "starting_line_number", None)
        if lines is None:
            import inspect

            lines, start = inspect.getsourcelines(python)
        text = getattr(jit, "_src", None)
        lines = list(lines)
        skip = next(i for i, line in enumerate(lines) if re.match(r"\s*def\s+\w+\s*\(", line))
        if text is None:
            text = textwrap.dedent("".join(lines[skip:]))
        return cls(python, text, python.__code__.co_filename, start + skip)


def _call(name, *args, at):
    node = ast.Call(ast.Name(name, ast.Load()), list(args), [])
    return _located(node, at)


def _located(node, at):
    ast.copy_location(node, at)
    for child in ast.walk(node):
        if "lineno" in child._attributes and not hasattr(child, "lineno"):
            ast.copy_location(child, at)
    return node


def _is_call_of(node, name):
    """Return whether `node` is a call of something named `name` (tlx.name(…) or name(…))."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return getattr(function, "attr", getattr(function, "id", None)) == name


def _is_task(node):
    return isinstance(node, ast.With) and _is_call_of(node.items[0].context_expr, "async_task")


def _nesting(target):
    """Return what an assignment unpacks to: None for a name, a tuple of these for a tuple."""
    return tuple(map(_nesting, target.elts)) if isinstance(target, ast.Tuple) else None


def _is_constexpr(annotation):
    return annotation is not None and ast.unparse(annotation).split(".")[-1].strip("\"'") == "constexpr"


def _assigned(statements):
    """Return names that a statement list binds, without those of nested tasks."""
    names = set()

    class Finder(ast.NodeVisitor):
        def visit_Name(self, node):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)

        def visit_With(self, node):
            if not _is_task(node):
                self.generic_visit(node)

        def visit_ListComp(self, node):
            pass

    for statement in statements:
        Finder().visit(statement)
    return {n for n in names if not n.startswith("__jfa")}


def _annotated(statements):
    """Return names that a statement list makes constants: annotated as tl.constexpr, or variables of unrolled loops."""
    names = set()
    for node in (n for s in statements for n in ast.walk(s)):
        if isinstance(node, ast.AnnAssign):
            constant = _is_constexpr(node.annotation)
        else:
            constant = isinstance(node, ast.For) and _is_call_of(node.iter, "static_range")
        if constant and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _copied(statements):
    """Name -> what it ends as, for names that a statement list makes another name for a value: `a = b`."""
    found = {}
    for s in statements:
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and isinstance(s.value, ast.Name):
            found[s.targets[0].id] = s.value.id
    return found


def _read(node):
    """Return how often each name is read in a tree."""
    changed = (n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name))
    read = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return Counter(n.id for n in (*changed, *read))


def _read_outside_loops(function):
    """Return variables of `for` loops that a function reads in other places than such a loop's body."""
    inside, total, targets = Counter(), _read(function), set()

    def visit(node, loops):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id not in loops:
            name = node.target.id
            targets.add(name)
            loops = loops | {name}
            inside[name] += sum(_read(statement)[name] for statement in node.body)
        for child in ast.iter_child_nodes(node):
            visit(child, loops)

    visit(function, frozenset())
    return {name for name in targets if total[name] > inside[name]}


def _raw_arguments(call):
    """Return [(place, whether within a tuple, expression, name of its object or None, path)] of what may be plain in a call.

    place: position or keyword. A number, text or tuple that is read off an object, as cfg.stages, cfg.inner.stages or
    cfg.shape[0], and the right operand of tuples that are joined (no object): to the compiler those are no constexprs.
    """
    found = []
    for place, argument in [*enumerate(call.args), *((k.arg, k.value) for k in call.keywords)]:
        nested = isinstance(argument, ast.Tuple | ast.List)
        for value in argument.elts if nested else [argument]:
            owner, path = _chain(value)
            if (
                owner is not None
                and owner not in _LANGUAGES
                and (nested or any(isinstance(step, str) for step in path))
            ):
                found.append((place, nested, value, owner, path))
        while isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Add):
            if isinstance(argument.right, ast.Tuple | ast.List):
                found.append((place, True, argument.right, None, None))
            argument = argument.left
    return found


def _is_field(node):
    """Return whether an expression is an attribute of something, such as cfg.shape."""
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in _LANGUAGES


def _chain(node):
    """Return (name, path) of an expression such as cfg.inner.shape[0]: where it begins, then attributes and element numbers."""
    path = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            path.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
            path.append(node.slice.value)
        else:
            return None, ()
        node = node.value
    return (node.id, tuple(reversed(path))) if path and isinstance(node, ast.Name) else (None, ())


def _attributes(node):
    """Return ("tl", "math", "exp") of an expression tl.math.exp, () of one of another form."""
    path = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    return (node.id, *reversed(path)) if isinstance(node, ast.Name) else ()


def _forget(names, at):
    """Return statements that unbind those of the names that are bound: what the compiler does not know after a loop or branch."""
    missing = ast.ExceptHandler(ast.Name("NameError", ast.Load()), None, [ast.Pass()])
    return [_located(ast.Try([ast.Delete([ast.Name(n, ast.Del())])], [missing], [], []), at) for n in sorted(names)]


def _refusals(statements):
    """Return (message, line) of unsupported statements directly among these statements, not inside another `if`."""
    found = []
    for statement in statements:
        if isinstance(statement, REFUSED):
            found.append((f"unsupported AST node type: {type(statement).__name__}", statement.lineno))
        for block in ("body", "orelse"):
            if not isinstance(statement, ast.If | ast.FunctionDef) and isinstance(
                getattr(statement, block, None), list
            ):
                found += _refusals(getattr(statement, block))
    return found


def _reads(node):
    """Yield the names that the compiler looks up in a statement or expression whatever is true: outside of `if` and its like."""
    if isinstance(node, ast.Name):
        yield node
    parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.If | ast.IfExp):
        parts = [node.test]
    elif isinstance(node, ast.BoolOp):
        parts = node.values[:1]
    elif isinstance(node, ast.For):
        parts = [node.iter] if _is_call_of(node.iter, "static_range") else [node.iter, *_until_return(node.body)]
    elif isinstance(node, ast.AnnAssign):
        parts = [] if node.value is None else [node.value]
    elif isinstance(node, REFUSED + REFUSED_EXPRESSIONS + (ast.FunctionDef, ast.ListComp, ast.Assert, ast.JoinedStr)):
        parts = []
    for part in parts:
        yield from _reads(part)


def _doubtful(statements, known):
    """Return (names read in these statements where nothing has surely bound them, names surely bound behind them).

    known: names that are bound before. What an unrolled loop reads is left out, for it may have no turn.
    """
    found, known = set(), set(known)
    for statement in _until_return(statements):
        if isinstance(statement, ast.If):
            found |= _names_read(statement.test) - known
            parts = [_doubtful(part, known) for part in (statement.body, statement.orelse)]
            found |= parts[0][0] | parts[1][0]
            known |= parts[0][1] & parts[1][1]
        elif isinstance(statement, ast.For | ast.While) and not _is_call_of(
            getattr(statement, "iter", None), "static_range"
        ):
            target = _assigned([statement.target]) if isinstance(statement, ast.For) else set()
            head = statement.iter if isinstance(statement, ast.For) else statement.test
            found |= _names_read(head) - known | _doubtful(statement.body, known | target)[0]
            known |= target
        elif not isinstance(statement, ast.For | ast.While | ast.With):
            found |= _names_read(statement) - known
            known |= _assigned([statement]) | {
                n.target.id
                for n in ast.walk(statement)
                if isinstance(n, ast.comprehension) and isinstance(n.target, ast.Name)
            }
    return found, known


def _names_read(node):
    """Return the names that the compiler looks up in a statement or expression whatever is true."""
    return set(_lines_of_reads(node))


def _lines_of_reads(node):
    """Return {name: line that reads it first} of those names."""
    changed = [node.target] if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) else []
    read = [n for n in _reads(node) if isinstance(n.ctx, ast.Load)]
    return {n.id: n.lineno for n in reversed(changed + read)}


def _has_returns_of_values(function):
    """Return whether an `if` or a loop of a function returns values, so that the compiler compares and unifies what it returns."""
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
    is_nothing = (n.value is None or isinstance(n.value, ast.Constant) and n.value.value is None for n in returns)
    return any(n not in function.body for n in returns) and not all(is_nothing)


def _until_return(statements):
    """Return the statements that the compiler looks at: those up to a `return` in the same block."""
    ends = next((i for i, s in enumerate(statements) if isinstance(s, ast.Return)), len(statements))
    return statements[: ends + 1]


class Rewriter(ast.NodeTransformer):
    """Transforms one function definition; `base` is the line offset of its source in its file.

    missing: names that mean nothing in a kernel where the function stands.
    """

    def __init__(self, filename, base, features, missing=frozenset()):
        self.filename, self.base, self.features, self.missing = filename, base, features, missing
        self.loops, self.unrolled, self.counter, self.constexprs = 0, 0, 0, set()
        self.tasks = 0  # how many async_task blocks are around this place
        self.branches = []  # (assignments if it is taken, if not) of each `if`
        self.bound = set()  # names of this function's own
        self.defined = set()  # names the compiler knows at this point: what a loop or branch may carry
        self.sure = set()  # those of them that are bound whatever is true
        self.unifies = False  # whether what its `return`s return gets one type
        self.ended = set()  # variables of loops that may be read after their loop

    def _fresh(self, stem):
        self.counter += 1
        return f"__jfa_{stem}{self.counter}"

    def _refuse(self, node, message, helper="__jfa_refuse"):
        call = _call(helper, ast.Constant(message), at=node)
        return _located(ast.Expr(call), node) if isinstance(node, ast.stmt) else call

    # ---- the function itself

    def rewrite(self, function):
        function.decorator_list, function.returns = [], None
        function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        self.defined = {a.arg for a in arguments}
        self.bound = self.defined | {
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        self.sure = set(self.defined)
        self.ended = _read_outside_loops(function)
        self.threads = any(isinstance(n, ast.Attribute) and n.attr == "thread_id" for n in ast.walk(function))
        for argument in arguments:
            if _is_constexpr(argument.annotation):
                self.constexprs.add(argument.arg)
            argument.annotation = None
        unknown = self._unknown(function.body)
        self.unifies = _has_returns_of_values(function)
        tried = self._programs(function.body[0], [function.body], ()) if self.unifies else None
        function.body = self._block(function.body)
        if self.unifies:
            function.body = self._unify_returns(function.body, tried)
        if unknown is not None:  # the compiler refuses it, whether it runs or not
            function.body.insert(
                0, _located(ast.Expr(_call("__jfa_undefined", ast.Constant(unknown.id), at=unknown)), unknown)
            )
        return function

    def _unify_returns(self, body, tried):
        """Find the common type of what a function returns before it runs; where it ends without a `return`, return that, undefined.

        tried: expression for its assignments.
        """
        first, last = body[0], body[-1]
        name = ast.Name(_RETURNS, ast.Store())
        common = _call("__jfa_common_type", tried, _call("locals", at=first), at=first)
        ends = _call("__jfa_returned_nothing", ast.Name(_RETURNS, ast.Load()), at=last)
        return [_located(ast.Assign([name], common), first), *body, _located(ast.Return(ends), last)]

    def visit_Return(self, node):
        if self.loops or self.tasks:
            return self._refuse(node, self._why_no_return())
        node = self.generic_visit(node)
        if self.unifies:
            value = ast.Constant(None) if node.value is None else node.value
            node.value = _call("__jfa_returned", value, ast.Name(_RETURNS, ast.Load()), at=node)
        return node

    def _why_no_return(self):
        return _RETURN_IN_A_LOOP if self.loops else _RETURN_IN_A_TASK

    def _unknown(self, statements):
        """Return the first name among those that the compiler looks up in these statements that means nothing, else None."""
        if not self.missing:
            return None
        reads = (name for statement in _until_return(statements) for name in _reads(statement))
        return next((n for n in reads if isinstance(n.ctx, ast.Load) and n.id in self.missing - self.bound), None)

    def _block(self, statements):
        out = []
        for statement in statements:
            new = self.visit(statement)
            out += new if isinstance(new, list) else [new] if new is not None else []
        return out or [ast.Pass()]

    def _scope(self, statements, keeps):
        """Rewrite a nested block; what it defines is known afterwards only if `keeps` (the compiler unrolls it, or branches)."""
        before, sure = set(self.defined), set(self.sure)
        rewritten = self._block(statements)
        inside, self.defined, self.sure = self.defined, before, sure
        if keeps:
            self.defined = before | inside
        return rewritten

    def visit_FunctionDef(self, node):
        return self._refuse(node, "nested function definition is not supported.")

    def visit(self, node):
        refused = isinstance(node, REFUSED + REFUSED_EXPRESSIONS)
        if refused and not (
            isinstance(node, ast.NamedExpr) and (self.features.walrus or node.target.id.startswith("__jfa"))
        ):
            return self._refuse(node, f"unsupported AST node type: {type(node).__name__}")
        return super().visit(node)

    # ---- assignment

    def visit_Assign(self, node):
        if len(node.targets) != 1:
            return self._refuse(node, "simultaneous assignment to several names is not supported")
        callee = getattr(node.value, "func", None)
        written = node.value
        target, value = node.targets[0], self.visit(copy.copy(written))
        if isinstance(target, ast.List):
            return self._refuse(node, "a list is no target of an assignment: write the names without brackets")
        if any(isinstance(n, ast.Starred) for n in ast.walk(target)):
            return self._refuse(node, "unsupported AST node type: Starred")
        if isinstance(target, ast.Subscript):
            return self._refuse(node, "__setitem__ is not supported in triton", "__jfa_refuse_use")
        if isinstance(target, ast.Attribute):
            target = self.visit(target.value)
            return _located(
                ast.Expr(_call("__jfa_setattr", target, ast.Constant(node.targets[0].attr), value, at=node)), node
            )
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            name = getattr(callee, "attr", getattr(callee, "id", ""))
            if _NAMED_CALLS.search(name):
                value.func = _call("__jfa_named", value.func, ast.Constant(target.id), at=node)
            value = _call("__jfa_assign", value, ast.Constant(target.id), at=node)
        else:
            if _is_field(written):
                value = _call("__jfa_field", value, ast.Constant(ast.unparse(written)), at=node)
            value = _call("__jfa_assign", value, at=node)
        if isinstance(target, ast.Tuple) and _nesting(target) != (None,) * len(getattr(written, "elts", ())):
            value = _call("__jfa_first_values", value, ast.Constant(_nesting(target)), at=node)
        node.value = value
        self.defined |= _assigned([node])
        self.sure |= _assigned([node])
        return node

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        value = self.visit(node.value)
        if not _is_constexpr(node.annotation):
            return self.visit_Assign(_located(ast.Assign([node.target], node.value), node))
        arguments = [_call("__jfa_sequence", value, at=node) if isinstance(node.value, ast.Tuple) else value]
        if (
            node.target.id in self.defined or self.unrolled
        ):  # else it is new: loops and branches forget what they define
            arguments += [ast.Constant(node.target.id), _call("locals", at=node)]
        self.defined |= _assigned([node])
        self.sure |= _assigned([node])
        return _located(ast.Assign([node.target], _call("__jfa_constexpr_local", *arguments, at=node)), node)

    def visit_AugAssign(self, node):
        if not isinstance(node.target, ast.Name):
            return self._refuse(node, "__setitem__ is not supported in triton", "__jfa_refuse_use")
        load = _located(ast.Name(node.target.id, ast.Load()), node)
        return self.visit_Assign(
            _located(ast.Assign([node.target], _located(ast.BinOp(load, node.op, node.value), node)), node)
        )

    # ---- expressions

    def visit_Name(self, node):
        if node.id in self.ended and isinstance(node.ctx, ast.Load):
            return _call("__jfa_read", node, at=node)
        return node

    def visit_BoolOp(self, node):
        helper = "__jfa_and" if isinstance(node.op, ast.And) else "__jfa_or"
        result = self.visit(node.values[0])
        for value in node.values[1:]:
            name = self._fresh("t")
            stored = _located(ast.NamedExpr(ast.Name(name, ast.Store()), result), node)
            goes_on = _call(helper + "_goes_on", stored, at=node)
            joined = _call(helper, ast.Name(name, ast.Load()), self.visit(value), at=node)
            result = _located(ast.IfExp(goes_on, joined, ast.Name(name, ast.Load())), node)
        return result

    def visit_UnaryOp(self, node):
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not | ast.UAdd):
            helper = "__jfa_not" if isinstance(node.op, ast.Not) else "__jfa_positive"
            return _call(helper, operand, at=node)
        node.operand = operand
        return node

    def visit_Compare(self, node):
        if len(node.ops) != 1:
            if not self.features.chained_comparisons:
                return self._refuse(node, "simultaneous multiple comparison is not supported")
            return self.visit(self._pairwise(node))
        left, right, op = self.visit(node.left), self.visit(node.comparators[0]), node.ops[0]
        if isinstance(op, ast.Is):
            return _call("__jfa_is", left, right, at=node)
        if isinstance(op, ast.IsNot):
            return _located(ast.UnaryOp(ast.Not(), _call("__jfa_is", left, right, at=node)), node)
        if isinstance(op, ast.In | ast.NotIn):
            message = f"AST comparison operator '{type(op).__name__}' is not (currently) implemented."
            return self._refuse(node, message, "__jfa_refuse_use")
        left, right = (_call("__jfa_sequence", x, at=node) if isinstance(x, ast.Tuple) else x for x in (left, right))
        node.left, node.comparators = left, [right]
        return node

    def _pairwise(self, node):
        """Return a < b < c as (a < b) and (b < c), each operand evaluated once."""
        pairs, left = [], node.left
        for op, right in zip(node.ops, node.comparators):
            name = self._fresh("t")
            keep = right is not node.comparators[-1]
            operand = _located(ast.NamedExpr(ast.Name(name, ast.Store()), right), node) if keep else right
            pairs.append(_located(ast.Compare(left, [op], [operand]), node))
            left = _located(ast.Name(name, ast.Load()), node)
        return _located(ast.BoolOp(ast.And(), pairs), node)

    def visit_NamedExpr(self, node):
        if not node.target.id.startswith("__jfa"):
            node.value = _call("__jfa_assign", self.visit(node.value), at=node)
            return node
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        if isinstance(node.op, ast.MatMult):
            return self._refuse(
                node, "AST binary operator 'MatMult' is not (currently) implemented.", "__jfa_refuse_use"
            )
        return self.generic_visit(node)

    def visit_IfExp(self, node):
        others = [self._other(n) for n in (node.orelse, node.body)]
        node, name = self.generic_visit(node), self._fresh("t")
        stored = _located(ast.NamedExpr(ast.Name(name, ast.Store()), node.test), node)
        node.test = _call("__jfa_test", stored, at=node)
        chosen = [
            _call("__jfa_chosen", ast.Name(name, ast.Load()), n, o, at=node)
            for n, o in zip((node.body, node.orelse), others)
        ]
        node.body, node.orelse = chosen
        return node

    def _other(self, node):
        """Return a constant, or an expression for (program of what `a if condition else b` would be otherwise, place)."""
        if isinstance(node, ast.Constant):
            return node
        keep = _located(ast.Assign([ast.Name(branches.OTHER, ast.Store())], copy.deepcopy(node)), node)
        programs = self._programs(node, [[keep]], ())
        place = ast.Constant((self.filename, self.base, self._fresh("o")))
        return _located(ast.Tuple([programs, place], ast.Load()), node)

    def visit_Attribute(self, node):
        node = self.generic_visit(node)
        if node.attr in ("value", "name") and isinstance(node.ctx, ast.Load):
            return _call(f"__jfa_{node.attr}", node.value, at=node)
        return node

    def visit_Subscript(self, node):
        if isinstance(node.value, ast.Dict):
            return _call("__jfa_of_dict", self.visit(node.value), self.visit(node.slice), at=node)
        if isinstance(node.slice, ast.Slice) and _is_field(node.value):
            node.value = _call("__jfa_field", node.value, ast.Constant(ast.unparse(node)), at=node)
        return self.generic_visit(node)

    def visit_Tuple(self, node):
        if any(isinstance(element, ast.Starred) for element in node.elts):
            return self._refuse(node, "unsupported AST node type: Starred")
        return self.generic_visit(node)

    def visit_List(self, node):
        node = self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return _call("__jfa_sequence", _located(ast.Tuple(node.elts, ast.Load()), node), at=node)

    def visit_ListComp(self, node):
        if len(node.generators) != 1:
            return self._refuse(node, "nested comprehensions are not supported")
        iterable = node.generators[0].iter
        node = self.generic_visit(node)
        if _is_call_of(iterable, "range"):
            node.generators[0].iter.func = _located(ast.Name("__jfa_static_range", ast.Load()), node)
        return _call("__jfa_sequence", node, at=node)

    def visit_Call(self, node):
        raw, names = _raw_arguments(node), self._global_arguments(node)
        copies = [
            self.visit(copy.deepcopy(value)) if owner is None else _located(ast.Name(owner, ast.Load()), node)
            for _, _, value, owner, _ in raw
        ]
        node = self.generic_visit(node)
        if raw:
            places = tuple((place, nested, ast.unparse(value), path) for place, nested, value, _, path in raw)
            node.func = _call("__jfa_takes", node.func, ast.Constant(places), *copies, at=node)
        if names:
            node.func = _call("__jfa_takes_names", node.func, ast.Name(MARK, ast.Load()), ast.Constant(names), at=node)
        for i, argument in enumerate(node.args):
            if isinstance(argument, ast.Starred):
                node.args[i] = argument
        return node

    def _global_arguments(self, call):
        """Return paths, such as ("tl", "maximum"), of a call's arguments that are no names of this function, types apart."""
        path = _attributes(call.func)
        if not path or path[0] in _LANGUAGES:
            return ()
        found = []
        for argument in (*call.args, *(k.value for k in call.keywords)):
            values = argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]
            found += [p for p in map(_attributes, values) if p and p[0] not in self.bound and p[-1] not in _TYPE_NAMES]
        return tuple(found)

    # ---- control flow

    def visit_If(self, node):
        names = sorted(_assigned(node.body) | _assigned(node.orelse))
        refusals = _refusals(node.body) + _refusals(node.orelse)
        unknown = self._unknown(node.body) or self._unknown(node.orelse)
        refusals += [(repr(NameError(f"{unknown.id} is not defined")), unknown.lineno)] if unknown is not None else []
        returns = [n for s in node.body + node.orelse for n in ast.walk(s) if isinstance(n, ast.Return)]
        if (self.loops or self.tasks) and returns:
            refusals.append((self._why_no_return(), returns[0].lineno))
        one_sided = (_assigned(node.body) ^ _assigned(node.orelse)) | _annotated(node.body + node.orelse)
        lost, condition = one_sided - self.defined, self._fresh("t")
        test = self.visit(node.test)
        if lost:
            test = _located(ast.NamedExpr(ast.Name(condition, ast.Store()), test), node)
        arguments = [test] + [ast.Constant((message, line + self.base)) for message, line in refusals[:1]]
        node.test = _call("__jfa_test", *arguments, at=node)
        same = {n for n, value in _copied(node.body).items() if _copied(node.orelse).get(n) == value}
        watched = [n for n in names if n in self.defined and n not in same]
        both = _assigned(node.body) & _assigned(node.orelse)
        doubts, sure = self._doubts([node], self.sure)
        tried = self._branches(node, doubts) if watched or both or doubts else None
        before = set(self.defined)
        node.body = self._scope(node.body, keeps=True)
        after, self.defined = self.defined, before
        node.orelse = self._scope(node.orelse, keeps=True) if node.orelse else []
        self.defined |= after
        self.sure |= sure
        out = [node] if tried is None else self._watch_types(node, watched, both, tried)
        if lost:
            dynamic = _call("__jfa_at_run_time", ast.Name(condition, ast.Load()), at=node)
            out.append(_located(ast.If(dynamic, _forget(lost, node), []), node))
        return self._reconverge(node, out) if self.threads else out

    def _reconverge(self, node, statements):
        """Let all threads continue after a branch that only some took."""
        memory = self._fresh("lanes")
        before = _located(ast.Assign([ast.Name(memory, ast.Store())], _call("__jfa_lanes", at=node)), node)
        after = _located(ast.Expr(_call("__jfa_converge", ast.Name(memory, ast.Load()), at=node)), node)
        return [before, *statements, after]

    def _doubts(self, statements, known):
        """Return (names whose reads in these statements are to be looked at when they run, names surely bound behind them)."""
        found, known = _doubtful(statements, known)
        return found & (self.bound | self.missing), known

    def _branches(self, node, doubts):
        """Return an expression for the assignments of both branches of an `if`, to be tried out where they are not taken.

        doubts: names that may not be bound where the branches read them.
        """
        return self._programs(node, (node.body, node.orelse), doubts)

    def _programs(self, node, parts, doubts):
        """Return an expression for the assignments of some lists of statements, to be tried out."""
        trial = _Trial(self.filename, self.base, self.features)
        trial.bound, trial.defined, trial.ended = self.bound, set(self.defined), self.ended
        trial.sure = set(self.sure)

        def rewrite(statement):
            new = trial.visit(copy.deepcopy(statement))
            return new if isinstance(new, list) else [] if new is None else [new]

        made = branches.Maker(rewrite, _lines_of_reads, doubts, self.filename, self.base)
        self.branches.append(tuple(made.program(part) for part in parts))
        place = ast.Constant(len(self.branches) - 1)
        return _located(ast.Subscript(ast.Name("__jfa_branches", ast.Load()), place, ast.Load()), node)

    def _watch_types(self, node, names, both, tried):
        """Remember, around a branch, the types of `names`, and compare after it where its condition is a run-time value.

        both: the names that are assigned in both branches. tried: expression for the assignments of both ways.
        """
        memory, before = self._remember(node, names, tried)
        node.test = _call("__jfa_watch", node.test.args[0], ast.Name(memory, ast.Load()), *node.test.args[1:], at=node)
        arguments = (ast.Name(memory, ast.Load()), ast.Tuple([ast.Constant(n) for n in sorted(both)], ast.Load()))
        check = _call("__jfa_check_branch", _call("locals", at=node), *arguments, at=node)
        guarded = ast.If(ast.Name(memory, ast.Load()), [_located(ast.Expr(check), node)], [])
        after = _located(guarded, node)
        return [before, node, after]

    def _remember(self, node, names, *tried):
        """Return (name, statement `name = types of names, or None`): each place looks only the first few times it is reached."""
        memory = self._fresh("m")
        listed = _located(ast.Tuple([ast.Constant(n) for n in names], ast.Load()), node)
        types = _call("__jfa_types", _call("locals", at=node), listed, *tried, at=node)
        looks = _call("__jfa_looks", ast.Constant((self.filename, self.base, self.counter)), at=node)
        value = _located(ast.IfExp(looks, types, ast.Constant(None)), node)
        return memory, _located(ast.Assign([ast.Name(memory, ast.Store())], value), node)

    def visit_For(self, node):
        if node.orelse:
            return self._refuse(node, "`else` after a loop is not supported")
        if not isinstance(node.target, ast.Name):
            return self._refuse(node, "a loop has one loop variable")
        if not isinstance(node.iter, ast.Call):
            message = "Only `range` and `static_range` iterators are currently supported"
            return self._refuse(node, message, "__jfa_refuse_use")
        static, values = _is_call_of(node.iter, "static_range"), self._fresh("r")
        begin = _located(ast.Assign([ast.Name(values, ast.Store())], self.visit(node.iter)), node)
        node.iter = _call("__jfa_iterate", ast.Name(values, ast.Load()), ast.Constant(node.target.id), at=node)
        carried = sorted((_assigned(node.body) - {node.target.id}) & self.defined)
        lost, annotated = _assigned(node.body) - {node.target.id} - self.defined, _annotated(node.body)
        looked = [] if static else self._look_into(node, {node.target.id})
        self.loops += not static
        self.unrolled += static
        node.body = self._scope(node.body, keeps=static)
        self.loops -= not static
        self.unrolled -= static
        self.defined.add(node.target.id)
        if static:
            return [begin, node]
        self.sure.add(node.target.id)
        return [begin, *looked, *self._dynamic_loop(node, carried, lost, annotated), self._leave(node, values)]

    def _look_into(self, node, target=frozenset()):
        """Return statements that look, before a loop, for names that its body reads and nothing has bound: it may have no turn."""
        doubts, _ = self._doubts(node.body, self.sure | target)
        if not doubts:
            return []
        looks = _call("__jfa_looks", ast.Constant((self.filename, self.base, self._fresh("l"))), at=node)
        arguments = self._programs(node, [node.body], doubts), ast.Constant(tuple(target)), _call("locals", at=node)
        return [_located(ast.If(looks, [ast.Expr(_call("__jfa_look_into", *arguments, at=node))], []), node)]

    def _leave(self, node, values):
        """Leave a loop's variable the type it had in there, turns or not, and no value that can be used."""
        is_dynamic = ast.Attribute(ast.Name(values, ast.Load()), "dtype", ast.Load())
        place = (ast.Constant(self.filename), ast.Constant(node.lineno + self.base))
        ended = _call("__jfa_ended", ast.Name(values, ast.Load()), *place, at=node)
        leave = ast.Assign([ast.Name(node.target.id, ast.Store())], ended)
        return _located(ast.If(is_dynamic, [_located(leave, node)], []), node)

    def _dynamic_loop(self, node, carried, lost, annotated):
        """Start each turn without the constants that the last one annotated; after the loop nothing is known that it defined."""
        node.body = _forget(annotated & lost, node) + node.body
        return (self._carry(node, carried) if carried else [node]) + _forget(lost, node)

    def visit_While(self, node):
        if node.orelse:
            return self._refuse(node, "`else` after a loop is not supported")
        carried = sorted(_assigned(node.body) & self.defined)
        lost, annotated = _assigned(node.body) - self.defined, _annotated(node.body)
        looked = self._look_into(node)
        node.test = _call("__jfa_while", self.visit(node.test), *self._counter(node), at=node)
        self.loops += 1
        node.body = self._scope(node.body, keeps=False)
        self.loops -= 1
        return looked + self._dynamic_loop(node, carried, lost, annotated)

    def _counter(self, node):
        """Return (site, name, value) of what a `while` counts: the first name of its condition that its body changes."""
        changed = _assigned(node.body)
        names = (n.id for n in ast.walk(node.test) if isinstance(n, ast.Name) and n.id in changed)
        name = next(names, None)
        if name is None:
            return ()
        return (
            ast.Constant(f"{self.filename}:{node.lineno + self.base}"),
            ast.Constant(name),
            ast.Name(name, ast.Load()),
        )

    def _carry(self, node, names):
        """Compare the types of loop-carried names after the first iteration with those before the loop."""
        memory, before = self._remember(node, names)
        check = _call("__jfa_check_loop", _call("locals", at=node), ast.Name(memory, ast.Load()), at=node)
        forget = ast.Assign([ast.Name(memory, ast.Store())], check)
        last = node.body[-1]
        guarded = ast.If(ast.Name(memory, ast.Load()), [_located(forget, last)], [])
        node.body.append(_located(guarded, last))
        return [before, node]

    def visit_Assert(self, node):
        message = self.visit(node.msg) if node.msg is not None else ast.Constant("")
        return _located(ast.Expr(_call("__jfa_assert", self.visit(node.test), message, at=node)), node)

    def visit_With(self, node):
        if len(node.items) > 1:
            return self._refuse(node, "a `with` of several contexts is not supported: nest them")
        if _is_task(node):
            return self._task(node)
        context = node.items[0].context_expr
        is_region = _is_call_of(context, "async_tasks")
        node.body = self._block(self._region(node.body) if is_region else node.body)
        if is_region:
            node.items[0] = ast.withitem(self.visit(context), None)
            return node
        node.items[0] = ast.withitem(_call("__jfa_context", self.visit(context), at=node), None)
        return node

    # ---- tasks

    def _region(self, statements, guards=True):
        """Return the statements of an async_tasks block: what is no task there is refused if it is reached."""
        checked = []
        for statement in statements:
            if guards and isinstance(statement, ast.If):
                statement.body = self._region(statement.body, False)
                statement.orelse = self._region(statement.orelse, False)
            elif not _is_task(statement):
                statement = self._refuse(statement, _NOT_A_TASK)
            checked.append(statement)
        return checked

    def _task(self, node):
        """Turn `with tlx.async_task(…): body` into a function, and its registration with the enclosing async_tasks."""
        spec = node.items[0].context_expr
        owner = spec.func.value if isinstance(spec.func, ast.Attribute) else None
        private = sorted(_assigned(node.body))
        loops, self.loops = self.loops, 0
        self.tasks += 1
        body = self._scope(node.body, keeps=False)
        self.tasks -= 1
        self.loops = loops
        function = self._fresh("task")
        prologue = [
            _located(ast.parse(f"if {n!r} in __jfa_private: {n} = __jfa_private[{n!r}]").body[0], node) for n in private
        ]
        for statement in prologue:
            for child in ast.walk(statement):
                if "lineno" in child._attributes:
                    ast.copy_location(child, node)
        arguments = ast.arguments([], [ast.arg("__jfa_private")], None, [], [], None, [])
        definition = ast.FunctionDef(function, arguments, prologue + body, [], None)
        if "type_params" in ast.FunctionDef._fields:  # Python 3.12
            definition.type_params = []
        names = _located(ast.Tuple([ast.Constant(n) for n in private], ast.Load()), node)
        register = _call(
            "__jfa_register_task", self.visit(spec), ast.Name(function, ast.Load()), _call("locals", at=node), names,
            ast.Constant(self._task_name(node)), ast.Constant(node.lineno + self.base), at=node,
        )  # fmt: skip
        if owner is not None:
            register.keywords.append(
                ast.keyword("owner", _located(ast.parse(ast.unparse(owner), mode="eval").body, node))
            )
        _located(register, node)
        return [_located(definition, node), _located(ast.Expr(register), node)]

    def _task_name(self, node):
        """Return what a comment next to or above the `with` calls the task; else "default" or its line."""
        line = node.lineno + self.base
        text, above = linecache.getline(self.filename, line), linecache.getline(self.filename, line - 1)
        comment = re.search(r"#\s*(.+)", text) or re.match(r"\s*#\s*(.+)", above)
        if comment:
            words = re.sub(r"[^\w]+", "_", comment.group(1).strip()).strip("_")
            if words:
                return words[:24].strip("_")
        first = node.items[0].context_expr.args[:1]
        return (
            "default"
            if first and isinstance(first[0], ast.Constant) and first[0].value == "default"
            else f"task_L{line}"
        )


class _Trial(Rewriter):
    """Transforms assignments to be tried out (see branches.py): calls with effects raise."""

    def _other(self, node):
        return node if isinstance(node, ast.Constant) else ast.Constant(...)

    def visit_Call(self, node):
        node = super().visit_Call(node)
        node.func = _call("__jfa_without_effects", node.func, at=node)
        return node


def compile_function(source, free_names, missing=frozenset()):
    """Return a code object that, executed, defines `__jfa_make(free names…)`, which returns the rewritten function; and the
    assignments of its branches. missing: see Rewriter."""
    tree = ast.parse(source.text)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef))
    base = source.first_line - 1
    rewriter = Rewriter(source.filename, base, Features(), missing)
    function = rewriter.rewrite(function)
    function.name = (
        "__jfa_function"  # its own name means to it what it means in its module: a method may be called as a function
    )
    arguments = ast.arguments([], [ast.arg(n) for n in free_names], None, [], [], None, [])
    give = ast.Return(ast.Name(function.name, ast.Load()))
    maker = ast.FunctionDef("__jfa_make", arguments, [function, give], [], None)
    if "type_params" in ast.FunctionDef._fields:  # Python 3.12
        maker.type_params = []
    module = ast.Module([_located(maker, function)], [])
    ast.fix_missing_locations(module)
    ast.increment_lineno(module, base)
    return compile(module, source.filename, "exec"), rewriter.branches
