"""Repeat a call's allocations, launches and fills with other addresses and other sizes.

A :class:`.recorder.Recorder` has recorded what a call does, with numbers that are formulas in the call's sizes. A
:class:`Tape` repeats it: one check of the conditions, one allocation per result, one for all scratch memory, one store
per address or number, and the driver's launches; between them calls of torch, such as copies of inputs with strides
that no kernel accepts. Where the conditions do not hold (the sizes lead to another tile
shape, or change a number that Triton compiled in), the call needs another tape.

Inputs are identified by their role, not by their memory: two may share memory in one call and not in another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.common import driver as cuda
from jfa.kernels.common import launcher
from jfa.kernels.common.packet import Packet, aligned
from jfa.kernels.common.recorder import (
    BoxOf,
    ByTorch,
    Fill,
    Launch,
    Place,
    Recorder,
    StandIn,
    Unrepeatable,
    leaves,
    mapped,
    product,
)
from jfa.kernels.common.sizes import Size, same

ALIGNMENT = 512  # of what shares one allocation, as torch's allocator aligns


class Nth(int):
    """A number that a tape's ``measure`` returns at this place."""


def resolved(x: int, values: tuple) -> int:
    """Return a number of a tape for a call whose sizes gave ``values``."""
    return values[x] if type(x) is Nth else x


class Tape:
    """A recorded call that can be repeated.

    Args:
        recorder: a recorder of the whole call.
        results: tensors that the call returns: allocations of their own, whole.
        kept: a structure of int32 tensors that outlives the call, in allocations that a tape combines into one.

    Attributes:
        measure: a function of the recorder's sizes that returns ``values``, or None where the call needs another tape.
        kept: the structure with places in that allocation, whose numbers are among the first ``kept_numbers`` values.

    Raises:
        Unrepeatable: the call has an operation that a tape cannot repeat.
        Unfit: a launch cannot be laid out, or (NotCompiled) not yet.
    """

    def __init__(self, recorder: Recorder, results: Sequence[StandIn], kept: object = None):
        self.roles = recorder.roles
        self._aligned = recorder.aligned
        self._outputs: list[int | tuple] = []
        made = recorder.allocations
        places = [x.place for x in results]
        own = [x.source for x in places]
        if len(set(own)) < len(own) or not all(isinstance(n, int) and _whole(x, made[n]) for x, n in zip(places, own)):
            raise Unrepeatable("a result that is no allocation of its own")
        kept = mapped(kept, lambda x: x.place, StandIn)
        self._groups: dict[int, tuple] = {n: (("result", i), 0) for i, n in enumerate(own)}
        outlive = {x.source for x in leaves(kept, Place) if isinstance(x.source, int)} - set(own)
        kept_bytes = self._pack(made, sorted(outlive), "kept")
        scratch_bytes = self._pack(made, [n for n in range(len(made)) if n not in self._groups], "scratch")
        self.kept = mapped(kept, self._in_kept, Place)
        self.kept_numbers = len(self._outputs)
        self.kept_words, self.scratch_words = self._nth(kept_bytes // 4), self._nth(scratch_bytes // 4)
        self.results = [(self._nth(x.size), self._nth(x.stride), x.dtype) for x in places]
        self.steps = [self._located(step) for step in recorder.steps]
        self._empty = empty_of(recorder.device.type)
        self._deck = Deck(self)
        self.measure = recorder.trace.compile(self._outputs)

    # ------------------------------------------------------------------------------------------------------- making it
    def _pack(self, made: list[StandIn], numbers: list[int], name: str) -> int:
        """Give allocations places in one, and return its bytes."""
        total = 0
        for n in numbers:
            self._groups[n] = (name, total)
            total += -(-made[n].numel() * made[n].itemsize // ALIGNMENT) * ALIGNMENT
        return total

    def _nth(self, x: int | tuple) -> int | tuple:
        """Return a number, or its place among what ``measure`` returns if that depends on sizes. A tuple always has one."""
        if not isinstance(x, Size | tuple):
            return x
        for i, y in enumerate(self._outputs):
            if isinstance(x, Size) and isinstance(y, Size) and same(x, y):
                return Nth(i)
        self._outputs.append(x)
        return Nth(len(self._outputs) - 1)

    def _locate(self, place: Place) -> Place:
        """Return a place in a role, ("result", i), "kept" or "scratch"."""
        if not isinstance(place.source, int):
            return place
        source, begin = self._groups[place.source]
        return replace(place, source=source, offset=begin + place.offset)

    def _in_kept(self, place: Place) -> Place:
        found = self._whole_place(place)
        if found.source != "kept":
            raise Unrepeatable("what outlives the call is not its own")
        return found

    def _whole_place(self, place: Place) -> Place:
        """Return a place as :meth:`_locate` does, with all its numbers among what ``measure`` returns."""
        found = self._locate(place)
        size, stride = (tuple(self._nth(x) for x in y) for y in (found.size, found.stride))
        return replace(found, offset=self._nth(found.offset), size=size, stride=stride)

    def _spot(self, place: Place) -> Place:
        """Return a place as :meth:`_locate` does, whose size and stride are each one of the values."""
        found = self._locate(place)
        numbers = dict(offset=self._nth(found.offset), size=self._nth(found.size), stride=self._nth(found.stride))
        return replace(found, **numbers)

    def _located(self, step: Launch | Fill | ByTorch) -> Launch | Fill | ByTorch:
        def located(x):
            if isinstance(x, Place):
                x = self._locate(x)
                return replace(x, offset=self._nth(x.offset))
            return BoxOf(located(x.place), x.descriptor) if isinstance(x, BoxOf) else self._nth(x)

        if isinstance(step, Fill):
            return Fill(located(step.place), step.word, self._nth(step.words))
        if isinstance(step, ByTorch):
            return replace(step, args=mapped(mapped(step.args, self._spot, Place), self._nth, Size))
        grid, args = tuple(self._nth(x) for x in step.grid), tuple(located(x) for x in step.args)
        return replace(step, grid=grid, args=args)

    # ------------------------------------------------------------------------------------------------------- playing it
    def allocate(self, values: tuple) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Return (results, kept, scratch), uninitialized, on the current device."""
        empty = self._empty
        results = [empty(values[n], values[m], dtype) for n, m, dtype in self.results]
        n = self.kept_words
        n = values[n] if type(n) is Nth else n
        kept = empty((n,), (1,), torch.int32) if n else None
        n = self.scratch_words
        n = values[n] if type(n) is Nth else n
        return results, kept, empty((n,), (1,), torch.int32) if n else None

    def fits(self, bases: list[int]) -> bool:
        """Return whether inputs at these addresses are aligned where it matters. Where it did not, they may be."""
        return not any(base & 15 and aligned for base, aligned in zip(bases, self._aligned))

    def play(self, device: torch.device, values: tuple, inputs: Sequence[Tensor]):
        """Do it again on a GPU.

        Args:
            device: the current one.
            values: what ``measure`` returned for this call's sizes.
            inputs: one per role.

        Returns:
            (results, kept), or None where nothing was done: another thread plays this tape, an input is not at whole 16 bytes that
            was when this was recorded, or a hook on Triton's launches is set.
        """
        deck = self._deck
        if launcher.hooks() or not deck.lock.acquire(blocking=False):
            return None
        try:
            return deck.play(device, values, inputs)
        finally:
            deck.lock.release()


def _whole(place: Place, made: StandIn) -> bool:
    contiguous = StandIn(made.recorder, 0, 0, place.size, place.stride, place.dtype, made.device).is_contiguous()
    elements = product(place.size), made.numel()
    return same(place.offset, 0) and contiguous and (same(*elements) or elements[0] == elements[1])


def empty_of(kind: str) -> Callable[[tuple, tuple, torch.dtype], Tensor]:
    """Return a function of (size, strides, type) that allocates on the current device of a kind, "cuda" or "cpu".

    It is the one that torch.compile's generated code calls, which takes a third of ``torch.empty_strided``'s time: it asks no
    dispatcher. Nothing that is played has to be seen by one.
    """
    made = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{kind}", None)
    if made is not None:
        return made
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=kind)


_address = Tensor.data_ptr


def views_in(base: Tensor, kept: object, values: tuple) -> object:
    """Return a tape's kept structure as views of the tensor ``base``, which its play returned."""

    def view(place: Place) -> Tensor:
        offset = resolved(place.offset, values) // 4
        size, stride = (tuple(resolved(x, values) for x in y) for y in (place.size, place.stride))
        return base.as_strided(size, stride, offset)

    return mapped(kept, view, Place)


# ------------------------------------------------------------------------------------------------------------------ deck
class Deck:
    """A tape's launches laid out for the driver: all addresses are in one array, to which the pointer parameters
    refer."""

    def __init__(self, tape: Tape):
        self.tape, self.lock, self.driver = tape, Lock(), cuda.driver()
        self._where: dict[tuple, int] = {}
        self._boxes: list[tuple] = []  # (slot, box)
        self._numbers: list[tuple] = []  # (where a number lies, its place in the values)
        self._grids: list[tuple] = []
        self._packets: list[Packet] = []
        self._steps: list[tuple] = []
        pointers: list[tuple] = []
        for step in tape.steps:
            if isinstance(step, Fill):
                self._steps.append((None, self._slot(step.place), step.word, step.words))
            elif isinstance(step, ByTorch):
                self._steps.append((None, _compiled_call(step, tape), None, None))
            else:
                pointers += self._lay_out(step)
        count = max(1, len(self._where))
        self._memory, begin = aligned(8 * count)
        self.addresses = (ctypes.c_uint64 * count).from_address(begin)
        for packet, parameter, slot in pointers:
            packet.table[parameter] = begin + 8 * slot
        self._stream, self._values, self._current_stream = -1, None, launcher.stream_getter()
        self._store = self._compiled_stores()

    def _slot(self, place: Place) -> int:
        return self._where.setdefault((place.source, type(place.offset), int(place.offset)), len(self._where))

    def _lay_out(self, step: Launch) -> list[tuple]:
        """Lay one launch out, and return which of its parameters are which addresses."""
        packet, pointers = _packet(step), []
        config = packet.config
        for name, size in zip(("grid_x", "grid_y", "grid_z"), (*step.grid, 1, 1)):
            if type(size) is Nth:
                self._grids.append((config, name, size))
            else:
                setattr(config, name, size)
        for i, arg in enumerate(step.args):
            if isinstance(arg, Place) and i in packet.pointers:
                pointers.append((packet, packet.pointers[i], self._slot(arg)))
            elif isinstance(arg, BoxOf):
                self._boxes.append((self._slot(arg.place), packet.boxes[i]))
            elif type(arg) is Nth and i in packet.numbers:
                self._numbers.append((packet.numbers[i], arg))
        self._packets.append(packet)
        self._steps.append((ctypes.byref(config), packet.function, packet.table, None))
        return pointers

    def _compiled_stores(self) -> Callable:
        """Return a function of the bases (inputs, results, kept, scratch) and values that stores every address.

        It is written out, a line per address: a loop over them would take longer than all else that a play does in Python.
        """
        roles = {role: i for i, role in enumerate(self.tape.roles)}
        count, results = len(roles), len(self.tape.results)
        names, lines = {"addresses": self.addresses}, []
        words: dict[int, list[str]] = {}
        for i, (slot, box) in enumerate(self._boxes):
            word = box.word()
            names[f"box{i}"] = box if word is None else word
            words.setdefault(slot, []).append(f"box{i}.move(x)" if word is None else f"box{i}.value = x")
        for (source, kind, offset), slot in self._where.items():
            if source in roles:
                base = roles[source]
            elif isinstance(source, tuple):
                base = count + source[1]
            else:
                base = count + results + ("kept", "scratch").index(source)
            more = f" + values[{offset}]" if kind is Nth else f" + {offset}" if offset else ""
            lines += [f"addresses[{slot}] = x = bases[{base}]{more}", *words.get(slot, ())]
        exec("\n    ".join(["def store(bases, values):", *lines, "return"]), names)
        return names["store"]

    def play(self, device: torch.device, values: tuple, inputs: Sequence[Tensor]):
        """Do it again; see :meth:`Tape.play`."""
        bases = list(map(_address, inputs))
        for address in bases:
            if address & 15 and not self.tape.fits(bases):
                return None
        if values is not self._values and values != self._values:
            self._resize(values)
        results, kept, scratch = self.tape.allocate(values)
        bases += map(_address, results)
        bases.append(0 if kept is None else kept.data_ptr())
        bases.append(0 if scratch is None else scratch.data_ptr())
        self._store(bases, values)
        self._launch(device, (inputs, results, kept, scratch))
        return results, kept

    def _resize(self, values: tuple) -> None:
        """Store the numbers of other sizes."""
        self._values = None
        for slot, n in self._numbers:
            slot.value = values[n]
        for config, name, n in self._grids:
            setattr(config, name, values[n])
        self._values = values

    def _launch(self, device: torch.device, tensors: tuple) -> None:
        index = device.index
        stream = self._current_stream(index)
        if stream != self._stream:
            for packet in self._packets:
                packet.config.stream = stream
            self._stream = stream
        driver = self.driver
        launch, fill = driver.launch, driver.fill
        for config, function, table, more in self._steps:
            if config is not None:
                code = launch(config, function, table, None)
                if code:
                    driver.retry(code, index, launch, config, function, table, None)
            elif table is None:
                function(self._values, *tensors)
            else:
                words = self._values[more] if type(more) is Nth else more
                code = fill(self.addresses[function], table, words, stream)
                if code:
                    driver.retry(code, index, fill, self.addresses[function], table, words, stream)


def _compiled_call(step: ByTorch, tape: Tape) -> Callable:
    """Return a function of (values, inputs, results, kept, scratch) that calls what is left to torch.

    It is written out, too: taking the arguments apart in every call would take longer than most of what torch does with them.
    """
    names: dict = dict(function=step.function, grad=torch.is_grad_enabled, no_grad=torch.no_grad)
    written = []
    for i, x in enumerate(step.args):
        if isinstance(x, Place):
            names[f"dtype{i}"] = x.dtype
            written.append(_written(x, tape, f"dtype{i}"))
        elif type(x) is Nth:
            written.append(f"values[{int(x)}]")
        elif leaves(x, Place) or leaves(x, Nth):
            sources = {place: compile(_written(place, tape, "dtype"), "tape", "eval") for place in leaves(x, Place)}
            names[f"rebuilt{i}"] = partial(_rebuilt, x, sources)
            written.append(f"rebuilt{i}(values, inputs, results, kept, scratch)")
        else:
            names[f"x{i}"] = x
            written.append(f"x{i}")
    lines = [
        "def call(values, inputs, results, kept, scratch):",
        f"    if not grad(): return function({', '.join(written)})",
        f"    with no_grad(): return function({', '.join(written)})",
    ]
    exec("\n".join(lines), names)
    return names["call"]


def _written(place: Place, tape: Tape, dtype: str) -> str:
    """Return the source of a tensor at a place, whose size and stride are each one of the values."""
    size, stride = f"values[{int(place.size)}]", f"values[{int(place.stride)}]"
    offset = f"values[{int(place.offset)}]" if type(place.offset) is Nth else f"{place.offset}"
    elements = f"{offset} // {place.dtype.itemsize}"
    if place.source in ("kept", "scratch"):
        return f"{place.source}.view({dtype}).as_strided({size}, {stride}, {elements})"
    if isinstance(place.source, tuple):
        return f"results[{place.source[1]}].as_strided({size}, {stride}, {elements})"
    base = f"inputs[{tape.roles.index(place.source)}]"
    return f"{base}.as_strided({size}, {stride}, {base}.storage_offset() + {elements})"


def _rebuilt(x: object, sources: dict, *given) -> object:
    """Return a structure with tensors and numbers for its places and names; ``given`` as :func:`_compiled_call`'s function."""
    names = dict(zip(("values", "inputs", "results", "kept", "scratch"), given))
    tensor = lambda place: eval(sources[place], names | {"dtype": place.dtype})
    return mapped(mapped(x, tensor, Place), lambda n: given[0][n], Nth)


def _packet(step: Launch) -> Packet:
    """Return a packet of a launch's own, whose addresses are still to be set."""
    device = step.device

    def example(x):
        if isinstance(x, Place):
            return torch.empty(ALIGNMENT // x.dtype.itemsize, dtype=x.dtype, device=device)
        if isinstance(x, BoxOf):
            found = object.__new__(TensorDescriptor)
            found.__dict__.update(x.descriptor.__dict__, base=example(x.place))
            return found
        return 1 if type(x) is Nth else x

    return step.variant.packet(device, tuple(example(x) for x in step.args), step.key)
