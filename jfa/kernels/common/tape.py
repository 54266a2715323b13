"""What a backend does in one call, written down once and done again with other addresses: allocations, launches, fills.

A backend's forward or backward decides much and moves nothing: tiles, grids, sizes and numbers follow from shapes and options.
Of a second call with the same shapes and options only the addresses differ. So one call is *recorded*: a
:class:`Recorder` sees each operation of torch and each launch. If they are allocations, views, fills with a
constant and launches of a :class:`.launcher.Variant`, whose arguments are inputs, allocations or numbers, the
:class:`Tape` can do them again: one allocation per result, one for all scratch memory, one store per address, and
the driver's launches. Anything else, such as a copy of a tensor with strides that no kernel takes, is no tape's work, and such
calls go the long way.

Inputs are known by their role, not by their memory: two may share it when a tape is recorded and not when it is played.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from threading import Lock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.common import driver as cuda
from jfa.kernels.common import launcher
from jfa.kernels.common.packet import Packet, Unfit, aligned

ALIGNMENT = 512  # of what shares one allocation, as torch's allocator aligns
_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.empty.memory_format: None,
    _ATEN.new_empty.default: None,
    _ATEN.empty_like.default: None,
    _ATEN.zeros.default: 0.0,
    _ATEN.new_zeros.default: 0.0,
    _ATEN.zeros_like.default: 0.0,
}


class Unrepeatable(Exception):
    """Why a call cannot be done again from a tape."""


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
    """A TMA descriptor of a place."""

    place: Place
    fields: dict  # of the descriptor, but for its base


@dataclass(frozen=True)
class Launch:
    """One launch; ``args`` are places, boxes and constants. ``packet``: laid out for the driver, on a GPU."""

    variant: launcher.Variant
    device: torch.device
    grid: tuple[int, ...]
    args: tuple
    packet: Packet | None = None


@dataclass(frozen=True)
class Fill:
    """Write ``words`` times the 32 bits ``word``."""

    place: Place
    word: int
    words: int


# -------------------------------------------------------------------------------------------------------------- recording
class Recorder(TorchDispatchMode):
    """Sees a call's operations while it is entered.

    Args:
        inputs: the call's inputs by role. Its launches must get these very objects, or views of memory that no other input has.
    """

    def __init__(self, inputs: dict[str, Tensor]):
        super().__init__()
        self.roles = list(inputs)
        self._by_object = {id(x): (role, x) for role, x in inputs.items()}
        self._by_storage: dict[int, list] = {}
        for role, x in inputs.items():
            self._by_storage.setdefault(_storage(x), []).append((role, x))
        self.allocations: list[Tensor] = []
        self.steps: list[Launch | Fill] = []
        self.trouble = ""

    def __enter__(self):
        if launcher.recording() is not None:
            self.trouble = "a tape is being recorded already"
        else:
            launcher.record_to(self)
        return super().__enter__()

    def __exit__(self, *error):
        if launcher.recording() is self:
            launcher.record_to(None)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.trouble or function.is_view:
            return result
        try:
            self._note(function, args, result)
        except Unrepeatable as reason:
            self.trouble = str(reason)
        return result

    def _note(self, function, args, result) -> None:
        if function in _ALLOCATIONS:
            if not result.is_contiguous():
                raise Unrepeatable("an allocation with holes")
            self.allocations.append(result)
            if _ALLOCATIONS[function] is not None:
                self._fill(result, _ALLOCATIONS[function])
        elif function in (_ATEN.zero_.default, _ATEN.fill_.Scalar):
            self._fill(args[0], 0.0 if function is _ATEN.zero_.default else args[1])
        else:
            raise Unrepeatable(f"torch's {function}")

    def _fill(self, tensor: Tensor, value: float) -> None:
        size = tensor.numel() * tensor.itemsize
        if not tensor.is_contiguous() or size % 4:
            raise Unrepeatable("a fill of what is not whole words side by side")
        word = 0
        if value != 0:
            if tensor.dtype is not torch.float32:
                raise Unrepeatable(f"a fill with {value} in {tensor.dtype}")
            word = int.from_bytes(struct.pack("<f", value), "little")
        if size:
            self.steps.append(Fill(self.place(tensor), word, size // 4))

    def launched(self, variant, device, grid, args) -> None:
        """Note a launch that has happened."""
        if self.trouble or 0 in grid:
            return
        try:
            packet = variant.packet(device, args) if launcher.by_driver(device) else None
            self.steps.append(Launch(variant, device, grid, tuple(self._argument(x) for x in args), packet))
        except (Unrepeatable, Unfit) as reason:
            self.trouble = str(reason)

    def _argument(self, x):
        if isinstance(x, Tensor):
            return self.place(x)
        if isinstance(x, TensorDescriptor):
            return BoxOf(self.place(x.base), {name: y for name, y in x.__dict__.items() if name != "base"})
        if x is None or type(x) in (int, float, bool):
            return x
        raise Unrepeatable(f"an argument of type {type(x).__name__}")

    def place(self, x: Tensor) -> Place:
        """Return where a tensor lies; raise Unrepeatable where that is not clear."""
        size, stride = tuple(x.shape), x.stride()
        if id(x) in self._by_object:
            return Place(self._by_object[id(x)][0], 0, x.dtype, size, stride)
        storage = _storage(x)
        for number, made in enumerate(self.allocations):
            if _storage(made) == storage:
                return Place(number, x.data_ptr() - made.data_ptr() if x.numel() else 0, x.dtype, size, stride)
        owners = self._by_storage.get(storage, [])
        if len(owners) != 1:
            raise Unrepeatable("a tensor that is neither an input nor made by this call")
        role, owner = owners[0]
        return Place(role, x.data_ptr() - owner.data_ptr(), x.dtype, size, stride)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


# ------------------------------------------------------------------------------------------------------------------ tape
class Tape:
    """What a recorder saw, to be done again.

    Args:
        recorder: it has seen the whole call.
        results: tensors that the call returns: allocations of their own, whole.
        kept: a structure of int32 tensors that outlives the call, in allocations that a tape puts together as one.

    Attributes:
        kept: the structure with places in that allocation.

    Raises:
        Unrepeatable: there was something that a tape cannot do.
    """

    def __init__(self, recorder: Recorder, results: Sequence[Tensor], kept: object = None):
        if recorder.trouble:
            raise Unrepeatable(recorder.trouble)
        self.roles = recorder.roles
        places = [recorder.place(x) for x in results]
        made = recorder.allocations
        if any(x.source != made_at or not _whole(x, made[x.source]) for x, made_at in zip(places, _numbers(places))):
            raise Unrepeatable("a result that is no allocation of its own")
        self.results = [(x.size, x.dtype) for x in places]
        self.kept = mapped(kept, recorder.place)
        groups = {x.source: ("result", i) for i, x in enumerate(places)}
        outlive = {x.source for x in leaves(self.kept) if isinstance(x.source, int)}
        self.kept_bytes = _pack(made, [n for n in range(len(made)) if n in outlive - set(groups)], "kept", groups)
        rest = [n for n in range(len(made)) if n not in groups]
        self.scratch_bytes = _pack(made, rest, "scratch", groups)
        self.groups = groups
        self.steps = recorder.steps
        self.kept = mapped(self.kept, self._in_kept, Place)
        self._deck: Deck | None = None

    def locate(self, place: Place) -> tuple[object, int]:
        """Return where a place is when the tape is played (a role, ("result", i), "kept", "scratch"), and its offset in bytes."""
        if not isinstance(place.source, int):
            return place.source, place.offset
        group = self.groups[place.source]
        return (group, place.offset) if group[0] == "result" else (group[0], group[1] + place.offset)

    def _in_kept(self, place: Place) -> Place:
        source, offset = self.locate(place)
        if source != "kept":
            raise Unrepeatable("what outlives the call is not its own")
        return replace(place, source=source, offset=offset)

    def allocate(self, device: torch.device) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Return (results, kept, scratch), uninitialised."""
        results = [torch.empty(size, dtype=dtype, device=device) for size, dtype in self.results]
        kept = torch.empty(self.kept_bytes // 4, dtype=torch.int32, device=device) if self.kept_bytes else None
        scratch = torch.empty(self.scratch_bytes // 4, dtype=torch.int32, device=device) if self.scratch_bytes else None
        return results, kept, scratch

    def play(self, device: torch.device, inputs: Sequence[Tensor]):
        """Do it again on a GPU.

        Args:
            device: the current one.
            inputs: one per role, with the recorded shapes and strides, at whole 16 bytes.

        Returns:
            (results, kept), or None where nothing was done: another thread plays this tape, an input is not at whole 16 bytes, or
            somebody wants to see Triton's launches.
        """
        if launcher.hooks():
            return None
        deck = self._deck
        if deck is None:
            deck = self._deck = Deck(self)
        if not deck.lock.acquire(blocking=False):
            return None
        try:
            return deck.play(device, inputs)
        finally:
            deck.lock.release()

    def play_by_views(self, device: torch.device, inputs: Sequence[Tensor]):
        """Do it again through ``Variant.launch``, each argument a tensor anew: as :meth:`play`, on any device."""
        results, kept, scratch = self.allocate(device)
        bases = dict(zip(self.roles, inputs)) | {("result", i): x for i, x in enumerate(results)}
        bases |= {"kept": kept, "scratch": scratch}

        def tensor(place: Place) -> Tensor:
            base, offset = self.locate(place)
            return view_of(bases[base], place, offset)

        for step in self.steps:
            if isinstance(step, Fill):
                target = tensor(step.place)
                words = target.view(-1).view(torch.int32) if target.dtype is not torch.int32 else target
                words.fill_(step.word - (step.word >> 31 << 32))
            else:
                step.variant.launch(step.device, step.grid, *(_argument_of(x, tensor) for x in step.args))
        return results, kept


def _numbers(places: list[Place]) -> list[int | None]:
    """Return the allocation of each place, None where another place has the same."""
    seen: set = set()
    return [
        None if x.source in seen or seen.add(x.source) or not isinstance(x.source, int) else x.source for x in places
    ]


def _whole(place: Place, made: Tensor) -> bool:
    contiguous = torch.empty(place.size, device="meta").stride() == place.stride
    size = made.numel() * made.itemsize
    return place.offset == 0 and contiguous and torch.Size(place.size).numel() * place.dtype.itemsize == size


def _pack(made: list[Tensor], numbers: list[int], name: str, groups: dict) -> int:
    """Give allocations places in one, and return its bytes."""
    total = 0
    for n in numbers:
        groups[n] = (name, total)
        total += -(-made[n].numel() * made[n].itemsize // ALIGNMENT) * ALIGNMENT
    return total


def view_of(base: Tensor | None, place: Place, offset: int) -> Tensor:
    """Return the tensor at ``offset`` bytes behind the begin of ``base``."""
    if base is None or 0 in place.size:
        return torch.empty(place.size, dtype=place.dtype, device=base.device if base is not None else None)
    start = base.storage_offset() * base.itemsize + offset
    if base.dtype is place.dtype:
        return base.as_strided(place.size, place.stride, start // place.dtype.itemsize)
    found = torch.empty(0, dtype=place.dtype, device=base.device)
    return found.set_(base.untyped_storage(), start // place.dtype.itemsize, place.size, place.stride)


def _argument_of(x, tensor: Callable[[Place], Tensor]):
    if isinstance(x, Place):
        return tensor(x)
    if not isinstance(x, BoxOf):
        return x
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(x.fields, base=tensor(x.place))
    return found


def places_in(base: Tensor, x: object) -> object:
    """Return a structure of views of ``base`` as places in it."""

    def place(view: Tensor) -> Place:
        offset = view.data_ptr() - base.data_ptr() if view.numel() else 0
        return Place("kept", offset, view.dtype, tuple(view.shape), view.stride())

    return mapped(x, place)


def views_in(base: Tensor, x: object) -> object:
    """Return a structure of places in ``base`` as views of it."""
    return mapped(x, lambda place: view_of(base, place, place.offset), Place)


def mapped(x: object, change: Callable, kind: type = Tensor) -> object:
    """Return a structure of dataclasses and lists with each ``kind`` in it changed."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, list | tuple):
        return type(x)(mapped(y, change, kind) for y in x)
    if is_dataclass(x):
        return replace(x, **{f.name: mapped(getattr(x, f.name), change, kind) for f in fields(x)})
    return x


def leaves(x: object) -> list[Place]:
    """Return the places in a structure."""
    found: list[Place] = []
    mapped(x, found.append, Place)
    return found


# ------------------------------------------------------------------------------------------------------------------ deck
class Deck:
    """A tape's launches laid out for the driver: addresses side by side, and every parameter that is one of them points there."""

    def __init__(self, tape: Tape):
        self.tape, self.lock, self.driver = tape, Lock(), cuda.driver()
        where: dict[tuple, int] = {}
        self._boxes: list[tuple] = []
        pointers: list[tuple] = []
        self._steps: list[tuple] = []
        for step in tape.steps:
            if isinstance(step, Fill):
                slot = where.setdefault(tape.locate(step.place), len(where))
                self._steps.append((None, slot, step.word, step.words))
                continue
            packet = step.packet
            x, y, z = (*step.grid, 1, 1)[:3]
            packet.config.grid_x, packet.config.grid_y, packet.config.grid_z = x, y, z
            for i, arg in enumerate(step.args):
                if isinstance(arg, Place) and i in packet.pointers:
                    slot = where.setdefault(tape.locate(arg), len(where))
                    pointers.append((packet, packet.pointers[i], slot))
                elif isinstance(arg, BoxOf):
                    slot = where.setdefault(tape.locate(arg.place), len(where))
                    self._boxes.append((slot, packet.boxes[i]))
            self._steps.append((ctypes.byref(packet.config), packet.function, packet.table, packet.config))
        self._memory, begin = aligned(8 * max(1, len(where)))
        self.addresses = (ctypes.c_uint64 * max(1, len(where))).from_address(begin)
        for packet, parameter, slot in pointers:
            packet.table[parameter] = begin + 8 * slot
        self._stream = -1
        self._sources(where)

    def _sources(self, where: dict[tuple, int]) -> None:
        """Sort the addresses by what they lie behind: inputs, results, kept, scratch."""
        roles = {role: i for i, role in enumerate(self.tape.roles)}
        self._bases = []  # (slot, number of the input, result, ...; bytes)
        count, results = len(roles), len(self.tape.results)
        for (source, offset), slot in where.items():
            if source in roles:
                base = roles[source]
            elif isinstance(source, tuple):
                base = count + source[1]
            else:
                base = count + results + ("kept", "scratch").index(source)
            self._bases.append((slot, base, offset))

    def play(self, device: torch.device, inputs: Sequence[Tensor]):
        """Do it again; see :meth:`Tape.play`."""
        bases = [x.data_ptr() for x in inputs]
        for address in bases:
            if address & 15:
                return None
        results, kept, scratch = self.tape.allocate(device)
        bases += [x.data_ptr() for x in results]
        bases.append(0 if kept is None else kept.data_ptr())
        bases.append(0 if scratch is None else scratch.data_ptr())
        addresses = self.addresses
        for slot, base, offset in self._bases:
            addresses[slot] = bases[base] + offset
        self._move_boxes()
        self._launch(device)
        return results, kept

    def _move_boxes(self) -> None:
        addresses = self.addresses
        for slot, box in self._boxes:
            address = addresses[slot]
            if address != box.address:
                box.move(address)

    def _launch(self, device: torch.device) -> None:
        index = device.index
        stream = launcher.current_stream(index)
        if stream != self._stream:
            for *_, config in self._steps:
                if isinstance(config, cuda.LaunchConfig):
                    config.stream = stream
            self._stream = stream
        run, launch, fill = self.driver.run, self.driver.launch, self.driver.fill
        for config, function, table, more in self._steps:
            if config is None:
                run(index, fill, self.addresses[function], table, more, stream)
            else:
                run(index, launch, config, function, table, None)
