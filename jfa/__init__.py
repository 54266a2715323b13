"""Jagged Flash Attention: the op, its kernels, an emulator that runs them on a CPU, and a course."""

__version__ = "0.1.0"
