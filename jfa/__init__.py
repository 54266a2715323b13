"""Jagged Flash Attention: the op, its kernels, an emulator that runs them on a CPU, and a course."""

from importlib import import_module

from .emulator import install_with_triton

__version__ = "0.1.0"

# What `jfa.NAME` gives, loaded when it is first asked for: `import jfa` stays quick and needs no more than Python.
_LAZY = {
    "jagged_flash_attention": "jfa.attention",
    "plan": "jfa.attention",
    "Plan": "jfa.attention",
    "explain": "jfa.attention",
    "Band": "jfa.masks",
    "JaggedSelfAttention": "jfa.modules",
    "PMA": "jfa.modules",
}

install_with_triton()  # launches on CPU tensors go to the emulator, whenever Triton gets imported


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'jfa' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
