"""Evaluate one run of an answer: check by check, the smallest case first, until the first fault."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from jfa.course import clock, compare, given, guard, launch, report
from jfa.course.mutants import Mutants
from jfa.course.precision import reference_for
from jfa.course.report import Checked, Result
from jfa.course.spec import GIVEN_KEPT, Case, Exercise, Limit
from jfa.course.strip import NOT_STARTED

_COMPILE_ERRORS = {"CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct"}
_METHOD_CHECKS = {"allowed operations"}


class _Fault(Exception):  # noqa: N818  not an error: it carries a verdict out of nested checks
    """The first fault found: its check, its case, and the sentence."""

    def __init__(self, check: str, message: str, case: str = "", position: int = -1):
        super().__init__(message)
        self.check, self.message, self.case, self.position = check, message, case, position


class Trial:
    """The evaluation of one answer, check by check."""

    def __init__(
        self, exercise: Exercise, cases: list[Case], outcome: launch.Outcome, result: Result, mutants: Mutants,
        cells: tuple[str, str] = ("", ""),
    ):  # fmt: skip
        self.exercise, self.cases, self.outcome, self.result, self.mutants = exercise, cases, outcome, result, mutants
        self.cells = cells  # the answer's and the skeleton's
        self.events = {
            e["index"]: e for e in outcome.events if "index" in e and (e["index"] >= 0 or e["event"] == "raised")
        }
        self.violations = self._violations()
        self.fresh = len(cases) - 1 if exercise.kind != "value" and len(cases) > 1 else -1
        self.names = list(exercise.check_names)
        self.reached: set[str] = set()
        self.unmeasured: set[str] = set()

    def decide(self) -> None:
        """Fill in the result."""
        result = self.result
        result.cases = len(self.cases)
        self._collect_notes()
        try:
            self._weigh()
            result.state = report.PASSED
            result.checks = [Checked(name, None if name in self.unmeasured else True) for name in self.names]
        except _NotStarted:
            result.state = report.NOT_STARTED
        except _Fault as fault:
            method = fault.check in (*_METHOD_CHECKS, GIVEN_KEPT) or fault.check in {
                limit.name for limit in self.exercise.limits
            }
            result.state = report.WRONG_METHOD if method else report.WRONG
            result.checks = [self._checked(name, fault) for name in self.names]
            self._show_example(fault)
            self._show_prints(fault)
            if self.violations and fault.check != "allowed operations":
                used = ", ".join(guard.describe(w) for w in self.violations)
                result.notes.append(f"It also uses {used}, which this exercise does not allow.")
            if fault.check in ("values", "returns", "new numbers") or fault.check in {
                p.name for p in self.exercise.properties
            }:
                result.recognised = self._recognise(fault)

    def _checked(self, name: str, fault: _Fault) -> Checked:
        if name == fault.check:
            return Checked(name, False, fault.case, fault.message)
        earlier = name in self.names[: self.names.index(fault.check)] or name in self.reached
        return Checked(name, True if earlier else None)

    def _weigh(self) -> None:
        """Make all checks in order, the smallest case first; raise _Fault or _NotStarted."""
        self._loaded()
        raised = [e for e in self.events.values() if e["event"] == "raised"]
        for event in raised[:1]:
            self._raise_not_started(event)
        if self.violations and raised:
            self._operations()
        for i, case in enumerate(self.cases):
            self._weigh_case(i, case)
        if self.outcome.last("end") is None:
            raise _Fault("runs", self._how_it_ended(len(self.events)))
        self._operations()
        if self.exercise.kept and (sentence := given.changed(self.exercise.kept, *self.cells)):
            raise _Fault(GIVEN_KEPT, sentence)
        for limit in self.exercise.limits:
            self._limit(limit)

    def _violations(self) -> list[str]:
        words: list[str] = []
        for event in self.outcome.events:
            found = [event["word"]] if event["event"] == "violation" else event.get("violations")
            words += [w for w in found if isinstance(w, str) and w not in words] if isinstance(found, list) else []
        return words

    # -- did it run

    def _loaded(self) -> None:
        """Check that the cell compiled, ran, and defined the name asked for."""
        failed, missing = self.events.get(-1), self.outcome.last("missing")
        if failed is not None:
            self._raise_not_started(failed)
            if failed.get("violations"):
                self._operations()
            verb = "does not compile" if failed["type"] in ("SyntaxError", "IndentationError") else "cannot be run"
            raise _Fault("runs", f"Your cell {verb}: {_exception_text(failed)}")
        if missing is not None:
            defined = ", ".join(map(str, missing.get("defined", ()))) or "nothing"
            raise _Fault("runs", f"The cell defines no `{self.exercise.name}` (it defines {defined}).")
        other = self.outcome.last("no kernel")
        if other is not None:
            what = f"a {other['type']}" if other["type"] != "function" else "a plain function"
            said = f"`{self.exercise.name}` is {what}, and no kernel: it needs `@triton.jit` above its `def`."
            raise _Fault("runs", said)
        broken = self.outcome.last("broken")
        if broken is not None:
            raise _Fault("runs", f"The answer could not be run here: {broken['message']}")
        if not self.outcome.events:
            raise _Fault("runs", self._how_it_ended(0))

    def _raise_not_started(self, event: dict) -> None:
        if event["type"] == "NotImplementedError" and NOT_STARTED in event["message"]:
            raise _NotStarted

    def _weigh_case(self, i: int, case: Case) -> None:
        event = self.events.get(i)
        if event is None:
            raise _Fault("runs", self._how_it_ended(i), case.name, i)
        if event["event"] == "raised":
            self._raised(event, case, i)
            return
        if case.raises:
            raise _Fault(
                "values", f"This input must be refused with {case.raises}, but a result was returned.", case.name, i
            )
        self.reached |= {"runs", "returns", "inputs kept"}
        fresh = i == self.fresh
        try:
            self._compare(event, case, i)
        except _Fault as fault:
            if fresh:
                start = "The same inputs with other numbers: the answer seems remembered or hard-coded. "
                raise _Fault("new numbers", start + fault.message, case.name, i) from None
            raise

    def _raised(self, event: dict, case: Case, i: int) -> None:
        self._raise_not_started(event)
        if not case.raises:
            text = _exception_text(event)
            check = "new numbers" if i == self.fresh and not event.get("memory") else "runs"
            if event.get("memory"):
                text = f"It ran out of memory (an answer may take {self.exercise.memory_mb} MB)."
            raise _Fault(
                check, text if event.get("memory") or event.get("report") else f"It raised {text}", case.name, i
            )
        fault = _refusal_fault(event, case)
        if fault:
            raise _Fault("values", fault, case.name, i)

    def _how_it_ended(self, i: int) -> str:
        """Return a sentence for a run whose messages stopped before case i."""
        name = f" in the case “{self.cases[i].name}”" if 0 < i < len(self.cases) else ""
        if self.outcome.ended == "time":
            return f"Time limit: it had not finished after {self.exercise.time_limit:g} s of computing{name}. An endless loop?"
        if self.outcome.ended == "garbled":
            return "The answer's process sent something that is no result."
        if self.outcome.ended == "disk":
            return f"It wrote more than {launch.SCRATCH_MB} MB, too many files or too deep folders into its temporary folder{name}."
        status = self.outcome.status
        if status & 0x7F:
            number = status & 0x7F
            known = signal.Signals(number).name if number in signal.valid_signals() else str(number)
            return f"The answer's process crashed{name} (signal {known})."
        return f"The answer ended its own process{name} (exit status {status >> 8}) instead of returning."

    # -- is it right

    def _compare(self, event: dict, case: Case, i: int) -> None:
        exercise, value = self.exercise, event.get("value")
        reference = reference_for(exercise, case) if exercise.reference else None
        fault = self._fault_of(case, event, reference) if exercise.reference else None
        if fault and fault[0] == "returns":
            raise _Fault("returns", fault[1], case.name, i)
        changed = event.get("changed")
        if isinstance(changed, list) and changed:
            names = ", ".join(f"`{c}`" for c in map(str, changed))
            raise _Fault(
                "inputs kept", f"It changed its input {names}: the caller still needs it. Work on a copy.", case.name, i
            )
        if fault:
            raise _Fault(fault[0], fault[1], case.name, i)
        if exercise.reference is None and value is None and exercise.properties:
            raise _Fault("returns", "It returned None: the last line must be `return ...`.", case.name, i)
        self.reached |= {"values"}
        self._same_bits(event, case, i)
        for prop in exercise.properties:
            sentence = _test_property(prop.test, case, value)
            if sentence:
                raise _Fault(prop.name, sentence, case.name, i)
            self.reached.add(prop.name)

    def _same_bits(self, event: dict, case: Case, i: int) -> None:
        """Check for the same numbers under every schedule, to the last bit."""
        exercise, again = self.exercise, event.get("again", [])
        if len(again) != len(exercise.schedules):
            raise _Fault("same bits", "It did not run under every schedule.", case.name, i)
        sentence = compare.bits_fault(exercise, case, event.get("value"), again)
        if sentence:
            raise _Fault("same bits", sentence, case.name, i)
        self.reached.add("same bits")

    def _fault_of(self, case: Case, event: dict, reference: Any) -> tuple[str, str] | None:
        try:
            return compare.fault_of(self.exercise, case, event, reference)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # the value came from somebody's process
            what = compare.kind_of(event.get("value"))
            return "returns", f"It returned {what}, which cannot be compared ({type(error).__name__})."

    # -- is it done as asked

    def _operations(self) -> None:
        if self.violations:
            used = ", ".join(guard.describe(w) for w in self.violations)
            rule = "which this exercise does not allow: build it from simpler operations."
            raise _Fault("allowed operations", f"It uses {used}, {rule}")

    def _limit(self, limit: Limit) -> None:
        for i, case in enumerate(self.cases):
            counts = self.events[i].get("counts")
            if case.raises or not isinstance(counts, dict):
                continue
            measure = limit.measure(case) if callable(limit.measure) else limit.measure
            count = counts.get(measure, 0 if ":" in measure else None)
            if measure == clock.MEASURE and type(count) is not int:
                text = f"Its cycles could not be modelled: {self.events[i]['modelled']}."
                raise _Fault(limit.name, text, case.name, i)
            if type(count) is not int:
                self.result.notes.append(f"“{limit.name}” could not be measured here.")
                self.unmeasured.add(limit.name)
                return
            most, least = _bound(limit.at_most, case), _bound(limit.at_least, case)
            found = _measured(measure, count) + (f" ({self.events[i]['modelled']})" if measure == clock.MEASURE else "")
            if most is not None and count > most:
                shown = f"{most:,}" if measure == clock.MEASURE else most
                raise _Fault(limit.name, f"{found}; the limit is {shown} ({limit.text}).", case.name, i)
            if least is not None and count < least:
                raise _Fault(limit.name, f"{found}; at least {least} asked for ({limit.text}).", case.name, i)

    def _recognise(self, fault: _Fault) -> str:
        event = self.events.get(fault.position)
        if event is None or event["event"] != "case" or not self.exercise.reference:
            return ""
        returned = {
            i: (case, self.events[i].get("value"))
            for i, case in enumerate(self.cases)
            if not case.raises and self.events.get(i, {}).get("event") == "case"
        }
        return self.mutants.recognise(self.exercise, returned, fault.position)

    def _show_example(self, fault: _Fault) -> None:
        """Add a small case that went wrong, in full."""
        event = self.events.get(fault.position)
        if (
            fault.check in ("values", "new numbers")
            and event is not None
            and event["event"] == "case"
            and self.exercise.reference
        ):
            case = self.cases[fault.position]
            if not case.raises:
                text = compare.example(self.exercise, case, event.get("value"), reference_for(self.exercise, case))
                self.result.notes = [*([text] if text else []), *self.result.notes]

    def _show_prints(self, fault: _Fault) -> None:
        """Add what the answer printed in the case that failed: how many people look for a mistake."""
        text = self.events.get(fault.position, {}).get("printed", "")
        text = text.strip() if isinstance(text, str) else ""
        if text and "printing is not returning" not in fault.message:
            self.result.notes.append(f"It printed: {text if len(text) <= 500 else text[:500] + ' …'}")

    def _collect_notes(self) -> None:
        for event in self.outcome.events:
            for note in [*event.get("notes", ()), *event.get("emulator", ())]:
                if isinstance(note, str) and note not in self.result.notes and len(self.result.notes) < 5:
                    self.result.notes.append(note)


def _refusal_fault(event: dict, case: Case) -> str | None:
    """Return what is wrong with the exception an answer raised where it had to raise one."""
    if case.raises not in event["bases"]:
        return f"This input must be refused with {case.raises}; it raised {_exception_text(event)}"
    words = [w for w in case.wanted_words if w]
    if words and not any(w in event["message"] for w in words):
        wanted = " or ".join(f"`{w}`" for w in words)
        return f"The message of the {case.raises} must name {wanted}, so that its reader knows where to look."
    return None


class _NotStarted(Exception):  # noqa: N818  a verdict, not an error
    """Raised when the answer is still the stub."""


def _test_property(test: Callable, case: Case, value: Any) -> str | None:
    """Return a property's sentence; a property that stumbles over a strange value says so instead of failing the judge."""
    try:
        return test(case, value)
    except Exception as error:  # noqa: BLE001  the value may be anything
        return (
            f"The returned value ({compare.kind_of(value)}) does not have the required form ({type(error).__name__})."
        )


def _bound(limit: Any, case: Case) -> int | None:
    return limit(case) if callable(limit) else limit


def _measured(measure: str, count: int) -> str:
    """Return a count in words: "40 loads"."""
    family, _, name = measure.partition(":")
    if name:
        if family == "exp_axis":
            return f"{count} exponentials have an axis of {name}"
        return f"tlx.{name} ran {count} times" if family == "tlx" else f"torch's {name} ran {count} times"
    words = {
        "peak_numel": "its largest tensor has {} elements",
        "peak_tile": "its largest block has {} elements",
        "live_numel": "its tensors, arrays and lists hold {} elements at the same time",
        "ops": "{} torch operations ran",
        "exp_above_one": "{} exponentials are larger than 1",
        "python_floats": "{} numbers left torch as Python floats",
        "tasks": "{} async tasks ran side by side",
        "mmas": "{} async_dot ran",
        "accumulated": "{} async_dot added to what their accumulator held",
        "tmem_loads": "it loads from tensor memory {} times",
        "tmem_stores": "it stores to tensor memory {} times",
        "tmem_columns": "it takes {} columns of tensor memory",
        "shared_bytes": "it takes {} bytes of shared memory",
        "loaded_places": "TMA loads fill {} places in shared memory",
        "stored_places": "TMA stores read {} places in shared memory",
        "load_elements": "it loads {} elements",
        "store_elements": "it stores {} elements",
        "dots": "{} matrix products ran",
        "selects": "tl.where made {} lanes",
        "compares": "comparisons made {} lanes",
        "exponentials": "{} exponentials ran",
        "atomic_elements": "atomic operations touch {} elements",
        "cycles": "it takes {:,} modelled cycles on a B200",
    }
    said = words.get(measure, "{} " + measure).format(count)
    return said.replace(" places ", " place ") if count == 1 else said


def _exception_text(event: dict) -> str:
    """Return an exception as a learner should read it: what, and at which of their lines."""
    if event.get("report"):
        start = "It will not compile on a GPU. " if event["type"] in _COMPILE_ERRORS else ""
        return f"{start}{event['type']}: {event['message']}"
    where = f" at line {event['line']} of your answer: `{event['text']}`" if event.get("line") else ""
    return f"{event['type']}: {event['message']}{where}" if event["message"] else f"{event['type']}{where}"
