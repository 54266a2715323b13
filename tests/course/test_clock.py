"""The limit on modelled cycles: what is counted, what the report says, and what cannot get round it."""

import pytest
import torch

pytest.importorskip("triton")

from jfa.course.judge import Answer, judge  # noqa: E402
from jfa.course.paths import Course  # noqa: E402
from jfa.course.spec import Case, Exercise, Limit, Output  # noqa: E402
from tests.support import ROOT  # noqa: E402

HEAD = """
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def product(a_desc, b_desc, out_ptr, steps, N: tl.constexpr, DEPTH: tl.constexpr):
    a = tlx.local_alloc((N, N), tl.float16, DEPTH)
    b = tlx.local_alloc((N, N), tl.float16, DEPTH)
    acc = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(DEPTH)
    done = tlx.alloc_barriers(DEPTH)
    for step in range(steps):
        slot = step % DEPTH
"""
WAITS = """
        tlx.barrier_wait(done[slot], (step // DEPTH - 1) & 1)
        tlx.barrier_expect_bytes(loaded[slot], 4 * N * N)
        tlx.async_descriptor_load(a_desc, a[slot], [0, step * N], loaded[slot])
        tlx.async_descriptor_load(b_desc, b[slot], [step * N, 0], loaded[slot])
        tlx.barrier_wait(loaded[slot], (step // DEPTH) & 1)
        tlx.async_dot(a[slot], b[slot], acc[0], use_acc=step > 0, mBarriers=[done[slot]])
"""
TAIL = """
    last = steps - 1
    tlx.barrier_wait(done[last % DEPTH], (last // DEPTH) & 1)
    rows = tl.arange(0, N)
    tl.store(out_ptr + rows[:, None] * N + rows[None, :], tlx.local_load(acc[0]))
"""
KERNEL = HEAD + WAITS + TAIL
HOST = """

def multiply(a, b):
    from triton.tools.tensor_descriptor import TensorDescriptor
    n = a.shape[0]
    out = torch.empty(n, n)
    a_desc, b_desc = (TensorDescriptor.from_tensor(x, [n, n]) for x in (a, b))
    LAUNCH
    return out
"""
ONCE = "product[(1,)](a_desc, b_desc, out, b.shape[0] // n, N=n, DEPTH=2)"
EAGERLY = "import jfa.emulator as e\n    with e.options(policy='eager'):\n        " + ONCE


def source(launch=ONCE, kernel=KERNEL):
    """A whole cell: the kernel and the host function that launches it."""
    return kernel + HOST.replace("LAUNCH", launch)


def cases(seed):
    g = torch.Generator().manual_seed(seed)
    return [
        Case(f"{k} columns", (torch.randn(64, k, generator=g).half(), torch.randn(k, 64, generator=g).half()))
        for k in (128, 512)
    ]


def exercise(at_most):
    return Exercise(
        id="97.1",
        title="A product",
        name="multiply",
        where="emulator",
        cases=cases,
        reference=lambda a, b: a @ b,
        outputs=(Output("out", ("row", "column")),),
        tol=1e-2,
        limits=(Limit("in time", "cycles", at_most=at_most, text="few cycles"),),
        time_limit=20.0,
    )


def judged(cell, at_most):
    return judge(exercise(at_most), Answer(cell), Course(ROOT))


def cycles_in(message):
    """The number of modelled cycles that a report names."""
    return int(message.split(" modelled cycles")[0].split()[-1].replace(",", ""))


def test_a_limit_above_the_modelled_cycles_is_kept_and_one_below_is_broken():
    tight = judged(source(), 1)
    assert tight.state == "wrong method" and tight.failed.name == "in time"
    need = cycles_in(tight.message)
    by_case = lambda case: need if case.args[0].shape[1] == 128 else 10 * need  # noqa: E731
    assert judged(source(), by_case).passed
    assert judged(source(), lambda case: by_case(case) - 1).state == "wrong method"


def test_the_report_names_the_busiest_unit_and_the_longest_wait():
    message = judged(source(), 1).message
    assert "modelled cycles on a B200" in message and "the limit is 1 (few cycles)" in message
    assert "the busiest unit is" in message and "the longest wait is main's for loaded" in message


def test_launches_add_up():
    once, twice = (judged(source(launch), 1).message for launch in (ONCE, f"{ONCE}\n    {ONCE}"))
    cycles = [cycles_in(once), cycles_in(twice)]
    assert abs(cycles[1] - 2 * cycles[0]) <= 1 and "2 launches, one after another" in twice and "launches" not in once


@pytest.mark.parametrize(
    "launch, words",
    [("out = (a.float() @ b.float())", "no kernel was launched"), (EAGERLY, "options of its own")],
    ids=["torch alone", "a policy of its own"],
)
def test_what_the_clock_did_not_see_is_no_pass(launch, words):
    result = judged(source(launch), 10**9)
    assert result.failed.name == "in time" and "could not be modelled" in result.message and words in result.message


def test_a_kernel_that_waits_longer_takes_more_cycles():
    """One buffer in place of two: every load waits for the product before it."""
    two, one = (cycles_in(judged(source(ONCE.replace("DEPTH=2", f"DEPTH={n}")), 1).message) for n in (2, 1))
    assert one > two
