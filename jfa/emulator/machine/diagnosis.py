"""Describe what went wrong: findings and warnings of one launch, and the reports of deadlocks, races and poison."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .. import errors
from ..locations import show, turn
from . import evidence, warps
from .tasks import AsyncOp, Task

if TYPE_CHECKING:
    from .barriers import MBarrier
    from .machine import Machine
    from .shadow import Access, Shadow
    from .storage import Storage


class Diagnosis:
    """The findings and warnings (errors.EmulatorError) of one launch; each pair of places is reported once."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.options = machine, machine.options
        self.findings: list[errors.EmulatorError] = []
        self.warnings: list[errors.EmulatorError] = []
        self.read_early: dict[
            str, list[str]
        ] = {}  # place where unwritten memory was loaded -> notes on the waits before
        self._reported: set[tuple] = set()

    # ------------------------------------------------------------ what becomes of a finding
    def report(self, error: errors.EmulatorError) -> None:
        """Raise an error after which the machine could go on, or gather it under report="collect"."""
        self.note_early_reads(error)
        if self.options.report == "collect":
            self.findings.append(error)
        else:
            raise error

    def warn(self, finding: errors.EmulatorError) -> None:
        """Keep a warning, and print it unless findings are collected; once for each kind and place."""
        if not self._first(("warning", finding.kind, finding.where[:1])):
            return
        self.warnings.append(finding)
        if self.options.report == "raise":
            errors.warn(finding)

    def _first(self, key: tuple) -> bool:
        new = key not in self._reported
        self._reported.add(key)
        return new

    def note_early_reads(self, error: errors.EmulatorError) -> None:
        """Add to a report of poison which waits before the load passed too early."""
        if isinstance(error, errors.PoisonError):
            facts = "\n".join(error.details)
            for place, notes in self.read_early.items():
                if place in facts and not set(notes) & set(error.details):
                    error.details += notes

    # ------------------------------------------------------------ memory
    def memory_error(self, kind: str, earlier: Access | None, later: Access, shadow: Shadow) -> None:
        """Report what the shadow of a storage found: "race", "fence" (a missing one) or "poison" (no earlier access)."""
        before = (None, None) if earlier is None else (earlier.where[:1], earlier.write)
        if not self._first((kind, id(shadow.storage), before, later.where[:1], later.write)):
            return
        storage = shadow.storage
        space = "shared" if storage.space == "smem" else "tensor"
        place = f"{space} memory {later.name}" + ("" if storage.cta.alone else f" of cta{storage.cta.pid}")
        if earlier is None:
            summary = f"{later.actor.label} reads {place} where nobody has written"
            details = [f"read at {show(later.where)}{turn(later.turns)}", *early_waits(_task_of(later.actor))]
            self.report(errors.PoisonError(summary, details, where=later.where))
        elif kind == "fence":
            if storage.space == "smem":
                self._missing_fence(place, earlier, later)
        else:
            self._race(place, earlier, later, storage)

    def _missing_fence(self, place: str, earlier: Access, later: Access) -> None:
        finding = errors.MissingFenceError(
            f"{later.actor.label} reads {place} through the async proxy, but the stores to it were never fenced",
            [
                f"stored by {earlier.actor.label} at {show(earlier.where)}",
                f"read by {later.actor.label} at {show(later.where)}",
            ],
            where=earlier.where,
        )
        if self.options.fences == "strict":
            self.report(finding)
        else:
            finding.details.append(
                'a warning: fbtriton\'s compiler puts this fence in; fences="strict" makes it an error'
            )
            self.warn(finding)

    def _race(self, place: str, earlier: Access, later: Access, storage: Storage) -> None:
        details = [_describe(a) for a in (earlier, later)]
        late = next((a.actor for a in (earlier, later) if isinstance(a.actor, AsyncOp) and a.actor.landed_late), None)
        error: errors.EmulatorError
        if late is not None and late.barrier is not None:
            error = bytes_error(late.barrier, f"its barrier completed its phase before the {late.label} had arrived")
            error.details[1:1] = [f"so two accesses to {place} are not ordered:", *details]
            self.report(error)
            return
        details += _alias(earlier, later, storage)
        for access in (later, earlier):
            notes = early_waits(_task_of(access.actor), again_only=True)
            if notes:
                details += notes
                break
        error = errors.RaceError(
            f"two accesses to {place} that nothing orders", details, _cause_of_race(earlier, later), later.where
        )
        error.accesses = evidence.touches(earlier, later)
        self.report(error)


# ---------------------------------------------------------------- reports


def deadlock(machine: Machine) -> errors.EmulatorError:
    """Name what is wrong when nothing can go on."""
    tasks = machine.scheduler.tasks
    waiting = [t for t in tasks if t.waiting not in (None, "region")]
    ended = sorted({t.label for c in machine.clusters for cta in c.ctas for t in cta.tasks if t.done})
    error: errors.EmulatorError | None
    for task in waiting:
        bar = task.waiting
        if getattr(bar, "bytes", 0) and not bar.pending:
            error = bytes_error(bar, f"nothing can go on: {task.label} waits at {show(task.where)}")
            error.waits, error.ended = evidence.waits(waiting), tuple(ended)
            return error
    error = _overtaken(waiting)
    if error is None:
        error = errors.DeadlockError("deadlock: every live task waits, and nothing is in flight that could wake one")
    for task in waiting:
        error.details.append(f"{task.label} waits for {task.says_why()}")
        error.details.append(f"    at {show(task.where)}")
        if hasattr(task.waiting, "show_history"):
            error.details.extend("    " + line.strip() for line in task.waiting.show_history()[-2:])
        error.details.extend(early_waits(task, only=task.waiting))
    for task in tasks:
        error.details.extend(line for line in early_waits(task, again_only=True) if line not in error.details)
    if ended:
        error.details.append("already ended: " + ", ".join(ended))
    error.waits, error.ended = evidence.waits(waiting), tuple(ended)
    error.where = waiting[0].where if waiting else ()
    return error


def _overtaken(waiting: list[Task]) -> errors.EmulatorError | None:
    """Return the report of a task that waits two phases late, if one does."""
    for task in waiting:
        bar = task.waiting
        last = getattr(bar, "seen_by", {}).get(task)
        if last is not None and bar.phase == last[0] + 3:
            return errors.PhaseError(
                f"{task.label} waits for mbarrier {bar.label} two phases late: it last saw phase {last[0]}"
            )
    return None


def livelock(tasks: list[Task], steps: int) -> errors.LivelockError:
    """Name where the tasks stand that have not come to an end after so many steps."""
    where = next((at for at in (t.stands() for t in tasks) if at), ())
    places = [f"{t.label} at {show(t.stands())}{turn(t.turns)}" for t in tasks]
    return errors.LivelockError(f"no end after {steps} scheduling steps", places, where=where)


def bytes_error(bar: MBarrier, when: str) -> errors.ExpectBytesError:
    """Say how the bytes announced on a barrier and those delivered differ."""
    if bar.bytes > 0:
        what = f"{bar.bytes} bytes more were announced on mbarrier {bar.label} than the copies delivered"
    else:
        what = f"{-bar.bytes} bytes more were delivered on mbarrier {bar.label} than barrier_expect_bytes announced"
    where = bar.history[-1][1][2] if bar.history else ()
    return errors.ExpectBytesError(what, [f"found when {when}; {bar.state()}", *bar.show_history()], where=where)


def early_waits(task: Task, only: Any = None, again_only: bool = False) -> list[str]:
    """Return notes on a task's waits that passed on an old phase, or before anything had arrived; newest first, at most two.

    only: on this barrier alone. again_only: not the first wait on a fresh barrier, on which producers rightly pass.
    """
    notes: list[str] = []
    for bar, (phase, again, where, turns) in reversed(task.early.items()):
        if (only is None or bar is only) and (again or not again_only):
            what = "before anything had arrived" if phase < 0 else f"on phase {phase}, which it had passed before"
            notes.append(f"note: at {show(where)}{turn(turns)}")
            notes.append(f"    {task.label} waited on {bar.label} (parity {phase & 1}) and passed {what}")
    return notes[:4]


def _describe(access: Access) -> str:
    verb = "write" if access.write else "read "
    return f"{verb} of {access.name} by {access.actor.label} at {show(access.where)}{turn(access.turns)}"


def _cause_of_race(earlier: Access, later: Access) -> str | None:
    """Return the usual cause of a race between warps of one task; None for others, whose cause the error's class knows."""
    first, second = earlier.actor, later.actor
    if isinstance(first, warps.WarpGroup) and isinstance(second, warps.WarpGroup) and first.task is second.task:
        return (
            "the warps of one task run apart: each loads its own share, and may store while others still load.\n"
            "  Fix: tl.debug_barrier() or tlx.named_barrier_wait(...) of all its threads between the load and the store."
        )
    return None


def _alias(earlier: Access, later: Access, storage: Storage) -> list[str]:
    """Return why accesses to buffers of two names meet: which lies in the other, or that they overlap."""
    names = [re.sub(r"[\[.].*", "", a.name) for a in (earlier, later)]
    if names[0] == names[1] or earlier.region is None or later.region is None:
        return []
    cells = "columns" if storage.space == "tmem" else "bytes"
    atoms = [{atom.number: atom.size for atom in a.region.atoms} for a in (earlier, later)]
    inner, outer = sorted((0, 1), key=lambda k: sum(atoms[k].values()))
    how = f"lies in the {cells} of" if set(atoms[inner]) <= set(atoms[outer]) else f"shares {cells} with"
    return [f"note: {(earlier, later)[inner].name} {how} {(earlier, later)[outer].name}: they are one storage"]


def _task_of(actor: Any) -> Task:
    return actor if isinstance(actor, Task) else actor.task
