"""Checks of chapter 03: first Triton kernels."""

import torch

from jfa.course import kinds
from jfa.course.kinds import unwritten  # noqa: F401  launches use it
from jfa.course.spec import Case, Exercise, Limit, Mutant, Output


def _rng(seed):
    return torch.Generator().manual_seed(seed)


def _share(elements):
    """Check that every program does a share: no element of the result is stored twice. ``elements(case)`` counts the result's."""
    return Limit("its own share", "store_elements", at_most=elements, text="each element of a result is stored once")


# -- 3.1 ---------------------------------------------------------------------------------------------------------------


def _axpy_cases(seed):
    g = _rng(seed)

    def case(name, n, a, **block):
        return Case(name, (torch.randn(n, generator=g), torch.randn(n, generator=g), a), block)

    return [
        case("one full block", 64, 2.6),  # no factor is a number of bf16 or fp16
        case("a block and one element", 65, -0.7),
        case("200 elements", 200, 3.1),
        case("blocks of 32", 70, 1.7, block=32),
    ]


def _axpy_launch(kernel, x, y, a, block=64):
    import triton

    out = unwritten(*x.shape)
    kernel[(triton.cdiv(x.numel(), block),)](x, y, out, a, x.numel(), BLOCK=block)
    return out


AXPY = Exercise(
    id="3.1",
    title="Scale and add, any length",
    name="axpy_kernel",
    kind="kernel",
    call=_axpy_launch,
    cases=_axpy_cases,
    reference=lambda x, y, a, block=64: a * x + y,
    outputs=(Output("out", ("element",)),),
    difficulty=1,
    minutes=15,
    tol=1e-6,
    limits=(
        _share(lambda case: case.args[0].numel()),
        Limit(
            "a block each",
            "peak_tile",
            at_most=lambda case: case.kwargs.get("block", 64),
            text="no block larger than `BLOCK` elements",
        ),
    ),
    hints=(
        "Which element numbers does program p own? Build them as one block: a start plus tl.arange(0, BLOCK).",
        "Elements at or past n do not exist: build a mask and give it to both loads and to the store.",
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK); mask = i < n; load x and y with mask=mask, other=0.0; store a * x + y.",
    ),
    mutants=(
        Mutant(
            "store without a mask",
            "the last block writes past the end of out.",
            caught_by="runs",
            edit=("a * x + y, mask=valid)", "a * x + y)"),
            expect="store of `out_ptr` outside",
            recognise=False,
        ),
        Mutant(
            "load without a mask",
            "the last block reads past the end of x.",
            caught_by="runs",
            edit=("x = tl.load(x_ptr + i, mask=valid, other=0.0)", "x = tl.load(x_ptr + i)"),
            expect="load of `x_ptr` outside",
            recognise=False,
        ),
        Mutant(
            "every program does the first block",
            "The first block is right and nothing after it was written: every program works on block 0.",
            edit=("tl.program_id(0) * BLOCK + tl.arange", "0 * BLOCK + tl.arange"),
            caught_by="returns",
            expect="NaN",
        ),
        Mutant(
            "every program does everything",
            "right numbers, but every program goes over the whole tensor.",
            caught_by="its own share",
            source="""
@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        valid = i < n
        x = tl.load(x_ptr + i, mask=valid, other=0.0)
        y = tl.load(y_ptr + i, mask=valid, other=0.0)
        tl.store(out_ptr + i, a * x + y, mask=valid)
""",
            expect="stored once",
            recognise=False,
        ),
        Mutant(
            "scales the wrong operand",
            "a multiplies y here; it should multiply x.",
            edit=("a * x + y, mask", "x + a * y, mask"),
        ),
        Mutant(
            "64 elements for good",
            "right numbers, but a program takes 64 elements, whatever BLOCK is.",
            caught_by="a block each",
            edit=("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(0) * 64 + tl.arange(0, 64)"),
            expect="no block larger",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    left = n - start
    y = tl.load(y_ptr + start + lane, mask=lane < left, other=1.0)
    y += a * tl.load(x_ptr + start + lane, mask=lane < left, other=1.0)
    tl.store(out_ptr + start + lane, y, mask=lane < left)
""",
        """
@triton.jit
def fused(a, x, y):
    return y + x * a

@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    for half in tl.static_range(2):
        i = tl.program_id(0) * BLOCK + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        m = i < n
        tl.store(out_ptr + i, fused(a, tl.load(x_ptr + i, m, 0.0), tl.load(y_ptr + i, m, 0.0)), m)
""",
    ),
)

# -- 3.2 ---------------------------------------------------------------------------------------------------------------


def _transpose_cases(seed):
    g = _rng(seed)
    return [
        Case("one square tile", (torch.randn(16, 16, generator=g), "contiguous")),
        Case("33 rows, 20 columns", (torch.randn(33, 20, generator=g), "contiguous")),
        Case("x is every second column of a matrix", (torch.randn(21, 35, generator=g), "every second column")),
        Case("x is a transposed view", (torch.randn(17, 40, generator=g), "transposed")),
        Case(
            "out is every second column, tiles of 32", (torch.randn(40, 21, generator=g), "out of steps"), {"block": 32}
        ),
    ]


def _transpose_launch(kernel, x, layout, block=16):
    import torch
    import triton

    rows, cols = x.shape
    if layout == "every second column":
        wide = torch.full((rows, 2 * cols), 7.0)
        wide[:, ::2] = x
        x = wide[:, ::2]
    elif layout == "transposed":
        x = x.t().contiguous().t()
    out = unwritten(cols, 2 * rows)[:, ::2] if layout == "out of steps" else unwritten(cols, rows)
    grid = (triton.cdiv(rows, block), triton.cdiv(cols, block))
    kernel[grid](x, out, rows, cols, x.stride(0), x.stride(1), out.stride(0), out.stride(1), BLOCK=block)
    return out


def _tiles_of(case):
    (rows, cols), block = case.args[0].shape, case.kwargs.get("block", 16)
    return -(-rows // block) * -(-cols // block)


TRANSPOSE = Exercise(
    id="3.2",
    title="Transpose, whatever the strides",
    name="transpose_kernel",
    kind="kernel",
    call=_transpose_launch,
    cases=_transpose_cases,
    reference=lambda x, layout, block=16: x.t().contiguous(),
    outputs=(Output("out", ("column of x", "row of x")),),
    difficulty=1,
    minutes=15,
    tol=1e-6,
    hints=(
        "A tile's addresses are a 2-D block: a column of row numbers, [:, None], against a row of column numbers, [None, :].",
        "Load with x's two strides. For the store you need no new block: element (r, c) goes to c * out_row + r * out_col.",
        "r = program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None], c the same with program_id(1) and [None, :]; mask (r < rows) & (c < cols).",
    ),
    limits=(
        Limit("one load per tile", "loads", at_most=_tiles_of, text="at most 1 load for each program"),
        Limit(
            "a tile each",
            "peak_tile",
            at_most=lambda case: case.kwargs.get("block", 16) ** 2,
            text="no block larger than `BLOCK * BLOCK` elements",
        ),
        _share(lambda case: case.args[0].numel()),
    ),
    mutants=(
        Mutant(
            "takes x for contiguous",
            "x is read as if its rows lay cols elements apart and its columns side by side: its strides are not used.",
            edit=("x_ptr + r * x_row + c * x_col", "x_ptr + r * cols + c"),
        ),
        Mutant(
            "mask only for rows",
            "columns past the end are read and written.",
            caught_by="runs",
            edit=("inside = (r < rows) & (c < cols)", "inside = (r < rows) & (c < cols + BLOCK)"),
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "row and column limits swapped",
            "the mask compares row numbers with the number of columns.",
            edit=("(r < rows) & (c < cols)", "(r < cols) & (c < rows)"),
            caught_by="runs",
            expect="out_ptr",
            recognise=False,
        ),
        Mutant(
            "copies instead of transposing",
            "The tile lands at the same place it came from: rows and columns of out are not exchanged.",
            edit=("out_ptr + c * out_row + r * out_col", "out_ptr + r * out_row + c * out_col"),
        ),
        Mutant(
            "program axes exchanged",
            "program_id(0) must choose the rows of x and program_id(1) the columns, as the grid is laid out.",
            edit=(
                ("tl.program_id(0)", "tl.program_id(2)"),
                ("tl.program_id(1)", "tl.program_id(0)"),
                ("tl.program_id(2)", "tl.program_id(1)"),
            ),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "tiles of 32 for good",
            "right numbers, but a tile has 32 rows and columns, whatever BLOCK is.",
            caught_by="a tile each",
            edit=(
                ("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(0) * 32 + tl.arange(0, 32)"),
                ("tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(1) * 32 + tl.arange(0, 32)"),
            ),
            expect="no block larger",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x_ptr + r[:, None] * x_row + c[None, :] * x_col, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    tl.store(out_ptr + c[:, None] * out_row + r[None, :] * out_col, tl.trans(tile), mask=(c < cols)[:, None] & (r < rows)[None, :])
""",
        """
@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    keep = (c < cols) & (r < rows)
    tl.store(out_ptr + c * out_row + r * out_col, tl.load(x_ptr + c * x_col + r * x_row, keep, 0.0), keep)
""",
    ),
)

# -- 3.3 ---------------------------------------------------------------------------------------------------------------


def _lse_cases(seed):
    g = _rng(seed)
    wide = torch.randn(6, 33, generator=g)
    wide[2] -= 200.0
    wide[3] += 200.0
    wide[4] *= 30.0
    return [
        Case("two rows of four", (torch.randn(2, 4, generator=g) - 3.0,)),
        Case("three rows of five, all below -1", (-1.0 - torch.rand(3, 5, generator=g),)),
        Case("rows near -200 and +200, in a wider matrix", (wide,)),
        Case("a kind of numbers per row", (kinds.score_rows(kinds.MODERATE, 21, 8, g),), labels=tuple(kinds.MODERATE)),
        Case("rows near -30,000", (kinds.score_rows(["near -30000"] * 2, 21, 8, g),)),
        Case("rows of 200", (torch.randn(3, 200, generator=g) - 5.0,)),
    ]


def _lse_launch(kernel, x):
    import torch
    import triton

    rows, cols = x.shape
    room = torch.full((rows, cols + 7 if cols > 5 else cols), float("nan"))  # longer rows lie in a wider matrix
    room[:, :cols] = x
    x = room[:, :cols]
    out = unwritten(rows)
    kernel[(rows,)](x, out, cols, x.stride(0), BLOCK=triton.next_power_of_2(cols))
    return out


LSE = Exercise(
    id="3.3",
    title="Log-sum-exp of a row",
    name="row_lse_kernel",
    kind="kernel",
    call=_lse_launch,
    cases=_lse_cases,
    reference=lambda x: torch.logsumexp(x, dim=1),
    outputs=(Output("out", ("row",)),),
    difficulty=2,
    minutes=10,
    tol=1e-6,
    limits=(
        _share(lambda case: len(case.args[0])),
        Limit(
            "a row each",
            "peak_tile",
            at_most=lambda case: 1 << (case.args[0].shape[1] - 1).bit_length(),
            text="no block larger than `BLOCK` elements",
        ),
    ),
    hints=(
        "The block is wider than the row. What value in the spare lanes changes neither a maximum nor a sum of exponentials?",
        "log(sum exp(x)) = m + log(sum exp(x - m)) for any m; with m the maximum nothing overflows.",
        "Load with other=float('-inf'); m = tl.max(x, axis=0); store m + tl.log(tl.sum(tl.exp(x - m), axis=0)).",
    ),
    mutants=(
        Mutant(
            "spare lanes are 0",
            "The lanes past the row's end count as zeros: exp(0) is in the sum. Give the masked load a neutral value.",
            edit=('other=float("-inf")', "other=0.0"),
        ),
        Mutant(
            "spare lanes are -250",
            "The lanes past the row's end hold -250: in a row of lower numbers that is the maximum.",
            edit=('other=float("-inf")', "other=-250.0"),
        ),
        Mutant(
            "masked load without other",
            "lanes past the row's end hold undefined values.",
            caught_by="runs",
            edit=(', other=float("-inf")', ""),
            expect="never loaded",
            recognise=False,
        ),
        Mutant(
            "no maximum",
            "The maximum is not taken out first: exp(200) is infinite in fp32, and exp(-200) is zero.",
            edit=(("tl.max(x, axis=0)", "0.0"),),
        ),
        Mutant(
            "cols for the row stride",
            "Row r was looked for r * cols elements after the first. The rows lie x_row elements apart, which is more here.",
            edit=("row * x_row", "row * cols"),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "log base 2",
            "This is the logarithm to base 2; the exercise asks for the natural one.",
            edit=("tl.log(", "tl.log2("),
        ),
        Mutant(
            "forgets to add the maximum back",
            "The maximum was taken out of the exponent and never added back.",
            edit=("m + tl.log", "tl.log"),
        ),
        Mutant(
            "256 lanes for good",
            "right numbers, but every row takes 256 lanes, whatever BLOCK is.",
            caught_by="a row each",
            edit=("c = tl.arange(0, BLOCK)", "c = tl.arange(0, 256)"),
            expect="no block larger",
            recognise=False,
        ),
        Mutant(
            "64 lanes for good",
            "Only the first 64 columns of a row were summed: BLOCK says how many lanes it takes.",
            edit=("c = tl.arange(0, BLOCK)", "c = tl.arange(0, 64)"),
        ),
    ),
    variants=(
        """
@triton.jit
def row_lse_kernel(x_ptr, out_ptr, cols, x_row, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < cols
    x = tl.load(x_ptr + tl.program_id(0) * x_row + lane, mask=inside, other=0.0)
    top = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    weight = tl.where(inside, tl.exp(x - top), 0.0)
    tl.store(out_ptr + tl.program_id(0), tl.log(tl.sum(weight, axis=0)) + top)
""",
        """
@triton.jit
def row_lse_kernel(x_ptr, out_ptr, cols, x_row, BLOCK: tl.constexpr):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * x_row + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < cols, other=-1e30) * LOG2E
    m = tl.max(x, 0)
    tl.store(out_ptr + row, (m + tl.log2(tl.sum(tl.exp2(x - m), 0))) / LOG2E)
""",
    ),
)

# -- 3.4 ---------------------------------------------------------------------------------------------------------------


def _long_cases(seed):
    g = _rng(seed)
    tall = torch.randn(3, 200, generator=g)
    tall[0] = tall[0].sort().values * 10.0  # the maximum rises with every block
    tall[1] -= 250.0
    return [
        Case("two rows of two blocks", (torch.randn(2, 64, generator=g) * 2.0,)),
        Case("rows of 33: a block and one column", (torch.randn(2, 33, generator=g) - 1.0,)),
        Case("rows of 200, rising and near -250", (tall,)),
        Case("a kind of numbers per row", (kinds.score_rows(kinds.MODERATE, 70, 32, g),), labels=tuple(kinds.MODERATE)),
        Case("rows near -30,000", (kinds.score_rows(["near -30000"] * 2, 70, 32, g),)),
        Case("blocks of 16", (kinds.score_rows(["rising", "falling"], 50, 16, g),), {"block": 16}),
    ]


def _long_launch(kernel, x, block=32):
    import torch

    rows, cols = x.shape
    gap = 0 if cols == 64 else 5  # the rows of later cases lie in wider matrices, x's and out's of different widths
    room = torch.full((rows, cols + gap), 7.0)
    room[:, :cols] = x
    x, out = room[:, :cols], unwritten(rows, cols + 2 * gap)[:, :cols]
    kernel[(rows,)](x, out, cols, x.stride(0), out.stride(0), BLOCK=block)
    return out


def _two_passes(case):
    rows, cols = case.args[0].shape
    return 2 * rows * -(-cols // case.kwargs.get("block", 32))


LONG = Exercise(
    id="3.4",
    title="Softmax of rows longer than a block",
    name="long_softmax_kernel",
    kind="kernel",
    call=_long_launch,
    cases=_long_cases,
    reference=lambda x, block=32: torch.softmax(x, dim=1),
    outputs=(Output("out", ("row", "column")),),
    difficulty=2,
    minutes=25,
    tol=3e-6,
    forbid=("softmax",),
    hints=(
        "Two loops over range(0, cols, BLOCK). The first carries two numbers, the running maximum and the running sum.",
        "If the maximum goes from m to m_new, a sum made with m becomes right for m_new by multiplying it with exp(m - m_new).",
        "l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0); the second loop stores tl.exp(x - m) / l, masked.",
    ),
    limits=(
        Limit(
            "tiled",
            "peak_tile",
            at_most=lambda case: case.kwargs.get("block", 32),
            text="no block larger than 32 elements",
        ),
        Limit("two passes", "loads", at_most=_two_passes, text="at most 2 loads for each block of a row"),
        _share(lambda case: case.args[0].numel()),
    ),
    mutants=(
        Mutant(
            "forgets to rescale",
            "When the maximum rose, the sum so far was not multiplied by exp(old - new): it belongs to the old maximum.",
            edit=("l = l * tl.exp(m - m_new) +", "l = l +"),
        ),
        Mutant(
            "maximum starts at 0",
            "The running maximum starts at 0 and never goes below it: in a row of very low numbers every exponential vanishes.",
            edit=('m = float("-inf")', "m = 0.0"),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "the first block's maximum is kept",
            "The maximum of the first block was kept for all of them: later numbers may be far larger, and their exponentials overflow.",
            edit=(
                "m_new = tl.maximum(m, tl.max(x, axis=0))",
                'm_new = tl.where(m == float("-inf"), tl.max(x, axis=0), m)',
            ),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "rescales the wrong way round",
            "The factor is exp(new - old); it must be exp(old - new), which is at most 1.",
            edit=("tl.exp(m - m_new)", "tl.exp(m_new - m)"),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "cols for the row stride of x",
            "Row r of x was looked for r * cols elements after the first. The rows lie x_row elements apart, which may be more.",
            edit=(
                (
                    'row * x_row + c, mask=c < cols, other=float("-inf"))\n        m_new',
                    'row * cols + c, mask=c < cols, other=float("-inf"))\n        m_new',
                ),
                (
                    'row * x_row + c, mask=c < cols, other=float("-inf"))\n        tl.store',
                    'row * cols + c, mask=c < cols, other=float("-inf"))\n        tl.store',
                ),
            ),
        ),
        Mutant(
            "x's row stride for out",
            "out has a row stride of its own, out_row: where it differs from x_row, rows are stored to the wrong place.",
            edit=("row * out_row", "row * x_row"),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "every block normalized by itself",
            "Each block of the row sums to one by itself: the sum and the maximum must run over the whole row.",
            source="""
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)
""",
        ),
        Mutant(
            "spare lanes are 0",
            "The lanes past the row's end are zeros in the first pass: they enter the maximum and the sum.",
            edit=(
                'mask=c < cols, other=float("-inf"))\n        m_new',
                "mask=c < cols, other=0.0)\n        m_new",
            ),
        ),
        Mutant(
            "the whole row in one block",
            "right numbers, but the row is held in one block.",
            caught_by="tiled",
            source="""
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, 256)
    x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_row + c, e / tl.sum(e, axis=0), mask=c < cols)
""",
            expect="no block larger than 32 elements",
            recognise=False,
        ),
        Mutant(
            "three passes",
            "right numbers, but one pass finds the maximum, another the sum.",
            caught_by="two passes",
            source="""
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m = float("-inf")
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        m = tl.maximum(m, tl.max(x, axis=0))
    l = 0.0
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        l += tl.sum(tl.exp(x - m), axis=0)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        tl.store(out_ptr + row * out_row + c, tl.exp(x - m) / l, mask=c < cols)
""",
            expect="at most 2 loads for each block of a row",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -1e30, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):          # every lane keeps its own maximum and sum ...
        x = tl.load(x_ptr + row * x_row + start + lane, mask=start + lane < cols, other=-1e30)
        new = tl.maximum(m, x)
        l = l * tl.exp(m - new) + tl.where(start + lane < cols, tl.exp(x - new), 0.0)
        m = new
    top = tl.max(m, 0)                           # ... and the lanes are merged once, at the end
    total = tl.sum(l * tl.exp(m - top), 0)
    for start in range(0, cols, BLOCK):
        x = tl.load(x_ptr + row * x_row + start + lane, mask=start + lane < cols, other=0.0)
        tl.store(out_ptr + row * out_row + start + lane, tl.exp(x - top) / total, mask=start + lane < cols)
""",
        """
@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, cols, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lse = float("-inf")
    for block in range(tl.cdiv(cols, BLOCK)):
        c = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=float("-inf"))
        m = tl.max(x, axis=0)
        part = m + tl.log(tl.sum(tl.exp(x - m), axis=0))
        top = tl.maximum(lse, part)
        lse = top + tl.log(tl.exp(lse - top) + tl.exp(part - top))
    for block in range(tl.cdiv(cols, BLOCK)):
        c = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + c, mask=c < cols, other=0.0)
        tl.store(out_ptr + row * out_row + c, tl.exp(x - lse), mask=c < cols)
""",
    ),
)

# -- 3.5 ---------------------------------------------------------------------------------------------------------------


def _scores_cases(seed):
    g = _rng(seed)

    def case(name, m, n, k, **tile):
        ab = tuple((torch.randn(rows, k, generator=g) * 2.0).to(torch.bfloat16) for rows in (m, n))
        return Case(name, ab, tile)

    large = case("numbers beyond fp16's range", 16, 16, 24)
    large = Case(large.name, (large.args[0] * kinds.LARGE_BF16, large.args[1]))
    return [
        case("one tile, one step", 16, 16, 16),
        case("K of 40", 16, 16, 40),
        case("M 21, N 35, K 72", 21, 35, 72),
        large,
        case("tiles of 32 x 64, steps of 32", 70, 90, 40, BM=32, BN=64, BK=32),
        case("tiles of 64 x 16, steps of 64", 100, 20, 70, BM=64, BK=64),
    ]


def _scores_launch(kernel, a, b, BM=16, BN=16, BK=16):
    import triton

    (m, k), n = a.shape, b.shape[0]
    out = unwritten(m, n)
    kernel[(triton.cdiv(m, BM), triton.cdiv(n, BN))](a, b, out, m, n, k, BM=BM, BN=BN, BK=BK)
    return out


def _scores_tile(case):
    m, n, k = (case.kwargs.get(name, 16) for name in ("BM", "BN", "BK"))
    return max(m * k, n * k, m * n)


SCORES = Exercise(
    id="3.5",
    title="Scores: A times B transposed",
    name="scores_kernel",
    kind="kernel",
    call=_scores_launch,
    cases=_scores_cases,
    reference=lambda a, b, **tile: a @ b.t(),
    outputs=(Output("out", ("row", "column"), dtype="float32"),),
    difficulty=3,
    minutes=25,
    tol=1e-5,
    hints=(
        "tl.dot wants [BM, BK] times [BK, BN]. You need no transpose if you *load* B's tile with k down and n across.",
        "Every load is masked on both axes, with other=0.0: a zero adds nothing to a sum over K. The accumulator is fp32 and lives outside the loop.",
        "bt = tl.load(b_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0); acc = tl.dot(a, bt, acc).",
    ),
    limits=(
        Limit(
            "tiled",
            "peak_tile",
            at_most=_scores_tile,
            text="no block larger than the largest of these tiles: `BM x BK`, `BN x BK`, `BM x BN`",
        ),
        _share(lambda case: len(case.args[0]) * len(case.args[1])),
    ),
    mutants=(
        Mutant(
            "accumulates in bf16",
            "The sum over K is rounded to bf16 after every step: keep the accumulator in fp32.",
            edit=("acc = tl.dot(a, bt, acc)", "acc = (acc + tl.dot(a, bt)).to(tl.bfloat16).to(tl.float32)"),
        ),
        Mutant(
            "products in fp16",
            "The operands were converted to fp16, which ends at 65,504. bf16 goes as far as fp32.",
            edit=("acc = tl.dot(a, bt, acc)", "acc = tl.dot(a.to(tl.float16), bt.to(tl.float16), acc)"),
            caught_by="returns",
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "K tail not masked",
            "The last step over K reads past the row's end, into the next row.",
            edit=(
                (
                    "mask=(m[:, None] < M) & (k[None, :] < K)",
                    "mask=(m[:, None] < M) & (m[:, None] * K + k[None, :] < M * K)",
                ),
                (
                    "mask=(n[None, :] < N) & (k[:, None] < K)",
                    "mask=(n[None, :] < N) & (n[None, :] * K + k[:, None] < N * K)",
                ),
            ),
        ),
        Mutant(
            "B not transposed",
            "B's tile was read as if B were [K, N]: its rows are the n of the result, not the k.",
            edit=(
                "n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K)",
                "(k[:, None] * N + n[None, :]) % (N * K), mask=(n[None, :] < N) & (k[:, None] < K)",
            ),
        ),
        Mutant(
            "only the last step is kept",
            "Each step over K replaces the result: add to the accumulator.",
            edit=("acc = tl.dot(a, bt, acc)", "acc = tl.dot(a, bt)"),
        ),
        Mutant(
            "masked load without other",
            "lanes past K hold undefined values, and the product sums over them.",
            caught_by="runs",
            edit=("mask=(m[:, None] < M) & (k[None, :] < K), other=0.0", "mask=(m[:, None] < M) & (k[None, :] < K)"),
            expect="other",
            recognise=False,
        ),
        Mutant(
            "16 rows and columns for good",
            "a program makes a tile of BM x BN, whatever these are: most of the result was never stored.",
            caught_by="returns",
            edit=(
                ("tl.program_id(0) * BM + tl.arange(0, BM)", "tl.program_id(0) * 16 + tl.arange(0, 16)"),
                ("tl.program_id(1) * BN + tl.arange(0, BN)", "tl.program_id(1) * 16 + tl.arange(0, 16)"),
                ("tl.zeros((BM, BN), dtype=tl.float32)", "tl.zeros((16, 16), dtype=tl.float32)"),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "strides of a tile for good",
            "A row of A or B is K elements long, not one step.",
            edit=("a_ptr + m[:, None] * K + k", "a_ptr + m[:, None] * BK + k"),
        ),
    ),
    variants=(
        """
@triton.jit
def scores_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    k = tl.arange(0, BK)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        kk = step * BK + k
        a = tl.load(a_ptr + m * K + kk, mask=(m < M) & (kk < K), other=0.0)
        b = tl.load(b_ptr + n * K + kk, mask=(n < N) & (kk < K), other=0.0)
        acc += tl.dot(a, tl.trans(b))
    col = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    tl.store(out_ptr + m * N + col, acc, mask=(m < M) & (col < N))
""",
        """
@triton.jit
def scores_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(K):                     # one outer product after another: no tl.dot at all
        a = tl.load(a_ptr + m * K + k, mask=m < M, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + n * K + k, mask=n < N, other=0.0).to(tl.float32)
        acc += a * b
    tl.store(out_ptr + m * N + n, acc, mask=(m < M) & (n < N))
""",
    ),
)

# -- 3.6 ---------------------------------------------------------------------------------------------------------------


def _pool_cases(seed):
    g = _rng(seed)

    def case(name, lengths, dim, slack=0):
        total = sum(lengths)
        x = torch.randn(total + slack, dim, generator=g) + 1.0
        if slack:
            x[total:] = float("nan")
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return Case(name, (x, offsets))

    neighbor = case("a neighbor of NaN between two others", [5, 3, 7], 8)
    neighbor.args[0][5:8] = float("nan")  # its own mean is NaN, nobody else's is
    return [
        case("lengths 2 and 3", [2, 3], 8),
        case("lengths 5, 0, 33, 1, 17", [5, 0, 33, 1, 17], 12),
        case("rows past the last sequence hold NaN", [7, 20], 16, slack=9),
        case("one sequence of 200", [3, 200, 1], 8),
        neighbor,
        Case("8 rows at a time", case("", [20, 0, 9], 8).args, {"rows": 8}),
    ]


def _pool_launch(kernel, x, offsets, rows=16):
    import triton

    out = unwritten(offsets.numel() - 1, x.shape[1])
    kernel[(offsets.numel() - 1,)](
        x, offsets, out, x.shape[1], BLOCK_L=rows, BLOCK_D=triton.next_power_of_2(x.shape[1])
    )
    return out


def _pool(x, offsets, rows=16):
    bounds = offsets.tolist()
    return torch.stack([x[lo:hi].mean(0) if hi > lo else x.new_zeros(x.shape[1]) for lo, hi in zip(bounds, bounds[1:])])


def _pool_tile(case):
    dim = case.args[0].shape[1]
    return case.kwargs.get("rows", 16) * (1 << (dim - 1).bit_length())


POOL = Exercise(
    id="3.6",
    title="The mean of every sequence",
    name="mean_pool_kernel",
    kind="kernel",
    call=_pool_launch,
    cases=_pool_cases,
    reference=_pool,
    outputs=(Output("out", ("sequence", "dim")),),
    difficulty=3,
    minutes=25,
    tol=1e-6,
    hints=(
        "A program loads two offsets, b and b + 1, as scalars. They are the bounds of its own loop.",
        "The last step of the loop reaches past the end of the sequence: the rows there belong to the next one, so the mask compares with end, not with the total.",
        "for start in range(begin, end, BLOCK_L): r = start + tl.arange(0, BLOCK_L); add tl.sum(load(..., other=0.0), axis=0). Divide by tl.maximum(end - begin, 1).",
    ),
    limits=(
        Limit("tiled", "peak_tile", at_most=_pool_tile, text="no block larger than 16 rows of `BLOCK_D` columns"),
        _share(lambda case: (len(case.args[1]) - 1) * case.args[0].shape[1]),
    ),
    mutants=(
        Mutant(
            "tail reads the neighbor",
            "The last block of a sequence also sums rows of the next one: mask rows at or past this sequence's end.",
            edit=("(r[:, None] < end)", "(r[:, None] < tl.load(offsets_ptr + tl.num_programs(0)))"),
        ),
        Mutant(
            "multiplied by a mask",
            "rows of the neighbor are multiplied by 0, and 0 * NaN is NaN.",
            caught_by="returns",
            edit=(
                ("(r[:, None] < end) &", "(r[:, None] < tl.load(offsets_ptr + tl.num_programs(0))) &"),
                (
                    "mask=inside, other=0.0), axis=0\n",
                    "mask=inside, other=0.0) * (r[:, None] < end).to(tl.float32), axis=0\n",
                ),
            ),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "divides by the block's rows",
            "The sum is divided by a rounded-up number of rows: divide by the sequence's own length.",
            edit=("tl.maximum(end - begin, 1)", "tl.maximum(tl.cdiv(end - begin, BLOCK_L) * BLOCK_L, 1)"),
        ),
        Mutant(
            "empty sequence divides by zero",
            "an empty sequence has no mean.",
            caught_by="returns",
            edit=("tl.maximum(end - begin, 1)", "end - begin"),
            expect="NaN",
            recognise=False,
        ),
        Mutant(
            "starts at row 0",
            "Every sequence is read from the first row of x: the offset of its beginning is not used.",
            edit=(
                "for start in range(begin, end, BLOCK_L):\n        r = start + tl.arange(0, BLOCK_L)\n        inside = (r[:, None] < end)",
                "for start in range(0, end - begin, BLOCK_L):\n        r = start + tl.arange(0, BLOCK_L)\n        inside = (r[:, None] < end - begin)",
            ),
        ),
        Mutant(
            "one block only",
            "Only the first 16 rows of a sequence are summed: loop over the whole of it.",
            edit=("range(begin, end, BLOCK_L)", "range(begin, tl.minimum(end, begin + BLOCK_L), BLOCK_L)"),
        ),
    ),
    variants=(
        """
@triton.jit
def mean_pool_kernel(x_ptr, offsets_ptr, out_ptr, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0)
    begin = tl.load(offsets_ptr + b)
    n = tl.load(offsets_ptr + b + 1) - begin
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(n):
        acc += tl.load(x_ptr + (begin + i) * D + d, mask=d < D, other=0.0)
    if n > 0:
        acc = acc / n
    tl.store(out_ptr + b * D + d, acc, mask=d < D)
""",
        """
@triton.jit
def mean_pool_kernel(x_ptr, offsets_ptr, out_ptr, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0)
    first, last = tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for block in range(tl.cdiv(last - first, BLOCK_L)):
        i = block * BLOCK_L + tl.arange(0, BLOCK_L)[:, None]
        mine = (i < last - first) & (d < D)
        acc += tl.load(x_ptr + (first + i) * D + d, mask=mine, other=0.0)
    mean = tl.sum(acc, axis=0) * (1.0 / tl.maximum(last - first, 1))
    tl.store(out_ptr + b * D + tl.arange(0, BLOCK_D), mean, mask=tl.arange(0, BLOCK_D) < D)
""",
    ),
)

# -- 3.7 ---------------------------------------------------------------------------------------------------------------


def _tile_max_cases(seed):
    g = _rng(seed)

    def case(name, rows, cols, width=16, level=-6.0, **height):
        wide = torch.randn(rows, cols + 3, generator=g) + level  # all negative
        wide[:, cols:] = 50.0  # beside the columns that count
        return Case(name, (wide, cols, width), height)

    return [
        case("one tile", 16, 16),
        case("two by two tiles", 32, 20),
        case("one row of three tiles", 9, 40),
        case("three rows of one tile", 48, 7),
        case("two rows of five tiles", 18, 80),
        case("five rows of two tiles", 65, 17),
        case("tiles of 16 rows and 32 columns", 20, 70, width=32),
        case("tiles of 16 rows and 8 columns, numbers near -30,000", 20, 30, width=8, level=-30_000.0),
        case("tiles of 8 rows and 16 columns", 20, 30, height=8),
    ]


def _tile_max_launch(kernel, wide, cols, width, height=16):
    import triton

    x = wide[:, :cols]
    grid = (triton.cdiv(x.shape[0], height), triton.cdiv(x.shape[1], width))
    out = unwritten(*grid)
    kernel[grid](x, out, *x.shape, x.stride(0), BR=height, BC=width)
    return out


def _tile_max(wide, cols, width, height=16):
    rows = [t.amax(0) for t in wide[:, :cols].split(height)]
    return torch.stack([torch.stack([part.max() for part in r.split(width)]) for r in rows])


def _tiles(case):
    rows, cols = len(case.args[0]), case.args[1]
    return -(-rows // case.kwargs.get("height", 16)) * -(-cols // case.args[2])


TILE_MAX = Exercise(
    id="3.7",
    title="Bug hunt: an innocent line",
    name="tile_max_kernel",
    kind="kernel",
    hunt=True,
    call=_tile_max_launch,
    cases=_tile_max_cases,
    reference=_tile_max,
    outputs=(Output("out", ("tile row", "tile column")),),
    difficulty=2,
    minutes=10,
    tol=1e-6,
    limits=(_share(_tiles),),
    hints=(
        "The address of the store is out_ptr + i * tiles_across + j. Write down for a grid of 2 x 3 tiles which element each program stores to.",
        "Element (i, j) of a contiguous tensor with C columns lies at i * C + j. How many columns has out, and along which axis of the grid are they counted?",
        "j runs over tl.num_programs(1) tiles: that is the number of columns of out.",
    ),
    mutants=(
        Mutant(
            "columns cut like rows",
            "The tiles across were counted with the height of a tile.",
            caught_by="runs",
            edit=("tl.num_programs(1)", "tl.cdiv(cols, BR)"),
            recognise=False,
        ),
        Mutant(
            "-1,000 for no number",
            "The places outside got a number that is larger than some that count.",
            edit=('other=float("-inf")', "other=-1000.0"),
        ),
        Mutant(
            "the store is masked",
            "programs whose wrong address lies outside store nothing now, and some results are never written.",
            caught_by="returns",
            edit=(
                ("tiles_across = tl.num_programs(1)", "tiles_across = tl.num_programs(0)"),
                (
                    "tl.store(out_ptr + i * tiles_across + j, largest)",
                    "tl.store(out_ptr + i * tiles_across + j, largest, mask=i * tiles_across + j < tl.num_programs(0) * tl.num_programs(1))",
                ),
            ),
            expect="ever stored",
            recognise=False,
        ),
        Mutant(
            "columns first",
            "The tiles' results were laid out column by column: element (i, j) of out is i * columns + j.",
            edit=(
                ("tiles_across = tl.num_programs(1)", "tiles_across = tl.num_programs(0)"),
                ("i * tiles_across + j", "j * tiles_across + i"),
            ),
        ),
        Mutant(
            "the address wraps around",
            "an address that wraps around stays inside, and two programs still store to one element.",
            caught_by="runs",
            edit=(
                ("tiles_across = tl.num_programs(1)", "tiles_across = tl.num_programs(0)"),
                ("i * tiles_across + j,", "(i * tiles_across + j) % (tl.num_programs(0) * tl.num_programs(1)),"),
            ),
            expect="different",
            recognise=False,
        ),
        Mutant(
            "one column of tiles more",
            "rows of out were taken to be one element longer than they are.",
            caught_by="runs",
            edit=("tl.num_programs(1)", "tl.num_programs(1) + 1"),
            expect="outside",
            recognise=False,
        ),
        Mutant(
            "rounds the number of tiles down",
            "the last tile of a row counts as well, though it is not full.",
            caught_by="runs",
            edit=("tl.num_programs(1)", "cols // BC"),
            recognise=False,
        ),
        Mutant(
            "tails filled with 0",
            "Lanes past the edge were filled with 0, which is larger than every number of a negative tile.",
            edit=('other=float("-inf")', "other=0.0"),
        ),
        Mutant(
            "columns not masked",
            "The last tile of a row reads past the row's end.",
            edit=(
                "inside = (r[:, None] < rows) & (c[None, :] < cols)",
                "inside = (r[:, None] < rows) & (c[None, :] < x_row)",
            ),
        ),
    ),
    variants=(
        (("tiles_across = tl.num_programs(1)", "tiles_across = tl.cdiv(cols, BC)"),),
        (
            ("    tiles_across = tl.num_programs(1)\n", ""),
            ("out_ptr + i * tiles_across + j", "out_ptr + tl.num_programs(1) * tl.program_id(0) + j"),
        ),
    ),
)

# -- 3.8 ---------------------------------------------------------------------------------------------------------------


def _best_cases(seed):
    g = _rng(seed)

    def case(name, m, n, dim=16, shift=0.0, first=16.0, **tile):
        # small whole numbers: products are exact in fp32 whatever the order, so that equal ones are equal
        q, k = (torch.randint(-4, 5, (rows, dim), generator=g).float() for rows in (m, n))
        q[:, 0], k[:, 0] = first, k[:, 0] + shift
        return Case(name, (q.to(torch.bfloat16), k.to(torch.bfloat16)), tile)

    equal = case("many equal keys", 20, 50)
    equal.args[1][:] = equal.args[1][torch.randint(0, 6, (50,), generator=g)]
    rising = case("the best key comes last", 16, 37)
    rising.args[1][:, 0] = torch.arange(37) - 18
    falling = case("the best key comes first", 5, 37)
    falling.args[1][:, 0] = 18 - torch.arange(37)
    return [
        case("one tile, one block of keys", 16, 16),
        case("one key", 3, 1),
        case("all products negative, 21 keys", 16, 21, shift=-40.0),
        case("all products below -30,000", 9, 20, shift=-128.0, first=256.0),
        case("33 queries, 40 keys, D 32", 33, 40, dim=32),
        case("32 queries per tile", 40, 40, BM=32),
        case("32 keys per block", 20, 60, BN=32),
        equal,
        rising,
        falling,
    ]


def _best_launch(kernel, q, k, BM=16, BN=16):
    import torch
    import triton

    best = unwritten(len(q))
    which = torch.full((len(q),), -1, dtype=torch.int32)
    kernel[(triton.cdiv(len(q), BM),)](q, k, best, which, len(q), len(k), D=q.shape[1], BM=BM, BN=BN)
    return best, which


def _best(q, k, BM=16, BN=16):
    scores = q @ k.t()
    best = scores.amax(1)
    numbers = torch.where(scores == best[:, None], torch.arange(scores.shape[1]), scores.shape[1])
    return best, numbers.amin(1).to(torch.int32)


BEST = Exercise(
    id="3.8",
    title="The best key of each query",
    name="best_key_kernel",
    kind="kernel",
    call=_best_launch,
    cases=_best_cases,
    reference=_best,
    outputs=(Output("best", ("query",), dtype="float32"), Output("which", ("query",))),
    difficulty=3,
    minutes=30,
    tol=1e-6,
    limits=(
        Limit("tiled", "peak_tile", at_most=512, text="no block larger than 512 elements"),
        _share(lambda case: 2 * len(case.args[0])),
    ),
    hints=(
        "Carry two blocks of BM numbers: the best product so far, and whose it is. A step over BN keys makes a [BM, BN] block of scores; reduce it along the keys.",
        "Columns past N are no keys: set their scores to minus infinity before you reduce. A step replaces what is carried only where its maximum is larger, not where it is equal.",
        "s = tl.where(n[None, :] < N, tl.dot(q, kt), -inf); top = tl.max(s, axis=1); which = tl.where(top > best, start + tl.argmax(s, axis=1), which); best = tl.maximum(best, top), in this order.",
    ),
    mutants=(
        Mutant(
            "best from -1e4",
            "The best so far begins at a number that all products of a query may lie below.",
            edit=('best = tl.full((BM,), float("-inf"), tl.float32)', "best = tl.full((BM,), -1.0e4, tl.float32)"),
        ),
        Mutant(
            "columns past N count",
            "Scores of keys that do not exist are 0, and 0 wins where all products are negative.",
            edit=('tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))', "tl.dot(q, kt)"),
        ),
        Mutant(
            "of equal keys the last",
            "Where two keys are equally good, the later block won: replace only what is smaller.",
            edit=("top > best", "top >= best"),
        ),
        Mutant(
            "position inside the block",
            "which holds the position inside a block of keys: the block's start is missing.",
            edit=("start + tl.argmax(s, axis=1)", "tl.argmax(s, axis=1)"),
        ),
        Mutant(
            "best updated first",
            "best was updated before it was compared, so no step is ever better than it.",
            edit=(
                "        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n        best = tl.maximum(best, top)\n",
                "        best = tl.maximum(best, top)\n        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n",
            ),
        ),
        Mutant(
            "only the last block",
            "Each step replaces the result, whether it is better or not.",
            edit=(
                ("tl.where(top > best, start + tl.argmax(s, axis=1), which)", "start + tl.argmax(s, axis=1)"),
                ("best = tl.maximum(best, top)", "best = top"),
            ),
        ),
        Mutant(
            "best starts at 0",
            "The best product starts at 0 and never goes below it.",
            edit=('tl.full((BM,), float("-inf"), tl.float32)', "tl.zeros((BM,), tl.float32)"),
        ),
        Mutant(
            "reduced along the queries",
            "The block of scores was reduced along its queries: axis 1 holds the keys.",
            edit=(("tl.max(s, axis=1)", "tl.max(s, axis=0)"), ("tl.argmax(s, axis=1)", "tl.argmax(s, axis=0)")),
        ),
        Mutant(
            "all keys at once",
            "right numbers, but all scores of a tile of queries stood in registers.",
            caught_by="tiled",
            source="""
@triton.jit
def best_key_kernel(q_ptr, k_ptr, best_ptr, which_ptr, M, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, d, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, 64)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :], mask=m[:, None] < M, other=0.0)
    kt = tl.load(k_ptr + n[None, :] * D + d[:, None], mask=n[None, :] < N, other=0.0)
    s = tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))
    tl.store(best_ptr + m, tl.max(s, axis=1), mask=m < M)
    tl.store(which_ptr + m, tl.argmax(s, axis=1), mask=m < M)
""",
            expect="512",
            recognise=False,
        ),
    ),
    variants=(
        """
@triton.jit
def best_key_kernel(q_ptr, k_ptr, best_ptr, which_ptr, M, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    d = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + m * D + d, mask=m < M, other=0.0)
    best = tl.full((BM, 1), -1e30, tl.float32)
    which = tl.full((BM, 1), -1, tl.int32)
    for step in range(tl.cdiv(N, BN)):
        n = step * BN + tl.arange(0, BN)[:, None]
        k = tl.load(k_ptr + n * D + d, mask=n < N, other=0.0)
        column = step * BN + tl.arange(0, BN)[None, :]
        s = tl.where(column < N, tl.dot(q, tl.trans(k)), -1e30)
        top = tl.max(s, axis=1, keep_dims=True)
        first = tl.min(tl.where(s == top, column, N), axis=1, keep_dims=True)
        better = top > best
        best = tl.where(better, top, best)
        which = tl.where(better, first, which)
    tl.store(best_ptr + m, best, mask=m < M)
    tl.store(which_ptr + m, which, mask=m < M)
""",
        """
@triton.jit
def best_key_kernel(q_ptr, k_ptr, best_ptr, which_ptr, M, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :], mask=m[:, None] < M, other=0.0).to(tl.float32)
    best = tl.full((BM,), float("-inf"), tl.float32)
    which = tl.zeros((BM,), tl.int32)
    for i in range(N):                      # from the last key to the first: then equal ones replace
        n = N - 1 - i
        s = tl.sum(q * tl.load(k_ptr + n * D + d).to(tl.float32)[None, :], axis=1)
        which = tl.where(s >= best, n, which)
        best = tl.maximum(best, s)
    tl.store(best_ptr + m, best, mask=m < M)
    tl.store(which_ptr + m, which, mask=m < M)
""",
    ),
)

EXERCISES = [AXPY, TRANSPOSE, LSE, LONG, SCORES, POOL, TILE_MAX, BEST]
