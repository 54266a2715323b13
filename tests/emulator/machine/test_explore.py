"""The exploration of schedules against every interleaving: the same set of outcomes, on small protocols made at random."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jfa.emulator import errors, explore
from jfa.emulator.machine import current, engines, sync
from jfa.emulator.machine.control import Control, replay
from jfa.emulator.options import Options

from .parts import Bars, Buffers, arrive, run, tasks, wait


def _execute(kernel):
    """What `search` calls: the kinds of findings of a whole execution, or "ok"."""

    def execute(control):
        kinds = set()
        try:
            result = run(kernel, Options(control=control, report="collect"))
            kinds = {_kind(finding) for finding in result.findings}
        except errors.EmulatorError as error:
            kinds = {_kind(error)}
        return explore.Outcome(" ".join(sorted(kinds)) or explore.OK, control.token)

    return execute


def _kind(error):
    """ "deadlock", or "fault": which of several faults a report names first may depend on the order of equal steps."""
    late = "can come two phases late" in error.summary
    return "deadlock" if isinstance(error, errors.DeadlockError) and not late else "fault"


def _kinds(exploration):
    return {kind for outcome in exploration.outcomes for kind in outcome.split()}


def _protocol(counts, programs):
    """A kernel: one task per program, a program is a list of (operation, number of its barrier or buffer)."""

    def kernel():
        bars = [Bars(f"b{i}", 1, count)[0] for i, count in enumerate(counts)]
        memory = Buffers("m", 2)
        memory.store(0, 0), memory.store(1, 0)

        def body(program):
            for operation, which in program:
                if operation.startswith("wait"):
                    wait(bars[which], int(operation[-1]))
                elif operation == "arrive":
                    arrive(bars[which])
                elif operation == "expect":
                    sync.expect_bytes(current(), bars[which], 64, ())
                elif operation == "copy":
                    target = [(memory.views[which], f"m[{which}]", bars[which])]
                    engines.tma_load(current(), lambda: np.zeros(16, np.float32), target, 64, ())
                elif operation == "commit":
                    engines.commit(current(), [bars[which]], ())
                elif operation == "store":
                    memory.store(which, 1)
                else:
                    memory.load(which)

        tasks(**{f"t{i}": (lambda p=p: body(p)) for i, p in enumerate(programs)})

    return kernel


OPERATIONS = ["wait0", "wait1", "arrive", "expect", "copy", "commit", "store", "load"]
PROGRAMS = st.lists(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1)), min_size=1, max_size=4), min_size=2, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(st.tuples(st.integers(1, 2), st.integers(1, 2)), PROGRAMS)
@example(  # one arrival too many ends the run before the other task's copy, after which all wait
    (1, 1), [[("arrive", 1), ("wait0", 0)], [("expect", 1), ("wait1", 0), ("wait1", 1), ("copy", 1)]]
)
def test_the_reduction_loses_no_outcome(counts, programs):
    execute = _execute(_protocol(counts, programs))
    whole = explore.search(execute, 1500, stop=False, reduce=False)
    if not whole.exhausted:
        return
    reduced = explore.search(execute, 1500, stop=False)
    assert reduced.exhausted and _kinds(reduced) == _kinds(whole)
    assert reduced.classes <= whole.classes


# ---------------------------------------------------------------- faults that few schedules show


def _only_between():
    """An arrival that is one too many only if it comes after the expect and before the copy has landed."""
    full, landed, memory = Bars("full", 1), Bars("landed", 1), Buffers("m", 2)

    def load():
        sync.expect_bytes(current(), landed[0], 64, ())
        sync.expect_bytes(current(), full[0], 64, ())
        targets = [(memory.views[0], "m[0]", full[0]), (memory.views[1], "m[1]", landed[0])]
        engines.tma_load(current(), lambda: np.zeros(16, np.float32), targets, 64, ())
        wait(landed[0], 0)

    tasks(load=load, stranger=lambda: arrive(full[0]))


def test_a_protocol_that_fails_in_one_interleaving_only():
    assert run(_only_between, Options(policy="eager")).clean
    whole = explore.search(_execute(_only_between), stop=False)
    assert whole.exhausted and whole.outcomes["fault"] == 1 and whole.outcomes[explore.OK] == whole.classes - 1
    with pytest.raises(errors.OverArrivalError):
        run(_only_between, Options(policy=whole.first.schedule))


def test_every_schedule_replays_to_the_same_end():
    kinds = set()
    for which in ([0, 1], [1, 0]):
        kernel = _protocol(
            (1, 1), [[("arrive", which[0]), ("wait0", which[1])], [("wait0", which[0]), ("arrive", which[1])]]
        )
        found = explore.search(_execute(kernel), stop=False)
        kinds |= _kinds(found)
        if found.first is not None:
            assert _execute(kernel)(replay(found.first.schedule)).kind == found.first.kind
    assert kinds == {"ok"}


@pytest.mark.parametrize("text", ["replay:x", "replay:1.", "replay:1,2"])
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match="is no schedule"):
        Options(policy=text)


def test_a_schedule_of_another_launch_is_refused():
    with pytest.raises(errors.LaunchError, match="does not fit"):
        run(_only_between, Options(control=Control([99])))


def test_a_policy_given_anew_forgets_the_schedule():
    options = Options(policy="replay:0.1")
    assert options.but(max_ctas=1).control is options.control and options.but(policy="lazy").control is None


def _correction(blocks, halves_first, slots=3):
    """The correction of an attention kernel with two halves: softmax tasks hand a factor a block to it, in a ring of `slots`; the
    MMA task takes the halves in turn, and a half's next product waits for its correction."""

    def kernel():
        full = [Bars(f"full{h}", slots) for h in range(2)]
        empty = [Bars(f"empty{h}", slots) for h in range(2)]
        ready = [Bars(f"ready{h}", blocks) for h in range(2)]
        scores = [Bars(f"scores{h}", 1) for h in range(2)]
        taken = [Bars(f"taken{h}", 1) for h in range(2)]

        def softmax(h):
            for k in range(blocks):
                wait(scores[h][0], k)
                arrive(taken[h][0])
                wait(empty[h][k % slots], k // slots + 1)
                arrive(full[h][k % slots])

        def mma():
            for k in range(blocks):
                for h in range(2):
                    wait(taken[h][0], k + 1)
                    arrive(scores[h][0])
                    if k >= slots:
                        wait(ready[h][k - slots], 0)

        def correction():
            order = [(h, k) for h in range(2) for k in range(blocks)]
            for h, k in order if halves_first else sorted(order, key=lambda hk: hk[::-1]):
                wait(full[h][k % slots], k // slots)
                arrive(empty[h][k % slots])
                arrive(ready[h][k])

        tasks(s0=lambda: softmax(0), s1=lambda: softmax(1), mma=mma, correction=correction)

    return kernel


@pytest.mark.parametrize("blocks, halves_first, outcome", [(3, True, "ok"), (4, False, "ok"), (8, True, "deadlock")])
def test_a_correction_that_takes_one_half_after_the_other(blocks, halves_first, outcome):
    """Passes with few blocks, for the rings hold them all; with more, half 1 fills up while half 0 waits for it."""
    found = explore.search(_execute(_correction(blocks, halves_first)), 3000)
    assert (found.proved, found.first is None) == ((True, True) if outcome == "ok" else (False, False))
    assert _kinds(found) == {outcome}
