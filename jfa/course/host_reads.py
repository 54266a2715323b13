"""Notice when an answer reads numbers of a tensor on the host, which makes a CPU wait for its GPU.

Two kinds: the number itself is asked for (``.item()``, ``int()``, ``if``, an index, a size, printing), or an operation's result has
a size that depends on the numbers (``nonzero``, a boolean mask as an index, ``repeat_interleave``), which the host must know before
it can go on. On CPU tensors both cost nothing, so they can be noticed only from the operations.
"""

from __future__ import annotations

from typing import Any

import torch

WORD = "host reads"
"""What an exercise forbids by this word."""

_FUNCTIONS = {
    "tolist", "item", "numpy", "__array__", "__dlpack__", "__int__", "__float__", "__bool__", "__index__", "__complex__",
    "__repr__", "__format__", "__contains__", "__reduce_ex__", "storage", "untyped_storage", "data_ptr", "cpu", "is_nonzero",
    "tensor_split", "apply_", "map_", "equal", "allclose",
}  # fmt: skip
_OPERATIONS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "unique_dim", "_unique", "_unique2", "bincount",
    "equal", "allclose", "is_nonzero", "argwhere",
}  # fmt: skip
_SPOKEN = {"__int__": "int()", "__float__": "float()", "__bool__": "if, or bool()", "__index__": "a size, range() or an index",
           "__repr__": "printing", "__format__": "printing", "__contains__": "in", "__array__": "numpy", "__reduce_ex__": "pickle",
           "_local_scalar_dense": "a size, an index or another number taken from a tensor", "_unique2": "unique()",
           "_unique": "unique()", "unique_dim": "unique()", "index": "a boolean mask as an index",
           "index_put": "a boolean mask as an index", "tensor": "torch.tensor() of numbers from a tensor",
           "as_tensor": "torch.as_tensor() of numbers from a tensor", "to": "a copy on the host"}  # fmt: skip


def by_function(name: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return how a torch function reads on the host, in words, or None."""
    if name in _FUNCTIONS:
        return _words(name)
    if name in ("tensor", "as_tensor") and args and _holds_tensors(args[0]):
        return _words(name)
    if name == "to" and any(isinstance(a, str) and a == "cpu" for a in (*args[1:], kwargs.get("device"))):
        return _words(name)
    if name == "repeat_interleave" and _counts_by_tensor(args, kwargs) and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    return None


def by_operation(name: str, args: tuple) -> str | None:
    """Return how an operation below torch's functions reads on the host, in words, or None."""
    if name in _OPERATIONS:
        return _words(name)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_") and len(args) > 1 and _has_mask(args[1]):
        one_number = name != "index" and len(args) > 2 and args[2].numel() == 1  # x[mask] = 0 needs no count
        return None if one_number else _words("index")
    return None


def _words(name: str) -> str:
    return _SPOKEN.get(name, f"{name}()")


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) or _holds_tensors(v) for v in value)


def _counts_by_tensor(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the numbers of repeats are a tensor: the second argument, or the only one."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if args else None)
    return isinstance(repeats, torch.Tensor)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
