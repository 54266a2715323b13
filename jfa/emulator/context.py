"""Hold the state of the launch that runs in this thread, in one object that its operations look up.

`context.launch` is the innermost launch of the running thread, or an idle one. No state of a launch is kept elsewhere,
so launches in several threads do not affect each other, the end of a nested launch (a host function that a kernel calls
may launch one) restores the outer one, and a failed launch leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import EmulatorError
    from .machine.tasks import Task
    from .memory import GlobalMemory
    from .undefined import Origin


def _raise(error: EmulatorError) -> None:
    raise error


class Launch:
    """One launch.

    Attributes:
        task: the task that runs now; None outside a launch.
        memory: its global memory.
        num_warps: warps of a program's first task.
        names: called as names("async_dot_scaled"): whether the kernel or a function that it calls uses that name.
        charge: called as charge(kind, elements) with each block operation of a timed run, else None.
        exchange: called where the warps of a task exchange values through shared memory; None for plain kernels, whose
            tasks nothing tells apart.
        product: the array of the latest multiplication: an addition to it costs nothing, the compiler fuses the two.
        contracts: whether products go into sums unrounded, its option `contract`; see frontend/contraction.py.
        follows_undefined: whether it looks for undefined values, its option `poison`.
        has_undefined: whether it has made any; operations look at marks only then.
        origins: the number of each origin of undefined values.
        reported: uses of undefined values that were reported.
        report: takes an error after which the launch could go on.
        fresh: functions whose bindings were compared with the user's names in this launch.
        looks: place in a kernel -> how often types were compared there.
        returned: function and types of its arguments -> the type of what it returns; see frontend/returns.py.
        polls: iterations of `while` loops.
        printed: what static_print has printed.
    """

    __slots__ = (
        *("task", "memory", "num_warps", "names", "charge", "exchange", "product"),
        *("contracts", "follows_undefined", "has_undefined", "origins", "reported", "report"),
        *("fresh", "looks", "returned", "polls", "printed"),
    )

    def __init__(
        self,
        memory: GlobalMemory | None = None,
        num_warps: int = 4,
        follows_undefined: bool = True,
        report: Callable[[EmulatorError], None] = _raise,
    ) -> None:
        self.task: Task | None = None
        self.memory, self.num_warps = memory, num_warps
        self.names: Callable[[str], bool] = lambda name: False
        self.charge: Callable[..., None] | None = None
        self.exchange: Callable[[], None] | None = None
        self.product: Any = None
        self.contracts = False
        self.follows_undefined, self.has_undefined = follows_undefined, False
        self.origins: dict[Origin, int] = {}
        self.reported: set[tuple] = set()
        self.report = report
        self.fresh: set[Any] = set()
        self.looks: dict[Any, int] = {}
        self.returned: dict[tuple, Any] = {}
        self.polls = 0
        self.printed: set[tuple] = set()


class _Context(threading.local):
    """The launch of each thread. A context variable would not do: greenlets have contexts of their own."""

    launch: Launch

    def __init__(self) -> None:
        self.launch = Launch()


context = _Context()


@contextlib.contextmanager
def running(launch: Launch) -> Iterator[Launch]:
    """Make `launch` the thread's launch inside the block."""
    outer, context.launch = context.launch, launch
    try:
        yield launch
    finally:
        context.launch = outer
