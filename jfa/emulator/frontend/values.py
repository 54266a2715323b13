"""Convert values between the frontend and the emulated TLX: numpy arrays, Python numbers and Triton types."""

import numpy as np
import triton.language as tl

from .. import dtypes
from ..undefined import check
from .tensor import _TYPES, Scalar, Tensor, canonical, fix, marks_of
from .tensor import wrap as _wrap

_unwrap = tl.core._unwrap_if_constexpr


def to_numpy(x):
    """Return a value's array in held form."""
    x = fix(_unwrap(x))
    return x.data if isinstance(x, Tensor) else np.asarray(x)


def to_stored(x, name=None):
    """Return a value's array in stored form (of `name`: a type name, default the value's own)."""
    x = fix(_unwrap(x))
    return dtypes.encode(x.data, name or x.dtype.name)


def undefined(x):
    """Return a value's marks; None where all of it is defined."""
    return marks_of(fix(_unwrap(x)))


def from_numpy(array, dtype, undefined=None):
    """Return held array (and its marks) -> value of a Triton type."""
    return _wrap(array, canonical(dtype), undefined=undefined)


def from_stored(array, dtype, undefined=None):
    """Return stored array (and its marks) -> value of a Triton type."""
    return _wrap(dtypes.decode(array, dtype.name), canonical(dtype), undefined=undefined)


def scalar(x):
    """Return a constexpr, Scalar, one-element block or Python number as a Python number."""
    x = _unwrap(x)
    if isinstance(x, Tensor) and x.undefined is not None:
        check(x.undefined, "number")
    if isinstance(x, Scalar):
        return x.value
    if isinstance(x, Tensor):
        if x.data.size != 1:
            raise ValueError(f"expected a scalar, got {x.type}")
        return x.data.reshape(-1)[0].item()
    return x


def integer(x):
    return int(scalar(x))


def integers(values):
    values = _unwrap(values)
    return [int(scalar(v)) for v in values]


def make_scalar(value, dtype=tl.int32):
    from .tensor import scalar as new

    return new(value, canonical(dtype))


def dtype_name(dtype):
    """Return the short name of a Triton type, a constexpr of one, or a name."""
    dtype = _unwrap(dtype)
    return dtype if isinstance(dtype, str) else dtype.name


def triton_dtype(name):
    """Return Triton's type of a short name."""
    return _TYPES[name]


def is_block(x):
    return type(x) is Tensor
