"""The result of judging an answer, as text for a terminal and as HTML for a notebook. Every color has a word next to
it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from html import escape

PASSED, WRONG, WRONG_METHOD, NOT_STARTED, MISSING = "passed", "wrong", "wrong method", "not started", "missing"

HEADLINES = {
    PASSED: "passed",
    WRONG: "not right yet",
    WRONG_METHOD: "right answer, wrong method",
    NOT_STARTED: "not started",
    MISSING: "exercise missing",
}
_COLORS = {
    PASSED: "#009E73",
    WRONG: "#D55E00",
    WRONG_METHOD: "#E69F00",
    NOT_STARTED: "#56B4E9",
    MISSING: "#999999",
}  # Okabe-Ito
_SIGNS = {True: "ok", False: "FAILS", None: "not reached"}


@dataclass(frozen=True)
class Checked:
    """One named check: ok is True, False, or None where judging did not get that far."""

    name: str
    ok: bool | None = None
    case: str = ""
    message: str = ""


@dataclass
class Result:
    """The result of judging one answer.

    ``state`` is one of the five above; ``checks`` come in the order of judging; ``message`` is the sentence of the first that
    failed; ``recognised`` is the known mistake whose output the answer equals; ``notes`` are remarks that change no verdict.
    """

    exercise: str
    title: str
    state: str
    checks: list[Checked] = field(default_factory=list)
    recognised: str = ""
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    cases: int = 0
    hints: int = 0

    @property
    def passed(self) -> bool:
        return self.state == PASSED

    @property
    def failed(self) -> Checked | None:
        """The first check that failed."""
        return next((c for c in self.checks if c.ok is False), None)

    @property
    def message(self) -> str:
        """One sentence: why it did not pass ("" if it did)."""
        if self.failed:
            return self.failed.message
        return "" if self.passed else HEADLINES[self.state]

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return {**asdict(self), "message": self.message, "caught_by": self.failed.name if self.failed else None}

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return several lines for a terminal."""
        lines = [f"{self.exercise} {self.title}: {HEADLINES[self.state].upper()}  ({self._summary()})"]
        if self.failed:
            lines.append(f"  {self.failed.name}{self._case()}: {_indent(self.failed.message)}")
        if self.recognised:
            lines.append(f"  Known mistake: {self.recognised}")
        lines += [f"  Note: {_indent(note)}" for note in self.notes]
        if self.state in (WRONG, WRONG_METHOD, PASSED):
            lines.append("  " + " · ".join(f"{c.name} {_SIGNS[c.ok]}" for c in self.checks))
        lines += [f"  {line}" for line in self._next_step()]
        return "\n".join(lines)

    def _case(self) -> str:
        return f" [{self.failed.case}]" if self.failed and self.failed.case else ""

    def _summary(self) -> str:
        counted = (
            f"{sum(c.ok is True for c in self.checks)} of {len(self.checks)} checks passed on {self.cases} cases, "
        )
        return f"{counted if self.checks else ''}seed {self.seed}, {self.seconds:.1f} s"

    def _next_step(self) -> list[str]:
        if self.state == NOT_STARTED:
            return ["Replace the line marked YOUR CODE, run the cell, then check again."]
        if self.state in (WRONG, WRONG_METHOD) and self.hints:
            return [f'Stuck? hint("{self.exercise}") has {self.hints} hints.']
        return []

    def _repr_html_(self) -> str:
        color = _COLORS[self.state]
        head = f'<b style="color:{color}">{escape(HEADLINES[self.state])}</b>'
        parts = [
            f'<div role="status" style="border-left:6px solid {color};padding:.4em .9em;margin:.3em 0">',
            f"<div>{escape(self.exercise)} {escape(self.title)}: {head}"
            f' <span style="opacity:.7">({escape(self._summary())})</span></div>',
        ]
        if self.failed:
            body = _html_message(self.failed.message)
            parts.append(f"<div><b>{escape(self.failed.name)}</b>{escape(self._case())}: {body}</div>")
        if self.recognised:
            parts.append(f"<div><b>Known mistake:</b> {escape(self.recognised)}</div>")
        parts += [f'<div style="opacity:.85">Note: {_html_message(note)}</div>' for note in self.notes]
        if self.state in (WRONG, WRONG_METHOD, PASSED):
            parts.append(f'<div style="opacity:.85">{" · ".join(_html_check(c) for c in self.checks)}</div>')
        parts += [f"<div>{escape(line)}</div>" for line in self._next_step()]
        return "".join(parts) + "</div>"


def _html_check(check: Checked) -> str:
    color = {True: _COLORS[PASSED], False: _COLORS[WRONG], None: _COLORS[MISSING]}[check.ok]
    return f'{escape(check.name)} <b style="color:{color}">{_SIGNS[check.ok]}</b>'


def _html_message(message: str) -> str:
    if "\n" not in message:
        return escape(message)
    first, rest = message.split("\n", 1)
    return f'{escape(first)}<pre style="margin:.2em 0">{escape(rest)}</pre>'


def _indent(message: str) -> str:
    return message.replace("\n", "\n    ")


def summary_line(results: list[Result]) -> str:
    """Return "3 of 5 passed (1 wrong, 1 not started)", naming how many were run."""
    counts = {state: sum(r.state == state for r in results) for state in HEADLINES}
    rest = ", ".join(f"{n} {s if s == MISSING else HEADLINES[s]}" for s, n in counts.items() if n and s != PASSED)
    return f"{counts[PASSED]} of {len(results)} passed" + (f" ({rest})" if rest else "")
