"""Helpers for the host side of all backends: constants for a kernel, padded sizes, number of multiprocessors."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch

from jfa.kernels.base import Problem
from jfa.kernels.common.softmax import LOG2_E
from jfa.masks import Band

# Stands for a scale of 0: scores times it vanish, and a masked -inf stays -inf where * 0 makes it NaN
ZERO_SCALE = 2.0**-120


def scale_log2(sm_scale: float) -> float:
    """Return the factor from raw scores to log2 units, of the same sign and never 0."""
    size = max(abs(sm_scale), ZERO_SCALE) * LOG2_E
    return -size if sm_scale < 0 else size


@cache
def band_constants(band: Band) -> tuple[int, int, int, int]:
    """Return :attr:`jfa.masks.Band.constants`."""
    return band.constants


def padded_head_dim(*dims: int, least: int = 64) -> int:
    """Return the columns of a tile that holds rows of any of ``dims``: the least power of two, and at least ``least``."""
    return max(least, 1 << (max(dims) - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. triton.cdiv does the same on the host, in several microseconds."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n``, which is 1 or more; triton.next_power_of_2 takes microseconds, too."""
    return 1 << (n - 1).bit_length()


@cache
def num_sms(device: torch.device, emulated: int) -> int:
    """Return the multiprocessors of a GPU, or ``emulated`` for CPU tensors, whose kernels the emulator runs."""
    if device.type != "cuda":
        return emulated
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(problem: Problem):
    """Return a context that makes the problem's GPU the current one: Triton launches there."""
    return torch.cuda.device(problem.device) if problem.device.type == "cuda" else nullcontext()
