"""A CUDA driver whose launches the emulator runs: it finds tensors by the addresses that it is given, and knows nothing else.

It is told which memory there is, as a GPU's driver knows what was allocated. So what is stored among a launch's parameters
is what counts: a wrong address, number or tensor map gives a wrong result.
"""

from __future__ import annotations

import contextlib
import ctypes
from unittest import mock

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.bench.stub import StubDriver, stubbed
from jfa.kernels.common import driver as cuda
from jfa.kernels.common.packet import Packet
from jfa.kernels.common.tape import Tape

_READ = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class EmulatedDriver(StubDriver):
    """Counts ``launches`` and ``fills`` that came to the driver itself."""

    def __init__(self):
        super().__init__(self._launch, self._fill)
        self.launches = self.fills = 0
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.code = cuda.SUCCESS  # what the next launch returns, once, if it is an error

    def tell(self, *tensors) -> None:
        """Note the memory of tensors and of descriptors' tensors; what lay there before is gone."""
        for x in tensors:
            x = x.base if isinstance(x, TensorDescriptor) else x
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes():
                self.memory[x.untyped_storage().data_ptr()] = x.untyped_storage()

    def tensor_at(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor from an address to the end of the memory that it lies in, whichever tensor's that is."""
        for begin, storage in reversed(self.memory.items()):
            offset = address - begin
            if 0 <= offset < storage.nbytes():
                assert offset % dtype.itemsize == 0
                count = (storage.nbytes() - offset) // dtype.itemsize
                return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, (count,), (1,))
        return torch.empty(0, dtype=dtype)

    def compile(self, variant, grid, args):
        """Run the launch, as Triton does where it compiles."""
        run(variant, grid, args)
        made = super().compile(variant, grid, args)
        made.dtypes = [x.base.dtype if isinstance(x, TensorDescriptor) else getattr(x, "dtype", None) for x in args]
        made.boxes = [x.block_shape if isinstance(x, TensorDescriptor) else None for x in args]
        made.aligned = [isinstance(x, torch.Tensor) and x.data_ptr() % 16 == 0 for x in args]
        made.ones = [None if isinstance(x, torch.Tensor | TensorDescriptor) else x for x in args]
        return made

    def _launch(self, config, function, table, extra) -> int:
        if self.code != cuda.SUCCESS:
            code, self.code = self.code, cuda.SUCCESS
            return code
        self.launches += 1
        compiled, config = self.compiled[function.value - 1], config._obj
        args, at = [], 0
        facts = zip(compiled.variant.names, compiled.dtypes, compiled.boxes, compiled.ones, compiled.aligned)
        for name, dtype, box, one, aligned in facts:
            kind = compiled.src.signature[name]
            if kind == "constexpr":
                args.append(one)
            elif kind.startswith("tensordesc"):
                rank = len(box)
                address = ctypes.c_uint64.from_address(table[at]).value
                assert table[at] % 64 == 0 == address % 16, "a tensor map that the driver would refuse"
                shape = [ctypes.c_int32.from_address(table[at + 1 + j]).value for j in range(rank)]
                strides = [ctypes.c_int64.from_address(table[at + 1 + rank + j]).value for j in range(rank)]
                args.append(_descriptor(self.tensor_at(address, dtype), shape, strides, box))
                at += 1 + 2 * rank
            elif kind.startswith("*"):
                address = ctypes.c_uint64.from_address(table[at]).value
                assert address % 16 == 0 or not aligned, "machine code for addresses at whole 16 bytes"
                args.append(self.tensor_at(address, dtype))
                at += 1
            else:
                args.append(_READ[kind].from_address(table[at]).value)
                at += 1
        grid = config.grid_x, config.grid_y, config.grid_z
        run(compiled.variant, grid, args)
        return cuda.SUCCESS

    def _fill(self, address, word, words, stream) -> int:
        self.fills += 1
        self.tensor_at(address, torch.int32)[:words] = word - (word >> 31 << 32)
        return cuda.SUCCESS


def run(variant, grid, args) -> None:
    """Launch on the emulator, whose arithmetic is torch's and must not be cast."""
    with torch.autocast("cpu", enabled=False):
        variant.kernel[grid](*args, **variant.options)


def _descriptor(base, shape, strides, box) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(base=base, shape=shape, strides=strides, block_shape=box, padding="zero")
    made.round_f32_to_tf32 = False
    return made


@contextlib.contextmanager
def emulated():
    """Make CPU tensors take a GPU's way, with launches that the emulator runs."""
    driver = EmulatedDriver()
    play, allocate, launch = Tape.play, Tape.allocate, Packet.launch

    def told_play(tape, device, values, inputs):
        driver.memory.clear()
        driver.tell(*inputs)
        played = play(tape, device, values, inputs)
        driver.memory.clear()
        return played

    def told_allocate(tape, values):
        results, kept, scratch = allocate(tape, values)
        driver.tell(*results, kept, scratch)
        return results, kept, scratch

    def told_launch(packet, grid, stream, args):
        driver.memory.clear()
        driver.tell(*args)
        return launch(packet, grid, stream, args)

    with (
        stubbed(driver),
        mock.patch.object(Tape, "play", told_play),
        mock.patch.object(Tape, "allocate", told_allocate),
        mock.patch.object(Packet, "launch", told_launch),
    ):
        yield driver
