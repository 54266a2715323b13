"""Record what a backend does in one call without doing it: allocations, launches and fills, on stand-ins for tensors.

The host code of a forward or backward only makes decisions: tiles, grids, sizes and numbers follow from shapes and
options. So a call can be *recorded* on :class:`StandIn` tensors, whose shapes are made of :class:`.sizes.Size`: no
memory is allocated, nothing is launched, and every number that the backend computes stays a formula in the call's
sizes. Recording covers allocations, views, fills with a constant, copies, launches of a :class:`.launcher.Variant` and
what goes through :func:`.launcher.by_torch`. Any other operation is :class:`Unrepeatable`. :mod:`.tape` repeats a call
from its recording.

An input is aligned to 16 bytes or not, as the recorder is told, and is checked when a tape is
played; allocations have a larger alignment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch.overrides import TorchFunctionMode
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.common import launcher
from jfa.kernels.common.sizes import Size, Trace, same


class Unrepeatable(Exception):
    """Raised with the reason why a call cannot be repeated from a tape."""


# -------------------------------------------------------------------------------------------------------------- notation
@dataclass(frozen=True)
class Place:
    """A tensor of a call: bytes behind the begin of an input or an allocation, and how they are read."""

    source: object  # a role's name, or the number of an allocation
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class BoxOf:
    """A TMA descriptor of a place; ``descriptor`` is one without the tensor."""

    place: Place
    descriptor: TensorDescriptor


@dataclass(frozen=True)
class Launch:
    """One launch; ``args`` are places, boxes and numbers. ``key`` is the key under which the variant keeps the compiled
    kernel."""

    variant: launcher.Variant
    device: torch.device
    grid: tuple[int, ...]
    args: tuple
    key: tuple


@dataclass(frozen=True)
class Fill:
    """Write ``words`` times the 32 bits ``word``."""

    place: Place
    word: int
    words: int


@dataclass(frozen=True)
class ByTorch:
    """Call ``function``, which writes by torch's operations, with ``args``: places, numbers and structures of them."""

    function: Callable
    args: tuple


# -------------------------------------------------------------------------------------------------------------- tensors
def product(sizes: tuple[int, ...]) -> int:
    """Return the product of ``sizes``."""
    found = 1
    for size in sizes:
        found = size * found
    return found


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        found[i] = found[i + 1] * shape[i + 1]
    return tuple(found)


class StandIn:
    """Stand-in for a tensor while a call is recorded; it has the methods that launch code uses, all others are
    Unrepeatable."""

    def __init__(self, recorder: Recorder, source: object, offset: int, shape: tuple, stride: tuple, dtype, device):
        self.recorder, self.source, self.offset = recorder, source, offset
        self.shape, self._stride, self.dtype, self.device = tuple(shape), tuple(stride), dtype, device
        self.itemsize, self.ndim, self.requires_grad = dtype.itemsize, len(self.shape), False
        self.whole, self.aligned = False, True

    @property
    def place(self) -> Place:
        """Where it lies."""
        return Place(self.source, self.offset, self.dtype, self.shape, self._stride)

    def __getattr__(self, name: str):
        raise Unrepeatable(f"a tensor's {name}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise Unrepeatable(f"torch's {getattr(function, '__name__', function)}")

    # ------------------------------------------------------------------------------------------------------ questions
    def stride(self, dim: int | None = None):
        """Return the strides, or one of them."""
        return self._stride if dim is None else self._stride[dim]

    def size(self, dim: int | None = None):
        """Return the shape, or a part of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return product(self.shape)

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.itemsize

    def data_ptr(self) -> int:
        """Return the offset: an address is only used for its alignment here. An empty tensor has none, as in torch."""
        if self.numel() == 0:
            return 0
        return self.offset if self.aligned else self.offset + self.itemsize

    def is_contiguous(self) -> bool:
        """Return whether elements lie side by side in order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self._stride)):
            if not same(stride, expected) and size != 1 and stride != expected:
                return bool(self.numel() == 0)
            expected = size * expected
        return True

    # ---------------------------------------------------------------------------------------------------------- views
    def _view(self, elements: int, shape, stride) -> StandIn:
        offset = self.offset + elements * self.itemsize
        found = StandIn(self.recorder, self.source, offset, shape, stride, self.dtype, self.device)
        found.aligned = self.aligned
        return found

    def as_strided(self, size, stride, storage_offset: int = 0) -> StandIn:
        """Return a view; of tensors only that begin where their memory does."""
        if not self.whole:
            raise Unrepeatable("as_strided of what may be a view")
        return self._view(storage_offset, size, stride)

    def view(self, *shape) -> StandIn:
        """Return a contiguous tensor in another shape."""
        if not all(isinstance(x, int) for x in shape) or not self.is_contiguous():
            raise Unrepeatable("a view of what is not contiguous, or as another type")
        if -1 in [x for x in shape if not isinstance(x, Size)]:
            known = product(tuple(x for x in shape if isinstance(x, Size) or x != -1))
            shape = tuple(self.numel() // known if not isinstance(x, Size) and x == -1 else x for x in shape)
        return self._view(0, shape, strides_of(shape))

    def __getitem__(self, index) -> StandIn:
        index = index if isinstance(index, tuple) else (index,)
        shape, stride, elements = list(self.shape), list(self._stride), 0
        for dim, part in enumerate(index):
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise Unrepeatable("an index that is no slice")
            size, begin, end = shape[dim], part.start or 0, part.stop
            begin, end = min(begin, size), size if end is None else min(end, size)
            if begin < 0 or end < begin:
                raise Unrepeatable("a slice from the end")
            shape[dim], elements = end - begin, elements + begin * stride[dim]
        return self._view(elements, shape, stride)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[StandIn]:
        for i in range(len(self)):
            yield self._view(i * self._stride[0], self.shape[1:], self._stride[1:])

    def contiguous(self) -> StandIn:
        """Return itself, or a copy."""
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)

    def to(self, dtype: torch.dtype) -> StandIn:
        """Return itself, or a contiguous copy in another type."""
        return self if dtype is self.dtype else self.new_empty(self.shape, dtype=dtype).copy_(self)

    def copy_(self, source: StandIn) -> StandIn:
        """Copy ``source`` here."""
        self.recorder.called(_copy, (self, source))
        return self

    def __neg__(self) -> StandIn:
        made = self.new_empty(self.shape)
        self.recorder.called(_negate, (made, self))
        return made

    # ------------------------------------------------------------------------------------------- allocations and fills
    def new_empty(self, *size, dtype: torch.dtype | None = None) -> StandIn:
        """Allocate."""
        return self.recorder.allocate(_shape(size), self.dtype if dtype is None else dtype, self.device)

    def new_zeros(self, *size, dtype: torch.dtype | None = None) -> StandIn:
        """Allocate and clear."""
        return self.new_empty(*size, dtype=dtype).zero_()

    def zero_(self) -> StandIn:
        """Clear."""
        return self.fill_(0.0)

    def fill_(self, value: float) -> StandIn:
        """Fill with a number."""
        self.recorder.fill(self, value)
        return self


def _refuse(name: str):
    def method(self, *others):
        raise Unrepeatable(f"a tensor's {name}")

    return method


for _name in "add radd sub rsub mul rmul truediv floordiv mod pow and or invert lt le gt ge bool setitem".split():
    setattr(StandIn, f"__{_name}__", _refuse(f"__{_name}__"))


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


def _negate(to: torch.Tensor, source: torch.Tensor) -> None:
    torch.neg(source, out=to)


def _shape(size: tuple) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


# -------------------------------------------------------------------------------------------------------------- recording
class Recorder(TorchFunctionMode):
    """Record what a call does inside its ``with`` block.

    Args:
        sizes: the numbers that shapes are made of, by name, with their values in this call.
        most: upper bounds of some of them.

    Attributes:
        sizes: the same as :class:`.sizes.Size`.
        trace: the numbers computed from them, and the conditions under which they hold.
    """

    def __init__(self, sizes: dict[str, int], most: dict[str, int] | None = None):
        super().__init__()
        self.trace = Trace(sizes, most)
        self.sizes = self.trace.variables
        self.device: torch.device | None = None  # of its inputs
        self.roles: list[str] = []
        self.aligned: list[bool] = []  # per role, whether it begins at whole 16 bytes
        self.allocations: list[StandIn] = []
        self.steps: list[Launch | Fill | ByTorch] = []

    def __enter__(self):
        if launcher.recording() is not None:
            raise Unrepeatable("a tape is being recorded already")
        launcher.record_to(self)
        return super().__enter__()

    def __exit__(self, *error):
        launcher.record_to(None)
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        make = _FACTORIES.get(function)
        if make is None:
            raise Unrepeatable(f"torch's {getattr(function, '__name__', function)}")
        return make(self, *args, **(kwargs or {}))

    def input(
        self,
        role: str,
        shape: tuple,
        stride: tuple | None,
        dtype: torch.dtype,
        device: torch.device,
        whole: bool = False,
        aligned: bool = True,
    ) -> StandIn:
        """Return a stand-in for an input of the call.

        Args:
            stride: None where it is contiguous.
            whole: it begins where its memory does.
            aligned: it begins at whole 16 bytes.
        """
        self.role(role, aligned)
        self.device = device
        found = StandIn(self, role, 0, shape, strides_of(shape) if stride is None else stride, dtype, device)
        found.whole, found.aligned = whole, aligned
        return found

    def role(self, name: str, aligned: bool = True) -> None:
        """Note that the call has one more input."""
        self.roles.append(name)
        self.aligned.append(aligned)

    def at(self, place: Place, device: torch.device) -> StandIn:
        """Return a stand-in for a tensor at a place."""
        return StandIn(self, place.source, place.offset, place.size, place.stride, place.dtype, device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> StandIn:
        """Return a new contiguous tensor."""
        made = StandIn(self, len(self.allocations), 0, shape, strides_of(shape), dtype, device)
        self.allocations.append(made)
        made.whole = True
        return made

    def fill(self, tensor: StandIn, value: float) -> None:
        """Note that a tensor is filled with a number."""
        size = tensor.numel() * tensor.itemsize
        if not tensor.is_contiguous() or size % 4 != 0:
            raise Unrepeatable("a fill of what is not whole words side by side")
        word = 0
        if value != 0:
            if tensor.dtype is not torch.float32:
                raise Unrepeatable(f"a fill with {value} in {tensor.dtype}")
            word = int.from_bytes(struct.pack("<f", value), "little")
        if size != 0:
            self.steps.append(Fill(tensor.place, word, size // 4))

    def launched(self, variant: launcher.Variant, device: torch.device, grid: tuple[int, ...], args: tuple) -> None:
        """Note a launch."""
        if all(size != 0 for size in grid):
            key = variant.key(device, args)
            self.steps.append(Launch(variant, device, grid, tuple(_argument(x) for x in args), key))

    def called(self, function: Callable, args: tuple) -> None:
        """Note that a function works on tensors by torch."""
        self.steps.append(ByTorch(function, mapped(args, lambda x: x.place, StandIn)))


def _argument(x):
    if isinstance(x, StandIn):
        return x.place
    if isinstance(x, TensorDescriptor):
        if any(isinstance(y, Size) for y in (*x.shape, *x.strides, *x.block_shape)):
            raise Unrepeatable("a descriptor that depends on the call's sizes")
        bare = object.__new__(TensorDescriptor)
        bare.__dict__.update(x.__dict__, base=None)
        return BoxOf(x.base.place, bare)
    if x is None or type(x) in (int, float, bool, Size):
        return x
    raise Unrepeatable(f"an argument of type {type(x).__name__}")


def _empty(recorder: Recorder, *size, dtype: torch.dtype | None = None, device=None) -> StandIn:
    if dtype is None or device is None:
        raise Unrepeatable("an allocation of torch's default type or device")
    return recorder.allocate(_shape(size), dtype, device if isinstance(device, torch.device) else torch.device(device))


def _empty_like(recorder: Recorder, x: StandIn, *, memory_format=torch.preserve_format) -> StandIn:
    if memory_format is not torch.contiguous_format and not x.is_contiguous():
        raise Unrepeatable("an allocation with holes")
    return recorder.allocate(x.shape, x.dtype, x.device)


_FACTORIES: dict[Callable, Callable] = {
    torch.empty: _empty,
    torch.zeros: lambda *args, **options: _empty(*args, **options).zero_(),
    torch.empty_like: _empty_like,
    torch.zeros_like: lambda *args, **options: _empty_like(*args, **options).zero_(),
}


# ------------------------------------------------------------------------------------------------------------ structures
def mapped(x: object, change: Callable, kind: type) -> object:
    """Return a structure of dataclasses and lists with each ``kind`` in it changed."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, list | tuple):
        return type(x)(mapped(y, change, kind) for y in x)
    if is_dataclass(x):
        return replace(x, **{f.name: mapped(getattr(x, f.name), change, kind) for f in fields(x)})
    return x


def leaves(x: object, kind: type) -> list:
    """Return each ``kind`` in a structure."""
    found: list = []
    mapped(x, found.append, kind)
    return found


def left_of(before: object, after: object) -> object:
    """Return a structure without what has become None in ``after``, the same structure later."""
    if after is None or isinstance(before, Place):
        return None if after is None else before
    if isinstance(before, list | tuple):
        return type(before)(left_of(x, y) for x, y in zip(before, after))
    if is_dataclass(before):
        return replace(
            before, **{f.name: left_of(getattr(before, f.name), getattr(after, f.name)) for f in fields(before)}
        )
    return before
