"""Options of launches on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

POLICIES = ("eager", "lazy", "random", "timed")


@dataclass
class Options:
    """Options of one launch.

    Attributes:
        policy: which of the possible next events happens.

            * "eager": copies and MMAs complete when issued, tasks run in turn until they wait. The fastest.
            * "lazy": copies and MMAs complete only when no task can run: the latest completion that a kernel must
              tolerate.
            * "random": any order, from `seed`; a task may be interrupted at every TLX operation.
            * "timed": discrete events; `rates` says how long each operation takes.
            * "replay:0.3.1": the schedule of that name, as `jfa emulator explore` prints it; a launch each.
        control: object that chooses every step in place of a policy (machine/control.py), for an exploration or a
            replay.
        races: look for races, missing fences and reads of poison.
        poison: fill fresh shared and tensor memory with NaN, and follow undefined values (see undefined.py).
        report: "raise" ends the launch at the first error, "collect" gathers errors after which it can go on in
            `run.findings`.
        fences: "strict" makes a missing proxy fence an error; "compiler" only warns, for fbtriton's compiler puts a fence before
            every TMA store and MMA that reads what ordinary stores wrote (several of its tutorials rely on it). Write them
            anyway: other compilers may not.
        max_ctas: how many clusters are resident at once (the number of SMs); None: 4, or all of a cooperative launch.
        arch: 100 (Blackwell) or 90 (Hopper), or None: whatever the kernel uses.
        rates: an object with `demand(op, **facts)`, used by "timed".
        contract: compute an fp32 product that goes into a sum or a difference as one fused multiply-add, as a GPU's compiler does:
            the sum sees the exact product and is rounded once. Off by default: numbers are then rounded operation by operation.
        cold: under "timed", a box that no TMA load of this launch has fetched before comes from HBM, not from L2. Off
            by default: the emulated SM stands for one of a chip whose other SMs have already fetched the shared data.
        trace: keep the events that `Timeline` draws.
        fault: called as fault(kind, name, task, location) before each synchronization; may return "drop", "flip" or "late"
            (fault injection).
    """

    policy: str = "eager"
    seed: int = 0
    races: bool = True
    poison: bool = True
    report: str = "raise"
    fences: str = "compiler"
    max_ctas: int | None = None
    arch: int | None = None
    rates: Any = None
    trace: bool = False
    fault: Callable | None = None
    max_steps: int = 20_000_000
    num_sms: int = 4
    cold: bool = False
    contract: bool = False
    control: Any = None

    def __post_init__(self):
        if self.control is None and self.policy.startswith("replay:"):
            from .machine.control import replay

            self.control = replay(self.policy)
        if self.policy == "fifo":
            self.policy = "eager"
        if self.policy not in POLICIES and not self.policy.startswith("replay:"):
            raise ValueError(f"policy must be one of {POLICIES}, not {self.policy!r}")
        if self.report not in ("raise", "collect"):
            raise ValueError(f'report must be "raise" or "collect", not {self.report!r}')
        if self.fences not in ("strict", "compiler"):
            raise ValueError(f'fences must be "strict" or "compiler", not {self.fences!r}')

    def but(self, **changes) -> Options:
        """Return a copy with some options changed."""
        if "policy" in changes:
            changes.setdefault("control", None)
        return replace(self, **changes)
