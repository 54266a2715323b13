"""Describe the variants of kernels that `jfa compile` compiles.

Each kernel module exposes ``compile_configs() -> list[CompileConfig]``; :mod:`jfa.compiled` finds them by walking
:mod:`jfa.kernels`, so a new kernel file needs no registration anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileConfig:
    """One kernel with one set of compile-time choices.

    Attributes:
        name: unique, such as ``"blackwell-forward-d128-causal"``.
        kernel: ``"package.module:attribute"`` of the ``@triton.jit`` function; an autotuner around it is unwrapped.
        signature: type of every argument that is not a constexpr, in Triton's notation: ``"*fp32"``, ``"i32"``,
            ``"tensordesc<bf16[1, 1, 1, 128, 128]>"``; ``"*bf16:16"`` and ``"i32:16"`` promise a multiple of 16.
        constexprs: value of every constexpr, a number, string, boolean, None or dataclass of those; a ``tl.dtype`` is written
            ``"dtype:bf16"``.
        targets: compute capabilities times ten: 90, 100, 103.
        num_warps: warps of the default task (or of the whole kernel, without async tasks).
        roles: names of the default task and of the others, in the order in which the kernel opens them, replicas apart.
        max_spill_bytes: recorded spill loads plus stores per thread in bytes, for all targets or per target; more is a
            regression.
        serialized: True where ptxas serializes the wgmmas of sm_90 and the variant was nevertheless measured to be the
            fastest; elsewhere serialized wgmmas are reported as a problem.
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    targets: tuple[int, ...]
    num_warps: int = 4
    roles: tuple[str, ...] = ()
    max_spill_bytes: int | dict[int, int] = 0
    serialized: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# What kernels take besides descriptors and block lists, by the names of parameters; _ptr behind one is left out. Other pointers
# are to bf16, other numbers i32.
_TYPES = {
    "*fp32": "lse lse2 dlse delta sums partials dq_partial partial_acc partial_ml",
    "*bf16": "out dout dq",
    "*i32": "query_offset key_offset output_offset records counts counter counters key_records key_counts key_counters where "
    "blocks chunks arrivals",
    "*u8": "q_scales q_t_scales k_scales k_t_scales v_scales do_scales do_t_scales",
    "fp32": "scale scale_log2 sm_scale coarse_scale",
}
_LISTS = {"starts": "*i32", "columns": "*i32", "kinds": "*i8", "list_rows": "i32", "list_capacity": "i32"}
_TYPE_OF = _LISTS | {name: kind for kind, names in _TYPES.items() for name in names.split()}


def typed(
    kernel: Any, constexprs: dict[str, Any], boxes: dict[str, str | None], aligned: bool = False
) -> dict[str, Any]:
    """Return the ``kernel``, ``signature`` and ``constexprs`` of a CompileConfig, types found by the names of parameters.

    Args:
        kernel: the jit function.
        constexprs: with a ``cfg`` whose ``list_heads`` is 0 there are no block lists.
        boxes: types of the descriptors, None for one that there is not.
        aligned: promise that pointers and strides are multiples of 16, as those of contiguous tensors.
    """
    types = dict(boxes)
    if getattr(constexprs.get("cfg"), "list_heads", 1) == 0:
        types |= {name: None for name in _LISTS if name in kernel.arg_names}
    constexprs = constexprs | {name: None for name, kind in types.items() if kind is None}
    signature = {name: types.get(name) or _type(name, aligned) for name in kernel.arg_names if name not in constexprs}
    return dict(kernel=f"{kernel.__module__}:{kernel.__name__}", signature=signature, constexprs=constexprs)


def _type(name: str, aligned: bool) -> str:
    kind = _TYPE_OF.get(name.removesuffix("_ptr"), "*bf16" if name.endswith("_ptr") else "i32")
    whole = kind.startswith("*") or name.endswith(("_row", "_head")) or name.startswith("stride_")
    return f"{kind}:16" if aligned and whole else kind
