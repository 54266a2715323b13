"""The quantiser's kernel against the PyTorch form, bit by bit, on the emulator."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import jfa  # noqa: E402
from jfa import mxfp8  # noqa: E402
from jfa.attention import make_problem  # noqa: E402
from jfa.bench.recorded import FOLDER  # noqa: E402
from jfa.kernels.common import quantize  # noqa: E402
from jfa.layout import offsets_from_lengths  # noqa: E402

BAD = (math.nan, -math.nan, math.inf, -math.inf)


def values(shape, seed: int, dtype=torch.float32, spread: int = 130, bad: float = 0.002) -> torch.Tensor:
    """Return numbers over 2**-spread .. 2**spread, zeros of both signs, NaN and infinities among them."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.exp2(torch.randint(-spread, min(spread, 120), shape, generator=g).double())
    x = (torch.randn(shape, generator=g).double() * powers).float()
    kind = torch.rand(shape, generator=g)
    x = torch.where(kind < 0.1, torch.copysign(torch.zeros(()), x), x)
    for i, odd in enumerate(BAD):
        x = torch.where((kind > 1 - bad * (i + 1)) & (kind <= 1 - bad * i), odd, x)
    return x.to(dtype)


def assert_same(found: mxfp8.BlockScaled, wanted: mxfp8.BlockScaled) -> None:
    """Fail unless the bytes of data and scales are equal."""
    assert (found.axis, found.length) == (wanted.axis, wanted.length)
    assert found.data.dtype == wanted.data.dtype == torch.float8_e4m3fn
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(found.scales, wanted.scales)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 31, 32, 33, 127, 128, 129, 150]), max_size=5),
    spare=st.sampled_from([0, 0, 1, 140]),
    heads=st.integers(1, 2),
    dim=st.sampled_from([1, 16, 32, 40, 64, 72, 128, 160]),
    dtype=st.sampled_from(mxfp8.DTYPES),
    spread=st.sampled_from([3, 40, 148]),
    seed=st.integers(0, 99),
)
def test_equal_bits(lengths, spare, heads, dim, dtype, spread, seed):
    offsets = offsets_from_lengths(lengths)
    x = values((sum(lengths) + spare, heads, dim), seed, dtype, spread)
    for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, offsets)):
        assert_same(found, mxfp8.quantize_jagged(x, offsets, axis))


@pytest.mark.parametrize("axis", mxfp8.AXES)
def test_one_encoding_alone(axis):
    offsets, x = offsets_from_lengths([5, 0, 33, 1, 17]), values((56, 2, 128), 1, torch.bfloat16)
    assert_same(quantize.quantize_jagged(x, offsets, axis), mxfp8.quantize_jagged(x, offsets, axis))


def test_views_and_wide_offsets():
    """A slice of a fused projection, a transposed tensor, int64 offsets."""
    offsets = offsets_from_lengths([40, 20]).long()
    fused = values((60, 3, 96), 2)
    for x in (fused[:, 1:, :64], fused.transpose(1, 2)[:, :64], fused[:, ::2, 32:]):
        for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, offsets)):
            assert_same(found, mxfp8.quantize_jagged(x.contiguous(), offsets, axis))


@pytest.mark.parametrize("length", [1, 35, 128, 130])
def test_slots_of_shared_queries(length):
    order = torch.tensor([2, 0, 3, 1])
    slots = torch.cat([order * length, torch.tensor([4 * length])]).int()
    x = values((4 * length, 2, 64), 3, torch.bfloat16)
    for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, slots, length=length)):
        assert_same(found, mxfp8.quantize_jagged(x, slots, axis, length=length))


def test_slots_with_rows_between_them_and_one_that_does_not_fit():
    x, slots = values((100, 1, 32), 4), torch.tensor([60, 5, -3, 90, 0], dtype=torch.int32)
    for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, slots, length=20)):
        assert_same(found, mxfp8.quantize_jagged(x, slots, axis, length=20))


def test_a_neighbours_nan_reaches_nothing():
    offsets, x = offsets_from_lengths([33, 40, 50]), values((123, 1, 64), 5, bad=0)
    clean = quantize.quantize_both(x, offsets)
    y = x.clone()
    y[33:73] = math.nan
    for before, after in zip(clean, quantize.quantize_both(y, offsets)):
        mine = torch.cat([torch.arange(33), torch.arange(73, 123)])
        assert torch.equal(before.data.view(torch.uint8)[mine], after.data.view(torch.uint8)[mine])
        kept = [0, 2]  # blocks of the first and the third sequence: 33 // 128 + 1 is the second's
        assert torch.equal(before.scales[:, kept], after.scales[:, kept])
        assert (after.data.view(torch.uint8)[33:73] == 0x7F).all()


def test_nothing_to_do():
    for rows, lengths in ((0, []), (0, [0, 0]), (3, [])):
        offsets, x = offsets_from_lengths(lengths), torch.ones(rows, 2, 64)
        for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, offsets)):
            assert_same(found, mxfp8.quantize_jagged(x, offsets, axis))


def test_records_serve_several_tensors():
    offsets = offsets_from_lengths([40, 0, 150])
    records = quantize.block_records(offsets, 200)
    for seed in (8, 9):
        x = values((200, 1, 64), seed)
        for axis, found in zip(mxfp8.AXES, quantize.quantize_both(x, offsets, records=records)):
            assert_same(found, mxfp8.quantize_jagged(x, offsets, axis))
        found = quantize.quantize_jagged(x, offsets, "tokens", records=records)
        assert_same(found, mxfp8.quantize_jagged(x, offsets, "tokens"))
    for wrong in (records[1:], records.long(), quantize.block_records(offsets, 600)):
        with pytest.raises(ValueError, match="records must be int32"):
            quantize.quantize_both(x, offsets, records=wrong)


def call_of(shared: bool, slots: bool = False):
    """Return (problem, q, k, v, dout) of three sequences."""
    len_q, len_kv = [35] * 3 if shared else [40, 0, 129], [5, 0, 150]
    q, k = (
        values((35 if shared else 169, 2, 64), 10, torch.bfloat16, bad=0),
        values((155, 1, 64), 11, torch.bfloat16, bad=0),
    )
    v, dout = values((155, 1, 96), 12, torch.bfloat16, bad=0), values((sum(len_q), 2, 96), 13, torch.bfloat16, bad=0)
    query_offset, key_offset = (offsets_from_lengths(x) for x in (len_q, len_kv))
    where = torch.tensor([70, 0, 35, 105], dtype=torch.int32) if slots else None
    given = q, k, v, None if shared else query_offset, key_offset, where
    return make_problem(*given, 0.1, jfa.Band(), shared, False, 0, 0, None, "mxfp8"), q, k, v, dout


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("shared, slots", [(False, False), (True, False), (True, True)])
def test_the_tensors_of_a_call(shared, slots, by_kernel, monkeypatch):
    problem, q, k, v, dout = call_of(shared, slots)
    if by_kernel:
        monkeypatch.setattr(quantize, "_encode", lambda x, o, a, n, r=None: quantize._quantize(x, o, a, n, r))
    rows = offsets_from_lengths([35]) if shared else problem.query_offset
    found = quantize.quantize_queries(problem, q)
    for axis, y in zip(mxfp8.AXES, found):
        want = mxfp8.quantize_jagged(q, rows, axis)
        assert torch.equal(y.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(y.scales[:, :1], want.scales[:, :1]) and torch.equal(y.dequantize(), want.dequantize())
    both, tokens = quantize.quantize_keys(problem, k, v, axes=(mxfp8.AXES, ("tokens",)))
    for x, axes, several in ((k, mxfp8.AXES, both), (v, ("tokens",), tokens)):
        assert [y.axis for y in several] == list(axes)
        for y in several:
            assert_same(y, mxfp8.quantize_jagged(x, problem.key_offset, y.axis))
    for axis, y in zip(mxfp8.AXES, quantize.quantize_outputs(problem, dout)):
        if not shared:
            assert_same(y, mxfp8.quantize_jagged(dout, problem.query_offset, axis))
            continue
        order = [2, 0, 1] if slots else [0, 1, 2]
        for b, slot in enumerate(order):
            part = mxfp8.quantize_jagged(dout[35 * slot : 35 * slot + 35], offsets_from_lengths([35]), axis)
            assert torch.equal(y.data[35 * slot : 35 * slot + 35].view(torch.uint8), part.data.view(torch.uint8))
            assert torch.equal(y.scales[:, b], part.scales[:, 0])


def test_errors_are_those_of_the_reference():
    x, offsets = torch.zeros(4, 1, 32), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="axis must be"):
        quantize.quantize_jagged(x, offsets, "rows")
    with pytest.raises(TypeError, match="x must be bfloat16"):
        quantize.quantize_both(x.double(), offsets)
    with pytest.raises(ValueError, match="offsets ends at 5"):
        quantize.quantize_both(x, torch.tensor([0, 5]))


@triton.jit
def _round(x, y, NATIVE_E4M3: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(y + at, quantize.to_e4m3(tl.load(x + at), NATIVE_E4M3))


def test_e4m3_without_the_instruction():
    """Every e4m3 number, every midpoint and its neighbours, what saturates, NaN: rounded by integers as by the conversion."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(y, torch.tensor(z)) for y in (codes, middle) for z in (-math.inf, math.inf)]
    x = torch.cat([codes, middle, *near, torch.tensor([449.0, 1e30, math.inf, math.nan, 1e-40, 2.0**-10, 2.0**-11])])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, -2 * x.numel() % 256))
    for native in (True, False):
        y = torch.empty(x.shape, dtype=torch.uint8)
        _round[(x.numel() // 256,)](x, y, native)
        want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(y, torch.where(x.isnan(), 0x7F, want).to(torch.uint8)), native


def test_the_conversion_is_the_one_measured_on_a_gpu():
    """Saturation, zeros, and that NaN has no sign: bytes recorded by tests/gpu/run_mxfp8.py."""
    recorded = json.loads((FOLDER / "h200-2026-11-30-mxfp8.json").read_text(encoding="utf-8"))["conversion"]
    x, y = torch.zeros(256), torch.zeros(256, dtype=torch.uint8)
    x[: len(recorded)] = torch.tensor([float(name) for name in recorded])
    _round[(1,)](x, y, True)
    assert [f"0x{byte:02X}" for byte in y[: len(recorded)].tolist()] == list(recorded.values())


def test_the_kernel_without_the_instruction():
    x, offsets = values((60, 1, 64), 6), offsets_from_lengths([20, 40])
    found = quantize.quantize_both(torch.zeros_like(x), offsets)
    variant = quantize._variant(64, True, True, False)
    quantize.launch(x, quantize.block_records(offsets, 60), found, variant)
    for axis, y in zip(mxfp8.AXES, found):
        assert_same(y, mxfp8.quantize_jagged(x, offsets, axis))


def test_wrong_offsets_stay_inside(monkeypatch):
    """Offsets that nobody checked may give wrong numbers, but the emulator would report an access outside the tensors."""
    monkeypatch.setattr(quantize, "check_arguments", lambda *a: None)
    x = values((40, 1, 32), 7)
    for offsets in ([0, 50, 90], [30, 10, 40], [-5, 20, 2**31 - 1], [2**40, -(2**40), 12]):
        quantize.quantize_both(x, torch.tensor(offsets))
        quantize.quantize_both(x, torch.tensor(offsets), length=20)


@pytest.mark.slow
@pytest.mark.parametrize("arch, native", [(75, False), (80, False), (89, True)])
def test_it_compiles_for_older_gpus(arch, native):
    """sm_75 and sm_80 have no instruction for e4m3, so integers round there."""
    config = quantize.compile_configs()[0]
    constants = config.constexprs | {"NATIVE_E4M3": native}
    kernel = quantize.quantize_kernel
    types = {name: "constexpr" if name in constants else config.signature[name] for name in kernel.arg_names}
    signature = {name: kind.removesuffix(":16") for name, kind in types.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.endswith(":16")}
    source = ASTSource(kernel, signature, constants, aligned)
    assert quantize.NATIVE == (8, 9)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    assert ("e4m3x2" in compiled.asm["ptx"]) == native and compiled.asm["cubin"]
