"""Grids, clusters, the CLC queue, limits of a launch, repeatability."""

import numpy as np
import pytest

from jfa.emulator import errors
from jfa.emulator.machine import Machine, Storage, current, engines, launch, smem_view, sync
from jfa.emulator.options import Options

from .parts import POLICIES, Bars, name, run, tasks, wait

every_policy = pytest.mark.parametrize("options", POLICIES, ids=name)


@every_policy
def test_every_program_runs_once(options):
    seen = []
    run(lambda: seen.append(current().cta.pid), options, grid=(3, 2, 2))
    assert sorted(seen) == sorted((x, y, z) for x in range(3) for y in range(2) for z in range(2))


def test_clusters_are_blocks_of_the_grid():
    seen = []
    run(lambda: seen.append((current().cta.rank, current().cta.pid)), grid=(4, 2, 1), cluster=(2, 1, 1))
    assert all(pid[0] % 2 == rank for rank, pid in seen) and len(seen) == 8


@pytest.mark.parametrize(
    "grid, cluster, warps, kind",
    [
        ((3, 1, 1), (2, 1, 1), 4, errors.LaunchError),
        ((32,), (32,), 4, errors.LaunchError),
        ((1,), (1,), 64, errors.ThreadLimitError),
    ],
)
def test_impossible_launches(grid, cluster, warps, kind):
    with pytest.raises(kind):
        launch(lambda: None, grid, cluster, warps)


def _clc_worker(done, queries):
    cta = current().cta
    storage = Storage(cta, "smem", 16, "response")
    response = engines.ClcResponse(cta, 1, lambda stage: smem_view(storage, 0, (16,), np.uint8))
    full, tile, phase = Bars("full", 1), cta.pid[0], 0
    while tile is not None:
        done.append(tile)
        sync.expect_bytes(current(), full[0], 16, ())
        engines.clc_try_cancel(current(), [response], 0, [full[0]], ())
        queries.append(1)
        wait(full[0], phase)
        phase ^= 1
        origin = engines.clc_query(current(), response, 0, ())
        tile = None if origin is None else origin[0]


@pytest.mark.parametrize("tiles, workers, failing", [(10, 4, 4), (3, 4, 3), (1, 1, 1)])
def test_clc_hands_out_each_tile_once_and_ends(tiles, workers, failing):
    """Sources: facebookexperimental/triton PR 399 (result not returned) and PR 908 (only one CTA armed its barrier)."""
    for seed in range(25):
        done, queries = [], []
        machine = Machine(Options(policy="random", seed=seed, max_ctas=workers))
        machine.launch(lambda: _clc_worker(done, queries), (tiles, 1, 1))
        assert sorted(done) == list(range(tiles))
        assert machine.stats["clc failed queries"] == failing
        assert len(queries) == tiles


def test_clc_with_no_tiles():
    done = []
    machine = Machine()
    machine.launch(lambda: _clc_worker(done, []), (0, 1, 1))
    assert done == [] and machine.stats["clc failed queries"] == 0


def test_asking_again_after_the_last_answer_is_misuse():
    def kernel():
        cta = current().cta
        storage = Storage(cta, "smem", 16, "response")
        response = engines.ClcResponse(cta, 1, lambda stage: smem_view(storage, 0, (16,), np.uint8))
        full = Bars("full", 1)
        for phase in range(2):
            sync.expect_bytes(current(), full[0], 16, ())
            engines.clc_try_cancel(current(), [response], 0, [full[0]], ())
            wait(full[0], phase)

    with pytest.raises(errors.ClcError, match="asks for another tile"):
        run(kernel)


def test_a_polling_program_lets_later_ones_start():
    flag = []

    def kernel():
        if current().cta.pid[0] < 8:
            while not flag:
                current().pause()
        else:
            flag.append(True)

    for options in POLICIES:
        flag.clear()
        run(kernel, options, grid=9)


def test_polling_for_nothing_ends():
    def kernel():
        while True:
            current().pause()

    with pytest.raises(errors.LivelockError, match="polls"):
        run(kernel)


@every_policy
def test_the_same_schedule_gives_the_same_run(options):
    def once():
        trace = []

        def kernel():
            bar = Bars("b", 1, 2)

            def body(label):
                for i in range(3):
                    current().machine.scheduler.step(current(), "op", "", ())
                    trace.append((label, i))

            tasks(**{label: (lambda label=label: body(label)) for label in "xyz"})
            assert bar

        run(kernel, options)
        return trace

    assert once() == once()


def test_timed_books_shared_resources_once():
    class Rates:
        """Every load takes 10 cycles of the one memory port."""

        def demand(self, op, **facts):
            from jfa.emulator.rates import Demand

            return Demand({"smem": 10.0} if op == "local_load" else {}, 0.0)

    def kernel():
        def body():
            for _ in range(3):
                current().machine.scheduler.step(current(), "local_load", "", ())
                current().machine.clock.spend(current(), "local_load", "load", (), space="smem", bytes=1, warps=4)

        tasks(a=body, b=body)

    result = run(kernel, Options(policy="timed", rates=Rates(), trace=True))
    assert result.time == 60
    spans = sorted(e[3:5] for e in result.events)
    assert len(spans) == 6 and spans[-1][1] == 60
