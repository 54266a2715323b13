"""The values of a kernel: `Tensor` (a block, a numpy array in held form) and `Scalar` (a Python number of a Triton type).

Both subclass Triton's own `tensor`, so Triton's language functions take them. Arithmetic between operands of one type
is done by numpy (blocks) or Python (scalars) directly. Everything else goes through Triton's own semantic layer, which
promotes, broadcasts and refuses exactly as the compiler's front end does, and calls `builder`.

A value with undefined lanes holds their marks (`undefined`, see ..undefined). The fast paths here are for defined
operands: operations on an undefined one go through the semantic layer, so marks are propagated in `builder` only (see
`carry`).
"""

import math
import operator
from functools import lru_cache

import numpy as np
import triton.language as tl

from .. import dtypes
from ..context import context
from ..counting import Active, count_lanes
from ..undefined import MARK, some, union

_new = object.__new__
_pointer_type = tl.pointer_type
INT32, INT64, UINT32, BOOL, FP32 = tl.int32, tl.int64, tl.uint32, tl.int1, tl.float32

_TYPES = {
    t.name: t
    for t in (
        tl.int1,
        tl.int8,
        tl.int16,
        tl.int32,
        tl.int64,
        tl.uint8,
        tl.uint16,
        tl.uint32,
        tl.uint64,
        tl.float16,
        tl.bfloat16,
        tl.float32,
        tl.float64,
        tl.float8e4nv,
        tl.float8e5,
        tl.float8e4b15,
        tl.float8e4b8,
        tl.float8e5b16,
    )
}
_INTEGERS = {
    f"{u}int{n}": ((0, 2**n - 1) if u else (-(2 ** (n - 1)), 2 ** (n - 1) - 1))
    for u in ("", "u")
    for n in (8, 16, 32, 64)
}
_FLOATS = frozenset(n for n in _TYPES if n.startswith(("fp", "bf")))
_FP8 = frozenset(n for n in _FLOATS if n.startswith("fp8"))
_NARROW = dtypes.NARROW_FLOATS


class Hooks:
    """Functions that other modules of the frontend register here: the semantic layer."""

    semantic = None


def canonical(dtype):
    """Return Triton's own instance of a scalar type (types compare by name, but the fast paths compare by identity)."""
    return _TYPES.get(dtype.name, dtype)


def held_dtype(dtype):
    """Return the numpy dtype of a Triton scalar type in arithmetic."""
    return np.dtype(np.int64) if type(dtype) is _pointer_type else dtypes.held(dtype.name)


@lru_cache(4096)
def _plain_block_type(name, shape):
    return tl.block_type(_TYPES[name], list(shape))


def _block_type(dtype, shape):
    """Return the type of a block (kept, for checking a shape takes Triton a while)."""
    return _plain_block_type(dtype.name, shape) if dtype.name in _TYPES else tl.block_type(dtype, list(shape))


class Extent(int):
    """One extent of a block's shape: a plain int that also answers to `.value`, as a constexpr does."""

    @property
    def value(self):
        return int(self)


@lru_cache(4096)
def _shape(shape):
    return tl.tuple([Extent(s) for s in shape])


def _wrap_integer(value, name):
    lo, hi = _INTEGERS[name]
    if lo <= value <= hi:
        return value
    span = hi - lo + 1
    return (value - lo) % span + lo


def _round_float(value, name):
    if name == "fp32":
        return float(np.float32(value))
    if name == "fp64":
        return float(value)
    return float(dtypes.round_to(np.array(value, np.float32), name))


class Tensor(tl.tensor):
    """A block of values. `data`: numpy array in held form, `dtype`: Triton scalar (or pointer) type, `allocation`: of pointers,
    `undefined`: marks in data's shape, None where all lanes are defined, `exact`: a product before it was rounded, float64."""

    allocation = None
    undefined = None
    exact = None
    __array_ufunc__ = None  # numpy's functions do not run on values of a kernel

    def __new__(cls, handle, type):
        """Stand for what Triton's semantic layer calls with a builder's result and the type it should have."""
        return None if handle is None else retype(handle, type.scalar)

    def __init__(self, handle=None, type=None):
        pass

    @property
    def handle(self):
        return self

    @property
    def type(self):
        return _block_type(self.dtype, self.data.shape)

    @property
    def shape(self):
        return _shape(self.data.shape)

    @property
    def numel(self):
        return Extent(self.data.size)

    @property
    def T(self):
        if self.data.ndim != 2:
            raise ValueError(
                f"permute dims must have the same length as input shape, got {self.data.ndim} and 2: write tl.permute"
            )
        return rearranged(self, np.transpose)

    def get_type(self):
        return self.type

    def set_attr(self, name, value):
        """Ignore hints (divisibility, contiguity, latency)."""

    def get_context(self):
        return None

    def __hash__(self):
        return id(self)

    def __bool__(self):
        if self.data.size == 1:
            return bool(self.data.reshape(-1)[0])
        raise TypeError("Boolean value of Tensor with more than one value is ambiguous")

    def __repr__(self):
        return f"{self.type}"

    __str__ = __repr__

    def __getitem__(self, key, _semantic=None):
        keys = _axes_only(key)
        return rearranged(self, lambda lanes: lanes[keys])

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False, _semantic=None):
        dtype = tl.core._unwrap_if_constexpr(dtype)
        if not bitcast and fp_downcast_rounding is None and type(dtype) is not _pointer_type:
            name = dtype.name
            if name == self.dtype.name:
                return self
            if self.undefined is not None:
                pass
            elif self.dtype is FP32 and name in ("bf16", "fp16"):
                if context.launch.charge:
                    context.launch.charge("cvt", self.data.size)
                return make(dtypes.round_to(self.data, name), canonical(dtype))
            elif name == "fp32" and self.dtype.name in ("bf16", "fp16"):
                if context.launch.charge:
                    context.launch.charge("cvt", self.data.size)
                return make(self.data, FP32)
        return fix(tl.cast.__wrapped__(self, dtype, fp_downcast_rounding, bitcast, _semantic=Hooks.semantic))


_ALL = slice(None)


def _axes_only(key):
    """Return the index as a tuple of None and full slices; anything else is no index in a kernel."""
    keys = key if isinstance(key, tuple) else tuple(key.values) if isinstance(key, tl.tuple) else (key,)
    for k in keys:
        if k is not None and not (isinstance(k, slice) and k == _ALL):
            raise ValueError(f"unsupported tensor index: {k}")
    return keys


class Scalar(Tensor):
    """A scalar: `value` is a Python bool, int or float already wrapped or rounded to `dtype`; pointers are integer addresses."""

    @property
    def data(self):
        return np.array(self.value, held_dtype(self.dtype))

    @property
    def type(self):
        return self.dtype

    @property
    def shape(self):
        return _shape(())

    @property
    def numel(self):
        return Extent(1)

    @property
    def T(self):
        raise ValueError("a scalar has no transpose")

    def __bool__(self):
        return bool(self.value)

    def __repr__(self):
        return f"{self.dtype}"

    __str__ = __repr__

    def __getitem__(self, key, _semantic=None):
        return fix(_slow("__getitem__")(self, list(_axes_only(key)), _semantic=Hooks.semantic))

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False, _semantic=None):
        dtype = tl.core._unwrap_if_constexpr(dtype)
        if (
            not bitcast
            and fp_downcast_rounding is None
            and type(dtype) is not _pointer_type
            and type(self.dtype) is not _pointer_type
        ):
            name, own = dtype.name, self.dtype.name
            if name == own:
                return self
            if self.undefined is not None:
                pass
            elif name in _INTEGERS and (own in _INTEGERS or own == "int1"):
                return scalar(_wrap_integer(int(self.value), name), canonical(dtype))
            elif name in ("fp32", "fp64") and own in _FLOATS | {"int32", "int64", "int1"}:
                return scalar(_round_float(self.value, name), canonical(dtype))
        return fix(tl.cast.__wrapped__(self, dtype, fp_downcast_rounding, bitcast, _semantic=Hooks.semantic))


def make(data, dtype, allocation=None, undefined=None):
    """Return a block Tensor from a held array (a Scalar from a 0-d one). `undefined`: marks in data's shape."""
    if data.ndim == 0:
        return scalar(data.item(), dtype, allocation, undefined)
    if Active.counts is not None:
        Active.counts.block(data.size)
    t = _new(Tensor)
    t.data, t.dtype = data, dtype
    if allocation is not None:
        t.allocation = allocation
    if undefined is not None:
        t.undefined = undefined
    return t


def scalar(value, dtype, allocation=None, undefined=None):
    """Return a Scalar; `value` must already fit `dtype`."""
    s = _new(Scalar)
    s.value, s.dtype = value, dtype
    if allocation is not None:
        s.allocation = allocation
    if undefined is not None:
        s.undefined = undefined
    return s


def wrap(data, dtype, allocation=None, undefined=None):
    """Return whatever numpy returned, as a Tensor or Scalar."""
    if type(data) is np.ndarray and data.ndim:
        return make(data, dtype, allocation, undefined)
    return scalar(data.item() if hasattr(data, "item") else data, dtype, allocation, undefined)


def rearranged(t, function):
    """Return the value whose array is function(t.data), where `function` only moves, repeats or picks lanes: marks go with them."""
    marks = None if t.undefined is None else some(function(t.undefined))
    moved = wrap(function(t.data), t.dtype, t.allocation, marks)
    if t.exact is not None:
        moved.exact = function(t.exact)
    return moved


def marks_of(x):
    """Return the marks of an operand; None where it is defined, or no value of a kernel."""
    return getattr(x, "undefined", None)


def joined(parts, function):
    """Return function(arrays) of several values of one type, where `function` only puts lanes side by side."""
    data = function([p.data for p in parts])
    if not context.launch.has_undefined or all(p.undefined is None for p in parts):
        return make(data, parts[0].dtype, parts[0].allocation)
    marks = function([np.zeros(p.data.shape, MARK) if p.undefined is None else p.undefined for p in parts])
    return make(data, parts[0].dtype, parts[0].allocation, some(marks))


def retype(t, dtype):
    """Return `t` with a type of the same width: what LLVM's signless integers leave to the types."""
    if t.dtype is dtype:
        return t
    target = held_dtype(dtype)
    if type(t) is Scalar:
        value = t.value
        if dtype.name in _INTEGERS and t.dtype.name in _INTEGERS:
            value = _wrap_integer(int(value), dtype.name)
        return scalar(value, canonical(dtype), t.allocation, t.undefined)
    data = (
        t.data
        if t.data.dtype == target
        else t.data.view(target)
        if t.data.itemsize == target.itemsize
        else t.data.astype(target)
    )
    return make(data, canonical(dtype), t.allocation, t.undefined)


def fix(result):
    """Return a result of Triton's language layer with every plain `tl.tensor` replaced by its handle, which is ours."""
    kind = type(result)
    if kind is Tensor or kind is Scalar:
        return result
    if kind is tl.tensor:
        return None if result.handle is None else retype(result.handle, result.dtype)
    if kind is tuple or kind is list:
        return kind(fix(r) for r in result)
    if kind is tl.tuple and not result.type.fields:
        return tuple(fix(r) for r in result.values)
    if kind is tl.constexpr:
        return result.value
    return result


def literal(value):
    """Return a Python number as a Scalar of the type that the compiler gives it."""
    if type(value) is bool:
        return scalar(value, BOOL)
    if type(value) is int and -(2**31) <= value < 2**31:
        return scalar(value, INT32)
    return fix(Hooks.semantic.to_tensor(value))


# ---- operators


@lru_cache(None)
def _slow(name):
    """Return Triton's own version of an operator, which takes the semantic layer explicitly."""
    return getattr(tl.tensor, name).__wrapped__


def _any_undefined(a, b):
    return a.undefined is not None or getattr(b, "undefined", None) is not None


def _through_semantic(name, a, b):
    if isinstance(a, Tensor):
        return fix(_slow(name)(a, b, _semantic=Hooks.semantic))
    reverse = "__r" + name[2:]
    return fix(_slow(reverse)(b, a, _semantic=Hooks.semantic))


@lru_cache(None)
def _promoted(a, b):
    """Return the common integer type of two by name, or None where Triton's own rules must decide."""
    if a in _INTEGERS and b in _INTEGERS:
        return Hooks.semantic.integer_promote_impl(_TYPES[a], _TYPES[b])
    return None


class _Operator:
    """One binary operator: its special method, its functions on numbers and on arrays, and its kind of result."""

    def __init__(self, name, python, array, kinds="if", compares=False, unit="alu"):
        self.name, self.python, self.array = name, python, array
        self.kinds, self.compares, self.unit = kinds, compares, unit
        self.fuses = name in ("__add__", "__sub__", "__mul__")

    def scalars(self, a, b, dtype):
        """Return two Python numbers of one scalar type; NotImplemented where the slow path must decide."""
        name = dtype.name
        if name in _INTEGERS:
            if "i" not in self.kinds:
                return NotImplemented
            value = self.python(a, b)
            return scalar(value, BOOL) if self.compares else scalar(_wrap_integer(value, name), dtype)
        if name == "fp32" and "f" in self.kinds:
            if self.fuses and context.launch.contracts:
                return NotImplemented  # the builder keeps products exact for sums
            value = self.python(a, b)
            return scalar(value, BOOL) if self.compares else scalar(float(np.float32(value)), dtype)
        if name == "int1" and "b" in self.kinds:
            return scalar(bool(self.python(a, b)), BOOL)
        return NotImplemented

    def arrays(self, x, y, dtype):
        name = dtype.name
        kind = "i" if name in _INTEGERS else "f" if name in _FLOATS else "b"
        launch = context.launch
        if kind not in self.kinds or launch.contracts and self.fuses and name == "fp32":
            return NotImplemented
        try:
            data = self.array(x, y)
        except ValueError:
            return NotImplemented
        if launch.charge:
            self._charge(x, y, data)
        if self.compares:
            count_lanes("compares", data)
            return make(data, BOOL)
        return make(dtypes.round_to(data, name) if name in _NARROW else data, dtype)

    def _charge(self, x, y, data):
        """Charge the time of one block operation; a * b + c is one instruction, charged with the product."""
        if (
            self.name in ("__add__", "__sub__")
            and context.launch.product is not None
            and (x is context.launch.product or y is context.launch.product)
        ):
            context.launch.product = None
            return
        context.launch.charge(self.unit, data.size)
        if self.name == "__mul__" and data.dtype == np.float32:
            context.launch.product = data


def _literal_for(value, dtype):
    """Return a Python number `value` as an operand next to one of `dtype`, or None where promotion or a range error is due."""
    name = dtype.name
    kind = type(value)
    if name in _INTEGERS:
        lo, hi = _INTEGERS[name]
        return value if kind is int and lo <= value <= hi else None
    if name in _FLOATS and (kind is float or kind is int and name not in _FP8):
        return _round_float(value, name) if name != "fp32" else value
    return None


def _binary(op):
    name = op.name

    def forward(self, other, _semantic=None):
        if context.launch.has_undefined and _any_undefined(self, other):
            return _through_semantic(name, self, other)
        return _dispatch(op, self, other, self, other, False)

    def backward(self, other, _semantic=None):
        if context.launch.has_undefined and _any_undefined(self, other):
            return _through_semantic(name, other, self)
        return _dispatch(op, other, self, self, other, True)

    forward.__name__, backward.__name__ = name, "__r" + name[2:]
    return forward, backward


def _dispatch(op, a, b, own, other, swapped):
    """Return a <op> b; `own` is the operand whose method was called, `other` the remaining one.

    What the fast ways do not take goes through Triton's semantic layer.
    """
    kind = type(other)
    if kind is tl.constexpr:
        other = other.value
        return _dispatch(op, other if swapped else a, b if swapped else other, own, other, swapped)
    result = NotImplemented
    if type(own.dtype) is _pointer_type:
        if op.name in ("__add__", "__sub__") and not (swapped and op.name == "__sub__"):
            result = offset_pointer(own, other, negative=op.name == "__sub__")
    elif kind is Scalar or kind is Tensor:
        result = _of_values(op, own, other, kind, swapped)
    elif kind is int or kind is float:
        result = _with_number(op, own, other, swapped)
    return _through_semantic(op.name, a, b) if result is NotImplemented else result


def _of_values(op, own, other, kind, swapped):
    """Return own <op> other of two values (`kind`: other's class), swapped if so; NotImplemented: by Triton's rules."""
    dtype = own.dtype
    if other.dtype is not dtype:
        dtype = _promoted(dtype.name, other.dtype.name) if op.unit != "div" else None
        if dtype is None:
            return NotImplemented
    if kind is Scalar and type(own) is Scalar:
        x, y = own.value, other.value
        if dtype is not own.dtype:
            x = _wrap_integer(x, dtype.name)
        if dtype is not other.dtype:
            y = _wrap_integer(y, dtype.name)
        return op.scalars(y, x, dtype) if swapped else op.scalars(x, y, dtype)
    held = held_dtype(dtype)
    x, y = own.data, other.data
    if x.dtype != held:
        x = x.astype(held)
    if y.dtype != held:
        y = y.astype(held)
    return op.arrays(y, x, dtype) if swapped else op.arrays(x, y, dtype)


def _with_number(op, own, number, swapped):
    """Return own <op> a Python number, the other way round if swapped; NotImplemented where promotion or a range error is due."""
    dtype = own.dtype
    value = _literal_for(number, dtype)
    if value is None:
        return NotImplemented
    if type(own) is Scalar:
        if dtype is FP32:
            value = float(np.float32(value))
        return op.scalars(value, own.value, dtype) if swapped else op.scalars(own.value, value, dtype)
    value = held_dtype(dtype).type(value)
    return op.arrays(value, own.data, dtype) if swapped else op.arrays(own.data, value, dtype)


def pointee_size(pointer):
    """Return bytes of what a pointer points to (a pointer takes 8)."""
    element = pointer.dtype.element_ty
    return 8 if type(element) is _pointer_type else max(1, element.primitive_bitwidth // 8)


def offset_pointer(pointer, offset, negative=False):
    """Return pointer ± offset elements; NotImplemented where the types must be refused."""
    size = pointee_size(pointer)
    if negative:
        size = -size
    kind = type(offset)
    if kind is int or (kind is Scalar and offset.dtype.name in _INTEGERS):
        step = (offset if kind is int else offset.value) * size
        if type(pointer) is Scalar:
            return scalar(pointer.value + step, pointer.dtype, pointer.allocation)
        return make(pointer.data + step, pointer.dtype, pointer.allocation)
    if kind is Tensor and offset.dtype.name in _INTEGERS:
        base = pointer.value if type(pointer) is Scalar else pointer.data
        try:
            data = base + (
                offset.data.astype(np.int64, copy=False) * size
                if size != 1
                else offset.data.astype(np.int64, copy=False)
            )
        except ValueError:
            return NotImplemented
        if context.launch.charge:
            context.launch.charge("int", data.size)
        return make(data, pointer.dtype, pointer.allocation)
    return NotImplemented


def truncated_division(a, b):
    """Divide Python ints as C does; by zero it gives -1, all ones, as the hardware does."""
    if b == 0:
        return -1
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncated_remainder(a, b):
    """Return C's remainder of Python ints (the sign of the dividend)."""
    if b == 0:
        return a
    return (abs(a) % abs(b)) * (-1 if a < 0 else 1)


def divide_arrays(x, y):
    """Divide arrays of integers as C does."""
    x, y = np.broadcast_arrays(x, y)
    quotient = np.floor_divide(x, y)
    if quotient.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * y != x)).astype(quotient.dtype)
    return np.where(y == 0, np.array(-1).astype(quotient.dtype), quotient)


def remainder_arrays(x, y):
    """Return C's remainder of arrays; np.fmod follows the dividend's sign as C does."""
    x, y = np.broadcast_arrays(x, y)
    return (
        np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y))) if x.dtype.kind in "iu" else np.fmod(x, y)
    )


def _float_division(a, b):
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


_OPERATORS = [
    _Operator("__add__", operator.add, np.add),
    _Operator("__sub__", operator.sub, np.subtract),
    _Operator("__mul__", operator.mul, np.multiply),
    _Operator("__floordiv__", truncated_division, divide_arrays, "i", unit="div"),
    _Operator("__mod__", truncated_remainder, remainder_arrays, "i", unit="div"),
    _Operator("__and__", operator.and_, np.bitwise_and, "ib"),
    _Operator("__or__", operator.or_, np.bitwise_or, "ib"),
    _Operator("__xor__", operator.xor, np.bitwise_xor, "ib"),
    _Operator("__lt__", operator.lt, np.less, compares=True),
    _Operator("__le__", operator.le, np.less_equal, compares=True),
    _Operator("__gt__", operator.gt, np.greater, compares=True),
    _Operator("__ge__", operator.ge, np.greater_equal, compares=True),
    _Operator("__eq__", operator.eq, np.equal, compares=True),
    _Operator("__ne__", operator.ne, np.not_equal, compares=True),
]
for _op in _OPERATORS:
    _forward, _backward = _binary(_op)
    setattr(Tensor, _op.name, _forward)
    if not _op.compares:
        setattr(Tensor, "__r" + _op.name[2:], _backward)


def _true_divide(self, other, _semantic=None):
    kind = type(other)
    if context.launch.has_undefined and _any_undefined(self, other):
        pass
    elif (
        self.dtype is FP32
        and (kind is Tensor or kind is Scalar)
        and other.dtype is FP32
        or self.dtype is FP32
        and kind in (int, float)
    ):
        return _divide_fp32(self, other)
    return _through_semantic("__truediv__", self, tl.core._unwrap_if_constexpr(other))


def _true_divide_reversed(self, other, _semantic=None):
    if self.dtype is FP32 and type(other) in (int, float) and self.undefined is None:
        return _divide_fp32(other, self)
    return _through_semantic("__truediv__", tl.core._unwrap_if_constexpr(other), self)


def _divide_fp32(a, b):
    x, y = (v.value if type(v) is Scalar else v.data if type(v) is Tensor else float(np.float32(v)) for v in (a, b))
    if type(x) is float and type(y) is float:
        return scalar(float(np.float32(_float_division(x, y))), FP32)
    try:
        data = np.divide(x, y, dtype=np.float32)
    except ValueError:
        return _through_semantic("__truediv__", a, b)
    if context.launch.charge:
        context.launch.charge("mufu", data.size)
    return make(data, FP32)


def _negate(self, _semantic=None):
    name = self.dtype.name
    if name in _FLOATS or name in _INTEGERS:
        if type(self) is Scalar:
            value = -self.value if name in _FLOATS else _wrap_integer(-self.value, name)
            return scalar(value, self.dtype, None, self.undefined)
        return make(-self.data, self.dtype, None, union(self.undefined))
    return fix(_slow("__neg__")(self, _semantic=Hooks.semantic))


def _invert(self, _semantic=None):
    if self.dtype is BOOL and self.undefined is None:
        return scalar(not self.value, BOOL) if type(self) is Scalar else make(~self.data, BOOL)
    return fix(_slow("__invert__")(self, _semantic=Hooks.semantic))


Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__neg__, Tensor.__invert__ = (
    _true_divide,
    _true_divide_reversed,
    _negate,
    _invert,
)
Tensor.__pos__ = lambda self, _semantic=None: self


def _reflected_shift(name):
    def shift(self, other, _semantic=None):
        return fix(_slow(name)(self, tl.core._unwrap_if_constexpr(other), _semantic=Hooks.semantic))

    return shift


for _name in ("__lshift__", "__rshift__", "__rlshift__", "__rrshift__", "logical_and", "logical_or"):
    setattr(Tensor, _name, _reflected_shift(_name))


def install_members(bind):
    """Give Tensor Triton's member functions (x.sum, x.reshape …); `bind(name, function)` makes them emulated ones."""
    own = set(vars(Tensor)) | set(vars(Scalar))
    for name in dir(tl.tensor):
        if name in own or name.startswith("__"):
            continue
        member = getattr(tl.tensor, name)
        emulated = bind(name, member)
        if emulated is not None:
            setattr(Tensor, name, lambda self, *args, _f=emulated, _semantic=None, **kw: _f(self, *args, **kw))
