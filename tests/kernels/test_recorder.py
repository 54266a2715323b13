"""A recorded call is the real one for any sizes: places, numbers and conditions, and what a recorder refuses."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("greenlet")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from jfa.bench.stub import stubbed  # noqa: E402
from jfa.kernels.common.launcher import Variant, by_torch  # noqa: E402
from jfa.kernels.common.ragged import empty_tma_ready, ragged_descriptor, rows_descriptor  # noqa: E402
from jfa.kernels.common.recorder import Launch, Recorder, Unrepeatable  # noqa: E402
from jfa.kernels.common.tape import Tape, views_in  # noqa: E402
from tests.kernels.emulated_driver import emulated  # noqa: E402

CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["plain"])
def scale_kernel(x, to, count, plain, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(x + at, mask=at < count) * 2 + plain, mask=at < count)


def stand_in(rows: int, *shape, dtype=torch.float32):
    """Return (recorder, what stands in for a contiguous [rows, *shape])."""
    recorder = Recorder({"rows": rows})
    return recorder, recorder.input("x", (recorder.sizes["rows"], *shape), None, dtype, CPU)


VIEWS = {
    "part": lambda x: x.new_empty(x.shape[0] * 3 + 8)[x.shape[0] :],
    "columns": lambda x: x.new_empty(x.shape[0], 4, 16)[:, :, :9],
    "all columns": lambda x: x.new_empty(x.shape[0], 4, 16)[:, :, :16],
    "as rows": lambda x: torch.empty(x.shape[0], 4, 6, dtype=x.dtype, device=x.device).view(-1, 6),
    "one of two": lambda x: list(torch.empty(2, 3, x.shape[0] * 64, dtype=x.dtype, device=x.device))[1],
    "strided": lambda x: torch.empty(x.shape[0] * 12 + 4, dtype=torch.int32, device=x.device).as_strided(
        (x.shape[0], 9), (9, 1), 4
    ),
    "like": lambda x: torch.empty_like(x),
    "for TMA": lambda x: empty_tma_ready(x, 20),
    "more than there is": lambda x: x.new_empty(x.shape[0], 4)[:7],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_view_lies_where_torch_s_does(name, rows):
    made, there = VIEWS[name], torch.ones(rows, 2)
    recorder, x = stand_in(rows, 2)
    with recorder:
        found = made(x)
    real = made(there)
    again = recorder.trace.compile([found.offset, found.shape, found.stride(), found.numel()])
    offset = real.storage_offset() * real.itemsize
    assert again(rows) == (offset, tuple(real.shape), real.stride(), real.numel())
    assert found.is_contiguous() == real.is_contiguous() and found.dtype is real.dtype
    other = again(rows + 7)
    if other is not None:  # where a slice is cut off by the end depends on the rows
        real = made(torch.ones(rows + 7, 2))
        assert other == (real.storage_offset() * real.itemsize, tuple(real.shape), real.stride(), real.numel())


@pytest.mark.parametrize(
    "run, why",
    [
        (lambda x: [x + 1], "__add__"),
        (lambda x: [torch.add(x, 1)], "torch's add"),
        (lambda x: [torch.arange(4)], "torch's arange"),
        (lambda x: [x.clone()], "clone"),
        (lambda x: [x.new_empty(4, 4)[:, :2]], "allocation of its own"),
        (lambda x: [x.new_empty(4)[1:]], "allocation of its own"),
        (lambda x: [x], "allocation of its own"),
        (lambda x: [x.new_empty(4)] * 2, "allocation of its own"),
        (lambda x: [torch.empty(3, dtype=torch.bfloat16, device=CPU).zero_()], "whole words"),
        (lambda x: [torch.empty(4, dtype=torch.bfloat16, device=CPU).fill_(1.0)], "fill with 1.0"),
        (lambda x: [torch.empty(4)], "default type"),
        (lambda x: [x.new_empty(4, 6)[:, :5].zero_()], "side by side"),
        (lambda x: [x.as_strided((1,), (1,))], "may be a view"),
        (lambda x: [x.new_empty(4)[-2:]], "from the end"),
        (lambda x: [x.new_empty(4)[0]], "no slice"),
    ],
)
def test_what_cannot_be_done_again(run, why):
    recorder, x = stand_in(3)
    with pytest.raises(Unrepeatable, match=why):
        with recorder:
            results = run(x)
        Tape(recorder, results)


def test_a_record_in_a_record_is_refused():
    with Recorder({}), pytest.raises(Unrepeatable, match="already"), Recorder({}):
        pass
    with Recorder({}):  # and the first has ended as it should
        pass


def taped(run, rows: int) -> Tape:
    recorder, x = stand_in(rows)
    with recorder:
        results = run(x)
    return Tape(recorder, results)


def twice(x):
    """Return 2 x + rows, and a cleared tensor of twice as many rows."""
    rows = x.shape[0]
    to, rest = torch.empty_like(x), torch.zeros(rows * 2, 2, dtype=torch.bfloat16, device=x.device)
    VARIANT.launch(CPU, (-(-rows // 8),), x, to, rows, rows * 3)
    return to, rest


VARIANT = Variant(scale_kernel, BLOCK=8, num_warps=1)


@dataclass(frozen=True)
class Both:
    """A structure of tensors and numbers, as a Problem is one."""

    x: torch.Tensor
    counts: tuple[int, ...]


def _add_rows(to: torch.Tensor, both: Both, more: torch.Tensor | None) -> None:
    to.copy_(both.x.float().cumsum(0) + sum(both.counts) + (0 if more is None else more))


LEFT_TO_TORCH = {
    "a copy of some columns": lambda x: x.new_empty(x.shape[0], 6).copy_(torch.empty_like(x).copy_(x)[:, :6]),
    "side by side": lambda x: x[:, 1:5].contiguous(),
    "minus": lambda x: -x,
    "minus a part": lambda x: -(x[:, 2:]),
    "another type": lambda x: x[1:, :3].to(torch.bfloat16),
    "several in turn": lambda x: (-(-x).to(torch.bfloat16)).to(torch.float32),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_left_to_torch_is_done_again(name):
    """With other rows, numbers and addresses than were recorded."""
    run = LEFT_TO_TORCH[name]
    with emulated():
        tape = taped_as(lambda x: [run(x)], 5, 8)
        for rows in (5, 2, 17):
            x = torch.randn(rows, 8)
            ((found,), _) = tape.play(CPU, tape.measure(rows), [x])
            torch.testing.assert_close(found, run(x.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("more", [True, False])
def test_a_function_of_torch_gets_structures_again(more):
    def run(x):
        to = torch.empty(x.shape[0], 8, dtype=torch.float32, device=x.device)
        by_torch(_add_rows, to, Both(x, (x.shape[0], 3)), x if more else None)
        return [to]

    with emulated():
        tape = taped_as(run, 5, 8)
        for rows in (5, 2, 17):
            x = torch.randn(rows, 8)
            ((found,), _) = tape.play(CPU, tape.measure(rows), [x])
            torch.testing.assert_close(found, run(x)[0], rtol=0, atol=0)


def test_what_is_left_to_torch_has_its_turn():
    """A copy before the launch that reads it, another one after the launch that it reads."""

    def run(x):
        doubled = torch.empty_like(x)
        VARIANT.launch(CPU, (-(-x.shape[0] // 8),), -x, doubled, x.shape[0], 3)
        return [-doubled]

    with compiled(5, 17):
        tape = taped(run, 5)
        for rows in (5, 6):
            x = torch.randn(rows)
            ((found,), _) = tape.play(CPU, tape.measure(rows), [x])
            torch.testing.assert_close(found, 2 * x - 3, rtol=0, atol=0)


def taped_as(run, *shape) -> Tape:
    recorder, x = stand_in(*shape)
    with recorder:
        results = run(x)
    return Tape(recorder, results)


@contextlib.contextmanager
def compiled(*rows):
    """The kernel has been launched for these rows; yield the driver."""
    with emulated() as driver:
        for n in rows:
            VARIANT.launch(CPU, (1,), torch.ones(n), torch.ones(n), n, 3)
        yield driver


def test_a_tape_serves_all_sizes_that_get_the_same_machine_code():
    """Triton compiles a number in where it is 1, and what is divisible by 16."""
    with compiled(5, 16, 1) as driver:
        for rows, others, not_others in (
            (5, (2, 3, 31, 100), (1, 16, 0)),
            (16, (32, 160), (1, 17, 0)),
            (1, (), (2, 16, 0)),
        ):
            tape = taped(twice, rows)
            for n in (rows, *others):
                x = torch.randn(n)
                (to, rest), kept = tape.play(CPU, tape.measure(n), [x])
                assert torch.equal(to, x * 2 + 3 * n) and kept is None
                assert rest.shape == (2 * n, 2) and not rest.any()
            assert [tape.measure(n) for n in not_others] == [None] * len(not_others)
        assert driver.fills == 9


def test_sizes_beyond_int32_are_another_tape_s():
    with compiled(5):
        tape = taped(twice, 5)
        assert tape.measure(2**29 + 1) is not None and tape.measure(2**30 + 1) is None  # times three


def test_results_of_no_rows():
    def run(x):
        return [x.new_empty(x.shape[0], 3).zero_()]

    with emulated():
        tape = taped(run, 4)
        assert tape.measure(0) is None  # there is nothing to fill
        tape = taped(run, 0)
        (out,), _ = tape.play(CPU, tape.measure(0), [torch.ones(0)])
        assert out.shape == (0, 3)


def test_lists_that_are_kept_are_found_again():
    def run(x):
        words = torch.empty(4 + x.shape[0] * 9 + 6, dtype=torch.int32, device=x.device)
        return x.new_empty(3), [words.as_strided((x.shape[0], 9), (9, 1), 4), words.as_strided((2,), (1,)), None]

    recorder, x = stand_in(4)
    with recorder:
        result, kept = run(x)
    with stubbed():
        tape = Tape(recorder, [result], kept)
        values = tape.measure(11)
        _, words = tape.play(CPU, values, [torch.ones(11)])
    assert words.numel() * 4 % 512 == 0 and words.numel() >= 4 + 99 + 6
    records, counts, nothing = views_in(words, tape.kept, values)
    assert records.shape == (11, 9) and records.storage_offset() == 4 and counts.shape == (2,) and nothing is None


def test_a_descriptor_says_nothing_of_sizes_or_cannot_be_recorded():
    packed = torch.randn(6, 2, 64, dtype=torch.bfloat16)
    recorder, x = stand_in(6, 2, 64, dtype=torch.bfloat16)
    with recorder:
        found = ragged_descriptor(x, 16, 64), rows_descriptor(x, 4, 32)
        recorder.launched(VARIANT, CPU, (1,), found)
        bounded = TensorDescriptor.from_tensor(x.view(-1, 64), [4, 32])
        with pytest.raises(Unrepeatable, match="depends on the call's sizes"):
            recorder.launched(VARIANT, CPU, (1,), (bounded,))
    real = ragged_descriptor(packed, 16, 64), rows_descriptor(packed, 4, 32)
    (step,) = recorder.steps
    assert isinstance(step, Launch)
    for box, other in zip(step.args, real):
        for name in ("shape", "strides", "block_shape", "padding"):
            assert getattr(box.descriptor, name) == getattr(other, name)
    theirs = TensorDescriptor.from_tensor(packed.view(-1, 64), [4, 32])
    assert list(theirs.strides) == real[1].strides and theirs.block_shape == real[1].block_shape
    assert theirs.shape[1] == real[1].shape[1] and theirs.shape[0] <= real[1].shape[0]


def test_a_variant_is_not_made_while_a_call_is_recorded():
    from jfa.kernels.common.launcher import NotCompiled

    with Recorder({}), pytest.raises(NotCompiled):
        Variant(scale_kernel, BLOCK=16)


def test_addresses_of_tensor_maps_are_stored_where_the_driver_would_do_no_more(monkeypatch):
    """Else the driver replaces them."""
    from jfa.bench.stub import StubDriver

    def run(x):
        to = torch.empty_like(x)
        VARIANT.launch(CPU, (1,), ragged_descriptor(x, 16, 64), to, 3, 5)
        return [to]

    usual, moved = StubDriver.replace_address, []

    def with_a_checksum(driver, box, address):
        moved.append(address.value)
        torch.frombuffer((ctypes.c_uint8 * 128).from_address(box.value), dtype=torch.uint8)[100] = address.value % 251
        return usual(driver, box, address)

    for replace, expected in ((usual, 0), (with_a_checksum, 2)):
        monkeypatch.setattr(StubDriver, "replace_address", replace)
        recorder, x = stand_in(6, 2, 64, dtype=torch.bfloat16)
        with stubbed():
            for _ in range(2):
                real = torch.ones(6, 2, 64, dtype=torch.bfloat16)
                VARIANT.launch(CPU, (1,), ragged_descriptor(real, 16, 64), torch.empty_like(real), 3, 5)
            with recorder:
                results = run(x)
            tape = Tape(recorder, results)
            (packet,) = tape._deck._packets
            moved.clear()
            inputs = [torch.ones(6, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
            for real in inputs:
                tape.play(CPU, tape.measure(6), [real])
                assert ctypes.c_uint64.from_address(packet.boxes[0].map).value == real.data_ptr()
            assert len(moved) == expected
