"""A call that is played: the tape of its forward, then that of its backward, or the long way where one cannot be played now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jfa.attention import autograd, op
from jfa.attention.forms import Form, Lesson, Look, Pass
from jfa.kernels import registry
from jfa.kernels.base import Problem

if TYPE_CHECKING:
    from jfa.attention.prepared import Prepared


class Played(autograd.EagerCall):
    """One call that is played.

    Attributes:
        form, values: of its forward, and the numbers that its ``sizes`` gave.
        watched: the offsets, block lists, then a plan's tensors.
        grad: a backward may follow.
        lists: what its forward left: one tensor, or None, or after the long way the backend's own.
        walked: a backward of it has been.
    """

    __slots__ = ("form", "grad", "lists", "prepared", "sizes", "values", "versions", "walked", "watched")

    def __init__(
        self, prepared: Prepared, form: Form, sizes: tuple, values: tuple, watched: Sequence[Tensor], grad: bool
    ):
        self.prepared, self.form, self.sizes, self.values = prepared, form, sizes, values
        self.watched, self.grad, self.lists, self.walked = watched, grad, None, False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return (out, lse): play the tape, or take the long way where it cannot be played now."""
        inputs = query, key, value, *self.watched
        played = self._play(self.form.tape, self.values, inputs)
        if played is None:  # perhaps an input is not at whole 16 bytes
            form, values = self.prepared.form_of(self.grad, self.sizes, inputs)
            if form is not None and form is not self.form and form.tape is not None:
                self.form, self.values = form, values
                played = self._play(form.tape, values, inputs)
        if played is not None:
            results, self.lists = played
            return results
        given = self.prepared.by_role(self.watched)
        problem, plan = self.prepared.problem_of(self.sizes, given), plan_of(given)
        with torch.no_grad():
            out, lse, lists = op.forward_with_lists(problem, self.form.backend, query, key, value, plan, self.grad)
        self.lists = None if plan else lists
        return out, lse

    def _play(self, tape, values: tuple, inputs: tuple):
        device = self.prepared.device
        if op.is_current(device):  # a context takes a microsecond
            return tape.play(device, values, inputs)
        with op.on_device(device):
            return tape.play(device, values, inputs)

    def backward(self, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor], needs: tuple) -> Sequence:
        """Return (dq, dk, dv): play a tape, or take the long way. ``tensors``: query, key, value, out, lse."""
        first, self.walked = not self.walked, True
        dout, dlse = op.plain_gradient(dout), None if dlse is None else op.plain_gradient(dlse)
        found = self.play_backward(first, dout, dlse, tensors, needs)
        if found is not None:
            return found
        given, lists = self.prepared.by_role(self.watched), self.lists
        if isinstance(lists, Tensor):
            from jfa.kernels.common.tape import views_in

            lists = views_in(lists, self._kept(first), self.values)
        problem = self.prepared.problem_of(self.sizes, given)
        grads = op.run_backward(problem, self.form.backend, dout, dlse, *tensors, plan_of(given) or lists, needs)
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
        inputs = *tensors, dout, *(() if dlse is None else (dlse,)), *(() if self.lists is None else (self.lists,))
        inputs = *inputs, *self.watched
        played = None if form is None or form.tape is None else self._play(form.tape, values, inputs)
        if played is None:  # perhaps an input is not at whole 16 bytes
            known, lesson = form, lesson.of(inputs)
            form, values = lesson.find(sizes)
            if form is None:
                form, values = self._record_backward(lesson, sizes, first, dout, dlse, tensors, needs)
            if form is not None and form is not known and form.tape is not None:
                played = self._play(form.tape, values, inputs)
        return None if played is None else form.whole(played[0])

    def _record_backward(self, lesson: Lesson, sizes: tuple, first: bool, dout, dlse, tensors, needs):
        """Return the form of a backward with these sizes, or None, and its numbers."""
        query, key, value, out, lse, dout, *more = (Look.at(x) for x in (*tensors, dout, *self.watched))
        dlse = None if dlse is None else Look.at(dlse)

        def run(recorder) -> Pass:
            prepared, numbers = self.prepared, list(recorder.sizes.values())
            inputs = prepared.stand_ins(recorder, query, key, value)
            rows = prepared.problem_of(numbers, {"key_offset": None, "query_offset": None}).rows_out
            shape, by_head = (rows, *out.shape[1:]), (lse.shape[0], rows)
            inputs.append(recorder.input("out", shape, None, out.dtype, out.device, aligned=out.aligned))
            inputs.append(recorder.input("lse", by_head, None, lse.dtype, lse.device, aligned=lse.aligned))
            gradients = [
                recorder.input("dout", shape, dout.stride, dout.dtype, dout.device, aligned=dout.aligned),
                None,
            ]
            if dlse is not None:
                gradients[1] = recorder.input("dlse", by_head, None, lse.dtype, lse.device, aligned=dlse.aligned)
            lists = self._stand_in_lists(recorder, first, tuple(numbers[len(self.sizes) :]))
            given = prepared.more_stand_ins(recorder, more)
            problem = prepared.problem_of(numbers, given)
            backend = self.form.backend or taped(registry.pick(problem, prepared.backend), problem)
            grads = op.run_backward(problem, backend, *gradients, *inputs, plan_of(given) or lists, needs)
            self._leave(first, lists)
            return Pass(backend, grads)

        return lesson.record(self.prepared.named(sizes), run)

    def _stand_in_lists(self, recorder, first: bool, values: tuple):
        """Return stand-ins for the lists that the forward kept."""
        if self.lists is None:
            return None
        from jfa.kernels.common.recorder import Place, mapped
        from jfa.kernels.common.tape import resolved

        device = self.prepared.problem.device
        recorder.role("lists")

        def stand_in(place: Place):
            size, stride = (tuple(resolved(x, values) for x in y) for y in (place.size, place.stride))
            offset = resolved(place.offset, values)
            return recorder.at(Place("lists", offset, place.dtype, size, stride), device)

        return mapped(self._kept(first), stand_in, Place)


def plan_of(given: dict) -> list | None:
    """Return a plan's tensors of those that are given by role, or None."""
    return [x for role, x in given.items() if role.startswith("plan")] or None


def taped(backend: str, problem: Problem) -> str:
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
