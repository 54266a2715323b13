"""Errors and warnings of the emulator, one class per kind of mistake.

An error knows four things: what happened, where (source lines), who was involved (tasks, barriers, buffers), and what
usually causes it. `str(error)` is the report for the user: it starts with the fact and ends with the usual cause.

With `report="raise"` the first error ends the launch. With `report="collect"` errors after which the emulated machine
can go on (a race, a read of poison, a missing fence, ...) are gathered in `run.findings` and the launch continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .locations import here, place, show


@dataclass(frozen=True)
class Wait:
    """Describe a task that waits when nothing can go on.

    Args:
        task: its label. on: label of the barrier it waits for. state: what it waits for, and the barrier's state.
        where: source locations, innermost first.
        came: labels of the tasks that arrived at the barrier in earlier phases, directly or through a copy or
            product; the next arrival is expected from them.
        due: if no task has arrived yet: the tasks whose code arrives there, or else those that arrived at other
            barriers of the same array.
    """

    task: str
    on: str
    state: str
    where: tuple = ()
    came: tuple[str, ...] = ()
    due: tuple[str, ...] = ()


@dataclass(frozen=True)
class Touch:
    """Describe one of the two accesses of a race.

    Args:
        actor: label of the task or engine that made the access. write: whether it wrote. buffer: its name.
        where: source locations, innermost first.
        line: the line of the vector clocks that `actor` advances; `clock[line]` is the access's own time.
        clock: label of a task, a tensor core or one of the two copies -> number of its steps that were ordered
            before the access.
    """

    actor: str
    write: bool
    buffer: str
    where: tuple
    line: str
    clock: Mapping[str, int]


class EmulatorError(RuntimeError):
    """Base class. `summary` is one sentence, `details` are lines of facts, `cause` says what usually leads here.

    Data for programs and figures: `waits` and `ended` (labels of tasks) of a deadlocked launch, `accesses` (the earlier
    and the later one) of a race; empty for every other kind.
    """

    cause = ""
    run: Any = None  # the Run of the launch that it ended
    waits: tuple[Wait, ...] = ()
    ended: tuple[str, ...] = ()
    accesses: tuple[Touch, ...] = ()

    def __init__(self, summary: str, details=(), cause: str | None = None, where=()):
        self.summary = summary
        self.details = list(details)
        self.cause = type(self).cause if cause is None else cause
        self.where = tuple(where) or here()
        super().__init__(summary)

    @property
    def kind(self) -> str:
        """The name shown in tables: the class name without its ending."""
        return type(self).__name__.removesuffix("Error")

    def __str__(self):
        facts = [self.summary, *("  " + line for line in self.details if not (self.where and line == "at ?"))]
        if self.where and place(*self.where[0]) not in "\n".join(facts):
            facts.insert(1, f"  at {show(self.where)}")
        lines = facts
        if self.cause:
            lines.append("  Usual cause: " + self.cause)
        return "\n".join(lines)


class EmulatorWarning(UserWarning):
    """A finding that works on today's hardware and compiler but is fragile; reported in the same form as an error."""


class NotSupported(EmulatorError, NotImplementedError):
    """A construct the emulator cannot run. The message names it."""


class LaunchError(EmulatorError):
    """The launch itself is impossible: a grid that its cluster does not divide, too many threads."""


# ---------------------------------------------------------------- synchronization


class DeadlockError(EmulatorError):
    """Every live task waits, and no operation in flight could wake one of them."""

    cause = (
        "an arrive that never happens (forgotten, predicated off, or on another barrier), or a wait on the wrong phase."
    )


class PhaseError(DeadlockError):
    """A wait came two phases late: the barrier completed two phases before the task had observed the first."""

    cause = (
        "the producer is not held back by an empty barrier, or two tasks count phases differently; "
        "a parity cannot tell two phases ahead from none."
    )


class ParityError(EmulatorError):
    """A wait for a parity that is neither 0 nor 1."""

    cause = (
        "the number of the phase is passed where its parity belongs; what a GPU does then is undefined.\n"
        "  Fix: phase & 1, for instance (k // STAGES) & 1."
    )


class ExpectBytesError(EmulatorError):
    """The bytes announced by barrier_expect_bytes are not the bytes that the copies deliver."""

    cause = (
        "the size passed to barrier_expect_bytes does not match the boxes loaded on that barrier in that phase "
        "(a box at the edge of the tensor counts in full; rows * columns * element size, summed over all loads)."
    )


class OverArrivalError(EmulatorError):
    """More arrivals in one phase than the barrier was made for."""

    cause = (
        "arrive_count in alloc_barriers is smaller than the number of arrivals per phase: one per task and "
        "replica, one per MMA, one per expect."
    )


class NamedBarrierError(EmulatorError):
    """A named barrier used outside its rules: ids 0-15, thread counts in whole warps, the same count by every user."""

    cause = (
        "an id outside 0-15, or a thread count that is not the sum over waiting and arriving tasks of 32 * num_warps."
    )


class RaceError(EmulatorError):
    """Two accesses to one place, at least one a write, that no barrier orders."""

    cause = (
        "a wait that is missing, comes too late or passes on an old phase; or an arrive that comes before the access it"
        " should cover."
    )


class MissingFenceError(EmulatorError):
    """Ordinary stores to shared memory are read by the async proxy (TMA, tensor core) without a proxy fence."""

    cause = 'tlx.fence("async_shared") is missing between local_store and the arrive (or the TMA store) that hands the buffer on.'


class PoisonError(EmulatorError):
    """An undefined value (a masked lane, unwritten memory, an unfinished product) affects what the kernel does."""

    cause = (
        "a wait is missing before the read, the first MMA accumulates onto nothing (use_acc=False is missing), "
        "or a view covers more than was written."
    )


class InFlightError(EmulatorError):
    """A CTA ends while its tensor core or a copy still uses its memory."""

    cause = "no task waits for the barrier of the last MMA (async_dot's mBarriers or tcgen05_commit) before the kernel ends."


class EndedCtaError(InFlightError):
    """A CTA uses the shared memory or a barrier of another that may have ended."""

    cause = "a cluster barrier is missing at the end of the kernel."


class UnstartedCtaError(EmulatorError):
    """A CTA writes to the shared memory of another that may not have started."""

    cause = (
        "a cluster barrier is missing at the start of the kernel. fbtriton's compiler puts one in only where the kernel\n"
        "  arrives at a barrier of another CTA, or has a product of two CTAs.\n"
        "  Fix: tlx.cluster_barrier() behind the allocations and whatever the CTA writes into its own buffers first."
    )


class ClcError(EmulatorError):
    """Cluster launch control used outside its rules."""

    cause = "clc_producer after a response of -1, or more or fewer clc_consumer calls than clc_create_context was told."


class ClusterError(EmulatorError):
    """A CTA rank or a peer's buffer that does not exist in this cluster."""

    cause = "the kernel was launched with a smaller cluster than it is written for (num_ctas / ctas_per_cga)."


class LivelockError(EmulatorError):
    """The launch took more scheduling steps than the limit allows."""

    cause = "a loop that polls memory nobody will write, or max_steps too small for a very long kernel."


# ---------------------------------------------------------------- limits of the hardware


class LimitError(EmulatorError):
    """Base class of the errors for exceeding a limit of the hardware."""


class SharedMemoryError(LimitError):
    """More shared memory than an SM gives one CTA."""

    cause = "too many or too large buffers in local_alloc; share storage with reuse= or use fewer stages."


class TensorMemoryError(LimitError):
    """More tensor memory than 128 lanes x 512 columns."""

    cause = (
        "accumulators take one 32-bit column per element of a row; "
        "let buffers that are never live together share storage (reuse=)."
    )


class TensorMemoryWarpsError(LimitError):
    """Tensor memory loaded or stored by a task of fewer than four warps."""

    cause = "each warp reaches a quarter of the 128 lanes only: give the task that loads or stores num_warps=4 or 8."


class RegisterLimitError(LimitError):
    """Register requests that the register file cannot serve."""

    cause = (
        "registers= counts per thread: the sum over all warps of 32 * registers must stay within 65,536, each 24 to 256"
        " in steps of 8."
    )


class ThreadLimitError(LimitError):
    """More than 1024 threads in a CTA."""

    cause = "num_warps of the kernel plus num_warps * replicate of every async_task must stay within 32 warps."


class MmaShapeError(LimitError):
    """A tile shape the tensor core does not have."""

    cause = "M is 64 or 128 per CTA, N a multiple of 16 up to 256, K a multiple of 32 bytes."


class DescriptorError(LimitError):
    """A TMA descriptor or box the hardware refuses."""

    cause = (
        "up to 5 dimensions, box sides up to 256, inner row a multiple of 16 bytes, base and strides multiples of 16 "
        "bytes, last stride 1."
    )


class BufferIndexError(LimitError, IndexError):
    """An index past the buffers or barriers that were allocated."""

    cause = "the index must be taken modulo the number of buffers: bufIdx = count % NUM_BUFFERS."


# ---------------------------------------------------------------- global memory (raised by the frontend)


class OutOfBoundsError(EmulatorError):
    """An access to global memory outside every tensor of the launch, without a mask."""

    cause = "a mask is missing on the last tile, or an offset is computed with the wrong stride."


class GlobalRaceError(EmulatorError):
    """Two CTAs write one address of global memory without atomics."""

    cause = "two programs compute the same tile, or a tile's tail reaches into its neighbor's rows."


class DeviceAssertError(EmulatorError):
    """A tl.device_assert (or assert) of the kernel does not hold."""


def warn(finding: EmulatorError) -> None:
    """Print a finding that is not an error, once a source line."""
    warnings.warn(EmulatorWarning(str(finding)), stacklevel=3)
