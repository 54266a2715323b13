"""Calls that come again: what the first ones found out, kept per signature, so that later ones only move addresses.

A *signature* is everything about a call but its numbers: shapes, strides, types, devices and options. Checks, the choice
of a backend, tiles and grids follow from it alone. So the first call with a signature takes the long way
(:func:`jfa.attention.jagged_flash_attention`), the second records what its backend does (:mod:`jfa.kernels.common.tape`), and
all others play that. The backward is recorded the first time that a played forward meets one.

Only eager calls on a GPU with plain tensors come here: torch.compile, torch.func, dispatch modes, profilers, block lists
and ``check_offsets`` take the long way always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jfa.attention import op
from jfa.kernels import registry
from jfa.kernels.base import Problem

MOST_SIGNATURES = 1024  # then all are forgotten: lengths that never come again must not fill the memory
_PLAIN_NUMBERS = (int, type(None))
_SCALES = (float, int, type(None))
_WINDOWS = (int, type(None))
_KNOWN: dict[tuple, Prepared] = {}


# ------------------------------------------------------------------------------------------------------------- signatures
def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor's calls are worth keeping."""
    return x.is_cuda


def find(tensors: tuple, hints: tuple, scale, window, switches: tuple, backend, plan) -> Prepared | None:
    """Return what is kept of calls with this signature, empty at first; None where a call takes the long way always.

    Args:
        tensors: query, key, value, query_offset, key_offset, output_offset.
        hints: max_seq_len_q, max_seq_len_kv.
        switches: causal, broadcast_q, deterministic.
    """
    query, key, value, *offsets = tensors
    if torch.compiler.is_compiling() or not isinstance(query, Tensor) or not on_gpu(query):
        return None
    if forward_ad._current_level >= 0 or op.under_transform() or not op.is_plain(query, key, value):
        return None
    kinds = type(hints[0]), type(hints[1]), type(scale), type(window), type(switches[0])
    if kinds[0] not in _PLAIN_NUMBERS or kinds[1] not in _PLAIN_NUMBERS or kinds[2] not in _SCALES:
        return None
    if kinds[3] not in _WINDOWS and not (kinds[3] is tuple and all(type(w) is int for w in window)):
        return None
    if (
        kinds[4] not in (bool, str)
        or type(switches[1]) is not bool
        or type(switches[2]) is not bool
        or type(backend) is not str
    ):
        return None
    facts = [hints, scale, window, switches, kinds, backend]
    for x in (query, key, value):
        facts += (x.shape, x.stride(), x.dtype, x.device)
    for x in offsets:
        if x is None:
            facts.append(None)
        elif type(x) is Tensor:
            facts += (x.shape, x.stride(), x.dtype, x.device)
        else:
            return None
    if plan is not None:
        if getattr(plan, "block_lists", plan) is not None:
            return None
        facts.append(plan.signature)
    signature = tuple(facts)
    found = _KNOWN.get(signature)
    if found is None:
        if len(_KNOWN) >= MOST_SIGNATURES:
            _KNOWN.clear()
        found = _KNOWN[signature] = Prepared()
    return found


def forget() -> None:
    """Forget all signatures."""
    _KNOWN.clear()


# ------------------------------------------------------------------------------------------------------------------ calls
class Prepared:
    """What is kept of one signature.

    Attributes:
        problem: of its calls, but without offsets: what is kept must not keep a call's tensors alive.
        backend: the one that it gets.
        names: roles of the offsets that its calls give.
        forward: by whether a backward may follow, how many calls took the long way, and what they taught.
        backward: the same by what else a backward depends on.
        walked: the lists that a forward left, as a first backward leaves them.
    """

    def __init__(self):
        self.problem: Problem | None = None
        self.backend = ""
        self.names: tuple[str, ...] = ()
        self.forward: dict[bool, Lesson] = {True: Lesson(), False: Lesson()}
        self.backward: dict[tuple, Lesson] = {}
        self.walked: object = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, offsets: tuple, plan) -> tuple[Tensor, Tensor] | None:
        """Return (out, lse) of a call that comes again; None where it has to take the long way.

        Args:
            offsets: query_offset, key_offset, output_offset.
            plan: a :class:`jfa.attention.Plan`, or None.
        """
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if self.forward[grad].tape is None:
            return None
        if self.problem.broadcast_q:
            offsets = offsets[1:]
        more = [x for x in offsets if x is not None]
        if plan is not None:
            more += plan.tensors
        if grad:
            return _Played.apply(query, key, value, self, more)
        return self.run_forward(grad, query, key, value, more)[:2]

    def run_forward(self, grad: bool, query: Tensor, key: Tensor, value: Tensor, more: list[Tensor]):
        """Return (out, lse, lists): play the tape, or take the long way where it cannot be played now.

        ``more``: the offsets, then a plan's tensors.
        """
        device = self.problem.device
        with op.on_device(device):
            played = self.forward[grad].tape.play(device, (query, key, value, *more))
        if played is not None:
            (out, lse), lists = played
            return out, lse, lists
        with torch.no_grad():
            return self._forward(grad, self._named(("query", "key", "value"), (query, key, value), more)).all

    def run_backward(self, ctx, dout, dlse, tensors: tuple, more: list[Tensor]) -> Sequence[Tensor | None]:
        """Return (dq, dk, dv): play a tape, or take the long way. ``tensors``: query, key, value, out, lse."""
        needs, first = ctx.needs_input_grad[:3], ctx.first
        ctx.first = False
        roles, given = ("query", "key", "value", "out", "lse", "dout"), (*tensors, dout)
        if dlse is not None:
            roles, given = (*roles, "dlse"), (*given, dlse)
        if isinstance(ctx.lists, Tensor):
            roles, given = (*roles, "lists"), (*given, ctx.lists)
        case = needs, first, roles, dout.stride(), None if dlse is None else dlse.stride()
        lesson = self.backward.get(case)
        if lesson is None:
            lesson = self.backward[case] = Lesson()
        if lesson.tape is not None:
            with op.on_device(self.problem.device):
                played = lesson.tape.play(self.problem.device, (*given, *more))
            if played is not None:
                return lesson.whole(played[0])
        inputs = self._named(roles, given, more)
        if lesson.wants():
            return lesson.record(inputs, lambda known: self._backward(known, needs, first, ctx.lists)).tensors
        return self._backward(inputs, needs, first, ctx.lists).tensors

    # ------------------------------------------------------------------------------------------------- the long way
    def wants(self, grad: bool, problem: Problem, backend: str) -> bool:
        """Count a call that takes the long way; return whether to record it."""
        if self.problem is None:
            own = () if problem.broadcast_q else ("query_offset",)
            self.names = own + ("key_offset",) + (("output_offset",) if problem.output_offset is not None else ())
            self.backend = backend
            self.problem = replace(problem, query_offset=None, key_offset=None, output_offset=None)
        return getattr(registry.load(backend, problem.precision), "TAPE", False) and self.forward[grad].wants()

    def record_forward(self, grad: bool, problem: Problem, query, key, value, plan: list[Tensor] | None):
        """Return (out, lse, lists), and keep how they came about."""
        more = [*(getattr(problem, name) for name in self.names), *(plan or ())]
        inputs = self._named(("query", "key", "value"), (query, key, value), more)
        return self.forward[grad].record(inputs, lambda known: self._forward(grad, known)).all

    def _named(self, roles: tuple, tensors: tuple, more: list[Tensor]) -> dict[str, Tensor]:
        plan = (f"plan {i}" for i in range(len(more) - len(self.names)))
        return dict(zip((*roles, *self.names, *plan), (*tensors, *more)))

    def _problem(self, inputs: dict[str, Tensor]) -> Problem:
        own = inputs["key_offset" if self.problem.broadcast_q else "query_offset"]
        output = inputs.get("output_offset")
        return replace(self.problem, query_offset=own, key_offset=inputs["key_offset"], output_offset=output)

    def _forward(self, grad: bool, inputs: dict[str, Tensor]):
        plan = [x for role, x in inputs.items() if role.startswith("plan")] or None
        tensors = inputs["query"], inputs["key"], inputs["value"]
        out, lse, lists = op.forward_with_lists(self._problem(inputs), self.backend, *tensors, plan, grad)
        return Outcome((out, lse), None if plan else lists)

    def _backward(self, inputs: dict[str, Tensor], needs, first: bool, lists) -> Outcome:
        from jfa.kernels.common import tape

        plan = [x for role, x in inputs.items() if role.startswith("plan")] or lists
        if "lists" in inputs:
            left = self.forward[True].tape.kept if first else self.walked
            plan = None if left is None else tape.views_in(inputs["lists"], left)
        names = "dout", "dlse", "query", "key", "value", "out", "lse"
        grads = op.run_backward(self._problem(inputs), self.backend, *(inputs.get(name) for name in names), plan, needs)
        if "lists" in inputs and first:
            self.walked = tape.places_in(inputs["lists"], plan)
        return Outcome(grads, None)


@dataclass(frozen=True)
class Outcome:
    """What one pass returns, and the lists that it leaves to a later one."""

    tensors: tuple[Tensor | None, ...]
    lists: object

    @property
    def all(self) -> tuple:
        """Return the results and the lists."""
        return *self.tensors, self.lists


class Lesson:
    """How often one case came, and its tape after the second time. ``tape`` None: not yet, or there can be none: ``why_not``."""

    def __init__(self):
        self.count, self.tape, self.present, self.why_not = 0, None, (), ""

    def wants(self) -> bool:
        """Count a call; return whether to record it. The first one compiles, and may be the only one."""
        self.count += 1
        return self.count == 2

    def record(self, inputs: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Outcome]) -> Outcome:
        """Run it with stand-ins for the inputs, which only it has, and keep how its results came about."""
        from jfa.kernels.common import launcher  # needs Triton, which the reference does not
        from jfa.kernels.common.tape import Recorder, Tape, Unrepeatable

        if launcher.hooks():  # launches are Triton's for now
            self.count -= 1
            return run(inputs)
        inputs = {role: x.detach() for role, x in inputs.items()}
        with Recorder(inputs) as seen:
            outcome = run(inputs)
        self.present = tuple(x is not None for x in outcome.tensors)
        try:
            self.tape = Tape(seen, [x for x in outcome.tensors if x is not None], outcome.lists)
        except Unrepeatable as reason:
            self.why_not = str(reason)
        return outcome

    def whole(self, results: list[Tensor]) -> list[Tensor | None]:
        """Return the results of a pass that it was not recorded to leave out."""
        left = iter(results)
        return [next(left) if there else None for there in self.present]


class _Played(torch.autograd.Function):
    """Play a forward's tape, and its backward's."""

    @staticmethod
    def forward(ctx, query, key, value, prepared, more):
        out, lse, lists = prepared.run_forward(True, query, key, value, more)
        # Offsets and a caller's lists are saved too, so that changing one in place before the backward is an error.
        ctx.save_for_backward(query, key, value, out, lse, *more)
        ctx.set_materialize_grads(False)
        ctx.prepared, ctx.lists, ctx.first = prepared, lists, True
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        query, key, value, out, lse, *more = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        grads = ctx.prepared.run_backward(ctx, dout, dlse, (query, key, value, out, lse), more)
        grads = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad)]
        return (*op.differentiable_once(grads, dout, dlse, query, key, value), None, None)
