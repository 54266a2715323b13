"""Cluster launch control (Blackwell): a running cluster takes over a tile of the grid that has not started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import triton.language as tl

from ..frontend import values
from ..machine import engines, smem_view, sync
from ..machine.storage import Storage
from .api import LEFT_OUT, Value, api, begin, constant, integer, running, truth
from .barriers import BarrierArray, barrier_arrive, barrier_expect_bytes, barrier_wait, mbarrier

if TYPE_CHECKING:
    from ..locations import Where
    from ..machine.tasks import CTA, Task


class clc_response(tl.core.base_value):
    """Room for `num` answers of try_cancel (`index` None), or one of them."""

    def __init__(self, store: _Responses, index: int | None = None) -> None:
        self.store, self.index = store, index

    def __getitem__(self, index: Value) -> clc_response:
        return self.at(integer(index))

    def at(self, index: int) -> clc_response:
        return clc_response(self.store, index)

    @property
    def num(self) -> int:
        return len(self.store.answers.values) if self.index is None else 0


class _Responses:
    """The machine's side: 16 bytes of shared memory per stage."""

    def __init__(self, cta: CTA, stages: int) -> None:
        machine = cta.machine
        storage = Storage(cta, "smem", 16 * stages, "clc_response", machine.options.poison, machine.watch)
        views = [smem_view(storage, 16 * i, (16,), np.uint8) for i in range(stages)]
        self.answers = engines.ClcResponse(cta, stages, views.__getitem__)
        self.number = sync.allocated(cta, self)


class CLCPipelineContext:
    """Full and empty barriers and the answers of a CLC pipeline."""

    def __init__(self, clc_mbars_empty: mbarrier, clc_mbars_full: mbarrier, clc_responses: clc_response) -> None:
        self._clc_mbars_empty, self._clc_mbars_full, self._clc_responses = (
            clc_mbars_empty,
            clc_mbars_full,
            clc_responses,
        )


def _check_arch(task: Task) -> None:
    assert task.machine.options.arch != 90, "cluster launch control needs Blackwell (sm_100)"


@api
def _alloc_clc_responses(num_responses: Value) -> clc_response:
    return clc_response(_Responses(running().cta, integer(constant(num_responses, "num_responses"))))


@api
def _clc_issue(clc_response_addr: clc_response, barrier: mbarrier) -> None:
    """Ask for a tile: the answer goes to every CTA of the cluster."""
    assert isinstance(clc_response_addr, clc_response)
    task, where, fault = begin("clc_issue", "")
    if fault != "drop":
        ctas = task.cta.cluster.ctas
        _try_cancel(task, clc_response_addr, barrier, ctas, where)


def _try_cancel(task: Task, response: clc_response, barrier: mbarrier, ctas: Sequence[CTA], where: Where) -> None:
    _check_arch(task)
    stores = [sync.twin(task, response.store.number, cta, where).answers for cta in ctas]
    bars = [barrier.machine_barrier(task, where, cta) for cta in ctas]
    engines.clc_try_cancel(task, stores, response.index or 0, bars, where)


@api
def _clc_query(clc_response_addr: clc_response) -> tuple[Value, ...]:
    """Decode an answer: the tile's program ids, (-1, -1, -1) if none is left; x counts this CTA's rank in."""
    assert isinstance(clc_response_addr, clc_response)
    task, where, _ = begin("clc_query", "")
    origin = engines.clc_query(task, clc_response_addr.store.answers, clc_response_addr.index or 0, where)
    ids = (-1, -1, -1) if origin is None else (origin[0] + task.cta.rank, origin[1], origin[2])
    return tuple(values.make_scalar(i, tl.int32) for i in ids)


@api
def clc_create_context(num_consumers: Value, num_stages: Value = 1) -> CLCPipelineContext:
    """Return barriers and answers for a pipeline of `num_stages` whose stages `num_consumers` arrivals free."""
    stages, consumers = integer(constant(num_stages, "num_stages")), integer(constant(num_consumers, "num_consumers"))
    cta = running().cta
    _check_arch(running())
    return CLCPipelineContext(
        mbarrier(BarrierArray(cta, "clc_empty", stages, consumers, False)),
        mbarrier(BarrierArray(cta, "clc_full", stages, 1, False)),
        clc_response(_Responses(cta, stages)),
    )


@api
def clc_producer(
    context: CLCPipelineContext, p_producer: Value = None, multi_ctas: Value = False, k: Value = 0
) -> None:
    """Wait for an empty stage, then ask for the next tile. In a cluster (multi_ctas) only CTA 0 waits and asks; all
    expect the answer."""
    k, multi = integer(k), truth(multi_ctas)
    task = running()
    empty, full = context._clc_mbars_empty.at(k), context._clc_mbars_full.at(k)
    leads = not multi or task.cta.rank == 0
    if leads:
        barrier_wait(empty, p_producer)
    barrier_expect_bytes(full, 16)
    if leads:
        _, where, fault = begin("clc_producer", "")
        if fault != "drop":
            ctas = task.cta.cluster.ctas if multi else [task.cta]
            _try_cancel(task, context._clc_responses.at(k), full, ctas, where)


@api
def clc_consumer(
    context: CLCPipelineContext,
    p_consumer: Value = None,
    multi_ctas: Value = False,
    k: Value = 0,
    return_3d: Value = False,
) -> Value:
    """Wait for the answer and decode it; if it names a tile, free the stage (at CTA 0 in a cluster). Returns the tile, -1
    for none."""
    k = integer(k)
    barrier_wait(context._clc_mbars_full.at(k), p_consumer)
    ids = _clc_query(context._clc_responses.at(k))
    if integer(ids[0]) >= 0:
        barrier_arrive(context._clc_mbars_empty.at(k), 1, 0 if truth(multi_ctas) else LEFT_OUT)
    return ids if truth(return_3d) else ids[0]


__all__ = [
    *("CLCPipelineContext", "_alloc_clc_responses", "_clc_issue", "_clc_query"),
    *("clc_consumer", "clc_create_context", "clc_producer", "clc_response"),
]
