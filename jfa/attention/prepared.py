"""Calls that come again: what the first ones found out, kept per signature, so that later ones only move addresses and numbers.

A *signature* is what a call says of types, heads, head dims, strides, devices and options; its *sizes* are the rows, the
number of sequences and the hints of lengths. Checks follow from the signature, but for a few of sizes that :func:`find`
makes. Tiles, grids and allocations follow from both: as formulas in the sizes, on conditions
(:mod:`jfa.kernels.common.recorder`). So the first call with a signature takes the long way
(:func:`jfa.attention.jagged_flash_attention`), the second is recorded and played, and all others are played, whatever
their sizes. Where sizes do not meet a record's conditions, because they get another tile shape, backend or kernel, there is
one :class:`Form` more. The backward is recorded the first time that a played forward meets one.

Only calls on a GPU with plain tensors come here: eager ones (:func:`find`), and those of the registered op that torch.compile's
graphs make (:func:`find_checked`), whose backward is a call of its own. torch.func, dispatch modes, profilers, block lists and
``check_offsets`` take the long way always.
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

MOST_SIGNATURES = 1024  # then all are forgotten: what never comes again must not fill the memory
MOST_FORMS = 64  # per signature and pass: sizes beyond them take the long way
MOST_TRIES = 64  # per signature and pass: recordings that met a kernel which was not compiled yet
MOST_ROWS = 2**30  # that a ragged descriptor counts
MOST_SEQUENCES = 2**24
LARGEST_HINT = 2**31 - 1
_PLAIN_NUMBERS = (int, type(None))
_SCALES = (float, int, type(None))
_WINDOWS = (int, type(None))
_SIZES = "rows_q", "rows_kv", "sequences", "max_q", "max_kv"
_MOST = dict(zip(_SIZES, (MOST_ROWS, MOST_ROWS, MOST_SEQUENCES, LARGEST_HINT, LARGEST_HINT)))
_KNOWN: dict[tuple, Prepared] = {}
_NEVER = None, ()


# ------------------------------------------------------------------------------------------------------------- signatures
def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor's calls are worth keeping."""
    return x.is_cuda


def find(tensors: tuple, hints: tuple, scale, window, switches: tuple, backend, plan) -> tuple[Prepared | None, tuple]:
    """Return what is kept of calls with this signature, empty at first, and the call's sizes.

    (None, ()) where a call takes the long way always, or has sizes that the long way has to judge.

    Args:
        tensors: query, key, value, query_offset, key_offset, output_offset.
        hints: max_seq_len_q, max_seq_len_kv.
        switches: causal, broadcast_q, deterministic.
    """
    if not isinstance(tensors[0], Tensor) or not on_gpu(tensors[0]):
        return _NEVER
    max_q, max_kv = hints
    causal, shared, deterministic = switches
    if torch.compiler.is_compiling() or op.under_transform():
        return _NEVER
    kinds = type(scale), type(window), type(causal)
    if type(max_q) not in _PLAIN_NUMBERS or type(max_kv) not in _PLAIN_NUMBERS or kinds[0] not in _SCALES:
        return _NEVER
    if kinds[1] not in _WINDOWS and not (kinds[1] is tuple and all(type(w) is int for w in window)):
        return _NEVER
    if kinds[2] not in (bool, str) or type(shared) is not bool or type(deterministic) is not bool:
        return _NEVER
    if type(backend) is not str:
        return _NEVER
    return find_checked(tensors, (max_q or 0, max_kv or 0), shared, (scale, window, switches, kinds, backend), plan)


def find_checked(
    tensors: tuple, hints: tuple, shared: bool, options: tuple, plan=None
) -> tuple[Prepared | None, tuple]:
    """Do the same where the types of all but tensors are known to be right.

    Args:
        shared: broadcast_q.
        options: all that a call says besides, hashable.
    """
    query, key, value, query_offset, key_offset, output_offset = tensors
    if not isinstance(query, Tensor) or not on_gpu(query) or type(key_offset) is not Tensor:
        return _NEVER
    if forward_ad._current_level >= 0 or not op.is_plain(query, key, value):
        return _NEVER
    max_q, max_kv = hints
    shapes = query.shape, key.shape, value.shape
    if len(shapes[0]) != 3 or len(shapes[1]) != 3 or len(shapes[2]) != 3:
        return _NEVER
    (rows_q, heads, dim), (rows_kv, kv_heads, key_dim), (rows_v, value_heads, value_dim) = shapes
    count = key_offset.numel()
    sizes = rows_q, rows_kv, count - 1, max_q, max_kv
    if rows_v != rows_kv or rows_q > MOST_ROWS or rows_kv > MOST_ROWS or not 1 <= count <= MOST_SEQUENCES:
        return _NEVER
    if not 0 <= sizes[3] <= LARGEST_HINT or not 0 <= sizes[4] <= LARGEST_HINT:
        return _NEVER
    signature = [options, heads, dim, kv_heads, key_dim, value_heads, value_dim]
    for x in (query, key, value):
        signature += (x.stride(), x.dtype, x.device)
    for x, expected in ((query_offset, 2 if shared else count), (output_offset, count), (key_offset, count)):
        if x is None:
            signature.append(None)
        elif type(x) is Tensor and x.dim() == 1 and x.numel() == expected:
            signature += (x.stride(), x.dtype, x.device)
        else:
            return _NEVER
    if plan is not None:
        if getattr(plan, "block_lists", plan) is not None or plan.rows != sizes[:3]:
            return _NEVER
        sizes = (*sizes[:3], *plan.hints, *plan.sizes)
        signature.append(plan.signature)
    key = tuple(signature)
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= MOST_SIGNATURES:
            _KNOWN.clear()
        found = _KNOWN[key] = Prepared()
    return found, sizes


def forget() -> None:
    """Forget all signatures."""
    _KNOWN.clear()


# ------------------------------------------------------------------------------------------------------------------ calls
class Prepared:
    """What is kept of one signature.

    Attributes:
        problem: of one of its calls, but without offsets: what is kept must not keep a call's tensors alive. None: no call
            has passed the checks yet.
        backend: as calls ask for it, perhaps "auto".
        names: roles of the offsets that its calls give.
        forward: by whether a backward may follow, the forms of its calls.
        alone: stands for a forward of which nothing was kept, where a backward is a call of its own.
    """

    def __init__(self):
        self.problem: Problem | None = None
        self.backend = ""
        self.names: tuple[str, ...] = ()
        self.forward: dict[bool, Lesson] = {True: Lesson(), False: Lesson()}
        self.alone = Form(lambda *sizes: None)

    def learn(self, problem: Problem, backend: str) -> None:
        """Note a call that passed all checks, and the backend that it asks for."""
        if self.problem is None:
            own = () if problem.broadcast_q else ("query_offset",)
            self.names = own + ("key_offset",) + (("output_offset",) if problem.output_offset is not None else ())
            self.backend = backend
            self.problem = replace(problem, query_offset=None, key_offset=None, output_offset=None)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: tuple, plan, sizes: tuple, with_lse: bool = True
    ) -> Sequence[Tensor | None] | None:
        """Return (out, lse) of a call that comes again; None where it has to take the long way.

        Args:
            offsets: query_offset, key_offset, output_offset.
            plan: a :class:`jfa.attention.Plan`, or None.
            sizes: of the call, as :func:`find` returned them.
            with_lse: if not, lse may be None: an output costs autograd several microseconds.
        """
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        call = self.call(grad, query, key, value, offsets, () if plan is None else plan.tensors, sizes)
        if call is None or not grad:
            return None if call is None else call.forward(query, key, value)
        return _apply_with_lse(query, key, value, call) if with_lse else (_apply(query, key, value, call), None)

    def call(self, grad: bool, query, key, value, offsets: tuple, plan: Sequence[Tensor], sizes: tuple) -> Call | None:
        """Return a call that can be played, or None. ``plan``: its tensors."""
        if self.problem is None:
            return None
        form, values = self.forward[grad].find(sizes)
        more = self._more(offsets, plan)
        if form is None:
            form, values = self.record_forward(grad, sizes, query, key, value, more)
        return None if form is None or form.tape is None else Call(self, form, sizes, values, more, grad)

    def backward_alone(self, dout, dlse, tensors: tuple, offsets: tuple, sizes: tuple, needs: tuple) -> list | None:
        """Return (dq, dk, dv) of a forward that left nothing, or None. ``tensors``: query, key, value, out, lse."""
        if self.problem is None or not (tensors[3].is_contiguous() and tensors[4].is_contiguous()):
            return None
        call = Call(self, self.alone, sizes, (), self._more(offsets, ()), False)
        return call.play_backward(True, dout, dlse, tensors, needs)

    def _more(self, offsets: tuple, plan: Sequence[Tensor]) -> list[Tensor]:
        if self.problem.broadcast_q:
            offsets = offsets[1:]
        return [*(x for x in offsets if x is not None), *plan]

    # ------------------------------------------------------------------------------------------------------- recording
    def problem_of(self, sizes: Sequence[int], offsets: dict) -> Problem:
        """Return the problem of a call with these sizes, in the order of their names, and offsets by role."""
        rows_q, rows_kv, sequences, max_q, max_kv = sizes[:5]
        shared = self.problem.broadcast_q
        return replace(
            self.problem,
            num_batches=sequences,
            rows_q=rows_q,
            rows_kv=rows_kv,
            rows_out=sequences * rows_q if shared else rows_q,
            max_seq_len_q=rows_q if shared else max_q,
            max_seq_len_kv=max_kv,
            query_offset=offsets["key_offset" if shared else "query_offset"],
            key_offset=offsets["key_offset"],
            output_offset=offsets.get("output_offset"),
        )

    def stand_ins(self, recorder, query: Look, key: Look, value: Look) -> list:
        """Return what stands in for query, key and value."""
        rows_q, rows_kv = list(recorder.sizes.values())[:2]
        given = ("query", query, rows_q), ("key", key, rows_kv), ("value", value, rows_kv)
        return [recorder.input(role, (rows, *x.shape[1:]), x.stride, x.dtype, x.device) for role, x, rows in given]

    def more_stand_ins(self, recorder, more: list[Look]) -> dict:
        """Return what stands in for offsets and a plan's tensors, by role."""
        _, _, sequences, _, _, *dims = recorder.sizes.values()
        found = {}
        for role, x in self.by_role(more).items():
            if role in self.names:
                shape = (sequences + 1,)
            else:
                shape, dims = tuple(dims[: len(x.shape)]), dims[len(x.shape) :]
            whole = x.whole and role not in self.names  # signatures tell it of plans only
            found[role] = recorder.input(role, shape, x.stride, x.dtype, x.device, whole)
        return found

    def by_role(self, more: list) -> dict[str, object]:
        """Return offsets and a plan's tensors by role."""
        return {self.names[i] if i < len(self.names) else f"plan {i}": x for i, x in enumerate(more)}

    def record_forward(self, grad: bool, sizes: tuple, query, key, value, more: list[Tensor]):
        """Return the form of a forward with these sizes, or None, and its numbers."""
        names = *_SIZES, *(f"plan_{i}" for i in range(len(sizes) - len(_SIZES)))
        query, key, value, *more = (Look.at(x) for x in (query, key, value, *more))

        def run(recorder) -> Pass:
            inputs, given = self.stand_ins(recorder, query, key, value), self.more_stand_ins(recorder, more)
            problem = self.problem_of(list(recorder.sizes.values()), given)
            backend = _taped(registry.pick(problem, self.backend), problem)
            plan = _plan_of(given)
            *results, lists = op.forward_with_lists(problem, backend, *inputs, plan, grad)
            return Pass(backend, results, None if plan else lists)

        return self.forward[grad].record(dict(zip(names, sizes)), run)


@dataclass(frozen=True)
class Look:
    """How a tensor looks: a recorder, which sees all that is done with tensors, is shown this."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole: bool  # it begins where its memory does

    @classmethod
    def at(cls, x: Tensor) -> Look:
        """Return how ``x`` looks."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset() == 0)


def _plan_of(given: dict) -> list | None:
    return [x for role, x in given.items() if role.startswith("plan")] or None


def _taped(backend: str, problem: Problem) -> str:
    """Return a backend's name if its calls can be recorded."""
    from jfa.kernels.common.recorder import Unrepeatable

    module = registry.load(backend, problem.precision)
    if not getattr(module, "TAPE", False):
        raise Unrepeatable(f"backend {backend!r}")
    wide = getattr(module, "INT64_OFFSETS", False)
    for x in (problem.query_offset, problem.key_offset, problem.output_offset):
        if x is not None and (x.stride(0) != 1 or not (wide or x.dtype is torch.int32)):
            raise Unrepeatable("offsets that have to be copied")
    return backend


@dataclass
class Pass:
    """What one pass of a backend returned; ``kept``: lists that it leaves to a later one."""

    backend: str
    results: Sequence
    kept: object = None


class Form:
    """Calls of one signature that one record serves: what follows from their sizes differs in numbers only.

    Attributes:
        measure: a function of sizes: the numbers, or None where these are another form's.
        tape: None where there can be none, for the reason ``why_not``.
        present: which results the pass returns; a gradient that is not needed may be None.
        backward: of a forward, by what else a backward depends on, the forms of its backwards.
        left: the lists that a forward kept, as a first backward leaves them.
    """

    def __init__(self, measure: Callable, tape=None, seen: Pass | None = None, why_not: str = ""):
        self.measure, self.tape, self.why_not = measure, tape, why_not
        self.backend = seen.backend if seen else ""
        self.present = tuple(x is not None for x in seen.results) if seen else ()
        self.backward: dict[tuple, Lesson] = {}
        self.left: object = None
        self.kept_numbers = 0 if tape is None else tape.kept_numbers

    def whole(self, results: list[Tensor]) -> list[Tensor | None]:
        """Return a pass's results, None for those that it leaves out."""
        given = iter(results)
        return [next(given) if there else None for there in self.present]


class Lesson:
    """The forms of one pass."""

    def __init__(self):
        self.forms: list[Form] = []
        self.tries = 0

    def find(self, sizes: tuple) -> tuple[Form | None, tuple | None]:
        """Return the form of a call with these sizes and its numbers, or (None, None)."""
        for form in self.forms:
            values = form.measure(*sizes)
            if values is not None:
                return form, values
        return None, None

    def record(self, sizes: dict[str, int], run: Callable) -> tuple[Form | None, tuple | None]:
        """Record a pass that no form serves yet.

        Args:
            sizes: by name.
            run: a function of the recorder that returns a :class:`Pass`.

        Returns:
            A new form and its numbers; (None, None) where the long way comes first, as a kernel is not compiled yet.
        """
        from jfa.kernels.common import launcher  # needs Triton, which the reference does not
        from jfa.kernels.common.recorder import Recorder
        from jfa.kernels.common.tape import Tape

        if len(self.forms) >= MOST_FORMS or self.tries >= MOST_TRIES or launcher.hooks():
            return None, None
        recorder = Recorder(sizes, _MOST)
        try:
            with torch.no_grad(), recorder:
                seen = run(recorder)
            tape = Tape(recorder, [x for x in seen.results if x is not None], seen.kept)
            form = Form(tape.measure, tape, seen)
        except launcher.NotCompiled:
            self.tries += 1
            return None, None
        except Exception as reason:  # whatever it is, the long way can do it, or says what is wrong
            form = Form(recorder.trace.compile(), why_not=str(reason))
        self.forms.append(form)
        return form, form.measure(*sizes.values())


@dataclass
class Call:
    """One call that is played; ``more``: the offsets, then a plan's tensors."""

    prepared: Prepared
    form: Form
    sizes: tuple[int, ...]
    values: tuple
    more: list[Tensor]
    grad: bool  # a backward may follow
    lists: object = None  # what its forward left: one tensor, or None, or after the long way the backend's own
    walked: bool = False  # a backward of it has been
    versions: list[int] | None = None  # of ``more``

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return (out, lse): play the tape, or take the long way where it cannot be played now."""
        played = self._play(self.form.tape, self.values, (query, key, value, *self.more))
        if played is not None:
            results, self.lists = played
            return results
        given = self.prepared.by_role(self.more)
        problem, plan = self.prepared.problem_of(self.sizes, given), _plan_of(given)
        with torch.no_grad():
            out, lse, lists = op.forward_with_lists(problem, self.form.backend, query, key, value, plan, self.grad)
        self.lists = None if plan else lists
        return out, lse

    def _play(self, tape, values: tuple, inputs: tuple):
        device = self.prepared.problem.device
        if op.is_current(device):  # a context takes a microsecond
            return tape.play(device, values, inputs)
        with op.on_device(device):
            return tape.play(device, values, inputs)

    def backward(self, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor], needs: tuple) -> Sequence:
        """Return (dq, dk, dv): play a tape, or take the long way. ``tensors``: query, key, value, out, lse."""
        first, self.walked = not self.walked, True
        found = self.play_backward(first, dout, dlse, tensors, needs)
        if found is not None:
            return found
        given, lists = self.prepared.by_role(self.more), self.lists
        if isinstance(lists, Tensor):
            from jfa.kernels.common.tape import views_in

            lists = views_in(lists, self._kept(first), self.values)
        problem = self.prepared.problem_of(self.sizes, given)
        grads = op.run_backward(problem, self.form.backend, dout, dlse, *tensors, _plan_of(given) or lists, needs)
        self._leave(first, lists)
        return grads

    def _kept(self, first: bool):
        return self.form.tape.kept if first else self.form.left

    def _leave(self, first: bool, lists) -> None:
        """Note what a first backward left of its forward's lists."""
        if first and isinstance(self.lists, Tensor) and self.form.left is None:
            from jfa.kernels.common.recorder import left_of

            self.form.left = left_of(self.form.tape.kept, lists)

    def play_backward(self, first: bool, dout: Tensor, dlse: Tensor | None, tensors, needs) -> list | None:
        """Return the gradients, or None where the long way has to be taken."""
        if not (self.lists is None or isinstance(self.lists, Tensor)) or not (dlse is None or dlse.is_contiguous()):
            return None
        case = needs, first, dlse is None, self.lists is None, dout.stride()
        lesson = self.form.backward.get(case)
        if lesson is None:
            lesson = self.form.backward[case] = Lesson()
        sizes = *self.sizes, *self.values[: self.form.kept_numbers]
        form, values = lesson.find(sizes)
        inputs = [*tensors, dout]
        if dlse is not None:
            inputs.append(dlse)
        if self.lists is not None:
            inputs.append(self.lists)
        if form is None:
            form, values = self._record_backward(lesson, sizes, first, dout, dlse is not None, tensors, needs)
        if form is None or form.tape is None:
            return None
        played = self._play(form.tape, values, (*inputs, *self.more))
        return None if played is None else form.whole(played[0])

    def _record_backward(self, lesson: Lesson, sizes: tuple, first: bool, dout, has_dlse: bool, tensors, needs):
        """Return the form of a backward with these sizes, or None, and its numbers."""
        names = *_SIZES, *(f"more_{i}" for i in range(len(sizes) - len(_SIZES)))
        query, key, value, out, lse, dout, *more = (Look.at(x) for x in (*tensors, dout, *self.more))

        def run(recorder) -> Pass:
            prepared, numbers = self.prepared, list(recorder.sizes.values())
            inputs = prepared.stand_ins(recorder, query, key, value)
            rows = prepared.problem_of(numbers, {"key_offset": None, "query_offset": None}).rows_out
            shape, by_head = (rows, *out.shape[1:]), (lse.shape[0], rows)
            inputs.append(recorder.input("out", shape, None, out.dtype, out.device))
            inputs.append(recorder.input("lse", by_head, None, lse.dtype, lse.device))
            gradients = [recorder.input("dout", shape, dout.stride, dout.dtype, dout.device), None]
            if has_dlse:
                gradients[1] = recorder.input("dlse", by_head, None, lse.dtype, lse.device)
            lists = self._stand_in_lists(recorder, first, tuple(numbers[len(self.sizes) :]))
            given = prepared.more_stand_ins(recorder, more)
            problem = prepared.problem_of(numbers, given)
            backend = self.form.backend or _taped(registry.pick(problem, prepared.backend), problem)
            grads = op.run_backward(problem, backend, *gradients, *inputs, _plan_of(given) or lists, needs)
            self._leave(first, lists)
            return Pass(backend, grads)

        return lesson.record(dict(zip(names, sizes)), run)

    def _stand_in_lists(self, recorder, first: bool, values: tuple):
        """Return what stands in for the lists that the forward left."""
        if self.lists is None:
            return None
        from jfa.kernels.common.recorder import Place, mapped
        from jfa.kernels.common.tape import resolved

        device = self.prepared.problem.device
        recorder.roles.append("lists")

        def stand_in(place: Place):
            size, stride = (tuple(resolved(x, values) for x in y) for y in (place.size, place.stride))
            offset = resolved(place.offset, values)
            return recorder.at(Place("lists", offset, place.dtype, size, stride), device)

        return mapped(self._kept(first), stand_in, Place)


class _Played(torch.autograd.Function):
    """Play a forward's tape, and its backward's; the output alone has a gradient."""

    @staticmethod
    def forward(ctx, query, key, value, call):
        out, lse = call.forward(query, key, value)
        _keep(ctx, call, query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        if dout is None:
            return None, None, None, None
        return _gradients(ctx, dout, None, tensors)


class _PlayedWithLse(torch.autograd.Function):
    """The same where the LSE has a gradient, too."""

    @staticmethod
    def forward(ctx, query, key, value, call):
        out, lse = call.forward(query, key, value)
        _keep(ctx, call, query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(tensors[3]) if dout is None else dout
        return _gradients(ctx, dout, dlse, tensors)


def _keep(ctx, call: Call, *tensors: Tensor) -> None:
    """Keep what a backward needs. Of offsets and a plan's lists it is only checked that nobody changes them before."""
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    call.versions = _versions(call.more)
    ctx.call = call


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]  # of inference mode's nothing counts changes


def _gradients(ctx, dout: Tensor, dlse: Tensor | None, tensors: tuple) -> tuple:
    call, needs = ctx.call, ctx.needs_input_grad[:3]
    if _versions(call.more) != call.versions:
        raise RuntimeError(
            "offsets or a plan needed for gradient computation have been modified by an inplace operation"
        )
    grads = call.backward(dout, dlse, tensors, needs)
    grads = [grad if need else None for grad, need in zip(grads, needs)]
    return (*op.differentiable_once(grads, dout, dlse, *tensors[:3]), None)


# What Function.apply does besides is for torch.func's transforms, and no call that is played is under one.
_apply = super(torch.autograd.Function, _Played).apply
_apply_with_lse = super(torch.autograd.Function, _PlayedWithLse).apply
