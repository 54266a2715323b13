"""Barriers and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl

from .. import errors
from ..frontend import values
from ..locations import here, show
from ..machine import MBarrier, limits, sync
from .api import LEFT_OUT, Value, api, begin, constant, integer, plain, predicate, running, wants_constants
from .types import storage_kind

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.tasks import CTA, Task


class mbarrier(tl.core.base_value):
    """An array of mbarriers (`index` None), one of them, or a view of one in another CTA (`rank` given)."""

    __slots__ = ("array", "index", "rank")

    def __init__(self, array: BarrierArray, index: int | None = None, rank: int | None = None) -> None:
        self.array, self.index, self.rank = array, index, rank

    def __getitem__(self, index: Value) -> mbarrier:
        return local_view(self, index)

    def at(self, index: int) -> mbarrier:
        return self.array.handle(index) if self.index is None else self

    @property
    def num(self) -> int:
        return len(self.array.barriers) if self.index is None else 0

    @property
    def whole_array(self) -> BarrierArray | None:
        """What an aggregate that holds this names; None for a part of it."""
        return self.array if self.index is None and self.rank is None else None

    def rename(self, name: str) -> None:
        """Give the array and its barriers another name."""
        self.array.name = name
        for i, barrier in enumerate(self.array.barriers):
            barrier.name = f"{name}[{i}]"

    @property
    def storage(self) -> storage_kind:
        return storage_kind.smem if self.rank is None else storage_kind.smemCluster

    @property
    def type(self) -> mbarrier:
        return self

    @property
    def compiled_type(self) -> str:
        return f"mbarrier<{self.num}>"

    @property
    def shape(self) -> list[int]:
        return [1]

    def machine_barrier(self, task: Task, where: Where, cta: CTA | None = None) -> MBarrier:
        """Return the machine's barrier: this CTA's own, that of `cta`, or of the CTA a remote view names."""
        array, index = self.array, self.index
        if index is None:
            if len(array.barriers) != 1:
                raise ValueError(f"{array.name} is an array of {len(array.barriers)} barriers: index it first")
            index = 0
        if cta is None and self.rank is not None:
            cta = sync.peer(task, self.rank, where)
        if cta is None or cta is array.cta:
            return array.barriers[index]
        return sync.twin(task, array.number, cta, where).barriers[index]

    def __repr__(self) -> str:
        return f"<mbarrier {self.array.name}{'' if self.index is None else [self.index]}>"


class BarrierArray:
    """The result of alloc_barriers. `fields` is its path in an aggregate, which the kernel may hold in `variable`."""

    fields: tuple[str, ...] = ()
    variable: str = ""

    def __init__(self, cta: CTA, name: str, num: int, count: int, per_thread: bool) -> None:
        self.cta, self.name, self.per_thread = cta, name, per_thread
        self.barriers = [MBarrier(f"{name}[{i}]", cta, count, per_thread) for i in range(num)]
        self.number = sync.allocated(cta, self)
        self._handles: dict[int, mbarrier] = {}

    def handle(self, index: int) -> mbarrier:
        handle = self._handles.get(index)
        if handle is None:
            if not 0 <= index < len(self.barriers):
                raise errors.BufferIndexError(
                    f"{self.name}[{index}]: there are {len(self.barriers)} barriers",
                    [f"at {show(here())}"],
                    where=here(),
                )
            handle = self._handles[index] = mbarrier(self, index)
        return handle


def _allocate(num: int, count: int, per_thread: bool, name: str) -> mbarrier:
    if num < 1:
        raise ValueError(f"alloc_barriers needs at least one barrier, got {num}")
    if not 1 <= count <= limits.BARRIER_COUNT:
        raise ValueError(f"arrive_count must be from 1 to {limits.BARRIER_COUNT}, got {count}")
    return mbarrier(BarrierArray(running().cta, name, num, count, per_thread))


@wants_constants(num_barriers=0, arrive_count=1)
@api
def alloc_barriers(num_barriers: Value, arrive_count: Value = 1, _name: str = "barrier") -> mbarrier:
    """Allocate `num_barriers` mbarriers that `arrive_count` arrivals complete."""
    return _allocate(
        integer(constant(num_barriers, "num_barriers")), integer(constant(arrive_count, "arrive_count")), False, _name
    )


@wants_constants(num_barriers=0, num_warps=1, num_arrivals=2)
@api
def alloc_warp_barrier(
    num_barriers: Value, num_warps: Value = 1, num_arrivals: Value = 1, _name: str = "warp_barrier"
) -> mbarrier:
    """Allocate mbarriers at which every thread arrives by itself: the count is num_warps * 32 * num_arrivals."""
    count = 32 * integer(constant(num_warps, "num_warps")) * integer(constant(num_arrivals, "num_arrivals"))
    return _allocate(integer(constant(num_barriers, "num_barriers")), count, True, _name)


def _word(x: Value, name: str) -> int:
    """Return the number that an argument holds, which must be 32 bits wide."""
    x = plain(x)
    kind = x.dtype.name if isinstance(x, tl.tensor) else "int1" if isinstance(x, bool) else "int32"
    if kind not in ("int32", "uint32") or isinstance(x, tl.tensor) and values.is_block(x):
        raise TypeError(f"`{name}` must be a 32-bit integer, not {getattr(x, 'type', kind)}: add .to(tl.int32)")
    return integer(x)


@api
def barrier_wait(bar: mbarrier, phase: Value, pred: Value = LEFT_OUT) -> None:
    """Wait until the phase of that parity has completed (a fresh barrier passes 1 and blocks on 0)."""
    assert bar.rank is None, (
        "barrier_wait does not support remote_view of mbarrier. Use local mbarrier only (storage must be smem, not smemCluster)."
    )
    if isinstance(phase, (bool, int)) or isinstance(phase, (tl.tensor, tl.constexpr)):
        parity = _word(phase, "phase")
    else:
        raise RuntimeError(f"`phase` is in type {type(phase)} (must be either `tl.tensor` or `tl.constexpr`)")
    task = running()
    where = here()
    target = bar.machine_barrier(task, where)
    waits = predicate(pred)
    if waits and parity not in (0, 1):
        summary = f"{task.label} waits for parity {parity} of mbarrier {target.label}"
        raise errors.ParityError(summary, [f"at {show(where)}"], where=where)
    fault = task.machine.scheduler.step(task, "barrier_wait", target.name, where)
    if fault == "drop" or not waits:
        return
    if fault == "flip":
        parity ^= 1
    if fault == "late":
        task.deferred = [1, target, parity, where]
        return
    sync.wait(task, target, parity, where)


@wants_constants(arrive_count=1)
@api
def barrier_arrive(
    bar: mbarrier, arrive_count: Value = 1, remote_cta_rank: Value = LEFT_OUT, pred: Value = LEFT_OUT
) -> None:
    """Arrive `arrive_count` times, at this CTA's barrier or the same barrier of another CTA of the cluster."""
    assert bar.rank is None, (
        "barrier_arrive does not allow users to pass a remote_view of mbarrier. Remote view is done inside barrier_arrive"
    )
    task = running()
    where = here()
    count = integer(constant(arrive_count, "arrive_count"))
    if count < 1:
        raise ValueError(f"arrive_count must be positive, got {count}")
    if remote_cta_rank is LEFT_OUT:
        remote_cta_rank = None
    else:
        assert remote_cta_rank is not None, (
            "remote_cta_rank must be a number, or be left out: the compiler refuses None"
        )
    _refuse_remote_alone(task, remote_cta_rank, "barrier_arrive")
    fault = task.machine.scheduler.step(task, "barrier_arrive", bar.array.name, where)
    if fault == "drop" or not predicate(pred):
        return
    cta = None if remote_cta_rank is None else sync.peer(task, integer(remote_cta_rank), where)
    if cta is not None:
        task.cta.cluster.signalled = True
    sync.arrive(task, bar.machine_barrier(task, where, cta), count * (2 if fault == "twice" else 1), where)


@wants_constants(size=1)
@api
def barrier_expect_bytes(bar: mbarrier, size: Value, pred: Value = LEFT_OUT) -> None:
    """Arrive once and announce `size` bytes that copies will deliver in this phase."""
    task, where, fault = begin("barrier_expect_bytes", bar.array.name)
    size = integer(constant(size, "size"))
    if not 0 <= size <= limits.BARRIER_BYTES:
        raise errors.ExpectBytesError(
            f"{size} bytes do not fit the counter of an mbarrier ({limits.BARRIER_BYTES})", where=where
        )
    if fault == "drop" or not predicate(pred):
        return
    if fault == "half":
        size //= 2
    sync.expect_bytes(task, bar.machine_barrier(task, where), size, where)


@api
def named_barrier_wait(bar: Value, arrive_count: Value) -> None:
    """Wait until `arrive_count` threads are at named barrier `bar` (0-15)."""
    number, threads = _word(bar, "bar"), _word(arrive_count, "arrive_count")
    task, where, fault = begin("named_barrier_wait", str(number))
    if fault != "drop":
        sync.named_wait(task, number, threads, where)


@api
def named_barrier_arrive(bar: Value, arrive_count: Value) -> None:
    """Arrive at named barrier `bar` without waiting (bar.arrive)."""
    number, threads = _word(bar, "bar"), _word(arrive_count, "arrive_count")
    task, where, fault = begin("named_barrier_arrive", str(number))
    if fault != "drop":
        sync.named_arrive(task, number, threads, where)


@api
def cluster_barrier() -> None:
    """Wait for every live warp of every CTA of the cluster."""
    task, where, fault = begin("cluster_barrier", "")
    if fault != "drop":
        sync.cluster_wait(task, where)


@api
def fence_mbarrier_init_cluster() -> None:
    """Make fresh mbarriers visible to the cluster. The launch of a cluster sees to that here; kept for its place in time."""
    begin("fence_mbarrier_init_cluster", "")


@api
def fence(scope: Value) -> None:
    """Fence: "async_shared" lets the async proxy see ordinary stores, "gpu" and "sys" order global memory."""
    scope = plain(scope)
    if scope not in ("async_shared", "gpu", "sys"):
        raise ValueError(f"fence scope must be 'gpu', 'sys', or 'async_shared', got '{scope}'")
    task, where, fault = begin("fence", scope)
    if scope == "async_shared":
        if fault != "drop":
            sync.fence(task, early=fault == "early")
    if task.machine.timed:
        task.machine.clock.spend(task, "fence", "fence", where)


@api
def fence_async_shared() -> None:
    """Do fence("async_shared"), by its older name."""
    fence("async_shared")


def _refuse_remote_alone(task: Task, rank: Any, what: str) -> None:
    if rank is not None and len(task.cta.cluster.ctas) == 1:
        summary = f"{what} with a remote_cta_rank needs a cluster of more than one CTA (ctas_per_cga)"
        raise errors.ClusterError(summary, [f"at {show(here())}"], where=here())  # the compiler refuses it, too


@api
def remote_view(local_allocated_buffer: Any, remote_cta_rank: Value) -> mbarrier:
    """Return the same barrier in CTA `remote_cta_rank` of the cluster."""
    assert isinstance(local_allocated_buffer, mbarrier), "remote_view only supports barrier for now"
    assert local_allocated_buffer.rank is None, "remote_view requires local smem as input"
    _refuse_remote_alone(running(), remote_cta_rank, "remote_view")
    running().cta.cluster.signalled = True
    return mbarrier(local_allocated_buffer.array, local_allocated_buffer.index or 0, integer(remote_cta_rank))


from .buffers import local_view  # noqa: E402  (each side's __getitem__ needs the other)
