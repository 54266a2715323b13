"""Messages between the judge and the child: JSON for the structure, raw bytes for the numbers.

Nothing is pickled: bytes that a learner's process wrote are only ever read as numbers, text and lists, with every size
checked. So a forged message can only claim an output, which the judge then compares like any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np
import torch

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_ARRAY_DTYPES = {
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
}
_MAX_DEPTH, _MAX_ITEMS = 12, 200_000
_HEADER = struct.Struct("<QQ")  # bytes of JSON, bytes of numbers


class WireError(ValueError):
    """Raised for a malformed message."""


class Other:
    """Stand-in for a value of a type that no exercise returns (a module, a generator, ...): only its type's name is
    sent."""

    def __init__(self, type_name: str):
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


SEAL_BYTES = 16


def seal(key: bytes, number: int, data: bytes) -> bytes:
    """Return SEAL_BYTES that prove that the writer of message ``number`` has the key."""
    return hashlib.blake2b(number.to_bytes(8, "little") + data, key=key, digest_size=SEAL_BYTES).digest()


def pack(message: Any) -> bytes:
    """Return one message (nested lists, dicts, tensors, arrays, plain values) as bytes."""
    blob = bytearray()
    text = json.dumps(_encode(message, blob, 0)).encode()
    return _HEADER.pack(len(text), len(blob)) + text + bytes(blob)


def unpack(data: bytes) -> Any:
    """Return the message in these bytes; raises WireError."""
    try:
        text_size, blob_size = _HEADER.unpack_from(data)
        if _HEADER.size + text_size + blob_size != len(data):
            raise WireError("sizes do not add up")
        blob = memoryview(data)[_HEADER.size + text_size :]
        return _decode(json.loads(bytes(data[_HEADER.size : _HEADER.size + text_size])), blob, 0)
    except Exception as error:  # noqa: BLE001  the bytes are somebody else's: whatever is wrong with them, they are no message
        raise WireError(f"unreadable message: {error}") from None


def _encode(value: Any, blob: bytearray, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return {"t": "other", "name": "deeply nested structure"}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"t": "int", "v": str(int(value))} if abs(value) < 1 << 4096 else {"t": "other", "name": "huge int"}
    if isinstance(value, float):
        return {"t": "float", "v": float(value).hex() if math.isfinite(value) else str(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, blob, depth)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(np.asarray(value), blob)
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"t": kind, "v": [_encode(v, blob, depth + 1) for v in value[:_MAX_ITEMS]]}
    if isinstance(value, dict):
        return {"t": "dict", "k": [str(k) for k in value], "v": [_encode(v, blob, depth + 1) for v in value.values()]}
    if isinstance(value, torch.dtype):
        return {"t": "dtype", "v": str(value).removeprefix("torch.")}
    return {"t": "other", "name": value.type_name if isinstance(value, Other) else type(value).__name__}


def dense_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as one row with stride 1."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,))  # a lone element may have the stride 0 and count as contiguous


def _encode_tensor(value: torch.Tensor, blob: bytearray, depth: int) -> dict:
    with torch._C.DisableTorchFunctionSubclass():
        if value.is_nested:
            parts = [value.values(), value.offsets()] if value.layout == torch.jagged else list(value.unbind())
            return {
                "t": "nested",
                "jagged": value.layout == torch.jagged,
                "v": [_encode(p, blob, depth + 1) for p in parts],
            }
        name = str(value.dtype).removeprefix("torch.")
        if value.device.type == "meta":
            return {"t": "other", "name": "tensor on the device 'meta', where no numbers are"}
        if value.layout != torch.strided or name not in _DTYPES:
            return {"t": "other", "name": f"tensor of layout {value.layout}, dtype {value.dtype}"}
        flat = dense_row(value.resolve_conj().resolve_neg().cpu())
        entry = {
            "t": "tensor",
            "dtype": name,
            "shape": list(value.shape),
            "at": len(blob),
            "grad": bool(value.requires_grad),
        }
        blob += flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return entry


def _encode_array(value: np.ndarray, blob: bytearray) -> dict:
    if value.dtype.name not in _ARRAY_DTYPES:
        return {"t": "other", "name": f"numpy array of {value.dtype.name}"}
    entry = {"t": "array", "dtype": value.dtype.name, "shape": list(value.shape), "at": len(blob)}
    blob += np.ascontiguousarray(value).tobytes()
    return entry


def _decode(entry: Any, blob: memoryview, depth: int) -> Any:
    if depth > _MAX_DEPTH + 2:
        raise WireError("nested too deeply")
    if entry is None or isinstance(entry, bool | str):
        return entry
    kind = entry["t"]
    if kind == "int":
        return int(entry["v"])
    if kind == "float":
        return float.fromhex(entry["v"])
    if kind in ("tuple", "list"):
        items = [_decode(v, blob, depth + 1) for v in entry["v"]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {str(k): _decode(v, blob, depth + 1) for k, v in zip(entry["k"], entry["v"], strict=True)}
    if kind == "dtype":
        return _DTYPES[entry["v"]]
    if kind == "other":
        return Other(str(entry["name"])[:100])
    if kind == "nested":
        return _decode_nested([_decode(v, blob, depth + 1) for v in entry["v"]], entry["jagged"])
    if kind == "tensor":
        return _decode_tensor(entry, blob)
    if kind == "array":
        return _decode_array(entry, blob)
    raise WireError(f"unknown kind {kind!r}")


def _decode_nested(parts: list[Any], jagged: bool) -> torch.Tensor:
    """Return a nested tensor; its offsets are checked first, for torch trusts them."""
    if not jagged:
        return torch.nested.nested_tensor(parts)
    values, offsets = parts
    if (
        offsets.dim() != 1
        or len(offsets) < 1
        or offsets[0] != 0
        or offsets[-1] > len(values)
        or bool((offsets.diff() < 0).any())
    ):
        raise WireError("invalid offsets of a nested tensor")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _slice(entry: dict, itemsize: int, blob: memoryview) -> tuple[tuple[int, ...], bytearray]:
    """Return (shape, bytes) of a tensor's entry, both checked."""
    shape, at = tuple(entry["shape"]), entry["at"]
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in (*shape, at)):
        raise WireError("a size is no small positive number")
    size = math.prod(shape) * itemsize
    if at + size > len(blob):
        raise WireError("numbers are missing")
    return shape, bytearray(blob[at : at + size])


def _decode_tensor(entry: dict, blob: memoryview) -> torch.Tensor:
    dtype = _DTYPES[entry["dtype"]]
    shape, raw = _slice(entry, dtype.itemsize, blob)
    tensor = (
        torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    )
    tensor.requires_grad_(bool(entry["grad"]) and dtype.is_floating_point)
    return tensor


def _decode_array(entry: dict, blob: memoryview) -> np.ndarray:
    if entry["dtype"] not in _ARRAY_DTYPES:
        raise WireError("unknown dtype")
    dtype = np.dtype(entry["dtype"])
    shape, raw = _slice(entry, dtype.itemsize, blob)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
