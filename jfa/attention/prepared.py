"""Cache the results of host code per signature, so that repeated calls only store new addresses and numbers.

The *signature* of a call consists of its types, heads, head dims, strides, devices and options; its *sizes* are the
rows, the number of sequences and the hints of lengths. Checks depend on the signature only, apart from a few checks of
sizes in :func:`find`. Tiles, grids and allocations depend on both: they are formulas in the sizes that hold under
conditions (:mod:`jfa.kernels.common.recorder`). The first call with a signature takes the long way
(:func:`jfa.attention.jagged_flash_attention`), the second is recorded and played, and all others are played, whatever
their sizes. Sizes that do not meet a record's conditions, because they need another tile shape, backend or kernel, get
another :class:`jfa.attention.forms.Form`. The backward is recorded the first time that a played forward is
differentiated.

Only calls on a GPU with plain tensors are cached: eager ones (:func:`find`), and those of the registered op
(:func:`find_checked`), whose backward is a call of its own in torch.compile's graphs. Calls under torch.func, dispatch
modes or profilers always take the long way. Block lists are inputs of a call like its offsets; how many entries they have room
for is one more of its sizes.

Each call checks again what may change between two calls of one signature: grad mode, whether a feature must see the op,
the current device and stream, and the addresses and their alignment. Of a tensor only its shape, strides and type are
kept, so no address can be stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jfa.attention import autograd, op
from jfa.attention.forms import (
    CAPACITY,
    LARGEST_HINT,
    MOST_ENTRIES,
    MOST_ROWS,
    MOST_SEQUENCES,
    SIZES,
    Form,
    Lesson,
    Look,
    Pass,
)
from jfa.attention.played import Played, plan_of, taped
from jfa.block_sparse import BlockLists
from jfa.block_sparse.grid import query_capacity
from jfa.kernels import registry
from jfa.kernels.base import Problem

MOST_SIGNATURES = 1024  # then all are forgotten: what never comes again must not fill the memory
_SCALES = (float, int, type(None))
_WINDOWS = (int, type(None))
LISTS = "starts", "columns", "kinds"
_KNOWN: dict[tuple, Prepared] = {}
_NEVER = None, ()


# ------------------------------------------------------------------------------------------------------------- signatures
def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor's calls are worth keeping."""
    return x.is_cuda


def find(
    tensors: tuple, hints: tuple, scale, window, switches: tuple, backend, plan, lists=None
) -> tuple[Prepared | None, tuple]:
    """Return what is kept of calls with this signature, empty at first, and the call's sizes.

    (None, ()) where a call takes the long way always, or has sizes that the long way has to judge.

    Args:
        tensors: query, key, value, query_offset, key_offset, output_offset.
        hints: max_seq_len_q, max_seq_len_kv.
        switches: causal, broadcast_q, deterministic.
        lists: block lists, the call's or its plan's.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _NEVER
    max_q, max_kv = hints
    causal, shared, deterministic = switches
    # Equal values of other types must not be taken for these: True == 1 == 1.0.
    if not (max_q is None or type(max_q) is int) or not (max_kv is None or type(max_kv) is int):
        return _NEVER
    if type(scale) not in _SCALES or type(backend) is not str or type(deterministic) is not bool:
        return _NEVER
    if not (causal is False or causal is True or type(causal) is str) or not (shared is False or shared is True):
        return _NEVER
    if type(window) not in _WINDOWS and not (type(window) is tuple and all(type(w) is int for w in window)):
        return _NEVER
    options = scale, window, causal, shared, deterministic, backend
    return find_checked(tensors, (max_q or 0, max_kv or 0), shared, options, plan, lists)


def find_checked(
    tensors: tuple, hints: tuple, shared: bool, options: tuple, plan=None, lists=None
) -> tuple[Prepared | None, tuple]:
    """Do the same where the types of all but tensors are known to be right.

    Args:
        shared: broadcast_q.
        options: all that a call says besides, hashable.
    """
    query, key, value, query_offset, key_offset, output_offset = tensors
    if forward_ad._current_level >= 0 or type(key_offset) is not Tensor or not op.is_plain(query, key, value):
        return _NEVER
    if not on_gpu(query):
        return _NEVER
    shape_q, shape_k, shape_v = query.shape, key.shape, value.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 3:
        return _NEVER
    (rows_q, heads, dim), (rows_kv, kv_heads, key_dim), (rows_v, value_heads, value_dim) = shape_q, shape_k, shape_v
    count = key_offset.numel()
    max_q, max_kv = hints
    if rows_v != rows_kv or rows_q > MOST_ROWS or rows_kv > MOST_ROWS or not 1 <= count <= MOST_SEQUENCES:
        return _NEVER
    if not 0 <= max_q <= LARGEST_HINT or not 0 <= max_kv <= LARGEST_HINT:
        return _NEVER
    sizes = rows_q, rows_kv, count - 1, max_q, max_kv
    own = (
        None
        if query_offset is None
        else True
        if query_offset is key_offset
        else _facts(query_offset, 2 if shared else count)
    )
    slots = None if output_offset is None else _facts(output_offset, count)
    keys = _facts(key_offset, count)
    if keys is False or own is False or slots is False or (own is True and shared):
        return _NEVER
    listed, planned, more = None, None, ()
    if lists is not None:
        listed = _facts_of_lists(lists, rows_q, count - 1, shared)
        if listed is False:
            return _NEVER
        more = (lists.columns.numel(),)
    if plan is not None:
        if getattr(plan, "block_lists", plan) is not lists or plan.rows != sizes[:3]:
            return _NEVER
        sizes = (*sizes[:3], *plan.hints)
        more, planned = (*more, *plan.sizes), plan.signature
    sizes = (*sizes, *more)
    signature = (
        *(options, heads, dim, kv_heads, key_dim, value_heads, value_dim, own, keys, slots, planned, listed),
        *(query.stride(), query.dtype, query.device, key.stride(), key.dtype, key.device),
        *(value.stride(), value.dtype, value.device),
    )
    found = _KNOWN.get(signature)
    if found is None:
        if len(_KNOWN) >= MOST_SIGNATURES:
            _KNOWN.clear()
        found = _KNOWN[signature] = Prepared()
    return found, sizes


def _facts(offsets: Tensor, count: int) -> tuple | bool:
    """Return a signature's entry for offsets, or False where they are not ``count`` contiguous numbers."""
    if type(offsets) is not Tensor or offsets.dim() != 1 or offsets.numel() != count:
        return False
    return offsets.stride(), offsets.dtype, offsets.device


def _facts_of_lists(lists: BlockLists, rows_q: int, sequences: int, shared: bool) -> tuple | bool:
    """Return a signature's entry for block lists, or False where their sizes do not fit each other or the call."""
    if type(lists) is not BlockLists or not type(lists.heads) is type(lists.block) is type(lists.other_block) is int:
        return False
    starts, columns, kinds = tensors = lists.tensors
    if (
        not (type(starts) is type(columns) is type(kinds) is Tensor)
        or not 1 <= lists.block
        or not 1 <= lists.other_block
    ):
        return False
    rows = query_capacity(rows_q, sequences, lists.block, shared)
    entries = columns.numel()
    if lists.rows != rows or starts.numel() != lists.heads * rows + 1:
        return False
    if kinds.numel() != entries or entries > MOST_ENTRIES:
        return False
    facts = tuple((x.dtype, x.stride(), x.device) for x in tensors)
    return (lists.heads, lists.block, lists.other_block, *facts)


def forget() -> None:
    """Forget all signatures."""
    _KNOWN.clear()


# ------------------------------------------------------------------------------------------------------------------ calls
class Prepared:
    """Cached data of one signature.

    Attributes:
        problem: the problem of one of its calls without the offsets, because the cache must not keep a call's tensors
            alive. None: no call has passed the checks yet.
        backend: as given in the calls, possibly "auto".
        names: roles of the offsets that its calls give, and of block lists.
        forward: by whether a backward may follow, the forms of its calls.
        alone: stand-in for the forward where a backward is a call of its own.
    """

    def __init__(self):
        self.problem: Problem | None = None
        self.device: torch.device | None = None
        self.backend = ""
        self.names: tuple[str, ...] = ()
        self.forward: dict[bool, Lesson] = {True: Lesson(), False: Lesson()}
        self.alone = Form(lambda *sizes: None)

    def learn(self, problem: Problem, backend: str) -> None:
        """Note a call that passed all checks, and the backend that it asks for."""
        if self.problem is None:
            own = () if problem.broadcast_q else ("query_offset",)
            self.names = own + ("key_offset",) + (("output_offset",) if problem.output_offset is not None else ())
            self.backend, self.device = backend, problem.device
            lists = problem.block_lists
            if lists is not None:
                self.names += LISTS
                lists = replace(lists, starts=None, columns=None, kinds=None)
            self.problem = replace(problem, query_offset=None, key_offset=None, output_offset=None, block_lists=lists)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: tuple,
        plan,
        sizes: tuple,
        with_lse: bool = True,
        check: bool | None = False,
        lists: BlockLists | None = None,
    ) -> Sequence[Tensor | None] | None:
        """Return (out, lse) of a call that comes again; None where it has to take the long way.

        Args:
            offsets: query_offset, key_offset, output_offset.
            plan: a :class:`jfa.attention.Plan`, or None.
            sizes: of the call, as :func:`find` returned them.
            with_lse: if not, lse may be None: an output costs autograd several microseconds.
            check: check the offsets' contents before, and those of block lists.
            lists: block lists, the call's or its plan's.
        """
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        more = () if plan is None else plan.tensors
        more = more if lists is None else (*lists.tensors, *more)
        call = self.call(grad, query, key, value, offsets, more, sizes)
        if call is None:
            return None
        if check:
            op.check_contents(self.problem_of(sizes, self.by_role(call.watched)), offsets[0])
        if not grad:
            return call.forward(query, key, value)
        return autograd.attend(query, key, value, call, with_lse)

    def call(self, grad: bool, query, key, value, offsets: tuple, more: tuple, sizes: tuple) -> Played | None:
        """Return a call that can be played, or None. ``more``: tensors of block lists, then a plan's."""
        if self.problem is None:
            return None
        form, values = self.forward[grad].find(sizes)
        watched = self._watched(offsets, more)
        if form is None:
            form, values = self.form_of(grad, sizes, (query, key, value, *watched))
        return None if form is None or form.tape is None else Played(self, form, sizes, values, watched, grad)

    def form_of(self, grad: bool, sizes: tuple, inputs: tuple) -> tuple[Form | None, tuple | None]:
        """Return the form of a forward with these sizes whose inputs are aligned like these, or None, and its numbers."""
        lesson = self.forward[grad].of(inputs)
        form, values = lesson.find(sizes)
        return self.record_forward(lesson, grad, sizes, inputs) if form is None else (form, values)

    def backward_alone(
        self, dout, dlse, tensors: tuple, offsets: tuple, sizes: tuple, needs: tuple, lists: BlockLists | None = None
    ) -> list | None:
        """Return (dq, dk, dv) of a forward that left nothing, or None. ``tensors``: query, key, value, out, lse."""
        if self.problem is None or not (tensors[3].is_contiguous() and tensors[4].is_contiguous()):
            return None
        watched = self._watched(offsets, () if lists is None else lists.tensors)
        call = Played(self, self.alone, sizes, (), watched, False)
        return call.play_backward(True, dout, dlse, tensors, needs)

    def _watched(self, offsets: tuple, more: tuple) -> tuple[Tensor, ...]:
        """Return the tensors of :attr:`names`, then a plan's. ``more``: those that are no offsets."""
        own, keys, slots = offsets
        if own is None or self.problem.broadcast_q:
            return (keys, *more) if slots is None else (keys, slots, *more)
        return own, keys, *more

    # ------------------------------------------------------------------------------------------------------- recording
    def problem_of(self, sizes: Sequence[int], offsets: dict) -> Problem:
        """Return the problem of a call with these sizes, in the order of their names, and offsets and lists by role."""
        rows_q, rows_kv, sequences, max_q, max_kv = sizes[:5]
        shared, lists = self.problem.broadcast_q, self.problem.block_lists
        if lists is not None:
            rows = query_capacity(rows_q, sequences, lists.block, shared)
            lists = replace(lists, rows=rows, **{name: offsets.get(name) for name in LISTS})
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
            block_lists=lists,
        )

    def stand_ins(self, recorder, query: Look, key: Look, value: Look) -> list:
        """Return stand-ins for query, key and value."""
        rows_q, rows_kv = list(recorder.sizes.values())[:2]
        given = ("query", query, rows_q), ("key", key, rows_kv), ("value", value, rows_kv)
        return [
            recorder.input(role, (rows, *x.shape[1:]), x.stride, x.dtype, x.device, aligned=x.aligned)
            for role, x, rows in given
        ]

    def more_stand_ins(self, recorder, more: list[Look]) -> dict:
        """Return stand-ins for offsets, block lists and a plan's tensors, by role."""
        rows_q, _, sequences, _, _, *dims = recorder.sizes.values()
        entries, lists = None, self.problem.block_lists
        if lists is not None:
            entries, *dims = dims
        found = {}
        for role, x in self.by_role(more).items():
            if role == "starts":
                rows = query_capacity(rows_q, sequences, lists.block, self.problem.broadcast_q)
                shape = (lists.heads * rows + 1,)
            elif role in LISTS:
                shape = (entries,)
            elif role in self.names:
                shape = (sequences + 1,)
            else:
                shape, dims = tuple(dims[: len(x.shape)]), dims[len(x.shape) :]
            whole = x.whole and role not in self.names  # signatures tell it of plans only
            found[role] = recorder.input(role, shape, x.stride, x.dtype, x.device, whole, x.aligned)
        return found

    def by_role(self, more: list) -> dict[str, object]:
        """Return offsets, block lists and a plan's tensors by role."""
        return {self.names[i] if i < len(self.names) else f"plan {i}": x for i, x in enumerate(more)}

    def record_forward(self, lesson: Lesson, grad: bool, sizes: tuple, inputs: tuple[Tensor, ...]):
        """Return the form of a forward with these sizes, or None, and its numbers."""
        query, key, value, *more = (Look.at(x) for x in inputs)

        def run(recorder) -> Pass:
            inputs, given = self.stand_ins(recorder, query, key, value), self.more_stand_ins(recorder, more)
            problem = self.problem_of(list(recorder.sizes.values()), given)
            backend = taped(registry.pick(problem, self.backend), problem)
            plan = plan_of(given)
            *results, lists = op.forward_with_lists(problem, backend, *inputs, plan, grad)
            return Pass(backend, results, None if plan else lists)

        return lesson.record(self.named(sizes), run)

    def named(self, sizes: tuple) -> dict[str, int]:
        """Return a call's sizes by name, those of a plan or of kept lists last."""
        known = SIZES if self.problem.block_lists is None else (*SIZES, CAPACITY)
        return dict(zip((*known, *(f"more_{i}" for i in range(len(sizes) - len(known)))), sizes))
