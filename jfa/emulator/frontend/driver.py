"""Stand in for Triton's driver where there is no GPU.

Kernel files query the driver at import: its device, its target, its benchmark function. Without a GPU Triton has no
driver and raises; the emulator answers instead: the device is the CPU, the target a B200.
"""

import types

import torch
import triton
from triton.backends.compiler import GPUTarget


class EmulatedDriver:
    """The part of a Triton driver that host code uses."""

    def get_active_torch_device(self):
        """Return the device tensors should be made on."""
        return torch.device("cpu")

    def get_current_target(self):
        """Say that it is a Blackwell, so that host code takes its TMA and tensor-memory paths."""
        return GPUTarget("cuda", 100, 32)

    def get_current_device(self):
        """Return the only one there is."""
        return 0

    def get_current_stream(self, device=None):
        """Return the default stream."""
        return 0

    def get_device_interface(self):
        """Return a stand-in for the device interface with which benchmarking code synchronizes."""
        return types.SimpleNamespace(synchronize=lambda *_: None, current_device=lambda: 0, device_count=lambda: 1)

    def get_benchmarker(self):
        """Run once and measure nothing: an emulator's time says nothing of a GPU's."""

        def benchmark(function, **_):
            function()
            return [0.0, 0.0, 0.0]

        return benchmark


def answer_without_gpu():
    """Set the emulated driver, unless there is a GPU or a driver is set already."""
    config = triton.runtime.driver
    if getattr(config, "_active", None) is not None or torch.cuda.is_available():
        return
    config.set_active(EmulatedDriver())
