"""Numerics that numpy lacks or does otherwise than the GPU: exact high products, fused multiply-add, erf, tf32, scaled operands."""

import numpy as np
import torch

from .. import dtypes


def multiply_high(x, y):
    """Upper half of the unsigned product."""
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
    """x * y + z with one rounding: exact products of float32 fit float64."""
    if z.dtype == np.float32:
        return (x.astype(np.float64) * y + z).astype(np.float32)
    return x * y + z


def erf(x):
    return torch.erf(torch.from_numpy(np.array(x))).numpy()


def float_to_integer(x, target):
    """C's conversion toward zero, saturating as the hardware's cvt does; NaN gives 0."""
    info = np.iinfo(target)
    wide = np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0.0, posinf=float(info.max), neginf=float(info.min))
    out = np.clip(wide, float(info.min), float(info.max))
    result = np.where(out >= float(info.max), info.max, np.where(out < float(info.max), out, 0).astype(target))
    return result.astype(target)


def to_tf32(x):
    """Drop the 13 low bits, as the tensor core does."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def matmul(a, b, a_name, b_name, precision=None):
    """a @ b of held arrays with float32 (float64, int32) accumulation; `precision` matters for float32 operands only."""
    if a.dtype.kind in "iu":
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)
    if a_name == "fp32" and b_name == "fp32" and (precision or "").upper() == "TF32":
        a, b = to_tf32(a), to_tf32(b)
    return np.matmul(a, b)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack_e2m1(packed, axis):
    """uint8 with two e2m1 values each (low nibble first) -> float32, twice as long along `axis`."""
    low, high = _E2M1[packed & 15], _E2M1[packed >> 4]
    axis %= packed.ndim
    joined = np.stack([low, high], axis=axis + 1)
    return joined.reshape(packed.shape[:axis] + (2 * packed.shape[axis],) + packed.shape[axis + 1 :])


def scale_values(scale):
    """E8M0 exponents (uint8, 2^(e-127), 255 = NaN) or held float scales -> float32."""
    if scale.dtype.kind in "iu":
        exponent = scale.view(np.uint8).astype(np.int32) - 127
        return np.where(exponent == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponent)).astype(np.float32)
    return scale


def descale(operand, scale, fmt, k_axis, pack_axis):
    """The float32 matrix that an operand of dot_scaled means. `scale`: [rows (right operand: columns), K / group], or None."""
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
