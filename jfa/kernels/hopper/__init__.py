"""TLX kernels for sm_90 (H100, H200): TMA producers, wgmma consumers, persistent over lists of valid tiles.

Start with launch.py (what a call does) and config.py (what is chosen for it); then tiles.py and queue.py (where tiles
come from), forward.py, backward.py, backward_dq.py, backward_resident.py.
"""
