"""Checks of chapter 16: codes and data of MXFP8, where scales lie, what a fixed scale allows, three kernels.

Codes are compared bit by bit. The kernels' numbers are small multiples of powers of two, so scores are exact in fp32
and no rounding of P depends on their last bit.
"""

import math
import random

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output

CLOSED = ("jfa.mxfp8",)
SCHEDULES = (("lazy", 1), ("random", 1))


def _code(amax):
    """Return the code of one group by its definition: the smallest with amax <= 448 * 2**(code - 127); NaN 255, infinity 254."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    code = 0
    while amax > math.ldexp(448.0, code - 127):
        code += 1
    return code


def _encode(x, dim):
    """Encode x fp64 [...] as (e4m3 as fp64, codes int64): groups of 32 along ``dim``; data of groups with NaN are 0."""
    groups = x.double().movedim(dim, -1).unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    codes = torch.tensor([_code(a) for a in largest.flatten().tolist()], dtype=torch.int64).reshape(largest.shape)
    scaled = torch.ldexp(groups, 127 - codes[..., None]).clamp(-448, 448)
    data = scaled.float().to(torch.float8_e4m3fn).double().masked_fill((codes == 255)[..., None], 0)
    return data.flatten(-2).movedim(-1, dim), codes.movedim(-1, dim)


# -- 16.1 --------------------------------------------------------------------------------------------------------------


def _numbers(g, *shape):
    """Return normal numbers, each group with a size of its own from 2**-20 to 2**20."""
    x = torch.randn(*shape, generator=g).unflatten(-1, (-1, 32))
    size = torch.randint(-20, 21, x.shape[:-1], generator=g)
    return torch.ldexp(x, size[..., None]).flatten(-2)


def _quantise_cases(seed):
    g = kinds.generator(seed)

    def case(name, x):
        return Case(name, (x,))

    def filled(values):
        """Return one group per value: that value is its largest, at some place and with some sign."""
        x = (torch.rand(len(values), 32, generator=g) - 0.5) * torch.tensor(values).abs().clamp(max=1e30)[:, None]
        place = torch.randint(0, 32, (len(values),), generator=g)
        sign = torch.randint(0, 2, (len(values),), generator=g) * 2.0 - 1
        x[torch.arange(len(values)), place] = torch.tensor(values) * sign
        return x

    borders = [v for k in (-90, -31, -9, 0, 5, 60, 110) for v in kinds.around(448.0 * 2.0**k)]
    powers = [v for k in (-40, 8, 9, 33) for v in kinds.around(2.0**k)]
    special = _numbers(g, 4, 64)
    special[0, 3], special[1, 40] = math.nan, -math.inf
    special[2, 7], special[2, 9], special[3, 31] = math.inf, math.nan, math.inf
    zeros = _numbers(g, 3, 96)
    zeros[1] = 0.0
    zeros[2, 32:64] = -0.0
    return [
        case("one group", torch.randn(32, generator=g)),
        case("groups of very different sizes", _numbers(g, 5, 128)),
        case("the largest magnitude is negative", -_numbers(g, 2, 64).abs()),
        case("groups of zeros", zeros),
        case("largest numbers just below, at and just above 448 * 2^k", filled(borders)),
        case("largest numbers just below, at and just above 2^k", filled(powers)),
        case("NaN and infinities", special),
        case("tiny numbers, down to 1e-44", filled([1e-30, 3e-36, 1e-37, 2e-38, 1e-40, 1e-44])),
        case("huge numbers, up to 3.4e38", filled([1e30, 1.7e38, 2.9e38, 3.4e38])),
        case("three axes", _numbers(g, 2, 3, 64)),
        case("data halfway between two e4m3 numbers", _halves(g)[None]),
    ]


def _halves(g):
    """Return [32]: 448 and numbers exactly between two neighboring numbers of e4m3."""
    codes = torch.randint(8, 125, (32,), generator=g).to(torch.uint8)
    low, high = (c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    x = (low + high) / 2
    x[0] = 448.0
    return x


def _quantise_call(answer, x):
    import torch

    result = answer(x)
    if not isinstance(result, tuple | list) or len(result) != 2:
        return result
    data, codes = result
    if not isinstance(data, torch.Tensor) or data.dtype != torch.float8_e4m3fn:
        kind = data.dtype if isinstance(data, torch.Tensor) else type(data).__name__
        raise TypeError(f"data must be a tensor of torch.float8_e4m3fn, it is {kind}")
    data = data.float()
    if isinstance(codes, torch.Tensor) and tuple(codes.shape) == (*data.shape[:-1], data.shape[-1] // 32):
        lost = x.unflatten(-1, (-1, 32)).isnan().any(-1)  # their data may be anything
        data = data.masked_fill(lost.repeat_interleave(32, -1), 0)
    return data, codes


def _quantise(x):
    data, codes = _encode(x, -1)
    return data, codes.to(torch.uint8)


_BORDER = "(mantissa > 0.875).int()"

QUANTISE = Exercise(
    id="16.1",
    title="Quantize, with everything that is not ordinary",
    name="quantise",
    call=_quantise_call,
    cases=_quantise_cases,
    reference=_quantise,
    outputs=(Output("data", ("row", "column"), tol=0.0), Output("codes", ("row", "group"), dtype="uint8")),
    difficulty=1,
    minutes=30,
    tol=0.0,
    slack=0.0,
    forbid=CLOSED,
    hints=(
        "x.unflatten(-1, (-1, 32)) gives the groups, and .abs().amax(-1) their largest magnitude; a NaN survives amax. Which four kinds of groups need a code of their own?",
        "torch.frexp(a) gives mantissa in [0.5, 1) and exponent, exactly. 448 = 0.875 * 2^9. When is a <= 448 * 2^k, in terms of the two?",
        "codes = 127 + exponent - 9 + (mantissa > 0.875), at least 0; then 0 for zeros, 254 for infinities, 255 for NaN. Data: torch.ldexp(groups, 127 - codes), clamped to +-448, .to(torch.float8_e4m3fn).",
    ),
    mutants=(
        Mutant(
            "rounds the scale down",
            "The scale was rounded down, so the largest numbers of some groups saturate. Round it up.",
            edit=(f" + {_BORDER}", ""),
        ),
        Mutant(
            "always a power more",
            "A group whose largest number is exactly 448 * 2^k, or less than that, fits with the scale 2^k.",
            edit=(_BORDER, "1"),
        ),
        Mutant(
            "448 itself does not fit",
            "The border belongs to the smaller scale: amax = 448 * scale fits.",
            edit=("mantissa > 0.875", "mantissa >= 0.875"),
        ),
        Mutant(
            "largest without abs",
            "The largest number was taken for the largest magnitude: negative numbers count, too.",
            edit=("groups.abs().amax(-1)", "groups.amax(-1).clamp(min=0)"),
        ),
        Mutant(
            "no bias",
            "The code is the exponent itself. E8M0 adds 127.",
            edit=(("codes = 127 + exponent - 9", "codes = exponent - 9"), ("(127 - codes)", "(-codes)")),
        ),
        Mutant(
            "the largest of e5m2",
            "The scale is that of e5m2, whose largest number is 57,344. The largest of e4m3 is 448.",
            edit=("exponent - 9", "exponent - 16"),
        ),
        Mutant(
            "log2 in fp32",
            "log2 rounds: for a largest number just above 448 * 2^k it gives k, and the code is one too small.",
            edit=(
                f"codes = 127 + exponent - 9 + {_BORDER}",
                "codes = 127 + (largest / 448).log2().ceil().nan_to_num(0, 0, 0).int() + 0 * exponent",
            ),
        ),
        Mutant(
            "a code for zeros from the formula",
            "A group of zeros has code 0.",
            edit=("torch.where(largest == 0, 0, codes).clamp(min=0)", "codes.clamp(min=0)"),
        ),
        Mutant(
            "codes below 0 wrap around",
            "For tiny numbers the formula's code is negative, and uint8 makes a large one of it. The smallest code is 0.",
            edit=("0, codes).clamp(min=0)", "0, codes)"),
        ),
        Mutant(
            "NaN silently becomes 0",
            "NaN was replaced by 0. A group with NaN must have code 255, so that it is noticed.",
            edit=("groups = x.unflatten(-1, (-1, 32))", "groups = x.nan_to_num(0.0, math.inf, -math.inf).unflatten(-1, (-1, 32))"),
        ),
        Mutant(
            "infinity counts as NaN",
            "An infinity is not NaN: its group has the largest code, 254.",
            edit=("torch.where(largest.isinf(), 254, codes)", "torch.where(largest.isinf(), 255, codes)"),
        ),
        Mutant(
            "infinity as the largest number",
            "A group with an infinity has code 254; this is the code of the largest fp32 number.",
            edit=("torch.where(largest.isinf(), 254, codes)", "torch.where(largest.isinf(), 247, codes)"),
        ),
        Mutant(
            "one scale for all",
            "All groups have the scale of the largest number of all. Each group has its own.",
            edit=(
                "largest = groups.abs().amax(-1)",
                "largest = groups.abs().amax(-1)\n    largest = largest.nan_to_num(0, 0, 0).amax().expand(largest.shape)",
            ),
        ),
        Mutant(
            "groups of 16",
            "there are twice as many codes.",
            caught_by="returns",
            edit=("(-1, 32)", "(-1, 16)"),
            expect="codes has shape",
            recognise=False,
        ),
        Mutant(
            "groups along the first axis",
            "groups lie along the last axis.",
            caught_by="returns",
            source="""
def quantise(x):
    groups = x.unflatten(-1, (32, -1))
    largest = groups.abs().amax(-2)
    mantissa, exponent = torch.frexp(largest)
    codes = (118 + exponent + (mantissa > 0.875).int()).clamp(min=0)
    data = torch.ldexp(groups, (127 - codes)[..., None, :]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return data, codes.T.contiguous().to(torch.uint8) if codes.ndim > 1 else codes[None].to(torch.uint8)
""",
            expect="codes has shape",
            recognise=False,
        ),
        Mutant(
            "cut off, not rounded",
            "Data were rounded toward zero. e4m3 takes the nearest number.",
            edit=(
                "data = scaled.clamp(-448, 448)",
                "scaled = (scaled.view(torch.int32) & -(1 << 20)).view(torch.float32)\n    data = scaled.clamp(-448, 448)",
            ),
        ),
    ),
    variants=(
        """
def quantise(x):
    # the bits of fp32 are in the order of the magnitudes, and NaN above all
    bits = (x.contiguous().view(torch.int32) & 0x7FFFFFFF).unflatten(-1, (-1, 32)).amax(-1)
    code = (bits >> 23) - 8
    code += (bits & 0x7FFFFF) > 0x600000
    code[code < 0] = 0
    code[bits == 0x7F800000] = 254
    code[bits > 0x7F800000] = 255
    scale = torch.exp2(code.double() - 127).repeat_interleave(32, -1)
    return (x.double() / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn), code.to(torch.uint8)
""",
        """
def quantise(x):
    # count the scales that are too small
    scales = 448 * torch.exp2(torch.arange(254, dtype=torch.float64) - 127)
    a = x.abs().reshape(*x.shape[:-1], x.shape[-1] // 32, 32).max(dim=-1).values.double()
    e = torch.searchsorted(scales, a.contiguous())
    e = torch.where(a.isnan(), 255, torch.where(a == math.inf, 254, e))
    s = (2.0 ** (127 - e.double())).unsqueeze(-1).expand(*e.shape, 32).reshape(x.shape)
    y = torch.minimum(torch.maximum(x.double() * s, torch.tensor(-448.0).double()), torch.tensor(448.0).double())
    return y.to(torch.float32).to(torch.float8_e4m3fn), e.byte()
""",
    ),
)  # fmt: skip

# -- 16.2 --------------------------------------------------------------------------------------------------------------


def _locate_cases(seed):
    g = kinds.generator(seed)

    def case(name, rows, columns, n=200):
        bytes_ = -(-rows // 128) * -(-columns // 4) * 512
        row, column = (torch.randint(0, most, (n,), generator=g) for most in (rows, columns))
        byte = torch.randint(0, bytes_, (n,), generator=g)
        byte[:4] = torch.tensor([0, 1, bytes_ - 1, bytes_ - 16])
        return Case(name, (row, column, byte, rows, columns))

    return [
        case("one tile, 128 x 4", 128, 4),
        case("two tiles, one to the right of the other", 128, 8),
        case("two tiles, one below the other", 256, 4),
        case("384 x 12: three by three tiles", 384, 12),
        case("200 rows, 6 groups: tiles that are not full", 200, 6),
        case("one tile of 32 rows and 4 groups", 32, 4),
        case("one row, one group", 1, 1, 20),
        case("1000 rows, 3 groups", 1000, 3),
        case("130 rows, 17 groups", 130, 17),
        case("no codes to look for, but bytes", 64, 2, 4),
    ]


def _locate(row, column, byte, rows, columns):
    high, wide = -(-rows // 128), -(-columns // 4)
    table = torch.full((high * 128, wide * 4, 2), -1, dtype=torch.int64)
    table[:rows, :columns, 0] = torch.arange(rows)[:, None]
    table[:rows, :columns, 1] = torch.arange(columns)
    places = torch.arange(high * wide * 512).reshape(high, wide, 32, 4, 4)  # line, row // 32, column
    where = places.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    owner = torch.empty(high * wide * 512, 2, dtype=torch.int64)
    owner[where.flatten()] = table.reshape(-1, 2)
    return where[row, column], owner[byte, 0], owner[byte, 1]


_AT = "at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4"
_ITS_ROW = "its_row = tile // across * 128 + place // 4 * 32 + line"

LOCATE = Exercise(
    id="16.2",
    title="Where is a scale stored, and back",
    name="locate",
    cases=_locate_cases,
    reference=_locate,
    outputs=tuple(Output(name, ("entry",), dtype="int64") for name in ("at", "its_row", "its_column")),
    difficulty=2,
    minutes=20,
    forbid=CLOSED,
    hints=(
        "Three steps: which tile, which line of 16 bytes in it, which byte of the line. In the picture, what do the rows of one line have in common?",
        "A tile's number is row // 128 * (tiles side by side) + column // 4; tiles side by side are (columns + 3) // 4. Line: row % 32. Byte: 4 * (row % 128 // 32) + column % 4.",
        "Back: tile = byte // 512, line = byte % 512 // 16, place = byte % 16; row = tile // across * 128 + place // 4 * 32 + line, column = tile % across * 4 + place % 4; -1 where row >= rows or column >= columns.",
    ),
    mutants=(
        Mutant(
            "row by row",
            "The codes of a tile are in order of rows in this answer. A line of 16 bytes holds four rows, 32 apart.",
            edit=(
                (_AT, "at = tile * 512 + row % 128 * 4 + column % 4"),
                (_ITS_ROW, "its_row = tile // across * 128 + byte % 512 // 4 + 0 * line"),
            ),
        ),
        Mutant(
            "a line column by column",
            "In a line all groups of a row come together, then those of the next row.",
            edit=(
                (_AT, "at = tile * 512 + row % 32 * 16 + row % 128 // 32 + column % 4 * 4"),
                (_ITS_ROW, "its_row = tile // across * 128 + place % 4 * 32 + line"),
                ("its_column = tile % across * 4 + place % 4", "its_column = tile % across * 4 + place // 4"),
            ),
        ),
        Mutant(
            "tiles downwards first",
            "Tiles were counted downwards first. All tiles of the first 128 rows come first.",
            edit=(
                ("tile = row // 128 * across + column // 4", "high = (rows + 127) // 128\n    tile = column // 4 * high + row // 128"),
                (_ITS_ROW, "its_row = tile % high * 128 + place // 4 * 32 + line"),
                ("its_column = tile % across * 4", "its_column = tile // high * 4"),
            ),
        ),
        Mutant(
            "a tile that is not full is forgotten",
            "The number of tiles side by side was rounded down.",
            edit=("across = (columns + 3) // 4", "across = max(columns // 4, 1)"),
        ),
        Mutant(
            "rows beyond the first tile",
            "From row 128 on the place in the line is wrong: row // 32 goes on beyond 3.",
            edit=("row % 128 // 32 * 4", "row // 32 * 4"),
        ),
        Mutant(
            "padding has an owner",
            "Bytes of a tile that hold no code have -1 in both outputs.",
            edit=("real = (its_row < rows) & (its_column < columns)", "real = its_row >= 0"),
        ),
        Mutant(
            "padding below only",
            "A byte holds no code, too, if its group is behind the last one.",
            edit=("real = (its_row < rows) & (its_column < columns)", "real = its_row < rows"),
        ),
        Mutant(
            "padding at the side only",
            "A byte holds no code, too, if its row is behind the last one.",
            edit=("real = (its_row < rows) & (its_column < columns)", "real = its_column < columns"),
        ),
        Mutant(
            "-1 in one of the two",
            "Where a byte holds no code both its row and its group are -1.",
            edit=("torch.where(real, its_column, -1)", "its_column"),
        ),
    ),
    variants=(
        """
def locate(row, column, byte, rows, columns):
    # lay the tiles out and look
    high, wide = (rows + 127) // 128, (columns + 3) // 4
    tiles = torch.full((high * 128, wide * 4), -1, dtype=torch.int64)
    tiles[:rows, :columns] = torch.arange(rows * columns).reshape(rows, columns)
    stored = tiles.reshape(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    at = torch.zeros(rows * columns, dtype=torch.int64)
    used = stored >= 0
    at[stored[used]] = torch.arange(len(stored))[used]
    owner = stored[byte]
    free = owner < 0
    return at[row * columns + column], (owner // columns).masked_fill(free, -1), (owner % columns).masked_fill(free, -1)
""",
        """
def locate(row, column, byte, rows, columns):
    wide = -(-columns // 4)
    def one(r, c):
        (i, r), (j, c) = divmod(r, 128), divmod(c, 4)
        return (((i * wide + j) * 32 + (r & 31)) * 4 + (r >> 5)) * 4 + c
    def back(b):
        b, c = divmod(b, 4)
        b, quarter = divmod(b, 4)
        b, line = divmod(b, 32)
        i, j = divmod(b, wide)
        r, c = 128 * i + 32 * quarter + line, 4 * j + c
        return (r, c) if r < rows and c < columns else (-1, -1)
    found = [back(b) for b in byte.tolist()]
    return (torch.tensor([one(r, c) for r, c in zip(row.tolist(), column.tolist())]),
            torch.tensor([r for r, _ in found]), torch.tensor([c for _, c in found]))
""",
    ),
)  # fmt: skip

# -- 16.3 --------------------------------------------------------------------------------------------------------------


def _predict_cases(seed):
    rng = random.Random(seed)

    def case(name, form, power, rows=256, keys=128, dim=128, flops=16384, exps=16, fmas=128, operations=None):
        operations = rng.randint(7, 12) if operations is None else operations
        return Case(name, (form, power, rows, keys, dim, flops, exps, fmas, operations))

    return [
        case("the chapter's step: e4m3, 2^8", "e4m3", 8),
        case("bf16's rate and a head dim of 256: products are the limit already", "e4m3", 8, dim=256, flops=8192),
        case("an exponential in five operations", "e4m3", 8, operations=5),
        case("e5m2, 2^8", "e5m2", 8),
        case("e4m3, 2^9: too large at once", "e4m3", 9),
        case("e4m3, no factor", "e4m3", 0),
        case("e5m2, 2^15", "e5m2", 15, dim=64),
        case("e5m2, 2^16: too large at once", "e5m2", 16, dim=256),
        case("a head dim of 64", "e4m3", 7, dim=64),
        case("a head dim of 256", "e4m3", 5, dim=256),
        case("twice as many exp2 units", "e4m3", 8, exps=32),
        case("numbers that do not divide", "e5m2", 3, rng.randint(100, 200), rng.randint(50, 99), 72, 10_007, 15, 100),
        case("a little over a whole number must leave", "e4m3", 8, 128, 100, 72, 10_007, 15, 100),
        case("a little under a whole number must leave", "e4m3", 8, 128, 100, 72, 9_941, 15, 100),
        case("a FMA pipe that takes longer than the exp2 units", "e4m3", 8, 44, 27, 8, 580, 3, 91, 6),
        case("a FMA pipe that just suffices", "e4m3", 8, operations=8),
        case("a FMA pipe that just does not", "e4m3", 8, operations=9),
        case("half a FMA pipe", "e4m3", 8, fmas=64, operations=8),
        case("two FMA pipes", "e4m3", 8, fmas=256, operations=9),
        case("P made smaller still", "e4m3", -3),
    ]


def _predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    from fractions import Fraction

    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite() & (numbers > 0)]
    threshold = math.log2(float(numbers.max()) / 2.0**power)
    n = 10
    while float((torch.tensor(2.0) ** (n - 1 + power)).clamp(max=1.0).to(dtype)) > 0:
        n -= 1
    product = Fraction(4 * rows * keys * dim, flops)
    moved = next(m for m in range(rows * keys + 1) if Fraction(rows * keys - m, exps) <= product)
    return threshold if threshold >= 0 else -1.0, n, moved, Fraction(moved * operations, fmas) <= product


PREDICT = Exercise(
    id="16.3",
    title="Predict: the largest threshold, and how many exponentials must leave",
    name="predict",
    cases=_predict_cases,
    reference=_predict,
    outputs=(
        Output("threshold"),
        Output("smallest", dtype="int"),
        Output("moved", dtype="int"),
        Output("fits"),
    ),
    difficulty=2,
    minutes=15,
    forbid=CLOSED,
    hints=(
        "2^(t + power) must not exceed the largest number. And the smallest: P * 2^power may be as small as the smallest number that is not 0, a subnormal one.",
        "e4m3: 448 and 2^-9. e5m2: 1.75 * 2^15 = 57,344 and 2^-16. A number halfway between 0 and the smallest is a tie, and ties go to even: to 0.",
        "Tensor core: 4 * rows * keys * dim / flops cycles. In that time the exp2 units make exps times as many exponentials, rounded down; the rest must leave. It fits if moved * operations / fmas is not more. Use whole numbers throughout.",
    ),
    mutants=(
        Mutant(
            "rounded to the nearest",
            "A part of an exponential that must leave is a whole one: round up.",
            edit=("rows * keys - exps * work // flops)", "round(rows * keys - exps * work / flops))"),
        ),
        Mutant(
            "448 for both formats",
            "448 is the largest number of e4m3. That of e5m2 is 57,344.",
            edit=('"e5m2": (57344.0, -16)', '"e5m2": (448.0, -16)'),
        ),
        Mutant(
            "e5m2 with one exponent more",
            "The largest number of e5m2 is 1.75 * 2^15: its last exponent holds infinity and NaN.",
            edit=("57344.0", "114688.0"),
        ),
        Mutant(
            "e4m3 like IEEE",
            "e4m3 has no infinity, so its last exponent holds numbers, too: up to 448, not 240.",
            edit=("448.0", "240.0"),
        ),
        Mutant(
            "a negative threshold",
            "If P does not even fit with the true maximum, the answer is -1.",
            edit=("threshold if threshold >= 0 else -1.0", "threshold"),
        ),
        Mutant(
            "natural logarithm",
            "The threshold is in octaves: base 2.",
            edit=("math.log2(largest) - power", "math.log(largest) - power * math.log(2)"),
        ),
        Mutant(
            "smallest normal number",
            "Below the smallest normal number there are subnormal ones, down to 2^-9 in e4m3 and 2^-16 in e5m2.",
            edit=(("-9)", "-6)"), ("-16)", "-14)")),
        ),
        Mutant(
            "the tie counts as stored",
            "Half of the smallest number is a tie and becomes 0.",
            edit=(("-9)", "-10)"), ("-16)", "-17)")),
        ),
        Mutant(
            "the factor the wrong way",
            "P is multiplied by 2^power before it is stored, so smaller P survive, not larger ones.",
            edit=("tiny - power", "tiny + power"),
        ),
        Mutant(
            "one product",
            "There are two products: 4 * rows * keys * dim FLOPs.",
            edit=("work = 4 *", "work = 2 *"),
        ),
        Mutant(
            "cycles rounded down",
            "The tensor core's cycles were rounded down first. Only the number of exponentials is a whole one.",
            edit=("exps * work // flops", "exps * (work // flops)"),
        ),
        Mutant(
            "one too few",
            "The number that may stay was rounded up: then the exp2 units take a little longer than the tensor core.",
            edit=("rows * keys - exps * work // flops", "rows * keys - -(-exps * work // flops)"),
        ),
        Mutant(
            "fewer than none",
            "If the products are the limit already, no exponential must leave: 0.",
            edit=("max(0, rows * keys - exps * work // flops)", "rows * keys - exps * work // flops"),
        ),
        Mutant(
            "the exp2 units in place of the tensor core",
            "The FMA pipe was compared with the exp2 units. It may take as long as the tensor core, which is a little longer.",
            edit=(
                "moved * operations * flops <= work * fmas",
                "moved * operations * exps <= (rows * keys - moved) * fmas",
            ),
        ),
        Mutant(
            "exactly as long does not fit",
            "As long as the tensor core is not longer: it fits.",
            edit=("flops <= work", "flops < work"),
        ),
        Mutant(
            "all exponentials on the FMA pipe",
            "The FMA pipe computes only those that left.",
            edit=("fits = moved *", "fits = rows * keys *"),
        ),
    ),
    variants=(
        """
def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    import fractions
    exponent_bits, mantissa_bits = int(form[1]), int(form[3])
    bias = 2 ** (exponent_bits - 1) - 1
    if form == "e4m3":                                  # only mantissa 111 of the last exponent is NaN
        top, mantissa = 2**exponent_bits - 1 - bias, 2 - 2 * 2.0**-mantissa_bits
    else:
        top, mantissa = 2**exponent_bits - 2 - bias, 2 - 2.0**-mantissa_bits
    t = top + math.log2(mantissa) - power
    cycles = fractions.Fraction(4 * rows * keys * dim, flops)
    stay = min(rows * keys, math.floor(cycles * exps))
    left = rows * keys - stay
    return (t if t >= 0 else -1.0), 1 - bias - mantissa_bits - power, left, fractions.Fraction(left * operations, fmas) <= cycles
""",
        """
def predict(form, power, rows, keys, dim, flops, exps, fmas, operations):
    x = torch.arange(1, 128).to(torch.uint8).view(torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2).double()
    x = x[torch.isfinite(x)]
    t = float(torch.log2(x.max() * 2.0**-power))
    n = round(math.log2(float(x.min()))) - power
    scores, work = rows * keys, 4 * rows * keys * dim
    low, high = 0, scores                               # bisect: does m suffice?
    while low < high:
        m = (low + high) // 2
        if (scores - m) * flops <= work * exps:
            high = m
        else:
            low = m + 1
    return max(t, -1.0) if t >= 0 else -1.0, n, low, low * operations * flops <= fmas * work
""",
    ),
)

# -- 16.4 --------------------------------------------------------------------------------------------------------------

PLACE = 7  # what codes of no group hold


def _jagged_cases(seed):
    g = kinds.generator(seed)

    def case(name, lengths, heads=1, dim=16, nan=(), zeros=False, octaves=0):
        total = sum(lengths)
        x = torch.randn(total, heads, dim, generator=g)
        x *= torch.exp2(torch.randint(-12, 13, (1, heads, dim), generator=g).float())
        x *= torch.exp2(torch.randint(-3, 4, (total, 1, 1), generator=g).float())
        if zeros:
            x[:, :, ::3] = 0
        x = torch.ldexp(x.double(), torch.tensor(octaves)).clamp(-3e38, 3e38).float()
        offsets = kinds.offsets(lengths)
        for b in nan:  # all of a sequence
            x[int(offsets[b]) : int(offsets[b + 1])] = math.nan
        return Case(name, (x, offsets), offsets=tuple(offsets.tolist()))

    one_nan = case("one NaN in the second group", [70], 2)
    one_nan.args[0][40, 1, 5] = math.nan
    borders = case("largest numbers at the borders 448 * 2^k", [64, 33])
    x = borders.args[0]
    edges = torch.tensor([v for k in (-30, 0, 17) for v in kinds.around(448.0 * 2.0**k)])
    size = torch.cat([edges, edges])[:16]
    x.copy_((torch.rand(x.shape, generator=g) - 0.5) * size)
    for row in (3, 50, 70, 96):
        x[row, 0] = size * (1 if row % 2 else -1)
    return [
        case("one sequence of 32 tokens", [32]),
        case("one sequence of 70 tokens, two heads", [70], 2),
        case("40 and 70 tokens: a tail in the middle", [40, 70]),
        case("lengths 5, 0, 33, 1, 17", kinds.RAGGED, 2),
        case("a neighbor of NaN behind", [40, 20], nan=(1,)),
        case("a neighbor of NaN in front", [20, 45, 3], nan=(0,)),
        one_nan,
        borders,
        case("zeros in every third column", [50, 31], zeros=True),
        case("tiny numbers, down to 1e-44", [40, 9], octaves=-124),
        case("huge numbers, up to 3e38", [33, 40], 2, octaves=116),
        case("lengths around 32", kinds.around_block(32), dim=8),
        case("empty ones at both ends", [0, 7, 0, 0, 3, 0], 3, 32),
    ]


def _jagged_launch(kernel, x, offsets):
    import torch

    total, heads, dim = x.shape
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    data = torch.full((total, heads, dim), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.full((total // 32 + len(lengths) + 1, heads, dim), 7, dtype=torch.uint8)
    kernel[(max(-(-n // 32) for n in lengths), len(lengths), heads)](x, offsets, data, codes, heads, D=dim)
    data = data.float()
    for b, begin in enumerate(offsets[:-1].tolist()):  # data of a group with NaN may be anything
        for g in range(-(-lengths[b] // 32)):
            rows = slice(begin + 32 * g, begin + min(32 * g + 32, lengths[b]))
            data[rows] = data[rows].masked_fill(x[rows].isnan().any(0), 0)
    return data, codes


def _jagged(x, offsets):
    total, heads, dim = x.shape
    bounds = offsets.tolist()
    data = torch.zeros(total, heads, dim, dtype=torch.float64)
    codes = torch.full((total // 32 + len(bounds), heads, dim), PLACE, dtype=torch.uint8)
    for b, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        for n, row in enumerate(range(begin, end, 32)):
            group = torch.zeros(32, heads, dim, dtype=torch.float64)
            rows = min(32, end - row)
            group[:rows] = x[row : row + rows]
            found, code = _encode(group, 0)
            data[row : row + rows] = found[:rows]
            codes[begin // 32 + b + n] = code[0].to(torch.uint8)
    return data, codes


def _jagged_loads(case):
    x, offsets = case.args
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    programs = max(-(-n // 32) for n in lengths) * len(lengths) * x.shape[1]
    return x.numel() + 8 * programs


_BITS = "bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)"
_SPECIAL = "code = tl.where(bits > 0x7F800000, 255, tl.maximum(code, 0))"
_LOAD = "x = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)"

JAGGED = Exercise(
    id="16.4",
    title="A Triton kernel: quantize a jagged batch along tokens",
    name="quantise_tokens",
    kind="kernel",
    call=_jagged_launch,
    cases=_jagged_cases,
    reference=_jagged,
    outputs=(
        Output("data", ("token", "head", "dim"), tol=0.0),
        Output("codes", ("place", "head", "dim"), dtype="uint8"),
    ),
    difficulty=3,
    minutes=30,
    tol=0.0,
    slack=0.0,
    time_limit=20.0,
    forbid=CLOSED,
    hints=(
        "The group's tokens are rows begin + 32 * g + 0 ... 31 of the packed tensor; those from `end` on are loaded as 0 and never stored. Load [32, D] once and reduce over axis 0.",
        "The largest magnitude as bits: clear the sign of the bits and take tl.max of the integers; NaN is above 0x7F800000, and so wins. The code is exponent field - 8, and one more if the mantissa field is above that of 1.75, 0x600000.",
        "code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000), at least 0, 255 for NaN. 2^(127 - code) has the bits (254 - code) << 23. The codes go to ((begin // 32 + b + g) * H + h) * D + d, if the group exists.",
    ),
    limits=(
        Limit(
            "loaded once",
            "load_elements",
            at_most=_jagged_loads,
            text="at most `total * H * D` elements, and 8 more per program",
        ),
    ),
    mutants=(
        Mutant(
            "the next sequence fills the tail",
            "The last group of a sequence was filled up with the next sequence's tokens, not with zeros.",
            edit=(_LOAD, _LOAD.replace("< end", "< tl.load(offsets_ptr + tl.num_programs(1))")),
        ),
        Mutant(
            "stores into the next sequence",
            "The rows behind the sequence's end were stored, over the next sequence's first ones.",
            edit=(
                (".to(tl.float8e4nv), mask=row[:, None] < end)", ".to(tl.float8e4nv), mask=row[:, None] < tl.load(offsets_ptr + tl.num_programs(1)))"),
            ),
            caught_by="runs",
            expect="data_ptr",
            recognise=False,
        ),
        Mutant(
            "groups of the packed rows",
            "Groups were counted from the first packed row, so they cross from one sequence into the next.",
            edit=(
                ("row = begin + g * 32 + tl.arange(0, 32)", "row = begin // 32 * 32 + g * 32 + tl.arange(0, 32)"),
                ("if begin + g * 32 < end:", "if begin // 32 * 32 + g * 32 < end:"),
            ),
            caught_by="runs",
            expect="data_ptr",
            recognise=False,
        ),
        Mutant(
            "groups along D",
            "The largest magnitude was taken over the head dim. Groups lie along tokens: each column has its own.",
            edit=(
                (_BITS, "bits = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0), axis=0) + 0 * d"),
            ),
        ),
        Mutant(
            "largest without abs",
            "The sign was not taken away: negative numbers count by their magnitude.",
            edit=(_BITS, "bits = tl.max(tl.where(x < 0, 0, x.to(tl.int32, bitcast=True)), axis=0)"),
        ),
        Mutant(
            "NaN becomes a number",
            "NaN was left out of the maximum, so its group has a scale like any other. Its code must be 255.",
            edit=(_BITS, "bits = tl.max(tl.where(x == x, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=0)"),
        ),
        Mutant(
            "NaN gets the largest scale",
            "A group with NaN has code 255; 248 follows from the formula for ordinary numbers.",
            edit=(_SPECIAL, "code = tl.maximum(code, 0)"),
        ),
        Mutant(
            "rounds the scale down",
            "The scale was rounded down, so the largest numbers of some groups saturate.",
            edit=(" + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)", ""),
        ),
        Mutant(
            "448 itself does not fit",
            "The border belongs to the smaller scale: amax = 448 * scale fits.",
            edit=("> 0x600000", ">= 0x600000"),
        ),
        Mutant(
            "codes below 0 wrap around",
            "A group of zeros has code 0: the formula gives -8, and uint8 makes a large number of it.",
            edit=(_SPECIAL, "code = tl.where(bits > 0x7F800000, 255, code)"),
        ),
        Mutant(
            "only zeros have code 0",
            "Zeros have code 0, but so have groups of tiny numbers: the formula's code is negative for them, and uint8 makes a large number of it.",
            edit=(_SPECIAL, "code = tl.where(bits > 0x7F800000, 255, tl.where(bits == 0, 0, code))"),
        ),
        Mutant(
            "a smallest magnitude",
            "Magnitudes below 1e-30 were raised to it, so groups of tiny numbers have too large a code, and their data vanish.",
            edit=(_BITS, _BITS + "\n        bits = tl.where(bits == 0, 0, tl.maximum(bits, 0x0DA24260))"),
        ),
        Mutant(
            "the scale the wrong way",
            "Numbers were multiplied by the scale. They are divided by it.",
            edit=("((254 - code) << 23)", "(tl.minimum(code, 254) << 23)"),
        ),
        Mutant(
            "places without b",
            "Two sequences share a place: the first group of sequence b has place offsets[b] // 32 + b.",
            edit=("place = begin // 32 + b + g", "place = begin // 32 + g"),
            caught_by="runs",
            expect="codes_ptr",
            recognise=False,
        ),
        Mutant(
            "codes of groups that do not exist",
            "Programs without a group stored a code. Places of no group must stay as they are.",
            edit=("if begin + g * 32 < end:", "if begin + g * 32 < end + 32:"),
            caught_by="runs",
            expect="codes_ptr",
            recognise=False,
        ),
        Mutant(
            "groups of 16",
            "Each code covers 16 tokens here, and the others have none.",
            edit=(
                ("row = begin + g * 32 + tl.arange(0, 32)", "row = begin + g * 32 + tl.arange(0, 16)"),
            ),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "loads twice",
            "each number is loaded twice.",
            caught_by="loaded once",
            edit=(_BITS, "again = tl.load(x_ptr + at, mask=row[:, None] < end, other=0.0)\n        " + _BITS.replace("x.to", "again.to")),
            expect="elements",
            recognise=False,
        ),
    ),
    variants=(
        # [D, 32], by powers of two in fp32, a mask for programs without a group
        """
@triton.jit
def quantise_tokens(x_ptr, offsets_ptr, data_ptr, codes_ptr, H, D: tl.constexpr):
    g, b, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    first = begin + 32 * g
    rows = tl.arange(0, 32)[None, :]
    at = ((first + rows) * H + h) * D + tl.arange(0, D)[:, None]
    real = (first + rows < end) & (tl.arange(0, D)[:, None] < D)
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    broken = tl.max((x != x).to(tl.int32), axis=1)
    x = tl.where(x != x, 0.0, x)
    amax = tl.max(tl.abs(x), axis=1)
    floor = tl.maximum(amax, 2.0**-118).to(tl.int32, bitcast=True)  # no code is below 0
    power = (floor & 0x7F800000).to(tl.float32, bitcast=True)   # 2^floor(log2 amax)
    code = (power.to(tl.int32, bitcast=True) >> 23) - 8 + (amax > 1.75 * power).to(tl.int32)
    code = tl.where(amax > 2.0**-119 * 1.75, code, 0)
    small = x * tl.math.exp2(127.0 - code.to(tl.float32))[:, None]
    tl.store(data_ptr + at, small.to(tl.float8e4nv), mask=real)
    code = tl.where(broken > 0, 255, code).to(tl.uint8)
    tl.store(codes_ptr + ((begin // 32 + b + g) * H + h) * D + tl.arange(0, D), code, mask=(first < end) & (tl.arange(0, D) < D))
""",
        # an early return, pointers per head, the code by exp2 steps
        (
            ("    if begin + g * 32 < end:\n", "    if begin + g * 32 >= end:\n        return\n    if True:\n"),
            ("at = (row[:, None] * H + h) * D + d[None, :]", "at = row[:, None] * H * D + (h * D + d)[None, :]"),
            ("inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)", "inverse = tl.math.exp2((127 - code).to(tl.float32))"),
        ),
    ),
)  # fmt: skip

# -- 16.5 and 16.6: operands in tiles ----------------------------------------------------------------------------------


def _pack(codes):
    """Lay codes [rows, groups] out as whole tiles, uint8 [rows / 128, groups / 4, 32, 16]."""
    high, wide = codes.shape[0] // 128, codes.shape[1] // 4
    return codes.reshape(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(high, wide, 32, 16).to(torch.uint8)


def _operand(x, dim):
    """Return (e4m3 as bytes, tiles of codes) of a matrix with groups along ``dim``; the tiles' rows are the other axis."""
    data, codes = _encode(x, dim)
    tiles = _pack(codes if dim == 1 else codes.T)
    return data.float().to(torch.float8_e4m3fn).view(torch.uint8).contiguous(), tiles.contiguous()


def _values(data, tiles, dim):
    """Return the fp64 matrix that an operand means."""
    high, wide = tiles.shape[:2]
    codes = tiles.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4).double()
    scale = torch.exp2((codes if dim == 1 else codes.T) - 127).repeat_interleave(32, dim)
    return data.view(torch.float8_e4m3fn).double() * scale


def _products_cases(seed):
    g = kinds.generator(seed)

    def case(name, blocks, tiles=1, tokens=None, columns=None):
        q = torch.randn(128 * tiles, 128, generator=g)
        ds = torch.randn(128 * tiles, 128 * blocks, generator=g)
        k = torch.randn(128 * blocks, 128, generator=g)
        if tokens is None and columns is None:
            k = torch.where(k > 0, 1.0, -1.0)  # then all scales are equal
        if tokens:
            k *= torch.exp2(torch.randint(-tokens, tokens + 1, (len(k), 1), generator=g).float())
        if columns:
            k *= torch.exp2(torch.randint(-columns, columns + 1, (1, 128), generator=g).float())
        k_row, k_tiles = _operand(k, 1)
        kt, kt_tiles = _operand(k, 0)
        # the tiles of keys: along keys they lie side by side
        return Case(name, (*_operand(q, 1), *_operand(ds, 1), k_row, k_tiles, kt, kt_tiles))

    return [
        case("one block, all scales of K equal", 1),
        case("one block, tokens of different sizes", 1, tokens=4),
        case("one block, columns of different sizes", 1, columns=4),
        case("two blocks, tokens and columns of different sizes", 2, tokens=3, columns=3),
        case("three blocks, 256 queries", 3, 2, tokens=5),
    ]


def _products_launch(kernel, q, q_tiles, ds, ds_tiles, k, k_tiles, kt, kt_tiles):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    s, dq = unwritten(len(q), len(k)), unwritten(len(q), 128)
    boxes = []
    for data, tiles in ((q, q_tiles), (ds, ds_tiles), (k, k_tiles), (kt, kt_tiles)):
        boxes.append(TensorDescriptor.from_tensor(data.view(torch.float8_e4m3fn), [128, 128]))
        boxes.append(TensorDescriptor.from_tensor(tiles, [1, 1, 32, 16]))
    with emulator.options(fences="strict"):
        kernel[(len(q) // 128,)](*boxes, s, dq, len(k) // 128, D=128, BLOCK=128)
    return s, dq


def _products(q, q_tiles, ds, ds_tiles, k, k_tiles, kt, kt_tiles):
    return (
        _values(q, q_tiles, 1) @ _values(k, k_tiles, 1).T,
        _values(ds, ds_tiles, 1) @ _values(kt, kt_tiles, 0),
    )


_CODES = """    k_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
    kt_codes = tlx.local_alloc((1, 1, 32, 16), tl.uint8, 1)
"""
_K_LOAD = "        tlx.async_descriptor_load(k_codes_desc, k_codes[0], [j, 0, 0, 0], full[0])\n"
_KT_LOAD = "        tlx.async_descriptor_load(kt_codes_desc, kt_codes[0], [0, j, 0, 0], full[0])\n"
_KT_COPY = "        tlx.tmem_copy(kt_codes[0], k_scale[0])  # behind S, on the same pipe\n"
_BYTES = "tlx.barrier_expect_bytes(full[0], 3 * OPERAND)"
_K_COPY = "        tlx.tmem_copy(k_codes[0], k_scale[0])\n"

PRODUCTS = Exercise(
    id="16.5",
    title="Bug hunt: scores scaled along the wrong axis",
    name="both_products",
    kind="kernel",
    hunt=True,
    call=_products_launch,
    cases=_products_cases,
    reference=_products,
    outputs=(Output("s", ("query", "key")), Output("dq", ("query", "dim"))),
    schedules=SCHEDULES,
    difficulty=2,
    minutes=45,
    tol=1e-5,
    time_limit=30.0,
    limits=(
        Limit(
            "scaled products",
            "mmas",
            at_most=lambda case: 2 * (len(case.args[0]) // 128) * (len(case.args[4]) // 128),
            at_least=lambda case: 2 * (len(case.args[0]) // 128) * (len(case.args[4]) // 128),
            text="two scaled products per block of keys and program",
        ),
    ),
    forbid=CLOSED,
    hints=(
        "Which of the two results is wrong? Follow the scales of that product back: from which descriptor do they come, and along which axis were its groups cut?",
        "Data and codes of one operand come from one encoding. S needs k with k_codes_desc, dQ needs kt with kt_codes_desc; both must be in tensor memory when their product runs, in one place after the other or in two.",
        "Give kt_codes a buffer of its own; load k_codes from k_codes_desc at [j, 0, 0, 0] and kt_codes from kt_codes_desc at [0, j, 0, 0]; expect 3 * OPERAND bytes; copy k_codes before S, and kt_codes behind S and before dQ.",
    ),
    mutants=(
        Mutant(
            "S twice",
            "right numbers, but the first product is made twice.",
            caught_by="scaled products",
            edit=(
                "        k_transposed = tlx.local_trans(k[0])\n",
                "        k_transposed = tlx.local_trans(k[0])\n        tlx.async_dot_scaled(\n            q[0], k_transposed, s[0], q_scale[0], \"e4m3\", k_scale[0], \"e4m3\",\n            use_acc=False, force_async=True,\n        )\n",
            ),
            expect="two scaled products",
            recognise=False,
        ),
        Mutant(
            "along D for both",
            "dQ has the scales of K's groups along D. It contracts over keys, so it needs those along keys.",
            edit=(
                (_CODES, _CODES.split("\n")[0] + "\n"),
                (_BYTES, "tlx.barrier_expect_bytes(full[0], 3 * OPERAND - BLOCK * D // 32)"),
                (_KT_LOAD, ""),
                (_KT_COPY, ""),
            ),
        ),
        Mutant(
            "the two exchanged",
            "Both products have scales of K, but each has the other's.",
            edit=(
                (_K_LOAD, _K_LOAD.replace("k_codes[0]", "kt_codes[0]")),
                (_KT_LOAD, _KT_LOAD.replace("kt_codes[0]", "k_codes[0]")),
            ),
        ),
        Mutant(
            "data along keys with scales along D",
            "S took the data of the other encoding: data and codes belong together.",
            edit=("k_transposed = tlx.local_trans(k[0])", "k_transposed = tlx.local_trans(kt[0])"),
        ),
        Mutant(
            "both from the encoding along D",
            "dQ took the encoding along D, data and codes. Its groups must lie along keys, which it contracts.",
            edit=(
                ("ds[0], kt[0], dq[0]", "ds[0], k[0], dq[0]"),
                (_KT_COPY, ""),
            ),
        ),
        Mutant(
            "always the first tile",
            "From the second block on the codes along keys are those of the first block.",
            edit=("[0, j, 0, 0]", "[0, 0, 0, 0]"),
        ),
        Mutant(
            "tiles along keys one below the other",
            "The tiles of the encoding along keys lie side by side: [0, j].",
            edit=("[0, j, 0, 0]", "[j, 0, 0, 0]"),
        ),
        Mutant(
            "tiles along D side by side",
            "The tiles of the encoding along D lie one below the other: [j, 0].",
            edit=("k_codes[0], [j, 0, 0, 0]", "k_codes[0], [0, j, 0, 0]"),
        ),
        Mutant(
            "overwritten too early",
            "The scales for dQ were copied over those of S before S was issued.",
            edit=((_KT_COPY, ""), (_K_COPY, _K_COPY + _KT_COPY)),
        ),
        Mutant(
            "too few bytes expected",
            "the barrier expects fewer bytes than arrive.",
            caught_by="runs",
            edit=(_BYTES, "tlx.barrier_expect_bytes(full[0], 3 * OPERAND - BLOCK * D // 32)"),
            expect="full",
            recognise=False,
        ),
    ),
    variants=(
        # two places in tensor memory
        (
            (
                "    q_full = tlx.alloc_barriers(1)\n",
                "    kt_scale = tlx.local_alloc((D, BLOCK // 32), tl.uint8, 1, tlx.storage_kind.tmem)\n    q_full = tlx.alloc_barriers(1)\n",
            ),
            (_KT_COPY, ""),
            (_K_COPY, _K_COPY + "        tlx.tmem_copy(kt_codes[0], kt_scale[0])\n"),
            ('ds_scale[0], "e4m3", k_scale[0], "e4m3",\n            use_acc=j > 0', 'ds_scale[0], "e4m3", kt_scale[0], "e4m3",\n            use_acc=j > 0'),
        ),
        # one buffer for codes, filled a second time when S is done
        (
            (_CODES, _CODES.split("\n")[0] + "\n"),
            (_BYTES, "tlx.barrier_expect_bytes(full[0], 3 * OPERAND - BLOCK * D // 32)"),
            (_KT_LOAD, ""),
            ("tlx.barrier_wait(full[0], j & 1)", "tlx.barrier_wait(full[0], 0)"),
            ("use_acc=False, force_async=True", "use_acc=False, mBarriers=[done[0]]"),
            (
                _KT_COPY,
                "        tlx.barrier_wait(done[0], 0)\n"
                "        tlx.barrier_expect_bytes(full[0], BLOCK * D // 32)\n"
                + _KT_LOAD.replace("kt_codes[0]", "k_codes[0]")
                + "        tlx.barrier_wait(full[0], 1)\n"
                "        tlx.tmem_copy(k_codes[0], k_scale[0])\n",
            ),
            ("tlx.barrier_wait(done[0], j & 1)", "tlx.barrier_wait(done[0], 1)"),
        ),
    ),
)  # fmt: skip

# -- 16.6 --------------------------------------------------------------------------------------------------------------

SCALE = 2.0**-4
LOG2_E = math.log2(math.e)


def _four_bits(level):
    """Return the nearest numbers with four significant bits: e4m3 times a power of two."""
    mantissa, exponent = torch.frexp(level.double())
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def _small(g, rows, columns, spread=1):
    """Return (numbers, codes): whole numbers -2 ... 2, and a scale of 2**-spread ... 2**spread per 32."""
    data = torch.randint(-2, 3, (rows, columns), generator=g).double()
    codes = 127 + torch.randint(-spread, spread + 1, (rows, columns // 32), generator=g)
    return data, codes


def _attend_cases(seed):
    g = kinds.generator(seed)

    def problem(blocks, levels, row_levels=None, scale=SCALE, queries=128):
        """Return random scores; of row i and key j they are ``levels[i % len(levels)][j] + row_levels[i]`` octaves higher."""
        keys = 128 * blocks
        q, q_codes = _small(g, queries, 128)
        k, k_codes = _small(g, keys, 128)
        v, v_codes = _small(g, 128, keys, spread=3)  # V^T: groups along keys
        if levels:  # the first group of 32 columns: one per kind, with which a row's keys are lifted
            q[:, :32], k[:, :32], q_codes[:, 0] = 0, 0, 127
            lifted = torch.stack([_four_bits(level / (4 * SCALE)) for level in levels], 1)  # [keys, kinds]
            top = lifted.abs().amax(1).clamp(min=1)
            k_codes[:, 0] = 127 + (top / 256).log2().ceil().long().clamp(min=-8)
            k[:, : len(levels)] = lifted / torch.exp2(k_codes[:, :1].double() - 127)
            rows = torch.arange(queries)
            q[rows, rows % len(levels)] = 4
        if row_levels is not None:
            q[:, 32:64], k[:, 32:64] = 0, 0
            q_codes[:, 1], k_codes[:, 1] = 127, 127
            level = _four_bits(row_levels / SCALE)
            top = level.abs().clamp(min=1)
            q_codes[:, 1] = 127 + (top / 256).log2().ceil().long()
            q[:, 32] = level / torch.exp2(q_codes[:, 1].double() - 127)
            k[:, 32] = 1
        bytes_ = [x.float().to(torch.float8_e4m3fn).view(torch.uint8) for x in (q, k, v.T)]
        v_tiles = torch.cat([_pack(c) for c in v_codes.split(4, 1)])
        return (*(x.contiguous() for x in bytes_), _pack(q_codes), _pack(k_codes), v_tiles, scale)

    def hard(name, names, blocks=2):
        levels = [kinds.SCORES[n].keys(128 * blocks, 128).double() * LOG2_E for n in names]
        rows = torch.zeros(128, dtype=torch.float64)
        for n, kind in enumerate(names):
            rows[n :: len(names)] = kinds.SCORES[kind].rows(128).double()[n :: len(names)] * LOG2_E
        return Case(name, problem(blocks, levels, rows if "rows 150 apart" in names else None))

    steps = torch.arange(3).repeat_interleave(128).double()
    return [
        Case("one key block", problem(1, [])),
        Case("two key blocks", problem(2, [])),
        Case("two key blocks, half the scale", problem(2, [], scale=SCALE / 2)),
        Case("256 queries", problem(2, [], queries=256)),
        Case("three key blocks, each 5 octaves higher", problem(3, [5 * steps])),
        Case("three key blocks, each lower", problem(3, [-6 * steps])),
        hard("rising, falling and huge in one block", ["rising", "falling", "huge in one block", "ties"]),
        hard("near -150, -400, and one above 90", ["near -150", "near -400", "above 90"]),
        hard("rows 150 apart", ["ties", "rows 150 apart"], 1),
        hard("near -30000", ["near -30000"], 1),
    ]


def _attend_launch(kernel, q, k, v, q_tiles, k_tiles, v_tiles, scale):
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import jfa.emulator as emulator

    out, lse = unwritten(len(q), 128), unwritten(len(q))
    boxes = [TensorDescriptor.from_tensor(x.view(torch.float8_e4m3fn), [128, 128]) for x in (q, k, v)]
    boxes += [TensorDescriptor.from_tensor(x, [1, 1, 32, 16]) for x in (q_tiles, k_tiles, v_tiles)]
    with emulator.options(fences="strict"):
        kernel[(len(q) // 128,)](*boxes, out, lse, scale, len(k) // 128, D=128, BLOCK=128)
    return out, lse


def _attend(q, k, v, q_tiles, k_tiles, v_tiles, scale):
    v_scales = torch.cat([_values(torch.full((128, 128), 0x38, dtype=torch.uint8), t[None], 0) for t in v_tiles])
    x = _values(q, q_tiles, 1) @ _values(k, k_tiles, 1).T * scale
    v = v.view(torch.float8_e4m3fn).double() * v_scales
    m, total, out = torch.full((len(q), 1), -math.inf).double(), 0.0, 0.0
    for j in range(0, len(k), 128):  # in blocks, for a P that is subnormal is rounded relative to the maximum so far
        part = x[:, j : j + 128]
        m, before = torch.maximum(m, part.amax(1, keepdim=True).ceil()), m
        p, alpha = torch.exp2(part - m), torch.exp2(before - m)
        rounded = (256 * p).float().to(torch.float8_e4m3fn).double() / 256
        total, out = total * alpha + p.sum(1, keepdim=True), out * alpha + rounded @ v[j : j + 128]
    return out / total, (m + total.log2())[:, 0]


_M_NEW = "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))"
_P = "p = tl.math.exp2(x - m_new[:, None])"
_L = "l = l * alpha + tl.sum(p, axis=1)"
_STORE_P = "tlx.local_store(p_tile[0], (256.0 * p).to(tl.float8e4nv))"
_P_CODE = "tl.full((BLOCK, BLOCK // 32), 119, tl.uint8)"
_LSE = "tl.store(lse_ptr + rows, m + tl.math.log2(l))"

ATTEND = Exercise(
    id="16.6",
    title="Bug hunt: P's scale, applied here and forgotten there",
    name="attend",
    kind="kernel",
    hunt=True,
    call=_attend_launch,
    cases=_attend_cases,
    reference=_attend,
    outputs=(Output("out", ("query", "dim")), Output("lse", ("query",))),
    schedules=SCHEDULES[:1],
    difficulty=2,
    minutes=45,
    tol=1e-5,
    slack=1.0,
    time_limit=40.0,
    limits=(
        Limit(
            "scaled products",
            "mmas",
            at_most=lambda case: 2 * (len(case.args[0]) // 128) * (len(case.args[1]) // 128),
            at_least=lambda case: 2 * (len(case.args[0]) // 128) * (len(case.args[1]) // 128),
            text="two scaled products per block of keys and program",
        ),
    ),
    forbid=CLOSED,
    hints=(
        "By which factor is the first case's output wrong? Which of these take the factor 256 into account, and which do not: the numbers stored, the product, the row sum?",
        "Then: how far may a maximum stay behind before 256 P exceeds 448? The chapter has the bound, and the threshold of chapter 12 is far above it.",
        "p = exp2(x - m_new) is summed as it is, and 256 * p is stored. And m_new = maximum(m, ceil(max(x))), at every step.",
    ),
    mutants=(
        Mutant(
            "a scale of its own",
            "The scale is handed over as scale_log2; another one stands here.",
            edit=("* scale_log2\n", "* 0.0625\n"),
        ),
        Mutant(
            "S twice",
            "right numbers, but the first product is made twice.",
            caught_by="scaled products",
            edit=(
                "        tlx.tmem_copy(v_codes[0], v_scale[0])\n",
                "        tlx.tmem_copy(v_codes[0], v_scale[0])\n        tlx.async_dot_scaled(\n            q[0], tlx.local_trans(k[0]), s[0], q_scale[0], \"e4m3\", k_scale[0], \"e4m3\",\n            use_acc=False, force_async=True,\n        )\n",
            ),
            expect="two scaled products",
            recognise=False,
        ),
        Mutant(
            "one program's queries",
            "Every program loads the first 128 queries. Program i has those from i * BLOCK on, and tile i of their codes.",
            edit=(("q[0], [i * BLOCK, 0]", "q[0], [0, 0]"), ("q_codes[0], [i, 0, 0, 0]", "q_codes[0], [0, 0, 0, 0]")),
        ),
        Mutant(
            "the sum of 256 P",
            "The row sum is that of the stored numbers, 256 times too large, while the product takes the 256 away: out is 256 times too small.",
            edit=(_L, "l = l * alpha + tl.sum(256.0 * p, axis=1)"),
        ),
        Mutant(
            "no step takes the 256 away",
            "The product did not get P's scale: out is 256 times too large.",
            edit=(_P_CODE, _P_CODE.replace("119", "127")),
        ),
        Mutant(
            "out is right, lse is not",
            "out is right, but lse is 8 octaves too large: the row sum in it is that of 256 P.",
            edit=((_P_CODE, _P_CODE.replace("119", "127")), (_L, "l = l * alpha + tl.sum(256.0 * p, axis=1)")),
        ),
        Mutant(
            "lse corrected the wrong way",
            "lse is 8 octaves too small: 8 was taken off although this row sum had never been scaled.",
            edit=(_LSE, "tl.store(lse_ptr + rows, m + tl.math.log2(l) - 8.0)"),
        ),
        Mutant(
            "the threshold of 8",
            "The maximum may stay 8 octaves behind, and P saturates at 448.",
            edit=(
                _M_NEW,
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 8.0, grown, m)",
            ),
        ),
        Mutant(
            "a threshold of 1",
            "The maximum may stay one octave behind: 512 > 448. With whole numbers no threshold is small enough.",
            edit=(
                _M_NEW,
                "grown = tl.maximum(m, tl.ceil(tl.max(x, axis=1)))\n        m_new = tl.where(grown - m > 1.0, grown, m)",
            ),
        ),
        Mutant(
            "a factor of 1",
            "P is stored without the factor: small P become 0 early, and the product's scale is not P's.",
            edit=(_STORE_P, _STORE_P.replace("256.0 * p", "p")),
        ),
        Mutant(
            "no factor anywhere",
            "P is stored without a factor and the product knows it: right in scale, but P below 2^-10 are lost. The factor of 256 is there to keep them.",
            edit=((_STORE_P, _STORE_P.replace("256.0 * p", "p")), (_P_CODE, _P_CODE.replace("119", "127"))),
        ),
        Mutant(
            "the sum of the rounded P",
            "The row sum was taken from P after rounding; that of the exact P is asked for.",
            edit=(_L, "l = l * alpha + tl.sum((256.0 * p).to(tl.float8e4nv).to(tl.float32), axis=1) / 256.0"),
        ),
        Mutant(
            "a maximum that is not whole",
            "The maximum is not a whole number, so P is rounded elsewhere than asked, and every block differently.",
            edit=(_M_NEW, "m_new = tl.maximum(m, tl.max(x, axis=1))"),
        ),
        Mutant(
            "the accumulator is not rescaled",
            "The accumulator was not multiplied by alpha when the maximum grew.",
            edit=("tlx.local_load(acc[0]) * alpha[:, None]", "tlx.local_load(acc[0])"),
        ),
        Mutant(
            "K's scales for V",
            "The second product has K's scales.",
            edit=("tlx.tmem_copy(v_codes[0], v_scale[0])", "tlx.tmem_copy(k_codes[0], v_scale[0])"),
        ),
    ),
    variants=(
        # the factor in the exponent, taken out of the sum once at the end
        (
            (_P, "p = tl.math.exp2(x - (m_new - 8.0)[:, None])"),
            (_STORE_P, "tlx.local_store(p_tile[0], p.to(tl.float8e4nv))"),
            ("tlx.local_load(acc[0]) / l[:, None])", "tlx.local_load(acc[0]) / (l * 0.00390625)[:, None])"),
            (_LSE, "tl.store(lse_ptr + rows, m - 8.0 + tl.math.log2(l))"),
        ),
        # the product is not told; sum and output both are of 256 P
        (
            (_P_CODE, _P_CODE.replace("119", "127")),
            (_L, "l = l * alpha + 256.0 * tl.sum(p, axis=1)"),
            (_LSE, "tl.store(lse_ptr + rows, m + tl.math.log2(l / 256.0))"),
        ),
        # half of the factor in P, half in its scale; the maximum two octaves higher
        (
            (_M_NEW, "m_new = tl.maximum(m, tl.ceil(tl.max(x, axis=1)) + 2.0)"),
            (_STORE_P, _STORE_P.replace("256.0 * p", "1024.0 * p")),
            (_P_CODE, _P_CODE.replace("119", "117")),
        ),
    ),
)  # fmt: skip

EXERCISES = [QUANTISE, LOCATE, PREDICT, JAGGED, PRODUCTS, ATTEND]
