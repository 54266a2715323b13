"""Blackwell (sm_100, sm_103): warp-specialized kernels in TLX."""

from jfa.kernels.blackwell.host import forward, supports

__all__ = ["forward", "supports"]
