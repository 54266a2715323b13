"""Functions that rewritten kernels call: conversions, conditions, boolean operators, loops, type checks."""

import builtins
import enum
import functools
import inspect
import operator
import sys
import types

import numpy as np
import triton.language as tl

from ..context import context
from ..errors import DeviceAssertError
from ..locations import here, show
from ..machine.running import pause
from ..undefined import MARK, mark
from ..undefined import check as check_defined
from . import branches, extension, owners, returns
from .tensor import BOOL, INT32, INT64, Extent, Hooks, Scalar, Tensor, canonical, fix, literal, marks_of, scalar
from .threads import ThreadScalar, converge, diverge, lanes

_unwrap = tl.core._unwrap_if_constexpr
_NUMBERS = (bool, int, float)


class Sequence(tuple):
    """A list or tuple of a kernel: immutable, and can be concatenated with Triton's tuples.

    To the compiler two of them are equal if their values are the same ones or equal constants: it does not compare run-time values
    there, and orders no tuples.
    """

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other):
        if not isinstance(other, tuple | tl.tuple):
            refuse_use(f"a tuple is compared with {_unwrap(other)!r}, which is none: compare its elements, t[0] == ...")
        other = tuple(other)
        return len(self) == len(other) and all(map(_is_same, self, other))

    def __ne__(self, other):
        return not self == other

    def _refused(self, other):
        refuse_use("the compiler has no <, <=, > or >= for tuples: compare their elements, t[0] < ...")

    __lt__ = __le__ = __gt__ = __ge__ = _refused

    def __add__(self, other):
        return Sequence(tuple(self) + _without_none(other))

    def __radd__(self, other):
        return Sequence(tuple(other) + _without_none(self))

    @property
    def count(self):
        raise AttributeError("'tuple' object has no attribute count")

    @property
    def index(self):
        raise AttributeError("'tuple' object has no attribute index")

    def __mul__(self, count):
        return Sequence(tuple(self) * int(_unwrap(count)))

    def __getitem__(self, index):
        item = tuple.__getitem__(self, _unwrap(index))
        return Sequence(item) if isinstance(index, slice) else item

    @property
    def values(self):
        return list(self)


def first_values(value, targets):
    """Return of a tuple those values that `targets` names (None: a name; a tuple: more of them); the compiler ignores the rest."""
    if not isinstance(value, tuple | tl.tuple):
        return value
    values = tuple(value)[: len(targets)]
    return tuple(v if t is None else first_values(v, t) for v, t in zip(values, targets))


def _without_none(added):
    """Return the right side of a tuple's `+`; the compiler asks each of its elements for a type, and None has none."""
    if any(_unwrap(item) is None for item in added):
        refuse_use("a tuple that holds None cannot be added to another one: write the elements of both out")
    return tuple(added)


def sequence(values):
    return Sequence(values)


def _is_same(a, b):
    """Return whether two elements of tuples are equal to the compiler, which compares constants only."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        refuse_use(
            "== of tuples compares constants, and an element is a run-time value here (each number of `t = (1, 2)` is one): "
            "compare element by element, or annotate the tuple as tl.constexpr"
        )
    return builtins.bool(a == b)


def assign(value, name=""):
    """Bind `name = value`: Python numbers become values of Triton types. What a call's aggregate holds learns its name."""
    kind = type(value)
    if kind is Tensor or kind is Scalar:
        return value
    if kind is int:
        return scalar(value, INT32) if -(2**31) <= value < 2**31 else literal(value)
    if kind is bool or kind is float:
        return literal(value)
    if kind is Extent:
        return literal(int(value))
    if kind is tl.constexpr or kind is Fixed:
        return assign(value.value)
    if kind is tuple or kind is Sequence:
        if any(isinstance(v, tl.dtype) for v in value):
            refuse_use("a type is no element of a tuple under a plain name: annotate the name as tl.constexpr")
        return Sequence(assign(v) for v in value)
    if kind is tl.tensor:
        return fix(value)
    if kind is list or kind is Range:
        raise TypeError(f"cannot convert {value!r} of type {kind} to tensor")
    if kind is tl.tuple:
        return (
            tl.tuple([assign(v) for v in value.values], value.type)
            if value.type.fields
            else Sequence(assign(v) for v in value.values)
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(assign(v) for v in value))
    if _is_no_value(kind):
        raise TypeError(
            f"cannot convert {value!r} of type {kind} to tensor: annotate the name as tl.constexpr to keep it as it is"
        )
    if name and getattr(kind, "holds", ()):
        owners.assigned(value, name)
    return value


_NO_VALUES = (
    *(
        owners.Method,
        type,
        str,
        bytes,
        complex,
        dict,
        enum.Enum,
        types.ModuleType,
        types.FunctionType,
        types.MethodType,
    ),
    *(types.BuiltinFunctionType, functools.partial),
)
_MODULES = ("Namespace", "TlxNamespace", "LibdeviceNamespace")  # of binding.py: modules as a kernel sees them


@functools.cache
def _is_no_value(kind):
    """Return whether the compiler has no run-time value of this type, so that a plain name cannot hold one."""
    if issubclass(kind, _NO_VALUES) or getattr(kind, "is_jit_function", False) or kind.__name__ in _MODULES:
        return True
    if issubclass(kind, tl.core.base_type) and not issubclass(kind, tl.dtype):
        return True
    if not (extension.defines(kind) or kind.__module__.startswith(extension.NAME)):
        return False
    real = getattr(sys.modules.get(extension.NAME), kind.__name__, None)
    return isinstance(real, type) and not issubclass(real, tl.core.base_value)


def constexpr(value):
    """Return what `name: tl.constexpr = value` binds: the plain value."""
    value = _unwrap(value)
    if isinstance(value, Tensor):
        raise ValueError(f"{value.type} is a run-time value: a tl.constexpr must be known when the kernel is compiled")
    if isinstance(value, enum.Enum):
        return tl.constexpr(value)  # which TLX does not take everywhere
    if isinstance(value, int) and type(value) is not bool and type(value) is not int:
        return int(value) if type(value) is Extent else value
    return KnownDict(value) if type(value) is dict else value


def constexpr_local(value, name=None, variables=()):
    """Bind `name: tl.constexpr = value` in a kernel's body: a new name, and a value that may be the kernel's own (`Fixed`)."""
    if name is not None and name in variables:
        raise ValueError(f"{name} is already defined. constexpr cannot be reassigned.")
    value = _unwrap(value)
    return Fixed(value) if isinstance(value, Tensor) else constexpr(value)


class Fixed(tl.constexpr):
    """A run-time value assigned to a name that is annotated tl.constexpr.

    The compiler accepts it in arithmetic with another value, as a mask, in a plain assignment, and for its attributes.
    It refuses it as a number, as a constant and as an argument of a jit function.
    """

    __hash__ = tl.constexpr.__hash__

    def __init__(self, value):
        self.value = value.value if isinstance(value, Fixed) else value

    def __getattr__(self, name):
        return getattr(self.__dict__["value"], name)

    def __bool__(self):
        return True

    def _refused(self, *_):
        raise TypeError("a tl.constexpr that holds a run-time value cannot be used here: leave the annotation out")

    __index__ = __neg__ = __pos__ = __invert__ = __getitem__ = __call__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused


def _beside(name, swapped):
    function = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))

    def method(self, other):
        if not isinstance(other, Tensor):
            self._refused()
        return function(other, self.value) if swapped else function(self.value, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Fixed, f"__{_name}__", _beside(_name, False))
    setattr(Fixed, f"__r{_name}__", _beside(_name, True))
Fixed.__pow__ = Fixed.__rpow__ = Fixed._refused


def at_run_time(condition):
    """Return whether an `if` on this is a branch of the kernel, not a choice of the compiler."""
    return isinstance(condition, Tensor)


def value_of(x):
    """Return `x.value`: constexprs are plain values here."""
    if isinstance(x, _NUMBERS) or x is None or isinstance(x, tl.dtype | str):
        return x
    return x.value


def name_of(x):
    """Return `x.name`; of a constexpr, that of its value."""
    return x.value.name if type(x) is tl.constexpr else x.name


def field(value, text):
    """Return what was read off an object, to be assigned or sliced: with a plain tuple the compiler can do neither."""
    if type(value) is tuple or type(value) is list:
        refuse_use(
            f"{text} is a plain tuple to the compiler, which it can neither assign nor slice: "
            "give it a name first, NAME: tl.constexpr = ..."
        )
    return value


def set_attribute(obj, name, value):
    raise NotImplementedError("Attribute assignment is not supported in triton")


class UnsupportedConstruct(Exception):
    """Raised for Python that Triton's compiler does not support; becomes its UnsupportedLanguageConstruct."""


class Refused(Exception):
    """Raised where the compiler supports the construct but not this use of it; becomes its CompilationError."""


class KnownDict(dict):
    """A dict under the annotation tl.constexpr: the compiler looks up numbers in it, no texts."""

    def __getitem__(self, key):
        if isinstance(key, str):
            refuse_use(
                f"the compiler does not look texts up, as {key!r} here: take numbers for keys, or fields of a tuple"
            )
        return dict.__getitem__(self, _unwrap(key))


def of_dict(dictionary, key):
    """Refuse `{...}[key]`: the compiler looks a constexpr up, which is no key."""
    raise KeyError(key)


def refuse(message, kind=UnsupportedConstruct, line=None):
    """Refuse what stands where the kernel is, or in that line of the same function."""
    error = kind(message)
    error.kernel_line = line
    raise error


def undefined(name):
    """Refuse a name that means nothing, at its place."""
    raise NameError(f"name '{name}' is not defined", name=name)


def refuse_use(message):
    raise Refused(message)


# ---- conditions

_CONDITION_TYPES = (bool, int, type(None))


def _truth(condition):
    """Return the truth of an `if` condition that is not a Scalar."""
    kind = type(condition)
    if kind is Tensor:
        if condition.data.size > 1:
            refuse("Boolean value of Tensor with more than one value is ambiguous")
        check_defined(condition.undefined, "branch")
        return builtins.bool(condition.data.reshape(-1)[0])
    condition = condition if kind is Fixed else _unwrap(condition)
    if type(condition) not in _CONDITION_TYPES and type(condition) is not Extent:
        kind = type(condition).__name__
        refuse(f"`if` conditionals can only accept values of type {{bool, int, NoneType}}, not objects of type {kind}")
    return builtins.bool(condition)


def test(condition, refusal=None):
    """Evaluate an `if` condition.

    refusal: (message, line) of what in the branches cannot be compiled, if the condition is a run-time value.
    """
    if type(condition) is Scalar:
        if refusal is not None:
            refuse(refusal[0], line=refusal[1])
        if condition.undefined is not None:
            check_defined(condition.undefined, "branch")
        return builtins.bool(condition.value)
    if type(condition) is ThreadScalar:
        return diverge(condition)
    return _truth(condition)


def chosen(condition, value, other=...):
    """Evaluate `a if condition else b`: under a run-time condition a tensor of one type.

    other: the other value; or ((its program,), place), to be tried out; or ... where it is not known.
    """
    if not isinstance(condition, Tensor):
        return value
    value = _as_tensor(value)
    if type(other) is tuple:
        other = _tried_value(*other, sys._getframe(1)) if looks(other[1]) else ...
    if other is not ... and type_of(_as_tensor(other)) != type_of(value):
        raise AssertionError(
            f"Ternary expression with dynamic condition has inconsistent types {type_of(value)} and {type_of(_as_tensor(other))}"
        )
    return value


def _tried_value(programs, _, frame):
    """Return what an expression would be, as far as it decides the type of another; else ...."""
    tried = branches.try_out(programs[0], frame.f_locals, frame.f_globals).get(branches.OTHER, ...)
    return tried if isinstance(tried, Tensor) else ...


def _as_tensor(value):
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"cannot convert {value!r} of type {type(value)} to tensor")
    return literal(value)


def watch(condition, memory, refusal=None):
    """Evaluate like `test`; the remembered types only count if the condition is a run-time value."""
    if type(condition) is not Scalar and type(condition) is not Tensor and memory is not None:
        memory.clear()
    taken = test(condition, refusal)
    if memory:
        memory[None] = "then" if taken else "else"
        (then, other), variables = memory[_OTHER]
        memory[_OTHER] = branches.try_out(other if taken else then, variables, sys._getframe(1).f_globals)
        if (then if taken else other).returns:  # then nothing is compared after it
            _try_both(then, other, variables, sys._getframe(1).f_globals)
    return taken


def look_into(programs, target, variables):
    """Look, before a loop, for names that its body reads and nothing has bound (see branches.py)."""
    branches.look_into(programs[0], target, variables, sys._getframe(1).f_globals)


def _try_both(then, other, variables, namespace):
    """Compare the types that both branches of an `if` would leave."""
    both = then.names & other.names
    outcomes = (branches.try_out(branch, variables, namespace) for branch in (then, other))
    branches.compare(*({n: v for n, v in outcome.items() if n in both} for outcome in outcomes), both)


_POLLS_PER_PAUSE = 64


def while_test(condition, site=None, name=None, value=None):
    """Evaluate a `while` condition: a run-time scalar. A long loop may wait for another program, so others may run now and then.

    site, name, value: which loop this is, and what its counter holds; a task remembers its turn for reports.
    """
    goes_on = _while_test(condition)
    task = context.launch.task if site is not None else None
    if task is not None:
        turns = task.turns
        outer = turns[2] if turns is not None and turns[3] == site else turns
        task.turns = (name, value, outer, site) if goes_on else outer
    return goes_on


def _while_test(condition):
    launch = context.launch
    launch.polls += 1
    if launch.polls % _POLLS_PER_PAUSE == 0:
        pause()
    if isinstance(condition, Condition):
        condition = condition.condition
    if context.launch.has_undefined and check_defined(marks_of(condition), "branch"):
        return False
    if type(condition) is Scalar or type(condition) is ThreadScalar:
        if condition.dtype is not BOOL:
            refuse_use(f"a `while` condition must be an int1, not {condition.dtype}: write `while ... != 0`")
        return builtins.bool(condition.value)
    if type(condition) is Tensor:
        return _truth(condition)
    refuse_use(
        f"a `while` condition must be a run-time scalar, not {_unwrap(condition)!r}: the compiler does not unroll a `while`"
    )


class Condition:
    """tl.condition(…): a while condition with compiler hints."""

    def __init__(self, arg1, disable_licm=False):
        self.condition = arg1


def _is_value(x):
    return isinstance(x, Tensor)


def and_goes_on(value):
    return _is_value(value) or builtins.bool(_unwrap(value))


def or_goes_on(value):
    return _is_value(value) or not builtins.bool(_unwrap(value))


def _undefined(left, right):
    return left.undefined is not None or right.undefined is not None


def _are_known_bools(left, right):
    return left.dtype is BOOL and right.dtype is BOOL and not _undefined(left, right)


def and_(left, right):
    if not _is_value(left):
        return right
    if not _is_value(right):
        return left if right else right
    if type(left) is Scalar and type(right) is Scalar and _are_known_bools(left, right):
        return scalar(left.value and right.value, BOOL)
    if type(right) is ThreadScalar:
        left, right = right, left
    return left.logical_and(right)


def or_(left, right):
    if not _is_value(left):
        return right
    if not _is_value(right):
        return right if right else left
    if type(left) is Scalar and type(right) is Scalar and _are_known_bools(left, right):
        return scalar(left.value or right.value, BOOL)
    if type(right) is ThreadScalar:
        left, right = right, left
    return left.logical_or(right)


def not_(value):
    if type(value) is Scalar and value.dtype is BOOL and value.undefined is None:
        return scalar(not value.value, BOOL)
    if type(value) is ThreadScalar:
        return value == 0
    if _is_value(value):
        return fix(tl.tensor.__not__.__wrapped__(value, _semantic=Hooks.semantic))
    return not _unwrap(value)


def positive(value):
    if _is_value(value):
        raise AttributeError("a value of a kernel has no unary plus: leave it out")
    return +_unwrap(value)


def is_(left, right):
    return _unwrap(left) is _unwrap(right)


def check(condition, message=""):
    """Check an `assert` of a kernel."""
    if isinstance(condition, tuple | tl.tuple):
        raise TypeError(f"cannot convert {condition!r} to a condition: assert something of its elements")
    if check_defined(marks_of(condition), "assert"):
        return
    held = condition.data.all() if _is_value(condition) else builtins.bool(_unwrap(condition))
    if not held:
        raise DeviceAssertError(
            f"assertion failed: {_unwrap(message) or 'the condition is false'}", [f"at {show(here())}"], where=here()
        )


# ---- loops


_RANGE_HINTS = inspect.signature(tl.range.__init__).parameters.keys() | {"_semantic"}


class Range:
    """`range` and `tl.range`: the loop variable is a Scalar of the bounds' common integer type."""

    def __init__(self, arg1, arg2=None, step=None, **hints):
        start, stop = (0, arg1) if arg2 is None else (arg1, arg2)
        if hints.keys() - _RANGE_HINTS:
            raise TypeError(f"range got an unexpected keyword argument '{next(iter(hints.keys() - _RANGE_HINTS))}'")
        bounds, self.dtype, unknown = [], INT32, False
        for bound in (start, stop, 1 if step is None else step):
            bound = bound._refused() if type(bound) is Fixed else _unwrap(bound)
            value = bound if isinstance(bound, Scalar) else self._scalar(bound)
            if not value.dtype.is_int():
                raise TypeError(f"For loop bounds and step must all be ints, are {value.dtype}")
            unknown = check_defined(value.undefined, "bound") or unknown
            if value.dtype is not self.dtype:
                self.dtype = (
                    canonical(Hooks.semantic.integer_promote_impl(self.dtype, value.dtype))
                    if value.dtype is not BOOL
                    else self.dtype
                )
            bounds.append(int(value.value))
        self.values = builtins.range(0) if unknown else builtins.range(*bounds)

    @staticmethod
    def _scalar(bound):
        if type(bound) is Tensor:
            raise TypeError(f"a loop bound must be a scalar, got {bound.type}")
        return literal(bound)

    def __iter__(self):
        dtype = self.dtype
        for value in self.values:
            yield scalar(value, dtype)


class StaticRange:
    """tl.static_range: unrolled by the compiler, so the loop variable is a plain int."""

    def __init__(self, arg1, arg2=None, step=None):
        for bound in (arg1, arg2, step):
            if _is_value(bound):
                raise AssertionError(f"{bound} used as tl.static_range bound is not a constexpr")
        start, stop = (0, arg1) if arg2 is None else (arg1, arg2)
        self.values = builtins.range(_unwrap(start), _unwrap(stop), 1 if step is None else _unwrap(step))

    dtype = None
    constants = {"arg1": 0, "arg2": 1, "step": 2}  # see takes()

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)


StaticRange.__name__ = "static_range"  # what a refusal calls it


class Ended:
    """The variable of a `for` loop after the loop: it has a type, but its value is undefined."""

    __slots__ = ("dtype", "value", "place")

    def __init__(self, values, file, line):
        self.dtype, self.place = values.dtype, (file, line)
        self.value = values.values[-1] if values.values else values.values.start

    @property
    def compiled_type(self):
        return str(self.dtype)


def read(value):
    """Return the value of a name that may be the variable of a loop that has ended: then it is undefined."""
    if type(value) is not Ended:
        return value
    if not context.launch.follows_undefined:
        return scalar(value.value, value.dtype)
    return scalar(value.value, value.dtype, undefined=np.array(mark("ended loop", (value.place,)), MARK))


def iterate(iterable, name):
    """Yield the values of a loop; the running task remembers which turn it is in, for reports."""
    if not isinstance(iterable, Range | StaticRange):
        raise Refused("Only `range` and `static_range` iterators are currently supported")
    task = context.launch.task
    return iterable if task is None else _turns(iterable, name, task)


def _turns(iterable, name, task):
    outer = task.turns
    for value in iterable:
        task.turns = (name, value, outer, None)
        yield value
    task.turns = outer


# ---- types that must not change

_LOOKS = 4


def looks(site):
    """Return whether a place still checks types: the first few times of a launch."""
    looks = context.launch.looks
    count = looks.get(site, 0)
    if count >= _LOOKS:
        return False
    looks[site] = count + 1
    return True


def type_of(value):
    if _is_value(value):
        return str(value.type)
    if isinstance(value, _NUMBERS):
        return "constexpr"
    if isinstance(value, tuple | tl.tuple):
        return tuple(type_of(v) for v in value)
    return getattr(value, "compiled_type", None) or type(value).__name__


_OTHER = ...  # key of what the other branch would make of the names


def types_of(variables, names, tried=None):
    """Return the types of those names that are bound. tried: the assignments of an `if` (see branches.py), kept with them."""
    types = {name: type_of(variables[name]) for name in names if name in variables}
    if tried is not None:
        types[_OTHER] = tried, dict(variables)
    return types


def check_loop(variables, memory):
    """Require, after a loop's first iteration, that each carried name has the type it came in with."""
    for name, before in memory.items():
        now = type_of(variables.get(name))
        if now != before:
            if before == "constexpr":
                raise TypeError(
                    f"Loop carried variable {name} changed type: it is a constexpr before the loop and {now} after one iteration"
                )
            raise AssertionError(
                f"Loop-carried variable {name} has initial type {before} but is re-assigned to {now} in loop! "
                "Please make sure that the type stays consistent."
            )


def check_branch(variables, memory, both=()):
    """Require, after a branch on a run-time value, that a name that existed before has kept its type.

    both: names that are assigned in both branches; the compiler does not check them if they are constants afterwards.
    """
    branch, other = memory.pop(None), memory.pop(_OTHER)
    for name, before in memory.items():
        now = type_of(variables.get(name))
        if now != before and not (name in both and now == "constexpr"):
            raise AssertionError(
                f"initial value for `{name}` is of type {before}, but the {branch} block redefines it as {now}"
            )
    _check_other(variables, memory, both, branch, other)


def _check_other(variables, memory, both, branch, other):
    """Require the same of the branch that is not taken, as far as it is known what that makes of the names."""
    for name in other.keys() & {name for name, before in memory.items() if before != "constexpr"}:
        now = branches.run_time_type(other[name])
        if now is not None and now != memory[name]:
            raise AssertionError(
                f"initial value for `{name}` is of type {memory[name]}, but the {'else' if branch == 'then' else 'then'} block "
                f"redefines it as {now}"
            )
    taken = {
        name: variables[name] for name in both if name in variables and memory.get(name, "constexpr") == "constexpr"
    }
    branches.compare(*((taken, other) if branch == "then" else (other, taken)), both)


# ---- Python's builtins as a kernel sees them


def _extremum(python, name):
    def extremum(*values):
        if len(values) == 1:
            raise AssertionError(f"{python.__name__} requires at least 2 values")
        values = [_unwrap(v) for v in values]
        if not any(_is_value(v) for v in values):
            return python(values)
        result = values[0]
        for value in values[1:]:
            result = _pair(python, name, result, value)
        return result

    return extremum


def _pair(python, name, a, b):
    if type(a) is Scalar and type(b) is int:
        b = literal(b) if a.dtype is INT32 else b
    elif type(b) is Scalar and type(a) is int:
        a = literal(a) if b.dtype is INT32 else a
    if (
        type(a) is Scalar
        and type(b) is Scalar
        and a.dtype is b.dtype
        and a.dtype in (INT32, INT64)
        and not _undefined(a, b)
    ):
        return scalar(python(a.value, b.value), a.dtype)
    return fix(getattr(tl, name).__wrapped__(a, b, _semantic=Hooks.semantic))


minimum, maximum = _extremum(builtins.min, "minimum"), _extremum(builtins.max, "maximum")


def named(function, name):
    """Give an allocation the name of the variable that it is assigned to."""
    if getattr(function, "takes_name", False):
        return lambda *args, **kwargs: function(*args, _name=name, **kwargs)
    return function


def takes(function, places, *owners):
    """Return `function` if the compiler takes what is plain Python to it where that stands in a call of it.

    Fields of objects, such as cfg.stages or cfg.shape[0], and the right operands of joined tuples are no constexprs. It takes
    plain numbers as most arguments, but not within a tuple for a jit function, nor where it asks for the value of a constexpr;
    texts and tuples not for a jit function.

    Args:
        places: (position or keyword, whether within a tuple, "cfg.stages", path to it or None) each. owners: where each path
            begins, in the same order; without a path the joined tuple itself.
    """
    constants = getattr(function, "constants", None)
    jit = getattr(function, "is_jit_function", False)
    if constants is None and not jit:
        return function
    for (place, nested, text, path), owner in zip(places, owners):
        wanted = constants is not None and not nested and (place in constants or place in constants.values())
        if not (wanted or jit):
            continue
        plain, value = _walk(owner, path)
        if not plain or type(value) in _NUMBERS and not (nested or wanted) or not _has_plain(value):
            continue
        what = f"where {function.__name__} takes a constexpr" if wanted else "for a jit function"
        what = "in a tuple for a jit function" if nested else what
        mend = f"write tl.constexpr({text}), or give it a name first, NAME: tl.constexpr = {text}"
        if path is None:
            mend = "write the tuples as one, or give the joined one a name first, NAME: tl.constexpr = ..."
        refuse_use(f"{text} is {_called(value)} to the compiler, which it refuses {what}: {mend}")
    return function


_HANDED = (tl.constexpr, tl.dtype, int, float, str)


def takes_names(function, caller, names):
    """Return `function` if it takes what these global names stand for: a jit function does not take a builtin, a class or a module.

    Args:
        caller: the EmulatedFunction with the call. names: (name, attribute, ...) each, as in ("tl", "maximum").
    """
    if getattr(function, "is_jit_function", False):
        for path in names:
            value = caller.written(path)
            if isinstance(value, _HANDED) or value is None or hasattr(value, "type"):
                continue
            if not isinstance(value, enum.Enum):  # of which the call itself tells more
                what = f"{'.'.join(path)} to a jit function: it is neither a value, a constexpr nor a jit function"
                refuse_use(
                    f"the compiler cannot hand {what}; give it a name first, NAME: tl.constexpr = {'.'.join(path)}"
                )
    return function


def _walk(value, path):
    """Return (whether a path leads to what is plain Python to the compiler, what it leads to)."""
    if path is None:
        return isinstance(value, tuple), value
    plain = False
    for step in path:
        if isinstance(step, str):
            plain = plain or not _has_constexpr_fields(value)
            value = getattr(value, step, None)
        else:
            if not isinstance(value, tuple | list) or step >= len(value):
                return False, None  # the call itself says what is wrong
            plain = plain or type(value) is tuple
            value = value[step]
    return plain, value


def _has_plain(value):
    """Return whether a plain value is, or has within, what is of no type to the compiler."""
    if type(value) in (tuple, list, Sequence):
        return any(map(_has_plain, value))
    return type(value) in _NO_TYPE or isinstance(value, enum.Enum)


_NO_TYPE = (*_NUMBERS, str)


def _called(value):
    kind = type(value).__name__
    return "a plain tuple" if kind in ("tuple", "list", "Sequence") else f"a plain {kind}"


def _has_constexpr_fields(owner):
    """Return whether numbers among the fields of an object are constexprs to the compiler, or it is no object of the user's."""
    return isinstance(owner, tl.core.base_value | tuple | type(sys)) or type(owner).__module__.startswith(
        "jfa.emulator"
    )


class ignored_context:
    """A `with` statement that the emulator ignores (compiler hints)."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return False


HELPERS = {
    "assign": assign,
    "ended": Ended,
    "read": read,
    "constexpr": constexpr,
    "constexpr_local": constexpr_local,
    "at_run_time": at_run_time,
    "value": value_of,
    "name": name_of,
    "field": field,
    "common_type": returns.common_type,
    "returned": returns.returned,
    "returned_nothing": returns.returned_nothing,
    "setattr": set_attribute,
    "refuse": refuse,
    "refuse_use": refuse_use,
    "undefined": undefined,
    "test": test,
    "watch": watch,
    "chosen": chosen,
    "while": while_test,
    "and_goes_on": and_goes_on,
    "or_goes_on": or_goes_on,
    "and": and_,
    "or": or_,
    "not": not_,
    "positive": positive,
    "is": is_,
    "assert": check,
    "first_values": first_values,
    "iterate": iterate,
    "static_range": StaticRange,
    "looks": looks,
    "look_into": look_into,
    "types": types_of,
    "without_effects": branches.callable_without_effects,
    "check_loop": check_loop,
    "check_branch": check_branch,
    "sequence": sequence,
    "named": named,
    "takes": takes,
    "takes_names": takes_names,
    "of_dict": of_dict,
    "context": ignored_context,
    "lanes": lanes,
    "converge": converge,
}
