"""A small kernel whose result is known. ``jfa doctor`` runs this file in a process of its own:

    python known_value.py interpreter | emulator | gpu

Exit status 0 if the number is right; otherwise the last line says what came out or what was raised.
"""

import sys

import torch
import triton
import triton.language as tl

COUNT = 100
EXPECTED = sum(i * (i + 1) for i in range(COUNT))


@triton.jit
def weighted_sum(values, total, count, BLOCK: tl.constexpr):
    """Add ``sum_i values[i] * (i + 1)`` to ``total``: each program takes every num_programs-th block, the last one masked."""
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, BLOCK * tl.num_programs(0)):
        index = start + tl.arange(0, BLOCK)
        partial += tl.load(values + index, mask=index < count, other=0.0) * (index + 1)
    tl.atomic_add(total, tl.sum(partial))


def main(way: str) -> int:
    """Launch on three programs and compare."""
    device = "cuda" if way == "gpu" else "cpu"
    if way == "emulator":
        import jfa.emulator  # noqa: F401  installs the hook that runs launches on CPU tensors
    values = torch.arange(COUNT, dtype=torch.float32, device=device)
    total = torch.zeros(1, device=device)
    weighted_sum[(3,)](values, total, COUNT, BLOCK=16)
    if total.item() == EXPECTED:
        return 0
    print(f"wrong number: {total.item()} instead of {EXPECTED}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
