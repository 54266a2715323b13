"""Record a launch on the emulator's clock; the commands that use it are in :mod:`jfa.workbench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoSuchKernelError(LookupError):
    """Raised when no kernel of the requested name was launched."""


def record(launch: Callable[[], Any], chip: Any, kernel: str = "", **options: Any):
    """Return the :class:`Timeline` of the last kernel that ``launch()`` launches, with ``chip``'s rates (modelled).

    kernel: of several kernels that are launched the one of that name, its last launch. Raises NoSuchKernelError if there is none.
    """
    import jfa.emulator as emulator
    from jfa.emulator.frontend.hooks import Last
    from jfa.emulator.timeline import Timeline

    Last.runs = runs = []
    try:
        with emulator.options(policy="timed", rates=chip, trace=True, **options):
            launch()
    finally:
        Last.runs = None
    if not kernel:
        return Timeline.of(emulator.last())
    found = [run for run in runs if run.kernel == kernel]
    if not found:
        launched = ", ".join(dict.fromkeys(run.kernel for run in runs)) or "none"
        raise NoSuchKernelError(f"no kernel named {kernel} was launched, but {launched}")
    return Timeline.of(found[-1])
