"""Launch a jit function again without going through Triton's argument binding.

Triton binds, classifies and hashes every argument of every launch, which takes 20 to 60 microseconds of Python. Which
machine code a launch gets depends only on the constexprs and options, fixed per :class:`Variant`, and on what Triton
specializes on (types, multiples of 16, ones), which :func:`facts` reads. So a variant remembers the kernel that Triton
compiled for the same facts, with memory in which its arguments are laid out (:mod:`.packet`); without such memory it
passes the arguments to Triton's launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.common.packet import Packet, Unfit
from jfa.kernels.common.sizes import Size

INT32 = 2**31


class NotCompiled(Unfit):
    """Raised with the reason why a launch cannot be laid out yet."""


class Variant:
    """A jit function with its constexprs and launch options.

    Args:
        kernel: a ``@triton.jit`` function whose constexprs follow its other parameters.
        options: a value for each constexpr, and launch options such as num_warps.
    """

    def __init__(self, kernel, **options):
        if recording() is not None:
            raise NotCompiled(f"{kernel.__name__} has no such variant")
        self.kernel, self.options = kernel, options
        self.compiled: dict[tuple, Known] = {}
        names = [p.name for p in kernel.params if p.is_constexpr]
        if [p.name for p in kernel.params][-len(names) :] != names:
            raise ValueError(f"{kernel.__name__}: constexprs must follow the other parameters")
        self.constants = tuple(options[name] for name in names)
        self.names = [p.name for p in kernel.params if not p.is_constexpr]
        self.specialised = tuple(not p.do_not_specialize for p in kernel.params if not p.is_constexpr)

    def launch(self, device: torch.device, grid: tuple[int, ...], *args) -> None:
        """Launch on ``grid`` with the arguments before the constexprs, on ``device``, which must be the current one.

        While a call is recorded nothing is launched.
        """
        recorder = recording()
        if recorder is None:
            self._launch(device, grid, args)
        else:
            recorder.launched(self, device, grid, args)

    def _launch(self, device, grid, args) -> None:
        if not by_driver(device) or hooks():
            self.launch_by_triton(grid, args)  # the emulator; or a profiler that wants to see launches
            return
        key = self.key(device, args)
        known = self.compiled.get(key)
        if known is None:
            compiled = self.launch_by_triton(grid, args)
            compiled = compiled.result() if hasattr(compiled, "result") else compiled
            if getattr(compiled, "function", None) is not None:
                self.compiled[key] = Known(compiled, self._packet_or_none(device, compiled, args))
        elif grid[0] > 0:
            stream = current_stream(device.index)
            if known.packet is None or not known.packet.launch(grid, stream, args):
                known.run((*grid, 1, 1)[:3], stream, args, self.constants)

    def launch_by_triton(self, grid: tuple[int, ...], args: tuple):
        """Launch as Triton does, which compiles where it has to, and return what it compiled."""
        return self.kernel[grid](*args, **self.options)

    def _packet_or_none(self, device, compiled, args: tuple) -> Packet | None:
        try:
            return Packet(compiled, self.names, args, device.index)
        except Unfit:
            return None

    def key(self, device: torch.device, args: tuple) -> tuple:
        """Return a key of the machine code that a launch gets."""
        return (device.index, *facts(args, self.specialised))

    def packet(self, device: torch.device, args: tuple, key: tuple) -> Packet:
        """Return a packet of its own for ``args``, whose :meth:`key` is given.

        Raises:
            NotCompiled: Triton has launched none with this key.
            Unfit: there can be none.
        """
        known = self.compiled.get(key)
        if known is None:
            raise NotCompiled(f"{self.kernel.__name__} has not been launched with such arguments")
        return Packet(known.compiled, self.names, args, device.index)


@dataclass(frozen=True)
class Known:
    """The kernel that Triton compiled for a launch, and its packet, if there is one."""

    compiled: object
    packet: Packet | None

    def run(self, grid: tuple[int, int, int], stream: int, args: tuple, constants: tuple) -> None:
        """Launch by Triton's launcher."""
        compiled = self.compiled
        hooks = None, None, None
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *hooks, *args, *constants)


def by_driver(device: torch.device) -> bool:
    """Return whether launches on a device are the CUDA driver's; if not, they are the emulator's."""
    return device.type == "cuda"


def hooks() -> bool:
    """Return whether hooks on Triton's launches are set."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if type(before) is type(after) is _HookChain:
        return bool(before.calls or after.calls)
    return bool(before or after)


_HookChain = getattr(knobs, "HookChain", None)  # older versions of Triton have one function


# ------------------------------------------------------------------------------------------------------------ recording
_RECORDING = threading.local()


def recording():
    """Return the jfa.kernels.common.recorder.Recorder that this thread's launches are reported to, or None."""
    return getattr(_RECORDING, "recorder", None)


def record_to(recorder) -> None:
    """Report this thread's launches to ``recorder`` from now on, instead of launching; None: launch again."""
    _RECORDING.recorder = recorder


def by_torch(function: Callable, *args) -> None:
    """Call a function that writes to some of its arguments by operations of torch, in the order of the launches around it.

    While a call is recorded it is only noted, and called when the tape is played. It must return nothing, and must not be asked
    for what depends on contents.

    Args:
        args: tensors, numbers, and dataclasses and tuples of them.
    """
    recorder = recording()
    if recorder is None:
        function(*args)
    else:
        recorder.called(function, args)


# ---------------------------------------------------------------------------------------------------- what Triton asks
def facts(args: tuple, specialised: tuple[bool, ...]) -> list:
    """Return all that Triton's choice of machine code reads off ``args``, with the finest distinctions of any version."""
    return [_fact(x, special) for x, special in zip(args, specialised)]


def _fact(x, specialised: bool):
    kind = type(x)
    if kind is int or kind is Size:
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
def stream_getter() -> Callable[[int], int]:
    """Return the function of a device's index that returns the handle of its current stream."""
    return triton.runtime.driver.active.get_current_stream


def current_stream(index: int) -> int:
    """Return the handle of a device's current stream."""
    return stream_getter()(index)
