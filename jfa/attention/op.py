"""The op behind the API: ``jfa::attention`` for torch.compile, an autograd function for eager calls.

Both run the same two functions, :func:`run_forward` and :func:`run_backward`. torch.library's own autograd takes about
0.2 ms of Python per call, as much as everything else together, so an eager call on plain tensors avoids it
(:func:`is_plain`), and the op has an autograd kernel of its own, which continues as an eager call where it can. Features
that intercept ops, such as torch.compile, fake tensors, torch.func, dispatch modes and the profiler, get the registered op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jfa.attention import autograd
from jfa.attention.arguments import check_contents, make_problem, narrowed
from jfa.attention.autograd import differentiable_once
from jfa.block_sparse import BlockLists
from jfa.kernels import registry
from jfa.kernels.base import Problem
from jfa.masks import Band


# ------------------------------------------------------------------------------------------------------------ both paths
def prepare(problem: Problem, check: bool, query_offset: Tensor | None = None, backend: str = "") -> Problem:
    """Check the offsets' contents, always on the CPU and elsewhere if asked, and return the problem with offsets for a backend.

    They are contiguous, and int32 unless the ``backend`` takes others.
    """
    if check or problem.device.type == "cpu":
        check_contents(problem, query_offset)
    wide = backend and getattr(registry.load(backend, problem.precision), "INT64_OFFSETS", False)
    offsets = problem.query_offset, problem.key_offset, problem.output_offset
    narrow = tuple(
        x if x is None or ((wide or x.dtype is torch.int32) and x.is_contiguous()) else narrowed(x) for x in offsets
    )
    if all(a is b for a, b in zip(offsets, narrow)):
        return problem
    return replace(problem, query_offset=narrow[0], key_offset=narrow[1], output_offset=narrow[2])


def on_device(device: torch.device):
    """Make ``device`` the current one: Triton launches on the current device, whatever the tensors say."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    """Return whether ``device`` is the current one, so that launches go there. A tensor is on a GPU, so CUDA is
    initialized."""
    return device.type != "cuda" or device.index is None or device.index == torch._C._cuda_getDevice()


def run_forward(problem: Problem, backend: str, query, key, value, plan) -> tuple[Tensor, Tensor]:
    """Return (out, lse) from a backend."""
    with on_device(problem.device):
        return registry.load(backend, problem.precision).forward(problem, query, key, value, plan)


def run_backward(problem: Problem, backend: str, dout, dlse, query, key, value, out, lse, plan, needs) -> tuple:
    """Return (dq, dk, dv) from a backend; those that are not needed may be None."""
    dout = torch.zeros_like(out) if dout is None else dout
    with on_device(problem.device):
        module = registry.load(backend, problem.precision)
        return module.backward(problem, dout, dlse, query, key, value, out, lse, plan, needs=needs)


def plain_gradient(grad: Tensor) -> Tensor:
    """Return a gradient as kernels read it from memory, where torch keeps a minus apart from a tensor's numbers.

    Raises:
        NotImplementedError: many gradients at once, in a tensor that has no memory.
    """
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise NotImplementedError(
            "jagged_flash_attention's kernels do not take torch.autograd.grad(is_grads_batched=True); "
            "torch.func.vmap of torch.func.vjp does the same"
        )
    return grad.resolve_neg() if grad.is_neg() else grad


# ------------------------------------------------------------------------------------------------------------------ eager
@dataclass(frozen=True)
class Call:
    """The arguments of a call besides its three differentiable tensors."""

    problem: Problem
    backend: str
    plan: list[Tensor] | None
    check: bool
    query_offset: Tensor | None  # as given: with broadcast_q it is checked and otherwise not read
    with_lse: bool = True  # if not, lse may be None


def is_plain(*tensors: Tensor) -> bool:
    """Return whether nothing but autograd has to see this call."""
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if torch.autograd._profiler_enabled():
        return False
    for x in tensors:
        if type(x) not in PLAIN or x.is_meta or x.is_neg():  # torch's dispatcher carries the minus out
            return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)


def attend_eagerly(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse); differentiable where an input requires a gradient."""
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    taken = LongWay(call, grad)
    if grad:
        return autograd.attend(query, key, value, taken, call.with_lse)
    with torch.no_grad():
        return taken.forward(query, key, value)


def forward_with_lists(problem: Problem, backend: str, query, key, value, plan, grad: bool) -> tuple:
    """Return (out, lse, lists) from a backend; with ``grad`` lists that serve the backward, too: ``plan``, or made for both."""
    if plan is None and grad:
        make_lists = getattr(registry.load(backend, problem.precision), "make_lists", None)
        if make_lists is not None:
            with on_device(problem.device):
                plan = make_lists(problem)
    return (*run_forward(problem, backend, query, key, value, plan), plan)


class LongWay(autograd.EagerCall):
    """Run a backend's forward and backward; lists of tiles made for the first serve the second."""

    __slots__ = ("backend", "call", "grad", "plan", "problem", "versions", "watched")

    def __init__(self, call: Call, grad: bool):
        self.call, self.grad, self.backend = call, grad, call.backend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        call = self.call
        self.problem = problem = prepare(call.problem, call.check, call.query_offset, call.backend)
        out, lse, self.plan = forward_with_lists(problem, self.backend, query, key, value, call.plan, self.grad)
        offsets = problem.query_offset, problem.key_offset, problem.output_offset
        given = *offsets, *(call.plan or ()), *_unbundled(problem.block_lists)[0]
        self.watched = [x for x in given if x is not None]
        return out, lse

    def backward(self, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor], needs: tuple) -> list:
        """Return (dq, dk, dv), None for those that are not needed."""
        if self.backend != "reference":
            dout, dlse = plain_gradient(dout), None if dlse is None else plain_gradient(dlse)
        grads = run_backward(self.problem, self.backend, dout, dlse, *tensors, self.plan, needs)
        return [grad if need else None for grad, need in zip(grads, needs)]


# ------------------------------------------------------------------------------------------------------------- torch.func
def under_transform() -> bool:
    """Return whether torch.func (grad, vjp, jacrev, vmap, ...) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def attend_transformed(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) inside a torch.func transform, where torch.library's autograd is refused."""
    offsets = call.query_offset, call.problem.key_offset, call.problem.output_offset
    return _Transformed.apply(query, key, value, *offsets, call)


class _Transformed(torch.autograd.Function):
    """The op as an autograd function in the form that torch.func requires."""

    @staticmethod
    def forward(query, key, value, query_offset, key_offset, output_offset, call):
        own = key_offset if call.problem.broadcast_q else query_offset
        problem = replace(call.problem, query_offset=own, key_offset=key_offset, output_offset=output_offset)
        return attend_by_op(query, key, value, replace(call, problem=problem, query_offset=query_offset))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.call = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        query, key, value, *offsets, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        needs = list(ctx.needs_input_grad[:3])
        arguments = op_arguments(replace(ctx.call, check=False), *offsets)
        grads = torch.ops.jfa.attention_backward(dout, dlse, query, key, value, out, lse, needs, *arguments)
        wanted = [grad if need else None for grad, need in zip(grads, needs)]
        return (*differentiable_once(wanted, dout, dlse, query, key, value), None, None, None, None)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("jagged_flash_attention has no forward-mode derivative (jvp); use reverse mode")

    @staticmethod
    def vmap(info, in_dims, *args):
        return each(_Transformed.apply)(info, in_dims, *args)


def each(op: Callable) -> Callable:
    """Return a vmap rule that calls ``op`` once per element: a batch of jagged batches has no kernel of its own."""

    def element(x, dim, i):
        if isinstance(x, list | tuple):
            dims = dim if isinstance(dim, list | tuple) else [dim] * len(x)
            return [element(a, d, i) for a, d in zip(x, dims)]
        return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x

    def rule(info, in_dims, *args):
        results = [op(*(element(x, dim, i) for x, dim in zip(args, in_dims))) for i in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*results))
        return stacked, (0,) * len(stacked)

    return rule


# --------------------------------------------------------------------------------------------------------- custom ops
COMMON = (
    "Tensor? query_offset, Tensor key_offset, Tensor? output_offset, Tensor[] plan, Tensor[] block_lists, "
    "float sm_scale, int? lo_start, int? lo_end, "
    "int? hi_start, int? hi_end, bool broadcast_q, bool deterministic, str backend, bool check_offsets, str precision, "
    "SymInt max_seq_len_q, SymInt max_seq_len_kv, SymInt list_heads, SymInt list_rows, SymInt list_block, SymInt list_other_block"
)
_CHECK = 8  # check_offsets' place among the arguments after block_lists
_BACKEND = 12  # backend's place among the arguments after the three tensors
_LIBRARY = torch.library.Library("jfa", "DEF")
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"bool[] needs, {COMMON}) -> (Tensor, Tensor, Tensor)"
)


def attend_by_op(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) from the registered op, which torch.compile and other tracers see as one node."""
    problem = call.problem
    return torch.ops.jfa.attention(
        query, key, value, *op_arguments(call, call.query_offset, problem.key_offset, problem.output_offset)
    )


def op_arguments(call: Call, query_offset, key_offset, output_offset) -> tuple:
    """Return the op's arguments after the three tensors, in the order of ``COMMON``."""
    p = call.problem
    band = p.band.lo_start, p.band.lo_end, p.band.hi_start, p.band.hi_end
    hints = 0 if p.broadcast_q else p.max_seq_len_q, p.max_seq_len_kv
    offsets = query_offset, key_offset, output_offset
    switches = p.broadcast_q, p.deterministic, call.backend, call.check, p.precision
    lists, sizes = _unbundled(p.block_lists)
    return (*offsets, call.plan or [], lists, p.sm_scale, *band, *switches, *hints, *sizes)


def _unbundled(lists: BlockLists | None) -> tuple[list[Tensor], list[int]]:
    """Return block lists as a schema can hold them: tensors and integers."""
    if lists is None:
        return [], [0, 0, 0, 0]
    return list(lists.tensors), [lists.heads, lists.rows, lists.block, lists.other_block]


def problem_of(query, key, value, arguments: Sequence) -> tuple[Problem, str, list[Tensor] | None]:
    """Return (problem, backend, plan) of an op's trailing arguments, in the order of ``COMMON``: checked, for the backend."""
    call = call_of(query, key, value, arguments)
    return prepare(call.problem, call.check, call.query_offset, call.backend), call.backend, call.plan


def call_of(query, key, value, arguments: Sequence) -> Call:
    """Return the call that an op's trailing arguments are, in the order of ``COMMON``."""
    (
        q_off,
        k_off,
        o_off,
        plan_tensors,
        list_tensors,
        scale,
        lo_s,
        lo_e,
        hi_s,
        hi_e,
        broadcast,
        determ,
        backend,
        check,
        precision,
        max_q,
        max_kv,
        *sizes,
    ) = arguments
    band = Band(lo_s, lo_e, hi_s, hi_e)
    lists = BlockLists(*list_tensors, *sizes) if list_tensors else None
    given = query, key, value, q_off, k_off, o_off, scale, band, broadcast, determ, max_q, max_kv, lists, precision
    problem = make_problem(*given)
    return Call(problem, registry.pick(problem, backend), list(plan_tensors) or None, check, q_off)


def checks(arguments: Sequence) -> bool:
    """Return ``check_offsets`` of an op's trailing arguments."""
    return arguments[5 + _CHECK]


def _kept(query, key, value, arguments: Sequence) -> tuple:
    """Return what is kept of calls like this one (jfa.attention.prepared), or None; its sizes; and its block lists."""
    from jfa.attention import prepared  # which imports this module

    *offsets, plan, lists, scale, lo_s, lo_e, hi_s, hi_e, shared, determ, backend, check, precision, max_q, max_kv = (
        arguments[:-4]
    )
    if plan or precision:
        return None, (), None
    lists = BlockLists(*lists, *arguments[-4:]) if lists else None
    options = "op", scale, lo_s, lo_e, hi_s, hi_e, shared, determ, backend
    return *prepared.find_checked((query, key, value, *offsets), (max_q, max_kv), shared, options, None, lists), lists


def _attention(query, key, value, *arguments):
    """Return (out, lse); differentiable where grad mode is on and nothing but autograd has to see the op."""
    kept, sizes, lists = _kept(query, key, value, arguments)
    if kept is not None:
        found = kept.attend(query, key, value, arguments[:3], None, sizes, True, checks(arguments), lists)
        if found is not None:
            return tuple(found)
    call = call_of(query, key, value, arguments)
    if kept is not None:
        kept.learn(call.problem, arguments[_BACKEND])
    return tuple(attend_eagerly(query, key, value, call))


def _attention_of_autograd(keyset, query, key, value, *arguments):
    """Do the same for tensors that autograd looks at; the backward of what has to be seen is an op, too."""
    if is_plain(query, key, value) and not under_transform():
        return _attention(query, key, value, *arguments)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Seen.apply(query, key, value, keyset, arguments)
    return _below_autograd(keyset, query, key, value, *arguments)


def _below_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jfa.attention.default.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _attention_backward(dout, dlse, query, key, value, out, lse, needs, *arguments):
    kept, sizes, lists = _kept(query, key, value, arguments)
    grads = None
    if kept is not None and dout is not None:
        tensors = query, key, value, out, lse
        grads = kept.backward_alone(dout, dlse, tensors, arguments[:3], sizes, tuple(needs), lists)
    if grads is None:
        problem, backend, plan_tensors = problem_of(query, key, value, arguments)
        grads = run_backward(problem, backend, dout, dlse, query, key, value, out, lse, plan_tensors, tuple(needs))
    return tuple(query.new_empty(0) if not need else grad for grad, need in zip(grads, needs))


def attention_fake(query, key, value, *arguments):
    """Return (out, lse) without contents, for tracers."""
    key_offset, broadcast_q = arguments[1], arguments[10]
    rows = (key_offset.shape[0] - 1) * query.shape[0] if broadcast_q else query.shape[0]
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty(rows, query.shape[1], value.shape[2]),
        query.new_empty(query.shape[1], rows, dtype=lse_dtype),
    )


def _attention_backward_fake(dout, dlse, query, key, value, out, lse, needs, *arguments):
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((query, key, value), needs))


class _Seen(torch.autograd.Function):
    """The op where somebody has to see it: both passes are ops below autograd."""

    @staticmethod
    def forward(ctx, query, key, value, keyset, arguments):
        *offsets, plan, lists = arguments[:5]
        rest = list(arguments[5:])
        out, lse = _below_autograd(keyset, query, key, value, *arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse, *offsets, *plan, *lists)
        rest[_CHECK] = False  # the forward has checked
        ctx.plan, ctx.rest = len(plan), rest
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        query, key, value, out, lse, *given = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 5
        offsets, plan, lists = given[:3], given[3 : 3 + ctx.plan], given[3 + ctx.plan :]
        needs = list(ctx.needs_input_grad[:3])
        grads = torch.ops.jfa.attention_backward(
            dout, dlse, query, key, value, out, lse, needs, *offsets, plan, lists, *ctx.rest
        )
        wanted = [grad if need else None for grad, need in zip(grads, needs)]
        return (*differentiable_once(wanted, dout, dlse, query, key, value), None, None)


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("jfa::attention", attention_fake, lib=_LIBRARY)
torch.library.register_fake("jfa::attention_backward", _attention_backward_fake, lib=_LIBRARY)
_LIBRARY.impl("attention", _attention_of_autograd, "Autograd", with_keyset=True)
torch.library.register_vmap("jfa::attention", each(torch.ops.jfa.attention), lib=_LIBRARY)
torch.library.register_vmap("jfa::attention_backward", each(torch.ops.jfa.attention_backward), lib=_LIBRARY)
