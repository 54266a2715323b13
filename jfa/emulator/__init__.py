"""Run unmodified Triton and TLX kernels on a CPU, with errors that name the cause. Imports nothing else of jfa::

    import jfa.emulator as emulator          # installs the launch hook: kernel[grid](cpu tensors) now runs here

    with emulator.options(policy="random", seed=3):
        kernel[grid](x, y, n, BLOCK=128)
    emulator.last()                          # the Run: findings, warnings, events, stats

Modules load on use: the machine needs greenlet and numpy, the frontend Triton.
"""

import contextlib
import importlib
import importlib.util
import sys
import warnings

from .counting import Counts, counting
from .errors import EmulatorError, NotSupported
from .options import Options

__all__ = [
    "Counts",
    "EmulatorError",
    "NotSupported",
    "Options",
    "counting",
    "install",
    "last",
    "options",
    "run",
    "uninstall",
]


def _hooks():
    return importlib.import_module(".frontend.hooks", __name__)


def install():
    """Send launches on CPU tensors (all launches, where there is no GPU or TRITON_INTERPRET is set) to the emulator."""
    importlib.import_module(".frontend.extension", __name__).Extension.load = _load_tlx
    _hooks().install()


def _load_tlx():
    importlib.import_module(".tlx", __name__)


def uninstall():
    """Give Triton its launches back."""
    _hooks().uninstall()


@contextlib.contextmanager
def options(base=None, **changes):
    """Set options of the launches inside the block: `with options(policy="lazy"): …`. Nested blocks change what the outer set."""
    install()
    hooks = _hooks()
    chosen = (base or hooks.current_options()).but(**changes)
    token = hooks.set_options(chosen)
    try:
        yield chosen
    finally:
        hooks.reset_options(token)


def run(kernel, grid, *args, report="collect", **kwargs):
    """Launch `kernel[grid](*args, **kwargs)` on the emulator and return its Run; `Options` fields among the keywords are options.

    report: "collect" (default) gathers findings in the Run where the machine can go on; "raise" ends at the first.
    """
    if not hasattr(kernel, "run"):
        name = getattr(kernel, "__name__", repr(kernel))
        raise TypeError(
            f"`{name}` is no Triton kernel but a {type(kernel).__name__}\n  Fix: decorate it with @triton.jit."
        )
    names = Options.__dataclass_fields__
    chosen = {k: kwargs.pop(k) for k in list(kwargs) if k in names}
    with options(report=report, **chosen):
        kernel[grid](*args, **kwargs)
    return last()


def last():
    """Return the Run of the last launch, or None."""
    return _hooks().Last.run


class _AfterTriton:
    """Import hook: installs the launch hook once Triton has been imported, then removes itself.

    Looking for Triton without importing it, as `importlib.util.find_spec` does, leaves it in place.
    """

    looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "triton" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _install_quietly()

            spec.loader.exec_module = exec_module
        return spec


def _install_quietly():
    if "jfa.emulator.frontend.hooks" in sys.modules:
        return  # the hooks themselves are importing Triton: their caller installs them
    try:
        install()
    except Exception as error:  # an unknown Triton must stay usable without the emulator
        warnings.warn(
            f"jfa: the emulator could not hook into this Triton ({error!r}); kernels run on a GPU only", stacklevel=2
        )


def install_with_triton():
    """Do what `import jfa` does: install now if Triton is loaded, else when it is. Costs nothing and needs no Triton."""
    if "triton" in sys.modules:
        _install_quietly()
    elif not any(isinstance(finder, _AfterTriton) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTriton())
