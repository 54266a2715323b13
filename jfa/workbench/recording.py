"""Record a function's launches without running the kernels: kernel, argument types and constants."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.emulator.frontend import launch as launching

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
for _name in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
    if hasattr(torch, _name):
        TYPES[getattr(torch, _name)] = "u8"
COMPILED_WITH = (
    "num_warps",
    "num_stages",
    "maxnreg",
    "ctas_per_cga",
    "num_ctas",
)  # launch options that change the code


@dataclass
class Launched:
    """One launch: the kernel, its arguments by name, and the launch options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Values of the constexpr parameters, and of what Triton makes constant: None, and integers that are 1."""
        return {p.name: _plain(self.arguments[p.name]) for p in self.kernel.params if self._is_constant(p)}

    @property
    def signature(self) -> dict[str, str]:
        """Triton types of the other parameters; ":16" where a pointer or a number is a multiple of 16.

        Raises:
            TypeError: naming an argument that has no type.
        """
        return {p.name: _type(p, self.arguments[p.name]) for p in self.kernel.params if not self._is_constant(p)}

    def _is_constant(self, p: Any) -> bool:
        value = self.arguments[p.name]
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1 and not p.do_not_specialize
        return p.is_constexpr or value is None or one


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _type(p: Any, value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]>"
    fits = lambda number: ":16" * (number % 16 == 0 and not (p.do_not_specialize or p.do_not_specialize_on_alignment))
    if hasattr(value, "data_ptr"):
        return f"*{TYPES[value.dtype]}{fits(value.data_ptr())}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64") + fits(value)
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"argument {p.name} is a {type(value).__name__}, for which there is no type to compile with")


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """Note launches inside the block instead of running them; outputs stay as they were allocated."""
    found: list[Launched] = []

    def note(jit, grid, args, kwargs, options):
        by_name, launch_options = launching.split_options(jit, kwargs)
        bound = launching.signature_of(jit).bind(*args, **by_name)
        bound.apply_defaults()
        chosen = {k: v for k, v in launch_options.items() if k in COMPILED_WITH and v is not None}
        found.append(Launched(jit, dict(bound.arguments), chosen))

    saved, launching.launch = launching.launch, note
    try:
        yield found
    finally:
        launching.launch = saved


def launches_of(launch: Callable[[], Any]) -> list[Launched]:
    """Return the launches of a function, each kernel with the same types and constants once.

    What the function raises after a launch is ignored: its kernels wrote nothing. What it raises before is raised.
    """
    with recorded() as found:
        try:
            launch()
        except Exception:
            if not found:
                raise
    different: dict[str, Launched] = {}
    for one in found:
        different.setdefault(repr((inspect.unwrap(one.kernel.fn), one.signature, one.constexprs, one.options)), one)
    return list(different.values())
