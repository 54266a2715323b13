"""The builder behind Triton's semantic layer: every `create_…` computes with numpy instead of emitting IR.

Operands and results are `Tensor`/`Scalar` (they are their own handles). As in LLVM, integer types have no signedness
here: an operation that depends on it first views its operands as signed or unsigned; the semantic layer determines the
result's type.

Marks of undefined lanes go from operands to results as `carry` says: lane by lane in arithmetic, along with the lanes in operations
that move them.
"""

import numpy as np
import triton.language as tl

from .. import dtypes
from ..context import context
from ..counting import Active, count_lanes
from ..errors import DeviceAssertError, NotSupported
from ..locations import here, show
from ..undefined import check, conjunction, everywhere, reduced, some, union
from . import carry, contraction, mathlib, ptx
from .own_stores import ordered
from .tensor import (
    BOOL,
    INT32,
    Scalar,
    canonical,
    divide_arrays,
    held_dtype,
    make,
    pointee_size,
    remainder_arrays,
    scalar,
    wrap,
)

_SIGNED = {np.dtype(f"uint{n}"): np.dtype(f"int{n}") for n in (8, 16, 32, 64)}
_UNSIGNED = {s: u for u, s in _SIGNED.items()}


def _signed(array):
    target = _SIGNED.get(array.dtype)
    return array if target is None else array.view(target)


def _unsigned(array):
    target = _UNSIGNED.get(array.dtype)
    return array if target is None else array.view(target)


def _exchange():
    if context.launch.exchange is not None:
        context.launch.exchange()


def _charge(kind, data):
    if context.launch.charge and kind != "none" and getattr(data, "size", 1) > 1:
        context.launch.charge(kind, data.size)


def _result(data, dtype, kind="alu"):
    """Return a numpy result as a value of `dtype`, rounded to it and charged."""
    _charge(kind, data)
    name = dtype.name
    if name in dtypes.NARROW_FLOATS:
        data = dtypes.round_to(np.asarray(data), name)
    elif type(dtype) is not tl.pointer_type:
        data = np.asarray(data).astype(held_dtype(dtype), copy=False)
    return wrap(data, dtype)


def _arithmetic(function, view=None, unit="alu"):
    @carry.carries(carry.lanewise)
    def create(self, a, b):
        x, y = (a.data, b.data) if view is None else (view(a.data), view(b.data))
        data = function(x, y)
        if a.dtype.name not in dtypes.NARROW_FLOATS and data.dtype != held_dtype(a.dtype):
            data = data.view(held_dtype(a.dtype)) if data.dtype.itemsize == held_dtype(a.dtype).itemsize else data
        return _result(data, a.dtype, unit)

    return create


def _sum(function, negative):
    """Return fadd or fsub: in a launch that contracts, one rounding of what a product adds to or is subtracted from."""
    separate = _arithmetic(function)

    @carry.carries(carry.lanewise)
    def create(self, a, b):
        if a.exact is None and b.exact is None:
            return separate(self, a, b)
        return _result(contraction.added(a, b, negative), a.dtype, "none")  # its time is the product's

    return create


_rounded_product = _arithmetic(np.multiply)


@carry.carries(carry.lanewise)
def _product(self, a, b):
    """Multiply; in a launch that contracts an fp32 product keeps its exact value."""
    product = _rounded_product(self, a, b)
    if context.launch.contracts and product.dtype.name == "fp32":
        product.exact = contraction.exact_product(a, b)
    return product


def _comparison(function, view=None):
    @carry.carries(carry.lanewise)
    def create(self, a, b):
        x, y = (a.data, b.data) if view is None else (view(a.data), view(b.data))
        data = function(x, y)
        _charge("alu", data)
        count_lanes("compares", data)
        return wrap(data, BOOL)

    return create


def _unordered(function):
    return lambda x, y: function(x, y) | np.isnan(x) | np.isnan(y)


def _unary(function, unit="alu", counted=""):
    @carry.carries(carry.lanewise)
    def create(self, a):
        if counted:
            count_lanes(counted, a.data)
        return _result(function(a.data), a.dtype, unit)

    return create


def _absorbing(function, value):
    """Return an `and` or `or`: a lane of zeros (`value` 0) or of ones (-1) decides whatever the other operand has."""

    def rule(_, operands, result):
        _, a, b = operands
        x, y = a.data, b.data
        absorbing = np.array(value).astype(x.dtype)
        return conjunction(x, a.undefined, y, b.undefined, absorbing)

    create = _arithmetic(function)
    create.carries = rule
    return create


def _bool_aware(function, on_bool):
    return lambda x, y: on_bool(x, y) if x.dtype == np.bool_ else function(x, y)


def _shift(function, view):
    def shift(x, y):
        bits = 8 * x.dtype.itemsize
        amount = np.minimum(_unsigned(y), bits - 1).astype(y.dtype)
        shifted = function(view(x), view(amount))
        overflow = _unsigned(y) >= bits
        if view is _unsigned:
            return np.where(overflow, shifted.dtype.type(0), shifted)
        return shifted

    return shift


def _min_num(x, y):
    return np.fmin(x, y)


def _max_num(x, y):
    return np.fmax(x, y)


class Options:
    """The compile options that the semantic layer reads, as for an sm_100 build."""

    debug = False
    sanitize_overflow = False
    arch = "sm100"
    supported_fp8_dtypes = ("fp8e4b15", "fp8e4nv", "fp8e5")
    deprecated_fp8_dot_operand_dtypes = ()
    default_dot_input_precision = "tf32"
    allowed_dot_input_precisions = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default = 0
    backend_name = "cuda"
    num_ctas = 1
    extern_libs = ()
    ctas_per_cga = None

    @property
    def num_warps(self):
        return context.launch.num_warps


def _min_dot_size(lhs, rhs):
    """Return the smallest (M, N, K) that the NVIDIA back end takes."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size

    return min_dot_size(GPUTarget("cuda", 100, 32))(lhs, rhs)


def _convert_custom_types(value, dst_type, fp_downcast_rounding=None, _semantic=None):
    return _semantic.builder.create_fp_to_fp(value, dst_type, fp_downcast_rounding)


def _scaled_marks(operand, scale, extent, k_axis):
    """Return marks of the rows (right operand: columns) of a scaled operand: one of its lanes or scales is undefined."""
    marks, kept = reduced(operand.undefined, k_axis, True), -3 - k_axis
    if marks is not None:
        marks = np.repeat(marks, extent // marks.shape[kept], kept)  # fp4 may be packed along this axis
    scales = reduced(getattr(scale, "undefined", None), -1, True) if getattr(scale, "shape", ()) else None
    return union(marks, scales if scales is None or k_axis == -1 else np.swapaxes(scales, -1, -2))


@carry.carrying_builder
class Builder:
    """Computes what Triton's IR builder would emit."""

    def __init__(self):
        self.options = Options()
        self.module_map = {}
        self.codegen_fns = {"convert_custom_types": _convert_custom_types, "min_dot_size": _min_dot_size}

    # ---- types: Triton's own type objects stand for themselves

    def get_block_ty(self, dtype, shape):
        return tl.block_type(dtype, list(shape))

    def get_ptr_ty(self, dtype, address_space=1):
        return tl.pointer_type(dtype, address_space)

    def __getattr__(self, name):
        if name.startswith("get_") and name.endswith("_ty"):
            short = {"half": "fp16", "float": "fp32", "double": "fp64"}.get(name[4:-3], name[4:-3])
            return lambda: tl.void if short == "void" else tl.dtype(short)
        if name.startswith("create_"):
            raise NotSupported(f"the emulator does not model `{name[7:]}`", [f"at {show(here())}"], where=here())
        raise AttributeError(name)

    # ---- constants

    def get_int1(self, value):
        return scalar(bool(value), BOOL)

    def get_int32(self, value):
        return scalar(int(value), INT32)

    def get_int64(self, value):
        return scalar(int(value), tl.int64)

    def get_fp16(self, value):
        return scalar(float(np.float16(value)), tl.float16)

    def get_fp32(self, value):
        return scalar(float(np.float32(value)), tl.float32)

    def get_fp64(self, value):
        return scalar(float(value), tl.float64)

    def get_null_value(self, dtype):
        data = np.zeros(list(dtype.shape) if dtype.is_block() else (), held_dtype(dtype.scalar))
        return wrap(data, canonical(dtype.scalar))

    def get_all_ones_value(self, dtype):
        held = held_dtype(dtype.scalar)
        return scalar(True, BOOL) if held == np.bool_ else wrap(np.array(-1).astype(held), canonical(dtype.scalar))

    def get_int32_attr(self, value):
        return value

    get_string_attr = get_bool_attr = get_int32_attr

    # ---- programs

    @carry.carries(carry.itself)
    def create_get_program_id(self, axis):
        return scalar(context.launch.task.cta.pid[axis], INT32)

    @carry.carries(carry.itself)
    def create_get_num_programs(self, axis):
        return scalar(context.launch.task.cta.grid[axis], INT32)

    # ---- arithmetic

    create_fadd, create_fsub, create_fmul = _sum(np.add, False), _sum(np.subtract, True), _product
    create_fdiv = create_precise_divf = create_approx_divf = _arithmetic(np.divide, unit="mufu")
    create_frem = _arithmetic(np.fmod)
    create_add = _arithmetic(_bool_aware(np.add, np.logical_xor))
    create_sub = _arithmetic(_bool_aware(np.subtract, np.logical_xor))
    create_mul = _arithmetic(_bool_aware(np.multiply, np.logical_and))
    create_sdiv = _arithmetic(divide_arrays, _signed)
    create_udiv = _arithmetic(divide_arrays, _unsigned)
    create_srem = _arithmetic(remainder_arrays, _signed)
    create_urem = _arithmetic(remainder_arrays, _unsigned)
    create_minimumf, create_maximumf = _arithmetic(np.minimum), _arithmetic(np.maximum)
    create_minnumf, create_maxnumf = _arithmetic(_min_num), _arithmetic(_max_num)
    create_minsi, create_maxsi = _arithmetic(np.minimum, _signed), _arithmetic(np.maximum, _signed)
    create_minui, create_maxui = _arithmetic(np.minimum, _unsigned), _arithmetic(np.maximum, _unsigned)
    create_and = _absorbing(np.bitwise_and, 0)
    create_or = _absorbing(np.bitwise_or, -1)
    create_xor = _arithmetic(np.bitwise_xor)
    create_shl = _arithmetic(_shift(np.left_shift, _unsigned))
    create_lshr = _arithmetic(_shift(np.right_shift, _unsigned))
    create_ashr = _arithmetic(_shift(np.right_shift, _signed))
    create_umulhi = _arithmetic(mathlib.multiply_high, _unsigned)

    create_fcmpOLT, create_fcmpOLE = _comparison(np.less), _comparison(np.less_equal)
    create_fcmpOGT, create_fcmpOGE = _comparison(np.greater), _comparison(np.greater_equal)
    create_fcmpOEQ, create_fcmpUNE = _comparison(np.equal), _comparison(np.not_equal)
    create_fcmpULT, create_fcmpULE = _comparison(_unordered(np.less)), _comparison(_unordered(np.less_equal))
    create_fcmpUGT, create_fcmpUGE = _comparison(_unordered(np.greater)), _comparison(_unordered(np.greater_equal))
    create_icmpEQ, create_icmpNE = _comparison(np.equal, _unsigned), _comparison(np.not_equal, _unsigned)
    create_icmpSLT, create_icmpSLE = _comparison(np.less, _signed), _comparison(np.less_equal, _signed)
    create_icmpSGT, create_icmpSGE = _comparison(np.greater, _signed), _comparison(np.greater_equal, _signed)
    create_icmpULT, create_icmpULE = _comparison(np.less, _unsigned), _comparison(np.less_equal, _unsigned)
    create_icmpUGT, create_icmpUGE = _comparison(np.greater, _unsigned), _comparison(np.greater_equal, _unsigned)

    create_fneg, create_fabs = _unary(np.negative), _unary(np.abs)
    create_iabs = _unary(lambda x: np.abs(_signed(x)))
    create_floor, create_ceil = _unary(np.floor), _unary(np.ceil)
    create_exp, create_exp2 = (_unary(function, "mufu", "exponentials") for function in (np.exp, np.exp2))
    create_log, create_log2 = _unary(np.log, "mufu"), _unary(np.log2, "mufu")
    create_sin, create_cos = _unary(np.sin, "mufu"), _unary(np.cos, "mufu")
    create_sqrt = create_precise_sqrt = _unary(np.sqrt, "mufu")
    create_rsqrt = _unary(lambda x: (1 / np.sqrt(x)).astype(x.dtype), "mufu")
    create_erf = _unary(mathlib.erf, "mufu")

    @carry.carries(carry.lanewise)
    def create_fma(self, a, b, c):
        if not a.dtype.is_floating():
            raise TypeError(f"tl.fma takes floating-point values, not {a.dtype}: write a * b + c")
        return _result(mathlib.fused_multiply_add(a.data, b.data, c.data), a.dtype)

    @carry.carries(carry.lanewise)
    def create_clampf(self, value, low, high, propagate_nan):
        keep = str(getattr(propagate_nan, "name", propagate_nan)) == "ALL"
        lower, upper = (np.maximum, np.minimum) if keep else (np.fmax, np.fmin)
        return _result(upper(lower(value.data, low.data), high.data), value.dtype)

    @carry.carries(carry.chosen)
    def create_select(self, condition, a, b):
        data = np.where(condition.data, a.data, b.data)
        _charge("alu", data)
        count_lanes("selects", data)
        return wrap(data, a.dtype, a.allocation or b.allocation)

    # ---- casts

    @carry.carries(carry.lanewise)
    def create_fp_to_fp(self, a, dst, rounding=None):
        dtype = canonical(dst.scalar)
        _charge("cvt", a.data)
        mode = str(getattr(rounding, "name", rounding))
        if mode == "RTZ":
            return wrap(dtypes.round_toward_zero(np.asarray(a.data, np.float32), dtype.name), dtype)
        return wrap(dtypes.round_to(np.asarray(a.data), dtype.name), dtype)

    @carry.carries(carry.lanewise)
    def create_fp_trunc(self, a, dst):
        return self.create_fp_to_fp(a, dst)

    create_fp_ext = create_fp_trunc

    @carry.carries(carry.lanewise)
    def create_int_cast(self, a, dst, is_signed):
        dtype = canonical(dst.scalar)
        data = (
            a.data
            if a.data.dtype == np.bool_ and not is_signed
            else _signed(a.data)
            if is_signed
            else _unsigned(a.data)
        )
        if dtype.name == "int1":
            return wrap((data & 1).astype(np.bool_), dtype)
        if data.dtype == np.bool_ and is_signed:
            data = -data.astype(np.int8)
        return wrap(data.astype(held_dtype(dtype)), dtype)

    @carry.carries(carry.lanewise)
    def create_si_to_fp(self, a, dst):
        return _result(
            _signed(a.data).astype(np.float64 if a.data.dtype.itemsize > 2 else np.float32),
            canonical(dst.scalar),
            "cvt",
        )

    @carry.carries(carry.lanewise)
    def create_ui_to_fp(self, a, dst):
        return _result(
            _unsigned(a.data).astype(np.float64 if a.data.dtype.itemsize > 2 else np.float32),
            canonical(dst.scalar),
            "cvt",
        )

    @carry.carries(carry.lanewise)
    def create_fp_to_si(self, a, dst):
        dtype = canonical(dst.scalar)
        _charge("cvt", a.data)
        return wrap(mathlib.float_to_integer(a.data, held_dtype(dtype)), dtype)

    @carry.carries(carry.lanewise)
    def create_fp_to_ui(self, a, dst):
        dtype = canonical(dst.scalar)  # the builder's types have no sign
        _charge("cvt", a.data)
        held = held_dtype(dtype)
        data = mathlib.float_to_integer(a.data, _UNSIGNED.get(held, held))
        return wrap(data.view(held), dtype)

    @carry.carries(carry.lanewise)
    def create_bitcast(self, a, dst):
        dtype = dst.scalar
        if dtype.is_ptr() or a.dtype.is_ptr():
            return wrap(a.data, dtype, a.allocation)
        bits = dtypes.bits_of(np.atleast_1d(a.data), a.dtype.name)
        return wrap(dtypes.from_bits(bits, dtype.name).reshape(a.data.shape), canonical(dtype))

    @carry.carries(carry.lanewise)
    def create_ptr_to_int(self, a, dst):
        return wrap(a.data.astype(np.int64), canonical(dst.scalar), a.allocation)

    @carry.carries(carry.lanewise)
    def create_int_to_ptr(self, a, dst):
        if a.dtype.primitive_bitwidth != 64:
            raise TypeError(f"a pointer is made of a 64-bit integer, not of {a.dtype}: add .to(tl.int64)")
        addresses = a.data.astype(np.int64)
        return wrap(addresses, dst.scalar, self.origin(addresses))

    def origin(self, addresses):
        """Find the tensor that pointers made from integers point into; None if there is none, or more than one."""
        return None

    # ---- shapes

    @carry.carries(carry.itself)
    def create_make_range(self, dst, start, stop):
        return make(np.arange(start, stop, dtype=np.int32), INT32)

    @carry.carries(carry.moved)
    def create_splat(self, dst, a):
        same = dst.scalar.name.removeprefix("u") == a.dtype.name.removeprefix("u")
        if not (same or a.dtype.is_ptr() or a.dtype is tl.uint16):  # uint16: marks, see carry.moved
            raise TypeError(
                f"a block of {dst.scalar} cannot be filled with {a.dtype}"
            )  # zeros of a product of another type
        return make(np.full(list(dst.shape), a.data, a.data.dtype), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_unsplat(self, a):
        return wrap(a.data.reshape(()), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_broadcast(self, a, shape):
        return make(np.broadcast_to(a.data, [int(s) for s in shape]), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_expand_dims(self, a, axis):
        return make(np.expand_dims(a.data, axis), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_reshape(self, a, shape, allow_reorder=False):
        _exchange()
        return make(a.data.reshape([int(s) for s in shape]), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_trans(self, a, dims):
        _exchange()
        return make(a.data.transpose([int(getattr(d, "value", d)) for d in dims]), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_cat(self, a, b):
        _exchange()
        return make(np.concatenate([a.data, b.data]), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_join(self, a, b):
        if a.dtype.name != b.dtype.name:
            raise TypeError(f"tl.join and tl.interleave take values of one type, not {a.dtype} and {b.dtype}")
        _exchange()
        return make(np.stack([a.data, b.data], axis=-1), a.dtype, a.allocation)

    @carry.carries(carry.moved)
    def create_split(self, a):
        _exchange()
        return make(a.data[..., 0], a.dtype, a.allocation), make(a.data[..., 1], a.dtype, a.allocation)

    @carry.carries(carry.itself)
    def create_gather(self, source, index, axis):
        ordered()
        _exchange()
        bound, at, lost = source.data.shape[axis], index.data.astype(np.int64), some(index.undefined)
        if lost is not None:
            at = np.where(lost, 0, at)
        if ((at < 0) | (at >= bound)).any():
            raise IndexError(f"tl.gather: an index lies outside 0 … {bound - 1}")
        marks = union(lost, None if source.undefined is None else np.take_along_axis(source.undefined, at, axis))
        return make(np.take_along_axis(source.data, at, axis), source.dtype, undefined=marks)

    @carry.carries(carry.itself)
    def create_histogram(self, a, bins, mask=None):
        ordered()
        _exchange()
        data = a.data if mask is None else a.data[mask.data]
        data = data[(data >= 0) & (data < bins)]
        marks = a.undefined if mask is None or a.undefined is None else a.undefined[mask.data]
        if mask is not None:
            marks = union(everywhere(marks), everywhere(mask.undefined))
        counts = np.bincount(data.astype(np.int64), minlength=bins)[:bins].astype(np.int32)
        return make(counts, INT32, undefined=everywhere(marks, counts.shape))

    # ---- pointers and memory: see access.py, which subclasses this

    @carry.carries(carry.lanewise)
    def create_addptr(self, pointer, offset):
        return wrap(
            pointer.data + offset.data.astype(np.int64) * pointee_size(pointer), pointer.dtype, pointer.allocation
        )

    # ---- matrix products

    @carry.carries(carry.multiplied)
    def create_dot(self, a, b, acc, input_precision=None, *_):
        ordered()
        _exchange()
        if Active.counts is not None:
            Active.counts.dots += 1
        product = mathlib.matmul(
            a.data, b.data, a.dtype.name, b.dtype.name, str(getattr(input_precision, "name", input_precision))
        )
        if context.launch.charge:
            context.launch.charge("dot", product.size * a.data.shape[-1])
        if acc.data.dtype.kind in "iu":
            return wrap(acc.data + product.astype(acc.data.dtype), acc.dtype)
        return _result(acc.data + product, acc.dtype, "none")

    @carry.carries(carry.itself)
    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_k_pack, b_k_pack, acc):
        ordered()
        if Active.counts is not None:
            Active.counts.dots += 1
        left = mathlib.descale(a.data, a_scale, str(getattr(a_format, "name", a_format)), -1, -1 if a_k_pack else -2)
        right = mathlib.descale(b.data, b_scale, str(getattr(b_format, "name", b_format)), -2, -2 if b_k_pack else -1)
        if context.launch.charge:
            context.launch.charge("dot", acc.data.size * left.shape[-1])
        result = _result(acc.data + left @ right, acc.dtype, "none")
        if context.launch.has_undefined:
            rows = _scaled_marks(a, a_scale, left.shape[-2], -1)
            columns = _scaled_marks(b, b_scale, right.shape[-1], -2)
            carry.put(result, union(acc.undefined, rows, columns))
        return result

    # ---- inline assembly and libdevice

    @carry.carries(carry.itself)
    def create_inline_asm(self, asm, constraints, arguments, types, is_pure, pack):
        return ptx.evaluate(asm, constraints, [a.handle for a in arguments], types, pack)

    @carry.carries(carry.lanewise)
    def create_extern_elementwise(self, lib_name, lib_path, symbol, arguments, return_type, is_pure):
        function = mathlib.libdevice(symbol)
        if function is None:
            raise NotSupported(f"the library function `{symbol}` is not modelled", [f"at {show(here())}"], where=here())
        return _result(function(*[a.data for a in arguments]), canonical(return_type.scalar), "mufu")

    # ---- debugging

    @carry.carries(carry.itself)
    def create_barrier(self):
        ordered()
        _exchange()

    @carry.carries(carry.itself)
    def create_assert(self, condition, message):
        if not check(condition.undefined, "assert") and not condition.data.all():
            raise DeviceAssertError(
                f"device assert failed: {message or 'the condition is false'}", [f"at {show(here())}"], where=here()
            )

    @carry.carries(carry.itself)
    def create_assume(self, condition):
        if not check(condition.undefined, "assert") and not condition.data.all():
            raise DeviceAssertError(
                "tl.assume of something false", [f"at {show(here())}"], "the compiler builds on it.", here()
            )

    @carry.carries(carry.itself)
    def create_print(self, prefix, hexadecimal, values, is_signed):
        formatter = {"int_kind": lambda v: hex(int(v))} if hexadecimal else None
        for value in values or [None]:
            if isinstance(value, Scalar):
                text = hex(value.value) if hexadecimal else str(value.value)
            else:
                text = "" if value is None else np.array2string(value.data, formatter=formatter, threshold=64)
            print(f"pid {tuple(context.launch.task.cta.pid)}{prefix}{text}")
