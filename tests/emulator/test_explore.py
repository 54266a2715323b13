"""Exploration of kernels: every class of schedules of a small instance, and of each mutant that the sweeps call clean."""

import os

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator import errors, explore, sweep

from . import tutorials
from .test_sweep import LAUNCHES, SUPERFLUOUS

tlx = pytest.importorskip("triton.language.extra.tlx")
from .reports import kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
needs_tutorials = pytest.mark.skipif(not os.path.isdir(tutorials.TUTORIALS), reason="needs fbtriton's tutorials")


emulator.install()


def launch_pipeline():
    return [kernels.double()[0]]


def launch_broken():
    return [kernels.double("dropped arrive")[0]]


def test_our_pipeline_has_one_class_of_schedules():
    found = explore.explore(launch_pipeline)
    assert found.proved and found.classes == 1 and found.outcomes == {explore.OK: 1}


@pytest.mark.parametrize("fault", kernels.FAULTS)
def test_a_bad_schedule_replays(fault):
    found = explore.explore(lambda: [kernels.double(fault)[0]], fences="strict")
    assert not found.clean and not found.exhausted and found.first.schedule in str(found)
    with emulator.options(policy=found.first.schedule, fences="strict"), pytest.raises(errors.EmulatorError) as error:
        kernels.double(fault)
    assert type(error.value).__name__ == found.first.kind


def test_several_launches_are_one_schedule():
    found = explore.explore(lambda: [kernels.double()[0], kernels.double()[0]])
    assert found.proved and found.classes == 1 and found.steps == 2 * explore.explore(launch_pipeline).steps


def test_a_result_that_is_not_the_expected_one_is_found():
    found = explore.explore(launch_pipeline, expected=[kernels.double()[1] + 1])
    assert found.first.kind == "wrong result"


@triton.jit
def _first_come(y, ORDERED: tl.constexpr):
    """Two tasks arrive at one barrier; the waiter can miss the first phase unless the second arrival follows from its wait."""
    full = tlx.alloc_barriers(1, arrive_count=1)
    seen = tlx.alloc_barriers(1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(full[0], 0)
            if ORDERED:
                tlx.barrier_arrive(seen[0], 1)
            tlx.barrier_wait(full[0], 1)
        with tlx.async_task(num_warps=1):
            tlx.barrier_arrive(full[0], 1)
        with tlx.async_task(num_warps=1):
            if ORDERED:
                tlx.barrier_wait(seen[0], 0)
            tlx.barrier_arrive(full[0], 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_launch_that_returns_its_kernel_or_nothing(ordered):
    launches = (
        lambda: _first_come[(1,)](torch.zeros(1), ordered),
        lambda: [None, _first_come[(1,)](torch.zeros(1), ordered)],
    )
    for launch in launches:
        found = explore.explore(launch)
        assert found.proved if ordered else found.first.kind == "PhaseError"


@needs_tutorials
def test_a_warp_specialized_gemm_of_two_tiles_and_three_blocks_is_exhausted():
    launch, (expected,), tolerance = tutorials._gemm("blackwell_gemm_ws", 256, 128, 192, tutorials.GEMM_WS)()
    with tutorials.no_gpu(sms=1), emulator.options(max_ctas=1):
        found = explore.explore(launch, expected=[expected], tolerance=tolerance)
    assert found.proved and found.steps > 60


@pytest.mark.slow
@needs_tutorials
@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_sweep_calls_clean_has_a_bad_schedule_or_a_proof(name):
    launch, _, _ = LAUNCHES[name]()
    torch.set_num_threads(1)
    with tutorials.no_gpu(sms=1), emulator.options(max_ctas=1):
        assert explore.explore(launch).proved
        for mutant in sweep.mutants_of(sweep.sites(launch)):
            if (mutant.site.line, mutant.site.kind) in SUPERFLUOUS[name]:
                found = explore.mutant(mutant, launch, executions=200)
                print(mutant, found)
                assert found.proved or found.first is not None


SMALL = {
    "hopper gemm_ws": tutorials._gemm("hopper_gemm_ws", 128, 256, 128, tutorials.HOPPER_WS),
    "hopper gemm cooperative": tutorials.CASES["hopper gemm cooperative"],
    "hopper fa_ws": tutorials._attention("hopper_fa_ws", 128, 128, False, tutorials.FA_HOPPER, takes_causal=False),
    "gemm_clc": tutorials._gemm("blackwell_gemm_clc", 128, 256, 128, tutorials.GEMM_CLC),
}
"""Launches of public kernels that are small enough to explore each mutant that a sweep calls clean."""


@needs_tutorials
@pytest.mark.parametrize("name", SMALL)
def test_each_clean_mutant_of_a_small_launch_has_a_bad_schedule_or_a_proof(name):
    """One tile of few blocks: what no sweep finds there, no schedule shows either."""
    launch, _, _ = SMALL[name]()
    torch.set_num_threads(1)
    with tutorials.no_gpu(sms=1), emulator.options(max_ctas=1):
        assert explore.explore(launch).proved
        swept = sweep.sweep(launch)
        assert len(swept.mutants) > 20 and len(swept.found) > 3 * len(swept.clean)
        found = {str(mutant): explore.mutant(mutant, launch, executions=200) for mutant in swept.clean}
    assert {name: str(one) for name, one in found.items() if not (one.proved or one.first is not None)} == {}
