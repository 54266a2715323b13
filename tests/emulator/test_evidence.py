"""What errors keep for programs and pictures: who waits for whom in a deadlock, and the clocks of a race."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.emulator import errors

tlx = pytest.importorskip("triton.language.extra.tlx")
from .reports import kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def broken(how, kind, prefix, turns=lambda n: True, **options):
    """The error of our pipeline when operations `kind` on barriers of one array are broken as `how` says, on some turns."""
    count = itertools.count()

    def fault(k, name, task, where):
        return how if k == kind and name.startswith(prefix) and turns(next(count)) else None

    with emulator.options(fault=fault, **options), pytest.raises(errors.EmulatorError) as caught:
        kernels.double()
    return caught.value


def test_a_deadlock_says_who_waits_where_and_who_has_arrived_there():
    error = broken("drop", "barrier_arrive", "empty_bars")
    waits = {wait.task: wait for wait in error.waits}
    assert {task: (wait.on, wait.came) for task, wait in waits.items()} == {
        "load": ("empty_bars[0]", ()),
        "compute": ("full_bars[0]", ("load",)),
        "store": ("result_full[0]", ("compute",)),
    }
    assert all("phase" in wait.state and wait.where for wait in error.waits) and error.ended == ()


@triton.jit
def release(bars, slot):
    tlx.barrier_arrive(bars[slot], 1)


@triton.jit
def hand_over(ARRIVE: tl.constexpr):
    """Two tasks and two turns; none is handed over, or only the first."""
    ready = tlx.alloc_barriers(2)
    back = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # first
            for turn in range(2):
                if ARRIVE == "first turn" and turn == 0:
                    release(ready, turn)
            tlx.barrier_wait(back[0], 0)
        with tlx.async_task(num_warps=1):  # second
            for turn in range(2):
                tlx.barrier_wait(ready[turn], 0)
            tlx.barrier_arrive(back[0], 1)


@pytest.mark.parametrize("arrive, on", [("never", "ready[0]"), ("first turn", "ready[1]")])
def test_where_nobody_came_the_code_says_who_should_through_functions_too(arrive, on):
    with pytest.raises(errors.DeadlockError) as error:
        hand_over[(1,)](arrive)
    waits = {wait.task: (wait.on, wait.came, wait.due) for wait in error.value.waits}
    assert waits == {"first": ("back[0]", (), ("second",)), "second": (on, (), ("first",))}


@triton.jit
def pair_of_unequal(a_desc, b_desc, blocks, LESS: tl.constexpr, BOTH: tl.constexpr):
    """A product of two CTAs per block; the second CTA loads LESS blocks fewer, and hears of the last product only with BOTH."""
    rank = tlx.cluster_cta_rank()
    a = tlx.local_alloc((128, 32), tl.bfloat16, 1)
    b = tlx.local_alloc((32, 32), tl.bfloat16, 1)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    empty = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # ends
            tlx.barrier_wait(done[0], 0)
        with tlx.async_task(num_warps=1):  # mma
            if rank == 0:
                for k in range(blocks):
                    tlx.barrier_wait(full[0], k & 1)
                    tlx.async_dot(a[0], b[0], acc[0], use_acc=k > 0, mBarriers=[empty[0]], two_ctas=True)
                tlx.tcgen05_commit(done[0], two_ctas=BOTH)
        with tlx.async_task(num_warps=1):  # load
            for k in range(blocks - LESS * rank):
                tlx.barrier_wait(empty[0], (k & 1) ^ 1)
                tlx.barrier_expect_bytes(full[0], 2 * 2 * (128 * 32 + 32 * 32), pred=rank == 0)
                tlx.async_descriptor_load(a_desc, a[0], [rank * 128, 0], full[0], two_ctas=True)
                tlx.async_descriptor_load(b_desc, b[0], [0, rank * 32], full[0], two_ctas=True)


def _unequal(less, both):
    boxes = [
        TensorDescriptor.from_tensor(torch.ones(rows, columns).bfloat16(), box)
        for rows, columns, box in ((256, 32, [128, 32]), (32, 64, [32, 32]))
    ]
    with pytest.raises(errors.EmulatorError) as caught:
        pair_of_unequal[(2,)](*boxes, 3, less, both, ctas_per_cga=(2, 1, 1))
    error = caught.value
    return {wait.task: (wait.on, wait.came, wait.due) for wait in error.waits}, error.ended


def test_bytes_that_never_come_leave_the_graph_of_who_waits_and_the_twin_barrier_of_another_cta_has_its_arriver():
    waits, ended = _unequal(less=1, both=True)
    first, second = "cta(0, 0, 0)", "cta(1, 0, 0)"
    assert waits == {
        f"{first}/ends": ("done[0] of cta 0", (), (f"{first}/mma",)),
        f"{first}/mma": ("full[0] of cta 0", (f"{second}/load",), ()),
        f"{second}/ends": ("done[0] of cta 1", (), (f"{first}/mma",)),
    }
    assert f"{second}/load" in ended


def test_a_commit_that_stays_at_home_leaves_the_other_cta_waiting():
    waits, ended = _unequal(less=0, both=False)
    assert list(waits) == ["cta(1, 0, 0)/ends"] and waits["cta(1, 0, 0)/ends"][0] == "done[0] of cta 1"
    assert "cta(0, 0, 0)/mma" in ended


@triton.jit
def renamed(tail_ptr, head_ptr):
    """Barriers under other names in each function; `swap` hands them on in another order."""
    left = tlx.alloc_barriers(1)
    right = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # one
            swap(left, right)
        with tlx.async_task(num_warps=1):  # two
            swap(second=left, first=right)


@triton.jit
def swap(first, second):
    tlx.barrier_wait(first[0], 0)
    release(bars=second, slot=0)


def test_names_are_followed_through_arguments():
    with pytest.raises(errors.DeadlockError) as error:
        renamed[(1,)](torch.empty(1), torch.empty(1))
    waits = {wait.task: (wait.on, wait.due) for wait in error.value.waits}
    assert waits == {"one": ("left[0]", ("two",)), "two": ("right[0]", ("one",))}


@triton.jit
def forgotten(bar_count: tl.constexpr):
    bars = tlx.alloc_barriers(bar_count)
    tlx.barrier_wait(bars[bar_count - 1], 0)


def test_where_no_code_arrives_nobody_is_due():
    with pytest.raises(errors.DeadlockError) as error:
        forgotten[(1,)](3)
    assert [(wait.on, wait.came, wait.due) for wait in error.value.waits] == [("bars[2]", (), ())]


@triton.jit
def two_must_come(out_ptr):
    both = tlx.alloc_barriers(1, arrive_count=2)
    never = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # reader
            for turn in range(2):
                tlx.barrier_wait(both[0], turn)
        with tlx.async_task(num_warps=1):  # steady
            for turn in range(2):
                tlx.barrier_arrive(both[0], 1)
                tlx.barrier_wait(both[0], turn)
        with tlx.async_task(num_warps=1):  # stuck
            tlx.barrier_arrive(both[0], 1)
            tlx.barrier_wait(never[0], 0)


def test_who_has_arrived_in_this_phase_is_not_due_again():
    with pytest.raises(errors.DeadlockError) as error:
        two_must_come[(1,)](torch.empty(1))
    assert {wait.task: wait.came for wait in error.value.waits} == {
        "reader": ("stuck",),
        "steady": ("stuck",),
        "stuck": (),
    }


def test_tasks_that_have_ended_are_named():
    error = broken("drop", "barrier_arrive", "result_empty")
    assert [(wait.task, wait.on, wait.came) for wait in error.waits] == [
        ("compute", "result_empty[0]", ()),
        ("store", "result_full[0]", ("compute",)),
    ]
    assert error.ended == ("load",)


@pytest.mark.parametrize("prefix, who", [("full_bars", ("load", "compute")), ("result_empty", ("store", "compute"))])
def test_the_later_access_of_a_race_does_not_know_of_the_earlier(prefix, who):
    error = broken("drop", "barrier_wait", prefix, policy="random")
    earlier, later = error.accesses
    assert earlier.write or later.write
    # a copy has one step, which later has not heard of
    assert earlier.clock[earlier.line] == 1 and later.clock[earlier.line] == 0
    assert earlier.line == earlier.actor and who[0] in earlier.line and later.line == who[1]
    assert set(earlier.clock) == set(later.clock) == {"main", "load", "compute", "store", earlier.line}
    assert all(touch.actor in str(error) and touch.buffer in str(error) and touch.where for touch in error.accesses)


def test_two_copies_of_one_task_have_lines_of_their_own():
    earlier, later = broken("drop", "barrier_wait", "empty_bars", policy="eager").accesses
    assert earlier.line != later.line and later.clock[earlier.line] == 0


def test_wrong_bytes_that_stop_everybody_have_waits_and_no_accesses():
    error = broken("half", "barrier_expect_bytes", "full_bars")
    assert isinstance(error, errors.ExpectBytesError) and error.accesses == ()
    assert "full_bars[0]" in {wait.on for wait in error.waits}


@triton.jit
def wrong_parity():
    tlx.barrier_wait(tlx.alloc_barriers(1)[0], 2)


def test_other_errors_have_neither():
    with pytest.raises(errors.ParityError) as caught:
        wrong_parity[(1,)]()
    assert caught.value.waits == () and caught.value.accesses == ()


@triton.jit
def _predicated(y, n, LEAST: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    tlx.barrier_wait(bar[0], n, pred=n < LEAST)
    tl.store(y, 1.0)


@pytest.mark.parametrize("n, least, found", [(3, 2, False), (2, 2, False), (3, 4, True)])
def test_a_wait_that_its_predicate_turns_off_needs_no_parity(n, least, found):
    run = emulator.run(_predicated, (1,), torch.zeros(1), n, least)
    assert [type(f) for f in run.findings] == [errors.ParityError] * found
