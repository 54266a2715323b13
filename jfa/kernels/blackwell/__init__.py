"""Blackwell (sm_100, sm_103): warp-specialized kernels in TLX."""

from jfa.kernels.blackwell.host import backward, forward, plan, supports

__all__ = ["backward", "forward", "plan", "supports"]
