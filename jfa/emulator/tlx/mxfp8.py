"""Quantizing blocks to MXFP8: fp8 values with one power-of-two scale (E8M0) per 32 along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .. import dtypes
from ..frontend import values
from .api import Value, api, integer, plain

_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


def scales_of(amax: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return exponents (uint8 E8M0) of amax / largest value, rounded up to a power of two, and the factors 2^(127 - e) that
    quantize."""
    ratio = np.asarray(amax, np.float32) * np.float32(1.0 / _LARGEST[name])
    mantissa, exponent = np.frexp(ratio.astype(np.float64))
    code = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    code = np.clip(np.where(ratio == 0, 0, code), 0, 254).astype(np.int64)
    code = np.where(np.isinf(ratio), 254, np.where(np.isnan(ratio), 255, code))
    inverse = ((254 - code).astype(np.int64) << 23).astype(np.uint32).view(np.float32)
    return code.astype(np.uint8), inverse


def quantise(
    block: np.ndarray, name: str, group: int = 32, amax: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 [M, K] -> (fp8 values as float32 [M, K], scales uint8 [M, K / group])."""
    m, k = block.shape
    split = block.reshape(m, k // group, group)
    amax = np.abs(split).max(axis=2) if amax is None else amax
    code, inverse = scales_of(amax, name)
    return dtypes.round_to((split * inverse[:, :, None]).reshape(m, k).astype(np.float32), name), code


@api
def _to_mxfp8_block(data_input: Value, VEC_SIZE: Value, dtype: Any) -> tuple[Value, Value]:
    """Return (fp8 data [M, K], E8M0 scales uint8 [M, K / 32]) of a float32 block."""
    dtype, size = plain(dtype), integer(VEC_SIZE)
    block = np.asarray(values.to_numpy(data_input), np.float32)
    assert size == 32, "VEC_SIZE must be 32"
    assert block.shape[1] % size == 0, "BLOCK_K must be a multiple of VEC_SIZE"
    data, code = quantise(block, dtype.name, size)
    return values.from_numpy(data, dtype), values.from_numpy(code, tl.uint8)
