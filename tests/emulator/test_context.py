"""One `Launch` per launch: launches inside launches give way to the outer one, failed ones leave nothing, threads never meet."""

import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.compiler.errors import CompilationError

import jfa.emulator as emulator
from jfa.emulator import errors, explore, sweep
from jfa.emulator.context import context
from jfa.emulator.rates import B200

emulator.install()


@triton.jit
def _plus(x, o, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(o + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def _stores_what_it_never_loaded(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i, mask=i < n))


@triton.jit
def _handed_over(x, o, N: tl.constexpr):
    """A producer and a consumer, whose barriers give other launches places to come between."""
    tile = tlx.local_alloc((N,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(full[0], 0)
            tl.store(o + tl.arange(0, N), tlx.local_load(tile[0]) * 2)
        with tlx.async_task(num_warps=4):
            tlx.local_store(tile[0], tl.load(x + tl.arange(0, N)))
            tlx.barrier_arrive(full[0], 1)


@triton.constexpr_function
def _host(call):
    call()
    return 3


@triton.jit
def _calls_the_host(x, o, n, call: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i, mask=i < n)
    more: tl.constexpr = _host(call)
    tl.store(o + i, v * more + tl.program_id(0), mask=i < n)


def _handed(x):
    out = torch.zeros_like(x)
    _handed_over[(1,)](x, out, x.numel())
    return out


def _idle():
    launch = context.launch
    return (
        launch.task is None and launch.memory is None and not (launch.has_undefined or launch.origins or launch.looks)
    )


def _nested_plus(seen):
    x, o = torch.arange(40.0), torch.full((40,), -1.0)
    _plus[(3,)](x, o, 40, 16)
    seen.append(torch.equal(o, x + 1))


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
def test_a_kernel_that_calls_the_host_that_launches_a_kernel(policy):
    x, o, seen = torch.randn(64), torch.zeros(64), []
    with emulator.options(policy=policy):
        _calls_the_host[(1,)](x, o, 60, lambda: _nested_plus(seen), 64)
    assert seen == [True] and torch.equal(o[:60], x[:60] * 3) and not o[60:].any() and _idle()


def test_a_nested_launch_with_another_number_of_warps_and_undefined_lanes_of_its_own():
    x, o, found = torch.randn(64), torch.zeros(64), []

    def inner():
        run = emulator.run(_stores_what_it_never_loaded, (1,), torch.zeros(8), torch.zeros(8), 5, 8, num_warps=8)
        found.extend(run.findings)

    run = emulator.run(_calls_the_host, (1,), x, o, 60, inner, 64, num_warps=2)
    assert run.clean and run.kernel == "_calls_the_host" and torch.equal(o[:60], x[:60] * 3)
    assert [type(f) for f in found] == [errors.PoisonError] and "stores 3 value(s)" in str(found[0])


def test_a_nested_launch_that_fails_leaves_the_outer_one_running():
    x, o = torch.randn(64), torch.zeros(64)

    def inner():
        with pytest.raises(errors.PoisonError):
            _stores_what_it_never_loaded[(1,)](torch.zeros(8), torch.zeros(8), 5, 8)

    _calls_the_host[(1,)](x, o, 60, inner, 64)
    assert torch.equal(o[:60], x[:60] * 3) and _idle()


def test_three_launches_inside_each_other():
    x, outs = torch.randn(64), [torch.zeros(64) for _ in range(3)]

    def launch(depth):
        inner = (lambda: launch(depth + 1)) if depth < 2 else (lambda: None)
        _calls_the_host[(1,)](x, outs[depth], 64, inner, 64)

    launch(0)
    assert all(torch.equal(o, x * 3) for o in outs) and _idle()


def test_a_launch_in_a_fault_is_not_broken_itself():
    x, results, calls = torch.randn(32), [], []

    def fault(kind, name, task, where):
        calls.append(kind)
        if len(calls) < 100:
            results.append(torch.equal(_handed(x), 2 * x))

    with emulator.options(fault=fault):
        assert torch.equal(_handed(x), 2 * x)
    assert results and all(results) and len(calls) < 20


def test_a_launch_in_the_rates_of_a_timed_run():
    class Rates:
        def __init__(self):
            self.inside = []

        def __getattr__(self, name):
            return getattr(B200, name)

        def demand(self, op, **facts):
            if len(self.inside) < 2:
                self.inside.append(None)
                x = torch.randn(16)
                with emulator.options(policy="eager"):
                    self.inside[-1] = torch.equal(_handed(x), 2 * x)
            return B200.demand(op, **facts)

    x, rates = torch.randn(32), Rates()
    with emulator.options(policy="timed", rates=rates):
        assert torch.equal(_handed(x), 2 * x)
    assert rates.inside == [True, True] and emulator.last().time > 0


def test_a_launch_within_an_exploration_and_its_replay():
    x, seen = torch.randn(32), []

    def launch():
        out = torch.zeros(32)
        _calls_the_host[(1,)](x, out, 32, lambda: seen.append(torch.equal(_handed(x), 2 * x)), 32)
        return [out, _handed(x)]

    alone = explore.explore(lambda: [_handed(x)])
    found = explore.explore(launch)
    assert found.proved and alone.proved and seen and all(seen)
    assert found.steps == alone.steps + 1  # the plain kernel's end; the launch within it takes none of the steps


def test_a_mutant_of_the_outer_launch_is_found_with_launches_inside():
    x = torch.randn(32)

    def launch():
        out = torch.zeros(32)
        _calls_the_host[(1,)](x, out, 32, lambda: _handed(x), 32)
        return [out, _handed(x)]

    result = sweep.sweep(launch)
    assert result.mutants and not result.clean


@pytest.mark.parametrize("n", [5, 7])
def test_what_a_failed_launch_leaves_behind(n):
    with pytest.raises(errors.PoisonError):
        _stores_what_it_never_loaded[(1,)](torch.zeros(8), torch.zeros(8), n, 8)
    assert _idle()
    with pytest.raises(CompilationError, match="division by zero"):
        _calls_the_host[(1,)](torch.zeros(8), torch.zeros(8), n, lambda: 1 / 0, 8)
    assert _idle() and np.geterr()["divide"] == "warn"
    x = torch.randn(32)
    assert torch.equal(_handed(x), 2 * x)


def test_a_kernel_that_waits_for_another_thread_that_launches():
    """Launches wait for nobody else's, so no ring of waiting threads can form."""
    x, o, seen = torch.randn(64), torch.zeros(64), []

    def elsewhere():
        thread = threading.Thread(target=lambda: seen.append(torch.equal(_handed(x), 2 * x)), daemon=True)
        thread.start()
        thread.join(60)

    _calls_the_host[(1,)](x, o, 60, elsewhere, 64)
    assert seen == [True] and torch.equal(o[:60], x[:60] * 3)


def test_a_thread_without_a_launch_has_none_while_others_run():
    x, seen = torch.randn(64), []

    def look():
        thread = threading.Thread(target=lambda: seen.append(_idle()))
        thread.start()
        thread.join()

    _calls_the_host[(1,)](x, torch.zeros(64), 60, look, 64)
    assert seen == [True]


def test_threads_count_for_themselves():
    x = torch.randn(64)

    def elsewhere():
        thread = threading.Thread(target=lambda: _handed(x))
        thread.start()
        thread.join()

    with emulator.counting() as counts:
        _calls_the_host[(1,)](x, torch.zeros(64), 60, elsewhere, 64)
    assert (counts.launches, counts.loads, counts.stores) == (1, 1, 1)


def test_eight_threads_with_every_policy_at_once():
    results = [None] * 8

    def work(number):
        x = torch.randn(64, generator=torch.Generator().manual_seed(number))
        policy = ("eager", "lazy", "random", "timed")[number % 4]
        good = []
        for turn in range(4):
            with emulator.options(policy=policy, seed=turn):
                good.append(torch.equal(_handed(x), 2 * x))
            run = emulator.run(_stores_what_it_never_loaded, (1,), torch.zeros(8), torch.zeros(8), number % 8, 8)
            good.append([str(f).splitlines()[0].startswith(f"stores {8 - number % 8} value") for f in run.findings])
        results[number] = good

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[True, [True]] * 4] * 8
