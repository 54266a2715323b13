"""Run a call's complete host path without a GPU: launches do nothing.

Tensors lie in the CPU's memory; checks whether they are on a GPU are made to pass. The driver is replaced by one that
derives a kernel's parameters from its arguments' types, and whose launch is a C function that returns 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.attention import op, prepared
from jfa.kernels.common import driver as cuda
from jfa.kernels.common import launcher, packet

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}
_SIZES = {"i32": 4, "i64": 8, "fp32": 4}
FIRST_OFFSET = 48  # the driver's offsets do not begin at 0


class StubDriver(cuda.Driver):
    """Stand-in for the machine's driver.

    Args:
        launch: takes (config, function, table, None) as ``cuLaunchKernelEx``.
        fill: takes (address, word, words, stream) as ``cuMemsetD32Async``.
    """

    def __init__(self, launch: Callable, fill: Callable):
        self.launch, self.fill = launch, fill
        self.compiled: list[SimpleNamespace] = []

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """Return (offset, size) of each parameter, at multiples of its size, then two scratch pointers."""
        found, at = [], FIRST_OFFSET
        for size in [*self.compiled[function - 1].sizes, 8, 8]:
            at = -(-at // min(size, 64)) * min(size, 64)
            found.append((at, size))
            at += size
        return found

    def make_current(self, index: int) -> None:
        """Do nothing: there are no contexts."""

    def forget(self) -> None:
        """Let no variant keep what this driver made."""
        for made in self.compiled:
            made.variant.compiled.clear()

    def replace_address(self, box: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        """Write the first word of a tensor map."""
        ctypes.c_uint64.from_address(box.value).value = address.value or 0
        return cuda.SUCCESS

    def compile(self, variant: launcher.Variant, grid: tuple, args: tuple) -> SimpleNamespace:
        """Return what Triton would: a kernel with the types of the arguments."""
        signature, sizes, metas = {}, [], []
        for name, special, x in zip(variant.names, variant.specialised, args):
            kind, size = _kind(x, special)
            signature[name] = kind
            sizes += size
            if isinstance(x, TensorDescriptor):
                metas.append({"rank": len(x.shape)})
        made = SimpleNamespace(
            src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(tensordesc_meta=metas, num_ctas=1),
            packed_metadata=(4, 1, 0),
            run=SimpleNamespace(launch_pdl=False),
            variant=variant,
            sizes=sizes,
            function=len(self.compiled) + 1,
        )
        self.compiled.append(made)
        return made


def _kind(x, special: bool) -> tuple[str, list[int]]:
    """Return an argument's type as Triton names it, and the sizes of its parameters."""
    if x is None or (special and type(x) is int and x == 1):
        return "constexpr", []
    if isinstance(x, TensorDescriptor):
        rank = len(x.shape)
        return f"tensordesc<{x.block_shape}>", [cuda.MAP_BYTES, *[4] * rank, *[8] * rank]
    if isinstance(x, Tensor):
        return _POINTERS[x.dtype], [8]
    kind = "fp32" if isinstance(x, float) else "i32" if -(2**31) <= x < 2**31 else "i64"
    return kind, [_SIZES[kind]]


def encoded(descriptor: TensorDescriptor, meta: dict) -> bytes:
    """Return a tensor map that holds an address and nothing else."""
    return descriptor.base.data_ptr().to_bytes(8, "little") + bytes(cuda.MAP_BYTES - 8)


@contextlib.contextmanager
def stubbed(driver: StubDriver | None = None):
    """Make CPU tensors take the host path of a GPU, with ``driver`` in place of the GPU's; without one, launches do
    nothing."""
    if driver is None:
        nothing = ctypes.CDLL(None).getpagesize  # any C function without arguments, which are then ignored
        driver = StubDriver(lambda *args: nothing(*args) * 0, lambda *args: 0)
    changes = [
        (launcher, "by_driver", lambda device: True),
        (launcher, "stream_getter", lambda: lambda index: 0),
        (launcher.Variant, "launch_by_triton", lambda variant, grid, args: driver.compile(variant, grid, args)),
        (packet, "encoded", encoded),
        (cuda, "driver", lambda: driver),
        (prepared, "on_gpu", lambda x: True),
        (op, "check_contents", lambda problem, query_offset=None: None),
    ]
    prepared.forget()
    with contextlib.ExitStack() as stack:
        for owner, name, other in changes:
            stack.enter_context(mock.patch.object(owner, name, other))
        stack.callback(driver.forget)
        stack.callback(prepared.forget)
        yield driver
