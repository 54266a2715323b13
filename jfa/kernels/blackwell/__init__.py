"""Blackwell (sm_100, sm_103): warp-specialized kernels in TLX."""

from jfa.kernels.blackwell.host import backward, forms, forward, plan, supports

__all__ = ["backward", "forms", "forward", "plan", "supports"]
