"""A job: the message from the judge to the answer's process. It holds no reference, no solution and no mutant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jfa.course import wire


@dataclass
class Job:
    """One answer to run on its cases.

    Args:
        source: the answer's cell; ``name`` is what it must bind, ``kind`` the exercise's kind.
        helpers: (label, source) of cells to run first; ``below`` are sources of cells that may define what is missing.
        call: source of the function ``call_name`` that calls the answer; "" for a plain call.
        cases: dicts of a case's ``args``, ``kwargs`` and whether it ``raises``.
        parameters: names of the answer's parameters, to name a changed input by.
        forbid, allow: words of :class:`jfa.course.spec.Exercise`.
        closed: files and folders that may not be read, by the word of the violation.
        memory_mb, cpu_seconds: limits of the process.
        needs_triton: whether the process loads Triton and the emulator.
        schedules: (policy, seed) pairs to run each case under again.
        measures: what the exercise's limits count.
        seed: of torch's and Python's generators.
        key: hexadecimal, of the seal on the process's messages; ``scratch`` its temporary folder. The judge's side adds both.
    """

    source: str
    helpers: list[list[str]]
    below: list[str]
    name: str
    kind: str
    call: str
    call_name: str
    cases: list[dict[str, Any]]
    parameters: list[str]
    forbid: list[str]
    allow: list[str]
    closed: dict[str, list[str]]
    memory_mb: int
    cpu_seconds: float
    needs_triton: bool
    schedules: list[list]
    measures: list[str]
    seed: int
    key: str = field(default="", repr=False)
    scratch: str = ""

    def pack(self) -> bytes:
        """Return the job as a message."""
        return wire.pack(vars(self))

    @classmethod
    def unpack(cls, data: bytes) -> Job:
        """Return the job in a message; raises WireError for bytes that are none, TypeError for other fields."""
        return cls(**wire.unpack(data))

    def take_key(self) -> bytes:
        """Return the key and forget it: the answer runs in the process that holds this job."""
        key, self.key = self.key, ""
        return bytes.fromhex(key)
