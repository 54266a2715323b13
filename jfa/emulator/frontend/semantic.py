"""Triton's semantic layer on our builder: promotion, broadcasting and refusals stay Triton's own.

`Semantic` is the adapter: it overrides what differs between fbtriton 3.7, Triton 3.8 and 3.9 (`make_tensor`, dot's
extra argument, native helpers that need IR handles) and leaves everything else to the installed version.
"""

import triton.language as tl
from triton.language.semantic import TritonSemantic

from .access import MemoryBuilder
from .tensor import Hooks, Scalar, Tensor, canonical, fix, scalar


class Semantic(TritonSemantic):
    """`TritonSemantic` on the emulator's tensors."""

    tensor = Tensor

    def make_tensor(self, handle, type):
        return Tensor(handle, type)

    def to_tensor(self, x, check_type=True):
        if isinstance(x, tl.tensor):
            return fix(x)
        if isinstance(x, tl.constexpr) and isinstance(x.value, tl.tensor):
            raise TypeError(
                f"cannot convert {x.value} under the annotation tl.constexpr to tensor: leave the annotation out"
            )
        return super().to_tensor(x, check_type)

    def scalar_constant(self, value, dtype):
        return full_value(value, dtype)

    def deduce_scale_factor(self, lhs, lhs_scale, lhs_format, lhs_k_pack, rhs, rhs_scale, rhs_format, rhs_k_pack):
        """Return elements of the reduction axis per scale: read off the scales' shape."""
        for operand, scale, fmt, packed, axis in (
            (lhs, lhs_scale, lhs_format, lhs_k_pack, -1),
            (rhs, rhs_scale, rhs_format, rhs_k_pack, -2),
        ):
            scale = tl.core._unwrap_if_constexpr(scale)
            if isinstance(scale, Tensor) and not isinstance(scale, Scalar):
                twice = 2 if tl.core._unwrap_if_constexpr(fmt) == "e2m1" and packed else 1
                return operand.data.shape[axis] * twice // scale.data.shape[-1]
        return 32

    def device_assert(self, cond, msg, mask=None):
        if mask is not None:
            cond = self.or_(cond, self.not_(mask))
        return self.builder.create_assert(cond, msg)

    def device_print(self, prefix, args, hex):
        prefix = f" {prefix.strip()} " if prefix.strip() else " "
        self.builder.create_print(prefix, hex, [fix(a) for a in args], None)

    def hint(self, x, values):
        return x

    multiple_of = max_contiguous = max_constancy = hint


def full_value(value, dtype):
    """Return a Python number as a Scalar of a given type, wrapped or rounded as a constant of that type is."""
    dtype = canonical(dtype)
    if dtype.name == "int1":
        return scalar(bool(value), dtype)
    if dtype.is_int():
        bits = dtype.int_bitwidth
        value = int(value) & ((1 << bits) - 1)
        if dtype.is_int_signed() and value >> (bits - 1):
            value -= 1 << bits
        return scalar(value, dtype)
    if dtype.is_floating():
        from .tensor import _round_float

        return scalar(_round_float(value, dtype.name), dtype)
    return scalar(int(value), dtype)


BUILDER = MemoryBuilder()
SEMANTIC = Semantic(BUILDER)
Hooks.semantic = SEMANTIC
