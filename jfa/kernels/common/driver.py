"""Call, by ctypes, the few functions of the CUDA driver that launch a kernel whose arguments are laid out already.

A kernel's parameters are a table of addresses, one per parameter. Their sizes are read from the driver
(``cuFuncGetParamInfo``, since CUDA 12.4). Names and structures are those of cuda.h.
"""

from __future__ import annotations

import ctypes
from functools import cache

SUCCESS, INVALID_CONTEXT = 0, 201
MAP_BYTES = 128  # of a CUtensorMap
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID: the launch may begin before the previous one ends
_MOST_PARAMETERS = 4096


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; every value used here is an int."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    ]


_OVERLAP = LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


def launch_config(warps: int, shared: int, overlap: bool) -> LaunchConfig:
    """Return the config of a launch of ``warps`` warps and ``shared`` bytes; its grid and stream are still to be set."""
    attributes = ctypes.addressof(_OVERLAP) if overlap else None
    return LaunchConfig(1, 1, 1, 32 * warps, 1, 1, shared, None, attributes, int(overlap))


class Driver:
    """The driver functions that a launch calls. ``launch(config, function, table, None)`` takes ctypes objects made
    beforehand."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self.launch = library.cuLaunchKernelEx
        self.replace_address = library.cuTensorMapReplaceAddress
        self._parameter = library.cuFuncGetParamInfo
        self.fill = library.cuMemsetD32Async  # (address, word, words, stream)
        self.fill.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)

    def run(self, index: int, function, *args) -> None:
        """Call a function of the driver for device ``index``. A thread's first call may find no context: then it is given one.

        Raises:
            RuntimeError: the driver refuses.
        """
        code = function(*args)
        if code != SUCCESS:
            self.retry(code, index, function, *args)

    def retry(self, code: int, index: int, function, *args) -> None:
        """Call a function again that returned ``code``, if it had no context; else raise."""
        if code == INVALID_CONTEXT:
            self.make_current(index)
            code = function(*args)
        if code != SUCCESS:
            raise RuntimeError(f"the CUDA driver refused a launch: CUresult {code}")

    def make_current(self, index: int) -> None:
        """Give this thread the context that torch and Triton use on a device: its primary one."""
        context, device = ctypes.c_void_p(), ctypes.c_int()
        code = self.library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
        code = code or self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if code or self.library.cuCtxSetCurrent(context):
            raise RuntimeError(f"the CUDA driver has no context for device {index}")

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """Return (offset, size) in bytes of each of a kernel's parameters."""
        found, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
        while len(found) < _MOST_PARAMETERS:
            index = ctypes.c_size_t(len(found))
            if self._parameter(ctypes.c_void_p(function), index, ctypes.byref(offset), ctypes.byref(size)) != SUCCESS:
                break
            found.append((offset.value, size.value))
        return found


@cache
def driver() -> Driver | None:
    """Return the machine's driver; None where there is none, or one before CUDA 12.4."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
