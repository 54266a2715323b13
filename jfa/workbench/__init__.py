"""`jfa compile`, `jfa timeline` and `jfa emulator sweep|explore`: tools for kernels, yours too.

`targets.py` says what their arguments name; `recording.py` notes launches without running them; `launches.py` finds a small problem
that launches a shipped configuration.
"""
