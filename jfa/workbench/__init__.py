"""`jfa compile`, `jfa timeline` and `jfa emulator sweep|explore`: tools for shipped kernels and for your own.

`targets.py` resolves their arguments; `recording.py` records launches without running them; `launches.py` finds a small
problem that launches a shipped configuration.
"""
