"""The description of an exercise: the classes with which ``checks/NN_topic.py`` tells the judge about it.

A chapter's check module holds one list, ``EXERCISES``. Everything in it is plain data and small functions; nothing here
runs an answer. The judge makes the cases, has a child process run the answer on them, and then compares.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALWAYS_FORBIDDEN = ("sdpa", "flex", "jfa.attention", "jfa.reference", "jfa.kernels", "jfa.course", "solutions")
"""What no exercise may call unless its ``allow`` names it: calling the product is not an answer."""

FORBIDDABLE = ("softmax", "sdpa", "flex", "numpy", "nested", "host reads", "jfa.", "solutions")
"""Words that ``forbid`` understands: operations by family, numpy, numbers of tensors read on the host
(:mod:`jfa.course.host_reads`), or any module of the package by its dotted name."""

BUILTIN_CHECKS = ("runs", "returns", "inputs kept", "values", "new numbers", "allowed operations")
"""The names of the checks every exercise has; an exercise's own properties and limits come on top."""


@dataclass(frozen=True)
class Case:
    """One set of inputs for the answer.

    Args:
        name: what is special about it, in the learner's words: "one sequence, three tokens", "an empty sequence in the middle".
        args: positional arguments: CPU tensors, numpy arrays, numbers, strings, None, lists/tuples/dicts of those.
        kwargs: keyword arguments, of the same kinds.
        offsets: row borders of packed results, so that a wrong row is named as "sequence 1, row 4" (axis "token").
        labels: what is special about each sequence of a packed result, or each row: named beside its number.
        raises: the answer must raise this (the exception's name, such as "ValueError") instead of returning.
        mentions: words of which the raised message must contain at least one ("" asks for nothing).
        extra: anything the exercise's own properties want to know; never sent to the child.
    """

    name: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    offsets: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    raises: str | None = None
    mentions: str | tuple[str, ...] = ""
    extra: Any = None

    @property
    def wanted_words(self) -> tuple[str, ...]:
        """``mentions`` as a tuple."""
        return (self.mentions,) if isinstance(self.mentions, str) else tuple(self.mentions)


@dataclass(frozen=True)
class Output:
    """One returned value: its name in messages and what form it must have.

    Args:
        name: "out", "lse", ...
        axes: a name for each axis: "token" (packed rows, split by ``Case.offsets``), "head", "dim", "row", "column", ...
        dtype: None accepts any dtype of the reference's kind (float, integer, bool); "float32" and the like demand one, and "int"
            of a number that it is a whole one.
        may_alias: whether sharing memory with an input is fine (slices of a packed tensor, say).
        tol: tolerance relative to ``max(1, max |reference|)``; None takes the exercise's.
    """

    name: str = "result"
    axes: tuple[str, ...] = ()
    dtype: str | None = None
    may_alias: bool = False
    tol: float | None = None


@dataclass(frozen=True)
class Property:
    """A named demand on the result that is not "equals the reference": shown in the report under its name.

    ``test(case, result)`` gets what the answer returned (tensors, numbers, tuples as returned) and gives None if all is well, else
    one sentence for the learner that says what is wrong without giving the expected values away.
    """

    name: str
    test: Callable[[Case, Any], str | None]


@dataclass(frozen=True)
class Limit:
    """A demand on the method, measured while the answer runs; breaking it is "right answer, wrong method".

    Args:
        name: the check's name in the report, such as "blockwise".
        measure: what is counted: a name, or a function of the case that gives one. Of torch (see jfa.course.measure.Meter):
            "ops": operations as the learner writes them, NumPy's too; "op:NAME": torch operations aten.NAME (op:mm, op:bmm);
            "peak_numel": elements of the largest new tensor; "live_numel": of all new tensors, arrays and lists alive together;
            "exponentials": exp by any name; "exp_axis:N": those with an axis of length N; "exp_above_one": results above 1;
            "python_floats": floats that left torch. Of kernels (see jfa.emulator.Counts):
            "loads", "stores": how often the kernel loads or stores (all programs together); "load_elements": elements loaded;
            "dots": matrix products; "atomics", "atomic_elements": atomic operations, and their lanes;
            "selects", "compares", "exponentials": lanes of blocks that tl.where, a comparison, or tl.exp and tl.exp2 made;
            "peak_tile": elements of the largest block of the kernel; "store_elements": elements stored, so that everybody does
            a share; "tlx:NAME": TLX operations (tlx:async_descriptor_load, tlx:barrier_wait); "tasks", "mmas", "accumulated",
            "tmem_loads", "tmem_stores", "tmem_columns", "shared_bytes"; "loaded_places", "stored_places": buffers that TMA loads
            fill or TMA stores read, so that a ring uses all it has.
            "cycles": modelled cycles of all launches, one after another, on an emulated B200 (see jfa.course.clock; not as a
            function of the case): each case runs once more under the policy "timed", which the time limit must allow for.
        at_most: the limit, or a function of the case (None: no limit for this one).
        text: the limit in words, as the exercise's text prints it (a test looks for it there):
            "no tensor larger than 16 x 16 scores".
        at_least: a lower bound instead or besides ("at least 4 matrix products").
    """

    name: str
    measure: str | Callable[[Case], str]
    at_most: int | Callable[[Case], int | None] | None = None
    text: str = ""
    at_least: int | Callable[[Case], int] | None = None


@dataclass(frozen=True)
class Kept:
    """Functions that the exercise gives and the answer must leave as they are; breaking it is "right answer, wrong method".

    Args:
        names: the functions, as the cell defines them.
        text: the rule in words, as the exercise's text prints it: "the body stays as it is".
        free: statements that call one of these are the learner's: ("local_alloc", "reuse_group").
    """

    names: tuple[str, ...]
    text: str
    free: tuple[str, ...] = ()


GIVEN_KEPT = "given code kept"
"""The name of the check that Exercise.kept brings."""


@dataclass(frozen=True)
class Mutant:
    """A likely wrong answer, kept so that the judge can recognise it and a test can see that it is caught.

    Args:
        name: the mistake in a few words: "forgets to rescale".
        says: the sentence a learner reads whose answer equals this mutant's: the mistake, not the repair.
        caught_by: the name of the check that must fail: a built-in one, or a property's or a limit's name.
        edit: (old, new) or several such pairs: what to change in the solution's cell; each old text occurs exactly once.
        source: or the whole cell instead of an edit.
        expect: words the report must contain; by default ``says`` when ``caught_by`` is "values".
        recognise: whether the judge may run it on a wrong answer's case to compare (not for mutants that hang or crash).
    """

    name: str
    says: str
    caught_by: str = "values"
    edit: tuple = ()
    source: str = ""
    expect: str = ""
    recognise: bool = True

    def apply(self, solution: str) -> str:
        """Return the mutant's whole cell, from the solution's cell (markers already removed)."""
        if self.source:
            return self.source
        return edited(solution, self.edit, f"mutant {self.name!r}")


def edited(source: str, edit: tuple, what: str) -> str:
    """Return ``source`` with (old, new) or several such pairs replaced; each old text must occur exactly once, else ValueError."""
    pairs = (edit,) if edit and isinstance(edit[0], str) else edit
    for old, new in pairs:
        if source.count(old) != 1:
            raise ValueError(f"{what}: {old!r} occurs {source.count(old)} times in the solution, not once")
        source = source.replace(old, new)
    return source


_INSTANCES: list[weakref.ref] = []


def instances() -> list[Exercise]:
    """Return all exercises alive in this process: a notebook's fork empties them before it runs an answer."""
    return [exercise for ref in _INSTANCES if (exercise := ref()) is not None]


@dataclass(frozen=True)
class Exercise:
    """One exercise: what is asked, on what data, how the answer is judged.

    Args:
        id: "N.M": chapter and number; the cells are tagged ``ex-N.M``.
        title: a few words.
        name: the name the answer binds: a function, a ``@triton.jit`` kernel, or a value (see ``kind``).
        cases: ``cases(seed) -> list[Case]``, smallest first, random but seeded, never constant. Called again with another seed
            for the check "new numbers", so shapes must not depend on the seed.
        reference: ``reference(*args, **kwargs)`` gives the right result in the structure the answer must have. Floating
            tensors arrive in float64. None where only properties judge.
        outputs: one Output for each returned value (a single one for a lone result).
        difficulty: 1, 2 or 3; minutes: what it takes.
        hints: two or three, graded; the last one is near the answer.
        kind: "function", "kernel" (made by triton.jit, runs on the emulator) or "value" (the name holds a result; cases are
            empty arguments).
        call: ``call(answer, *args, **kwargs)``: how the child uses the answer; default ``answer(*args, **kwargs)``. A kernel needs
            it: allocate outputs, launch, return them. Its *source* is sent to the child: it must import what it uses.
        properties, limits: see there; they are judged in this order after "values".
        kept: given functions that must stay as they are.
        forbid: more than ALWAYS_FORBIDDEN: "softmax", "numpy", "nested", or a module such as "jfa.layout".
        allow: exceptions: a word of the list ("sdpa"), a module ("jfa.kernels.common") or a function ("jfa.reference.merge").
        mutants: at least four.
        variants: at least two differently written right answers, each the source of the whole cell or, where the cell is long, a
            tuple of (old, new) pairs: what to change in the solution's cell.
        tol: tolerance relative to ``max(1, max |reference|)``: what is always allowed.
        arithmetic: ``arithmetic(*args, **kwargs)`` gives the result as a right answer's arithmetic does (P rounded to bf16, say)
            and gets tensors of the cases' dtypes. None asks the reference itself, in fp32 and from inputs one rounding away.
        slack: what differs by more than ``tol`` may still err by this many times the error of that arithmetic: see
            :mod:`jfa.course.precision`. Keep it small: a result 1 % off must fail.
        time_limit: seconds of CPU for all cases together, and seconds it may sleep.
        memory_mb: how much memory the answer may take beyond what the process has.
        schedules: (policy, seed) pairs of the emulator. The kernel runs again under each, its programs and atomics in another
            order, and must return the same bits as at first (check "same bits").
        hunt: the skeleton is a faulty program: checked as given it is "not started", and the report says what it runs into.
        where: "cpu" or "emulator"; "" means by kind. An "emulator" function (a host function that launches kernels) gets Triton.
    """

    id: str
    title: str
    name: str
    cases: Callable[[int], list[Case]]
    reference: Callable[..., Any] | None = None
    outputs: tuple[Output, ...] = (Output(),)
    difficulty: int = 1
    minutes: int = 10
    hints: tuple[str, ...] = ()
    kind: str = "function"
    call: Callable[..., Any] | None = None
    properties: tuple[Property, ...] = ()
    limits: tuple[Limit, ...] = ()
    kept: Kept | None = None
    forbid: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    mutants: tuple[Mutant, ...] = ()
    variants: tuple[str | tuple, ...] = ()
    tol: float = 1e-5
    arithmetic: Callable[..., Any] | None = None
    slack: float = 8.0
    time_limit: float = 5.0
    memory_mb: int = 1024
    where: str = ""
    schedules: tuple[tuple[str, int], ...] = ()
    hunt: bool = False

    def __post_init__(self):
        if not re.fullmatch(r"\d+\.\d+", self.id):
            raise ValueError(f"exercise id must be 'N.M', got {self.id!r}")
        if self.kind not in ("function", "kernel", "value"):
            raise ValueError(f"exercise {self.id}: kind must be function, kernel or value, got {self.kind!r}")
        if self.kind == "kernel" and self.call is None:
            raise ValueError(f"exercise {self.id}: a kernel needs call(kernel, ...): how to launch it")
        _INSTANCES.append(weakref.ref(self))
        if self.schedules and not self.needs_triton:
            raise ValueError(f"exercise {self.id}: only kernels run under schedules")
        for word in self.forbid:
            if not word.startswith(FORBIDDABLE):
                raise ValueError(f"exercise {self.id}: forbid does not know {word!r}")

    def variant(self, index: int, solution: str) -> str:
        """Return the whole cell of a differently written right answer, from the solution's cell (markers already removed)."""
        chosen = self.variants[index]
        return chosen if isinstance(chosen, str) else edited(solution, chosen, f"variant {index} of {self.id}")

    @property
    def chapter(self) -> int:
        """The chapter's number."""
        return int(self.id.split(".")[0])

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: (chapter, number)."""
        chapter, number = self.id.split(".")
        return int(chapter), int(number)

    @property
    def tag(self) -> str:
        """The tag of the answer's cell."""
        return f"ex-{self.id}"

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Everything forbidden here, after ``allow``."""
        return tuple(w for w in dict.fromkeys(ALWAYS_FORBIDDEN + self.forbid) if w not in self.allow)

    @property
    def needs_triton(self) -> bool:
        """Whether the child needs Triton and the emulator."""
        return self.kind == "kernel" or self.where == "emulator"

    @property
    def check_names(self) -> tuple[str, ...]:
        """All checks of this exercise in the order of judging."""
        own = tuple(p.name for p in self.properties)
        limits = tuple(limit.name for limit in self.limits)
        head = ("runs", "returns", "inputs kept") + (("values",) if self.reference else ())
        head += ("same bits",) if self.schedules else ()
        return head + own + ("new numbers", "allowed operations") + ((GIVEN_KEPT,) if self.kept else ()) + limits
