"""Launches from several threads at once: each keeps its own options and sees its own Run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import jfa.emulator as emulator

try:
    import triton.language.extra.tlx as tlx
except ImportError:  # Triton without TLX
    tlx = None

emulator.install()
needs_tlx = pytest.mark.skipif(tlx is None, reason="needs TLX")


@triton.jit
def _powers(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    v, total = tl.load(x + i), tl.zeros((N,), tl.float32)
    for _ in range(n):
        total += v
        v = v * 0.5
    tl.store(o + i, total)


@triton.autotune([triton.Config({"N": 64}, num_warps=2)], key=["n"])
@triton.jit
def _tuned(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) * n)


@triton.jit
def _past_the_end(o, N: tl.constexpr):
    tl.store(o + tl.arange(0, N), 1.0)


def _in_threads(work, count=8):
    results, threads = [None] * count, []

    def call(number):
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    for number in range(count):
        threads.append(threading.Thread(target=call, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return results


def test_eight_threads_get_their_own_numbers():
    def work(number):
        for turn in range(5):
            n, x, out = number + turn, torch.randn(64), torch.zeros(64)
            with emulator.options(policy=("eager", "random")[number % 2], seed=turn):
                _powers[(1,)](x, out, n, 64)
            assert torch.allclose(out, x * (2 - 2.0 ** (1 - n)))
            _tuned[(1,)](x, out, n)
            assert torch.equal(out, x * n)
        return "right"

    assert _in_threads(work) == ["right"] * 8


def test_a_fault_in_one_thread_is_that_threads_alone():
    def work(number):
        if number == 3:
            return emulator.run(_past_the_end, (1,), torch.zeros(16), 64)
        return emulator.run(_past_the_end, (1,), torch.zeros(64), 64)

    runs = _in_threads(work)
    assert [bool(run.findings) for run in runs] == [number == 3 for number in range(8)]


def test_the_last_run_is_the_threads_own():
    here = emulator.run(_powers, (3,), torch.zeros(64), torch.zeros(64), 1, 64)
    others = _in_threads(
        lambda number: (emulator.run(_powers, (1,), torch.zeros(64), torch.zeros(64), 1, 64), emulator.last())
    )
    assert emulator.last() is here and all(run is last for run, last in others)


def test_the_hook_goes_in_once():
    emulator.uninstall()
    _in_threads(lambda number: emulator.install())
    emulator.uninstall()
    try:
        assert not hasattr(JITFunction.run, "__wrapped__")
    finally:
        emulator.install()
    assert hasattr(JITFunction.run, "__wrapped__") and not hasattr(JITFunction.run.__wrapped__, "__wrapped__")


def _replicated(product):
    """A warp-specialized kernel of this test's own: replicas of two tasks store the same."""

    @triton.jit
    def kernel(x, y, o, n, N: tl.constexpr, PRODUCT: tl.constexpr):
        start = tl.program_id(0) * N
        with tlx.async_tasks():
            with tlx.async_task("default", replicate=2):
                i = start + tl.arange(0, N)
                copy = tlx.async_task_replica_id()
                a, b = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)
                tl.store(o + i, (a * b if PRODUCT else a + b) + copy - copy, mask=i < n)
            with tlx.async_task(num_warps=1, replicate=2):
                i = start + tl.arange(0, N)
                copy = tlx.async_task_replica_id()
                a, b = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)
                tl.store(o + i, (a * b if PRODUCT else a + b) + copy - copy, mask=i < n)

    def work(number):
        n = 700 + number
        x, y = (torch.rand(n, generator=torch.Generator().manual_seed(number + k)) for k in range(2))
        out = torch.empty(n)
        kernel[lambda meta: (triton.cdiv(n, meta["N"]),)](x, y, out, n, 256, product)
        torch.testing.assert_close(out, x * y if product else x + y)
        return "right"

    return work


@needs_tlx
def test_two_warp_specialized_kernels_from_a_pool_of_threads():
    works = [_replicated(product) for product in (False, True)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(works[number % 2], number) for number in range(8)]
        assert [future.result() for future in futures] == ["right"] * 8


@triton.jit
def _without_a_default_task(x, o, N: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task(num_warps=1, replicate=2):
            i = tl.arange(0, N)
            tl.store(o + i, tl.load(x + i))


@needs_tlx
def test_a_refused_kernel_leaves_its_thread_of_the_pool_usable():
    with ThreadPoolExecutor(max_workers=1) as pool:
        refused = pool.submit(lambda: _without_a_default_task[(1,)](torch.zeros(64), torch.zeros(64), 64))
        with pytest.raises(triton.CompilationError, match="one and only one"):
            refused.result()
        assert pool.submit(_replicated(True), 1).result() == "right"
