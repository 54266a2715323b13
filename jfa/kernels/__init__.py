"""Attention kernels: portable Triton, Hopper TLX and Blackwell TLX, behind one contract (:mod:`jfa.kernels.base`)."""
