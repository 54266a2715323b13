"""The race detector: what it must find in every schedule, and what it must not."""

import gc

import numpy as np
import pytest

from jfa.emulator import errors
from jfa.emulator.machine import Storage, View, current, engines, smem_view, sync, tmem_view
from jfa.emulator.machine.shadow import Shadow
from jfa.emulator.options import Options

from .parts import POLICIES, Bars, Buffers, arrive, name, run, tasks, wait

every_policy = pytest.mark.parametrize("options", POLICIES, ids=name)


@every_policy
def test_store_and_load_that_no_barrier_orders(options):
    def kernel():
        buffer = Buffers("b", 1)
        buffer.store(0, 0)
        tasks(writer=lambda: buffer.store(0, 1), reader=lambda: buffer.load(0))

    with pytest.raises(errors.RaceError) as error:
        run(kernel, options)
    text = str(error.value)
    assert "shared memory b[0]" in text and "writer" in text and "reader" in text


@every_policy
def test_the_end_of_a_region_orders(options):
    def kernel():
        buffer = Buffers("b", 1)
        tasks(writer=lambda: buffer.store(0, 1), other=lambda: None)
        assert buffer.load(0)[0] == 1
        tasks(writer=lambda: buffer.store(0, 2), other=lambda: None)
        assert buffer.load(0)[0] == 2

    assert run(kernel, options).clean


@every_policy
def test_neighbouring_slots_of_four_bytes_do_not_race(options):
    """Source: fbtriton's multi-CTA layernorm keeps one fp32 per warp group side by side."""

    def kernel():
        slots = Buffers("slots", 4, size=1)
        tasks(**{f"t{i}": (lambda i=i: slots.store(i, i)) for i in range(4)})

    assert run(kernel, options).clean


@every_policy
def test_neighbouring_bytes_do_not_race(options):
    def kernel():
        cta = current().cta
        storage = Storage(cta, "smem", 4, "bytes")
        views = [smem_view(storage, i, (1,), np.uint8) for i in range(4)]
        tasks(**{f"t{i}": (lambda i=i: sync.store(current(), views[i], i, (), "bytes")) for i in range(4)})

    assert run(kernel, options).clean


def _copy(buffer, bar, title="copy"):
    engines.tma_load(current(), lambda: np.zeros(16, np.float32), [(buffer.views[0], "b[0]", bar)], 64, ())


@every_policy
def test_a_copy_into_a_buffer_still_being_read(options):
    def kernel():
        full, buffer = Bars("full", 1), Buffers("b", 1)

        def load():
            for _ in range(2):  # no empty barrier: the second copy races with the read
                sync.expect_bytes(current(), full[0], 64, ())
                _copy(buffer, full[0])

        def use():
            wait(full[0], 0)
            buffer.load(0)

        tasks(load=load, use=use)

    with pytest.raises((errors.RaceError, errors.PhaseError, errors.OverArrivalError)):
        run(kernel, options)


@every_policy
def test_poison_is_found_where_nobody_wrote(options):
    def kernel():
        Buffers("fresh", 1).load(0)

    with pytest.raises(errors.PoisonError, match="reads shared memory fresh"):
        run(kernel, options)


def test_fresh_memory_is_nan():
    def kernel():
        assert np.isnan(Buffers("fresh", 1).views[0].read()).all()

    run(kernel)


def _stored_then_sent(fence_by, options):
    def kernel():
        bar, buffer, out = Bars("stored", 1), Buffers("b", 1), []

        def writer():
            buffer.store(0, 7)
            if fence_by == "writer":
                sync.fence(current())
            arrive(bar[0])

        def sender():
            wait(bar[0], 0)
            if fence_by == "sender":
                sync.fence(current())
            engines.tma_store(current(), out.append, buffer.views[0], "b[0]", 64, ())
            engines.store_wait(current(), 0, ())

        tasks(writer=writer, sender=sender)
        assert out

    return run(kernel, options)


@every_policy
@pytest.mark.parametrize("fence_by", ["writer", "sender"])
def test_a_fence_on_either_side_of_the_barrier_is_enough(options, fence_by):
    assert _stored_then_sent(fence_by, options).clean


@every_policy
def test_stores_sent_without_a_fence(options):
    with pytest.raises(errors.MissingFenceError) as error:
        _stored_then_sent(None, options.but(fences="strict"))
    assert "writer" in str(error.value) and "TMA store issued by sender" in str(error.value)


@pytest.mark.parametrize("fences, expected", [("compiler", "warning"), ("strict", "error")])
def test_a_missing_fence_is_a_warning_unless_asked_strictly(fences, expected):
    def kernel():
        buffer = Buffers("b", 1)
        buffer.store(0, 7)
        engines.tma_store(current(), lambda data: None, buffer.views[0], "b[0]", 64, ())
        engines.store_wait(current(), 0, ())

    result = run(kernel, Options(report="collect", fences=fences))
    assert len(result.findings) == (expected == "error") and len(result.warnings) == (expected == "warning")


def test_collect_gathers_several_findings():
    def kernel():
        a, b = Buffers("a", 1), Buffers("b", 1)
        tasks(x=lambda: (a.store(0, 1), b.store(0, 1)), y=lambda: (a.store(0, 2), b.store(0, 2)))
        Buffers("c", 1).load(0)

    kinds = [type(f) for f in run(kernel, Options(report="collect")).findings]
    assert kinds.count(errors.RaceError) == 2 and errors.PoisonError in kinds


def test_a_store_nobody_waits_for_is_an_error():
    def kernel():
        buffer = Buffers("b", 1)
        buffer.store(0, 7)
        sync.fence(current())
        engines.tma_store(current(), lambda data: None, buffer.views[0], "b[0]", 64, (), "b[0]")

    result = run(kernel, Options(report="collect"))
    assert [type(f) for f in result.findings] == [errors.InFlightError]
    assert "a TMA store of b[0] may still read" in str(result.findings[0])


def test_an_mma_nobody_waits_for_is_an_error():
    def kernel():
        bar = Bars("done", 1)
        engines.mma(current(), lambda: None, [], [], [bar[0]], ())

    with pytest.raises(errors.InFlightError, match="MMA of main may still run"):
        run(kernel)


@every_policy
def test_mmas_of_one_task_run_in_order_and_a_commit_covers_them(options):
    order = []

    def kernel():
        bar = Bars("done", 1)

        def issue():
            for i in range(4):
                engines.mma(current(), lambda i=i: order.append(i), [], [], [], ())
            engines.commit(current(), [bar[0]], ())

        def use():
            wait(bar[0], 0)
            order.append("used")

        tasks(issue=issue, use=use)

    assert run(kernel, options).clean
    assert order == [0, 1, 2, 3, "used"]


# ---------------------------------------------------------------- regions and views


def test_regions_are_split_only_where_views_differ():
    shadow = Shadow(64, 1, None)
    whole, left, right = shadow.region_of_range(0, 64), shadow.region_of_range(0, 32), shadow.region_of_range(32, 64)
    assert len(whole.atoms) == 2 and len(left.atoms) == len(right.atoms) == 1
    middle = shadow.region_of_range(16, 48)
    assert len(middle.atoms) == 2 and len(whole.atoms) == 4 and len(left.atoms) == 2
    assert sum(atom.size for atom in whole.atoms) == 64


@pytest.mark.parametrize("seed", range(20))
def test_regions_always_partition_what_they_cover(seed):
    rng, shadow = np.random.default_rng(seed), Shadow(96, 1, None)
    covers = []
    for _ in range(12):
        cells = np.unique(rng.integers(0, 96, rng.integers(1, 60)))
        covers.append((cells, shadow.region_of(cells.tobytes(), lambda cells=cells: cells)))
    for cells, region in covers:
        numbers = {atom.number for atom in region.atoms}
        assert set(np.flatnonzero(np.isin(shadow.owner, list(numbers)))) == set(cells)
        assert sum(atom.size for atom in region.atoms) == len(cells)


class _Cta:
    pid = (0, 0, 0)


@pytest.mark.parametrize(
    "mode, shape",
    [("plain", (128, 64)), ("plain", (64, 64)), ("plain", (256, 64)), ("half", (64, 128)), ("plain", (32, 64))],
)
def test_tensor_memory_tiles_read_back_what_was_written(mode, shape):
    storage = Storage(_Cta, "tmem", 128 * 512 * 4, "t")
    view = tmem_view(storage, 8, shape, np.float32, mode)
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    view.write(data)
    assert (view.read() == data).all()
    assert (view.columns(16, 16).read() == data[:, 16:32]).all()
    assert (view.derive(lambda a: a.T).read() == data.T).all()
    offsets = view.element_offsets()
    assert (storage.typed(np.float32)[offsets] == data).all()


def test_half_tiles_alias_a_tile_of_128_rows():
    """The accumulator of a two-CTA MMA with 64 rows: the left half in lanes 0-63, the right half in lanes 64-127."""
    storage = Storage(_Cta, "tmem", 128 * 64 * 4, "t")
    half, full = tmem_view(storage, 0, (64, 128), np.float32, "half"), tmem_view(storage, 0, (128, 64), np.float32)
    data = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    half.write(data)
    assert (full.read() == np.concatenate([data[:, :64], data[:, 64:]])).all()
    assert {a.number for a in half.region.atoms} == {a.number for a in full.region.atoms}


def test_narrower_reinterpretation_keeps_the_shape_in_elements():
    storage = Storage(_Cta, "smem", 4 * 16, "s")
    view = smem_view(storage, 0, (4, 4), np.float32)
    narrow = view.retype(np.float16)
    assert narrow.shape == (4, 4) and isinstance(narrow, View) and narrow.nbytes == 32


# ---------------------------------------------------------------- nothing leaks


def _busy():
    full, empty, ring = Bars("full", 2), Bars("empty", 2), Buffers("ring", 2)

    def producer():
        for i in range(1500):
            wait(empty[i % 2], i // 2 + 1)
            sync.expect_bytes(current(), full[i % 2], 64, ())
            engines.tma_load(
                current(), lambda: np.zeros(16, np.float32), [(ring.views[i % 2], "ring", full[i % 2])], 64, ()
            )

    def consumer():
        for i in range(1500):
            wait(full[i % 2], i // 2)
            ring.load(i % 2)
            arrive(empty[i % 2])
            sizes.append(len(current().clock))

    sizes = []
    tasks(producer=producer, consumer=consumer)
    return sizes


@every_policy
def test_finished_copies_leave_the_clocks(options):
    sizes = []
    assert run(lambda: sizes.extend(_busy()), options).clean
    assert max(sizes) < 400


def test_abandoned_tasks_are_ended_and_nothing_leaks():
    from greenlet import greenlet

    def kernel():
        bar = Bars("never", 1)
        tasks(a=lambda: wait(bar[0], 0), b=lambda: wait(bar[0], 0))

    def count():
        gc.collect()
        return sum(isinstance(o, greenlet) for o in gc.get_objects())

    before = count()
    for _ in range(300):
        with pytest.raises(errors.DeadlockError):
            run(kernel)
    assert count() <= before + 2


def test_an_interrupt_ends_every_task_and_the_next_launch_works():
    ended = []

    def kernel():
        bar = Bars("never", 1)

        def waiter():
            try:
                wait(bar[0], 0)
            finally:
                ended.append(True)

        def stopper():
            raise KeyboardInterrupt

        tasks(a=waiter, b=stopper)

    with pytest.raises(KeyboardInterrupt):
        run(kernel)
    assert ended == [True] and current() is None
    run(lambda: None)


@every_policy
@pytest.mark.parametrize("barrier_between", [False, True])
def test_a_fence_does_not_cover_what_is_stored_after_it(options, barrier_between):
    def kernel():
        ready, other, first, second = Bars("ready", 1), Bars("other", 1), Buffers("first", 1), Buffers("second", 1)

        def writer():
            first.store(0, 1)
            sync.fence(current())
            if barrier_between:
                arrive(other[0])
            second.store(0, 2)
            arrive(ready[0])

        def sender():
            wait(ready[0], 0)
            for buffer, label in ((first, "first[0]"), (second, "second[0]")):
                engines.tma_store(current(), lambda data: None, buffer.views[0], label, 64, ())
            engines.store_wait(current(), 0, ())

        tasks(writer=writer, sender=sender)

    found = run(kernel, options.but(report="collect", fences="strict")).findings
    assert [type(f) for f in found] == [errors.MissingFenceError] and "second[0]" in str(found[0])


@every_policy
def test_a_fence_covers_the_stores_of_others_that_were_waited_for_before_it(options):
    def kernel(late):
        stored, buffer = Bars("stored", 1), Buffers("b", 1)

        def writer():
            buffer.store(0, 7)
            arrive(stored[0])

        def sender():
            if late:
                sync.fence(current())
            wait(stored[0], 0)
            if not late:
                sync.fence(current())
            engines.tma_store(current(), lambda data: None, buffer.views[0], "b[0]", 64, ())
            engines.store_wait(current(), 0, ())

        tasks(writer=writer, sender=sender)

    strict = options.but(fences="strict")
    assert run(lambda: kernel(False), strict).clean
    with pytest.raises(errors.MissingFenceError):
        run(lambda: kernel(True), strict)
