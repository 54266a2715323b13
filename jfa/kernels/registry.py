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
    "hopper": "jfa.kernels.hopper",
    "blackwell": "jfa.kernels.blackwell",
}
# The first that supports the request wins; reference is last because it is right everywhere and fast nowhere.
GPU_ORDER = ("blackwell", "hopper", "portable", "reference")


@dataclass(frozen=True)
class Explanation:
    """The backend that a call gets, and why: one (name, reason) for each backend that was looked at, the chosen one last."""

    backend: str
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([f"backend: {self.backend}"] + [f"  {name}: {why}" for name, why in self.reasons])


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
    return module if isinstance(module, str) else module.supports(problem)


def choose(problem: Problem, backend: str) -> Explanation:
    """Pick the backend of a request.

    Raises:
        ValueError: an explicitly named backend is unknown, or cannot do what is asked ("auto" never raises: it moves on).
    """
    if backend != "auto":
        if backend not in MODULES:
            raise ValueError(f"backend must be 'auto' or one of {', '.join(MODULES)}, got {backend!r}")
        why_not = objection(backend, problem)
        if why_not:
            raise ValueError(why_not)
        return Explanation(backend, ((backend, "named by the call"),))
    if problem.device.type == "cpu":
        why = "the tensors are on the CPU; name another backend to run its kernel on the emulator"
        return Explanation("reference", (("reference", why),))
    reasons = []
    for name in GPU_ORDER:
        why_not = objection(name, problem)
        reasons.append((name, why_not or "supports the request"))
        if why_not is None:
            break
    return Explanation(name, tuple(reasons))
