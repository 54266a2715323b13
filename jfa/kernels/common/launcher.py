"""Launch a jit function again without going through Triton's argument binding.

Triton binds, classifies and hashes every argument of every launch, which takes 20 to 60 microseconds of Python. What machine code a
launch gets depends on little of that: the constexprs and options, fixed per :class:`Variant`, and what Triton specialises on
(types, multiples of 16, ones), which :func:`facts` reads. So a variant remembers the kernel that Triton compiled for the same
facts and hands it its arguments.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

INT32 = 2**31


class Variant:
    """A jit function with its constexprs and launch options.

    Args:
        kernel: a ``@triton.jit`` function whose constexprs follow its other parameters.
        options: a value for each constexpr, and launch options such as num_warps.
    """

    def __init__(self, kernel, **options):
        self.kernel, self.options = kernel, options
        self.compiled: dict[tuple, tuple] = {}
        names = [p.name for p in kernel.params if p.is_constexpr]
        if [p.name for p in kernel.params][-len(names) :] != names:
            raise ValueError(f"{kernel.__name__}: constexprs must follow the other parameters")
        self.constants = tuple(options[name] for name in names)
        self.specialised = tuple(not p.do_not_specialize for p in kernel.params if not p.is_constexpr)

    def launch(self, device: torch.device, grid: tuple[int, ...], *args) -> None:
        """Launch on ``grid`` with the arguments before the constexprs, on ``device``, which must be the current one."""
        if device.type != "cuda" or knobs.runtime.launch_enter_hook or knobs.runtime.launch_exit_hook:
            self.kernel[grid](*args, **self.options)  # the emulator; or a profiler that wants to see launches
            return
        key = (device.index, *facts(args, self.specialised))
        known = self.compiled.get(key)
        if known is None:
            compiled = self.kernel[grid](*args, **self.options)
            compiled = compiled.result() if hasattr(compiled, "result") else compiled
            if getattr(compiled, "function", None) is not None:
                self.compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata)
            return
        run, function, metadata = known
        x, y, z = (*grid, 1, 1)[:3]
        if x > 0:
            run(x, y, z, _stream(device.index), function, metadata, None, None, None, *args, *self.constants)


def facts(args: tuple, specialised: tuple[bool, ...]) -> list:
    """Return all that Triton's choice of machine code reads off ``args``, with the finest distinctions of any version."""
    return [_fact(x, special) for x, special in zip(args, specialised)]


def _fact(x, specialised: bool):
    kind = type(x)
    if kind is int:
        if not -INT32 <= x < INT32:
            return "64 bits"
        return (x == 1, x % 16 == 0) if specialised else None
    if kind is TensorDescriptor:
        return x.base.dtype, tuple(x.block_shape)
    if kind is float:
        return float
    if x is None or kind is bool:
        return x
    return x.dtype, x.data_ptr() % 16 == 0  # a tensor


@cache
def _driver():
    return triton.runtime.driver.active


def _stream(index: int) -> int:
    return _driver().get_current_stream(index)
