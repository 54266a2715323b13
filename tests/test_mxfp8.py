"""MXFP8 encodings in PyTorch: the scale rule, the tiles of scales, jagged groups, NaN and infinity, dequantising, errors."""

from __future__ import annotations

import math

import pytest
import torch

from jfa import mxfp8
from jfa.layout import offsets_from_lengths
from jfa.mxfp8 import dequantize, quantize_jagged

LENGTHS = [[5, 0, 33, 1, 17], [200], [0, 0, 128, 129, 0], [31, 32, 33, 64, 127], []]


def values(rows: int, heads: int, dim: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Return numbers of very different sizes, some of them 0."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=g) * torch.exp2(torch.randint(-20, 20, (rows, heads, dim), generator=g))
    return torch.where(torch.rand(x.shape, generator=g) < 0.1, 0.0, x).to(dtype)


def code_by_hand(amax: float) -> int:
    """The rule from the specification's words, in Python's exact arithmetic."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1; 448 = 0.875 * 2**9
    return max(exponent - 9 + (mantissa > 0.875) + 127, 0)


def e4m3_by_hand(x: float) -> float:
    """Round to the nearest e4m3 number, ties to even, beyond 448 saturated."""
    if x == 0:
        return 0.0
    exponent = max(math.frexp(abs(x))[1] - 1, -6)
    step = math.ldexp(1.0, exponent - 3)
    return math.copysign(min(round(abs(x) / step) * step, 448.0), x)


EDGES = [
    0.0,
    1e-45,
    1e-38,
    2.0**-119,
    448.0,
    448.00003,
    449.0,
    1.0,
    1.75,
    1.7500001,
    7 / 2**130,
    3e38,
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("amax", EDGES)
def test_the_scale_rule(amax):
    amax = torch.tensor(amax)
    assert mxfp8.scale_codes(amax).item() == code_by_hand(amax.item())


def test_the_scale_is_the_least_that_does_not_saturate():
    amax = values(4000, 1, 1, 1).abs().flatten()
    amax = amax[amax > 0]
    scale = mxfp8.scale_values(mxfp8.scale_codes(amax)).double()
    assert (amax.double() / scale <= 448).all() and (amax.double() / scale > 224).all()


def test_scale_values_of_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    found = mxfp8.scale_values(codes)
    assert found[:255].double().tolist() == [2.0 ** (c - 127) for c in range(255)] and math.isnan(found[255])


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (5, 3), (130, 9)])
def test_where_a_scale_lies_in_its_tile(shape):
    rows, columns = shape
    codes = torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    tiles = mxfp8.pack_scales(codes)
    assert tiles.shape == (-(-rows // 128), -(-columns // 4), 32, 16)
    for r in range(rows):
        for c in range(columns):
            assert tiles[r // 128, c // 4, r % 32, (r % 128) // 32 * 4 + c % 4] == codes[r, c]
            assert tiles[mxfp8.tile_place(r, c)] == codes[r, c]
    assert torch.equal(mxfp8.unpack_scales(tiles)[:rows, :columns], codes)
    assert int((tiles > 0).sum()) == rows * columns


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("axis", mxfp8.AXES)
@pytest.mark.parametrize("dim", [32, 40, 160])
def test_every_value_and_scale_by_hand(lengths, axis, dim):
    heads, spare = 2, 3
    offsets = offsets_from_lengths(lengths)
    x = values(sum(lengths) + spare, heads, dim, 3)
    q = quantize_jagged(x, offsets, axis)
    assert q.data.shape == x.shape and q.data.dtype == torch.float8_e4m3fn and q.data.is_contiguous()
    blocks, tiles = -(-len(x) // 128) + len(lengths), -(-dim // 128)
    assert q.scales.shape == (heads, blocks, tiles, 32, 16) and q.scales.dtype == torch.uint8
    data, scales, seen = q.data.float(), q.scales.clone(), 0
    for b, length in enumerate(lengths):
        begin = int(offsets[b])
        first = begin // 128 + b
        rows = x[begin : begin + length]
        for h in range(heads):
            for i in range(0, length, 1 if axis == "head_dim" else 32):
                for d in range(0, dim, 32 if axis == "head_dim" else 1):
                    group = rows[i, h, d : d + 32] if axis == "head_dim" else rows[i : i + 32, h, d]
                    code = code_by_hand(group.abs().max().item())
                    r, c = (i, d // 32) if axis == "head_dim" else (d, i // 32)
                    block, tile = (r // 128, c // 4) if axis == "head_dim" else (c // 4, r // 128)
                    place = (h, first + block, tile, r % 32, r % 128 // 32 * 4 + c % 4)
                    assert scales[place] == code
                    scales[place], seen = 0, seen + 1
                    tokens = slice(begin + i, begin + min(i + 32, length))
                    at = (begin + i, h, slice(d, d + 32)) if axis == "head_dim" else (tokens, h, d)
                    want = [e4m3_by_hand(math.ldexp(v, 127 - code)) for v in group.tolist()]
                    assert data[at].tolist() == want
    assert not scales.any()  # places of no group
    assert not data[int(offsets[-1]) :].any()
    if sum(lengths):
        assert seen


@pytest.mark.parametrize("axis", mxfp8.AXES)
@pytest.mark.parametrize("dtype", mxfp8.DTYPES, ids=str)
def test_dequantized_values_are_near(axis, dtype):
    lengths = [5, 0, 33, 1, 170]
    x = torch.randn(209, 3, 72, generator=torch.Generator().manual_seed(4)).to(dtype)
    back = dequantize(quantize_jagged(x, offsets_from_lengths(lengths), axis))
    error = (back - x.float()).norm() / x.float().norm()
    assert 0.02 < error < 0.03  # e4m3's rounding of normal numbers; twice as much or nothing would be a mistake


def test_powers_of_two_survive_and_so_does_their_sign():
    x = torch.exp2(torch.arange(-3.0, 5.0)).repeat(4) * torch.tensor([1.0, -1.0]).repeat(16)
    x = x.expand(40, 2, 32)
    for axis in mxfp8.AXES:
        assert torch.equal(dequantize(quantize_jagged(x, offsets_from_lengths([7, 33]), axis)), x)


@pytest.mark.parametrize("axis", mxfp8.AXES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_a_bad_value_costs(axis, bad):
    """NaN takes its whole group; an infinity stays one, and its group's other values vanish."""
    lengths, x = [40, 50], torch.ones(90, 1, 64)
    x[36, 0, 3] = bad
    q = quantize_jagged(x, offsets_from_lengths(lengths), axis)
    back = dequantize(q)
    group = (36, 0, slice(0, 32)) if axis == "head_dim" else (slice(32, 40), 0, 3)
    outside = torch.ones(90, 1, 64, dtype=torch.bool)
    outside[group] = False
    assert (back[outside] == 1).all()
    if math.isnan(bad):
        assert back[group].isnan().all() and (q.data.view(torch.uint8)[group] == 0x7F).all()
    else:
        assert back[36, 0, 3] == bad and int((back[group] == 0).sum()) == back[group].numel() - 1


@pytest.mark.parametrize("axis", mxfp8.AXES)
def test_a_neighbour_changes_nothing(axis):
    offsets, x = offsets_from_lengths([33, 40, 50]), values(123, 2, 48, 5)
    clean = dequantize(quantize_jagged(x, offsets, axis))
    for worse in (math.nan, math.inf, 1e30):
        y = x.clone()
        y[33:73] = worse
        got = dequantize(quantize_jagged(y, offsets, axis))
        assert torch.equal(got[:33], clean[:33]) and torch.equal(got[73:], clean[73:])


@pytest.mark.parametrize("axis", mxfp8.AXES)
def test_slots_of_one_length_in_any_order(axis):
    x, slots = values(120, 2, 40, 6), torch.tensor([80, 0, 40, 0], dtype=torch.int32)
    q = quantize_jagged(x, slots, axis, length=35)
    assert q.scales.shape[1] == 3
    plain = [quantize_jagged(x[s : s + 35], offsets_from_lengths([35]), axis) for s in (80, 0, 40)]
    want = torch.zeros_like(x)
    for b, s in enumerate((80, 0, 40)):
        want[s : s + 35] = plain[b].dequantize()
        assert torch.equal(q.scales[:, b], plain[b].scales[:, 0])
    assert torch.equal(q.dequantize(), want)


@pytest.mark.parametrize("axis", mxfp8.AXES)
def test_both_encodings_at_once(axis):
    x, offsets = values(70, 2, 40, 8).requires_grad_(), offsets_from_lengths([33, 0, 37])
    found = quantize_jagged(x, offsets, axis, both=True)
    other = mxfp8.other_axis(axis)
    assert found.axis == axis and found.other.axis == other != axis and found.source is x
    assert found.along(axis) is found and found.along(other) is found.other
    for got in (found, found.other):
        want = quantize_jagged(x, offsets, got.axis)
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(got.scales, want.scales) and not got.data.requires_grad
    assert want.other is None and want.source is None
    with pytest.raises(ValueError, match=f"encoded along {want.axis!r} only"):
        want.along(mxfp8.other_axis(want.axis))
    assert quantize_jagged(x.detach(), offsets, axis, both=True).source is None


def test_a_slot_that_does_not_fit_belongs_to_nobody():
    x = values(70, 1, 32, 7)
    q = quantize_jagged(x, torch.tensor([0, -1, 36, 0]), "tokens", length=35)
    assert not q.dequantize()[35:].any() and not q.scales[:, 1:].any()


@pytest.mark.parametrize("offsets", [[0, 50, 90], [30, 10, 40], [-5, 20, 2**31 - 1], [40, 0, 0, 40]])
@pytest.mark.parametrize("length", [None, 20])
def test_a_table_stays_inside_whatever_the_offsets_say(offsets, length):
    table = mxfp8.block_table(torch.tensor(offsets), 40, length)
    assert ((table.index >= 0) & (table.index < 40)).all()


def test_shapes_without_anything_in_them():
    for rows, lengths in ((0, []), (0, [0, 0]), (3, [])):
        for axis in mxfp8.AXES:
            x = torch.ones(rows, 2, 64)
            q = quantize_jagged(x, offsets_from_lengths(lengths), axis)
            assert q.data.shape == x.shape and torch.equal(dequantize(q), torch.zeros_like(x)) and not q.scales.any()


X, O = torch.zeros(4, 1, 32), torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments, error, name",
    [
        (([1.0], O, "tokens"), TypeError, "x must be a torch.Tensor"),
        ((X[0], O, "tokens"), ValueError, "x must be 3-D"),
        ((X.double(), O, "tokens"), TypeError, "x must be bfloat16"),
        ((torch.zeros(4, 1, 257), O, "tokens"), ValueError, "x's head dim"),
        ((torch.zeros(4, 1, 0), O, "tokens"), ValueError, "x's head dim"),
        ((X, [0, 4], "tokens"), TypeError, "offsets must be a torch.Tensor"),
        ((X, O.float(), "tokens"), TypeError, "offsets must be int32"),
        ((X, torch.tensor([0, 5]), "tokens"), ValueError, "offsets ends at 5"),
        ((X, O.to("meta"), "tokens"), ValueError, "offsets is on meta"),
        ((X, O, "rows"), ValueError, "axis must be"),
    ],
)
def test_errors_name_the_argument(arguments, error, name):
    with pytest.raises(error, match=name):
        quantize_jagged(*arguments)


def test_errors_of_length_and_of_dequantize():
    for length in (-1, 1.5, True):
        with pytest.raises(ValueError, match="length must be"):
            quantize_jagged(X, O, "tokens", length=length)
    for both in (1, None, "tokens"):
        with pytest.raises(TypeError, match="both must be True or False"):
            quantize_jagged(X, O, "tokens", both=both)
    with pytest.raises(TypeError, match="x must come from quantize_jagged"):
        dequantize(X)
