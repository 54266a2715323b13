"""The contract between the op and a kernel backend.

A backend is a module with these functions; :mod:`jfa.attention` validates, picks one, and never looks inside::

    supports(problem) -> str | None                 None, or one sentence: which argument it cannot do and which backend can
    forward(problem, q, k, v, plan) -> (out, lse)   out [rows_out, H, Dv] in q.dtype, lse [H, rows_out] fp32, natural log
    backward(problem, dout, dlse, q, k, v, out, lse, plan, needs=(True, True, True)) -> (dq, dk, dv)
                                                    dlse [H, rows_out] fp32 or None; gradients in the inputs' dtypes;
                                                    a gradient that is not needed may be None
    plan(problem) -> list[Tensor]                   optional: tile lists and schedules, built without synchronizing
    make_lists(problem) -> object                   optional: what serves one forward and its backward, built in one go
    BLOCK_LISTS = True                              optional: it takes problems with block_lists
    MXFP8 = True                                    optional: it takes problems whose precision is "mxfp8"; it then
                                                    takes a jfa.mxfp8.BlockScaled for each input in problem.quantized
                                                    (the backward: with both encodings)
    TAPE = True                                     optional: all its launches are those of a common.launcher.Variant, so that a
                                                    call may be done again from a tape
    INT64_OFFSETS = True                            optional: it takes offsets that are int64, too
    forms(problem) -> {"forward": str, "backward": str}
                                                    optional: which of its kernels a call gets, and why, in words

``plan`` is None, or what the backend's own ``plan`` or ``make_lists`` returned for a problem of the same shapes and offsets.
Every row of every output is written: a query without keys gets out 0 and lse -inf, uncovered rows likewise, and gradients of
rows that nothing touches are 0. Nothing is read or written outside the tensors, whatever the offsets say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from jfa.block_sparse import BlockLists
from jfa.masks import Band


@dataclass(frozen=True)
class Problem:
    """One call, validated and normalized: its static properties and its offset tensors.

    Shapes: q [total_q, H, D] (broadcast_q: [Lq, H, D]), k [total_kv, H_kv, D], v [total_kv, H_kv, Dv]; H % H_kv == 0.
    """

    num_batches: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    rows_q: int  # rows of the query tensor
    rows_kv: int  # rows of key and value
    rows_out: int  # rows of the output: rows_q, or num_batches * rows_q with broadcast_q
    dtype: torch.dtype
    device: torch.device
    sm_scale: float
    band: Band
    broadcast_q: bool
    deterministic: bool
    query_offset: torch.Tensor  # [B+1] int32 (INT64_OFFSETS: or int64), or [2] with broadcast_q
    key_offset: torch.Tensor  # [B+1] likewise
    output_offset: torch.Tensor | None = None  # [B+1] int32, broadcast_q only; None: batch b starts at row b * rows_q
    max_seq_len_q: int = 0  # hints for configuration only, 0 = not told: correctness never depends on them
    max_seq_len_kv: int = 0
    block_lists: BlockLists | None = None  # of the queries' blocks: pairs outside the listed blocks do not count
    precision: str = ""  # of the products' operands: the inputs' own, or "mxfp8"
    quantized: tuple[str, ...] = ()  # inputs that come as jfa.mxfp8.BlockScaled
    one_way: tuple[str, ...] = ()  # those of them that are encoded along the forward's axis only: there is no backward

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def no_backward(problem: Problem) -> str:
    """Return why a call with quantized inputs has no backward; nothing if it has one."""
    if not problem.one_way:
        return ""
    return (
        f"none: {' and '.join(problem.one_way)} quantized along one axis only, and gradients need the other, too "
        "(quantize_jagged(..., both=True))"
    )


def came_quantized(problem: Problem) -> str:
    """Return the end of a sentence about a forward in MXFP8: which inputs came quantized; nothing if none did."""
    return f"; {' and '.join(problem.quantized)} as given, quantized already" if problem.quantized else ""


def list_arguments(lists: BlockLists | None) -> tuple:
    """Return block lists, or their absence, as the last arguments of a TLX kernel that walks them."""
    return (None,) * 5 if lists is None else (*lists.tensors, lists.rows, lists.columns.numel())


def unfit_blocks(problem: Problem, name: str, block: int) -> str | None:
    """Return None, or why a backend whose lists have blocks of ``block`` rows on both sides cannot walk a problem's."""
    lists = problem.block_lists
    if lists is None or lists.sizes == (block, block):
        return None
    sizes = f"{lists.block} queries and {lists.other_block} keys"
    return f"backend {name!r} walks block_lists with blocks of {block}, not of {sizes}; backend 'portable' can"


def wrong_gpu(problem: Problem, capabilities: set[tuple[int, int]], name: str) -> str | None:
    """Return why a TLX backend cannot run here: another GPU, or a Triton without TLX. CPU tensors run on the emulator: None."""
    if problem.device.type == "cpu":
        return None
    if problem.device.type != "cuda":
        return f"backend {name!r} runs on cuda (and cpu, on the emulator), the tensors are on {problem.device.type}"
    found = _capability(problem.device)
    if found not in capabilities:
        wanted = " or ".join(f"sm_{major}{minor}" for major, minor in sorted(capabilities))
        return f"backend {name!r} needs {wanted}, this GPU is sm_{found[0]}{found[1]}; backend 'portable' can"
    version = _triton_version()
    if not version.endswith("+fb"):
        return (
            f"backend {name!r} needs Triton with TLX (tested: fbtriton 3.7.4), found triton {version}; "
            "backend 'portable' can"
        )
    return None


_capability = cache(torch.cuda.get_device_capability)  # asking costs a call several microseconds


@cache
def _triton_version() -> str:
    import triton

    return triton.__version__
