"""Answers to chapter 03's exercises."""

from tests.course.answers import right, wrong

STORE = "    tl.store(out_ptr + i * tiles_across + j, largest)\n"
BLOCK = """        s = tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))
        top = tl.max(s, axis=1)
        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)
        best = tl.maximum(best, top)
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------ 3.1
    wrong(
        "3.1", "the factor in bf16", ("a * x + y, mask=valid)", "a.to(tl.bfloat16).to(tl.float32) * x + y, mask=valid)")
    ),
    wrong("3.1", "y is forgotten", ("a * x + y, mask=valid)", "a * x, mask=valid)")),
    wrong(
        "3.1",
        "added to what out holds",
        ("tl.store(out_ptr + i, a * x + y, mask=valid)", "tl.atomic_add(out_ptr + i, a * x + y, mask=valid)"),
    ),
    wrong("3.1", "the last element is left out", ("valid = i < n", "valid = i < n - 1")),
    wrong(
        "3.1", "blocks begin at their number", ("tl.program_id(0) * BLOCK + tl.arange", "tl.program_id(0) + tl.arange")
    ),
    wrong("3.1", "a as a whole number", ("a * x + y, mask=valid)", "a.to(tl.int32) * x + y, mask=valid)")),
    wrong("3.1", "in fp16", ("a * x + y, mask=valid)", "(a * x + y).to(tl.float16).to(tl.float32), mask=valid)")),
    wrong(
        "3.1",
        "wraps around instead of a mask",
        ("    valid = i < n\n", "    valid = i < n\n    i = i % n\n"),
        ("a * x + y, mask=valid)", "a * x + y)"),
    ),
    right(
        "3.1",
        "clamped loads",
        ("x = tl.load(x_ptr + i, mask=valid, other=0.0)", "x = tl.load(x_ptr + tl.minimum(i, n - 1))"),
        ("a * x + y, mask=valid)", "tl.fma(x, x * 0 + a, y), mask=valid)"),
    ),
    right(
        "3.1",
        "strided halves of a block",
        source="""
@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    base = tl.program_id(axis=0) * BLOCK
    for odd in range(2):
        at = base + odd + 2 * tl.arange(0, BLOCK // 2)
        ok = at < n
        tl.store(out_ptr + at, tl.load(y_ptr + at, ok) + a * tl.load(x_ptr + at, ok), ok)
""",
    ),
    # ------------------------------------------------------------------------------------------ 3.2
    wrong("3.2", "out contiguous for good", ("c * out_row + r * out_col", "c * rows + r")),
    wrong("3.2", "columns of x side by side", ("r * x_row + c * x_col", "r * x_row + c")),
    wrong("3.2", "x's strides for out", ("c * out_row + r * out_col", "c * x_col + r * x_row")),
    wrong("3.2", "tiles begin at their number", ("r = tl.program_id(0) * BLOCK +", "r = tl.program_id(0) +")),
    wrong(
        "3.2",
        "square grids only",
        ("c = tl.program_id(1) * BLOCK", "c = (tl.program_id(1) % tl.num_programs(0)) * BLOCK"),
    ),
    wrong(
        "3.2",
        "whole tiles only",
        ("inside = (r < rows) & (c < cols)", "inside = (r < rows // BLOCK * BLOCK) & (c < cols // BLOCK * BLOCK)"),
    ),
    wrong(
        "3.2",
        "transposed twice",
        (
            "tl.store(out_ptr + c * out_row + r * out_col, tile, mask=inside)",
            "tl.store(out_ptr + c * out_row + r * out_col, tl.trans(tile), mask=inside)",
        ),
    ),
    wrong(
        "3.2",
        "row by row",
        source="""
@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in range(BLOCK):
        r = tl.program_id(0) * BLOCK + i
        ok = (c < cols) & (r < rows)
        tl.store(out_ptr + c * out_row + r * out_col, tl.load(x_ptr + r * x_row + c * x_col, ok), ok)
""",
    ),
    right(
        "3.2",
        "a flat block",
        source="""
@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK * BLOCK)
    r = tl.program_id(0) * BLOCK + lane // BLOCK
    c = tl.program_id(1) * BLOCK + lane % BLOCK
    ok = tl.where(r < rows, c < cols, False)
    value = tl.load(x_ptr + (r * x_row + c * x_col), mask=ok)
    tl.store(out_ptr + (c * out_row + r * out_col), value, mask=ok)
""",
    ),
    # ------------------------------------------------------------------------------------------ 3.3
    wrong("3.3", "spare lanes are -1e4", ('other=float("-inf")', "other=-1.0e4")),
    wrong("3.3", "maximum at least 0", ("m = tl.max(x, axis=0)", "m = tl.maximum(tl.max(x, axis=0), 0.0)")),
    wrong(
        "3.3",
        "maximum of the magnitudes",
        ("m = tl.max(x, axis=0)", "m = tl.max(tl.where(c < cols, tl.abs(x), 0.0), axis=0)"),
    ),
    wrong("3.3", "the last column is left out", ("mask=c < cols,", "mask=c < cols - 1,")),
    wrong(
        "3.3",
        "stored by every lane",
        (
            "tl.store(out_ptr + row, m + tl.log(tl.sum(tl.exp(x - m), axis=0)))",
            "tl.store(out_ptr + row + c * 0, m + c * 0 + tl.log(tl.sum(tl.exp(x - m), axis=0)))",
        ),
    ),
    wrong("3.3", "two for e", ("tl.exp(x - m)", "tl.exp2(x - m)")),
    wrong(
        "3.3",
        "1 percent more in the sum",
        ("tl.log(tl.sum(tl.exp(x - m), axis=0))", "tl.log(1.01 * tl.sum(tl.exp(x - m), axis=0))"),
    ),
    wrong("3.3", "the first column for the maximum", ("m = tl.max(x, axis=0)", "m = tl.load(x_ptr + row * x_row)")),
    right(
        "3.3",
        "two columns at a time",
        source="""
@triton.jit
def row_lse_kernel(x_ptr, out_ptr, cols, x_row, BLOCK: tl.constexpr):
    start = x_ptr + tl.program_id(0) * x_row
    m, l = float("-inf"), 0.0
    for i in range(cols):
        x = tl.load(start + i)
        new = tl.maximum(m, x)
        l = l * tl.exp(m - new) + tl.exp(x - new)
        m = new
    tl.store(out_ptr + tl.program_id(0), m + tl.log(l))
""",
    ),
    # ------------------------------------------------------------------------------------------ 3.4
    wrong("3.4", "maximum from -1e4", ('m = float("-inf")', "m = -1.0e4")),
    wrong("3.4", "the last block's sum", ("l = l * tl.exp(m - m_new) +", "l = l * 0.0 +")),
    wrong(
        "3.4",
        "the tail is not walked",
        (
            "    l = 0.0\n    for start in range(0, cols, BLOCK):",
            "    l = 0.0\n    for start in range(0, cols // BLOCK * BLOCK, BLOCK):",
        ),
    ),
    wrong(
        "3.4",
        "blocks of 32 for good",
        ("    l = 0.0\n    for start in range(0, cols, BLOCK):", "    l = 0.0\n    for start in range(0, cols, 32):"),
    ),
    wrong(
        "3.4",
        "sum in bf16",
        ("        m = m_new\n", "        l = l.to(tl.bfloat16).to(tl.float32)\n        m = m_new\n"),
    ),
    wrong("3.4", "1 percent off", ("tl.exp(x - m) / l,", "tl.exp(x - m) / (l * 1.01),")),
    wrong("3.4", "Triton's softmax", ("tl.exp(x - m) / l,", "tl.softmax(x) + 0 * l,")),
    wrong(
        "3.4",
        "maximum of the first block of all rows",
        (
            "m_new = tl.maximum(m, tl.max(x, axis=0))",
            "m_new = tl.maximum(m, tl.max(tl.load(x_ptr + row * x_row + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < cols, other=0.0), axis=0))",
        ),
    ),
    right(
        "3.4",
        "backwards, and a factor instead of a division",
        (
            "    l = 0.0\n    for start in range(0, cols, BLOCK):\n        c = start + tl.arange(0, BLOCK)\n",
            "    l = 0.0\n    for b in range(tl.cdiv(cols, BLOCK)):\n        c = (tl.cdiv(cols, BLOCK) - 1 - b) * BLOCK + tl.arange(0, BLOCK)\n",
        ),
        ("tl.exp(x - m) / l,", "tl.exp(x - (m + tl.log(l))),"),
    ),
    # ------------------------------------------------------------------------------------------ 3.5
    wrong("3.5", "the last step over K is left out", ("range(0, K, BK)", "range(0, K // BK * BK, BK)")),
    wrong(
        "3.5",
        "rounded to bf16 at the end",
        ("n[None, :], acc, mask", "n[None, :], acc.to(tl.bfloat16).to(tl.float32), mask"),
    ),
    wrong(
        "3.5",
        "operands in fp8",
        ("acc = tl.dot(a, bt, acc)", "acc = tl.dot(a.to(tl.float8e5).to(tl.bfloat16), bt, acc)"),
    ),
    wrong(
        "3.5", "stored transposed", ("out_ptr + m[:, None] * N + n[None, :]", "out_ptr + n[None, :] * M + m[:, None]")
    ),
    wrong("3.5", "columns of B not masked", ("(n[None, :] < N) & (k[:, None] < K), other", "(k[:, None] < K), other")),
    wrong("3.5", "K of both exchanged for N", ("b_ptr + n[None, :] * K + k", "b_ptr + n[None, :] * N + k")),
    wrong("3.5", "everything in one step", ("range(0, K, BK)", "range(0, BK, BK)")),
    wrong("3.5", "absolute products", ("acc = tl.dot(a, bt, acc)", "acc += tl.abs(tl.dot(a, bt))")),
    right(
        "3.5",
        "steps from the last to the first",
        (
            "    for start in range(0, K, BK):\n        k = start + tl.arange(0, BK)\n",
            "    for t in range(tl.cdiv(K, BK)):\n        k = (tl.cdiv(K, BK) - 1 - t) * BK + tl.arange(0, BK)\n",
        ),
        ("acc = tl.dot(a, bt, acc)", "acc = acc + tl.dot(a, bt, out_dtype=tl.float32)"),
    ),
    # ------------------------------------------------------------------------------------------ 3.6
    wrong("3.6", "the tail is not walked", ("range(begin, end, BLOCK_L)", "range(begin, end - BLOCK_L + 1, BLOCK_L)")),
    wrong(
        "3.6",
        "columns not masked",
        ("inside = (r[:, None] < end) & (d[None, :] < D)", "inside = (r[:, None] < end) & (d[None, :] < BLOCK_D)"),
    ),
    wrong("3.6", "blocks of 16 for good", ("range(begin, end, BLOCK_L)", "range(begin, end, 16)")),
    wrong(
        "3.6",
        "the mean of block means",
        ("        total += tl.sum(\n", "        total += 1.0 / tl.minimum(end - start, BLOCK_L) * tl.sum(\n"),
        ("total / count", "total / tl.maximum(tl.cdiv(end - begin, BLOCK_L), 1)"),
    ),
    wrong("3.6", "the sum", ("total / count", "total")),
    wrong("3.6", "empty sequences store nothing", ("mask=d < D)", "mask=(d < D) & (end > begin))")),
    wrong("3.6", "whole numbers", ("total / count", "(total.to(tl.int32) // count).to(tl.float32)")),
    wrong("3.6", "sum in bf16", ("total / count", "total.to(tl.bfloat16).to(tl.float32) / count")),
    wrong(
        "3.6",
        "the next sequence's length",
        ("end - begin, 1)", "tl.load(offsets_ptr + tl.minimum(b + 2, tl.num_programs(0))) - end, 1)"),
    ),
    right(
        "3.6",
        "a running mean",
        (
            "    total = tl.zeros((BLOCK_D,), dtype=tl.float32)\n",
            "    total = tl.zeros((BLOCK_D,), dtype=tl.float32)\n    inverse = 1.0 / tl.maximum(end - begin, 1)\n",
        ),
        ("total / count", "total * inverse"),
    ),
    # ------------------------------------------------------------------------------------------ 3.7
    wrong(
        "3.7",
        "a mask on the store",
        ("tl.num_programs(1)", "tl.num_programs(0)"),
        (STORE, STORE.replace(", largest)", ", largest, mask=j < tiles_across)")),
    ),
    wrong("3.7", "j down the rows", (STORE, "    tl.store(out_ptr + j * tl.num_programs(0) + i, largest)\n")),
    wrong("3.7", "columns for tiles", ("tl.num_programs(1)", "cols")),
    wrong("3.7", "rounded down", ("tl.num_programs(1)", "cols // BC")),
    wrong("3.7", "tiles of rows' width", ("tl.num_programs(1)", "tl.cdiv(cols, BR)")),
    wrong("3.7", "by the stride", ("tl.num_programs(1)", "tl.cdiv(x_row, BC)")),
    wrong("3.7", "the larger of both", ("tl.num_programs(1)", "tl.maximum(tl.num_programs(0), tl.num_programs(1))")),
    wrong(
        "3.7",
        "programs exchanged",
        ("i, j = tl.program_id(0), tl.program_id(1)", "i, j = tl.program_id(1), tl.program_id(0)"),
    ),
    wrong("3.7", "0 in masked places", ('other=float("-inf")', "other=0.0")),
    wrong("3.7", "-1e9 in masked places", ('other=float("-inf")', "other=-1000.0")),
    wrong("3.7", "rows cols apart", ("r[:, None] * x_row", "r[:, None] * cols")),
    wrong(
        "3.7",
        "no mask on the columns",
        ("(r[:, None] < rows) & (c[None, :] < cols)", "(r[:, None] < rows) & (c[None, :] < x_row)"),
    ),
    wrong(
        "3.7",
        "largest of absolute values",
        ("tl.max(tl.max(x, axis=1), axis=0)", "tl.max(tl.max(tl.abs(x), axis=1), axis=0)"),
    ),
    wrong(
        "3.7",
        "every program stores row i",
        (
            STORE,
            "    for t in range(0, tiles_across):\n        tl.store(out_ptr + i * tiles_across + t, largest, mask=t >= j)\n",
        ),
    ),
    right("3.7", "counted from the columns", ("tl.num_programs(1)", "tl.cdiv(cols, BC)")),
    right("3.7", "one maximum of a flat block", ("tl.max(tl.max(x, axis=1), axis=0)", "tl.max(tl.max(x, axis=0))")),
    # ------------------------------------------------------------------------------------------ 3.8
    wrong(
        "3.8", "best from 0", ('best = tl.full((BM,), float("-inf"), tl.float32)', "best = tl.zeros((BM,), tl.float32)")
    ),
    wrong(
        "3.8",
        "best from -1e4",
        ('best = tl.full((BM,), float("-inf"), tl.float32)', "best = tl.full((BM,), -1.0e4, tl.float32)"),
    ),
    wrong("3.8", "a later equal one wins", ("top > best", "top >= best")),
    wrong(
        "3.8",
        "keys behind the end",
        (BLOCK, BLOCK.replace('tl.where(n[None, :] < N, tl.dot(q, kt), float("-inf"))', "tl.dot(q, kt)")),
    ),
    wrong("3.8", "0 behind the end", (BLOCK, BLOCK.replace('float("-inf"))', "0.0)"))),
    wrong("3.8", "position inside the block", ("start + tl.argmax(s, axis=1)", "tl.argmax(s, axis=1)")),
    wrong("3.8", "block's number", ("start + tl.argmax(s, axis=1)", "start // BN + tl.argmax(s, axis=1)")),
    wrong(
        "3.8",
        "the last block only",
        ("which = tl.where(top > best, start + tl.argmax(s, axis=1), which)", "which = start + tl.argmax(s, axis=1)"),
    ),
    wrong(
        "3.8",
        "best first",
        (
            BLOCK,
            BLOCK.replace(
                "        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n        best = tl.maximum(best, top)\n",
                "        best = tl.maximum(best, top)\n        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n",
            ),
        ),
    ),
    wrong(
        "3.8",
        "one best for the whole tile",
        (BLOCK, BLOCK.replace("tl.max(s, axis=1)\n", "tl.max(s, axis=1) * 0 + tl.max(tl.max(s, axis=1), axis=0)\n")),
    ),
    wrong("3.8", "argmin", ("tl.argmax(", "tl.argmin(")),
    wrong("3.8", "over the queries", ("tl.argmax(s, axis=1)", "tl.argmax(s, axis=0)")),
    wrong("3.8", "whole blocks only", ("range(0, N, BN)", "range(0, N // BN * BN, BN)")),
    wrong(
        "3.8",
        "rows that do not exist stored",
        ("tl.store(which_ptr + m, which, mask=m < M)", "tl.store(which_ptr + m, which)"),
    ),
    wrong(
        "3.8",
        "ties to the higher position",
        ("start + tl.argmax(s, axis=1)", "start + BN - 1 - tl.argmax(tl.flip(s, 1), axis=1)"),
    ),
    wrong("3.8", "largest magnitude", (BLOCK, BLOCK.replace("tl.dot(q, kt), float", "tl.abs(tl.dot(q, kt)), float"))),
    wrong(
        "3.8",
        "best rounded to bf16",
        ("tl.store(best_ptr + m, best,", "tl.store(best_ptr + m, best.to(tl.bfloat16).to(tl.float32),"),
    ),
    wrong(
        "3.8",
        "all scores in one block",
        (
            "    for start in range(0, N, BN):\n        n = start + tl.arange(0, BN)\n",
            "    for start in range(0, N, 8 * BN):\n        n = start + tl.arange(0, 8 * BN)\n",
        ),
    ),
    wrong("3.8", "16 columns for good", ("    d = tl.arange(0, D)\n", "    d = tl.arange(0, 16)\n")),
    right(
        "3.8",
        "max with its indices",
        (
            BLOCK,
            BLOCK.replace(
                "        top = tl.max(s, axis=1)\n        which = tl.where(top > best, start + tl.argmax(s, axis=1), which)\n",
                "        top, place = tl.max(s, axis=1, return_indices=True)\n        better = top > best\n        which = tl.where(better, place + start, which)\n",
            ),
        ),
    ),
    right(
        "3.8",
        "from the last block backwards",
        (
            "    for start in range(0, N, BN):\n",
            "    blocks = tl.cdiv(N, BN)\n    for t in range(0, blocks):\n        start = (blocks - 1 - t) * BN\n",
        ),
        ("top > best", "top >= best"),
    ),
]
