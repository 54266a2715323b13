"""Attention over jagged batches: one call, validated, given to a backend, differentiable, and known to torch.compile.

A call goes through :mod:`.arguments` (checks that need no tensor contents), then :mod:`.op` (autograd, and checks of
the offsets' contents on request), to a backend's forward as a :class:`jfa.kernels.base.Problem`; the backward takes the
same path. Contents are checked inside the op, so that torch.compile(fullgraph=True) never sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jfa.attention import arguments, op, prepared, quantized
from jfa.attention.arguments import check_arguments, check_contents, make_problem
from jfa.block_sparse import BlockLists
from jfa.kernels import registry
from jfa.kernels.base import Problem
from jfa.kernels.registry import Explanation
from jfa.masks import Band
from jfa.mxfp8 import BlockScaled

__all__ = ["Plan", "check_arguments", "check_contents", "explain", "jagged_flash_attention", "make_problem", "plan"]


# ------------------------------------------------------------------------------------------------------------ public
def jagged_flash_attention(
    query: Tensor | BlockScaled,
    key: Tensor | BlockScaled,
    value: Tensor | BlockScaled,
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
    block_lists: BlockLists | None = None,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of each sequence's queries over the same sequence's keys, on packed tensors without padding.

    Args:
        query: [total_q, H, D]; with ``broadcast_q`` [Lq, H, D], shared by all sequences. bf16, fp16, fp32 (CPU: also fp64).
        key: [total_kv, H_kv, D] with H a multiple of H_kv: query head h reads key head h // (H // H_kv).
        value: [total_kv, H_kv, Dv].
        query_offset: [B+1] int32 (int64 is converted); sequence b's queries are rows query_offset[b] .. query_offset[b+1] - 1.
            Rows past the last offset belong to no sequence: their output is 0. With ``broadcast_q``: None, or [0, Lq].
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
        block_lists: which key blocks each block of queries attends to, from :mod:`jfa.block_sparse`; no gradient flows through
            them. ``check_offsets`` checks their contents, too.
        precision: None multiplies in the inputs' own type. "mxfp8" rounds the operands of every product, forward and backward, to
            MXFP8 (:mod:`jfa.mxfp8`), from bf16 inputs: on Blackwell's tensor cores, or simulated by the reference. With
            ``deterministic``, Blackwell's backward multiplies in bf16 what the forward rounded.

    Query, key and value may come in MXFP8 already, each or all of them, as :class:`jfa.mxfp8.BlockScaled`: query and key
    quantized along "head_dim", value along "tokens", for the offsets of this call, which may then be left out. They are
    multiplied as they are, the others must be bf16 and are encoded, ``precision`` is "mxfp8", and the output is bf16. The
    backward needs them along their other axis, too: ``quantize_jagged(x, offsets, axis, both=True)``, and ``x`` receives the
    gradient, straight through the rounding. A gradient next to an input encoded along one axis only is an error. Their
    offsets' contents are compared with the call's where ``check_offsets`` reads contents.

    Nested tensors (torch.jagged, [B, j, H, D] or transposed [B, H, j, D]) may stand for query, key and value; offsets are then
    theirs, and the output is nested as the query (with ``broadcast_q`` it is packed). Under ``torch.autocast`` the three are
    cast to autocast's type, as ``scaled_dot_product_attention`` does. Gradients cannot be differentiated again.

    Returns:
        out [rows_out, H, Dv] in the query's dtype, rows_out = total_q, or B * Lq with ``broadcast_q``. With ``return_lse``
        also lse [H, rows_out], fp32. A query that may see no key gets 0 and -inf, and no gradient.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
    """
    nested = False
    if not arguments.is_packed(query, key, value):
        nested = broadcast_q is not True and arguments.is_nested(query)
        query, key, value, query_offset, key_offset, restore = arguments.unwrap_nested(
            query, key, value, query_offset, key_offset
        )
        query, key, value = arguments.autocast(query, key, value)
        query_offset, key_offset, precision = arguments.unwrap_quantized(
            query, key, value, query_offset, key_offset, broadcast_q, precision
        )
    kept = None
    if precision is None and check_offsets in (None, False, True) and (return_lse is True or return_lse is False):
        tensors = query, key, value, query_offset, key_offset, output_offset
        switches, hints = (causal, broadcast_q, deterministic), (max_seq_len_q, max_seq_len_kv)
        lists = getattr(plan, "block_lists", None) if block_lists is None else block_lists
        kept, sizes = prepared.find(tensors, hints, sm_scale, window_size, switches, backend, plan, lists)
        again = None
        if kept is not None:
            again = kept.attend(query, key, value, tensors[3:], plan, sizes, return_lse, check_offsets, lists)
        if again is not None:
            out = restore(again[0]) if nested else again[0]
            return (out, again[1]) if return_lse else out
    arguments.check_switches(broadcast_q, deterministic, return_lse, check_offsets)
    band = Band.make(causal, window_size)
    check_arguments(query, key, value, query_offset, key_offset, broadcast_q, output_offset)
    _refuse_forward_mode(query, key, value)
    hints = arguments.maximum("max_seq_len_q", max_seq_len_q), arguments.maximum("max_seq_len_kv", max_seq_len_kv)
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from jfa.plan, got {type(plan).__name__}")
        block_lists = plan.lists_for(block_lists)
        plan.check(_plan_facts(query, key, value, key_offset, band, broadcast_q, deterministic, block_lists, precision))
        hints, backend = plan.hints, plan.backend_for(backend)
    scale = arguments.scale_of(sm_scale, query)
    precision = arguments.precision_of(precision, query, block_lists)
    problem = make_problem(
        query,
        key,
        value,
        query_offset,
        key_offset,
        output_offset,
        scale,
        band,
        broadcast_q,
        deterministic,
        *hints,
        block_lists,
        precision,
    )
    if block_lists is not None:
        arguments.check_block_lists(problem)
    attend = _way(problem, query, key, value, key_offset)
    if kept is not None:
        kept.learn(problem, backend)
    if attend in (op.attend_eagerly, quantized.attend_eagerly):
        backend = registry.pick(problem, backend)
    elif not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    planned = list(plan.tensors) if plan is not None else None
    call = op.Call(problem, backend, planned, bool(check_offsets), query_offset, return_lse)
    out, lse = attend(query, key, value, call)
    if nested:
        out = restore(out)
    return (out, lse) if return_lse else out


_SIGNATURES: dict[tuple, object] = {}  # of plans
_ROWS = "rows_q", "rows_kv", "sequences"  # facts that differ from batch to batch


@dataclass(frozen=True)
class Plan:
    """Tile lists and schedules of one backend for one set of offsets and the shapes given to :func:`plan`."""

    backend: str
    tensors: tuple[Tensor, ...]
    facts: tuple[tuple[str, object], ...] = ()  # what the lists depend on, by the name a message gives it
    hints: tuple[int, int] = (0, 0)  # max_seq_len_q and max_seq_len_kv: tiles were sized by them, so calls take these
    block_lists: BlockLists | None = None  # the plan has their transpose, so calls take these

    @cached_property
    def signature(self) -> object:
        """A key of the plan for :mod:`.prepared`: plans with equal keys differ in sizes and contents only."""
        facts = tuple(fact for fact in self.facts if fact[0] not in _ROWS)
        kinds = tuple((x.ndim, x.stride(), x.storage_offset() == 0, x.dtype, x.device) for x in self.tensors)
        return _SIGNATURES.setdefault((self.backend, facts, kinds), object())

    @cached_property
    def rows(self) -> tuple[int, int, int]:
        """(rows of query, rows of key and value, sequences) that a call must have."""
        facts = dict(self.facts)
        return tuple(facts.get(name, -1) for name in _ROWS)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Its tensors' dimensions in a row."""
        return tuple(size for x in self.tensors for size in x.shape)

    def check(self, facts: tuple[tuple[str, object], ...]) -> None:
        """Refuse lists for other shapes, which would lead a kernel outside its tensors.

        Raises:
            ValueError: naming what differs between the plan and a call.
        """
        for (name, planned), (_, called) in zip(self.facts, facts):
            if planned != called:
                raise ValueError(f"plan was built for {name} = {planned}, but this call has {called}")

    def lists_for(self, given: BlockLists | None) -> BlockLists | None:
        """Return the block lists of a call with this plan: the plan's own, which the call may leave out.

        Raises:
            ValueError: the call gives others than the plan was built for.
        """
        if self.block_lists is None or given is None or given is self.block_lists:
            return given if self.block_lists is None else self.block_lists
        raise ValueError("plan was built for other block_lists: leave block_lists out, or build a plan for these")

    def backend_for(self, asked: str) -> str:
        """Return the backend that this plan belongs to; an error if the call names another."""
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
    block_lists: BlockLists | None = None,
    precision: str | None = None,
) -> Plan:
    """Build tile lists and schedules once, for several layers' calls with the same offsets, shapes and masks, and their backward.

    Args: as in :func:`jagged_flash_attention`; ``rows_q`` and ``rows_kv`` are the tensors' first dimensions. A plan for
    ``block_lists`` holds them and their transpose; calls with it may leave them out. Nothing waits for the device. When the
    offsets or the block lists change, build a new plan.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shapes = (rows_q, num_heads, head_dim), (rows_kv, num_kv_heads, head_dim), (rows_kv, num_kv_heads, head_dim_v)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    arguments.check_switches(broadcast_q, deterministic)
    check_arguments(q, k, v, query_offset, key_offset, broadcast_q, output_offset, device=key_offset.device)
    band = Band.make(causal, window_size)
    hints = arguments.maximum("max_seq_len_q", max_seq_len_q), arguments.maximum("max_seq_len_kv", max_seq_len_kv)
    given = query_offset, key_offset, output_offset
    settings = 1.0, band, broadcast_q, deterministic, *hints, block_lists
    problem = make_problem(q, k, v, *given, *settings, arguments.precision_of(precision, q, block_lists))
    arguments.check_block_lists(problem)
    name = registry.pick(problem, backend)
    problem = op.prepare(problem, False, query_offset, name)
    build = getattr(registry.load(name, problem.precision), "plan", None)
    with op.on_device(problem.device):
        tensors = tuple(build(problem)) if build else ()
    facts = _plan_facts(q, k, v, key_offset, band, broadcast_q, deterministic, block_lists, precision)
    return Plan(name, tensors, facts, hints, block_lists)


def _plan_facts(
    query, key, value, key_offset, band, broadcast_q, deterministic, block_lists=None, precision=None
) -> tuple[tuple[str, object], ...]:
    """Return everything static that tile lists may depend on, hints apart."""
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
        ("block_lists", None if block_lists is None else "some"),  # whose tiles have the blocks' size
        ("precision", precision),
    )


def explain(
    query: Tensor | BlockScaled,
    key: Tensor | BlockScaled,
    value: Tensor | BlockScaled,
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
    block_lists: BlockLists | None = None,
    precision: str | None = None,
) -> Explanation:
    """Return which backend the same call of :func:`jagged_flash_attention` would get, in which form, and why.

    Takes the same arguments and raises the same errors about them. Printable; runs nothing and waits for nothing.
    """
    query, key, value, query_offset, key_offset, _ = arguments.unwrap_nested(
        query, key, value, query_offset, key_offset
    )
    query, key, value = arguments.autocast(query, key, value)
    query_offset, key_offset, precision = arguments.unwrap_quantized(
        query, key, value, query_offset, key_offset, broadcast_q, precision
    )
    arguments.check_switches(broadcast_q, deterministic, return_lse, check_offsets)
    check_arguments(query, key, value, query_offset, key_offset, broadcast_q, output_offset)
    band = Band.make(causal, window_size)
    hints = arguments.maximum("max_seq_len_q", max_seq_len_q), arguments.maximum("max_seq_len_kv", max_seq_len_kv)
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from jfa.plan, got {type(plan).__name__}")
        block_lists = plan.lists_for(block_lists)
        plan.check(_plan_facts(query, key, value, key_offset, band, broadcast_q, deterministic, block_lists, precision))
        hints, backend = plan.hints, plan.backend_for(backend)
    scale = arguments.scale_of(sm_scale, query)
    offsets = query_offset, key_offset, output_offset
    settings = scale, band, broadcast_q, deterministic, *hints, block_lists
    problem = make_problem(
        query, key, value, *offsets, *settings, arguments.precision_of(precision, query, block_lists)
    )
    arguments.check_block_lists(problem)
    return registry.choose(problem, backend)


def _way(problem: Problem, *tensors: Tensor | BlockScaled):
    """Return the function that carries a call: past torch.library where nothing has to see an op, else through it."""
    compiling = torch.compiler.is_compiling()
    if problem.quantized:
        given = (x for x in tensors if isinstance(x, Tensor))
        seen = compiling or op.under_transform() or not op.is_plain(*given)
        return quantized.attend_by_op if seen else quantized.attend_eagerly
    if compiling:
        return op.attend_by_op
    if op.under_transform():
        return op.attend_transformed
    return op.attend_eagerly if op.is_plain(*tensors) else op.attend_by_op


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise where a tangent would be dropped silently: the op knows reverse mode only."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("jagged_flash_attention has no forward-mode derivative (jvp); use reverse mode")
