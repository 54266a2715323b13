"""What every report must say: a line, the turn of a loop, both arrivers, which buffer lies in which, who passed too early."""

import math
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
pytestmark = pytest.mark.filterwarnings("ignore")
HERE = r"test_report_facts\.py:\d+"


def _report(kernel, *args, kind=errors.EmulatorError, grid=(1,), launch=None, **options):
    with emulator.options(**options), pytest.raises(kind) as error:
        kernel[grid](*args, **(launch or {}))
    return str(error.value)


@triton.jit
def arrives_far_away(x_ptr, RANK: tl.constexpr):
    bar = tlx.alloc_barriers(2, arrive_count=1)
    tlx.barrier_arrive(bar[1], 1, RANK)
    tl.store(x_ptr, 1.0)


@triton.jit
def spins(x_ptr):
    n = 1
    while n < 5:
        n *= 1
    tl.store(x_ptr, n)


@triton.jit
def loads_outside(src):
    tile = tlx.local_alloc((8, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 1024)
    tlx.async_descriptor_load(src, tile[0], [0, 3], full[0])
    tlx.barrier_wait(full[0], 0)


def _box():
    return TensorDescriptor.from_tensor(torch.randn(16, 64), [8, 32])


@pytest.mark.parametrize("policy", ["eager", "lazy", "random", "timed"])
@pytest.mark.parametrize(
    "kernel, argument, extra, kind",
    [
        (arrives_far_away, torch.zeros(1), (5,), errors.ClusterError),
        (spins, torch.zeros(1), (), errors.LivelockError),
        (loads_outside, None, (), errors.DescriptorError),
    ],
)
def test_every_report_has_a_line(kernel, argument, extra, kind, policy):
    options = dict(grid=(2,), launch={"ctas_per_cga": (2, 1, 1)}) if kernel is arrives_far_away else {}
    argument = _box() if argument is None else argument
    text = _report(kernel, argument, *extra, kind=kind, policy=policy, max_steps=3000, **options)
    assert re.search(HERE, text) and "at ?" not in text


def test_a_launch_that_cannot_start_names_the_kernel():
    text = _report(spins, torch.zeros(1), kind=errors.LaunchError, grid=(3,), launch={"ctas_per_cga": (2, 1, 1)})
    assert re.search(HERE, text)


@triton.jit
def two_into_one(src, STAGES: tl.constexpr, WHILE: tl.constexpr):
    tiles = tlx.local_alloc((8, 32), tl.float32, STAGES)
    full = tlx.alloc_barriers(4)
    if WHILE:
        step = 0
        while step < 4:
            tlx.barrier_expect_bytes(full[step], 1024)
            tlx.async_descriptor_load(src, tiles[step % STAGES], [0, 0], full[step])
            step += 1
    else:
        for outer in range(2):
            for k in range(2):
                tlx.barrier_expect_bytes(full[outer * 2 + k], 1024)
                tlx.async_descriptor_load(src, tiles[(outer * 2 + k) % STAGES], [0, 0], full[outer * 2 + k])
    for k in range(4):
        tlx.barrier_wait(full[k], 0)


@pytest.mark.parametrize(
    "stages, loops, first, second",
    [
        (3, True, "(step = 0)", "(step = 3)"),
        (1, True, "(step = 0)", "(step = 1)"),
        (2, False, "(outer = 0, k = 0)", "(outer = 1, k = 0)"),
        (3, False, "(outer = 0, k = 0)", "(outer = 1, k = 1)"),
    ],
)
def test_a_double_write_says_which_turns(stages, loops, first, second):
    text = _report(two_into_one, _box(), stages, loops, kind=errors.RaceError)
    accesses = [line for line in text.splitlines() if "write of tiles" in line]
    assert len(accesses) == 2 and accesses[0].endswith(first) and accesses[1].endswith(second)


@triton.jit
def turns_after_a_loop(x_ptr):
    tile = tlx.local_alloc((16,), tl.float32, 1)
    for _first in range(3):
        tlx.local_store(tile[0], tl.zeros((16,), tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for again in range(2):
                tlx.local_store(tile[0], tl.zeros((16,), tl.float32) + again)
        with tlx.async_task(num_warps=4):  # reader
            tl.store(x_ptr + tl.arange(0, 16), tlx.local_load(tile[0]))


def test_a_loop_that_is_over_is_not_named():
    text = _report(turns_after_a_loop, torch.zeros(16), kind=errors.RaceError)
    assert "_first" not in text and "(again = " in text


@triton.jit
def aliased(x_ptr, SMEM: tl.constexpr):
    kind: tl.constexpr = tlx.storage_kind.smem if SMEM else tlx.storage_kind.tmem
    scores = tlx.local_alloc((128, 64), tl.float32, 1, kind)
    factors = tlx.local_alloc((128, 32), tl.float32, 2, kind, reuse=scores)
    tlx.local_store(scores[0], tl.zeros((128, 64), tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(factors[1], tl.zeros((128, 32), tl.float32))
        with tlx.async_task(num_warps=4):  # reader
            tl.store(x_ptr, tl.sum(tlx.local_load(scores[0])))


@pytest.mark.parametrize("smem, cells", [(False, "columns"), (True, "bytes")])
def test_aliases_are_explained(smem, cells):
    text = _report(aliased, torch.zeros(1), smem, kind=errors.RaceError)
    assert f"factors[1] lies in the {cells} of scores[0]" in text


@triton.jit
def too_many(x_ptr):
    bar = tlx.alloc_barriers(1, arrive_count=5)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(bar[0], 4)
        with tlx.async_task(num_warps=4):  # stranger
            tlx.barrier_arrive(bar[0], 3)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_over_arrival_names_both_arrivers(policy):
    summary = _report(too_many, torch.zeros(1), kind=errors.OverArrivalError, policy=policy).splitlines()[0]
    assert "default" in summary and "stranger" in summary


@triton.jit
def too_early(src, out, USE: tl.constexpr):
    tile = tlx.local_alloc((8, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    go = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(full[0], 1)
            if USE == "read":
                at = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
                tl.store(out + at, tlx.local_load(tile[0]))
            tlx.barrier_wait(full[0], 1)
            tlx.barrier_wait(go[0], 0)
        with tlx.async_task(num_warps=1):  # producer
            tlx.barrier_wait(go[0], 0)
            tlx.barrier_expect_bytes(full[0], 1024)
            tlx.async_descriptor_load(src, tile[0], [0, 0], full[0])


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("use, kind", [("read", errors.PoisonError), ("", errors.DeadlockError)])
def test_reports_say_who_passed_before_anything_had_arrived(use, kind, policy):
    text = _report(too_early, _box(), torch.zeros(8, 32), use, kind=kind, policy=policy)
    assert "default waited on full[0] (parity 1) and passed before anything had arrived" in text


def test_a_producer_that_rightly_passes_is_no_note_of_a_race():
    text = _report(two_into_one, _box(), 1, False, kind=errors.RaceError)
    assert "passed before anything" not in text


@triton.jit
def python_math(x_ptr):
    tl.store(x_ptr, math.log(tl.load(x_ptr)))


@triton.jit
def numpy_math(x_ptr):
    at = tl.arange(0, 4)
    tl.store(x_ptr + at, np.exp(tl.load(x_ptr + at)))


@triton.jit
def torch_math(x_ptr):
    tl.store(x_ptr, torch.exp(tl.load(x_ptr)))


@pytest.mark.parametrize("kernel", [python_math, numpy_math, torch_math])
def test_mathematics_of_the_host_is_explained(kernel):
    with emulator.options(), pytest.raises(triton.CompilationError, match=r"use tl\.exp"):
        kernel[(1,)](torch.ones(4))


def test_a_kernel_without_its_decorator_is_named():
    def plain(x_ptr):
        tl.store(x_ptr, 1.0)

    with pytest.raises(TypeError, match=r"`plain`.*(\n.*)?@triton\.jit"):
        emulator.run(plain, (1,), torch.zeros(1))
