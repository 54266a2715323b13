"""Number formats, without Triton: how a value is held in arithmetic, how it is stored in memory, and how to convert
between the two.

A type is named by Triton's short name (``bf16``, ``fp8e4nv``, ``int32`` …). It has two numpy forms:

* *held*: what tensors carry and arithmetic uses. fp16, bf16 and the fp8 formats are float32 arrays whose every value is
  representable in the format; int1 is bool; all others are themselves. Elementwise work then runs at float32 speed, with
  one rounding per operation.
* *stored*: what lies in memory, bit for bit: fp16 as float16, bf16 as uint16, fp8 as uint8, int1 as uint8.

Conversions go through torch where it has the format, since its vectorized conversions are ten times as fast as numpy's.
"""

from functools import lru_cache

import numpy as np
import torch

_PLAIN = {f"{u}int{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)}
_PLAIN |= {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
_STORED = _PLAIN | {
    "int1": np.dtype(np.uint8),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "fp8e4nv": np.dtype(np.uint8),
    "fp8e5": np.dtype(np.uint8),
    "fp8e4b15": np.dtype(np.uint8),
    "fp8e4b8": np.dtype(np.uint8),
    "fp8e5b16": np.dtype(np.uint8),
}
_FLOAT32 = np.dtype(np.float32)
_HELD = {name: _PLAIN.get(name, _FLOAT32) for name in _STORED} | {"int1": np.dtype(np.bool_)}
_TORCH_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0, "fp8e4b8": 240.0, "fp8e5b16": 57344.0, "fp8e4b15": 1.75}

NARROW_FLOATS = frozenset(n for n in _STORED if n not in _PLAIN and n != "int1")


def stored(name):
    """Return the numpy dtype of `name` in memory."""
    return _STORED[name]


def held(name):
    """Return the numpy dtype of `name` in arithmetic."""
    return _HELD[name]


def itemsize(name):
    """Return bytes of one element in memory."""
    return _STORED[name].itemsize


def _contiguous(array):
    return array if array.flags.c_contiguous and array.flags.writeable else np.array(array)


@lru_cache(None)
def _fp8_table(name):
    """Return the 256 values of an fp8 format as float32."""
    codes = np.arange(256, dtype=np.uint8)
    if name in _TORCH_FP8:
        return torch.from_numpy(codes).view(_TORCH_FP8[name]).to(torch.float32).numpy()
    sign, exponent, mantissa = np.where(codes & 128, -1.0, 1.0), (codes >> 3) & 15, (codes & 7) / 8.0
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-14, (1.0 + mantissa) * np.exp2(exponent.astype(np.float64) - 15)
    )
    return (sign * magnitude).astype(np.float32)


def decode(array, name):
    """Return stored array -> held array, exactly."""
    if name in _PLAIN:
        return array
    if name == "fp16":
        return torch.from_numpy(_contiguous(array)).to(torch.float32).numpy()
    if name == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if name == "int1":
        return array != 0
    return np.take(_fp8_table(name), array)


def encode(array, name):
    """Return held array -> stored array: exact for held values, any other float32 is rounded to nearest even (fp8 saturates)."""
    if name in _PLAIN:
        return array
    if name == "int1":
        return array.astype(np.uint8)
    if name == "fp16":
        return torch.from_numpy(_contiguous(array)).to(torch.float16).numpy()
    if name == "bf16":
        return torch.from_numpy(_contiguous(array)).to(torch.bfloat16).view(torch.uint16).numpy()
    limit = _FP8_MAX[name]
    array = np.clip(array, -limit, limit)
    if name in _TORCH_FP8:
        return torch.from_numpy(_contiguous(array)).to(_TORCH_FP8[name]).view(torch.uint8).numpy()
    return _encode_by_table(array, name)


def _encode_by_table(array, name):
    """Return nearest code of a format that torch lacks; ties go to the even code."""
    positive = _fp8_table(name)[:128]
    magnitude = np.abs(array).astype(np.float64)
    upper = np.clip(np.searchsorted(positive, magnitude), 1, 127)
    below, above = magnitude - positive[upper - 1], positive[upper] - magnitude
    code = np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)
    return (code | np.where(np.signbit(array), 128, 0)).astype(np.uint8)


def round_to(array, name):
    """Return float32 (or float64) array -> held array of `name`, to nearest even. fp8 keeps no sign of a NaN: cvt's is 0x7F."""
    if name == "fp32":
        return array.astype(np.float32, copy=False)
    if name not in NARROW_FLOATS:
        return array.astype(_HELD[name], copy=False)
    if name == "bf16":
        return torch.from_numpy(_contiguous(array)).to(torch.bfloat16).to(torch.float32).numpy()
    if name == "fp16":
        return torch.from_numpy(_contiguous(array)).to(torch.float16).to(torch.float32).numpy()
    array = array.astype(np.float32, copy=False)
    return decode(encode(np.where(np.isnan(array), np.float32(np.nan), array), name), name)


def round_toward_zero(array, name):
    """Return float32 array -> held array of `name`, truncating."""
    if name == "bf16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    code = np.array(encode(array, name))
    too_large = np.abs(decode(code, name)) > np.abs(array)
    bits = code.view(f"uint{8 * code.itemsize}")
    bits[too_large] -= 1
    return decode(bits.view(code.dtype), name)


def bits_of(array, name):
    """Return held array -> unsigned integers with the bit pattern of the stored form (for bitcasts)."""
    code = np.ascontiguousarray(encode(array, name))
    return code.view(f"uint{8 * code.itemsize}")


def from_bits(bits, name):
    """Return unsigned bit patterns -> held array of `name`; the widths must agree."""
    return decode(np.ascontiguousarray(bits).view(_STORED[name]), name)
