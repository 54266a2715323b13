"""Control one schedule step by step: which processes can run, what each would touch, and a list of choices to replay.

Under this control a *step* is one operation on a barrier (a wait, an arrival, an expect, a copy or MMA that signals, a
named barrier), or on global memory with an atomic, and everything its task does until the next one. No other order
needs exploring: the race detector finds two unordered accesses to a buffer in whichever order they happen, and nothing
can undo the condition of a wait for an operation or for the end of a region, so its moment does not matter. A wait is a
step of its own, so a task may miss a phase, as on the hardware, where a wait polls.

Processes are numbered in the order of their first appearance: a task is one, an asynchronous operation that signals is one. With
the same choices before, the numbers are the same in every run: a schedule is the list of numbers chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from .tasks import AsyncOp, Task

if TYPE_CHECKING:
    from ..locations import Where
    from .machine import Machine


WAIT, ADD, TOUCH = "wait", "add", "touch"
_SPINS = 3  # pauses in a row of a task that polls, without a step of another process between, before it must let others go on


class Redundant(BaseException):
    """Raised to end an execution that would only repeat an explored one."""


@dataclass
class Use:
    """Effect of a step on one object: (WAIT, barrier, parity), (ADD, barrier, arrivals, bytes) or (TOUCH, key)."""

    kind: str
    object: Any
    arrivals: int = 0
    bytes: int = 0
    parity: int = 0
    phase: int = 0  # of the object before the step; it and the next are filled in when the step is taken
    state: tuple[int, int] = (0, 0)  # arrivals and bytes outstanding before the step

    def look(self) -> None:
        """Note the object's state."""
        if self.kind != TOUCH:
            self.phase, self.state = state_of(self.object)

    @property
    def stuck(self) -> bool:
        """Whether an ADD is one arrival too many, or leaves all arrivals and too many bytes: then the order matters."""
        left = self.state[0] - self.arrivals
        return self.kind == ADD and (left < 0 or (left == 0 and self.state[1] + self.bytes < 0))

    def completes(self) -> bool:
        """Return whether an ADD, taken in the noted state, ends the phase (or arrives once too often)."""
        left = self.state[0] - self.arrivals
        return left < 0 or (left == 0 and self.state[1] + self.bytes == 0)


def state_of(barrier: Any) -> tuple[int, tuple[int, int]]:
    """Return (phase, (arrivals outstanding, bytes outstanding)) of an mbarrier or a named barrier."""
    if hasattr(barrier, "generation"):
        return barrier.generation, ((barrier.expected or 1 << 20) - barrier.arrived, 0)
    return barrier.phase, (barrier.pending, barrier.bytes)


@dataclass
class Step:
    """A step taken: its process, its effects, and the steps (bits) that precede it in every equivalent schedule."""

    process: int
    uses: list[Use]
    past: int = 0


class End:
    """The end of a cluster, as an object that operations contribute to and its CTAs wait for, in either order."""

    generation, expected, arrived = 0, None, 0

    def passes(self, parity: int) -> bool:
        return True


def dependent(earlier: Use, later: Use) -> bool:
    """Return whether two uses taken in this order might differ in the other order.

    Arrivals of one phase commute, for the phase ends with the last of them in any order, unless too much is delivered.
    """
    if earlier.object is not later.object and (earlier.kind != TOUCH or earlier.object != later.object):
        return False
    if earlier.kind == WAIT and later.kind == WAIT:
        return False
    if earlier.kind == ADD and later.kind == ADD:
        return earlier.phase != later.phase or earlier.stuck or later.stuck
    return True


class Control:
    """Drives a machine by a list of choices; after its end, by `decide`."""

    def __init__(self, choices: Iterable[int] = ()) -> None:
        self.choices = list(choices)
        self.steps: list[Step] = []
        self.numbers: dict[Any, int] = {}  # task or operation -> process
        self.parked: dict[Task, Use] = {}
        self.flying: dict[AsyncOp, None] = {}  # operations that will signal
        self.known: dict[int, int] = {}  # process -> steps (bits) that come before what it does next
        self.spins: dict[Task, tuple[int, int]] = {}  # task -> (pauses in a row, steps taken when it paused)
        self.follows: dict[int, int] = {}  # operation -> the operation before it in its task's pipe
        self.floor = 0

    # ------------------------------------------------------------ what the machine calls
    def begin(self, machine: Machine) -> None:
        """Begin a launch: everything before it is past."""
        self.floor = (1 << len(self.steps)) - 1
        self.parked.clear()
        self.flying.clear()
        self.spins.clear()
        self.now: int | None = None
        self.ends: dict[Any, End] = {}  # cluster -> its end

    def before(self, task: Task, use: Use, where: Where = (), why: Callable[[], str] | None = None) -> None:
        """Suspend the running task until its step is chosen."""
        self._number(task)
        self.parked[task] = use
        if why is not None:
            task.waiting, task.why, task.where = use.object, why, where
        task.machine.scheduler.hub.switch()
        task.waiting = task.why = None

    def end(self, task: Task) -> None:
        """Take a CTA's last step: what is in flight may have landed before it, or not."""
        self.before(task, Use(WAIT, self._end_of(task), parity=1))

    def _end_of(self, task: Task) -> End:
        return self.ends.setdefault(task.cta.cluster, End())

    def pause(self, task: Task) -> None:
        """Take a step on global memory, or a turn of a loop that polls."""
        count, at = self.spins.get(task, (0, -1))
        others = any(s.process != self.numbers.get(task) for s in self.steps[max(at, 0) :])
        self.spins[task] = (1 if others else count + 1, len(self.steps))
        self.before(task, Use(TOUCH, "global memory"))

    def issued(self, machine: Machine, op: AsyncOp) -> None:
        """Note an operation handed to an engine: it completes now, unless it signals or follows one that does."""
        number = self._number(op)
        if op.previous is not None:
            self.follows[number] = self._number(op.previous)
        machine.scheduler.ops.append(op)
        if op.signals:
            self.flying[op] = None

    def pick(self, machine: Machine) -> Task | AsyncOp | None:
        """Return what happens next: whatever is on its way to its next step, else a step by choice; None if nothing can."""
        scheduler = machine.scheduler
        if scheduler.ready:
            task = scheduler.ready.popleft()
            self._learn(self._number(task))
            return task
        if not scheduler.tasks:
            # what was in flight lands after the end, which nothing observes
            return scheduler.ops[0] if scheduler.ops else None
        silent = next((op for op in scheduler.ops if op.eligible and not self._uses(op)), None)
        if silent is not None:
            self._learn(self._number(silent))
            return silent
        actors = self._enabled(machine)
        if not actors:
            self._polling(machine)
            return None
        number = self._choose(machine, actors)
        actor = actors[number]
        uses = self._uses(actor)
        self._take(number, uses)
        del (self.parked if isinstance(actor, Task) else self.flying)[actor]
        return actor

    # ------------------------------------------------------------ processes
    def _number(self, actor: Any) -> int:
        number = self.numbers.get(actor)
        if number is None:
            number = self.numbers[actor] = len(self.numbers)
            self.known[number] = self.floor
            self._learn(number)
        return number

    def _learn(self, number: int) -> None:
        """Let the process go on within the step that is being taken, or because of it."""
        if self.now is not None:
            self.known[number] |= self.steps[self.now].past | 1 << self.now

    def _before(self, number: int) -> int:
        """Return the steps that come before the next one of a process, whatever that does."""
        previous = self.follows.get(number)
        return self.known[number] | (self.known[previous] if previous is not None else 0)

    def _uses(self, actor: Any) -> list[Use]:
        if isinstance(actor, AsyncOp):
            uses = [Use(ADD, bar, n, nbytes) for bar, n, nbytes in actor.signals]
            uses += [Use(ADD, self._end_of(actor.task))] if uses else []
            return [*uses, Use(TOUCH, "clusters")] if actor.kind == "CLC query" else uses
        return [self.parked[actor]]

    def _enabled(self, machine: Machine) -> dict[int, Any]:
        actors: dict[int, Any] = {self.numbers[op]: op for op in machine.scheduler.ops if op.eligible}
        for task, use in self.parked.items():
            if use.kind == WAIT and not use.object.passes(use.parity):
                continue
            count, at = self.spins.get(task, (0, 0))
            if use.kind == TOUCH and count >= _SPINS and len(self.steps) == at:
                continue
            actors[self.numbers[task]] = task
        return actors

    def _polling(self, machine: Machine) -> None:
        spinning = [task for task, use in self.parked.items() if use.kind == TOUCH]
        if spinning:
            where = spinning[0].stands()
            raise errors.LivelockError(f"{spinning[0].label} polls, and no other task changes anything", where=where)

    # ------------------------------------------------------------ the schedule
    def _choose(self, machine: Machine, actors: dict[int, Any]) -> int:
        depth = len(self.steps)
        if depth < len(self.choices):
            number = self.choices[depth]
            if number not in actors:
                raise errors.LaunchError(
                    f"this schedule does not fit the launch: process {number} cannot go on at step {depth}"
                )
            return number
        return self.decide(machine, actors)

    def decide(self, machine: Machine, actors: dict[int, Any]) -> int:
        """Choose one of the processes that can go on."""
        return min(actors)

    def _take(self, number: int, uses: list[Use]) -> None:
        for use in uses:
            use.look()
        step = Step(number, uses, self._before(number))
        self.taken(step)
        for index, other in enumerate(self.steps):
            if not step.past >> index & 1 and any(dependent(a, b) for a in other.uses for b in uses):
                step.past |= other.past | 1 << index
        self.now = len(self.steps)
        self.steps.append(step)
        self.known[number] = step.past | 1 << self.now

    def taken(self, step: Step) -> None:
        """Note each step before its dependences are added to its past."""

    @property
    def token(self) -> str:
        """The schedule so far as a policy: `options(policy=token)` replays it."""
        return "replay:" + ".".join(str(s.process) for s in self.steps)


def replay(policy: str) -> Control:
    """Return the control that a policy "replay:…" names. Raises ValueError for anything else."""
    numbers = policy.removeprefix("replay:")
    try:
        return Control([int(n) for n in numbers.split(".")] if numbers else [])
    except ValueError:
        raise ValueError(
            f"{policy!r} is no schedule: it reads replay:0.3.1 and comes from jfa emulator explore"
        ) from None
