"""What one small call costs the host, counted: launches, and calls of Python functions. Launches do nothing here.

Times depend on the machine, counts do not: whoever adds a launch, a descriptor or a check to every call sees it here. To look at
what is called most: ``python -m tests.kernels.test_host_work``.
"""

from __future__ import annotations

import collections
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from triton.runtime.jit import JITFunction  # noqa: E402

import jfa  # noqa: E402
from jfa.attention import make_problem, op, prepared  # noqa: E402
from jfa.bench.stub import StubDriver, stubbed  # noqa: E402
from jfa.block_sparse import lists_from_mask  # noqa: E402
from jfa.kernels.common.launcher import Variant, facts  # noqa: E402
from jfa.kernels.common.tape import Tape  # noqa: E402
from jfa.masks import Band  # noqa: E402

SEQUENCES, LENGTH, HEADS, DIM = 8, 64, 8, 128
# (backend, with a plan) -> launches and Python calls of a forward, then of a forward and its backward. Calls may be fewer.
MOST = {
    ("portable", False): ((2, 230), (4, 385)),
    ("portable", True): ((1, 180), (3, 357)),
    ("hopper", False): ((2, 216), (5, 378)),
    ("hopper", True): ((1, 150), (4, 314)),
    ("blackwell", False): ((2, 128), (7, 260)),
    ("blackwell", True): ((1, 125), (5, 248)),
}
# The same of calls that come again, whose launches the driver gets: docs/hopper-notes.md tells what that takes on a GPU.
MOST_AGAIN = {
    ("portable", False): ((2, 36), (4, 84)),
    ("portable", True): ((1, 36), (3, 84)),
    ("hopper", False): ((2, 36), (5, 86)),
    ("hopper", True): ((1, 36), (4, 86)),
}
# And of calls that once took the long way each time: Python calls of a forward, and of a forward and its backward.
MOST_ODD = {
    "the LSE, too": (36, 86),
    "every other column": (42, 97),
    "not at whole 16 bytes": (68, 158),
    "a negative scale": (37, 91),
    "a padded head dim": (44, 106),
    "200 shared queries": (36, 88),
    "200 shared queries, deterministic": (36, 88),
    "offsets checked": (43, 92),
    "by the registered op": (42, 91),
}
# And of calls with block lists: launches and Python calls, of a forward, and of a forward and its backward.
MOST_LISTED = {
    ("portable", False): ((2, 48), (7, 106)),
    ("hopper", False): ((2, 46), (7, 102)),
    ("hopper", True): ((2, 46), (8, 106)),
}
OTHER_TOTALS = 6  # calls more where the sizes are new: both passes measure them, and store what changed


class Work:
    """Counts while it is entered: ``launches``, and ``calls`` by file and function."""

    def __init__(self, monkeypatch):
        self.launches, self.calls = 0, collections.Counter()
        if monkeypatch is None:
            return  # launches are counted elsewhere

        def launch(variant, device, grid, *args):
            facts(args, variant.specialised)  # what a launch on a GPU asks first
            self.launches += 1

        def run(kernel, *args, **options):
            self.launches += 1

        monkeypatch.setattr(Variant, "launch", launch)
        monkeypatch.setattr(JITFunction, "run", run)

    def __enter__(self):
        self.launches = 0
        self.calls.clear()
        sys.setprofile(self._profile)

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event, argument):
        if event == "call":
            self.calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


def calls_of(backend: str, planned: bool):
    """Return (forward, forward and backward) of eight sequences of 64 tokens, as functions of no arguments."""
    rows = SEQUENCES * LENGTH
    q, k, v = (torch.ones(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    offsets = torch.arange(0, rows + 1, LENGTH, dtype=torch.int32)
    options = dict(max_seq_len_q=LENGTH, max_seq_len_kv=LENGTH, backend=backend)
    if planned:
        sizes = dict(rows_q=rows, rows_kv=rows, num_heads=HEADS, head_dim=DIM, dtype=torch.bfloat16)
        options["plan"] = jfa.plan(offsets, offsets, **sizes, **options)

    def forward():
        return jfa.jagged_flash_attention(q, k, v, offsets, offsets, **options)

    def both():
        out = forward()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return forward, both


def measure(backend: str, planned: bool, monkeypatch) -> list[Work]:
    """Return the work of a forward, and of a forward and its backward."""
    found = []
    for call in calls_of_stubbed(backend, planned, monkeypatch):
        work = Work(monkeypatch)
        call()
        call()  # by now what is kept per signature is there
        with work:
            call()
        found.append(work)
    return found


def calls_of_stubbed(backend: str, planned: bool, monkeypatch):
    """Make the calls with launches stubbed, since a plan launches."""
    Work(monkeypatch)
    return calls_of(backend, planned)


@pytest.mark.parametrize("backend, planned", MOST)
def test_a_call_does_no_more_on_the_host_than_recorded(backend, planned, monkeypatch):
    for work, (launches, calls) in zip(measure(backend, planned, monkeypatch), MOST[backend, planned]):
        assert work.launches == launches
        assert sum(work.calls.values()) <= calls, work.calls.most_common(20)


@pytest.mark.parametrize("backend, planned", MOST_AGAIN)
def test_a_call_that_comes_again_does_no_more_on_the_host_than_recorded(backend, planned, monkeypatch):
    launches = []
    driver = StubDriver(lambda *args: launches.append(args) or 0, lambda *args: 0)
    with stubbed(driver):
        for call, (most_launches, most_calls) in zip(calls_of(backend, planned), MOST_AGAIN[backend, planned]):
            for _ in range(6):
                call()
            work = Work(None)
            launches.clear()
            with work:
                call()
            assert len(launches) == most_launches
            assert sum(work.calls.values()) <= most_calls, work.calls.most_common(40)


def odd_call(kind: str, backend: str):
    """Return (forward, forward and backward) of a call that is not the usual one."""
    rows, dim = SEQUENCES * LENGTH, 20 if kind == "a padded head dim" else DIM
    rows_q = 200 if "shared" in kind else rows
    shapes = (rows_q, HEADS, dim), (rows, HEADS, dim), (rows, HEADS, dim)
    inputs = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    if kind == "every other column":
        inputs = [x.repeat_interleave(2, -1)[..., ::2] for x in inputs]
    if kind == "not at whole 16 bytes":
        inputs = [torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape) for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    offsets = torch.arange(0, rows + 1, LENGTH, dtype=torch.int32)
    options = dict(max_seq_len_q=LENGTH, max_seq_len_kv=LENGTH, backend=backend)
    if kind == "a negative scale":
        options["sm_scale"] = -0.1
    options |= dict(deterministic="deterministic" in kind, check_offsets=kind == "offsets checked" or None)
    query_offset = offsets
    if "shared" in kind:
        query_offset, options = None, options | dict(broadcast_q=True, max_seq_len_q=None)
    problem = make_problem(*inputs, offsets, offsets, None, 0.1, Band.make(), False, False, LENGTH, LENGTH)
    call = op.Call(problem, backend, None, False, offsets)

    def forward():
        if kind == "by the registered op":
            return op.attend_by_op(*inputs, call)[0]
        found = jfa.jagged_flash_attention(*inputs, query_offset, offsets, return_lse=kind == "the LSE, too", **options)
        return found[0] if isinstance(found, tuple) else found

    def both():
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return forward, both


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("kind", MOST_ODD)
def test_an_odd_call_that_comes_again_does_no_more_on_the_host_than_recorded(backend, kind):
    with stubbed():
        for call, most in zip(odd_call(kind, backend), MOST_ODD[kind]):
            for _ in range(6):
                call()
            work = Work(None)
            with work:
                call()
            assert sum(work.calls.values()) <= most, work.calls.most_common(40)


def listed_call(backend: str, deterministic: bool, lengths: list[int], dtype=torch.int32):
    """Return (forward, forward and backward) of a call that attends to the blocks of a list."""
    rows = sum(lengths)
    inputs = [torch.ones(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
    masks = [torch.ones(-(-n // 128), -(-n // 128), dtype=torch.bool) for n in lengths]
    lists = lists_from_mask(masks, offsets, offsets, total_q=rows, total_kv=rows)
    options = dict(backend=backend, block_lists=lists, deterministic=deterministic)

    def forward():
        return jfa.jagged_flash_attention(*inputs, offsets, offsets, **options)

    def both():
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return forward, both


@pytest.mark.parametrize("backend, deterministic", MOST_LISTED)
def test_a_call_with_block_lists_does_no_more_on_the_host_than_recorded(backend, deterministic):
    launches = []
    driver = StubDriver(lambda *args: launches.append(args) or 0, lambda *args: 0)
    with stubbed(driver):
        for call, most in zip(listed_call(backend, deterministic, [200] * 8), MOST_LISTED[backend, deterministic]):
            for _ in range(6):
                call()
            work = Work(None)
            launches.clear()
            with work:
                call()
            assert len(launches) == most[0]
            assert sum(work.calls.values()) <= most[1], work.calls.most_common(40)


@pytest.mark.parametrize("backend, deterministic", MOST_LISTED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_block_lists_of_other_totals_are_played_too(backend, deterministic, dtype, monkeypatch):
    """Other totals, numbers of sequences and of entries: one or two forms serve all."""
    plays, play, rng = [], Tape.play, random.Random(1)
    monkeypatch.setattr(Tape, "play", lambda *args: plays.append(1) or play(*args))
    with stubbed():
        for step in range(12):
            lengths = [rng.randint(20, 900) for _ in range(rng.choice([5, 9, 17]))]
            _, both = listed_call(backend, deterministic, lengths, dtype)
            plays.clear()
            both()
            assert step < 6 or len(plays) == 2
        (kept,) = prepared._KNOWN.values()
    assert len(kept.forward[True].forms) <= 2


@pytest.mark.parametrize("backend", ["portable", "hopper"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_call_of_other_totals_does_no_more_on_the_host_than_one_that_comes_again(backend, dtype):
    """Other rows of queries and of keys, other numbers of sequences, other hints: within one form nothing is found out anew."""
    launches = []
    driver = StubDriver(lambda *args: launches.append(args) or 0, lambda *args: 0)
    with stubbed(driver):
        for number, (rows_q, rows_kv, sequences) in enumerate(
            [(512, 512, 8), (512, 512, 8), (509, 700, 8), (257, 300, 9), (1025, 999, 31), (700, 4096, 12)]
        ):
            q, k, v = (
                torch.ones(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True)
                for rows in (rows_q, rows_kv, rows_kv)
            )
            offsets = [torch.linspace(0, rows, sequences + 1).to(dtype) for rows in (rows_q, rows_kv)]
            gradient, work = torch.ones_like(q), Work(None)
            launches.clear()
            with work:
                out = jfa.jagged_flash_attention(q, k, v, *offsets, 200 + number, backend=backend)
                torch.autograd.grad(out, (q, k, v), gradient)
            _, (most_launches, most_calls) = MOST_AGAIN[backend, False]
            if number >= 3:  # by then there is a form, and all is compiled
                assert len(launches) == most_launches
                assert sum(work.calls.values()) <= most_calls + OTHER_TOTALS, work.calls.most_common(40)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_random_batches_soon_take_the_short_way_all(backend, monkeypatch):
    """Totals, lengths and hints as a training on jagged data has them: few forms, and few calls that find out anything."""
    plays, play, rng = [], Tape.play, random.Random(backend)
    monkeypatch.setattr(Tape, "play", lambda *args: plays.append(1) or play(*args))
    with stubbed():
        found_out = []
        for step in range(60):
            rows, longest = rng.randint(64, 9000), rng.randint(1, 600)
            q, k, v = (
                torch.empty(rows, heads, 64, dtype=torch.bfloat16, requires_grad=True)
                for heads in (HEADS, HEADS // 2, HEADS // 2)
            )
            offsets = torch.linspace(0, rows, 65).long()
            plays.clear()
            out = jfa.jagged_flash_attention(q, k, v, offsets, offsets, longest, longest, causal=True, backend=backend)
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
            if len(plays) < 2:
                found_out.append(step)
        (kept,) = prepared._KNOWN.values()
    forms = kept.forward[True].forms
    assert all(x.tape is not None for x in forms) and len(forms) <= 4
    assert len(found_out) <= 4, found_out


def test_what_is_added_to_a_call_is_counted(monkeypatch):
    forward, _ = calls_of_stubbed("portable", False, monkeypatch)
    work, counts = Work(monkeypatch), []
    for extra in (False, True):
        forward()
        with work:
            forward()
            if extra:
                calls_of("portable", True)
        counts.append((work.launches, sum(work.calls.values())))
    assert counts[1][0] > counts[0][0] and counts[1][1] > counts[0][1]


if __name__ == "__main__":
    for backend, planned in MOST:
        for work in measure(backend, planned, pytest.MonkeyPatch()):
            print(backend, "planned" if planned else "", work.launches, sum(work.calls.values()))
            print("   ", ", ".join(f"{name} {n}" for name, n in work.calls.most_common(12)))
