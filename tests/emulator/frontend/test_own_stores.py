"""A program that loads what other lanes of it stored, and addresses that come from integers."""

import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator

emulator.install()


@triton.jit
def _neighbours(x, s, y, N: tl.constexpr, BETWEEN: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.store(s + o, v)
    if BETWEEN == "barrier":
        tl.debug_barrier()
    if BETWEEN == "sum":
        v += tl.sum(v, 0)
    if BETWEEN == "own":
        tl.store(y + o, tl.load(s + o))
    elif BETWEEN == "masked own":
        tl.store(y + o, tl.load(s + o, mask=o > 3, other=0.0))
    elif BETWEEN == "masked other":
        tl.store(y + o, tl.load(s + (o ^ 1), mask=o > N - 3, other=0.0))
    elif BETWEEN == "another shape":
        r, c = tl.arange(0, 8)[:, None], tl.arange(0, N // 8)[None, :]
        tl.store(y + r * (N // 8) + c, tl.load(s + r * (N // 8) + c))
    elif BETWEEN == "one element":
        tl.store(y, tl.load(s + 5))
    elif BETWEEN == "elsewhere":
        tl.store(y + o, tl.load(s + N + (N - 1 - o)))
    elif BETWEEN == "stored anew":
        tl.store(s + (o ^ 1), v)
        tl.store(y + o, tl.load(s + (o ^ 1)))
    else:
        tl.store(y + o, tl.load(s + (o ^ 1)))


WARNED = {"": True, "masked other": True, "another shape": True, "one element": True}
WARNED |= dict.fromkeys(("barrier", "sum", "own", "masked own", "elsewhere", "stored anew"), False)


@pytest.mark.parametrize("between, warned", WARNED.items())
@pytest.mark.parametrize("policy", ["eager", "random"])
def test_a_load_of_what_other_lanes_stored_is_a_warning(between, warned, policy):
    with emulator.options(policy=policy):
        run = emulator.run(_neighbours, (2,), torch.randn(128), torch.zeros(256), torch.zeros(128), 128, between)
    found = [w for w in run.warnings if "other lanes" in str(w)]
    assert bool(found) == warned
    for warning in found:
        assert "tl.store(s + o, v)" in str(warning) and "`s`" in str(warning) and "tl.load(s + " in str(warning)


def test_one_warp_is_in_order():
    arguments = torch.randn(128), torch.zeros(256), torch.zeros(128), 128, ""
    assert not emulator.run(_neighbours, (1,), *arguments, num_warps=1).warnings
    assert emulator.run(_neighbours, (1,), *arguments, num_warps=2).warnings


@triton.jit
def _scatter_through_table(table, lengths, n, N: tl.constexpr, AT_ONCE: tl.constexpr):
    o = tl.arange(0, N)
    if AT_ONCE:
        b = tl.arange(0, 2)[:, None]
        rows = tl.load(table + b).to(tl.pointer_type(tl.float32))
        tl.store(rows + o[None, :], 1.0 * n, mask=o[None, :] < tl.load(lengths + b))
    else:
        b = tl.program_id(0)
        row = tl.load(table + b).to(tl.pointer_type(tl.float32))
        tl.store(row + o, 1.0 * n, mask=o < tl.load(lengths + b))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("lengths", [[7, 16], [8, 16], [7, 17], [0, 17]])
def test_pointers_from_a_table_end_where_their_tensor_ends(lengths, at_once):
    rows = [torch.zeros(7), torch.zeros(16)]
    table = torch.tensor([r.data_ptr() for r in rows])
    run = emulator.run(_scatter_through_table, (1 if at_once else 2,), table, torch.tensor(lengths), 3, 32, at_once)
    if lengths == [7, 16]:
        assert not run.findings and all((r == 3).all() for r in rows)
    elif lengths[0] == 0 and at_once:
        assert run.findings or run.warnings
    else:
        assert type(run.findings[0]) is emulator.errors.OutOfBoundsError and "outside the tensor" in str(
            run.findings[0]
        )


@triton.jit
def _read_address(address, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(address.to(tl.pointer_type(tl.float32)) + o))


def test_memory_of_no_tensor_is_read_with_a_warning():
    numbers, out = torch.arange(16.0).numpy().copy(), torch.zeros(16)
    run = emulator.run(_read_address, (1,), numbers.ctypes.data, out, 16)
    assert out.tolist() == numbers.tolist() and "lies in no tensor" in str(run.warnings[0])
