"""Which backends exist, and which one a call gets. Modules are imported when first asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from jfa.kernels.base import Problem

MODULES = {
    "reference": "jfa.kernels.reference",
    "portable": "jfa.kernels.portable",
    "hopper": "jfa.kernels.hopper.launch",
    "blackwell": "jfa.kernels.blackwell.launch",
}
# The first that supports the request wins; reference is last because it is right everywhere and fast nowhere.
GPU_ORDER = ("blackwell", "hopper", "portable", "reference")


class UnsupportedError(ValueError):
    """A backend that a call names does not offer what the call asks for."""


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
def load(name: str) -> ModuleType | str:
    """The backend's module, or one sentence why it cannot be imported."""
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        return f"backend {name!r} could not be imported: {error}"


def objection(name: str, problem: Problem) -> str | None:
    """Why a backend cannot serve the request, in one sentence; None where it can."""
    module = load(name)
    if isinstance(module, str):
        return module
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
        return next(name for name in GPU_ORDER if objection(name, problem) is None)
    check_name(backend)
    why_not = objection(backend, problem)
    if why_not:
        raise UnsupportedError(why_not)
    return backend


def check_name(backend: str) -> None:
    """Raise TypeError or ValueError unless ``backend`` is "auto" or a backend's name."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    if backend != "auto" and backend not in MODULES:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(MODULES)}, got {backend!r}")


def choose(problem: Problem, backend: str) -> Explanation:
    """Return the backend of a request with the reasons and the form its kernels take.

    Raises:
        TypeError, ValueError: an explicitly named backend is unknown, or cannot do what is asked ("auto" never raises: it
            moves on).
    """
    name = pick(problem, backend)
    if backend != "auto":
        reasons = [(name, "named by the call")]
    elif problem.device.type == "cpu":
        reasons = [(name, "the tensors are on the CPU; name another backend to run its kernel on the emulator")]
    else:
        looked_at = GPU_ORDER[: GPU_ORDER.index(name) + 1]
        reasons = [(other, objection(other, problem) or "supports the request") for other in looked_at]
    describe = getattr(load(name), "forms", None)
    return Explanation(name, tuple(reasons), tuple(describe(problem).items()) if describe else ())
