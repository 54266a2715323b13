"""How long a small call keeps the host, beside FlashAttention 2's: a row per implementation, on a GPU.

python tests/gpu/host_time.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from jfa.bench import host_time  # noqa: E402


def main() -> None:
    """Print one row per implementation."""
    print(f"{'':24s} {'forward':>9s} {'and backward':>13s}  us per call on the host, {torch.cuda.get_device_name()}")
    for name, found in host_time.measure().items():
        print(f"{name:24s} {found['forward']:9.1f} {found['both']:13.1f}")


if __name__ == "__main__":
    main()
