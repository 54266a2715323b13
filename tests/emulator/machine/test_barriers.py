"""Phases, arrivals, transaction bytes, named and cluster barriers."""

import numpy as np
import pytest

from jfa.emulator import errors
from jfa.emulator.machine import current, engines, sync

from .parts import POLICIES, Bars, Buffers, arrive, name, run, tasks, wait

every_policy = pytest.mark.parametrize("options", POLICIES, ids=name)


@every_policy
def test_a_fresh_barrier_passes_parity_one_and_blocks_on_zero(options):
    order = []

    def kernel():
        bar = Bars("bar", 1)

        def waiter():
            wait(bar[0], 0)
            order.append("passed parity 0")

        def arriver():
            wait(bar[0], 1)
            order.append("arrives")
            arrive(bar[0])

        tasks(waiter=waiter, arriver=arriver)

    run(kernel, options)
    assert order == ["arrives", "passed parity 0"]


@every_policy
def test_a_ring_of_two_stages_delivers_everything_in_order(options):
    got = []

    def kernel():
        full, empty, ring = Bars("full", 2), Bars("empty", 2), Buffers("ring", 2)

        def producer():
            for i in range(12):
                wait(empty[i % 2], i // 2 + 1)
                sync.expect_bytes(current(), full[i % 2], 64, ())
                target = [(ring.views[i % 2], "ring", full[i % 2])]
                engines.tma_load(current(), lambda i=i: np.full(16, i, np.float32), target, 64, ())

        def consumer():
            for i in range(12):
                wait(full[i % 2], i // 2)
                got.append(ring.load(i % 2)[0])
                arrive(empty[i % 2])

        tasks(producer=producer, consumer=consumer)

    assert run(kernel, options).clean
    assert got == list(range(12))


@every_policy
def test_a_phase_needs_both_arrivals_and_bytes(options):
    def kernel():
        bar, buffer = Bars("full", 1), Buffers("b", 1)

        def load():
            target = [(buffer.views[0], "b", bar[0])]
            engines.tma_load(current(), lambda: np.ones(16, np.float32), target, 64, ())
            sync.expect_bytes(current(), bar[0], 64, ())  # the bytes may come before their announcement

        def use():
            wait(bar[0], 0)
            assert buffer.load(0).sum() == 16

        tasks(load=load, use=use)

    assert run(kernel, options).clean


def test_one_arrival_too_many_names_the_arrivals():
    def kernel():
        bar = Bars("full", 1, arrive_count=2)
        arrive(bar[0], 3)

    with pytest.raises(
        errors.OverArrivalError, match=r"full\[0\] got 1 arrival more than its arrive_count=2 in phase 0"
    ):
        run(kernel)


def test_too_few_bytes_announced_is_said_so():
    def kernel():
        bar, buffer = Bars("full", 1), Buffers("b", 1)
        sync.expect_bytes(current(), bar[0], 32, ())
        engines.tma_load(current(), lambda: np.ones(16, np.float32), [(buffer.views[0], "b", bar[0])], 64, ())
        wait(bar[0], 0)

    with pytest.raises(errors.ExpectBytesError, match="32 bytes more were delivered"):
        run(kernel)


def test_too_many_bytes_announced_is_no_plain_deadlock():
    def kernel():
        bar, buffer = Bars("full", 1), Buffers("b", 1)
        sync.expect_bytes(current(), bar[0], 128, ())
        engines.tma_load(current(), lambda: np.ones(16, np.float32), [(buffer.views[0], "b", bar[0])], 64, ())
        wait(bar[0], 0)

    with pytest.raises(errors.ExpectBytesError, match="64 bytes more were announced"):
        run(kernel)


def test_a_wait_that_can_come_two_phases_late():
    def kernel():
        bar = Bars("full", 1)

        def waiter():
            wait(bar[0], 0)

        def runaway():
            arrive(bar[0])
            arrive(bar[0])

        tasks(waiter=waiter, runaway=runaway)

    found = set()
    for options in POLICIES:
        with pytest.raises((errors.PhaseError, errors.DeadlockError)) as error:
            run(kernel, options)
        found.add(type(error.value))
    assert errors.PhaseError in found


@every_policy
def test_deadlock_after_a_task_has_left(options):
    """Source: facebookexperimental/triton PR 2614: detection counted tasks that had finished."""

    def kernel():
        bar = Bars("both", 1, arrive_count=2)
        tasks(first=lambda: arrive(bar[0]), second=lambda: wait(bar[0], 0))

    with pytest.raises(errors.DeadlockError) as error:
        run(kernel, options)
    text = str(error.value)
    assert "second waits for mbarrier both[0], parity 0" in text and "1 of 2 arrivals" in text
    assert "already ended: first" in text


@every_policy
def test_phase_counter_restarted_per_tile_deadlocks(options):
    """Source: tile-ai/tilelang PR 2674: right for one tile per CTA, wrong from the second on."""
    trips, sums = [3, 1, 2], []

    def kernel(restart):
        full, empty, ring = Bars("full", 2), Bars("empty", 2), Buffers("ring", 2)

        def producer():
            for i in range(sum(trips)):
                wait(empty[i % 2], i // 2 + 1)
                ring.store(i % 2, i)
                arrive(full[i % 2])

        def consumer():
            count = 0
            for trip in trips:
                if restart:
                    count = 0
                total = 0
                for _ in range(trip):
                    wait(full[count % 2], count // 2)
                    total += ring.load(count % 2)[0]
                    arrive(empty[count % 2])
                    count += 1
                sums.append(int(total))

        tasks(producer=producer, consumer=consumer)

    assert run(lambda: kernel(False), options).clean
    assert sums == [3, 3, 9]
    sums.clear()
    with pytest.raises(errors.EmulatorError) as error:
        run(lambda: kernel(True), options.but(races=False))
    assert isinstance(error.value, (errors.DeadlockError, errors.OverArrivalError))
    if isinstance(error.value, errors.DeadlockError):
        assert "producer waits for mbarrier empty[1]" in str(error.value)
        assert "consumer waits for mbarrier full[1]" in str(error.value)


@every_policy
def test_named_barrier_counts_threads(options):
    order = []

    def kernel():
        def waiter():
            sync.named_wait(current(), 3, 256, ())
            order.append("after")

        def arriver():
            order.append("before")
            sync.named_arrive(current(), 3, 256, ())

        tasks(waiter=waiter, arriver=arriver)

    run(kernel, options)
    assert order == ["before", "after"]


@pytest.mark.parametrize(
    "number, threads, message", [(16, 128, "0 to 15"), (0, 100, "multiple of 32"), (0, 96, "arrived")]
)
def test_named_barrier_rules(number, threads, message):
    with pytest.raises(errors.NamedBarrierError, match=message):
        run(lambda: sync.named_wait(current(), number, threads, ()))


def test_a_task_may_open_a_smaller_named_barrier_alone():
    """Four warps, a barrier of one: each warp opens it for itself, on a GPU as here."""
    run(lambda: sync.named_wait(current(), 3, 32, ()))


@every_policy
def test_cluster_barrier_waits_for_every_task_of_every_cta(options):
    seen, order = [], []

    def kernel():
        rank = current().cta.rank

        def one():
            order.append(("before", rank))
            sync.cluster_wait(current(), ())
            seen.append(len([o for o in order if o[0] == "before"]))

        tasks(a=one, b=one)

    run(kernel, options, grid=2, cluster=2)
    assert seen == [4, 4, 4, 4]


def test_cluster_barrier_missed_by_one_task_is_a_deadlock_that_names_it():
    def kernel():
        bar = Bars("never", 1)
        tasks(goes=lambda: sync.cluster_wait(current(), ()), stays=lambda: wait(bar[0], 0))

    with pytest.raises(errors.DeadlockError, match="missing: stays"):
        run(kernel)


@every_policy
def test_a_peer_may_be_touched_only_once_it_has_allocated(options):
    """The launch of a cluster makes sure on the GPU; the emulator waits."""
    got = []

    def kernel():
        task = current()
        if task.cta.rank == 1:
            for _ in range(5):
                task.pause()
        bars = Bars("bar", 1)
        other = sync.twin(task, 0, sync.peer(task, 1 - task.cta.rank, ()), ())
        arrive(other[0])
        wait(bars[0], 0)
        got.append(task.cta.rank)

    run(kernel, options, grid=2, cluster=2)
    assert sorted(got) == [0, 1]
