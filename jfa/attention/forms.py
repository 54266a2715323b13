"""Records of one pass of a backend.

A :class:`Form` serves all calls whose sizes meet its conditions; a :class:`Lesson` has all forms of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_FORMS = 64  # per signature and pass: sizes beyond them take the long way
MOST_TRIES = 64  # per signature and pass: recordings that met a kernel which was not compiled yet
MOST_ROWS = 2**30  # that a ragged descriptor counts
MOST_SEQUENCES = 2**24
LARGEST_HINT = 2**31 - 1
SIZES = "rows_q", "rows_kv", "sequences", "max_q", "max_kv"
CAPACITY = "capacity"  # entries that block lists have room for, where a call has some: one size more
MOST_ENTRIES = 2**31 - 1
_MOST = dict(zip(SIZES, (MOST_ROWS, MOST_ROWS, MOST_SEQUENCES, LARGEST_HINT, LARGEST_HINT))) | {CAPACITY: MOST_ENTRIES}


@dataclass(frozen=True)
class Look:
    """Shape, strides and type of a tensor, from which a recorder makes a stand-in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole: bool  # it begins where its memory does
    aligned: bool  # it begins at whole 16 bytes

    @classmethod
    def at(cls, x: Tensor) -> Look:
        """Return how ``x`` looks."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset() == 0, x.data_ptr() & 15 == 0)


@dataclass
class Pass:
    """The result of one pass of a backend; ``kept``: lists that a later pass uses."""

    backend: str
    results: Sequence
    kept: object = None


class Form:
    """The calls of one signature that one record serves: their sizes change numbers only.

    Attributes:
        measure: a function of the sizes that returns the numbers, or None where the sizes need another form.
        tape: None where the pass cannot be taped, for the reason ``why_not``.
        present: which results the pass returns; a gradient that is not needed may be None.
        backward: of a forward: the forms of its backwards, by the other properties on which they depend.
        left: the lists that a forward kept, as they are after a first backward.
    """

    def __init__(self, measure: Callable, tape=None, seen: Pass | None = None, why_not: str = ""):
        self.measure, self.tape, self.why_not = measure, tape, why_not
        self.backend = seen.backend if seen else ""
        self.present = tuple(x is not None for x in seen.results) if seen else ()
        self.all_present = all(self.present)
        self.backward: dict[tuple, Lesson] = {}
        self.left: object = None
        self.kept_numbers = 0 if tape is None else tape.kept_numbers

    def whole(self, results: list[Tensor]) -> list[Tensor | None]:
        """Return a pass's results, None for those that it leaves out."""
        if self.all_present:
            return results
        given = iter(results)
        return [next(given) if there else None for there in self.present]


class Lesson:
    """The forms of one pass."""

    def __init__(self):
        self.forms: list[Form] = []
        self.tries = 0
        self._last: tuple = (), None, None  # sizes, and what find returned: a model's layers ask the same in turn
        self._misaligned: dict[tuple[bool, ...], Lesson] = {}

    def find(self, sizes: tuple) -> tuple[Form | None, tuple | None]:
        """Return the form of a call with these sizes and its numbers, or (None, None)."""
        known, form, values = self._last
        if known == sizes and form is not None:
            return form, values
        for form in self.forms:
            values = form.measure(*sizes)
            if values is not None:
                self._last = sizes, form, values
                return form, values
        return None, None

    def of(self, inputs: Sequence[Tensor]) -> Lesson:
        """Return the lesson of inputs that are aligned like these: itself, if each begins at whole 16 bytes."""
        misaligned = [x.data_ptr() & 15 != 0 for x in inputs]
        if not any(misaligned):
            return self
        found = self._misaligned.get(tuple(misaligned))
        if found is None:
            found = self._misaligned[tuple(misaligned)] = Lesson()
        return found

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
