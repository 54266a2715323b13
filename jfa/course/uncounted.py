"""Forbid an answer to use the switches of torch that would hide its operations from :mod:`jfa.course.measure`.

Torch can leave its modes out of a call: a guard disables them, a key is excluded from dispatch, a mode is popped from
its stack. Torch itself does that all the time and still may. The learner's own code may not, neither directly nor
through the functions of torch that wrap these switches. Modes of its own, ``with torch.device(...)`` and the like are
allowed. An answer must not register operations (torch.library) or kernels for torch's operations either, because what
they do inside is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator

import torch
import torch._library.custom_ops
import torch.library
import torch.utils._mode_utils
import torch.utils._python_dispatch

from jfa.course.guard import Violations, is_own_file
from jfa.course.measure import Meter, Watch

WORD = "modes"
REGISTERED = "registered"
_REGISTRY = "_dispatch_library"  # of torch._C: every way to register an operation or a kernel passes it
_SWITCHES = (
    "DisableTorchFunction", "ExcludeDispatchKeyGuard", "_DisableTorchDispatch", "_ExcludeDispatchKeyGuard",
    "_SetExcludeDispatchKeyGuard", "_ForceDispatchKeyGuard", "_PreserveDispatchKeyGuard", "_dispatch_tls_set_dispatch_key_excluded",
    "_set_torch_function_state", "_set_skip_next_torch_function", "_skip_one_hop_torch_function",
)  # fmt: skip
"""Names of torch._C that leave modes out; none of them has a use in an answer."""

_STACKS = {
    "_pop_torch_function_stack": "_push_on_torch_function_stack",
    "_pop_torch_dispatch_stack": "_push_on_torch_dispatch_stack",
    "_get_function_stack_at": None,
    "_get_dispatch_stack_at": None,
}
"""Names of torch._C that hand out modes, and what undoes it: an answer gets its own, never the judge's."""

_HOLDERS = (torch._C, torch.overrides, torch.utils._python_dispatch, torch.utils._mode_utils)
_WRAPPERS = tuple(
    os.path.realpath(module.__file__)
    for module in (
        *(torch.overrides, torch.utils._python_dispatch, torch.utils._mode_utils, contextlib, functools),
        *(torch.library, torch._library.custom_ops),
    )
)
_ORIGINAL = {name: getattr(torch._C, name) for name in (*_SWITCHES, *_STACKS, _REGISTRY) if hasattr(torch._C, name)}
_FUNCTION_DEPTH, _DISPATCH_DEPTH = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


def close(violations: Violations) -> None:
    """Refuse the switches for the rest of this process's life."""
    for name, original in _ORIGINAL.items():
        if name in _STACKS:
            closed = _stack(original, _STACKS[name], violations)
        else:
            closed = _switch(original, violations, REGISTERED if name == _REGISTRY else WORD)
        for holder in _HOLDERS:
            for at in [at for at, value in vars(holder).items() if value is original]:
                setattr(holder, at, closed)


@contextlib.contextmanager
def modes_kept(violations: Violations) -> Iterator[None]:
    """Take modes that the answer left on the stacks off again; record it if the judge's own modes are gone by then."""
    functions, dispatch = _function_modes(), _dispatch_modes()
    try:
        yield
    finally:
        kept = [_rebuild(functions, _function_modes(), "function"), _rebuild(dispatch, _dispatch_modes(), "dispatch")]
        if not all(kept):
            violations.add(WORD)


def _rebuild(old: list, now: list, stack: str) -> bool:
    """Put the judge's modes on top again if they are not; whether they were still on the stack."""
    judges = [mode for mode in old if isinstance(mode, Watch | Meter)]
    if now[len(now) - len(judges) :] != judges:
        for _ in now:
            _ORIGINAL[f"_pop_torch_{stack}_stack"](*[None] * (stack == "dispatch"))
        for mode in [*(m for m in old if m not in judges), *judges]:
            getattr(torch._C, f"_push_on_torch_{stack}_stack")(mode)
    return all(mode in now for mode in judges)


def _function_modes() -> list:
    return [_ORIGINAL["_get_function_stack_at"](i) for i in range(_FUNCTION_DEPTH())]


def _dispatch_modes() -> list:
    return [_ORIGINAL["_get_dispatch_stack_at"](i) for i in range(_DISPATCH_DEPTH())]


def _switch(original: Callable, violations: Violations, word: str) -> Callable:
    def closed(*args, **kwargs):
        if _asked_by_learner(sys._getframe(1)):
            raise violations.add(word)
        return original(*args, **kwargs)

    return closed


def _stack(original: Callable, push: str | None, violations: Violations) -> Callable:
    put_back = getattr(torch._C, push) if push else lambda mode: None

    def closed(*args, **kwargs):
        mode = original(*args, **kwargs)
        if isinstance(mode, Watch | Meter) and _asked_by_learner(sys._getframe(1)):
            put_back(mode)
            raise violations.add(WORD)
        return mode

    return closed


def _asked_by_learner(frame: types.FrameType | None) -> bool:
    """Return whether the learner's own code asked, itself or through torch's thin wrappers; the rest of torch may ask as well."""
    while frame is not None and _file(frame.f_code.co_filename) in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and is_own_file(frame.f_code.co_filename)


_file = functools.lru_cache(os.path.realpath)
