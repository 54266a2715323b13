"""A stand-in for triton.language.extra.tlx where the installed Triton has none, so that TLX kernels load and run on the emulator.

It holds nothing of its own: its attributes are those of the module that registered itself
(see extension.py). Compiling a TLX kernel still needs fbtriton.
"""

import importlib
import importlib.util
import sys
import types

from . import extension
from .extension import NAME


class TlxStandIn(types.ModuleType):
    """Module `tlx` whose attributes are looked up in the emulated TLX on access."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(extension.module(), name)
        except AttributeError:
            raise AttributeError(f"module '{NAME}' has no attribute '{name}'") from None

    def __dir__(self):
        return dir(extension.module())


def register():
    """Put the stand-in where `import triton.language.extra.tlx` finds it, unless Triton has its own."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    extra = importlib.import_module("triton.language.extra")
    module = TlxStandIn(NAME, __doc__)
    sys.modules[NAME] = module
    extra.tlx = module
