"""jagged_flash_attention(): one call, validated, given to a backend, differentiable, and known to torch.compile.

The way of a call: arguments -> checks that need no tensor contents -> the custom op ``jfa::attention`` -> checks of the
offsets' contents (where wanted) -> :class:`jfa.kernels.base.Problem` -> a backend's forward. The backward goes the same way
through ``jfa::attention_backward``. Contents are checked inside the op, so that torch.compile(fullgraph=True) never sees them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jfa.kernels import registry
from jfa.kernels.base import Problem
from jfa.kernels.registry import Explanation
from jfa.layout import check_offsets as check_offset_tensor
from jfa.layout import from_nested
from jfa.masks import Band

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


# ------------------------------------------------------------------------------------------------------------ public
def jagged_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Tensor | None = None,
    key_offset: Tensor | None = None,
    max_seq_len_q: int | None = None,
    max_seq_len_kv: int | None = None,
    sm_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    broadcast_q: bool = False,
    output_offset: Tensor | None = None,
    causal: bool | str = False,
    *,
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    check_offsets: bool | None = None,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's queries over the same sequence's keys, on packed tensors without padding.

    Args:
        query: [total_q, H, D]; with ``broadcast_q`` [Lq, H, D], shared by all sequences. bf16, fp16, fp32 (CPU: also fp64).
        key: [total_kv, H_kv, D] with H a multiple of H_kv: query head h reads key head h // (H // H_kv).
        value: [total_kv, H_kv, Dv].
        query_offset: [B+1] int32 (int64 is converted); sequence b's queries are rows query_offset[b] .. query_offset[b+1] - 1.
            Rows past the last offset belong to no sequence: their output is 0. With ``broadcast_q`` it is not read.
        key_offset: [B+1] likewise, for key and value.
        max_seq_len_q, max_seq_len_kv: upper bounds of the lengths, hints for the kernel's configuration. May be too large.
        sm_scale: factor on the scores; None means 1/sqrt(D). Zero and negative numbers count as given.
        window_size: W lets query i see the keys with abs(i - j) <= W, each counted from its own sequence's start;
            (left, right) is FlashAttention's window around i + len_kv - len_q, -1 leaving a side open.
        broadcast_q: the output has B * Lq rows, sequence b's from row b * Lq on, or from ``output_offset[b]`` on.
        output_offset: [B+1], with ``broadcast_q`` only: where each sequence's Lq output rows begin, inside B * Lq rows; the
            slots must be disjoint. A slot that is not inside is not written; rows of no slot are 0.
        causal: True (or "bottom_right") aligns the last query with the last key; "top_left" lets query i see keys 0..i.
        backend: "auto", or "reference", "portable", "hopper", "blackwell". CPU tensors with a kernel's name run that
            kernel on the emulator. See :func:`explain`.
        deterministic: gradients repeat bit by bit.
        return_lse: also return the scores' natural log-sum-exp. It is differentiable.
        check_offsets: check the offsets' contents. Always done on the CPU; on a GPU it waits for the device, so by default
            it is not done there. Unchecked wrong offsets give wrong numbers, but nothing outside the tensors is touched.
        plan: tile lists from :func:`plan`, to build them once for several layers and the backward.

    Nested tensors (torch.jagged, [B, j, H, D] or transposed [B, H, j, D]) may stand for query, key and value; offsets are then
    theirs, and the output is nested as the query (with ``broadcast_q`` it is packed). Under ``torch.autocast`` the three are
    cast to autocast's type, as ``scaled_dot_product_attention`` does. Gradients cannot be differentiated again.

    Returns:
        out [rows_out, H, Dv] in the query's dtype, rows_out = total_q, or B * Lq with ``broadcast_q``. With ``return_lse``
        also lse [H, rows_out], fp32. A query that may see no key gets 0 and -inf, and no gradient.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """
    nested = _is_nested(query) and not broadcast_q
    query, key, value, query_offset, key_offset, restore = _unwrap_nested(query, key, value, query_offset, key_offset)
    query, key, value = _autocast(query, key, value)
    band = Band.make(causal, window_size)
    check_arguments(query, key, value, query_offset, key_offset, broadcast_q, output_offset)
    _refuse_forward_mode(query, key, value)
    hints = _maximum("max_seq_len_q", max_seq_len_q), _maximum("max_seq_len_kv", max_seq_len_kv)
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from jfa.plan, got {type(plan).__name__}")
        plan.check(_plan_facts(query, key, value, key_offset, band, broadcast_q, deterministic))
        hints = plan.hints
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    out, lse = torch.ops.jfa.attention(
        query,
        key,
        value,
        _int32(query_offset),
        _int32(key_offset),
        _int32(output_offset),
        list(plan.tensors) if plan is not None else [],
        _scale(sm_scale, query),
        band.lo_start,
        band.lo_end,
        band.hi_start,
        band.hi_end,
        broadcast_q,
        deterministic,
        backend if plan is None else plan.backend_for(backend),
        bool(check_offsets),
        *hints,
    )
    if nested:
        out = restore(out)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Plan:
    """Tile lists and schedules of one backend for one set of offsets (and the shapes that :func:`plan` was told)."""

    backend: str
    tensors: tuple[Tensor, ...]
    facts: tuple[tuple[str, object], ...] = ()  # what the lists depend on, by the name a message gives it
    hints: tuple[int, int] = (0, 0)  # max_seq_len_q and max_seq_len_kv: tiles were sized by them, so calls take these

    def check(self, facts: tuple[tuple[str, object], ...]) -> None:
        """Lists for other shapes would lead a kernel outside its tensors.

        Raises:
            ValueError: naming what differs between the plan and a call.
        """
        for (name, planned), (_, called) in zip(self.facts, facts):
            if planned != called:
                raise ValueError(f"plan was built for {name} = {planned}, but this call has {called}")

    def backend_for(self, asked: str) -> str:
        """The backend that this plan belongs to; an error if the call names another."""
        if asked not in ("auto", self.backend):
            raise ValueError(f"plan was built for backend {self.backend!r}, but backend={asked!r} is asked for")
        return self.backend


def plan(
    query_offset: Tensor | None,
    key_offset: Tensor,
    *,
    rows_q: int,
    rows_kv: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_seq_len_q: int | None = None,
    max_seq_len_kv: int | None = None,
    causal: bool | str = False,
    window_size: int | tuple[int, int] | None = None,
    broadcast_q: bool = False,
    output_offset: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Plan:
    """Build tile lists and schedules once, for several layers' calls with the same offsets, shapes and masks, and their backward.

    Args: as in :func:`jagged_flash_attention`; ``rows_q`` and ``rows_kv`` are the tensors' first dimensions. Nothing waits
    for the device. When the offsets change, build a new plan.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shapes = (rows_q, num_heads, head_dim), (rows_kv, num_kv_heads, head_dim), (rows_kv, num_kv_heads, head_dim_v)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    check_arguments(q, k, v, query_offset, key_offset, broadcast_q, output_offset, device=key_offset.device)
    problem = make_problem(
        q,
        k,
        v,
        _int32(query_offset),
        _int32(key_offset),
        _int32(output_offset),
        1.0,
        Band.make(causal, window_size),
        broadcast_q,
        deterministic,
        _maximum("max_seq_len_q", max_seq_len_q),
        _maximum("max_seq_len_kv", max_seq_len_kv),
    )
    name = registry.choose(problem, backend).backend
    build = getattr(registry.load(name), "plan", None)
    facts = _plan_facts(q, k, v, key_offset, problem.band, broadcast_q, deterministic)
    hints = _maximum("max_seq_len_q", max_seq_len_q), _maximum("max_seq_len_kv", max_seq_len_kv)
    return Plan(name, tuple(build(problem)) if build else (), facts, hints)


def _plan_facts(query, key, value, key_offset, band, broadcast_q, deterministic) -> tuple[tuple[str, object], ...]:
    """Everything static that tile lists may depend on, hints apart."""
    return (
        ("rows_q", query.shape[0]),
        ("rows_kv", key.shape[0]),
        ("num_heads", query.shape[1]),
        ("num_kv_heads", key.shape[1]),
        ("head_dim", query.shape[2]),
        ("head_dim_v", value.shape[2]),
        ("dtype", query.dtype),
        ("sequences", key_offset.shape[0] - 1),
        ("device", key_offset.device),
        ("the mask (causal, window_size)", band),
        ("broadcast_q", broadcast_q),
        ("deterministic", deterministic),
    )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Tensor | None = None,
    key_offset: Tensor | None = None,
    max_seq_len_q: int | None = None,
    max_seq_len_kv: int | None = None,
    sm_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    broadcast_q: bool = False,
    output_offset: Tensor | None = None,
    causal: bool | str = False,
    *,
    backend: str = "auto",
    deterministic: bool = False,
    **ignored,
) -> Explanation:
    """Which backend the same call of :func:`jagged_flash_attention` would get, and why. Printable; runs nothing."""
    query, key, value, query_offset, key_offset, _ = _unwrap_nested(query, key, value, query_offset, key_offset)
    query, key, value = _autocast(query, key, value)
    check_arguments(query, key, value, query_offset, key_offset, broadcast_q, output_offset)
    problem = make_problem(
        query,
        key,
        value,
        _int32(query_offset),
        _int32(key_offset),
        _int32(output_offset),
        _scale(sm_scale, query),
        Band.make(causal, window_size),
        broadcast_q,
        deterministic,
        _maximum("max_seq_len_q", max_seq_len_q),
        _maximum("max_seq_len_kv", max_seq_len_kv),
    )
    return registry.choose(problem, backend)


# ------------------------------------------------------------------------------------------------- checks of arguments
def check_arguments(query, key, value, query_offset, key_offset, broadcast_q=False, output_offset=None, device=None) -> None:
    """Everything that can be said without reading a tensor: types, shapes, dtypes, devices, head counts.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(f"{name} must be 3-D [rows, heads, head_dim], got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32 (on the CPU also float64), got {x.dtype}")
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but query is {query.dtype} on {query.device}")
    _check_shapes(query, key, value)
    device = query.device if device is None else device
    if key_offset is None:
        raise TypeError("key_offset is missing: it may be left out only with nested tensors")
    check_offset_tensor(key_offset, name="key_offset", contents=False)
    batches = key_offset.shape[0] - 1
    offsets = [("key_offset", key_offset)]
    if broadcast_q:
        if output_offset is not None:
            check_offset_tensor(output_offset, name="output_offset", batches=batches, contents=False)
            offsets.append(("output_offset", output_offset))
    else:
        if output_offset is not None:
            raise ValueError("output_offset needs broadcast_q=True")
        if query_offset is None:
            raise TypeError("query_offset is missing: it may be left out only with nested tensors or broadcast_q")
        check_offset_tensor(query_offset, name="query_offset", contents=False)
        if query_offset.shape[0] != key_offset.shape[0]:
            raise ValueError(f"query_offset has {query_offset.shape[0] - 1} sequences, key_offset {batches}")
        offsets.append(("query_offset", query_offset))
    for name, x in offsets:
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, but query is on {device}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[0] != value.shape[0] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"key and value must have the same rows and heads, got {tuple(key.shape[:2])} and {tuple(value.shape[:2])}"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query and key must have the same head dim, got {query.shape[2]} and {key.shape[2]}")
    for name, x in (("query", query), ("value", value)):
        if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {x.shape[2]}")
    if query.shape[1] == 0 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query's heads ({query.shape[1]}) must be a multiple of key's heads ({key.shape[1]})")


def check_contents(problem: Problem) -> None:
    """Read the offsets and say what is wrong with them. Waits for the device.

    Raises:
        ValueError: naming the argument; on a GPU also while a CUDA graph is captured, where nothing can be read.
    """
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("check_offsets=True reads the offsets, which a CUDA graph capture does not allow")
    check_offset_tensor(problem.key_offset, problem.rows_kv, name="key_offset")
    _check_maximum("max_seq_len_kv", problem.max_seq_len_kv, problem.key_offset)
    if not problem.broadcast_q:
        check_offset_tensor(problem.query_offset, problem.rows_q, name="query_offset")
        _check_maximum("max_seq_len_q", problem.max_seq_len_q, problem.query_offset)
    elif problem.output_offset is not None:
        _check_slots(problem)


def _check_maximum(name: str, told: int, offsets: Tensor) -> None:
    longest = int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0
    if 0 < told < longest:
        raise ValueError(f"{name}={told} is less than the longest sequence, {longest}")


def _check_slots(problem: Problem) -> None:
    starts = problem.output_offset[:-1].tolist()
    for b, start in enumerate(starts):
        if start < 0 or start + problem.rows_q > problem.rows_out:
            raise ValueError(
                f"output_offset[{b}] = {start}: {problem.rows_q} rows from there are not inside the output's {problem.rows_out}"
            )
    ordered = sorted(starts)
    if any(b - a < problem.rows_q for a, b in zip(ordered, ordered[1:])):
        raise ValueError(f"output_offset gives two sequences the same rows: each needs {problem.rows_q} of its own")


def _unwrap_nested(query, key, value, query_offset, key_offset):
    """Nested tensors -> packed ones and their offsets; ``restore`` nests an output as the query was."""
    restore = None
    if _is_nested(query):
        source = query
        query, query_offset = _packed_of("query", query)
        offsets = query_offset
        transposed = source._ragged_idx == 2  # [B, H, j, D], as scaled_dot_product_attention takes it

        def restore(out):
            out = torch.nested.nested_tensor_from_jagged(out, offsets=offsets)
            return out.transpose(1, 2) if transposed else out

    given = key, value
    if _is_nested(key):
        key, key_offset = _packed_of("key", key)
    if _is_nested(value):
        value, value_offset = _packed_of("value", value)
        if _is_nested(given[0]):
            _check_same_lengths(*(x.offsets() for x in given), key_offset, value_offset)
    return query, key, value, query_offset, key_offset, restore


def _is_nested(x) -> bool:
    return isinstance(x, Tensor) and x.is_nested


def _packed_of(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    if nested.layout != torch.jagged:
        raise TypeError(f"{name} is a nested tensor of layout {nested.layout}; only layout=torch.jagged is packed")
    return from_nested(nested)


def _check_same_lengths(key_source: Tensor, value_source: Tensor, key_offset: Tensor, value_offset: Tensor) -> None:
    """Key and value must be cut alike. Offsets that are one tensor are; others are compared where nothing has to wait."""
    if key_source is value_source or torch.compiler.is_compiling() or key_offset.device.type != "cpu":
        return
    if not torch.equal(key_offset, value_offset):
        raise ValueError("value is a nested tensor with other sequence lengths than key")


def _int32(offsets: Tensor | None) -> Tensor | None:
    """As kernels read offsets: int32, one after another."""
    return None if offsets is None else offsets.to(torch.int32).contiguous()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's type where it is on (fp64 stays)."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    low = (torch.bfloat16, torch.float16, torch.float32)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in low else x for x in tensors)


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Tangents would be dropped silently: custom ops know reverse mode only."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("jagged_flash_attention has no forward-mode derivative (jvp); use reverse mode")


def _scale(sm_scale: float | None, query: Tensor) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if isinstance(sm_scale, str | bytes | bool):
        raise TypeError(f"sm_scale must be a number, got {sm_scale!r}")
    return float(sm_scale)


def _maximum(name: str, told) -> int:
    """A length hint as an int; 0 means that none was given."""
    if told is None:
        return 0
    if not isinstance(told, int | torch.SymInt):
        if not isinstance(told, Tensor | numbers.Integral):
            raise TypeError(f"{name} must be an int, got {told!r}")
        told = int(told)
    if told < 0:
        raise ValueError(f"{name} must not be negative, got {told}")
    return told


# --------------------------------------------------------------------------------------------------------- custom ops
def make_problem(
    q, k, v, query_offset, key_offset, output_offset, sm_scale, band, broadcast_q, deterministic, max_q, max_kv
) -> Problem:
    """The normalised form of a call whose arguments have passed :func:`check_arguments`."""
    batches = key_offset.shape[0] - 1
    return Problem(
        num_batches=batches,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        rows_q=q.shape[0],
        rows_kv=k.shape[0],
        rows_out=batches * q.shape[0] if broadcast_q else q.shape[0],
        dtype=q.dtype,
        device=key_offset.device,
        sm_scale=sm_scale,
        band=band,
        broadcast_q=broadcast_q,
        deterministic=deterministic,
        query_offset=key_offset if broadcast_q else query_offset,
        key_offset=key_offset,
        output_offset=output_offset if broadcast_q else None,
        max_seq_len_q=q.shape[0] if broadcast_q else max_q,
        max_seq_len_kv=max_kv,
    )


_COMMON = (
    "Tensor? query_offset, Tensor key_offset, Tensor? output_offset, Tensor[] plan, float sm_scale, int? lo_start, int? lo_end, "
    "int? hi_start, int? hi_end, bool broadcast_q, bool deterministic, str backend, bool check_offsets, SymInt max_seq_len_q, "
    "SymInt max_seq_len_kv"
)
_CHECK = 8  # check_offsets' place among the arguments after plan
_LIBRARY = torch.library.Library("jfa", "DEF")
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {_COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"bool[] needs, {_COMMON}) -> (Tensor, Tensor, Tensor)"
)


def _problem_of(query, key, value, arguments: Sequence) -> tuple[Problem, str, list[Tensor] | None]:
    """(problem, backend, plan) from an op's trailing arguments, in the order of ``_COMMON``."""
    q_off, k_off, o_off, plan_tensors, scale, lo_s, lo_e, hi_s, hi_e, broadcast, determ, backend, check, max_q, max_kv = arguments
    band = Band(lo_s, lo_e, hi_s, hi_e)
    problem = make_problem(query, key, value, q_off, k_off, o_off, scale, band, broadcast, determ, max_q, max_kv)
    if check or problem.device.type == "cpu":
        check_contents(problem)
    return problem, registry.choose(problem, backend).backend, list(plan_tensors) or None


def _attention(query, key, value, *arguments):
    problem, backend, plan_tensors = _problem_of(query, key, value, arguments)
    return registry.load(backend).forward(problem, query, key, value, plan_tensors)


def _attention_backward(dout, dlse, query, key, value, out, lse, needs, *arguments):
    problem, backend, plan_tensors = _problem_of(query, key, value, arguments)
    dout = torch.zeros_like(out) if dout is None else dout
    grads = registry.load(backend).backward(
        problem, dout, dlse, query, key, value, out, lse, plan_tensors, needs=tuple(needs)
    )
    return tuple(query.new_empty(0) if not need else grad for grad, need in zip(grads, needs))


def _attention_fake(query, key, value, *arguments):
    key_offset, broadcast_q = arguments[1], arguments[9]
    rows = (key_offset.shape[0] - 1) * query.shape[0] if broadcast_q else query.shape[0]
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty(rows, query.shape[1], value.shape[2]),
        query.new_empty(query.shape[1], rows, dtype=lse_dtype),
    )


def _attention_backward_fake(dout, dlse, query, key, value, out, lse, needs, *arguments):
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((query, key, value), needs))


def _setup_context(ctx, inputs, output):
    query, key, value, query_offset, key_offset, output_offset, plan_tensors, *rest = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, query_offset, key_offset, output_offset, *plan_tensors)
    rest = list(rest)
    rest[_CHECK] = False  # the forward has checked
    ctx.rest = rest


def _backward(ctx, dout, dlse):
    query, key, value, out, lse, query_offset, key_offset, output_offset, *plan_tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    nothing = (None, None, None, [None] * len(plan_tensors), *(None for _ in ctx.rest))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    grads = torch.ops.jfa.attention_backward(
        dout, dlse, query, key, value, out, lse, needs, query_offset, key_offset, output_offset, plan_tensors, *ctx.rest
    )
    wanted = [grad if need else None for grad, need in zip(grads, needs)]
    return (*_differentiable_once(wanted, dout, dlse, query, key, value), *nothing)


class _DifferentiableOnce(torch.autograd.Function):
    """Ties a gradient to the inputs, so that a second derivative by any of them is an error and not silently incomplete."""

    @staticmethod
    def forward(ctx, grad, *inputs):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("jagged_flash_attention has no double backward: its gradients cannot be differentiated again")


def _differentiable_once(grads: list[Tensor | None], *inputs: Tensor | None) -> list[Tensor | None]:
    """The gradients; with create_graph=True such that differentiating them raises."""
    if not torch.is_grad_enabled() or any(g is not None and type(g) is not Tensor for g in grads):
        return grads  # no graph is made, or torch.compile traces with fake tensors
    return [g if g is None else _DifferentiableOnce.apply(g, *inputs) for g in grads]


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("jfa::attention", _attention_fake, lib=_LIBRARY)
torch.library.register_fake("jfa::attention_backward", _attention_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("jfa::attention", _backward, setup_context=_setup_context, lib=_LIBRARY)
