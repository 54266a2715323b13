"""Numerics that numpy lacks or does otherwise than the GPU: exact high products, fused multiply-add, erf, tf32, scaled operands."""

import numpy as np
import torch

from .. import dtypes


def multiply_high(x, y):
    """Return upper half of the unsigned product."""
    bits = 8 * x.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"uint{2 * bits}")
        return ((x.astype(wide) * y.astype(wide)) >> bits).astype(x.dtype)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    low, middle = x0 * y0, x1 * y0
    first = (low >> half) + (middle & mask)
    second = x0 * y1 + first
    return x1 * y1 + (middle >> half) + (second >> half)


def fused_multiply_add(x, y, z):
    """Return x * y + z with one rounding: exact products of float32 fit float64."""
    if z.dtype == np.float32:
        return rounded_once(x.astype(np.float64) * y, z.astype(np.float64))
    return x * y + z


_DROPPED = np.int64((1 << 29) - 1)  # of a float64's fraction what float32 has no room for
_MIDDLE = np.int64(1 << 28)


def rounded_once(x, y):
    """Return x + y of float64 arrays, rounded to float32 once (results below float32's normal range may be rounded twice).

    Where the float64 sum lies in the middle of two float32 numbers it goes one step to where the exact sum is.
    """
    total = np.asarray(x + y)
    middle = total.view(np.int64) & _DROPPED == _MIDDLE
    if middle.any():
        part = total - x
        lost = (x - (total - part)) + (y - part)  # exactly what the float64 sum dropped
        total = np.where(middle & (lost != 0), np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(np.float32)


def erf(x):
    return torch.erf(torch.from_numpy(np.array(x))).numpy()


def float_to_integer(x, target):
    """Convert as C does, toward zero, saturating as the hardware's cvt does; NaN gives 0.

    For 8 bits there is no cvt: the compiler converts to 16 and takes the lower half.
    """
    if target.itemsize == 1:
        return float_to_integer(x, np.dtype(f"{target.kind}2")).astype(target)
    info = np.iinfo(target)
    wide = np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0.0, posinf=float(info.max), neginf=float(info.min))
    out = np.clip(wide, float(info.min), float(info.max))
    result = np.where(out >= float(info.max), info.max, np.where(out < float(info.max), out, 0).astype(target))
    return result.astype(target)


def to_tf32(x):
    """Drop the 13 low bits, as the tensor core does."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def matmul(a, b, a_name, b_name, precision=None):
    """Return a @ b of held arrays with float32 (float64, int32) accumulation; `precision` matters for float32 operands only."""
    if a.dtype.kind in "iu":
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)
    if a_name == "fp32" and b_name == "fp32" and (precision or "").upper() == "TF32":
        a, b = to_tf32(a), to_tf32(b)
    return np.matmul(a, b)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack_e2m1(packed, axis):
    """Return uint8 with two e2m1 values each (low nibble first) -> float32, twice as long along `axis`."""
    low, high = _E2M1[packed & 15], _E2M1[packed >> 4]
    axis %= packed.ndim
    joined = np.stack([low, high], axis=axis + 1)
    return joined.reshape(packed.shape[:axis] + (2 * packed.shape[axis],) + packed.shape[axis + 1 :])


def scale_values(scale):
    """Return E8M0 exponents (uint8, 2^(e-127), 255 = NaN) or held float scales -> float32."""
    if scale.dtype.kind in "iu":
        exponent = scale.view(np.uint8).astype(np.int32) - 127
        return np.where(exponent == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponent)).astype(np.float32)
    return scale


def descale(operand, scale, fmt, k_axis, pack_axis):
    """Return an operand of dot_scaled as a float32 matrix. `scale`: [rows (right operand: columns), K / group], or None."""
    fmt = fmt.lower()
    if fmt == "e2m1":
        values = unpack_e2m1(operand.view(np.uint8), pack_axis)
    elif operand.dtype.kind in "iu":
        values = dtypes.decode(operand.view(np.uint8), {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}[fmt])
    else:
        values = operand
    if scale is None or scale.data.size == 1 and scale.data.ndim == 0:
        return values
    factors = scale_values(scale.data)
    if k_axis == -2:
        factors = np.swapaxes(factors, -1, -2)
    group = values.shape[k_axis] // factors.shape[k_axis]
    return values * np.repeat(factors, group, axis=k_axis)


def leading_zeros(x):
    """Return number of leading zero bits of unsigned integers."""
    bits, x = 8 * x.dtype.itemsize, x.copy()
    count = np.full(x.shape, bits, np.int32)
    for shift in (32, 16, 8, 4, 2, 1):
        if shift < bits:
            upper = x >> x.dtype.type(shift)
            some = upper != 0
            count = np.where(some, count - shift, count)
            x = np.where(some, upper, x)
    return (count - (x != 0)).astype(np.int32)


def reverse_bits(x):
    """Reverse the bits of unsigned integers."""
    big = np.ascontiguousarray(x.astype(x.dtype.newbyteorder(">")))[..., None].view(np.uint8)
    flipped = np.packbits(np.unpackbits(big, axis=-1)[..., ::-1], axis=-1)
    return np.ascontiguousarray(flipped).view(x.dtype.newbyteorder(">"))[..., 0].astype(x.dtype)


# ---- libdevice, by symbol


def _fdim(x, y):
    return np.where(x > y, x - y, np.zeros_like(x))


def _torch1(name):
    function = getattr(torch.special, name, None) or getattr(torch, name)
    return lambda x: function(torch.from_numpy(np.array(x))).numpy()


def _normal_cdf_inverse(x):
    return torch.special.ndtri(torch.from_numpy(np.array(x))).numpy()


def _bits_as(target):
    return lambda x: np.ascontiguousarray(x).view(target)


LIBDEVICE = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2,
    "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * x), "erf": erf, "erfc": _torch1("erfc"), "erfcx": _torch1("erfcx"),
    "erfinv": _torch1("erfinv"), "exp": np.exp, "exp10": lambda x: np.power(x.dtype.type(10), x), "exp2": np.exp2,
    "expm1": np.expm1, "fabs": np.abs, "abs": np.abs, "llabs": np.abs, "fdim": _fdim, "floor": np.floor, "fma": fused_multiply_add,
    "fmax": np.fmax, "fmin": np.fmin, "fmod": np.fmod, "hypot": np.hypot, "isfinited": np.isfinite, "isinf": np.isinf,
    "isnan": np.isnan, "finitef": np.isfinite, "j0": _torch1("bessel_j0"), "j1": _torch1("bessel_j1"),
    "ldexp": np.ldexp, "lgamma": _torch1("gammaln"), "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2,
    "logb": lambda x: np.floor(np.log2(np.abs(x))), "max": np.maximum, "min": np.minimum, "llmax": np.maximum, "llmin": np.minimum,
    "umax": np.maximum, "umin": np.minimum, "nearbyint": np.rint, "rint": np.rint, "nextafter": np.nextafter,
    "normcdf": _torch1("ndtr"), "normcdfinv": _normal_cdf_inverse, "pow": np.power, "powi": np.power,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "remainder": lambda x, y: x - y * np.rint(x / y), "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "saturatef": lambda x: np.clip(x, 0, 1), "signbitf": np.signbit, "signbitd": np.signbit, "sin": np.sin, "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * x), "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh,
    "tgamma": lambda x: np.exp(_torch1("gammaln")(x)), "trunc": np.trunc, "y0": _torch1("bessel_y0"), "y1": _torch1("bessel_y1"),
    "cyl_bessel_i0": _torch1("i0"), "cyl_bessel_i1": _torch1("i1"), "fast_cosf": np.cos, "fast_sinf": np.sin, "fast_tanf": np.tan,
    "fast_expf": np.exp, "fast_exp10f": lambda x: np.power(np.float32(10), x), "fast_logf": np.log, "fast_log2f": np.log2,
    "fast_log10f": np.log10, "fast_powf": np.power, "fast_fdividef": np.divide, "fast_dividef": np.divide, "fast_tanhf": np.tanh,
    "clz": leading_zeros, "clzll": leading_zeros, "popc": np.bitwise_count, "popcll": np.bitwise_count, "brev": reverse_bits,
    "brevll": reverse_bits, "mulhi": lambda x, y: ((x.astype(np.int64) * y) >> 32).astype(np.int32), "umulhi": multiply_high,
    "umul64hi": multiply_high, "mul24": np.multiply, "umul24": np.multiply, "hadd": lambda x, y: (x & y) + ((x ^ y) >> 1),
    "sad": lambda x, y, z: np.abs(x - y) + z, "int_as_float": _bits_as(np.float32), "uint_as_float": _bits_as(np.float32),
    "float_as_int": _bits_as(np.int32), "float_as_uint": _bits_as(np.uint32), "double_as_longlong": _bits_as(np.int64),
    "longlong_as_double": _bits_as(np.float64), "ffs": lambda x: np.where(x == 0, 0, np.bitwise_count((x & -x) - 1) + 1),
}  # fmt: skip
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fadd": np.add, "fsub": np.subtract,
               "fmul": np.multiply, "fdiv": np.divide, "dadd": np.add, "dsub": np.subtract, "dmul": np.multiply, "ddiv": np.divide,
               "frcp": np.reciprocal, "drcp": np.reciprocal, "fsqrt": np.sqrt,
               "dsqrt": np.sqrt, "fmaf": fused_multiply_add}  # fmt: skip


def libdevice(symbol):
    """Return the numpy function of a libdevice symbol such as __nv_tanhf, or None."""
    name = symbol.removeprefix("__nv_")
    if name in LIBDEVICE:
        return LIBDEVICE[name]
    stem, _, mode = name.rpartition("_")
    if mode in ("rn", "rz", "rd", "ru") and stem in _ARITHMETIC:
        return _ARITHMETIC[stem]
    if name.endswith("f") and name[:-1] in LIBDEVICE:
        return LIBDEVICE[name[:-1]]
    if name in _CONVERSIONS:
        return _CONVERSIONS[name]
    return None


def _conversion(rounding, target):
    return lambda x: float_to_integer(rounding(x), np.dtype(target)) if x.dtype.kind == "f" else x.astype(target)


_ROUNDINGS = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_CONVERSIONS = {
    f"{source}2{short}_{mode}": _conversion(function, target)
    for source in ("float", "double")
    for short, target in (("int", "int32"), ("uint", "uint32"), ("ll", "int64"), ("ull", "uint64"))
    for mode, function in _ROUNDINGS.items()
} | {
    f"{source}2{short}_{mode}": (lambda x, t=target: x.astype(t))
    for source in ("int", "uint", "ll", "ull", "double")
    for short, target in (("float", "float32"), ("double", "float64"))
    for mode in _ROUNDINGS
}
_CONVERSIONS |= {"llrintf": _conversion(np.rint, "int64"), "llrint": _conversion(np.rint, "int64"),
                 "llroundf": _conversion(LIBDEVICE["round"], "int64"), "llround": _conversion(LIBDEVICE["round"], "int64"),
                 "ilogbf": _conversion(LIBDEVICE["logb"], "int32"), "ilogb": _conversion(LIBDEVICE["logb"], "int32")}  # fmt: skip
