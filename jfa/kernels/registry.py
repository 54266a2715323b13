"""List the backends, and choose one for a call. Their modules are imported on first use."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from jfa.kernels.base import Problem
from jfa.kernels.preference import USUAL, kind_of

MODULES = {
    "reference": "jfa.kernels.reference",
    "portable": "jfa.kernels.portable",
    "hopper": "jfa.kernels.hopper.launch",
    "blackwell": "jfa.kernels.blackwell.launch",
}
# Backends whose MXFP8 kernels have a module of their own; it is a backend like the others.
MXFP8_MODULES = {"blackwell": "jfa.kernels.blackwell.mxfp8_launch"}


class UnsupportedError(ValueError):
    """The backend that a call names does not support the call's arguments."""


@dataclass(frozen=True)
class Explanation:
    """The backend that a call gets, in which form its kernels run, and why.

    Attributes:
        backend: the backend's name.
        reasons: one (backend, reason) for each backend that was looked at, the chosen one last.
        forms: (pass, form) for the forward and the backward: which kernels run, and on what grounds they were chosen.
    """

    backend: str
    reasons: tuple[tuple[str, str], ...]
    forms: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        reasons = [f"  {name}: {why}" for name, why in self.reasons]
        return "\n".join([f"backend: {self.backend}", *reasons, *(f"{name}: {form}" for name, form in self.forms)])


@cache
def load(name: str, precision: str = "") -> ModuleType | str:
    """Return the backend's module for problems of this precision, or one sentence why it cannot be imported."""
    path = MXFP8_MODULES.get(name, MODULES[name]) if precision == "mxfp8" else MODULES[name]
    try:
        return importlib.import_module(path)
    except ImportError as error:
        return f"backend {name!r} could not be imported: {error}"


def objection(name: str, problem: Problem) -> str | None:
    """Return why a backend cannot serve the request, in one sentence; None where it can."""
    module = load(name, problem.precision)
    if isinstance(module, str):
        return module
    if problem.precision == "mxfp8" and not getattr(module, "MXFP8", False):
        return f"backend {name!r} has no MXFP8 kernels; backend 'blackwell' has, and 'reference' simulates them"
    if problem.block_lists is not None and not getattr(module, "BLOCK_LISTS", False):
        return f"backend {name!r} has no kernel for block_lists; backend 'portable' can"
    return module.supports(problem)


def pick(problem: Problem, backend: str) -> str:
    """Return the name of the backend that a request gets, as :func:`choose` does, without the reasons.

    Raises:
        TypeError, ValueError: as :func:`check_name`.
        UnsupportedError: an explicitly named backend cannot do what is asked.
    """
    if backend == "auto":
        if problem.device.type == "cpu":
            return "reference"
        if problem.precision == "mxfp8":
            return _pick_mxfp8(problem)
        return next(name for name in kind_of(problem).order if objection(name, problem) is None)
    check_name(backend)
    why_not = objection(backend, problem)
    if why_not:
        raise UnsupportedError(why_not)
    return backend


def _pick_mxfp8(problem: Problem) -> str:
    """Return "blackwell", or raise: a simulation is not what a call on a GPU should get unasked."""
    why_not = objection("blackwell", problem)
    if why_not:
        raise UnsupportedError(f"precision='mxfp8': {why_not}; backend='reference' simulates it")
    return "blackwell"


def check_name(backend: str) -> None:
    """Raise TypeError or ValueError unless ``backend`` is "auto" or a backend's name."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    if backend != "auto" and backend not in MODULES:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(MODULES)}, got {backend!r}")


def choose(problem: Problem, backend: str) -> Explanation:
    """Return the backend of a request with the reasons and the form its kernels take.

    Raises:
        TypeError, ValueError: an explicitly named backend is unknown, or cannot do what is asked ("auto" moves on, and raises
            on a GPU whose backends all lack MXFP8 where that is asked for).
    """
    name = pick(problem, backend)
    if backend != "auto":
        reasons = [(name, "named by the call")]
    elif problem.device.type == "cpu":
        reasons = [(name, "the tensors are on the CPU; name another backend to run its kernel on the emulator")]
    elif problem.precision == "mxfp8":
        reasons = [(name, "MXFP8 products run on Blackwell's tensor cores")]
    else:
        kind = kind_of(problem)
        looked_at = kind.order[: kind.order.index(name) + 1]
        usual = (
            "supports the request"
            if kind.order == USUAL
            else f"supports the request, and was measured fastest: {kind.name}"
        )
        reasons = [(other, objection(other, problem) or usual) for other in looked_at]
    describe = getattr(load(name, problem.precision), "forms", None)
    return Explanation(name, tuple(reasons), tuple(describe(problem).items()) if describe else ())
