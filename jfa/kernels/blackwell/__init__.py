"""Blackwell (sm_100, sm_103): warp-specialized kernels in TLX.

Start with launch.py (what a call does) and config.py (what is chosen for it); then forward.py, backward_1cta.py, backward_dq.py.
"""
