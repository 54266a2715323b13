"""The launch hook: launches on CPU tensors go to the emulator. Triton's modules stay as they are but for three
`run` methods and the message of a call without a grid."""

import contextvars
import functools
import threading

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ..counting import Active
from ..errors import EmulatorError
from ..options import Options
from .driver import answer_without_gpu
from .standin import register as register_tlx

try:
    from triton.runtime.interpreter import InterpretedFunction
except ImportError:
    InterpretedFunction = JITFunction

_options = contextvars.ContextVar("jfa_emulator_options", default=None)


_installing = threading.RLock()
_tuning = threading.RLock()  # a tuner remembers the arguments of one launch: those of other threads wait


class _Last(threading.local):
    """The Run of this thread's last launch and, if requested, the Runs of all its launches."""

    run = None
    runs = None


Last = _Last()


def current_options():
    return _options.get() or Options()


def set_options(options):
    """Set options; return the token that `reset_options` takes."""
    return _options.set(options)


def reset_options(token):
    _options.reset(token)


def emulate(jit, grid, args, kwargs, warmup=False):
    """Launch `jit` on the emulator; the emulator's Run is kept as the last one."""
    if warmup:
        return None
    try:
        from . import launch as launching
        from .artifacts import Kernel
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        message = "kernels on CPU tensors run on jfa's emulator, which needs greenlet: pip install 'jfa[emulator]'"
        raise ModuleNotFoundError(message, name=error.name) from None

    try:
        Last.run = launching.launch(jit, grid, args, kwargs, current_options())
        if Last.runs is not None and Last.run is not None:
            Last.runs.append(Last.run)
        if Active.counts is not None and Last.run is not None:
            Active.counts.launches += 1
            Active.counts.programs += Last.run.stats["ctas"]
            Active.counts.operations += Last.run.stats
    except Exception as error:
        Last.run = getattr(error, "run", None)
        if isinstance(error, EmulatorError) and not error.where:  # it never came to run: name the kernel itself
            code = jit.fn.__code__
            error.where = ((code.co_filename, code.co_firstlineno),)
        raise
    return Kernel(jit, args, kwargs, Last.run)


def _tensors(args, kwargs):
    for value in (*args, *kwargs.values()):
        tensor = getattr(value, "base", value)  # of a descriptor or a reinterpreted tensor
        if isinstance(tensor, torch.Tensor):
            yield tensor


def _takes(args, kwargs):
    """Return whether a launch belongs to the emulator: CPU tensors, or no GPU at all."""
    devices = {tensor.device.type for tensor in _tensors(args, kwargs)}
    if "meta" in devices:
        raise TypeError("a tensor on the meta device holds no numbers: a kernel takes tensors on a CPU or a GPU")
    if devices - {"cpu"}:
        return False
    return bool(devices) or not torch.cuda.is_available()


def _hook_jit(original):
    @functools.wraps(original)
    def run(self, *args, grid, warmup, **kwargs):
        if warmup or not _takes(args, kwargs):
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        return emulate(self, grid, args, kwargs)

    return run


def _hook_interpreted(original):
    @functools.wraps(original)
    def run(self, *args, grid, warmup, **kwargs):
        return emulate(self, grid, args, kwargs, warmup)

    return run


def _hook_call(original):
    """Refuse a kernel called without a grid, with Triton's error and a fix."""

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        name = self.fn.__name__
        raise RuntimeError(
            f"Cannot call @triton.jit'd outside of the scope of a kernel: `{name}(...)` has no grid.\n"
            f"  Fix: launch it as {name}[(number_of_programs,)](...)."
        )

    return call


def _hook_autotuner(original):
    @functools.wraps(original)
    def run(self, *args, **kwargs):
        if not _takes(args, kwargs) or kwargs.get("warmup"):
            return original(self, *args, **kwargs)
        return _first_config(self, args, kwargs)

    return run


def _first_config(tuner, args, kwargs):
    """Do what an autotuned launch does without a GPU: no timing, the first configuration that pruning leaves."""
    with _tuning:
        tuner.nargs = dict(zip(tuner.arg_names, args))
        try:
            configs = tuner.configs if len(tuner.configs) == 1 else tuner.prune_configs(kwargs)
            tuner.best_config = config = configs[0]
            if twice := sorted(config.kwargs.keys() & kwargs.keys()):
                raise ValueError(
                    f"Conflicting meta-parameters: {', '.join(twice)}. Make sure that you don't re-define auto-tuned symbols.\n"
                    f"  Fix: leave {', '.join(twice)} out of the launch: triton.autotune passes it."
                )
            options = config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **kwargs, **options})
        finally:
            tuner.nargs = None
    return tuner.fn.run(*args, **{**kwargs, **options})


_installed = {}


def install():
    """Put the hook in (idempotent)."""
    with _installing:
        if not _installed:
            _install()


def _install():
    hooks = [(JITFunction, _hook_jit), (Autotuner, _hook_autotuner)]
    if InterpretedFunction is not JITFunction:
        hooks.append((InterpretedFunction, _hook_interpreted))
    answer_without_gpu()
    register_tlx()
    for cls, hook in hooks:
        _installed[cls, "run"] = cls.run
        cls.run = hook(cls.run)
    for cls in {JITFunction, InterpretedFunction}:
        _installed[cls, "__call__"] = cls.__call__
        cls.__call__ = _hook_call(cls.__call__)


def uninstall():
    """Take the hook out again."""
    with _installing:
        for (cls, name), original in _installed.items():
            setattr(cls, name, original)
        _installed.clear()
