"""Runs Triton and TLX kernels on a CPU. It imports nothing of jfa outside itself."""
