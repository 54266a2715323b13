"""Explore all schedules of a small launch by running each class of equivalent schedules once::

    from jfa.emulator import explore
    found = explore.explore(lambda: [my_matmul(a, b)])
    print(found)                      # how many classes, whether all, the first bad one
    with emulator.options(policy=found.first.schedule):
        my_matmul(a, b)               # that one again

Two schedules are equivalent if they differ only in the order of steps that commute (machine/control.py says which steps
there are and which commute). This is dynamic partial-order reduction. Each execution runs the launch again: it replays a
prefix of choices and continues with arbitrary ones. Afterwards, wherever two dependent steps could have happened in the
other order, the state before the first becomes a branching point. Source sets say which other step to begin with there,
sleep sets which need not be tried again. A wait that never ran counts as a step as well, so schedules in which it runs
are tried too.

The instance is bounded, not the number of preemptions: "exhausted" holds for these shapes and this grid only. Only
atomics order accesses to global memory. A polling loop is cut off once no other task can run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from . import errors
from .machine.control import ADD, TOUCH, WAIT, Control, Redundant, Step, Use, dependent, state_of

OK = "ok"


@dataclass
class Outcome:
    """Outcome of a class of schedules: "ok", an error's class name, "wrong result" or "warning"; and its replay."""

    kind: str
    schedule: str
    report: str = ""


@dataclass
class Exploration:
    """Result of an exploration. `executions` were started; `classes` of them ran to the end, one per class."""

    executions: int = 0
    classes: int = 0
    exhausted: bool = False
    seconds: float = 0.0
    steps: int = 0  # of the longest schedule
    outcomes: Counter = field(default_factory=Counter)
    first: Outcome | None = None  # the first that is not "ok"

    def note(self, outcome: Outcome) -> None:
        """Count the end of an execution."""
        self.classes += 1
        self.outcomes[outcome.kind] += 1
        if outcome.kind != OK and self.first is None:
            self.first = outcome

    @property
    def clean(self) -> bool:
        return self.first is None

    @property
    def proved(self) -> bool:
        """Whether every schedule of this instance ends well."""
        return self.exhausted and self.first is None

    def __str__(self):
        how = "all of them" if self.exhausted else "not all of them"
        lines = [
            f"{self.classes} class{'es' * (self.classes != 1)} of schedules ({how}) in {self.executions} executions "
            f"of up to {self.steps} steps, "
            f"{self.seconds:.1f} s: " + ", ".join(f"{n} {kind}" for kind, n in sorted(self.outcomes.items()))
        ]
        if self.first is not None:
            lines += [
                f"first bad schedule: policy={self.first.schedule!r}",
                f"{self.first.kind}: {self.first.report}".rstrip(": "),
            ]
        return "\n".join(lines)


@dataclass
class Node:
    """A state on the current path: which processes can run, which was chosen, were tried or are still to try."""

    enabled: set[int]
    chosen: int
    backtrack: set[int]
    sleep: set[int]
    done: set[int] = field(default_factory=set)


class Explorer(Control):
    """One execution: replays the path of nodes, extends it, and adds places to choose differently."""

    def __init__(self, path: list[Node], changed: int, reduce: bool = True):
        super().__init__(node.chosen for node in path)
        self.path, self.changed, self.reduce = path, changed, reduce
        self.sleep: dict[
            int, list[Use]
        ] = {}  # processes whose next step was explored from here already, in another order

    # ------------------------------------------------------------ going forward
    def _choose(self, machine, actors):
        depth = len(self.steps)
        if self.steps:
            moot = (
                machine.pending_clusters
            )  # which cluster starts next depends on which ends first, and no use records that
            self.sleep = {p: uses for p, uses in self.sleep.items() if not (moot or _in_the_way(uses, self.steps[-1]))}
        if depth == len(self.path):
            awake = [number for number in sorted(actors) if number not in self.sleep]
            if not awake:
                raise Redundant
            first = {awake[0]} if self.reduce else set(actors)
            self.path.append(Node(set(actors), awake[0], first, set(self.sleep)))
            return awake[0]
        node = self.path[depth]
        tried = (node.sleep | node.done) - {node.chosen} if self.reduce else ()
        self.sleep = {number: self._uses(actor) for number, actor in actors.items() if number in tried}
        return super()._choose(machine, actors)

    # ------------------------------------------------------------ looking back
    def taken(self, step: Step) -> None:
        if len(self.steps) >= self.changed - 1:
            self._reversals(step.process, step.uses, step.past)

    def finish(self, well: bool) -> None:
        """Note, the execution having ended, that steps that were waiting to be taken might have come earlier as well.

        One that ended badly may have been cut short by its last step, so whatever else could have gone on there is tried: what
        others would have done later is not known, and may have had an outcome of its own.
        """
        if not well and self.path:
            self.path[-1].backtrack |= self.path[-1].enabled
        for actor in (*self.parked, *self.flying):
            number, uses = self.numbers[actor], self._uses(actor)
            for use in uses:
                use.look()
            self._reversals(number, uses, self._before(number))

    def _reversals(self, process: int, uses: list[Use], base: int) -> None:
        """Find the steps that the coming one could have preceded, and see to it that it is tried."""
        covered = base
        for index in range(len(self.steps) - 1, -1, -1):
            if covered >> index & 1:
                continue
            earlier = self.steps[index]
            if any(dependent(a, b) and _possible_before(a, b) for a in earlier.uses for b in uses):
                covered |= earlier.past | 1 << index
                self._try_before(index, process, uses, base)

    def _try_before(self, index: int, process: int, uses: list[Use], base: int) -> None:
        """Make sure that at the state before step `index` something is tried that leads to `process` going first."""
        others, mask, firsts = (
            [],
            0,
            set(),
        )  # the steps after it that do not follow from it, and those that can begin them
        for k in range(index + 1, len(self.steps)):
            step = self.steps[k]
            if not step.past >> index & 1:
                if not step.past & mask:
                    firsts.add(step.process)
                others.append(step)
                mask |= 1 << k
        if not base & mask and not any(dependent(a, b) for step in others for a in step.uses for b in uses):
            firsts.add(process)
        node = self.path[index]
        firsts &= node.enabled
        if not firsts & node.backtrack:
            node.backtrack |= {process if process in firsts else min(firsts)} if firsts else node.enabled


def _possible_before(earlier: Use, later: Use) -> bool:
    """Return whether the later use could be taken in the state before the earlier one: a wait passes only on its parity."""
    return not (later.kind == WAIT and earlier.kind == ADD) or earlier.phase & 1 != later.parity


def _in_the_way(sleeping: list[Use], taken: Step) -> bool:
    """Return whether a step that was not taken yet depends on one that was."""
    for use in taken.uses:
        for other in sleeping:
            same = use.object is other.object or (use.kind == TOUCH and use.object == other.object)
            if not same or use.kind == other.kind == WAIT:
                continue
            if use.kind == other.kind == ADD and state_of(use.object)[0] == use.phase and not use.stuck:
                if not Use(ADD, other.object, other.arrivals, other.bytes, state=use.state).completes():
                    continue
            return True
    return False


# ---------------------------------------------------------------- the search


def explore(
    launch: Callable,
    executions: int = 20_000,
    seconds: float | None = None,
    stop: bool = True,
    expected=None,
    known=None,
    tolerance: float = 2e-2,
    **options,
) -> Exploration:
    """Run `launch()` once for each class of its schedules.

    launch: launches kernels and returns their output tensors (or nothing); must do the same each time.
    executions, seconds: bounds; an exploration that meets one is not exhausted.
    stop: end at the first schedule that is not "ok".
    expected: what the outputs should be, within `tolerance`; None: those of the first schedule that runs to its end.
    known: keys of warnings that count as ok, as `sweep` makes them; None: all do. options: the emulator's, such as `fault`.
    """
    from . import sweep

    wanted = expected

    def execute(control):
        nonlocal wanted
        try:
            outputs, warned = sweep._run(launch, policy="eager", control=control, **options)
        except errors.EmulatorError as error:
            return Outcome(type(error).__name__, control.token, str(error))
        outputs = [t for t in outputs if t is not None]
        if wanted is None:
            wanted = [t.clone() for t in outputs]
        if not sweep._same(outputs, wanted, tolerance):
            return Outcome("wrong result", control.token)
        fresh = [w for key, w in warned.items() if known is not None and key not in known]
        return Outcome("warning", control.token, str(fresh[0])) if fresh else Outcome(OK, control.token)

    return search(execute, executions, seconds, stop)


def search(
    execute: Callable[[Control], Outcome], executions=20_000, seconds=None, stop=True, reduce=True
) -> Exploration:
    """Call `execute(control)` once for each class of schedules; reduce=False: once for each interleaving of steps."""
    found, path, changed, begun = Exploration(), [], 1, time.monotonic()
    while True:
        explorer = Explorer(path, changed, reduce)
        found.executions += 1
        try:
            outcome = execute(explorer)
            explorer.finish(outcome.kind == OK)
            found.note(outcome)
        except Redundant:
            pass
        found.steps = max(found.steps, len(explorer.steps))
        found.seconds = time.monotonic() - begun
        if stop and found.first is not None:
            return found
        changed = _next(path)
        found.exhausted = not changed
        if found.exhausted or found.executions >= executions or (seconds is not None and found.seconds > seconds):
            return found


def _next(path: list[Node]) -> int:
    """Turn to the deepest state with something left to try; returns the length of the path to replay, 0 if all is done."""
    while path:
        node = path[-1]
        node.done.add(node.chosen)
        left = node.backtrack - node.done - node.sleep
        if left:
            node.chosen = min(left)
            return len(path)
        path.pop()
    return 0


def mutant(mutant, launch: Callable, expected=None, known=None, **bounds) -> Exploration:
    """Explore a launch with one synchronization broken, as a `sweep.Mutant` says: a bad schedule, or the proof of a bound.

    expected, known: outputs and warnings of the whole launch; None: those of a run of it. bounds: `explore`'s and the emulator's.
    """
    from . import sweep

    if expected is None:
        outputs, warned = sweep._run(launch)
        expected, known = [t.clone() for t in outputs], set(warned)

    def fault(kind, name, task, where):
        return mutant.how if mutant.site.hit(kind, where) else None

    return explore(launch, expected=expected, known=known, fault=fault, **bounds)
