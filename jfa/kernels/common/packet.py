"""A compiled kernel with its arguments laid out in memory as the driver reads them; a launch stores only what has
changed.

Triton's own launcher processes all arguments at each launch: it asks the driver about each pointer, encodes each TMA
descriptor again and converts each number by its type. A :class:`Packet` does this once. Afterwards a new address costs
one store, and a descriptor whose tensor moved gets its new address (``cuTensorMapReplaceAddress``).

The mapping from arguments to parameters follows from the types that Triton compiled for; the layout is read from the
driver. Where the two do not agree there is no packet, and launches go through Triton.
"""

from __future__ import annotations

import ctypes
import inspect
from functools import cache
from threading import Lock

from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.common import driver as cuda
from jfa.kernels.common.driver import MAP_BYTES

_NUMBERS = {
    "i1": (1, ctypes.c_int8),
    "i8": (1, ctypes.c_int8),
    "i16": (2, ctypes.c_int16),
    "i32": (4, ctypes.c_int32),
    "i64": (8, ctypes.c_int64),
    "u32": (4, ctypes.c_uint32),
    "u64": (8, ctypes.c_uint64),
    "fp32": (4, ctypes.c_float),
}
_POINTER = (8, ctypes.c_uint64)
ALIGNMENT = 128  # of the parameters' memory: a tensor map wants 64


class Unfit(Exception):
    """Raised with the reason why a launch cannot be laid out here."""


class Packet:
    """One kernel's launch. Holds ``lock`` while its memory is written and read.

    Attributes:
        pointers: argument -> parameter, of arguments that are tensors.
        boxes: argument -> Box, of TMA descriptors.
        numbers: argument -> where its number lies.
        table: the address of each parameter.
    """

    def __init__(self, compiled, names: list[str], args: tuple, index: int):
        """Lay out ``args`` of the parameters ``names`` of a kernel that Triton compiled for such, on device ``index``."""
        self.driver, self.lock, self.index = cuda.driver(), Lock(), index
        if self.driver is None:
            raise Unfit("no CUDA driver that tells a kernel's parameters")
        warps, shared, overlap = _options(compiled)
        self.function = ctypes.c_void_p(compiled.function)
        self.config = cuda.launch_config(warps, shared, overlap)
        self.pointers: dict[int, int] = {}
        self.boxes: dict[int, Box] = {}
        self.numbers: dict[int, ctypes._SimpleCData] = {}
        parameters = self.driver.parameters(compiled.function)
        self._memory, base = aligned(max((offset + size for offset, size in parameters), default=0))
        self.table = (ctypes.c_void_p * len(parameters))(*(base + offset for offset, _ in parameters))
        self._sizes = [size for _, size in parameters]
        self._read(compiled, names, args)
        self._pointer_slots = [(i, self._slot(at, *_POINTER)) for i, at in self.pointers.items()]
        self.set(args)

    def _read(self, compiled, names, args) -> None:
        """Find out which parameters each argument is."""
        metas, at = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ()), 0
        for i, (name, arg) in enumerate(zip(names, args)):
            kind = compiled.src.signature[name]
            if kind == "constexpr":
                continue
            if not isinstance(kind, str):
                raise Unfit(f"parameter {name} is a tuple")
            if kind.startswith("tensordesc"):
                meta, rank = next(metas, None), len(arg.shape)
                self.boxes[i] = Box(self, at, rank, meta)
                at += 1 + 2 * rank
            elif kind.startswith("*"):
                self._expect(at, _POINTER[0], name)
                self.pointers[i] = at
                at += 1
            elif kind in _NUMBERS:
                self.numbers[i] = self._slot(at, *_NUMBERS[kind], name)
                at += 1
            else:
                raise Unfit(f"parameter {name} is a {kind}")
        if any(size != _POINTER[0] for size in self._sizes[at:]) or len(self._sizes) < at:
            # what is left are Triton's scratch pointers, which stay null
            raise Unfit("the driver tells of other parameters")

    def _expect(self, at: int, size: int, name: str) -> None:
        if at >= len(self._sizes) or self._sizes[at] != size:
            raise Unfit(f"parameter {name} is not of {size} bytes")

    def _slot(self, at: int, size: int, kind, name: str = ""):
        self._expect(at, size, name)
        return kind.from_address(self.table[at])

    def set(self, args: tuple) -> None:
        """Store the arguments; those that Triton compiled in are left out."""
        for i, slot in self._pointer_slots:
            slot.value = args[i].data_ptr()
        for i, slot in self.numbers.items():
            slot.value = args[i]
        for i, box in self.boxes.items():
            box.set(args[i])

    def launch(self, grid: tuple[int, ...], stream: int, args: tuple) -> bool:
        """Launch with ``args``; False, and nothing was done, where another thread is at it.

        Raises:
            RuntimeError: the driver refuses.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.set(args)
            config = self.config
            config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
            config.stream = stream
            run, launch = self.driver.run, self.driver.launch
            run(self.index, launch, ctypes.byref(config), self.function, self.table, None)
        finally:
            self.lock.release()
        return True


class Box:
    """A TMA descriptor among a packet's parameters: the map, then its shape and strides."""

    def __init__(self, packet: Packet, at: int, rank: int, meta: dict | None):
        if meta is None:
            raise Unfit("a descriptor that is not a tensor map")
        packet._expect(at, MAP_BYTES, "of a descriptor")
        self._memory, self.map = aligned(MAP_BYTES)  # of its own: among the parameters it would not be aligned
        self.meta, packet.table[at] = meta, self.map
        self._shape = [packet._slot(at + 1 + j, *_NUMBERS["i32"]) for j in range(rank)]
        self._strides = [packet._slot(at + 1 + rank + j, *_NUMBERS["i64"]) for j in range(rank)]
        self._driver, self._index, self.known, self.address = packet.driver, packet.index, None, 0

    def set(self, descriptor: TensorDescriptor) -> None:
        """Store a descriptor: encode it where more than its address is new."""
        address = descriptor.base.data_ptr()
        known = descriptor.shape, descriptor.strides, descriptor.padding
        if known != self.known:
            ctypes.memmove(self.map, encoded(descriptor, self.meta), MAP_BYTES)
            for slots, numbers in ((self._shape, descriptor.shape), (self._strides, descriptor.strides)):
                for slot, number in zip(slots, numbers):
                    slot.value = number
            self.known, self.address = (list(descriptor.shape), list(descriptor.strides), descriptor.padding), address
        elif address != self.address:
            self.move(address)

    def word(self) -> ctypes.c_uint64 | None:
        """Return the word of the map that is its address; None where the driver changes more than that word to replace one."""
        (_, ours), (_, theirs) = kept = aligned(MAP_BYTES), aligned(MAP_BYTES)
        other = self.address + (1 << 20)
        for copy in (ours, theirs):
            ctypes.memmove(copy, self.map, MAP_BYTES)
        ctypes.c_uint64.from_address(ours).value = other
        replace = self._driver.replace_address
        self._driver.run(self._index, replace, ctypes.c_void_p(theirs), ctypes.c_void_p(other))
        equal = ctypes.string_at(ours, MAP_BYTES) == ctypes.string_at(theirs, MAP_BYTES)
        del kept
        return ctypes.c_uint64.from_address(self.map) if equal else None

    def move(self, address: int) -> None:
        """Store another address."""
        replace = self._driver.replace_address
        self._driver.run(self._index, replace, ctypes.c_void_p(self.map), ctypes.c_void_p(address))
        self.address = address


def encoded(descriptor: TensorDescriptor, meta: dict) -> bytes:
    """Return the tensor map that Triton makes of a descriptor, as bytes."""
    made = _encoder()(descriptor, meta)[0]
    size = type(made).__basicsize__
    found = ctypes.string_at(id(made) + size - MAP_BYTES, MAP_BYTES)  # the object's last field
    if size < MAP_BYTES or int.from_bytes(found[:8], "little") != descriptor.base.data_ptr():
        raise Unfit("this Triton keeps its tensor maps elsewhere")
    return found


@cache
def _encoder():
    """Return Triton's function of (descriptor, meta), whose versions differ in a third parameter."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = len(inspect.signature(make_tensordesc_arg).parameters) - 2
    return lambda descriptor, meta: make_tensordesc_arg(descriptor, meta, *(None,) * more)


def aligned(size: int) -> tuple[ctypes.Array, int]:
    """Return zeroed memory of ``size`` bytes, and the address of its first aligned byte. The memory lives as long as the array."""
    memory = ctypes.create_string_buffer(size + ALIGNMENT)
    return memory, -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT


def _options(compiled) -> tuple[int, int, bool]:
    """Return (warps, bytes of shared memory, whether it may begin early) of a kernel; raise Unfit where more is asked for."""
    warps, _, shared = compiled.packed_metadata[:3]
    run, meta = compiled.run, compiled.metadata
    scratch = getattr(run, "global_scratch_size", 0), getattr(run, "profile_scratch_size", 0)
    clusters = getattr(meta, "num_ctas", 1) != 1 or set(compiled.packed_metadata[3:]) - {0, 1}
    shape = getattr(meta, "cluster_dims", None), getattr(meta, "ctas_per_cga", None)
    if any(scratch) or clusters or any(x is not None and set(x) != {1} for x in shape):
        raise Unfit("scratch memory or clusters")
    if not hasattr(run, "launch_pdl") or getattr(run, "launch_cooperative_grid", False):
        raise Unfit("a launcher of another kind")
    return warps, shared, bool(run.launch_pdl)
