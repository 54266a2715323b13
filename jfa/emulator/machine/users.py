"""Track users of a CTA's shared memory outside the CTA: copies in flight, and other CTAs of the cluster.

A CTA must not be written to before it has started: its start must be ordered before the write. And it must not end
before its users have finished, because the next CTA gets its shared memory: each such use must be ordered before the
CTA's end by a barrier that the CTA waited on, whatever the schedule. Only the latest use of every user is kept; all
earlier ones are ordered before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import errors
from ..locations import show
from .shadow import VectorClock, join

if TYPE_CHECKING:
    from ..locations import Where
    from .shadow import Component
    from .tasks import CTA, AsyncOp, Cluster, Task


_CAUSE = {
    "copy": "nobody waits for the copy's barrier (or group) before the kernel ends; its shared memory is then another CTA's.\n"
    "  Fix: wait for every copy that was issued, or do not issue the last ones.",
    "CTA": "a CTA whose shared memory or barriers others still use must not end.\n"
    "  Fix: tlx.cluster_barrier() as the last thing every CTA does, or a barrier that the CTA waits on for the last use.",
}


def note(cta: CTA, actor: Any, component: Component, count: int, where: Where, what: str) -> None:
    """Note that `actor` (a Task or an AsyncOp, by its component and counter) uses the memory of `cta`: "a store to b[0]"."""
    if cta.machine.watch:
        cta.users[component.id, what] = (component, count, actor, where)


def note_copy(cta: CTA, op: AsyncOp, what: str) -> None:
    """Note an asynchronous operation that reads or writes the memory of `cta` some time."""
    note(cta, op, op.component, op.clock[op.component.id], op.where, what)


def note_start(task: Task, cta: CTA, where: Where, what: str) -> None:
    """Keep a write of `task` to the memory of `cta`, "a store to b[0]", unless the task knows that the CTA has started."""
    if cta.machine.watch and cta is not task.cta and not task.clock.get(cta.tasks[0].component.id):
        cta.cluster.early.setdefault((task.label, cta), (where, what))


def check_starts(cluster: Cluster) -> None:
    """Report, at a cluster's end, its early writes, unless the compiler's own cluster barrier came before them."""
    if cluster.paired or cluster.signalled:
        return
    for (label, cta), (where, what) in cluster.early.items():
        cta.machine.report(
            errors.UnstartedCtaError(
                f"{what} by {label} may come before {cta.label}, whose memory it uses, has started",
                [f"at {show(where)}", f"nothing that {label} waits for before it comes from {cta.label}"],
                where=where,
            )
        )


def forget_retired(cta: CTA) -> None:
    """Drop uses that every task's clock of the cluster covers."""
    cta.users = {key: use for key, use in cta.users.items() if not use[0].retired}


def check(cluster: Cluster) -> None:
    """Report, at a cluster's end, the uses of each CTA's memory that were not ordered before its end."""
    clocks: dict[CTA, VectorClock] = {}
    for cta in cluster.ctas:
        known = clocks[cta] = {}
        for task in cta.tasks:
            join(known, task.clock)
    together = len(clocks) > 1 and cluster.paired and all(cta.stays for cta in cluster.ctas)
    for cta in cluster.ctas:
        for known in clocks.values() if together else ():
            join(clocks[cta], known)
        for (_, what), (component, count, actor, where) in cta.users.items():
            if not component.retired and count > clocks[cta].get(component.id, 0):
                _report(cta, actor, where, what)


def _report(cta: CTA, actor: Any, where: Where, what: str) -> None:
    task = getattr(actor, "task", actor)
    error: errors.EmulatorError
    if task.cta is cta:
        error = errors.InFlightError(
            f"{cta.label} ends while {what} by {task.label} may still be under way: nobody waited for it",
            [f"issued at {show(where)}"],
            _CAUSE["copy"],
            where,
        )
    else:
        error = errors.EndedCtaError(
            f"{what} by {task.label} may come when {cta.label}, whose memory it uses, has ended",
            [f"at {show(where)}", f"nothing that {cta.label} waits for before its end comes after it"],
            _CAUSE["CTA"],
            where,
        )
    cta.machine.report(error)
