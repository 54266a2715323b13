"""Launch the TLX tutorials that fbtriton's wheel ships, at sizes that suit an emulator.

``RECIPES[name]()`` launches one, unmodified. They are what ``jfa timeline NAME`` draws and what the model is checked against.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types

TUTORIALS = ("language", "extra", "tlx", "tutorials")


@contextlib.contextmanager
def answering_gpu(num_sms: int = 2, capability: tuple[int, int] = (10, 0)):
    """Stand in for a GPU where there is none: host code of the tutorials asks torch for its size."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    major, minor = capability
    facts = types.SimpleNamespace(
        multi_processor_count=num_sms, total_memory=1 << 37, major=major, minor=minor, name="emulated"
    )
    saved = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.cuda.get_device_properties, torch.cuda.get_device_capability = lambda *_: facts, lambda *_: capability
    try:
        yield
    finally:
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = saved


@functools.cache
def load(name: str):
    """Return the tutorial module of this file name; raises FileNotFoundError where this Triton has none."""
    import triton

    import jfa.emulator as emulator

    path = os.path.join(os.path.dirname(triton.__file__), *TUTORIALS, name + ".py")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"this Triton ({triton.__version__}) ships no TLX tutorial {name!r}; fbtriton 3.7.4 does"
        )
    emulator.install()
    label = "tutorial_" + name.replace("-", "_")
    spec = importlib.util.spec_from_file_location(label, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    with answering_gpu():
        spec.loader.exec_module(module)
    return module


def _heads(heads: int, length: int, dim: int, seed: int = 0):
    import torch

    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, length, dim, generator=g).half() for _ in range(3)]


def hopper_attention(
    name: str, length: int = 1024, heads: int = 1, dim: int = 128, num_sms: int = 132, config: dict | None = None
):
    """Launch one of the Hopper attention tutorials on [1, heads, length, dim] fp16; returns its output.

    config: launch parameters; None takes the tutorial's first configuration, for there is nothing to tune by.
    """
    module = load(name)
    q, k, v = _heads(heads, length, dim)
    with answering_gpu(num_sms, (9, 0)):
        return module.attention(q, k, v, dim**-0.5, config=config)


def blackwell_attention(
    name: str, length: int = 1024, heads: int = 1, dim: int = 128, num_sms: int = 148, causal: bool = False
):
    """Launch one of the Blackwell attention tutorials on [1, heads, length, dim] fp16; returns its output."""
    module = load(name)
    q, k, v = _heads(heads, length, dim)
    arguments = (causal,) if "causal" in module.attention.__code__.co_varnames else ()
    with answering_gpu(num_sms):
        return module.attention(q, k, v, dim**-0.5, *arguments)


RECIPES = {
    "hopper_fa_ws": lambda: hopper_attention("hopper_fa_ws"),
    "hopper_fa_ws_pipelined": lambda: hopper_attention("hopper_fa_ws_pipelined"),
    "hopper_fa_ws_pipelined_pingpong": lambda: hopper_attention("hopper_fa_ws_pipelined_pingpong"),
    "hopper_fa_ws_pipelined_pingpong_persistent": lambda: hopper_attention(
        "hopper_fa_ws_pipelined_pingpong_persistent"
    ),
    "blackwell_fa_ws": lambda: blackwell_attention("blackwell_fa_ws"),
    "blackwell_fa_ws_pipelined": lambda: blackwell_attention("blackwell_fa_ws_pipelined"),
}
