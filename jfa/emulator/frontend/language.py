"""`tl` as a kernel sees it on the emulator: Triton's own language functions on our semantic layer, the hot ones done directly.

Nothing of Triton is patched. A name of a `triton.language` module is looked up in the real module and given its emulated
form; the tables here say where that is not simply the real function with our semantic layer.
"""

import builtins
import functools

import numpy as np
import triton.language as tl

from ..context import context
from ..counting import count_lanes
from ..errors import NotSupported
from ..locations import here, show
from ..undefined import everywhere
from . import access, collective, support
from .carry import any_undefined
from .semantic import BUILDER, SEMANTIC, full_value
from .tensor import (
    BOOL,
    FP32,
    INT32,
    Scalar,
    Tensor,
    canonical,
    fix,
    held_dtype,
    joined,
    make,
    rearranged,
    scalar,
    wrap,
)

_unwrap = tl.core._unwrap_if_constexpr


def wrap_builtin(function):
    """Return a Triton builtin that runs on our semantic layer."""
    raw = getattr(function, "__wrapped__", None) or function
    parameters = getattr(function, "signature", None)
    names = parameters.parameters if parameters is not None else _parameters(raw)
    extra = {"_semantic": SEMANTIC}
    if "_generator" in names:
        extra["_generator"] = None
    if "_semantic" not in names:
        extra = {}

    @functools.wraps(raw)
    def emulated(*args, **kwargs):
        kwargs.pop("_semantic", None)
        kwargs.pop("_generator", None)
        return fix(raw(*args, **kwargs, **extra))

    return emulated


def _parameters(function):
    import inspect

    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


# ---- direct versions


def program_id(axis):
    axis = _unwrap(axis)
    if axis not in (0, 1, 2):
        raise ValueError(f"program_id axis must be 0, 1, or 2 but got {axis}")
    return BUILDER.create_get_program_id(axis)


def num_programs(axis):
    axis = _unwrap(axis)
    if axis not in (0, 1, 2):
        raise ValueError(f"num_programs axis must be 0, 1, or 2 but got {axis}")
    return BUILDER.create_get_num_programs(axis)


@functools.lru_cache(256)
def _range_block(start, end):
    return fix(tl.arange.__wrapped__(start, end, _semantic=SEMANTIC))


def arange(start, end):
    start, end = _unwrap(start), _unwrap(end)
    for bound in (start, end):
        if not isinstance(bound, int):
            raise ValueError("arange's arguments must be of type tl.constexpr")
    return _range_block(int(start), int(end))


def _block_shape(shape):
    """Return a shape argument as plain ints, checked as Triton checks it."""
    shape = _unwrap(shape)
    if isinstance(shape, int):
        raise TypeError(f"a shape is a tuple: ({shape},), not {shape}")
    values = []
    for extent in shape:
        extent = _unwrap(extent)
        if not isinstance(extent, int):  # True is 1 to the compiler, too
            kind = f"`{extent}`" if isinstance(extent, tl.tensor) else type(extent).__name__
            raise TypeError(f"Shape element {len(values)} must have type `constexpr[int]`, got {kind}")
        values.append(int(extent))
    _validate_shape(builtins.tuple(values))
    return builtins.tuple(values)


@functools.lru_cache(1024)
def _validate_shape(shape):
    if shape:
        tl.block_type(tl.int32, builtins.list(shape))


def _check_constant(value, dtype):
    """Refuse a Python number of which the builder makes no constant of that type."""
    kinds = (int, float) if dtype.is_floating() or dtype.name == "int1" else (int,)
    if not isinstance(value, kinds) or value < 0 and dtype.is_int_unsigned():
        raise TypeError(f"{value!r} is no constant of type {dtype}")


def full(shape, value, dtype):
    shape, dtype, value = _block_shape(shape), canonical(_unwrap(dtype)), _unwrap(value)
    if isinstance(value, tl.tensor):
        value = fix(value)
        if value.data.size != 1:
            raise AssertionError("only accepts size-1 tensor")
        value = value.to(dtype)
        data = value.data.reshape(-1)[0]
        if value.undefined is not None:
            marks = everywhere(value.undefined, shape)
            return wrap(np.full(shape, data, held_dtype(dtype)), dtype, undefined=marks)
    else:
        if dtype is None:
            raise ValueError("dtype must be specified when value is not a tensor")
        _check_constant(value, dtype)
        data = full_value(value, dtype).value
    if not shape:
        return scalar(data.item() if hasattr(data, "item") else data, dtype)
    return make(np.full(shape, data, held_dtype(dtype)), dtype)


def zeros(shape, dtype):
    return full(shape, 0, dtype)


zeros.is_jit_function = True


def zeros_like(input):
    input = fix(input)
    return full(input.data.shape, 0, input.dtype)


def where(condition, x, y):
    condition, x, y = _unwrap(condition), _unwrap(x), _unwrap(y)
    if type(condition) is Tensor and condition.dtype is BOOL and not _undefined(condition, x, y):
        result = _where_block(condition, x, y)
        if result is not None:
            return result
    if not isinstance(condition, tl.tensor):
        condition = SEMANTIC.to_tensor(condition)
    return fix(tl.where.__wrapped__(condition, x, y, _semantic=SEMANTIC))


def _undefined(*operands):
    """Return whether an operand has undefined lanes: the builder carries those."""
    return context.launch.has_undefined and any_undefined(operands)


def _where_block(condition, x, y):
    """Emulate np.where for operands of one type (a Python number takes the other's type); None where promotion is due."""
    block = x if isinstance(x, Tensor) else y
    if not isinstance(block, Tensor):
        return None
    dtype, allocation = block.dtype, None
    operands = []
    for operand in (x, y):
        if isinstance(operand, Tensor):
            if operand.dtype is not dtype:
                return None
            operands.append(operand.data)
            allocation = allocation or operand.allocation
        elif type(operand) in (int, float) and (dtype is FP32 or (type(operand) is int and dtype is INT32)):
            operands.append(held_dtype(dtype).type(operand))
        else:
            return None
    try:
        data = np.where(condition.data, *operands)
    except ValueError:
        return None
    if context.launch.charge:
        context.launch.charge("alu", data.size)
    count_lanes("selects", data)
    return make(data, dtype, allocation)


def _extremum(name, quiet, propagating):
    python = builtins.min if name == "minimum" else builtins.max

    def extremum(x, y, propagate_nan=tl.PropagateNan.NONE):
        if type(x) is support.Fixed or type(y) is support.Fixed:
            (x if type(x) is support.Fixed else y)._refused()
        x, y = _unwrap(x), _unwrap(y)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype is y.dtype and not _undefined(x, y):
            dtype = x.dtype
            if type(x) is Scalar and type(y) is Scalar and dtype.is_int():
                return scalar(python(x.value, y.value), dtype)
            if dtype is FP32 or dtype is INT32:
                function = propagating if dtype is INT32 or _unwrap(propagate_nan) == tl.PropagateNan.ALL else quiet
                data = function(x.data, y.data)
                if context.launch.charge:
                    context.launch.charge("alu", data.size)
                return make(data, dtype)
        return fix(getattr(tl, name).__wrapped__(x, y, propagate_nan, _semantic=SEMANTIC))

    return extremum


def _unary_fp32(name, function, unit, counted=""):
    real = getattr(tl.math, name)
    slow = wrap_builtin(real)

    def unary(x, *args, **kwargs):
        if type(x) is Tensor and x.dtype is FP32 and not args and not kwargs and x.undefined is None:
            if context.launch.charge:
                context.launch.charge(unit, x.data.size)
            if counted:
                count_lanes(counted, x.data)
            return make(function(x.data), FP32)
        return slow(x, *args, **kwargs)

    return unary


def cdiv(x, div):
    for operand in (x, div):
        if type(operand) is support.Fixed:
            operand._refused()
    x, div = _unwrap(x), _unwrap(div)
    if isinstance(x, tl.tensor) or isinstance(div, tl.tensor):
        return (x + (div - 1)) // div
    return (x + (div - 1)) // div


def static_assert(cond, msg=""):
    cond = _unwrap(cond)
    if isinstance(cond, tl.tensor):
        raise NotImplementedError(
            "Assertion condition could not be determined at compile-time. Make sure that it depends only on `constexpr` values"
        )
    if not cond:
        raise StaticAssertion(str(_unwrap(msg)))


class StaticAssertion(Exception):
    """A failed tl.static_assert; the launch turns it into Triton's CompileTimeAssertionFailure."""


def static_print(*values, sep=" ", end="\n", file=None, flush=False):
    """Print once per place and launch, as a compiler prints it."""
    text = (here(1), _unwrap(sep).join(str(_unwrap(v)) for v in values))
    if text not in context.launch.printed:
        context.launch.printed.add(text)
        print(text[1], end=_unwrap(end), file=file, flush=flush)


def _hint(input, values):
    return input


def to_tensor(x):
    return fix(SEMANTIC.to_tensor(_unwrap(x)))


def dot_scaled(lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *args, **kwargs):
    """Emulate tl.dot_scaled: Triton's version wants the formats as constexpr."""
    formats = [f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lhs_format, rhs_format)]
    raw = tl.dot_scaled.__wrapped__
    return fix(raw(lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *args, _semantic=SEMANTIC, **kwargs))


def reshape(input, *shape, can_reorder=False):
    return _reshape(fix(input), shape)


def _reshape(input, shape):
    one = len(shape) == 1 and isinstance(_unwrap(shape[0]), tuple | list | tl.tuple)  # else extents one by one
    shape = _block_shape(shape[0] if one else shape)
    size = 1
    for extent in shape:
        size *= extent
    if size != input.data.size:
        raise ValueError("reshape() cannot change total number of elements in tensor")
    return rearranged(input, lambda lanes: lanes.reshape(shape))


def split(a):
    a = fix(a)
    if a.data.shape[-1:] != (2,):
        raise AssertionError("split needs a last dimension of 2")
    return rearranged(a, lambda lanes: lanes[..., 0]), rearranged(a, lambda lanes: lanes[..., 1])


def cat(input, other, can_reorder=False, dim=0):
    """Emulate tl.cat; without can_reorder the halves keep their order (they do here in any case)."""
    input, other, dim = fix(input), fix(other), _unwrap(dim)
    if input.dtype.name != other.dtype.name or input.data.ndim != other.data.ndim:
        raise ValueError(f"cat needs two tensors of one type and rank, got {input.type} and {other.type}")
    if _unwrap(can_reorder) and input.data.ndim != 1:
        raise AssertionError(f"cat with can_reorder=True joins blocks of one dimension, not {input.data.ndim}")
    return joined([input, other], lambda lanes: np.concatenate(lanes, dim))


def is_instance(value, classes):
    """Emulate `isinstance` in a kernel: constexprs are plain values here."""
    classes = classes if isinstance(classes, builtins.tuple) else (classes,)
    for cls in classes:
        if cls is support.constexpr or cls is tl.constexpr:
            if not isinstance(value, tl.core.base_value) or isinstance(value, tl.constexpr):
                return True
        elif isinstance(cls, type) and isinstance(_unwrap(value), cls):
            return True
    return False


def device_print(prefix, *args, hex=False):
    raw = tl.device_print.__wrapped__
    return raw(prefix, *args, hex=hex, _semantic=SEMANTIC)


_TABLE = {
    "program_id": program_id,
    "num_programs": num_programs,
    "arange": arange,
    "full": full,
    "zeros": zeros,
    "zeros_like": zeros_like,
    "where": where,
    "minimum": _extremum("minimum", np.fmin, np.minimum),
    "maximum": _extremum("maximum", np.fmax, np.maximum),
    "cdiv": cdiv,
    "static_assert": static_assert,
    "static_print": static_print,
    "device_print": device_print,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "max_constancy": _hint,
    "to_tensor": to_tensor,
    "dot_scaled": dot_scaled,
    "reshape": reshape,
    "view": reshape,
    "split": split,
    "cat": cat,
    "range": support.Range,
    "static_range": support.StaticRange,
    "condition": support.Condition,
    "constexpr": support.constexpr,
    "builtin_min": support.minimum,
    "builtin_max": support.maximum,
}
_TABLE |= {
    "exp": _unary_fp32("exp", np.exp, "mufu", "exponentials"),
    "exp2": _unary_fp32("exp2", np.exp2, "mufu", "exponentials"),
    "log": _unary_fp32("log", np.log, "mufu"),
    "log2": _unary_fp32("log2", np.log2, "mufu"),
    "sqrt": _unary_fp32("sqrt", np.sqrt, "mufu"),
    "abs": _unary_fp32("abs", np.abs, "alu"),
}
_TABLE |= access.FUNCTIONS
_TABLE |= collective.NATIVE


def _exchanging(function):
    """Return `function`, which the warps of a task begin with a barrier: it moves values between them through shared memory."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if context.launch.exchange is not None:
            context.launch.exchange()
        return function(*args, **kwargs)

    return call


_EXCHANGES = ("reduce", "associative_scan", "max", "min", "argmax", "argmin", "sum", "sort", "topk", "flip")
_TABLE |= {name: _exchanging(_TABLE[name]) for name in (*_EXCHANGES, "reshape", "view", "split", "cat")}

BUILTINS = {
    "range": support.Range,
    "min": support.minimum,
    "max": support.maximum,
    "print": device_print,
    "isinstance": is_instance,
}

_UNSUPPORTED = {
    "_experimental_reinterpret_tensor_descriptor": "descriptors in a workspace",
}


def native(name):
    """Return the direct version of a name of triton.language, or None."""
    if name in _UNSUPPORTED:
        return unsupported(f"tl.{name}")
    return _TABLE.get(name)


def unsupported(name):
    def refused(*args, **kwargs):
        raise NotSupported(f"the emulator does not model `{name}`", [f"at {show(here())}"], where=here())

    return refused
