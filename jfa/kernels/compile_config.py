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
        serialized: True where ptxas serialises the wgmmas of sm_90 and the variant was nevertheless measured to be the
            fastest; elsewhere serialised wgmmas are reported as a problem.
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
